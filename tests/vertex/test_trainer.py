"""weft.vertex.Trainer beside the loop that a user would write."""

from __future__ import annotations

import copy
import math
import pickle
import random
import time

import pytest
import torch
import weft
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from weft._vertex.runtime import persistent, training
from weft.vertex import Trainer, models

from tests.common import relative_error
from tests.vertex.cells import BINARY, devices, rows
from tests.vertex.naive import random_tree

C, X, H = 5, 3, 4
BOUND = 1e-5

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "groups": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "betas": (0.5, 0.9)}], 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "maximize": lambda p: torch.optim.SGD(p, 0.01, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}


@pytest.fixture(autouse=True)
def _exact_fp32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


class TwoPushes(weft.VertexFunction):
    def __init__(self):
        super().__init__(3)
        self.W = nn.Linear(3, 3)

    def vertex(self, v):
        h = self.W(v.pull()) + v.gather_sum()
        v.scatter(h)
        v.push(h)
        v.push(h + 1)


def tree_lstm(rng, count):
    return weft.Graphs.from_children([random_tree(rng, rng.randint(1, 6)) for _ in range(count)])


def rvnn(rng, count):
    trees = [random_tree(rng, rng.randint(1, 6)) for _ in range(count)]
    types = ["inner" if below else "leaf" for tree in trees for below in tree]
    return weft.Graphs.from_children(trees).with_types(types)


def tagger(rng, count):
    return models.BiLSTMTagger.graphs([rng.randint(1, 5) for _ in range(count)])


CELLS = {
    "treelstm": (lambda: models.TreeLSTM(X, H), tree_lstm, H),
    "childsum": (lambda: models.ChildSumTreeLSTM(X, H), tree_lstm, H),
    "treefc": (lambda: models.TreeFC(X), tree_lstm, X),
    "rvnn": (lambda: models.RvNN(X, H), rvnn, H),
    "tagger": (lambda: models.BiLSTMTagger(X, H, C, 3), tagger, C),
}


def batches(make_graphs, count=4, device="cpu", loss="cross_entropy", at="vertices", width=C, seed=0, dtype=None):
    """Batches that were never seen, of several sizes, with their targets."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        graphs = make_graphs(rng, rng.randint(1, 4)).to(device)
        n = graphs.num_graphs if at == "roots" else graphs.num_vertices
        targets = torch.randint(C, (n,)) if loss == "cross_entropy" else torch.randn(n, width, dtype=dtype)
        found.append((graphs, torch.randn(graphs.num_vertices, X, dtype=dtype).to(device), targets.to(device)))
    return found


def loop_step(
    cell, optimizer, graphs, x, targets, *, loss="cross_entropy", head=None, at="vertices", ignore_index=-100
):
    """What the contract says that a step is."""
    y = cell(graphs, x)
    y = y if head is None else head(y)
    y = y if at == "vertices" else y[graphs.roots]
    if loss == "cross_entropy":
        value = F.cross_entropy(y, targets, ignore_index=ignore_index)
    else:
        value = F.mse_loss(y, targets)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value.item()


def check_states(mine, theirs, bound=BOUND):
    """Parameters are compared by who has the optimizers; here the states, and what a state dict says."""
    mine, theirs = mine.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, want in theirs["state"].items():
        found = mine["state"][number]
        assert found.keys() == want.keys()
        for key, w in want.items():
            if isinstance(w, torch.Tensor):
                assert (found[key].dtype, found[key].device) == (w.dtype, w.device), key
                assert relative_error(found[key], w) <= bound, key
            else:
                assert found[key] == w, key


def check_against_loop(cell, head, make, data, device, bound=BOUND, executor="auto", **options):
    cell, head = cell.to(device), head if head is None else head.to(device)
    twin, twin_head = copy.deepcopy(cell), copy.deepcopy(head)
    both = [[*c.parameters(), *(h.parameters() if h else ())] for c, h in ((cell, head), (twin, twin_head))]
    optimizer, other = make(both[0]), make(both[1])
    trainer = Trainer(cell, optimizer, head=head, executor=executor, **options)
    wanted = [loop_step(twin, other, *batch, head=twin_head, **options) for batch in data]
    versions = [p._version for p in both[0]]
    found = [trainer.step(*batch) for batch in data]
    assert found[0] is None and all(type(x) is float for x in found[1:])
    last = trainer.sync()
    assert type(last) is float and trainer.sync() == last
    for f, w in zip([*found[1:], last], wanted, strict=True):
        assert math.isclose(f, w, rel_tol=10 * bound)
    for p, q, version in zip(*both, versions, strict=True):
        assert relative_error(p, q) <= bound
        assert p.grad is None and p._version > version
    check_states(optimizer, other, 10 * bound)
    return trainer


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
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("at", ["vertices", "roots"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("head", ["none", "linear", "unbiased", "mlp"])
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


# What is refused.


def everything(cell, optimizer, head=None):
    tensors = [*cell.parameters(), *(() if head is None else head.state_dict().values())]
    states = {p: {k: copy.deepcopy(x) for k, x in s.items()} for p, s in optimizer.state.items()}
    return [t.detach().clone() for t in tensors], states, [p.grad for p in cell.parameters()]


def check_unchanged(before, cell, optimizer, head=None):
    tensors, states, grads = everything(cell, optimizer, head)
    assert all(map(torch.equal, tensors, before[0]))
    assert states.keys() == before[1].keys()
    for p, state in states.items():
        assert state.keys() == before[1][p].keys()
        for key, x in state.items():
            same = torch.equal(x, before[1][p][key]) if isinstance(x, torch.Tensor) else x == before[1][p][key]
            assert same, key
    assert all(a is b for a, b in zip(grads, before[2], strict=True))


def test_bad_constructions():
    cell, head = models.TreeLSTM(X, H), nn.Linear(H, C)
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    for change, error, match in (
        ({"cell": head}, TypeError, "cell must be a VertexFunction or VertexFunctions, got Linear"),
        ({"optimizer": 0.1}, TypeError, "optimizer must be a torch.optim.Optimizer, got float"),
        ({"loss": "nll"}, ValueError, "loss must be one of 'cross_entropy', 'mse', got 'nll'"),
        ({"loss": None}, ValueError, "loss must be one of"),
        ({"at": "leaves"}, ValueError, "at must be one of 'vertices', 'roots', got 'leaves'"),
        ({"executor": "fast"}, ValueError, "executor must be one of 'auto', .*, got 'fast'"),
        ({"head": 3}, TypeError, "head must be a module or None, got int"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index must be an int, got float"),
        (
            {"optimizer": torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1)},
            ValueError,
            "parameter 3 of the",
        ),
        ({"optimizer": torch.optim.SGD([torch.zeros(2)], 0.1)}, ValueError, "neither the cell's nor the head's"),
    ):
        given = {"cell": cell, "optimizer": optimizer, **change}
        with pytest.raises(error, match=match):
            Trainer(given.pop("cell"), given.pop("optimizer"), **given)
    with pytest.raises(TypeError):
        Trainer(cell, optimizer, "mse", head)
    Trainer(cell, torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.1), "mse", head=head)


@devices
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "rmsprop"])
@pytest.mark.parametrize("head", ["none", "linear", "normalised"])
@pytest.mark.parametrize("started", [False, True])
def test_bad_steps_change_nothing(started, head, optimizer, device):
    cell = models.TreeLSTM(X, C).to(device)
    head = {
        "none": None,
        "linear": nn.Linear(C, C),
        "normalised": nn.Sequential(nn.BatchNorm1d(C), nn.Linear(C, C)),
    }[head]
    head = head if head is None else head.to(device)
    optimizer = OPTIMIZERS[optimizer]([*cell.parameters(), *([] if head is None else head.parameters())])
    graphs, x, targets = BINARY.to(device), rows(BINARY, X).to(device), torch.tensor([0, 1, 4]).to(device)
    options = {"head": head}
    for loss, arguments, error, match in (
        ("cross_entropy", (graphs, x, [0, 1, 4]), TypeError, "targets must be a tensor, got list"),
        (
            "cross_entropy",
            (graphs, x, targets.int()),
            TypeError,
            "targets must be classes, torch.int64, got torch.int32",
        ),
        ("cross_entropy", (graphs, x, targets.float()), TypeError, "torch.int64, got torch.float32"),
        ("cross_entropy", (graphs, x, targets[:2]), ValueError, r"targets must be \(3.*a row per vertex, got \(2,\)"),
        ("cross_entropy", (graphs, x, targets[:, None]), ValueError, "targets must be"),
        ("mse", (graphs, x, torch.zeros(3, C + 1, device=device)), ValueError, rf"targets must be \(3, {C}\)"),
        (
            "mse",
            (graphs, x, torch.zeros(3, C, device=device).double()),
            TypeError,
            "torch.float32 as y, got torch.float64",
        ),
        ("mse", (graphs, x, torch.zeros(C, device=device)), ValueError, "targets must be"),
        ("cross_entropy", (graphs, x.to("meta"), targets), RuntimeError, "different devices"),
        ("cross_entropy", (graphs, x, targets.to("meta")), RuntimeError, "targets are on meta, the cell on"),
        ("cross_entropy", (graphs, x[:2], targets), ValueError, "'input' must have one row per vertex"),
        ("cross_entropy", (graphs, None, targets), ValueError, "'input'"),
        ("cross_entropy", ([[]], x, targets), TypeError, "graphs must be a weft.Graphs"),
        ("cross_entropy", (weft.Graphs.from_children([]), x[:0], targets[:0]), ValueError, "no vertices"),
    ):
        trainer = Trainer(cell, optimizer, loss, **options)
        if started:
            good = targets if loss == "cross_entropy" else torch.randn(3, C, device=device)
            trainer.step(graphs, x, good)
        before, last = everything(cell, optimizer, head), trainer.sync()
        with pytest.raises(error, match=match):
            trainer.step(*arguments)
        check_unchanged(before, cell, optimizer, head)
        assert trainer.sync() == last and (last is not None) == started
    if not started:
        assert not optimizer.state


@devices
def test_other_refusals(device):
    graphs, x, targets = BINARY.to(device), rows(BINARY, X).to(device), torch.tensor([0, 1, 2]).to(device)
    cell = TwoPushes().to(device)
    trainer = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1))
    with pytest.raises(ValueError, match="TwoPushes pushes 2 tensors, a loss is of one"):
        trainer.step(graphs, x, targets)
    cell, head = models.TreeLSTM(X, H).to(device), nn.Linear(H, C).to(device)
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    trainer = Trainer(cell, optimizer, head=head, at="roots")
    with pytest.raises(ValueError, match=r"targets must be \(1,\), a row per root, got \(3,\)"):
        trainer.step(graphs, x, targets)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match=r"parameter 3 of the optimizer, \(2,\), is neither"):
        trainer.step(graphs, x, targets[:1])
    del optimizer.param_groups[-1]
    trainer.head = nn.Linear(H + 1, C).to(device)
    with pytest.raises(RuntimeError, match=f"the head takes {H + 1} features"):
        trainer.step(graphs, x, targets[:1])
    trainer.head = nn.Linear(H, C, device="meta")
    with pytest.raises(RuntimeError, match="the head is on meta"):
        trainer.step(graphs, x, targets[:1])
    trainer.head = head
    cell.W = nn.Linear(X, 4 * H).to(device)  # the optimizer still has the old one
    with pytest.raises(ValueError, match="parameter 0 of the optimizer"):
        trainer.step(graphs, x, targets[:1])

    class Flat(weft.VertexFunction):
        def __init__(self):
            super().__init__(3)
            self.w = nn.Parameter(torch.ones(3))

        def vertex(self, v):
            h = v.pull() * self.w + v.gather_sum()
            v.scatter(h)
            v.push(h.sum(1))

    cell = Flat().to(device)
    with pytest.raises(ValueError, match=r"y must be \(rows, classes\) for 'cross_entropy', got \(3,\)"):
        Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1)).step(graphs, x, targets)
    mse = Trainer(cell, torch.optim.SGD(cell.parameters(), 0.1), "mse")
    assert mse.step(graphs, x, torch.zeros(3, device=device)) is None and mse.sync() > 0


@devices
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "fused", "rmsprop"])
@pytest.mark.parametrize("head", ["none", "linear", "normalised"])
@pytest.mark.parametrize("wrong", [-1, C, -101, 2**40])
def test_a_class_out_of_range_is_an_index_error(wrong, head, name, device):
    """By the next step or sync at the latest; neither step changes anything, and training goes on."""
    cell = models.TreeLSTM(X, C).to(device)
    head = {
        "none": None,
        "linear": nn.Linear(C, C),
        "normalised": nn.Sequential(nn.BatchNorm1d(C), nn.Linear(C, C)),
    }[head]
    head = head if head is None else head.to(device)
    optimizer = OPTIMIZERS[name]([*cell.parameters(), *([] if head is None else head.parameters())])
    trainer = Trainer(cell, optimizer, head=head)
    data = [b for b in batches(tree_lstm, 8, device) if len(b[2]) > 1]
    for (graphs, x, targets), other in zip(data[:-1:2], data[1::2], strict=False):
        last = trainer.sync()
        before = everything(cell, optimizer, head)
        bad = targets.clone()
        bad[-1] = wrong
        with pytest.raises(IndexError, match=rf"not in \[0, {C}\) and is not ignore_index=-100"):
            if device == "cuda":
                torch.cuda._sleep(20_000_000)  # the host cannot know in time
            trainer.step(graphs, x, bad)
            trainer.step(*other)
        check_unchanged(before, cell, optimizer, head)
        assert trainer.sync() == last
        with pytest.raises(IndexError):
            trainer.step(graphs, x, bad)
            trainer.sync()
        check_unchanged(before, cell, optimizer, head)
        trainer.step(graphs, x, targets)
        assert trainer.sync() > 0


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


ONE_KERNEL = ["sgd", "momentum", "dampened", "nesterov", "adam", "adamw", "fused", "groups"]


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tree_lstm_is_one_kernel(name):
    """Under the optimizers that it knows; what it computes is compared with the loop above."""
    cell, head = models.TreeLSTM(8, H).cuda(), nn.Linear(H, C).cuda()
    optimizer = OPTIMIZERS[name]([*cell.parameters(), *head.parameters()])
    trainer = Trainer(cell, optimizer, head=head, executor="persistent")
    found = weft.explain(trainer, BINARY, rows(BINARY, 8).cuda())
    assert found.one_kernel == (name in ONE_KERNEL), found.why


# The kernel's side of a step, which here is torch: what the Trainer hands over, and what it does with what comes back.


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
            y = y if request.roots is None else y[request.roots]
            y = y if request.weight is None else F.linear(y, request.weight, request.bias)
            targets = request.targets
            if request.loss == "cross_entropy":
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
        for (p, kind, first, second, numbers_of), g in zip(request.updates, found, strict=True):
            p = p.data
            assert all(type(x) is float for x in numbers_of)
            if kind == "sgd":
                lr, momentum, dampening, decay, nesterov = numbers_of
                g = g + decay * p
                if momentum:
                    first.mul_(momentum).add_(g, alpha=1 - dampening)
                    g = g + momentum * first if nesterov else first
                p.sub_(lr * g)
            else:
                lr, beta1, beta2, eps, decay, correction1, correction2, decoupled = numbers_of
                if decoupled:
                    p.mul_(1 - lr * decay)
                else:
                    g = g + decay * p
                first.add_((g - first) * (1 - beta1))
                second.mul_(beta2).add_(g * g, alpha=1 - beta2)
                p.sub_(lr / correction1 * first / (second.sqrt() / correction2 + eps))

    monkeypatch.setattr(persistent, "train", train)
    monkeypatch.setattr(persistent, "training_obstacle", lambda call, head, loss: None)
    monkeypatch.setattr(persistent, "trains_faster", lambda call: call.rows["input"].shape[0] < 10**6)
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
    monkeypatch.setattr(persistent, "trains_faster", lambda call: call.rows["input"].shape[0] < 10)
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
