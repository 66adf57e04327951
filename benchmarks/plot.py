"""Draws the figures and tables of the README and the docs from benchmarks/results, and from nothing else.

``python -m benchmarks.plot`` rewrites the README's block of results and its figures; the docs' build calls
`write_docs`. Without rows both say so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks import rnn
from benchmarks.common import RESULTS, ROOT, parse_case, read_rows, significant
from benchmarks.scan import GRID_B, GRID_CELLS, GRID_H, GRID_T

README = ROOT / "README.md"
RNN_FIGURE = ROOT / "docs" / "images" / "rnn_speedup.svg"
BEGIN, END = "<!-- results: begin, written by `python -m benchmarks.plot` -->", "<!-- results: end -->"
NO_ROWS = "Rows appear here as they are measured; there are none yet."
NAMES = {"rnn_tanh": "tanh RNN", "rnn_relu": "ReLU RNN", "gru": "GRU", "lstm": "LSTM", "linear_scan": "linear_scan"}
METRICS = {
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward + backward",
    "peak_memory": "peak memory of a step",
    "memory_beyond_torch": "memory beyond torch's",
    "error": "error against fp64",
    "inference": "forward without gradients",
    "decode": "one step per call",
    "step_forward": "a step of the forward pass",
}
# Room, case, metric: one of each kind, beside the worst.
README_ROWS = (
    ("rnn", "cell=gru device=cuda dtype=bf16 H=512 B=16 T=1024", "forward_backward"),
    ("rnn", "cell=gru device=cuda dtype=fp32 H=128 B=1 T=1", "decode"),
    ("rnn", "cell=gru device=cpu dtype=fp32 H=512 B=32 T=256 threads=2", "forward_backward"),
    ("scan", "cell=rnn_tanh device=cuda dtype=fp32 H=20 B=16 T=30000 inputs=1", "backward"),
)
PEERS = {
    "gate_activations": "bytes of the gates' activations",
    "floor": "floor of the bandwidth",
    "exchange_floor": "floor of the exchange",
}
DTYPE_COLORS = {"fp16": "#2563eb", "bf16": "#c2410c", "fp32": "#15803d"}

# The same rows give the same file, so that a figure changes only with what it shows.
plt.rcParams.update({"svg.hashsalt": "weft", "svg.fonttype": "none", "figure.dpi": 100, "font.size": 10})

Row = Mapping[str, str]


def describe(case: str) -> str:
    """A case in words: ``tanh RNN, H 20, B 16, T 1000, fp32, 1 input``."""
    keys = parse_case(case)
    words = [NAMES.get(name, name) for name in (keys.get("cell"), keys.get("op"), keys.get("model")) if name]
    words += [keys["layout"]] if "layout" in keys else []
    words += [f"{key} {keys[key]}" for key in ("H", "B", "T") if key in keys]
    words += [keys["dtype"]]
    words += [f"{keys['layers']} layers"] if "layers" in keys else []
    words += ["both directions"] if keys.get("directions") == "2" else []
    if "inputs" in keys:
        words.append("1 input" if keys["inputs"] == "1" else f"{keys['inputs']} inputs")
    words += [f"{keys['threads']} threads"] if "threads" in keys else []
    words += [f'algorithm "{keys["algorithm"]}"'] if "algorithm" in keys else []
    return ", ".join(words)


def quantity(value: str, unit: str) -> str:
    """A value with its unit, bytes in MB."""
    if unit == "bytes":
        return f"{significant(float(value) / 1e6, 3)} MB"
    return value if unit == "relative" else f"{value} {unit}"


def cells_of(row: Row) -> list[str]:
    """One line of a table."""
    peer = PEERS.get(row["peer"], row["peer"])
    measured = [quantity(row["weft"], row["unit"]), f"{peer}: {quantity(row['peer_value'], row['unit'])}"]
    return [describe(row["case"]), METRICS.get(row["metric"], row["metric"]), *measured, _ratio(row)]


def _ratio(row: Row) -> str:
    return f"{significant(float(row['ratio']), 3)}x" if row["ratio"] else ""


HEADER = ["case", "what", "Weft", "peer", "ratio"]


def by_hardware(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows under the name of what they were measured on, GPUs first."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: parse_case(row["case"])["device"] != "cuda"):
        on_gpu = parse_case(row["case"])["device"] == "cuda"
        software = f"torch {row['torch']}" + (f", CUDA {row['cuda']}" if on_gpu else "")
        groups.setdefault(f"{row['gpu']}, {software}", []).append(row)
    return groups


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]], alignment: str) -> str:
    rule = ["---:" if side == "r" else "---" for side in alignment]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def rst_tables(rows: Sequence[Row]) -> str:
    parts = []
    for hardware, group in by_hardware(rows).items():
        lines = [f".. list-table:: {hardware}", "   :header-rows: 1", ""]
        for line in [HEADER, *map(cells_of, group)]:
            lines += [("   * - " if i == 0 else "     - ") + cell for i, cell in enumerate(line)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def backward_points(rows: Sequence[Row]) -> list[Row]:
    """The tanh RNN's backward pass over growing T on a GPU; all else as most of its rows have it."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        keys = parse_case(row["case"])
        same = keys.get("cell") == "rnn_tanh" and keys["device"] == "cuda" and "algorithm" not in keys
        if same and row["metric"] == "backward" and row["peer"] == "torch.nn":
            keys.pop("T")
            alike.setdefault((row["gpu"], *map("=".join, keys.items())), []).append(row)
    return max(alike.values(), key=len, default=[])


def draw_backward(rows: Sequence[Row], path: Path) -> None:
    """Time of the backward pass against the sequence length, Weft beside torch.nn."""
    points = sorted((int(parse_case(row["case"])["T"]), row) for row in backward_points(rows))
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    steps = [T for T, _ in points]
    axes.loglog(steps, [float(row["peer_value"]) for _, row in points], "o-", color="#888888", label="torch.nn (cuDNN)")
    axes.loglog(steps, [float(row["weft"]) for _, row in points], "o-", color="#c2410c", label="Weft")
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
    _save(figure, path)


def draw_grid(rows: Sequence[Row], path: Path) -> None:
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
    _save(figure, path)


def draw_speedup(rows: Sequence[Row], path: Path) -> None:
    """How many times faster than torch.nn a training step of the rnn engine's grid is: over H, a line per dtype, a
    panel per cell and batch."""
    ratios = {}
    for row in rnn.grid_rows(rows).values():
        keys = parse_case(row["case"])
        ratios[keys["cell"], keys["dtype"], int(keys["H"]), int(keys["B"])] = float(row["ratio"])
    figure, panels = plt.subplots(
        len(rnn.GRID_B), len(rnn.GRID_CELLS), figsize=(8.6, 7), sharex=True, sharey=True, layout="constrained"
    )
    positions = range(len(rnn.GRID_H))
    for line, B in zip(panels, rnn.GRID_B, strict=True):
        for axes, cell in zip(line, rnn.GRID_CELLS, strict=True):
            axes.axhline(1, color="#888888", linewidth=1)
            for dtype in rnn.GRID_DTYPES:
                values = [ratios.get((cell, dtype, H, B), float("nan")) for H in rnn.GRID_H]
                axes.plot(positions, values, "o-", color=DTYPE_COLORS[dtype], markersize=4, label=dtype)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xticks(positions, rnn.GRID_H)
            axes.set_title(f"{NAMES[cell]}, B {B}", fontsize=9)
            axes.grid(True, which="major", alpha=0.3)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.supxlabel("hidden units H")
    figure.supylabel("time of torch.nn / time of Weft")
    gpu = next(iter(rnn.grid_rows(rows).values()))["gpu"]
    figure.suptitle(f"training step, T {rnn.GRID_T}, {gpu}", fontsize=10)
    _save(figure, path)


def grid_summary(rows: Sequence[Row]) -> str:
    """How the rnn engine's grid is spread, in a sentence."""
    grid = sorted(rnn.grid_rows(rows).values(), key=lambda row: float(row["ratio"]))
    ends = [f"{_ratio(row)} ({describe(row['case'])})" for row in (grid[0], grid[-1])]
    return (
        f"Training step, {len(grid)} cases on {grid[0]['gpu']}: torch.nn takes {rnn.geometric_mean(grid):.3g} times as "
        f"long in the geometric mean, from {ends[0]} to {ends[1]}."
    )


def rnn_grid_table(rows: Sequence[Row]) -> str:
    """The grid as reStructuredText: Weft's milliseconds and the ratio, a line per cell, dtype and batch."""
    grid = rnn.grid_rows(rows)
    lines = [f".. list-table:: {next(iter(grid.values()))['gpu']}: forward + backward, ms (torch.nn's time over it)"]
    lines += ["   :header-rows: 1", ""]
    table = [["layer", *(f"H {H}" for H in rnn.GRID_H)]]
    groups: dict[tuple[str, str, int], dict[int, str]] = {}
    for case in rnn.grid_cases():
        row = grid.get(case.name)
        if row:
            groups.setdefault((case.cell, case.dtype, case.B), {})[case.H] = f"{row['weft']} ({_ratio(row)})"
    for (cell, dtype, B), values in groups.items():
        table.append([f"{NAMES[cell]}, {dtype}, B {B}", *(values.get(H, "") for H in rnn.GRID_H)])
    for line in table:
        lines += [f"{'   * -' if i == 0 else '     -'} {cell}".rstrip() for i, cell in enumerate(line)]
    return "\n".join(lines)


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def readme_rows(results: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The rows of the README's table, as far as they were measured; first that of the layers' grid where Weft gains
    least."""
    grid = rnn.grid_rows(results.get("rnn", ())).values()
    found = [min(grid, key=lambda row: float(row["ratio"]))] if grid else []
    for room, case, metric in README_ROWS:
        found += [row for row in results.get(room, ()) if (row["case"], row["metric"]) == (case, metric)]
    return found


def readme_block(results: Mapping[str, Sequence[Row]]) -> str:
    """What stands between the README's markers: the figure, how the grid is spread, and a few rows of all rooms."""
    parts = []
    grid = results.get("rnn", ())
    if rnn.grid_rows(grid):
        alt = "Speed-up of a training step over torch.nn by cell, dtype, hidden size and batch"
        parts += [_markdown_image(alt, RNN_FIGURE), grid_summary(grid)]
    rows = readme_rows(results)
    if rows:
        measured_on = " and ".join(by_hardware(rows))
        parts += [_markdown(HEADER, map(cells_of, rows), "llrrr"), f"Measured on {measured_on}."]
    return "\n\n".join(parts or [NO_ROWS])


def _markdown_image(alt: str, path: Path) -> str:
    return f"![{alt}]({path.relative_to(ROOT).as_posix()})"


def with_block(readme: str, block: str) -> str:
    """The README with `block` between its markers."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def read_results() -> dict[str, list[Row]]:
    """The rows of every room that the README shows."""
    return {room: read_rows(RESULTS / f"{room}.csv") for room in sorted({"rnn", *(row[0] for row in README_ROWS)})}


def write_readme() -> None:
    results = read_results()
    README.write_text(with_block(README.read_text(), readme_block(results)))
    if rnn.grid_rows(results["rnn"]):
        draw_speedup(results["rnn"], RNN_FIGURE)


def write_docs(folder: Path) -> None:
    """Figures, and ``scan.rst`` and ``rnn.rst`` that show them; the page that includes these lies beside `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, grid = read_rows(RESULTS / "scan.csv"), read_rows(RESULTS / "scan_auto.csv")
    parts = []

    def figure(present: bool, draw: Callable[[Sequence[Row], Path], None], data: Sequence[Row], name: str) -> None:
        if present:
            draw(data, folder / f"{name}.svg")
            parts.append(f".. image:: {folder.name}/{name}.svg")

    figure(bool(rows and backward_points(rows)), draw_backward, rows, "scan_backward")
    if rows:
        parts.append(rst_tables(rows))
    figure(any(parse_case(row["case"])["device"] == "cuda" for row in grid), draw_grid, grid, "scan_auto")
    (folder / "scan.rst").write_text("\n\n".join(parts or [NO_ROWS]) + "\n")

    rows, parts = read_rows(RESULTS / "rnn.csv"), []
    if rnn.grid_rows(rows):
        figure(True, draw_speedup, rows, "rnn_speedup")
        parts += [grid_summary(rows), rnn_grid_table(rows)]
    others = [row for row in rows if row["case"] not in rnn.grid_rows(rows) or row["metric"] != "forward_backward"]
    if others:
        parts.append(rst_tables(others))
    (folder / "rnn.rst").write_text("\n\n".join(parts or [NO_ROWS]) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.parse_args(arguments)
    write_readme()


if __name__ == "__main__":
    main()
