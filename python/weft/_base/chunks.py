"""Into how many chunks of time a slice's kernels cut it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["chunks_on"]


def chunks_on(device: torch.device, expected: Callable[..., int], *problem: Any) -> int:
    """What ``expected(index of the device, *problem)`` says, which is asked once; 1 where there are no such kernels."""
    if device.type != "cuda":
        return 1
    return _asked(expected, torch.cuda.current_device() if device.index is None else device.index, problem)


@functools.lru_cache(maxsize=2048)
def _asked(expected: Callable[..., int], index: int, problem: tuple) -> int:
    return expected(index, *problem)
