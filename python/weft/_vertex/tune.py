"""``weft.tune`` of a vertex function: measure executors and geometries on a batch, and remember the fastest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .._base.stopwatch import by_turns, device_microseconds, microseconds, steady
from .._base.torch_private import in_forward_mode, in_transform
from . import tuned
from .calls import Call, prepare
from .explain import Explanation, explain
from .function import VertexFunction, VertexFunctions
from .graphs import Graphs
from .runtime import persistent
from .runtime.resident import captures

__all__ = ["tune"]

_SPREAD = 0.5
"""How much longer than its fastest run a quarter of an executor's runs may take."""


def tune(
    cell: VertexFunction | VertexFunctions, graphs: Graphs, inputs: Tensor | Mapping[str, Tensor] | None = None
) -> Explanation:
    """As :func:`weft.tune` says, of a vertex function."""
    if in_transform() or in_forward_mode():
        raise RuntimeError("tune: under torch.func transforms and forward-mode AD nothing can be measured")
    call = prepare(cell, graphs, inputs, "auto")
    device = call.ready.device
    if device.type == "cuda" and captures(device):
        raise RuntimeError("tune: nothing can be measured while a CUDA graph is captured")
    if graphs.num_vertices:
        # Leaves of their own, so that no gradient goes further than the inputs.
        own = {name: x.detach().requires_grad_(x.requires_grad) for name, x in call.ready.rows.items()}
        calls = _calls(cell, graphs, own)
        fast = {name: c for name, c in calls.items() if name != "reference"}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            if device.type == "cuda" and len(fast) > 1:
                # What a CUDA graph of the call takes, which also says how persistent kernels are best grouped.
                alone = _measure({name: functools.partial(_device_stopwatch, c, own) for name, c in fast.items()})
                _remember(call, graphs, alone, captured=True)
                calls = _taken(calls, graphs, device)
            times = _measure({name: functools.partial(_stopwatch, c, own) for name, c in calls.items()})
            _remember(call, graphs, times, captured=False)
    return explain(cell, graphs, inputs)


def _calls(cell: VertexFunction | VertexFunctions, graphs: Graphs, inputs: Mapping[str, Tensor]) -> dict[str, Call]:
    """What can run, by the names of tuned.MEASURED; the others run as one of these."""
    found = {}
    for executor in ("persistent", "batched", "reference"):
        call = prepare(cell, graphs, inputs, executor)
        if call.executor != executor:
            continue
        if executor != "persistent":
            found[executor] = call
            continue
        for geometry in persistent.geometries(call.compiled, call.ready.device):
            found[tuned.name_of(geometry.parts)] = prepare(cell, graphs, inputs, executor, geometry.parts)
    return found


def _taken(calls: dict[str, Call], graphs: Graphs, device: torch.device) -> dict[str, Call]:
    """Of the persistent kernels those alone that a call takes, whether or not any were measured to be the fastest."""
    grouped = {name for name in calls if tuned.parts_of(name)}
    if not grouped:
        return calls
    compiled = calls[next(iter(grouped))].compiled
    taken = tuned.name_of(persistent.geometry(compiled, graphs, device).parts)
    return {name: c for name, c in calls.items() if name == taken or name not in grouped}


def _measure(makers: Mapping[str, Callable[[], Callable[[], float]]]) -> dict[str, float] | None:
    return steady(by_turns(makers), _SPREAD, stacklevel=5)


def _remember(call: Call, graphs: Graphs, times: dict[str, float] | None, captured: bool) -> None:
    if times is not None:
        entry = tuned.Entry(min(times, key=times.__getitem__), times)
        tuned.MEASURED.remember(tuned.key(call.functions, call.ready.trains, graphs, captured), entry)


def _stopwatch(call: Call, inputs: Mapping[str, Tensor]) -> Callable[[], float]:
    """What runs a call once, backward where anything asks for a gradient, and returns the microseconds."""
    run = _once(call, inputs)
    return lambda: microseconds(run, call.ready.device)


def _device_stopwatch(call: Call, inputs: Mapping[str, Tensor]) -> Callable[[], float]:
    """The same, of the device alone."""
    run = _once(call, inputs)
    return lambda: device_microseconds(run, call.ready.device)


def _once(call: Call, inputs: Mapping[str, Tensor]) -> Callable[[], None]:
    wanted = [t for t in (*inputs.values(), *call.ready.tensors.values()) if t.requires_grad]
    outgoing: list[Tensor] = []

    def run() -> None:
        results = [y for y in call.ready.run() if y.requires_grad]
        if not results or not torch.is_grad_enabled():
            return
        if not outgoing:
            outgoing.extend(map(torch.ones_like, results))
        torch.autograd.grad(results, wanted, outgoing, allow_unused=True)

    return run
