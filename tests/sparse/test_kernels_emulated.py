"""The sparse CUDA kernels on a processor, by tests/emulator, beside the CPU kernels: rows of every kind, empty ones,
batches that operands share or not, blocks that arrive at a barrier in any order."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft._sparse.jacobians import _windows
from weft.sparse import (
    BatchedCSR,
    MatmulPlan,
    avg_pool2d_jacobian,
    conv1d_jacobian,
    conv2d_jacobian,
    diagonal_jacobian,
    plan_matmul,
)

from tests import emulated
from tests.sparse.test_batched_csr import random_csr

pytestmark = emulated.MARKS
MATMUL, MM, CHAIN, CONV, POOL = range(5)
SOURCES = ["csr_matmul", "csr_mm", "csr_chain", "conv_values", "max_pool_values"]
GATHER, ROWS, EXPAND, LAUNCHES, CHAINED, CLUSTER, LINKS, CONVOLVED = (
    ("csr_matmul_gather.cuh", MATMUL),
    ("csr_matmul_rows.cuh", MATMUL),
    ("csr_matmul_expand.cuh", MATMUL),
    ("csr_matmul_kernels.cu", MATMUL),
    ("csr_chain_kernels.cu", CHAIN),
    ("csr_chain_cluster.cuh", CHAIN),
    ("link_values.cuh", CHAIN),
    ("conv_values_kernels.cu", CONV),
)
"""Files, and what is built of them."""
Call = Callable[[ctypes.CDLL], bool]


def call(
    library: ctypes.CDLL, which: int, like: Tensor, wide: bool, shared: bool, sizes: list[int], tensors: list
) -> None:
    pointers = [None if t is None or t.numel() == 0 else t.data_ptr() for t in tensors]
    library.run(
        which, like.dtype == torch.float64, wide, shared,
        (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_void_p * len(pointers))(*pointers),
    )  # fmt: skip


def close(found: Tensor, want: Tensor) -> bool:
    bound = 1e-12 if want.dtype == torch.float64 else 1e-5
    return found.isfinite().all().item() and (found - want).norm() <= bound * (1 + want.norm())


def poison(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype)


def stride(values: Tensor) -> int:
    return values.shape[-1] if values.dim() == 2 else 0


def products(index: torch.dtype, dtype: torch.dtype, batch: tuple, seed: int) -> Iterator[Call]:
    """A product with rows of every kind and without elements, and its gradients."""
    torch.manual_seed(seed)

    def sparse(density: float, *shape: int) -> Tensor:
        return (torch.rand(shape) < density).float()

    a = [torch.cat([torch.ones(2, 40), torch.eye(40)[:3]]), sparse(0.2, 19, 11), sparse(0.95, 4, 60)]
    b = [torch.ones(40, 150), sparse(0.2, 11, 30), sparse(0.8, 60, 1100)]
    J, K = (BatchedCSR.from_dense(torch.block_diag(*parts)) for parts in (a, b))
    leads = [[] if n is None else [n] for n in batch]
    J, K = (
        BatchedCSR(M.crow.to(index), M.col.to(index), torch.randn(*lead, M.nnz, dtype=dtype), M.shape)
        for M, lead in zip((J, K), leads, strict=True)
    )
    plan = plan_matmul(J, K)
    assert all(plan.kinds[:3])
    yield from of_product(plan, J, K, max(n or 1 for n in batch))
    # Products that are all gathered: one, few and several products an element, of rows whose lists are their own
    # (short ones, and such as a GPU would not share), and of such as share them; then a product in order.
    leads = [[] if n is None else [4 * n] for n in batch]
    found = []
    for channels, kernel, size, pools in ((8, (3, 3), (9, 7), (2, 3)), (16, (3, 5), (4, 22), (2,))):
        padding = [k // 2 for k in kernel]
        conv = conv2d_jacobian(torch.randn(channels, 2, *kernel, dtype=dtype), (2, *size), padding=padding)
        others = [avg_pool2d_jacobian((channels, *size), pool, dtype=dtype) for pool in pools]
        found.append((conv, diagonal_jacobian(torch.randn(1, conv.shape[1], dtype=dtype)), False))
        found += [(conv, K, channels == 16) for K in others]
    # Some rows before these are sums of rows.
    blocks = ((torch.ones(2, 20), conv), (torch.ones(20, 40), others[0]))
    beside = (torch.block_diag(block.to(dtype), M.to_dense()) for block, M in blocks)
    found.append((*map(BatchedCSR.from_dense, beside), True))
    # Of the first, half the rows are sums of rows; of the second, a channel goes to one or two others.
    draw = torch.Generator().manual_seed(1)
    few = [(torch.rand(s, generator=draw) < p).to(dtype) for s, p in (((6, 2, 3), 0.3), ((60, 6, 3), 0.2))]
    spread = torch.eye(16, dtype=dtype).repeat(2, 1)[:26].unsqueeze(2)
    spread[0, 1] = 1
    for weights in (few, (torch.randn(16, 4, 3, dtype=dtype), spread)):
        convs = (conv1d_jacobian(w, (w.shape[1], 50), padding=w.shape[2] // 2, prune=True) for w in weights)
        found.append((*convs, False))
    found.append((*(diagonal_jacobian(torch.randn(1, 5003, dtype=dtype)) for _ in range(2)), False))
    # Rows that are one row of the right operand each, most of them short.
    picks, rows = (
        torch.eye(40, dtype=dtype)[torch.arange(83) // 2 % 40],
        (torch.rand(40, 60, generator=draw) < 0.5).to(dtype),
    )
    found.append((BatchedCSR.from_dense(picks), BatchedCSR.from_dense(rows), False))
    for J, K, shares in found:
        J, K = (
            BatchedCSR(M.crow.to(index), M.col.to(index), torch.randn(*lead, M.nnz, dtype=dtype), M.shape)
            for M, lead in zip((J, K), leads, strict=True)
        )
        plan = plan_matmul(J, K)
        assert plan.kinds.accumulate == 0 and bool(for_gpu(plan)[12].numel()) == shares
        # Gradients look at no list.
        yield from itertools.islice(of_product(plan, J, K, max(lead[0] if lead else 1 for lead in leads)), 1)


def for_gpu(plan: MatmulPlan) -> list[Tensor]:
    operands = plan._patterns[:4]
    *rows, _ = torch.ops.weft.csr_matmul_plan(operands[:2], operands[2:], gpu=True)
    return [*operands, *rows]


def of_product(plan: MatmulPlan, J: BatchedCSR, K: BatchedCSR, B: int) -> Iterator[Call]:
    patterns, index, dtype = for_gpu(plan), plan.crow.dtype, J.dtype
    transposed = [t.to(index) for t in J._pattern.transposed]
    g = torch.randn(B, plan.nnz, dtype=dtype)
    axpy, accumulate, gather, _, left, right, shared, expand, pieces, segments, *_ = (t.shape[0] for t in patterns[6:])
    rows = (gather or J.shape[0]) if shared else 0
    elements = 0 if shared or not (left or right or not (axpy or accumulate or expand)) else gather or plan.nnz
    sizes = [B, J.shape[0], J.shape[1], J.nnz, K.nnz, plan.nnz, axpy, accumulate, elements, max(left, right)]
    strides = [stride(J.values), stride(K.values), plan.nnz, rows, pieces // 6, segments // 2]
    op, left, right = (getattr(torch.ops.weft, f"csr_matmul{name}") for name in ("", "_left", "_right"))
    operands = [J.values, K.values, g]

    def run(which: int, want: Tensor, shared: bool) -> Call:
        def passes(library: ctypes.CDLL) -> bool:
            found = poison(*(want.shape if want.dim() == 2 or shared else (1, *want.shape)), like=want)
            call(library, which, want, index == torch.int64, shared, [*sizes, *strides],
                 [*patterns, *transposed, *operands, found])  # fmt: skip
            return close(found.reshape(want.shape), want)

        return passes

    yield run(0, op(plan._patterns, J.values, K.values), False)
    for shared in (False, True):
        yield run(1, left(patterns, K.values, g, shared), shared)
        yield run(2, right(patterns, J.values, g, shared), shared)


def vectors(index: torch.dtype, dtype: torch.dtype, batch: tuple, seed: int) -> Iterator[Call]:
    torch.manual_seed(seed)
    B = max(n or 1 for n in batch)
    for density, k in ((0.02, 1), (0.3, 1), (0.9, 1), (0.3, 3)):
        J = random_csr(23, 50, batch[0], density, dtype, index=index)
        x = torch.randn(B, 50, k, dtype=dtype)
        want = (J @ x).contiguous()

        def passes(library: ctypes.CDLL, J=J, x=x, k=k, want=want) -> bool:
            found = poison(B, 23, k, like=want)
            sizes = [B, 23, 50, k, J.nnz, stride(J.values), 50 * k]
            call(library, 0, want, index == torch.int64, False, sizes, [J.crow, J.col, None, J.values, x, found])
            return close(found, want)

        yield passes
        left, right = torch.randn(B, 23, k, dtype=dtype), torch.randn(B, 50, k, dtype=dtype)
        for shared in (False, True):
            sums = torch.ops.weft.csr_sampled_mm(J._pattern.tensors, [], left, right, shared)

            def sampled(library: ctypes.CDLL, J=J, k=k, left=left, right=right, shared=shared, sums=sums) -> bool:
                found = poison(*sums.shape, like=sums)
                sizes = [B, 23, 50, k, J.nnz, 23 * k, 50 * k]
                call(library, 1, sums, index == torch.int64, shared, sizes,
                     [J.crow, J.col, None, left, right, found])  # fmt: skip
                return close(found, sums)

            yield sampled


def chains(index: torch.dtype, dtype: torch.dtype, batch: tuple, seed: int) -> Iterator[Call]:
    """Products of every length of rows, with diagonals between them, at the ends and side by side; once more than a
    launch takes. Of some the values are where their layers have them. In clusters of one block, and of several."""
    count = 20 if seed else 52
    kinds = [((0.02, 0.2, 1.0, None, None)[(k + seed) % 5], 30 + 7 * k % 41) for k in range(count)]
    yield from of_chain(index, dtype, batch, seed, kinds, (True, 11), (False, count))
    if seed < 4:  # threads that poll for messages take an emulator long
        kinds = [(0.2, 70), (None, 70), (0.3, 150), (0.4, 90), (None, 90), (0.1, 40)]  # 150: two turns of two blocks
        yield from of_chain(index, dtype, batch, seed, kinds, (True, 6))


def of_chain(
    index: torch.dtype, dtype: torch.dtype, batch: tuple, seed: int, kinds: list, *runs: tuple[bool, int]
) -> Iterator[Call]:
    """`kinds`: each one's density, None for a diagonal, and rows; `runs`: in clusters or not, of how many of them."""
    torch.manual_seed(seed)
    B = max(n or 1 for n in batch)
    n, links, grad = 40, [], torch.randn(B, 40, dtype=dtype)
    for k, (density, rows) in enumerate(kinds):
        lead = [] if batch[k % 2] is None else [B]
        if density is None:
            reads = -(k % 2) if lead else 0
            links.append((None, None, torch.randn(*lead, n, dtype=dtype), n, None, reads))
            continue
        J = random_csr(rows, n, None, density, dtype, index=index)
        values, source, reads = torch.randn(*lead, J.nnz, dtype=dtype) / (1 + J.nnz / rows) ** 0.5, None, 0
        if not lead and k % 3:
            source, values = torch.randint(0, 9, (J.nnz,), dtype=index), torch.randn(9, dtype=dtype) / 3
        elif lead and k % 3 and J.nnz:
            reads = 7
            values = torch.randint(0, 7, (B, n)) if n else values
        links.append((J.crow, J.col, values, rows, source, reads))
        n = rows
    none = torch.empty(0, dtype=index)
    want = torch.ops.weft.layer_chain(
        grad, *([none if t is None else t for t in (link[i] for link in links)] for i in (0, 1)),
        [link[2] for link in links], [none if link[4] is None else link[4] for link in links],
        [link[5] for link in links],
    )  # fmt: skip

    def run(clusters: bool, count: int) -> Call:
        def passes(library: ctypes.CDLL) -> bool:
            sizes, tensors, x, columns, found = [B], [], grad, 40, []
            for crow, col, values, rows, source, reads in links[:count]:
                found.append(poison(B, rows, like=grad))
                sizes += [stride(values), rows, columns, rows if col is None else col.shape[0], reads]
                tensors += [crow, crow if col is not None and col.numel() == 0 else col, values, x, found[-1], source]
                x, columns = found[-1], rows
            # Without elements a product is still none with a diagonal.
            call(library, count, grad, index == torch.int64, clusters, sizes, tensors)
            return all(close(f, w) for f, w in zip(found, want[:count], strict=True))

        return passes

    yield from (run(*one) for one in runs)


def convolutions(index: torch.dtype, dtype: torch.dtype, batch: tuple, seed: int) -> Iterator[Call]:
    torch.manual_seed(seed)
    mode, groups = ("zeros", "circular")[seed % 2], 1 + seed % 3
    windows = _windows.convolution("test", (7, 6), (3, 2), (1, 2), (1, 1), (1, 1), mode)
    inputs, outputs = 2, (5, 3000)[seed % 2] if mode == "zeros" else 3
    if dtype == torch.float64 and mode == "zeros":
        outputs = 800  # more weights than a block keeps
    weight = torch.randn(groups * outputs, inputs, 6, dtype=dtype)
    sizes = [windows.inputs, windows.elements, 6, groups, inputs, outputs, windows.outputs]
    tables = windows.tables
    sizes.append(tables[4].shape[0])
    values = torch.ops.weft.conv_values(weight, tables, groups)
    wide = index == torch.int64

    want_pattern = torch.ops.weft.conv_pattern(tables, groups, inputs, outputs, windows.outputs, wide)
    crow, col = (torch.full_like(t, -1) for t in want_pattern)

    def pattern(library: ctypes.CDLL) -> bool:
        call(library, 0, weight, wide, False, sizes, [*tables, None, col, crow])
        return torch.equal(crow, want_pattern[0]) and torch.equal(col, want_pattern[1])

    def forward(library: ctypes.CDLL) -> bool:
        found = poison(*values.shape, like=weight)
        call(library, 1, weight, wide, False, sizes, [*tables, weight, found, None])
        return torch.equal(found, values) if mode == "zeros" else close(found, values)

    grad = torch.randn_like(values)
    want = torch.ops.weft.conv_values_backward(grad, tables, groups, outputs, inputs)

    def backward(library: ctypes.CDLL) -> bool:
        found = poison(*weight.shape, like=weight)
        call(library, 2, weight, wide, False, sizes, [*tables, grad, found, None])
        return close(found, want)

    yield from (pattern, forward, backward)


def pools(index: torch.dtype, dtype: torch.dtype, batch: tuple, seed: int) -> Iterator[Call]:
    torch.manual_seed(seed)
    x = torch.randint(0, 4, (2, 3, 9, 7)).to(dtype)  # with ties
    x[0, 0, 4, 2:4] = float("nan")
    settings = [(3, 2), (2, 1), (1, 0), (1, 2)]
    sizes, picked = F.max_pool2d(x, *settings, return_indices=True)
    lines = zip((9, 7), sizes.shape[2:], *settings, strict=True)
    windows = _windows.join([_windows.sliding(*line) for line in lines])
    crow, row, col, *_ = windows.tables
    want = (picked.flatten(2)[:, :, col] == row).to(dtype)

    def passes(library: ctypes.CDLL) -> bool:
        found = poison(*want.shape, like=x)
        flat = [n for pair in settings for n in pair]
        call(library, 0, x, False, False, [6, len(col), 9, 7, *sizes.shape[2:], *flat], [crow, col, x, found])
        return torch.equal(found, want)

    yield passes


def expanded(index: torch.dtype, dtype: torch.dtype, batch: tuple, seed: int) -> Iterator[Call]:
    """Products in pieces: of short rows that share one, of rows that are alike, and of rows that take several, beside
    rows that accumulate."""
    torch.manual_seed(seed)

    def sparse(density: float, *shape: int) -> Tensor:
        return (torch.rand(shape) < density).to(dtype)

    weights = ((torch.rand(s) < 0.5).to(dtype) for s in ((8, 1, 3, 3), (8, 8, 3, 3)))
    first, second = (conv2d_jacobian(w, (w.shape[1], 6, 6), padding=1, prune=True) for w in weights)
    long = sparse(0.3, 2, 40), torch.cat([sparse(0.5, 40, 400), torch.zeros(40, 1)], 1)
    many = torch.cat([torch.ones(1, 300), sparse(0.2, 1, 300)]), sparse(0.4, 300, 5)
    short = sparse(0.1, 60, 30), sparse(0.3, 30, 12)
    # Rows whose lists, read once for each sample, would take too much: the rest is expanded with them.
    dense = sparse(0.9, 12, 32), sparse(0.9, 32, 64)
    blocks = [torch.block_diag(*parts) for parts in zip(long, many, short, dense, strict=True)]
    for a, b in ((first, second), [BatchedCSR.from_dense(block.to(dtype)) for block in blocks]):
        J, K = (
            BatchedCSR(M.crow.to(index), M.col.to(index), torch.randn(*([] if n is None else [n]), M.nnz, dtype=dtype),
                       M.shape) for M, n in zip((a, b), batch, strict=True)
        )  # fmt: skip
        plan = plan_matmul(J, K)
        pieces, lists = (for_gpu(plan)[at] for at in (14, 16))
        places = pieces.view(-1, 6)[:, 2]
        assert 0 < len(places) and (a is not first or len(places.unique()) < len(places)) and len(lists)
        yield from itertools.islice(of_product(plan, J, K, max(n or 1 for n in batch)), 1)


def narrow(index: torch.dtype, dtype: torch.dtype, batch: tuple, seed: int) -> Iterator[Call]:
    """Products with few columns, of rows of every length, also of none."""
    for columns in (6, 10, 32):
        J, K = (
            random_csr(*shape, n, density, dtype, index=index)
            for shape, n, density in zip(((29, 150), (150, columns)), batch, (0.6, 0.9), strict=True)
        )
        if columns == 10:
            stored = J.to_dense() != 0
            stored = stored if stored.dim() == 2 else stored[0]
            stored[3], stored[7, 33:] = False, False
            J = BatchedCSR.from_dense(stored.to(dtype))
            J = BatchedCSR(
                J.crow.to(index), J.col.to(index),
                torch.randn(*([] if batch[0] is None else [batch[0]]), J.nnz, dtype=dtype), J.shape,
            )  # fmt: skip
        plan = plan_matmul(J, K)
        assert len(for_gpu(plan)[17]) == 300
        yield from itertools.islice(of_product(plan, J, K, max(n or 1 for n in batch)), 1)


def all_products(*case: object) -> Iterator[Call]:
    yield from products(*case)
    yield from expanded(*case)
    yield from narrow(*case)


CHECKS = [all_products, vectors, chains, convolutions, pools]
# The element types meet the indices of dispatch.cuh in tests/emulator.
CASES = [
    (torch.int32, torch.float32, (None, None), 0),
    (torch.int64, torch.float64, (5, None), 1),
    (torch.int32, torch.float32, (None, 5), 2),
    (torch.int64, torch.float64, (2, 2), 3),
]


LARGE = [(torch.int32, torch.float32, (None, 21), 4), (torch.int64, torch.float64, (10, None), 5)]
"""Of whose samples a chain's lanes share elements."""


@functools.cache
def checks_of(file: int) -> list[Call]:
    cases = [*CASES, *LARGE] if CHECKS[file] is chains else CASES
    return [check for case in cases for check in CHECKS[file](*case)]


def passes(library: ctypes.CDLL, file: int) -> bool:
    checks = checks_of(file)  # not in the process that runs them

    def run() -> None:
        assert all(check(library) for check in checks)

    return emulated.ends_well(run)


@pytest.mark.parametrize("file", range(len(SOURCES)), ids=SOURCES)
def test_kernels_on_a_processor(file: int, tmp_path: Path) -> None:
    assert passes(emulated.build("sparse_kernels", tmp_path, SOURCE=file), file)


FLAWS = {
    "forgets the last columns of a short row": (ROWS, "kShortLanes < n) out[own", "kShortLanes + 8 < n) out[own"),
    "takes one group's sums for all": (ROWS, "g < groups; ++g", "g < 1; ++g"),
    "takes the number of the column before": (ROWS, "__popc(of_row & (own - 1))", "__popc(of_row & (own / 2 - 1))"),
    "forgets elements of a": (
        ROWS,
        "const int e = k + u * groups + group;",
        "const int e = k + u * groups + 1 + group;",
    ),
    "adds the numbers of columns that a row has not": (ROWS, "e < count && (of_row & own) != 0", "e < count"),
    "forgets an element's last products": (GATHER, "step += kSteps", "step += kSteps + 1"),
    "forgets the last columns of a row": (ROWS, "if (32 * c < left) out", "if (32 * c + 32 < left) out"),
    "adds rows of a window at once": (ROWS, "          __syncwarp();\n          f = g", "          f = g"),
    "takes a window too far": (ROWS, "high = low + kWidth;", "high = low + kWidth + 1;"),
    "reads a number of another sample": (GATHER, "tile[i % kWide]", "tile[(i + 1) % kWide]"),
    "writes over y while it is read": (GATHER, "0 && at + 4 <= limit", "0 && at + 4 <= m.batch * m.c_nnz"),
    "forgets the numbers in the place of y": (LAUNCHES, "done = limit % m.c_nnz", "done = m.c_nnz"),
    "takes the list of the row before": (GATHER, "[m.gather_rows + r]", "[m.gather_rows + (r > 0 ? r - 1 : 0)]"),
    "takes rows that share lists for all": (GATHER, "m.gather ? int64_t(ints<I>(m.gather)[r]) : r", "r"),
    "writes over y in rows that share lists": (GATHER, "own + 4 <= row.n && at + 4 <= limit", "own + 4 <= row.n"),
    "forgets the last numbers in order": (GATHER, "p < 4 && own + p < m.c_nnz", "p < 3 && own + p < m.c_nnz"),
    "puts products at the places of the ones before": (
        EXPAND,
        "[told[first + u] & kPlaceMask]",
        "[told[first] & kPlaceMask]",
    ),
    "counts segments from the piece's first": (EXPAND, "(told >> 16) + ", ""),
    "sums before all products are there": (
        EXPAND,
        "read_begins(threadIdx.x);\n  __syncthreads();",
        "read_begins(threadIdx.x);",
    ),
    "forgets an element's last product": (EXPAND, "q < to[p]; ++q", "q + 1 < to[p]; ++q"),
    "takes another segment's number": (EXPAND, "x[t * m.x_batch + l]", "x[t * m.x_batch]"),
    "takes gathered elements for all": (GATHER, "m.gather ? int64_t(ints<I>(m.gather)[e]) : e", "e"),
    "leaves a barrier out": (
        CHAINED,
        "next);\n      group_wait(chain.counter, arrived += gridDim.x);",
        "next);\n      arrived += gridDim.x;\n      if (next % 3) group_wait(chain.counter, arrived);",
    ),
    "reads the next rows of the last product": (
        CHAINED,
        "(ahead, chain, next)",
        "(ahead, chain, k)",
    ),
    "takes another lane's samples": (CHAINED, "kLanesOver + part_of_tile;", "kLanesOver;"),
    "writes another lane's samples": (CHAINED, "kLanesOver + part_of_tile].v[s]", "kLanesOver].v[s]"),
    "multiplies the diagonal before": (CHAINED, "diagonal_value<T>(diagonal, first + s, row)", "ahead.scale[s]"),
    "writes the vector that is read": (CHAINED, "    to = x, x = written", "    x = written"),
    "sends into the vector that is read": (CLUSTER, "shared_address(vector(p + 1)", "shared_address(vector(p)"),
    "stores in the vector that is read": (CLUSTER, "vector(p + 1)[row]", "vector(p)[row]"),
    "sends in a cluster of one block": (CLUSTER, "if (chain.blocks > 1) {", "if (chain.blocks > 0) {"),
    "sends another row's number": (CLUSTER, "(message * kNumbers<T> + i) * kLanes", "message * kNumbers<T> + i"),
    "takes a ReLU's output for its derivative": (LINKS, "reads == 0 ? number", "reads < 1 ? number"),
    "reads a weight in order": (CLUSTER, "[first + part.from[u]]", "[first + part.col[u] % 9]"),
    "takes an output for another": (CLUSTER, "link.values, first + part.col[u]", "link.values, first"),
    "reads the rows of the product before": (CLUSTER, "ends = run.first_ends(later)", "ends = run.first_ends(after)"),
    "scales by the diagonal before": (CLUSTER, "chain.links[k + 1], row)", "chain.links[k + 1], 0)"),
    "takes the taps of another row": (CONVOLVED, "window_of(c, p + gridDim.x * kWarps)", "window_of(c, p)"),
    "does not wait for the weights": (CONVOLVED, "      }\n      __syncthreads();", "      }"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_emulator_notices(flaw: str, tmp_path: Path) -> None:
    (source, file), right, wrong = FLAWS[flaw]
    folder = emulated.with_flaw(f"sparse/cuda/{source}", right, wrong, tmp_path)
    assert not passes(emulated.build("sparse_kernels", folder, SOURCE=file), file)
