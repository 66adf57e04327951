"""Expressions over the rows of a frontier, in a normal form from which kernels are cut; and their derivatives.

A node has a width (columns) and a domain: ``N`` a row per vertex, ``E`` a row per child that is summed over, ``S`` one
row for all. Two nodes that say the same are the same object. In the normal form

- a ``cat`` is never an argument of another node but of ``linear``: what is computed on it is computed on its parts;
- a ``slice`` is only of a leaf: an input, a vector, a gathered state, a product, a gradient that arrives.

So all that is between two matrix products or reductions of rows is element-wise on columns, whatever views the vertex
function took. A reduction, ``rowsum`` or ``rowmax``, has width 1.
Plain data, free of torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from ..._base.elementwise import Unsupported
from ..._base.instructions import evaluate
from .instructions import INSTRUCTIONS

__all__ = ["Derivatives", "Graph", "Node", "segments", "state_cuts", "topological"]

LEAVES = frozenset(("input", "vector", "gather", "children", "linear", "state_grad", "output_grad"))
REDUCTIONS = frozenset(("rowsum", "rowmax"))


class Node:
    """One value. `attribute`: slot, number of an input, number, first column of a slice, by `op`."""

    __slots__ = ("args", "attribute", "domain", "number", "op", "width")

    def __init__(self, op: str, args: tuple[Node, ...], width: int, domain: str, attribute, number: int):
        self.op, self.args, self.width, self.domain, self.attribute = op, args, width, domain, attribute
        self.number = number

    def __repr__(self) -> str:
        inside = ", ".join(
            [f"%{a.number}" for a in self.args] + ([] if self.attribute is None else [f"{self.attribute}"])
        )
        return f"%{self.number}:{self.domain}{self.width} = {self.op}({inside})"


def segments(x: Node) -> list[tuple[int, Node]]:
    """First column and node of each part."""
    if x.op != "cat":
        return [(0, x)]
    found, first = [], 0
    for part in x.args:
        found.append((first, part))
        first += part.width
    return found


class Graph:
    """Makes nodes in the normal form."""

    def __init__(self) -> None:
        self._nodes: dict[tuple, Node] = {}

    def node(self, op: str, args: Sequence[Node], width: int, domain: str, attribute=None) -> Node:
        key = (op, tuple(a.number for a in args), width, domain, attribute, type(attribute))
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = Node(op, tuple(args), width, domain, attribute, len(self._nodes))
        return found

    def constant(self, value: float, width: int = 1) -> Node:
        return self.node("constant", (), width, "S", float(value))

    def slice(self, x: Node, first: int, end: int) -> Node:
        if first == 0 and end == x.width:
            return x
        if x.op == "cat":
            parts = [
                self.slice(part, max(first - a, 0), min(end - a, part.width))
                for a, part in segments(x)
                if a < end and a + part.width > first
            ]
            return self.cat(parts)
        if x.op == "slice":
            return self.slice(x.args[0], x.attribute + first, x.attribute + end)
        if x.op == "constant":
            return self.constant(x.attribute, end - first)
        if x.op in LEAVES:
            return self.node("slice", (x,), end - first, x.domain, first)
        if x.op in ("sum", "repeat"):
            return getattr(self, x.op)(self.slice(x.args[0], first, end))
        if x.op in REDUCTIONS:
            return self.constant(0.0, 0)
        return self.apply(x.op, *(a if a.width == 1 else self.slice(a, first, end) for a in x.args))

    def cat(self, parts: Iterable[Node]) -> Node:
        flat: list[Node] = []
        for part in parts:
            for _, p in segments(part):
                joined = self._joined(flat[-1], p) if flat else None
                if joined is not None:
                    flat[-1] = joined
                elif p.width:
                    flat.append(p)
        if len(flat) == 1:
            return flat[0]
        domains = {p.domain for p in flat} - {"S"}
        if len(domains) > 1:
            raise Unsupported("rows of vertices beside rows of children")
        return self.node("cat", flat, sum(p.width for p in flat), domains.pop() if domains else "S")

    def _joined(self, a: Node, b: Node) -> Node | None:
        """One node for neighbours, where they are columns of one leaf or the same constant."""
        if a.op == b.op == "constant" and a.attribute == b.attribute:
            return self.constant(a.attribute, a.width + b.width)
        (leaf, first), (other, second) = map(_base, (a, b))
        if leaf is None or leaf is not other or first + a.width != second:
            return None
        return self.slice(leaf, first, second + b.width)

    def sum(self, x: Node) -> Node:
        if x.op == "cat":
            return self.cat([self.sum(p) for p in x.args])
        return self.node("sum", (x,), x.width, "N")

    def repeat(self, x: Node) -> Node:
        if x.op == "cat":
            return self.cat([self.repeat(p) for p in x.args])
        return x if x.domain == "S" else self.node("repeat", (x,), x.width, "E")

    def reduce(self, op: str, x: Node) -> Node:
        """The sum of a row's columns, or the greatest: ``rowsum`` or ``rowmax``."""
        if x.width == 1:
            return x
        if x.width == 0 and op == "rowmax":
            raise Unsupported("the greatest of no columns")
        if x.op == "constant":
            return self.constant(x.attribute * x.width if op == "rowsum" else x.attribute)
        if x.op == "cat":
            found, *rest = (self.reduce(op, part) for part in x.args)
            for part in rest:
                found = self.apply("add" if op == "rowsum" else "max", found, part)
            return found
        if x.domain == "S":
            raise Unsupported("a reduction of columns that are the same in every row")
        return self.node(op, (x,), 1, x.domain)

    def broadcast(self, x: Node, width: int) -> Node:
        """A column as wide as it has to be."""
        return x if x.width == width else self.apply("add", x, self.constant(0.0, width))

    def apply(self, op: str, *args: Node) -> Node:
        """An element-wise operation; an argument of width 1 goes with any."""
        width = max(a.width for a in args)
        if any(a.width not in (1, width) for a in args):
            raise Unsupported(f"{op} of different widths")
        cuts = sorted({c for a in args if a.op == "cat" for c, _ in segments(a)} | {width})
        if len(cuts) > 1:
            spans = list(zip([0, *cuts[1:-1]], cuts[1:], strict=True))
            return self.cat(
                self.apply(op, *(a if a.width == 1 else self.slice(a, first, end) for a in args))
                for first, end in spans
            )
        simpler = self._simplified(op, args, width)
        if simpler is not None:
            return simpler
        domains = {a.domain for a in args} - {"S"}
        if len(domains) > 1:
            raise Unsupported("rows of vertices beside rows of children")
        return self.node(op, args, width, domains.pop() if domains else "S")

    def _simplified(self, op: str, args: tuple[Node, ...], width: int) -> Node | None:
        """Derivatives are full of zeros and ones."""
        values = [a.attribute if a.op == "constant" else None for a in args]
        if op == "add":
            for i in (0, 1):
                if values[i] == 0 and args[1 - i].width == width:
                    return args[1 - i]
        if op == "sub" and values[1] == 0 and args[0].width == width:
            return args[0]
        if op == "sub" and values[0] == 0 and args[1].width == width:
            return self.apply("neg", args[1])
        if op == "mul":
            for i in (0, 1):
                if values[i] == 0:
                    return self.constant(0.0, width)
                if values[i] == 1 and args[1 - i].width == width:
                    return args[1 - i]
        if op == "neg" and values[0] is not None:
            return self.constant(-values[0], width)
        if op == "neg" and args[0].op == "neg":
            return args[0].args[0]
        return None

    def linear(self, x: Node, matrix: int, rows: int, columns: int, transposed: bool = False) -> Node:
        """x (., rows) times a matrix (rows, columns), or the other way round."""
        source, target = (columns, rows) if transposed else (rows, columns)
        if x.width != source:
            raise Unsupported("a product of a row that is broadcast")
        return self.node("linear", (x,), target, x.domain, (matrix, transposed, zero_at_leaves(x)))


def zero_at_leaves(x: Node) -> bool:
    """Whether x consists of what is gathered, and is zero where there are no children."""

    def gathered(part: Node) -> bool:
        base = part.args[0] if part.op == "slice" else part
        return base.op in ("gather", "children", "sum")

    return x.domain == "N" and all(gathered(part) for _, part in segments(x))


def _base(x: Node) -> tuple[Node | None, int]:
    """The leaf that x is columns of, and the first of them."""
    if x.op == "slice":
        return x.args[0], x.attribute
    return (x, 0) if x.op in LEAVES else (None, 0)


def topological(roots: Iterable[Node]) -> list[Node]:
    """All nodes that the roots depend on, arguments first."""
    order: dict[int, Node] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if node.number in order:
            continue
        if done:
            order[node.number] = node
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in node.args)
    return list(order.values())


def state_cuts(scattered: Node | None, outputs: Iterable[Node], state: int) -> set[int]:
    """Columns at which a function takes states apart or puts them together, 0 and `state` among them."""
    cuts = {0, state}
    for node in topological([*([] if scattered is None else [scattered]), *outputs]):
        if node.op == "slice" and node.args[0].op in ("gather", "children"):
            cuts |= {node.attribute, node.attribute + node.width}
    if scattered is not None:
        cuts |= {first for first, _ in segments(scattered)}
    return cuts


class Derivatives:
    """Reverse-mode derivatives of a graph, as nodes of the same graph.

    Args:
        graph: makes the nodes.
        scattered: the value that is scattered, None without.
        outputs: number and value of what leaves the frontiers.
        cuts: columns at which gradients of the state are cut, see :func:`state_cuts`.
        needed: whether a leaf's gradient is asked for.

    Attributes:
        leaves: the gradient of each leaf that needs one.
        products: each forward product with its argument and the gradient of its result.
    """

    def __init__(
        self,
        graph: Graph,
        scattered: Node | None,
        outputs: Sequence[tuple[int, Node]],
        cuts: Iterable[int],
        needed: Callable[[Node], bool],
    ):
        self._graph, self._cuts = graph, set(cuts)
        roots = [*([] if scattered is None else [scattered]), *(node for _, node in outputs)]
        order = topological(roots)
        self._needs: dict[int, bool] = {}
        for node in order:
            if node.op in LEAVES and node.op != "linear":
                needs = needed(node)
            elif node.op == "linear":
                needs = needed(node) or self._needs[node.args[0].number]
            else:
                known = INSTRUCTIONS.get(node.op)
                differentiable = node.op not in ("stop", "constant") and (known is None or known.differentiable)
                needs = differentiable and any(self._needs[a.number] for a in node.args)
            self._needs[node.number] = needs

        self._received: dict[int, list[Node]] = defaultdict(list)
        self._columns: dict[int, list[tuple[int, Node]]] = defaultdict(list)
        for number, root in enumerate(roots):
            if scattered is not None and number == 0:
                arriving = graph.cat(
                    graph.node("state_grad", (), end - first, "N", (first, end))
                    for first, end in pairwise(sorted(self._cuts))
                )
            else:
                index, _ = outputs[number - (scattered is not None)]
                arriving = graph.node("output_grad", (), root.width, "N", index)
            for first, part in segments(root):
                self._give(part, graph.slice(arriving, first, first + part.width))
        self.leaves: dict[Node, Node] = {}
        self.products: list[tuple[Node, Node]] = []
        for node in reversed(order):
            if self._needs[node.number] and node.op != "cat":
                self._visit(node, needed)

    def _give(self, node: Node, gradient: Node) -> None:
        if self._needs[node.number] and not (gradient.op == "constant" and gradient.attribute == 0):
            self._received[node.number].append(gradient)

    def _total(self, node: Node) -> Node | None:
        g, received = self._graph, self._received.pop(node.number, [])
        if not received:
            return None
        total = received[0]
        for more in received[1:]:
            total = g.apply("add", total, more)
        return total

    def _visit(self, node: Node, needed: Callable[[Node], bool]) -> None:
        g = self._graph
        if node.op in LEAVES:
            columns = self._columns.pop(node.number, [])
            whole = self._total(node)
            if whole is not None:
                columns.append((0, whole))
            if not columns:
                return
            gradient = self._assembled(node, columns)
            if node.op == "linear":
                self.products.append((node, gradient))
                (x,) = node.args
                if self._needs[x.number]:
                    matrix, transposed, skips = node.attribute
                    back = g.node("linear", (gradient,), x.width, node.domain, (matrix, not transposed, skips))
                    for first, part in segments(x):
                        self._give(part, g.slice(back, first, first + part.width))
            else:
                self.leaves[node] = gradient
            return
        gradient = self._total(node)
        if gradient is None:
            return
        if node.op == "slice":
            self._columns[node.args[0].number].append((node.attribute, gradient))
        elif node.op == "sum":
            self._give(node.args[0], g.repeat(gradient))
        elif node.op == "repeat":
            self._give(node.args[0], g.sum(gradient))
        elif node.op == "rowsum":
            self._give(node.args[0], g.broadcast(gradient, node.args[0].width))
        elif node.op == "rowmax":
            # Equal shares for all that are the greatest, as torch.amax.
            chosen = g.apply("eq", node.args[0], node)
            self._give(node.args[0], g.apply("mul", chosen, g.apply("div", gradient, g.reduce("rowsum", chosen))))
        else:
            for argument, partial in zip(node.args, self._partials(node, gradient), strict=True):
                if partial is None or not self._needs[argument.number]:
                    continue
                if argument.width == 1:
                    partial = g.reduce("rowsum", partial)
                if argument.domain == "N" and partial.domain == "E":
                    raise Unsupported("rows of vertices beside rows of children")
                self._give(argument, partial)

    def _assembled(self, leaf: Node, columns: Sequence[tuple[int, Node]]) -> Node:
        g = self._graph
        cuts = {0, leaf.width} | {c for first, part in columns for c in (first, first + part.width)}
        if leaf.op in ("gather", "children"):
            cuts |= self._cuts
        parts = []
        ordered = sorted(cuts)
        for start, end in pairwise(ordered):
            total = g.constant(0.0, end - start)
            for first, part in columns:
                if first <= start and end <= first + part.width:
                    total = g.apply("add", total, g.slice(part, start - first, end - first))
            parts.append(total)
        return g.cat(parts)

    def _partials(self, y: Node, d: Node) -> list[Node | None]:
        """The gradients of the arguments of an element-wise operation with the result y, of which d is the gradient."""
        if y.op not in INSTRUCTIONS:
            return [None] * len(y.args)
        values = dict(zip("abc", y.args, strict=False), d=d, y=y)
        return [
            None if expression is None else evaluate(expression, values, self._graph.apply, self._graph.constant)
            for expression in INSTRUCTIONS[y.op].derivatives
        ]
