"""What weft.tune has measured of pointwise scans: whether one piece of time or many is faster."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .._base.machine import machine_name
from .._base.measured import Entry, Measured, bucket, key_of

__all__ = ["MEASURED", "Entry", "Kind", "chosen", "look_up", "trains"]

MEASURED = Measured("tune_scan.json", "algorithm", ("walk", "newton"))


class Kind(NamedTuple):
    """What decides between algorithms."""

    program: str
    steps: int
    channels: int
    device: torch.device
    dtype: torch.dtype
    trains: bool

    def key(self) -> str:
        """What it is called in the file."""
        return _key(self, machine_name(self.device))


@functools.lru_cache(256)
def _key(kind: Kind, machine: str) -> str:
    """Sizes are rounded up to powers of two."""
    parts = {
        "program": hashlib.sha256(kind.program.encode()).hexdigest()[:16],
        "dtype": str(kind.dtype).removeprefix("torch."),
        "T": bucket(kind.steps),
        "N": bucket(kind.channels),
        "trains": int(kind.trains),
    }
    return key_of(machine, parts)


def look_up(kind: Kind) -> Entry | None:
    """What was measured for calls of this kind, or None."""
    return MEASURED.look_up(kind.key)


def chosen(kind: Callable[[], Kind]) -> str:
    """What "auto" runs as: the fastest that was measured, else what the operator takes."""
    entry = MEASURED.look_up(lambda: kind().key())
    return "auto" if entry is None else entry.fastest


def trains(tensors: Iterable[Tensor]) -> bool:
    """Whether a gradient will pass."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
