"""What the Trainer hands to the kernel of a step, which here is torch, and what it does with what comes back."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import weft
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from weft._vertex.runtime import persistent, training
from weft.vertex import Trainer, models

from tests.common import relative_error
from tests.vertex.cells import BINARY, rows
from tests.vertex.training import (
    BOUND,
    ONE_KERNEL,
    OPTIMIZERS,
    C,
    H,
    X,
    batches,
    check_against_loop,
    check_states,
    check_unchanged,
    everything,
    loop_step,
    tree_lstm,
)


@pytest.fixture
def emulated(monkeypatch):
    """persistent.train in plain torch on the CPU, from the request alone, late as a device is."""
    launches = []

    class Event:
        """A step that runs when somebody waits for it, or when asked whether it is there for the second time."""

        def __init__(self, run):
            self.run, self.asked = run, 0

        def query(self):
            self.asked += 1
            if self.asked > 1:
                self.synchronize()
            return self.run is None

        def synchronize(self):
            for event in [*launches]:
                launches.remove(event)
                event.run = event.run()
                if event is self:
                    break

    def train(call, request):
        numbers = torch.full((2,), math.nan)
        event = Event(lambda: step(call, request, numbers))
        launches.append(event)
        return training.Launched(numbers, event)

    def step(call, request, numbers):
        parameters = [u.parameter for u in request.updates]
        grads = [p.grad for p in parameters]
        with torch.enable_grad():
            (y,) = call.run()
            y = y if request.roots is None else y[request.roots.roots]
            weight, bias = request.operands.weight, request.operands.bias
            y = y if weight is None else F.linear(y, weight, bias)
            targets = request.targets
            if request.operands.loss == "cross_entropy":
                wrong = (targets != request.ignore_index) & ((targets < 0) | (targets >= y.shape[1]))
                request.refused[0] = max(request.refused[0], wrong.any())
                loss = F.cross_entropy(
                    y, targets.masked_fill(wrong, request.ignore_index), ignore_index=request.ignore_index
                )
            else:
                loss = F.mse_loss(y, targets)
            found = torch.autograd.grad(loss, parameters, materialize_grads=True)
        assert [p.grad for p in parameters] == grads
        numbers.copy_(torch.stack((loss.detach(), request.refused[0])))
        if request.refused[0]:
            return
        for (p, kind, first, second, which), g in zip(request.updates, found, strict=True):
            p, numbers_of = p.data, request.numbers[which]
            assert all(type(x) is float for x in numbers_of)
            if kind == "sgd":
                lr, momentum, dampening, decay, nesterov = numbers_of
                g = g + decay * p
                if momentum:
                    first.mul_(momentum).add_(g, alpha=1 - dampening)
                    g = g + momentum * first if nesterov else first
                p.sub_(lr * g)
            else:
                size, of_first, beta2, of_second, eps, correction, kept, decay = numbers_of
                p.mul_(kept)
                g = g + decay * p
                first.add_((g - first) * of_first)
                second.mul_(beta2).add_(g * g, alpha=of_second)
                p.sub_(size * first / (second.sqrt() / correction + eps))

    monkeypatch.setattr(persistent, "train", train)
    monkeypatch.setattr(persistent, "training_obstacle", lambda compiled, call, head, loss: None)
    monkeypatch.setattr(persistent, "trains_faster", lambda _, call: call.rows["input"].shape[0] < 10**6)
    inner = Trainer._lasting_obstacle

    def obstacle(trainer, call, parts):
        return inner(trainer, call._replace(device=torch.device("cuda")), parts)

    monkeypatch.setattr(Trainer, "_lasting_obstacle", obstacle)
    return launches


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_the_optimizers(name, emulated):
    trainer = check_against_loop(models.TreeLSTM(X, H), nn.Linear(H, C), OPTIMIZERS[name], batches(tree_lstm, 5), "cpu")
    assert weft.explain(trainer, BINARY, rows(BINARY, X)).one_kernel == (name in ONE_KERNEL)


def test_each_batch_is_a_kernel_or_a_loop_by_its_size(emulated, monkeypatch):
    """By itself; where the persistent executor is asked for, all are kernels."""
    monkeypatch.setattr(persistent, "trains_faster", lambda _, call: call.rows["input"].shape[0] < 10)
    for executor in ("auto", "persistent"):
        cell = models.TreeLSTM(X, C)
        trainer = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1), executor=executor)
        kernels = []
        for graphs in (BINARY, weft.Graphs.batch([BINARY] * 4), BINARY):
            x = rows(graphs, X)
            kernels.append(weft.explain(trainer, graphs, x).one_kernel)
            trainer.step(graphs, x, torch.randint(C, (graphs.num_vertices,)))
            assert len(emulated) == kernels[-1]
            trainer.sync()
        assert kernels == [True, executor == "persistent", True]


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("at", ["vertices", "roots"])
@pytest.mark.parametrize("head", [True, False])
def test_requests(head, at, loss, emulated):
    data = batches(tree_lstm, 4, loss=loss, at=at)
    linear = nn.Linear(H, C) if head else None
    cell = models.TreeLSTM(X, H if head else C)
    check_against_loop(cell, linear, OPTIMIZERS["adam"], data, "cpu", loss=loss, at=at)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "fused"])
@pytest.mark.parametrize("started", [False, True])
def test_refused_steps_are_undone(started, name, emulated):
    """Also the one that was launched before the host knew."""
    cell = models.TreeLSTM(X, C)
    optimizer = OPTIMIZERS[name]([*cell.parameters()])
    trainer = Trainer(cell, optimizer)
    (graphs, x, targets), other = batches(tree_lstm, 2)
    if started:
        trainer.step(*other)
    last = trainer.sync()
    before = everything(cell, optimizer)
    bad = targets.clone()
    bad[0] = C
    for also in (lambda: trainer.step(*other), trainer.sync):
        assert trainer.step(graphs, x, bad) == last
        with pytest.raises(IndexError, match="of the step before is not in"):
            also()
        check_unchanged(before, cell, optimizer)
        assert trainer.sync() == last
    twin, twin_optimizer = copy.deepcopy((cell, optimizer))
    trainer.step(graphs, x, targets)
    assert math.isclose(trainer.sync(), loop_step(twin, twin_optimizer, graphs, x, targets), rel_tol=1e-5)
    check_states(optimizer, twin_optimizer, 10 * BOUND)


def test_a_launch_that_fails_changes_nothing(emulated, monkeypatch):
    cell = models.TreeLSTM(X, C)
    optimizer = torch.optim.Adam(cell.parameters(), 0.01)
    trainer = Trainer(cell, optimizer)
    before = everything(cell, optimizer)

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(persistent, "train", fail)
    ((graphs, x, targets),) = batches(tree_lstm, 1)
    with pytest.raises(RuntimeError, match="no memory"):
        trainer.step(graphs, x, targets)
    check_unchanged(before, cell, optimizer)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_memory_that_is_missing_changes_nothing(which, emulated, monkeypatch):
    """Of the flag, then of states: what a first momentum buffer becomes must not depend on it."""
    cell = models.TreeLSTM(X, C)
    optimizer = torch.optim.SGD(cell.parameters(), 0.1, momentum=0.9, dampening=0.5)
    twin, other = copy.deepcopy((cell, optimizer))
    trainer = Trainer(cell, optimizer)
    ((graphs, x, targets),) = batches(tree_lstm, 1)
    before, zeros, zeros_like, made = everything(cell, optimizer), torch.zeros, torch.zeros_like, []

    def of_less(make):
        def some(*args, **options):
            made.append(0)
            if len(made) == which + 1:
                raise RuntimeError("no memory")
            return make(*args, **options)

        return some

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", of_less(zeros))
        patch.setattr(torch, "zeros_like", of_less(zeros_like))
        with pytest.raises(RuntimeError, match="no memory"):
            trainer.step(graphs, x, targets)
    check_unchanged(before, cell, optimizer)
    for _ in range(2):
        trainer.step(graphs, x, targets)
        assert trainer.sync() == pytest.approx(loop_step(twin, other, graphs, x, targets), rel=1e-5)
    assert all(relative_error(p, q) <= BOUND for p, q in zip(cell.parameters(), twin.parameters(), strict=True))


def test_schedulers_know_of_the_kernels_steps(emulated, recwarn):
    cell = models.TreeLSTM(X, C)
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    trainer = Trainer(cell, optimizer)
    for batch in batches(tree_lstm, 2):
        assert weft.explain(trainer, *batch[:2]).one_kernel
        trainer.step(*batch)
        scheduler.step()
    assert not recwarn.list and optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def set_group(**values):
    return lambda optimizer, head: optimizer.param_groups[0].update(values)


def set_counter(optimizer, head):
    """Of one parameter alone."""
    [*optimizer.state.values()][1]["step"].fill_(40)


def set_moment(optimizer, head):
    state = next(iter(optimizer.state.values()))
    key = "exp_avg" if "exp_avg" in state else "momentum_buffer"
    state[key] = torch.ones_like(state[key])


def load(optimizer, head):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def leave_out(optimizer, head):
    optimizer.param_groups[0]["params"].pop(1)


def swap(optimizer, head):
    params = optimizer.param_groups[0]["params"]
    params[0], params[1] = params[1], params[0]


def split_groups(optimizer, head):
    group, *others = optimizer.param_groups
    optimizer.param_groups = [
        {**group, "params": group["params"][:2]},
        {**group, "params": group["params"][2:], "lr": 0.2},
        *others,
    ]


def freeze(optimizer, head):
    head.weight.requires_grad_(False)


def replace_data(optimizer, head):
    head.weight.data = head.weight.detach() + 1


CHANGES = {
    "lr": set_group(lr=0.03),
    "momentum": set_group(momentum=0.5),
    "decay": set_group(weight_decay=0.1),
    "maximize": set_group(maximize=True),
    "counter": set_counter,
    "moment": set_moment,
    "load": load,
    "leave out": leave_out,
    "swap": swap,
    "split": split_groups,
    "freeze": freeze,
    "data": replace_data,
}


OF_ADAM, OF_MOMENTUM, OF_SGD = {"counter", "moment"}, {"moment", "momentum"}, {"momentum"}
POSSIBLE = {name: [c for c in CHANGES if c not in {*OF_ADAM, *OF_MOMENTUM} - of] for name, of in
            {"sgd": OF_SGD, "dampened": OF_MOMENTUM, "adam": OF_ADAM, "fused": OF_ADAM}.items()}  # fmt: skip


@pytest.mark.parametrize(("name", "change"), [(name, c) for name, changes in POSSIBLE.items() for c in changes])
def test_what_changes_between_steps_counts_in_the_next(name, change, emulated):
    cell, head = models.TreeLSTM(X, H), nn.Linear(H, C)
    twin, twin_head = copy.deepcopy(cell), copy.deepcopy(head)
    optimizer, other = (
        OPTIMIZERS[name]([*c.parameters(), *h.parameters()]) for c, h in ((cell, head), (twin, twin_head))
    )
    trainer = Trainer(cell, optimizer, head=head)
    for step, batch in enumerate(batches(tree_lstm, 7)):
        if step in (3, 5):
            trainer.sync()  # as for torch's own optimizer, whose step is over when it returns
            CHANGES[change](optimizer, head)
            CHANGES[change](other, twin_head)
        trainer.step(*batch)
        want = loop_step(twin, other, *batch, head=twin_head)
        assert math.isclose(trainer.sync(), want, rel_tol=1e-4)
        for p, q in zip(
            [*cell.parameters(), *head.parameters()], [*twin.parameters(), *twin_head.parameters()], strict=True
        ):
            assert relative_error(p, q) <= BOUND, step
    if change != "leave out":  # of whose states torch makes no state dict
        check_states(optimizer, other, 10 * BOUND)


@pytest.mark.parametrize("make", [lambda: torch.tensor(0.1), lambda: np.array(0.1)])
def test_a_learning_rate_that_changes_in_place_is_read_at_each_step(make, emulated):
    cell = models.TreeLSTM(X, C)
    twin = copy.deepcopy(cell)
    optimizer, other = (torch.optim.SGD(c.parameters(), make(), foreach=False) for c in (cell, twin))
    trainer = Trainer(cell, optimizer)
    for batch in batches(tree_lstm, 6):
        assert weft.explain(trainer, *batch[:2]).one_kernel
        trainer.step(*batch)
        loop_step(twin, other, *batch)
        trainer.sync()
        for o in (optimizer, other):
            o.param_groups[0]["lr"] *= 0.5
    assert all(relative_error(p, q) <= BOUND for p, q in zip(cell.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("where", ["parameter", "head", "cell", "step", "accumulated", "own forward"])
def test_hooks_that_come_between_steps_run(where, emulated):
    cell, head, seen = models.TreeLSTM(X, H), nn.Linear(H, C), []
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1)
    trainer = Trainer(cell, optimizer, head=head)
    for step, batch in enumerate(batches(tree_lstm, 4)):
        if step == 2:
            trainer.sync()
            if where == "parameter":
                cell.U.weight.register_hook(lambda grad: seen.append(grad))
            elif where == "accumulated":
                cell.U.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
            elif where == "head":
                head.register_forward_hook(lambda *_: seen.append(0))
            elif where == "cell":
                cell.register_forward_hook(lambda *_: seen.append(0))
            elif where == "own forward":
                head.forward = lambda y: seen.append(0) or F.linear(y, head.weight)
            else:
                optimizer.register_step_post_hook(lambda *_: seen.append(0))
        trainer.step(*batch)
    assert len(seen) == 2


def test_other_targets_are_refused_as_at_the_first_step(emulated):
    cell = models.TreeLSTM(X, C)
    trainer = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1))
    for graphs, x, targets in batches(tree_lstm, 3):
        for wrong, error in ((targets[1:], ValueError), (targets.int(), TypeError), ([0], TypeError)):
            with pytest.raises(error, match="targets"):
                trainer.step(graphs, x, wrong)
        trainer.step(graphs, x, targets)
    assert math.isfinite(trainer.sync())


class Unread(weft.VertexFunction):
    """With parameters that no loss depends on."""

    def __init__(self):
        super().__init__(C)
        self.W, self.U, self.spare = nn.Linear(X, C), nn.Linear(C, C), nn.Linear(2, 2)

    def vertex(self, v):
        h = torch.tanh(self.W(v.pull()) + self.U(v.gather_sum()).detach())
        v.scatter(h)
        v.push(h)


def test_what_no_gradient_reaches_has_no_state(emulated):
    check_against_loop(Unread(), None, OPTIMIZERS["adam"], batches(tree_lstm, 3), "cpu")


def test_a_head_of_other_memory_is_a_loop(emulated):
    cell, head = models.TreeLSTM(X, H), nn.Linear(H, C)
    head.weight = nn.Parameter(torch.randn(H, C).t(), requires_grad=False)
    trainer = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1), head=head)
    assert "contiguous" in weft.explain(trainer, BINARY, rows(BINARY, X)).why
    head.weight = nn.Parameter(torch.randn(C, H), requires_grad=False)
    assert weft.explain(trainer, BINARY, rows(BINARY, X)).one_kernel
    head.double()
    assert "float32" in weft.explain(trainer, BINARY, rows(BINARY, X)).why


def test_a_head_of_other_size_has_a_kernel_of_its_own(emulated):
    cell, head = models.TreeLSTM(X, H), nn.Linear(H, 7)
    twin, twin_head = copy.deepcopy(cell), copy.deepcopy(head)
    optimizer, other = (torch.optim.SGD([*c.parameters(), *h.parameters()], 0.1)
                        for c, h in ((cell, head), (twin, twin_head)))  # fmt: skip
    trainer, forms = Trainer(cell, optimizer, head=head), []
    for step, (graphs, x, targets) in enumerate(batches(tree_lstm, 4)):
        if step == 2:
            for h in (head, twin_head):
                h.weight.data, h.bias.data, h.out_features = h.weight.data[:3].clone(), h.bias.data[:3].clone(), 3
        wanted = targets % 3
        trainer.step(graphs, x, wanted)
        assert trainer.sync() == pytest.approx(loop_step(twin, other, graphs, x, wanted, head=twin_head), rel=1e-5)
        forms.append(trainer._parts.operands.form[-1])
    assert forms == [7, 7, 3, 3]
    head.out_features = 2  # which is not true
    assert not weft.explain(trainer, graphs, x).one_kernel


def test_another_optimizer_is_asked_from_then_on(emulated):
    cell = models.TreeLSTM(X, C)
    twin = copy.deepcopy(cell)
    trainer = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1))
    for lr, batch in zip((0.1, 0.1, 0.5, 0.5), batches(tree_lstm, 4), strict=True):
        if trainer.optimizer.param_groups[0]["lr"] != lr:
            trainer.optimizer = torch.optim.SGD(cell.parameters(), lr)
        trainer.step(*batch)
        loop_step(twin, torch.optim.SGD(twin.parameters(), lr), *batch)
        trainer.sync()
    assert all(relative_error(p, q) <= BOUND for p, q in zip(cell.parameters(), twin.parameters(), strict=True))


def test_where_the_blocks_are_no_longer_resident_it_is_the_loop(emulated, monkeypatch):
    """As where another process takes a part of the device."""
    monkeypatch.setattr(persistent, "train", lambda call, request: None)
    check_against_loop(models.TreeLSTM(X, H), nn.Linear(H, C), OPTIMIZERS["adam"], batches(tree_lstm, 4), "cpu")
