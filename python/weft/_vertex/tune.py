"""``weft.tune`` of a vertex function: measure which executor is the fastest for a batch, and remember it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .._base.stopwatch import by_turns, microseconds, steady
from .._base.torch_private import in_forward_mode, in_transform
from . import tuned
from .calls import EXECUTORS, Call, prepare
from .explain import Explanation, explain
from .function import VertexFunction, VertexFunctions
from .graphs import Graphs
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
        calls = {name: prepare(cell, graphs, own, name) for name in EXECUTORS if name != "auto"}
        makers = {
            name: functools.partial(_stopwatch, c, own) for name, c in calls.items() if c.executor == name
        }  # the others run as one of these
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            runs_of = by_turns(makers)
        times = steady(runs_of, _SPREAD, stacklevel=4)
        if times is not None:
            entry = tuned.Entry(min(times, key=times.__getitem__), times)
            tuned.MEASURED.remember(tuned.key(call.functions, call.ready.trains, graphs), entry)
    return explain(cell, graphs, inputs)


def _stopwatch(call: Call, inputs: Mapping[str, Tensor]) -> Callable[[], float]:
    """What runs a call once, backward where anything asks for a gradient, and returns the microseconds."""
    wanted = [t for t in (*inputs.values(), *call.ready.tensors.values()) if t.requires_grad]
    outgoing: list[Tensor] = []

    def run() -> None:
        results = [y for y in call.ready.run() if y.requires_grad]
        if not results or not torch.is_grad_enabled():
            return
        if not outgoing:
            outgoing.extend(map(torch.ones_like, results))
        torch.autograd.grad(results, wanted, outgoing, allow_unused=True)

    return lambda: microseconds(run, call.ready.device)
