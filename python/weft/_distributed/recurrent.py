"""RNN, GRU and LSTM over slices: forward in rounds (walks.py), and backward, too, where there are no kernels of chunk
maps. Where there are, the backward pass is what it is on one rank, a scan over Jacobians, and one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .._rnn import slice_chunks
from .group import Ranks
from .totals import pack
from .walks import WayBack, settle, settle_back, walk_again

__all__ = ["Direction", "walk_slices"]

_rnn = torch.ops.weft.rnn.default
_rnn_backward = torch.ops.weft.rnn_backward.default
_slice_maps = torch.ops.weft.rnn_slice_maps.default
_slice_backward = torch.ops.weft.rnn_slice_backward.default


class Direction(NamedTuple):
    """What of a call does not change from layer to layer."""

    ranks: Ranks
    cell: str
    first: str
    """How weft::rnn walks a slice for the first time: in chunks by "newton", or as `backward`."""
    backward: str
    """How it goes back, and walks what is walked again: "persistent" or "scan"."""
    halves: bool
    """Whether that is by a scan that is cut where ranks exchange, in the place of rounds."""
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


def _walk(direction: Direction, how: str, input: Tensor, start: Tensor, weights: list[Tensor]) -> _Walk:
    h, *c = start.unsqueeze(1).unbind()
    output, h_n, c_n, cells, gates = _rnn(
        input, h, c[0] if c else None, weights, None, cell=direction.cell, keep_cells=bool(c), save=direction.saves,
        backward=how,
    )  # fmt: skip
    return _Walk(output, cells, gates, torch.cat((h_n, c_n) if c else (h_n,)))


def _walk_again(direction: Direction, input: Tensor, start: Tensor, weights: list[Tensor], walk: _Walk) -> Tensor:
    """From another start, into what is there, until the states meet. The last states."""
    lstm, batch = start.size(0) == 2, input.size(1)

    def block(steps: slice, start: Tensor) -> tuple[Tensor, Tensor]:
        part = _walk(direction, direction.backward, input[steps], start, weights)
        parts = (walk.output, walk.cells) if lstm else (walk.output,)
        there = torch.cat([t[steps][-1:].to(part.end.dtype) for t in parts])
        walk.output[steps] = part.output
        if lstm:
            walk.cells[steps] = part.cells
        if walk.gates.numel():
            walk.gates[:, steps.start * batch : steps.stop * batch] = part.gates
        return part.end, there

    return walk_again(input.size(0), start, walk.end, block)


class _Slice(torch.autograd.Function):
    """What walk_slices does."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, direction: Direction, input: Tensor, state: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = list(weights)
        if direction.reverse:
            input = input.flip(0)
        walk = _walk(direction, direction.first, input, state, weights)

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
        if direction.halves:
            found = _back_in_halves(
                direction, grad_output, grad_end, input, start, output, cells, gates, weights, needed[1:]
            )
            grad_input, grad_state, *grad_weights = found
            if direction.reverse:
                grad_input = grad_input.flip(0)
            return (
                None,
                *(g if n else None for g, n in zip((grad_input, grad_state, *grad_weights), needed[1:], strict=True)),
            )
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


def _back_in_halves(
    direction: Direction, grad_output: Tensor, grad_end: Tensor, input: Tensor, start: Tensor, output: Tensor,
    cells: Tensor, gates: Tensor, weights: list[Tensor], needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the input, of the state before the whole, zeros but on rank 0 and None where it is not needed, and
    of the weights."""
    of_input, of_state, *of_weights = needed
    ranks, (T, B, _), (states, _, H) = direction.ranks, input.shape, start.shape
    h, *c = start.unsqueeze(1).unbind()
    known = (input, h, c[0] if c else None, weights, output, cells, gates)
    if T > 0:
        chunks = slice_chunks(input.device, direction.cell, T, B, H)
        maps, value, message = _slice_maps(grad_output, *known, chunks, cell=direction.cell)
    else:  # what leaves is what enters
        value = input.new_zeros(B, states * H)
        half = torch.eye(states * H, device=input.device, dtype=torch.float64).expand(B, -1, -1) / 2
        product = pack(half, torch.ones_like(half, dtype=torch.int64), torch.float32)
        message = torch.cat((product.flatten(), product.new_zeros(value.numel()), product.new_ones(1)))
    share = grad_end.transpose(0, 1).contiguous().view(torch.int32).flatten()
    gathered = ranks.gather(torch.cat((message, share)))
    # From the last step of the whole to the first.
    order = ranks.rank if direction.reverse else ranks.size - 1 - ranks.rank
    entered, end, _, _ = torch.ops.weft.slice_states(gathered, value, order, not direction.reverse, B, True)
    left = entered.view(B, states, H).transpose(0, 1).contiguous()
    grad_start = None
    if of_state:
        grad_start = end.view(B, states, H).transpose(0, 1) if ranks.rank == 0 else torch.zeros_like(left)
    if T == 0:
        return torch.zeros_like(input), grad_start, *(torch.zeros_like(w) for w in weights)
    grad_h, *grad_c = left.unsqueeze(1).unbind()
    grads = _slice_backward(
        maps, grad_output, grad_h, grad_c[0] if c else None, *known, chunks, cell=direction.cell,
        output_mask=[of_input, False, False, *of_weights],
    )  # fmt: skip
    return grads[0], grad_start, *grads[3:]


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
