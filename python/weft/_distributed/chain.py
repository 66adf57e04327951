"""chain_backward over ranks, each with consecutive Jacobians of one chain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .group import Ranks, check_alike, check_tensor, ranks_of
from .totals import columns_of, multiplied

__all__ = ["chain_backward"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SCHEDULES = ("auto", "linear", "blelloch")
_local = torch.ops.weft.chain_backward.default


@dataclass(frozen=True)
class _Chain:
    """What every rank knows of the chain."""

    ranks: Ranks
    schedule: str
    batch: int
    widths: tuple[int, ...]
    """Of the gradient that enters each rank, and of the one that leaves the last."""
    dtype: torch.dtype


def chain_backward(
    grad: Tensor | None, jacobians: Sequence[Tensor], *, group: Any = None, schedule: str = "auto"
) -> list[Tensor]:
    """:func:`weft.scan.chain_backward` of a chain whose Jacobians lie on several ranks.

    Args:
        grad: ``(B, n_0)`` or ``(n_0,)``, the gradient of the loss by the chain's output, read on the first rank.
        jacobians: this rank's transposed Jacobians, dense, ``(B, n_k, n_{k-1})`` or ``(n_k, n_{k-1})``: the first rank
            has those next to the loss, each other rank those that follow. There may be none.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        schedule: "linear" hands the gradient from rank to rank, in as many rounds as there are ranks less one;
            "blelloch" multiplies each rank's Jacobians, scans the products over ranks in ceil(log2 ranks) rounds and
            replays its own, which costs as many products of matrix and vector as the gradient has elements, and is
            there for comparison. "auto", the default, is "linear".

    Returns:
        This rank's gradients: the one that enters, then one after each Jacobian. Their derivatives are those of the
        linear products; second ones are refused.

    Sizes are exchanged first, for which the host waits. With "blelloch", products carry exponents of their own, but are
    taken as they are where they cancel.

    Raises:
        TypeError: grad or a Jacobian is no tensor or not dense, or dtypes differ; the group or schedule is none.
        ValueError: a Jacobian does not chain; an unknown schedule; a mesh has several dimensions.
        RuntimeError: torch.distributed is not initialised, this process is not in the group, or the group's backend
            does not take the tensors' device.

    Source: BPPSA, section 3, MLSys 2020, across devices.
    """
    op = "chain_backward"
    ranks = ranks_of(op, group)
    if not isinstance(schedule, str):
        raise TypeError(f"{op}: schedule must be a str, got {type(schedule).__name__}")
    if schedule not in _SCHEDULES:
        raise ValueError(f'{op}: schedule must be "auto", "linear" or "blelloch", got {schedule!r}')
    if isinstance(jacobians, Tensor) or not isinstance(jacobians, Iterable):
        raise TypeError(f"{op}: jacobians must be a list of Tensors, got {type(jacobians).__name__}")
    jacobians = list(jacobians)
    for position, J in enumerate(jacobians):
        check_tensor(op, f"jacobians[{position}]", J)
        if J.layout != torch.strided:
            raise TypeError(f"{op}: jacobians[{position}] must be dense, got {J.layout}")
        if J.dim() not in (2, 3):
            raise ValueError(
                f"{op}: jacobians[{position}] must be (B, n_in, n_out) or (n_in, n_out), got {(*J.shape,)}"
            )
    if ranks.rank == 0:
        check_tensor(op, "grad", grad)
    elif not isinstance(grad, Tensor) or not grad.requires_grad:
        grad = None
    given = [t for t in (grad if ranks.rank == 0 else None, *jacobians) if t is not None]
    check_alike(ranks, op, {"schedule": schedule} | ({"dtype": given[0].dtype} if given else {}))
    for t in given:
        ranks.check_device(op, t)
    device = given[0].device if given else ranks.device
    chain, batched, trains = _meet(op, ranks, schedule, grad if ranks.rank == 0 else None, jacobians, device)
    if trains and not any(t.requires_grad for t in (grad, *jacobians) if t is not None):
        # Joins in the backward pass all the same.
        grad = (grad.detach() if ranks.rank == 0 else torch.zeros(0, device=device)).requires_grad_()
    gradients = _Chained.apply(chain, device, grad, *jacobians)
    return [g if batched else g.squeeze(0) for g in gradients]


def _meet(
    op: str, ranks: Ranks, schedule: str, grad: Tensor | None, jacobians: list[Tensor], device: torch.device
) -> tuple[_Chain, bool, bool]:
    """What all need to know, compared; whether there is a batch, and whether any rank needs derivatives."""
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (grad, *jacobians) if t is not None)
    batches = [J.size(0) for J in jacobians if J.dim() == 3]
    if grad is not None and grad.dim() == 2:
        batches.append(grad.size(0))
    given = [t for t in (grad, *jacobians) if t is not None]
    known = [_DTYPES.index(t.dtype) if t.dtype in _DTYPES else -1 for t in given]
    broken = next((k for k in range(1, len(jacobians)) if jacobians[k].size(-1) != jacobians[k - 1].size(-2)), -1)
    mine = [
        grad.dim() if grad is not None else 0,
        max(batches, default=-1),
        min(batches, default=-1),
        grad.size(-1) if grad is not None and grad.dim() > 0 else -1,
        jacobians[0].size(-1) if jacobians else -1,
        jacobians[-1].size(-2) if jacobians else -1,
        max(known, default=-2),
        min(known, default=-2),
        int(trains),
        broken,
    ]
    # Compared by all, so that all refuse.
    told = ranks.gather(torch.tensor(mine, device=device)).tolist()
    dimensions, dtype = told[0][0], told[0][6]
    if dimensions not in (1, 2):
        raise ValueError(f"{op}: grad must be (B, n), or (n) without a batch, got {dimensions} dimensions")
    batch = told[0][1] if dimensions == 2 else 1
    width, widths = told[0][3], []
    for rank, (_, most, least, _, enters, leaves, highest, lowest, _, at) in enumerate(told):
        if highest != -2 and (lowest == -1 or highest != dtype or lowest != dtype):
            raise TypeError(f"{op}: the tensors of rank {rank} must be floating, of the dtype of grad on rank 0")
        if most != -1 and (dimensions == 1 or most != batch or least != batch):
            raise ValueError(f"{op}: the jacobians of rank {rank} must have grad's batch, {batch}, got {most}")
        if at != -1:
            raise ValueError(f"{op}: jacobians[{at}] of rank {rank} does not chain with the one before it")
        if enters not in (-1, width):
            raise ValueError(
                f"{op}: jacobians[0] of rank {rank} does not chain: its last dimension must be {width}, the length of "
                f"the gradient that reaches it, got {enters}"
            )
        widths.append(width)
        width = leaves if enters != -1 else width
    return (
        _Chain(ranks, schedule, batch, (*widths, width), _DTYPES[dtype]),
        dimensions == 2,
        any(row[8] for row in told),
    )


class _Chained(torch.autograd.Function):
    """grad on rank 0 and jacobians -> all gradients of this rank, (B, n)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, chain: _Chain, device: torch.device, grad: Tensor | None, *jacobians: Tensor
    ) -> tuple[Tensor, ...]:
        rank, wide = chain.ranks.rank, torch.float64 if chain.dtype == torch.float64 else torch.float32
        matrices = [J.to(wide) for J in jacobians]
        entering = torch.zeros(chain.batch, chain.widths[rank], device=device, dtype=wide)
        if rank == 0:
            entering = grad.to(wide).view(chain.batch, -1)
        if chain.schedule == "blelloch":
            entering = _through_products(chain, entering, matrices)
            gradients = [entering, *_local(entering, matrices, 0)]
        else:
            gradients = [entering]
            for step in range(chain.ranks.size):
                if step == rank:
                    gradients = [entering, *_local(entering, matrices, 0 if chain.schedule == "linear" else -1)]
                if step + 1 < chain.ranks.size:
                    came = _handed(chain, gradients[-1], step, chain.widths[step + 1])
                    entering = came if step + 1 == rank else entering
        ctx.chain = chain
        ctx.save_for_backward(entering, *jacobians)
        ctx.like = None if grad is None else grad.detach()
        return tuple(g.to(chain.dtype, copy=True) for g in gradients)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple:
        chain, (entering, *jacobians) = ctx.chain, ctx.saved_tensors
        rank, wanted = chain.ranks.rank, ctx.needs_input_grad[2:]
        outgoing = [g.to(entering.dtype) for g in grads]
        found: list[Tensor] = [torch.zeros_like(entering)]
        for step in reversed(range(chain.ranks.size)):
            if step == rank:
                with torch.enable_grad():
                    leaves = [t.detach().requires_grad_() for t in (entering, *jacobians)]
                    # Not of the leaf itself, which would have no graph.
                    first = leaves[0] * 1
                    results = [first, *_local(first, [J.to(entering.dtype) for J in leaves[1:]], 0)]
                found = list(torch.autograd.grad(results, leaves, outgoing))
            if step > 0:
                came = _handed(chain, found[0], step, chain.widths[step])
                if step - 1 == rank:
                    outgoing[-1] = outgoing[-1] + came
        grad = ctx.like
        if grad is not None:
            grad = found[0].to(grad.dtype).view(grad.shape) if rank == 0 else torch.zeros_like(grad)
        return None, None, *(g if w else None for g, w in zip((grad, *found[1:]), wanted, strict=True))


def _handed(chain: _Chain, x: Tensor, source: int, width: int) -> Tensor:
    """x (B, width) of one rank, on every rank."""
    sent = x if chain.ranks.rank == source else x.new_zeros(chain.batch, width)
    return chain.ranks.gather(sent.contiguous())[source]


def _through_products(chain: _Chain, entering: Tensor, matrices: list[Tensor]) -> Tensor:
    """The gradient that enters this rank. Every rank multiplies what it has, the first one with the gradient, and the
    products are scanned in ceil(log2 ranks) rounds: in each a rank sends what the ranks so far come to, the `reach` up
    to itself, to the one `reach` further on."""
    ranks, widths, most = chain.ranks, chain.widths, max(chain.widths)
    rank = ranks.rank
    # A gradient is a matrix of one column.
    start = entering.unsqueeze(-1) if rank == 0 else torch.eye(widths[rank], device=entering.device).unsqueeze(0)
    own = columns_of(start.double())
    for J in matrices:
        product, more = columns_of(J.double() @ own[0])
        own = product, own[1] + more
    before: tuple[Tensor, Tensor] | None = None
    reach = 1
    while reach < ranks.size:
        product, exponents = own if before is None else multiplied(*own, *before)
        message = entering.new_zeros(chain.batch, most + 1, most, dtype=torch.float64)
        message[:, : product.size(-2), : product.size(-1)] = product
        message[:, most, : product.size(-1)] = exponents.squeeze(-2).double()
        came = ranks.shift(message, reach)
        if came is not None:
            sender = rank - reach
            first = max(sender - reach + 1, 0)
            rows, columns = widths[sender + 1], 1 if first == 0 else widths[first]
            further = came[:, :rows, :columns], came[:, most:, :columns].long()
            before = further if before is None else multiplied(*before, *further)
        reach *= 2
    if before is None:
        return entering
    vector, scale = before
    return torch.ldexp(vector, scale.clamp(-1000, 1000)).squeeze(-1).to(entering.dtype)
