"""Codecs, and offloads that move all."""

from __future__ import annotations

import torch
import weft
from torch import nn

from .common import bfloat16, device, half, single, synchronize


def codecs() -> None:
    for dtype in (single, half, bfloat16):
        for n in (0, 1, 33, 16_385, 40_000):
            for density in (0.0, 0.3, 1.0):
                memory = torch.where(torch.rand(n + 1, device=device()) < density, 1.5, 0.0).to(dtype)
                for x in (memory[:n], memory[1:]):  # of any alignment
                    mask, values, size = torch.ops.weft.zvc_compress(x)
                    runs, _, used = torch.ops.weft.rle_compress(x)
                    for some in (values, values[: int(size)].clone(), values[: int(size) // 2].clone()):
                        torch.ops.weft.zvc_decompress(mask, some, x.shape)
                        torch.ops.weft.rle_decompress(runs[: int(used[0])].clone(), some, x.shape)
        several = torch.rand(3 << 20, device=device()).relu().to(dtype)  # tiles for every block, one after the other
        torch.ops.weft.zvc_compress(several)
    synchronize()


def offloaded(backend: str, compress: str | None, dtype: torch.dtype = single) -> None:
    """A net whose saved tensors all move, in a recorded use and in three that follow its plan, the last with more
    non-zeros than the ones before."""
    with torch.device(device()):
        net = nn.Sequential(nn.Linear(300, 1000), nn.ReLU(), nn.Linear(1000, 1001), nn.ReLU(), nn.Linear(1001, 10))
        net.to(dtype)
        offload = weft.offload(0, backend=backend, compress=compress, min_bytes=1000, keep_last=0)
        for more in (0, 0, 0, 3):
            with torch.no_grad():
                for linear in (net[0], net[2]):
                    linear.bias += more
            with offload:
                loss = net(torch.randn(129, 300, dtype=dtype)).square().sum()
            loss.backward()
    synchronize()


def copies() -> None:
    for compress in (None, "zvc", "rle", "auto"):
        offloaded("copy", compress)
    offloaded("copy", "zvc", bfloat16)


def managed() -> None:
    for compress in (None, "zvc"):
        offloaded("managed", compress)


PARTS = {"codecs": codecs, "copies": copies, "managed": managed}
