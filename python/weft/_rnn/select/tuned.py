"""What weft.tune has measured: remembered in a file, read once per process."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._base.machine import machine_name
from ..._base.paths import replace_file, versioned_cache_dir
from ..._version import __version__
from .case import Case
from .costs import products_flops

__all__ = ["Entry", "look_up", "path", "remember"]


class Entry(NamedTuple):
    """The measurement of one kind of case."""

    algorithm: str
    """The fastest."""
    microseconds: dict[str, float]
    """Of every algorithm that was measured."""


_entries: dict[str, Entry] | None = None


def path() -> Path:
    """``tune.json`` in this version's folder: of ``$WEFT_CACHE_DIR``, else of ``~/.cache/weft``."""
    return versioned_cache_dir() / "tune.json"


def look_up(case: Case) -> Entry | None:
    """What was measured for cases of this kind, or None. Nothing in the file can make this fail."""
    global _entries
    if _entries is None:
        _entries = _read()
    entry = _entries.get(_key(case)) if _entries else None
    return None if entry is None or entry.microseconds[entry.algorithm] > _absurd_us(case) else entry


def _absurd_us(case: Case) -> float:
    """Microseconds that no fastest algorithm takes on any machine: what is slower was measured while the machine was
    busy with something else, and is not believed. A millisecond, one for every ten steps, and 100 MFLOP/s."""
    steps = _bucket(case.steps or 0) * case.layers * case.directions
    largest = case._replace(steps=_bucket(case.steps or 0), batch=_bucket(case.batch or 0))
    return 1000 + (3 if case.trains else 1) * 100 * steps + 1e-2 * products_flops(largest)


def remember(case: Case, entry: Entry) -> None:
    """Keep an entry in this process and in the file; a file that cannot be written is a warning."""
    global _entries
    # What other processes have written since is kept; where two have measured the same, the last one counts.
    _entries = {**(_entries or {}), **_read(), _key(case): entry}
    text = json.dumps({key: e._asdict() for key, e in _entries.items()}, indent=1, sort_keys=True)
    try:
        replace_file(path(), text)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        warnings.warn(f"weft.tune: the measurement is kept in this process alone: {error}", stacklevel=4)


def _read() -> dict[str, Entry]:
    """The file's entries; those that are not well formed are left out, as is a file that is none."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
        return {key: entry for key, value in found.items() if (entry := _entry(value)) is not None}
    except (OSError, RuntimeError, ValueError, AttributeError):
        return {}


def _entry(value: Any) -> Entry | None:
    if not isinstance(value, dict) or not isinstance(value.get("microseconds"), dict):
        return None
    times = value["microseconds"]
    known = {"persistent", "scan", "newton", "torch", "reference"}
    if not times.keys() <= known or value.get("algorithm") not in times:
        return None
    if not all(isinstance(t, float) and math.isfinite(t) and t >= 0 for t in times.values()):
        return None
    return Entry(value["algorithm"], times)


def _key(case: Case) -> str:
    """What decides between algorithms, lengths and batches rounded up to powers of two."""
    parts = {
        "weft": __version__,
        "torch": torch.__version__,
        "device": machine_name(torch.device(case.device, case.index)),
        "cell": case.cell,
        "dtype": str(case.dtype).removeprefix("torch."),
        "tf32": int(case.tf32),
        "I": case.input_size,
        "H": case.hidden_size,
        "layers": case.layers,
        "directions": case.directions,
        "T": _bucket(case.steps or 0),
        "B": _bucket(case.batch or 0),
        "packed": int(case.packed),
        "P": case.proj_size,
        "mapped": int(case.mapped),
        "cells": int(case.keeps_cells),
        "trains": int(case.trains),
    }
    if case.heads > 1:
        parts["heads"] = case.heads
    return " ".join(f"{name}={value}" for name, value in parts.items())


def _bucket(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0
