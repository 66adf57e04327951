"""The generators of pooling against torch.autograd.functional.jacobian over drawn settings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from weft._sparse import windows
from weft.sparse import adaptive_avg_pool2d_jacobian, avg_pool2d_jacobian, max_pool2d_jacobian

from tests.common import DEVICES
from tests.sparse.jacobians import check, f64, jacobian, jacobians

device = pytest.mark.parametrize("device", DEVICES)


@st.composite
def pools(draw, dilated: bool):
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(2))
    settings = dict(
        kernel_size=kernel,
        stride=draw(st.one_of(st.none(), st.integers(1, 3), st.tuples(st.integers(1, 3), st.integers(1, 3)))),
        padding=tuple(draw(st.integers(0, k // 2)) for k in kernel),
        ceil_mode=draw(st.booleans()),
    )
    if dilated:
        settings["dilation"] = draw(st.integers(1, 2))
    return settings


sample_sizes = st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))


@device
@given(size=sample_sizes, settings=pools(True), ties=st.booleans())
def test_max_pool2d(device: str, size: tuple, settings: dict, ties: bool) -> None:
    x = f64(2, *size, device=device)
    x = x.round() if ties else x

    def pool(t: Tensor) -> Tensor:
        return F.max_pool2d(t, **settings)

    try:
        pool(x)
    except RuntimeError:
        with pytest.raises((RuntimeError, ValueError)):
            max_pool2d_jacobian(x, **settings)
        return
    found = max_pool2d_jacobian(x, **settings)
    check(found, jacobians(pool, x))
    if not settings["ceil_mode"]:
        stride = settings["stride"] or settings["kernel_size"]
        inside = F.unfold(
            torch.ones_like(x), settings["kernel_size"], settings["dilation"], settings["padding"], stride
        )
        assert found.nnz == int(inside[0].sum())
    assert max_pool2d_jacobian(f64(5, *size, device=device), **settings).col is found.col


@device
def test_max_pool2d_with_steps_beyond_the_input(device: str) -> None:
    # torch's CUDA kernel counts its steps in 32 bits and reads out of bounds here: the CPU's says what is right.
    x = f64(2, 1, 3, 3, device=device)
    for settings in ((1, 1, 0, 2**31 - 1), (1, 2**31 - 1, 0, 1)):
        check(max_pool2d_jacobian(x, *settings), jacobians(lambda t, s=settings: F.max_pool2d(t, *s), x.cpu()))


@device
def test_max_pool2d_with_windows_wholly_in_the_padding(device: str) -> None:
    """torch gives -inf, and its own backward pass writes beyond the gradient: here it goes nowhere."""
    x = f64(2, 3, 2, 5, device=device)
    settings = (2, 1, 1, (3, 1))
    assert F.max_pool2d(x, *settings).eq(float("-inf")).all()
    J = max_pool2d_jacobian(x, *settings)
    assert J.shape == (30, 18) and J.nnz == 0
    assert not J.mv(torch.ones(2, 18, dtype=torch.float64, device=device)).any()


@device
def test_max_pool2d_picks_as_torch_does(device: str) -> None:
    x = torch.tensor([[1.0, 1, 3, float("nan")], [1, 1, float("nan"), 3], [0, -0.0, 2, 2], [0, 0, 1, 2]], device=device)
    x = x.view(1, 1, 4, 4).double()
    found = max_pool2d_jacobian(x, 2)
    index = F.max_pool2d(x, 2, return_indices=True)[1].flatten()
    want = torch.zeros(16, 4, dtype=torch.float64, device=device)
    want[index, torch.arange(4, device=device)] = 1
    assert torch.equal(found.to_dense()[0], want)
    assert max_pool2d_jacobian(x[:0], 2).values.shape == (0, 16)


def pooled(x: Tensor) -> tuple:
    """What max_pool_values takes for windows of 2x3, one column apart."""
    lines = [windows.sliding(x.shape[2], 2, 2, 2, 0, 1), windows.sliding(x.shape[3], 4, 3, 1, 0, 1)]
    crow, _, col, *_ = (t.to(x.device) for t in windows.join(lines).tables)
    return crow, col, [2, 3], [2, 1], [0, 0], [1, 1], [2, 4]


@device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_op_of_max_pooling(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 4, 6, device=device).to(dtype)
    of = pooled(x)
    found = torch.ops.weft.max_pool_values(x, *of)
    want = max_pool2d_jacobian(x.float(), (2, 3), (2, 1)).values
    assert found.dtype == dtype and torch.equal(found.float(), want)
    assert torch.equal(found, torch.ops.weft.max_pool_values(x.mT.contiguous().mT, *of))
    torch.library.opcheck(torch.ops.weft.max_pool_values, (x, *of))
    many = torch.randn(5, 3, 2, 4, 6, device=device).to(dtype)
    each = torch.stack([torch.ops.weft.max_pool_values(t, *of) for t in many])
    for dim in range(4):
        mapped = torch.func.vmap(lambda t: torch.ops.weft.max_pool_values(t, *of), dim)(many.movedim(0, dim))
        assert torch.equal(mapped, each)
    jacobians = torch.func.vmap(lambda t: max_pool2d_jacobian(t, (2, 3), (2, 1)).values)(many)
    assert torch.equal(jacobians, each)
    assert not torch.ops.weft.max_pool_values(x.requires_grad_(), *of).requires_grad


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "input must be", {0: torch.zeros(1, 1, 4, 6, dtype=torch.int32)}),
        (ValueError, "input must be \\(B, C, H, W\\)", {0: torch.zeros(1, 4, 6)}),
        (
            TypeError,
            "crow and col must be int32",
            {1: torch.zeros(2, dtype=torch.int64), 2: torch.zeros(2, dtype=torch.int64)},
        ),
        (ValueError, "crow must be", {1: torch.zeros(2, dtype=torch.int32)}),
        (ValueError, "kernel must be two numbers from 1", {3: [2]}),
        (ValueError, "stride must be two numbers from 1", {4: [0, 1]}),
        (ValueError, "padding must be two numbers from 0", {5: [-1, 1]}),
        (ValueError, "output must be two numbers from 0", {7: [2]}),
        (ValueError, "col must be \\(n,\\) for the n = 56 elements", {7: [2, 5]}),
        (ValueError, "col must be \\(n,\\) for the n = 44 elements", {5: [0, 1]}),
    ],
)
def test_bad_input_of_the_op_of_max_pooling(error: type, message: str, change: dict) -> None:
    x = torch.zeros(1, 1, 4, 6)
    arguments = [change.get(i, argument) for i, argument in enumerate((x, *pooled(x)))]
    with pytest.raises(error, match=f"max_pool_values: .*{message}"):
        torch.ops.weft.max_pool_values(*arguments)


@device
@given(size=sample_sizes, settings=pools(False), include=st.booleans(), divisor=st.sampled_from([None, 1, 7]))
def test_avg_pool2d(device: str, size: tuple, settings: dict, include: bool, divisor: int | None) -> None:
    settings = dict(settings, count_include_pad=include, divisor_override=divisor)

    def pool(t: Tensor) -> Tensor:
        return F.avg_pool2d(t, **settings)

    options = dict(dtype=torch.float64, device=device)
    x = f64(*size, device=device)
    try:
        want = jacobian(pool, x)
    except RuntimeError:
        with pytest.raises((RuntimeError, ValueError)):
            avg_pool2d_jacobian(size, **settings, **options)
        return
    check(avg_pool2d_jacobian(size, **settings, **options), want)


@device
@given(size=sample_sizes, out=st.tuples(*[st.one_of(st.none(), st.integers(1, 8))] * 2))
def test_adaptive_avg_pool2d(device: str, size: tuple, out: tuple) -> None:
    want = jacobian(lambda t: F.adaptive_avg_pool2d(t, out), f64(*size, device=device))
    check(adaptive_avg_pool2d_jacobian(size, out, dtype=torch.float64, device=device), want)


def test_adaptive_avg_pool2d_of_one_number() -> None:
    want = adaptive_avg_pool2d_jacobian((2, 5, 4), (3, 3))
    assert torch.equal(adaptive_avg_pool2d_jacobian((2, 5, 4), 3).to_dense(), want.to_dense())
