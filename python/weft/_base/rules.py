"""What the rules of several rooms share.

A room's rules.py registers for each of its ops what it returns for fake tensors, how autocast casts its arguments and,
where there is a batch dimension, how vmap maps it; weft/_ops.py imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("weft", "IMPL")
"""Where autocast rules are registered, for the keys AutocastCPU and AutocastCUDA."""


def check_devices(op: str, **tensors: Tensor | None) -> None:
    """RuntimeError where a tensor is not on the device of the first: the rule for fake tensors also answers where one
    of the arguments is on "meta"."""
    (first, like), *others = tensors.items()
    for name, tensor in others:
        if tensor is not None and tensor.device != like.device:
            raise RuntimeError(f"{op}: {name} must be on the device of {first}, {like.device}, got {tensor.device}")


def widest(*tensors: Tensor | None) -> list[Tensor | None]:
    """The floating tensors in the widest dtype among them: a recurrence, or a chain of products, is no place for
    autocast's narrow one."""
    floating = [t for t in tensors if t is not None and t.is_floating_point()]
    if not floating:
        return list(tensors)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in floating))
    return [t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors]


def one_by_one(op, size: int, in_dims: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The results of one call for each index of the mapped dimension, stacked."""

    def select(argument: Any, dim: Any, index: int) -> Any:
        if isinstance(argument, (list, tuple)):
            return [select(a, d, index) for a, d in zip(argument, dim, strict=True)]
        return argument if dim is None else argument.select(dim, index)

    runs = [op(*(select(a, d, i) for a, d in zip(args, in_dims, strict=True)), **kwargs) for i in range(size)]
    return [torch.stack(results) for results in zip(*runs, strict=True)]
