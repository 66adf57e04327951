"""What all parts share: this process among the others, what is timed and watched, and the rows of a comparison."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import weft.distributed as wd
from torch import Tensor
from weft._distributed.group import GroupRanks
from weft._distributed.stand_in import StandIn

from benchmarks.common import Results, case_name
from benchmarks.links import fit_link

Rows = list[dict[str, str]]
Run = Callable[[], Any]
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
ROOM = 0.85
"""Of a GPU's memory, what a case may take."""
SHORT = 10.0
"""Milliseconds up to which a candidate may wait for its host."""


class Took(NamedTuple):
    """Milliseconds, of a rank or of the slowest."""

    device: float
    host: float
    """Until it had given the device everything."""


class Together:
    """This process among the ranks that torchrun has started."""

    def __init__(self, seconds: float) -> None:
        self.seconds = min(seconds, 1.0)
        on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        self.backend = "nccl" if on_gpu else "gloo"
        if on_gpu:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group(self.backend, timeout=timedelta(seconds=100))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.gathers: dict[int, float] = {}
        memory = torch.cuda.get_device_properties(self.device).total_memory if on_gpu else 1 << 30
        self.room = ROOM * memory

    def name(self, **keys: Any) -> str:
        kind = "gpus" if self.device.type == "cuda" else "processes"
        return case_name(device=self.device.type, **keys, **{kind: self.size})

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def first(self, job: Callable[[], Any]) -> Any:
        """What a job gives on the first rank, on every rank, while the others wait; its error is every rank's."""
        told: list[Any] = [None, None]
        if self.rank == 0:
            try:
                told[0] = job()
            except Exception as error:
                told[1] = f"on one rank alone: {error}"
        self.free()
        dist.broadcast_object_list(told, 0)
        if told[1] is not None:
            raise RuntimeError(told[1])
        return told[0]

    def largest(self, value: float) -> float:
        told = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return told.item()

    def once(self, run: Run, alone: bool = False) -> Took:
        """On this rank; all begin together."""
        if not alone:
            dist.barrier()
        self.wait()
        on_gpu = self.device.type == "cuda"
        begin, end = (torch.cuda.Event(enable_timing=True) if on_gpu else None for _ in range(2))
        if on_gpu:
            begin.record()
        began = time.perf_counter()
        result = run()
        host = 1e3 * (time.perf_counter() - began)
        if on_gpu:
            end.record()
            end.synchronize()
        del result
        return Took(begin.elapsed_time(end) if on_gpu else host, host)

    def measure(self, candidates: Mapping[str, Run]) -> dict[str, float]:
        """Median milliseconds of each, of the slowest rank."""
        return {name: took.device for name, took in self.medians(candidates).items()}

    def medians(self, candidates: Mapping[str, Run]) -> dict[str, Took]:
        """Medians of the slowest rank, in two blocks, in turns: of short candidates round by round, so that what a host
        does besides meets all alike, which moves its times by a half from one block to the next."""
        times: dict[str, list[Took]] = {name: [] for name in candidates}
        for _ in range(2):
            rounds, interleaved = {}, []
            for name, run in candidates.items():
                self.once(run)
                longest = self.largest(self.once(run).device)  # as many rounds on every rank
                rounds[name] = self._rounds(longest)
                if longest <= SHORT:
                    interleaved.append(name)
                else:
                    times[name] += [self.once(run) for _ in range(rounds[name])]
            for turn in range(max((rounds[name] for name in interleaved), default=0)):
                for name in interleaved:
                    if turn < rounds[name]:
                        times[name].append(self.once(candidates[name]))
        return {name: self._of_slowest(found) for name, found in times.items()}

    def _of_slowest(self, times: list[Took]) -> Took:
        took = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return Took(*(statistics.median(column) for column in took.T.tolist()))

    def alone(self, run: Run) -> float:
        """Median milliseconds of what the first rank does while the others wait."""
        self.once(run, alone=True)
        rounds = self._rounds(self.once(run, alone=True).device)
        return statistics.median(self.once(run, alone=True).device for _ in range(2 * rounds))

    def link(self, near: float) -> wd.Link:
        """As fitted to messages of about so many bytes."""
        return fit_link(self.gathers, self.size, near)

    def _rounds(self, milliseconds: float) -> int:
        return min(max(int(500 * self.seconds / milliseconds), 3), 25)

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


Mark = Any
"""A moment: an event of a GPU's stream, seconds of a processor's clock."""


class Watched:
    """Of the collectives of a block: what this rank sends to each other one, and how long they take on its stream, each
    on the rank that comes last and waits for no other."""

    def __init__(self, over: Together) -> None:
        self.over = over
        self.sent: list[int] = []
        self.milliseconds = 0.0
        """From where they begin."""
        self.waited = 0.0
        """From where the stream has nothing else to do."""
        self._marks: list[tuple[Mark, Mark, Mark]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        originals = GroupRanks.begin_gather, GroupRanks.shift

        def begin_gather(ranks: GroupRanks, x: Tensor) -> Callable[[], Tensor]:
            begin = self._told(x)
            wait = originals[0](ranks, x)

            def waited() -> Tensor:
                reached = _mark(x.device)
                result = wait()
                self._marks.append((begin, reached, _mark(x.device)))
                return result

            return waited

        def shift(ranks: GroupRanks, x: Tensor, by: int) -> Tensor | None:
            begin = self._told(x)
            result = originals[1](ranks, x, by)
            self._marks.append((begin, begin, _mark(x.device)))
            return result

        GroupRanks.begin_gather, GroupRanks.shift = begin_gather, shift
        try:
            yield
        finally:
            GroupRanks.begin_gather, GroupRanks.shift = originals
        # Not where the block failed: this rank ends then, and the others with it.
        self.over.wait()
        took = [[_between(begin, end), _between(reached, end)] for begin, reached, end in self._marks]
        of_each = torch.tensor(took, dtype=torch.float64, device=self.over.device).view(-1, 2)
        dist.all_reduce(of_each, dist.ReduceOp.MIN)
        self.milliseconds, self.waited = of_each.sum(0).tolist()

    def _told(self, x: Tensor) -> Mark:
        self.sent.append(x.numel() * x.element_size())
        return _mark(x.device)


def _mark(device: torch.device) -> Mark:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Mark, end: Mark) -> float:
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


def watch(over: Together, run: Run) -> Watched:
    """The medians of a few."""
    found = []
    for _ in range(5):
        dist.barrier()
        over.wait()
        watched = Watched(over)
        with watched.watching():
            run()
        found.append(watched)
    watched = found[0]
    watched.milliseconds = statistics.median(w.milliseconds for w in found)
    watched.waited = statistics.median(w.waited for w in found)
    return watched


def step_of(run: Callable[..., Tensor], inputs: list[Tensor], gradients: bool) -> Run:
    @torch.no_grad()
    def forward() -> Tensor:
        return run(*inputs)

    def both() -> None:
        for t in inputs:
            t.grad = None
        out = run(*inputs)
        out.backward(out.detach())

    return both if gradients else forward


class Probes:
    """Training steps of two short scans, a diagonal and a dense one, which exchange once each way, over the ranks and
    beside a stand-in: what an exchange adds to a step whose device has nothing to do but wait for its host, the way of
    the collective through the host and of ranks that come a little later than others."""

    def __init__(self, over: Together) -> None:
        self._groups, self.steps = [], {}
        if over.device.type == "cpu":  # which is the host
            return
        for name, shape in (("diagonal", (64, 16, 20)), ("dense", (64, 16, 20, 20))):
            inputs = [torch.rand(s, device=over.device).div_(20).requires_grad_() for s in (shape, shape[:3])]
            group = StandIn(over.size // 2, over.size)
            self._groups.append(group)
            self.steps[f"{name} probe over ranks"] = step_of(wd.linear_scan, inputs, True)
            self.steps[f"{name} probe"] = step_of(
                lambda A, b, group=group: wd.linear_scan(A, b, group=group), inputs, True
            )

    def start(self, times: Mapping[str, Took]) -> float:
        """Milliseconds of the start of an exchange, of what the steps took."""
        found = [
            max(times[f"{name} over ranks"].device - times[name].device, 0.0) / 2
            for name in self.steps
            if not name.endswith("ranks")
        ]
        return statistics.mean(found) if found else 0.0

    def close(self) -> None:
        for group in self._groups:
            group.close()


def measure_part(over: Together, candidates: Mapping[str, Run]) -> dict[str, float]:
    """Of over.measure, of candidates of which "part" is a rank's part beside a stand-in; and "host", until its host has
    given the device all of that part, 0 on a processor, which is the host; and "start", of an exchange. A host is
    slower at one time than at another: all are measured together."""
    probes = Probes(over)
    try:
        found = over.medians({**candidates, **probes.steps})
    finally:
        probes.close()
    times = {name: found[name].device for name in candidates}
    host = 0.0 if over.device.type == "cpu" else found["part"].host
    return times | {"host": host, "start": probes.start(found)}


def behind_host(part: float, host: float, exchanges: int, start: float) -> float:
    """What a step takes whose device waits for its host. The host gives the device its work in as many phases as there
    are exchanges, and one more, all alike here; the device is done with the last of them a phase after the host.

    Args:
        part: what the step takes where exchanges take no time.
        host: until its host has given it to the device.
        start: what an exchange adds to that.
    """
    phases, host = exchanges + 1, min(host, part)  # which are measured apart
    # Of the device alone. Part is that and the host's first phase, or the host's time and the device's last phase.
    busy = phases * (part - host)
    if busy > host:
        busy = part - host / phases
    return host + exchanges * start + busy / phases


def compare(
    over: Together, results: Results, name: str, metric: str, times: dict[str, float], watched: Watched
) -> Rows:
    """Rows of one metric. `times`: of "ranks", "one_rank", a rank's "slice" alone, its "part" beside a stand-in, the
    "host" of that part and the "start" of an exchange, as measure_part says, and what other peers took."""
    rows = []
    sent = watched.sent
    between = sum(wd.exchange(over.size, size, over.link(size)).seconds for size in sent)
    if sent:
        link = over.link(sent[0])
        fixup = max(times["part"] - times["slice"], 0.0) / 1e3
        first = wd.exchange(over.size, sent[0], link).seconds
        host = 0.0
        if times["host"] > 0:
            host = behind_host(times["part"], times["host"], len(sent), times["start"]) / 1e3
        # A slice has costs that do not shrink with it.
        work = over.size * times["slice"] / 1e3
        said = wd.predict(work, over.size, sent[0], fixup=fixup + between - first, link=link, host=host)
        times["predicted"] = 1e3 * said.seconds
        told = {"part": times["part"], "its host": times["host"], "start of an exchange": times["start"]}
        told = ", ".join(f"{what} {took:.4g} ms" for what, took in told.items())
        print(f"{name} {metric}: {told}, {len(sent)} exchanges", flush=True)
    for peer, took in times.items():
        if peer not in ("ranks", "part", "host", "start"):
            rows.append(results.put(name, metric, "ms", times["ranks"], peer, took))
    if sent:
        what = f"{metric}_exchange"
        rows.append(results.put(name, what, "ms", watched.milliseconds, "predicted", 1e3 * between))
    return rows
