"""What torch's kernels and the scan are expected to take on a GPU, in microseconds.

The constants were fitted to rows of benchmarks/results from an H200 by ``python -m benchmarks.fit_costs``, which prints
them again. Beside each stands how far it is off, the relative rms over those rows, which have 1000 steps or more unless
it is said otherwise: below that the host is most of the time, and varies by a quarter. In float32 torch's kernels took
TF32.

The costs of the persistent kernels follow from how they are laid out on the device, see choice.persistent_plan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .case import Case

__all__ = ["Line", "cudnn_kernel", "host_us", "persistent_at_least_us", "products_us", "scan_us", "torch_us"]


class Line(NamedTuple):
    """start + T (step + unit H + square H^2 + sequence B + volume B H) microseconds, the steps of all layers and
    directions one after the other."""

    start: float = 0.0
    step: float = 0.0
    unit: float = 0.0
    square: float = 0.0
    sequence: float = 0.0
    volume: float = 0.0

    def us(self, case: Case) -> float:
        H, B = case.hidden_size, case.batch or 0
        step = self.step + self.unit * H + self.square * H * H + (self.sequence + self.volume * H) * B
        return self.start + _steps(case) * step


# Training steps. "small": H 8 to 256; rms 12%, 12%, 14%. "persistent": float16, H 256 to 1024, B 16 and 64; rms 2% of
# four rows, 6% of six.
CUDNN: dict[str, dict[str, Line]] = {
    "small": {
        "rnn_tanh": Line(start=23.2, step=0.796, square=3.34e-05, sequence=0.00562, volume=9.11e-06),
        "gru": Line(step=0.967, square=4.7e-05, sequence=0.0334, volume=0.000154),
        "lstm": Line(start=92, step=0.821, square=0.000163, sequence=0.00951, volume=5.71e-05),
    },
    "persistent": {
        "rnn_tanh": Line(step=8.2, unit=0.000942, sequence=0.0236),
        "lstm": Line(step=0.747, unit=0.00274, sequence=0.264),
    },
}
FORWARD_SHARE = {"small": 0.431, "persistent": 0.348}
"""Of a training step; the median, rms 26% and 15%. In large batches it is less."""

LAUNCHES = {True: 32.8, False: 15.0}
"""A step of the standard kernels, training or not, without the products; rms 13% and 15%. They follow the host: others
take 20 to 34."""

RATES = {torch.float16: 5e8, torch.bfloat16: 5e8, torch.float32: 2.35e8}
"""Operations per microsecond of the standard kernels' products in large batches; float32 in TF32. Set, not fitted: the
rows end where the launches are most of the time."""
RATE_WITHOUT_TF32 = 4e7
LAUNCH_US = 5.0

# Training steps of the scan, by cell and largest H. Up to 32 in float32, which is what the half types are computed in:
# rms 14%, 9%, 8%. Above, in TF32, T from 10,000 on and B up to 64, 16 and 4: rms 17%, 7%, 4%.
SCAN: dict[tuple[str, int], Line] = {
    ("rnn_tanh", 32): Line(start=217, step=0.0766, unit=0.00216, volume=4.65e-05),
    ("gru", 32): Line(start=177, step=0.18, unit=0.00208, volume=0.000105),
    ("lstm", 32): Line(start=187, step=0.177, unit=0.00439, volume=0.000185),
    ("rnn_tanh", 128): Line(step=0.248, unit=0.00378, volume=7.01e-05),
    ("gru", 128): Line(step=0.261, unit=0.00514, volume=0.000507),
    ("lstm", 64): Line(step=0.563, volume=0.000691),
}
SCAN_FORWARD_START = 133.0
"""Of a forward pass up to 32 hidden units, whose steps take what those of one sequence do in training; rms 14%."""

WEFT_HOST = {True: 372.0, False: 31.7}
"""The least that a layer of Weft takes, training or not: the median of the scan's steps of T up to 100, and of the
persistent kernels' of T 1."""
TORCH_HOST = {True: 842.0, False: 49.0}
"""The same of torch's, where cuDNN has one kernel for all steps."""
TORCH_HOST_STANDARD = {True: 842.0, False: 294.0}
"""The same elsewhere."""

PERSISTENT_STEP = {True: 0.6, False: 0.37}
"""Below what any plan of the persistent kernels expects of a step, training or not: a tanh RNN's in one block."""

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}


def host_us(case: Case) -> float:
    """The least that a layer of Weft takes: what the host does, alike for the scan and the persistent kernels."""
    return WEFT_HOST[case.trains]


def persistent_at_least_us(case: Case) -> float:
    """A bound from below of what a plan of the persistent kernels may expect, without planning."""
    return max(host_us(case), PERSISTENT_STEP[case.trains] * (case.steps or 0) * case.layers)


def cudnn_kernel(case: Case) -> str:
    """Which of its kernels cuDNN takes under torch: "small" or "persistent", one launch for all steps; or "standard".

    What torch asks for, as far as it was measured: it asks for "small" at larger H in a forward pass alone, and in
    bfloat16, where cuDNN does not take it.
    """
    H, B, rnn = case.hidden_size, case.batch or 0, case.cell.startswith("rnn")
    if case.packed or case.projected or case.dtype not in (torch.float16, torch.float32):
        return "standard"
    if H <= (256 if rnn else 128):
        return "small"
    alone = case.layers == case.directions == 1 and case.cell != "gru" and case.dtype == torch.float16
    sizes = H <= 1024 and H % 128 == case.input_size % 128 == 0
    batch = B <= 128 and B % 8 == 0 and (B < 96 or H < 896 or not rnn)
    return "persistent" if alone and sizes and batch else "standard"


def torch_us(case: Case) -> float | None:
    """Of torch's kernel on a GPU; None where nothing like it was measured. With a projection, whose launches were not
    measured, the least."""
    if case.steps is None or case.batch is None or case.dtype not in RATES:
        return None
    kernel = cudnn_kernel(case)
    if kernel == "standard":
        us = LAUNCHES[case.trains] * _steps(case) + products_us(case)
        return max(TORCH_HOST_STANDARD[case.trains], us)
    if case.dtype == torch.float32 and not case.tf32:
        return None
    us = CUDNN[kernel][_fitted(case.cell)].us(case) * (1 if case.trains else FORWARD_SHARE[kernel])
    return max(TORCH_HOST[case.trains], us)


def products_us(case: Case) -> float:
    """The standard kernels' matrix products, at the rate of large ones."""
    state = case.proj_size or case.hidden_size
    inputs = case.input_size + (case.layers - 1) * state * case.directions + case.layers * state
    columns = GATES[case.cell] * inputs + case.layers * case.proj_size
    flops = 2 * case.hidden_size * columns * (case.batch or 0) * (case.steps or 0) * case.directions
    return flops * (3 if case.trains else 1) / _rate(case, case.tf32)


def projection_us(case: Case) -> float:
    """What a projection adds to the persistent kernels: the product of two weights and one for all outputs, for each
    layer and direction, at the rate of large ones, and LAUNCH_US for each of some launches. Set, not fitted."""
    if not case.projected:
        return 0.0
    rows = GATES[case.cell] * case.hidden_size + (case.batch or 0) * (case.steps or 0)
    times = case.layers * case.directions * (3 if case.trains else 1)
    flops = 2 * rows * case.hidden_size * case.proj_size
    return times * (flops / _rate(case, False) + 4 * LAUNCH_US)


def _rate(case: Case, tf32: bool) -> float:
    return RATES[case.dtype] if case.dtype != torch.float32 or tf32 else RATE_WITHOUT_TF32


def scan_us(case: Case) -> float | None:
    """Of the scan on a GPU; None where nothing like it was measured."""
    if case.steps is None or case.batch is None or case.dtype not in RATES:
        return None
    cell = _fitted(case.cell)
    if case.hidden_size <= 32:
        line = SCAN[cell, 32]
        if not case.trains:
            # The chunks of the backward pass are what grows with the batch.
            return line._replace(start=SCAN_FORWARD_START, volume=0.0).us(case)
        return max(WEFT_HOST[True], line.us(case))
    # Above, what was measured had torch's forward pass.
    if case.dtype != torch.float32 or not case.tf32:
        return None
    return max(WEFT_HOST[True], SCAN[cell, 64 if cell == "lstm" else 128].us(case)) if case.trains else torch_us(case)


def _steps(case: Case) -> int:
    return (case.steps or 0) * case.layers * case.directions


def _fitted(cell: str) -> str:
    return "rnn_tanh" if cell == "rnn_relu" else cell
