"""Products of float matrices on the tensor cores: the kernel on a processor, and executors that use it."""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch
import weft
from weft.vertex import models

from tests import emulated
from tests.common import relative_error


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ctypes._CFuncPtr:
    return emulated.build("vertex_products", tmp_path_factory.mktemp("products")).run


def laid_out(rows: int, columns: int, by_rows: bool) -> torch.Tensor:
    """Of which neighbours lie in a row, or in a column, with a pitch that is a multiple of four."""
    if by_rows:
        return torch.randn(rows, -(-columns // 4) * 4)[:, :columns]
    return torch.randn(columns, -(-rows // 4) * 4).t()[:rows]


def multiplied(run, left, right, *, processors=3, bias=None, more=None, pitch=0):
    rows, inner = left.shape
    columns = right.shape[1]
    by_inner = left.stride(1) == 1, right.stride(0) == 1
    result = torch.full((rows, columns + pitch), torch.nan)
    if more is not None:
        result[:, :columns] = more
    strides = left.stride(0 if by_inner[0] else 1), right.stride(1 if by_inner[1] else 0), columns + pitch
    sizes = (ctypes.c_int64 * 9)(rows, columns, inner, *strides, *by_inner, more is not None)
    pointers = (None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (left, right, bias, result))
    run(processors, sizes, *pointers)
    assert result[:, columns:].isnan().all()
    return result[:, :columns]


class TestEmulated:
    pytestmark = emulated.MARKS

    @pytest.mark.parametrize("left_by_rows", [True, False])
    @pytest.mark.parametrize("right_by_rows", [True, False])
    @pytest.mark.parametrize(
        ("rows", "columns", "inner", "processors"),
        # The third in eight pieces, the fourth in large tiles.
        [(5, 33, 34, 3), (70, 65, 97, 3), (66, 65, 270, 132), (130, 128, 64, 1), (3, 40, 0, 3)],
    )
    def test_products(self, run, rows, columns, inner, processors, left_by_rows, right_by_rows):
        torch.manual_seed(1)
        left, right = laid_out(rows, inner, left_by_rows), laid_out(inner, columns, right_by_rows)
        bias, more = torch.randn(columns), torch.randn(rows, columns)
        want = left.double() @ right.double()
        found = multiplied(run, left, right, processors=processors)
        assert relative_error(found, want.float()) < 1e-6
        assert torch.equal(found, multiplied(run, left, right, processors=processors))
        found = multiplied(run, left, right, processors=processors, bias=bias, more=more, pitch=3)
        assert relative_error(found, (want + bias + more).float()) < 1e-6

    def test_infinities_and_nans_stay_where_they_are(self, run):
        torch.manual_seed(1)
        left, right = laid_out(6, 40, True), laid_out(40, 36, True)
        left[1, 3], left[2, 4], left[4, 5] = torch.inf, -torch.inf, torch.nan
        right[:, 7] = right[:, 7].round()  # numbers without a low part
        right[3:5, 7] = 2.0
        found, want = multiplied(run, left, right), left @ right
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found.isposinf(), want.isposinf())
        assert torch.equal(found.isneginf(), want.isneginf())


@pytest.mark.cuda
class TestOnTheDevice:
    """Layers of more than 2e9 multiply-adds are its, others cuBLAS's."""

    TREES = 800

    @staticmethod
    def problem(trees: int):
        torch.manual_seed(1)
        cell = models.TreeLSTM(512, 256).cuda()
        graphs = weft.Graphs.from_children([[[], [], [0, 1], [], [2, 3]]] * trees)
        return cell, graphs, torch.randn(graphs.num_vertices, 512, device="cuda")

    @pytest.mark.parametrize("trees", [1, TREES])
    def test_layers_and_their_gradients(self, trees):
        cell, graphs, x = self.problem(trees)
        given = [x.requires_grad_(), *cell.parameters()]

        def run(of, executor, *inputs):
            y = of(graphs, inputs[0], executor=executor)
            weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device="cuda").view_as(y)
            return [y.detach(), *torch.autograd.grad((y * weight).sum(), inputs)]

        found = run(cell, "batched", *given)
        assert all(map(torch.equal, found, run(cell, "batched", *given)))
        wide = copy.deepcopy(cell).double()
        want = run(wide, "reference", x.detach().double().requires_grad_(), *wide.parameters())
        for a, b in zip(found, want, strict=True):
            assert relative_error(a, b) < 3e-6

    def test_infinities(self):
        cell, graphs, x = self.problem(self.TREES)
        x[3, 5], x[7, 9] = torch.inf, -torch.inf
        found, want = (cell(graphs, x, executor=e) for e in ("batched", "reference"))
        torch.testing.assert_close(found, want, equal_nan=True, rtol=1e-5, atol=1e-5)
