"""What weft._C.rnn.report says on a GPU that is not there: csrc's own planning, compiled for a processor."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from pathlib import Path
from typing import Any

from weft._base import costs as gpu_costs

from tests.emulated import COMPILER, ROOT

CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm", "slstm", "slstm_exp")
TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "exact": 3}
H200 = (132, 232_448, 90)
"""Multiprocessors, bytes of shared memory of a block, compute capability."""


class Planner:
    """`rnn_report` by the costs and limits of a GPU; float32 is TF32."""

    def __init__(self, folder: Path, costs: gpu_costs.Costs, limits: tuple[int, int, int] = H200) -> None:
        library = folder / "planner.so"
        folders = [f"-I{ROOT / place}" for place in ("tests/emulator/planner", "tests/emulator", "csrc")]
        command = [COMPILER, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", *folders]
        subprocess.run([*command, str(ROOT / "tests/emulator/planner.cpp"), "-o", str(library)], check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.expected_us.restype = ctypes.c_double
        self.library.put_cost.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_double]
        self.library.set_limits(*limits)
        for table, numbers in costs.tables.items():
            if table == "products" or table.startswith("rnn.recurrence."):
                for name, (value,) in numbers.items():
                    self.library.put_cost(table.encode(), name.encode(), value)
        self.expected_us = functools.cache(self._expected_us)

    def _expected_us(self, cell: str, dtype: str, *sizes: int) -> float:
        *sizes, steps, batch, packed, trains = sizes
        return self.library.expected_us(
            CELLS.index(cell), TYPES[dtype], *sizes, ctypes.c_int64(steps), batch, packed, trains
        )

    def __call__(
        self, *, device: int, cell: str, dtype: str, input_size: int, hidden_size: int, layers: int, directions: int,
        steps: int, batch: int, packed: bool, trains: bool, heads: int = 1,
    ) -> dict[str, Any]:  # fmt: skip
        us = self.expected_us(
            cell, dtype, input_size, hidden_size // heads, heads, layers, directions, steps, batch, packed, trains
        )
        why_not = None if us else "its weights do not fit on the chip"
        return {"why_not": why_not, "forward": None, "backward": None, "microseconds": us or None}
