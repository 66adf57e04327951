"""The report on a use: its numbers, its table, its plot."""

from __future__ import annotations

import itertools
import os
from typing import Any

from .policy import Plan

__all__ = ["OffloadReport", "plot", "report"]

_REASONS = ("small", "last", "pool", "host", "budget", "other")


class OffloadReport:
    """About one use of :class:`weft.offload`. ``print`` it; :meth:`to_dict` has the numbers."""

    def __init__(self, numbers: dict[str, Any]) -> None:
        self._numbers = numbers

    def to_dict(self) -> dict[str, Any]:
        """Key to plain number, string, dict or list, as `json` writes them."""
        return {
            **self._numbers,
            "kept": dict(self._numbers["kept"]),
            "stalls": [dict(s) for s in self._numbers["stalls"]],
        }

    def __repr__(self) -> str:
        n = self._numbers
        return f"OffloadReport(saved={n['saved_bytes']}, moved={n['moved_bytes']}, kept={n['kept_bytes']})"

    def __str__(self) -> str:
        n = self._numbers
        budget = "what hides" if n["budget_bytes"] is None else _size(n["budget_bytes"])
        met = "" if n["budget_bytes"] is None else "  (met)" if n["budget_met"] else "  (not met)"
        predicted = "" if n["predicted_peak_bytes"] is None else f", predicted {_size(n['predicted_peak_bytes'])}"
        stall = "" if n["predicted_stall_seconds"] is None else f", predicted {_time(n['predicted_stall_seconds'])}"
        codec = n["predicted_codec_seconds"]
        coded = f"{n['compressed_tensors']} compressed" + (f", predicted to take {_time(codec)}" if codec else "")
        kept = ", ".join(f"{reason} {_size(b)}" for reason, b in n["kept"].items() if b)
        rows = [
            ("backend", f"{n['backend']}, compress {n['compress']}, use {n['uses']}"),
            ("budget", budget + met),
            ("saved", f"{_size(n['saved_bytes'])} in {n['saved_tensors']} tensors"),
            ("moved", f"{_size(n['moved_bytes'])} in {n['moved_tensors']}, {coded}"),
            ("kept", f"{_size(n['kept_bytes'])} in {n['kept_tensors']}" + (f": {kept}" if kept else "")),
            ("sent out", f"{_size(n['sent_bytes'])}{_rate(n['d2h_bytes_per_second'])}"),
            ("came back", f"{_size(n['returned_bytes'])}{_rate(n['h2d_bytes_per_second'])}"),
            ("peak", f"{_size(n['peak_bytes'])}{predicted}; {_size(n['peak_bytes_without'])} had nothing moved"),
            ("still wanted", _size(n["live_bytes"])),
            ("host memory", f"{_size(n['host_bytes'])}, at most {_size(n['host_peak_bytes'])}"),
            ("forward", f"{_time(n['forward_seconds'])}, waited {_time(n['forward_stall_seconds'])}"),
            ("backward", f"{_time(n['backward_seconds'])}, waited {_time(n['backward_stall_seconds'])}{stall}"),
        ]
        if n["unhooked_tensors"]:
            rows.append(("without hooks", f"{n['unhooked_tensors']} tensors behind the last move, as planned"))
        if n["stepped_aside"]:
            rows.append(("stepped aside", f"hooks made the step {100 * n['slowdown']:.2g}% slower"))
        elif n["slowdown"] is not None:
            rows.append(("slowdown", f"{100 * n['slowdown']:.2g}%, measured against steps without hooks"))
        rows += [("waited", f"{_time(s['seconds'])} at {s['operation']}") for s in n["stalls"][:5]]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def report(settings: dict[str, Any], engine: Any, use: Any | None, plans: dict[int, Plan] | None) -> OffloadReport:
    """The report of `use`; all counts are 0 where it is None."""
    statistics = [] if use is None else use.statistics()
    on_device = [b for b in statistics if b["budgeted"]]

    def total(key: str) -> int:
        return sum(b[key] for b in statistics)

    kept = {reason: sum(b["kept"][reason] for b in statistics) for reason in _REASONS}
    peak = max((b["peak_bytes"] for b in on_device), default=0)
    stalls = [
        {"operation": f"{'forward' if forward else 'backward'} {operation}: {name}", "seconds": seconds}
        for b in statistics
        for forward, operation, name, seconds in b["stalls"]
    ]
    waited = [sum(s for b in statistics for f, _, _, s in b["stalls"] if f == forward) for forward in (True, False)]
    ran = _phases(use)
    planned = plans if use is not None and plans and use.planned() else None
    budget = settings["budget_bytes"]
    numbers = {
        **settings,
        "saved_bytes": total("saved_bytes"),
        "saved_tensors": total("saved_tensors"),
        "moved_bytes": total("moved_bytes"),
        "moved_tensors": total("moved_tensors"),
        "kept_bytes": total("saved_bytes") - total("moved_bytes"),
        "kept_tensors": total("saved_tensors") - total("moved_tensors"),
        "kept": kept,
        "sent_bytes": total("sent_bytes"),
        "returned_bytes": total("returned_bytes"),
        "compressed_tensors": total("compressed_tensors"),
        "unhooked_tensors": total("unhooked_tensors"),
        "peak_bytes": peak,
        "peak_bytes_without": max((b["peak_bytes_without"] for b in on_device), default=0),
        "predicted_peak_bytes": None if planned is None else max(p.peak_bytes for p in planned.values()),
        "predicted_stall_seconds": None
        if planned is None or any(p.forward_stall is None for p in planned.values())
        else sum(p.forward_stall + p.backward_stall for p in planned.values()),
        "predicted_codec_seconds": None if planned is None else sum(p.codec_seconds for p in planned.values()),
        "budget_met": budget is None or peak <= budget,
        "live_bytes": engine.live_bytes,
        "host_bytes": engine.host_bytes,
        "host_peak_bytes": engine.host_peak_bytes,
        "forward_seconds": ran[0],
        "backward_seconds": ran[1],
        "forward_stall_seconds": float(waited[0]),
        "backward_stall_seconds": float(waited[1]),
        "stalls": sorted(stalls, key=lambda s: -s["seconds"]),
        "d2h_bytes_per_second": _bus_rate(statistics, True),
        "h2d_bytes_per_second": _bus_rate(statistics, False),
    }
    return OffloadReport(numbers)


def _phases(use: Any | None) -> tuple[float, float]:
    """Seconds of the forward and of the backward, of the device that took longest."""
    found = [(0.0, 0.0)]
    for _, _, (_, seconds, forward, _, _) in [] if use is None else use.timelines():
        if seconds is not None:
            found.append((float(sum(seconds[:forward])), float(sum(seconds[forward:]))))
    return max(found, key=sum)


def _bus_rate(statistics: list[dict[str, Any]], out: bool) -> float | None:
    copies = [(end - begin, sent) for b in statistics for o, begin, end, sent, _ in b["copies"] if o == out]
    seconds = sum(s for s, _ in copies)
    return sum(sent for _, sent in copies) / seconds if seconds > 0 else None


def plot(path: str | os.PathLike[str], use: Any, budget: int | None) -> None:
    """Rows of compute and copies, and the memory curve, of `use`, of the device that saved most."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("offload.plot needs matplotlib: pip install matplotlib") from error

    statistics = use.statistics()
    index = max(range(len(statistics)), key=lambda i: statistics[i]["saved_bytes"], default=None)
    figure = Figure(figsize=(10, 4), layout="constrained")
    rows, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    rows.set_yticks([2, 1, 0], ["compute", "out", "back"])
    rows.set_ylim(-0.5, 2.5)
    memory.set_xlabel("ms")
    memory.set_ylabel("saved, MB")
    if index is not None:
        device = statistics[index]
        times = [t for t, _ in device["curve"]]
        bars = [(a, b - a) for a, b in itertools.pairwise(times)]
        rows.broken_barh([(1e3 * a, 1e3 * w) for a, w in bars], (1.6, 0.8), facecolors=("#4477aa", "#88aacc"))
        for out, row, color in ((True, 0.6, "#cc6677"), (False, -0.4, "#228833")):
            spans = [(1e3 * a, 1e3 * (b - a)) for o, a, b, _, _ in device["copies"] if o == out]
            rows.broken_barh(spans, (row, 0.8), facecolors=color)
        memory.step([1e3 * t for t, _ in device["curve"]], [b / 1e6 for _, b in device["curve"]], where="post")
    if budget is not None:
        memory.axhline(budget / 1e6, linestyle="--", color="#888888", label="budget")
        memory.legend()
    figure.savefig(path)


def _size(bytes: int) -> str:
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if bytes >= 1000**power:
            return f"{bytes / 1000**power:.4g} {unit}"
    return f"{bytes} B"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f", {_size(round(rate))}/s"
