"""What a call refuses, whatever runs it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .._base.arguments import check_dense
from .graphs import Graphs
from .runtime import reference
from .trace.trace import Trace
from .vertex import Spec

__all__ = ["check_functions", "check_inputs", "device_of", "inputs_by_name", "state_dtype"]


def inputs_by_name(name: str, graphs: Graphs, inputs: object) -> dict[str, Tensor]:
    if inputs is None:
        return {}
    found = {"input": inputs} if not isinstance(inputs, Mapping) else dict(inputs)
    for key, x in found.items():
        what = f"input {key!r}" if isinstance(inputs, Mapping) else "inputs"
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {what} must be a tensor, got {type(x).__name__}")
        check_dense(name, f"input {key!r}", x, "give its rows as one tensor, (num_vertices, ...)")
        # Which inputs have a row per edge, the trace will say.
        if x.dim() == 0 or x.shape[0] not in (graphs.num_vertices, graphs.num_edges):
            raise _other_rows(name, key, x, "vertex", graphs.num_vertices)
    return found


def _other_rows(name: str, key: str, x: Tensor, row: str, rows: int) -> ValueError:
    count = "none" if x.dim() == 0 else x.shape[0]
    return ValueError(f"{name}: input {key!r} must have one row per {row}, {rows} rows, got {count}")


def device_of(name: str, graphs: Graphs, rows: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> torch.device:
    """The one device of all tensors; that of the graphs where there are none."""
    found: dict[torch.device, str] = {}
    for key, x in rows.items():
        found.setdefault(x.device, f"input {key!r}")
    for t in tensors:
        # torch lets a number on the CPU go with anything.
        if t.dim() > 0 or t.device.type != "cpu":
            found.setdefault(t.device, "the module")
    if graphs.device.type != "cpu" or not found:
        found.setdefault(graphs.device, "graphs")
    if len(found) > 1:
        where = ", ".join(f"{what} on {device}" for device, what in found.items())
        raise RuntimeError(f"{name}: tensors are on different devices: {where}")
    return next(iter(found))


def state_dtype(tensors: Sequence[Tensor], rows: Mapping[str, Tensor]) -> torch.dtype:
    for candidates in (tensors, rows.values()):
        dtypes = [t.dtype for t in candidates if t.is_floating_point()]
        if dtypes:
            return functools.reduce(torch.promote_types, dtypes)
    return torch.get_default_dtype()


def check_inputs(name: str, graphs: Graphs, rows: Mapping[str, Tensor], traces: Sequence[Trace]) -> None:
    pulled = frozenset().union(*(t.pulls for t in traces))
    of_edges = frozenset().union(*(t.pulls_edges for t in traces))
    for key, x in rows.items():
        if key not in pulled | of_edges:
            names = ", ".join(map(repr, sorted(pulled | of_edges))) or "none"
            raise ValueError(f"{name}: input {key!r} is superfluous; inputs pulled: {names}")
        if key in pulled and x.shape[0] != graphs.num_vertices:
            raise _other_rows(name, key, x, "vertex", graphs.num_vertices)
        if key in of_edges and x.shape[0] != graphs.num_edges:
            raise _other_rows(name, key, x, "edge", graphs.num_edges)
        if key in pulled & of_edges:
            raise ValueError(f"{name}: input {key!r} is pulled by one function for vertices, by another for edges")


def check_functions(name: str, functions: Sequence[reference.Function], several: bool) -> None:
    for f in functions:
        if f.trace.gathers and not f.trace.scatters:
            raise RuntimeError(f"{f.type.name}: vertex gathers but does not scatter")
    pushing = [f for f in functions if f.trace.outputs]
    if not pushing:
        raise RuntimeError(f"{name}: {'no function pushes' if several else 'vertex pushes nothing'}")
    first = pushing[0]
    for f in pushing[1:]:
        if f.trace.outputs != first.trace.outputs:
            raise RuntimeError(
                f"{name}: all functions must push the same shapes and dtypes; {first.type.name} pushes "
                f"{_describe(first.trace.outputs)}, {f.type.name} {_describe(f.trace.outputs)}"
            )


def _describe(outputs: Sequence[Spec]) -> str:
    return ", ".join(f"{str(s.dtype).removeprefix('torch.')} {('N', *s.shape)}".replace("'", "") for s in outputs)
