"""The ring that the small linear scans read A and b through, on a processor, by tests/emulator: strides and addresses
of any alignment, copies that come at once or as late as they may, memory that ends where the tensors do."""

from __future__ import annotations

import ctypes

import pytest

from tests import emulated

pytestmark = emulated.MARKS


def passes(library: ctypes.CDLL, hidden: range) -> bool:
    def run() -> None:
        for H in hidden:
            for seed in range(40):
                library.run(H, 1000 * H + seed)

    return emulated.ends_well(run)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_ring_on_a_processor(size: int, tmp_path):
    assert passes(emulated.build("step_ring", tmp_path, SIZE=size), range(1, 33))


FLAWS = {
    "leaves out the last piece": (4, "p * kRingLanes < pieces)", "p * kRingLanes < pieces - 1)"),
    "does not wait": (4, "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();"),
    "overwrites what is read": (4, "ahead % kStages * kElements", "ahead % (kStages - 1) * kElements"),
    "reads behind a line": (2, "16 * n, max(bytes, 0)", "16 * n, 16"),
    "forgets what lies before a line": (2, "min(before + length", "min(length"),
    "takes all lines to begin alike": (2, "(A_at + i * line_step) % kPiece", "A_at % kPiece"),
    "does not shift": (2, "16 * odd", "0"),
    "forgets to step on": (4, "A_at += ", "A_at += 0 * "),
    "leaves what was behind b": (2, "copy_piece<true>(stage", "copy_piece<false>(stage"),
    "leaves what was behind a line": (2, "copy_piece<!kTogether>", "copy_piece<false>"),
    "takes lines behind the last for inside": (2, "(i < H && k < H)", "k < H"),
    "takes A for a matrix of rows": (
        4,
        "line_step(int((scan.A_col == 1 ? scan.A_row : scan.A_col)",
        "line_step(int(scan.A_row",
    ),
    "does not look at A's address": (4, "bytes | reinterpret_cast<uint64_t>(scan.A) |", "bytes |"),
    "does not look at b's address": (4, " | reinterpret_cast<uint64_t>(scan.b))", ")"),
    "does not look at A's strides": (4, "strides = scan.A_t | scan.A_b |", "strides ="),
    "does not look at b's strides": (4, " | scan.b_t | scan.b_b;", ";"),
    "does not look at H": (4, "uint64_t(strides | scan.H)", "uint64_t(strides)"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_emulator_notices(flaw: str, tmp_path):
    size, right, wrong = FLAWS[flaw]
    folder = emulated.with_flaw("scan/linear/cuda/step_ring.cuh", right, wrong, tmp_path)
    assert not passes(emulated.build("step_ring", folder, SIZE=size), range(25, 33))
