"""The product of a dense slice's steps, beside the same in plain torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from weft._distributed.totals import pack, product_of_steps, unpack

from tests import emulated
from tests.common import DEVICES
from tests.scan.linear_scans import chaotic

product = torch.ops.weft.slice_product
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
everywhere = pytest.mark.parametrize(
    ("dtype", "device"),
    [
        pytest.param(torch.float32, "cpu", id="float32-cpu"),
        pytest.param(torch.float64, "cpu", id="float64-cpu"),  # CUDA multiplies float32 alone
        pytest.param(torch.float32, "cuda", id="float32-cuda", marks=pytest.mark.cuda),
    ],
)


def wanted(A: Tensor, reverse: bool, transpose: bool) -> Tensor:
    if len(A) == 0:
        return torch.eye(A.size(-1), dtype=torch.float64).expand(A.shape[1:])
    return unpack(pack(*product_of_steps(A.cpu(), len(A), False, transpose, reverse), A.dtype), A.dtype)


def assert_columns_close(found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Beside the largest of each column."""
    largest = want.abs().amax(-2, keepdim=True)
    # Beyond the range of both, a product is zero, or as large as can be.
    bound = (4e-7 if dtype == torch.float32 else 1e-11) * largest + 1e-75
    assert ((found.cpu() - want).abs() <= bound).all()


def matrices(T: int, B: int, H: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
    return (size * torch.randn(T, B, H, H, dtype=torch.float64) / max(H, 1) ** 0.5).to(dtype)


@everywhere
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_products(reverse: bool, transpose: bool, dtype: torch.dtype, device: str) -> None:
    for T, B, H in ((0, 2, 3), (1, 1, 1), (7, 2, 5), (40, 3, 8), (700, 1, 20), (1300, 1, 32), (60, 2, 17)):
        A = matrices(T, B, H, dtype).to(device)
        found = unpack(product(A, reverse, transpose), dtype)
        assert_columns_close(found, wanted(A, reverse, transpose), dtype)
        turned = A.mT.contiguous().mT if H > 1 else A
        assert torch.equal(product(turned, reverse, transpose), product(A, reverse, transpose))


@everywhere
@pytest.mark.parametrize("kind", ["up", "down", "both", "zeros", "resets"])
def test_products_that_overflow_or_underflow(kind: str, dtype: torch.dtype, device: str) -> None:
    A = chaotic(kind, 300, 2, 4, "dense")[0].to(device, dtype)
    found, want = unpack(product(A, False, False), dtype), wanted(A, False, False)
    assert (found.isfinite() == want.isfinite().to(device)).all()
    assert_columns_close(found.log2().nan_to_num(0, 0, 0), want.log2().nan_to_num(0, 0, 0), torch.float32)


@dtypes
def test_sizes_of_each_component(dtype: torch.dtype) -> None:
    """That one component grows where another one shrinks is in the columns' exponents."""
    A = torch.diag_embed(torch.tensor([2.0**20, 2.0**-20, 1.0], dtype=dtype)).expand(12, 1, 3, 3)
    found = unpack(product(A, False, False), dtype)
    assert torch.equal(found, torch.diag_embed(torch.tensor([[2.0**240, 2.0**-240, 1.0]], dtype=torch.float64)))


@everywhere
def test_a_component_that_grows_and_is_zeroed_hides_no_other(dtype: torch.dtype, device: str) -> None:
    grows = torch.diag_embed(torch.tensor([2.0**20, 1.0], dtype=dtype))
    zeroes = torch.diag_embed(torch.tensor([0.0, 1.0], dtype=dtype))
    mixes = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=dtype)
    steps = [mixes, *[torch.eye(2, dtype=dtype)] * 959, *[grows] * 63, zeroes]  # the last 64 are in one piece
    A = torch.stack(steps).unsqueeze(1).to(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)  # pieces of time
    try:
        found = unpack(product(A, False, False), dtype)
    finally:
        torch.set_num_threads(threads)
    assert found.tolist() == [[[0.0, 0.0], [1.0, 1.0]]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_of_one_step_stays(device: str) -> None:
    A = torch.tensor([[torch.nan, 0.0], [0.0, 0.0]]).view(1, 1, 2, 2).to(device)
    assert unpack(product(A, False, False), torch.float32)[0, :, 0].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_row_stays_alone(device: str) -> None:
    A = matrices(50, 3, 6, torch.float32).to(device)
    clean = product(A, False, False)
    A[20, 1, 2, 3] = torch.nan
    found = product(A, False, False)
    assert torch.equal(found[[0, 2]], clean[[0, 2]]) and unpack(found[1], torch.float32).isnan().all()


def test_pieces_of_time() -> None:
    """Few rows of many steps are cut for threads."""
    A, threads = matrices(3000, 1, 6, torch.float32), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        cut = product(A, True, False)
        assert torch.equal(cut, product(A, True, False))
    finally:
        torch.set_num_threads(threads)
    assert_columns_close(unpack(cut, torch.float32), wanted(A, True, False), torch.float32)


def test_nothing_and_opcheck() -> None:
    for shape in ((5, 0, 3, 3), (5, 2, 0, 0)):
        assert product(torch.zeros(shape), False, False).shape == shape[1:]
    for dtype in (torch.float32, torch.float64):
        opcheck(product.default, (matrices(5, 2, 3, dtype), True, False))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="slice_product: A must be float32 or float64"):
        product(torch.zeros(3, 2, 4, 4).half(), False, False)
    for shape in ((3, 2, 4), (3, 2, 4, 5)):
        with pytest.raises(ValueError, match=r"slice_product: A must be \(T, B, H, H\)"):
            product(torch.zeros(shape), False, False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ctypes._CFuncPtr:
    return emulated.build("product_kernels", tmp_path_factory.mktemp("products")).run


class TestEmulated:
    pytestmark = emulated.MARKS

    @pytest.mark.parametrize(
        ("T", "B", "H", "size"), [(0, 2, 3, 1), (1, 1, 5, 1), (150, 2, 20, 1), (70, 1, 32, 1), (130, 1, 17, 1e3)]
    )
    def test_products(self, run: ctypes._CFuncPtr, T: int, B: int, H: int, size: float) -> None:
        A = matrices(T, B, H, torch.float32, size)
        for reverse, transpose in ((False, False), (True, True)):
            found = torch.full((B, H, H), -1, dtype=torch.int32)
            step = -A.stride(0) if reverse else A.stride(0)
            row, column = (A.stride(3), A.stride(2)) if transpose else (A.stride(2), A.stride(3))
            first = A.data_ptr() + (4 * (T - 1) * A.stride(0) if reverse and T else 0)
            sizes = (ctypes.c_int64 * 7)(T, B, H, step, A.stride(1), row, column)
            run(1, sizes, ctypes.c_void_p(first), ctypes.c_void_p(found.data_ptr()))
            assert_columns_close(unpack(found, torch.float32), wanted(A, reverse, transpose), torch.float32)
