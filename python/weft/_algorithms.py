"""Which algorithm runs a recurrent layer: the names, the limits, and one pure function that decides."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ._ops import WITH_CUDA

__all__ = [
    "ALGORITHMS",
    "AUTO_SCAN",
    "CUDA_MAX_HIDDEN",
    "CUDA_MAX_HIDDEN_FP64",
    "Case",
    "Limits",
    "Table",
    "auto_limits",
    "check_algorithm",
    "choose",
]

ALGORITHMS = ("auto", "persistent", "scan", "newton", "torch", "reference")

MISSING = {
    "persistent": "it arrives with the rnn engine",
    "newton": "it is not implemented yet",
}
"""Reserved names, and why each does not run."""


class Limits(NamedTuple):
    """Where "auto" takes "scan": in a bucket of hidden sizes, T >= min_steps and B <= max_batch."""

    min_steps: int = 1
    max_batch: float = math.inf
    dtypes: frozenset[torch.dtype] | None = None
    """None for those of the table."""
    alone: bool = False
    """Only one layer in one direction that a gradient will pass, on a GPU of compute capability 9.0 or more."""


class Table(NamedTuple):
    """Limits of one cell on one device."""

    dtypes: frozenset[torch.dtype]
    buckets: dict[int, Limits]
    """Largest hidden size of a bucket -> its limits, ascending; no scan above the last."""


_CUDA_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_CPU_DTYPES = frozenset((torch.float32, torch.float64))

# On CUDA a scan costs H times the arithmetic of the sequential chain and wins by its depth: three stages (products
# within chunks, boundaries one after the other, replay of the chunks) of about the square root of T steps each instead
# of T. So it is for small H, long T and batches that leave the device idle. On the CPU the same operator is sequential
# in time; it wins by one call for all steps, until a step's matrix product is large enough to hide torch's calls.
# Above 32 hidden units on CUDA the forward pass is cuDNN's, in fp32, and a step does more on the host: on an H200 it
# pays from a few thousand steps on, for an LSTM from more.
_LONG = Limits(min_steps=3000, max_batch=64, dtypes=frozenset((torch.float32,)), alone=True)
AUTO_SCAN: dict[tuple[str, str], Table] = {
    ("cuda", "rnn_tanh"): Table(_CUDA_DTYPES, {32: Limits(), 128: _LONG}),
    ("cuda", "rnn_relu"): Table(_CUDA_DTYPES, {32: Limits(), 128: _LONG}),
    ("cuda", "gru"): Table(_CUDA_DTYPES, {32: Limits(), 128: _LONG}),
    ("cuda", "lstm"): Table(_CUDA_DTYPES, {32: Limits(), 64: _LONG._replace(min_steps=6000)}),
    ("cpu", "rnn_tanh"): Table(_CPU_DTYPES, {128: Limits()}),
    ("cpu", "rnn_relu"): Table(_CPU_DTYPES, {128: Limits()}),
    ("cpu", "gru"): Table(_CPU_DTYPES, {128: Limits()}),
    ("cpu", "lstm"): Table(_CPU_DTYPES, {128: Limits()}),
}

CUDA_MAX_HIDDEN = {"rnn_tanh": 128, "rnn_relu": 128, "gru": 128, "lstm": 64}
"""H that the CUDA kernels of the backward pass hold (scan_rnn_max_hidden); beyond, it is a slow loop over the steps."""

CUDA_MAX_HIDDEN_FP64 = 32
"""The same in float64 (kScanRnnSmallHidden)."""

_SCAN_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_SCAN_DEVICES = ("cpu", "cuda") if WITH_CUDA else ("cpu",)


class Case(NamedTuple):
    """What the choice looks at."""

    cell: str
    """ "rnn_tanh", "rnn_relu", "gru" or "lstm"."""
    device: str
    dtype: torch.dtype
    """What the layer computes in: the input's dtype, or autocast's."""
    hidden_size: int
    batch: int | None
    steps: int | None
    """T. None, like `batch`, in a compiled graph, where looking at it would tie the graph to a range of sizes: "auto"
    then takes "scan" only where neither matters."""
    packed: bool
    projected: bool
    transformed: bool
    """Under a torch.func transform or in a forward-mode AD level."""
    chains: int = 1
    """Layers times directions."""
    trains: bool = True
    """Whether anything asks for a gradient."""
    capability: tuple[int, int] | None = None
    """The GPU's compute capability, None on a CPU and in a compiled graph."""


def check_algorithm(name: str) -> str:
    """Return the name; ValueError for an unknown one, NotImplementedError for a reserved one."""
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; known are {', '.join(map(repr, ALGORITHMS))}")
    if name in MISSING:
        raise NotImplementedError(f'algorithm="{name}": {MISSING[name]}; use "auto"')
    return name


def why_only_reference(case: Case) -> str | None:
    """Why nothing but the reference can run this case, or None."""
    if case.transformed:
        return "torch.func transforms and forward-mode AD are closed to compiled autograd functions"
    return None


def why_not_scan(case: Case) -> str | None:
    """Why "scan" cannot run this case, or None."""
    if case.packed:
        return "a PackedSequence runs as torch"
    if case.projected:
        return "proj_size runs as torch"
    if case.device not in _SCAN_DEVICES:
        return f"built for {' and '.join(_SCAN_DEVICES)}, not for {case.device}"
    if case.dtype not in _SCAN_DTYPES:
        return f"no kernel for {case.dtype}"
    if case.device == "cuda":
        double = case.dtype == torch.float64
        largest = CUDA_MAX_HIDDEN_FP64 if double else CUDA_MAX_HIDDEN[case.cell]
        if case.hidden_size > largest:
            kernels = f"the kernels of {case.cell}{' in float64' if double else ''}"
            return f"{kernels} hold {largest} hidden units, got {case.hidden_size}"
    return None


def auto_limits(device: str, cell: str, hidden_size: int) -> Limits | None:
    """The limits of the bucket that holds this hidden size; None where none does."""
    for largest, limits in AUTO_SCAN[device, cell].buckets.items():
        if hidden_size <= largest:
            return limits
    return None


def why_auto_skips_scan(case: Case) -> str | None:
    """Why "auto" prefers "torch" to an eligible "scan", or None."""
    dtypes, buckets = AUTO_SCAN[case.device, case.cell]
    limits = auto_limits(case.device, case.cell, case.hidden_size)
    if limits is None:
        return f"auto takes torch above hidden_size {max(buckets)} on {case.device}"
    where = f"at hidden_size {case.hidden_size} on {case.device}"
    if case.dtype not in (limits.dtypes or dtypes):
        return f"auto takes torch in {case.dtype} {where}"
    if case.steps is None or case.batch is None:
        anywhere = limits.min_steps <= 1 and limits.max_batch == math.inf
        return None if anywhere else f"auto takes torch where the length is unknown {where}"
    if case.steps < limits.min_steps:
        return f"auto takes torch below {limits.min_steps} steps {where}"
    if case.batch > limits.max_batch:
        return f"auto takes torch above a batch of {limits.max_batch} {where}"
    if limits.alone:
        if case.chains > 1:
            return f"auto takes torch for several layers or directions {where}"
        if not case.trains:
            return f"auto takes torch where nothing asks for a gradient {where}"
        if case.capability is None or case.capability < (9, 0):
            return f"auto takes torch below compute capability 9.0 {where}"
    return None


def choose(algorithm: str, case: Case) -> tuple[str, str]:
    """The algorithm that runs, and why: "scan", "torch" or "reference"."""
    reason = why_only_reference(case)
    if reason is not None:
        return "reference", reason
    if algorithm in ("torch", "reference"):
        return algorithm, "asked for by name"
    reason = why_not_scan(case)
    if reason is not None:
        return "torch", f"scan: {reason}"
    if algorithm == "scan":
        return "scan", "asked for by name"
    reason = why_auto_skips_scan(case)
    if reason is not None:
        return "torch", f"scan: {reason}"
    return "scan", "within auto's limits"
