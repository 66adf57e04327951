"""The layers beside torch's with the same weights, and what a comparison of them needs."""

from __future__ import annotations

import pickle

import pytest
import torch
import weft
from torch.nn.utils import rnn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.common import DEVICES, relative_error

CELLS = {
    "tanh": (weft.nn.RNN, torch.nn.RNN, {}),
    "relu": (weft.nn.RNN, torch.nn.RNN, {"nonlinearity": "relu"}),
    "gru": (weft.nn.GRU, torch.nn.GRU, {}),
    "lstm": (weft.nn.LSTM, torch.nn.LSTM, {}),
}
PROJECTED = {"projected": (weft.nn.LSTM, torch.nn.LSTM, {"proj_size": 2})}
LAYERS = CELLS | PROJECTED
ALGORITHMS = ["auto", "persistent", "scan", "newton", "torch", "reference"]
I, H = 3, 4
# Relative error of the norm. fp64: rounding of a few hundred operations. fp32: the same at 1e9 times its epsilon.
BOUNDS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}

devices = pytest.mark.parametrize("device", DEVICES)
cells = pytest.mark.parametrize("cell", CELLS)
cells_and_projected = pytest.mark.parametrize("cell", LAYERS)
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


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


OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "two directions": {"bidirectional": True},
    "two layers": {"num_layers": 2, "batch_first": True, "bias": False},
    "three layers, two directions": {"num_layers": 3, "bidirectional": True},
}


class _Ops(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _packed(x, lengths=(6, 4, 4, 1)):
    return rnn.pack_padded_sequence(x, lengths)


def _pickled(layer):
    return pickle.loads(pickle.dumps(layer))


def _loss(layer, x, parameters, hx=None):
    return sum(r.pow(2).sum() for r in flat(torch.func.functional_call(layer, parameters, (x, hx))))
