"""Patterns: the two index tensors of a CSR matrix, and what has been worked out about them once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

INT32_MAX = 2**31 - 1

_known: weakref.WeakValueDictionary[tuple[int, int, tuple[int, int]], Pattern] = weakref.WeakValueDictionary()


def index_dtype(*sizes: int) -> torch.dtype:
    """int32 where all of these fit."""
    return torch.int32 if max(sizes) <= INT32_MAX else torch.int64


def version(t: Tensor) -> int:
    """How often this tensor has been written to, as far as torch knows: of inference tensors it does not."""
    return 0 if t.is_inference() else t._version


def made_to_stay(device: torch.device, make: Callable[[], T]) -> tuple[T, bool]:
    """What ``make`` computes on a device, and whether later calls may find it again.

    On CUDA it is waited for, once: a later call on another stream would not wait. What a CUDA graph captures is there
    only after a replay.
    """
    with torch.inference_mode(False):  # what is kept may be saved for a backward pass later
        made = make()
    if device.type == "cuda" and not torch.compiler.is_compiling():
        if torch.cuda.is_current_stream_capturing():
            return made, False
        torch.cuda.current_stream(device).synchronize()
    return made, True


class Pattern:
    """``crow`` (rows + 1,) and ``col`` (nnz,) of a matrix of ``shape``, checked and sorted.

    One object for one pair of index tensors, so that what is kept with it (the transposed pattern, plans) is found
    again from the tensors.
    """

    __slots__ = ("__weakref__", "_transposed", "col", "crow", "diagonal", "plans", "shape", "versions")

    def __init__(self, crow: Tensor, col: Tensor, shape: tuple[int, int], diagonal: bool = False) -> None:
        self.crow, self.col, self.shape = crow, col, shape
        self.diagonal = diagonal
        """Whether this is known to be the whole diagonal of a square matrix."""
        self.plans: weakref.WeakKeyDictionary[Pattern, Any] = weakref.WeakKeyDictionary()
        """Planned products with a pattern on the right."""
        self.versions = (version(crow), version(col))
        self._transposed: list[Tensor] | None = None
        _known[id(crow), id(col), shape] = self

    @staticmethod
    def find(crow: Tensor, col: Tensor, shape: tuple[int, int]) -> Pattern | None:
        """The pattern of these very tensors, where there is one and nothing has been written to them since."""
        found = _known.get((id(crow), id(col), shape))
        if found is None or found.crow is not crow or found.col is not col:
            return None
        return found if found.versions == (version(crow), version(col)) else None

    @property
    def nnz(self) -> int:
        return self.col.shape[0]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.crow, self.col]

    @property
    def transposed(self) -> list[Tensor]:
        """``[crow, col, index]`` of the transposed pattern; element e of it is element ``index[e]`` of this one."""
        if self._transposed is not None:
            return self._transposed
        crow, col, columns = self.crow, self.col, self.shape[1]
        made, stays = made_to_stay(crow.device, lambda: list(torch.ops.weft.csr_transpose(crow, col, columns)))
        if stays:
            self._transposed = made
        return made

    @property
    def rows(self) -> Tensor:
        """The row of each element, int64 (nnz,)."""
        counts = self.crow.diff()
        return torch.repeat_interleave(counts.to(torch.int64), output_size=self.nnz)

    def equals(self, other: Pattern) -> bool:
        """Whether both have the same elements; waits for the device where the tensors are not the same."""
        if self is other or (self.crow is other.crow and self.col is other.col):
            return True
        same = self.shape == other.shape and self.nnz == other.nnz and self.crow.device == other.crow.device
        return (
            same and torch.equal(self.crow, other.crow.to(self.crow)) and torch.equal(self.col, other.col.to(self.col))
        )


class Matrix:
    """A pattern and values on it: what BatchedCSR is made of, for what does not know BatchedCSR."""

    __slots__ = ("_pattern", "_values")


def diagonal(n: int, device: torch.device) -> Pattern:
    crow = torch.arange(n + 1, dtype=index_dtype(n), device=device)
    return Pattern(crow, crow[:n], (n, n), diagonal=True)
