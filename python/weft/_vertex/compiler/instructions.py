"""The instructions of a vertex program and their derivatives, as csrc/vertex/program/ops.def lists them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..._C import vertex as _C

__all__ = ["BINARY", "ELEMENTWISE", "INSTRUCTIONS", "ROUNDINGS", "STORES", "UNARY", "Info", "Instruction"]


@dataclass(frozen=True)
class Info:
    """One line of the list."""

    operands: int
    """Registers that it reads, but for its result."""
    elementwise: bool
    derivatives: tuple[ast.expr | None, ...]
    """Of an element-wise instruction, for each operand: the gradient, as an expression."""

    @property
    def differentiable(self) -> bool:
        return any(d is not None for d in self.derivatives)


def _parsed(text: str) -> tuple[ast.expr | None, ...]:
    parts = (part.strip() for part in text.split(";")) if text else ()
    return tuple(None if part == "-" else ast.parse(part, mode="eval").body for part in parts)


def evaluate(expression: ast.expr, values: Mapping[str, object], apply: Callable, constant: Callable):
    """A derivative: ``apply(instruction, *arguments)`` of `values` by name and of ``constant(number)``."""
    if isinstance(expression, ast.Call):
        return apply(expression.func.id, *(evaluate(a, values, apply, constant) for a in expression.args))
    if isinstance(expression, ast.Constant):
        return constant(float(expression.value))
    return values[expression.id]


INSTRUCTIONS = {
    name: Info(operands, elementwise, _parsed(derivatives))
    for name, operands, elementwise, derivatives in _C.INSTRUCTIONS
}
ROUNDINGS = ("float16", "bfloat16")
ELEMENTWISE = frozenset(name for name, i in INSTRUCTIONS.items() if i.elementwise)
UNARY = tuple(n for n, i in INSTRUCTIONS.items() if i.elementwise and i.operands == 1 and n not in ROUNDINGS)
BINARY = tuple(n for n, i in INSTRUCTIONS.items() if i.elementwise and i.operands == 2)
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
