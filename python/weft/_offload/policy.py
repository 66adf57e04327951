"""The policy: which saved tensors to move and when each comes back. Data and checks of csrc/offload/policy/policy.h."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from .. import _C
from .sizes import parse_bytes

_MOST = 2**62  # bytes of all tensors together, so that sums stay within 64 bits


@dataclass(frozen=True)
class Saved:
    """A tensor that the forward saves for the backward.

    Args:
        bytes: Its size.
        last_forward: Index of the last operation of the forward that uses it.
        first_backward: Index of the first operation of the backward that uses it.
        last_backward: Index of the last one; None: as ``first_backward``.
        density: Share of its elements that are not zero, 0 to 1.
        itemsize: Bytes of an element. Those of 2 and 4 can be compressed.
    """

    bytes: int
    last_forward: int
    first_backward: int
    last_backward: int | None = None
    density: float = 1.0
    itemsize: int = 4


@dataclass(frozen=True)
class Timeline:
    """The operations of a training step, one after another, and what it saves.

    Args:
        seconds: Run time of each operation; all numbers, or all None where they are not known.
        forward: How many of them, the first, are the forward.
        tensors: What is saved, :class:`Saved` each.
    """

    seconds: Sequence[float | None]
    forward: int
    tensors: Sequence[Saved]


@dataclass(frozen=True)
class Link:
    """Rates of the bus, and what the codec costs.

    Args:
        d2h: Bytes per second out to the host.
        h2d: Back.
        codec: Bytes per second that the codec reads and writes; as long as it does, compute stands still. Infinite:
            it takes no time.
        least: What is compressed takes at least this share of the time on the bus that it would take as it is, however
            few bytes it has: beside compute the codec's kernels wait for a place.
    """

    d2h: float = 50e9
    h2d: float = 50e9
    codec: float = math.inf
    least: float = 0.0


@dataclass(frozen=True)
class Move:
    """One tensor to move: its index in the timeline's tensors, the operation from which it may come back, whether it is
    compressed on its way, and the share of it that is, from its first element on."""

    tensor: int
    prefetch: int
    compressed: bool = False
    share: float = 1.0


@dataclass(frozen=True)
class Plan:
    """Moves and what the model predicts of them.

    Attributes:
        moves: In the order of the copies in.
        peak_bytes: Most bytes of saved tensors on the device at once.
        seconds: End of the last operation; None where run times are not known, as the stalls.
        forward_stall: Seconds of the forward in which no operation runs.
        backward_stall: The same of the backward.
        moved_bytes: Size of the moved tensors.
        sent_bytes: Their size on the bus, one way.
        met: Whether ``peak_bytes`` is within the budget.
        codec_seconds: That compute stands still for the codec, out and back; in none of the other times.
    """

    moves: tuple[Move, ...]
    peak_bytes: int
    seconds: float | None
    forward_stall: float | None
    backward_stall: float | None
    moved_bytes: int
    sent_bytes: int
    met: bool
    codec_seconds: float = 0.0


def plan(
    timeline: Timeline,
    budget: int | str | None = None,
    *,
    link: Link = Link(),
    compress: str | None = "auto",
    min_bytes: int | str = 0,
    keep_last: int = 0,
    slowdown: float = 0.0,
) -> Plan:
    """Chooses which tensors to move, and when each comes back, so that the step takes as little longer as possible.

    What fits moves nothing. With a budget the plan meets it where any choice does; where none does, all that may move
    moves. Without one it moves what hides: no operation waits, and every copy out ends within the forward. Each copy in
    is as late as it can be without a longer step. Where run times are not known it follows AutoVM's rule: the largest
    distance between the uses first, until every operation's working set fits; then every copy in as early as these
    allow.

    Args:
        timeline: The step.
        budget: Bytes that saved tensors may hold on the device at once, an int or a string like ``"4GB"``; None: move
            what hides.
        link: Rates of the bus.
        compress: ``"auto"``: compress what gets smaller (see :func:`simulate`); None: nothing. Without a budget, where
            the codec takes time (``link.codec``), ``"auto"`` compresses only as much, and tensors only in part, as lets
            tensors hide that would not as they are: the plan is the one that sends most bytes.
        min_bytes: Smaller tensors stay.
        keep_last: That many tensors stay, the last by (``last_forward``, index).
        slowdown: Share of all run times that the codec may take where there is no budget.

    Raises:
        TypeError: a budget or sizes that are neither an int nor a string.
        ValueError: a timeline, rate or size that makes no sense; the message names it.

    Source: AutoVM (Chen, 2020), chapter 3. Up to a dozen tensors that may move, the choice is the model's best; beyond,
    it is searched for, in time that does not depend on the machine, so that the same step gives the same plan.
    """
    _check(timeline, link)
    if compress not in ("auto", None):
        raise ValueError(f'plan: compress must be "auto" or None, got {compress!r}')
    if isinstance(keep_last, bool) or not isinstance(keep_last, int):
        raise TypeError(f"plan: keep_last must be an int, got {keep_last!r}")
    if keep_last < 0:
        raise ValueError(f"plan: keep_last must not be negative, got {keep_last}")
    if not 0 <= slowdown <= 1:
        raise ValueError(f"plan: slowdown must be between 0 and 1, got {slowdown!r}")
    limit = _budget(budget)
    least = parse_bytes("min_bytes", min_bytes)
    tensors = timeline.tensors
    order = sorted(range(len(tensors)), key=lambda i: (tensors[i].last_forward, i))
    last = set(order[max(len(order) - keep_last, 0) :])
    movable = [i not in last and t.bytes >= least for i, t in enumerate(tensors)]
    return plan_movable(timeline, limit, link, compress, movable, slowdown)


def plan_movable(
    timeline: Timeline,
    limit: int | None,
    link: Link,
    compress: str | None,
    movable: Sequence[bool],
    slowdown: float = 0.0,
) -> Plan:
    """:func:`plan` where the caller says of each tensor whether it may move; nothing is checked."""
    limit = _budget(limit)
    moves = _C.offload.plan(*_packed(timeline), limit, astuple(link), compress == "auto", list(movable), slowdown)
    return _predict(timeline, [Move(*move) for move in moves], limit, link)


def simulate(
    timeline: Timeline,
    moves: Iterable[Move],
    budget: int | str | None = None,
    *,
    link: Link = Link(),
) -> Plan:
    """Predicts a step with these moves.

    Operations run one after another, one copy out and one copy in beside them. Operation k starts when k - 1 has ended,
    the moved tensors with ``first_backward`` = k are back, and there is room for those with ``last_forward`` = k. A
    tensor counts from the start of ``last_forward`` to the end of ``last_backward``, a moved one not from the end of
    its copy out to the start of its copy in. Copies out go in order of (``last_forward``, index), after that operation;
    copies in in order of (``first_backward``, index), after operation ``prefetch`` - 1 and the tensor's copy out, and
    where there is room. Room: what counts plus what is new is at most the budget. At each instant what ends ends first,
    then an operation starts, then a copy out, then a copy in. Where nothing runs and nothing can start, the operation
    that lacks only room starts over the budget, else the first copy in.

    A compressed tensor of n elements is ``round(n * density) * itemsize + 4 * ceil(n / 32)`` bytes on the bus, where
    that is less than its size, for elements of 2 and 4 bytes. Where a share of it is compressed that are its first
    ``32 * floor(share * n / 32)`` elements. A copy takes the time of its bytes, or, of what is compressed, of
    ``link.least`` of those it had, if these are more. Compressing takes no time of the step: what it takes of compute
    is told beside it, twice the bytes that the codec reads and writes on the way out, at the rate ``link.codec``.

    Where run times are not known, ``peak_bytes`` is the largest working set: the tensors that count at an operation, a
    moved one at ``last_forward`` and from ``prefetch`` to ``last_backward``.

    Raises:
        TypeError: a budget that is neither an int nor a string.
        ValueError: a timeline, rate or move that makes no sense; the message names it.
    """
    _check(timeline, link)
    moves = list(moves)
    seen = set()
    for move in moves:
        if not 0 <= move.tensor < len(timeline.tensors):
            raise ValueError(f"simulate: {move} is of none of the {len(timeline.tensors)} tensors")
        if move.tensor in seen:
            raise ValueError(f"simulate: tensor {move.tensor} is moved twice")
        seen.add(move.tensor)
        first = timeline.tensors[move.tensor].first_backward
        if not timeline.forward <= move.prefetch <= first:
            raise ValueError(
                f"simulate: prefetch must lie between the end of the forward, {timeline.forward}, and first_backward, "
                f"{first}, got {move}"
            )
        if not 0 <= move.share <= 1:
            raise ValueError(f"simulate: share must be between 0 and 1, got {move}")
    return _predict(timeline, moves, _budget(budget), link)


def _predict(timeline: Timeline, moves: list[Move], limit: int | None, link: Link) -> Plan:
    peak, seconds, forward_stall, backward_stall, moved, sent, codec = _C.offload.simulate(
        *_packed(timeline), [(m.tensor, m.prefetch, m.compressed, m.share) for m in moves], limit, astuple(link)
    )
    times = (seconds, forward_stall, backward_stall) if _known(timeline) else (None, None, None)
    return Plan(tuple(moves), peak, *times, moved, sent, limit is None or peak <= limit, codec)


def _budget(budget: int | str | None) -> int | None:
    return None if budget is None else min(parse_bytes("budget", budget), _MOST)


def _known(timeline: Timeline) -> bool:
    return all(s is not None for s in timeline.seconds)


def _packed(timeline: Timeline) -> tuple:
    """The first arguments of the compiled functions."""
    tensors = [
        (
            t.bytes,
            t.last_forward,
            t.first_backward,
            t.first_backward if t.last_backward is None else t.last_backward,
            t.density,
            t.itemsize,
        )
        for t in timeline.tensors
    ]
    known = _known(timeline)
    return list(timeline.seconds) if known else [0.0] * len(timeline.seconds), known, timeline.forward, tensors


def _check(timeline: Timeline, link: Link) -> None:
    for name, rate in (("d2h", link.d2h), ("h2d", link.h2d), ("codec", link.codec)):
        if not rate > 0:
            raise ValueError(f"link: {name} must be positive, got {rate!r}")
    if not 0 <= link.least <= 1:
        raise ValueError(f"link: least must be between 0 and 1, got {link.least!r}")
    seconds, forward = timeline.seconds, timeline.forward
    unknown = sum(s is None for s in seconds)
    if unknown not in (0, len(seconds)):
        raise ValueError(f"timeline: seconds must be all numbers or all None, {unknown} of {len(seconds)} are None")
    for k, s in enumerate(seconds):
        if s is not None and not 0 <= s < math.inf:
            raise ValueError(f"timeline: seconds[{k}] must be a finite number, not negative, got {s!r}")
    if not 0 <= forward <= len(seconds):
        raise ValueError(f"timeline: forward must be between 0 and {len(seconds)}, the operations, got {forward!r}")
    for i, t in enumerate(timeline.tensors):
        end = len(seconds) - 1
        last = t.first_backward if t.last_backward is None else t.last_backward
        for holds, expected in (
            (t.bytes >= 0, "bytes must not be negative"),
            (t.itemsize >= 0, "itemsize must not be negative"),
            (0 <= t.density <= 1, "density must be between 0 and 1"),
            (0 <= t.last_forward < forward, f"last_forward must lie in the forward, 0 to {forward - 1}"),
            (forward <= t.first_backward <= end, f"first_backward must lie in the backward, {forward} to {end}"),
            (t.first_backward <= last <= end, f"last_backward must lie between first_backward and {end}"),
        ):
            if not holds:
                raise ValueError(f"timeline: tensor {i}: {expected}, got {t}")
    total = sum(t.bytes for t in timeline.tensors)
    if total > _MOST:
        raise ValueError(f"timeline: the tensors have {total} bytes, at most {_MOST} can be planned")
