"""What weft.tune has measured of vertex functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._base.machine import machine_name
from .._base.measured import Entry, Measured, bucket, key_of
from .._base.torch_private import fp32_precision
from .._C import vertex as _C
from .graphs import Graphs
from .options import current
from .runtime.reference import Function

__all__ = ["MEASURED", "Entry", "key", "look_up", "name_of", "parts", "parts_of"]

_PERSISTENT = {"persistent": 1, **{f"persistent/{parts}": parts for parts in (2, 4, 8, 16)}}
"""Names of persistent kernels whose groups of blocks have this part of the processors at most."""

MEASURED = Measured("tune_vertex.json", "executor", (*_PERSISTENT, "batched", "reference"))


_keys: dict[tuple, tuple[list, str]] = {}
"""Of the latest kinds of calls, by the identity of their programs, which are held: what every call asks for."""
_MOST_KEYS = 256


def name_of(parts: int) -> str:
    """What persistent kernels of so many parts are called."""
    return next(name for name, n in _PERSISTENT.items() if n == parts)


def parts_of(name: str) -> int | None:
    """That of a candidate's name, None where it is another executor's."""
    return _PERSISTENT.get(name)


def key(functions: Sequence[Function], trains: bool, graphs: Graphs, captured: bool) -> str:
    """What decides between executors, sizes rounded up to powers of two."""
    device, programs = functions[0].type.device, [f.trace.program for f in functions]
    tf32 = fp32_precision("cuda", "matmul") if device.type == "cuda" else "none"
    sizes = graphs.num_graphs, graphs.num_vertices, graphs.num_edges, graphs.num_levels
    buckets = tuple(map(bucket, sizes))
    threads = torch.get_num_threads() if device.type == "cpu" else 0  # of which a machine's name speaks
    kind = (*map(id, programs), device, threads, tf32, current(), trains, captured, buckets)
    found = _keys.get(kind)
    if found is None:
        # The programs have all shapes and dtypes.
        digests = sorted({program.digest for program in programs})
        parts = {
            "programs": ",".join(digests),
            "tf32": tf32,
            "options": "".join(str(int(option)) for option in current()),
            "trains": int(trains),
            "captured": int(captured),
            **dict(zip("GVEL", buckets, strict=True)),
        }
        found = _keys[kind] = programs, key_of(machine_name(device), parts)
        for oldest in [*_keys][:-_MOST_KEYS]:  # copied at once: other threads write, too
            _keys.pop(oldest, None)
    return found[1]


def look_up(functions: Sequence[Function], trains: bool, graphs: Graphs) -> Entry | None:
    """What was measured for calls of this kind, captured in a CUDA graph where this one is, or None."""
    device = functions[0].type.device

    def here() -> str:
        return key(functions, trains, graphs, device.type == "cuda" and _C.captures(device.index))

    return MEASURED.look_up(here)


def parts(functions: Sequence[Function], trains: bool, graphs: Graphs) -> int | None:
    """Of the persistent kernels that took the device the least time, where they were measured."""
    entry = MEASURED.look_up(lambda: key(functions, trains, graphs, True))
    if entry is None:
        return None
    times = {name: us for name, us in entry.microseconds.items() if name in _PERSISTENT}
    return _PERSISTENT[min(times, key=times.__getitem__)] if times else None
