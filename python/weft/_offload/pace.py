"""Whether offloading without a budget slows the step: it runs some uses without hooks, compares, and gives way.

Hooks take host time for every saved tensor. A step that the device bounds hides that; a step that the host bounds does
not, and then even a plan whose copies all hide costs time. No model knows which it is, so it is measured.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import torch

SHARES = (0.97, 0.5)
"""Shares of the bus that plans use where nothing may wait for it, in the order in which they are tried: step times
vary, and where a step gets a little slower, fewer copies may hide."""
_SLOWER = 0.02
"""Share by which a step may be slower than without hooks."""
_MUCH = 0.05
"""From here on moving less does not help: hooks themselves are too much."""
_HOOKED, _PLAIN = 3, 2
"""Steps with and without hooks that are compared, by the fastest of each."""
_TRIED = 2
"""Steps with hooks of a trial, before anything moves."""
_AGAIN = 100
"""Steps between two comparisons."""
_ASIDE = 1000
"""Uses after which one that has stepped aside is tried again: what slowed its first steps may be gone."""


class Moment(Protocol):
    """A point in time of the device."""

    def completed(self) -> bool: ...

    def since(self, earlier: Any) -> float: ...


class DeviceMoment:
    """Now, on the current stream of the current CUDA device: the device's idle time counts, whatever causes it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def completed(self) -> bool:
        return self._event.query()

    def since(self, earlier: DeviceMoment) -> float:
        """Seconds."""
        return 1e-3 * earlier._event.elapsed_time(self._event)


class Pace:
    """Decides for one thread which uses have hooks. A step is the time from one use to the next.

    The first uses are a trial: with hooks that only record, and without any. Where these alone slow the step, nothing
    else is worth its time: no plan, no host memory.
    """

    tried = False
    """Whether the trial has ended."""

    def __init__(self) -> None:
        self.share: float | None = SHARES[0]
        """Of :data:`SHARES`; None while the object has stepped aside."""
        self.slowdown: float | None = None
        """A step's time with hooks over that without, minus 1, when it was last measured."""
        self._hooked: deque[tuple[Moment, Moment]] = deque(maxlen=_HOOKED)
        self._plain: list[tuple[Moment, Moment]] = []
        self._best: tuple[float, float] | None = None
        """Seconds with and without hooks, of a trial that is in doubt."""
        self._steps = _AGAIN  # since the last comparison
        self._running: tuple[Moment, str] | None = None
        self._aside = 0  # uses that it was

    def after(self) -> Pace:
        """The one for the use that is entered: a fresh one if this has been aside for long."""
        self._aside += self.share is None
        return self if self._aside <= _ASIDE else Pace()

    def pause(self) -> None:
        """The step that runs is like no other."""
        self._running = None

    def enter(self, now: Moment, steady: bool) -> bool:
        """Whether the use that is entered has hooks. `steady`: with them it would be like those that follow."""
        before = None if self._running is None else self._running[1]
        hooks = self._decide(before, now, steady)
        kind = "plain" if not hooks else "hooked" if steady else "other"
        self._running = (now, kind if before in (kind, f"after {kind}") else f"after {kind}")
        return hooks

    def _decide(self, before: str | None, now: Moment, steady: bool) -> bool:
        if before == "hooked" and self._running is not None:  # the first step of a kind is left out
            self._hooked.append((self._running[0], now))
        elif before == "plain" and self._running is not None and len(self._plain) < _PLAIN:
            self._plain.append((self._running[0], now))
        if self.share is None:
            return False
        if before in ("plain", "after plain"):
            if len(self._plain) < _PLAIN or not all(end.completed() for _, end in self._plain):
                return False
            self._compare()
            return self.share is not None
        self._steps += 1
        return not (steady and len(self._hooked) >= (_HOOKED if self.tried else _TRIED) and self._steps > _AGAIN)

    def _compare(self) -> None:
        hooked, plain = (min(end.since(begin) for begin, end in steps) for steps in (self._hooked, self._plain))
        self._hooked.clear()
        self._plain.clear()
        if self._best is not None:
            hooked, plain = min(hooked, self._best[0]), min(plain, self._best[1])
        self.slowdown = hooked / plain - 1 if plain > 0 else 0.0
        self._steps = _AGAIN  # what comes next is measured at once
        if not self.tried:
            self._end_trial(hooked, plain)
            return
        self._steps = 0
        if self.slowdown > _SLOWER:
            left = SHARES[SHARES.index(self.share) + 1 :]
            self.share = left[0] if left and self.slowdown <= _MUCH else None
            self._steps = _AGAIN  # what is tried next is measured at once

    def _end_trial(self, hooked: float, plain: float) -> None:
        """Unless it is in doubt, the first time."""
        if _SLOWER < self.slowdown <= _MUCH and self._best is None:
            self._best = hooked, plain
            return
        self._best, self.tried = None, True
        if self.slowdown > _SLOWER:
            self.share = None
