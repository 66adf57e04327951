"""Sparse Jacobians, planned products and chains against cuSPARSE, scipy, autograd and the bandwidth of the memory.

``python -m benchmarks.sparse [FILTER]`` measures the table into results/sparse.csv, what matters most first. FILTER is
a substring of the case or the metric. cuSPARSE, torch.sparse and scipy compute one product per sample, as they have no
batch of values on one pattern. ``python -m benchmarks.sparse fit`` measures the constants by which "auto" and
plan_chain expect times, and prints them; with --output, a GPU's into a file for python/weft/costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.common import RESULTS, Entry, Results, begin_table, exit_with, run_entries, table_parser
from benchmarks.sparse_chains import chain_entry, net_entry, pass_entries, tree_entry
from benchmarks.sparse_costs import fit, write_costs
from benchmarks.sparse_nets import BATCHES, PRUNED_NETS, blocks, vgg11
from benchmarks.sparse_products import (
    generator_entry,
    levels_entry,
    pairs,
    product_entry,
    too_large_entry,
    vector_entry,
)


def table(device: str) -> Iterator[Entry]:
    def pruned_vgg11(B: int) -> Callable[[], tuple[list[nn.Module], Tensor]]:
        return lambda: (vgg11(device, 0.03), torch.randn(B, 3, 32, 32, device=device))

    for layer in ("conv", "relu", "max_pool"):
        yield generator_entry(device, layer)
    for pair in pairs(device, 1):
        for B in BATCHES:
            yield product_entry(device, pair, B)
    if device == "cuda":
        for net in PRUNED_NETS:
            for B in BATCHES:
                yield levels_entry(device, net, B)
    yield from pass_entries(device)
    for B in BATCHES:
        yield chain_entry(device, "vgg11_pruned", B, pruned_vgg11(B), True)
    for layer in ("relu", "max_pool"):
        yield generator_entry(device, layer, 16)
    for layer in ("gelu", "avg_pool", "linear"):
        yield generator_entry(device, layer)
    for layer in ("conv", "max_pool"):
        yield vector_entry(device, layer, 16)
    yield tree_entry(device)
    for count in (256, 8, 16, 32, 64, 128) if device == "cuda" else (8,):
        schedules = ("auto", "linear", 1, 2) if count <= 64 else ("auto", "linear", 1)
        yield chain_entry(device, f"blocks{count}", 1, lambda n=count: blocks(n, device), False, schedules)
    # A CPU takes seconds for the whole net.
    width = 1.0 if device == "cuda" else 0.25
    for density in (0.03, 0.01, 0.1, 0.3, 1.0):
        for B in BATCHES:
            yield net_entry(device, density, B, width)
    yield too_large_entry(device)


def main(arguments: list[str] | None = None) -> None:
    parser = table_parser("sparse", __doc__, filters="substring of case or metric, or fit, whose --output is JSON")
    options = parser.parse_args(arguments)
    torch.backends.cudnn.allow_tf32 = False
    devices = begin_table(options)
    if options.filter == "fit":
        for device in devices:
            if device == "cuda" and options.output:
                write_costs(options.output)
            else:
                fit(device)
        return
    results = Results(options.output or RESULTS / "sparse.csv")
    failures: list[str] = []
    for device in devices:
        entries = [entry for entry in table(device) if entry.matches(options.filter)]
        failures += run_entries(entries, results, minutes=options.minutes, patience=120)
    exit_with(failures)


if __name__ == "__main__":
    main()
