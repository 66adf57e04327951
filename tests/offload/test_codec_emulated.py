"""The CUDA kernels of zero-value compression on a processor, by tests/emulator: blocks of any speed, copies that come
as late as they may, memory that ends where the tensors do."""

from __future__ import annotations

import ctypes
import random

import pytest

from tests import emulated

pytestmark = emulated.MARKS

TILE = 32 * 1024
CASES = [
    # Bytes behind the last whole tile, whole tiles.
    (4, 0), (132, 0), (0, 1), (TILE - 4, 1), (8, 5), (0, 131),
]  # fmt: skip


def passes(library: ctypes.CDLL, size: int, most_tiles: int) -> bool:
    def run() -> None:
        for number, (rest, tiles) in enumerate(CASES):
            if tiles > most_tiles:
                continue
            n = (tiles * TILE + rest) // size
            for seed in range(3 if tiles < 32 else 1):
                draw = random.Random(100 * number + seed)
                density = 300 if tiles > 32 else draw.choice([0, 20, 500, 980, 1000])
                short = draw.choice([0, 0, 1, 5, n // 3])
                library.run(ctypes.c_int64(n), density, ctypes.c_int64(draw.choice([0, 0, 1, 3])),
                            ctypes.c_int64(short), 100 * number + seed)  # fmt: skip

    return emulated.ends_well(run)


@pytest.mark.parametrize("size", [2, 4])
def test_the_tiles_on_a_processor(size: int, tmp_path) -> None:
    assert passes(emulated.build("zvc_tiles", tmp_path, SIZE=size), size, most_tiles=131)


FLAWS = {
    "packs what is still written": (4, "constexpr int kPacked = 3", "constexpr int kPacked = 2"),
    "looks for the start of another tile": (4, "shared.starts[stage],", "shared.starts[stage ^ 1],"),
    "forgets what other tiles have": (4, "before += int64_t(high << 32 | low);", ""),
    "looks back one window alone": (4, "if (sums == 0) break;", "if (sums == 0) return before;"),
    "forgets what does not fit": (4, "if (fit == count || args.all == nullptr) return;", "return;"),
    "reads x behind the end": (4, "if (piece + (i + 1) * kItem <= left)", "if (piece + i * kItem <= left)"),
    "spreads before the values are there": (4, "    __syncthreads();  // words and values are there\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_emulator_notices(flaw: str, tmp_path) -> None:
    size, right, wrong = FLAWS[flaw]
    most_tiles = 131 if "window" in flaw else 5  # more than are looked at at once
    folder = emulated.with_flaw("offload/cuda/zvc_tiles.cuh", right, wrong, tmp_path)
    assert not passes(emulated.build("zvc_tiles", folder, SIZE=size), size, most_tiles)


def runs_pass(library: ctypes.CDLL) -> bool:
    """Masks of no run, of one, of as many as elements, of more words and runs than a tile of the scans has."""

    def run() -> None:
        for n in (0, 1, 31, 32, 33, 4097, 70000):
            for per_mille, rest in ((0, 0), (1, 7), (1000, 0), (500, n)):
                library.run(ctypes.c_int64(n), per_mille, ctypes.c_int64(rest), n + per_mille)

    return emulated.ends_well(run)


def test_runs_on_a_processor(tmp_path) -> None:
    assert runs_pass(emulated.build("rle_runs", tmp_path))


RUN_FLAWS = {
    "forgets the tiles before": ("tile_scan.cuh", "Op::both(parts[blockIdx.x], sum", "Op::both(op.start(), sum"),
    "sums up what is not there yet": ("tile_scan.cuh", "] = own;\n  __syncthreads();", "] = own;"),
    "reads before it is summed up": (
        "tile_scan.cuh", "__syncthreads();\n    sums[thread] = Op::both(other", "sums[thread] = Op::both(other",
    ),
    "flips behind the end": ("rle_runs.cu", "end >= 0 && end < args.n", "end >= 0 && end <= args.n"),
    "has bits behind the end": ("rle_runs.cu", "left < 32 ? word & ((1u << left) - 1) : word", "word"),
    "forgets the word before": ("rle_runs.cu", "w > 0 ? args.mask[w - 1] : 0", "0"),
}  # fmt: skip


@pytest.mark.parametrize("flaw", RUN_FLAWS)
def test_the_emulator_notices_in_runs(flaw: str, tmp_path) -> None:
    source, right, wrong = RUN_FLAWS[flaw]
    folder = emulated.with_flaw(f"offload/cuda/{source}", right, wrong, tmp_path)
    assert not runs_pass(emulated.build("rle_runs", folder))


def entries(places: list[int], cuts: list[int], library: ctypes.CDLL) -> int:
    library.entries.restype = ctypes.c_int64
    array = lambda numbers: (ctypes.c_int64 * len(numbers))(*numbers)  # noqa: E731
    return library.entries(array(places), ctypes.c_int64(len(places)), array(cuts), ctypes.c_int64(len(cuts)))


def test_long_runs_are_split(tmp_path) -> None:
    """A run above 2^31 - 1 is split by a run of length 0, wherever the parts are that are summed up."""
    library = emulated.build("zvc_tiles", tmp_path, SIZE=4)
    most = 2**31 - 1
    for length, pieces in ((1, 1), (most, 1), (most + 1, 3), (2 * most, 3), (2 * most + 1, 5)):
        assert entries([length], [], library) == pieces
        assert entries([7, 7 + length], [1], library) == 1 + pieces
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.choice([1, 5, most, most + 1, 5 * most]) for _ in range(draw.randint(0, 6))]
        places = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        cuts = sorted(draw.randint(0, len(lengths)) for _ in range(draw.randint(0, 4)))
        assert entries(places, cuts, library) == sum(2 * ((n - 1) // most) + 1 for n in lengths)
