"""In which order a vertex function runs over a batch, and where each vertex finds its children and its parents.

The numbers come from csrc/vertex/graph/schedule.h, which says what every array means; here they are planned once per
Graphs and function shape, kept, and taken to the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..._C import vertex as _C
from ..graphs import Graphs, on_move
from .resident import Resident, captures, trainable

__all__ = ["Kind", "Planner", "Schedule", "Task", "check", "planned", "schedule", "send", "send_alone", "used"]

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


class OnHost:
    """A schedule as it was planned, which all copies of its Graphs share, with what was made of it in pinned memory."""

    __slots__ = ("core", "pinned", "scripted")

    def __init__(self, core: _C.Schedule) -> None:
        self.core = core
        self.pinned: Tensor | None = None
        """Its block, where its Graphs were pinned."""
        self.scripted: tuple[object, tuple[int, bool], Tensor] | None = None
        """A program, most blocks and whether it trains, and the block with their scripts; likewise."""


class Schedule:
    """A schedule and its copy on the device of the Graphs that it belongs to."""

    def __init__(self, planned: OnHost, device: torch.device) -> None:
        self.planned = planned
        self.core = planned.core
        self.device = device
        self.planner: Planner | None = None
        """What planned it."""
        self._host: Tensor | None = None
        self._resident: Resident | None = None
        self._tasks: list[Task] | None = None
        self._scripted: tuple[object, tuple[int, bool], Scripted] | None = None

    def scripted(self, program: torch.ScriptObject, most_blocks: int, training: bool = False) -> Scripted:
        """With scripts of a program in its block, for persistent kernels of at most so many blocks; kept."""
        known = self._scripted
        if known is None or known[0] is not program or known[1] != (most_blocks, training):
            made = Scripted(self, program, most_blocks, training)
            known = self._scripted = program, (most_blocks, training), made
        return known[2]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Vertices, those with children, edges that are summed over."""
        return self.core.num_vertices, self.core.num_inner, self.core.num_edges

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
            return self._on_host()
        if device.type != "cuda":
            return self._on_host().to(device)
        if device != self.device:
            return Resident(device).tensor(self._pinned)
        if self._resident is None:
            self._resident = Resident(device)
        return self._resident.tensor(self._pinned)

    def _on_host(self) -> Tensor:
        if self._host is None:
            with trainable():
                self._host = torch.frombuffer(self.core, dtype=torch.int32)
        return self._host

    def _pinned(self) -> Tensor:
        found = self.planned.pinned
        return _C.pinned(self.core) if found is None else found

    def pin(self) -> None:
        """What goes to a device is made now, for all copies of the Graphs."""
        with trainable():
            self.planned.pinned = self._pinned()

    def array(self, name: str, block: Tensor | None = None) -> Tensor:
        """The array `name`, a view of `block` (from :meth:`block`; by default the one on the CPU).

        ``tasks`` is (T * 8,), ``frontiers`` (F + 1,), ``slots`` (C,), ``vertices`` (V,), ``gather`` (C * V,), ``runs``
        (T * C,), ``first_edge`` (V + 1,), ``edge_children`` and ``edge_parents`` (E,), ``first_use`` (V + 1,),
        ``users`` (U * 2,), ``first_sum_use`` (V + 1,), ``sum_use_edges`` (E,). ``first_edge`` and ``first_sum_use`` are
        empty where no function sums.
        """
        first, size = self.core.layout()[name]
        return (self._on_host() if block is None else block)[first : first + size]

    def vertices(self, device: torch.device) -> list[Tensor]:
        """The vertices of each of several functions, ascending, int64 on `device`."""
        sizes = self.array("kind_starts").diff().tolist()
        return [*self.array("kind_vertices", self.block(device)).long().split(sizes)]


class Scripted(Schedule):
    """A schedule with scripts of a program behind it in its block; csrc/vertex/exec/script.h.

    Args:
        plain: the schedule.
        program: as the operators take it.
        most_blocks: of a kernel.
        training: of a training step, else of both passes.
    """

    def __init__(self, plain: Schedule, program: torch.ScriptObject, most_blocks: int, training: bool = False) -> None:
        super().__init__(plain.planned, plain.device)
        self._made = program, (most_blocks, training)
        made = self.planned.scripted
        if made is not None and made[0] is program and made[1] == self._made[1]:
            self._host = made[2]
            return
        with trainable():
            self._host = _C.scripted(plain.core, program, most_blocks, training, torch.cuda.is_initialized())

    def _pinned(self) -> Tensor:
        return self._host

    def pin(self) -> None:
        self.planned.scripted = *self._made, self._host


def schedule(who: str, graphs: Graphs, kinds: tuple[Kind, ...], kind_of: Mapping[str, int] | None = None) -> Schedule:
    """The schedule of `graphs` for vertex functions that gather as `kinds` say; planned once and kept in `graphs`.

    Without `kind_of` every vertex runs ``kinds[0]``, whatever its type; else a vertex of type `name` runs
    ``kinds[kind_of[name]]``. `who` begins the messages.

    Raises:
        ValueError: a child stands in a slot above all that its parent's function gathers; there are no types, or one
            that `kind_of` lacks.
    """
    if _key(kinds, kind_of) not in graphs._plans:
        check(who, graphs, kinds, kind_of)
    return planned(graphs, kinds, kind_of)


def send_alone(graphs: Graphs, plan: Callable[..., Schedule]) -> None:
    """A schedule to its device, as :func:`used` takes it."""
    send(plan(), graphs)


def send(schedule: Schedule, graphs: Graphs) -> None:
    """To the device of its graphs, or where these are pinned to pinned memory."""
    if graphs.is_pinned():
        schedule.pin()
    else:
        schedule.block(graphs._device)


class Planner:
    """Plans graphs for functions that gather as `kinds` say, which was checked, as :func:`schedule` does."""

    def __init__(self, kinds: tuple[Kind, ...], kind_of: Mapping[str, int] | None) -> None:
        self.kinds, self.kind_of, self.key = kinds, kind_of, _key(kinds, kind_of)
        self._limit = kinds[0].limit if kind_of is None else None

    def fits(self, graphs: Graphs) -> bool:
        """Whether there is a schedule: every type has a function, which gathers all slots in use."""
        if self._limit is not None:
            return graphs._core.num_slots <= self._limit
        if self.key in graphs._plans:
            return True
        kinds, kind_of = self.kinds, self.kind_of
        if graphs._names is None or not kind_of.keys() >= {*graphs._names}:
            return False
        return _C.first_beyond(graphs._core, [kinds[kind_of[name]].limit for name in graphs._names])[0] < 0

    def plan(self, graphs: Graphs, groups: int = 1) -> Schedule:
        """The schedule for at most so many groups that have graphs of their own; kept in `graphs`."""
        key = self.key if groups == 1 else (*self.key, groups)
        found = graphs._kept.get(key)
        if found is None:
            planned = graphs._plans.get(self.key, {}).get(groups)
            if planned is None:
                kind_of = self.kind_of
                types = [] if kind_of is None else [kind_of.get(name, 0) for name in graphs._names or ()]
                planned = OnHost(_C.schedule(graphs._core, self.kinds, types, groups))
                graphs._plans.setdefault(self.key, {})[groups] = planned
            found = graphs._kept[key] = Schedule(planned, graphs._device)
            found.planner = self
        return found


def planned(
    graphs: Graphs, kinds: tuple[Kind, ...], kind_of: Mapping[str, int] | None = None, groups: int = 1
) -> Schedule:
    """As :func:`schedule`, of what was checked, for at most so many groups that have graphs of their own."""
    return Planner(kinds, kind_of).plan(graphs, groups)


def _key(kinds: tuple[Kind, ...], kind_of: Mapping[str, int] | None) -> tuple:
    return (kinds, None if kind_of is None else tuple(kind_of.items()))


_recent: dict[tuple, list] = {}
"""What planned for the functions last used, the latest last; with what sends a schedule, and how often graphs were
prepared for it since its use."""
_MOST_RECENT, _UNUSED = 2, 32


def used(schedule: Schedule, send: Callable[[Graphs, Callable[..., Schedule]], None]) -> None:
    """Graphs that go to a device are going to be prepared for the functions of this schedule, by `send`, which gets
    what plans them for so many groups, too."""
    planner = schedule.planner
    latest = _recent.get(planner.key)
    if latest is not None and latest[1] is send and [*_recent][-1:] == [planner.key]:
        latest[2] = 0
        return
    _recent.pop(planner.key, None)
    _recent[planner.key] = [planner, send, 0]
    for oldest in [*_recent][:-_MOST_RECENT]:
        _recent.pop(oldest, None)


def _prepare(graphs: Graphs) -> None:
    """Plan, and send to the graphs' device or to pinned memory, what the functions last used are going to ask for.

    Functions of the same process: what a worker of a DataLoader plans does not cross to it.
    """
    if not _recent or graphs._core.num_vertices == 0:
        return
    if graphs._device.type == "cuda" and captures(graphs._device):
        return
    for key, entry in [*_recent.items()]:
        planner, send, unused = entry
        entry[2] = unused + 1
        if unused > _UNUSED:
            _recent.pop(key, None)
        elif planner.fits(graphs):
            send(graphs, functools.partial(planner.plan, graphs))


on_move.append(_prepare)


def check(who: str, graphs: Graphs, kinds: tuple[Kind, ...], kind_of: Mapping[str, int] | None = None) -> None:
    """Refuse what :func:`schedule` refuses."""
    core = graphs._core
    if kind_of is None:
        chosen = [kinds[0]]
    else:
        if graphs._names is None and len(graphs):
            raise ValueError(
                f"{who}: graphs have no types, graph 0, vertex 0 for one; name them by Graphs.with_types; there are "
                f"functions for {', '.join(map(repr, kind_of))}"
            )
        names = graphs._names or ()
        missing = [name not in kind_of for name in names]
        vertex = _C.first_typed(core, missing) if any(missing) else -1  # perhaps nothing here has that type
        if vertex >= 0:
            graph, local = core.graph_of(vertex)
            raise ValueError(
                f"{who}: graph {graph}, vertex {local}: there is no function for type {graphs.types[vertex]!r}, only "
                f"for {', '.join(map(repr, kind_of))}"
            )
        chosen = [kinds[kind_of.get(name, 0)] for name in names]
    vertex, slot = _C.first_beyond(core, [kind.limit for kind in chosen])
    if vertex >= 0:
        graph, local = core.graph_of(vertex)
        kind = chosen[0] if kind_of is None else kinds[kind_of[graphs.types[vertex]]]
        gathers = f"slots 0 to {kind.limit - 1}" if kind.slots else "no slot"
        raise ValueError(
            f"{who}: graph {graph}, vertex {local}: there is a child in slot {slot}, vertex gathers {gathers}"
        )
