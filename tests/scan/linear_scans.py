"""What the tests of linear_scan share: how a problem runs, views of its tensors, and problems with states that products
of many steps cannot say: chains that overflow, underflow or cancel."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from weft.scan import linear_scan

from tests.common import DEVICES, assert_close
from tests.scan.samples import CONSTANT, LAYOUTS
from tests.scan.samples import LinearScan as Sample

FEW = [Sample(9, 3, 5, layout, x0, reverse=x0) for layout in LAYOUTS for x0 in (False, True)]

few = pytest.mark.parametrize("sample", FEW, ids=str)
device = pytest.mark.parametrize("device", DEVICES)


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same numbers in fp64 on the CPU, detached."""
    return [None if t is None else t.detach().cpu().double() for t in tensors]


def run(inputs: tuple, flags: dict, weight: Tensor, op=linear_scan) -> tuple[Tensor, list[Tensor]]:
    """x and the gradients of (x * weight).sum() by A, b and x0."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
    x = op(*inputs, **flags)
    present = [t for t in inputs if t is not None]
    # One reference step without x0 does not use A at all.
    return x, list(torch.autograd.grad((x * weight).sum(), present, allow_unused=True, materialize_grads=True))


def gradients_agree(sample: Sample, got: list[Tensor], want: list[Tensor], bound: float) -> None:
    if not sample.x0 and sample.T and sample.layout not in CONSTANT:
        first = sample.T - 1 if sample.reverse else 0
        assert (got[0][first] == 0).all(), "A of the first step has no influence"
        want[0][first] = 0
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, bound)


def every_second(t: Tensor) -> Tensor:
    spread = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    spread[..., ::2] = t
    return spread[..., ::2]


def batch_first(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def off_by_one(t: Tensor) -> Tensor:
    """Contiguous, but one element off any wider alignment."""
    storage = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
    view = storage[1:].view(t.shape)
    view.copy_(t)
    return view


def inner(t: Tensor) -> Tensor:
    """A window of a larger tensor whose border is NaN."""
    padded = torch.full([n + 2 for n in t.shape], torch.nan, dtype=t.dtype, device=t.device)
    window = padded[tuple(slice(1, 1 + n) for n in t.shape)]
    window.copy_(t)
    return window


def matrices_by_columns(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() == 4 else t


def _orthogonal(T: int, B: int, H: int) -> Tensor:
    return torch.linalg.qr(torch.randn(T, B, H, H, dtype=torch.float64)).Q


def _swing(T: int, period: int, factor: float) -> Tensor:
    """Factors that grow for a period and shrink for the next: 8 ** 60 = 1.5e54 up, then down again."""
    growing = (torch.arange(T) // period) % 2 == 0
    return torch.where(growing, factor, 1 / factor).double()


def chaotic(kind: str, T: int, B: int, H: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """A, b and x0 in fp64, the states in the range of fp32."""
    A = (
        _orthogonal(T, B, H)
        if layout == "dense"
        else torch.rand(T, B, H, dtype=torch.float64).add(0.5).log().mul(0.1).exp()
    )
    shape = (T, 1, 1, 1) if layout == "dense" else (T, 1, 1)
    b, x0 = torch.zeros(T, B, H, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    if layout != "dense":
        # Factors whose products stay near 1: each step takes back what the step before it did.
        A[1::2] = 1 / A[: T - T % 2 : 2]
    if kind == "up":
        A *= _swing(T, 60, 8).view(shape)
        x0 *= 1e-27
        b[::7] = 1e-28 * torch.randn(len(range(0, T, 7)), B, H, dtype=torch.float64)
        b[T % 120 :] = 0
    elif kind == "down":
        A /= _swing(T, 60, 8).view(shape)
        x0 *= 1e27
    elif kind == "both":
        # Half of the state goes up while the other half goes down.
        half = H // 2
        swing = _swing(T, 60, 8)
        if layout == "dense":
            A[..., :half, half:] = 0
            A[..., half:, :half] = 0
            A[..., :half, :half] = _orthogonal(T, B, half) * swing.view(shape)
            A[..., half:, half:] = _orthogonal(T, B, H - half) / swing.view(shape)
        else:
            A[..., :half] *= swing.view(shape)
            A[..., half:] /= swing.view(shape)
        x0[:, :half] *= 1e-27
        x0[:, half:] *= 1e27
    elif kind == "zeros":
        # Nothing but zeros meets an enormous product, until the last steps.
        A *= 10
        x0.zero_()
        b[-5:] = torch.randn(5, B, H, dtype=torch.float64)
    elif kind == "resets":
        # A grows by 10 a step and is zero at every 30th: a product is zero where a running sum was enormous.
        A *= 10
        A[29::30] = 0
        b[:] = 1e-3 * torch.randn(T, B, H, dtype=torch.float64)
    return A, b, x0


CHAOS = ["up", "down", "both", "zeros", "resets"]


def chaotic_error(got: Tensor, want: Tensor) -> float:
    """The largest relative error of one half of one state: each has its own size."""
    half = got.shape[-1] // 2
    worst = 0.0
    for part in (slice(None, half), slice(half, None)):
        g, w = got[..., part].double(), want[..., part]
        size = w.norm(dim=-1)
        error = (g - w).norm(dim=-1) / size.where(size > 0, 1)
        worst = max(worst, error.max().item())
        assert g.isfinite().all()
    return worst


def chaotic_bound(T: int) -> float:
    """Every step adds some units of roundoff, 6e-8, which orthogonal steps carry along undiminished."""
    return 3e-7 * T


class Cancelling(NamedTuple):
    """A problem, a gradient of x, and the x, lambda and gradient of x0 that they lead to, all exact in every dtype."""

    A: Tensor
    b: Tensor
    x0: Tensor
    grad: Tensor
    x: Tensor
    grad_b: Tensor
    grad_x0: Tensor


def cancelling(kind: str, T: int, B: int, H: int, layout: str, reverse: bool = False) -> Cancelling:
    """In the order of processing, and turned round with `reverse`.

    fixed: x = 2 x - 1 from 1. The product of n steps is 2^n, and what they add is 1 - 2^n.
    hyperbolic: eigenvalues 4 and 1, and x on the direction of 1. The product of n steps maps x to a difference of 4^n.
    Both are their own transposes, so that the gradients run back over the same chain.
    """
    A, b = 2 * torch.eye(H, dtype=torch.float64).expand(T, B, H, H), -torch.ones(T, B, H, dtype=torch.float64)
    x0, factor = torch.ones(B, H, dtype=torch.float64), 2
    if layout == "diagonal":
        A = torch.full((T, B, H), 2.0, dtype=torch.float64)
    elif kind == "hyperbolic":
        pair = torch.tensor([[2.5, 1.5], [1.5, 2.5]], dtype=torch.float64)
        A, b = torch.kron(torch.eye(H // 2, dtype=torch.float64), pair).expand(T, B, H, H), torch.zeros_like(b)
        x0[:, 1::2], factor = -1, 1
    grad = b.clone()
    grad[-1] = x0
    x = x0.expand(T, B, H)
    if reverse:
        grad = grad.flip(0)
    return Cancelling(A.contiguous(), b, x0, grad, x, x, factor * x0)


def assert_exact(problem: Cancelling, x: Tensor, gradients: list[Tensor]) -> None:
    before = problem.x0 if problem.A.dim() == 3 else problem.x0.unsqueeze(-2)
    grad_A = (problem.x if problem.A.dim() == 3 else problem.x.unsqueeze(-1)) * before
    for got, want in zip([x, *gradients], [problem.x, grad_A, problem.grad_b, problem.grad_x0], strict=True):
        assert torch.equal(got.cpu().double(), want)


CANCELLING = [
    *(("fixed", T, B, H, "diagonal") for T, B, H in [(8192, 1, 3), (8192, 2, 40), (700, 3, 5)]),
    *((kind, T, 1, H, "dense") for kind in ("fixed", "hyperbolic") for T, H in [(3000, 2), (3000, 20), (600, 64)]),
    *((kind, 300, 2, H, "dense") for kind in ("fixed", "hyperbolic") for H in (128, 160)),
]
