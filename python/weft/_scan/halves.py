"""How the halves of a slice's dense scan are cut: weft::slice_maps and weft::slice_replay_."""

from __future__ import annotations

import torch

from .. import _C
from .._base.chunks import chunks_on

__all__ = ["slice_chunks", "slice_map_floats"]


def slice_chunks(device: torch.device, steps: int, batch: int, hidden: int) -> int:
    """Chunks of time that are expected to be fastest."""
    return chunks_on(device, _C.scan.slice_chunks, steps, batch, hidden)


def slice_map_floats(device: torch.device, hidden: int) -> int:
    """Floats that slice_maps keeps of a chunk and row."""
    return _C.scan.slice_map_floats(int(hidden)) if device.type == "cuda" else 0
