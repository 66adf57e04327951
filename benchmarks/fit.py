"""Writes what Weft's choices know of a GPU: python/weft/costs/<gpu>.json.

``python -m benchmarks.fit [--minutes 15]`` measures on the GPU at hand and fits: layers by each algorithm into
results/fit.csv, large products, the stages of the scans, sparse chains, the vertex engine's executors, and ways to lay
the recurrence out. What it has
no time to measure, could not, or does not (linear scans by batched products, the limits of diagonal ones, the launches
of scans in chunks) stays as it was: what the GPU's file says, or what the nearest GPU's says, scaled. A second run goes
on with the layers where the first one stopped.

``python -m benchmarks.fit --results [GPU]`` fits to the rows of benchmarks/results alone and needs no GPU.

Lines are least squares of the relative errors, without negative constants. A table says in ``from`` how many rows
it was fitted to and how far it is off from them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import weft
from weft._base import costs as gpu_costs
from weft._rnn.select import choice, costs
from weft._rnn.select.case import Case
from weft._rnn.select.costs import Line

from benchmarks import executors, geometries, rnn, rnn_cases, sparse_costs, stages
from benchmarks.common import (
    DTYPES,
    RESULTS,
    Candidate,
    Entry,
    Results,
    exit_with,
    measure,
    of_one_gpu,
    parse_case,
    read_rows,
    run_entries,
)
from benchmarks.costs_file import Tables, before, path_of, text_of
from benchmarks.fitting import error, fit, rounded
from benchmarks.layers import LayerCase, LayerStep, check_layers

SHORT, LONG = 100, 1000
"""Steps up to which the host is most of the time, and from which on the device is."""
SCAN_BATCH = 64
"""Up to 32 hidden units "auto" may take the persistent kernels for larger batches than this."""
LINES = {
    "small": ("start", "step", "square", "sequence", "volume"),
    "persistent": ("step", "unit", "sequence"),
    "scan": ("start", "step", "unit", "volume"),
}
"""Which constants of a line are fitted; the others stay zero."""
GOES_WITH = {
    "start": "fixed",
    "step": "clock",
    "unit": "clock",
    "square": "clock",
    "sequence": "chip",
    "volume": "chip",
}
"""What the constants of a line go with on another GPU."""
SCANS = (("rnn_tanh", 32), ("gru", 32), ("lstm", 32), ("rnn_tanh", 128), ("gru", 128), ("lstm", 64))
"""Cells and the largest H of each of their lines."""
FILES = ("rnn", "scan", "scan_auto", "fit")


class Row(NamedTuple):
    """A layer's time beside torch.nn's, in microseconds."""

    file: str
    case: Case
    metric: str
    algorithm: str
    """Weft's."""
    weft: float
    torch: float

    @property
    def steps(self) -> int:
        return self.case.steps or 0

    @property
    def kernel(self) -> str:
        return costs.cudnn_kernel(self.case)


def rows(gpu: str | None = None) -> Iterator[Row]:
    """The layers' times on a GPU, None for the one that most rows are from."""
    for file in FILES:
        found = read_rows(RESULTS / f"{file}.csv")
        for row in of_one_gpu(found) if gpu is None else [row for row in found if row["gpu"] == gpu]:
            keys = parse_case(row["case"])
            if "cell" not in keys or keys["device"] != "cuda" or (file != "fit" and "algorithm" in keys):
                continue
            if "memory" in keys or "weights" in keys:  # times of a net, not of its sizes
                continue
            if row["peer"] == "torch.nn" and row["unit"] in ("ms", "us"):
                scale = {"ms": 1e3, "us": 1.0}[row["unit"]]
                times = scale * float(row["weft"]), scale * float(row["peer_value"])
                case = case_of(keys, row["metric"])
                yield Row(file, case, row["metric"], keys.get("algorithm", "auto"), *times)


def case_of(keys: Mapping[str, str], metric: str) -> Case:
    """The case of a row, as the choice of an algorithm sees it."""
    hidden = int(keys["H"])
    return Case(
        cell=keys["cell"],
        device=keys["device"],
        dtype=DTYPES[keys["dtype"]],
        hidden_size=hidden,
        batch=int(keys["B"]),
        steps=int(keys["T"]),
        packed=keys.get("layout") == "packed",
        layers=int(keys.get("layers", 1)),
        directions=int(keys.get("directions", 1)),
        trains=metric in ("backward", "forward_backward"),
        input_size=int(keys.get("inputs", hidden)),
        index=0,
        capability=(9, 0),
        tf32=keys["dtype"] == "fp32",
    )


# ---------------------------------------------------------------------------------------------------------- arithmetic


def fit_line(cases: Sequence[Case], times: Sequence[float], names: Sequence[str]) -> Line:
    units = [Line(**{name: 1.0}) for name in names]
    constants = fit(([unit.us(case) for unit in units] for case in cases), times)
    return Line(**{name: rounded(c) for name, c in zip(names, constants, strict=True)})


def source(what: str, expected: Iterable[float], times: Sequence[float]) -> str:
    return f"{len(times)} {what}, {error(expected, times)}"


def table_of(line: Line, cases: Sequence[Case], times: Sequence[float]) -> dict[str, Any]:
    table: dict[str, Any] = {"from": source("rows", (line.us(case) for case in cases), times)}
    for name, constant in line._asdict().items():
        if constant:
            table.setdefault(GOES_WITH[name], {})[name] = constant
    return table


def torch_tables(all_rows: Sequence[Row], teraflop: Callable[[Row], float]) -> Iterator[tuple[str, dict[str, Any]]]:
    """cuDNN's kernels for all steps: a line per cell, and the forward pass's share; its standard ones: the launches.

    `teraflop` is what the standard kernels' products of a row take.
    """
    long = [row for row in all_rows if row.steps >= LONG]
    for kernel, cells in (("small", ("rnn_tanh", "gru", "lstm")), ("persistent", ("rnn_tanh", "lstm"))):
        of_kernel = [row for row in long if row.kernel == kernel]
        whole = {(row.file, row.case): row.torch for row in of_kernel if row.metric == "forward_backward"}
        for cell in cells:
            some = [row for row in of_kernel if row.case.cell == cell and row.metric == "forward_backward"]
            if len(some) >= len(LINES[kernel]):
                cases, times = [row.case for row in some], [row.torch for row in some]
                line = fit_line(cases, times, LINES[kernel])
                yield f"rnn.torch.{kernel}.{cell}", table_of(line, cases, times)
        pairs = [
            (row.torch, whole[row.file, row.case._replace(trains=True)])
            for row in of_kernel
            if row.metric == "forward" and (row.file, row.case._replace(trains=True)) in whole
        ]
        if pairs:
            share = rounded(statistics.median(forward / both for forward, both in pairs))
            words = source("rows", (share * both for _, both in pairs), [forward for forward, _ in pairs])
            yield f"rnn.torch.{kernel}", {"from": f"the median of {words}", "fixed": {"forward_share": share}}
    launches, words = {}, []
    for trains in (True, False):
        some = [row for row in long if row.kernel == "standard" and row.case.trains == trains]
        if not some:
            return
        products = [teraflop(row) for row in some]
        steps = [row.steps * row.case.layers * row.case.directions for row in some]
        times = [row.torch for row in some]
        # What the products do not explain, relative to the whole.
        weights = np.array(steps) / times
        launch = rounded(float(weights @ (1 - np.array(products) / times) / (weights @ weights)))
        launches["training_step" if trains else "forward_step"] = launch
        words.append(source("rows", (launch * n + p for n, p in zip(steps, products, strict=True)), times))
    yield "rnn.torch.standard", {"from": f"{words[0]}, training; {words[1]}, forward", "fixed": launches}


def scan_tables(all_rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A line per cell and range of H, and what a forward pass takes besides its steps."""
    long = [row for row in all_rows if row.steps >= LONG and row.metric == "forward_backward" and ran_as_scan(row)]
    lines = {}
    for cell, largest in SCANS:
        some = [row for row in long if row.case.cell == cell]
        some = [row for row in some if (row.case.hidden_size <= 32) == (largest == 32)]
        # What the limits of "auto" were when it ran is not known of every row.
        some = [row for row in some if row.algorithm == "scan"] or some
        one_size = len({row.case.hidden_size for row in some}) == 1
        names = [name for name in LINES["scan"] if not (one_size and name == "unit")]
        if len(some) >= len(names):
            cases, times = [row.case for row in some], [row.weft for row in some]
            lines[cell, largest] = fit_line(cases, times, names)
            yield f"rnn.scan.{cell}.{largest}", table_of(lines[cell, largest], cases, times)
    forward = [row for row in all_rows if row.metric == "forward" and ran_as_scan(row) and row.case.hidden_size <= 32]
    forward = [row for row in forward if (row.case.cell, 32) in lines]
    if forward:
        steps = [lines[row.case.cell, 32]._replace(start=0.0, volume=0.0).us(row.case) for row in forward]
        start = rounded(statistics.median(row.weft - us for row, us in zip(forward, steps, strict=True)))
        words = source("rows", (start + us for us in steps), [row.weft for row in forward])
        yield "rnn.scan", {"from": f"the median of {words}", "fixed": {"forward_start": start}}


def ran_as_scan(row: Row) -> bool:
    """Whether it was certainly the scan that ran."""
    if row.algorithm != "auto":
        return row.algorithm == "scan"
    if row.case.hidden_size <= 32:
        return row.file == "scan" or (row.file == "scan_auto" and (row.case.batch or 0) <= SCAN_BATCH)
    return row.file == "scan_auto" and choice.beyond_limits(row.case, choice.AUTO_SCAN) is None


def host_table(all_rows: Sequence[Row]) -> dict[str, Any] | None:
    """The least that a layer takes: medians of short training steps and of single steps."""
    short = [row for row in all_rows if row.metric == "forward_backward" and row.steps <= SHORT]
    decode = [row for row in all_rows if row.metric == "decode"]
    found = {
        "weft_training": [row.weft for row in short if row.case.hidden_size <= 32],
        "weft_forward": [row.weft for row in decode],
        "torch_training": [row.torch for row in short],
        "torch_forward": [row.torch for row in decode if row.kernel != "standard"],
        "torch_standard_training": [row.torch for row in short],
        "torch_standard_forward": [row.torch for row in decode if row.kernel == "standard"],
    }
    if not all(found.values()):
        return None
    words = f"medians of {len(short)} training steps of T up to {SHORT} and {len(decode)} single steps"
    return {"from": words, "fixed": {name: rounded(statistics.median(times)) for name, times in found.items()}}


def limit_tables(all_rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, Any]]]:
    """From how many steps and up to which batch the scan of wide states beats the persistent kernels, where both were
    measured: what loses least against the faster one, in the mean of the logarithms."""
    times: dict[tuple[str, int], dict[tuple[int, int], dict[str, float]]] = {}
    for row in all_rows:
        c = row.case
        if row.metric == "forward_backward" and c.hidden_size > 32 and row.algorithm in ("scan", "persistent"):
            of_size = times.setdefault((c.cell, c.hidden_size), {})
            of_size.setdefault((c.steps or 0, c.batch or 0), {})[row.algorithm] = row.weft
    for cell in ("rnn_tanh", "gru", "lstm"):
        limits, points = {}, 0
        for (of, hidden), both in sorted(times.items()):
            pairs = {size: (t["scan"], t["persistent"]) for size, t in both.items() if len(t) == 2}
            if of == cell and pairs:
                limits[hidden], points = best_limits(pairs), points + len(pairs)
        if limits:
            steps, batches = ([limit[i] for limit in limits.values()] for i in (0, 1))
            fixed = {"hidden_size": list(limits), "min_steps": steps, "max_batch": batches}
            yield f"rnn.scan_limits.{cell}", {"from": f"{points} points by both algorithms", "fixed": fixed}


def best_limits(pairs: Mapping[tuple[int, int], tuple[float, float]]) -> tuple[int, int]:
    """(T, B) from which and up to which the first of two times, by (T, B), is taken; B is 0 where it never is."""

    def lost(limits: tuple[int, int]) -> float:
        taken = ((first if T >= limits[0] and B <= limits[1] else second, min(first, second))
                 for (T, B), (first, second) in pairs.items())  # fmt: skip
        return math.fsum(math.log(us / least) for us, least in taken)

    lengths, batches = sorted({T for T, _ in pairs}), sorted({B for _, B in pairs})
    # The narrowest of those that lose as little.
    candidates = [(lengths[-1], 0), *((T, B) for B in batches for T in reversed(lengths))]
    return min(candidates, key=lost)


def fitted(all_rows: Sequence[Row], before: Tables) -> Tables:
    """`before` with the tables that there are rows for. The products' are `before`'s."""
    prices = before["products"]["chip"]

    def products_us(row: Row) -> float:
        precision = costs.PRECISIONS[row.case.dtype] if row.case.dtype != torch.float32 or row.case.tf32 else "float"
        return 1e-12 * costs.products_flops(row.case) * prices[f"{precision}_teraflop"]

    tables = dict(before)
    tables.update(torch_tables(all_rows, products_us))
    tables.update(scan_tables(all_rows))
    tables.update(limit_tables(all_rows))
    host = host_table(all_rows)
    if host is not None:
        tables["rnn.host"] = host
    return tables


# --------------------------------------------------------------------------------------------------------- measurement


def layer_cases() -> Iterator[tuple[LayerCase, tuple[str, ...]]]:
    """What lines, hosts and limits are fitted to, and the metrics of each."""
    training, both = ("forward_backward",), ("forward", "forward_backward")
    for cell, H, B in itertools.product(rnn_cases.GRID_CELLS, (8, 20, 32), (1, 16, 64)):
        for T in (10, 1000, 10000):
            yield LayerCase(cell, H, B, T, inputs=H, algorithm="scan"), both if B == 16 and T > 10 else training
    for cell, H, B, T in itertools.product(rnn_cases.GRID_CELLS, (64, 128), (1, 4, 16, 64), (3000, 10000)):
        for algorithm in ("scan", "persistent"):
            if algorithm == "persistent" or costs.SCAN_LARGEST[cell] >= H:
                yield LayerCase(cell, H, B, T, inputs=H, algorithm=algorithm), both if B == 16 else training
    for cell, dtype, H, B in itertools.product(rnn_cases.GRID_CELLS, ("fp16", "fp32"), (256, 512, 1024), (16, 64)):
        yield LayerCase(cell, H, B, 1024, inputs=H, dtype=dtype, algorithm="persistent"), both if B == 16 else training


def layer_entry(case: LayerCase, metrics: tuple[str, ...]) -> Entry:
    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        check_layers(step)
        times = {metric: measure(step.candidates(metric), case.device, at_most=0.1) for metric in metrics}
        return [results.put(case.name, m, "ms", t["weft"], "torch.nn", t["torch.nn"]) for m, t in times.items()]

    return Entry(case.name, metrics, run)


def measure_layers(minutes: float) -> list[str]:
    """Rows of results/fit.csv, what this commit has not measured first; what failed."""
    results, start = Results(RESULTS / "fit.csv"), time.monotonic()
    cases = list(layer_cases())
    gpu = torch.cuda.get_device_name()
    cases.sort(key=lambda each: results.measured(each[0].name, each[1][-1], "torch.nn", gpu))
    rnn.compile_kernels((case, True) for case, _ in cases if case.algorithm == "persistent" or case.H > 32)
    entries = [layer_entry(*each) for each in cases]
    entries += [rnn.decode_entry(case) for case in rnn_cases.DECODE]
    left = minutes - (time.monotonic() - start) / 60
    return run_entries(entries, results, minutes=left, patience=rnn.PATIENCE)


def measured_products() -> dict[str, Any]:
    """Large products in each precision, and a small operation."""

    def teraflop(dtype: torch.dtype, tf32: bool, n: int = 8192) -> float:
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, tf32
        try:
            ms = measure({"mm": Candidate(lambda _: a @ b)}, "cuda", at_most=0.2)["mm"]
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        return rounded(1e3 * ms / (2e-12 * n**3))

    chip = {
        "half_teraflop": teraflop(torch.float16, False),
        "tf32_teraflop": teraflop(torch.float32, True),
        "float_teraflop": teraflop(torch.float32, False, 4096),
    }
    small = torch.zeros(1, device="cuda")

    def many(_: Any, count: int = 200) -> None:
        for _ in range(count):
            small.add_(1)

    launch = 1e3 * measure({"add": Candidate(many)}, "cuda", at_most=0.2)["add"] / 200
    return {"from": "products of matrices of 8192, and additions of one number", "chip": chip,
            "fixed": {"launch": rounded(launch)}}  # fmt: skip


def recurrence_tables(minutes: float, tables: Tables) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each tier and pass, where more geometries were measured than it has constants."""
    every = list(geometries.problems((128, 512, 1024, 2048), (1, 16, 64)))
    every = every[::7] + [problem for i, problem in enumerate(every) if i % 7]  # some of everything first
    timed = list(geometries.measure(every, 3, 60 * minutes))
    yield from tables_of_geometries(timed, tables)


def tables_of_geometries(timed: Sequence[geometries.Timed], tables: Tables) -> Iterator[tuple[str, dict[str, Any]]]:
    """Constants that no geometry needs stay as they are in `tables`."""
    for (tier, backward), constants in geometries.fit_tiers(timed).items():
        some = [each for each in timed if (each.geometry.tier, each.problem.backward) == (tier, backward)]
        if len(some) <= 2 * len(constants):
            continue
        expected = (geometries.expected({(tier, backward): constants}, each) for each in some)
        words = source("geometries", expected, [each.us for each in some])
        name = f"rnn.recurrence.{tier}.{'backward' if backward else 'forward'}"
        needed = {n for n in constants if any(each.geometry.amounts[n] for each in some)}
        clock = {n: rounded(c) if n in needed else tables[name]["clock"][n] for n, c in constants.items()}
        yield name, {"from": words, "clock": clock}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15, help="of measurements (default 15)")
    parser.add_argument("--results", nargs="?", const="NVIDIA H200", metavar="GPU",
                        help="measure nothing, fit to this GPU's rows (default NVIDIA H200)")  # fmt: skip
    parser.add_argument("--output", type=Path, help="the file (default: python/weft/costs/<gpu>.json)")
    options = parser.parse_args(arguments)
    failures: list[str] = []
    if options.results is not None:
        known = [facts for facts, _ in map(gpu_costs.read, sorted(gpu_costs.FOLDER.glob("*.json")))]
        gpu = next((facts for facts in known if facts["name"] == options.results), None)
        if gpu is None:
            raise SystemExit(f"there is no file for {options.results}: what the driver tells of it is not known here")
        tables = before(gpu)
    elif not hasattr(weft._C.common, "gpu_facts") or not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure; --results fits to the rows of benchmarks/results")
    else:
        gpu = weft._C.common.gpu_facts(torch.cuda.current_device())
        tables = before(gpu)
        deadline = time.monotonic() + 60 * options.minutes
        parts = {
            "products": lambda: {"products": measured_products()},
            "scans": lambda: stages.tables_of(stages.measured(0.1 * options.minutes), tables),
            "sparse chains": lambda: sparse_costs.tables(tables),
            "executors": lambda: executors.tables_of(
                [*executors.measured(6 * options.minutes)], gpu["multiprocessors"]
            ),
            "recurrence": lambda: recurrence_tables(0.4 * options.minutes, tables),
        }
        for name, measured in parts.items():
            try:
                tables.update(measured())
            except RuntimeError as error:  # one part must not cost the others
                failures.append(f"{name}: {error}")
        failures += measure_layers((deadline - time.monotonic()) / 60)
    output = options.output or path_of(gpu)
    output.write_text(text_of(gpu, fitted(list(rows(gpu["name"])), tables)), encoding="utf-8")
    print(output)
    exit_with(failures)


if __name__ == "__main__":
    main()
