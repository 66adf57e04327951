"""From expressions to steps: kernels of instructions on registers, and matrix products. Numbers alone, free of torch.

Each frontier runs the steps in order. A kernel computes some columns of some rows: its instructions are element-wise,
loads go through the schedule's arrays (gather), and so do the sums over uses (gather's gradient, which is scatter).
A product multiplies the frontier's rows of one buffer by a matrix into another buffer.

csrc/vertex/program/program.h says what the numbers of the encoded program mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .ir import (
    ELEMENTWISE,
    LEAVES,
    REDUCTIONS,
    Derivatives,
    Graph,
    Node,
    segments,
    state_cuts,
    topological,
)

__all__ = ["Buffer", "Compiled", "Dtypes", "Function", "Kernel", "Product", "compile_frontiers"]

# As csrc/vertex/program/program.h.
SPACES = ("rows", "inner", "edges", "input", "output", "output_grad", "input_grad", "vector")
OPS = (
    "load", "constant", "uses", "store", "store_sum", "store_max", "scatter", "begin", "accumulate", "end",
    "neg", "sigmoid", "tanh", "relu", "exp", "log", "sqrt", "abs", "log1p", "sign", "erf", "sin", "cos",
    "float16", "bfloat16",
    "add", "sub", "mul", "div", "max", "min", "gt", "ge", "eq", "select",
)  # fmt: skip
ACCESS = ("row", "parent", "gather", "child")
STORES = ("store", "store_sum", "store_max", "scatter")
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Dtypes:
    """Of what the frontiers read and write. Products compute in the dtype of their matrix with float32 sums, all
    element-wise arithmetic in that of registers."""

    state: str
    inputs: Sequence[str]
    matrices: Sequence[str]
    vectors: Sequence[str]
    outputs: Sequence[str]

    @property
    def registers(self) -> str:
        return "float64" if self.state == "float64" else "float32"


@dataclass
class Function:
    """One of the vertex functions of a graph, as expressions."""

    scattered: Node | None
    """(N, state), or None."""
    outputs: Sequence[tuple[int, Node]]
    """What leaves the frontiers, each with the number of the tensor that it goes to."""


@dataclass
class Buffer:
    """Rows of a space: ``rows``, ``inner`` (of vertices with children) and ``edges`` are made by the executor, in the
    order of the schedule; ``input``, ``output`` and their gradients are the caller's, in his order; a ``vector`` is one
    row for all."""

    space: str
    width: int
    dtype: str
    index: int = 0
    """Which one of the space's, where they are the caller's."""
    backward: bool = False
    """Whether the backward pass makes it."""
    saved: bool = False
    """Whether the forward pass makes it and the backward pass reads it."""
    scattered: bool = False
    """Whether children write it into their parents' rows."""


@dataclass
class Kernel:
    """Instructions (op, result, a, b, c, d) on registers of `width` columns of the frontier's rows or edges."""

    function: int
    domain: str
    width: int
    reduces: bool = False
    """Whether it stores sums over its columns, or their greatest, and nothing else."""
    code: list[tuple[int, ...]] = field(default_factory=list)
    registers: int = 0
    late: bool = False
    """Whether it runs once for all rows, after the last task."""

    def buffers(self, tables: Sequence[Sequence[tuple[int, int, int, int]]]) -> set[int]:
        """Buffers that it reads or writes."""
        load, uses, *stores = (OPS.index(op) for op in ("load", "uses", *STORES))
        found = {a for op, _, a, *_ in self.code if op == load} | {b for op, _, _, b, *_ in self.code if op in stores}
        return found.union(row[1] for op, _, a, *_ in self.code if op == uses for row in tables[a])


@dataclass
class Product:
    """target = source @ matrix, or @ matrix.T."""

    function: int
    domain: str
    source: int
    matrix: int
    transposed: bool
    target: int
    skips_leaves: bool = False
    """Whether it is zero, or nobody's, on vertices without children."""
    late = False


@dataclass
class Compiled:
    """The part of one or several vertex functions that runs in the frontiers."""

    functions: int = 1
    fused: bool = True
    """Whether steps may share a kernel."""
    buffers: list[Buffer] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)
    tables: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    """Of each ``uses`` instruction: (column of the gather or -1 for a sum over children, buffer, first column, by
    edge's parent)."""
    forward: list[Kernel | Product] = field(default_factory=list)
    backward: list[Kernel | Product] = field(default_factory=list)
    matrix_gradients: list[tuple[int, int, int, str, bool]] = field(default_factory=list)
    """Matrix, source buffer, buffer of the gradient of the product, domain, skips leaves."""
    vector_gradients: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """Vector, first column, buffer, first column there, width."""
    state: int = -1
    """The buffer of the states, -1 without."""
    code: tuple[int, ...] = ()
    derivatives: list[Derivatives] = field(default_factory=list)
    """Of each function, where there is a backward pass."""

    @property
    def results(self) -> tuple[int, ...]:
        """Of the forward pass: space, width, dtype of each output and each buffer that is saved."""
        made = [b for b in self.buffers if b.space == "output"] + [b for b in self.buffers if b.saved]
        return tuple(n for b in made for n in (SPACES.index(b.space), b.width, DTYPES.index(b.dtype)))

    @property
    def most_buffers(self) -> int:
        """Of a kernel."""
        kernels = (s for s in (*self.forward, *self.backward) if isinstance(s, Kernel))
        return max((len(k.buffers(self.tables)) for k in kernels), default=0)

    def encode(self) -> tuple[int, ...]:
        """The program as one list of integers, see csrc/vertex/program/program.h."""
        code: list[int] = [self.functions, self.fused, self.state, len(self.buffers)]
        for b in self.buffers:
            code += [SPACES.index(b.space), b.width, DTYPES.index(b.dtype), b.scattered, b.index, b.backward, b.saved]
        code.append(len(self.tables))
        for table in self.tables:
            code.append(len(table))
            for row in table:
                code += row
        for steps in (self.forward, self.backward):
            code.append(len(steps))
            for s in steps:
                code += [s.function, isinstance(s, Product), s.domain == "E", s.late]
                if isinstance(s, Product):
                    code += [s.source, s.matrix, s.transposed, s.target, s.skips_leaves]
                else:
                    code += [s.width, s.registers, s.reduces, len(s.code)]
                    for instruction in s.code:
                        code += instruction
        code.append(len(self.matrix_gradients))
        for matrix, source, gradient, domain, skips in self.matrix_gradients:
            code += [matrix, source, gradient, domain == "E", skips]
        code.append(len(self.vector_gradients))
        for row in self.vector_gradients:
            code += row
        return tuple(map(int, code))


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
    lowerings = [_Lowering(found, graph, columns, fuse, i, dtypes) for i in range(len(functions))]
    if any(f.scattered is not None for f in functions):
        found.state = lowerings[0].buffer("rows", state, dtypes.state)
    widths = dict(sorted((number, output.width) for f in functions for number, output in f.outputs))
    places = {n: lowerings[0].buffer("output", width, dtypes.outputs[n], n) for n, width in widths.items()}
    for lower, f in zip(lowerings, functions, strict=True):
        if f.scattered is not None:
            lower.want(f.scattered, found.state)
        for number, output in f.outputs:
            lower.want(output, places[number])
        lower.finish()
        found.forward += lower.schedule()
    if needed is not None:
        _compile_backward(found, graph, functions, lowerings, state, columns, needed, dtypes)
    return found


def _compile_backward(
    found: Compiled,
    graph: Graph,
    functions: Sequence[Function],
    lowerings: Sequence[_Lowering],
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
    # What a state is used for adds up over the functions: a row that a function did not write is zero in its buffers.
    tables: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {span: [] for span in spans}
    for lower, derivatives in zip(lowerings, found.derivatives, strict=True):
        lower.begin_backward(tables)
        for node, gradient in derivatives.products:
            if needed(node):
                matrix, _, skips = node.attribute
                dtype = dtypes.matrices[matrix]
                source, target = lower.use(lower.home(node.args[0], dtype)), lower.home(gradient, dtype)
                found.matrix_gradients.append((matrix, source, target, node.domain, skips))
        for leaf, gradient in derivatives.leaves.items():
            if leaf.op == "input":
                number = leaf.attribute
                lower.want(gradient, lower.buffer("input_grad", leaf.width, dtypes.inputs[number], number))
            elif leaf.op == "vector":
                for first, part in segments(gradient):
                    if not _is_zero(part):
                        buffer, column = lower.place(part)
                        found.vector_gradients.append((leaf.attribute, first, buffer, column, part.width))
            else:
                slot = columns[leaf.attribute] if leaf.op == "gather" else -1
                for first, end in spans:
                    (part,) = (p for _, p in segments(graph.slice(gradient, first, end)))
                    for term in _terms(part):
                        by_parent = term.op == "repeat"
                        buffer, column = lower.place(term.args[0] if by_parent else term)
                        tables[first, end].append((slot, buffer, column, by_parent))
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


class _Lowering:
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
        self._compiled, self._graph, self._columns, self._fuse = compiled, graph, columns, fuse
        self.function, self._dtypes = function, dtypes
        self._backward = False
        self.tables: Mapping[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self._places: dict[Node, tuple[int, int]] = {}
        """Buffer and first column of what is in memory."""
        self._homes: dict[tuple[Node, str], int] = {}
        """Buffers that hold one value from the first to the last column, by its dtype there."""
        self._results: dict[Node, int] = {}
        """Buffers of products."""
        self._inputs: dict[tuple[str, int], int] = {}
        self._stores: dict[Node, list[tuple[int, int]]] = {}
        """What the pass has still to compute, and where to."""
        self._products: list[Product] = []

    def buffer(self, space: str, width: int, dtype: str, index: int = 0) -> int:
        self._compiled.buffers.append(Buffer(space, width, dtype, index, self._backward))
        return len(self._compiled.buffers) - 1

    def begin_backward(self, tables: Mapping[tuple[int, int], list[tuple[int, int, int, int]]]) -> None:
        """`tables`: of the gradient of each span of the state, to be filled before :meth:`schedule`."""
        self._backward, self.tables = True, tables
        self._products = []

    def want(self, value: Node, buffer: int) -> None:
        """`value` shall be in `buffer` at the end of the pass."""
        space = self._compiled.buffers[buffer].space
        domain = "E" if space == "edges" else "N"
        for first, part in segments(value):
            if part.domain != domain:  # the same in all rows, which other rows may want, too
                part = self._graph.node("stop", (part,), part.width, domain)
            self._stores.setdefault(part, []).append((buffer, first))
            if space in ("rows", "edges") and part not in self._places:
                self._places[part] = (buffer, first)

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
        if value not in self._places:
            self.home(value, self._dtypes.registers)
        return self._places[value]

    def place(self, value: Node) -> tuple[int, int]:
        """Buffer and first column of a value without parts, which is put there where it is not in memory."""
        base = value.args[0] if value.op == "slice" else value
        if base.op == "linear":
            return self.product(base), value.attribute if value.op == "slice" else 0
        return self.own(value)

    def product(self, node: Node) -> int:
        """The buffer of a product."""
        if node not in self._results:
            matrix, transposed, skips = node.attribute
            dtype = self._dtypes.matrices[matrix]
            source = self.home(node.args[0], dtype)
            target = self.buffer("edges" if node.domain == "E" else "rows", node.width, dtype)
            self._results[node] = target
            self._products.append(Product(self.function, node.domain, source, matrix, transposed, target, skips))
        return self._results[node]

    def finish(self) -> None:
        """What is to be stored depends on products, and on what is read through an edge's parent: these, too."""
        done: set[Node] = set()
        while True:
            fresh = [n for n in self._stores if n not in done]
            if not fresh:
                return
            done.update(fresh)
            uses: set[Node] = set()
            for node in topological(fresh):
                # The sum over uses is as wide as its kernel: as a column beside wider ones it is read from memory.
                if node.op == "state_grad" or (
                    node.op not in LEAVES and node not in self._places and not uses.isdisjoint(node.args)
                ):
                    uses.add(node)
                for a in node.args:
                    if a.width == 1 and node.width > 1 and a in uses and node.op in ELEMENTWISE:
                        self.own(a)
                if node.op == "linear":
                    self.product(node)
                elif node.op in REDUCTIONS:
                    self.own(node)
                elif node.op == "repeat" and _leaf_of(node.args[0]) is None:
                    self.own(node.args[0])
                elif not self._fuse and node.domain != "S" and (node.op in ELEMENTWISE or node.op == "sum"):
                    self.own(node)

    # Steps. ----------------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Kernel | Product]:
        """Kernels and products in an order in which all is there when it is read."""
        steps: list[Kernel | Product] = []
        waiting = list(self._stores)
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
                    steps += [_Emitter(self, domain, width, {n}).run([n]) for n in alone]
                    waiting = [n for n in waiting if n not in alone]
                    progress = progress or bool(alone)
                    continue
                ready = self._ready(members, domain, pending, {p.target for p in products})
                if not ready:
                    continue
                progress = True
                steps.append(_Emitter(self, domain, width, set(ready)).run(ready))
                waiting = [n for n in waiting if n not in ready]
            held = {buffer for node in waiting for buffer, _ in self._stores[node]}
            undone = {p.target for p in products}
            for product in list(products):
                if product.source not in held and product.source not in undone:
                    steps.append(product)
                    products.remove(product)
                    progress = True
            assert progress, "every value is computed from others"
        self._stores, self._products = {}, []
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
            return self._results[base] not in products
        if base.op in LEAVES or node.op == "constant" or (node is not root and node in self._places):
            return True
        if node.op == "repeat" and domain == "E":
            # Read through the edge's parent: in memory, or a leaf.
            argument = node.args[0]
            base = argument.args[0] if argument.op == "slice" else argument
            if base.op == "linear":
                return self._results[base] not in products
            return argument not in pending
        return all(self._computable(root, a, domain, ready, pending, products, seen) for a in node.args)

    def use(self, buffer: int) -> int:
        b = self._compiled.buffers[buffer]
        if self._backward and not b.backward and b.space in ("rows", "edges"):
            b.saved = True
        return buffer

    def constant(self, value: float) -> int:
        constants = self._compiled.constants
        if value not in constants:
            constants.append(value)
        return constants.index(value)

    def table(self, span: tuple[int, int]) -> int:
        tables, wanted = self._compiled.tables, self.tables[span]
        for _, buffer, _, _ in wanted:
            self.use(buffer)
        if wanted not in tables:
            tables.append(wanted)
        return tables.index(wanted)

    def leaf_buffer(self, leaf: Node) -> int:
        space = {"input": "input", "vector": "vector", "output_grad": "output_grad"}[leaf.op]
        key = (space, leaf.attribute)
        if key not in self._inputs:
            dtypes = {"input": self._dtypes.inputs, "vector": self._dtypes.vectors, "output_grad": self._dtypes.outputs}
            self._compiled.buffers.append(Buffer(space, leaf.width, dtypes[space][leaf.attribute], leaf.attribute))
            self._inputs[key] = len(self._compiled.buffers) - 1
        return self._inputs[key]

    def column(self, slot: int) -> int:
        return self._columns[slot]


class _Emitter:
    """The instructions of one kernel."""

    def __init__(self, lowering: _Lowering, domain: str, width: int, roots: set[Node]):
        self._l, self._domain, self._width, self._roots = lowering, domain, width, roots
        self._code: list[list[int]] = []
        self._registers: dict[tuple[Node, bool], int] = {}
        self._next = 0

    def run(self, roots: Sequence[Node]) -> Kernel:
        stores = {"rowsum": "store_sum", "rowmax": "store_max"}
        registers = [self._value(r.args[0] if r.op in REDUCTIONS else r, in_loop=False) for r in roots]
        # Last, so that no load waits for a store that might be to the same address.
        for root, register in zip(roots, registers, strict=True):
            for buffer, column in self._l._stores[root]:
                self._emit(stores.get(root.op, "store"), -1, register, buffer, column)
        kernel = Kernel(self._l.function, self._domain, self._width, roots[0].op in REDUCTIONS)
        kernel.code, kernel.registers = _allocate(self._code)
        return kernel

    def _emit(self, op: str, result: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        self._code.append([OPS.index(op), result, a, b, c, d])

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _value(self, node: Node, in_loop: bool) -> int:
        """The register of a node; `in_loop` in the loop over a vertex's children."""
        # Within the loop, what belongs to the vertex was computed before it.
        key = (node, in_loop and node.domain == "E")
        if key in self._registers:
            return self._registers[key]
        register = self._compute(node, in_loop)
        self._registers[key] = register
        return register

    def _compute(self, node: Node, in_loop: bool) -> int:
        base, first = (node.args[0], node.attribute) if node.op == "slice" else (node, 0)
        edges = self._domain == "E" or in_loop
        if node.op == "constant":
            register = self._new()
            self._emit("constant", register, self._l.constant(node.attribute))
            return register
        if base.op == "state_grad" and (node not in self._l._places or node in self._roots):
            register = self._new()
            self._emit("uses", register, self._l.table(base.attribute), first)
            return register
        if node in self._l._places and node not in self._roots and (node.op != "linear"):
            return self._load(*self._l._places[node], "row", node)
        if base.op in LEAVES:
            return self._load_leaf(base, first, node, parent=False)
        if node.op == "repeat":
            if self._domain == "E":
                return self._through_parent(node.args[0])
            return self._value(node.args[0], in_loop=False)
        if node.op == "sum":
            return self._sum(node)
        assert edges or node.domain != "E", "rows of children are read in a loop over them"
        arguments = [self._value(a, in_loop) for a in node.args]
        if node.op == "stop":
            return arguments[0]
        register = self._new()
        self._emit(node.op, register, *arguments)
        return register

    def _load_leaf(self, leaf: Node, first: int, node: Node, parent: bool) -> int:
        if leaf.op == "gather":
            return self._load(self._l._compiled.state, first, "gather", node, self._l.column(leaf.attribute))
        if leaf.op == "children":
            return self._load(self._l._compiled.state, first, "child", node)
        buffer = self._l._results[leaf] if leaf.op == "linear" else self._l.leaf_buffer(leaf)
        return self._load(buffer, first, "parent" if parent else "row", node)

    def _load(self, buffer: int, column: int, access: str, node: Node, gather: int = 0) -> int:
        register = self._new()
        broadcast = int(node.width == 1 and self._width != 1)
        self._emit("load", register, self._l.use(buffer), column, ACCESS.index(access), 2 * gather + broadcast)
        return register

    def _through_parent(self, x: Node) -> int:
        base, first = (x.args[0], x.attribute) if x.op == "slice" else (x, 0)
        if x in self._l._places:
            return self._load(*self._l._places[x], "parent", x)
        return self._load_leaf(base, first, x, parent=True)

    def _sum(self, node: Node) -> int:
        (body,) = node.args
        for inner in self._outside(body):
            self._value(inner, in_loop=False)
        total = self._new()
        self._emit("begin", total)
        register = self._value(body, in_loop=True)
        self._emit("accumulate", total, register)
        self._emit("end", total)
        # A register of the loop is gone after it.
        self._registers = {key: r for key, r in self._registers.items() if not key[1]}
        return total

    def _outside(self, body: Node) -> list[Node]:
        """What the loop reads of the vertex itself."""
        found, stack, seen = [], [body], set()
        while stack:
            node = stack.pop()
            if node.number in seen:
                continue
            seen.add(node.number)
            base = node.args[0] if node.op == "slice" else node
            if node.op == "repeat":
                found.append(node.args[0])
            elif node.domain == "S":
                found.append(node)
            elif base.op not in LEAVES and node not in self._l._places:
                stack.extend(node.args)
        return found


def _allocate(code: list[list[int]]) -> tuple[list[tuple[int, ...]], int]:
    """Few registers for many: each is free again after its last use. In a loop, what comes from outside lives on."""
    begin, end, accumulate = (OPS.index(op) for op in ("begin", "end", "accumulate"))

    def operands(instruction: Sequence[int]) -> list[int]:
        op, result, a, b, c, _ = instruction
        name = OPS[op]
        if name in ("load", "constant", "uses", "begin"):
            return []
        if name == "end":
            return [result]
        if name == "accumulate":
            return [result, a]
        if name in STORES:
            return [a]
        return [a, b, c][: 1 if op < OPS.index("add") else 3 if name == "select" else 2]

    last: dict[int, int] = {}
    opened, made_at = None, {}
    for i, instruction in enumerate(code):
        op, result = instruction[:2]
        if op == begin:
            opened = i
            made_at[result] = i
        elif op not in (end, accumulate) and result >= 0:
            made_at.setdefault(result, i)
        for r in operands(instruction):
            last[r] = i
            if opened is not None and made_at[r] < opened:
                # Until the end of the loop, which is found below.
                last[r] = next(j for j in range(i, len(code)) if code[j][0] == end)
        if op == end:
            opened = None
    homes: dict[int, int] = {}
    free: list[int] = []
    count = 0
    allocated: list[tuple[int, ...]] = []
    for i, instruction in enumerate(code):
        op, result, a, b, c, d = instruction
        reads = operands(instruction)
        if result >= 0 and result not in homes:
            if free:
                homes[result] = free.pop()
            else:
                homes[result], count = count, count + 1
        name = OPS[op]
        if name in STORES or name == "accumulate":
            a = homes[a]
        elif name not in ("load", "constant", "uses", "begin", "end"):
            n = len(reads)
            a, b, c = (homes[v] if k < n else v for k, v in enumerate((a, b, c)))
        allocated.append((op, homes.get(result, -1), a, b, c, d))
        for r in {*reads, *([result] if result >= 0 else [])}:
            if last.get(r, i) == i and op != begin:
                free.append(homes.pop(r))
    return allocated, count
