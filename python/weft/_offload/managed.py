"""The backend "managed": pools of managed memory for what torch allocates inside a `with` block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from .. import _C

_unused: dict[int, list[torch.cuda.MemPool]] = {}
"""Device to pools that no thread allocates from. They live as long as the process: graphs hold their memory."""
_thread = threading.local()


@contextlib.contextmanager
def managed_pool() -> Iterator[None]:
    """This thread's allocations on the current device come from managed memory. Nests: torch lets a thread enter a pool
    once, and only one thread at a time."""
    device = torch.cuda.current_device()
    depth = _thread.__dict__.setdefault("depth", {})
    if depth.get(device, 0) > 0:
        depth[device] += 1
        try:
            yield
        finally:
            depth[device] -= 1
        return
    unused = _unused.setdefault(device, [])
    pool = unused.pop() if unused else _new_pool()
    depth[device] = 1
    try:
        with torch.cuda.use_mem_pool(pool, device):
            yield
    finally:
        depth[device] = 0
        unused.append(pool)


def _new_pool() -> torch.cuda.MemPool:
    allocator = torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, "weft_managed_allocate", "weft_managed_free")
    return torch.cuda.MemPool(allocator.allocator())
