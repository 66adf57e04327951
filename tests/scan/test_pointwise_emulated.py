"""The kernels of pointwise_scan on a processor, by tests/emulator: warps of any speed, chunks meet in any order."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import emulated
from tests.common import relative_error
from tests.scan.pointwise_steps import STEPS, StepCase, arguments

pytestmark = emulated.MARKS

_pointer, _long = ctypes.c_void_p, ctypes.c_longlong
ROUNDS = 8
ELEMENTS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "BFloat16", torch.float16: "Float16"}


class Operand(ctypes.Structure):
    _fields_ = [("data", _pointer), ("step", _long), ("outer", _long), ("inner", _long)]


class Args(ctypes.Structure):
    """csrc/scan/pointwise/pointwise_args.h."""

    _fields_ = [("operands", Operand * 64), ("grads", Operand * 8), ("results", Operand * 64), ("states", _pointer * 8),
                ("T", _long), ("N", _long), ("chunk", _long), ("chunks", ctypes.c_int), ("reverse", ctypes.c_int),
                *((name, _pointer) for name in ("starts", "ends", "derivatives", "marks", "counters", "fallen",
                                                "statistics"))]  # fmt: skip


def program_of(case: StepCase, shape: tuple[int, ...]) -> str:
    from weft._scan.step_trace import traced

    single = tuple(not several for several in case.tuples)
    found = traced("test", case.step, case.states, case.inputs, single, torch.float32, torch.Size(shape),
                   [torch.Size(shape[-1:])] * case.parameters)  # fmt: skip
    assert found.obstacle is None
    return found.program


def library(folder: Path, case: StepCase, dtype: torch.dtype, batch: int, chunked: bool, backward: bool):
    from weft import _C

    next_, next_jacobian, vjp, vjp_jacobian = _C._testing.pointwise_bodies(program_of(case, (3, 40)))
    S, I, P = case.states, case.inputs, case.parameters
    macros = {
        "ELEMENT": ELEMENTS[dtype], "TYPE": "double" if dtype == torch.float64 else "float", "STATES": S, "INPUTS": I,
        "PARAMETERS": P, "BATCH": batch, "CHUNKED": int(chunked), "GRADS": (1 << S) - 1,
        "WANTED": f"{(1 << S + I + P) - 1}ull", "NEXT": next_, "NEXT_JACOBIAN": next_jacobian, "VJP": vjp,
        "VJP_JACOBIAN": vjp_jacobian,
    }  # fmt: skip
    folder.joinpath("step.h").write_text("".join(f"#define WEFT_{name} {value}\n" for name, value in macros.items()))
    return emulated.build("pointwise_scan", folder, BACKWARD=backward)


class Run:
    """A problem of (3, 40) channels on an emulated device."""

    def __init__(self, case: StepCase, T: int, chunks: int, batch: int, dtype: torch.dtype, reverse: bool = False):
        self.case, self.T, self.dtype, self.reverse, self.batch = case, T, dtype, reverse, batch
        self.acc = torch.float64 if dtype == torch.float64 else torch.float32
        self.shape, self.N = (3, 40), 120
        self.chunk = math.ceil(T / chunks / batch) * batch
        self.chunks = math.ceil(T / self.chunk)
        lists = arguments(case, T, self.shape, dtype)
        self.init, self.inputs, self.parameters = (list(a) if isinstance(a, tuple) else [a] for a in lists)
        self.given = lists
        self.alive: list[Tensor] = []

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.full(size, torch.nan, dtype=dtype or self.acc)
        self.alive.append(made)
        return made

    def zeros(self, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        made = torch.zeros(*size, dtype=dtype)
        self.alive.append(made)
        return made

    def args(self, states: list[Tensor]) -> Args:
        a = Args(T=self.T, N=self.N, chunk=self.chunk, chunks=self.chunks, reverse=self.reverse)
        S, C = self.case.states, self.chunks
        operands = [Operand(t.data_ptr(), 0, 0, self.N) for t in self.init]
        operands += [Operand(t.data_ptr(), self.N, 0, self.N) for t in self.inputs]
        operands += [Operand(t.data_ptr(), 0, 0, 40) for t in self.parameters]
        for i, operand in enumerate(operands):
            a.operands[i] = operand
        for i, t in enumerate(states):
            a.states[i] = t.data_ptr()
        a.starts = self.empty(2, C, S, self.N).data_ptr()
        a.ends = self.empty(2, C, S, self.N).data_ptr()
        a.derivatives = self.empty(2, C, S * S, self.N).data_ptr()
        a.marks = self.empty(math.ceil(self.T / self.batch), S, self.N).data_ptr()
        a.counters = self.zeros(ROUNDS + 4).data_ptr()
        a.fallen = self.zeros(self.N).data_ptr()
        return a

    def forward(self, library, seed: int, blocks: int = 3) -> tuple[list[Tensor], Tensor]:
        states = [self.empty(self.T, *self.shape, dtype=self.dtype) for _ in range(self.case.states)]
        a = self.args(states)
        statistics = self.zeros(self.N, 4, dtype=torch.int64)
        a.statistics = statistics.data_ptr()
        library.run(ctypes.byref(a), blocks, seed)
        return states, statistics

    def backward(self, library, states: list[Tensor], grads: list[Tensor], seed: int, blocks: int = 3):
        a = self.args(states)
        S = self.case.states
        for i, g in enumerate(grads):
            a.grads[i] = Operand(g.data_ptr(), self.N, 0, self.N)
        results = [self.empty(*self.shape, dtype=self.dtype) for _ in self.init]
        results += [self.empty(self.T, *self.shape, dtype=self.dtype) for _ in self.inputs]
        results += [self.empty(self.chunks, *self.shape) for _ in self.parameters]
        for i, t in enumerate(results):
            a.results[i] = Operand(t.data_ptr(), self.N if S <= i < S + len(self.inputs) else 0, 0, self.N)
        library.run(ctypes.byref(a), blocks, seed)
        first = S + len(self.inputs)
        return [*results[:first], *(t.sum((0, 1)) for t in results[first:])]

    def reference(self, grads: list[Tensor] | None = None):
        from weft.scan import pointwise_scan_reference

        def wide(a):
            return tuple(map(wide, a)) if isinstance(a, tuple) else a.double().requires_grad_()

        init, inputs, parameters = map(wide, self.given)
        found = pointwise_scan_reference(self.case.step, init, inputs, parameters, reverse=self.reverse)
        states = list(found) if isinstance(found, tuple) else [found]
        if grads is None:
            return [s.detach() for s in states]
        leaves = [t for a in (init, inputs, parameters) for t in (a if isinstance(a, tuple) else (a,))]
        return torch.autograd.grad(states, leaves, [g.double() for g in grads], materialize_grads=True)


CASES = [
    ("gru", 203, 5, torch.float32, False), ("gru", 203, 5, torch.float64, True), ("gru", 203, 4, torch.bfloat16, False),
    ("slow_gru", 203, 5, torch.float64, False), ("lstm", 130, 4, torch.float64, False),
    ("lstm", 130, 3, torch.float32, True), ("spiking", 150, 4, torch.float64, False),
    ("chaos", 150, 12, torch.float64, False), ("decay", 150, 9, torch.float32, False),
    ("logistic", 600, 3, torch.float64, False),
]  # fmt: skip
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def steps_hold(run: Run, states: list[Tensor]) -> None:
    """Each step satisfies the recurrence from the step before it, across chunks too."""
    near = 2.0**-48 if run.dtype == torch.float64 else 2.0**-20
    before = [torch.cat([h[None], s[:-1]]) if not run.reverse else torch.cat([s[1:], h[None]])
              for h, s in zip(run.init, states, strict=True)]  # fmt: skip
    tuples = run.case.tuples
    given = [
        tuple(v) if several else v[0] for v, several in zip((before, run.inputs, run.parameters), tuples, strict=True)
    ]
    after = run.case.step(*given)
    for want, have in zip(after if tuples[0] else (after,), states, strict=True):
        assert ((want - have).abs() <= near * have.abs().clamp(min=1)).all()


@pytest.mark.parametrize(("name", "T", "chunks", "dtype", "reverse"), CASES)
def test_chunks_meet_in_any_order(tmp_path, name, T, chunks, dtype, reverse):
    case, batch = STEPS[name], 4
    built = library(tmp_path, case, dtype, batch, True, False)
    run = Run(case, T, chunks, batch, dtype, reverse)
    found = [run.forward(built, seed, blocks) for seed, blocks in ((1, 3), (2, 1), (3, 7))]
    for states, statistics in found:
        assert all(torch.equal(s, other) for s, other in zip(states, found[0][0], strict=True))  # the same bits
        assert torch.equal(statistics, found[0][1])
    states, statistics = found[0]
    if dtype != torch.bfloat16:
        steps_hold(run, states)
    if name != "chaos":
        for have, want in zip(states, run.reference(), strict=True):
            assert relative_error(have.double(), want) < BOUNDS[dtype]
    rounds, redone, _, fell = statistics.unbind(1)
    residual = statistics[:, 2].int().view(torch.float32)
    assert (residual <= (2.0**-51 if dtype == torch.float64 else 2.0**-22)).all()
    if name == "chaos":
        assert fell.any()
        assert (redone <= T + (chunks - 1) * T).all()
    else:
        assert not fell.any()
        assert (rounds > 1).any()


@pytest.mark.parametrize(("name", "T", "chunks", "dtype", "reverse"), CASES)
def test_gradients_of_chunks(tmp_path, name, T, chunks, dtype, reverse):
    case, batch = STEPS[name], 4
    run = Run(case, T, chunks, batch, dtype, reverse)
    if name == "chaos":  # of which no two walks agree
        run.parameters = [p * 0.1 for p in run.parameters]
        run.given = (run.init[0], run.inputs[0], run.parameters[0])
    states = [s.to(dtype) for s in run.reference()]
    grads = [torch.randn(T, *run.shape).to(dtype) for _ in states]
    want = run.reference(grads)
    built = library(tmp_path, case, dtype, batch, True, True)
    found = [run.backward(built, states, grads, seed, blocks) for seed, blocks in ((1, 3), (2, 7))]
    for have, again, right in zip(*found, want, strict=True):
        assert torch.equal(have, again)
        assert relative_error(have.double(), right) < 10 * BOUNDS[dtype]


@pytest.mark.parametrize("backward", [False, True])
def test_one_chunk(tmp_path, backward):
    case = STEPS["lstm"]
    run = Run(case, 37, 1, 4, torch.float64)
    built = library(tmp_path, case, torch.float64, 4, False, backward)
    want = run.reference()
    if not backward:
        for have, right in zip(run.forward(built, 1)[0], want, strict=True):
            assert relative_error(have, right) < 1e-13
        return
    grads = [torch.randn(37, *run.shape, dtype=torch.float64) for _ in want]
    for have, right in zip(run.backward(built, want, grads, 1), run.reference(grads), strict=True):
        assert relative_error(have, right) < 1e-12


@pytest.mark.parametrize("T", [61, 8, 3])
def test_many_channels(tmp_path, T):
    """Steps are loaded one by one, to the same bits."""
    run = Run(STEPS["gru"], T, 1, 4, torch.float32)
    found = []
    for name in ("few", "many"):
        folder = tmp_path / name
        if name == "many":
            emulated.with_flaw("scan/pointwise/cuda/pointwise.jit.cuh", "kMany = 1 << 16;", "kMany = 1;", folder)
        else:
            folder.mkdir()
        states, _ = run.forward(library(folder, run.case, torch.float32, 4, False, False), 1)
        grads = [torch.ones_like(s) for s in states]
        walked = library(folder, run.case, torch.float32, 4, False, True)
        found.append([*states, *run.backward(walked, states, grads, 1)])
    assert all(map(torch.equal, *found))
    for have, want in zip(found[0], run.reference(), strict=False):
        assert relative_error(have.double(), want) < BOUNDS[torch.float32]


def test_gradients_that_overflow_are_walked_in_one_piece(tmp_path):
    """The derivative of a chunk is infinite, and what it is given is zero."""
    case = STEPS["decay"]
    run = Run(case, 64, 4, 4, torch.float32)
    run.inputs = [-torch.ones(64, *run.shape)]
    run.parameters = [torch.full((40,), 1e5)]
    run.init = [torch.zeros(run.shape)]
    run.given = (run.init[0], run.inputs[0], run.parameters[0])
    states = run.reference()
    states = [s.float() for s in states]
    grads = [torch.zeros(64, *run.shape)]
    grads[0][2] = 1e-3
    built = library(tmp_path, case, torch.float32, 4, True, True)
    for have, right in zip(run.backward(built, states, grads, 1), run.reference(grads), strict=True):
        assert relative_error(have.double(), right) < 1e-5


def test_nan_and_infinity_stay_in_their_channel(tmp_path):
    case = STEPS["gru"]
    built = library(tmp_path, case, torch.float32, 4, True, False)
    run = Run(case, 120, 4, 4, torch.float32)
    clean, _ = run.forward(built, 1)
    run.inputs[2][50, 1, 3] = torch.nan
    run.inputs[2][70, 2, 5] = torch.inf
    dirty, statistics = run.forward(built, 2)
    same = torch.ones(run.shape, dtype=torch.bool)
    same[1, 3] = same[2, 5] = False
    assert torch.equal(clean[0][:, same], dirty[0][:, same])
    assert dirty[0][50:, 1, 3].isnan().all()
    assert dirty[0][:50, 1, 3].isfinite().all()
    assert not statistics[:, 3].any()  # NaN meets NaN
