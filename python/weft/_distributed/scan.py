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

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .._base.torch_private import is_eager
from .._scan import slice_chunks
from .group import Ranks, check_alike, check_tensor, checks_ranks, ranks_named, ranks_of
from .halves import halved
from .rounds import SliceMap, carried, in_rounds
from .totals import pack, product_of_steps, unpack

__all__ = ["Scanned", "linear_scan", "scan_slice", "sent_bytes"]

_linear_scan = torch.ops.weft.linear_scan.default
_gradients = torch.ops.weft.linear_scan_backward.default
_begin = torch.ops.weft.slice_begin.default
_finish = torch.ops.weft.slice_finish_.default
_begin_gradients = torch.ops.weft.slice_begin_gradients.default
_finish_gradients = torch.ops.weft.slice_finish_gradients_.default

_FIRST_BLOCK = 64
"""Steps that are scanned again before states are compared; each next block is twice as long."""
_EDGE = 64
"""Steps at a slice's edge that are taken again in float32 where the others are in bfloat16: what they begin with is
rounded, which is forgotten, or stays the one rounding that it is."""
_FIRST_IN_HALVES = True
"""Whether the first rank's dense scans are cut, too: it then tells the others its value, and comes to what they tell
it, half a scan earlier."""
_KERNEL_HIDDEN = 32
"""H up to which CUDA has kernels of chunk maps, and of the product of a slice's steps, in float32."""


class Scanned(NamedTuple):
    """Of a slice: its states ``(T, B, H)``, the one before its first step and the one after the whole's last step,
    ``(B, H)``."""

    states: Tensor
    entered: Tensor
    end: Tensor


class _Slice(NamedTuple):
    """One rank's part of a scan, other than its tensors."""

    ranks: Ranks
    reverse: bool
    transpose: bool

    @property
    def order(self) -> int:
        """This rank's place in the order of the scan."""
        return self.ranks.size - 1 - self.ranks.rank if self.reverse else self.ranks.rank

    def turned(self) -> _Slice:
        return self._replace(reverse=not self.reverse, transpose=not self.transpose)


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
    Gradients of any order are scans over ranks themselves. Products that overflow or underflow where the states do not
    do no harm. But a slice is summed up in one map, in the digits of float64 (float32's where CUDA has chunk maps) and
    with a value of the state's own dtype, of bfloat16 in float32: where what the map makes of a state cancels against
    what it adds, digits are lost, which :func:`weft.scan.linear_scan` would save step by step.

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
            return scan_slice(op, A, b, x0, ranks, reverse, transpose).states
    return scan_slice(op, A, b, x0, ranks, reverse, transpose).states


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
    if A.is_complex() or b.is_complex():
        raise TypeError(f"{op}: complex numbers are not exchanged between ranks, got A {A.dtype} and b {b.dtype}")
    if checks_ranks():
        check_alike(ranks, op, _what_ranks_share(A, b))
    ranks.check_device(op, b)
    part = _Slice(ranks, reverse, transpose)
    if part.order > 0 and x0 is not None and b.dim() == 3:
        # The first rank alone reads it; all check it, because one that raises alone leaves the others waiting.
        _linear_scan(A[:0] if _is_varying(A, b) else A, b[:0], x0.detach(), reverse=reverse, transpose=transpose)
        x0 = x0 if x0.requires_grad else None
    if is_eager(A, b) and not _has_gradient(A, b, x0) and _is_begun_and_finished(A, b, ranks, ends):
        return Scanned(*_begun_and_finished(A, b, x0, part)[:3])
    # Half precision carries a state in float32, from slice to slice, too. A slice of bfloat16, which has the range of
    # float32, is scanned and mended as it is: where nothing is forgotten, the state is rounded once for each rank.
    if dtype in (torch.float16, torch.bfloat16):
        for name, t in (("A", A), ("x0", x0)):
            if t is not None and t.dtype != dtype:
                raise TypeError(f"{op}: {name} must have the dtype of b, {dtype}, got {t.dtype}")
        if dtype == torch.float16 or not _is_sliced_diagonal(A, b):
            A, b, x0 = A.float(), b.float(), None if x0 is None else x0.float()
    states, entered, end = _Scan.apply(A, b, x0, None, part, ends)
    return Scanned(states if b.dtype == dtype else states.to(dtype), entered, end)


def _has_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def sent_bytes(A: Tensor, b: Tensor) -> int:
    """What a rank tells of its slice: a product, a value, and whether a state leaves it."""
    numbers = math.prod(_product_shape(A, b)) + b.shape[1:].numel() + 1
    return numbers * (8 if b.dtype == torch.float64 else 4)


def _is_varying(A: Tensor, b: Tensor) -> bool:
    """Whether A has a dimension of time. What fits neither way is left to the op, which says so."""
    return A.dim() == 4 or (A.dim() == 3 and (A.shape == b.shape or A.shape == (b.size(0), b.size(2), b.size(2))))


def _is_sliced_diagonal(A: Tensor, b: Tensor) -> bool:
    """Whether A is a diagonal for every step, for which there are kernels of a slice."""
    return A.dim() == 3 and A.shape == b.shape


def _what_ranks_share(A: Tensor, b: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": b.dtype, "dimensions of b": b.dim()}
    if b.dim() == 3:
        T, B, H = b.shape
        diagonal = A.dim() < 4 and not (A.dim() == 3 and A.shape == (T, H, H) and A.shape != b.shape)
        shared = not diagonal and B != 1 and (A.dim() == 3 or A.size(1) != B)
        layout = "diagonal" if diagonal else "dense, shared by the batch" if shared else "dense"
        found |= {"B": B, "H": H, "layout": layout if H != 1 else "diagonal"}
    return found


def _canonical(A: Tensor, b: Tensor) -> tuple[Tensor, bool]:
    """A as (T, B, H, H) or (T, 1, H, H), or as diagonal it may be; and whether it is diagonal. A of H = 1 is."""
    T, B, H = b.shape
    if A.dim() == 3 and A.shape != b.shape and A.shape == (T, H, H):
        A = A.unsqueeze(1)
    if A.dim() == 4 and H == 1:
        A = A.squeeze(-1).expand(T, B, 1)
    return A, A.dim() != 4


def _product_shape(A: Tensor, b: Tensor) -> tuple[int, ...]:
    """(B, H), or (B, H, H) with B or 1."""
    _, B, H = b.shape
    matrices, diagonal = _canonical(A, b)
    return (B, H) if diagonal else (matrices.size(1), H, H)


def _product(A: Tensor, b: Tensor, part: _Slice) -> Tensor:
    """The packed product of a slice's steps. Nothing comes to the first rank, whose product nobody asks for."""
    T, H = b.size(0), b.size(2)
    matrices, diagonal = _canonical(A, b)
    if part.order == 0:
        return torch.zeros(
            _product_shape(A, b), dtype=torch.int64 if b.dtype == torch.float64 else torch.int32, device=b.device
        )
    if not diagonal and (b.device.type == "cpu" or (b.dtype == torch.float32 and H <= _KERNEL_HIDDEN)):
        return torch.ops.weft.slice_product.default(matrices, part.reverse, part.transpose)
    if T > 0 and b.numel() > 0:
        m, e = product_of_steps(matrices, T, diagonal, part.transpose, part.reverse)
        m, e = (t.expand(b.shape[1:]) if diagonal else t for t in (m, e))
    elif diagonal:
        m, e = b.new_full(b.shape[1:], 0.5, dtype=torch.float64), b.new_ones(b.shape[1:], dtype=torch.int64)
    else:
        m = 0.5 * torch.eye(H, dtype=torch.float64, device=b.device).expand(matrices.size(1), H, H)
        e = torch.ones_like(m, dtype=torch.int64)
    return pack(m, e, b.dtype)


def _in_halves(A: Tensor, b: Tensor) -> bool:
    """Whether a dense scan can be cut where ranks exchange."""
    T, B, H = b.shape
    return (
        b.device.type in halved
        and b.dtype == torch.float32
        and not _canonical(A, b)[1]
        and 2 <= H <= _KERNEL_HIDDEN
        and T > 0
        and B > 0
    )


def _end(t: Tensor, reverse: bool) -> int:
    """The last step of t in the order of a scan."""
    return 0 if reverse else t.size(0) - 1


def _end_in_float(A: Tensor, b: Tensor, states: Tensor, start: Tensor | None, reverse: bool) -> Tensor:
    """The last state of a diagonal scan in bfloat16, by its last steps in float32."""
    T = b.size(0)
    count = min(T, _EDGE)
    steps = slice(0, count) if reverse else slice(T - count, T)
    before = start if count == T else states[count if reverse else T - count - 1]
    before = None if before is None else before.float()
    return _linear_scan(A[steps].float(), b[steps].float(), before, reverse=reverse)[0 if reverse else -1]


def _start_gradient_in_float(grad: Tensor, A: Tensor, grad_b: Tensor, entered: Tensor, reverse: bool) -> Tensor:
    """The gradient of the state before a diagonal scan in bfloat16, likewise by its first steps."""
    T = grad.size(0)
    count = min(T, _EDGE)
    steps = slice(T - count, T) if reverse else slice(0, count)
    part = grad[steps].to(torch.float32, copy=True)
    if count < T:
        after = T - count - 1 if reverse else count
        part[_end(part, reverse)] += A[after].float() * grad_b[after].float()
    return _gradients(part, A[steps].float(), None, entered, reverse, False, [False, False, True])[2]


def _mend(states: Tensor, A: Tensor, b: Tensor, state: Tensor, reverse: bool, transpose: bool) -> None:
    """Scans again from the state that comes in, into the states from zero, until the two are the same: from there on
    they stay so."""
    T, begin, block = b.size(0), 0, _FIRST_BLOCK
    varying = _is_varying(A, b)
    while begin < T:
        end = min(begin + block, T)
        steps = slice(T - end, T - begin) if reverse else slice(begin, end)
        part = _linear_scan(A[steps] if varying else A, b[steps], state, reverse=reverse, transpose=transpose)
        state = part[_end(part, reverse)]
        met = torch.equal(state, states[steps][_end(part, reverse)])
        states[steps] = part
        if met:
            return
        begin, block = end, 2 * block


def _mend_gradients(
    grad: Tensor, A: Tensor, states: Tensor, start: Tensor | None, left: Tensor, reverse: bool, transpose: bool,
    grad_A: Tensor | None, grad_b: Tensor,
) -> Tensor | None:  # fmt: skip
    """Goes back again with the gradient of the state that leaves, into the gradients without, until the two are the
    same. The gradient of `start`, where it gets there."""
    T, done, block = grad.size(0), 0, _FIRST_BLOCK
    while done < T:
        end = min(done + block, T)
        steps = slice(done, end) if reverse else slice(T - end, T - done)
        before = start if end == T else states[end] if reverse else states[T - end - 1]
        part = grad[steps].clone()
        part[_end(part, reverse)] += left
        part_A, part_b, left = _gradients(
            part, A[steps], states[steps], before, reverse, transpose,
            [grad_A is not None, True, before is not None],
        )  # fmt: skip
        first = _end(part, not reverse)
        met = torch.equal(part_b[first], grad_b[steps][first])
        grad_b[steps] = part_b
        if grad_A is not None:
            grad_A[steps] = part_A
        if met:
            return None
        done, block = end, 2 * block
    return left


class _BackwardHalves:
    """The gradients of a dense slice: lambda is a scan from the slice's last step to its first."""

    def __init__(self, grad: Tensor, A: Tensor, reverse: bool, transpose: bool) -> None:
        T, B, H = grad.shape
        early, self.late = (1, 0) if reverse else (0, 1)
        self.A, self.grad, self.transpose, self.early = A, grad.contiguous(), transpose, early
        self.first, self.last = _end(grad, not reverse), _end(grad, reverse)
        self.matrices = _canonical(A, grad)[0]
        self.chunks = slice_chunks(grad.device, T - 1, B, H)
        self.scan = (self.matrices.narrow(0, self.late, T - 1), self.grad.narrow(0, early, T - 1))
        self.flags = (not reverse, not transpose)
        self.maps, self.value, _ = torch.ops.weft.slice_maps.default(
            *self.scan, self.grad[self.last], self.chunks, *self.flags, False
        )

    @staticmethod
    def fit(A: Tensor, grad: Tensor) -> bool:
        return _in_halves(A, grad) and grad.size(0) > 1 and _canonical(A, grad)[0].size(1) == grad.size(1)

    def grad_start(self) -> Tensor:
        """Of the state that enters, where the one that leaves has no gradient."""
        return self._before(self.value)

    def of_start(self, lambdas: Tensor) -> Tensor:
        """Of the same state, from the gradients of b."""
        return self._before(lambdas[self.first])

    def _before(self, lambda_first: Tensor) -> Tensor:
        step = self.matrices[self.first]
        return _applied(step if self.transpose else step.mT, lambda_first)

    def gradients(self, left: Tensor, states: Tensor, start: Tensor | None, of_A: bool) -> tuple[Tensor, Tensor]:
        """Of A and of b, where the state that leaves has the gradient `left`. Without a state before the slice, the
        first A is not looked at."""
        lambdas, count = torch.empty_like(self.grad), self.grad.size(0) - 1
        last = torch.add(self.grad[self.last], left, out=lambdas[self.last])
        torch.ops.weft.slice_replay_.default(
            lambdas.narrow(0, self.early, count), *self.scan, self.maps, last, None, self.chunks, *self.flags
        )
        if not of_A:
            return lambdas.new_empty(0), lambdas
        grad_A = torch.empty_like(self.matrices, memory_format=torch.contiguous_format)

        def multiply(of: Tensor, before: Tensor, into: Tensor) -> None:
            rows, columns = (before, of) if self.transpose else (of, before)
            torch.mul(rows.unsqueeze(-1), columns.unsqueeze(-2), out=into)

        of, into = (t.narrow(0, self.late, count) for t in (lambdas, grad_A))
        multiply(of, states.narrow(0, self.early, count), into)
        if start is None:
            grad_A[self.first].zero_()
        else:
            multiply(lambdas[self.first], start, grad_A[self.first])
        return grad_A.view(self.A.shape), lambdas


def _is_begun_and_finished(A: Tensor, b: Tensor, ranks: Ranks, ends: bool) -> bool:
    """Whether there is one op before the exchange and one after it: of diagonals, gathered at once."""
    if not (_is_sliced_diagonal(A, b) and A.dtype == b.dtype and b.dtype in (torch.float32, torch.float64)):
        return False
    T, B, H = b.shape
    return T * B * H > 0 and (ends or not in_rounds(ranks, (2 * B * H + 1) * b.element_size()))


def _begun_and_finished(A: Tensor, b: Tensor, x0: Tensor | None, part: _Slice) -> tuple[Tensor, ...]:
    order = part.order
    start = x0 if order == 0 else None
    states, message = _begin(A, b, start, order == 0, part.reverse)
    entered, end, products = _finish(states, A, part.ranks.gather(message), order, part.reverse)
    if start is not None:
        entered = start.expand(entered.shape).to(entered.dtype, copy=True)
    return states, entered, end, products


def _begun_and_finished_gradients(
    grad: Tensor, grad_entered: Tensor | None, grad_end: Tensor | None, A: Tensor, states: Tensor, entered: Tensor,
    products: Tensor, has_x0: bool, part: _Slice, of_A: bool,
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
    A: Tensor, b: Tensor, x0: Tensor | None, extra: Tensor | None, part: _Slice, ends: bool
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
    sliced = _is_sliced_diagonal(A, b)
    halves = (_FIRST_IN_HALVES or not first) and extra is None and _in_halves(A, b)
    shape = _product_shape(A, b)
    if halves:
        matrices, chunks = _canonical(A, b)[0], slice_chunks(b.device, T, B, H)
        row = None if start is None else start.expand(B, H).contiguous()
        maps, value, message = torch.ops.weft.slice_maps.default(
            matrices, b, row, chunks, reverse, transpose, not first
        )
        if first:
            product = _product(A, b, part)
            message = torch.cat((product.flatten(), value.view(product.dtype).flatten(), product.new_ones(1)))
        states = torch.empty_like(b, memory_format=torch.contiguous_format)
    else:
        states = _linear_scan(A, b, start, reverse=reverse, transpose=transpose)
        if T > 0:
            value = states[_end(states, reverse)]
        else:
            value = b.new_zeros(B, H) if start is None else start.expand(B, H)
        if b.dtype == torch.bfloat16:
            value = _end_in_float(A, b, states, start, reverse) if T > 0 else value.float()
        if extra is not None:
            value = value + extra
        leaves = T > 0 or start is not None or extra is not None
        if sliced:  # no one asks for the first rank's product
            message = torch.ops.weft.slice_message.default(A[:0] if first else A, value, leaves)
        else:
            product = _product(A, b, part)
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
            _mend(states, A, b, entered, reverse, transpose)
    else:  # how far is known to the device alone; where nothing comes in, nobody may look at the first A
        again = _linear_scan(A, b, entered, reverse=reverse, transpose=transpose)
        states = torch.where(came.bool().view(1, 1, 1), again, states)
    return states, entered, end, products


@torch.library.impl("weft::slice_scan", "CompositeExplicitAutograd")
def _(A, b, x0, extra, group, reverse, transpose, ends):
    return _scan(A, b, x0, extra, _Slice(ranks_named(group), reverse, transpose), ends)


def _scan_backward(
    grad: Tensor, grad_entered: Tensor | None, grad_end: Tensor | None, A: Tensor, states: Tensor, entered: Tensor,
    products: Tensor, has_x0: bool, part: _Slice, output_mask: Sequence[bool],
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
    sliced = T > 0 and _is_sliced_diagonal(A, grad)
    # Gradients of every step from no gradient of the state that leaves, mended once that is there; on CUDA how far is
    # known to the device alone, and there is a kernel of diagonals.
    cut = (_FIRST_IN_HALVES or not first) and _BackwardHalves.fit(A, grad)
    halves = _BackwardHalves(grad, A, reverse, transpose) if cut else None
    mends = sliced or (T > 0 and grad.device.type == "cpu" and _is_varying(A, grad))
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
            grad_start = _start_gradient_in_float(grad, A, grad_b, entered, reverse)
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
        found = _mend_gradients(grad, A, states, start, left, reverse, transpose, mended_A, grad_b)
        grad_start = grad_start if found is None else found
        grad_start = grad_start + grad_entered if first and has_x0 else torch.zeros_like(left)
        return grad_A if output_mask[0] else nothing, grad_b if output_mask[1] else nothing, grad_start, left
    grad = grad.clone()
    grad[_end(grad, reverse)] += left
    mask = [*output_mask, first and has_x0]
    grad_A, grad_b, grad_start = _gradients(grad, A, states, start, reverse, transpose, mask)
    grad_A, grad_b = (g if wanted else nothing for g, wanted in zip((grad_A, grad_b), output_mask, strict=True))
    return grad_A, grad_b, grad_start + grad_entered if mask[2] else torch.zeros_like(left), left


@torch.library.impl("weft::slice_scan_backward", "CompositeExplicitAutograd")
def _(grad, grad_entered, grad_end, A, x, entered, products, has_x0, group, reverse, transpose, output_mask):
    part = _Slice(ranks_named(group), reverse, transpose)
    *grads, grad_start, left = _scan_backward(
        grad, grad_entered, grad_end, A, x, entered, products, has_x0, part, output_mask
    )
    return *grads, torch.zeros_like(left) if grad_start is None else grad_start, left


@torch.library.register_fake("weft::slice_scan")
def _slice_scan_fake(A, b, x0, extra, group, reverse, transpose, ends):
    ranks, product = ranks_named(group), _product_shape(A, b)
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
        ctx: FunctionCtx, A: Tensor, b: Tensor, x0: Tensor | None, extra: Tensor | None, part: _Slice, ends: bool
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
    has_x0: bool, part: _Slice,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same as slice_scan_backward's by a scan over ranks that runs the other way, of
    m[t] = A[t]^T (g[t] + m[t+1]), so that it has gradients itself."""
    T, reverse = grad.size(0), part.reverse
    if grad.dtype == torch.bfloat16:
        grad, A, states = grad.float(), A.float(), states.float()
    matrices, diagonal = _canonical(A, grad)
    if diagonal:
        matrices = matrices.expand(grad.shape)
    if part.order == 0 and not has_x0:  # the first step's A is not looked at
        step = torch.arange(T, device=A.device) == (T - 1 if reverse else 0)
        matrices = torch.where(step.view(-1, *(1,) * (matrices.dim() - 1)), 0.0, matrices)
    turned = matrices if diagonal or part.transpose else matrices.mT
    b = turned * grad if diagonal else _applied(turned, grad)
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


def _applied(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Sums in the dtype of the vectors, never in TF32."""
    return (matrices * vectors.unsqueeze(-2)).sum(-1)


class _SumOverRanks(torch.autograd.Function):
    """The sum of every rank's tensor, on every rank, in order of rank; its own gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(x).sum(0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple:
        return _SumOverRanks.apply(grad, ctx.ranks), None
