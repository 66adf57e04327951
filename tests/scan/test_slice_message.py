"""What a rank does to its slice of a diagonal scan, on one device: slices that tell each other their messages and are
mended are the whole."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from weft._distributed.totals import pack, product_of_steps, unpack
from weft.scan import linear_scan, linear_scan_reference

from tests import emulated
from tests.common import BOUNDS, DEVICES, assert_close
from tests.scan.linear_scans import batch_first, chaotic, chaotic_bound, chaotic_error, every_second, wide

ops = torch.ops.weft
device = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
EVERY = ("tame", "remembers", "up", "down")
SIZES = [[300, 1, 0, 520], [0, 64, 700], [5, 0, 0]]


def kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", names)


def values(states: Tensor, like: Tensor, reverse: bool) -> Tensor:
    return states[0 if reverse else -1] if len(states) else torch.zeros_like(like)


def scanned(parts: list[tuple[Tensor, Tensor]], x0: Tensor | None, reverse: bool) -> tuple[list, list, Tensor]:
    """Every slice's states and the state that enters it, and the one that leaves the last."""
    ranks = len(parts)
    firsts = [rank == (ranks - 1 if reverse else 0) for rank in range(ranks)]
    states, messages = [], []
    for (A, b), first in zip(parts, firsts, strict=True):
        start = x0 if first else None
        x = linear_scan(A, b, start, reverse=reverse)
        row = b.new_zeros(b.shape[1:]) if start is None else start
        value = values(x, row, reverse) if len(x) else row
        messages.append(ops.slice_message(A, value, len(x) > 0 or start is not None))
        states.append(x)
    found = []
    for rank, (A, _) in enumerate(parts):
        order = ranks - 1 - rank if reverse else rank
        entered, end, _, came = ops.slice_states(torch.stack(messages), row, order, reverse)
        if not firsts[rank]:
            ops.slice_mend_(states[rank], A, entered, came, reverse)
        found.append(entered if x0 is None or not firsts[rank] else x0)
    return states, found, end


def shapes(device: str) -> list[tuple[int, int]]:
    """B and H; on CUDA also so many channels that each has a lane that mends it."""
    return [(2, 37), (3, 2880)] if device == "cuda" else [(2, 37)]


def problem(T: int, B: int, H: int, forgets: float, dtype: torch.dtype, device: str) -> list[Tensor]:
    A = (1 - forgets * torch.rand(T, B, H, dtype=torch.float64)) * torch.randn(T, B, H).sign()
    b, x0 = torch.randn(T, B, H, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    return [t.to(device, dtype) for t in (A, b, x0)]


@device
@dtypes
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("forgets", [0.0, 0.2, 1.5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_slices_are_the_whole(sizes: list[int], forgets: float, reverse: bool, dtype: torch.dtype, device: str) -> None:
    for with_x0, (B, H) in ((True, (2, 37)), (False, (1, 3))):
        A, b, x0 = problem(sum(sizes), B, H, forgets, dtype, device)
        x0 = x0 if with_x0 else None
        if not with_x0:  # which nobody reads
            A[-1 if reverse else 0] = torch.nan
        want = linear_scan_reference(*wide(A.nan_to_num(), b, x0), reverse=reverse)
        parts = list(zip(A.split(sizes), b.split(sizes), strict=True))
        states, _, end = scanned(parts, x0, reverse)
        assert_close(torch.cat(states), want, 4 * BOUNDS[dtype])
        assert_close(end, want[0 if reverse else -1], 8 * BOUNDS[dtype])


@device
@kinds("up", "down", "both", "zeros", "resets")
@pytest.mark.parametrize("reverse", [False, True])
def test_products_that_overflow_or_underflow(kind: str, reverse: bool, device: str) -> None:
    A, b, x0 = (t.float() for t in chaotic(kind, 600, 2, 4, "diagonal"))
    if reverse:
        A, b = A.flip(0), b.flip(0)
    want = linear_scan_reference(*wide(A, b, x0), reverse=reverse)
    A, b, x0 = (t.to(device) for t in (A, b, x0))
    sizes = [157, 100, 180, 163]
    states, _, _ = scanned(list(zip(A.split(sizes), b.split(sizes), strict=True)), x0, reverse)
    assert chaotic_error(torch.cat(states).cpu(), want) < chaotic_bound(600)


@device
@dtypes
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [1, 90, 700])
def test_gradients(T: int, reverse: bool, dtype: torch.dtype, device: str) -> None:
    """Of a slice whose end has a gradient, from those of one whose end has none; on CUDA also of channels so many that
    each has a lane."""
    for forgets, (B, H) in itertools.product((0.0, 0.2), shapes(device)):
        A, b, x0 = problem(T, B, H, forgets, dtype, device)
        grad, left = torch.randn_like(b), torch.randn_like(x0)
        for start in (x0, None):
            x = linear_scan(A, b, start, reverse=reverse)
            whole = grad.clone()
            whole[0 if reverse else -1] += left
            first = start is not None
            want = ops.linear_scan_backward(*wide(whole, A, x, start), reverse, False, [True, True, first])
            grad_A, grad_b, _ = ops.linear_scan_backward(grad, A, x, start, reverse, False, [True, True, first])
            alone = grad_b.clone()
            ops.slice_mend_gradients_(grad_b, grad_A, A, x, start, left, reverse)
            ops.slice_mend_gradients_(alone, None, A, None, None, left, reverse)
            assert torch.equal(alone, grad_b)
            assert_close(grad_b, want[1], 4 * BOUNDS[dtype])
            assert_close(grad_A, want[0], 8 * BOUNDS[dtype])


@device
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("forgets", [0.0, 0.2])
def test_steps_in_bfloat16(forgets: float, reverse: bool, device: str) -> None:
    """As in float32, rounded where they are stored."""
    for B, H in shapes(device):
        _steps_in_bfloat16(B, H, forgets, reverse, device)


def _steps_in_bfloat16(B: int, H: int, forgets: float, reverse: bool, device: str) -> None:
    A, b, _ = problem(300, B, H, forgets, torch.bfloat16, device)
    state, first = torch.randn(2, B, H, device=device)
    assert torch.equal(ops.slice_message(A, state, True), ops.slice_message(A.float(), state, True))
    x, grad_b, row = linear_scan(A, b, reverse=reverse), torch.randn_like(b), first.unsqueeze(0)
    before = torch.cat((x[1:].float(), row) if reverse else (row, x[:-1].float()))
    grad_A = (grad_b.float() * before).bfloat16()

    def mended(dtype: torch.dtype) -> list[Tensor]:
        wide_A, wide_x, *found = (t.to(dtype, copy=True) for t in (A, x, x, grad_b, grad_A))
        ops.slice_mend_(found[0], wide_A, state, None, reverse)
        ops.slice_mend_gradients_(found[1], found[2], wide_A, wide_x, first, state, reverse)
        return [t.bfloat16() for t in found]

    found, wanted = mended(torch.bfloat16), mended(torch.float32)
    # What a gradient of A was made of was not rounded: where that of b does not change, it is left.
    unchanged = found[1] == grad_b
    assert torch.equal(found[2][unchanged], grad_A[unchanged])
    assert unchanged.any() or forgets == 0  # where nothing is forgotten, rounding leaves a few
    wanted[2] = torch.where(unchanged, grad_A, wanted[2])
    for got, want, before in zip(found, wanted, (x, grad_b, grad_A), strict=True):
        # Where the seam ends a walk in bfloat16 has stages of more steps: rarely a number is rounded the other way.
        assert (got != want).float().mean() < 1e-3 and not torch.equal(got, before)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-22)
    with pytest.raises(TypeError, match=r"^slice_mend_: state must be float32 beside x in bfloat16, got BFloat16"):
        ops.slice_mend_(x, A, state.bfloat16(), None, reverse)


@device
@dtypes
def test_a_message_says_the_product(dtype: torch.dtype, device: str) -> None:
    for T in (0, 1, 63, 1000, 5000):
        A = torch.randn(T, 2, 40, dtype=torch.float64).to(device, dtype)
        if T:
            A[:, 0, 0], A[T // 2, 0, 1], A[T // 2, 0, 2], A[T // 2, 0, 3] = 1e-30, 0, torch.nan, torch.inf
            A[:, 0, 4] = 1.25e30
        value = torch.randn(2, 40, device=device, dtype=dtype)
        message = ops.slice_message(A, value, True)
        assert message[-1] == 1 and torch.equal(message[80:-1].view(dtype).view(2, 40), value)
        found = unpack(message[:80], dtype)
        if T == 0:
            assert (found == 1).all()
            continue
        want = unpack(pack(*product_of_steps(A, T, True, False, False), dtype), dtype).flatten()
        assert torch.equal(found.isnan(), want.isnan())
        # What every state loses on the way may be zero in a message.
        lost = want.abs() < (2.0**-255 if dtype == torch.float32 else 0)
        error = ((found - want).abs() / want.abs()).masked_fill(lost | (want == found) | want.isnan(), 0)
        assert error.max() < (3e-7 if dtype == torch.float32 else 1e-12)


@device
@dtypes
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_between_slices(reverse: bool, dtype: torch.dtype, device: str) -> None:
    """Beside a scan over the ranks that runs the other way."""
    products = torch.randn(5, 2, 40, dtype=torch.float64, device=device)
    given, shares = (torch.randn(5, 2, 40, device=device, dtype=dtype) for _ in range(2))
    for end in (None, shares.double().sum(0)):
        by_rank = given if end is None else torch.stack((given, shares), 1)
        messages = by_rank.flip(0) if reverse else by_rank
        leaving = linear_scan(products, given.double(), end, reverse=True)
        for order in range(5):
            want = leaving[order + 1] if order < 4 else torch.zeros_like(leaving[0]) if end is None else end
            assert_close(ops.slice_left(messages, products, order, reverse), want, 2 * BOUNDS[dtype])


@device
def test_a_bad_channel_stays_alone(device: str) -> None:
    for B, H in [(2, 5), *shapes(device)[1:]]:
        _bad_channel(B, H, device)


def _bad_channel(B: int, H: int, device: str) -> None:
    A, b, x0 = problem(400, B, H, 0.2, torch.float32, device)
    sizes = [130, 150, 120]
    clean = torch.cat(scanned(list(zip(A.split(sizes), b.split(sizes), strict=True)), x0, False)[0])
    for t in (A, b):
        bad = [s.clone() for s in (A, b)]
        bad[0 if t is A else 1][200, 1, 2] = torch.nan
        x = torch.cat(scanned(list(zip(bad[0].split(sizes), bad[1].split(sizes), strict=True)), x0, False)[0])
        assert x[200:, 1, 2].isnan().all()
        # Before the bad step the channel is right, but rounded otherwise: on CUDA what is no product is walked.
        assert_close(x[:200, 1, 2], clean[:200, 1, 2].double(), 2 * BOUNDS[torch.float32])
        x[:, 1, 2] = clean[:, 1, 2]
        assert torch.equal(x, clean)


@device
def test_layouts_and_bits(device: str) -> None:
    A, b, x0 = problem(300, *((3, 2880) if device == "cuda" else (3, 6)), 0.2, torch.float32, device)
    x, state, came = linear_scan(A, b), torch.randn_like(x0), None
    first = x.clone()
    ops.slice_mend_(first, A, state, came, False)
    for view in (batch_first, every_second, torch.clone):
        again = x.clone()
        ops.slice_mend_(again, view(A), view(state), came, False)
        assert torch.equal(again, first)
        assert torch.equal(ops.slice_message(view(A), view(state), True), ops.slice_message(A, state, True))
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    again = x.clone()
    ops.slice_mend_(again, A, state, nothing, False)
    assert torch.equal(again, x)


def test_opcheck() -> None:
    A, b, x0 = problem(7, 2, 3, 0.2, torch.float32, "cpu")
    message = ops.slice_message(A, x0, True)
    came = torch.ones(1, dtype=torch.int32)
    calls: list[tuple[Any, tuple]] = [
        (ops.slice_message, (A, x0, True)),
        (ops.slice_states, (torch.stack([message] * 3), x0, 1, False)),
        (ops.slice_left, (torch.stack([x0] * 3), torch.rand(3, 2, 3, dtype=torch.float64), 1, False)),
        (ops.slice_mend_, (b.clone(), A, x0, came, False)),
        (ops.slice_mend_gradients_, (b.clone(), b.clone(), A, b, x0, x0, True)),
    ]
    for op, arguments in calls:
        opcheck(op.default, arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda A, x0: ops.slice_message(A.half(), x0, True), TypeError, "A must be float32, float64 or bfloat16"),
        (lambda A, x0: ops.slice_message(A, x0[:1], True), ValueError, r"value must be \(B, H\)"),
        (lambda A, x0: ops.slice_states(A.int(), x0, 0, True), ValueError, r"messages must be \(ranks, 13\)"),
        (lambda A, x0: ops.slice_states(A, x0, 0, True), TypeError, "messages must be int32"),
        (lambda A, x0: ops.slice_states(A.new_zeros(2, 13).int(), x0, 2, True), ValueError, "order must be"),
        (lambda A, x0: ops.slice_left(A, A, 0, True), TypeError, "products must be float64"),
        (lambda A, x0: ops.slice_left(A, A[:2].double(), 0, True), ValueError, r"products must be \(ranks, 2, 3\)"),
        (lambda A, x0: ops.slice_mend_(A[::2], A[::2], x0, None, True), ValueError, "x must be contiguous"),
        (lambda A, x0: ops.slice_mend_(A, A[:1], x0, None, True), ValueError, r"A must be \(T, B, H\)"),
        (lambda A, x0: ops.slice_mend_(A, A, x0.double(), None, True), TypeError, "state must have the dtype"),
        (
            lambda A, x0: ops.slice_mend_gradients_(A, A.clone(), A, None, None, x0, True),
            ValueError,
            "x must be given with grad_A",
        ),
    ],
)
def test_bad_input(call: Callable[[Tensor, Tensor], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(5, 2, 3), torch.randn(2, 3))


class _Library:
    """Kernels of csrc/scan/slices/cuda on a processor."""

    def __init__(self, name: str, folder: Path) -> None:
        self.run = emulated.build(name, folder).run
        self.H = 40 if name == "mend_walk" else 37  # a walk is of rows in pieces

    def __call__(self, which: int, wide: bool, flag: int, sizes: list[int], pointers: list[Tensor | None]) -> None:
        at = [None if t is None else t.data_ptr() for t in pointers]
        self.run(
            which, wide, flag, (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_void_p * len(at))(*at)
        )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> _Library:
    return _Library("slice_kernels", tmp_path_factory.mktemp("slices"))


@pytest.fixture(scope="module", params=["slice_kernels", "mend_walk"])
def mending(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Library:
    return _Library(request.param, tmp_path_factory.mktemp("mending"))


@dtypes
class TestEmulated:
    pytestmark = emulated.MARKS

    def problem(self, kind: str, T: int, B: int, H: int, dtype: torch.dtype) -> list[Tensor]:
        if kind in ("up", "down"):
            return [t.to(dtype) for t in chaotic(kind, T, B, H, "diagonal")]
        return problem(T, B, H, 0.2 if kind == "tame" else 0.0, dtype, "cpu")

    @kinds(*EVERY)
    def test_message(self, library: _Library, kind: str, dtype: torch.dtype) -> None:
        for T in (0, 100, 3000):
            A, _, x0 = self.problem(kind, max(T, 1), 2, 37, dtype)
            A = A[:T]
            want = ops.slice_message(A, x0, True)
            for flag in (1, 3):
                found = torch.zeros_like(want)
                library(0, dtype == torch.float64, flag, [T, 2, 37, 74, 37], [A, x0, found])
                assert torch.equal(found[74:], want[74:])
                a, b = (unpack(t[:74], dtype) for t in (found, want))
                assert ((a - b).abs() <= 1e-6 * b.abs()).all()

    @kinds("tame", "remembers")
    def test_finish(self, mending: _Library, kind: str, dtype: torch.dtype) -> None:
        wide, (B, H), ranks = dtype == torch.float64, (2, mending.H), 4
        row = torch.zeros(B, H, dtype=dtype)
        for T, order, comes in ((1, 1, True), (300, 3, True), (300, 2, False)):
            A, b, _ = self.problem(kind, T, B, H, dtype)
            x = linear_scan(A, b)
            messages = torch.stack([ops.slice_message(A, torch.randn_like(row), comes or r > 1) for r in range(ranks)])
            want, found = x.clone(), x.clone()
            expected = ops.slice_finish_(want, A, messages, order, False)
            entered, end, products = (torch.full_like(t, torch.nan) for t in expected)
            came = torch.full((1,), 7, dtype=torch.int32)
            sizes = [T, B, H, B * H, H, ranks, order]
            mending(4, wide, 0, sizes, [messages, entered, end, products, came, A, found])
            assert came == comes and torch.equal(found, x) == (not comes)
            for got, value in zip((entered, end, products, found), (*expected, want), strict=True):
                assert_close(got, value.double(), 2 * BOUNDS[dtype])
            grad, given = torch.randn_like(b), torch.randn(ranks, 2, B, H).to(dtype)
            for shares in (False, True):
                # Of a reversed scan, whose gradients run forward; the x before step t in it is x[t + 1].
                grad_A, grad_b, _ = ops.linear_scan_backward(grad, A, x, row, True, False, [True, True, True])
                gathered = given if shares else given[:, :1].contiguous()
                want_A, want_b, got_A, got_b = (t.clone() for t in (grad_A, grad_b, grad_A, grad_b))
                want_left = ops.slice_left(gathered if shares else gathered[:, 0], products, 1, False)
                ops.slice_mend_gradients_(want_b, want_A, A, x, row, want_left, True)
                left = torch.full_like(row, torch.nan)
                following = torch.cat((x[1:], row.unsqueeze(0)))
                pointers = [gathered, products, left, A, got_b, following, row, got_A]
                mending(5, wide, shares, [*sizes[:-1], 1], pointers)
                for got, value in ((left, want_left), (got_b, want_b), (got_A, want_A)):
                    assert_close(got, value.double(), 4 * BOUNDS[dtype])

    @kinds(*EVERY)
    def test_mend(self, mending: _Library, kind: str, dtype: torch.dtype) -> None:
        H = mending.H
        for T, few in ((1, False), (200, False), (200, True), (700, True)):
            A, b, x0 = self.problem(kind, T, 2, H, dtype)
            b = b if kind != "down" else b * 0
            x = linear_scan(A, b)
            want, found = x.clone(), x.clone()
            ops.slice_mend_(want, A, x0, None, False)
            given = [T, 2, H, 2 * H, H], [A, x0, None, found, None, None, None]
            mending(1, dtype == torch.float64, 2 * few, *given)
            assert_close(found, want.double(), 2 * BOUNDS[dtype])

    def test_a_bad_channel_stays_alone(self, mending: _Library, dtype: torch.dtype) -> None:
        """Bit by bit in its neighbours, also in those of its block; its own steps before it are right."""
        H = 8 if mending.H % 8 == 0 else 5
        for T, few in ((150, True), (400, False), (700, True)):
            for bad in ("A", "x", "state"):
                A, b, x0 = self.problem("tame", T, 2, H, dtype)
                x = linear_scan(A, b)
                results = []
                for spoilt in (False, True):
                    given = {"A": A.clone(), "x": x.clone(), "state": x0.clone()}
                    begin = 0 if bad == "state" else 70
                    if spoilt:
                        given[bad][(1, 2) if bad == "state" else (slice(70, 71 if bad == "A" else None), 1, 2)] = (
                            torch.nan
                        )
                    pointers = [given["A"], given["state"], None, given["x"], None, None, None]
                    mending(1, dtype == torch.float64, 2 * few, [T, 2, H, 2 * H, H], pointers)
                    results.append(given["x"])
                clean, found = results
                assert_close(found[:begin, 1, 2], clean[:begin, 1, 2].double(), 2 * BOUNDS[dtype])
                # Of x, a NaN that the scan has spread; of A, one that it would have.
                assert bad == "A" or found[begin:, 1, 2].isnan().all()
                found[:, 1, 2] = clean[:, 1, 2]
                assert torch.equal(found, clean)

    @kinds("tame", "remembers")
    def test_mend_gradients(self, mending: _Library, kind: str, dtype: torch.dtype) -> None:
        for T in (1, 129, 400):
            A, b, x0 = self.problem(kind, T, 2, mending.H, dtype)
            x = linear_scan(A, b, x0)
            grad, left = torch.randn(T, 2, mending.H).to(dtype), torch.randn(2, mending.H).to(dtype)
            grad_A, grad_b, _ = ops.linear_scan_backward(grad, A, x, x0, True, False, [True, True, True])
            want_A, want_b = grad_A.clone(), grad_b.clone()
            # Of a reversed scan, whose gradients run forward; the x before step t in it is x[t + 1].
            ops.slice_mend_gradients_(want_b, want_A, A, x, x0, left, True)
            following = torch.cat((x[1:], x0.unsqueeze(0)))
            pointers = [A, left, None, grad_b, following, x0, grad_A]
            mending(1, dtype == torch.float64, 1, [T, 2, mending.H, 2 * mending.H, mending.H], pointers)
            assert_close(grad_b, want_b.double(), 2 * BOUNDS[dtype])
            assert_close(grad_A, want_A.double(), 4 * BOUNDS[dtype])

    def test_a_bad_channel_of_gradients_stays_alone(self, mending: _Library, dtype: torch.dtype) -> None:
        """Bit by bit in its neighbours."""
        walks = mending.H % 8 == 0
        T, H = 200, 8 if walks else 5
        A, b, x0 = self.problem("remembers", T, 2, H, dtype)
        x = linear_scan(A, b, x0)
        results = []
        for spoilt in (False, True):
            factors, left = A.clone(), torch.ones(2, H).to(dtype)
            if spoilt:
                factors[50, 1, 2], left[0, 3] = torch.inf, 1e-36
                # Of nothing, an infinite factor makes nothing where a lane walks.
                factors[60:65, 1, 4], factors[70, 1, 4] = 0, torch.inf
            grad_A, grad_b = (torch.full_like(b, 0.5) for _ in range(2))
            following = torch.cat((x[1:], x0.unsqueeze(0)))
            pointers = [factors, left, None, grad_b, following, x0, grad_A]
            mending(1, dtype == torch.float64, 1, [T, 2, H, 2 * H, H], pointers)
            results.append((grad_A, grad_b))
        for clean, found in zip(*results, strict=True):
            assert not walks or found[100:, 1, 4].isfinite().all()
            for row, channel in ((1, 2), (0, 3), (1, 4)):
                assert not torch.equal(found[:, row, channel], clean[:, row, channel])
                found[:, row, channel] = clean[:, row, channel]
            assert torch.equal(found, clean)
