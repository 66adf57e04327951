"""Sparse Jacobians, planned products and chains against cuSPARSE, scipy, autograd and the bandwidth of the memory.

``python -m benchmarks.sparse [FILTER]`` measures the table into results/sparse.csv, what matters most first. FILTER is
a substring of the case or the metric. cuSPARSE, torch.sparse and scipy compute one product per sample, as they have no
batch of values on one pattern. ``python -m benchmarks.sparse fit`` measures the constants by which "auto" and
plan_chain expect times, and prints them; with --output, a GPU's into a file for python/weft/costs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import weft
from torch import Tensor, nn
from weft._scan.chain import sparse_of
from weft._sparse.plan import count_flops
from weft.scan import ScanSequential, chain_backward, plan_chain
from weft.sparse import (
    BatchedCSR,
    avg_pool2d_jacobian,
    conv2d_jacobian,
    gelu_jacobian,
    linear_jacobian,
    max_pool2d_jacobian,
    plan_matmul,
    relu_jacobian,
)
from weft.sparse import transposed_jacobian as jacobian_of

from benchmarks import costs_file
from benchmarks.common import (
    RESULTS,
    Candidate,
    Entry,
    Results,
    begin_table,
    captured,
    case_name,
    check_agreement,
    copy_bandwidth,
    exit_with,
    measure,
    relative_error,
    run_entries,
    table_parser,
)
from benchmarks.cusparse import SpGEMM
from benchmarks.fitting import rounded

BATCHES = (1, 16)
LAYERS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def pruned(layers: list[nn.Module], density: float) -> list[nn.Module]:
    """The same layers, of whose weights all but a part are zero."""
    for module in layers:
        if isinstance(module, (nn.Conv2d, nn.Linear)) and density < 1:
            weight = module.weight.detach()
            cut = weight.abs().flatten().kthvalue(max(1, int((1 - density) * weight.numel()))).values
            weight[weight.abs() <= cut] = 0
    return layers


def vgg11(device: str, density: float = 1.0, width: float = 1.0) -> list[nn.Module]:
    """VGG-11 for samples (3, 32, 32), with a part of its channels, of whose weights all but a part are zero."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for layer in LAYERS:
        if layer == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            outputs = int(layer * width)
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
            channels = outputs
    layers += [nn.Flatten(), nn.Linear(channels, 10)]
    return [module.to(device) for module in pruned(layers, density)]


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


CALLS = 16
"""In one graph, where a kernel's own time is wanted."""


def device_time(run: Callable[[], Any]) -> float:
    """Milliseconds that the device spends on a call, from kernel to kernel in a CUDA graph: without the time that the
    host, or the graph's launch, takes to reach it, and with nothing in L2."""
    buffer = torch.zeros(torch.cuda.get_device_properties().L2_cache_size // 2, device="cuda")

    def calls(inner: Callable[[], Any]) -> Candidate:
        def flushed() -> None:
            for _ in range(CALLS):
                buffer.sum()
                inner()

        return timed(captured(flushed))

    times = measure({"run": calls(run), "flush": calls(lambda: None)}, "cuda")
    return (times["run"] - times["flush"]) / CALLS


def peer(name: str, make: Callable[[], Candidate]) -> dict[str, Candidate]:
    """A peer by its name: none where it fails, which costs its own row alone."""
    try:
        return {name: make()}
    except RuntimeError as error:
        print(f"no row for {name}: {error}", flush=True)
        return {}


def timed(run: Callable[[], Any]) -> Candidate:
    return Candidate(lambda _: run())


def call(run: Callable[[], Any]) -> Any:
    return run()


@functools.cache
def bandwidth(device: str) -> float:
    """Bytes a second, read and written together, of a copy that no cache holds."""
    if device == "cuda":
        return copy_bandwidth()
    source = torch.rand(1 << 25)
    target = torch.rand(1 << 25)
    return 2e3 * source.nbytes / measure({"copy": timed(lambda: target.copy_(source))}, device)["copy"]


def put_all(results: Results, name: str, metric: str, times: dict[str, float]) -> list[dict[str, str]]:
    mine = times.pop("weft")
    return [results.put(name, metric, "ms", mine, peer, time) for peer, time in times.items()]


# Generators -----------------------------------------------------------------------------------------------------------


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


# Products -------------------------------------------------------------------------------------------------------------


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


def level_products(layers: list[nn.Module], x: Tensor, levels: int) -> dict[str, tuple[BatchedCSR, BatchedCSR]]:
    """The products of an up-sweep over a pruned net, of all levels, by level and place."""
    nodes: list[BatchedCSR] = [sparse_of(J) for J in chain_of(layers, x, prune=True)]
    found = {}
    for level in range(levels):
        products = []
        for i in range(0, len(nodes) - 2, 2):
            found[f"level{level}_{i // 2}"] = nodes[i + 1], nodes[i]
            if level + 1 < levels:
                products.append(plan_matmul(nodes[i + 1], nodes[i])(nodes[i + 1], nodes[i]))
        nodes = [*products, nodes[-1]] if products else []
    return found


PRUNED_NETS: dict[str, Callable[[str, int], tuple[list[nn.Module], Tensor]]] = {
    "vgg11": lambda device, B: (vgg11(device, 0.03), torch.randn(B, 3, 32, 32, device=device)),
    "lenet5": lambda device, B: (pruned(lenet(device)[0], 0.03), torch.randn(B, 1, 32, 32, device=device)),
}


def levels_entry(device: str, net: str, B: int, levels: int = 3, most: float = 2e9) -> Entry:
    """Every product of the first levels of a pruned net's up-sweep beside the numeric phase of SpGEMMreuse, once a
    sample, as it has no batch: in a row, as the host calls it, and alone on the device. Products of more scalar
    products than `most` are left out, and said."""
    name = case_name(op="plan_matmul", device=device, dtype="fp32", B=B, model=f"{net}_pruned")

    def run(results: Results) -> list[dict[str, str]]:
        rows = []
        layers, x = PRUNED_NETS[net](device, B)
        for place, (a, b) in level_products(layers, x, levels).items():
            case, products = f"{name} pair={place}", count_flops(a._pattern, b._pattern) // 2
            if B * products > most:
                print(f"{case}: {products:.3g} scalar products a sample, not measured")
                continue
            plan = plan_matmul(a, b)
            product = plan(a, b)
            singles = [
                [J.with_values(v).to_sparse_csr() for v in (J.values if J.batch_size else [J.values] * B)]
                for J in (a, b)
            ]
            peers = [SpGEMM(u, v) for u, v in zip(*singles, strict=True)]
            for one in peers:
                one.prepare()
            probe = torch.randn(b.shape[1], device=device)
            mine = product.with_values(product.values.reshape(-1, plan.nnz)[0]).mv(probe)
            check_agreement(case, {"product": relative_error(mine, peers[0].result() @ probe)}, 1e-5)

            def theirs(peers=peers) -> None:
                for one in peers:
                    one.rerun()

            def ours(plan=plan, a=a, b=b) -> BatchedCSR:
                return plan(a, b)

            times = measure({"weft": timed(ours), "cusparse_spgemm_reuse": timed(theirs)}, device)
            rows += put_all(results, case, "forward", times)
            spent = {"weft": device_time(ours), "cusparse_spgemm_reuse": device_time(theirs)}
            rows += put_all(results, case, "device_time", spent)
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

            times = measure({"weft": timed(ours), "autograd": timed(theirs)}, device)
            rows += put_all(results, name, "input_gradients", times)
            if device == "cuda":
                graphs = {"weft": timed(captured(ours))}
                graphs |= peer("captured", lambda: timed(captured(call, lambda: input_gradients(layers, x)[0])))
                rows += put_all(results, name, "input_gradients_captured", measure(graphs, device))
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


def net_entry(device: str, density: float, B: int, width: float) -> Entry:
    """A whole training step of VGG-11, parameters and all, of which a part of the weights is left."""
    name = case_name(model="vgg11", device=device, dtype="fp32", B=B, width=width, density=density)

    def run(results: Results) -> list[dict[str, str]]:
        plain = nn.Sequential(*vgg11(device, density, width))
        scan = ScanSequential(*copy.deepcopy(plain), prune=density < 1)
        x = torch.randn(B, 3, 32, 32, device=device)

        def backward(net: nn.Module) -> Candidate:
            return Candidate(lambda loss: loss.backward(), lambda: net(x).square().sum())

        def step(net: nn.Module) -> Candidate:
            return timed(lambda: net(x).square().sum().backward())

        for net in (plain, scan):
            net(x).square().sum().backward()
        error = max(relative_error(p.grad, q.grad) for p, q in zip(scan.parameters(), plain.parameters(), strict=True))
        check_agreement(name, {"parameters": error}, 1e-4)
        rows = []
        for metric, timer in (("backward", backward), ("forward_backward", step)):
            times = measure({"weft": timer(scan), "autograd": timer(plain)}, device)
            rows += put_all(results, name, metric, times)
        plan = plan_chain(scan, x)
        baseline = sum(flops for _, flops in plan.baseline)
        return [*rows, results.put(name, "input_flops", "flop", plan.flops, "baseline", baseline)]

    return Entry(name, ("backward", "forward_backward", "input_flops"), run)


def pass_entry(device: str, model: str, B: int, make: Callable[[], list[nn.Module]], shape: tuple[int, ...],
               prune: bool) -> Entry:  # fmt: skip
    """A whole backward pass of ScanSequential, the gradients of all parameters, beside autograd's: eager, and captured
    in a CUDA graph after a forward pass that is not."""
    name = case_name(op="backward_pass", model=model, device=device, dtype="fp32", B=B)

    def run(results: Results) -> list[dict[str, str]]:
        plain = nn.Sequential(*make())
        scan = ScanSequential(*copy.deepcopy(plain), prune=prune)
        x = torch.randn(B, *shape, device=device)

        def prepare(net: nn.Module) -> Callable[[], tuple[Tensor, ...]]:
            net = copy.deepcopy(net)  # leaves whose nodes are of this stream
            parameters = list(net.parameters())
            for _ in range(2):  # in the first step of a pruned net patterns are made
                out = net(x)
                torch.autograd.grad(out.square().sum(), parameters)
            out = net(x)
            grad = torch.ones_like(out)
            return lambda: torch.autograd.grad(out, parameters, grad, retain_graph=True)

        def backward(net: nn.Module) -> Candidate:
            return Candidate(lambda loss: loss.backward(), lambda: net(x).square().sum())

        found, want = (prepare(net)() for net in (scan, plain))
        error = max(relative_error(p, q) for p, q in zip(found, want, strict=True))
        check_agreement(name, {"parameters": error}, 1e-4)
        for net in (plain, scan):
            for _ in range(2):
                net(x).square().sum().backward()
        times = measure({"weft": backward(scan), "autograd": backward(plain)}, device)
        rows = put_all(results, name, "backward", times)
        if device == "cuda":
            graphs = {"weft": timed(captured(call, lambda: prepare(scan)))}
            graphs |= peer("captured", lambda: timed(captured(call, lambda: prepare(plain))))
            rows += put_all(results, name, "backward_captured", measure(graphs, device))
        return rows

    return Entry(name, ("backward", "backward_captured"), run)


def pass_entries(device: str) -> Iterator[Entry]:
    image = (3, 32, 32)
    width = 1.0 if device == "cuda" else 0.25
    for B in BATCHES:
        yield pass_entry(device, "vgg11_pruned", B, lambda: vgg11(device, 0.03, width), image, True)
    yield pass_entry(device, "blocks256", 1, lambda: blocks(256, device)[0], (4, 16, 16), False)
    for B in BATCHES:
        yield pass_entry(device, "vgg11", B, lambda: vgg11(device, 1.0, width), image, False)


def lenet(device: str) -> tuple[list[nn.Module], Tensor]:
    """LeNet-5 for samples (1, 32, 32)."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    ]  # fmt: skip
    return [m.to(device) for m in layers], torch.randn(1, 1, 32, 32, device=device)


def tree_entry(device: str) -> Entry:
    """What all levels of LeNet-5's scan multiply: FLOPs and elements of every level, and of all beside the baseline's
    gradient operators. Counted, not timed."""
    name = case_name(model="lenet5", device=device, dtype="fp32", B=1)

    def run(results: Results) -> list[dict[str, str]]:
        layers, x = lenet(device)
        rows = []
        for schedule in ("linear", 1, 2, "blelloch"):
            plan = plan_chain(nn.Sequential(*layers), x, schedule)
            case, baseline = f"{name} schedule={schedule}", sum(flops for _, flops in plan.baseline)
            rows.append(results.put(case, "flops", "flop", plan.flops, "baseline", baseline))
            rows.append(results.put(case, "critical_flops", "flop", plan.critical_flops, "baseline", baseline))
        for level in range(plan.steps[-1].level + 1):
            steps = [s for s in plan.steps if s.level == level]
            total, largest = sum(s.flops for s in steps), max(s.flops for s in steps)
            case = f"{name} schedule=blelloch level={level} phase={steps[0].phase} steps={len(steps)}"
            rows.append(results.put(case, "level_flops", "flop", total, "critical", largest))
            elements = [s.elements for s in steps]
            rows.append(results.put(case, "level_elements", "elements", sum(elements), "largest", max(elements)))
        return rows

    return Entry(name, ("flops", "critical_flops", "level_flops", "level_elements"), run)


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


# The constants of "auto" ----------------------------------------------------------------------------------------------


def fit(device: str) -> dict[str, float]:
    """The constants of weft._scan.chain.Costs: a small case gives the call, a large one the rest."""

    def us(run: Callable[[], Any]) -> float:
        return 1e3 * measure({"it": timed(run)}, device)["it"]

    def sparse(density: float, *shape: int) -> BatchedCSR:
        return BatchedCSR.from_dense((torch.rand(shape, device=device) < density).float())

    def product(a: BatchedCSR, b: BatchedCSR, kind: str) -> tuple[float, int]:
        plan = plan_matmul(a, b)
        if getattr(plan.kinds, kind) < 0.9 * plan.flops:
            raise RuntimeError(f"the product for {kind} is {plan.kinds}")
        return us(lambda: plan(a, b)), plan.flops

    torch.manual_seed(0)
    found = {"product": product(sparse(0.5, 4, 4), sparse(0.5, 4, 4), "gather")[0]}
    large = {
        "axpy": (sparse(0.3, 1000, 1500), sparse(2.0, 1500, 120)),
        "gather": (
            conv2d_jacobian(torch.randn(64, 3, 3, 3, device=device), (3, 32, 32), padding=1),
            avg_pool2d_jacobian((64, 32, 32), 2, device=device),
        ),
        "accumulate": (sparse(0.3, 400, 800), sparse(0.3, 800, 8000)),
    }
    if device == "cuda":
        convs = (torch.randn(n, m, 3, 3, device=device) * (torch.rand(n, m, 3, 3, device=device) < 0.03)
                 for m, n in ((128, 256), (256, 256)))  # fmt: skip
        large["expand"] = tuple(conv2d_jacobian(w, (w.shape[1], 8, 8), padding=1, prune=True) for w in convs)
    for kind, pair in large.items():
        time, flops = product(*pair, kind)
        found[kind] = 1e9 * (time - found["product"]) / flops
    found.setdefault("expand", found["accumulate"])
    small, x = sparse(0.3, 16, 16), torch.randn(1, 16, device=device)
    found["call"] = us(lambda: small.mv(x))
    short, long = ([small] * n for n in (2, 34))
    found["link"] = (
        us(lambda: chain_backward(x, long, "linear")) - us(lambda: chain_backward(x, short, "linear"))
    ) / 32
    weight = torch.randn(64, 64, 3, 3, device=device)
    J, v = conv2d_jacobian(weight, (64, 32, 32), padding=1), torch.randn(1, 64 * 1024, device=device)
    found["vector"] = 1e9 * (us(lambda: J.mv(v)) - found["call"]) / (2 * J.nnz)

    def backward(channels: int, size: int, B: int) -> tuple[float, int]:
        conv = nn.Conv2d(channels, channels, 3, padding=1, device=device).requires_grad_(False)
        leaf = torch.randn(B, channels, size, size, device=device, requires_grad=True)
        out = conv(conv(conv(conv(leaf))))
        g = torch.randn_like(out)
        time = us(lambda: torch.autograd.grad(out, leaf, g, retain_graph=True))
        return time / 4, 2 * conv.weight.numel() * size * size * B

    found["layer"] = backward(2, 4, 1)[0]
    time, flops = backward(128, 32, 16)
    found["dense"] = 1e9 * (time - found["layer"]) / flops
    print(f"{device}: Costs({', '.join(f'{name}={value:.2g}' for name, value in found.items())})")
    return found


COSTS = "scan.sparse_chain"
"""The table of a GPU's costs that `fit` measures."""


def costs_table(found: dict[str, float]) -> dict[str, Any]:
    """That table as weft/costs/<gpu>.json has it: by what each number goes with on another GPU."""
    kinds = {
        "clock": ("link",),
        "chip": ("axpy", "dense"),
        "memory": ("gather", "accumulate", "expand", "vector"),
        "fixed": ("product", "call", "layer"),
    }
    numbers = {kind: {name: rounded(found[name]) for name in names} for kind, names in kinds.items()}
    return {"from": "a small case and a large one of each, by benchmarks.sparse", **numbers}


def write_costs(path: Path, found: dict[str, float]) -> None:
    """This GPU's costs with that table in place of the one that is known."""
    gpu = weft._C.common.gpu_facts(torch.cuda.current_device())
    path.write_text(costs_file.text_of(gpu, {**costs_file.before(gpu), COSTS: costs_table(found)}), encoding="utf-8")


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
            found = fit(device)
            if device == "cuda" and options.output:
                write_costs(options.output, found)
        return
    results = Results(options.output or RESULTS / "sparse.csv")
    failures: list[str] = []
    for device in devices:
        entries = [entry for entry in table(device) if entry.matches(options.filter)]
        failures += run_entries(entries, results, minutes=options.minutes, patience=120)
    exit_with(failures)


if __name__ == "__main__":
    main()
