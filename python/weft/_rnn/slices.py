"""A layer whose input is a slice of time: each of its layers and directions is walked over all ranks by what
weft.distributed brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from . import calls, runs
from .select import choice

__all__ = ["run_slice"]


def run_slice(layer: Any, over: Any, input: Tensor | PackedSequence, state: tuple[Tensor, ...] | None) -> Any:
    """``output, final`` or, with return_cells, ``output, final, cells``."""
    name = type(layer).__name__
    if layer.num_heads > 1 or len(layer._state_names) > 2:
        raise ValueError(f"{name}: over ranks run layers of one head, and no sLSTM")
    if isinstance(input, PackedSequence):
        raise ValueError(f"{name}: a layer over ranks takes no PackedSequence: its sequences end in other slices")
    over.check_own(name, input=input, **dict(zip(layer._state_names or ("hx",), state or (), strict=False)))
    # Checked on every rank, because one that raises alone leaves the others waiting.
    call = _prepare(layer, input, state)
    if state is not None and not any(over.reads(s) for s in state):
        call = call._replace(state=None)
    if layer.batch_first:
        call = call._replace(input=call.input.transpose(0, 1))
    with torch.autocast(call.input.device.type, enabled=False):
        output, final, cells = _run(layer, over, name, call)
    if layer.batch_first:
        output, cells = output.transpose(0, 1), [c.transpose(0, 1) for c in cells]
    if input.dim() == 2:
        batch = 0 if layer.batch_first else 1
        output, cells = output.squeeze(batch), [c.squeeze(batch) for c in cells]
        final = tuple(s.squeeze(1) for s in final)
    return (output, final, *cells)


def _prepare(layer: Any, input: Tensor, state: tuple[Tensor, ...] | None) -> calls.Call:
    """The call, checked; of an empty slice, too, which no layer takes otherwise."""
    if not isinstance(input, Tensor) or input.dim() not in (2, 3):
        return calls.prepare(layer, input, state)
    time = 1 if layer.batch_first and input.dim() == 3 else 0
    if input.size(time) > 0:
        return calls.prepare(layer, input, state)
    step = input.new_zeros(*input.shape[:time], 1, *input.shape[time + 1 :])
    call = calls.prepare(layer, torch.cat((input, step), time), state)
    return call._replace(input=call.input.narrow(1 if layer.batch_first else 0, 0, 0))


def _run(layer: Any, over: Any, name: str, call: calls.Call) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
    """Output, last states and, where the layer returns them, cells."""
    input, state, weights, cell = runs.in_one_dtype(call)
    over.check(name, input.size(1), layer.hidden_size, input)
    lstm, directions = cell == "lstm", 2 if layer.bidirectional else 1
    chosen = choice.choose_cached(layer._algorithm, call.case)[0]
    # What every rank has to do alike does not depend on the length of its slice.
    halves = layer._algorithm in ("auto", "scan", "newton") and over.halves(cell, input, layer.hidden_size)
    backward = "scan" if halves or chosen in ("scan", "newton") else "persistent"
    first = "newton" if chosen == "newton" else backward  # both go back by a scan
    rows = layer.num_layers * directions
    starts = input.new_zeros(2 if lstm else 1, rows, input.size(1), layer.hidden_size)
    if state is not None:
        starts = torch.stack(state)
    stride = len(weights) // rows
    ends = []
    for number in range(layer.num_layers):
        last = number + 1 == layer.num_layers
        own = range(number * directions, (number + 1) * directions)
        found = over.walk(
            cell, first, backward, halves, call.case.trains, last and layer.return_cells, input,
            [starts[:, row] for row in own], [weights[row * stride : (row + 1) * stride] for row in own],
        )  # fmt: skip
        outputs, all_cells, of_layer = zip(*found, strict=True)
        ends += of_layer
        input = _side_by_side(outputs)
        if layer.dropout > 0 and layer.training and not last:
            input = F.dropout(input, layer.dropout, True)
    # Under autocast the last states have the dtypes that torch's layers give them.
    final = tuple(s.to(dtype) for s, dtype in zip(torch.stack(ends, 1), call.dtypes, strict=False))
    cells = [_side_by_side(all_cells).to(call.dtypes[1])] if layer.return_cells else []
    return input.to(call.dtypes[0]), final, cells


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
