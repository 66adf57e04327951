"""BatchedCSR: construction, conversions, products with vectors and matrices; and the ops beneath."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from weft._sparse.reference import conv_values_reference, csr_mm_reference, csr_sampled_mm_reference
from weft._sparse.windows import convolution
from weft.sparse import BatchedCSR, conv2d_jacobian

from tests.common import DEVICES, DTYPES, assert_close, poisoned

device = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
indices = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)


def random_csr(
    rows: int,
    columns: int,
    batch: int | None = None,
    density: float = 0.4,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    index: torch.dtype = torch.int32,
) -> BatchedCSR:
    stored = torch.rand(rows, columns) < density
    crow = torch.zeros(rows + 1, dtype=index)
    crow[1:] = stored.sum(1).cumsum(0)
    col = stored.nonzero()[:, 1].to(index)
    values = torch.randn(*(() if batch is None else (batch,)), col.shape[0], dtype=torch.float64)
    return BatchedCSR(crow.to(device), col.to(device), values.to(device, dtype), (rows, columns))


shapes = st.tuples(st.integers(0, 6), st.integers(0, 6))
batches = st.sampled_from([None, 0, 1, 3])


# Construction ---------------------------------------------------------------------------------------------------------


@device
def test_sorted_input_is_kept(device: str) -> None:
    crow = torch.tensor([0, 2, 2, 3], device=device)
    col, values = torch.tensor([0, 3, 1], device=device), torch.tensor([1.0, 2, 3], device=device)
    J = BatchedCSR(crow, col, values, torch.Size((3, 4)))
    assert J.crow is crow and J.col is col and J.values is values
    assert J.shape == (3, 4) and type(J.shape) is tuple and J.nnz == 3 and J.batch_size is None
    assert J.sparsity == 0.75 and J.dtype == torch.float32 and J.device == crow.device
    assert (
        repr(J)
        == f"BatchedCSR(shape=(3, 4), batch=None, nnz=3, sparsity=0.75000, dtype=torch.float32, device={J.device})"
    )
    other = J.with_values(torch.randn(5, 3, device=device).half())
    assert other.crow is crow and other.col is col and other.batch_size == 5 and other.dtype == torch.float16
    assert J.to_dense().tolist() == [[1, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 0]]


@device
@indices
@given(shape=shapes, batch=batches, nnz=st.integers(0, 20))
def test_any_order_and_duplicates(device: str, index: torch.dtype, shape: tuple, batch: int | None, nnz: int) -> None:
    rows, columns = shape
    nnz = nnz if rows and columns else 0
    row = torch.randint(max(rows, 1), (nnz,)).sort().values
    col = torch.randint(max(columns, 1), (nnz,))
    crow = torch.zeros(rows + 1, dtype=index)
    crow[1:] = torch.bincount(row, minlength=rows).cumsum(0)
    values = torch.randn(*(() if batch is None else (batch,)), nnz, dtype=torch.float64, device=device)
    values.requires_grad_()
    J = BatchedCSR(crow.to(device), col.to(device, index), values, shape)
    want = torch.zeros(*values.shape[:-1], rows * columns, dtype=torch.float64, device=device)
    flat = (row * columns + col).to(device)
    want = (
        want.index_add(-1, flat, values).unflatten(-1, shape) if rows * columns else want.view(*want.shape[:-1], *shape)
    )
    assert_close(J.to_dense(), want, 1e-14)
    key = torch.repeat_interleave(J.crow.diff().long()) * columns + J.col
    assert bool((key.diff() > 0).all()) and J.crow.dtype == J.col.dtype == index
    if values.numel():
        g = torch.randn_like(want)
        found, expected = (torch.autograd.grad(t, values, g)[0] for t in (J.to_dense(), want))
        assert_close(found, expected, 1e-14)


def test_duplicates_are_summed_in_float32() -> None:
    values = torch.ones(3000, dtype=torch.float16)
    J = BatchedCSR(torch.tensor([0, 3000]), torch.zeros(3000, dtype=torch.int64), values, (1, 1))
    assert J.values.tolist() == [3000.0]


c, k, v = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2)
BAD = {
    "crow is a list": (([0, 1, 2], k, v, (2, 2)), TypeError, "crow must be a Tensor, got list"),
    "values are a list": ((c, k, [1.0, 1.0], (2, 2)), TypeError, "values must be a Tensor, got list"),
    "int16": ((c.short(), k.short(), v, (2, 2)), TypeError, "int32 or int64, got torch.int16"),
    "two index dtypes": ((c, k.int(), v, (2, 2)), TypeError, "one dtype"),
    "integer values": ((c, k, v.long(), (2, 2)), TypeError, "values must be float16"),
    "complex values": ((c, k, v.cfloat(), (2, 2)), TypeError, "values must be float16"),
    "short crow": ((c[:2], k, v, (2, 2)), ValueError, r"crow must be \(rows \+ 1,\) = \(3,\)"),
    "crow of rank 2": ((c[None], k, v, (2, 2)), ValueError, "one dimension"),
    "crow begins at 1": ((c + 1, k, v, (2, 2)), ValueError, "rise from 0 to nnz = 2"),
    "crow ends early": ((torch.tensor([0, 1, 1]), k, v, (2, 2)), ValueError, "rise from 0"),
    "crow falls": ((torch.tensor([0, 2, 1, 2]), k, v, (3, 2)), ValueError, "rise from 0"),
    "column too large": ((c, k + 1, v, (2, 2)), ValueError, r"\[0, 2\), got 1 to 2"),
    "negative column": ((c, k - 1, v, (2, 2)), ValueError, r"\[0, 2\), got -1 to 0"),
    "too many values": ((c, k, torch.ones(3), (2, 2)), ValueError, r"nnz = 2, got \(3,\)"),
    "values of rank 3": ((c, k, torch.ones(1, 1, 2), (2, 2)), ValueError, r"\(B, nnz\)"),
    "shape of 3": ((c, k, v, (2, 2, 2)), ValueError, r"\(rows, columns\)"),
    "shape of fractions": ((c, k, v, (2.5, 2)), ValueError, r"\(rows, columns\)"),
    "shape is a number": ((c, k, v, 2), ValueError, r"\(rows, columns\)"),
    "negative shape": ((c, k, v, (2, -2)), ValueError, "negative"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_construction(case: str) -> None:
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=f"BatchedCSR: .*{message}"):
        BatchedCSR(*arguments)


def test_indices_that_were_written_to_are_checked_again() -> None:
    crow, col = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    kept = BatchedCSR(crow, col, torch.ones(2), (2, 2))
    col[0] = 7
    with pytest.raises(ValueError, match="col must lie"):
        BatchedCSR(crow, col, torch.ones(2), (2, 2))
    assert kept.nnz == 2


@pytest.mark.cuda
def test_mixed_devices() -> None:
    with pytest.raises(RuntimeError, match="on one device"):
        BatchedCSR(c, k.cuda(), v, (2, 2))
    with pytest.raises(RuntimeError, match="values must be on the device"):
        BatchedCSR(c, k, v.cuda(), (2, 2))
    with pytest.raises(RuntimeError, match="must be on"):
        BatchedCSR(c, k, v, (2, 2)).mv(v.cuda())


def test_immutable() -> None:
    J = random_csr(2, 2)
    with pytest.raises(AttributeError, match="immutable"):
        J.values = v
    with pytest.raises(AttributeError):
        J.other = 1


# Conversions ----------------------------------------------------------------------------------------------------------


@device
@given(shape=shapes, batch=batches)
def test_dense_and_back(device: str, shape: tuple, batch: int | None) -> None:
    J = random_csr(*shape, batch, device=device)
    again = BatchedCSR.from_dense(J.to_dense())
    assert again.shape == shape and again.batch_size == batch and torch.equal(again.to_dense(), J.to_dense())
    if batch != 0:
        assert torch.equal(again.col, J.col) and torch.equal(again.crow, J.crow)
    assert again.crow.dtype == torch.int32


@device
def test_from_dense_stores_what_some_sample_has(device: str) -> None:
    dense = torch.tensor([[[0.0, 1, 0], [0, float("nan"), 0]], [[2, 0, 0], [0, 0, 0]]], device=device).requires_grad_()
    J = BatchedCSR.from_dense(dense)
    assert J.crow.tolist() == [0, 2, 3] and J.col.tolist() == [0, 1, 1]
    (grad,) = torch.autograd.grad(J.values.sum(), dense)
    assert grad.tolist() == [[[1, 1, 0], [0, 1, 0]]] * 2
    for bad, error in ((torch.zeros(2), ValueError), (torch.zeros(2, 2).long(), TypeError), ([[1.0]], TypeError)):
        with pytest.raises(error, match="BatchedCSR: dense" if error is not TypeError else "BatchedCSR"):
            BatchedCSR.from_dense(bad)


@device
@indices
@pytest.mark.parametrize("batch", [None, 0, 1, 3])
def test_torch_sparse_csr_and_back(batch: int | None, index: torch.dtype, device: str) -> None:
    J = random_csr(4, 5, batch, device=device, index=index)
    torchs = J.to_sparse_csr()
    assert torchs.layout == torch.sparse_csr and torchs.crow_indices().dtype == index
    assert torchs.shape == (*(() if batch is None else (batch,)), 4, 5)
    if batch != 0:
        assert torch.equal(torchs.to_dense(), J.to_dense())
    again = BatchedCSR.from_sparse_csr(torchs)
    assert again.batch_size == batch and again.shape == (4, 5)
    if batch != 0:
        assert torch.equal(again.to_dense(), J.to_dense()) and again.col.dtype == index


def test_what_is_not_dense_is_refused() -> None:
    J, x = random_csr(4, 5), torch.ones(5, 5).to_sparse()
    for call in (lambda: J @ x, lambda: J.mv(x), lambda: J.with_values(x), lambda: BatchedCSR.from_dense(x)):
        with pytest.raises(TypeError, match=r"^BatchedCSR.*is sparse \(sparse_coo\)"):
            call()


def test_samples_with_different_patterns_are_refused() -> None:
    dense = torch.tensor([[[1.0, 0]], [[0, 1.0]]])
    with pytest.raises(ValueError, match="one pattern"):
        BatchedCSR.from_sparse_csr(dense.to_sparse_csr())
    with pytest.raises(TypeError, match="sparse_csr"):
        BatchedCSR.from_sparse_csr(dense)


@device
def test_to_and_detach(device: str) -> None:
    J = random_csr(3, 4, 2, device=device)
    J = J.with_values(J.values.requires_grad_())
    half = J.to(torch.float16)
    assert half.crow is J.crow and half.dtype == torch.float16 and half.values.requires_grad
    assert J.to("cpu").device.type == "cpu" and torch.equal(J.to("cpu").to_dense(), J.to_dense().cpu())
    assert J.to(device).col is J.col and J.to(device, torch.float32).dtype == torch.float32
    assert J.to(torch.zeros((), dtype=torch.float32, device=device)).dtype == torch.float32
    assert J.to(dtype=torch.float32, copy=True).dtype == torch.float32
    detached = J.detach()
    assert detached.col is J.col and not detached.values.requires_grad
    with pytest.raises(TypeError):
        J.to(torch.int32)
    with pytest.raises(TypeError):
        J.with_values(J.values.long())


@device
def test_pickle_copy_and_save(device: str) -> None:
    J = random_csr(3, 4, 2, device=device)
    file = io.BytesIO()
    torch.save(J, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(J)), copy.deepcopy(J), torch.load(file, weights_only=False)):
        assert type(again) is BatchedCSR and again.shape == J.shape and again.values is not J.values
        assert torch.equal(again.to_dense(), J.to_dense()) and again.col.dtype == J.col.dtype
    assert copy.copy(J).col is J.col


# Products -------------------------------------------------------------------------------------------------------------


@device
@dtypes
@indices
@pytest.mark.parametrize("batch", [(None, None), (None, 3), (3, None), (3, 3), (1, 1), (0, 0)], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (70, 40), (3, 300), (300, 3), (0, 4), (4, 0)], ids=str)
def test_products(shape: tuple, batch: tuple, index: torch.dtype, dtype: torch.dtype, device: str) -> None:
    J = random_csr(*shape, batch[0], dtype=dtype, device=device, index=index)
    lead = () if batch[1] is None else (batch[1],)
    x = torch.randn(*lead, shape[1], dtype=torch.float64).to(device, dtype)
    X = torch.randn(*lead, shape[1], 3, dtype=torch.float64).to(device, dtype)
    dense = J.to_dense().double()
    with poisoned():
        got = J.mv(x), J @ X
    assert all(t.dtype == dtype for t in got)
    assert_close(got[0], (dense @ x.double().unsqueeze(-1)).squeeze(-1))
    assert_close(got[1], dense @ X.double())
    if batch[1] is None:
        assert torch.equal(J @ x, got[0])


@device
@given(shape=shapes, batch=batches, x_batch=st.booleans(), k=st.integers(0, 3))
def test_any_product(device: str, shape: tuple, batch: int | None, x_batch: bool, k: int) -> None:
    J = random_csr(*shape, batch, device=device)
    lead = (2 if batch is None else batch,) if x_batch else ()
    X = torch.randn(*lead, shape[1], k, dtype=torch.float64, device=device)
    got = J @ X
    assert_close(got, J.to_dense() @ X, 1e-14)


@device
@pytest.mark.parametrize("batch", [(None, None), (None, 2), (2, None), (2, 2)], ids=str)
def test_gradients(batch: tuple, device: str) -> None:
    J = random_csr(4, 3, batch[0], device=device)
    x = torch.randn(*(() if batch[1] is None else (2,)), 3, 2, dtype=torch.float64, device=device)
    leaves = (J.values.requires_grad_(), x.requires_grad_())

    def matrix(values: Tensor, x: Tensor) -> Tensor:
        return J.with_values(values) @ x

    def vector(values: Tensor, x: Tensor) -> Tensor:
        return J.with_values(values).mv(x[..., 0])

    for f in (matrix, vector):
        assert torch.autograd.gradcheck(f, leaves)
        assert torch.autograd.gradgradcheck(f, leaves)


@device
def test_function_transforms(device: str) -> None:
    J = random_csr(4, 3, device=device)
    x = torch.randn(2, 3, dtype=torch.float64, device=device)

    def loss(values: Tensor, x: Tensor) -> Tensor:
        return J.with_values(values).mv(x).sin().sum()

    leaves = (J.values.clone().requires_grad_(), x.clone().requires_grad_())
    want = torch.autograd.grad(loss(*leaves), leaves)
    for transform in (torch.func.grad, torch.func.jacfwd):
        for g, w in zip(transform(loss, (0, 1))(J.values, x), want, strict=True):
            assert_close(g, w, 1e-13)


@device
@pytest.mark.parametrize("in_dims", [(0, None), (None, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("batch", [None, 2])
def test_vmap(in_dims: tuple, batch: int | None, device: str) -> None:
    J = random_csr(4, 3, batch, device=device)
    lead = () if batch is None else (batch,)
    values = torch.randn(*lead, J.nnz, dtype=torch.float64, device=device)
    x = torch.randn(*lead, 3, dtype=torch.float64, device=device)
    values, x = (
        t if dim is None else torch.stack([t, 2 * t, t + 1], dim) for t, dim in zip((values, x), in_dims, strict=True)
    )

    def f(values: Tensor, x: Tensor) -> Tensor:
        return torch.ops.weft.csr_mm(J._pattern.tensors, [], values, x.unsqueeze(-1))

    got = torch.func.vmap(f, in_dims)(values, x)
    parts = [(values if in_dims[0] is None else values.select(in_dims[0], i),
              x if in_dims[1] is None else x.select(in_dims[1], i)) for i in range(3)]  # fmt: skip
    assert_close(got, torch.stack([f(*part) for part in parts]), 1e-14)


@device
def test_vmap_of_gradients(device: str) -> None:
    """Mapping over the backward pass maps over csr_sampled_mm."""
    for batch in (None, 2):
        J = random_csr(4, 3, batch, device=device)
        values = J.values.requires_grad_()
        x = torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True)
        y = J.with_values(values).mv(x)
        g = torch.randn(5, *y.shape, dtype=torch.float64, device=device)

        def backward(g: Tensor, y: Tensor = y, leaves: tuple = (values, x)) -> tuple:
            return torch.autograd.grad(y, leaves, g, retain_graph=True)

        got = torch.func.vmap(backward)(g)
        for i in range(5):
            for a, b in zip(got, backward(g[i]), strict=True):
                assert_close(a[i], b, 1e-13)


@device
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_stays_alone(bad: float, device: str) -> None:
    for where in ("values", "x"):
        J = random_csr(50, 40, 6, density=0.3, dtype=torch.float32, device=device)
        x = torch.randn(6, 40, device=device)
        clean = J.mv(x)
        (J.values if where == "values" else x)[2] = bad
        got = J.mv(x)
        keep = [0, 1, 3, 4, 5]
        assert torch.equal(got[keep], clean[keep]) and not got[2].isfinite().all()


@device
@dtypes
def test_two_runs_give_the_same_bits(dtype: torch.dtype, device: str) -> None:
    J = random_csr(200, 100, 5, dtype=dtype, device=device)
    values = J.values.requires_grad_()
    x = torch.randn(5, 100, device=device).to(dtype).requires_grad_()
    runs = []
    for _ in range(2):
        y = J.with_values(values).mv(x)
        runs.append((y, *torch.autograd.grad(y, (values, x), torch.ones_like(y))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@device
def test_autocast_takes_the_widest_dtype(device: str) -> None:
    J = random_csr(4, 3, dtype=torch.float32, device=device)
    x = torch.randn(3, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(J.mv(x), J.mv(x.float())) and J.mv(x).dtype == torch.float32
        assert J.mv(x.bfloat16()).dtype == torch.float32


@device
def test_compiles(device: str) -> None:
    torch._dynamo.reset()
    J = random_csr(4, 3, device=device)
    tensors, transposed = J._pattern.tensors, J._pattern.transposed

    def f(values: Tensor, x: Tensor) -> Tensor:
        return torch.ops.weft.csr_mm(tensors, transposed, values, x.unsqueeze(-1)).sin().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3):
        leaves = [
            J.values.detach().clone().requires_grad_(),
            torch.randn(batch, 3, dtype=torch.float64, device=device, requires_grad=True),
        ]
        got, want = (torch.autograd.grad(g(*leaves), leaves) for g in (compiled, f))
        for g, w in zip(got, want, strict=True):
            assert_close(g, w, 1e-14)


PRODUCTS = {
    "x is no tensor": (lambda J: J.mv([1.0]), TypeError, "Tensor, got list"),
    "x of another dtype": (lambda J: J.mv(torch.zeros(3).half()), TypeError, "dtype"),
    "x of another size": (lambda J: J.mv(torch.zeros(4)), ValueError, r"3 columns, got \(4,\)"),
    "x of rank 3": (lambda J: J.mv(torch.zeros(1, 2, 3)), ValueError, r"\(B, columns\)"),
    "x of another batch": (lambda J: J.mv(torch.zeros(5, 3)), ValueError, "batch of the matrix, 2, got 5"),
    "X of another size": (lambda J: J @ torch.zeros(2, 4, 3), ValueError, "3 columns"),
    "X of another batch": (lambda J: J @ torch.zeros(5, 3, 1), ValueError, "batch"),
    "X of rank 4": (lambda J: J @ torch.zeros(1, 2, 3, 1), ValueError, "columns"),
    "an array": (lambda J: J @ np.zeros(3), TypeError, "BatchedCSR"),
    "a number": (lambda J: J @ 2, TypeError, "unsupported operand"),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_bad_products(case: str) -> None:
    call, error, message = PRODUCTS[case]
    with pytest.raises(error, match=message):
        call(random_csr(4, 3, 2, dtype=torch.float32))


# Ops ------------------------------------------------------------------------------------------------------------------


@device
@pytest.mark.parametrize("batch", [None, 2])
def test_opcheck(batch: int | None, device: str) -> None:
    J = random_csr(4, 3, batch, dtype=torch.float32, device=device)
    pattern, transposed = J._pattern.tensors, J._pattern.transposed
    values = J.values.requires_grad_()
    x = torch.randn(2, 3, 2, device=device, requires_grad=True)
    left = torch.randn(2, 4, 2, device=device, requires_grad=True)
    for t in (transposed, []):
        opcheck(torch.ops.weft.csr_mm, (pattern, t, values, x))
        opcheck(torch.ops.weft.csr_mm, (pattern, t, None, x))
        opcheck(torch.ops.weft.csr_sampled_mm, (pattern, t, left, x, batch is None))
    opcheck(torch.ops.weft.csr_mm, (transposed, pattern, values, left))
    opcheck(torch.ops.weft.csr_transpose, (*pattern, 3))


@pytest.mark.parametrize("columns", [-1, 2**31])
def test_more_columns_than_indices_tell(columns: int) -> None:
    pattern = torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^csr_transpose: columns must be at least 0 and a number of Int, got"):
        torch.ops.weft.csr_transpose(*pattern, columns)


@device
def test_opcheck_of_convolutions(device: str) -> None:
    windows = convolution("", (3, 4), (2, 3), (1, 2), (1, 1), (1, 1), "circular").to(torch.device(device))
    weight = torch.randn(4, 1, 6, device=device, requires_grad=True)
    opcheck(torch.ops.weft.conv_values, (weight, windows.tables, 2))
    grad = torch.randn(4 * windows.elements, device=device, requires_grad=True)
    opcheck(torch.ops.weft.conv_values_backward, (grad, windows.tables, 2, 2, 1))
    opcheck(torch.ops.weft.conv_pattern, (windows.tables, 2, 1, 2, windows.outputs, False))
    opcheck(torch.ops.weft.conv_pattern, (windows.tables, 2, 1, 2, windows.outputs, True))


@device
@given(shape=shapes, batch=st.sampled_from([None, 2]), k=st.integers(1, 3))
def test_ops_agree_with_the_references(device: str, shape: tuple, batch: int | None, k: int) -> None:
    J = random_csr(*shape, batch, device=device)
    pattern, transposed = J._pattern.tensors, J._pattern.transposed
    rows, columns = shape
    x, y = (torch.randn(2, n, k, dtype=torch.float64, device=device) for n in (columns, rows))
    for values in (J.values, None):
        got = torch.ops.weft.csr_mm(pattern, [], values, x)
        assert_close(got, csr_mm_reference(pattern, values, x), 1e-14)
        indexed = transposed if values is not None else transposed[:2]
        got = torch.ops.weft.csr_mm(indexed, [], values, y)
        assert_close(got, csr_mm_reference(indexed, values, y), 1e-14)
    for shared in (True, False):
        got = torch.ops.weft.csr_sampled_mm(pattern, [], y, x, shared)
        assert_close(got, csr_sampled_mm_reference(pattern, y, x, shared), 1e-14)


@device
def test_values_agree_with_the_reference(device: str) -> None:
    for mode in ("zeros", "replicate"):
        windows = convolution("", (5, 4), (3, 2), (2, 1), (2, 1), (1, 2), mode).to(torch.device(device))
        weight = torch.randn(6, 2, 6, dtype=torch.float64, device=device)
        got = torch.ops.weft.conv_values(weight, windows.tables, 3)
        assert_close(got, conv_values_reference(weight, windows.tables, 3), 1e-14)


def test_64_bit_indices_where_32_do_not_fit() -> None:
    wide = 2**31 + 5
    J = BatchedCSR(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), torch.ones(1), (1, wide)
    )
    assert J.col.dtype == J.crow.dtype == torch.int64
    windows = convolution("", (3,), (2,), (1,), (0,), (1,), "zeros")
    narrow, long = (torch.ops.weft.conv_pattern(windows.tables, 1, 2, 3, 2, w) for w in (False, True))
    assert long[1].dtype == torch.int64 and all(torch.equal(a.long(), b) for a, b in zip(narrow, long, strict=True))


@pytest.mark.cuda
def test_both_devices_agree() -> None:
    weight = torch.randn(6, 4, 3, 3)
    J = conv2d_jacobian(weight, (4, 9, 7), 2, 1)
    on_cuda = conv2d_jacobian(weight.cuda(), (4, 9, 7), 2, 1)
    for a, b in ((J.crow, on_cuda.crow), (J.col, on_cuda.col), (J.values, on_cuda.values)):
        assert torch.equal(a, b.cpu())


@pytest.mark.cuda
def test_capture_and_side_stream() -> None:
    J = random_csr(300, 200, 3, dtype=torch.float32, device="cuda")
    x = torch.randn(3, 200, device="cuda")
    J.mv(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = J.mv(x)
    x.normal_()
    J.values.normal_()
    graph.replay()
    assert torch.equal(captured, J.mv(x))
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        got = J.mv(late)
    stream.synchronize()
    assert torch.equal(got, captured)
