"""The vertex engine's page: a training step over the batch size, what each option is worth, and its tables."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common import of_one_gpu, parse_case
from benchmarks.figures import PEER_COLOR, WEFT_COLOR, Results, Row, Rows, image, rst_tables, save
from benchmarks.nets import BATCHES, NETS

OPTIONS = ("lazy", "fuse", "stream")
LINES = {"eager": ("level loop", "-"), "captured": ("level loop in a CUDA graph", "--")}
EXECUTORS = {"reference": ":", "batched": "--", "persistent": "-.", "trainer": "-"}


def page(results: Results, folder: Path) -> list[str]:
    rows, parts = results["vertex"], []
    for rows_of, draw, name in (
        (batch_rows, draw_batches, "vertex_batches"),
        (executor_rows, draw_executors, "vertex_executors"),
        (ablation_rows, draw_ablation, "vertex_ablation"),
    ):
        shown = of_one_gpu(rows_of(rows))
        if shown:
            draw(shown, folder / f"{name}.svg")
            parts.append(image(folder / f"{name}.svg"))
    if rows:
        parts += filter(None, [six_nets(rows)])
        parts.append(rst_tables(rows))
    return parts


def batch_rows(rows: Rows) -> list[Row]:
    """Training steps of the Tree-LSTM of hidden size 256 in fp32 on a GPU, beside level loops."""
    keys = ((row, parse_case(row["case"])) for row in rows if row["metric"] == "forward_backward")
    same = {"model": "treelstm", "device": "cuda", "dtype": "fp32", "H": "256", "executor": "batched"}
    return [row for row, case in keys if row["peer"] in LINES and same.items() <= case.items() and "lazy" not in case]


def ablation_rows(rows: Rows) -> list[Row]:
    """Training steps with some options, beside one with none."""
    return [row for row in rows if row["peer"] == "none" and "lazy" in parse_case(row["case"])]


def executor_rows(rows: Rows) -> list[Row]:
    """Whole steps of the Trainer on the Tree-LSTM of hidden size 256, beside the loop under the other executors."""
    same = {"model": "treelstm", "device": "cuda", "dtype": "fp32", "H": "256", "executor": "trainer"}
    steps = [row for row in rows if row["metric"] == "step" and row["peer"] in EXECUTORS]
    return [row for row in steps if same.items() <= parse_case(row["case"]).items()]


def six_nets(rows: Rows) -> str:
    """How the persistent executor and the Trainer stand to "batched" over the six nets and their batches."""
    shown = []
    for executor, metric, what in (
        ("persistent", "forward_backward", "the persistent executor"),
        ("trainer", "step", "the Trainer"),
    ):
        asked = [row for row in rows if (row["metric"], row["peer"]) == (metric, "batched")]
        cases = [(parse_case(row["case"]), row) for row in asked]
        cases = [(case, row) for case, row in cases if case.get("executor") == executor]
        means = [row for case, row in cases if "nets" in case]
        if means:  # measured together
            mean = max(of_one_gpu(means), key=lambda row: (row["date"], int(parse_case(row["case"])["cases"])))
            keys, ratio, gpu, spread = parse_case(mean["case"]), float(mean["ratio"]), mean["gpu"], ""
            count, of_nets = int(keys["cases"]), int(keys["nets"])
            found = [row for _, row in cases if all(row[key] == mean[key] for key in ("gpu", "commit"))]
            found = [row for row in found if _of_nets(row)]
            found = found if len(found) == count else []  # some were measured anew since
        else:
            found = of_one_gpu(row for _, row in cases if _of_nets(row))
            ratios = [float(row["ratio"]) for row in found]
            if not ratios:
                continue
            count, ratio, gpu = len(ratios), statistics.geometric_mean(ratios), found[0]["gpu"]
            of_nets = len({parse_case(row["case"])["model"] for row in found})
            spread = f", from {min(ratios):.2f}x to {max(ratios):.2f}x"
        every = len(NETS) * len(BATCHES)
        counted = f"all {every}" if count == every else f"{count} of the {every}"
        sizes = sorted({int(parse_case(row["case"])["B"]) for row in found})
        left_out = [f"{of_nets} of the nets measured"] if of_nets < len(NETS) else []
        if sizes and len(sizes) < len(BATCHES):
            left_out.append(f"{'all ' if len(sizes) == 1 else ''}at B {', '.join(map(str, sizes))}")
        part = f" ({', '.join(left_out)})" if left_out else ""
        shown.append(
            f'``"batched"`` takes {ratio:.2f} times as long as {what}, the geometric mean of {counted} cases of '
            f"{len(NETS)} nets and {len(BATCHES)} batch sizes{part}, on {gpu}{spread}."
        )
    return "\n".join(shown)


def _of_nets(row: Row) -> bool:
    case = parse_case(row["case"])
    return case["model"] in NETS and int(case["B"]) in BATCHES


def draw_executors(rows: Rows, path: Path) -> None:
    """Time of a whole step over the number of trees, by each executor and by the Trainer."""
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        B = int(parse_case(row["case"])["B"])
        times.setdefault("trainer", {})[B] = float(row["weft"])
        times.setdefault(row["peer"], {})[B] = float(row["peer_value"])
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for name, style in EXECUTORS.items():
        points = sorted(times.get(name, {}).items())
        label = "Trainer" if name == "trainer" else f'"{name}"'
        color = PEER_COLOR if name == "reference" else WEFT_COLOR
        axes.plot([B for B, _ in points], [t for _, t in points], f"o{style}", color=color, label=label)
    points = sorted(times["trainer"])
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_xticks(points, [str(B) for B in points])
    axes.set_xlabel("trees per batch")
    axes.set_ylabel("training step with SGD, ms")
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    _title(figure, rows)
    save(figure, path)


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
