"""Samples of every op of torch.ops.weft, which drive the tests in test_ops.py.

A room lists its ops in tests/<room>/samples.py as `OPS = [Op(name, samples, ...), ...]` and is named in ROOMS below.
A sample is any object with a short str() and

    call(device, dtype, more=0) -> (args, kwargs)

the arguments of one call, small enough for finite differences; a larger `more` means larger sizes, with the same
structure. Every floating-point tensor among them, in a list too, is an operand: it is differentiated, mapped, strided
and changed. `large` samples are for what concerns a CUDA device (streams, graphs); `empty` ones have sizes 0.
An op that is not differentiable, or that has no batch dimension to map, says so in its Op; OTHERWISE names the ops
without samples and why. An op's own file tests what is its own: the reference, sizes, bad input.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import weft  # noqa: F401  registers torch.ops.weft
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

ROOMS = ("offload", "rnn", "scan", "sparse", "vertex")

_INTEGERS = "its results are integers alone: tests/sparse"
OTHERWISE = {
    "torch_rnn": "torch's own kernels: beside torch's layers in tests/rnn",
    "slice_scan": "it takes a group of ranks: tests/distributed",
    **dict.fromkeys(
        (
            "slice_product",
            "slice_message",
            "slice_maps",
            "slice_replay_",
            "slice_states",
            "slice_left",
            "slice_mend_",
            "slice_mend_gradients_",
            "slice_begin",
            "slice_finish_",
            "slice_begin_gradients",
            "slice_finish_gradients_",
        ),
        "parts of slice_scan, some of which work in place: tests/scan/test_slice_*.py",
    ),
    **dict.fromkeys(
        ("rnn_slice_maps", "rnn_slice_backward"), "parts of a layer over ranks: tests/rnn/test_rnn_slice_maps.py"
    ),
    "csr_transpose": _INTEGERS,
    "zeros_changed": _INTEGERS,
    "csr_matmul_plan": _INTEGERS,
    "conv_pattern": _INTEGERS,
    "max_pool_values": "piecewise constant, no finite differences: tests/sparse/test_pooling_jacobians.py",
}
"""Ops without samples, and why. A backward op is tested by its forward op's."""


def widest(operands: Sequence[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (t.dtype for t in operands))


@dataclass(frozen=True)
class Op:
    """What the tests know of an op."""

    name: str
    samples: Sequence[Any]
    large: Sequence[Any] = ()
    empty: Sequence[Any] = ()
    results: Callable[[Any, Any], Sequence[Tensor]] = lambda sample, results: tree_flatten(results)[0]
    """Of a call's results, those that the sample's call defines, differentiable where the op is."""
    differentiable: bool = True
    vmap: bool = True
    autocast: Callable[[Any, str, Sequence[Tensor]], torch.dtype] = lambda sample, device, operands: widest(operands)
    """The dtype of the results under autocast to bf16."""
    contiguous_integers: bool = False
    """Whether its tensors of integers, patterns and plans, have to be contiguous."""

    def __str__(self) -> str:
        return self.name


class Call:
    """One call of an op, as a function of its operands."""

    def __init__(self, op: Op, sample: Any, device: str, dtype: torch.dtype, more: int = 0) -> None:
        self.op, self.sample = op, sample
        self.leaves, self.spec = tree_flatten(sample.call(device, dtype, more))
        self.where = [i for i, t in enumerate(self.leaves) if isinstance(t, Tensor) and t.is_floating_point()]

    @property
    def packet(self):
        return getattr(torch.ops.weft, self.op.name)

    @property
    def operands(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.where]

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Call:
        """The same call with every tensor in another layout."""
        changed = copy.copy(self)
        changed.leaves = [
            view(t) if isinstance(t, Tensor) and not (self.op.contiguous_integers and not t.is_floating_point()) else t
            for t in self.leaves
        ]
        return changed

    def arguments(self, *operands: Tensor) -> tuple[tuple, dict]:
        leaves = list(self.leaves)
        for i, operand in zip(self.where, operands, strict=True):
            leaves[i] = operand
        return tree_unflatten(leaves, self.spec)

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.arguments(*operands)
        return tuple(self.op.results(self.sample, self.packet(*args, **kwargs)))

    def run(self, *operands: Tensor, view: Callable[[Tensor], Tensor] = lambda t: t) -> list[Tensor]:
        """The results and, where the op is differentiable, the gradients of all operands."""
        leaves = [t.detach().requires_grad_(self.op.differentiable) for t in operands]
        return self.with_gradients(self(*leaves), leaves, view)

    def with_gradients(
        self, results: Sequence[Tensor], leaves: Sequence[Tensor], view: Callable[[Tensor], Tensor] = lambda t: t
    ) -> list[Tensor]:
        found = [r for r in results if r.requires_grad] if self.op.differentiable else []
        if not found:
            return list(results)
        outgoing = [view(torch.arange(r.numel(), device=r.device).cos().view(r.shape).to(r.dtype)) for r in found]
        grads = torch.autograd.grad(found, leaves, outgoing, allow_unused=True, materialize_grads=True)
        return [*(r.detach() for r in results), *grads]


def every_op() -> list[Op]:
    return [op for room in ROOMS for op in importlib.import_module(f"tests.{room}.samples").OPS]
