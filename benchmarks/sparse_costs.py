"""The constants by which "auto" and plan_chain expect times, measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import weft
from torch import Tensor, nn
from weft.scan import chain_backward
from weft.sparse import BatchedCSR, avg_pool2d_jacobian, conv2d_jacobian, plan_matmul

from benchmarks import costs_file
from benchmarks.common import captured, measure, timed
from benchmarks.fitting import rounded
from benchmarks.sparse_products import CALLS


def fit(device: str) -> dict[str, float]:
    """The constants of weft._scan.chain.Costs: a small case gives the call, a large one the rest."""

    def us(run: Callable[[], Any]) -> float:
        return 1e3 * measure({"it": timed(run)}, device)["it"]

    def sparse(density: float, *shape: int) -> BatchedCSR:
        return BatchedCSR.from_dense((torch.rand(shape, device=device) < density).float())

    def product(a: BatchedCSR, b: BatchedCSR, kind: str) -> tuple[Callable[[], BatchedCSR], int]:
        plan = plan_matmul(a, b)
        if getattr(plan.kinds, kind) < 0.9 * plan.flops:
            raise RuntimeError(f"the product for {kind} is {plan.kinds}")
        return lambda: plan(a, b), plan.flops

    def alone(run: Callable[[], BatchedCSR]) -> float:
        # Many in one CUDA graph: the host takes longer for its part, and for a graph's launch, than the device for many
        # a large product.
        return us(captured(lambda: [run() for _ in range(CALLS)])) / CALLS if device == "cuda" else us(run)

    def rate(run: Callable[[], BatchedCSR], flops: int) -> float:
        return max(0.0, 1e9 * (alone(run) - alone(small_product)) / flops)

    torch.manual_seed(0)
    small_product, _ = product(sparse(0.5, 4, 4), sparse(0.5, 4, 4), "gather")
    found = {"product": us(small_product)}
    large = {
        "axpy": (sparse(0.3, 1000, 1500), sparse(2.0, 1500, 120)),
        "gather": (
            conv2d_jacobian(torch.randn(64, 3, 3, 3, device=device), (3, 96, 96), padding=1),
            avg_pool2d_jacobian((64, 96, 96), 2, device=device),
        ),
        "accumulate": (sparse(0.3, 400, 800), sparse(0.3, 800, 8000)),
    }
    if device == "cuda":
        convs = (torch.randn(n, m, 3, 3, device=device) * (torch.rand(n, m, 3, 3, device=device) < 0.03)
                 for m, n in ((128, 256), (256, 256)))  # fmt: skip
        large["expand"] = tuple(conv2d_jacobian(w, (w.shape[1], 8, 8), padding=1, prune=True) for w in convs)
    for kind, pair in large.items():
        found[kind] = rate(*product(*pair, kind))
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


def fit_layers() -> dict[str, float]:
    """Microseconds on the current GPU, in a CUDA graph, of small layers' parts in a backward pass: see
    weft._scan.layer_chain._Times."""

    def us(run: Callable[[], Any]) -> float:
        return 1e3 * measure({"it": timed(captured(run))}, "cuda")["it"]

    def one_more(step: Callable[[], Any]) -> float:
        few, many = (us(lambda n=n: [step() for _ in range(n)]) for n in (2, 34))
        return (many - few) / 32

    torch.manual_seed(0)
    weight, x = torch.randn(4, 4, 3, 3, device="cuda"), torch.randn(1, 4, 16, 16, device="cuda")
    J = conv2d_jacobian(weight, (4, 16, 16), padding=1)
    g = torch.randn(1, J.shape[1], device="cuda")
    none = torch.empty(0, dtype=J.crow.dtype, device="cuda")

    def chain(links: int) -> list[Tensor]:
        patterns = [[t] * links for t in (J.crow, J.col, J.values, none)]
        return torch.ops.weft.layer_chain(g, *patterns, [0] * links)

    def layer() -> Tensor:
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
        return torch.ops.aten.convolution_backward(x, x, weight, None, *settings)[0]

    def both() -> None:
        layer(), chain(1)

    found = {"link": (us(lambda: chain(34)) - us(lambda: chain(2))) / 32, "layer": one_more(layer)}
    found["simple"] = one_more(lambda: torch.ops.aten.threshold_backward(x, x, 0))
    found["segment"] = max(0.0, one_more(both) - found["link"] - found["layer"])
    print(f"cuda: layers({', '.join(f'{name}={value:.2g}' for name, value in found.items())})")
    return found


COSTS, LAYERS = "scan.sparse_chain", "scan.layer_chain"
"""The tables of a GPU's costs that `fit` and `fit_layers` measure."""


def costs_table(found: dict[str, float]) -> dict[str, Any]:
    """The first table as weft/costs/<gpu>.json has it: by what each number goes with on another GPU."""
    kinds = {
        "clock": ("link",),
        "chip": ("axpy", "dense"),
        "memory": ("gather", "accumulate", "expand", "vector"),
        "fixed": ("product", "call", "layer"),
    }
    numbers = {kind: {name: rounded(found[name]) for name in names} for kind, names in kinds.items()}
    return {"from": "a small case and a large one of each, by benchmarks.sparse", **numbers}


def layers_table(found: dict[str, float], before: costs_file.Tables) -> dict[str, Any]:
    """The second one; what is chosen, not measured, is as it was."""
    numbers = {**before[LAYERS]["fixed"], **{name: rounded(value) for name, value in found.items()}}
    return {"from": "small cases in CUDA graphs, by benchmarks.sparse", "fixed": numbers}


def tables(before: costs_file.Tables) -> costs_file.Tables:
    """Both tables, measured on the current GPU, whose tables were these."""
    return {COSTS: costs_table(fit("cuda")), LAYERS: layers_table(fit_layers(), before)}


def write_costs(path: Path) -> None:
    """This GPU's costs with both tables in place of those that are known."""
    gpu = weft._C.common.gpu_facts(torch.cuda.current_device())
    before = costs_file.before(gpu)
    path.write_text(costs_file.text_of(gpu, {**before, **tables(before)}), encoding="utf-8")
