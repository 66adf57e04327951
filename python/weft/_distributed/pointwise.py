"""ParaGRU and ParaLSTM over slices, in rounds (walks.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .exchanging import run
from .group import Ranks
from .walks import WayBack, settle, settle_back, walk_again

__all__ = ["PointwiseWalk", "walk_pointwise"]

_scan = torch.ops.weft.pointwise_scan.default
_backward = torch.ops.weft.pointwise_scan_backward.default


class PointwiseWalk(NamedTuple):
    """How weft::pointwise_scan walks a slice."""

    ranks: Ranks
    program: str
    algorithm: str
    name: str

    def __call__(self, gates: Tensor, start: Tensor, parameters: list[Tensor]) -> Tensor:
        """All states, (T, states, B, H)."""
        states = _scan(
            list(start.unbind()), [gates], parameters, self.program, True, False, self.algorithm, self.name
        )  # fmt: skip
        return torch.stack(states, 1)


class _Slice(torch.autograd.Function):
    """What walk_pointwise does."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, walk: PointwiseWalk, gates: Tensor, start: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        states = walk(gates, start, list(parameters))

        def block(steps: slice, start: Tensor) -> tuple[Tensor, Tensor]:
            part, there = walk(gates[steps], start, list(parameters)), states[steps][-1].clone()
            states[steps] = part
            return part[-1], there

        def again(start: Tensor) -> Tensor:
            return walk_again(len(gates), start, states[-1] if len(gates) else start, block)

        last = states[-1] if len(gates) else start
        start, end = run(walk.ranks, settle(walk.ranks, False, start, last, again))
        ctx.walk = walk
        ctx.save_for_backward(gates, start, states, *parameters)
        return states, end

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_states: Tensor, grad_end: Tensor) -> tuple:
        walk, (gates, start, states, *parameters) = ctx.walk, ctx.saved_tensors
        needed, count = ctx.needs_input_grad, start.size(0)
        wanted = [needed[1], *needed[3:]]

        def back(begin: int, end: int, leaving: Tensor, everything: bool) -> tuple[Tensor, list[Tensor]]:
            if begin == end:
                nothing = [torch.zeros_like(gates), *(torch.zeros_like(p) for p in parameters)]
                return leaving, nothing
            grads = grad_states[begin:end].clone()
            grads[-1] += leaving
            before = start if begin == 0 else states[begin - 1]
            mask = [True] * count + [everything and w for w in wanted]
            found = _backward(
                list(grads.unbind(1)), list(before.unbind()), [gates[begin:end]], parameters,
                list(states[begin:end].unbind(1)), walk.program, True, False, walk.algorithm, mask,
            )  # fmt: skip
            return torch.stack(found[:count]), found[count:]

        way = WayBack(len(gates), start, back)
        grad_start = run(walk.ranks, settle_back(walk.ranks, False, way, grad_end))
        grad_gates, *grad_parameters = way.gradients(1, wanted)
        return None, grad_gates, grad_start if needed[2] else None, *grad_parameters


def walk_pointwise(
    walk: PointwiseWalk, gates: Tensor, start: Tensor, parameters: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """A pointwise recurrence over the slices of all ranks.

    Args:
        gates: this rank's stacked input of weft::pointwise_scan.
        start: ``(states, B, H)``, on rank 0 the start of the whole, on the others a guess.

    Returns:
        The states of the slice, ``(T, states, B, H)``, and those at the end of the whole.
    """
    return _Slice.apply(walk, gates, start, *parameters)
