"""``weft.tune``: the measurement is that of the engine of what is tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import nn, scan, vertex
from ._rnn.explain import Explanation
from ._rnn.select.tune import tune as tune_layer
from ._scan.explain import SCAN_LAYERS, ScanExplanation
from ._scan.tune import tune_layer as tune_scan_layer
from ._scan.tune import tune_pointwise_scan
from ._vertex.tune import tune as tune_cell

__all__ = ["tune"]


@overload
def tune(
    layer: nn.RNN | nn.GRU | nn.LSTM, x: Tensor | PackedSequence, hx: Tensor | tuple[Tensor, Tensor] | None = None
) -> Explanation: ...
@overload
def tune(
    cell: vertex.VertexFunction | vertex.VertexFunctions,
    graphs: vertex.Graphs,
    inputs: Tensor | Mapping[str, Tensor] | None = None,
) -> vertex.Explanation: ...
@overload
def tune(
    layer: nn.ParaGRU | nn.ParaLSTM | nn.MinGRU | nn.MinLSTM | nn.RGLRU | nn.LRU | nn.S5,
    input: Tensor | PackedSequence,
    hx: Tensor | tuple[Tensor, Tensor] | None = None,
) -> ScanExplanation: ...
@overload
def tune(
    scan: Callable[..., Any], step: Callable[..., Any], init: Any, inputs: Any, parameters: Any = (), *,
    reverse: bool = False,
) -> ScanExplanation: ...  # fmt: skip


def tune(*args, **kwargs):
    """Measure what can run ``layer(x, hx)`` or ``cell(graphs, inputs)``; "auto" takes the fastest from now on.

    - ``tune(layer, x, hx=None)``: the algorithms of one of Weft's recurrent layers. The result holds for all layers of
      the same kind and sizes on this device, for lengths and batches in the same interval between powers of two, in the
      same dtype, with or without TF32, packed or not, with or without gradients. It is kept in ``tune.json``.
    - ``tune(cell, graphs, inputs=None)``: the executors of a :class:`weft.VertexFunction` or
      :class:`weft.VertexFunctions`, as a call runs by itself and, of the device alone, as in a CUDA graph; and how
      persistent kernels group their blocks, also those of a :class:`weft.vertex.Trainer`. The result holds for cells
      with the same program on this device, for numbers of graphs, vertices, edges and levels in the same intervals,
      with or without TF32 and gradients, under the same :func:`weft.vertex.options`. It is kept in
      ``tune_vertex.json``.
    - ``tune(layer, input, hx=None)`` of a :class:`~weft.nn.ParaGRU` or :class:`~weft.nn.ParaLSTM`, and
      ``tune(weft.scan.pointwise_scan, step, init, inputs, parameters=())``: one piece of time or many. The result holds
      for calls with the same step on this device, for lengths and numbers of channels in the same intervals, in the
      same dtype, with or without gradients. It is kept in ``tune_scan.json``. The other layers that are made of scans
      have one algorithm: of these nothing is measured.

    The files are in ``$WEFT_CACHE_DIR/<version>`` or ``~/.cache/weft/<version>``; other processes read them when they
    start.

    All candidates run in turn, so that whatever else the machine does meets all of them, and each counts by its fastest
    run. Where even those are not repeated, because the machine is busy, nothing is stored, and a warning says so.

    Measured is the forward pass, and the backward pass where anything asks for a gradient: call it under
    ``torch.no_grad`` to tune for inference. Gradients, the random number generators and the layer or cell stay as they
    are; a layer's hooks do not run. It takes some seconds and waits for the device.

    Args:
        layer: one of Weft's layers.
        x: an input, as the layer takes it.
        hx: an initial state, as the layer takes it.
        cell: a vertex function.
        graphs: a batch, as the cell takes it.
        inputs: of the batch, as the cell takes them.

    Returns:
        What :func:`weft.explain` then says, with the measured times.

    Raises:
        TypeError: the first argument is neither; `x` no Tensor and no PackedSequence, or `hx` not of Tensors.
        RuntimeError: inside ``torch.compile``, a ``torch.func`` transform, forward-mode AD or the capture of a graph.
        Otherwise what the layer or the cell itself raises for this input, whatever runs.

    Warns:
        UserWarning: times differ too much from run to run; nothing was stored.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("tune: a compiled graph cannot measure; call weft.tune before torch.compile")
    subject = args[0] if args else kwargs.get("cell", kwargs.get("layer"))
    if isinstance(subject, (vertex.VertexFunction, vertex.VertexFunctions)):
        return tune_cell(*args, **kwargs)
    if isinstance(subject, SCAN_LAYERS):
        return tune_scan_layer(*args, **kwargs)
    if subject is scan.pointwise_scan:
        return tune_pointwise_scan(*args[1:], **kwargs)
    return tune_layer(*args, **kwargs)
