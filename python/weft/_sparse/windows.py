"""Tables of what joins one channel of input with one of output, for layers that slide windows: see
csrc/sparse/conv_values.h. Integers on the CPU, made once per setting."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class Windows(NamedTuple):
    """The tables, and how many positions input and output have."""

    tables: list[Tensor]
    """crow, row, col, tap_crow, taps, tap_crow_t, taps_t"""
    inputs: int
    outputs: int

    def to(self, device: torch.device) -> Windows:
        return Windows([t.to(device) for t in self.tables], self.inputs, self.outputs)

    @property
    def col(self) -> Tensor:
        return self.tables[2]

    @property
    def elements(self) -> int:
        return self.tables[2].shape[0]

    @property
    def folds(self) -> bool:
        """Whether some element has several taps."""
        return self.tables[4].shape[0] != self.elements


class Line(NamedTuple):
    """One dimension: which input, output and tap meet, (m,) int64 each, and how many of each there are."""

    input: Tensor
    output: Tensor
    tap: Tensor
    inputs: int
    outputs: int
    taps: int


def sliding(n: int, outputs: int, kernel: int, stride: int, before: int, dilation: int, mode: str = "zeros") -> Line:
    """A window of ``kernel`` taps over ``n`` inputs, the first ``before`` ahead of the first input; what a tap reads
    outside is nothing in mode "zeros", else what torch.nn.functional.pad puts there."""
    output, tap = torch.meshgrid(torch.arange(outputs, device="cpu"), torch.arange(kernel, device="cpu"), indexing="ij")
    output, tap = output.flatten(), tap.flatten()
    place = output * stride - before + tap * dilation
    if mode == "zeros":
        inside = (place >= 0) & (place < n)
        place, output, tap = place[inside], output[inside], tap[inside]
    elif mode == "replicate":
        place = place.clamp(0, n - 1)
    elif mode == "circular":
        place = place % n
    else:
        place = (n - 1) - ((n - 1) - place.abs()).abs()
    return Line(place, output, tap, n, outputs, kernel)


def adaptive(n: int, outputs: int) -> Line:
    """Windows from floor(o n / outputs) to ceil((o + 1) n / outputs)."""
    o = torch.arange(outputs, device="cpu")
    start, stop = o * n // max(outputs, 1), -(-(o + 1) * n // max(outputs, 1))
    size = stop - start
    output = torch.repeat_interleave(o, size)
    tap = torch.arange(output.shape[0], device="cpu") - torch.repeat_interleave(size.cumsum(0) - size, size)
    return Line(start[output] + tap, output, tap, n, outputs, int(size.max()) if outputs else 0)


def join(lines: Sequence[Line]) -> Windows:
    """The tables of windows that are products of one line per dimension."""
    flat = lines[0]
    for line in lines[1:]:
        first, second = (
            i.flatten()
            for i in torch.meshgrid(
                torch.arange(len(flat.tap), device="cpu"), torch.arange(len(line.tap), device="cpu"), indexing="ij"
            )
        )
        flat = Line(
            *(a[first] * size + b[second] for a, b, size in zip(flat[:3], line[:3], line[3:], strict=True)),
            *(a * b for a, b in zip(flat[3:], line[3:], strict=True)),
        )
    return tabulate(flat)


def tabulate(line: Line) -> Windows:
    key = (line.input * line.outputs + line.output) * max(line.taps, 1) + line.tap
    key, order = key.sort()
    tap = line.tap[order]
    element_key = key // max(line.taps, 1)
    joined, element, count = torch.unique_consecutive(element_key, return_inverse=True, return_counts=True)
    row, col = joined // max(line.outputs, 1), joined % max(line.outputs, 1)
    by_tap = tap.argsort(stable=True)

    def offsets(counts: Tensor) -> Tensor:
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    tables = [
        offsets(torch.bincount(row, minlength=line.inputs)),
        row,
        col,
        offsets(count),
        tap,
        offsets(torch.bincount(tap, minlength=line.taps)),
        element[by_tap],
    ]
    return Windows([t.to(torch.int32) for t in tables], line.inputs, line.outputs)


def tuple_of(name: str, value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """``value`` for each dimension, as torch takes it."""
    # What modules have, at every step: asking whether it is a sequence takes longer than the rest.
    if type(value) is int:
        return (value,) * dims
    values = value if type(value) is tuple else tuple(value) if isinstance(value, Sequence) else (value,) * dims
    if len(values) == 1:
        values *= dims
    if len(values) != dims or not all(isinstance(v, int) for v in values):
        raise ValueError(f"{name} must be an int or {dims} of them, got {value!r}")
    return values


def check_sizes(op: str, name: str, sizes: object, dims: int | None, what: str) -> tuple[int, ...]:
    """A sample size, as ints; None for any number of them."""
    try:
        sizes = tuple(map(operator.index, sizes))
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} must be {what}, got {sizes!r}") from None
    if len(sizes) != (len(sizes) if dims is None else dims) or any(n < 0 for n in sizes):
        raise ValueError(f"{op}: {name} must be {what}, got {sizes}")
    return sizes


def convolution(
    op: str,
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: str | int | Sequence[int],
    dilation: tuple[int, ...],
    mode: str,
) -> Windows:
    """The windows of a convolution over positions ``sizes``; raises for what torch refuses."""
    dims = len(sizes)
    if mode not in PADDING_MODES:
        raise ValueError(f"{op}: padding_mode must be one of {', '.join(PADDING_MODES)}, got {mode!r}")
    if min(stride) < 1 or min(dilation) < 1 or min(kernel) < 1:
        raise ValueError(
            f"{op}: stride, dilation and the kernel must be positive, got {stride}, {dilation} and {kernel}"
        )
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f'{op}: padding must be "same", "valid" or ints, got {padding!r}')
        if padding == "same" and any(s != 1 for s in stride):
            raise ValueError(f'{op}: padding "same" needs stride 1, got {stride}')
        total = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilation, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in tuple_of(f"{op}: padding", padding, dims)]
    lines = []
    for n, k, s, d, (before, after) in zip(sizes, kernel, stride, dilation, sides, strict=True):
        if min(before, after) < 0:
            raise ValueError(f"{op}: padding must not be negative, got {padding}")
        limit = {"zeros": math.inf, "replicate": math.inf, "reflect": n - 1, "circular": n}[mode]
        if max(before, after) > limit or (mode != "zeros" and n == 0):
            raise ValueError(f"{op}: {mode} padding of {max(before, after)} is too wide for an input of {n}")
        span = n + before + after - d * (k - 1) - 1
        if span < 0:
            raise ValueError(
                f"{op}: a kernel of {d * (k - 1) + 1} is wider than the padded input, {n + before + after}"
            )
        lines.append(sliding(n, span // s + 1, k, s, before, d, mode))
    return join(lines)
