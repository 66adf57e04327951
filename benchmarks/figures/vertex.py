"""The vertex engine's page: a training step over the batch size, what each option is worth, and its tables."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common import parse_case
from benchmarks.figures import PEER_COLOR, WEFT_COLOR, Results, Row, Rows, image, rst_tables, save

OPTIONS = ("lazy", "fuse", "stream")
LINES = {"eager": ("level loop", "-"), "captured": ("level loop in a CUDA graph", "--")}


def page(results: Results, folder: Path) -> list[str]:
    rows, parts = results["vertex"], []
    for rows_of, draw, name in (
        (batch_rows, draw_batches, "vertex_batches"),
        (ablation_rows, draw_ablation, "vertex_ablation"),
    ):
        shown = rows_of(rows)
        if shown:
            draw(shown, folder / f"{name}.svg")
            parts.append(image(folder / f"{name}.svg"))
    if rows:
        parts.append(rst_tables(rows))
    return parts


def batch_rows(rows: Rows) -> list[Row]:
    """Training steps of the Tree-LSTM of hidden size 256 in fp32 on a GPU, beside level loops."""
    keys = ((row, parse_case(row["case"])) for row in rows if row["metric"] == "forward_backward")
    same = {"model": "treelstm", "device": "cuda", "dtype": "fp32", "H": "256"}
    return [row for row, case in keys if row["peer"] in LINES and same.items() <= case.items() and "lazy" not in case]


def ablation_rows(rows: Rows) -> list[Row]:
    """Training steps with some options, beside one with none."""
    return [row for row in rows if row["peer"] == "none" and "lazy" in parse_case(row["case"])]


def draw_batches(rows: Rows, path: Path) -> None:
    """Time of a training step over the number of trees, Weft beside the level loops."""
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        B = int(parse_case(row["case"])["B"])
        times.setdefault("weft", {})[B] = float(row["weft"])
        times.setdefault(row["peer"], {})[B] = float(row["peer_value"])
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for name, (label, style) in LINES.items():
        points = sorted(times.get(name, {}).items())
        axes.plot([B for B, _ in points], [t for _, t in points], f"o{style}", color=PEER_COLOR, label=label)
    points = sorted(times["weft"].items())
    axes.plot([B for B, _ in points], [t for _, t in points], "o-", color=WEFT_COLOR, label="Weft")
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_xticks([B for B, _ in points], [str(B) for B, _ in points])
    axes.set_xlabel("trees per batch")
    axes.set_ylabel("training step, ms")
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    _title(figure, rows)
    save(figure, path)


def draw_ablation(rows: Rows, path: Path) -> None:
    """How many times faster each option alone, and all together, make a training step."""
    ratios = {}
    for row in rows:
        case = parse_case(row["case"])
        on = [option for option in OPTIONS if case[option] == "on"]
        ratios["all" if len(on) == len(OPTIONS) else " + ".join(on)] = float(row["ratio"])
    figure, axes = plt.subplots(figsize=(4.2, 3), layout="constrained")
    bars = axes.bar(list(ratios), list(ratios.values()), color=WEFT_COLOR, width=0.6)
    axes.bar_label(bars, fmt="%.2f", fontsize=9)
    axes.axhline(1, color=PEER_COLOR, linewidth=1)
    axes.set_ylabel("time without options / with")
    _title(figure, rows)
    save(figure, path)


def _title(figure: plt.Figure, rows: Rows) -> None:
    figure.suptitle(", ".join(sorted({row["gpu"] for row in rows})), fontsize=10)
