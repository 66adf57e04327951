"""The layers under torch.jit.trace, torch.fx, torch.jit.script and torch.onnx.export."""

from __future__ import annotations

import importlib.util
import io

import pytest
import torch
import weft
from torch.nn.utils import rnn

from tests.rnn.layers import CELLS, H, I, algorithms, assert_same, cells, cells_and_projected, flat, hx_of, layers

pytestmark = [
    pytest.mark.usefixtures("exact_fp32", "one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes"),  # of torch's own layers, too
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Model(torch.nn.Module):
    """A layer between others, and what it returns taken apart."""

    def __init__(self, layer):
        super().__init__()
        self.embed = torch.nn.Linear(I, I, dtype=layer.weight_ih_l0.dtype)
        self.layer = layer

    def forward(self, x, hx=None):
        output, final = self.layer(self.embed(x), hx)
        return 2 * output, final


def models(cell, dtype=torch.float64, algorithm="auto", **options):
    ours, theirs = (Model(layer) for layer in layers(cell, "cpu", dtype, algorithm, **options))
    ours.load_state_dict(theirs.state_dict())
    return ours.eval(), theirs.eval()


@cells_and_projected
@algorithms
def test_trace(cell, algorithm):
    """Other lengths and batches than the traced one included, in a file that needs no Weft."""
    ours, theirs = models(cell, algorithm=algorithm, num_layers=2, bidirectional=True, batch_first=True)
    traced = torch.jit.trace(ours, torch.randn(2, 5, I, dtype=torch.float64))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    traced = torch.jit.load(file)
    assert "weft::" not in str(traced.inlined_graph)
    for batch, steps in ((2, 5), (7, 11)):
        x = torch.randn(batch, steps, I, dtype=torch.float64)
        assert_same(flat(traced(x)), flat(theirs(x)))
    traced(x)[0].sum().backward()
    theirs(x)[0].sum().backward()
    for got, want in zip(traced.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@cells_and_projected
def test_trace_of_the_layer_with_a_state(cell):
    ours, theirs = layers(cell, "cpu")
    x = torch.randn(5, 2, I, dtype=torch.float64)
    state = tuple(torch.randn_like(s) for s in flat(theirs(x))[1:])
    traced = torch.jit.trace(ours, (x, hx_of(ours, state)))
    assert_same(flat(traced(x, hx_of(ours, state))), flat(theirs(x, hx_of(theirs, state))))


def test_trace_of_packed_input():
    class Packing(Model):
        def forward(self, x, lengths):
            return self.layer(rnn.pack_padded_sequence(x, lengths))[0].data

    ours, theirs = (Packing(layer) for layer in layers("lstm", "cpu"))
    x, lengths = torch.randn(5, 3, I, dtype=torch.float64), torch.tensor([5, 4, 2])
    assert_same([torch.jit.trace(ours, (x, lengths))(x, lengths)], [theirs(x, lengths)])


def test_a_trace_has_no_cells():
    layer = weft.nn.LSTM(I, H, return_cells=True)
    with pytest.raises(NotImplementedError, match=r"LSTM: torch\.jit\.trace .* return_cells"):
        torch.jit.trace(layer, torch.randn(5, 2, I))


@cells
def test_symbolic_trace(cell):
    ours, theirs = models(cell, num_layers=2)
    graph = torch.fx.symbolic_trace(ours, concrete_args={"hx": None})
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["embed", "layer"]
    assert type(graph.layer) is type(ours.layer)
    for steps, batch in ((5, 2), (11, 7)):
        x = torch.randn(steps, batch, I, dtype=torch.float64)
        assert_same(flat(graph(x)), flat(theirs(x)))
    state = tuple(torch.randn_like(s) for s in flat(theirs(x))[1:])
    graph = torch.fx.symbolic_trace(ours)
    assert_same(flat(graph(x, hx_of(ours.layer, state))), flat(theirs(x, hx_of(theirs.layer, state))))


def test_symbolic_trace_of_the_layer_itself():
    with pytest.raises(torch.fx.proxy.TraceError, match=r"GRU: torch\.fx\.symbolic_trace takes a model"):
        torch.fx.symbolic_trace(weft.nn.GRU(I, H))


@cells
def test_script(cell):
    ours, _ = models(cell)
    name = CELLS[cell][0].__name__
    with pytest.raises(NotImplementedError, match=rf"{name}: torch\.jit\.script cannot compile .* torch\.jit\.trace"):
        torch.jit.script(ours)
    assert type(ours.layer) is CELLS[cell][0]


needs_onnx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="onnx, onnxscript and onnxruntime are not installed",
)


@needs_onnx
@cells
def test_onnx(cell):
    import onnxruntime

    ours, theirs = models(cell, torch.float32, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(2, 5, I)
    program = torch.onnx.export(ours, (x,), dynamo=True, verbose=False)
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_same([torch.from_numpy(g) for g in got], flat(theirs(x)), torch.float32)


@needs_onnx
def test_onnx_is_torchs_own_layer():
    ours, _ = models("lstm", torch.float32, "persistent")
    program = torch.onnx.export(ours, (torch.randn(5, 2, I),), dynamo=True, verbose=False)
    assert [n.op_type for n in program.model_proto.graph.node].count("LSTM") == 1
