"""RNN, GRU and LSTM over slices, in rounds (walks.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .group import Ranks
from .walks import WayBack, blocks_of, have_met, settle, settle_back

__all__ = ["Direction", "walk_slices"]

_rnn = torch.ops.weft.rnn.default
_rnn_backward = torch.ops.weft.rnn_backward.default


class Direction(NamedTuple):
    """What of a call does not change from layer to layer."""

    ranks: Ranks
    cell: str
    backward: str
    """How weft::rnn goes back: "persistent" or "scan"."""
    reverse: bool
    saves: bool
    """What the backward pass needs."""
    keeps_cells: bool


class _Walk(NamedTuple):
    """Of some steps: h and, of an LSTM, c at each, the gates that the backward pass wants, and the last states."""

    output: Tensor
    cells: Tensor
    gates: Tensor
    end: Tensor
    """``(states, B, H)``: h, and c of an LSTM."""


def _walk(direction: Direction, input: Tensor, start: Tensor, weights: list[Tensor]) -> _Walk:
    h, *c = start.unsqueeze(1).unbind()
    output, h_n, c_n, cells, gates = _rnn(
        input, h, c[0] if c else None, weights, None, cell=direction.cell, keep_cells=bool(c), save=direction.saves,
        backward=direction.backward,
    )  # fmt: skip
    return _Walk(output, cells, gates, torch.cat((h_n, c_n) if c else (h_n,)))


def _walk_again(direction: Direction, input: Tensor, start: Tensor, weights: list[Tensor], walk: _Walk) -> Tensor:
    """From another start, into what is there, until the states meet. The last states."""
    lstm, batch = start.size(0) == 2, input.size(1)
    for steps in blocks_of(input.size(0)):
        part = _walk(direction, input[steps], start, weights)
        there = walk.output[steps][-1:]
        if lstm:
            there = torch.cat((there, walk.cells[steps][-1:].to(there.dtype)))
        met = have_met(part.end, there)
        walk.output[steps] = part.output
        if lstm:
            walk.cells[steps] = part.cells
        if walk.gates.numel():
            walk.gates[:, steps.start * batch : steps.stop * batch] = part.gates
        if met:
            return walk.end
        start = part.end
    return start


class _Slice(torch.autograd.Function):
    """What walk_slices does."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, direction: Direction, input: Tensor, state: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = list(weights)
        if direction.reverse:
            input = input.flip(0)
        walk = _walk(direction, input, state, weights)

        def again(start: Tensor) -> Tensor:
            nonlocal walk
            walk = walk._replace(end=_walk_again(direction, input, start, weights, walk))
            return walk.end

        start, end = settle(direction.ranks, direction.reverse, state, walk.end, again)
        ctx.direction = direction
        ctx.save_for_backward(input, start, walk.output, walk.cells, walk.gates, *weights)
        cells = walk.cells if direction.keeps_cells else walk.cells.new_empty(0, *walk.cells.shape[1:])
        output, cells = (t.flip(0) if direction.reverse else t for t in (walk.output, cells))
        return output, cells, end

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor, grad_cells: Tensor, grad_end: Tensor) -> tuple:
        direction = ctx.direction
        input, start, output, cells, gates, *weights = ctx.saved_tensors
        if direction.reverse:
            grad_output, grad_cells = grad_output.flip(0), grad_cells.flip(0)
        needed = ctx.needs_input_grad
        wanted, batch, lstm = [needed[1], *needed[3:]], input.size(1), start.size(0) == 2

        def back(begin: int, end: int, leaving: Tensor, everything: bool) -> tuple[Tensor, list[Tensor]]:
            steps = slice(begin, end)
            h, *c = start.unsqueeze(1).unbind()
            if begin > 0:
                h = output[begin - 1 : begin]
                c = [cells[begin - 1 : begin].to(h.dtype)] if lstm else []
            grad_h, *grad_c = leaving.unsqueeze(1).unbind()
            mask = [everything and wanted[0], True, lstm, *(everything and w for w in wanted[1:])]
            grads = _rnn_backward(
                grad_output[steps], grad_h, grad_c[0] if lstm else None,
                grad_cells[steps] if direction.keeps_cells else None, input[steps], h, c[0] if lstm else None, weights,
                None, output[steps], cells[steps],
                gates[:, begin * batch : end * batch] if gates.dim() > 1 else gates, cell=direction.cell,
                bidirectional=False, output_mask=mask, backward=direction.backward,
            )  # fmt: skip
            entering = leaving if begin == end else torch.cat(grads[1:3] if lstm else grads[1:2])
            return entering, [grads[0], *grads[3:]]

        way = WayBack(input.size(0), start, back)
        grad_state = settle_back(direction.ranks, direction.reverse, way, grad_end)
        grad_input, *grad_weights = way.gradients(1, wanted)
        if direction.reverse and grad_input is not None:
            grad_input = grad_input.flip(0)
        return None, grad_input, grad_state if needed[2] else None, *grad_weights


def walk_slices(
    direction: Direction, input: Tensor, state: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction over the slices of all ranks.

    Args:
        input: this rank's ``(T, B, I)``.
        state: ``(1, B, H)``, of an LSTM ``(2, B, H)``, h and c: on rank 0 the start of the whole, in both directions;
            on the others a guess.

    Returns:
        h and, of an LSTM, c at every step of the slice; and the states at the end of the whole.
    """
    return _Slice.apply(direction, input, state, *weights)
