"""``weft.tune``: measure which algorithm is the fastest for a layer and an input, and remember it."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .. import runs
from ..calls import Call
from ..explain import Explanation, explain, prepared
from ..layers import GRU, LSTM, RNN, SLSTM
from . import choice, tuned

__all__ = ["tune"]

_WARM_UPS = 3
_RUNS = 10
_PATIENCE = 2.0  # seconds for one candidate; a slow one is run fewer times
_FEWEST_RUNS = 3
_SPREAD = 0.5
"""How much longer than its fastest run a quarter of a candidate's runs may take. Above, the machine was busy with
something else, and what was measured says nothing."""


def tune(
    layer: RNN | GRU | LSTM | SLSTM,
    x: Tensor | PackedSequence,
    hx: Tensor | tuple[Tensor, ...] | None = None,
) -> Explanation:
    """Measure every algorithm that can run ``layer(x, hx)``, and let ``algorithm="auto"`` take the fastest from now on.

    The result holds for all layers of the same kind and sizes on this device, for lengths and batches in the same
    interval between powers of two, in the same dtype, with or without TF32, packed or not, with or without gradients.
    It is kept in ``$WEFT_CACHE_DIR/<version>/tune.json`` or ``~/.cache/weft/<version>/tune.json``, which other
    processes read when they start.

    All candidates run in turn, so that whatever else the machine does meets all of them, and each counts by its fastest
    run. Where even those are not repeated, because the machine is busy, nothing is stored, and a warning says so.

    Measured is the forward pass, and the backward pass where anything asks for a gradient: call it under
    ``torch.no_grad`` to tune for inference. Gradients, the random number generators and the layer stay as they are; the
    layer's hooks do not run. It takes some seconds and waits for the device.

    Args:
        layer: one of Weft's recurrent layers.
        x: an input, as the layer takes it.
        hx: an initial state, as the layer takes it.

    Returns:
        What :func:`weft.explain` then says, with the measured times.

    Raises:
        TypeError: `layer` is not one of Weft's layers, `x` no Tensor and no PackedSequence, or `hx` not of Tensors.
        RuntimeError: inside ``torch.compile``, a ``torch.func`` transform, forward-mode AD or the capture of a graph.
        Otherwise what the layer itself raises for this input, whichever algorithm runs.

    Warns:
        UserWarning: times differ too much from run to run; nothing was stored.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("tune: a compiled graph cannot measure; call weft.tune before torch.compile")
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
        with torch.random.fork_rng([call.input.device] if on_cuda else []), _in_training(layer, case.trains):
            runs_of = _measure_all(layer, names, call)
        spreads = {name: _spread(times) for name, times in runs_of.items()}
        widest = max(spreads, key=spreads.__getitem__)
        if spreads[widest] > _SPREAD:
            warnings.warn(
                f"weft.tune stored nothing: only a quarter of the runs of {widest!r} took less than "
                f"{1 + spreads[widest]:.1f} times the fastest one, so the machine is busy with something else; tune "
                "again when it is idle",
                stacklevel=2,
            )
        else:
            times = {name: min(found) for name, found in runs_of.items()}
            tuned.remember(case, tuned.Entry(min(times, key=times.__getitem__), times))
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


def _spread(times: list[float]) -> float:
    """How much longer than the fastest the run takes that a quarter of the others do not exceed."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4] / ordered[0] - 1 if ordered[0] > 0 else 0.0


def _measure_all(layer: RNN | GRU | LSTM | SLSTM, names: list[str], call: Call) -> dict[str, list[float]]:
    """Microseconds of the runs of every algorithm, of those that run: memory may not do for all."""
    stopwatches: dict[str, Callable[[], float]] = {}
    failure: RuntimeError | None = None
    for name in names:
        try:
            stopwatch, spent = _stopwatch(layer, name, call), 0.0
            for _ in range(_WARM_UPS):
                if spent < 1e6 * _PATIENCE:
                    spent += stopwatch()
        except RuntimeError as error:
            failure = error
        else:
            stopwatches[name] = stopwatch
    if not stopwatches and failure is not None:
        raise failure
    times: dict[str, list[float]] = {name: [] for name in stopwatches}
    for count in range(_RUNS):
        for name, stopwatch in stopwatches.items():
            if count < _FEWEST_RUNS or sum(times[name]) < 1e6 * _PATIENCE:
                times[name].append(stopwatch())
    return times


def _stopwatch(layer: RNN | GRU | LSTM | SLSTM, name: str, call: Call) -> Callable[[], float]:
    """What runs an algorithm once, with the backward pass where anything asks for a gradient, and returns the
    microseconds."""
    # Leaves of their own, so that no gradient goes further than the layer.
    own = [t.detach().requires_grad_(t.requires_grad) for t in (call.input, *(call.state or ()))]
    call = call._replace(input=own[0], state=tuple(own[1:]) or None)
    wanted = [t for t in (*own, *call.weights) if t.requires_grad]
    outgoing: list[Tensor] = []
    on_cuda = call.case.device == "cuda"

    def run() -> None:
        output, final, cells = runs.run(layer, name, call)
        if not call.case.trains:
            return
        results = [output, *final, *([] if cells is None else [cells])]
        if not outgoing:
            outgoing.extend(torch.ones_like(r) for r in results)
        torch.autograd.grad(results, wanted, outgoing, allow_unused=True)

    def stopwatch() -> float:
        with torch.cuda.device(call.input.device) if on_cuda else contextlib.nullcontext():
            return (_cuda_clock if on_cuda else _host_clock)(run)

    return stopwatch


def _host_clock(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - started)


def _cuda_clock(run: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
