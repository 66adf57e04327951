"""The batched executor: a compiled vertex function run frontier by frontier, one call of an operator each way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from . import reference
from ._schedule import Schedule
from .compiler import Plan
from .vertex import Spec, Vertex, VertexType

__all__ = ["Batched", "run"]


@dataclass(frozen=True)
class Batched:
    """A compiled vertex function and what its operators take."""

    function: reference.Function
    plan: Plan
    program: Tensor
    """The encoded program, on the CPU."""
    constants: Tensor
    gradients: tuple[tuple[int, ...], ...] = field(default=())
    """Numbers of the inputs, matrices and vectors that backward gives gradients of."""

    @staticmethod
    def of(function: reference.Function, plan: Plan) -> Batched:
        compiled = plan.frontiers
        with torch.inference_mode(False):
            program = torch.tensor(compiled.code, dtype=torch.int64)
            constants = torch.tensor(compiled.constants, dtype=torch.float64)
        gradients = (
            tuple(sorted({b.index for b in compiled.buffers if b.space == "input_grad"})),
            tuple(sorted({g[0] for g in compiled.matrix_gradients})),
            tuple(sorted({g[0] for g in compiled.vector_gradients})),
        )
        return Batched(function, plan, program, constants, gradients)


def run(
    compiled: Batched,
    schedule: Schedule,
    levels: Callable[[], reference.Plan],
    inputs: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> list[Tensor]:
    """The pushed tensors, row i of vertex i.

    Args:
        compiled: the function.
        schedule: of the graphs.
        levels: makes the plan of the reference, for second derivatives.
        inputs: what is pulled.
        tensors: of the module, by name.
    """
    plan, trace = compiled.plan, compiled.function.trace
    device = compiled.function.type.device
    symbols, operations = trace.program.symbols, trace.program.operations
    rows = schedule.core.num_vertices
    values = _Values(symbols, trace.constants, tensors)

    def replay(numbers: Sequence[int]) -> None:
        for i in numbers:
            o, call = operations[i], trace.calls[i]
            if o.op == "pull":
                values[o.results[0]] = inputs[call.args[0]]
                continue
            result = _torch(call, values, rows)
            results = [result] if isinstance(result, Tensor) else list(result)
            for symbol, value in zip(o.results, results, strict=True):
                values[symbol] = value

    with torch.autocast(device.type, enabled=False):
        replay(plan.before)
        flat = [_matrix(values[s], rows) for s in plan.inputs]
        given = [*flat, *(values[s] for s in plan.matrices), *(values[s] for s in plan.vectors)]
        outputs = _Frontiers.apply(_Context(compiled, schedule, levels), *given)
        for symbol, output in zip(plan.outputs, outputs, strict=True):
            values[symbol] = output.view(rows, *symbols[symbol].shape[1:])
        replay(plan.after)
    return _own([values[s] for s in plan.pushes], [*inputs.values(), *tensors.values(), *trace.constants])


def _torch(call, values: Mapping[int, Tensor], rows: int):
    """An operation as torch runs it; one in place on a copy, because others may still read its argument."""
    if not call.function._schema.is_mutable:
        return call(values, rows)
    changed = call.args[0].symbol
    return call(_Over(values, changed, values[changed].clone()), rows)


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


def _own(outputs: list[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that share no memory with each other or with anything else."""
    seen = {t.untyped_storage()._cdata for t in others}
    result = []
    for x in outputs:
        storage = x.untyped_storage()._cdata
        result.append(x.clone() if storage in seen or x._is_view() else x)
        seen.add(storage)
    return result


@dataclass(frozen=True)
class _Context:
    compiled: Batched
    schedule: Schedule
    levels: Callable[[], reference.Plan]

    @property
    def device(self) -> torch.device:
        return self.compiled.function.type.device

    def arguments(self) -> tuple:
        schedule, compiled = self.schedule, self.compiled
        return (
            schedule.block(self.device),
            schedule.block(),
            compiled.program,
            compiled.constants,
            compiled.function.type.state.dtype,
        )

    def split(self, given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        plan = self.compiled.plan
        a = len(plan.inputs)
        b = a + len(plan.matrices)
        return list(given[:a]), list(given[a:b]), list(given[b:])


class _Frontiers(torch.autograd.Function):
    """The frontiers as one node of autograd's graph."""

    @staticmethod
    def forward(ctx, context: _Context, *given: Tensor) -> tuple[Tensor, ...]:
        inputs, matrices, vectors = context.split(given)
        results = torch.ops.weft.vertex_frontiers(inputs, matrices, vectors, *context.arguments())
        count = len(context.compiled.plan.outputs)
        ctx.context = context
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*given, *results[count:])
        return tuple(results[:count])

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        context, saved = ctx.context, ctx.saved_tensors
        count = len(ctx.needs_input_grad) - 1
        given = saved[:count]
        if torch.is_grad_enabled():
            return (None, *_differentiable(context, given, grads, ctx.needs_input_grad[1:]))
        lists = context.split(given)
        found = torch.ops.weft.vertex_frontiers_backward(
            [g.contiguous() for g in grads], *lists, list(saved[count:]), *context.arguments()
        )
        results: list[Tensor | None] = [None] * count
        arrived = iter(found)
        first = 0
        for numbers, of_kind in zip(context.compiled.gradients, lists, strict=True):
            for number in numbers:
                results[first + number] = next(arrived).view(of_kind[number].shape)
            first += len(of_kind)
        return (None, *(r if needed else None for r, needed in zip(results, ctx.needs_input_grad[1:], strict=True)))


def _differentiable(context: _Context, given, grads, needed) -> list[Tensor | None]:
    """The gradients as functions that have gradients: the frontiers again, level by level in torch."""
    asked = [x for x, n in zip(given, needed, strict=True) if n]
    with torch.enable_grad():
        outputs = _replayed(context, given)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], asked, [g for _, g in pairs], create_graph=True, allow_unused=True
            )
            if pairs
            else [None] * len(asked)
        )
    return [next(found) if n else None for n in needed]


def _replayed(context: _Context, given: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of the frontiers by the reference executor, from their inputs, matrices and vectors."""
    compiled = context.compiled
    plan, trace = compiled.plan, compiled.function.trace
    symbols, operations = trace.program.symbols, trace.program.operations
    inputs, matrices, vectors = context.split(given)
    names = {f"%{s}": x for s, x in zip(plan.inputs, inputs, strict=True)}
    shared = dict(zip((*plan.matrices, *plan.vectors), (*matrices, *vectors), strict=True))

    def vertex(v: Vertex) -> None:
        values: dict[int, Tensor] = dict(shared)
        for s in plan.inputs:
            values[s] = v.pull(f"%{s}").view(-1, *symbols[s].shape[1:])

        def run(numbers: Sequence[int]) -> None:
            for i in numbers:
                step(i)

        def step(i: int) -> None:
            o, call = operations[i], trace.calls[i]
            if any(r in values for r in o.results):
                return
            if o.op == "gather":
                result = v.gather(call.args[0])
            elif o.op == "sum":
                result = total(o.reads()[0])
            else:
                result = _torch(call, values, v._rows)
            results = [result] if isinstance(result, Tensor) else list(result)
            values.update(zip(o.results, results, strict=True))

        def total(message: int) -> Tensor:
            """A sum over children: the operations on rows of children, in a message of their own."""
            inside, wanted = [], [message]
            repeats: dict[int, int] = {}
            children = None
            producers = {r: i for i in plan.replayed for r in operations[i].results}
            seen = set()
            while wanted:
                s = wanted.pop()
                i = producers.get(s)
                if i is None or i in seen or s in shared:
                    continue
                seen.add(i)
                if operations[i].op == "repeat":
                    repeats[s] = operations[i].reads()[0]
                elif operations[i].op == "children":
                    children = s
                elif symbols[s].kind == "child":
                    inside.append(i)
                    wanted += operations[i].reads()

            def send(child: Tensor, *repeated: Tensor) -> Tensor:
                local = dict(values)
                if children is not None:
                    local[children] = child
                local.update(zip(repeats, repeated, strict=True))
                for i in sorted(inside):
                    result = _torch(trace.calls[i], local, v._rows)
                    local.update(
                        zip(operations[i].results, [result] if isinstance(result, Tensor) else result, strict=True)
                    )
                return local[message]

            return v.gather_sum(send, *(values[x] for x in repeats.values()))

        run([i for i in plan.replayed if not _on_children(i)])
        if plan.scattered is not None:
            v.scatter(values[plan.scattered])
        for s in plan.outputs:
            v.push(values[s])

    def _on_children(i: int) -> bool:
        o = operations[i]
        return o.op in ("children", "repeat") or any(symbols[r].kind == "child" for r in o.results)

    specs = tuple(_spec(symbols[s]) for s in plan.outputs)
    sums = tuple(_spec(symbols[operations[i].results[0]]) for i in plan.replayed if operations[i].op == "sum")
    type = VertexType(
        compiled.function.type.name,
        compiled.function.type.state,
        {name: Spec.of(x) for name, x in names.items()},
        context.device,
    )
    shown = SimpleNamespace(outputs=specs, sums=sums, pulls=frozenset(names), in_place=False)
    function = reference.Function(vertex, type, shown)
    with torch.autocast(context.device.type, enabled=False):
        outputs = reference.run([function], context.levels(), names)
    return [o.reshape(len(o), -1) for o in outputs]


def _spec(symbol) -> Spec:
    return Spec(tuple(symbol.shape[1:]), getattr(torch, symbol.dtype))
