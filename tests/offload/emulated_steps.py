"""What the checks of emulated_engine.py step with: the runtime without a device, and uses whose tensors show what came
back. Kernels do nothing there: what is saved is copied to the device, and what comes back is compared on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import random

import torch
from torch import Tensor
from weft.offloading import offload

SIZE = 1 << 14


class Runtime:
    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name in ("calls", "errors"):
            getattr(self._library, f"emulated_{name}").restype = ctypes.c_int64

    def calls(self, name: str) -> int:
        return self._library.emulated_calls(name.encode())

    def errors(self) -> int:
        """What the runtime was asked and must not be."""
        return self._library.emulated_errors()

    def drain(self, stream: int = 0) -> None:
        """Runs what is enqueued, of all streams or one."""
        self._library.emulated_drain(ctypes.c_void_p(stream))

    def capture(self, begin: bool) -> None:
        """As if the current stream were captured into a graph."""
        self._library.emulated_capture(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), begin)

    @contextlib.contextmanager
    def capture_elsewhere(self):
        """As if another thread captured a graph, in the mode that forbids other threads most."""
        self._library.emulated_capture_elsewhere(True)
        try:
            yield
        finally:
            self._library.emulated_capture_elsewhere(False)

    def forget(self, every: int) -> None:
        """Lets one of so many waits of a stream be none."""
        self._library.emulated_forget(ctypes.c_int64(every))

    def refuse(self, host: int = 0, device: int = 0) -> None:
        """So many of the next allocations."""
        self._library.emulated_refuse(ctypes.c_int64(host), ctypes.c_int64(device))


class Save(torch.autograd.Function):
    """Saves a tensor; its backward shows what came back, on the host."""

    @staticmethod
    def forward(ctx, x: Tensor, saved: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (saved,) = ctx.saved_tensors
        ctx.seen.append(saved.cpu())
        return grad, None, None


class Lazy(Save):
    """Saves as Save does; its backward copies to the host what came back, and waits for nothing."""

    @staticmethod
    def backward(ctx, grad: Tensor):
        (saved,) = ctx.saved_tensors
        ctx.seen.append(torch.zeros(saved.numel()).pin_memory().copy_(saved, non_blocking=True))
        return grad, None, None


def numbers(count: int, size: int = SIZE, density: float = 0.5) -> list[Tensor]:
    """Pinned, so that a copy to the device need not be waited for."""
    return [torch.where(torch.rand(size) < density, torch.randn(size), 0.0).pin_memory() for _ in range(count)]


class Step:
    """Saves copies of `data`, one after the other, each on its stream."""

    def __init__(self, off: offload, data: list[Tensor], streams: list | None = None, seen: list | None = None):
        self.data, self.seen = data, [] if seen is None else seen
        self.y = torch.zeros(1, device="cuda", requires_grad=True)
        current = torch.cuda.current_stream()
        with off:
            for d, stream in zip(data, streams or [current] * len(data), strict=True):
                with torch.cuda.stream(stream):
                    self.y = Save.apply(self.y, d.to("cuda", non_blocking=True), self.seen)

    def backward(self, retain_graph: bool = False) -> None:
        self.seen.clear()
        self.y.backward(retain_graph=retain_graph)
        self.check()

    def read_twice(self, off: offload, draw: random.Random, runtime: Runtime) -> None:
        """While one stream, or all, may be ahead."""
        if draw.random() < 0.5:
            runtime.drain(draw.choice([0, *off._engine.streams(0)]))
        self.backward(retain_graph=True)
        if draw.random() < 0.5:
            runtime.drain()
        self.backward()

    def check(self) -> None:
        assert len(self.seen) == len(self.data)
        for i, (found, expected) in enumerate(zip(reversed(self.seen), self.data, strict=True)):
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), f"tensor {i} differs"


class Parts:
    """A use that saves pieces of its memory, some of which overlap."""

    def __init__(self, off: offload, draw: random.Random, side: torch.cuda.Stream) -> None:
        self.seen: list[Tensor] = []
        self.y, self.expected = torch.zeros(1, device="cuda", requires_grad=True), []
        with off:
            for _ in range(draw.randint(3, 8)):
                (data,) = numbers(1, draw.choice([500, SIZE, SIZE]), draw.choice([0.1, 1.0]))
                with torch.cuda.stream(draw.choice([side, torch.cuda.current_stream()])):
                    whole = data.to("cuda", non_blocking=True)
                    for _ in range(draw.choice([1, 1, 3])):
                        begin, end = sorted(draw.sample(range(len(data) + 1), 2))
                        begin, end = draw.choice([(0, len(data)), (begin, end)])
                        self.expected.append(data[begin:end].clone())
                        self.y = Save.apply(self.y, whole[begin:end], self.seen)

    def backward(self, retain_graph: bool = False) -> None:
        self.seen.clear()
        self.y.backward(retain_graph=retain_graph)
        for i, (found, expected) in enumerate(zip(reversed(self.seen), self.expected, strict=True)):
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), f"part {i} differs"


def everything(**options) -> offload:
    return offload(0, **{"min_bytes": 0, "keep_last": 0, "compress": None, **options})


def memory() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
