"""Recurrent layers step by step in plain torch: slow, readable, and differentiable to any order.

This is what the fast algorithms are tested against, and what runs where torch closes the way to compiled autograd
functions: under ``torch.func`` transforms and in forward-mode AD.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["rnn", "step"]

# (input side of the gates (n, G H), state, recurrent weight, recurrent bias, projection or None) -> new state.
Step = Callable[[Tensor, tuple[Tensor, ...], Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...]]


def _recurrent(h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """W_hh h + b_hh. Of several heads, W_hh (G H, P) has for each gate the P rows of each head after each other, which
    multiply the head's own P of the H values."""
    heads = h.size(-1) // w.size(-1)
    if heads == 1:
        return F.linear(h, w, b)
    by_head = w.unflatten(0, (-1, heads, w.size(-1)))
    product = torch.einsum("bhk,ghjk->bghj", h.unflatten(-1, (heads, -1)), by_head).flatten(1)
    return product if b is None else product + b


def _tanh_step(x: Tensor, state: tuple[Tensor, ...], w: Tensor, b: Tensor | None, _: Tensor | None):
    return (torch.tanh(x + _recurrent(state[0], w, b)),)


def _relu_step(x: Tensor, state: tuple[Tensor, ...], w: Tensor, b: Tensor | None, _: Tensor | None):
    return (torch.relu(x + _recurrent(state[0], w, b)),)


def _gru_step(x: Tensor, state: tuple[Tensor, ...], w: Tensor, b: Tensor | None, _: Tensor | None):
    (h,) = state
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = _recurrent(h, w, b).chunk(3, -1)
    r = torch.sigmoid(x_r + h_r)
    z = torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return ((1 - z) * n + z * h,)


def _lstm_step(x: Tensor, state: tuple[Tensor, ...], w: Tensor, b: Tensor | None, projection: Tensor | None):
    h, c = state
    i, f, g, o = (x + _recurrent(h, w, b)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h if projection is None else F.linear(h, projection), c


def _slstm_step(log_forget: Callable[[Tensor], Tensor]) -> Step:
    """Beck et al., 2024, equations 9 to 18, given the logarithm of the forget gate. Where n = 0 there is no state yet,
    and m begins with the input gate."""

    def step(x: Tensor, state: tuple[Tensor, ...], w: Tensor, b: Tensor | None, _: Tensor | None):
        h, c, n, m = state
        i, f, z, o = (x + _recurrent(h, w, b)).chunk(4, -1)
        held = log_forget(f) + m
        m = torch.where(n > 0, torch.maximum(held, i), i)
        i = torch.exp(i - m)
        f = torch.exp((held - m).clamp(max=_LARGEST_LOG_FORGET))
        c = f * c + i * torch.tanh(z)
        n = f * n + i
        return torch.sigmoid(o) * (c / n), c, n, m

    return step


_LARGEST_LOG_FORGET = 10.0
"""f is at most 1 where there is a state. Where there is none, f multiplies zeros, and has to be finite."""

_STEPS: dict[str, Step] = {
    "rnn_tanh": _tanh_step,
    "rnn_relu": _relu_step,
    "gru": _gru_step,
    "lstm": _lstm_step,
    "slstm": _slstm_step(F.logsigmoid),
    "slstm_exp": _slstm_step(lambda f: f),
}


def step(
    cell: str,
    input: Tensor,
    state: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """One step of a cell, from input ``(B, I)`` and its states ``(B, H)`` each; fp16 and bf16 compute in fp32 and round
    the new states once, to the widest of the states' dtypes."""
    dtype = functools.reduce(torch.promote_types, [s.dtype for s in state])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    w_ih, w_hh, *biases = (None if t is None else t.to(wide) for t in (w_ih, w_hh, b_ih, b_hh))
    x = F.linear(input.to(wide), w_ih, biases[0])
    new = _STEPS[cell](x, tuple(s.to(wide) for s in state), w_hh, biases[1], None)
    return tuple(s.to(dtype) for s in new)


def _direction(
    take: Step, gates: Sequence[Tensor], state: tuple[Tensor, ...], weights: Sequence[Tensor], bias: bool, reverse: bool
) -> tuple[list[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """One layer in one direction: the states after every step, and the last ones. ``gates[t]`` holds the rows that are
    running at step t; the others keep their state: finished rows (forward) their last one, rows that have not begun
    (reverse) their initial one."""
    recurrent, recurrent_bias = weights[1], weights[3] if bias else None
    projection = weights[-1] if len(weights) == (5 if bias else 3) else None
    states = []
    for x in reversed(gates) if reverse else gates:
        rows = x.size(0)
        new = take(x, tuple(s[:rows] for s in state), recurrent, recurrent_bias, projection)
        state = tuple(torch.cat([n, s[rows:]]) if rows < s.size(0) else n for n, s in zip(new, state, strict=True))
        states.append(new)
    return states[::-1] if reverse else states, state


def rnn(
    input: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    cell: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool = False,
    dropout: float = 0.0,
    training: bool = False,
    batch_sizes: Tensor | None = None,
    return_cells: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]] | tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Run a stack of recurrent layers, step by step.

    fp16 and bf16 compute in fp32, the carried state included, and round once where a layer's result is written.

    Args:
        input: ``(T, B, I)`` with T at least 1, or the data ``(sum of batch_sizes, I)`` of a PackedSequence.
        state: ``(h0,)``, for an LSTM ``(h0, c0)``, for an sLSTM ``(h0, c0, n0, m0)``; each
            ``(layers * directions, B, H)``, h0 of a projected LSTM ``(layers * directions, B, P)``. Dtypes may differ
            from the input's.
        weights: ``w_ih, w_hh[, b_ih, b_hh][, w_hr]`` of each layer and direction, as in torch's ``_flat_weights``; of
            several heads w_hh is ``(G H, H / heads)``, the rows of each head after each other within a gate.
        cell: "rnn_tanh", "rnn_relu", "gru", "lstm", "slstm" or "slstm_exp", which has the exponential forget gate.
        bias: whether ``weights`` holds biases.
        num_layers, bidirectional, dropout, training: as in :class:`torch.nn.RNNBase`.
        batch_sizes: rows running at each step, ``(T,)``, on the CPU, not increasing; None for a padded input.
        return_cells: for an LSTM, return the last layer's c at every step, too.

    Returns:
        The output, in the input's dtype, laid out like the input, directions x H (or P) wide; and the final state, laid
        out as ``state``. With ``return_cells`` then the cells, laid out like the input, directions x H wide.

    Raises:
        RuntimeError: ``batch_sizes`` do not describe the input.
    """
    dtype = input.dtype
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    take = _STEPS[cell]
    directions = 2 if bidirectional else 1
    per_direction = len(weights) // (num_layers * directions)
    rows = None if batch_sizes is None else batch_sizes.tolist()
    if rows is not None and (rows != sorted(rows, reverse=True) or rows[-1] < 1 or sum(rows) != len(input)):
        raise RuntimeError(
            f"reference.rnn: batch_sizes must not increase, be at least 1 and sum to the rows of the input, "
            f"{len(input)}, got {rows}"
        )
    final: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs: list[tuple[Tensor, ...]] = []
        for direction in range(directions):
            index = layer * directions + direction
            w = [p.to(accumulate) for p in weights[index * per_direction : (index + 1) * per_direction]]
            gates = F.linear(input.to(accumulate), w[0], w[2] if bias else None)
            steps = gates.unbind(0) if rows is None else gates.split(rows)
            start = tuple(s[index].to(accumulate) for s in state)
            reached, end = _direction(take, steps, start, w, bias, direction == 1)
            join = torch.stack if rows is None else torch.cat
            wanted = 2 if return_cells and layer + 1 == num_layers else 1
            outputs.append(tuple(join(parts).to(dtype) for parts in list(zip(*reached, strict=True))[:wanted]))
            final.append(tuple(s.to(dtype) for s in end))
        input, *cells = (p[0] if directions == 1 else torch.cat(p, -1) for p in zip(*outputs, strict=True))
        if dropout > 0 and training and layer + 1 < num_layers:
            input = F.dropout(input, dropout, True)
    return input, tuple(torch.stack(parts) for parts in zip(*final, strict=True)), *cells
