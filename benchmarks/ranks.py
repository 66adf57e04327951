"""Scans over ranks: what a link between processes costs, and what one rank's part costs beside the same slice alone.

    python -m benchmarks.ranks                              both, here: 2 and 4 processes with gloo
    torchrun --nproc-per-node 8 -m benchmarks.ranks         these together (benchmarks.together), NCCL on GPUs

``link`` gathers 1 KB to 10 MB, fits the latency and bandwidth of :class:`weft.distributed.Link` to some of the sizes,
and puts what the model says beside the others. ``slice`` times a rank in the middle of a stand-in group, which answers
at once with totals made beforehand, so that one GPU is enough.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import weft
import weft.distributed as wd
from torch import Tensor
from weft._distributed.stand_in import StandIn

from benchmarks.common import (
    RESULTS,
    Candidate,
    Entry,
    Results,
    begin_table,
    case_name,
    exit_with,
    host_us,
    measure,
    run_entries,
    table_parser,
)  # fmt: skip
from benchmarks.links import SWEEPS, gathered_beyond, put_link, time_gathers
from benchmarks.together import run_together

RANKS = 8
PREDICTED_STEPS = 1 << 20
SHARES = {2: 131072, 64: 16384, 256: 4096, 1024: 1024}
"""Of other numbers of ranks, the steps of a slice of PREDICTED_STEPS, as far as one GPU can hold it."""


def _gloo_member(rank: int, ranks: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = time_gathers(torch.device("cpu"), 3 * SWEEPS)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""glibc gives blocks of more than 32 MB back to the system, and gloo, which asks for one at every exchange, gets other
pages each time: then most of the time is none of the link."""


def time_gloo(ranks: int) -> dict[int, float]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, KEEPS_MEMORY):
        members = [
            context.Process(target=_gloo_member, args=(rank, ranks, str(Path(folder) / "store"), answers))
            for rank in range(ranks)
        ]
        for member in members:
            member.start()
        found = answers.get(timeout=300)
        for member in members:
            member.join()
    return found


def link_entries() -> list[Entry]:
    def entry(ranks: int) -> Entry:
        name = case_name(op="all_gather", device="cpu", ranks=ranks, backend="gloo")
        return Entry(name, ("exchange",), lambda results: put_link(results, "cpu", "gloo", ranks, time_gloo(ranks)))

    return [entry(2), entry(4)]


SHORT_STEPS = 4096
"""Of a diagonal slice, up to which its device waits for its host."""
_ROUNDS, _SLEEP = 21, 4_000_000
"""Cycles of a GPU, some two milliseconds, in which the host gives it everything."""


def queued_ms(run: Callable[[Any], Any]) -> float:
    """Median milliseconds of the device alone, which is still busy when the host has given it all of a call."""
    times = []
    for turn in range(_ROUNDS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_SLEEP)
        begin.record()
        result = run(None)
        end.record()
        end.synchronize()
        del result
        if turn > 1:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _both(run: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[Any], Any]:
    def step(_: Any) -> None:
        for t in inputs:
            t.grad = None
        out = run(*inputs)
        out.backward(out.detach())

    return step


def slice_entry(device: str, layout: str, H: int, B: int, T: int, forgets: bool, ranks: int = RANKS) -> Entry:
    """A rank's part of a scan: the middle one of `ranks`."""
    keys = {"op": "linear_scan", "device": device, "dtype": "fp32", "layout": layout, "H": H, "B": B, "T": T}
    name = case_name(**keys, ranks=ranks, A="0.8" if forgets else "1")
    # Other lengths would write the same rows, of another prediction.
    predicts = layout == "diagonal" and forgets and device == "cuda" and T * ranks == PREDICTED_STEPS
    queues = device == "cuda" and T <= SHORT_STEPS
    metrics = ["forward", "forward_backward", "host_forward"]
    metrics += ["forward_queued", "forward_backward_queued"] if queues else []
    metrics += ["forward_of_many"] if predicts else []

    def run(results: Results) -> list[dict[str, str]]:
        shape = (T, B, H) if layout == "diagonal" else (T, B, H, H)
        A = torch.rand(shape, device=device)
        A = A * 0.2 + 0.8 if forgets else torch.ones_like(A)
        if layout == "dense":
            A = A / H
        inputs = [A.requires_grad_(), torch.randn(T, B, H, device=device, requires_grad=True)]
        group = StandIn(ranks // 2, ranks)
        rows = []
        try:
            over: Callable[..., Tensor] = lambda A, b: wd.linear_scan(A, b, group=group)  # noqa: E731
            with torch.no_grad():
                want = over(*inputs)
                # All ranks have this slice, so that the state that enters is the end of as many of it.
                start = torch.zeros(B, H, device=device)
                for _ in range(group.rank):
                    start = weft.scan.linear_scan(*inputs, start)[-1]
                error = (weft.scan.linear_scan(*inputs, start) - want).norm() / want.norm()
            assert error < 1e-4, f"{name}: off by {error:.1e}"

            def forward(run: Callable[..., Tensor]) -> Callable[[Any], Any]:
                @torch.no_grad()
                def call(_: Any) -> Tensor:
                    return run(*inputs)

                return call

            for metric, timed in (("forward", forward), ("forward_backward", lambda run: _both(run, inputs))):
                times = measure(
                    {"ranks": Candidate(timed(over)), "alone": Candidate(timed(weft.scan.linear_scan))}, device
                )
                rows.append(results.put(name, metric, "ms", times["ranks"], "one_rank", times["alone"]))
                if queues:
                    ours, alone = (queued_ms(timed(run)) for run in (over, weft.scan.linear_scan))
                    rows.append(results.put(name, f"{metric}_queued", "ms", ours, "one_rank", alone))
            if device == "cuda":
                ours, alone = (
                    host_us(functools.partial(forward(run), None), 50) for run in (over, weft.scan.linear_scan)
                )
                rows.append(results.put(name, "host_forward", "us", ours, "one_rank", alone))
        finally:
            group.close()
        if predicts:
            rows.append(predicted_row(results, rows[0], {**keys, "T": PREDICTED_STEPS}, ranks))
        return rows

    return Entry(name, tuple(metrics), run)


def predicted_row(results: Results, part: dict[str, str], keys: dict[str, Any], ranks: int) -> dict[str, str]:
    """What so many ranks are predicted to take for PREDICTED_STEPS, by the measured part of one of them, beside the
    work alone: the ratio is the efficiency."""
    alone, took = float(part["peer_value"]) / 1e3, float(part["weft"]) / 1e3
    sent = 8 * keys["B"] * keys["H"]
    fixup = max(took - alone, 0.0) + gathered_beyond(ranks, sent, wd.Link())
    said = wd.predict(alone * ranks, ranks, sent, fixup=fixup)
    name = case_name(**keys, ranks=ranks, A="0.8")
    return results.put(name, "forward_of_many", "ms", 1e3 * said.seconds, "work_alone", 1e3 * said.local)


def layer_entry(device: str, cell: str, inputs: int, H: int, B: int, T: int, metric: str) -> Entry:
    """A rank's part of a layer: its backward pass alone, or forward and backward."""
    name = case_name(cell=cell.lower(), device=device, dtype="fp32", H=H, B=B, T=T, ranks=RANKS)
    queues = device == "cuda" and metric == "backward"

    def run(results: Results) -> list[dict[str, str]]:
        group = StandIn(RANKS // 2, RANKS)
        alone = getattr(weft.nn, cell)(inputs, H, device=device)
        x = torch.randn(T, B, inputs, device=device)

        def timed(layer: torch.nn.Module) -> Callable[[Any], Any]:
            def forward_backward(_: Any) -> None:
                layer.zero_grad()
                layer(x)[0].sum().backward()

            if metric == "forward_backward":
                return forward_backward
            output = layer(x)[0]
            grad = torch.randn_like(output)

            def backward(_: Any) -> None:
                layer.zero_grad()
                output.backward(grad, retain_graph=True)

            return backward

        try:
            sharded = wd.shard_time(copy.deepcopy(alone), group)
            times = measure({"ranks": Candidate(timed(sharded)), "alone": Candidate(timed(alone))}, device)
            rows = [results.put(name, metric, "ms", times["ranks"], "one_rank", times["alone"])]
            if queues:
                ours, one = (queued_ms(timed(layer)) for layer in (sharded, alone))
                rows.append(results.put(name, f"{metric}_queued", "ms", ours, "one_rank", one))
            return rows
        finally:
            group.close()

    return Entry(name, (metric, f"{metric}_queued") if queues else (metric,), run)


def slice_entries(device: str) -> list[Entry]:
    if device == "cpu":
        return [
            slice_entry(device, "diagonal", 256, 2, 4096, True),
            slice_entry(device, "dense", 8, 2, 2048, True),
            layer_entry(device, "MinGRU", 16, 32, 2, 512, "forward_backward"),
            layer_entry(device, "GRU", 16, 8, 2, 512, "backward"),
        ]
    return [
        slice_entry(device, "diagonal", 1536, 8, 2048, True),
        slice_entry(device, "diagonal", 1536, 8, 131072, True),
        slice_entry(device, "diagonal", 1536, 8, 131072, False),
        *(slice_entry(device, "diagonal", 1536, 8, T, True, ranks) for ranks, T in SHARES.items()),
        slice_entry(device, "dense", 20, 16, 30000, True),
        *(layer_entry(device, cell, 20, 20, 16, 30000, "backward") for cell in ("RNN", "GRU", "LSTM")),
        layer_entry(device, "MinGRU", 512, 1536, 8, 16384, "forward_backward"),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = table_parser("ranks", __doc__, filters="`link`, `slice`, or a substring of a case or metric")
    options = parser.parse_args(arguments)
    devices = begin_table(options)
    results = Results(options.output or RESULTS / "ranks.csv")
    if "RANK" in os.environ:
        return exit_with(run_together(results, options.filter, options.seconds, options.minutes))
    slices = [entry for device in devices for entry in slice_entries(device)]
    parts = {"link": link_entries(), "slice": slices}
    chosen = parts.get(options.filter) or [
        e for entries in parts.values() for e in entries if e.matches(options.filter)
    ]
    exit_with(run_entries(chosen, results, minutes=options.minutes))


if __name__ == "__main__":
    main()
