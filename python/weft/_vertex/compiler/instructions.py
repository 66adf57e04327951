"""The instructions of a vertex program and their derivatives, as csrc/vertex/program/ops.def lists them: those of
element-wise operations, and those of memory."""

from __future__ import annotations

from typing import NamedTuple

from ..._base.instructions import Info, parsed
from ..._C import vertex as _C

__all__ = ["ELEMENTWISE", "INSTRUCTIONS", "STORES", "Instruction"]


INSTRUCTIONS = {
    name: Info(operands, elementwise, parsed(derivatives))
    for name, operands, elementwise, derivatives in _C.INSTRUCTIONS
}
ELEMENTWISE = frozenset(name for name, i in INSTRUCTIONS.items() if i.elementwise)
STORES = ("store", "store_sum", "store_max", "scatter")


class Instruction(NamedTuple):
    """On registers that are as wide as its kernel; csrc/vertex/program/program.h says what the fields mean."""

    op: str
    result: int = -1
    operands: tuple[int, ...] = ()
    buffer: int = -1
    column: int = 0
    access: str = "row"
    """Of a load: ``row``, ``parent``, ``gather`` or ``child``."""
    gather: int = -1
    """Column of the schedule."""
    broadcast: bool = False
    constant: int = -1
    table: int = -1
