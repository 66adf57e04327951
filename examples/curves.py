"""Draws what the examples have measured along the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

Point = tuple[float, float]


def draw(
    path: Path, title: str, curves: Mapping[str, Sequence[Point]], x: str = "step", y: str = "training loss"
) -> None:
    """A figure with a line for each curve of points (x, y), written to `path`; says so."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="o" if len(points) < 20 else None)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"drawn to {path}")
