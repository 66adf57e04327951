"""Measuring candidates beside each other on a machine that may have something else to do."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping

import torch

from .torch_private import device_sleep

__all__ = ["by_turns", "device_microseconds", "microseconds", "steady"]

_WARM_UPS = 3
_RUNS = 10
_PATIENCE = 2.0  # seconds for one candidate; a slow one is run fewer times
_FEWEST_RUNS = 3


def microseconds(run: Callable[[], object], device: torch.device) -> float:
    """What one run takes: of the device, where it is a GPU, which is waited for."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - started)
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)


_CYCLES = 2000  # of a GPU's clock in a microsecond, or a little more


def device_microseconds(run: Callable[[], object], device: torch.device) -> float:
    """What one run takes on a GPU where the host is ahead: the device sleeps until all is launched."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()  # what the host needs for it
        host = 1e6 * (time.perf_counter() - started)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        device_sleep(int(2 * _CYCLES * (host + 100)))
        start.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)


def by_turns(makers: Mapping[str, Callable[[], Callable[[], float]]]) -> dict[str, list[float]]:
    """Microseconds of the runs of every candidate, of those that run: memory may not do for all.

    The candidates run in turn, so that whatever else the machine does meets all of them.

    Args:
        makers: by name, what makes a stopwatch: a function that runs the candidate once and returns the microseconds.

    Raises:
        RuntimeError: none of them runs.
    """
    stopwatches: dict[str, Callable[[], float]] = {}
    failure: RuntimeError | None = None
    for name, make in makers.items():
        try:
            stopwatch, spent = make(), 0.0
            for _ in range(_WARM_UPS):
                if spent < 1e6 * _PATIENCE:
                    spent += stopwatch()
        except RuntimeError as error:
            failure = error
        else:
            stopwatches[name] = stopwatch
    if not stopwatches and failure is not None:
        raise failure
    times: dict[str, list[float]] = {name: [] for name in stopwatches}
    for count in range(_RUNS):
        for name, stopwatch in stopwatches.items():
            if count < _FEWEST_RUNS or sum(times[name]) < 1e6 * _PATIENCE:
                times[name].append(stopwatch())
    return times


def steady(runs_of: Mapping[str, list[float]], limit: float, stacklevel: int) -> dict[str, float] | None:
    """The fastest run of every candidate; None, with a warning, where even these are not repeated.

    Args:
        runs_of: what :func:`by_turns` returned.
        limit: how much longer than its fastest run a quarter of a candidate's runs may take. Above, the machine was
            busy with something else, and what was measured says nothing.
        stacklevel: of the warning.
    """
    spreads = {name: _spread(times) for name, times in runs_of.items()}
    widest = max(spreads, key=spreads.__getitem__)
    if spreads[widest] > limit:
        warnings.warn(
            f"weft.tune stored nothing: only a quarter of the runs of {widest!r} took less than "
            f"{1 + spreads[widest]:.1f} times the fastest one, so the machine is busy with something else; tune "
            "again when it is idle",
            stacklevel=stacklevel,
        )
        return None
    return {name: min(times) for name, times in runs_of.items()}


def _spread(times: list[float]) -> float:
    """How much longer than the fastest the run takes that a quarter of the others do not exceed."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4] / ordered[0] - 1 if ordered[0] > 0 else 0.0
