"""The constants by which "auto" and plan_chain expect times, measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import weft
from torch import nn
from weft.scan import chain_backward
from weft.sparse import BatchedCSR, avg_pool2d_jacobian, conv2d_jacobian, plan_matmul

from benchmarks import costs_file
from benchmarks.common import measure, timed
from benchmarks.fitting import rounded


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
