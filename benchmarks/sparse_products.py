"""Generators of Jacobians, their planned products and their products with vectors: the table of ``python -m
benchmarks.sparse`` that has no chain in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weft._scan.chain import sparse_of
from weft._sparse.plan import count_flops
from weft.sparse import (
    BatchedCSR,
    MatmulPlan,
    avg_pool2d_jacobian,
    conv2d_jacobian,
    gelu_jacobian,
    linear_jacobian,
    max_pool2d_jacobian,
    plan_matmul,
    relu_jacobian,
)

from benchmarks.common import (
    Candidate,
    Entry,
    Results,
    captured,
    case_name,
    check_agreement,
    copy_bandwidth,
    measure,
    put_all,
    relative_error,
    timed,
)
from benchmarks.cusparse import SpGEMM
from benchmarks.sparse_nets import PRUNED_NETS, chain_of, vgg11

CALLS = 16
"""In one graph, where a kernel's own time is wanted, and in a row."""


def device_time(run: Callable[[], Any], count: int = CALLS) -> float:
    """Milliseconds that the device spends on a call, from kernel to kernel in a CUDA graph: without the time that the
    host, or the graph's launch, takes to reach it, and with nothing in L2."""
    buffer = torch.zeros(torch.cuda.get_device_properties().L2_cache_size // 2, device="cuda")

    def calls(inner: Callable[[], Any]) -> Candidate:
        def flushed() -> None:
            for _ in range(count):
                buffer.sum()
                inner()

        return timed(captured(flushed))

    times = measure({"run": calls(run), "flush": calls(lambda: None)}, "cuda")
    return (times["run"] - times["flush"]) / count


def in_a_row(run: Callable[[], Any], count: int) -> Candidate:
    """Calls one after the other: a single one's time is that of the first launch after a pause."""

    def calls() -> None:
        for _ in range(count):
            run()

    return timed(calls)


@functools.cache
def bandwidth(device: str) -> float:
    """Bytes a second, read and written together, of a copy that no cache holds."""
    if device == "cuda":
        return copy_bandwidth()
    source = torch.rand(1 << 25)
    target = torch.rand(1 << 25)
    return 2e3 * source.nbytes / measure({"copy": timed(lambda: target.copy_(source))}, device)["copy"]


class Generator(NamedTuple):
    """A generator, the layer itself, where the Jacobian is taken, and what the values are made from."""

    make: Callable[[], BatchedCSR]
    layer: Callable[[Tensor], Tensor]
    at: Tensor
    read: int


def generators(device: str, B: int) -> dict[str, Callable[[], Generator]]:
    def conv() -> Generator:
        weight, x = torch.randn(64, 3, 3, 3, device=device), torch.randn(B, 3, 32, 32, device=device)
        layer = functools.partial(F.conv2d, weight=weight, padding=1)
        return Generator(lambda: conv2d_jacobian(weight, (3, 32, 32), padding=1), layer, x, weight.nbytes)

    def linear() -> Generator:
        weight, x = torch.randn(512, 1024, device=device), torch.randn(B, 1024, device=device)
        return Generator(lambda: linear_jacobian(weight), functools.partial(F.linear, weight=weight), x, weight.nbytes)

    def of_input(make: Callable[[Tensor], BatchedCSR], layer: Callable[[Tensor], Tensor]) -> Callable[[], Generator]:
        def at() -> Generator:
            x = torch.randn(B, 64, 32, 32, device=device)
            return Generator(lambda: make(x), layer, x, x.nbytes)

        return at

    def average(x: Tensor) -> BatchedCSR:
        return avg_pool2d_jacobian(x.shape[1:], 2, device=device)

    return {
        "conv": conv,
        "relu": of_input(relu_jacobian, torch.relu),
        "max_pool": of_input(lambda x: max_pool2d_jacobian(x, 2), functools.partial(F.max_pool2d, kernel_size=2)),
        "gelu": of_input(gelu_jacobian, F.gelu),
        "avg_pool": of_input(average, functools.partial(F.avg_pool2d, kernel_size=2)),
        "linear": linear,
    }


def generator_entry(device: str, layer: str, B: int = 1) -> Entry:
    """A generator with a cached pattern against its bytes, and against autograd, one column at a time: the time of 32
    columns, times the number of columns over 32. Says whether the generator keeps its bar, 1.5 times the floor or 10
    us."""
    name = case_name(op="jacobian", device=device, dtype="fp32", B=B, layer=layer)

    def run(results: Results) -> list[dict[str, str]]:
        make, f, at, read = generators(device, B)[layer]()
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
        times = measure({"weft": timed(make), "autograd": timed(by_columns)}, device)
        times["autograd"] *= out.shape[1] / 32
        floor = 1e3 * (J.values.nbytes + read) / bandwidth(device)
        spent = device_time(make) if device == "cuda" else times["weft"]
        print(
            f"{name}: {1e3 * spent:.1f} us, {spent / floor:.2f} times the floor of {1e3 * floor:.1f} us: "
            f"{'kept' if spent <= max(1.5 * floor, 0.01) else 'MISSED'}"
        )
        return [
            results.put(name, "generate", "ms", times["weft"], "autograd", times["autograd"]),
            results.put(name, "device_time", "ms", spent, "floor", floor),
            results.put(name, "elements", "elements", J.nnz, "dense", J.shape[0] * J.shape[1]),
        ]

    return Entry(name, ("generate", "device_time", "elements"), run)


def pairs(device: str, B: int) -> dict[str, Callable[[], tuple[BatchedCSR, BatchedCSR]]]:
    """The level-0 pairs of VGG-11's first layers, and the pruned convolutions of level 1."""

    def first(kind: str) -> tuple[BatchedCSR, BatchedCSR]:
        chain = chain_of(vgg11(device)[:3], torch.randn(B, 3, 32, 32, device=device))
        pool, relu, conv = chain
        return {"conv1-relu1": (conv, relu), "conv1-pool1": (conv, pool), "relu1-pool1": (relu, pool)}[kind]

    def level1() -> tuple[BatchedCSR, BatchedCSR]:
        chain = chain_of(vgg11(device, 0.03)[:4], torch.randn(B, 3, 32, 32, device=device), prune=True)
        after, pool, relu, conv = chain
        return conv @ relu, pool @ after

    found = {kind: (lambda kind=kind: first(kind)) for kind in ("conv1-relu1", "conv1-pool1", "relu1-pool1")}
    return {**found, "pruned_conv1-conv2": level1}


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
        candidates = {
            "weft": timed(lambda: plan(a, b)),
            "torch.sparse": timed(lambda: [x @ y for x, y in zip(lefts, rights, strict=True)]),
        }
        if device == "cuda":
            peers = [SpGEMM(x, y) for x, y in zip(lefts, rights, strict=True)]
            for peer in peers:
                peer.prepare()
            candidates["cusparse_spgemm_reuse"] = timed(lambda: [peer.rerun() for peer in peers])
            # Of its own, because a run finds another pattern's place.
            whole = [SpGEMM(x, y) for x, y in zip(lefts, rights, strict=True)]
            candidates["cusparse_spgemm"] = timed(lambda: [peer.run() for peer in whole])
            theirs = peers[0].result()
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
        spent = device_time(lambda: plan(a, b)) if device == "cuda" else times["weft"]
        rows = [results.put(name, "device_time", "ms", spent, "floor", 1e3 * moved / bandwidth(device))]
        rows.append(
            results.put(name, "plan_memory", "bytes", plan.memory, "operands_and_product", _held(a, b, product))
        )
        return rows + put_all(results, name, "forward", times)

    return Entry(name, ("forward", "device_time", "plan_memory"), run)


def level_products(
    layers: list[nn.Module], x: Tensor, levels: int, most: float
) -> Iterator[tuple[str, BatchedCSR, BatchedCSR, MatmulPlan | None]]:
    """The products of an up-sweep over a pruned net, of all levels: level and place, operands and plan. There is no
    plan where a product takes more than `most` scalar products, and no product of such a one."""
    nodes: list[BatchedCSR | None] = [sparse_of(J) for J in chain_of(layers, x, prune=True)]
    for level in range(levels):
        products: list[BatchedCSR | None] = []
        for i in range(0, len(nodes) - 2, 2):
            b, a = nodes[i : i + 2]
            products.append(None)
            if a is not None and b is not None:
                small = count_flops(a._pattern, b._pattern) // 2 <= most
                plan = plan_matmul(a, b) if small else None
                yield f"level{level}_{i // 2}", a, b, plan
                if plan is not None and level + 1 < levels:
                    products[-1] = plan(a, b)
        nodes = [*products, nodes[-1]]


def levels_entry(device: str, net: str, B: int, levels: int = 3, most: float = 1e9, prepared: float = 5e8) -> Entry:
    """Every product of the first levels of a pruned net's up-sweep beside the numeric phase of SpGEMMreuse, once a
    sample, as it has no batch: in a row, as the host calls it, and alone on the device. Products of more scalar
    products a sample than `most` are left out, and said; where those of all samples are more than `prepared`, cuSPARSE
    multiplies the first sample again and again, for whose buffers there is room."""
    name = case_name(op="plan_matmul", device=device, dtype="fp32", B=B, model=f"{net}_pruned")

    def run(results: Results) -> list[dict[str, str]]:
        rows = []
        layers, x = PRUNED_NETS[net](device, B)
        for place, a, b, plan in level_products(layers, x, levels, most):
            case, products = f"{name} pair={place}", count_flops(a._pattern, b._pattern) // 2
            if plan is None:
                print(f"{case}: {products:.3g} scalar products a sample, not measured")
                continue
            product, large = plan(a, b), B * products > prepared
            samples, count = (1, 2) if large else (B, CALLS)
            singles = [
                [
                    J.with_values(v).to_sparse_csr()
                    for v in (J.values[:samples] if J.batch_size else [J.values] * samples)
                ]
                for J in (a, b)
            ]
            peers = [SpGEMM(u, v) for u, v in zip(*singles, strict=True)]
            for one in peers:
                one.prepare()
            probe = torch.randn(b.shape[1], device=device)
            mine = product.with_values(product.values.reshape(-1, plan.nnz)[0]).mv(probe)
            check_agreement(case, {"product": relative_error(mine, peers[0].result() @ probe)}, 1e-5)

            def theirs(peers=peers * (B // samples)) -> None:
                for one in peers:
                    one.rerun()

            def ours(plan=plan, a=a, b=b) -> BatchedCSR:
                return plan(a, b)

            calls = {"weft": ours, "cusparse_spgemm_reuse": theirs}
            times = measure({name: in_a_row(call, count) for name, call in calls.items()}, device)
            rows += put_all(results, case, "forward", {name: time / count for name, time in times.items()})
            rows += put_all(
                results, case, "device_time", {name: device_time(call, count) for name, call in calls.items()}
            )
            results.save()  # the next ones may take long
            del product, peers, singles, plan
            torch.cuda.empty_cache()
        return rows

    return Entry(name, ("forward", "device_time"), run)


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


def too_large_entry(device: str) -> Entry:
    """The product of two dense convolutions of VGG-11, the second level of its up-sweep: what Weft and cuSPARSE say."""
    name = case_name(op="plan_matmul", device=device, dtype="fp32", B=1, pair="dense_conv1-conv2")

    def run(results: Results) -> list[dict[str, str]]:
        chain = chain_of(vgg11(device)[:4], torch.randn(1, 3, 32, 32, device=device))
        after, pool, relu, conv = chain
        a, b = conv @ relu, pool @ after

        def said(make: Callable[[], Any]) -> str:
            try:
                return repr(make())
            except (RuntimeError, torch.OutOfMemoryError) as error:
                return str(error).splitlines()[0]

        print(f"{name}: {a.nnz} and {b.nnz} elements. Weft: {said(lambda: plan_matmul(a, b))}")
        if device == "cuda":
            x, y = (J.with_values(J.values.reshape(-1)).to_sparse_csr() for J in (a, b))
            print(f"{name}: cuSPARSE: {said(lambda: SpGEMM(x, y).run())}")
        return []

    return Entry(name, ("forward",), run)
