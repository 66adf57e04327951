"""The scan engine against torch.nn and against the bandwidth of the memory.

``python -m benchmarks.scan [FILTER]`` measures the table into results/scan.csv: layers with a random gradient at every
output and gradients for input, h0, c0 and all parameters; `linear_scan` against the bytes it must move and, diagonal in
fp32 on CUDA, against the package accelerated-scan where it is installed (in that package's own layout, (B, H, T));
batch first beside time first; a scan that is read out beside scan and einsum; peak memory; errors against fp64; what
the minGRUs of examples/char_lm.py reach beside a GRU, and how fast they train. `pointwise_scan` with ParaGRU's cell
against the bytes, beside a plain walk; its layers against the package pararnn-torch, where it is installed (with as
many Newton iterations as it takes by itself); spiking neurons against their loop in a CUDA graph; the first call of a
new step. FILTER is a substring of the case or the metric.

``python -m benchmarks.scan grid`` measures the training step of ``algorithm="auto"`` against torch.nn over sequence
length, batch and hidden size into results/scan_auto.csv, in random order within ``--minutes``, what this commit has
not measured first; ``--algorithm scan`` forces that algorithm, to see where it starts to pay.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import weft
from torch import Tensor
from weft._rnn.dropin.torch_limits import why_not_cudnn
from weft._rnn.select.costs import GATES
from weft.data import Vocabulary, python_docs, split

from benchmarks.common import (
    DTYPES,
    RESULTS,
    ROOT,
    Candidate,
    Entry,
    Results,
    begin_table,
    case_name,
    check_agreement,
    copy_bandwidth,
    exit_with,
    hardware,
    measure,
    parse_case,
    peak_memory,
    read_rows,
    relative_error,
    run_entries,
    show,
    table_parser,
)
from benchmarks.layers import LayerCase, LayerStep, check_layers, relative_errors

GRID_T = (10, 30, 100, 300, 1000, 3000, 10000, 30000)
GRID_B = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GRID_H = (8, 20, 32, 64, 128)
GRID_CELLS = ("rnn_tanh", "gru", "lstm")


def _layer_entry(case: LayerCase, metrics: tuple[str, ...] = ("forward", "backward", "forward_backward")) -> Entry:
    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        check_layers(step)
        rows = []
        for metric in metrics:
            times = measure(step.candidates(metric), case.device)
            rows.append(results.put(case.name, metric, "ms", times["weft"], "torch.nn", times["torch.nn"]))
        return rows

    return Entry(case.name, metrics, run)


def _memory_entry(case: LayerCase) -> Entry:
    """Peak memory of a step beside torch's, and what Weft needs beyond torch beside the gates' activations."""

    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        for layer in (step.weft, step.peer):
            step.forward_backward(layer)
        mine = peak_memory(lambda: step.forward_backward(step.weft))
        peers = peak_memory(lambda: step.forward_backward(step.peer))
        gates = 4 * case.T * case.B * case.H * GATES[case.cell]
        return [
            results.put(case.name, "peak_memory", "bytes", mine, "torch.nn", peers),
            results.put(case.name, "memory_beyond_torch", "bytes", mine - peers, "gate_activations", gates),
        ]

    return Entry(case.name, ("peak_memory", "memory_beyond_torch"), run)


def _error_entry(case: LayerCase) -> Entry:
    """The largest error of the output and the gradients against fp64, Weft's and torch's, without TF32."""

    def run(results: Results) -> list[dict[str, str]]:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            step = LayerStep(case)
            reference = step.reference()
            mine = max(relative_errors(step.results(step.weft), reference).values())
            peers = max(relative_errors(step.results(step.peer), reference).values())
        return [results.put(case.name, "error", "relative", mine, "torch.nn", peers)]

    return Entry(case.name, ("error",), run)


def _dense_entry(H: int, B: int, T: int) -> Entry:
    """A dense `linear_scan` against its floor: it cannot do with less than two reads of A, one to form the chunks'
    products and one to replay them."""
    name = case_name(op="linear_scan", device="cuda", dtype="fp32", layout="dense", H=H, B=B, T=T)

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        b = torch.randn(T, B, H, device="cuda")
        A = torch.randn(T, B, H, H, device="cuda").mul_(0.5 / H**0.5)
        x0 = torch.randn(B, H, device="cuda")
        x = weft.scan.linear_scan(A, b, x0)
        check_agreement(name, {"x": _residual(A, b, x0, x)}, 1e-5)
        del x
        times = measure({"weft": Candidate(lambda _: weft.scan.linear_scan(A, b, x0))}, "cuda")
        floor = 2 * A.nbytes / copy_bandwidth() * 1e3
        return [results.put(name, "forward", "ms", times["weft"], "floor", floor)]

    return Entry(name, ("forward",), run)


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


def _diagonal_entry(H: int, B: int, T: int, dtype: str, device: str = "cuda") -> Entry:
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
            "x": _residual(A, b, torch.zeros_like(b[0]), x),
            "the gradient of b": _residual_of_gradient(A, weight, grad_b),
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


def _batch_first_entry(H: int, B: int, T: int, dtype: str) -> Entry:
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


def _read_out_entry(N: int, H: int, B: int, T: int, dtype: str, full: bool = False) -> Entry:
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


def _host_entry(device: str = "cuda") -> Entry:
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


LANGUAGE_MODEL_SECONDS = {"cuda": 8, "cpu": 30}


def _language_model_entry(device: str = "cuda", seconds: float | None = None) -> Entry:
    """What examples/char_lm.py compares: a stack of minGRUs beside a GRU, each trained on Python's documentation for so
    many seconds; bits per character of the tenth that was held out, and characters per second of training."""
    seconds = LANGUAGE_MODEL_SECONDS[device] if seconds is None else seconds
    folder = str(ROOT / "examples")
    sys.path.insert(0, folder)  # where the example finds its neighbours
    try:
        example = runpy.run_path(f"{folder}/char_lm.py")
    finally:
        sys.path.remove(folder)
    options = example["parse"](["--device", device, "--seconds", str(seconds), "--steps", "1000000"])
    sizes = {"H": options.hidden, "B": options.batch, "T": options.length}
    name = case_name(cell="mingru", model="char_lm", device=device, dtype="fp32", **sizes, seconds=f"{seconds:g}")

    def run(results: Results) -> list[dict[str, str]]:
        text = python_docs()
        vocabulary = Vocabulary.of(text)
        tokens, held_out = split(vocabulary.encode(text).to(device))
        speeds, bits = {}, {}
        for cell, model, more in (("gru", "CharLM", [options.algorithm]), ("mingru", "BlocksLM", [])):
            torch.manual_seed(0)
            net = example[model](len(vocabulary), options.embedding, options.hidden, *more).to(device)
            speeds[cell], _ = example["train"](net, tokens, options)
            bits[cell] = example["bits_per_character"](net, held_out)
        return [
            results.put(name, "bits_per_character", "bits", bits["mingru"], "gru", bits["gru"]),
            results.put(name, "throughput", "characters/s", speeds["mingru"], "gru", speeds["gru"]),
        ]

    return Entry(name, ("bits_per_character", "throughput"), run)


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


def _pointwise_entry(B: int, H: int, T: int, dtype: str, shift: float = 0.0, device: str = "cuda") -> Entry:
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


def _para_entry(cell: str, B: int, H: int, T: int, inputs: int = 16) -> Entry:
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


def _spiking_entry(N: int = 262144, T: int = 1024) -> Entry:
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


def _first_call_entry() -> Entry:
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


def _residual_of_gradient(A: Tensor, weight: Tensor, gradient: Tensor) -> float:
    """How far the gradient of b is from lambda[t] = A[t+1] lambda[t+1] + weight[t]."""
    worst = _error(gradient[-1], weight[-1])
    for part in torch.arange(A.shape[0] - 1, device="cpu").chunk(max(1, A.nbytes // 2**28)):
        start, stop = int(part[0]), int(part[-1]) + 1
        expected = A[start + 1 : stop + 1].conj() * gradient[start + 1 : stop + 1] + weight[start:stop]
        worst = max(worst, _error(gradient[start:stop], expected))
    return worst


def _residual(A: Tensor, b: Tensor, x0: Tensor, x: Tensor) -> float:
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


def table(device: str, algorithm: str = "auto") -> Iterator[Entry]:
    """Every entry of the table that runs on this device."""
    if device == "cpu":
        for dtype in ("fp32", "bf16"):
            yield _diagonal_entry(256, 8, 4096, dtype, device="cpu")
        yield _pointwise_entry(8, 256, 1000, "fp32", device="cpu")
        for cell in ("rnn_tanh", "gru"):
            yield _layer_entry(LayerCase(cell, 20, 16, 1000, device="cpu", algorithm=algorithm))
            yield _error_entry(LayerCase(cell, 20, 16, 1000, device="cpu", algorithm=algorithm))
        yield _language_model_entry("cpu")
        return
    for T in (1000, 3000, 10000, 30000):
        yield _layer_entry(LayerCase("rnn_tanh", 20, 16, T, algorithm=algorithm))
    for T, inputs in ((259, 38), (517, 24), (1034, 12)):
        for B in (16, 32, 64):
            yield _layer_entry(LayerCase("gru", 20, B, T, inputs, algorithm=algorithm))
    for T in (1000, 10000):
        yield _layer_entry(LayerCase("lstm", 20, 16, T, algorithm=algorithm))
    for cell, H in (("rnn_tanh", 64), ("rnn_tanh", 128), ("gru", 64), ("gru", 128), ("lstm", 64)):
        yield _layer_entry(LayerCase(cell, H, 16, 10000, algorithm=algorithm))
        yield _error_entry(LayerCase(cell, H, 16, 1000, algorithm="scan"))
    for B, H, lengths in DIAGONAL:
        for T in lengths:
            yield _diagonal_entry(H, B, T, "fp32")
    for dtype in ("bf16", "fp16"):
        for B, H, T in ((8, 1536, 16384), (8, 1536, 65536), (1, 768, 65536)):
            yield _diagonal_entry(H, B, T, dtype)
    for B, H, T, dtype, shift in POINTWISE:
        yield _pointwise_entry(B, H, T, dtype, shift)
    for shift in MEMORIES:
        if shift not in (0.0, -5.0):
            yield _pointwise_entry(1, 768, 65536, "fp32", shift)
    for cell in ("paragru", "paralstm"):
        for B, H, T, dtype, shift in POINTWISE:
            if dtype == "fp32" and not shift:
                yield _para_entry(cell, B, H, T)
    yield _spiking_entry()
    yield _first_call_entry()
    for B, H, T in ((8, 1536, 16384), (1, 768, 65536)):
        yield _diagonal_entry(H, B, T, "c64")
    for B, H, T, dtype in ((8, 1536, 16384, "fp32"), (8, 1536, 16384, "bf16"), (4, 768, 16384, "fp32")):
        yield _batch_first_entry(H, B, T, dtype)
    for dtype, N in itertools.product(("fp32", "c64"), (16, 64)):
        yield _read_out_entry(N, 512, 8, 2048, dtype)
    yield _read_out_entry(16, 512, 8, 2048, "fp32", full=True)
    yield _host_entry()
    yield _dense_entry(20, 16, 30000)
    yield _language_model_entry()
    for cell in GATES:
        yield _memory_entry(LayerCase(cell, 20, 16, 30000, algorithm=algorithm))
        yield _memory_entry(LayerCase(cell, 64, 16, 30000, algorithm="scan"))
    for dtype in ("fp32", "fp16", "bf16"):
        for cell in GATES:
            yield _error_entry(LayerCase(cell, 20, 16, 1000, dtype=dtype, algorithm=algorithm))


def run_table(options: argparse.Namespace) -> None:
    results = Results(options.output or RESULTS / "scan.csv")
    failures: list[str] = []
    for device in options.devices:
        entries = [entry for entry in table(device, options.algorithm) if entry.matches(options.filter)]
        failures += run_entries(entries, results)
    exit_with(failures)


def grid_cases(options: argparse.Namespace) -> list[LayerCase]:
    """The grid, but for the points that torch's own layer cannot run."""
    return [
        LayerCase(cell, H, B, T, inputs=H, device=device, algorithm=options.algorithm)
        for device in options.devices
        for cell in options.cells
        for T in options.T
        for B in options.B
        for H in options.H
        if why_not_cudnn(device, cell, H, T, T * B) is None
    ]


def run_grid(options: argparse.Namespace) -> None:
    results = Results(options.output or RESULTS / "scan_auto.csv")
    cases = grid_cases(options)
    random.Random(time.time_ns()).shuffle(cases)
    # Stable: within the missing ones and within the present ones the order stays random.
    cases.sort(key=lambda c: results.measured(c.name, "forward_backward", "torch.nn", hardware(c.device)))
    deadline = time.monotonic() + 60 * options.minutes
    done, skipped, lost = 0, [], []
    for case in cases:
        if time.monotonic() > deadline:
            break
        try:
            _measure_grid_point(case, results)
            done += 1
        except torch.OutOfMemoryError:
            skipped.append(f"{case.name}: does not fit into memory")
        except torch.AcceleratorError as error:
            lost.append(f"{case.name}: the GPU is lost to this process: {error}")
            break
        except (RuntimeError, NotImplementedError) as error:
            skipped.append(f"{case.name}: {error}")
        if case.device == "cuda" and case.T * case.B * case.H > 2**24:
            torch.cuda.empty_cache()
    results.save()
    print("\n".join([f"{done} of {len(cases)} points measured, {len(skipped)} skipped", *skipped]))
    slower = slower_than_torch(list(results.rows.values()))
    print(f"slower than torch.nn by more than the bound: {len(slower)}")
    show(slower)
    if lost:
        exit_with(lost)


def _measure_grid_point(case: LayerCase, results: Results) -> None:
    step = LayerStep(case)
    check_layers(step)
    start = time.perf_counter()
    step.forward_backward(step.peer)
    if case.device == "cuda":
        torch.cuda.synchronize()
    # A long step hardly varies, and a grid of ten of each would not fit into a few minutes.
    long = time.perf_counter() - start > 0.02
    rounds = {"warmup": 1, "repeats": 3, "at_most": 0.0} if long else {"at_most": 0.15}
    times = measure(step.candidates("forward_backward"), case.device, **rounds)
    results.put(case.name, "forward_backward", "ms", times["weft"], "torch.nn", times["torch.nn"])


def slower_than_torch(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Rows of "auto" that lose to torch.nn by more than 5% (below 0.5 ms: by more than 0.02 ms), worst first."""

    def loses(row: dict[str, str]) -> bool:
        mine, peers = float(row["weft"]), float(row["peer_value"])
        return mine > (peers + 0.02 if peers < 0.5 else 1.05 * peers)

    auto = [row for row in rows if "algorithm" not in parse_case(row["case"])]
    return sorted(filter(loses, auto), key=lambda row: float(row["ratio"]))


def main(arguments: list[str] | None = None) -> None:
    filters = "substring of case or metric; `grid`: the grid, into scan_auto.csv, by default on one device"
    parser = table_parser("scan", __doc__, filters=filters, minutes=None)
    parser.add_argument("--algorithm", default="auto", help='of Weft\'s layers (default "auto")')
    grid = parser.add_argument_group("grid")
    grid.add_argument("--minutes", type=float, default=8.0, help="budget of wall clock (default 8)")
    grid.add_argument("--cells", nargs="+", choices=tuple(GATES), default=GRID_CELLS)
    grid.add_argument("--T", nargs="+", type=int, default=GRID_T)
    grid.add_argument("--B", nargs="+", type=int, default=GRID_B)
    grid.add_argument("--H", nargs="+", type=int, default=GRID_H)
    grid.add_argument("--report", action="store_true", help="only list the grid's rows that lose to torch.nn")
    options = parser.parse_args(arguments)
    devices = begin_table(options)
    if options.report:
        show(slower_than_torch(read_rows(options.output or RESULTS / "scan_auto.csv")))
        return
    on_grid = options.filter == "grid"
    if options.devices is None:
        options.devices = devices[:1] if on_grid else devices
    (run_grid if on_grid else run_table)(options)


if __name__ == "__main__":
    main()
