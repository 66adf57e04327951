"""Vertex functions and graphs that the tests of weft.VertexFunction share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.prune
import weft
from torch import nn
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
