"""How each algorithm runs a call of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import RNNBase
from torch.nn import functional as F

from .._base.torch_private import RNN_KERNELS
from . import projection, reference
from .calls import Call
from .dropin import torch_rnn
from .table import MODES, traits

__all__ = ["Result", "in_one_dtype", "run", "run_at_once"]

_rnn = torch.ops.weft.rnn.default


class Result(NamedTuple):
    """What a run returns: output (T, B, features) or as the input is laid out; (h_n,), for an LSTM (h_n, c_n), for an
    sLSTM (h_n, c_n, n_n, m_n); the last layer's c at every step, where it is asked for."""

    output: Tensor
    final: tuple[Tensor, ...]
    cells: Tensor | None = None


def run_at_once(layer: RNNBase, name: str, input: Tensor, state: tuple[Tensor, ...] | None) -> Any:
    lstm = layer.mode == "LSTM"
    if name == "torch":
        kernel = RNN_KERNELS[MODES[layer.mode]]
        output, *final = kernel(
            input, state if lstm else state[0], layer._flat_weights, layer.bias, layer.num_layers, layer.dropout,
            layer.training, layer.bidirectional, layer.batch_first,
        )  # fmt: skip
        return output, tuple(final)
    steps = input.transpose(0, 1) if layer.batch_first else input
    cell = MODES[layer.mode]
    output, h_n, c_n, _, _ = _rnn(
        steps, *operands(state), layer._flat_weights, None, cell=cell, bidirectional=layer.bidirectional, backward=name,
        num_heads=layer.num_heads,
    )  # fmt: skip
    return output.transpose(0, 1) if layer.batch_first else output, states(cell, h_n, c_n)


def operands(state: Sequence[Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """h0 and c0 of the operator, which takes all states beside h side by side."""
    if state is None:
        return None, None
    h, *others = state
    return h, None if not others else others[0] if len(others) == 1 else torch.cat(others, -1)


def states(cell: str, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """The states that the operator returns as h and c."""
    others = traits(cell).others
    return (h,) if others == 0 else (h, c) if others == 1 else (h, *c.chunk(others, -1))


def run(layer: RNNBase, name: str, call: Call) -> Result:
    """Run a call by an algorithm that can."""
    compiling = torch.compiler.is_compiling()
    if name == "torch" and not compiling and not torch_rnn.needs_any_derivative(call.case):
        return _run_torch(layer, call)
    transpose = layer.batch_first and call.batch_sizes is None
    if transpose:
        call = call._replace(input=call.input.transpose(0, 1))
    if name == "torch":
        result = _run_torch_without_dropout(layer, call, compiling)
    elif name == "reference":
        result = _run_reference(layer, call)
    else:
        result = _run_weft(layer, call, name)
    if not transpose:
        return result
    cells = None if result.cells is None else result.cells.transpose(0, 1)
    return Result(result.output.transpose(0, 1), result.final, cells)


def _zero_state(layer: RNNBase, call: Call) -> tuple[Tensor, ...]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    h0 = call.input.new_zeros(count, call.batch, layer.proj_size or layer.hidden_size)
    others = traits(MODES[layer.mode]).others
    if layer.proj_size == 0:
        return (h0,) * (1 + others)
    return h0, call.input.new_zeros(count, call.batch, layer.hidden_size)


def _run_torch(layer: RNNBase, call: Call) -> Result:
    output, *final = torch_rnn.call(
        call.case.cell,
        call.input,
        call.state or _zero_state(layer, call),
        call.weights,
        layer.bias,
        layer.num_layers,
        layer.dropout,
        layer.training,
        layer.bidirectional,
        layer.batch_first,
        call.batch_sizes,
    )
    return Result(output, tuple(final))


def _run_torch_without_dropout(layer: RNNBase, call: Call, compiling: bool) -> Result:
    """torch's kernel where its backward pass computes the forward pass again, so that no dropout mask may be drawn
    inside it."""
    input, weights = call.input, call.weights
    state = call.state or _zero_state(layer, call)
    dropout = layer.dropout if layer.training else 0.0
    layers = layer.num_layers if dropout == 0 else 1
    rows = layers * (2 if layer.bidirectional else 1)
    stride = len(weights) // layer.num_layers * layers
    finals = []
    for group in range(layer.num_layers // layers):
        arguments = (
            input,
            [s[group * rows : (group + 1) * rows] for s in state],
            weights[group * stride : (group + 1) * stride],
            call.batch_sizes,
            call.case.cell,
            layer.bias,
            layers,
            layer.bidirectional,
        )
        if compiling:
            input, *final = torch.ops.weft.torch_rnn(*arguments, call.autocast, *call.dtypes)
        else:
            input, *final = torch_rnn.call_with_any_derivative(*arguments)
        finals.append(final)
        if dropout > 0 and group + 1 < layer.num_layers:
            input = F.dropout(input, dropout, True)
    return Result(input, tuple(_joined(parts) for parts in zip(*finals, strict=True)))


def _run_weft(layer: RNNBase, call: Call, backward: str) -> Result:
    """By weft::rnn, with this way of its backward pass."""
    if call.autocast is None:
        return _run_layers(layer, call, backward)
    # What autocast would cast the op's arguments to is not always what torch's layers compute in.
    with torch.autocast(call.input.device.type, enabled=False):
        return _run_layers(layer, call, backward)


def _run_layers(layer: RNNBase, call: Call, backward: str) -> Result:
    input, state, weights, cell = in_one_dtype(call)
    rows = 2 if layer.bidirectional else 1
    stride = len(weights) // layer.num_layers
    cells, finals = None, []
    for number in range(layer.num_layers):
        last = number + 1 == layer.num_layers
        part = state
        if state is not None and layer.num_layers > 1:
            # Short sequences wait for the host, for which a node of autograd is much.
            part = tuple(s.narrow(0, number * rows, rows) for s in state)
        arguments = input, *operands(part), weights[number * stride : (number + 1) * stride], call.batch_sizes
        flags = {"bidirectional": layer.bidirectional, "keep_cells": last and layer.return_cells}
        if layer.proj_size > 0:
            input, h_n, c_n, cells = projection.lstm(*arguments, **flags)
        else:
            input, h_n, c_n, cells, _ = _rnn(
                *arguments, cell=cell, backward=backward, num_heads=layer.num_heads, **flags
            )
        finals.append(states(cell, h_n, c_n))
        if layer.dropout > 0 and layer.training and not last:
            input = F.dropout(input, layer.dropout, True)
    # Under autocast on a CPU torch keeps the c of a projected LSTM wider than the rest.
    final = tuple(_joined(p).to(dtype) for p, dtype in zip(zip(*finals, strict=True), call.dtypes, strict=False))
    return Result(input, final, cells.to(call.dtypes[1]) if layer.return_cells else None)


def in_one_dtype(call: Call) -> tuple[Tensor, tuple[Tensor, ...] | None, list[Tensor], str]:
    """Input, state and weights in the dtype that torch's layer runs in here, and the cell."""
    input, state, weights = call.input, call.state, call.weights
    if call.autocast is not None:
        dtype = call.dtypes[0]
        input = input.to(dtype)
        weights = [w.to(dtype) for w in weights]
        state = None if state is None else tuple(s.to(dtype) for s in state)
    return input, state, weights, call.case.cell


def _run_reference(layer: RNNBase, call: Call) -> Result:
    input, state = call.input, call.state or _zero_state(layer, call)
    options: dict[str, Any] = {
        "cell": call.case.cell,
        "bias": layer.bias,
        "num_layers": layer.num_layers,
        "bidirectional": layer.bidirectional,
        "dropout": layer.dropout,
        "training": layer.training,
        "batch_sizes": call.batch_sizes,
        "return_cells": layer.return_cells,
    }
    if call.autocast is None:
        return Result(*reference.rnn(input, state, call.weights, **options))
    with torch.autocast(input.device.type, enabled=False):
        wide = input.to(torch.promote_types(*call.dtypes[:2]))
        output, final, *cells = reference.rnn(wide, state, call.weights, **options)
        final = tuple(s.to(d) for s, d in zip(final, call.dtypes, strict=False))
        return Result(output.to(call.dtypes[0]), final, *(c.to(call.dtypes[1]) for c in cells))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
