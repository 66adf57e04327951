"""Scans over ranks beside the same on one, alone, and by trading time for channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import weft.distributed as wd
from torch import Tensor
from weft._distributed.stand_in import StandIn
from weft.scan import linear_scan

from benchmarks.common import DTYPES, Entry, Results, check_agreement, relative_error
from benchmarks.together.common import BOUNDS, Rows, Together, Watched, compare, measure_part, step_of, watch


class _Exchanged(torch.autograd.Function):
    """Rows for each rank, (ranks, ...), to the rows of each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        came = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(came, x.contiguous())
        return came

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Exchanged.apply(grad)


def scan_by_all_to_all(A: Tensor, b: Tensor) -> Tensor:
    """A diagonal scan over ranks as it is usually done: slices of time (T / n, B, H) become all steps of a share of the
    channels, (T, B, H / n), are scanned, and go back."""
    ranks = dist.get_world_size()

    def to_channels(x: Tensor) -> Tensor:
        return _Exchanged.apply(x.unflatten(-1, (ranks, -1)).movedim(-2, 0)).flatten(0, 1)

    x = linear_scan(to_channels(A), to_channels(b))
    return _Exchanged.apply(x.unflatten(0, (ranks, -1))).movedim(0, -2).flatten(-2)


def scan_entry(over: Together, layout: str, dtype: str, H: int, B: int, T: int) -> Entry:
    name = over.name(op="linear_scan", dtype=dtype, layout=layout, H=H, B=B, T=T)
    diagonal = layout == "diagonal"
    matrix = 1 if diagonal else H
    # Bytes of a call: A, b and x, with gradients those of all three.
    number = DTYPES[dtype].itemsize
    needed = {gradients: number * B * H * (matrix + 2.2) * (1 + gradients) for gradients in (False, True)}

    def inputs_of(steps: int, seed: int) -> list[Tensor]:
        source = torch.Generator(over.device).manual_seed(seed)
        shape = (steps, B, H) if diagonal else (steps, B, H, H)
        A = torch.rand(shape, generator=source, device=over.device, dtype=DTYPES[dtype])
        A.mul_(0.2 / matrix).add_(0.8 / matrix)
        return [A, torch.randn(steps, B, H, generator=source, device=over.device, dtype=DTYPES[dtype])]

    def fits(steps: int, gradients: bool) -> bool:
        return needed[gradients] * steps <= over.room

    def exchanges_channels(gradients: bool) -> bool:
        return diagonal and H % over.size == 0 and T % over.size == 0 and fits(2 * T // over.size, gradients)

    def edges_of(run: Callable[..., Tensor]) -> Tensor:
        """States at the edges of all ranks' slices, (2 ranks, B, H)."""
        with torch.no_grad():
            x = run(*inputs_of(wd.slice_sizes(T, over.size)[over.rank], over.rank))
        edges = torch.empty(2 * over.size, B, H, device=over.device, dtype=x.dtype)
        dist.all_gather_into_tensor(edges, torch.stack((x[0], x[-1])))
        return edges

    def edges_on_one() -> Tensor:
        state, edges = None, []
        for rank, size in enumerate(wd.slice_sizes(T, over.size)):
            x = linear_scan(*inputs_of(size, rank), state)
            state = x[-1].clone()
            edges += [x[0].clone(), state]
            del x
        return torch.stack(edges)

    def agree() -> None:
        edges = {"ranks": edges_of(wd.linear_scan)}
        if exchanges_channels(False):
            edges["all_to_all"] = edges_of(scan_by_all_to_all)

        def errors() -> dict[str, float]:
            whole = edges_on_one()
            return {peer: relative_error(found, whole) for peer, found in edges.items()}

        check_agreement(name, over.first(errors), BOUNDS[dtype])

    def pieces_on_one(gradients: bool) -> int:
        """In how many one GPU takes the whole, one after the other."""
        return next(n for n in range(1, T + 1) if fits(-(-T // n), gradients))

    def on_one(gradients: bool) -> float:
        pieces = pieces_on_one(gradients)
        inputs = [t.requires_grad_(gradients) for t in inputs_of(-(-T // pieces), 0)]
        return pieces * over.alone(step_of(linear_scan, inputs, gradients))

    def of_ranks(gradients: bool) -> tuple[dict[str, float], Watched]:
        inputs = [t.requires_grad_(gradients) for t in inputs_of(wd.slice_sizes(T, over.size)[over.rank], over.rank)]
        group = StandIn(over.size // 2, over.size)
        try:
            candidates = {
                "ranks": step_of(wd.linear_scan, inputs, gradients),
                "slice": step_of(linear_scan, inputs, gradients),
                "part": step_of(lambda A, b: wd.linear_scan(A, b, group=group), inputs, gradients),
            }
            if exchanges_channels(gradients):
                candidates["all_to_all"] = step_of(scan_by_all_to_all, inputs, gradients)
            return measure_part(over, candidates), watch(over, candidates["ranks"])
        finally:
            group.close()

    def run(results: Results) -> Rows:
        agree()
        rows: Rows = []
        for gradients in (False, True):
            if not fits(T // over.size, gradients):
                continue
            over.free()
            times, watched = of_ranks(gradients)
            over.free()
            times["one_rank"] = over.first(lambda g=gradients: on_one(g))
            pieces = pieces_on_one(gradients)
            case = name if pieces == 1 else f"{name} pieces_on_one={pieces}"
            rows += compare(over, results, case, "forward_backward" if gradients else "forward", times, watched)
            if not gradients:
                sent = sum(watched.sent) * (over.size - 1)
                others = {"floor": 4 * B * H * (matrix + 1) * (over.size - 1)}
                if diagonal:  # A, b and x, but for the share that stays
                    numbers = 3 * B * H * (T // over.size) * (over.size - 1) // over.size
                    others["all_to_all"] = DTYPES[dtype].itemsize * numbers
                rows += [results.put(name, "sent_to_ranks", "bytes", sent, peer, b) for peer, b in others.items()]
        return rows

    return Entry(name, ("forward", "forward_backward"), run)
