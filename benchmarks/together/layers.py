"""Layers that walk in rounds over ranks."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import weft
import weft.distributed as wd
from torch import Tensor, nn
from weft._distributed.stand_in import StandIn

from benchmarks.common import Entry, Results, check_agreement, relative_error
from benchmarks.together.common import Rows, Run, Together, compare, watch


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
                times = over.measure(steps) | {"one_rank": took[metric], "host": over.host(steps["part"])}
                rows += compare(over, results, name, metric, times, watch(over, steps["ranks"]))
        finally:
            group.close()
        return rows

    return Entry(name, ("backward", "forward"), run)
