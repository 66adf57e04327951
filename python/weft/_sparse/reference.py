"""The sparse products in plain torch: the oracle of the tests, and what runs under torch's function transforms."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_of(crow: Tensor, nnz: int) -> Tensor:
    return torch.repeat_interleave(crow.diff().long(), output_size=nnz)


def csr_mm_reference(pattern: list[Tensor], values: Tensor | None, x: Tensor) -> Tensor:
    """weft::csr_mm (csrc/sparse/csr_mm.h) by a gather and an index_add; differentiable to any order."""
    crow, col, *index = pattern
    terms = x.index_select(-2, col)  # ([B,] nnz, k)
    if values is not None:
        terms = (values.index_select(-1, index[0]) if index else values).unsqueeze(-1) * terms
    wide = terms.dtype if terms.dtype == torch.float64 else torch.float32
    out = terms.new_zeros(*terms.shape[:-2], crow.shape[0] - 1, terms.shape[-1], dtype=wide)
    return out.index_add(-2, rows_of(crow, col.shape[0]), terms.to(wide)).to(terms.dtype)


def csr_sampled_mm_reference(pattern: list[Tensor], left: Tensor, right: Tensor, shared: bool) -> Tensor:
    """weft::csr_sampled_mm (csrc/sparse/csr_mm.h) by two gathers."""
    crow, col = pattern
    wide = left.dtype if left.dtype == torch.float64 else torch.float32
    terms = left.index_select(-2, rows_of(crow, col.shape[0])).to(wide) * right.index_select(-2, col).to(wide)
    sums = terms.sum(-1)
    return (sums.sum(0) if shared and sums.dim() == 2 else sums).to(left.dtype)


def conv_values_reference(weight: Tensor, windows: list[Tensor], groups: int) -> Tensor:
    """weft::conv_values (csrc/sparse/conv_values.h): taps summed by a matrix product, then put in their places."""
    crow, row, _, tap_crow, taps, *_ = (t.long() for t in windows)
    n = row.shape[0]
    joined = weight.new_zeros(taps.shape[0], n)
    joined[torch.arange(taps.shape[0], device=taps.device), rows_of(tap_crow, taps.shape[0])] = 1
    sums = weight.index_select(-1, taps) @ joined  # (groups * out_channels, in_channels, n)
    out_channels, in_channels = weight.shape[0] // groups, weight.shape[1]
    first, length = crow[row], (crow[1:] - crow[:-1])[row]
    channel = torch.arange(groups * in_channels, device=weight.device).view(groups, 1, in_channels, 1)
    co = torch.arange(out_channels, device=weight.device).view(1, out_channels, 1, 1)
    place = (
        channel * (out_channels * n)
        + out_channels * first
        + co * length
        + torch.arange(n, device=weight.device)
        - first
    )
    return sums.reshape(-1).index_select(0, place.reshape(-1).argsort())


def csr_matmul_reference(patterns: list[Tensor], columns: int, x: Tensor, y: Tensor) -> Tensor:
    """weft::csr_matmul (csrc/sparse/csr_matmul.h) by a dense product."""
    a_crow, a_col, b_crow, b_col, crow, col, *_ = (t.long() for t in patterns)
    wide = x.dtype if x.dtype == torch.float64 else torch.float32

    def dense(row: Tensor, col: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
        flat = values.new_zeros(*values.shape[:-1], rows * columns, dtype=wide)
        return flat.index_add(-1, row * columns + col, values.to(wide)).unflatten(-1, (rows, columns))

    inner = b_crow.shape[0] - 1
    a = dense(rows_of(a_crow, a_col.shape[0]), a_col, x, a_crow.shape[0] - 1, inner)
    b = dense(rows_of(b_crow, b_col.shape[0]), b_col, y, inner, columns)
    return (a @ b).flatten(-2).index_select(-1, rows_of(crow, col.shape[0]) * columns + col).to(x.dtype)
