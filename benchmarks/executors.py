"""Measures the vertex engine's executors on the nets of benchmarks/nets.py, and fits the costs by which one is chosen.

``python -m benchmarks.executors [--seconds 60] [--output FILE]`` times calls with their backward passes, in CUDA graphs
and by the host, and ends with the constants and what the choice by them loses against the faster executor; ``--input``
fits to times that were kept. ``python -m benchmarks.fit`` writes the constants into the costs of the GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import weft
from torch import Tensor
from weft import Graphs
from weft._C import vertex as _C
from weft._vertex.calls import prepare
from weft._vertex.runtime import batched, persistent

from benchmarks import nets
from benchmarks.common import Candidate, captured, host_us, measure
from benchmarks.costs_file import Tables
from benchmarks.fitting import error, fit, rounded
from benchmarks.level_loops import treebank

CASES = [
    *(("treelstm", H, B) for H in (128, 256, 512, 1024) for B in (1, 4, 25, 64, 256)),
    *((name, None, B) for name in ("rvnn", "td-rnn", "td-lstm", "bilstm") for B in (1, 4, 16, 64, 128)),
]
"""Nets, hidden sizes (None: the net's), batches."""
TREES, SENTENCES = 700, 400
TYPES = ("float32", "bfloat16")
"""Of parameters and inputs."""
PERSISTENT, BATCHED = persistent.PERSISTENT, persistent.BATCHED
HOST = ("call", "launch", "task")
ENDS = ("", ".half")
"""Of the names of their costs."""


class Timed(NamedTuple):
    """A call with its backward pass, in microseconds."""

    name: str
    H: int | None
    B: int
    parts: int
    """Of the persistent kernels."""
    kernels: float
    """Of these, both of them."""
    persistent: float
    """In a CUDA graph."""
    batched: float
    host_persistent: float
    """On graphs that were never seen, put together and sent to the device."""
    host_batched: float
    dtype: str = "float32"


class Problem:
    """What a case runs on.

    Args:
        name: the net.
        H: its hidden size.
        B: graphs in a batch.
        device: ``"cuda"`` or ``"cpu"``.
        dtype: one of :data:`TYPES`.
    """

    def __init__(self, name: str, H: int | None, B: int, device: str, dtype: str = "float32") -> None:
        self.training = nets.Training(name, _data(name), B, device, H)
        self.training.cell.to(getattr(torch, dtype))
        self.graphs, x, _ = self.training.batch()
        self.x = x.detach().to(getattr(torch, dtype)).requires_grad_()
        self.leaves = [self.x, *self.training.cell.parameters()]

    def run(self, executor: str, graphs: Graphs | None = None) -> Sequence[Tensor]:
        y = self.training.cell(self.graphs if graphs is None else graphs, self.x, executor=executor)
        return torch.autograd.grad(y, self.leaves, torch.ones_like(y))

    @property
    def compiled(self) -> batched.Batched:
        return prepare(self.training.cell, self.graphs, self.x, "batched").compiled

    def run_fresh(self, executor: str) -> Sequence[Tensor]:
        """The same on graphs that nobody has seen."""
        parts = self.training.data.graphs[: self.training.B]
        return self.run(executor, Graphs.batch(parts).to(self.training.device))


@functools.cache
def _data(name: str) -> nets.Data:
    if name.startswith("bilstm"):
        return nets.data_of(name, [], (nets.sentences(None) or [])[:SENTENCES])
    return nets.data_of(name, (treebank(None) or [])[:TREES], [])


def kernels_us(replay: Callable[[], Any]) -> float:
    """What the persistent kernels of a replay take together."""
    replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    spans = [e.time_range for e in profile.events() if "vertex_persistent" in e.name]
    return float(sum(span.end - span.start for span in spans))


def measured(seconds: float) -> Iterator[Timed]:
    """The cases that the time is enough for, some of every net first; those that the persistent executor runs."""
    deadline = time.perf_counter() + seconds
    for (name, H, B), dtype in itertools.product(CASES[::3] + CASES[1::3] + CASES[2::3], TYPES):
        if time.perf_counter() > deadline:
            return
        problem = Problem(name, H, B, "cuda", dtype)
        cell, graphs = problem.training.cell, problem.graphs
        if weft.explain(cell, graphs, problem.x, executor="persistent").executor != "persistent":
            continue
        replays, times = {}, {}
        for executor in ("persistent", "batched"):
            own = Problem(name, H, B, "cuda", dtype)  # a capture must not meet leaves of a graph on another stream
            replays[executor] = captured(functools.partial(own.run, executor))
        times = measure({e: Candidate(lambda _, r=replay: r()) for e, replay in replays.items()}, "cuda", at_most=0.1)
        hosts = {e: host_us(functools.partial(problem.run_fresh, e)) for e in replays}
        chosen = persistent.geometry(problem.compiled, graphs, graphs.device)
        yield Timed(
            name, H, B, chosen.parts, kernels_us(replays["persistent"]), *(1e3 * times[e] for e in replays),
            *hosts.values(), dtype,
        )  # fmt: skip


class Amounts(NamedTuple):
    """How often a case pays each of the costs."""

    persistent: dict[str, float]
    batched: dict[str, float]
    host_persistent: dict[str, float]
    host_batched: dict[str, float]


@functools.cache
def amounts(name: str, H: int | None, B: int, parts: int, processors: int, dtype: str = "float32") -> Amounts:
    """Of a case on a device with so many multiprocessors."""
    problem = Problem(name, H, B, "cpu", dtype)
    compiled, graphs = problem.compiled, problem.graphs
    most = processors // parts
    blocks = max(_C.partition(compiled.program, which, most)[0] for which in (0, 1))
    groups = processors // blocks if parts > 1 else 1
    few, eights = _C.group_amounts(graphs._core, groups)
    own = {"level": 2.0 * graphs.num_levels}
    rows = persistent.row_amounts(compiled, most)
    for often, amount in zip((eights, eights, few, few), rows, strict=True):
        for what, n in amount.items():
            own[what] = own.get(what, 0.0) + often * n
    others = dict(zip(BATCHED, _C.batched_amounts(compiled.program, graphs._core, True), strict=True))
    tasks = 2.0 * min(groups, len(graphs)) * graphs.num_levels
    return Amounts(
        own,
        others,
        {"call": 1.0, "launch": 4.0, "task": tasks},
        {"call": 1.0, "launch": others["launch"], "task": 0.0},
    )


def tables_of(timed: Sequence[Timed], processors: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The costs of persistent kernels and of the batched executor, by types, and of the host, where enough was
    measured."""
    found = [amounts(t.name, t.H, t.B, t.parts, processors, t.dtype) for t in timed]
    for dtype, end in zip(TYPES, ENDS, strict=True):
        own = [i for i, t in enumerate(timed) if t.dtype == dtype]
        # What both spend besides the frontiers is the same.
        others = {i: timed[i].batched - (timed[i].persistent - timed[i].kernels) for i in own}
        kernels = [timed[i].kernels for i in own]
        yield from _table(f"vertex.persistent{end}", PERSISTENT, [found[i].persistent for i in own], kernels)
        kept = [i for i, us in others.items() if us > 0]
        yield from _table(f"vertex.batched{end}", BATCHED, [found[i].batched for i in kept], [others[i] for i in kept])
    hosts = [a.host_persistent for a in found] + [a.host_batched for a in found]
    times = [t.host_persistent for t in timed] + [t.host_batched for t in timed]
    yield from _table("vertex.host", HOST, hosts, times, "fixed")


_GOES_WITH = {"tail": "chip", "product": "chip", "weights": "chip"}
"""What constants go with on another GPU, else with the clock; of a persistent kernel, whose blocks are its own, all."""


def _table(
    name: str, names: Sequence[str], features: Sequence[dict[str, float]], times: Sequence[float], kind: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    if len(times) <= 2 * len(names):
        return
    constants = dict(zip(names, map(rounded, fit([[f[n] for n in names] for f in features], times)), strict=True))
    expected = [sum(constants[n] * f[n] for n in names) for f in features]
    table: dict[str, Any] = {"from": f"{len(times)} calls with their backward passes, {error(expected, times)}"}
    for n, constant in constants.items():
        own = name.startswith("vertex.persistent")
        goes_with = kind or ("clock" if own else _GOES_WITH.get(n, "clock"))
        table.setdefault(goes_with, {})[n] = constant
    yield name, table


def lost(timed: Sequence[Timed], tables: Tables, processors: int) -> float:
    """What the choice takes more than the faster executor in CUDA graphs, the mean over the cases."""

    def us(name: str, amount: dict[str, float]) -> float:
        numbers = {n: c for kind, values in tables[name].items() if kind != "from" for n, c in values.items()}
        return sum(numbers[n] * a for n, a in amount.items())

    taken = []
    for t in timed:
        a, end = amounts(t.name, t.H, t.B, t.parts, processors, t.dtype), ENDS[TYPES.index(t.dtype)]
        if f"vertex.persistent{end}" not in tables or f"vertex.batched{end}" not in tables:
            continue
        first = us(f"vertex.persistent{end}", a.persistent) < us(f"vertex.batched{end}", a.batched)
        taken.append((t.persistent if first else t.batched) / min(t.persistent, t.batched))
    return statistics.mean(taken) - 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processors", type=int, default=132, help="multiprocessors of the GPU of --input")
    parser.add_argument("--output", type=Path, help="where the times are written")
    parser.add_argument("--input", type=Path, help="times to fit to, in the place of measuring")
    options = parser.parse_args(arguments)
    processors = options.processors
    if options.input is not None:
        timed = [Timed(**json.loads(line)) for line in options.input.read_text(encoding="utf-8").splitlines()]
    else:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        timed = []
        for t in measured(options.seconds):
            timed.append(t)
            print(json.dumps({key: rounded(x) if isinstance(x, float) else x for key, x in t._asdict().items()}))
    if options.output is not None:
        options.output.write_text("".join(json.dumps(t._asdict()) + "\n" for t in timed), encoding="utf-8")
    tables = dict(tables_of(timed, processors))
    for name, table in tables.items():
        print(name, json.dumps(table))
    if "vertex.persistent" in tables and "vertex.batched" in tables:
        print(f"the choice loses {lost(timed, tables, processors):.1%} in CUDA graphs")


if __name__ == "__main__":
    main()
