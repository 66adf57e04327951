"""What an offload object learns of a thread's steps, and the plans that it makes from that: beside the step, which
waits for none without a budget, and with one for the first plan alone.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from .. import _C
from .pace import SHARES, Pace
from .policy import Link, Plan, Timeline, plan_movable, simulate
from .timelines import (
    FirstSave,
    as_sparse,
    at_pace,
    close_rates,
    first_saves,
    known_densities,
    same_times,
    timeline_of,
    with_densities,
    without_hooks,
    worth_compressing,
)

_T = TypeVar("_T")
_SLOWDOWN = 0.01
"""Without a budget: share of a step that the codec may take, at the rate that it has alone."""
_BESIDE = 0.75
"""Least share of a tensor's time on the bus that compression leaves beside compute: the codec's kernels wait for free
SMs."""
_PACED = 2
"""Uses behind one that was timed in which only forward and backward are timed, as a whole. Events around every
operation of a deep net can make the step host-bound: then they seem so long that nothing would hide behind them in the
next one, and tensors would come back too late."""
_PATIENCE = 4
"""Uses in a row whose times are ignored because they waited for host memory."""
_RESTS, _LONG_RESTS = 3, 19
"""How much longer than it pinned host memory a thread rests, while the driver, which others need, is free: where hooks
alone cost the step nothing, so that its host is ahead of the device, and where they do."""
_NOTHING = 0.01
"""Share of a step, in which these take no time."""
_NAP = 0.05
"""Seconds in which a thread at rest looks whether it is still wanted."""
_PENDING = 8
"""Most finished uses that are kept until their device has run them."""
MOST = 2**61
"""Most bytes that the tracker can count."""


@dataclass
class Planned:
    """A timeline of one device and its plan."""

    timeline: Timeline
    signature: tuple
    """Identifies the order and sizes of saves and reads: the plan holds for uses with the same signature."""
    seconds: tuple[float, float] | None
    """Of the forward, of the backward."""
    link: Link
    plan: Plan
    transfer_plan: Any
    known: tuple[bool, ...] = ()
    """Whether each tensor's density is known."""
    detailed: bool = True
    """Whether every operation was timed."""
    share: float = SHARES[0]
    """Of the bus, that the plan may use."""
    paced: bool = False
    """Whether the operations are scaled to forward and backward times from a use that timed only these."""


@dataclass
class Memory:
    """What one thread has learnt. Dictionaries are keyed by device."""

    planned: dict[int, Planned] = field(default_factory=dict)
    pending: list[Entered] = field(default_factory=list)
    """Uses that no plan was made from yet, oldest first."""
    looked: int = 0
    """Uses in a row that matched the plan."""
    saves: int = 0
    """Most tensors that a use saved."""
    paces: int = 0
    """Uses whose forward and backward times are still to be taken."""
    cold: bool = True
    """Without a budget: whether the first use is still to be ignored."""
    counts_from: int | None = 0
    """Without a budget: the first tensor whose zeros are still to be counted, None if none is. The uses that count are
    not planned from: they have enough to do."""
    counting: list[Any] = field(default_factory=list)
    """Uses whose counts are still to come."""
    counted: dict[int, tuple[Timeline, tuple[bool, ...]]] = field(default_factory=dict)
    """A timeline with the densities that these counted, and which of them are known."""
    waiting: dict[int, tuple[Future, dict[str, Any]]] = field(default_factory=dict)
    """Plans in the making, and what is known about them."""
    pace: Pace = field(default_factory=Pace)
    device: int | None = None
    """The current CUDA device of the latest use."""
    slow: int = 0
    """Uses in a row that waited for the system to allocate host memory, so that their times mean little."""

    def try_again(self) -> None:
        """Where it has been aside for long: without the plans of before, whose host memory may be missing."""
        pace = self.pace.after()
        if pace is not self.pace:
            self.pace = pace
            self.planned.clear()
            self.waiting.clear()


@dataclass
class Entered:
    """One use and the plans that it was entered with."""

    use: Any
    plans: dict[int, Planned]
    memory: Memory


class Planner:
    """Makes the plans of one object, which its threads' :class:`Memory` holds.

    Args:
        engine: The object's.
        budget, compress, backend, keep_last: Its settings.
    """

    def __init__(self, engine: Any, budget: int | None, compress: str | None, backend: str, keep_last: int) -> None:
        self.engine = engine
        self._budget, self._compress, self._backend, self._keep_last = budget, compress, backend, keep_last
        # Whether the step's time decides how much moves, and whether anything does.
        self.yields = budget is None and backend != "reference"
        self.links: dict[int, Link] = {}
        self._closed = False

    def close(self) -> None:
        """Plans that are in the making end soon; what has moved stays valid."""
        self._closed = True
        self.engine.close()

    def plan(self, memory: Memory) -> None:
        """Plans from the latest finished use of this thread, preferably one that its device has completed; never waits
        for the device."""
        self._take_plans(memory)
        self._take_counts(memory)
        use, known = None, False
        for i in reversed(range(len(memory.pending))):
            if memory.pending[i].use.finished:
                known = memory.pending[i].use.completed
                if known or use is None:
                    use, keep = memory.pending[i].use, memory.pending[i + 1 :]
                if known:
                    memory.pending = keep
                    break
        del memory.pending[:-_PENDING]
        # Without times nothing hides.
        if use is None or (not known and (self.yields or (memory.planned and use.planned()))):
            return
        if use.unhooked:  # it has recorded a part
            memory.looked = memory.looked + 1 if use.planned() else 0
            return
        if memory.cold and self._budget is None and not self.yields:
            memory.cold = not known
            return  # a first step does much once, so that what hides behind it does not hide behind the next
        memory.slow = memory.slow + 1 if use.slow else 0
        if memory.planned and use.planned() and 0 < memory.slow <= _PATIENCE:
            return  # look again
        memory.looked = memory.looked + 1 if use.planned() else 0
        if use.timed:
            memory.paces = _PACED
        elif memory.planned and use.planned():
            if memory.paces == 0:
                return
            memory.paces -= 1
        self.plan_from(memory, use)

    def _take_plans(self, memory: Memory) -> None:
        """Those that are ready."""
        for device, (future, more) in list(memory.waiting.items()):
            if future.done():
                del memory.waiting[device]
                memory.planned[device] = replace(future.result(), **more)

    def _take_counts(self, memory: Memory) -> None:
        """Those that the device has written."""
        done = [use for use in memory.counting if use.finished and use.completed]
        for use in done:
            memory.counting.remove(use)
            for device, _, raw in use.timelines():
                found = timeline_of(raw), known_densities(raw)
                before = memory.counted.get(device)
                memory.counted[device] = found if before is None else with_densities(*found, *before)
        if done:  # plans were made without them
            memory.planned.clear()
            memory.waiting.clear()

    def plan_from(self, memory: Memory, use: Any) -> None:
        """Plans again for each device on which this use differs from the one planned with."""
        # Without a budget the plan models the codec's time itself; it is not the bus's.
        copied = use.copied(self._budget is not None)
        for device, budgeted, raw in use.timelines():
            timeline = timeline_of(raw)
            waiting = memory.waiting.get(device)
            if not budgeted or not timeline.tensors or (waiting and self.yields):
                continue
            first = first_saves(raw)
            signature = (
                timeline.forward,
                tuple(first),
                tuple((t.first_backward, t.last_backward) for t in timeline.tensors),
            )
            if waiting:
                if waiting[1]["signature"] == signature:
                    continue
                del memory.waiting[device]  # made for another step, it would replace this one's
            old = memory.planned.get(device)
            known = known_densities(raw)
            for before in (old and (old.timeline, old.known), memory.counted.get(device)):
                if before is not None:
                    timeline, known = with_densities(timeline, known, *before)
            link = self.link(device, *copied.get(device, (0, 0, 0, 0)))
            if link is None and not self.yields:
                link = self._measured(device)
            like = old if old is not None and old.signature == signature else None
            detailed, paced = use.timed, False
            if like is not None and like.detailed and like.seconds is not None:
                if not use.timed:
                    timeline = replace(timeline, seconds=at_pace(like.timeline, timeline))
                    detailed = paced = True
                elif like.paced:
                    timeline = replace(timeline, seconds=at_pace(timeline, like.timeline))
                    paced = True
            seconds = None
            if timeline.seconds[0] is not None:
                seconds = sum(timeline.seconds[: timeline.forward]), sum(timeline.seconds[timeline.forward :])
            if (
                like is None
                or not same_times(like.seconds, seconds)
                or not as_sparse(like.timeline, like.plan, timeline)
                or (link is not None and not close_rates(like.link, link))
                or (detailed and not like.detailed)
                or (memory.pace.share is not None and like.share != memory.pace.share)
            ):
                share = memory.pace.share or SHARES[-1]
                rests = _RESTS if (memory.pace.slowdown or 0.0) <= _NOTHING else _LONG_RESTS
                rest = functools.partial(self._rest, rests, memory)
                make = functools.partial(self._make, device, timeline, first, signature, seconds, link, share, rest)
                more = dict(signature=signature, known=known, detailed=detailed, paced=paced)
                if self.yields or like is not None:
                    if like is not None and like.share != share:  # which slows the step
                        del memory.planned[device]
                    memory.waiting[device] = in_background(make), more
                else:  # a step that no plan holds for: the next use has to meet the budget
                    memory.planned[device] = replace(make(), **more)
        self._take_plans(memory)

    def link(self, device: int, out_seconds: float, out_bytes: int, in_seconds: float, in_bytes: int) -> Link | None:
        """The rates that copies of a use reached, or that were known before; None where neither says anything."""
        # Small copies measure their latency.
        d2h, h2d = (
            bytes / seconds if bytes > 2**24 and seconds > 0 else None
            for seconds, bytes in ((out_seconds, out_bytes), (in_seconds, in_bytes))
        )
        known = self.links.get(device)
        if known is None and d2h and h2d:
            known = self._with_codec(device, Link())
        if known is not None:
            known = self.links[device] = replace(known, d2h=d2h or known.d2h, h2d=h2d or known.h2d)
        return known

    def _measured(self, device: int) -> Link:
        """Rates of copies that are made to measure them; the usual ones where that is not possible."""
        out, back = self.engine.rates(device) if device >= 0 else (0, 0)
        known = out > 0 and back > 0
        link = self._with_codec(device, Link(out, back) if known else Link())
        if known:  # else measured the next time
            self.links[device] = link
        return link

    def _with_codec(self, device: int, link: Link) -> Link:
        codec = self.engine.codec_rate(device) if device >= 0 else 0
        return replace(link, codec=codec) if codec else link

    def _make(
        self,
        device: int,
        timeline: Timeline,
        first: Sequence[FirstSave],
        signature: tuple,
        seconds: tuple[float, float] | None,
        link: Link | None,
        share: float,
        rest: Callable[[float], bool],
    ) -> Planned:
        """A plan for a device. Without a budget its host memory is there: a step that waited for the system would be
        several times as long."""
        made = self.planned(timeline, first, signature, seconds, link or self._measured(device), share)
        if self.yields:
            for bytes in self.engine.missing_host([first[move.tensor][:2] for move in made.plan.moves]):
                if not self.engine.add_host(device, bytes, rest):
                    break
        return made

    def _rest(self, times: int, memory: Memory, seconds: float) -> bool:
        """After so many seconds in which others may have waited; whether what is made for it is still wanted."""
        end = time.monotonic() + times * seconds
        while not self._closed and threading.main_thread().is_alive() and memory.pace.share is not None:
            left = end - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, _NAP))
        return False

    def planned(
        self,
        timeline: Timeline,
        first: Sequence[FirstSave],
        signature: tuple,
        seconds: tuple[float, float] | None,
        link: Link,
        share: float = SHARES[0],
    ) -> Planned:
        """A plan by the policy, for the tracker."""
        last = len(first) - self._keep_last
        moves_any = self._backend != "reference" or self._budget is not None
        movable = [moves_any and saved.may_move and i < last for i, saved in enumerate(first)]
        # Without a budget the codec may slow compute only a little, and here its rate is unknown.
        unknown = self._budget is None and self._compress == "auto" and math.isinf(link.codec)
        codec = None if unknown else self._compress
        made, seen, staging = self._made(timeline, movable, link, codec, share)
        if not made.met and codec == "auto":  # perhaps only because of the codec's own memory
            plain = self._made(timeline, movable, link, None, share)
            if plain[0].met:
                made, seen, staging = plain
        room = MOST if self._budget is None else self._budget
        if not made.met:
            # Running operations need each tensor, the one after it, and one in transfer beside them; of small ones, as
            # many as are on their way together out and back. Tensors come back as early as that allows.
            sizes = [t.bytes for t in timeline.tensors]
            least = max(sum(sizes[i : i + 3]) for i in range(len(sizes)))
            if self._backend == "copy":
                least = max(least, 2 * _C.offload.joint_bytes)
            room = max(room, staging + least)
            early = [replace(m, prefetch=timeline.forward) for m in made.moves]
            made = simulate(seen, early, room - staging, link=link)
        shares = {m.tensor: m.share if m.compressed else 0.0 for m in made.moves}
        tensors = [
            (saved.bytes, saved.itemsize, i in shares, shares.get(i, 0.0), seen.tensors[i].density)
            for i, saved in enumerate(first)
        ]
        back = [(m.tensor, m.prefetch) for m in made.moves]
        unhooked = without_hooks(timeline, made, first) if self.yields else (0, 0, 0)
        transfer_plan = _C.offload.TransferPlan(tensors, back, min(room, MOST), *unhooked)
        return Planned(timeline, signature, seconds, link, made, transfer_plan, share=share)

    def _made(
        self, timeline: Timeline, movable: Sequence[bool], link: Link, codec: str | None, share: float
    ) -> tuple[Plan, Timeline, int]:
        """The plan with that codec, the timeline that it was made for, and the codec's memory, taken off the budget."""
        seen = worth_compressing(timeline) if codec == "auto" else timeline
        staging = 0
        if codec is not None:
            sizes = [
                self.engine.staging(t.bytes, t.itemsize, t.density)
                for t, m in zip(seen.tensors, movable, strict=True)
                if m and (codec != "auto" or t.density < 1)
            ]
            staging = max(sizes, default=0)
        budget = None if self._budget is None else max(self._budget - staging, 0)
        if budget is None:
            # An explicitly chosen codec is used at any cost.
            costs = link.codec if codec == "auto" else math.inf
            link = Link(share * link.d2h, share * link.h2d, costs, _BESIDE if codec == "auto" else 0.0)
        compress = "auto" if codec is not None else None
        return plan_movable(seen, budget, link, compress, movable, _SLOWDOWN), seen, staging


def in_background(make: Callable[[], _T]) -> Future[_T]:
    """Runs on a thread of its own; searching, measuring and allocating hold no lock of Python's."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="weft-offload-plan").start()
    except RuntimeError:  # there are no more threads, as at the end of the process: this one waits
        run()
    return future
