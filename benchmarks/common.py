"""What every benchmark shares: timing, the table of results and the names in it, the command line.

A row of ``benchmarks/results/<engine>.csv`` is one case and one metric on one device against one peer; measuring it
again replaces it. Times are CUDA events (wall clock on the CPU), in milliseconds, medians of at least ten runs after
three warm-ups. The candidates of one case take turns, so that a drifting clock rate meets them alike, and the device
is idle before each run, so that a time includes what the host does before the first kernel starts. A backward pass
without kernels has run just before, so that waking the thread that runs them is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import functools
import gc
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from weft.info import cpu_name

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = ("date", "commit", "gpu", "torch", "cuda", "case", "metric", "unit", "weft", "peer", "peer_value", "ratio")
CASE_KEYS = ("cell", "op", "model", "device", "dtype", "layout", "H", "B", "T", "layers", "directions")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
CPU_THREADS = 2
"""The CPU rows are for two cores wherever they are measured."""

_longest = math.inf  # seconds of counted rounds of any candidate: --seconds


def case_name(**keys: Any) -> str:
    """The compact ``key=value`` list that names a case: the known keys in their order, then the others as given."""
    ordered = [key for key in CASE_KEYS if key in keys] + [key for key in keys if key not in CASE_KEYS]
    return " ".join(f"{key}={keys[key]}" for key in ordered)


def parse_case(case: str) -> dict[str, str]:
    """The keys and values of a case's name."""
    return dict(part.split("=", 1) for part in case.split())


def commit() -> str:
    """The commit that is measured: ``WEFT_COMMIT``, or git's, with a ``+`` where tracked sources were changed."""
    given = os.environ.get("WEFT_COMMIT")
    if given:
        return given

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware(device: str) -> str:
    """What the ``gpu`` column holds: the GPU's name, or the CPU's where the case runs there."""
    return torch.cuda.get_device_name() if device == "cuda" else cpu_name()


def significant(value: float, digits: int = 4) -> str:
    """`value` in plain notation with that many significant digits, however small it is in scientific."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    if abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


class Results:
    """A CSV of rows, at most one per (case, metric, peer, gpu), kept sorted on disk.

    Args:
        path: the file; it is read where it exists, and written by :meth:`save`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[str, str, str, str], dict[str, str]] = {}
        self._commit = commit()
        for row in read_rows(path):
            self.rows[self._key(row)] = row

    @staticmethod
    def _key(row: Mapping[str, str]) -> tuple[str, str, str, str]:
        return row["case"], row["metric"], row["peer"], row["gpu"]

    def measured(self, case: str, metric: str, peer: str, gpu: str) -> bool:
        """Whether the file has this row from this very commit."""
        row = self.rows.get((case, metric, peer, gpu))
        return row is not None and row["commit"] == self._commit

    def put(self, case: str, metric: str, unit: str, weft: float, peer: str, peer_value: float) -> dict[str, str]:
        """Adds or replaces a row. The ratio is ``peer_value / weft``, empty where `weft` is not positive."""
        row = {
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "commit": self._commit,
            "gpu": hardware(parse_case(case)["device"]),
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "",
            "case": case,
            "metric": metric,
            "unit": unit,
            "weft": significant(weft),
            "peer": peer,
            "peer_value": significant(peer_value),
            "ratio": significant(peer_value / weft) if weft > 0 else "",
        }
        self.rows[self._key(row)] = row
        return row

    def drop(self, row: Mapping[str, str]) -> None:
        """Takes a row away, of this run or of an earlier one."""
        self.rows.pop(self._key(row), None)

    def save(self) -> None:
        """Writes the file whole, then renames it into place, so that an interrupted run leaves the old one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(self.rows.values(), key=_order))
        temporary.replace(self.path)


def host_us(run: Callable[[], Any], rounds: int = 15) -> float:
    """Median microseconds until `run` returns, with an idle device before it."""
    times = []
    for _ in range(3 + rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = run()
        times.append(1e6 * (time.perf_counter() - start))
        del result
    return statistics.median(times[3:])


def put_all(results: Results, name: str, metric: str, times: dict[str, float]) -> list[dict[str, str]]:
    """The rows of one measurement, ``"weft"`` beside each of its peers."""
    mine = times.pop("weft")
    return [results.put(name, metric, "ms", mine, peer, time) for peer, time in times.items()]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a results file, none where it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def of_one_gpu(rows: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The rows of the GPU that most of them are from, and those of CPUs."""
    rows = list(rows)
    gpus = [row["gpu"] for row in rows if parse_case(row["case"])["device"] == "cuda"]
    most = max(gpus, key=gpus.count) if gpus else None
    return [row for row in rows if parse_case(row["case"])["device"] != "cuda" or row["gpu"] == most]


def _order(row: Mapping[str, str]) -> tuple:
    """Numbers in a case's name sort as numbers."""
    parts = [(key, 0, float(value), "") if value.isdigit() else (key, 1, 0.0, value) for key, value in
             parse_case(row["case"]).items()]  # fmt: skip
    return parts, row["metric"], row["peer"], row["gpu"]


@dataclass
class Candidate:
    """Something to time: `run` is timed and receives what `prepare`, which is not timed, returns."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


def timed(run: Callable[[], Any]) -> Candidate:
    """What needs nothing prepared."""
    return Candidate(lambda _: run())


def peer(name: str, make: Callable[[], Candidate]) -> dict[str, Candidate]:
    """A peer by its name: none where it fails, which costs its own row alone."""
    try:
        return {name: make()}
    except RuntimeError as error:
        print(f"no row for {name}: {error}", flush=True)
        return {}


def measure(
    candidates: Mapping[str, Candidate],
    device: str,
    *,
    warmup: int = 3,
    repeats: int = 10,
    at_most: float = 1.0,
    spread: float = 0.0,
    blocks: int = 2,
) -> dict[str, float]:
    """Median time of each candidate in milliseconds, warm: as in a training loop, a step follows its like.

    Each candidate has blocks of rounds, in turns, so that a drift of the machine meets all of them; every block starts
    with its own warm-up.

    Args:
        candidates: by name.
        device: ``"cuda"`` (events on the current stream) or ``"cpu"`` (wall clock).
        warmup: rounds at the start of a block that are not counted.
        repeats: the least number of counted rounds of a candidate; short ones get up to five times as many.
        at_most: seconds of counted rounds of a candidate after which no round beyond `repeats` is started; at most what
            ``--seconds`` says.
        spread: no round beyond `repeats` is started either where the counted ones of a candidate differ by no more
            than this part of their median.
        blocks: of a candidate.
    """
    at_most = min(at_most, _longest)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    enabled = gc.isenabled()
    gc.disable()  # a collection in the middle of one candidate's run would be charged to it
    try:
        for block in range(1, blocks + 1):
            for name, candidate in candidates.items():
                for _ in range(warmup):
                    _time_once(candidate, device)
                start, least, most = time.perf_counter(), block * repeats / blocks, block * 5 * repeats / blocks
                counted = times[name]
                while len(counted) < least or (
                    len(counted) < most and time.perf_counter() - start < at_most / blocks and _spread(counted) > spread
                ):
                    counted.append(_time_once(candidate, device))
    finally:
        if enabled:
            gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def _spread(times: Sequence[float]) -> float:
    """From the least to the most, as a part of the median."""
    return (max(times) - min(times)) / statistics.median(times)


def measure_in_turns(
    candidates: Mapping[str, Candidate], device: str = "cpu", *, rounds: int, warmup: int = 2
) -> dict[str, float]:
    """Median time of each candidate in milliseconds, one run of each after the other, so that what else the machine
    does meets all of them: by the wall clock, or for the device `"cuda"` by events on its current stream."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(warmup + rounds):
        for name, candidate in candidates.items():
            elapsed = _time_once(candidate, device)
            if index >= warmup:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen]]:
    """So many processes that compute all the time, each on one thread, while the block runs."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in started:
            process.stdout.readline()  # it runs
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
            process.stdout.close()


def _time_once(candidate: Candidate, device: str) -> float:
    prepared = candidate.prepare()
    # The result is held until the clock has stopped, so that freeing it is not timed.
    if device == "cpu":
        start = time.perf_counter()
        result = candidate.run(prepared)
        elapsed = (time.perf_counter() - start) * 1e3
        del result
        return elapsed
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    wake_autograd()
    begin.record()
    result = candidate.run(prepared)
    end.record()
    end.synchronize()
    del result
    return begin.elapsed_time(end)


def captured(run: Callable[..., Any], prepare: Callable[[], Any] | None = None) -> Callable[[], Any]:
    """`run` in a CUDA graph: replays it, and returns what it returned under capture.

    Gradients in `run` must be of what it computes itself, by :func:`torch.autograd.grad`, from leaves that no graph
    outside of it holds: autograd runs a node on the stream on which it was made, a leaf's included. Or of what
    `prepare` gives, which is called first, on the stream that is captured, and whose result `run` gets.

    Raises:
        What `run` raises under capture. The next capture and random numbers of torch work all the same.
    """
    gc.collect()  # a cycle that nobody has collected yet may hold such a leaf's node
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    # torch leaves the stream of a capture that fails current, and its generator and its allocator in the capture.
    with torch.cuda.stream(stream):
        stream.wait_stream(before)
        if prepare is not None:
            run = functools.partial(run, prepare())
        for _ in range(3):
            run()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            generator = torch.cuda.default_generators[stream.device_index]
            seed = generator.initial_seed()
            generator.graphsafe_set_state(torch.Generator(stream.device).graphsafe_get_state())
            generator.manual_seed(seed)
            with contextlib.suppress(RuntimeError):  # where the capture was ended
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            raise
    before.wait_stream(stream)
    held = results, run  # the graph reads what `prepare` made, too

    def replay() -> Any:
        graph.replay()
        return held[0]

    return replay


def wake_autograd() -> None:
    """Runs a backward pass without kernels: autograd's thread for the device sleeps while :func:`_time_once` waits, and
    a virtual machine may take a quarter of a millisecond to wake it after a wait of one."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(1, device="cuda", requires_grad=True)
        torch.autograd.grad(leaf.view(1), leaf, leaf.detach())


def peak_memory(run: Callable[[], Any]) -> int:
    """Most bytes that `run` holds on the current CUDA device at once beyond what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(gigabytes: float = 2.0) -> float:
    """Bytes per second, read and written together, of a device-to-device copy: the floor of what moves memory."""
    source = torch.empty(int(gigabytes * 1e9) // 4, device="cuda").uniform_()
    target = torch.empty_like(source)
    elapsed = measure({"copy": Candidate(lambda _: target.copy_(source))}, "cuda")["copy"]
    return 2 * source.numel() * source.element_size() / (elapsed * 1e-3)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference, in fp64; NaN or infinity count as infinite error."""
    value, reference = value.double(), reference.double()
    if not value.isfinite().all():
        return math.inf
    scale = reference.norm().item()
    return (value - reference).norm().item() / (scale if scale > 0 else 1.0)


def check_agreement(case: str, errors: Mapping[str, float], bound: float) -> None:
    """Refuses to time what does not compute the same.

    Raises:
        RuntimeError: an error exceeds `bound`; the message names the case and the tensor.
    """
    for name, error in errors.items():
        if not error <= bound:
            raise RuntimeError(f"{case}: {name} differs from the peer's by {error:.2e}, more than {bound:.0e}")


def show(rows: Iterable[Mapping[str, str]]) -> None:
    """Prints rows as they are measured."""
    for row in rows:
        print(
            f"{row['case']:<64} {row['metric']:<17} weft {row['weft']:>10} {row['unit']:<5} "
            f"{row['peer']:>16} {row['peer_value']:>10}  ratio {row['ratio']}",
            flush=True,
        )


@dataclass(frozen=True)
class Entry:
    """One line of a table: its name and metrics for the filter, and the function that adds its rows."""

    name: str
    metrics: tuple[str, ...]
    run: Callable[[Results], list[dict[str, str]]]

    def matches(self, text: str) -> bool:
        """Whether `text` is a part of the name or of a metric."""
        return text in self.name or any(text in metric for metric in self.metrics)


def table_parser(
    module: str, doc: str, *, filters: str = "substring of case or metric", minutes: float | None = math.inf
) -> argparse.ArgumentParser:
    """The command line of ``python -m benchmarks.<module>``: what to measure, where, how long, into which file.

    Args:
        module: its name.
        doc: its docstring, shown as help.
        filters: what the positional argument FILTER is.
        minutes: default of ``--minutes``, None for a parser without it.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("filter", nargs="?", default="", help=filters)
    parser.add_argument("--devices", nargs="+", choices=("cuda", "cpu"), help="default: cpu, and cuda where it is")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of counted rounds of a candidate, at most")
    parser.add_argument("--output", type=Path, help=f"CSV file (default: benchmarks/results/{module}.csv)")
    if minutes is not None:
        parser.add_argument(
            "--minutes", type=float, default=minutes, help="after which no entry is started: %(default)s"
        )
    return parser


def begin_table(options: argparse.Namespace) -> list[str]:
    """Sets what holds for all rows, and returns the devices that :func:`table_parser`'s options ask for."""
    global _longest
    _longest = options.seconds
    torch.set_num_threads(CPU_THREADS)
    return options.devices or (["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"])


def run_entries(
    entries: Sequence[Entry], results: Results, *, minutes: float = math.inf, patience: float | None = None
) -> list[str]:
    """Measures entries, shows their rows and writes them as they come.

    Args:
        entries: what to measure, in this order.
        results: what the rows go into.
        minutes: of wall clock, after which no entry is started.
        patience: seconds after which an entry is taken for a kernel that does not end, and the process is left.

    Returns:
        The entries that failed, and why: one that disagrees or does not fit must not cost the others.
    """
    failures: list[str] = []
    deadline = time.monotonic() + 60 * minutes
    for done, entry in enumerate(entries):
        if time.monotonic() > deadline:
            print(f"out of time: {len(entries) - done} of {len(entries)} entries left out", flush=True)
            break
        watch = threading.Timer(patience, _leave, [entry.name, patience]) if patience else None
        if watch:
            watch.start()
        try:
            show(entry.run(results))
        except Exception as error:
            failures.append(f"{entry.name}: {error}")
            print(f"FAILED {failures[-1]}", flush=True)
        finally:
            if watch:
                watch.cancel()
        results.save()
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                failures.append(f"after {entry.name} the GPU is lost to this process: {error}")
                break
    return failures


def _leave(name: str, patience: float) -> None:
    # Nothing else ends a process that waits for its GPU; every row until here is on disk.
    print(f"GIVEN UP {name}: not done after {patience:g} s", flush=True)
    os._exit(1)


def exit_with(failures: Sequence[str]) -> None:
    """Ends the process with a status that says that entries failed, if any did."""
    if failures:
        raise SystemExit("\n".join([f"{len(failures)} entries failed:", *failures]))
