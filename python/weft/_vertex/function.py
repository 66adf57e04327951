"""``weft.VertexFunction`` and ``weft.VertexFunctions``: a cell declared once, run over any batch of graphs."""

from __future__ import annotations

import functools
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import _C
from .._base.elementwise import Unsupported
from .._base.torch_private import GLOBAL_HOOKS, fake_tensors, in_forward_mode, in_transform
from . import tuned
from .compiler.compiler import compile_traces
from .graphs import Graphs
from .options import current
from .program import Program, Programs
from .runtime import batched, persistent, reference
from .runtime.call_cache import HOOKS, CallCache, Ready, RecentCall, Snapshot, modes
from .runtime.schedule import Kind, Schedule, check, fits, planned, used
from .trace.trace import Trace, trace
from .vertex import Spec, Vertex, VertexType

__all__ = ["EXECUTORS", "VertexFunction", "VertexFunctions"]

EXECUTORS = ("auto", "batched", "reference", "persistent")
TRACES = 16
"""How many traces a module keeps, the latest."""
MAX_BUFFERS = 2000
"""Of a kernel on CUDA, as csrc/vertex/exec/cuda/frontier.jit.cuh has it."""


class _Module(nn.Module):
    """What a function and several of them have in common."""

    state_size: tuple[int, ...]

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    @property
    def program(self) -> Program | Programs:
        """The program of the latest call; ``print`` it.

        One line per operation, with the shapes of its results and when it runs: before the frontiers (once for all
        vertices), in them, or after them. N is the number of vertices, E that of children. Where the call ran batched
        and something asks for gradients, the derived backward program follows.

        Raises:
            RuntimeError: the module was not called yet.
        """
        program = _compiled(self).program
        if program is None:
            raise RuntimeError(f"{type(self).__name__}: there is no program before the first call")
        return program

    @property
    def script(self) -> str:
        """What drove the persistent kernel in the latest call, a line per instruction.

        Raises:
            RuntimeError: the latest call did not run on the persistent executor, or there was none.
        """
        script = _compiled(self).script
        if script is None:
            raise RuntimeError(f"{type(self).__name__}: the latest call did not run on the persistent executor")
        return str(script)

    def _functions(self) -> tuple[list[VertexFunction], dict[str, int] | None]:
        """The functions, each once, and the number of that of each type, None where types do not count."""
        raise NotImplementedError

    def _run(self, graphs: Graphs, inputs: object, executor: str) -> Tensor | tuple[Tensor, ...]:
        outputs = ready(self, graphs, inputs, executor).run()
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class VertexFunction(_Module):
    """One cell of a net over graphs, to subclass: override :meth:`vertex`, not :meth:`forward`.

    >>> class TreeRNN(weft.VertexFunction):
    ...     def __init__(self, x, h):
    ...         super().__init__(state_size=h)
    ...         self.W, self.U = nn.Linear(x, h), nn.Linear(h, h, bias=False)
    ...     def vertex(self, v):
    ...         h = torch.tanh(self.W(v.pull()) + self.U(v.gather_sum()))
    ...         v.scatter(h)
    ...         v.push(h)

    Args:
        state_size: the shape of what one vertex scatters; an int s is short for ``(s,)``.

    Raises:
        ValueError: a size is negative.
        TypeError: `state_size` is neither an int nor a sequence of ints.

    Source: Cavs (Xu et al., USENIX ATC 2018), section 3.1.
    """

    def __init__(self, state_size: int | Sequence[int]):
        super().__init__()
        self.state_size = _state_size(state_size)

    def vertex(self, v: Vertex) -> None:
        """The cell, on N vertices together: who they are is not defined, so rows must not be mixed.

        ``v`` has :meth:`~weft.vertex.Vertex.pull`, :meth:`~weft.vertex.Vertex.gather`,
        :meth:`~weft.vertex.Vertex.gather_sum`, :meth:`~weft.vertex.Vertex.scatter` and
        :meth:`~weft.vertex.Vertex.push`. Everything else may be any operation of torch; a number in Python must not
        depend on a value.
        """
        raise NotImplementedError(f"{type(self).__name__}: vertex(self, v) is not implemented")

    def forward(
        self, graphs: Graphs, inputs: Tensor | Mapping[str, Tensor] | None = None, *, executor: str = "auto"
    ) -> Tensor | tuple[Tensor, ...]:
        """Evaluate the function at every vertex, children before parents.

        Args:
            graphs: a batch of graphs.
            inputs: what ``pull`` gives: tensors (num_vertices, ...) by name, (num_edges, ...) of what ``pull_edges``
                gives; a tensor is short for ``{"input": tensor}``.
            executor: ``"auto"``, ``"persistent"``, ``"batched"`` or ``"reference"``. What ``"persistent"`` cannot do
                runs as ``"batched"``, and what that cannot do as ``"reference"``; :func:`weft.explain` says why.

        Returns:
            What ``vertex`` pushes, (num_vertices, ...), row i of vertex i; a tuple where it pushes several times.

        Raises:
            TypeError: `graphs` is no :class:`weft.Graphs`, an input no tensor; what is scattered or pushed no tensor or
                of another dtype than the state.
            ValueError: an input is missing, superfluous, or has another number of rows; a child is in a slot that
                ``vertex`` does not gather; a shape of what is scattered or pushed is wrong; the executor is unknown.
            RuntimeError: a Python number in ``vertex`` depends on a value; it scatters twice, pushes nothing, gathers
                but does not scatter, or uses a tensor that requires grad and is not the module's; tensors are on
                different devices.
        """
        return _apart(self, graphs, inputs, executor)

    def _functions(self) -> tuple[list[VertexFunction], dict[str, int] | None]:
        return [self], None


class VertexFunctions(_Module, nn.ModuleDict):
    """Several vertex functions in one graph: each vertex runs the one that ``graphs.types`` names.

    Args:
        functions: by type; one function may stand under several names.

    Raises:
        ValueError: there is none, or their ``state_size`` differ.
        TypeError: a name is no str, or a value no :class:`VertexFunction`.
    """

    def __init__(self, functions: Mapping[str, VertexFunction]):
        if not isinstance(functions, Mapping):
            raise TypeError(f"VertexFunctions: functions must be a mapping, got {type(functions).__name__}")
        for name, function in functions.items():
            if not isinstance(name, str):
                raise TypeError(f"VertexFunctions: a name must be a str, got {type(name).__name__}")
            if not isinstance(function, VertexFunction):
                raise TypeError(f"VertexFunctions: {name!r} must be a VertexFunction, got {type(function).__name__}")
        if not functions:
            raise ValueError("VertexFunctions: there must be a function")
        sizes = {name: function.state_size for name, function in functions.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"VertexFunctions: all functions must have one state_size, got {sizes}")
        super().__init__(functions)

    @property
    def state_size(self) -> tuple[int, ...]:
        """The shape of what one vertex scatters."""
        return next(iter(self.values())).state_size

    def forward(
        self, graphs: Graphs, inputs: Tensor | Mapping[str, Tensor] | None = None, *, executor: str = "auto"
    ) -> Tensor | tuple[Tensor, ...]:
        """As :meth:`VertexFunction.forward`; `graphs` has types. Rows of vertices whose function pushes nothing are 0.

        Raises:
            ValueError: `graphs` has no types, or one without a function.
            RuntimeError: the functions push different numbers of tensors, shapes or dtypes, or none pushes.

        And what :meth:`VertexFunction.forward` raises.
        """
        return _apart(self, graphs, inputs, executor)

    def _functions(self) -> tuple[list[VertexFunction], dict[str, int] | None]:
        functions = list({id(f): f for f in self.values()}.values())
        numbers = {id(f): i for i, f in enumerate(functions)}
        return functions, {name: numbers[id(f)] for name, f in self.items()}


def _state_size(size: object) -> tuple[int, ...]:
    def whole(s: object) -> int:
        if isinstance(s, bool):
            raise TypeError
        return operator.index(s)

    try:
        if isinstance(size, (str, bytes)):
            raise TypeError
        found = tuple(map(whole, size)) if isinstance(size, Sequence) else (whole(size),)
    except TypeError:
        raise TypeError(f"VertexFunction: state_size must be an int or a sequence of ints, got {size!r}") from None
    if any(s < 0 for s in found):
        raise ValueError(f"VertexFunction: state_size must not be negative, got {size!r}")
    return found


def _apart(module: _Module, graphs: Graphs, inputs: object, executor: str) -> Tensor | tuple[Tensor, ...]:
    """The call, outside of the graphs of torch.compile."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
        return torch._dynamo.disable(_Module._run)(module, graphs, inputs, executor)
    return module._run(graphs, inputs, executor)


class _Compiled:
    """What calls of a module leave for the next ones. No part of its state."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.traces: OrderedDict[object, tuple[Trace, ...]] = OrderedDict()
        self.program: Program | Programs | None = None
        self.script: object = None
        self.calls = CallCache()


def _compiled(module: nn.Module) -> _Compiled:
    found = module.__dict__.get("_compiled")
    return module.__dict__.setdefault("_compiled", _Compiled()) if found is None else found


def ready(module: _Module, graphs: Graphs, inputs: object, executor: str) -> Ready:
    """Refuse what a call refuses. What comes back can run, and the module's program is its."""
    compiled = _compiled(module)
    found = compiled.calls.find(module, graphs, inputs, executor)
    if found is None:
        call = prepare(module, graphs, inputs, executor)
        compiled.program = call.program
        compiled.calls.add(call.recent(compiled.program))
        made = call.ready
    else:
        recent, rows = found
        compiled.program = recent.program
        made = recent.ready(graphs, rows)
    compiled.script = made.script
    return made


@dataclass
class Call:
    """A call that passed all checks and can run."""

    functions: list[reference.Function]
    executor: str
    asked: str
    reason: str
    ready: Ready
    recent: Callable[[Program | Programs], RecentCall | None] = lambda program: None
    """Makes what the next call like this one needs."""

    @property
    def compiled(self) -> batched.Batched | None:
        return self.ready.compiled

    @property
    def program(self) -> Program | Programs:
        programs = tuple(f.trace.program for f in self.functions)
        if self.compiled is not None and self.compiled.plan.backward:
            derived = self.compiled.plan.backward
            programs = tuple(replace(p, backward=b) for p, b in zip(programs, derived, strict=True))
        return programs[0] if len(programs) == 1 else Programs(programs)


def prepare(module: _Module, graphs: object, inputs: object, executor: object) -> Call:
    """Check a call, trace what is new in it, and choose the executor. Nothing is computed."""
    name = type(module).__name__
    if executor not in EXECUTORS:
        raise ValueError(f"{name}: executor must be one of {', '.join(map(repr, EXECUTORS))}, got {executor!r}")
    if not isinstance(graphs, Graphs):
        raise TypeError(f"{name}: graphs must be a weft.Graphs, got {type(graphs).__name__}")
    rows = _inputs(name, graphs, inputs)
    functions, types = module._functions()
    for f in functions:
        if type(f).vertex is VertexFunction.vertex and "vertex" not in f.__dict__:
            f.vertex(None)
    before = Snapshot.of(module)  # what changes from here on is for the next call to look at
    state = _ModuleState(module)
    device = _device(name, graphs, rows, state.tensors)
    dtype = _state_dtype(state.tensors, rows)
    specs = {key: Spec.of(x) for key, x in rows.items()}
    types_of = [VertexType(type(f).__name__, Spec(f.state_size, dtype), specs, device) for f in functions]
    traces = _traces(module, functions, types_of, rows, state)
    called = [reference.Function(f.vertex, t, s) for f, t, s in zip(functions, types_of, traces, strict=True)]
    _check_inputs(name, graphs, rows, traces)
    _check_functions(name, called, several=types is not None)
    kinds = tuple(Kind(t.slots_gathered, t.takes_all_children) for t in traces)
    kind_of = types if len(called) > 1 else None
    check(name, graphs, kinds, types)

    outputs = next(t.outputs for t in traces if t.outputs)

    def run() -> list[Tensor]:
        if graphs.num_vertices == 0:
            return _nothing(called, [*rows.values(), *state.tensors])
        return reference.run(called, _levels(graphs, kinds, kind_of, device), rows)

    def schedule(graphs: Graphs) -> Schedule:
        return planned(graphs, kinds, kind_of)

    by_reference = Ready(device, outputs, rows, state.by_name, None, functools.partial(schedule, graphs), run)
    if executor == "reference":
        return Call(called, "reference", executor, "asked for", by_reference)
    obstacle = next((t.obstacle for t in traces if t.obstacle), None) or _obstacle(called)
    compiled = None
    if obstacle is None:
        compiled, obstacle = _compiled_functions(called, rows, state)
    if obstacle is not None:
        return Call(called, "reference", executor, obstacle, by_reference)
    trains = by_reference.trains

    def measured(graphs: Graphs) -> tuned.Entry | None:
        return tuned.look_up(compiled.functions, trains, graphs)

    def fastest(graphs: Graphs) -> str:
        return "persistent" if persistent.is_faster(compiled, graphs, device) else "batched"

    reason, chosen, why = "compiled", "batched", None
    if executor == "auto" and (entry := measured(graphs)) is not None:
        reason, chosen = str(entry), entry.fastest
        if chosen == "reference":
            return Call(called, "reference", executor, reason, by_reference)
    elif executor == "auto":
        chosen = fastest(graphs)
    elif executor == "persistent":
        chosen = executor
    if chosen == "persistent" and (why := persistent.obstacle(compiled, device)) is not None:
        reason, chosen = f"{reason}; {why}", "batched"
    if graphs.num_vertices == 0:
        return Call(called, chosen, executor, reason, by_reference)

    def used_schedule(graphs: Graphs) -> Schedule:
        plain = schedule(graphs)
        return persistent.scripted(compiled, plain, device) if chosen == "persistent" else plain

    def run_batched(graphs: Graphs, rows: Mapping[str, Tensor]) -> list[Tensor]:
        used(kinds, kind_of)
        vertices = None if kind_of is None else functools.partial(_vertices, graphs, kinds, kind_of, device)
        levels = functools.partial(_levels, graphs, kinds, kind_of, device)
        return batched.run(compiled, used_schedule(graphs), levels, vertices, rows, tensors)

    def compiled_ready(graphs: Graphs, rows: Mapping[str, Tensor]) -> Ready:
        run, plain = functools.partial(run_batched, graphs, rows), functools.partial(schedule, graphs)
        script = None
        if chosen == "persistent":
            script = persistent.Script(compiled.program, functools.partial(used_schedule, graphs))
        return Ready(device, outputs, rows, tensors, compiled, plain, run, script)

    def recent(program: Program | Programs) -> RecentCall | None:
        if before is None or in_transform():
            return None
        if not rows and not tensors:  # the graphs alone say where it runs
            return None

        def again(graphs: Graphs, asked: str) -> bool:
            if asked == "auto":
                entry = measured(graphs)
                wanted = fastest(graphs) if entry is None else entry.fastest
                if wanted != chosen and not (wanted == "persistent" and why is not None):
                    return False
            return fits(graphs, kinds, types)

        # A persistent kernel that cannot run runs batched.
        executors = (
            ("auto", "persistent") if executor == "persistent" or chosen == "persistent" else ("auto", "batched")
        )
        return RecentCall(before, rows, executors, device, again, compiled_ready, program)

    tensors = state.by_name
    return Call(called, chosen, executor, reason, compiled_ready(graphs, rows), recent)


def _obstacle(functions: Sequence[reference.Function]) -> str | None:
    """Why functions whose traces are complete do not run batched here."""
    if in_forward_mode():
        return "forward-mode AD runs"
    device = functions[0].type.device.type
    if device not in ("cpu", "cuda"):
        return f"there are no kernels for {device}"
    if device == "cuda":
        unavailable = _C.jit.why_unavailable() if _C.with_cuda else "Weft was built without CUDA"
        if unavailable is not None:
            return unavailable
    dtype = functions[0].type.state.dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"the state is {dtype}"
    return None


def _compiled_functions(
    functions: Sequence[reference.Function], rows: Mapping[str, Tensor], state: _ModuleState
) -> tuple[batched.Batched | None, str | None]:
    """The functions of a graph compiled, or why not; once per traces, which are made together, and options."""
    options, type = current(), functions[0].type
    key = (options.lazy, options.fuse)
    kept = functions[0].trace.compiled
    found = kept.get(key)
    if found is None:

        def requires_grad(kind: str, name: str) -> bool:
            x = rows[name] if kind == "input" else state.by_name.get(name)
            return torch.is_grad_enabled() and x is not None and x.requires_grad

        dtype = str(type.state.dtype).removeprefix("torch.")
        traces = [f.trace for f in functions]
        try:
            plan = compile_traces(traces, requires_grad, type.state.shape, dtype, options.lazy, options.fuse)
            found = (batched.Batched.of(functions, plan), None)
            if type.device.type == "cuda" and plan.frontiers.most_buffers > MAX_BUFFERS:
                found = (None, f"a kernel of {plan.frontiers.most_buffers} buffers, at most {MAX_BUFFERS} are possible")
        except Unsupported as error:
            found = (None, f"the compiler does not know {error}")
        kept[key] = found
    return found


def _inputs(name: str, graphs: Graphs, inputs: object) -> dict[str, Tensor]:
    if inputs is None:
        return {}
    found = {"input": inputs} if not isinstance(inputs, Mapping) else dict(inputs)
    for key, x in found.items():
        what = f"input {key!r}" if isinstance(inputs, Mapping) else "inputs"
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {what} must be a tensor, got {type(x).__name__}")
        # Which inputs have a row per edge, the trace will say.
        if x.dim() == 0 or x.shape[0] not in (graphs.num_vertices, graphs.num_edges):
            raise _other_rows(name, key, x, "vertex", graphs.num_vertices)
    return found


def _other_rows(name: str, key: str, x: Tensor, row: str, rows: int) -> ValueError:
    count = "none" if x.dim() == 0 else x.shape[0]
    return ValueError(f"{name}: input {key!r} must have one row per {row}, {rows} rows, got {count}")


# Of a module's __dict__, what is not an attribute of its own.
_INTERNALS = frozenset({*nn.Module().__dict__, "_compiled"}) - {"training"}


class _Same:
    """An object by identity, kept alive so that no other one can take its place."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _ModuleState:
    """All that counts of a module and its submodules at a call.

    Attributes:
        key: hashable; a trace is good for all states with the same key.
        tensors: parameters and buffers.
        names: names of these and of the plain attributes that are tensors, by ``id``.
        by_name: the same the other way round.
    """

    def __init__(self, module: nn.Module):
        self.tensors: list[Tensor] = []
        self.names: dict[int, str] = {}
        self.by_name: dict[str, Tensor] = {}
        self._numbers: dict[int, int] = {}
        parts: list[object] = []
        seen: dict[int, int] = {}
        stack: list[tuple[str, nn.Module]] = [("", module)]
        while stack:
            prefix, m = stack.pop()
            parts.append(prefix)
            if id(m) in seen:
                parts.append(seen[id(m)])
                continue
            seen[id(m)] = len(seen)
            parts.append(type(m))
            for registered in (m._parameters, m._buffers):
                for key, t in registered.items():
                    if t is not None:
                        self.tensors.append(t)
                        parts.append(self._tensor(prefix + key, t))
                    else:
                        parts.append((key, None))
            for key, value in m.__dict__.items():
                if key not in _INTERNALS:
                    parts.append((key, self._attribute(prefix + key, value)))
            for key in HOOKS:
                hooks = m.__dict__[key]
                if hooks:
                    parts.append((key, tuple(hooks)))
            stack.extend((f"{prefix}{key}.", child) for key, child in m._modules.items() if child is not None)
        self.key = tuple(parts)

    def _tensor(self, name: str, t: Tensor) -> tuple:
        first = self._numbers.setdefault(id(t), len(self._numbers))
        self.by_name[self.names.setdefault(id(t), name)] = t
        return (name, first, type(t), t.shape, t.dtype, t.device, t.requires_grad)

    def _attribute(self, name: str, value: object) -> object:
        if value is None or isinstance(value, (bool, int, str)):
            return (type(value), value)
        if isinstance(value, float):
            return (float, value.hex())
        if isinstance(value, complex):
            return (complex, value.real.hex(), value.imag.hex())
        if isinstance(value, Tensor):
            # One that requires grad is nobody's parameter: the trace finds it under no name and refuses it.
            return ("requires grad", _Same(value)) if value.requires_grad else self._tensor(name, value)
        if isinstance(value, tuple):
            return (type(value), *(self._attribute(f"{name}.{i}", v) for i, v in enumerate(value)))
        return _Same(value)


def _device(name: str, graphs: Graphs, rows: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> torch.device:
    """The one device of all tensors; that of the graphs where there are none."""
    found: dict[torch.device, str] = {}
    for key, x in rows.items():
        found.setdefault(x.device, f"input {key!r}")
    for t in tensors:
        # torch lets a number on the CPU go with anything.
        if t.dim() > 0 or t.device.type != "cpu":
            found.setdefault(t.device, "the module")
    if graphs.device.type != "cpu" or not found:
        found.setdefault(graphs.device, "graphs")
    if len(found) > 1:
        where = ", ".join(f"{what} on {device}" for device, what in found.items())
        raise RuntimeError(f"{name}: tensors are on different devices: {where}")
    return next(iter(found))


def _state_dtype(tensors: Sequence[Tensor], rows: Mapping[str, Tensor]) -> torch.dtype:
    for candidates in (tensors, rows.values()):
        dtypes = [t.dtype for t in candidates if t.is_floating_point()]
        if dtypes:
            return functools.reduce(torch.promote_types, dtypes)
    return torch.get_default_dtype()


@contextmanager
def _nothing_fake_left(module: nn.Module) -> Iterator[None]:
    """What a trace puts into attributes and buffers, as old-style hooks do with weights, does not stay there."""
    FakeTensor = fake_tensors().FakeTensor
    kept = [(d, dict(d)) for m in module.modules() for d in (m.__dict__, m._parameters, m._buffers)]
    try:
        yield
    finally:
        for d, before in kept:
            for key in [key for key, value in d.items() if isinstance(value, FakeTensor)]:
                if key in before:
                    d[key] = before[key]
                else:
                    del d[key]


def _traces(
    module: _Module,
    functions: Sequence[VertexFunction],
    types: Sequence[VertexType],
    rows: Mapping[str, Tensor],
    state: _ModuleState,
) -> tuple[Trace, ...]:
    requires = {key: x.requires_grad for key, x in rows.items()}
    anything = torch.is_grad_enabled() and (any(requires.values()) or any(t.requires_grad for t in state.tensors))
    sizes = {s for t in (*state.tensors, *rows.values()) for s in t.shape[t.dim() > 0 :] if isinstance(s, int)}
    sizes.update(s for t in state.tensors for s in t.shape)
    sizes.update(module.state_size)

    def make() -> tuple[Trace, ...]:
        with _nothing_fake_left(module):
            # A list: a generator would make another error of a StopIteration.
            found = [
                trace(f.vertex, t, state.names, sorted(sizes), lambda key: anything if key is None else requires[key])
                for f, t in zip(functions, types, strict=True)
            ]
        return tuple(found)

    # Hooks of all modules come and go, those of torch's counters with every use of these.
    if in_transform() or any(GLOBAL_HOOKS):
        return make()
    key = (
        state.key,
        tuple((k, s.shape, s.dtype, requires[k]) for k, s in types[0].inputs.items()),
        tuple((t.state, t.device) for t in types),
        modes(types[0].device),
    )
    compiled = _compiled(module)
    with compiled.lock:
        found = compiled.traces.get(key)
        if found is not None:
            compiled.traces.move_to_end(key)
            return found
    found = make()
    with compiled.lock:
        compiled.traces[key] = found
        while len(compiled.traces) > TRACES:
            compiled.traces.popitem(last=False)
    return found


def _check_inputs(name: str, graphs: Graphs, rows: Mapping[str, Tensor], traces: Sequence[Trace]) -> None:
    pulled = frozenset().union(*(t.pulls for t in traces))
    of_edges = frozenset().union(*(t.pulls_edges for t in traces))
    for key, x in rows.items():
        if key not in pulled | of_edges:
            names = ", ".join(map(repr, sorted(pulled | of_edges))) or "none"
            raise ValueError(f"{name}: input {key!r} is superfluous; inputs pulled: {names}")
        if key in pulled and x.shape[0] != graphs.num_vertices:
            raise _other_rows(name, key, x, "vertex", graphs.num_vertices)
        if key in of_edges and x.shape[0] != graphs.num_edges:
            raise _other_rows(name, key, x, "edge", graphs.num_edges)
        if key in pulled & of_edges:
            raise ValueError(f"{name}: input {key!r} is pulled by one function for vertices, by another for edges")


def _check_functions(name: str, functions: Sequence[reference.Function], several: bool) -> None:
    for f in functions:
        if f.trace.gathers and not f.trace.scatters:
            raise RuntimeError(f"{f.type.name}: vertex gathers but does not scatter")
    pushing = [f for f in functions if f.trace.outputs]
    if not pushing:
        raise RuntimeError(f"{name}: {'no function pushes' if several else 'vertex pushes nothing'}")
    first = pushing[0]
    for f in pushing[1:]:
        if f.trace.outputs != first.trace.outputs:
            raise RuntimeError(
                f"{name}: all functions must push the same shapes and dtypes; {first.type.name} pushes "
                f"{_describe(first.trace.outputs)}, {f.type.name} {_describe(f.trace.outputs)}"
            )


def _describe(outputs: Sequence[Spec]) -> str:
    return ", ".join(f"{str(s.dtype).removeprefix('torch.')} {('N', *s.shape)}".replace("'", "") for s in outputs)


def _keep(graphs: Graphs, key: object, make: Callable[[], object]):
    """What was computed once from graphs, which do not change."""
    if in_transform():  # whose tensors do not outlive them
        return make()
    found = graphs._kept.get(key)
    if found is None:
        with torch.inference_mode(False):  # for later calls, of which some may train
            found = graphs._kept.setdefault(key, make())
    return found


def _vertices(
    graphs: Graphs, kinds: tuple[Kind, ...], kind_of: Mapping[str, int], device: torch.device
) -> list[Tensor]:
    """The vertices of each function, ascending."""
    key = ("vertices", kinds, tuple(kind_of.items()), device)
    found = _keep(graphs, key, lambda: planned(graphs, kinds, kind_of).vertices(device))
    reference.keep_until_read(found)
    return found


def _levels(
    graphs: Graphs, kinds: tuple[Kind, ...], kind_of: Mapping[str, int] | None, device: torch.device
) -> reference.Plan:
    """What the reference executor runs by."""

    def make() -> reference.Plan:
        if kind_of is None:
            return reference.Plan(graphs, None, device)
        which = torch.empty(graphs.num_vertices, dtype=torch.int64, device="cpu")
        for number, vertices in enumerate(planned(graphs, kinds, kind_of).vertices(which.device)):
            which[vertices] = number
        return reference.Plan(graphs, which, device)

    return _keep(graphs, ("levels", kinds, None if kind_of is None else tuple(kind_of.items()), device), make)


def _nothing(functions: Sequence[reference.Function], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs for no vertices, with a backward pass whose gradients are zero."""
    specs = next(f.trace.outputs for f in functions if f.trace.outputs)
    device = functions[0].type.device
    parts = [t.reshape(-1)[:0].sum().to(device) for t in tensors if t.is_floating_point()]
    anchor = sum(parts[1:], parts[0]) if parts else None

    def output(spec: Spec) -> Tensor:
        zeros = torch.zeros((0, *spec.shape), dtype=spec.dtype, device=device)
        return zeros if anchor is None or not spec.dtype.is_floating_point else zeros + anchor.to(spec.dtype)

    return [output(s) for s in specs]
