"""Planned products: patterns, numbers, gradients, refusals, memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode
from weft import _C
from weft._sparse.reference import csr_matmul_reference
from weft.sparse import (
    BatchedCSR,
    conv1d_jacobian,
    conv2d_jacobian,
    diagonal_jacobian,
    linear_jacobian,
    max_pool2d_jacobian,
    plan_matmul,
    relu_jacobian,
)

from tests.common import DEVICES, DTYPES, assert_close, in_a_cuda_graph, pairs, poisoned
from tests.sparse.test_batched_csr import batches, random_csr

device = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
sizes = st.integers(0, 6)
AXPY, GATHER, ACCUMULATE, MIXED = "axpy", "gather", "accumulate", "mixed"


def dense(J: BatchedCSR) -> Tensor:
    return J.to_dense().double()


def pair(kind: str, batch: tuple, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple:
    """Two matrices whose product has rows of this kind, or of all."""
    torch.manual_seed(0)
    full, sparse = (lambda *shape: torch.ones(shape)), (lambda density, *shape: (torch.rand(shape) < density).float())
    a = {
        AXPY: lambda: torch.cat([full(7, 23), torch.eye(23)]),
        GATHER: lambda: sparse(0.15, 17, 23),
        ACCUMULATE: lambda: sparse(0.9, 9, 64),
    }
    b = {AXPY: lambda: full(23, 19), GATHER: lambda: sparse(0.05, 23, 90), ACCUMULATE: lambda: sparse(0.9, 64, 19)}
    kinds = [kind] if kind != MIXED else [AXPY, GATHER, ACCUMULATE, GATHER]
    found = []
    for parts, samples in ((a, batch[0]), (b, batch[1])):
        matrix = BatchedCSR.from_dense(torch.block_diag(*(parts[k]() for k in kinds)))
        shape = (matrix.nnz,) if samples is None else (samples, matrix.nnz)
        values = torch.randn(shape, dtype=torch.float64).to(dtype)
        found.append(matrix.to(dtype).with_values(values).to(device))
    return tuple(found)


KINDS = pytest.mark.parametrize("kind", [AXPY, GATHER, ACCUMULATE, MIXED])
BATCHES = pytest.mark.parametrize(
    "batch",
    [(None, None), (None, 3), (3, None), (3, 3), (0, 0), (9, None), (None, 9), (None, 20), (None, 37)],
    ids=str,
)


@device
@dtypes
@KINDS
@BATCHES
def test_products(batch: tuple, kind: str, dtype: torch.dtype, device: str) -> None:
    a, b = pair(kind, batch, dtype, device)
    plan = plan_matmul(a, b)
    used = {name for name, flops in plan.kinds._asdict().items() if flops}
    assert used == ({AXPY, GATHER, ACCUMULATE} if kind == MIXED else {kind}) and sum(plan.kinds) == plan.flops
    with poisoned():
        got = plan(a, b)
    assert got.crow is plan.crow and got.col is plan.col and got.dtype == dtype
    assert got.batch_size == (batch[1] if batch[0] is None else batch[0])
    assert_close(got.to_dense(), dense(a) @ dense(b))
    if got.batch_size is not None:
        assert got.values.shape == (got.batch_size, plan.nnz)
    assert torch.equal(got.values, (a @ b).values)
    double = plan(a.to(torch.float64), b.to(torch.float64))
    assert double.dtype == torch.float64 and double.col is plan.col


@device
@pytest.mark.parametrize("batch", [(None, None), (None, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("columns", [3, 8, 13, 27, 32, 33])
def test_rows_of_few_columns(columns: int, batch: tuple, device: str) -> None:
    """Of more products an element than a list takes."""
    a = random_csr(90, 300, batch[0], 0.4, torch.float32, device=device)
    b = random_csr(300, columns, batch[1], 0.8, torch.float32, device=device)
    plan = plan_matmul(a, b)
    assert plan.kinds.accumulate > 0.9 * plan.flops
    assert_close(plan(a, b).to_dense(), dense(a) @ dense(b))


@device
@pytest.mark.parametrize("batch", [(None, None), (None, 3), (2, 2)], ids=str)
def test_rows_that_are_one_row_of_the_other(batch: tuple, device: str) -> None:
    picks = BatchedCSR.from_dense(torch.eye(50, device=device)[torch.arange(400, device=device) // 3 % 50])
    a = picks.with_values(torch.randn(*([] if batch[0] is None else [batch[0]]), picks.nnz, device=device))
    b = random_csr(50, 90, batch[1], 0.6, torch.float32, device=device)
    plan = plan_matmul(a, b)
    assert plan.kinds.axpy == plan.flops
    assert_close(plan(a, b).to_dense(), dense(a) @ dense(b))


@device
@given(n=sizes, m=sizes, k=sizes, batch=batches, density=st.sampled_from([0.1, 0.5, 1.0]))
def test_any_product(device: str, n: int, m: int, k: int, batch: int | None, density: float) -> None:
    a, b = random_csr(n, m, batch, density, device=device), random_csr(m, k, None, density, device=device)
    plan = plan_matmul(a, b)
    assert_close(plan(a, b).to_dense(), dense(a) @ dense(b), 1e-14)
    stored = torch.zeros(n, m, dtype=torch.float64)
    row = torch.repeat_interleave(a.crow.diff().long()).cpu()
    stored[row, a.col.long().cpu()] = 1
    right = torch.zeros(m, k, dtype=torch.float64)
    right[torch.repeat_interleave(b.crow.diff().long()).cpu(), b.col.long().cpu()] = 1
    counts = stored @ right
    assert plan.shape == (n, k) and plan.nnz == int((counts > 0).sum()) and plan.flops == 2 * int(counts.sum())
    key = torch.repeat_interleave(plan.crow.diff().long()) * max(k, 1) + plan.col
    assert bool((key.diff() > 0).all()) and plan.crow.dtype == torch.int32


SHAPES = {
    "random": (40, 50, 60),
    "one row": (1, 200, 300),
    "one column": (300, 200, 1),
    "one inner": (50, 1, 70),
    "wide": (3, 20, 3000),
    "tall": (3000, 20, 3),
    "thin in the middle": (400, 2, 400),
    "thick in the middle": (4, 2000, 4),
}
STRUCTURES = ["scattered", "rows alike", "empty rows", "empty columns", "half full", "diagonal blocks"]


def structured(rows: int, columns: int, structure: str, batch: int | None) -> BatchedCSR:
    stored = torch.rand(rows, columns) < 0.1
    if structure == "rows alike":
        stored = stored[:1].expand(rows, columns).clone()
    elif structure == "empty rows":
        stored[torch.rand(rows) < 0.7] = False
    elif structure == "empty columns":
        stored[:, torch.rand(columns) < 0.7] = False
    elif structure == "half full":
        stored[: rows // 2] = True
    elif structure == "diagonal blocks":
        stored = (torch.arange(rows)[:, None] * 4 // rows) == (torch.arange(columns) * 4 // columns)
    found = BatchedCSR.from_dense(stored.double())
    return found.with_values(torch.randn(*(() if batch is None else (batch,)), found.nnz, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@device
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_torch_and_scipy(shape: str, structure: str, device: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    torch.manual_seed(0)
    n, m, k = SHAPES[shape]
    a, b = structured(n, m, structure, 2), structured(m, k, structure, None)
    plan = plan_matmul(a.to(device), b.to(device))
    got = plan(a.to(device), b.to(device)).to("cpu")
    right = sparse.csr_matrix((b.values.numpy(), b.col.numpy(), b.crow.numpy()), b.shape)
    for sample in range(2):
        one = a.with_values(a.values[sample])
        left = sparse.csr_matrix((one.values.numpy(), one.col.numpy(), one.crow.numpy()), one.shape)
        want = left @ right
        want.sort_indices()
        # scipy keeps every element that has a product, too.
        assert got.crow.tolist() == want.indptr.tolist() and got.col.tolist() == want.indices.tolist()
        assert_close(got.values[sample], torch.from_numpy(want.data), 1e-13)
        theirs = (one.to_sparse_csr() @ b.to_sparse_csr()).to_dense()
        assert_close(got.with_values(got.values[sample]).to_dense(), theirs, 1e-13)
    assert plan.memory <= 3 * sum(J.crow.nbytes + J.col.nbytes + 4 * J.nnz for J in (a, b, got))
    again = plan(a.to(device), b.to(device))
    assert torch.equal(again.values.cpu(), got.values)


@device
def test_a_product_with_a_diagonal(device: str) -> None:
    """The product with a diagonal has the other operand's pattern, the very same tensors."""
    a = random_csr(30, 40, 2, device=device)
    left, right = (relu_jacobian(torch.rand(2, n, dtype=torch.float64, device=device) - 0.5) for n in (30, 40))
    for x, y in ((a, right), (left, a)):
        plan = plan_matmul(x, y)
        assert plan.crow is a.crow and plan.col is a.col and plan.flops == 2 * a.nnz
        assert plan.memory == 0 if y is right else plan.memory <= 2 * (a.col.nbytes + a.crow.nbytes)
        assert torch.equal(plan(x, y).to_dense(), x.to_dense() @ y.to_dense())
    wide = BatchedCSR(a.crow.long(), a.col.long(), a.values, a.shape)
    assert (wide @ right).col is wide.col and (left @ wide).col.dtype == torch.int64
    assert_close((wide @ right).to_dense(), dense(a) @ dense(right), 1e-14)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    torch.manual_seed(0)
    a, b = random_csr(300, 200, 3, 0.2, torch.float32), random_csr(200, 700, None, 0.2, torch.float32)
    plan, before = plan_matmul(a, b), torch.get_num_threads()
    x = torch.randn(3, 700)
    found = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            found.append((plan(a, b).values, a.mv(x[:, :200]), b.mv(x)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(s, t) for s, t in zip(*found, strict=True))


def test_a_zero_that_has_a_product_is_stored() -> None:
    a = BatchedCSR(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([1.0, -1.0]), (1, 2))
    b = BatchedCSR(torch.tensor([0, 1, 2]), torch.tensor([0, 0]), torch.tensor([1.0, 1.0]), (2, 1))
    assert (a @ b).nnz == 1 and (a @ b).values.tolist() == [0.0]


@device
@KINDS
@pytest.mark.parametrize("batch", [(None, None), (None, 2), (2, None), (2, 2)], ids=str)
def test_gradients(batch: tuple, kind: str, device: str) -> None:
    a, b = pair(kind, batch, device=device)
    leaves = (a.values.requires_grad_(), b.values.requires_grad_())
    plan = plan_matmul(a, b)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return plan(a.with_values(x), b.with_values(y)).values

    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)
    (out := f(*leaves)).sum().backward()
    assert out.grad_fn is not None and leaves[0].grad.shape == a.values.shape


@device
@KINDS
def test_opcheck(kind: str, device: str) -> None:
    a, b = pair(kind, (None, 2), torch.float32, device)
    plan = plan_matmul(a, b)
    x, y = a.values.requires_grad_(), b.values.requires_grad_()
    g = torch.randn(2, plan.nnz, device=device, requires_grad=True)
    opcheck(torch.ops.weft.csr_matmul, (plan._patterns, x, y))
    opcheck(torch.ops.weft.csr_matmul_left, (plan._patterns, y, g, True))
    opcheck(torch.ops.weft.csr_matmul_right, (plan._patterns, x, g, False))
    assert_close(
        torch.ops.weft.csr_matmul(plan._patterns, x, y),
        csr_matmul_reference(plan._patterns, plan.shape[1], x.double(), y.double()),
    )


@device
def test_opcheck_of_the_symbolic_phase(device: str) -> None:
    a, b = random_csr(4, 5, device=device), random_csr(5, 3, device=device)
    opcheck(
        torch.ops.weft.csr_matmul_plan,
        (a._pattern.tensors, b._pattern.tensors),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@device
def test_vmap_and_function_transforms(device: str) -> None:
    for batch in (None, 2):
        a, b = pair(GATHER, (batch, None), device=device)
        plan = plan_matmul(a, b)

        def f(x: Tensor, y: Tensor, a=a, b=b, plan=plan) -> Tensor:
            return plan(a.with_values(x), b.with_values(y)).values

        x = torch.stack([a.values, 2 * a.values, a.values + 1])

        def mapped(v: Tensor, plan=plan, b=b) -> Tensor:
            return torch.ops.weft.csr_matmul(plan._patterns, v, b.values)

        got = torch.func.vmap(mapped)(x)
        assert_close(got, torch.stack([f(v, b.values) for v in x]), 1e-14)
        leaves = (a.values.clone().requires_grad_(), b.values.clone().requires_grad_())
        out = f(*leaves)
        g = torch.randn(3, *out.shape, dtype=torch.float64, device=device)

        def backward(g: Tensor, out=out, leaves=leaves) -> tuple:
            return torch.autograd.grad(out, leaves, g, retain_graph=True)

        for i, parts in enumerate(zip(*torch.func.vmap(backward)(g), strict=True)):
            for part, want in zip(parts, backward(g[i]), strict=True):
                assert_close(part, want, 1e-13)
        want = torch.autograd.grad(f(*leaves).sin().sum(), leaves)
        found = torch.func.grad(lambda x, y, f=f: f(x, y).sin().sum(), (0, 1))(a.values, b.values)
        for part, w in zip(found, want, strict=True):
            assert_close(part, w, 1e-13)


@device
@KINDS
def test_two_runs_give_the_same_bits_and_bad_samples_stay_alone(kind: str, device: str) -> None:
    a, b = pair(kind, (4, 4), torch.float32, device)
    plan = plan_matmul(a, b)
    leaves = (a.values.requires_grad_(), b.values.requires_grad_())
    runs = []
    for _ in range(2):
        out = plan(a, b).values
        runs.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    assert all(torch.equal(s, t) for s, t in zip(*runs, strict=True))
    values = a.values.detach().clone()
    values[2] = float("nan")
    got = plan(a.with_values(values), b).values
    assert torch.equal(got[[0, 1, 3]], runs[0][0][[0, 1, 3]]) and got[2].isnan().all()


@device
def test_patterns_of_layers(device: str) -> None:
    """The pairs of a small net's chain, and what their plans may hold."""
    x = torch.randn(2, 2, 8, 8, device=device, dtype=torch.float64)
    conv = conv2d_jacobian(torch.randn(4, 2, 3, 3, dtype=torch.float64, device=device), (2, 8, 8), padding=1)
    hidden = torch.randn(2, 4, 8, 8, dtype=torch.float64, device=device)
    relu, pool = relu_jacobian(hidden), max_pool2d_jacobian(hidden, 2)
    after = conv2d_jacobian(torch.randn(5, 4, 3, 3, dtype=torch.float64, device=device), (4, 4, 4), padding=1)
    full = linear_jacobian(torch.randn(10, 80, dtype=torch.float64, device=device))
    for a, b in ((conv, relu), (conv, pool), (relu, pool), (pool, after), (after, full), (conv @ relu, pool @ after)):
        plan = plan_matmul(a, b)
        product = plan(a, b)
        assert_close(product.to_dense(), dense(a) @ dense(b), 1e-13)
        parts = (a, b, product)
        held = sum(J.crow.nbytes + J.col.nbytes + 4 * J.nnz for J in parts)
        assert plan.memory <= 3 * held
    assert x.shape[0] == relu.batch_size


def sharing(kind: str, dtype: torch.dtype, device: str) -> tuple[BatchedCSR, BatchedCSR]:
    """Matrices like those of sliding windows, many of whose product's rows are made in the same way."""
    weight = torch.randn(16, 2, 3, 5, dtype=dtype, device=device)
    conv = conv2d_jacobian(weight, (2, 4, 40), padding=(1, 2))
    hidden = torch.randn(3, 16, 4, 40, dtype=dtype, device=device)
    if kind == "gather":
        return conv, relu_jacobian(hidden)
    if kind == "pool":
        return conv, max_pool2d_jacobian(hidden, 2)
    draw = torch.Generator().manual_seed(1)
    sizes = (((6, 2, 3), 0.3), ((60, 6, 3), 0.2))
    weights = [(torch.rand(size, generator=draw) < part).to(device, dtype) for size, part in sizes]
    return tuple(conv1d_jacobian(w * torch.randn_like(w), (w.shape[1], 50), padding=1, prune=True) for w in weights)


@device
@pairs(
    kind=["gather", "pool", "rows of b"],
    batch=[(None, None), (None, 3), (5, None), (2, 2), (None, 17)],
    index=[torch.int32, torch.int64],
    dtype=DTYPES,
)
def test_rows_that_share_lists(kind: str, batch: tuple, index: torch.dtype, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    a, b = sharing(kind, torch.float64, device)
    a, b = (
        BatchedCSR(J.crow.to(index), J.col.to(index), values.to(device, dtype), J.shape)
        for J, values in (
            (J, torch.randn((J.nnz,) if n is None else (n, J.nnz), dtype=torch.float64))
            for J, n in zip((a, b), batch, strict=True)
        )
    )
    plan = plan_matmul(a, b)
    with poisoned():
        got = plan(a, b)
    assert torch.equal(got.values, plan(a, b).values)
    for n in (0, -1):  # a sample by itself has the same bits, and takes little memory where it is dense
        x, y, z = (v[n] if v.dim() == 2 else v for v in (a.values, b.values, got.values))
        a_n, b_n = a.with_values(x), b.with_values(y)
        assert torch.equal(z, plan(a_n, b_n).values)
        assert_close(got.with_values(z).to_dense(), dense(a_n) @ dense(b_n))
    _, _, _, starts, left, right, shared, *_ = plan._patterns[6:]
    if device == "cuda" and kind != "pool":
        assert shared.numel() == 0
        return
    gather = plan.kinds.gather // 2
    # Of one product each, starts are left out, and left where it is in order.
    assert 0 < shared.numel() + starts.numel() + left.numel() + right.numel() <= (2 * gather + plan.nnz) // 4
    assert (starts.numel() == 0) == (left.numel() == 0) == (kind == "gather")
    of_rows = shared.numel() < 2 * a.shape[0] - 50
    assert of_rows == (kind == "rows of b") and bool(plan.kinds.axpy) == of_rows


@pytest.mark.parametrize("kind", ["gather", "pool", "rows of b"])
def test_what_a_plan_for_a_gpu_shares(kind: str) -> None:
    """What saves more bytes than it has threads wait; the CPU takes either plan."""
    torch.manual_seed(0)
    a, b = sharing(kind, torch.float64, "cpu")
    plan = plan_matmul(a, b)
    *rows, _ = torch.ops.weft.csr_matmul_plan(a._pattern.tensors, b._pattern.tensors, gpu=True)
    starts, shared = rows[5], rows[8]
    assert bool(shared.numel()) == (kind == "pool")
    # One product each: the left operand's own col is the list.
    assert (starts.numel() == 0) == (kind == "gather")
    patterns = [*plan._patterns[:4], *rows]
    assert torch.equal(torch.ops.weft.csr_matmul(patterns, a.values, b.values), plan(a, b).values)


def test_columns_are_kept_while_there_is_memory_for_them() -> None:
    kept = _C._testing.sparse_rows_kept
    assert kept([3, 4, 0, 2, 1], 4 * 6) == [True, False, True, True, True]
    assert kept([4, 2, 1], 4 * 6 + 3) == [True, True, False]
    assert kept([1, 0], 0) == [False, True] and kept([], 1 << 40) == []


@pytest.mark.parametrize("bytes", [0, 1 << 12, 1 << 20])
def test_a_plan_is_the_same_whatever_columns_are_kept(bytes: int) -> None:
    """None, some, or all of those that several threads find."""
    torch.manual_seed(0)
    a, b = (random_csr(1000, 1000, density=0.03) for _ in range(2))
    patterns = (a._pattern.tensors, b._pattern.tensors)
    want = torch.ops.weft.csr_matmul_plan(*patterns)
    before = _C._testing.sparse_kept_bytes(bytes)
    try:
        found = torch.ops.weft.csr_matmul_plan(*patterns)
    finally:
        assert _C._testing.sparse_kept_bytes(before) == bytes
    assert want[1].numel() > 1 << 17
    assert all(torch.equal(f, w) for f, w in zip(found, want, strict=True))


@pytest.mark.cuda
def test_a_plan_for_a_cpu_is_refused_on_a_gpu() -> None:
    a, b = sharing("gather", torch.float64, "cuda")
    patterns = plan_matmul(a, b)._patterns[:4]
    *rows, _ = torch.ops.weft.csr_matmul_plan(patterns[:2], patterns[2:], gpu=False)
    with pytest.raises(ValueError, match="plan for a GPU"):
        torch.ops.weft.csr_matmul([*patterns, *rows], a.values, b.values)


@device
@pytest.mark.parametrize("kind", ["gather", "pool", "rows of b"])
def test_what_rows_that_share_lists_hold(kind: str, device: str) -> None:
    torch.manual_seed(0)
    a, b = sharing(kind, torch.float64, device)
    plan = plan_matmul(a, b)
    rows = 2 * a.shape[0] * 4
    pattern = 0 if plan.crow is a.crow else plan.crow.nbytes + plan.col.nbytes
    if device == "cpu" or kind == "pool":
        assert plan.memory - pattern - rows < (2 * plan.flops + 4 * plan.nnz) // 4
    with FlopCounterMode(display=False) as counter:
        plan(a, b)
    assert counter.get_total_flops() == plan.flops * (b.batch_size or 1)
    leaves = (a.values.requires_grad_(), b.values.requires_grad_())

    def f(x: Tensor, y: Tensor) -> Tensor:
        return plan(a.with_values(x), b.with_values(y)).values

    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    lists, own = plan.memory - pattern, plan.crow.nbytes + plan.col.nbytes
    # A pattern that was stored does not know that it is diagonal, whose list is then a copy of the columns.
    assert pickle.loads(pickle.dumps(plan)).memory - lists in (0, own, own + plan.col.nbytes)


@device
def test_few_rows_and_uneven_ones_share_no_lists(device: str) -> None:
    """Their threads would have nobody to share a long row with."""
    few = linear_jacobian(torch.randn(3000, 16, device=device))
    long = torch.zeros(200, 20_000, dtype=torch.bool, device=device)
    long[:, :70] = True
    uneven = long.clone()
    uneven[0] = True
    for a, shares in (
        (few, False),
        (BatchedCSR.from_dense(long.float()), True),
        (BatchedCSR.from_dense(uneven.float()), False),
    ):
        b = diagonal_jacobian(torch.randn(2, a.shape[1], device=device))
        plan = plan_matmul(a, b)
        assert bool(plan._patterns[12].numel()) == (shares and device == "cpu")
        assert_close(plan(a, b).to_dense(), dense(a) * b.values.double().unsqueeze(1))


@device
@pytest.mark.parametrize("batch", [(None, None), (3, 3), (None, 3), (3, None)], ids=str)
@pytest.mark.parametrize("size", [1, 8, 1023])
def test_products_of_elements_in_order(size: int, batch: tuple, device: str) -> None:
    """A diagonal and a matrix with one element a row need no list."""
    values = [torch.randn(*([] if n is None else [n]), size, device=device) for n in batch]
    left = diagonal_jacobian(values[0].reshape(-1, size)[:1]).with_values(values[0])
    crow = torch.arange(size + 1, dtype=torch.int32, device=device)
    right = BatchedCSR(crow, crow[:-1] // 3, values[1], (size, (size + 2) // 3))
    for x, y in ((left, right), (left, left.with_values(values[1]))):
        plan = plan_matmul(x, y)
        assert plan.memory == 0 and plan.flops == 2 * size and sum(t.numel() for t in plan._patterns[6:]) == 0
        with poisoned():
            got = plan(x, y)
        assert torch.equal(got.values, values[0] * values[1]) and got.col is y.col
        with FlopCounterMode(display=False) as counter:
            plan(x, y)
        assert counter.get_total_flops() == plan.flops * (got.batch_size or 1)
        # Values that begin where no vector does.
        moved = [torch.cat([v.new_zeros(1), v.reshape(-1)])[1:].view(v.shape) for v in (x.values, y.values)]
        assert torch.equal(plan(x.with_values(moved[0]), y.with_values(moved[1])).values, got.values)


@device
def test_one_plan_for_one_pair_of_patterns(device: str) -> None:
    a, b = pair(GATHER, (None, None), device=device)
    plan = plan_matmul(a, b)
    assert plan_matmul(a.with_values(2 * a.values), b) is plan
    assert (a @ b).col is plan.col


@device
def test_equal_patterns_are_compared_once(device: str) -> None:
    a, b = pair(GATHER, (None, None), device=device)
    plan = plan_matmul(a, b)
    again = BatchedCSR(a.crow.clone(), a.col.clone(), a.values, a.shape)
    assert torch.equal(plan(again, b).values, plan(a, b).values)
    assert again._pattern in plan._equal[0]
    other = random_csr(*a.shape, density=0.5, device=device)
    with pytest.raises(ValueError, match="a must have the planned pattern"):
        plan(other, b)
    with pytest.raises(ValueError, match="b must have the planned pattern"):
        plan(a, random_csr(*b.shape, density=0.5, device=device))
    assert torch.equal(plan(a, b).values, plan(again, b).values)


@device
def test_a_plan_is_copied_and_pickled(device: str) -> None:
    """With the matrices it is for, and apart from them."""
    a, b = pair(MIXED, (None, 2), device=device)
    plan = plan_matmul(a, b)
    want = plan(a, b)
    assert copy.copy(plan) is plan and copy.deepcopy(plan) is plan
    held, a2, b2 = copy.deepcopy([plan, a, b])
    assert torch.equal(held(a2, b2).values, want.values)
    loaded = pickle.loads(pickle.dumps(plan))
    assert loaded.shape == plan.shape and loaded.kinds == plan.kinds and loaded.memory == plan.memory
    assert torch.equal(loaded(a, b).values, want.values)
    loaded, a2, b2 = pickle.loads(pickle.dumps([plan, a, b]))
    assert torch.equal(loaded(a2, b2).to_dense(), want.to_dense()) and plan_matmul(a2, b2) is loaded


def test_index_dtypes() -> None:
    a, b = random_csr(4, 5, index=torch.int64), random_csr(5, 3)
    assert (a @ b).col.dtype == torch.int64 and (b.with_values(b.values) @ random_csr(3, 2)).col.dtype == torch.int32
    assert_close((a @ b).to_dense(), dense(a) @ dense(b), 1e-14)
    wide = BatchedCSR(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 2**33))
    assert (BatchedCSR(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1)) @ wide).shape == (1, 2**33)


def test_too_many_products_are_refused_in_one_sentence() -> None:
    n = 300_000
    column = BatchedCSR(torch.arange(n + 1), torch.zeros(n, dtype=torch.int64), torch.ones(n), (n, 1))
    row = BatchedCSR(torch.tensor([0, n]), torch.arange(n), torch.ones(n), (1, n))
    with pytest.raises(RuntimeError, match="takes 90000000000 scalar products"):
        plan_matmul(column, row)


a43, b35 = random_csr(4, 3, 2, dtype=torch.float32), random_csr(3, 5, dtype=torch.float32)
BAD = {
    "dense": (lambda: plan_matmul(a43, torch.zeros(3, 5)), TypeError, "b must be a BatchedCSR, got Tensor"),
    "sizes": (lambda: plan_matmul(a43, random_csr(4, 5)), ValueError, "do not chain"),
    "batches": (lambda: plan_matmul(a43, random_csr(3, 5, 3)), ValueError, "batch of a, 2, got 3"),
    "batches of a call": (
        lambda: plan_matmul(a43, b35)(a43, b35.with_values(torch.zeros(3, b35.nnz))), ValueError, "batch of a",
    ),
    "dtypes of a call": (lambda: plan_matmul(a43, b35)(a43, b35.to(torch.float64)), TypeError, "dtype of a"),
    "a call with dense": (lambda: plan_matmul(a43, b35)(a43.to_dense(), b35), TypeError, "a must be a BatchedCSR"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=f"plan_matmul: .*{message}"):
        call()


@pytest.mark.cuda
def test_capture() -> None:
    for kind in (AXPY, GATHER, ACCUMULATE, MIXED):
        a, b = pair(kind, (3, None), torch.float32, "cuda")
        plan = plan_matmul(a, b)
        graph, captured = in_a_cuda_graph(lambda plan=plan, a=a, b=b: plan(a, b).values)
        a.values.normal_()
        b.values.normal_()
        graph.replay()
        assert torch.equal(captured, plan(a, b).values)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [32, 31])
@pytest.mark.parametrize("batch", [9, 20, 37])
@dtypes
def test_large_products_that_a_left_operand_shares(dtype: torch.dtype, batch: int, size: int) -> None:
    """The right operand is laid out in the result first: the same bits as one sample by itself, again, and in a CUDA
    graph; numbers of a sample that begin anywhere."""
    torch.manual_seed(0)
    conv = conv2d_jacobian(torch.randn(33, 3, 3, 3, device="cuda").to(dtype), (3, size, size), padding=1)
    hidden = torch.randn(batch, 33, size, size, device="cuda").to(dtype)
    for right in (diagonal_jacobian(hidden), max_pool2d_jacobian(hidden, 2)):
        right = right.with_values(torch.randn(right.values.shape, device="cuda").to(dtype))
        plan = plan_matmul(conv, right)
        with poisoned():
            got = plan(conv, right).values
        for values, product in zip(right.values, got, strict=True):
            assert torch.equal(product, plan(conv, right.with_values(values)).values)
        graph, captured = in_a_cuda_graph(lambda plan=plan, right=right: plan(conv, right).values)
        right.values.normal_()
        graph.replay()
        assert torch.equal(captured, plan(conv, right).values)


@pytest.mark.cuda
def test_long_rows() -> None:
    """Rows of the product wider than the window of sums in shared memory."""
    a, b = random_csr(5, 120, 2, 0.9, torch.float32, "cuda"), random_csr(120, 40_000, None, 0.3, torch.float32, "cuda")
    plan = plan_matmul(a, b)
    assert plan.kinds.accumulate
    assert_close(plan(a, b).to_dense(), dense(a) @ dense(b))


@pytest.mark.cuda
def test_devices_that_differ() -> None:
    with pytest.raises(RuntimeError, match="device of a"):
        plan_matmul(a43, b35.to("cuda"))
    plan = plan_matmul(a43, b35)
    with pytest.raises(RuntimeError, match="device"):
        plan(a43.to("cuda"), b35.to("cuda"))


def test_diagonals() -> None:
    d, e = (diagonal_jacobian(torch.randn(3, 5, dtype=torch.float64)) for _ in range(2))
    assert torch.equal((d @ e).values, d.values * e.values)
