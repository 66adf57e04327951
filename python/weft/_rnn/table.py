"""The recurrent cells: one table, made of the library's own (csrc/rnn/cells)."""

from __future__ import annotations

from typing import NamedTuple

from .. import _C

__all__ = ["CELLS", "MODES", "Cell", "traits"]


class Cell(NamedTuple):
    """What Python has to know of a cell."""

    costs: str
    """The cell whose lines of a GPU's costs stand for it."""
    gates: int
    """G: blocks of H rows in w_ih and w_hh."""
    saved: int
    """Blocks of H columns in the `gates` that a forward with save leaves."""
    states: int
    """1: h. 2: h and c."""


def _fitted(costs: str) -> str:
    """The cell that was measured for all of a table of costs: the first that has it."""
    return next(name for name, traits in _C.rnn_cells.items() if traits["costs"] == costs)


CELLS: dict[str, Cell] = {
    name: Cell(_fitted(traits["costs"]), traits["gates"], traits["saved"], traits["states"])
    for name, traits in _C.rnn_cells.items()
}
"""Name -> traits."""

MODES: dict[str, str] = {name.upper(): name for name in CELLS}
"""A layer's mode -> its cell's name."""

_UNKNOWN = Cell("", 0, 0, 1)


def traits(name: str) -> Cell:
    """Of a cell; of a name that is none, which the operators refuse in their own words, nothing."""
    return CELLS.get(name, _UNKNOWN)
