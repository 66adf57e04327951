"""Packed sequences made by hand, which may be nonsense."""

from __future__ import annotations

import pytest
import torch
import weft
from torch.nn.utils import rnn

from tests.common import pairs
from tests.rnn.layers import ALGORITHMS, LAYERS, I, assert_same, devices, flat, hx_of, layers, states

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


HAND_MADE = {
    "one sequence": [1, 1, 1, 1, 1, 1],
    "one step": [6],
    "falling by several": [4, 1, 1],
    "rising": [1, 2, 3],
    "rising at the end": [3, 1, 2],
    "a step without rows": [4, 0, 2],
    "ends without rows": [4, 2, 0],
    "too few": [3, 2],
    "too many": [4, 4],
    "negative": [4, -1, 3],
    "none": [],
}


@devices
@pairs(cell=LAYERS, algorithm=ALGORITHMS, batch_sizes=HAND_MADE, given_state=[False, True])
def test_hand_made_packed_sequence(device, cell, algorithm, batch_sizes, given_state):
    """torch's result, or a RuntimeError where torch has none; an IndexError as torch's for no step at all."""
    sizes = HAND_MADE[batch_sizes]
    ours, theirs = layers(cell, device, torch.float32, algorithm, bidirectional=True)
    data = torch.randn(6, I)
    hx = hx_of(ours, states(ours, max(sizes[:1], default=1))) if given_state else None
    mine = rnn.PackedSequence(data.to(device), torch.tensor(sizes, dtype=torch.int64)), hx
    if device == "cuda" and sizes and weft.explain(ours, *mine).algorithm == "torch":
        return  # what cuDNN makes of such sizes is not for us to try
    on_cpu = [None if hx is None else tuple(h.cpu() for h in hx) if isinstance(hx, tuple) else hx.cpu()]
    try:
        expected = flat(theirs.cpu()(rnn.PackedSequence(data, mine[0].batch_sizes), *on_cpu))
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            ours(*mine)
        return
    try:
        found = flat(ours(*mine))
    except RuntimeError as error:
        assert "batch_sizes" in str(error)
    else:
        assert_same([f.cpu() for f in found], expected, torch.float32)
