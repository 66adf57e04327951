"""What torch.utils.flop_counter counts for scans over ranks: this rank's slice, as a scan of its own."""

from __future__ import annotations

from typing import Any

import torch

from .._base.flops import register_flop_formula
from .._scan import linear_scan_backward_flops, linear_scan_flops


@register_flop_formula(torch.ops.weft.slice_scan)
def _slice_scan_flops(A, b, x0, *_: Any, **__: Any) -> int:
    return linear_scan_flops(A, b, x0)


@register_flop_formula(torch.ops.weft.slice_scan_backward)
def _slice_scan_backward_flops(
    grad, grad_entered, grad_end, A, x, entered, products, has_x0, group, reverse, transpose, output_mask, **_: Any
) -> int:
    x0 = entered if has_x0 else None
    return linear_scan_backward_flops(grad, A, x, x0, reverse, transpose, [*output_mask, has_x0])
