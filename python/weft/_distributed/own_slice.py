"""What one rank computes of its slice of a linear scan, other than the scan itself: the product of its steps, and how
states and gradients that did not know what comes in are mended, or made by a scan that is cut in two halves."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._scan import slice_chunks
from .group import Ranks
from .halves import halved
from .totals import pack, product_of_steps

__all__ = [
    "BackwardHalves",
    "Slice",
    "applied",
    "canonical",
    "end_in_float",
    "end_of",
    "fits_halves",
    "is_sliced_diagonal",
    "is_varying",
    "mend",
    "mend_gradients",
    "product_of_slice",
    "product_shape",
    "sent_bytes",
    "start_gradient_in_float",
]

_linear_scan = torch.ops.weft.linear_scan.default
_gradients = torch.ops.weft.linear_scan_backward.default

_FIRST_BLOCK = 64
"""Steps that are scanned again before states are compared; each next block is twice as long."""
_EDGE = 64
"""Steps at a slice's edge that are taken again in float32 where the others are in bfloat16: what they begin with is
rounded, which is forgotten, or stays the one rounding that it is."""
_KERNEL_HIDDEN = 32
"""H up to which CUDA has kernels of chunk maps, and of the product of a slice's steps, in float32."""


class Slice(NamedTuple):
    """One rank's part of a scan, other than its tensors."""

    ranks: Ranks
    reverse: bool
    transpose: bool

    @property
    def order(self) -> int:
        """This rank's place in the order of the scan."""
        return self.ranks.size - 1 - self.ranks.rank if self.reverse else self.ranks.rank

    def turned(self) -> Slice:
        return self._replace(reverse=not self.reverse, transpose=not self.transpose)


def sent_bytes(A: Tensor, b: Tensor) -> int:
    """What a rank tells of its slice: a product, a value, and whether a state leaves it. Complex numbers are told as
    pairs, and their products as matrices of pairs."""
    pair = 2 if b.is_complex() else 1
    numbers = pair**2 * math.prod(product_shape(A, b)) + pair * b.shape[1:].numel() + 1
    return numbers * (8 if b.dtype in (torch.float64, torch.complex128) else 4)


def is_varying(A: Tensor, b: Tensor) -> bool:
    """Whether A has a dimension of time. What fits neither way is left to the op, which says so."""
    return A.dim() == 4 or (A.dim() == 3 and (A.shape == b.shape or A.shape == (b.size(0), b.size(2), b.size(2))))


def is_sliced_diagonal(A: Tensor, b: Tensor) -> bool:
    """Whether A is a diagonal for every step, for which there are kernels of a slice."""
    return A.dim() == 3 and A.shape == b.shape


def canonical(A: Tensor, b: Tensor) -> tuple[Tensor, bool]:
    """A as (T, B, H, H) or (T, 1, H, H), or as diagonal it may be; and whether it is diagonal. A of H = 1 is."""
    T, B, H = b.shape
    if A.dim() == 3 and A.shape != b.shape and A.shape == (T, H, H):
        A = A.unsqueeze(1)
    if A.dim() == 4 and H == 1:
        A = A.squeeze(-1).expand(T, B, 1)
    return A, A.dim() != 4


def product_shape(A: Tensor, b: Tensor) -> tuple[int, ...]:
    """(B, H), or (B, H, H) with B or 1."""
    _, B, H = b.shape
    matrices, diagonal = canonical(A, b)
    return (B, H) if diagonal else (matrices.size(1), H, H)


def product_of_slice(A: Tensor, b: Tensor, part: Slice) -> Tensor:
    """The packed product of a slice's steps. Nothing comes to the first rank, whose product nobody asks for."""
    T, H = b.size(0), b.size(2)
    matrices, diagonal = canonical(A, b)
    if part.order == 0:
        return torch.zeros(
            product_shape(A, b), dtype=torch.int64 if b.dtype == torch.float64 else torch.int32, device=b.device
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


def fits_halves(A: Tensor, b: Tensor) -> bool:
    """Whether a dense scan can be cut where ranks exchange."""
    T, B, H = b.shape
    return (
        b.device.type in halved
        and b.dtype == torch.float32
        and not canonical(A, b)[1]
        and 2 <= H <= _KERNEL_HIDDEN
        and T > 0
        and B > 0
    )


def end_of(t: Tensor, reverse: bool) -> int:
    """The last step of t in the order of a scan."""
    return 0 if reverse else t.size(0) - 1


def end_in_float(A: Tensor, b: Tensor, states: Tensor, start: Tensor | None, reverse: bool) -> Tensor:
    """The last state of a diagonal scan in bfloat16, by its last steps in float32."""
    T = b.size(0)
    count = min(T, _EDGE)
    steps = slice(0, count) if reverse else slice(T - count, T)
    before = start if count == T else states[count if reverse else T - count - 1]
    before = None if before is None else before.float()
    return _linear_scan(A[steps].float(), b[steps].float(), before, reverse=reverse)[0 if reverse else -1]


def start_gradient_in_float(grad: Tensor, A: Tensor, grad_b: Tensor, entered: Tensor, reverse: bool) -> Tensor:
    """The gradient of the state before a diagonal scan in bfloat16, likewise by its first steps."""
    T = grad.size(0)
    count = min(T, _EDGE)
    steps = slice(T - count, T) if reverse else slice(0, count)
    part = grad[steps].to(torch.float32, copy=True)
    if count < T:
        after = T - count - 1 if reverse else count
        part[end_of(part, reverse)] += A[after].float() * grad_b[after].float()
    return _gradients(part, A[steps].float(), None, entered, reverse, False, [False, False, True])[2]


def mend(states: Tensor, A: Tensor, b: Tensor, state: Tensor, reverse: bool, transpose: bool) -> None:
    """Scans again from the state that comes in, into the states from zero, until the two are the same: from there on
    they stay so."""
    T, begin, block = b.size(0), 0, _FIRST_BLOCK
    varying = is_varying(A, b)
    while begin < T:
        end = min(begin + block, T)
        steps = slice(T - end, T - begin) if reverse else slice(begin, end)
        part = _linear_scan(A[steps] if varying else A, b[steps], state, reverse=reverse, transpose=transpose)
        state = part[end_of(part, reverse)]
        met = torch.equal(state, states[steps][end_of(part, reverse)])
        states[steps] = part
        if met:
            return
        begin, block = end, 2 * block


def mend_gradients(
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
        part[end_of(part, reverse)] += left
        part_A, part_b, left = _gradients(
            part, A[steps], states[steps], before, reverse, transpose,
            [grad_A is not None, True, before is not None],
        )  # fmt: skip
        first = end_of(part, not reverse)
        met = torch.equal(part_b[first], grad_b[steps][first])
        grad_b[steps] = part_b
        if grad_A is not None:
            grad_A[steps] = part_A
        if met:
            return None
        done, block = end, 2 * block
    return left


class BackwardHalves:
    """The gradients of a dense slice: lambda is a scan from the slice's last step to its first."""

    def __init__(self, grad: Tensor, A: Tensor, reverse: bool, transpose: bool) -> None:
        T, B, H = grad.shape
        early, self.late = (1, 0) if reverse else (0, 1)
        self.A, self.grad, self.transpose, self.early = A, grad.contiguous(), transpose, early
        self.first, self.last = end_of(grad, not reverse), end_of(grad, reverse)
        self.matrices = canonical(A, grad)[0]
        self.chunks = slice_chunks(grad.device, T - 1, B, H)
        self.scan = (self.matrices.narrow(0, self.late, T - 1), self.grad.narrow(0, early, T - 1))
        self.flags = (not reverse, not transpose)
        self.maps, self.value, _ = torch.ops.weft.slice_maps.default(
            *self.scan, self.grad[self.last], self.chunks, *self.flags, False
        )

    @staticmethod
    def fit(A: Tensor, grad: Tensor) -> bool:
        return fits_halves(A, grad) and grad.size(0) > 1 and canonical(A, grad)[0].size(1) == grad.size(1)

    def grad_start(self) -> Tensor:
        """Of the state that enters, where the one that leaves has no gradient."""
        return self._before(self.value)

    def of_start(self, lambdas: Tensor) -> Tensor:
        """Of the same state, from the gradients of b."""
        return self._before(lambdas[self.first])

    def _before(self, lambda_first: Tensor) -> Tensor:
        step = self.matrices[self.first]
        return applied(step if self.transpose else step.mT, lambda_first)

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


def applied(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Sums in the dtype of the vectors, never in TF32."""
    return (matrices * vectors.unsqueeze(-2)).sum(-1)
