"""A call of vertex functions, from what is given to what runs it."""

from __future__ import annotations

import functools
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
from .checks import check_functions, check_inputs, device_of, inputs_by_name, state_dtype
from .compiler.compiler import compile_traces
from .graphs import Graphs
from .module_state import ModuleState
from .options import current
from .program import Program, Programs
from .runtime import batched, persistent, reference
from .runtime.call_cache import CallCache, Ready, RecentCall, Snapshot, modes
from .runtime.schedule import Kind, Planner, Schedule, check, planned, send_alone, used
from .trace.trace import Trace, trace
from .vertex import Spec, VertexType

__all__ = ["EXECUTORS", "Call", "compiled_of", "prepare", "ready", "run", "whole"]

EXECUTORS = ("auto", "batched", "reference", "persistent")
TRACES = 16
"""How many traces a module keeps, the latest."""
MAX_BUFFERS = 2000
"""Of a kernel on CUDA, as csrc/vertex/exec/cuda/frontier.jit.cuh has it."""


class Compiled:
    """What calls of a module leave for the next ones. No part of its state."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.traces: OrderedDict[object, tuple[Trace, ...]] = OrderedDict()
        self.program: Program | Programs | None = None
        self.script: Callable[[], object] | None = None
        self.calls = CallCache()


def compiled_of(module: nn.Module) -> Compiled:
    found = module.__dict__.get("_compiled")
    return module.__dict__.setdefault("_compiled", Compiled()) if found is None else found


def run(module: nn.Module, graphs: Graphs, inputs: object, executor: str) -> Sequence[Tensor]:
    """What a call pushes; refuse what it refuses."""
    found = _repeated(module, graphs, inputs, executor)
    if found is None:
        return _first(module, graphs, inputs, executor).run()
    recent, rows = found
    return recent.run(graphs, rows)


def ready(module: nn.Module, graphs: Graphs, inputs: object, executor: str) -> Ready:
    """Refuse what a call refuses. What comes back can run, and the module's program is its."""
    found = _repeated(module, graphs, inputs, executor)
    if found is None:
        return _first(module, graphs, inputs, executor)
    recent, rows = found
    return recent.ready(graphs, rows)


def _repeated(
    module: nn.Module, graphs: Graphs, inputs: object, executor: str
) -> tuple[RecentCall, dict[str, Tensor]] | None:
    """The recent call that this one repeats, whose program and script the module's are now, and the inputs."""
    compiled = compiled_of(module)
    found = compiled.calls.find(module, graphs, inputs, executor)
    if found is not None:
        recent = found[0]
        compiled.program, compiled.script = recent.program, recent.script and functools.partial(recent.script, graphs)
    return found


def _first(module: nn.Module, graphs: Graphs, inputs: object, executor: str) -> Ready:
    """A call that is like no recent one."""
    compiled, call = compiled_of(module), prepare(module, graphs, inputs, executor)
    compiled.program = call.program
    compiled.calls.add(call.recent(compiled.program))
    compiled.script = call.script and functools.partial(call.script, graphs)
    return call.ready


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
    script: Callable[[Graphs], object] | None = None
    """Makes what drives persistent kernels, None where it runs otherwise."""

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


def prepare(module: nn.Module, graphs: object, inputs: object, executor: object, parts: int | None = None) -> Call:
    """Check a call, trace what is new in it, and choose the executor. Nothing is computed.

    Persistent kernels whose groups have these parts of the processors, not those that are chosen, serve measurements.
    """
    name = type(module).__name__
    if executor not in EXECUTORS:
        raise ValueError(f"{name}: executor must be one of {', '.join(map(repr, EXECUTORS))}, got {executor!r}")
    if not isinstance(graphs, Graphs):
        raise TypeError(f"{name}: graphs must be a weft.Graphs, got {type(graphs).__name__}")
    rows = inputs_by_name(name, graphs, inputs)
    functions, types = module._functions()
    for f in functions:
        if not f._declares_vertex():
            f.vertex(None)
    before = Snapshot.of(module)  # what changes from here on is for the next call to look at
    state = ModuleState(module)
    device = device_of(name, graphs, rows, state.tensors)
    dtype = state_dtype(state.tensors, rows)
    specs = {key: Spec.of(x) for key, x in rows.items()}
    types_of = [VertexType(type(f).__name__, Spec(f.state_size, dtype), specs, device) for f in functions]
    traces = _traces(module, functions, types_of, rows, state)
    called = [reference.Function(f.vertex, t, s) for f, t, s in zip(functions, types_of, traces, strict=True)]
    check_inputs(name, graphs, rows, traces)
    check_functions(name, called, several=types is not None)
    kinds = tuple(Kind(t.slots_gathered, t.takes_all_children) for t in traces)
    kind_of = types if len(called) > 1 else None
    check(name, graphs, kinds, types)

    outputs = next(t.outputs for t in traces if t.outputs)

    def run() -> list[Tensor]:
        if graphs.num_vertices == 0:
            return _nothing(called, [*rows.values(), *state.tensors])
        return reference.run(called, _levels(graphs, kinds, kind_of, device), rows)

    planner = Planner(kinds, kind_of)
    plan = functools.partial(planner.plan, graphs)
    by_reference = Ready(device, outputs, rows, state.by_name, None, graphs, plan, run)
    if executor == "reference":
        return Call(called, "reference", executor, "asked for", by_reference)
    obstacle = next((t.obstacle for t in traces if t.obstacle), None) or _obstacle(called)
    compiled = None
    if obstacle is None:
        compiled, obstacle = _compiled_functions(called, rows, state.by_name)
    if obstacle is not None:
        return Call(called, "reference", executor, obstacle, by_reference)
    trains = by_reference.trains

    def measured(graphs: Graphs) -> tuned.Entry | None:
        return tuned.look_up(compiled.functions, trains, graphs)

    def fastest(graphs: Graphs) -> str:
        entry = measured(graphs)
        if entry is not None:
            return "persistent" if tuned.parts_of(entry.fastest) else entry.fastest
        return "persistent" if persistent.is_faster(compiled, graphs, device, trains) else "batched"

    reason, chosen, why = "compiled", "batched", None
    if executor == "auto":
        entry, expected = measured(graphs), persistent.expectation(compiled, graphs, device, trains)
        reason, chosen = str(entry or "; ".join(filter(None, (reason, expected)))), fastest(graphs)
        if chosen == "reference":
            return Call(called, "reference", executor, reason, by_reference)
    elif executor == "persistent":
        chosen = executor
    if chosen == "persistent" and (why := persistent.obstacle(compiled, device)) is not None:
        reason, chosen = f"{reason}; {why}", "batched"
    if graphs.num_vertices == 0:
        return Call(called, chosen, executor, reason, by_reference)

    def used_schedule(graphs: Graphs) -> Schedule:
        plan = functools.partial(planner.plan, graphs)
        if chosen == "persistent":
            return persistent.scripted(compiled, graphs, plan, device, parts)
        plain = plan()
        used(plain, send_alone)
        return plain

    def run_batched(graphs: Graphs, rows: Mapping[str, Tensor]) -> Sequence[Tensor]:
        vertices = None if kind_of is None else functools.partial(_vertices, graphs, kinds, kind_of, device)
        levels = functools.partial(_levels, graphs, kinds, kind_of, device)
        return batched.run(compiled, used_schedule(graphs), levels, vertices, rows, tensors)

    def compiled_ready(graphs: Graphs, rows: Mapping[str, Tensor]) -> Ready:
        run, plain = functools.partial(run_batched, graphs, rows), functools.partial(planner.plan, graphs)
        return Ready(device, outputs, rows, tensors, compiled, graphs, plain, run)

    def script_of(graphs: Graphs) -> persistent.Script:
        return persistent.Script(compiled.program, functools.partial(used_schedule, graphs))

    script = script_of if chosen == "persistent" else None

    fitting = planner if kind_of is types else Planner(kinds, types)

    def recent(program: Program | Programs) -> RecentCall | None:
        if before is None or in_transform():
            return None
        if not rows and not tensors:  # the graphs alone say where it runs
            return None

        def again(graphs: Graphs, asked: str) -> bool:
            if asked == "auto":
                wanted = fastest(graphs)
                if wanted != chosen and not (wanted == "persistent" and why is not None):
                    return False
            return fitting.fits(graphs)

        # A persistent kernel that cannot run runs batched.
        executors = (
            ("auto", "persistent") if executor == "persistent" or chosen == "persistent" else ("auto", "batched")
        )
        return RecentCall(before, rows, executors, device, again, run_batched, compiled_ready, script, program)

    tensors = state.by_name
    return Call(called, chosen, executor, reason, compiled_ready(graphs, rows), recent, script)


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
    functions: Sequence[reference.Function],
    rows: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    late: bool = True,
) -> tuple[batched.Batched | None, str | None]:
    """The functions of a graph compiled, or why not; once per traces, which are made together, and options."""
    options, type = current(), functions[0].type
    key = (options.lazy, options.fuse, late)
    kept = functions[0].trace.compiled
    found = kept.get(key)
    if found is None:

        def requires_grad(kind: str, name: str) -> bool:
            x = rows[name] if kind == "input" else tensors.get(name)
            return torch.is_grad_enabled() and x is not None and x.requires_grad

        dtype = str(type.state.dtype).removeprefix("torch.")
        traces = [f.trace for f in functions]
        try:
            plan = compile_traces(traces, requires_grad, type.state.shape, dtype, options.lazy, options.fuse, late)
            found = (batched.Batched.of(functions, plan), None)
            if type.device.type == "cuda" and plan.frontiers.most_buffers > MAX_BUFFERS:
                found = (None, f"a kernel of {plan.frontiers.most_buffers} buffers, at most {MAX_BUFFERS} are possible")
        except Unsupported as error:
            found = (None, f"the compiler does not know {error}")
        kept[key] = found
    return found


def whole(call: Ready) -> tuple[batched.Batched | None, str | None]:
    """A compiled call's functions with nothing left to torch after the frontiers, or why that cannot be."""
    if not any(part.after for part in call.compiled.plan.parts):
        return call.compiled, None
    return _compiled_functions(call.compiled.functions, call.rows, call.tensors, late=False)


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


@contextmanager
def _below_autograd() -> Iterator[None]:
    """Where operations are seen as autograd leaves them: in inference mode they come whole, as chunk or linear."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _traces(
    module: nn.Module,
    functions: Sequence[nn.Module],
    types: Sequence[VertexType],
    rows: Mapping[str, Tensor],
    state: ModuleState,
) -> tuple[Trace, ...]:
    requires = {key: x.requires_grad for key, x in rows.items()}
    anything = torch.is_grad_enabled() and (any(requires.values()) or any(t.requires_grad for t in state.tensors))
    sizes = {s for t in (*state.tensors, *rows.values()) for s in t.shape[t.dim() > 0 :] if isinstance(s, int)}
    sizes.update(s for t in state.tensors for s in t.shape)
    sizes.update(module.state_size)

    def make() -> tuple[Trace, ...]:
        with _nothing_fake_left(module), _below_autograd():
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
    compiled = compiled_of(module)
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
