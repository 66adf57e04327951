"""The ring that the small linear scans read A and b through, on a processor, by tests/emulator: copies of every width,
which come at once or as late as they may, from memory that ends where the tensors end."""

from __future__ import annotations

import ctypes

import emulated
import pytest

pytestmark = emulated.MARKS


def passes(library: ctypes.CDLL, size: int, hidden: range) -> bool:
    def run() -> None:
        for H in hidden:
            for gap, tail in ((0, 0), (0, 1), (1, 0), (2, 4), (4, 8), (7, 2)):
                library.run(size, H, gap, tail, (H + gap) % 2, 31 * H + gap)

    return emulated.ends_well(run)


@pytest.fixture(scope="module")
def ring(tmp_path_factory) -> ctypes.CDLL:
    return emulated.build("step_ring", tmp_path_factory.mktemp("ring"))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_ring_on_a_processor(size: int, ring):
    assert passes(ring, size, range(1, 33))


FLAWS = {
    "leaves out the last piece": (4, "p * kRingLanes < pieces)", "p * kRingLanes < pieces - 1)"),
    "does not wait": (4, "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();"),
    "overwrites what is read": (4, "ahead % kStages * kElements", "ahead % (kStages - 1) * kElements"),
    "reads behind a line": (2, "16 * n, max(bytes, 0)", "16 * n, 16"),
    "forgets what lies before a line": (2, "min(before + length", "min(length"),
    "takes all lines to begin alike": (2, "(first + i * line_step) % kPiece", "first % kPiece"),
    "does not shift": (2, "16 * odd", "0"),
    "forgets to step on": (4, "A_at += ", "A_at += 0 * "),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_emulator_notices(flaw: str, tmp_path):
    size, right, wrong = FLAWS[flaw]
    folder = emulated.with_flaw("scan/cuda/step_ring.cuh", right, wrong, tmp_path)
    assert not passes(emulated.build("step_ring", folder), size, range(29, 33))
