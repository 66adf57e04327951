"""``weft.tune``: measure which algorithm is the fastest for a layer and an input, and remember it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .. import runs
from ..calls import Call
from ..explain import Explanation, explain, prepared
from ..layers import GRU, LSTM, RNN
from . import choice, tuned

__all__ = ["tune"]

_WARM_UPS = 3
_RUNS = 10
_PATIENCE = 2.0  # seconds for one candidate; a slow one is run fewer times
_FEWEST_RUNS = 3


def tune(
    layer: RNN | GRU | LSTM,
    x: Tensor | PackedSequence,
    hx: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Explanation:
    """Measure every algorithm that can run ``layer(x, hx)``, and let ``algorithm="auto"`` take the fastest from now on.

    The result holds for all layers of the same kind and sizes on this device, for lengths and batches in the same
    interval between powers of two, in the same dtype, with or without TF32, packed or not, with or without gradients.
    It is kept in ``$WEFT_CACHE_DIR/<version>/tune.json`` or ``~/.cache/weft/<version>/tune.json``, which other
    processes read when they start.

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
            times = _measure_all(layer, names, call)
        best = min(times, key=times.__getitem__)
        tuned.remember(case, tuned.Entry(best, times))
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


def _measure_all(layer: RNN | GRU | LSTM, names: list[str], call: Call) -> dict[str, float]:
    """Microseconds by algorithm, of those that run: memory may not do for all."""
    times: dict[str, float] = {}
    failure: RuntimeError | None = None
    for name in names:
        try:
            times[name] = _measure(layer, name, call)
        except RuntimeError as error:
            failure = error
    if not times and failure is not None:
        raise failure
    return times


def _measure(layer: RNN | GRU | LSTM, name: str, call: Call) -> float:
    """Microseconds of one run, the median of several."""
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

    clock = _cuda_clock if on_cuda else _host_clock
    with torch.cuda.device(call.input.device) if on_cuda else contextlib.nullcontext():
        started = time.perf_counter()
        times: list[float] = []
        for count in range(_WARM_UPS + _RUNS):
            elapsed = clock(run)
            if count >= _WARM_UPS:
                times.append(elapsed)
            if len(times) >= _FEWEST_RUNS and time.perf_counter() - started > _PATIENCE:
                break
    return statistics.median(times)


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
