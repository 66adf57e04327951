"""Drop-in recurrent layers: :class:`torch.nn.RNN`, :class:`~torch.nn.GRU` and :class:`~torch.nn.LSTM` with a choice of
algorithm, and torch's three cells; and xLSTM's :class:`SLSTM` with its cell.

They take the same arguments, hold the same parameters under the same names, return the same results and refuse the same
input with the same exception types. Their classes are derived from :class:`torch.nn.RNNBase`, not from torch's three
layers, because ``torch.compile`` refuses every instance of those; isinstance is true of them all the same.

The keyword ``algorithm`` says what runs:

- ``"auto"`` (default): what :func:`weft.tune` measured to be the fastest for such inputs; else "scan" or "persistent"
  where they are expected to be faster than "torch", which runs everything else. In a compiled graph, where length and
  batch are unknown, what it takes for short sequences and small batches;
- ``"persistent"``: one operator per layer for all time steps and both directions, packed sequences without padding
  included; on a GPU one kernel that keeps the weights on the chip (Persistent RNN, ICML 2016);
- ``"scan"``: the same operator, its backward pass a parallel scan over transposed Jacobians (BPPSA, MLSys 2020);
- ``"newton"``: the same, its forward pass in chunks of time that are walked at once, and again until their seams meet:
  short where a net forgets. Each step satisfies the recurrence from the step before it up to rounding, across chunks
  too; :class:`weft.scan.newton_report` tells what it did;
- ``"torch"``: torch's own kernel (cuDNN on a GPU);
- ``"reference"``: :mod:`weft.reference`, a slow loop in plain torch, differentiable to any order.

An algorithm that does not fit an input runs as another, never as an error; :func:`weft.explain` says which and why.
Under ``torch.func`` transforms that differentiate and in forward-mode AD the reference runs.

:class:`RNNCell`, :class:`GRUCell` and :class:`LSTMCell` are torch's cells, a step of which is one operator, for loops
that decide at each step what the next one gets. They are subclasses of torch's. Their ``algorithm`` is ``"auto"``
(default), ``"fused"``, which is that operator, or ``"torch"``, torch's own operations; ``"auto"`` takes "fused", but
on a CPU "torch" for more than 4 sequences of more than 256 hidden units. Under ``torch.func`` transforms that
differentiate and in forward-mode AD torch's operations run.

With ``num_heads`` the recurrent matrix of a layer or cell is block-diagonal: each head of H / num_heads units has
weights of its own and reads its own part of the state. torch has no such layers, nor an sLSTM: there "torch" and "scan"
run as "persistent". On a GPU heads run beside each other, and larger H fit on the chip.

:class:`MinGRU`, :class:`MinLSTM` and :class:`RGLRU` are recurrences whose gates depend on the input alone, :class:`LRU`
and :class:`S5` linear ones over complex states, so that all time steps run in parallel, by
:func:`weft.scan.linear_scan`. They stand in a GRU's place: its arguments, layouts, states and packed sequences.
:class:`ParaGRU` and :class:`ParaLSTM` have gates that look at the state, each at its own channel's:
:func:`weft.scan.pointwise_scan` walks them.
"""

from __future__ import annotations

from ._rnn.cells import GRUCell, LSTMCell, RNNCell, SLSTMCell
from ._rnn.layers import GRU, LSTM, RNN, SLSTM
from ._scan.complex_layers import LRU, S5
from ._scan.gated import RGLRU, MinGRU, MinLSTM
from ._scan.para import ParaGRU, ParaLSTM

__all__ = [
    "GRU", "LRU", "LSTM", "RGLRU", "RNN", "S5", "SLSTM", "GRUCell", "LSTMCell", "MinGRU", "MinLSTM", "ParaGRU",
    "ParaLSTM", "RNNCell", "SLSTMCell",
]  # fmt: skip
