"""From expressions to steps: what lies where in memory, and in which order kernels and products put it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .emission import emit
from .instructions import ELEMENTWISE
from .ir import LEAVES, REDUCTIONS, Derivatives, Graph, Node, segments, state_cuts, topological
from .steps import Buffer, Compiled, Dtypes, Kernel, MatrixGradient, Product, Use, VectorGradient

__all__ = ["Function", "compile_frontiers"]

_BY_ELEMENT = ELEMENTWISE | {"stop"}


@dataclass
class Function:
    """One of the vertex functions of a graph, as expressions."""

    scattered: Node | None
    """(N, state), or None."""
    outputs: Sequence[tuple[int, Node]]
    """What leaves the frontiers, each with the number of the tensor that it goes to."""
    slots: Sequence[int]
    """That it gathers."""
    sums: bool
    """Whether it sums over its children."""


def compile_frontiers(
    graph: Graph,
    functions: Sequence[Function],
    state: int,
    columns: Mapping[int, int],
    needed: Callable[[Node], bool] | None,
    fuse: bool,
    dtypes: Dtypes,
) -> Compiled:
    """Cut the expressions of vertex functions and of their derivatives into steps.

    Args:
        graph: makes nodes.
        functions: all that run in one graph; tasks are of one of them each.
        state: width of the state.
        columns: slot to column of the schedule.
        needed: whether the gradient of a leaf is asked for; of a product: of its matrix. None without gradients.
        fuse: whether element-wise operations share a kernel.
        dtypes: of what is read and written.
    """
    found = Compiled(functions=len(functions), fused=fuse)
    for number, f in enumerate(functions):
        for column in (*(columns[slot] for slot in f.slots), *([-1] if f.sums else [])):
            found.gathered_by[column].add(number)
    lowerings = [Lowering(found, graph, columns, fuse, i, dtypes) for i in range(len(functions))]
    if any(f.scattered is not None for f in functions):
        found.state = lowerings[0].buffer("rows", state, dtypes.state)
    widths = dict(sorted((number, output.width) for f in functions for number, output in f.outputs))
    places = {n: lowerings[0].buffer("output", width, dtypes.outputs[n], n) for n, width in widths.items()}
    for lower, f in zip(lowerings, functions, strict=True):
        # What others scatter or push is zero where this function does not.
        written = {places[number]: output for number, output in f.outputs}
        if f.scattered is not None:
            written[found.state] = f.scattered
        for buffer in (*([] if found.state < 0 else [found.state]), *places.values()):
            lower.want(written.get(buffer) or graph.constant(0, found.buffers[buffer].width), buffer)
        lower.finish()
        found.forward += lower.schedule()
    if needed is not None:
        _compile_backward(found, graph, functions, lowerings, state, columns, needed, dtypes)
    return found


def _compile_backward(
    found: Compiled,
    graph: Graph,
    functions: Sequence[Function],
    lowerings: Sequence[Lowering],
    state: int,
    columns: Mapping[int, int],
    needed: Callable[[Node], bool],
    dtypes: Dtypes,
) -> None:
    cuts = set().union(*(state_cuts(f.scattered, [node for _, node in f.outputs], state) for f in functions))
    while True:
        found.derivatives = [Derivatives(graph, f.scattered, f.outputs, cuts, needed) for f in functions]
        # All gradients of states are cut alike, so that each table says of some columns where their terms are.
        finer = {
            first
            for d in found.derivatives
            for leaf, gradient in d.leaves.items()
            if leaf.op in ("gather", "children")
            for first, _ in segments(gradient)
        }
        if finer <= cuts:
            break
        cuts |= finer
    spans = list(pairwise(sorted(cuts)))
    # What a state is used for adds up over the functions.
    tables: dict[tuple[int, int], list[Use]] = {span: [] for span in spans}
    for lower in lowerings:
        lower.begin_backward(tables)
    for lower, derivatives in zip(lowerings, found.derivatives, strict=True):
        for node, gradient in derivatives.products:
            if needed(node):
                matrix, _, skips = node.attribute
                dtype = dtypes.matrices[matrix]
                source, target = lower.use(lower.home(node.args[0], dtype)), lower.home(gradient, dtype)
                edges = node.domain == "E"
                found.matrix_gradients.append(MatrixGradient(lower.function, matrix, source, target, edges, skips))
        for leaf, gradient in derivatives.leaves.items():
            if leaf.op == "input":
                number = leaf.attribute
                buffer = lower.buffer("input_grad", leaf.width, dtypes.inputs[number], number)
                for each in lowerings:
                    each.want(gradient if each is lower else graph.constant(0, leaf.width), buffer)
            elif leaf.op == "vector":
                for first, part in segments(gradient):
                    if not _is_zero(part):
                        buffer, column = lower.place(part)
                        total = VectorGradient(lower.function, leaf.attribute, first, buffer, column, part.width)
                        found.vector_gradients.append(total)
            else:
                slot = columns[leaf.attribute] if leaf.op == "gather" else -1
                for first, end in spans:
                    (part,) = (p for _, p in segments(graph.slice(gradient, first, end)))
                    for term in _terms(part):
                        by_parent = term.op == "repeat"
                        buffer, column = lower.place(term.args[0] if by_parent else term)
                        tables[first, end].append(Use(slot, buffer, column, by_parent))
                        # A row may be of another function that gathers so.
                        found.buffers[buffer].zeros |= len(found.gathered_by[slot]) > 1
    for lower in lowerings:
        lower.finish()
        found.backward += lower.schedule()
    for b in found.buffers:
        b.saved = b.saved and not b.backward


def _terms(x: Node) -> list[Node]:
    """What adds up to x: its terms where all are products, else x; nothing where it is zero."""

    def is_product(y: Node) -> bool:
        inside = y.args[0] if y.op == "repeat" else y
        base = inside.args[0] if inside.op == "slice" else inside
        return base.op == "linear" and y.width == x.width and y.domain == x.domain

    terms, stack = [], [x]
    while stack:
        y = stack.pop()
        if y.op == "add":
            stack.extend(y.args)
        else:
            terms.append(y)
    return [] if _is_zero(x) else terms[::-1] if all(map(is_product, terms)) else [x]


def _is_zero(x: Node) -> bool:
    return x.op == "constant" and x.attribute == 0


def _leaf_of(x: Node) -> Node | None:
    base = x.args[0] if x.op == "slice" else x
    return base if base.op in ("input", "vector", "linear", "output_grad", "constant") else None


class Lowering:
    """Which node lies where, and the steps that put it there."""

    def __init__(
        self,
        compiled: Compiled,
        graph: Graph,
        columns: Mapping[int, int],
        fuse: bool,
        function: int,
        dtypes: Dtypes,
    ):
        self.compiled, self._graph, self._columns, self._fuse = compiled, graph, columns, fuse
        self.function, self._dtypes = function, dtypes
        self._backward = False
        self.tables: Mapping[tuple[int, int], list[Use]] = {}
        self.places: dict[Node, tuple[int, int]] = {}
        """Buffer and first column of what is in memory."""
        self._homes: dict[tuple[Node, str], int] = {}
        """Buffers that hold one value from the first to the last column, by its dtype there."""
        self.results: dict[Node, int] = {}
        """Buffers of products."""
        self._inputs: dict[tuple[str, int], int] = {}
        self.stores: dict[Node, list[tuple[int, int]]] = {}
        """What the pass has still to compute, and where to."""
        self._products: list[Product] = []

    def buffer(self, space: str, width: int, dtype: str, index: int = 0) -> int:
        self.compiled.buffers.append(Buffer(space, width, dtype, index, self._backward))
        return len(self.compiled.buffers) - 1

    def begin_backward(self, tables: Mapping[tuple[int, int], list[Use]]) -> None:
        """`tables`: of the gradient of each span of the state, to be filled before :meth:`schedule`."""
        self._backward, self.tables = True, tables
        self._products = []

    def want(self, value: Node, buffer: int) -> None:
        """`value` shall be in `buffer` at the end of the pass."""
        space = self.compiled.buffers[buffer].space
        domain = "E" if space == "edges" else "N"
        for first, part in segments(value):
            if part.domain != domain:  # the same in all rows, which other rows may want, too
                part = self._graph.node("stop", (part,), part.width, domain)
            self.stores.setdefault(part, []).append((buffer, first))
            if space in ("rows", "edges") and part not in self.places:
                self.places[part] = (buffer, first)

    def home(self, value: Node, dtype: str) -> int:
        """A buffer that holds `value` and nothing else."""
        if value.op == "linear" and self._dtypes.matrices[value.attribute[0]] == dtype:
            return self.product(value)
        if (value, dtype) not in self._homes:
            buffer = self.buffer("edges" if value.domain == "E" else "rows", value.width, dtype)
            self._homes[value, dtype] = buffer
            self.want(value, buffer)
        return self._homes[value, dtype]

    def own(self, value: Node) -> tuple[int, int]:
        if value.domain == "S":
            value = self._graph.node("stop", (value,), value.width, "N")
        if value not in self.places:
            self.home(value, self._dtypes.registers)
        return self.places[value]

    def place(self, value: Node) -> tuple[int, int]:
        """Buffer and first column of a value without parts, which is put there where it is not in memory."""
        base = value.args[0] if value.op == "slice" else value
        if base.op == "linear":
            return self.product(base), value.attribute if value.op == "slice" else 0
        return self.own(value)

    def product(self, node: Node) -> int:
        """The buffer of a product."""
        if node not in self.results:
            matrix, transposed, skips = node.attribute
            dtype = self._dtypes.matrices[matrix]
            source = self.home(node.args[0], dtype)
            target = self.buffer("edges" if node.domain == "E" else "rows", node.width, dtype)
            self.results[node] = target
            self._products.append(Product(self.function, node.domain, source, matrix, transposed, target, skips))
        return self.results[node]

    def finish(self) -> None:
        """What is to be stored depends on products, and on what is read through an edge's parent: these, too."""
        done: set[Node] = set()
        while True:
            fresh = [n for n in self.stores if n not in done]
            if not fresh:
                return
            done.update(fresh)
            uses: set[Node] = set()
            for node in topological(fresh):
                # The sum over uses is as wide as its kernel: as a column beside wider ones it is read from memory.
                if node.op == "state_grad" or (
                    node.op not in LEAVES and node not in self.places and not uses.isdisjoint(node.args)
                ):
                    uses.add(node)
                for a in node.args:
                    if a.width == 1 and node.width > 1 and a in uses and node.op in _BY_ELEMENT:
                        self.own(a)
                if node.op == "linear":
                    self.product(node)
                elif node.op in REDUCTIONS:
                    self.own(node)
                elif node.op == "repeat" and _leaf_of(node.args[0]) is None:
                    self.own(node.args[0])
                elif not self._fuse and node.domain != "S" and (node.op in _BY_ELEMENT or node.op == "sum"):
                    self.own(node)

    # Steps. ----------------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Kernel | Product]:
        """Kernels and products in an order in which all is there when it is read."""
        steps: list[Kernel | Product] = []
        waiting = list(self.stores)
        products = list(self._products)
        while waiting or products:
            groups: dict[tuple[str, int, bool], list[Node]] = {}
            for node in waiting:
                reduces = node.op in REDUCTIONS
                width = node.args[0].width if reduces else node.width
                groups.setdefault((node.domain, width, reduces), []).append(node)
            pending = set(waiting)
            progress = False
            for (domain, width, _), members in groups.items():
                if not self._fuse:
                    alone = [n for n in members if self._ready([n], domain, pending, {p.target for p in products})]
                    steps += [emit(self, domain, width, [n]) for n in alone]
                    waiting = [n for n in waiting if n not in alone]
                    progress = progress or bool(alone)
                    continue
                ready = self._ready(members, domain, pending, {p.target for p in products})
                if not ready:
                    continue
                progress = True
                steps.append(emit(self, domain, width, ready))
                waiting = [n for n in waiting if n not in ready]
            held = {buffer for node in waiting for buffer, _ in self.stores[node]}
            undone = {p.target for p in products}
            for product in list(products):
                if product.source not in held and product.source not in undone:
                    steps.append(product)
                    products.remove(product)
                    progress = True
            assert progress, "every value is computed from others"
        self.stores, self._products = {}, []
        return steps

    def _ready(self, members: list[Node], domain: str, pending: set[Node], products: set[int]) -> list[Node]:
        """Those of `members` that a kernel can compute now, from what is in memory and from each other."""
        ready = set(members)
        changed = True
        while changed:
            changed = False
            for node in list(ready):
                if not self._computable(node, node, domain, ready, pending, products, set()):
                    ready.discard(node)
                    changed = True
        return [m for m in members if m in ready]

    def _computable(self, root, node, domain, ready, pending, products, seen) -> bool:
        if node.number in seen:
            return True
        seen.add(node.number)
        if node is not root and node in pending:
            # A register of this kernel, where it is of the same rows; else in memory only after another kernel.
            return node in ready and node.domain in ("S", domain) and node.op not in REDUCTIONS
        base = node.args[0] if node.op == "slice" else node
        if base.op == "linear":
            return self.results[base] not in products
        if base.op in LEAVES or node.op == "constant" or (node is not root and node in self.places):
            return True
        if node.op == "repeat" and domain == "E":
            # Read through the edge's parent: in memory, or a leaf.
            argument = node.args[0]
            base = argument.args[0] if argument.op == "slice" else argument
            if base.op == "linear":
                return self.results[base] not in products
            return argument not in pending
        return all(self._computable(root, a, domain, ready, pending, products, seen) for a in node.args)

    def use(self, buffer: int) -> int:
        b = self.compiled.buffers[buffer]
        if self._backward and not b.backward and b.space in ("rows", "edges"):
            b.saved = True
        return buffer

    def constant(self, value: float) -> int:
        constants = self.compiled.constants
        if value not in constants:
            constants.append(value)
        return constants.index(value)

    def table(self, span: tuple[int, int]) -> int:
        tables, wanted = self.compiled.tables, self.tables[span]
        for use in wanted:
            self.use(use.buffer)
        if wanted not in tables:
            tables.append(wanted)
        return tables.index(wanted)

    def leaf_buffer(self, leaf: Node) -> int:
        space = {"input": "input", "vector": "vector", "output_grad": "output_grad"}[leaf.op]
        key = (space, leaf.attribute)
        if key not in self._inputs:
            dtypes = {"input": self._dtypes.inputs, "vector": self._dtypes.vectors, "output_grad": self._dtypes.outputs}
            self.compiled.buffers.append(Buffer(space, leaf.width, dtypes[space][leaf.attribute], leaf.attribute))
            self._inputs[key] = len(self.compiled.buffers) - 1
        return self._inputs[key]

    def column(self, slot: int) -> int:
        return self._columns[slot]
