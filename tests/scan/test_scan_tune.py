"""weft.tune of pointwise scans and their layers: what is measured, what is remembered, and who looks at it."""

from __future__ import annotations

import json

import pytest
import torch
import weft
from weft._scan import tune as tuning
from weft._scan import tuned
from weft.scan import newton_report, pointwise_scan

from tests.common import DEVICES, relative_error, tuning_cache
from tests.scan.pointwise_steps import STEPS, arguments

devices = pytest.mark.parametrize("device", DEVICES)


cache = tuning_cache(tuning)


@pytest.fixture
def clock(monkeypatch):
    """Measured times as the test sets them; what was measured."""
    times, measured = {"walk": 1.0, "newton": 2.0}, []

    def stopwatch(name, kind, run, tensors):
        measured.append(name)
        return lambda: times[name]

    monkeypatch.setattr(tuning, "_stopwatch", stopwatch)
    return times, measured


def written(cache):
    return json.loads((cache / weft.__version__ / "tune_scan.json").read_text())


def ran(call) -> str:
    """The algorithm that a call takes."""
    with newton_report() as report:
        call()
    return "newton" if report.runs else "walk"


@devices
@pytest.mark.parametrize("cls", [weft.nn.ParaGRU, weft.nn.ParaLSTM])
@pytest.mark.parametrize("fastest", ["walk", "newton"])
def test_layers_follow(cls, fastest, device, clock, cache):
    times, measured = clock
    times[fastest] = 0.5
    layer = cls(6, 8, device=device)
    x = torch.randn(700, 2, 6, device=device)
    found = weft.tune(layer, x)
    assert sorted(measured) == ["newton", "walk"]
    assert found == weft.explain(layer, x)
    assert (found.algorithm, found.reason.startswith(f"weft.tune measured {fastest} 0.5 us")) == (fastest, True)
    assert ran(lambda: layer(x)) == ran(lambda: layer(x[:600])) == fastest  # of the same interval
    (entry,) = written(cache).values()
    assert entry == {"algorithm": fastest, "microseconds": times}
    # Neither of other sizes, nor without gradients.
    assert "weft.tune" not in weft.explain(layer, x[:300]).reason
    with torch.no_grad():
        assert "weft.tune" not in weft.explain(layer, x).reason
    for asked in ("walk", "newton"):
        layer.algorithm = asked
        assert ran(lambda: layer(x)) == asked


def test_a_key_is_made_once(cache, monkeypatch):
    """For a kind of call and a machine: layers ask at every call."""
    kind = tuned.Kind("a program", 700, 12, torch.device("cpu"), torch.float32, True)
    key = kind.key()
    made = []
    monkeypatch.setattr(tuned, "key_of", lambda machine, parts: made.append(machine) or f"{machine} {parts['T']}")
    assert kind._replace().key() == key and not made
    monkeypatch.setattr(tuned, "machine_name", lambda device: "another")
    assert kind.key() == kind._replace().key() == "another 1024" and made == ["another"]
    assert kind._replace(steps=3).key() == "another 4"
    tuned._key.cache_clear()


@devices
def test_a_step_of_ones_own_follows(device, clock, cache):
    _, measured = clock
    case = STEPS["gru"]
    lists = arguments(case, 700, (3,), torch.float32, device)
    assert weft.explain(pointwise_scan, case.step, *lists).algorithm == "newton"
    assert weft.tune(pointwise_scan, case.step, *lists).algorithm == "walk"
    assert ran(lambda: pointwise_scan(case.step, *lists)) == "walk"
    other = STEPS["slow_gru"]
    assert weft.explain(pointwise_scan, other.step, *lists).algorithm == "newton"
    measured.clear()
    found = weft.tune(pointwise_scan, lambda h, x, p: torch.floor(h) + x[0], *lists)
    assert (found.algorithm, measured) == ("reference", [])


@devices
def test_it_measures(device, cache):
    """What is remembered are times, and nothing of the operands has changed."""
    layer = weft.nn.ParaLSTM(6, 8, device=device, batch_first=True)
    x = torch.randn(2, 300, 6, device=device, requires_grad=True)
    state = tuple(torch.randn(2, 8, device=device) for _ in range(2))
    before = layer(x, state)[0]
    weft.tune(layer, x, state)
    (entry,) = written(cache).values()
    assert set(entry["microseconds"]) == {"walk", "newton"} and min(entry["microseconds"].values()) > 0
    assert entry["algorithm"] == min(entry["microseconds"], key=entry["microseconds"].__getitem__)
    assert x.grad is None and all(p.grad is None for p in layer.parameters()) and layer.algorithm == "auto"
    assert relative_error(layer(x, state)[0], before) < 1e-5
    with torch.autocast(device, torch.bfloat16):
        found = weft.tune(layer, x.detach(), state)
        assert "weft.tune" in found.reason and len(written(cache)) == 2
    case = STEPS["lstm"]
    lists = arguments(case, 300, (3,), torch.float64, device)
    lists[1][0].requires_grad_()
    weft.tune(pointwise_scan, case.step, *lists, reverse=True)
    assert lists[1][0].grad is None and len(written(cache)) == 3


def test_layers_with_one_algorithm_are_not_measured(clock, cache):
    _, measured = clock
    x = torch.randn(20, 2, 6)
    for layer in (
        weft.nn.MinGRU(6, 8),
        weft.nn.MinLSTM(6, 8),
        weft.nn.RGLRU(6, 8),
        weft.nn.LRU(6, 8),
        weft.nn.S5(6, 8),
    ):
        found = weft.tune(layer, x)
        assert found.algorithm == "diagonal scan" and found == weft.explain(layer, x)
    assert weft.tune(weft.nn.ParaGRU(6, 8, algorithm="reference"), x).algorithm == "reference"
    assert weft.tune(weft.nn.ParaGRU(6, 8), x[:0]).algorithm == "walk"
    assert not measured and not cache.joinpath(weft.__version__).exists()


def test_a_busy_machine_stores_nothing(monkeypatch, cache):
    monkeypatch.setattr(tuning, "_SPREAD", 0.5)
    elapsed = iter(range(1, 1000))
    monkeypatch.setattr(tuning, "_stopwatch", lambda *_: lambda: float(next(elapsed)))
    layer, x = weft.nn.ParaGRU(6, 8), torch.randn(700, 2, 6)
    before = weft.explain(layer, x)
    with pytest.warns(UserWarning, match="stored nothing.*machine is busy") as found:
        assert weft.tune(layer, x) == before
    assert found[0].filename == __file__
    assert not tuned.MEASURED.path().exists()


def test_a_file_that_cannot_be_written_is_a_warning(clock, monkeypatch, tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(place))
    layer, x = weft.nn.ParaGRU(6, 8), torch.randn(700, 2, 6)
    with pytest.warns(UserWarning, match="kept in this process alone") as found:
        weft.tune(layer, x)
    assert found[0].filename == __file__
    assert weft.explain(layer, x).algorithm == "walk"


def test_what_is_refused():
    layer, x = weft.nn.ParaGRU(6, 8), torch.randn(20, 2, 6)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(lambda x: (weft.tune(layer, x), x)[1])(x[None])
    with pytest.raises(ValueError, match="ParaGRU: input must be"):
        weft.tune(layer, torch.randn(20, 2, 5))
    with pytest.raises(TypeError, match="ParaGRU: input must be a Tensor"):
        weft.tune(layer, None)
    with pytest.raises(TypeError, match="step must be callable"):
        weft.tune(pointwise_scan, "tanh", x[0], x)
