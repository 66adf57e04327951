"""linear_scan over the slices of ranks, beside the same on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import weft.distributed as wd
from torch import Tensor
from weft._distributed.group import GroupRanks
from weft._distributed.halves import halved
from weft.scan import linear_scan, linear_scan_reference

from benchmarks.common import captured
from tests.common import BOUNDS, assert_close
from tests.distributed.conftest import ON_GPUS
from tests.distributed.team import Team, dealt, device
from tests.scan.linear_scans import chaotic, chaotic_bound, chaotic_error, wide
from tests.scan.samples import CONSTANT, LAYOUTS, LinearScan

UNEVEN = [5, 1, 4, 3]
SIZES = [UNEVEN, [0, 6, 0, 7], [6, 0, 7, 0], [0, 0, 13, 0], [4, 4, 4, 1]]


def cut(t: Tensor, sizes: list[int], rank: int) -> Tensor:
    return t.split(dealt(sizes))[rank].clone()


def slices(sample: LinearScan, inputs: tuple, sizes: list[int], rank: int) -> tuple:
    """This rank's A, b and x0; x0 is on the rank that has it alone, poisoned elsewhere."""
    A, b, x0 = inputs
    A = A if sample.layout in CONSTANT else cut(A, sizes, rank)
    first = dist.get_world_size() - 1 if sample.reverse else 0
    if x0 is not None and rank != first:
        x0 = torch.full_like(x0, torch.nan)
    return A, cut(b, sizes, rank), x0


def summed(t: Tensor) -> Tensor:
    t = t.clone()
    dist.all_reduce(t)
    return t


def _beside_one_process(rank: int, sample: LinearScan, sizes: list[int], dtype: torch.dtype) -> None:
    inputs = sample.inputs(dtype, device())
    if sample.layout in CONSTANT:
        inputs = (inputs[0].nan_to_num(), *inputs[1:])
    weight = torch.randn(sample.T, sample.B, sample.H, dtype=torch.float64).to(device())
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    present = [t for t in leaves if t is not None]
    want = linear_scan(*leaves, **sample.flags)
    want_grads = torch.autograd.grad((want * weight).sum(), present)

    A, b, x0 = (None if t is None else t.requires_grad_() for t in slices(sample, inputs, sizes, rank))
    x = wd.linear_scan(A, b, x0, **sample.flags)
    assert x.dtype == dtype and x.shape == b.shape
    bound = BOUNDS[dtype] * (1 if dtype.itemsize > 2 else 2)
    assert_close(x, cut(want, sizes, rank), bound)
    got = torch.autograd.grad((x.double() * cut(weight, sizes, rank)).sum(), [t for t in (A, b, x0) if t is not None])
    want_A, want_b, *want_x0 = want_grads
    if sample.layout in CONSTANT:
        assert_close(summed(got[0].double()), want_A, 4 * bound)
    else:
        assert_close(got[0], cut(want_A, sizes, rank), 4 * bound)
    assert_close(got[1], cut(want_b, sizes, rank), 2 * bound)
    if want_x0:
        first = rank == (dist.get_world_size() - 1 if sample.reverse else 0)
        assert_close(got[2], want_x0[0] if first else torch.zeros_like(want_x0[0]), 2 * bound)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("x0", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(team: Team, layout: str, x0: bool, sizes: list[int]) -> None:
    number = LAYOUTS.index(layout) + x0
    sample = LinearScan(13, 2, 3, layout, x0, reverse=number % 2 == 1, transpose=number % 3 == 1)
    team.run(_beside_one_process, sample, sizes, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["dense", "diagonal", "constant"])
@pytest.mark.parametrize("reverse", [False, True])
def test_dtypes(team: Team, layout: str, reverse: bool, dtype: torch.dtype) -> None:
    team.run(_beside_one_process, LinearScan(60, 2, 4, layout, True, reverse), [20, 1, 30, 9], dtype)


def _complex(rank: int, sample: LinearScan, sizes: list[int], dtype: torch.dtype) -> None:
    inputs = sample.inputs(dtype, device())
    if sample.layout in CONSTANT:
        inputs = (inputs[0].nan_to_num(), *inputs[1:])
    weight = torch.randn(sample.T, sample.B, sample.H, dtype=torch.complex128).to(device())
    leaves = [None if t is None else t.detach().to(torch.complex128).requires_grad_() for t in inputs]
    want = linear_scan_reference(*leaves, **sample.flags)
    present = [t for t in leaves if t is not None]
    want_grads = torch.autograd.grad((want * weight).real.sum(), present, materialize_grads=True)

    A, b, x0 = (None if t is None else t.requires_grad_() for t in slices(sample, inputs, sizes, rank))
    x = wd.linear_scan(A, b, x0, **sample.flags)
    assert x.dtype == dtype and x.shape == b.shape
    loss = (x.to(torch.complex128) * cut(weight, sizes, rank)).real.sum()
    got = torch.autograd.grad(loss, [t for t in (A, b, x0) if t is not None])

    def close(found: Tensor, right: Tensor, factor: int = 1) -> None:
        bound = BOUNDS[torch.float64 if dtype == torch.complex128 else torch.float32]
        assert_close(torch.view_as_real(found.resolve_conj()), torch.view_as_real(right.resolve_conj()), factor * bound)

    close(x, cut(want, sizes, rank))
    if sample.layout in CONSTANT:
        close(summed(got[0].to(torch.complex128)), want_grads[0], 4)
    else:
        close(got[0], cut(want_grads[0], sizes, rank), 4)
    close(got[1], cut(want_grads[1], sizes, rank), 2)
    if x0 is not None and rank == (dist.get_world_size() - 1 if sample.reverse else 0):
        close(got[2], want_grads[2], 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_complex_numbers(team: Team, layout: str) -> None:
    number = LAYOUTS.index(layout)
    for x0, sizes, dtype in ((True, UNEVEN, torch.complex128), (False, [0, 6, 0, 7], torch.complex64)):
        sample = LinearScan(13, 2, 3, layout, x0, reverse=number % 2 == 1, transpose=x0)
        team.run(_complex, sample, sizes, dtype)
    for B, H, sizes in ((4, 2, UNEVEN), (0, 3, UNEVEN), (2, 0, UNEVEN), (1, 1, UNEVEN), (2, 3, [0, 0, 0, 0])):
        team.run(_complex, LinearScan(sum(sizes), B, H, layout), sizes, torch.complex128)


def _complex_refused(rank: int) -> None:
    b = torch.zeros(2, 1, 3, dtype=torch.complex64, device=device())
    for A, x0, error in (
        (b.real[0, 0], None, TypeError),
        (b, b.real[0], TypeError),
        (b[:0], None, ValueError),
        (b, b, ValueError),
        (b.to("meta"), None, RuntimeError),
    ):
        with pytest.raises(error, match=r"^linear_scan: "):
            wd.linear_scan(A, b, x0)


def test_complex_numbers_that_do_not_fit(team: Team) -> None:
    team.run(_complex_refused)


def _in_halves(rank: int, sample: LinearScan, sizes: list[int]) -> None:
    halved.add("cpu")
    try:
        _beside_one_process(rank, sample, sizes, torch.float32)
    finally:
        halved.discard("cpu")


@pytest.mark.parametrize("layout", ["dense", "shared", "shared_4d"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("x0", [False, True])
def test_halves_of_a_dense_scan(team: Team, layout: str, x0: bool, sizes: list[int]) -> None:
    """As CUDA runs it, by what the CPU has in the place of CUDA's kernels."""
    for reverse, transpose in ((False, True), (True, False)):
        team.run(_in_halves, LinearScan(13, 2, 3, layout, x0, reverse, transpose), sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transpose", [False, True])
def test_flags(team: Team, layout: str, transpose: bool) -> None:
    for reverse in (False, True):
        for H in (1, 2):
            sample = LinearScan(13, 2, H, layout, True, reverse, transpose)
            team.run(_beside_one_process, sample, UNEVEN, torch.float64)


@pytest.mark.parametrize(
    ("B", "H", "sizes"), [(0, 3, UNEVEN), (2, 0, UNEVEN), (2, 3, [0, 0, 0, 0]), (4, 4, [4, 1, 4, 0])]
)
@pytest.mark.parametrize("layout", ["dense", "shared", "diagonal", "constant", "constant_row", "constant_1d"])
def test_sizes_of_nothing_and_of_the_same(team: Team, layout: str, B: int, H: int, sizes: list[int]) -> None:
    team.run(_beside_one_process, LinearScan(sum(sizes), B, H, layout), sizes, torch.float64)


def _chaos(rank: int, kind: str, layout: str, reverse: bool, T: int) -> None:
    A, b, x0 = (t.float().to(device()) for t in chaotic(kind, T, 2, 4, layout))
    if reverse:
        A, b = A.flip(0), b.flip(0)
    want = linear_scan_reference(*wide(A, b, x0), reverse=reverse)
    sizes = [T // 4 + 7, T // 4 - 50, T // 4 + 30, T - T // 4 * 3 + 13]
    x = wd.linear_scan(cut(A, sizes, rank), cut(b, sizes, rank), x0, reverse=reverse)
    assert chaotic_error(x.cpu(), cut(want, sizes, rank)) < chaotic_bound(T)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", ["dense", "diagonal"])
@pytest.mark.parametrize("kind", ["up", "down", "both", "zeros", "resets"])
def test_products_that_overflow_or_underflow(team: Team, kind: str, layout: str, reverse: bool) -> None:
    team.run(_chaos, kind, layout, reverse, 600)


def _bad_row(rank: int, layout: str, where: str) -> None:
    sizes = [5, 5, 5, 5]
    A, b, x0 = LinearScan(20, 3, 4, layout).inputs(torch.float32, device())
    clean = wd.linear_scan(cut(A, sizes, rank), cut(b, sizes, rank), x0)
    {"A": A[7], "b": b[7], "x0": x0}[where][1] = torch.nan
    x = wd.linear_scan(cut(A, sizes, rank), cut(b, sizes, rank), x0)
    assert torch.equal(x[:, [0, 2]], clean[:, [0, 2]])
    begin = (0 if where == "x0" else 7) - sum(dealt(sizes)[:rank])
    assert x[max(begin, 0) :, 1].isnan().all() and x[: max(begin, 0), 1].isfinite().all()


@pytest.mark.parametrize("layout", ["dense", "diagonal"])
def test_a_bad_row_stays_alone(team: Team, layout: str) -> None:
    for where in ("A", "b", "x0"):
        team.run(_bad_row, layout, where)


def _only_one_loss(rank: int) -> None:
    sample = LinearScan(13, 2, 3, "diagonal")
    inputs = sample.inputs(device=device())
    leaves = [t.clone().requires_grad_() for t in inputs]
    whole, lonely = linear_scan(*leaves), dist.get_world_size() // 2
    want = torch.autograd.grad(cut(whole, UNEVEN, lonely).square().sum(), leaves)
    A, b, x0 = (t.requires_grad_() for t in slices(sample, inputs, UNEVEN, rank))
    x = wd.linear_scan(A, b, x0)
    loss = x.square().sum() if rank == lonely else x.sum() * 0
    got = torch.autograd.grad(loss, [A, b, x0])
    assert_close(got[0], cut(want[0], UNEVEN, rank))
    assert_close(got[1], cut(want[1], UNEVEN, rank))
    assert_close(got[2], want[2] * (rank == 0))


def test_a_loss_on_one_rank(team: Team) -> None:
    team.run(_only_one_loss)


def _second(rank: int, sample: LinearScan, sizes: list[int]) -> None:
    inputs = tuple(None if t is None else t.nan_to_num() for t in sample.inputs(device=device()))
    weights = torch.randn(2, sample.T, sample.B, sample.H, dtype=torch.float64).to(device())

    def second(op, leaves, weight, other):
        present = [t for t in leaves if t is not None]
        x = op(*leaves, **sample.flags)
        first = torch.autograd.grad((x.square() * weight).sum(), present, create_graph=True)
        # b's gradient is one for each step, so that it can be weighted alike.
        return torch.autograd.grad((first[1].square() * other).sum(), present)

    leaves = [None if t is None else t.clone().requires_grad_() for t in inputs]
    want_A, want_b, *want_x0 = second(linear_scan, leaves, *weights)
    own = [None if t is None else t.clone().requires_grad_() for t in slices(sample, inputs, sizes, rank)]
    got_A, got_b, *got_x0 = second(wd.linear_scan, own, *(cut(w, sizes, rank) for w in weights))
    if sample.layout in CONSTANT:
        assert_close(summed(got_A), want_A, 1e-12)
    else:
        assert_close(got_A, cut(want_A, sizes, rank), 1e-12)
    assert_close(got_b, cut(want_b, sizes, rank), 1e-12)
    if want_x0:
        first = dist.get_world_size() - 1 if sample.reverse else 0
        assert_close(got_x0[0], want_x0[0] * (rank == first), 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_gradients(team: Team, layout: str) -> None:
    for x0, reverse, transpose, sizes in (
        (True, False, True, UNEVEN),
        (True, True, False, [0, 6, 0, 7]),
        (False, False, False, UNEVEN),
    ):
        team.run(_second, LinearScan(13, 2, 3, layout, x0, reverse, transpose), sizes)


def _second_of_the_start(rank: int) -> None:
    sizes = [3, 0, 5, 1]
    A, b, x0 = (t.double() for t in LinearScan(9, 2, 3, "diagonal").inputs(device=device()))

    def second(op, A, b, x0):
        (first,) = torch.autograd.grad(op(A, b, x0).pow(3).sum(), x0, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x0)[0]

    want = second(linear_scan, A, b, x0.clone().requires_grad_())
    got = second(wd.linear_scan, cut(A, sizes, rank), cut(b, sizes, rank), x0.clone().requires_grad_())
    assert_close(got, want * (rank == 0), 1e-12)


def test_gradients_of_gradients_of_the_start_alone(team: Team) -> None:
    """Which the first rank has, and for which the others join."""
    team.run(_second_of_the_start)


def _second_in_bfloat16(rank: int) -> None:
    sample, sizes = LinearScan(200, 2, 3, "diagonal"), [60, 0, 90, 50]
    inputs = sample.inputs(torch.bfloat16, device())
    weight = torch.randn(sample.T, sample.B, sample.H).to(device())

    def second(op, leaves, weight):
        x = op(*leaves)
        first = torch.autograd.grad((x.square() * weight).sum(), leaves, create_graph=True)
        return torch.autograd.grad(first[1].square().sum(), leaves)

    want = second(linear_scan, [t.double().requires_grad_() for t in inputs], weight.double())
    own = [t.clone().requires_grad_() for t in slices(sample, inputs, sizes, rank)]
    got = second(wd.linear_scan, own, cut(weight, sizes, rank))
    for g, w, leaf in zip(got[:2], want, own, strict=False):
        assert g.dtype == leaf.dtype
        assert_close(g, cut(w, sizes, rank), 5e-2)
    assert_close(got[2], want[2] * (rank == 0), 5e-2)


def test_gradients_of_gradients_in_bfloat16(team: Team) -> None:
    team.run(_second_in_bfloat16)


def _autocast(rank: int) -> None:
    A, b, x0 = LinearScan(13, 2, 3, "diagonal").inputs(torch.float32, device())
    with torch.autocast(device().type, torch.bfloat16):
        x = wd.linear_scan(cut(A, UNEVEN, rank).bfloat16(), cut(b, UNEVEN, rank), x0)
    want = linear_scan(A.bfloat16().double(), b.double(), x0.double())
    assert x.dtype == torch.float32
    assert_close(x, cut(want, UNEVEN, rank))


def test_autocast(team: Team) -> None:
    team.run(_autocast)


class _Free:
    """A link on which doubling is cheaper than one gather, for more than two ranks."""

    def __enter__(self) -> None:
        from weft._distributed import rounds

        self.rounds, self.link = rounds, rounds.link
        rounds.link = wd.Link(latency=0.0, bandwidth=1.0)

    def __exit__(self, *_: object) -> None:
        self.rounds.link = self.link


def _in_rounds(rank: int, layout: str, dtype: torch.dtype) -> None:
    with _Free():
        for number, sizes in enumerate(SIZES):
            sample = LinearScan(13, 2, 3, layout, number < 3, reverse=number % 2 == 1, transpose=number % 3 == 1)
            _beside_one_process(rank, sample, sizes, dtype)
        _second(rank, LinearScan(13, 2, 3, layout), UNEVEN)
    if layout in ("dense", "diagonal") and dtype == torch.float32:
        with _Free():
            for kind in ("up", "down", "both", "zeros", "resets"):
                _chaos(rank, kind, layout, False, 600)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exchange_in_rounds(team: Team, layout: str, dtype: torch.dtype) -> None:
    team.run(_in_rounds, layout, dtype)


def _rounds_of(rank: int, size: int) -> list[int]:
    """Of a group that is no power of two, too, in which some rank hears of fewer than others."""
    from weft._distributed import slice_scan

    others = dist.get_world_size() - size
    group = dist.new_group(list(range(others, others + size)))
    rank -= others
    if rank < 0:
        return []
    sample = LinearScan(4 * size, 2, 3, "dense", x0=False)
    whole = [t.requires_grad_() for t in sample.inputs(torch.float64, device())[:2]]
    want = linear_scan(*whole)
    gradients = torch.autograd.grad(want.sum(), whole)
    own = slice(4 * rank, 4 * rank + 4)
    A, b = (t.detach()[own].clone().requires_grad_() for t in whole)
    with pytest.MonkeyPatch.context() as patch, Counting() as sent:
        patch.setattr(slice_scan, "in_rounds", lambda *_: True)
        x = wd.linear_scan(A, b, group=group)
        x.sum().backward()
    for found, expected in zip((x, A.grad, b.grad), (want, *gradients), strict=True):
        assert_close(found, expected[own])
    return sent


def test_rounds_are_as_many_as_the_ranks_have_digits(team: Team) -> None:
    for size in range(2, team.size + 1):
        for sent in team.run(_rounds_of, size)[-size:]:
            assert len(sent) == 2 * (size - 1).bit_length(), "so many each way"


class Counting:
    """Counts the bytes that a rank sends in each collective."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def __enter__(self) -> list[int]:
        self.originals = GroupRanks.begin_gather, GroupRanks.shift

        def counted(original):
            def call(ranks, x, *others):
                self.sent.append(x.numel() * x.element_size())
                return original(ranks, x, *others)

            return call

        GroupRanks.begin_gather, GroupRanks.shift = (counted(original) for original in self.originals)
        return self.sent

    def __exit__(self, *_: object) -> None:
        GroupRanks.begin_gather, GroupRanks.shift = self.originals


def _bytes(rank: int, layout: str, T: int) -> list[int]:
    B, H = 3, 8
    A, b, x0 = (t.requires_grad_() for t in LinearScan(T, B, H, layout).inputs(torch.float32, device()))
    with Counting() as sent:
        wd.linear_scan(A, b, x0).sum().backward()
    return sent


@pytest.mark.parametrize("layout", ["dense", "diagonal"])
def test_one_exchange_each_way_of_bytes_that_do_not_grow(team: Team, layout: str) -> None:
    few, many = team.run(_bytes, layout, 2)[0], team.run(_bytes, layout, 50)[0]
    assert few == many and len(few) == 2
    limit = 4 * 3 * 8 * (8 + 1) if layout == "dense" else 8 * 3 * 8
    assert few[0] <= limit + 4 and few[1] <= 4 * 3 * 8


def _twice(rank: int, layout: str) -> None:
    A, b, x0 = (t.requires_grad_() for t in LinearScan(100, 2, 8, layout).inputs(torch.float32, device()))

    def run():
        x = wd.linear_scan(A, b, x0)
        return [x, *torch.autograd.grad(x.sum(), [A, b, x0])]

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)


def test_two_runs_give_the_same_bits(team: Team) -> None:
    for layout in ("dense", "diagonal"):
        team.run(_twice, layout)


def _refused(rank: int) -> None:
    A, b, _ = LinearScan(5, 2, 3, "diagonal").inputs(torch.float32)
    with pytest.raises(TypeError, match=r"linear_scan: A must be a Tensor, got list"):
        wd.linear_scan([1], b)
    with pytest.raises(TypeError, match=r"linear_scan: b must have the dtype of A"):
        wd.linear_scan(A, b.double())
    with pytest.raises(TypeError, match=r"linear_scan: A must have the dtype of b"):
        wd.linear_scan(A, b.half())
    with pytest.raises(ValueError, match=r"linear_scan: A must be"):
        wd.linear_scan(A[:4], b)
    with pytest.raises(TypeError, match=r"linear_scan: group must be"):
        wd.linear_scan(A, b, group=3)
    # What the first rank alone reads, all refuse: who raises alone leaves the others waiting.
    for x0, error in ((torch.zeros(2, 4), ValueError), (torch.zeros(2, 3).double(), TypeError)):
        for gradient in (False, True):
            with pytest.raises(error, match=r"linear_scan: x0 must"):
                wd.linear_scan(A, b, x0.requires_grad_(gradient))
    with pytest.raises(TypeError, match=r"linear_scan: x0 must have the dtype of"):
        wd.linear_scan(A.half(), b.half(), torch.zeros(2, 3))


def test_bad_input_is_refused_before_anything_is_exchanged(cpu_team: Team) -> None:
    cpu_team.run(_refused)


def _differing(rank: int, what: str) -> str:
    A, b, _ = LinearScan(5, 2, 3, "diagonal").inputs(torch.float32, device())
    other = rank >= dist.get_world_size() // 2
    if other:
        if what == "H":
            A, b = A[..., :2], b[..., :2]
        elif what == "layout":
            A = A.new_zeros(5, 3, 3)
        elif what == "dtype":
            A, b = A.double(), b.double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CHECK_RANKS", "1")
        with pytest.raises(ValueError) as caught:
            wd.unshard(b) if what == "op" and other else wd.linear_scan(A, b)
    return str(caught.value)


@pytest.mark.parametrize("what", ["H", "layout", "dtype", "op"])
def test_ranks_that_differ_are_named_everywhere(team: Team, what: str) -> None:
    messages = team.run(_differing, what)
    if what == "op":
        messages = [m.partition(": ")[2] for m in messages]
    assert len(set(messages)) == 1 and f"rank {team.size // 2} differs from rank 0: {what} is" in messages[0]


def _checked(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CHECK_RANKS", "1")
        for layout in LAYOUTS:
            for sizes in (UNEVEN, [0, 1, 6, 6]):
                _beside_one_process(rank, LinearScan(13, 2, 3, layout), sizes, torch.float64)


def test_checked_ranks_agree(team: Team) -> None:
    team.run(_checked)


def _compiled(rank: int, layout: str, backend: str) -> None:
    group = dist.new_group([0, 1])
    if rank > 1:  # each has to import the compiler
        return
    A, b, x0 = LinearScan(13, 2, 3, layout).inputs(device=device())
    own = [t.requires_grad_() for t in (A.split([6, 7])[rank].clone(), b.split([6, 7])[rank].clone(), x0)]

    def run(*inputs: Tensor) -> Tensor:
        return wd.linear_scan(*inputs, group=group).sin()

    results = []
    for call in (torch.compile(run, fullgraph=True, backend=backend), run):
        x = call(*own)
        results.append([x, *torch.autograd.grad(x.sum(), own)])
    for compiled, eager in zip(*results, strict=True):
        assert_close(compiled, eager, 0.0 if backend == "aot_eager" else None)


def test_compiled(team: Team) -> None:
    team.run(_compiled, "diagonal", "aot_eager")
    if team.backend == "nccl":
        team.run(_compiled, "dense", "inductor")


def _captured(rank: int, layout: str, dtype: torch.dtype, H: int) -> None:
    """A CUDA graph of a step, replayed on other numbers."""
    sample = LinearScan(130, 2, H, layout)
    inputs = [t.requires_grad_() for t in slices(sample, sample.inputs(dtype, device()), [30, 60, 0, 40], rank)]

    def step() -> list[Tensor]:
        A, b, x0 = (t.clone() for t in inputs)
        x = wd.linear_scan(A, b, x0)
        return [x, *torch.autograd.grad(x.square().sum(), [A, b, x0])]

    replay = captured(step)
    for _ in range(2):
        with torch.no_grad():
            for t in inputs:
                t.mul_(0.9)
        found = [t.clone() for t in replay()]
        for one, other in zip(found, step(), strict=True):
            assert torch.equal(one, other)


@ON_GPUS[0]
@ON_GPUS[1]
@pytest.mark.parametrize(
    ("layout", "dtype", "H"),
    [("diagonal", torch.float32, 8), ("diagonal", torch.bfloat16, 8), ("dense", torch.float32, 20),
     ("shared", torch.float64, 3), ("constant", torch.float32, 8)],
    ids=str,
)  # fmt: skip
def test_a_captured_step_is_an_eager_one(gpu_team: Team, layout: str, dtype: torch.dtype, H: int) -> None:
    gpu_team.run(_captured, layout, dtype, H)
