"""The sparse room's page: table 1 of the paper, LeNet-5's scan level by level, long chains by schedule, retraining over
density, its tables."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common import of_one_gpu, parse_case
from benchmarks.figures import Results, Row, Rows, image, ratio_of, rst_table, rst_tables, save


def page(results: Results, folder: Path) -> list[str]:
    rows = results["sparse"]
    parts = [table] if (table := sparsity_table(rows)) else []
    for shown, draw, name in (
        (level_rows(rows), draw_levels, "sparse_levels"),
        (block_rows(rows), draw_blocks, "sparse_blocks"),
        (density_rows(rows), draw_density, "sparse_density"),
    ):
        if shown:
            draw(of_one_gpu(shown), folder / f"{name}.svg")
            parts.append(image(folder / f"{name}.svg"))
    others = [row for row in rows if parse_case(row["case"]).get("op") != "jacobian"]
    if others:
        parts.append(rst_tables(others))
    return parts


def level_rows(rows: Rows) -> list[Row]:
    return [row for row in rows if row["metric"] == "level_flops"]


def density_rows(rows: Rows) -> list[Row]:
    """Training steps over the part of the weights that is left."""
    return [row for row in rows if "density" in parse_case(row["case"]) and row["metric"] == "forward_backward"]


def block_rows(rows: Rows) -> list[Row]:
    """Backward passes of chains of equal blocks, in CUDA graphs."""
    return [row for row in rows if "model=blocks" in row["case"] and row["metric"] == "input_gradients_captured"]


def sparsity_table(rows: Rows) -> str:
    """Table 1 of the paper as reStructuredText: of each Jacobian the sparsity, the time to make it, and autograd's, one
    column at a time."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        keys = parse_case(row["case"])
        if keys.get("op") == "jacobian" and keys["B"] == "1":
            found.setdefault((row["gpu"], keys["layer"]), {})[row["metric"]] = row
    table = [["on", "layer", "stored elements", "sparsity", "made in", "floor", "autograd, by columns", "faster"]]
    for (hardware, layer), of in found.items():
        if {"elements", "generate", "device_time"} <= set(of):
            elements, made, device = of["elements"], of["generate"], of["device_time"]
            sparsity = 1 - float(elements["weft"]) / float(elements["peer_value"])
            table.append(
                [hardware, layer, elements["weft"], f"{sparsity:.5f}", f"{device['weft']} ms",
                 f"{device['peer_value']} ms", f"{made['peer_value']} ms", ratio_of(made)]
            )  # fmt: skip
    return rst_table("Transposed Jacobians, one sample of 32x32", table) if len(table) > 1 else ""


def draw_levels(rows: Rows, path: Path) -> None:
    """FLOPs of every level of LeNet-5's scan, all steps and the largest, up-sweep and down-sweep."""
    points = [(int(keys["level"]), keys["phase"], row) for row in rows for keys in [parse_case(row["case"])]]
    points.sort(key=lambda point: point[0])
    levels = {level: (phase, row) for level, phase, row in points}
    colors = {"up": "#2563eb", "middle": "#888888", "down": "#c2410c"}
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for phase, color in colors.items():
        own = [(level, row) for level, (p, row) in levels.items() if p == phase]
        if own:
            places = [level for level, _ in own]
            kind = {"up": "up-sweep", "middle": "middle", "down": "down-sweep"}[phase]
            total, largest = ([float(row[name]) for _, row in own] for name in ("weft", "peer_value"))
            axes.bar(places, total, color=color, alpha=0.35, label=f"{kind}, all steps")
            axes.bar(places, largest, 0.4, color=color, label="the largest step")
    axes.set_yscale("log")
    axes.set_xticks(list(levels))
    axes.set(xlabel="level, in order of execution", ylabel="FLOP of a sample")
    axes.set_title("LeNet-5, all levels of the scan", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def draw_blocks(rows: Rows, path: Path) -> None:
    """The backward pass of a chain over its number of blocks, by each schedule, beside autograd's."""
    lines: dict[str, dict[int, Row]] = {}
    for row in rows:
        keys = parse_case(row["case"])
        lines.setdefault(keys["schedule"], {})[int(keys["model"].removeprefix("blocks"))] = row
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    peers: dict[int, float] = {}
    for schedule, points in sorted(lines.items()):
        counts = sorted(points)
        name = f"{schedule} level{'s' if schedule != '1' else ''} up" if schedule.isdigit() else schedule
        style = "o-" if schedule == "auto" else ".:"
        axes.loglog(counts, [float(points[n]["weft"]) for n in counts], style, label=f"scan, {name}")
        peers |= {n: float(row["peer_value"]) for n, row in points.items()}
    axes.loglog(sorted(peers), [peers[n] for n in sorted(peers)], "--", color="#888888", label="autograd")
    axes.set_xticks(sorted(peers), [str(n) for n in sorted(peers)], minor=False)
    axes.set_xticks([], minor=True)
    axes.set(xlabel="blocks of a convolution and a ReLU", ylabel="backward pass in a CUDA graph, ms")
    axes.grid(True, which="major", alpha=0.3)
    axes.set_title(f"chains of equal blocks, 4 channels, 16x16, B 1, {rows[0]['gpu']}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def draw_density(rows: Rows, path: Path) -> None:
    """A training step of pruned VGG-11 over the part of the weights that is left, beside autograd's."""
    lines: dict[tuple[str, str, str], list[tuple[float, Row]]] = {}
    for row in rows:
        keys = parse_case(row["case"])
        lines.setdefault((keys["device"], keys["width"], keys["B"]), []).append((float(keys["density"]), row))
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for (device, width, B), points in lines.items():
        points.sort(key=lambda point: point[0])
        densities = [density for density, _ in points]
        (line,) = axes.loglog(
            densities, [float(row["weft"]) for _, row in points], "o-",
            label=f"scan, {device}, B {B}" + (f", width {width}" if width != "1.0" else ""),
        )  # fmt: skip
        axes.loglog(
            densities, [float(row["peer_value"]) for _, row in points], "--", color=line.get_color(), label="autograd"
        )
    axes.set(xlabel="part of the weights that is left", ylabel="training step, ms")
    axes.grid(True, which="major", alpha=0.3)
    machines = " and ".join(sorted({row["gpu"] for row in rows}))
    axes.set_title(f"pruned VGG-11, forward and backward pass, {machines}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
