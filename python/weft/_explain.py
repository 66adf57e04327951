"""``weft.explain``: the question goes to the engine of what is asked about."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import _C, offloading, scan, vertex
from . import nn as weft_nn
from ._base.torch_private import differentiated_by_transform
from ._rnn.explain import Explanation
from ._rnn.explain import explain as explain_layer
from ._scan.linear import is_dense
from ._scan.pointwise import checked
from ._scan.sequential import unrolled
from ._sparse import find_jacobian
from ._vertex.explain import Explanation as VertexExplanation
from ._vertex.explain import explain as explain_vertex_function
from ._vertex.trainer import explain_trainer

__all__ = ["ModelExplanation", "PartExplanation", "ScanExplanation", "explain"]

State = Tensor | tuple[Tensor, ...] | None
_SCAN_LAYERS = (
    weft_nn.MinGRU,
    weft_nn.MinLSTM,
    weft_nn.RGLRU,
    weft_nn.ParaGRU,
    weft_nn.ParaLSTM,
    weft_nn.LRU,
    weft_nn.S5,
)
_TORCHS = (nn.RNNBase, nn.RNNCellBase)
_VERTEX = (vertex.VertexFunction, vertex.VertexFunctions)


@dataclass(frozen=True)
class ScanExplanation:
    """What runs a recurrence or a chain of layers; ``print`` it."""

    subject: str
    input: str
    algorithm: str
    reason: str
    layers: tuple[str, ...] = ()
    """Of a ScanSequential, a line for every layer."""

    def __str__(self) -> str:
        lines = [f"{self.subject} on {self.input}", f"runs as {self.algorithm!r} ({self.reason})"]
        return "\n".join([*lines, *(f"  {line}" for line in self.layers)])


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
    transpose: bool = False, batch_first: bool = False,
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
    if any(subject is function for function in _scans()):
        return _asked(_explain_linear_scan, "weft.scan.linear_scan, A, b", *args, **kwargs)
    if subject is scan.pointwise_scan:
        return _asked(_explain_pointwise_scan, "weft.scan.pointwise_scan, step, init, inputs", *args, **kwargs)
    if not isinstance(subject, nn.Module):
        kind = f"the class {subject.__name__}" if isinstance(subject, type) else type(subject).__name__
        raise TypeError(
            "explain: what to explain comes first, and must be a layer, a model, a vertex function, a Trainer, a "
            f"weft.offload, weft.scan.linear_scan or weft.scan.pointwise_scan; got {kind}"
        )
    if not rest and not kwargs:
        what = "layer" if isinstance(subject, (*_TORCHS, *_SCAN_LAYERS)) else "model"
        raise TypeError(f"explain: the input of {type(subject).__name__} is missing: weft.explain({what}, x)")
    if isinstance(subject, _TORCHS):
        return _asked(explain_layer, "layer, x", *args, **_renamed(kwargs, "input", "x"))
    if isinstance(subject, _SCAN_LAYERS):
        return _asked(_explain_scan_layer, "layer, x", *args, **_renamed(kwargs, "x", "input"))
    if isinstance(subject, scan.ScanSequential):
        return _asked(_explain_chain, "net, x", *args, **_renamed(kwargs, "x", "input"))
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


def _scans() -> list[Callable[..., Tensor]]:
    """linear_scan, also that over ranks where that module was imported."""
    over_ranks = sys.modules.get("weft.distributed")
    return [scan.linear_scan] if over_ranks is None else [scan.linear_scan, over_ranks.linear_scan]


def _sizes(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device.type}"


def _kind_of_scan(A: Tensor, b: Tensor, batch_first: bool) -> tuple[str, str]:
    if is_dense(A, b, batch_first):
        if A.is_complex():
            return "reference", "A is complex and dense: one step after the other in torch's operations"
        shared = A.dim() == 3 or A.shape[0 if batch_first else 1] != b.shape[0 if batch_first else 1]
        which = "dense and shared by the batch" if shared else "dense"
        return "dense scan", f"A is {which}: H x H multiply-adds for every sequence and step"
    return _diagonal("A", A.shape != b.shape)


def _diagonal(A: str, constant: bool) -> tuple[str, str]:
    which = "diagonal and constant in time, not expanded in memory" if constant else "diagonal"
    return "diagonal scan", f"{A} is {which}: a multiply-add for every state and step"


def _explain_linear_scan(
    function: Callable[..., Tensor], A: Tensor, b: Tensor, x0: Tensor | None = None, *, group: Any = None, **flags: Any
) -> ScanExplanation:
    for name, tensor in (("A", A), ("b", b)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"explain: {name} must be a Tensor, got {type(tensor).__name__}")
    meta = {name: _meta(t) for name, t in {"A": A, "b": b, "x0": x0, **flags}.items()}
    with torch.no_grad():
        # What is wrong with the arguments is said by the operator, on tensors without data.
        scan.linear_scan(**meta)
    sizes = f"A {tuple(A.shape)}, b {_sizes(b)}"
    if flags.get("c") is None:
        algorithm, reason = _kind_of_scan(A, b, bool(flags.get("batch_first", False)))
    else:
        algorithm, reason = _diagonal("A", A.dim() == 2)
        reason += f"; c reads out of its {A.shape[-1]} states for each channel, which are not written"
    if differentiated_by_transform(*(t for t in (A, b, x0, flags.get("c")) if t is not None)):
        algorithm, reason = "reference", "torch.func or forward-mode AD differentiates"
    if function is scan.linear_scan:
        return ScanExplanation("linear_scan", sizes, algorithm, reason)
    from ._distributed.group import ranks_of  # which asks torch.distributed: that takes a while to import

    ranks = ranks_of("explain", group).size
    reason += f"; a slice of {ranks} ranks, with one exchange each way"
    return ScanExplanation("linear_scan over ranks", sizes, algorithm, reason)


def _meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _explain_pointwise_scan(
    function: Callable[..., Any], step: Callable[..., Any], init: Any, inputs: Any, parameters: Any = (), *,
    reverse: bool = False, algorithm: str = "auto",
) -> ScanExplanation:  # fmt: skip
    call = checked("explain", step, init, inputs, parameters, algorithm)
    x = call.inputs[0]
    sizes = f"{len(call.init)} states, {len(call.inputs)} inputs {_sizes(x)}"
    if call.program is None:
        return ScanExplanation("pointwise_scan", sizes, "reference", call.obstacle or "")
    return ScanExplanation("pointwise_scan", sizes, *_walked(x, call.init[0].numel(), len(call.inputs), algorithm))


def _walked(x: Tensor, channels: int, inputs: int, algorithm: str) -> tuple[str, str]:
    """What runs a pointwise step, and why."""
    steps, cuda = x.shape[0], x.device.type == "cuda"
    chunks = 1
    if algorithm != "walk":
        with torch.cuda.device(x.device) if cuda else nullcontext():
            chunks = _C.scan.pointwise_chunks(cuda, steps, channels, inputs, algorithm == "newton")
    if chunks > 1:
        return "newton", f"{channels} channels leave the device idle: {chunks} chunks of time are walked at once"
    if algorithm == "walk":
        return "walk", 'algorithm="walk"'
    return "walk", f"{channels} channels over {steps} steps are walked as fast in one piece"


def _explain_scan_layer(layer: nn.Module, input: Tensor | PackedSequence, hx: Tensor | None = None) -> ScanExplanation:
    layer._check_input(input)
    packed = isinstance(input, PackedSequence)
    x = input.data if packed else input
    subject, sizes = f"{type(layer).__name__}({layer.extra_repr()})", ("packed " if packed else "") + _sizes(x)
    steps = len(input.batch_sizes) if packed else x.shape[1 if x.dim() == 3 and layer.batch_first else 0]
    ranks = layer._over_ranks
    if isinstance(layer, (weft_nn.ParaGRU, weft_nn.ParaLSTM)):
        if ranks is not None:
            return ScanExplanation(subject, sizes, "walk", ranks.said(in_rounds=True))
        if layer.algorithm == "reference":
            return ScanExplanation(subject, sizes, "reference", 'algorithm="reference"')
        x = input.transpose(0, 1) if layer.batch_first and input.dim() == 3 else input
        channels = layer.hidden_size * (x.shape[1] if x.dim() == 3 else 1)
        return ScanExplanation(subject, sizes, *_walked(x, channels, 3, layer.algorithm))
    if steps == 1 and not packed and ranks is None:
        return ScanExplanation(subject, sizes, "step", "one time step is one operator for each layer and direction")
    linear = isinstance(layer, (weft_nn.LRU, weft_nn.S5))
    algorithm, reason = _diagonal("A", constant=linear)
    alone = "it is linear in its state" if linear else "its gates depend on the input alone"
    reason = f"{alone}, so that all steps are one linear layer and one scan; {reason}"
    if ranks is not None:
        reason = f"{reason}; {ranks.said(in_rounds=False)}"
    return ScanExplanation(subject, sizes, algorithm, reason)


def _explain_chain(net: scan.ScanSequential, input: Tensor) -> ScanExplanation:
    if not isinstance(input, Tensor):
        raise TypeError(f"explain: x must be a Tensor, got {type(input).__name__}")
    lines, missing = [], []
    for name, module in unrolled(net):
        known = find_jacobian(module) is not None or isinstance(module, (nn.Identity, nn.Flatten, nn.Dropout))
        lines.append(f"{name:<12} {type(module).__name__:<16} {'Jacobian' if known else 'no Jacobian is registered'}")
        if not known:
            missing.append(f"{name} ({type(module).__name__})")
    if missing:
        reason = f"refused: {', '.join(missing)} has no Jacobian, see weft.sparse.register_jacobian"
        return ScanExplanation(type(net).__name__, _sizes(input), "none", reason, tuple(lines))
    reason = f"backward is a scan over the transposed Jacobians of {len(lines)} layers"
    return ScanExplanation(type(net).__name__, _sizes(input), "chain_backward", reason, tuple(lines))


def _explain_model(model: nn.Module, *inputs: Any, **keywords: Any) -> ModelExplanation:
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    wanted = {
        module: name
        for name, module in model.named_modules()
        if isinstance(module, (*_TORCHS, *_SCAN_LAYERS, *_VERTEX, scan.ScanSequential))
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
        kind = f"{'weft' if type(module).__module__.startswith('weft') else 'torch'}.{type(module).__name__}"
        if module not in calls:
            parts.append(PartExplanation(name, kind, "", "", "not called for this input"))
            continue
        args, kwargs = calls[module]
        found = explain(module, *args, **kwargs)
        if isinstance(found, VertexExplanation):
            parts.append(PartExplanation(name, kind, found.graphs, found.executor, found.reason))
            continue
        reason = found.reason if getattr(found, "note", None) is None else f"after weft.accelerate: {found.reason}"
        parts.append(PartExplanation(name, kind, found.input, found.algorithm, reason))
    return ModelExplanation(type(model).__name__, tuple(parts))
