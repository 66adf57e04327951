"""linear_scan over slices.

A rank's slice does to the state that comes in what one map does, x -> product x + value. Ranks gather these maps, in
one collective, and each follows them from the first rank to itself. Backward, gradients of the state run through the
same products, transposed, so that only values are gathered. (Or in rounds: rounds.py.)

Let P, v be a rank's product and value, s the state that enters it, g the gradient of its x, and M the gradient of the
state that leaves it, which comes from the rank after it:

    lambda[t] = g[t] + A[t+1]^T lambda[t+1], with M added to g at the slice's last step,
    m = A[first]^T lambda[first] = P^T M + w, where w is m for M = 0,
    M of the rank before = m + the gradient of s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .._base.torch_private import is_eager
from .exchanging import run, run_together
from .group import Ranks, check_alike, check_order, check_tensor, checks_ranks, ranks_of
from .own_slice import Slice, applied, canonical, is_sliced_diagonal, is_varying
from .pairs import in_pairs
from .slice_scan import begun_and_finished, is_begun_and_finished, scan, scan_backward

__all__ = ["Scanned", "linear_scan", "scan_layer", "scan_slice"]

_linear_scan = torch.ops.weft.linear_scan.default


class Scanned(NamedTuple):
    """Of a slice: its states ``(T, B, H)``, the one before its first step and the one after the whole's last step,
    ``(B, H)``."""

    states: Tensor
    entered: Tensor
    end: Tensor


def linear_scan(
    A: Tensor,
    b: Tensor,
    x0: Tensor | None = None,
    *,
    group: Any = None,
    reverse: bool = False,
    transpose: bool = False,
) -> Tensor:
    """:func:`weft.scan.linear_scan` over the slices of all ranks: ``x[t] = A[t] @ x[t-1] + b[t]``.

    Args:
        A: this rank's slice, in a layout of :func:`weft.scan.linear_scan`; where it is constant in time, the same on
            every rank.
        b: this rank's slice ``(T, B, H)``. T may differ from rank to rank and be 0.
        x0: ``(B, H)`` or ``(H)``, the state before the first step of the whole, read on the first rank, with `reverse`
            on the last. None there is zeros, and ``A`` of the first step is then not used.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        reverse: ``x[t] = A[t] @ x[t+1] + b[t]`` instead.
        transpose: takes ``A[t].mT`` in the place of ``A[t]``.

    Returns:
        This rank's slice of x, ``(T, B, H)``.

    One collective forward, one backward, or ceil(log2 ranks) rounds of send and receive where :func:`exchange` finds
    them cheaper. What is exchanged, a product and a state, does not grow with T, and the host waits for nothing.
    Gradients of any order are scans over ranks themselves. Complex numbers are scanned as pairs, by matrices of 2 x 2
    where A is diagonal, which take twice its memory and are written out for every step where A is constant.
    Products that overflow or underflow where the states do not do no harm. But a slice is summed up in one map, in
    the digits of float64 (float32's where CUDA has chunk maps) and with a value of the state's own dtype, of
    bfloat16 in float32: where what the map makes of a state cancels against what it adds, digits are lost, which
    :func:`weft.scan.linear_scan` would save step by step.

    Raises:
        TypeError: an argument is no tensor, has another dtype, or dtypes differ; the group is none.
        ValueError: shapes do not fit; a mesh has several dimensions; slices are known to be heads and tails, inside of
            torch's context_parallel; with WEFT_CHECK_RANKS=1 also where ranks differ.
        RuntimeError: devices differ; torch.distributed is not initialised, this process is not in the group, or the
            group's backend does not take the tensors' device.
    """
    op = "linear_scan"
    ranks = ranks_of(op, group)
    check_tensor(op, "A", A)
    check_tensor(op, "b", b)
    if x0 is not None:
        check_tensor(op, "x0", x0)
    if torch.is_autocast_enabled(b.device.type):
        given = [t for t in (A, b, x0) if t is not None]
        dtype = given[0].dtype
        for t in given:
            dtype = torch.promote_types(dtype, t.dtype)
        A, b, x0 = A.to(dtype), b.to(dtype), None if x0 is None else x0.to(dtype)
        with torch.autocast(b.device.type, enabled=False):
            return _states(op, A, b, x0, ranks, reverse, transpose)
    return _states(op, A, b, x0, ranks, reverse, transpose)


def _states(op: str, A: Tensor, b: Tensor, x0: Tensor | None, ranks: Ranks, reverse: bool, transpose: bool) -> Tensor:
    if not A.is_complex() and not b.is_complex():
        return scan_slice(op, A, b, x0, ranks, reverse, transpose).states
    if checks_ranks():
        check_alike(ranks, op, _what_ranks_share(A, b))
    ranks.check_device(op, b)
    pairs = in_pairs(op, A, b, x0, reverse, transpose)
    return pairs.joined(scan_slice(op, pairs.A, pairs.b, pairs.x0, ranks, reverse).states, b)


def scan_slice(
    op: str,
    A: Tensor,
    b: Tensor,
    x0: Tensor | None,
    ranks: Ranks,
    reverse: bool = False,
    transpose: bool = False,
    ends: bool = False,
) -> Scanned:
    """:func:`linear_scan`, with the states at the slice's seam and at the end of the whole, which is differentiable
    with `ends`; outside of autocast."""
    dtype, part = b.dtype, Slice(ranks, reverse, transpose)
    A, b, x0 = _checked(op, A, b, x0, part)
    if is_eager(A, b) and not _has_gradient(A, b, x0) and is_begun_and_finished(A, b, ranks, ends):
        return Scanned(*run(ranks, begun_and_finished(A, b, x0, part))[:3])
    states, entered, end = _Scan.apply(A, b, x0, None, part, ends)
    return Scanned(states if b.dtype == dtype else states.to(dtype), entered, end)


def scan_layer(
    op: str, directions: Sequence[tuple[Tensor, Tensor, Tensor | None, bool]], ranks: Ranks
) -> list[Scanned]:
    """The scans of a layer's directions, each of A, b, x0 and whether it is the reverse one, whose ends are
    differentiable: while the exchange of one is on its way, the other goes on, forward and backward."""
    if len(directions) == 1 or not is_eager(*(t for A, b, _, _ in directions for t in (A, b))):
        return [scan_slice(op, A, b, x0, ranks, reverse, ends=True) for A, b, x0, reverse in directions]
    parts = tuple(Slice(ranks, reverse, False) for *_, reverse in directions)
    inputs = [_checked(op, A, b, x0, part) for (A, b, x0, _), part in zip(directions, parts, strict=True)]
    found = _Directions.apply(parts, *(t for own in inputs for t in own))
    results = (found[k : k + 3] for k in range(0, len(found), 3))
    return [
        Scanned(states.to(b.dtype), *seams) for (_, b, _, _), (states, *seams) in zip(directions, results, strict=True)
    ]


def _checked(op: str, A: Tensor, b: Tensor, x0: Tensor | None, part: Slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """What is scanned, in the dtype that it is scanned in."""
    ranks, reverse, transpose = part
    dtype = b.dtype
    check_order(op)
    if checks_ranks():
        check_alike(ranks, op, _what_ranks_share(A, b))
    ranks.check_device(op, b)
    if x0 is not None and part.order > 0 and b.dim() == 3:
        # The first rank alone reads it; all check it, because one that raises alone leaves the others waiting.
        _linear_scan(A[:0] if is_varying(A, b) else A, b[:0], x0.detach(), reverse=reverse, transpose=transpose)
        x0 = x0 if x0.requires_grad else None
    # Half precision carries a state in float32, from slice to slice, too. A slice of bfloat16, which has the range of
    # float32, is scanned and mended as it is: where nothing is forgotten, the state is rounded once for each rank.
    if dtype in (torch.float16, torch.bfloat16):
        for name, t in (("A", A), ("x0", x0)):
            if t is not None and t.dtype != dtype:
                raise TypeError(f"{op}: {name} must have the dtype of b, {dtype}, got {t.dtype}")
        if dtype == torch.float16 or not is_sliced_diagonal(A, b):
            A, b, x0 = A.float(), b.float(), None if x0 is None else x0.float()
    return A, b, x0


def _has_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _what_ranks_share(A: Tensor, b: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": b.dtype, "dimensions of b": b.dim()}
    if b.dim() == 3:
        T, B, H = b.shape
        diagonal = A.dim() < 4 and not (A.dim() == 3 and A.shape == (T, H, H) and A.shape != b.shape)
        shared = not diagonal and B != 1 and (A.dim() == 3 or A.size(1) != B)
        layout = "diagonal" if diagonal else "dense, shared by the batch" if shared else "dense"
        found |= {"B": B, "H": H, "layout": layout if H != 1 else "diagonal"}
    return found


class _Scan(torch.autograd.Function):
    """A, b, x0 and what is added to the state that leaves the slice -> the fields of Scanned."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, A: Tensor, b: Tensor, x0: Tensor | None, extra: Tensor | None, part: Slice, ends: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_eager(A, b):
            *scanned, products = run(part.ranks, scan(A, b, x0, extra, part, ends))
        else:
            *scanned, products = torch.ops.weft.slice_scan.default(
                A, b, x0, extra, part.ranks.name, part.reverse, part.transpose, ends
            )
        states, entered, end = scanned
        ctx.part, ctx.ends = part, ends
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(A, states, entered, products, x0)
        return states, entered, end

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor | None, grad_entered: Tensor | None, grad_end: Tensor | None) -> tuple:
        A, states, entered, products, x0 = ctx.saved_tensors
        part, wanted = ctx.part, ctx.needs_input_grad
        grads, eager = _gradients_that_came(states, entered, (grad, grad_entered, grad_end), ctx.ends)
        has_x0 = x0 is not None
        if torch.is_grad_enabled():
            found = _differentiable_gradients(*grads, A, states, entered, has_x0, part)
        elif eager:
            found = run(part.ranks, scan_backward(*grads, A, states, entered, products, has_x0, part, wanted[:2]))
        else:
            found = torch.ops.weft.slice_scan_backward.default(
                *grads, A, states, entered, products, has_x0, part.ranks.name, part.reverse, part.transpose, wanted[:2]
            )
        *grads, left = _wanted_gradients(found, x0, part, wanted)
        return *grads, left if wanted[3] else None, None, None


class _Directions(torch.autograd.Function):
    """A, b, x0 of several scans, whose ends are differentiable -> the fields of Scanned of each. While one exchanges,
    the others go on."""

    @staticmethod
    def forward(ctx: FunctionCtx, parts: tuple[Slice, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        inputs = [tensors[k : k + 3] for k in range(0, len(tensors), 3)]
        calls = [scan(A, b, x0, None, part, True) for part, (A, b, x0) in zip(parts, inputs, strict=True)]
        found = run_together(parts[0].ranks, calls)
        ctx.parts = parts
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *(
                t
                for (A, _, x0), (states, entered, _, products) in zip(inputs, found, strict=True)
                for t in (A, x0, states, entered, products)
            )
        )
        return tuple(t for scanned in found for t in scanned[:3])

    @staticmethod
    def backward(ctx: FunctionCtx, *came: Tensor | None) -> tuple:
        parts, saved = ctx.parts, ctx.saved_tensors
        calls, wanted, starts = [], [], []
        for number, part in enumerate(parts):
            A, x0, states, entered, products = saved[5 * number : 5 * number + 5]
            grads, _ = _gradients_that_came(states, entered, came[3 * number : 3 * number + 3], True)
            wanted.append(ctx.needs_input_grad[3 * number + 1 : 3 * number + 4])
            starts.append(x0)
            if torch.is_grad_enabled():
                calls.append(_differentiable_gradients(*grads, A, states, entered, x0 is not None, part))
            else:
                has_x0 = x0 is not None
                calls.append(scan_backward(*grads, A, states, entered, products, has_x0, part, wanted[-1][:2]))
        found = calls if torch.is_grad_enabled() else run_together(parts[0].ranks, calls)
        return None, *(
            grad
            for one, x0, part, want in zip(found, starts, parts, wanted, strict=True)
            for grad in _wanted_gradients(one, x0, part, want)[:3]
        )


def _gradients_that_came(
    states: Tensor, entered: Tensor, came: Sequence[Tensor | None], ends: bool
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], bool]:
    """Those of the fields of Scanned, as the backward pass takes them, and whether it runs without the op."""
    grad, grad_entered, grad_end = came
    if grad is None:
        grad = torch.zeros_like(states)
    if not ends:
        grad_end = None
    elif grad_end is None:
        grad_end = torch.zeros_like(entered)
    eager = is_eager(states, grad)
    if grad_entered is None and (torch.is_grad_enabled() or not eager):
        grad_entered = torch.zeros_like(entered)
    return (grad, grad_entered, grad_end), eager


def _wanted_gradients(
    found: Sequence[Tensor | None], x0: Tensor | None, part: Slice, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of A, b and x0, None where not `wanted`, and of the state that leaves the slice."""
    grad_A, grad_b, grad_start, left = found
    grad_x0 = None
    if wanted[2]:
        grad_x0 = grad_start.sum_to_size(x0.shape) if part.order == 0 else torch.zeros_like(x0)
        if part.order > 0 and torch.is_grad_enabled():
            grad_x0 = grad_x0 + grad_start[:0].sum()  # of nothing: this rank joins in what follows from it, too
    return grad_A if wanted[0] else None, grad_b if wanted[1] else None, grad_x0, left


def _differentiable_gradients(
    grad: Tensor, grad_entered: Tensor, grad_end: Tensor | None, A: Tensor, states: Tensor, entered: Tensor,
    has_x0: bool, part: Slice,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same as slice_scan_backward's by a scan over ranks that runs the other way, of
    m[t] = A[t]^T (g[t] + m[t+1]), so that it has gradients itself."""
    T, reverse = grad.size(0), part.reverse
    if grad.dtype == torch.bfloat16:
        grad, A, states = grad.float(), A.float(), states.float()
    matrices, diagonal = canonical(A, grad)
    if diagonal:
        matrices = matrices.expand(grad.shape)
    if part.order == 0 and not has_x0:  # the first step's A is not looked at
        step = torch.arange(T, device=A.device) == (T - 1 if reverse else 0)
        matrices = torch.where(step.view(-1, *(1,) * (matrices.dim() - 1)), 0.0, matrices)
    turned = matrices if diagonal or part.transpose else matrices.mT
    b = turned * grad if diagonal else applied(turned, grad)
    start = None if grad_end is None else _SumOverRanks.apply(grad_end, part.ranks)
    moved, left, _ = _Scan.apply(matrices, b, start, grad_entered, part.turned(), False)
    if T == 0:
        # Of nothing, and yet of the scan: this rank joins in what follows from it, too.
        return A * 0 + moved.sum(), grad + moved, left + grad_entered, left
    row, before = left.unsqueeze(0), entered.unsqueeze(0)
    lambdas = grad + torch.cat((row, moved[:-1]) if reverse else (moved[1:], row))
    before = torch.cat((states[1:], before) if reverse else (before, states[:-1]))
    if diagonal:
        grad_A = lambdas * before
        if A.dim() == 4:
            grad_A = grad_A.unsqueeze(-1)
        grad_A = grad_A.sum_to_size(A.shape)
    else:
        rows, columns = (before, lambdas) if part.transpose else (lambdas, before)
        grad_A = (rows.unsqueeze(-1) * columns.unsqueeze(-2)).sum_to_size(matrices.shape).view(A.shape)
    return grad_A, lambdas, moved[T - 1 if reverse else 0] + grad_entered, left


class _SumOverRanks(torch.autograd.Function):
    """The sum of every rank's tensor, on every rank, in order of rank; its own gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(x).sum(0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple:
        return _SumOverRanks.apply(grad, ctx.ranks), None
