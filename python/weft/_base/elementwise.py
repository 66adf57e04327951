"""Torch's element-wise operations as the instructions of csrc/common/elementwise.def."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from .instructions import UNARY

__all__ = ["BOOLEAN", "ELEMENTWISE", "NUMBERS", "Graph", "Unsupported"]


class Unsupported(Exception):
    """What a compiler does not know."""


class Graph(Protocol):
    """Makes the nodes of a compiler's expressions."""

    def constant(self, value: float) -> Any:
        """A number."""

    def apply(self, op: str, *args: Any) -> Any:
        """An instruction, or ``"stop"``: its argument, through which no gradient goes."""


def _node(g: Graph, x: object) -> Any:
    if isinstance(x, (bool, int, float)):
        return g.constant(float(x))
    if x is None or isinstance(x, (str, list, tuple)):
        raise TypeError
    return x


def _binary(op: str, swapped: bool = False) -> Callable:
    def make(g: Graph, a, b, alpha=1.0):
        a, b = _node(g, a), _node(g, b)
        if swapped:
            a, b = b, a
        if alpha != 1:
            # torch's alpha is of what is added or taken away, for rsub of what is taken away.
            b = g.apply("mul", b, g.constant(alpha))
        return g.apply(op, a, b)

    return make


def _unary(op: str) -> Callable:
    return lambda g, x: g.apply(op, x)


def _pow(g: Graph, x: Any, exponent: float) -> Any:
    whole, rest = divmod(abs(exponent), 1)
    if rest not in (0, 0.5) or not 0 < abs(exponent) <= 8:
        raise Unsupported(f"a power of {exponent}")
    factors = [x] * int(whole) + ([g.apply("sqrt", x)] if rest else [])
    found = factors[0]
    for factor in factors[1:]:
        found = g.apply("mul", found, factor)
    return found if exponent > 0 else g.apply("div", g.constant(1.0), found)


def _softplus(g: Graph, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    # log(1 + exp(z)) = max(z, 0) + log1p(exp(-|z|)) overflows nowhere.
    z = g.apply("mul", x, g.constant(beta))
    smooth = g.apply("log1p", g.apply("exp", g.apply("neg", g.apply("abs", z))))
    smooth = g.apply("add", g.apply("relu", z), smooth)
    return g.apply("select", g.apply("gt", z, g.constant(threshold)), x, g.apply("mul", smooth, g.constant(1 / beta)))


def _log_sigmoid(g: Graph, x: Any) -> Any:
    smooth = g.apply("log1p", g.apply("exp", g.apply("neg", g.apply("abs", x))))
    return g.apply("sub", g.apply("min", x, g.constant(0.0)), smooth)


def _leaky_relu(g: Graph, x: Any, slope=0.01) -> Any:
    return g.apply("select", g.apply("gt", x, g.constant(0.0)), x, g.apply("mul", x, _node(g, slope)))


def _clamp(g: Graph, x: Any, low=None, high=None) -> Any:
    # The gradient at a bound is that of the inside, as torch's.
    if low is not None:
        x = g.apply("select", g.apply("ge", x, _node(g, low)), x, _node(g, low))
    if high is not None:
        x = g.apply("select", g.apply("ge", _node(g, high), x), x, _node(g, high))
    return x


def _elu(g: Graph, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    positive = g.apply("gt", x, g.constant(0.0))
    # Of what is not chosen neither value nor gradient may be infinite.
    below = _expm1(g, g.apply("mul", g.apply("select", positive, g.constant(0.0), x), g.constant(input_scale)))
    return g.apply(
        "select", positive, g.apply("mul", x, g.constant(scale)), g.apply("mul", below, g.constant(alpha * scale))
    )


def _expm1(g: Graph, x: Any) -> Any:
    """2 tanh(x / 2) / (1 - tanh(x / 2)) near 0, where exp(x) - 1 cancels."""
    near = g.apply("gt", g.constant(0.5), g.apply("abs", x))
    half = g.apply("mul", g.apply("select", near, x, g.constant(0.0)), g.constant(0.5))
    t = g.apply("tanh", half)
    close = g.apply("div", g.apply("add", t, t), g.apply("sub", g.constant(1.0), t))
    return g.apply("select", near, close, g.apply("sub", g.apply("exp", x), g.constant(1.0)))


def _gelu(g: Graph, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        cube = g.apply("mul", _pow(g, x, 3), g.constant(0.044715))
        inside = g.apply("tanh", g.apply("mul", g.apply("add", x, cube), g.constant(math.sqrt(2 / math.pi))))
    else:
        inside = g.apply("erf", g.apply("mul", x, g.constant(math.sqrt(0.5))))
    return g.apply("mul", g.apply("mul", x, g.constant(0.5)), g.apply("add", inside, g.constant(1.0)))


def _hardsigmoid(g: Graph, x: Any) -> Any:
    return _clamp(g, g.apply("add", g.apply("mul", x, g.constant(1 / 6)), g.constant(0.5)), 0.0, 1.0)


def _lerp(g: Graph, start: Any, end: Any, weight) -> Any:
    return g.apply("add", start, g.apply("mul", _node(g, weight), g.apply("sub", end, start)))


def _add_scaled(op: str) -> Callable:
    def make(g: Graph, x: Any, a: Any, b: Any, value: float = 1.0) -> Any:
        term = g.apply(op, a, b)
        return g.apply("add", x, term if value == 1 else g.apply("mul", term, g.constant(value)))

    return make


def _compare(op: str, swapped: bool = False) -> Callable:
    def make(g: Graph, a, b):
        a, b = _node(g, a), _node(g, b)
        return g.apply(op, b, a) if swapped else g.apply(op, a, b)

    return make


def _scaled(op: str, factor: float) -> Callable:
    return lambda g, x: g.apply("mul", g.apply(op, x), g.constant(factor))


def _both(name: str, make: Callable) -> dict[str, Callable]:
    return {f"aten.{name}.{kind}": make for kind in ("Tensor", "Scalar")}


ELEMENTWISE: dict[str, Callable] = {
    **{f"aten.{op}.default": _unary(op) for op in UNARY},
    "aten.sgn.default": _unary("sign"),
    "aten.detach.default": _unary("stop"),
    **_both("add", _binary("add")),
    **_both("sub", _binary("sub")),
    **_both("rsub", _binary("sub", swapped=True)),
    **_both("mul", _compare("mul")),
    **_both("div", _compare("div")),
    "aten.maximum.default": _compare("max"),
    "aten.minimum.default": _compare("min"),
    "aten.max.other": _compare("max"),
    "aten.min.other": _compare("min"),
    **_both("gt", _compare("gt")),
    **_both("ge", _compare("ge")),
    **_both("lt", _compare("gt", swapped=True)),
    **_both("le", _compare("ge", swapped=True)),
    **_both("eq", _compare("eq")),
    **_both("ne", lambda g, a, b: g.apply("sub", g.constant(1.0), g.apply("eq", _node(g, a), _node(g, b)))),
    # Booleans are 0 and 1.
    **dict.fromkeys(("aten.logical_and.default", "aten.bitwise_and.Tensor"), _compare("mul")),
    **dict.fromkeys(("aten.logical_or.default", "aten.bitwise_or.Tensor"), _compare("max")),
    **dict.fromkeys(("aten.logical_not.default", "aten.bitwise_not.default"), lambda g, x: _compare("eq")(g, x, 0.0)),
    "aten.where.self": lambda g, c, a, b: g.apply("select", c, _node(g, a), _node(g, b)),
    "aten.masked_fill.Scalar": lambda g, x, mask, value: g.apply("select", mask, _node(g, value), x),
    "aten.masked_fill.Tensor": lambda g, x, mask, value: g.apply("select", mask, value, x),
    "aten.reciprocal.default": lambda g, x: g.apply("div", g.constant(1.0), x),
    "aten.rsqrt.default": lambda g, x: g.apply("div", g.constant(1.0), g.apply("sqrt", x)),
    "aten.square.default": lambda g, x: g.apply("mul", x, x),
    "aten.pow.Tensor_Scalar": _pow,
    "aten.expm1.default": _expm1,
    "aten.exp2.default": lambda g, x: g.apply("exp", g.apply("mul", x, g.constant(math.log(2)))),
    "aten.log2.default": _scaled("log", 1 / math.log(2)),
    "aten.log10.default": _scaled("log", 1 / math.log(10)),
    "aten.softplus.default": _softplus,
    "aten.log_sigmoid.default": _log_sigmoid,
    "aten.leaky_relu.default": _leaky_relu,
    "aten._prelu_kernel.default": _leaky_relu,
    "aten.clamp.default": _clamp,
    "aten.clamp.Tensor": _clamp,
    "aten.clamp_min.default": _clamp,
    "aten.clamp_max.default": lambda g, x, high: _clamp(g, x, None, high),
    "aten.hardtanh.default": lambda g, x, low=-1.0, high=1.0: _clamp(g, x, low, high),
    "aten.hardsigmoid.default": _hardsigmoid,
    "aten.hardswish.default": lambda g, x: g.apply("mul", x, _hardsigmoid(g, x)),
    "aten.silu.default": lambda g, x: g.apply("mul", x, g.apply("sigmoid", x)),
    "aten.mish.default": lambda g, x: g.apply("mul", x, g.apply("tanh", _softplus(g, x))),
    "aten.elu.default": _elu,
    "aten.celu.default": lambda g, x, alpha=1.0: _elu(g, x, alpha, 1.0, 1 / alpha),
    "aten.gelu.default": _gelu,
    "aten.lerp.Scalar": _lerp,
    "aten.lerp.Tensor": _lerp,
    "aten.addcmul.default": _add_scaled("mul"),
    "aten.addcdiv.default": _add_scaled("div"),
}
"""By torch's name: (graph, columns or numbers in the order of torch's arguments) to columns."""

NUMBERS = frozenset(f"aten.{op}.{kind}" for op in ("add", "sub", "rsub") for kind in ("Tensor", "Scalar"))
"""What is not the same on booleans."""

BOOLEAN = frozenset(("aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor", "aten.bitwise_not.default"))
"""What is known of booleans alone."""
