"""weft.offload on models and random graphs: gradients to the last bit."""

from __future__ import annotations

import contextlib

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from weft.offloading import offload

from tests.offload.engines import ENGINES, MANAGED, check_same, cuda, numbers, step, vgg


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
    @hypothesis.settings(max_examples=80, derandomize=True, deadline=None)
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
