"""What weft.tune has measured: remembered in a file, read once per process."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._version import __version__
from .paths import replace_file, versioned_cache_dir

__all__ = ["Entry", "Measured", "bucket", "key_of"]


class Entry(NamedTuple):
    """The measurement of one kind of call."""

    fastest: str
    microseconds: dict[str, float]
    """Of every candidate that was measured."""

    def __str__(self) -> str:
        times = sorted(self.microseconds.items(), key=lambda pair: pair[1])
        return f"weft.tune measured {', '.join(f'{name} {us:.3g} us' for name, us in times)}"


def key_of(machine: str, parts: Mapping[str, object]) -> str:
    """What a measurement holds for: `parts`, on a machine of this name, with these versions."""
    everything = {"weft": __version__, "torch": torch.__version__, "device": machine, **parts}
    return " ".join(f"{name}={value}" for name, value in everything.items())


def bucket(size: int) -> int:
    """Sizes that share a measurement: those up to the same power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


class Measured:
    """An engine's measurements.

    Args:
        file: what it is called, in this version's folder of ``$WEFT_CACHE_DIR``, else of ``~/.cache/weft``.
        field: what the file calls the fastest candidate.
        candidates: their names.

    Attributes:
        entries: by key; None before the file was read.
    """

    def __init__(self, file: str, field: str, candidates: Collection[str]) -> None:
        self.file, self.field, self.candidates = file, field, frozenset(candidates)
        self.entries: dict[str, Entry] | None = None

    def path(self) -> Path:
        return versioned_cache_dir() / self.file

    def look_up(self, key: Callable[[], str]) -> Entry | None:
        """What was measured, or None. `key` is made where anything was. Nothing in the file can make this fail."""
        if self.entries is None:
            self.entries = self.read()
        return self.entries.get(key()) if self.entries else None

    def remember(self, key: str, entry: Entry) -> None:
        """Keep an entry in this process and in the file; a file that cannot be written is a warning."""
        # What other processes have written since is kept; where two have measured the same, the last one counts.
        self.entries = {**(self.entries or {}), **self.read(), key: entry}
        found = {k: {self.field: e.fastest, "microseconds": e.microseconds} for k, e in self.entries.items()}
        try:
            replace_file(self.path(), json.dumps(found, indent=1, sort_keys=True))
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            warnings.warn(f"weft.tune: the measurement is kept in this process alone: {error}", stacklevel=4)

    def read(self) -> dict[str, Entry]:
        """The file's entries; those that are not well formed are left out, as is a file that is none."""
        try:
            found = json.loads(self.path().read_text(encoding="utf-8"))
            return {key: entry for key, value in found.items() if (entry := self._entry(value)) is not None}
        except (OSError, RuntimeError, ValueError, AttributeError):
            return {}

    def _entry(self, value: Any) -> Entry | None:
        if not isinstance(value, dict) or not isinstance(value.get("microseconds"), dict):
            return None
        times = value["microseconds"]
        fastest = value.get(self.field)
        if not times.keys() <= self.candidates or not isinstance(fastest, str) or fastest not in times:
            return None
        if not all(isinstance(t, float) and math.isfinite(t) and t >= 0 for t in times.values()):
            return None
        return Entry(fastest, times)
