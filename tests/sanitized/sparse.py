"""Sparse products, values of Jacobians, chains."""

from __future__ import annotations

import itertools

import torch
from weft.scan import chain_backward
from weft.sparse import BatchedCSR, conv2d_jacobian, max_pool2d_jacobian, plan_matmul, relu_jacobian

from .common import FLOATS, device, synchronize


def random_csr(rows: int, columns: int, batch: int | None, dtype: torch.dtype, index: torch.dtype) -> BatchedCSR:
    stored = torch.rand(rows, columns, device=device()) < 0.3
    stored[rows // 2] = False
    crow = torch.zeros(rows + 1, dtype=index, device=device())
    crow[1:] = stored.sum(1).cumsum(0)
    col = stored.nonzero()[:, 1].to(index)
    values = torch.randn(*(() if batch is None else (batch,)), len(col), device=device()).to(dtype)
    return BatchedCSR(crow, col, values.requires_grad_(), (rows, columns))


def sparse() -> None:
    """Products with vectors, matrices and each other, transposed in the backward pass; values of strided, dilated
    and grouped convolutions, whole and pruned, and of max-pooling; products that are so large that an operand is laid
    out for them; chains of sparse, dense and diagonal Jacobians."""
    for dtype in FLOATS:
        for batch in (None, 1, 3):
            for index in (torch.int32, torch.int64):
                A, B = (random_csr(*shape, batch, dtype, index) for shape in ((37, 70), (70, 33)))
                for columns in (1, 5, 64):
                    x = torch.randn(batch or 2, 70, columns, device=device()).to(dtype).requires_grad_()
                    (A @ x).float().square().sum().backward()
                A.mv(torch.randn(batch or 2, 70, device=device()).to(dtype).requires_grad_()).float().sum().backward()
                plan_matmul(A, B)(A, B).values.float().square().sum().backward()
                A.to_dense()
        weight = torch.randn(6, 2, 3, 3, device=device()).to(dtype)
        pruned = torch.where(weight.abs() > 0.8, weight, 0)
        for w, prune in ((weight, False), (pruned, True)):
            w = w.clone().requires_grad_()
            J = conv2d_jacobian(w, (4, 9, 7), stride=2, padding=1, dilation=(2, 1), groups=2, prune=prune)
            J.values.float().square().sum().backward()
        grad = torch.randn(2, 20, device=device()).to(dtype)
        sizes = [20, 30, 30, 25, 40, 40, 10]
        jacobians: list = []
        for i, (columns, rows) in enumerate(itertools.pairwise(sizes)):
            dense = torch.randn(2, rows, columns, device=device()).to(dtype) / columns**0.5
            shared = random_csr(rows, columns, None if i % 2 else 2, dtype, torch.int32)
            jacobians.append(relu_jacobian(dense[:, :, 0]) if rows == columns else dense if i == 2 else shared)
        for schedule in ("auto", "linear", "blelloch"):
            chain_backward(grad, jacobians, schedule=schedule)
            chain_backward(grad, jacobians[:2], schedule=schedule)
        channels = 64 if device() == "cuda" else 2
        hidden = torch.randn(9, channels, 19, 21, device=device()).to(dtype)
        conv = conv2d_jacobian(torch.randn(channels, 5, 3, 3, device=device()).to(dtype), (5, 19, 21), padding=1)
        pool = max_pool2d_jacobian(hidden, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2), ceil_mode=True)
        for right in (relu_jacobian(hidden), pool):
            plan_matmul(conv, right)(conv, right)
    synchronize()


def chains() -> None:
    """Of products alone, with diagonals between them: by clusters of one block, of two and of four, whose numbers are
    sent, and by the whole grid."""
    for dtype in FLOATS:
        for index in (torch.int32, torch.int64):
            for size, count in ((37, 4), (110, 5), (300, 3), *[(2100, 3)] * (device() == "cuda")):
                for B in (1, 2):
                    each = [random_csr(size, size, B if k == 1 else None, dtype, index) for k in range(count)]
                    each.insert(2, relu_jacobian(torch.randn(B, size, device=device()).to(dtype)))
                    chain_backward(torch.randn(B, size, device=device()).to(dtype), each, schedule="linear")
    synchronize()


PARTS = {"sparse": sparse, "chains": chains}
