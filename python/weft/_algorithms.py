"""Which algorithm runs a recurrent layer: the names, the limits, and one pure function that decides."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._ops import WITH_CUDA

__all__ = ["ALGORITHMS", "AUTO_SCAN", "Case", "Limits", "check_algorithm", "choose"]

ALGORITHMS = ("auto", "persistent", "scan", "newton", "torch", "reference")

MISSING = {
    "persistent": "it arrives with the rnn engine",
    "newton": "it is not implemented yet",
}
"""Reserved names, and why each does not run."""


class Limits(NamedTuple):
    """Where "auto" takes "scan". At hidden size H, sequences of T steps: H <= max_hidden and T >= min_steps."""

    max_hidden: int
    min_steps: int
    dtypes: frozenset[torch.dtype]


_CUDA_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_CPU_DTYPES = frozenset((torch.float32, torch.float64))

# A scan costs H times the arithmetic of the sequential chain and wins by its depth, log T for T: so small H and long T
# on a GPU. On the CPU the same operator is sequential in time; it wins by one call for all steps, until a step's
# matrix product is large enough to hide torch's calls.
AUTO_SCAN: dict[tuple[str, str], Limits] = {
    ("cuda", "rnn_tanh"): Limits(32, 32, _CUDA_DTYPES),
    ("cuda", "rnn_relu"): Limits(32, 32, _CUDA_DTYPES),
    ("cuda", "gru"): Limits(32, 32, _CUDA_DTYPES),
    ("cuda", "lstm"): Limits(32, 32, _CUDA_DTYPES),
    ("cpu", "rnn_tanh"): Limits(128, 1, _CPU_DTYPES),
    ("cpu", "rnn_relu"): Limits(128, 1, _CPU_DTYPES),
    ("cpu", "gru"): Limits(128, 1, _CPU_DTYPES),
    ("cpu", "lstm"): Limits(128, 1, _CPU_DTYPES),
}

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
    """T. None, like `batch`, in a compiled graph: looking at it would tie the graph to a range of sizes."""
    packed: bool
    projected: bool
    transformed: bool
    """Under a torch.func transform or in a forward-mode AD level."""


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
    return None


def why_auto_skips_scan(case: Case) -> str | None:
    """Why "auto" prefers "torch" to an eligible "scan", or None."""
    limits = AUTO_SCAN[case.device, case.cell]
    if case.hidden_size > limits.max_hidden:
        return f"slower than torch above hidden_size {limits.max_hidden} on {case.device}"
    if case.steps is not None and case.steps < limits.min_steps:
        return f"slower than torch below {limits.min_steps} steps on {case.device}"
    if case.dtype not in limits.dtypes:
        return f"slower than torch in {case.dtype} on {case.device}"
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
    return "scan", "the fastest here"
