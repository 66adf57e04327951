"""weft.nn.ParaGRU and ParaLSTM: equations, layouts, states, gradients, compiled graphs, errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import weft
from torch import Tensor

from tests.common import DEVICES, relative_error

LAYERS = [weft.nn.ParaGRU, weft.nn.ParaLSTM]
X, H, T, B = 6, 8, 40, 3


def equations(layer, x: Tensor, state):
    """One sequence after the other, from the formulas of the docstrings."""
    blocks, width = layer.blocks, layer.hidden_size // layer.blocks
    W = torch.stack([torch.block_diag(*layer.weight[:, i * width : (i + 1) * width]) for i in range(3)])
    b = torch.zeros(3, layer.hidden_size, dtype=x.dtype)
    if layer.bias is not None:
        b = layer.bias.view(blocks, 3, width).transpose(0, 1).reshape(3, -1)
    a = layer.recurrent
    found = []
    for t in range(len(x)):
        u = [x[t] @ W[i].T + b[i] for i in range(3)]
        if isinstance(layer, weft.nn.ParaGRU):
            (h,) = state
            z, r = torch.sigmoid(u[0] + a[0] * h), torch.sigmoid(u[1] + a[1] * h)
            c = torch.tanh(u[2] + a[2] * r * h)
            state = (h + z * (c - h),)
        else:
            (h, c), p = state, layer.peephole
            f = torch.sigmoid(u[0] + a[0] * h + p[0] * c)
            c = f * c + (1 - f) * torch.tanh(u[1] + a[1] * h)
            o = torch.sigmoid(u[2] + a[2] * h + p[1] * c)
            state = (o * torch.tanh(c), c)
        found.append(state[0])
    return torch.stack(found), state


def states(layer, dtype=torch.float64):
    drawn = tuple(torch.randn(B, H, dtype=dtype) * 0.5 for _ in range(1 if isinstance(layer, weft.nn.ParaGRU) else 2))
    return drawn, (drawn[0] if len(drawn) == 1 else drawn)


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("algorithm", ["auto", "walk", "newton", "reference"])
def test_equations(cls, blocks, bias, algorithm):
    torch.manual_seed(0)
    layer = cls(X, H, blocks=blocks, bias=bias, algorithm=algorithm, dtype=torch.float64)
    x = torch.randn(T, B, X, dtype=torch.float64, requires_grad=True)
    drawn, given = states(layer)
    output, last = layer(x, given)
    want, want_last = equations(layer, x, drawn)
    assert output.shape == (T, B, H)
    assert relative_error(output, want) < 1e-12
    for have, right in zip(last if isinstance(last, tuple) else (last,), want_last, strict=True):
        assert have.shape == (B, H)
        assert relative_error(have, right) < 1e-12
    operands = [x, *layer.parameters()]
    losses = [o.square().sum() + s[-1].sum() for o, s in ((output, last if isinstance(last, tuple) else (last,)),
                                                          (want, want_last))]  # fmt: skip
    for a, b in zip(*(torch.autograd.grad(loss, operands) for loss in losses), strict=True):
        assert relative_error(a, b) < 1e-10


@pytest.mark.parametrize("cls", LAYERS)
def test_parameters(cls):
    layer = cls(X, H, 2)
    assert layer.weight.shape == (2, 3 * H // 2, X // 2)
    assert layer.bias.shape == (2, 3 * H // 2)
    assert layer.recurrent.shape == (3, H)
    assert hasattr(layer, "peephole") == (cls is weft.nn.ParaLSTM)
    wide = cls(400, 600)
    for name, p in wide.named_parameters():
        bound = 0.5 if name in ("recurrent", "peephole") else 400**-0.5
        assert p.abs().max() <= bound
        assert p.abs().max() > 0.95 * bound
    assert cls(X, H, bias=False).bias is None
    assert f"{cls.__name__}(6, 8, blocks=2)" == repr(layer)


@pytest.mark.parametrize("cls", LAYERS)
def test_layouts(cls):
    torch.manual_seed(0)
    layer = cls(X, H, dtype=torch.float64)
    first = cls(X, H, batch_first=True, dtype=torch.float64)
    first.load_state_dict(layer.state_dict())
    x = torch.randn(T, B, X, dtype=torch.float64)
    output, last = layer(x)
    across, last_across = first(x.transpose(0, 1))
    assert torch.equal(across.transpose(0, 1), output)
    alone, last_alone = layer(x[:, 1])
    assert alone.shape == (T, H)
    assert relative_error(alone, output[:, 1]) < 1e-14
    for a, b, c in zip(*((t if isinstance(t, tuple) else (t,)) for t in (last, last_across, last_alone)), strict=True):
        assert torch.equal(a, b)
        assert c.shape == (H,)
    # On from where it was.
    start, state = layer(x[:17])
    end, _ = layer(x[17:], state)
    assert relative_error(torch.cat([start, end]), output) < 1e-14
    nothing, state = layer(x[:0], state)
    assert nothing.shape == (0, B, H)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("algorithm", ["auto", "newton"])
def test_compiled(cls, algorithm, device):
    torch.manual_seed(0)
    layer = cls(X, H, algorithm=algorithm, device=device)
    x = torch.randn(300, B, X, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (layer, compiled):
        output, _ = run(x)
        grads.append([output.detach(), *torch.autograd.grad(output.square().sum(), list(layer.parameters()))])
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("cls", LAYERS)
def test_transforms_and_copies(cls):
    torch.manual_seed(0)
    layer = cls(X, H, dtype=torch.float64)
    x = torch.randn(5, B, X, dtype=torch.float64)
    loss = lambda weights: torch.func.functional_call(layer, weights, (x,))[0].square().sum()  # noqa: E731
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    found = torch.func.grad(loss)(weights)
    want = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    for (name, have), right in zip(found.items(), want, strict=True):
        assert relative_error(have, right) < 1e-11, name
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x)[0], layer(x)[0])


@pytest.mark.parametrize("cls", LAYERS)
def test_autocast(cls):
    layer = cls(X, H)
    x = torch.randn(T, B, X)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = layer(x)
        layer(x, states(layer, torch.float32)[1])
    assert output.dtype == torch.bfloat16
    assert relative_error(output.float(), layer(x)[0]) < 2e-2
    output.float().sum().backward()


@pytest.mark.parametrize("cls", LAYERS)
def test_report_names_the_cell(cls):
    layer = cls(X, H)
    with weft.scan.newton_report() as report:
        layer(torch.randn(1000, 1, X))
    (run,) = report.runs
    assert run.op == cls.__name__.lower()
    assert "paragru" in str(report) or "paralstm" in str(report)
    found = weft.explain(layer, torch.randn(1000, 1, X))
    assert found.algorithm == "newton"
    assert str(run.chunks) in found.reason


@pytest.mark.parametrize("cls", LAYERS)
def test_bad_input(cls):
    name = cls.__name__
    layer = cls(X, H)
    for error, match, arguments in [
        (TypeError, "input must be a Tensor", (1.0,)),
        (ValueError, r"input must be \(T, B, 6\)", (torch.randn(T, B, 5),)),
        (ValueError, r"input must be \(T, B, 6\)", (torch.randn(T),)),
    ]:
        with pytest.raises(error, match=f"{name}: {match}"):
            layer(*arguments)
    bad = torch.zeros(B, 2)
    with pytest.raises(ValueError, match=f"{name}: h_0 must be"):
        layer(torch.randn(T, B, X), bad if cls is weft.nn.ParaGRU else (bad, bad))
    wide = torch.zeros(B, H, dtype=torch.float64)
    with pytest.raises(TypeError, match=f"{name}: h_0 must be torch.float32"):
        layer(torch.randn(T, B, X), wide if cls is weft.nn.ParaGRU else (wide, wide))
    for error, match, arguments in [
        (TypeError, "hidden_size must be an int", (X, 8.0)),
        (ValueError, "input_size must be positive", (0, H)),
        (ValueError, "blocks must divide", (X, H, 4)),
    ]:
        with pytest.raises(error, match=f"{name}: {match}"):
            cls(*arguments)
    with pytest.raises(ValueError, match="algorithm must be one of"):
        cls(X, H, algorithm="fast")


def test_lstm_takes_a_pair():
    with pytest.raises(TypeError, match="hx must be a tuple"):
        weft.nn.ParaLSTM(X, H)(torch.randn(T, B, X), torch.zeros(B, H))
