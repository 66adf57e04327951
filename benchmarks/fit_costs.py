"""Fits the costs in weft._rnn.costs to benchmarks/results.

``python -m benchmarks.fit_costs`` prints the constants and their errors, to be copied there: least squares of the
relative errors, without negative constants.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from weft._rnn import choice, costs
from weft._rnn.case import Case
from weft._rnn.costs import Line

from benchmarks.common import DTYPES, RESULTS, of_one_gpu, parse_case, read_rows

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


class Row(NamedTuple):
    """A layer's time beside torch.nn's, in microseconds."""

    file: str
    case: Case
    metric: str
    weft: float
    torch: float

    @property
    def steps(self) -> int:
        return self.case.steps or 0

    @property
    def kernel(self) -> str:
        return costs.cudnn_kernel(self.case)


def rows() -> Iterator[Row]:
    """The layers' times under "auto" on the GPU that most rows are from."""
    for file in ("rnn", "scan", "scan_auto"):
        for row in of_one_gpu(read_rows(RESULTS / f"{file}.csv")):
            keys = parse_case(row["case"])
            if "cell" not in keys or keys["device"] != "cuda" or "algorithm" in keys:
                continue
            if row["peer"] == "torch.nn" and row["unit"] in ("ms", "us"):
                scale = {"ms": 1e3, "us": 1.0}[row["unit"]]
                times = scale * float(row["weft"]), scale * float(row["peer_value"])
                yield Row(file, case_of(keys, row["metric"]), row["metric"], *times)


def case_of(keys: dict[str, str], metric: str) -> Case:
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


def fit(features: Iterable[Sequence[float]], times: Sequence[float]) -> np.ndarray:
    """Constants of the features, the one that would be most negative left out until none is."""
    X = np.array(list(features)) / np.array(times)[:, None]
    kept = list(range(X.shape[1]))
    while True:
        found = np.linalg.lstsq(X[:, kept], np.ones(len(X)), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    constants = np.zeros(X.shape[1])
    constants[kept] = found
    return constants


def fit_line(cases: Sequence[Case], times: Sequence[float], names: Sequence[str]) -> Line:
    units = [Line(**{name: 1.0}) for name in names]
    constants = fit(([unit.us(case) for unit in units] for case in cases), times)
    return Line(**{name: float(f"{c:.3g}") for name, c in zip(names, constants, strict=True)})


def show(name: str, value: object, expected: Iterable[float], times: Sequence[float]) -> None:
    """Prints a constant, and how far what it says is from what was measured."""
    errors = np.array(list(expected)) / np.array(times) - 1
    text = f"{value:.3g}" if isinstance(value, float) else value
    print(f"{name}: {text}\n    {len(errors)} rows, rms {np.sqrt(np.mean(errors**2)):.1%}, "
          f"worst {abs(errors).max():.0%}")  # fmt: skip


def show_line(name: str, of: Sequence[Row], time: Callable[[Row], float], names: Sequence[str]) -> Line:
    cases, times = [row.case for row in of], [time(row) for row in of]
    line = fit_line(cases, times, names)
    show(name, text_of(line), (line.us(case) for case in cases), times)
    return line


def text_of(line: Line) -> str:
    return f"Line({', '.join(f'{name}={constant:g}' for name, constant in line._asdict().items() if constant)})"


def fit_torch(long: Sequence[Row]) -> None:
    """cuDNN's kernels for all steps: a line per cell, and the forward pass's share; its standard ones: the launches."""
    for kernel, cells in costs.CUDNN.items():
        of_kernel = [row for row in long if row.kernel == kernel]
        whole = {(row.file, row.case): row.torch for row in of_kernel if row.metric == "forward_backward"}
        for cell in cells:
            some = [row for row in of_kernel if row.case.cell == cell and row.metric == "forward_backward"]
            show_line(f"CUDNN {kernel} {cell}", some, lambda row: row.torch, LINES[kernel])
        pairs = [
            (row.torch, whole[row.file, row.case._replace(trains=True)])
            for row in of_kernel
            if row.metric == "forward" and (row.file, row.case._replace(trains=True)) in whole
        ]
        share = statistics.median(forward / both for forward, both in pairs)
        show(f"FORWARD_SHARE {kernel}", share, (share * both for _, both in pairs), [forward for forward, _ in pairs])
    for trains in (True, False):
        some = [row for row in long if row.kernel == "standard" and row.case.trains == trains]
        products = [costs.products_us(row.case) for row in some]
        steps = [row.steps * row.case.layers * row.case.directions for row in some]
        times = [row.torch for row in some]
        # What the products do not explain, relative to the whole.
        weights = np.array(steps) / times
        launch = float(weights @ (1 - np.array(products) / times) / (weights @ weights))
        show(f"LAUNCHES {trains}", launch, (launch * n + p for n, p in zip(steps, products, strict=True)), times)


def fit_scan(long: Sequence[Row]) -> None:
    """A line per cell and range of H, and what a forward pass takes besides its steps."""
    lines = {}
    for cell, largest in costs.SCAN:
        some = [row for row in long if row.case.cell == cell and row.metric == "forward_backward"]
        some = [row for row in some if ran_as_scan(row) and (row.case.hidden_size <= 32) == (largest == 32)]
        one_size = len({row.case.hidden_size for row in some}) == 1
        names = [name for name in LINES["scan"] if not (one_size and name == "unit")]
        lines[cell, largest] = show_line(f"SCAN {cell} {largest}", some, lambda row: row.weft, names)
    forward = [row for row in rows() if row.metric == "forward" and row.file == "scan" and ran_as_scan(row)]
    steps = [lines[row.case.cell, 32]._replace(start=0.0, volume=0.0).us(row.case) for row in forward]
    start = statistics.median(row.weft - us for row, us in zip(forward, steps, strict=True))
    show("SCAN_FORWARD_START", start, (start + us for us in steps), [row.weft for row in forward])


def ran_as_scan(row: Row) -> bool:
    """Whether it was certainly the scan that "auto" took."""
    if row.case.hidden_size <= 32:
        return row.file == "scan" or (row.file == "scan_auto" and (row.case.batch or 0) <= SCAN_BATCH)
    return row.file == "scan_auto" and choice.why_auto_skips_scan(row.case) is None


def show_host(all_rows: Sequence[Row]) -> None:
    """The least that a layer takes: medians of short training steps and of single steps."""
    short = [row for row in all_rows if row.metric == "forward_backward" and row.steps <= SHORT]
    decode = [row for row in all_rows if row.metric == "decode"]
    print(f"WEFT_HOST: {statistics.median(row.weft for row in short if row.case.hidden_size <= 32):.3g}, "
          f"{statistics.median(row.weft for row in decode):.3g}")  # fmt: skip
    print(f"TORCH_HOST: {statistics.median(row.torch for row in short):.3g}, "
          f"{statistics.median(row.torch for row in decode if row.kernel != 'standard'):.3g}")  # fmt: skip
    print(f"TORCH_HOST_STANDARD: {statistics.median(row.torch for row in decode if row.kernel == 'standard'):.3g}")


def main(arguments: list[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.fit_costs", description=__doc__).parse_args(arguments)
    all_rows = list(rows())
    long = [row for row in all_rows if row.steps >= LONG]
    fit_torch(long)
    fit_scan(long)
    show_host(all_rows)


if __name__ == "__main__":
    main()
