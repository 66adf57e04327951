"""What torch.utils.flop_counter counts for the recurrent ops: like torch, matrix products alone, two operations for
each multiply-add, and the same for every algorithm."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._base.flops import register_flop_formula


def _forward(rows: int, weights: list[Any]) -> int:
    return sum(2 * rows * math.prod(w) for w in weights if len(w) == 2)


def _gradients(
    rows: int, starts: int, weights: list[Any], of_input: bool, of_state: bool, of_weights: list[bool]
) -> int:
    """One direction's: each product has a gradient of both its operands. Into the state goes every step's, but not that
    of the first one, of `starts` sequences, where nobody wants the initial state's."""
    w_ih, w_hh, *others = weights
    total = rows * math.prod(w_ih) * (of_input + of_weights[0])
    total += math.prod(w_hh) * (rows * of_weights[1] + (rows if of_state else rows - starts))
    for w, wanted in zip(others, of_weights[2:], strict=True):  # biases, and the weight of a projection
        total += rows * math.prod(w) * (1 + wanted) if len(w) == 2 else 0
    return 2 * total


@register_flop_formula(torch.ops.weft.rnn)
def _rnn_flops(input, h0, c0, weights, *_: Any, **__: Any) -> int:
    return _forward(math.prod(input[:-1]), weights)


@register_flop_formula(torch.ops.weft.rnn_backward)
def _rnn_backward_flops(
    grad_output, grad_h_n, grad_c_n, grad_cells, input, h0, c0, weights, batch_sizes, output, cells, gates, *,
    bidirectional, output_mask, **_: Any,
) -> int:  # fmt: skip
    # How many sequences packed input has is known to a state and its gradient alone.
    state = next((shape for shape in (h0, grad_h_n, grad_c_n) if shape is not None), None)
    starts = state[1] if state is not None else input[1] if len(input) == 3 else 0
    stride = len(weights) // (2 if bidirectional else 1)
    return sum(
        _gradients(
            math.prod(input[:-1]), starts, weights[first : first + stride], output_mask[0], output_mask[1],
            output_mask[3 + first : 3 + first + stride],
        )
        for first in range(0, len(weights), stride)
    )  # fmt: skip


@register_flop_formula(torch.ops.weft.rnn_slice_backward)
def _rnn_slice_backward_flops(
    maps, grad_output, grad_h_n, grad_c_n, input, h0, c0, weights, *_: Any, output_mask, **__: Any
) -> int:  # fmt: skip
    """Those of rnn_backward: what ranks need beside it does not count, as chunks of time do not."""
    of_weights = output_mask[3 : 3 + len(weights)]
    return _gradients(math.prod(input[:-1]), h0[1], weights, output_mask[0], output_mask[1], of_weights)


@register_flop_formula(torch.ops.weft.rnn_cell)
def _rnn_cell_flops(input, h, c, w_ih, w_hh, *_: Any, **__: Any) -> int:
    return _forward(input[0], [w_ih, w_hh])


@register_flop_formula(torch.ops.weft.rnn_cell_backward)
def _rnn_cell_backward_flops(grad_h_next, grad_c_next, input, h, c, w_ih, w_hh, *_: Any, output_mask, **__: Any) -> int:
    of_input, of_state, _, of_w_ih, of_w_hh, *_ = output_mask
    return 2 * input[0] * (math.prod(w_ih) * (of_input + of_w_ih) + math.prod(w_hh) * (of_state + of_w_hh))


@register_flop_formula(torch.ops.weft.torch_rnn)
def _torch_rnn_flops(input, state, weights, *_: Any, **__: Any) -> int:
    return _forward(math.prod(input[:-1]), weights)


@register_flop_formula(torch.ops.weft.torch_rnn_backward)
def _torch_rnn_backward_flops(
    grads, needed, input, state, weights, batch_sizes, cell, bias, num_layers, bidirectional, *_: Any, **__: Any
) -> int:
    """The forward pass, which it runs again, and the gradients."""
    rows, directions = math.prod(input[:-1]), 2 if bidirectional else 1
    stride = len(weights) // (num_layers * directions)
    of_weights = needed[1 + len(state) :]
    total = _forward(rows, weights)
    for first in range(0, len(weights), stride):
        of_input = needed[0] or first >= stride * directions
        part = slice(first, first + stride)
        total += _gradients(rows, state[0][1], weights[part], of_input, needed[1], of_weights[part])
    return total
