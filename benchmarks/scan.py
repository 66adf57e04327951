"""The scan engine against torch.nn and against the bandwidth of the memory.

``python -m benchmarks.scan [FILTER]`` measures the table into results/scan.csv: layers with a random gradient at every
output and gradients for input, h0, c0 and all parameters; `linear_scan` against the bytes it must move and, diagonal in
fp32 on CUDA, against the package accelerated-scan where it is installed (in that package's own layout, (B, H, T));
batch first beside time first; a scan that is read out beside scan and einsum; peak memory; errors against fp64; what
the minGRUs of examples/char_lm.py reach beside a GRU, and how fast they train. `pointwise_scan` with ParaGRU's cell
against the bytes, beside a plain walk; its layers against the package pararnn-torch, where it is installed (with as
many Newton iterations as it takes by itself); spiking neurons against their loop in a CUDA graph; the first call of a
new step; a training step of examples/bitstream.py. FILTER is a substring of the case or the metric.

``python -m benchmarks.scan grid`` measures the training step of ``algorithm="auto"`` against torch.nn over sequence
length, batch and hidden size into results/scan_auto.csv, in random order within ``--minutes``, what this commit has
not measured first; ``--algorithm scan`` forces that algorithm, to see where it starts to pay.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import weft
from torch.nn.functional import cross_entropy
from weft._base.torch_private import RNN_KERNELS
from weft._rnn.dropin.torch_limits import why_not_cudnn
from weft._rnn.select.costs import GATES
from weft.data import Vocabulary, python_docs, split

from benchmarks.common import (
    RESULTS,
    ROOT,
    Candidate,
    Entry,
    Results,
    begin_table,
    case_name,
    check_agreement,
    copy_bandwidth,
    exit_with,
    hardware,
    measure,
    parse_case,
    peak_memory,
    read_rows,
    relative_error,
    run_entries,
    show,
    table_parser,
)
from benchmarks.diagonal import DIAGONAL, batch_first_entry, diagonal_entry, host_entry, read_out_entry, residual
from benchmarks.layers import LayerCase, LayerStep, check_layers, relative_errors
from benchmarks.pointwise import MEMORIES, POINTWISE, first_call_entry, para_entry, pointwise_entry, spiking_entry

GRID_T = (10, 30, 100, 300, 1000, 3000, 10000, 30000)


GRID_B = (1, 2, 4, 8, 16, 32, 64, 128, 256)


GRID_H = (8, 20, 32, 64, 128)


GRID_CELLS = ("rnn_tanh", "gru", "lstm")


def _layer_entry(case: LayerCase, metrics: tuple[str, ...] = ("forward", "backward", "forward_backward")) -> Entry:
    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        check_layers(step)
        rows = []
        for metric in metrics:
            times = measure(step.candidates(metric), case.device)
            rows.append(results.put(case.name, metric, "ms", times["weft"], "torch.nn", times["torch.nn"]))
        return rows

    return Entry(case.name, metrics, run)


def _memory_entry(case: LayerCase) -> Entry:
    """Peak memory of a step beside torch's, and what Weft needs beyond torch beside the gates' activations."""

    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        for layer in (step.weft, step.peer):
            step.forward_backward(layer)
        mine = peak_memory(lambda: step.forward_backward(step.weft))
        peers = peak_memory(lambda: step.forward_backward(step.peer))
        gates = 4 * case.T * case.B * case.H * GATES[case.cell]
        return [
            results.put(case.name, "peak_memory", "bytes", mine, "torch.nn", peers),
            results.put(case.name, "memory_beyond_torch", "bytes", mine - peers, "gate_activations", gates),
        ]

    return Entry(case.name, ("peak_memory", "memory_beyond_torch"), run)


def _error_entry(case: LayerCase) -> Entry:
    """The largest error of the output and the gradients against fp64, Weft's and torch's, without TF32."""

    def run(results: Results) -> list[dict[str, str]]:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            step = LayerStep(case)
            reference = step.reference()
            mine = max(relative_errors(step.results(step.weft), reference).values())
            peers = max(relative_errors(step.results(step.peer), reference).values())
        return [results.put(case.name, "error", "relative", mine, "torch.nn", peers)]

    return Entry(case.name, ("error",), run)


def _dense_entry(H: int, B: int, T: int) -> Entry:
    """A dense `linear_scan` against its floor: it cannot do with less than two reads of A, one to form the chunks'
    products and one to replay them."""
    name = case_name(op="linear_scan", device="cuda", dtype="fp32", layout="dense", H=H, B=B, T=T)

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        b = torch.randn(T, B, H, device="cuda")
        A = torch.randn(T, B, H, H, device="cuda").mul_(0.5 / H**0.5)
        x0 = torch.randn(B, H, device="cuda")
        x = weft.scan.linear_scan(A, b, x0)
        check_agreement(name, {"x": residual(A, b, x0, x)}, 1e-5)
        del x
        times = measure({"weft": Candidate(lambda _: weft.scan.linear_scan(A, b, x0))}, "cuda")
        floor = 2 * A.nbytes / copy_bandwidth() * 1e3
        return [results.put(name, "forward", "ms", times["weft"], "floor", floor)]

    return Entry(name, ("forward",), run)


LANGUAGE_MODEL_SECONDS = {"cuda": 8, "cpu": 30}


def _example(name: str) -> dict[str, Any]:
    """The names that a script of examples/ defines."""
    folder = str(ROOT / "examples")
    sys.path.insert(0, folder)  # where the example finds its neighbours
    try:
        return runpy.run_path(f"{folder}/{name}.py")
    finally:
        sys.path.remove(folder)


BITSTREAM_STEPS = 10


def _bitstream_entry(B: int = 16, T: int = 30000, device: str = "cuda") -> Entry:
    """A training step of examples/bitstream.py, loss and optimizer with it, the mean of so many in a row: the layer
    as "newton" and as "scan", and torch's."""
    example = _example("bitstream")
    options = example["parse"](["--length", str(T), "--batch", str(B), "--device", device])
    name = case_name(model="bitstream", device=device, dtype="fp32", H=options.hidden, B=B, T=T, algorithm="newton")

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        bits, classes = example["make_streams"](4 * B, T, device)
        net = example["Classifier"](options.hidden).to(device)

        def steps(model: torch.nn.Module) -> Candidate:
            optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)

            def run(_: object) -> None:
                for step in range(BITSTREAM_STEPS):
                    batch = slice(step % 4 * B, (step % 4 + 1) * B)
                    loss = cross_entropy(model(bits[batch].t()[..., None].float()), classes[batch])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

            return Candidate(run)

        models = {
            "weft": weft.accelerate(copy.deepcopy(net), algorithm="newton"),
            "scan": weft.accelerate(copy.deepcopy(net), algorithm="scan"),
            "torch.nn": net,
        }
        with torch.no_grad():
            x = bits[:B].t()[..., None].float()
            error = relative_error(models["weft"](x), net(x))
        check_agreement(name, {"scores": error}, 1e-4)
        times = measure({key: steps(model) for key, model in models.items()}, device, warmup=1, repeats=6, at_most=0.3)
        ms = {key: time / BITSTREAM_STEPS for key, time in times.items()}
        return [results.put(name, "training_step", "ms", ms["weft"], peer, ms[peer]) for peer in ("scan", "torch.nn")]

    return Entry(name, ("training_step",), run)


def _language_model_entry(device: str = "cuda", seconds: float | None = None) -> Entry:
    """What examples/char_lm.py compares: a stack of minGRUs beside a GRU, each trained on Python's documentation for so
    many seconds; bits per character of the tenth that was held out, and characters per second of training."""
    seconds = LANGUAGE_MODEL_SECONDS[device] if seconds is None else seconds
    example = _example("char_lm")
    options = example["parse"](["--device", device, "--seconds", str(seconds), "--steps", "1000000"])
    sizes = {"H": options.hidden, "B": options.batch, "T": options.length}
    name = case_name(cell="mingru", model="char_lm", device=device, dtype="fp32", **sizes, seconds=f"{seconds:g}")

    def run(results: Results) -> list[dict[str, str]]:
        text = python_docs()
        vocabulary = Vocabulary.of(text)
        tokens, held_out = split(vocabulary.encode(text).to(device))
        speeds, bits = {}, {}
        for cell, model, more in (("gru", "CharLM", [options.algorithm]), ("mingru", "BlocksLM", [])):
            torch.manual_seed(0)
            net = example[model](len(vocabulary), options.embedding, options.hidden, *more).to(device)
            speeds[cell], _ = example["train"](net, tokens, options)
            bits[cell] = example["bits_per_character"](net, held_out)
        return [
            results.put(name, "bits_per_character", "bits", bits["mingru"], "gru", bits["gru"]),
            results.put(name, "throughput", "characters/s", speeds["mingru"], "gru", speeds["gru"]),
        ]

    return Entry(name, ("bits_per_character", "throughput"), run)


def table(device: str, algorithm: str = "auto") -> Iterator[Entry]:
    """Every entry of the table that runs on this device."""
    if device == "cpu":
        for dtype in ("fp32", "bf16"):
            yield diagonal_entry(256, 8, 4096, dtype, device="cpu")
        yield pointwise_entry(8, 256, 1000, "fp32", device="cpu")
        for cell in ("rnn_tanh", "gru"):
            yield _layer_entry(LayerCase(cell, 20, 16, 1000, device="cpu", algorithm=algorithm))
            yield _error_entry(LayerCase(cell, 20, 16, 1000, device="cpu", algorithm=algorithm))
        yield _language_model_entry("cpu")
        return
    for T in (1000, 3000, 10000, 30000):
        yield _layer_entry(LayerCase("rnn_tanh", 20, 16, T, algorithm=algorithm))
    for T, inputs in ((259, 38), (517, 24), (1034, 12)):
        for B in (16, 32, 64):
            yield _layer_entry(LayerCase("gru", 20, B, T, inputs, algorithm=algorithm))
    for T in (1000, 10000):
        yield _layer_entry(LayerCase("lstm", 20, 16, T, algorithm=algorithm))
    for cell, H in (("rnn_tanh", 64), ("rnn_tanh", 128), ("gru", 64), ("gru", 128), ("lstm", 64)):
        yield _layer_entry(LayerCase(cell, H, 16, 10000, algorithm=algorithm))
        yield _error_entry(LayerCase(cell, H, 16, 1000, algorithm="scan"))
    for B, H, lengths in DIAGONAL:
        for T in lengths:
            yield diagonal_entry(H, B, T, "fp32")
    for dtype in ("bf16", "fp16"):
        for B, H, T in ((8, 1536, 16384), (8, 1536, 65536), (1, 768, 65536)):
            yield diagonal_entry(H, B, T, dtype)
    for B, H, T, dtype, shift in POINTWISE:
        yield pointwise_entry(B, H, T, dtype, shift)
    for shift in MEMORIES:
        if shift not in (0.0, -5.0):
            yield pointwise_entry(1, 768, 65536, "fp32", shift)
    for cell in ("paragru", "paralstm"):
        for B, H, T, dtype, shift in POINTWISE:
            if dtype == "fp32" and not shift:
                yield para_entry(cell, B, H, T)
    yield _bitstream_entry()
    yield spiking_entry()
    yield first_call_entry()
    for B, H, T in ((8, 1536, 16384), (1, 768, 65536)):
        yield diagonal_entry(H, B, T, "c64")
    for B, H, T, dtype in ((8, 1536, 16384, "fp32"), (8, 1536, 16384, "bf16"), (4, 768, 16384, "fp32")):
        yield batch_first_entry(H, B, T, dtype)
    for dtype, N in itertools.product(("fp32", "c64"), (16, 64)):
        yield read_out_entry(N, 512, 8, 2048, dtype)
    yield read_out_entry(16, 512, 8, 2048, "fp32", full=True)
    yield host_entry()
    yield _dense_entry(20, 16, 30000)
    yield _language_model_entry()
    for cell in RNN_KERNELS:
        yield _memory_entry(LayerCase(cell, 20, 16, 30000, algorithm=algorithm))
        yield _memory_entry(LayerCase(cell, 64, 16, 30000, algorithm="scan"))
    for dtype in ("fp32", "fp16", "bf16"):
        for cell in RNN_KERNELS:
            yield _error_entry(LayerCase(cell, 20, 16, 1000, dtype=dtype, algorithm=algorithm))


def run_table(options: argparse.Namespace) -> None:
    results = Results(options.output or RESULTS / "scan.csv")
    failures: list[str] = []
    for device in options.devices:
        entries = [entry for entry in table(device, options.algorithm) if entry.matches(options.filter)]
        failures += run_entries(entries, results)
    exit_with(failures)


def grid_cases(options: argparse.Namespace) -> list[LayerCase]:
    """The grid, but for the points that torch's own layer cannot run."""
    return [
        LayerCase(cell, H, B, T, inputs=H, device=device, algorithm=options.algorithm)
        for device in options.devices
        for cell in options.cells
        for T in options.T
        for B in options.B
        for H in options.H
        if why_not_cudnn(device, cell, H, T, T * B) is None
    ]


def run_grid(options: argparse.Namespace) -> None:
    results = Results(options.output or RESULTS / "scan_auto.csv")
    cases = grid_cases(options)
    random.Random(time.time_ns()).shuffle(cases)
    # Stable: within the missing ones and within the present ones the order stays random.
    cases.sort(key=lambda c: results.measured(c.name, "forward_backward", "torch.nn", hardware(c.device)))
    deadline = time.monotonic() + 60 * options.minutes
    done, skipped, lost = 0, [], []
    for case in cases:
        if time.monotonic() > deadline:
            break
        try:
            _measure_grid_point(case, results)
            done += 1
        except torch.OutOfMemoryError:
            skipped.append(f"{case.name}: does not fit into memory")
        except torch.AcceleratorError as error:
            lost.append(f"{case.name}: the GPU is lost to this process: {error}")
            break
        except (RuntimeError, NotImplementedError) as error:
            skipped.append(f"{case.name}: {error}")
        if case.device == "cuda" and case.T * case.B * case.H > 2**24:
            torch.cuda.empty_cache()
    results.save()
    print("\n".join([f"{done} of {len(cases)} points measured, {len(skipped)} skipped", *skipped]))
    slower = slower_than_torch(list(results.rows.values()))
    print(f"slower than torch.nn by more than the bound: {len(slower)}")
    show(slower)
    if lost:
        exit_with(lost)


def _measure_grid_point(case: LayerCase, results: Results) -> None:
    step = LayerStep(case)
    check_layers(step)
    start = time.perf_counter()
    step.forward_backward(step.peer)
    if case.device == "cuda":
        torch.cuda.synchronize()
    # A long step hardly varies, and a grid of ten of each would not fit into a few minutes.
    long = time.perf_counter() - start > 0.02
    rounds = {"warmup": 1, "repeats": 3, "at_most": 0.0} if long else {"at_most": 0.15}
    times = measure(step.candidates("forward_backward"), case.device, **rounds)
    results.put(case.name, "forward_backward", "ms", times["weft"], "torch.nn", times["torch.nn"])


def slower_than_torch(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Rows of "auto" that lose to torch.nn by more than 5% (below 0.5 ms: by more than 0.02 ms), worst first."""

    def loses(row: dict[str, str]) -> bool:
        mine, peers = float(row["weft"]), float(row["peer_value"])
        return mine > (peers + 0.02 if peers < 0.5 else 1.05 * peers)

    auto = [row for row in rows if "algorithm" not in parse_case(row["case"])]
    return sorted(filter(loses, auto), key=lambda row: float(row["ratio"]))


def main(arguments: list[str] | None = None) -> None:
    filters = "substring of case or metric; `grid`: the grid, into scan_auto.csv, by default on one device"
    parser = table_parser("scan", __doc__, filters=filters, minutes=None)
    parser.add_argument("--algorithm", default="auto", help='of Weft\'s layers (default "auto")')
    grid = parser.add_argument_group("grid")
    grid.add_argument("--minutes", type=float, default=8.0, help="budget of wall clock (default 8)")
    grid.add_argument("--cells", nargs="+", choices=tuple(RNN_KERNELS), default=GRID_CELLS)
    grid.add_argument("--T", nargs="+", type=int, default=GRID_T)
    grid.add_argument("--B", nargs="+", type=int, default=GRID_B)
    grid.add_argument("--H", nargs="+", type=int, default=GRID_H)
    grid.add_argument("--report", action="store_true", help="only list the grid's rows that lose to torch.nn")
    options = parser.parse_args(arguments)
    devices = begin_table(options)
    if options.report:
        show(slower_than_torch(read_rows(options.output or RESULTS / "scan_auto.csv")))
        return
    on_grid = options.filter == "grid"
    if options.devices is None:
        options.devices = devices[:1] if on_grid else devices
    (run_grid if on_grid else run_table)(options)


if __name__ == "__main__":
    main()
