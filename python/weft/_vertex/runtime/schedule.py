"""In which order a vertex function runs over a batch, and where each vertex finds its children and its parents.

The numbers come from csrc/vertex/graph/schedule.h, which says what every array means; here they are planned once per
Graphs and function shape, kept, and taken to the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..._C import vertex as _C
from ..graphs import Graphs
from .resident import Resident, trainable

__all__ = ["Kind", "Schedule", "Task", "schedule"]

_NO_LIMIT = 2**62


class Kind(NamedTuple):
    """What one vertex function gathers."""

    slots: tuple[int, ...]  # ascending
    sum: bool = False

    @property
    def limit(self) -> int:
        """Children may stand in slots below this one."""
        return _NO_LIMIT if self.sum else max(self.slots, default=-1) + 1


class Task(NamedTuple):
    """The vertices of one frontier that run the same function: rows ``first .. first + count - 1``."""

    kind: int
    level: int
    first: int
    count: int
    first_edge: int
    num_edges: int
    edge_run: int  # as `runs`, for edge_children
    runs: tuple[int, ...]  # per column: the first of the gathered rows where they ascend one by one, -1: none, -2: else


class Schedule:
    """A schedule and its copy on the device of the Graphs that it belongs to."""

    def __init__(self, core: _C.Schedule, device: torch.device) -> None:
        self.core = core
        self.device = device
        self.sizes = (core.num_vertices, core.num_inner, core.num_edges)
        """Vertices, those with children, edges that are summed over."""
        with trainable():
            self._host = torch.frombuffer(core, dtype=torch.int32)
        self._resident = Resident(device)
        self._tasks: list[Task] | None = None

    @property
    def tasks(self) -> list[Task]:
        if self._tasks is None:
            table = self.array("tasks").view(-1, 8).tolist()
            runs = self.array("runs").view(len(table), -1).tolist() if table else []
            self._tasks = [Task(*row[:7], tuple(run)) for row, run in zip(table, runs, strict=True)]
        return self._tasks

    def block(self, device: torch.device | None = None) -> Tensor:
        """The whole schedule in one int32 tensor on `device`, the CPU by default.

        A copy on the device of the Graphs is kept, any other is made at each call.
        """
        if device is None or device.type == "cpu":
            return self._host
        if device.type != "cuda":
            return self._host.to(device)
        return (self._resident if device == self.device else Resident(device)).tensor(self._pinned)

    def _pinned(self) -> Tensor:
        return _C.pinned(self.core)

    def array(self, name: str, block: Tensor | None = None) -> Tensor:
        """The array `name`, a view of `block` (from :meth:`block`; by default the one on the CPU).

        ``tasks`` is (T * 8,), ``frontiers`` (F + 1,), ``slots`` (C,), ``vertices`` (V,), ``gather`` (C * V,), ``runs``
        (T * C,), ``first_edge`` (V + 1,), ``edge_children`` and ``edge_parents`` (E,), ``first_use`` (V + 1,),
        ``users`` (U * 2,), ``first_sum_use`` (V + 1,), ``sum_use_edges`` (E,). ``first_edge`` and ``first_sum_use`` are
        empty where no function sums.
        """
        first, size = self.core.layout()[name]
        return (self._host if block is None else block)[first : first + size]


def schedule(who: str, graphs: Graphs, kinds: tuple[Kind, ...], kind_of: Mapping[str, int] | None = None) -> Schedule:
    """The schedule of `graphs` for vertex functions that gather as `kinds` say; planned once and kept in `graphs`.

    Without `kind_of` every vertex runs ``kinds[0]``, whatever its type; else a vertex of type `name` runs
    ``kinds[kind_of[name]]``. `who` begins the messages.

    Raises:
        ValueError: a child stands in a slot above all that its parent's function gathers; there are no types, or one
            that `kind_of` lacks.
    """
    key = (kinds, None if kind_of is None else tuple(kind_of.items()))
    found = graphs._kept.get(key)
    if found is None:
        core = graphs._plans.get(key)
        if core is None:
            core = _plan(who, graphs, kinds, kind_of)
            graphs._plans[key] = core
        found = Schedule(core, graphs.device)
        graphs._kept[key] = found
    return found


def _plan(who: str, graphs: Graphs, kinds: tuple[Kind, ...], kind_of: Mapping[str, int] | None) -> _C.Schedule:
    core = graphs._core
    types: list[int] = []
    limits = [kinds[0].limit]
    if kind_of is not None:
        if graphs._names is None and len(graphs):
            raise ValueError(f"{who}: graph 0, vertex 0: has no type; name one for each vertex by Graphs.with_types")
        names = graphs._names or ()
        vertex = _C.first_typed(core, [name not in kind_of for name in names])
        if vertex >= 0:
            graph, local = core.graph_of(vertex)
            raise ValueError(
                f"{who}: graph {graph}, vertex {local}: there is no function for type {graphs.types[vertex]!r}, only "
                f"for {', '.join(map(repr, kind_of))}"
            )
        types = [kind_of.get(name, 0) for name in names]
        limits = [kinds[kind].limit for kind in types]
    vertex, slot = _C.first_beyond(core, limits)
    if vertex >= 0:
        graph, local = core.graph_of(vertex)
        raise ValueError(
            f"{who}: graph {graph}, vertex {local}: has a child in slot {slot}, above all that its function gathers"
        )
    return _C.schedule(core, kinds, types)
