"""Vertex functions and graphs that the tests of weft.VertexFunction share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.prune
import weft
from torch import nn
from torch.nn import functional
from weft.vertex import models

from tests.common import DEVICES

EXECUTORS = ["batched", "reference"]
executors = pytest.mark.parametrize("executor", EXECUTORS)
devices = pytest.mark.parametrize("device", DEVICES)

CHILDREN = [[[], [], [0, 1]], [[]], [[4, 2], [], [1, 1], [], [3, -1]]]
GRAPHS = weft.Graphs.from_children(CHILDREN)
BINARY = weft.Graphs.from_children([[[], [], [0, 1]]])


class Cell(weft.VertexFunction):
    """A vertex function out of a function of (self, v)."""

    def __init__(self, function, state_size=3, **modules):
        super().__init__(state_size)
        self.W, self.function = nn.Linear(3, 3), function
        for name, module in modules.items():
            setattr(self, name, module)

    def vertex(self, v):
        self.function(self, v)


def cell(change=lambda h: h, **modules) -> Cell:
    """A child-sum net with `change(h)` or `change(self, h)` on its state."""

    def vertex(self, v):
        h = torch.tanh(v.pull() + self.W(v.gather_sum()))
        h = change(self, h) if modules else change(h)
        v.scatter(h)
        v.push(h)

    return Cell(vertex, **modules)


def tree_rnn(W, b, change=lambda h: h):
    def step(x, below):
        states = [s for s in below if s is not None]
        h = change(torch.tanh(x + W @ sum(states, torch.zeros_like(b)) + b))
        return h, h

    return step


def rows(graphs=GRAPHS, width=3, **kwargs):
    return torch.randn(graphs.num_vertices, width, **kwargs)


def both(v, h):
    v.scatter(h)
    v.push(h)


NETS = {
    "treelstm": lambda: models.TreeLSTM(3, 2),
    "childsum": lambda: models.ChildSumTreeLSTM(3, 2),
    "treegru": lambda: models.TreeGRU(3, 2),
}
nets = pytest.mark.parametrize("net", NETS)


class Twice(weft.VertexFunction):
    """One linear layer on both children."""

    def __init__(self, x, h):
        super().__init__(h)
        self.W, self.U = nn.Linear(x, h), nn.Linear(h, h)

    def vertex(self, v):
        h = torch.tanh(self.W(v.pull()) + self.U(v.gather(0)) + self.U(v.gather(1)))
        v.scatter(h)
        v.push(h)


class MatrixAndVector(weft.VertexFunction):
    """One parameter is the matrix of a product and scales rows, too."""

    def __init__(self, x, h):
        super().__init__(h)
        self.W, self.a = nn.Linear(x, h), nn.Linear(h, 1, bias=False)

    def vertex(self, v):
        t = torch.tanh(self.W(v.pull()) + v.gather_sum())
        h = torch.tanh(functional.linear(t, self.a.weight) + t * self.a.weight)
        v.scatter(h)
        v.push(h)


class Messages(weft.VertexFunction):
    """Several sums of messages, which share a matrix with each other and with the vertex itself."""

    def __init__(self, x, h):
        super().__init__(h)
        self.W, self.A, self.B = nn.Linear(x, h), nn.Linear(h, h), nn.Linear(h, h, bias=False)

    def vertex(self, v):
        x = self.W(v.pull())
        a = v.gather_sum(lambda s: torch.tanh(self.A(s)))
        b = v.gather_sum(lambda s, y: torch.sigmoid(y + self.A(s)) * self.B(s), x)
        h = torch.tanh(x + a + self.B(b) + v.gather_sum())
        v.scatter(h)
        v.push(h)


class Gates(weft.VertexFunction):
    """Three gates, one of which has no gradient, of a state of odd width."""

    def __init__(self, x, h):
        super().__init__(h)
        self.W, self.U = nn.Linear(x, 3 * h), nn.Linear(h, 3 * h, bias=False)

    def vertex(self, v):
        s = v.gather_sum()
        a, b, c = (self.W(v.pull()) + self.U(s)).chunk(3, 1)
        h = torch.tanh(a + torch.sigmoid(b) * s + c.detach())
        v.scatter(h)
        v.push(h)


class GatedChain(weft.VertexFunction):
    """A cell over chains that is none of the models'."""

    def __init__(self, x, h):
        super().__init__(h)
        self.W, self.U, self.V = nn.Linear(x, 2 * h), nn.Linear(h, h), nn.Linear(h, h, bias=False)

    def vertex(self, v):
        s = v.gather(0)
        a, b = self.W(v.pull()).chunk(2, 1)
        z = torch.sigmoid(a + self.U(s))
        h = (1 - z) * torch.tanh(b + self.V(z * s)) + z * s
        v.scatter(h)
        v.push(h)


class Narrow(weft.VertexFunction):
    """A run of element-wise operations that is narrower than the state, so that blocks have no column of it."""

    def __init__(self, x, h, narrow):
        super().__init__(h)
        self.W, self.U, self.V = nn.Linear(x, h), nn.Linear(h, narrow), nn.Linear(narrow, h)

    def vertex(self, v):
        h = torch.tanh(self.W(v.pull()) + self.V(torch.tanh(self.U(v.gather_sum()))))
        v.scatter(h)
        v.push(h)


def shared_layer(x, h):
    """Two functions with a layer in common."""

    class Function(weft.VertexFunction):
        def __init__(self, layer, inner):
            super().__init__(h)
            self.layer, self.inner = layer, inner
            self.own = nn.Linear(h, h)

        def vertex(self, v):
            y = self.own(v.gather_sum()) if self.inner else v.pull()
            state = torch.tanh(self.layer(y))
            v.scatter(state)
            v.push(state)

    layer = nn.Linear(h, h)
    return weft.VertexFunctions({"leaf": Function(layer, False), "inner": Function(layer, True)})


def typed(graphs: weft.Graphs, cell) -> weft.Graphs:
    """With the types that the cell has functions for."""
    if not isinstance(cell, weft.VertexFunctions):
        return graphs
    return graphs.with_types(["inner" if level else "leaf" for level in graphs.levels.tolist()])


class Aside(weft.VertexFunction):
    """A narrow product beside a wide kernel that does not read it: each block has fewer columns of the one."""

    def __init__(self, input_size, size):
        super().__init__(2 * size)
        self.W, self.U = nn.Linear(input_size, size), nn.Linear(2 * size, size, bias=False)
        self.narrow, self.wide = nn.Linear(2 * size, size // 2), nn.Linear(size // 2, size)

    def vertex(self, v):
        state = v.gather(0)
        aside = torch.tanh(self.wide(torch.relu(self.narrow(state))))
        h = torch.tanh(self.U(state) + self.W(v.pull()))
        v.scatter(torch.cat((aside, h), 1))
        v.push(h)
