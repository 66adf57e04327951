"""The exchange by doubling: ceil(log2 ranks) rounds, in each of which a rank sends what its ranks so far come to, the
2^k up to itself, to the one 2^k further on. Plain torch; :func:`exchange` says where it is cheaper than one all-gather.

A rank ends with the map of all ranks before it, not with those of others: who needs what leaves the whole gathers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .costs import Link, exchange
from .group import Ranks
from .totals import pack, scaled, unpack

__all__ = ["SliceMap", "carried", "in_rounds", "link"]

link = Link(latency=1e-3)
"""Between ranks, by which the way of an exchange is chosen: a round packs, sends and composes by some fifty operations,
which a host gives a GPU in about a millisecond; a gather is one of these and an operation."""


_SMALL = 2.0**-520
"""Of both factors: then no sum of products of two doubles is beyond the range."""


class SliceMap(NamedTuple):
    """x -> product x + value of some ranks that follow each other."""

    product: Tensor
    """float64, ``(B, H)`` diagonal or ``(B, H, H)``, B or 1."""
    value: Tensor
    """float64, ``(B, H)``."""
    leaves: Tensor
    """Whether a state leaves them: bool, ``()``."""

    def after(self, earlier: SliceMap) -> SliceMap:
        """Both, one after the other."""
        product, x = earlier.product, earlier.value
        if self.product.dim() == 2:
            product, moved = self.product * product, self.product * x
        else:
            moved = (self.product @ x.unsqueeze(-1)).squeeze(-1)
            # The difference of two that are beyond the range is none of numbers, unless they are made small before.
            small = (self.product * _SMALL) @ (product * _SMALL)
            product = self.product @ product
            product = torch.where(product.isnan(), small / _SMALL / _SMALL, product)
        # Finite numbers stay so: beyond the range only a state of zero does, and that it does.
        largest = torch.finfo(product.dtype).max
        # A product that nothing comes to may be one of numbers that nobody may look at.
        value = torch.where(earlier.leaves, moved, 0.0) + self.value
        return SliceMap(product.clamp(-largest, largest), value, self.leaves | earlier.leaves)


def in_rounds(ranks: Ranks, bytes: int) -> bool:
    """Whether rounds are cheaper than one gather for so many bytes from each rank."""
    # Sizes may be symbols of a graph, which are compared anew.
    find = _method if type(bytes) is int else _method.__wrapped__
    return find(ranks.size, bytes, link) == "doubling"


@functools.lru_cache(maxsize=1024)
def _method(size: int, bytes: int, link: Link) -> str:
    return exchange(size, bytes, link).method


def carried(ranks: Ranks, own: SliceMap, dtype: torch.dtype, backwards: bool) -> SliceMap:
    """What all ranks before this one come to, after them with `backwards`; what a rank sends is packed as in a gather,
    for states of `dtype`. Of the first: nothing leaves."""
    shape, count = own.product.shape, own.product.numel()
    before: SliceMap | None = None
    reach = 1
    while reach < ranks.size:
        all_so_far = own if before is None else own.after(before)
        product = pack(*scaled(all_so_far.product), dtype)
        value = all_so_far.value.to(dtype).contiguous().view(product.dtype)
        message = torch.cat((product.flatten(), value.flatten(), all_so_far.leaves.to(product.dtype).view(1)))
        came = ranks.shift(message, -reach if backwards else reach)
        if came is not None:
            value = came[count:-1].contiguous().view(dtype).view(own.value.shape).double()
            further = SliceMap(unpack(came[:count], dtype).view(shape), value, came[-1] > 0)
            before = further if before is None else before.after(further)
        reach *= 2
    if before is None:
        return SliceMap(own.product, torch.zeros_like(own.value), torch.zeros_like(own.leaves))
    return before
