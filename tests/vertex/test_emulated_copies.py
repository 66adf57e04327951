"""Arrays of Graphs and schedules on a device that is not there: tests/emulator/runtime.cpp."""

from __future__ import annotations

import pytest
from weft._C import vertex as _C

from tests import emulated

pytestmark = [
    *emulated.MARKS,
    pytest.mark.skipif(
        emulated.cuda_headers() is None or not hasattr(_C, "Copy"),
        reason="the emulated runtime needs CUDA's headers, and Weft and torch built with CUDA",
    ),
]

SCRIPT = """
import torch
from weft import Graphs
from weft._vertex.runtime.schedule import Kind, schedule

graphs = Graphs.from_children([[[], [0], [1, 0]], [[]]])
moved, other = graphs.to("cuda"), torch.cuda.Stream()
kinds = (Kind((0, 1)),)
for get in (lambda g: g.roots, lambda g: g.edges, lambda g: schedule("f", g, kinds).block(g.device)):
    copy, expected = get(moved), get(graphs)
    assert copy.is_cuda and get(moved) is copy
    with torch.cuda.stream(other):
        # Nothing has waited for the copy yet, which the runtime puts off as long as it can.
        assert not torch.equal(copy.to("cpu"), expected)
        assert torch.equal(get(moved).to("cpu"), expected)
    torch.cuda.synchronize()
    assert torch.equal(copy.to("cpu"), expected)
with torch.inference_mode():
    assert not graphs.to("cuda").levels.is_inference()
print("holds")
"""


def test_another_stream_waits_for_the_copy():
    process = emulated.run_on(emulated.runtime(), "-c", SCRIPT)
    assert process.stdout == "holds\n", process.stderr[-5000:]
