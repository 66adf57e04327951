"""One rank's part of a scan over slices, up to the exchange and from it on: calls that exchange, and the ops made of
them. scan.py says what is exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._scan import slice_chunks
from .exchanging import Exchanging, run
from .group import Ranks, ranks_named
from .own_slice import (
    BackwardHalves,
    Slice,
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
from .rounds import SliceMap, carried, in_rounds
from .totals import unpack

__all__ = ["begun_and_finished", "is_begun_and_finished", "scan", "scan_backward"]

_linear_scan = torch.ops.weft.linear_scan.default
_gradients = torch.ops.weft.linear_scan_backward.default
_begin = torch.ops.weft.slice_begin.default
_finish = torch.ops.weft.slice_finish_.default
_begin_gradients = torch.ops.weft.slice_begin_gradients.default
_finish_gradients = torch.ops.weft.slice_finish_gradients_.default

_FIRST_IN_HALVES = True
"""Whether the first rank's dense scans are cut, too: it then tells the others its value, and comes to what they tell
it, half a scan earlier."""

Scan = tuple[Tensor, Tensor, Tensor, Tensor]
"""States of the slice, the one before its first step, the one after the whole's last, and products of all ranks."""
Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor]


def is_begun_and_finished(A: Tensor, b: Tensor, ranks: Ranks, ends: bool) -> bool:
    """Whether there is one op before the exchange and one after it: of diagonals, gathered at once."""
    if not (is_sliced_diagonal(A, b) and A.dtype == b.dtype and b.dtype in (torch.float32, torch.float64)):
        return False
    T, B, H = b.shape
    return T * B * H > 0 and (ends or not in_rounds(ranks, (2 * B * H + 1) * b.element_size()))


def begun_and_finished(A: Tensor, b: Tensor, x0: Tensor | None, part: Slice) -> Exchanging[Scan]:
    order = part.order
    start = x0 if order == 0 else None
    states, message = _begin(A, b, start, order == 0, part.reverse)
    entered, end, products = _finish(states, A, (yield message), order, part.reverse)
    if start is not None:
        entered = start.expand(entered.shape).to(entered.dtype, copy=True)
    return states, entered, end, products


def _begun_and_finished_gradients(
    grad: Tensor, grad_entered: Tensor | None, grad_end: Tensor | None, A: Tensor, states: Tensor, entered: Tensor,
    products: Tensor, has_x0: bool, part: Slice, of_A: bool,
) -> Exchanging[Gradients]:  # fmt: skip
    """Gradients of A, empty but with `of_A`, of b, of the state that enters, which the first rank alone has, and of the
    one that leaves."""
    order, reverse = part.order, part.reverse
    first = order == 0
    start = entered if has_x0 or not first else None
    grad_A, grad_b, message = _begin_gradients(grad, grad_entered, grad_end, A, states, start, first, reverse, of_A)
    left = _finish_gradients(
        grad_b, grad_A if of_A else None, A, states, start, (yield message), products, order, reverse
    )
    grad_start = None
    if first and has_x0:
        step = -1 if reverse else 0
        grad_start = A[step] * grad_b[step]
        grad_start = grad_start if grad_entered is None else grad_start + grad_entered
    return grad_A, grad_b, grad_start, left


def scan(A: Tensor, b: Tensor, x0: Tensor | None, extra: Tensor | None, part: Slice, ends: bool) -> Exchanging[Scan]:
    """The fields of Scanned, the end right with `ends` alone, and the products of all ranks in the order of the
    scan; after an exchange in rounds this rank's."""
    if extra is None and is_begun_and_finished(A, b, part.ranks, ends):
        return (yield from begun_and_finished(A, b, x0, part))
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
            (yield message), value, order, reverse, shape[0] if len(shape) == 3 else 0
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
    part = Slice(ranks_named(group), reverse, transpose)
    return run(part.ranks, scan(A, b, x0, extra, part, ends))


def scan_backward(
    grad: Tensor, grad_entered: Tensor | None, grad_end: Tensor | None, A: Tensor, states: Tensor, entered: Tensor,
    products: Tensor, has_x0: bool, part: Slice, output_mask: Sequence[bool],
) -> Exchanging[Gradients]:  # fmt: skip
    """Gradients of A, b, the state that enters the slice, None for zeros, and the one that leaves it; ``(0)`` where
    masked out."""
    if products.size(0) == part.ranks.size and is_begun_and_finished(A, grad, part.ranks, True):
        grad_A, grad_b, grad_start, left = yield from _begun_and_finished_gradients(
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
        gathered = yield message
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
    *grads, grad_start, left = run(
        part.ranks,
        scan_backward(grad, grad_entered, grad_end, A, x, entered, products, has_x0, part, output_mask),
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
