"""Problems for weft::rnn: sizes and options, and the arguments of a call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops import Op

CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
BLOCKS = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}


@dataclass(frozen=True)
class Sample:
    cell: str
    T: int
    B: int
    I: int
    H: int
    bidirectional: bool = False
    bias: bool = True
    state: bool = True
    lengths: tuple[int, ...] | None = None
    """Packed: the steps of each sequence, descending; T and B follow from them."""
    dtype: torch.dtype = torch.float32
    backward: str = "persistent"

    def __str__(self) -> str:
        flags = ("-both" if self.bidirectional else "") + ("" if self.bias else "-nobias")
        flags += ("" if self.state else "-nostate") + ("" if self.lengths is None else "-packed")
        flags += "" if self.backward == "persistent" else f"-{self.backward}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.cell}-T{self.T}-B{self.B}-I{self.I}-H{self.H}{flags}-{dtype}"

    @property
    def keywords(self) -> dict:
        return {"cell": self.cell, "bidirectional": self.bidirectional, "backward": self.backward}

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Which results the tests give a gradient: with one of the cells no scan would run."""
        if self.cell != "lstm":
            return (0, 1)
        return (0, 1, 2, 3) if self.backward == "persistent" else (0, 1, 2)

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        sample = replace(self, T=self.T + more, I=self.I + more, dtype=dtype)
        if self.lengths is None:
            sample = replace(sample, B=self.B + more, H=self.H + more)
        else:
            sample = replace(sample, lengths=tuple(n + more for n in self.lengths))
        return tuple(arguments(sample, device)), {**self.keywords, "keep_cells": True}


def by_scan(samples: Iterable[Sample]) -> list[Sample]:
    return [replace(sample, backward="scan") for sample in samples]


def by_newton(samples: Iterable[Sample]) -> list[Sample]:
    return [replace(sample, backward="newton") for sample in samples]


def packed(cell: str, lengths: tuple[int, ...], I: int, H: int, **options) -> Sample:
    return Sample(cell, lengths[0], len(lengths), I, H, lengths=lengths, **options)


class Arguments:
    """The arguments of one call."""

    def __init__(self, input, h0, c0, weights, batch_sizes) -> None:
        self.input, self.h0, self.c0, self.weights, self.batch_sizes = input, h0, c0, list(weights), batch_sizes

    @property
    def operands(self) -> list[Tensor | None]:
        """Everything that may have a gradient, in the order of output_mask."""
        return [self.input, self.h0, self.c0, *self.weights]

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in self.operands if t is not None]

    def replaced(self, operands) -> Arguments:
        input, h0, c0, *weights = operands
        return Arguments(input, h0, c0, weights, self.batch_sizes)

    def map(self, change) -> Arguments:
        return self.replaced([None if t is None else change(t) for t in self.operands])

    def from_tensors(self, tensors) -> Arguments:
        rest = iter(tensors)
        return self.replaced([None if t is None else next(rest) for t in self.operands])

    def __iter__(self):
        return iter((self.input, self.h0, self.c0, self.weights, self.batch_sizes))


def arguments(sample: Sample, device: str, requires_grad: bool = False, factor: float = 1.0) -> Arguments:
    """Fresh inputs, uniform as torch.nn initialises."""
    generator = torch.Generator().manual_seed(hash((sample.T, sample.B, sample.I, sample.H)) % 2**31)
    rows, bound = BLOCKS[sample.cell] * sample.H, factor * max(sample.H, 1) ** -0.5

    def make(*shape: int, uniform: bool = False) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if uniform:
            values = (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * bound
        return values.to(device, sample.dtype).requires_grad_(requires_grad)

    batch_sizes, leading = None, (sample.T, sample.B)
    if sample.lengths is not None:
        lengths = torch.tensor(sample.lengths, dtype=torch.int64)
        batch_sizes = (torch.arange(sample.T)[:, None] < lengths).sum(1)
        leading = (int(batch_sizes.sum()),)
    states = (sample.directions, sample.B, sample.H)
    weights = []
    for _ in range(sample.directions):
        weights += [make(rows, sample.I, uniform=True), make(rows, sample.H, uniform=True)]
        if sample.bias:
            weights += [make(rows, uniform=True), make(rows, uniform=True)]
    return Arguments(
        make(*leading, sample.I),
        make(*states) if sample.state else None,
        make(*states) if sample.state and sample.cell == "lstm" else None,
        weights,
        batch_sizes,
    )


SMALL = [
    sample
    for cell, both in itertools.product(CELLS, (False, True))
    for sample in (
        Sample(cell, 3, 2, 2, 3, bidirectional=both, bias=not both),
        packed(cell, (3, 2, 1), 2, 2, bidirectional=both, state=not both),
        Sample(cell, 3, 2, 2, 3, bidirectional=both, state=both, backward="scan"),
        Sample(cell, 3, 2, 2, 3, bidirectional=both, state=not both, backward="newton"),
    )
]
# A kernel of one warp, of a cluster or grid of blocks, packed; of one warp and of one block for a chunk.
LARGE = [Sample(c, 64, 5, 3, h) for c in CELLS for h in (20, 512)]
LARGE += [packed(c, (30, 12, 12, 5), 3, 128, bidirectional=True) for c in CELLS]
LARGE += by_scan(Sample(c, 64, 5, 3, h, bidirectional=both) for c in CELLS for h, both in ((20, False), (64, True)))
LARGE += by_newton(Sample(c, 700, 2, 3, 20) for c in CELLS)
EMPTY_SIZES = ((0, 2, 3, 4), (3, 0, 2, 4), (3, 2, 0, 4), (3, 2, 4, 0), (0, 0, 0, 0))
EMPTY = [
    Sample(cell, *size, bidirectional=index % 2 == 0, state=index % 3 != 0, backward=backward)
    for cell, (index, size), backward in itertools.product(
        CELLS, enumerate(EMPTY_SIZES), ("persistent", "scan", "newton")
    )
]


def dtype_under_autocast(sample: Sample, device: str, operands: Sequence[Tensor]) -> torch.dtype:
    """torch.nn's: on CUDA float16 whatever the region's dtype; on the CPU a GRU takes the state's where it is wider."""
    if operands[0].dtype == torch.float64:
        return torch.float64
    if device == "cuda":
        return torch.float16
    state = operands[1 if sample.state else 0].dtype
    return torch.promote_types(torch.bfloat16, state) if sample.cell == "gru" else torch.bfloat16


@dataclass(frozen=True)
class CellSample:
    """A call of weft::rnn_cell."""

    cell: str
    B: int
    I: int
    H: int
    bias: bool = True

    def __str__(self) -> str:
        return f"{self.cell}-B{self.B}-I{self.I}-H{self.H}" + ("" if self.bias else "-nobias")

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        B, I, H = self.B + more, self.I + more, self.H + more
        rows = BLOCKS[self.cell] * H

        def make(*shape: int) -> Tensor:
            return (0.5 * torch.randn(shape, dtype=torch.float64)).to(device, dtype)

        states = (make(B, H), make(B, H) if self.cell == "lstm" else None)
        weights = (make(rows, I), make(rows, H), *((make(rows), make(rows)) if self.bias else (None, None)))
        return (make(B, I), *states, *weights), {"cell": self.cell}


def cell_dtype_under_autocast(sample: CellSample, device: str, operands: Sequence[Tensor]) -> torch.dtype:
    """torch.nn's: on the CPU a GRU and an LSTM have the state's dtype where it is wider."""
    if operands[0].dtype == torch.float64:
        return torch.float64
    wide = device == "cpu" and sample.cell in ("gru", "lstm")
    return torch.promote_types(torch.bfloat16, operands[1].dtype) if wide else torch.bfloat16


# Of few sequences and of many, which take two ways.
SMALL_CELLS = [CellSample(cell, B, 2, 3, bias) for cell in CELLS for B, bias in ((1, True), (2, False), (5, True))]
LARGE_CELLS = [CellSample(cell, B, 48, 64) for cell in CELLS for B in (1, 3, 20, 40)]
EMPTY_CELLS = [CellSample(cell, *sizes) for cell in CELLS for sizes in ((0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0))]

OPS = [
    Op(
        "rnn_cell",
        SMALL_CELLS,
        LARGE_CELLS,
        EMPTY_CELLS,
        results=lambda sample, results: results[: 2 if sample.cell == "lstm" else 1],
        autocast=cell_dtype_under_autocast,
    ),
    Op(
        "rnn",
        SMALL,
        LARGE,
        EMPTY,
        results=lambda sample, results: [results[i] for i in sample.differentiable],
        autocast=dtype_under_autocast,
    ),
]


def gradients(sample: Sample, args: Arguments) -> list[Tensor]:
    """Random gradients for the differentiable results."""
    like_output = (*args.input.shape[:-1], sample.directions * sample.H)
    states = (sample.directions, sample.B, sample.H)
    shapes = (like_output, states, states, like_output)
    return [
        torch.randn(shapes[i], dtype=torch.float64).to(args.input.device, sample.dtype) for i in sample.differentiable
    ]
