"""The benchmarks' bookkeeping, and a small run of each kind on the CPU."""

from __future__ import annotations

import argparse
import csv
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import weft
from weft import _costs
from weft._rnn import choice, costs
from weft._rnn.case import Case

from benchmarks import common, fit, fitting, geometries, packages, rnn, scan, sparse, stages


def row(case: str, metric: str = "forward_backward", mine: float = 1.0, peers: float = 2.0, **other: str) -> dict:
    values = dict(date="2026-01-01", commit="abc", gpu="GPU", torch="2.11.0", cuda="13.0", unit="ms", peer="torch.nn")
    ratio = str(peers / mine) if mine > 0 else ""
    return {
        **values,
        "case": case,
        "metric": metric,
        "weft": str(mine),
        "peer_value": str(peers),
        "ratio": ratio,
        **other,
    }


def test_case_names_have_one_order():
    name = common.case_name(T=10, inputs=3, B=2, H=4, dtype="fp32", device="cpu", cell="gru")
    assert name == "cell=gru device=cpu dtype=fp32 H=4 B=2 T=10 inputs=3"
    assert common.parse_case(name)["inputs"] == "3"


@pytest.mark.parametrize(
    ("value", "text"), [(1234.567, "1235"), (0.6, "0.6000"), (0.0012345, "0.001234"), (1e-7, "1.000e-07"), (0.0, "0.0")]
)
def test_significant_digits(value, text):
    assert common.significant(value) == text


def test_measuring_again_replaces_the_row(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_COMMIT", "first")
    case = "cell=gru device=cpu dtype=fp32 H=4 B=2 T={}"
    results = common.Results(tmp_path / "results.csv")
    for steps in (100, 20):
        results.put(case.format(steps), "backward", "ms", 2.0, "torch.nn", 3.0)
    results.save()
    monkeypatch.setenv("WEFT_COMMIT", "second")
    results = common.Results(tmp_path / "results.csv")
    assert not results.measured(case.format(20), "backward", "torch.nn", common.hardware("cpu"))
    results.put(case.format(20), "backward", "ms", 1.0, "torch.nn", 3.0)
    results.put(case.format(20), "memory_beyond_torch", "bytes", -8.0, "gate_activations", 16.0)
    assert results.measured(case.format(20), "backward", "torch.nn", common.hardware("cpu"))
    results.save()
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == common.COLUMNS
    assert [(r["case"][-4:], r["commit"], r["ratio"]) for r in rows] == [
        ("T=20", "second", "3.000"),
        ("T=20", "second", ""),
        ("=100", "first", "1.500"),
    ]


def test_a_disagreement_is_not_timed():
    common.check_agreement("case", {"x": 1e-7}, 1e-6)
    for error in (1e-5, float("nan"), float("inf")):
        with pytest.raises(RuntimeError, match="case: x differs"):
            common.check_agreement("case", {"x": error}, 1e-6)
    assert common.relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


def test_candidates_take_turns():
    order = []
    candidates = {
        n: common.Candidate(lambda _, n=n: order.append(n), lambda n=n: order.append(n.upper())) for n in "ab"
    }
    times = common.measure(candidates, "cpu", warmup=1, repeats=2, at_most=0.0)
    assert order == (["A", "a"] * 2 + ["B", "b"] * 2) * 2
    assert set(times) == {"a", "b"}


FAILED_CAPTURE = """
import torch
from benchmarks import common

x = torch.randn(8, device="cuda", requires_grad=True)

def step():
    y = torch.nn.functional.dropout((x * x).sin(), 0.5)
    return y.detach(), *torch.autograd.grad(y.sum(), x)

stream = torch.cuda.current_stream()
try:
    common.captured(lambda: step()[0].sum().item())
except RuntimeError:
    pass
else:
    raise AssertionError("captured")
assert torch.cuda.current_stream() == stream
torch.manual_seed(3)
first = torch.rand(4, device="cuda")
replay = common.captured(step)
a, b = (tuple(t.clone() for t in replay()) for _ in range(2))
assert not torch.equal(a[0], b[0]) and a[1].isfinite().all()
torch.manual_seed(3)
assert torch.equal(torch.rand(4, device="cuda"), first)
"""


@pytest.mark.cuda
def test_a_failed_capture_costs_nobody_else():
    """In a process of its own: whatever torch keeps of such a capture ends with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["python", os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", FAILED_CAPTURE], cwd=common.ROOT, env=environment, check=True)


def test_bound_on_auto():
    case = "cell=gru device=cuda dtype=fp32 H=8 B=1 T={}"
    rows = [
        row(case.format(1), mine=0.519, peers=0.5001),
        row(case.format(2), mine=1.06, peers=1.0),
        row(case.format(3), mine=0.111, peers=0.1),
        row(case.format(4), mine=0.125, peers=0.1),
        row(case.format(5) + " algorithm=scan", mine=9.0, peers=1.0),
    ]
    assert [r["case"][-1] for r in scan.slower_than_torch(rows)] == ["4", "2"]


def test_auto_was_measured_not_to_lose(monkeypatch):
    """Every point of the grid is there, and where "auto" takes the scan it keeps the bound that it promises. Elsewhere
    both sides run torch's kernel, and a difference is the host's."""
    monkeypatch.setattr(choice, "_DEVICES", ("cpu", "cuda"))
    monkeypatch.delattr(choice._C, "rnn_plan", raising=False)  # which asks for a device
    rows = common.read_rows(common.RESULTS / "scan_auto.csv")
    options = argparse.Namespace(
        devices=["cuda"], cells=scan.GRID_CELLS, T=scan.GRID_T, B=scan.GRID_B, H=scan.GRID_H, algorithm="auto"
    )
    grid = {case.name: case for case in scan.grid_cases(options)}
    assert set(grid) <= {row["case"] for row in rows}

    def scans(case: scan.LayerCase) -> bool:
        dtype = common.DTYPES[case.dtype]
        asked = Case(cell=case.cell, device="cuda", dtype=dtype, hidden_size=case.H, batch=case.B, steps=case.T)
        return choice.choose("auto", asked._replace(capability=(9, 0)))[0] == "scan"

    scanned = [row for row in rows if row["case"] in grid and scans(grid[row["case"]])]
    assert len({parse["H"] for parse in (common.parse_case(r["case"]) for r in scanned)}) == len(scan.GRID_H)
    assert not [(r["case"], r["ratio"]) for r in scan.slower_than_torch(scanned)]


@pytest.mark.parametrize("contraction", ["diagonal", "dense"])
def test_residual_finds_a_wrong_step(contraction):
    T, B, H = 7, 2, 3
    b, x0 = torch.randn(T, B, H), torch.randn(B, H)
    A = torch.rand(T, B, H) if contraction == "diagonal" else 0.3 * torch.randn(T, B, H, H)
    x, steps = x0, []
    for t in range(T):
        x = (A[t] * x if contraction == "diagonal" else (A[t] @ x[..., None])[..., 0]) + b[t]
        steps.append(x)
    x = torch.stack(steps)
    assert scan._residual(A, b, x0, x) < 1e-6
    x[3, 1, 2] += 0.1
    assert scan._residual(A, b, x0, x) > 1e-3


def test_residual_finds_a_wrong_gradient():
    A, weight = torch.rand(7, 2, 3), torch.randn(7, 2, 3)
    gradient = weight.clone()
    for t in range(5, -1, -1):
        gradient[t] += A[t + 1] * gradient[t + 1]
    assert scan._residual_of_gradient(A, weight, gradient) < 1e-6
    gradient[3, 1, 2] += 0.1
    assert scan._residual_of_gradient(A, weight, gradient) > 1e-3


def test_diagonal_scans_are_measured_against_their_streams(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_COMMIT", "abc")
    results = common.Results(tmp_path / "results.csv")
    rows = scan._diagonal_entry(16, 2, 40, "bf16", device="cpu").run(results)
    assert [(r["metric"], r["peer"]) for r in rows] == [("forward", "floor"), ("forward_backward", "floor")]
    assert all(float(r["weft"]) > 0 and float(r["peer_value"]) > 0 for r in rows)


def test_host_time_of_small_scans(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_COMMIT", "abc")
    rows = scan._host_entry("cpu").run(common.Results(tmp_path / "scan.csv"))
    assert [(r["metric"], r["unit"], r["peer"]) for r in rows] == [
        ("host_forward", "us", "empty_like"),
        ("host_backward", "us", "empty_like"),
    ]
    assert all(0 < float(r["peer_value"]) < float(r["weft"]) for r in rows)


def test_the_figure_of_diagonal_scans(tmp_path):
    from benchmarks.figures import scan as figures  # here, because it needs matplotlib

    case = "op=linear_scan device=cuda dtype=fp32 layout=diagonal H={} B=8 T={}"
    rows = [row(case.format(16, T), mine=T, peers=T / 2, peer=peer) for T in (64, 128) for peer in ("floor", "other")]
    lone = [row(case.format(32, 64), peer="floor")]
    lines = {"Weft": {64: 64.0, 128: 128.0}, "floor": {64: 32.0, 128: 64.0}, "other": {64: 32.0, 128: 64.0}}
    assert figures.diagonal_points(rows + lone) == {(8, 16): lines}
    figures.draw_diagonal(rows, tmp_path / "figure.svg")
    assert "B 8, H 16" in (tmp_path / "figure.svg").read_text()


def test_grid_measures_what_is_missing_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WEFT_COMMIT", "abc")
    threads = torch.get_num_threads()
    output = tmp_path / "grid.csv"
    arguments = ["grid", "--devices", "cpu", "--cells", "gru", "lstm", "--B", "2", "--H", "4", "--output", str(output)]
    try:
        scan.main([*arguments, "--T", "5"])
        scan.main([*arguments, "--T", "5", "9"])
    finally:
        torch.set_num_threads(threads)
    assert "4 of 4 points measured, 0 skipped" in capsys.readouterr().out
    rows = common.read_rows(output)
    assert [common.parse_case(r["case"])["T"] for r in rows] == ["5", "9", "5", "9"]
    assert all(float(r["weft"]) > 0 and float(r["peer_value"]) > 0 for r in rows)


def test_a_lost_gpu_ends_the_grid(tmp_path, capsys, monkeypatch):
    """What was measured before is kept, and the case that lost it is named."""
    output = tmp_path / "grid.csv"
    arguments = ["grid", "--devices", "cpu", "--cells", "gru", "--T", "2", "3", "4", "--B", "2", "--H", "4"]
    measured = []

    def measure(case, results):
        if measured:
            raise torch.AcceleratorError("an illegal memory access was encountered")
        measured.append(case.name)
        results.put(case.name, "forward_backward", "ms", 1.0, "torch.nn", 2.0)

    monkeypatch.setattr(scan, "_measure_grid_point", measure)
    with pytest.raises(SystemExit) as ended:
        scan.main([*arguments, "--output", str(output)])
    assert ended.value.code
    assert [row["case"] for row in common.read_rows(output)] == measured
    printed = capsys.readouterr()
    assert "the GPU is lost" in printed.out + printed.err + str(ended.value.code)


@pytest.mark.parametrize("cell", scan.GATES)
def test_layer_entries(cell, tmp_path):
    results = common.Results(tmp_path / "results.csv")
    case = scan.LayerCase(cell, 4, 2, 6, inputs=3, device="cpu")
    rows = scan._layer_entry(case).run(results) + scan._error_entry(case).run(results)
    assert [r["metric"] for r in rows] == ["forward", "backward", "forward_backward", "error"]
    assert float(rows[-1]["weft"]) < 1e-5


def test_names_of_rnn_cases():
    assert rnn.RnnCase("gru", 512, 16, 1024, dtype="bf16").name == "cell=gru device=cuda dtype=bf16 H=512 B=16 T=1024"
    packed = "cell=lstm device=cuda dtype=bf16 layout=packed H=512 B=32 T=1024 layers=2 directions=2"
    assert packed == rnn.PACKED.name
    assert rnn.LONG.name == "cell=rnn_tanh device=cuda dtype=fp32 H=20 B=16 T=30000 inputs=1"
    assert rnn.CPU[0].name == "cell=gru device=cpu dtype=fp32 H=128 B=8 T=256 threads=2"
    assert len({case.name for case in rnn.grid_cases()}) == 108
    assert {target.case.name for target in rnn.TARGETS} <= {
        entry.name for device in ("cuda", "cpu") for _, entry in rnn.table(device)
    }


def test_packed_lengths():
    case = rnn.RnnCase("gru", 4, 8, 64, device="cpu", layout="packed")
    sizes = common._batch_sizes(case)
    assert int(sizes[0]) == int(sizes[3]) == 8 and len(sizes) <= 64  # the shortest has T / 16 steps
    assert torch.equal(sizes, common._batch_sizes(replace(case, cell="lstm")))


def test_floor_of_the_exchange():
    cluster = rnn.Layout.of({"tier": "cluster", "groups": 6, "blocks": 16, "threads": 256, "sequences": 3})
    assert cluster == ("cluster", 6, 16, 3)
    assert cluster.floor(rnn.RnnCase("gru", 512, 16, 1024, dtype="bf16")) == pytest.approx(0.47)  # 3 KiB
    assert rnn.exchange_floor("cluster", 1) == 0.40
    assert rnn.exchange_floor("cluster", 8 * 1024) == 0.61
    assert rnn.exchange_floor("grid", 2**30) == 2.2
    for sizes in rnn.EXCHANGE_FLOOR.values():
        assert list(sizes) == sorted(sizes)
        assert [us for _, us in sizes] == sorted(us for _, us in sizes)
    alone = rnn.Layout.of({"tier": "small", "groups": 16, "blocks": 1, "threads": 512, "sequences": 1})
    with pytest.raises(RuntimeError, match="exchanges nothing"):
        alone.floor(rnn.LONG)


def _on_a_small_cpu(monkeypatch) -> None:
    """The table of the GPU with small sizes on the CPU."""

    def small(case: rnn.RnnCase) -> rnn.RnnCase:
        inputs = 4 if case.inputs == case.H else case.inputs
        return replace(case, H=4, inputs=inputs, B=case.B if case.B <= 16 else 3, T=min(case.T, 16), device="cpu")

    for name in ("LARGE", "PACKED", "LONG", "INFERENCE"):
        monkeypatch.setattr(rnn, name, small(getattr(rnn, name)))
    for name in ("DECODE", "STEPS"):
        monkeypatch.setattr(rnn, name, tuple(map(small, getattr(rnn, name))))
    grid = [small(case) for case in rnn.grid_cases() if case.H == 128 and case.B == 16]
    monkeypatch.setattr(rnn, "grid_cases", lambda: iter(grid))
    cells = [
        rnn.CellCase(cell, 4, 2, 3, dtype=dtype, device="cpu") for cell, dtype in (("lstm", "fp32"), ("gru", "bf16"))
    ]
    monkeypatch.setattr(rnn, "cell_cases", lambda device: iter(cells))
    facts = {"why_not": None, "forward": {"tier": "cluster", "groups": 1, "blocks": 16, "sequences": 3}}
    monkeypatch.setattr(rnn, "plan", lambda case, trains: facts)
    quick = {"warmup": 1, "repeats": 2, "at_most": 0.0}
    monkeypatch.setattr(rnn, "measure", lambda candidates, device, at_most: common.measure(candidates, device, **quick))


def test_every_kind_of_rnn_entry_runs(tmp_path, monkeypatch, capsys):
    _on_a_small_cpu(monkeypatch)
    results = common.Results(tmp_path / "rnn.csv")
    entries = [entry for _, entry in rnn.table("cuda")]
    assert common.run_entries(entries, results, minutes=5, patience=60) == []
    found = {(r["metric"], r["unit"], r["peer"]) for r in common.read_rows(tmp_path / "rnn.csv")}
    assert found == {
        ("forward", "ms", "torch.nn"),
        ("forward_backward", "ms", "torch.nn"),
        ("forward_backward", "us", "torch.nn"),
        ("inference", "ms", "torch.nn"),
        ("inference", "us", "torch.nn"),
        ("decode", "us", "torch.nn"),
        ("step_forward", "us", "exchange_floor"),
    }
    rows = list(results.rows.values())
    assert len(rows) == 3 + 4 + 4 + 2 * 2 + 2 * 9
    rnn.report(rows)
    printed = capsys.readouterr().out
    assert "9 points of the grid: geometric mean" in printed
    assert "-              geometric mean" not in printed


def test_rnn_benchmark_on_the_command_line(tmp_path, monkeypatch, capsys):
    threads = torch.get_num_threads()
    output = tmp_path / "rnn.csv"
    case = rnn.RnnCase("gru", 4, 2, 8, device="cpu", threads=2)
    loaded = rnn.LoadedCase("rnn_tanh", 4, 2, 8, device="cpu", threads=2, load=1)
    monkeypatch.setattr(rnn, "CPU", (case, replace(case, cell="lstm")))
    monkeypatch.setattr(rnn, "LOADED", (loaded,))
    monkeypatch.setattr(rnn, "cell_cases", lambda device: iter(()))
    try:
        rnn.main(["cell=gru", "--devices", "cpu", "--output", str(output)])
        assert [r["case"] for r in common.read_rows(output)] == [case.name]
        rnn.main(["--devices", "cpu", "--output", str(output), "--minutes", "0"])
        assert "out of time: 3 of 3 entries left out" in capsys.readouterr().out
        rnn.main(["load=1", "--devices", "cpu", "--output", str(output)])
        assert {r["case"] for r in common.read_rows(output)} == {case.name, loaded.name}
        rnn.main(["forward_backward", "--devices", "cpu", "--output", str(output)])
    finally:
        torch.set_num_threads(threads)
    assert [common.parse_case(r["case"])["cell"] for r in common.read_rows(output)] == ["gru", "lstm", "rnn_tanh"]
    rnn.main(["--report", "--output", str(output)])
    assert "targets:" in capsys.readouterr().out


def test_an_entry_that_fails_costs_no_other(tmp_path, capsys):
    def fails(results: common.Results) -> list[dict[str, str]]:
        raise ValueError("too odd")

    def works(results: common.Results) -> list[dict[str, str]]:
        return [results.put("cell=gru device=cpu dtype=fp32 H=1 B=1 T=1", "forward", "ms", 1.0, "torch.nn", 2.0)]

    entries = [common.Entry("odd", ("forward",), fails), common.Entry("even", ("forward",), works)]
    results = common.Results(tmp_path / "results.csv")
    failures = common.run_entries(entries, results)
    assert failures == ["odd: too odd"]
    assert "FAILED odd: too odd" in capsys.readouterr().out
    assert len(common.read_rows(tmp_path / "results.csv")) == 1
    with pytest.raises(SystemExit, match="1 entries failed"):
        common.exit_with(failures)


def test_an_entry_that_hangs_ends_the_process(tmp_path, monkeypatch, capsys):
    left = []
    monkeypatch.setattr(common.os, "_exit", left.append)
    entry = common.Entry("stuck", ("forward",), lambda results: time.sleep(0.5) or [])
    common.run_entries([entry], common.Results(tmp_path / "results.csv"), patience=0.1)
    assert left == [1]
    assert "GIVEN UP stuck: not done after 0.1 s" in capsys.readouterr().out


def _rnn_rows(ratio: float = 8.0) -> list[dict]:
    """Invented rows for every case of the table."""
    rows = []
    for device in ("cuda", "cpu"):
        for _, entry in rnn.table(device):
            for metric in entry.metrics:
                floor = metric == "step_forward"
                peer = {"peer": "exchange_floor", "unit": "us"} if floor else {}
                rows.append(row(entry.name, metric, 1.0, 0.5 if floor else ratio, **peer))
    return rows


def test_verdicts():
    rows = _rnn_rows()
    assert all(verdict.holds for verdict in rnn.verdicts(rows))
    assert all(verdict.holds is None for verdict in rnn.verdicts([]))
    grid = [r for r in rows if r["case"] in rnn.grid_rows(rows)]
    rows.remove(next(r for r in grid if r["metric"] == "forward_backward"))
    assert [v.words for v in rnn.verdicts(rows) if v.holds is None][:2] == [
        "geometric mean of the grid, at least 5x",
        "worst case of the grid, at least 1x",
    ]
    slow = rnn.verdicts(_rnn_rows(ratio=1.25))
    failed = [v.words for v in slow if not v.holds]
    assert failed[0].startswith("geometric mean") and "at least 1.2x" not in " ".join(failed)
    assert any("at most 3 us per step" in v.words and v.holds for v in slow)
    late = [{**r, "weft": "3.2"} for r in _rnn_rows()]
    assert [v.value for v in rnn.verdicts(late) if not v.holds] == [3.125, 3.125]


NOT_REACHED: frozenset[str] = frozenset()
"""Targets of the rnn engine, in the words of their verdicts, that the committed rows do not reach."""


def test_targets_that_were_reached_are_held():
    rows = common.read_rows(common.RESULTS / "rnn.csv")
    if not rows:
        pytest.skip("results/rnn.csv is not there yet")
    found = rnn.verdicts(rows)
    assert {v.words for v in found if v.holds is False} == NOT_REACHED
    devices = {common.parse_case(r["case"])["device"] for r in rows}
    missing = [v.words for v in found if v.holds is None]
    assert not [words for words in missing if any(f"device={device}" in words for device in devices)]
    assert not [words for words in missing if "grid" in words]
    assert {r["case"] for r in rows if r["metric"] == "step_forward"} == {case.name for case in rnn.STEPS}


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
        monkeypatch.setattr(choice._C, "rnn_plan", lambda facts=facts, **_: facts, raising=False)
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
    gpu, _ = _costs.read(tmp_path / "costs.json")
    assert (tmp_path / "costs.json").read_text() == fit.path_of(gpu).read_text()
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
    weft._C.add_costs({"line": _costs._by_kind(table)}, name="line", **FACTS)
    found = _costs.Costs(*weft._C.costs_of(name="line", **FACTS))
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
    for case in rnn.DECODE:
        rows.append(fit.Row("fit", fit.case_of(common.parse_case(case.name), "decode"), "decode", "auto", 15.0, 100.0))
    return rows


def test_what_is_measured_is_enough_for_every_layers_table():
    """On a GPU without other rows; the numbers are found again, as far as the host does not cover them."""
    _, before = _costs.read(fit.path_of({"name": "NVIDIA H200"}))
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
    tables = fit.before(gpu)
    _, h200 = _costs.read(fit.path_of({"name": "NVIDIA H200"}))
    assert tables.keys() == h200.keys() and fit.path_of(gpu).name == "nvidia-half.json"
    assert tables["products"]["chip"]["half_teraflop"] == 4 * h200["products"]["chip"]["half_teraflop"]
    assert tables["rnn.host"]["fixed"] == h200["rnn.host"]["fixed"]
    assert tables["rnn.scan_warp.gru"]["from"] == "extrapolated from NVIDIA H200"
    path = tmp_path / "half.json"
    path.write_text(fit.text_of(gpu, tables))
    assert _costs.read(path) == (gpu, tables)


def test_stages_are_corrected():
    """By what the points tell of them; a stage that none has stays as it was."""
    _, tables = _costs.read(fit.path_of({"name": "NVIDIA H200"}))
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
        assert numbers.keys() - {n for some in stages.NUMBERS[name].values() for n in some} <= {"launches"}
        for stage, times in (("products", 2.0), ("boundaries", 0.5), ("replay", 3.0)):
            for n in stages.NUMBERS[name][stage]:
                assert np.asarray(numbers[n]) == pytest.approx(times * np.asarray(before[n]), rel=0.05), (name, n)
        assert numbers.get("launches") == before.get("launches") and "40 scans, rms" in table["from"]
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

    monkeypatch.setattr(stages.weft._C, "rnn_scan_expected", expected, raising=False)
    monkeypatch.setattr(stages.weft._C, "linear_scan_expected", expected, raising=False)
    timed = [*stages.chains("cpu"), *stages.linear_scans("cpu")]
    assert {1, 5} <= set(chosen) and stages.VARIABLE not in os.environ
    assert {t.table for t in timed} == stages.NUMBERS.keys()
    assert all(t.us > 0 and t.launches == 6 and t.stages == (1.0, 2.0, 3.0) for t in timed)


def test_the_fit_of_a_gpu_writes_its_file(tmp_path, monkeypatch):
    """With what is measured of it invented."""
    gpu = {"name": "NVIDIA Half", "capability": 90, "multiprocessors": 66, "clock_mhz": 990.0, "bandwidth_gbs": 4917.0}
    monkeypatch.setattr(fit.weft._C, "gpu_facts", lambda index: gpu, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    products = {"from": "test", "chip": dict.fromkeys(("half_teraflop", "tf32_teraflop", "float_teraflop"), 1.0),
                "fixed": {"launch": 9.0}}  # fmt: skip
    monkeypatch.setattr(fit, "measured_products", lambda: products)
    scans = [stages.Timed("rnn.scan_warp.gru", 206.0, 6.0, (0.0, 0.0, 100.0))] * 50
    monkeypatch.setattr(stages, "measured", lambda minutes: scans)
    chains = dict.fromkeys(
        ("link", "aligned", "dense", "listed", "windowed", "vector", "product", "call", "layer"), 3.25
    )
    monkeypatch.setattr(sparse, "fit", lambda device: chains)
    monkeypatch.setattr(fit, "measure_layers", lambda minutes: ["one: too odd"])
    monkeypatch.setattr(fit, "rows", lambda name: _fast_gpu_rows(2.0))

    def lost(*arguments):
        raise torch.AcceleratorError("the GPU is lost")

    monkeypatch.setattr(geometries, "measure", lost)
    with pytest.raises(SystemExit, match="2 entries failed:\nrecurrence: the GPU is lost\none: too odd"):
        fit.main(["--minutes", "1", "--output", str(tmp_path / "half.json")])
    found, tables = _costs.read(tmp_path / "half.json")
    assert found == gpu and tables["products"] == products and "rows" in tables["rnn.scan.gru.32"]["from"]
    assert tables["rnn.recurrence.grid.forward"]["from"] == "extrapolated from NVIDIA H200"
    assert {
        n: v for kind in ("clock", "chip", "memory", "fixed") for n, v in tables[sparse.COSTS][kind].items()
    } == chains
    assert "50 scans" in tables["rnn.scan_warp.gru"]["from"] and tables.keys() == _costs.reference().tables.keys()


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


def test_tables_and_figures_come_from_rows_alone(tmp_path, monkeypatch):
    from benchmarks import plot  # here, because it alone needs matplotlib

    rows = [
        row(f"cell=rnn_tanh device=cuda dtype=fp32 H=20 B=16 T={T} inputs=1", "backward", 1.0, T / 100)
        for T in (1000, 30000)
    ]
    rows.append(row("cell=gru device=cuda dtype=fp32 H=20 B=16 T=1000 inputs=1", "error", 1e-7, 2e-7, unit="relative"))
    rows.append(
        row(
            "cell=lstm device=cuda dtype=fp32 H=20 B=16 T=30000 inputs=1",
            "memory_beyond_torch",
            -1e6,
            1.536e8,
            unit="bytes",
            peer="gate_activations",
        )
    )
    block = plot.readme_block({"scan": rows})
    assert "| tanh RNN, H 20, B 16, T 30000, fp32, 1 input | backward | 1.0 ms | torch.nn: 300.0 ms | 300x |" in block
    assert "error" not in block and "LSTM" not in block and "minGRU" not in block
    case = "cell=mingru model=char_lm device=cpu dtype=fp32 H=128 B=32 T=64 seconds=30"
    bits = row(case, "bits_per_character", 1.9, 1.8, unit="bits", peer="gru")
    speed = row(case, "throughput", 81903.0, 163549.0, unit="characters/s", peer="gru")
    block = plot.readme_block({"scan": [*rows, bits, speed]})
    assert "| a GRU | 1.800 | 163,549 |\n| three minGRUs | 1.900 | 81,903 |" in block and "30 s each" in block
    assert plot.readme_block({}) == plot.NO_ROWS
    readme = f"a\n{plot.BEGIN}\nold\n{plot.END}\nb"
    assert plot.with_block(plot.with_block(readme, "new"), "newer") == f"a\n{plot.BEGIN}\n\nnewer\n\n{plot.END}\nb"

    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    plot.write_docs(tmp_path / "empty")
    assert (tmp_path / "empty" / "scan.rst").read_text() == plot.NO_ROWS + "\n"
    for name, content in (("scan", rows), ("scan_auto", [row("cell=gru device=cuda dtype=fp32 H=8 B=2 T=30")])):
        results = common.Results(tmp_path / f"{name}.csv")
        results.rows = {results._key(r): r for r in content}
        results.save()
    plot.write_docs(tmp_path / "full")
    text = (tmp_path / "full" / "scan.rst").read_text()
    assert "     - -1.00 MB\n     - bytes of the gates' activations: 154 MB\n" in text
    assert "list-table:: GPU, torch 2.11.0, CUDA 13.0" in text
    for name in ("scan_backward", "scan_auto"):
        assert f"full/{name}.svg" in text
        first = (tmp_path / "full" / f"{name}.svg").read_bytes()
        assert first.startswith(b"<?xml")
        plot.write_docs(tmp_path / "full")
        assert (tmp_path / "full" / f"{name}.svg").read_bytes() == first


def test_the_figure_of_the_backward_pass_is_of_one_size():
    from benchmarks.figures import scan as scan_figures  # here, because it alone needs matplotlib

    def rows_of(H, inputs, steps, gpu="GPU"):
        case = "cell=rnn_tanh device=cuda dtype=fp32 H={} B=16 T={} inputs={}"
        return [row(case.format(H, T, inputs), "backward", 1.0, 2.0) | {"gpu": gpu} for T in steps]

    wanted = rows_of(20, 1, (1000, 3000, 10000))
    others = rows_of(64, 1, (1000, 10000)) + rows_of(20, 2, (10000,)) + rows_of(20, 1, (30000,), "another")
    assert scan_figures.backward_points(others[:2] + wanted + others[2:]) == wanted
    assert scan_figures.backward_points([]) == []


def test_the_rnn_engines_tables_and_figure(tmp_path, monkeypatch):
    from benchmarks import figures, plot  # here, because it alone needs matplotlib

    rows = _rnn_rows()
    block = plot.readme_block({"rnn": rows})
    assert "![Speed-up" in block and "108 cases on GPU: torch.nn takes 8 times as long" in block
    worst = next(iter(rnn.grid_rows(rows)))
    slow = [r | {"ratio": "0.5"} if (r["case"], r["metric"]) == (worst, "forward_backward") else r for r in rows]
    table = [line for line in plot.readme_block({"rnn": slow}).splitlines() if line.startswith("| ")]
    assert len(table) == 6 and table[2].startswith(f"| {figures.describe(worst)} |") and table[2].endswith("| 0.500x |")
    assert "On GPU" not in block and "GPU, torch 2.11.0." in block  # the CPU's row, without CUDA

    monkeypatch.setattr(plot, "RESULTS", tmp_path)

    def docs_of(some: list[dict]) -> str:
        results = common.Results(tmp_path / "rnn.csv")
        results.rows = {results._key(r): r for r in some}
        results.save()
        plot.write_docs(tmp_path / "figures")
        return (tmp_path / "figures" / "rnn.rst").read_text()

    assert docs_of([]) == plot.NO_ROWS + "\n"
    text = docs_of(rows)
    assert "   * - LSTM, bf16, B 64\n     - 1.0 (8.00x)\n" in text
    first = (tmp_path / "figures" / "rnn_speedup.svg").read_bytes()
    docs_of(rows)
    assert (tmp_path / "figures" / "rnn_speedup.svg").read_bytes() == first
    # Any part of the rows will do.
    grid = set(rnn.grid_rows(rows))
    few = [r for r in rows if r["case"] in sorted(grid)[:5]]
    assert "     -\n" in docs_of(few) and "5 cases" in plot.readme_block({"rnn": few + rows[:1]})
    rest = [r for r in rows if r["case"] not in grid]
    assert "image" not in docs_of(rest)
    assert "Speed-up" not in plot.readme_block({"rnn": rest})


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
def test_waking_autograd_launches_nothing() -> None:
    one = torch.ones(1, device="cuda")
    common._wake_autograd()
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        one.neg()
        common._wake_autograd()
        torch.cuda.synchronize()
    (negation,) = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert "neg" in negation.name


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


def test_packages_compares_a_model_before_and_after(monkeypatch):
    class Left(torch.nn.GRU):
        def forward(self, input, hx=None):
            return super().forward(input, hx)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = torch.nn.LSTM(3, 4), Left(4, 4), torch.nn.Dropout(0.5)

        def forward(self, x):
            return {"output": self.third(self.second(self.first(x)[0])[0]), "number": torch.ones(2, dtype=torch.int64)}

    x = torch.randn(7, 2, 3)
    row = packages.compare("torch", ("Model", Model, lambda model: model(x)))
    assert list(row) == packages.COLUMNS and row["swapped"] == 1
    assert row["left"].startswith("second (") and row["left"].endswith("overrides forward")
    assert all(0 < float(row[name]) < 1e-5 for name in ("outputs", "gradients", "losses"))
    torch.manual_seed(0)
    monkeypatch.setattr(packages.weft, "accelerate", lambda model, **_: model.requires_grad_(True).apply(halve))
    assert float(packages.compare("torch", ("Model", Model, lambda model: model(x)))["outputs"]) > 0.1


def halve(module):
    for parameter in module.parameters(recurse=False):
        parameter.data /= 2


def test_packages_results_agree():
    rows = list(csv.DictReader(packages.RESULTS.open(newline="")))
    assert len({row["package"] for row in rows}) >= 10 and list(rows[0]) == packages.COLUMNS
    for row in rows:
        assert row["package"] in packages.CASES
        # Adam amplifies what rounding leaves.
        assert float(row["outputs"]) < 1e-5 and float(row["gradients"]) < 1e-3 and float(row["losses"]) < 1e-3, row
        assert bool(int(row["swapped"])) != bool(row["left"])


def test_language_models(monkeypatch, tmp_path):
    """Both models are trained, and tell the characters of the text from others. (How far they come in so short a time
    is the machine's.)"""
    monkeypatch.setattr(scan, "python_docs", lambda: "the weft goes over and under the warp. " * 2000)
    results = common.Results(tmp_path / "scan.csv")
    bits, speed = scan._language_model_entry("cpu", 0.3).run(results)
    assert bits["metric"] == "bits_per_character" and speed["unit"] == "characters/s"
    for column in ("weft", "peer_value"):
        assert 0 < float(bits[column]) < 6 and float(speed[column]) > 0
