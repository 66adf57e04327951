"""The tables and figures that are drawn from rows."""

from __future__ import annotations

from benchmarks import common, rnn
from tests.benchmark_rows import rnn_rows, row


def test_the_figure_of_diagonal_scans(tmp_path):
    from benchmarks.figures import scan as figures  # here, because it needs matplotlib

    case = "op=linear_scan device=cuda dtype=fp32 layout=diagonal H={} B=8 T={}"
    rows = [row(case.format(16, T), mine=T, peers=T / 2, peer=peer) for T in (64, 128) for peer in ("floor", "other")]
    lone = [row(case.format(32, 64), peer="floor")]
    lines = {"Weft": {64: 64.0, 128: 128.0}, "floor": {64: 32.0, 128: 64.0}, "other": {64: 32.0, 128: 64.0}}
    assert figures.diagonal_points(rows + lone) == {(8, 16): lines}
    figures.draw_diagonal(rows, tmp_path / "figure.svg")
    assert "B 8, H 16" in (tmp_path / "figure.svg").read_text()


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

    rows = rnn_rows()
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
