"""What a rank does to its slice of a diagonal scan before and after the exchange, each in one op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from weft.scan import linear_scan

from tests.common import BOUNDS, DEVICES, assert_close
from tests.scan.linear_scans import batch_first

ops = torch.ops.weft
device = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
reverses = pytest.mark.parametrize("reverse", [False, True])
SIZES = [300, 1, 70, 520]
"""Of slices."""
MANY = [pytest.param("cuda", *shape, marks=pytest.mark.cuda) for shape in ((2, 37), (2, 40), (3, 2880), (2, 8448))]
CHANNELS = [("cpu", 2, 37), ("cpu", 2, 40), *MANY]
"""Devices, and B and H: rows that lie in pieces of 16 bytes or do not, on CUDA also so many that each has a lane."""


def problem(forgets: float, dtype: torch.dtype, device: str, B: int = 2, H: int = 37) -> list[Tensor]:
    """A and b of the whole, and the state before it."""
    A = 1 - forgets * torch.rand(sum(SIZES), B, H, dtype=torch.float64)
    b, x0 = torch.randn_like(A), torch.randn(B, H, dtype=torch.float64)
    return [t.to(device, dtype) for t in (A, b, x0)]


def orders(reverse: bool) -> list[int]:
    """Every slice's place in the scan."""
    return [len(SIZES) - 1 - rank if reverse else rank for rank in range(len(SIZES))]


def scanned(A: Tensor, b: Tensor, x0: Tensor | None, reverse: bool) -> tuple[list, list, Tensor, Tensor]:
    """States of every slice, those that enter, the one that leaves the last, and the products."""
    begun = [
        ops.slice_begin(A, b, x0 if order == 0 else None, order == 0, reverse)
        for A, b, order in zip(A.split(SIZES), b.split(SIZES), orders(reverse), strict=True)
    ]
    messages = torch.stack([message for _, message in begun])
    finished = [
        ops.slice_finish_(x, A, messages, order, reverse)
        for (x, _), A, order in zip(begun, A.split(SIZES), orders(reverse), strict=True)
    ]
    entered = [f[0] if x0 is None or order else x0 for f, order in zip(finished, orders(reverse), strict=True)]
    return [x for x, _ in begun], entered, finished[0][1], finished[0][2]


@pytest.mark.parametrize(("device", "B", "H"), CHANNELS)
@dtypes
@reverses
@pytest.mark.parametrize("forgets", [0.0, 0.2])
@pytest.mark.parametrize("with_x0", [False, True])
def test_slices_are_the_whole(
    forgets: float, with_x0: bool, reverse: bool, dtype: torch.dtype, device: str, B: int, H: int
) -> None:
    A, b, x0 = problem(forgets, dtype, device, B, H)
    if not with_x0:
        x0, A[-1 if reverse else 0] = None, torch.nan  # which nobody reads
    states, entered, end, products = scanned(A, b, x0, reverse)
    want = linear_scan(A.double(), b.double(), None if x0 is None else x0.double(), reverse=reverse)
    assert_close(torch.cat(states), want, 8 * BOUNDS[dtype])
    assert_close(end, want[0 if reverse else -1], 8 * BOUNDS[dtype])

    grad, grad_end, *given = (torch.randn_like(t) for t in (b, b[0], *entered))
    starts = [e if x0 is not None or order else None for e, order in zip(entered, orders(reverse), strict=True)]
    none = torch.zeros_like(grad_end)
    parts = list(zip(A.split(SIZES), grad.split(SIZES), states, starts, given, orders(reverse), strict=True))
    begun = [
        ops.slice_begin_gradients(g, None if rank == 1 else more, grad_end if rank == 2 else none, A, x, start,
                                  order == 0, reverse, True)
        for rank, (A, g, x, start, more, order) in enumerate(parts)
    ]  # fmt: skip
    messages = torch.stack([message for _, _, message in begun])
    for (A_, _, x, start, _, order), (grad_A, grad_b, _) in zip(parts, begun, strict=True):
        alone = grad_b.clone()
        left = ops.slice_finish_gradients_(grad_b, grad_A, A_, x, start, messages, products, order, reverse)
        assert torch.equal(left, ops.slice_finish_gradients_(alone, None, A_, x, start, messages, products, order,
                                                             reverse))  # fmt: skip
        assert torch.equal(alone, grad_b)

    leaves = [t.double().requires_grad_() for t in ((A, b) if x0 is None else (A, b, x0))]
    whole = linear_scan(*leaves, reverse=reverse)
    seams = [sum(SIZES[:r]) for r in range(len(SIZES))]
    loss = (whole * grad).sum() + (whole[0 if reverse else -1] * grad_end).sum()
    for rank, order in enumerate(orders(reverse)):
        if order and rank != 1:  # of the state that enters a slice
            loss = loss + (whole[seams[rank] + SIZES[rank] if reverse else seams[rank] - 1] * given[rank]).sum()
    want_A, want_b = torch.autograd.grad(loss, leaves[:2])
    assert_close(torch.cat([grad_b for _, grad_b, _ in begun]), want_b, 16 * BOUNDS[dtype])
    assert_close(torch.cat([grad_A for grad_A, _, _ in begun]), want_A, 16 * BOUNDS[dtype])


@device
def test_layouts_and_bits(device: str) -> None:
    B, H = (3, 2880) if device == "cuda" else (2, 40)
    A, b, x0 = problem(0.1, torch.float32, device, B, H)
    first = scanned(A, b, x0, False)
    for view in (batch_first, torch.clone):
        again = scanned(view(A), view(b), x0, False)
        assert all(map(torch.equal, first[0] + first[1], again[0] + again[1]))


def test_opcheck() -> None:
    A, b, x0 = (t[:9] for t in problem(0.2, torch.float32, "cpu", 2, 3))
    x0 = x0[:2]
    x, message = ops.slice_begin(A, b, None, False, False)
    opcheck(ops.slice_begin, (A, b, None, False, False))
    opcheck(ops.slice_begin, (A, b, x0, True, True))
    messages = torch.stack((message, message))
    opcheck(ops.slice_finish_, (x.clone(), A, messages, 1, False))
    _, _, products = ops.slice_finish_(x, A, messages, 1, False)
    grad = torch.randn_like(b)
    for end in (None, x0):
        opcheck(ops.slice_begin_gradients, (grad, x0, end, A, x, x0, False, False, end is None))
        opcheck(ops.slice_begin_gradients, (grad, x0, end, A, x, None, True, False, end is None))
        grad_A, grad_b, message = ops.slice_begin_gradients(grad, None, end, A, x, x0, False, False, True)
        gathered = torch.stack((message, message))
        opcheck(ops.slice_finish_gradients_, (grad_b, grad_A, A, x, x0, gathered, products, 0, False))


def test_bad_input() -> None:
    A, b, _ = (t[:9] for t in problem(0.2, torch.float32, "cpu", 2, 3))
    with pytest.raises(ValueError, match=r"^slice_begin: A must be \(T, B, H\)"):
        ops.slice_begin(A[:4], b, None, False, False)
    with pytest.raises(ValueError, match=r"^slice_begin: b must be \(T, B, H\) with at least one step"):
        ops.slice_begin(A[:0], b[:0], None, False, False)
    x, message = ops.slice_begin(A, b, None, False, False)
    with pytest.raises(ValueError, match=r"^slice_finish_: order must be at least 0"):
        ops.slice_finish_(x, A, message.unsqueeze(0), 1, False)
    with pytest.raises(TypeError, match=r"^slice_begin: A must"):
        ops.slice_begin(A.double(), b, None, False, False)
    with pytest.raises(ValueError, match=r"^slice_begin_gradients: start must be given"):
        ops.slice_begin_gradients(b, None, None, A, x, None, False, False, True)
