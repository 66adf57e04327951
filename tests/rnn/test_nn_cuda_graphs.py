"""The layers in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import rnn

from tests.common import in_a_cuda_graph
from tests.rnn.layers import I, _packed, algorithms, assert_same, cells_and_projected, flat, layers, states

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


@pytest.mark.cuda
@cells_and_projected
@algorithms
def test_cuda_graph(cell, algorithm):
    ours, theirs = layers(cell, "cuda", torch.float32, algorithm, num_layers=2)
    x = torch.randn(40, 3, I, device="cuda", requires_grad=True)

    def step():
        result = flat(ours(x))
        return [*result, *torch.autograd.grad(sum(r.pow(2).sum() for r in result), [x, *ours.parameters()])]

    graph, captured = in_a_cuda_graph(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        ours.weight_hh_l0.mul_(0.5)
        theirs.weight_hh_l0.mul_(0.5)
    for t in captured:
        t.detach().fill_(float("nan"))
    graph.replay()
    result = flat(theirs(x))
    expected = [*result, *torch.autograd.grad(sum(r.pow(2).sum() for r in result), [x, *theirs.parameters()])]
    assert_same(captured, expected, torch.float32)


@pytest.mark.parametrize("packed", [False, True])
def test_projection_under_a_default_device(packed):
    ours, theirs = layers("projected", "cpu", algorithm="persistent", bidirectional=True)
    x = torch.randn(4, 3, I, dtype=torch.float64)
    x = rnn.pack_padded_sequence(x, [4, 2, 1]) if packed else x
    state = states(ours, 3)
    expected = flat(theirs(x, state))
    with torch.device("meta"):
        found = flat(ours(x, state))
    assert_same(found, expected)


@pytest.mark.cuda
def test_cuda_graph_of_a_packed_projection():
    """The rows of the last steps are known to the host alone; a replay finds them where they were."""
    ours, _ = layers("projected", "cuda", torch.float32, "persistent", sizes=(I, 24), num_layers=2, bidirectional=True)
    packed = _packed(torch.randn(6, 4, I, device="cuda"))
    state = states(ours, 4)

    def step():
        return flat(ours(packed, state))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = step()
    with torch.no_grad():
        packed.data.copy_(torch.randn_like(packed.data))
        for _ in range(3):  # other sequences in between, which may take the memory that the graph reads
            ours(_packed(torch.randn(9, 4, I, device="cuda"), (9, 8, 7, 6)), state)
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
