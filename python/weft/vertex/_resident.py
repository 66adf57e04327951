"""Indices on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from .._C import vertex as _C
from .._torch_private import in_transform, outside_transforms

__all__ = ["Resident", "captures", "trainable"]


def trainable() -> AbstractContextManager:
    """What is made in it serves calls that train, outside of torch.func's transforms, also where the first does not."""
    if in_transform():
        return _outside()
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    with outside_transforms(), torch.inference_mode(False):
        yield


def captures(device: torch.device) -> bool:
    """Whether the current stream of `device` captures; torch says so of the current device's alone."""
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class Resident:
    """A tensor that is copied to a CUDA device when it is first asked for, and known to every stream that asks later.

    Args:
        device: the CUDA device.
    """

    __slots__ = ("_device", "_kept")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: tuple[Tensor, torch.cuda.Stream, torch.cuda.Event] | None = None

    def tensor(self, make: Callable[[], Tensor]) -> Tensor:
        """The copy on the device of what `make` gives, a tensor in pinned memory that nobody else overwrites."""
        if self._kept is None:
            return self._copied(make)
        copy, made_on, event = self._kept
        stream = torch.cuda.current_stream(self._device)
        if stream != made_on and not captures(self._device):
            stream.wait_event(event)
            copy.record_stream(stream)
        return copy

    def _copied(self, make: Callable[[], Tensor]) -> Tensor:
        # To set what is as it should be would take a good part of the time.
        here = torch.cuda.current_device() == self._device.index
        with trainable(), nullcontext() if here else torch.cuda.device(self._device):
            host = make()
            copy = _C.copied(host) if hasattr(_C, "copied") else host.to(self._device)  # of a build for the CPU alone
            # Captured, it is there at replays alone: the next who asks gets another. Its graph keeps what it reads.
            if not torch.cuda.is_current_stream_capturing():
                event = torch.cuda.Event()
                event.record()
                self._kept = (copy, torch.cuda.current_stream(), event)
        return copy
