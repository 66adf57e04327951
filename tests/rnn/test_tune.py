"""weft.tune: what is measured, what is remembered, and who looks at it."""

from __future__ import annotations

import json

import pytest
import torch
import weft
from torch.nn.utils import rnn
from weft._rnn import runs
from weft._rnn.calls import choose_at_once
from weft._rnn.select import choice, tuned
from weft._rnn.select.case import Case

from tests.common import DEVICES, tuning_cache
from tests.fresh import python

devices = pytest.mark.parametrize("device", DEVICES)


cache = tuning_cache(weft._rnn.select.tune)  # weft.tune is the function


@pytest.fixture(autouse=True)
def _no_choice_remembered(cache):
    choice.forget_choices()
    yield
    choice.forget_choices()


def _forget() -> None:
    """As if the process had just started."""
    tuned.MEASURED.entries = None
    choice.forget_choices()


@pytest.fixture
def clock(monkeypatch):
    """Measured times as the test sets them; what was measured."""
    times = {"persistent": 3.0, "scan": 2.0, "newton": 4.0, "torch": 1.0}
    measured = []

    def stopwatch(layer, name, call):
        measured.append(name)
        return lambda: times[name]

    monkeypatch.setattr(weft._rnn.select.tune, "_stopwatch", stopwatch)
    return times, measured


def by_name(explanation):
    return {c.name: c for c in explanation.candidates}


def written(cache):
    return json.loads((cache / weft.__version__ / "tune.json").read_text())


@pytest.fixture
def without_tf32():
    """Algorithms that round alike."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@devices
@pytest.mark.parametrize("kind", [weft.nn.RNN, weft.nn.GRU, weft.nn.LSTM])
@pytest.mark.parametrize("packed", [False, True])
def test_it_measures_and_auto_follows(device, kind, packed, cache, without_tf32):
    layer = kind(3, 8, num_layers=2, device=device)
    x = torch.randn(20, 4, 3, device=device)
    x = rnn.pack_padded_sequence(x, [20, 9, 9, 2]) if packed else x
    before = layer(x)
    answer = weft.tune(layer, x)
    candidates = by_name(answer)
    names = {c.name for c in answer.candidates if c.eligible} - {"reference"}
    assert names == {c.name for c in answer.candidates if c.expected_us is not None}
    assert names >= ({"torch"} if packed else {"torch", "scan"})
    assert all(candidates[name].expected_us > 0 for name in names)
    assert answer.algorithm == min(names, key=lambda name: candidates[name].expected_us)
    assert all(candidates[name].measured for name in names)
    assert "weft.tune measured" in answer.reason and "~" not in str(answer)
    (entry,) = written(cache).values()
    assert entry["algorithm"] == answer.algorithm and set(entry["microseconds"]) == names
    torch.testing.assert_close(layer(x)[1], before[1], rtol=1e-4, atol=1e-5)


def test_auto_takes_the_fastest(clock, monkeypatch):
    times, measured = clock
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 4, 3)
    assert weft.explain(layer, x).algorithm == "persistent"
    for best in ("torch", "persistent", "scan", "newton"):
        times[best] = min(times.values()) / 2
        answer = weft.tune(layer, x)
        assert answer.algorithm == weft.explain(layer, x).algorithm == best
        assert sorted(measured) == ["newton", "persistent", "scan", "torch"]
        measured.clear()
        ran = []
        with monkeypatch.context() as patch:
            for way, original in (("run", runs.run), ("run_at_once", runs.run_at_once)):

                def run(layer, name, *rest, ran=ran, original=original):
                    ran.append(name)
                    return original(layer, name, *rest)

                patch.setattr(runs, way, run)
            layer(x)
        assert ran == [best]
    # An algorithm asked for by name is not overruled.
    layer.algorithm = "torch"
    assert weft.tune(layer, x).algorithm == "torch"


def test_it_holds_for_inputs_of_the_same_kind(clock):
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 5, 3)
    assert weft.tune(layer, x).algorithm == "torch"

    def takes(layer, x):
        return weft.explain(layer, x).algorithm

    other = weft.nn.GRU(3, 8)
    for steps, batch in ((17, 5), (32, 8)):
        assert takes(other, torch.randn(steps, batch, 3)) == "torch"
    for steps, batch in ((16, 5), (33, 5), (20, 4), (20, 9)):
        assert takes(other, torch.randn(steps, batch, 3)) == "persistent"
    for kind in (
        weft.nn.GRU(3, 9),
        weft.nn.GRU(3, 8, num_layers=2),
        weft.nn.GRU(3, 8, bidirectional=True),
        weft.nn.RNN(3, 8),
        weft.nn.GRU(3, 8).requires_grad_(False),
    ):
        assert takes(kind, x) == "persistent"
    assert takes(weft.nn.GRU(4, 8), torch.randn(20, 5, 4)) == "persistent"
    assert takes(weft.nn.GRU(3, 8, dtype=torch.float64), x.double()) == "persistent"
    with torch.no_grad():
        assert takes(layer, x) == "persistent"


def test_projections_of_several_sizes(clock):
    x = torch.randn(20, 5, 3)
    weft.tune(weft.nn.LSTM(3, 8, proj_size=2), x)
    answers = {size: weft.explain(weft.nn.LSTM(3, 8, proj_size=size), x) for size in (2, 3)}
    assert {size: by_name(a)["torch"].expected_us for size, a in answers.items()} == {2: 1.0, 3: None}


@pytest.mark.cuda
def test_what_holds_in_tf32_does_not_hold_without_it(clock):
    layer, x = weft.nn.GRU(3, 200, device="cuda"), torch.randn(20, 5, 3, device="cuda")
    h = torch.zeros(1, 5, 200, device="cuda")
    taken = {}
    for allowed in (True, False, True):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            if not taken:
                weft.tune(layer, x)
            answer = weft.explain(layer, x)
            assert by_name(answer)["torch"].measured == allowed
            taken[allowed] = answer.algorithm, choose_at_once(layer, x, (h,))
    assert taken == {True: ("torch", "torch"), False: ("persistent", "persistent")}


def test_the_key_of_what_is_remembered():
    case = Case(cell="gru", device="cpu", dtype=torch.float32, hidden_size=8, batch=5, steps=20)
    assert tuned.key(case) == tuned.key(case._replace(steps=32, batch=8))
    for change in ({"tf32": True}, {"dtype": torch.float64}, {"packed": True}, {"keeps_cells": True}, {"mapped": True}):
        assert tuned.key(case) != tuned.key(case._replace(**change))


def test_what_cannot_run_is_not_measured_and_not_taken(clock, cache, monkeypatch):
    _, measured = clock
    x = torch.randn(20, 5, 3)
    weft.tune(weft.nn.LSTM(3, 8, return_cells=True), x)
    assert measured == ["persistent"]
    measured.clear()
    weft.tune(weft.nn.LSTM(3, 8, proj_size=2), x)
    assert sorted(measured) == ["persistent", "torch"]
    # A build without what was measured with takes something else.
    layer = weft.nn.GRU(3, 8)
    times, _ = clock
    times["persistent"] = 0.5
    assert weft.tune(layer, x).algorithm == "persistent"
    monkeypatch.setitem(choice._OBSTACLES, "persistent", lambda case: "it is not built")
    _forget()
    assert weft.explain(layer, x).algorithm == "torch"


def test_what_raises_is_left_out(clock, monkeypatch):
    """As cuDNN does for some lengths."""
    _, measured = clock
    layer, x, module = weft.nn.GRU(3, 8), torch.randn(20, 5, 3), weft._rnn.select.tune
    stopwatch = module._stopwatch

    def refusing(layer, name, call):
        if name in refused:
            raise RuntimeError(f"{name} refuses")
        return stopwatch(layer, name, call)

    monkeypatch.setattr(module, "_stopwatch", refusing)
    refused = {"torch"}
    assert weft.tune(layer, x).algorithm == "scan" and sorted(measured) == ["newton", "persistent", "scan"]
    refused |= {"newton", "persistent", "scan"}
    with pytest.raises(RuntimeError, match="refuses"):
        weft.tune(layer, x)


def test_the_fastest_run_counts(monkeypatch, cache):
    """On a machine that does something else at times: a candidate's runs come one by one, between those of others."""
    order, slow, times = [], {3, 7}, {"torch": 1.0, "persistent": 2.0, "scan": 3.0, "newton": 4.0}

    def stopwatch(layer, name, call):
        def run():
            order.append(name)
            late = order.count(name) in slow and name == "torch"
            return times[name] * (1000 if late else 1)

        return run

    monkeypatch.setattr(weft._rnn.select.tune, "_stopwatch", stopwatch)
    assert weft.tune(weft.nn.GRU(3, 8), torch.randn(20, 5, 3)).algorithm == "torch"
    (entry,) = written(cache).values()
    assert entry["microseconds"] == times
    measured = order[-8:]
    assert len(set(measured[:4])) == 4 and measured[:4] == measured[4:]


def test_a_busy_machine_stores_nothing(monkeypatch, cache):
    monkeypatch.setattr(weft._rnn.select.tune, "_SPREAD", 0.5)
    elapsed = iter(range(1, 1000))
    monkeypatch.setattr(weft._rnn.select.tune, "_stopwatch", lambda *_: lambda: float(next(elapsed)))
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 5, 3)
    before = weft.explain(layer, x)
    with pytest.warns(UserWarning, match="stored nothing.*machine is busy"):
        assert weft.tune(layer, x) == before
    assert not (cache / weft.__version__ / "tune.json").exists()


def test_absurd_times_are_not_believed(clock):
    times, _ = clock
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 5, 3)
    for name in times:
        times[name] += 92_000.0  # microseconds, of 20 small steps
    assert "weft.tune" not in weft.tune(layer, x).reason
    for name in times:
        times[name] -= 91_800.0
    assert "weft.tune" in weft.tune(layer, x).reason


def test_other_processes_read_it(clock, cache):
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 5, 3)
    assert weft.tune(layer, x).algorithm == "torch"
    code = (
        f"import torch, weft; torch.set_num_threads({torch.get_num_threads()}); "
        "print(weft.explain(weft.nn.GRU(3, 8), torch.randn(20, 5, 3)).algorithm)"
    )
    assert python(code).stdout.split() == ["torch"]
    assert [f.name for f in (cache / weft.__version__).iterdir()] == ["tune.json"]


def test_the_file_is_read_once(clock, cache, monkeypatch):
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 5, 3)
    weft.explain(layer, x)
    monkeypatch.setattr(tuned.MEASURED, "read", lambda: pytest.fail("the file was read again"))
    weft.explain(layer, x), layer(x)


def test_entries_of_others_are_kept(clock, cache):
    x = torch.randn(20, 5, 3)
    weft.tune(weft.nn.GRU(3, 8), x)
    first = written(cache)
    tuned.MEASURED.entries = {}  # another process, which read before the first one wrote
    weft.tune(weft.nn.GRU(3, 9), x)
    assert len(written(cache)) == 2 and first.items() <= written(cache).items()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        '{"a": 1}',
        '{"a": {"algorithm": "torch"}}',
        '{"a": {"algorithm": [], "microseconds": {"torch": 1.0}}}',
        '{"a": {"algorithm": "torch", "microseconds": {"scan": 1.0}}}',
        '{"a": {"algorithm": "torch", "microseconds": {"torch": NaN}}}',
        '{"a": {"algorithm": "torch", "microseconds": {"torch": "1"}}}',
        '{"a": {"algorithm": "fast", "microseconds": {"fast": 1.0}}}',
        "\xff\xfe",
    ],
)
def test_a_corrupt_file_is_ignored(clock, cache, text):
    tuned.MEASURED.path().parent.mkdir(parents=True, exist_ok=True)
    tuned.MEASURED.path().write_text(text, encoding="latin-1")
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 5, 3)
    assert weft.explain(layer, x).algorithm == "persistent"
    assert weft.tune(layer, x).algorithm == "torch"
    assert len(written(cache)) == 1


def test_a_wrong_entry_for_this_very_key_is_ignored(clock, cache):
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 5, 3)
    weft.tune(layer, x)
    (key,) = written(cache)
    tuned.MEASURED.path().parent.mkdir(parents=True, exist_ok=True)
    tuned.MEASURED.path().write_text(json.dumps({key: {"algorithm": "torch", "microseconds": []}}))
    _forget()
    assert weft.explain(layer, x).algorithm == "persistent"


def test_a_directory_that_cannot_be_written_is_a_warning(clock, cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(cache / "file"))
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 5, 3)
    with pytest.warns(UserWarning, match="in this process alone"):
        answer = weft.tune(layer, x)
    assert answer.algorithm == weft.explain(layer, x).algorithm == "torch"


def test_the_default_place(monkeypatch, cache):
    monkeypatch.delenv("WEFT_CACHE_DIR")
    monkeypatch.setenv("HOME", str(cache))
    assert tuned.MEASURED.path() == cache / ".cache" / "weft" / weft.__version__ / "tune.json"


@devices
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_left_behind(device, training):
    """Gradients, generators, hooks and the graph of the input stay as they are."""
    layer = weft.nn.LSTM(3, 8, num_layers=2, dropout=0.5, device=device).train(training)
    leaf = torch.randn(20, 4, 3, device=device, requires_grad=True)
    leaf.register_hook(lambda grad: pytest.fail("a gradient left the layer"))
    layer.register_forward_hook(lambda *_: pytest.fail("the hook ran"))
    state = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    h = torch.zeros(2, 4, 8, device=device)
    weft.tune(layer, leaf * 2, (h, h))
    assert all(p.grad is None for p in layer.parameters()) and leaf.grad is None and h.grad is None
    assert torch.equal(torch.get_rng_state(), state[0])
    assert device == "cpu" or torch.equal(torch.cuda.get_rng_state(), state[1])
    assert layer.training is training


@devices
def test_inference_is_measured_without_a_backward_pass(device, monkeypatch):
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: pytest.fail("a backward pass ran"))
    layer, x = weft.nn.GRU(3, 8, device=device), torch.randn(20, 4, 3, device=device)
    with torch.no_grad():
        weft.tune(layer, x)
    weft.tune(layer.requires_grad_(False), x)


def test_under_autocast(cache):
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        weft.tune(weft.nn.RNN(3, 8), x)
        weft.tune(layer, x)
    kinds = sorted(key.split("dtype=")[1].split()[0] for key in written(cache))
    assert kinds == ["bfloat16", "float32"]  # torch.nn.GRU returns the wider dtype there


def test_refusals(cache):
    layer, x = weft.nn.GRU(3, 8), torch.randn(20, 4, 3)
    with pytest.raises(
        TypeError, match=r"layer must be a weft.nn.RNN, GRU, LSTM or SLSTM, got torch.nn.GRU; weft.accelerate"
    ):
        weft.tune(torch.nn.GRU(3, 8), x)
    with pytest.raises(RuntimeError, match=r"Expected 3, got 4"):
        weft.tune(layer, torch.randn(20, 4, 4))
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(lambda x: weft.tune(layer, x))(x[None])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        weft.tune(layer, x)
    assert not (cache / weft.__version__ / "tune.json").exists()


@pytest.mark.cuda
def test_not_while_a_graph_is_captured():
    layer, x = weft.nn.GRU(3, 8, device="cuda"), torch.randn(20, 4, 3, device="cuda")
    layer(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="captured"):
        weft.tune(layer, x)
