"""The element-wise instructions and their derivatives, as csrc/common/elementwise.def lists them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .. import _C

__all__ = ["BINARY", "INSTRUCTIONS", "ROUNDINGS", "UNARY", "Info", "evaluate", "parsed"]


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


def parsed(text: str) -> tuple[ast.expr | None, ...]:
    """Derivatives as the list has them."""
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
    name: Info(operands, True, parsed(derivatives)) for name, operands, derivatives in _C.common.ELEMENTWISE
}
ROUNDINGS = ("float16", "bfloat16")
UNARY = tuple(n for n, i in INSTRUCTIONS.items() if i.operands == 1 and n not in ROUNDINGS)
BINARY = tuple(n for n, i in INSTRUCTIONS.items() if i.operands == 2)
