"""Measures scans in chunks on a GPU, and corrects the costs of their stages.

The models of csrc know how the stages follow the sizes; what is fitted is by how much the products, the boundaries and
the replay of a table take longer than it says. Where the points cannot tell two stages apart, their costs stay near
what they were.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import weft
from weft._rnn.select.costs import GATES, SCAN_LARGEST

from benchmarks.common import Candidate, measure
from benchmarks.fitting import error, fit, rounded

VARIABLE = "WEFT_RNN_SCAN_CHUNKS"
STEPS = 3000
MOST_ELEMENTS = 2**28
"""Of a linear scan's matrices."""
WARP = {"products": ("product", "product_each"), "boundaries": ("boundary",), "replay": ("replay", "replay_each")}
BOUNDARIES = ("boundary_step", "boundary_megabyte")
NUMBERS = {
    **dict.fromkeys(("rnn.scan_warp.rnn", "rnn.scan_warp.gru", "rnn.scan_warp.lstm"), WARP),
    **dict.fromkeys(("scan.linear_warp.single", "scan.linear_warp.half"), WARP),
    "rnn.scan_block": {
        "products": (
            *("product_step", "product_megafma", "wide_product_megafma"),
            *("feed_rnn", "feed_gru", "feed_lstm", "feed_wide", "weight_megabyte"),
        ),
        "boundaries": BOUNDARIES,
        "replay": ("replay_step", "replay_megafma"),
    },
    "scan.linear_block": {
        "products": (
            *("product_step", "product_megafma"),
            *("wide_product_step", "wide_product_byte", "wide_product_megafma"),
        ),
        "boundaries": BOUNDARIES,
        "replay": ("replay_step", "replay_megaelement", "piece", "megabyte"),
    },
}
"""Of each table, the numbers that a stage is made of."""


class Timed(NamedTuple):
    table: str
    us: float
    launches: float
    stages: tuple[float, float, float]
    """What products, boundaries and replay are expected to take."""


def timed_us(run: Callable[[], Any], place: str) -> float:
    return 1e3 * measure({"run": Candidate(lambda _: run())}, place, warmup=1, repeats=3, at_most=0.0)["run"]


def index_of(place: str) -> int:
    return torch.cuda.current_device() if place == "cuda" else 0


def chains(place: str = "cuda") -> Iterator[Timed]:
    """The chains of layers, each in fewer chunks, as many and more than are expected to be the fastest."""
    for cell, H, B in itertools.product(("rnn_tanh", "gru", "lstm"), (8, 20, 32, 64, 128), (1, 16, 64)):
        if H > max(32, SCAN_LARGEST[cell]):
            continue
        bound, keywords = H**-0.5, {"cell": cell, "backward": "scan"}
        shapes = (GATES[cell] * H, 1), (GATES[cell] * H, H)
        weights = [torch.empty(shape, device=place).uniform_(-bound, bound) for shape in shapes]
        x = torch.randn(STEPS, B, 1, device=place)
        with torch.no_grad():
            output, _, _, cells, gates = torch.ops.weft.rnn(x, None, None, weights, None, save=True, **keywords)
            grad = torch.randn_like(output)

            def run(x=x, weights=weights, saved=(output, cells, gates), grad=grad, keywords=keywords):
                torch.ops.weft.rnn_backward(
                    grad, None, None, None, x, None, None, weights, None, *saved, bidirectional=False,
                    output_mask=[False] * (3 + len(weights)), **keywords,
                )  # fmt: skip

            sizes = {"device": index_of(place), "cell": cell, "hidden": H, "steps": STEPS, "batch": B}
            best, _ = weft._C.rnn.scan_expected(**sizes)
            table = f"rnn.scan_warp.{cell.removesuffix('_tanh')}" if H <= 32 else "rnn.scan_block"
            try:
                for chunks in sorted({max(1, best // 3), best, min(3 * best, STEPS // 8)}):
                    os.environ[VARIABLE] = str(chunks)
                    _, (launches, *stages) = weft._C.rnn.scan_expected(**sizes)
                    yield Timed(table, timed_us(run, place), launches, tuple(stages))
            finally:
                os.environ.pop(VARIABLE, None)


def linear_scans(place: str = "cuda") -> Iterator[Timed]:
    # Not 20, for which the library chooses between two kernels.
    sizes = itertools.product((8, 24, 32, 64, 128), (1, 8, 64), (100, 1000, 10000))
    for (H, B, T), half in itertools.product(sizes, (False, True)):
        if T * B * H * H > MOST_ELEMENTS:
            continue
        dtype = torch.float16 if half else torch.float32
        A = torch.randn(T, B, H, H, device=place, dtype=dtype).mul_(0.5 / H**0.5)
        b, x0 = (torch.randn(*shape, device=place, dtype=dtype) for shape in ((T, B, H), (B, H)))
        expected = weft._C.scan.linear_scan_expected(device=index_of(place), half=half, steps=T, batch=B, hidden=H)
        _, (launches, *stages) = expected
        table = f"scan.linear_warp.{'half' if half else 'single'}" if H <= 32 else "scan.linear_block"
        us = timed_us(lambda A=A, b=b, x0=x0: weft.scan.linear_scan(A, b, x0), place)
        yield Timed(table, us, launches, tuple(stages))


def measured(minutes: float) -> list[Timed]:
    """As many as there is time for, chains and linear scans in turns."""
    found, deadline = [], time.monotonic() + 60 * minutes
    for pair in itertools.zip_longest(chains(), linear_scans()):
        found += [each for each in pair if each is not None]
        if time.monotonic() > deadline:
            break
    return found


def factors(some: Sequence[Timed]) -> np.ndarray:
    """What a call takes besides, and by how much each stage takes longer than expected."""
    features = [[1.0, *each.stages] for each in some]
    times = [max(each.us - each.launches, 1.0) for each in some]
    # A factor of 1 has a weight of its own, which hardly counts where the points tell of the stage.
    return fit([*features, *np.eye(4)[1:].tolist()], [*times, 1.0, 1.0, 1.0], [1.0] * len(some) + [0.03] * 3)


def tables_of(timed: Sequence[Timed], tables: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables of `tables` that were measured, their stages corrected."""
    groups = defaultdict(list)
    for each in timed:
        groups[each.table].append(each)
    for name, some in groups.items():
        found = factors(some)
        times = dict(zip(("products", "boundaries", "replay"), found[1:].tolist(), strict=True))
        # A stage that no point has, or that is found to take nothing, stays as it was.
        by_number = {number: times[stage] or 1.0 for stage, numbers in NUMBERS[name].items() for number in numbers}
        expected = [each.launches + found @ (1.0, *each.stages) for each in some]
        words = f"{len(some)} scans, {error(expected, [each.us for each in some])}"
        yield (
            name,
            {
                kind: words if kind == "from" else {n: scaled(v, by_number.get(n, 1.0)) for n, v in numbers.items()}
                for kind, numbers in tables[name].items()
            },
        )


def scaled(value: float | list[float], times: float) -> float | list[float]:
    return [rounded(times * v) for v in value] if isinstance(value, list) else rounded(times * value)
