"""Draws the figures and tables of the README and the docs from benchmarks/results, and from nothing else.

``python -m benchmarks.plot`` rewrites the README's block of results, that of each page in docs/performance, and the
figures in docs/images. All are committed, so that they show wherever the source is read. Without rows a block says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from benchmarks import rnn_targets
from benchmarks.common import RESULTS, ROOT, read_rows, significant
from benchmarks.figures import Results, Row, by_hardware, quantity, ratio_of
from benchmarks.figures import offload as offload_figures
from benchmarks.figures import ranks as ranks_figures
from benchmarks.figures import rnn as rnn_figures
from benchmarks.figures import scan as scan_figures
from benchmarks.figures import sparse as sparse_figures
from benchmarks.figures import vertex as vertex_figures

README = ROOT / "README.md"
DOCS = ROOT / "docs"
RNN_FIGURE = DOCS / "images" / "rnn_speedup.svg"
BEGIN, END = "<!-- results: begin, written by `python -m benchmarks.plot` -->", "<!-- results: end -->"
PAGE_BEGIN, PAGE_END = ".. results: begin, written by `python -m benchmarks.plot`", ".. results: end"
NO_ROWS = "Rows appear here as they are measured; there are none yet."
ROOMS: dict[str, ModuleType] = {
    "rnn": rnn_figures,
    "scan": scan_figures,
    "sparse": sparse_figures,
    "vertex": vertex_figures,
    "offload": offload_figures,
    "ranks": ranks_figures,
}


class Line(NamedTuple):
    """A line of the README's table: a row in words, and why it comes out as it does."""

    what: str
    room: str
    case: str
    metric: str
    peer: str
    instead: str
    why: str


_VGG = "model=vgg19 device=cuda dtype=fp32 B=64 budget=50%"
README_LINES = (
    Line(
        "train a GRU: 512 units, 16 sequences of 1024 steps, bf16",
        "rnn", "cell=gru device=cuda dtype=bf16 H=512 B=16 T=1024", "forward_backward", "torch.nn", "torch.nn",
        "one kernel for all steps, the weights stay on the chip",
    ),
    Line(
        "backward pass of a tanh RNN: 20 units, 30,000 steps, fp32",
        "scan", "cell=rnn_tanh device=cuda dtype=fp32 H=20 B=16 T=30000 inputs=1", "backward", "torch.nn", "torch.nn",
        "pieces of the sequence run side by side",
    ),
    Line(
        "train a Tree-LSTM: 256 units, batches of 25 sentences, fp32",
        "vertex", "model=treelstm device=cuda dtype=fp32 H=256 B=25 executor=batched", "forward_backward", "captured",
        "a loop over the levels of one batch, in a CUDA graph",
        "two kernels for a level of all trees, or one for many levels",
    ),
    Line(
        "train VGG-19, 64 images, with half the memory for activations, fp32",
        "offload", _VGG, "step", "save_on_cpu", "torch's save_on_cpu, which moves all of them",
        "copies run beside compute, and only what has to move moves",
    ),
    Line(
        "the same step beside one that moves nothing",
        "offload", _VGG, "step", "plain", "no offload, all activations in memory",
        "below 1: this is the price, as the bus takes longer than the compute that could hide it",
    ),
)  # fmt: skip


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]], alignment: str) -> str:
    rule = ["---:" if side == "r" else "---" for side in alignment]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def readme_rows(results: Results) -> list[tuple[Line, Row]]:
    """The lines of the README's table with their rows, as far as they were measured; of several GPUs' the newest, of a
    day's the last by the name of its GPU."""
    found = []
    for line in README_LINES:
        wanted = line.case, line.metric, line.peer
        rows = [r for r in results.get(line.room, ()) if (r["case"], r["metric"], r["peer"]) == wanted]
        if rows:
            found.append((line, max(rows, key=lambda row: (row["date"], row["gpu"]))))
    return found


def _cells(line: Line, row: Row) -> list[str]:
    mine, peers = (quantity(significant(float(row[key]), 3), row["unit"]) for key in ("weft", "peer_value"))
    return [line.what, mine, f"{peers}: {line.instead}", ratio_of(row), line.why]


def _short(gpu: str) -> str:
    """H200 for "NVIDIA H200"."""
    return gpu.removeprefix("NVIDIA ").split()[0]


def readme_block(results: Results) -> str:
    """What stands between the README's markers: the figure, how the grid is spread, and a line for each engine."""
    parts = []
    grid = results.get("rnn", ())
    if rnn_targets.grid_rows(grid):
        alt = "Speed-up of a training step over torch.nn by cell, dtype, hidden size and batch"
        parts += [f"![{alt}]({RNN_FIGURE.relative_to(ROOT).as_posix()})", rnn_figures.grid_summary(grid)]
    rows = readme_rows(results)
    if rows:
        header, lines = ["what you run", "Weft", "instead", "gain", "why"], [_cells(*pair) for pair in rows]
        machines = by_hardware([row for _, row in rows])
        if len(machines) == 1:
            parts += [_markdown(header, lines, "lrlrl"), f"Measured on {next(iter(machines))}."]
        else:
            lines = [[what, _short(row["gpu"]), *rest] for (what, *rest), (_, row) in zip(lines, rows, strict=True)]
            parts += [_markdown([header[0], "on", *header[1:]], lines, "llrlrl")]
            parts += [f"Each line was measured, beside what it is compared with, on one GPU: {'; '.join(machines)}."]
    return "\n\n".join(parts or [NO_ROWS])


def with_block(text: str, block: str, begin: str = BEGIN, end: str = END) -> str:
    """The text with `block` between its markers."""
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{block}\n\n{end}{after}"


def page_block(room: str, results: Results, images: Path) -> str:
    """What stands between the markers of a room's page; draws the figures that it shows into `images`."""
    return "\n\n".join(ROOMS[room].page(results, images) or [NO_ROWS])


def read_results() -> Results:
    """The rows of every file of results, by its name."""
    names = {"rnn", "scan", "scan_auto", *ROOMS}
    return {name: read_rows(RESULTS / f"{name}.csv") for name in sorted(names)}


def write_readme() -> None:
    README.write_text(with_block(README.read_text(), readme_block(read_results())))


def write_docs(docs: Path = DOCS) -> None:
    """Every room's page in ``performance/``, between its markers, and its figures in ``images/``."""
    results = read_results()
    for room in ROOMS:
        page = docs / "performance" / f"{room}.rst"
        block = page_block(room, results, docs / "images")
        page.write_text(with_block(page.read_text(), block, PAGE_BEGIN, PAGE_END))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.parse_args(arguments)
    write_readme()
    write_docs()


if __name__ == "__main__":
    main()
