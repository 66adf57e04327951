"""Recurrences whose step is pointwise: the operator's Python face, and its reference in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.arguments import check_dense
from .._base.rules import widest
from .._base.torch_private import any_autocast, differentiated_by_transform, in_transform
from . import tuned
from .step_trace import check_returned, traced

__all__ = ["ALGORITHMS", "Call", "checked", "pointwise_scan", "pointwise_scan_reference"]

ALGORITHMS = ("auto", "walk", "newton", "reference")
MAX_STATES, MAX_TENSORS = 8, 64
"""Of csrc/scan/pointwise/program.h; more run as the reference."""
_ONE = "give sequences of one length"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_pointwise_scan = torch.ops.weft.pointwise_scan.default

Tensors = Tensor | tuple[Tensor, ...]
Step = Callable[[Any, Any, Any], Any]


def pointwise_scan(
    step: Step,
    init: Tensors,
    inputs: Tensors,
    parameters: Tensors = (),
    *,
    reverse: bool = False,
    algorithm: str = "auto",
) -> Tensors:
    """Runs ``h[t] = step(h[t-1], x[t], parameters)`` over all t, each channel by itself: one kernel, made of the step.

    >>> def step(h, x, p):
    ...     z, r = torch.sigmoid(x[0] + p[0] * h), torch.sigmoid(x[1] + p[1] * h)
    ...     return h + z * (torch.tanh(x[2] + p[2] * (r * h)) - h)
    >>> h0, gates, parameters = torch.zeros(2, 8), torch.randn(3, 100, 2, 8), torch.randn(3, 8)  # B = 2, H = 8, T = 100
    >>> states = weft.scan.pointwise_scan(step, h0, (*gates,), (*parameters,))
    >>> states.shape
    torch.Size([100, 2, 8])

    Args:
        step: a time step, ``step(h, x, p)``. It gets the state, the inputs of one step and the parameters, each a
            tensor or a tuple as it is given here, and returns the next state likewise. It may use torch's pointwise
            operations, numbers, ``torch.where`` and ``detach``, through which no gradient goes: ``s + (spike -
            s).detach()`` has the value of ``spike`` and the gradient of ``s``. It is written down once and then
            compiled; how often it runs, and on what sizes, is not defined.
        init: the state before the first step: a tensor of any shape S, or a tuple of them.
        inputs: a tensor ``(T, *S)``, or a non-empty tuple of them. T and S may be 0.
        parameters: a tensor, or a tuple; each broadcasts to S.
        reverse: ``h[t] = step(h[t+1], x[t], parameters)`` instead, from T - 1 down.
        algorithm: ``"auto"``; ``"walk"``, step after step; ``"newton"``, many chunks of time at once, whose seams are
            mended by Newton's method, see :func:`newton_report`; ``"reference"``. What cannot run runs as another; all
            agree up to rounding.

    Returns:
        The states after every step, ``(T, *S)``, a tensor or a tuple as `init` is.

    Raises:
        TypeError: `step` cannot be called, an argument is no tensor, dtypes differ, or `step` returns another dtype.
        ValueError: shapes do not fit, `init` or `inputs` is empty, the algorithm is unknown; `step` runs another
            operation, or returns another structure or shape.
        RuntimeError: devices differ; `step` reads a value, or uses a tensor from elsewhere that requires grad. What
            `step` itself raises passes.

    The dtype is float16, bfloat16, float32 or float64, one for all; under autocast the widest. Half types compute and
    carry in float32, values inside `step` too, and round once. Gradients, for `init`, `inputs` and `parameters`, are of
    any order: the first is a kernel, the others torch's through the reference, which also runs under ``torch.func``, in
    forward-mode AD and for more than 8 states. What is kept for backward are the arguments and results. Two runs give
    the same bits, and no channel depends on another. ``torch.compile`` breaks its graph here.

    Source: Danieli et al., "ParaRNN" (2025), and Lim et al., "Parallelizing non-linear sequential models over the
    sequence length" (ICLR 2024), solve for all states by Newton's method; here it only mends seams.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
        return torch._dynamo.disable(_run)(step, init, inputs, parameters, reverse, algorithm)
    return _run(step, init, inputs, parameters, reverse, algorithm)


def _run(step: Step, init: Tensors, inputs: Tensors, parameters: Tensors, reverse: bool, algorithm: str) -> Tensors:
    call = checked("pointwise_scan", step, init, inputs, parameters, algorithm)
    if call.program is None:
        return call.loop(bool(reverse))
    return call.run(tuned.chosen(call.kind) if algorithm == "auto" else algorithm, bool(reverse))


def pointwise_scan_reference(
    step: Step, init: Tensors, inputs: Tensors, parameters: Tensors = (), *, reverse: bool = False
) -> Tensors:
    """:func:`pointwise_scan`, one step after the other in plain torch: what the fast paths are measured against.

    The same arguments, results and errors; differentiable to any order, in forward mode and under ``torch.func`` too.
    """
    return checked("pointwise_scan_reference", step, init, inputs, parameters, "reference").loop(bool(reverse))


class Call:
    """The checked arguments of a call.

    Attributes:
        init, inputs, parameters: lists of tensors.
        program: the step's, None where the reference runs.
        obstacle: why that is.
        operands: `parameters`, and what the step closes over.
    """

    def __init__(self, op: str, step: Step, init: Tensors, inputs: Tensors, parameters: Tensors):
        self.op, self.step = op, step
        self.init = _tensors(op, "init", init)
        self.inputs = _tensors(op, "inputs", inputs)
        self.parameters = _tensors(op, "parameters", parameters, may_be_empty=True)
        self.single = tuple(isinstance(a, Tensor) for a in (init, inputs, parameters))
        self.program: str | None = None
        self.obstacle: str | None = None
        self.operands = self.parameters
        if any_autocast():
            self._widen()
        self._check()

    @property
    def acc(self) -> torch.dtype:
        return torch.float64 if self.init[0].dtype == torch.float64 else torch.float32

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.init, *self.inputs, *self.operands]

    def kind(self) -> tuned.Kind:
        """What decides between algorithms, of a call that has a program."""
        first = self.init[0]
        steps, channels, trains = self.inputs[0].shape[0], first.numel(), tuned.trains(self.tensors)
        assert self.program is not None
        return tuned.Kind(self.program, steps, channels, first.device, first.dtype, trains)

    def run(self, algorithm: str, reverse: bool) -> Tensors:
        """By the operator, of a call that has a program."""
        assert self.program is not None
        if not reverse and algorithm == "auto":  # an argument takes the dispatcher close to a microsecond
            return self.returned(_pointwise_scan(self.init, self.inputs, self.operands, self.program))
        states = _pointwise_scan(self.init, self.inputs, self.operands, self.program, False, reverse, algorithm)
        return self.returned(states)

    def returned(self, states: Sequence[Tensor]) -> Tensors:
        return states[0] if self.single[0] else tuple(states)

    def _lists(self) -> tuple[tuple[str, list[Tensor], bool], ...]:
        return tuple(zip(("init", "inputs", "parameters"), (self.init, self.inputs, self.parameters), self.single))  # noqa: B905

    def _widen(self) -> None:
        if torch.is_autocast_enabled(self.init[0].device.type):
            wide = widest(*self.init, *self.inputs, *self.parameters)
            first, second = len(self.init), len(self.init) + len(self.inputs)
            self.init, self.inputs, self.parameters = wide[:first], wide[first:second], wide[second:]
            self.operands = self.parameters

    def _check(self) -> None:
        first = self.init[0]
        shape, dtype, device = first.shape, first.dtype, first.device
        steps = None
        for name, tensors, alone in self._lists():
            for i, t in enumerate(tensors):
                if t.dtype != dtype or dtype not in _DTYPES:
                    known = "float16, bfloat16, float32 or float64" if dtype not in _DTYPES else f"{dtype}, as init is"
                    raise TypeError(f"{self.op}: {_named(name, i, alone)} must be {known}, got {t.dtype}")
                if t.device != device:
                    raise RuntimeError(
                        f"{self.op}: {_named(name, i, alone)} must be on the device of init, {device}, got {t.device}"
                    )
                if name == "init" and t.shape != shape:
                    raise ValueError(
                        f"{self.op}: {_named(name, i, alone)} must have the shape of init[0], {tuple(shape)}, got "
                        f"{tuple(t.shape)}"
                    )
                if name == "inputs":
                    if t.dim() != len(shape) + 1 or t.shape[1:] != shape:
                        raise ValueError(
                            f"{self.op}: {_named(name, i, alone)} must be (T, {', '.join(map(str, shape))}), time and "
                            f"the shape of init, got {tuple(t.shape)}"
                        )
                    steps = t.shape[0] if steps is None else steps
                    if t.shape[0] != steps:
                        raise ValueError(
                            f"{self.op}: {_named(name, i, alone)} must have as many steps as inputs[0], {steps}, got "
                            f"{t.shape[0]}"
                        )
                if name == "parameters" and not _broadcasts(t.shape, shape):
                    raise ValueError(
                        f"{self.op}: {_named(name, i, alone)} must broadcast to the shape of init, {tuple(shape)}, got "
                        f"{tuple(t.shape)}"
                    )

    def compile(self) -> None:
        """Find the program."""
        found = traced(
            self.op, self.step, len(self.init), len(self.inputs), self.single, self.acc, self.init[0].shape,
            [p.shape for p in self.parameters],
        )  # fmt: skip
        self.program, self.obstacle = found.program, found.obstacle
        if found.foreign:
            like = self.init[0]
            self.operands = [*self.parameters, *(t.detach().to(like.device, like.dtype) for t in found.foreign)]
        if len(self.init) > MAX_STATES:
            self.program, self.obstacle = None, f"more than {MAX_STATES} states"
        elif len(self.init) + len(self.inputs) + len(self.operands) > MAX_TENSORS:
            self.program, self.obstacle = None, f"more than {MAX_TENSORS} tensors"

    def loop(self, reverse: bool) -> Tensors:
        """The reference."""
        dtype, acc, shape = self.init[0].dtype, self.acc, self.init[0].shape
        h, p = ([t.to(acc) for t in tensors] for tensors in (self.init, self.parameters))
        # unbind rather than indices: its backward is one stack, where T indices would fill T tensors of zeros.
        steps = list(zip(*(x.to(acc).unbind() for x in self.inputs), strict=True))
        given = p[0] if self.single[2] else tuple(p)
        states: list[tuple[Tensor, ...]] = []
        for x in reversed(steps) if reverse else steps:
            returned = self.step(h[0] if self.single[0] else tuple(h), x[0] if self.single[1] else tuple(x), given)
            h = check_returned(self.op, returned, len(self.init), self.single[0], acc, shape)
            states.append(h)
        if not states:  # a part of the graph all the same, as the operator's
            nothing = torch.cat([t.flatten()[:0] for t in self.tensors])
            return self.returned([nothing.view(0, *shape) for _ in self.init])
        if reverse:
            states.reverse()
        return self.returned([torch.stack(s).to(dtype) for s in zip(*states, strict=True)])


def checked(op: str, step: Step, init: Tensors, inputs: Tensors, parameters: Tensors, algorithm: str) -> Call:
    """A call that may run: with a program, or by its loop."""
    if not callable(step):
        raise TypeError(f"{op}: step must be callable, got {type(step).__name__}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{op}: algorithm must be one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    call = Call(op, step, init, inputs, parameters)
    if in_transform() or differentiated_by_transform(*call.init, *call.inputs, *call.parameters):
        call.obstacle = "torch.func or forward-mode AD, under which the reference runs"
        return call
    call.compile()
    if algorithm == "reference":
        call.program, call.obstacle = None, 'algorithm="reference"'
    return call


def _named(name: str, i: int, alone: bool) -> str:
    return name if alone else f"{name}[{i}]"


def _tensors(op: str, name: str, value: object, may_be_empty: bool = False) -> list[Tensor]:
    if isinstance(value, Tensor):
        check_dense(op, name, value, _ONE)
        return [value]
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{op}: {name} must be a Tensor or a tuple of Tensors, got {type(value).__name__}")
    for i, t in enumerate(value):
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name}[{i}] must be a Tensor, got {type(t).__name__}")
        check_dense(op, f"{name}[{i}]", t, _ONE)
    if not value and not may_be_empty:
        raise ValueError(f"{op}: {name} must not be empty")
    return list(value)


@functools.lru_cache(maxsize=256)
def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))
