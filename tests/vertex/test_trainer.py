"""weft.vertex.Trainer beside the loop that a user would write."""

from __future__ import annotations

import copy
import math
import pickle
import time

import pytest
import torch
import weft
from torch import nn
from torch.optim import lr_scheduler
from weft._vertex.calls import prepare
from weft._vertex.runtime import persistent
from weft.vertex import Trainer, models

from tests.common import pairs, relative_error
from tests.vertex.cells import BINARY, MatrixAndVector, devices, rows
from tests.vertex.training import (
    BOUND,
    CELLS,
    ONE_KERNEL,
    OPTIMIZERS,
    C,
    H,
    X,
    batches,
    check_against_loop,
    check_states,
    loop_step,
    tree_lstm,
)


@devices
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, device):
    head = nn.Linear(H, C)
    check_against_loop(models.TreeLSTM(X, H), head, OPTIMIZERS[name], batches(tree_lstm, 5, device), device)


@devices
@pytest.mark.parametrize("executor", ["auto", "persistent", "batched", "reference"])
@pytest.mark.parametrize("name", CELLS)
def test_cells(name, executor, device):
    make, make_graphs, width = CELLS[name]
    head = nn.Linear(width, C)
    data = batches(make_graphs, 3, device)
    check_against_loop(make(), head, OPTIMIZERS["momentum"], data, device, executor=executor)


@devices
@pairs(
    head=["none", "linear", "unbiased", "mlp"], loss=["cross_entropy", "mse"], at=["vertices", "roots"],
    optimizer=["momentum", "adam"],
)  # fmt: skip
def test_heads(head, loss, at, optimizer, device):
    make = {
        "none": lambda: None,
        "linear": lambda: nn.Linear(H, C),
        "unbiased": lambda: nn.Linear(H, C, bias=False),
        "mlp": lambda: nn.Sequential(nn.Linear(H, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, C)),
    }[head]
    cell = models.TreeLSTM(X, C if head == "none" else H)
    data = [b for b in batches(tree_lstm, 8, device, loss, at) if len(b[2]) > 1]
    assert len(data) > 2
    # After a normalisation over few rows gradients of the layer before it are differences of nearly equal numbers.
    bound = 1e-3 if head == "mlp" else BOUND
    check_against_loop(cell, make(), OPTIMIZERS[optimizer], data, device, bound, loss=loss, at=at)


@devices
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_hooks_of_the_cell(loss, device):
    cell = models.TreeLSTM(X, H).to(device)
    for hook in (lambda *_: None, lambda _cell, _arguments, y: y[:, :3] * 2):  # and y may have another shape
        cell.register_forward_hook(hook)
    twin = copy.deepcopy(cell)
    optimizer, other = (torch.optim.SGD(c.parameters(), 0.1) for c in (cell, twin))
    trainer = Trainer(cell, optimizer, loss)
    for graphs, x, targets in batches(tree_lstm, 3, device, loss, width=3):
        wanted = targets % 3 if loss == "cross_entropy" else targets
        trainer.step(graphs, x, wanted)
        lost = loop_step(twin, other, graphs, x, wanted, loss=loss)
        assert trainer.sync() == pytest.approx(lost, rel=1e-5)
    assert all(relative_error(p, q) <= BOUND for p, q in zip(cell.parameters(), twin.parameters(), strict=True))


@devices
def test_hooks_of_the_cell_get_what_a_call_gives_them(device):
    cell = models.TreeLSTM(X, C).to(device)
    cell.register_forward_pre_hook(lambda _, arguments: (arguments[0], arguments[1] * 2))
    twin = copy.deepcopy(cell)
    optimizer, other = (torch.optim.SGD(c.parameters(), 0.1) for c in (cell, twin))
    trainer = Trainer(cell, optimizer)
    for batch in batches(tree_lstm, 2, device):
        trainer.step(*batch)
        lost = loop_step(twin, other, *batch)
        assert trainer.sync() == pytest.approx(lost, rel=1e-5)
    assert all(relative_error(p, q) <= BOUND for p, q in zip(cell.parameters(), twin.parameters(), strict=True))


class Doubled(models.TreeLSTM):
    def forward(self, *arguments, **options):
        return 2 * super().forward(*arguments, **options)


def test_a_cell_with_a_forward_of_its_own():
    cell = Doubled(X, C)
    twin = copy.deepcopy(cell)
    optimizer, other = (torch.optim.SGD(c.parameters(), 0.1) for c in (cell, twin))
    trainer = Trainer(cell, optimizer)
    (batch,) = batches(tree_lstm, 1)
    trainer.step(*batch)
    assert trainer.sync() == pytest.approx(loop_step(twin, other, *batch), rel=1e-5)


@devices
@pytest.mark.parametrize("ignore_index", [-100, 2, 99])
def test_ignore_index(ignore_index, device):
    data = batches(tree_lstm, 5, device)
    for _, _, targets in data:
        targets[::3] = ignore_index
        if len(targets) > 1:
            targets[1] = 0
    data = [b for b in data if len(b[2]) > 1]
    head = nn.Linear(H, C)
    check_against_loop(models.TreeLSTM(X, H), head, OPTIMIZERS["adam"], data, device, ignore_index=ignore_index)


@devices
def test_all_ignored(device):
    """A mean of nothing is NaN, as torch's is; so is what it does to the parameters."""
    cell, head = models.TreeLSTM(X, H).to(device), nn.Linear(H, C).to(device)
    twin, twin_head = copy.deepcopy((cell, head))
    ((graphs, x, targets),) = batches(tree_lstm, 1, device)
    targets = torch.full_like(targets, -100)
    trainer = Trainer(cell, torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1), head=head)
    other = torch.optim.SGD([*twin.parameters(), *twin_head.parameters()], 0.1)
    assert math.isnan(loop_step(twin, other, graphs, x, targets, head=twin_head))
    trainer.step(graphs, x, targets)
    assert math.isnan(trainer.sync())
    for p, q in zip(
        [*cell.parameters(), *head.parameters()], [*twin.parameters(), *twin_head.parameters()], strict=True
    ):
        assert torch.equal(p.isnan(), q.isnan())


@devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype, device):
    data = batches(tree_lstm, 3, device, dtype=dtype)
    head = nn.Linear(H, C, dtype=dtype)
    bound = 1e-10 if dtype == torch.float64 else 5e-2
    check_against_loop(models.TreeLSTM(X, H).to(dtype), head, OPTIMIZERS["momentum"], data, device, bound)


@devices
def test_autocast(device):
    with torch.autocast(device, torch.bfloat16):
        data = batches(tree_lstm, 3, device)
        check_against_loop(models.TreeLSTM(X, H), nn.Linear(H, C), OPTIMIZERS["sgd"], data, device, 1e-2)


@devices
def test_inputs_by_name_and_none(device):
    class Named(weft.VertexFunction):
        def __init__(self):
            super().__init__(X)
            self.U = nn.Linear(X, C)

        def vertex(self, v):
            h = torch.tanh(v.pull("a") + v.pull("b") + v.gather(0) + v.gather(1))
            v.scatter(h)
            v.push(self.U(h))

    data = [(g, {"a": x, "b": 2 * x}, t) for g, x, t in batches(tree_lstm, 3, device)]
    check_against_loop(Named(), None, OPTIMIZERS["adam"], data, device)

    class Nothing(weft.VertexFunction):
        def __init__(self):
            super().__init__(C)
            self.leaf = nn.Parameter(torch.randn(C))

        def vertex(self, v):
            h = torch.sigmoid(self.leaf + v.gather_sum())
            v.scatter(h)
            v.push(h)

    data = [(g, None, t) for g, _, t in batches(tree_lstm, 3, device)]
    check_against_loop(Nothing(), None, OPTIMIZERS["sgd"], data, device)


@devices
@pytest.mark.parametrize("executor", ["auto", "persistent"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_parameter_that_is_a_matrix_and_a_vector(optimizer, executor, device):
    """Its gradient is the sum of both, which a kernel of steps does not take."""
    data = batches(tree_lstm, device=device)
    trainer = check_against_loop(MatrixAndVector(X, C), None, OPTIMIZERS[optimizer], data, device, executor=executor)
    explained = weft.explain(trainer, *data[0][:2])
    assert not explained.one_kernel
    assert "both a matrix and a vector" in explained.why or device == "cpu"


@pytest.mark.parametrize("head", [None, nn.Linear(C, C)])
def test_its_obstacle(head):
    found = prepare(MatrixAndVector(X, C), BINARY, rows(BINARY, X, requires_grad=True), "batched").ready
    on_device = found._replace(device=torch.device("cuda"))
    assert (
        persistent.training_obstacle(found.compiled, on_device, head, "mse")
        == "a parameter is both a matrix and a vector"
    )


@devices
def test_graphs_on_the_cpu_go_with_anything(device):
    data = [(g.to("cpu"), x, t) for g, x, t in batches(tree_lstm, 3, device, at="roots")]
    check_against_loop(models.TreeLSTM(X, H), nn.Linear(H, C), OPTIMIZERS["adam"], data, device, at="roots")


@devices
def test_hyperparameters_are_read_at_each_step(device):
    """A scheduler of the learning rate works as with the loop, and does not warn that it came first."""
    cells = [models.TreeLSTM(X, C).to(device)]
    cells.append(copy.deepcopy(cells[0]))
    optimizers = [torch.optim.AdamW(cell.parameters(), 0.01, weight_decay=0.1) for cell in cells]
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    trainer = Trainer(cells[0], optimizers[0])
    for i, batch in enumerate(batches(tree_lstm, 5, device)):
        trainer.step(*batch)
        loop_step(cells[1], optimizers[1], *batch)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            scheduler.step()
            optimizer.param_groups[0]["weight_decay"] = 0.1 * i
    trainer.sync()
    for p, q in zip(cells[0].parameters(), cells[1].parameters(), strict=True):
        assert relative_error(p, q) <= BOUND
    check_states(*optimizers, 10 * BOUND)


@devices
def test_steps_of_the_trainer_and_of_the_optimizer_may_follow_each_other(device):
    cell, head = models.TreeLSTM(X, H).to(device), nn.Linear(H, C).to(device)
    twin, twin_head = copy.deepcopy((cell, head))
    optimizer = OPTIMIZERS["adam"]([*cell.parameters(), *head.parameters()])
    other = OPTIMIZERS["adam"]([*twin.parameters(), *twin_head.parameters()])
    trainer = Trainer(cell, optimizer, head=head)
    for i, batch in enumerate(batches(tree_lstm, 6, device)):
        loop_step(twin, other, *batch, head=twin_head)
        if i % 2:
            loop_step(cell, optimizer, *batch, head=head)
        else:
            trainer.step(*batch)
        if i == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    trainer.sync()
    for p, q in zip(
        [*cell.parameters(), *head.parameters()], [*twin.parameters(), *twin_head.parameters()], strict=True
    ):
        assert relative_error(p, q) <= BOUND
    check_states(optimizer, other, 10 * BOUND)


@devices
def test_gradients_of_before_stay(device):
    cell = models.TreeLSTM(X, C).to(device)
    kept = {}
    for i, p in enumerate(cell.parameters()):
        if i:
            p.grad = torch.randn_like(p)
            kept[p] = p.grad, p.grad.clone()
    trainer = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1))
    for batch in batches(tree_lstm, 2, device):
        trainer.step(*batch)
    trainer.sync()
    for p in cell.parameters():
        if p in kept:
            assert p.grad is kept[p][0] and torch.equal(p.grad, kept[p][1])
        else:
            assert p.grad is None


@devices
def test_what_the_optimizer_does_not_have_stays(device):
    """Frozen parameters, and those of nobody."""
    cell, head = models.TreeLSTM(X, H).to(device), nn.Linear(H, C).to(device)
    cell.W.bias.requires_grad_(False)
    before = [p.detach().clone() for p in cell.parameters()]
    trainer = Trainer(cell, torch.optim.SGD([cell.W.bias, *head.parameters()], 0.1, weight_decay=0.5), head=head)
    was = head.weight.detach().clone()
    for batch in batches(tree_lstm, 2, device):
        trainer.step(*batch)
    trainer.sync()
    assert all(torch.equal(p, b) for p, b in zip(cell.parameters(), before, strict=True))
    assert not torch.equal(head.weight, was) and all(p.grad is None for p in cell.parameters())


@devices
def test_gradients_of_inputs_go_on(device):
    """As an embedding before the cell needs them."""
    cell, embedding = models.TreeLSTM(X, C).to(device), nn.Embedding(7, X).to(device)
    twin, twin_embedding = copy.deepcopy((cell, embedding))
    trainer = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1))
    other = torch.optim.SGD(twin.parameters(), 0.1)
    for graphs, _, targets in batches(tree_lstm, 2, device):
        words = torch.randint(7, (graphs.num_vertices,), device=device)
        trainer.step(graphs, embedding(words), targets)
        loop_step(twin, other, graphs, twin_embedding(words), targets)
    assert relative_error(embedding.weight.grad, twin_embedding.weight.grad) <= BOUND
    assert all(p.grad is None for p in cell.parameters())


@devices
def test_repeats_bit_by_bit(device):
    def run():
        torch.manual_seed(3)
        cell = models.TreeLSTM(X, C).to(device)
        trainer = Trainer(cell, torch.optim.Adam(cell.parameters(), 0.01))
        losses = [trainer.step(*batch) for batch in batches(tree_lstm, 4, device)]
        return [*losses[1:], trainer.sync()], [p.detach().clone() for p in cell.parameters()]

    first, second = run(), run()
    assert first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


def no_grad(run):
    with torch.no_grad():
        return run()


@devices
def test_under_no_grad_it_trains(device):
    cell = models.TreeLSTM(X, C).to(device)
    before = cell.W.weight.detach().clone()
    trainer = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1))
    ((graphs, x, targets),) = batches(tree_lstm, 1, device)
    no_grad(lambda: trainer.step(graphs, x, targets))
    assert trainer.sync() > 0 and not torch.equal(cell.W.weight, before)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_a_step_does_not_wait(name):
    """The first returns at once while the device is busy; later ones wait for the step before, not for their own."""
    cell = models.TreeLSTM(X, C).cuda()
    trainer = Trainer(cell, OPTIMIZERS[name]([*cell.parameters()]))
    data = batches(tree_lstm, 3, "cuda")
    for batch in data:
        trainer.step(*batch)
    trainer = Trainer(cell, trainer.optimizer)
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(2_000_000_000)  # a second or so
    trainer.step(*data[0])
    returned = time.perf_counter() - started
    torch.cuda.synchronize()
    assert returned < 0.5 * (time.perf_counter() - started)
    torch.cuda._sleep(1)
    trainer.step(*data[1])
    started = time.perf_counter()
    torch.cuda._sleep(2_000_000_000)
    assert trainer.step(*data[2]) > 0
    returned = time.perf_counter() - started
    torch.cuda.synchronize()
    assert returned < 0.5 * (time.perf_counter() - started)


@pytest.mark.cuda
def test_a_capture_is_refused():
    cell = models.TreeLSTM(X, C).cuda()
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    trainer = Trainer(cell, optimizer)
    ((graphs, x, targets),) = batches(tree_lstm, 1, "cuda")
    trainer.step(graphs, x, targets)
    trainer.sync()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        trainer.step(graphs, x, targets)
    trainer.step(graphs, x, targets)
    assert trainer.sync() > 0


@pytest.mark.cuda
def test_on_a_stream_of_its_own():
    cell = models.TreeLSTM(X, C)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        check_against_loop(cell, None, OPTIMIZERS["adam"], batches(tree_lstm, 4, "cuda"), "cuda")
    stream.synchronize()


# What it says of itself.


def test_explain():
    cell, head = models.TreeLSTM(X, H), nn.Linear(H, C)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1)
    trainer = Trainer(cell, optimizer, head=head)
    x = rows(BINARY, X)
    found = weft.explain(trainer, BINARY, x)
    assert isinstance(found, weft.vertex.TrainerExplanation) and isinstance(found.cell, weft.vertex.Explanation)
    assert not found.one_kernel and (found.asked, found.executor) == ("auto", "batched")
    assert "CPU" in found.reason and "loop in torch (the cell is on the CPU)" in str(found) and "TreeLSTM" in str(found)
    assert weft.explain(trainer, graphs=BINARY, inputs=x) == found
    with pytest.raises(ValueError, match="one row per vertex"):
        weft.explain(trainer, BINARY, x[:2])
    with pytest.raises(ValueError, match="no vertices"):
        weft.explain(trainer, weft.Graphs.from_children([]), x[:0])
    asked = weft.explain(Trainer(cell, optimizer, head=head, executor="persistent"), BINARY, x)
    assert (asked.asked, asked.executor) == ("persistent", "batched") and "CUDA device" in asked.reason
    assert "SGD" in repr(trainer) and "head=Linear" in repr(trainer)


@pytest.mark.cuda
def test_explain_says_what_makes_a_loop():
    cell, head = models.TreeLSTM(8, H).cuda(), nn.Linear(H, C).cuda()
    both = [*cell.parameters(), *head.parameters()]
    sgd = torch.optim.SGD(both, 0.1)
    x = rows(BINARY, 8).cuda()

    def why(optimizer=sgd, head=head, x=x, executor="persistent"):
        options = {"executor": executor}
        return weft.explain(Trainer(cell, optimizer, head=head, **options), BINARY, x).why

    assert "RMSprop, not SGD" in why(torch.optim.RMSprop(both))
    assert "amsgrad" in why(torch.optim.Adam(both, amsgrad=True))
    assert "maximize" in why(torch.optim.SGD(both, maximize=True))
    assert "Sequential" in why(head=nn.Sequential(head))
    assert "requires grad" in why(x=x.clone().requires_grad_())
    assert "'batched'" in why(executor="batched")
    with torch.autocast("cuda"):
        assert "not float32" in why()
    handle = sgd.register_step_post_hook(lambda *_: None)
    assert "hooks" in why()
    handle.remove()


def test_copies():
    cell = models.TreeLSTM(X, C)
    trainer = Trainer(cell, torch.optim.Adam(cell.parameters(), 0.01))
    data = batches(tree_lstm, 3)
    trainer.step(*data[0])
    for again in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert again.cell is not cell and again.sync() == trainer.sync()
        twin = copy.deepcopy(again)
        assert again.step(*data[1]) == twin.step(*data[1]) and again.sync() == twin.sync()


def test_in_compiled_code():
    cell = models.TreeLSTM(X, C)
    trainer = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1))
    data = batches(tree_lstm, 2)
    compiled = torch.compile(lambda graphs, x, targets: trainer.step(graphs, x + 1, targets), backend="eager")
    assert compiled(*data[0]) is None and compiled(*data[1]) > 0


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["treelstm", "childsum", "treefc", "rvnn"])
def test_cells_that_are_one_kernel(name):
    """Of odd widths, too; test_cells compares what they compute."""
    make, make_graphs, width = CELLS[name]
    cell, head = make().cuda(), nn.Linear(width, C).cuda()
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1)
    ((graphs, x, _),) = batches(make_graphs, 1, "cuda")
    found = weft.explain(Trainer(cell, optimizer, head=head, executor="persistent"), graphs, x)
    assert found.one_kernel, found.why


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tree_lstm_is_one_kernel(name):
    """Under the optimizers that it knows; what it computes is compared with the loop above."""
    cell, head = models.TreeLSTM(8, H).cuda(), nn.Linear(H, C).cuda()
    optimizer = OPTIMIZERS[name]([*cell.parameters(), *head.parameters()])
    trainer = Trainer(cell, optimizer, head=head, executor="persistent")
    found = weft.explain(trainer, BINARY, rows(BINARY, 8).cuda())
    assert found.one_kernel == (name in ONE_KERNEL), found.why
