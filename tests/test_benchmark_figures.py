"""The tables and figures that are drawn from rows."""

from __future__ import annotations

import pytest

from benchmarks import rnn_targets
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


def test_means_over_six_nets():
    """Of rows net by net, or of the row that has them together."""
    from benchmarks.figures import vertex as figures  # here, because it needs matplotlib

    case = "model={} device=cuda dtype=fp32 H=256 B={} executor={}"
    rows = [
        row(case.format("treelstm", B, "trainer"), "step", 1.0, ratio, peer="batched") for B, ratio in ((1, 2), (4, 8))
    ]
    rows.append(row(case.format("treelstm", 25, "trainer"), "step", 1.0, 100.0, peer="batched"))  # of another table
    said = figures.six_nets(rows)
    assert "takes 4.00 times as long as the Trainer, the geometric mean of 2 of the 48 cases of 6 nets" in said
    assert "(1 of the nets measured, at B 1, 4), on GPU, from 2.00x to 8.00x." in said

    def means(nets: int, cases: int, ratio: float, **other: str) -> dict:
        case = f"model=nets device=cuda dtype=fp32 executor=trainer nets={nets} cases={cases}"
        return row(case, "step", 1.0, ratio, peer="batched", **other)

    rows += [means(6, 48, 3.0), means(6, 40, 5.0)]
    (said,) = figures.six_nets(rows).splitlines()
    assert "takes 3.00 times as long as the Trainer, the geometric mean of all 48 cases of 6 nets" in said
    assert said.endswith("8 batch sizes, on GPU.")
    rows += [means(5, 13, 7.0, date="2026-01-02"), means(6, 48, 9.0, date="2026-01-03", gpu="another")]
    (said,) = figures.six_nets(rows).splitlines()
    assert "takes 7.00 times as long as the Trainer, the geometric mean of 13 of the 48 cases of 6 nets" in said
    assert said.endswith("8 batch sizes (5 of the nets measured), on GPU.")
    rows += [means(4, 4, 5.0, date="2026-01-04", commit="new")]
    rows += [
        row(case.format(name, 1, "trainer"), "step", 1.0, 5.0, peer="batched", commit="new")
        for name in ("treelstm", "rvnn", "td-rnn", "td-lstm")
    ]
    (said,) = figures.six_nets(rows).splitlines()
    assert said.endswith("4 of the 48 cases of 6 nets and 8 batch sizes (4 of the nets measured, all at B 1), on GPU.")


@pytest.mark.slow
def test_tables_and_figures_come_from_rows_alone(tmp_path):
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
    line = plot.readme_block({"scan": rows}).splitlines()[2]
    assert (
        line.startswith("| backward pass of a tanh RNN: 20 units") and "| 1.00 ms | 300 ms: torch.nn | 300x |" in line
    )
    assert plot.readme_block({}) == plot.NO_ROWS
    assert "\nMeasured on GPU, torch" in plot.readme_block({"scan": rows})
    gru = row("cell=gru device=cuda dtype=bf16 H=512 B=16 T=1024", gpu="NVIDIA H100 80GB HBM3", date="2026-01-02")
    older = gru | {"gpu": "NVIDIA H200", "date": "2026-01-01"}
    block = plot.readme_block({"scan": rows, "rnn": [gru, older]})
    mixed = [line for line in block.splitlines() if line.startswith(("|", "Each"))]
    assert mixed[0].startswith("| what you run | on | Weft |") and mixed[2].startswith("| train a GRU: 512")
    assert [line.split(" | ")[1] for line in mixed[2:4]] == ["H100", "GPU"] and len(mixed) == 5
    assert mixed[-1].startswith("Each line was measured") and "NVIDIA H100 80GB HBM3, torch" in mixed[-1]
    readme = f"a\n{plot.BEGIN}\nold\n{plot.END}\nb"
    assert plot.with_block(plot.with_block(readme, "new"), "newer") == f"a\n{plot.BEGIN}\n\nnewer\n\n{plot.END}\nb"

    case = "cell=mingru model=char_lm device=cpu dtype=fp32 H=128 B=32 T=64 seconds=30"
    rows.append(row(case, "bits_per_character", 1.9, 1.8, unit="bits", peer="gru"))
    rows.append(row(case, "throughput", 81903.0, 163549.0, unit="characters/s", peer="gru"))
    results = {"scan": rows, "scan_auto": [row("cell=gru device=cuda dtype=fp32 H=8 B=2 T=30")]}
    assert plot.page_block("scan", {"scan": [], "scan_auto": []}, tmp_path) == plot.NO_ROWS
    text = plot.page_block("scan", results, tmp_path / "images")
    assert '"memory beyond torch\'s", "-1.00 MB", "bytes of the gates\' activations: 154 MB", "' in text
    assert '"a GRU", "1.800", "163,549"\n   "three minGRUs", "1.900", "81,903"' in text and "for 30 s each" in text
    assert "csv-table:: GPU, torch 2.11.0, CUDA 13.0" in text
    for name in ("scan_backward.svg", "scan_auto.png"):
        assert f".. image:: ../images/{name}" in text
        first = (tmp_path / "images" / name).read_bytes()
        assert first.startswith((b"<?xml", b"\x89PNG"))
        assert plot.page_block("scan", results, tmp_path / "images") == text
        assert (tmp_path / "images" / name).read_bytes() == first


def test_the_figure_of_executors(tmp_path):
    from benchmarks import plot  # here, because it needs matplotlib

    case = "model={} device=cuda dtype=fp32 H=256 B={} executor={}"
    rows = [
        row(case.format("treelstm", B, "trainer"), "step", 0.1 * B, B * ratio, peer=peer)
        for B in (1, 25)
        for peer, ratio in (("batched", 0.4), ("persistent", 0.2), ("reference", 3.0), ("device_busy", 0.1))
    ]
    rows += [row(case.format("rvnn", B, "persistent"), mine=1.0, peers=1.5, peer="batched") for B in (1, 2)]
    text = plot.page_block("vertex", {"vertex": rows}, tmp_path)
    assert "/vertex_executors.svg" in text and "vertex_batches" not in text
    assert '``"batched"`` takes 1.50 times as long as the persistent executor, the geometric mean of 2' in text
    assert '``"batched"`` takes 4.00 times as long as the Trainer' in text
    assert "mean of 1 of the 48 cases of 6 nets and 8 batch sizes (1 of the nets measured, all at B 1), on GPU" in text
    drawn = (tmp_path / "vertex_executors.svg").read_text()
    assert all(name in drawn for name in ("Trainer", '"batched"', '"persistent"', '"reference"'))
    assert "image" not in plot.page_block("vertex", {"vertex": rows[-2:]}, tmp_path)


def test_a_table_holds_any_text():
    from benchmarks import figures  # here, because it needs matplotlib

    table = figures.rst_table("of one", [["a", "b"], ['says "x", twice', ""]])
    assert table == '.. csv-table:: of one\n   :header: "a", "b"\n\n   "says ""x"", twice", ""'


@pytest.mark.slow
def test_pages_are_written_between_their_markers(tmp_path, monkeypatch):
    from benchmarks import plot  # here, because it alone needs matplotlib

    monkeypatch.setattr(plot, "ROOMS", {"vertex": plot.ROOMS["vertex"]})  # the others' are drawn for the docs' test
    (tmp_path / "performance").mkdir()
    for room in plot.ROOMS:
        text = f"before\n\n{plot.PAGE_BEGIN}\n\n{plot.PAGE_END}\nafter\n"
        (tmp_path / "performance" / f"{room}.rst").write_text(text)
    plot.write_docs(tmp_path)
    text = (tmp_path / "performance" / "vertex.rst").read_text()
    assert text.startswith("before\n\n.. results: begin") and text.endswith(".. results: end\nafter\n")
    assert "../images/vertex_batches.svg" in text and (tmp_path / "images" / "vertex_batches.svg").exists()
    plot.write_docs(tmp_path)
    assert (tmp_path / "performance" / "vertex.rst").read_text() == text


def test_the_figure_of_the_backward_pass_is_of_one_size():
    from benchmarks.figures import scan as scan_figures  # here, because it alone needs matplotlib

    def rows_of(H, inputs, steps, gpu="GPU"):
        case = "cell=rnn_tanh device=cuda dtype=fp32 H={} B=16 T={} inputs={}"
        return [row(case.format(H, T, inputs), "backward", 1.0, 2.0) | {"gpu": gpu} for T in steps]

    wanted = rows_of(20, 1, (1000, 3000, 10000))
    others = rows_of(64, 1, (1000, 10000)) + rows_of(20, 2, (10000,)) + rows_of(20, 1, (30000,), "another")
    assert scan_figures.backward_points(others[:2] + wanted + others[2:]) == wanted
    assert scan_figures.backward_points([]) == []


@pytest.mark.slow
def test_the_rnn_engines_tables_and_figure(tmp_path):
    from benchmarks import plot  # here, because it alone needs matplotlib

    rows = rnn_rows()
    block = plot.readme_block({"rnn": rows})
    assert "![Speed-up" in block and "108 cases on GPU: torch.nn takes 8 times as long" in block

    def page_of(some: list[dict]) -> str:
        return plot.page_block("rnn", {"rnn": some}, tmp_path)

    assert page_of([]) == plot.NO_ROWS
    text = page_of(rows)
    assert '   "LSTM, bf16, B 64", "1.0 (8.00x)"' in text
    first = (tmp_path / "rnn_speedup.svg").read_bytes()
    page_of(rows)
    assert (tmp_path / "rnn_speedup.svg").read_bytes() == first
    # Any part of the rows will do.
    grid = set(rnn_targets.grid_rows(rows))
    few = [r for r in rows if r["case"] in sorted(grid)[:5]]
    assert ', ""' in page_of(few) and "5 cases" in plot.readme_block({"rnn": few + rows[:1]})
    rest = [r for r in rows if r["case"] not in grid]
    assert "rnn_speedup" not in page_of(rest)
    assert "image" not in page_of([r for r in rest if "memory=" not in r["case"]])
    assert "Speed-up" not in plot.readme_block({"rnn": rest})


def test_what_ranks_are_predicted_to_give(tmp_path):
    from benchmarks.figures import ranks as figures

    case = "op=linear_scan device=cuda dtype=fp32 layout=diagonal H=1536 B=8 T={} ranks=8 A=0.8"
    rows = [row(case.format(T), "forward", T / 20000, T / 20480, peer="one_rank") for T in (2048, 131072)]
    part = figures.measured_part(rows)
    assert part is rows[1] and figures.measured_part(rows[:0]) is None
    mending = figures.fixups(rows, part["gpu"])
    assert mending == {8: pytest.approx(131072e-3 / 20000 - 6.4e-3)} and figures.fixups(rows, "another") == {}
    strong, weak = figures.predictions(part, mending)
    assert strong[0].efficiency == weak[0] == 1 and strong[0].seconds == 8 * 6.4e-3
    assert 0.99 > strong[3].efficiency > strong[10].efficiency and weak[10] > strong[10].efficiency
    of_more = figures.predictions(part, {8: 1e-3, 1024: 3e-3})[0]
    assert [p.fixup for p in of_more[2:4]] == [1e-3, 1e-3]
    assert of_more[7].fixup == pytest.approx(1e-3 + 2e-3 * 120 / 1016)
    # A thousand ranks gather, too, though rounds would send less.
    gather = 15e-6 + 1023 * 98304 / 360e9
    assert of_more[10].fixup + of_more[10].exchange == pytest.approx(3e-3 + gather)
    text = figures.page({"ranks": rows}, tmp_path)
    assert text[0] == f".. image:: ../{tmp_path.name}/ranks_scaling.svg" and "one rank: 6.4 ms" in text[1]
    assert "Predicted" in (tmp_path / "ranks_scaling.svg").read_text() and figures.page({}, tmp_path) == []


def test_what_ranks_gave_is_drawn_over_it(tmp_path):
    from benchmarks.figures import ranks as figures

    part = row(
        "op=linear_scan device=cuda dtype=fp32 layout=diagonal H=1536 B=8 T=131072 ranks=8 A=0.8", "forward", 6.5, 6.4
    )
    case = "op=linear_scan device=cuda dtype={} layout=diagonal H=1536 B=8 T={} gpus={}"
    rows = [part | {"gpu": "another"}, part]
    for gpus, steps, took in ((2, 65536, 1.8), (2, 524288, 13.0), (4, 524288, 6.7), (4, 1048576, 13.4)):
        for peer, other in (("one_rank", 25.0 * steps / 524288), ("slice", 12.9), ("predicted", 13.1)):
            rows.append(row(case.format("fp32", steps, gpus), "forward", took, other, peer=peer))
            rows.append(row(case.format("bf16", steps, gpus), "forward", 1, 1, peer=peer))
    assert figures.measured_part(rows) is part
    found = figures.measured(rows, part["gpu"])
    assert found[1:3] == [(2, 524288, 13.0, 25.0, 12.9), (4, 524288, 6.7, 25.0, 12.9)] and len(found) == 4
    assert figures.same_sequence(found) == found[1:3] and figures.same_sequence(found[:2]) == found[1:2]
    assert figures.longest(found) == [found[1], found[3]]
    assert figures.measured(rows, "another") == []
    figures.page({"ranks": rows}, tmp_path)
    text = (tmp_path / "ranks_scaling.svg").read_text()
    assert text.count("measured") >= 3 and "524 288 steps" in text
    # Of GPUs of another kind the efficiency stands there, too.
    more = [r | {"gpu": "NVIDIA H300 1TB"} for r in rows[2:]]
    figures.page({"ranks": rows + more}, tmp_path)
    assert "measured, H300" in (tmp_path / "ranks_scaling.svg").read_text()


def test_slices_of_the_same_length_are_drawn_by_the_number_of_gpus(tmp_path):
    from benchmarks.figures import ranks as figures

    dense = "op=linear_scan device=cuda dtype=fp32 layout=dense H=20 B=16 T={} gpus={}"
    stack = "model=mingru_stack device=cuda dtype=fp32 H=512 B=8 T={} layers=4 gpus={}"
    rows = [
        row(dense.format(500_000, 2), "forward", 10.0, 9.5, peer="slice"),
        row(dense.format(1_000_000, 4), "forward", 10.0, 9.0, peer="slice"),
        row(dense.format(1_000_000, 2), "forward", 20.0, 19.9, peer="slice"),  # another slice
        row(dense.format(500_000, 2), "forward_backward", 30.0, 15.0, peer="slice"),
        row(dense.format(500_000, 2), "forward", 10.0, 20.0, peer="one_rank"),
        row(stack.format(32768, 2), "step", 5.0, 4.0, peer="slice"),
    ]
    found = figures.measured_weak(rows, rows[0]["gpu"])
    assert found == {"linear_scan dense": {1: 1.0, 2: 0.95, 4: 0.9}, "mingru_stack": {1: 1.0, 2: 0.8}}
    assert figures.measured_weak(rows, "another") == {}
    figures.draw_weak(found, tmp_path / "weak.svg")
    text = (tmp_path / "weak.svg").read_text()
    assert "250000 steps on every GPU" in text and "16384 steps on every GPU" in text
