"""What layers over diagonal scans share: nn.GRU's arguments, layouts and states."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from .._base.arguments import NotScriptable
from .._base.over_ranks import TakesSlices
from .layer_input import check_like, check_padded, check_start
from .linear import linear_scan

__all__ = ["Device", "ScanLayer", "check_size", "check_sizes"]

_scan_cell = torch.ops.weft.scan_cell.default

Device: TypeAlias = torch.device | str | int | None


def check_size(name: str, argument: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name}: {argument} must be an int, got {type(size).__name__}")
    if size <= 0:
        raise ValueError(f"{name}: {argument} must be positive, got {size}")


def check_sizes(name: str, **sizes: object) -> None:
    for argument, size in sizes.items():
        check_size(name, argument, size)


class _Packed:
    """Where the rows of a PackedSequence lie in a padded (T, B, ...), whose sequences go from long to short."""

    def __init__(self, input: PackedSequence) -> None:
        self.input = input
        sizes = input.batch_sizes
        self.T, self.B = sizes.numel(), int(sizes[0])
        there = torch.arange(self.B)[None] < sizes[:, None]
        self.rows = there.flatten().nonzero().squeeze(1).to(input.data.device, non_blocking=True)

    def padded(self, t: Tensor, fill: float) -> Tensor:
        all_rows = t.new_full((self.T * self.B, t.size(-1)), fill)
        return all_rows.index_copy(0, self.rows, t).view(self.T, self.B, -1)

    def packed(self, t: Tensor) -> Tensor:
        return t.flatten(0, 1).index_select(0, self.rows)


class ScanLayer(NotScriptable, TakesSlices, nn.Module):
    """nn.GRU's arguments, layouts and states over recurrences h[t] = A[t] * h[t-1] + b[t].

    The parameters of the first layer's first direction have plain names, those of the others names that end in
    ``_l{k}`` and ``_l{k}_reverse``. A class below brings ``_add`` and ``_terms``, and what is read from the states."""

    input_size: int
    hidden_size: int

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int, bias: bool, batch_first: bool, dropout: float,
        bidirectional: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        check_sizes(name, input_size=input_size, hidden_size=hidden_size)
        if isinstance(num_layers, bool):
            raise TypeError(
                f"{name}: num_layers must be an int, got bool; the third argument is num_layers, as nn.GRU's"
            )
        check_size(name, "num_layers", num_layers)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise ValueError(f"{name}: dropout must be a number from 0 to 1, got {dropout!r}")
        if dropout and num_layers == 1:
            warnings.warn(f"{name}: dropout acts between layers, and there is one", stacklevel=4)
        self.input_size, self.hidden_size, self.num_layers, self.bias = input_size, hidden_size, num_layers, bias
        self.batch_first, self.dropout, self.bidirectional = batch_first, dropout, bidirectional

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _suffixes(self) -> Iterator[tuple[int, int, str]]:
        """(layer, direction, how the names of its parameters end)."""
        for layer in range(self.num_layers):
            for direction in range(self._directions):
                first = layer == direction == 0
                yield layer, direction, "" if first else f"_l{layer}" + ("_reverse" if direction else "")

    def _width(self, layer: int) -> int:
        """Features of a layer's input."""
        return self.input_size if layer == 0 else self._directions * self.hidden_size

    def _get(self, name: str, suffix: str):
        return getattr(self, name + suffix)

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        shown = (("num_layers", 1), ("bias", True), ("batch_first", False), ("dropout", 0.0), ("bidirectional", False))
        for name, usual in shown:
            if (value := getattr(self, name)) != usual:
                text += f", {name}={value}"
        return text

    @property
    def _state_size(self) -> int:
        return self.hidden_size

    @property
    def _parameter(self) -> Tensor:
        """One that has the dtype and device of the input."""
        raise NotImplementedError

    def _terms(self, x: Tensor, suffix: str) -> tuple[Tensor, Tensor, torch.dtype]:
        """A and b of h[t] = A[t] * h[t-1] + b[t], A like b or (H), and the dtype of the output, from x (..., X)."""
        raise NotImplementedError

    @property
    def _cell(self) -> str:
        """What weft::scan_cell calls it."""
        raise NotImplementedError

    def _weights(self, suffix: str) -> list[Tensor | None]:
        """What weft::scan_cell takes for it."""
        raise NotImplementedError

    def _read(self, states: Tensor, x: Tensor, suffix: str, dtype: torch.dtype) -> Tensor:
        """A direction's output (..., H), from its states and its input."""
        return states.to(dtype)

    def _between(self, x: Tensor) -> Tensor:
        """What stands between two layers."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    @overload
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, input: PackedSequence, hx: Tensor | None = None) -> tuple[PackedSequence, Tensor]: ...

    def forward(self, input, hx=None):
        """Run the layer.

        Args:
            input: ``(T, B, input_size)``; ``(B, T, input_size)`` with `batch_first`; ``(T, input_size)`` unbatched; or
                a PackedSequence.
            hx: states before the first step, ``(layers * directions, B, hidden_size)``, without the B unbatched; None
                for zeros. Of one layer and direction it may also be ``(B, hidden_size)``, or ``(hidden_size)``
                unbatched.

        Returns:
            ``output``, the last layer's after every step, laid out like the input and ``directions * hidden_size`` wide
            (a PackedSequence for a PackedSequence); and ``h_n``, the states after the last step, laid out like `hx`, to
            go on from.

        Raises:
            TypeError: an argument is no tensor, or a dtype does not fit.
            ValueError: a rank or a size does not fit.
            RuntimeError: devices differ.
        """
        name, packed, ranks = type(self).__name__, None, self._over_ranks
        if ranks is not None:
            ranks.check_own(name, input=input, hx=hx)
        if isinstance(input, PackedSequence):
            if ranks is not None:
                raise ValueError(f"{name}: a layer over ranks takes no PackedSequence")
            batched = self._check_input(input)
            packed, x = _Packed(input), input.data
            B = packed.B
        else:
            batched, batch = self._check_input(input), 0 if self.batch_first else 1
            x = input if batched else input.unsqueeze(batch)
            B = x.size(batch)
        starts, flat = self._starts(hx, B, batched)
        if packed is not None and starts is not None and input.sorted_indices is not None:
            starts = starts.index_select(1, input.sorted_indices)
        if ranks is not None:
            if self.bidirectional and hx is not None:
                raise ValueError(f"{name}: a bidirectional layer over ranks takes no hx: it begins at both ends")
            if not ranks.reads(hx):
                starts = None
        # A single step, as in decoding, is one operator for each layer and direction.
        time = 1 if self.batch_first else 0
        one = packed is None and x.size(time) == 1
        last, directions = [], []
        for layer, direction, suffix in self._suffixes():
            if layer > 0 and direction == 0:
                x = self._between(torch.cat(directions, -1) if self.bidirectional else directions[0])
                directions = []
            if ranks is not None:
                if direction == 0:
                    directions, ends = self._over_slices(x, layer, starts)
                    last += ends
                continue
            start = None if starts is None else starts[layer * self._directions + direction]
            if one:
                try:
                    output, h = _scan_cell(x.select(time, 0), start, self._weights(suffix), cell=self._cell)
                except TypeError:
                    if start is not None:  # of whose dtype many steps have the words
                        self._start(start, self._terms(x, suffix)[1])
                    raise
                output = output.unsqueeze(time)
            else:
                A, b, dtype = self._terms(x, suffix)
                start = None if start is None else self._start(start, b)
                states, h = self._scan(A, b, start, direction == 1, packed, B)
                output = self._read(states, x, suffix, dtype)
            directions.append(output)
            last.append(h)
        output = torch.cat(directions, -1) if self.bidirectional else directions[0]
        h_n = last[0].clone() if flat else torch.stack(last)  # never a view, which would hold all states
        if packed is not None:
            if input.unsorted_indices is not None:
                h_n = h_n.index_select(h_n.dim() - 2, input.unsorted_indices)
            return PackedSequence(output, input.batch_sizes, input.sorted_indices, input.unsorted_indices), h_n
        return (output, h_n) if batched else (output.squeeze(batch), h_n.squeeze(-2))

    def _check_input(self, input: Tensor | PackedSequence) -> bool:
        """Refuse what the layer does not take; whether it has a batch."""
        name, parameter = type(self).__name__, self._parameter
        if not isinstance(input, PackedSequence):
            return check_padded(name, input, self.input_size, self.batch_first, parameter)
        x = input.data
        if x.dim() != 2 or x.size(-1) != self.input_size:
            raise ValueError(f"{name}: data of input must be (N, {self.input_size}), got {tuple(x.shape)}")
        check_like(name, "data of input", x, parameter)
        return True

    @property
    def _layout(self) -> str:
        return "B, T" if self.batch_first else "T, B"

    def _starts(self, hx: Tensor | None, B: int, batched: bool) -> tuple[Tensor | None, bool]:
        """hx as (layers * directions, B, H), and whether it came without its first dimension."""
        if hx is None:
            return None, False
        name, rows, H = type(self).__name__, self.num_layers * self._directions, self._state_size
        check_start(name, "hx", hx, self._parameter.device)
        whole, one = ((rows, B, H), (B, H)) if batched else ((rows, H), (H,))
        if hx.shape == whole:
            return hx if batched else hx.unsqueeze(1), False
        if rows == 1 and hx.shape == one:
            return hx.view(1, B, H) if batched else hx.view(1, 1, H), True
        old = f" or {one}" if rows == 1 else ""
        raise ValueError(
            f"{name}: hx must be {whole}{old}, got {tuple(hx.shape)}; it is (layers * directions, B, H), without the B "
            f"unbatched, to go with input ({self._layout}, {self.input_size}), as batch_first is {self.batch_first}"
        )

    def _over_slices(self, x: Tensor, layer: int, starts: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """Of a layer whose input is a slice: the output of each direction, and the last state of the whole."""
        suffixes = [suffix for number, _, suffix in self._suffixes() if number == layer]
        scans, dtypes = [], []
        for direction, suffix in enumerate(suffixes):
            A, b, dtype = self._terms(x, suffix)
            start = None if starts is None else self._start(starts[layer * self._directions + direction], b)
            if self.batch_first:
                A, b = (t.transpose(0, 1) if t.dim() == 3 else t for t in (A, b))
            scans.append((A, b, start, direction == 1))
            dtypes.append(dtype)
        states, ends = zip(*self._over_ranks.scan(type(self).__name__, scans), strict=True)
        states = [s.transpose(0, 1) if self.batch_first else s for s in states]
        return [self._read(*each) for each in zip(states, [x] * len(states), suffixes, dtypes, strict=True)], [*ends]

    def _start(self, start: Tensor, b: Tensor) -> Tensor:
        if torch.is_autocast_enabled(start.device.type):
            start = start.to(b.dtype)
        if start.dtype != b.dtype:
            raise TypeError(f"{type(self).__name__}: hx must be {b.dtype}, as the states are, got {start.dtype}")
        return start

    def _scan(
        self, A: Tensor, b: Tensor, start: Tensor | None, reverse: bool, packed: _Packed | None, B: int
    ) -> tuple[Tensor, Tensor]:
        """A direction's states, laid out like b, and the last of them (B, H)."""
        if packed is not None:
            # Past a sequence's end the state stays: A is one there, and b zero.
            A, b = packed.padded(A.expand_as(b), 1.0), packed.padded(b, 0.0)
            states = linear_scan(A, b, start, reverse=reverse)
            return packed.packed(states), states[0 if reverse else -1]
        states = linear_scan(A, b, start, reverse=reverse, batch_first=self.batch_first)
        if states.size(1 if self.batch_first else 0):
            return states, states.select(1 if self.batch_first else 0, 0 if reverse else -1)
        return states, b.new_zeros(B, b.size(-1)) if start is None else start
