"""What several GPUs of one host give, each a rank: ``torchrun --nproc-per-node 2 -m benchmarks.ranks``.

Beside each case over all ranks stand, in the same run, the same sequence on one GPU (in pieces where it does not fit),
a rank's slice alone (weak scaling is its time over that of all), trading time for channels by all-to-all, and what
:func:`weft.distributed.predict` said with the link that was fitted to these ranks. A time is the slowest rank's; what
ranks tell each other is counted, and timed within the step by events. With gloo on the CPU the shapes are small.
"""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from benchmarks.common import DTYPES, Entry, Results, run_entries, show
from benchmarks.links import put_link, time_gathers
from benchmarks.together.common import Together
from benchmarks.together.layers import directions_entry, layer_entry
from benchmarks.together.offload import offload_entry
from benchmarks.together.packages import package_entries
from benchmarks.together.scans import scan_entry
from benchmarks.together.training import example_entry, stack_entry

PACKAGES = "flash-linear"
WEAK = {"linear_scan diagonal": 1 << 17, "linear_scan dense": 250_000, "mingru_stack": 1 << 14}
"""Steps of a slice by which weak scaling is drawn."""


def entries(over: Together) -> list[Entry]:
    """Those first that say most in little time."""
    if over.device.type == "cpu":
        return [
            scan_entry(over, "diagonal", "fp32", 64, 2, 4096),
            scan_entry(over, "diagonal", "bf16", 64, 2, 1024),
            scan_entry(over, "dense", "fp32", 8, 2, 2048),
            *(layer_entry(over, cell, 8, 2, 600) for cell in ("RNN", "GRU", "LSTM")),
            directions_entry(over, 16, 2, 1024),
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
    found = [
        *short_entries(over),
        directions_entry(over, 512, 8, 1 << 16),
        *(diagonal(dtype, 1 << 16) for dtype in ("fp32", "bf16")),
        example_entry(over, 1_000_000, 32),
        offload_entry(over, 2048, 1 << 15, 8, 1_000_000_000),
        diagonal("fp32", longest),
        stack_entry(over, 512, 4, 8, 1 << 16),
        scan_entry(over, "dense", "fp32", 20, 16, 1_000_000),
        *weak_entries(over),
        diagonal("fp32", 1 << 18),
        diagonal("bf16", fitting["bf16"][0]),
        *(diagonal("fp32", T) for T in fitting["fp32"]),
        example_entry(over, 1_000_000, 256),
    ]
    return [*{entry.name: entry for entry in found}.values()]


def short_entries(over: Together) -> list[Entry]:
    """Those whose devices wait for their hosts, and the same of eight times as many steps."""
    return [
        entry
        for T in (30_000, 240_000)
        for entry in (
            *(layer_entry(over, cell, 20, 16, T) for cell in ("RNN", "GRU", "LSTM")),
            scan_entry(over, "dense", "fp32", 20, 16, T),
        )
    ]


def weak_entries(over: Together) -> list[Entry]:
    """Slices of the same length on any number of GPUs."""
    return [
        scan_entry(over, "diagonal", "fp32", 1536, 8, WEAK["linear_scan diagonal"] * over.size),
        scan_entry(over, "dense", "fp32", 20, 16, WEAK["linear_scan dense"] * over.size),
        stack_entry(over, 512, 4, 8, WEAK["mingru_stack"] * over.size),
    ]


def run_together(results: Results, text: str, seconds: float, minutes: float) -> list[str]:
    """The link, which is fitted first, and all entries with `text` in their name or metrics, into the first rank's
    results. What failed."""
    over = Together(seconds)
    deadline, failures = time.monotonic() + 60 * minutes, []
    if over.rank > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
        results.save = lambda: None
    try:
        over.gathers = time_gathers(over.device)
        show(put_link(results, over.device.type, over.backend, over.size, over.gathers))
        results.save()
        # Those of packages, whose kernels compile for long, alone where they are asked for.
        packages = package_entries(over) if text == PACKAGES else []
        for entry in packages or entries(over):
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
