"""weft.explain of recurrent layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import weft
from torch.nn.utils import rnn
from weft._base import costs as gpu_costs
from weft._rnn import explain, runs
from weft._rnn.calls import prepare
from weft._rnn.select.choice import AUTO_PERSISTENT

from tests.rnn.choices import CASE, ON_CUDA

pytestmark = pytest.mark.usefixtures("nothing_measured")


def by_name(explanation):
    return {c.name: c for c in explanation.candidates}


def test_explanation():
    layer = weft.nn.GRU(3, 16)
    answer = weft.explain(layer, torch.randn(100, 4, 3))
    assert answer.algorithm == "persistent" and answer.asked == "auto"
    candidates = by_name(answer)
    assert list(candidates) == ["persistent", "scan", "newton", "torch", "reference"]
    assert all(c.eligible for c in answer.candidates)
    assert "auto" in candidates["scan"].reason
    assert all(c.reason for c in answer.candidates)
    text = str(answer)
    assert "GRU(3, 16) on T=100 B=4 float32 input on cpu" in text and "runs as 'persistent'" in text
    for c in answer.candidates:
        (line,) = (line for line in text.splitlines() if line.strip().startswith(c.name + " "))
        assert c.reason in line and ("taken" in line) == (c.name == "persistent")
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.algorithm = "torch"


def test_expected_times_are_told_from_measured_ones():
    from weft import Candidate, Explanation

    candidates = (
        Candidate("persistent", True, "a", 12345.6),
        Candidate("scan", True, "b", 0.98765, measured=True),
        Candidate("torch", True, "c"),
    )
    _, _, persistent, scan, other = str(Explanation("", "", "auto", "scan", "", candidates)).splitlines()
    assert "~12300 us  a" in persistent and " 0.988 us  b" in scan and "us" not in other
    assert persistent.index(" a") == scan.index(" b") == other.index(" c")


def test_it_tells_which_gpu_the_times_are_extrapolated_from(monkeypatch, plan):
    candidates = explain._candidates("auto", ON_CUDA)
    assert explain._extrapolated_from(ON_CUDA, candidates) is None  # of the GPU that was measured
    scaled = gpu_costs.reference()._replace(extrapolated=True)
    monkeypatch.setattr(gpu_costs, "of", lambda index: scaled)
    name = explain._extrapolated_from(ON_CUDA, candidates)
    assert name == gpu_costs.reference().measured_on and explain._extrapolated_from(CASE, candidates) is None
    measured = tuple(dataclasses.replace(c, measured=True) for c in candidates)
    assert explain._extrapolated_from(ON_CUDA, measured) is None
    answer = weft.Explanation("", "", "auto", "persistent", "", candidates, name)
    last = str(answer).splitlines()[-1]
    assert "extrapolated" in last and name in last and "weft.tune(layer, x)" in last
    assert "extrapolated" not in str(dataclasses.replace(answer, extrapolated_from=None))


def test_it_tells_why_auto_leaves_the_persistent_kernels():
    layer = weft.nn.LSTM(3, max(AUTO_PERSISTENT["cpu", "lstm"].buckets) + 1)
    answer = weft.explain(layer, torch.randn(5, 2, 3))
    persistent = by_name(answer)["persistent"]
    assert answer.algorithm == "torch" and persistent.eligible and "hidden_size" in persistent.reason
    assert persistent.reason in answer.reason


def test_the_choice_sees_chains_and_gradients():
    x, h = torch.randn(5, 2, 3), torch.zeros(4, 2, 6)
    layer = weft.nn.GRU(3, 6, num_layers=2, bidirectional=True)
    case = prepare(layer, x, (h,)).case
    assert (case.layers, case.directions, case.trains, case.input_size) == (2, 2, True, 3)
    assert case.index is case.capability is None and not case.tf32
    layer.requires_grad_(False)
    assert not prepare(layer, x, (h,)).case.trains
    assert prepare(layer, x.clone().requires_grad_(), None).case.trains
    h.requires_grad_()
    assert prepare(layer, x, (h,)).case.trains
    with torch.no_grad():
        assert not prepare(layer, x, (h,)).case.trains


def test_it_tells_what_does_not_fit():
    x = torch.randn(5, 2, 3)
    packed = weft.explain(weft.nn.GRU(3, 4, algorithm="scan"), rnn.pack_padded_sequence(x, [5, 2]))
    assert packed.algorithm == "torch" and not by_name(packed)["scan"].eligible
    assert "T=5 B=2 packed float32 input" in str(packed)
    projected = weft.explain(weft.nn.LSTM(3, 4, proj_size=2, algorithm="scan"), x)
    assert projected.algorithm == "torch" and "proj_size" in by_name(projected)["scan"].reason
    assert by_name(projected)["persistent"].eligible
    forced = weft.explain(weft.nn.GRU(3, 4, algorithm="reference"), x)
    assert forced.algorithm == "reference" and by_name(forced)["torch"].eligible


def test_it_tells_how_a_projection_runs():
    layer = weft.nn.LSTM(3, 4, proj_size=2)
    assert "steps" in by_name(weft.explain(layer, torch.randn(5, 2, 3)))["persistent"].reason
    answer = weft.explain(layer, torch.randn(100, 2, 3))
    assert answer.algorithm == "persistent"
    assert "projection multiplied into the recurrent weights" in by_name(answer)["persistent"].reason


def test_it_sees_the_context():
    layer, answers = weft.nn.GRU(3, 4), []

    def call(x):
        answers.append(weft.explain(layer, x))
        return x.sum()

    torch.func.grad(call)(torch.randn(50, 2, 3))
    assert answers[0].algorithm == "reference" and not by_name(answers[0])["torch"].eligible
    with torch.autograd.forward_ad.dual_level():
        assert weft.explain(layer, torch.randn(50, 2, 3)).algorithm == "reference"
    assert weft.explain(layer, torch.randn(50, 2, 3)).algorithm == "persistent"


@pytest.mark.parametrize("layer", [weft.nn.RNN(3, 4), weft.nn.GRU(3, 4), weft.nn.LSTM(3, 4)])
def test_arguments_are_checked_as_in_forward(layer):
    x = torch.randn(5, 2, 3)
    h = torch.zeros(1, 2, 4)
    hx = (h, h) if isinstance(layer, weft.nn.LSTM) else h
    assert weft.explain(layer, x, hx).algorithm == weft.explain(layer, x[:, 0]).algorithm
    for arguments in ((torch.randn(5, 2, 4),), (x[None],), (x.double(),), (x[:, :1], hx)):
        with pytest.raises((ValueError, RuntimeError)) as expected:
            layer(*arguments)
        with pytest.raises(type(expected.value)):
            weft.explain(layer, *arguments)


def test_what_nobody_can_explain():
    for other, kind in ((None, "NoneType"), ("GRU", "str"), (weft.nn.GRU, "the class GRU")):
        with pytest.raises(TypeError, match=rf"explain: what to explain .* must be a layer, a model.*; got {kind}"):
            weft.explain(other, torch.randn(5, 2, 3))
    with pytest.raises(TypeError, match="what to explain is missing"):
        weft.explain()
    for layer in (weft.nn.GRU(3, 4), torch.nn.Linear(3, 4)):
        with pytest.raises(TypeError, match=f"the input of {type(layer).__name__} is missing"):
            weft.explain(layer)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_torchs_layers_are_explained_as_what_would_run(kind):
    theirs, x = getattr(torch.nn, kind)(3, 16), torch.randn(100, 4, 3)
    answer = weft.explain(theirs, x)
    assert answer.algorithm == weft.explain(getattr(weft.nn, kind)(3, 16), x).algorithm
    assert "weft.accelerate the model first" in str(answer)
    assert type(theirs) is getattr(torch.nn, kind) and theirs(x)[0].shape == (100, 4, 16)
    step = weft.explain(getattr(torch.nn, f"{kind}Cell")(3, 16), torch.randn(4, 3))
    assert step.algorithm == "fused" and "first" in step.note


@pytest.mark.parametrize("function", [weft.explain, weft.tune])
def test_what_is_no_tensor_is_named(function):
    name, x = function.__name__, torch.randn(5, 2, 3)
    for layer, hx in ((weft.nn.GRU(3, 4), "(h0, c0)"), (weft.nn.LSTM(3, 4), torch.zeros(1, 2, 4))):
        with pytest.raises(TypeError, match=f"{name}: x must be a Tensor or a PackedSequence, got str"):
            function(layer, "text")
        with pytest.raises(TypeError, match=f"{name}: hx must be .* or None, got {type(hx).__name__}"):
            function(layer, x, hx)
    with pytest.raises(IndexError, match="hx must be"):
        function(weft.nn.LSTM(3, 4), x, (torch.zeros(1, 2, 4),))


def test_nothing_runs():
    layer = weft.nn.GRU(3, 4)
    layer.register_forward_hook(lambda *_: pytest.fail("the layer ran"))
    weft.explain(layer, torch.randn(5, 2, 3))


def test_the_algorithm_that_is_told_is_the_one_that_runs(monkeypatch):
    ran = []
    originals = {name: getattr(runs, name) for name in ("_run_weft", "_run_torch", "_run_reference")}
    for name in originals:

        def run(layer, call, *backward, name=name):
            ran.append(*backward or (name.removeprefix("_run_"),))
            return originals[name](layer, call, *backward)

        monkeypatch.setattr(runs, name, run)
    x = torch.randn(5, 2, 3)
    inputs = (x, x[:, 0], rnn.pack_padded_sequence(x, [5, 2]))
    for asked in ("auto", "persistent", "scan", "newton", "torch", "reference"):
        for hidden in (4, 200):
            layer = weft.nn.GRU(3, hidden, num_layers=2, algorithm=asked)
            for each in inputs:
                told = weft.explain(layer, each).algorithm
                layer(each)
                assert ran.pop() == told and not ran
