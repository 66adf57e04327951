"""States and gradients between the slices of a dense scan, beside a scan over ranks in fp64: the ops, and the kernels
of CUDA on a processor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from weft._distributed.totals import pack, scaled, unpack
from weft.scan import linear_scan_reference

from tests import emulated
from tests.common import DEVICES

ops = torch.ops.weft
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


class Case(NamedTuple):
    ranks: int = 4
    B: int = 3
    H: int = 5
    matrices: int = 3
    order: int = 2
    reverse: bool = False
    leaves: tuple[bool, ...] = (True,) * 4


CASES = [
    Case(),
    Case(matrices=1, reverse=True, order=0),
    Case(H=20, order=3),
    Case(H=37, B=1, matrices=1, order=1, reverse=True),
    Case(H=2, leaves=(False, True, False, True)),
    Case(H=300, B=2, matrices=2, ranks=2, order=1, leaves=(True, True)),
    Case(ranks=1, order=0, leaves=(True,)),
]

States = Callable[[Case, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
Left = Callable[[Case, Tensor, Tensor], Tensor]


def ordered(case: Case, t: Tensor) -> Tensor:
    return t.flip(0) if case.reverse else t


def check_states(case: Case, dtype: torch.dtype, run: States) -> None:
    """Of messages whose products are numbers that nobody may look at, where nothing comes in."""
    torch.manual_seed(0)
    products = torch.randn(case.ranks, case.matrices, case.H, case.H, dtype=torch.float64) / case.H**0.5
    values = torch.randn(case.ranks, case.B, case.H).to(dtype)
    leaves = torch.tensor(case.leaves)
    came = leaves.cumsum(0) - leaves.long() > 0
    values[~leaves] = 0
    packed = pack(*scaled(products), dtype)
    known = torch.where(came.view(-1, 1, 1, 1), unpack(packed, dtype), 0.0)
    packed = torch.where(came.view(-1, 1, 1, 1), packed, pack(*scaled(torch.full_like(products, torch.nan)), dtype))
    messages = torch.cat(
        (packed.flatten(1), values.view(packed.dtype).flatten(1), leaves.unsqueeze(1).to(packed.dtype)), 1
    )
    want = linear_scan_reference(known, values.double(), None)
    entered, end, found, has = run(case, ordered(case, messages).contiguous(), values[0])
    assert torch.equal(found, known) and has.tolist() == [int(came[case.order])]
    before = want[case.order - 1] if case.order else torch.zeros_like(want[0])
    for got, state in ((entered, before), (end, want[-1])):
        assert got.dtype == dtype and (got.double() - state).norm() <= 3 * torch.finfo(dtype).eps * state.norm()


def check_left(case: Case, dtype: torch.dtype, run: Left) -> None:
    torch.manual_seed(0)
    products = torch.randn(case.ranks, case.matrices, case.H, case.H, dtype=torch.float64) / case.H**0.5
    for shares in (False, True):
        messages = torch.randn(case.ranks, 2, case.B, case.H).to(dtype)
        end = messages[:, 1].double().sum(0) if shares else torch.zeros(case.B, case.H, dtype=torch.float64)
        known = products.clone()
        if not shares:
            known[-1] = torch.nan
        steps = torch.cat((end.unsqueeze(0), messages[:, 0].double().flip(0)))
        matrices = torch.cat((torch.zeros_like(products[:1]), products.mT.flip(0)))
        if not shares:
            matrices[1] = 0
        want = linear_scan_reference(matrices, steps, None)[case.ranks - 1 - case.order]
        given = ordered(case, messages if shares else messages[:, 0]).contiguous()
        got = run(case, given, known)
        assert got.dtype == dtype and (got.double() - want).norm() <= 3 * torch.finfo(dtype).eps * want.norm()


@pytest.mark.parametrize("device", DEVICES)
@dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_between_slices(case: Case, dtype: torch.dtype, device: str) -> None:
    def states(case: Case, messages: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        found = ops.slice_states(messages.to(device), value.to(device), case.order, case.reverse, case.matrices)
        return tuple(t.cpu() for t in found)

    def left(case: Case, messages: Tensor, products: Tensor) -> Tensor:
        return ops.slice_left(messages.to(device), products.to(device), case.order, case.reverse).cpu()

    check_states(case, dtype, states)
    check_left(case, dtype, left)


def test_opcheck_and_bad_input() -> None:
    messages, value = torch.zeros(3, 2 * 9 + 6 + 1, dtype=torch.int32), torch.zeros(2, 3)
    opcheck(ops.slice_states.default, (messages, value, 1, False, 2))
    opcheck(ops.slice_left.default, (torch.zeros(3, 2, 3), torch.zeros(3, 1, 3, 3).double(), 1, False))
    with pytest.raises(ValueError, match="slice_states: matrices must be 0, 1 or 2, got 3"):
        ops.slice_states(messages, value, 1, False, 3)
    with pytest.raises(ValueError, match=r"slice_states: messages must be \(ranks, 16\)"):
        ops.slice_states(messages, value, 1, False, 1)
    with pytest.raises(ValueError, match="slice_left: products must be"):
        ops.slice_left(torch.zeros(3, 2, 3), torch.zeros(3, 3, 3, 3).double(), 1, False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ctypes._CFuncPtr:
    return emulated.build("slice_kernels", tmp_path_factory.mktemp("slices")).run


class TestEmulated:
    pytestmark = emulated.MARKS

    @dtypes
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_between_slices(self, run: ctypes._CFuncPtr, case: Case, dtype: torch.dtype) -> None:
        sizes = (ctypes.c_int64 * 6)(case.ranks, case.B, case.H, case.matrices, case.order, case.reverse)
        wide = int(dtype == torch.float64)

        def call(which: int, flag: int, *tensors: Tensor) -> None:
            run(which, wide, flag, sizes, (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors)))

        def states(case: Case, messages: Tensor, value: Tensor) -> tuple[Tensor, ...]:
            shape = (case.ranks, case.matrices, case.H, case.H)
            products, came = torch.full(shape, torch.nan, dtype=torch.float64), torch.full((1,), -1, dtype=torch.int32)
            found = (*(torch.full_like(value, torch.nan) for _ in range(2)), products, came)
            call(2, 0, messages, *found)
            return found

        def left(case: Case, messages: Tensor, products: Tensor) -> Tensor:
            found = messages.new_full((case.B, case.H), torch.nan)
            call(3, int(messages.dim() == 4), messages, products, found)
            return found

        check_states(case, dtype, states)
        check_left(case, dtype, left)
