"""What torch.utils.flop_counter counts for the frontiers: like torch, matrix products alone, two operations for each
multiply-add. Which there are is in the program, over how many rows in the schedule."""

from __future__ import annotations

from typing import Any

import torch

from .._base.flops import register_flop_formula


@register_flop_formula(torch.ops.weft.vertex_frontiers, get_raw=True)
def _forward(inputs, matrices, vectors, schedule, host_schedule, program, *_: Any, **__: Any) -> int:
    return 2 * program.multiply_adds(host_schedule, None)


@register_flop_formula(torch.ops.weft.vertex_frontiers_backward, get_raw=True)
def _backward(
    grads, inputs, matrices, vectors, saved, schedule, host_schedule, program, *wanted: Any, **__: Any
) -> int:
    return 2 * program.multiply_adds(host_schedule, [list(numbers) for numbers in wanted[:3]])
