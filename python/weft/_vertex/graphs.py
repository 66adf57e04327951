"""Batches of directed acyclic graphs: what a vertex function runs over."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._C import vertex as _C
from .readers import read_dgl, read_networkx, read_pyg, write_networkx
from .runtime.resident import Resident, trainable

__all__ = ["Graphs"]

_CPU = torch.device("cpu")

on_move: list[Callable[[Graphs], None]] = []
"""Called with graphs that have just been made for a device or pinned memory."""


class Graphs:
    """A batch of directed acyclic graphs. Immutable, made by its static methods.

    Edges run from child to parent and carry a slot, the number by which the parent knows the child. Each static method
    takes one entry per graph; indices are local to their graph. An index may be a Python or NumPy integer, a row an
    integer NumPy array or CPU tensor; -1 means "none". Vertices may be numbered in any order. In the batch, the
    vertices of graph g are ``ptr[g] .. ptr[g + 1] - 1``, in the order the caller gave them: rows of inputs and outputs
    follow this numbering.

    A graph has at least one vertex; it may be a forest. Bad structure is a ValueError that names the graph and the
    vertex in the caller's numbering, anything that is no integer a TypeError.

    >>> graphs = weft.Graphs.from_children([[[], [], [0, 1]], [[]]])
    >>> graphs
    Graphs(num_graphs=2, num_vertices=4, num_edges=2, num_levels=2)
    >>> graphs.roots
    tensor([2, 3])

    Attributes:
        num_graphs: the length of the batch.
        num_vertices: of all graphs together.
        num_edges: of all graphs together.
        num_levels: the number of frontiers; 0 for the empty batch.
        num_slots: the highest slot in use + 1; 0 without edges.
        ptr: where each graph's vertices begin, int64 (num_graphs + 1,).
        graph_index: each vertex's graph, int64 (num_vertices,).
        edges: rows (child, parent, slot) in the batch's numbering, sorted by parent, then slot, int64 (num_edges, 3).
        levels: 0 without children, else 1 + the highest of the children's, int64 (num_vertices,).
        roots: each graph's last vertex that has no parent, int64 (num_graphs,).
        types: None, or a tuple of num_vertices names.
        device: of all tensors above.
    """

    __slots__ = (
        "__weakref__", "_core", "_device", "_expected", "_kept", "_names", "_pinned", "_plans", "_tensors", "_types"
    )  # fmt: skip

    _core: _C.Graphs
    _names: tuple[str, ...] | None  # what the core's types are called
    _types: tuple[str, ...] | None
    _device: torch.device
    _pinned: bool  # tensors are in pinned memory
    _tensors: dict[str, Tensor | Resident]  # made when they are first asked for: most are not
    _plans: dict[Any, dict[int, Any]]  # schedules, by number of groups, shared by all copies of these graphs
    _expected: dict[Any, Any]  # what executors are expected to take, likewise
    _kept: dict[Any, Any]  # what executors made of them, here and on the device

    def __new__(cls, *args: Any, **kwargs: Any) -> Graphs:
        raise TypeError(
            "Graphs has no public constructor; use Graphs.from_children, from_parents, from_edges, from_edge_index, "
            "from_pyg, from_dgl, from_networkx, chain, pyramid or batch"
        )

    @staticmethod
    def from_children(children: Iterable[Any]) -> Graphs:
        """``children[g][v][k]`` is the child of vertex v in slot k; -1 leaves the slot empty.

        ``children[g]`` may be one integer array or tensor of shape (vertices, slots). One child may stand in several
        slots and have several parents.
        """
        return _new(_C.from_children(children))

    @staticmethod
    def from_parents(parents: Iterable[Any], slots: Iterable[Any] | None = None) -> Graphs:
        """``parents[g][v]`` is the one parent of v, -1 for a root.

        Without `slots` the children of a vertex take slots 0, 1, ... in the order of their numbers; else
        ``slots[g][v]`` is the slot of v in its parent, which is ignored at roots.
        """
        return _new(_C.from_parents(parents, slots))

    @staticmethod
    def from_edges(edges: Iterable[Any], num_vertices: Iterable[Any]) -> Graphs:
        """``edges[g]`` has rows (child, parent) or (child, parent, slot); ``num_vertices[g]`` vertices.

        The shape is (E, 2) or (E, 3); ``[]`` is a graph without edges. Without slots each edge takes the lowest slot
        of its parent that no earlier row took. An array of 2 rows is read so, too, with a UserWarning: it may be meant
        for :meth:`from_edge_index`.
        """
        _check_one_per_graph("from_edges", "edges", edges)
        return _new(_C.from_edges(edges, num_vertices, "Graphs.from_edges"))

    @staticmethod
    def from_edge_index(edge_index: Iterable[Any], num_vertices: Iterable[Any]) -> Graphs:
        """As :meth:`from_edges`, of tensors or arrays of shape (2, E): row 0 the children, row 1 the parents.

        Each edge takes the lowest slot of its parent that no earlier one took, so that features of the edges, (E, ...),
        are in the order of ``edges`` by ``features[torch.argsort(edge_index[g][1], stable=True)]``.
        """
        _check_one_per_graph("from_edge_index", "edge_index", edge_index)
        return _new(_C.from_edge_index(edge_index, num_vertices, "Graphs.from_edge_index"))

    @staticmethod
    def from_pyg(data: Any) -> Graphs:
        """A ``torch_geometric.data.Data`` or ``Batch``, or a sequence of them; edges run from child to parent.

        Slots as in :meth:`from_edge_index`. What torch_geometric calls the source of an edge is the child: states flow
        from it.

        Raises:
            ValueError: a graph has a cycle, as one has whose edges run both ways.
            TypeError: something else.
        """
        return _new(read_pyg(data)[0])

    @staticmethod
    def from_dgl(graphs: Any) -> Graphs:
        """A ``dgl.DGLGraph``, a batch of them, or a sequence; edges run from child to parent.

        Slots as in :meth:`from_edge_index`.

        Raises:
            ValueError: a graph has a cycle, as one has whose edges run both ways, or several types of nodes.
            TypeError: something else.
        """
        return _new(read_dgl(graphs)[0])

    @staticmethod
    def from_networkx(graphs: Any) -> Graphs:
        """A ``networkx.DiGraph`` or ``MultiDiGraph``, or a sequence of them; edges run from child to parent.

        Vertices are numbered in the order of the nodes. The attribute ``slot`` of the edges is their slot where the
        edges of a graph have it, else slots are as in :meth:`from_edge_index`; the attribute ``type`` of the nodes
        gives the vertices their types where all have it.

        Raises:
            ValueError: a graph is undirected or has a cycle, or some of its edges have a slot and some do not.
            TypeError: something else.
        """
        core, types = read_networkx(graphs)
        return _new(core) if types is None else _new(core).with_types(types)

    def to_networkx(self) -> Any:
        """All graphs as one ``networkx.DiGraph``, a ``MultiDiGraph`` where a child stands in two slots of a parent.

        Nodes are the vertices 0, 1, ... with the attributes ``graph`` and, of typed graphs, ``type``; edges run from
        child to parent and have the attribute ``slot``. :meth:`from_networkx` reads it back as one graph; to keep the
        graphs apart, call it on each: ``[g.to_networkx() for g in graphs]``.
        """
        return write_networkx(self)

    @staticmethod
    def chain(lengths: Iterable[Any], reverse: bool = False) -> Graphs:
        """Chains: vertex t has vertex t - 1 as its child in slot 0; with `reverse` vertex t + 1.

        Lengths need not be sorted.
        """
        return _new(_C.chain(lengths, bool(reverse)))

    @staticmethod
    def pyramid(lengths: Iterable[Any]) -> Graphs:
        """Pyramids: n leaves, n - 1 vertices over two neighbours each (slots 0 and 1), and so on up to one.

        Vertices are numbered from the leaves up, each row from left to right; a graph has n (n + 1) / 2.

        Source: VPPS (MICRO 2018), the nets TD-RNN and TD-LSTM.
        """
        return _new(_C.pyramid(lengths))

    @staticmethod
    def batch(graphs: Iterable[Graphs]) -> Graphs:
        """A sequence of Graphs as one, in order; of nothing, the empty batch.

        Raises:
            TypeError: something else than Graphs among them.
            ValueError: some have types and some have none (empty batches do not count).
            RuntimeError: they are on different devices.
        """
        try:
            parts = list(graphs)
        except TypeError:
            raise TypeError(f"Graphs.batch: expected a sequence of Graphs, got {type(graphs).__name__}") from None
        if not {*map(type, parts)} <= {Graphs}:
            i, part = next((i, part) for i, part in enumerate(parts) if type(part) is not Graphs)
            raise TypeError(f"Graphs.batch: graphs[{i}] must be a Graphs, got {type(part).__name__}")
        device, common = (parts[0]._device, parts[0]._names) if parts else (_CPU, None)
        cores = [part._core for part in parts if part._device is device and part._names is common]
        if len(cores) == len(parts):
            return _new(_C.batch(cores, common is not None), common, device)
        for i, part in enumerate(parts):
            if part._device != device:
                raise RuntimeError(f"Graphs.batch: graphs[{i}] is on {part.device}, graphs[0] on {device}")
        names = {part._names for part in parts}
        if len(names) > 1:
            return _typed_alike(parts)._moved(device)
        common = names.pop() if names else None
        return _new(_C.batch([part._core for part in parts], common is not None), common, device)

    def with_types(self, types: Sequence[str]) -> Graphs:
        """The same graphs with a name per vertex, a flat sequence over the batch.

        Raises:
            ValueError: the number of names is not ``num_vertices``.
            TypeError: a name is no str.
        """
        core, names = self._core.with_types(types)
        return _new(core, names)._like(self)

    @property
    def num_graphs(self) -> int:
        return self._core.num_graphs

    @property
    def num_vertices(self) -> int:
        return self._core.num_vertices

    @property
    def num_edges(self) -> int:
        return self._core.num_edges

    @property
    def num_levels(self) -> int:
        return self._core.num_levels

    @property
    def num_slots(self) -> int:
        return self._core.num_slots

    @property
    def ptr(self) -> Tensor:
        return self._tensor("ptr")

    @property
    def graph_index(self) -> Tensor:
        return self._tensor("graph_index")

    @property
    def edges(self) -> Tensor:
        return self._tensor("edges")

    @property
    def levels(self) -> Tensor:
        return self._tensor("levels")

    @property
    def roots(self) -> Tensor:
        return self._tensor("roots")

    @property
    def types(self) -> tuple[str, ...] | None:
        if self._types is None and self._names is not None:
            self._types = self._core.type_names(self._names)
        return self._types

    @property
    def device(self) -> torch.device:
        return self._device

    def __len__(self) -> int:
        return self._core.num_graphs

    def __getitem__(self, index: Any) -> Graphs:
        if isinstance(index, slice):
            chosen = range(len(self))[index]
            core = self._core.slice(chosen.start, len(chosen), chosen.step)
            return _new(core, self._names)._like(self)
        if isinstance(index, bool) or (isinstance(index, Tensor) and index.dtype == torch.bool):
            raise TypeError("Graphs: an index must be an integer or a slice, got a bool")
        try:
            i = operator.index(index)
        except TypeError:
            raise TypeError(f"Graphs: an index must be an integer or a slice, got {type(index).__name__}") from None
        if not -len(self) <= i < len(self):
            raise IndexError(f"Graphs: index {i} is out of range for {len(self)} graphs")
        return _new(self._core.slice(i % len(self), 1, 1), self._names)._like(self)

    def __iter__(self) -> Iterator[Graphs]:
        return (self[i] for i in range(len(self)))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Graphs:
        """The graphs with their tensors on `device`: itself where nothing changes, else a copy.

        Only what is asked for is copied, when it first is; on a CUDA device the schedules of the vertex functions last
        used are sent at once.
        """
        if isinstance(device, torch.dtype) or isinstance(non_blocking, torch.dtype):
            raise TypeError("Graphs.to: takes a device; the tensors of Graphs stay int64")
        try:
            target = torch.device(device)
        except TypeError:
            raise TypeError(f"Graphs.to: device must be a device, got {type(device).__name__}") from None
        if target.type == "cpu":
            target = _CPU
        elif target.type == "cuda" and target.index is None and torch.cuda.is_initialized():
            target = torch.device("cuda", torch.cuda.current_device())
        else:
            target = torch.empty(0, device=target).device  # which says whether there is such a device, and its number
        if target == self._device:
            return self
        moved = self._moved(target)
        if target.type == "cuda":
            _tell(moved)
        return moved

    def cuda(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Graphs:
        """As :meth:`to`, on a CUDA device, the current one by default."""
        return self.to("cuda" if device is None else device, non_blocking)

    def cpu(self) -> Graphs:
        """As :meth:`to`, on the CPU."""
        return self.to(_CPU)

    def pin_memory(self) -> Graphs:
        """The graphs with their tensors in pinned memory: itself where they are, else a copy.

        The schedules of the vertex functions last used are planned at once, so that a DataLoader's thread that pins
        batches does that beside the steps.
        """
        if self._pinned:
            return self
        if self._device != _CPU:
            torch.empty(0, device=self._device).pin_memory()  # which torch refuses
        pinned = self._moved(_CPU)
        pinned._pinned = True
        pinned._tensor("ptr")  # where nothing can be pinned, this call shall say so
        _tell(pinned)
        return pinned

    def is_pinned(self) -> bool:
        """Whether the tensors are in pinned memory."""
        return self._pinned

    def __eq__(self, other: object) -> bool:
        """Whether the graphs, their order, slots and types are the same, wherever the tensors are."""
        if not isinstance(other, Graphs):
            return NotImplemented
        if self is other or self._core is other._core:
            return self is other or self._names == other._names
        if self._names == other._names:
            return self._core.equals(other._core)
        if self._names is None or other._names is None:
            return False
        number = {name: i for i, name in enumerate(self._names)}
        return self._core.equals(other._core.renamed_types([number.get(name, -1) for name in other._names]))

    def __hash__(self) -> int:
        return hash((self.num_graphs, self.num_vertices, self.num_edges, self.num_levels, self.num_slots))

    def __repr__(self) -> str:
        where = "" if self.device == _CPU else f", device='{self.device}'"
        return (
            f"Graphs(num_graphs={self.num_graphs}, num_vertices={self.num_vertices}, num_edges={self.num_edges}, "
            f"num_levels={self.num_levels}{where})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # An empty tensor says where the graphs were: torch.load's map_location and its reductions apply to it.
        place = None if self._device == _CPU else torch.empty(0, device=self._device)
        return _load, (self._core.to_bytes(), self._names, place)

    def __copy__(self) -> Graphs:
        return self._moved(self._device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return self._moved(self._device)

    def _tensor(self, name: str) -> Tensor:
        found = self._tensors.get(name)
        if isinstance(found, Tensor):
            return found
        if self._device.type == "cuda":
            resident = found or self._tensors.setdefault(name, Resident(self._device))
            return resident.tensor(lambda: _array(self._core, name, pinned=True))
        with trainable():
            tensor = _array(self._core, name, self._pinned).to(self._device)
        self._tensors[name] = tensor
        return tensor

    def _moved(self, device: torch.device) -> Graphs:
        moved = _new(self._core, self._names, device)
        moved._plans, moved._expected = self._plans, self._expected
        moved._pinned = self._pinned and device == _CPU
        return moved

    def _like(self, other: Graphs) -> Graphs:
        """Where `other` is."""
        return self if other._device == _CPU else self._moved(other._device)


def _check_one_per_graph(method: str, name: str, value: object) -> None:
    """ValueError for the array of one graph, whose rows would be taken for graphs."""
    shape = getattr(value, "shape", ())
    if len(shape) == 2 and 0 not in shape:
        raise ValueError(
            f"Graphs.{method}: graph 0: {name} must be a sequence with an entry per graph, got one of shape "
            f"{tuple(shape)}; of a single graph call Graphs.{method}([{name}], [num_vertices])"
        )


def _new(
    core: _C.Graphs,
    names: tuple[str, ...] | None = None,
    device: torch.device = _CPU,
) -> Graphs:
    graphs = object.__new__(Graphs)
    graphs._core = core
    graphs._names = names
    graphs._types = None
    graphs._device = device
    graphs._pinned = False
    graphs._tensors, graphs._plans, graphs._expected, graphs._kept = {}, {}, {}, {}
    return graphs


def _tell(graphs: Graphs) -> None:
    for callback in on_move:
        callback(graphs)


def _load(data: bytes, names: tuple[str, ...] | None, place: Tensor | None) -> Graphs:
    graphs = _new(_C.from_bytes(data, 0 if names is None else len(names)), names)
    return graphs if place is None or place.device == _CPU else graphs._moved(place.device)


def _shape(core: _C.Graphs, name: str) -> tuple[int, ...]:
    if name == "ptr":
        return (core.num_graphs + 1,)
    if name == "edges":
        return (core.num_edges, 3)
    return (core.num_graphs if name == "roots" else core.num_vertices,)


def _array(core: _C.Graphs, name: str, pinned: bool) -> Tensor:
    tensor = torch.empty(_shape(core, name), dtype=torch.int64, device="cpu", pin_memory=pinned)
    getattr(core, f"write_{name}")(tensor.data_ptr())
    return tensor


def _typed_alike(parts: list[Graphs]) -> Graphs:
    """The batch, on the CPU, of graphs whose tables of types differ."""
    counted = [part for part in parts if len(part)]
    typed = any(part._names is not None for part in counted[:1] or parts)
    graph = 0
    for part in counted:
        if (part._names is not None) != typed:
            raise ValueError(f"Graphs.batch: graph {graph} has {'no ' if typed else ''}types, unlike those before it")
        graph += len(part)
    table: dict[str, int] = {}
    cores = []
    for part in counted:
        codes = [table.setdefault(name, len(table)) for name in part._names or ()]
        cores.append(part._core if codes == list(range(len(codes))) else part._core.renamed_types(codes))
    return _new(_C.batch(cores, typed), tuple(table) if typed else None)
