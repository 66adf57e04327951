"""What torch.utils.flop_counter counts for the scan's ops: two operations for each multiply-add of the definition,
whatever the schedule. chain_backward is counted by the ops that it is made of."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._base.flops import register_flop_formula

__all__ = [
    "linear_scan_backward_flops",
    "linear_scan_flops",
    "linear_scan_readout_backward_flops",
    "linear_scan_readout_flops",
]


def _time_first(t, batch_first: bool):
    return (t[1], t[0], *t[2:]) if batch_first and len(t) >= 3 else t


def _product(A, b) -> int:
    """Of one step: a product of a matrix and a vector for each row of the batch, or of two vectors."""
    dense = len(A) == 4 or (len(A) == 3 and tuple(A) != tuple(b) and tuple(A[:2]) == (b[0], b[2]))
    return 2 * math.prod(b[1:]) * (b[2] if dense else 1)


def _products(b, x0) -> int:
    """The first step has none where it begins at zeros."""
    return max(b[0] - (x0 is None), 0)


@register_flop_formula(torch.ops.weft.linear_scan)
def linear_scan_flops(A, b, x0=None, *, batch_first: bool = False, **_: Any) -> int:
    A, b = _time_first(A, batch_first), _time_first(b, batch_first)
    return _products(b, x0) * _product(A, b)


@register_flop_formula(torch.ops.weft.linear_scan_backward)
def linear_scan_backward_flops(
    grad, A, x, x0, reverse, transpose, output_mask, batch_first: bool = False, **_: Any
) -> int:
    """A scan in the other direction, and the products of its states with the forward's, for the gradient of A."""
    grad, A = _time_first(grad, batch_first), _time_first(A, batch_first)
    scan = max(grad[0] - 1, 0) + (x0 is not None and output_mask[2])
    return (scan + output_mask[0] * _products(grad, x0)) * _product(A, grad)


@register_flop_formula(torch.ops.weft.linear_scan_readout)
def linear_scan_readout_flops(A, b, c, x0=None, **_: Any) -> int:
    """A multiply-add of the recurrence and one of the sum over its states, of which the first is none."""
    return 4 * math.prod(b[:3]) * A[-1]


@register_flop_formula(torch.ops.weft.linear_scan_readout_backward)
def linear_scan_readout_backward_flops(grad, A, b, c, x0, starts, reverse, batch_first, output_mask, **_: Any) -> int:
    """The states again, lambda with the products that enter it, and a product for each gradient of a field."""
    return (6 + 2 * output_mask[0] + 2 * output_mask[2]) * math.prod(b[:3]) * A[-1]
