"""``weft.explain``: the question goes to the engine of what is asked about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from . import _C, offloading, scan, vertex
from . import nn as weft_nn
from ._rnn.explain import Explanation
from ._rnn.explain import explain as explain_layer
from ._scan.pointwise import checked
from ._scan.sequential import unrolled
from ._sparse import find_jacobian
from ._vertex.explain import Explanation as VertexExplanation
from ._vertex.explain import explain as explain_vertex_function
from ._vertex.trainer import explain_trainer

__all__ = ["ModelExplanation", "PartExplanation", "ScanExplanation", "explain"]

State = Tensor | tuple[Tensor, Tensor] | None
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
            return f"{self.model}: no recurrent layer, scan layer or ScanSequential inside"
        rows = [("layer", "class", "input", "runs as", "why")]
        rows += [(p.name, p.kind, p.input, p.algorithm, p.reason) for p in self.parts]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)) + f"  {row[4]}" for row in rows]
        return "\n".join([self.model, *(line.rstrip() for line in lines)])


@overload
def explain(
    subject: weft_nn.RNN | weft_nn.GRU | weft_nn.LSTM, x: Tensor | PackedSequence, hx: State = None
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
    subject: weft_nn.MinGRU | weft_nn.MinLSTM | weft_nn.RGLRU, input: Tensor, h_0: Tensor | None = None
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
    - ``explain(model, *inputs)``: any other module: a table of the recurrent and scan layers inside, with the inputs
      that they get. The model runs once for that, in evaluation mode and without gradients.
    - ``explain(layer, x)`` of a :class:`~weft.nn.MinGRU`, :class:`~weft.nn.MinLSTM`, :class:`~weft.nn.RGLRU`,
      :class:`~weft.nn.ParaGRU`, :class:`~weft.nn.ParaLSTM` or :class:`~weft.scan.ScanSequential`, and
      ``explain(weft.scan.linear_scan, A, b, x0=None)`` or ``explain(weft.scan.pointwise_scan, step, init, inputs)``:
      which scan runs.
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
    if isinstance(subject, (vertex.VertexFunction, vertex.VertexFunctions)):
        return explain_vertex_function(subject, *rest, **kwargs)
    if isinstance(subject, vertex.Trainer):
        return explain_trainer(subject, *rest, **kwargs)
    if isinstance(subject, offloading.offload):
        return subject.report()
    if subject is scan.linear_scan:
        return _explain_linear_scan(*rest, **kwargs)
    if subject is scan.pointwise_scan:
        return _explain_pointwise_scan(*rest, **kwargs)
    if isinstance(subject, nn.Module) and not isinstance(subject, _TORCHS) and not rest and not kwargs:
        raise TypeError(f"explain: the input of {type(subject).__name__} is missing: weft.explain(model, x)")
    if isinstance(subject, _SCAN_LAYERS):
        return _explain_scan_layer(subject, *rest, **kwargs)
    if isinstance(subject, scan.ScanSequential):
        return _explain_chain(subject, *rest, **kwargs)
    if isinstance(subject, nn.Module) and not isinstance(subject, _TORCHS):
        return _explain_model(subject, *rest, **kwargs)
    if isinstance(subject, nn.Module) and not rest and "x" not in kwargs:
        raise TypeError(f"explain: the input of {type(subject).__name__} is missing: weft.explain(layer, x)")
    return explain_layer(subject, *rest, **kwargs)


def _sizes(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device.type}"


def _kind_of_scan(dims: int) -> tuple[str, str]:
    if dims == 3:
        return "diagonal scan", "A (T, B, H) is diagonal: a multiply-add for every state and step"
    return "dense scan", "A (T, B, H, H) is dense: H x H multiply-adds for every sequence and step"


def _explain_linear_scan(A: Tensor, b: Tensor, x0: Tensor | None = None, **flags: bool) -> ScanExplanation:
    for name, tensor in (("A", A), ("b", b)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"explain: {name} must be a Tensor, got {type(tensor).__name__}")
    with torch.no_grad():
        # What is wrong with the arguments is said by the operator, on tensors without data.
        meta = [None if t is None else torch.empty_like(t, device="meta") for t in (A, b, x0)]
        scan.linear_scan(*meta, **flags)
    if A.dim() == 4 and A.is_complex():
        return ScanExplanation(
            "linear_scan", f"A {tuple(A.shape)}, b {_sizes(b)}", "reference", "A is complex and dense"
        )
    algorithm, reason = _kind_of_scan(A.dim())
    return ScanExplanation("linear_scan", f"A {tuple(A.shape)}, b {_sizes(b)}", algorithm, reason)


def _explain_pointwise_scan(
    step: Callable[..., Any], init: Any, inputs: Any, parameters: Any = (), *, reverse: bool = False,
    algorithm: str = "auto",
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
    if isinstance(input, PackedSequence):
        input = input.data
    if not isinstance(input, Tensor):
        raise TypeError(f"explain: x must be a Tensor, got {type(input).__name__}")
    ranks = layer._over_ranks
    if isinstance(layer, (weft_nn.ParaGRU, weft_nn.ParaLSTM)):
        if ranks is not None:
            return ScanExplanation(repr(layer), _sizes(input), "walk", ranks.said(in_rounds=True))
        if layer.algorithm == "reference":
            return ScanExplanation(repr(layer), _sizes(input), "reference", 'algorithm="reference"')
        x = input.transpose(0, 1) if layer.batch_first and input.dim() == 3 else input
        channels = layer.hidden_size * (x.shape[1] if x.dim() == 3 else 1)
        return ScanExplanation(repr(layer), _sizes(input), *_walked(x, channels, 3, layer.algorithm))
    algorithm, reason = _kind_of_scan(3)
    alone = (
        "it is linear in its state"
        if isinstance(layer, (weft_nn.LRU, weft_nn.S5))
        else "its gates depend on the input alone"
    )
    reason = f"{alone}, so that all steps are one linear layer and one scan; {reason}"
    if ranks is not None:
        reason = f"{reason}; {ranks.said(in_rounds=False)}"
    return ScanExplanation(repr(layer), _sizes(input), algorithm, reason)


def _explain_chain(net: scan.ScanSequential, input: Tensor) -> ScanExplanation:
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
        if isinstance(module, (*_TORCHS, *_SCAN_LAYERS, scan.ScanSequential))
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
        found = _of_part(module, *calls[module])
        reason = found.reason if getattr(found, "note", None) is None else f"after weft.accelerate: {found.reason}"
        parts.append(PartExplanation(name, kind, found.input, found.algorithm, reason))
    return ModelExplanation(type(model).__name__, tuple(parts))


def _of_part(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation | ScanExplanation:
    if isinstance(module, _TORCHS):
        kwargs = {"x" if name == "input" else name: value for name, value in kwargs.items()}
    return explain(module, *args, **kwargs)
