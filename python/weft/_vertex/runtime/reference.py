"""The reference executor: level by level in plain torch, differentiable to any order. The oracle of the others.

The vertices of a level that run the same function are one task. The rows of inputs are permuted once into the order of
the tasks and split; what a task scatters is permuted once into the order of the tasks that gather it and split. So each
row is moved a fixed number of times, however deep the graph, forward and backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..trace.trace import Trace
from ..vertex import Vertex, VertexType
from .resident import captures

__all__ = ["Function", "Plan", "run"]


@dataclass(frozen=True)
class Function:
    """A vertex function and what its trace showed."""

    vertex: Callable[[Vertex], object] | None
    """None where it only counts what its trace showed."""
    type: VertexType
    trace: Trace


@dataclass
class Task:
    """The vertices of one level that run one function, in the order of their numbers, and their n children."""

    function: int
    rows: int
    edges: int
    parents: Tensor
    """(n,) each child's parent by its position in the task."""
    arrivals: Tensor
    """(n,) from what the tasks below hand over, one after the other, to the order of the edges."""
    sources: list[tuple[int, int]]
    """Tasks that hand states over, and how many."""
    uses: Tensor
    """Positions of the states that are handed over, by the task that takes them."""
    takers: list[tuple[int, int]]
    slots: dict[int, tuple[Tensor, Tensor]]
    """Slot to the edges in it and to their parents."""


class Plan:
    """The tasks of a batch of graphs. Integers alone; the tensors are on `device`.

    Args:
        graphs: a :class:`weft.Graphs`.
        which: (num_vertices,) the number of each vertex's function, or None where there is one.
        device: where the rows are.
    """

    def __init__(self, graphs, which: Tensor | None, device: torch.device):
        graphs = graphs.to("cpu")  # kept there, too: nothing waits for a device
        levels, edges = graphs.levels, graphs.edges
        functions = torch.zeros_like(levels) if which is None else which.cpu()
        n, m = len(levels), len(edges)
        kinds = int(functions.max()) + 1 if n else 1
        keys, task, counts = torch.unique(levels * kinds + functions, return_inverse=True, return_counts=True)
        tasks = len(keys)
        order = torch.argsort(task, stable=True)
        starts = _starts(counts)
        position = torch.empty_like(order)
        position[order] = torch.arange(n, device="cpu") - torch.repeat_interleave(starts, counts)

        child, parent, slot = edges.unbind(1)
        # Edges in the order of the tasks that gather; within one, as they were: by parent, then slot.
        by_taker = torch.argsort(task[parent], stable=True)
        child, parent, slot = child[by_taker], parent[by_taker], slot[by_taker]
        taker, giver = task[parent], task[child]
        edge_counts = torch.bincount(taker, minlength=tasks)
        edge_starts = _starts(edge_counts)
        # Within a task, by the task that gives.
        arrival = torch.argsort(taker * tasks + giver, stable=True)
        arrivals = torch.empty_like(arrival)
        arrivals[arrival] = torch.arange(m, device="cpu") - edge_starts[taker[arrival]]
        # All that one task gives, by the task that takes it.
        uses = torch.argsort(giver, stable=True)
        pairs, pair_counts = torch.unique_consecutive(
            torch.stack((giver[uses], taker[uses]), 1), dim=0, return_counts=True
        )
        given = torch.bincount(giver, minlength=tasks)
        slots = int(slot.max()) + 1 if m else 1
        by_slot = torch.argsort(taker * slots + slot, stable=True)
        slot_keys, slot_counts = torch.unique_consecutive(
            taker[by_slot] * slots + slot[by_slot], dim=0, return_counts=True
        )

        self._held: list[Tensor] = []

        def here(values: Tensor) -> Tensor:
            self._held.append(values.to(device))
            return self._held[-1]

        def pieces(values: Tensor, sizes: Tensor) -> Sequence[Tensor]:
            return here(values).split(sizes.tolist())

        self.order = here(order)
        self.inverse = here(torch.argsort(order))
        self.edge_order = here(by_taker)
        self.ordered = bool((order == torch.arange(n, device="cpu")).all())
        sources, takers = defaultdict(list), defaultdict(list)
        for (a, b), count in zip(pairs.tolist(), pair_counts.tolist(), strict=True):
            takers[a].append((b, count))
            sources[b].append((a, count))
        in_slot: dict[int, dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
        local = by_slot - edge_starts[taker[by_slot]]
        for key, index, parents in zip(
            slot_keys.tolist(),
            pieces(local, slot_counts),
            pieces(position[parent[by_slot]], slot_counts),
            strict=True,
        ):
            in_slot[key // slots][key % slots] = (index, parents)
        self.tasks = [
            Task(f, rows, e, p, a, sources[t], u, takers[t], in_slot[t])
            for t, (f, rows, e, p, a, u) in enumerate(
                zip(
                    (keys % kinds).tolist(),
                    counts.tolist(),
                    edge_counts.tolist(),
                    pieces(position[parent], edge_counts),
                    pieces(arrivals, edge_counts),
                    pieces(position[child[uses]], given),
                    strict=True,
                )
            )
        ]

    def vertices(self, function: int) -> Tensor:
        """Those that run it."""
        pieces = self.order.split([t.rows for t in self.tasks])
        own = [piece for piece, t in zip(pieces, self.tasks, strict=True) if t.function == function]
        return torch.cat(own) if own else self.order[:0]

    def read(self) -> None:
        """The current stream is going to read it: where another one made it, its memory is not given away before."""
        keep_until_read(self._held)


def keep_until_read(tensors: Sequence[Tensor]) -> None:
    """The memory of tensors that nobody outside knows of is not given away before the current stream has read them."""
    if tensors and tensors[0].is_cuda and not captures(tensors[0].device):
        stream = torch.cuda.current_stream(tensors[0].device)
        for t in tensors:
            t.record_stream(stream)


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts


def run(functions: Sequence[Function], plan: Plan, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The pushed tensors (num_vertices, ...), row i of vertex i."""
    plan.read()
    tasks = plan.tasks
    sizes, edges = [t.rows for t in tasks], [t.edges for t in tasks]
    of_edges = frozenset().union(*(f.trace.pulls_edges for f in functions))
    rows = {
        name: x.index_select(0, plan.edge_order).split(edges)
        if name in of_edges
        else (x if plan.ordered else x.index_select(0, plan.order)).split(sizes)
        for name, x in inputs.items()
    }
    handed: dict[int, list[Tensor]] = defaultdict(list)
    specs = next(f.trace.outputs for f in functions if f.trace.outputs)
    outputs: list[list[Tensor]] = [[] for _ in specs]
    for i, task in enumerate(tasks):
        function = functions[task.function]
        children = handed.pop(i, [])
        v = _Level(
            function,
            task,
            children,
            {name: rows[name][i] for name in function.trace.pulls | function.trace.pulls_edges},
        )
        function.vertex(v)
        if task.takers:
            state = v.state
            if state is None:
                state = _zeros(task.rows, function.type.state, function.type.device)
            states = _take(state, task.uses).split([count for _, count in task.takers])
            for (taker, _), piece in zip(task.takers, states, strict=True):
                handed[taker].append(piece)
        for column, spec, output in zip(outputs, specs, v.outputs or [None] * len(specs), strict=True):
            column.append(_zeros(task.rows, spec, function.type.device) if output is None else output)
    joined = (torch.cat(column) for column in outputs)
    return [x if plan.ordered else x.index_select(0, plan.inverse) for x in joined]


class _Level(Vertex):
    """The vertices of one task."""

    def __init__(self, function: Function, task: Task, handed: list[Tensor], rows: dict[str, Tensor]):
        super().__init__(function.type, task.rows)
        self._task, self._handed, self._inputs, self._trace = task, handed, rows, function.trace
        self._sums = iter(function.trace.sums)

    @cached_property
    def _states(self) -> Tensor:
        return torch.cat(self._handed).index_select(0, self._task.arrivals)

    def _own(self, value: Tensor) -> Tensor:
        return value.clone() if self._trace.in_place else value

    def _pull(self, name: str) -> Tensor:
        return self._own(self._inputs[name])

    def _pull_edges(self, name: str) -> Tensor:
        return self._own(self._inputs[name])

    def _gather(self, k: int) -> Tensor:
        absent = _zeros(self._rows, self._type.state, self._type.device)
        if k not in self._task.slots:
            return absent
        edges, parents = self._task.slots[k]
        found = self._states.index_select(0, edges)
        return found if len(parents) == self._rows else absent.index_copy(0, parents, found)

    def _children(self) -> Tensor:
        return self._own(self._states)

    def _messages(self) -> int:
        return self._task.edges

    def _repeat(self, value: Tensor) -> Tensor:
        return _take(value, self._task.parents)

    def _sum_of_none(self) -> Tensor:
        return _zeros(self._rows, next(self._sums), self._type.device)

    def _sum(self, messages: Tensor) -> Tensor:
        total = self._sum_of_none()
        if messages.device.type == "cpu":
            return total.index_add(0, self._task.parents, messages)
        # index_add adds in no fixed order there; index_put sorts.
        return total.index_put((self._task.parents,), messages, accumulate=True)

    def _scatter(self, state: Tensor) -> Tensor:
        return self._own(state)

    def _push(self, output: Tensor) -> Tensor:
        return self._own(output)


def _zeros(rows: int, spec, device: torch.device) -> Tensor:
    return torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=device)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Rows, some of them several times, with a gradient that is added up in a fixed order."""
    return values.index_select(0, index) if values.device.type == "cpu" else values[index]
