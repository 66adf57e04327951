"""A small run of the sparse room's benchmark on the CPU, and its page."""

from __future__ import annotations

import pytest
import torch

from benchmarks import common, sparse


@pytest.mark.slow
def test_the_page(tmp_path) -> None:
    from benchmarks.figures import sparse as figures  # here, because it alone needs matplotlib

    rest = {"gpu": "GPU", "torch": "2.11.0", "cuda": "13.0"}

    def row(case: str, metric: str, unit: str, mine: float, peer: str, peers: float) -> dict[str, str]:
        numbers = {"weft": f"{mine:.10g}", "peer_value": f"{peers:.10g}", "ratio": str(peers / mine)}
        return {"case": case, "metric": metric, "unit": unit, "peer": peer, **numbers, **rest}

    def page(rows: list[dict[str, str]]) -> str:
        return "\n".join(figures.page({"sparse": rows}, tmp_path))

    assert page([]) == ""
    conv = "op=jacobian device=cuda dtype=fp32 B=1 layer=conv"
    jacobian = [
        row(conv, "elements", "elements", 1696512, "dense", 201326592),
        row(conv, "generate", "ms", 0.01, "autograd", 80.0),
        row(conv, "device_time", "ms", 0.003, "floor", 0.002),
    ]
    tree = "model=lenet5 device=cpu dtype=fp32 B=1 schedule=blelloch level={} phase={} steps=2"
    levels = [
        row(tree.format(i, phase), "level_flops", "flop", 10.0 ** (i + 3), "critical", 10.0 ** (i + 2))
        for i, phase in enumerate(["up", "up", "middle", "down"])
    ]
    net = "model=vgg11 device={} dtype=fp32 B=16 width={} density={}"
    steps = [
        row(net.format(on, width, density), "forward_backward", "ms", 1 + density, "autograd", 2.0)
        for on, width in (("cuda", 1.0), ("cpu", 0.25))
        for density in (1.0, 0.03)
    ]
    chain = "model=blocks{} device=cuda dtype=fp32 B=1 schedule={}"
    chains = [
        row(chain.format(n, schedule), "input_gradients_captured", "ms", 0.001 * n, "captured", 0.004 * n)
        for n in (8, 256)
        for schedule in ("auto", "linear", 1)
    ]
    shown = [*jacobian, *levels, *chains, *steps]
    text = page(shown)
    assert '"0.99157"' in text and '"8000x"' in text
    assert "VGG-11, B 16, fp32, width 0.25, density 0.03" in text
    assert "LeNet-5, B 1, fp32, schedule blelloch, level 3, phase down, steps 2" in text
    for name in ("sparse_levels.svg", "sparse_blocks.svg", "sparse_density.svg"):
        assert name in text
        first = (tmp_path / name).read_bytes()
        page(shown)
        assert (tmp_path / name).read_bytes() == first and first.startswith(b"<?xml")
    assert "image" not in page(jacobian) and "csv-table" not in page(jacobian[:1])


@pytest.mark.slow
def test_rows(tmp_path, capsys) -> None:
    pytest.importorskip("scipy")
    threads = torch.get_num_threads()
    output = tmp_path / "sparse.csv"
    try:
        for text in ("lenet5", "layer=relu", "pair=relu1-pool1"):
            sparse.main([text, "--devices", "cpu", "--output", str(output)])
    finally:
        torch.set_num_threads(threads)
    rows = common.read_rows(output)
    found = {(common.parse_case(r["case"]).get("schedule"), r["metric"]): r for r in rows}
    assert float(found["linear", "flops"]["weft"]) == float(found["linear", "critical_flops"]["weft"])
    assert {r["peer"] for r in rows if r["metric"] == "forward"} == {"scipy", "torch.sparse"}
    assert "times the floor of" in capsys.readouterr().out
    # What matters most comes first.
    order = [entry.name for entry in sparse.table("cpu")]
    assert "op=jacobian" in order[0] and order.index(next(n for n in order if "plan_matmul" in n)) < 4
    assert len(set(order)) == len(order)
