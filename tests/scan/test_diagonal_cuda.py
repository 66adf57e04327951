"""The diagonal scan on CUDA, whose walks and tiles need larger sizes than test_linear_scan.py has."""

from __future__ import annotations

import pytest
import torch
from weft.scan import linear_scan

from tests.common import BOUNDS, DTYPES, assert_close, poisoned
from tests.scan import linear_scans as shared
from tests.scan import test_linear_scan as whole
from tests.scan import test_linear_scan_extremes as extremes
from tests.scan.samples import CONSTANT
from tests.scan.samples import LinearScan as Sample

pytestmark = pytest.mark.cuda


# csrc/scan/linear/cuda/diagonal.cu chooses by the costs of the device. On an H200 it walks where T is up to 1024 or a
# step has 96 bytes per multiprocessor, and takes the kernel for many warps from 64 channels per multiprocessor on.
SMS = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132

SAMPLES = [
    # Walks: a stage, its edge, few warps and many, short rows and long ones.
    *(Sample(T, 2, H, "diagonal", x0=H > 31, reverse=T % 2 == 0) for T in (15, 16, 17, 32, 33, 300) for H in (48, 200)),
    Sample(150, 5, 16 * SMS, "diagonal"),
    Sample(150, 1, 72 * SMS, "diagonal", x0=False, reverse=True),
    Sample(1100, 1, 48 * SMS, "diagonal"),
    *(Sample(90, 3, H, layout, reverse=layout == "constant") for layout in CONSTANT for H in (64, 24 * SMS)),
    # Tiles: one, some of each of many slabs, many of one, rows of no alignment, and more than blocks run.
    *(
        Sample(T, 2, H, "diagonal", x0=H > 31, reverse=T % 2 == 0)
        for T in (1025, 1088, 1089, 2304, 2305)
        for H in (31, 64, 200)
    ),
    *(Sample(T, 2, 7, "diagonal") for T in (63, 64, 65)),
    Sample(2048, 3, 100, "diagonal", x0=False, reverse=True),
    Sample(50_000, 1, 5, "diagonal"),
    Sample(600, 5, 14 * SMS + 1, "diagonal"),
    Sample(16_000, 1, 4 * SMS, "diagonal", x0=False),
    Sample(6_000, 2, 5 * SMS + 3, "diagonal", reverse=True),
    *(Sample(5000, 2, 100, layout, reverse=layout == "constant") for layout in CONSTANT),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_agrees_and_repeats(sample: Sample, dtype: torch.dtype) -> None:
    inputs = sample.inputs(dtype, "cuda")
    weight = torch.randn(inputs[1].shape, dtype=torch.float64).to("cuda", dtype)
    with poisoned():
        x, got = shared.run(inputs, sample.flags, weight)
    x_again, again = shared.run(inputs, sample.flags, weight)
    # The CPU's kernels, which test_linear_scan.py holds against plain torch, in fp64.
    x_want, want = shared.run(shared.wide(*inputs), sample.flags, weight.cpu().double())
    assert_close(x, x_want)
    shared.gradients_agree(sample, got, want, 3 * BOUNDS[dtype])
    assert torch.equal(x, x_again)
    for g, other in zip(got, again, strict=True):
        assert torch.equal(g, other)


@pytest.mark.parametrize("view", [shared.every_second, shared.batch_first, shared.off_by_one, shared.inner])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(view, dtype: torch.dtype) -> None:
    whole.test_strides(view, "diagonal", dtype, "cuda")


@pytest.mark.parametrize("needed", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", ["diagonal", *CONSTANT])
@pytest.mark.parametrize("T", [70, 1300])
def test_only_the_needed_gradients(T: int, layout: str, needed: tuple) -> None:
    inputs = Sample(T, 3, 20, layout).inputs(torch.float64, "cuda")
    leaves = [t.requires_grad_(bool(n)) for t, n in zip(inputs, needed, strict=True)]
    wanted = [t for t in leaves if t.requires_grad]
    on_cpu = [t.detach().cpu().requires_grad_(t.requires_grad) for t in leaves]
    got = torch.autograd.grad(linear_scan(*leaves).square().sum(), wanted)
    want = torch.autograd.grad(linear_scan(*on_cpu).square().sum(), [t for t in on_cpu if t.requires_grad])
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, 1e-12)


@pytest.mark.parametrize("where", ["A", "b", "x0"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(where: str, bad: float) -> None:
    extremes.test_a_bad_row_stays_alone(where, bad, "diagonal", "cuda")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", shared.CHAOS)
def test_chaotic_states(kind: str, reverse: bool) -> None:
    for T, B, H in [(10_000, 2, 6), (3_000, 1, 20), (1_100, 2, 40), (700, 2, 40)]:
        extremes.test_chaotic_states(("diagonal", T, B, H), kind, reverse, "cuda")


@pytest.mark.parametrize("kind", ["up", "down", "both", "zeros"])
def test_chaotic_gradients(kind: str) -> None:
    extremes.test_chaotic_gradients(10_000, 1, 6, kind, "diagonal", "cuda")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [c for c in shared.CANCELLING if c[4] == "diagonal"], ids=lambda c: "-".join(map(str, c))
)
def test_states_and_gradients_that_cancel(case: tuple, dtype: torch.dtype, reverse: bool) -> None:
    extremes.test_states_and_gradients_that_cancel(case, dtype, reverse, "cuda")


@pytest.mark.parametrize("steps_of_A", [20_000, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str)
def test_repeats_beside_another_stream(dtype: torch.dtype, steps_of_A: int) -> None:
    """Tiles that others hold up find their states in other ways, and come to the same bits."""
    A, b, weight = (torch.rand(T, 1, 300, dtype=dtype, device="cuda") for T in (steps_of_A, 20_000, 20_000))
    A = A.mul_(0.6).requires_grad_()
    b.requires_grad_()
    found, busy, side = [], torch.ones(1 << 24, device="cuda"), torch.cuda.Stream()
    for size in (0, 12, 20, 24, 16, 22):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(size // 4):
                busy[: 1 << size].mul_(1.0)
        x = linear_scan(A, b)
        found.append([x, *torch.autograd.grad(x, (A, b), weight)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_graph_replay() -> None:
    extremes.test_graph_replay_of_chaotic_states("diagonal")
    extremes.test_graph_replay_of_states_and_gradients_that_cancel(("fixed", 8192, 2, 40, "diagonal"))


def test_two_streams_at_once() -> None:
    """Tiles of two calls that run side by side do not hear each other."""
    problems = [Sample(20_000, 1, 64, "diagonal").inputs(torch.float32, "cuda") for _ in range(2)]
    want = [linear_scan(*p) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(5):
        found = []
        for stream, problem in zip(streams, problems, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(linear_scan(*problem))
        torch.cuda.synchronize()
        assert all(torch.equal(f, w) for f, w in zip(found, want, strict=True))
