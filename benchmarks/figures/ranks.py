"""The page of scans over ranks: what many are predicted to give, from one rank's measured part, and the tables."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import weft.distributed as wd

from benchmarks.common import parse_case
from benchmarks.figures import PEER_COLOR, WEFT_COLOR, Results, Row, Rows, image, rst_tables, save
from benchmarks.links import gathered_beyond
from benchmarks.together import WEAK

RANKS = [2**k for k in range(11)]
STEPS = 1 << 20
"""Of the whole sequence, where it is cut."""


def page(results: Results, folder: Path) -> list[str]:
    rows = results.get("ranks", ())
    parts = []
    if part := measured_part(rows):
        gpu = part["gpu"]
        others = {other: found for other in _gpus(rows) if other != gpu and (found := measured(rows, other))}
        draw_scaling(part, fixups(rows, gpu), measured(rows, gpu), others, folder / "ranks_scaling.svg")
        parts.append(image(folder / "ranks_scaling.svg"))
        if weak := measured_weak(rows, gpu):
            draw_weak(weak, folder / "ranks_weak_scaling.svg")
            parts.append(image(folder / "ranks_weak_scaling.svg"))
    return [*parts, rst_tables(rows)] if rows else []


def _scans(rows: Rows, count: str) -> list[tuple[dict[str, str], Row]]:
    """Of a diagonal scan that forgets, forward, in float32 on GPUs, those whose case says `count` of ranks."""
    found = [(parse_case(row["case"]), row) for row in rows if row["metric"] == "forward"]
    wanted = {"device": "cuda", "dtype": "fp32", "layout": "diagonal", "A": "0.8"}
    return [(keys, row) for keys, row in found if count in keys and wanted.items() <= ({"A": "0.8"} | keys).items()]


def _gpus(rows: Rows) -> list[str]:
    return sorted({row["gpu"] for row in rows})


def _short(gpu: str) -> str:
    """NVIDIA H100 80GB HBM3: H100."""
    return gpu.removeprefix("NVIDIA ").split(" ")[0]


def measured_part(rows: Rows) -> Row | None:
    """One rank's part: the longest slice, of a GPU that was measured together with others if there is one."""
    together = {row["gpu"] for _, row in _scans(rows, "gpus")}
    found = [(row["gpu"] in together, int(keys["T"]), row) for keys, row in _scans(rows, "ranks")]
    return max(found, key=lambda entry: entry[:2])[2] if found else None


class Measured(NamedTuple):
    """One sequence over several GPUs: how many, its steps, the time of all of them, of one, and of a slice alone."""

    gpus: int
    steps: int
    milliseconds: float
    one: float
    slice: float


def measured(rows: Rows, gpu: str) -> list[Measured]:
    """Of every number of GPUs and every sequence, in this order."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for keys, row in _scans(rows, "gpus"):
        if row["gpu"] == gpu:
            times = found.setdefault((int(keys["gpus"]), int(keys["T"])), {"ranks": float(row["weft"])})
            times[row["peer"]] = float(row["peer_value"])
    return [
        Measured(*sizes, times["ranks"], times["one_rank"], times["slice"])
        for sizes, times in sorted(found.items())
        if {"one_rank", "slice"} <= times.keys()
    ]


def same_sequence(found: list[Measured]) -> list[Measured]:
    """Of the sequence that the most numbers of GPUs have, the longest of these."""
    steps = [m.steps for m in found]
    most = max(steps, key=lambda s: (steps.count(s), s))
    return [m for m in found if m.steps == most]


def longest(found: list[Measured]) -> list[Measured]:
    """Of each number of GPUs its longest sequence."""
    return list({m.gpus: m for m in found}.values())


def measured_weak(rows: Rows, gpu: str) -> dict[str, dict[int, float]]:
    """Of slices of WEAK steps, by what ran and the number of GPUs: the time of a slice alone over that of all."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        keys = parse_case(row["case"])
        what = " ".join(keys[key] for key in ("op", "model", "layout") if key in keys)
        if row["gpu"] != gpu or row["peer"] != "slice" or row["metric"] not in ("forward", "step") or what not in WEAK:
            continue
        gpus = int(keys.get("gpus", 0))
        if keys["dtype"] == "fp32" and int(keys["T"]) == gpus * WEAK[what]:
            found.setdefault(what, {1: 1.0})[gpus] = float(row["ratio"])
    return found


def draw_weak(found: dict[str, dict[int, float]], path: Path) -> None:
    names = {
        "linear_scan diagonal": "diagonal scan, forward",
        "linear_scan dense": "dense scan, H 20, forward",
        "mingru_stack": "training step of minGRUs",
    }
    figure, axes = plt.subplots(figsize=(5.2, 3.4))
    for (what, shares), marker in zip(sorted(found.items()), "os^", strict=False):
        gpus = sorted(shares)
        label = f"{names[what]}, {WEAK[what]} steps on every GPU"
        axes.plot(gpus, [shares[n] for n in gpus], marker=marker, label=label)
    axes.set(xlabel="GPUs of one host", ylabel="a slice alone over all ranks", ylim=(0, 1.05))
    axes.set_xticks(sorted({n for shares in found.values() for n in shares}))
    axes.legend(frameon=False, loc="lower left", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Weak scaling, measured")
    save(figure, path)


def fixups(rows: Rows, gpu: str) -> dict[int, float]:
    """Seconds of what a rank does once it knows the state that comes in, by the number of ranks; of the longest slice
    that was measured of each."""
    found: dict[int, tuple[int, float]] = {}
    for keys, row in _scans(rows, "ranks"):
        if row["gpu"] == gpu:
            more = max(float(row["weft"]) - float(row["peer_value"]), 0.0) / 1e3
            ranks = int(keys["ranks"])
            found[ranks] = max(found.get(ranks, (0, 0.0)), (int(keys["T"]), more))
    return {ranks: more for ranks, (_, more) in sorted(found.items())}


def predictions(part: Row, mending: dict[int, float], steps: int = STEPS) -> tuple[list[wd.Prediction], list[float]]:
    """One sequence of so many steps over RANKS ranks, and the efficiency where each rank has a slice as measured.
    `mending`: of :func:`fixups`; numbers between two that were measured are on a line."""
    keys = parse_case(part["case"])
    alone, sent = float(part["peer_value"]) / 1e3, 8 * int(keys["B"]) * int(keys["H"])
    after = {
        n: float(np.interp(n, list(mending), list(mending.values()))) + gathered_beyond(n, sent, wd.Link())
        for n in RANKS
    }
    strong = [wd.predict(alone * steps / int(keys["T"]), n, sent, fixup=after[n]) for n in RANKS]
    weak = [wd.predict(alone * n, n, sent, fixup=after[n]).efficiency for n in RANKS]
    return strong, weak


def draw_scaling(
    part: Row, mending: dict[int, float], found: list[Measured], others: dict[str, list[Measured]], path: Path
) -> None:
    """`others`: what GPUs of another kind gave, of which the efficiency alone can stand beside it."""
    alike = same_sequence(found) if found else []
    steps = alike[0].steps if found else STEPS
    strong, weak = predictions(part, mending, steps)
    keys = parse_case(part["case"])
    figure, (times, efficiency) = plt.subplots(1, 2, figsize=(8.4, 3.4))
    times.plot(RANKS, [1e3 * p.seconds for p in strong], color=WEFT_COLOR, label="predicted")
    times.plot(RANKS, [1e3 * strong[0].seconds / n for n in RANKS], color=PEER_COLOR, label="the work alone")
    times.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms", title=f"{steps:,} steps".replace(",", " "))
    efficiency.plot(RANKS, [p.efficiency for p in strong], color=WEFT_COLOR, label="one sequence, cut")
    efficiency.plot(RANKS, weak, color="#2563eb", label=f"{keys['T']} steps on every rank")
    efficiency.set(xscale="log", xlabel="ranks", ylabel="efficiency", ylim=(0, 1.05))
    if found:
        ends = longest(found)
        gpus = [m.gpus for m in ends]
        points = {"linestyle": "none", "marker": "o", "markeredgecolor": "black"}
        at = [1, *(m.gpus for m in alike)], [alike[0].one, *(m.milliseconds for m in alike)]
        times.plot(*at, color=WEFT_COLOR, label="measured", **points)
        shares = [m.one / (m.gpus * m.milliseconds) for m in ends]
        efficiency.plot(gpus, shares, color=WEFT_COLOR, label="measured", **points)
        efficiency.plot(gpus, [m.slice / m.milliseconds for m in ends], color="#2563eb", label="measured", **points)
    for (gpu, measured_there), marker in zip(others.items(), "s^vD", strict=False):
        ends = longest(measured_there)
        shares = [m.one / (m.gpus * m.milliseconds) for m in ends]
        efficiency.plot(
            [m.gpus for m in ends], shares, linestyle="none", marker=marker, markerfacecolor="none",
            markeredgecolor="black", label=f"measured, {_short(gpu)}",
        )  # fmt: skip
    for axes in (times, efficiency):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    title = "Predicted, and points measured on GPUs of one host" if found else "Predicted"
    figure.suptitle(f"{title}: {_short(part['gpu'])}, diagonal scan, fp32, B {keys['B']}, H {keys['H']}")
    save(figure, path)
