"""BatchedCSR: one sparsity pattern, one or many sets of values."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .._base.arguments import check_dense
from .._base.torch_private import differentiated_by_transform, parse_to
from .pattern import INT32_MAX, Matrix, Pattern, index_dtype, version
from .plan import plan_matmul
from .reference import csr_mm_reference

_csr_mm = torch.ops.weft.csr_mm.default

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# Patterns that lie in the memory of sparse_csr tensors, which a pattern keeps from being used again.
_of_torch: weakref.WeakValueDictionary[tuple, Pattern] = weakref.WeakValueDictionary()


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"BatchedCSR: {name} must be a Tensor, got {type(value).__name__}")
    if name != "tensor":  # which is sparse
        check_dense("BatchedCSR", name, value, "give one tensor")


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"BatchedCSR: values must be float16, bfloat16, float32 or float64, got {dtype}")


def _check_shape(shape: Sequence[int]) -> tuple[int, int]:
    try:
        rows, columns = map(operator.index, shape)
    except (TypeError, ValueError):
        raise ValueError(f"BatchedCSR: shape must be (rows, columns), got {shape!r}") from None
    if rows < 0 or columns < 0:
        raise ValueError(f"BatchedCSR: shape must not be negative, got {(rows, columns)}")
    return rows, columns


def _check_values(values: object, nnz: int, device: torch.device) -> None:
    _check_tensor("values", values)
    _check_dtype(values.dtype)
    if values.dim() not in (1, 2) or values.shape[-1] != nnz:
        raise ValueError(f"BatchedCSR: values must be (nnz,) or (B, nnz) with nnz = {nnz}, got {tuple(values.shape)}")
    if values.device != device:
        raise RuntimeError(f"BatchedCSR: values must be on the device of crow and col, {device}, got {values.device}")


def _check_indices(crow: object, col: object, shape: tuple[int, int]) -> None:
    """Everything but the order within rows; waits for the device."""
    for name, index in (("crow", crow), ("col", col)):
        _check_tensor(name, index)
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"BatchedCSR: {name} must be int32 or int64, got {index.dtype}")
        if index.dim() != 1:
            raise ValueError(f"BatchedCSR: {name} must have one dimension, got {tuple(index.shape)}")
    if crow.dtype != col.dtype:
        raise TypeError(f"BatchedCSR: crow and col must have one dtype, got {crow.dtype} and {col.dtype}")
    if crow.device != col.device:
        raise RuntimeError(f"BatchedCSR: crow and col must be on one device, got {crow.device} and {col.device}")
    rows, columns = shape
    if crow.shape[0] != rows + 1:
        raise ValueError(f"BatchedCSR: crow must be (rows + 1,) = ({rows + 1},), got {tuple(crow.shape)}")
    nnz = col.shape[0]
    if int(crow[0]) != 0 or int(crow[-1]) != nnz or bool((crow.diff() < 0).any()):
        raise ValueError(f"BatchedCSR: crow must rise from 0 to nnz = {nnz}")
    if nnz:
        low, high = (int(n) for n in col.aminmax())
        if low < 0 or high >= columns:
            raise ValueError(f"BatchedCSR: col must lie in [0, {columns}), got {low} to {high}")


def gather(source: Tensor, crow: Tensor, index: Tensor) -> Tensor:
    """Sums of chosen elements, ``out[..., e] = sum(source[..., index[crow[e] : crow[e + 1]]])``; differentiable. Sums
    have a fixed order in both directions, which torch's own gathers do not promise of their gradients."""
    return multiply([crow, index], [], None, source.unsqueeze(-1)).squeeze(-1)


def multiply(pattern: list[Tensor], transposed: list[Tensor], values: Tensor | None, x: Tensor) -> Tensor:
    """csr_mm, by the reference where torch's function transforms, which refuse C++ autograd functions, look on."""
    if differentiated_by_transform(values, x):
        return csr_mm_reference(pattern, values, x)
    return _csr_mm(pattern, transposed, values, x)


class BatchedCSR(Matrix):
    """A sparse matrix in CSR form for every sample of a batch, all with one pattern. Immutable; tensors are not copied.

    Args:
        crow: ``(rows + 1,)`` int32 or int64, where each row begins in ``col``.
        col: ``(nnz,)``, of the same dtype, the column of each element. Columns increase within a row: other input is
            sorted and the values of duplicates are summed.
        values: ``(nnz,)``, shared by every sample, or ``(B, nnz)``: float16, bfloat16, float32 or float64.
        shape: ``(rows, columns)``.

    Raises:
        TypeError: no tensors, values that are not floating, indices that are not int32 or int64 or differ.
        ValueError: sizes that do not fit, a ``crow`` that does not rise from 0 to nnz, columns outside the shape.
        RuntimeError: devices that differ.

    Checking new indices waits for the device; the same index tensors are checked once.
    """

    __slots__ = ()
    __array_ufunc__ = None  # an array on the right of @ is refused here, not by numpy

    def __init__(self, crow: Tensor, col: Tensor, values: Tensor, shape: Sequence[int]) -> None:
        shape = _check_shape(shape)
        known = Pattern.find(crow, col, shape)
        if known is None:
            _check_indices(crow, col, shape)
        _check_values(values, col.shape[0], crow.device)
        if known is None:
            known, values = _sorted(crow, col, values, shape)
        self._set(known, values)

    def _set(self, pattern: Pattern, values: Tensor) -> None:
        object.__setattr__(self, "_pattern", pattern)
        object.__setattr__(self, "_values", values)

    @classmethod
    def _of(cls, pattern: Pattern, values: Tensor) -> BatchedCSR:
        """Of a pattern and values that are known to fit."""
        self = cls.__new__(cls)
        self._set(pattern, values)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"BatchedCSR is immutable: {name} cannot be set; with_values gives one with other values")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"BatchedCSR is immutable: {name} cannot be deleted")

    @property
    def crow(self) -> Tensor:
        """``(rows + 1,)``, where each row begins."""
        return self._pattern.crow

    @property
    def col(self) -> Tensor:
        """``(nnz,)``, the column of each element."""
        return self._pattern.col

    @property
    def values(self) -> Tensor:
        """``(nnz,)``, shared by every sample, or ``(B, nnz)``."""
        return self._values

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, columns)``."""
        return self._pattern.shape

    @property
    def nnz(self) -> int:
        """Stored elements of one sample."""
        return self._pattern.nnz

    @property
    def batch_size(self) -> int | None:
        """B, None where the values are shared."""
        return self._values.shape[0] if self._values.dim() == 2 else None

    @property
    def sparsity(self) -> float:
        """The part of the matrix that is not stored; 0 for a matrix without elements."""
        size = math.prod(self.shape)
        return 1 - self.nnz / size if size else 0.0

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        return self._values.device

    def with_values(self, values: Tensor) -> BatchedCSR:
        """The same pattern, the very same index tensors, with other values, ``(nnz,)`` or ``(B, nnz)``."""
        _check_values(values, self.nnz, self.crow.device)
        return self._of(self._pattern, values)

    def to(self, *args, **kwargs) -> BatchedCSR:
        """As ``Tensor.to``; a dtype converts the values only."""
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = parse_to(*args, **kwargs)
        if dtype is not None:
            _check_dtype(dtype)
        values = self._values.to(device=device, dtype=dtype, non_blocking=non_blocking, copy=copy)
        pattern = self._pattern
        if values.device != pattern.crow.device:
            crow, col = (t.to(values.device, non_blocking=non_blocking) for t in pattern.tensors)
            pattern = Pattern(crow, col, pattern.shape, pattern.diagonal)
        return self._of(pattern, values)

    def detach(self) -> BatchedCSR:
        return self._of(self._pattern, self._values.detach())

    def to_dense(self) -> Tensor:
        """``(rows, columns)`` or ``(B, rows, columns)``; differentiable."""
        rows, columns = self.shape
        flat = self._pattern.rows * columns + self.col
        dense = self._values.new_zeros(*self._values.shape[:-1], rows * columns)
        return dense.index_copy(-1, flat, self._values).unflatten(-1, self.shape)

    def to_sparse_csr(self) -> Tensor:
        """The same as a ``torch.sparse_csr`` tensor, of two or three dimensions."""
        crow, col = self.crow, self.col
        size: tuple[int, ...] = self.shape
        if self._values.dim() == 2:
            batch = self._values.shape[0]
            crow, col = crow.expand(batch, -1), col.expand(batch, -1)
            size = (batch, *size)
        return torch.sparse_csr_tensor(crow.contiguous(), col.contiguous(), self._values, size)

    @classmethod
    def from_dense(cls, dense: Tensor) -> BatchedCSR:
        """Of ``(rows, columns)`` or ``(B, rows, columns)``; stores every element that is not zero in some sample. Waits
        for the device; differentiable."""
        _check_tensor("dense", dense)
        _check_dtype(dense.dtype)
        if dense.dim() not in (2, 3):
            raise ValueError(
                f"BatchedCSR: dense must be (rows, columns) or (B, rows, columns), got {tuple(dense.shape)}"
            )
        rows, columns = (int(n) for n in dense.shape[-2:])
        stored = dense.detach() != 0
        stored = stored.any(0) if dense.dim() == 3 else stored
        row, col = stored.nonzero(as_tuple=True)
        dtype = index_dtype(rows, columns, col.shape[0])
        crow = torch.zeros(rows + 1, dtype=dtype, device=dense.device)
        crow[1:] = stored.sum(1).cumsum(0)
        pattern = Pattern(crow, col.to(dtype), (rows, columns))
        values = dense.flatten(-2) if rows * columns else dense.reshape(*dense.shape[:-2], 0)
        return cls._of(pattern, values.index_select(-1, row * columns + col))

    @classmethod
    def from_sparse_csr(cls, tensor: Tensor) -> BatchedCSR:
        """Of a ``torch.sparse_csr`` tensor of two dimensions, or of three where every sample has the same pattern.
        The matrix shares the tensor's memory, and its pattern is found again while anything holds it."""
        _check_tensor("tensor", tensor)
        if tensor.layout != torch.sparse_csr:
            raise TypeError(f"BatchedCSR: tensor must have the layout torch.sparse_csr, got {tensor.layout}")
        if tensor.dim() not in (2, 3) or tensor.dense_dim():
            raise ValueError(
                f"BatchedCSR: tensor must be (rows, columns) or (B, rows, columns), got {tuple(tensor.shape)}"
            )
        _check_dtype(tensor.dtype)
        crow, col, values = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        shape = tuple(tensor.shape[-2:])
        batch = tensor.shape[0] if tensor.dim() == 3 else None
        if batch == 0:
            return cls(crow.new_zeros(shape[0] + 1), col.new_zeros(0), values.new_zeros(0, 0), shape)
        # torch makes new tensors of the indices at every call.
        place = (crow.data_ptr(), col.data_ptr(), crow.dtype, crow.device, col.shape, shape)
        found = _of_torch.get(place)
        if found is not None and found.versions == (version(crow), version(col)):
            return cls._of(found, values)
        if batch is not None:
            if not (torch.equal(crow, crow[:1].expand_as(crow)) and torch.equal(col, col[:1].expand_as(col))):
                raise ValueError("BatchedCSR: the samples of tensor must have one pattern, got different ones")
            crow, col = crow[0], col[0]
        made = cls(crow, col, values, shape)
        if made.crow is crow:
            _of_torch[place] = made._pattern
        return made

    def mv(self, x: Tensor) -> Tensor:
        """The product with one vector per sample.

        Args:
            x: ``(columns,)`` or ``(B, columns)``, of the dtype and on the device of the matrix.

        Returns:
            ``(rows,)`` or, where matrix or vector has a batch, ``(B, rows)``. Summed in float32 in the half types.

        Raises:
            TypeError: no tensor, another dtype.
            ValueError: sizes or batches that do not fit.
            RuntimeError: another device.
        """
        self._check_operand("mv", x)
        if x.dim() not in (1, 2) or x.shape[-1] != self.shape[1]:
            raise ValueError(
                f"BatchedCSR.mv: x must be (columns,) or (B, columns) with {self.shape[1]} columns, "
                f"got {tuple(x.shape)}"
            )
        self._check_batch("mv", x.shape[0] if x.dim() == 2 else None)
        if self._pattern.diagonal:
            return self._values * x
        return self._multiply(x.unsqueeze(-1)).squeeze(-1)

    def __matmul__(self, other: Tensor | BatchedCSR) -> Tensor | BatchedCSR:
        if isinstance(other, BatchedCSR):
            return plan_matmul(self, other)(self, other)
        if not isinstance(other, Tensor):
            return NotImplemented
        self._check_operand("@", other)
        if other.dim() not in (1, 2, 3) or other.shape[-2 if other.dim() > 1 else 0] != self.shape[1]:
            raise ValueError(
                f"BatchedCSR.@: the right operand must be (columns,), (columns, k) or (B, columns, k) with "
                f"{self.shape[1]} columns, got {tuple(other.shape)}"
            )
        if other.dim() == 1:
            return self.mv(other)
        self._check_batch("@", other.shape[0] if other.dim() == 3 else None)
        return self._multiply(other)

    def _multiply(self, x: Tensor) -> Tensor:
        values, pattern = self._values, self._pattern
        graph = torch.is_grad_enabled() and (values.requires_grad or x.requires_grad)
        return multiply(pattern.tensors, pattern.transposed if graph else [], values, x)

    def _check_operand(self, op: str, x: object) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"BatchedCSR.{op}: the right operand must be a Tensor, got {type(x).__name__}")
        check_dense(f"BatchedCSR.{op}", "the right operand", x, "give one tensor")
        if x.dtype != self.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"BatchedCSR.{op}: the right operand must have the dtype {self.dtype}, got {x.dtype}")
        if x.device != self.device:
            raise RuntimeError(f"BatchedCSR.{op}: the right operand must be on {self.device}, got {x.device}")

    def _check_batch(self, op: str, batch: int | None) -> None:
        if batch is not None and self.batch_size is not None and batch != self.batch_size:
            raise ValueError(
                f"BatchedCSR.{op}: the right operand must have the batch of the matrix, {self.batch_size}, got {batch}"
            )

    def __repr__(self) -> str:
        return (
            f"BatchedCSR(shape={self.shape}, batch={self.batch_size}, nnz={self.nnz}, sparsity={self.sparsity:.5f}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    def __reduce__(self):
        return BatchedCSR, (self.crow, self.col, self._values, self.shape)


def _sorted(crow: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> tuple[Pattern, Tensor]:
    """The pattern of checked indices, and values on it: sorted within rows, duplicates summed."""
    pattern = Pattern(crow, col, shape)
    if col.shape[0] >= 2:
        row = pattern.rows
        falls = (row[1:] == row[:-1]) & (col[1:] <= col[:-1])
        if bool(falls.any()):
            return _sort(row, col, values, shape)
    narrow = index_dtype(*shape, pattern.nnz)
    if narrow == torch.int64 and crow.dtype == torch.int32:
        pattern = Pattern(crow.long(), col.long(), shape)
    elif not (crow.is_contiguous() and col.is_contiguous()):
        pattern = Pattern(crow.contiguous(), col.contiguous(), shape)
    return pattern, values


def _sort(row: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> tuple[Pattern, Tensor]:
    by_column = torch.argsort(col, stable=True)
    order = by_column[torch.argsort(row[by_column], stable=True)]
    row, sorted_col = row[order], col[order]
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = (row[1:] != row[:-1]) | (sorted_col[1:] != sorted_col[:-1])
    starts = first.nonzero().squeeze(1)
    dtype = torch.int64 if col.dtype == torch.int64 else index_dtype(*shape, starts.shape[0])
    crow = torch.zeros(shape[0] + 1, dtype=dtype, device=col.device)
    crow[1:] = torch.bincount(row[starts], minlength=shape[0]).cumsum(0)
    pattern = Pattern(crow, sorted_col[starts].to(dtype), shape)
    narrow = torch.int32 if col.shape[0] <= INT32_MAX else torch.int64
    ends = torch.cat([starts, starts.new_tensor([col.shape[0]])])
    return pattern, gather(values, ends.to(narrow), order.to(narrow))
