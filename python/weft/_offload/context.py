"""The class :class:`offload`: settings, uses and plans. Saved tensors are handled in csrc/offload/tracker/tracker.h."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from .. import _C
from .._base.arguments import constructor
from .managed import managed_pool
from .memory import host_memory
from .pace import SHARES, DeviceMoment, Pace
from .policy import Link, Plan, Saved, Timeline, plan_movable, simulate
from .report import OffloadReport, plot, report
from .sizes import parse_bytes

_P = ParamSpec("_P")
_T = TypeVar("_T")
_COMPRESS = ("auto", "zvc", "rle", None)
_BACKENDS = ("copy", "managed", "reference")
_SAME_SECONDS = 0.1
"""Share by which the time of a forward or backward may differ from the planned one before the step is planned again."""
_SAME_RATE = 0.25
_SAME_DENSITY = 0.02
_WORTH = 0.85
"""A tensor is compressed if that makes it smaller than this share of its size: the codec slows compute a little."""
_SLOWDOWN = 0.01
"""Without a budget: share of a step that the codec may take, at the rate that it has alone."""
_BESIDE = 0.75
"""Least share of a tensor's time on the bus that compression leaves beside compute: the codec's kernels wait for free
SMs."""
_LOOKS, _EVERY = 3, 32
"""Every operation is timed in the first `_LOOKS` uses, and later in `_LOOKS` of every `_EVERY`."""
_PACED = 2
"""Without a budget: following uses in which only forward and backward are timed as a whole. Events around every
operation of a deep net can make the step host-bound, where nothing hides."""
_WAIT = 0.005
"""Without a budget: seconds of a use that planning may take of it, waiting for a plan included; a thread goes on."""
_FIRST_WAIT, _FIRST_EFFORT = 0.02, 0.05
"""The same for a first plan, and the share of the usual work that it takes: a full one follows."""
_PATIENCE = 4
"""Uses in a row whose times are ignored because they waited for host memory."""
_PENDING = 8
"""Most finished uses that are kept until their device has run them."""
_MOST = 2**61
"""Most bytes that the tracker can count."""

_warned_without_cuda = False
_warning = threading.Lock()


@dataclass
class _Planned:
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
    effort: float = 1.0
    """Of the search, as a share of the usual."""
    paced: bool = False
    """Whether the operations are scaled to forward and backward times from a use that timed only these."""


@dataclass
class _Memory:
    """What one thread has learnt. Dictionaries are keyed by device."""

    planned: dict[int, _Planned] = field(default_factory=dict)
    pending: list[_Entered] = field(default_factory=list)
    """Uses that no plan was made from yet, oldest first."""
    looked: int = 0
    """Uses in a row that matched the plan."""
    paces: int = 0
    """Uses whose forward and backward times are still to be taken."""
    cold: bool = True
    """Without a budget: whether the first use is still to be ignored."""
    first: Any | None = None
    """Without a budget: the first use, until its counts are known."""
    counted: dict[int, tuple[Timeline, tuple[bool, ...]]] = field(default_factory=dict)
    """The first use's timeline with the densities that it counted, and which of them are known."""
    entered: bool = False
    """Whether a use has saved something."""
    waiting: dict[int, tuple[Future, dict[str, Any]]] = field(default_factory=dict)
    """Plans in the making, and what is known about them."""
    pace: Pace = field(default_factory=Pace)
    device: int | None = None
    """The current CUDA device of the latest use."""
    slow: int = 0
    """Uses in a row that waited for the system to allocate host memory, so that their times mean little."""


@dataclass
class _Entered:
    """One use and the plans that it was entered with."""

    use: Any
    plans: dict[int, _Planned]
    memory: _Memory


class offload:
    """Moves tensors saved for the backward to host memory, and back in time. Gradients keep the same bits.

    ``with offload("4GB") as off: loss = model(x)``, then ``loss.backward()`` inside or outside of the block. One *use*
    is one block together with every backward of what was computed in it. The first use of a thread records when tensors
    are saved and read. From the second use on, or the third without a budget, a plan for this timeline decides what
    moves; every use keeps recording. Reusable, by several threads at once; not re-entrant. Objects nest: the innermost
    one sees a tensor, as with torch's saved-tensor hooks. As a decorator, ``@weft.offload("4GB")``, it makes every call
    of a function such a block. Copies and pickles of an object have its settings and have learnt nothing.

    Args:
        budget: Device memory, per device, that tensors saved for backward may hold at any moment: bytes, or a string
            like ``"4GB"``, ``"4G"`` or ``"1.5 GiB"``. 0 moves all that may move. None moves only what hides behind
            compute, and steps aside where that slows the step by more than 2%. Parameters, gradients, workspaces and
            tensors that the program itself holds do not count.
        compress: ``"auto"``: zero-value compression where the measured density makes the transfer shorter; without a
            budget only for tensors that hide compressed and would not otherwise, because it slows compute a little.
            ``"zvc"``, ``"rle"``: that codec for every float32, float16 and bfloat16 tensor. None: never.
        backend: ``"copy"``: pinned host memory and a stream per direction; ``"managed"``: managed memory that is
            prefetched, for devices that share memory with the host; ``"reference"``: plain torch, synchronous, on every
            device; on the CPU it copies to a second place in host memory.
        min_bytes: Smaller tensors stay.
        keep_last: That many of the last saved tensors of a use stay.
        pool_limit: Most host memory that the object ever holds; None is half of the machine's memory, or of the limit
            that control groups set for the process.

    Never moved: parameters, other leaves that require grad, and their views; CPU tensors (except with ``"reference"``);
    tensors that are not plain strided; tensors saved while a stream is captured. After an in-place change of a saved
    tensor the backward raises torch's own error. Reading a moved tensor while its stream is captured is a RuntimeError.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a size that is negative or unreadable, an unknown ``compress`` or ``backend``.

    Sources: vDNN (Rhu et al., MICRO 2016); AutoVM (Chen, 2020); cDMA (Rhu et al., HPCA 2018).
    """

    @constructor
    def __init__(
        self,
        budget: float | str | None = None,
        *,
        compress: str | None = "auto",
        backend: str = "copy",
        min_bytes: float | str = "1MiB",
        keep_last: int = 1,
        pool_limit: float | str | None = None,
    ) -> None:
        self._arguments = dict(
            budget=budget,
            compress=compress,
            backend=backend,
            min_bytes=min_bytes,
            keep_last=keep_last,
            pool_limit=pool_limit,
        )
        if callable(budget):
            raise TypeError(
                f"offload: budget comes first, got {budget!r}; as a decorator with parentheses: @weft.offload()"
            )
        self._budget = None if budget is None else parse_bytes("offload: budget", budget)
        _check_choice("compress", compress, _COMPRESS)
        _check_choice("backend", backend, _BACKENDS)
        self._compress, self._backend = compress, backend
        self._min_bytes = parse_bytes("offload: min_bytes", min_bytes)
        if isinstance(keep_last, bool) or not isinstance(keep_last, int):
            raise TypeError(f"offload: keep_last must be an int, got {keep_last!r}")
        if keep_last < 0:
            raise ValueError(f"offload: keep_last must not be negative, got {keep_last}")
        self._keep_last = keep_last
        # Whether the step's time decides how much moves, and whether anything does.
        self._yields = self._budget is None and backend != "reference"
        self._pool_limit = host_memory() // 2 if pool_limit is None else parse_bytes("offload: pool_limit", pool_limit)
        self._engine = _C.offload.Engine(
            backend,
            None if self._budget is None else min(self._budget, _MOST),
            compress,
            min(self._min_bytes, _MOST),
            min(keep_last, _MOST),
            min(self._pool_limit, _MOST),
        )
        # The closed engine outlives the object while a graph needs it.
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

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """As a decorator: every call of the function is a ``with`` block of this object.

        Raises:
            TypeError: not a function, or one whose body runs after the call, as of a coroutine or a generator.
        """
        delayed = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if not callable(function) or isinstance(function, type) or any(check(function) for check in delayed):
            raise TypeError(f"offload: decorates functions whose body runs when they are called, got {function!r}")

        @functools.wraps(function)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self:
                return function(*args, **kwargs)

        return inside

    def __reduce__(self) -> tuple:
        """A copy has the same settings, and has learnt nothing."""
        return _copied, (type(self), self._arguments, self._closed)

    def __repr__(self) -> str:
        defaults = inspect.signature(offload).parameters
        given = {name: value for name, value in self._arguments.items() if value != defaults[name].default}
        parts = [repr(given.pop("budget"))] if "budget" in given else []
        return f"{type(self).__name__}({', '.join([*parts, *(f'{name}={value!r}' for name, value in given.items())])})"

    @property
    def budget(self) -> int | None:
        """Bytes, or None."""
        return self._budget

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the latest use whose tensors have all been read or dropped; None before one. Its operations
        are the intervals between saves and reads. The forward ends at the first read; later saves are left out."""
        with self._lock:
            self._settle()
            if self._finished is None:
                return None
            found = [(budgeted, _timeline(raw)) for _, budgeted, raw in self._finished.timelines()]
            # A device's, if there is any; of several, the one that saved most.
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
            # While a stream is captured nothing is measured, planned or moved.
            capturing = on_cuda and torch.cuda.is_current_stream_capturing()
            may_move = not capturing and (on_cuda or self._backend == "reference")
            if may_move and memory.pace.share is not None:
                self._plan(memory)
            plans = dict(memory.planned)
            # Timing every operation costs time: done at first, and now and then.
            looks = 1 if self._yields else _LOOKS
            timed = not plans or memory.looked <= looks or memory.looked % _EVERY < looks
            if self._yields and may_move and not memory.entered:
                timed = False  # nothing is planned from a first use, which has enough to do
            if self._yields and not self._hooks(memory, may_move, timed):
                self._thread.entered, self._thread.latest = contextlib.ExitStack(), None
                self._uses += 1
                return self
            # So does counting zeros: without a budget only in the first use, whose times are not used; and so does
            # measuring the bus, which a plan would wait for later.
            counts = self._budget is not None or (may_move and not memory.entered and self._backend == "copy")
            if self._yields and may_move and not memory.entered:
                self._engine.rates(torch.cuda.current_device())
            use = self._engine.use({device: planned.transfer_plan for device, planned in plans.items()}, timed, counts)
            managed = on_cuda and self._backend == "managed" and not capturing
            pool = managed_pool() if managed else contextlib.nullcontext()
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*use.hooks))  # or torch refuses
                stack.enter_context(pool)
                self._thread.entered = stack.pop_all()
            self._latest = self._thread.latest = _Entered(use, plans, memory)
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
        if latest is not None:
            latest.use.exit()
            self._tell_pool()

    def report(self) -> OffloadReport:
        """On the latest use, the one entered last in any thread, as far as it has gone. Without a budget some uses have
        no hooks; the report is on the latest one with them."""
        with self._lock:
            self._engine.poll()
            latest = self._latest
            settings = dict(backend=self._backend, compress=self._compress, budget_bytes=self._budget, uses=self._uses)
            memory = None if latest is None else latest.memory
            settings["slowdown"] = None if memory is None else memory.pace.slowdown
            settings["stepped_aside"] = memory is not None and memory.pace.share is None
            plans = None if latest is None else {d: p.plan for d, p in latest.plans.items()}
            return report(settings, self._engine, None if latest is None else latest.use, plans)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots the latest use: rows of compute, copies out and copies back, and the memory curve. The suffix of `path`
        decides the format.

        Raises:
            RuntimeError: before any use.
            ImportError: matplotlib is missing.
        """
        if self._latest is None:
            raise RuntimeError("offload: nothing to plot before the first use")
        self._engine.poll()
        plot(path, self._latest.use, self._budget)

    def release(self) -> int:
        """Returns free host buffers to the system and their bytes to the caller; buffers in use stay."""
        with self._lock:
            self._engine.poll()
            return self._engine.release()

    def close(self) -> None:
        """Ends the object: entering it again is a RuntimeError. Tensors saved before stay valid; their memory goes with
        their graph."""
        with self._lock:
            self._closed = True
            self._engine.poll()
            self._engine.close()

    def _settle(self) -> None:
        """Finds the uses that have finished, in the order in which they were entered."""
        for use in [u for u in self._unfinished if u.finished]:
            self._unfinished.remove(use)
            self._finished = use

    def _hooks(self, memory: _Memory, may_move: bool, timed: bool) -> bool:
        """Without a budget: whether the use has hooks."""
        if memory.pace.share is None:
            return False
        if not may_move:
            memory.pace.pause()
            return True
        if memory.waiting and not memory.planned:
            memory.pace.pause()
            return False  # recording costs, and nothing can move yet
        device = torch.cuda.current_device()
        if memory.device != device:  # whose moments cannot be compared with those before
            memory.device = device
            memory.pace.pause()
        return memory.pace.enter(DeviceMoment(), bool(memory.planned) and not timed)

    def _take_plans(self, memory: _Memory, seconds: float) -> None:
        """The plans that are ready by then."""
        end = time.perf_counter() + seconds
        for device, (future, more) in list(memory.waiting.items()):
            if not wait([future], max(end - time.perf_counter(), 0)).done:
                continue
            del memory.waiting[device]
            memory.planned[device] = replace(future.result(), **more)

    def _plan(self, memory: _Memory) -> None:
        """Plans from the latest finished use of this thread, preferably one that its device has completed; never waits
        for the device."""
        self._take_plans(memory, 0)
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
        if use is None or (not known and memory.planned and use.planned()):
            return
        if memory.cold and self._budget is None:
            memory.cold = not known
            return  # a first step does much once, so that what hides behind it does not hide behind the next
        if use is memory.first:
            return  # counting took time
        if memory.first is not None and memory.first.finished and memory.first.completed:
            timelines = [(device, _timeline(raw), _known(raw)) for device, _, raw in memory.first.timelines()]
            memory.counted = {device: (timeline, known) for device, timeline, known in timelines}
            memory.entered = any(timeline.tensors for _, timeline, _ in timelines)
            memory.first = None
            memory.planned.clear()  # plans made without the counts
            if not memory.entered:
                return  # the next use counts
        memory.slow = memory.slow + 1 if use.slow else 0
        if memory.planned and use.planned() and 0 < memory.slow <= _PATIENCE:
            return  # look again
        memory.looked = memory.looked + 1 if use.planned() else 0
        if use.timed:
            memory.paces = _PACED if self._budget is None else 0
        elif memory.planned and use.planned():
            if memory.paces == 0:
                return
            memory.paces -= 1
        self._plan_from(memory, use)

    def _plan_from(self, memory: _Memory, use: Any) -> None:
        """Plans again for each device on which this use differs from the one planned with."""
        began = time.perf_counter()
        # Without a budget the plan models the codec's time itself; it is not the bus's.
        copied = use.copied(self._budget is not None)
        for device, budgeted, raw in use.timelines():
            timeline = _timeline(raw)
            if not budgeted or not timeline.tensors or device in memory.waiting:
                continue
            old = memory.planned.get(device)
            known = _known(raw)
            for before in (old and (old.timeline, old.known), memory.counted.get(device)):
                if before is not None:
                    timeline, known = _with_densities(timeline, known, *before)
            first = [entry[:3] for entry in raw[4]]
            link = self._link(device, *copied.get(device, (0, 0, 0, 0)))
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
                or (memory.pace.share is not None and like.share != memory.pace.share)
                or like.effort < 1
            ):
                share = memory.pace.share or SHARES[-1]
                effort = _FIRST_EFFORT if self._yields and not memory.planned else 1.0
                make = functools.partial(self._planned, timeline, first, signature, seconds, link, share, effort)
                more = dict(known=known, detailed=detailed, paced=paced)
                if self._yields:
                    memory.waiting[device] = (_in_background(functools.partial(self._reserved, device, make)), more)
                else:
                    memory.planned[device] = replace(make(), **more)
        if memory.waiting:
            self._take_plans(memory, (_WAIT if memory.planned else _FIRST_WAIT) - (time.perf_counter() - began))

    def _link(self, device: int, out_seconds: float, out_bytes: int, in_seconds: float, in_bytes: int) -> Link:
        """The rates that copies of a use reached; measured before there were any."""
        link = self._links.get(device)
        known = link is not None
        if link is None:
            out, back = self._engine.rates(device) if device >= 0 else (0, 0)
            known = out > 0 and back > 0
            link = Link(out, back) if known else Link()
            if codec := self._engine.codec_rate(device) if device >= 0 else 0:
                link = replace(link, codec=codec)
        # Small copies measure their latency.
        d2h, h2d = (
            bytes / seconds if bytes > 2**24 and seconds > 0 else None
            for seconds, bytes in ((out_seconds, out_bytes), (in_seconds, in_bytes))
        )
        link = replace(link, d2h=d2h or link.d2h, h2d=h2d or link.h2d)
        if known or (d2h and h2d):  # else measured the next time
            self._links[device] = link
        return link

    def _planned(
        self,
        timeline: Timeline,
        first: Sequence[tuple],
        signature: tuple,
        seconds: tuple[float, float] | None,
        link: Link,
        share: float = SHARES[0],
        effort: float = 1.0,
    ) -> _Planned:
        last = len(first) - self._keep_last
        moves_any = self._backend != "reference" or self._budget is not None
        movable = [moves_any and may_move and i < last for i, (_, _, may_move) in enumerate(first)]
        # Without a budget the codec may slow compute only a little, and here its rate is unknown.
        unknown = self._budget is None and self._compress == "auto" and math.isinf(link.codec)
        codec = None if unknown else self._compress
        made, seen, staging = self._made(timeline, movable, link, codec, share, effort)
        if not made.met and codec == "auto":  # perhaps only because of the codec's own memory
            plain = self._made(timeline, movable, link, None, share, effort)
            if plain[0].met:
                made, seen, staging = plain
        room = _MOST if self._budget is None else self._budget
        if not made.met:
            # Running operations need each tensor, the one after it, and one in transfer beside them. Tensors come back
            # as early as that allows.
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
        transfer_plan = _C.offload.TransferPlan(tensors, back, min(room, _MOST))
        return _Planned(timeline, signature, seconds, link, made, transfer_plan, share=share, effort=effort)

    def _reserved(self, device: int, make: Callable[[], _Planned]) -> _Planned:
        """A plan whose host memory is there: a step that waited for the system would be several times as long."""
        planned = make()
        first = planned.signature[1]
        self._engine.reserve(device, [first[move.tensor][:2] for move in planned.plan.moves])
        return planned

    def _made(
        self, timeline: Timeline, movable: Sequence[bool], link: Link, codec: str | None, share: float, effort: float
    ) -> tuple[Plan, Timeline, int]:
        """The plan with that codec, the timeline that it was made for, and the codec's memory, taken off the budget."""
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
            # An explicitly chosen codec is used at any cost.
            costs = link.codec if codec == "auto" else math.inf
            link = Link(share * link.d2h, share * link.h2d, costs, _BESIDE if codec == "auto" else 0.0)
        compress = "auto" if codec is not None else None
        return plan_movable(seen, budget, link, compress, movable, _SLOWDOWN, effort), seen, staging

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


def _copied(of: type[offload], arguments: dict[str, Any], closed: bool) -> offload:
    copy = of(**arguments)
    if closed:
        copy.close()
    return copy


def _in_background(make: Callable[[], _T]) -> Future[_T]:
    """Runs on a thread of its own; the search holds no lock of Python's."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weft-offload-plan").start()
    return future


def _timeline(raw: tuple) -> Timeline:
    operations, seconds, forward, tensors, _ = raw
    return Timeline(
        tuple(seconds) if seconds is not None else (None,) * operations, forward, tuple(Saved(*t) for t in tensors)
    )


def _known(raw: tuple) -> tuple[bool, ...]:
    """Whether the use knows the density of each tensor."""
    return tuple(entry[3] for entry in raw[4])


def _at_pace(timed: Timeline, whole: Timeline) -> tuple[float | None, ...]:
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


def _with_densities(
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


def _worth_compressing(timeline: Timeline) -> Timeline:
    """The timeline, with density 1 for tensors that cross as fast uncompressed as the codec's kernel sends them."""

    def known(t: Saved) -> Saved:
        n = t.bytes // max(t.itemsize, 1)
        return t if n * t.density * t.itemsize + n / 8 < _WORTH * t.bytes else replace(t, density=1.0)

    return replace(timeline, tensors=tuple(map(known, timeline.tensors)))


def _as_sparse(old: _Planned, timeline: Timeline) -> bool:
    """Whether compressed tensors have about the size that was planned."""
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
        raise TypeError(f"offload: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    if value not in choices:
        raise ValueError(f"offload: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _prepare(backend: str) -> None:
    """Checks the machine for a backend when it is entered."""
    global _warned_without_cuda
    if backend == "managed" and torch.cuda.is_available():
        device = torch.cuda.current_device()
        if not _C.offload.has_managed(device):
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
