"""The scans: linear ones, those of pointwise steps, and backward passes along layers."""

from __future__ import annotations

import torch
import weft
from torch import Tensor, nn

from tests.scan.pointwise_steps import STEPS, arguments
from tests.scan.samples import READOUTS, READOUTS_LARGE, LinearScan

from .common import FLOATS, backward, bfloat16, device, double, half, single, synchronize, tensors


def linear_scan(
    T: int, B: int, H: int, diagonal: bool, transpose: bool = False, dtype: torch.dtype = single, window: bool = False
) -> None:
    size = H + 1 if window else H  # in a window, lines begin anywhere and do not touch each other
    A, b, x0 = tensors((T, B, H) if diagonal else (T, B, size, size), (T, B, size), (B, H), dtype=dtype, scale=H**-0.5)
    if window:
        A, b = A[..., 1:, 1:], b[..., 1:]
    weft.scan.linear_scan(A, b, x0, transpose=transpose).float().sum().backward()
    weft.scan.linear_scan(A, b, reverse=True)
    # The chunk in which the state overflows is computed again.
    weft.scan.linear_scan(1000 * A, b, x0, transpose=transpose)
    synchronize()


def linear_scans() -> None:
    for dtype in FLOATS:
        for H in (3, 64):
            linear_scan(2000, 3, H, diagonal=True, dtype=dtype)
        for H in (3, 8, 12, 16, 19, 20, 23, 24, 31, 32, 41, 48, 96, 128):
            for transpose in (False, True):
                linear_scan(200, 2, H, diagonal=False, transpose=transpose, dtype=dtype)
        for H in (7, 20, 31):
            linear_scan(200, 2, H, diagonal=False, dtype=dtype, window=True)


def diagonal_scans() -> None:
    """The diagonal scan's kernels: the walk, with few warps and with many, and tiles, of rows of any alignment."""
    for dtype in FLOATS:
        for T, B, H in ((20, 3, 64), (200, 3, 3000), (2000, 3, 3), (2000, 3, 64)):
            linear_scan(T, B, H, diagonal=True, dtype=dtype)
            A, b, x0 = tensors((H,), (T, B, H), (H,), dtype=dtype)
            weft.scan.linear_scan(A, b, x0).float().sum().backward()
    synchronize()


def asked(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().requires_grad_()


def complex_scans() -> None:
    """Diagonals of complex numbers: walks, chunks and tiles, of every layout."""
    for dtype in (torch.complex64, torch.complex128):
        for layout in ("diagonal", "constant", "constant_row", "constant_1d"):
            for T, B, H, batch_first in ((9, 3, 5, False), (40, 3, 33, True), (600, 2, 31, False), (1500, 1, 3, True)):
                for reverse in (False, True):
                    sample = LinearScan(T, B, H, layout, reverse, reverse, batch_first=batch_first)
                    A, b, x0 = sample.inputs(dtype, device())
                    A, b, x0 = map(asked, (A.nan_to_num(), b, x0))
                    backward(weft.scan.linear_scan(A, b, x0, **sample.flags))
    synchronize()


def batch_first() -> None:
    """Scans whose batch is the first dimension, which no copy brings into another order."""
    for dtype in FLOATS:
        for layout in ("dense", "shared_4d", "diagonal", "constant", "constant_1d"):
            for T, B, H in ((9, 3, 5), (120, 2, 20), (700, 3, 33)):
                if layout in ("dense", "shared_4d") and T > 200:
                    continue
                sample = LinearScan(T, B, H, layout, True, reverse=H == 20, batch_first=True)
                A, b, x0 = map(asked, sample.inputs(dtype, device()))
                backward(weft.scan.linear_scan(A, b, x0, **sample.flags))
    synchronize()


def readouts() -> None:
    """Scans whose states are read out with c and never written."""
    for dtype in (*FLOATS, torch.complex64):
        for sample in (*READOUTS, *READOUTS_LARGE):
            A, b, c, x0 = map(asked, sample.inputs(dtype, device()))
            backward(weft.scan.linear_scan(A, b, x0, c=c, **sample.flags))
    synchronize()


def pointwise() -> None:
    """Steps of one and of two states: the walk, chunks that meet, and such that never do; the layers made of them."""
    runs = [
        *((name, single, way) for name in ("gru", "lstm") for way in ("walk", "newton")),
        *((name, single, "newton") for name in ("slow_gru", "chaos", "spiking", "decay")),
        *((name, bfloat16, "newton") for name in ("gru", "lstm")),
        ("gru", half, "newton"), ("lstm", bfloat16, "walk"), ("gru", double, "newton"),
    ]  # fmt: skip
    for name, dtype, algorithm in runs:
        case = STEPS[name]
        for T, shape, reverse in ((150, (2, 35), False), (37, (3, 2, 3), True), (1, (5,), False)):
            lists = arguments(case, T, shape, dtype, device())
            lists = [tuple(map(asked, a)) if isinstance(a, tuple) else asked(a) for a in lists]
            with weft.scan.newton_report():
                states = weft.scan.pointwise_scan(case.step, *lists, reverse=reverse, algorithm=algorithm)
            backward(states)
    for make in (weft.nn.ParaGRU, weft.nn.ParaLSTM):
        for dtype in (single, bfloat16):
            layer = make(6, 40, 2, device=device(), dtype=dtype)
            backward(*layer(*tensors((300, 3, 6), dtype=dtype)))
    synchronize()


def sequential() -> None:
    """Backward passes along layers, of which nobody writes Jacobians: of convolutions with groups, pooling, linear
    layers and what lies between, dense and pruned, in the chain and in the tree, with all parameters' gradients."""
    nets = {
        6: [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Flatten()],
        8: [nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5, bias=False)],
        12: [
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, groups=2),
            nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 20), nn.Sigmoid(), nn.Linear(20, 5),
        ],
    }  # fmt: skip
    for width, layers in nets.items():
        for schedule in ("auto", "linear", "blelloch"):
            for prune in (False, True):
                net = weft.scan.ScanSequential(*layers, schedule=schedule, prune=prune).to(device())
                for linear in layers:
                    if isinstance(linear, (nn.Linear, nn.Conv2d)):
                        nn.init.normal_(linear.weight, std=0.3)
                        linear.weight.data *= (linear.weight.abs() > 0.2) if prune else 1
                for B in (1, 3, 9):
                    (x,) = tensors((B, width) if width == 8 else (B, 2, width, width))
                    for _ in range(2):
                        backward(net(x))
    synchronize()


PARTS = {
    "linear_scan": linear_scans, "diagonal_scans": diagonal_scans, "complex_scans": complex_scans,
    "batch_first": batch_first, "readouts": readouts, "pointwise": pointwise, "sequential": sequential,
}  # fmt: skip
