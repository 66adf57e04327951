"""Products of sparse matrices whose patterns are multiplied once, and whose values every step."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._base.torch_private import differentiated_by_transform
from .pattern import Matrix, Pattern, made_to_stay
from .reference import csr_matmul_reference

_csr_matmul = torch.ops.weft.csr_matmul.default


class Kinds(NamedTuple):
    """FLOPs of a product by how its rows are computed."""

    axpy: int
    """Sums of whole rows of b: where an element of a has a row to itself, and dense blocks."""
    gather: int
    """Few products an element, listed by the plan."""
    accumulate: int
    """Found again from the patterns, and added up in windows of columns; on a GPU, where b has few columns, by a lane
    for each."""
    expand: int
    """Written one after another into a GPU's shared memory, and summed there; a CPU's plan has none."""


class PlanTensors(NamedTuple):
    """A planned product as csr_matmul takes it, by name: csrc/sparse/csr_matmul.h says what each is."""

    a_crow: Tensor
    a_col: Tensor
    b_crow: Tensor
    b_col: Tensor
    crow: Tensor
    col: Tensor
    axpy: Tensor
    accumulate: Tensor
    gather: Tensor
    starts: Tensor
    left: Tensor
    right: Tensor
    shared: Tensor
    expand: Tensor
    pieces: Tensor
    segments: Tensor
    lists: Tensor
    narrow: Tensor

    @classmethod
    def of(cls, patterns: list[Tensor]) -> PlanTensors:
        """Without the transposed operand that may follow."""
        return cls(*patterns[: len(cls._fields)])


class MatmulPlan:
    """What :func:`plan_matmul` returns: ``plan(a, b)`` is ``a @ b`` for any values on the planned patterns."""

    def __init__(self, a: Pattern, b: Pattern) -> None:
        crow, col, *rows, info = torch.ops.weft.csr_matmul_plan(a.tensors, b.tensors)
        operands = [t.to(crow.dtype) for t in (*a.tensors, *b.tensors)]
        given = {id(t) for t in (*a.tensors, *b.tensors)}
        if b.diagonal and operands[0] is a.crow:
            # The product has a's pattern, and each element its own column of the diagonal.
            crow, col = a.tensors
            at = PlanTensors._fields.index("right") - PlanTensors._fields.index("axpy")
            if rows[at].numel() and not rows[at + 1].numel():
                rows[at] = a.col
        elif a.diagonal and operands[2] is b.crow:
            crow, col = b.tensors
        same = crow is a.crow or crow is b.crow
        diagonal = a.diagonal and b.diagonal
        self._pattern = (a if crow is a.crow else b) if same else Pattern(crow, col, (a.shape[0], b.shape[1]), diagonal)
        self._a, self._b = a, b
        self._patterns = [*operands, crow, col, *rows]
        self._product = _C.sparse.Product(self._patterns)
        self._own = [t for t in self._patterns if id(t) not in given]
        products, axpy, gather, expand = info.tolist()
        self._flops = 2 * products
        self._kinds = Kinds(2 * axpy, 2 * gather, 2 * (products - axpy - gather - expand), 2 * expand)
        # Other patterns that turned out to be equal to the planned ones.
        self._equal: tuple[weakref.WeakSet[Pattern], weakref.WeakSet[Pattern]] = (weakref.WeakSet(), weakref.WeakSet())

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, columns)`` of the product."""
        return self._pattern.shape

    @property
    def nnz(self) -> int:
        """Stored elements of the product: all that have a scalar product, whatever its value."""
        return self._pattern.nnz

    @property
    def crow(self) -> Tensor:
        """``(rows + 1,)``, shared by every result."""
        return self._pattern.crow

    @property
    def col(self) -> Tensor:
        """``(nnz,)``, shared by every result; sorted within rows."""
        return self._pattern.col

    @property
    def flops(self) -> int:
        """2 per scalar product, for one sample."""
        return self._flops

    @property
    def kinds(self) -> Kinds:
        """``flops`` by how rows are computed: ``axpy``, ``gather``, ``accumulate`` and ``expand``."""
        return self._kinds

    @property
    def memory(self) -> int:
        """Bytes that the plan holds."""
        return sum(t.nbytes for t in self._own)

    def __call__(self, a: Matrix, b: Matrix) -> Matrix:
        """``a @ b``, on ``plan.crow`` and ``plan.col``: per sample where one of them is. Does no work on indices, does
        not wait for the device, and allocates the result alone. Differentiable to any order.

        Raises:
            TypeError: no BatchedCSR, dtypes that differ.
            ValueError: patterns that are not the planned ones, batches that differ.
            RuntimeError: another device.
        """
        # Host time is what small products take: in a training loop nothing is looked at but these.
        if not (isinstance(a, Matrix) and a._pattern is self._a and isinstance(b, Matrix) and b._pattern is self._b):
            self._check_patterns(a, b)
        x, y = a._values, b._values
        if x.dtype is not y.dtype or (x.dim() == 2 and y.dim() == 2 and x.shape[0] != y.shape[0]):
            self._check_values(x, y)
        values = None if torch.compiler.is_compiling() else self._product(x, y)
        return type(a)._of(self._pattern, self._multiply(x, y) if values is None else values)

    def _check_patterns(self, a: Matrix, b: Matrix) -> None:
        for name, J, planned, equal in zip("ab", (a, b), (self._a, self._b), self._equal, strict=True):
            if not isinstance(J, Matrix):
                raise TypeError(f"plan_matmul: {name} must be a BatchedCSR, got {type(J).__name__}")
            if J._pattern is not planned and J._pattern not in equal:
                self._compare(name, J._pattern, planned)
                equal.add(J._pattern)

    @staticmethod
    def _check_values(x: Tensor, y: Tensor) -> None:
        if x.dtype != y.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"plan_matmul: b must have the dtype of a, {x.dtype}, got {y.dtype}")
        if x.dim() == 2 and y.dim() == 2 and x.shape[0] != y.shape[0]:
            raise ValueError(f"plan_matmul: b must have the batch of a, {x.shape[0]}, got {y.shape[0]}")

    def _multiply(self, x: Tensor, y: Tensor) -> Tensor:
        if differentiated_by_transform(x, y):
            return csr_matmul_reference(self._patterns, self.shape[1], x, y)
        patterns = self._patterns
        if y.requires_grad and torch.is_grad_enabled():
            patterns = [*patterns, *(t.to(self.crow.dtype) for t in self._a.transposed)]
        return _csr_matmul(patterns, x, y)

    @staticmethod
    def _compare(name: str, found: Pattern, planned: Pattern) -> None:
        if found.crow.device != planned.crow.device:
            raise RuntimeError(
                f"plan_matmul: {name} must be on the device of the plan, {planned.crow.device}, got {found.crow.device}"
            )
        if not found.equals(planned):
            raise ValueError(
                f"plan_matmul: {name} must have the planned pattern, {planned.shape} with {planned.nnz} elements, got "
                f"another one, {found.shape} with {found.nnz}"
            )

    def __copy__(self) -> MatmulPlan:
        return self

    def __deepcopy__(self, memo: dict) -> MatmulPlan:
        """Itself: a plan does not change, and serves equal patterns."""
        return self

    def __reduce__(self):
        return _plan_again, (self._a.tensors, self._a.shape, self._b.tensors, self._b.shape)

    def __repr__(self) -> str:
        return f"MatmulPlan(shape={self.shape}, nnz={self.nnz}, flops={self.flops}, memory={self.memory})"


def plan_matmul(a: Matrix, b: Matrix) -> MatmulPlan:
    """Plans the product of two sparse matrices from their patterns alone, for any number of products with other values.

    Args:
        a: a :class:`BatchedCSR` ``(n, m)``.
        b: ``(m, k)``, on the same device.

    Returns:
        A plan: ``plan(a, b)`` computes the values of ``a @ b``; ``plan.shape``, ``nnz``, ``crow``, ``col``, ``flops``
        and ``memory`` tell about it. The same patterns give the same plan for as long as it is held.

    Raises:
        TypeError: no BatchedCSR.
        ValueError: sizes that do not chain, batches that differ.
        RuntimeError: devices that differ; more scalar products than a plan is made for.

    The symbolic phase runs on the CPU and waits for the device. It chooses for every row of the product how its values
    are computed (``plan.kinds``): as a sum of whole rows of b, where each of them has all columns of the row; by a list
    of its scalar products, where these are few and the list takes little memory; else by finding them again from the
    patterns, or on a GPU by expanding them in shared memory, where lists of two bytes a product fit. A plan takes at
    most three times the memory of operands and product.

    Source: BPPSA, section 3.4 (deterministic sparsity).
    """
    for name, J in (("a", a), ("b", b)):
        if not isinstance(J, Matrix):
            raise TypeError(f"plan_matmul: {name} must be a BatchedCSR, got {type(J).__name__}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"plan_matmul: a {a.shape} and b {b.shape} do not chain")
    if a.device != b.device:
        raise RuntimeError(f"plan_matmul: b must be on the device of a, {a.device}, got {b.device}")
    if None not in (a.batch_size, b.batch_size) and a.batch_size != b.batch_size:
        raise ValueError(f"plan_matmul: b must have the batch of a, {a.batch_size}, got {b.batch_size}")
    return planned(a._pattern, b._pattern)


def planned(a: Pattern, b: Pattern) -> MatmulPlan:
    """The plan for two patterns that chain, made at the first call and kept for as long as somebody holds it."""
    plan = a.plans.get(b)
    plan = plan() if plan is not None else None
    if plan is None:
        plan, stays = made_to_stay(a.crow.device, lambda: MatmulPlan(a, b))
        if stays:
            a.plans[b] = weakref.ref(plan)
    return plan


def _plan_again(a: list[Tensor], a_shape: tuple[int, int], b: list[Tensor], b_shape: tuple[int, int]) -> MatmulPlan:
    """What a pickled plan becomes: the plan for these patterns here."""
    return planned(*(Pattern.find(*t, shape) or Pattern(*t, shape) for t, shape in ((a, a_shape), (b, b_shape))))


def count_flops(a: Pattern, b: Pattern) -> int:
    """2 per scalar product of a sample, without planning; waits for the device."""
    lengths = b.crow.diff()
    return 2 * int(lengths.index_select(0, a.col).sum()) if a.nnz else 0
