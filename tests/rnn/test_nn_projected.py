"""LSTMs with a projection, beside what other tests say of all layers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import rnn

from tests.rnn.layers import BOUNDS, I, _Ops, _packed, assert_layers_agree, assert_same, devices, flat, layers, states

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


@devices
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("given_state", [False, True])
def test_projected_h_n_is_rows_of_the_output(device, dtype, both, given_state):
    ours, _ = layers("projected", device, dtype, "persistent", sizes=(7, 24), bidirectional=both, proj_size=5)
    x = torch.randn(6, 4, 7, dtype=dtype, device=device)
    state = states(ours, 4) if given_state else None
    output, (h_n, _) = ours(x, state)
    assert torch.equal(h_n[0], output[-1, :, :5])
    assert not both or torch.equal(h_n[1], output[0, :, 5:])
    output, (h_n, _) = ours(_packed(x), state)
    output, lengths = rnn.pad_packed_sequence(output)
    assert torch.equal(h_n[0], output[lengths - 1, range(4), :5])
    assert not both or torch.equal(h_n[1], output[0, :, 5:])


@devices
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given_state", [False, True])
def test_projection_is_one_operator_per_layer(device, packed, given_state):
    ours, _ = layers("projected", device, algorithm="persistent", num_layers=3, bidirectional=True)
    counts = []
    for steps in (6, 60):
        x = torch.randn(steps, 4, I, dtype=torch.float64, device=device)
        state = states(ours, 4) if given_state else None
        each = _packed(x, (steps, 4, 4, 1)) if packed else x
        with torch.no_grad(), _Ops() as ops:
            ours(each, state)
        assert ops.names.count("weft.rnn.default") == 3
        counts.append(len(ops.names))
    assert counts[0] == counts[1]


@devices
@pytest.mark.parametrize("packed", [False, True])
def test_projection_gradients_of_each_result(device, packed):
    """Some results of a layer are not used: the others' gradients alone arrive."""
    ours, theirs = layers("projected", device, algorithm="persistent", num_layers=2, bidirectional=True)
    x, state = torch.randn(6, 4, I, dtype=torch.float64, device=device), states(ours, 4)
    found = []
    for layer in (ours, theirs):
        inputs = [t.detach().clone().requires_grad_() for t in (x, *state)]
        results = flat(layer(_packed(inputs[0]) if packed else inputs[0], tuple(inputs[1:])))
        wanted = [*inputs, *layer.parameters()]
        grads = [
            torch.autograd.grad(r.pow(2).sum(), wanted, retain_graph=True, allow_unused=True, materialize_grads=True)
            for r in results
        ]
        found.append([g for each in grads for g in each])
    assert_same(*found)


@devices
def test_projection_gradcheck_packed(device):
    ours, _ = layers("projected", device, algorithm="persistent", sizes=(2, 3), bidirectional=True, return_cells=True)
    names = [n for n, _ in ours.named_parameters()]

    def call(x, h0, c0, *weights):
        arguments = rnn.pack_padded_sequence(x, [3, 1]), (h0, c0)
        output, final, cells = torch.func.functional_call(ours, dict(zip(names, weights, strict=True)), arguments)
        return output.data, *final, cells.data

    x = torch.randn(3, 2, 2, dtype=torch.float64, device=device)
    inputs = [t.detach().clone().requires_grad_() for t in (x, *states(ours, 2), *ours.parameters())]
    nondet = 1e-7 if device == "cuda" else 0.0
    assert gradcheck(call, inputs, nondet_tol=nondet, fast_mode=True)
    assert gradgradcheck(call, inputs, nondet_tol=nondet, fast_mode=True)


@devices
@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, 0)])
def test_projection_vmap_packed(device, mapped):
    """Inputs, states or both mapped."""
    ours, _ = layers("projected", device, algorithm="persistent", bidirectional=True)
    batch_sizes = torch.tensor([4, 3, 3, 1, 1, 1])
    data = torch.randn(5, 13, I, dtype=torch.float64, device=device)
    h0, c0 = (s.unflatten(1, (5, 4)).transpose(0, 1) for s in states(ours, 20))
    arguments = [t if dim == 0 else t[0] for t, dim in zip((data, h0, c0), mapped, strict=True)]

    def call(data, h0, c0):
        return tuple(flat(ours(rnn.PackedSequence(data, batch_sizes), (h0, c0))))

    found = torch.func.vmap(call, mapped)(*arguments)
    each = [call(*(t[i] if dim == 0 else t for t, dim in zip(arguments, mapped, strict=True))) for i in range(5)]
    assert_same(found, [torch.stack(parts) for parts in zip(*each, strict=True)])


@devices
@pytest.mark.parametrize("given_state", [False, True])
def test_projection_compiled_once_for_packed_sequences_of_any_size(fresh_dynamo, device, given_state):
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    ours, theirs = layers("projected", device, algorithm="persistent", num_layers=2, bidirectional=True)

    def call(layer, data, batch_sizes, hx):
        return layer(rnn.PackedSequence(data, batch_sizes), hx)

    compiled = torch.compile(functools.partial(call, ours), fullgraph=True, dynamic=True, backend=counter)

    def run(layer, x, hx):
        packed = _packed(x, lengths)
        return (compiled if layer is ours else functools.partial(call, theirs))(packed.data, packed.batch_sizes, hx)

    graphs = []
    for lengths in ((6, 4, 4, 1, 1), (9, 9, 2, 2, 2, 2, 1), (30, 20, 10, 9, 9, 8)):
        x = torch.randn(lengths[0], len(lengths), I, dtype=torch.float64, device=device)
        assert_layers_agree(ours, theirs, x, states(ours, len(lengths)) if given_state else None, run=run)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


@pytest.mark.slow
@devices
def test_projection_compiled_by_inductor(fresh_dynamo, quick_inductor, device):
    """Packed and without a state, where a graph does not know how many sequences there are."""
    ours, theirs = layers("projected", device, algorithm="persistent", bidirectional=True)

    def call(layer, data, batch_sizes):
        return layer(rnn.PackedSequence(data, batch_sizes))

    compiled = torch.compile(functools.partial(call, ours), fullgraph=True)

    def run(layer, x, hx):
        packed = _packed(x)
        return (compiled if layer is ours else functools.partial(call, theirs))(packed.data, packed.batch_sizes)

    assert_layers_agree(ours, theirs, torch.randn(6, 4, I, dtype=torch.float64, device=device), run=run)
