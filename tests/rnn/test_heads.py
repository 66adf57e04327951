"""Layers and cells of several heads, beside torch's own with a recurrent matrix that has the heads on its diagonal."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import weft
from torch.nn.utils import rnn

from tests.common import relative_error
from tests.rnn.layers import BOUNDS, CELLS, DEVICES, OPTIONS, flat, hx_of, states

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")

devices = pytest.mark.parametrize("device", DEVICES)
cells = pytest.mark.parametrize("cell", CELLS)


def dense(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """(G H, H / heads) as the (G H, H) that it stands for."""
    P = weight.size(1)
    blocks = weight.view(-1, heads, P, P)
    return torch.cat([torch.block_diag(*gate) for gate in blocks])


def in_heads(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """The part of a gradient of dense weights that is that of the heads'."""
    P = grad.size(1) // heads
    by_head = grad.view(-1, heads, P, heads, P)
    return torch.stack([by_head[:, h, :, h] for h in range(heads)], 1).reshape(-1, P)


def both(cell, device, heads, P, dtype=torch.float64, **options):
    """Weft's layer of heads, and torch's of the same function."""
    ours, theirs, extra = CELLS[cell]
    ours = ours(3, heads * P, num_heads=heads, device=device, dtype=dtype, **extra, **options)
    options.pop("algorithm", None)
    theirs = theirs(3, heads * P, device=device, dtype=dtype, **extra, **options)
    found = {k: dense(w, heads) if k.startswith("weight_hh") else w for k, w in ours.state_dict().items()}
    theirs.load_state_dict(found)
    return ours, theirs


def check(ours, theirs, x, state, run=lambda layer, x, hx: layer(x, hx), dtype=torch.float64):
    results, grads, outgoing = [], [], None
    for layer in (ours, theirs):
        inputs = [t.detach().clone().requires_grad_() for t in (x, *(state or ()))]
        result = flat(run(layer, inputs[0], hx_of(layer, tuple(inputs[1:]) or None)))
        outgoing = outgoing or [torch.randn_like(r) for r in result]
        found = torch.autograd.grad(result, [*inputs, *layer.parameters()], outgoing)
        names = [None] * len(inputs) + [name for name, _ in layer.named_parameters()]
        if layer is theirs:
            found = [
                in_heads(g, ours.num_heads) if n and n.startswith("weight_hh") else g
                for n, g in zip(names, found, strict=True)
            ]
        results.append(result)
        grads.append(found)
    for a, b in ((results[0], results[1]), (grads[0], grads[1])):
        assert max(relative_error(x, y) for x, y in zip(a, b, strict=True)) <= BOUNDS[dtype]


@devices
@cells
@pytest.mark.parametrize("algorithm", ["auto", "persistent", "scan", "torch", "reference"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_block_diagonal_matrix(device, cell, algorithm, options):
    ours, theirs = both(cell, device, 2, 3, algorithm=algorithm, **OPTIONS[options])
    x = torch.randn(6, 5, 3, dtype=torch.float64, device=device)
    for given in (False, True):
        check(ours, theirs, x, states(ours, 6 if ours.batch_first else 5) if given else None)


@devices
@cells
@pytest.mark.parametrize("heads,P", [(1, 24), (3, 7), (4, 16), (5, 17), (2, 40)])
def test_sizes_in_fp32(device, cell, heads, P):
    ours, theirs = both(cell, device, heads, P, torch.float32, bidirectional=True)
    check(ours, theirs, torch.randn(20, 4, 3, device=device), states(ours, 4), dtype=torch.float32)


@devices
@cells
def test_packed(device, cell):
    ours, theirs = both(cell, device, 3, 5, bidirectional=True, num_layers=2)

    def run(layer, x, hx):
        return layer(rnn.pack_padded_sequence(x, [6, 4, 4, 1]), hx)

    x = torch.randn(6, 4, 3, dtype=torch.float64, device=device)
    check(ours, theirs, x, states(ours, 4), run)


def test_many_threads():
    """Recurrences that take turns on the threads of a team, each with slices of its units."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    ours, theirs = both("lstm", "cpu", 3, 64, torch.float32)
    try:
        torch.set_num_threads(2)
        for batch in (1, 2, 7):
            check(ours, theirs, torch.randn(200, batch, 3), states(ours, batch), dtype=torch.float32)
    finally:
        torch.set_num_threads(before)


def test_one_head_is_torchs():
    for cell in CELLS:
        ours, theirs = both(cell, "cpu", 1, 4)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert all(
            a.shape == b.shape for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        )
        torch.manual_seed(1)
        ours.reset_parameters()
        torch.manual_seed(1)
        theirs.reset_parameters()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
        assert "num_heads" not in repr(ours)


@cells
def test_a_layer_of_heads_is_a_module(cell):
    kind, _, extra = CELLS[cell]
    layer = kind(3, 8, num_heads=2, **extra)
    assert layer.weight_hh_l0.shape == (layer.weight_ih_l0.shape[0], 4)
    assert "num_heads=2" in repr(layer)
    x = torch.randn(5, 2, 3)
    expected = flat(layer(x))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.num_heads == 2
        assert all(torch.equal(a, b) for a, b in zip(flat(other(x)), expected, strict=True))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(flat(compiled(x)), expected, strict=True))
    mapped = torch.func.vmap(lambda x: flat(layer(x))[0], in_dims=1, out_dims=1)(x.unsqueeze(2))
    torch.testing.assert_close(mapped.squeeze(2), expected[0])
    gradient = torch.func.grad(lambda x: flat(layer(x))[0].pow(2).sum())(x)
    x.requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(flat(layer(x))[0].pow(2).sum(), x)[0])


@cells
def test_derivatives(cell):
    kind, _, extra = CELLS[cell]
    layer = kind(2, 4, num_heads=2, dtype=torch.float64, algorithm="persistent", **extra)
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)

    def run(x, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        return tuple(flat(torch.func.functional_call(layer, named, (x,))))

    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(run, (x, *parameters))
    assert torch.autograd.gradgradcheck(run, (x, *parameters))


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3, 9, 40])
@pytest.mark.parametrize("kind", [weft.nn.RNNCell, weft.nn.GRUCell, weft.nn.LSTMCell], ids=lambda k: k.__name__)
def test_cells(device, dtype, batch, kind):
    for heads, P in ((3, 7), (2, 16)):
        ours = kind(5, heads * P, num_heads=heads, device=device, dtype=dtype)
        theirs = next(b for b in kind.__mro__ if b.__module__.startswith("torch"))(
            5, heads * P, device=device, dtype=torch.float64
        )
        wide = {k: v.double() for k, v in ours.state_dict().items()}
        theirs.load_state_dict({k: dense(v, heads) if k == "weight_hh" else v for k, v in wide.items()})
        count = 2 if kind is weft.nn.LSTMCell else 1
        tensors = [torch.randn(batch, n, device=device).to(dtype) for n in (5, *[heads * P] * count)]
        found, outgoing = [], None
        for cell in (ours, theirs):
            x, *state = (t.to(cell.weight_ih.dtype).requires_grad_() for t in tensors)
            result = cell(x, tuple(state) if count == 2 else state[0])
            result = result if isinstance(result, tuple) else (result,)
            outgoing = outgoing or [torch.randn_like(r) for r in result]
            grads = torch.autograd.grad(
                result, [x, *state, *cell.parameters()], [g.to(r.dtype) for g, r in zip(outgoing, result, strict=True)]
            )
            grads = [in_heads(g, heads) if cell is theirs and g.shape == cell.weight_hh.shape else g for g in grads]
            found.append([*result, *grads])
        assert max(relative_error(a, b) for a, b in zip(*found, strict=True)) <= BOUNDS[dtype]


def test_plain_steps_of_a_cell():
    for kind in (weft.nn.RNNCell, weft.nn.GRUCell, weft.nn.LSTMCell):
        cell = kind(5, 8, num_heads=2, dtype=torch.float64)
        plain = copy.deepcopy(cell)
        plain.algorithm = "torch"
        for x in (torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)):
            a, b = (c(x) for c in (cell, plain))
            torch.testing.assert_close(a, b)


def test_bad_heads():
    for kind in (weft.nn.RNN, weft.nn.GRU, weft.nn.LSTM, weft.nn.RNNCell, weft.nn.GRUCell, weft.nn.LSTMCell):
        name = kind.__name__
        for heads in (3, 0, -1):
            with pytest.raises(ValueError, match=f"{name}: num_heads must divide hidden_size 4, got {heads}"):
                kind(2, 4, num_heads=heads)
        with pytest.raises(TypeError, match="num_heads must be an int"):
            kind(2, 4, num_heads=2.0)
    with pytest.raises(ValueError, match="proj_size"):
        weft.nn.LSTM(2, 4, num_heads=2, proj_size=2)
    x, w = torch.randn(3, 2, 2), torch.randn(4, 2)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        torch.ops.weft.rnn(x, None, None, [w, w], cell="rnn_tanh", num_heads=0)
    with pytest.raises(ValueError, match="w_ih must be"):
        torch.ops.weft.rnn(x, None, None, [torch.randn(3, 2), w], cell="rnn_tanh", num_heads=2)
    with pytest.raises(ValueError, match=r"w_hh must be \(G\*H, H / num_heads\)"):
        torch.ops.weft.rnn_cell(x[0], torch.randn(2, 4), None, w, torch.randn(4), cell="rnn_tanh", num_heads=2)


def test_what_explain_says():
    layer = weft.nn.LSTM(8, 8, num_heads=2)
    found = weft.explain(layer, torch.randn(5, 2, 8))
    assert found.algorithm == "persistent" and "torch has no such layer" in found.reason
    reasons = {c.name: c.reason for c in found.candidates}
    assert "no heads" in reasons["torch"] and "no heads" in reasons["scan"]
    layer.algorithm = "torch"
    assert weft.explain(layer, torch.randn(5, 2, 8)).algorithm == "persistent"
