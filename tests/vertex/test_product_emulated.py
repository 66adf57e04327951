"""The kernel of large products on a processor, by tests/emulator."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests import emulated
from tests.common import relative_error

pytestmark = emulated.MARKS


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *((name, ctypes.c_longlong) for name in ("a_stride", "b_stride", "c_stride")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "inner", "depth")),
        ("part", ctypes.c_longlong),
    ]


def run(kernel: ctypes.CDLL, tile: int, a: torch.Tensor, b: torch.Tensor, parts: int) -> torch.Tensor:
    """What the kernel stores for each part of the sum, (parts, rows, columns)."""
    rows, inner = a.shape
    columns = b.shape[1]
    depth = -(-inner // parts // 16) * 16
    c = torch.full((parts, rows + 1, columns), torch.nan)
    strides = [max(x.stride()) for x in (a, b)]
    arguments = Arguments(
        *(x.data_ptr() for x in (a, b, c)), *strides, columns, rows, columns, inner, depth, c.stride(0)
    )
    tiles = -(-rows // tile) * -(-columns // tile)
    kernel.run(ctypes.byref(arguments), tiles * parts, 3)
    assert c[:, -1].isnan().all()
    return c[:, :-1]


@pytest.mark.parametrize(
    ("tile", "a_deep", "b_deep"), [(64, True, True), (64, True, False), (64, False, False), (128, True, False)]
)
def test_products(tile, a_deep, b_deep, tmp_path):
    layout = {"WEFT_PRODUCT_A_DEEP": a_deep, "WEFT_PRODUCT_B_DEEP": b_deep}
    size = {"WEFT_PRODUCT_ROWS": tile, "WEFT_PRODUCT_COLUMNS": tile}
    kernel = emulated.build("vertex_product", tmp_path, **layout, **size)
    for rows, columns, inner, parts in [(tile + 4, 36, 84, 2), (8, 72, 40, 1)][: 1 if tile > 64 else 2]:
        a = torch.randn(rows, inner) if a_deep else torch.randn(inner, rows).t()
        b = torch.randn(columns, inner).t() if b_deep else torch.randn(inner, columns)
        want = a.double() @ b.double()
        found = run(kernel, tile, a, b, parts).double().sum(0)
        assert relative_error(found, want) < 1e-6
