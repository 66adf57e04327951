"""The layers under autocast."""

from __future__ import annotations

import copy

import pytest
import torch
import weft
from torch.nn.utils import rnn
from weft._rnn import calls
from weft._rnn.dropin import torch_limits
from weft._rnn.select import choice

from tests.common import pairs, relative_error, with_environment
from tests.rnn.layers import (
    ALGORITHMS,
    BOUNDS,
    CELLS,
    H,
    I,
    algorithms,
    assert_layers_agree,
    cells_and_projected,
    devices,
    flat,
    hx_of,
    layers,
    states,
)

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


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


@pytest.mark.parametrize("algorithm", ["persistent", "reference"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[6], [6, 6, 6], [6, 6, 1]], ids=str)
def test_autocast_of_packed_sequences(lengths, x_dtype, algorithm):
    """Some versions of torch answer in another dtype where all have one length."""
    ours, theirs = layers("lstm", "cpu", torch.float32, algorithm)
    x = rnn.pack_padded_sequence(torch.randn(6, len(lengths), I, dtype=x_dtype), lengths)
    for state in (None, states(ours, len(lengths), torch.float32), states(ours, len(lengths), torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = (flat(layer(x, hx_of(layer, state))) for layer in (ours, theirs))
        assert [t.dtype for t in found] == [t.dtype for t in wanted]


@pytest.mark.parametrize("algorithm", ["persistent", "reference"])
def test_autocast_has_the_dtypes_of_the_torch_at_hand(monkeypatch, algorithm):
    """Another version of torch, or another processor, answers in another dtype."""
    layer, x = weft.nn.GRU(I, H, algorithm=algorithm), torch.randn(6, 3, I)
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(calls, "autocast_dtypes", lambda *_, dtype=dtype: (dtype, dtype))
        with torch.autocast("cpu", torch.bfloat16):
            assert {r.dtype for r in flat(layer(x))} == {dtype}


@pytest.mark.parametrize("case", AUTOCAST_CASES)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_torchs_dtypes_without_torchs_kernel(monkeypatch, case, x_dtype, state_dtype):
    """Where torch's kernel cannot be asked, by the rule that torch 2.11 follows."""
    if torch.__version__ >= "2.12" or torch_limits.why_not_onednn(torch.bfloat16):
        pytest.skip("the rule is that of torch 2.11 on a processor with bfloat16")
    cell, kind = case
    layer, _ = layers(cell, "cpu", torch.float32, **({"proj_size": 2} if "projected" in kind else {}))
    x = torch.randn(6, 3, I, dtype=x_dtype)
    x = rnn.pack_padded_sequence(x, [6, 4, 1]) if "packed" in kind else x
    with torch.autocast("cpu", torch.bfloat16):
        asked = calls.prepare(layer, x, states(layer, 3, state_dtype)).dtypes
        monkeypatch.setattr(calls, "autocast_dtypes", lambda *_: None)
        assert calls.prepare(layer, x, states(layer, 3, state_dtype)).dtypes == asked


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


@pytest.mark.slow
def test_autocast_on_a_processor_without_half_precision():
    tests = "(test_autocast and lstm-padded and cpu) or what_torch_cannot"
    with_environment({"ONEDNN_MAX_CPU_ISA": "AVX2"}, tests, __file__)


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
