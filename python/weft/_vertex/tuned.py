"""What weft.tune has measured of vertex functions."""

from __future__ import annotations

from collections.abc import Sequence

from .._base.machine import machine_name
from .._base.measured import Entry, Measured, bucket, key_of
from .._base.torch_private import fp32_precision
from .graphs import Graphs
from .options import current
from .runtime.reference import Function

__all__ = ["MEASURED", "Entry", "key", "look_up"]

MEASURED = Measured("tune_vertex.json", "executor", ("persistent", "batched", "reference"))


def key(functions: Sequence[Function], trains: bool, graphs: Graphs) -> str:
    """What decides between executors, sizes rounded up to powers of two."""
    types = functions[0].type
    # The programs have all shapes and dtypes.
    digests = sorted({f.trace.program.digest for f in functions})
    parts = {
        "programs": ",".join(digests),
        "tf32": fp32_precision("cuda", "matmul") if types.device.type == "cuda" else "none",
        "options": "".join(str(int(option)) for option in current()),
        "trains": int(trains),
        "G": bucket(graphs.num_graphs),
        "V": bucket(graphs.num_vertices),
        "E": bucket(graphs.num_edges),
        "L": bucket(graphs.num_levels),
    }
    return key_of(machine_name(types.device), parts)


def look_up(functions: Sequence[Function], trains: bool, graphs: Graphs) -> Entry | None:
    """What was measured for calls of this kind, or None."""
    return MEASURED.look_up(lambda: key(functions, trains, graphs))
