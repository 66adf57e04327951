"""The CUDA kernels of weft::rnn_cell, run on a processor by tests/emulator, beside the op on the CPU."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from torch import Tensor

from tests.common import relative_error
from tests.emulated import MARKS, build
from tests.rnn.samples import CELLS, CellSample

pytestmark = MARKS


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return build("cell_step", tmp_path_factory.mktemp("cell_step"))


class Forward(ctypes.Structure):
    _fields_ = [
        ("cell", ctypes.c_int), *((n, ctypes.c_int64) for n in "BIHP"),
        *((n, ctypes.c_void_p) for n in (
            "input", "h", "c", "w_ih", "w_hh", "b_ih", "b_hh", "in_", "rec", "h_next", "c_next", "gates")),
    ]  # fmt: skip


class Backward(ctypes.Structure):
    _fields_ = [
        ("cell", ctypes.c_int), *((n, ctypes.c_int64) for n in "BH"),
        *((n, ctypes.c_void_p) for n in (
            "grad_h_next", "grad_c_next", "h", "c", "h_next", "c_next", "gates", "in_", "rec", "grad_h", "grad_c",
            "b_ih", "b_hh")),
    ]  # fmt: skip


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("B", "I", "H"), [(1, 8, 12), (1, 5, 3), (3, 4, 20), (4, 7, 9), (6, 8, 12), (17, 8, 12)])
def test_like_the_cpu(kernels, cell: str, B: int, I: int, H: int) -> None:
    for bias, products, sums in itertools.product((True, False), (False, True), (False, True)):
        (x, h, c, w_ih, w_hh, b_ih, b_hh), _ = CellSample(cell, B, I, H, bias).call("cpu", torch.float32)
        leaves = [t.requires_grad_() for t in (x, h, c, w_ih, w_hh, b_ih, b_hh) if t is not None]
        expected = torch.ops.weft.rnn_cell(x, h, c, w_ih, w_hh, b_ih, b_hh, cell=cell)
        grad_h, grad_c = torch.randn(B, H), torch.randn(B, H) if cell == "lstm" else None
        outgoing = [grad_h] if grad_c is None else [grad_h, grad_c]
        expected_grads = torch.autograd.grad(expected[: len(outgoing)], leaves, outgoing)
        by_name = dict(zip((n for n, t in zip(("x", "h", "c", "w_ih", "w_hh", "b_ih", "b_hh"),
                                              (x, h, c, w_ih, w_hh, b_ih, b_hh), strict=True) if t is not None),
                           expected_grads, strict=True))  # fmt: skip

        rows, gated = w_ih.shape[0], cell in ("gru", "lstm")
        nan = lambda *shape: torch.full(shape, torch.nan)  # noqa: E731
        h_next, c_next, gates = nan(B, H), nan(B, H) if cell == "lstm" else None, nan(B, 4 * H) if gated else None
        in_, rec = ((x @ w_ih.t()).detach(), (h @ w_hh.t()).detach()) if products else (None, None)
        d_in, d_rec = nan(B, rows), nan(B, rows) if cell == "gru" else None
        past_h, past_c = nan(B, H) if cell == "gru" else None, nan(B, H) if cell == "lstm" else None
        sum_ih, sum_hh = (nan(rows), nan(rows)) if sums else (None, None)
        index = CELLS.index(cell)
        forward = Forward(
            index, B, I, H, H, *map(pointer, (x, h, c, w_ih, w_hh, b_ih, b_hh, in_, rec, h_next, c_next, gates))
        )
        backward = Backward(
            index, B, H, *map(pointer, (grad_h, grad_c, h, c, h_next, c_next, gates, d_in, d_rec, past_h, past_c,
                                        sum_ih, sum_hh))
        )  # fmt: skip
        kernels.prepare(ctypes.byref(forward), ctypes.byref(backward), 4 if I % 4 == H % 4 == 0 else 1)
        kernels.run_forward(1)
        kernels.run_backward(2)

        recurrent = d_in if d_rec is None else d_rec
        grad_state = recurrent @ w_hh + (0 if past_h is None else past_h)
        found = [(h_next, expected[0]), (d_in @ w_ih, by_name["x"]), (grad_state, by_name["h"])]
        found += [(d_in.t() @ x, by_name["w_ih"]), (recurrent.t() @ h, by_name["w_hh"])]
        if cell == "lstm":
            found += [(c_next, expected[1]), (past_c, by_name["c"])]
        if bias and sums:
            found += [(sum_ih, by_name["b_ih"]), (sum_hh, by_name["b_hh"])]
        for value, wanted in found:
            assert relative_error(value.detach(), wanted.detach()) <= 1e-5
