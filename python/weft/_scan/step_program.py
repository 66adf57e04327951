"""A step of a recurrence as instructions, with its derivatives: what the operator ``pointwise_scan`` runs.

The text that the operator takes has, separated by semicolons,

- three numbers: states, inputs and parameters. The first registers are these, in this order, and then the gradients of
  the states after the step;
- for each register after those an instruction of csrc/common/elementwise.def and the registers that it reads;
  ``constant`` and a number; or ``stop`` and a register, which it copies and no gradient goes through;
- three lists of registers: ``next``, the states after the step; ``jacobian``, the derivative of each of them by each
  state before it; ``vjp``, the gradients of the states before it, the inputs and the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .._base.instructions import INSTRUCTIONS, evaluate

__all__ = ["Graph", "Node"]


class Node:
    """A register. `value` is a constant's number."""

    __slots__ = ("args", "number", "op", "value")

    def __init__(self, number: int, op: str, args: tuple[Node, ...] = (), value: float = 0.0):
        self.number, self.op, self.args, self.value = number, op, args, value


class Graph:
    """The step's expressions; two that say the same are one node. :class:`weft._base.elementwise.Graph`."""

    def __init__(self, states: int, inputs: int):
        self._known: dict[tuple, Node] = {}
        self._nodes: list[Node] = []
        self.states = [self._new("leaf") for _ in range(states)]
        self.inputs = [self._new("leaf") for _ in range(inputs)]
        self.parameters: list[Node] = []
        self._deriving = False

    def parameter(self) -> Node:
        self.parameters.append(self._new("leaf"))
        return self.parameters[-1]

    def constant(self, value: float) -> Node:
        return self._node("constant", (), float(value))

    def apply(self, op: str, *args: Node) -> Node:
        simpler = self._simplified(op, args)
        return simpler if simpler is not None else self._node(op, args)

    def _new(self, op: str, args: tuple[Node, ...] = (), value: float = 0.0) -> Node:
        self._nodes.append(Node(len(self._nodes), op, args, value))
        return self._nodes[-1]

    def _node(self, op: str, args: tuple[Node, ...], value: float = 0.0) -> Node:
        # The sign tells -0.0 from 0.0.
        key = (op, *(a.number for a in args), value, math.copysign(1.0, value))
        if key not in self._known:
            self._known[key] = self._new(op, args, value)
        return self._known[key]

    def _simplified(self, op: str, args: tuple[Node, ...]) -> Node | None:
        """Derivatives are full of zeros and ones."""
        values = [a.value if a.op == "constant" else None for a in args]
        if op == "add" and 0 in values:
            return args[1 - values.index(0)]
        if op == "sub" and values[1] == 0:
            return args[0]
        if op == "sub" and values[0] == 0:
            return self.apply("neg", args[1])
        if op == "mul" and 0 in values and self._deriving:  # of a step itself NaN and infinity stay
            return self.constant(0.0)
        if op == "mul" and 1 in values:
            return args[1 - values.index(1)]
        if op == "neg" and values[0] is not None:
            return self.constant(-values[0])
        if op == "neg" and args[0].op == "neg":
            return args[0].args[0]
        if op == "select" and args[1] is args[2]:
            return args[1]
        return None

    def text(self, after: Sequence[Node]) -> str:
        """The program of a step that returns the states `after`."""
        wanted = [*self.states, *self.inputs, *self.parameters]
        gradients = [self._new("leaf") for _ in self.states]
        self._deriving = True
        by_state = [self._gradients({s: self.constant(1.0)}, wanted) for s in after]
        jacobian = [node for found in by_state for node in found[: len(self.states)]]
        if len(after) == 1:
            # The chain of a backward pass is then one product.
            vjp = [self.apply("mul", node, gradients[0]) for node in by_state[0]]
        else:
            seeds: dict[Node, Node] = {}
            for node, d in zip(after, gradients, strict=True):
                seeds[node] = self.apply("add", seeds[node], d) if node in seeds else d
            vjp = self._gradients(seeds, wanted)
        numbers = {node: i for i, node in enumerate([*wanted, *gradients])}
        lines = [f"{len(self.states)} {len(self.inputs)} {len(self.parameters)}"]
        for node in self._needed([*after, *jacobian, *vjp]):
            if node in numbers:
                continue
            numbers[node] = len(numbers)
            reads = [repr(node.value)] if node.op == "constant" else [str(numbers[a]) for a in node.args]
            lines.append(" ".join([node.op, *reads]))
        for name, nodes in (("next", after), ("jacobian", jacobian), ("vjp", vjp)):
            lines.append(" ".join([name, *(str(numbers[n]) for n in nodes)]))
        return "; ".join(lines)  # no new lines: torch.compile writes the text into comments of its code

    def _needed(self, roots: Iterable[Node]) -> list[Node]:
        """All that the roots depend on, arguments first: a node's number is above those of its arguments."""
        found: set[Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(node.args)
        return sorted(found, key=lambda node: node.number)

    def _gradients(self, seeds: dict[Node, Node], wanted: Sequence[Node]) -> list[Node]:
        """The gradients of `wanted` where those of the keys of `seeds` are its values."""
        order = self._needed(seeds)
        needs = set(wanted)
        for node in order:
            if node.op != "stop" and not needs.isdisjoint(node.args):
                needs.add(node)
        received = dict(seeds)
        for node in reversed(order):
            d = received.get(node)
            if d is None or node.op not in INSTRUCTIONS:
                continue
            values = dict(zip("abc", node.args, strict=False), d=d, y=node)
            for argument, expression in zip(node.args, INSTRUCTIONS[node.op].derivatives, strict=True):
                if expression is None or argument not in needs:
                    continue
                partial = evaluate(expression, values, self.apply, self.constant)
                before = received.get(argument)
                received[argument] = partial if before is None else self.apply("add", before, partial)
        zero = self.constant(0.0)
        return [received.get(node, zero) for node in wanted]
