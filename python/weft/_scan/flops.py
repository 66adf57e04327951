"""What torch.utils.flop_counter counts for the scan's ops: two operations for each multiply-add of the definition,
whatever the schedule. chain_backward is counted by the ops that it is made of."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._base.flops import register_flop_formula

__all__ = ["linear_scan_backward_flops", "linear_scan_flops"]


def _product(A, b) -> int:
    """Of one step: a product of a matrix and a vector for each row of the batch, or of two vectors."""
    dense = len(A) == 4 or (len(A) == 3 and tuple(A) != tuple(b) and tuple(A[:2]) == (b[0], b[2]))
    return 2 * math.prod(b[1:]) * (b[2] if dense else 1)


def _products(b, x0) -> int:
    """The first step has none where it begins at zeros."""
    return max(b[0] - (x0 is None), 0)


@register_flop_formula(torch.ops.weft.linear_scan)
def linear_scan_flops(A, b, x0=None, **_: Any) -> int:
    return _products(b, x0) * _product(A, b)


@register_flop_formula(torch.ops.weft.linear_scan_backward)
def linear_scan_backward_flops(grad, A, x, x0, reverse, transpose, output_mask, **_: Any) -> int:
    """A scan in the other direction, and the products of its states with the forward's, for the gradient of A."""
    scan = max(grad[0] - 1, 0) + (x0 is not None and output_mask[2])
    return (scan + output_mask[0] * _products(grad, x0)) * _product(A, grad)
