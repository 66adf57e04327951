"""A small run of the offload engine's benchmark on the CPU."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import densities, models, offload
from benchmarks.common import Results, measure, parse_case


@pytest.mark.parametrize("codec", ["zvc", "rle"])
def test_codec_rows(codec: str, tmp_path) -> None:
    results = Results(tmp_path / "offload.csv")
    offload.codec_entry(codec, "cpu", "bf16", 0.5, 1 << 16).run(results)
    rows = {(parse_case(row["case"])["op"], row["metric"]): row for row in results.rows.values()}
    assert (f"{codec}_compress", "forward") in rows and (f"{codec}_decompress", "forward") in rows
    if codec == "zvc":
        assert float(rows["zvc_compress", "compressed"]["ratio"]) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_model_rows(name: str, tmp_path, monkeypatch) -> None:
    """Every budget has its rows, and a budget is met."""

    def once(candidates: dict, device: str, **_: float) -> dict[str, float]:
        return measure(candidates, device, warmup=0, repeats=2, at_most=0.0)

    monkeypatch.setattr(offload, "measure", once)
    results = Results(tmp_path / "offload.csv")
    net = functools.partial(models.gpt, 50, 32, 2, 2, 16)
    if name == "llama":
        net = functools.partial(models.llama, 50, 32, 2, 4, 2, 64)
    model = offload.Model(name, "fp32", 2, net, 50, length=16)
    offload.model_entry(model, "cpu", backend="reference", min_bytes=0).run(results)
    rows = {(parse_case(row["case"])["budget"], row["metric"], row["peer"]): row for row in results.rows.values()}
    for budget, share in offload.BUDGETS.items():
        assert float(rows[budget, "step", "plain"]["weft"]) > 0 and (budget, "step", "floor") in rows
        assert (budget, "step", "checkpoint") in rows
        moved, saved = (float(rows[budget, "moved", "saved"][key]) for key in ("weft", "peer_value"))
        assert 0 <= moved <= saved and (moved > 0) == (share is not None)
        assert ((budget, "first_uses", "plain") in rows) == (share is None)
        if share == 0:
            assert float(rows[budget, "saved_peak", "saved"]["weft"]) < saved
        if share:
            assert float(rows[budget, "saved_peak", "budget"]["ratio"]) >= 1
            assert (budget, "predicted_step", "no_policy") in rows
    assert len({row["peer_value"] for key, row in rows.items() if key[1] == "moved"}) == 1


def test_figures(tmp_path) -> None:
    from benchmarks.figures import offload as figures  # here, because it alone needs matplotlib

    rest = {"date": "2026-01-01", "gpu": "GPU", "torch": "2.11.0", "cuda": "13.0", "unit": "ms", "ratio": "2.0"}

    def row(case: str, metric: str, weft: float, peer: str, peer_value: float) -> dict[str, str]:
        return {"case": case, "metric": metric, "weft": str(weft), "peer": peer, "peer_value": str(peer_value), **rest}

    step = "model=vgg19 device=cuda dtype=fp32 B=64 budget={}"
    density = "model=vgg19 device=cuda dtype=fp32 B=64 trained={} layer={}"
    rows = [row(step.format(b), "step", 2.0, p, 1.0) for b in offload.BUDGETS for p in ("plain", "floor")]
    rows += [row(density.format(t, k), "density", 0.5, "on_the_bus", 0.6) for t in ("no", "yes") for k in range(3)]
    for budget, peak in (("none", 6e9), ("0", 1e9)):
        case = step.format(budget)
        rows += [row(case, "step", 2.0, peer, value) for peer, value in (("checkpoint", 1.3), ("torchtune", 1.8))]
        memory = (("plain", 8e9), ("checkpoint", 4e9), ("torchtune", 1.2e9), ("everything_and_budget", 9e9))
        rows += [row(case, "peak_memory", peak, peer, value) for peer, value in memory]
    assert figures.page({"offload": []}, tmp_path) == []
    parts = "\n".join(figures.page({"offload": rows}, tmp_path))
    assert "VGG-19, B 64, fp32, budget 75%" in parts and "without offload: 1.0 ms" in parts and "density" not in parts
    table = parts.split(".. csv-table:: Ways to make VGG-19, fp32, B 64 fit, GPU")[1].split(".. csv-table")[0]
    assert [line.strip() for line in table.splitlines() if line.startswith('   "')] == [
        '"nothing: all in memory", "1 ms", "0%", "8000 MB", "0%"',
        '"checkpointing of every block", "1.3 ms", "30%", "4000 MB", "50%"',
        '"torchtune\'s OffloadActivations", "1.8 ms", "80%", "1200 MB", "85%"',
        '"weft.offload, budget none", "2 ms", "100%", "6000 MB", "25%"',
        '"weft.offload, budget 0", "2 ms", "100%", "1000 MB", "88%"',
    ]
    assert '   "VGG-19", "3", "0.50 (0.50 to 0.50)", "0.50 (0.50 to 0.50)"' in parts
    older = [{**r, "gpu": "another", "date": "2025-12-31", "peer_value": "9"} for r in rows]
    with_older = "\n".join(figures.page({"offload": [*rows, *older]}, tmp_path))
    assert '"nothing: all in memory", "9 ms"' not in with_older and '"nothing: all in memory", "1 ms"' in with_older
    for name in ("offload_budgets.svg", "offload_ways.svg", "offload_densities.svg"):
        assert name in parts and (tmp_path / name).read_bytes().startswith(b"<?xml")


def test_density_rows(tmp_path) -> None:
    pytest.importorskip("sklearn")
    results = Results(tmp_path / "offload.csv")
    net = functools.partial(models.vgg19, 10, 2, 32)
    rows = densities.density_entry("vgg19", net, "cpu", size=32, steps=2).run(results)
    assert len(rows) == 2 * 18 and len(results.rows) == 2 * 18
    assert all(0 <= float(row["weft"]) <= 1 and 1 / 32 <= float(row["peer_value"]) <= 1 for row in rows)


def test_models_have_the_published_sizes() -> None:
    with torch.device("meta"):
        nets = [models.vgg19(), models.resnet152(), models.gpt(), models.llama(), models.efficientnet()]
        sizes = [sum(p.numel() for p in net.parameters()) for net in nets]
        assert nets[0](torch.empty(2, 3, 224, 224)).shape == nets[1](torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        assert nets[4](torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        assert nets[2](torch.empty(2, 64, dtype=torch.long)).shape == (128, 16384)
        assert nets[3](torch.empty(2, 64, dtype=torch.long)).shape == (128, 16384)
    assert [*sizes[:2], sizes[4]] == [143_667_240, 60_192_808, 5_288_548]
    assert sizes[3] == 8 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096) + (2 * 16384 + 1) * 4096
    assert sizes[2] == 12 * (12 * 2048**2 + 13 * 2048) + (2 * 16384 + 2048 + 2) * 2048
