"""The examples of the scan over sparse Jacobians run, and do what they say on a small scale."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

from tests.common import DEVICES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="no scikit-learn")


@pytest.fixture(autouse=True)
def _beside_each_other(tmp_path, monkeypatch):
    """A script finds examples/curves.py beside itself; its figure goes to a folder of this test's."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", ["auto", "1"])
def test_lenet_scan(schedule: str, device: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which the scan never uses
    main = runpy.run_path(str(EXAMPLES / "lenet_scan.py"))["main"]
    scan, autograd = main(["--quick", "--device", device, "--schedule", schedule])
    assert len(scan) == len(autograd) == 5
    assert scan == pytest.approx(autograd, rel=1e-4)
    assert "largest difference of the two curves" in capsys.readouterr().out
    assert Path("lenet_scan.png").stat().st_size > 1000


@pytest.mark.parametrize("device", DEVICES)
def test_vgg11_pruned(device: str, capsys: pytest.CaptureFixture) -> None:
    plan = runpy.run_path(str(EXAMPLES / "vgg11_pruned.py"))["main"](["--quick", "--device", device])
    assert plan.levels == 0 and plan.flops < sum(flops for _, flops in plan.baseline)
    assert "critical path" in capsys.readouterr().out
    assert Path("vgg11_pruned.png").stat().st_size > 1000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("more", [[], ["--pixels"]], ids=["rows", "pixels"])
def test_digits(more: list[str], device: str, capsys: pytest.CaptureFixture) -> None:
    found = runpy.run_path(str(EXAMPLES / "digits.py"))["main"](["--quick", "--device", device, *more])
    assert set(found) == {"gru", "lru", "s5", "mingru"} and all(0.05 < a <= 1 for a in found.values())
    assert "sequences/s" in capsys.readouterr().out
    assert Path("digits.png").stat().st_size > 1000
