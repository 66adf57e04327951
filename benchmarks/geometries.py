"""Measures ways to lay the recurrence of weft::rnn out on a GPU, and fits the costs by which one is chosen.

``python -m benchmarks.geometries [--sizes 512 1024] [--count 6] [--minutes 8]`` times, for every cell, dtype and batch
at T = 1024, the geometries that are expected to be the fastest, and of each tier and group the best; ``--output`` keeps
the times. It ends with the constants of a step, their errors, and what the choice by them loses against the fastest
that was measured; ``--input`` fits them to times that were kept. ``python -m benchmarks.fit`` measures fewer of them,
and writes the constants into the costs of the GPU.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import weft
from weft._rnn.select.costs import GATES

from benchmarks.common import DTYPES
from benchmarks.fitting import fit
from benchmarks.scan import GRID_CELLS

VARIABLE = "WEFT_RNN_GEOMETRY"
SOURCE = "rnn/persistent/cuda/recurrence.jit.cu"
CALL_US = 15.0
"""Of a call with few steps, which is not the geometry's."""


class Problem(NamedTuple):
    cell: str
    dtype: str
    """Of benchmarks.common.DTYPES; "exact" is fp32 without TF32."""
    H: int
    B: int
    backward: bool


class Geometry(NamedTuple):
    text: str
    """As WEFT_RNN_GEOMETRY takes it."""
    defines: list[str]
    expected_us: float
    launches: float
    amounts: dict[str, float]

    @property
    def tier(self) -> str:
        return self.fields["tier"]

    @property
    def fields(self) -> dict[str, str]:
        return dict(field.split("=") for field in self.text.split())


class Timed(NamedTuple):
    problem: Problem
    geometry: Geometry
    us: float
    """Of a step."""


def problems(sizes: Sequence[int], batches: Sequence[int]) -> Iterator[Problem]:
    for cell, dtype, H, B in itertools.product(GRID_CELLS, ("fp16", "fp32", "exact"), sizes, batches):
        for backward in (False, True):
            yield Problem(cell, dtype, H, B, backward)


def geometries(problem: Problem) -> list[Geometry]:
    """All that fit on the current device, the fastest expected first."""
    dtype = str(torch_dtype(problem)).removeprefix("torch.")
    with precision(problem):
        found = weft._C.rnn.geometries(
            device=torch.cuda.current_device(), cell=problem.cell, dtype=dtype, hidden=problem.H, batch=problem.B,
            directions=1, packed=False, backward=problem.backward,
        )  # fmt: skip
    return [Geometry(*each) for each in found]


def torch_dtype(problem: Problem) -> torch.dtype:
    return DTYPES["fp32" if problem.dtype == "exact" else problem.dtype]


def precision(problem: Problem):
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=problem.dtype != "exact")


def worth_timing(found: Sequence[Geometry], count: int) -> list[Geometry]:
    """The fastest expected, and then the best of each tier, group and cluster."""
    best: dict[tuple[str, ...], Geometry] = {}
    for geometry in found:
        fields = geometry.fields
        best.setdefault(tuple(fields[f] for f in ("tier", "group", "product", "directions", "cluster")), geometry)
    others = [geometry for geometry in best.values() if geometry not in found[:count]]
    return [*found[:count], *others[: 2 * count]]


def runs(problem: Problem, geometry: Geometry) -> bool:
    """Whether the device holds its blocks: what does not fit would be timed step by step."""
    os.environ[VARIABLE] = geometry.text
    try:
        with precision(problem):
            plan = weft._C.rnn.report(
                device=torch.cuda.current_device(), cell=problem.cell, input_size=8, hidden_size=problem.H, layers=1,
                dtype=str(torch_dtype(problem)).removeprefix("torch."), directions=1, steps=1, batch=problem.B,
                packed=False, trains=problem.backward,
            )  # fmt: skip
    finally:
        del os.environ[VARIABLE]
    return bool(plan["backward" if problem.backward else "forward"])


def step_us(problem: Problem, geometry: Geometry, steps: int) -> float:
    """Microseconds of a step, with its part of a small input projection and of what the call fills."""
    cell, _, H, B, backward = problem
    dtype, bound, inputs = torch_dtype(problem), problem.H**-0.5, 8
    shapes = (GATES[cell] * H, inputs), (GATES[cell] * H, H), (GATES[cell] * H,), (GATES[cell] * H,)
    weights = [torch.empty(shape, device="cuda", dtype=dtype).uniform_(-bound, bound) for shape in shapes]
    x = torch.randn(steps, B, inputs, device="cuda", dtype=dtype)

    def forward():
        return torch.ops.weft.rnn(x, None, None, weights, None, cell=cell, save=True)

    with torch.no_grad(), precision(problem):
        run = forward
        if backward:
            output, _, _, cells, gates = forward()
            grad = torch.randn_like(output)

            def run():
                torch.ops.weft.rnn_backward(
                    grad, None, None, None, x, None, None, weights, None, output, cells, gates, cell=cell,
                    bidirectional=False, output_mask=[False] * 7,
                )  # fmt: skip

        os.environ[VARIABLE] = geometry.text
        try:
            times = []
            for _ in range(3):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                run()
                end.record()
                end.synchronize()
                times.append(1e3 * start.elapsed_time(end))
        finally:
            del os.environ[VARIABLE]
    return (min(times[1:]) - CALL_US) / steps


def measure(of: Iterable[Problem], count: int, seconds: float, steps: int = 1024) -> Iterator[Timed]:
    deadline = time.perf_counter() + seconds
    architecture = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    for problem in of:
        chosen = [geometry for geometry in worth_timing(geometries(problem), count) if runs(problem, geometry)]
        weft._C.jit.compile_many([(SOURCE, geometry.defines, architecture) for geometry in chosen])
        for geometry in chosen:
            if time.perf_counter() > deadline:
                return
            yield Timed(problem, geometry, step_us(problem, geometry, steps))


def write(path: Path, timed: Iterable[Timed]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for problem, geometry, us in timed:
            amounts = [f"{name}={amount}" for name, amount in geometry.amounts.items()]
            times = f"{geometry.expected_us:.3f}", f"{us:.3f}"
            writer.writerow([*problem, geometry.text, *times, geometry.launches, *amounts])


def read(path: Path) -> Iterator[Timed]:
    with path.open(newline="", encoding="utf-8") as file:
        for cell, dtype, H, B, backward, text, expected, us, launches, *amounts in csv.reader(file):
            pairs = (amount.split("=") for amount in amounts)
            geometry = Geometry(text, [], float(expected), float(launches), {name: float(a) for name, a in pairs})
            yield Timed(Problem(cell, dtype, int(H), int(B), backward == "True"), geometry, float(us))


def fit_tiers(timed: Sequence[Timed]) -> dict[tuple[str, bool], dict[str, float]]:
    """The constants of each tier and pass that was measured."""
    groups = defaultdict(list)
    for each in timed:
        groups[each.geometry.tier, each.problem.backward].append(each)
    costs = {}
    for key, some in groups.items():
        names = list(some[0].geometry.amounts)
        features = [list(each.geometry.amounts.values()) for each in some]
        costs[key] = dict(zip(names, fit(features, [each.us / each.geometry.launches for each in some]), strict=True))
    return costs


def expected(costs: dict[tuple[str, bool], dict[str, float]], each: Timed) -> float:
    constants = costs[each.geometry.tier, each.problem.backward]
    return each.geometry.launches * sum(constants[name] * a for name, a in each.geometry.amounts.items())


def lost(timed: Sequence[Timed], us: Sequence[float]) -> float:
    """What the choice of the least expected time takes more than the fastest measured: the mean over the problems."""
    by_problem = defaultdict(list)
    for each, guess in zip(timed, us, strict=True):
        by_problem[each.problem].append((guess, each.us))
    taken = [min(some, key=lambda pair: pair[0])[1] / min(us for _, us in some) for some in by_problem.values()]
    return statistics.mean(taken) - 1


def report(timed: Sequence[Timed]) -> None:
    costs = fit_tiers(timed)
    for (tier, backward), constants in sorted(costs.items()):
        some = [each for each in timed if (each.geometry.tier, each.problem.backward) == (tier, backward)]
        errors = np.array([expected(costs, each) / each.us for each in some]) - 1
        print(
            f"{tier} {'backward' if backward else 'forward'}: {len(some)} rows, rms {np.sqrt(np.mean(errors**2)):.1%}"
        )
        print("    {" + ", ".join(f"{constants[name]:.3g}" for name in constants) + "}")
    now, fitted = (
        [f(each) for each in timed] for f in (lambda e: e.geometry.expected_us, lambda e: expected(costs, e))
    )
    print(f"the choice loses {lost(timed, now):.1%} as it is, {lost(timed, fitted):.1%} by these constants")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="hidden units")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--count", type=int, default=6, help="geometries of a problem, and others that are not as good")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--output", type=Path, help="where the times are written")
    parser.add_argument("--input", type=Path, help="times to fit to, in the place of measuring")
    options = parser.parse_args(arguments)
    if options.input is not None:
        timed = list(read(options.input))
    else:
        every = problems(options.sizes, options.batches)
        timed = list(measure(every, options.count, 60 * options.minutes))
    if options.output is not None:
        write(options.output, timed)
    report(timed)


if __name__ == "__main__":
    main()
