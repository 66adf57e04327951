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
    """h and the others: 2 with c, 4 with c, n and m."""
    kept: int
    """How many of the others `cells` holds at every step."""

    @property
    def others(self) -> int:
        """States beside h, which the operators take side by side as c."""
        return self.states - 1


def _fitted(costs: str) -> str:
    """The cell that was measured for all of a table of costs: the first that has it."""
    return next(name for name, traits in _C.rnn.cells.items() if traits["costs"] == costs)


CELLS: dict[str, Cell] = {
    name: Cell(_fitted(traits["costs"]), traits["gates"], traits["saved"], traits["states"], traits["kept"])
    for name, traits in _C.rnn.cells.items()
}
"""Name -> traits."""

MODES: dict[str, str] = {name.upper(): name for name in CELLS}
"""A layer's mode -> its cell's name."""

_UNKNOWN = Cell("", 0, 0, 1, 0)


def traits(name: str) -> Cell:
    """Of a cell; of a name that is none, which the operators refuse in their own words, nothing."""
    return CELLS.get(name, _UNKNOWN)
