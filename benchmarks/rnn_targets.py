"""What the rnn engine has to reach, and what rows say of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.common import of_one_gpu, significant
from benchmarks.layers import LayerCase
from benchmarks.newton import AUTO_NEWTON, NEVER_FORGETS
from benchmarks.rnn_cases import CPU, DECODE, HEADS, HEADS_CPU, INFERENCE, LARGE, LONG, PACKED, RnnCase, grid_cases


class Target(NamedTuple):
    """A row and what it has to reach: a least ratio, or most microseconds per time step."""

    case: LayerCase
    metric: str
    least: float
    per_step: bool = False
    """`least` is not a ratio but the most microseconds per step."""
    peer: str = "torch.nn"


_LSTM_HALF = {H: RnnCase("lstm", H, 16, 1024, dtype="fp16") for H in (512, 1024)}
_BF16 = {cell: RnnCase(cell, 512, 16, 1024, dtype="bf16") for cell in ("lstm", "gru")}
TARGETS = (
    Target(_LSTM_HALF[512], "forward_backward", 1.8),
    Target(_LSTM_HALF[1024], "forward_backward", 1.2),
    *(Target(case, "forward_backward", 7.0) for case in _BF16.values()),
    *(Target(case, "forward_backward", 3.0, per_step=True) for case in _BF16.values()),
    Target(RnnCase("gru", 256, 16, 1024), "forward_backward", 8.0),
    Target(LARGE, "forward_backward", 2.0),
    Target(PACKED, "forward_backward", 8.0),
    Target(LONG, "forward", 3.0),
    Target(INFERENCE, "inference", 8.0),
    *(Target(case, "decode", {"fp32": 1.3, "bf16": 4.0}[case.dtype]) for case in DECODE),
    *(Target(case, "forward_backward", least) for case, least in zip(CPU, (4.0, 1.1, 1.2), strict=True)),
    *(Target(case, "forward_backward", 8.0, peer="captured") for case in HEADS if case.dtype == "bf16"),
    # FlashRNN's fused kernels have no GRU.
    *(
        Target(case, "forward_backward", 2.0, peer="flashrnn")
        for case in HEADS
        if case.dtype == "bf16" and case.cell != "gru"
    ),
    *(Target(case, "forward_backward", 8.0, peer="eager") for case in HEADS_CPU),
    *(Target(case, "forward", 1 / 1.1, peer="scan") for case in NEVER_FORGETS),
)
GRID_MEAN, GRID_WORST, AUTO_WORST = 5.0, 1.0, 1 / 1.1


def grid_rows(rows: Iterable[Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """The training steps of the grid, by case, on the GPU that most of the rows are from."""
    names = {case.name for case in grid_cases()}
    return {
        row["case"]: row
        for row in of_one_gpu(rows)
        if row["case"] in names and row["metric"] == "forward_backward" and row["peer"] == "torch.nn"
    }


def geometric_mean(rows: Iterable[Mapping[str, str]]) -> float:
    """Of the ratios."""
    return statistics.geometric_mean(float(row["ratio"]) for row in rows)


class Verdict(NamedTuple):
    """A target and what was measured; None where there is no row."""

    words: str
    value: float | None
    holds: bool | None


def verdicts(rows: Sequence[Mapping[str, str]]) -> list[Verdict]:
    """Every target against the rows; the grid's only where all of it was measured."""
    grid = list(grid_rows(rows).values())
    complete = len(grid) == sum(1 for _ in grid_cases())
    mean = geometric_mean(grid) if complete else None
    worst = min(float(row["ratio"]) for row in grid) if complete else None
    found = [
        Verdict(f"geometric mean of the grid, at least {GRID_MEAN:g}x", mean, mean and mean >= GRID_MEAN),
        Verdict(f"worst case of the grid, at least {GRID_WORST:g}x", worst, worst and worst >= GRID_WORST),
    ]
    # What the grid's GPU has not measured may be from another.
    present = {(row["case"], row["metric"], row["peer"]): row for row in [*rows, *of_one_gpu(rows)]}
    auto = [present.get((case.name, "forward", "scan")) for case in AUTO_NEWTON]
    lowest = min(float(row["ratio"]) for row in auto if row) if auto and all(auto) else None
    words = f'worst of {len(auto)} sequences that "auto" takes, at least {AUTO_WORST:.3g}x of scan'
    found.append(Verdict(words, lowest, lowest and lowest >= AUTO_WORST))
    for target in TARGETS:
        words = f"{target.case.name} {target.metric}" + (f" of {target.peer}" if target.peer != "torch.nn" else "")
        row = present.get((target.case.name, target.metric, target.peer))
        if target.per_step:
            value = 1e3 * float(row["weft"]) / target.case.T if row else None
            words += f", at most {target.least:g} us per step"
            found.append(Verdict(words, value, None if value is None else value <= target.least))
        else:
            value = float(row["ratio"]) if row else None
            words += f", at least {target.least:g}x"
            found.append(Verdict(words, value, None if value is None else value >= target.least))
    return found


def report(rows: Sequence[Mapping[str, str]]) -> None:
    """Prints how the grid is spread and every target."""
    grid = sorted(grid_rows(rows).values(), key=lambda row: float(row["ratio"]))
    if grid:
        print(f"\n{len(grid)} points of the grid: geometric mean {geometric_mean(grid):.2f}x, the worst:")
        for row in grid[:8]:
            print(f"  {row['ratio']:>7}x  {row['weft']:>8} ms  {row['case']}")
    print("\ntargets:")
    for words, value, holds in verdicts(rows):
        mark = "-" if holds is None else "pass" if holds else "FAIL"
        print(f"  {mark:<4}  {'' if value is None else significant(value, 3):>7}  {words}")
