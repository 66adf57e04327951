"""linear_scan against its step-by-step twin in fp64, on every device, layout and dtype."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from weft.scan import linear_scan, linear_scan_reference

from tests.common import BOUNDS, DEVICES, DTYPES, assert_close, pairs, poisoned, relative_error, with_instructions
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

FEW = [Sample(9, 3, 5, layout, x0, reverse=x0) for layout in LAYOUTS for x0 in (False, True)]

sample = pytest.mark.parametrize("sample", SAMPLES, ids=str)
few = pytest.mark.parametrize("sample", FEW, ids=str)
device = pytest.mark.parametrize("device", DEVICES)


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same numbers in fp64 on the CPU, detached."""
    return [None if t is None else t.detach().cpu().double() for t in tensors]


def run(inputs: tuple, flags: dict, weight: Tensor, op=linear_scan) -> tuple[Tensor, list[Tensor]]:
    """x and the gradients of (x * weight).sum() by A, b and x0."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
    x = op(*inputs, **flags)
    present = [t for t in inputs if t is not None]
    # One reference step without x0 does not use A at all.
    return x, list(torch.autograd.grad((x * weight).sum(), present, allow_unused=True, materialize_grads=True))


def gradients_agree(sample: Sample, got: list[Tensor], want: list[Tensor], bound: float) -> None:
    if not sample.x0 and sample.T and sample.layout not in CONSTANT:
        first = sample.T - 1 if sample.reverse else 0
        assert (got[0][first] == 0).all(), "A of the first step has no influence"
        want[0][first] = 0
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, bound)


@device
@pytest.mark.parametrize(("sample", "dtype"), TYPED, ids=str)
def test_agrees_with_reference(sample: Sample, dtype: torch.dtype, device: str) -> None:
    inputs = sample.inputs(dtype, device)
    with poisoned():
        x = linear_scan(*inputs, **sample.flags)
    assert x.dtype == dtype and x.device == inputs[1].device and x.is_contiguous()
    assert_close(x, linear_scan_reference(*wide(*inputs), **sample.flags))


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_lower_instruction_sets(capability: str) -> None:
    with_instructions(capability, __file__, "cpu and (agrees_with_reference or any_shape or bad_row) and not gradients")


BITS = """
import torch, weft
torch.manual_seed(0)
A, b = torch.rand(200, 1, 40), torch.randn(200, 1, 40)
print(torch.ops.weft.linear_scan(A, b).view(torch.int32).sum().item())
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="nothing to lower")
def test_the_instruction_set_is_torchs() -> None:
    """A fused multiply-add rounds once: what has none ends in other bits."""
    found = {}
    for capability in ("default", "avx2"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        run = subprocess.run([sys.executable, "-c", BITS], env=environment, capture_output=True, text=True, check=True)
        found[capability] = run.stdout
    assert found["default"] != found["avx2"]


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


def _every_second(t: Tensor) -> Tensor:
    spread = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    spread[..., ::2] = t
    return spread[..., ::2]


def _batch_first(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def _off_by_one(t: Tensor) -> Tensor:
    """Contiguous, but one element off any wider alignment."""
    storage = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
    view = storage[1:].view(t.shape)
    view.copy_(t)
    return view


def _inner(t: Tensor) -> Tensor:
    """A window of a larger tensor whose border is NaN."""
    padded = torch.full([n + 2 for n in t.shape], torch.nan, dtype=t.dtype, device=t.device)
    window = padded[tuple(slice(1, 1 + n) for n in t.shape)]
    window.copy_(t)
    return window


def _matrices_by_columns(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() == 4 else t


@device
@pairs(
    view=[_every_second, _batch_first, _off_by_one, _inner, _matrices_by_columns],
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
@pytest.mark.parametrize("view", [torch.clone, _off_by_one, _inner, _matrices_by_columns])
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
    for H, view in itertools.product((8, 16, 24, 32), (_off_by_one, _inner)):
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


@device
@few
def test_opcheck_of_the_backward(sample: Sample, device: str) -> None:
    A, b, x0 = sample.inputs(torch.float32, device)
    A = torch.nan_to_num(A)
    leaves = [None if t is None else t.clone().requires_grad_() for t in (A, b, x0)]
    x = linear_scan(A, b, x0, **sample.flags)
    mask = [True, True, x0 is not None]
    opcheck(torch.ops.weft.linear_scan_backward, (torch.randn_like(b), leaves[0], x, x0, *sample.flags.values(), mask))


@device
def test_opcheck_of_masked_gradients(device: str) -> None:
    A, b, x0 = Sample(9, 3, 5).inputs(torch.float32, device)
    for mask in ([False, True, False], [False, False, True]):
        opcheck(torch.ops.weft.linear_scan_backward, (b, A, None, x0, False, False, mask))


@device
def test_compiles_with_the_default_backend(device: str) -> None:
    torch._dynamo.reset()
    leaves = [t.requires_grad_() for t in Sample(7, 3, 5).inputs(torch.float32, device)]
    x = torch.compile(linear_scan, fullgraph=True)(*leaves)
    want = linear_scan(*leaves)
    assert torch.equal(x, want)
    weight = torch.randn_like(x)
    for g, w in zip(torch.autograd.grad(x, leaves, weight), torch.autograd.grad(want, leaves, weight), strict=True):
        assert torch.equal(g, w)


@device
@pytest.mark.parametrize("layout", ["dense", "diagonal"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["A", "b", "x0"])
def test_a_bad_row_stays_alone(where: str, bad: float, layout: str, device: str) -> None:
    single, half = torch.float32, torch.float16
    for T, H, dtype in [(50, 6, single), (50, 40, single), (600, 20, single), (5000, 3, single), (900, 31, half)]:
        A, b, x0 = Sample(T, 3, H, layout).inputs(dtype, device)
        clean = linear_scan(A, b, x0)
        {"A": A[T // 2], "b": b[T // 2], "x0": x0}[where][1] = bad
        x = linear_scan(A, b, x0)
        assert torch.equal(x[:, [0, 2]], clean[:, [0, 2]])
        at = 0 if where == "x0" else T // 2
        assert torch.equal(x[:at, 1], clean[:at, 1])
        assert not x[at:, 1].isfinite().any(dim=-1).all(), "it flows through its own row"
        if bad != bad:
            assert x[at:, 1].isnan().all()
        weight = torch.ones_like(x)
        _, gradients = run((A, b, x0), {}, weight)
        assert gradients[1][:, [0, 2]].isfinite().all() and gradients[0][:, [0, 2]].isfinite().all()


# Chains that overflow or underflow as products of matrices, but not as a state that is carried through them. ----------


def _orthogonal(T: int, B: int, H: int) -> Tensor:
    return torch.linalg.qr(torch.randn(T, B, H, H, dtype=torch.float64)).Q


def _swing(T: int, period: int, factor: float) -> Tensor:
    """Factors that grow for a period and shrink for the next: 8 ** 60 = 1.5e54 up, then down again."""
    growing = (torch.arange(T) // period) % 2 == 0
    return torch.where(growing, factor, 1 / factor).double()


def chaotic(kind: str, T: int, B: int, H: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """A, b and x0 in fp64, the states in the range of fp32."""
    A = (
        _orthogonal(T, B, H)
        if layout == "dense"
        else torch.rand(T, B, H, dtype=torch.float64).add(0.5).log().mul(0.1).exp()
    )
    shape = (T, 1, 1, 1) if layout == "dense" else (T, 1, 1)
    b, x0 = torch.zeros(T, B, H, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    if layout != "dense":
        # Factors whose products stay near 1: each step takes back what the step before it did.
        A[1::2] = 1 / A[: T - T % 2 : 2]
    if kind == "up":
        A *= _swing(T, 60, 8).view(shape)
        x0 *= 1e-27
        b[::7] = 1e-28 * torch.randn(len(range(0, T, 7)), B, H, dtype=torch.float64)
        b[T % 120 :] = 0
    elif kind == "down":
        A /= _swing(T, 60, 8).view(shape)
        x0 *= 1e27
    elif kind == "both":
        # Half of the state goes up while the other half goes down.
        half = H // 2
        swing = _swing(T, 60, 8)
        if layout == "dense":
            A[..., :half, half:] = 0
            A[..., half:, :half] = 0
            A[..., :half, :half] = _orthogonal(T, B, half) * swing.view(shape)
            A[..., half:, half:] = _orthogonal(T, B, H - half) / swing.view(shape)
        else:
            A[..., :half] *= swing.view(shape)
            A[..., half:] /= swing.view(shape)
        x0[:, :half] *= 1e-27
        x0[:, half:] *= 1e27
    elif kind == "zeros":
        # Nothing but zeros meets an enormous product, until the last steps.
        A *= 10
        x0.zero_()
        b[-5:] = torch.randn(5, B, H, dtype=torch.float64)
    elif kind == "resets":
        # A grows by 10 a step and is zero at every 30th: a product is zero where a running sum was enormous.
        A *= 10
        A[29::30] = 0
        b[:] = 1e-3 * torch.randn(T, B, H, dtype=torch.float64)
    return A, b, x0


CHAOS = ["up", "down", "both", "zeros", "resets"]


def chaotic_error(got: Tensor, want: Tensor) -> float:
    """The largest relative error of one half of one state: each has its own size."""
    half = got.shape[-1] // 2
    worst = 0.0
    for part in (slice(None, half), slice(half, None)):
        g, w = got[..., part].double(), want[..., part]
        size = w.norm(dim=-1)
        error = (g - w).norm(dim=-1) / size.where(size > 0, 1)
        worst = max(worst, error.max().item())
        assert g.isfinite().all()
    return worst


def chaotic_bound(T: int) -> float:
    """Every step adds some units of roundoff, 6e-8, which orthogonal steps carry along undiminished."""
    return 3e-7 * T


@device
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", ["dense", "diagonal"])
@pytest.mark.parametrize("kind", CHAOS)
@pytest.mark.parametrize(("T", "B", "H"), [(10_000, 2, 6), (3_000, 1, 20), (700, 2, 40), (300, 1, 130)])
def test_chaotic_states(T, B, H, kind: str, layout: str, reverse: bool, device: str) -> None:
    A, b, x0 = (t.float() for t in chaotic(kind, T, B, H, layout))
    if reverse:
        A, b = A.flip(0), b.flip(0)
    want = linear_scan_reference(*wide(A, b, x0), reverse=reverse)
    x = linear_scan(*(t.to(device) for t in (A, b, x0)), reverse=reverse).cpu()
    assert chaotic_error(x, want) < chaotic_bound(T)


@device
@pytest.mark.parametrize("layout", ["dense", "diagonal"])
@pytest.mark.parametrize("kind", ["up", "down", "both", "zeros"])
@pytest.mark.parametrize(("T", "B", "H"), [(10_000, 1, 6), (600, 2, 40)])
def test_chaotic_gradients(T, B, H, kind: str, layout: str, device: str) -> None:
    """The gradient runs back through the same products; by the last x, it starts where x0 does in the states."""
    A, _, start = (t.float() for t in chaotic(kind, T, B, H, layout))
    A = A.flip(0).to(device)
    b = torch.zeros(T, B, H, device=device, requires_grad=True)
    x0 = torch.zeros(B, H, device=device, requires_grad=True)
    if kind == "zeros":
        start = torch.zeros_like(start)
    x = linear_scan(A, b, x0)
    got_b, got_x0 = torch.autograd.grad(x[-1], [b, x0], start.to(device))
    # lambda[t] = A[t+1]^T lambda[t+1]
    want = linear_scan_reference(
        A.cpu().double(), torch.zeros(T, B, H).double(), start.double(), reverse=True, transpose=True
    )
    assert chaotic_error(got_b.cpu()[:-1], want[1:]) < chaotic_bound(T)
    assert chaotic_error(got_x0.cpu(), want[0]) < chaotic_bound(T)


# Chains whose products and offsets cancel: the state is far smaller than the terms it would be the sum of. ------------


class Cancelling(NamedTuple):
    """A problem, a gradient of x, and the x, lambda and gradient of x0 that they lead to, all exact in every dtype."""

    A: Tensor
    b: Tensor
    x0: Tensor
    grad: Tensor
    x: Tensor
    grad_b: Tensor
    grad_x0: Tensor


def cancelling(kind: str, T: int, B: int, H: int, layout: str, reverse: bool = False) -> Cancelling:
    """In the order of processing, and turned round with `reverse`.

    fixed: x = 2 x - 1 from 1. The product of n steps is 2^n, and what they add is 1 - 2^n.
    hyperbolic: eigenvalues 4 and 1, and x on the direction of 1. The product of n steps maps x to a difference of 4^n.
    Both are their own transposes, so that the gradients run back over the same chain.
    """
    A, b = 2 * torch.eye(H, dtype=torch.float64).expand(T, B, H, H), -torch.ones(T, B, H, dtype=torch.float64)
    x0, factor = torch.ones(B, H, dtype=torch.float64), 2
    if layout == "diagonal":
        A = torch.full((T, B, H), 2.0, dtype=torch.float64)
    elif kind == "hyperbolic":
        pair = torch.tensor([[2.5, 1.5], [1.5, 2.5]], dtype=torch.float64)
        A, b = torch.kron(torch.eye(H // 2, dtype=torch.float64), pair).expand(T, B, H, H), torch.zeros_like(b)
        x0[:, 1::2], factor = -1, 1
    grad = b.clone()
    grad[-1] = x0
    x = x0.expand(T, B, H)
    if reverse:
        grad = grad.flip(0)
    return Cancelling(A.contiguous(), b, x0, grad, x, x, factor * x0)


def assert_exact(problem: Cancelling, x: Tensor, gradients: list[Tensor]) -> None:
    before = problem.x0 if problem.A.dim() == 3 else problem.x0.unsqueeze(-2)
    grad_A = (problem.x if problem.A.dim() == 3 else problem.x.unsqueeze(-1)) * before
    for got, want in zip([x, *gradients], [problem.x, grad_A, problem.grad_b, problem.grad_x0], strict=True):
        assert torch.equal(got.cpu().double(), want)


CANCELLING = [
    *(("fixed", T, B, H, "diagonal") for T, B, H in [(8192, 1, 3), (8192, 2, 40), (700, 3, 5)]),
    *((kind, T, 1, H, "dense") for kind in ("fixed", "hyperbolic") for T, H in [(3000, 2), (3000, 20), (600, 64)]),
    *((kind, 300, 2, H, "dense") for kind in ("fixed", "hyperbolic") for H in (128, 160)),
]


@device
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CANCELLING, ids=lambda case: "-".join(map(str, case)))
def test_states_and_gradients_that_cancel(case: tuple, dtype: torch.dtype, reverse: bool, device: str) -> None:
    problem = cancelling(*case, reverse=reverse)
    A, b, x0, grad = (t.to(device=device, dtype=dtype) for t in problem[:4])
    assert_exact(problem, *run((A, b, x0), {"reverse": reverse}, grad))


# Gradients inside autocast, and mapped --------------------------------------------------------------------------------


@device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("H", [5, 160])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_inside_autocast(layout: str, H: int, dtype: torch.dtype, device: str) -> None:
    inputs = Sample(9, 3, H, layout).inputs(dtype, device)
    leaves = [t.requires_grad_() for t in inputs]
    weight = torch.randn_like(inputs[1])
    x = linear_scan(*leaves)
    want = torch.autograd.grad(x, leaves, weight, retain_graph=True)
    masks = (inputs[0].detach(), x.detach(), inputs[2].detach(), False, False, [True] * 3)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = torch.autograd.grad(x, leaves, weight, retain_graph=True)
        differentiable = torch.autograd.grad(x, leaves, weight, create_graph=True)
        called = torch.ops.weft.linear_scan_backward(weight, *masks)
    for w, *others in zip(want, inside, called, strict=True):
        assert all(g.dtype == dtype and torch.equal(g, w) for g in others)
    for g, w in zip(differentiable, want, strict=True):
        assert g.dtype == dtype
        assert_close(g, w)


@device
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("layout", ["shared", "shared_4d"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_gradients_of_a_shared_matrix_round_once(dtype, layout: str, create_graph: bool, device: str) -> None:
    A, b, x0 = Sample(1, 4096, 6, layout).inputs(dtype, device)
    weight = torch.randn_like(b)
    grad_A, _ = torch.autograd.grad(
        linear_scan(A.requires_grad_(), b, x0.requires_grad_()), [A, x0], weight, create_graph=create_graph
    )
    # One step: nothing is rounded before the sum over the batch.
    assert_close(grad_A.squeeze(), weight[0].cpu().double().mT @ x0.detach().cpu().double())


@device
@pytest.mark.parametrize("needed", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_gradients(layout: str, needed: tuple, device: str) -> None:
    leaves = [t.requires_grad_() for t in Sample(6, 3, 5, layout, True, True, True).inputs(torch.float64, device)]
    wanted = [leaves[i] for i in needed]
    x = linear_scan(*leaves, reverse=True, transpose=True)
    weights = torch.randn(4, *x.shape, dtype=x.dtype, device=device)
    got = torch.autograd.grad(x, wanted, weights, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(x, wanted, weight, retain_graph=True) for weight in weights]
    for g, w in zip(got, zip(*each, strict=True), strict=True):
        assert_close(g, torch.stack(w))


# All, each alone, and some, in dimensions that differ.
MAPPED = [(0, 0, 1), (1, None, None), (None, 2, None), (None, None, 1), (-1, 2, None), (-1, 0, 1)]
MAPPED_BACKWARD = [(0, 0, 1, 1), (1, None, None, None), (None, 2, None, None), (None, None, 1, None)]
MAPPED_BACKWARD += [(None, None, None, 1), (0, 2, None, 1), (1, 0, 1, None)]


@device
@pytest.mark.parametrize("mapped", MAPPED_BACKWARD, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_of_the_backward(layout: str, mapped: tuple, device: str) -> None:
    if mapped == (None,) * 4:
        mapped = (0,) * 4
    if layout == "constant_1d" and mapped[1] == 2:
        mapped = (mapped[0], 1, *mapped[2:])
    N, backward = 4, torch.ops.weft.linear_scan_backward
    stacked, single = [], []
    samples = [Sample(6, 3, 5, layout).inputs(torch.float64, device) for _ in range(N)]
    for position, dim in enumerate(mapped):  # grad, A, x, x0
        each = [torch.randn_like(i[1]) if position in (0, 2) else i[0 if position == 1 else 2] for i in samples]
        stacked.append(each[0] if dim is None else torch.stack(each, dim))
        single.append([each[0]] * N if dim is None else each)
    flags = (False, False, [True] * 3)
    torch._C._functorch._set_vmap_fallback_enabled(False)  # torch would loop where there is no rule
    try:
        got = torch.func.vmap(lambda *t: backward(*t, *flags), mapped)(*stacked)
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)
    want = zip(*(backward(*t, *flags) for t in zip(*single, strict=True)), strict=True)
    for g, w in zip(got, want, strict=True):
        assert_close(g, torch.stack(w))


# torch.func -----------------------------------------------------------------------------------------------------------


@device
@pytest.mark.parametrize("mapped", MAPPED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap(layout: str, mapped: tuple, device: str) -> None:
    if mapped == (None, None, None):
        mapped = (0, 0, 0)
    N = 4
    inputs = [Sample(6, 3, 5, layout).inputs(torch.float64, device) for _ in range(N)]
    stacked, single = [], []
    for position, dim in enumerate(mapped):
        each = [i[position] for i in inputs]
        stacked.append(each[0] if dim is None else torch.stack(each, dim))
        single.append([each[0]] * N if dim is None else each)
    got = torch.func.vmap(linear_scan, mapped)(*stacked)
    want = torch.stack([linear_scan(A, b, x0) for A, b, x0 in zip(*single, strict=True)])
    assert torch.equal(got, want)


@device
def test_vmap_without_x0(device: str) -> None:
    b = torch.randn(4, 6, 3, 5, dtype=torch.float64, device=device)
    A = Sample(6, 3, 5).inputs(torch.float64, device)[0]
    got = torch.func.vmap(lambda b: linear_scan(A, b, reverse=True, transpose=True))(b)
    assert torch.equal(got, torch.stack([linear_scan(A, x, reverse=True, transpose=True) for x in b]))


@device
@pytest.mark.parametrize("layout", ["dense", "shared", "diagonal", "constant_1d"])
def test_one_start_for_the_batch(layout: str, device: str) -> None:
    A, b, x0 = Sample(9, 3, 5, layout, reverse=True).inputs(torch.float64, device)
    leaves = [t.requires_grad_() for t in (A, b, x0[0].clone())]
    flags = {"reverse": True}
    x, want = linear_scan(*leaves, **flags), linear_scan_reference(*leaves, **flags)
    assert_close(x, want)
    weight = torch.randn_like(b)
    got = torch.autograd.grad(x, leaves, weight, create_graph=True)
    expected = torch.autograd.grad(want, leaves, weight, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in got), leaves)
    expected_second = torch.autograd.grad(sum(g.square().sum() for g in expected), leaves)
    for g, w in zip((*got, *second), (*expected, *expected_second), strict=True):
        assert_close(g, w)
    starts = torch.randn(4, 5, dtype=torch.float64, device=device)
    detached = [t.detach() for t in (A, b)]
    mapped = torch.func.vmap(lambda start: linear_scan(*detached, start, **flags))(starts)
    # Not to the last bit: how a scan runs may depend on the alignment of its rows.
    assert_close(mapped, torch.stack([linear_scan(*detached, start, **flags) for start in starts]))
    half = [t.detach().half().requires_grad_() for t in leaves]
    grad_x0 = torch.autograd.grad(linear_scan(*half, **flags), half[2], weight.half())[0]
    assert grad_x0.dtype == torch.float16 and grad_x0.shape == (5,)


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


@device
def test_function_transforms(device: str) -> None:
    inputs = Sample(6, 3, 5).inputs(torch.float64, device)

    def loss(op):
        return lambda A, b, x0: op(A, b, x0).sin().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        got = transform(loss(linear_scan), (0, 1, 2))(*inputs)
        want = transform(loss(linear_scan_reference), (0, 1, 2))(*inputs)
        for g, w in zip(got, want, strict=True):
            assert_close(g, w)
    _, tangent = torch.func.jvp(loss(linear_scan), inputs, inputs)
    _, want = torch.func.jvp(loss(linear_scan_reference), inputs, inputs)
    assert_close(tangent, want)


@device
def test_forward_mode(device: str) -> None:
    import torch.autograd.forward_ad as forward_ad

    A, b, x0 = Sample(6, 3, 5).inputs(torch.float64, device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(b, torch.ones_like(b))
        tangent = forward_ad.unpack_dual(linear_scan(A, dual, x0)).tangent
        assert_close(tangent, linear_scan(A, torch.ones_like(b), torch.zeros_like(x0)))


# Bad input ------------------------------------------------------------------------------------------------------------


def f32(*shape: int) -> Tensor:
    return torch.zeros(shape)


BAD = {
    "b is no tensor": ((f32(4, 2, 3), [1.0]), TypeError, "b must be a Tensor, got list"),
    "A is integer": ((f32(4, 2, 3).int(), f32(4, 2, 3)), TypeError, "A must be float16.*got Int"),
    "A is complex": ((f32(4, 2, 3).cfloat(), f32(4, 2, 3)), TypeError, "A must be float16.*got ComplexFloat"),
    "b is integer": ((f32(4, 2, 3), f32(4, 2, 3).long()), TypeError, "b must have the dtype of A.*got Long"),
    "mixed dtypes": ((f32(4, 2, 3), f32(4, 2, 3).double()), TypeError, "b must have the dtype of A.*got Double"),
    "mixed x0": ((f32(4, 2, 3), f32(4, 2, 3), f32(2, 3).half()), TypeError, "x0 must have the dtype of A.*got Half"),
    "b has rank 2": ((f32(4, 2, 3), f32(4, 6)), ValueError, r"b must be \(T, B, H\), got \[4, 6\]"),
    "A has rank 2": ((f32(4, 3), f32(4, 2, 3)), ValueError, r"A must be \(T, B, H, H\).*got \[4, 3\]"),
    "A has rank 5": ((f32(4, 2, 3, 3, 1), f32(4, 2, 3)), ValueError, r"got \[4, 2, 3, 3, 1\]"),
    "wrong T": ((f32(5, 2, 3, 3), f32(4, 2, 3)), ValueError, r"got \[5, 2, 3, 3\]"),
    "wrong T, diagonal": ((f32(5, 2, 3), f32(4, 2, 3)), ValueError, r"got \[5, 2, 3\]"),
    "wrong B": ((f32(4, 7, 3, 3), f32(4, 2, 3)), ValueError, r"got \[4, 7, 3, 3\]"),
    "wrong H": ((f32(4, 2, 5, 5), f32(4, 2, 3)), ValueError, r"got \[4, 2, 5, 5\]"),
    "A is not square": ((f32(4, 2, 3, 4), f32(4, 2, 3)), ValueError, r"got \[4, 2, 3, 4\]"),
    "x0 has rank 3": ((f32(4, 2, 3), f32(4, 2, 3), f32(1, 2, 3)), ValueError, r"x0 must be \(B, H\).*got \[1, 2, 3\]"),
    "x0 has the wrong B": ((f32(4, 2, 3), f32(4, 2, 3), f32(1, 3)), ValueError, r"x0 must be \(B, H\).*got \[1, 3\]"),
}


@device
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, device: str) -> None:
    arguments, error, message = BAD[case]
    arguments = [t.to(device) if isinstance(t, Tensor) else t for t in arguments]
    with pytest.raises(error, match=f"linear_scan: .*{message}"):
        linear_scan(*arguments)
    sample = Sample(5, 2, 3)
    inputs = sample.inputs(torch.float32, device)
    assert_close(linear_scan(*inputs), linear_scan_reference(*wide(*inputs)))


@pytest.mark.parametrize("case", [case for case in BAD if "no tensor" not in case])
def test_bad_fake_input(case: str) -> None:
    arguments, error, message = BAD[case]
    with FakeTensorMode() as mode, pytest.raises(error, match="linear_scan: .*" + message.split(" ")[0]):
        linear_scan(*(mode.from_tensor(t) for t in arguments))


@pytest.mark.parametrize("device", DEVICES)
def test_meta_tensors_beside_others(device: str):
    A, b, x0 = (torch.zeros(shape, device=device) for shape in ((4, 2, 3, 3), (4, 2, 3), (2, 3)))
    where = rf"must be on the device of A, {device}(:0)?, got meta"
    with pytest.raises(RuntimeError, match=f"linear_scan: b {where}"):
        torch.ops.weft.linear_scan(A, b.to("meta"), x0)
    with pytest.raises(RuntimeError, match=f"linear_scan: x0 {where}"):
        torch.ops.weft.linear_scan(A, b, x0.to("meta"))
    with pytest.raises(RuntimeError, match=rf"linear_scan: b must be on the device of A, meta, got {device}"):
        torch.ops.weft.linear_scan(A.to("meta"), b)
    with pytest.raises(RuntimeError, match=f"linear_scan_backward: x {where}"):
        torch.ops.weft.linear_scan_backward(b, A, b.to("meta"), x0, False, False, [True] * 3)


@pytest.mark.cuda
def test_mixed_devices() -> None:
    with pytest.raises(RuntimeError, match="linear_scan: b must be on the device of A, cpu, got cuda"):
        linear_scan(f32(4, 2, 3), f32(4, 2, 3).cuda())
    with pytest.raises(RuntimeError, match="linear_scan: x0 must be on the device of A, cuda"):
        linear_scan(f32(4, 2, 3).cuda(), f32(4, 2, 3).cuda(), f32(2, 3))


# CUDA only ------------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["dense", "diagonal"])
def test_graph_replay_of_chaotic_states(layout: str) -> None:
    """Captured on tame inputs, replayed on chaotic ones: what has to be done again is decided on the device."""
    T, B, H = 6000, 2, 6
    static = [t.cuda() for t in Sample(T, B, H, layout).inputs(torch.float32)]
    linear_scan(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = linear_scan(*static)
    for kind in CHAOS:
        chaos = [t.float() for t in chaotic(kind, T, B, H, layout)]
        for t, source in zip(static, chaos, strict=True):
            t.copy_(source)
        graph.replay()
        assert chaotic_error(x.cpu(), linear_scan_reference(*wide(*chaos))) < chaotic_bound(T)


@pytest.mark.cuda
@pytest.mark.parametrize("case", [case for case in CANCELLING if case[1] != 700], ids=lambda c: "-".join(map(str, c)))
def test_graph_replay_of_states_and_gradients_that_cancel(case: tuple) -> None:
    _, T, B, H, layout = case
    static = [t.cuda() for t in Sample(T, B, H, layout).inputs(torch.float32)]
    weight = torch.randn_like(static[1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(tuple(static), {}, weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(tuple(static), {}, weight)
    problem = cancelling(*case)
    for t, source in zip([*static, weight], problem[:4], strict=True):
        t.copy_(source)
    graph.replay()
    assert_exact(problem, *captured)


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
@pytest.mark.parametrize("view", [_batch_first, _off_by_one, _inner, _matrices_by_columns])
@pytest.mark.parametrize("H", [64, 75, 128])
def test_tall_strides(view, H: int, dtype: torch.dtype) -> None:
    sample = Sample(300, 1, H, reverse=H == 75)
    inputs = sample.inputs(dtype, "cuda")
    with poisoned():
        x = linear_scan(*(view(t) for t in inputs), **sample.flags)
    assert_close(x, linear_scan_reference(*wide(*inputs), **sample.flags))


@pytest.mark.cuda
@pairs(
    size=[(900, 1, 33), (900, 1, 64), (500, 2, 100), (900, 1, 128), (900, 1, 160)],
    kind=CHAOS,
    reverse=[False, True],
    transpose=[False, True],
)
def test_tall_chaotic_states(size: tuple, kind: str, reverse: bool, transpose: bool) -> None:
    T, B, H = size
    A, b, x0 = (t.float() for t in chaotic(kind, T, B, H, "dense"))
    if reverse:
        A, b = A.flip(0), b.flip(0)
    want = linear_scan_reference(*wide(A, b, x0), reverse=reverse, transpose=transpose)
    x = linear_scan(*(t.cuda() for t in (A, b, x0)), reverse=reverse, transpose=transpose).cpu()
    assert chaotic_error(x, want) < chaotic_bound(T)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["A", "b", "x0"])
@pytest.mark.parametrize("H", [40, 64, 96, 128, 160])
def test_a_bad_tall_row_stays_alone(H: int, where: str, bad: float) -> None:
    A, b, x0 = Sample(800, 2, H).inputs(torch.float32, "cuda")
    clean = linear_scan(A, b, x0)
    at = 0 if where == "x0" else 400
    {"A": A[at], "b": b[at], "x0": x0}[where][1] = bad
    x = linear_scan(A, b, x0)
    assert torch.equal(x[:, 0], clean[:, 0])
    assert torch.equal(x[:at, 1], clean[:at, 1])
    assert not x[at:, 1].isfinite().any(dim=-1).all(), "it flows through its own row"
    if bad != bad:
        assert x[at:, 1].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("H", [64, 128, 160])
def test_graph_replay_of_tall_chaotic_states(H: int) -> None:
    static = [t.cuda() for t in Sample(600, 1, H).inputs(torch.float32)]
    linear_scan(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = linear_scan(*static)
    for kind in CHAOS:
        chaos = [t.float() for t in chaotic(kind, 600, 1, H, "dense")]
        for t, source in zip(static, chaos, strict=True):
            t.copy_(source)
        graph.replay()
        assert chaotic_error(x.cpu(), linear_scan_reference(*wide(*chaos))) < chaotic_bound(600)


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
