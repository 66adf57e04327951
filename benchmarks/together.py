"""What several GPUs of one host give, each a rank: ``torchrun --nproc-per-node 2 -m benchmarks.ranks``.

Beside each case over all ranks stand, in the same run, the same sequence on one GPU (in pieces where it does not fit),
a rank's slice alone (weak scaling is its time over that of all), trading time for channels by all-to-all, and what
:func:`weft.distributed.predict` said with the link that was fitted to these ranks. A time is the slowest rank's; what
ranks tell each other is counted, and timed within the step by events. With gloo on the CPU the shapes are small.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import math
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import weft
import weft.distributed as wd
from torch import Tensor, nn
from weft._distributed.group import GroupRanks
from weft._distributed.stand_in import StandIn
from weft.scan import linear_scan

from benchmarks.common import (
    DTYPES,
    ROOT,
    Entry,
    Results,
    case_name,
    check_agreement,
    relative_error,
    run_entries,
    show,
)
from benchmarks.links import fit_link, put_link, time_gathers

Rows = list[dict[str, str]]
Run = Callable[[], Any]
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
ROOM = 0.85
"""Of a GPU's memory, what a case may take."""


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
        self.link = wd.Link()
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

    def once(self, run: Run, alone: bool = False) -> float:
        """Milliseconds on this rank; all begin together."""
        if not alone:
            dist.barrier()
        self.wait()
        if self.device.type == "cpu":
            began = time.perf_counter()
            result = run()
            took = 1e3 * (time.perf_counter() - began)
            del result
            return took
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        del result
        return begin.elapsed_time(end)

    def measure(self, candidates: Mapping[str, Run]) -> dict[str, float]:
        """Median milliseconds of each, of the slowest rank, in two blocks, in turns."""
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(2):
            for name, run in candidates.items():
                self.once(run)
                rounds = self._rounds(self.largest(self.once(run)))  # as many on every rank
                took = torch.tensor([self.once(run) for _ in range(rounds)], dtype=torch.float64, device=self.device)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[name] += took.tolist()
        return {name: statistics.median(found) for name, found in times.items()}

    def alone(self, run: Run) -> float:
        """Median milliseconds of what the first rank does while the others wait."""
        self.once(run, alone=True)
        rounds = self._rounds(self.once(run, alone=True))
        return statistics.median(self.once(run, alone=True) for _ in range(2 * rounds))

    def _rounds(self, milliseconds: float) -> int:
        return min(max(int(500 * self.seconds / milliseconds), 3), 25)

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Watched:
    """Of the collectives of a block: what this rank sends to each other one, and how long they take on its stream, each
    on the rank that comes last and waits for no other."""

    def __init__(self, over: Together) -> None:
        self.over = over
        self.sent: list[int] = []
        self.milliseconds = 0.0
        self._took: list[Callable[[], float]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        originals = GroupRanks.gather, GroupRanks.shift

        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(ranks: GroupRanks, x: Tensor, *others: Any) -> Any:
                self.sent.append(x.numel() * x.element_size())
                if x.device.type == "cpu":
                    began = time.perf_counter()
                    result = original(ranks, x, *others)
                    took = 1e3 * (time.perf_counter() - began)
                    self._took.append(lambda: took)
                    return result
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                result = original(ranks, x, *others)
                end.record()
                self._took.append(lambda: begin.elapsed_time(end))
                return result

            return call

        GroupRanks.gather, GroupRanks.shift = (watched(original) for original in originals)
        try:
            yield
        finally:
            GroupRanks.gather, GroupRanks.shift = originals
            self.over.wait()
            of_each = torch.tensor([took() for took in self._took], dtype=torch.float64, device=self.over.device)
            dist.all_reduce(of_each, dist.ReduceOp.MIN)
            self.milliseconds = of_each.sum().item()


class _Exchanged(torch.autograd.Function):
    """Rows for each rank, (ranks, ...), to the rows of each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        came = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(came, x.contiguous())
        return came

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Exchanged.apply(grad)


def scan_by_all_to_all(A: Tensor, b: Tensor) -> Tensor:
    """A diagonal scan over ranks as it is usually done: slices of time (T / n, B, H) become all steps of a share of the
    channels, (T, B, H / n), are scanned, and go back."""
    ranks = dist.get_world_size()

    def to_channels(x: Tensor) -> Tensor:
        return _Exchanged.apply(x.unflatten(-1, (ranks, -1)).movedim(-2, 0)).flatten(0, 1)

    x = linear_scan(to_channels(A), to_channels(b))
    return _Exchanged.apply(x.unflatten(0, (ranks, -1))).movedim(0, -2).flatten(-2)


def _step(run: Callable[..., Tensor], inputs: list[Tensor], gradients: bool) -> Run:
    @torch.no_grad()
    def forward() -> Tensor:
        return run(*inputs)

    def both() -> None:
        for t in inputs:
            t.grad = None
        out = run(*inputs)
        out.backward(out.detach())

    return both if gradients else forward


def _compare(
    over: Together, results: Results, name: str, metric: str, times: dict[str, float], watched: Watched
) -> Rows:
    """Rows of one metric. `times`: of "ranks", "one_rank", a rank's "slice" alone, its "part" beside a stand-in, and
    what other peers took."""
    rows = []
    sent = watched.sent
    between = sum(wd.exchange(over.size, size, over.link).seconds for size in sent)
    if sent:
        fixup = max(times["part"] - times["slice"], 0.0) / 1e3
        first = wd.exchange(over.size, sent[0], over.link).seconds
        said = wd.predict(times["one_rank"] / 1e3, over.size, sent[0], fixup=fixup + between - first, link=over.link)
        times["predicted"] = 1e3 * said.seconds
    for peer, took in times.items():
        if peer not in ("ranks", "part"):
            rows.append(results.put(name, metric, "ms", times["ranks"], peer, took))
    if sent:
        what = f"{metric}_exchange"
        rows.append(results.put(name, what, "ms", watched.milliseconds, "predicted", 1e3 * between))
    return rows


def scan_entry(over: Together, layout: str, dtype: str, H: int, B: int, T: int) -> Entry:
    name = over.name(op="linear_scan", dtype=dtype, layout=layout, H=H, B=B, T=T)
    diagonal = layout == "diagonal"
    matrix = 1 if diagonal else H
    # Bytes of a call: A, b and x, with gradients those of all three.
    number = DTYPES[dtype].itemsize
    needed = {gradients: number * B * H * (matrix + 2.2) * (1 + gradients) for gradients in (False, True)}

    def inputs_of(steps: int, seed: int) -> list[Tensor]:
        source = torch.Generator(over.device).manual_seed(seed)
        shape = (steps, B, H) if diagonal else (steps, B, H, H)
        A = torch.rand(shape, generator=source, device=over.device, dtype=DTYPES[dtype])
        A.mul_(0.2 / matrix).add_(0.8 / matrix)
        return [A, torch.randn(steps, B, H, generator=source, device=over.device, dtype=DTYPES[dtype])]

    def fits(steps: int, gradients: bool) -> bool:
        return needed[gradients] * steps <= over.room

    def exchanges_channels(gradients: bool) -> bool:
        return diagonal and H % over.size == 0 and T % over.size == 0 and fits(2 * T // over.size, gradients)

    def edges_of(run: Callable[..., Tensor]) -> Tensor:
        """States at the edges of all ranks' slices, (2 ranks, B, H)."""
        with torch.no_grad():
            x = run(*inputs_of(wd.slice_sizes(T, over.size)[over.rank], over.rank))
        edges = torch.empty(2 * over.size, B, H, device=over.device, dtype=x.dtype)
        dist.all_gather_into_tensor(edges, torch.stack((x[0], x[-1])))
        return edges

    def edges_on_one() -> Tensor:
        state, edges = None, []
        for rank, size in enumerate(wd.slice_sizes(T, over.size)):
            x = linear_scan(*inputs_of(size, rank), state)
            state = x[-1].clone()
            edges += [x[0].clone(), state]
            del x
        return torch.stack(edges)

    def agree() -> None:
        edges = {"ranks": edges_of(wd.linear_scan)}
        if exchanges_channels(False):
            edges["all_to_all"] = edges_of(scan_by_all_to_all)

        def errors() -> dict[str, float]:
            whole = edges_on_one()
            return {peer: relative_error(found, whole) for peer, found in edges.items()}

        check_agreement(name, over.first(errors), BOUNDS[dtype])

    def pieces_on_one(gradients: bool) -> int:
        """In how many one GPU takes the whole, one after the other."""
        return next(n for n in range(1, T + 1) if fits(-(-T // n), gradients))

    def on_one(gradients: bool) -> float:
        pieces = pieces_on_one(gradients)
        inputs = [t.requires_grad_(gradients) for t in inputs_of(-(-T // pieces), 0)]
        return pieces * over.alone(_step(linear_scan, inputs, gradients))

    def of_ranks(gradients: bool) -> tuple[dict[str, float], Watched]:
        inputs = [t.requires_grad_(gradients) for t in inputs_of(wd.slice_sizes(T, over.size)[over.rank], over.rank)]
        group = StandIn(over.size // 2, over.size)
        try:
            candidates = {
                "ranks": _step(wd.linear_scan, inputs, gradients),
                "slice": _step(linear_scan, inputs, gradients),
                "part": _step(lambda A, b: wd.linear_scan(A, b, group=group), inputs, gradients),
            }
            if exchanges_channels(gradients):
                candidates["all_to_all"] = _step(scan_by_all_to_all, inputs, gradients)
            return over.measure(candidates), _watch(over, candidates["ranks"])
        finally:
            group.close()

    def run(results: Results) -> Rows:
        agree()
        rows: Rows = []
        for gradients in (False, True):
            if not fits(T // over.size, gradients):
                continue
            over.free()
            times, watched = of_ranks(gradients)
            over.free()
            times["one_rank"] = over.first(lambda g=gradients: on_one(g))
            pieces = pieces_on_one(gradients)
            case = name if pieces == 1 else f"{name} pieces_on_one={pieces}"
            rows += _compare(over, results, case, "forward_backward" if gradients else "forward", times, watched)
            if not gradients:
                sent = sum(watched.sent) * (over.size - 1)
                others = {"floor": 4 * B * H * (matrix + 1) * (over.size - 1)}
                if diagonal:  # A, b and x, but for the share that stays
                    numbers = 3 * B * H * (T // over.size) * (over.size - 1) // over.size
                    others["all_to_all"] = DTYPES[dtype].itemsize * numbers
                rows += [results.put(name, "sent_to_ranks", "bytes", sent, peer, b) for peer, b in others.items()]
        return rows

    return Entry(name, ("forward", "forward_backward"), run)


def _watch(over: Together, run: Run) -> Watched:
    """The median of a few."""
    found = []
    for _ in range(5):
        dist.barrier()
        over.wait()
        watched = Watched(over)
        with watched.watching():
            run()
        found.append(watched)
    return sorted(found, key=lambda watched: watched.milliseconds)[len(found) // 2]


def layer_entry(over: Together, cell: str, H: int, B: int, T: int) -> Entry:
    """A layer whose ranks walk in rounds: forward, and the backward pass."""
    name = over.name(cell=cell.lower(), dtype="fp32", H=H, B=B, T=T)

    def input_of(steps: int, seed: int) -> Tensor:
        source = torch.Generator(over.device).manual_seed(seed)
        return torch.randn(steps, B, H, generator=source, device=over.device)

    def candidates(layer: nn.Module, x: Tensor) -> dict[str, Run]:
        output = layer(x)[0]
        grad = torch.ones_like(output)

        def backward() -> None:
            layer.zero_grad()
            output.backward(grad, retain_graph=True)

        return {"forward": lambda: layer(x), "backward": backward}

    def run(results: Results) -> Rows:
        torch.manual_seed(0)  # the same layer on every rank
        alone = getattr(weft.nn, cell)(H, H, device=over.device)
        sizes = wd.slice_sizes(T, over.size)
        x = input_of(sizes[over.rank], over.rank)
        group = StandIn(over.size // 2, over.size)
        of_ranks = {
            "ranks": candidates(sharded := wd.shard_time(copy.deepcopy(alone)), x),
            "slice": candidates(copy.deepcopy(alone), x),
            "part": candidates(wd.shard_time(copy.deepcopy(alone), group), x),
        }
        of_ranks["ranks"]["backward"]()
        for p in sharded.parameters():
            dist.all_reduce(p.grad)

        def whole() -> tuple[dict[str, float], float]:
            runs = candidates(alone, torch.cat([input_of(size, rank) for rank, size in enumerate(sizes)]))
            runs["backward"]()
            pairs = zip(sharded.parameters(), alone.parameters(), strict=True)
            error = max(relative_error(p.grad, q.grad) for p, q in pairs)
            return {metric: over.alone(step) for metric, step in runs.items()}, error

        rows: Rows = []
        try:
            took, error = over.first(whole)
            check_agreement(name, {"gradients": error}, 1e-3)
            for metric in ("backward", "forward"):
                steps = {kind: runs[metric] for kind, runs in of_ranks.items()}
                times = over.measure(steps) | {"one_rank": took[metric]}
                rows += _compare(over, results, name, metric, times, _watch(over, steps["ranks"]))
        finally:
            group.close()
        return rows

    return Entry(name, ("backward", "forward"), run)


class _Stack(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(weft.nn.MinGRU(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))[0]
        return x


def stack_entry(over: Together, width: int, layers: int, B: int, T: int) -> Entry:
    """A training step of a stack of minGRUs, the sum of gradients over ranks in it."""
    name = over.name(model="mingru_stack", dtype="fp32", H=width, B=B, T=T, layers=layers)

    def step_of(model: nn.Module, x: Tensor, ranks: int) -> Run:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def step() -> float:
            optimizer.zero_grad()
            loss = model(x).square().sum() / (T * B)
            loss.backward()
            if ranks > 1:
                grads = torch.cat([p.grad.flatten() for p in model.parameters()])
                dist.all_reduce(grads)
                for p, g in zip(model.parameters(), grads.split([p.numel() for p in model.parameters()]), strict=True):
                    p.grad.copy_(g.view_as(p))
            optimizer.step()
            return loss.detach()

        return step

    def input_of(steps: int, seed: int) -> Tensor:
        source = torch.Generator(over.device).manual_seed(seed)
        return torch.randn(steps, B, width, generator=source, device=over.device)

    def run(results: Results) -> Rows:
        torch.manual_seed(0)
        alone = _Stack(width, layers).to(over.device)
        sizes = wd.slice_sizes(T, over.size)
        x = input_of(sizes[over.rank], over.rank)
        group = StandIn(over.size // 2, over.size)
        steps = {
            "ranks": step_of(wd.shard_time(copy.deepcopy(alone)), x, over.size),
            "slice": step_of(copy.deepcopy(alone), x, 1),
            "part": step_of(wd.shard_time(copy.deepcopy(alone), group), x, 1),
        }

        def losses(step: Run) -> list[float]:
            return [float(step()) for _ in range(3)]

        mine = torch.tensor(losses(steps["ranks"]), dtype=torch.float64, device=over.device)
        dist.all_reduce(mine)

        def whole() -> tuple[float, float]:
            step = step_of(alone, torch.cat([input_of(size, rank) for rank, size in enumerate(sizes)]), 1)
            error = relative_error(mine.cpu(), torch.tensor(losses(step)))
            return over.alone(step), error

        try:
            times = over.measure(steps)
            watched = _watch(over, steps["ranks"])
            del steps
            took, error = over.first(whole)
            check_agreement(name, {"losses": error}, 1e-3)
            return _compare(over, results, name, "step", times | {"one_rank": took}, watched)
        finally:
            group.close()

    return Entry(name, ("step",), run)


def example_entry(over: Together, length: int, width: int) -> Entry:
    """The training of examples/long_context.py."""
    name = over.name(model="long_context", dtype="fp32", H=width, B=1, T=length, layers=2)

    def run(results: Results) -> Rows:
        sys.path.insert(0, str(ROOT / "examples"))
        try:
            train = runpy.run_path(str(ROOT / "examples" / "long_context.py"))["train"]
        finally:
            sys.path.pop(0)
        options = argparse.Namespace(length=length, width=width, layers=2, steps=8)
        losses, seconds = train(options, over.device)
        seconds = over.largest(seconds)
        over.free()
        one = dist.new_group([0])
        alone, took = over.first(lambda: train(options, over.device, one))
        check_agreement(name, {"losses": relative_error(torch.tensor(losses), torch.tensor(alone))}, 1e-2)
        return [results.put(name, "step", "ms", 1e3 * seconds, "one_rank", 1e3 * took)]

    return Entry(name, ("step",), run)


def offload_entry(over: Together, width: int, B: int, layers: int, budget: int) -> Entry:
    """Offload beside FSDP2: all ranks share the host's memory and buses."""
    name = over.name(model="fsdp2", dtype="fp32", H=width, B=B, layers=layers, budget=f"{budget / 1e6:g}MB")

    def run(results: Results) -> Rows:
        from torch.distributed.fsdp import fully_shard

        def model_of(sharded: bool) -> nn.Module:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
            model.to(over.device)
            if sharded:
                mesh = dist.init_device_mesh(over.device.type, (over.size,))
                for part in (*model, model):
                    fully_shard(part, mesh=mesh)
            return model

        x = torch.randn(B, width, generator=torch.Generator().manual_seed(over.rank)).to(over.device)
        backend = "copy" if over.device.type == "cuda" else "reference"

        def tried(model: nn.Module) -> tuple[dict[str, Run], Callable[[], dict[str, Any]], Callable[[], float]]:
            off = weft.offload(budget, backend=backend, min_bytes=1 << 12)

            def plain() -> None:
                model.zero_grad()
                model(x).square().mean().backward()

            def moving() -> None:
                model.zero_grad()
                with off:
                    loss = model(x).square().mean()
                loss.backward()

            def error() -> float:
                plain()
                want = [p.grad.to_local().clone() for p in model.parameters()]
                for _ in range(4):
                    moving()
                    if not all(map(torch.equal, want, (p.grad.to_local() for p in model.parameters()))):
                        return math.inf
                return 0.0

            return {"ranks": moving, "plain": plain}, lambda: off.report().to_dict(), error

        steps, report, error = tried(model_of(True))
        check_agreement(name, {"gradients": over.largest(error())}, 0.0)
        times = over.measure(steps)
        steps["ranks"]()
        over.wait()  # for the copies, whose rates are then known
        numbers = report()
        told: list[Any] = [None] * over.size
        dist.all_gather_object(told, numbers)
        del steps, error
        over.free()

        def by_itself() -> dict[str, Any]:
            """The other ranks' buses are idle."""
            steps, report, _ = tried(model_of(False))
            for _ in range(8):
                steps["ranks"]()
            over.wait()
            return report()

        alone = over.first(by_itself)
        rows = [results.put(name, "step", "ms", times["ranks"], "plain", times["plain"])]
        for rank, found in enumerate(told):
            if not found["budget_met"] or found["moved_bytes"] == 0:
                moved, held = found["moved_bytes"], found["peak_bytes"]
                raise RuntimeError(f"{name}: rank {rank} moved {moved} bytes and held {held}")
            case = f"{name} rank={rank}"
            rows.append(results.put(case, "saved_peak", "bytes", found["peak_bytes"], "budget", budget))
            for way in ("d2h", "h2d"):
                both, one = (n[f"{way}_bytes_per_second"] for n in (found, alone))
                if both and one:
                    rows.append(results.put(case, f"gigabyte_{way}", "ms", 1e12 / both, "alone", 1e12 / one))
        return rows

    return Entry(name, ("step", "saved_peak", "gigabyte"), run)


def package_entry(over: Together, T: int, heads: int, width: int, beside: str) -> Entry:
    """flash-linear-attention's context parallelism, of the gated delta rule, whose state is a matrix: what ranks cost,
    as the time of all of them together over that of one, beside the same of the scan `beside`."""
    name = over.name(package="flash-linear-attention", dtype="bf16", H=width, B=1, T=T, heads=heads)

    def run(results: Results) -> Rows:
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        def inputs_of(rank: int) -> list[Tensor]:
            source = torch.Generator(over.device).manual_seed(rank)
            make = {"generator": source, "device": over.device}
            q, k, v = (
                torch.randn(1, T // over.size, heads, width, dtype=torch.bfloat16, **make).requires_grad_()
                for _ in range(3)
            )
            g, beta = (torch.rand(1, T // over.size, heads, **make) for _ in range(2))
            return [q, k, v, -0.2 * g, beta.bfloat16()]

        def attend(*inputs: Tensor, **how: Any) -> Tensor:
            return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, **how)[0]

        context = build_cp_context(torch.tensor([0, T], device=over.device), dist.group.WORLD)
        mine = inputs_of(over.rank)
        steps = {
            gradients: _step(lambda *t: attend(*t, cp_context=context), mine, gradients) for gradients in (False, True)
        }
        with torch.no_grad():
            ends = torch.empty(over.size, heads, width, device=over.device, dtype=torch.bfloat16)
            dist.all_gather_into_tensor(ends, attend(*mine, cp_context=context)[:, -1])
        times = {gradients: over.measure({"ranks": step})["ranks"] for gradients, step in steps.items()}

        def alone() -> tuple[float, dict[bool, float]]:
            parts = zip(*(inputs_of(rank) for rank in range(over.size)), strict=True)
            whole = [torch.cat([t.detach() for t in part], 1) for part in parts]
            for t in whole[:3]:
                t.requires_grad_()
            with torch.no_grad():
                last = attend(*whole)[0].unflatten(0, (over.size, -1))[:, -1]
            took = {gradients: over.alone(_step(attend, whole, gradients)) for gradients in steps}
            return relative_error(ends, last), took

        error, took = over.first(alone)
        check_agreement(name, {"output": error}, BOUNDS["bf16"])
        rows: Rows = []
        for gradients, metric in ((False, "forward"), (True, "forward_backward")):
            theirs = over.size * times[gradients] / took[gradients]
            print(f"{name} {metric}: {times[gradients]:.4g} ms over ranks, {took[gradients]:.4g} ms on one", flush=True)
            for row in [*results.rows.values()]:
                if (row["case"], row["metric"], row["peer"]) == (beside, metric, "one_rank"):
                    ours = over.size * float(row["weft"]) / float(row["peer_value"])
                    peer = "flash-linear-attention"
                    rows.append(results.put(beside, f"{metric}_of_all_over_one", "relative", ours, peer, theirs))
        return rows

    return Entry(name, ("of_all_over_one",), run)


def entries(over: Together) -> list[Entry]:
    """The most important ones first."""
    if over.device.type == "cpu":
        return [
            scan_entry(over, "diagonal", "fp32", 64, 2, 4096),
            scan_entry(over, "diagonal", "bf16", 64, 2, 1024),
            scan_entry(over, "dense", "fp32", 8, 2, 2048),
            *(layer_entry(over, cell, 8, 2, 600) for cell in ("RNN", "GRU", "LSTM")),
            stack_entry(over, 32, 2, 2, 1024),
            example_entry(over, 4000, 8),
            offload_entry(over, 64, 256, 4, 100_000),
        ]
    lengths = [1 << k for k in (20, 19, 18, 17, 16)]
    fitting = {
        dtype: [T for T in lengths if 3.2 * DTYPES[dtype].itemsize * T / over.size * 8 * 1536 <= over.room]
        for dtype in ("fp32", "bf16")
    }

    def diagonal(dtype: str, T: int) -> Entry:
        return scan_entry(over, "diagonal", dtype, 1536, 8, T)

    longest = fitting["fp32"][0]
    return [
        diagonal("fp32", longest),
        scan_entry(over, "dense", "fp32", 20, 16, 1_000_000),
        *(layer_entry(over, cell, 20, 16, 30_000) for cell in ("RNN", "GRU", "LSTM")),
        scan_entry(over, "dense", "fp32", 20, 16, 30_000),
        example_entry(over, 1_000_000, 32),
        stack_entry(over, 512, 4, 8, 1 << 16),
        *(diagonal("fp32", T) for T in (1 << 18, 1 << 16) if T < longest),
        *(diagonal("bf16", T) for T in (fitting["bf16"][0], 1 << 16)),
        *_packages(over),
        offload_entry(over, 2048, 1 << 15, 8, 1_000_000_000),
        *(diagonal("fp32", T) for T in fitting["fp32"] if T not in (longest, 1 << 18, 1 << 16)),
        *(layer_entry(over, cell, 20, 16, 240_000) for cell in ("RNN", "GRU", "LSTM")),
        scan_entry(over, "dense", "fp32", 20, 16, 240_000),
        example_entry(over, 1_000_000, 256),
    ]


def _packages(over: Together) -> list[Entry]:
    if importlib.util.find_spec("fla") is None:
        if over.rank == 0:
            print("flash-linear-attention is not here: not run", flush=True)
        return []
    beside = over.name(op="linear_scan", dtype="fp32", layout="diagonal", H=1536, B=8, T=1 << 18)
    return [package_entry(over, 1 << 18, 16, 128, beside)]


def run_together(results: Results, text: str, seconds: float, minutes: float) -> list[str]:
    """The link, which is fitted first, and all entries with `text` in their name or metrics, into the first rank's
    results. What failed."""
    over = Together(seconds)
    deadline, failures = time.monotonic() + 60 * minutes, []
    if over.rank > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
        results.save = lambda: None
    try:
        times = time_gathers(over.device)
        over.link = fit_link(times, over.size)
        show(put_link(results, over.device.type, over.backend, over.size, times))
        results.save()
        for entry in entries(over):
            if not entry.matches(text):
                continue
            if over.largest(time.monotonic() > deadline):
                print("out of time: the others are left out", flush=True)
                break
            began = time.monotonic()
            failures += run_entries([entry], results)
            over.free()
            print(f"{time.monotonic() - began:.1f} s: {entry.name}", flush=True)
        return failures
    finally:
        dist.destroy_process_group()
