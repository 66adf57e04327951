"""Layers over ranks: those that walk in rounds, and the two directions of one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import weft
import weft.distributed as wd
from torch import Tensor, nn
from weft._distributed import exchanging, scan
from weft._distributed.exchanging import Exchanging
from weft._distributed.group import Ranks
from weft._distributed.stand_in import StandIn

from benchmarks.common import Entry, Results, check_agreement, relative_error
from benchmarks.together.common import Rows, Run, Together, compare, measure_part, watch


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
                times = measure_part(over, steps) | {"one_rank": took[metric]}
                rows += compare(over, results, name, metric, times, watch(over, steps["ranks"]))
        finally:
            group.close()
        return rows

    return Entry(name, ("backward", "forward"), run)


def one_after_the_other(ranks: Ranks, calls: Sequence[Exchanging[Any]]) -> list[Any]:
    """In the place of weft's run_together: nothing is done while an exchange is on its way."""
    return [exchanging.run(ranks, call) for call in calls]


def directions_entry(over: Together, H: int, B: int, T: int) -> Entry:
    """A bidirectional layer: what it waits for exchanges while its other direction goes on, and where it does not."""
    name = over.name(cell="mingru", dtype="fp32", H=H, B=B, T=T, directions=2)

    def run(results: Results) -> Rows:
        torch.manual_seed(0)
        layer = wd.shard_time(weft.nn.MinGRU(H, H, bidirectional=True, device=over.device))
        x = torch.randn(wd.slice_sizes(T, over.size)[over.rank], B, H, device=over.device)

        def step() -> Tensor:
            layer.zero_grad()
            output = layer(x)[0]
            output.backward(torch.ones_like(output))
            return output.detach()

        def apart() -> Tensor:
            together, scan.run_together = scan.run_together, one_after_the_other
            try:
                return step()
            finally:
                scan.run_together = together

        steps = {"ranks": step, "one_after_the_other": apart}
        check_agreement(name, {"output": relative_error(step(), apart())}, 0.0)
        times, waited = over.measure(steps), {who: watch(over, run).waited for who, run in steps.items()}
        return [
            results.put(name, metric, "ms", took["ranks"], "one_after_the_other", took["one_after_the_other"])
            for metric, took in (("forward_backward", times), ("forward_backward_waits", waited))
        ]

    return Entry(name, ("forward_backward", "forward_backward_waits"), run)
