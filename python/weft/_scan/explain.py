"""``weft.explain`` of scans and of the layers that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import _C
from .._base.torch_private import differentiated_by_transform, in_transform
from .._sparse import find_jacobian
from . import tuned
from .complex_layers import LRU, S5
from .gated import RGLRU, MinGRU, MinLSTM
from .linear import is_dense, linear_scan
from .para import ParaGRU, ParaLSTM
from .pointwise import checked
from .sequential import ScanSequential, hooked, unrolled

__all__ = [
    "SCAN_LAYERS", "ScanExplanation", "explain_chain", "explain_layer", "explain_linear_scan", "explain_pointwise_scan",
    "time_chunks",
]  # fmt: skip

SCAN_LAYERS = (MinGRU, MinLSTM, RGLRU, LRU, S5, ParaGRU, ParaLSTM)
_MOST_READ_OUT = 128
"""States of a channel that csrc/scan/readout reads out on CUDA without writing them."""


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


def _sizes(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device.type}"


_DIAGONAL = "A is diagonal: a multiply-add for every state and step"
_CONSTANT = "A is diagonal and constant in time, not expanded in memory: a multiply-add for every state and step"
_DENSE = "A is dense: H x H multiply-adds for every sequence and step"
_SHARED = "A is dense and shared by the batch: H x H multiply-adds for every sequence and step"
_BY_TRANSFORM = "torch.func or forward-mode AD, under which the reference runs"


def explain_linear_scan(
    A: Tensor, b: Tensor, x0: Tensor | None = None, *, c: Tensor | None = None, **flags: bool
) -> ScanExplanation:
    for name, tensor in (("A", A), ("b", b), *(() if c is None else (("c", c),))):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"explain: {name} must be a Tensor, got {type(tensor).__name__}")
    with torch.no_grad():
        # What is wrong with the arguments is said by the operator, on tensors without data.
        meta = [None if t is None else torch.empty_like(t, device="meta") for t in (A, b, x0, c)]
        linear_scan(*meta[:3], c=meta[3], **flags)
    sizes = f"A {tuple(A.shape)}, b {_sizes(b)}"
    if differentiated_by_transform(*(t for t in (A, b, x0, c) if t is not None)):
        return ScanExplanation("linear_scan", sizes, "reference", _BY_TRANSFORM)
    if c is not None:
        reason, N = "the states are read out by c in the walk through all steps, and never written", A.shape[-1]
        if b.device.type == "cuda" and N > _MOST_READ_OUT:
            reason = f"more than {_MOST_READ_OUT} states of a channel are written, and then read out by c"
        return ScanExplanation("linear_scan", f"{sizes}, c {tuple(c.shape)}", "diagonal scan", reason)
    if not is_dense(A, b, flags.get("batch_first", False)):
        return ScanExplanation("linear_scan", sizes, "diagonal scan", _DIAGONAL if A.shape == b.shape else _CONSTANT)
    if A.is_complex():
        return ScanExplanation("linear_scan", sizes, "reference", "A is complex and dense")
    batch = 0 if flags.get("batch_first", False) else 1
    shared = A.dim() == 3 or A.shape[batch] != b.shape[batch]
    return ScanExplanation("linear_scan", sizes, "dense scan", _SHARED if shared else _DENSE)


def explain_pointwise_scan(
    step: Callable[..., Any], init: Any, inputs: Any, parameters: Any = (), *, reverse: bool = False,
    algorithm: str = "auto",
) -> ScanExplanation:  # fmt: skip
    call = checked("explain", step, init, inputs, parameters, algorithm)
    sizes = f"{len(call.init)} states, {len(call.inputs)} inputs {_sizes(call.inputs[0])}"
    if call.program is None:
        return ScanExplanation("pointwise_scan", sizes, "reference", call.obstacle or "")
    return ScanExplanation("pointwise_scan", sizes, *_walked(call.kind(), len(call.inputs), algorithm))


def time_chunks(kind: tuned.Kind, inputs: int, wanted: bool) -> int:
    """Into how many chunks of time a pointwise scan is cut."""
    cuda = kind.device.type == "cuda"
    with torch.cuda.device(kind.device) if cuda else nullcontext():
        return _C.scan.pointwise_chunks(cuda, kind.steps, kind.channels, inputs, wanted)


def _walked(kind: tuned.Kind, inputs: int, algorithm: str) -> tuple[str, str]:
    """What runs a pointwise step, and why."""
    entry = tuned.look_up(kind) if algorithm == "auto" else None
    taken = algorithm if entry is None else entry.fastest
    chunks = 1 if taken == "walk" else time_chunks(kind, inputs, taken == "newton")
    if entry is not None:
        return ("newton" if chunks > 1 else "walk"), str(entry)
    if chunks > 1:
        return "newton", f"{kind.channels} channels leave the device idle: {chunks} chunks of time are walked at once"
    if algorithm == "walk":
        return "walk", 'algorithm="walk"'
    return "walk", f"{kind.channels} channels over {kind.steps} steps are walked as fast in one piece"


def explain_layer(layer: nn.Module, input: Tensor | PackedSequence, hx: Any = None) -> ScanExplanation:
    layer._check_input(input)
    packed = isinstance(input, PackedSequence)
    x = input.data if packed else input
    subject, sizes = _named(layer), ("packed " if packed else "") + _sizes(x)
    if isinstance(layer, (ParaGRU, ParaLSTM)):
        return _explain_para(layer, x, hx)
    reason = (
        "it is linear in its state, whose numbers are complex"
        if isinstance(layer, (LRU, S5))
        else "its gates depend on the input alone"
    )
    kind = _CONSTANT if isinstance(layer, (LRU, S5)) else _DIAGONAL
    reason = f"{reason}, so that all steps are one linear layer and one scan; {kind}"
    if layer._over_ranks is not None:
        reason = f"{reason}; {layer._over_ranks.said(in_rounds=False)}"
    elif packed:
        reason = f"{reason}; past its end a sequence keeps its state"
    elif x.shape[1 if layer.batch_first and x.dim() == 3 else 0] == 1:
        return ScanExplanation(subject, sizes, "step", "one step is one operator for each layer and direction")
    return ScanExplanation(subject, sizes, "diagonal scan", reason)


def _named(layer: nn.Module) -> str:
    """In a line, without the modules inside."""
    return f"{type(layer).__name__}({layer.extra_repr()})"


def _explain_para(layer: ParaGRU | ParaLSTM, x: Tensor, hx: Any) -> ScanExplanation:
    if layer._over_ranks is not None:
        return ScanExplanation(_named(layer), _sizes(x), "walk", layer._over_ranks.said(in_rounds=True))
    if layer.algorithm == "reference":
        return ScanExplanation(_named(layer), _sizes(x), "reference", 'algorithm="reference"')
    if in_transform() or differentiated_by_transform(x, *layer.parameters()):
        return ScanExplanation(_named(layer), _sizes(x), "reference", _BY_TRANSFORM)
    return ScanExplanation(_named(layer), _sizes(x), *_walked(layer._kind(x, hx), 3, layer.algorithm))


def explain_chain(net: ScanSequential, input: Tensor) -> ScanExplanation:
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
    with_hooks = hooked(net)
    if with_hooks is not None:
        reason = f"{with_hooks} has hooks, and no Jacobian knows what they change: as torch.nn.Sequential"
        return ScanExplanation(type(net).__name__, _sizes(input), "torch", reason, tuple(lines))
    reason = f"backward is a scan over the transposed Jacobians of {len(lines)} layers"
    return ScanExplanation(type(net).__name__, _sizes(input), "chain_backward", reason, tuple(lines))
