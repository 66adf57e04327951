"""weft.nn.SLSTM and SLSTMCell: the paper's equations, the reference, and what layers do."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import weft
from torch.nn import functional as F
from torch.nn.utils import rnn
from weft import reference

from tests.common import relative_error
from tests.rnn.layers import BOUNDS, DEVICES, OPTIONS, flat

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")

devices = pytest.mark.parametrize("device", DEVICES)
gates = pytest.mark.parametrize("gate", ["sigmoid", "exp"])


def make(gate="sigmoid", device="cpu", dtype=torch.float64, heads=2, size=3, **options):
    layer = weft.nn.SLSTM(3, heads * size, num_heads=heads, forget_gate=gate, device=device, dtype=dtype, **options)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.uniform_(-1, 1)
    return layer


def states(layer, batch, device="cpu"):
    """A random state; some of it holds nothing yet."""
    shape = (layer.num_layers * (2 if layer.bidirectional else 1), batch, layer.hidden_size)
    h, c, n, m = (torch.randn(shape, dtype=layer.weight_ih_l0.dtype, device=device) for _ in range(4))
    n = torch.where(n < -1, 0.0, n.abs() + 0.1)
    return h, torch.where(n > 0, c, 0.0), n, m


def test_the_papers_equations():
    """Without a stabiliser, in float64: the output does not depend on it."""
    for gate, forget in (("sigmoid", torch.sigmoid), ("exp", torch.exp)):
        layer = make(gate, heads=1, size=4)
        w_ih, w_hh, b_ih, b_hh = layer.parameters()
        x = torch.randn(20, 2, 3, dtype=torch.float64)
        h, c, n = (torch.zeros(2, 4, dtype=torch.float64) for _ in range(3))
        outputs = []
        for t in range(20):
            i, f, z, o = (F.linear(x[t], w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
            c = forget(f) * c + torch.exp(i) * torch.tanh(z)
            n = forget(f) * n + torch.exp(i)
            h = torch.sigmoid(o) * c / n
            outputs.append(h)
        output, (h_n, c_n, n_n, m_n) = layer(x)
        torch.testing.assert_close(output, torch.stack(outputs))
        for found, expected in ((h_n, h), (c_n * m_n.exp(), c), (n_n * m_n.exp(), n)):
            torch.testing.assert_close(found[0], expected)


def check(layer, x, state, dtype=torch.float64, run=lambda layer, x, hx: layer(x, hx)):
    """Beside the reference in float64."""
    found, outgoing = [], None
    for wide in (False, True):
        own = copy.deepcopy(layer).double() if wide else layer
        own.algorithm = "reference" if wide else layer.algorithm
        inputs = [t.detach().to(own.weight_ih_l0.dtype).requires_grad_() for t in (x, *(state or ()))]
        result = flat(run(own, inputs[0], tuple(inputs[1:]) or None))
        asked = result
        if dtype in (torch.float16, torch.bfloat16):
            # What is asked of m alone goes one way or the other, which in half precision a rounding decides. Of
            # c exp(m) and n exp(m), which no stabiliser changes, no part depends on that.
            scale = (result[4] - result[4].detach()).exp()
            asked = [*result[:2], result[2] * scale, result[3] * scale]
        outgoing = outgoing or [torch.randn_like(r) for r in asked]
        grads = torch.autograd.grad(
            asked, [*inputs, *own.parameters()], [g.to(r.dtype) for g, r in zip(outgoing, asked, strict=True)]
        )
        found.append([*result, *grads])
    errors = [relative_error(a, b) for a, b in zip(*found, strict=True)]
    assert max(errors) <= BOUNDS[dtype], errors


@devices
@gates
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("algorithm", ["auto", "persistent", "scan", "torch"])
def test_padded(device, gate, options, algorithm):
    layer = make(gate, device, algorithm=algorithm, **OPTIONS[options])
    x = torch.randn(6, 5, 3, dtype=torch.float64, device=device)
    check(layer, x, None)
    check(layer, x, states(layer, 6 if layer.batch_first else 5, device))


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads,size", [(1, 24), (3, 7), (4, 16), (2, 40)])
def test_dtypes(device, dtype, heads, size):
    layer = make("sigmoid", device, dtype, heads, size, bidirectional=True)
    with torch.no_grad():
        for weight in layer.parameters():
            weight *= 0.5
    x = torch.randn(20, 4, 3, device=device, dtype=dtype)
    state = [s.to(dtype) for s in states(layer, 4, device)]
    check(layer, x, state, dtype)


@devices
@gates
def test_packed(device, gate):
    layer = make(gate, device, bidirectional=True, num_layers=2)

    def run(layer, x, hx):
        return layer(rnn.pack_padded_sequence(x, [6, 4, 4, 1]), hx)

    check(layer, torch.randn(6, 4, 3, dtype=torch.float64, device=device), states(layer, 4, device), run=run)


@devices
def test_gates_of_any_size(device):
    """What overflows without the stabiliser does not, and a state that begins with nothing begins with any m."""
    layer = make("exp", device, torch.float32)
    x = torch.randn(50, 4, 3, device=device) * 100
    x.requires_grad_()
    output, state = layer(x)
    assert output.isfinite().all() and all(s.isfinite().all() for s in state) and (state[2] >= 1).all()
    assert output.abs().max() <= 1
    grad = torch.autograd.grad(output.sum(), [x, *layer.parameters()])
    assert all(g.isfinite().all() for g in grad)
    zeros = [torch.zeros(1, 4, 6, device=device) for _ in range(4)]
    for m in (0.0, 50.0, -50.0):
        zeros[3] = zeros[3] + m
        for a, b in zip(flat(layer(x, tuple(zeros))), (output, *state), strict=True):
            assert torch.equal(a, b)


@devices
def test_on_from_a_state(device):
    layer = make(device=device)
    x = torch.randn(9, 2, 3, dtype=torch.float64, device=device)
    output, state = layer(x)
    first, middle = layer(x[:4])
    second, end = layer(x[4:], middle)
    torch.testing.assert_close(torch.cat([first, second]), output)
    for a, b in zip(end, state, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_where_the_gates_are_equal():
    """torch.maximum gives each half."""
    layer = weft.nn.SLSTM(1, 1, num_heads=1, forget_gate="exp", bias=False, dtype=torch.float64)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
    found = []
    for algorithm in ("persistent", "reference"):
        layer.algorithm = algorithm
        x = torch.randn(3, 2, 1, dtype=torch.float64, requires_grad=True)
        state = [torch.full((1, 2, 1), v, dtype=torch.float64, requires_grad=True) for v in (0.3, 0.5, 1.5, 0.0)]
        x.data.copy_(torch.arange(6.0).view(3, 2, 1))
        _, end = layer(x, tuple(state))
        loss = sum(w * e.sum() for w, e in zip((1.0, 2.0, 3.0, 4.0), end, strict=True))
        found.append(torch.autograd.grad(loss, [x, *state, *layer.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@gates
def test_derivatives(gate):
    layer = make(gate, size=2, algorithm="persistent")
    x = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    h, c, n, m = (s.requires_grad_() for s in states(layer, 2))
    n = (n.detach() + 0.5).requires_grad_()

    def run(x, h, c, n, m, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        return tuple(flat(torch.func.functional_call(layer, named, (x, (h, c, n, m)))))

    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(run, (x, h, c, n, m, *parameters))
    assert torch.autograd.gradgradcheck(run, (x, h, c, n, m, *parameters))


def test_it_is_a_module():
    layer = make(num_layers=2, dropout=0.5, dtype=torch.float32)
    assert layer.weight_hh_l1.shape == (24, 3) and layer.weight_ih_l1.shape == (24, 6)
    assert repr(layer) == "SLSTM(3, 6, num_layers=2, dropout=0.5, num_heads=2)"
    assert repr(make("exp")) == "SLSTM(3, 6, num_heads=2, forget_gate='exp')"
    assert not isinstance(layer, torch.nn.LSTM) and isinstance(layer, torch.nn.RNNBase)
    x = torch.randn(7, 2, 3)
    torch.manual_seed(3)
    dropped = layer(x)[0]
    assert not torch.equal(dropped, layer(x)[0])
    layer.eval()
    expected = flat(layer(x))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert all(torch.equal(a, b) for a, b in zip(flat(other(x)), expected, strict=True))
    assert all(
        torch.equal(a[:, 0], b[:, 0]) for a, b in zip(flat(layer(x[:, 0])), expected, strict=True) if a.dim() == 3
    )
    unbatched = layer(x[:, 0])
    assert unbatched[0].shape == (7, 6) and unbatched[1][3].shape == (2, 6)


def test_transforms():
    layer = make(dtype=torch.float32)
    x = torch.randn(7, 2, 3)
    expected = flat(layer(x))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(flat(compiled(x)), expected, strict=True))
    state = tuple(s.float() for s in states(layer, 2))
    assert all(torch.equal(a, b) for a, b in zip(flat(compiled(x, state)), flat(layer(x, state)), strict=True))
    mapped = torch.func.vmap(lambda x: layer(x)[0], in_dims=1, out_dims=1)(x.unsqueeze(2))
    torch.testing.assert_close(mapped.squeeze(2), expected[0])
    gradient = torch.func.grad(lambda x: layer(x)[0].pow(2).sum())(x)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(layer(leaf)[0].pow(2).sum(), leaf)[0])
    value, tangent = torch.func.jvp(lambda x: layer(x)[0], (x,), (torch.ones_like(x),))
    torch.testing.assert_close(value, expected[0])
    assert tangent.isfinite().all()
    traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(x)[0], expected[0])


def test_autocast():
    layer = make(dtype=torch.float32)
    x = torch.randn(7, 2, 3)
    expected = flat(layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        found = flat(layer(x))
        plain = copy.deepcopy(layer)
        plain.algorithm = "reference"
        assert [t.dtype for t in flat(plain(x))] == [torch.bfloat16] * 5
    assert [t.dtype for t in found] == [torch.bfloat16] * 5
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 3e-2


def test_initial_forget_bias():
    layer = weft.nn.SLSTM(8, 32, num_layers=3, num_heads=2)
    for index, exponent in enumerate((0.3, 0.3 * 10**0.5, 3.0)):
        bias = getattr(layer, f"bias_ih_l{index}")
        expected = 5 - 12 * (torch.arange(16) / 15) ** exponent
        torch.testing.assert_close(bias[32:64], torch.cat([expected, expected]))
        assert not bias[:32].any() and not bias[64:].any() and not getattr(layer, f"bias_hh_l{index}").any()
    cell = weft.nn.SLSTMCell(8, 32, num_heads=2)
    assert torch.equal(cell.bias_ih, layer.bias_ih_l0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="SLSTM: num_heads must divide hidden_size 6, got 4"):
        weft.nn.SLSTM(3, 6)
    with pytest.raises(ValueError, match="forget_gate must be 'sigmoid' or 'exp', got 'tanh'"):
        weft.nn.SLSTM(3, 8, forget_gate="tanh")
    with pytest.raises(ValueError, match="unknown algorithm"):
        weft.nn.SLSTM(3, 8, algorithm="fast")
    layer, x = weft.nn.SLSTM(3, 8), torch.randn(4, 2, 3)
    state = torch.zeros(1, 2, 8)
    with pytest.raises(RuntimeError, match=r"hx must be \(h0, c0, n0, m0\), got 5"):
        layer(x, (state,) * 5)
    with pytest.raises(IndexError, match="hx must be"):
        layer(x, (state, state))
    with pytest.raises(RuntimeError, match=r"hidden\[3\]"):
        layer(x, (state, state, state, state[:, :1]))
    with pytest.raises(AttributeError, match="n0 must be a Tensor"):
        layer(x, (state, state, None, state))
    with pytest.raises(ValueError, match="c0 must be"):
        torch.ops.weft.rnn(x, state, state, list(layer.parameters()), cell="slstm", num_heads=4)


@devices
@gates
@pytest.mark.parametrize("batch", [1, 3, 9, 40])
def test_cell(device, gate, batch):
    for heads, size in ((3, 7), (2, 16), (1, 5)):
        cell = weft.nn.SLSTMCell(5, heads * size, num_heads=heads, forget_gate=gate, device=device)
        x, *state = (torch.randn(batch, n, device=device) for n in (5, *[heads * size] * 4))
        state[2] = state[2].abs() + 0.1
        found, outgoing = [], None
        for algorithm in ("fused", "torch"):
            own = copy.deepcopy(cell).to(torch.float64 if algorithm == "torch" else torch.float32)
            own.algorithm = algorithm
            inputs = [t.to(own.weight_ih.dtype).requires_grad_() for t in (x, *state)]
            result = own(inputs[0], tuple(inputs[1:]))
            outgoing = outgoing or [torch.randn_like(r) for r in result]
            grads = torch.autograd.grad(
                result, [*inputs, *own.parameters()], [g.to(r.dtype) for g, r in zip(outgoing, result, strict=True)]
            )
            found.append([*result, *grads])
        assert max(relative_error(a, b) for a, b in zip(*found, strict=True)) <= BOUNDS[torch.float32]


@gates
def test_a_cells_steps_are_the_layers(gate):
    layer = make(gate, dtype=torch.float32)
    cell = weft.nn.SLSTMCell(3, 6, num_heads=2, forget_gate=gate)
    cell.load_state_dict({k.removesuffix("_l0"): v for k, v in layer.state_dict().items()})
    x = torch.randn(7, 2, 3)
    output, end = layer(x)
    state = None
    for t in range(7):
        state = cell(x[t], state)
        torch.testing.assert_close(state[0], output[t])
    for a, b in zip(state, end, strict=True):
        torch.testing.assert_close(a, b[0])
    assert [s.shape for s in cell(x[0, 0])] == [(6,)] * 4
    with pytest.raises(ValueError, match="hx must be"):
        cell(x[0], state[:2])
    with pytest.raises(RuntimeError, match=r"h must be \(2, 6\)"):
        cell(x[0], [s[:, :3] for s in state])
    with pytest.raises(RuntimeError, match="3 features"):
        cell(torch.randn(2, 4))
    with pytest.raises(ValueError, match="input must be"):
        cell(torch.randn(2, 2, 3))
    gradient = torch.func.grad(lambda x: cell(x)[0].sum())(x[0])
    assert gradient.isfinite().all()
    mapped = torch.func.vmap(lambda x: cell(x)[0])(x)
    torch.testing.assert_close(mapped[0], cell(x[0])[0])
    compiled = torch.compile(cell, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(x[0]), cell(x[0]), strict=True))


def test_what_explain_says():
    layer = weft.nn.SLSTM(8, 8)
    found = weft.explain(layer, torch.randn(5, 2, 8))
    assert found.algorithm == "persistent" and "torch has no such layer" in found.reason
    reasons = {c.name: c.reason for c in found.candidates}
    assert (
        reasons["torch"] == "torch has no SLSTM"
        and "no SLSTM" in weft.explain(weft.nn.SLSTM(8, 8, num_heads=1), torch.randn(5, 2, 8)).candidates[1].reason
    )
    assert weft.explain(weft.nn.SLSTMCell(8, 8), torch.randn(2, 8)).algorithm == "fused"
    with pytest.raises(TypeError, match="four Tensors"):
        weft.explain(layer, torch.randn(5, 2, 8), torch.zeros(1, 2, 8))


def test_tune(tmp_path, monkeypatch):
    from weft._rnn.select import tuned

    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned.MEASURED, "entries", None)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = weft.tune(weft.nn.SLSTM(8, 8), torch.randn(5, 2, 8))
    assert found.algorithm == "persistent"


def test_the_reference_takes_a_stack():
    layer = make(num_layers=2, bidirectional=True)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    state = states(layer, 2)
    output, final = reference.rnn(
        x, state, list(layer.parameters()), cell="slstm", bias=True, num_layers=2, bidirectional=True
    )
    for a, b in zip((output, *final), flat(layer(x, state)), strict=True):
        torch.testing.assert_close(a, b)
