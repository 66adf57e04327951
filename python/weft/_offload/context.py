"""The class :class:`offload`: settings, uses, hooks. Plans are made in planning.py; saved tensors are handled in
csrc/offload/tracker/tracker.h.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from .. import _C
from .._base.arguments import constructor
from .managed import managed_pool
from .memory import host_memory
from .pace import DeviceMoment
from .planning import MOST, Entered, Memory, Planner
from .policy import Timeline
from .report import OffloadReport, plot, report
from .sizes import parse_bytes
from .timelines import timeline_of

_P = ParamSpec("_P")
_T = TypeVar("_T")
_COMPRESS = ("auto", "zvc", "rle", None)
_BACKENDS = ("copy", "managed", "reference")
_LOOKS, _EVERY = 3, 32
"""Every operation is timed in the first `_LOOKS` uses, and later in `_LOOKS` of every `_EVERY`."""
_TIMES = 100
"""Without a budget: about so many operations are timed, each way, of a use that times them: events cost time, too."""
_COUNTING = 0.003
"""Without a budget: seconds of the host that counting zeros may take of a use; the next one goes on."""

_warned_without_cuda = False
_warning = threading.Lock()


class offload:
    """Moves tensors saved for the backward to host memory, and back in time. Gradients keep the same bits.

    ``with offload("4GB") as off: loss = model(x)``, then ``loss.backward()`` inside or outside of the block. One *use*
    is one block together with every backward of what was computed in it. The first use of a thread records when tensors
    are saved and read. From the second use on a plan for this timeline decides what moves; every use keeps recording.
    Without a budget it comes some uses later, some uses have no hooks, and most of the others none behind their last
    move. Reusable, by several threads at once; not re-entrant. Objects nest: the innermost one sees a tensor, as with
    torch's saved-tensor hooks. As a decorator, ``@weft.offload("4GB")``, it makes every call of a function such a
    block. Copies and pickles of an object have its settings and have learnt nothing.

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
        self._pool_limit = host_memory() // 2 if pool_limit is None else parse_bytes("offload: pool_limit", pool_limit)
        self._engine = _C.offload.Engine(
            backend,
            None if self._budget is None else min(self._budget, MOST),
            compress,
            min(self._min_bytes, MOST),
            min(keep_last, MOST),
            min(self._pool_limit, MOST),
        )
        self._planner = Planner(self._engine, self._budget, compress, backend, keep_last)
        # The closed engine outlives the object while a graph needs it.
        weakref.finalize(self, self._planner.close).atexit = False
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._closed = False
        self._uses = 0
        self._latest: Entered | None = None
        self._unfinished: list[Any] = []
        self._finished: Any | None = None
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
        """The timeline of the latest use with hooks to its end whose tensors have all been read or dropped; None before
        one. Its operations are the intervals between saves and reads. The forward ends at the first read; later saves
        are left out."""
        with self._lock:
            self._settle()
            if self._finished is None:
                return None
            found = [(budgeted, timeline_of(raw)) for _, budgeted, raw in self._finished.timelines()]
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
            memory: Memory | None = getattr(self._thread, "memory", None)
            if memory is None:
                memory = self._thread.memory = Memory()
            on_cuda = torch.cuda.is_available()
            # While a stream is captured nothing is measured, planned or moved.
            capturing = on_cuda and torch.cuda.is_current_stream_capturing()
            may_move = not capturing and (on_cuda or self._backend == "reference")
            yields = self._planner.yields
            memory.try_again()
            trying = yields and may_move and not memory.pace.tried
            if may_move and not trying and memory.pace.share is not None:
                self._planner.plan(memory)
            plans = {} if trying or capturing else dict(memory.planned)
            counting = yields and may_move and not trying and memory.counts_from is not None
            # Timing every operation costs time: done at first, and now and then. So does counting zeros.
            looks = 1 if yields else _LOOKS
            stale = yields and any(p.share != memory.pace.share for p in plans.values())
            looking = not plans or stale or memory.looked <= looks or memory.looked % _EVERY < looks
            timed = looking and not counting and not trying
            if yields and not self._hooks(memory, may_move, trying or (bool(plans) and not timed)):
                self._thread.entered, self._thread.latest = contextlib.ExitStack(), None
                self._uses += 1
                return self
            counting_seconds = math.inf if self._budget is not None else _COUNTING if counting else 0.0
            use = self._engine.use(
                {device: planned.transfer_plan for device, planned in plans.items()},
                timed,
                counting_seconds,
                (memory.counts_from or 0) if counting else 0,
                max(memory.saves // _TIMES, 1) if yields else 1,
                yields and len(plans) == 1 and not timed and memory.paces == 0,
            )
            managed = on_cuda and self._backend == "managed" and not capturing
            pool = managed_pool() if managed else contextlib.nullcontext()
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*use.hooks))  # or torch refuses
                stack.enter_context(pool)
                self._thread.entered = stack.pop_all()
            self._latest = self._thread.latest = Entered(use, plans, memory)
            self._unfinished.append(use)
            if counting:
                memory.counting.append(use)
            elif may_move and not trying:
                memory.pending.append(self._latest)
            self._uses += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if getattr(self._thread, "entered", None) is None:
            raise RuntimeError("offload: this thread is not inside this object; leave it where it was entered")
        entered, latest = self._thread.entered, self._thread.latest
        self._thread.entered = self._thread.latest = None
        if latest is not None:
            latest.use.rehook()
        entered.__exit__(kind, error, trace)
        if latest is not None:
            use, memory = latest.use, latest.memory
            use.exit()
            memory.saves = max(memory.saves, use.saves)
            if use in memory.counting:
                if use.saves > 0:
                    memory.counts_from = use.uncounted_from
                else:  # the next one counts
                    memory.counting.remove(use)
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
            self._planner.close()

    def _settle(self) -> None:
        """Finds the uses that have finished, in the order in which they were entered."""
        for use in [u for u in self._unfinished if u.finished]:
            self._unfinished.remove(use)
            if not use.unhooked:
                self._finished = use

    def _hooks(self, memory: Memory, may_move: bool, steady: bool) -> bool:
        """Without a budget: whether the use has hooks. `steady`: with them it would be like those that follow."""
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
        return memory.pace.enter(DeviceMoment(), steady)

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
