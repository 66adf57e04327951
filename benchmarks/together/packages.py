"""Packages that have scans over ranks, too.

They run only where they are asked for, in a run of their own: ``torchrun ... -m benchmarks.ranks flash-linear``.
flash-linear-attention compiles every configuration of some twenty kernels on every rank: some hundred seconds, before
anything is timed. Here the kernels that only ranks have are tuned, and each of the others has one configuration; the
one GPU takes the kernels for sequences of many lengths, too, which its ranks have.
Its backward pass refuses Triton before 3.7.1 on Hopper, so that the forward pass stands alone. A run that takes longer
than LIMIT seconds all the same says where it is and ends.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import sys
from typing import Any

import torch
import torch.distributed as dist
import weft.distributed as wd
from torch import Tensor
from weft.scan import linear_scan

from benchmarks.common import Entry, Results, check_agreement, relative_error
from benchmarks.together.common import BOUNDS, Rows, Together, step_of

LIMIT = 90


def _tune_little() -> None:
    """Leaves every kernel of the package, but those of its context parallelism, the configuration of the fewest stages,
    of 4 warps if there is one."""
    from triton.runtime.autotuner import Autotuner

    for name, module in [*sys.modules.items()]:
        for kernel in vars(module).values() if name.startswith("fla.") else ():
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)  # of what decorates it
            if kernel is not None and not kernel.base_fn.__module__.startswith("fla.ops.cp."):
                kernel.configs = [min(kernel.configs, key=lambda c: (c.num_stages, c.num_warps != 4))]


def _of_all_over_one(over: Together, H: int, B: int, T: int) -> float:
    """Of a diagonal scan, forward: the time of all ranks together over that of one."""

    def inputs_of(steps: int) -> list[Tensor]:
        A, b = (torch.rand(steps, B, H, device=over.device) for _ in range(2))
        return [A.mul_(0.2).add_(0.8), b]

    ranks = over.measure({"ranks": step_of(wd.linear_scan, inputs_of(T // over.size), False)})["ranks"]
    over.free()
    return over.size * ranks / over.first(lambda: over.alone(step_of(linear_scan, inputs_of(T), False)))


def package_entry(over: Together, T: int, heads: int, width: int) -> Entry:
    """flash-linear-attention's context parallelism, of the gated delta rule, whose state is a matrix: what ranks cost,
    as the time of all of them together over that of one, beside the same of a scan."""
    name = over.name(package="flash-linear-attention", dtype="bf16", H=width, B=1, T=T, heads=heads)
    beside = over.name(op="linear_scan", dtype="fp32", layout="diagonal", H=1536, B=8, T=T)

    def run(results: Results) -> Rows:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        try:
            return rows_of(results)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def rows_of(results: Results) -> Rows:
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        _tune_little()

        def inputs_of(rank: int) -> list[Tensor]:
            source = torch.Generator(over.device).manual_seed(rank)
            make = {"generator": source, "device": over.device}
            q, k, v = (
                torch.randn(1, T // over.size, heads, width, dtype=torch.bfloat16, **make).requires_grad_()
                for _ in range(3)
            )
            g, beta = (torch.rand(1, T // over.size, heads, **make) for _ in range(2))
            return [q, k, v, -0.2 * g, beta.bfloat16()]

        def attend(*inputs: Tensor, **how: Any) -> Tensor:
            return chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, **how)[0]

        edges = torch.tensor([0, T], device=over.device)
        context = build_cp_context(edges, dist.group.WORLD)
        mine = inputs_of(over.rank)
        with torch.no_grad():
            ends = torch.empty(over.size, heads, width, device=over.device, dtype=torch.bfloat16)
            dist.all_gather_into_tensor(ends, attend(*mine, cp_context=context)[:, -1])

        def whole() -> list[Tensor]:
            parts = zip(*(inputs_of(rank) for rank in range(over.size)), strict=True)
            return [torch.cat([t.detach() for t in part], 1) for part in parts]

        def error() -> float:
            with torch.no_grad():
                return relative_error(ends, on_one(*whole())[0].unflatten(0, (over.size, -1))[:, -1])

        def on_one(*inputs: Tensor) -> Tensor:
            return attend(*inputs, cu_seqlens=edges)

        step = step_of(lambda *t: attend(*t, cp_context=context), mine, False)
        check_agreement(name, {"output": over.first(error)}, BOUNDS["bf16"])
        ranks = over.measure({"ranks": step})["ranks"]
        one = over.first(lambda: over.alone(step_of(on_one, whole(), False)))
        theirs = over.size * ranks / one
        print(f"{name} forward: {ranks:.4g} ms over ranks, {one:.4g} ms on one", flush=True)
        del mine, step
        over.free()
        ours = _of_all_over_one(over, 1536, 8, T)
        return [results.put(beside, "forward_of_all_over_one", "relative", ours, "flash-linear-attention", theirs)]

    return Entry(name, ("of_all_over_one",), run)


def package_entries(over: Together) -> list[Entry]:
    """None where no package is there."""
    if importlib.util.find_spec("fla") is None:
        if over.rank == 0:
            print("flash-linear-attention is not here: not run", flush=True)
        return []
    return [package_entry(over, 1 << 18, 16, 128)]
