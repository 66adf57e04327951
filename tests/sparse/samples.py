"""Samples of the sparse ops for the tests of every op: patterns and plans of small matrices, drawn from a seed."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from weft._sparse.windows import convolution
from weft.sparse import BatchedCSR, plan_matmul

from tests.ops import Op


class Drawn:
    """Matrices and numbers from one seed, the same on every device."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(5)

    def numbers(self, *shape: int | None) -> Tensor:
        """Without the sizes that are None."""
        sizes = [n for n in shape if n is not None]
        return torch.randn(sizes, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def matrix(self, rows: int, columns: int, batch: int | None = None, density: float = 0.5) -> BatchedCSR:
        stored = torch.rand(rows, columns, generator=self.generator) < density
        stored[:, : 1 if columns else 0] = True
        crow = torch.zeros(rows + 1, dtype=torch.int32)
        crow[1:] = stored.sum(1).cumsum(0)
        col = stored.nonzero()[:, 1].to(torch.int32)
        return BatchedCSR(crow.to(self.device), col.to(self.device), self.numbers(batch, col.shape[0]), (rows, columns))


class Product(NamedTuple):
    """csr_mm: a matrix and vectors side by side; each has a batch or not."""

    rows: int
    columns: int
    k: int
    values: int | None
    x: int | None

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.k}-values={self.values}-x={self.x}"

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        draw, (values, x) = Drawn(device, dtype), (None if n is None else n + more for n in (self.values, self.x))
        J = draw.matrix(self.rows + more, self.columns + more, values)
        pattern = J._pattern
        return (pattern.tensors, pattern.transposed, J.values, draw.numbers(x, self.columns + more, self.k + more)), {}


class Sampled(NamedTuple):
    """csr_sampled_mm."""

    rows: int
    columns: int
    k: int
    left: int | None
    right: int | None
    shared: bool

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.columns}x{self.k}"
        return f"{sizes}-left={self.left}-right={self.right}{'-shared' * self.shared}"

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        draw, (left, right) = Drawn(device, dtype), (None if n is None else n + more for n in (self.left, self.right))
        pattern = draw.matrix(self.rows + more, self.columns + more)._pattern
        operands = (draw.numbers(n, size + more, self.k + more)
                    for n, size in ((left, self.rows), (right, self.columns)))  # fmt: skip
        return (pattern.tensors, pattern.transposed, *operands, self.shared), {}


class Planned(NamedTuple):
    """csr_matmul and its gradients. `operands`: two of a, b and c, the left one, the right one and the product."""

    sizes: tuple[int, int, int]
    operands: str
    first: int | None
    second: int | None
    shared: bool | None = None

    def __str__(self) -> str:
        shared = "-shared" if self.shared else ""
        return f"{'x'.join(map(str, self.sizes))}-{self.operands}-{self.first}-{self.second}{shared}"

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        draw, (n, m, k) = Drawn(device, dtype), (size + more for size in self.sizes)
        a, b = draw.matrix(n, m), draw.matrix(m, k)
        plan = plan_matmul(a, b)
        sizes = {"a": a.nnz, "b": b.nnz, "c": plan.nnz}
        batches = (None if B is None else B + more for B in (self.first, self.second))
        values = (draw.numbers(B, sizes[of]) for of, B in zip(self.operands, batches, strict=True))
        return (list(plan._patterns), *values, *(() if self.shared is None else (self.shared,))), {}


class Chain(NamedTuple):
    """csr_chain. The values of every second matrix have a batch; a matrix that is square and last is a diagonal."""

    B: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"B={self.B}-{'x'.join(map(str, self.sizes))}"

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        draw, B, sizes = Drawn(device, dtype), self.B + more, [n + more for n in self.sizes]
        matrices = [
            draw.matrix(rows, columns, B if k % 2 else None)
            for k, (columns, rows) in enumerate(itertools.pairwise(sizes))
        ]
        crows, cols = [J.crow for J in matrices], [J.col for J in matrices]
        values = [J.values for J in matrices]
        if sizes[-1] == sizes[-2]:
            crows[-1] = cols[-1] = torch.empty(0, dtype=torch.int32, device=device)
            values[-1] = draw.numbers(B, sizes[-1])
        return (draw.numbers(B, sizes[0]), crows, cols, values), {}


class Layers(NamedTuple):
    """layer_chain of a convolution's weight, a ReLU's output, a max-pooling's indices, and a matrix that is written."""

    B: int
    n: int

    def __str__(self) -> str:
        return f"B={self.B}-n={self.n}"

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        draw, B, n = Drawn(device, dtype), self.B + more, self.n
        outputs = max(n // 2, 1)
        conv, last = draw.matrix(2 * n, n), draw.matrix(3, 2 * n, B)
        weight = draw.numbers(None, 7)
        source = (torch.arange(conv.nnz, device=device) % 7).to(torch.int32)
        # Outputs of two elements each; which of them was picked.
        rows = torch.arange(n, device=device)
        crow = torch.cat([rows.new_zeros(1), ((rows + 1).clamp(max=2 * outputs))]).to(torch.int32)
        col = (rows[: 2 * outputs] // 2).to(torch.int32)
        picked = (torch.arange(outputs, device=device) * 2 + torch.arange(B, device=device)[:, None] % 2) % max(n, 1)
        none = torch.empty(0, dtype=torch.int32, device=device)
        grad, relu = draw.numbers(B, outputs), draw.numbers(B, n)
        crows, cols = [crow, none, conv.crow, last.crow], [col, none, conv.col, last.col]
        values, sources = [picked, relu, weight, last.values], [none, none, source, none]
        return (grad, crows, cols, values, sources, [n, -1, 0, 0]), {}


class Convolution(NamedTuple):
    """conv_values of a 3x2 kernel. Channels are numbers of its backward op, not sizes, and a graph is for those."""

    groups: int
    inputs: int
    outputs: int
    mode: str

    def __str__(self) -> str:
        return f"{self.groups}x{self.inputs}x{self.outputs}-{self.mode}"

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        windows = convolution("conv", (4 + more, 5), (3, 2), (1, 2), (1, 1), (1, 1), self.mode).to(device)
        weight = Drawn(device, dtype).numbers(self.groups * self.outputs, self.inputs, 6)
        return (weight, list(windows.tables), self.groups), {}


OPS = [
    Op(
        "csr_mm",
        [Product(4, 5, 2, *batches) for batches in ((None, None), (None, 2), (3, None), (2, 2))],
        [Product(300, 200, 3, 4, 4)],
        [Product(*sizes, 2, 2) for sizes in ((0, 4, 2), (4, 0, 2), (3, 4, 0))],
        contiguous_integers=True,
    ),
    Op(
        "csr_sampled_mm",
        [
            Sampled(4, 5, 2, *rest)
            for rest in ((None, None, True), (2, 2, True), (2, 2, False), (None, 2, True), (2, None, False))
        ],
        [Sampled(300, 200, 3, 4, 4, True)],
        [Sampled(*sizes, 2, 2, False) for sizes in ((0, 4, 2), (4, 0, 2), (3, 4, 0))],
        contiguous_integers=True,
    ),
    Op(
        "csr_matmul",
        [Planned((4, 5, 3), "ab", *batches) for batches in ((None, None), (None, 2), (3, None), (2, 2))],
        [Planned((60, 90, 70), "ab", None, 4)],
        [Planned(sizes, "ab", 2, 2) for sizes in ((0, 4, 3), (4, 0, 3), (3, 4, 0))],
        contiguous_integers=True,
    ),
    Op(
        "csr_matmul_left",
        [
            Planned((4, 5, 3), "bc", *rest)
            for rest in ((None, None, True), (2, 2, True), (None, 2, True), (2, None, False))
        ],
        [Planned((60, 90, 70), "bc", 4, 4, True)],
        [Planned(sizes, "bc", 2, 2, False) for sizes in ((0, 4, 3), (4, 0, 3), (3, 4, 0))],
        contiguous_integers=True,
    ),
    Op(
        "csr_matmul_right",
        [Planned((4, 5, 3), "ac", *rest) for rest in ((None, None, True), (2, 2, True), (None, 2, False))],
        [Planned((60, 90, 70), "ac", 4, 4, True)],
        [Planned(sizes, "ac", 2, 2, False) for sizes in ((0, 4, 3), (4, 0, 3), (3, 4, 0))],
        contiguous_integers=True,
    ),
    Op(
        "csr_chain",
        [Chain(2, (3, 5, 4)), Chain(3, (4, 2, 3, 3))],
        [Chain(4, (200, 300, 150, 150))],
        [Chain(0, (4, 5, 3)), Chain(2, (4, 0, 3)), Chain(2, (3, 0))],
        contiguous_integers=True,
    ),
    Op(
        "layer_chain",
        [Layers(2, 6), Layers(3, 9)],
        [Layers(4, 200)],
        [Layers(0, 6)],
        contiguous_integers=True,
    ),
    Op(
        "conv_values",
        [Convolution(1, 2, 3, "zeros"), Convolution(2, 2, 3, "reflect")],
        [Convolution(2, 12, 9, "circular")],
        contiguous_integers=True,
    ),
]
