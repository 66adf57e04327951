"""weft.nn.MinGRU, MinLSTM and RGLRU against their papers' equations, one step after the other."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import weft
from torch import Tensor

from tests.common import BOUNDS, DEVICES, DTYPES, assert_close, pairs

LAYERS = {
    "mingru": lambda **options: weft.nn.MinGRU(5, 12, **options),
    "mingru_g": lambda **options: weft.nn.MinGRU(5, 12, activation="g", **options),
    "minlstm": lambda **options: weft.nn.MinLSTM(5, 12, **options),
    "minlstm_g": lambda **options: weft.nn.MinLSTM(5, 12, activation="g", **options),
    "rglru": lambda **options: weft.nn.RGLRU(12, **options),
    "rglru_blocks": lambda **options: weft.nn.RGLRU(12, blocks=3, **options),
}
layers = pytest.mark.parametrize("name", LAYERS)


def make(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(3)
    layer = LAYERS[name](**options)
    if name.startswith("rglru") and layer.gate_bias is not None:
        torch.nn.init.normal_(layer.gate_bias)
    return layer


def act(x: Tensor, activation: str) -> Tensor:
    return x if activation == "identity" else torch.where(x < 0, x.sigmoid(), x + 0.5)


def reference(layer: torch.nn.Module, x: Tensor, h: Tensor | None) -> Tensor:
    """States (T, B, H) of x (T, B, X), as the papers write the step."""
    H = layer.hidden_size
    h = x.new_zeros(x.size(1), H) if h is None else h
    states = []
    for x_t in x:
        if isinstance(layer, weft.nn.RGLRU):
            pieces = [piece.chunk(2) for piece in layer.weight]
            bias = torch.zeros_like(layer.weight[..., 0]) if layer.gate_bias is None else layer.gate_bias
            r = x_t @ torch.block_diag(*(p[0] for p in pieces)).T + bias[:, : H // layer.blocks].flatten()
            i = x_t @ torch.block_diag(*(p[1] for p in pieces)).T + bias[:, H // layer.blocks :].flatten()
            a = layer.Lambda.sigmoid() ** (8 * r.sigmoid())
            h = a * h + (1 - a**2).sqrt() * (i.sigmoid() * x_t)
        elif isinstance(layer, weft.nn.MinGRU):
            z, c = layer.linear(x_t).split(H, -1)
            z = z.sigmoid()
            h = (1 - z) * h + z * act(c, layer.activation)
        else:
            f, i, c = layer.linear(x_t).split(H, -1)
            f, i = f.sigmoid(), i.sigmoid()
            h = f / (f + i) * h + i / (f + i) * act(c, layer.activation)
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize("device", DEVICES)
@layers
def test_agrees_with_the_equations(name: str, device: str) -> None:
    for bias in (True, False):
        layer = make(name, bias=bias, dtype=torch.float64, device=device)
        x = torch.randn(40, 3, layer.input_size, dtype=torch.float64, device=device).requires_grad_()
        h_0 = torch.randn(3, 12, dtype=torch.float64, device=device).requires_grad_()
        for start in (None, h_0):
            output, h_n = layer(x, start)
            want = reference(layer, x, start)
            # The reference's 1 - a^2 loses digits that the layer's expm1 keeps.
            assert_close(output, want, 1e-12)
            assert torch.equal(h_n, output[-1])
            wanted = [x, *layer.parameters()] + ([] if start is None else [h_0])
            weight = torch.randn_like(output)
            got = torch.autograd.grad((output * weight).sum() + h_n.sum(), wanted)
            expected = torch.autograd.grad((want * weight).sum() + want[-1].sum(), wanted)
            for g, e in zip(got, expected, strict=True):
                assert_close(g, e, 1e-11)


@pytest.mark.parametrize("device", DEVICES)
@pairs(name=LAYERS, dtype=DTYPES, batch_first=[False, True])
def test_dtypes_layouts_and_steps(name: str, dtype: torch.dtype, batch_first: bool, device: str) -> None:
    layer = make(name, batch_first=batch_first, dtype=dtype, device=device)
    x = torch.randn(3, 20, layer.input_size, device=device).to(dtype)
    output, h_n = layer(x if batch_first else x.transpose(0, 1))
    assert output.dtype == dtype
    assert h_n.shape == (3, 12)
    states = output if batch_first else output.transpose(0, 1)
    wide = copy.deepcopy(layer).double()
    # Gates, candidate and terms are rounded before the state sums some ten of them.
    bound = 30 * BOUNDS[dtype]
    assert_close(states, reference(wide, x.double().transpose(0, 1), None).transpose(0, 1), bound)
    # Unbatched, every sequence by itself.
    single, last = layer(x[1])
    assert single.shape == (20, 12) and last.shape == (12,)
    assert_close(single, states[1].double(), bound)
    # In pieces, down to single steps, and from the state after them.
    h, pieces = None, []
    for begin, end in [(0, 1), (1, 2), (2, 9), *((t, t + 1) for t in range(9, 20))]:
        piece = x[:, begin:end]
        out, h = layer(piece if batch_first else piece.transpose(0, 1), h)
        pieces.append(out if batch_first else out.transpose(0, 1))
    assert_close(torch.cat(pieces, 1), states.double(), bound)
    assert_close(h, h_n.double(), bound)
    again, _ = layer(x if batch_first else x.transpose(0, 1))
    assert torch.equal(again, output)


@layers
def test_state_and_gradients_of_any_order(name: str) -> None:
    layer = make(name, dtype=torch.float64)
    x = torch.randn(4, 2, layer.input_size, dtype=torch.float64, requires_grad=True)
    h_0 = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x, h_0))
    assert torch.autograd.gradgradcheck(lambda x, h: layer(x, h)[0], (x, h_0))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x.detach(),))[0].square().sum()

    parameters = {k: p.detach() for k, p in layer.named_parameters()}
    found = torch.func.grad(loss)(parameters)
    layer(x.detach())[0].square().sum().backward()
    for key, p in layer.named_parameters():
        assert_close(found[key], p.grad, 1e-12)


@layers
def test_compiles_pickles_and_loads(name: str) -> None:
    layer = make(name, batch_first=True)
    x, h_0 = torch.randn(2, 7, layer.input_size), torch.randn(2, 12)
    want = layer(x, h_0)
    torch.compiler.reset()  # the layers share a forward, and a function is compiled a few times only
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (7, 4):
        for got, expected in zip(compiled(x[:, :length], h_0), layer(x[:, :length], h_0), strict=True):
            assert_close(got, expected.double())
    other = pickle.loads(pickle.dumps(layer))
    assert repr(other) == repr(layer)
    fresh = LAYERS[name](batch_first=True)
    fresh.load_state_dict(layer.state_dict())
    for candidate in (other, fresh, copy.deepcopy(layer)):
        for got, expected in zip(candidate(x, h_0), want, strict=True):
            assert torch.equal(got, expected)
    exported = torch.export.export(layer, (x, h_0)).module()
    assert torch.equal(exported(x, h_0)[0], want[0])


@pytest.mark.parametrize("device", DEVICES)
@layers
def test_autocast(name: str, device: str) -> None:
    layer = make(name, device=device)
    x, h_0 = torch.randn(9, 2, layer.input_size, device=device), torch.randn(2, 12, device=device)
    want = reference(copy.deepcopy(layer).double(), x.double(), h_0.double())
    with torch.autocast(device, torch.bfloat16):
        output, h_n = layer(x, h_0)
    assert output.dtype == torch.bfloat16
    assert h_n.dtype == (torch.float32 if name.startswith("rglru") else torch.bfloat16)
    assert_close(output, want, 0.05)
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@layers
def test_extreme_gates_and_no_steps(name: str) -> None:
    layer = make(name)
    for scale in (1e3, 1e30):
        x = (scale * torch.randn(30, 2, layer.input_size)).requires_grad_()
        output, _ = layer(x)
        assert output.isfinite().all()
        grads = torch.autograd.grad(output.sum() / scale, [x, *layer.parameters()])
        assert all(g.isfinite().all() for g in grads)
    for T, B in ((0, 3), (3, 0)):
        output, h_n = layer(torch.randn(T, B, layer.input_size))
        assert output.shape == (T, B, 12) and h_n.shape == (B, 12)
    h_0 = torch.randn(3, 12)
    assert torch.equal(layer(torch.randn(0, 3, layer.input_size), h_0)[1], h_0)


def test_parameters() -> None:
    layer = weft.nn.RGLRU(4096, blocks=16)
    a = layer.Lambda.sigmoid() ** 8
    assert 0.899 < a.min() and a.max() < 0.9991
    assert abs(a.mean().item() - 0.9495) < 0.005  # uniform
    assert layer.weight.shape == (16, 512, 256)
    assert abs(layer.weight.std().item() * 16 - 1) < 0.01
    assert [tuple(p.shape) for p in weft.nn.MinGRU(3, 5).parameters()] == [(10, 3), (10,)]
    assert [tuple(p.shape) for p in weft.nn.MinLSTM(3, 5, bias=False).parameters()] == [(15, 3)]
    assert "blocks=16" in repr(layer) and "activation='g'" in repr(weft.nn.MinLSTM(3, 5, activation="g"))


def test_remembers() -> None:
    """With closed gates the state stays, with open ones it is the candidate."""
    layer = weft.nn.MinGRU(1, 1)
    with torch.no_grad():
        layer.linear.weight.copy_(torch.tensor([[0.0], [1.0]]))
        layer.linear.bias.copy_(torch.tensor([-math.inf, 0.0]))
        assert layer(torch.randn(50, 1, 1), torch.full((1, 1), 7.0))[1].item() == 7
        layer.linear.bias[0] = math.inf
        assert layer(torch.full((5, 1, 1), 2.0))[0].flatten().tolist() == [2.0] * 5


@pytest.mark.parametrize(
    ("make_it", "error", "match"),
    [
        (lambda: weft.nn.MinGRU(0, 5), ValueError, "MinGRU: input_size must be positive, got 0"),
        (lambda: weft.nn.MinLSTM(3, 2.0), TypeError, "MinLSTM: hidden_size must be an int, got float"),
        (lambda: weft.nn.MinGRU(3, 5, activation="tanh"), ValueError, "activation must be 'identity' or 'g', got"),
        (lambda: weft.nn.RGLRU(10, blocks=3), ValueError, "RGLRU: blocks must divide hidden_size 10, got 3"),
        (lambda: weft.nn.MinGRU(3, 5)([1.0]), TypeError, "MinGRU: input must be a Tensor, got list"),
        (lambda: weft.nn.MinGRU(3, 5)(torch.zeros(2, 2, 4)), ValueError, r"input must be \(T, B, 3\) or \(T, 3\), got"),
        (lambda: weft.nn.MinLSTM(3, 5, batch_first=True)(torch.zeros(3)), ValueError, r"must be \(B, T, 3\)"),
        (lambda: weft.nn.RGLRU(3)(torch.zeros(2, 2, 3), 1), TypeError, "RGLRU: h_0 must be a Tensor, got int"),
        (lambda: weft.nn.RGLRU(3)(torch.zeros(2, 2, 3), torch.zeros(3)), ValueError, r"must be \(2, 3\), got \(3,\)"),
        (lambda: weft.nn.RGLRU(3)(torch.zeros(2, 3), torch.zeros(1, 3)), ValueError, r"must be \(3,\), got \(1, 3\)"),
        (
            lambda: weft.nn.MinGRU(3, 5)(torch.zeros(2, 2, 3), torch.zeros(2, 5).double()),
            TypeError,
            "h_0 must be torch.float32, as the states are, got torch.float64",
        ),
    ],
)  # fmt: skip
def test_bad_input(make_it, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_it()


@layers
@pytest.mark.parametrize("T", (0, 3))
def test_the_last_state_is_no_view(name: str, T: int) -> None:
    """Whoever resets a state changes neither the output nor the state before, and holds no more than the state."""
    layer = make(name)
    h_0 = torch.ones(2, layer.hidden_size)
    output, h_n = layer(torch.randn(T, 2, layer.input_size), h_0)
    before = output.detach().clone()
    assert h_n.untyped_storage().nbytes() == h_n.numel() * h_n.element_size()
    h_n.detach().zero_()
    assert torch.equal(output, before) and torch.equal(h_0, torch.ones_like(h_0))


@pytest.mark.parametrize("batch_first, layout", [(False, r"\(T, B, 3\)"), (True, r"\(B, T, 3\)")])
def test_a_shape_error_names_the_layout(batch_first, layout):
    for layer in (weft.nn.MinGRU(3, 4, batch_first=batch_first), weft.nn.GRU(3, 4, batch_first=batch_first)):
        with pytest.raises((ValueError, RuntimeError), match=f"{layout}.* batch_first is {batch_first}"):
            layer(torch.ones(5, 2, 7))
        state = torch.ones(9, 4) if isinstance(layer, weft.nn.MinGRU) else torch.ones(1, 9, 4)
        with pytest.raises((ValueError, RuntimeError), match=f"{layout}, as batch_first is {batch_first}"):
            layer(torch.ones(5, 2, 3), state)
