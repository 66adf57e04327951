"""From a trace to what runs: torch's operations before the frontiers, steps in them, torch's operations after them.

Lazy batching (Cavs, section 3.5): what does not depend on a gather runs in torch, once for all vertices, before the
first frontier; what no scatter depends on, once after the last. So does what autograd makes of both, parameter
gradients among it. What is between is compiled.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..._base.elementwise import BOOLEAN, ELEMENTWISE, NUMBERS, Unsupported
from ..._base.instructions import ROUNDINGS
from ..program import Constant, Operation, Ref
from ..trace.trace import Trace
from .derived import derived_program
from .ir import Node, segments
from .lowering import Function, compile_frontiers
from .operands import take_operands
from .operations import FILLS, SHAPED, VIEWS, Value, broadcast
from .passes import fold_gathers, leave_out_leaves, postpone
from .plan import Part, Plan, Shared
from .steps import Dtypes

__all__ = ["compile_traces"]


def compile_traces(
    traces: Sequence[Trace],
    requires_grad: Callable[[str, str], bool],
    state: Sequence[int],
    dtype: str,
    lazy: bool,
    fuse: bool,
    late: bool = True,
) -> Plan:
    """Compile the vertex functions that run in one graph.

    Args:
        traces: what was recorded of each.
        requires_grad: of an ``input`` or a ``parameter``, any tensor of the module, by its name.
        state: one vertex's state.
        dtype: of the state.
        lazy: whether what can runs before and after the frontiers.
        fuse: whether element-wise operations share a kernel.
        late: whether what no scatter depends on is left to torch, after the frontiers.

    Raises:
        Unsupported: the compiler does not know an operation, which is named.
    """
    if math.prod(state) == 0 and any(t.scatters for t in traces):
        raise Unsupported("a state without numbers")
    try:
        return _compile(traces, requires_grad, state, dtype, lazy, fuse, len(traces) > 1, late)
    except Unsupported:
        if len(traces) == 1:
            raise
    # Torch may know what the frontiers do not.
    return _compile(traces, requires_grad, state, dtype, lazy, fuse, False, late)


def _compile(
    traces: Sequence[Trace],
    requires_grad: Callable[[str, str], bool],
    state: Sequence[int],
    dtype: str,
    lazy: bool,
    fuse: bool,
    early: bool,
    late: bool,
) -> Plan:
    shared = Shared(math.prod(state), dtype, lazy, early, late, max(len(t.outputs) for t in traces))
    compilers = [_Compiler(shared, i, t, requires_grad) for i, t in enumerate(traces)]
    parts, functions = zip(*(c.part() for c in compilers), strict=True)

    def needed(leaf: Node) -> bool:
        if leaf.op in ("gather", "children"):
            return True
        table = {"input": shared.inputs, "vector": shared.vectors, "linear": shared.matrices}[leaf.op]
        function, symbol = table[leaf.attribute[0] if leaf.op == "linear" else leaf.attribute]
        return symbol in compilers[function].differentiable

    outputs = sorted({number for p in parts for _, number in p.outputs})
    varying = _varying(compilers, parts)
    functions = [replace(f, outputs=[(outputs.index(number), node) for number, node in f.outputs]) for f in functions]
    slots = sorted({slot for t in traces for slot in t.slots_gathered})
    frontiers = compile_frontiers(
        shared.graph,
        functions,
        shared.state,
        {slot: column for column, slot in enumerate(slots)},
        needed if any(c.differentiable for c in compilers) else None,
        fuse,
        _dtypes(shared, traces, parts, outputs),
    )
    if fuse:
        fold_gathers(frontiers)
    if lazy:
        postpone(frontiers)
    leave_out_leaves(frontiers)
    programs, differentiable = [t.program for t in traces], [c.differentiable for c in compilers]
    given = take_operands(frontiers, programs, parts, shared.inputs, shared.matrices, shared.vectors, differentiable)
    derived = zip(compilers, parts, frontiers.derivatives, strict=False)
    return Plan(
        parts,
        tuple(shared.inputs),
        tuple(shared.matrices),
        tuple(shared.vectors),
        tuple(outputs),
        tuple(i for i, number in enumerate(outputs) if number not in varying),
        given,
        frontiers,
        tuple(derived_program(c.program, c.shared, c.converted, part, d, outputs, needed) for c, part, d in derived),
    )


def _varying(compilers: Sequence[_Compiler], parts: Sequence[Part]) -> set[int]:
    """Numbers of the outputs that may have a gradient, some through the states of children."""
    leaves: tuple[str, ...] = ()
    while True:
        found = [c.with_gradients(leaves) for c in compilers]
        if leaves or not any(p.scattered in f for p, f in zip(parts, found, strict=True)):
            return {number for p, f in zip(parts, found, strict=True) for s, number in p.outputs if s in f}
        leaves = ("gather", "children")


def _dtypes(shared: Shared, traces: Sequence[Trace], parts: Sequence[Part], outputs: Sequence[int]) -> Dtypes:
    """Of what the frontiers read and write; booleans are numbers of the state's dtype."""

    def of(function: int, symbol: int) -> str:
        dtype = traces[function].program.symbols[symbol].dtype
        return shared.dtype if dtype == "bool" else dtype

    leaving = {number: (f, s) for f, part in enumerate(parts) for s, number in part.outputs}
    given = ([of(*x) for x in table] for table in (shared.inputs, shared.matrices, shared.vectors))
    return Dtypes(shared.dtype, *given, [of(*leaving[number]) for number in outputs])


class _Compiler:
    """Turns one function's operations into expressions."""

    def __init__(self, shared: Shared, number: int, trace: Trace, requires_grad: Callable[[str, str], bool]):
        self.shared, self.number, self.program = shared, number, trace.program
        self._dtypes, self._lazy, self._state, self._graph = shared.dtypes, shared.lazy, shared.state, shared.graph
        self._operations = self.program.operations
        self._producer = {r: i for i, o in enumerate(self._operations) for r in o.results}
        self.converted: dict[int, Node] = {}
        self._inside: set[int] = set()
        self._requires_grad = requires_grad
        self.differentiable = self.with_gradients(())
        self._gathers = trace.slots_gathered, trace.takes_all_children
        self._inside_early = not shared.lazy or (shared.early and not any(self._gathers))

    def with_gradients(self, leaves: Collection[str]) -> set[int]:
        """Symbols that may have a gradient, where the results of the methods `leaves` have one."""
        symbols, requires_grad = self.program.symbols, self._requires_grad
        found = {
            s for s, info in enumerate(symbols) if info.kind == "parameter" and requires_grad("parameter", info.name)
        }
        for o in self._operations:
            first = o.op in leaves or (o.op == "pull" and requires_grad("input", ast.literal_eval(o.arguments[0].text)))
            if first or (o.op != "aten.detach.default" and not found.isdisjoint(o.reads())):
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
            self._check_dtype(symbol, "an output")
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
                if o.when == "before" and self.program.symbols[s].kind != "child" and o.op != "repeat":
                    before.add(i)
                elif self._runs_after(o):
                    after.add(i)
                elif s == symbol and push is not None:
                    leave(s, push)
                    continue
                else:
                    if s not in leaving:
                        leave(s, self.shared.pushes + self.shared.others)
                        self.shared.others += 1
                    continue
                stack.extend(o.reads())

        for number, s in enumerate(pushes):
            produced = self._producer.get(s) is not None and self.program.symbols[s].dtype in self._dtypes
            if produced and (self._inside_early or not self.shared.late):
                try:
                    leave(s, number)
                    continue
                except Unsupported:
                    pass
            outside(s, number)
        for table in (self.shared.inputs, self.shared.matrices, self.shared.vectors):
            for function, s in tuple(table):
                if function == self.number:
                    outside(s)
        part = Part(
            tuple(sorted(before)),
            tuple(sorted(after)),
            pushes,
            tuple(outputs),
            tuple(sorted(self._inside)),
            scatter,
        )
        return part, Function(scattered, nodes, *self._gathers)

    def _runs_after(self, o: Operation) -> bool:
        kinds = {self.program.symbols[s].kind for s in (*o.reads(), *o.results)}
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
            if s in self.converted:
                stack.pop()
                continue
            i = self._producer.get(s)
            info = self.program.symbols[s]
            o = None if i is None else self._operations[i]
            if info.kind in ("parameter", "constant", "shared"):
                self.converted[s] = self._vector(s)
            elif o.when == "before" and info.kind == "row" and not self._convertible(o):
                self.converted[s] = self._input(s)
            else:
                if not (o.op in _METHODS or self._knows(o)):
                    raise Unsupported(o.op)
                # A mask of dropout and the like is made before the frontiers, whatever reads it.
                reads = [r for r in self._values_read(o) if r not in self.converted]
                if reads:
                    stack.extend(reads)
                    continue
                self._inside.add(i)
                self._convert(o)
        if self.converted[symbol] is None:
            raise Unsupported(f"a result of {self._operations[self._producer[symbol]].op}")
        return self.converted[symbol]

    def _convertible(self, o: Operation) -> bool:
        """Whether an operation that could run before the frontiers is compiled into them: a view, all without lazy
        batching, and all but products of a function beside others that gathers nothing. What is such a function's runs
        once anyway, and as kernels of the frontiers on its own rows."""
        if o.op in VIEWS:
            symbol = self.program.symbols[o.reads()[0]]
            if symbol.kind == "row" and symbol.dtype in self._dtypes and self._keeps_rows(o):
                return True
        if o.op in FILLS:
            return self.program.symbols[o.results[0]].dtype in (*self._dtypes, "bool")
        if not self._inside_early or not self._knows(o):
            return False
        if self._lazy and o.op in _PRODUCTS:
            return False
        return all(self.program.symbols[s].dtype in (*self._dtypes, "bool") for s in (*o.reads(), *o.results))

    def _knows(self, o: Operation) -> bool:
        """Whether an operation of torch is known by its name."""
        if not o.op.startswith("aten."):
            return False
        names = (o.op, _out_of_place(o.op))
        return (
            o.op in _PRODUCTS or o.op in FILLS or o.op == _CAST or any(n in SHAPED or n in ELEMENTWISE for n in names)
        )

    def _values_read(self, o: Operation) -> list[int]:
        if o.op in _PRODUCTS:
            *rest, matrix = o.reads()
            return [s for s in rest if s != matrix]
        return o.reads()

    def _width(self, symbol: int) -> int:
        info = self.program.symbols[symbol]
        return math.prod(info.shape[1:])

    def _check_dtype(self, symbol: int, what: str) -> None:
        """Of what the frontiers read; booleans are handed over as 0 and 1."""
        dtype = self.program.symbols[symbol].dtype
        if dtype not in (*self._dtypes, "bool"):
            raise Unsupported(f"{what} in {dtype}")

    def _input(self, symbol: int) -> Node:
        self._check_dtype(symbol, "rows")
        return self._graph.node("input", (), self._width(symbol), "N", self._index(self.shared.inputs, symbol))

    def _index(self, table: list[tuple[int, int]], symbol: int) -> int:
        """The number of a symbol in a table, which it is added to."""
        if (self.number, symbol) not in table:
            table.append((self.number, symbol))
        return table.index((self.number, symbol))

    def _vector(self, symbol: int) -> Node:
        self._check_dtype(symbol, "a tensor")
        shape = self.program.symbols[symbol].shape
        if any(isinstance(s, str) for s in shape):
            raise Unsupported("a tensor of as many rows as there are vertices")
        symbol, first = self._whole(symbol)
        width = math.prod(self.program.symbols[symbol].shape)
        vector = self._graph.node("vector", (), width, "S", self._index(self.shared.vectors, symbol))
        return self._graph.slice(vector, first, first + math.prod(shape))

    def _whole(self, symbol: int) -> tuple[int, int]:
        """What a piece of a vector is cut from, as the chunks of a bias are, and its first column there: the gradient
        of the whole is then one sum."""
        symbols, i = self.program.symbols, self._producer.get(symbol)
        o = None if i is None else self._operations[i]
        if o is None or o.op not in _CUTS or o.keywords:
            return symbol, 0
        source, *arguments = o.arguments
        if not isinstance(source, Ref) or len(symbols[source.symbol].shape) != 1:
            return symbol, 0
        if o.op == "aten.slice.Tensor":
            numbers = [a.text for a in arguments[1:]]
            if len(numbers) not in (1, 2) or not numbers[0].isdigit():
                return symbol, 0
            start = int(numbers[0])
        else:
            widths = (symbols[r].shape[0] for r in o.results[: o.results.index(symbol)])
            start = sum(widths)
        self._inside.add(i)
        whole, first = self._whole(source.symbol)
        return whole, first + start

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
        elif o.op in FILLS:
            self._set(o, self._graph.constant(FILLS[o.op], self._width(o.results[0])))
        elif o.op in SHAPED and self._keeps_rows(o):
            self._shaped(o)
        elif o.op == _CAST:
            self._cast(o)
        else:
            self._elementwise(o)

    def _set(self, o: Operation, *nodes: Node | None) -> None:
        for symbol, node in zip(o.results, nodes, strict=True):
            self.converted[symbol] = node

    def _product(self, o: Operation) -> None:
        arguments = list(o.arguments)
        bias = None
        if o.op == "aten.addmm.default":
            if any(name in ("alpha", "beta") and value.text != "1" for name, value in o.keywords):
                raise Unsupported(f"{o.op} with alpha or beta")
            bias = arguments.pop(0).symbol
        x, matrix = (a.symbol for a in arguments)
        shape = self.program.symbols[matrix].shape
        if self.program.symbols[matrix].kind not in ("parameter", "constant", "shared"):
            raise Unsupported(f"{o.op} of two values of vertices")
        self._check_dtype(matrix, "a matrix")
        row = self._unrounded(self._row(x), self.program.symbols[matrix].dtype)
        product = self._graph.linear(row, self._index(self.shared.matrices, matrix), *shape)
        if bias is not None:
            product = self._graph.apply("add", product, self._broadcast(bias, o.results[0]))
        self._set(o, product)

    def _unrounded(self, x: Node, dtype: str) -> Node:
        """x without the roundings that its store does, before a product of this dtype."""
        return self._graph.cat(part.args[0] if part.op == dtype else part for _, part in segments(x))

    def _cast(self, o: Operation) -> None:
        """Registers are wide: a cast to a wider dtype changes nothing, one to a narrower one rounds."""
        (symbol,) = o.reads()
        source, target = (self.program.symbols[s].dtype for s in (symbol, o.results[0]))
        known = source in (*self._dtypes, "bool") and target in self._dtypes
        if not known or {name for name, _ in o.keywords} - {"dtype"}:
            raise Unsupported(f"{o.op} from {source} to {target}")
        x = self._row(symbol)
        self._set(o, self._graph.apply(target, x) if target in ROUNDINGS and source != target else x)

    def _keeps_rows(self, o: Operation) -> bool:
        """Whether a view has the rows that its argument has."""
        if o.op not in ("aten.view.default", "aten._unsafe_view.default", "aten._reshape_copy.default"):
            return True
        (before, after) = (self.program.symbols[s].shape[:1] for s in (o.reads()[0], o.results[0]))
        return before == after and before in (("N",), ("E",))

    def _argument(self, a: object) -> object:
        """A number, a list, or the columns of a symbol with their shape."""
        if isinstance(a, tuple):
            return [self._argument(x) for x in a]
        if isinstance(a, Constant):
            return _number(a.text)
        shape = self.program.symbols[a.symbol].shape
        rows = shape[:1] in (("N",), ("E",))
        return Value(self._value(a.symbol), tuple(shape[1:] if rows else shape), rows)

    def _shaped(self, o: Operation) -> None:
        shapes = []
        for r in o.results:
            if self.program.symbols[r].shape[:1] not in (("N",), ("E",)):
                raise Unsupported(f"{o.op} along the vertices")
            self._check_dtype(r, f"{o.op} to rows")
            shapes.append(tuple(self.program.symbols[r].shape[1:]))
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
        target = self.program.symbols[result].shape
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
        dtype = self.program.symbols[result].dtype
        numbers = set(self._dtypes)
        known = {"bool"} if name in BOOLEAN else numbers if name in NUMBERS else {*numbers, "bool"}
        if dtype not in known:
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


_METHODS = frozenset(("pull", "gather", "children", "repeat", "sum"))
_CAST = "aten._to_copy.default"
_CUTS = frozenset(("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.slice.Tensor"))
_PRODUCTS = frozenset(("aten.mm.default", "aten.addmm.default"))
