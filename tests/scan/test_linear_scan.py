"""linear_scan against its step-by-step twin in fp64, on every device, layout and dtype."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weft.scan import linear_scan, linear_scan_reference

from tests.common import BOUNDS, DTYPES, assert_close, pairs, poisoned, relative_error
from tests.scan.linear_scans import (
    batch_first,
    device,
    every_second,
    gradients_agree,
    inner,
    matrices_by_columns,
    off_by_one,
    run,
    wide,
)
from tests.scan.samples import CONSTANT, LAYOUTS
from tests.scan.samples import LinearScan as Sample

SAMPLES = [
    # Every layout and flag.
    *(Sample(9, 3, 5, *rest) for rest in itertools.product(LAYOUTS, [False, True], [False, True], [False, True])),
    # B = H, where a 3-D A is diagonal; H = 1; one step; one row; empty in each dimension.
    *(Sample(6, 4, 4, layout) for layout in ("dense", "shared_4d", "diagonal")),
    *(Sample(T, B, H, layout) for layout in LAYOUTS for T, B, H in [(7, 3, 1), (1, 3, 5), (11, 1, 4)]),
    *(Sample(1, 3, 5, layout, x0=False, reverse=True) for layout in LAYOUTS),
    *(Sample(T, B, H, layout) for layout in LAYOUTS for T, B, H in [(0, 3, 5), (4, 0, 5), (4, 3, 0), (0, 0, 0)]),
    # Sizes around the edges of vectors, tiles and chunks.
    *(Sample(300, 2, H, "dense", reverse=H % 2 == 0, transpose=H % 3 == 0) for H in (2, 7, 8, 17, 20, 31, 32)),
    *(Sample(40, 3, H, layout, transpose=H % 2 == 1) for H in (33, 64, 65, 128, 129) for layout in ("dense", "shared")),
    *(Sample(T, 2, H, "diagonal", reverse=T % 2 == 0) for T in (15, 16, 17, 257) for H in (31, 32, 64, 300, 2051)),
    *(Sample(300, 3, H, layout, x0=H % 2 == 0, reverse=H == 8) for layout in CONSTANT for H in (8, 33)),
    Sample(5001, 1, 3, "diagonal"),
    Sample(5001, 2, 20, "diagonal", x0=False, reverse=True),
    Sample(5001, 1, 20),
    Sample(2500, 2, 4, x0=False, reverse=True, transpose=True),
]

# Each in fp32 and in one of the other types.
OTHER_TYPES = [t for t in DTYPES if t != torch.float32]
TYPED = [(s, t) for i, s in enumerate(SAMPLES) for t in (torch.float32, OTHER_TYPES[i % len(OTHER_TYPES)])]

sample = pytest.mark.parametrize("sample", SAMPLES, ids=str)


@device
@pytest.mark.parametrize(("sample", "dtype"), TYPED, ids=str)
def test_agrees_with_reference(sample: Sample, dtype: torch.dtype, device: str) -> None:
    inputs = sample.inputs(dtype, device)
    with poisoned():
        x = linear_scan(*inputs, **sample.flags)
    assert x.dtype == dtype and x.device == inputs[1].device and x.is_contiguous()
    assert_close(x, linear_scan_reference(*wide(*inputs), **sample.flags))


@device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["diagonal", *CONSTANT])
@pytest.mark.parametrize(("T", "B", "H", "x0"), [(1, 1, 64, True), (70, 1, 32, False), (130, 3, 75, True)])
def test_channels_in_groups(T: int, B: int, H: int, x0: bool, layout: str, dtype: torch.dtype, device: str) -> None:
    """Whole cache lines of channels, which a type may keep in its own order, and what is left of a row: the states
    and every gradient, summed over more steps than are summed in the dtype of the state."""
    sample = Sample(T, B, H, layout, x0, reverse=B == 1)
    inputs = sample.inputs(dtype, device)
    weight = torch.randn(T, B, H, dtype=torch.float64).to(device=device, dtype=dtype)
    with poisoned():
        x, got = run(inputs, sample.flags, weight)
    want_x, want = run(wide(*inputs), sample.flags, weight.cpu().double(), linear_scan_reference)
    for h in range(H):  # an error of two channels exchanged is not one of the norm alone
        assert_close(x[..., h], want_x[..., h], 4 * BOUNDS[dtype])
    gradients_agree(sample, got, want, 3 * BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["diagonal", "constant"])
def test_groups_of_chunks(layout: str, dtype: torch.dtype) -> None:
    """Threads that share few channels cut T, and hand states on from chunk to chunk."""
    sample = Sample(4500, 1, 40, layout, x0=True)
    inputs = sample.inputs(dtype)
    weight = torch.randn(4500, 1, 40, dtype=torch.float64).to(dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with poisoned():
            x, got = run(inputs, sample.flags, weight)
    finally:
        torch.set_num_threads(threads)
    want_x, want = run(wide(*inputs), sample.flags, weight.double(), linear_scan_reference)
    for h in range(40):
        assert_close(x[..., h], want_x[..., h], 4 * BOUNDS[dtype])
    gradients_agree(sample, got, want, 3 * BOUNDS[dtype])


@pytest.mark.parametrize("x0", [False, True])
def test_not_finite_among_groups(x0: bool) -> None:
    """NaN and infinity of any payload and sign stay in their channels, rounded as torch rounds them."""
    A, b, start = Sample(3, 1, 64, "diagonal", x0).inputs(torch.bfloat16)
    A = A.nan_to_num(0.5)
    bits = b.view(torch.int16)
    bits[1, 0, ::8] = torch.tensor([0x7F80, 0x7FC0, 0x7F81, 0x7FFF, -0x80, -0x40, -1, 0x7F7F], dtype=torch.int16)
    x = linear_scan(A, b, start)
    want = linear_scan_reference(*wide(A, b, start)).to(torch.bfloat16)
    assert torch.equal(x.isnan(), want.isnan()) and torch.equal(x.isinf(), want.isinf())
    assert_close(x.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0), 4 * BOUNDS[torch.bfloat16])


BITS = """
import torch, weft
torch.manual_seed(0)
A, b = torch.rand(200, 1, 40), torch.randn(200, 1, 40)
print(torch.ops.weft.linear_scan(A, b).view(torch.int32).sum().item())
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="nothing to lower")
def test_the_instruction_set_is_torchs() -> None:
    """A fused multiply-add rounds once: what has none ends in other bits."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    run = subprocess.run([sys.executable, "-c", BITS], env=environment, capture_output=True, text=True, check=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(BITS, {})
    assert run.stdout != printed.getvalue()


@device
@pytest.mark.parametrize(("sample", "dtype"), [s for s in TYPED if s[0].T <= 300 and s[0].H <= 300], ids=str)
def test_gradients_agree_with_reference(sample: Sample, dtype: torch.dtype, device: str) -> None:
    inputs = sample.inputs(dtype, device)
    weight = torch.randn(inputs[1].shape, dtype=torch.float64).to(device=device, dtype=dtype)
    with poisoned():
        _, got = run(inputs, sample.flags, weight)
    # The reference differentiates its own A[0] only where there is an x0, and gives it zeros otherwise.
    _, want = run(wide(*inputs), sample.flags, weight.cpu().double(), linear_scan_reference)
    # The gradient of A is a product of two tensors that were each rounded to the dtype.
    gradients_agree(sample, got, want, 3 * BOUNDS[dtype])


@device
@given(
    T=st.integers(0, 40),
    B=st.integers(0, 5),
    H=st.integers(0, 24),
    layout=st.sampled_from(LAYOUTS),
    x0=st.booleans(),
    reverse=st.booleans(),
    transpose=st.booleans(),
)
def test_any_shape(device: str, T, B, H, layout, x0, reverse, transpose) -> None:
    if layout == "shared" and B == H:
        layout = "shared_4d"
    sample = Sample(T, B, H, layout, x0, reverse, transpose)
    inputs = sample.inputs(torch.float32, device)
    with poisoned():
        x = linear_scan(*inputs, **sample.flags)
    assert_close(x, linear_scan_reference(*wide(*inputs), **sample.flags))


@device
@pairs(
    view=[every_second, batch_first, off_by_one, inner, matrices_by_columns],
    layout=["dense", "shared_4d", "diagonal"],
    dtype=DTYPES,
)
def test_strides(view, layout: str, dtype: torch.dtype, device: str) -> None:
    for H, reverse, transpose in [(5, False, True), (20, True, False), (64, True, True)]:
        sample = Sample(37, 3, H, layout, True, reverse, transpose)
        inputs = sample.inputs(dtype, device)
        viewed = [view(t) for t in inputs]
        with poisoned():
            x = linear_scan(*viewed, **sample.flags)
        assert_close(x, linear_scan_reference(*wide(*inputs), **sample.flags))
        weight = torch.ones_like(x)
        _, got = run(tuple(viewed), sample.flags, view(weight))
        _, want = run(wide(*inputs), sample.flags, weight.cpu().double(), linear_scan_reference)
        gradients_agree(sample, got, want, 3 * BOUNDS[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", [torch.clone, off_by_one, inner, matrices_by_columns])
def test_lines_of_any_alignment_in_chunks(view, dtype: torch.dtype) -> None:
    for H, transpose in itertools.product((3, 12, 18, 19, 23, 30, 31, 32), (False, True)):
        sample = Sample(1500, 2, H, x0=H % 2 == 0, reverse=H % 3 == 0, transpose=transpose)
        inputs = sample.inputs(dtype, "cuda")
        with poisoned():
            x = linear_scan(*(None if t is None else view(t) for t in inputs), **sample.flags)
        assert_close(x, linear_scan_reference(*wide(*inputs), **sample.flags))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("odd", ["A", "b"])
def test_one_of_two_aligned(odd: str, dtype: torch.dtype) -> None:
    for H, view in itertools.product((8, 16, 24, 32), (off_by_one, inner)):
        A, b, x0 = Sample(900, 2, H).inputs(dtype, "cuda")
        x = linear_scan(view(A) if odd == "A" else A, view(b) if odd == "b" else b, x0)
        assert_close(x, linear_scan_reference(*wide(A, b, x0)))


@device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_broadcast_inputs(layout: str, device: str) -> None:
    sample = Sample(19, 3, 6, layout)
    A, b, x0 = sample.inputs(torch.float64, device)
    A, b, x0 = A[:1].expand_as(A), b[:, :1].expand_as(b), x0[:1].expand_as(x0)
    assert_close(linear_scan(A, b, x0), linear_scan_reference(*wide(A, b, x0)))


@device
@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3))[1:], ids=str)
def test_only_the_needed_gradients(needed: tuple, device: str) -> None:
    sample = Sample(9, 3, 5)
    inputs = sample.inputs(torch.float64, device)
    leaves = [t.requires_grad_(n) for t, n in zip(inputs, needed, strict=True)]
    wanted = [t for t in leaves if t.requires_grad]
    got = torch.autograd.grad(linear_scan(*leaves).square().sum(), wanted, create_graph=True)
    want = torch.autograd.grad(linear_scan_reference(*leaves).square().sum(), wanted, create_graph=True)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)
    got = torch.autograd.grad(sum(g.square().sum() for g in got), wanted)
    want = torch.autograd.grad(sum(g.square().sum() for g in want), wanted)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)


THREADS = """
import sys, torch, weft
from weft.scan import linear_scan, linear_scan_reference
torch.manual_seed(0)
for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float64, 1e-14)):
    for constant in (False, True):
        T, B, H = 5000, 1, 5
        A = torch.rand(1 if constant else T, B, H).mul(0.3).add(0.7).to(dtype)
        b, x0, weight = (torch.randn(*s).to(dtype) for s in ((T, B, H), (B, H), (T, B, H)))
        A[..., 0], b[..., 0], x0[..., 0] = 2, -1, 1  # its totals cancel
        found = []
        for threads in (2, 2, 4):
            torch.set_num_threads(threads)
            leaves = [t.clone().requires_grad_() for t in (A, b, x0)]
            x = linear_scan(*leaves)
            weight[..., 0] = -1
            weight[-1, :, 0] = 1
            found.append([x, *torch.autograd.grad(x, leaves, weight)])
        assert all(torch.equal(p, q) for p, q in zip(*found[:2])), "two runs"
        assert all(torch.equal(p, q) for p, q in zip(found[0], found[2])), "threads that cut time alike"
        leaves = [t.clone().double().requires_grad_() for t in (A, b, x0)]
        x = linear_scan_reference(*leaves)
        for got, want in zip(found[0], [x, *torch.autograd.grad(x, leaves, weight.double())]):
            assert ((got.double() - want).norm() / want.norm()).item() < 8 * bound, (dtype, constant)
        assert (found[0][0][..., 0] == 1).all() and (found[0][2][:-1, :, 0] == 1).all()
        b[T // 2, 0, 1] = torch.nan
        x = linear_scan(A, b, x0)
        assert x[: T // 2].isfinite().all() and x[T // 2 :, :, 1].isnan().all()
        assert torch.equal(x[..., [0, 2, 3, 4]], found[0][0][..., [0, 2, 3, 4]])
"""


def test_time_is_cut_where_threads_are_many() -> None:
    subprocess.run([sys.executable, "-c", THREADS], check=True)


# Sizes of the kernels for middle H and of the levels above it, of which SAMPLES has a few short ones. Most of those
# with B = 1 are cut into chunks.
TALL = [
    *(Sample(T, B, H, reverse=T > 40, transpose=H % 2 == 0) for H in (33, 64, 75) for T, B in [(40, 4), (300, 1)]),
    *(Sample(T, B, H, reverse=T < 300, transpose=H % 3 == 1) for H in (100, 128) for T, B in [(41, 2), (300, 1)]),
    *(Sample(300, 1, H, x0=False, transpose=H == 128) for H in (33, 64, 96, 128)),
    *(Sample(300, 3, H, "shared", x0=H > 75, reverse=H > 64, transpose=H == 75) for H in (33, 64, 75, 128)),
    *(Sample(T, B, 160, transpose=T == 41, reverse=B == 1) for T, B in [(41, 4), (300, 1)]),
    Sample(300, 4, 160, "shared", x0=False, transpose=True),
    Sample(1000, 1, 64, reverse=True),
    Sample(1000, 1, 128, transpose=True),
    Sample(1000, 1, 160, x0=False),
]
tall = pytest.mark.parametrize("sample", TALL, ids=str)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@tall
def test_tall_states_and_gradients(sample: Sample, dtype: torch.dtype) -> None:
    inputs = sample.inputs(dtype, "cuda")
    weight = torch.randn(inputs[1].shape, dtype=torch.float64).to(device="cuda", dtype=dtype)
    with poisoned():
        x, got = run(inputs, sample.flags, weight)
        again = run(inputs, sample.flags, weight)
    x_want, want = run(wide(*inputs), sample.flags, weight.cpu().double(), linear_scan_reference)
    assert_close(x, x_want)
    assert torch.equal(x, again[0])
    for g, other in zip(got, again[1], strict=True):
        assert torch.equal(g, other)
    gradients_agree(sample, got, want, 3 * BOUNDS[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", [batch_first, off_by_one, inner, matrices_by_columns])
@pytest.mark.parametrize("H", [64, 75, 128])
def test_tall_strides(view, H: int, dtype: torch.dtype) -> None:
    sample = Sample(300, 1, H, reverse=H == 75)
    inputs = sample.inputs(dtype, "cuda")
    with poisoned():
        x = linear_scan(*(view(t) for t in inputs), **sample.flags)
    assert_close(x, linear_scan_reference(*wide(*inputs), **sample.flags))


@pytest.mark.cuda
def test_tf32_is_never_used() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for H in (20, 64, 128, 160):
            for layout in ("dense", "shared"):
                sample = Sample(70, 16, H, layout)
                inputs = sample.inputs(torch.float32, "cuda")
                weight = torch.randn_like(inputs[1])
                x, got = run(inputs, sample.flags, weight)
                want = run(wide(*inputs), sample.flags, weight.cpu().double(), linear_scan_reference)
                assert relative_error(x, want[0]) < BOUNDS[torch.float32]
                gradients_agree(sample, got, want[1], 3 * BOUNDS[torch.float32])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
