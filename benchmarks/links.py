"""What a link between ranks costs: all-gathers of many sizes, and the latency and bandwidth that say them best."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import weft.distributed as wd

from benchmarks.common import Results, case_name

BYTES = [1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000]
ROUNDS = 15
_BUSY = 2_000_000
"""Cycles of a GPU, about a millisecond, in which the host comes to the gather."""


def time_gathers(device: torch.device) -> dict[int, float]:
    """Seconds of an all-gather of so many bytes from each rank: the best round of the slowest rank, because what else a
    machine does is no part of its link. On GPUs those of the stream, which is still busy when the host comes to it, as
    behind a scan, of the rank that comes last and waits for no other."""
    found = {}
    for size in BYTES:
        sent = torch.zeros(size // 4, device=device)
        received = torch.empty(dist.get_world_size() * sent.numel(), device=device)
        times = []
        for _ in range(ROUNDS + 3):
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(_BUSY)
                begin.record()
                dist.all_gather_into_tensor(received, sent)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            else:
                began = time.perf_counter()
                dist.all_gather_into_tensor(received, sent)
                times.append(time.perf_counter() - began)
        if device.type == "cuda":
            of_rounds = torch.tensor(times[3:], dtype=torch.float64, device=device)
            dist.all_reduce(of_rounds, dist.ReduceOp.MIN)
            found[size] = of_rounds.median().item()
        else:
            slowest = torch.tensor(min(times[3:]), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[size] = slowest.item()
    return found


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
