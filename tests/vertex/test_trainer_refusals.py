"""What the Trainer refuses, and that a refused step changes nothing."""

from __future__ import annotations

import pytest
import torch
import weft
from torch import nn
from weft._vertex import trainer as of_trainer
from weft._vertex.runtime import persistent
from weft.vertex import Trainer, models

from tests.common import pairs
from tests.vertex.cells import BINARY, devices, rows
from tests.vertex.training import (
    OPTIMIZERS,
    C,
    H,
    X,
    batches,
    check_unchanged,
    everything,
    tree_lstm,
)


class TwoPushes(weft.VertexFunction):
    def __init__(self):
        super().__init__(3)
        self.W = nn.Linear(3, 3)

    def vertex(self, v):
        h = self.W(v.pull()) + v.gather_sum()
        v.scatter(h)
        v.push(h)
        v.push(h + 1)


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


HEADS = {
    "none": lambda device: None,
    "linear": lambda device: nn.Linear(C, C).to(device),
    "normalised": lambda device: nn.Sequential(nn.BatchNorm1d(C), nn.Linear(C, C)).to(device),
}


@devices
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "rmsprop"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("started", [False, True])
def test_bad_steps_change_nothing(started, head, optimizer, device):
    cell = models.TreeLSTM(X, C).to(device)
    head = HEADS[head](device)
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
@pairs(name=["sgd", "momentum", "adam", "fused", "rmsprop"], head=HEADS, wrong=[-1, C, -101, 2**40])
def test_a_class_out_of_range_is_an_index_error(wrong, head, name, device):
    """By the next step or sync at the latest; neither step changes anything, and training goes on."""
    cell = models.TreeLSTM(X, C).to(device)
    head = HEADS[head](device)
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
@pytest.mark.parametrize("kernels", [(False, True), (True, False), (True, True)])
def test_a_refused_step_holds_up_the_next_whatever_runs_it(kernels, monkeypatch):
    """A kernel after a loop, and the other way round, before the host knows."""
    cell = models.TreeLSTM(X, C).cuda()
    optimizer = OPTIMIZERS["adam"]([*cell.parameters()])
    trainer = Trainer(cell, optimizer)
    data = [b for b in batches(tree_lstm, 4, "cuda") if len(b[2]) > 1]
    turns = [True, False, *kernels, True]
    monkeypatch.setattr(persistent, "trains_faster", lambda _, call: turns.pop(0))
    monkeypatch.setattr(of_trainer._Sent, "there", lambda sent: False)  # however fast the device is
    trainer.step(*data[0])
    trainer.step(*data[0])
    last = trainer.sync()
    before = everything(cell, optimizer)
    bad = data[0][2].clone()
    bad[-1] = C
    with pytest.raises(IndexError, match="of the step before"):
        trainer.step(*data[0][:2], bad)
        trainer.step(*data[1])
    assert turns == [True]  # the second was launched
    check_unchanged(before, cell, optimizer)
    assert trainer.sync() == last
    trainer.step(*data[1])
    assert trainer.sync() > 0
