"""What weft.tune has measured of vertex functions."""

from __future__ import annotations

from collections.abc import Sequence

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


def name_of(parts: int) -> str:
    """What persistent kernels of so many parts are called."""
    return next(name for name, n in _PERSISTENT.items() if n == parts)


def parts_of(name: str) -> int | None:
    """That of a candidate's name, None where it is another executor's."""
    return _PERSISTENT.get(name)


def key(functions: Sequence[Function], trains: bool, graphs: Graphs, captured: bool) -> str:
    """What decides between executors, sizes rounded up to powers of two."""
    types = functions[0].type
    # The programs have all shapes and dtypes.
    digests = sorted({f.trace.program.digest for f in functions})
    parts = {
        "programs": ",".join(digests),
        "tf32": fp32_precision("cuda", "matmul") if types.device.type == "cuda" else "none",
        "options": "".join(str(int(option)) for option in current()),
        "trains": int(trains),
        "captured": int(captured),
        "G": bucket(graphs.num_graphs),
        "V": bucket(graphs.num_vertices),
        "E": bucket(graphs.num_edges),
        "L": bucket(graphs.num_levels),
    }
    return key_of(machine_name(types.device), parts)


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
