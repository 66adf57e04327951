"""The class :class:`offload`: what Python has to do. What happens at every saved tensor is csrc/offload/ledger.h."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch

from .. import _C
from .managed import managed_pool
from .memory import host_memory
from .policy import Link, Plan, Saved, Timeline, plan_movable, simulate
from .report import OffloadReport, plot, report
from .sizes import parse_bytes

_COMPRESS = ("auto", "zvc", "rle", None)
_BACKENDS = ("copy", "managed", "reference")
_SAME_SECONDS = 0.1
"""Share by which a forward's or a backward's time may differ from the one that was planned with before the step is
planned again."""
_SAME_RATE = 0.25
_SAME_DENSITY = 0.02
_WORTH = 0.85
"""Share of a tensor's size that compressed it must stay below: the codec takes a little from compute."""
_SPARE = 0.97
"""Share of the bus that is planned with where nothing may wait for it: no step is quite like the one before."""
_SLOWDOWN = 0.01
"""Share of a step that the codec may take where there is no budget, at the rate that it has alone."""
_BESIDE = 0.75
"""Least share of its time on the bus that compressing a tensor leaves where there is compute beside it: the codec's
kernels wait for a place there."""
_LOOKS, _EVERY = 3, 32
"""Uses whose every operation is timed: the first, which warm up, and as many of so many after."""
_PACED = 2
"""Without a budget: uses after these whose forward and backward as a whole are timed. Marks around every operation of
a net of many take the host so long that the device waits for it, and behind that nothing hides."""
_PATIENCE = 4
"""Uses in a row that may wait for host memory before their times are taken as they are."""
_PENDING = 8
"""Finished uses that are kept until their device has run them."""
_MOST = 2**61
"""Bytes that the ledger can count to."""

_warned_without_cuda = False
_warning = threading.Lock()


@dataclass
class _Planned:
    """What was made of a timeline of one device."""

    timeline: Timeline
    signature: tuple
    """Of the saves and reads: the plan holds for a use in which they are the same."""
    seconds: tuple[float, float] | None
    """Of the forward and of the backward."""
    link: Link
    plan: Plan
    schedule: Any
    known: tuple[bool, ...] = ()
    """Of each tensor, whether its density is."""
    detailed: bool = True
    """Whether every operation was timed."""
    paced: bool = False
    """Whether forward and backward as a whole take what they took in a use in which not every operation was timed."""


@dataclass
class _Memory:
    """What one thread has learnt, device to plan."""

    planned: dict[int, _Planned] = field(default_factory=dict)
    pending: list[_Entered] = field(default_factory=list)
    """Uses that are not planned from yet, oldest first."""
    looked: int = 0
    """Uses in a row that the plan was right for."""
    paces: int = 0
    """Uses that are still to be asked how long their forward and their backward took as a whole."""
    cold: bool = True
    """Without a budget: whether the first use is still to be let pass."""
    first: Any | None = None
    """Without a budget: the first use, until what it counted is known."""
    counted: dict[int, tuple[Timeline, tuple[bool, ...]]] = field(default_factory=dict)
    """Device to timeline, with the densities that the first use counted, and of which tensors it did."""
    entered: bool = False
    """Whether there was a first use, one that saved something."""
    slow: int = 0
    """Uses in a row whose times say little, because they waited for the system to give host memory."""


@dataclass
class _Entered:
    """One use, with the plans that it was entered with."""

    use: Any
    plans: dict[int, _Planned]


class offload:
    """Moves what the forward saves for the backward to host memory, and back in time. Gradients stay the same bits.

    ``with offload("4GB") as off: loss = model(x)``, then ``loss.backward()`` inside or outside of the block. One *use*
    is one block together with every backward of what was computed in it. The first use of a thread records when what is
    saved and read; the following ones, without a budget those after the second, move by a plan for this timeline, and
    record on. Reusable, by several threads at once; not re-entrant. Objects nest: as with torch's saved-tensor hooks,
    the innermost one sees a tensor.

    Args:
        budget: Device memory, per device, that tensors saved for backward may hold at any moment: bytes, or a string
            like ``"4GB"`` or ``"1.5 GiB"``. 0 moves all that may move. None moves what hides behind compute, and
            nothing else. Parameters, gradients, workspaces and what the program holds itself do not count.
        compress: ``"auto"``: zero-value compression where the measured density makes the transfer shorter; without a
            budget, where little may be taken from compute, only of parts of tensors that hide then and would not as
            they are; ``"zvc"``, ``"rle"``: that codec for every float32, float16 and bfloat16 tensor; None: never.
        backend: ``"copy"``: pinned host memory and a stream per direction; ``"managed"``: managed memory that is
            prefetched, for devices that share memory with the host; ``"reference"``: plain torch, synchronous, on every
            device; on the CPU it copies to a second place in host memory.
        min_bytes: Smaller tensors stay.
        keep_last: That many of the last saved tensors of a use stay.
        pool_limit: Most host memory that the object ever holds; None is half of the machine's memory, or of what its
            control groups leave the process of it.

    Never moved: parameters, other leaves that require grad, and their views, CPU tensors (except with
    ``"reference"``), what is not a plain strided tensor, and what is saved while a stream is captured. A tensor that
    was changed in place after it was saved raises torch's own error in the backward; one that has moved cannot be read
    while its stream is captured, which is a RuntimeError.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a size that is negative or unreadable, an unknown ``compress`` or ``backend``.

    Sources: vDNN (Rhu et al., MICRO 2016); AutoVM (Chen, 2020); cDMA (Rhu et al., HPCA 2018).
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        compress: str | None = "auto",
        backend: str = "copy",
        min_bytes: int | str = "1MiB",
        keep_last: int = 1,
        pool_limit: int | str | None = None,
    ) -> None:
        self._budget = None if budget is None else parse_bytes("budget", budget)
        _check_choice("compress", compress, _COMPRESS)
        _check_choice("backend", backend, _BACKENDS)
        self._compress, self._backend = compress, backend
        self._min_bytes = parse_bytes("min_bytes", min_bytes)
        if isinstance(keep_last, bool) or not isinstance(keep_last, int):
            raise TypeError(f"keep_last must be an int, got {keep_last!r}")
        if keep_last < 0:
            raise ValueError(f"keep_last must not be negative, got {keep_last}")
        self._keep_last = keep_last
        self._pool_limit = host_memory() // 2 if pool_limit is None else parse_bytes("pool_limit", pool_limit)
        self._engine = _C.OffloadEngine(
            backend,
            None if self._budget is None else min(self._budget, _MOST),
            compress,
            min(self._min_bytes, _MOST),
            min(keep_last, _MOST),
            min(self._pool_limit, _MOST),
        )
        # A closed engine outlives the object as long as a graph needs it.
        weakref.finalize(self, self._engine.close).atexit = False
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._closed = False
        self._uses = 0
        self._latest: _Entered | None = None
        self._unfinished: list[Any] = []
        self._finished: Any | None = None
        self._links: dict[int, Link] = {}
        self._told_pool = False

    @property
    def budget(self) -> int | None:
        """Bytes, or None."""
        return self._budget

    @property
    def timeline(self) -> Timeline | None:
        """Of the latest use whose tensors have all been read or dropped; None before one. Its operations are the
        intervals between saves and reads. The forward ends at the first read; what is saved after it is left out."""
        with self._lock:
            self._settle()
            if self._finished is None:
                return None
            found = [(budgeted, _timeline(raw)) for _, budgeted, raw in self._finished.timelines()]
            # Those of devices, if there are any; of several, the one that saved most.
            found = [t for budgeted, t in found if budgeted] or [t for _, t in found]
            return max(found, key=lambda t: sum(s.bytes for s in t.tensors), default=Timeline((), 0, ()))

    def __enter__(self) -> offload:
        if self._closed:
            raise RuntimeError("offload: this object is closed")
        if getattr(self._thread, "entered", None) is not None:
            raise RuntimeError("offload: this thread is inside this object already; it is not re-entrant")
        _prepare(self._backend)
        with self._lock:
            self._settle()
            memory: _Memory | None = getattr(self._thread, "memory", None)
            if memory is None:
                memory = self._thread.memory = _Memory()
            on_cuda = torch.cuda.is_available()
            # While a stream is captured nothing is measured, planned, moved or learnt from.
            capturing = on_cuda and torch.cuda.is_current_stream_capturing()
            may_move = not capturing and (on_cuda or self._backend == "reference")
            if may_move:
                self._plan(memory)
            plans = dict(memory.planned)
            # Taking the time of every operation takes time: at first, and now and then.
            timed = not plans or memory.looked <= _LOOKS or memory.looked % _EVERY < _LOOKS
            # So does counting zeros, which without a budget is left to the use that is not planned from anyway.
            counts = self._budget is not None or (may_move and not memory.entered and self._backend == "copy")
            use = self._engine.use({device: planned.schedule for device, planned in plans.items()}, timed, counts)
            managed = on_cuda and self._backend == "managed" and not capturing
            pool = managed_pool() if managed else contextlib.nullcontext()
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*use.hooks))  # or torch refuses
                stack.enter_context(pool)
                self._thread.entered = stack.pop_all()
            self._latest = self._thread.latest = _Entered(use, plans)
            self._unfinished.append(use)
            if may_move:
                memory.pending.append(self._latest)
                if not memory.entered:
                    memory.entered, memory.first = True, use if self._budget is None else None
            self._uses += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if getattr(self._thread, "entered", None) is None:
            raise RuntimeError("offload: this thread is not inside this object; leave it where it was entered")
        entered, latest = self._thread.entered, self._thread.latest
        self._thread.entered = self._thread.latest = None
        entered.__exit__(kind, error, trace)
        latest.use.exit()
        self._tell_pool()

    def report(self) -> OffloadReport:
        """What the latest use did, as far as it has gone: the one entered last, in any thread."""
        with self._lock:
            self._engine.poll()
            latest = self._latest
            settings = dict(backend=self._backend, compress=self._compress, budget_bytes=self._budget, uses=self._uses)
            plans = None if latest is None else {d: p.plan for d, p in latest.plans.items()}
            return report(settings, self._engine, None if latest is None else latest.use, plans)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes the lanes (compute, out, back) and the memory curve of the latest use to a picture, the format by the
        suffix of `path`.

        Raises:
            RuntimeError: before any use.
            ImportError: matplotlib is missing.
        """
        if self._latest is None:
            raise RuntimeError("offload: nothing to plot before the first use")
        self._engine.poll()
        plot(path, self._latest.use, self._budget)

    def release(self) -> int:
        """Gives free host buffers back to the system; those in use stay. Returns their bytes."""
        with self._lock:
            self._engine.poll()
            return self._engine.release()

    def close(self) -> None:
        """Ends the object: entering it again is a RuntimeError. What was saved before stays valid, and its memory goes
        with its graph."""
        with self._lock:
            self._closed = True
            self._engine.poll()
            self._engine.close()

    def _settle(self) -> None:
        """Sorts out which uses have finished, of those in the order they were entered in."""
        for use in [u for u in self._unfinished if u.finished]:
            self._unfinished.remove(use)
            self._finished = use

    def _plan(self, memory: _Memory) -> None:
        """Plans from the latest use of this thread that has finished, and on its device too where that can be seen
        without waiting for it."""
        use, known = None, False
        for i in reversed(range(len(memory.pending))):
            if memory.pending[i].use.finished:
                known = memory.pending[i].use.passed
                if known or use is None:
                    use, keep = memory.pending[i].use, memory.pending[i + 1 :]
                if known:
                    memory.pending = keep
                    break
        del memory.pending[:-_PENDING]
        if use is None or (not known and memory.planned and use.planned()):
            return
        if memory.cold and self._budget is None:
            memory.cold = not known
            return  # what hides behind a first step, with all that is done once, does not hide behind the next
        if use is memory.first:
            return  # which took the time to count
        if memory.first is not None and memory.first.finished and memory.first.passed:
            timelines = [(device, _timeline(raw), _known(raw)) for device, _, raw in memory.first.timelines()]
            memory.counted = {device: (timeline, known) for device, timeline, known in timelines}
            memory.entered = any(timeline.tensors for _, timeline, _ in timelines)
            memory.first = None
            memory.planned.clear()  # what was made without
            if not memory.entered:
                return  # and let the next use count
        memory.slow = memory.slow + 1 if use.slow else 0
        if memory.planned and use.planned() and 0 < memory.slow <= _PATIENCE:
            return  # and look again
        memory.looked = memory.looked + 1 if use.planned() else 0
        if use.timed:
            memory.paces = _PACED if self._budget is None else 0
        elif memory.planned and use.planned():
            if memory.paces == 0:
                return
            memory.paces -= 1
        self._plan_from(memory, use)

    def _plan_from(self, memory: _Memory, use: Any) -> None:
        """Plans anew for each device on which this use does not agree with what was planned with."""
        rates = {book["device"]: book["copies"] for book in use.books()}
        for device, budgeted, raw in use.timelines():
            timeline = _timeline(raw)
            if not budgeted or not timeline.tensors:
                continue
            old = memory.planned.get(device)
            known = _known(raw)
            for before in (old and (old.timeline, old.known), memory.counted.get(device)):
                if before is not None:
                    timeline, known = _with_densities(timeline, known, *before)
            first = [entry[:3] for entry in raw[4]]
            link = self._link(device, rates.get(f"cuda:{device}", []))
            signature = (
                timeline.forward,
                tuple(first),
                tuple((t.first_backward, t.last_backward) for t in timeline.tensors),
            )
            like = old if old is not None and old.signature == signature else None
            detailed, paced = use.timed, False
            if self._budget is None and like is not None and like.detailed and like.seconds is not None:
                if not use.timed:
                    timeline = replace(timeline, seconds=_at_pace(like.timeline, timeline))
                    detailed = paced = True
                elif like.paced:
                    timeline = replace(timeline, seconds=_at_pace(timeline, like.timeline))
                    paced = True
            seconds = None
            if timeline.seconds[0] is not None:
                seconds = sum(timeline.seconds[: timeline.forward]), sum(timeline.seconds[timeline.forward :])
            if (
                like is None
                or not _same(like.seconds, seconds)
                or not _as_sparse(like, timeline)
                or not _close(like.link, link)
                or (detailed and not like.detailed)
            ):
                planned = self._planned(timeline, first, signature, seconds, link)
                memory.planned[device] = replace(planned, known=known, detailed=detailed, paced=paced)

    def _link(self, device: int, copies: Sequence[tuple]) -> Link:
        """The rates that the copies of a use reached; before there were any, measured."""
        link = self._links.get(device)
        known = link is not None
        if link is None:
            out, back = self._engine.rates(device) if device >= 0 else (0, 0)
            known = out > 0 and back > 0
            link = Link(out, back) if known else Link()
            if codec := self._engine.codec_rate(device) if device >= 0 else 0:
                link = replace(link, codec=codec)
        found = {}
        # Without a budget the time that compressing takes beside compute is planned with; it is not the bus's.
        copies = [c[:4] for c in copies if self._budget is not None or not c[4]]
        for way in (True, False):
            seconds = sum(end - begin for out, begin, end, _ in copies if out == way)
            sent = sum(sent for out, _, _, sent in copies if out == way)
            # Small copies tell about their start.
            found[way] = sent / seconds if sent > 2**24 and seconds > 0 else None
        link = replace(link, d2h=found[True] or link.d2h, h2d=found[False] or link.h2d)
        if known or all(found.values()):  # else it is measured the next time
            self._links[device] = link
        return link

    def _planned(
        self,
        timeline: Timeline,
        first: Sequence[tuple],
        signature: tuple,
        seconds: tuple[float, float] | None,
        link: Link,
    ) -> _Planned:
        last = len(first) - self._keep_last
        moves_any = self._backend != "reference" or self._budget is not None
        movable = [moves_any and may_move and i < last for i, (_, _, may_move) in enumerate(first)]
        # Without a budget little may be taken from compute, as the codec's kernels do: nobody knows how much.
        unknown = self._budget is None and self._compress == "auto" and math.isinf(link.codec)
        codec = None if unknown else self._compress
        made, seen, staging = self._made(timeline, movable, link, codec)
        if not made.met and codec == "auto":  # the codec's own memory may be what is too much
            plain = self._made(timeline, movable, link, None)
            if plain[0].met:
                made, seen, staging = plain
        room = _MOST if self._budget is None else self._budget
        if not made.met:
            # What the running operations need: each tensor, the one after it, and one on its way beside them. Back as
            # early as that allows.
            sizes = [t.bytes for t in timeline.tensors]
            room = max(room, staging + max(sum(sizes[i : i + 3]) for i in range(len(sizes))))
            early = [replace(m, prefetch=timeline.forward) for m in made.moves]
            made = simulate(seen, early, room - staging, link=link)
        shares = {m.tensor: m.share if m.compressed else 0.0 for m in made.moves}
        tensors = [
            (bytes, itemsize, i in shares, shares.get(i, 0.0), seen.tensors[i].density)
            for i, (bytes, itemsize, _) in enumerate(first)
        ]
        back = [(m.tensor, m.prefetch) for m in made.moves]
        scheduled = _C.OffloadSchedule(tensors, back, min(room, _MOST))
        return _Planned(timeline, signature, seconds, link, made, scheduled)

    def _made(
        self, timeline: Timeline, movable: Sequence[bool], link: Link, codec: str | None
    ) -> tuple[Plan, Timeline, int]:
        """A plan with that codec, the timeline as it sees it, and the codec's memory, which is taken off the budget."""
        seen = _worth_compressing(timeline) if codec == "auto" else timeline
        staging = 0
        if codec is not None:
            sizes = [
                self._engine.staging(t.bytes, t.itemsize, t.density)
                for t, m in zip(seen.tensors, movable, strict=True)
                if m and (codec != "auto" or t.density < 1)
            ]
            staging = max(sizes, default=0)
        budget = None if self._budget is None else max(self._budget - staging, 0)
        if budget is None:
            # Whoever asks for a codec gets it, whatever it takes.
            costs = link.codec if codec == "auto" else math.inf
            link = Link(_SPARE * link.d2h, _SPARE * link.h2d, costs, _BESIDE if codec == "auto" else 0.0)
        compress = "auto" if codec is not None else None
        return plan_movable(seen, budget, link, compress, movable, _SLOWDOWN), seen, staging

    def _tell_pool(self) -> None:
        if not self._engine.pool_failed or self._told_pool:
            return
        self._told_pool = True
        warnings.warn(
            f"offload: no host memory for a saved tensor within pool_limit ({self._pool_limit} bytes, "
            f"{self._engine.host_bytes} held) or the system refuses it; such tensors stay on their device",
            RuntimeWarning,
            stacklevel=3,
        )


def _timeline(raw: tuple) -> Timeline:
    operations, seconds, forward, tensors, _ = raw
    return Timeline(
        tuple(seconds) if seconds is not None else (None,) * operations, forward, tuple(Saved(*t) for t in tensors)
    )


def _known(raw: tuple) -> tuple[bool, ...]:
    """Of which tensors the use knows the density."""
    return tuple(entry[3] for entry in raw[4])


def _at_pace(timed: Timeline, whole: Timeline) -> tuple[float | None, ...]:
    """Seconds of the operations of `timed`, where each phase takes as long as in `whole`: that may know the time of
    several operations as that of their last one, and nothing of those after the last that it knows."""
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


def _with_densities(
    timeline: Timeline, known: tuple[bool, ...], before: Timeline, before_known: tuple[bool, ...]
) -> tuple[Timeline, tuple[bool, ...]]:
    """What this use has not looked at has the density that was known before, if it was."""
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


def _worth_compressing(timeline: Timeline) -> Timeline:
    """The timeline, with nothing said about the zeros of tensors that a copy brings out whole in the time in which the
    codec's kernel brings them out compressed."""

    def known(t: Saved) -> Saved:
        n = t.bytes // max(t.itemsize, 1)
        return t if n * t.density * t.itemsize + n / 8 < _WORTH * t.bytes else replace(t, density=1.0)

    return replace(timeline, tensors=tuple(map(known, timeline.tensors)))


def _as_sparse(old: _Planned, timeline: Timeline) -> bool:
    """Whether what comes back compressed is about as large as was planned with."""
    pairs = ((old.timeline.tensors[m.tensor], timeline.tensors[m.tensor]) for m in old.plan.moves if m.compressed)
    return all(abs(before.density - now.density) <= _SAME_DENSITY for before, now in pairs)


def _same(old: tuple[float, float] | None, new: tuple[float, float] | None) -> bool:
    if old is None or new is None:
        return new is None
    return all(abs(a - b) <= _SAME_SECONDS * max(a, b) for a, b in zip(old, new, strict=True))


def _close(old: Link, new: Link) -> bool:
    pairs = ((old.d2h, new.d2h), (old.h2d, new.h2d))
    return all(abs(a - b) <= _SAME_RATE * max(a, b) for a, b in pairs)


def _check_choice(name: str, value: Any, choices: tuple) -> None:
    if not isinstance(value, str) and not (value is None and None in choices):
        raise TypeError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _prepare(backend: str) -> None:
    """What a backend asks of the machine when it is entered."""
    global _warned_without_cuda
    if backend == "managed" and torch.cuda.is_available():
        device = torch.cuda.current_device()
        if not _C.offload_has_managed(device):
            name = torch.cuda.get_device_name(device)
            raise RuntimeError(
                f'offload: backend "managed" needs concurrent managed access, which {name} does not have'
            )
    if backend == "reference" or torch.cuda.is_available():
        return
    with _warning:
        told, _warned_without_cuda = _warned_without_cuda, True
    if not told:
        warnings.warn(
            f"offload: there is no CUDA device here, so backend {backend!r} moves nothing: tensors are in host memory",
            UserWarning,
            stacklevel=3,
        )
