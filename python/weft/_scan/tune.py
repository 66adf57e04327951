"""``weft.tune`` of pointwise scans: measure whether one piece of time or many is faster, and remember it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._base.stopwatch import by_turns, microseconds, steady
from .._base.torch_private import in_forward_mode, in_transform
from . import tuned
from .explain import ScanExplanation, explain_layer, explain_pointwise_scan, time_chunks
from .para import Operands, ParaGRU, ParaLSTM
from .pointwise import checked

__all__ = ["tune_layer", "tune_pointwise_scan"]

_SPREAD = 0.5
"""How much longer than its fastest run a quarter of an algorithm's runs may take."""

Run = Callable[[str], Sequence[Tensor]]


def tune_pointwise_scan(
    step: Callable[..., Any], init: Any, inputs: Any, parameters: Any = (), *, reverse: bool = False
) -> ScanExplanation:
    """As :func:`weft.tune` says, of a pointwise scan."""
    call = checked("tune", step, init, inputs, parameters, "auto")
    _check(call.init[0])
    if call.program is not None:
        kind = call.kind()
        call.init, call.inputs, call.operands = (
            [_own(t) for t in ts] for ts in (call.init, call.inputs, call.operands)
        )

        def run(algorithm: str) -> Sequence[Tensor]:
            states = call.run(algorithm, reverse)
            return [states] if isinstance(states, Tensor) else states

        if (entry := _measured(kind, len(call.inputs), run, call.tensors)) is not None:
            tuned.MEASURED.remember(kind.key(), entry)
    return explain_pointwise_scan(step, init, inputs, parameters, reverse=reverse)


def tune_layer(layer: nn.Module, input: Any, hx: Any = None) -> ScanExplanation:
    """As :func:`weft.tune` says, of a layer that is made of scans. One that is linear in its states, or whose slices
    ranks walk, has one algorithm, and nothing to choose."""
    found = explain_layer(layer, input, hx)
    if not isinstance(layer, (ParaGRU, ParaLSTM)) or layer._over_ranks is not None:
        return found
    _check(input)
    if layer.algorithm != "reference":
        # Of the scan alone: the linear layer before it is the same for both.
        gates, h, parameters = layer._operands(input, layer._initial(hx))
        own = Operands(_own(gates), [_own(t) for t in h], [_own(t) for t in parameters])
        kind, run = layer._kind_of(own), functools.partial(layer._scan, own)
        if (entry := _measured(kind, 3, run, [own.gates, *own.h, *own.parameters])) is not None:
            tuned.MEASURED.remember(kind.key(), entry)
    return explain_layer(layer, input, hx)


def _check(t: Tensor) -> None:
    if in_transform() or in_forward_mode():
        raise RuntimeError("tune: under torch.func transforms and forward-mode AD nothing can be measured")
    if t.device.type == "cuda":
        with torch.cuda.device(t.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("tune: nothing can be measured while a CUDA graph is captured")


def _own(t: Tensor) -> Tensor:
    """A leaf, so that no gradient goes further."""
    return t.detach().requires_grad_(t.requires_grad)


def _measured(kind: tuned.Kind, inputs: int, run: Run, tensors: Sequence[Tensor]) -> tuned.Entry | None:
    if kind.steps == 0 or kind.channels == 0:
        return None
    names = ["walk", *(["newton"] if time_chunks(kind, inputs, wanted=True) > 1 else [])]
    makers = {name: functools.partial(_stopwatch, name, kind, run, tensors) for name in names}
    times = steady(by_turns(makers), _SPREAD, stacklevel=5)
    return None if times is None else tuned.Entry(min(times, key=times.__getitem__), times)


def _stopwatch(name: str, kind: tuned.Kind, run: Run, tensors: Sequence[Tensor]) -> Callable[[], float]:
    """What runs an algorithm once, backward where anything asks for a gradient, and returns the microseconds."""
    wanted = [t for t in tensors if t.requires_grad]
    outgoing: list[Tensor] = []

    def once() -> None:
        results = run(name)
        if not kind.trains:
            return
        if not outgoing:
            outgoing.extend(map(torch.ones_like, results))
        torch.autograd.grad(results, wanted, outgoing, allow_unused=True)

    return lambda: microseconds(once, kind.device)
