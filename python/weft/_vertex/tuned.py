"""What weft.tune has measured of vertex functions: remembered in a file, read once per process."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._base.machine import machine_name
from .._base.paths import replace_file, versioned_cache_dir
from .._base.torch_private import fp32_precision
from .._version import __version__
from .graphs import Graphs
from .options import current
from .runtime.reference import Function

__all__ = ["Entry", "kind_of", "look_up", "path", "remember"]


class Entry(NamedTuple):
    """The measurement of one kind of call."""

    executor: str
    """The fastest."""
    microseconds: dict[str, float]
    """Of every executor that was measured."""

    def __str__(self) -> str:
        times = sorted(self.microseconds.items(), key=lambda pair: pair[1])
        return f"weft.tune measured {', '.join(f'{name} {us:.3g} us' for name, us in times)}"


_entries: dict[str, Entry] | None = None


def path() -> Path:
    """``tune_vertex.json`` in this version's folder: of ``$WEFT_CACHE_DIR``, else of ``~/.cache/weft``."""
    return versioned_cache_dir() / "tune_vertex.json"


def kind_of(functions: Sequence[Function], trains: bool) -> str:
    """What decides between executors besides the graphs."""
    types = functions[0].type
    options, on_cuda = current(), types.device.type == "cuda"
    # The programs have all shapes and dtypes.
    digests = sorted({f.trace.program.digest for f in functions})
    parts = {
        "weft": __version__,
        "torch": torch.__version__,
        "device": machine_name(types.device),
        "programs": ",".join(digests),
        "tf32": fp32_precision("cuda", "matmul") if on_cuda else "none",
        "options": "".join(str(int(option)) for option in options),
        "trains": int(trains),
    }
    return " ".join(f"{name}={value}" for name, value in parts.items())


def look_up(functions: Sequence[Function], trains: bool, graphs: Graphs) -> Entry | None:
    """What was measured for calls of this kind, or None. Nothing in the file can make this fail."""
    global _entries
    if _entries is None:
        _entries = _read()
    return _entries.get(_key(kind_of(functions, trains), graphs)) if _entries else None


def remember(functions: Sequence[Function], trains: bool, graphs: Graphs, entry: Entry) -> None:
    """Keep an entry in this process and in the file; a file that cannot be written is a warning."""
    global _entries
    # What other processes have written since is kept; where two have measured the same, the last one counts.
    _entries = {**(_entries or {}), **_read(), _key(kind_of(functions, trains), graphs): entry}
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
    if not times.keys() <= {"persistent", "batched", "reference"} or value.get("executor") not in times:
        return None
    if not all(isinstance(t, float) and math.isfinite(t) and t >= 0 for t in times.values()):
        return None
    return Entry(value["executor"], times)


def _key(kind: str, graphs: Graphs) -> str:
    """Sizes are rounded up to powers of two."""
    sizes = {"G": graphs.num_graphs, "V": graphs.num_vertices, "E": graphs.num_edges, "L": graphs.num_levels}
    return " ".join([kind, *(f"{name}={1 << (n - 1).bit_length() if n > 0 else 0}" for name, n in sizes.items())])
