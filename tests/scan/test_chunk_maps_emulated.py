"""The maps of chunks of the small dense scans, on a processor, by tests/emulator: made by the kernel that keeps columns
in registers, and carried through, for problems whose products overflow, underflow or cancel, too."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from weft.scan import linear_scan_reference

from tests import emulated
from tests.scan.arguments import CODES, LinearScan

pytestmark = emulated.MARKS

H = 20  # of the kernel that keeps columns in registers


class Chain(ctypes.Structure):
    """Of tests/emulator/chunk_maps.cpp."""

    _fields_ = [("count", ctypes.c_int), ("hidden", ctypes.c_int),
                *((name, ctypes.c_void_p) for name in ("maps", "starts", "exact", "redone"))]  # fmt: skip


class Case(NamedTuple):
    T: int = 37
    B: int = 3
    length: int = 10
    transpose: bool = False
    reverse: bool = False
    x0: bool = True
    shared: bool = False
    kind: str = "tame"


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """Step-by-step finite, but for "bad": one sequence becomes NaN in the middle."""
    A = torch.randn(case.T, 1 if case.shared else case.B, H, H) / H**0.5
    b, x0 = torch.randn(case.T, case.B, H), torch.randn(case.B, H)
    if case.kind == "decays":
        A, b[5:20], x0 = A * 2**-8.0, 0, x0 * 2.0**100
    elif case.kind == "grows":  # what is multiplied by 2^13 at every step is zero
        A[..., 3] = 0
        A[..., 3, 3], b[..., 3], x0[..., 3] = 2.0**13, 0, 0
        A[..., 3, :3], A[..., 3, 4:] = 0, 0
    elif case.kind == "cancels":
        A = 2 * torch.eye(H).expand(A.shape)
        states = torch.randint(1, 4, (case.T + 1, case.B, H)).float()
        if case.reverse:
            states = states.flip(0)
            b, x0 = states[:-1] - 2 * states[1:], states[-1]
        else:
            b, x0 = states[1:] - 2 * states[:-1], states[0]
    elif case.kind == "bad":
        b[case.T // 2, 1, 4] = torch.nan
    A = A.clone()
    if not case.x0:
        A[-1 if case.reverse else 0] = torch.nan
    return A, b, x0 if case.x0 else None


def struct(case: Case, A: Tensor, b: Tensor, x0: Tensor | None) -> LinearScan:
    """As the op describes it to a kernel."""
    turn, first = (-1, case.T - 1) if case.reverse else (1, 0)
    rows = (A.stride(3), A.stride(2)) if case.transpose else (A.stride(2), A.stride(3))
    return LinearScan(A=A[first].data_ptr(), A_t=turn * A.stride(0), A_b=0 if case.shared else A.stride(1),
                      A_row=rows[0], A_col=rows[1], b=b[first].data_ptr(), b_t=turn * b.stride(0), b_b=b.stride(1),
                      x0=None if x0 is None else x0.data_ptr(), x0_b=H, T=case.T, B=case.B, H=H,
                      dtype=CODES[4])  # fmt: skip


def floats_of_map(states: int) -> tuple[int, int]:
    """Of a row, and of the map."""
    row = states if states % 8 == 4 else states + 4
    return row, states * row + 2 * states


def starts_of(library: ctypes.CDLL, maps: Tensor, exact: Tensor, hidden: int, parts: int, padded: int, selects: bool,
              seed: int) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x before each map and after the last, (count + 1, states), and how often each chunk was redone."""
    count = len(maps)
    starts, redone = torch.full_like(exact, torch.nan), torch.zeros(count, dtype=torch.int32)
    chain = Chain(count, hidden, *(t.data_ptr() for t in (maps, starts, exact, redone)))
    library.carry_through(parts, padded, selects, ctypes.byref(chain), seed)
    return starts, redone


def columns_and_back(library: ctypes.CDLL, case: Case, seed: int) -> None:
    torch.manual_seed(seed)
    # One of the strides is not the least that there could be.
    A, b, x0 = inputs(case)
    A = torch.cat([A, A], 1)[:, : A.shape[1]]
    b = torch.cat([b, torch.full((case.T, case.B, 4), torch.nan)], 2)[..., :H]
    flags = {"reverse": case.reverse, "transpose": case.transpose}
    wide = [None if t is None else t.double() for t in (A.expand(-1, case.B, -1, -1), b, x0)]
    states = linear_scan_reference(*wide, **flags)
    if case.reverse:
        states = states.flip(0)
    states = torch.cat([torch.zeros(1, case.B, H) if x0 is None else wide[2][None], states])
    chunks = -(-case.T // case.length)
    floats = floats_of_map(H)[1]
    maps, again = (torch.full((chunks - 1, case.B, floats), torch.nan) for _ in range(2))
    scan = struct(case, A, b, x0)
    for turn, into in enumerate((maps, again)):
        library.make_maps(ctypes.byref(scan), ctypes.c_int64(chunks), ctypes.c_int64(case.length),
                          ctypes.c_void_p(into.data_ptr()), 2 * seed + turn)  # fmt: skip
    assert torch.equal(maps.view(torch.int32), again.view(torch.int32)), "other bits"
    for batch in range(case.B):
        exact = states[: chunks * case.length : case.length, batch].float().contiguous()
        starts, redone = starts_of(library, maps[:, batch].contiguous(), exact, H, 1, H, False, seed)
        assert torch.equal(starts.isnan(), exact.isnan())
        for got, want in zip(starts.nan_to_num(), exact.nan_to_num(), strict=True):
            assert (got - want).norm() <= 3e-5 * want.norm(), "the state at a chunk's start"
        if case.kind in ("tame", "decays", "grows"):
            assert not redone.any(), "a chunk is redone without need"


CASES = [
    Case(),
    Case(transpose=True, x0=False),
    Case(reverse=True, B=1, T=12, length=3),
    Case(reverse=True, transpose=True, shared=True, B=5, x0=False),
    Case(T=16, length=4, B=2, x0=False),
    *(Case(kind=kind, T=50, length=16, B=2) for kind in ("decays", "grows", "cancels", "bad")),
    Case(kind="cancels", reverse=True, transpose=True, T=50, length=16),
    Case(kind="bad", T=80, length=4, x0=False),
]


def passes(library: ctypes.CDLL, cases: list[Case]) -> bool:
    def run() -> None:
        for case in cases:
            for seed in range(2):
                columns_and_back(library, case, seed)

    return emulated.ends_well(run)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return emulated.build("chunk_maps", tmp_path_factory.mktemp("chunk_maps"), FEW=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_columns(library: ctypes.CDLL, case: Case):
    assert passes(library, [case])


FLAWS = {
    "does not wait for a step": ("copy_wait<S::kStages - 2>();", "copy_wait<S::kStages - 1>();"),
    "overwrites what is read": ("d < S::kStages - 1; ++d) fetch();", "d < S::kStages; ++d) fetch();"),
    "reads A at the first step": ("k < H && !from_nothing", "k < H"),
    "forgets x0": ("first == 0 && !scan.x0", "first == 0"),
    "turns A round": ("kTransposed ? k * H + i : i * H + k", "i * H + k"),
    "leaves out b": ("column + kOffset == H ? At + H * H : zeros", "zeros"),
    "never rescales": ("if (step % kRescaleSteps == kRescaleSteps - 1)", "if (false)"),
    "forgets the exponent": ("stored_exponent(exponent[c], lost", "stored_exponent(0, lost"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_emulator_notices(flaw: str, tmp_path: Path):
    folder = emulated.with_flaw("scan/linear/cuda/warp_columns.cuh", *FLAWS[flaw], tmp_path)
    assert not passes(emulated.build("chunk_maps", folder, FEW=1), CASES)
