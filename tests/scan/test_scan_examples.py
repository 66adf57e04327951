"""The examples of the scan over sparse Jacobians run, and do what they say on a small scale."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytest.importorskip("sklearn")


@pytest.mark.parametrize("schedule", ["auto", "1"])
def test_lenet_scan(schedule: str, capsys: pytest.CaptureFixture) -> None:
    main = runpy.run_path(str(EXAMPLES / "lenet_scan.py"))["main"]
    scan, autograd = main(["--quick", "--device", "cpu", "--schedule", schedule])
    assert len(scan) == len(autograd) == 5
    assert scan == pytest.approx(autograd, rel=1e-4)
    assert "largest difference of the two curves" in capsys.readouterr().out


def test_vgg11_pruned(capsys: pytest.CaptureFixture) -> None:
    plan = runpy.run_path(str(EXAMPLES / "vgg11_pruned.py"))["main"](["--quick", "--device", "cpu"])
    assert plan.levels == 0 and plan.flops < sum(flops for _, flops in plan.baseline)
    assert "critical path" in capsys.readouterr().out
