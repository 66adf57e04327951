"""The CUDA kernels of parameters' gradients on a processor, by tests/emulator, beside torch: layers of every size in
one launch, tiles that are whole or not, positions that several blocks share."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests import emulated

pytestmark = emulated.MARKS
SOURCE = "scan/chain/cuda/parameter_kernels.cu"


class Case(NamedTuple):
    batch: int
    inputs: int
    outputs: int
    size: tuple[int, int] = (1, 1)
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    bias: bool = True
    gradient: float | None = None  # one for all


CASES = [
    Case(1, 3, 70, (5, 7), (3, 3), padding=(1, 1)),
    Case(5, 9, 6, (2, 2), (3, 3), padding=(1, 1), bias=False),
    Case(3, 4, 65, (9, 8), (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    Case(2, 5, 4, (1, 40), (1, 4), stride=(1, 3), padding=(0, 3), dilation=(1, 2)),  # of one dimension
    Case(11, 70, 10),
    Case(2, 16, 3, (30, 4), (4, 4), stride=(3, 1), padding=(0, 3)),
    Case(37, 1, 1),
]
EQUAL = [Case(3, 1, 1, (160, 160), gradient=1 / 3e4)]  # alone, so that a part has many positions


def gradients(case: Case) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """What a layer's kernel is given, and torch's gradients of its parameters."""
    weight = torch.randn(case.outputs, case.inputs, *case.kernel)
    x = torch.randn(case.batch, case.inputs, *case.size)
    settings = [list(pair) for pair in (case.stride, case.padding, case.dilation)]
    y = torch.conv2d(x, weight, None, *settings)
    g = torch.randn_like(y) if case.gradient is None else torch.full_like(y, case.gradient)
    _, *want = torch.ops.aten.convolution_backward(
        g.double(), x.double(), weight.double(), [case.outputs], *settings, False, [0, 0], 1, [False, True, True]
    )
    pairs = (case.size, y.shape[2:], case.kernel, *settings)
    sizes = [case.batch, case.inputs, case.outputs, *(n for pair in pairs for n in pair)]
    return sizes, [x, g], want if case.bias else want[:1]


def passes(library: ctypes.CDLL, cases: list[Case]) -> bool:
    torch.manual_seed(0)
    layers = [gradients(case) for case in cases]

    def run() -> None:
        runs = []
        for _ in range(2):
            sizes, pointers, held = [], [], []
            for case, (own, given, _) in zip(cases, layers, strict=True):
                weight = torch.full((case.outputs, case.inputs, *case.kernel), torch.nan)
                found = [weight, torch.full((case.outputs,), torch.nan)][: 1 + case.bias]
                sizes += own
                pointers += [t.data_ptr() for t in (*given, *found)] + [None] * (not case.bias)
                held.append(found)
            library.run(len(cases), (ctypes.c_int * len(sizes))(*sizes), (ctypes.c_void_p * len(pointers))(*pointers))
            for case, found, (_, _, want) in zip(cases, held, layers, strict=True):
                for f, w in zip(found, want, strict=True):
                    bound = 1e-5 if case.gradient is None or f.dim() > 1 else 5e-7
                    assert (f - w).norm() <= bound * w.norm()
            runs.append(held)
        assert all(torch.equal(a, b) for pair in zip(*runs, strict=True) for a, b in zip(*pair, strict=True))

    return emulated.ends_well(run)


def test_kernels_on_a_processor(tmp_path: Path) -> None:
    library = emulated.build("parameter_kernels", tmp_path)
    assert passes(library, CASES)
    assert passes(library, EQUAL)
    for case in CASES:
        assert passes(library, [case])
    # More layers than small parameters have room for, and than a launch.
    assert passes(library, [Case(1 + n % 3, 1, 2, (2, 3), (1, 2), bias=n % 2 == 0) for n in range(230)])


FLAWS = {
    "forgets the last positions": ("at + kChunk < end;", "at + 2 * kChunk < end;"),
    "goes on to the next row too late": ("if (x >= l.out[1])", "if (x > l.out[1])"),
    "reads beside the image": ("unsigned(x) < unsigned(l.size[1])", "true"),
    "takes the positions of the parts after it": (
        "total - begin < work.positions ? total :",
        "begin < total ? total :",
    ),
    "writes where others read": ("put(buffer ^ 1)", "put(buffer)"),
    "puts a part's bias among its weights": (
        "memory[kTile * kTile + threadIdx.x] = bias",
        "memory[threadIdx.x] = bias",
    ),
    "rounds equal gradients in the same way": ("lost = (bias - before) - next", "lost = 0"),
    "forgets the last part": ("p < work.parts; ++p) {", "p + 1 < work.parts; ++p) {"),
    "adds parts of another tile": ("int64_t(tile) * work.parts * kPart", "int64_t(tile) * kPart"),
    "takes the layer before": ("*first <= block ? low", "*first < block ? low"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_emulator_notices(flaw: str, tmp_path: Path) -> None:
    folder = emulated.with_flaw(SOURCE, *FLAWS[flaw], tmp_path)
    library = emulated.build("parameter_kernels", folder)
    assert not (passes(library, CASES) and passes(library, EQUAL))
