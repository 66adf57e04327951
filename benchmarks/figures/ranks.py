"""The page of scans over ranks: what many are predicted to give, from one rank's measured part, and the tables."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import weft.distributed as wd

from benchmarks.common import parse_case
from benchmarks.figures import PEER_COLOR, WEFT_COLOR, Results, Row, Rows, image, rst_tables, save

RANKS = [2**k for k in range(11)]
STEPS = 1 << 20
"""Of the whole sequence, where it is cut."""


def page(results: Results, folder: Path) -> list[str]:
    rows = results.get("ranks", ())
    parts = []
    if part := measured_part(rows):
        draw_scaling(part, folder / "ranks_scaling.svg")
        parts.append(image(folder / "ranks_scaling.svg"))
    return [*parts, rst_tables(rows)] if rows else []


def measured_part(rows: Rows) -> Row | None:
    """The longest slice of a diagonal scan that forgets, forward, on a GPU."""
    found = [
        (int(keys["T"]), row)
        for row in rows
        for keys in [parse_case(row["case"])]
        if (keys["device"], keys.get("layout"), keys.get("A"), row["metric"]) == ("cuda", "diagonal", "0.8", "forward")
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def predictions(part: Row) -> tuple[list[wd.Prediction], list[float]]:
    """One sequence of STEPS steps over RANKS ranks, and the efficiency where each rank has a slice as measured."""
    keys = parse_case(part["case"])
    alone, ranks = float(part["peer_value"]) / 1e3, float(part["weft"]) / 1e3
    fixup, sent = max(ranks - alone, 0.0), 8 * int(keys["B"]) * int(keys["H"])
    strong = [wd.predict(alone * STEPS / int(keys["T"]), n, sent, fixup=fixup) for n in RANKS]
    weak = [wd.predict(alone * n, n, sent, fixup=fixup).efficiency for n in RANKS]
    return strong, weak


def draw_scaling(part: Row, path: Path) -> None:
    strong, weak = predictions(part)
    keys = parse_case(part["case"])
    figure, (times, efficiency) = plt.subplots(1, 2, figsize=(8.4, 3.4))
    times.plot(RANKS, [1e3 * p.seconds for p in strong], color=WEFT_COLOR, marker="o", label="predicted")
    times.plot(RANKS, [1e3 * strong[0].seconds / n for n in RANKS], color=PEER_COLOR, label="the work alone")
    times.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms", title=f"{STEPS:,} steps".replace(",", " "))
    efficiency.plot(RANKS, [p.efficiency for p in strong], color=WEFT_COLOR, marker="o", label="one sequence, cut")
    efficiency.plot(RANKS, weak, color="#2563eb", marker="s", label=f"{keys['T']} steps on every rank")
    efficiency.set(xscale="log", xlabel="ranks", ylabel="efficiency, predicted", ylim=(0, 1.05))
    for axes in (times, efficiency):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Predicted: diagonal scan, fp32, B {keys['B']}, H {keys['H']}")
    save(figure, path)
