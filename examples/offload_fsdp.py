"""Shards a model's parameters over ranks with FSDP2, and moves each rank's activations to host memory.

    torchrun --nproc-per-node 2 examples/offload_fsdp.py

Without torchrun it is one rank. On a machine without a GPU "moving" is a copy to a second place in host memory. Writes
a plot of the first rank's last step.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import weft
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm
from weft.offloading import OffloadReport


def main(arguments: list[str] | None = None) -> OffloadReport:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="4MB", help="for a rank's activations")
    parser.add_argument("--output", type=Path, default=Path("offload_fsdp.png"), help="plot of the last step")
    parser.add_argument("--quick", action="store_true", help="four steps instead of forty")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    device, backend = ("cuda", "nccl") if on_gpu else ("cpu", "gloo")
    if "RANK" in os.environ:  # by torchrun
        distributed.init_process_group(backend)
    else:
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))).to(device)
    mesh = distributed.init_device_mesh(device, (distributed.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # Of this rank's activations; parameters, which FSDP2 frees and gathers, do not count.
    offload = weft.offload(options.budget, backend="copy" if on_gpu else "reference")
    rank = distributed.get_rank()
    for _ in tqdm(range(4 if options.quick else 40), desc="train", unit="step", disable=rank != 0):
        x = torch.randn(1024, 256, device=device)
        with offload:
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(offload.report())
        offload.plot(options.output)
        print(f"wrote {options.output}")
    distributed.destroy_process_group()
    return offload.report()


if __name__ == "__main__":
    main()
