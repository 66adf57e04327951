"""weft.offload beside FSDP2: each rank moves activations of its own, and all share the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
import weft
from torch import nn
from torch.distributed import init_device_mesh

from tests.distributed.team import Team, device


def _offloaded(rank: int, width: int, B: int) -> dict:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6))).to(device())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    x = torch.randn(B, width, generator=torch.Generator().manual_seed(rank)).to(device())
    off = weft.offload(5 * x.nbytes, backend="copy" if x.is_cuda else "reference", min_bytes=1 << 12)

    def gradients(moving: bool) -> list[torch.Tensor]:
        model.zero_grad()
        if moving:
            with off:
                loss = model(x).square().mean()
        else:
            loss = model(x).square().mean()
        loss.backward()
        return [p.grad.to_local().clone() for p in model.parameters()]

    want = gradients(False)
    for _ in range(5):
        assert all(map(torch.equal, gradients(True), want))
    if x.is_cuda:
        torch.cuda.synchronize()  # the rates of copies are known once they are done
    return off.report().to_dict()


def test_fully_sharded(team: Team) -> None:
    for report in team.run(_offloaded, *((64, 256) if team.backend == "gloo" else (1024, 8192))):
        assert report["budget_met"] and report["moved_bytes"] > 0 and report["live_bytes"] == 0
        assert report["d2h_bytes_per_second"] > 0 and report["h2d_bytes_per_second"] > 0
