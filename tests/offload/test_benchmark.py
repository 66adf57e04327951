"""A small run of the offload engine's benchmark on the CPU."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import models, offload
from benchmarks.common import Results, parse_case


@pytest.mark.parametrize("codec", ["zvc", "rle"])
def test_codec_rows(codec: str, tmp_path) -> None:
    results = Results(tmp_path / "offload.csv")
    offload.codec_entry(codec, "cpu", "bf16", 0.5, 1 << 16).run(results)
    rows = {(parse_case(row["case"])["op"], row["metric"]): row for row in results.rows.values()}
    assert (f"{codec}_compress", "forward") in rows and (f"{codec}_decompress", "forward") in rows
    if codec == "zvc":
        assert float(rows["zvc_compress", "compressed"]["ratio"]) == pytest.approx(1, abs=0.01)


def test_density_rows(tmp_path) -> None:
    pytest.importorskip("sklearn")
    results = Results(tmp_path / "offload.csv")
    net = functools.partial(models.vgg19, 10, 2, 32)
    rows = offload.density_entry("vgg19", net, "cpu", size=32, steps=2).run(results)
    assert len(rows) == 2 * 18 and len(results.rows) == 2 * 18
    assert all(0 <= float(row["weft"]) <= 1 and 1 / 32 <= float(row["peer_value"]) <= 1 for row in rows)


def test_models_have_the_published_sizes() -> None:
    with torch.device("meta"):
        nets = [models.vgg19(), models.resnet152(), models.gpt()]
        sizes = [sum(p.numel() for p in net.parameters()) for net in nets]
        assert nets[0](torch.empty(2, 3, 224, 224)).shape == nets[1](torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        assert nets[2](torch.empty(2, 64, dtype=torch.long)).shape == (128, 16384)
    assert sizes[:2] == [143_667_240, 60_192_808]
    assert sizes[2] == 12 * (12 * 2048**2 + 13 * 2048) + (2 * 16384 + 2048 + 2) * 2048
