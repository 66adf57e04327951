"""One traits header for every cell, and one table of cells in Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import weft
from weft._rnn.table import CELLS, MODES

CSRC = Path(__file__).parents[2] / "csrc"

SHARED = ("rnn/cells/cell.h", "rnn/cells/cells.h")
"""The list of cells, and the headers of all."""


def naming(cell: str) -> set[str]:
    """The files whose code names a cell, by its own name or its traits'."""
    traits = "".join(part.capitalize() for part in cell.split("_"))
    pattern = re.compile(rf'\bk?{traits}\b|\b{cell}(_\w+)?\b|"{cell}"|\b{cell}\.h')
    found = set()
    for path in (CSRC / "rnn").rglob("*.*"):  # the minimal cells of scan/ are others
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
            code = re.sub(r'kCosts = "\w+"', "", code)  # a table of costs, which a cell may borrow
            if pattern.search(code):
                found.add(path.relative_to(CSRC).as_posix())
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_is_a_header_and_at_most_four_files_that_name_it(cell):
    found = naming(cell)
    header = f"rnn/cells/{cell}.h"
    assert header in found and found >= set(SHARED)
    others = found - {header}
    assert len(others) <= 4, f"{cell} is named in {sorted(others)}"


def test_the_table_is_what_torchs_layers_are():
    assert {name.lower(): name for name in MODES} == {cell: mode for mode, cell in MODES.items()}
    for kind, options, cell in (
        (torch.nn.RNN, {}, "rnn_tanh"),
        (torch.nn.RNN, {"nonlinearity": "relu"}, "rnn_relu"),
        (torch.nn.GRU, {}, "gru"),
        (torch.nn.LSTM, {}, "lstm"),
    ):
        layer = kind(3, 5, **options)
        assert MODES[layer.mode] == cell
        assert CELLS[cell].gates == layer.weight_hh_l0.shape[0] // 5
        assert CELLS[cell].states == (2 if cell == "lstm" else 1)
        assert type(getattr(weft.nn, kind.__name__)(3, 5, **options)).__name__ == kind.__name__
    assert CELLS["rnn_relu"].costs == "rnn_tanh" and CELLS["gru"].costs == "gru"
