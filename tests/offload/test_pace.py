"""When offloading without a budget gives way, on steps that take as long as a test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from weft._offload.pace import SHARES, Pace


@dataclass(frozen=True)
class At:
    """A moment that the device reaches when `clock` does."""

    seconds: float
    clock: list[float]

    def completed(self) -> bool:
        return self.clock[0] >= self.seconds

    def since(self, earlier: At) -> float:
        assert self.completed() and earlier.completed()
        return self.seconds - earlier.seconds


def run(
    seconds: Callable[[int, bool, float | None], float], uses: int = 400, late: int = 0, steady: int = 3
) -> tuple[Pace, list[bool]]:
    """Uses of a step that takes seconds(use, hooks, share), and which of them had hooks. The device is `late` steps
    behind the host; after the trial come `steady` uses that are like no other."""
    pace, hooked, times, tried = Pace(), [], [0.0], 0
    for use in range(uses):
        clock = [times[max(len(times) - 1 - late, 0)]]
        now = At(times[-1], clock)
        # Moments of earlier uses look at the same clock.
        for begin, end in [*pace._hooked, *pace._plain]:
            begin.clock[0] = end.clock[0] = clock[0]
        hooked.append(pace.enter(now, not pace.tried or tried > steady))
        tried += pace.tried
        times.append(times[-1] + seconds(use, hooked[-1], pace.share))
    return pace, hooked


@pytest.mark.parametrize("late", [0, 3])
def test_hooks_that_cost_nothing_stay(late: int) -> None:
    pace, hooked = run(lambda use, hooks, share: 1.01 if hooks else 1.0, late=late)
    assert pace.share == SHARES[0] and pace.slowdown == pytest.approx(0.01)
    assert hooked[:6] == [True] * 3 + [False] * 3 and hooked[-1]  # the trial, whose first step counts no more than any
    assert hooked[6 + late : 12 + late] == [True] * 6
    assert 0.9 < sum(hooked) / len(hooked) < 1  # compared now and then


@pytest.mark.parametrize("late", [0, 3])
def test_hooks_that_cost_much_go_at_once(late: int) -> None:
    pace, hooked = run(lambda use, hooks, share: 1.3 if hooks else 1.0, late=late)
    assert pace.share is None and pace.slowdown == pytest.approx(0.3)
    assert hooked == [True] * 3 + [False] * 397  # the trial is all that had any


def test_a_trial_in_doubt_is_made_twice() -> None:
    """By the fastest of all of its steps."""
    pace, hooked = run(lambda use, hooks, share: 1.04 if hooks else 1.0)
    assert pace.share is None and hooked == ([True] * 3 + [False] * 3) * 2 + [False] * 388
    pace, hooked = run(lambda use, hooks, share: 1.04 if hooks and use < 6 else 1.0)
    assert pace.tried and pace.share == SHARES[0] and pace.slowdown == pytest.approx(0) and hooked[-1]


def test_moving_less_comes_before_stepping_aside() -> None:
    moves = 9  # after the trial
    pace, hooked = run(lambda use, hooks, share: 1.04 if hooks and use > moves and share == SHARES[0] else 1.0)
    assert pace.share == SHARES[1] and pace.slowdown == pytest.approx(0) and hooked[-1]
    pace, hooked = run(lambda use, hooks, share: 1.04 if hooks and use > moves else 1.0)
    assert pace.share is None and not any(hooked[30:])


def test_steps_that_are_slow_for_another_reason_do_not_count() -> None:
    """One of three, with hooks or without: the fastest are compared."""
    pace, _ = run(lambda use, hooks, share: 3.0 if use % 3 == 0 else 1.0)
    assert pace.share == SHARES[0] and pace.slowdown == pytest.approx(0)


def test_steps_at_a_pause_or_before_a_plan_do_not_count() -> None:
    pace = Pace()
    pace.tried = True
    clock = [0.0]
    for _ in range(6):
        clock[0] += 100
        pace.enter(At(clock[0], clock), False)
    assert not pace._hooked
    for use in range(6):
        clock[0] += 1
        pace.enter(At(clock[0], clock), True)
        if use == 2:
            pace.pause()
            clock[0] += 100
    assert all(end.seconds - begin.seconds == 1 for begin, end in pace._hooked)


def test_who_has_stepped_aside_is_tried_again_much_later() -> None:
    pace, clock = Pace(), [0.0]
    hooked = []
    for use in range(1100):
        clock[0] += 1.2 if hooked and hooked[-1] and use < 20 else 1.0
        pace = pace.after()
        hooked.append(pace.share is not None and pace.enter(At(clock[0], clock), not pace.tried))
    assert hooked[:3] == [True] * 3 and not any(hooked[3:1000]) and sum(hooked[1000:1010]) == 3
    assert pace.tried and pace.share == SHARES[0] and hooked[-1]
