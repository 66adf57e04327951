"""``weft.tune`` of a recurrent layer: measure which algorithm is the fastest for an input, and remember it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..._base.stopwatch import by_turns, microseconds, steady
from .. import runs
from ..calls import Call
from ..explain import Explanation, explain, prepared
from ..layers import GRU, LSTM, RNN, SLSTM
from . import choice, tuned

__all__ = ["tune"]

_SPREAD = 0.5
"""How much longer than its fastest run a quarter of a candidate's runs may take."""


def tune(
    layer: RNN | GRU | LSTM | SLSTM,
    x: Tensor | PackedSequence,
    hx: Tensor | tuple[Tensor, ...] | None = None,
) -> Explanation:
    """As :func:`weft.tune` says, of a recurrent layer."""
    call = prepared("tune", layer, x, hx)
    explanation = explain(layer, x, hx)
    case = call.case
    if case.transformed or case.mapped:
        raise RuntimeError("tune: under torch.func transforms and forward-mode AD nothing can be measured")
    on_cuda = case.device == "cuda"
    if on_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tune: nothing can be measured while a CUDA graph is captured")
    names = [c.name for c in explanation.candidates if c.eligible and c.name != "reference"]
    if names:
        makers = {name: functools.partial(_stopwatch, layer, name, call) for name in names}
        with torch.random.fork_rng([call.input.device] if on_cuda else []), _in_training(layer, case.trains):
            runs_of = by_turns(makers)
        times = steady(runs_of, _SPREAD, stacklevel=4)
        if times is not None:
            tuned.MEASURED.remember(tuned.key(case), tuned.Entry(min(times, key=times.__getitem__), times))
            choice.forget_choices()
    return explain(layer, x, hx)


@contextlib.contextmanager
def _in_training(layer: torch.nn.Module, wanted: bool) -> Iterator[None]:
    """The layer in training mode where it is wanted: cuDNN has no backward pass in evaluation mode."""
    before = layer.training
    layer.training = before or wanted
    try:
        yield
    finally:
        layer.training = before


def _stopwatch(layer: RNN | GRU | LSTM | SLSTM, name: str, call: Call) -> Callable[[], float]:
    """What runs an algorithm once, with the backward pass where anything asks for a gradient, and returns the
    microseconds."""
    # Leaves of their own, so that no gradient goes further than the layer.
    own = [t.detach().requires_grad_(t.requires_grad) for t in (call.input, *(call.state or ()))]
    call = call._replace(input=own[0], state=tuple(own[1:]) or None)
    wanted = [t for t in (*own, *call.weights) if t.requires_grad]
    outgoing: list[Tensor] = []

    def run() -> None:
        output, final, cells = runs.run(layer, name, call)
        if not call.case.trains:
            return
        results = [output, *final, *([] if cells is None else [cells])]
        if not outgoing:
            outgoing.extend(torch.ones_like(r) for r in results)
        torch.autograd.grad(results, wanted, outgoing, allow_unused=True)

    return lambda: microseconds(run, call.input.device)
