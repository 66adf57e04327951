"""Sparse Jacobians, planned products and chains against cuSPARSE, scipy, autograd and the bandwidth of the memory.

``python -m benchmarks.sparse [FILTER]`` measures the table into results/sparse.csv. FILTER is a substring of the case
or the metric. cuSPARSE runs through torch.sparse, one product per sample, as it has no batch of values on one pattern;
torch does not call SpGEMMreuse.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weft.scan import ScanSequential, chain_backward
from weft.sparse import BatchedCSR, conv2d_jacobian, max_pool2d_jacobian, plan_matmul, relu_jacobian
from weft.sparse import transposed_jacobian as jacobian_of

from benchmarks.common import (
    CPU_THREADS,
    RESULTS,
    Candidate,
    Entry,
    Results,
    case_name,
    check_agreement,
    copy_bandwidth,
    exit_with,
    measure,
    relative_error,
    run_entries,
)

BATCHES = (1, 16)
LAYERS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
CPU_BANDWIDTH = 10e9  # bytes a second, for a floor that no copy of this size is below


def vgg11(device: str, density: float = 1.0) -> list[nn.Module]:
    """VGG-11 for samples (3, 32, 32), of whose weights all but a part are zero."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for layer in LAYERS:
        if layer == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, layer, 3, padding=1), nn.ReLU()]
            channels = layer
    layers += [nn.Flatten(), nn.Linear(channels, 10)]
    for module in layers:
        if isinstance(module, (nn.Conv2d, nn.Linear)) and density < 1:
            weight = module.weight.detach()
            cut = weight.abs().flatten().kthvalue(max(1, int((1 - density) * weight.numel()))).values
            weight[weight.abs() <= cut] = 0
    return [module.to(device) for module in layers]


def forward(layers: list[nn.Module], x: Tensor) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """(module, input, output) of every layer."""
    records = []
    with torch.no_grad():
        for module in layers:
            y = module(x)
            records.append((module, x, y))
            x = y
    return records


def chain_of(layers: list[nn.Module], x: Tensor, prune: bool = False) -> list[BatchedCSR]:
    """Transposed Jacobians, the last layer's first."""
    with torch.no_grad():
        found = [
            jacobian_of(*record, prune=prune) for record in forward(layers, x) if type(record[0]) is not nn.Flatten
        ]
    return [J.detach() for J in found[::-1]]


def captured(run: Callable[[], Any]) -> Candidate:
    """The same in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    return Candidate(lambda _: graph.replay())


def timed(run: Callable[[], Any]) -> Candidate:
    return Candidate(lambda _: run())


def bandwidth(device: str) -> float:
    return copy_bandwidth() if device == "cuda" else CPU_BANDWIDTH


def put_all(results: Results, name: str, metric: str, times: dict[str, float]) -> list[dict[str, str]]:
    mine = times.pop("weft")
    return [results.put(name, metric, "ms", mine, peer, time) for peer, time in times.items()]


# Generators -----------------------------------------------------------------------------------------------------------


def generator_entry(device: str, layer: str, B: int = 1) -> Entry:
    """A generator with a cached pattern against its bytes, and against autograd, one column at a time: the time of 32
    columns, times the number of columns over 32."""
    name = case_name(op="jacobian", device=device, dtype="fp32", B=B, layer=layer)

    def run(results: Results) -> list[dict[str, str]]:
        weight = torch.randn(64, 3, 3, 3, device=device)
        x = torch.randn(B, 3, 32, 32, device=device)
        hidden = torch.randn(B, 64, 32, 32, device=device)
        if layer == "conv":
            make, at = (lambda: conv2d_jacobian(weight, (3, 32, 32), padding=1)), x
            f = functools.partial(F.conv2d, weight=weight, padding=1)
        elif layer == "relu":
            make, f, at = (lambda: relu_jacobian(hidden)), torch.relu, hidden
        else:
            make, at = (lambda: max_pool2d_jacobian(hidden, 2)), hidden
            f = functools.partial(F.max_pool2d, kernel_size=2)
        read = weight.nbytes if layer == "conv" else hidden.nbytes
        J = make()
        leaf = at.clone().requires_grad_()
        out = f(leaf).flatten(1)
        columns = torch.zeros(32, *out.shape, device=device)
        columns[torch.arange(32), :, torch.arange(32)] = 1

        def by_columns() -> None:
            for column in columns:
                torch.autograd.grad(out, leaf, column, retain_graph=True)

        rows = torch.stack([torch.autograd.grad(out, leaf, c, retain_graph=True)[0].flatten(1) for c in columns[:4]])
        check_agreement(name, {"J": relative_error(torch.stack([J.mv(c) for c in columns[:4]]), rows)}, 1e-5)
        candidates = {"weft": timed(make), "autograd": timed(by_columns)}
        if device == "cuda":
            candidates["device"] = captured(make)
        times = measure(candidates, device)
        times["autograd"] *= out.shape[1] / 32
        floor = 1e3 * (J.values.nbytes + read) / bandwidth(device)
        made = [results.put(name, "generate", "ms", times["weft"], "autograd", times["autograd"])]
        made.append(results.put(name, "device_time", "ms", times.get("device", times["weft"]), "floor", floor))
        return made

    return Entry(name, ("generate", "device_time"), run)


# Products -------------------------------------------------------------------------------------------------------------


def pairs(device: str, B: int) -> dict[str, Callable[[], tuple[BatchedCSR, BatchedCSR]]]:
    """The level-0 pairs of VGG-11's first layers, and the pruned convolutions of level 1."""

    def first(kind: str) -> tuple[BatchedCSR, BatchedCSR]:
        chain = chain_of(vgg11(device)[:3], torch.randn(B, 3, 32, 32, device=device))
        pool, relu, conv = chain
        return {"conv1-relu1": (conv, relu), "conv1-pool1": (conv, pool), "relu1-pool1": (relu, pool)}[kind]

    def pruned() -> tuple[BatchedCSR, BatchedCSR]:
        chain = chain_of(vgg11(device, 0.03)[:4], torch.randn(B, 3, 32, 32, device=device), prune=True)
        after, pool, relu, conv = chain
        return conv @ relu, pool @ after

    found = {kind: (lambda kind=kind: first(kind)) for kind in ("conv1-relu1", "conv1-pool1", "relu1-pool1")}
    return {**found, "pruned_conv1-conv2": pruned}


def product_entry(device: str, pair: str, B: int) -> Entry:
    name = case_name(op="plan_matmul", device=device, dtype="fp32", B=B, pair=pair)

    def run(results: Results) -> list[dict[str, str]]:
        a, b = pairs(device, B)[pair]()
        plan = plan_matmul(a, b)
        product = plan(a, b)
        lefts, rights = (
            [J.with_values(v).to_sparse_csr() for v in J.values.expand(B, -1)] if J.batch_size is None
            else [J.with_values(v).to_sparse_csr() for v in J.values] for J in (a, b)
        )  # fmt: skip
        candidates = {"weft": timed(lambda: plan(a, b))}
        if device == "cuda":
            candidates["cusparse_spgemm"] = timed(lambda: [x @ y for x, y in zip(lefts, rights, strict=True)])
            candidates["device"] = captured(lambda: plan(a, b))
            theirs = lefts[0] @ rights[0]
        else:
            import scipy.sparse

            def scipys(J: Tensor) -> Any:
                parts = (J.values().numpy(), J.col_indices().numpy(), J.crow_indices().numpy())
                return scipy.sparse.csr_matrix(parts, shape=tuple(J.shape))

            ours = [(scipys(x), scipys(y)) for x, y in zip(lefts, rights, strict=True)]
            candidates["scipy"] = timed(lambda: [x @ y for x, y in ours])
            done = (ours[0][0] @ ours[0][1]).tocsr()
            parts = (torch.from_numpy(t.copy()) for t in (done.indptr, done.indices, done.data))
            theirs = torch.sparse_csr_tensor(*parts, done.shape)
        probe = torch.randn(b.shape[1], device=device)
        first = product.values if product.batch_size is None else product.values[0]
        mine = product.with_values(first).mv(probe)
        check_agreement(name, {"product": relative_error(mine, theirs @ probe)}, 1e-5)
        times = measure(candidates, device)
        moved = product.values.nbytes + a.values.nbytes + b.values.nbytes + a.col.nbytes + b.col.nbytes
        rows = [results.put(name, "device_time", "ms", times.pop("device", times["weft"]), "floor",
                            1e3 * moved / bandwidth(device))]  # fmt: skip
        rows.append(
            results.put(name, "plan_memory", "bytes", plan.memory, "operands_and_product", _held(a, b, product))
        )
        return rows + put_all(results, name, "forward", times)

    return Entry(name, ("forward", "device_time", "plan_memory"), run)


def _held(*matrices: BatchedCSR) -> int:
    return sum(J.crow.nbytes + J.col.nbytes + J.values.nbytes for J in matrices)


def vector_entry(device: str, layer: str, B: int) -> Entry:
    """A matrix and one vector per sample, against torch.sparse @: one product with a matrix of columns where the values
    are shared, one after the other where they are not."""
    name = case_name(op="mv", device=device, dtype="fp32", B=B, layer=layer)

    def run(results: Results) -> list[dict[str, str]]:
        chain = chain_of(vgg11(device)[:3], torch.randn(B, 3, 32, 32, device=device))
        J = {"conv": chain[2], "max_pool": chain[0]}[layer]
        x = torch.randn(B, J.shape[1], device=device)
        if J.batch_size is None:
            torchs, columns = J.to_sparse_csr(), x.mT.contiguous()

            def theirs() -> Tensor:
                return (torchs @ columns).mT
        else:
            single = [J.with_values(v).to_sparse_csr() for v in J.values]

            def theirs() -> Tensor:
                return torch.stack([m @ v for m, v in zip(single, x, strict=True)])

        check_agreement(name, {"y": relative_error(J.mv(x), theirs())}, 1e-5)
        times = measure({"weft": timed(lambda: J.mv(x)), "torch.sparse": timed(theirs)}, device)
        return put_all(results, name, "forward", times)

    return Entry(name, ("forward",), run)


# Chains ---------------------------------------------------------------------------------------------------------------


def input_gradients(layers: list[nn.Module], x: Tensor) -> tuple[Callable[[], list[Tensor]], Tensor]:
    """Autograd's backward pass to every activation and the input, no parameter among them."""
    activations = [x.clone().requires_grad_()]
    for module in layers:
        module.requires_grad_(False)
        activations.append(module(activations[-1]))
    grad = torch.randn_like(activations[-1])
    return lambda: list(torch.autograd.grad(activations[-1], activations[:-1], grad, retain_graph=True)), grad


def chain_entry(device: str, model: str, B: int, make: Callable[[], tuple[list[nn.Module], Tensor]], prune: bool,
                schedules: tuple[str | int, ...] = ("auto",)) -> Entry:  # fmt: skip
    """All gradients along a chain, given its Jacobians, against autograd's backward pass, eager and captured."""
    names = {s: case_name(model=model, device=device, dtype="fp32", B=B, schedule=s) for s in schedules}

    def run(results: Results) -> list[dict[str, str]]:
        rows = []
        layers, x = make()
        theirs, grad = input_gradients(layers, x)
        jacobians = chain_of(layers, x, prune)
        flat = grad.flatten(1)
        for schedule, name in names.items():
            mine = chain_backward(flat, jacobians, schedule)[-1]
            check_agreement(name, {"grad_input": relative_error(mine, theirs()[0].flatten(1))}, 1e-4)

            def ours(schedule=schedule) -> list[Tensor]:
                return chain_backward(flat, jacobians, schedule)

            candidates = {"weft": timed(ours), "autograd": timed(theirs)}
            if device == "cuda":
                candidates |= {"device": captured(ours), "captured": captured(theirs)}
            times = measure(candidates, device)
            graphs = {"weft": times.pop("device"), "captured": times.pop("captured")} if device == "cuda" else {}
            rows += put_all(results, name, "input_gradients", times)
            rows += put_all(results, name, "input_gradients_captured", graphs) if graphs else []
        return rows

    return Entry(names[schedules[0]], ("input_gradients",), run)


def blocks(count: int, device: str) -> tuple[list[nn.Module], Tensor]:
    """Equal blocks of a convolution and a ReLU, 4 channels on 16x16."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(count):
        conv = nn.Conv2d(4, 4, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight)
        layers += [conv, nn.ReLU()]
    return [m.to(device) for m in layers], torch.randn(1, 4, 16, 16, device=device)


def net_entry(device: str, density: float, B: int) -> Entry:
    """A whole backward pass of VGG-11, parameters and all."""
    kind = "dense" if density == 1 else "pruned"
    name = case_name(model="vgg11", device=device, dtype="fp32", B=B, weights=kind)

    def run(results: Results) -> list[dict[str, str]]:
        plain = nn.Sequential(*vgg11(device, density))
        scan = ScanSequential(*copy.deepcopy(plain), prune=density < 1)
        x = torch.randn(B, 3, 32, 32, device=device)

        def step(net: nn.Module) -> Candidate:
            return Candidate(lambda loss: loss.backward(), lambda: net(x).square().sum())

        for net in (plain, scan):
            net(x).square().sum().backward()
        error = max(relative_error(p.grad, q.grad) for p, q in zip(scan.parameters(), plain.parameters(), strict=True))
        check_agreement(name, {"parameters": error}, 1e-4)
        times = measure({"weft": step(scan), "autograd": step(plain)}, device)
        return put_all(results, name, "backward", times)

    return Entry(name, ("backward",), run)


def table(device: str) -> Iterator[Entry]:
    for layer in ("conv", "relu", "max_pool"):
        yield generator_entry(device, layer)
    for pair in pairs(device, 1):
        for B in BATCHES:
            yield product_entry(device, pair, B)
    for layer in ("conv", "max_pool"):
        yield vector_entry(device, layer, 16)

    def pruned(B: int) -> Callable[[], tuple[list[nn.Module], Tensor]]:
        return lambda: (vgg11(device, 0.03), torch.randn(B, 3, 32, 32, device=device))

    for B in BATCHES:
        yield chain_entry(device, "vgg11_pruned", B, pruned(B), True)
    for count in (8, 16, 32, 64, 128, 256) if device == "cuda" else (8,):
        schedules = ("auto", "linear", 1, 2) if count <= 64 else ("auto", "linear", 1)
        yield chain_entry(device, f"blocks{count}", 1, lambda n=count: blocks(n, device), False, schedules)
    if device == "cuda":
        for density in (1.0, 0.03):
            for B in BATCHES:
                yield net_entry(device, density, B)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("filter", nargs="?", default="", help="substring of case or metric")
    parser.add_argument("--devices", nargs="+", choices=("cuda", "cpu"), help="default: cpu, and cuda where it is")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of wall clock, after which nothing is started")
    parser.add_argument("--output", type=Path, help="CSV file (default: in benchmarks/results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(CPU_THREADS)
    torch.backends.cudnn.allow_tf32 = False
    devices = options.devices or (["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"])
    results = Results(options.output or RESULTS / "sparse.csv")
    failures: list[str] = []
    for device in devices:
        entries = [entry for entry in table(device) if entry.matches(options.filter)]
        failures += run_entries(entries, results, minutes=options.minutes, patience=120)
    exit_with(failures)


if __name__ == "__main__":
    main()
