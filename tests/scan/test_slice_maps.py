"""The two halves of a dense slice's scan, beside the scan itself: the ops, and CUDA's kernels on a processor."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from weft._distributed.totals import pack, product_of_steps, unpack
from weft._scan.halves import slice_chunks
from weft.scan import linear_scan_reference

from tests import emulated
from tests.common import DEVICES
from tests.scan.arguments import CODES, LinearScan
from tests.scan.linear_scans import chaotic, chaotic_bound, chaotic_error
from tests.slices import BOUND, Slice, assert_close, map_floats

slice_maps, slice_replay = torch.ops.weft.slice_maps, torch.ops.weft.slice_replay_
CUT_OFF = 2.0**-22
"""What a step adds to it at most: tensor cores cut their sums off, all of them towards zero."""


@dataclass(frozen=True)
class Case(Slice):
    transpose: bool = False
    reverse: bool = False
    x0: bool = False
    shared: bool = False
    came: bool = True
    by_columns: bool = False
    """Whether A lies with its rows one number apart."""

    @property
    def flags(self) -> dict[str, bool]:
        return {"reverse": self.reverse, "transpose": self.transpose}


CASES = [
    Case(),
    Case(transpose=True, x0=True),
    Case(reverse=True, B=1, T=12, came=False),
    Case(reverse=True, transpose=True, shared=True, B=5),
    Case(H=5, T=50, chunks=7, by_columns=True),
    Case(H=7, T=9, chunks=9, x0=True),
    Case(H=8, T=64, chunks=3, came=False),
    Case(T=40, chunks=1, came=False),
    Case(T=1, chunks=1, B=2),
    Case(H=17, T=30, chunks=4, transpose=True),
    Case(H=3, T=200, chunks=26, B=2),
    Case(T=60, chunks=15),
    Case(H=4, T=134, chunks=67, B=1),
]


def inputs(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """A, b, x0 and the state that comes in."""
    torch.manual_seed(seed)
    A = torch.randn(case.T, 1 if case.shared else case.B, case.H, case.H) / case.H**0.5
    if case.by_columns:
        A = A.mT.contiguous().mT
    if not case.came:  # nobody may look at it
        A[-1 if case.reverse else 0] = torch.nan
    state = torch.randn(case.B, case.H)
    return A, torch.randn(case.T, case.B, case.H), torch.randn_like(state) if case.x0 else None, state


def wanted(case: Case, A: Tensor, b: Tensor, x0: Tensor | None) -> Tensor:
    wide = A.double().expand(-1, case.B, -1, -1).clone()
    if x0 is None:
        wide[-1 if case.reverse else 0] = 0
    return linear_scan_reference(wide, b.double(), None if x0 is None else x0.double(), **case.flags)


def check_told(case: Case, A: Tensor, b: Tensor, x0: Tensor | None, value: Tensor, message: Tensor) -> None:
    assert_close(value, wanted(case, A, b, x0)[0 if case.reverse else -1])
    products, numbers = A.shape[1] * case.H**2, value.numel()
    assert torch.equal(message[products : products + numbers], value.view(torch.int32).flatten()) and message[-1] == 1
    if not case.came:
        return
    product = unpack(message[:products].cpu(), torch.float32).view(A.shape[1:])
    want = unpack(pack(*product_of_steps(A, case.T, False, case.transpose, case.reverse), torch.float32), torch.float32)
    # Of many steps one direction is left, of which a column may hold next to nothing.
    largest = want.abs().amax(-2 if case.T < 1000 else (-2, -1), keepdim=True)
    least = torch.finfo(torch.float32).tiny  # a chunk's product is one of float32
    assert ((product - want).abs() <= max(BOUND, CUT_OFF * case.T) * largest + least).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_halves(case: Case, device: str) -> None:
    A, b, x0, state = inputs(case)
    there = [None if t is None else t.to(device) for t in (A, b, x0)]
    found = []
    for _ in range(2):
        maps, value, message = slice_maps(*there, case.chunks, *case.flags.values(), True)
        check_told(case, A, b, x0, value.cpu(), message.cpu())
        assert torch.equal(value, slice_maps(*there, case.chunks, *case.flags.values(), False)[1])
        x = torch.full_like(there[1], torch.nan)
        came = torch.tensor([case.came], dtype=torch.int32, device=device)
        slice_replay(x, *there[:2], maps, state.to(device), came, case.chunks, *case.flags.values())
        assert_close(x, wanted(case, A, b, state if case.came else None))
        found.append((value, message, x))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["up", "down", "both", "zeros", "resets"])
def test_products_that_overflow_or_underflow(kind: str, device: str) -> None:
    T = 400
    A, b, x0 = (t.float() for t in chaotic(kind, T, 2, 4, "dense"))
    want = linear_scan_reference(A.double(), b.double(), x0.double())
    A, b, x0 = A.to(device), b.to(device), x0.to(device)
    for chunks in (1, 9, 50):
        maps, _, _ = slice_maps(A, b, None, chunks, False, False, True)
        x = torch.full_like(b, torch.nan)
        slice_replay(x, A, b, maps, x0, None, chunks, False, False)
        assert chaotic_error(x.cpu(), want) < chaotic_bound(T)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_row_stays_alone(device: str) -> None:
    case = Case(T=60, H=6)
    A, b, _, state = (None if t is None else t.to(device) for t in inputs(case))
    found = []
    for bad in (False, True):
        if bad:
            A[20, 1, 2, 3] = torch.nan
        maps, value, message = slice_maps(A, b, None, 4, False, False, True)
        x = torch.empty_like(b)
        slice_replay(x, A, b, maps, state, None, 4, False, False)
        found.append((value, message[: 3 * 36].view(3, 6, 6), x.transpose(0, 1)))
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean[[0, 2]], other[[0, 2]])
    assert found[1][2][1, 20:].isnan().any(-1).all() and found[1][0][1].isnan().any()


def test_nothing_and_opcheck() -> None:
    for B, H in ((0, 3), (2, 0)):
        maps, value, message = slice_maps(torch.zeros(5, B, H, H), torch.zeros(5, B, H), None, 2, False, False, True)
        assert value.shape == (B, H) and maps.shape[:2] == (2, B) and message.tolist() == [1]
    A, b, x0, state = inputs(Case(H=3, x0=True))
    for told in (True, False):
        opcheck(slice_maps.default, (A, b, x0, 4, False, True, told))
    maps = slice_maps(A, b, x0, 4, True, False, True)[0]
    opcheck(slice_replay.default, (torch.zeros_like(b), A, b, maps, state, None, 4, True, False))


def test_bad_input() -> None:
    A, b, _, state = inputs(Case(H=3))
    with pytest.raises(TypeError, match="slice_maps: b must be float32"):
        slice_maps(A.double(), b.double(), None, 1, False, False, True)
    with pytest.raises(ValueError, match=r"slice_maps: A must be \(T, B, H, H\)"):
        slice_maps(A[:, :2], b, None, 1, False, False, True)
    with pytest.raises(ValueError, match="slice_maps: b must have at least one step"):
        slice_maps(A[:0], b[:0], None, 1, False, False, True)
    for chunks in (0, 38):
        with pytest.raises(ValueError, match="slice_maps: chunks must be 1 to 37"):
            slice_maps(A, b, None, chunks, False, False, True)
    maps = slice_maps(A, b, None, 4, False, False, True)[0]
    with pytest.raises(ValueError, match="slice_replay_: maps"):
        slice_replay(torch.empty_like(b), A, b, maps, state, None, 5, False, False)
    with pytest.raises(ValueError, match="slice_replay_: state"):
        slice_replay(torch.empty_like(b), A, b, maps, state[:2], None, 4, False, False)
    with pytest.raises(TypeError, match="slice_replay_: came must be one int32"):
        slice_replay(torch.empty_like(b), A, b, maps, state, torch.ones(1), 4, False, False)


@pytest.mark.cuda
def test_widths_on_cuda() -> None:
    for H in (1, 33):
        with pytest.raises(ValueError, match="slice_maps: H must be 2 to 32 on CUDA"):
            slice_maps(torch.zeros(5, 2, H, H, device="cuda"), torch.zeros(5, 2, H, device="cuda"), None, 1, False,
                       False, True)  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("H", [8, 16, 20, 24, 32])
def test_long_slices(H: int) -> None:
    """With the chunks that the costs say."""
    case = Case(T=3000, B=4, H=H, chunks=slice_chunks(torch.device("cuda"), 3000, 4, H))
    assert case.chunks > 1
    test_halves(case, "cuda")


def struct(case: Case, A: Tensor, b: Tensor, x0: Tensor | None, out: Tensor) -> LinearScan:
    """As the op describes it to a kernel."""
    turn, first = (-1, case.T - 1) if case.reverse else (1, 0)
    rows = (A.stride(3), A.stride(2)) if case.transpose else (A.stride(2), A.stride(3))
    return LinearScan(A=A[first].data_ptr(), A_t=turn * A.stride(0), A_b=0 if case.shared else A.stride(1),
                      A_row=rows[0], A_col=rows[1], b=b[first].data_ptr(), b_t=turn * b.stride(0), b_b=b.stride(1),
                      x0=None if x0 is None else x0.data_ptr(), x0_b=case.H, out=out[first].data_ptr(),
                      out_t=turn * out.stride(0), out_b=out.stride(1), T=case.T, B=case.B, H=case.H,
                      dtype=CODES[4])  # fmt: skip


def run_emulated(library: ctypes.CDLL, case: Case, columns: bool, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    A, b, x0, state = inputs(case, seed)
    length = -(-case.T // case.chunks)
    chunks = -(-case.T // length)
    maps = torch.full((chunks * case.B * map_floats(case.H),), torch.nan)
    value, x = torch.full((case.B, case.H), torch.nan), torch.full_like(b, torch.nan)
    rows = A.shape[1]
    message = torch.full((rows * case.H**2 + value.numel() + 1,), -1, dtype=torch.int32)
    came = torch.tensor([case.came], dtype=torch.int32)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (maps, value, message))
    library.run(ctypes.byref(struct(case, A, b, x0, x)), ctypes.c_int64(chunks), ctypes.c_int64(length), columns,
                *pointers, ctypes.c_int64(rows), ctypes.c_void_p(state.data_ptr()), ctypes.c_void_p(came.data_ptr()),
                seed)  # fmt: skip
    check_told(case, A, b, x0, value, message)
    assert_close(x, wanted(case, A, b, state if case.came else None))
    return value, message, x


EMULATED = [(case, False) for case in CASES] + [(case, True) for case in CASES if case.H == 20 and not case.shared]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated.build("slice_maps", tmp_path_factory.mktemp("slice_maps"), FEW=0)


FLAWS = {
    "takes A where nothing came": ("warp_slice", "!came || *came != 0", "true"),
    "forgets the first A": ("warp_columns", "&& !scan.x0 && !plan.whole", "&& !scan.x0"),
    "walks on beyond the slice": ("warp_columns", "if (step < steps) {", "if (true) {"),
    "does not enter": ("warp_slice", "Way::again", "Way::whole"),
    "turns maps round": ("map_products", "next[row(r) * n + k], x, now[r]", "next[k * n + row(r)], x, now[r]"),
    "forgets exponents": ("map_products", "exponent += largest", "exponent += 0"),
    "stops early": ("map_products", "k < last; ++k) {", "k < last - 1; ++k) {"),
    "hands on too soon": ("map_products", "brought[0] == below - 1", "brought[0] == 0"),
}


class TestEmulated:
    pytestmark = emulated.MARKS

    @pytest.mark.parametrize(("case", "columns"), EMULATED, ids=str)
    def test_halves(self, library: ctypes.CDLL, case: Case, columns: bool) -> None:
        def run() -> None:
            for one, other in zip(
                run_emulated(library, case, columns, 1), run_emulated(library, case, columns, 1), strict=True
            ):
                assert torch.equal(one, other)

        assert emulated.ends_well(run)

    @pytest.mark.parametrize("flaw", FLAWS)
    def test_the_emulator_notices(self, flaw: str, tmp_path: Path) -> None:
        file, right, wrong = FLAWS[flaw]
        folder = emulated.with_flaw(f"scan/linear/cuda/{file}.cuh", right, wrong, tmp_path)
        library = emulated.build("slice_maps", folder, FEW=1)

        def run() -> None:
            for case, columns in EMULATED:
                if case.H > 8:
                    run_emulated(library, case, columns, 1)

        assert not emulated.ends_well(run)
