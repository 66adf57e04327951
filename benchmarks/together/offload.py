"""Offload beside FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import weft
from torch import nn

from benchmarks.common import Entry, Results, check_agreement
from benchmarks.together.common import Rows, Run, Together


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
