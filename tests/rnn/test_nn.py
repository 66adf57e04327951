"""weft.nn.RNN, GRU and LSTM beside torch.nn's, for every algorithm."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import itertools
import pickle
import weakref

import pytest
import torch
import weft
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, rnn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from weft._rnn import calls, choice, torch_limits, torch_rnn
from weft._rnn.calls import choose_at_once, prepare
from weft._rnn.case import Case

from tests.common import DEVICES, pairs, relative_error, with_environment
from tests.rnn.sequential import check_chain, reference_chain

CELLS = {
    "tanh": (weft.nn.RNN, torch.nn.RNN, {}),
    "relu": (weft.nn.RNN, torch.nn.RNN, {"nonlinearity": "relu"}),
    "gru": (weft.nn.GRU, torch.nn.GRU, {}),
    "lstm": (weft.nn.LSTM, torch.nn.LSTM, {}),
}
PROJECTED = {"projected": (weft.nn.LSTM, torch.nn.LSTM, {"proj_size": 2})}
LAYERS = CELLS | PROJECTED
ALGORITHMS = ["auto", "persistent", "scan", "torch", "reference"]
I, H = 3, 4
# Relative error of the norm. fp64: rounding of a few hundred operations. fp32: the same at 1e9 times its epsilon.
BOUNDS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}

devices = pytest.mark.parametrize("device", DEVICES)
cells = pytest.mark.parametrize("cell", CELLS)
cells_and_projected = pytest.mark.parametrize("cell", LAYERS)
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


@pytest.fixture(autouse=True)
def _exact_fp32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Hundreds of tiny problems: a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layers(cell, device, dtype=torch.float64, algorithm="auto", sizes=(I, H), **options):
    """Weft's layer and torch's, with the same weights."""
    ours, theirs, extra = LAYERS[cell]
    options = {**extra, **options}
    torchs_own = {name: value for name, value in options.items() if name != "return_cells"}
    theirs = theirs(*sizes, device=device, dtype=dtype, **torchs_own)
    ours = ours(*sizes, device=device, dtype=dtype, algorithm=algorithm, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def states(layer, batch, dtype=None):
    """A random initial state, (h0,) or (h0, c0), without B for batch None."""
    weight = layer.weight_ih_l0
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or layer.hidden_size, layer.hidden_size][: 2 if layer.mode == "LSTM" else 1]
    shape = (count,) if batch is None else (count, batch)
    return tuple(torch.randn(*shape, w, dtype=dtype or weight.dtype, device=weight.device) for w in widths)


def hx_of(layer, state):
    return None if state is None else state if layer.mode == "LSTM" else state[0]


def flat(result):
    """Every tensor of a layer's result."""
    output, final = result
    output = output.data if isinstance(output, rnn.PackedSequence) else output
    return [output, *(final if isinstance(final, tuple) else (final,))]


def assert_same(ours, theirs, dtype=torch.float64, same_dtypes=True):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.device == b.device
        assert a.dtype == b.dtype or not same_dtypes
        assert relative_error(a, b) <= BOUNDS[dtype]


def assert_layers_agree(ours, theirs, x, state=None, *, dtype=torch.float64, run=None):
    """Results and the gradients of input, state and every parameter. `x` is a tensor, `run(layer, x, hx)` calls."""
    run = run or (lambda layer, x, hx: layer(x, hx))
    results, grads, outgoing = [], [], None
    for layer in (ours, theirs):
        inputs = [t.detach().clone().requires_grad_() for t in (x, *(state or ()))]
        result = flat(run(layer, inputs[0], hx_of(layer, tuple(inputs[1:]) or None)))
        outgoing = outgoing or [torch.randn_like(r) for r in result]
        results.append(result)
        grads.append(torch.autograd.grad(result, [*inputs, *layer.parameters()], outgoing))
    assert_same(*results, dtype)
    assert_same(*grads, dtype)


# Results and gradients ------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "two directions": {"bidirectional": True},
    "two layers": {"num_layers": 2, "batch_first": True, "bias": False},
    "three layers, two directions": {"num_layers": 3, "bidirectional": True},
}


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


# The short way --------------------------------------------------------------------------------------------------------


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


# Packed by hand -------------------------------------------------------------------------------------------------------

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


# The rnn engine -------------------------------------------------------------------------------------------------------


class _Ops(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


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


# Projections, beside what the tests above say of all layers -----------------------------------------------------------


def _packed(x, lengths=(6, 4, 4, 1)):
    return rnn.pack_padded_sequence(x, lengths)


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
def test_projection_compiled_by_inductor(fresh_dynamo, device):
    """Packed and without a state, where a graph does not know how many sequences there are."""
    ours, theirs = layers("projected", device, algorithm="persistent", bidirectional=True)

    def call(layer, data, batch_sizes):
        return layer(rnn.PackedSequence(data, batch_sizes))

    compiled = torch.compile(functools.partial(call, ours), fullgraph=True)

    def run(layer, x, hx):
        packed = _packed(x)
        return (compiled if layer is ours else functools.partial(call, theirs))(packed.data, packed.batch_sizes)

    assert_layers_agree(ours, theirs, torch.randn(6, 4, I, dtype=torch.float64, device=device), run=run)


# Cells ----------------------------------------------------------------------------------------------------------------


def cells_of(theirs, x, state=None):
    """c at every step from torch's layer: the last of every beginning, in the other direction of every end."""
    steps = range(1, len(x) + 1)
    found = [torch.stack([theirs(x[:t], state)[1][1][-theirs.bidirectional - 1] for t in steps])]
    if theirs.bidirectional:
        found.append(torch.stack([theirs(x[t - 1 :], state)[1][1][-1] for t in steps]))
    return torch.cat(found, -1)


CELL_OPTIONS = {
    "plain": {},
    "two directions": {"bidirectional": True},
    "two layers": {"num_layers": 2, "bias": False},
    "projected": {"proj_size": 2, "bidirectional": True},
}


@devices
@pairs(algorithm=ALGORITHMS, options=CELL_OPTIONS, given_state=[False, True])
def test_cells(device, algorithm, options, given_state):
    ours, theirs = layers("lstm", device, algorithm=algorithm, return_cells=True, **CELL_OPTIONS[options])
    x = torch.randn(6, 5, I, dtype=torch.float64, device=device, requires_grad=True)
    state = states(ours, 5) if given_state else None
    output, final, cells = ours(x, state)
    expected_output, expected_final = theirs(x, state)
    expected = cells_of(theirs, x, state)
    assert_same([output, *final, cells], [expected_output, *expected_final, expected])
    width = ours.hidden_size
    assert torch.equal(cells[-1, :, :width], final[1][-ours.bidirectional - 1])
    arriving = torch.randn_like(cells)
    grads = [
        torch.autograd.grad(c, [x, *layer.parameters()], arriving, allow_unused=True, materialize_grads=True)
        for layer, c in ((ours, cells), (theirs, expected))
    ]
    assert_same(*grads)


@devices
@algorithms
@pytest.mark.parametrize("cell", ["lstm", "projected"])
def test_cells_are_laid_out_like_the_output(device, cell, algorithm):
    plain, _ = layers(cell, device, algorithm=algorithm, return_cells=True, bidirectional=True)
    first, _ = layers(
        cell, device, algorithm=algorithm, return_cells=True, bidirectional=True, batch_first=True, dropout=0.0
    )
    first.load_state_dict(plain.state_dict())
    x = torch.randn(6, 4, I, dtype=torch.float64, device=device)
    cells = plain(x)[2]
    assert_same([first(x.transpose(0, 1))[2].transpose(0, 1)], [cells])
    for layer in (plain, first):
        assert_same([layer(x[:, 1])[2]], [cells[:, 1]])  # unbatched
    lengths = [4, 1, 6, 4]
    packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    output, _, packed_cells = plain(packed)
    assert isinstance(packed_cells, rnn.PackedSequence)
    for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert torch.equal(getattr(packed_cells, field), getattr(output, field))
    padded, _ = rnn.pad_packed_sequence(packed_cells)
    for row, length in enumerate(lengths):
        assert_same([padded[:length, row]], [plain(x[:length, row])[2]])


@devices
@pytest.mark.parametrize("cell", ["lstm", "projected"])
def test_cells_everywhere(fresh_dynamo, device, cell):
    """Compiled, under autocast, mapped, differentiated by torch.func, twice differentiated, copied."""
    ours, theirs = layers(cell, device, return_cells=True, num_layers=2)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    cells = ours(x)[2]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same([compiled(x)[2]], [cells])
    assert_same([torch.func.vmap(lambda x: ours(x)[2])(x[None])[0]], [cells])
    tangent = torch.func.jvp(lambda x: ours(x)[2], (x,), (torch.zeros_like(x),))[0]
    assert_same([tangent], [cells])
    assert gradgradcheck(lambda x: ours(x)[2], (x[:3].clone().requires_grad_(),), fast_mode=True)
    twin = _pickled(ours)
    assert twin.return_cells and torch.equal(twin(x)[2], cells)
    single = copy.deepcopy(ours).float()
    with torch.autocast(device, torch.bfloat16):
        output, (_, c_n), narrow = single(x.float())
        expected, (_, expected_c_n) = theirs.float()(x.float())
    assert output.dtype == expected.dtype and narrow.dtype == c_n.dtype == expected_c_n.dtype
    assert relative_error(narrow, cells) <= BOUNDS[torch.bfloat16]


def test_return_cells_is_a_keyword_of_lstm():
    layer = weft.nn.LSTM(I, H, return_cells=True)
    assert repr(layer) == "LSTM(3, 4, return_cells=True)"
    layer.return_cells = False
    assert len(layer(torch.randn(5, 2, I))) == 2
    for kind in (weft.nn.RNN, weft.nn.GRU):
        with pytest.raises(TypeError):
            kind(I, H, return_cells=True)
    with pytest.raises(TypeError, match="return_cells must be a bool, got str"):
        weft.nn.LSTM(I, H, return_cells="yes")
    swapped = weft.accelerate(torch.nn.LSTM(I, H))
    assert len(swapped(torch.randn(5, 2, I))) == 2
    swapped.return_cells = True
    assert swapped(torch.randn(5, 2, I))[2].shape == (5, 2, H)


# Chaotic weights ------------------------------------------------------------------------------------------------------


@devices
@cells
@pytest.mark.parametrize(("steps", "scale"), [(20, 3.0), (20, 10.0), (1000, 3.0), (10_000, 10.0)])
def test_chaotic_weights(device, cell, steps, scale):
    """Recurrent weights so large that products of Jacobians overflow: every gradient is the sequential loop's.

    Two runs of a chaotic map part after some tens of steps, whatever the precision, so torch's layer is no measure. The
    loop gets the activations that the layer's own forward leaves; from there on everything is linear.
    """
    layer, _ = layers(cell, device, torch.float32, "scan", sizes=(2, 20))
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


# Dropout --------------------------------------------------------------------------------------------------------------


@devices
@cells_and_projected
@algorithms
def test_dropout_only_while_training(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm, num_layers=2, dropout=0.5)
    x = torch.randn(6, 5, I, dtype=torch.float64, device=device)
    assert_same(flat(ours.eval()(x)), flat(theirs.eval()(x)))
    runs = [ours.train()(x)[0] for _ in range(2)]
    assert not torch.equal(*runs)
    seeded = []
    for _ in range(2):
        torch.manual_seed(7)
        seeded.append(ours(x)[0])
    assert torch.equal(*seeded)


@devices
@cells_and_projected
@algorithms
def test_dropout_of_everything(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm, num_layers=2, dropout=1.0)
    x = torch.randn(6, 5, I, dtype=torch.float64, device=device)
    assert_layers_agree(ours, theirs, x)


@devices
@algorithms
def test_dropout_rate(device, algorithm):
    layer = weft.nn.RNN(1, 1, 2, "relu", False, dropout=0.3, device=device, algorithm=algorithm)
    for name, parameter in layer.named_parameters():
        torch.nn.init.constant_(parameter, float("ih" in name))
    output = layer(torch.ones(200, 100, 1, device=device))[0]
    kept = output != 0
    torch.testing.assert_close(output[kept], torch.full_like(output[kept], 1 / 0.7))
    # 20,000 draws: five standard deviations are 0.016.
    assert abs(kept.float().mean().item() - 0.7) < 0.016


# What surrounds a module ----------------------------------------------------------------------------------------------


@cells
def test_constructor_is_torchs(cell):
    ours, theirs, extra = CELLS[cell]
    for options in (*OPTIONS.values(), {"dropout": 0.2, "num_layers": 2}):
        torch.manual_seed(3)
        a = ours(I, H, **extra, **options)
        torch.manual_seed(3)
        b = theirs(I, H, **extra, **options)
        assert repr(a) == repr(b)
        assert list(a.state_dict()) == list(b.state_dict())
        for name, value in a.state_dict().items():
            assert torch.equal(value, b.state_dict()[name])
        ours_only = {"_algorithm", "return_cells"}
        assert vars(a).keys() - ours_only == vars(b).keys()
        for name in ("mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "proj_size"):
            assert getattr(a, name) == getattr(b, name)
        assert [[p.shape for p in w] for w in a.all_weights] == [[p.shape for p in w] for w in b.all_weights]
        public = {n for n in dir(b) if not n.startswith("_")}
        assert public <= {n for n in dir(a)}
    assert isinstance(a, torch.nn.RNNBase) and not isinstance(a, theirs)


@cells
def test_positional_arguments(cell):
    ours, theirs, _ = CELLS[cell]
    middle = ("relu",) if "rnn" in ours.__name__.lower() else ()
    arguments = (I, H, 2, *middle, False, True, 0.5, True)
    assert repr(ours(*arguments)) == repr(theirs(*arguments))


def test_algorithm_is_shown_and_may_be_set():
    layer = weft.nn.GRU(I, H, algorithm="scan")
    assert repr(layer) == "GRU(3, 4, algorithm='scan')"
    layer.algorithm = "torch"
    assert layer.algorithm == "torch" and weft.explain(layer, torch.randn(100, 2, I)).algorithm == "torch"
    with pytest.raises(ValueError, match=r"auto.*persistent.*scan.*newton.*torch.*reference"):
        layer.algorithm = "blelloch"
    assert layer.algorithm == "torch"


@cells
def test_unknown_and_reserved_algorithms(cell):
    ours, _, extra = CELLS[cell]
    with pytest.raises(ValueError, match=r"'cudnn'.*'auto', 'persistent', 'scan', 'newton', 'torch', 'reference'"):
        ours(I, H, algorithm="cudnn", **extra)
    with pytest.raises(NotImplementedError, match="newton"):
        ours(I, H, algorithm="newton", **extra)


@devices
@cells
def test_state_dict_goes_both_ways(device, cell):
    ours, theirs, extra = CELLS[cell]
    ours, theirs = (c(I, H, 2, bidirectional=True, device=device, **extra) for c in (ours, theirs))
    x = torch.randn(5, 2, I, device=device)
    assert not torch.equal(ours(x)[0], theirs(x)[0])
    theirs.load_state_dict(ours.state_dict())
    assert_same(flat(ours(x)), flat(theirs(x)), torch.float32)
    torch.nn.init.uniform_(theirs.weight_hh_l1)
    ours.load_state_dict(theirs.state_dict())
    assert_same(flat(ours(x)), flat(theirs(x)), torch.float32)


def _pickled(layer):
    return pickle.loads(pickle.dumps(layer))


def _saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@devices
@cells
@pytest.mark.parametrize("duplicate", [_pickled, _saved, copy.deepcopy])
def test_copies(device, cell, duplicate):
    ours, _ = layers(cell, device, algorithm="scan", num_layers=2)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    before = flat(ours(x))
    twin = duplicate(ours)
    assert twin.algorithm == "scan" and type(twin) is type(ours)
    assert all(torch.equal(a, b) for a, b in zip(before, flat(twin(x)), strict=True))
    with torch.no_grad():
        twin.weight_hh_l1.mul_(2)
    assert not torch.equal(twin(x)[0], before[0])
    assert torch.equal(ours(x)[0], before[0])


@devices
@cells_and_projected
@algorithms
def test_changed_weights_are_seen(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm, num_layers=2)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)

    def in_place(layer):
        with torch.no_grad():
            layer.weight_hh_l0.mul_(2)

    def data(layer):
        layer.weight_ih_l1.data = layer.weight_ih_l1.data * 2

    def replaced(layer):
        layer.bias_ih_l0 = torch.nn.Parameter(layer.bias_ih_l0.detach() + 1)

    def behind(layer):
        layer._parameters["weight_hh_l1"] = torch.nn.Parameter(layer.weight_hh_l1.detach() * 2)

    def loaded(layer):
        layer.load_state_dict({k: v * 0.5 for k, v in layer.state_dict().items()})

    def moved(layer):
        layer.float().double()

    def parametrized(layer):
        parametrize.register_parametrization(layer, "weight_hh_l0", _Doubled())

    def behind_parametrized(layer):
        with torch.no_grad():
            layer.parametrizations.weight_hh_l0.original.mul_(-1)

    for change in (in_place, data, replaced, behind, loaded, moved, parametrized, behind_parametrized):
        ours(x), theirs(x)
        change(ours), change(theirs)
        assert_layers_agree(ours, theirs, x)


class _Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@devices
@cells_and_projected
@algorithms
def test_weight_norm(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    with pytest.warns(FutureWarning):
        for layer in (ours, theirs):
            torch.nn.utils.weight_norm(layer, "weight_hh_l0")
    assert_layers_agree(ours, theirs, x)
    with torch.no_grad():
        ours.weight_hh_l0_g.mul_(3), theirs.weight_hh_l0_g.mul_(3)
    assert_layers_agree(ours, theirs, x)


@devices
@cells_and_projected
@algorithms
def test_functional_call(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    own = flat(ours(x))
    parameters = {k: torch.randn_like(v) for k, v in ours.named_parameters()}
    results = [flat(torch.func.functional_call(layer, parameters, (x,))) for layer in (ours, theirs)]
    assert_same(*results)
    assert all(torch.equal(a, b) for a, b in zip(own, flat(ours(x)), strict=True))


@devices
@cells_and_projected
@algorithms
def test_gradients_only_where_asked(device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    ours.weight_hh_l0.requires_grad_(False)
    ours(x)[0].sum().backward()
    assert ours.weight_hh_l0.grad is None and ours.weight_ih_l0.grad is not None
    with torch.no_grad():
        assert not any(t.requires_grad for t in flat(ours(x)))
    ours.requires_grad_(False)
    assert not any(t.requires_grad for t in flat(ours(x)))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(ours(x)[0].sum(), x)
    assert grad.shape == x.shape


@devices
@cells_and_projected
@algorithms
def test_repetition_is_bit_equal(device, cell, algorithm):
    ours, _ = layers(cell, device, torch.float32, algorithm, sizes=(5, 16), num_layers=2, bidirectional=True)
    x = torch.randn(64, 3, 5, device=device)
    runs = []
    for _ in range(2):
        result = flat(ours(x))
        runs.append([*result, *torch.autograd.grad(sum(r.sum() for r in result), list(ours.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@devices
@pairs(cell=LAYERS, algorithm=ALGORITHMS, reentrant=[False, True])
def test_checkpointing(device, cell, algorithm, reentrant):
    ours, theirs = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)

    def run(layer, x, hx):
        result = flat(checkpoint(layer, x, use_reentrant=reentrant) if layer is ours else layer(x))
        return result[0], tuple(result[1:])

    if not reentrant:
        assert_layers_agree(ours, theirs, x, run=run)
        return
    # Reentrant checkpointing forbids torch.autograd.grad.
    for layer in (ours, theirs):
        run(layer, x.requires_grad_(), None)[0].pow(2).sum().backward()
    grads = [[p.grad for p in layer.parameters()] for layer in (ours, theirs)]
    assert_same(*grads)


# Derivatives beyond the first backward --------------------------------------------------------------------------------


@devices
@cells_and_projected
@pytest.mark.parametrize("algorithm", ["persistent", "scan", "torch", "reference"])
def test_gradcheck(device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm, sizes=(2, 3), bidirectional=True)
    names = [n for n, _ in ours.named_parameters()]

    def call(x, *tensors):
        state, weights = tensors[: -len(names)], tensors[-len(names) :]
        hx = hx_of(ours, state)
        return tuple(flat(torch.func.functional_call(ours, dict(zip(names, weights, strict=True)), (x, hx))))

    x = torch.randn(3, 2, 2, dtype=torch.float64, device=device)
    inputs = [t.detach().clone().requires_grad_() for t in (x, *states(ours, 2), *ours.parameters())]
    nondet = 1e-7 if device == "cuda" else 0.0
    assert gradcheck(call, inputs, nondet_tol=nondet, fast_mode=True)
    assert gradgradcheck(call, inputs, nondet_tol=nondet, fast_mode=True)


@pytest.fixture
def any_derivative(monkeypatch):
    """torch's kernel runs on every device as in float64 on CUDA."""
    monkeypatch.setattr(torch_rnn, "needs_any_derivative", lambda case: case.trains)
    choice.forget_choices()
    yield
    choice.forget_choices()


def test_where_torch_needs_any_derivative():
    case = Case(cell="gru", device="cuda", dtype=torch.float64, hidden_size=16, batch=4, steps=100)
    assert torch_rnn.needs_any_derivative(case)
    for change in ({"device": "cpu"}, {"dtype": torch.float32}, {"trains": False}):
        assert not torch_rnn.needs_any_derivative(case._replace(**change))


TWICE = {
    "plain": {},
    "batch first": {"batch_first": True},
    "one layer, two directions": {"bidirectional": True, "bias": False},
    "two layers, two directions": {"num_layers": 2, "bidirectional": True},
    "projected": {"proj_size": 2, "num_layers": 2, "bidirectional": True},
}
TWICE_CASES = [(cell, options) for cell in CELLS for options in TWICE if options != "projected" or cell == "lstm"]


@devices
@pairs(case=TWICE_CASES, algorithm=["auto", "torch"], packed=[False, True], given_state=[False, True])
def test_two_derivatives(any_derivative, device, case, algorithm, packed, given_state):
    """Beside torch's layer on the CPU, where it is differentiable twice."""
    cell, options = case
    ours, theirs = layers(cell, "cpu", algorithm=algorithm, **TWICE[options])
    ours.to(device)
    x = torch.randn(4, 3, I, dtype=torch.float64)
    batch = 4 if ours.batch_first and not packed else 3
    tensors = [x, *(states(theirs, batch) if given_state else ())]
    outgoing = directions = None
    found = []
    for layer in (ours, theirs):
        to = layer.weight_ih_l0.device
        inputs = [t.detach().to(to).requires_grad_() for t in tensors]
        wanted = [*inputs, *layer.parameters()]
        each = rnn.pack_padded_sequence(inputs[0], [4, 2, 1]) if packed else inputs[0]
        result = flat(layer(each, hx_of(layer, tuple(inputs[1:]) or None)))
        if layer is ours and algorithm == "torch" and not ours.batch_first:
            assert result[0].grad_fn.name() == "_AnyDerivativeBackward"
        outgoing = outgoing or [torch.randn_like(r, device="cpu") for r in result]
        arriving = [g.to(to).requires_grad_() for g in outgoing]
        first = torch.autograd.grad(result, wanted, arriving, retain_graph=True)
        differentiable = torch.autograd.grad(result, wanted, arriving, create_graph=True)
        directions = directions or [torch.randn_like(g, device="cpu") for g in first]
        along = [v.to(to) for v in directions]
        second = torch.autograd.grad(differentiable, [*wanted, *arriving], along)
        found.append([t.cpu() for t in (*result, *first, *differentiable, *second)])
    assert_same(*found)


@devices
@cells
@algorithms
def test_every_derivative_has_the_mask_of_the_forward_pass(any_derivative, device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm, num_layers=3, dropout=0.5)
    x = torch.randn(3, 2, I, dtype=torch.float64, device=device, requires_grad=True)

    def call(*tensors):
        torch.manual_seed(7)
        return tuple(flat(ours(tensors[0])))

    nondet = 1e-7 if device == "cuda" else 0.0
    assert gradcheck(call, (x, *ours.parameters()), nondet_tol=nondet, fast_mode=True)
    assert gradgradcheck(call, (x, *ours.parameters()), nondet_tol=nondet, fast_mode=True)


@devices
@cells
@algorithms
def test_gradients_in_evaluation_mode(any_derivative, device, cell, algorithm):
    """Which cuDNN's own layers do not have."""
    ours, theirs = layers(cell, "cpu", algorithm=algorithm, num_layers=2, dropout=0.5)
    x = torch.randn(6, 5, I, dtype=torch.float64)
    results = [flat(layer.eval()(x.to(layer.weight_ih_l0.device))) for layer in (ours.to(device), theirs)]
    grads = [
        torch.autograd.grad(sum(r.pow(2).sum() for r in result), list(layer.parameters()))
        for layer, result in zip((ours, theirs), results, strict=True)
    ]
    assert_same([g.cpu() for g in grads[0]], grads[1])


@devices
def test_operands_that_depend_on_each_other(any_derivative, device):
    """The state is a function of the input, and h0 and c0 are one tensor."""
    ours, theirs = layers("lstm", "cpu", algorithm="torch", num_layers=2)
    x = torch.randn(4, 3, I, dtype=torch.float64)
    found = []
    for layer in (ours.to(device), theirs):
        inner = x.to(layer.weight_ih_l0.device).requires_grad_()
        h = inner.sum((0, 2)).view(1, 3, 1).expand(2, 3, H)
        loss = sum(r.pow(2).sum() for r in flat(layer(inner, (h, h))))
        (first,) = torch.autograd.grad(loss, inner, create_graph=True)
        second = torch.autograd.grad(first.pow(2).sum(), [inner, *layer.parameters()])
        found.append([t.cpu() for t in (first, *second)])
    assert_same(*found)


@devices
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_twice(any_derivative, device, create_graph):
    ours, _ = layers("gru", device, algorithm="torch")
    x = torch.randn(4, 3, I, dtype=torch.float64, device=device, requires_grad=True)
    output = ours(x)[0].sum()
    grads = [
        torch.autograd.grad(output, x, retain_graph=keep, create_graph=create_graph)[0] for keep in (True, True, False)
    ]
    assert_same(grads, [grads[0]] * 3)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(output, x)


@devices
@pytest.mark.parametrize("create_graph", [False, True])
def test_operands_changed_in_place(any_derivative, device, create_graph):
    ours, _ = layers("lstm", device, algorithm="torch")
    x = torch.randn(4, 3, I, dtype=torch.float64, device=device)
    state = states(ours, 3)
    for changed in (x, state[0], ours.weight_hh_l0, ours.weight_ih_l0):
        output = ours(x, state)[0]
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output.sum(), ours.weight_ih_l0, create_graph=create_graph)


@devices
def test_nothing_is_kept_for_a_backward_pass_that_will_not_come(any_derivative, device, monkeypatch):
    kept = []

    def call(*args, original=torch_rnn.call, **kwargs):
        result = original(*args, **kwargs)
        kept.append([weakref.ref(t) for t in result])
        return result

    monkeypatch.setattr(torch_rnn, "call", call)
    ours, _ = layers("lstm", device, algorithm="torch")
    x = torch.randn(4, 3, I, dtype=torch.float64, device=device)

    def alive():
        return [ref() is not None for ref in kept.pop()]

    gc.disable()  # a cycle would show
    try:
        output = ours(x)[0]
        output.sum().backward(retain_graph=True)
        assert all(ref() is not None for ref in kept[0])
        output.sum().backward()
        assert not any(alive())
        assert output.grad_fn is not None
        output = ours(x)[0]
        del output
        assert not any(alive())
    finally:
        gc.enable()


def _loss(layer, x, parameters, hx=None):
    return sum(r.pow(2).sum() for r in flat(torch.func.functional_call(layer, parameters, (x, hx))))


@devices
@cells_and_projected
@algorithms
def test_func_grad(device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm, num_layers=2)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    parameters = {k: v.detach() for k, v in ours.named_parameters()}
    found = torch.func.grad(functools.partial(_loss, ours, x))(parameters)
    expected = torch.autograd.grad(_loss(ours, x, dict(ours.named_parameters())), list(ours.parameters()))
    assert_same(list(found.values()), list(expected))


@devices
@pairs(cell=LAYERS, algorithm=ALGORITHMS, packed=[False, True])
def test_func_vmap(device, cell, algorithm, packed):
    ours, _ = layers(cell, device, algorithm=algorithm, bidirectional=True)
    xs = torch.randn(4, 5, 2, I, dtype=torch.float64, device=device)

    def call(x):
        if packed:
            data = x.reshape(10, I)
            x = rnn.PackedSequence(data, torch.tensor([2] * 5))
        return tuple(flat(ours(x)))

    assert_same(torch.func.vmap(call)(xs), [torch.stack(r) for r in zip(*map(call, xs), strict=True)])


@devices
@cells
@algorithms
def test_func_per_sample_gradients(device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm)
    xs = torch.randn(3, 5, I, dtype=torch.float64, device=device)
    parameters = {k: v.detach() for k, v in ours.named_parameters()}
    gradient = torch.func.grad(lambda p, x: _loss(ours, x, p))
    found = torch.func.vmap(gradient, (None, 0))(parameters, xs)
    expected = [gradient(parameters, x) for x in xs]
    assert_same(list(found.values()), [torch.stack([e[k] for e in expected]) for k in found])


@devices
@cells_and_projected
@algorithms
def test_forward_mode(device, cell, algorithm):
    """The tangent by jvp and by dual tensors; against <g, J v> = <J^T g, v>."""
    ours, _ = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device, requires_grad=True)
    v = torch.randn_like(x)
    output = ours(x)[0]
    g = torch.randn_like(output)
    (pulled,) = torch.autograd.grad(output, x, g)
    value, tangent = torch.func.jvp(lambda x: ours(x)[0], (x,), (v,))
    assert_same([value, (g * tangent).sum()], [output, (pulled * v).sum()])
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(ours(forward_ad.make_dual(x, v))[0])
    assert_same([dual.primal, dual.tangent], [value, tangent])


@devices
@cells
def test_hessian_vector_product(device, cell):
    ours, _ = layers(cell, device, algorithm="scan")
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device, requires_grad=True)
    v = torch.randn_like(x)
    (first,) = torch.autograd.grad(ours(x)[0].pow(3).sum(), x, create_graph=True)
    (backward,) = torch.autograd.grad(first, x, v)
    forward = torch.func.jvp(torch.func.grad(lambda x: ours(x)[0].pow(3).sum()), (x.detach(),), (v,))[1]
    assert_same([backward], [forward])


# Compilation ----------------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize(
    ("cell", "algorithm", "options"),
    [
        ("relu", "torch", "plain"),
        ("gru", "auto", "plain"),
        ("gru", "scan", "two layers"),
        ("gru", "torch", "two layers"),
        ("gru", "reference", "plain"),
        ("lstm", "scan", "two layers"),
        ("tanh", "persistent", "three layers, two directions"),
        ("gru", "persistent", "two layers"),
        ("lstm", "persistent", "two layers"),
        ("projected", "persistent", "two layers"),
        ("projected", "persistent", "three layers, two directions"),
        ("lstm", "torch", "two layers"),
    ],
)
def test_compile(fresh_dynamo, device, cell, algorithm, options):
    ours, theirs = layers(cell, device, algorithm=algorithm, **OPTIONS[options])
    dynamic = algorithm != "reference"  # which is unrolled over time
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for steps, batch in ((6, 5), (8, 7)) if dynamic else ((4, 5),):
        x = torch.randn(
            *((batch, steps) if ours.batch_first else (steps, batch)), I, dtype=torch.float64, device=device
        )
        run = lambda layer, x, hx: compiled(x, hx) if layer is ours else layer(x, hx)  # noqa: E731
        assert_layers_agree(ours, theirs, x, run=run)
        assert_layers_agree(ours, theirs, x, states(ours, batch), run=run)


@devices
@pytest.mark.parametrize(
    ("cell", "algorithm"), [*(("gru", a) for a in ("persistent", "scan", "torch")), ("projected", "persistent")]
)
def test_compile_does_not_specialise_sizes(fresh_dynamo, device, cell, algorithm):
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    ours, _ = layers(cell, device, algorithm=algorithm)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    compiled(torch.randn(6, 5, I, dtype=torch.float64, device=device))
    graphs = counter.frame_count
    for steps, batch in ((9, 8), (40, 11), (100, 2)):
        compiled(torch.randn(steps, batch, I, dtype=torch.float64, device=device))
    assert counter.frame_count == graphs


# On the CPU a C++ compiler runs for each: both are one opaque op there, so one of them stands for the other.
@pytest.mark.parametrize(
    ("device", "algorithm"),
    [("cpu", "scan"), *(pytest.param("cuda", a, marks=pytest.mark.cuda) for a in ("persistent", "scan", "torch"))],
)
def test_compile_inductor(fresh_dynamo, device, algorithm):
    """One case through code generation; and a long sequence does not unroll."""
    ours, theirs = layers("gru", device, algorithm=algorithm, num_layers=2)
    compiled = torch.compile(ours, fullgraph=True)
    x = torch.randn(500, 2, I, dtype=torch.float64, device=device)
    assert_layers_agree(ours, theirs, x, run=lambda layer, x, hx: compiled(x, hx) if layer is ours else layer(x, hx))


@devices
@pytest.mark.parametrize("algorithm", ["persistent", "scan", "torch"])
def test_compile_dropout(fresh_dynamo, device, algorithm):
    ours, theirs = layers("gru", device, algorithm=algorithm, num_layers=2, dropout=0.5)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 5, I, dtype=torch.float64, device=device)
    assert not torch.equal(compiled(x)[0], compiled(x)[0])
    ours.eval(), theirs.eval()
    assert_same(flat(compiled(x)), flat(theirs(x)))
    rate = weft.nn.RNN(1, 1, 2, "relu", False, dropout=0.3, device=device, algorithm=algorithm)
    for name, parameter in rate.named_parameters():
        torch.nn.init.constant_(parameter, float("ih" in name))
    output = torch.compile(rate, fullgraph=True, backend="aot_eager")(torch.ones(5, 4000, 1, device=device))[0]
    assert abs((output != 0).float().mean().item() - 0.7) < 0.016


@devices
@pytest.mark.parametrize("algorithm", ["persistent", "auto"])
@pytest.mark.parametrize("cell", ["gru", "lstm", "projected"])
def test_compile_packed(fresh_dynamo, device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm, num_layers=2, bidirectional=True)
    x = torch.randn(6, 4, I, dtype=torch.float64, device=device)

    def call(layer, data, batch_sizes, hx):
        return layer(rnn.PackedSequence(data, batch_sizes), hx)

    compiled = torch.compile(functools.partial(call, ours), fullgraph=True, backend="aot_eager")

    def run(layer, x, hx):
        packed = rnn.pack_padded_sequence(x, [6, 4, 4, 1])
        arguments = packed.data, packed.batch_sizes, hx
        return compiled(*arguments) if layer is ours else call(layer, *arguments)

    assert_layers_agree(ours, theirs, x, run=run)
    assert_layers_agree(ours, theirs, x, states(ours, 4), run=run)


@devices
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_compile_functional_call(fresh_dynamo, device, cell):
    ours, _ = layers(cell, device, algorithm="scan")
    x = torch.randn(4, 2, I, dtype=torch.float64, device=device)
    parameters = {k: torch.randn_like(v) for k, v in ours.named_parameters()}
    gradient = torch.func.grad(functools.partial(_loss, ours, x))
    found = torch.compile(gradient, fullgraph=True, backend="aot_eager")(parameters)
    assert_same(list(found.values()), list(gradient(parameters).values()))
    assert all(w is p for w, p in zip(ours._flat_weights, ours.parameters(), strict=True))


@devices
@pytest.mark.parametrize("algorithm", ["persistent", "scan", "torch"])
@pytest.mark.parametrize(("cell", "strict"), [(cell, False) for cell in LAYERS] + [("gru", True)])
def test_export(fresh_dynamo, device, cell, algorithm, strict):
    ours, _ = layers(cell, device, algorithm=algorithm, num_layers=2, bidirectional=True)
    ours.eval()
    example = torch.randn(6, 5, I, dtype=torch.float64, device=device)
    sizes = {0: torch.export.Dim("T"), 1: torch.export.Dim("B")}
    program = torch.export.export(ours, (example,), dynamic_shapes=(sizes,), strict=strict)
    x = torch.randn(70, 2, I, dtype=torch.float64, device=device)
    assert_same(flat(program.module()(x)), flat(ours(x)))


@devices
@algorithms
def test_symbolic_tracing(device, algorithm):
    """Sizes that are symbols outside of torch.compile."""
    ours, _ = layers("gru", device, torch.float32, algorithm)
    x = torch.randn(6, 5, I, device=device)
    with torch.no_grad():
        traced = make_fx(lambda x: ours(x)[0], tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
        assert relative_error(traced(x), ours(x)[0]) <= BOUNDS[torch.float32]


@devices
@cells
def test_torch_op_check(device, cell):
    ours, _ = layers(cell, device, num_layers=2, bidirectional=True)
    x = torch.randn(4, 2, I, dtype=torch.float64, device=device, requires_grad=True)
    state = [s.requires_grad_() for s in states(ours, 2)]
    weights = list(ours.parameters())
    arguments = x, state, weights, None, ours.mode.lower(), True, 2, True, None, torch.float64, torch.float64
    torch.library.opcheck(torch.ops.weft.torch_rnn.default, arguments)
    output = torch.ops.weft.torch_rnn(*arguments)[0]
    (first,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        first.sum().backward()


@devices
@pytest.mark.parametrize(("cell", "options"), [*((cell, {}) for cell in CELLS), ("lstm", {"proj_size": 2})])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_torch_op_by_the_reference(monkeypatch, device, cell, options, packed, autocast):
    """What a compiled graph does with more steps than cuDNN takes is what it does with fewer."""
    dtype = torch.float64 if autocast is None else torch.float32
    ours, _ = layers(cell, device, dtype, num_layers=2, bidirectional=True, **options)
    x = torch.randn(6, 3, I, dtype=dtype, device=device)
    if packed:
        x, batch_sizes, _, _ = rnn.pack_padded_sequence(x, [6, 4, 1])
    x.requires_grad_()
    state = [s.requires_grad_() for s in states(ours, 3)]
    weights = list(ours.parameters())
    with torch.autocast(device, autocast, enabled=autocast is not None):
        dtypes = prepare(ours, rnn.PackedSequence(x, batch_sizes) if packed else x, tuple(state)).dtypes
    rest = batch_sizes if packed else None, ours.mode.lower(), True, 2, True, autocast, *dtypes
    found, asked = [], set()
    for too_long in (True, False):

        def answer(*size, too_long=too_long):
            asked.add(size)
            return "too long" if too_long else None

        monkeypatch.setattr(torch_rnn, "why_not_cudnn", answer)
        result = torch.ops.weft.torch_rnn(x, state, weights, *rest)
        grads = torch.autograd.grad(sum(r.pow(2).sum() for r in result), [x, *state, *weights])
        found.append([*result, *grads])
    assert asked == {(device, ours.mode.lower(), 2 * ours.hidden_size, 6, 11 if packed else 18)}
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        # A ReLU near zero may be on in one and off in the other.
        assert relative_error(a, b) <= (2 if cell == "relu" else 1) * BOUNDS[autocast or dtype]


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("cell", "dtype", "algorithm"),
    [("tanh", torch.float64, "auto"), ("tanh", torch.float64, "compiled"), ("gru", torch.float32, "torch")],
)
def test_more_steps_than_cudnn_takes(fresh_dynamo, cell, dtype, algorithm):
    steps = torch_limits.CUDNN_MAX_STEPS + 1
    expected, _ = layers(cell, "cpu", torch.float64, "persistent")
    ours = copy.deepcopy(expected).to("cuda", dtype)
    ours.algorithm = "torch" if algorithm == "compiled" else algorithm
    assert weft.explain(ours, torch.empty(steps, 1, I, dtype=dtype, device="cuda")).algorithm == "persistent"
    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if algorithm == "compiled" else ours
    x = torch.randn(steps, 1, I, dtype=torch.float64)
    outgoing = torch.randn(steps, 1, H, dtype=torch.float64)
    found = []
    for call, layer in ((run, ours), (expected, expected)):
        like = layer.weight_ih_l0
        inner = x.to(like).requires_grad_()
        output, final = call(inner)
        grads = torch.autograd.grad([output, final], [inner, *layer.parameters()], [outgoing.to(like), 2 * final])
        found.append([output, final, *grads])
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) <= 10 * BOUNDS[dtype]  # sums over all steps


# Autocast -------------------------------------------------------------------------------------------------------------

AUTOCAST_CASES = [(cell, kind) for cell in CELLS for kind in ("padded", "packed")]
AUTOCAST_CASES += [("lstm", "projected"), ("lstm", "packed projected")]


def autocast_layers(cell, device, algorithm="auto", **options):
    """Weft's layer and, with the same weights, one to compare with under autocast: torch's where that runs, else the
    reference."""
    ours, theirs = layers(cell, device, torch.float32, algorithm, **options)
    if (device, cell, theirs.proj_size) == ("cpu", "lstm", 0) and torch_limits.why_not_onednn(torch.bfloat16):
        theirs = copy.deepcopy(ours)
        theirs.algorithm = "reference"
    return ours, theirs


@devices
@pairs(
    case=AUTOCAST_CASES,
    algorithm=ALGORITHMS,
    x_dtype=[torch.float32, torch.bfloat16],
    state_dtype=[None, torch.float32, torch.bfloat16],
)
def test_autocast(device, case, algorithm, x_dtype, state_dtype):
    cell, kind = case
    options = {"proj_size": 2} if "projected" in kind else {}
    ours, theirs = autocast_layers(cell, device, algorithm, num_layers=2, **options)
    x = torch.randn(6, 3, I, dtype=x_dtype, device=device)
    state = None if state_dtype is None else states(ours, 3, state_dtype)
    if "packed" in kind:
        x = rnn.pack_padded_sequence(x, [6, 4, 1])
    results = []
    for layer in (ours, theirs):
        with torch.autocast(device, torch.bfloat16):
            results.append(flat(layer(x, hx_of(layer, state))))
        results[-1][0].sum().backward()
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, b) <= BOUNDS[torch.bfloat16]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype == torch.float32
        # A ReLU near zero may be on in one and off in the other.
        assert cell == "relu" or relative_error(a.grad, b.grad) <= 2 * BOUNDS[torch.bfloat16]


@devices
@cells_and_projected
@algorithms
def test_autocast_leaves_fp64(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm)
    x = torch.randn(6, 3, I, dtype=torch.float64, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert_layers_agree(ours, theirs, x)


@devices
@cells_and_projected
@pytest.mark.parametrize("algorithm", ["persistent", "scan", "torch"])
def test_autocast_compiled(fresh_dynamo, device, cell, algorithm):
    ours, theirs = autocast_layers(cell, device, algorithm)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 3, I, device=device)
    with torch.autocast(device, torch.bfloat16):
        found, expected = flat(compiled(x)), flat(theirs(x))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, b) <= BOUNDS[torch.bfloat16]
    found[0].sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


def test_autocast_on_a_processor_without_half_precision():
    tests = "(test_autocast and lstm-padded and cpu) or what_torch_cannot"
    with_environment({"ONEDNN_MAX_CPU_ISA": "AVX2"}, __file__, tests)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_torch_cannot_run_under_autocast_is_not_chosen(monkeypatch, dtype):
    """Whatever this processor can: the answer of the probe is what decides."""
    layer, x = weft.nn.LSTM(I, 600), torch.randn(6, 3, I)
    for answer in (torch_limits.why_not_onednn(dtype), "oneDNN cannot", None):
        monkeypatch.setattr(choice, "why_not_onednn", lambda _, answer=answer: answer)
        for algorithm in ("auto", "torch"):
            layer.algorithm = algorithm
            with torch.autocast("cpu", dtype):
                explanation = weft.explain(layer, x)
            assert explanation.algorithm == ("torch" if answer is None else "persistent")
            assert answer is None or answer in explanation.reason
        packed = rnn.pack_padded_sequence(x, [6, 4, 1])
        with torch.autocast("cpu", dtype):
            assert weft.explain(layer, packed).algorithm == "torch"
        assert weft.explain(layer.to(dtype), x.to(dtype)).algorithm == "torch"
        layer.float()


def test_the_probe_says_what_torchs_layer_does():
    layer, x = torch.nn.LSTM(I, H), torch.randn(6, 3, I)
    with torch.autocast("cpu", torch.bfloat16):
        if torch_limits.why_not_onednn(torch.bfloat16) is None:
            layer(x)
        else:
            with pytest.raises(RuntimeError):
                layer(x)


# Bad input ------------------------------------------------------------------------------------------------------------

BAD_CONSTRUCTIONS = {
    "negative input_size": ((-1, 4), {}),
    "negative hidden_size": ((3, -4), {}),
    "no layers": ((3, 4), {"num_layers": 0}),
    "negative layers": ((3, 4), {"num_layers": -1}),
    "hidden_size is not an int": ((3, 4.0), {}),
    "input_size is not an int": (("3", 4), {}),
    "bias is not a bool": ((3, 4), {"bias": 1}),
    "batch_first is not a bool": ((3, 4), {"batch_first": "yes"}),
    "dropout above 1": ((3, 4), {"dropout": 1.5}),
    "negative dropout": ((3, 4), {"dropout": -0.5}),
    "dropout is a bool": ((3, 4), {"dropout": True}),
    "unknown keyword": ((3, 4), {"hidden": 4}),
    "integer dtype": ((3, 4), {"dtype": torch.int64}),
    "nothing": ((), {}),
    "negative projection": ((3, 4), {"proj_size": -1}),
    "projection too wide": ((3, 4), {"proj_size": 4}),
    "unknown nonlinearity": ((3, 4), {"nonlinearity": "sigmoid"}),
}


@cells
@pytest.mark.parametrize("bad", BAD_CONSTRUCTIONS)
def test_bad_construction(cell, bad):
    ours, theirs, extra = CELLS[cell]
    arguments, options = BAD_CONSTRUCTIONS[bad]
    with pytest.raises(Exception) as expected:
        theirs(*arguments, **{**extra, **options})
    with pytest.raises(type(expected.value)) as found:
        ours(*arguments, **{**extra, **options})
    assert type(found.value) is type(expected.value)


def _bad_calls(layer):
    """Name -> arguments that torch's layer (3 inputs, H 4, fp32, CPU, one layer) refuses."""
    x, lstm = torch.randn(5, 2, 3), layer.mode == "LSTM"

    def hx(*shape, **kwargs):
        h = torch.zeros(*shape, **kwargs)
        return (h, h) if lstm else h

    def pack(x):
        return rnn.pack_padded_sequence(x, [5, 3])

    calls = {
        "1D input": (torch.randn(3),),
        "4D input": (torch.randn(1, 5, 2, 3),),
        "wrong features": (torch.randn(5, 2, 4),),
        "wrong features, unbatched": (torch.randn(5, 4),),
        "no steps": (torch.randn(0, 2, 3),),
        "fp64 input": (x.double(),),
        "fp16 input": (x.half(),),
        "integer input": (x.long(),),
        "complex input": (x.to(torch.complex64),),
        "not a tensor": ([[1.0]],),
        "None": (None,),
        "2D hx for a batch": (x, hx(2, 4)),
        "3D hx without a batch": (x[:, 0], hx(1, 1, 4)),
        "wrong B": (x, hx(1, 3, 4)),
        "wrong layers": (x, hx(2, 2, 4)),
        "wrong H": (x, hx(1, 2, 5)),
        "fp64 hx": (x, hx(1, 2, 4, dtype=torch.float64)),
        "integer hx": (x, hx(1, 2, 4, dtype=torch.int64)),
        "hx of the other kind": (x, torch.zeros(1, 2, 4) if lstm else (torch.zeros(1, 2, 4),) * 2),
        "packed, wrong features": (pack(torch.randn(5, 2, 4)),),
        "packed, wrong rank": (pack(torch.randn(5, 2, 3, 1)),),
        "packed, wrong B": (pack(x), hx(1, 3, 4)),
        "packed, fp64": (pack(x.double()),),
    }
    if lstm:
        h = torch.zeros(1, 2, 4)
        calls |= {
            "one state": (x, (h,)),
            "three states": (x, (h, h, h)),
            "wrong c0": (x, (h, torch.zeros(1, 2, 5))),
            "c0 of another rank": (x, (h, torch.zeros(2, 4))),
        }
    return calls


BAD_CALLS = [(cell, bad) for cell, (kind, _, _) in CELLS.items() for bad in _bad_calls(kind(I, H))]
BAD_CALLS = [(algorithm, *call) for algorithm, call in zip(itertools.cycle(ALGORITHMS), BAD_CALLS, strict=False)]


@pytest.mark.parametrize(("algorithm", "cell", "bad"), BAD_CALLS)
def test_bad_call(cell, algorithm, bad):
    ours, theirs = layers(cell, "cpu", torch.float32, algorithm)
    calls = _bad_calls(ours)
    with pytest.raises(Exception) as expected:
        theirs(*calls[bad])
    with pytest.raises(type(expected.value)) as found:
        ours(*calls[bad])
    assert type(found.value) is type(expected.value)
    x = torch.randn(5, 2, I)
    assert_layers_agree(ours, theirs, x, dtype=torch.float32)


@pytest.mark.cuda
@cells
@algorithms
def test_bad_devices(cell, algorithm):
    ours, theirs = layers(cell, "cuda", algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device="cuda")
    for arguments in ((x.cpu(),), (x, hx_of(ours, tuple(s.cpu() for s in states(ours, 2))))):
        for layer in (theirs, ours):
            with pytest.raises(RuntimeError):
                layer(*arguments)
    assert_layers_agree(ours, theirs, x)


@pytest.mark.parametrize("algorithm", ["persistent", "scan", "torch", "reference"])
def test_messages_name_the_layer(algorithm):
    layer = weft.nn.GRU(3, 4, algorithm=algorithm)
    x = torch.randn(5, 2, 3)
    with pytest.raises(ValueError, match=r"GRU: .*2D or 3D.*\(T, B, 3\).*got 4D"):
        layer(x[None])
    with pytest.raises(RuntimeError, match=r"GRU: .*Expected 3, got 4"):
        layer(torch.randn(5, 2, 4))
    with pytest.raises(RuntimeError, match=r"GRU: Expected hidden size \(1, 2, 4\).*got \[1, 3, 4\]"):
        layer(x, torch.zeros(1, 3, 4))
    with pytest.raises(RuntimeError, match=r"GRU: hidden must have the input's dtype.*float32.*float64"):
        layer(x, torch.zeros(1, 2, 4, dtype=torch.float64))


def test_signature_is_documented():
    for layer in (weft.nn.RNN, weft.nn.GRU, weft.nn.LSTM):
        doc = inspect.getdoc(layer)
        for argument in ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "algorithm"):
            assert f"{argument}:" in doc
        assert "Raises" in inspect.getdoc(layer.forward)


# CUDA graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@cells_and_projected
@algorithms
def test_cuda_graph(cell, algorithm):
    ours, theirs = layers(cell, "cuda", torch.float32, algorithm, num_layers=2)
    x = torch.randn(40, 3, I, device="cuda", requires_grad=True)

    def step():
        result = flat(ours(x))
        return [*result, *torch.autograd.grad(sum(r.pow(2).sum() for r in result), [x, *ours.parameters()])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
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
