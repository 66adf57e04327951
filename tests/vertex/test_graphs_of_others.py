"""Graphs from edge indices, from other libraries, pyramids, equality, and what is said of graphs that do not do."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import weft
from weft import Graphs

EDGES = torch.tensor([[0, 1, 2, 0], [2, 2, 3, 3]])


def test_edge_indices_are_transposed_edges():
    want = Graphs.from_edges([EDGES.T, []], [4, 1])
    for form in (EDGES, EDGES.int(), EDGES.numpy(), EDGES.tolist(), EDGES.T.contiguous().T):
        assert Graphs.from_edge_index([form, torch.zeros(2, 0, dtype=torch.int64)], [4, 1]) == want
    assert Graphs.from_edge_index([], []) == Graphs.batch([])


def test_features_of_an_edge_index_in_the_order_of_the_edges():
    generator = torch.Generator().manual_seed(0)
    child = torch.randint(0, 20, (60,), generator=generator)
    index = torch.stack((child, child + 1 + torch.randint(0, 5, (60,), generator=generator)))
    graphs = Graphs.from_edge_index([index], [25])
    assert torch.equal(graphs.edges[:, :2], index[:, torch.argsort(index[1], stable=True)].T)


def test_errors_of_edge_indices():
    with pytest.raises(ValueError, match=r"from_edge_index: graph 1: .*\(2, edges\).*got \(4, 2\).*Graphs\.from_edges"):
        Graphs.from_edge_index([EDGES, EDGES.T], [4, 4])
    with pytest.raises(ValueError, match=r"from_edge_index: graph 0: .*\(2, edges\)"):
        Graphs.from_edge_index([[[0], [1, 2]]], [3])
    with pytest.raises(ValueError, match="from_edge_index: graph 0, vertex 3: child 4 is out of range"):
        Graphs.from_edge_index([torch.tensor([[4], [3]])], [4])
    with pytest.raises(TypeError, match="from_edge_index: graph 0"):
        Graphs.from_edge_index([EDGES.float()], [4])
    with pytest.raises(ValueError, match=r"from_edges: .*got \(2, 4\).*from_edge_index"):
        Graphs.from_edges([EDGES], [4])


@pytest.mark.parametrize("form", [torch.tensor, np.array])
@pytest.mark.parametrize("rows", [[[0, 2], [1, 2]], [[0, 2, 0], [1, 2, 1]]])
def test_two_rows_of_an_array_may_be_an_edge_index(form, rows):
    with pytest.warns(UserWarning, match="from_edge_index") as caught:
        graphs = Graphs.from_edges([form(rows), form(rows)], [3, 3])
    assert len(caught) == 1 and caught[0].filename == __file__
    assert graphs == Graphs.from_edges([rows, rows], [3, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Graphs.from_edges([rows], [3])
        Graphs.from_edges([form(rows[:1])], [3])
        with pytest.raises(UserWarning):
            Graphs.from_edges([form(rows)], [3])


def test_what_runs_both_ways_or_in_a_circle_says_what_to_use():
    with pytest.raises(
        ValueError, match=r"graph 0, vertex \d: lies on a cycle, as in an undirected graph.*each edge once"
    ):
        Graphs.from_edge_index([torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])], [3])
    with pytest.raises(ValueError, match=r"graph 0, vertex \d: lies on a cycle; .*acyclic.*PyTorch Geometric"):
        Graphs.from_edge_index([torch.tensor([[0, 1, 2], [1, 2, 0]])], [3])
    with pytest.raises(ValueError, match=r"graph 0, vertex 1: lies on a cycle; .*acyclic"):
        Graphs.from_edges([[[1, 1]]], [2])


def test_pyramids():
    graphs = Graphs.pyramid([3, 1])
    assert graphs == Graphs.from_children([[[], [], [], [0, 1], [1, 2], [3, 4]], [[]]])
    assert graphs.levels.tolist() == [0, 0, 0, 1, 1, 2, 0] and graphs.roots.tolist() == [5, 6]
    for n in range(1, 9):
        rows = [[] for _ in range(n)]
        below = 0
        for width in range(n - 1, 0, -1):
            rows += [[below + i, below + i + 1] for i in range(width)]
            below += width + 1
        assert Graphs.pyramid([n]) == Graphs.from_children([rows])
    for wrong in (0, -2):
        with pytest.raises(ValueError, match=r"Graphs\.pyramid: graph 1: the length must be positive"):
            Graphs.pyramid([2, wrong])
    with pytest.raises(ValueError, match="2147483647 vertices"):
        Graphs.pyramid([2**40])
    with pytest.raises(TypeError, match=r"Graphs\.pyramid"):
        Graphs.pyramid([1.5])
    cell = weft.vertex.models.TreeFC(4)
    assert weft.explain(cell, graphs, torch.randn(7, 4)).executor == "batched"
    cell(graphs, torch.randn(7, 4)).sum().backward()


def test_equality():
    a = Graphs.from_children([[[], [], [0, 1]], [[]]])
    b = Graphs.from_parents([[2, 2, -1], [-1]])
    assert a == b and hash(a) == hash(b) and a is not b
    assert a == copy.deepcopy(a) == pickle.loads(pickle.dumps(a))
    for other in (a[:1], a[::-1], Graphs.from_children([[[], [], [1, 0]], [[]]]), a.with_types([*"xxyx"]), None, 3):
        assert a != other
    # The same names by other numbers.
    first = Graphs.batch([a[1:].with_types(["y"]), a[:1].with_types([*"xxy"])])
    assert first[1:] == a[:1].with_types([*"xxy"]) and first[1:] != a[:1].with_types([*"xyy"])


@pytest.mark.cuda
def test_to_cuda_by_name_and_back():
    graphs = Graphs.from_edge_index([EDGES], [4])
    there = graphs.cuda()
    assert there.device.type == "cuda" and there == graphs and graphs.cuda(0).device.index == 0
    assert there.cpu().device.type == "cpu" and there.cpu() == graphs


def test_cpu_changes_nothing_here():
    graphs = Graphs.from_edge_index([EDGES], [4])
    assert graphs.cpu() is graphs


# ---- Other libraries -------------------------------------------------------------------------------------------------


def test_networkx_there_and_back():
    networkx = pytest.importorskip("networkx")
    graphs = Graphs.from_children([[[], [], [1, 0], [2, -1, 0]], [[]]]).with_types([*"aabca"])
    found = graphs.to_networkx()
    assert type(found) is networkx.DiGraph and list(found.nodes) == list(range(5))
    assert found.nodes[4] == {"graph": 1, "type": "a"} and found.edges[0, 3] == {"slot": 2}
    assert Graphs.from_networkx(g.to_networkx() for g in graphs) == graphs
    twice = Graphs.from_children([[[], [0, 0]]])
    assert type(twice.to_networkx()) is networkx.MultiDiGraph
    assert Graphs.from_networkx(twice.to_networkx()) == twice


def test_networkx_of_any_nodes():
    networkx = pytest.importorskip("networkx")
    g = networkx.DiGraph([("b", "a"), ("c", "a"), ("d", "c")])
    assert Graphs.from_networkx(g) == Graphs.from_edges([[[0, 1], [2, 1], [3, 2]]], [4])
    assert Graphs.from_networkx([g, g]).num_graphs == 2
    with pytest.raises(ValueError, match=r"from_networkx: graph 1: is undirected; .*DiGraph"):
        Graphs.from_networkx([g, networkx.Graph(g)])
    with pytest.raises(ValueError, match=r"from_networkx: graph 0, vertex \d: lies on a cycle"):
        Graphs.from_networkx(networkx.cycle_graph(3, networkx.DiGraph))
    with pytest.raises(ValueError, match="from_networkx: graph 0: a graph needs at least one vertex"):
        Graphs.from_networkx(networkx.DiGraph())
    for wrong in (3, [g, 3], "ab", {"a": g}):
        with pytest.raises(TypeError, match=r"Graphs\.from_networkx: .*DiGraph"):
            Graphs.from_networkx(wrong)


def _as_pyg(index, num_nodes, **more):
    return SimpleNamespace(edge_index=index, num_nodes=num_nodes, **more)


def test_what_looks_like_pyg():
    one = _as_pyg(EDGES, 4)
    want = Graphs.from_edge_index([EDGES], [4])
    assert Graphs.from_pyg(one) == want
    assert Graphs.from_pyg([one, one]) == Graphs.batch([want, want])
    # A Batch, its edges not in the order of its graphs.
    index = torch.cat((EDGES + 1, EDGES[:, :0], torch.tensor([[5], [6]])), 1)[:, [4, 0, 1, 2, 3]]
    batch = _as_pyg(index, 7, ptr=torch.tensor([0, 1, 5, 7]))
    assert Graphs.from_pyg(batch) == Graphs.batch([want.chain([1]), want, want.chain([2])])
    with pytest.raises(ValueError, match="from_pyg: graph 0: edge 0 leads to graph 1"):
        Graphs.from_pyg(_as_pyg(torch.tensor([[0], [1]]), 2, ptr=torch.tensor([0, 1, 2])))
    with pytest.raises(ValueError, match=r"from_pyg: graph 1, vertex \d: lies on a cycle, as in an undirected graph"):
        Graphs.from_pyg([one, _as_pyg(torch.tensor([[0, 1], [1, 0]]), 2)])
    with pytest.raises(ValueError, match="from_pyg: graph 0: edge 0: parent 9 is out of range for the 2 vertices"):
        Graphs.from_pyg(_as_pyg(torch.tensor([[0], [9]]), 2, ptr=torch.tensor([0, 1, 2])))
    with pytest.raises(ValueError, match=r"from_pyg: graph 0: edge_index must have shape \(2, edges\)"):
        Graphs.from_pyg(_as_pyg(EDGES.T, 4))
    for wrong in (3, EDGES, [EDGES]):
        with pytest.raises(TypeError, match=r"Graphs\.from_pyg: .*Data"):
            Graphs.from_pyg(wrong)


def test_pyg():
    data = pytest.importorskip("torch_geometric.data")
    one = data.Data(edge_index=EDGES, num_nodes=4)
    want = Graphs.from_edge_index([EDGES], [4])
    assert Graphs.from_pyg(one) == want
    assert Graphs.from_pyg([one, one]) == Graphs.from_pyg(data.Batch.from_data_list([one, one]))


class _AsDgl:
    def __init__(self, edges, sizes):
        self._edges, self._sizes = edges, sizes

    def edges(self):
        return tuple(self._edges)

    def batch_num_nodes(self):
        return torch.tensor(self._sizes)


def test_what_looks_like_dgl():
    want = Graphs.from_edge_index([EDGES], [4])
    assert Graphs.from_dgl(_AsDgl(EDGES, [4])) == want
    batch = _AsDgl(torch.cat((EDGES, EDGES + 4), 1), [4, 4])
    assert Graphs.from_dgl(batch) == Graphs.from_dgl([_AsDgl(EDGES, [4])] * 2) == Graphs.batch([want, want])
    with pytest.raises(TypeError, match=r"Graphs\.from_dgl: .*DGLGraph"):
        Graphs.from_dgl(EDGES)


class _Anything(ModuleType):
    """A module of which every name is a class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def test_dgl(monkeypatch):
    """Without graphbolt, its loader of data, a library for torch up to 2.2 that keeps all of DGL from loading."""
    monkeypatch.setenv("DGLBACKEND", "pytorch")
    monkeypatch.setitem(sys.modules, "dgl.graphbolt", _Anything("dgl.graphbolt"))
    dgl = pytest.importorskip("dgl", reason="DGL 2.1, the newest on PyPI, is for Python up to 3.12")
    g = dgl.graph((EDGES[0], EDGES[1]))
    want = Graphs.from_edge_index([EDGES], [4])
    assert Graphs.from_dgl(g) == want and Graphs.from_dgl(dgl.batch([g, g])) == Graphs.batch([want, want])


def test_slots_of_one_networkx_graph_are_its_own():
    networkx = pytest.importorskip("networkx")
    a, b, c = (networkx.DiGraph() for _ in range(3))
    a.add_edge(0, 2, slot=1)
    a.add_edge(1, 2, slot=0)
    b.add_edge(0, 1)
    alone = Graphs.from_networkx(a).edges
    assert torch.equal(Graphs.from_networkx([a, b]).edges[: len(alone)], alone)
    c.add_edge(0, 2, slot=1)
    c.add_edge(1, 2)
    with pytest.raises(ValueError, match="graph 1: 1 of 2 edges have a slot"):
        Graphs.from_networkx([a, c])
