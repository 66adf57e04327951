"""What a link between ranks costs: all-gathers of many sizes, and the latency and bandwidth that say them best."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import weft.distributed as wd

from benchmarks.common import Results, case_name

BYTES = [1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000]
SWEEPS, REPEATS, REPEATED = 20, 10, 1_000_000
"""Sweeps over all sizes, so that what else a machine does meets all alike, and how often a sweep repeats a size: as
often as REPEATED bytes have room for it, at most REPEATS times."""
_BUSY = 2_000_000
"""Cycles of a GPU, about a millisecond, in which the host comes to the gather."""


def time_gathers(device: torch.device) -> dict[int, float]:
    """Seconds of an all-gather of so many bytes from each rank, of which the slowest rank's count: the best of all
    rounds, because what else a machine does is no part of its link. On GPUs the median of those of the stream, which is
    still busy when the host comes to it, as behind a scan, of the rank that comes last and waits for no other."""
    on_gpu = device.type == "cuda"
    ranks = dist.get_world_size()
    buffers = {size: (torch.zeros(size // 4, device=device), torch.empty(ranks * (size // 4), device=device))
               for size in BYTES}  # fmt: skip
    once = _once_on_gpu if on_gpu else _once
    times: dict[int, list[float]] = {size: [] for size in BYTES}
    for sweep in range(SWEEPS + 1):
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
        found[size] = (of_ranks.median() if on_gpu else of_ranks.min()).item()
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


def fit_link(times: dict[int, float], ranks: int) -> wd.Link:
    """The latency and bandwidth that say each time best, in parts of itself."""
    # t = latency + s * (ranks - 1) bytes, each row divided by its t.
    rows = torch.tensor([[1 / t, (ranks - 1) * size / t] for size, t in times.items()], dtype=torch.float64)
    latency, slope = (
        torch.linalg.lstsq(rows, torch.ones(len(times), 1, dtype=torch.float64)).solution.flatten().tolist()
    )
    return wd.Link(max(latency, 0.0), 1 / slope)


def put_link(results: Results, device: str, backend: str, ranks: int, times: dict[int, float]) -> list[dict[str, str]]:
    link = fit_link(times, ranks)
    print(f"{backend}, {ranks} ranks: Link(latency={link.latency:.3g}, bandwidth={link.bandwidth:.3g})")
    rows = []
    for size, took in times.items():
        others = fit_link({s: t for s, t in times.items() if s != size}, ranks)
        said = others.latency + (ranks - 1) * size / others.bandwidth
        case = case_name(op="all_gather", device=device, ranks=ranks, backend=backend, bytes=size)
        rows.append(results.put(case, "exchange", "ms", 1e3 * took, "predicted", 1e3 * said))
    return rows
