"""A whole tensor cut into slices of time, and slices put together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .costs import slice_sizes, whole
from .group import Ranks, check_alike, check_tensor, ranks_of

__all__ = ["shard", "unshard"]


def _dimension(op: str, x: Tensor, dim: int) -> int:
    dim = whole(op, "dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: dim must be a dimension of x, which has {x.dim()}, got {dim}")
    return dim % x.dim()


def shard(x: Tensor, group: Any = None, dim: int = 0) -> Tensor:
    """This rank's slice of a tensor that every rank has: a view, of :func:`slice_sizes` steps.

    Args:
        x: the whole, the same on every rank.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        dim: which dimension is time. Default: 0.

    Its gradient is this rank's share: zeros outside of the slice. Nothing is exchanged. The view keeps the whole alive;
    its ``clone()`` does not.

    Raises:
        TypeError: x is no tensor, or the group is none.
        ValueError: x has no such dimension, or a mesh has several.
        RuntimeError: torch.distributed is not initialised, or this process is not in the group.
    """
    check_tensor("shard", "x", x)
    dim = _dimension("shard", x, dim)
    ranks = ranks_of("shard", group)
    check_alike(ranks, "shard", {"shape": tuple(x.shape), "dtype": x.dtype, "dim": dim})
    sizes = slice_sizes(x.size(dim), ranks.size)
    return x.narrow(dim, sum(sizes[: ranks.rank]), sizes[ranks.rank])


def unshard(x: Tensor, group: Any = None, dim: int = 0) -> Tensor:
    """The whole, on every rank, from every rank's slice.

    Args:
        x: this rank's slice, of any length; the other dimensions are the same on every rank.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        dim: which dimension is time. Default: 0.

    The slice's gradient is the sum of what all ranks have for it. Lengths are exchanged first, for which the host
    waits.

    Raises:
        TypeError: x is no tensor, or the group is none.
        ValueError: x has no such dimension, or a mesh has several.
        RuntimeError: torch.distributed is not initialised, this process is not in the group, or the group's backend
            does not take x's device.
    """
    check_tensor("unshard", "x", x)
    dim = _dimension("unshard", x, dim)
    ranks = ranks_of("unshard", group)
    ranks.check_device("unshard", x)
    others = (*x.shape[:dim], *x.shape[dim + 1 :])
    check_alike(ranks, "unshard", {"other dimensions": others, "dtype": x.dtype, "dim": dim})
    sizes = ranks.gather(torch.tensor(x.size(dim), device=x.device)).tolist()
    return _Unshard.apply(x.movedim(dim, 0), sizes, ranks).movedim(0, dim)


class _Unshard(torch.autograd.Function):
    """Slices of rows to all rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, sizes: list[int], ranks: Ranks) -> Tensor:
        ctx.sizes, ctx.ranks = sizes, ranks
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: x.size(0)] = x
        return torch.cat([rows[:size] for rows, size in zip(ranks.gather(padded), sizes, strict=True)])

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple:
        return _SumOfSlice.apply(grad, ctx.sizes, ctx.ranks), None, None


class _SumOfSlice(torch.autograd.Function):
    """All rows of every rank to the sum of those of this rank's slice, in order of rank."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, sizes: list[int], ranks: Ranks) -> Tensor:
        ctx.sizes, ctx.ranks = sizes, ranks
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        return ranks.scatter(grad, sizes).sum(0, dtype=wide).to(grad.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple:
        return _Unshard.apply(grad, ctx.sizes, ctx.ranks), None, None
