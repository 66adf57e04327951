"""Indices on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ..._base.torch_private import in_transform, outside_transforms
from ..._C import vertex as _C

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
    """Whether the current stream of a CUDA device captures; torch says so of the current device's alone."""
    return _C.captures(torch.cuda.current_device() if device.index is None else device.index)


class _Waited:
    """As _C.Copy, of a build for the CPU alone: the host waits for the copy."""

    captured = False

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._copy = host.to(device)

    def tensor(self) -> Tensor:
        self._copy.record_stream(torch.cuda.current_stream(self._copy.device))
        return self._copy


_Copy = getattr(_C, "Copy", _Waited)


class Resident:
    """A tensor that is copied to a CUDA device when it is first asked for, and known to every stream that asks later.

    Args:
        device: the CUDA device.
    """

    __slots__ = ("_copy", "_device")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy: _Copy | None = None

    def tensor(self, make: Callable[[], Tensor]) -> Tensor:
        """The copy on the device of what `make` gives, a tensor in pinned memory that nobody else overwrites."""
        copy = self._copy
        if copy is None:
            with trainable():
                copy = _Copy(make(), self._device)
                # Captured, it is there at replays alone: the next who asks gets another.
                if not copy.captured:
                    self._copy = copy
                return copy.tensor()
        return copy.tensor()
