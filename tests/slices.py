"""What the tests of a slice's two halves share: small slices, the bound beside fp64, and the size of a chunk's map."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BOUND = 3e-5
"""Beside fp64: products of some hundred steps in split TF32, and sums of them."""


@dataclass(frozen=True)
class Slice:
    """A slice of time, and in how many chunks a kernel goes through it."""

    T: int = 37
    B: int = 3
    H: int = 20
    chunks: int = 4


def assert_close(found: Tensor, want: Tensor, bound: float = BOUND) -> None:
    assert (found.cpu().double() - want.cpu()).norm() <= bound * want.norm()


def map_floats(H: int, states: int = 1) -> int:
    """Of a chunk and a row, in the kernels for up to 8 and up to 20 units: its map, and the state before it."""
    padded = (8 if H <= 8 else 20) * states
    row = padded if padded % 8 == 4 else padded + 4
    return padded * row + 3 * padded
