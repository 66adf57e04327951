"""The kernels of the diagonal scan on a processor, by tests/emulator: blocks of any speed, copies and words that arrive
late, states that are found near or far, totals that cannot say what follows."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from weft._distributed.totals import unpack
from weft.scan import linear_scan_reference

from tests import emulated
from tests.common import BOUNDS, relative_error
from tests.scan.arguments import TYPES, LinearScan

pytestmark = emulated.MARKS

REAL, COMPLEX = (torch.bfloat16, torch.float32, torch.float64), (torch.complex64, torch.complex128)

_pointer, _int = ctypes.c_void_p, ctypes.c_int64


class DiagonalGradients(ctypes.Structure):
    _fields_ = [("scan", LinearScan), ("x", _pointer), ("x_t", _int), ("x_b", _int), ("x0", _pointer), ("x0_b", _int),
                ("grad_A", _pointer), ("grad_A_t", _int), ("grad_A_b", _int), ("summed", ctypes.c_bool),
                ("grad_x0", _pointer), ("wide_x0", ctypes.c_bool)]  # fmt: skip


class Case(NamedTuple):
    """Sizes, steps of a warp, what A is (None varies, else its strides are 0 in time) and how it goes."""

    T: int
    B: int
    H: int
    steps: int
    x0: bool = True
    constant: bool = False
    favour: int = 0
    kind: str = "tame"
    offset: int = 0  # elements that addresses are off any alignment
    turned: bool = False  # the last step lies first


def address(t: Tensor, *index: int) -> int:
    return t.data_ptr() + sum(i * s for i, s in zip(index, t.stride(), strict=True)) * t.element_size()


def begin(t: Tensor, step: int, turned: bool) -> int:
    """The address of a step, which may be beyond the ends."""
    return t.data_ptr() + (t.shape[0] - 1 - step if turned else step) * t[0].numel() * t.element_size()


def off(t: Tensor, offset: int) -> Tensor:
    """A copy that begins so many elements into its memory, with NaN around it."""
    n = t[0].numel()
    memory = torch.full((offset + t.numel() + 2 * n,), torch.nan, dtype=t.dtype)
    inner = memory[offset + n : offset + n + t.numel()].view(t.shape)
    return inner.copy_(t)


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Step-by-step finite; "cancels": products and offsets cancel; "bad": one channel becomes NaN in the middle."""
    T, B, H = case.T, case.B, case.H
    A = torch.rand(1 if case.constant else T, B, H).add(0.2)
    b, x0 = torch.randn(T, B, H), torch.randn(B, H)
    if dtype.is_complex:
        A = torch.polar(A, 6.3 * torch.rand_like(A))
        b, x0 = torch.complex(b, torch.randn(T, B, H)), torch.complex(x0, torch.randn(B, H))
    if case.kind == "cancels":
        states = torch.randint(1, 4, (T + 1, B, H))[..., ::2].float()
        turn = 2j if dtype.is_complex else 2
        A[..., ::2], b[..., ::2], x0[..., ::2] = turn, states[1:] - turn * states[:-1], states[0]
    elif case.kind == "bad":
        b[T // 2, 0, 0] = torch.nan
    elif case.kind == "swings":
        swing = torch.where((torch.arange(T) // 60) % 2 == 0, 8.0, 0.125)[: A.shape[0], None]
        A[..., 0] = swing * 1j if dtype.is_complex else swing
        b[..., 0], x0[..., 0] = 0, 1e-27
    if not case.x0 and not case.constant:
        A[0] = torch.nan
    return A.to(dtype), b.to(dtype), x0.to(dtype) if case.x0 else None


Run = Callable[[DiagonalGradients, Case, int, Tensor | None, int], None]  # int: bytes of an element, and a seed
"""Runs the scan, or with sums, (chunks, B, H) of nothing yet, the gradients."""


def by_tiles(library: ctypes.CDLL, engine: bool = True) -> Run:
    """`engine`: the copy engine moves what it can."""

    def run(problem: DiagonalGradients, case: Case, size: int, sums: Tensor | None, seed: int) -> None:
        pieces = case.offset == 0 and case.H * size % 16 == 0
        to = None if sums is None else ctypes.c_void_p(sums.data_ptr())
        library.run(ctypes.byref(problem), sums is not None, case.steps, pieces, 3, case.favour, to, engine, seed)

    return run


def by_walk(library: ctypes.CDLL) -> Run:
    def run(problem: DiagonalGradients, case: Case, size: int, sums: Tensor | None, seed: int) -> None:
        if problem.summed:
            sums[1:] = 0
            problem.grad_A = sums.data_ptr()
        library.run(ctypes.byref(problem), sums is not None, seed)

    return run


def close(got: Tensor, want: Tensor, bound: float) -> bool:
    """Channel by channel, and NaN where there is NaN."""
    if got.is_complex():  # a channel's error is one of the pair
        if not torch.equal(got.isnan(), want.isnan()):
            return False
        got, want = (torch.view_as_real(t.where(~t.isnan(), 0)).movedim(-1, 1).flatten(0, 1) for t in (got, want))
    if not torch.equal(got.isnan(), want.isnan()):
        return False
    channels = zip(*(t.nan_to_num().permute(1, 2, 0).flatten(0, 1) for t in (got, want)), strict=True)
    return all(relative_error(g, w) <= bound for g, w in channels)


def view(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def forward(run: Run, case: Case, dtype: torch.dtype, seed: int) -> None:
    size = dtype.itemsize
    torch.manual_seed(seed)
    as_time = (lambda t: t.flip(0)) if case.turned else (lambda t: t)
    *given, x0 = inputs(case, dtype)
    A, b = (off(as_time(t), case.offset) for t in given)
    x0 = None if x0 is None else off(x0, case.offset)
    sign, results = -1 if case.turned else 1, []
    for again in range(2):
        out = off(torch.full_like(b, torch.nan), case.offset)
        scan = LinearScan(A=begin(A, 0, case.turned), A_t=0 if case.constant else sign * A.stride(0), A_b=A.stride(1),
                          A_row=1, b=begin(b, 0, case.turned), b_t=sign * b.stride(0), b_b=b.stride(1),
                          x0=None if x0 is None else x0.data_ptr(), x0_b=case.H, out=begin(out, 0, case.turned),
                          out_t=sign * out.stride(0), out_b=out.stride(1), T=case.T, B=case.B, H=case.H,
                          dtype=TYPES[dtype])  # fmt: skip
        run(DiagonalGradients(scan=scan), case, size, None, 2 * seed + again)
        results.append(as_time(out))
    A, b = map(as_time, (A, b))
    want = linear_scan_reference(wide(A).expand(b.shape), wide(b), None if x0 is None else wide(x0))
    assert close(results[0], want, 4 * BOUNDS[dtype.to_real()])
    first, second = (r.where(~r.isnan(), 0) for r in results)
    assert torch.equal(first, second), "other bits"


def gradients(run: Run, case: Case, dtype: torch.dtype, seed: int) -> None:
    """Of a scan that runs forward: the order of processing is the other."""
    size, state = dtype.itemsize, dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
    torch.manual_seed(seed)
    T, B, H = case.T, case.B, case.H
    as_time = (lambda t: t.flip(0)) if case.turned else (lambda t: t)
    *given, x0 = inputs(case, dtype)
    A, grad = (off(as_time(t), case.offset) for t in given)
    x0 = None if x0 is None else off(x0, case.offset)
    x, grad_A, grad_b = (off(torch.randn(T, B, H, dtype=state).to(dtype), case.offset) for _ in range(3))
    strands = 4 * size  # of a tile
    sums = torch.full((-(-T // (strands * case.steps)), B, H), torch.nan, dtype=state)
    grad_x0 = torch.full((B, H), torch.nan, dtype=state)
    back = B * H if case.turned else -B * H
    start = None if x0 is None else x0.data_ptr()
    last_A, step = (A.data_ptr(), 0) if case.constant else (begin(A, T, case.turned), back)
    scan = LinearScan(A=last_A, A_t=step, A_b=H, A_row=1, b=begin(grad, T - 1, case.turned), b_t=back, b_b=H,
                      out=begin(grad_b, T - 1, case.turned), out_t=back, out_b=H, T=T, B=B, H=H,
                      dtype=TYPES[dtype])  # fmt: skip
    problem = DiagonalGradients(scan=scan, x=begin(x, T - 2, case.turned), x_t=back, x_b=H, x0=start, x0_b=H,
                                grad_A=begin(grad_A, T - 1, case.turned), grad_A_t=back, grad_A_b=H,
                                summed=case.constant, grad_x0=None if x0 is None else grad_x0.data_ptr(),
                                wide_x0=True)  # fmt: skip
    run(problem, case, size, sums, seed)
    A, grad, x, grad_A, grad_b = map(as_time, (A, grad, x, grad_A, grad_b))
    zeros = wide(torch.zeros(1, B, H, dtype=dtype))
    after = torch.cat([wide(A).conj().expand(T, B, H)[1:], zeros])
    lambdas = linear_scan_reference(after, wide(grad), reverse=True)
    want_A = lambdas * torch.cat([zeros if x0 is None else wide(x0)[None], wide(x[:-1])]).conj()
    assert close(grad_b, lambdas, 4 * BOUNDS[dtype.to_real()])
    if case.constant:
        assert relative_error(view(sums.sum(0)), view(want_A.sum(0))) <= 1e-5
    else:
        assert close(grad_A, want_A, 4 * BOUNDS[dtype.to_real()])
        assert x0 is not None or (grad_A[0] == 0).all()
    if x0 is not None:
        assert relative_error(view(grad_x0), view(wide(A[0]).conj() * lambdas[0])) <= 1e-5


CASES = [
    Case(1, 1, 8, 1),
    Case(5, 2, 8, 1, x0=False),
    Case(14, 4, 36, 1),
    Case(100, 1, 40, 4),
    Case(150, 2, 36, 2, x0=False),
    Case(250, 1, 8, 2, favour=1),
    Case(250, 1, 8, 2, favour=2),
    Case(130, 2, 7, 4, offset=1),
    Case(150, 1, 40, 2, constant=True),
    Case(200, 1, 8, 4, kind="cancels"),
    Case(200, 1, 8, 4, kind="cancels", favour=1),
    Case(300, 1, 8, 4, kind="swings"),
    Case(150, 2, 8, 2, kind="bad"),
    Case(550, 1, 4, 2, favour=1),  # more tiles than a warp looks at
    Case(300, 2, 36, 3, turned=True),
    Case(161, 1, 40, 2, x0=False, turned=True),
]


WALKED = [
    Case(1, 1, 8, 1),
    Case(2, 1, 8, 1, x0=False),
    Case(32, 2, 40, 4),
    Case(33, 1, 72, 4, x0=False),
    Case(64, 1, 40, 4),
    Case(300, 3, 24, 4),
    Case(300, 1, 136, 4, x0=False),
    Case(40, 2, 40, 2, constant=True),
    Case(150, 2, 8, 2, kind="bad"),
    Case(150, 1, 8, 2, kind="swings"),
    Case(33, 1, 72, 4, turned=True),
]


def passes(run: Run, dtype: torch.dtype, cases: list[Case]) -> bool:
    def everything() -> None:
        signal.setitimer(signal.ITIMER_PROF, 60)  # who waits for what never comes ends, too, in seconds of computing
        for number, case in enumerate(cases):
            forward(run, case, dtype, number)
            if case.kind == "tame":
                gradients(run, case, dtype, number)

    return emulated.ends_well(everything)


def build(kernel: str, dtype: torch.dtype, folder: Path, **macros: int) -> ctypes.CDLL:
    return emulated.build(kernel, folder, SIZE=dtype.itemsize, COMPLEX=dtype.is_complex, **macros)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
def test_the_tiles_on_a_processor(dtype: torch.dtype, engine: bool, tmp_path) -> None:
    assert passes(by_tiles(build("diagonal_tiles", dtype, tmp_path), engine), dtype, CASES)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
def test_the_walk_on_a_processor(dtype: torch.dtype, many: bool, tmp_path) -> None:
    assert passes(by_walk(build("diagonal_walk", dtype, tmp_path, MANY=many)), dtype, WALKED)


def told(library: ctypes.CDLL, case: Case, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    A, b, x0 = inputs(case, dtype)
    if not case.x0:
        A[0] = torch.rand_like(A[0])  # which counts in the product alone
    out = torch.full_like(b, torch.nan)
    scan = LinearScan(A=A.data_ptr(), A_t=A.stride(0), A_b=A.stride(1), A_row=1, b=b.data_ptr(), b_t=b.stride(0),
                      b_b=b.stride(1), x0=None if x0 is None else x0.data_ptr(), x0_b=case.H, out=out.data_ptr(),
                      out_t=out.stride(0), out_b=out.stride(1), T=case.T, B=case.B, H=case.H,
                      dtype=TYPES[dtype])  # fmt: skip
    want = linear_scan_reference(wide(A), wide(b), None if x0 is None else wide(x0))
    expected = torch.ops.weft.slice_message(A, out[-1] * 0, True)
    message = torch.full_like(expected, -1)
    library.run_told(ctypes.byref(DiagonalGradients(scan=scan)), ctypes.c_void_p(message.data_ptr()), seed)
    assert close(out, want, 4 * BOUNDS[dtype])
    channels = case.B * case.H
    found, wanted = (unpack(t[:channels], dtype) for t in (message, expected))
    assert torch.equal(found.isnan(), wanted.isnan())
    assert ((found - wanted).abs() <= 1e-6 * wanted.abs())[~wanted.isnan()].all()
    assert torch.equal(message[channels:-1].view(dtype).view_as(out[-1]).nan_to_num(), out[-1].nan_to_num())
    assert message[-1] == 1


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_a_walk_tells_on_a_processor(dtype: torch.dtype, many: bool, tmp_path) -> None:
    library = build("diagonal_walk", dtype, tmp_path, MANY=many)

    def everything() -> None:
        signal.setitimer(signal.ITIMER_PROF, 60)
        for number, case in enumerate(WALKED):
            if not case.constant:
                told(library, case, dtype, number)

    assert emulated.ends_well(everything)


FLAWS = {
    "does not wait for its rows": ("      copy_wait<1>();\n", ""),
    "takes a state that is not there": (
        "from_word<Acc>(wait_for_word(state_word(known), state))",
        "from_word<Acc>(state)",
    ),
    "takes a near state that is not there": ("if (!__any_sync(~0u, first == 0)) {", "if (true) {"),
    "believes the nearest total": (
        "if (!total.follow(roundings(), x)) x = wait_for_state(chunk - 1);",
        "total.follow(roundings(), x);",
    ),
    "believes every total": (
        "if (!total.follow(roundings(), x)) x = wait_for_state(k);",
        "total.follow(roundings(), x);",
    ),
    "believes its own total": ("known &= group.all.follow(", "group.all.follow("),
    "runs nothing again": ("if (known && by_total) x = start;", "x = start;"),
    "reads an A before the first": ("first_ == 0 && scan_.x0 == nullptr ? 1 : 0", "0"),
    "starts before the starts are there": ("    __syncthreads();\n  }\n}\n", "  }\n}\n"),
    "takes x for x0": ("count_ > 0 ? count_ - 1 : count_", "count_ > 0 ? count_ : count_"),
    "publishes before all totals are made": (
        "        named_barrier<1, 32 * kTileWarps>();\n        if (threadIdx.x < 32) tile(1)",
        "        if (threadIdx.x < 32) tile(1)",
    ),
    "has a slot too few": ("constexpr int kSlots = 4;", "constexpr int kSlots = 3;"),
    "keeps totals of one tile": ("half_(int(number % 2))", "half_(0)"),
    "stops a tile early": ("(sums ? 4 : 3)", "(sums ? 3 : 2)"),
}
ENGINE_FLAWS = {
    "does not wait for its boxes": ("    mbarrier_wait(come(shared, number), number / kOwnSlots % 2);\n", ""),
    "waits for the phase before": ("number / kOwnSlots % 2", "(number / kOwnSlots + 1) % 2"),
    "fetches before it has written": (
        "      tile(number).replay();\n      fetch(number + kAhead);\n",
        "      fetch(number + kAhead);\n      tile(number).replay();\n",
    ),
    "reads an A before the first": ("first_ - tiles_.A_skipped", "first_"),
    "has no x0": ("if (g.x != nullptr && g.x0 != nullptr && owned_", "if (g.x0 == nullptr && owned_"),
    "takes the warps in order": ("tiles_.turned ? kTileWarps - 1 - warp_ : warp_", "warp_"),
    "makes totals of what is not used": ("      if (number >= 2) barrier_sync(kUsed + number % 2, kMany);\n", ""),
    "gives starts that are not read": ("        barrier_sync(kRead + number % 2, kMany);\n", ""),
    "starts before the starts are there": ("      barrier_sync(kGiven + number % 2, kMany);\n", ""),
    "finds before the totals are there": ("      barrier_sync(kMade + number % 2, 64);\n", ""),
}


@pytest.mark.parametrize(
    ("engine", "flaw"), [*((False, flaw) for flaw in FLAWS), *((True, flaw) for flaw in ENGINE_FLAWS)]
)
def test_the_emulator_notices(engine: bool, flaw: str, tmp_path) -> None:
    folder = emulated.with_flaw(
        "scan/linear/cuda/diagonal_tiles.cuh", *(ENGINE_FLAWS if engine else FLAWS)[flaw], tmp_path
    )
    assert not passes(by_tiles(build("diagonal_tiles", torch.float32, folder), engine), torch.float32, CASES)


WALK_FLAWS = {
    "waits for too few copies": ("copy_wait<kStages - 2>()", "copy_wait<kStages - 1>()"),
    "reads what others copy": ("    __syncwarp();\n", ""),
    "has x0 where there is none": ("&& owned && g.x0 != nullptr", "&& owned"),
    "fills a place too early": ("place == 0 ? kStages - 1 : place - 1", "place"),
}


@pytest.mark.parametrize("flaw", WALK_FLAWS)
def test_the_emulator_notices_in_a_walk(flaw: str, tmp_path) -> None:
    folder = emulated.with_flaw("scan/linear/cuda/diagonal_walk.cuh", *WALK_FLAWS[flaw], tmp_path)
    assert not passes(by_walk(build("diagonal_walk", torch.float32, folder, MANY=0)), torch.float32, WALKED)


def test_the_emulator_notices_what_is_not_conjugated(tmp_path) -> None:
    wrong = emulated.with_flaw("scan/linear/cuda/state.cuh", "kGradients ? conjugate(a) : a", "a", tmp_path)
    assert not passes(by_walk(build("diagonal_walk", torch.complex64, wrong, MANY=0)), torch.complex64, WALKED)
    assert not passes(by_tiles(build("diagonal_tiles", torch.complex64, wrong)), torch.complex64, CASES)
