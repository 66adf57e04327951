"""weft.offload: timeline, report and picture."""

from __future__ import annotations

import sys

import pytest
import torch
import weft
from weft.offloading import offload

from tests.offload.engines import chain, cuda, everything, numbers, saved_and_restored


def test_timeline() -> None:
    off = everything()
    assert off.timeline is None
    x = torch.randn(100, requires_grad=True)
    with off:
        y = x.exp().sin().tanh()
        assert off.timeline is None
    assert off.timeline is None
    y.sum().backward()
    t = off.timeline
    assert t is not None and [s.bytes for s in t.tensors] == [400, 400]
    # exp saves its output, which is what sin saves of its input; tanh saves its output.
    assert 0 < t.forward < len(t.seconds) and all(s >= 0 for s in t.seconds)
    assert weft.offloading.plan(t, 0).moved_bytes == 800


def test_report_before_any_use() -> None:
    n = numbers(offload(backend="reference"))
    assert (
        n["uses"] == n["saved_bytes"] == n["live_bytes"] == n["peak_bytes"] == 0 and n["predicted_peak_bytes"] is None
    )
    assert n["budget_met"] and n["stalls"] == [] and n["d2h_bytes_per_second"] is None


def test_plot(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = everything()
    with pytest.raises(RuntimeError, match="first use"):
        off.plot(tmp_path / "t.svg")
    saved_and_restored(off, torch.randn(100))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib"):
        off.plot(tmp_path / "t.svg")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    for suffix in ("svg", "png"):
        off.plot(tmp_path / f"t.{suffix}")
        assert (tmp_path / f"t.{suffix}").stat().st_size > 1000


@cuda
def test_times_and_rates() -> None:
    x = torch.randn(1 << 24, device="cuda", requires_grad=True)
    off = everything("copy")
    for _ in range(3):
        with off:
            y = chain(x, 4).sum()
        torch.autograd.grad(y, x)
        torch.cuda.synchronize()
    n = numbers(off)
    assert n["forward_seconds"] > 0 and n["backward_seconds"] > 0
    assert 1e9 < n["d2h_bytes_per_second"] < 1e12 and 1e9 < n["h2d_bytes_per_second"] < 1e12
    assert n["backward_stall_seconds"] > 0 and n["stalls"]
    assert off.timeline is not None and off.timeline.seconds[0] is not None
