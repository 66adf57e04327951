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
from .._scan import slice_chunks
from .group import Ranks, check_alike, check_tensor, checks_ranks, ranks_named, ranks_of
from .own_slice import (
    BackwardHalves,
    Slice,
    applied,
    canonical,
    end_in_float,
    end_of,
    fits_halves,
    is_sliced_diagonal,
    is_varying,
    mend,
    mend_gradients,
    product_of_slice,
    product_shape,
    sent_bytes,
    start_gradient_in_float,
)
from .pairs import in_pairs
from .rounds import SliceMap, carried, in_rounds
from .totals import unpack

__all__ = ["Scanned", "linear_scan", "scan_slice"]

_linear_scan = torch.ops.weft.linear_scan.default
_gradients = torch.ops.weft.linear_scan_backward.default
_begin = torch.ops.weft.slice_begin.default
_finish = torch.ops.weft.slice_finish_.default
_begin_gradients = torch.ops.weft.slice_begin_gradients.default
_finish_gradients = torch.ops.weft.slice_finish_gradients_.default

_FIRST_IN_HALVES = True
"""Whether the first rank's dense scans are cut, too: it then tells the others its value, and comes to what they tell
it, half a scan earlier."""


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
        ValueError: shapes do not fit; a mesh has several dimensions; with WEFT_CHECK_RANKS=1 also where ranks differ.
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
    dtype = b.dtype
    if checks_ranks():
        check_alike(ranks, op, _what_ranks_share(A, b))
    ranks.check_device(op, b)
    part = Slice(ranks, reverse, transpose)
    if part.order > 0 and x0 is not None and b.dim() == 3:
        # The first rank alone reads it; all check it, because one that raises alone leaves the others waiting.
        _linear_scan(A[:0] if is_varying(A, b) else A, b[:0], x0.detach(), reverse=reverse, transpose=transpose)
        x0 = x0 if x0.requires_grad else None
    if is_eager(A, b) and not _has_gradient(A, b, x0) and _is_begun_and_finished(A, b, ranks, ends):
        return Scanned(*_begun_and_finished(A, b, x0, part)[:3])
    # Half precision carries a state in float32, from slice to slice, too. A slice of bfloat16, which has the range of
    # float32, is scanned and mended as it is: where nothing is forgotten, the state is rounded once for each rank.
    if dtype in (torch.float16, torch.bfloat16):
        for name, t in (("A", A), ("x0", x0)):
            if t is not None and t.dtype != dtype:
                raise TypeError(f"{op}: {name} must have the dtype of b, {dtype}, got {t.dtype}")
        if dtype == torch.float16 or not is_sliced_diagonal(A, b):
            A, b, x0 = A.float(), b.float(), None if x0 is None else x0.float()
    states, entered, end = _Scan.apply(A, b, x0, None, part, ends)
    return Scanned(states if b.dtype == dtype else states.to(dtype), entered, end)


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


def _is_begun_and_finished(A: Tensor, b: Tensor, ranks: Ranks, ends: bool) -> bool:
    """Whether there is one op before the exchange and one after it: of diagonals, gathered at once."""
    if not (is_sliced_diagonal(A, b) and A.dtype == b.dtype and b.dtype in (torch.float32, torch.float64)):
        return False
    T, B, H = b.shape
    return T * B * H > 0 and (ends or not in_rounds(ranks, (2 * B * H + 1) * b.element_size()))


def _begun_and_finished(A: Tensor, b: Tensor, x0: Tensor | None, part: Slice) -> tuple[Tensor, ...]:
    order = part.order
    start = x0 if order == 0 else None
    states, message = _begin(A, b, start, order == 0, part.reverse)
    entered, end, products = _finish(states, A, part.ranks.gather(message), order, part.reverse)
    if start is not None:
        entered = start.expand(entered.shape).to(entered.dtype, copy=True)
    return states, entered, end, products


def _begun_and_finished_gradients(
    grad: Tensor, grad_entered: Tensor | None, grad_end: Tensor | None, A: Tensor, states: Tensor, entered: Tensor,
    products: Tensor, has_x0: bool, part: Slice, of_A: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of A, empty but with `of_A`, of b, of the state that enters, which the first rank alone has, and of the
    one that leaves."""
    order, reverse = part.order, part.reverse
    first = order == 0
    start = entered if has_x0 or not first else None
    grad_A, grad_b, message = _begin_gradients(grad, grad_entered, grad_end, A, states, start, first, reverse, of_A)
    left = _finish_gradients(
        grad_b, grad_A if of_A else None, A, states, start, part.ranks.gather(message), products, order, reverse
    )
    grad_start = None
    if first and has_x0:
        step = -1 if reverse else 0
        grad_start = A[step] * grad_b[step]
        grad_start = grad_start if grad_entered is None else grad_start + grad_entered
    return grad_A, grad_b, grad_start, left


def _scan(
    A: Tensor, b: Tensor, x0: Tensor | None, extra: Tensor | None, part: Slice, ends: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of Scanned, the end right with `ends` alone, and the products of all ranks in the order of the
    scan; after an exchange in rounds this rank's."""
    if extra is None and _is_begun_and_finished(A, b, part.ranks, ends):
        return _begun_and_finished(A, b, x0, part)
    ranks, reverse, transpose = part
    order = part.order
    first = order == 0
    start = x0 if first else None
    T, B, H = b.shape
    sliced = is_sliced_diagonal(A, b)
    halves = (_FIRST_IN_HALVES or not first) and extra is None and fits_halves(A, b)
    shape = product_shape(A, b)
    if halves:
        matrices, chunks = canonical(A, b)[0], slice_chunks(b.device, T, B, H)
        row = None if start is None else start.expand(B, H).contiguous()
        maps, value, message = torch.ops.weft.slice_maps.default(
            matrices, b, row, chunks, reverse, transpose, not first
        )
        if first:
            product = product_of_slice(A, b, part)
            message = torch.cat((product.flatten(), value.view(product.dtype).flatten(), product.new_ones(1)))
        states = torch.empty_like(b, memory_format=torch.contiguous_format)
    else:
        states = _linear_scan(A, b, start, reverse=reverse, transpose=transpose)
        if T > 0:
            value = states[end_of(states, reverse)]
        else:
            value = b.new_zeros(B, H) if start is None else start.expand(B, H)
        if b.dtype == torch.bfloat16:
            value = end_in_float(A, b, states, start, reverse) if T > 0 else value.float()
        if extra is not None:
            value = value + extra
        leaves = T > 0 or start is not None or extra is not None
        if sliced:  # no one asks for the first rank's product
            message = torch.ops.weft.slice_message.default(A[:0] if first else A, value, leaves)
        else:
            product = product_of_slice(A, b, part)
            has = product.new_full((1,), leaves)
            message = torch.cat((product.flatten(), value.contiguous().view(product.dtype).flatten(), has))
    if not ends and in_rounds(ranks, message.numel() * message.element_size()):
        count = message.numel() - 1 - value.numel()
        own = SliceMap(unpack(message[:count], value.dtype).view(shape), value.double(), message[-1] > 0)
        before = carried(ranks, own, value.dtype, reverse)
        products = torch.where(before.leaves, own.product, 0.0).unsqueeze(0)
        entered, came = before.value.to(value.dtype), before.leaves.to(torch.int32).view(1)
        end = value.clone()  # which nobody has asked for
    else:
        # The product of a rank to which nothing comes may be one of numbers that nobody may look at.
        entered, end, products, came = torch.ops.weft.slice_states.default(
            ranks.gather(message), value, order, reverse, shape[0] if len(shape) == 3 else 0
        )
    if first:
        entered = torch.zeros_like(value) if start is None else start.expand(B, H).to(value.dtype, copy=True)
        came = came if start is None else None
    if halves:
        torch.ops.weft.slice_replay_.default(states, matrices, b, maps, entered, came, chunks, reverse, transpose)
    elif first:
        pass  # it is done
    elif sliced:
        torch.ops.weft.slice_mend_.default(states, A, entered, came, reverse)
    elif b.device.type == "cpu":
        if came:
            mend(states, A, b, entered, reverse, transpose)
    else:  # how far is known to the device alone; where nothing comes in, nobody may look at the first A
        again = _linear_scan(A, b, entered, reverse=reverse, transpose=transpose)
        states = torch.where(came.bool().view(1, 1, 1), again, states)
    return states, entered, end, products


@torch.library.impl("weft::slice_scan", "CompositeExplicitAutograd")
def _(A, b, x0, extra, group, reverse, transpose, ends):
    return _scan(A, b, x0, extra, Slice(ranks_named(group), reverse, transpose), ends)


def _scan_backward(
    grad: Tensor, grad_entered: Tensor | None, grad_end: Tensor | None, A: Tensor, states: Tensor, entered: Tensor,
    products: Tensor, has_x0: bool, part: Slice, output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of A, b, the state that enters the slice, None for zeros, and the one that leaves it; ``(0)`` where
    masked out."""
    if products.size(0) == part.ranks.size and _is_begun_and_finished(A, grad, part.ranks, True):
        grad_A, grad_b, grad_start, left = _begun_and_finished_gradients(
            grad, grad_entered, grad_end, A, states, entered, products, has_x0, part, output_mask[0]
        )
        return grad_A, grad_b if output_mask[1] else grad.new_empty(0), grad_start, left
    if grad_entered is None:
        grad_entered = torch.zeros_like(entered)
    ranks, reverse, transpose = part
    order = part.order
    first, T = order == 0, grad.size(0)
    sliced = T > 0 and is_sliced_diagonal(A, grad)
    # Gradients of every step from no gradient of the state that leaves, mended once that is there; on CUDA how far is
    # known to the device alone, and there is a kernel of diagonals.
    cut = (_FIRST_IN_HALVES or not first) and BackwardHalves.fit(A, grad)
    halves = BackwardHalves(grad, A, reverse, transpose) if cut else None
    mends = sliced or (T > 0 and grad.device.type == "cpu" and is_varying(A, grad))
    start = entered if has_x0 or not first else None
    value = grad_entered
    if halves is not None:
        grad_start = None if first else halves.grad_start()
    elif mends:
        before = None if start is None else start.to(grad.dtype)
        grad_A, grad_b, grad_start = _gradients(
            grad, A, states, before, reverse, transpose, [output_mask[0], True, start is not None]
        )
        if grad.dtype == torch.bfloat16 and not first:
            grad_start = start_gradient_in_float(grad, A, grad_b, entered, reverse)
    elif T > 0 and not first:
        grad_start = _gradients(grad, A, None, entered, reverse, transpose, [False, False, True])[2]
    if T > 0 and not first:
        value = value + grad_start
    if products.size(0) < ranks.size:  # in rounds, from the last rank to the first
        product = products[0] if products.dim() == 3 else products[0].mT
        own = SliceMap(product, value.double(), torch.ones((), dtype=torch.bool, device=grad.device))
        left = carried(ranks, own, value.dtype, not reverse).value.to(value.dtype)
    else:
        message = value.unsqueeze(0) if grad_end is None else torch.stack((value, grad_end))
        gathered = ranks.gather(message)
        left = torch.ops.weft.slice_left.default(
            gathered.squeeze(1) if grad_end is None else gathered, products, order, reverse
        )
    nothing = grad.new_empty(0)
    if T == 0:
        grad_A = torch.zeros_like(A) if output_mask[0] else nothing
        grad_b = torch.zeros_like(grad) if output_mask[1] else nothing
        return grad_A, grad_b, left + grad_entered, left
    if halves is not None:
        grad_A, grad_b = halves.gradients(left, states, start, output_mask[0])
        grad_start = halves.of_start(grad_b) + grad_entered if first and has_x0 else torch.zeros_like(left)
        return grad_A, grad_b if output_mask[1] else nothing, grad_start, left
    if sliced:
        mended_A = grad_A if output_mask[0] else None
        torch.ops.weft.slice_mend_gradients_.default(grad_b, mended_A, A, states, start, left, reverse)
        step = -1 if reverse else 0
        if first and has_x0:
            grad_start = A[step].to(left.dtype) * grad_b[step].to(left.dtype) + grad_entered
        else:
            grad_start = torch.zeros_like(left)
        return grad_A if output_mask[0] else nothing, grad_b if output_mask[1] else nothing, grad_start, left
    if mends:
        mended_A = grad_A if output_mask[0] else None
        found = mend_gradients(grad, A, states, start, left, reverse, transpose, mended_A, grad_b)
        grad_start = grad_start if found is None else found
        grad_start = grad_start + grad_entered if first and has_x0 else torch.zeros_like(left)
        return grad_A if output_mask[0] else nothing, grad_b if output_mask[1] else nothing, grad_start, left
    grad = grad.clone()
    grad[end_of(grad, reverse)] += left
    mask = [*output_mask, first and has_x0]
    grad_A, grad_b, grad_start = _gradients(grad, A, states, start, reverse, transpose, mask)
    grad_A, grad_b = (g if wanted else nothing for g, wanted in zip((grad_A, grad_b), output_mask, strict=True))
    return grad_A, grad_b, grad_start + grad_entered if mask[2] else torch.zeros_like(left), left


@torch.library.impl("weft::slice_scan_backward", "CompositeExplicitAutograd")
def _(grad, grad_entered, grad_end, A, x, entered, products, has_x0, group, reverse, transpose, output_mask):
    part = Slice(ranks_named(group), reverse, transpose)
    *grads, grad_start, left = _scan_backward(
        grad, grad_entered, grad_end, A, x, entered, products, has_x0, part, output_mask
    )
    return *grads, torch.zeros_like(left) if grad_start is None else grad_start, left


@torch.library.register_fake("weft::slice_scan")
def _slice_scan_fake(A, b, x0, extra, group, reverse, transpose, ends):
    ranks, product = ranks_named(group), product_shape(A, b)
    row = b.new_empty(b.shape[1:], dtype=torch.float32 if b.dtype == torch.bfloat16 else None)
    states = torch.empty_like(b, memory_format=torch.contiguous_format)
    rounds = not ends and in_rounds(ranks, sent_bytes(A, b))
    products = b.new_empty(1 if rounds else ranks.size, *product, dtype=torch.float64)
    return states, row, torch.empty_like(row), products


@torch.library.register_fake("weft::slice_scan_backward")
def _slice_scan_backward_fake(
    grad, grad_entered, grad_end, A, states, entered, products, has_x0, group, reverse, transpose, output_mask
):
    nothing = grad.new_empty(0)
    grad_A = torch.empty_like(A, memory_format=torch.contiguous_format) if output_mask[0] else nothing
    grad_b = torch.empty_like(grad, memory_format=torch.contiguous_format) if output_mask[1] else nothing
    return grad_A, grad_b, torch.empty_like(entered), torch.empty_like(entered)


for _op in ("slice_scan", "slice_scan_backward"):
    # Every rank takes part, also where a graph does not need what comes back.
    torch.fx.node.has_side_effect(getattr(torch.ops.weft, _op).default)


class _Scan(torch.autograd.Function):
    """A, b, x0 and what is added to the state that leaves the slice -> the fields of Scanned."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, A: Tensor, b: Tensor, x0: Tensor | None, extra: Tensor | None, part: Slice, ends: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_eager(A, b):
            *scanned, products = _scan(A, b, x0, extra, part, ends)
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
        if grad is None:
            grad = torch.zeros_like(states)
        if not ctx.ends:
            grad_end = None
        elif grad_end is None:
            grad_end = torch.zeros_like(entered)
        has_x0, eager = x0 is not None, is_eager(A, grad)
        if grad_entered is None and (torch.is_grad_enabled() or not eager):
            grad_entered = torch.zeros_like(entered)
        if torch.is_grad_enabled():
            found = _differentiable_gradients(grad, grad_entered, grad_end, A, states, entered, has_x0, part)
        elif eager:
            found = _scan_backward(
                grad, grad_entered, grad_end, A, states, entered, products, has_x0, part, wanted[:2]
            )  # fmt: skip
        else:
            found = torch.ops.weft.slice_scan_backward.default(
                grad, grad_entered, grad_end, A, states, entered, products, has_x0, part.ranks.name, part.reverse,
                part.transpose, wanted[:2],
            )  # fmt: skip
        grad_A, grad_b, grad_start, left = found
        grad_x0 = None
        if wanted[2]:
            grad_x0 = grad_start.sum_to_size(x0.shape) if part.order == 0 else torch.zeros_like(x0)
            if part.order > 0 and torch.is_grad_enabled():
                grad_x0 = grad_x0 + grad_start[:0].sum()  # of nothing: this rank joins in what follows from it, too
        grads = (grad_A, grad_b, grad_x0, left)
        return (*(g if w else None for g, w in zip(grads, wanted, strict=False)), None, None)


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
