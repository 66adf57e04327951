"""Graphs of other libraries, read and written. These are imported where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._C import vertex as _C

__all__ = ["read_dgl", "read_networkx", "read_pyg", "write_networkx"]

Read = tuple["_C.Graphs", "list[str] | None"]
"""The graphs, and a type for each vertex where there are types."""


def _each(graphs: object, op: str, is_one: Callable[[object], bool], expected: str) -> list[Any]:
    """A graph, or a sequence of them, as a list."""
    if is_one(graphs):
        return [graphs]
    if isinstance(graphs, Iterable) and not isinstance(graphs, (str, bytes, dict, Tensor)):
        found = list(graphs)
        for i, graph in enumerate(found):
            if not is_one(graph):
                raise TypeError(f"{op}: graph {i}: expected {expected}, got {type(graph).__name__}")
        return found
    raise TypeError(f"{op}: expected {expected} or a sequence of them, got {type(graphs).__name__}")


def _parted(edge_index: Tensor, sizes: list[int], op: str, first: int) -> list[Tensor]:
    """The edges of each of several graphs, numbered as in their own graph; of a batch's graphs the first is `first`."""
    starts = torch.tensor([0, *sizes], device="cpu").cumsum(0)
    edge_index = edge_index.cpu()
    if len(sizes) == 1:
        return [edge_index]
    beyond = ((edge_index < 0) | (edge_index >= starts[-1])).nonzero()[:1].tolist()
    if beyond:
        row, e = beyond[0]
        raise ValueError(
            f"{op}: graph {first}: edge {e}: {('child', 'parent')[row]} {int(edge_index[row, e])} is out of range for "
            f"the {int(starts[-1])} vertices of its batch"
        )
    graph = torch.searchsorted(starts[1:], edge_index, right=True)
    apart = (graph[0] != graph[1]).nonzero()[:1, 0].tolist()
    if apart:
        g, h = graph[:, apart[0]].tolist()
        raise ValueError(f"{op}: graph {first + g}: edge {apart[0]} leads to graph {first + h}")
    order = torch.argsort(graph[0], stable=True)
    counts = torch.bincount(graph[0], minlength=len(sizes))[: len(sizes)]
    pieces = edge_index[:, order].split(counts.tolist(), 1)
    return [piece - start for piece, start in zip(pieces, starts.tolist(), strict=False)]


def read_pyg(data: object) -> Read:
    op = "Graphs.from_pyg"
    indices, sizes = [], []
    one = _each(data, op, lambda d: hasattr(d, "edge_index") and hasattr(d, "num_nodes"), "a torch_geometric Data")
    for d in one:
        if not isinstance(d.edge_index, Tensor) or d.edge_index.dim() != 2 or len(d.edge_index) != 2:
            raise ValueError(f"{op}: graph {len(sizes)}: edge_index must have shape (2, edges)")
        ptr = getattr(d, "ptr", None)  # of a Batch
        mine = [int(d.num_nodes)] if ptr is None else torch.as_tensor(ptr).diff().tolist()
        indices += _parted(d.edge_index, mine, op, len(sizes))
        sizes += mine
    return _C.from_edge_index(indices, sizes, op), None


def read_dgl(graphs: object) -> Read:
    op = "Graphs.from_dgl"
    indices, sizes = [], []
    for g in _each(graphs, op, lambda g: hasattr(g, "batch_num_nodes") and hasattr(g, "edges"), "a DGLGraph"):
        if not getattr(g, "is_homogeneous", True):
            raise ValueError(f"{op}: graph {len(sizes)}: is heterogeneous; call dgl.to_homogeneous first")
        mine = g.batch_num_nodes().tolist()
        indices += _parted(torch.stack(tuple(g.edges())), mine, op, len(sizes))
        sizes += mine
    return _C.from_edge_index(indices, sizes, op), None


def read_networkx(graphs: object) -> Read:
    import networkx

    op = "Graphs.from_networkx"
    edges, sizes, types = [], [], []
    for i, g in enumerate(_each(graphs, op, lambda g: isinstance(g, networkx.Graph), "a networkx.DiGraph")):
        if not g.is_directed():
            raise ValueError(
                f"{op}: graph {i}: is undirected; make it a networkx.DiGraph whose edges run from child to parent, or "
                "use a library for message passing on any graph, such as PyTorch Geometric or DGL"
            )
        number = {node: v for v, node in enumerate(g.nodes)}
        found = [(number[u], number[v], slot) for u, v, slot in g.edges(data="slot")]
        slotted = sum(slot is not None for _, _, slot in found)
        if slotted not in (0, len(found)):
            raise ValueError(
                f"{op}: graph {i}: {slotted} of {len(found)} edges have a slot; give one to all or to none"
            )
        edges.append([[*edge] if slotted else [*edge[:2]] for edge in found])
        sizes.append(len(number))
        types += [name for _, name in g.nodes(data="type")]
    return _C.from_edges(edges, sizes, op), types if types and None not in types else None


def write_networkx(graphs: Any) -> Any:
    import networkx

    rows = graphs.to("cpu").edges.tolist()
    several = len({(u, v) for u, v, _ in rows}) < len(rows)
    g = networkx.MultiDiGraph() if several else networkx.DiGraph()
    index = graphs.to("cpu").graph_index.tolist()
    for v, graph in enumerate(index):
        g.add_node(v, graph=graph, **({} if graphs.types is None else {"type": graphs.types[v]}))
    for u, v, slot in rows:
        g.add_edge(u, v, slot=slot)
    return g
