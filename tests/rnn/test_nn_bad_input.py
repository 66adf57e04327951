"""Bad constructions and bad calls end as torch.nn's do."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
import weft
from torch.nn.utils import rnn

from tests.rnn.layers import ALGORITHMS, CELLS, H, I, algorithms, assert_layers_agree, cells, hx_of, layers, states

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


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


def test_constructors_name_the_class_and_what_was_meant():
    with pytest.raises(TypeError, match=r"GRU: unexpected argument 'num_layer'; did you mean 'num_layers'\?"):
        weft.nn.GRU(3, 4, num_layer=2)
    with pytest.raises(TypeError, match=r"LSTM: unexpected argument 'proj'; did you mean 'proj_size'\?"):
        weft.nn.LSTM(3, 4, proj=2)
    with pytest.raises(TypeError, match=r"RNN: unexpected argument 'colour'; it takes input_size, "):
        weft.nn.RNN(3, 4, colour="red")
    with pytest.raises(TypeError, match=r"GRU: hidden_size is missing"):
        weft.nn.GRU(3)


def test_calls_say_where_a_tensor_belongs():
    x, h = torch.randn(5, 2, 3), torch.zeros(1, 2, 4)
    gru, lstm = weft.nn.GRU(3, 4), weft.nn.LSTM(3, 4)
    with pytest.raises(AttributeError, match=r"GRU: input must be a Tensor or a PackedSequence, got tuple"):
        gru((x, h))
    with pytest.raises(AttributeError, match=r"GRU: hx must be a Tensor or None, got tuple"):
        gru(x, (h,))
    with pytest.raises(IndexError, match=r"LSTM: hx must be a tuple \(h0, c0\) of Tensors or None, got a Tensor"):
        lstm(x, h)
    with pytest.raises(TypeError, match=r"LSTM: hx must be a tuple \(h0, c0\) of Tensors or None, got a Tensor"):
        lstm(rnn.pack_sequence([x[:, 0], x[:3, 1]]), h)
    with pytest.raises(TypeError, match=r"LSTM: hx must be a tuple \(h0, c0\) of Tensors or None, got int"):
        lstm(x, 3)
    with pytest.raises(AttributeError, match=r"LSTM: c0 must be a Tensor, got NoneType"):
        lstm(x, (h, None))
    nested = torch.nested.nested_tensor([torch.randn(5, 3), torch.randn(2, 3)])
    with pytest.raises(TypeError, match=r"GRU: input is a NestedTensor.*pack_sequence"):
        gru(nested)
    gru(rnn.pack_sequence(nested.unbind(), enforce_sorted=False))
