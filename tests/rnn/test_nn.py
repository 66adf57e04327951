"""weft.nn.RNN, GRU and LSTM beside torch.nn's, for every algorithm: results and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import rnn
from weft._rnn import calls
from weft._rnn.calls import choose_at_once

from tests.common import pairs, relative_error
from tests.rnn.layers import (
    ALGORITHMS,
    BOUNDS,
    CELLS,
    LAYERS,
    OPTIONS,
    I,
    algorithms,
    assert_layers_agree,
    assert_same,
    cells_and_projected,
    devices,
    flat,
    hx_of,
    layers,
    states,
)

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


@devices
@pairs(cell=LAYERS, algorithm=ALGORITHMS, options=OPTIONS, given_state=[False, True])
def test_padded_fp64(device, cell, algorithm, options, given_state):
    ours, theirs = layers(cell, device, algorithm=algorithm, **OPTIONS[options])
    x = torch.randn(6, 5, I, dtype=torch.float64, device=device)
    batch = 6 if ours.batch_first else 5
    assert_layers_agree(ours, theirs, x, states(ours, batch) if given_state else None)


@devices
@cells_and_projected
@algorithms
def test_padded_fp32(device, cell, algorithm):
    ours, theirs = layers(cell, device, torch.float32, algorithm, sizes=(7, 20), num_layers=2, bidirectional=True)
    exact = copy.deepcopy(theirs).double()
    x, state = torch.randn(30, 3, 7, device=device), states(ours, 3)
    results, grads, outgoing = [], [], None
    for layer, kind in ((ours, torch.float32), (exact, torch.float64)):
        inputs = [t.to(kind).requires_grad_() for t in (x, *state)]
        result = flat(layer(inputs[0], hx_of(layer, tuple(inputs[1:]))))
        outgoing = outgoing or [torch.randn_like(r) for r in result]
        results.append(result)
        grads.append(torch.autograd.grad(result, [*inputs, *layer.parameters()], [g.to(kind) for g in outgoing]))
    assert_same(*results, torch.float32, same_dtypes=False)
    assert_same(*grads, torch.float32, same_dtypes=False)


def _assert_half(algorithm, cell, device, dtype):
    ours, theirs = layers(cell, device, torch.float32, algorithm, sizes=(5, 8), num_layers=2)
    ours = ours.to(dtype)
    x, state = torch.randn(40, 3, 5, device=device), states(theirs, 3)
    result = flat(ours(x.to(dtype), hx_of(ours, tuple(s.to(dtype) for s in state))))
    expected = flat(theirs(x, hx_of(theirs, state)))
    for a, b in zip(result, expected, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) <= BOUNDS[dtype]
    sum(r.float().sum() for r in result).backward()
    sum(r.sum() for r in expected).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad.dtype == dtype
        assert relative_error(a.grad, b.grad) <= 2 * BOUNDS[dtype]


@devices
@cells_and_projected
@pytest.mark.parametrize("algorithm", ["persistent", "scan", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, cell, algorithm, dtype):
    _assert_half(algorithm, cell, device, dtype)


@devices
@pairs(cell=LAYERS, algorithm=ALGORITHMS, batch_first=[False, True])
def test_unbatched(device, cell, algorithm, batch_first):
    ours, theirs = layers(cell, device, algorithm=algorithm, batch_first=batch_first, bidirectional=True)
    x = torch.randn(6, I, dtype=torch.float64, device=device)
    assert_layers_agree(ours, theirs, x)
    assert_layers_agree(ours, theirs, x, states(ours, None))


@devices
@pairs(
    cell=LAYERS,
    algorithm=ALGORITHMS,
    options=["plain", "no bias", "three layers, two directions"],
    enforce_sorted=[False, True],
)
def test_packed(device, cell, algorithm, options, enforce_sorted):
    ours, theirs = layers(cell, device, algorithm=algorithm, **OPTIONS[options])
    x = torch.randn(6, 4, I, dtype=torch.float64, device=device)
    lengths = [6, 4, 4, 1] if enforce_sorted else [4, 1, 6, 4]

    def run(layer, x, hx):
        return layer(rnn.pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted), hx)

    assert_layers_agree(ours, theirs, x, run=run)
    assert_layers_agree(ours, theirs, x, states(ours, 4), run=run)
    mine, torchs = (run(layer, x, None)[0] for layer in (ours, theirs))
    for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        a, b = getattr(mine, field), getattr(torchs, field)
        assert a is b is None or torch.equal(a, b)


@devices
@cells_and_projected
@algorithms
def test_strided_input(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm, num_layers=2)
    wide = torch.randn(2 * I, 5, 12, dtype=torch.float64, device=device)
    x = wide.permute(2, 1, 0)[::2, :, ::2]
    strided = lambda s: torch.randn(s.size(2), 5, 2, dtype=s.dtype, device=device).permute(2, 1, 0)  # noqa: E731
    state = tuple(map(strided, states(ours, 5)))
    assert not x.is_contiguous() and not state[0].is_contiguous()
    expected = theirs(x, hx_of(theirs, tuple(s.contiguous() for s in state)))  # cuDNN refuses a strided state
    assert_same(flat(ours(x, hx_of(ours, state))), flat(expected))


@devices
@cells_and_projected
@algorithms
def test_one_step_and_one_sequence(device, cell, algorithm):
    for steps, batch in ((1, 1), (1, 5), (5, 1)):
        ours, theirs = layers(cell, device, algorithm=algorithm)
        assert_layers_agree(ours, theirs, torch.randn(steps, batch, I, dtype=torch.float64, device=device))


@cells_and_projected
@algorithms
def test_empty_batch(cell, algorithm):
    ours, theirs = layers(cell, "cpu", algorithm=algorithm)
    assert_same(*(flat(layer(torch.randn(5, 0, I, dtype=torch.float64))) for layer in (ours, theirs)))


@settings(max_examples=40)
@given(
    cell=st.sampled_from(sorted(LAYERS)),
    algorithm=st.sampled_from(ALGORITHMS),
    sizes=st.tuples(*[st.integers(1, 20)] * 5),
    layer_count=st.integers(1, 3),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_any_shape(cell, algorithm, sizes, layer_count, flags):
    steps, batch, features, hidden, projected = sizes
    bias, batch_first, bidirectional, given_state = flags
    options = {"proj_size": projected} if cell == "projected" else {}
    hidden += projected if options else 0
    ours, theirs = layers(
        cell, "cpu", algorithm=algorithm, sizes=(features, hidden), num_layers=layer_count, bias=bias,
        batch_first=batch_first, bidirectional=bidirectional, **options,
    )  # fmt: skip
    x = torch.randn(*((batch, steps) if batch_first else (steps, batch)), features, dtype=torch.float64)
    assert_layers_agree(ours, theirs, x, states(ours, batch) if given_state else None)


@devices
@cells_and_projected
@algorithms
def test_a_bad_row_stays_alone(device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm)
    x = torch.randn(8, 4, I, dtype=torch.float64, device=device)
    clean = ours(x)[0]
    x[3, 2, 1] = float("nan")
    output = ours(x)[0]
    assert output[3:, 2].isnan().any(dim=-1).all()
    keep = [0, 1, 3]
    assert torch.equal(output[:, keep], clean[:, keep])


@devices
@pytest.mark.parametrize("algorithm", ["persistent", "scan", "torch"])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"bias": False, "bidirectional": True}],
    ids=["", "batch_first", "directions"],
)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_calls_that_go_the_short_way(monkeypatch, cell, with_state, options, algorithm, device):
    """What needs no more than one call of an op gives what the long way gives."""
    ours, _ = layers(cell, device, torch.float32, algorithm, **options)
    shape = (2, 5, I) if ours.batch_first else (5, 2, I)
    x = torch.randn(shape, device=device, requires_grad=True)
    state = [s.requires_grad_() for s in states(ours, 2)] if with_state else None
    short = choose_at_once(ours, x, None if state is None else tuple(state))
    assert short == (None if algorithm == "torch" and not with_state else algorithm)
    wanted = [x, *(state or ()), *ours.parameters()]
    found = []
    for way in (short, None):
        monkeypatch.setattr(calls, "choose_at_once", lambda *_, way=way: way)
        result = flat(ours(x, hx_of(ours, state)))
        found.append([*result, *torch.autograd.grad(sum(r.square().sum() for r in result), wanted)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.requires_grad == b.requires_grad


@pytest.mark.parametrize("algorithm", ["persistent", "scan"])
def test_several_layers_go_the_long_way(algorithm):
    ours, _ = layers("gru", "cpu", torch.float32, algorithm, num_layers=2)
    assert choose_at_once(ours, torch.randn(5, 2, I), None) is None
