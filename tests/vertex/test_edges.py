"""Inputs of edges: ``v.pull_edges``, and a net over graphs with features at both vertices and edges."""

from __future__ import annotations

import pytest
import torch
import weft
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from tests.common import relative_error
from tests.vertex.cells import CHILDREN, GRAPHS, devices, executors, rows


class EdgeNet(weft.VertexFunction):
    """A gated sum over children, whose messages read the edge that they come along."""

    def __init__(self):
        super().__init__(3)
        self.W, self.M = nn.Linear(3, 3), nn.Linear(3 + 2, 3)

    def vertex(self, v):
        def message(child, edge, x):
            return torch.sigmoid(x) * torch.tanh(self.M(torch.cat((child, edge), 1)))

        h = torch.tanh(self.W(v.pull("x")) + v.gather_sum(message, v.pull_edges("bond"), v.pull("x")))
        v.scatter(h)
        v.push(h)


def naive(m, graphs, x, bond):
    """Vertex by vertex."""
    h = {}
    for v in sorted(range(graphs.num_vertices), key=lambda v: int(graphs.levels[v])):
        total = m.W(x[v])
        for e, (child, parent, _) in enumerate(graphs.edges.tolist()):
            if parent == v:
                total = total + torch.sigmoid(x[v]) * torch.tanh(m.M(torch.cat((h[child], bond[e]))))
        h[v] = torch.tanh(total)
    return torch.stack([h[v] for v in range(graphs.num_vertices)])


@executors
def test_messages_read_the_features_of_their_edge(executor):
    m = EdgeNet().double()
    x, bond = rows(dtype=torch.float64), torch.randn(GRAPHS.num_edges, 2, dtype=torch.float64)
    out = m(GRAPHS, {"x": x, "bond": bond}, executor=executor)
    assert relative_error(out, naive(m, GRAPHS, x, bond)) < 1e-12
    explained = weft.explain(m, GRAPHS, {"x": x, "bond": bond}, executor=executor)
    assert explained.executor == "reference"
    assert executor == "reference" or "pull_edges" in explained.reason
    assert "pull_edges" in str(m.program)


def test_gradients_reach_the_features_of_edges():
    m = EdgeNet().double()
    x = rows(dtype=torch.float64, requires_grad=True)
    bond = torch.randn(GRAPHS.num_edges, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, bond: m(GRAPHS, {"x": x, "bond": bond}), (x, bond))
    assert gradgradcheck(lambda x, bond: m(GRAPHS, {"x": x, "bond": bond}), (x, bond))


@devices
def test_as_many_edges_as_vertices(device):
    """A value of vertices and one of edges are told apart by where they come from, not by how many rows they have."""
    graphs = weft.Graphs.from_children([[[], [], [0, 1], [2, 1]]])
    assert graphs.num_edges == graphs.num_vertices
    m = EdgeNet().to(device)
    x, bond = torch.randn(4, 3, device=device), torch.randn(4, 2, device=device)
    assert relative_error(m(graphs.to(device), {"x": x, "bond": bond}), naive(m, graphs, x, bond)) < 1e-5


def test_the_empty_batch_and_graphs_without_edges():
    m = EdgeNet()
    empty = weft.Graphs.batch([])
    assert m(empty, {"x": torch.randn(0, 3), "bond": torch.randn(0, 2)}).shape == (0, 3)
    leaves = weft.Graphs.from_children([[[]], [[]]])
    x = torch.randn(2, 3)
    assert relative_error(m(leaves, {"x": x, "bond": torch.randn(0, 2)}), torch.tanh(m.W(x))) < 1e-6


def test_refusals_name_the_input():
    m, x, bond = EdgeNet(), rows(), torch.randn(GRAPHS.num_edges, 2)
    with pytest.raises(ValueError, match=r"EdgeNet: input 'bond' must have one row per edge, \d+ rows, got 9"):
        m(GRAPHS, {"x": x, "bond": torch.randn(GRAPHS.num_vertices, 2)})
    with pytest.raises(ValueError, match="EdgeNet: input 'x' must have one row per vertex"):
        m(GRAPHS, {"x": torch.randn(GRAPHS.num_edges, 3), "bond": bond})
    with pytest.raises(ValueError, match=r"input 'bond'.*missing"):
        m(GRAPHS, {"x": x})

    class Both(EdgeNet):
        def vertex(self, v):
            v.pull("x")
            v.push(v.gather_sum(lambda child, e: child, v.pull_edges("x")))

    with pytest.raises(ValueError, match="input 'x' both for vertices and for edges"):
        Both()(GRAPHS, {"x": x})

    class Outside(EdgeNet):
        def vertex(self, v):
            h = torch.tanh(v.gather_sum(lambda child, e: child + e, self.M(v.pull_edges("bond"))))
            v.scatter(h)
            v.push(h)

    with pytest.raises(ValueError, match="argument 0 of gather_sum must have one row per vertex"):
        Outside()(GRAPHS, {"bond": torch.randn(GRAPHS.num_edges, 5)})


@executors
def test_an_input_of_the_wrong_width_is_named(executor):
    with pytest.raises(RuntimeError, match=r"EdgeNet: input 'x' has rows of shape \(7,\).*cannot be multiplied"):
        EdgeNet()(GRAPHS, {"x": rows(width=7), "bond": torch.randn(GRAPHS.num_edges, 2)}, executor=executor)
    m = weft.vertex.models.TreeLSTM(3, 2)
    with pytest.raises(RuntimeError, match=r"TreeLSTM: input 'input' has rows of shape \(4,\)"):
        m(weft.Graphs.from_children(CHILDREN[:1]), torch.randn(3, 4), executor=executor)
    m(weft.Graphs.from_children(CHILDREN[:1]), torch.randn(3, 3), executor=executor)
