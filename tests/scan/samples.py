"""Problems for linear_scan and chain_backward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from weft._scan.step_trace import traced

from tests.ops import Op
from tests.scan.pointwise_steps import STEPS, arguments

LAYOUTS = ["dense", "shared", "shared_4d", "diagonal", "constant", "constant_1d"]
CONSTANT = {
    "constant": lambda B, H: (1, B, H),
    "constant_row": lambda B, H: (1, 1, H),
    "constant_1d": lambda B, H: (H,),
}
"""Shapes of a diagonal A that is the same at every step."""


class LinearScan(NamedTuple):
    """One problem: sizes, what A is, and the flags. A's spectral radius is about 0.7, so that x stays of order 1."""

    T: int
    B: int
    H: int
    layout: str = "dense"
    x0: bool = True
    reverse: bool = False
    transpose: bool = False
    batch_first: bool = False

    @property
    def diagonal(self) -> bool:
        return self.layout == "diagonal" or self.layout in CONSTANT

    @property
    def flags(self) -> dict[str, bool]:
        flags = {"reverse": self.reverse, "transpose": self.transpose}
        return flags | {"batch_first": True} if self.batch_first else flags

    def inputs(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor | None]:
        T, B, H = self.T, self.B, self.H
        wide = torch.complex128 if dtype.is_complex else torch.float64
        shape = {"dense": (T, B, H, H), "shared": (T, H, H), "shared_4d": (T, 1, H, H), "diagonal": (T, B, H)}
        shape |= {layout: sizes(B, H) for layout, sizes in CONSTANT.items()}
        scale = 0.7 if self.diagonal else 0.7 / max(H, 1) ** 0.5
        A = scale * torch.randn(shape[self.layout], dtype=wide)
        if self.layout in CONSTANT:
            A = 0.9 * A / A.abs().clamp(min=0.9)
        b = torch.randn(T, B, H, dtype=wide)
        x0 = torch.randn(B, H, dtype=wide)
        if not self.x0 and T and self.layout not in CONSTANT:
            A[T - 1 if self.reverse else 0] = torch.nan
        if self.batch_first:
            A, b = (t.transpose(0, 1).contiguous() if t.dim() > 2 else t for t in (A, b))
        A, b, x0 = (t.to(device=device, dtype=dtype) for t in (A, b, x0))
        return A, b, x0 if self.x0 else None

    def __str__(self) -> str:
        flags = [name for name in ("x0", "reverse", "transpose", "batch_first") if getattr(self, name)]
        return "-".join([f"T{self.T}", f"B{self.B}", f"H{self.H}", self.layout, *flags])

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        sample = self._replace(T=self.T + more, B=self.B + more, H=self.H + more)
        A, b, x0 = sample.inputs(dtype, device)
        # Finite differences need a finite A everywhere.
        return (A.nan_to_num(), b) if x0 is None else (A, b, x0), self.flags


class ReadOut(NamedTuple):
    """A scan whose N states for each of H channels are read out. `A`, `c`: what of T and B they have, None: (H, N)."""

    T: int
    B: int
    H: int
    N: int
    A: str | None = None
    c: str | None = None
    full: bool = False
    x0: str | None = "rows"
    reverse: bool = False
    batch_first: bool = False

    @property
    def flags(self) -> dict[str, bool]:
        return {"reverse": self.reverse, "batch_first": self.batch_first}

    def inputs(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, ...]:
        """A, b, c and x0."""
        T, B, H, N = self.T, self.B, self.H, self.N
        wide = torch.complex128 if dtype.is_complex else torch.float64

        def field(name: str | None) -> Tensor:
            if name is None:
                return torch.randn(H, N, dtype=wide)
            sizes = T if "T" in name else 1, B if "B" in name else 1
            return torch.randn(*(sizes[::-1] if self.batch_first else sizes), H, N, dtype=wide)

        A, c = field(self.A), field(self.c)
        A = 0.9 * A / A.abs().clamp(min=1)  # x stays of order 1, also in float16
        b = torch.randn(*((B, T) if self.batch_first else (T, B)), H, N if self.full else 1, dtype=wide)
        x0 = torch.randn(*((B, H, N) if self.x0 == "rows" else (H, N)), dtype=wide)
        tensors = [t.to(device=device, dtype=dtype) for t in (A, b, c, x0)]
        return (*tensors[:3], None if self.x0 is None else tensors[3])

    def __str__(self) -> str:
        flags = [f"{name}{value}" for name, value in (("A", self.A), ("c", self.c), ("x0", self.x0)) if value]
        flags += [name for name in ("full", "reverse", "batch_first") if getattr(self, name)]
        return "-".join([f"T{self.T}", f"B{self.B}", f"H{self.H}", f"N{self.N}", *flags])

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        sample = self._replace(T=self.T + more, B=self.B + more, H=self.H + more, N=self.N + more)
        *fields, x0 = sample.inputs(dtype, device)
        return (*fields, x0) if x0 is not None else tuple(fields), self.flags


class Chain(NamedTuple):
    """A chain: batch, the length of every gradient, and which Jacobians (by position) the batch shares."""

    B: int
    sizes: tuple[int, ...]
    shared: tuple[int, ...] = ()
    levels: int = -1

    def inputs(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, list[Tensor]]:
        grad = torch.randn(self.B, self.sizes[0], dtype=torch.float64)
        jacobians = []
        for k, (columns, rows) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            batch = () if k in self.shared else (self.B,)
            jacobians.append(torch.randn(*batch, rows, columns, dtype=torch.float64) / max(columns, 1) ** 0.5)
        return grad.to(device, dtype), [J.to(device, dtype) for J in jacobians]

    def __str__(self) -> str:
        return (
            f"B{self.B}-"
            + "x".join(map(str, self.sizes))
            + ("-shared" if self.shared else "")
            + ("" if self.levels < 0 else f"-levels{self.levels}")
        )

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        sizes = tuple(n + more for n in self.sizes)
        return (*self._replace(B=self.B + more, sizes=sizes).inputs(dtype, device), self.levels), {}


# Every layout with and without x0, every pair of flags.
LINEAR = [
    LinearScan(3, 2, 3, layout, x0, reverse=(i + j + x0) % 2 == 1, transpose=(i + j) // 2 % 2 == 1)
    for i, layout in enumerate(LAYOUTS)
    for j, x0 in enumerate((False, True))
]
LINEAR += [
    LinearScan(3, 2, 4, "dense", True, *flags) for flags in itertools.product([False, True], repeat=2) if any(flags)
]
LINEAR += [
    LinearScan(3, 2, 3, layout, i % 2 == 0, i % 3 == 0, i % 4 == 1, batch_first=True)
    for i, layout in enumerate(("dense", "shared_4d", "diagonal", "constant", "constant_1d"))
]
# One warp and one block for a chunk, the batch of a level, and diagonals with and without chunks.
LINEAR_LARGE = [
    LinearScan(9, 3, 5),
    LinearScan(400, 4, 20, reverse=True),
    LinearScan(90, 2, 64),
    LinearScan(90, 2, 150),
    LinearScan(300, 8, 700, "diagonal"),
    LinearScan(6000, 2, 20, "diagonal", reverse=True),
]
LINEAR_EMPTY = [
    LinearScan(*size, layout, x0=layout != "shared")
    for layout in LAYOUTS
    for size in [(0, 3, 5), (4, 0, 5), (4, 3, 0), (0, 0, 0)]
]


class Cell(NamedTuple):
    """One step of a layer that is linear in its state."""

    cell: str
    B: int = 2
    X: int = 3
    H: int = 4
    h: bool = True
    bias: bool = True

    def __str__(self) -> str:
        flags = [name for name in ("h", "bias") if getattr(self, name)]
        return "-".join([self.cell, f"B{self.B}", f"X{self.X}", f"H{self.H}", *flags])

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        B, X, H, N = self.B + more, self.X + more, self.H + 2 * more, self.H + 2 * more + 1
        shapes = {
            "min_gru": [(2 * H, X), (2 * H,)],
            "min_lstm": [(3 * H, X), (3 * H,)],
            "rg_lru": [(2, H, H // 2), (2, H), (H,), (H, X), (H,)],
            "lru": [*((N,),) * 3, (N, 2, X), (H, N, 2), (H, X)],
            "s5": [*((N,),) * 3, (N, 2, X), (H, N, 2), (H, X)],
        }[self.cell.removesuffix("_g")]
        optional = {"min": (1,), "rg": (1, 4), "lr": (5,), "s5": (5,)}[self.cell[: 3 if self.cell[0] == "m" else 2]]
        weights = [
            None if i in optional and not self.bias else torch.randn(shape, dtype=torch.float64)
            for i, shape in enumerate(shapes)
        ]
        if self.cell == "s5":
            weights[0] = -weights[0].abs() - 0.1
        is_complex = self.cell in ("lru", "s5")
        kind = torch.promote_types(dtype, torch.complex64) if is_complex else dtype
        kind = torch.promote_types(kind, torch.float32) if self.cell == "rg_lru" else kind
        wide = torch.complex128 if is_complex else torch.float64
        h = torch.randn(B, N if is_complex else H, dtype=wide).to(device, kind) if self.h else None
        tensors = [
            None if t is None else t.to(device, dtype) for t in (torch.randn(B, X, dtype=torch.float64), *weights)
        ]
        return (tensors[0], h, tensors[1:]), {"cell": self.cell}


CELLS = [
    *(Cell(cell) for cell in ("min_gru", "min_gru_g", "min_lstm", "min_lstm_g", "rg_lru", "lru", "s5")),
    *(Cell(cell, h=False, bias=False) for cell in ("min_gru", "min_lstm", "rg_lru", "lru", "s5")),
]

READOUTS = [
    ReadOut(3, 2, 3, 4),
    ReadOut(3, 2, 2, 3, "TB", "TB", True, None, reverse=True),
    ReadOut(4, 2, 2, 3, "B", "T", False, "shared", batch_first=True),
    ReadOut(3, 2, 2, 5, "T", None, True, "rows", reverse=True, batch_first=True),
]
READOUTS_LARGE = [
    ReadOut(70, 2, 40, 16),
    ReadOut(45, 3, 5, 24, "TB", "TB", True),
    ReadOut(40, 2, 3, 130, "", None, True, None, reverse=True),
]
READOUTS_EMPTY = [ReadOut(*sizes, full=full) for sizes in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)) for full in (0, 1)]

CHAINS = [
    Chain(2, sizes, shared, levels)
    for sizes, shared, levels in (
        ((3, 4, 2, 3), (1,), -1),
        ((3, 4, 2, 3), (1,), 1),
        ((2,) * 5, (), 0),
        ((2,) * 5, (0,), 63),
    )
]
CHAINS_LARGE = [Chain(3, (6,) * 9, (), levels) for levels in (-1, 0, 1, 2, 63)]
CHAINS_EMPTY = [
    Chain(B, sizes, (), levels)
    for B, sizes in ((0, (4, 5, 3, 2)), (2, (4, 0, 3, 2)), (2, (0, 3, 2)), (2, (4, 4, 4, 0)))
    for levels in (0, 63)
]


class Pointwise(NamedTuple):
    """A step of tests/scan/pointwise_steps.py over T steps of (B, H) channels."""

    step: str
    T: int
    B: int
    H: int
    reverse: bool = False
    stacked: bool = False
    algorithm: str = "auto"

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        case, shape = STEPS[self.step], (self.B + more, self.H + more)
        lists = arguments(case, self.T + more, shape, dtype, device)
        init, inputs, parameters = (list(a) if isinstance(a, tuple) else [a] for a in lists)
        program = traced(
            "pointwise_scan", case.step, case.states, case.inputs, tuple(not several for several in case.tuples),
            torch.float32, torch.Size(shape), [p.shape for p in parameters],
        ).program  # fmt: skip
        if self.stacked:
            inputs = [torch.stack(inputs, 2)]
        args = (init, inputs, parameters, program, self.stacked, self.reverse, self.algorithm)
        return args, {}

    def __str__(self) -> str:
        flags = [name for name in ("reverse", "stacked") if getattr(self, name)]
        return "-".join([self.step, f"T{self.T}", f"B{self.B}", f"H{self.H}", self.algorithm, *flags])


POINTWISE = [
    Pointwise("gru", 3, 2, 3),
    Pointwise("gru", 20, 1, 2, algorithm="newton"),
    Pointwise("lstm", 3, 2, 2, reverse=True, stacked=True),
    Pointwise("lstm", 18, 1, 1, stacked=True, algorithm="newton"),
    Pointwise("decay", 4, 2, 3, algorithm="walk"),
]
POINTWISE_LARGE = [
    Pointwise("gru", 400, 3, 70),
    Pointwise("lstm", 300, 2, 50, algorithm="newton"),
    Pointwise("gru", 40, 3, 70, reverse=True, stacked=True, algorithm="walk"),
]
POINTWISE_EMPTY = [Pointwise("lstm", *size) for size in [(0, 3, 5), (4, 0, 5), (4, 3, 0), (0, 0, 0)]]


def _of_products(sample: Cell, device: str, operands: Sequence[Tensor]) -> torch.dtype:
    """Autocast narrows products; it leaves float64."""
    return torch.float64 if operands[0].dtype == torch.float64 else torch.bfloat16


OPS = [
    Op("pointwise_scan", POINTWISE, POINTWISE_LARGE, POINTWISE_EMPTY, vmap=False),
    Op("linear_scan", LINEAR, LINEAR_LARGE, LINEAR_EMPTY),
    Op("linear_scan_readout", READOUTS, READOUTS_LARGE, READOUTS_EMPTY, results=lambda sample, results: results[:1]),
    Op("scan_cell", CELLS, results=lambda sample, results: results[:1], autocast=_of_products),
    Op("chain_backward", CHAINS, CHAINS_LARGE, CHAINS_EMPTY),
]
