"""What the tests of messages share: the classes that people call, and how a refusal reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import weft
from torch import nn
from weft import Graphs
from weft.nn import GRU, LRU, LSTM, RGLRU, RNN, S5, SLSTM, MinGRU, MinLSTM, ParaGRU, ParaLSTM

LAYERS = {kind.__name__: kind for kind in (RNN, GRU, LSTM, SLSTM, MinGRU, MinLSTM, RGLRU, LRU, S5, ParaGRU, ParaLSTM)}
CELLS = {name: getattr(weft.nn, name) for name in ("RNNCell", "GRUCell", "LSTMCell", "SLSTMCell")}
BOTH = {**LAYERS, **CELLS}
TORCHS = ("RNN", "GRU", "LSTM", "SLSTM")
"""Whose exceptions are of torch's types."""

every = pytest.mark.parametrize("name", BOTH)
layers = pytest.mark.parametrize("name", LAYERS)
cells = pytest.mark.parametrize("name", CELLS)

GRAPHS = Graphs.from_children([[[], [], [0, 1]]])


def x(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        call()
    text = str(caught.value)
    assert "CppNode" not in text and "Could not run" not in text and "_Min" not in text


class Cell(weft.VertexFunction):
    def __init__(self, function=None):
        super().__init__(state_size=4)
        self.W, self.function = nn.Linear(4, 4), function

    def vertex(self, v):
        h = torch.tanh(self.W(v.pull()) + v.gather_sum()) if self.function is None else self.function(v)
        v.scatter(h)
        v.push(h)


def step(h, x, p):
    return torch.tanh(h + x)
