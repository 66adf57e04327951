"""How the halves of a slice's dense scan are cut: weft::slice_maps and weft::slice_replay_."""

from __future__ import annotations

import functools

import torch

from .. import _C

__all__ = ["slice_chunks", "slice_map_floats"]


def slice_chunks(device: torch.device, steps: int, batch: int, hidden: int) -> int:
    """Chunks of time that are expected to be fastest."""
    if device.type != "cuda":
        return 1
    return _chunks_on(torch.cuda.current_device() if device.index is None else device.index, steps, batch, hidden)


@functools.lru_cache(maxsize=1024)
def _chunks_on(index: int, steps: int, batch: int, hidden: int) -> int:
    return _C.scan.slice_chunks(index, steps, batch, hidden)


def slice_map_floats(device: torch.device, hidden: int) -> int:
    """Floats that slice_maps keeps of a chunk and row."""
    return _C.scan.slice_map_floats(int(hidden)) if device.type == "cuda" else 0
