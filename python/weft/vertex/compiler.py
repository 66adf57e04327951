"""From a trace to what runs: torch's operations before the frontiers, steps in them, torch's operations after them.

Lazy batching (Cavs, section 3.5): what does not depend on a gather runs in torch, once for all vertices, before the
first frontier; what no scatter depends on, once after the last. So does what autograd makes of both, parameter
gradients among it. What is between is compiled.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .ir import Graph, Node, Unsupported
from .kernels import Compiled, Function, compile_frontiers
from .operations import BOOLEAN, ELEMENTWISE, SHAPED, VIEWS, Value, broadcast
from .program import Constant, Operation, Ref, Symbol
from .trace import Trace

__all__ = ["Part", "Plan", "compile_traces"]


@dataclass(frozen=True)
class Part:
    """One vertex function of a plan. Numbers are those of symbols of its trace's program, or of its operations."""

    before: tuple[int, ...]
    """Operations."""
    after: tuple[int, ...]
    pushes: tuple[int, ...]
    """Symbols."""
    outputs: tuple[tuple[int, int], ...]
    """Symbols that leave the frontiers, each with the number of the output."""
    replayed: tuple[int, ...]
    """Operations in the frontiers, for the reference."""
    scattered: int | None
    """Symbol."""

    def direct(self, push: int) -> bool:
        """Whether what is pushed as number `push` comes from the frontiers as it is."""
        return (self.pushes[push], push) in self.outputs


@dataclass(frozen=True)
class Plan:
    """The vertex functions of a graph, compiled. What the frontiers read is named by function and symbol."""

    parts: tuple[Part, ...]
    inputs: tuple[tuple[int, int], ...]
    """(N, ...)."""
    matrices: tuple[tuple[int, int], ...]
    vectors: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    """Numbers of what leaves the frontiers. Those below the number of pushes are pushed as they are."""
    frontiers: Compiled

    def shape(self, number: int, traces: Sequence[Trace]) -> Symbol:
        """A symbol that leaves the frontiers as output `number`."""
        for part, trace in zip(self.parts, traces, strict=True):
            for symbol, n in part.outputs:
                if n == number:
                    return trace.program.symbols[symbol]
        raise KeyError(number)


def compile_traces(
    traces: Sequence[Trace],
    requires_grad: Callable[[str], bool],
    state: Sequence[int],
    dtype: str,
    lazy: bool,
    fuse: bool,
) -> Plan:
    """Compile the vertex functions that run in one graph.

    Args:
        traces: what was recorded of each.
        requires_grad: of an input or a tensor of the module, by its name.
        state: one vertex's state.
        dtype: of the state, ``float32`` or ``float64``.
        lazy: whether what can runs before and after the frontiers.
        fuse: whether element-wise operations share a kernel.

    Raises:
        Unsupported: the compiler does not know an operation, which is named.
    """
    shared = _Shared(math.prod(state), dtype, lazy, max(len(t.outputs) for t in traces))
    compilers = [_Compiler(shared, i, t, requires_grad) for i, t in enumerate(traces)]
    parts, functions = zip(*(c.part() for c in compilers), strict=True)

    def needed(leaf: Node) -> bool:
        if leaf.op in ("gather", "children"):
            return True
        table = {"input": shared.inputs, "vector": shared.vectors, "linear": shared.matrices}[leaf.op]
        function, symbol = table[leaf.attribute[0] if leaf.op == "linear" else leaf.attribute]
        return symbol in compilers[function].differentiable

    outputs = sorted({number for p in parts for _, number in p.outputs})
    functions = [
        Function(f.scattered, [(outputs.index(number), node) for number, node in f.outputs]) for f in functions
    ]
    slots = sorted({slot for t in traces for slot in t.slots_gathered})
    frontiers = compile_frontiers(
        shared.graph,
        functions,
        shared.state,
        {slot: column for column, slot in enumerate(slots)},
        needed if any(c.differentiable for c in compilers) else None,
        fuse,
    )
    return Plan(parts, tuple(shared.inputs), tuple(shared.matrices), tuple(shared.vectors), tuple(outputs), frontiers)


@dataclass
class _Shared:
    """What the functions of a graph have in common."""

    state: int
    dtype: str
    lazy: bool
    pushes: int
    graph: Graph = field(default_factory=Graph)
    inputs: list[tuple[int, int]] = field(default_factory=list)
    matrices: list[tuple[int, int]] = field(default_factory=list)
    vectors: list[tuple[int, int]] = field(default_factory=list)
    others: int = 0
    """Outputs that no function pushes as they are."""


class _Compiler:
    def __init__(self, shared: _Shared, number: int, trace: Trace, requires_grad: Callable[[str], bool]):
        self._shared, self._number, self._program = shared, number, trace.program
        self._dtype, self._lazy, self._state, self._graph = shared.dtype, shared.lazy, shared.state, shared.graph
        self._operations = self._program.operations
        self._producer = {r: i for i, o in enumerate(self._operations) for r in o.results}
        self._converted: dict[int, Node] = {}
        self._inside: set[int] = set()
        self.differentiable = self._with_gradients(requires_grad)

    def _with_gradients(self, requires_grad: Callable[[str], bool]) -> set[int]:
        """Symbols that may have a gradient."""
        symbols = self._program.symbols
        found = {s for s, info in enumerate(symbols) if info.kind == "parameter" and requires_grad(info.name)}
        for o in self._operations:
            pulled = o.op == "pull" and requires_grad(ast.literal_eval(o.arguments[0].text))
            if pulled or (o.op != "aten.detach.default" and not found.isdisjoint(o.reads())):
                found.update(r for r in o.results if symbols[r].dtype.startswith(("float", "bfloat")))
        return found

    def part(self) -> tuple[Part, Function]:
        operations = self._operations
        scatter = next((o.reads()[0] for o in operations if o.op == "scatter"), None)
        pushes = tuple(o.reads()[0] for o in operations if o.op == "push")
        scattered = None if scatter is None else self._row(scatter)
        outputs: list[tuple[int, int]] = []
        nodes: list[tuple[int, Node]] = []
        leaving: set[int] = set()
        after: set[int] = set()
        before: set[int] = set()

        def leave(symbol: int, number: int) -> None:
            nodes.append((number, self._row(symbol)))
            outputs.append((symbol, number))
            leaving.add(symbol)

        def outside(symbol: int, push: int | None = None) -> None:
            """Torch computes this symbol for all vertices."""
            stack = [symbol]
            while stack:
                s = stack.pop()
                i = self._producer.get(s)
                if i is None or i in before or i in after:
                    continue
                o = operations[i]
                if o.when == "before" and self._program.symbols[s].kind != "child" and o.op != "repeat":
                    before.add(i)
                elif self._runs_after(o):
                    after.add(i)
                elif s == symbol and push is not None:
                    leave(s, push)
                    continue
                else:
                    if s not in leaving:
                        leave(s, self._shared.pushes + self._shared.others)
                        self._shared.others += 1
                    continue
                stack.extend(o.reads())

        for number, s in enumerate(pushes):
            if not self._lazy and self._producer.get(s) is not None:
                try:
                    leave(s, number)
                    continue
                except Unsupported:
                    pass
            outside(s, number)
        for table in (self._shared.inputs, self._shared.matrices, self._shared.vectors):
            for function, s in tuple(table):
                if function == self._number:
                    outside(s)
        part = Part(
            tuple(sorted(before)),
            tuple(sorted(after)),
            pushes,
            tuple(outputs),
            tuple(sorted(self._inside)),
            scatter,
        )
        return part, Function(scattered, nodes)

    def _runs_after(self, o: Operation) -> bool:
        kinds = {self._program.symbols[s].kind for s in (*o.reads(), *o.results)}
        return o.when == "after" and o.op.startswith("aten.") and "child" not in kinds

    # Symbols. --------------------------------------------------------------------------------------------------------

    def _row(self, symbol: int) -> Node:
        node = self._value(symbol)
        width = self._width(symbol)
        if node.width != width:  # a number for all columns
            node = self._graph.apply("add", node, self._graph.constant(0.0, width))
        return node

    def _value(self, symbol: int) -> Node:
        """The expression of a symbol; arguments first, without recursion on long programs."""
        stack = [symbol]
        while stack:
            s = stack[-1]
            if s in self._converted:
                stack.pop()
                continue
            i = self._producer.get(s)
            info = self._program.symbols[s]
            o = None if i is None else self._operations[i]
            if info.kind in ("parameter", "constant", "shared"):
                self._converted[s] = self._vector(s)
            elif o.when == "before" and info.kind == "row" and not self._convertible(o):
                self._converted[s] = self._input(s)
            else:
                # A mask of dropout and the like is made before the frontiers, whatever reads it.
                reads = [r for r in self._values_read(o) if r not in self._converted]
                if reads:
                    stack.extend(reads)
                    continue
                self._inside.add(i)
                self._convert(o)
        if self._converted[symbol] is None:
            raise Unsupported(f"a result of {self._operations[self._producer[symbol]].op}")
        return self._converted[symbol]

    def _convertible(self, o: Operation) -> bool:
        """Whether an operation that could run before the frontiers is compiled into them: a view, or all without lazy
        batching."""
        if o.op in VIEWS:
            symbol = self._program.symbols[o.reads()[0]]
            if symbol.kind == "row" and symbol.dtype == self._dtype and self._keeps_rows(o):
                return True
        if self._lazy:
            return False
        if not any(o.op in known for known in (_PRODUCTS, ELEMENTWISE, SHAPED)):
            return False
        return all(self._program.symbols[s].dtype in (self._dtype, "bool") for s in (*o.reads(), *o.results))

    def _values_read(self, o: Operation) -> list[int]:
        if o.op in _PRODUCTS:
            *rest, matrix = o.reads()
            return [s for s in rest if s != matrix]
        return o.reads()

    def _width(self, symbol: int) -> int:
        info = self._program.symbols[symbol]
        return math.prod(info.shape[1:])

    def _check_dtype(self, symbol: int, what: str) -> None:
        """Of what the frontiers read; booleans are handed over as 0 and 1."""
        dtype = self._program.symbols[symbol].dtype
        if dtype not in (self._dtype, "bool"):
            raise Unsupported(f"{what} in {dtype}")

    def _input(self, symbol: int) -> Node:
        self._check_dtype(symbol, "rows")
        return self._graph.node("input", (), self._width(symbol), "N", self._index(self._shared.inputs, symbol))

    def _index(self, table: list[tuple[int, int]], symbol: int) -> int:
        """The number of a symbol in a table, which it is added to."""
        if (self._number, symbol) not in table:
            table.append((self._number, symbol))
        return table.index((self._number, symbol))

    def _vector(self, symbol: int) -> Node:
        self._check_dtype(symbol, "a tensor")
        shape = self._program.symbols[symbol].shape
        if any(isinstance(s, str) for s in shape):
            raise Unsupported("a tensor of as many rows as there are vertices")
        return self._graph.node("vector", (), math.prod(shape), "S", self._index(self._shared.vectors, symbol))

    # Operations. -----------------------------------------------------------------------------------------------------

    def _convert(self, o: Operation) -> None:
        g = self._graph
        if o.op == "gather":
            slot = int(o.arguments[0].text)
            self._set(o, g.node("gather", (), self._state, "N", slot))
        elif o.op == "children":
            self._set(o, g.node("children", (), self._state, "E"))
        elif o.op == "repeat":
            self._set(o, g.repeat(self._row(o.reads()[0])))
        elif o.op == "sum":
            x = self._row(o.reads()[0])
            if x.domain != "E":
                raise Unsupported("a message that does not depend on the child")
            self._set(o, g.sum(x))
        elif o.op in _PRODUCTS:
            self._product(o)
        elif o.op in SHAPED and self._keeps_rows(o):
            self._shaped(o)
        else:
            self._elementwise(o)

    def _set(self, o: Operation, *nodes: Node | None) -> None:
        for symbol, node in zip(o.results, nodes, strict=True):
            self._converted[symbol] = node

    def _product(self, o: Operation) -> None:
        arguments = list(o.arguments)
        bias = None
        if o.op == "aten.addmm.default":
            if any(name in ("alpha", "beta") and value.text != "1" for name, value in o.keywords):
                raise Unsupported(f"{o.op} with alpha or beta")
            bias = arguments.pop(0).symbol
        x, matrix = (a.symbol for a in arguments)
        shape = self._program.symbols[matrix].shape
        if self._program.symbols[matrix].kind not in ("parameter", "constant", "shared"):
            raise Unsupported(f"{o.op} of two values of vertices")
        self._check_dtype(matrix, "a matrix")
        product = self._graph.linear(self._row(x), self._index(self._shared.matrices, matrix), *shape)
        if bias is not None:
            product = self._graph.apply("add", product, self._broadcast(bias, o.results[0]))
        self._set(o, product)

    def _keeps_rows(self, o: Operation) -> bool:
        """Whether a view has the rows that its argument has."""
        if o.op not in ("aten.view.default", "aten._unsafe_view.default", "aten._reshape_copy.default"):
            return True
        (before, after) = (self._program.symbols[s].shape[:1] for s in (o.reads()[0], o.results[0]))
        return before == after and before in (("N",), ("E",))

    def _argument(self, a: object) -> object:
        """A number, a list, or the columns of a symbol with their shape."""
        if isinstance(a, tuple):
            return [self._argument(x) for x in a]
        if isinstance(a, Constant):
            return _number(a.text)
        shape = self._program.symbols[a.symbol].shape
        rows = shape[:1] in (("N",), ("E",))
        return Value(self._value(a.symbol), tuple(shape[1:] if rows else shape), rows)

    def _shaped(self, o: Operation) -> None:
        shapes = []
        for r in o.results:
            if self._program.symbols[r].shape[:1] not in (("N",), ("E",)):
                raise Unsupported(f"{o.op} along the vertices")
            shapes.append(tuple(self._program.symbols[r].shape[1:]))
        arguments = [self._argument(a) for a in o.arguments]
        keywords = {key: self._argument(value) for key, value in o.keywords}
        wide = [self._wide(a) for a in arguments]
        self._set(o, *SHAPED[o.op](self._graph, shapes, *wide, **keywords))

    def _wide(self, a: object) -> object:
        """Values of all their columns."""
        if isinstance(a, list):
            return [self._wide(x) for x in a]
        if isinstance(a, Value):
            return a._replace(node=self._graph.broadcast(a.node, math.prod(a.shape)))
        return a

    def _broadcast(self, symbol: int, result: int) -> Node:
        """An argument of an element-wise operation, as wide as the result or 1."""
        target = self._program.symbols[result].shape
        value = self._argument(Ref(symbol))
        if value.rows and len(value.shape) != len(target) - 1:
            raise Unsupported("a value broadcast along a new dimension")
        return broadcast(self._graph, value, target[1:])

    def _elementwise(self, o: Operation) -> None:
        name = o.op if o.op in ELEMENTWISE else _out_of_place(o.op)
        make = ELEMENTWISE.get(name)
        if make is None or len(o.results) != 1:
            raise Unsupported(o.op)
        result = o.results[0]
        dtype = self._program.symbols[result].dtype
        if dtype not in (self._dtype, "bool") or (name in BOOLEAN and dtype != "bool"):
            raise Unsupported(f"{o.op} to {dtype}")
        arguments: list[object] = []
        for a in o.arguments:
            if isinstance(a, tuple):
                raise Unsupported(o.op)
            arguments.append(self._broadcast(a.symbol, result) if isinstance(a, Ref) else _number(a.text))
        keywords = {key: _number(value.text) if isinstance(value, Constant) else value for key, value in o.keywords}
        try:
            node = make(self._graph, *arguments, **keywords)
        except TypeError:
            raise Unsupported(f"{o.op} with these arguments") from None
        self._set(o, node)


def _out_of_place(name: str) -> str:
    """The operation that an operation in place is the same as."""
    namespace, op, overload = name.split(".")
    return f"{namespace}.{op.removesuffix('_')}.{overload}"


def _number(text: str) -> object:
    """What torch printed: a number, a text, None; the number of rows as a text."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        return float(text)
    except ValueError:
        return text.strip("'")


_PRODUCTS = frozenset(("aten.mm.default", "aten.addmm.default"))
