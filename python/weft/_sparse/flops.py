"""What torch.utils.flop_counter counts for sparse ops: two operations for each product of two values. What plans, moves
and sums values without a product, csr_transpose, csr_matmul_plan, zeros_changed and the conv_ ops, is not counted."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._base.flops import register_flop_formula
from .plan import PlanTensors


def _batch(*shapes: Any) -> int:
    """Of operands that have one when they have one dimension more, given as (shape, dimensions without)."""
    return next((shape[0] for shape, alone in shapes if shape is not None and len(shape) > alone), 1)


@register_flop_formula(torch.ops.weft.csr_mm)
def _csr_mm_flops(pattern, transposed, values, x, **_: Any) -> int:
    return 2 * pattern[1][0] * x[-1] * _batch((values, 1), (x, 2))


@register_flop_formula(torch.ops.weft.csr_sampled_mm)
def _csr_sampled_mm_flops(pattern, transposed, left, right, shared, **_: Any) -> int:
    return 2 * pattern[1][0] * left[-1] * _batch((left, 2), (right, 2))


@register_flop_formula(torch.ops.weft.csr_chain)
def _csr_chain_flops(grad, crows, cols, values, **_: Any) -> int:
    return sum(2 * grad[0] * v[-1] for v in values)


@register_flop_formula(torch.ops.weft.layer_chain)
def _layer_chain_flops(grad, crows, cols, values, sources, reads, **_: Any) -> int:
    """A matrix without columns is a diagonal, which has values of its own."""
    return sum(
        2 * grad[0] * (col[0] if col[0] or crow[0] else v[-1]) for crow, col, v in zip(crows, cols, values, strict=True)
    )


@register_flop_formula(
    [torch.ops.weft.csr_matmul, torch.ops.weft.csr_matmul_left, torch.ops.weft.csr_matmul_right], get_raw=True
)
def _csr_matmul_flops(patterns: list[Tensor], first: Tensor, second: Tensor, *_: Any, **__: Any) -> int:
    plan = PlanTensors.of(patterns)
    if not (len(plan.axpy) or len(plan.accumulate) or len(plan.expand)) and not (len(plan.shared) and len(plan.starts)):
        products = len(plan.col) if len(plan.shared) else max(len(plan.left), len(plan.right)) or len(plan.col)
    else:  # no list has all: each element of a meets a row of b
        products = int(plan.b_crow.diff()[plan.a_col.long()].sum())
    return 2 * products * math.prod(_batched(first, second))


def _batched(*values: Tensor) -> tuple[int, ...]:
    return next((v.shape[:1] for v in values if v.dim() == 2), ())
