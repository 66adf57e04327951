"""Problems for weft::rnn: sizes and options, and the arguments of a call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from weft._rnn.table import CELLS as TRAITS

from tests.ops import Op

CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
"""Those that torch has."""
OURS = ("slstm", "slstm_exp")


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
    heads: int = 1

    def __str__(self) -> str:
        flags = ("-both" if self.bidirectional else "") + ("" if self.bias else "-nobias")
        flags += ("" if self.state else "-nostate") + ("" if self.lengths is None else "-packed")
        flags += "" if self.backward == "persistent" else f"-{self.backward}"
        flags += "" if self.heads == 1 else f"-{self.heads}heads"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.cell}-T{self.T}-B{self.B}-I{self.I}-H{self.H}{flags}-{dtype}"

    @property
    def keywords(self) -> dict:
        keywords = {"cell": self.cell, "bidirectional": self.bidirectional, "backward": self.backward}
        return keywords if self.heads == 1 else {**keywords, "num_heads": self.heads}

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Which results the tests give a gradient: with one of the cells no scan would run."""
        if not TRAITS[self.cell].others:
            return (0, 1)
        return (0, 1, 2, 3) if self.backward == "persistent" else (0, 1, 2)

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        sample = replace(self, T=self.T + more, I=self.I + more, dtype=dtype)
        if self.lengths is None:
            sample = replace(sample, B=self.B + more, H=self.H + more * self.heads)
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
    traits = TRAITS[sample.cell]
    rows, bound = traits.gates * sample.H, factor * max(sample.H // sample.heads, 1) ** -0.5

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
        weights += [make(rows, sample.I, uniform=True), make(rows, sample.H // sample.heads, uniform=True)]
        if sample.bias:
            weights += [make(rows, uniform=True), make(rows, uniform=True)]
    input, h0, c0 = make(*leading, sample.I), None, None
    if sample.state:
        h0 = make(*states)
    if sample.state and traits.others:
        c0 = make(*states[:2], traits.others * sample.H)
        with torch.no_grad():
            with_normaliser(c0, sample.H)
    return Arguments(input, h0, c0, weights, batch_sizes)


def with_normaliser(c: Tensor, H: int) -> Tensor:
    """The states beside h, in place with a positive n where they have one."""
    if c.size(-1) > H:
        c[..., H : 2 * H].abs_().add_(0.5)
    return c


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
SMALL += [
    sample
    for cell, heads in (("lstm", 3), ("gru", 2), ("rnn_tanh", 2), ("slstm", 1), ("slstm", 2), ("slstm_exp", 2))
    for sample in (
        Sample(cell, 3, 2, 2, 2 * heads, heads=heads),
        packed(cell, (2, 1), 2, 2 * heads, heads=heads, bidirectional=True, state=heads == 2),
    )
]
# A kernel of one warp, of a cluster or grid of blocks, packed; of one warp and of one block for a chunk.
LARGE = [Sample(c, 64, 5, 3, h) for c in CELLS for h in (20, 512)]
LARGE += [packed(c, (30, 12, 12, 5), 3, 128, bidirectional=True) for c in CELLS]
LARGE += by_scan(Sample(c, 64, 5, 3, h, bidirectional=both) for c in CELLS for h, both in ((20, False), (64, True)))
LARGE += by_newton(Sample(c, 700, 2, 3, 20) for c in CELLS)
ONE_NUMBER = [Sample(c, 300, 3, 1, 20, bidirectional=both, bias=not both) for c in CELLS for both in (False, True)]
LARGE += [*by_scan(ONE_NUMBER), *by_newton(ONE_NUMBER)]
LARGE += [Sample(c, 64, 5, 3, 4 * h, heads=4, bidirectional=h == 20) for c in ("lstm", "slstm") for h in (20, 128)]
EMPTY_SIZES = ((0, 2, 3, 4), (3, 0, 2, 4), (3, 2, 0, 4), (3, 2, 4, 0), (0, 0, 0, 0))
EMPTY = [
    Sample(cell, *size, bidirectional=index % 2 == 0, state=index % 3 != 0, backward=backward)
    for cell, (index, size), backward in itertools.product(
        CELLS, enumerate(EMPTY_SIZES), ("persistent", "scan", "newton")
    )
]


EMPTY += [
    Sample("slstm", *size, heads=2, state=index % 2 == 0)
    for index, size in enumerate(((0, 2, 3, 4), (3, 0, 2, 4), (3, 2, 0, 4), (3, 2, 4, 0)))
]


def dtype_under_autocast(sample: Sample, device: str, operands: Sequence[Tensor]) -> torch.dtype:
    """torch.nn's: on CUDA float16 whatever the region's dtype; on the CPU a GRU takes the state's where it is wider."""
    if operands[0].dtype == torch.float64:
        return torch.float64
    if sample.cell in OURS:
        return torch.bfloat16
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
    heads: int = 1

    def __str__(self) -> str:
        text = f"{self.cell}-B{self.B}-I{self.I}-H{self.H}" + ("" if self.bias else "-nobias")
        return text if self.heads == 1 else f"{text}-{self.heads}heads"

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        B, I, H = self.B + more, self.I + more, self.H + more * self.heads
        traits = TRAITS[self.cell]
        rows = traits.gates * H

        def make(*shape: int) -> Tensor:
            return (0.5 * torch.randn(shape, dtype=torch.float64)).to(device, dtype)

        states = (make(B, H), with_normaliser(make(B, traits.others * H), H) if traits.others else None)
        weights = (
            make(rows, I),
            make(rows, H // self.heads),
            *((make(rows), make(rows)) if self.bias else (None, None)),
        )
        keywords = {} if self.heads == 1 else {"num_heads": self.heads}
        return (make(B, I), *states, *weights), {"cell": self.cell, **keywords}


def cell_dtype_under_autocast(sample: CellSample, device: str, operands: Sequence[Tensor]) -> torch.dtype:
    """torch.nn's: on the CPU a GRU and an LSTM have the state's dtype where it is wider."""
    if operands[0].dtype == torch.float64:
        return torch.float64
    wide = device == "cpu" and sample.cell in ("gru", "lstm", *OURS)
    return torch.promote_types(torch.bfloat16, operands[1].dtype) if wide else torch.bfloat16


# Of few sequences and of many, which take two ways.
SMALL_CELLS = [CellSample(cell, B, 2, 3, bias) for cell in CELLS for B, bias in ((1, True), (2, False), (5, True))]
SMALL_CELLS += [
    CellSample(cell, B, 2, 2 * heads, heads=heads)
    for cell, heads in (("lstm", 3), ("gru", 2), ("slstm", 1), ("slstm", 2), ("slstm_exp", 2))
    for B in (2, 5)
]
LARGE_CELLS = [CellSample(cell, B, 48, 64) for cell in CELLS for B in (1, 3, 20, 40)]
LARGE_CELLS += [CellSample("slstm", B, 48, 64, heads=4) for B in (3, 40)]
EMPTY_CELLS = [CellSample(cell, *sizes) for cell in CELLS for sizes in ((0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0))]

OPS = [
    Op(
        "rnn_cell",
        SMALL_CELLS,
        LARGE_CELLS,
        EMPTY_CELLS,
        results=lambda sample, results: results[: 2 if TRAITS[sample.cell].others else 1],
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
    traits, rows = TRAITS[sample.cell], args.input.shape[:-1]
    like_output = (*rows, sample.directions * sample.H)
    states = (sample.directions, sample.B, sample.H)
    others = (*states[:2], traits.others * sample.H)
    shapes = (like_output, states, others, (*rows, sample.directions * traits.kept * sample.H))
    return [
        torch.randn(shapes[i], dtype=torch.float64).to(args.input.device, sample.dtype) for i in sample.differentiable
    ]
