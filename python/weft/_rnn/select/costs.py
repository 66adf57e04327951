"""What torch's kernels and the scan are expected to take on a GPU, in microseconds.

The numbers are in weft/costs/<gpu>.json, from lines fitted to rows of 1000 steps or more: below that the host is most
of the time, and varies by a quarter. In float32 torch's kernels took TF32. Each table says how far it is off.

The costs of the persistent kernels follow from how they are laid out on the device, see choice.persistent_plan.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ... import _C
from ..._base import costs as gpu_costs
from ..table import CELLS
from .case import Case

__all__ = [
    "FEWEST_CHUNKS",
    "Line",
    "cudnn_kernel",
    "host_us",
    "line",
    "newton_chunks",
    "newton_us",
    "persistent_at_least_us",
    "products_us",
    "scan_us",
    "torch_us",
]


class Line(NamedTuple):
    """start + T (step + unit H + square H^2 + sequence B + volume B H) microseconds, the steps of all layers and
    directions one after the other."""

    start: float = 0.0
    step: float = 0.0
    unit: float = 0.0
    square: float = 0.0
    sequence: float = 0.0
    volume: float = 0.0

    def us(self, case: Case) -> float:
        H, B = case.hidden_size, case.batch or 0
        step = self.step + self.unit * H + self.square * H * H + (self.sequence + self.volume * H) * B
        return self.start + _steps(case) * step


def line(costs: gpu_costs.Costs, table: str) -> Line:
    """The line of a table, which names what is not zero."""
    return Line(**{name: numbers[0] for name, numbers in costs.tables[table].items()})


SCAN_LARGEST = {name: _C.rnn.scan_max_hidden[name] for name in {cell.costs for cell in CELLS.values()}}
"""H up to which a cell's scan was measured."""
GATES = {name: cell.gates for name, cell in CELLS.items()}


PRECISIONS = {torch.float16: "half", torch.bfloat16: "half", torch.float32: "tf32"}


def host_us(case: Case) -> float:
    """The least that a layer of Weft takes: what the host does, alike for the scan and the persistent kernels."""
    return _host_us(case, "weft")


def _host_us(case: Case, whose: str) -> float:
    pass_ = "training" if case.trains else "forward"
    return gpu_costs.of(case.index).number("rnn.host", f"{whose}_{pass_}")


def persistent_at_least_us(case: Case) -> float:
    """A bound from below of what a plan of the persistent kernels may expect, without planning."""
    tables = gpu_costs.of(case.index).tables
    step = 0.0
    for pass_ in ("forward", "backward") if case.trains else ("forward",):
        tiers = [tables[f"rnn.recurrence.{tier}.{pass_}"] for tier in ("small", "cluster", "grid")]
        step += min(table["base"][0] + table["gate"][0] for table in tiers)
    return max(host_us(case), step * (case.steps or 0) * case.layers)


def cudnn_kernel(case: Case) -> str:
    """Which of its kernels cuDNN takes under torch: "small" or "persistent", one launch for all steps; or "standard".

    What torch asks for, as far as it was measured: it asks for "small" at larger H in a forward pass alone, and in
    bfloat16, where cuDNN does not take it.
    """
    H, B, rnn = case.hidden_size, case.batch or 0, case.cell.startswith("rnn")
    if case.packed or case.projected or case.dtype not in (torch.float16, torch.float32):
        return "standard"
    if H <= (256 if rnn else 128):
        return "small"
    alone = case.layers == case.directions == 1 and case.cell != "gru" and case.dtype == torch.float16
    sizes = H <= 1024 and H % 128 == case.input_size % 128 == 0
    batch = B <= 128 and B % 8 == 0 and (B < 96 or H < 896 or not rnn)
    return "persistent" if alone and sizes and batch else "standard"


def torch_us(case: Case) -> float | None:
    """Of torch's kernel on a GPU; None where nothing like it was measured. With a projection, whose launches were not
    measured, the least."""
    if case.steps is None or case.batch is None or case.dtype not in PRECISIONS:
        return None
    kernel, costs = cudnn_kernel(case), gpu_costs.of(case.index)
    if kernel == "standard":
        launches = costs.number("rnn.torch.standard", "training_step" if case.trains else "forward_step")
        return max(_host_us(case, "torch_standard"), launches * _steps(case) + products_us(case))
    if case.dtype == torch.float32 and not case.tf32:
        return None
    us = line(costs, f"rnn.torch.{kernel}.{_fitted(case.cell)}").us(case)
    share = 1 if case.trains else costs.number(f"rnn.torch.{kernel}", "forward_share")
    return max(_host_us(case, "torch"), us * share)


def products_us(case: Case) -> float:
    """The standard kernels' matrix products, at the rate of large ones."""
    return 1e-12 * products_flops(case) * _teraflop_us(case, case.tf32)


def products_flops(case: Case) -> int:
    """Operations of all matrix products of torch's layer."""
    state = case.proj_size or case.hidden_size
    inputs = case.input_size + (case.layers - 1) * state * case.directions + case.layers * (state // case.heads)
    columns = GATES[case.cell] * inputs + case.layers * case.proj_size
    flops = 2 * case.hidden_size * columns * (case.batch or 0) * (case.steps or 0) * case.directions
    return flops * (3 if case.trains else 1)


def projection_us(case: Case) -> float:
    """What a projection adds to the persistent kernels: the product of two weights and one for all outputs, for each
    layer and direction, at the rate of large ones, and some launches. Set, not fitted."""
    if not case.projected:
        return 0.0
    rows = GATES[case.cell] * case.hidden_size + (case.batch or 0) * (case.steps or 0)
    times = case.layers * case.directions * (3 if case.trains else 1)
    flops = 2 * rows * case.hidden_size * case.proj_size
    launch = gpu_costs.of(case.index).number("products", "launch")
    return times * (1e-12 * flops * _teraflop_us(case, False) + 4 * launch)


def _teraflop_us(case: Case, tf32: bool) -> float:
    precision = PRECISIONS[case.dtype] if case.dtype != torch.float32 or tf32 else "float"
    return gpu_costs.of(case.index).number("products", f"{precision}_teraflop")


def scan_us(case: Case) -> float | None:
    """Of the scan on a GPU; None where nothing like it was measured."""
    if case.steps is None or case.batch is None or case.dtype not in PRECISIONS:
        return None
    cell, costs = _fitted(case.cell), gpu_costs.of(case.index)
    if case.hidden_size <= 32:
        found = line(costs, f"rnn.scan.{cell}.32")
        if not case.trains:
            # The chunks of the backward pass are what grows with the batch.
            return found._replace(start=costs.number("rnn.scan", "forward_start"), volume=0.0).us(case)
        return max(host_us(case), found.us(case))
    # Above, what was measured had torch's forward pass.
    if case.dtype != torch.float32 or not case.tf32:
        return None
    largest = SCAN_LARGEST[cell]
    return max(host_us(case), line(costs, f"rnn.scan.{cell}.{largest}").us(case)) if case.trains else torch_us(case)


FEWEST_CHUNKS = 3
"""Below, "auto" leaves a sequence to the scan: a round walks as much as the chain, and there are two at least."""


def newton_chunks(case: Case) -> tuple[int, int]:
    """Chunks of time that "newton" is expected to cut a case on a GPU into, and the steps of one."""
    costs = gpu_costs.of(case.index)
    walkers = int(costs.number("rnn.newton", "walkers")) * _multiprocessors(case.index)
    shortest = int(costs.number(_newton_table(case), "shortest"))
    return _C.rnn.time_chunks(case.steps or 1, case.batch or 1, walkers, shortest)


def _newton_table(case: Case) -> str:
    return f"rnn.newton.{_C.rnn.cells[case.cell]['costs']}"


@functools.cache
def _multiprocessors(index: int | None) -> int:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties("cuda" if index is None else index).multi_processor_count
    return next(gpu_costs.read(path)[0]["multiprocessors"] for path in sorted(gpu_costs.FOLDER.glob("*.json")))


def newton_us(case: Case) -> float | None:
    """Of "newton" on a GPU where the net does not forget: the scan's chain, what two walks of a chunk take more beside
    all others, the second with looks whether it meets, and what others like it take more, of eight rounds or as many
    as an eighth of the chunks: more than there are where many change (csrc/rnn/newton/chunks.h), fewer than may be
    where few do. None where nothing like it was measured."""
    us = scan_us(case)
    if us is None or case.hidden_size > 32 or not isinstance(case.steps, int):
        return None
    costs = gpu_costs.of(case.index)
    chunks, length = newton_chunks(case)
    beside, look, rounds = (costs.number(_newton_table(case), name) for name in ("beside", "look", "rounds"))
    walks = min(chunks, max(8, -(-chunks // 8)))
    more = length * (beside + max(0, walks - 2) * look) + rounds
    return us + case.layers * case.directions * more if chunks > 1 else us


def _steps(case: Case) -> int:
    return (case.steps or 0) * case.layers * case.directions


def _fitted(cell: str) -> str:
    return CELLS[cell].costs
