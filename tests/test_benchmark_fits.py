"""The costs that the benchmarks fit, and the files that these become."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
import torch
import weft
from weft._base import costs as gpu_costs
from weft._rnn.select import choice, costs
from weft._rnn.select.case import Case

from benchmarks import common, costs_file, executors, fit, fitting, geometries, nets, rnn_cases, sparse_costs, stages


@pytest.fixture
def costed_rows():
    found = list(fit.rows())
    if not found:
        pytest.skip("there are no results yet")
    return found


def test_auto_takes_what_the_rows_say_is_faster(costed_rows, monkeypatch):
    """With the measured time in the place of the expected one, torch's kernel is taken nowhere: it won at no row."""
    monkeypatch.setattr(choice, "_DEVICES", ("cpu", "cuda"))
    some = [r for r in costed_rows if r.file == "rnn" and r.metric in ("forward_backward", "inference", "decode")]
    assert len(some) > 108
    for r in some:
        facts = {"why_not": None, "forward": None, "backward": None, "microseconds": r.weft}
        monkeypatch.setattr(choice._C.rnn, "report", lambda facts=facts, **_: facts, raising=False)
        assert choice.choose("auto", r.case)[0] == "persistent", r


def test_costs_are_near_the_rows(costed_rows):
    def rms(pairs) -> float:
        errors = [expected / measured - 1 for expected, measured in pairs]
        return (sum(e * e for e in errors) / len(errors)) ** 0.5

    training = [r for r in costed_rows if r.metric == "forward_backward"]
    long = [r for r in training if r.steps >= fit.LONG]
    for kernel in ("small", "persistent", "standard"):
        assert rms((costs.torch_us(r.case), r.torch) for r in long if r.kernel == kernel) < 0.2
    scans = [r for r in long if fit.ran_as_scan(r)]
    assert rms((costs.scan_us(r.case), r.weft) for r in scans) < 0.2
    forward = [r for r in costed_rows if r.metric == "forward" and r.file == "scan"]
    without = [(costs.scan_us(r.case._replace(trains=False)), r.weft) for r in forward]
    assert without and rms(without) < 0.2
    # A few steps are the host's, whose times vary.
    short = [r for r in training if r.steps < fit.LONG]
    assert rms((costs.torch_us(r.case), r.torch) for r in short) < 0.35
    assert rms((costs.scan_us(r.case), r.weft) for r in short if fit.ran_as_scan(r)) < 0.35


def test_the_file_is_what_the_fit_writes(costed_rows, tmp_path, capsys):
    """What can be fitted to the rows is, and the rest is kept."""
    fit.main(["--results", "--output", str(tmp_path / "costs.json")])
    gpu, _ = gpu_costs.read(tmp_path / "costs.json")
    assert (tmp_path / "costs.json").read_text() == costs_file.path_of(gpu).read_text()
    with pytest.raises(SystemExit, match="there is no file for NVIDIA None"):
        fit.main(["--results", "NVIDIA None"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="there is no GPU to measure"):
            fit.main([])


LINE = costs.Line(step=2.0, unit=0.5, sequence=3.0)


def _cases() -> list[Case]:
    base = fit.case_of(common.parse_case("cell=gru device=cuda dtype=fp32 H=8 B=4 T=100"), "forward_backward")
    return [
        base._replace(hidden_size=H, batch=B, steps=T, layers=layers)
        for H, B, T, layers in ((8, 1, 10, 1), (20, 4, 99, 1), (8, 16, 500, 2), (64, 2, 1000, 1), (32, 9, 77, 3))
    ]


def test_a_fit_finds_the_constants_again():
    # What would be negative is left out.
    names, cases = ("start", "step", "unit", "sequence"), _cases()
    assert fit.fit_line(cases, [LINE.us(case) for case in cases], names) == LINE
    slower = [LINE.us(case) - 50 for case in cases]
    assert fit.fit_line(cases, slower, names).start == 0
    assert fitting.rounded(0.0012345) == 0.00123
    assert fitting.error([1.1, 0.9, 1.0], [1.0, 1.0, 1.0]) == "rms 8.2%, worst 10%"


def test_a_line_in_a_table_says_what_it_goes_with():
    cases = _cases()
    table = fit.table_of(LINE, cases, [LINE.us(case) for case in cases])
    assert table == {
        "from": "5 rows, rms 0.0%, worst 0%", "clock": {"step": 2.0, "unit": 0.5}, "chip": {"sequence": 3.0}
    }  # fmt: skip
    weft._C.common.add_costs({"line": gpu_costs._by_kind(table)}, name="line", **FACTS)
    found = gpu_costs.Costs(*weft._C.common.costs_of(name="line", **FACTS))
    assert costs.line(found, "line") == LINE


FACTS = {"capability": 10, "multiprocessors": 1, "clock_mhz": 1.0, "bandwidth_gbs": 1.0}


def _fast_gpu_rows(scale: float) -> list[fit.Row]:
    """Invented rows of everything that `fit` measures, on a GPU where all takes `scale` times what the costs say."""
    rows = []
    for layer, metrics in fit.layer_cases():
        for metric in metrics:
            case = fit.case_of(common.parse_case(layer.name), metric)
            weft_us = costs.scan_us(case) if layer.algorithm == "scan" else 1.5 * case.steps
            rows.append(fit.Row("fit", case, metric, layer.algorithm, scale * weft_us, scale * costs.torch_us(case)))
    for case in rnn_cases.DECODE:
        rows.append(fit.Row("fit", fit.case_of(common.parse_case(case.name), "decode"), "decode", "auto", 15.0, 100.0))
    return rows


def test_what_is_measured_is_enough_for_every_layers_table():
    """On a GPU without other rows; the numbers are found again, as far as the host does not cover them."""
    _, before = gpu_costs.read(costs_file.path_of({"name": "NVIDIA H200"}))
    tables = fit.fitted(_fast_gpu_rows(2.0), before)
    changed = {name for name in tables if tables[name] != before[name]}
    assert changed == {name for name in tables if name.startswith(("rnn.torch", "rnn.scan.", "rnn.scan_limits"))} | {
        "rnn.host", "rnn.scan"
    }  # fmt: skip
    for cell, largest in fit.SCANS:
        old, new = (t[f"rnn.scan.{cell}.{largest}"] for t in (before, tables))
        assert new["clock"]["step"] == pytest.approx(2 * old["clock"]["step"], rel=0.05), cell
        assert new["chip"]["volume"] == pytest.approx(2 * old["chip"]["volume"], rel=0.1), cell
    assert tables["rnn.torch.small"]["fixed"]["forward_share"] == before["rnn.torch.small"]["fixed"]["forward_share"]
    assert tables["rnn.host"]["fixed"]["weft_forward"] == 15.0


def test_limits_lose_least():
    """The first algorithm wins for long sequences in small batches."""
    points = {
        (T, B): (1.0, 2.0) if T >= 3000 and B <= 4 else (2.0, 1.0) for T in (1000, 3000, 10000) for B in (1, 4, 16)
    }
    assert fit.best_limits(points) == (3000, 4)
    assert fit.best_limits({size: (2.0, 1.0) for size in points})[1] == 0
    assert fit.best_limits({size: (1.0, 2.0) for size in points}) == (1000, 16)
    # What is lost on one side counts against what is won on the other.
    points[3000, 4] = 1.5, 1.0
    points[3000, 1] = 1.0, 1.4
    assert fit.best_limits(points) == (10000, 4)
    points[3000, 1] = 1.0, 1.6
    assert fit.best_limits(points) == (3000, 4)


def test_a_gpu_without_a_file_starts_from_the_nearest(tmp_path):
    gpu = {"name": "NVIDIA Half", "capability": 90, "multiprocessors": 66, "clock_mhz": 990.0, "bandwidth_gbs": 4917.0}
    tables = costs_file.before(gpu)
    _, h200 = gpu_costs.read(costs_file.path_of({"name": "NVIDIA H200"}))
    assert tables.keys() == h200.keys() and costs_file.path_of(gpu).name == "nvidia-half.json"
    assert tables["products"]["chip"]["half_teraflop"] == 4 * h200["products"]["chip"]["half_teraflop"]
    assert tables["rnn.host"]["fixed"] == h200["rnn.host"]["fixed"]
    assert tables["rnn.scan_warp.gru"]["from"] == "extrapolated from NVIDIA H200"
    path = tmp_path / "half.json"
    path.write_text(costs_file.text_of(gpu, tables))
    assert gpu_costs.read(path) == (gpu, tables)


def test_stages_are_corrected():
    """By what the points tell of them; a stage that none has stays as it was."""
    _, tables = gpu_costs.read(costs_file.path_of({"name": "NVIDIA H200"}))
    generator, timed = random.Random(0), []
    for name in stages.NUMBERS:
        for _ in range(40):
            parts = tuple(generator.uniform(100, 1000) for _ in range(3))
            timed.append(stages.Timed(name, 6 + 50 + 2 * parts[0] + 0.5 * parts[1] + 3 * parts[2], 6.0, parts))
    found = dict(stages.tables_of(timed, tables))
    assert found.keys() == stages.NUMBERS.keys()
    for name, table in found.items():
        numbers = {n: v for kind, some in table.items() if kind != "from" for n, v in some.items()}
        before = {n: v for kind, some in tables[name].items() if kind != "from" for n, v in some.items()}
        assert numbers.keys() == before.keys()
        kept = {"launches", "transposed_replay", "replay_share"}
        assert numbers.keys() - {n for some in stages.NUMBERS[name].values() for n in some} <= kept
        for stage, times in (("products", 2.0), ("boundaries", 0.5), ("replay", 3.0)):
            for n in stages.NUMBERS[name][stage]:
                assert np.asarray(numbers[n]) == pytest.approx(times * np.asarray(before[n]), rel=0.05), (name, n)
        assert all(numbers.get(n) == before.get(n) for n in kept) and "40 scans, rms" in table["from"]
    only_replay = [stages.Timed("rnn.scan_block", 106.0 + r, 0.0, (0.0, 0.0, r)) for r in (1e3, 2e3, 4e3)]
    clock = dict(stages.tables_of(only_replay, tables))["rnn.scan_block"]["clock"]
    assert clock["product_step"] == tables["rnn.scan_block"]["clock"]["product_step"]


def test_scans_are_timed(monkeypatch):
    """As on a GPU, by the operators of the CPU."""
    monkeypatch.setattr(stages, "STEPS", 40)
    monkeypatch.setattr(stages, "MOST_ELEMENTS", 2**19)
    chosen = []

    def expected(**sizes):
        forced = int(os.environ.get(stages.VARIABLE, 5))
        chosen.append(forced)
        return forced, (6.0, 1.0, 2.0, 3.0)

    monkeypatch.setattr(stages.weft._C.rnn, "scan_expected", expected, raising=False)
    monkeypatch.setattr(stages.weft._C.scan, "linear_scan_expected", expected, raising=False)
    timed = [*stages.chains("cpu"), *stages.linear_scans("cpu")]
    assert {1, 5} <= set(chosen) and stages.VARIABLE not in os.environ
    assert {t.table for t in timed} == stages.NUMBERS.keys()
    assert all(t.us > 0 and t.launches == 6 and t.stages == (1.0, 2.0, 3.0) for t in timed)


def test_the_fit_of_a_gpu_writes_its_file(tmp_path, monkeypatch):
    """With what is measured of it invented."""
    gpu = {"name": "NVIDIA Half", "capability": 90, "multiprocessors": 66, "clock_mhz": 990.0, "bandwidth_gbs": 4917.0}
    monkeypatch.setattr(fit.weft._C.common, "gpu_facts", lambda index: gpu, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    products = {"from": "test", "chip": dict.fromkeys(("half_teraflop", "tf32_teraflop", "float_teraflop"), 1.0),
                "fixed": {"launch": 9.0}}  # fmt: skip
    monkeypatch.setattr(fit, "measured_products", lambda: products)
    scans = [stages.Timed("rnn.scan_warp.gru", 206.0, 6.0, (0.0, 0.0, 100.0))] * 50
    monkeypatch.setattr(stages, "measured", lambda minutes: scans)
    chains = dict.fromkeys(
        ("link", "axpy", "dense", "gather", "accumulate", "expand", "vector", "product", "call", "layer"), 3.25
    )
    monkeypatch.setattr(sparse_costs, "fit", lambda device: chains)
    layers = {"link": 1.5, "layer": 7.0, "simple": 3.0, "segment": 2.5}
    monkeypatch.setattr(sparse_costs, "fit_layers", lambda: layers)
    monkeypatch.setattr(executors, "_data", lambda name: _trees())
    calls = [_call("treelstm", H, B) for H in (16, 32, 64) for B in (1, 4, 16, 64)]
    monkeypatch.setattr(executors, "measured", lambda seconds: calls)
    monkeypatch.setattr(fit, "measure_layers", lambda minutes: ["one: too odd"])
    monkeypatch.setattr(fit, "rows", lambda name: _fast_gpu_rows(2.0))

    def lost(*arguments):
        raise torch.AcceleratorError("the GPU is lost")

    monkeypatch.setattr(geometries, "measure", lost)
    with pytest.raises(SystemExit, match="2 entries failed:\nrecurrence: the GPU is lost\none: too odd"):
        fit.main(["--minutes", "1", "--output", str(tmp_path / "half.json")])
    found, tables = gpu_costs.read(tmp_path / "half.json")
    assert found == gpu and tables["products"] == products and "rows" in tables["rnn.scan.gru.32"]["from"]
    assert tables["rnn.recurrence.grid.forward"]["from"] == "extrapolated from NVIDIA H200"
    assert {
        n: v for kind in ("clock", "chip", "memory", "fixed") for n, v in tables[sparse_costs.COSTS][kind].items()
    } == chains
    assert tables[sparse_costs.LAYERS]["fixed"] == {**layers, "worth": 0.8}
    assert "50 scans" in tables["rnn.scan_warp.gru"]["from"] and tables.keys() == gpu_costs.reference().tables.keys()


def _trees() -> nets.Data:
    trees = weft.data.listops(64, max_arity=2)
    graphs = [weft.Graphs.from_children([tree.children]) for tree in trees]
    return nets.Data(graphs, [torch.tensor(tree.labels) for tree in trees], 10)


def _call(name: str, H: int, B: int, dtype: str = "float32") -> executors.Timed:
    """By costs of 2 each, what others do besides 100, the host's 3."""
    a = executors.amounts.__wrapped__(name, H, B, 1, 66, dtype)
    own, other = (2.0 * sum(amount.values()) for amount in (a.persistent, a.batched))
    hosts = (3.0 * sum(amount.values()) for amount in (a.host_persistent, a.host_batched))
    return executors.Timed(name, H, B, 1, own, own + 100, other + 100, *hosts, dtype)


def test_costs_of_executors_are_fitted_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(executors, "_data", lambda name: _trees())
    executors.amounts.cache_clear()
    sizes = [(H, B) for H in (16, 32, 64, 128) for B in (1, 4, 16, 64)]
    timed = [_call("treelstm", *size) for size in sizes]
    tables = dict(executors.tables_of(timed, 66))
    assert tables.keys() == {"vertex.persistent", "vertex.batched", "vertex.host"}
    for table, names, count in (("vertex.batched", executors.BATCHED, 16), ("vertex.host", executors.HOST, 32)):
        numbers = {n: c for kind, values in tables[table].items() if kind != "from" for n, c in values.items()}
        assert numbers.keys() == {*names} and f"{count} calls" in tables[table]["from"]
        assert "rms 0" in tables[table]["from"]
    assert executors.lost(timed, tables, 66) < 0.01
    assert not dict(executors.tables_of(timed[:3], 66))
    half = [_call("treelstm", *size, "bfloat16") for size in sizes]
    assert dict(executors.tables_of(half, 66)).keys() == {
        "vertex.persistent.half",
        "vertex.batched.half",
        "vertex.host",
    }
    both = dict(executors.tables_of([*timed, *half], 66))
    assert all(both[name] == table for name, table in tables.items() if name != "vertex.host")
    assert executors.lost([*timed, *half], both, 66) < 0.01
    (tmp_path / "times.jsonl").write_text("".join(f"{json.dumps(t._asdict())}\n" for t in timed))
    kept = ["--input", str(tmp_path / "times.jsonl"), "--output", str(tmp_path / "again.jsonl"), "--processors", "66"]
    executors.main(kept)
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "times.jsonl").read_text()
    assert "the choice loses" in capsys.readouterr().out
    executors.amounts.cache_clear()


def test_geometries_become_tables():
    """What no geometry needed stays as it was."""
    constants = {"base": 0.5, "product": 3.0, "fma": 0.0}
    timed = [t._replace(geometry=t.geometry._replace(amounts={**t.geometry.amounts, "fma": 0.0}))
             for t in _timed({"base": 0.5, "product": 3.0})]  # fmt: skip
    before = {f"rnn.recurrence.grid.{p}": {"from": "", "clock": dict.fromkeys(constants, 9.0)}
              for p in ("forward", "backward")}  # fmt: skip
    found = dict(fit.tables_of_geometries(timed, before))
    assert found.keys() == before.keys()
    for table in found.values():
        assert table["clock"] == {"base": 0.5, "product": 3.0, "fma": 9.0} and "geometries, rms 0.0%" in table["from"]
    assert not dict(fit.tables_of_geometries(timed[:4], before))


def _timed(costs: dict[str, float]) -> list[geometries.Timed]:
    """Geometries of every cell and size whose times are these costs'."""
    generator = random.Random(0)
    found = []
    for problem in geometries.problems((128, 512), (1, 16)):
        for groups in (1, 2, 4):
            amounts = {name: generator.uniform(0, 10) for name in costs}
            us = sum(cost * amounts[name] for name, cost in costs.items())
            geometry = geometries.Geometry(f"tier=grid group={groups} columns=1", [], 1.0, groups, amounts)
            found.append(geometries.Timed(problem, geometry, groups * us))
    return found


def test_geometries_are_fitted_and_kept(tmp_path, capsys):
    costs = {"base": 0.5, "product": 3.0, "megabyte": 0.2}
    timed = _timed(costs)
    geometries.write(tmp_path / "times.csv", timed)
    kept = list(geometries.read(tmp_path / "times.csv"))
    assert [(t.problem, t.geometry) for t in kept] == [(t.problem, t.geometry) for t in timed]
    fitted = geometries.fit_tiers(kept)
    assert set(fitted) == {("grid", False), ("grid", True)}
    for constants in fitted.values():
        assert all(constants[name] == pytest.approx(cost, rel=1e-2) for name, cost in costs.items())
    geometries.main(["--input", str(tmp_path / "times.csv")])
    printed = capsys.readouterr().out
    assert "0.0% by these constants" in printed and "0.0% as it is" not in printed


@pytest.mark.cuda
def test_geometries_are_measured():
    problem = geometries.Problem("gru", "exact", 64, 4, True)
    found = geometries.geometries(problem)
    assert {"mma", "fma"} <= {g.fields["product"] for g in found}
    for g in found[:50]:
        costs = [*g.amounts.values()]
        assert g.expected_us > 0 and g.launches >= 1 and costs[0] == 1 and min(costs) >= 0
    timed = list(geometries.measure([problem], 2, 60.0, steps=64))
    assert len(timed) >= 4 and all(0 < t.us < 1e3 for t in timed)
    assert geometries.VARIABLE not in os.environ
