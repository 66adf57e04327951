"""benchmarks.vertex on the CPU: its level loops compute what the models do, and every kind of entry runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import weft
from weft import Graphs

from benchmarks import level_loops, nets, persistent, tree_training, vertex
from benchmarks.common import Results, parse_case, read_rows, relative_error


@pytest.fixture
def trees() -> list[weft.data.Tree]:
    """With words at the leaves alone, as the treebank has them."""
    found = weft.data.listops(40, max_arity=2, max_depth=8)
    return [
        weft.data.Tree(t.children, [None if c else s for c, s in zip(t.children, t.symbols, strict=True)], t.labels)
        for t in found
    ]


def graphs_of(trees: list[weft.data.Tree]) -> Graphs:
    return Graphs.from_children([tree.children for tree in trees])


def test_the_level_loops_are_the_models(trees):
    shared = Graphs.from_children([level_loops.shared_subtrees(tree) for tree in weft.data.listops(10)])
    for name, graphs in (
        ("treelstm", graphs_of(trees)),
        ("childsum", graphs_of(trees)),
        ("childsum", shared),
        ("treefc", level_loops.complete_trees(16, 3)),
        ("treefc", graphs_of(trees)),
    ):
        step = level_loops.Step(name, graphs, 8, "cpu", executor="reference")
        loop = level_loops.LevelLoop(step.model, graphs, "cpu")
        step.check(name, step.peer(loop))
        step.model.U.weight.data.mul_(1.01)
        before = step.peer(loop)
        step.model.U.weight.data.div_(1.01)
        with pytest.raises(RuntimeError, match="differs"):
            step.check(name, before)


def test_shared_subtrees():
    tree = weft.data.Tree([[], [], [0, 1], [], [2, 3]], ["a", "a", "f", "b", "g"], [0] * 5)
    assert level_loops.shared_subtrees(tree) == [[], [0, 0], [], [1, 2]]


def test_complete_trees():
    graphs = level_loops.complete_trees(8, 2)
    assert (graphs.num_vertices, graphs.num_levels) == (30, 4)
    assert torch.bincount(graphs.levels).tolist() == [16, 8, 4, 2]


def test_every_kind_of_entry_runs(tmp_path, trees, monkeypatch):
    for module in (level_loops, tree_training, vertex):
        monkeypatch.setattr(
            module, "measure", lambda candidates, device, **_: {n: once(c) for n, c in candidates.items()}
        )
    monkeypatch.setattr(vertex, "host_time", lambda run, prepare, device: run(prepare()) is None or 1.0)

    def once(candidate) -> float:
        candidate.run(candidate.prepare())
        return 2.0

    def small() -> Graphs:
        return graphs_of(trees)

    entries = [
        level_loops.loop_entry("treelstm", small, 8, 40, "cpu", peers=("eager", "captured", "floor")),
        level_loops.loop_entry("treelstm", small, 8, 40, "cpu", autocast=True),
        level_loops.loop_entry("childsum", small, 8, 40, "cpu", data="listops", peers=("eager", "floor")),
        vertex._chain_entry("packed", lambda: [3, 7, 1], 8, 3, "cpu"),
        vertex._chain_entry("dense", lambda: [4] * 3, 8, 3, "cpu", T=4),
        vertex._schedule_entry(trees, 8, 10, "cpu"),
        *vertex._ablation_entries(small, 8, 40, "cpu"),
        *tree_training.training_table(trees, 8, ("treelstm", "typed", "childsum", "treefc"), (10,), "cpu"),
    ]
    results = Results(tmp_path / "vertex.csv")
    rows = [row for entry in entries for row in entry.run(results)]
    results.save()
    assert {row["peer"] for row in rows} == {
        "eager", "floor", "torch.nn", "step", "seen", "none", "untyped", "without_cell"
    }  # fmt: skip
    assert {row["metric"] for row in rows} == {
        "forward_backward", "schedule", "step", "steps_in_a_row", "throughput"
    }  # fmt: skip
    for row in rows:
        case = parse_case(row["case"])
        assert list(case)[:3] == ["model", "device", "dtype"]
        assert case["executor"] == ("auto" if "task" in case else "batched")
        assert float(row["weft"]) > 0 and float(row["peer_value"]) > 0
    assert len(results.rows) == len(rows)


def test_training_steps_learn_and_are_the_loops(trees):
    for name in ("treelstm", "typed"):
        step = tree_training.Training(name, tree_training.Data.of(trees, name == "typed"), 8, 20, "cpu")
        step.check(name)
        step.RATE = 0.5
        losses = [float(step.weft(step.collate())) for _ in range(40)]
        assert losses[-1] < 0.9 * losses[0]
    assert 0 < tree_training.host_of_cell(step, rounds=1) < 1e4
    graphs, words, _ = step.batch()
    assert weft.explain(step.cell, graphs, step.embedding(words)).executor == "batched"


def test_the_tables_are_the_issue(trees):
    cuda = {(entry.name, entry.metrics) for entry in vertex.table("cuda", trees)}
    names = {name for name, _ in cuda}
    for B in (1, 25, 64, 256):
        assert f"model=treelstm device=cuda dtype=fp32 H=256 B={B} executor=batched" in names
    for model in ("treelstm", "typed", "childsum", "treefc"):
        for B in (1, 25, 256):
            assert (
                f"model={model} device=cuda dtype=fp32 H=256 B={B} executor=auto task=train",
                ("step", "host_of_cell"),
            ) in cuda
    assert len(cuda) >= 30
    # Without the treebank what remains needs none.
    assert {parse_case(entry.name)["model"] for entry in vertex.table("cuda", None)} == {
        "treefc",
        "treelstm",
        "chainlstm",
        "childsum",
        "own",
    }
    assert list(vertex.table("cpu", None)) == []


@pytest.fixture
def sentences() -> list[weft.data.Sentence]:
    return [weft.data.Sentence(["Rome", "is", "old"], ["P", "V", "A"]), weft.data.Sentence(["Paris"], ["P"])] * 3


@pytest.mark.parametrize("name", nets.NETS)
def test_six_nets(name, trees, sentences):
    """Each is compiled, and the Trainer's losses are the loop's."""
    training = nets.Training(name, nets.data_of(name, trees, sentences), 3, "cpu", H=64)
    assert training.runs_as("batched") == "batched" and training.runs_as("trainer") == "batched"
    nets.compile_all(name, training.data, "cpu")  # where there is nothing to compile, steps alone
    want = training.losses(training.by("reference"))
    for step in (training.by("batched"), training.by("auto"), training.trainer(), training.trainer()):
        assert relative_error(training.losses(step), want) < 1e-4
    assert len({float(x) for x in want}) > 1
    gradients = training.gradients_by("batched")()
    assert all(g.shape == p.shape for g, p in zip(gradients, training.parameters, strict=True))


def test_nets_go_on_where_they_were_cut_off(tmp_path, trees, sentences, monkeypatch, capsys):
    """Rows and the means of them are kept as they come; what fails costs the others nothing."""
    results, done = Results(tmp_path / "vertex.csv"), []
    stop_at = 5

    def once(candidates, device, **_):
        for candidate in candidates.values():
            candidate.run(candidate.prepare())
        done.append({*candidates})
        if len(done) == stop_at:
            raise KeyboardInterrupt
        return {
            name: persistent.STEPS * (1.0 if name in ("trainer", "auto") else 2.0 + name.startswith("loop"))
            for name in candidates
        }

    monkeypatch.setattr(persistent, "measure", once)
    monkeypatch.setattr(nets, "BATCHES", (1, 2, 3))
    monkeypatch.setattr(nets, "hidden_of", lambda name: 8)
    monkeypatch.setattr(nets.Training, "runs_as", lambda self, executor: executor)
    entry = persistent.nets_entry(lambda name: nets.data_of(name, trees, sentences), ("treelstm", "bilstm"), "cpu")
    with pytest.raises(KeyboardInterrupt):
        entry.run(results)
    assert all(names == {"persistent", "batched", "auto", "trainer", "loop"} for names in done)

    def means() -> dict[str, str]:
        rows = read_rows(tmp_path / "vertex.csv")
        return {row["case"]: row["ratio"] for row in rows if "model=nets" in row["case"]}

    case = "model=nets device=cpu dtype=fp32 executor={} nets=2 cases=4"
    ratios = {"persistent": "1.000", "trainer": "3.000", "auto": "2.000"}
    assert means() == {case.format(e): ratio for e, ratio in ratios.items()}
    measured = [parse_case(row["case"]) for row in read_rows(tmp_path / "vertex.csv")]
    assert {(case["model"], case["executor"]) for case in measured} == {
        (model, e) for model in ("treelstm", "bilstm", "nets") for e in ratios
    }
    assert "model=bilstm" in capsys.readouterr().out
    later = Results(tmp_path / "vertex.csv")
    stop_at, done[:] = 3, []
    with pytest.raises(KeyboardInterrupt):
        entry.run(later)
    assert means() == {case.format(e).replace("=4", "=6"): ratio for e, ratio in ratios.items()}
    another = {**next(iter(later.rows.values())), "case": case.format("trainer"), "gpu": "another"}
    later.rows["another"] = another

    def fails(self, B: int) -> dict[str, float]:
        if B == 1:
            raise RuntimeError("out of memory")
        return dict.fromkeys(("persistent", "batched", "auto"), 1.0)

    monkeypatch.setattr(persistent._Nets, "times", fails)
    with pytest.raises(RuntimeError, match=r"treelstm B=1: out of memory; bilstm B=1: out of memory$"):
        entry.run(later)
    assert means()[case.format("persistent").replace("=4", "=6")] == "1.000"
    assert later.rows["another"] is another, "means on other GPUs stay"


def test_entries_of_the_persistent_executor(tmp_path, trees, sentences, monkeypatch):
    """As on CUDA, with what takes its place here; where it does not run, no row is written."""
    monkeypatch.setattr(nets, "BATCHES", (3,))
    monkeypatch.setattr(nets, "hidden_of", lambda name: 8)
    results = Results(tmp_path / "vertex.csv")
    entries = [
        level_loops.loop_entry("treelstm", lambda: graphs_of(trees), 8, 40, "cpu", executor="persistent"),
        persistent.level_entry(8, "cpu"),
        persistent.net_entry("treelstm", lambda: nets.data_of("treelstm", trees, sentences), 3, "cpu", H=8),
        persistent.nets_entry(lambda name: nets.data_of(name, trees, sentences), ("rvnn",), "cpu"),
        persistent.recurrent_entry("own", 8, torch.float32, "cpu", 2, 3),
    ]
    for module in (level_loops, persistent):
        monkeypatch.setattr(module, "captured", lambda run: run)
    assert [entry.run(results) for entry in entries] == [[]] * 5 and not results.rows

    def once(candidate) -> float:
        candidate.run(candidate.prepare())
        return 2.0

    for module in (level_loops, persistent):
        monkeypatch.setattr(
            module, "measure", lambda candidates, device, **_: {n: once(c) for n, c in candidates.items()}
        )
    monkeypatch.setattr(persistent, "device_busy", lambda run: 1.0)
    monkeypatch.setattr(level_loops.Step, "runs", lambda self: True)
    monkeypatch.setattr(nets.Training, "runs_as", lambda self, executor: executor)
    explain = weft.explain

    def explained(*args, **options):
        return dataclasses.replace(explain(*args, **options), executor="persistent")

    monkeypatch.setattr(weft, "explain", explained)
    entries.append(persistent.recurrent_entry("chainlstm", 8, torch.float32, "cpu", 2, 3))
    rows = [row for entry in entries for row in entry.run(results)]
    found = {(parse_case(row["case"])["executor"], row["metric"], row["peer"]) for row in rows}
    steps = {("trainer", "step", p) for p in ("persistent", "batched", "reference", "eager", "captured", "device_busy")}
    assert steps | {("persistent", "forward_backward", p) for p in ("eager", "batched", "captured", "weft.nn")} <= found
    assert ("auto", "forward_backward", "best") in found and ("persistent", "level_forward", "batched") in found


def test_the_persistent_table(trees, sentences):
    entries = [*persistent.persistent_table(trees, sentences)]
    nets_of = [entry for entry in entries if entry.metrics == ("forward_backward", "step")]
    assert len(nets_of) == 4 + 1 and len({entry.name for entry in entries}) == len(entries)
    few = [*persistent.persistent_table(None, None)]
    assert {parse_case(entry.name)["model"] for entry in few} == {"treelstm", "chainlstm", "own"}


def test_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vertex, "treebank", lambda folder: None)
    vertex.main(["--devices", "cpu", "--output", str(tmp_path / "rows.csv")])
    assert "left out" in capsys.readouterr().out
