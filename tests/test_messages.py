"""Mistakes with what serves several rooms, by the message: it names what was called, the argument, what to do."""

from __future__ import annotations

import pytest
import torch
import weft
from torch import nn
from weft.nn import GRU, MinGRU, ParaGRU
from weft.scan import ScanSequential, linear_scan, pointwise_scan

from tests.fresh import python
from tests.messages import CELLS, GRAPHS, LAYERS, TORCHS, Cell, refused, x


def _output(name: str) -> torch.Tensor:
    """The result of what saves it for backward."""
    a = torch.rand(5, 2, 4, requires_grad=True)
    if name in LAYERS:
        return LAYERS[name](4, 8)(a)[0]
    if name in CELLS:
        found = CELLS[name](4, 8)(a[0])
        return found if isinstance(found, torch.Tensor) else found[0]
    if name == "linear_scan":
        return linear_scan(a, a)
    return pointwise_scan(lambda h, x, p: torch.tanh(h + x), a[0], a)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        *((name, f"weft.nn.{name}") for name in (*TORCHS, *CELLS, "ParaGRU", "ParaLSTM")),
        *((name, "weft.scan.linear_scan") for name in ("MinGRU", "MinLSTM", "RGLRU", "linear_scan")),
        ("pointwise_scan", "weft.scan.pointwise_scan"),
    ],
)
def test_a_result_that_is_changed_before_backward(name, named):
    y = _output(name)
    y.mul_(2)
    refused(
        lambda: y.sum().backward(), rf"^{named}: one of the variables needed .* which is output \d of {named}, is at v"
    )


def test_another_operators_result_that_is_changed_before_backward():
    y = _output("linear_scan")
    z = GRU(4, 8)(y)[0]
    with torch.no_grad():
        y.mul_(2)
    refused(lambda: z.sum().backward(), r"^weft.nn.GRU: .* is output 0 of another operator of Weft, is at version 1")


def test_an_input_of_a_vertex_function_that_is_changed_before_backward():
    leaf = torch.rand(3, 4, requires_grad=True)
    pulled = leaf * 1
    out = Cell()(GRAPHS, pulled)
    pulled.mul_(2)
    refused(lambda: out.sum().backward(), r"^weft.VertexFunction: one of the variables needed .* is at version 1")


def test_backward_twice():
    y = GRU(4, 8)(x(5, 2, 4))[0].sum()
    y.backward()
    refused(y.backward, r"^weft.nn.GRU: Trying to backward through the graph a second time.*retain_graph=True")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weft.accelerate(nn.GRU), "^accelerate: model must be a torch.nn.Module, got type"),
        (lambda: weft.accelerate(nn.GRU(4, 8), algorithm="fast"), "^accelerate: unknown algorithm 'fast'; known are"),
        (lambda: weft.restore([]), "^restore: model must be a torch.nn.Module, got list"),
        (lambda: weft.explain(GRU(4, 8)), r"^explain: the input of GRU is missing: weft.explain\(layer, x\)"),
        (lambda: weft.explain(MinGRU(4, 8)), r"^explain: the input of MinGRU is missing: weft.explain\(layer, x\)"),
        (lambda: weft.explain(nn.Linear(4, 8)), r"^explain: the input of Linear is missing: weft.explain\(model, x\)"),
        (lambda: weft.explain(x(5, 2, 4), GRU(4, 8)), "^explain: what to explain comes first, .*; got Tensor"),
        (lambda: weft.explain(GRU(4, 8), (x(5, 2, 4),)), "^explain: x must be a Tensor or a PackedSequence, got tuple"),
        (lambda: weft.explain(GRU(4, 8), x(5, 2, 3)), "^GRU: .*Expected 4, got 3"),
        (lambda: weft.explain(MinGRU(4, 8), x(5, 2, 3)), r"^MinGRU: input must be \(T, B, 4\)"),
        (lambda: weft.explain(ParaGRU(4, 8), (x(5, 2, 4),)), "^ParaGRU: input must be a Tensor, got tuple"),
        (lambda: weft.explain(weft.nn.GRUCell(4, 8), x(2, 3)), "^GRUCell: input must have 4 features"),
        (
            lambda: weft.explain(linear_scan, x(5, 2, 4)),
            r"^explain: missing .* 'b'; call weft.explain\(weft.scan.linear_",
        ),
        (lambda: weft.explain(linear_scan, (5, 2, 4), (5, 2, 4)), "^explain: A must be a Tensor, got tuple"),
        (lambda: weft.explain(pointwise_scan), r"^explain: missing .* 'step'; call weft.explain\(weft.scan.pointwise_"),
        (lambda: weft.explain(Cell()), r"^explain: missing .* 'graphs'; call weft.explain\(cell, graphs, inputs\)"),
        (lambda: weft.explain(ScanSequential(nn.ReLU()), [1]), "^explain: x must be a Tensor, got list"),
        (lambda: weft.tune(nn.GRU(4, 8), x(5, 2, 4)), r"^tune: .* got torch.nn.GRU; weft.accelerate\(model\) puts"),
        (
            lambda: weft.tune(nn.Linear(4, 8), x(2, 4)),
            "^tune: layer must be a weft.nn.RNN, GRU, LSTM or SLSTM, got Linear",
        ),
        (lambda: weft.tune(GRU(4, 8), [x(5, 2, 4)]), "^tune: x must be a Tensor or a PackedSequence, got list"),
    ],
)
def test_accelerate_explain_and_tune(call, message):
    refused(call, message)


def test_nothing_to_accelerate():
    with pytest.warns(UserWarning, match=r"weft.accelerate swapped nothing: Linear has no torch.nn.RNN, GRU, LSTM"):
        weft.accelerate(nn.Linear(4, 8))


def test_modules_that_are_imported_later():
    script = "import weft; print(weft.distributed.slice_sizes(3, 2))"
    assert python(script).stdout.strip() == "[2, 1]"
    assert weft.info.collect() and {"distributed", "info"} <= {*dir(weft)}
    script = (
        "import torch, weft; torch.distributed.is_available = lambda: False\n"
        "print('distributed' in dir(weft), 'info' in dir(weft))\n"
        "try: weft.distributed\n"
        "except AttributeError as error: print(error)"
    )
    there, error = python(script).stdout.splitlines()
    assert there == "False True" and error.endswith("'distributed': this torch is built without torch.distributed")
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'GRU'"):
        weft.GRU  # noqa: B018


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda wd: wd.shard_time(3), "^shard_time: module must be a torch.nn.Module, got int"),
        (lambda wd: wd.slice_sizes(3.5, 2), "^slice_sizes: steps must be an int, got float"),
        (lambda wd: wd.slice_sizes(3, 0), "^slice_sizes: ranks must be at least 1, got 0"),
        (lambda wd: wd.exchange(2, 8, link=3), "^exchange: link must be a Link, got int"),
        (lambda wd: wd.Link(latency=-1), "^Link: latency must be finite and at least 0 seconds, got -1"),
    ],
)
def test_distributed(call, message):
    refused(lambda: call(weft.distributed), message)
