"""weft.explain of models, and of what is no recurrent layer."""

from __future__ import annotations

import pytest
import torch
import weft


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.old = torch.nn.GRU(3, 16)
        self.new = weft.nn.LSTM(16, 8, num_layers=2)
        self.scan = weft.nn.MinGRU(8, 8)
        self.spare = torch.nn.GRUCell(3, 4)

    def forward(self, x):
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.scan(self.new(input=self.old(x)[0])[0])[0]


def test_a_whole_model():
    model, x = _Model(), torch.randn(100, 4, 3)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    answer = weft.explain(model, x)
    assert [p.name for p in answer.parts] == ["old", "new", "scan", "spare"]
    old, new, scan, spare = answer.parts
    assert old.algorithm == weft.explain(weft.nn.GRU(3, 16), x).algorithm and old.kind == "torch.GRU"
    assert old.reason.startswith("after weft.accelerate: ")
    assert new.algorithm == weft.explain(model.new, torch.randn(100, 4, 16)).algorithm and "T=100 B=4" in new.input
    assert scan.algorithm == "diagonal scan" and spare.reason == "not called for this input"
    text = str(answer)
    assert all(name in text for name in ("_Model", "old", "weft.LSTM", "weft.MinGRU", "runs as"))
    assert model.training and model.norm.training  # as before, and nothing was learnt
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert str(weft.explain(torch.nn.Linear(3, 4), x)).startswith("Linear: no recurrent layer")


def test_scans_and_offload():
    A, b = torch.rand(10, 2, 4), torch.randn(10, 2, 4)
    assert weft.explain(weft.scan.linear_scan, A, b).algorithm == "diagonal scan"
    assert weft.explain(weft.scan.linear_scan, torch.rand(10, 2, 4, 4), b).algorithm == "dense scan"
    with pytest.raises(ValueError):
        weft.explain(weft.scan.linear_scan, A, b[:, :1])
    for kind in (weft.nn.MinGRU, weft.nn.MinLSTM, weft.nn.RGLRU, weft.nn.LRU, weft.nn.S5):
        x = torch.randn(10, 2, 3)
        answer = weft.explain(kind(3, 4), x)
        assert answer.algorithm == "diagonal scan" and "one scan" in answer.reason
        assert ("constant in time" in answer.reason) == (kind in (weft.nn.LRU, weft.nn.S5))
        assert str(answer).startswith(f"{kind.__name__}(3, 4) on (10, 2, 3) float32 on cpu\n")
        assert weft.explain(kind(3, 4), x=x) == answer == weft.explain(layer=kind(3, 4), input=x)
        assert weft.explain(kind(3, 4), x[:1]).algorithm == "step"
        packed = torch.nn.utils.rnn.pack_sequence([x[:, 0], x[:4, 1]])
        assert weft.explain(kind(3, 4), packed).input.startswith("packed (14, 3)")
    net = weft.scan.ScanSequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    answer = weft.explain(net, torch.randn(3, 4))
    assert answer.algorithm == "chain_backward" and len(answer.layers) == 3
    offload = weft.offload("1GB")
    assert str(weft.explain(offload)) == str(offload.report())


@pytest.mark.parametrize(
    ("A", "algorithm", "reason"),
    [
        ((10, 2, 4), "diagonal scan", "A is diagonal: "),
        ((4,), "diagonal scan", "constant in time"),
        ((1, 2, 4), "diagonal scan", "constant in time"),
        ((1, 1, 4), "diagonal scan", "constant in time"),
        ((10, 2, 4, 4), "dense scan", "A is dense: "),
        ((10, 4, 4), "dense scan", "shared by the batch"),
        ((10, 1, 4, 4), "dense scan", "shared by the batch"),
    ],
)
def test_kinds_of_linear_scans(A, algorithm, reason):
    b = torch.randn(10, 2, 4)
    found = weft.explain(weft.scan.linear_scan, torch.rand(A), b)
    assert found.algorithm == algorithm and reason in found.reason
    found = weft.explain(weft.scan.linear_scan, torch.rand(A).cfloat(), b.cfloat())
    assert found.algorithm == ("reference" if algorithm == "dense scan" else algorithm)
    if len(A) > 1 and len(A) != 3:
        turned = weft.explain(weft.scan.linear_scan, torch.rand(A).transpose(0, 1), b.transpose(0, 1), batch_first=True)
        assert turned.algorithm == algorithm and reason in turned.reason


def test_a_scan_that_reads_out():
    decay, c, b = torch.rand(4, 3), torch.randn(4, 3), torch.randn(10, 2, 4, 1)
    found = weft.explain(weft.scan.linear_scan, decay, b, c=c)
    assert found.algorithm == "diagonal scan" and "read out by c" in found.reason


def test_a_model_with_a_vertex_function():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = weft.vertex.models.TreeFC(4), torch.nn.Linear(4, 2)

        def forward(self, graphs, x):
            return self.head(self.cell(graphs, x))

    graphs = weft.Graphs.chain([3])
    (part,) = weft.explain(Net(), graphs, torch.randn(3, 4)).parts
    assert part.name == "cell" and part.algorithm == "batched" and part.input == repr(graphs)


class _Cell(weft.VertexFunction):
    """With a layer inside, which its trace calls."""

    def __init__(self):
        super().__init__(4)
        self.step = torch.nn.GRUCell(4, 4)

    def vertex(self, v):
        h = self.step(v.pull(), v.gather_sum())
        v.scatter(h)
        v.push(h)


class _Mine(weft.nn.GRU):
    pass


def test_rows_of_a_model_are_of_what_is_called():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.mine = weft.VertexFunctions({"a": _Cell(), "b": _Cell()}), _Mine(4, 4)
            self.cell, self.fc, self.old = _Cell(), weft.vertex.models.TreeFC(4), torch.nn.GRU(4, 4)
            self.again = self.old

        def forward(self, graphs, x):
            h = self.fc(graphs, self.cell(graphs, self.cells(graphs, x)))
            return self.old(self.mine(h)[0])

    graphs = weft.Graphs.chain([3]).with_types(["a", "b", "a"])
    parts = weft.explain(Net(), graphs, torch.randn(3, 4)).parts
    kinds = {part.name: part.kind for part in parts}
    assert kinds == {
        "cells": "weft.VertexFunctions", "mine": "_Mine", "cell": "_Cell", "fc": "weft.TreeFC", "old": "torch.GRU",
    }  # fmt: skip
    assert all(part.algorithm and "Proxy" not in part.input for part in parts)


class _Plain(torch.nn.GRU):
    """A user's own class, with nothing that runs."""


class _Doubled(torch.nn.GRU):
    def forward(self, input, hx=None):
        output, h = super().forward(input, hx)
        return 2 * output, h


class _Step(torch.nn.LSTMCell):
    pass


def test_a_model_with_subclasses_of_torchs_layers():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.doubled, self.step = _Plain(3, 4), _Doubled(4, 4), _Step(4, 4)

        def forward(self, x):
            return self.step(self.doubled(input=self.plain(x)[0])[0][-1])[0]

    model, x = Net(), torch.randn(100, 2, 3)
    plain, doubled, step = weft.explain(model, x).parts
    assert plain.algorithm == weft.explain(weft.nn.GRU(3, 4), x).algorithm and plain.kind == "_Plain"
    assert plain.reason.startswith("after weft.accelerate(model, subclasses=True): ")
    assert doubled.algorithm == step.algorithm == "itself" and doubled.input == "(100, 2, 4) float32"
    assert doubled.reason == "weft.accelerate leaves it: it overrides forward"
    assert step.reason == "weft.accelerate leaves it: it is a subclass of torch.nn.LSTMCell"
    with pytest.warns(UserWarning, match=r"doubled .* overrides forward; step .* is a subclass"):
        weft.accelerate(model, subclasses=True)
    assert [part.algorithm for part in weft.explain(model, x).parts] == [plain.algorithm, "itself", "itself"]


def test_a_subclass_of_torchs_layers():
    x = torch.randn(100, 2, 3)
    answer = weft.explain(_Plain(3, 4), x)
    assert answer.algorithm == weft.explain(weft.nn.GRU(3, 4), x).algorithm
    assert "weft.accelerate(model, subclasses=True) first" in answer.note
    with pytest.raises(TypeError, match=r"got _Doubled, which weft.accelerate leaves as it is: it overrides forward"):
        weft.explain(_Doubled(3, 4), x)
