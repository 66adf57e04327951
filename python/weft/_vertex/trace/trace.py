"""Tracing: a vertex function evaluated once on fake tensors, or on one row of zeros where these do not do.

It finds what the function pulls, gathers, scatters and pushes, refuses what the contract refuses before anything is
computed, and records the program. Everything in it is local to the thread.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._base.torch_private import (
    FAKE_TENSORS,
    GLOBAL_HOOKS,
    TorchDispatchMode,
    fake_tensors,
    in_transform,
    tree_leaves,
    uncached_parametrizations,
    without_forward_mode,
    without_modes,
)
from ..program import Constant, Operation, Program, Ref, Symbol, classify
from ..vertex import VALUES_AS_NUMBERS, Spec, Vertex, VertexType

__all__ = ["Trace", "trace"]


ROWS, CHILDREN = object(), object()
"""Among the arguments of a call: the number of vertices, and that of their children."""


@dataclass(frozen=True)
class Call:
    """An operation of torch; arguments are values, :class:`Ref` for a symbol, ROWS or CHILDREN.

    Without a function it is a method of v.
    """

    function: Callable | None
    args: tuple
    kwargs: dict[str, object]
    changes: bool = False
    """Whether it changes its first argument in place."""

    def __call__(self, values: Mapping[int, Tensor], rows: int, children: int | None = None):
        args = [_filled(a, values, rows, children) for a in self.args]
        return self.function(*args, **{name: _filled(a, values, rows, children) for name, a in self.kwargs.items()})


def _filled(a: object, values: Mapping[int, Tensor], rows: int, children: int | None) -> object:
    """An argument of a call. No closure that calls itself: it would keep the values until cycles are collected."""
    if isinstance(a, Ref):
        return values[a.symbol]
    if isinstance(a, (list, tuple)):
        return type(a)(_filled(x, values, rows, children) for x in a)
    return rows if a is ROWS else children if a is CHILDREN else a


@dataclass(frozen=True)
class Trace:
    """What one evaluation of a vertex function showed."""

    program: Program
    slots: int
    """One more than the highest slot that it gathers, 0 without."""
    gathers: bool
    sums: tuple[Spec, ...]
    """A row of each gather_sum, in order."""
    takes_all_children: bool
    """Whether it calls gather_sum."""
    pulls: frozenset[str]
    pulls_edges: frozenset[str]
    """Inputs with a row per edge."""
    scatters: bool
    outputs: tuple[Spec, ...]
    in_place: bool
    """Whether it may change values in place."""
    obstacle: str | None
    """Why it cannot be compiled."""
    constants: tuple[Tensor, ...] = field(repr=False)
    """The tensors that are neither rows nor the module's, as :attr:`Program.symbols` of kind ``constant`` in order."""
    calls: tuple[Call, ...] = field(repr=False)
    """How each operation of the program is run by torch."""
    slots_gathered: tuple[int, ...]
    compiled: dict[object, object] = field(default_factory=dict, repr=False, compare=False)
    """What executors made of it."""


def trace(
    vertex: Callable[[Vertex], object],
    type: VertexType,
    own_tensors: Mapping[int, str],
    sizes: Sequence[int],
    requires_grad: Callable[[str | None], bool],
) -> Trace:
    """Evaluate a vertex function without computing anything that counts.

    Args:
        vertex: the function.
        type: names, shapes and dtypes.
        own_tensors: the names of the module's own tensors, by ``id``.
        sizes: sizes that the number of vertices shall not be confused with.
        requires_grad: of the input of a name, or of the state for None.

    Raises:
        What the contract refuses, and what the user's code raises.
    """
    if in_transform():
        return _probe(vertex, type, "torch.func runs")
    rows = _row_counts(sizes)
    try:
        first, second = (_fake(vertex, type, own_tensors, requires_grad, n, e) for n, e in (rows[:2], rows[2:]))
    except _Refused as refused:
        raise refused.error from None
    except _Failed as failed:
        why = f"its vertex function does not run on fake tensors ({_line(failed.error)})"
        return _probe(vertex, type, why, failed.inputs)
    obstacle = first.obstacle
    if obstacle is None and first.program != second.program:
        obstacle = "its vertex function depends on the number of vertices"
    return replace(first, obstacle=obstacle)


class _Refused(Exception):
    """An error of the contract, not of the user's code."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error


class _Failed(Exception):
    """An error of the user's code, and the inputs that the operation read which raised it."""

    def __init__(self, error: Exception, inputs: Sequence[str]):
        super().__init__()
        self.error, self.inputs = error, inputs


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _row_counts(taken: Sequence[int]) -> tuple[int, ...]:
    """Two pairs of numbers of vertices and children: primes that are no size of anything, nor of equal parts of it."""
    used, found, p = {size for size in taken if size}, [], 61
    while len(found) < 4:
        if all(size % p for size in used) and all(p % q for q in range(2, int(p**0.5) + 1)):
            found.append(p)
        p += 1
    return tuple(found)


_aten = torch.ops.aten
_SHAPE_ALONE = {
    _aten.empty_like.default: _aten.empty.memory_format,
    _aten.new_empty.default: _aten.empty.memory_format,
    _aten.zeros_like.default: _aten.zeros.default,
    _aten.new_zeros.default: _aten.zeros.default,
    _aten.ones_like.default: _aten.ones.default,
    _aten.new_ones.default: _aten.ones.default,
}
"""Operations that look at a row's shape, not its values, and what gives the same without the row: a mask of dropout on
a state can be drawn before there is one."""


def _dropout(x: Tensor, p: float, train: bool | None):
    """As on the CPU: a mask that can be drawn before there is a value."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = _aten.bernoulli_.float(_aten.empty_like.default(x), 1 - p)
    return x * (mask / (1 - p) if p < 1 else mask), mask != 0


def _log_sigmoid(x: Tensor):
    """What torch keeps for its backward left open; on CUDA that has no row per vertex."""
    return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-x.abs())), torch.empty_like(x)


def _gru_cell(input_gates, hidden_gates, state, input_bias=None, hidden_bias=None):
    """torch's fused cell, what it keeps for its backward left open."""
    kept = state.new_empty((state.shape[0], 5 * state.shape[1]))
    ir, iz, i_n = (input_gates if input_bias is None else input_gates + input_bias).split(state.shape[1], 1)
    hr, hz, hn = (hidden_gates if hidden_bias is None else hidden_gates + hidden_bias).split(state.shape[1], 1)
    r, z = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
    n = torch.tanh(i_n + r * hn)
    return n + z * (state - n), kept


def _lstm_cell(input_gates, hidden_gates, state, input_bias=None, hidden_bias=None):
    """torch's fused cell, what it keeps for its backward left open."""
    kept = state.new_empty((state.shape[0], 4 * state.shape[1]))
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.split(state.shape[1], 1)
    c = torch.sigmoid(f) * state + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c, kept


_BOUND = {_aten.t.default: torch.t, _aten.addmm.default: torch.addmm, _aten.mm.default: torch.mm}
"""What a call of a layer before the frontiers runs, by functions whose arguments torch reads faster."""

_FUSED = {
    _aten.native_dropout.default: _dropout,
    _aten.log_sigmoid_forward.default: _log_sigmoid,
    _aten._thnn_fused_gru_cell.default: _gru_cell,
    _aten._thnn_fused_lstm_cell.default: _lstm_cell,
}
"""Operations that CUDA has alone, or has its own way, by others."""

_OWN = frozenset(("aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"))
"""Operations whose results may be changed as if they had memory of their own: that is what unsafe promises."""


class _Recorder(TorchDispatchMode):
    """Writes the program down: every operation below autograd on rows and on the module's tensors."""

    def __init__(
        self, type: VertexType, own_tensors: Mapping[int, str], rows: int, children: int, complete: bool = True
    ):
        super().__init__()
        self.type, self.own_tensors, self.rows, self.children = type, own_tensors, rows, children
        self.complete = complete
        """Whether it sees torch's operations, and not only the methods of v."""
        self.symbols: list[Symbol] = []
        self.operations: list[Operation] = []
        self.calls: list[Call] = []
        self.constants: list[Tensor] = []
        self.obstacle: str | None = None
        self.in_place = not complete
        self.refusal: Exception | None = None
        self.failed: list[Tensor] = []
        """What the operation read that raised."""
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._storages: dict[int, int] = {}
        self._unshared: set[int] = set()
        self._grad_mode = torch.is_grad_enabled()
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in here is no part of the program."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def record(
        self, op: str, arguments: Sequence[object], results: Sequence[Tensor], function=None, **keywords: object
    ) -> None:
        """One line of the program."""
        read = tuple(self._argument(a) for a in arguments)
        named = tuple((name, self._argument(a)) for name, a in keywords.items())
        operation = Operation(op, read, named, ())
        shared = op.startswith("aten.") and all(
            self.symbols[s].kind in ("parameter", "constant", "shared") for s in operation.reads()
        )
        written = tuple(self._define(r, op, shared, own=op in _OWN) for r in results)
        self.operations.append(Operation(op, read, named, written))
        reads = iter(operation.reads())
        template = tuple(self._template(a, reads) for a in arguments)
        keyword_template = {name: self._template(a, reads) for name, a in keywords.items()}
        changes = function is not None and function._schema.is_mutable
        self.calls.append(Call(_BOUND.get(function, function), template, keyword_template, changes))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._paused or func.namespace == "prim":
            return func(*args, **kwargs)
        if func in _FUSED:
            with self:
                return _FUSED[func](*args, **kwargs)
        if func is _aten._fused_rms_norm.default and args[3] is None:
            # That of what it sums in.
            args = (*args[:3], torch.finfo(torch.promote_types(args[0].dtype, torch.float32)).eps)
        foreign = [
            t
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor) and id(t) not in self._numbers and id(t) not in self.own_tensors
        ]
        if any(t.requires_grad for t in foreign) and func is not torch.ops.aten.detach.default:
            self.refusal = RuntimeError(
                f"{self.type.name}: vertex uses a tensor that requires grad and is neither an input nor a parameter of "
                "the module; register it, pull it or detach it"
            )
            raise self.refusal
        if self._grad_mode and not torch.is_grad_enabled():
            self.stop(f"an autograd.Function or no_grad in its vertex function, which runs {func}")
        changed = self._changed(func, args, kwargs)
        try:
            results = func(*args, **kwargs)
        except Exception:
            self.failed = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            raise
        tensors = [r for r in tree_leaves(results) if isinstance(r, Tensor)]
        if func._schema.is_mutable:
            self._mutate(func, changed)
        if func in _SHAPE_ALONE:
            like = {name: getattr(tensors[0], name) for name in ("dtype", "device")}
            fill = _SHAPE_ALONE[func]
            self.record(str(fill), [list(tensors[0].shape)], tensors, fill, **like)
        else:
            self.record(str(func), args, tensors, func, **kwargs)
        return results

    def _template(self, a: object, reads: Iterator[int]) -> object:
        """An argument with numbers of symbols for tensors."""
        if isinstance(a, Tensor):
            return Ref(next(reads))
        if isinstance(a, (list, tuple)):
            return [self._template(x, reads) for x in a]
        if isinstance(a, int) and not isinstance(a, bool):
            return ROWS if a == self.rows else CHILDREN if a == self.children else a
        return a

    def stop(self, obstacle: str) -> None:
        """It cannot be compiled."""
        self.obstacle = self.obstacle or obstacle

    def _changed(self, func, args, kwargs) -> list[Tensor]:
        """The tensors that an operation writes to."""
        if not func._schema.is_mutable:
            return []
        written = []
        for i, a in enumerate(func._schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                value = kwargs.get(a.name) if a.kwarg_only or i >= len(args) else args[i]
                written += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        return written

    def _mutate(self, func, changed: Sequence[Tensor]) -> None:
        self.in_place = True
        for t in changed:
            if id(t) not in self._numbers:
                self.stop(f"{func}, which changes a tensor of the module")
            elif id(t) not in self._unshared and self._storages[t.untyped_storage()._cdata] > 1:
                self.stop(f"{func}, which changes a view")

    def _define(self, value: Tensor, op: str, shared: bool, own: bool = False) -> int:
        if id(value) not in self._numbers:
            self._alive.append(value)
        if id(value) not in self._numbers and self.complete and not own:
            storage = value.untyped_storage()._cdata if value.layout == torch.strided else 0
            self._storages[storage] = self._storages.get(storage, 0) + 1
        if own:
            self._unshared.add(id(value))
        shape = self._shape(value)
        kind = "row" if shape[:1] == ("N",) else "child" if shape[:1] == ("E",) else "shared"
        if kind == "shared" and not shared:
            self.stop(f"{op}, whose result has no row per vertex")
        return self._symbol(value, Symbol(shape, _dtype(value), f"%{len(self.symbols)}", kind))

    def _symbol(self, value: Tensor, symbol: Symbol) -> int:
        self.symbols.append(symbol)
        self._numbers[id(value)] = len(self.symbols) - 1
        return len(self.symbols) - 1

    def _shape(self, value: Tensor) -> tuple[int | str, ...]:
        if not self.complete:
            return ("N", *value.shape[1:])
        return tuple(self._size(s) for s in value.shape)

    def _size(self, size: int) -> int | str:
        return {self.rows: "N", self.children: "E"}.get(size, size)

    def _argument(self, a: object):
        if isinstance(a, Tensor):
            if id(a) not in self._numbers:
                name = self.own_tensors.get(id(a))
                self._alive.append(a)
                if not self.complete:
                    self._define(a, "", shared=False)
                elif name is None:
                    name = f"constant{len(self.constants)}"
                    self.constants.append(a)
                    self._symbol(a, Symbol(tuple(a.shape), _dtype(a), name, "constant"))
                else:
                    self._symbol(a, Symbol(tuple(a.shape), _dtype(a), name, "parameter"))
            return Ref(self._numbers[id(a)])
        if isinstance(a, (list, tuple)):
            return tuple(map(self._argument, a))
        if isinstance(a, int) and not isinstance(a, bool):
            return Constant(str(self._size(a)))
        return Constant(_text(a) if isinstance(a, (torch.dtype, torch.layout)) else repr(a))


def _text(a: object) -> str:
    return str(a).removeprefix("torch.")


def _dtype(t: Tensor) -> str:
    return _text(t.dtype)


class _Traced(Vertex):
    """Rows of a fake or a real tensor, every method a line of the program."""

    def __init__(
        self,
        type: VertexType,
        recorder: _Recorder,
        empty: Callable[[int, Spec, bool], Tensor],
        requires_grad: Callable[[str | None], bool],
    ):
        super().__init__(type, recorder.rows)
        self._recorder, self._empty, self._requires_grad = recorder, empty, requires_grad
        self.slots, self.gathers, self.sums, self.takes_all_children = 0, False, [], False
        self.slots_gathered: set[int] = set()

    def _make(self, rows: int, spec: Spec, name: str | None) -> Tensor:
        with self._recorder.paused():
            return self._empty(rows, spec, self._requires_grad(name) and spec.dtype.is_floating_point)

    def _record(self, op: str, arguments: Sequence[object], results: Sequence[Tensor] = ()) -> None:
        self._recorder.record(op, arguments, results)

    def _pull(self, name: str) -> Tensor:
        value = self._make(self._rows, self._type.inputs[name], name)
        self._record("pull", [name], [value])
        return value

    def _pull_edges(self, name: str) -> Tensor:
        value = self._make(self._messages(), self._type.inputs[name], name)
        self._record("pull_edges", [name], [value])
        self._recorder.stop("pull_edges, whose rows of edges only the reference executor has")
        return value

    def _gather(self, k: int) -> Tensor:
        self.slots, self.gathers = max(self.slots, k + 1), True
        self.slots_gathered.add(k)
        value = self._make(self._rows, self._type.state, None)
        self._record("gather", [k], [value])
        return value

    def _children(self) -> Tensor:
        self.gathers = self.takes_all_children = True
        value = self._make(self._messages(), self._type.state, None)
        self._record("children", [], [value])
        return value

    def _messages(self) -> int:
        return self._recorder.children

    def _repeat(self, value: Tensor) -> Tensor:
        with self._recorder.paused():
            repeated = value[:1].expand(self._messages(), *value.shape[1:]).clone()
        self._record("repeat", [value], [repeated])
        return repeated

    def _sum(self, messages: Tensor) -> Tensor:
        with self._recorder.paused():
            total = messages[:1].expand(self._rows, *messages.shape[1:]).clone()
        self.sums.append(Spec.of(total))
        self._record("sum", [messages], [total])
        return total

    def _scatter(self, state: Tensor) -> Tensor:
        self._record("scatter", [state])
        return state

    def _push(self, output: Tensor) -> Tensor:
        self._record("push", [output])
        return output

    def named(self, values: Sequence[Tensor]) -> list[str]:
        """The inputs among these values."""
        pulled = {id(x): name for name, x in (*self._pulled.items(), *self._pulled_edges.items())}
        return [pulled[id(x)] for x in values if id(x) in pulled]

    def result(self, obstacle: str | None) -> Trace:
        """What was seen, the vertex function done."""
        recorder = self._recorder
        program = Program(self._type.name, tuple(recorder.symbols), classify(recorder.operations, lazy=True))
        return Trace(
            program,
            self.slots,
            self.gathers,
            tuple(self.sums),
            self.takes_all_children,
            frozenset(self._pulled),
            frozenset(self._pulled_edges),
            self.state is not None,
            tuple(map(Spec.of, self.outputs)),
            recorder.in_place,
            obstacle or recorder.obstacle,
            tuple(recorder.constants),
            tuple(recorder.calls),
            tuple(sorted(self.slots_gathered)),
        )


def _fake(vertex, type: VertexType, own_tensors, requires_grad, rows: int, children: int) -> Trace:
    fake = fake_tensors()
    recorder = _Recorder(type, own_tensors, rows, children)
    with ExitStack() as stack:
        stack.enter_context(_aside())
        stack.enter_context(without_modes())
        stack.enter_context(fake.FakeTensorMode(allow_non_fake_inputs=True))

        def empty(n: int, spec: Spec, grad: bool) -> Tensor:
            value = torch.empty((n, *spec.shape), dtype=spec.dtype, device=type.device)
            # A leaf that requires grad could not be changed in place.
            return value.requires_grad_().clone() if grad else value

        stack.enter_context(_NoNumbers(type.name, recorder.stop, fake=True))
        stack.enter_context(recorder)
        v = _Traced(type, recorder, empty, requires_grad)
        try:
            vertex(v)
        except fake.DataDependentOutputException as error:
            raise _Refused(RuntimeError(f"{type.name}: {VALUES_AS_NUMBERS} ({error.func})")) from None
        except Exception as error:
            if error is v.refusal or error is recorder.refusal:
                raise _Refused(error) from None
            raise _Failed(error, v.named(recorder.failed)) from error
    return v.result(None)


def _probe(vertex, type: VertexType, obstacle: str, inputs: Sequence[str] = ()) -> Trace:
    """One row of zeros, for what does not run on fake tensors, perhaps because of these inputs."""
    devices = [type.device] if type.device.type == "cuda" else []
    recorder = _Recorder(type, {}, 1, 1, complete=False)
    with torch.random.fork_rng(devices), _aside(), _NoNumbers(type.name, recorder.stop):

        def empty(n: int, spec: Spec, grad: bool) -> Tensor:
            return torch.zeros((n, *spec.shape), dtype=spec.dtype, device=type.device)

        v = _Traced(type, recorder, empty, lambda name: False)
        try:
            vertex(v)
        except RuntimeError as error:
            # torch's, of shapes that do not go together: of which input they are says nobody else.
            if not inputs or error is v.refusal or error.__class__ is not RuntimeError:
                raise
            shapes = ", ".join(
                f"input {name!r} has rows of shape {type.inputs[name].shape}, {type.inputs[name].dtype}"
                for name in inputs
            )
            raise RuntimeError(f"{type.name}: {shapes}, and vertex computes with them: {error}") from error
    return v.result(obstacle)


class _Quiet(threading.local):
    on = False


_quiet = _Quiet()
# torch logs what an operation raises on fake tensors, which here is the user's error or no error at all.
logging.getLogger(FAKE_TENSORS).addFilter(lambda record: not _quiet.on)


@contextmanager
def _aside() -> Iterator[None]:
    """Nothing of what runs in here is seen outside: no saved tensor by the caller's hooks, no cast of a parameter by
    autocast's cache, no line in a log."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    quiet, _quiet.on = _quiet.on, True
    try:
        with ExitStack() as stack:
            if not in_transform():  # which refuse these hooks
                kept = stack.enter_context(_Kept())
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack))
            stack.enter_context(without_forward_mode())
            stack.enter_context(uncached_parametrizations())
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        _quiet.on = quiet


class _Kept:
    """Tensors that autograd saves, for as long as the context lasts.

    Hooks that hand the tensor itself to autograd close a circle, the tensor holding its node and the node the tensor,
    which no collector of Python's sees: all that the node reaches, parameters among it, would live for ever.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def pack(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def unpack(self, number: int) -> Tensor:
        return self._tensors[number]

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors.clear()


def _notes_modules(func, args: Sequence[object]) -> bool:
    """Whether it is torch's tracker of modules, as of its counter of operations, whose hooks change nothing."""
    tracking = sys.modules.get("torch.utils.module_tracker")
    hook = args[1] if func is Tensor.register_hook and len(args) > 1 else None
    if tracking is None or getattr(hook, "__module__", None) != torch.autograd.graph.__name__:
        return False
    hooks = [hook for of_all in GLOBAL_HOOKS for hook in of_all.values()]
    return any(isinstance(getattr(hook, "__self__", None), tracking.ModuleTracker) for hook in hooks)


class _NoNumbers(TorchFunctionMode):
    """Refuses Python numbers out of tensors, but inside a user's autograd.Function what torch would do, and finds what
    only autograd sees.

    Args:
        name: of the vertex function's class.
        stop: told why it cannot be compiled.
        fake: whether a FakeTensorMode refuses what dispatches. What does not gives numbers of a module's tensors there,
            which a trace would keep.
    """

    _always = frozenset(
        getattr(Tensor, name) for name in ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__")
    )
    _outside = frozenset((Tensor.tolist, Tensor.numpy))

    _of_autograd = frozenset(
        (
            Tensor.detach_,
            torch.detach_,
            Tensor.register_hook,
            Tensor.retain_grad,
            Tensor.data.__get__,
            Tensor.data.__set__,
        )
    )
    """What changes gradients without an operation."""

    def __init__(self, name: str, stop: Callable[[str], None], fake: bool = False):
        super().__init__()
        self._name, self._stop, self._fake = name, stop, fake

    def __torch_function__(self, func, types, args=(), kwargs=None):
        refused = self._fake or torch.is_grad_enabled()
        if (func in self._always and not self._fake) or (func in self._outside and refused):
            raise RuntimeError(f"{self._name}: {VALUES_AS_NUMBERS} ({getattr(func, '__name__', func)})")
        if func in self._of_autograd and not _notes_modules(func, args):
            self._stop(f"{getattr(func, '__qualname__', func)}, which only autograd sees")
        return func(*args, **(kwargs or {}))
