"""The case that a call of a layer is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..._base.torch_private import fp32_precision

__all__ = ["Case", "takes_tf32"]


# Not frozen, which would make a new one cost three times as much; nothing changes one.
@dataclass(kw_only=True, slots=True, unsafe_hash=True)
class Case:
    """What the choice of an algorithm looks at."""

    cell: str
    """A name of weft._rnn.table.CELLS."""
    device: str
    dtype: torch.dtype
    """What the layer computes in: the input's dtype, or autocast's."""
    hidden_size: int
    batch: int | None
    steps: int | None
    """T. None, like `batch`, in a compiled graph, where looking at it would tie the graph to a range of sizes: "auto"
    then takes from its tables only what it takes at every size, and on CUDA "persistent" where the weights fit."""
    packed: bool = False
    proj_size: int = 0
    """P of an LSTM with projection, else 0."""
    transformed: bool = False
    """Under a torch.func transform that differentiates, or in a forward-mode AD level."""
    mapped: bool = False
    """Under torch.func.vmap alone."""
    layers: int = 1
    directions: int = 1
    trains: bool = True
    """Whether anything asks for a gradient."""
    keeps_cells: bool = False
    """Whether the cell state of every step is a result."""
    input_size: int = 1
    heads: int = 1
    index: int | None = None
    """The GPU's, None on a CPU and in a compiled graph."""
    capability: tuple[int, int] | None = None
    """The GPU's compute capability, None likewise."""
    tf32: bool = False
    """Whether torch's RNNs multiply in TF32: in float32 on a GPU alone, and not in a compiled graph."""
    autocast: bool = False
    """Whether an autocast region casts to `dtype`."""

    @property
    def projected(self) -> bool:
        return self.proj_size > 0

    def _replace(self, **changes: Any) -> Case:
        """A copy with other values."""
        return replace(self, **changes)


def takes_tf32(device: str, dtype: torch.dtype) -> bool:
    """Whether torch's RNNs multiply in TF32 on this device, whichever of torch's settings says so:
    `torch.backends.cudnn.allow_tf32` cannot be read once the newer ones are in use."""
    return device == "cuda" and dtype == torch.float32 and fp32_precision("cuda", "rnn") == "tf32"
