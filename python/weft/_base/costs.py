"""What work takes on GPUs: ``weft/costs/<gpu>.json``, one file for every GPU that was measured, written by ``python -m
benchmarks.fit``.

A file has ``gpu``, what the driver tells of it (name, capability 90 for 9.0, multiprocessors, clock_mhz and
bandwidth_gbs), and ``costs``: tables of numbers. Each table says ``from`` what its numbers are, and has them by what
they go with on another GPU: ``clock``, ``chip`` (clock and multiprocessors), ``memory`` (bandwidth), ``fixed``
(nothing). All are microseconds, but for shares and limits under ``fixed``.

The library keeps them for its own choices, and scales those of the nearest GPU where there is no file, see
csrc/common/costs.h.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _C

__all__ = ["FOLDER", "Costs", "of", "reference"]

FOLDER = Path(__file__).parents[1] / "costs"
Tables = dict[str, dict[str, list[float]]]


class Costs(NamedTuple):
    """The costs of one GPU."""

    measured_on: str
    """The GPU that they were measured on."""
    extrapolated: bool
    """Whether that is another."""
    tables: Tables
    """Table -> name -> numbers."""

    def number(self, table: str, name: str) -> float:
        return self.tables[table][name][0]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the driver tells of a file's GPU, and its tables."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["gpu"], found["costs"]


def add(path: Path) -> None:
    """Let the library know a file."""
    gpu, tables = read(path)
    _C.common.add_costs({name: _by_kind(table) for name, table in tables.items()}, **gpu)


def _by_kind(table: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    return {
        kind: {name: value if isinstance(value, list) else [value] for name, value in numbers.items()}
        for kind, numbers in table.items()
        if kind != "from"
    }


def of(index: int | None) -> Costs:
    """The costs of a GPU, None for the current one. Without GPUs those that were measured, as they are."""
    if not torch.cuda.is_available() or not hasattr(_C.common, "gpu_facts"):
        return reference()
    return _of(torch.cuda.current_device() if index is None else index)


@functools.cache
def _of(index: int) -> Costs:
    return Costs(*_C.common.costs_of(**_C.common.gpu_facts(index)))


@functools.cache
def reference() -> Costs:
    """The costs of the first file's GPU."""
    return Costs(*_C.common.costs_of())


for _path in sorted(FOLDER.glob("*.json")):
    add(_path)
