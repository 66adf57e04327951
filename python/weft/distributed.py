"""Scans over ranks: one sequence, cut in time, spread over the processes of torch.distributed.

Each rank of a group owns a slice of time, in order of rank; slices may differ in length and be empty. `group` is a
ProcessGroup, a DeviceMesh of one dimension, or None for all ranks. Every rank of the group makes every call, forward
and backward, in the same order and with the same things requiring a gradient.

Gradients are those of the sum of all ranks' losses; a rank without a loss calls backward on ``output.sum() * 0``. What
every rank has, parameters or an A that is constant in time, gets this rank's share: the shares sum to the gradient.

Source: BPPSA (Wang, Bai, Pekhimenko, "Scaling back-propagation by parallel scan algorithm", MLSys 2020), section 3.
"""

from __future__ import annotations

from . import _ops  # noqa: F401  loads torch.ops.weft
from ._distributed.chain import chain_backward
from ._distributed.costs import Exchange, Link, Prediction, exchange, predict, slice_sizes
from ._distributed.layers import shard_time
from ._distributed.scan import linear_scan
from ._distributed.slices import shard, unshard

__all__ = [
    "Exchange",
    "Link",
    "Prediction",
    "chain_backward",
    "exchange",
    "linear_scan",
    "predict",
    "shard",
    "shard_time",
    "slice_sizes",
    "unshard",
]
