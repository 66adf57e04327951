"""The kernels of linear_scan_readout on a processor, by tests/emulator: warps of any speed, states made anew."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from weft.scan import linear_scan_reference

from tests import emulated
from tests.common import BOUNDS
from tests.scan.arguments import TYPES
from tests.scan.samples import ReadOut as Sample

pytestmark = emulated.MARKS

_pointer, _int = ctypes.c_void_p, ctypes.c_int64


class Field(ctypes.Structure):
    _fields_ = [("at", _pointer), ("t", _int), ("b", _int), ("h", _int)]


class Result(ctypes.Structure):
    _fields_ = [("at", _pointer), ("t", _int), ("b", _int)]


class ReadOut(ctypes.Structure):
    _fields_ = [("A", Field), ("c", Field), ("b", Field), ("full", ctypes.c_bool), ("x0", Field), ("y", Result),
                ("starts", _pointer), *((n, _int) for n in "TBHN"), ("dtype", ctypes.c_int32)]  # fmt: skip


class Gradients(ctypes.Structure):
    _fields_ = [("scan", ReadOut), ("grad", Field), ("A", Result), ("b", Result), ("c", Result),
                ("sum_A", ctypes.c_bool), ("sum_c", ctypes.c_bool), ("x0", _pointer)]  # fmt: skip


def field(t: Tensor | None, steps: bool = True) -> Field:
    """Of (T, B, H, N), or (B, H, N) and (H, N) with the dimensions in front that are missing."""
    if t is None:
        return Field()
    while t.dim() < 4 and steps:
        t = t.unsqueeze(0)
    strides = [0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)]
    return Field(t.data_ptr(), *strides[:3])


def result(t: Tensor | None) -> Result:
    return Result() if t is None else Result(t.data_ptr(), t.stride(0), t.stride(1))


CASES = [
    (Sample(1, 1, 1, 1), False),
    (Sample(19, 2, 3, 4), True),
    (Sample(33, 1, 9, 16, x0=None), True),
    (Sample(40, 2, 3, 6, x0="shared"), False),
    (Sample(35, 1, 2, 70, x0=None), False),
    (Sample(21, 2, 3, 8, "B", "B", full=True), True),
    (Sample(37, 1, 3, 5, "TB", "TB", True, None), False),
    (Sample(34, 2, 3, 7, full=True), False),
    (Sample(70, 1, 2, 4, full=True, x0=None), True),
    (Sample(20, 2, 2, 36, "T", None, False), True),
]
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().to(torch.complex128 if t.is_complex() else torch.float64)


def off(got: Tensor, want: Tensor, bound: float) -> bool:
    got, want = (torch.view_as_real(t) if t.is_complex() else t for t in (wide(got), want))
    return not (got - want).norm() <= bound * want.norm()


class Problem(NamedTuple):
    """What is given, the gradient that arrives, and what is wanted. Not made in a forked process, in which torch's
    autograd does not run once it has had threads."""

    inputs: tuple[Tensor | None, ...]
    grad: Tensor
    want: Tensor
    gradients: list[Tensor | None]


def problem(dtype: torch.dtype, sample: Sample, seed: int) -> Problem:
    torch.manual_seed(seed)
    A, b, c, x0 = sample.inputs(dtype)
    if x0 is None and A.dim() == 4 and A.shape[0] > 1:
        A[0] = torch.nan
    leaves = [None if t is None else wide(t).requires_grad_() for t in (A.nan_to_num() if x0 is None else A, b, c, x0)]
    want = linear_scan_reference(leaves[0], leaves[1], leaves[3], c=leaves[2])
    grad = torch.randn(sample.T, sample.B, sample.H, dtype=state_type(dtype)).to(dtype)
    present = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(want, present, wide(grad), allow_unused=True, materialize_grads=True))
    return Problem((A, b, c, x0), grad, want.detach(), [None if t is None else next(found) for t in leaves])


def state_type(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex or dtype == torch.float64 else torch.float32


def check(library: ctypes.CDLL, dtype: torch.dtype, sample: Sample, aligned: bool, seed: int, given: Problem) -> None:
    assert library.problem_bytes() == ctypes.sizeof(Gradients)
    A, b, c, x0 = given.inputs
    T, B, H, N = sample.T, sample.B, sample.H, sample.N
    state = state_type(dtype)
    segment = {16: 8, 8: 16}.get(dtype.itemsize, 32)
    y = torch.full((T, B, H), torch.nan, dtype=dtype)
    starts = torch.full((-(-T // segment), B, H, N), torch.nan, dtype=state)
    scan = ReadOut(field(A), field(c), field(b), sample.full or N == 1, field(x0), result(y), starts.data_ptr(),
                   T, B, H, N, TYPES[dtype])  # fmt: skip
    constant = not (A.dim() == 4 and A.shape[0] > 1), not (c.dim() == 4 and c.shape[0] > 1)
    reads = 2 if not all(constant) else int(sample.full or N == 1)
    library.run(ctypes.byref(Gradients(scan=scan)), reads, False, aligned, seed)
    bound = 4 * BOUNDS[dtype.to_real()]
    assert not off(y, given.want, bound)
    grad_A, grad_c = (
        torch.full((B, H, N) if still else (T, B, H, N), torch.nan, dtype=state if still else dtype)
        for still in constant
    )
    grad_b, grad_x0 = torch.full_like(b, torch.nan), torch.full((B, H, N), torch.nan, dtype=state)

    def into(t: Tensor, still: bool) -> Result:
        return Result(t.data_ptr(), 0, 0) if still else result(t)

    scan.y = Result()
    gradients = Gradients(scan, field(given.grad.unsqueeze(-1)), into(grad_A, constant[0]), result(grad_b),
                          into(grad_c, constant[1]), *constant, None if x0 is None else grad_x0.data_ptr())  # fmt: skip
    library.run(ctypes.byref(gradients), reads, True, aligned, seed + 1)
    for got, want in zip((grad_A, grad_b, grad_c, grad_x0), given.gradients, strict=True):
        if want is None:
            continue
        got = wide(got)
        if got.shape != want.shape:
            while got.dim() < want.dim():
                got = got.unsqueeze(0)
            got = got.sum_to_size(want.shape)
        assert not off(got, want, 10 * bound), f"{sample}"


def passes(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    problems = [problem(dtype, sample, number) for number, (sample, _) in enumerate(CASES)]

    def everything() -> None:
        signal.setitimer(signal.ITIMER_PROF, 60)
        for number, (sample, aligned) in enumerate(CASES):
            check(library, dtype, sample, aligned, number, problems[number])

    return emulated.ends_well(everything)


def build(dtype: torch.dtype, folder: Path) -> ctypes.CDLL:
    return emulated.build("readout", folder, SIZE=dtype.itemsize, COMPLEX=dtype.is_complex)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_read_out_on_a_processor(dtype: torch.dtype, tmp_path: Path) -> None:
    assert passes(build(dtype, tmp_path), dtype)


FLAWS = {
    "sums the wrong lanes": ("mask >>= 1;\n  };", "};"),
    "keeps a state too late": ("t % Shape::kSegment == 0) my.keep", "t % Shape::kSegment == kSteps) my.keep"),
    "uses an A before the first": ("x.of[r] = first ? b.of[r] :", "x.of[r] ="),
    "forgets the state before": (
        "place(i0 + i - (i > 0 || i0 > 0), r) : start.of[r]",
        "place(i0 + i, r) : start.of[r]",
    ),
    "conjugates no A": ("conjugate(kEach ? as[i].of[r] : a.of[r])", "(kEach ? as[i].of[r] : a.of[r])"),
    "reads a segment's first steps twice": (
        "next_b.fetch(my, begin - kSegment, s.T);",
        "next_b.fetch(my, begin, s.T);",
    ),
    "takes A of the step": ("my.load(s.A, min(t + 1, s.T - 1))", "my.load(s.A, min(t, s.T - 1))"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_emulator_notices(flaw: str, tmp_path: Path) -> None:
    folder = emulated.with_flaw("scan/readout/cuda/readout_walk.cuh", *FLAWS[flaw], tmp_path)
    assert not passes(build(torch.complex64, folder), torch.complex64)
