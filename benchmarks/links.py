"""What a link between ranks costs: all-gathers of many sizes, and the latency and bandwidth that say those of about one
size best, because backends send small and large messages in other ways."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
import weft.distributed as wd
from weft._distributed import rounds

from benchmarks.common import Results, case_name

FITTED = [500, *(round(size * 10**k) for k in range(3, 7) for size in (1, 2, 5)), 10_000_000, 20_000_000]
"""Bytes of the gathers that a link is fitted to."""
CHECKED = [round(size * 10**k) for k in range(3, 7) for size in (1.4, 3.2, 7.2)]
"""Those that it is held against, which no fit has seen."""
_NEAR = math.log(2)
"""How far sizes say something of each other: beyond a factor of 2, and its square, less and less. Backends change their
way within a factor of 5."""
SWEEPS, REPEATS, REPEATED = 20, 10, 1_000_000
"""Sweeps over all sizes, so that what else a machine does meets all alike, and how often a sweep repeats a size: as
often as REPEATED bytes have room for it, at most REPEATS times."""
QUIET = 0.2
"""Of a processor's rounds, those that nothing else met. The best alone would be one that found everything in caches."""
_BUSY = 2_000_000
"""Cycles of a GPU, about a millisecond, in which the host comes to the gather."""


def time_gathers(device: torch.device, sweeps: int = SWEEPS) -> dict[int, float]:
    """Seconds of an all-gather of so many bytes from each rank, of which the slowest rank's count: one of the best of
    all rounds, because what else a machine does is no part of its link. On GPUs the median of those of the stream,
    which is still busy when the host comes to it, as behind a scan, of the rank that comes last and waits for no
    other."""
    on_gpu = device.type == "cuda"
    ranks = dist.get_world_size()
    sizes = sorted([*FITTED, *CHECKED])
    buffers = {size: (torch.zeros(size // 4, device=device), torch.empty(ranks * (size // 4), device=device))
               for size in sizes}  # fmt: skip
    once = _once_on_gpu if on_gpu else _once
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for sweep in range(sweeps + 1):
        for size, (sent, received) in buffers.items():
            for _ in range(min(max(REPEATED // size, 1), REPEATS)):
                dist.barrier()
                took = once(sent, received)
                if sweep > 0:
                    times[size].append(took)
    found = {}
    for size, of_rounds in times.items():
        of_ranks = torch.tensor(of_rounds, dtype=torch.float64, device=device)
        dist.all_reduce(of_ranks, dist.ReduceOp.MIN if on_gpu else dist.ReduceOp.MAX)
        found[size] = (of_ranks.median() if on_gpu else of_ranks.quantile(QUIET)).item()
    return found


def _once(sent: torch.Tensor, received: torch.Tensor) -> float:
    began = time.perf_counter()
    dist.all_gather_into_tensor(received, sent)
    return time.perf_counter() - began


def _once_on_gpu(sent: torch.Tensor, received: torch.Tensor) -> float:
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_BUSY)
    begin.record()
    dist.all_gather_into_tensor(received, sent)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def fit_link(times: dict[int, float], ranks: int, near: float) -> wd.Link:
    """The latency and bandwidth that say each time of FITTED best, in parts of itself, for messages of about so many
    bytes."""
    times = {size: times[size] for size in FITTED}
    # t = latency + s * (ranks - 1) bytes, each row divided by its t.
    weights = {size: math.exp(-((math.log(size / max(near, 1)) / _NEAR) ** 2) / 4) for size in times}
    of_sizes = torch.tensor([weights[size] for size in times], dtype=torch.float64).unsqueeze(1)
    rows = torch.tensor([[1 / t, (ranks - 1) * size / t] for size, t in times.items()], dtype=torch.float64)

    def solved(columns: torch.Tensor) -> list[float]:
        return torch.linalg.lstsq(of_sizes * columns, of_sizes).solution.flatten().tolist()

    latency, slope = solved(rows)
    if latency < 0:  # all time goes with bytes
        latency, slope = 0.0, *solved(rows[:, 1:])
    elif slope <= 0:  # or none
        latency, slope = *solved(rows[:, :1]), 1e-15
    return wd.Link(latency, 1 / slope)


def gathered_beyond(ranks: int, bytes: int, link: wd.Link) -> float:
    """Seconds that a gather takes beyond the exchange that :func:`weft.distributed.exchange` finds the cheapest, where
    a scan gathers all the same, because rounds would keep its host."""
    if wd.exchange(ranks, bytes, rounds.link).method == "doubling":
        return 0.0
    return max(link.latency + (ranks - 1) * bytes / link.bandwidth - wd.exchange(ranks, bytes, link).seconds, 0.0)


def put_link(results: Results, device: str, backend: str, ranks: int, times: dict[int, float]) -> list[dict[str, str]]:
    for near in (1_000, 100_000, 10_000_000):
        link = fit_link(times, ranks, near)
        print(f"{backend}, {ranks} ranks, {near} bytes: Link(latency={link.latency:.3g}, "
              f"bandwidth={link.bandwidth:.3g})")  # fmt: skip
    rows = []
    for size in CHECKED:
        took, link = times[size], fit_link(times, ranks, size)
        said = link.latency + (ranks - 1) * size / link.bandwidth
        case = case_name(op="all_gather", device=device, ranks=ranks, backend=backend, bytes=size)
        rows.append(results.put(case, "exchange", "ms", 1e3 * took, "predicted", 1e3 * said))
    return rows
