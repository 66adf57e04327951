"""The rnn engine's page: the speed-up of a training step over its grid, and everything else as a table."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks import rnn_cases, rnn_targets
from benchmarks.common import parse_case
from benchmarks.figures import (
    DTYPE_COLORS,
    NAMES,
    PEER_COLOR,
    WEFT_COLOR,
    Results,
    Rows,
    describe,
    image,
    ratio_of,
    rst_table,
    rst_tables,
    save,
)


def page(results: Results, folder: Path) -> list[str]:
    rows, parts = results["rnn"], []
    grid = rnn_targets.grid_rows(rows)
    if grid:
        draw_speedup(rows, folder / "rnn_speedup.svg")
        parts += [image(folder / "rnn_speedup.svg"), grid_summary(rows), grid_table(rows)]
    if memory_rows(rows):
        draw_memory(rows, folder / "rnn_memory.svg")
        parts.append(image(folder / "rnn_memory.svg"))
    others = [row for row in rows if row["case"] not in grid or row["metric"] != "forward_backward"]
    if others:
        parts.append(rst_tables(others))
    return parts


def draw_speedup(rows: Rows, path: Path) -> None:
    """How many times faster than torch.nn a training step of the rnn engine's grid is: over H, a line per dtype, a
    panel per cell and batch."""
    ratios = {}
    for row in rnn_targets.grid_rows(rows).values():
        keys = parse_case(row["case"])
        ratios[keys["cell"], keys["dtype"], int(keys["H"]), int(keys["B"])] = float(row["ratio"])
    figure, panels = plt.subplots(
        len(rnn_cases.GRID_B),
        len(rnn_cases.GRID_CELLS),
        figsize=(8.6, 7),
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    positions = range(len(rnn_cases.GRID_H))
    for line, B in zip(panels, rnn_cases.GRID_B, strict=True):
        for axes, cell in zip(line, rnn_cases.GRID_CELLS, strict=True):
            axes.axhline(1, color=PEER_COLOR, linewidth=1)
            for dtype in rnn_cases.GRID_DTYPES:
                values = [ratios.get((cell, dtype, H, B), float("nan")) for H in rnn_cases.GRID_H]
                axes.plot(positions, values, "o-", color=DTYPE_COLORS[dtype], markersize=4, label=dtype)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xticks(positions, rnn_cases.GRID_H)
            axes.set_title(f"{NAMES[cell]}, B {B}", fontsize=9)
            axes.grid(True, which="major", alpha=0.3)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.supxlabel("hidden units H")
    figure.supylabel("time of torch.nn / time of Weft")
    gpu = next(iter(rnn_targets.grid_rows(rows).values()))["gpu"]
    figure.suptitle(f"training step, T {rnn_cases.GRID_T}, {gpu}", fontsize=10)
    save(figure, path)


def memory_rows(rows: Rows) -> dict[int, Rows]:
    """Steps that a net remembers -> the rows of its forward pass, of the longest sequences that were measured."""
    found: dict[int, Rows] = {}
    for row in rows:
        keys = parse_case(row["case"])
        if "memory" in keys and row["metric"] == "forward":
            found.setdefault(int(keys["memory"]), []).append(row)
    return dict(sorted(found.items()))


def draw_memory(rows: Rows, path: Path) -> None:
    """The time of a forward pass in chunks of time over how many steps the net remembers, beside the scan's, which is
    one step after the other, and torch.nn's."""
    found = memory_rows(rows)
    one = next(iter(found.values()))[0]
    keys = parse_case(one["case"])
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    axes.plot(list(found), [float(rs[0]["weft"]) for rs in found.values()], "o-", color=WEFT_COLOR, label="newton")
    for peer, style in (("scan", "--"), ("torch.nn", ":")):
        times = {m: float(r["peer_value"]) for m, rs in found.items() for r in rs if r["peer"] == peer}
        axes.plot(list(times), list(times.values()), style, color=PEER_COLOR, label=peer)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="major", alpha=0.3)
    axes.set_xlabel("steps until two starts agree to $2^{-22}$")
    axes.set_ylabel("forward pass, ms")
    axes.legend(frameon=False, fontsize=8)
    title = f"{NAMES[keys['cell']]}, H {keys['H']}, B {keys['B']}, T {keys['T']}, {one['gpu']}"
    axes.set_title(title, fontsize=10)
    save(figure, path)


def grid_summary(rows: Rows) -> str:
    """How the rnn engine's grid is spread, in a sentence."""
    grid = sorted(rnn_targets.grid_rows(rows).values(), key=lambda row: float(row["ratio"]))
    ends = [f"{ratio_of(row)} ({describe(row['case'])})" for row in (grid[0], grid[-1])]
    mean = rnn_targets.geometric_mean(grid)
    return (
        f"Training step, {len(grid)} cases on {grid[0]['gpu']}: torch.nn takes {mean:.3g} times as "
        f"long in the geometric mean, from {ends[0]} to {ends[1]}."
    )


def grid_table(rows: Rows) -> str:
    """The grid as reStructuredText: Weft's milliseconds and the ratio, a line per cell, dtype and batch."""
    grid = rnn_targets.grid_rows(rows)
    title = f"{next(iter(grid.values()))['gpu']}: forward + backward, ms (torch.nn's time over it)"
    table = [["layer", *(f"H {H}" for H in rnn_cases.GRID_H)]]
    groups: dict[tuple[str, str, int], dict[int, str]] = {}
    for case in rnn_cases.grid_cases():
        row = grid.get(case.name)
        if row:
            groups.setdefault((case.cell, case.dtype, case.B), {})[case.H] = f"{row['weft']} ({ratio_of(row)})"
    for (cell, dtype, B), values in groups.items():
        table.append([f"{NAMES[cell]}, {dtype}, B {B}", *(values.get(H, "") for H in rnn_cases.GRID_H)])
    return rst_table(title, table)
