"""Draws the figures and tables of the README and the docs from benchmarks/results, and from nothing else.

``python -m benchmarks.plot`` rewrites the README's block of results and its figures; the docs' build calls
`write_docs`. Without rows both say so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from benchmarks import rnn
from benchmarks.common import RESULTS, ROOT, parse_case, read_rows
from benchmarks.figures import HEADER, Results, Row, by_hardware, cells_of
from benchmarks.figures import offload as offload_figures
from benchmarks.figures import rnn as rnn_figures
from benchmarks.figures import scan as scan_figures
from benchmarks.figures import sparse as sparse_figures
from benchmarks.figures import vertex as vertex_figures

README = ROOT / "README.md"
RNN_FIGURE = ROOT / "docs" / "images" / "rnn_speedup.svg"
BEGIN, END = "<!-- results: begin, written by `python -m benchmarks.plot` -->", "<!-- results: end -->"
NO_ROWS = "Rows appear here as they are measured; there are none yet."
ROOMS: dict[str, ModuleType] = {
    "rnn": rnn_figures,
    "scan": scan_figures,
    "sparse": sparse_figures,
    "vertex": vertex_figures,
    "offload": offload_figures,
}
# Room, case, metric, peers (None: all of them): one of each kind, beside the worst.
README_ROWS = (
    ("rnn", "cell=gru device=cuda dtype=bf16 H=512 B=16 T=1024", "forward_backward", None),
    ("rnn", "cell=gru device=cuda dtype=fp32 H=128 B=1 T=1", "decode", None),
    ("rnn", "cell=gru device=cpu dtype=fp32 H=512 B=32 T=256 threads=2", "forward_backward", None),
    ("scan", "cell=rnn_tanh device=cuda dtype=fp32 H=20 B=16 T=30000 inputs=1", "backward", None),
    ("sparse", "model=vgg11_pruned device=cuda dtype=fp32 B=1 schedule=auto", "input_gradients_captured", None),
    ("vertex", "model=treelstm device=cuda dtype=fp32 H=256 B=25 executor=batched", "forward_backward", None),
    ("offload", "model=vgg19 device=cuda dtype=fp32 B=64 budget=0", "step", ("floor", "plain", "save_on_cpu")),
)


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]], alignment: str) -> str:
    rule = ["---:" if side == "r" else "---" for side in alignment]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def readme_rows(results: Results) -> list[Row]:
    """The rows of the README's table, as far as they were measured; first that of the layers' grid where Weft gains
    least."""
    grid = rnn.grid_rows(results.get("rnn", ())).values()
    found = [min(grid, key=lambda row: float(row["ratio"]))] if grid else []
    for room, case, metric, peers in README_ROWS:
        rows = (row for row in results.get(room, ()) if (row["case"], row["metric"]) == (case, metric))
        found += [row for row in rows if peers is None or row["peer"] in peers]
    return found


def readme_block(results: Results) -> str:
    """What stands between the README's markers: the figure, how the grid is spread, and a few rows of all rooms."""
    parts = []
    grid = results.get("rnn", ())
    if rnn.grid_rows(grid):
        alt = "Speed-up of a training step over torch.nn by cell, dtype, hidden size and batch"
        parts += [_markdown_image(alt, RNN_FIGURE), rnn_figures.grid_summary(grid)]
    rows = readme_rows(results)
    if rows:
        measured_on = " and ".join(by_hardware(rows))
        parts += [_markdown(HEADER, map(cells_of, rows), "llrrr"), f"Measured on {measured_on}."]
    models, lines = scan_figures.language_models(results.get("scan", ()))
    if models:
        seconds = parse_case(models[0]["case"])["seconds"]
        text = f"`examples/char_lm.py --cell mingru` trains a GRU and a stack of minGRUs, here for {seconds} s each"
        table = _markdown(["character model", "bits per character", "characters/s"], lines, "lrr")
        parts += [f"{text} ({' and '.join(by_hardware(models))}):", table]
    return "\n\n".join(parts or [NO_ROWS])


def _markdown_image(alt: str, path: Path) -> str:
    return f"![{alt}]({path.relative_to(ROOT).as_posix()})"


def with_block(readme: str, block: str) -> str:
    """The README with `block` between its markers."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def read_results() -> Results:
    """The rows of every file of results, by its name."""
    names = {"rnn", "scan", "scan_auto", *ROOMS}
    return {name: read_rows(RESULTS / f"{name}.csv") for name in sorted(names)}


def write_readme() -> None:
    results = read_results()
    README.write_text(with_block(README.read_text(), readme_block(results)))
    if rnn.grid_rows(results["rnn"]):
        rnn_figures.draw_speedup(results["rnn"], RNN_FIGURE)


def write_docs(folder: Path) -> None:
    """Every room's figures, and ``<room>.rst`` that shows them; the page that includes these lies beside `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    results = read_results()
    for room, module in ROOMS.items():
        parts = module.page(results, folder)
        (folder / f"{room}.rst").write_text("\n\n".join(parts or [NO_ROWS]) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.parse_args(arguments)
    write_readme()


if __name__ == "__main__":
    main()
