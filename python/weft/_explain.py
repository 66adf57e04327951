"""``weft.explain``: the question goes to the engine of what is asked about."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import nn as weft_nn
from . import offloading, scan, vertex
from ._rnn.dropin.accelerate import why_left
from ._rnn.explain import Explanation
from ._rnn.explain import explain as explain_layer
from ._scan.explain import SCAN_LAYERS, ScanExplanation, explain_chain, explain_linear_scan, explain_pointwise_scan
from ._scan.explain import explain_layer as explain_scan_layer
from ._vertex.explain import Explanation as VertexExplanation
from ._vertex.explain import explain as explain_vertex_function
from ._vertex.trainer import explain_trainer

__all__ = ["ModelExplanation", "PartExplanation", "ScanExplanation", "explain"]

State = Tensor | tuple[Tensor, ...] | None
_TORCHS = (nn.RNNBase, nn.RNNCellBase)
_VERTEX = (vertex.VertexFunction, vertex.VertexFunctions)


@dataclass(frozen=True)
class PartExplanation:
    """One layer of a model."""

    name: str
    kind: str
    input: str
    algorithm: str
    reason: str


@dataclass(frozen=True)
class ModelExplanation:
    """The layers of a model that Weft runs, or would; ``print`` it for a table."""

    model: str
    parts: tuple[PartExplanation, ...]

    def __str__(self) -> str:
        if not self.parts:
            return f"{self.model}: no recurrent layer, scan layer, ScanSequential or vertex function inside"
        rows = [("layer", "class", "input", "runs as", "why")]
        rows += [(p.name, p.kind, p.input, p.algorithm, p.reason) for p in self.parts]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)) + f"  {row[4]}" for row in rows]
        return "\n".join([self.model, *(line.rstrip() for line in lines)])


@overload
def explain(
    subject: weft_nn.RNN | weft_nn.GRU | weft_nn.LSTM | weft_nn.SLSTM, x: Tensor | PackedSequence, hx: State = None
) -> Explanation: ...
@overload
def explain(subject: nn.RNNBase | nn.RNNCellBase, x: Tensor | PackedSequence, hx: State = None) -> Explanation: ...
@overload
def explain(
    subject: vertex.VertexFunction | vertex.VertexFunctions,
    graphs: vertex.Graphs,
    inputs: Tensor | Mapping[str, Tensor] | None = None,
    *,
    executor: str = "auto",
) -> VertexExplanation: ...
@overload
def explain(
    subject: vertex.Trainer, graphs: vertex.Graphs, inputs: Tensor | Mapping[str, Tensor] | None = None
) -> vertex.TrainerExplanation: ...
@overload
def explain(subject: offloading.offload) -> offloading.OffloadReport: ...
@overload
def explain(
    subject: weft_nn.MinGRU | weft_nn.MinLSTM | weft_nn.RGLRU | weft_nn.LRU | weft_nn.S5,
    input: Tensor | PackedSequence,
    hx: Tensor | None = None,
) -> ScanExplanation: ...
@overload
def explain(
    subject: weft_nn.ParaGRU | weft_nn.ParaLSTM, input: Tensor, hx: Tensor | tuple[Tensor, Tensor] | None = None
) -> ScanExplanation: ...
@overload
def explain(subject: scan.ScanSequential, input: Tensor) -> ScanExplanation: ...
@overload
def explain(subject: nn.Module, *inputs: object, **keywords: object) -> ModelExplanation: ...
@overload
def explain(
    subject: Callable[..., Tensor], A: Tensor, b: Tensor, x0: Tensor | None = None, *, reverse: bool = False,
    transpose: bool = False, batch_first: bool = False, c: Tensor | None = None,
) -> ScanExplanation: ...  # fmt: skip


def explain(*args, **kwargs):
    """Say what would run and why; ``print`` the answer.

    - ``explain(layer, x, hx=None)``: one of Weft's recurrent layers or cells, or one of torch's, for which the answer
      is what would run after :func:`weft.accelerate`: an :class:`weft.Explanation` with ``algorithm``, ``reason``
      and ``candidates``.
    - ``explain(model, *inputs)``: any other module: a table of the recurrent layers, scan layers and vertex functions
      inside, with the inputs that they get. The model runs once for that, in evaluation mode and without gradients.
    - ``explain(layer, x)`` of a :class:`~weft.nn.MinGRU`, :class:`~weft.nn.MinLSTM`, :class:`~weft.nn.RGLRU`,
      :class:`~weft.nn.LRU`, :class:`~weft.nn.S5`, :class:`~weft.nn.ParaGRU`, :class:`~weft.nn.ParaLSTM` or
      :class:`~weft.scan.ScanSequential`, and ``explain(weft.scan.linear_scan, A, b, x0=None)``, that of
      :mod:`weft.distributed` too, or ``explain(weft.scan.pointwise_scan, step, init, inputs)``: which scan runs.
    - ``explain(cell, graphs, inputs=None, *, executor="auto")``: a vertex function: which ``executor`` runs, and the
      ``reason``.
    - ``explain(trainer, graphs, inputs=None)``: a :class:`weft.vertex.Trainer`: whether a step is one kernel.
    - ``explain(offload)``: the report of the last use of a :class:`weft.offload`.

    Of a layer, a scan or a vertex function nothing is computed.

    Raises:
        TypeError: the first argument is none of these, or an input is missing.
        Otherwise what the subject itself raises for these inputs.
    """
    if not args:
        name = next((name for name in ("layer", "cell", "model", "subject") if name in kwargs), None)
        if name is None:
            raise TypeError("explain: what to explain is missing: a layer, a model, a vertex function or an offload")
        args = (kwargs.pop(name),)
    subject, *rest = args
    if isinstance(subject, _VERTEX):
        return _asked(explain_vertex_function, "cell, graphs, inputs", *args, **kwargs)
    if isinstance(subject, vertex.Trainer):
        return _asked(explain_trainer, "trainer, graphs, inputs", *args, **kwargs)
    if isinstance(subject, offloading.offload):
        return subject.report()
    if subject is scan.linear_scan:
        return _asked(explain_linear_scan, "weft.scan.linear_scan, A, b", *rest, **kwargs)
    if subject is scan.pointwise_scan:
        return _asked(explain_pointwise_scan, "weft.scan.pointwise_scan, step, init, inputs", *rest, **kwargs)
    if (over_ranks := sys.modules.get("weft.distributed")) is not None and subject is over_ranks.linear_scan:
        return _asked(_explain_over_ranks, "weft.distributed.linear_scan, A, b", *rest, **kwargs)
    if not isinstance(subject, nn.Module):
        kind = f"the class {subject.__name__}" if isinstance(subject, type) else type(subject).__name__
        raise TypeError(
            "explain: what to explain comes first, and must be a layer, a model, a vertex function, a Trainer, a "
            f"weft.offload, weft.scan.linear_scan or weft.scan.pointwise_scan; got {kind}"
        )
    if not rest and not kwargs:
        what = "layer" if isinstance(subject, (*_TORCHS, *SCAN_LAYERS)) else "model"
        raise TypeError(f"explain: the input of {type(subject).__name__} is missing: weft.explain({what}, x)")
    if isinstance(subject, _TORCHS):
        return _asked(explain_layer, "layer, x", *args, **_renamed(kwargs, "input", "x"))
    if isinstance(subject, SCAN_LAYERS):
        return _asked(explain_scan_layer, "layer, x", *args, **_renamed(kwargs, "x", "input"))
    if isinstance(subject, scan.ScanSequential):
        return _asked(explain_chain, "net, x", *args, **_renamed(kwargs, "x", "input"))
    return _explain_model(*args, **kwargs)


def _asked(function: Callable[..., Any], usage: str, *args: Any, **kwargs: Any) -> Any:
    """The answer of a function below; what is wrong with the arguments is said of weft.explain."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {error}; call weft.explain({usage})") from None
    return function(*args, **kwargs)


def _renamed(kwargs: dict[str, Any], name: str, to: str) -> dict[str, Any]:
    return {to if key == name else key: value for key, value in kwargs.items()}


def _explain_over_ranks(
    A: Tensor, b: Tensor, x0: Tensor | None = None, *, group: Any = None, reverse: bool = False,
    transpose: bool = False,
) -> ScanExplanation:  # fmt: skip
    # They ask torch.distributed, which takes a while to import.
    from ._distributed.costs import exchange
    from ._distributed.group import ranks_of
    from ._distributed.own_slice import sent_bytes
    from ._distributed.rounds import link

    found, size = explain_linear_scan(A, b, x0, reverse=reverse, transpose=transpose), ranks_of("explain", group).size
    way = exchange(size, sent_bytes(A, b), link)
    how = f"{way.rounds} rounds of exchange" if way.method == "doubling" else "one exchange"
    reason = f"{found.reason}; a slice of {size} ranks, with {how} each way"
    return replace(found, subject="linear_scan over ranks", reason=reason)


def _explain_model(model: nn.Module, *inputs: Any, **keywords: Any) -> ModelExplanation:
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    wanted = {
        module: name
        for name, module in _modules(model)
        if isinstance(module, (*_TORCHS, *SCAN_LAYERS, *_VERTEX, scan.ScanSequential))
    }

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, kwargs))

    handles = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in wanted]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())):
            model(*inputs, **keywords)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    parts = []
    for module, name in wanted.items():
        kind = _kind(type(module))
        if module not in calls:
            parts.append(PartExplanation(name, kind, "", "", "not called for this input"))
            continue
        args, kwargs = calls[module]
        if isinstance(module, _TORCHS) and (why := why_left(module)) is not None:
            given = next(iter((*args, *kwargs.values())), None)
            parts.append(PartExplanation(name, kind, _shown(given), "itself", f"weft.accelerate leaves it: it {why}"))
            continue
        found = explain(module, *args, **kwargs)
        if isinstance(found, VertexExplanation):
            parts.append(PartExplanation(name, kind, found.graphs, found.executor, found.reason))
            continue
        reason, note = found.reason, getattr(found, "note", None)
        if note is not None:
            options = "(model, subclasses=True)" if "subclasses" in note else ""
            reason = f"after weft.accelerate{options}: {reason}"
        parts.append(PartExplanation(name, kind, found.input, found.algorithm, reason))
    return ModelExplanation(type(model).__name__, tuple(parts))


def _shown(given: object) -> str:
    """An input of a layer that has its own way with it."""
    return f"{tuple(given.shape)} {given.dtype}".replace("torch.", "") if isinstance(given, Tensor) else ""


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model and their names, but for what is inside a vertex function: that is traced, not called."""
    seen, left = set(), [("", model)]
    while left:
        name, module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        yield name, module
        if not isinstance(module, _VERTEX):
            inside = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
            left += reversed(inside)


def _kind(kind: type) -> str:
    """A class as the table shows it: of a user's the name alone."""
    package = kind.__module__.partition(".")[0]
    return f"{package}.{kind.__name__}" if package in ("torch", "weft") else kind.__name__
