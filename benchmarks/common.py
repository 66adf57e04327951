"""What every benchmark shares: timing, the table of results, and the names in it.

A row of ``benchmarks/results/<engine>.csv`` is one case and one metric on one device against one peer; measuring it
again replaces it. Times are CUDA events (wall clock on the CPU), in milliseconds, medians of at least ten runs after
three warm-ups. The candidates of one case take turns, so that a drifting clock rate meets them alike, and the device
is idle before each run, so that a time includes what the host does before the first kernel starts.
"""

from __future__ import annotations

import csv
import datetime
import gc
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
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

    def save(self) -> None:
        """Writes the file whole, then renames it into place, so that an interrupted run leaves the old one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(self.rows.values(), key=_order))
        temporary.replace(self.path)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a results file, none where it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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


def measure(
    candidates: Mapping[str, Candidate], device: str, *, warmup: int = 3, repeats: int = 10, at_most: float = 1.0
) -> dict[str, float]:
    """Median time of each candidate in milliseconds, warm: as in a training loop, a step follows its like.

    Each candidate has two blocks of rounds, in turns, so that a drift of the machine meets all of them; every block
    starts with its own warm-up.

    Args:
        candidates: by name.
        device: ``"cuda"`` (events on the current stream) or ``"cpu"`` (wall clock).
        warmup: rounds at the start of a block that are not counted.
        repeats: the least number of counted rounds of a candidate; short ones get up to five times as many.
        at_most: seconds of counted rounds of a candidate after which no round beyond `repeats` is started.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    enabled = gc.isenabled()
    gc.disable()  # a collection in the middle of one candidate's run would be charged to it
    try:
        for block in (1, 2):
            for name, candidate in candidates.items():
                for _ in range(warmup):
                    _time_once(candidate, device)
                start, least, most = time.perf_counter(), block * repeats / 2, block * 5 * repeats / 2
                while len(times[name]) < least or (
                    len(times[name]) < most and time.perf_counter() - start < at_most / 2
                ):
                    times[name].append(_time_once(candidate, device))
    finally:
        if enabled:
            gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


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
    begin.record()
    result = candidate.run(prepared)
    end.record()
    end.synchronize()
    del result
    return begin.elapsed_time(end)


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
