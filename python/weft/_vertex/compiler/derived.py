"""The derivatives of a vertex function written down as a program that a person can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..program import Constant, Operation, Program, Ref, Symbol
from .ir import Derivatives, Node
from .plan import Part, Shared

__all__ = ["derived_program"]


def derived_program(
    program: Program,
    shared: Shared,
    converted: Mapping[int, Node | None],
    part: Part,
    derivatives: Derivatives,
    outputs: Sequence[int],
    needed: Callable[[Node], bool],
) -> Program:
    """The backward program of one function.

    ``gather_grad(first, end)`` is the gradient of these columns of the state, gathered from all that use it;
    ``pull_grad(x)`` that of what left the frontiers; ``scatter_grad(slot, d)`` goes to the child in a slot, or to all
    ``children``; ``push_grad(x, d)`` leaves the frontiers. ``outer`` and ``total`` run once for all vertices.

    Args:
        program: of the function.
        shared: what the functions of a graph have in common.
        converted: the expressions of its symbols.
        part: what was made of it.
        derivatives: its gradients.
        outputs: numbers of what leaves the frontiers.
        needed: whether a gradient is asked for.
    """
    return _Backward(program, shared, converted, part, derivatives, outputs, needed).program()


class _Backward:
    def __init__(
        self,
        program: Program,
        shared: Shared,
        converted: Mapping[int, Node | None],
        part: Part,
        derivatives: Derivatives,
        outputs: Sequence[int],
        needed: Callable[[Node], bool],
    ):
        self._forward, self._shared, self._part, self._derivatives = program, shared, part, derivatives
        self._outputs, self._needed = outputs, needed
        self._symbols: list[Symbol] = []
        self._operations: list[Operation] = []
        self._numbers: dict[Node, int] = {}
        self._symbol_of: dict[Node, int] = {}
        for symbol, node in converted.items():
            if node is not None:
                self._symbol_of.setdefault(node, symbol)

    def program(self) -> Program:
        d, forward, shared = self._derivatives, self._forward, self._shared
        products = [(node, gradient) for node, gradient in d.products if self._needed(node)]
        roots = [*(gradient for _, gradient in products), *d.leaves.values()]
        for root in roots:
            self._written(root)
        for leaf, gradient in d.leaves.items():
            if leaf.op in ("gather", "children"):
                where = str(leaf.attribute) if leaf.op == "gather" else "children"
                self._operate("scatter_grad", [Constant(where), self._ref(gradient)], "in")
            elif leaf.op == "input":
                name = forward.symbols[shared.inputs[leaf.attribute][1]].name
                self._operate("push_grad", [Constant(name), self._ref(gradient)], "in")
        for node, gradient in products:
            matrix = forward.symbols[shared.matrices[node.attribute[0]][1]]
            result = self._define(f"grad of {matrix.name}", matrix.shape, "shared")
            arguments = [self._ref(node.args[0]), self._ref(gradient)]
            self._operate("outer", arguments, "after", [result])
        for leaf, gradient in d.leaves.items():
            if leaf.op == "vector":
                vector = forward.symbols[shared.vectors[leaf.attribute][1]]
                result = self._define(f"grad of {vector.name}", vector.shape, "shared")
                self._operate("total", [self._ref(gradient)], "after", [result])
        return Program(f"{forward.name}, backward", tuple(self._symbols), tuple(self._operations))

    def _written(self, root: Node) -> None:
        """Write down what a gradient depends on, as far as the forward pass has no name for it."""
        stack = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                self._number(node)
            elif node not in self._numbers:
                stack.append((node, True))
                if node not in self._symbol_of:
                    stack.extend((a, False) for a in node.args)

    def _define(self, name: str, shape: Sequence[int | str], kind: str, dtype: str | None = None) -> int:
        self._symbols.append(Symbol(tuple(shape), dtype or self._shared.dtype, name, kind))
        return len(self._symbols) - 1

    def _operate(self, op: str, arguments: Sequence[Ref | Constant], when: str, results: Sequence[int] = ()) -> None:
        self._operations.append(Operation(op, tuple(arguments), (), tuple(results), when))

    def _ref(self, node: Node) -> Ref:
        return Ref(self._number(node))

    def _number(self, node: Node) -> int:
        """The symbol of a node: one of the forward pass by its name, or a new one, whose arguments come before it."""
        if node in self._numbers:
            return self._numbers[node]
        if node in self._symbol_of:
            symbol = self._forward.symbols[self._symbol_of[node]]
            self._numbers[node] = self._define(symbol.name, symbol.shape, symbol.kind, symbol.dtype)
            return self._numbers[node]
        arguments: list[Ref | Constant] = []
        if node.op == "constant":
            arguments = [Constant(f"{node.attribute:g}")]
        elif node.op == "state_grad":
            arguments = [*map(Constant, map(str, node.attribute))]
        elif node.op == "output_grad":
            arguments = [Constant(self._output(node.attribute))]
        elif node.op == "linear":
            matrix, transposed, _ = node.attribute
            name = self._forward.symbols[self._shared.matrices[matrix][1]].name
            arguments = [self._ref(node.args[0]), Constant(name + (".T" if transposed else ""))]
        else:
            arguments = [self._ref(a) for a in node.args]
            if node.op == "slice":
                arguments += [Constant(str(node.attribute)), Constant(str(node.attribute + node.width))]
        rows = {"N": ("N",), "E": ("E",), "S": ()}[node.domain]
        kind = {"N": "row", "E": "child", "S": "shared"}[node.domain]
        self._numbers[node] = self._define(f"d{len(self._operations)}", (*rows, node.width), kind)
        op = {"state_grad": "gather_grad", "output_grad": "pull_grad", "linear": "mm"}.get(node.op, node.op)
        self._operate(op, arguments, "in", [self._numbers[node]])
        return self._numbers[node]

    def _output(self, position: int) -> str:
        """The symbol that leaves the frontiers at this position."""
        symbols = {number: symbol for symbol, number in self._part.outputs}
        return self._forward.symbols[symbols[self._outputs[position]]].name
