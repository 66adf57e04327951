"""The Jacobians of plain functions, and what holds for every generator's."""

from __future__ import annotations

import torch
from torch import Tensor
from weft.sparse import BatchedCSR

from tests.common import assert_close


def jacobian(f, x: Tensor) -> Tensor:
    """The transposed Jacobian (n_in, n_out) of f at one sample x, without a batch."""
    full = torch.autograd.functional.jacobian(lambda t: f(t.unsqueeze(0)).squeeze(0), x)
    return full.reshape(-1, x.numel()).mT


def jacobians(f, x: Tensor) -> Tensor:
    """(B, n_in, n_out)"""
    return torch.stack([jacobian(f, sample) for sample in x])


def f64(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(device)


def check(found: BatchedCSR, want: Tensor, bound: float = 1e-12) -> None:
    """Equal numbers, and a pattern in order that has room for each of them."""
    assert_close(found.to_dense(), want, bound)
    assert found.crow.dtype == found.col.dtype == torch.int32
    row = torch.repeat_interleave(found.crow.diff().long())
    key = row * found.shape[1] + found.col
    assert bool((key.diff() > 0).all())
