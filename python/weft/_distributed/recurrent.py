"""RNN, GRU and LSTM over slices: rounds.

A rank walks its slice from the best state that it knows, all ends are gathered, and a rank whose start has changed
walks again, until no start changes. After k rounds the first k ranks are right whatever the net does; a net that
forgets where it came from within a slice is right after two. A slice is walked again only until the states meet those
that are there.

The backward pass goes the same way, from the other end: what a rank makes of the gradient that comes in is gathered
until nothing changes. It goes back through a slice in pieces, the last of which are short, and again only through those
that the gradient that comes in still reaches: of a net that forgets, 128 steps of however many. Every rank sees all
starts, so that all stop after the same round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .group import Ranks

__all__ = ["Direction", "walk_slices"]

_rnn = torch.ops.weft.rnn.default
_rnn_backward = torch.ops.weft.rnn_backward.default

_FIRST_BLOCK = 64
"""Steps that are walked again before states are compared; each next block is twice as long."""
_UNITS = {torch.float32: 4, torch.float64: 4, torch.float16: 0, torch.bfloat16: 0}
"""Of a dtype's epsilon, within which two states have met: products of other sizes round otherwise. Half precision hides
more than that."""


_LAST_PIECE, _LONGER, _WORTH = 128, 16, 8
"""Steps of a slice's last piece in the backward pass, how many times as long each piece before it is, and how many
times as long what it is cut from has to be: a call more costs what some hundred steps do."""


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


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, a NaN too. The host waits."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _walk_again(direction: Direction, input: Tensor, start: Tensor, weights: list[Tensor], walk: _Walk) -> _Walk:
    """From another start, into what is there, until the states meet."""
    lstm, steps, batch, begin, block = start.size(0) == 2, input.size(0), input.size(1), 0, _FIRST_BLOCK
    dtype = walk.output.dtype
    epsilon = _UNITS[dtype] * torch.finfo(dtype).eps
    if steps == 0:
        return walk._replace(end=start)
    while begin < steps:
        end = min(begin + block, steps)
        part = _walk(direction, input[begin:end], start, weights)
        there = walk.output[end - 1 : end]
        if lstm:
            there = torch.cat((there, walk.cells[end - 1 : end].to(there.dtype)))
        met = torch.allclose(part.end, there, rtol=epsilon, atol=epsilon)
        walk.output[begin:end] = part.output
        if lstm:
            walk.cells[begin:end] = part.cells
        if walk.gates.numel():
            walk.gates[:, begin * batch : end * batch] = part.gates
        if met:
            return walk
        begin, start, block = end, part.end, 2 * block
    return walk._replace(end=part.end)


class _Slice(torch.autograd.Function):
    """What walk_slices does."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, direction: Direction, input: Tensor, state: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ranks, rank, weights = direction.ranks, direction.ranks.rank, list(weights)
        if direction.reverse:
            input = input.flip(0)
        start = state
        walk = _walk(direction, input, start, weights)
        # With its end each rank tells the start that it guessed; the whole's start is the first rank's of all.
        told = ranks.gather(torch.stack((walk.end, start)))
        ends, starts = told[:, 0], told[:, 1]
        whole = told[:1, 1]
        while True:
            right = torch.cat((ends[1:], whole)) if direction.reverse else torch.cat((whole, ends[:-1]))
            if _same(right, starts):
                break
            if not _same(right[rank], starts[rank]):
                start = right[rank].contiguous()
                walk = _walk_again(direction, input, start, weights, walk)
            starts, ends = right, ranks.gather(walk.end)
        ctx.direction = direction
        ctx.save_for_backward(input, start, walk.output, walk.cells, walk.gates, *weights)
        cells = walk.cells if direction.keeps_cells else walk.cells.new_empty(0, *walk.cells.shape[1:])
        output, cells = (t.flip(0) if direction.reverse else t for t in (walk.output, cells))
        return output, cells, ends[0 if direction.reverse else -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor, grad_cells: Tensor, grad_end: Tensor) -> tuple:
        direction = ctx.direction
        input, start, output, cells, gates, *weights = ctx.saved_tensors
        ranks, rank = direction.ranks, direction.ranks.rank
        if direction.reverse:
            grad_output, grad_cells = grad_output.flip(0), grad_cells.flip(0)
        wanted = ctx.needs_input_grad
        way = _WayBack(
            direction, input, start, weights, output, cells, gates, grad_output, grad_cells,
            [wanted[1], *wanted[3:]],
        )  # fmt: skip
        told = ranks.gather(torch.stack((way.entering, grad_end)))
        entered, lefts = told[:, 0], torch.zeros_like(told[:, 0])
        whole = told[:, 1].sum(0, dtype=torch.float64 if start.dtype == torch.float64 else torch.float32)
        whole = whole.to(start.dtype).unsqueeze(0)
        while True:
            right = torch.cat((whole, entered[:-1])) if direction.reverse else torch.cat((entered[1:], whole))
            settled = _same(right, lefts)
            if not way.complete or not _same(right[rank], lefts[rank]):
                way.go(right[rank].contiguous())
            if settled:
                break
            lefts, entered = right, ranks.gather(way.entering)
        grad_input, *grad_weights = way.gradients()
        if direction.reverse and grad_input is not None:
            grad_input = grad_input.flip(0)
        # The whole's start was read on rank 0, in both directions.
        grad_state = entered[-1 if direction.reverse else 0] if rank == 0 else torch.zeros_like(start)
        found = [grad_input, grad_state, *grad_weights]
        return None, *(g if w else None for g, w in zip(found, wanted[1:], strict=True))


def _pieces(steps: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Begins and ends of a slice's pieces, from the last to the first. Half precision has one: where pieces meet, the
    gradient of the state would be rounded."""
    found, end, length = [], steps, _LAST_PIECE if dtype.itemsize > 2 else steps
    while end >= _WORTH * length > 0:
        found.append((end - length, end))
        end, length = end - length, _LONGER * length
    return [*found, (0, end)]


class _WayBack:
    """One rank's backward pass: from no gradient of the state that leaves the slice, and, with :meth:`go`, from any."""

    entering: Tensor
    """The gradient of the state that enters the slice, ``(states, B, H)``."""
    complete: bool = False
    """Whether all gradients are there: those of the last piece are left until something has come in."""

    def __init__(
        self, direction: Direction, input: Tensor, start: Tensor, weights: list[Tensor], output: Tensor, cells: Tensor,
        gates: Tensor, grad_output: Tensor, grad_cells: Tensor, wanted: list[bool],
    ) -> None:  # fmt: skip
        """wanted: of the gradients of input and weights."""
        self.direction, self.input, self.start, self.weights = direction, input, start, weights
        self.output, self.cells, self.gates = output, cells, gates
        self.grad_output, self.grad_cells, self.wanted = grad_output, grad_cells, wanted
        self.pieces = _pieces(input.size(0), start.dtype)
        self.found: list[list[Tensor]] = [[] for _ in self.pieces]  # of each piece, the gradients of input and weights
        self.reached: list[Tensor] = []  # the gradients of the states before each piece
        state = torch.zeros_like(start)
        for number in range(len(self.pieces)):
            state = self._back(number, state, number > 0)
            self.reached.append(state)
        self.entering = state

    def _state_before(self, step: int) -> tuple[Tensor, Tensor | None]:
        """h and, of an LSTM, c, each ``(1, B, H)``."""
        lstm = self.start.size(0) == 2
        if step == 0:
            h, *c = self.start.unsqueeze(1).unbind()
            return h, c[0] if lstm else None
        h = self.output[step - 1 : step]
        return h, self.cells[step - 1 : step].to(h.dtype) if lstm else None

    def _back(self, number: int, leaving: Tensor, everything: bool) -> Tensor:
        """Through one piece."""
        begin, end = self.pieces[number]
        h, c = self._state_before(begin)
        grad_h, *grad_c = leaving.unsqueeze(1).unbind()
        steps, batch = slice(begin, end), self.input.size(1)
        mask = [everything and self.wanted[0], True, c is not None, *(everything and w for w in self.wanted[1:])]
        grads = _rnn_backward(
            self.grad_output[steps], grad_h, grad_c[0] if grad_c else None,
            self.grad_cells[steps] if self.direction.keeps_cells else None, self.input[steps], h, c, self.weights, None,
            self.output[steps], self.cells[steps], self.gates[:, begin * batch : end * batch] if self.gates.dim() > 1
            else self.gates, cell=self.direction.cell, bidirectional=False, output_mask=mask,
            backward=self.direction.backward,
        )  # fmt: skip
        if everything:
            self.found[number] = [grads[0], *grads[3:]]
        return leaving if begin == end else torch.cat(grads[1:3] if c is not None else grads[1:2])

    def go(self, leaving: Tensor) -> None:
        """Again with this gradient of the state that leaves the slice, until nothing of it is left."""
        self.complete = True
        for number, before in enumerate(self.reached):
            leaving = self._back(number, leaving, True)
            self.reached[number] = leaving
            if number + 1 < len(self.reached) and _is_as_good(leaving, before):
                return
        self.entering = leaving

    def gradients(self) -> list[Tensor | None]:
        """Of input and weights; None where not wanted."""
        if not self.wanted[0]:
            grad_input = None
        elif len(self.pieces) == 1:
            grad_input = self.found[0][0]
        else:
            grad_input = torch.cat([found[0] for found in reversed(self.found)])
        sums: list[Tensor | None] = [None] * (len(self.wanted) - 1)
        for k, wanted in enumerate(self.wanted[1:]):
            parts = [found[1 + k] for found in self.found]
            if wanted:
                sums[k] = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        return [grad_input, *sums]


def _is_as_good(new: Tensor, old: Tensor) -> bool:
    """Whether gradients of states (states, B, H) differ by no more than rounding beside each row's largest. The host
    waits."""
    if new.numel() == 0:
        return True
    tolerance = _UNITS[new.dtype] * torch.finfo(new.dtype).eps * old.abs().amax(-1, keepdim=True)
    within = ((new - old).abs() <= tolerance) & tolerance.isfinite()
    return bool((within | (new == old)).all())


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
