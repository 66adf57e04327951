"""The kernels of algorithm "newton" on a processor, by tests/emulator: walkers of any speed, messages that arrive late
and in the worst order, chunks that meet at once, after some chunks, and never."""

from __future__ import annotations

import ctypes
import functools
import signal
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.common import relative_error
from tests.emulated import MARKS, build, ends_well, with_flaw
from tests.rnn import chunked
from tests.rnn.samples import CELLS, TRAITS

pytestmark = MARKS

TYPES = {4: torch.float32, 8: torch.float64}
BOUNDS = {4: 3e-6, 8: 1e-13}


class Shape(ctypes.Structure):
    _fields_ = [("cell", ctypes.c_int), ("T", ctypes.c_int64), ("B", ctypes.c_int64), ("H", ctypes.c_int),
                ("reverse", ctypes.c_bool)]  # fmt: skip


class Pointers(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in (
        "projected", "x", "w_ih", "b_ih", "w_hh", "b_hh", "h0", "c0", "output", "h_n", "c_n", "gates",
        "cells")]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    def of(padded: int, size: int) -> ctypes.CDLL:
        return build("newton_warp", tmp_path_factory.mktemp("newton"), PADDED=padded, SIZE=size)

    return functools.cache(of)


class Case(NamedTuple):
    """`scale`: of the recurrent weights, which says how long the net remembers. `exact`: a ReLU net of few binary
    digits, each of whose sums is rounded once, in whatever order it is summed up; or an LSTM that keeps all. Of both
    what is counted does not depend on how a processor rounds."""

    cell: str
    T: int
    B: int
    H: int
    chunks: int
    scale: float = 1.0
    reverse: bool = False
    bias: bool = True
    save: bool = True
    exact: bool = False


class Problem:
    """Operands of a case, what the kernels fill, and what the oracle walks. `numbers`: x is one number, which the
    kernels project."""

    def __init__(self, case: Case, size: int, numbers: bool = False) -> None:
        self.case, dtype = case, TYPES[size]
        T, B, H, G, lstm = case.T, case.B, case.H, TRAITS[case.cell].gates, case.cell == "lstm"
        torch.manual_seed(T + B + H)
        make = lambda *shape: torch.randn(shape, dtype=dtype)  # noqa: E731
        self.projected, self.h0, self.c0 = make(T, B, G * H), make(B, H), make(B, H) if lstm else None
        self.x = self.w_ih = self.b_ih = None
        if numbers:
            self.x, self.w_ih, self.b_ih = make(T, B), make(G * H, 1), make(G * H) if case.bias else None
            self.projected = self.x[..., None] * self.w_ih[:, 0] + (self.b_ih if case.bias else 0)
        self.w_hh = case.scale * (2 * torch.rand(G * H, H, dtype=dtype) - 1) * H**-0.5
        self.b_hh = make(G * H) if case.bias else None
        if case.exact and not lstm:
            quarters = lambda low, high, *shape: torch.randint(low, high, shape).to(dtype) / 4  # noqa: E731
            self.projected, self.h0, self.b_hh = quarters(-3, 5, T, B, H), quarters(0, 9, B, H), quarters(0, 3, H)
            self.w_hh = case.scale * torch.eye(H, dtype=dtype).roll(1, 0)
        elif case.exact:  # gates i and f are 1
            self.projected[..., : 2 * H] = 60.0
            self.w_hh[: 2 * H] = 0.0
        nan = lambda *shape: torch.full(shape, torch.nan, dtype=dtype)  # noqa: E731
        self.output, self.h_n, self.c_n = nan(T, B, H), nan(B, H), nan(B, H) if lstm else None
        gated = case.save and case.cell in ("gru", "lstm")
        self.gates, self.cells = nan(T, B, 4 * H) if gated else None, nan(T, B, H) if lstm else None
        self.statistics = torch.zeros(B, 4, dtype=torch.int64)

    def run(self, library: ctypes.CDLL, late: bool, seed: int) -> None:
        case, address = self.case, lambda t: None if t is None else t.data_ptr()
        shape = Shape(CELLS.index(case.cell), case.T, case.B, case.H, case.reverse)
        pointers = Pointers(*map(address, (
            self.projected if self.x is None else None, self.x, self.w_ih, self.b_ih, self.w_hh, self.b_hh, self.h0,
            self.c0, self.output, self.h_n, self.c_n, self.gates, self.cells)))  # fmt: skip
        library.run.restype = ctypes.c_int64
        found = library.run(
            ctypes.byref(shape), ctypes.byref(pointers), ctypes.c_int64(case.chunks),
            ctypes.c_void_p(address(self.statistics)), late, seed,
        )  # fmt: skip
        assert found == chunked.cut(case.T, case.chunks)[0]

    def run_whole(self, library: ctypes.CDLL, seed: int) -> None:
        """By the walker of all steps of a sequence, in latest messages."""
        self.case = self.case._replace(chunks=0)
        self.run(library, True, seed)

    @property
    def rounds(self) -> Tensor:
        return self.statistics[:, 0]

    @property
    def redone(self) -> Tensor:
        return self.statistics[:, 1]

    def in_time(self, t: Tensor) -> Tensor:
        return t.flip(0) if self.case.reverse else t

    @functools.cached_property
    def walked(self) -> chunked.Walked:
        return chunked.walk(
            self.case.cell, self.in_time(self.projected), self.w_hh, self.b_hh, self.h0, self.c0, self.case.chunks
        )

    def check(self, bound: float) -> None:
        case = self.case
        states = self.in_time(self.output if self.cells is None else torch.cat((self.output, self.cells), -1))
        expected = self.walked.states
        assert torch.equal(states.isnan(), expected.isnan())
        assert relative_error(states.nan_to_num(), expected.nan_to_num()) <= bound
        ends = self.h_n if self.c_n is None else torch.cat((self.h_n, self.c_n), -1)
        assert torch.equal(ends.nan_to_num(), states[-1].nan_to_num())
        if self.gates is not None:
            assert torch.equal(self.gates.isnan().any(-1), self.output.isnan().any(-1))
        residual = self.statistics[:, 2].int().view(torch.float32)
        assert ((residual >= 0) & (residual <= chunked.tolerance(self.output.dtype))).all()
        # Of other nets, how the last digits are rounded decides when a walk meets.
        chunks, alone = chunked.cut(case.T, case.chunks)[0], self.statistics[:, 3].bool()
        assert ((self.rounds >= 1) & (self.rounds <= chunks)).all() and not alone[self.rounds < 2].any()
        assert ((self.redone >= 0) & (self.redone <= case.T * self.rounds)).all()
        if case.exact:
            assert torch.equal(self.rounds.long(), self.walked.rounds) and torch.equal(alone, self.walked.alone)
            assert torch.equal(self.redone.long(), self.walked.redone)
        if case.exact and case.cell == "rnn_relu":
            assert torch.equal(states, expected) and torch.equal(residual, self.walked.residual.float())


# One chunk; chunks of equal length and not; more than there are steps for; every way of saving.
CASES = [
    *(Case(cell, 96, 2, 5, 4, reverse=cell == "gru", bias=cell != "rnn_relu") for cell in CELLS),
    *(Case(cell, 101, 1, 8, 7, 0.5, reverse=cell == "lstm", save=False) for cell in CELLS),
    Case("rnn_tanh", 40, 3, 3, 40, 0.3),
    Case("rnn_tanh", 3, 1, 8, 50),
    Case("gru", 30, 1, 4, 1),
    Case("rnn_tanh", 160, 2, 6, 32, 0.8),
    Case("rnn_relu", 60, 1, 4, 6, 0.9),
]
# A net that forgets within a chunk, after some, after most of them; and two that never do.
EXACT = [
    Case("rnn_relu", 180, 2, 5, 3, 0.5, exact=True),
    Case("rnn_relu", 150, 2, 7, 15, 0.5, exact=True, reverse=True),
    Case("rnn_relu", 88, 1, 8, 11, 0.5, exact=True),
    Case("rnn_relu", 90, 2, 6, 9, 1.0, exact=True),
    Case("lstm", 60, 2, 5, 10, exact=True),
]


@pytest.mark.parametrize("late", (False, True))
@pytest.mark.parametrize("size", TYPES)
@pytest.mark.parametrize("case", [*CASES, *EXACT], ids=str)
def test_like_the_oracle(kernels, case: Case, size: int, late: bool) -> None:
    problem = Problem(case, size)
    problem.run(kernels(8, size), late, 1)
    problem.check(BOUNDS[size])


def test_the_cases_are_what_they_say() -> None:
    walked = [Problem(case, 8).walked for case in EXACT]
    rounds = [int(w.rounds.max()) for w in walked]
    assert rounds[0] <= 3 and 3 < rounds[1] < 15 and 3 < rounds[2] < 11
    assert [bool(w.alone.all()) for w in walked] == [False, False, False, True, True]


@pytest.mark.parametrize("size", TYPES)
@pytest.mark.parametrize("cell", CELLS)
def test_a_whole_sequence(kernels, cell: str, size: int) -> None:
    """Of the forward pass of "scan", which takes the same steps: its bits are those of one chunk."""
    for save in (True, False):
        case = Case(cell, 45, 3, 7, 1, reverse=cell == "lstm", bias=cell != "gru", save=save)
        whole, chunk = Problem(case, size), Problem(case, size)
        whole.run_whole(kernels(8, size), 7)
        chunk.run(kernels(8, size), False, 1)
        chunk.check(BOUNDS[size])
        for name in ("output", "h_n", "c_n", *(("gates", "cells") if save else ())):
            a, b = getattr(whole, name), getattr(chunk, name)
            assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("size", TYPES)
@pytest.mark.parametrize("cell", CELLS)
def test_inputs_of_one_number(kernels, cell: str, size: int) -> None:
    case = Case(cell, 70, 3, 7, 1, 0.5, reverse=cell == "gru", bias=cell != "lstm")
    whole, one, five = (Problem(case._replace(chunks=n), size, numbers=True) for n in (1, 1, 5))
    whole.run_whole(kernels(8, size), 3)
    for problem in (one, five):
        problem.run(kernels(8, size), False, 2)
        problem.check(BOUNDS[size])
    assert torch.equal(whole.output, one.output)


def test_the_bits_do_not_depend_on_the_order(kernels) -> None:
    found = set()
    for seed, late in ((1, False), (2, False), (3, True), (4, True)):
        problem = Problem(Case("gru", 100, 2, 7, 10, 2.5), 4)
        problem.run(kernels(8, 4), late, seed)
        found.add((*problem.output.flatten().tolist(), *problem.statistics.flatten().tolist()))
    assert len(found) == 1


@pytest.mark.parametrize("cell", ("rnn_tanh", "lstm"))
def test_no_state_is_one_of_zeros(kernels, cell: str) -> None:
    found = []
    for given in (True, False):
        problem = Problem(Case(cell, 60, 2, 7, 4), 4)
        zeros = torch.zeros_like(problem.h0) if given else None
        problem.h0, problem.c0 = zeros, zeros if cell == "lstm" else None
        problem.run(kernels(8, 4), False, 1)
        found.append((problem.output, problem.h_n, problem.statistics))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_other_padded_sizes(kernels, cell: str) -> None:
    for H, padded in ((20, 20), (31, 32)):
        problem = Problem(Case(cell, 60, 2, H, 4), 4)
        problem.run(kernels(padded, 4), False, 3)
        problem.check(BOUNDS[4])


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("cell", CELLS)
def test_what_is_bad_stays_in_its_sequence(kernels, cell: str, value: float) -> None:
    case = Case(cell, 80, 3, 5, 8)
    good, bad = Problem(case, 4), Problem(case, 4)
    good.run(kernels(8, 4), False, 1)
    bad.projected[33, 1] = value
    bad.run(kernels(8, 4), True, 2)
    others = torch.tensor([0, 2])
    assert torch.equal(good.output[:, others], bad.output[:, others])
    assert torch.equal(good.rounds[others], bad.rounds[others])
    assert torch.equal(good.output[:33, 1], bad.output[:33, 1])
    assert torch.equal(bad.walked.states.isnan().any(-1), bad.output.isnan().any(-1))


def test_each_step_follows_from_the_one_before(kernels) -> None:
    """Across chunks, too, to what the contract says."""
    for cell in CELLS:
        problem = Problem(Case(cell, 80, 2, 8, 8, 1.5), 8)
        problem.run(kernels(8, 8), True, 5)
        states = problem.output if problem.cells is None else torch.cat((problem.output, problem.cells), -1)
        start = problem.h0 if problem.c0 is None else torch.cat((problem.h0, problem.c0), -1)
        before = torch.cat((start[None], states[:-1]))
        once = chunked.walk(
            cell, problem.projected.flatten(0, 1)[None], problem.w_hh, problem.b_hh,
            *(s.flatten(0, 1) for s in (before.chunk(2, -1) if cell == "lstm" else (before,))),
            *(() if cell == "lstm" else (None,)), 1,
        )  # fmt: skip
        assert chunked.mismatch(states, once.states.view_as(states)).max() <= 2.0**-48


FLAWS = {
    "rounds that end too early": ("if (all.changed == 0) break;", "if (round == 2) break;"),
    "a message of another round": ("messages.wait(int(round - 1) % 2, chunk - 1, uint32_t(round - 1)",
                                   "messages.wait(int(round) % 2, chunk - 1, uint32_t(round)"),
    "a front that is another chunk's": ("alone ? round - 1 : last", "alone ? round : last"),
    "what was met is stored": ("!kMeets || i < count - 1", "true"),
}  # fmt: skip


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws_are_found(tmp_path, flaw: str) -> None:
    right, wrong = FLAWS[flaw]
    file = "forward_walk" if "count" in right else "newton_warp"
    folder = with_flaw(f"rnn/newton/cuda/{file}.cuh", right, wrong, tmp_path)
    library = build("newton_warp", folder, PADDED=8, SIZE=8)

    problems = [(Problem(case, 8), seed) for case in EXACT[1:] for seed in (1, 2)]
    for problem, _ in problems:
        assert problem.walked.rounds.numel()  # here, where there are threads to compute with

    def run() -> None:
        signal.setitimer(signal.ITIMER_REAL, 60)  # for a walker that waits for ever
        for problem, seed in problems:
            problem.run(library, seed == 2, seed)
            problem.check(BOUNDS[8])

    assert not ends_well(run)


def test_chunks_of_time(kernels) -> None:
    library = kernels(8, 4)
    found = (ctypes.c_int64 * 2)()
    for steps in (*range(1, 40), 997, 30000):
        for count in (-1, 0, 1, 2, 3, 7, 66, 10**6):
            library.cut(ctypes.c_int64(steps), ctypes.c_int64(count), found)
            chunks, length = found
            assert (chunks, length) == chunked.cut(steps, count)
            assert chunks * length >= steps > (chunks - 1) * length and chunks <= max(count, 1)
    choose = lambda *sizes: (library.choose(*map(ctypes.c_int64, sizes), found), tuple(found))[1]  # noqa: E731
    assert choose(30000, 16, 1056, 256) == (66, 455)
    assert choose(1000, 1, 1056, 256) == (3, 334)
    assert choose(1000, 2000, 1056, 256) == (1, 1000)
    assert choose(100, 0, 1056, 0) == (100, 1)
    library.few.restype = ctypes.c_bool
    for chunks in range(2, 30):
        for round_ in range(2, chunks + 1):
            for changed in range(chunks):
                for closer in {0, changed // 8, changed // 8 + 1, changed // 2, (changed + 1) // 2, changed}:
                    for before in {changed, changed + 1, 4 * changed // 3, chunks - 1}:
                        sizes = round_, chunks, changed, closer, before
                        assert library.few(*map(ctypes.c_int64, sizes)) == chunked.few_meet(*sizes)


class Seams(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("count", "length", "T", "B", "H", "round")]
    _fields_ += [(n, ctypes.c_void_p) for n in (
        "end_h", "end_c", "start_h", "start_c", "gate", "next_gate", "statistics")]  # fmt: skip


@pytest.mark.parametrize("with_c", (False, True))
@pytest.mark.parametrize("length", (20, 3 * 10**9))
def test_seams_of_rows(tmp_path, with_c: bool, length: int) -> None:
    """Of chunks that are rows of a batch: what meets stays as it was begun with, what does not is handed on. Steps that
    are walked again are counted beyond 2^31, too."""
    library = build("newton_seams", tmp_path)
    chunks, T, B, H = 5, 5 * length - 5, 3, 40
    torch.manual_seed(0)
    states = [torch.randn(2, chunks, B, H) for _ in range(2 if with_c else 1)]  # ends, starts
    ends, starts = [s[0] for s in states], [s[1] for s in states]
    for end, start in zip(ends, starts, strict=True):
        start[1:] = end[:-1] + 2.0**-23 * torch.rand(chunks - 1, B, H)
    far = torch.zeros(chunks - 1, B, dtype=torch.bool)
    starts[0][3, 1, 17] += 2.0**-20
    far[2, 1] = True
    starts[-1][1, 2, 39] = torch.nan
    far[0, 2] = True
    ends[0][1, 0, 5] = starts[0][2, 0, 5] = torch.nan  # NaN meets NaN
    before = [(end.clone(), start.clone()) for end, start in zip(ends, starts, strict=True)]
    gates, statistics = torch.zeros(2, dtype=torch.int32), torch.zeros(B, 4, dtype=torch.int64)
    gates[0] = 1
    pointer = lambda all_, i: all_[i].data_ptr() if i < len(all_) else None  # noqa: E731
    arguments = Seams(
        chunks, length, T, B, H, 2, pointer(ends, 0), pointer(ends, 1), pointer(starts, 0), pointer(starts, 1),
        gates.data_ptr(), gates.data_ptr() + 4, statistics.data_ptr(),
    )  # fmt: skip
    library.run(ctypes.byref(arguments), 1)
    for end, start, (old_end, old_start) in zip(ends, starts, before, strict=True):
        wanted = torch.where(far[..., None], old_end[:-1], old_start[1:])
        assert torch.equal(start[1:].nan_to_num(7), wanted.nan_to_num(7)) and torch.equal(start[0], old_start[0])
        kept = torch.where(far[..., None], old_end[:-1], old_start[1:])
        assert torch.equal(end[:-1].nan_to_num(7), kept.nan_to_num(7)) and torch.equal(end[-1], old_end[-1])
    assert gates.tolist() == [1, 1]
    assert statistics[:, 0].tolist() == [0, 3, 3] and statistics[:, 1].tolist() == [0, length, length]
    residual = statistics[:, 2].int().view(torch.float32)
    assert (residual <= 2.0**-22).all() and (residual > 0).all()
