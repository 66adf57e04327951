"""weft.offload: gradients to the last bit, what it counts, and each known failure of systems like it."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import threading
import types
import warnings
import weakref

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import weft
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from weft.offloading import Link, OffloadReport, Saved, Timeline, offload

cuda = pytest.mark.cuda
ENGINES = [
    ("cpu", "reference"),
    pytest.param(("cuda", "reference"), marks=cuda),
    pytest.param(("cuda", "copy"), marks=cuda),
]
MANAGED = pytest.param(("cuda", "managed"), marks=cuda)
REASONS = {"small", "last", "pool", "host", "budget", "other"}
KEYS = {
    "backend", "compress", "budget_bytes", "uses", "saved_bytes", "saved_tensors", "moved_bytes", "moved_tensors",
    "kept_bytes", "kept_tensors", "kept", "sent_bytes", "returned_bytes", "compressed_tensors", "peak_bytes",
    "peak_bytes_without", "predicted_peak_bytes", "predicted_stall_seconds", "budget_met", "live_bytes", "host_bytes",
    "host_peak_bytes", "forward_seconds", "backward_seconds", "forward_stall_seconds", "backward_stall_seconds",
    "stalls",    "d2h_bytes_per_second", "h2d_bytes_per_second",
}  # fmt: skip


@pytest.fixture(params=ENGINES, ids=lambda e: f"{e[0]}-{e[1]}")
def engine(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


def everything(backend: str = "reference", **options) -> offload:
    """Moves all that may move."""
    return offload(0, backend=backend, **{"min_bytes": 0, "keep_last": 0, "compress": None, **options})


def numbers(off: offload) -> dict:
    """The report, checked for what always holds."""
    report = off.report()
    assert isinstance(report, OffloadReport) and str(report).count("\n") > 5
    n = report.to_dict()
    assert set(n) >= KEYS and set(n["kept"]) == REASONS
    json.dumps(n)
    assert n["saved_bytes"] == n["moved_bytes"] + n["kept_bytes"]
    assert n["saved_tensors"] == n["moved_tensors"] + n["kept_tensors"]
    assert sum(n["kept"].values()) == n["kept_bytes"] and min(n["kept"].values()) >= 0
    # What moves may need staging for its codec, also where it is not brought back.
    assert n["peak_bytes"] <= n["peak_bytes_without"] or n["moved_bytes"] > 0
    assert n["host_peak_bytes"] >= n["host_bytes"] >= 0
    return n


# ---- Models: gradients to the last bit


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x) + x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase, packed: bool) -> None:
        super().__init__()
        self.layer, self.packed = layer, packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 5, 5, 2]))
        y = self.layer(x)[0]
        return (y.data if self.packed else y).tanh()


class Squares(nn.Module):
    """Views and transposes of square matrices, saved twice, some changed in place before they are saved again."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        a = x @ self.w
        b = a @ a.t() + a.t() @ a + a * a.t()
        c = b.view(4, 4, 16)[1:3].transpose(0, 1) * b[::2].reshape(2, 4, 16).transpose(0, 1)
        d = (b[2:] * b[:-2] + b.diagonal()).relu_() * b[0].expand(14, 16)
        return c.sum(-1) @ c.sum(-1).t() + (d * d).sum() + torch.as_strided(b, (5, 5), (3, 2), 1).pow(2).sum()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        y = checkpoint(self.second, y, use_reentrant=self.reentrant)
        return (y * y).sin()


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for wide, width in ((3, 8), (8, 16)):
        layers += [nn.Conv2d(wide, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(16 * 16, 32), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(32, 10)
    )


MODELS = {
    "vgg": (vgg, (4, 3, 16, 16)),
    "resnet": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8), nn.MaxPool2d(2), Residual(8)), (4, 3, 12, 12)),
    "gpt": (lambda: nn.Sequential(Block(32, 4), Block(32, 4), nn.LayerNorm(32), nn.Linear(32, 50)), (2, 12, 32)),
    "lstm": (lambda: Recurrent(nn.LSTM(8, 16, num_layers=2), False), (7, 4, 8)),
    "packed_lstm": (lambda: Recurrent(nn.LSTM(8, 16), True), (7, 4, 8)),
    "gru": (lambda: Recurrent(nn.GRU(8, 16, num_layers=2, bidirectional=True), False), (7, 4, 8)),
    "packed_gru": (lambda: Recurrent(nn.GRU(8, 16), True), (7, 4, 8)),
    "squares": (Squares, (16, 16)),
    "checkpoint": (lambda: Checkpointed(False), (8, 16)),
    "reentrant": (lambda: Checkpointed(True), (8, 16)),
}


def step(model: nn.Module, x: Tensor, around=contextlib.nullcontext, inside: bool = False) -> list[Tensor]:
    """Gradients of parameters and input, with dropout's numbers from one seed."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    model.zero_grad()
    with around():
        loss = model(x).square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert f.dtype == e.dtype and f.stride() == e.stride() and torch.equal(f, e), f"gradient {i} differs"


@pytest.fixture
def deterministic():
    """Two plain steps have the same bits. On CUDA that has to be asked for; then memory that nobody wrote is NaN."""
    if not torch.cuda.is_available():
        yield
        return
    cudnn = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.filterwarnings("ignore", ".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = cudnn


@pytest.mark.parametrize("engine", [*ENGINES, MANAGED], ids=lambda e: f"{e[0]}-{e[1]}", indirect=True)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [0, "4KB", "30KB", None])
def test_gradients(engine: tuple[str, str], name: str, budget: int | str | None, deterministic: None) -> None:
    device, backend = engine
    make, shape = MODELS[name]
    model, x = make().to(device), torch.randn(shape, device=device)
    expected = step(model, x)
    off = offload(budget, backend=backend, min_bytes=64)
    for use in range(4):
        check_same(step(model, x, lambda: off, inside=use == 2), expected)
        n = numbers(off)
        assert n["uses"] == use + 1 and n["live_bytes"] == 0
        assert budget != 0 or n["moved_tensors"] > 0
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("compress", ["auto", "zvc", "rle", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_compressed(engine: tuple[str, str], compress: str | None, dtype: torch.dtype, deterministic) -> None:
    device, backend = engine
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).to(
        device, dtype
    )
    x = torch.randn(40, 32, device=device, dtype=dtype)
    expected = step(model, x)
    off = everything(backend, compress=compress)
    for _ in range(3):
        check_same(step(model, x, lambda: off), expected)
    n = numbers(off)
    if compress in ("zvc", "rle") and dtype != torch.float64:
        assert n["compressed_tensors"] == n["moved_tensors"]
    if compress is None or dtype == torch.float64:
        assert n["compressed_tensors"] == 0 and n["sent_bytes"] == n["moved_bytes"]
    if compress == "auto" and dtype == torch.float32:
        assert n["compressed_tensors"] > 0 and n["sent_bytes"] < n["moved_bytes"]


def test_accumulation(engine: tuple[str, str], deterministic: None) -> None:
    device, backend = engine
    model, batches = vgg().to(device).eval(), [torch.randn(b, 3, 16, 16, device=device) for b in (4, 2, 4, 3)]

    def run(around) -> list[Tensor]:
        model.zero_grad()
        losses = []
        for x in batches:
            with around():
                losses.append(model(x).square().mean())
        for loss in losses:  # four graphs stood at once
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = run(contextlib.nullcontext)
    off = offload("20KB", backend=backend, min_bytes=0)
    for _ in range(3):
        check_same(run(lambda: off), expected)
    assert numbers(off)["live_bytes"] == 0


def test_branches_and_shapes_that_change(engine: tuple[str, str]) -> None:
    device, backend = engine
    layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(5)]).to(device)
    off = offload("10KB", backend=backend, min_bytes=0)
    for use, (depth, batch) in enumerate([(5, 30), (5, 30), (3, 30), (5, 12), (5, 50), (2, 3), (5, 30)]):
        x = torch.randn(batch, 24, device=device)

        def run(x: Tensor, depth: int = depth, odd: int = use % 2) -> Tensor:
            for layer in layers[:depth]:
                x = layer(x).tanh() if odd else layer(x).sigmoid()
            return x.square().sum()

        plain = torch.autograd.grad(run(x), list(layers[:depth].parameters()))
        with off:
            loss = run(x)
        check_same(list(torch.autograd.grad(loss, list(layers[:depth].parameters()))), list(plain))
        numbers(off)


# ---- Random graphs


@st.composite
def programs(draw) -> list[tuple]:
    """(operation, operands, constant) on earlier values; values are 8 x 8."""
    steps = []
    for i in range(draw(st.integers(3, 14))):
        kind = draw(st.sampled_from(_OPERATIONS))
        steps.append((kind, draw(st.integers(0, i)), draw(st.integers(0, i)), draw(st.integers(1, 7))))
    return steps


_OPERATIONS = (
    "mul", "matmul", "t", "sin", "exp", "relu_", "sigmoid", "add_", "chunk", "expand", "slice", "softmax", "norm",
    "detach", "double", "half", "unsafe", "strided",
)  # fmt: skip


def interpret(program: list[tuple], x: Tensor, w: Tensor) -> Tensor:
    values = [x * w]
    for kind, i, j, c in program:
        a, b = values[i], values[j]
        if kind == "mul":
            y = a * b
        elif kind == "matmul":
            y = a @ b / 8
        elif kind == "t":
            y = a.t()
        elif kind == "sin":
            y = a.sin()
        elif kind == "exp":
            y = a.clamp(max=1).exp()
        elif kind == "relu_":
            y = (a + b).relu_()
        elif kind == "sigmoid":
            y = (a * 2).sigmoid_()
        elif kind == "add_":
            y = a.sin().add_(b)
        elif kind == "chunk":
            p, q = a.chunk(2, dim=c % 2)
            y = torch.cat([p * q, q.tanh()], dim=c % 2)
        elif kind == "expand":
            y = a[c].expand(8, 8) * b
        elif kind == "slice":
            y = a.clone()[:c].square().sum() + b
        elif kind == "softmax":
            y = a.softmax(c % 2) * b
        elif kind == "norm":
            y = nn.functional.layer_norm(a, (8,))
        elif kind == "detach":
            y = a.detach() * b + b.detach().cos() * b
        elif kind == "double":
            y = (a.double() * b.double()).float()
        elif kind == "half":
            y = (a.clamp(-9, 9).bfloat16() * b.clamp(-9, 9).bfloat16()).float()
        elif kind == "unsafe":
            p, q = torch.unsafe_chunk(a.clone(), 2, c % 2)
            y = torch.cat([p.sigmoid_() * q.tanh_(), p * q], dim=c % 2)
        else:
            y = torch.as_strided(a.contiguous(), (8, 8), (c, 1), 1) * b if 7 * c + 9 <= 64 else a * b
        values.append(y)
    return sum(v.clamp(-99, 99).mean() for v in values[-3:])


def _jitter(off: offload, cycles: list[int]) -> None:
    """Delays on the streams of "copy", so that whatever does not wait is wrong."""
    streams = [torch.cuda.current_stream(), *(torch.cuda.ExternalStream(s) for s in off._engine.streams(0))]
    for stream, count in zip(streams, cycles, strict=False):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(count)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "reference"), pytest.param("cuda", "copy", marks=cuda)])
def test_random_graphs(device: str, backend: str, deterministic: None) -> None:
    @hypothesis.settings(max_examples=200, derandomize=True, deadline=None)
    @hypothesis.given(
        programs(),
        st.sampled_from([0, 300, 1000, None]),
        st.integers(0, 3),
        st.lists(st.integers(0, 2_000_000), min_size=5, max_size=5),
    )
    def check(program: list[tuple], budget: int | None, keep_last: int, delays: list[int]) -> None:
        torch.manual_seed(7)
        x, w = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device, requires_grad=True)
        expected = torch.autograd.grad(interpret(program, x, w), w)[0]
        off = offload(budget, backend=backend, min_bytes=0, keep_last=keep_last)
        for _ in range(3):
            if device == "cuda":
                _jitter(off, delays)
            with off:
                loss = interpret(program, x, w)
            if device == "cuda":
                _jitter(off, delays[::-1])
            found = torch.autograd.grad(loss, w)[0]
            assert torch.equal(found, expected) or torch.equal(found.isnan(), expected.isnan())
        assert numbers(off)["live_bytes"] == 0

    check()


# ---- What a restored tensor is


class Probe(torch.autograd.Function):
    """Saves its inputs; its backward shows what came back."""

    @staticmethod
    def forward(ctx, seen: list, *tensors: Tensor) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(*tensors)
        return sum(t.detach().to(torch.complex128).abs().sum().to(tensors[0].device) for t in tensors).requires_grad_()

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.seen.append(ctx.saved_tensors)
        return (None, *(None for _ in ctx.saved_tensors))


def saved_and_restored(off: offload, *tensors: Tensor) -> list[Tensor]:
    seen: list = []
    anchor = torch.zeros((), requires_grad=True, device=tensors[0].device)
    with off:
        loss = Probe.apply(seen, *tensors, anchor)
    loss.backward()
    return list(seen[0][:-1])


def test_restored_tensors(engine: tuple[str, str]) -> None:
    device, backend = engine
    base = torch.randn(64, 96, device=device)
    bits = (
        torch.tensor([0x80000000, 0x7FC00001, 0xFFC12345, 0, 1], dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    bits = bits.to(device).repeat(300)
    tensors = [
        base.clone(),
        base.clone().t(),
        base.clone()[3:, 5::3],
        base[:1].clone().expand(50, 96),
        torch.as_strided(base.clone(), (10, 20), (3, 7), 11),
        base.clone().flatten()[1:],
        bits,
        torch.randn(31, 33, device=device, dtype=torch.complex64).conj(),
        torch.randn(31, 33, device=device, dtype=torch.complex64).conj().imag,
        torch.randint(0, 9, (77,), device=device, dtype=torch.uint8)[3:],
        torch.rand(3, 50, device=device) > 0.5,
        torch.randn(2, 3, 8, 9, device=device).to(memory_format=torch.channels_last),
        torch.tensor(4.5, device=device),
        torch.empty(0, 3, device=device),
    ]
    for compress in (None, "auto", "zvc"):
        off = everything(backend, compress=compress)
        for _ in range(2):
            for came, went in zip(saved_and_restored(off, *tensors), tensors, strict=True):
                assert came.dtype == went.dtype and came.device == went.device and came.shape == went.shape
                assert (
                    came.stride() == went.stride()
                    and came.is_conj() == went.is_conj()
                    and came.is_neg() == went.is_neg()
                )
                assert (came.data_ptr() - went.data_ptr()) % 256 == 0
                if went.numel():
                    assert came.data_ptr() != went.data_ptr()
                whole = came.resolve_conj().resolve_neg().contiguous(), went.resolve_conj().resolve_neg().contiguous()
                assert torch.equal(*(w.view(torch.uint8) if w.dim() else w for w in whole))
        n = numbers(off)
        assert n["kept_bytes"] == 0 and n["saved_tensors"] == len(tensors) - 1


def test_shared_memory_moves_once() -> None:
    off = everything()
    x = torch.randn(64, 64)
    came = saved_and_restored(off, x, x.t(), x.view(-1), x[:10], x[20:], x.detach())
    n = numbers(off)
    assert n["moved_bytes"] == n["saved_bytes"] == n["sent_bytes"] == n["returned_bytes"] == x.nbytes
    assert len({t.untyped_storage().data_ptr() for t in came}) == 1
    # A part first, then what connects it with another part, then all of it.
    x = torch.randn(64, 64)
    parts = x[:20], x[40:], x[30:50], x[10:35], x
    for came, went in zip(saved_and_restored(off, *parts), parts, strict=True):
        assert torch.equal(came, went) and came.stride() == went.stride()
    n = numbers(off)
    assert n["moved_bytes"] == n["saved_bytes"] == n["sent_bytes"] == n["returned_bytes"] == x.nbytes
    # Parts that do not touch are brought back apart.
    x = torch.randn(1000, 10)
    saved_and_restored(off, x[0], x[999])
    assert numbers(off)["returned_bytes"] == numbers(off)["saved_bytes"] == 80


def test_parts_of_a_chunk_come_back_as_one() -> None:
    off = everything()
    x = torch.randn(32, 96)
    parts = x.chunk(3, dim=1)
    came = saved_and_restored(off, *parts)
    assert numbers(off)["returned_bytes"] == numbers(off)["saved_bytes"] == x.nbytes
    for a, b in zip(came, parts, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("budget", [0, "1KB", "100KB"])
def test_siblings_of_unsafe_chunk_are_moved_apart(budget: int | str) -> None:
    """They share storage and version number, not the counter: found by number alone, one is restored as the other."""
    off = offload(budget, backend="reference", min_bytes=0, keep_last=0, compress=None)
    x = torch.randn(16, 64)
    parts = torch.unsafe_chunk(x, 4, 1)
    expected = [p.clone() for p in parts]
    for came, went in zip(saved_and_restored(off, *parts), expected, strict=True):
        assert torch.equal(came, went)
    assert numbers(off)["saved_bytes"] == x.nbytes
    # One sibling changes after the other was saved: no error, and not the other's numbers.
    seen: list = []
    with off:
        loss = Probe.apply(seen, parts[0], torch.zeros((), requires_grad=True))
    parts[1].mul_(2)
    loss.backward()
    assert torch.equal(seen[0][0], expected[0])


# ---- Changed in place


def _error(change, around) -> str:
    x = torch.linspace(1, 2, 3, requires_grad=True)
    with around:
        y = x.exp()
    with torch.no_grad():
        change(x, y)
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: y.add_(1),
        lambda x, y: y[1:].mul_(2),
        lambda x, y: y.detach().zero_(),
        lambda x, y: y.view(3, 1).t().detach()[0, :1].fill_(4),
    ],
)
def test_in_place_change_is_torchs_error(moved: bool, change) -> None:
    around = everything() if moved else offload("1GB", backend="reference")
    expected = _error(change, contextlib.nullcontext())
    assert "at version 1; expected version 0 instead" in expected
    assert _error(change, around) == expected


def test_in_place_change_of_inputs_and_parameters() -> None:
    def run(around, of: str) -> str:
        w = torch.ones(3, requires_grad=True)
        a = torch.full((3,), 2.0)
        b = w * 3
        with around:
            y = (w * w * a * b).sum()
        with torch.no_grad():
            {"w": w, "a": a, "b": b}[of].add_(1)
        with pytest.raises(RuntimeError) as caught:
            y.backward()
        return str(caught.value)

    for of in "wab":
        expected = run(contextlib.nullcontext(), of)
        assert "modified by an inplace operation: [torch.FloatTensor [3]]" in expected
        assert run(everything(), of) == run(offload(None, backend="reference"), of) == expected


def test_in_place_change_with_history() -> None:
    def run(around) -> str:
        x = torch.ones(3, requires_grad=True)
        with around:
            h = x.exp()
            y = h.sin()
            h.add_(x)
        with pytest.raises(RuntimeError) as caught:
            (y + h).sum().backward()
        return str(caught.value)

    assert run(everything()) == run(contextlib.nullcontext())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moved", [True, False])
def test_in_place_change_of_what_a_gone_view_showed(moved: bool, dtype: torch.dtype) -> None:
    """torch keeps the view, Weft its memory alone; both name the node that a changed view gets."""

    def run(around, of) -> str:
        leaf = torch.ones(3, 3, dtype=dtype, requires_grad=True)
        h = leaf * 2
        with around:
            y = of(leaf, h)
        with torch.no_grad():
            leaf.add_(1)
            h.add_(1)
        with pytest.raises(RuntimeError) as caught:
            y.sum().backward()
        return str(caught.value)

    for of in (lambda leaf, h: h @ leaf.t(), lambda leaf, h: h[1:] ** 2, lambda leaf, h: h.detach()[1:] * leaf[1:]):
        off = everything() if moved else offload(None, backend="reference")
        assert run(off, of) == run(contextlib.nullcontext(), of)


def test_change_between_two_backwards() -> None:
    """What was restored for a graph of the backward counts as the saved tensor: a change of that is an error there."""
    for around in (contextlib.nullcontext(), everything(), offload("1GB", backend="reference")):
        x = torch.ones(3, requires_grad=True)
        a = torch.ones(3)
        with around:
            y = (x * x * a).pow(2).sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
        a.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            g.sum().backward()


# ---- Never moved


def test_leaves_and_their_views_are_not_counted() -> None:
    w = nn.Parameter(torch.randn(32, 32))
    off = everything()
    with off:
        x = torch.randn(32, 32)
        y = (x @ w.t()) @ w[:, :] @ w
    y.sum().backward()
    n = numbers(off)
    assert n["saved_bytes"] == 3 * x.nbytes and n["saved_tensors"] == 3


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:.*prototype")
def test_what_is_not_plain_stays() -> None:
    off = everything()
    dense = torch.randn(8, 8, requires_grad=True)
    sparse = torch.eye(8).to_sparse()
    with off:
        y = torch.sparse.mm(sparse, dense).sum()
    y.backward()
    assert torch.equal(dense.grad, torch.ones(8, 8))
    n = numbers(off)
    assert n["moved_bytes"] == 0 and n["kept"]["other"] == sparse._indices().nbytes + sparse._values().nbytes

    dense.grad = None
    with off:
        y = (torch.sparse.mm(sparse.to_sparse_csr(), dense) * dense).sum()
    y.backward()
    numbers(off)

    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged, requires_grad=True)
    with off:
        y = (nested.sin() * nested).values().sum()
    y.backward()
    numbers(off)

    class Tagged(Tensor):
        pass

    tagged = torch.randn(6).as_subclass(Tagged)
    (came,) = saved_and_restored(off, tagged)
    assert type(came) is Tagged and numbers(off)["kept"]["other"] == 24


def test_fake_tensors_stay() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    off = everything()
    with off, FakeTensorMode():
        x = torch.randn(8, 8, requires_grad=True)
        (x.sin() * x.cos()).sum().backward()
    assert numbers(off)["saved_bytes"] == 0


def test_cpu_tensors_stay_with_copy() -> None:
    off = offload(0, min_bytes=0)
    x = torch.randn(10, 10, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with off:
            y = x.sin().cos()
    y.sum().backward()
    n = numbers(off)
    assert n["kept"]["host"] == n["saved_bytes"] == 400 and n["peak_bytes"] == 0 and n["budget_met"]
    assert off.timeline is not None and [t.bytes for t in off.timeline.tensors] == [400]


def test_reasons() -> None:
    x = [torch.randn(n) for n in (1000, 10, 2000, 3000, 20)]
    off = offload(0, backend="reference", min_bytes=100, keep_last=2)
    for _ in range(3):
        saved_and_restored(off, *x)
        n = numbers(off)
        assert n["kept"] == {**dict.fromkeys(REASONS, 0), "small": 40 + 80, "last": 12000}
        assert n["moved_bytes"] == 4 * 3000
    off = offload("5KB", backend="reference", min_bytes=100, keep_last=1)
    saved_and_restored(off, *x[:3])
    n = numbers(off)
    assert n["kept"]["last"] == 8000 and n["kept"]["small"] == 40 and n["moved_bytes"] == 4000
    off = offload("1MB", backend="reference", min_bytes=0, keep_last=2)
    saved_and_restored(off, *x)
    assert numbers(off)["kept"] == {**dict.fromkeys(REASONS, 0), "last": 12080, "budget": 12040}


@pytest.mark.parametrize("keep_last", [0, 1, 3, 100])
def test_keep_last(keep_last: int) -> None:
    off = everything(keep_last=keep_last)
    for _ in range(3):
        saved_and_restored(off, *(torch.randn(100) for _ in range(5)))
        assert numbers(off)["kept"]["last"] == 400 * min(keep_last, 5)


# ---- Budget and pool


def test_budget_is_kept_from_the_second_use_on(engine: tuple[str, str]) -> None:
    device, backend = engine
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh()))).to(device)
    x = torch.randn(256, 64, device=device)
    whole = 8 * x.nbytes
    for share in (0.75, 0.5, 0.25):
        off = offload(int(share * whole), backend=backend, min_bytes=0, compress=None)
        for use in range(4):
            step(model, x, lambda off=off: off)
            n = numbers(off)
            if use > 0:
                assert n["budget_met"] and n["peak_bytes"] <= share * whole and n["moved_bytes"] >= (1 - share) * whole
        assert n["predicted_peak_bytes"] <= share * whole
    off = offload(2 * whole, backend=backend, min_bytes=0)
    step(model, x, lambda: off)
    step(model, x, lambda: off)
    assert numbers(off)["moved_bytes"] == 0


def test_without_budget_the_reference_moves_nothing() -> None:
    off = offload(backend="reference", min_bytes=0)
    for _ in range(3):
        saved_and_restored(off, *(torch.randn(100) for _ in range(5)))
        assert numbers(off)["moved_bytes"] == 0


def test_pool_limit() -> None:
    x = [torch.randn(1000) for _ in range(5)]
    off = everything(pool_limit=10_000)
    with pytest.warns(RuntimeWarning, match="pool_limit"):
        came = saved_and_restored(off, *x)
    for a, b in zip(came, x, strict=True):
        assert torch.equal(a, b)
    n = numbers(off)
    assert n["host_peak_bytes"] <= 10_000 and n["moved_bytes"] == 8000 and n["kept"]["pool"] == 12000
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        saved_and_restored(off, *x)
    assert numbers(off)["host_peak_bytes"] <= 10_000
    # Buffers of other sizes make room.
    off = everything(pool_limit=10_000)
    for n in (2000, 1500, 2400):
        saved_and_restored(off, torch.randn(n))
        assert numbers(off)["kept"]["pool"] == 0


def test_pool_is_reused_and_released() -> None:
    x = [torch.randn(n) for n in (100, 200, 300)]
    off = everything()
    saved_and_restored(off, *x)
    held = numbers(off)["host_bytes"]
    assert held == 2400
    for _ in range(3):
        saved_and_restored(off, *x)
        assert numbers(off)["host_bytes"] == numbers(off)["host_peak_bytes"] == held
    y = torch.randn(50, requires_grad=True)
    with off:
        z = y.exp()
    assert off.release() == held and numbers(off)["host_bytes"] == 200 and off.release() == 0
    z.sum().backward()
    assert torch.equal(y.grad, y.exp()) and off.release() == 200


# ---- Lifetime


def test_close() -> None:
    off = everything()
    x = torch.randn(50, requires_grad=True)
    with off:
        y = x.exp()
    off.close()
    off.close()
    with pytest.raises(RuntimeError, match="closed"), off:
        pass
    assert numbers(off)["live_bytes"] == 200 and numbers(off)["host_bytes"] == 200
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())
    assert numbers(off)["live_bytes"] == 0 and numbers(off)["host_bytes"] == 0


def test_collected_object() -> None:
    off = everything()
    x = torch.randn(50, requires_grad=True)
    with off:
        y = x.exp()
    watch = weakref.ref(off)
    del off
    gc.collect()
    assert watch() is None
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_no_leak_without_backward(engine: tuple[str, str]) -> None:
    device, backend = engine
    off = everything(backend)
    x = torch.randn(1000, device=device, requires_grad=True)
    for _ in range(3):
        with off:
            y = x.exp().sin()
        assert numbers(off)["live_bytes"] == 4000
        del y
        assert numbers(off)["live_bytes"] == 0
        assert off.timeline is not None
    if device == "cuda":
        torch.cuda.synchronize()
        off.report()
    assert off.release() == 4000 and numbers(off)["host_peak_bytes"] == 4000


def test_no_cycle_through_outputs() -> None:
    """A graph that owned the outputs it saved would own itself, and never go."""
    gc.disable()
    try:
        for off in (everything(), offload(None, backend="reference")):
            x = torch.randn(10, requires_grad=True)
            with off:
                y = x.exp()
            assert numbers(off)["live_bytes"] == 40
            del y
            assert numbers(off)["live_bytes"] == 0
    finally:
        gc.enable()


def test_memory_of_a_moved_tensor_is_free() -> None:
    off = everything()
    x = torch.randn(1000, requires_grad=True)
    with off:
        y = x.exp()
        storage = y.untyped_storage()._weak_ref()
        z = y.sum()
        del y
        assert torch.UntypedStorage._new_with_weak_ptr(storage) is None
    z.backward()
    torch.UntypedStorage._free_weak_ref(storage)


def test_exception_in_forward(engine: tuple[str, str]) -> None:
    device, backend = engine
    off = everything(backend)
    x = torch.randn(100, device=device, requires_grad=True)
    with pytest.raises(KeyError, match="mine"), off:
        y = x.exp()
        raise KeyError("mine")
    del y
    gc.collect()
    assert numbers(off)["live_bytes"] == 0
    with off:
        y = x.exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_exception_in_backward(engine: tuple[str, str]) -> None:
    device, backend = engine

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("mine")

    off = everything(backend)
    for _ in range(3):
        x = torch.randn(100, device=device, requires_grad=True)
        with off:
            y = Fails.apply(x.exp().sin()).cos()
        with pytest.raises(ValueError, match="mine"):
            y.sum().backward()
        del y
        gc.collect()
        assert numbers(off)["live_bytes"] == 0
        with off:
            y = x.exp().sin().cos()
        y.sum().backward()
        e = x.detach().requires_grad_()
        e.exp().sin().cos().sum().backward()
        assert torch.equal(x.grad, e.grad)


def test_nothing_of_a_use_is_found_by_the_next(engine: tuple[str, str]) -> None:
    """The same tensor, storage and version, with other numbers in it that no counter saw."""
    device, backend = engine
    off = everything(backend)
    x = torch.ones(100, device=device)
    for i in range(3):
        x.data.fill_(float(i))
        (came,) = saved_and_restored(off, x)
        assert torch.equal(came, torch.full_like(x, float(i)))


# ---- Uses


def test_backward_twice_in_parts_and_never(engine: tuple[str, str]) -> None:
    device, backend = engine
    off = everything(backend)
    x = torch.randn(30, device=device, requires_grad=True)
    plain = x.exp().sin().cos()
    expected = torch.autograd.grad(plain.sum(), x)[0]
    with off:
        h = x.exp()
        y = h.sin().cos()
        never = x.tan()
        (g1,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    for _ in range(3):
        (g2,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(g1, expected) and torch.equal(g2, expected)
    (gh,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
    assert torch.equal(torch.autograd.grad(h, x, gh)[0], expected)
    del y, h
    assert numbers(off)["live_bytes"] == never.nbytes
    with pytest.raises(RuntimeError, match="second time"):
        with off:
            y = x.exp()
        y.sum().backward()
        y.sum().backward()


def test_double_backward(engine: tuple[str, str], deterministic: None) -> None:
    device, backend = engine
    x = torch.randn(30, device=device, requires_grad=True)

    def run(around) -> Tensor:
        with around:
            y = (x.exp() * x.sin()).pow(3).sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        return torch.autograd.grad(h.square().sum(), x)[0]

    expected = run(contextlib.nullcontext())
    for budget in (0, 500, None):
        off = offload(budget, backend=backend, min_bytes=0)
        for _ in range(3):
            assert torch.equal(run(off), expected)
    x64 = torch.randn(4, device=device, dtype=torch.float64, requires_grad=True)

    def inside(v: Tensor) -> Tensor:
        with everything(backend):
            return (v.exp() * v.sin()).tanh()

    assert torch.autograd.gradcheck(inside, (x64,)) and torch.autograd.gradgradcheck(inside, (x64,))


def test_several_uses_before_a_backward(engine: tuple[str, str]) -> None:
    device, backend = engine
    off = offload("2KB", backend=backend, min_bytes=0)
    xs = [torch.randn(100, device=device, requires_grad=True) for _ in range(5)]
    ys = []
    for x in xs:
        with off:
            ys.append(x.exp().sin())
    for x, y in reversed(list(zip(xs, ys, strict=True))):
        y.sum().backward()
        e = x.detach().requires_grad_()
        e.exp().sin().sum().backward()
        assert torch.equal(x.grad, e.grad)


def test_reentry_and_nesting() -> None:
    off, inner = everything(), everything()
    with off:
        with pytest.raises(RuntimeError, match="re-entrant"), off:
            pass
        x = torch.randn(10, requires_grad=True)
        y = x.exp()
        with inner:
            z = y.sin()
        w = z.cos()
    w.sum().backward()
    assert numbers(off)["saved_bytes"] == 40 + 40 and numbers(inner)["saved_bytes"] == 40
    with off:
        pass


def test_other_hooks_outside_and_inside() -> None:
    calls = []

    def pack(t: Tensor) -> Tensor:
        calls.append(t.shape)
        return t.detach()

    x = torch.randn(10, requires_grad=True)
    off = everything()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), off:
        y = x.exp()
    assert not calls and numbers(off)["saved_bytes"] == 40
    with off, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        z = x.exp()
    assert len(calls) == 1 and numbers(off)["saved_bytes"] == 0
    with off, torch.autograd.graph.save_on_cpu():
        w = x.exp()
    (y + z + w).sum().backward()
    assert torch.equal(x.grad, 3 * x.detach().exp())


def test_threads() -> None:
    off = offload("1KB", backend="reference", min_bytes=0)
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(size: int) -> None:
        try:
            for _ in range(5):
                x = torch.randn(size, requires_grad=True)
                e = x.detach().clone().requires_grad_()
                barrier.wait(30)
                with off:
                    y = x.exp().sin().cos()
                    barrier.wait(30)
                y.sum().backward()
                e.exp().sin().cos().sum().backward()
                assert torch.equal(x.grad, e.grad)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(100 * (i + 1),)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    n = numbers(off)
    assert n["uses"] == 20 and n["live_bytes"] == 0


def test_backward_in_another_thread() -> None:
    off = everything()
    x = torch.randn(10, requires_grad=True)
    with off:
        y = x.exp()
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert torch.equal(x.grad, x.detach().exp()) and off.timeline is not None


def test_torch_func() -> None:
    off = everything()
    x = torch.randn(3)
    for transform in (torch.func.grad, torch.func.vjp, torch.func.jacrev):

        def apply(transform=transform):
            return (
                transform(lambda v: v.sin().sum(), x)
                if transform is torch.func.vjp
                else transform(lambda v: v.sin().sum())(x)
            )

        with (
            pytest.raises(RuntimeError) as expected,
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            apply()
        with pytest.raises(RuntimeError) as found, off:
            apply()
        assert str(found.value) == str(expected.value)
    w = torch.randn(3, requires_grad=True)
    with off:
        y = torch.func.vmap(lambda v: (v * w).sin())(torch.randn(5, 3))
    y.sum().backward()
    assert w.grad is not None and numbers(off)["moved_tensors"] > 0

    def refused(v: Tensor) -> Tensor:
        with off:
            return v.sin().sum()

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(refused)(x)
    with off:
        pass


def test_compiled_submodule() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="aot_eager")
    )
    x = torch.randn(6, 8)
    expected = step(model, x)
    off = everything()
    for _ in range(2):
        check_same(step(model, x, lambda: off), expected)
    assert numbers(off)["moved_tensors"] > 0


def test_autocast(engine: tuple[str, str]) -> None:
    device, backend = engine
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    x = torch.randn(8, 16, device=device)

    @contextlib.contextmanager
    def plain():
        with torch.autocast(device, torch.bfloat16):
            yield

    off = everything(backend)

    @contextlib.contextmanager
    def both():
        with off, torch.autocast(device, torch.bfloat16):
            yield

    expected = step(model, x, plain)
    for _ in range(3):
        check_same(step(model, x, both), expected)


@pytest.fixture
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
def test_distributed(process_group: None, sharded: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    expected = step(model, x)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh) if isinstance(layer, nn.Linear) else None
        around = fully_shard(model, mesh=mesh)
    else:
        around = nn.parallel.DistributedDataParallel(model)
    off = everything()
    for _ in range(3):
        found = step(around, x, lambda: off)
        check_same([g.full_tensor() if hasattr(g, "full_tensor") else g for g in found], expected)
    n = numbers(off)
    assert n["moved_bytes"] == n["saved_bytes"] > 0 and n["live_bytes"] == 0


# ---- Timeline, report, picture


def test_timeline() -> None:
    off = everything()
    assert off.timeline is None
    x = torch.randn(100, requires_grad=True)
    with off:
        y = x.exp().sin().tanh()
        assert off.timeline is None
    assert off.timeline is None
    y.sum().backward()
    t = off.timeline
    assert t is not None and [s.bytes for s in t.tensors] == [400, 400]
    # exp saves its output, which is what sin saves of its input; tanh saves its output.
    assert 0 < t.forward < len(t.seconds) and all(s >= 0 for s in t.seconds)
    assert weft.offloading.plan(t, 0).moved_bytes == 800


def test_report_before_any_use() -> None:
    n = numbers(offload(backend="reference"))
    assert (
        n["uses"] == n["saved_bytes"] == n["live_bytes"] == n["peak_bytes"] == 0 and n["predicted_peak_bytes"] is None
    )
    assert n["budget_met"] and n["stalls"] == [] and n["d2h_bytes_per_second"] is None


def test_plot(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = everything()
    with pytest.raises(RuntimeError, match="first use"):
        off.plot(tmp_path / "t.svg")
    saved_and_restored(off, torch.randn(100))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib"):
        off.plot(tmp_path / "t.svg")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    for suffix in ("svg", "png"):
        off.plot(tmp_path / f"t.{suffix}")
        assert (tmp_path / f"t.{suffix}").stat().st_size > 1000


# ---- Bad input


@pytest.mark.parametrize("name", ["budget", "min_bytes", "pool_limit"])
def test_sizes(name: str) -> None:
    for good in (0, 5, "0B", "4GB", "1.5 gib", "3 kib"):
        offload(**{name: good}, backend="reference")
    for bad in ("4 apples", "", "4", "-1GB", "1e3MB", "GB", -1):
        with pytest.raises(ValueError, match=name) as error:
            offload(**{name: bad}, backend="reference")
        assert repr(bad) in str(error.value)
    for bad in (True, 1.5, [1], *((None,) if name == "min_bytes" else ())):
        with pytest.raises(TypeError, match=name):
            offload(**{name: bad}, backend="reference")


def test_arguments() -> None:
    assert offload("4GB").budget == 4_000_000_000 and offload("1.5KiB").budget == 1536 and offload().budget is None
    assert weft.offload is offload
    for bad in (-1,):
        with pytest.raises(ValueError, match="keep_last"):
            offload(keep_last=bad)
    for bad in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="keep_last"):
            offload(keep_last=bad)
    for name, bad in (("compress", "zip"), ("backend", "cuda"), ("compress", "")):
        with pytest.raises(ValueError, match=name):
            offload(**{name: bad})
    for name in ("compress", "backend"):
        for bad in (3, True, ["zvc"], *((None,) if name == "backend" else ())):
            with pytest.raises(TypeError, match=name):
                offload(**{name: bad})
    with pytest.raises(TypeError):
        offload(0, "auto")


def test_one_warning_without_cuda() -> None:
    script = (
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "import warnings, torch, weft\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for backend in ('reference', 'copy', 'copy', 'managed'):\n"
        "        with weft.offload(0, backend=backend): torch.randn(9, requires_grad=True).exp().sum().backward()\n"
        "assert [w.category for w in seen] == [UserWarning], [str(w.message) for w in seen]\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# ---- CUDA: streams, delays, memory. Each would be a wrong gradient, or lost memory, in a system without the wait it
# ---- is about.

LONG = 50_000_000  # cycles, about 30 ms
LANES = ("out", "back", "pack", "spread")


def delay(off: offload, lane: str, cycles: int = LONG) -> None:
    """Lets a stream of the copies do nothing for a while."""
    stream = torch.cuda.ExternalStream(off._engine.streams(torch.cuda.current_device())[LANES.index(lane)])
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def chain(x: Tensor, depth: int = 4) -> Tensor:
    for _ in range(depth):
        x = x.sin().exp() * 0.5
    return x


def plain_gradient(x: Tensor, depth: int = 4) -> Tensor:
    y = x.detach().clone().requires_grad_()
    return torch.autograd.grad(chain(y, depth).sum(), y)[0]


@cuda
@pytest.mark.parametrize("compress", [None, "zvc", "rle"])
def test_memory_is_not_reused_before_its_copy_out_finished(compress: str | None) -> None:
    off = everything("copy", compress=compress)
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    for _ in range(3):
        delay(off, "out")
        with off:
            y = chain(x)
            for _ in range(8):  # takes whatever memory is free, and writes over it
                torch.full((1 << 20,), float("nan"), device="cuda")
        for _ in range(8):
            torch.full((1 << 20,), float("nan"), device="cuda")
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain_gradient(x))


@cuda
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("compress", [None, "zvc"])
def test_reload_does_not_race_its_own_offload(inside: bool, compress: str | None) -> None:
    off = everything("copy", compress=compress)
    x = torch.randn(1 << 18, device="cuda", requires_grad=True)
    for lane in ("out", "back", "pack", "spread", "out"):
        delay(off, lane)
        with off:
            y = chain(x)
            if inside:
                (g,) = torch.autograd.grad(y.sum(), x)
        if not inside:
            (g,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(g, plain_gradient(x))


@cuda
def test_stream_is_that_of_the_use() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        off = everything("copy")
        saved_and_restored(off, torch.randn(1000, device="cuda"))
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    expected = plain_gradient(x)
    torch.cuda.synchronize()
    for stream in (second, first, torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            with off:
                y = chain(x)
            torch.cuda._sleep(LONG)
            (g,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(g, expected)
    # Forward on one stream, backward asked for from another: autograd runs it on the forward's.
    with torch.cuda.stream(second), off:
        y = chain(x).sum()
    torch.cuda.current_stream().wait_stream(second)
    (g,) = torch.autograd.grad(y, x)
    assert torch.equal(g, expected)


@cuda
def test_memory_of_another_stream() -> None:
    """Allocated on one stream, saved on another: it goes back to the first, which knows of no copy."""
    off = everything("copy")
    side = torch.cuda.Stream()
    x = torch.randn(1 << 20, device="cuda")
    w = torch.ones(1 << 20, device="cuda", requires_grad=True)
    expected = x.clone()
    side.wait_stream(torch.cuda.current_stream())
    delay(off, "out")
    with torch.cuda.stream(side), off:
        y = (w * x).sum()
    torch.cuda.current_stream().wait_stream(side)
    del x
    for _ in range(4):
        torch.full((1 << 20,), float("nan"), device="cuda")
    assert torch.equal(torch.autograd.grad(y, w)[0], expected)


@cuda
@pytest.mark.parametrize("compress", [None, "zvc"])
def test_host_buffer_is_not_reused_while_it_is_read(compress: str | None) -> None:
    off = everything("copy", compress=compress)
    xs = [torch.randn(1 << 20, device="cuda", requires_grad=True) for _ in range(3)]
    grads = []
    for x in xs:
        with off:
            y = chain(x)
        delay(off, "back")
        grads.append(torch.autograd.grad(y.sum(), x)[0])
        del y  # the buffers are free for the next use, and still being read
    for x, g in zip(xs, grads, strict=True):
        assert torch.equal(g, plain_gradient(x))
    held = numbers(off)["host_bytes"]
    assert held == numbers(off)["host_peak_bytes"]


@cuda
def test_cpu_tensors_come_back_on_the_cpu() -> None:
    off = everything("copy")
    a, b = torch.randn(300), torch.randn(400, device="cuda")
    seen: list = []
    anchor = torch.zeros((), device="cuda", requires_grad=True)
    with off:
        loss = Probe.apply(seen, b, a, anchor)
    loss.backward()
    assert [t.device.type for t in seen[0]] == ["cuda", "cpu", "cuda"]
    assert torch.equal(seen[0][1], a) and torch.equal(seen[0][0], b)
    n = numbers(off)
    assert n["kept"]["host"] == 1200 and n["moved_bytes"] == 1600


@cuda
def test_prefetched_memory_of_a_dropped_graph() -> None:
    """A tensor on its way back whose graph fails: its memory is given out only behind the copy."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("mine")

    off = everything("copy")
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    for _ in range(3):
        with off:
            y = chain(Fails.apply(chain(x, 3)), 3)
        delay(off, "back")
        with pytest.raises(ValueError, match="mine"):
            y.sum().backward()
        del y
        filled = [torch.full((1 << 20,), float(i), device="cuda") for i in range(12)]
        torch.cuda.synchronize()
        assert all(bool((f == i).all()) for i, f in enumerate(filled))
        del filled
    assert numbers(off)["live_bytes"] == 0


@cuda
def test_device_memory_is_freed() -> None:
    torch.cuda.synchronize()
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    expected = plain_gradient(x, 8)
    before = torch.cuda.memory_allocated()
    off = everything("copy")
    for _ in range(3):
        with off:
            y = chain(x, 8).sum()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < x.nbytes
        (g,) = torch.autograd.grad(y, x)
        assert torch.equal(g, expected)
        del y, g
        torch.cuda.synchronize()
        off.report()
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("count", [1, 2, 3])
def test_room_is_what_operations_and_the_codec_need(count: int) -> None:
    off = everything(compress="zvc", keep_last=0)
    off._engine = types.SimpleNamespace(staging=lambda bytes, itemsize, density: 7 * bytes)
    saved = [Saved(4000, k, 2 * count - 1 - k) for k in range(count)]
    timeline = Timeline((1.0,) * (2 * count), count, tuple(saved))
    planned = off._planned(timeline, [(4000, 4, True)] * count, (), None, Link())
    assert len(planned.plan.moves) == count and planned.plan.peak_bytes <= 8000


@cuda
def test_peak_memory_follows_the_budget() -> None:
    layers = 16
    x = torch.randn(1 << 22, device="cuda", requires_grad=True)  # 16 MiB
    peaks = {}
    for budget in (0, 64 << 20, 1 << 40):
        off = offload(budget, min_bytes=0, compress=None)
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with off:
                y = chain(x, layers).sum()
            torch.autograd.grad(y, x)
            torch.cuda.synchronize()
            peaks[budget] = torch.cuda.max_memory_allocated() - before
        if budget > 0:
            n = numbers(off)
            assert n["budget_met"] and n["peak_bytes"] <= budget
    assert peaks[64 << 20] <= 1.05 * (peaks[0] + (64 << 20))
    assert peaks[0] < 0.5 * peaks[1 << 40]


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_values_than_expected(dtype: torch.dtype) -> None:
    """A tensor comes back whole also where it has more non-zeros than the plan knows of."""
    off = everything("copy", compress="auto")
    w = torch.ones((1 << 20) + 5, device="cuda", dtype=dtype, requires_grad=True)
    moved = 0
    for density in (0.1, 0.1, 0.1, 0.1, 0.9, 0.0, 1.0, 0.1, 0.11, 0.13):
        x = torch.randn_like(w) * (torch.rand_like(w) < density)
        with off:
            y = (w * (x * 1)).sum()
        assert torch.equal(torch.autograd.grad(y, w)[0], x)
        torch.cuda.synchronize()
        moved += numbers(off)["compressed_tensors"]
    assert moved > 3


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tensors_of_many_segments(dtype: torch.dtype) -> None:
    """What the codec takes in parts comes back whole: parts of their own density, delays on every lane."""
    weft._C._testing.offload_stages(segment=1 << 16)
    try:
        off = everything("copy", compress="auto")
        w = torch.ones(300_001, device="cuda", dtype=dtype, requires_grad=True)
        compressed = 0
        for use in range(12):
            density = torch.rand(w.numel() // 1000 + 1, device="cuda").repeat_interleave(1000)[: w.numel()]
            xs = [torch.randn_like(w) * (torch.rand_like(w) < density * (i + 1) / 4) for i in range(4)]
            delay(off, LANES[use % 4], LONG // 10)
            with off:
                y = sum((w * (x * 1)).sum() for x in xs)
            expected = torch.autograd.grad(sum((w * (x * 1)).sum() for x in xs), w)[0]
            assert torch.equal(torch.autograd.grad(y, w)[0], expected)
            torch.cuda.synchronize()
            compressed += numbers(off)["compressed_tensors"]
        assert compressed > 10
    finally:
        weft._C._testing.offload_stages()


@cuda
@pytest.mark.parametrize("compress", [None, "zvc", "auto"])
def test_large_host_buffers(compress: str | None) -> None:
    """These are not cudaHostAlloc's: mapped, touched by several threads, registered."""
    off = everything("copy", compress=compress)
    x = torch.randn((1 << 23) + 3, device="cuda", requires_grad=True)
    expected = plain_gradient(x)
    for _ in range(3):
        with off:
            y = chain(x).sum()
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
        del y
    torch.cuda.synchronize()
    held = numbers(off)["host_bytes"]
    assert held >= 32 << 20 and numbers(off)["host_peak_bytes"] == held
    assert off.release() == held and numbers(off)["host_bytes"] == 0


@cuda
def test_steady_state_allocates_no_host_memory() -> None:
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    off = offload("10MB", min_bytes=0)
    held = []
    for _ in range(8):
        with off:
            y = chain(x, 6).sum()
        torch.autograd.grad(y, x)
        torch.cuda.synchronize()
        held.append(numbers(off)["host_peak_bytes"])
    assert len(set(held[4:])) == 1


@cuda
def test_times_and_rates() -> None:
    x = torch.randn(1 << 24, device="cuda", requires_grad=True)
    off = everything("copy")
    for _ in range(3):
        with off:
            y = chain(x, 4).sum()
        torch.autograd.grad(y, x)
        torch.cuda.synchronize()
    n = numbers(off)
    assert n["forward_seconds"] > 0 and n["backward_seconds"] > 0
    assert 1e9 < n["d2h_bytes_per_second"] < 1e12 and 1e9 < n["h2d_bytes_per_second"] < 1e12
    assert n["backward_stall_seconds"] > 0 and n["stalls"]
    assert off.timeline is not None and off.timeline.seconds[0] is not None


@cuda
def test_without_budget_nothing_waits() -> None:
    """Much compute between the saves: some of it hides, and the gradients are the same."""
    w = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    x = torch.randn(2048, 2048, device="cuda") / 50

    def run() -> Tensor:
        y = x
        for _ in range(12):
            y = (y @ w / 50).tanh()
        return y.square().mean()

    expected = torch.autograd.grad(run(), w)[0]
    off = offload(min_bytes=0, compress=None)
    for _ in range(5):
        with off:
            loss = run()
        assert torch.equal(torch.autograd.grad(loss, w)[0], expected)
        torch.cuda.synchronize()
    assert numbers(off)["moved_bytes"] > 0


@cuda
def test_capture() -> None:
    off = everything("copy")
    x = torch.randn(1000, device="cuda", requires_grad=True)
    x.grad = torch.zeros_like(x)

    def run() -> None:
        with off:
            y = chain(x).sum()
        y.backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    n = numbers(off)
    assert n["moved_bytes"] == 0 and n["kept"]["other"] == n["saved_bytes"] > 0
    for _ in range(2):
        x.grad.zero_()
        graph.replay()
        assert torch.equal(x.grad, plain_gradient(x))
    x.grad.zero_()
    run()
    assert torch.equal(x.grad, plain_gradient(x)) and numbers(off)["moved_bytes"] > 0


@cuda
def test_pinning_refused_keeps_the_tensor() -> None:
    off = everything("copy", pool_limit=1 << 20)
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    with pytest.warns(RuntimeWarning, match="pool_limit"), off:
        y = chain(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain_gradient(x))
    assert numbers(off)["kept"]["pool"] == numbers(off)["saved_bytes"]


@pytest.mark.cuda(devices=2)
def test_two_devices() -> None:
    off = offload(0, min_bytes=0)
    a = torch.randn(1 << 18, device="cuda:0", requires_grad=True)
    for _ in range(3):
        delay(off, "out")
        with off:
            y = chain(chain(a).to("cuda:1")).to("cuda:0")
        (g,) = torch.autograd.grad(y.sum(), a)
        b = a.detach().clone().requires_grad_()
        (e,) = torch.autograd.grad(chain(chain(b).to("cuda:1")).to("cuda:0").sum(), b)
        assert torch.equal(g, e)
    numbers(off)


@cuda
def test_managed_memory_is_capped_and_goes_back() -> None:
    off = everything("managed")
    x = torch.randn(1 << 22, device="cuda", requires_grad=True)
    for _ in range(3):
        with off:
            y = chain(x)
        assert numbers(off)["moved_bytes"] > 0 and numbers(off)["host_bytes"] > 0
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain_gradient(x))
        del y
        assert numbers(off)["live_bytes"] == 0 and numbers(off)["host_bytes"] == 0
