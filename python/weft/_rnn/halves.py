"""How the halves of a slice's backward pass are cut: weft::rnn_slice_maps and weft::rnn_slice_backward."""

from __future__ import annotations

import torch

from .. import _C
from .._base.chunks import chunks_on

__all__ = ["MOST_HIDDEN", "slice_chunks", "slice_map_floats", "takes_halves"]

MOST_HIDDEN = 32
"""Of CUDA's kernels of a slice's chunk maps."""


def takes_halves(cell: str, dtype: torch.dtype, hidden: int) -> bool:
    """Whether there are kernels of a slice's backward pass in two halves. What it says is the same on every rank."""
    return dtype == torch.float32 and 1 <= hidden <= MOST_HIDDEN and _C.rnn.scan_max_hidden.get(cell, 0) > 0


def slice_chunks(device: torch.device, cell: str, steps: int, batch: int, hidden: int) -> int:
    """Chunks of time that are expected to be fastest."""
    return chunks_on(device, _expected, cell, steps, batch, hidden)


def _expected(index: int, cell: str, steps: int, batch: int, hidden: int) -> int:
    return _C.rnn.slice_chunks(index, cell, hidden, steps, batch)


def slice_map_floats(device: torch.device, cell: str, hidden: int) -> int:
    """Floats that rnn_slice_maps keeps of a chunk and row."""
    return _C.rnn.slice_map_floats(cell, int(hidden)) if device.type == "cuda" else 0
