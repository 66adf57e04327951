"""What the layers run: one operator per layer, in every combination, with weights that make the state chaotic."""

from __future__ import annotations

import functools

import pytest
import torch
import weft
from torch.nn.utils import rnn

from tests.common import pairs, relative_error
from tests.rnn.layers import (
    BOUNDS,
    LAYERS,
    I,
    _Ops,
    algorithms,
    assert_same,
    cells,
    cells_and_projected,
    devices,
    flat,
    hx_of,
    layers,
    states,
)
from tests.rnn.sequential import check_chain, reference_chain

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


@devices
@pairs(cell=LAYERS, dtype=BOUNDS, count=[1, 2], both=[False, True], packed=[False, True])
def test_every_combination(device, cell, dtype, count, both, packed):
    """Results and gradients beside torch's in fp64 on the CPU, from the same rounded numbers."""
    kind, theirs, extra = LAYERS[cell]
    options = {**extra, "num_layers": count, "bidirectional": both}
    ours = kind(7, 24, device=device, dtype=dtype, algorithm="persistent", **options)
    theirs = theirs(7, 24, dtype=torch.float64, **options)
    theirs.load_state_dict(ours.state_dict())
    x, state = torch.randn(12, 5, 7, device=device, dtype=dtype), states(ours, 5)
    found, outgoing = [], None
    for layer in (ours, theirs):
        like = layer.weight_ih_l0
        inputs = [t.detach().to(like.device, like.dtype).requires_grad_() for t in (x, *state)]
        each = rnn.pack_padded_sequence(inputs[0], [12, 7, 7, 4, 1]) if packed else inputs[0]
        result = flat(layer(each, hx_of(layer, tuple(inputs[1:]))))
        outgoing = outgoing or [torch.randn_like(r) for r in result]
        grads = torch.autograd.grad(result, [*inputs, *layer.parameters()], [g.to(like) for g in outgoing])
        found.append([*result, *grads])
    for mine, expected in zip(*found, strict=True):
        assert mine.dtype == dtype
        # A ReLU near zero may be on in one and off in the other.
        assert relative_error(mine, expected) <= (2 if cell == "relu" else 1) * BOUNDS[dtype]


@devices
@cells
def test_one_operator_per_layer(device, cell):
    """No state that is not given, no padding, no step by step."""
    x = torch.randn(6, 4, I, dtype=torch.float64, device=device)
    for count in (1, 3):
        ours, _ = layers(cell, device, algorithm="persistent", num_layers=count, bidirectional=True)
        for each in (x, rnn.pack_padded_sequence(x, [6, 4, 4, 1])):
            with torch.no_grad(), _Ops() as ops:
                ours(each)
            reads_the_batch = ["aten.select.int", "aten._local_scalar_dense.default"]
            names = [name for name in ops.names if each is x or name not in reads_the_batch]
            states_joined = ["aten.cat.default"] * (0 if count == 1 else 2 if cell == "lstm" else 1)
            assert names == ["weft.rnn.default"] * count + states_joined


@devices
@cells_and_projected
@algorithms
def test_steps_one_by_one(device, cell, algorithm):
    """A sequence, one step per call from the state of the call before, is the same as in one call."""
    for batch_first in (False, True):
        ours, _ = layers(cell, device, algorithm=algorithm, batch_first=batch_first)
        x = torch.randn(5, 5, I, dtype=torch.float64, device=device)
        with torch.no_grad():
            expected, last = ours(x)
            state, outputs = None, []
            for t in range(5):
                output, state = ours(x.narrow(1 if batch_first else 0, t, 1), state)
                outputs.append(output)
        assert_same([torch.cat(outputs, 1 if batch_first else 0)], [expected])
        assert_same(flat((expected, state)), flat((expected, last)))


@devices
@cells_and_projected
def test_vmap_runs_on_the_engine(device, cell):
    ours, _ = layers(cell, device, algorithm="persistent", num_layers=2, bidirectional=True)
    xs = torch.randn(4, 5, 2, I, dtype=torch.float64, device=device)
    hs = [s.unflatten(1, (4, 2)).transpose(0, 1) for s in states(ours, 8)]
    told = []

    def call(x, *state):
        told.append(weft.explain(ours, x, hx_of(ours, state)).algorithm)
        return tuple(flat(ours(x, hx_of(ours, state))))

    found = torch.func.vmap(call)(xs, *hs)
    assert told == ["persistent"]
    expected = [call(*(t[i] for t in (xs, *hs))) for i in range(4)]
    assert_same(found, [torch.stack(parts) for parts in zip(*expected, strict=True)])
    weights = list(ours.parameters())
    grads = [torch.autograd.grad(sum(r.pow(2).sum() for r in flat), weights) for flat in (found, sum(expected, ()))]
    assert_same(*grads)


@devices
@cells
@pytest.mark.parametrize(("steps", "scale"), [(20, 3.0), (20, 10.0), (1000, 3.0), (10_000, 10.0)])
def test_chaotic_weights(device, cell, steps, scale):
    """Recurrent weights so large that products of Jacobians overflow: every gradient is the sequential loop's.

    Two runs of a chaotic map part after some tens of steps, whatever the precision, so torch's layer is no measure. The
    loop gets the activations that the layer's own forward leaves; from there on everything is linear.
    """
    layer, _ = layers(cell, device, torch.float32, "scan", sizes=(2, 20))
    steps = steps if device == "cuda" else min(steps, 3000)  # the loop takes a processor long
    with torch.no_grad():
        layer.weight_hh_l0.mul_(scale)
    x, state = torch.randn(steps, 3, 2, device=device), states(layer, 3)
    weights = [p.detach() for p in layer.parameters()]
    name = layer.mode.lower()

    def op(x):
        h0, c0 = state[0], state[1] if cell == "lstm" else None
        output, h_n, c_n, cells, gates = torch.ops.weft.rnn(x, h0, c0, weights, cell=name, save=True, backward="scan")
        gates = gates[0].unflatten(0, x.shape[:2]) if gates.numel() > 0 else gates
        return (x, h0, c0, *weights), (output, h_n, c_n, gates, cells)

    finite = op(x)[1][0].isfinite().flatten(1).all(1)
    if not finite.all():  # a ReLU net's state overflows, and then its gradient means nothing
        assert cell == "relu"
        x = x[: int(finite.long().argmin())]
    arguments, (output, h_n, c_n, gates, cell_states) = op(x)
    assert len(x) > 5

    inputs = [t.clone().requires_grad_() for t in (x, *state)]
    result = flat(layer(inputs[0], hx_of(layer, tuple(inputs[1:]))))
    for mine, ops in zip(result, (output, h_n, c_n), strict=False):
        assert torch.equal(mine, ops)
    outgoing = [torch.randn_like(r) for r in result]
    grads = torch.autograd.grad(result, [*inputs, *layer.parameters()], outgoing)
    arriving = [*outgoing, None][:3]
    count = len(inputs)
    whole = check_chain(grads[:count], arriving, arguments, (output, gates, cell_states), cell=name)
    assert whole or steps > 20 or cell == "relu"
    if not whole:
        return
    # No step overflows, so neither do the sums over the steps.
    before = torch.cat([state[0], output[:-1]])
    sums = []
    for kind in (torch.float32, torch.float64):
        tensors = [None if t is None else t.cpu().to(kind) for t in (*arriving, *arguments, output, gates, cell_states)]
        *_, entering, recurrent = reference_chain(*tensors[:3], tensors[3:10], *tensors[10:], cell=name)
        einsum = functools.partial(torch.einsum, "tbg,tbi->gi")
        products = [einsum(entering, x.cpu().to(kind)), einsum(recurrent, before.cpu().to(kind))]
        sums.append([*products, entering.sum((0, 1)), recurrent.sum((0, 1))])
    for mine, single, double in zip(grads[count:], *sums, strict=True):
        assert relative_error(mine, double) <= 1e-4 + 10 * relative_error(single, double)
