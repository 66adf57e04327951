"""The two halves of the backward pass of a slice, beside the whole in fp64: the ops, and the kernels of CUDA on a
processor."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import weft
from torch import Tensor
from torch.library import opcheck
from weft._distributed.totals import unpack
from weft._rnn.halves import slice_chunks

from tests import emulated
from tests.common import DEVICES
from tests.slices import BOUND, Slice, assert_close, map_floats

ops = torch.ops.weft
CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")


@dataclass(frozen=True)
class Case(Slice):
    arriving: bool = True
    """Whether there is a gradient of the output."""


CASES = [
    Case(),
    Case(T=50, H=5, B=9, chunks=7),
    Case(T=9, H=8, chunks=9),
    Case(T=30, B=1, chunks=1),
    Case(T=1, B=2, H=3, chunks=1),
    Case(T=41, H=17, B=4, chunks=3, arriving=False),
    Case(T=60, H=6, B=2, chunks=60),
]


class Problem(NamedTuple):
    """A slice's forward pass, and the gradients of what leaves it."""

    cell: str
    input: Tensor
    h0: Tensor
    c0: Tensor | None
    weights: list[Tensor]
    output: Tensor
    cells: Tensor
    gates: Tensor
    grad_output: Tensor | None
    grad_h: Tensor
    grad_c: Tensor | None

    @property
    def known(self) -> tuple[Any, ...]:
        return self.input, self.h0, self.c0, self.weights, self.output, self.cells, self.gates


def problem(cell: str, case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Problem:
    torch.manual_seed(0)
    T, B, H, arriving = case.T, case.B, case.H, case.arriving
    lstm, gates, inputs = cell == "lstm", weft._C.rnn.cells[cell]["gates"], 3
    # Gradients that neither vanish nor explode.
    scale = {"rnn_tanh": 1.2, "rnn_relu": 1.3}.get(cell, 1.0) if T < 1000 else 0.8
    shapes = ((gates * H, inputs), (gates * H, H), (gates * H,), (gates * H,))
    weights = [scale * torch.randn(s) / H**0.5 for s in shapes]
    given = [torch.randn(T, B, inputs), torch.randn(1, B, H), torch.randn(1, B, H)]
    grads = [torch.randn(T, B, H), torch.randn(1, B, H), torch.randn(1, B, H)]
    weights, given, grads = ([t.to(device, dtype) for t in ts] for ts in (weights, given, grads))
    input, h0, c0 = given
    output, _, _, cells, saved = ops.rnn(
        input, h0, c0 if lstm else None, weights, cell=cell, keep_cells=lstm, save=True, backward="scan"
    )
    return Problem(cell, input, h0, c0 if lstm else None, weights, output, cells, saved,
                   grads[0] if arriving else None, grads[1], grads[2] if lstm else None)  # fmt: skip


def backward(p: Problem, grad_output: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None) -> list[Tensor]:
    """Of the input, of the state and of the weights."""
    mask = [True, True, p.c0 is not None, *(True for _ in p.weights)]
    return ops.rnn_backward(
        grad_output, grad_h, grad_c, None, p.input, p.h0, p.c0, p.weights, None, p.output, p.cells, p.gates,
        cell=p.cell, bidirectional=False, output_mask=mask, backward="scan",
    )  # fmt: skip


def of_state(p: Problem, grads: list[Tensor]) -> Tensor:
    """(B, S H)"""
    return torch.cat((grads[1], grads[2]), 2)[0] if p.c0 is not None else grads[1][0]


def check_told(case: Case, wide: Problem, value: Tensor, message: Tensor) -> None:
    states = value.shape[1]
    if case.arriving:
        assert_close(value, of_state(wide, backward(wide, wide.grad_output, None, None)))
    else:
        assert (value == 0).all()
    products = case.B * states**2
    assert torch.equal(message[products:-1], value.view(torch.int32).flatten()) and message[-1] == 1
    product = unpack(message[:products], torch.float32).view(case.B, states, states)
    columns = []
    for j in range(states):
        state = torch.zeros(case.B, states, dtype=torch.float64)
        state[:, j] = 1
        h, *c = (t.contiguous() for t in state.view(case.B, -1, case.H).transpose(0, 1).unsqueeze(1).unbind())
        columns.append(of_state(wide, backward(wide, None, h, c[0] if c else None)))
    want = torch.stack(columns, -1)
    # Each number for itself, and what the forward pass rounded is in it; a chunk's product is one of float32.
    least = torch.finfo(torch.float32).tiny
    assert ((product - want).abs() <= 6 * BOUND * want.abs().amax(-2, keepdim=True) + least).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_halves(case: Case, cell: str, device: str) -> None:
    p, wide = problem(cell, case, device), problem(cell, case, dtype=torch.float64)
    want = backward(wide, wide.grad_output, wide.grad_h, wide.grad_c)
    found = []
    for _ in range(2):
        maps, value, message = ops.rnn_slice_maps(p.grad_output, *p.known, case.chunks, cell=cell)
        check_told(case, wide, value.cpu(), message.cpu())
        mask = [True, True, p.c0 is not None, *(True for _ in p.weights)]
        grads = ops.rnn_slice_backward(
            maps, p.grad_output, p.grad_h, p.grad_c, *p.known, case.chunks, cell=cell, output_mask=mask
        )
        for got, wanted in zip(grads, want, strict=True):
            if wanted.numel():
                assert_close(got, wanted)
        found.append((value, message, *grads))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("H", [8, 16, 20, 24, 32])
def test_long_slices(H: int, cell: str) -> None:
    """With the chunks that the costs say."""
    chunks = slice_chunks(torch.device("cuda"), cell, 2000, 4, H)
    assert chunks > 1
    test_halves(Case(T=2000, B=4, H=H, chunks=chunks), cell, "cuda")


def test_opcheck_and_nothing() -> None:
    case = Case(T=5, B=2, H=3, chunks=2)
    for cell in CELLS:
        p = problem(cell, case)
        opcheck(ops.rnn_slice_maps.default, (p.grad_output, *p.known, 2), {"cell": cell})
        maps = ops.rnn_slice_maps(p.grad_output, *p.known, 2, cell=cell)[0]
        mask = [True, False, False, True, True, False, False]
        given = (maps, p.grad_output, p.grad_h, p.grad_c, *p.known, 2)
        opcheck(ops.rnn_slice_backward.default, given, {"cell": cell, "output_mask": mask})
    p = problem("gru", Case(T=5, B=0, H=3))
    assert ops.rnn_slice_maps(p.grad_output, *p.known, 2, cell="gru")[2].tolist() == [1]


def test_bad_input() -> None:
    p = problem("gru", Case(H=3))
    with pytest.raises(ValueError, match="rnn_slice_maps: chunks must be 1 to 37, got 38"):
        ops.rnn_slice_maps(p.grad_output, *p.known, 38, cell="gru")
    with pytest.raises(ValueError, match="rnn_slice_maps: grad_output"):
        ops.rnn_slice_maps(p.grad_output[:5], *p.known, 3, cell="gru")
    with pytest.raises(ValueError, match="rnn_slice_maps: the chain of a slstm is none of matrices"):
        s = problem("gru", Case(H=3, T=4))
        weights = [torch.randn(12, 3), torch.randn(12, 3), torch.randn(12), torch.randn(12)]
        ops.rnn_slice_maps(
            s.grad_output, s.input, s.h0, torch.zeros(1, 3, 9), weights, s.output, s.cells, s.gates, 3, cell="slstm"
        )
    wide = problem("gru", Case(H=3), dtype=torch.float64)
    with pytest.raises(TypeError, match="rnn_slice_maps: input must be float32, got"):
        ops.rnn_slice_maps(wide.grad_output, *wide.known, 3, cell="gru")
    maps = ops.rnn_slice_maps(p.grad_output, *p.known, 3, cell="gru")[0]
    with pytest.raises(ValueError, match="rnn_slice_backward: maps"):
        ops.rnn_slice_backward(
            maps, p.grad_output, p.grad_h, None, *p.known, 4, cell="gru", output_mask=[True, *[False] * 6]
        )


def run_emulated(library: ctypes.CDLL, cell: str, case: Case, seed: int) -> list[Tensor]:
    p, wide = problem(cell, case), problem(cell, case, dtype=torch.float64)
    traits = weft._C.rnn.cells[cell]
    states = traits["states"] * case.H
    maps = torch.full((case.chunks * case.B * map_floats(case.H, traits["states"]),), torch.nan)
    value = torch.full((case.B, states), torch.nan)
    message = torch.full((case.B * states * (states + 1) + 1,), -1, dtype=torch.int32)
    rows = traits["gates"] + (cell == "gru")
    dgates = torch.full((case.T, case.B, rows * case.H), torch.nan)
    grad_h0, grad_c0 = torch.full_like(p.h0, torch.nan), torch.full_like(p.h0, torch.nan)
    tensors = (p.grad_output, p.weights[1], p.h0, p.c0, p.output, p.gates, p.cells, dgates, grad_h0, grad_c0, maps,
               value, message, p.grad_h, p.grad_c)  # fmt: skip
    library.run((ctypes.c_int64 * 3)(case.T, case.B, case.H), case.chunks,
                (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors)),
                seed)  # fmt: skip
    check_told(case, wide, value, message)
    want = backward(wide, wide.grad_output, wide.grad_h, wide.grad_c)
    assert_close(grad_h0, want[1])
    if p.c0 is not None:
        assert_close(grad_c0, want[2])
    assert_close(dgates[..., : traits["gates"] * case.H].double() @ wide.weights[0], want[0])
    return [value, message, dgates, grad_h0]


def library_of(cell: str, folder: Path) -> ctypes.CDLL:
    return emulated.build("rnn_slice_maps", folder, CELL=list(weft._C.rnn.cells).index(cell))


FLAWS = {
    "reads before the first step": ("is_first && fetched == length", "false"),
    "leaves out the first chunk": ("chunks.whole ? warps(shape.B) : 0", "0"),
    "does not begin again": (
        "boundaries<HP, Way::again>(shape, a,",
        "if (false) boundaries<HP, Way::again>(shape, a,",
    ),
}


class TestEmulated:
    pytestmark = emulated.MARKS

    @pytest.mark.parametrize("cell", CELLS)
    def test_halves(self, cell: str, tmp_path: Path) -> None:
        library = library_of(cell, tmp_path)

        def run() -> None:
            for case in CASES:
                for one, other in zip(
                    run_emulated(library, cell, case, 1), run_emulated(library, cell, case, 1), strict=True
                ):
                    assert torch.equal(one, other)

        assert emulated.ends_well(run)

    @pytest.mark.parametrize("flaw", FLAWS)
    def test_the_emulator_notices(self, flaw: str, tmp_path: Path) -> None:
        library = library_of("gru", emulated.with_flaw("rnn/scan/cuda/scan_warp.cuh", *FLAWS[flaw], tmp_path))

        def run() -> None:
            for case in CASES[1:4]:
                run_emulated(library, "gru", case, 1)

        assert not emulated.ends_well(run)
