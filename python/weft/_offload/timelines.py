"""Timelines of uses: made from what the engine recorded, completed from earlier ones, compared."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .policy import Link, Plan, Saved, Timeline

_SAME_SECONDS = 0.1
"""Share by which the time of a forward or backward may differ from the planned one before the step is planned again."""
_SAME_RATE = 0.25
_SAME_DENSITY = 0.02
_WORTH = 0.85
"""A tensor is compressed if that makes it smaller than this share of its size: the codec slows compute a little."""


class FirstSave(NamedTuple):
    """How a tensor of a timeline was saved first."""

    bytes: int
    itemsize: int
    may_move: bool
    again: int = 0
    """Behind how many tensors it was saved again the last time."""


def timeline_of(raw: tuple) -> Timeline:
    operations, seconds, forward, tensors, _ = raw
    return Timeline(
        tuple(seconds) if seconds is not None else (None,) * operations, forward, tuple(Saved(*t) for t in tensors)
    )


def first_saves(raw: tuple) -> list[FirstSave]:
    return [FirstSave(*entry[:-1]) for entry in raw[4]]


def known_densities(raw: tuple) -> tuple[bool, ...]:
    """Whether the use knows the density of each tensor."""
    return tuple(entry[-1] for entry in raw[4])


def at_pace(timed: Timeline, whole: Timeline) -> tuple[float | None, ...]:
    """Seconds of the operations of `timed`, each phase scaled to its time in `whole`. A number there may stand for all
    operations since the one before, and those after the last number are unknown."""
    seconds: list[float | None] = []
    for phase in slice(timed.forward), slice(timed.forward, None):
        parts, known = timed.seconds[phase], whole.seconds[phase]
        if None in parts or None in known:
            return whole.seconds
        end = max((i + 1 for i, s in enumerate(known) if s > 0), default=0)
        before = sum(parts[:end])
        scale = sum(known) / before if before > 0 else 1.0
        seconds += (scale * s for s in parts)
    return tuple(seconds)


def with_densities(
    timeline: Timeline, known: tuple[bool, ...], before: Timeline, before_known: tuple[bool, ...]
) -> tuple[Timeline, tuple[bool, ...]]:
    """Densities that this use has not measured are taken from before, where they were known."""
    if len(before.tensors) != len(timeline.tensors):
        return timeline, known
    take = [
        not k and b and t.bytes == o.bytes
        for t, k, o, b in zip(timeline.tensors, known, before.tensors, before_known, strict=True)
    ]
    tensors = (
        replace(t, density=o.density) if taken else t
        for t, o, taken in zip(timeline.tensors, before.tensors, take, strict=True)
    )
    return replace(timeline, tensors=tuple(tensors)), tuple(map(operator.or_, known, take))


def worth_compressing(timeline: Timeline) -> Timeline:
    """The timeline, with density 1 for tensors that cross as fast uncompressed as the codec's kernel sends them."""

    def known(t: Saved) -> Saved:
        n = t.bytes // max(t.itemsize, 1)
        return t if n * t.density * t.itemsize + n / 8 < _WORTH * t.bytes else replace(t, density=1.0)

    return replace(timeline, tensors=tuple(map(known, timeline.tensors)))


def as_sparse(before: Timeline, plan: Plan, timeline: Timeline) -> bool:
    """Whether compressed tensors have about the size that was planned."""
    pairs = ((before.tensors[m.tensor], timeline.tensors[m.tensor]) for m in plan.moves if m.compressed)
    return all(abs(old.density - now.density) <= _SAME_DENSITY for old, now in pairs)


def same_times(old: tuple[float, float] | None, new: tuple[float, float] | None) -> bool:
    if old is None or new is None:
        return new is None
    return all(abs(a - b) <= _SAME_SECONDS * max(a, b) for a, b in zip(old, new, strict=True))


def close_rates(old: Link, new: Link) -> bool:
    pairs = ((old.d2h, new.d2h), (old.h2d, new.h2d))
    return all(abs(a - b) <= _SAME_RATE * max(a, b) for a, b in pairs)


def without_hooks(timeline: Timeline, plan: Plan, first: Sequence[FirstSave]) -> tuple[int, int, int]:
    """What the plan says of the tensors behind its last move: after how many tensors no hooks are needed, the reads of
    those behind, and their bytes. Zeros where hooks have to stay: what has none must be read first, before anything
    comes back, so that the operations that follow are known. What moves and is saved again needs them then, too, or it
    would stay on its device."""
    tensors, end = timeline.tensors, len(timeline.seconds) - 1
    least = max((max(m.tensor, first[m.tensor].again) for m in plan.moves), default=0) + 1
    back = min((m.prefetch for m in plan.moves), default=end)
    # A tensor that nobody read counts to the end.
    unread = [t.first_backward >= end for t in tensors]
    read = sorted((i for i in range(len(tensors)) if not unread[i]), key=lambda i: tensors[i].first_backward)
    found, behind, lowest = (0, 0, 0), 0, len(tensors)
    for reads, i in enumerate(read, 1):
        if timeline.forward + reads > back or i < least:
            break
        behind += sum(not u for u in unread[i:lowest]) if i < lowest else 0
        lowest = min(lowest, i)
        if behind == reads:  # all of them, and no other
            found = lowest, reads, sum(t.bytes for t in tensors[lowest:])
    return found
