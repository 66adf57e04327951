"""The offload engine's page: a training step over the budget, the densities behind ReLUs, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.common import parse_case
from benchmarks.figures import (
    NAMES,
    PEER_COLOR,
    WEFT_COLOR,
    Results,
    Row,
    Rows,
    image,
    quantity,
    rst_table,
    rst_tables,
    save,
)

BUDGETS = ("none", "75%", "50%", "25%", "0")
LINES = {
    "floor": ("floor of the bus", ":", "#15803d"),
    "plain": ("without offload", "-", PEER_COLOR),
    "save_on_cpu": ("save_on_cpu", "--", PEER_COLOR),
    "torchtune": ("torchtune", "-.", PEER_COLOR),
    "checkpoint": ("checkpointing", (0, (1, 3)), PEER_COLOR),
}
WAYS = {
    "plain": "nothing: all in memory",
    "checkpoint": "checkpointing of every block",
    "save_on_cpu": "torch's save_on_cpu",
    "torchtune": "torchtune's OffloadActivations",
}
_OF_WAYS = {"step", "peak_memory"}


def page(results: Results, folder: Path) -> list[str]:
    rows, parts = results["offload"], []

    def draw(name: str, draw_rows: Callable[[Rows, Path], None], shown: Rows) -> None:
        draw_rows(shown, folder / f"{name}.svg")
        parts.append(image(folder / f"{name}.svg"))

    latest = of_the_latest_gpu(rows)
    if shown := budget_rows(latest):
        draw("offload_budgets", draw_budgets, shown)
        if ways_of(latest):
            draw("offload_ways", draw_ways, [row for row in latest if row["metric"] in _OF_WAYS])
        parts += ways_tables(latest)
    if shown := density_rows(rows):
        draw("offload_densities", draw_densities, shown)
        parts.append(density_table(shown))
    tables = [row for row in rows if row["metric"] != "density"]
    if tables:
        parts.append(rst_tables(tables))
    return parts


def _model(row: Row) -> str:
    keys = parse_case(row["case"])
    return f"{NAMES.get(keys['model'], keys['model'])}, {keys['dtype']}, B {keys['B']}"


def of_the_latest_gpu(rows: Rows) -> list[Row]:
    """Steps and peak memory of models by budgets: of each model those from the GPU that it last ran on."""
    shown = [row for row in rows if row["metric"] in _OF_WAYS and "budget" in parse_case(row["case"])]
    latest: dict[str, tuple[str, str]] = {}
    for row in shown:
        latest[_model(row)] = max(latest.get(_model(row), ("", "")), (row["date"], row["gpu"]))
    return [row for row in shown if row["gpu"] == latest[_model(row)][1]]


def budget_rows(rows: Rows) -> list[Row]:
    """Training steps on a GPU with the budgets of the figure."""
    keys = ((row, parse_case(row["case"])) for row in rows if row["metric"] == "step")
    return [row for row, case in keys if case["device"] == "cuda" and case.get("budget") in BUDGETS]


def density_rows(rows: Rows) -> list[Row]:
    return [row for row in rows if row["metric"] == "density"]


def densities(rows: Rows) -> dict[str, dict[str, dict[int, float]]]:
    """Network, whether it is trained, and the ReLU's place, to the share of non-zeros behind it."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        keys = parse_case(row["case"])
        found.setdefault(keys["model"], {}).setdefault(keys["trained"], {})[int(keys["layer"])] = float(row["weft"])
    return found


def density_table(rows: Rows) -> str:
    """Per network the densities behind its ReLUs: their mean, and from the least to the largest."""

    def spread(values: Sequence[float]) -> str:
        return f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""

    gpus = ", ".join(sorted({row["gpu"] for row in rows}))
    cells = [["network", "ReLUs", "at initialisation", "trained"]]
    for name, found in densities(rows).items():
        before, after = (list(found.get(trained, {}).values()) for trained in ("no", "yes"))
        cells.append([NAMES.get(name, name), str(max(len(before), len(after))), spread(before), spread(after)])
    return rst_table(f"Share of non-zeros behind every ReLU: mean (least to largest), {gpus}", cells)


def ways_of(rows: Rows) -> dict[str, dict[str, dict[str, float]]]:
    """For each model the step and the peak memory of every way to make it fit: budgets and WAYS; of models of which
    both are known without any."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        keys = parse_case(row["case"])
        on_gpu = keys["device"] == "cuda" and keys.get("budget") in BUDGETS
        if not on_gpu or row["metric"] not in _OF_WAYS:
            continue
        ways = found.setdefault(_model(row), {})
        ways.setdefault(keys["budget"], {})[row["metric"]] = float(row["weft"])
        if row["peer"] in WAYS:
            ways.setdefault(row["peer"], {})[row["metric"]] = float(row["peer_value"])
    both = {name: {way: n for way, n in ways.items() if n.keys() == _OF_WAYS} for name, ways in found.items()}
    return {name: ways for name, ways in both.items() if "plain" in ways}


def ways_tables(rows: Rows) -> list[str]:
    """For each model what a step takes and how much memory, by every way to make it fit."""
    tables = []
    for name, ways in ways_of(rows).items():
        plain, gpus = ways["plain"], ", ".join(sorted({row["gpu"] for row in rows if _model(row) == name}))
        cells = [["way", "training step", "time lost", "peak memory", "memory saved"]]
        budgets = {budget: f"weft.offload, budget {budget}" for budget in BUDGETS}
        for way, label in (WAYS | budgets).items():
            if numbers := ways.get(way):
                lost, saved = numbers["step"] / plain["step"] - 1, 1 - numbers["peak_memory"] / plain["peak_memory"]
                step, peak = f"{numbers['step']:.4g} ms", quantity(str(numbers["peak_memory"]), "bytes")
                cells.append([label, step, f"{lost:.0%}", peak, f"{saved:.0%}"])
        tables.append(rst_table(f"Ways to make {name} fit, {gpus}", cells))
    return tables


def _finish_steps(figure: Any, panels: dict[str, Any], across: str, rows: Rows, path: Path) -> None:
    """Titles, axes and the legend of panels by name, which have times of training steps upwards."""
    for name, axes in panels.items():
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=9)
        axes.grid(True, alpha=0.3)
    first = next(iter(panels.values()))
    first.legend(frameon=False, fontsize=8)
    first.set_ylabel("training step, ms")
    figure.supxlabel(across)
    _title(figure, rows)
    save(figure, path)


def draw_ways(rows: Rows, path: Path) -> None:
    """A training step over the memory that it takes, by every way to make it fit: a panel per model."""
    found = ways_of(rows)
    figure, panels = plt.subplots(1, len(found), figsize=(3.6 * len(found), 3.4), squeeze=False, layout="constrained")
    markers = dict(zip(WAYS, "osD^", strict=True))
    for axes, ways in zip(panels[0], found.values(), strict=True):
        for way, marker in markers.items():
            if way in ways:
                axes.plot(ways[way]["peak_memory"] / 1e9, ways[way]["step"], marker, color=PEER_COLOR, label=WAYS[way])
        budgets = [budget for budget in BUDGETS if budget in ways]
        points = [(ways[budget]["peak_memory"] / 1e9, ways[budget]["step"]) for budget in budgets]
        axes.plot(*zip(*points, strict=True), "o-", color=WEFT_COLOR, label="weft.offload")
        for budget, point in zip(budgets, points, strict=True):
            axes.annotate(budget, point, xytext=(4, 4), textcoords="offset points", fontsize=7)
        axes.set_xlim(left=0)
    _finish_steps(figure, dict(zip(found, panels[0], strict=True)), "peak memory, GB", rows, path)


def draw_budgets(rows: Rows, path: Path) -> None:
    """Time of a training step over the budget, Weft beside its floor, the plain step and save_on_cpu: a panel per
    model."""
    times: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        keys = parse_case(row["case"])
        lines = times.setdefault(f"{keys['model']}, {keys['dtype']}, B {keys['B']}", {})
        lines.setdefault("weft", {})[keys["budget"]] = float(row["weft"])
        lines.setdefault(row["peer"], {})[keys["budget"]] = float(row["peer_value"])
    figure, panels = plt.subplots(1, len(times), figsize=(3.4 * len(times), 3.4), squeeze=False, layout="constrained")
    places = range(len(BUDGETS))
    for axes, lines in zip(panels[0], times.values(), strict=True):
        for peer, (label, style, color) in LINES.items():
            if peer not in lines:
                continue
            values = [lines.get(peer, {}).get(budget, float("nan")) for budget in BUDGETS]
            axes.plot(places, values, linestyle=style, color=color, label=label)
        values = [lines["weft"].get(budget, float("nan")) for budget in BUDGETS]
        axes.plot(places, values, "o-", color=WEFT_COLOR, label="Weft")
        axes.set_xticks(places, BUDGETS)
    _finish_steps(figure, dict(zip(times, panels[0], strict=True)), "budget, as a share of the saved bytes", rows, path)


def draw_densities(rows: Rows, path: Path) -> None:
    """The share of non-zeros behind each ReLU, at initialisation and after training: a panel per network."""
    found = densities(rows)
    figure, panels = plt.subplots(
        1, len(found), figsize=(3 * len(found) + 0.5, 2.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (name, lines) in zip(panels[0], found.items(), strict=True):
        for trained, label, color in (("no", "at initialisation", PEER_COLOR), ("yes", "trained", WEFT_COLOR)):
            points = sorted(lines.get(trained, {}).items())
            axes.plot([k for k, _ in points], [v for _, v in points], "o-", markersize=3, color=color, label=label)
        axes.set_ylim(0, 1)
        axes.set_title(NAMES.get(name, name), fontsize=9)
        axes.grid(True, alpha=0.3)
    panels[0][0].legend(frameon=False, fontsize=8)
    panels[0][0].set_ylabel("share of non-zeros")
    figure.supxlabel("ReLU, first to last")
    save(figure, path)


def _title(figure: plt.Figure, rows: Rows) -> None:
    figure.suptitle(", ".join(sorted({row["gpu"] for row in rows})), fontsize=10)
