"""The examples run, and do what they say on a small scale."""

from __future__ import annotations

import math
import random
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "accelerate_lm.py": "--algorithm",
    "bitstream.py": "--algorithm",
    "char_lm.py": "--algorithm",
    "digits.py": "--cells",
    "greedy_decoder.py": "--algorithm",
    "long_context.py": "--length",
    "mingru.py": "--hidden",
    "own_cell.py": "--hidden",
    "slstm_lm.py": "--heads",
    "six_nets.py": "--net",
    "treelstm_ast.py": "--executor",
    "treelstm_sst.py": "--executor",
}


@pytest.fixture(autouse=True)
def _beside_each_other(tmp_path, monkeypatch):
    """A script finds examples/curves.py beside itself; its figure goes to a folder of this test's."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


def example(name: str) -> dict:
    return runpy.run_path(str(ROOT / "examples" / name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert not ended.value.code and "--quick" in printed and EXAMPLES[name] in printed


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("char_lm.py", ["--steps", "0"]),
        ("lenet_scan.py", ["--steps", "0"]),
        ("lenet_scan.py", ["--batch", "0"]),
        ("mingru.py", ["--hidden", "0"]),
        ("own_cell.py", ["--show", "0"]),
        ("mingru.py", ["--steps", "0"]),
        ("slstm_lm.py", ["--heads", "0"]),
        ("slstm_lm.py", ["--heads", "3"]),
        ("six_nets.py", ["--hidden", "6"]),
        ("six_nets.py", ["--batch", "0"]),
        ("treelstm_ast.py", ["--epochs", "0"]),
        ("treelstm_ast.py", ["--batch", "0"]),
        ("treelstm_sst.py", ["nowhere", "--epochs", "0"]),
        ("vgg11_pruned.py", ["--steps", "0"]),
        ("vgg11_pruned.py", ["--sparsity", "2"]),
    ],
)
def test_arguments_out_of_range_are_refused_before_any_work(name, arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        example(name)["main"](arguments)
    assert arguments[-2] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("six_nets.py", ["nowhere"], "nowhere: no train.txt with a dev.txt here; name the folder"),
        ("six_nets.py", ["nowhere", "--net", "bilstm"], "nowhere: no dev.txt here; name the folder of WikiNER"),
        ("treelstm_sst.py", ["nowhere"], "nowhere: no train.txt and no dev.txt here; name the folder"),
        ("vgg11_pruned.py", ["--quick", "--data", "nowhere"], "--data: no data_batch_* in nowhere; name the"),
        ("char_lm.py", ["--text", "nowhere"], "--text: cannot read nowhere as UTF-8: "),
    ],
)
def test_data_that_is_not_there_is_one_sentence(name, arguments, message):
    with pytest.raises(SystemExit) as ended:
        example(name)["main"](arguments)
    assert str(ended.value).startswith(message) and "\n" not in str(ended.value)


def test_every_example_shows_progress_and_draws():
    # What runs in another package's trainer shows that one's progress.
    names = {path.name for path in (ROOT / "examples").glob("*.py")} - {
        "curves.py",
        "offload_lightning.py",
        "offload_trainer.py",
    }
    assert {*EXAMPLES, "lenet_scan.py", "offload_fsdp.py", "offload_vgg.py", "vgg11_pruned.py"} == names
    for name in names:
        text = (ROOT / "examples" / name).read_text()
        assert "tqdm(" in text and re.search(r"\b(?:draw|off\.plot|offload\.plot)\(options\.output", text), name


def test_curves(tmp_path, capsys):
    figure = tmp_path / "figure.png"
    example("curves.py")["draw"](figure, "title", {"one": [(0, 1.0)], "two": list(enumerate([3.0, 2.0]))})
    assert figure.stat().st_size > 1000 and capsys.readouterr().out == f"drawn to {figure}\n"


def test_offload_vgg(tmp_path, capsys):
    figure = tmp_path / "timeline.png"
    arguments = ["--quick", "--device", "cpu", "--backend", "reference", "--budget", "400KB", "--output", str(figure)]
    report = example("offload_vgg.py")["main"](arguments).to_dict()
    assert report["budget_met"] and 0 < report["moved_bytes"] < report["saved_bytes"]
    printed = capsys.readouterr().out
    assert "the same bits" in printed and "moved" in printed
    assert figure.stat().st_size > 1000


def test_mingru(capsys):
    # Ten steps of training: not far from answering 0, whose loss is 1.
    assert 0 < example("mingru.py")["main"](["--quick", "--device", "cpu"]) < 4
    difference = capsys.readouterr().out.split("states differ by ")[1]
    assert float(difference) < 1e-4


def test_own_cell(capsys):
    assert 0 <= example("own_cell.py")["main"](["--quick", "--device", "cpu"]) <= 1
    printed = capsys.readouterr().out
    difference = next(line for line in printed.splitlines() if "largest relative gradient difference" in line)
    assert float(difference.split("│")[2]) < 1e-4
    assert "pointwise_scan" in printed.split("one sequence of digits:")[1]


def test_slstm_lm(tmp_path, capsys):
    arguments = ["--quick", "--device", "cpu", "--output", str(tmp_path / "slstm.png")]
    reached = example("slstm_lm.py")["main"](arguments)
    assert reached.keys() == {"sLSTM", "LSTM", "minGRU"} and all(0 < share < 1 for share in reached.values())
    printed = capsys.readouterr().out
    assert "bits per character" in printed and "right at 160" in printed


def test_long_context(tmp_path, capsys):
    arguments = ["--quick", "--output", str(tmp_path / "long.png")]
    losses = example("long_context.py")["main"](arguments)
    assert len(losses) == 3 and math.isclose(losses[0], math.log(128), rel_tol=0.1) and losses[-1] < losses[0]
    assert (tmp_path / "long.png").stat().st_size > 1000 and "rank 0 of 1:" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["auto", "persistent", "scan", "torch"])
def test_char_lm(algorithm, capsys):
    bits = example("char_lm.py")["main"](["--quick", "--device", "cpu", "--algorithm", algorithm])
    # Five steps of training: near the uniform distribution over some 85 characters, 6.4 bits.
    assert 4.0 < bits < 7.5
    printed = capsys.readouterr().out
    assert "largest relative gradient difference" in printed
    difference = next(line for line in printed.splitlines() if "largest relative gradient difference" in line)
    assert float(difference.split("│")[2]) < 1e-4
    ran = next(line for line in printed.splitlines() if line.startswith("│ algorithm")).split("│")[2].strip()
    assert ran in (("persistent", "scan") if algorithm == "auto" else (algorithm,))


def test_char_lm_with_a_mingru_beside(tmp_path, capsys):
    text = tmp_path / "own.txt"
    text.write_text("the weft goes over and under the warp. " * 400)
    arguments = ["--cell", "mingru", "--text", str(text), "--hidden", "32", "--batch", "8", "--length", "32"]
    bits = example("char_lm.py")["main"]([*arguments, "--steps", "150", "--sample", "10", "--device", "cpu"])
    assert bits < 1.5
    table = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in table] == ["GRU", "minGRU"]
    assert float(table[0][2]) < 1.0 and float(table[1][2]) == pytest.approx(bits, abs=1e-3)
    assert all(float(row[3].replace(",", "")) > 0 for row in table)


@pytest.mark.parametrize("algorithm", ["auto", "torch"])
def test_greedy_decoder(algorithm, capsys):
    assert example("greedy_decoder.py")["main"](["--quick", "--device", "cpu", "--algorithm", algorithm]) > 0.8
    assert Path("greedy_decoder.png").stat().st_size > 1000
    assert f"({'fused' if algorithm == 'auto' else 'torch'})" in capsys.readouterr().out


def test_char_lm_learns_a_text_of_the_users_own(tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("the weft goes over and under the warp. " * 400)
    arguments = ["--text", str(text), "--hidden", "32", "--batch", "8", "--length", "32", "--steps", "150"]
    bits = example("char_lm.py")["main"]([*arguments, "--sample", "10", "--device", "cpu"])
    assert bits < 1.0


def test_char_lm_refuses_a_text_that_is_too_short(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("abc" * 20)
    with pytest.raises(SystemExit, match="too short"):
        example("char_lm.py")["main"](["--text", str(text), "--device", "cpu"])


def test_bitstream_curves_agree(tmp_path):
    figure = tmp_path / "curve.png"
    curves = example("bitstream.py")["main"](["--quick", "--device", "cpu", "--output", str(figure)])
    assert figure.stat().st_size > 1000
    mine, torchs = curves["Weft"], curves["torch.nn"]
    assert mine.steps == torchs.steps == 10
    assert mine.loss == pytest.approx(torchs.loss, rel=1e-5)
    assert all(math.isfinite(loss) for loss in mine.loss)


@pytest.mark.parametrize("algorithm", ["auto", "persistent"])
def test_accelerate_lm(algorithm, capsys):
    arguments = ["--quick", "--device", "cpu", "--dtype", "float32", "--algorithm", algorithm]
    speeds = example("accelerate_lm.py")["main"](arguments)
    before, after = speeds["torch.nn.LSTM"], speeds["weft.nn.LSTM"]
    assert before.tokens_per_second > 0 and after.tokens_per_second > 0
    # From the uniform distribution over about 100 characters, 4.6 nats, and on with the same optimizer.
    assert 3.5 < after.loss < before.loss < 4.8
    printed = capsys.readouterr().out
    assert "runs as" in printed
    if algorithm == "persistent":
        assert "weft.nn.LSTM  │ persistent" in printed


def sentence(draw: random.Random, good: list[str], bad: list[str], words: int) -> tuple[str, int]:
    """A bracketed tree of these words and its label: how many good words it has beyond the bad ones."""
    if words == 1:
        mood = draw.choice((-1, 1))
        label = 2 + mood
        return f"({label} {draw.choice(good if mood > 0 else bad)})", mood
    left = draw.randint(1, words - 1)
    (a, mood_a), (b, mood_b) = sentence(draw, good, bad, left), sentence(draw, good, bad, words - left)
    mood = max(-2, min(2, mood_a + mood_b))
    return f"({2 + mood} {a} {b})", mood


def test_treelstm_sst_learns_a_treebank(tmp_path, capsys):
    draw = random.Random(0)
    for name, count in (("train.txt", 400), ("dev.txt", 80)):
        lines = [sentence(draw, ["fine", "great"], ["bad", "sad", "dull"], draw.randint(1, 9))[0] for _ in range(count)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    arguments = [str(tmp_path), "--device", "cpu", "--hidden", "24", "--embedding", "12", "--dropout", "0"]
    best = example("treelstm_sst.py")["main"]([*arguments, "--epochs", "4", "--learning-rate", "2e-2"])
    assert best > 0.6
    printed = capsys.readouterr().out
    assert "400 trees to train on, 80 held out, 5 words" in printed
    assert printed.count("at the roots,") == 4 and "best dev accuracy at the roots" in printed
    assert Path("treelstm_sst.png").stat().st_size > 1000


def test_treelstm_sst_quickly(tmp_path):
    for name in ("train.txt", "dev.txt"):
        (tmp_path / name).write_text("(3 (2 a) (4 b))\n(1 (1 b) (2 (2 a) (2 c)))\n" * 30)
    arguments = [str(tmp_path), "--quick", "--device", "cpu", "--executor", "reference"]
    assert 0 <= example("treelstm_sst.py")["main"](arguments) <= 1


SIX = ("treelstm", "rvnn", "td-rnn", "td-lstm", "bilstm", "bilstm-char")


def test_six_nets_quickly(capsys):
    found = example("six_nets.py")["main"](["--quick", "--device", "cpu"])
    assert [*found] == [*SIX] and all(0 <= share <= 1 for share in found.values())
    printed = capsys.readouterr().out
    assert printed.count("a step is the loop in torch (the cell is on the CPU)") == 6
    assert printed.count(" sentences/s\n") == 6
    assert Path("six_nets.png").stat().st_size > 1000


@pytest.mark.parametrize("net, least", [("treelstm", 0.8), ("bilstm", 0.7), ("bilstm-char", 0.9)])
def test_six_nets_learn(net, least):
    """What is made up can be learned: sums of moods, common words' tags, and all tags by the words' last letters."""
    arguments = ["--net", net, "--hidden", "32", "--made-up", "400", "--epochs", "6", "--learning-rate", "1e-2"]
    assert example("six_nets.py")["main"]([*arguments, "--device", "cpu"])[net] > least


def test_six_nets_read_data(tmp_path):
    (tmp_path / "sst").mkdir()
    (tmp_path / "wikiner").mkdir()
    for name in ("train.txt", "dev.txt"):
        (tmp_path / "sst" / name).write_text("(3 (2 a) (4 b))\n(1 (1 b) (2 (2 a) (2 c)))\n" * 5)
    (tmp_path / "wikiner" / "dev.txt").write_text("Rome|PLACE is|O old|O\nParis|PLACE too|O\n" * 10)
    assert [*example("six_nets.py")["main"]([str(tmp_path), "--quick", "--device", "cpu"])] == [*SIX]


def test_treelstm_ast(capsys):
    found = example("treelstm_ast.py")["main"](["--quick", "--device", "cpu"])
    # Five steps teach nothing yet; the bag of node types is far above the largest class.
    assert found["largest module"] < 0.15 < 0.25 < found["bag of node types"] < 0.8
    assert 0 < found["child-sum Tree-LSTM"] < 0.8
    assert "the tree is better by" in capsys.readouterr().out
    assert Path("treelstm_ast.png").stat().st_size > 1000
