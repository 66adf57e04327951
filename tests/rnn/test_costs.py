"""The costs of GPUs: the files, how they are scaled to other GPUs, and what "auto" makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import weft
from weft._base import costs as gpu_costs
from weft._rnn.select import choice, costs, tuned
from weft._rnn.select.case import Case

from benchmarks import common, costs_file, fit, layers, rnn_cases, scan, stages
from tests import emulated
from tests.rnn.planner import Planner

FILES = sorted(gpu_costs.FOLDER.glob("*.json"))
KINDS = {"from", "clock", "chip", "memory", "fixed"}
H200 = {"name": "NVIDIA H200", "capability": 90, "multiprocessors": 132, "clock_mhz": 1980.0, "bandwidth_gbs": 4917.0}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_whole(path):
    gpu, tables = gpu_costs.read(path)
    assert set(gpu) == set(H200) and path == costs_file.path_of(gpu)
    assert set(tables) == set(gpu_costs.reference().tables)
    for name, table in tables.items():
        assert table.keys() <= KINDS and table["from"], name
        numbers = [n for kind, some in table.items() if kind != "from" for values in some.values()
                   for n in (values if isinstance(values, list) else [values])]  # fmt: skip
        assert numbers and all(math.isfinite(n) and n >= 0 for n in numbers), name
        # Of every padded H.
        if "warp." in name and name != "scan.warp":
            assert all(len(values) == 5 for kind in table.keys() - {"from"} for values in table[kind].values())
    assert path.read_text() == costs_file.text_of(gpu, tables)


def costs_of(**gpu) -> gpu_costs.Costs:
    return gpu_costs.Costs(*weft._C.common.costs_of(**{**H200, **gpu}))


def test_a_gpu_with_a_file_has_its_costs():
    own = costs_of()
    assert not own.extrapolated and own.measured_on == H200["name"]
    assert own == gpu_costs.reference() == gpu_costs.of(None)
    _, tables = gpu_costs.read(FILES[0])
    assert own.number("products", "launch") == tables["products"]["fixed"]["launch"]
    assert own.tables["rnn.scan_warp.gru"]["boundary"] == tables["rnn.scan_warp.gru"]["clock"]["boundary"]


def test_another_gpu_has_those_of_the_nearest_scaled():
    own = costs_of()
    found = costs_of(name="half", capability=80, multiprocessors=66, clock_mhz=990.0, bandwidth_gbs=4917 / 4)
    assert found.extrapolated and found.measured_on == H200["name"]
    _, tables = gpu_costs.read(FILES[0])
    times = {"clock": 2.0, "chip": 4.0, "memory": 4.0, "fixed": 1.0}
    for name, table in tables.items():
        for kind, numbers in table.items():
            for number in numbers if kind != "from" else ():
                expected = [times[kind] * value for value in own.tables[name][number]]
                assert found.tables[name][number] == pytest.approx(expected), (name, number)


def test_what_the_driver_does_not_tell_scales_nothing():
    found = costs_of(name="silent", clock_mhz=0.0, bandwidth_gbs=0.0)
    assert found.extrapolated and found.tables == costs_of().tables
    # A part of a GPU, as MIG makes them, is another GPU.
    assert costs_of(multiprocessors=16).extrapolated


def test_the_nearest_is_that_of_the_nearest_capability():
    def add(name: str, capability: int, multiprocessors: int) -> None:
        table = {"products": {"fixed": {"launch": [float(capability)]}}}
        weft._C.common.add_costs(
            table, **{**H200, "name": name, "capability": capability, "multiprocessors": multiprocessors}
        )

    # In a process of its own, whose costs no other test sees.
    def check() -> None:
        for name, capability, multiprocessors in (("a", 80, 108), ("b", 86, 84), ("c", 100, 148), ("d", 80, 56)):
            add(name, capability, multiprocessors)
        nearest = {(80, 100): "a", (80, 60): "d", (89, 60): "b", (75, 100): "a", (90, 114): H200["name"], (120, 1): "c"}
        for (capability, multiprocessors), name in nearest.items():
            found = costs_of(name="new", capability=capability, multiprocessors=multiprocessors)
            assert found.measured_on == name and found.extrapolated
        assert costs_of(name="c", capability=100, multiprocessors=148).extrapolated is False
        add("c", 103, 148)
        assert costs_of(name="c", multiprocessors=148).number("products", "launch") == 103

    assert emulated.ends_well(check)


def test_costs_that_go_with_nothing_known_are_refused():
    with pytest.raises(ValueError, match="clock, chip, memory or are fixed, got 'weather'"):
        weft._C.common.add_costs({"products": {"weather": {"launch": [1.0]}}}, **{**H200, "name": "other"})
    assert costs_of(name="other").extrapolated


CASE = Case(cell="gru", device="cuda", dtype=torch.float32, hidden_size=20, batch=16, steps=10_000, index=0,
            capability=(9, 0), tf32=True, input_size=20)  # fmt: skip


def test_expected_times_follow_the_gpu(monkeypatch):
    before = {name: choice.modelled_time(name, CASE) for name in ("scan", "torch")}
    slower = costs_of(name="half", clock_mhz=990.0)
    monkeypatch.setattr(gpu_costs, "of", lambda index: slower)
    for name, us in before.items():
        assert 1.8 * us < choice.modelled_time(name, CASE) <= 2 * us
    host = costs.host_us(CASE)
    assert host == gpu_costs.reference().number("rnn.host", "weft_training")


@pytest.fixture(scope="module")
def planner(tmp_path_factory) -> Planner:
    if emulated.MARKS[0].args[0]:
        pytest.skip(emulated.MARKS[0].kwargs["reason"])
    return Planner(tmp_path_factory.mktemp("planner"), gpu_costs.reference())


@pytest.fixture
def on_an_h200(planner, monkeypatch, tmp_path) -> Iterator[None]:
    """The choice as on an H200 where weft.tune has not run."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned.MEASURED, "entries", None)
    monkeypatch.setattr(choice, "_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(choice._C.rnn, "report", planner, raising=False)
    choice.forget_choices()
    yield
    choice.forget_choices()


def loses(mine: float, peers: float) -> bool:
    """What benchmarks.scan calls slower than torch.nn; in microseconds."""
    row = {"case": "cell=gru", "weft": str(mine / 1e3), "peer_value": str(peers / 1e3), "ratio": str(peers / mine)}
    return bool(scan.slower_than_torch([row]))


SCANNED = {("rnn_tanh", 64): (10_000, 64), ("rnn_tanh", 128): (10_000, 64), ("gru", 64): (10_000, 16),
           ("gru", 128): (10_000, 4), ("lstm", 64): (10_000, 4)}  # fmt: skip
"""Above 32 hidden units, the shortest sequences and the largest batches of results/scan_auto.csv that ran as the
scan."""
ALL_T = (300, 1000, 3000, 10_000, 30_000)
PERSISTED = {("rnn_tanh", 32): {(1000, 256)}, ("gru", 20): {(1000, 256)}, ("gru", 32): {(T, 256) for T in ALL_T},
             ("lstm", 20): {(300, 128), *((T, 256) for T in ALL_T)},
             ("lstm", 32): {(T, B) for T in ALL_T for B in (128, 256)}}  # fmt: skip
"""Up to 32, what ran as the persistent kernels. Both are of commit dc71031544: new rows change them."""


def taken_when_measured(case: Case) -> str:
    size = case.cell, case.hidden_size
    if case.hidden_size <= 32:
        return "persistent" if (case.steps, case.batch) in PERSISTED.get(size, ()) else "scan"
    T, B = SCANNED.get(size, (math.inf, 0))
    return "scan" if case.steps >= T and case.batch <= B else "persistent"


def test_auto_keeps_its_bound_on_every_committed_point(on_an_h200):
    """The regret, what is taken beside the faster of Weft's time and torch's, is none: "auto" takes what it took when a
    row was measured, which was faster than torch's layer everywhere. Where it takes another of Weft's algorithms, both
    are expected to take as long, within a quarter, and there are few such points."""
    counted, changed = {"rnn": 0, "scan_auto": 0}, []
    for row in fit.rows(H200["name"]):
        if row.file not in counted or row.metric not in ("forward_backward", "inference", "decode"):
            continue
        counted[row.file] += 1
        name, _ = choice.choose("auto", row.case)
        name = "scan" if name == "newton" else name  # which it takes where it is the scan behind a shorter forward pass
        us = row.torch if name == "torch" else row.weft
        assert us <= min(row.weft, row.torch) and not loses(us, row.torch), row
        before = taken_when_measured(row.case) if row.file == "scan_auto" else "persistent"
        if name != before:
            changed.append(row)
            times = [choice.modelled_time(each, row.case) for each in (name, before)]
            assert times[0] < 1.25 * times[1] < 1.25**2 * times[0], row
    grid = {row["case"] for row in common.read_rows(common.RESULTS / "scan_auto.csv")}
    assert counted["scan_auto"] == len(grid) > 1000 and counted["rnn"] > 108
    assert len(changed) <= 5, changed


def test_what_is_expected_of_the_persistent_kernels_is_near_the_rows(on_an_h200):
    """By the planner of this build and the costs of the file."""
    errors = []
    for row in fit.rows(H200["name"]):
        if row.file == "rnn" and row.metric in ("forward", "forward_backward") and row.case.hidden_size > 32:
            errors.append(choice.modelled_time("persistent", row.case) / row.weft - 1)
    assert len(errors) > 140 and (sum(e * e for e in errors) / len(errors)) ** 0.5 < 0.15
    assert max(map(abs, errors)) < 0.6


def test_the_rule_and_the_costs_decide_alike_where_the_batch_is_small(on_an_h200):
    """Where the weights fit and a step has few states, the persistent kernels are expected to beat torch's."""
    sizes = [(H, B) for H in (272, 384, 640, 1024, 1536, 2048) for B in (1, 16, 32_768 // H)]
    seen = 0
    for cell in rnn_cases.GRID_CELLS:
        for dtype, tf32 in ((torch.float16, False), (torch.float32, True)):
            for H, B in sizes:
                for trains in (True, False):
                    case = CASE._replace(cell=cell, dtype=dtype, tf32=tf32, hidden_size=H, input_size=H, batch=B,
                                         steps=1024, trains=trains)  # fmt: skip
                    if B * H > 32_768 or choice.persistent_plan(case).expected_us is None:
                        continue
                    seen += 1
                    assert choice.choose("auto", case)[0] == "persistent"
                    assert choice._why_slower(case, "persistent", "torch") is None, case
    assert seen > 150


def test_no_plan_is_cheaper_than_the_bound(planner):
    """Below which "auto" does not ask for a plan, whose kernels would be compiled."""
    for dtype, tf32 in ((torch.float16, False), (torch.float32, True)):
        for hidden in (1, 8, 32, 64):
            for trains in (True, False):
                sizes = {"hidden_size": hidden, "batch": 1, "steps": 100_000, "trains": trains, "cell": "rnn_tanh"}
                case = CASE._replace(dtype=dtype, tf32=tf32, **sizes)
                us = planner(
                    device=0, dtype=str(dtype)[6:], input_size=1, layers=1, directions=1, packed=False, **sizes
                )
                assert costs.persistent_at_least_us(case) <= us["microseconds"]


@pytest.mark.cuda
def test_what_the_driver_tells():
    facts, properties = weft._C.common.gpu_facts(0), torch.cuda.get_device_properties(0)
    assert facts["name"] == properties.name and facts["multiprocessors"] == properties.multi_processor_count
    assert facts["capability"] == 10 * properties.major + properties.minor
    assert facts["clock_mhz"] >= 0 and facts["bandwidth_gbs"] >= 0
    known = {(gpu["name"], gpu["multiprocessors"]) for gpu, _ in map(gpu_costs.read, FILES)}
    assert gpu_costs.of(0).extrapolated == ((facts["name"], facts["multiprocessors"]) not in known)
    assert gpu_costs.of(None) == gpu_costs.of(torch.cuda.current_device())


@pytest.mark.cuda
def test_stages_that_are_expected(monkeypatch):
    """One chunk is a replay alone."""
    for hidden in (20, 64):
        sizes = {"device": 0, "cell": "gru", "hidden": hidden, "steps": 10_000, "batch": 2}
        chunks, expected = weft._C.rnn.scan_expected(**sizes)
        assert chunks > 1 and min(expected) > 0
        monkeypatch.setenv("WEFT_RNN_SCAN_CHUNKS", "1")
        assert weft._C.rnn.scan_expected(**sizes)[0] == 1 and weft._C.rnn.scan_expected(**sizes)[1][:3] == [0, 0, 0]
        if hidden == 20:
            assert weft._C.rnn.slice_chunks(**sizes) == 1
        monkeypatch.delenv("WEFT_RNN_SCAN_CHUNKS")
        if hidden == 20:
            assert 1 < weft._C.rnn.slice_chunks(**sizes) <= 2500
            assert weft._C.rnn.slice_chunks(**sizes | {"steps": 3}) == 1
        for half in (False, True):
            sizes = {"device": 0, "half": half, "hidden": hidden, "batch": 1}
            chunks, expected = weft._C.scan.linear_scan_expected(**sizes, steps=10_000)
            assert chunks > 1 and min(expected) > 0
            assert weft._C.scan.linear_scan_expected(**sizes, steps=3)[0] == 1
    with pytest.raises(ValueError, match="hidden must be 1 to 128"):
        weft._C.scan.linear_scan_expected(device=0, half=False, steps=1, batch=1, hidden=129)


@pytest.mark.cuda
def test_the_parts_of_the_fit_run(monkeypatch, tmp_path):
    monkeypatch.setattr(stages, "STEPS", 200)
    monkeypatch.setattr(stages, "MOST_ELEMENTS", 2**20)
    timed = [*stages.chains(), *stages.linear_scans()]
    _, tables = gpu_costs.read(FILES[0])
    assert dict(stages.tables_of(timed, tables)).keys() == stages.NUMBERS.keys()
    products = fit.measured_products()
    assert all(0 < us < 1e6 for us in products["chip"].values()) and products["fixed"]["launch"] > 0
    case = layers.LayerCase("gru", 20, 2, 50, inputs=20, algorithm="scan")
    results = common.Results(tmp_path / "fit.csv")
    assert {row["metric"] for row in fit.layer_entry(case, ("forward", "forward_backward")).run(results)} == {
        "forward", "forward_backward"
    }  # fmt: skip
