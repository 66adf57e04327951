"""shard, unshard and groups."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import weft
import weft.distributed as wd
from torch.distributed import init_device_mesh

from tests.distributed.team import Team, dealt, device


def _sharded(rank: int, steps: int, dim: int) -> None:
    whole = torch.randn(3, 2, steps, dtype=torch.float64).movedim(2, dim).to(device()).requires_grad_()
    sizes = wd.slice_sizes(steps, dist.get_world_size())
    own = wd.shard(whole, dim=dim)
    assert own.shape[dim] == sizes[rank]
    assert torch.equal(own, whole.split(sizes, dim)[rank])
    assert torch.equal(wd.unshard(own, dim=dim), whole)
    (share,) = torch.autograd.grad((own * 2).sum(), whole)
    dist.all_reduce(share)
    assert torch.equal(share, torch.full_like(whole, 2))


@pytest.mark.parametrize(("steps", "dim"), [(7, 0), (8, 1), (2, -1), (0, 0)])
def test_slices_make_up_the_whole(team: Team, steps: int, dim: int) -> None:
    team.run(_sharded, steps, dim)


def _gradients_of_uneven_slices(rank: int, sizes: list[int]) -> None:
    sizes = dealt(sizes)
    own = torch.full((sizes[rank], 2), float(rank), dtype=torch.float64, device=device(), requires_grad=True)
    whole = wd.unshard(own)
    assert whole[:, 0].tolist() == [float(r) for r in range(len(sizes)) for _ in range(sizes[r])]
    weights = torch.randn(len(sizes), *whole.shape, dtype=torch.float64).to(device())  # the same on every rank
    (grad,) = torch.autograd.grad((whole**3 * weights[rank]).sum(), own, create_graph=True)
    begin = sum(sizes[:rank])
    total = weights.sum(0)[begin : begin + sizes[rank]]
    torch.testing.assert_close(grad, 3 * rank**2 * total)
    (second,) = torch.autograd.grad(grad.sum(), own)
    torch.testing.assert_close(second, 6 * rank * total)


@pytest.mark.parametrize("sizes", [[3, 1, 2, 2], [0, 5, 0, 1], [0, 0, 0, 0]], ids=str)
def test_a_slices_gradient_is_the_sum_of_all_ranks(team: Team, sizes: list[int]) -> None:
    team.run(_gradients_of_uneven_slices, sizes)


def _dtypes(rank: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool):
        whole = torch.arange(10).remainder(3).to(device(), dtype)
        own = whole.split(dealt([1, 2, 3, 4]))[rank]
        assert torch.equal(wd.unshard(own), whole)


def test_any_dtype(team: Team) -> None:
    team.run(_dtypes)


def _groups(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    whole = torch.arange(5)
    half = whole[:3] if rank % 2 == 0 else whole[3:]
    assert torch.equal(wd.shard(whole, pairs[rank // 2]), half)
    assert torch.equal(wd.shard(whole, mesh["cp"]), half)
    assert torch.equal(wd.unshard(half, mesh["cp"]), whole)
    assert torch.equal(wd.unshard(half, pairs[rank // 2]), whole)
    for call in (wd.shard, wd.unshard):
        name = call.__name__
        with pytest.raises(ValueError, match=rf"^{name}: group must be a DeviceMesh of one dimension, got one of 2"):
            call(whole, mesh)
        with pytest.raises(RuntimeError, match=rf"^{name}: this process, rank {rank} of all, is not in the group"):
            call(whole, pairs[1 - rank // 2])
        with pytest.raises(TypeError, match=rf"^{name}: group must be a ProcessGroup, .* got str"):
            call(whole, "cp")
        with pytest.raises(TypeError, match=rf"^{name}: x must be a Tensor, got list"):
            call([1, 2])
        with pytest.raises(ValueError, match=rf"^{name}: dim must be a dimension of x, which has 1, got 1"):
            call(whole, dim=1)
    with pytest.raises(RuntimeError, match=r"^unshard: the group's backend takes tensors on .*, got one on meta"):
        wd.unshard(whole.to("meta"))


def test_groups(cpu_team: Team) -> None:
    cpu_team.run(_groups)


def _of_dtensors(rank: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    x, own = distribute_tensor(torch.rand(8, 2, 3), mesh, [Shard(0)]), torch.rand(2, 2, 3)
    calls = {
        "shard: x": lambda: wd.shard(x),
        "unshard: x": lambda: wd.unshard(x),
        "linear_scan: A": lambda: wd.linear_scan(x, own),
        "linear_scan: x0": lambda: wd.linear_scan(own, own, x[0]),
        r"chain_backward: jacobians\[0\]": lambda: wd.chain_backward(own[0], [x]),
    }
    for what, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{what} must be this rank's own Tensor, got a DTensor: its to_local"):
            call()
    for kind, sizes in (("MinGRU", (3, 4)), ("LSTM", (3, 4)), ("GRU", (3, 4)), ("ParaLSTM", (3, 4)), ("RGLRU", (3,))):
        layer = wd.shard_time(getattr(weft.nn, kind)(*sizes))
        with pytest.raises(TypeError, match=rf"^{kind}: input must be this rank's own Tensor, got a DTensor: its to_"):
            layer(x)
    start = distribute_tensor(torch.zeros(1, 2, 4), mesh, [Shard(1)])
    for kind, hx, name in (
        ("MinGRU", start, "hx"),
        ("GRU", start, "hx"),
        ("LSTM", (torch.zeros(1, 2, 4), start), "c0"),
        ("ParaGRU", start[0], "h_0"),
    ):
        layer = wd.shard_time(getattr(weft.nn, kind)(3, 4))
        with pytest.raises(TypeError, match=rf"^{kind}: {name} must be this rank's own Tensor, got a DTensor: its to_"):
            layer(own, hx)
    assert wd.unshard(x.to_local()).shape == (8, 2, 3), "the bridge"


def test_distributed_tensors_are_refused(cpu_team: Team) -> None:
    cpu_team.run(_of_dtensors)


def _differing(rank: int) -> str:
    x = torch.zeros(3, 4 if rank == 2 else 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CHECK_RANKS", "1")
        with pytest.raises(ValueError, match=re.escape("rank 2 differs from rank 0")) as caught:
            wd.unshard(x)
    return str(caught.value)


def test_what_differs_is_named_on_every_rank(cpu_team: Team) -> None:
    messages = cpu_team.run(_differing)
    assert len(set(messages)) == 1 and "other dimensions is (4,) there and (5,) on rank 0" in messages[0]


def test_without_a_group() -> None:
    if dist.is_initialized():
        pytest.skip("torchrun's group")
    with pytest.raises(RuntimeError, match=r"^shard: torch\.distributed is not initialised"):
        wd.shard(torch.zeros(3))
