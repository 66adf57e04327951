"""Diagonal scans: beside the bytes they move and the package accelerated-scan, read out, batch first, on the host."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import weft
from torch import Tensor

from benchmarks.common import (
    DTYPES,
    Candidate,
    Entry,
    Results,
    case_name,
    check_agreement,
    copy_bandwidth,
    measure,
    peak_memory,
    relative_error,
)

DIAGONAL = [
    # B, H, and lengths for the figure
    (8, 1536, (2048, 16384, 65536)),
    (1, 768, (4096, 16384, 65536)),
    (64, 64, (1024, 4096, 16384)),
    (256, 16, (256, 1024, 4096)),
]


RESIDUALS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.complex64: 1e-5}
"""A few roundings of every element."""


KINDS = DTYPES | {"c64": torch.complex64}


def _factors(*shape: int, kind: torch.dtype, device: str) -> Tensor:
    """A of sizes 0.8 to 1, of any phase where it is complex."""
    size = torch.rand(shape, device=device).mul_(0.2).add_(0.8)
    return torch.polar(size, 6.28 * torch.rand(shape, device=device)) if kind.is_complex else size.to(kind)


def diagonal_entry(H: int, B: int, T: int, dtype: str, device: str = "cuda") -> Entry:
    """A diagonal `linear_scan` without x0, forward and with the gradients of A and b, against its floor: 3 streams, and
    5 more for the gradients. On a CPU the floor is measured by torch's own kernels that read and write as much, into
    memory as fresh."""
    name = case_name(op="linear_scan", device=device, dtype=dtype, layout="diagonal", H=H, B=B, T=T)

    def run(results: Results) -> list[dict[str, str]]:
        return _measure_diagonal(name, H, B, T, dtype, device, results)

    return Entry(name, ("forward", "forward_backward"), run)


def _measure_diagonal(name: str, H: int, B: int, T: int, dtype: str, device: str, results: Results) -> list:
    torch.manual_seed(0)
    kind = KINDS[dtype]
    A = _factors(T, B, H, kind=kind, device=device).requires_grad_()
    drawn = torch.promote_types(kind, torch.float32)
    b, weight = (torch.randn(T, B, H, dtype=drawn, device=device).to(kind) for _ in range(2))
    b.requires_grad_()

    def both(scan, A, b, weight):
        x = scan(A, b)
        return x, *torch.autograd.grad(x, (A, b), weight)

    x, grad_A, grad_b = both(weft.scan.linear_scan, A, b, weight)
    with torch.no_grad():
        errors = {
            "x": residual(A, b, torch.zeros_like(b[0]), x),
            "the gradient of b": residual_of_gradient(A, weight, grad_b),
            "the gradient of A": _error(grad_A[1:], grad_b[1:] * x[:-1].conj()),
        }
    check_agreement(name, errors, RESIDUALS[kind])
    del x, grad_A, grad_b
    peer = _accelerated_scan(T) if device == "cuda" and dtype == "fp32" else None
    theirs = None if peer is None else [t.detach().permute(1, 2, 0).contiguous() for t in (A, b, weight)]
    rows = []
    for metric, streams in (("forward", 3), ("forward_backward", 8)):
        with torch.set_grad_enabled(metric == "forward_backward"):

            def candidate(scan, A, b, weight, metric=metric) -> Candidate:
                if metric == "forward":
                    return Candidate(lambda _: scan(A, b))
                return Candidate(lambda _: both(scan, A, b, weight))

            candidates = {"weft": candidate(weft.scan.linear_scan, A, b, weight)}
            if theirs is not None:
                leaves = [t.requires_grad_() for t in theirs[:2]]
                candidates["accelerated-scan"] = candidate(peer, *leaves, theirs[2])
            if device == "cpu":
                candidates["floor"] = Candidate(lambda _, metric=metric: _streams(A, b, weight, metric))
            times = measure(candidates, device)
        mine = times.pop("weft")
        if device == "cuda":
            times["floor"] = streams * b.nbytes / copy_bandwidth() * 1e3
        rows += [results.put(name, metric, "ms", mine, peer_name, time) for peer_name, time in times.items()]
    return rows


def _error(value: Tensor, reference: Tensor) -> float:
    """relative_error, of complex numbers as pairs."""
    if value.is_complex():
        value, reference = (torch.view_as_real(t.resolve_conj()) for t in (value, reference))
    return relative_error(value, reference)


def batch_first_entry(H: int, B: int, T: int, dtype: str) -> Entry:
    """The same scan of (B, T, H), read where it lies, beside (T, B, H)."""
    name = case_name(op="linear_scan", device="cuda", dtype=dtype, layout="batch_first", H=H, B=B, T=T)

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        kind = KINDS[dtype]
        A, (b, weight) = (
            _factors(T, B, H, kind=kind, device="cuda"),
            (torch.randn(T, B, H, device="cuda").to(kind) for _ in range(2)),
        )
        inputs = {"time_first": [A, b, weight], "weft": [t.transpose(0, 1).contiguous() for t in (A, b, weight)]}

        def both(key: str) -> list[Tensor]:
            A, b, weight = inputs[key]
            x = weft.scan.linear_scan(A, b, batch_first=key == "weft")
            return [x.detach(), *torch.autograd.grad(x, (A, b), weight)] if x.requires_grad else [x]

        for tensors in inputs.values():
            for t in tensors[:2]:
                t.requires_grad_()
        pairs = zip(both("weft"), both("time_first"), strict=True)
        errors = {str(i): _error(x.transpose(0, 1), y) for i, (x, y) in enumerate(pairs)}
        check_agreement(name, errors, RESIDUALS[kind])
        rows = []
        for metric in ("forward", "forward_backward"):
            with torch.set_grad_enabled(metric == "forward_backward"):
                times = measure({key: Candidate(lambda _, key=key: both(key)) for key in inputs}, "cuda")
            rows.append(results.put(name, metric, "ms", times["weft"], "time_first", times["time_first"]))
        return rows

    return Entry(name, ("forward", "forward_backward"), run)


def read_out_entry(N: int, H: int, B: int, T: int, dtype: str, full: bool = False) -> Entry:
    """A constant diagonal system of N states a channel that is read out, forward and with the gradients of A, b and c,
    beside the scan that writes the states and einsum, and the most memory that each needs. `full`: b has N numbers."""
    metrics = ("forward", "forward_backward", "peak_memory")
    inputs = {"inputs": "N"} if full else {}
    name = case_name(op="linear_scan_readout", device="cuda", dtype=dtype, H=H, B=B, T=T, N=N, **inputs)

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        kind = KINDS[dtype]
        drawn = torch.promote_types(kind, torch.float32)
        A = _factors(H, N, kind=kind, device="cuda").requires_grad_()
        b = torch.randn(T, B, H, N if full else 1, dtype=drawn, device="cuda").to(kind).requires_grad_()
        c = torch.randn(H, N, dtype=drawn, device="cuda").to(kind).requires_grad_()
        weight = torch.randn(T, B, H, dtype=drawn, device="cuda").to(kind)

        def fused() -> Tensor:
            return weft.scan.linear_scan(A, b, c=c)

        def apart() -> Tensor:
            x = weft.scan.linear_scan(A.flatten(), b.expand(T, B, H, N).flatten(2))
            return torch.einsum("tbhn,hn->tbh", x.unflatten(2, (H, N)), c)

        def both(function: Callable[[], Tensor]) -> list[Tensor]:
            y = function()
            return [y.detach(), *torch.autograd.grad(y, (A, b, c), weight)]

        errors = {str(i): _error(x, y) for i, (x, y) in enumerate(zip(both(fused), both(apart), strict=True))}
        check_agreement(name, errors, 1e-3)
        rows = []
        for metric, call in (("forward", lambda function: function()), ("forward_backward", both)):
            with torch.set_grad_enabled(metric == "forward_backward"):
                candidates = {
                    key: Candidate(lambda _, function=function, call=call: call(function))
                    for key, function in (("weft", fused), ("scan_einsum", apart))
                }
                times = measure(candidates, "cuda")
            rows.append(results.put(name, metric, "ms", times["weft"], "scan_einsum", times["scan_einsum"]))
        mine, theirs = peak_memory(lambda: both(fused)), peak_memory(lambda: both(apart))
        rows.append(results.put(name, "peak_memory", "bytes", mine, "scan_einsum", theirs))
        return rows

    return Entry(name, metrics, run)


HOST_CALLS = 100


def host_entry(device: str = "cuda") -> Entry:
    """Time of the host per call of a small diagonal scan, and of its gradients alone, beside an operation that launches
    nothing."""
    H, B, T = 64, 4, 64
    name = case_name(op="linear_scan", device=device, dtype="fp32", layout="diagonal", H=H, B=B, T=T)

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        A, b = torch.rand(T, B, H, device=device), torch.randn(T, B, H, device=device)
        x = weft.scan.linear_scan(A, b)
        calls = {
            "forward": lambda: weft.scan.linear_scan(A, b),
            "backward": lambda: torch.ops.weft.linear_scan_backward(b, A, x, None, False, False, [True, True, False]),
            "empty_like": lambda: torch.empty_like(b),
        }

        def repeated(call: Callable[[], object]) -> Candidate:
            def run(_: object) -> None:
                for _ in range(HOST_CALLS):
                    call()

            return Candidate(run)

        times = measure({key: repeated(call) for key, call in calls.items()}, "cpu")
        us = {key: time * 1e3 / HOST_CALLS for key, time in times.items()}
        return [
            results.put(name, f"host_{key}", "us", us[key], "empty_like", us["empty_like"])
            for key in ("forward", "backward")
        ]

    return Entry(name, ("host_forward", "host_backward"), run)


def _streams(A: Tensor, b: Tensor, weight: Tensor, metric: str) -> list[Tensor]:
    """Two tensors read and one written; with gradients, three more read and two written."""
    with torch.no_grad():
        return [A + b] + ([A * weight, b.clone()] if metric == "forward_backward" else [])


def _accelerated_scan(T: int):
    """The peer's function, None where it is not installed or does not take so many steps. Its half types are left out:
    version 0.3.1 takes four of their elements for 16 bytes, so that it reads and writes beyond its tensors."""
    if importlib.util.find_spec("accelerated_scan") is None:
        print("accelerated-scan is not installed: its rows are left out")
        return None
    if T & (T - 1) or not 32 <= T <= 65536:
        return None
    from accelerated_scan.warp import scan

    return scan


def residual_of_gradient(A: Tensor, weight: Tensor, gradient: Tensor) -> float:
    """How far the gradient of b is from lambda[t] = A[t+1] lambda[t+1] + weight[t]."""
    worst = _error(gradient[-1], weight[-1])
    for part in torch.arange(A.shape[0] - 1, device="cpu").chunk(max(1, A.nbytes // 2**28)):
        start, stop = int(part[0]), int(part[-1]) + 1
        expected = A[start + 1 : stop + 1].conj() * gradient[start + 1 : stop + 1] + weight[start:stop]
        worst = max(worst, _error(gradient[start:stop], expected))
    return worst


def residual(A: Tensor, b: Tensor, x0: Tensor, x: Tensor) -> float:
    """How far x is from satisfying x[t] = A[t] x[t-1] + b[t], step by step; A contracts, so errors do not grow.

    In slices of time, so that the check needs no second copy of A.
    """
    worst = 0.0
    slices = max(1, A.nbytes // 2**28)
    for part in torch.arange(x.shape[0], device="cpu").chunk(slices):
        start, stop = int(part[0]), int(part[-1]) + 1
        before = torch.cat([x0[None] if start == 0 else x[start - 1 : start], x[start : stop - 1]])
        a = A[start:stop]
        product = a * before if a.dim() == 3 else (a @ before.unsqueeze(-1)).squeeze(-1)
        worst = max(worst, _error(x[start:stop], product + b[start:stop]))
    return worst
