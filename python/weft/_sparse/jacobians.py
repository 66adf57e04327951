"""Transposed Jacobians of layers as CSR: the pattern from the settings alone, and cached; the values in one pass.

Source: BPPSA (Wang, Bai, Pekhimenko, MLSys 2020), section 3.3 and appendix D.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base.arguments import check_dense
from .._base.torch_private import differentiated_by_transform
from . import windows as _windows
from .csr import DTYPES, BatchedCSR, gather
from .pattern import Pattern, diagonal, index_dtype, made_to_stay
from .reference import conv_values_reference
from .windows import Windows, check_sizes, tuple_of

T = TypeVar("T")
_aten = torch.ops.aten
_weft_conv_values = torch.ops.weft.conv_values.default
_max_pool_values = torch.ops.weft.max_pool_values.default

# The cache of patterns: settings, sizes and device to what is made of them, the least recently used dropped first.
_CACHE_SIZE = 256
_cache: OrderedDict[Hashable, Any] = OrderedDict()


def _cached(key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
    found = _cache.get(key)
    if found is not None:
        _cache.move_to_end(key)
        return found
    made, stays = made_to_stay(device, make)
    if stays:
        _cache[key] = made
        if len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    return made


def clear_cache() -> None:
    """Forgets every pattern that no matrix holds: the generators make them again."""
    _cache.clear()


def _device(device: torch.device | str | None) -> torch.device:
    """With its index: "cuda" and "cuda:0" are one key."""
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _dtype(op: str, dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise TypeError(f"{op}: dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    return dtype


def _check_floating(op: str, name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(t).__name__}")
    check_dense(op, name, t, "give one tensor")
    if t.dtype not in DTYPES:
        raise TypeError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {t.dtype}")


def _check_batch(op: str, name: str, t: Tensor, dims: int | None = None) -> None:
    if (dims is None and t.dim() < 1) or (dims is not None and t.dim() != dims):
        raise ValueError(
            f"{op}: {name} must have {'a batch' if dims is None else f'{dims} dimensions, the batch'} first, "
            f"got {tuple(t.shape)}"
        )


# Diagonals ------------------------------------------------------------------------------------------------------------


def _diagonal(values: Tensor) -> BatchedCSR:
    """Of values (n,) or (B, n)."""
    n, device = values.shape[-1], values.device
    pattern = _cached(("diagonal", n, device), device, lambda: diagonal(n, device))
    return BatchedCSR._of(pattern, values)


def _per_sample(derivative: Tensor) -> BatchedCSR:
    return _diagonal(derivative.reshape(derivative.shape[0], math.prod(derivative.shape[1:])))


def _activation(op: str, input: Tensor, derivative: Callable[[Tensor, Tensor], Tensor]) -> BatchedCSR:
    """``derivative(one, input)``, by torch's own backward, so that kinks and NaN are as in torch."""
    _check_floating(op, "input", input)
    _check_batch(op, "input", input)
    return _per_sample(derivative(input.new_ones(()).expand_as(input), input))


def relu_jacobian(input: Tensor) -> BatchedCSR:
    """The diagonal of ``torch.relu`` at ``input`` ``(B, ...)``, one set of values per sample; zeros are stored."""
    return _activation("relu_jacobian", input, lambda one, x: _aten.threshold_backward(one, x, 0))


def leaky_relu_jacobian(input: Tensor, negative_slope: float = 0.01) -> BatchedCSR:
    """The diagonal of ``F.leaky_relu`` at ``input`` ``(B, ...)``, one set of values per sample."""
    return _activation(
        "leaky_relu_jacobian", input, lambda one, x: _aten.leaky_relu_backward(one, x, negative_slope, False)
    )


def gelu_jacobian(input: Tensor, approximate: str = "none") -> BatchedCSR:
    """The diagonal of ``F.gelu`` at ``input`` ``(B, ...)``, one set of values per sample."""
    return _activation("gelu_jacobian", input, lambda one, x: _aten.gelu_backward(one, x, approximate=approximate))


def tanh_jacobian(input: Tensor) -> BatchedCSR:
    """The diagonal of ``torch.tanh`` at ``input`` ``(B, ...)``, one set of values per sample."""
    return _activation("tanh_jacobian", input, lambda one, x: _aten.tanh_backward(one, x.tanh()))


def sigmoid_jacobian(input: Tensor) -> BatchedCSR:
    """The diagonal of ``torch.sigmoid`` at ``input`` ``(B, ...)``, one set of values per sample."""
    return _activation("sigmoid_jacobian", input, lambda one, x: _aten.sigmoid_backward(one, x.sigmoid()))


def diagonal_jacobian(derivative: Tensor) -> BatchedCSR:
    """The diagonal with these values, ``(B, ...)``: for activations of your own."""
    _check_floating("diagonal_jacobian", "derivative", derivative)
    _check_batch("diagonal_jacobian", "derivative", derivative)
    return _per_sample(derivative)


def dropout_jacobian(mask: Tensor, p: float = 0.5, *, dtype: torch.dtype | None = None) -> BatchedCSR:
    """The diagonal ``mask / (1 - p)`` of a dropout that kept ``mask``, bool ``(B, ...)``; zeros for p = 1."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"dropout_jacobian: mask must be a bool Tensor, got {getattr(mask, 'dtype', type(mask))}")
    _check_batch("dropout_jacobian", "mask", mask)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_jacobian: p must lie in [0, 1], got {p}")
    dtype = _dtype("dropout_jacobian", dtype)
    return _per_sample(mask.to(dtype) * (1 / (1 - p) if p < 1 else 0.0))


def flatten_jacobian(
    input_size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> BatchedCSR:
    """The identity over all elements of a sample of ``input_size``, for whatever only changes a shape."""
    op = "flatten_jacobian"
    n = math.prod(check_sizes(op, "input_size", input_size, None, "a sample size"))
    return _diagonal(torch.ones(n, dtype=_dtype(op, dtype), device=_device(device)))


def batch_norm_jacobian(
    input_size: Sequence[int], running_var: Tensor, weight: Tensor | None = None, eps: float = 1e-5
) -> BatchedCSR:
    """The diagonal ``weight / sqrt(running_var + eps)`` of a batch norm in evaluation mode, for ``(C, ...)``."""
    op = "batch_norm_jacobian"
    sizes = check_sizes(op, "input_size", input_size, None, "(C, ...)")
    if not sizes:
        raise ValueError(f"{op}: input_size must be (C, ...), got ()")
    for name, t in (("running_var", running_var), ("weight", weight)):
        if name == "weight" and t is None:
            continue
        _check_floating(op, name, t)
        if tuple(t.shape) != sizes[:1]:
            raise ValueError(f"{op}: {name} must be (C,) = ({sizes[0]},), got {tuple(t.shape)}")
    if weight is not None and weight.dtype != running_var.dtype:
        raise TypeError(f"{op}: weight must have the dtype of running_var, {running_var.dtype}, got {weight.dtype}")
    scale = (running_var + eps).sqrt()
    scale = scale.reciprocal() if weight is None else weight / scale
    return _diagonal(scale.unsqueeze(1).expand(-1, math.prod(sizes[1:])).reshape(-1))


# Windows --------------------------------------------------------------------------------------------------------------


class _Sliding(NamedTuple):
    """A layer that slides windows: its pattern, its tables on the device, and what is kept with them."""

    pattern: Pattern
    windows: Windows
    extra: Any = None


def _sliding(windows: Windows, groups: int, in_channels: int, out_channels: int, device: torch.device) -> _Sliding:
    """Of `groups` blocks of in_channels x out_channels copies of the tables."""
    rows, columns = groups * in_channels * windows.inputs, groups * out_channels * windows.outputs
    dtype = index_dtype(rows, columns, groups * in_channels * out_channels * windows.elements)
    windows = windows.to(device)
    crow, col = torch.ops.weft.conv_pattern(
        windows.tables, groups, in_channels, out_channels, windows.outputs, dtype == torch.int64
    )
    return _Sliding(Pattern(crow, col, (rows, columns)), windows)


def _conv_values(weight: Tensor, windows: Windows, groups: int) -> Tensor:
    """weight (groups * out_channels, in_channels, K)"""
    if differentiated_by_transform(weight):
        return conv_values_reference(weight, windows.tables, groups)
    return _weft_conv_values(weight, windows.tables, groups)


class Unwritten(NamedTuple):
    """A Jacobian whose values nobody writes: weft::layer_chain reads them where its layer has them."""

    pattern: Pattern
    source: Tensor | None = None
    """Of a convolution or a linear layer, which of its weights each element has."""
    reads: int = 0
    """As csrc/sparse/csr_chain.h says: -1 of a ReLU, positive of a max-pooling."""


class _Pruned(NamedTuple):
    """What is left of a pattern without the taps whose weight is zero."""

    kept: Tensor  # weight != 0
    pattern: Pattern
    source: Tensor  # which weight, or where taps fold which element of the whole pattern, each element has
    folds: bool


_PRUNED_SIZE = 8  # sets of zeros that are kept for one layer's settings


def _pruned(key: Hashable, weight: Tensor, windows: Windows, groups: int, owner: dict | None) -> _Pruned:
    """The pattern without zero weights, made again only when the set of zeros has changed. While a CUDA graph is
    captured nothing can be compared, and the last one is taken: of `owner`, where there is one."""
    # An empty list is on no device: there is nothing to wait for.
    known: list[_Pruned] = _cached(("pruned", key), torch.device("cpu"), list)
    last_key, last = owner.get("pruned", (None, None)) if owner is not None else (None, None)
    last = last if last_key == key else None
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        if last is None and not known:
            raise RuntimeError("prune=True: run once before a CUDA graph is captured, so that the pattern is known")
        return last or known[-1]
    if last is not None and owner.pop("same zeros", False):
        return last
    kept = weight.detach() != 0
    # The module's own last one first: each comparison waits for the device.
    for pruned in [last, *(p for p in reversed(known) if p is not last)]:
        if pruned is not None and torch.equal(kept, pruned.kept):
            break
    else:
        pruned, _ = made_to_stay(weight.device, lambda: _make_pruned(kept.clone(), windows, groups))
    known[:] = [*(p for p in known if p is not pruned), pruned][-_PRUNED_SIZE:]
    if owner is not None:
        owner["pruned"] = key, pruned
    return pruned


@contextlib.contextmanager
def zeros_compared(weights: Sequence[tuple[Tensor, dict]]) -> Iterator[bool]:
    """Inside, what a module keeps (`owner`) says whether its weight has the zeros that it had last: compared for all of
    them at once, because each comparison waits for the device. True where all have, and are known to."""
    pairs = [(w.detach(), owner) for w, owner in weights if "pruned" in owner]
    pairs = [(w, owner) for w, owner in pairs if owner["pruned"][1].kept.numel() == w.numel()]
    marked = []
    if len(pairs) > 1 and not (pairs[0][0].is_cuda and torch.cuda.is_current_stream_capturing()):
        device = pairs[0][0].device
        kept = [owner["pruned"][1].kept.reshape(-1) for _, owner in pairs]
        if all(t.device == device for t in (*kept, *(w for w, _ in pairs))) and torch.equal(
            torch.cat([(w != 0).reshape(-1) for w, _ in pairs]), torch.cat(kept)
        ):
            marked = [owner for _, owner in pairs]
    for owner in marked:
        owner["same zeros"] = True
    try:
        yield len(marked) == len(weights) > 0
    finally:
        for owner in marked:
            owner.pop("same zeros", None)


def _sources(weight: Tensor, windows: Windows, groups: int, chosen: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Which weight each element has, where no taps fold, of the chosen elements."""
    # Places of weights as floating numbers: float64 has them exactly up to 2^53.
    places = torch.arange(weight.numel(), dtype=torch.float64, device=weight.device).view(weight.shape)
    return torch.ops.weft.conv_values(places, windows.tables, groups)[chosen].to(dtype)


def _make_pruned(kept: Tensor, windows: Windows, groups: int) -> _Pruned:
    out_channels, in_channels = kept.shape[0] // groups, kept.shape[1]
    whole = _sliding(windows, groups, in_channels, out_channels, kept.device).pattern
    element = torch.ops.weft.conv_values(kept.float(), windows.tables, groups) != 0
    before = torch.cat([element.new_zeros(1, dtype=torch.int64), element.cumsum(0)])
    chosen = element.nonzero().squeeze(1)
    pattern = Pattern(before[whole.crow.long()].to(whole.crow.dtype), whole.col[chosen], whole.shape)
    dtype = index_dtype(kept.numel(), element.numel())
    source = chosen.to(dtype) if windows.folds else _sources(kept, windows, groups, chosen, dtype)
    return _Pruned(kept, pattern, source, windows.folds)


def _weighted(
    key: Hashable,
    weight: Tensor,
    windows: Windows,
    groups: int,
    prune: bool,
    owner: dict | None,
    whole: Callable,
    unwritten: bool = False,
) -> BatchedCSR | Unwritten | None:
    """weight (groups * out_channels, in_channels, K); `whole` gives the pattern with nothing left out. `unwritten`: not
    the values but where they are, None where taps fold."""
    if unwritten and windows.folds:
        return None
    if unwritten and not prune:
        pattern = whole().pattern
        make = functools.partial(_sources, weight.detach(), windows, groups, slice(None), pattern.crow.dtype)
        return Unwritten(pattern, _cached(("sources", key), weight.device, make))
    if not prune:
        return BatchedCSR._of(whole().pattern, _conv_values(weight, windows, groups))
    pruned = _pruned(key, weight, windows, groups, owner)
    if unwritten:
        return Unwritten(pruned.pattern, pruned.source.to(pruned.pattern.crow.dtype))
    source = _conv_values(weight * pruned.kept, windows, groups) if pruned.folds else weight.reshape(-1)
    if not (torch.is_grad_enabled() and source.requires_grad) and not differentiated_by_transform(source):
        return BatchedCSR._of(pruned.pattern, source.index_select(0, pruned.source))
    starts = _cached(
        ("starts", pruned.source.shape[0], pruned.source.dtype, weight.device),
        weight.device,
        lambda: torch.arange(pruned.source.shape[0] + 1, dtype=pruned.source.dtype, device=weight.device),
    )
    return BatchedCSR._of(pruned.pattern, gather(source, starts, pruned.source))


def _conv(
    op: str,
    dims: int,
    weight: Tensor,
    input_size: Sequence[int],
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
    padding_mode: str,
    prune: bool,
    owner: dict | None = None,
    unwritten: bool = False,
) -> BatchedCSR | Unwritten | None:
    _check_floating(op, "weight", weight)
    sizes = check_sizes(op, "input_size", input_size, dims + 1, "(C, L)" if dims == 1 else "(C, H, W)")
    if weight.dim() != dims + 2:
        raise ValueError(f"{op}: weight must have {dims + 2} dimensions, got {tuple(weight.shape)}")
    if not isinstance(groups, int) or groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"{op}: groups must divide the output channels, {weight.shape[0]}, got {groups}")
    if weight.shape[1] * groups != sizes[0]:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} in {groups} groups takes {weight.shape[1] * groups} channels, "
            f"input_size has {sizes[0]}"
        )
    kernel = tuple(weight.shape[2:])
    stride, dilation = tuple_of(f"{op}: stride", stride, dims), tuple_of(f"{op}: dilation", dilation, dims)
    padding = padding if isinstance(padding, str) else tuple_of(f"{op}: padding", padding, dims)
    settings = ("windows", sizes[1:], kernel, stride, padding, dilation, padding_mode, weight.device)
    windows = _cached(
        settings,
        weight.device,
        lambda: _windows.convolution(op, sizes[1:], kernel, stride, padding, dilation, padding_mode).to(weight.device),
    )
    out_channels, in_channels = weight.shape[0] // groups, weight.shape[1]
    key = ("conv", settings, groups, in_channels, out_channels)

    def whole() -> _Sliding:
        return _cached(key, weight.device, lambda: _sliding(windows, groups, in_channels, out_channels, weight.device))

    return _weighted(key, weight.flatten(2), windows, groups, prune, owner, whole, unwritten)


def conv1d_jacobian(
    weight: Tensor,
    input_size: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    *,
    prune: bool = False,
) -> BatchedCSR:
    """The transposed Jacobian of ``torch.nn.Conv1d`` for samples ``(C, L)``: see :func:`conv2d_jacobian`."""
    return _conv("conv1d_jacobian", 1, weight, input_size, stride, padding, dilation, groups, padding_mode, prune)


def conv2d_jacobian(
    weight: Tensor,
    input_size: Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    *,
    prune: bool = False,
) -> BatchedCSR:
    """The transposed Jacobian of ``torch.nn.Conv2d``, ``(C H W, C_out H_out W_out)``, values shared by the batch.

    Args:
        weight: ``(C_out, C / groups, kernel_height, kernel_width)``.
        input_size: ``(C, H, W)``.
        stride, padding, dilation, groups, padding_mode: as ``torch.nn.Conv2d`` takes them; ``padding`` may be
            ``"same"`` or ``"valid"``.
        prune: leaves out the taps whose weight is exactly zero. Waits for the device; the pattern is made again only
            when the set of zero weights has changed.

    Every pair of elements that a tap of the kernel joins is stored. Taps on zero padding are not; taps of other padding
    that fall on one element are summed. Differentiable in ``weight``.

    Raises:
        TypeError: ``weight`` is no floating tensor.
        ValueError: sizes or settings that torch refuses.
    """
    return _conv("conv2d_jacobian", 2, weight, input_size, stride, padding, dilation, groups, padding_mode, prune)


def full_pattern(rows: int, columns: int, device: torch.device) -> Pattern:
    """Of a matrix with every element stored."""
    return _blocks(1, rows, columns, device).pattern


def _blocks(groups: int, rows: int, columns: int, device: torch.device) -> _Sliding:
    """Of a matrix with so many full blocks on its diagonal."""
    return _cached(
        ("blocks", groups, rows, columns, device),
        device,
        lambda: _sliding(_point(device), groups, rows, columns, device),
    )


def _point(device: torch.device) -> Windows:
    """A window of one tap over one position."""
    return _cached(("point", device), device, lambda: _windows.join([_windows.sliding(1, 1, 1, 1, 0, 1)]).to(device))


def _linear(
    weight: Tensor,
    input_size: Sequence[int] | None,
    prune: bool,
    owner: dict | None = None,
    unwritten: bool = False,
) -> BatchedCSR | Unwritten | None:
    op = "linear_jacobian"
    _check_floating(op, "weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must be (out_features, in_features), got {tuple(weight.shape)}")
    out_features, in_features = weight.shape
    size = (in_features,) if input_size is None else tuple(input_size)
    size = check_sizes(op, "input_size", size, max(len(size), 1), "(..., in_features)")
    if size[-1] != in_features:
        raise ValueError(f"{op}: input_size must end in in_features, {in_features}, got {size}")
    groups, device = math.prod(size[:-1]), weight.device
    key = ("linear", groups, in_features, out_features, device)

    def whole() -> _Sliding:
        return _blocks(groups, in_features, out_features, device)

    if unwritten and groups != 1:
        return None
    if unwritten:
        return _weighted(key, weight.unsqueeze(2), _point(device), 1, prune, owner, whole, True)
    if prune and groups:
        repeated = weight.expand(groups, -1, -1).reshape(groups * out_features, in_features, 1)
        return _weighted(key, repeated, _point(device), groups, True, owner, whole)
    return BatchedCSR._of(whole().pattern, weight.t().expand(groups, -1, -1).reshape(-1))


def linear_jacobian(weight: Tensor, input_size: Sequence[int] | None = None, *, prune: bool = False) -> BatchedCSR:
    """The transposed Jacobian of ``torch.nn.Linear``, all of ``weight.T``, values shared by the batch.

    Args:
        weight: ``(out_features, in_features)``.
        input_size: the sample size, ``(..., in_features)``; with leading dimensions the matrix is block-diagonal.
        prune: leaves out the weights that are exactly zero, as in :func:`conv2d_jacobian`.
    """
    return _linear(weight, input_size, prune)


def _pool_windows(
    op: str,
    outputs: Sequence[int],
    sizes: Sequence[int],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Windows:
    settings = zip(sizes, outputs, kernel, stride, padding, dilation, strict=True)
    return _windows.join([_windows.sliding(n, m, k, s, p, d) for n, m, k, s, p, d in settings])


def max_pool2d_jacobian(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> BatchedCSR:
    """The transposed Jacobian of ``F.max_pool2d`` at ``input`` ``(B, C, H, W)``, one set of values per sample.

    Every element of every window is stored: 1 at the one that torch picks on this device, ties and NaN included, 0 at
    the others.
    """
    op = "max_pool2d_jacobian"
    sliding, settings = _max_pool(op, input, kernel_size, stride, padding, dilation, ceil_mode)
    crow, _, col, *_ = sliding.windows.tables
    return BatchedCSR._of(sliding.pattern, _max_pool_values(input.detach(), crow, col, *settings, sliding.extra))


def _max_pool(
    op: str,
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
) -> tuple[_Sliding, list[tuple[int, ...]]]:
    """The pattern, with the output's size beside it, and the settings for both dimensions."""
    _check_floating(op, "input", input)
    _check_batch(op, "input", input, 4)
    named = (
        ("kernel_size", kernel_size),
        ("stride", kernel_size if stride is None or stride == () else stride),
        ("padding", padding),
        ("dilation", dilation),
    )
    settings = [tuple_of(f"{op}: {name}", value, 2) for name, value in named]
    C, *sizes = input.shape[1:]
    key = ("max_pool", C, *sizes, *settings, ceil_mode, input.device)

    def make() -> _Sliding:
        meta = torch.empty(1, C, *sizes, device="meta")
        outputs = F.max_pool2d(meta, *settings, ceil_mode).shape[2:]  # which raises what torch raises
        made = _sliding(_pool_windows(op, outputs, sizes, *settings), C, 1, 1, input.device)
        return made._replace(extra=list(outputs))

    return _cached(key, input.device, make), settings


def unwritten_max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
) -> Unwritten:
    """For the indices that torch's max-pooling gives beside its output."""
    sliding, _ = _max_pool("max_pool2d_jacobian", input, kernel_size, stride, padding, dilation, ceil_mode)
    return Unwritten(sliding.pattern, reads=input.shape[2] * input.shape[3])


def unwritten_relu(output: Tensor) -> Unwritten:
    n, device = math.prod(output.shape[1:]), output.device
    return Unwritten(_cached(("diagonal", n, device), device, lambda: diagonal(n, device)), reads=-1)


def _averages(sliding: _Sliding, channels: int, dtype: torch.dtype) -> BatchedCSR:
    """`extra` has the value of each element of the tables, float64."""
    return BatchedCSR._of(sliding.pattern, sliding.extra.to(dtype).repeat(channels))


def avg_pool2d_jacobian(
    input_size: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> BatchedCSR:
    """The transposed Jacobian of ``F.avg_pool2d`` for samples ``(C, H, W)``, values shared by the batch."""
    op = "avg_pool2d_jacobian"
    C, *sizes = check_sizes(op, "input_size", input_size, 3, "(C, H, W)")
    kernel, stride, padding = (
        tuple_of(f"{op}: {name}", value, 2)
        for name, value in (
            ("kernel_size", kernel_size),
            ("stride", kernel_size if stride is None or stride == () else stride),
            ("padding", padding),
        )
    )
    dtype, device = _dtype(op, dtype), _device(device)
    key = ("avg_pool", C, *sizes, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override, device)

    def make() -> _Sliding:
        meta = torch.empty(1, max(C, 1), *sizes, device="meta")
        outputs = F.avg_pool2d(meta, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override).shape[2:]
        windows = _pool_windows(op, outputs, sizes, kernel, stride, padding, (1, 1))
        counts = []
        for n, m, k, s, p in zip(sizes, outputs, kernel, stride, padding, strict=True):
            start = torch.arange(m, device="cpu") * s - p
            stop = (start + k).clamp(max=n + p)
            counts.append(stop - start if count_include_pad else stop.clamp(max=n) - start.clamp(min=0))
        size = (counts[0][:, None] * counts[1]).flatten()
        if divisor_override is not None:
            size = torch.full_like(size, divisor_override)
        made = _sliding(windows, C, 1, 1, device)
        return made._replace(extra=size.double().reciprocal()[windows.col.long()].to(device))

    return _averages(_cached(key, device, make), C, dtype)


def adaptive_avg_pool2d_jacobian(
    input_size: Sequence[int],
    output_size: int | Sequence[int | None],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> BatchedCSR:
    """The transposed Jacobian of ``F.adaptive_avg_pool2d`` for samples ``(C, H, W)``, values shared by the batch."""
    op = "adaptive_avg_pool2d_jacobian"
    C, *sizes = check_sizes(op, "input_size", input_size, 3, "(C, H, W)")
    outputs = (output_size,) * 2 if output_size is None or isinstance(output_size, int) else tuple(output_size)
    if len(outputs) != 2 or any(m is not None and (not isinstance(m, int) or m < 0) for m in outputs):
        raise ValueError(f"{op}: output_size must be an int or two, each may be None, got {output_size!r}")
    outputs = tuple(n if m is None else m for n, m in zip(sizes, outputs, strict=True))
    if 0 in sizes:
        raise ValueError(f"{op}: input_size must have no empty dimension, got {(C, *sizes)}")
    dtype, device = _dtype(op, dtype), _device(device)

    def make() -> _Sliding:
        lines = [_windows.adaptive(n, m) for n, m in zip(sizes, outputs, strict=True)]
        windows = _windows.join(lines)
        counts = [torch.bincount(line.output, minlength=line.outputs) for line in lines]
        size = (counts[0][:, None] * counts[1]).flatten()
        made = _sliding(windows, C, 1, 1, device)
        return made._replace(extra=size.double().reciprocal()[windows.col.long()].to(device))

    return _averages(_cached(("adaptive", C, *sizes, outputs, device), device, make), C, dtype)
