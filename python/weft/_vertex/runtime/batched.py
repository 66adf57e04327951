"""The batched executor: compiled vertex functions run frontier by frontier, one call of an operator each way."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from ..._C import vertex as _C
from ..compiler.plan import Part, Plan
from ..options import current
from ..program import Program, Symbol
from ..vertex import Spec, Vertex, VertexType
from . import reference
from .schedule import Schedule

__all__ = ["Batched", "made_before", "run"]


@dataclass(frozen=True)
class Batched:
    """Compiled vertex functions and what their operators take."""

    functions: tuple[reference.Function, ...]
    plan: Plan
    before: tuple[tuple[int, ...], ...]
    """Of each function the operations that torch runs before the frontiers."""
    program: torch.ScriptObject
    """As the operators take it."""
    frontiers: _C.Frontiers
    """The operators with the program; csrc/vertex/bindings/frontiers.cpp."""
    direct: tuple[tuple[tuple[bool, str], ...], tuple[int, ...]] | None
    """Where torch has nothing to do before or after the frontiers: the names of what is given, each with whether it is
    pulled, and which of the operator's outputs are pushed."""

    @staticmethod
    def of(functions: Sequence[reference.Function], plan: Plan) -> Batched:
        program, given = plan.frontiers.program(), plan.given
        frontiers = _C.Frontiers(
            program=program,
            counts=(len(given.inputs), len(given.matrices), len(given.vectors)),
            outputs=len(plan.outputs),
            constant=plan.constant,
        )
        before = tuple(
            _needed(f.trace.program, part, [s for p, s in given.all if p == number])
            for number, (f, part) in enumerate(zip(functions, plan.parts, strict=True))
        )
        # Not the functions themselves: what is compiled is kept with the trace, and would keep the module alive.
        kept = tuple(replace(f, vertex=None) for f in functions)
        return Batched(kept, plan, before, program, frontiers, _direct(functions, plan, before))

    def operands(self, given: Sequence[Tensor], levels: reference.Plan) -> list[Tensor]:
        """The inputs, matrices and vectors of the plan. Linear layers leave out, as zeros, rows of other functions'
        vertices: what lies there is not read, and gradients of zero times NaN would be NaN."""
        operands = self.plan.given
        inputs, matrices = given[: len(operands.inputs)], given[len(operands.inputs) :][: len(operands.matrices)]
        vectors = given[len(operands.inputs) + len(operands.matrices) :]
        found = list(inputs)
        for i, (matrix, bias) in operands.layers.items():
            x, own = inputs[i], None
            if len(self.functions) > 1:
                own = levels.vertices(operands.inputs[i][0])
                x = x.index_select(0, own)
            y = torch.nn.functional.linear(x, matrices[matrix], None if bias is None else vectors[bias])
            found[i] = y if own is None else y.new_zeros((len(inputs[i]), *y.shape[1:])).index_copy(0, own, y)
        turned = (matrices[number].t() if turn else matrices[number] for number, turn in operands.matrix_of)
        return [*found, *turned, *(vectors[number] for number in operands.vector_of)]

    @property
    def type(self) -> VertexType:
        return self.functions[0].type


def run(
    compiled: Batched,
    schedule: Schedule,
    levels: Callable[[], reference.Plan],
    vertices: Callable[[], Sequence[Tensor]] | None,
    inputs: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> Sequence[Tensor]:
    """The pushed tensors, row i of vertex i.

    Args:
        compiled: the functions.
        schedule: of the graphs.
        levels: makes the plan of the reference, for second derivatives.
        vertices: gives those of each function, None where there is one function.
        inputs: what is pulled.
        tensors: of the module, by name.
    """
    device = compiled.type.device
    differentiable = functools.partial(_differentiable, compiled, levels)
    shared = schedule.block(device), schedule.block(), schedule.sizes, current().stream, differentiable
    if compiled.direct is not None and not torch.is_autocast_enabled(device.type):
        names, order = compiled.direct
        given = [(inputs if pulled else tensors)[name] for pulled, name in names]
        found = compiled.frontiers(*shared, given)
        return [found[i] for i in order]
    plan, dtype, rows = compiled.plan, compiled.type.state.dtype, schedule.core.num_vertices
    columns = [None] * len(plan.parts) if vertices is None else vertices()
    with torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext():
        parts = [
            _Part(part, f, where, rows, inputs, tensors)
            for part, f, where in zip(plan.parts, compiled.functions, columns, strict=True)
        ]
        for part, before in zip(parts, compiled.before, strict=True):
            part.replay(before)
        operands = plan.given
        given = [
            *(_number(_matrix(parts[p].input(s), rows), dtype) for p, s in operands.inputs),
            *(_number(parts[p].values[s], dtype) for p, s in (*operands.matrices, *operands.vectors)),
        ]
        found = compiled.frontiers(*shared, given)
        results = dict(zip(plan.outputs, found, strict=True))
        for part in parts:
            for symbol, number in part.plan.outputs:
                value = part.own(_shaped(results[number], part.symbols[symbol].shape[1:]))
                part.values[symbol] = _as_recorded(part.symbols[symbol], value)
            part.replay(part.plan.after)
        if vertices is None:
            outputs = [parts[0].values[s] for s in parts[0].plan.pushes]
        else:
            pushes = max(len(p.plan.pushes) for p in parts)
            outputs = [_pushed(parts, push, results, rows) for push in range(pushes)]
    if {*map(id, outputs)} <= {*map(id, found)} and len({*map(id, outputs)}) == len(outputs):
        return outputs  # the operator's own, each once
    constants = [c for f in compiled.functions for c in f.trace.constants]
    return _own(outputs, [*inputs.values(), *tensors.values(), *constants])


def made_before(compiled: Batched, rows: int, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """What the frontiers read of each vertex, (rows, ...), where it depends on no parameter. Rows of vertices that run
    another function are what comes of what is there."""
    parts = [
        _Part(part, f, None, rows, inputs, {}) for part, f in zip(compiled.plan.parts, compiled.functions, strict=True)
    ]
    for part, before in zip(parts, compiled.before, strict=True):
        part.replay(before)
    return [parts[p].input(s) for p, s in compiled.plan.given.inputs]


def _direct(
    functions: Sequence[reference.Function], plan: Plan, before: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[bool, str], ...], tuple[int, ...]] | None:
    """As Batched has it."""
    names: list[tuple[bool, str]] = []
    pulled: list[dict[int, str]] = []
    for f, operations in zip(functions, before, strict=True):
        program, calls = f.trace.program, f.trace.calls
        if any(program.operations[i].op != "pull" for i in operations):
            return None
        pulled.append({program.operations[i].results[0]: calls[i].args[0] for i in operations})
    for number, symbol in plan.given.all:
        info = functions[number].trace.program.symbols[symbol]
        name = pulled[number].get(symbol)
        if info.dtype == "bool" or (name is None and info.kind != "parameter"):
            return None
        if name is not None and len(info.shape) != 2:
            return None
        names.append((False, info.name) if name is None else (True, name))
    pushes = max(len(part.pushes) for part in plan.parts)
    for part, f in zip(plan.parts, functions, strict=True):
        symbols = f.trace.program.symbols
        simple = all(len(symbols[s].shape) == 2 and symbols[s].dtype != "bool" for s, _ in part.outputs)
        if part.after or not simple or not all(map(part.direct, range(len(part.pushes)))):
            return None
    if any(number not in plan.outputs for number in range(pushes)):
        return None
    return tuple(names), tuple(plan.outputs.index(number) for number in range(pushes))


def _needed(program: Program, part: Part, given: Sequence[int]) -> tuple[int, ...]:
    """The operations before the frontiers that what is given to them, pushed, or read after them depends on."""
    wanted = {*given, *part.pushes, *(s for i in part.after for s in program.operations[i].reads())}
    found = []
    for i in reversed(part.before):
        if not wanted.isdisjoint(program.operations[i].results):
            found.append(i)
            wanted.update(program.operations[i].reads())
    return tuple(reversed(found))


class _Part:
    """One of the functions, before and after the frontiers: torch on the rows of its own vertices."""

    def __init__(
        self,
        plan: Part,
        function: reference.Function,
        vertices: Tensor | None,
        rows: int,
        inputs: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
    ):
        trace = function.trace
        self.plan, self.symbols, self._trace = plan, trace.program.symbols, trace
        self._vertices, self._rows, self._inputs = vertices, rows, inputs
        self.values = _Values(self.symbols, trace.constants, tensors)
        self._pulled: dict[int, str] = {}

    def own(self, x: Tensor) -> Tensor:
        """The rows of these vertices."""
        return x if self._vertices is None else x.index_select(0, self._vertices)

    def all(self, x: Tensor) -> Tensor:
        """These vertices' rows among those of all vertices; the others are zeros."""
        if self._vertices is None:
            return x
        return x.new_zeros((self._rows, *x.shape[1:])).index_copy(0, self._vertices, x)

    def input(self, symbol: int) -> Tensor:
        """What the frontiers read, a row for each of all vertices."""
        name = self._pulled.get(symbol)
        return self.all(self.values[symbol]) if name is None else self._inputs[name]

    def replay(self, operations: Sequence[int]) -> None:
        rows = self._rows if self._vertices is None else len(self._vertices)
        for i in operations:
            o, call = self._trace.program.operations[i], self._trace.calls[i]
            if o.op == "pull":
                (symbol,) = o.results
                self._pulled[symbol] = call.args[0]
                self.values[symbol] = self.own(self._inputs[call.args[0]])
                continue
            result = _torch(call, self.values, rows)
            results = [result] if isinstance(result, Tensor) else list(result)
            for symbol, value in zip(o.results, results, strict=True):
                self.values[symbol] = value


def _pushed(parts: Sequence[_Part], push: int, results: Mapping[int, Tensor], rows: int) -> Tensor:
    """What several functions push, the rows of those that push nothing zeros."""
    pushing = [p for p in parts if p.plan.pushes]
    first = pushing[0].plan.pushes[push]
    shape = pushing[0].symbols[first].shape[1:]
    found = _shaped(results[push], shape) if push in results else None
    for part in pushing:
        if part.plan.direct(push):
            continue
        value = part.values[part.plan.pushes[push]]
        found = part.all(value) if found is None else found.index_copy(0, part._vertices, value)
    return found


def _torch(call, values: Mapping[int, Tensor], rows: int, children: int | None = None):
    """An operation as torch runs it; one in place on a copy, because others may still read its argument."""
    if not call.changes:
        return call(values, rows, children)
    changed = call.args[0].symbol
    return call(_Over(values, changed, values[changed].clone()), rows, children)


class _Over(dict):
    """Values, one of them another."""

    def __init__(self, values: Mapping[int, Tensor], symbol: int, value: Tensor):
        super().__init__({symbol: value})
        self._values = values

    def __missing__(self, symbol: int) -> Tensor:
        return self._values[symbol]


class _Values(dict):
    """Tensors of symbols; those of the module and constants are there from the start."""

    def __init__(self, symbols, constants: Sequence[Tensor], tensors: Mapping[str, Tensor]):
        super().__init__()
        self._symbols, self._constants, self._tensors = symbols, constants, tensors

    def __missing__(self, symbol: int) -> Tensor:
        info = self._symbols[symbol]
        if info.kind == "constant":
            return self._constants[int(info.name.removeprefix("constant"))]
        return self._tensors[info.name]


def _matrix(x: Tensor, rows: int) -> Tensor:
    return x if x.dim() == 2 else x.reshape(rows, math.prod(x.shape[1:]))


def _shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The other way round; no view where none is needed, because views are copied before they are handed out."""
    return x if x.shape[1:] == tuple(shape) else x.view(len(x), *shape)


def _number(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Booleans are 0 and 1 in the frontiers."""
    return x.to(dtype) if x.dtype == torch.bool else x


def _as_recorded(symbol: Symbol, x: Tensor) -> Tensor:
    """The other way round."""
    return x.bool() if symbol.dtype == "bool" else x


def _own(outputs: list[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that share no memory with each other or with anything else."""
    seen = {t.untyped_storage()._cdata for t in others}
    result = []
    for x in outputs:
        storage = x.untyped_storage()._cdata
        result.append(x.clone() if storage in seen or x._is_view() else x)
        seen.add(storage)
    return result


def _differentiable(
    compiled: Batched,
    levels: Callable[[], reference.Plan],
    given: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients as functions that have gradients: the frontiers again, level by level in torch. The node, which
    calls it, keeps autocast out."""
    with torch.enable_grad():
        # One tensor may be given in several places, each of which has a gradient of its own.
        given = [x.view_as(x) for x in given]
        asked = [x for x, n in zip(given, needed, strict=True) if n]
        outputs = _replayed(compiled, levels(), given)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], asked, [g for _, g in pairs], create_graph=True, allow_unused=True
            )
            if pairs
            else [None] * len(asked)
        )
    return [next(found) if n else None for n in needed]


def _replayed(compiled: Batched, levels: reference.Plan, given: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of the frontiers by the reference executor, from what they are given."""
    plan, functions, device = compiled.plan, compiled.functions, compiled.type.device
    operands = compiled.operands(given, levels)
    inputs, shared = operands[: len(plan.inputs)], operands[len(plan.inputs) :]
    rows = {f"%{i}": x for i, x in enumerate(inputs)}
    shared = dict(zip((*plan.matrices, *plan.vectors), shared, strict=True))
    traces = [f.trace for f in functions]
    dtype = compiled.type.state.dtype
    specs = tuple(Spec(_spec(plan.shape(number, traces)).shape, dtype) for number in plan.outputs)
    replays = []
    for number, (part, f) in enumerate(zip(plan.parts, functions, strict=True)):
        pulled = {s: f"%{i}" for i, (function, s) in enumerate(plan.inputs) if function == number}
        constant = {s: x for (function, s), x in shared.items() if function == number}
        replay = _Replay(part, f, pulled, constant, plan.outputs, specs)
        symbols, operations = f.trace.program.symbols, f.trace.program.operations
        sums = tuple(_spec(symbols[operations[i].results[0]]) for i in part.replayed if operations[i].op == "sum")
        type = VertexType(f.type.name, f.type.state, {name: Spec.of(x) for name, x in rows.items()}, device)
        shown = SimpleNamespace(
            outputs=specs, sums=sums, pulls=frozenset(pulled.values()), pulls_edges=frozenset(), in_place=False
        )
        replays.append(reference.Function(replay, type, shown))
    outputs = reference.run(replays, levels, rows)
    return [o.reshape(len(o), -1) for o in outputs]


class _Replay:
    """The operations of one function in the frontiers, as a vertex function."""

    def __init__(
        self,
        part: Part,
        function: reference.Function,
        pulled: Mapping[int, str],
        shared: Mapping[int, Tensor],
        outputs: Sequence[int],
        specs: Sequence[Spec],
    ):
        program = function.trace.program
        self._part, self._pulled, self._shared = part, pulled, shared
        self._calls, self._symbols, self._operations = function.trace.calls, program.symbols, program.operations
        self._outputs, self._specs = outputs, specs
        self._producers = {r: i for i in part.replayed for r in self._operations[i].results}

    def __call__(self, v: Vertex) -> None:
        values = {s: _as_recorded(self._symbols[s], x) for s, x in self._shared.items()}
        for s, name in self._pulled.items():
            values[s] = _as_recorded(self._symbols[s], v.pull(name).view(-1, *self._symbols[s].shape[1:]))
        for i in self._part.replayed:
            o = self._operations[i]
            if self._on_children(i) or any(r in values for r in o.results):
                continue
            if o.op == "gather":
                result = v.gather(self._calls[i].args[0])
            elif o.op == "sum":
                result = self._total(v, values, o.reads()[0])
            else:
                result = _torch(self._calls[i], values, v._rows)
            self._set(values, i, result)
        if self._part.scattered is not None:
            v.scatter(values[self._part.scattered])
        mine = {number: _number(values[s], v._type.state.dtype) for s, number in self._part.outputs}
        for number, spec in zip(self._outputs, self._specs, strict=True):
            nothing = torch.zeros((v._rows, *spec.shape), dtype=spec.dtype, device=v._type.device)
            v.push(mine.get(number, nothing))

    def _set(self, values: dict[int, Tensor], i: int, result: object) -> None:
        results = [result] if isinstance(result, Tensor) else list(result)
        values.update(zip(self._operations[i].results, results, strict=True))

    def _on_children(self, i: int) -> bool:
        o = self._operations[i]
        return o.op in ("children", "repeat") or any(self._symbols[r].kind == "child" for r in o.results)

    def _total(self, v: Vertex, values: Mapping[int, Tensor], message: int) -> Tensor:
        """A sum over children: the operations on rows of children, in a message of their own."""
        inside, wanted = [], [message]
        repeats: dict[int, int] = {}
        children = None
        seen = set()
        while wanted:
            s = wanted.pop()
            i = self._producers.get(s)
            if i is None or i in seen or s in self._shared:
                continue
            seen.add(i)
            o = self._operations[i]
            if o.op == "repeat":
                repeats[s] = o.reads()[0]
            elif o.op == "children":
                children = s
            elif self._symbols[s].kind == "child":
                inside.append(i)
                wanted += o.reads()

        def send(child: Tensor, *repeated: Tensor) -> Tensor:
            local = dict(values)
            if children is not None:
                local[children] = child
            local.update(zip(repeats, repeated, strict=True))
            for i in sorted(inside):
                self._set(local, i, _torch(self._calls[i], local, v._rows, len(child)))
            return local[message]

        return v.gather_sum(send, *(values[x] for x in repeats.values()))


def _spec(symbol: Symbol) -> Spec:
    return Spec(tuple(symbol.shape[1:]), getattr(torch, symbol.dtype))
