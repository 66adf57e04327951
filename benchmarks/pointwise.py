"""Recurrences of pointwise steps: ParaGRU's cell, its layers beside pararnn-torch, spiking neurons, first calls."""

from __future__ import annotations

import functools
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

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
    relative_error,
)

POINTWISE = [
    # B, H, T, dtype, what is added to the update gates' inputs
    (8, 1536, 2048, "fp32", 0.0),
    (8, 1536, 16384, "fp32", 0.0),
    (1, 768, 65536, "fp32", 0.0),
    (1, 768, 65536, "fp32", -5.0),
    (64, 1536, 2048, "fp32", 0.0),
    (64, 1536, 2048, "bf16", 0.0),
]


MEMORIES = (2.0, 0.0, -2.0, -3.5, -5.0, -6.5, -8.0, -10.0)
"""What is added to the update gates' inputs, for the figure: the nearer the gates are to 0, the longer it remembers."""


STEP_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def paragru_step(h: Tensor, x: Sequence[Tensor], p: Sequence[Tensor]) -> Tensor:
    z, r = torch.sigmoid(x[0] + p[0] * h), torch.sigmoid(x[1] + p[1] * h)
    return h + z * (torch.tanh(x[2] + p[2] * (r * h)) - h)


def spiking_step(v: Tensor, x: Tensor, decay: Tensor) -> Tensor:
    """A leaky neuron that fires above 1, and backward a sigmoid."""
    v = torch.sigmoid(decay) * v + x
    soft = torch.sigmoid(4 * (v - 1))
    fired = soft + ((v > 1).to(v.dtype) - soft).detach()
    return v * (1 - fired)


def _pointwise_arguments(B: int, H: int, T: int, kind: torch.dtype, shift: float, device: str):
    torch.manual_seed(0)
    x = [torch.randn(T, B, H, device=device).to(kind) for _ in range(3)]
    x[0] += shift
    h = torch.zeros(B, H, device=device, dtype=kind)
    p = [torch.rand(H, device=device).sub_(0.5).to(kind) for _ in range(3)]
    leaves = [t.requires_grad_() for t in (h, *x, *p)]
    return h, tuple(x), tuple(p), leaves


def pointwise_entry(B: int, H: int, T: int, dtype: str, shift: float = 0.0, device: str = "cuda") -> Entry:
    """ParaGRU's cell: forward against 4 streams, with all gradients against 12; and against a plain walk, on a CPU
    against the loop."""
    more = {} if shift == 0 else {"shift": f"{shift:g}"}
    name = case_name(op="pointwise_scan", device=device, dtype=dtype, H=H, B=B, T=T, **more)

    metrics = ("forward", "forward_backward", "memory") if B == 1 else ("forward", "forward_backward")

    def run(results: Results) -> list[dict[str, str]]:
        kind = DTYPES[dtype]
        h, x, p, leaves = _pointwise_arguments(B, H, T, kind, shift, device)
        weight = torch.randn(T, B, H, device=device).to(kind)
        with torch.no_grad():
            states = weft.scan.pointwise_scan(paragru_step, h, x, p)
            before = torch.cat([h[None], states[:-1]])
            errors = [
                relative_error(states[part], paragru_step(before[part], [t[part] for t in x], p))
                for part in (slice(T // 2), slice(T // 2, T))
            ]
        check_agreement(name, {"steps": max(errors)}, STEP_BOUNDS[kind])
        del states, before
        peers = {"loop": weft.scan.pointwise_scan_reference} if device == "cpu" else {
            "walk": functools.partial(weft.scan.pointwise_scan, algorithm="walk")
        }  # fmt: skip
        rows = []
        if "memory" in metrics:
            rows.append(results.put(name, "memory", "steps", _memory(x, p), "sequence", T))
        for metric, streams in (("forward", 4), ("forward_backward", 12)):
            with torch.set_grad_enabled(metric == "forward_backward"):

                def candidate(scan, metric=metric) -> Candidate:
                    if metric == "forward":
                        return Candidate(lambda _: scan(paragru_step, h, x, p))
                    return Candidate(lambda _: torch.autograd.grad(scan(paragru_step, h, x, p), leaves, weight))

                scans = {"weft": weft.scan.pointwise_scan, **peers}
                times = measure({key: candidate(scan) for key, scan in scans.items()}, device)
            mine = times.pop("weft")
            if device == "cuda":
                times["floor"] = streams * weight.nbytes / copy_bandwidth() * 1e3
            rows += [results.put(name, metric, "ms", mine, peer, time) for peer, time in times.items()]
        return rows

    return Entry(name, metrics, run)


@torch.no_grad()
def _memory(x: Sequence[Tensor], p: Sequence[Tensor]) -> float:
    """Steps until walks in float64 from 0 and from 1 agree to 2^-22, the mean of the channels; all where never."""
    wide, parameters = tuple(t.double() for t in x), tuple(t.double() for t in p)
    low = torch.zeros_like(wide[0][0])
    walks = (weft.scan.pointwise_scan(paragru_step, h, wide, parameters, algorithm="walk") for h in (low, low + 1))
    apart = (next(walks) - next(walks)).abs() > 2.0**-22
    return (apart * torch.arange(1, len(apart) + 1, device=apart.device).view(-1, 1, 1)).amax(0).double().mean().item()


def para_entry(cell: str, B: int, H: int, T: int, inputs: int = 16) -> Entry:
    """A ParaGRU or ParaLSTM layer, in training mode, against that of pararnn-torch on the same sizes; its states are
    compared with a plain walk's. Nothing where the package is not installed."""
    name = case_name(cell=cell, device="cuda", dtype="fp32", H=H, B=B, T=T, inputs=inputs)

    def run(results: Results) -> list[dict[str, str]]:
        if importlib.util.find_spec("pararnn") is None:
            print("pararnn-torch is not installed: its rows are left out")
            return []
        import pararnn

        torch.manual_seed(0)
        kind = {"paragru": "ParaGRU", "paralstm": "ParaLSTM"}[cell]
        layer = getattr(weft.nn, kind)(inputs, H, device="cuda")
        peer = pararnn.ParaRNN(getattr(pararnn, kind)(inputs, H)).cuda().train()
        x = torch.randn(T, B, inputs, device="cuda")
        theirs = x.transpose(0, 1).contiguous()
        walk = getattr(weft.nn, kind)(inputs, H, device="cuda", algorithm="walk")
        walk.load_state_dict(layer.state_dict())
        with torch.no_grad():
            check_agreement(name, {"output": relative_error(layer(x)[0], walk(x)[0])}, 1e-5)
        weights = [torch.randn(T, B, H, device="cuda"), torch.randn(B, T, H, device="cuda")]

        def output(net: torch.nn.Module) -> Tensor:
            if net is layer:
                return layer(x)[0]
            found = peer(theirs)
            return found[0] if isinstance(found, tuple) else found

        def both(net: torch.nn.Module, weight: Tensor):
            return torch.autograd.grad(output(net), list(net.parameters()), weight, allow_unused=True)

        rows = []
        for metric in ("forward", "forward_backward"):
            with torch.set_grad_enabled(metric == "forward_backward"):
                if metric == "forward":
                    runs = {"weft": lambda _: output(layer), "pararnn": lambda _: output(peer)}
                else:
                    runs = {"weft": lambda _: both(layer, weights[0]), "pararnn": lambda _: both(peer, weights[1])}
                times = measure({key: Candidate(call) for key, call in runs.items()}, "cuda")
            rows.append(results.put(name, metric, "ms", times["weft"], "pararnn", times["pararnn"]))
        return rows

    return Entry(name, ("forward", "forward_backward"), run)


def spiking_entry(N: int = 262144, T: int = 1024) -> Entry:
    """Neurons of one's own with all gradients, against their loop over time, forward and backward, in a CUDA graph."""
    name = case_name(op="pointwise_scan", model="spiking", device="cuda", dtype="fp32", H=N, B=1, T=T)

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        v = torch.zeros(N, device="cuda", requires_grad=True)
        x = torch.rand(T, N, device="cuda", requires_grad=True)
        decay = torch.zeros((), device="cuda", requires_grad=True)
        weight = torch.randn(T, N, device="cuda")

        def both(scan):
            return torch.autograd.grad(scan(spiking_step, v, x, decay), (v, x, decay), weight)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            want = both(weft.scan.pointwise_scan_reference)
        torch.cuda.current_stream().wait_stream(stream)
        found = both(weft.scan.pointwise_scan)
        # Neurons at the threshold fire by a rounding: a few of them.
        check_agreement(name, {"gradient": relative_error(found[1], want[1])}, 2e-2)
        del want, found
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            both(weft.scan.pointwise_scan_reference)
        candidates = {
            "weft": Candidate(lambda _: both(weft.scan.pointwise_scan)),
            "captured": Candidate(lambda _: graph.replay()),
        }
        times = measure(candidates, "cuda")
        return [results.put(name, "forward_backward", "ms", times["weft"], "captured", times["captured"])]

    return Entry(name, ("forward_backward",), run)


_FIRST_CALL = """
import time, torch, weft
h, x = (torch.zeros(*size, 4096, device="cuda", requires_grad=True) for size in ((), (64,)))
torch.tanh(x).sum().backward()
def step(h, x, p):
    return torch.tanh(torch.sigmoid(x) * h + x)
torch.cuda.synchronize()
start = time.perf_counter()
weft.scan.pointwise_scan(step, h, x).sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_call_entry() -> Entry:
    """The first call of a step that is new to the process, forward and backward: traced and compiled, beside one whose
    machine code is on disk already."""
    name = case_name(op="pointwise_scan", device="cuda", dtype="fp32", H=4096, B=1, T=64)

    def run(results: Results) -> list[dict[str, str]]:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "WEFT_CACHE_DIR": folder}

            def first() -> float:
                command = [sys.executable, "-c", _FIRST_CALL]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                return float(done.stdout) * 1e3

            compiled = first()
            from_disk = statistics.median(first() for _ in range(3))
        return [results.put(name, "first_call", "ms", compiled, "from_disk", from_disk)]

    return Entry(name, ("first_call",), run)
