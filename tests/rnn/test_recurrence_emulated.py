"""The recurrence kernel of weft::rnn on a processor, by tests/emulator, beside the operator: every tier, with blocks
that run at very different speeds, messages that come late and in any order, and memory that ends where tensors end."""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from weft._rnn.table import CELLS as TRAITS

from tests import emulated
from tests.common import relative_error

CELLS = tuple(TRAITS)
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 3}
BOUNDS = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 2e-5}
PAGE = mmap.PAGESIZE

pytestmark = emulated.MARKS


@dataclass(frozen=True)
class Sample:
    cell: str
    tier: str
    group: int
    columns: int
    H: int
    """Of each head."""
    backward: bool = False
    dtype: torch.dtype = torch.float32
    cluster: int = 1
    fma: bool = False
    tf32: bool = False
    resident: int = 99
    split: int = 8
    steps: int = 9
    batch: int = 3
    lengths: tuple[int, ...] | None = None
    directions: int = 1
    together: bool = True
    """Both directions in one launch."""
    at_once: int | None = None
    """Groups of a launch."""
    state: bool = True
    heads: int = 1

    def __str__(self) -> str:
        words = [self.cell, "backward" if self.backward else "forward", self.tier, f"{self.group}x{self.columns}"]
        words += [f"heads{self.heads}"] if self.heads > 1 else []
        words += [str(self.dtype).removeprefix("torch."), "fma" if self.fma else "mma"]
        return "-".join([*words, *([f"pool{self.cluster}"] if self.cluster > 1 else [])])


SAMPLES = [
    Sample("lstm", "small", 1, 3, 33, directions=2, batch=5),
    Sample("gru", "small", 1, 2, 20, backward=True, fma=True, split=4),
    Sample("lstm", "cluster", 8, 2, 61, dtype=torch.bfloat16, lengths=(9, 7, 7, 1)),
    Sample("gru", "cluster", 4, 3, 50, backward=True, directions=2, resident=1),
    Sample("rnn_tanh", "cluster", 4, 2, 36, fma=True, lengths=(12, 5, 1)),
    Sample("gru", "grid", 8, 3, 61, dtype=torch.float16, lengths=(9, 8, 2, 2)),
    Sample("lstm", "grid", 8, 2, 64, backward=True, directions=2, together=False, resident=0),
    Sample("lstm", "grid", 16, 2, 52, cluster=4, tf32=True),
    Sample("gru", "grid", 16, 2, 52, backward=True, cluster=8, lengths=(9, 8, 8, 3, 1), at_once=1),
    Sample("lstm", "grid", 8, 3, 61, backward=True, dtype=torch.bfloat16, cluster=2, directions=2),
    Sample("gru", "grid", 8, 1, 33, fma=True, cluster=2, directions=2, together=False, at_once=2),
    Sample("rnn_relu", "grid", 8, 2, 24, backward=True, fma=True, cluster=4, state=False),
    Sample("lstm", "small", 1, 2, 20, heads=3, directions=2),
    Sample("gru", "small", 1, 3, 13, heads=2, backward=True, dtype=torch.float16, lengths=(9, 7, 7, 1)),
    Sample("gru", "cluster", 4, 2, 36, heads=3, directions=2, together=False, lengths=(9, 4, 1)),
    Sample("lstm", "cluster", 4, 2, 33, heads=2, backward=True, directions=2, dtype=torch.bfloat16),
    Sample("lstm", "grid", 8, 2, 32, heads=2, at_once=1, dtype=torch.float16),
    Sample("gru", "grid", 8, 2, 29, heads=3, backward=True, cluster=2, at_once=4),
    Sample("slstm", "small", 1, 3, 20, heads=2, directions=2, lengths=(9, 7, 7, 1)),
    Sample("slstm", "small", 1, 2, 13, heads=3, backward=True, lengths=(9, 7, 7, 1)),
    Sample("slstm_exp", "cluster", 4, 2, 33, heads=2, dtype=torch.bfloat16),
    Sample("slstm", "cluster", 8, 2, 61, backward=True, dtype=torch.float16, directions=2, resident=1),
    Sample("slstm", "grid", 8, 3, 61, cluster=2, state=False),
    Sample("slstm_exp", "grid", 8, 2, 29, heads=2, backward=True, cluster=4, lengths=(14, 9, 9, 3, 1), at_once=3),
]


class Arguments(ctypes.Structure):
    """The kernel's Args."""

    _fields_ = (
        *((name, ctypes.c_void_p * 2) for name in ("w_hh", "b_ih", "b_hh")),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int),
        ("x_direction", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("h0", "c0", "output", "cells")),
        ("output_stride", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("h_n", "c_n", "grad_output", "grad_cells", "grad_h_n", "grad_c_n")),
        ("dgates", ctypes.c_void_p),
        ("dgates_stride", ctypes.c_int),
        ("dgates_direction", ctypes.c_int64),
        ("exchange", ctypes.c_void_p),
        ("exchange_stride", ctypes.c_int),
        ("exchange_direction", ctypes.c_int64),
        ("exchange_value", ctypes.c_int * 4),
        ("lengths", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        *(
            (name, ctypes.c_int)
            for name in (
                "steps", "batch", "first_sequence", "first_direction", "directions", "save", "publishes_result"
            )
        ),
        ("gate", ctypes.c_void_p),
    )  # fmt: skip


@dataclass
class Memory:
    """Copies of tensors that end where a page without access begins, and that a child process writes, too."""

    libc: ctypes.CDLL = field(default_factory=lambda: ctypes.CDLL(None, use_errno=True))

    def __post_init__(self) -> None:
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        self.libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def guarded(self, tensor: Tensor) -> Tensor:
        # 16 bytes is the alignment that the kernel may ask for; a shorter tail is not guarded.
        size = math.ceil(max(tensor.nbytes, 1) / 16) * 16
        pages = math.ceil(size / PAGE) * PAGE
        start = self.libc.mmap(
            None, pages + PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1, 0
        )
        assert self.libc.mprotect(start + pages, PAGE, 0) == 0
        buffer = (ctypes.c_char * size).from_address(start + pages - size)
        copy = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
        return copy.copy_(tensor)


def build(sample: Sample, folder: Path) -> ctypes.CDLL:
    per_chunk = 16 // sample.dtype.itemsize
    units = math.ceil(math.ceil(sample.H / sample.group) / per_chunk) * per_chunk
    constants = {
        "CELL": CELLS.index(sample.cell), "TYPE": 2 if sample.tf32 else TYPES[sample.dtype],
        "BACKWARD": sample.backward, "HIDDEN": sample.H, "HEADS": sample.heads, "GROUP": sample.group,
        "COLUMNS": sample.columns, "UNITS": units, "WARPS": 8, "SPLIT": sample.split, "RESIDENT": sample.resident,
        "CLUSTER": sample.cluster, "FMA": sample.fma, "EXCHANGE": sample.tier == "grid",
        "PACKED": sample.lengths is not None,
    }  # fmt: skip
    return emulated.build("recurrence", folder, **constants)


def launch(library: ctypes.CDLL, a: Arguments, blocks: int, cluster: int, exchanged: Tensor, seed: int) -> None:
    place = ctypes.c_void_p(exchanged.data_ptr()), ctypes.c_long(exchanged.nbytes)
    ended_well = emulated.ends_well(lambda: library.run(ctypes.byref(a), blocks, cluster, *place, seed))
    assert ended_well, "the emulator refuses what the kernel does"


def emulate(sample: Sample, library: ctypes.CDLL, seed: int) -> None:
    """Runs the kernel on random data, and compares with the operator."""
    torch.manual_seed(seed)
    cell, P, heads, D, dtype = sample.cell, sample.H, sample.heads, sample.directions, sample.dtype
    H, (G, saved, others, kept) = P * heads, (getattr(TRAITS[cell], n) for n in ("gates", "saved", "others", "kept"))
    lstm, gated = others > 0, saved > 0
    if sample.lengths is None:
        T, B, sizes = sample.steps, sample.batch, None
        x = torch.randn(T, B, G * H).to(dtype)
    else:
        T, B = sample.lengths[0], len(sample.lengths)
        sizes = torch.tensor([sum(n > t for n in sample.lengths) for t in range(T)])
        x = torch.randn(int(sizes.sum()), G * H).to(dtype)
    rows = x.numel() // (G * H)
    h0, c0 = torch.randn(D, B, H).to(dtype), torch.randn(D, B, others, H)
    if others > 2:  # a normaliser is positive, but where there is no state yet
        c0[:, :, 1] = c0[:, :, 1].relu()
        c0[:, :, 0] *= c0[:, :, 1] > 0
    h0, c0 = (h0, c0.flatten(2).to(dtype) if lstm else None) if sample.state else (None, None)
    weights = []
    for _ in range(D):  # the projected input is the input
        bound = P**-0.5
        random = [torch.empty(n, *m).uniform_(-bound, bound).to(dtype) for n, *m in ((G * H, P), (G * H,), (G * H,))]
        weights += [torch.eye(G * H).to(dtype), *random]
    flags = {"cell": cell, "bidirectional": D == 2, "num_heads": heads}
    output, h_n, c_n, cells, gates = torch.ops.weft.rnn(x, h0, c0, weights, sizes, save=True, **flags)

    memory, alive, a = Memory(), [], Arguments()

    def put(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        alive.append(memory.guarded(tensor))
        return alive[-1].data_ptr()

    def result(*shape: int) -> Tensor:
        alive.append(memory.guarded(torch.full(shape, float("nan"), dtype=dtype)))
        return alive[-1]

    for d in range(D):
        a.w_hh[d], a.b_ih[d], a.b_hh[d] = (put(w) for w in weights[4 * d + 1 : 4 * d + 4])
    a.h0, a.c0, a.output_stride, a.steps, a.batch, a.save = put(h0), put(c0), D * H, T, B, 1
    if sizes is not None:
        a.lengths = put(torch.tensor(sample.lengths, dtype=torch.int32))
        a.offsets = put(sizes.cumsum(0) - sizes)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    if not sample.backward:
        stride = 4 * H if gated else G * H
        projected = result(D, rows, stride)
        projected[..., : G * H] = x.view(rows, -1)
        exchanged, values, places = result(rows, D * H), 1, [0]
        a.x, a.x_stride, a.x_direction, a.output = projected.data_ptr(), stride, rows * stride, exchanged.data_ptr()
        ends = result(D, B, H), result(D, B, max(others, 1) * H)
        a.h_n, a.c_n = (end.data_ptr() for end in ends)
        found |= {"output": (exchanged, output), "h_n": (ends[0], h_n)}
        if gated:
            found["gates"] = projected, gates
        if lstm:
            states = result(rows, D * kept * H)
            a.cells = states.data_ptr()
            found |= {"cells": (states, cells), "c_n": (ends[1], c_n)}
        a.exchange_stride, a.exchange_direction = D * H, H
    else:
        grads = [torch.randn_like(t) for t in (output, h_n)] + [torch.randn_like(c_n) if lstm else None]
        expected = torch.ops.weft.rnn_backward(
            *grads, None, x, h0, c0, weights, sizes, output, cells, gates, output_mask=[True] * (3 + len(weights)),
            **flags,
        )  # fmt: skip
        stride = 4 * H if gated else H
        a.x, a.x_stride, a.x_direction = put(gates if gated else torch.zeros(1)), 4 * H, rows * 4 * H
        a.output, a.cells = put(output), put(cells if lstm else None)
        a.grad_output, a.grad_h_n, a.grad_c_n = (put(g) for g in grads)
        exchanged, values = result(D, rows, stride), G
        places = [3 if cell == "gru" and v == 2 else v for v in range(G)]
        a.dgates, a.dgates_stride, a.dgates_direction = exchanged.data_ptr(), stride, rows * stride
        found["dgates"] = exchanged, expected[0]
        if sample.state:
            initial = result(D, B, H), result(D, B, max(others, 1) * H)
            a.h_n, a.c_n = initial[0].data_ptr(), initial[1].data_ptr() if lstm else None
            found["grad_h0"] = initial[0], expected[1]
            if lstm:
                found["grad_c0"] = initial[1], expected[2]
        a.exchange_stride, a.exchange_direction = stride, rows * stride
    # As cuda/rnn.cpp lays the exchanged tensor out.
    per_chunk = 16 // dtype.itemsize
    padded = heads * math.ceil(P / per_chunk) * per_chunk
    a.publishes_result = padded == H and a.exchange_stride % per_chunk == 0
    a.exchange_value[:values] = [place * H for place in places]
    if not a.publishes_result:
        exchanged = result(D, rows, values * padded)
        a.exchange_stride, a.exchange_direction = values * padded, rows * values * padded
        a.exchange_value[:values] = [v * padded for v in range(values)]
    if sample.tier == "grid":
        exchanged.view(torch.int16 if dtype.itemsize == 2 else torch.int32).fill_(-1)
        a.exchange = exchanged.data_ptr()

    groups = math.ceil(B / sample.columns) * heads
    a.directions = D if sample.together else 1
    at_once = sample.at_once or groups
    cluster = sample.group if sample.tier == "cluster" else sample.cluster
    for direction in range(0, D, a.directions):
        for first in range(0, groups, at_once):
            a.first_direction, a.first_sequence = direction, first * sample.columns
            blocks = sample.group * min(at_once, groups - first) * a.directions
            launch(library, a, blocks, cluster, exchanged, seed)

    bound = BOUNDS[torch.float16 if sample.tf32 else dtype]
    if sample.backward:
        each = found["dgates"][0][..., : G * H]
        found["dgates"] = (each.float().sum(0) if D == 2 else each[0]), found["dgates"][1]
    for name, (value, reference) in found.items():
        assert relative_error(value.reshape(reference.shape), reference) <= bound, name


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_the_kernel_on_a_processor(sample: Sample, tmp_path):
    library = build(sample, tmp_path)
    for seed in range(2):
        emulate(sample, library, seed)


POOLED = Sample("lstm", "grid", 16, 2, 52, cluster=4, batch=2)
FLAWS = {
    "does not wait for the sums": (
        POOLED,
        "common/cuda/exchange_cluster.jit.cuh",
        "mbarrier_wait<true>(barrier(round), u32((round - kFirst) >> 1) & 1);",
        "",
    ),
    "does not poll": (POOLED, "common/cuda/exchange_grid.jit.cuh", "while (__any_sync(~0u, missing())) reload();", ""),
    "does not wait for its own warps": (
        POOLED,
        "rnn/persistent/cuda/recurrence.jit.cu",
        "if (kGroup == 1) prefetch();\n    __syncthreads();",
        "",
    ),
    "writes beyond the vector": (
        Sample("gru", "cluster", 4, 3, 50),
        "rnn/persistent/cuda/recurrence.jit.cu",
        "+ chunk / kChunksOfSlice * kPitch",
        "+ (chunk / kChunksOfSlice + 3) * kPitch",
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_emulator_notices(flaw: str, tmp_path):
    """A kernel with a flaw that tests on a GPU may well pass."""
    sample, source, right, wrong = FLAWS[flaw]
    library = build(sample, emulated.with_flaw(source, right, wrong, tmp_path))
    with pytest.raises(AssertionError):
        for seed in range(3):
            emulate(sample, library, seed)
