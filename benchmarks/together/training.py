"""Training steps over ranks: a stack of minGRUs, and the example of a long context."""

from __future__ import annotations

import argparse
import copy
import runpy
import statistics
import sys

import torch
import torch.distributed as dist
import weft
import weft.distributed as wd
from torch import Tensor, nn
from weft._distributed.stand_in import StandIn

from benchmarks.common import ROOT, Entry, Results, check_agreement, relative_error
from benchmarks.together.common import Rows, Run, Together, compare, measure_part, watch

REPEATS = 3
"""Of the example's training."""


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
            times = measure_part(over, steps)
            watched = watch(over, steps["ranks"])
            del steps
            took, error = over.first(whole)
            check_agreement(name, {"losses": error}, 1e-3)
            return compare(over, results, name, "step", times | {"one_rank": took}, watched)
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
        options = argparse.Namespace(length=length, width=width, layers=2, steps=12)
        one = dist.new_group([0])
        of_ranks, of_one = [], []
        for _ in range(REPEATS):  # in turns: each is a few steps by the host's clock
            losses, seconds = train(options, over.device)
            of_ranks.append(over.largest(seconds))
            over.free()
            alone, seconds = over.first(lambda: train(options, over.device, one))
            of_one.append(seconds)
            check_agreement(name, {"losses": relative_error(torch.tensor(losses), torch.tensor(alone))}, 1e-2)
        seconds, took = statistics.median(of_ranks), statistics.median(of_one)
        told = (" ".join(f"{1e3 * took:.4g}" for took in times) for times in (of_ranks, of_one))
        print(f"{name}: {' and '.join(told)} ms of one", flush=True)
        return [results.put(name, "step", "ms", 1e3 * seconds, "one_rank", 1e3 * took)]

    return Entry(name, ("step",), run)
