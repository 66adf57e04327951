"""ScanSequential: torch.nn.Sequential whose backward pass is a chain of transposed Jacobians."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._base.torch_private import GLOBAL_HOOKS, any_autocast, differentiated_by_transform, in_transform, keeps_graph
from .._sparse import (
    BatchedCSR,
    check_batch_norm,
    dropout_jacobian,
    find_jacobian,
    transposed_jacobian,
    unknown,
    zeros_compared,
)
from .chain import chain_backward
from .layer_chain import (
    LeftToTorch,
    Zeros,
    along_layers,
    forward_of,
    input_gradient,
    is_direct,
    parameter_gradients,
    weight_and_bias,
)
from .schedule import levels_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_MAKE_WEIGHTS = (BasePruningMethod, WeightNorm, SpectralNorm)
"""Hooks before a layer that leave what goes in and comes out as it is."""


class Record(NamedTuple):
    """One layer's part of a forward pass."""

    position: int
    module: nn.Module
    input: Tensor
    output: Tensor  # with the graph of the layer's own parameters
    parameters: list[nn.Parameter]  # that require a gradient
    mask: Tensor | None  # of a dropout that drops
    versions: list[tuple[Tensor, int]]
    kept: list[Tensor] | None = None  # of torch's own layer whose gradients need no graph: its parameters
    indices: Tensor | None = None  # that a max-pooling has picked
    left: bool = False  # to torch, which gives the gradient of its input
    members: list[tuple[dict, str, Tensor]] | None = None  # of a module whose tensors are not kept: where each was

    @property
    def is_identity(self) -> bool:
        if self.mask is not None or self.output.shape[:1] != self.input.shape[:1]:
            return False
        return type(self.module) in (nn.Identity, nn.Flatten, nn.Dropout)

    def jacobian(self, prune: bool) -> BatchedCSR | Tensor:
        """To be called without grad mode."""
        if self.mask is not None:
            return dropout_jacobian(self.mask, self.module.p, dtype=self.input.dtype)
        return transposed_jacobian(self.module, self.input, self.output.detach(), prune=prune)

    @property
    def tensors(self) -> list[tuple[dict, str, Tensor]]:
        """The module's tensors in the forward pass, each with the dictionary that it was in and its name there."""
        if self.members is not None:
            return self.members
        parameters = self.module._parameters
        return [(parameters, name, t) for name, t in zip(("weight", "bias"), self.kept or (), strict=False)]

    def refuse(self, tensor: Tensor, version: int) -> None:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"ScanSequential: layer {self.position} ({type(self.module).__qualname__}) or its input was changed in "
            f"place between the forward and the backward pass, it is at version {tensor._version}; expected version "
            f"{version} instead"
        )


def unrolled(net: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials, with their names."""
    for name, module in net._modules.items():
        if isinstance(module, nn.Sequential) and type(module).forward in (
            nn.Sequential.forward,
            ScanSequential.forward,
        ):
            yield from unrolled(module, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", module


def _state(module: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Parameters and buffers. torch's own iterators take longer than a small layer."""
    if module._modules:
        return list(module.parameters()), list(module.buffers())
    parameters, buffers = module._parameters, module._buffers
    return (
        [p for p in parameters.values() if p is not None] if parameters else [],
        [b for b in buffers.values() if b is not None] if buffers else [],
    )


def _members(module: nn.Module) -> list[tuple[dict, str, Tensor]]:
    found = []
    for part in module.modules() if module._modules else (module,):
        for members in (part._parameters, part._buffers):
            found += [(members, name, t) for name, t in members.items() if t is not None]
    return found


_NONE = object()  # stands for no tensor


@contextlib.contextmanager
def _as_in_forward(records: list[Record]) -> Iterator[None]:
    """Gives modules the tensors that they had in the forward pass, for which torch.func.functional_call lends them."""
    lent: list[tuple[dict, str, Any]] = []
    try:
        for record in records:
            for members, name, tensor in record.tensors:
                if (now := members.get(name, _NONE)) is not tensor:
                    lent.append((members, name, now))
                    members[name] = tensor
        yield
    finally:
        for members, name, now in reversed(lent):
            if now is _NONE:
                del members[name]
            else:
                members[name] = now


def layers_of(net: nn.Module) -> list[nn.Module]:
    return [module for _, module in unrolled(net)]


def hooked(net: nn.Module, prefix: str = "") -> str | None:
    """The first part whose hooks may change what goes into it, what comes out or its gradients: no Jacobian knows of
    that. "every module" where torch has hooks of all modules."""
    if any(GLOBAL_HOOKS):
        return "every module"
    for name, module in net._modules.items():
        if module is None:
            continue
        if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
            return f"{prefix}{name}"
        before = module._forward_pre_hooks
        if before and not all(isinstance(hook, _MAKE_WEIGHTS) for hook in before.values()):
            return f"{prefix}{name}"
        if module._modules:
            inside = hooked(module, f"{prefix}{name}.")
            if inside is not None:
                return inside
    return None


def run(
    layers: list[nn.Module],
    input: Tensor,
    left: LeftToTorch | None = None,
    prune: bool = False,
    direct: bool = False,
) -> list[Record]:
    """The forward pass, layer by layer, each with its own graph of parameters alone. `direct`: those that need no graph
    without one. `left` says which layers are torch's altogether, of those that something before them, or they
    themselves, want a gradient."""
    records, x = [], input.detach()
    wanted = input.requires_grad
    for position, module in enumerate(layers):
        mask = None
        if direct and is_direct(module, x):
            kept = weight_and_bias(module)
            torch_takes = bool(left is not None and kept and wanted and left.takes(position, module, x, prune))
            parameters = [p for p in kept if p.requires_grad]
            output, indices = forward_of(module, x, kept)
            # A product that is written is made from what went in, too.
            held = (x, output) if type(module) is nn.ReLU else (x, *kept) if parameters or not kept else kept
            versions = [(t, t._version) for t in held]
            records.append(Record(position, module, x, output, parameters, None, versions, kept, indices, torch_takes))
            wanted = wanted or bool(parameters)
            x = output
            continue
        all_parameters, buffers = _state(module)
        parameters = [p for p in all_parameters if p.requires_grad]
        # What works in place would overwrite what its Jacobian is made from.
        before = x.clone() if getattr(module, "inplace", False) else x
        if type(module).forward is nn.Dropout.forward and module.training and module.p > 0 and x.numel():
            with torch.no_grad():
                output, mask = _dropout(x, module.p, module.inplace)
        else:
            with torch.set_grad_enabled(bool(parameters)):
                output = module(before)
        if not isinstance(output, Tensor):
            raise ValueError(
                f"ScanSequential: layer {position} ({type(module).__qualname__}) must return one Tensor, got "
                f"{type(output).__name__}"
            )
        # What its Jacobian is made from; where autograd looks by itself, it looks too.
        tensors = [*all_parameters, *buffers]
        if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Linear)):
            tensors.append(x)
        versions = [(t, t._version) for t in tensors]
        own = _members(module)
        records.append(Record(position, module, x, output, parameters, mask, versions, members=own))
        wanted = wanted or bool(parameters)
        x = output.detach() if output.requires_grad else output
    return records


def _dropout(x: Tensor, p: float, inplace: bool) -> tuple[Tensor, Tensor]:
    """F.dropout's values and random numbers, and its mask; x is left as it is."""
    if p == 1:
        return F.dropout(x, p, True), torch.zeros_like(x, dtype=torch.bool)
    if x.is_cuda and not inplace:
        return torch.native_dropout(x, p, True)
    # On CUDA torch draws other numbers in place: not in its fused kernel.
    scale = F.dropout(torch.ones_like(x), p, True, inplace)
    return x * scale, scale != 0


def check_layers(layers: list[nn.Module]) -> None:
    """Raises for a layer that has no Jacobian."""
    for position, module in enumerate(layers):
        if find_jacobian(module) is None:
            raise TypeError(f"ScanSequential: layer {position}: {unknown(module)}")
        if isinstance(module, _BATCH_NORMS):
            check_batch_norm(f"ScanSequential: layer {position}", module)


def needed(records: list[Record], input_needed: bool) -> list[Record]:
    """The layers that a gradient passes through, from the last: down to the input, or to behind the first layer with
    parameters that want one."""
    first = 0
    if not input_needed:
        first = next((i + 1 for i, r in enumerate(records) if r.parameters), len(records))
    return records[first:][::-1]


class _Kept:
    """What is kept with a net from step to step."""

    def __init__(self) -> None:
        self.left = LeftToTorch()
        self.chains: dict[Any, Any] = {}
        self.pruned: list[int] = []  # positions of the weights whose zeros the last backward pass had to know


_kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def _case(net: ScanSequential, input: Tensor) -> tuple:
    """What a decision about a whole net holds for."""
    return input.shape, input.dtype, input.device, input.requires_grad, net.prune


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, net: ScanSequential, layers: list[nn.Module], input: Tensor, *parameters: Tensor) -> Tensor:
        direct = not (torch.compiler.is_compiling() or any_autocast())
        ctx.kept = _kept.setdefault(net, _Kept()) if direct else None
        ctx.zeros = Zeros.ask([layers[i] for i in ctx.kept.pruned if i < len(layers)]) if direct and net.prune else None
        left = ctx.kept.left if direct and net.schedule == "auto" else None
        ctx.records = run(layers, input, left, net.prune, direct)
        if left is not None:
            left.step(net.prune)
            if (case := _case(net, input)) not in left.whole:
                left.conclude(case, [(r.position, r.input) for r in ctx.records])
        ctx.input = input
        ctx.schedule, ctx.prune = net.schedule, net.prune
        ctx.parameters = parameters
        output = ctx.records[-1].output.detach()
        # A net of identities would return its input.
        return output.clone() if output.data_ptr() == input.data_ptr() else output

    @staticmethod
    def backward(ctx, grad: Tensor):
        with torch.no_grad():
            results = _Scan.gradients(ctx, grad)
        if not torch.is_grad_enabled():
            return results
        found = [r for r in results if r is not None]
        refused = iter(_Once.apply(len(found), *found, grad, ctx.input, *ctx.parameters))
        return tuple(None if r is None else next(refused) for r in results)

    @staticmethod
    def gradients(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        records: list[Record] | None = ctx.records
        if records is None:
            raise RuntimeError("ScanSequential: the first backward pass freed the graph; retain_graph=True keeps it")
        keep = keeps_graph()
        if not keep:
            ctx.records = None
        input_needed = ctx.needs_input_grad[2]
        through = needed(records, input_needed)
        moving = [r for r in through if r.kept is not None or not r.is_identity]
        moved = {r.position for r in moving}
        for record in records:
            if record.kept is not None or record.position in moved:
                for tensor, version in record.versions:
                    if tensor._version != version:
                        record.refuse(tensor, version)
        B = grad.shape[0]
        flat = grad.reshape(B, grad.shape[1:].numel())
        wanted: dict[Tensor, Tensor | None] = {}
        with _as_in_forward(moving):
            gradients = iter(_Scan.along(ctx, moving, flat))
        # What reaches each layer's output, and behind the first one the input.
        reaching, g = {}, next(gradients)
        for record in through:
            reaching[record.position] = g
            if record.position in moved:
                g = next(gradients)
        if len(through) < len(records):
            reaching[len(records) - len(through) - 1] = g
        # All layers at once: waking autograd's thread for the device takes longer than a small layer.
        outputs, arriving, own_graph, without = [], [], {}, []
        for record in records:
            own = [p for p in record.parameters if p.requires_grad]
            if not own or record.position not in reaching:
                continue
            arrives = reaching[record.position].to(record.output.dtype)
            if record.kept is not None:
                without.append((record, arrives, [p.requires_grad for p in record.kept]))
            elif record.output.requires_grad:
                outputs.append(record.output)
                arriving.append(arrives.reshape(record.output.shape))
                own_graph.update(dict.fromkeys(own))
        if outputs:
            parts = torch.autograd.grad(outputs, list(own_graph), arriving, retain_graph=keep, allow_unused=True)
            _add(wanted, zip(own_graph, parts, strict=True))
        if without:
            # Side by side in a CUDA graph; elsewhere the host is what a step waits for.
            branches = grad.is_cuda and torch.cuda.is_current_stream_capturing()
            _add(wanted, parameter_gradients(without, branches))
        grad_input = g.to(ctx.input.dtype).reshape(ctx.input.shape) if input_needed else None
        return None, None, grad_input, *(wanted.get(p) for p in ctx.parameters)

    @staticmethod
    def along(ctx, moving: list[Record], flat: Tensor) -> list[Tensor]:
        """``flat`` and the gradients that leave each layer."""
        found, segment = [flat], []
        # While a graph is captured nothing can be compared, and the last zeros are taken.
        capturing = flat.is_cuda and torch.cuda.is_current_stream_capturing()
        pruned = [r for r in moving if ctx.prune and r.kept and not r.left]
        asked = capturing or (ctx.zeros is not None and ctx.zeros.same([r.module for r in pruned]))
        if ctx.kept is not None:
            ctx.kept.pruned = [r.position for r in pruned]
        compared = (r.module for r in moving if ctx.prune and not (asked and r.kept is not None) and not r.left)
        with zeros_compared(compared) as same:
            settled = asked or same
            for record in moving:
                if not record.left:
                    segment.append(record)
                    continue
                found += _Scan.linked(ctx, segment, found[-1], settled)
                segment = []
                found.append(input_gradient(record, found[-1]))
            return found + _Scan.linked(ctx, segment, found[-1], settled)

    @staticmethod
    def linked(ctx, layers: list[Record], grad: Tensor, settled: bool) -> list[Tensor]:
        """The gradients that leave layers of a chain."""
        if not layers:
            return []
        if ctx.kept is not None:
            gradients = along_layers(layers, grad, ctx.prune, settled, ctx.schedule, ctx.kept.chains)
            if gradients is not None:
                return gradients[1:]
        jacobians = [r.jacobian(ctx.prune) for r in layers]
        dtype = grad.dtype
        for J in jacobians:
            dtype = torch.promote_types(dtype, J.dtype)
        jacobians = [J if J.dtype == dtype else J.to(dtype) for J in jacobians]
        with torch.autocast(grad.device.type, enabled=False):
            return chain_backward(grad.to(dtype), jacobians, ctx.schedule)[1:]


def _add(wanted: dict[Tensor, Tensor | None], parts) -> None:
    """Parameters' gradients, of one that several layers have their sum."""
    for parameter, grad in parts:
        before = wanted.get(parameter)
        wanted[parameter] = grad if before is None else before if grad is None else before + grad


class _Once(torch.autograd.Function):
    """Gradients that hang on all they depend on, so that no second pass misses the refusal: torch's own
    once_differentiable lets through, and drops, what is asked for by torch.autograd.grad."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *grads: Tensor):
        raise RuntimeError("ScanSequential is differentiable once")


class ScanSequential(nn.Sequential):
    """``torch.nn.Sequential`` whose backward pass is a scan over transposed Jacobians.

    Args:
        layers: modules, or one ``OrderedDict`` of them, whose Jacobians :func:`weft.sparse.transposed_jacobian` knows;
            Sequentials inside are unrolled.
        schedule: of :func:`weft.scan.chain_backward`.
        prune: gives Conv1d, Conv2d and Linear patterns without the weights that are exactly zero, so that a step of a
            pruned net costs what its non-zeros cost. A change in the set of zeros is noticed at the next step.

    Forward gives the same values and draws the same random numbers as ``nn.Sequential``; so do the gradients, up to
    rounding: all gradients along the chain, as by ``chain_backward``, then the parameters', which no longer wait for
    each other: those of small layers together, the others by each layer's own autograd.
    Without gradients to compute, under ``torch.func`` and in forward mode it is ``nn.Sequential``, whatever the layers;
    so it is where modules inside have hooks, which may change what no Jacobian knows of. Those of torch's pruning,
    weight norm and spectral norm do not.

    Raises, in a forward pass with gradients to compute:
        TypeError: a layer without a known Jacobian, named by its position and type.
        RuntimeError: a batch norm that normalises by the batch.

    Differentiable once.

    Source: BPPSA, section 3, MLSys 2020.
    """

    def __init__(
        self, *layers: nn.Module | OrderedDict[str, nn.Module], schedule: str | int = "auto", prune: bool = False
    ) -> None:
        super().__init__(*layers)
        levels_of("ScanSequential", schedule)
        self.schedule = schedule
        self.prune = bool(prune)

    def __getitem__(self, index: slice | int) -> nn.Module:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            found.schedule, found.prune = self.schedule, self.prune
        return found

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not isinstance(input, Tensor):
            return super().forward(input)
        layers = layers_of(self)
        if not layers:
            return super().forward(input)
        # torch's own walk over all parameters takes longer than a small layer.
        parameters = list(dict.fromkeys(p for module in layers for p in _state(module)[0] if p.requires_grad))
        # Lazy layers get their sizes in the first pass.
        if not (parameters or input.requires_grad) or any(map(is_lazy, parameters)):
            return super().forward(input)
        if not torch.compiler.is_compiling() and (in_transform() or differentiated_by_transform(input, *parameters)):
            return super().forward(input)
        check_layers(layers)
        if input.dim() == 0:
            raise ValueError("ScanSequential: input must have the batch first, got ()")
        if hooked(self) is not None:
            return super().forward(input)
        if self.schedule == "auto" and not torch.compiler.is_compiling():
            kept = _kept.get(self)
            if kept is not None and kept.left.whole.get(_case(self, input)):
                kept.left.step(self.prune)
                return super().forward(input)
        return _Scan.apply(self, layers, input, *parameters)
