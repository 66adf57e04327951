"""Products with a matrix that blocks keep (csrc/jit/resident_product.jit.cuh), on a processor."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests import emulated
from tests.common import relative_error

pytestmark = emulated.MARKS

CASES = {  # inner dimension, columns, type, bound
    "long": (528, 40, torch.float32, 1e-6),
    "short": (40, 8, torch.float32, 1e-6),
    "odd": (37, 60, torch.float32, 1e-6),
    "wide": (32, 260, torch.float32, 1e-6),
    "tf32": (80, 80, torch.float32, 2e-3),
    "float16": (272, 48, torch.float16, 1e-6),
    "few columns": (1280, 8, torch.float32, 1e-6),
    "bfloat16": (48, 48, torch.bfloat16, 1e-6),
}


class Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("matrix", "rows")),
        *((name, ctypes.c_long) for name in ("inner_stride", "column_stride", "stride")),
        ("result", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("count", "columns", "between", "repeated")),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ctypes._CFuncPtr:
    return emulated.build("resident_product", tmp_path_factory.mktemp("products")).run


def multiplied(
    run, which: str, rows: torch.Tensor, matrix: torch.Tensor, between: bool = False, repeated: int = 0
) -> torch.Tensor | None:
    result = torch.zeros(len(rows), matrix.shape[1])
    call = Call(
        matrix.data_ptr(), rows.data_ptr(), *matrix.stride(), rows.stride(0), result.data_ptr(), *result.shape,
        0 if between or repeated else -1, repeated,
    )  # fmt: skip
    run([*CASES].index(which), ctypes.byref(call), 1)
    if call.between < 0 and repeated:  # there is no room for the sums of two products of so many rows
        assert which == "wide"
        return None
    # Two of them by each thread of two blocks.
    assert call.between == (2 * 2 * 512 * max(1, repeated) if between or repeated else -1)
    return result


def problem(which, count):
    """So many rows, the matrix, their product, and the bound of its error."""
    torch.manual_seed(1)
    inner, columns, dtype, bound = CASES[which]
    matrix = torch.randn(inner, columns).to(dtype)
    rows = torch.randn(count, inner).to(dtype)
    return rows, matrix, (rows.double() @ matrix.double()).float(), bound


@pytest.mark.parametrize("which", CASES)
def test_any_number_of_rows(which, run):
    rows, matrix, want, bound = problem(which, 83)
    for count in (1, 2, 3, 8, 9, 17, 33, 50, 83):
        given = matrix if count % 2 else matrix.t().contiguous().t()
        found = multiplied(run, which, rows[:count], given)
        assert relative_error(found, want[:count]) < bound, count
        if count <= 32:
            assert torch.equal(found, multiplied(run, which, rows[:count], given, between=True))


@pytest.mark.parametrize("which", CASES)
def test_few_rows_again_and_again(which, run):
    rows, matrix, want, bound = problem(which, 8)
    for count in range(1, 9):
        found = multiplied(run, which, rows[:count], matrix, repeated=3)
        assert found is None or relative_error(found / 3, want[:count]) < bound, count


@pytest.mark.parametrize("count", [1, 6, 20])
def test_infinities(count, run):
    torch.manual_seed(1)
    matrix, rows = torch.randn(528, 40), torch.randn(count, 528)
    matrix[7] = matrix[7].round()  # numbers without a low part
    matrix[7][matrix[7] == 0] = 1
    rows[count - 1, 7] = torch.inf
    want = rows @ matrix
    for repeated in (0, 1) if count <= 8 else (0,):
        found = multiplied(run, "long", rows, matrix, repeated=repeated)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-4)
