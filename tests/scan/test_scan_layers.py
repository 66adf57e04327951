"""weft.nn.MinGRU, MinLSTM, RGLRU, LRU and S5 against their papers' equations, one step after the other, and in a GRU's
place."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import weft
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from tests.common import BOUNDS, DEVICES, DTYPES, assert_close, pairs

LAYERS = {
    "mingru": lambda **options: weft.nn.MinGRU(5, 12, **options),
    "mingru_g": lambda **options: weft.nn.MinGRU(5, 12, activation="g", **options),
    "minlstm": lambda **options: weft.nn.MinLSTM(5, 12, **options),
    "minlstm_g": lambda **options: weft.nn.MinLSTM(5, 12, activation="g", **options),
    "rglru": lambda **options: weft.nn.RGLRU(12, **options),
    "rglru_blocks": lambda **options: weft.nn.RGLRU(12, blocks=3, **options),
    "rglru_projected": lambda **options: weft.nn.RGLRU(5, 12, **options),
    "lru": lambda **options: weft.nn.LRU(5, 12, **options),
    "lru_wide": lambda **options: weft.nn.LRU(12, 12, state_size=7, **options),
    "s5": lambda **options: weft.nn.S5(5, 12, **options),
    "s5_blocks": lambda **options: weft.nn.S5(12, 12, state_size=8, blocks=2, **options),
}
COMPLEX = {"lru", "lru_wide", "s5", "s5_blocks"}
layers = pytest.mark.parametrize("name", LAYERS)


def make(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(3)
    layer = LAYERS[name](**options)
    for key, parameter in layer.named_parameters():
        if key.startswith("gate_bias"):
            torch.nn.init.normal_(parameter)
    return layer


def states(layer: torch.nn.Module) -> int:
    """How many numbers a state has."""
    return layer._state_size


def start(layer: torch.nn.Module, rows: int, B: int, **options) -> Tensor:
    dtype = options.pop("dtype", torch.float32)
    if isinstance(layer, (weft.nn.LRU, weft.nn.S5)):
        dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.randn(rows, B, states(layer), dtype=dtype, **options)


def act(x: Tensor, activation: str) -> Tensor:
    return x if activation == "identity" else torch.where(x < 0, x.sigmoid(), x + 0.5)


def wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(torch.complex128 if t.is_complex() else torch.float64)


def get(layer: torch.nn.Module, suffix: str, *names: str) -> list:
    return [getattr(layer, name + suffix) for name in names]


def one_direction(layer: torch.nn.Module, x: Tensor, h: Tensor | None, suffix: str = "") -> tuple[Tensor, Tensor]:
    """Output (T, B, H) of x (T, B, X) and the last state, as the papers write the step."""
    H = layer.hidden_size
    dtype = torch.promote_types(x.dtype, torch.complex64) if isinstance(layer, (weft.nn.LRU, weft.nn.S5)) else x.dtype
    h = torch.zeros(x.size(1), states(layer), dtype=dtype, device=x.device) if h is None else h
    outputs = []
    if isinstance(layer, weft.nn.LRU):
        nu, theta, gamma, B, C, D = get(layer, suffix, "nu_log", "theta_log", "gamma_log", "B", "C", "D")
        factor = torch.exp(torch.complex(-nu.exp(), theta.exp()))
        enters, C = gamma.exp()[:, None] * torch.complex(B[:, 0], B[:, 1]), torch.complex(C[..., 0], C[..., 1])
    elif isinstance(layer, weft.nn.S5):
        re, im, step, B, C, D = get(layer, suffix, "Lambda_re", "Lambda_im", "log_step", "B", "C", "D")
        rate = torch.complex(re, im)
        factor = torch.exp(rate * step.exp())
        enters, C = (
            ((factor - 1) / rate)[:, None] * torch.complex(B[:, 0], B[:, 1]),
            torch.complex(C[..., 0], C[..., 1]),
        )
        C = 2 * C
    elif isinstance(layer, weft.nn.RGLRU):
        weight, gate_bias, Lambda = get(layer, suffix, "weight", "gate_bias", "Lambda")
    for x_t in x:
        if isinstance(layer, (weft.nn.LRU, weft.nn.S5)):
            h = factor * h + x_t.to(dtype) @ enters.T
            skip = 0 if D is None else D * x_t if D.dim() == 1 else x_t @ D.T
            outputs.append((h @ C.T).real + skip)
            continue
        if isinstance(layer, weft.nn.RGLRU):
            if x_t.size(-1) != H:
                x_t = getattr(layer, "projection" + suffix)(x_t)
            pieces = [piece.chunk(2) for piece in weight]
            bias = torch.zeros_like(weight[..., 0]) if gate_bias is None else gate_bias
            r = x_t @ torch.block_diag(*(p[0] for p in pieces)).T + bias[:, : H // layer.blocks].flatten()
            i = x_t @ torch.block_diag(*(p[1] for p in pieces)).T + bias[:, H // layer.blocks :].flatten()
            a = Lambda.sigmoid() ** (8 * r.sigmoid())
            h = a * h + (1 - a**2).sqrt() * (i.sigmoid() * x_t)
        elif isinstance(layer, weft.nn.MinGRU):
            z, c = getattr(layer, "linear" + suffix)(x_t).split(H, -1)
            z = z.sigmoid()
            h = (1 - z) * h + z * act(c, layer.activation)
        else:
            f, i, c = getattr(layer, "linear" + suffix)(x_t).split(H, -1)
            f, i = f.sigmoid(), i.sigmoid()
            h = f / (f + i) * h + i / (f + i) * act(c, layer.activation)
        outputs.append(h)
    return torch.stack(outputs), h


def reference(layer: torch.nn.Module, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and last states of all layers and directions, of x (T, B, X)."""
    directions, last = 2 if layer.bidirectional else 1, []
    for k in range(layer.num_layers):
        if k > 0 and isinstance(layer, (weft.nn.LRU, weft.nn.S5)):
            x = torch.nn.functional.gelu(x)
        outputs = []
        for d in range(directions):
            suffix = "" if k == d == 0 else f"_l{k}" + ("_reverse" if d else "")
            start = None if h is None else h[k * directions + d]
            output, end = one_direction(layer, x.flip(0) if d else x, start, suffix)
            outputs.append(output.flip(0) if d else output)
            last.append(end)
        x = torch.cat(outputs, -1)
    return x, torch.stack(last)


@pytest.mark.parametrize("device", DEVICES)
@layers
def test_agrees_with_the_equations(name: str, device: str) -> None:
    for bias in (True, False):
        layer = make(name, bias=bias, dtype=torch.float64, device=device)
        x = torch.randn(40, 3, layer.input_size, dtype=torch.float64, device=device).requires_grad_()
        hx = start(layer, 1, 3, dtype=torch.float64, device=device).requires_grad_()
        for given in (None, hx, hx[0]):
            output, h_n = layer(x, given)
            want, end = reference(layer, x, given if given is None or given.dim() == 3 else given[None])
            # The reference's 1 - a^2 loses digits that the layer's expm1 keeps.
            assert_close(output, want, 1e-12)
            assert h_n.shape == (end if given is None or given.dim() == 3 else end[0]).shape
            if name not in COMPLEX:
                assert torch.equal(h_n.view(3, 12), output[-1])
            wanted = [x, *layer.parameters()] + ([] if given is None else [hx])
            weight = torch.randn_like(output)
            got = torch.autograd.grad((output * weight).sum() + h_n.real.sum(), wanted)
            expected = torch.autograd.grad((want * weight).sum() + end.real.sum(), wanted)
            for g, e in zip(got, expected, strict=True):
                assert_close(view(g), view(e), 1e-11)


def view(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


@pytest.mark.parametrize("device", DEVICES)
@pairs(name=LAYERS, dtype=DTYPES, batch_first=[False, True])
def test_dtypes_layouts_and_steps(name: str, dtype: torch.dtype, batch_first: bool, device: str) -> None:
    layer = make(name, batch_first=batch_first, dtype=dtype, device=device)
    x = torch.randn(3, 20, layer.input_size, device=device).to(dtype)
    output, h_n = layer(x if batch_first else x.transpose(0, 1))
    assert output.dtype == dtype
    assert h_n.shape == (1, 3, states(layer))
    found = output if batch_first else output.transpose(0, 1)
    exact = copy.deepcopy(layer).double()
    # Gates, candidate and terms are rounded before the state sums some ten of them.
    bound = 30 * BOUNDS[dtype]
    assert_close(found, reference(exact, x.double().transpose(0, 1), None)[0].transpose(0, 1), bound)
    # Unbatched, every sequence by itself.
    single, last = layer(x[1])
    assert single.shape == (20, 12) and last.shape == (1, states(layer))
    assert_close(single, found[1].double(), bound)
    assert layer(x[1], last[0])[1].shape == last[0].shape
    # In pieces, down to single steps, and from the state after them.
    h, pieces = None, []
    for begin, end in [(0, 1), (1, 2), (2, 9), *((t, t + 1) for t in range(9, 20))]:
        piece = x[:, begin:end]
        out, h = layer(piece if batch_first else piece.transpose(0, 1), h)
        pieces.append(out if batch_first else out.transpose(0, 1))
    assert_close(torch.cat(pieces, 1), found.double(), bound)
    assert_close(view(h), view(wide(h_n)), bound)
    again, _ = layer(x if batch_first else x.transpose(0, 1))
    assert torch.equal(again, output)


@layers
def test_state_and_gradients_of_any_order(name: str) -> None:
    layer = make(name, dtype=torch.float64)
    x = torch.randn(4, 2, layer.input_size, dtype=torch.float64, requires_grad=True)
    hx = start(layer, 1, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x, hx))
    assert torch.autograd.gradgradcheck(lambda x, h: layer(x, h)[0], (x, hx), fast_mode=True)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x.detach(),))[0].square().sum()

    parameters = {k: p.detach() for k, p in layer.named_parameters()}
    found = torch.func.grad(loss)(parameters)
    layer(x.detach())[0].square().sum().backward()
    for key, p in layer.named_parameters():
        assert_close(found[key], p.grad, 1e-12)


# Of one kind a word differs, which the graph hands on.
@pytest.mark.parametrize("name", ["mingru", "minlstm", "rglru_blocks", "rglru_projected", "lru_wide", "s5_blocks"])
def test_compiles(name: str) -> None:
    layer = make(name, batch_first=True)
    x, h_0 = torch.randn(2, 7, layer.input_size), start(layer, 1, 2)
    torch.compiler.reset()  # the layers share a forward, and a function is compiled a few times only
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (7, 4):
        for got, expected in zip(compiled(x[:, :length], h_0), layer(x[:, :length], h_0), strict=True):
            assert_close(view(got), view(wide(expected)))
    if name in ("minlstm", "rglru_blocks", "lru_wide"):
        return  # exported alike
    exported = torch.export.export(layer, (x, h_0)).module()
    assert torch.equal(exported(x, h_0)[0], layer(x, h_0)[0])


@layers
def test_pickles_and_loads(name: str) -> None:
    layer = make(name, batch_first=True)
    x, h_0 = torch.randn(2, 7, layer.input_size), start(layer, 1, 2)
    want = layer(x, h_0)
    other = pickle.loads(pickle.dumps(layer))
    assert repr(other) == repr(layer)
    fresh = LAYERS[name](batch_first=True)
    fresh.load_state_dict(layer.state_dict())
    for candidate in (other, fresh, copy.deepcopy(layer)):
        for got, expected in zip(candidate(x, h_0), want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@layers
def test_autocast(name: str, device: str) -> None:
    layer = make(name, device=device)
    x, h_0 = torch.randn(9, 2, layer.input_size, device=device), start(layer, 1, 2, device=device)
    want, _ = reference(copy.deepcopy(layer).double(), x.double(), wide(h_0))
    with torch.autocast(device, torch.bfloat16):
        output, h_n = layer(x, h_0)
    assert output.dtype == torch.bfloat16
    state = torch.complex64 if name in COMPLEX else torch.float32 if name.startswith("rglru") else torch.bfloat16
    assert h_n.dtype == state
    assert_close(output, want, 0.05)
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in COMPLEX])
def test_extreme_gates(name: str) -> None:
    layer = make(name)
    for scale in (1e3, 1e30):
        x = (scale * torch.randn(30, 2, layer.input_size)).requires_grad_()
        output, _ = layer(x)
        assert output.isfinite().all()
        grads = torch.autograd.grad(output.sum() / scale, [x, *layer.parameters()])
        assert all(g.isfinite().all() for g in grads)


@layers
def test_no_steps(name: str) -> None:
    layer = make(name)
    for T, B in ((0, 3), (3, 0)):
        output, h_n = layer(torch.randn(T, B, layer.input_size))
        assert output.shape == (T, B, 12) and h_n.shape == (1, B, states(layer))
    h_0 = start(layer, 1, 3)
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
        (lambda: weft.nn.RGLRU(3)(torch.zeros(2, 2, 3), 1), TypeError, "RGLRU: hx must be a Tensor, got int"),
        (
            lambda: weft.nn.RGLRU(3)(torch.zeros(2, 2, 3), torch.zeros(3)),
            ValueError,
            r"must be \(1, 2, 3\) or \(2, 3\), got \(3,\)",
        ),
        (
            lambda: weft.nn.RGLRU(3)(torch.zeros(2, 3), torch.zeros(2, 3)),
            ValueError,
            r"must be \(1, 3\) or \(3,\), got \(2, 3\)",
        ),
        (
            lambda: weft.nn.MinGRU(3, 5, 2)(torch.zeros(2, 2, 3), torch.zeros(2, 5)),
            ValueError,
            r"must be \(2, 2, 5\), got \(2, 5\)",
        ),
        (lambda: weft.nn.MinGRU(3, 5, True), TypeError, "num_layers must be an int, got bool"),
        (lambda: weft.nn.MinGRU(3, 5, 2, dropout=2), ValueError, "dropout must be a number from 0 to 1, got 2"),
        (lambda: weft.nn.MinGRU(3, 5)(pack_sequence([torch.zeros(2, 4)])), ValueError, r"input must be \(N, 3\), got"),
        (lambda: weft.nn.LRU(3, 5, r_min=1), ValueError, "0 <= r_min < r_max <= 1"),
        (lambda: weft.nn.S5(3, 5, state_size=6, blocks=2), ValueError, r"a multiple of 2 \* blocks = 4, got 6"),
        (lambda: weft.nn.S5(3, 5, dt_min=0), ValueError, "0 < dt_min <= dt_max"),
        (
            lambda: weft.nn.MinGRU(3, 5)(torch.zeros(2, 2, 3), torch.zeros(2, 5).double()),
            TypeError,
            "hx must be torch.float32, as the states are, got torch.float64",
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
    h_0 = torch.ones_like(start(layer, 1, 2))
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
        state = torch.ones(1, 9, 4)
        with pytest.raises((ValueError, RuntimeError), match=f"{layout}, as batch_first is {batch_first}"):
            layer(torch.ones(5, 2, 3), state)


GRUS = [
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 3, "bidirectional": True, "batch_first": True},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", GRUS, ids=lambda o: "-".join(o))
@layers
def test_in_the_place_of_a_gru(name: str, options: dict, device: str) -> None:
    """The shapes of nn.GRU, the equations of every layer and direction, packed sequences in any order."""
    layer = make(name, dtype=torch.float64, device=device, **options)
    rows, directions = layer.num_layers * (1 + layer.bidirectional), 1 + layer.bidirectional
    x = torch.randn(9, 4, layer.input_size, dtype=torch.float64, device=device)
    hx = start(layer, rows, 4, dtype=torch.float64, device=device)
    batch_first = options.get("batch_first", False)
    for given in (None, hx):
        want, ends = reference(layer, x, given)
        output, h_n = layer(x.transpose(0, 1) if batch_first else x, given)
        assert output.is_contiguous() and h_n.shape == (rows, 4, states(layer))
        output = output.transpose(0, 1) if batch_first else output
        assert output.shape == (9, 4, directions * 12)
        assert_close(output, want, 1e-11)
        assert_close(view(h_n), view(ends), 1e-11)
        single, last = layer(x[:, 1], None if given is None else given[:, 1])
        assert_close(single, want[:, 1], 1e-11)
        assert_close(view(last), view(ends[:, 1]), 1e-11)
        lengths = [4, 9, 1, 7]
        packed = pack_sequence([x[:n, i] for i, n in enumerate(lengths)], enforce_sorted=False)
        found, last = layer(packed, given)
        padded, _ = pad_packed_sequence(found)
        for i, n in enumerate(lengths):
            start_i = None if given is None else given[:, i : i + 1]
            want_i, end = reference(layer, x[:n, i : i + 1], start_i)
            assert_close(padded[:n, i], want_i[:, 0], 1e-11)
            assert_close(view(last[:, i]), view(end[:, 0]), 1e-11)
    assert isinstance(found, PackedSequence)
    x = x.detach()[:3].requires_grad_()
    packed = pack_sequence([x[:3, 0], x[:2, 1]])
    (found.data.sum() if (found := layer(packed)[0]) is not None else x.sum()).backward()
    assert (x.grad[2, 1] == 0).all() and (x.grad[:2, :2] != 0).any()


@layers
def test_dropout_acts_between_layers(name: str) -> None:
    layer = make(name, num_layers=2, dropout=0.5)
    x = torch.randn(20, 2, layer.input_size)
    torch.manual_seed(1)
    one = layer(x)[0]
    torch.manual_seed(2)
    assert not torch.equal(layer(x)[0], one)
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    with pytest.warns(UserWarning, match="dropout acts between layers"):
        make(name, dropout=0.5)


def test_names_of_parameters() -> None:
    assert list(weft.nn.MinGRU(3, 5, 2, bidirectional=True).state_dict()) == [
        f"linear{suffix}.{kind}" for suffix in ("", "_l0_reverse", "_l1", "_l1_reverse") for kind in ("weight", "bias")
    ]
    assert list(weft.nn.RGLRU(4).state_dict()) == ["weight", "gate_bias", "Lambda"]
    assert list(weft.nn.RGLRU(hidden_size=4).state_dict()) == ["weight", "gate_bias", "Lambda"]
    assert "num_layers=2, bidirectional=True" in repr(weft.nn.MinLSTM(3, 5, 2, bidirectional=True))


def test_initialisation_of_the_state_spaces() -> None:
    layer = weft.nn.LRU(64, 64, state_size=4096, r_min=0.4, r_max=0.9, max_phase=0.3)
    factor = layer._system("", torch.float64)[0]
    size, phase = factor.abs(), factor.angle()
    assert 0.4 <= size.min() < 0.41 and 0.89 < size.max() <= 0.9 and 0 < phase.min() and 0.29 < phase.max() <= 0.3001
    assert abs((size**2).mean().item() - (0.16 + 0.81) / 2) < 0.01  # uniform on the ring's area
    assert_close(layer.gamma_log.exp(), (1 - size**2).sqrt(), 1e-3)
    assert abs(layer.B.var().item() * 128 - 1) < 0.05 and abs(layer.C.var().item() * 4096 - 1) < 0.05
    values = weft.nn.S5(8, 8, state_size=64)
    n = torch.arange(64, dtype=torch.float64)
    root = (2 * n + 1).sqrt()
    hippo = -torch.tril(root[:, None] * root, -1) - torch.diag(n + 1)
    normal = hippo + (n + 0.5).sqrt()[:, None] * (n + 0.5).sqrt()
    want = torch.linalg.eigvals(normal)
    found = torch.complex(values.Lambda_re, values.Lambda_im).to(torch.complex128)
    assert_close(found.imag.sort().values, want.imag[want.imag > 0].sort().values, 1e-6)
    assert_close(found.real, torch.full((32,), -0.5), 1e-6)
    # The system is the real one of B, C and HiPPO-N: the first outputs of an impulse are those of its exponentials.
    steps = values.log_step.exp()
    assert 0.001 <= steps.min() and steps.max() <= 0.1


@pytest.mark.parametrize("kind", [weft.nn.LRU, weft.nn.S5])
def test_learns_to_remember(kind: type) -> None:
    torch.manual_seed(0)
    layer = kind(1, 8)
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    losses = []
    for _ in range(60):
        x = torch.randn(40, 32, 1)
        loss = (layer(x)[0][..., :1] - x.cumsum(0) / 6).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
