"""What the compiler knows of torch: its operations as expressions over columns. Free of torch.

A value has one row per vertex (or child) with an inner shape, which lies in the row's columns, last dimension fastest.
Element-wise operations take columns; views, reductions and normalisations take inner shapes apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..._base.elementwise import Unsupported
from .ir import Graph, Node

__all__ = ["FILLS", "SHAPED", "VIEWS", "Value", "broadcast"]

MAX_PIECES = 256
"""Into how many pieces a row may be cut by one operation; more run on the reference."""


class Value(NamedTuple):
    """An argument: its columns and its inner shape. What is the same for all rows has no dimension of rows."""

    node: Node
    shape: tuple[int, ...]
    rows: bool = True

    def dim(self, dim: float) -> int:
        """A dimension of torch's as one of the inner shape."""
        found = int(dim) + (len(self.shape) + 1 if dim < 0 else 0)
        if found == 0 or not self.rows:
            raise Unsupported("an operation along the vertices")
        return found - 1


def _cut(pieces: int) -> None:
    if pieces > MAX_PIECES:
        raise Unsupported(f"an operation that cuts a row into {pieces} pieces")


def broadcast(g: Graph, x: Value, shape: Sequence[int]) -> Node:
    """`x` in a shape that it goes with, by torch's rules; of width 1 where it is one number per row."""
    inner = x.shape[len(x.shape) - len(shape) :] if len(x.shape) > len(shape) else x.shape
    inner = (1,) * (len(shape) - len(inner)) + tuple(inner)

    def wide(node: Node, have: Sequence[int], want: Sequence[int]) -> Node:
        width = math.prod(want)
        if tuple(have) == tuple(want):
            return node
        if math.prod(have) == 1:
            return g.broadcast(node, width)
        _cut(want[0])
        if have[0] == 1:
            return g.cat([wide(node, have[1:], want[1:])] * want[0])
        size = math.prod(have[1:])
        return g.cat(wide(g.slice(node, i * size, (i + 1) * size), have[1:], want[1:]) for i in range(want[0]))

    return x.node if math.prod(inner) == 1 else wide(x.node, inner, shape)


# Inner shapes: (graph, shapes of the results, arguments) to the columns of the results. ------------------------------


def _pieces(g: Graph, x: Node, spans: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> Node:
    spans = list(spans)
    _cut(len(spans))
    return g.cat(g.slice(x, first, end) for first, end in spans)


def _along(g: Graph, x: Value, dim: int, first: int, end: int) -> Node:
    """Indices [first, end) of a dimension of the inner shape."""
    outer, size = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    step = x.shape[dim] * size
    if first == 0 and end == x.shape[dim]:
        return x.node
    return _pieces(g, x.node, ((a * step + first * size, a * step + end * size) for a in range(outer)))


def _index(i: float, size: int) -> int:
    return min(max(int(i) + (size if i < 0 else 0), 0), size)


def _same(g: Graph, shapes, x: Value, *rest, **keywords) -> list[Node]:
    return [x.node]


def _slice(g: Graph, shapes, x: Value, dim=0, start=None, end=None, step=1) -> list[Node]:
    if step != 1:
        raise Unsupported("a slice with a step")
    if dim == 0 and (start in (None, 0)) and (end is None or end >= 2**62):
        return [x.node]
    dim = x.dim(dim)
    size = x.shape[dim]
    first = 0 if start is None else _index(start, size)
    last = size if end is None else _index(end, size)
    return [_along(g, x, dim, first, max(first, last))]


def _split(g: Graph, shapes, x: Value, sizes, dim=0) -> list[Node]:
    dim = x.dim(dim)
    found, first = [], 0
    for shape in shapes:
        found.append(_along(g, x, dim, first, first + shape[dim]))
        first += shape[dim]
    return found


def _unbind(g: Graph, shapes, x: Value, dim=0) -> list[Node]:
    dim = x.dim(dim)
    return [_along(g, x, dim, i, i + 1) for i in range(len(shapes))]


def _select(g: Graph, shapes, x: Value, dim, index) -> list[Node]:
    dim = x.dim(dim)
    i = int(index) + (x.shape[dim] if index < 0 else 0)
    return [_along(g, x, dim, i, i + 1)]


def _cat(g: Graph, shapes, parts: Sequence[Value], dim=0) -> list[Node]:
    # An empty tensor of one dimension goes with anything.
    parts = [p for p in parts if p.rows or math.prod(p.shape) > 0]
    dim = max(parts, key=lambda p: len(p.shape)).dim(dim)
    outer = math.prod(parts[0].shape[:dim])
    _cut(outer * len(parts))
    sizes = [math.prod(p.shape[dim:]) for p in parts]
    return [
        g.cat(
            g.slice(p.node, a * size, (a + 1) * size)
            for a in range(outer)
            for p, size in zip(parts, sizes, strict=True)
        )
    ]


def _stack(g: Graph, shapes, parts: Sequence[Value], dim=0) -> list[Node]:
    axis = Value(parts[0].node, (*parts[0].shape, 1)).dim(dim)
    return _cat(g, shapes, [Value(p.node, (*p.shape[:axis], 1, *p.shape[axis:])) for p in parts], axis + 1)


def _permute(g: Graph, shapes, x: Value, dims) -> list[Node]:
    if int(dims[0]) != 0:
        raise Unsupported("an operation along the vertices")
    order = [x.dim(d) for d in dims[1:]]
    strides = [math.prod(x.shape[d + 1 :]) for d in range(len(x.shape))]
    places = [0]
    for d in order:
        places = [p + i * strides[d] for p in places for i in range(x.shape[d])]
    runs: list[list[int]] = []
    for p in places:
        if runs and runs[-1][1] == p:
            runs[-1][1] = p + 1
        else:
            runs.append([p, p + 1])
    return [_pieces(g, x.node, [(a, b) for a, b in runs])]


def _transpose(g: Graph, shapes, x: Value, dim0, dim1) -> list[Node]:
    a, b = x.dim(dim0) + 1, x.dim(dim1) + 1
    dims = list(range(len(x.shape) + 1))
    dims[a], dims[b] = dims[b], dims[a]
    return _permute(g, shapes, x, dims)


def _expand(g: Graph, shapes, x: Value, size, implicit=False) -> list[Node]:
    return [broadcast(g, x, shapes[0])]


def _glu(g: Graph, shapes, x: Value, dim=-1) -> list[Node]:
    dim = x.dim(dim)
    half = x.shape[dim] // 2
    return [g.apply("mul", _along(g, x, dim, 0, half), g.apply("sigmoid", _along(g, x, dim, half, 2 * half)))]


# Reductions. ---------------------------------------------------------------------------------------------------------


def _reduced(g: Graph, op: str, x: Value, dims: Sequence[int]) -> Node:
    """The sum (``rowsum``) or the greatest (``rowmax``) over dimensions of the inner shape, these as of size 1."""
    node, shape = x.node, list(x.shape)
    for d in sorted(dims, reverse=True):
        outer, size, inner = math.prod(shape[:d]), shape[d], math.prod(shape[d + 1 :])
        parts = []
        if inner == 1:
            _cut(outer)
            parts = [g.reduce(op, g.slice(node, a * size, (a + 1) * size)) for a in range(outer)]
        else:
            _cut(outer * size)
            for a in range(outer):
                rows = [g.slice(node, (a * size + i) * inner, (a * size + i + 1) * inner) for i in range(size)]
                total = rows[0] if rows else g.constant(0.0, inner)
                for row in rows[1:]:
                    total = g.apply("add" if op == "rowsum" else "max", total, row)
                parts.append(total)
        node, shape[d] = g.cat(parts), 1
    return node


def _dims(x: Value, dims) -> list[int]:
    if not dims and dims != 0:
        raise Unsupported("a reduction over all vertices")
    return [x.dim(d) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _sum(g: Graph, shapes, x: Value, dims=None, keepdim=False, dtype=None) -> list[Node]:
    return [_reduced(g, "rowsum", x, _dims(x, dims))]


def _average(g: Graph, x: Value, dims: Sequence[int], taken: float = 0.0) -> Node:
    count = math.prod(x.shape[d] for d in dims) - taken
    return g.apply("mul", _reduced(g, "rowsum", x, dims), g.constant(1 / count if count > 0 else math.nan))


def _mean(g: Graph, shapes, x: Value, dims=None, keepdim=False, dtype=None) -> list[Node]:
    return [_average(g, x, _dims(x, dims))]


def _amax(g: Graph, shapes, x: Value, dims=(), keepdim=False) -> list[Node]:
    return [_reduced(g, "rowmax", x, _dims(x, dims))]


def _amin(g: Graph, shapes, x: Value, dims=(), keepdim=False) -> list[Node]:
    return [g.apply("neg", _reduced(g, "rowmax", x._replace(node=g.apply("neg", x.node)), _dims(x, dims)))]


def _kept(x: Value, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if d in dims else s for d, s in enumerate(x.shape))


def _centred(g: Graph, x: Value, dims: Sequence[int]) -> Value:
    mean = Value(_average(g, x, dims), _kept(x, dims))
    return x._replace(node=g.apply("sub", x.node, broadcast(g, mean, x.shape)))


def _var(g: Graph, shapes, x: Value, dims=None, correction=1.0, keepdim=False) -> list[Node]:
    dims = _dims(x, dims)
    centred = _centred(g, x, dims)
    square = centred._replace(node=g.apply("mul", centred.node, centred.node))
    return [_average(g, square, dims, 1.0 if correction is None else correction)]


def _std(g: Graph, shapes, x: Value, dims=None, correction=1.0, keepdim=False) -> list[Node]:
    return [_root(g, *_var(g, shapes, x, dims, correction))]


def _root(g: Graph, x: Node) -> Node:
    """The square root, whose gradient at 0 shall be 0, as that of torch's norms."""
    positive = g.apply("gt", x, g.constant(0.0))
    inside = g.apply("sqrt", g.apply("select", positive, x, g.constant(1.0)))
    # NaN is not positive, and has to stay.
    return g.apply("select", positive, inside, x)


def _norm(g: Graph, shapes, x: Value, ord=2.0, dims=None, keepdim=False, dtype=None) -> list[Node]:
    dims = _dims(x, dims)
    if ord == 1:
        return [_reduced(g, "rowsum", x._replace(node=g.apply("abs", x.node)), dims)]
    if ord == 2:
        return [_root(g, _reduced(g, "rowsum", x._replace(node=g.apply("mul", x.node, x.node)), dims))]
    if ord == math.inf:
        return [_reduced(g, "rowmax", x._replace(node=g.apply("abs", x.node)), dims)]
    raise Unsupported(f"a norm of order {ord}")


def _shifted(g: Graph, x: Value, dims: Sequence[int]) -> tuple[Value, Value, Node]:
    """x less its greatest, exp of that, and the greatest, through which no gradient goes."""
    greatest = _reduced(g, "rowmax", x._replace(node=g.apply("stop", x.node)), dims)
    low = x._replace(node=g.apply("sub", x.node, broadcast(g, Value(greatest, _kept(x, dims)), x.shape)))
    return low, low._replace(node=g.apply("exp", low.node)), greatest


def _softmax(g: Graph, shapes, x: Value, dim, half_to_float=False) -> list[Node]:
    dims = [x.dim(dim)]
    _, powers, _ = _shifted(g, x, dims)
    total = Value(_reduced(g, "rowsum", powers, dims), _kept(x, dims))
    return [g.apply("div", powers.node, broadcast(g, total, x.shape))]


def _log_softmax(g: Graph, shapes, x: Value, dim, half_to_float=False) -> list[Node]:
    dims = [x.dim(dim)]
    low, powers, _ = _shifted(g, x, dims)
    total = Value(g.apply("log", _reduced(g, "rowsum", powers, dims)), _kept(x, dims))
    return [g.apply("sub", low.node, broadcast(g, total, x.shape))]


def _logsumexp(g: Graph, shapes, x: Value, dims, keepdim=False) -> list[Node]:
    dims = _dims(x, dims)
    greatest = _reduced(g, "rowmax", x._replace(node=g.apply("stop", x.node)), dims)
    infinite = g.apply("eq", g.apply("abs", greatest), g.constant(math.inf))
    greatest = g.apply("select", infinite, g.constant(0.0), greatest)
    low = g.apply("sub", x.node, broadcast(g, Value(greatest, _kept(x, dims)), x.shape))
    total = _reduced(g, "rowsum", x._replace(node=g.apply("exp", low)), dims)
    return [g.apply("add", g.apply("log", total), greatest)]


def _layer_norm(g: Graph, shapes, x: Value, normalized, weight, bias, eps) -> list[Node | None]:
    dims = list(range(len(x.shape) - len(normalized), len(x.shape)))
    centred = _centred(g, x, dims)
    square = centred._replace(node=g.apply("mul", centred.node, centred.node))
    variance = g.apply("add", _average(g, square, dims), g.constant(eps))
    scale = Value(g.apply("div", g.constant(1.0), g.apply("sqrt", variance)), _kept(x, dims))
    node = g.apply("mul", centred.node, broadcast(g, scale, x.shape))
    return [_affine(g, node, x.shape, weight, bias), None, None]


def _rms_norm(g: Graph, shapes, x: Value, normalized, weight, eps) -> list[Node | None]:
    dims = list(range(len(x.shape) - len(normalized), len(x.shape)))
    square = x._replace(node=g.apply("mul", x.node, x.node))
    mean = g.apply("add", _average(g, square, dims), g.constant(eps))
    scale = Value(g.apply("div", g.constant(1.0), g.apply("sqrt", mean)), _kept(x, dims))
    node = g.apply("mul", x.node, broadcast(g, scale, x.shape))
    return [_affine(g, node, x.shape, weight, None), None]


def _affine(g: Graph, node: Node, shape: Sequence[int], weight: Value | None, bias: Value | None) -> Node:
    if weight is not None:
        node = g.apply("mul", node, broadcast(g, weight, shape))
    return node if bias is None else g.apply("add", node, broadcast(g, bias, shape))


_COPIES = (
    *(
        f"aten.{op}.default"
        for op in ("view", "_unsafe_view", "_reshape_copy", "alias", "clone", "unsqueeze", "squeeze")
    ),
    "aten.squeeze.dim",
    "aten.squeeze.dims",
)

FILLS = {"aten.zeros.default": 0.0, "aten.ones.default": 1.0}
"""Rows of one number."""

VIEWS = frozenset((*_COPIES, "aten.slice.Tensor", "aten.split.Tensor", "aten.split_with_sizes.default"))
"""Views and copies that take neighbouring columns, or all."""

SHAPED: dict[str, Callable] = {
    **dict.fromkeys(_COPIES, _same),
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.unsafe_split_with_sizes.default": _split,
    "aten.unbind.int": _unbind,
    "aten.select.int": _select,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.expand.default": _expand,
    "aten.glu.default": _glu,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.dim": _mean,
    "aten.amax.default": _amax,
    "aten.amin.default": _amin,
    "aten.var.correction": _var,
    "aten.std.correction": _std,
    "aten.linalg_vector_norm.default": _norm,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _log_softmax,
    "aten.logsumexp.default": _logsumexp,
    "aten.native_layer_norm.default": _layer_norm,
    "aten._fused_rms_norm.default": _rms_norm,
}
"""By torch's name: (graph, inner shapes of the results, arguments with :class:`Value` for tensors) to the columns of
the results, None for one that is for torch's own backward."""
