"""Planned products on a GPU: rows whose products are expanded in shared memory, and few columns, a lane for each."""

from __future__ import annotations

import pytest
import torch
from weft._sparse.plan import MatmulPlan, PlanTensors
from weft.sparse import BatchedCSR, conv2d_jacobian, plan_matmul

from tests.common import assert_close, in_a_cuda_graph, poisoned
from tests.sparse.test_batched_csr import random_csr
from tests.sparse.test_plan_matmul import dense, dtypes


def check_product(plan: MatmulPlan, a: BatchedCSR, b: BatchedCSR) -> None:
    """Its numbers, the same bits in every run, and what a sample alone gives."""
    with poisoned():
        got = plan(a, b)
    assert_close(got.to_dense(), dense(a) @ dense(b))
    assert torch.equal(got.values, plan(a, b).values)
    if got.batch_size is not None:
        x, y = (v[-1] if v.dim() == 2 else v for v in (a.values, b.values))
        assert torch.equal(got.values[-1], plan(a.with_values(x), b.with_values(y)).values)


def convolutions(device: str, batch: tuple) -> tuple:
    """Two pruned convolutions, whose product a GPU expands."""
    torch.manual_seed(0)
    weights = (torch.randn(s) * (torch.rand(s) < 0.4) for s in ((8, 2, 3, 3), (6, 8, 3, 3)))
    made = [conv2d_jacobian(w.to(device), (w.shape[1], 8, 8), padding=1, prune=True) for w in weights]
    sizes = ((J.nnz,) if n is None else (n, J.nnz) for J, n in zip(made, batch, strict=True))
    return tuple(J.with_values(torch.randn(s, device=device)) for J, s in zip(made, sizes, strict=True))


@pytest.mark.parametrize("batch", [(None, None), (3, None), (None, 2)], ids=str)
def test_what_a_plan_for_a_gpu_expands(batch: tuple) -> None:
    """Its lists lead to the same numbers, are shared, and take no more memory than a plan may; the CPU takes them."""
    a, b = convolutions("cpu", batch)
    plan = plan_matmul(a, b)
    *rows, info = torch.ops.weft.csr_matmul_plan(a._pattern.tensors, b._pattern.tensors, gpu=True)
    products, axpy, gather, expand = info.tolist()
    assert expand == products and not (axpy or gather) and plan.kinds.expand == 0
    patterns = [*plan._patterns[:4], *rows]
    assert_close(torch.ops.weft.csr_matmul(patterns, a.values, b.values), plan(a, b).values, 1e-6)
    pieces, segments, lists = (t.long() for t in rows[10:13])
    held = sum(t.nbytes for t in rows)
    assert held <= 3 * sum(J.crow.nbytes + J.col.nbytes + 4 * J.nnz for J in (a, b)) + 3 * 12 * plan.nnz
    left, right = segments.view(2, -1)
    if batch != (None, None):
        return
    found, where, lists = torch.zeros(plan.nnz), pieces.view(-1, 6), lists & 0xFFFF
    assert len(where[:, 2].unique()) < len(where)
    for element, segment, place, n, elements, count in where.tolist():
        sizes = [-(-count // 32), elements + 1, count]
        bases, starts, words = lists[place : place + sum(sizes)].split(sizes)
        places, own = words % 2048, segment + bases.repeat_interleave(32)[:count] + words // 2048
        assert int(own.max()) < segment + n
        number, factor = torch.arange(count) + right[own], a.values[left[own]]
        sums = torch.zeros(count)
        sums[places] = factor * b.values[number]
        owner = torch.repeat_interleave(torch.arange(elements), starts.diff())
        found[element : element + elements] = torch.zeros(elements).index_add(0, owner, sums)
    assert_close(found, plan(a, b).values, 1e-6)


@pytest.mark.cuda
@dtypes
@pytest.mark.parametrize("batch", [(None, None), (3, None), (None, 9), (5, 5)], ids=str)
def test_a_gpu_expands(batch: tuple, dtype: torch.dtype) -> None:
    a, b = (J.to(dtype) for J in convolutions("cuda", batch))
    plan = plan_matmul(a, b)
    assert plan.kinds.expand == plan.flops
    check_product(plan, a, b)
    graph, captured = in_a_cuda_graph(lambda: plan(a, b).values)
    a.values.normal_()
    graph.replay()
    assert torch.equal(captured, plan(a, b).values)


def few_columns(columns: int, batch: tuple, dtype: torch.dtype, device: str) -> tuple:
    a = random_csr(90, 300, batch[0], 0.4, dtype, device=device)
    return a, random_csr(300, columns, batch[1], 0.8, dtype, device=device)


@pytest.mark.parametrize(("columns", "narrow"), [(4, False), (10, True), (32, True), (33, False)])
def test_what_a_plan_for_a_gpu_knows_of_few_columns(columns: int, narrow: bool) -> None:
    """Where each row of b begins and which columns it has; every row accumulates then, and the CPU takes the plan."""
    a, b = few_columns(columns, (None, None), torch.float32, "cpu")
    *rows, info = torch.ops.weft.csr_matmul_plan(a._pattern.tensors, b._pattern.tensors, gpu=True)
    plan = PlanTensors.of([*plan_matmul(a, b)._patterns[:4], *rows])
    assert (plan.narrow.numel() > 0) == narrow
    assert_close(torch.ops.weft.csr_matmul(list(plan), a.values, b.values), plan_matmul(a, b)(a, b).values, 1e-6)
    if narrow:
        begins, bits = plan.narrow.view(-1, 2).T
        assert torch.equal(begins, b.crow[:-1]) and plan.accumulate.shape == (90,) and not info[1:].any()
        assert torch.equal(bits.unsqueeze(1) >> torch.arange(columns) & 1, (b.to_dense() != 0).int())


@pytest.mark.cuda
@dtypes
@pytest.mark.parametrize("columns", [6, 10, 32])
@pytest.mark.parametrize("batch", [(None, None), (3, None), (None, 9), (5, 5)], ids=str)
def test_a_gpu_multiplies_by_few_columns(batch: tuple, columns: int, dtype: torch.dtype) -> None:
    a, b = few_columns(columns, batch, dtype, "cuda")
    plan = plan_matmul(a, b)
    assert PlanTensors.of(plan._patterns).narrow.numel() == 600
    check_product(plan, a, b)
