"""A backward pass along layers whose Jacobians nobody writes: what torch.nn's own layers keep is what weft::layer_chain
reads, and their parameters' gradients follow from what went in and what comes back, without a graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _C
from .._base import costs as gpu_costs
from .._sparse import Pattern, known_zeros, unwritten
from .chain import costs_on, sparse_of, tree_of
from .schedule import levels_of

_CONVS = (nn.Conv1d, nn.Conv2d)
_DIRECT = frozenset((*_CONVS, nn.Linear, nn.ReLU, nn.MaxPool2d))
_DTYPES = (torch.float32, torch.float64)
_PLAIN = (nn.Parameter, Tensor)


class Layer(Protocol):
    """What is asked of a record of ScanSequential."""

    position: int
    module: nn.Module
    input: Tensor
    output: Tensor
    kept: list[Tensor] | None
    indices: Tensor | None

    def jacobian(self, prune: bool) -> Any: ...


def is_direct(module: nn.Module, input: Tensor) -> bool:
    """Whether a layer is torch's own, as it is: no hook sees it, nothing makes its weight."""
    kind, own = type(module), module.__dict__
    if kind not in _DIRECT or input.dtype not in _DTYPES or "forward" in own:
        return False
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    if kind is nn.ReLU:
        return True
    if kind is nn.MaxPool2d:
        return input.dim() == 4 and not own["return_indices"]
    parameters = own["_parameters"]
    weight = parameters.get("weight")
    # The plain memory of a parameter of another type is not its numbers.
    if any(type(p) not in _PLAIN for p in parameters.values() if p is not None):
        return False
    if weight is None or weight.dtype is not input.dtype or input.dim() != (2 if kind is nn.Linear else weight.dim()):
        return False
    if kind is nn.Linear:
        return True
    if own["padding_mode"] != "zeros":
        return False
    # torch takes one number for all dimensions, too.
    stride, padding, dilation = own["stride"], own["padding"], own["dilation"]
    return (
        type(stride) is type(padding) is type(dilation) is tuple
        and len(stride) == len(padding) == len(dilation) == input.dim() - 2
    )


def forward_of(module: nn.Module, input: Tensor, kept: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """What such a layer gives, and the indices of a max-pooling: torch's own functions, without the way through
    Module.__call__."""
    kind = type(module)
    if kind is nn.ReLU:
        return torch.relu(input), None
    if kind is nn.MaxPool2d:
        settings = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
        return F.max_pool2d(input, *settings, return_indices=True)
    weight, bias = kept if len(kept) == 2 else (kept[0], None)
    if kind is nn.Linear:
        return F.linear(input, weight, bias), None
    conv = torch.conv2d if kind is nn.Conv2d else torch.conv1d
    return conv(input, weight, bias, module.stride, module.padding, module.dilation, module.groups), None


def weight_and_bias(module: nn.Module) -> list[Tensor]:
    """In this order, those that there are."""
    parameters = module._parameters
    if not parameters:
        return []
    weight, bias = parameters["weight"], parameters.get("bias")
    return [weight] if bias is None else [weight, bias]


@functools.lru_cache(maxsize=256)
def _settings(stride: tuple, padding: tuple, dilation: tuple, groups: int) -> _C.scan.ConvSettings:
    return _C.scan.ConvSettings(list(stride), list(padding), list(dilation), groups)


def parameter_gradients(
    layers: Sequence[tuple[Layer, Tensor, list[bool]]], branches: bool
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a parameter and its gradient, of layers that keep theirs, given with the flat gradients of their outputs
    and which of their parameters want one. `branches`: on streams side by side."""
    given = []
    for layer, grad, wants in layers:
        module = layer.module
        conv = None
        if type(module) in _CONVS:
            conv = _settings(module.stride, module.padding, module.dilation, module.groups)
        bias = len(wants) > 1 and wants[1]
        given.append((conv, layer.input, grad, layer.output.shape, layer.kept[0], wants[0], bias))
    pairs = []
    for (layer, _, _), found in zip(layers, _C.scan.layer_gradients(given, branches), strict=True):
        pairs += [(p, g) for p, g in zip(layer.kept, found, strict=False) if g is not None]
    return pairs


def input_gradient(layer: Layer, grad: Tensor) -> Tensor:
    """The flat gradient of the input of a layer that keeps its parameters, by torch, from that of its output."""
    module, weight, B = layer.module, layer.kept[0], grad.shape[0]
    grad = grad.to(layer.output.dtype)
    if type(module) is nn.Linear:
        return grad @ weight
    g, *_ = torch.ops.aten.convolution_backward(
        grad.reshape(layer.output.shape), layer.input, weight, None, module.stride, module.padding, module.dilation,
        False, [0] * len(module.stride), module.groups, [True, False, False],
    )  # fmt: skip
    return g.reshape(B, layer.input.shape[1:].numel())


# Zeros of pruned weights ----------------------------------------------------------------------------------------------


class Zeros:
    """Whether pruned weights have the zeros that they had, asked of a GPU when the forward pass begins and answered
    when the backward pass does: nobody waits while there is other work.

    They are compared in every step: that a weight's version is the old one does not say that nobody wrote to its .data.
    """

    def __init__(self, modules: Sequence[nn.Module], weights: list[Tensor], stored: list[Tensor]) -> None:
        self._modules = frozenset(modules)
        changed = torch.ops.weft.zeros_changed(weights, stored)
        self._changed = changed.to("cpu", non_blocking=True)  # which torch puts into pinned memory
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(changed.device))  # not of the current device

    @staticmethod
    def ask(modules: Sequence[nn.Module]) -> Zeros | None:
        """None where there is nothing to ask, or nobody to answer: of some weight no zeros are known, a CPU."""
        weights: list[Tensor] = []
        stored: list[Tensor] = []
        for module in modules:
            if type(module) not in (*_CONVS, nn.Linear):
                continue
            zeros = known_zeros(module)
            if zeros is None:
                return None
            weights.append(module._parameters["weight"].detach())
            stored.append(zeros)
        if not weights or not weights[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return None
        alike = all(w.dtype is weights[0].dtype and w.device == weights[0].device for w in weights)
        return Zeros(modules, weights, stored) if alike else None

    def same(self, modules: Sequence[nn.Module]) -> bool:
        """Of these; False, too, where nobody asked of one."""
        if not self._modules.issuperset(modules):
            return False
        self._arrived.synchronize()
        return not self._changed.item()


# The chain ------------------------------------------------------------------------------------------------------------


class Links:
    """The chain of layers that had these Jacobians' patterns, and how many levels "auto" takes for it."""

    def __init__(self, key: tuple, held: list, patterns: list[Pattern], sources: list[Tensor | None], reads) -> None:
        self.key, self._held = key, held  # so that no id comes again
        device = patterns[0].crow.device
        dtypes = {p.crow.dtype for p in patterns}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None
        none = torch.empty(0, dtype=self.dtype, device=device)
        self.patterns = patterns
        self.levels: dict[tuple, int] = {}
        if self.dtype is not None:
            self.run = _C.scan.LayerChain(
                [none if p.diagonal else p.crow for p in patterns],
                [none if p.diagonal else p.col for p in patterns],
                [none if s is None else s for s in sources],
                reads,
            )


def along_layers(
    layers: Sequence[Layer], grad: Tensor, prune: bool, settled: bool, schedule: str | int, cache: dict
) -> list[Tensor] | None:
    """``grad`` (B, n) and all gradients along the layers, last first, without writing the Jacobians of torch's own;
    None where a chain of written ones is to be taken: products of Jacobians, dtypes that differ. `cache` is kept from
    step to step."""
    levels = levels_of("ScanSequential", schedule)
    if levels > 0 or grad.dtype not in _DTYPES:
        return None
    keys, values, links = [], [], []
    for layer in layers:
        found = None
        if layer.kept is not None:
            found = unwritten(layer.module, layer.input, layer.output, prune, settled)
        if found is None:
            J = sparse_of(layer.jacobian(prune))
            links.append((J._pattern, None, 0))
            keys.append(id(J._pattern))
            values.append(J._values)
        else:
            links.append(found)
            keys.append(id(found))
            reads = found.reads
            values.append(layer.output if reads < 0 else layer.indices if reads else layer.kept[0])
        if values[-1].dtype is not grad.dtype and not links[-1][2] > 0:
            return None
    key, at = tuple(keys), layers[0].position
    chain: Links | None = cache.get(at)
    if chain is None or chain.key != key:
        patterns, sources, reads = map(list, zip(*links, strict=True))
        chain = cache[at] = Links(key, links, patterns, sources, reads)
    if chain.dtype is None:
        return None
    if levels < 0:
        case = (grad.shape[0], grad.dtype)
        if case not in chain.levels:
            batches = [v.shape[0] if layer.kept is None and v.dim() == 2 else None
                       for layer, v in zip(layers, values, strict=True)]  # fmt: skip
            chain.levels[case] = tree_of(chain.patterns, levels, batches, grad.dtype).levels
        if chain.levels[case]:
            return None
    return [grad, *chain.run(grad, values)]


# What is left to torch ------------------------------------------------------------------------------------------------

_RECOUNT = 64
"""Steps after which the weights of a pruned layer that is left to torch are counted again."""
_SMALLEST_ON_CPU = 1e6
"""FLOPs of a layer that are worth a thought on a CPU."""


class _Times(NamedTuple):
    """Microseconds beside what products take."""

    link: float
    """One more product of matrix and vector."""
    layer: float
    """The gradient of a small convolution's input in torch."""
    simple: float
    """The same of a layer without weights."""
    segment: float
    """From the chain to torch and back."""
    worth: float
    """Of torch's time: a chain that is expected to save less is left to torch altogether."""

    @classmethod
    def on(cls, device: torch.device) -> _Times:
        table = gpu_costs.of(device.index).tables["scan.layer_chain"]
        return cls(*(table[name][0] for name in cls._fields))


class LeftToTorch:
    """Which layers of a net "auto" leaves to torch, because their Jacobian has so many elements that a product with it
    takes longer than the gradient by torch's own kernel; and whether all are."""

    def __init__(self) -> None:
        self._layers: dict[tuple, bool] = {}
        self._times: dict[tuple, tuple[float, float]] = {}
        self._steps = 0
        self.whole: dict[tuple, bool] = {}

    def step(self, prune: bool) -> None:
        self._steps += 1
        if prune and self._steps % _RECOUNT == 0:
            self._layers.clear(), self._times.clear(), self.whole.clear()

    def takes(self, position: int, module: nn.Module, input: Tensor, prune: bool) -> bool:
        """Whether torch takes a layer."""
        key = (position, input.shape)
        taken = self._layers.get(key)
        if taken is None:
            mine, theirs = self._times[key] = _expected(module, input, prune)
            taken = self._layers[key] = theirs < mine
        return taken

    def conclude(self, case: tuple, layers: Sequence[tuple[int, Tensor]]) -> None:
        """Whether torch is to take the whole net in the next step, from its layers' positions and what went in."""
        ours = theirs = 0.0
        before = False
        some = False
        for position, input in layers:
            times = self._times.get((position, input.shape))
            taken = self._layers.get((position, input.shape), False)
            some = some or taken
            costs = _Times.on(input.device)
            mine, own = times if times is not None else (costs.link, costs.simple)
            ours += own if taken else mine
            ours += costs.segment * (taken != before)
            theirs += own
            before = taken
        self.whole[case] = some and ours > costs.worth * theirs


def _expected(module: nn.Module, input: Tensor, prune: bool) -> tuple[float, float]:
    """Microseconds of a product with a layer's Jacobian, and of torch's own gradient of its input."""
    weight, B = module._parameters["weight"], input.shape[0]
    positions = 1
    if type(module) in _CONVS:
        settings = zip(input.shape[2:], module.kernel_size, module.stride, module.padding, module.dilation, strict=True)
        for n, k, s, p, d in settings:
            positions *= max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1)
    dense = 2e-9 * weight.numel() * positions * B
    stored = dense
    capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    if prune and weight.numel() and not capturing:
        stored *= int(weight.detach().count_nonzero()) / weight.numel()
    costs = costs_on(weight.device)
    if weight.is_cuda:
        times = _Times.on(weight.device)
        return times.link + costs.vector * stored, times.layer + costs.dense * dense
    if 1e9 * dense < _SMALLEST_ON_CPU:
        return 0.0, 1.0
    return costs.link + costs.vector * stored, costs.layer + costs.dense * dense
