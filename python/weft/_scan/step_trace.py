"""From a step in Python to instructions: it runs once on tensors without data, and what torch is asked for is written
down."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .._base.elementwise import BOOLEAN, ELEMENTWISE, NUMBERS, Unsupported
from .._base.torch_private import nn_functions, tree_leaves, without_torch_function, wrapper_tensor
from .step_program import Graph, Node

__all__ = ["Traced", "traced"]

Step = Callable[[Any, Any, Any], Any]
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OF_AUTOGRAD = frozenset((Tensor.detach_, torch.detach_, Tensor.register_hook, Tensor.retain_grad))
"""What changes gradients without an operation."""
_REQUIRES_GRAD = Tensor.requires_grad.__get__
_VIEWS = frozenset(("aten.alias.default", "aten.expand.default", "aten.detach.default"))
_SAME = frozenset(("aten.clone.default", "aten.alias.default", "aten.expand.default"))
_LOG_SIGMOID = "aten.log_sigmoid.default"
_TO_BOOL = frozenset(
    ("gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", "logical_xor", "isnan", "isinf")
)
_FILLS = {
    "aten.zeros_like": 0.0, "aten.new_zeros": 0.0,
    "aten.ones_like": 1.0, "aten.new_ones": 1.0,
    "aten.full_like": None, "aten.new_full": None,
}  # fmt: skip
"""By torch's name: what they fill a tensor with, None for what they are given."""
_FILL_ARGUMENT = {"aten.full_like": 1, "aten.new_full": 2}
_READS = ("aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.item.default", "aten.equal.default")
_READING = ("cannot be converted to Scalar", "is ambiguous", ".numpy() is not supported")
"""In torch's errors before it comes to one of these."""


@dataclass(frozen=True)
class Traced:
    """What one run of a step showed."""

    program: str | None
    """None where it cannot be compiled, although it may run."""
    obstacle: str | None
    foreign: tuple[Tensor, ...] = field(repr=False)
    """Tensors from elsewhere, parameters after the caller's."""


class _NotCompiled(Exception):
    """The step is allowed, but no program is made of it."""


class _Value(Tensor):
    """A tensor without data, whose operations are written down."""

    recorder: _Recorder
    node: Node | None
    shared: bool
    """Whether it is what the step was given, or shares memory with another value: not to be changed."""

    @staticmethod
    def __new__(cls, recorder: _Recorder, node: Node | None, shape: Sequence[int], dtype: torch.dtype, shared: bool):
        made = wrapper_tensor(cls, shape, dtype=dtype, device="cpu")
        made.recorder, made.node, made.shared = recorder, node, shared
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _OF_AUTOGRAD:
            recorder = args[0].recorder
            recorder._refuse(
                ValueError(f"{recorder.op}: step may run pointwise operations of torch only, it ran {func.__name__}")
            )
        if func == _REQUIRES_GRAD:  # who asks may do one of these if so
            return torch.is_grad_enabled() and args[0].is_floating_point()
        # torch imports its distributed tensors before the first operation that it dispatches to Python, which takes
        # seconds: what can be written down without a dispatch is.
        plain = (not kwargs or kwargs == {"inplace": False}) and isinstance(args[0], _Value)
        if plain and (result := args[0].recorder.plain(func, args)) is not None:
            return result
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        recorder = next(t.recorder for t in tree_leaves((args, kwargs)) if isinstance(t, _Value))
        return recorder.operation(func, args, kwargs or {})


class _Recorder:
    def __init__(self, op: str, graph: Graph, dtype: torch.dtype, shape: torch.Size):
        self.op, self.graph, self.dtype, self.shape = op, graph, dtype, shape
        self.foreign: list[Tensor] = []
        self.obstacle: str | None = None
        self.refusal: Exception | None = None
        self.guessed = False
        """Whether there is an operation whose dtype is not known here."""
        self._nodes: dict[int, Node] = {}

    def _made(self, name: str, tensors: Sequence[Tensor], node: Node | None, shape: Sequence[int], dtype: torch.dtype):
        """The result of an operation; a view and what it is of share memory."""
        view = name in _VIEWS
        if view and isinstance(tensors[0], _Value):
            tensors[0].shared = True
        return _Value(self, node, shape, dtype, view)

    def argument(self, node: Node, shape: Sequence[int]) -> Tensor:
        return _Value(self, node, shape, self.dtype, True)

    def node_of(self, tensor: Tensor) -> Node:
        """The expression of a tensor; one from elsewhere is a parameter, or a number."""
        if isinstance(tensor, _Value):
            if tensor.node is None:
                raise _NotCompiled(self.obstacle or "an operation without a name")
            return tensor.node
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        self._check_foreign(tensor)
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            return self.graph.constant(float(tensor))
        if tensor.dtype not in (*_FLOATING, torch.bool) or tensor.layout != torch.strided:
            raise _NotCompiled(f"a tensor from elsewhere of {tensor.dtype}")
        if len(_broadcast(tensor.shape, self.shape)) != len(self.shape):
            raise _NotCompiled(f"a tensor from elsewhere of shape {tuple(tensor.shape)}")
        self.foreign.append(tensor)
        self._nodes[id(tensor)] = self.graph.parameter()
        return self._nodes[id(tensor)]

    def operation(self, func, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = str(func)
        if name == "aten.log_sigmoid_forward.default":
            name = _LOG_SIGMOID
        if func.namespace == "prim":
            raise NotImplementedError(name)
        if name in _READS:
            self._refuse(RuntimeError(f"{self.op}: step reads a value ({name}); it runs on tensors without data"))
        family = name.rsplit(".", 1)[0]
        known = name in _SAME or name in ELEMENTWISE or family in _FILLS or name == "aten._to_copy.default"
        in_place = not known and func._schema.is_mutable and _out_of_place(name) in ELEMENTWISE
        if not (known or in_place or torch.Tag.pointwise in func.tags):
            self._refuse(ValueError(f"{self.op}: step may run pointwise operations of torch only, it ran {name}"))
        if func._schema.is_mutable and (not in_place or not isinstance(args[0], _Value) or args[0].shared):
            self._refuse(ValueError(f"{self.op}: step may not change what it is given or views, it ran {name}"))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for t in tensors:
            self._check_foreign(t)
        if not torch.is_grad_enabled():
            self._stop(f"an autograd.Function or no_grad, which runs {name}")
        shape, dtype = self._result(name, family, tensors, args, kwargs)
        node = None
        if self.obstacle is None:
            try:
                node = self._written(name, _out_of_place(name) if in_place else name, family, args, kwargs)
                if dtype not in self._dtypes(name):
                    raise _NotCompiled(f"{name} to {dtype}")
            except (_NotCompiled, Unsupported) as why:
                self._stop(str(why))
            except TypeError:
                self._stop(f"{name} with these arguments")
        if in_place:
            args[0].node = node
            return args[0]
        made = self._made(name, tensors, node, shape, dtype)
        # On the CPU there is something that torch keeps for the backward, empty on CUDA.
        return (made, made) if name == _LOG_SIGMOID else made

    def plain(self, func: Callable[..., Any], args: Sequence[Any]) -> Tensor | None:
        """The result of a function of torch on a step's values of its dtype and numbers; None where it is another
        function, or anything about it is not plain."""
        if func is Tensor.__rtruediv__:
            return args[0].reciprocal() * args[1]
        name, count = _FUNCTIONS.get(func, ("", 0))
        if len(args) != count or self.obstacle is not None or not torch.is_grad_enabled():
            return None
        first, *others = args
        keywords = {}
        if name == "aten._to_copy.default":
            if first.dtype != torch.bool or others[0] is not self.dtype:
                return None
            keywords, others = {"dtype": others.pop()}, []
        elif first.dtype != (torch.bool if name == "aten.where.self" else self.dtype):
            return None
        for other in others:
            if type(other) not in (int, float) and not (isinstance(other, _Value) and other.dtype == self.dtype):
                return None
        values = [a for a in (first, *others) if isinstance(a, _Value)]
        if name == "aten.where.self" and len(values) == 1:
            return None
        try:
            node = self._written(name, name, name.rsplit(".", 1)[0], (first, *others), keywords)
        except (_NotCompiled, Unsupported, TypeError):
            return None
        dtype = torch.bool if name.split(".")[1] in _TO_BOOL else self.dtype
        shape = functools.reduce(_broadcast, (v.shape for v in values))
        return self._made(name, values, node, shape, dtype)

    def _result(
        self, name: str, family: str, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[int], torch.dtype]:
        """Shape and dtype of a result, by torch's rules for pointwise operations."""
        like = tensors[0]
        if family in _FILLS or name == "aten._to_copy.default":
            shape = args[1] if family.startswith("aten.new_") else like.shape
            return shape, kwargs.get("dtype") or like.dtype
        if name == "aten.expand.default":
            size = [have if want == -1 else want for have, want in zip(_padded(like.shape, len(args[1])), args[1])]  # noqa: B905
            return size, like.dtype
        shape = functools.reduce(_broadcast, (t.shape for t in tensors))
        base = name.split(".")[1].removesuffix("_")
        if base in _TO_BOOL or name in BOOLEAN:
            return shape, torch.bool
        operands = tensors[1:] if base == "where" else tensors
        found = [t.dtype for t in operands if t.dim() > 0] or [t.dtype for t in operands]
        if any(t.dtype.is_floating_point for t in operands) and not any(d.is_floating_point for d in found):
            found.append(self.dtype)
        dtype = functools.reduce(torch.promote_types, found)
        if not dtype.is_floating_point and (
            name not in _SAME and base not in ("where", "detach", "maximum", "minimum")
        ):
            number = any(isinstance(a, float) for a in args)
            dtype = torch.get_default_dtype() if number or (dtype == torch.bool and name not in NUMBERS) else dtype
        return shape, dtype

    def _dtypes(self, name: str) -> tuple[torch.dtype, ...]:
        if name in BOOLEAN:
            return (torch.bool,)
        if name in NUMBERS:
            return (self.dtype,)
        if name == "aten._to_copy.default" or name.rsplit(".", 1)[0] in _FILLS or name in _SAME:
            return (*_FLOATING, torch.bool)
        return (self.dtype, torch.bool)

    def _written(self, name: str, op: str, family: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Node:
        if name in _SAME:
            return self.node_of(args[0])
        if family in _FILLS:
            value = _FILLS[family]
            if value is None:
                position = _FILL_ARGUMENT[family]
                value = args[position] if len(args) > position else kwargs["fill_value"]
            return self.graph.constant(float(value))
        if name == "aten._to_copy.default":
            source, target = args[0].dtype, kwargs.get("dtype") or args[0].dtype
            if target != self.dtype and not (target in _FLOATING and source == torch.bool):
                raise _NotCompiled(f"a cast from {source} to {target}")
            return self.node_of(args[0])
        if op not in ELEMENTWISE:
            self.guessed = True
            raise _NotCompiled(op)
        values = [self.node_of(a) if isinstance(a, Tensor) else a for a in args]
        keywords = {key: self.node_of(v) if isinstance(v, Tensor) else v for key, v in kwargs.items()}
        return ELEMENTWISE[op](self.graph, *values, **keywords)

    def _check_foreign(self, tensor: Tensor) -> None:
        if not isinstance(tensor, _Value) and tensor.requires_grad:
            self._refuse(
                RuntimeError(
                    f"{self.op}: step uses a tensor from elsewhere that requires grad; pass it in parameters, or "
                    "detach it outside of step"
                )
            )

    def _stop(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle

    def _refuse(self, error: Exception) -> None:
        self.refusal = error
        raise error


def _functions() -> dict[Callable[..., Any], tuple[str, int]]:
    """torch's functions and methods, operators among them, by what they run on values of one dtype, and how many
    arguments they then have."""
    found: dict[Callable[..., Any], tuple[str, int]] = {
        Tensor.__rsub__: ("aten.rsub.Tensor", 2),
        Tensor.__pow__: ("aten.pow.Tensor_Scalar", 2),
        Tensor.to: ("aten._to_copy.default", 2),
    }
    unary = (
        "tanh", "sigmoid", "exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "erf", "abs", "neg",
        "square", "reciprocal", "relu", "silu", "softplus", "gelu", "mish", "hardsigmoid", "log_sigmoid", "detach",
    )  # fmt: skip
    names = [(f"aten.{op}.default", 1) for op in unary]
    names += [(f"aten.{op}.Tensor", 2) for op in ("add", "sub", "mul", "div", "gt", "ge", "lt", "le", "eq", "ne")]
    names += [(f"aten.{op}.default", 2) for op in ("maximum", "minimum")]
    names += [("aten.where.self", 3), ("aten.lerp.Tensor", 3), ("aten.pow.Tensor_Scalar", 2)]
    for name, count in names:
        op = name.split(".")[1]
        for owner in (torch, Tensor, nn_functions, torch.nn.functional):
            if (function := getattr(owner, op, None)) is not None:
                found.setdefault(function, (name, count))
    return found


_FUNCTIONS = _functions()


def _padded(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(shape)) + tuple(shape)


def _broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """torch.broadcast_shapes, which takes long to import."""
    rank = max(len(a), len(b))
    found = []
    for m, n in zip(_padded(a, rank), _padded(b, rank), strict=True):
        if m != n and 1 not in (m, n):
            raise RuntimeError(f"shapes {tuple(a)} and {tuple(b)} do not broadcast")
        found.append(n if m == 1 else m)
    return tuple(found)


def _out_of_place(name: str) -> str:
    namespace, op, overload = name.split(".")
    return f"{namespace}.{op.removesuffix('_')}.{overload}"


def _trace(
    op: str, step: Step, states: int, inputs: int, single: tuple[bool, bool, bool], dtype: torch.dtype,
    shape: torch.Size, parameters: Sequence[torch.Size],
) -> Traced:  # fmt: skip
    graph = Graph(states, inputs)
    recorder = _Recorder(op, graph, dtype, shape)
    h = [recorder.argument(node, shape) for node in graph.states]
    x = [recorder.argument(node, shape) for node in graph.inputs]
    p = [recorder.argument(graph.parameter(), size) for size in parameters]
    given = [values[0] if alone else tuple(values) for values, alone in zip((h, x, p), single, strict=True)]
    drawn = torch.get_rng_state()
    try:
        with torch.enable_grad():
            returned = step(*given)
    except Exception as error:
        if recorder.refusal is not None:
            raise recorder.refusal from None
        if type(error) is RuntimeError and any(words in str(error) for words in _READING):
            raise RuntimeError(
                f"{op}: step reads a value, which differs from channel to channel; use torch.where ({error})"
            ) from None
        raise
    if recorder.refusal is not None:  # which the step has caught
        raise recorder.refusal
    if not torch.equal(drawn, torch.get_rng_state()):
        raise ValueError(f"{op}: step may run pointwise operations of torch only, it drew random numbers")
    results = check_returned(op, returned, states, single[0], None if recorder.guessed else dtype, shape)
    if recorder.obstacle is None:
        try:
            after = [recorder.node_of(t) for t in results]
        except _NotCompiled as why:
            recorder.obstacle = str(why)
    if recorder.obstacle is not None:
        return Traced(None, recorder.obstacle, ())
    return Traced(graph.text(after), None, tuple(recorder.foreign))


def check_returned(
    op: str, returned: Any, states: int, single: bool, dtype: torch.dtype | None, shape: torch.Size
) -> tuple[Tensor, ...]:
    """The states that a step returned, which must be as those that it got; of any dtype for None."""
    results = (returned,) if single else returned
    fits = isinstance(results, (tuple, list)) and len(results) == states and all(isinstance(t, Tensor) for t in results)
    if not fits:
        want = "a tensor" if single else f"a tuple of {states} tensors"
        got = type(returned).__name__
        if isinstance(returned, (tuple, list)):
            got += (
                f" of {', '.join('Tensor' if isinstance(t, Tensor) else type(t).__name__ for t in returned)}"
                if returned
                else " of nothing"
            )
        raise ValueError(f"{op}: step must return {want}, as init is, got {got}")
    for i, t in enumerate(results):
        what = "step's result" if single else f"step's result[{i}]"
        if t.shape != shape:
            raise ValueError(f"{op}: {what} must have the shape of init, {tuple(shape)}, got {tuple(t.shape)}")
        if dtype is not None and t.dtype != dtype:
            raise TypeError(f"{op}: {what} must be {dtype}, as what step gets, got {t.dtype}")
    return tuple(results)


# What a step depends on. ---------------------------------------------------------------------------------------------


class _Unknown(Exception):
    """It may depend on anything."""


_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device)
_MAX_PARTS = 512


class _Fingerprint:
    """All that a function's result may depend on beside its arguments: its code, what it closes over, the globals that
    it names, the attributes of its object. Equal fingerprints, the same program, while all lives that is known by its
    identity."""

    def __init__(self) -> None:
        self.known: list[weakref.ref] = []
        self._seen: dict[int, int] = {}
        self._held: list[object] = []  # so that no identity is used twice in one fingerprint

    def of(self, value: Any, names: frozenset[str] = frozenset()) -> object:
        if isinstance(value, _PLAIN):
            return (type(value), repr(value) if isinstance(value, (float, complex)) else value)
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        if len(self._seen) > _MAX_PARTS:
            raise _Unknown
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        if isinstance(value, Tensor):
            if value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad:
                return (value.dtype, float(value))
            self.known.append(weakref.ref(value))
            return (id(value), value.dtype, value.shape, value.device, value.requires_grad)
        if isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] in ("torch", "math", "numpy", "weft"):
                return id(value)
            return (id(value), *((n, self.of(vars(value)[n])) for n in sorted(names) if n in vars(value)))
        if isinstance(value, (type, BuiltinFunctionType)):
            return id(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return (self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, functools.partial):
            return (self.of(value.func), self.of(value.args), self.of(value.keywords))
        if isinstance(value, (tuple, list)):
            return (type(value), *(self.of(v) for v in value))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(self.of(v) for v in value))
        if isinstance(value, dict):
            return (type(value), *((self.of(k), self.of(v)) for k, v in value.items()))
        if type(value).__module__.startswith("torch.") and not isinstance(value, torch.nn.Module):
            return id(value)
        if not hasattr(value, "__dict__") or (
            hasattr(type(value), "__getattr__") and not isinstance(value, torch.nn.Module)
        ):
            raise _Unknown
        self.known.append(weakref.ref(value))
        return (
            type(value),
            id(value),
            self.of(vars(value)),
            self.of(type(value).__call__ if callable(value) else None),
        )

    def _function(self, function: FunctionType) -> object:
        if (function.__module__ or "").partition(".")[0] == "torch":
            return id(function)
        names = _names(function.__code__)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        outside = function.__globals__
        return (
            function.__code__,
            *(self.of(c, names) for c in cells),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            *((n, self.of(outside[n], names)) for n in sorted(names) if n in outside),
        )


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return frozenset(found)


_known: OrderedDict[object, tuple[Traced, list[weakref.ref]]] = OrderedDict()
_MAX_KNOWN = 256


def traced(
    op: str, step: Step, states: int, inputs: int, single: tuple[bool, bool, bool], dtype: torch.dtype,
    shape: torch.Size, parameters: Sequence[torch.Size],
) -> Traced:  # fmt: skip
    """The program of a step, from the last trace where nothing has changed that it may depend on.

    Args:
        op: for errors.
        step: of :func:`weft.scan.pointwise_scan`.
        states, inputs: how many there are.
        single: whether the state, the inputs, the parameters are given as one tensor each.
        dtype: that it computes in.
        shape: of a state.
        parameters: their shapes.

    Raises:
        What the contract refuses, and what the step raises.
    """
    found = _Fingerprint()
    try:
        key = (found.of(step), states, inputs, single, dtype, shape, tuple(parameters), torch.get_default_dtype())
        hash(key)
    except (_Unknown, TypeError, ValueError):  # ValueError: an empty cell
        key = None
    if key is not None and key in _known:
        made, known = _known[key]
        if all(reference() is not None for reference in known):
            _known.move_to_end(key)
            return made
    made = _trace(op, step, states, inputs, single, dtype, shape, parameters)
    if key is not None and not made.foreign:
        _known[key] = (made, found.known)
        while len(_known) > _MAX_KNOWN:
            _known.popitem(last=False)
    return made
