"""RNN, GRU and LSTM over slices: forward in rounds (walks.py), and backward, too, where there are no kernels of chunk
maps. Where there are, the backward pass is what it is on one rank, a scan over Jacobians, and one exchange."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .._rnn import slice_chunks
from .exchanging import Exchanging, run_together
from .group import Ranks
from .totals import pack
from .walks import WayBack, settle, settle_back, walk_again

__all__ = ["Direction", "walk_slices"]

T = TypeVar("T")

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


def _parts(state: Tensor) -> tuple[Tensor, Tensor | None]:
    """h and, of an LSTM, c, each (1, B, H)."""
    if state.size(0) == 1:  # as most are: an operation less for the host
        return state, None
    h, c = state.unsqueeze(1).unbind()
    return h, c


class _Walk(NamedTuple):
    """Of some steps: h and, of an LSTM, c at each, the gates that the backward pass wants, and the last states."""

    output: Tensor
    cells: Tensor
    gates: Tensor
    end: Tensor
    """``(states, B, H)``: h, and c of an LSTM."""


def _walk(direction: Direction, how: str, input: Tensor, start: Tensor, weights: list[Tensor]) -> _Walk:
    h, c = _parts(start)
    output, h_n, c_n, cells, gates = _rnn(
        input, h, c, weights, None, cell=direction.cell, keep_cells=c is not None, save=direction.saves, backward=how
    )
    return _Walk(output, cells, gates, h_n if c is None else torch.cat((h_n, c_n)))


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


class _Walked(NamedTuple):
    """Of one direction, in its own order of time."""

    input: Tensor
    start: Tensor
    walk: _Walk
    end: Tensor
    """Of the whole."""


def _settled(direction: Direction, input: Tensor, state: Tensor, weights: list[Tensor]) -> Exchanging[_Walked]:
    if direction.reverse:
        input = input.flip(0)
    walk = _walk(direction, direction.first, input, state, weights)

    def again(start: Tensor) -> Tensor:
        nonlocal walk
        walk = walk._replace(end=_walk_again(direction, input, start, weights, walk))
        return walk.end

    start, end = yield from settle(direction.ranks, direction.reverse, state, walk.end, again)
    return _Walked(input, start, walk, end)


class _Slice(torch.autograd.Function):
    """What walk_slices does: the input, then a state and weights of each direction -> output, cells and end of each."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, directions: tuple[Direction, ...], input: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        given = _split(others, len(directions))
        found = run_together(
            directions[0].ranks,
            [_settled(d, input, state, weights) for d, (state, *weights) in zip(directions, given, strict=True)],
        )
        ctx.directions = directions
        saved, results = [], []
        for direction, (_, *weights), (steps, start, walk, end) in zip(directions, given, found, strict=True):
            saved += [steps, start, walk.output, walk.cells, walk.gates, *weights]
            cells = walk.cells if direction.keeps_cells else walk.cells.new_empty(0, *walk.cells.shape[1:])
            results += [*(t.flip(0) if direction.reverse else t for t in (walk.output, cells)), end]
        ctx.save_for_backward(*saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple:
        count = len(ctx.directions)
        of_input, *needed = ctx.needs_input_grad[1:]
        calls = [
            _gone_back(direction, *of_one, *saved, [of_input, *need])
            for direction, of_one, saved, need in zip(
                ctx.directions,
                _split(grads, count),
                _split(ctx.saved_tensors, count),
                _split(needed, count),
                strict=True,
            )
        ]
        found = run_together(ctx.directions[0].ranks, calls)
        grad_input = None
        if of_input:
            grad_input = functools.reduce(torch.add, (of_one[0] for of_one in found))
        return None, grad_input, *(grad for of_one in found for grad in of_one[1:])


def _split(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    size = len(values) // parts
    return [values[k : k + size] for k in range(0, len(values), size)]


def _gone_back(
    direction: Direction, grad_output: Tensor, grad_cells: Tensor, grad_end: Tensor, input: Tensor, start: Tensor,
    output: Tensor, cells: Tensor, gates: Tensor, *others: Any,
) -> Exchanging[list[Tensor | None]]:  # fmt: skip
    """Gradients of the input, of the state before the whole and of the weights, where needed.

    Args:
        others: the weights, and whether input, state and each weight need a gradient.
    """
    *weights, needed = others
    if direction.reverse:
        grad_output, grad_cells = grad_output.flip(0), grad_cells.flip(0)
    if direction.halves:
        found = yield from _back_in_halves(
            direction, grad_output, grad_end, input, start, output, cells, gates, weights, needed
        )
    else:
        found = yield from _back_in_rounds(
            direction, grad_output, grad_cells, grad_end, input, start, output, cells, gates, weights, needed
        )
    found = [grad if need else None for grad, need in zip(found, needed, strict=True)]
    if direction.reverse and found[0] is not None:
        found[0] = found[0].flip(0)
    return found


def _back_in_rounds(
    direction: Direction, grad_output: Tensor, grad_cells: Tensor, grad_end: Tensor, input: Tensor, start: Tensor,
    output: Tensor, cells: Tensor, gates: Tensor, weights: list[Tensor], needed: Sequence[bool],
) -> Exchanging[list[Tensor | None]]:  # fmt: skip
    of_input, _, *of_weights = needed
    batch, lstm = input.size(1), start.size(0) == 2

    def back(begin: int, end: int, leaving: Tensor, everything: bool) -> tuple[Tensor, list[Tensor]]:
        steps = slice(begin, end)
        h, c = _parts(start)
        if begin > 0:
            h = output[begin - 1 : begin]
            c = cells[begin - 1 : begin].to(h.dtype) if lstm else None
        grad_h, grad_c = _parts(leaving)
        mask = [everything and of_input, True, lstm, *(everything and w for w in of_weights)]
        grads = _rnn_backward(
            grad_output[steps], grad_h, grad_c,
            grad_cells[steps] if direction.keeps_cells else None, input[steps], h, c, weights,
            None, output[steps], cells[steps],
            gates[:, begin * batch : end * batch] if gates.dim() > 1 else gates, cell=direction.cell,
            bidirectional=False, output_mask=mask, backward=direction.backward,
        )  # fmt: skip
        entering = leaving if begin == end else torch.cat(grads[1:3] if lstm else grads[1:2])
        return entering, [grads[0], *grads[3:]]

    way = WayBack(input.size(0), start, back)
    grad_state = yield from settle_back(direction.ranks, direction.reverse, way, grad_end)
    grad_input, *grad_weights = way.gradients(1, [of_input, *of_weights])
    return [grad_input, grad_state, *grad_weights]


def _back_in_halves(
    direction: Direction, grad_output: Tensor, grad_end: Tensor, input: Tensor, start: Tensor, output: Tensor,
    cells: Tensor, gates: Tensor, weights: list[Tensor], needed: Sequence[bool],
) -> Exchanging[list[Tensor | None]]:  # fmt: skip
    """The gradient of the state before the whole is zeros but on rank 0."""
    of_input, of_state, *of_weights = needed
    ranks, (T, B, _), (states, _, H) = direction.ranks, input.shape, start.shape
    h, c = _parts(start)
    known = (input, h, c, weights, output, cells, gates)
    if T > 0:
        chunks = slice_chunks(input.device, direction.cell, T, B, H)
        maps, value, message = _slice_maps(grad_output, *known, chunks, cell=direction.cell)
    else:  # what leaves is what enters
        value = input.new_zeros(B, states * H)
        half = torch.eye(states * H, device=input.device, dtype=torch.float64).expand(B, -1, -1) / 2
        product = pack(half, torch.ones_like(half, dtype=torch.int64), torch.float32)
        message = torch.cat((product.flatten(), product.new_zeros(value.numel()), product.new_ones(1)))
    share = grad_end if c is None else grad_end.transpose(0, 1)
    gathered = yield torch.cat((message, share.reshape(-1).view(torch.int32)))
    # From the last step of the whole to the first.
    order = ranks.rank if direction.reverse else ranks.size - 1 - ranks.rank
    entered, end, _, _ = torch.ops.weft.slice_states(gathered, value, order, not direction.reverse, B, True)

    def of_states(t: Tensor) -> Tensor:
        return t.unsqueeze(0) if c is None else t.view(B, states, H).transpose(0, 1).contiguous()

    left, grad_start = of_states(entered), None
    if of_state:
        grad_start = of_states(end) if ranks.rank == 0 else torch.zeros_like(left)
    if T == 0:
        return [torch.zeros_like(input), grad_start, *(torch.zeros_like(w) for w in weights)]
    grads = _slice_backward(
        maps, grad_output, *_parts(left), *known, chunks, cell=direction.cell,
        output_mask=[of_input, False, False, *of_weights],
    )  # fmt: skip
    return [grads[0], grad_start, *grads[3:]]


def walk_slices(
    directions: Sequence[Direction], input: Tensor, states: Sequence[Tensor], weights: Sequence[Sequence[Tensor]]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """One layer in one or two directions over the slices of all ranks. What one tells the others is on its way while
    the other one walks.

    Args:
        input: this rank's ``(T, B, I)``.
        states: of each direction ``(1, B, H)``, of an LSTM ``(2, B, H)``, h and c: on rank 0 the start of the whole, in
            both directions; on the others a guess.
        weights: of each direction.

    Returns:
        Of each direction h and, of an LSTM, c at every step of the slice; and the states at the end of the whole.
    """
    others = (t for state, own in zip(states, weights, strict=True) for t in (state, *own))
    found = _Slice.apply(tuple(directions), input, *others)
    return [found[k : k + 3] for k in range(0, len(found), 3)]
