"""chain_backward of Jacobians that lie on several ranks, beside the same on one."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
import weft.distributed as wd
from weft._distributed.group import GroupRanks
from weft.scan import chain_backward

from tests.common import BOUNDS, assert_close
from tests.distributed.team import Team, dealt, device

WIDTHS = [4, 5, 3, 3, 6, 2, 4, 4]
COUNTS = [[2, 1, 3, 1], [0, 4, 0, 3], [7, 0, 0, 0], [0, 0, 0, 7]]


def _beside_one_process(rank: int, counts: list[int], schedule: str, batched: bool, dtype: torch.dtype) -> None:
    B = 3
    counts = dealt(counts)
    grad = torch.randn(*([B] if batched else []), WIDTHS[0], dtype=torch.float64).to(device(), dtype)
    jacobians = [
        (torch.randn(*([B] if batched and k % 2 else []), m, n, dtype=torch.float64) / n**0.5).to(device(), dtype)
        for k, (n, m) in enumerate(itertools.pairwise(WIDTHS))
    ]
    leaves = [t.double().requires_grad_() for t in (grad, *jacobians)]
    want = chain_backward(leaves[0], leaves[1:])
    weights = [torch.randn_like(g) for g in want]
    want_grads = torch.autograd.grad(sum((g * w).sum() for g, w in zip(want, weights, strict=True)), leaves)

    begin, count = sum(counts[:rank]), counts[rank]
    own = [J.clone().requires_grad_() for J in jacobians[begin : begin + count]]
    start = grad.clone().requires_grad_() if rank == 0 else None
    got = wd.chain_backward(start, own, schedule=schedule)
    assert len(got) == count + 1
    bound = 4 * BOUNDS[dtype]
    for g, w in zip(got, want[begin : begin + count + 1], strict=True):
        assert g.dtype == dtype
        assert_close(g, w, bound)
    # What enters a rank is what left the one before it: its weight counts once.
    loss = sum((g.double() * w).sum() for g, w in zip(got[1:], weights[begin + 1 : begin + count + 1], strict=True))
    loss = loss + (got[0].double() * (weights[0] if rank == 0 else 0)).sum()
    present = [t for t in (start, *own) if t is not None]
    if not present:
        return loss.backward()
    found = torch.autograd.grad(loss, present)
    if rank == 0:
        assert_close(found[0], want_grads[0], bound)
    for g, w in zip(found[len(present) - count :], want_grads[1 + begin : 1 + begin + count], strict=True):
        assert_close(g, w, bound)


@pytest.mark.parametrize("schedule", ["linear", "auto", "blelloch"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_gradients_and_their_derivatives(team: Team, counts: list[int], schedule: str) -> None:
    for batched in (True, False):
        team.run(_beside_one_process, counts, schedule, batched, torch.float64)
    if schedule != "auto":
        team.run(_beside_one_process, counts, schedule, True, torch.float32)
        team.run(_beside_one_process, counts, schedule, True, torch.bfloat16)


def _far(rank: int, schedule: str) -> None:
    """Each rank's product is far beyond float64, the next one's brings the gradient back."""
    Q = torch.linalg.qr(torch.randn(dist.get_world_size(), 10, 1, 5, 5, dtype=torch.float64)).Q
    Q[::2] *= 1e40
    Q[1::2] *= 1e-40
    grad = torch.full((1, 5), 1e-200, dtype=torch.float64, device=device())
    jacobians = list(Q.flatten(0, 1).to(device()))
    want = chain_backward(grad, jacobians, "linear")
    got = wd.chain_backward(grad if rank == 0 else None, jacobians[10 * rank : 10 * rank + 10], schedule=schedule)
    for g, w in zip(got, want[10 * rank : 10 * rank + 11], strict=True):
        assert (g - w).abs().max() <= 1e-12 * w.abs().max()


@pytest.mark.parametrize("schedule", ["linear", "blelloch"])
def test_products_beyond_the_range(team: Team, schedule: str) -> None:
    team.run(_far, schedule)


def _rounds(rank: int) -> int:
    calls, original = [], GroupRanks.shift
    J = torch.randn(2, 3, 3, dtype=torch.float64).to(device())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupRanks, "shift", lambda *arguments: calls.append(0) or original(*arguments))
        wd.chain_backward(J[0] if rank == 0 else None, [J[1]], schedule="blelloch")
    return len(calls)


def test_products_are_scanned_in_as_many_rounds_as_the_ranks_have_digits(team: Team) -> None:
    assert set(team.run(_rounds)) == {(team.size - 1).bit_length()}


def _refused(rank: int) -> None:
    J = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"^chain_backward: schedule must be"):
        wd.chain_backward(torch.zeros(2, 3), [J], schedule="tree")
    with pytest.raises(TypeError, match=r"^chain_backward: jacobians\[0\] must be a Tensor, got int"):
        wd.chain_backward(torch.zeros(2, 3), [1])
    with pytest.raises(TypeError, match=r"^chain_backward: jacobians\[0\] must be dense"):
        wd.chain_backward(torch.zeros(2, 3), [J.to_sparse()])
    with pytest.raises(ValueError, match=r"^chain_backward: jacobians\[0\] of rank 2 does not chain"):
        wd.chain_backward(torch.zeros(2, 3), [torch.zeros(3, 4) if rank == 2 else J])
    with pytest.raises(ValueError, match=r"^chain_backward: jacobians\[1\] of rank 1 does not chain"):
        wd.chain_backward(torch.zeros(2, 3), [J, torch.zeros(3, 2) if rank == 1 else J])
    with pytest.raises(TypeError, match=r"^chain_backward: the tensors of rank 3 must be floating"):
        wd.chain_backward(torch.zeros(2, 3), [J.double() if rank == 3 else J])
    with pytest.raises(ValueError, match=r"^chain_backward: the jacobians of rank 1 must have grad's batch, 2"):
        wd.chain_backward(torch.zeros(2, 3), [torch.zeros(4, 3, 3) if rank == 1 else J])


def test_bad_input_is_refused_on_every_rank(cpu_team: Team) -> None:
    cpu_team.run(_refused)


def _only_later_ranks_train(rank: int) -> None:
    grad, J = torch.randn(2, 3).to(device()), torch.randn(2, 4, 3).to(device())
    own, size = J.clone().requires_grad_(), dist.get_world_size()
    owner = size // 2
    for check in ("0", "1"):
        os.environ["WEFT_CHECK_RANKS"] = check
        try:
            got = wd.chain_backward(grad if rank == 0 else None, [own] if rank == owner else [])
        finally:
            os.environ.pop("WEFT_CHECK_RANKS")
        want = grad if rank < owner else (J @ grad.unsqueeze(-1)).squeeze(-1)
        assert_close(got[-1], want, BOUNDS[torch.float32])
        own.grad = None
        got[-1].sum().backward()
        if rank == owner:
            # The results of the ranks after it are this one's.
            assert_close(own.grad, (size - owner) * grad.unsqueeze(1).expand(2, 4, 3), BOUNDS[torch.float32])


def test_only_later_ranks_have_jacobians(team: Team) -> None:
    team.run(_only_later_ranks_train)
