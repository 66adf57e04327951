"""The backend "managed": a pool of managed memory for what torch allocates inside a `with` block."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from .. import _C

_pools: dict[int, torch.cuda.MemPool] = {}


def managed_pool() -> AbstractContextManager:
    """Lets this thread's allocations on the current device come from managed memory. The pool lives as long as the
    process: graphs hold its memory."""
    device = torch.cuda.current_device()
    pool = _pools.get(device)
    if pool is None:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, "weft_managed_allocate", "weft_managed_free")
        pool = _pools[device] = torch.cuda.MemPool(allocator.allocator())
    return torch.cuda.use_mem_pool(pool)
