"""weft.tune of a vertex function: what is measured, what is remembered, and who looks at it."""

from __future__ import annotations

import json

import pytest
import torch
import weft
from weft._vertex import tune as tuning
from weft._vertex import tuned
from weft._vertex.calls import prepare
from weft._vertex.runtime import persistent
from weft.vertex import models

from tests.common import tuning_cache
from tests.fresh import python
from tests.vertex.cells import BINARY, GRAPHS, cell, devices, rows

cache = tuning_cache(tuning)


@pytest.fixture
def clock(monkeypatch):
    """Measured times as the test sets them; what was measured."""
    times = {"persistent": 0.5, "batched": 1.0, "reference": 2.0}
    measured = []

    def stopwatch(call, inputs):
        measured.append(call.executor)
        return lambda: times[call.executor]

    monkeypatch.setattr(tuning, "_stopwatch", stopwatch)
    return times, measured


def written(cache):
    return json.loads((cache / weft.__version__ / "tune_vertex.json").read_text())


@devices
def test_it_measures_and_changes_nothing_else(device, cache):
    m, graphs, x = cell().to(device), GRAPHS.to(device), rows().to(device).requires_grad_()
    m.W.weight.grad = torch.ones_like(m.W.weight)
    before = m(graphs, x), m.W.weight.grad, m.program, torch.get_rng_state()
    found = weft.tune(m, graphs, x)
    assert isinstance(found, weft.vertex.Explanation) and "weft.tune measured" in found.reason
    # What a CUDA graph of the call takes has an entry of its own.
    (entry,) = (e for key, e in written(cache).items() if "captured=0" in key)
    assert {"batched", "reference"} <= entry["microseconds"].keys() and all(
        t > 0 for t in entry["microseconds"].values()
    )
    fastest = min(entry["microseconds"], key=entry["microseconds"].get)  # perhaps with the parts of a grouping
    assert entry["executor"] == fastest and found.executor == fastest.partition("/")[0]
    assert torch.equal(before[3], torch.get_rng_state()) and m.program is before[2]
    assert x.grad is None and m.W.weight.grad is before[1] and (before[1] == 1).all() and m.W.bias.grad is None
    torch.testing.assert_close(m(graphs, x), before[0], rtol=1e-5, atol=1e-6)


def test_auto_follows(clock):
    times, measured = clock
    m, x = cell(), rows()
    want = m(GRAPHS, x)
    ran = []
    inner = m.vertex
    for best in ("reference", "batched", "reference"):
        times[best] = min(times.values()) / 2
        assert weft.tune(m, GRAPHS, x).executor == weft.explain(m, GRAPHS, x).executor == best
        assert sorted(measured) == ["batched", "reference"]  # on the CPU "persistent" runs batched
        measured.clear()
        assert weft.explain(m, GRAPHS, x, executor="batched").executor == "batched"
        for _ in range(2):  # the recent calls follow, too
            torch.testing.assert_close(m(GRAPHS, x), want)
    assert not ran and m.vertex == inner


def test_recent_calls_ask_again(clock, monkeypatch):
    """A call like a recent one runs as what was measured for its own sizes."""
    from weft._vertex.runtime import reference

    times, _ = clock
    m, many = cell(), weft.Graphs.batch([GRAPHS] * 5)
    for graphs in (GRAPHS, many, GRAPHS):
        m(graphs, rows(graphs))
    times["reference"] = 0.1
    weft.tune(m, many, rows(many))
    runs = []
    run = reference.run
    monkeypatch.setattr(reference, "run", lambda *args: runs.append(1) or run(*args))
    m(GRAPHS, rows(GRAPHS))
    assert not runs
    m(many, rows(many))
    assert len(runs) == 1
    m(GRAPHS, rows(GRAPHS))
    m(many, rows(many), executor="batched")
    assert len(runs) == 1


def test_it_holds_for_calls_of_the_same_kind(clock):
    times, _ = clock
    times["reference"] = 0.1
    m, x = models.TreeLSTM(3, 4), rows(BINARY)
    weft.tune(m, BINARY, x)

    def executor(m=m, graphs=BINARY, x=x):
        return weft.explain(m, graphs, x).executor

    assert executor() == executor(models.TreeLSTM(3, 4)) == "reference"
    assert executor(models.TreeLSTM(3, 5)) == executor(m.double(), x=x.double()) == "batched"
    m.float()
    four = weft.Graphs.from_children([[[], [], [0, 1], []]])  # vertices of the same interval, 3 to 4
    assert executor(graphs=four, x=rows(four)) == "reference"
    two = weft.Graphs.batch([BINARY, BINARY])
    assert executor(graphs=two, x=rows(two)) == "batched"
    with torch.no_grad():
        assert executor() == "batched"
    with weft.vertex.options(lazy=False):
        assert executor() == "batched"
    with torch.autocast("cpu"):
        assert executor() == "batched"


def test_typed_functions(clock):
    times, _ = clock
    times["reference"] = 0.1
    m = models.RvNN(3, 4)
    graphs = BINARY.with_types(["leaf", "leaf", "inner"])
    assert weft.tune(m, graphs, rows(graphs)).executor == "reference"


def test_other_processes_read_it(clock, cache):
    times, _ = clock
    times["reference"] = 0.1
    weft.tune(models.TreeLSTM(3, 4), BINARY, rows(BINARY))
    code = (
        f"import torch, weft; torch.set_num_threads({torch.get_num_threads()}); "
        "g = weft.Graphs.from_children([[[], [], [0, 1]]]); "
        "print(weft.explain(weft.vertex.models.TreeLSTM(3, 4), g, torch.randn(3, 3)).executor)"
    )
    assert python(code).stdout.split() == ["reference"]
    assert [f.name for f in (cache / weft.__version__).iterdir()] == ["tune_vertex.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": 3}', '{"a": {"executor": "batched", "microseconds": {"fast": 1.0}}}', "\xff"],
)
def test_a_bad_file_is_none(text, clock, cache):
    tuned.MEASURED.path().parent.mkdir(parents=True, exist_ok=True)
    tuned.MEASURED.path().write_text(text, encoding="latin-1")
    m, x = cell(), rows()
    assert weft.explain(m, GRAPHS, x).reason == "compiled"
    weft.tune(m, GRAPHS, x)
    assert len(written(cache)) == 1


def test_a_file_that_cannot_be_written_is_a_warning(clock, monkeypatch, tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(place))
    times, _ = clock
    times["reference"] = 0.1
    m, x = cell(), rows()
    with pytest.warns(UserWarning, match="kept in this process alone"):
        weft.tune(m, GRAPHS, x)
    assert weft.explain(m, GRAPHS, x).executor == "reference"


def test_a_busy_machine_stores_nothing(monkeypatch, cache):
    monkeypatch.setattr(tuning, "_SPREAD", 0.5)
    elapsed = iter(range(1, 1000))
    monkeypatch.setattr(tuning, "_stopwatch", lambda *_: lambda: float(next(elapsed)))
    m, x = cell(), rows()
    before = weft.explain(m, GRAPHS, x)
    with pytest.warns(UserWarning, match="stored nothing.*machine is busy") as found:
        assert weft.tune(m, GRAPHS, x) == before
    assert found[0].filename == __file__
    assert not tuned.MEASURED.path().exists()


def test_what_is_refused():
    m, x = cell(), rows()
    with pytest.raises(ValueError, match="one row per vertex"):
        weft.tune(m, GRAPHS, x[:2])
    with pytest.raises(TypeError, match="Graphs"):
        weft.tune(m, None, x)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(lambda x: (weft.tune(m, GRAPHS, x), x)[1])(x[None])
    with pytest.raises(TypeError):
        weft.tune()
    empty = weft.Graphs.from_children([])
    assert weft.tune(m, empty, x[:0]).executor == "batched" and not tuned.MEASURED.path().exists()
    assert weft.tune(cell=m, graphs=empty, inputs=x[:0]).executor == "batched"


def test_what_only_the_reference_can_is_measured_alone():
    m = cell(lambda h: torch.cumsum(h, 1))
    found = weft.tune(m, GRAPHS, rows())
    assert found.executor == "reference" and "cumsum" in found.reason


@pytest.mark.cuda
def test_tune_finds_how_the_blocks_are_grouped():
    cell, graphs = models.TreeLSTM(8, 64).cuda(), weft.Graphs.batch([BINARY] * 40).to("cuda")
    x = torch.randn(graphs.num_vertices, 8, device="cuda")
    before = cell(graphs, x, executor="persistent")
    found = weft.tune(cell, graphs, x)
    assert "weft.tune measured" in found.reason
    compiled = prepare(cell, graphs, x, "batched").compiled
    parts = {tuned.name_of(g.parts) for g in persistent.geometries(compiled, x.device)}
    alone = tuned.MEASURED.entries[tuned.key(compiled.functions, True, graphs, True)]
    assert alone.microseconds.keys() == parts | {"batched"} and len(parts) > 1
    best = min(parts, key=alone.microseconds.__getitem__)
    assert persistent.geometry(compiled, graphs, x.device).parts == tuned.parts_of(best)
    called = tuned.MEASURED.entries[tuned.key(compiled.functions, True, graphs, False)]
    assert called.microseconds.keys() == {best, "batched", "reference"}
    assert found.executor == (called.fastest if called.fastest != best else "persistent")
    torch.testing.assert_close(cell(graphs, x, executor="persistent"), before, rtol=1e-4, atol=1e-5)
