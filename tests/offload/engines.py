"""What the offload engine's tests share: the engines, the statistics of a use, steps, and delays on its streams."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor, nn
from weft.offloading import Move, OffloadReport, offload, simulate

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
    "predicted_codec_seconds", "unhooked_tensors", "slowdown", "stepped_aside",
    "host_peak_bytes", "forward_seconds", "backward_seconds", "forward_stall_seconds", "backward_stall_seconds",
    "stalls",    "d2h_bytes_per_second", "h2d_bytes_per_second",
}  # fmt: skip


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


def settled(value: Callable[[], int], wanted: int) -> int:
    """The value, once it is as wanted: after a backward torch's thread of the device may hold the graph for a moment
    longer."""
    end = time.monotonic() + 5
    while (found := value()) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return found


def live_bytes(off: offload) -> int:
    return settled(lambda: numbers(off)["live_bytes"], 0)


class Fails(torch.autograd.Function):
    """An error in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("mine")


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for wide, width in ((3, 8), (8, 16)):
        layers += [nn.Conv2d(wide, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(16 * 16, 32), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(32, 10)
    )


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
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert f.dtype == e.dtype and f.stride() == e.stride() and torch.equal(f, e), f"gradient {i} differs"


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


def at_once(make: Callable) -> Future:
    """In the place of the thread that plans, so that each use has its plan."""
    future: Future = Future()
    future.set_result(make())
    return future


def plan_at_once(patch: pytest.MonkeyPatch) -> None:
    """Without a budget: from the second use, for the third; the first one counts all zeros, without a trial."""
    patch.setattr("weft._offload.pace.Pace.tried", True)
    patch.setattr("weft._offload.planning.in_background", at_once)
    patch.setattr("weft._offload.context._COUNTING", 60.0)


@contextlib.contextmanager
def planned_in_part(draw: random.Random):
    """Without a budget all that may move does, a share of it compressed, whatever would hide."""

    def plan_movable(timeline, limit, link, compress, movable, slowdown):
        order = sorted(range(len(movable)), key=lambda i: (timeline.tensors[i].first_backward, i))
        moves = [
            Move(i, timeline.forward, True, draw.choice([1e-6, 0.1, 0.25, 0.5, 0.9, 1.0])) for i in order if movable[i]
        ]
        return simulate(timeline, moves, limit, link=link)

    with pytest.MonkeyPatch.context() as patch:
        plan_at_once(patch)
        patch.setattr("weft._offload.planning.plan_movable", plan_movable)
        yield


LONG = 50_000_000  # cycles, about 30 ms

STREAMS = ("out", "back", "compress", "decompress")


def delay(off: offload, name: str, cycles: int = LONG) -> None:
    """Lets a stream of the copies do nothing for a while."""
    stream = torch.cuda.ExternalStream(off._engine.streams(torch.cuda.current_device())[STREAMS.index(name)])
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def chain(x: Tensor, depth: int = 4) -> Tensor:
    for _ in range(depth):
        x = x.sin().exp() * 0.5
    return x


def plain_gradient(x: Tensor, depth: int = 4) -> Tensor:
    y = x.detach().clone().requires_grad_()
    return torch.autograd.grad(chain(y, depth).sum(), y)[0]
