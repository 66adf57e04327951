"""The cases that benchmarks.rnn measures: a grid, single ones beyond it, layers of heads, cells, shared processors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common import CPU_THREADS
from benchmarks.heads import HeadsCase
from benchmarks.layers import LayerCase

GRID_CELLS = ("rnn_tanh", "gru", "lstm")
GRID_DTYPES = ("fp16", "bf16", "fp32")
GRID_H = (128, 256, 512, 1024)
GRID_B = (1, 16, 64)
GRID_T = 1024
FORWARD_B = 16


@dataclass(frozen=True)
class RnnCase(LayerCase):
    """Layers with as many inputs as hidden units, which the name then leaves out, and no initial state."""

    inputs: int = 0
    initial_state: bool = False

    def __post_init__(self) -> None:
        if self.inputs == 0:
            object.__setattr__(self, "inputs", self.H)

    def keys(self) -> dict[str, Any]:
        keys = super().keys()
        if self.inputs == self.H:
            del keys["inputs"]
        return keys


def grid_cases() -> Iterator[RnnCase]:
    for cell, dtype, H, B in itertools.product(GRID_CELLS, GRID_DTYPES, GRID_H, GRID_B):
        yield RnnCase(cell, H, B, GRID_T, dtype=dtype)


LARGE = RnnCase("gru", 2048, 32, 1024, dtype="bf16")
PACKED = RnnCase("lstm", 512, 32, 1024, dtype="bf16", layers=2, directions=2, layout="packed")
LONG = RnnCase("rnn_tanh", 20, 16, 30000, inputs=1)


INFERENCE = RnnCase("gru", 512, 1, 1024, dtype="bf16")
DECODE = tuple(RnnCase(cell, 128, 1, 1, dtype=dtype) for cell in ("gru", "lstm") for dtype in ("fp32", "bf16"))
STEPS = (
    RnnCase("gru", 512, 16, 1024, dtype="bf16"),
    RnnCase("lstm", 512, 16, 1024, dtype="fp16"),
    RnnCase("lstm", 1024, 16, 1024, dtype="bf16"),
)
CPU = tuple(
    RnnCase(cell, H, B, 256, device="cpu", threads=CPU_THREADS)
    for cell, H, B in (("gru", 128, 8), ("lstm", 128, 8), ("gru", 512, 32))
)


HEADS = tuple(
    HeadsCase(cell, H, 16, 1024, dtype=dtype, heads=heads)
    for dtype in ("bf16", "fp16", "fp32")
    for cell, H, heads in (("slstm", 768, 4), ("slstm", 768, 1), ("lstm", 1024, 8), ("gru", 2048, 4))
)
HEADS_CPU = (HeadsCase("slstm", 256, 16, 256, device="cpu", heads=4, threads=CPU_THREADS),)


@dataclass(frozen=True)
class LoadedCase(RnnCase):
    """Beside `load` busy processes, each on a thread of its own."""

    load: int = 0

    def keys(self) -> dict[str, Any]:
        return {**super().keys(), **({"load": self.load} if self.load else {})}


LOADED = (
    LoadedCase("lstm", 256, 8, 100, inputs=128, device="cpu", threads=CPU_THREADS, load=2),
    LoadedCase("gru", 256, 8, 100, inputs=128, device="cpu", threads=CPU_THREADS, load=2),
    LoadedCase("lstm", 512, 1, 100, inputs=128, device="cpu", threads=CPU_THREADS, load=2),
    LoadedCase("lstm", 256, 8, 100, inputs=128, device="cpu", threads=2 * len(os.sched_getaffinity(0))),
)


@dataclass(frozen=True)
class CellCase(RnnCase):
    """A cell called once for each of T steps, which a loop in Python chains."""

    def keys(self) -> dict[str, Any]:
        keys = super().keys()
        return {"model": f"{keys.pop('cell')}_cell", **keys}


CELL_STEPS = 50


def cell_cases(device: str) -> Iterator[CellCase]:
    threads = CPU_THREADS if device == "cpu" else None
    for cell, dtype, H, B in itertools.product(GRID_CELLS, ("fp32", "bf16"), (128, 512, 1024), (1, 32)):
        yield CellCase(cell, H, B, CELL_STEPS, dtype=dtype, device=device, threads=threads)
