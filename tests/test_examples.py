"""The examples run, and do what they say on a small scale."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("accelerate_lm.py", "bitstream.py", "char_lm.py")


def example(name: str) -> dict:
    return runpy.run_path(str(ROOT / "examples" / name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_help(name):
    done = subprocess.run(
        [sys.executable, f"examples/{name}", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--quick" in done.stdout
    assert "--algorithm" in done.stdout


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
