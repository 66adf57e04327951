"""Scans of complex numbers over slices, as scans of pairs of real ones: a is the matrix ``[[re, -im], [im, re]]``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .own_slice import canonical

__all__ = ["Pairs", "in_pairs"]

_linear_scan = torch.ops.weft.linear_scan.default
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Pairs(NamedTuple):
    """The arguments of a real scan that is the same."""

    A: Tensor
    b: Tensor
    x0: Tensor | None
    diagonal: bool

    def joined(self, x: Tensor, like: Tensor) -> Tensor:
        """The complex numbers of the real scan's states."""
        T, B, H = like.shape
        pairs = x.view(T, B, H, 2).unbind(-1) if self.diagonal else x.tensor_split(2, -1)
        return torch.complex(*pairs)


def in_pairs(op: str, A: Tensor, b: Tensor, x0: Tensor | None, reverse: bool, transpose: bool) -> Pairs:
    """A diagonal ``A`` as a matrix of 2 x 2 for each channel, a row of the batch each, so that none touches another; a
    dense one as a matrix of 2 H x 2 H. `transpose` is taken into A: that of the pairs would be the conjugate's.

    Raises:
        TypeError, ValueError, RuntimeError: those of the complex scan.
    """
    if b.dtype not in _REAL:
        raise TypeError(f"{op}: b must be {' or '.join(map(str, _REAL))} where A is complex, got {b.dtype}")
    for name, t in (("A", A), ("x0", x0)):
        if t is not None and t.dtype != b.dtype:
            raise TypeError(f"{op}: {name} must have the dtype of b, {b.dtype}, got {t.dtype}")
        if t is not None and t.device != b.device:
            raise RuntimeError(f"{op}: {name} must be on the device of b, {b.device}, got {t.device}")
    shapes = [torch.empty(t.shape, dtype=_REAL[b.dtype], device="meta") for t in (A, b, x0) if t is not None]
    _linear_scan(*shapes, reverse=reverse, transpose=transpose)  # which says what does not fit
    T, B, H = b.shape
    matrices, diagonal = canonical(A, b)
    x0 = None if x0 is None else x0.expand(B, H)
    if diagonal:
        a = matrices.expand(T, B, H)
        A = torch.stack((a.real, -a.imag, a.imag, a.real), -1).view(T, B * H, 2, 2)
        b, x0 = (None if t is None else torch.stack((t.real, t.imag), -1).flatten(-3, -2) for t in (b, x0))
    else:
        a = matrices.mT if transpose else matrices
        A = torch.cat((torch.cat((a.real, -a.imag), -1), torch.cat((a.imag, a.real), -1)), -2)
        b, x0 = (None if t is None else torch.cat((t.real, t.imag), -1) for t in (b, x0))
    return Pairs(A, b, x0, diagonal)
