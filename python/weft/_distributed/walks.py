"""Walks over slices in rounds: what recurrences have in common that are not linear in their state.

A rank walks its slice from the best state that it knows, all ends are gathered, and a rank whose start has changed
walks again, until no start changes. After k rounds the first k ranks are right whatever the net does; a net that
forgets where it came from within a slice is right after two. A slice is walked again only until the states meet those
that are there.

The backward pass goes the same way, from the other end: what a rank makes of the gradient that comes in is gathered
until nothing changes. It goes back through a slice in pieces, the last of which are short, and again only through those
that the gradient that comes in still reaches: of a net that forgets, 128 steps of however many. Every rank sees all
starts, so that all stop after the same round.

States and their gradients are ``(states, B, H)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .exchanging import Exchanging
from .group import Ranks

__all__ = ["WayBack", "settle", "settle_back", "walk_again"]

_FIRST_BLOCK = 64
"""Steps that are walked again before states are compared; each next block is twice as long."""
_UNITS = {torch.float32: 4, torch.float64: 4, torch.float16: 0, torch.bfloat16: 0}
"""Of a dtype's epsilon, within which two states have met: products of other sizes round otherwise. Half precision hides
more than that."""
_LAST_PIECE, _LONGER, _WORTH = 128, 16, 8
"""Steps of a slice's last piece in the backward pass, how many times as long each piece before it is, and how many
times as long what it is cut from has to be: a call more costs what some hundred steps do."""


def walk_again(
    steps: int, start: Tensor, end: Tensor, walk: Callable[[slice, Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """Walks a slice from another start, block by block, until the states meet those that are there.

    Args:
        end: the last state that is there.
        walk: of a block and the state before it: walks the block, puts its states in place, and returns its last state
            and the one that was there.

    Returns:
        The last state.
    """
    begin, block = 0, _FIRST_BLOCK
    while begin < steps:
        start, there = walk(slice(begin, min(begin + block, steps)), start)
        if _have_met(start, there):
            return end
        begin, block = begin + block, 2 * block
    return start


def _have_met(new: Tensor, old: Tensor) -> bool:
    """Whether two states are the same up to rounding. The host waits."""
    epsilon = _UNITS[new.dtype] * torch.finfo(new.dtype).eps
    return torch.allclose(new, old, rtol=epsilon, atol=epsilon)


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, a NaN too. The host waits."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def settle(
    ranks: Ranks, reverse: bool, start: Tensor, end: Tensor, again: Callable[[Tensor], Tensor]
) -> Exchanging[tuple[Tensor, Tensor]]:
    """Rounds, until every slice begins where the one before it ends.

    Args:
        start, end: states before and after this rank's slice as it was walked first; the first rank's start is that of
            the whole, in both directions.
        again: walks from another start and returns the end.

    Returns:
        The start that the slice has, and the end of the whole.
    """
    # With its end each rank tells the start that it guessed.
    told = yield torch.stack((end, start))
    ends, starts = told[:, 0], told[:, 1]
    whole = told[:1, 1]
    while True:
        right = torch.cat((ends[1:], whole)) if reverse else torch.cat((whole, ends[:-1]))
        if _same(right, starts):
            return start, ends[0 if reverse else -1].clone()
        if not _same(right[ranks.rank], starts[ranks.rank]):
            start = right[ranks.rank].contiguous()
            end = again(start)
        starts, ends = right, (yield end)


Back = Callable[[int, int, Tensor, bool], tuple[Tensor, list[Tensor]]]
"""``back(begin, end, leaving, everything)`` goes back through some steps: the gradient of the state that enters them
and, of `everything`, those of inputs and of parameters."""


class WayBack:
    """One rank's backward pass: from no gradient of the state that leaves the slice, and, with :meth:`go`, from any."""

    entering: Tensor
    """The gradient of the state that enters the slice."""
    complete: bool = False
    """Whether all gradients are there: those of the last piece are left until something has come in."""

    def __init__(self, steps: int, like: Tensor, back: Back) -> None:
        """like: a state."""
        self.back, self.pieces = back, _pieces(steps, like.dtype)
        self.found: list[list[Tensor]] = [[] for _ in self.pieces]
        self.reached: list[Tensor] = []  # the gradients of the states before each piece
        state = torch.zeros_like(like)
        for number in range(len(self.pieces)):
            state = self._through(number, state, number > 0)
            self.reached.append(state)
        self.entering = state

    def _through(self, number: int, leaving: Tensor, everything: bool) -> Tensor:
        entering, found = self.back(*self.pieces[number], leaving, everything)
        if everything:
            self.found[number] = found
        return entering

    def go(self, leaving: Tensor) -> None:
        """Again with this gradient of the state that leaves the slice, until nothing of it is left."""
        self.complete = True
        for number, before in enumerate(self.reached):
            leaving = self._through(number, leaving, True)
            self.reached[number] = leaving
            if number + 1 < len(self.reached) and _is_as_good(leaving, before):
                return
        self.entering = leaving

    def gradients(self, inputs: int, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Of `inputs` inputs, for every step, and of parameters; None where not wanted."""
        gradients: list[Tensor | None] = []
        for k, want in enumerate(wanted):
            parts = [found[k] for found in self.found]
            if not want:
                gradients.append(None)
            elif len(parts) == 1:
                gradients.append(parts[0])
            else:
                gradients.append(torch.cat(parts[::-1]) if k < inputs else torch.stack(parts).sum(0))
        return gradients


def _pieces(steps: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Begins and ends of a slice's pieces, from the last to the first. Half precision has one: where pieces meet, the
    gradient of the state would be rounded."""
    found, end, length = [], steps, _LAST_PIECE if dtype.itemsize > 2 else steps
    while end >= _WORTH * length > 0:
        found.append((end - length, end))
        end, length = end - length, _LONGER * length
    return [*found, (0, end)]


def _is_as_good(new: Tensor, old: Tensor) -> bool:
    """Whether gradients of states differ by no more than rounding beside each row's largest. The host waits."""
    if new.numel() == 0:
        return True
    tolerance = _UNITS[new.dtype] * torch.finfo(new.dtype).eps * old.abs().amax(-1, keepdim=True)
    within = ((new - old).abs() <= tolerance) & tolerance.isfinite()
    return bool((within | (new == old)).all())


def settle_back(ranks: Ranks, reverse: bool, way: WayBack, grad_end: Tensor) -> Exchanging[Tensor]:
    """Rounds, until every slice goes back from what the one after it gives; `grad_end`, this rank's share of the
    gradient of the whole's end. The gradient of the whole's start, zeros but on rank 0, where it was read."""
    told = yield torch.stack((way.entering, grad_end))
    entered, lefts = told[:, 0], torch.zeros_like(told[:, 0])
    wide = torch.float64 if grad_end.dtype == torch.float64 else torch.float32
    whole = told[:, 1].sum(0, dtype=wide).to(grad_end.dtype).unsqueeze(0)
    while True:
        right = torch.cat((whole, entered[:-1])) if reverse else torch.cat((entered[1:], whole))
        settled = _same(right, lefts)
        if not way.complete or not _same(right[ranks.rank], lefts[ranks.rank]):
            way.go(right[ranks.rank].contiguous())
        if settled:
            break
        lefts, entered = right, (yield way.entering)
    start = entered[-1 if reverse else 0]
    return start if ranks.rank == 0 else torch.zeros_like(start)
