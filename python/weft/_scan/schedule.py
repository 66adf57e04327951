"""Names of schedules."""

from __future__ import annotations

SCHEDULES = {"auto": -1, "linear": 0, "blelloch": 63}


def levels_of(op: str, schedule: str | int) -> int:
    """Levels of the up-sweep; -1 is "auto"."""
    if isinstance(schedule, bool) or not isinstance(schedule, (str, int)):
        raise TypeError(f"{op}: schedule must be a str or an int, got {type(schedule).__name__} {schedule!r}")
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            known = ", ".join(f'"{name}"' for name in SCHEDULES)
            raise ValueError(f"{op}: schedule must be {known} or a number of levels, got {schedule!r}")
        return SCHEDULES[schedule]
    if schedule < 0:
        raise ValueError(f"{op}: schedule as a number of levels must not be negative, got {schedule}")
    return min(schedule, SCHEDULES["blelloch"])
