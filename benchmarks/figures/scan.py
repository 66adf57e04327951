"""The scan engine's page: its backward pass over T, diagonal scans over T, its table, and the grid of "auto"."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from benchmarks.common import of_one_gpu, parse_case
from benchmarks.figures import (
    NAMES,
    PEER_COLOR,
    WEFT_COLOR,
    Results,
    Row,
    Rows,
    by_hardware,
    image,
    rst_table,
    rst_tables,
    save,
)
from benchmarks.scan import GRID_B, GRID_CELLS, GRID_H, GRID_T


def page(results: Results, folder: Path) -> list[str]:
    rows, grid, parts = results["scan"], results["scan_auto"], []
    if backward_points(rows):
        draw_backward(rows, folder / "scan_backward.svg")
        parts.append(image(folder / "scan_backward.svg"))
    if diagonal_points(rows):
        draw_diagonal(rows, folder / "scan_diagonal.svg")
        parts.append(image(folder / "scan_diagonal.svg"))
    if len(memory_points(rows)) > 1:
        draw_memory(rows, folder / "scan_memory.svg")
        parts.append(image(folder / "scan_memory.svg"))
    models, lines = language_models(rows)
    if models:
        seconds = parse_case(models[0]["case"])["seconds"]
        header = ["character model", "bits per character", "characters/s"]
        parts.append(
            rst_table(f"Trained for {seconds} s each on {' and '.join(by_hardware(models))}", [header, *lines])
        )
    if rows:
        parts.append(rst_tables(rows))
    if any(parse_case(row["case"])["device"] == "cuda" for row in grid):
        draw_grid(grid, folder / "scan_auto.png")
        parts.append(image(folder / "scan_auto.png"))
    return parts


def backward_points(rows: Rows) -> list[Row]:
    """The tanh RNN's backward pass over growing T on a GPU; all else as most of its rows have it."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        keys = parse_case(row["case"])
        same = keys.get("cell") == "rnn_tanh" and keys["device"] == "cuda" and "algorithm" not in keys
        if same and row["metric"] == "backward" and row["peer"] == "torch.nn":
            keys.pop("T")
            alike.setdefault((row["gpu"], *map("=".join, keys.items())), []).append(row)
    return max(alike.values(), key=len, default=[])


def draw_backward(rows: Rows, path: Path) -> None:
    """Time of the backward pass against the sequence length, Weft beside torch.nn."""
    points = sorted((int(parse_case(row["case"])["T"]), row) for row in backward_points(rows))
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    steps = [T for T, _ in points]
    axes.loglog(
        steps, [float(row["peer_value"]) for _, row in points], "o-", color=PEER_COLOR, label="torch.nn (cuDNN)"
    )
    axes.loglog(steps, [float(row["weft"]) for _, row in points], "o-", color=WEFT_COLOR, label="Weft")
    for T, row in points:
        axes.annotate(
            f"{float(row['ratio']):.3g}x", (T, float(row["weft"])), (0, -14), textcoords="offset points", ha="center"
        )
    keys = parse_case(points[0][1]["case"])
    axes.set(xlabel="sequence length T", ylabel="backward pass, ms")
    axes.margins(0.1, 0.2)
    axes.set_xticks(steps, steps)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"tanh RNN, H {keys['H']}, B {keys['B']}, {keys['dtype']}, {points[0][1]['gpu']}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)


def diagonal_rows(rows: Rows) -> list[Row]:
    """Diagonal scans with their gradients on a GPU in fp32."""
    same = {"layout": "diagonal", "device": "cuda", "dtype": "fp32"}.items()
    found = (row for row in rows if row["metric"] == "forward_backward" and same <= parse_case(row["case"]).items())
    return of_one_gpu(found)


def diagonal_points(rows: Rows) -> dict[tuple[int, int], dict[str, dict[int, float]]]:
    """Milliseconds of the diagonal rows: by (B, H), who, and T, where T varies."""
    found: dict[tuple[int, int], dict[str, dict[int, float]]] = {}
    for row in diagonal_rows(rows):
        keys = parse_case(row["case"])
        shape, T = found.setdefault((int(keys["B"]), int(keys["H"])), {}), int(keys["T"])
        shape.setdefault("Weft", {})[T] = float(row["weft"])
        shape.setdefault(row["peer"], {})[T] = float(row["peer_value"])
    return {shape: lines for shape, lines in found.items() if len(lines["Weft"]) > 1}


def draw_diagonal(rows: Rows, path: Path) -> None:
    """Time over T, a panel for each B and H, a line each for Weft, its peer and the floor."""
    points = diagonal_points(rows)
    figure, panels = plt.subplots(1, len(points), figsize=(3.2 * len(points), 3.2), layout="constrained", squeeze=False)
    styles = {"Weft": {"color": WEFT_COLOR}, "floor": {"color": "#888888", "linestyle": "--"}}
    for axes, ((B, H), lines) in zip(panels[0], points.items(), strict=True):
        for name, values in lines.items():
            steps = sorted(values)
            style = styles.get(name, {"color": PEER_COLOR})
            axes.loglog(steps, [values[T] for T in steps], marker="o", markersize=4, label=name, **style)
            axes.set_xticks(steps, steps)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(f"B {B}, H {H}", fontsize=9)
        axes.grid(True, which="major", alpha=0.3)
    figure.suptitle(diagonal_rows(rows)[0]["gpu"], fontsize=10)
    figure.supxlabel("sequence length T")
    figure.supylabel("forward + backward, ms")
    panels[0][0].legend(frameon=False, fontsize=8)
    save(figure, path)


def memory_rows(rows: Rows) -> list[Row]:
    same = {"op": "pointwise_scan", "device": "cuda", "B": "1"}.items()
    return of_one_gpu(row for row in rows if same <= parse_case(row["case"]).items())


def memory_points(rows: Rows) -> list[tuple[float, float, float]]:
    """Of ParaGRU's cell on a GPU, few channels over a long sequence: how many steps it remembers for, the forward
    pass's milliseconds as "auto" runs it, and those of a plain walk."""
    found: dict[str, dict[str, float]] = {}
    for row in memory_rows(rows):
        values = found.setdefault(row["case"], {})
        if row["metric"] == "memory":
            values["memory"] = float(row["weft"])
        if row["metric"] == "forward" and row["peer"] == "walk":
            values["weft"], values["walk"] = float(row["weft"]), float(row["peer_value"])
    return sorted((v["memory"], v["weft"], v["walk"]) for v in found.values() if len(v) == 3)


def draw_memory(rows: Rows, path: Path) -> None:
    """Time of the forward pass over the length of the memory: chunks of time beside a plain walk."""
    memory, mine, walk = zip(*memory_points(rows), strict=True)
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    axes.loglog(memory, walk, "o-", color=PEER_COLOR, label="one walk")
    axes.loglog(memory, mine, "o-", color=WEFT_COLOR, label="chunks of time")
    axes.set(xlabel="steps until two starts agree to 2^-22 (mean of the channels)", ylabel="forward pass, ms")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"ParaGRU's cell, 768 channels, T 65536, fp32, {memory_rows(rows)[0]['gpu']}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)


def language_models(rows: Rows) -> tuple[list[Row], list[list[str]]]:
    """The rows of the character models, of a GPU where there are some, and the lines of their table: which model, bits
    per character, characters per second."""
    found = of_one_gpu(row for row in rows if parse_case(row["case"]).get("model") == "char_lm")
    found = [row for row in found if parse_case(row["case"])["device"] == "cuda"] or found
    values = {row["metric"]: row for row in found}
    if not {"bits_per_character", "throughput"} <= values.keys():
        return [], []
    bits, speed = values["bits_per_character"], values["throughput"]
    return found, [
        [name, f"{float(bits[column]):.3f}", f"{float(speed[column]):,.0f}"]
        for name, column in (("a GRU", "peer_value"), ("three minGRUs", "weft"))
    ]


def draw_grid(rows: Rows, path: Path) -> None:
    """How many times faster than torch.nn a training step of "auto" is, over T and B, a panel per cell and H."""
    ratios = {}
    for row in rows:
        keys = parse_case(row["case"])
        if keys["device"] == "cuda" and "algorithm" not in keys:
            ratios[keys["cell"], int(keys["H"]), int(keys["B"]), int(keys["T"])] = float(row["ratio"])
    figure, panels = plt.subplots(
        len(GRID_CELLS), len(GRID_H), figsize=(13, 8), sharex=True, sharey=True, layout="constrained"
    )
    norm = matplotlib.colors.LogNorm(1 / 32, 32)
    for line, cell in zip(panels, GRID_CELLS, strict=True):
        for axes, H in zip(line, GRID_H, strict=True):
            values = [[ratios.get((cell, H, B, T), float("nan")) for T in GRID_T] for B in GRID_B]
            image = axes.imshow(values, origin="lower", aspect="auto", cmap="RdBu", norm=norm)
            for i, row_values in enumerate(values):
                for j, value in enumerate(row_values):
                    if value == value:
                        axes.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=6)
            axes.set_title(f"{NAMES[cell]}, H {H}", fontsize=9)
            axes.set_xticks(range(len(GRID_T)), GRID_T, rotation=90)
            axes.set_yticks(range(len(GRID_B)), GRID_B)
    figure.supxlabel("T")
    figure.supylabel("B")
    figure.colorbar(
        image, ax=panels, label="time of torch.nn / time of Weft", ticks=[1 / 32, 1 / 4, 1, 4, 32], format="{x:g}"
    )
    save(figure, path)
