"""Recurrent layers whose gates depend on the input alone, in a GRU's place: linear layers and diagonal scans."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from .._base.arguments import NotScriptable, constructor, name_after
from .._base.over_ranks import TakesSlices
from .layer_input import check_like, check_padded, check_start
from .linear import linear_scan

__all__ = ["LRU", "RGLRU", "S5", "MinGRU", "MinLSTM"]

ACTIVATIONS = ("identity", "g")
_C = 8.0  # of RG-LRU

_scan_cell = torch.ops.weft.scan_cell.default

Device: TypeAlias = torch.device | str | int | None


def _g(x: Tensor) -> Tensor:
    """x + 0.5 where x is not negative, else sigmoid(x): positive, continuous and growing."""
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


def _check_size(name: str, argument: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name}: {argument} must be an int, got {type(size).__name__}")
    if size <= 0:
        raise ValueError(f"{name}: {argument} must be positive, got {size}")


def _sizes_named(name: str, **sizes: object) -> None:
    for argument, size in sizes.items():
        _check_size(name, argument, size)


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


class _ScanLayer(NotScriptable, TakesSlices, nn.Module):
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
        _sizes_named(name, input_size=input_size, hidden_size=hidden_size)
        if isinstance(num_layers, bool):
            raise TypeError(
                f"{name}: num_layers must be an int, got bool; the third argument is num_layers, as nn.GRU's"
            )
        _check_size(name, "num_layers", num_layers)
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
        one = packed is None and ranks is None and x.size(time) == 1
        last, directions = [], []
        for layer, direction, suffix in self._suffixes():
            if layer > 0 and direction == 0:
                x = self._between(torch.cat(directions, -1) if self.bidirectional else directions[0])
                directions = []
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
        if self._over_ranks is not None:
            if self.batch_first:
                A, b = (t.transpose(0, 1) if t.dim() == 3 else t for t in (A, b))
            states, last = self._over_ranks.scan(type(self).__name__, A, b, start, reverse)
            return states.transpose(0, 1) if self.batch_first else states, last
        states = linear_scan(A, b, start, reverse=reverse, batch_first=self.batch_first)
        if states.size(1 if self.batch_first else 0):
            return states, states.select(1 if self.batch_first else 0, 0 if reverse else -1)
        return states, b.new_zeros(B, b.size(-1)) if start is None else start


class _Min(_ScanLayer):
    """minGRU and minLSTM: gates and a candidate, all from one linear layer."""

    _gates: int

    @constructor
    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, device: Device = None, dtype: torch.dtype | None = None, *,
        activation: str = "identity",
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        if activation not in ACTIVATIONS:
            raise ValueError(f"{type(self).__name__}: activation must be 'identity' or 'g', got {activation!r}")
        self.activation = activation
        for layer, _, suffix in self._suffixes():
            linear = nn.Linear(self._width(layer), (self._gates + 1) * hidden_size, bias, device, dtype)
            self.add_module("linear" + suffix, linear)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.activation == "identity" else f"{text}, activation={self.activation!r}"

    @property
    def _parameter(self) -> Tensor:
        return self.linear.weight

    @property
    def _cell(self) -> str:
        return f"min_{'gru' if self._gates == 1 else 'lstm'}" + ("_g" if self.activation == "g" else "")

    def _weights(self, suffix: str) -> list[Tensor | None]:
        linear = self._get("linear", suffix)
        return [linear.weight, linear.bias]

    def _candidate(self, x: Tensor) -> Tensor:
        return _g(x) if self.activation == "g" else x


class MinGRU(_Min):
    """minGRU: a GRU whose gate and candidate do not look at the state, so that time runs in parallel.

    h[t] = (1 - z[t]) * h[t-1] + z[t] * c[t],  z[t] = sigmoid(W_z x[t] + b_z),  c[t] = act(W_h x[t] + b_h)

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        num_layers, batch_first, dropout, bidirectional: as of :class:`torch.nn.GRU`.
        bias: with b_z and b_h. Default: True.
        activation: act, ``"identity"`` (default) or ``"g"``: x + 0.5 where x is not negative, else sigmoid(x). With
            "g" the states are positive, those of the paper's log-space form, which :func:`weft.scan.linear_scan` does
            not need in order to stay finite.
        device, dtype: of the parameters.

    ``linear.weight`` is ``(2 H, input_size)``: W_z, then W_h; of layer k it is ``linear_l{k}.weight``, and in reverse
    ``linear_l{k}_reverse.weight``.

    Source: Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, "Were RNNs All We Needed?" (2024), section 3.1 and appendix B.

    Example:
        >>> layer = weft.nn.MinGRU(10, 20)
        >>> output, h_n = layer(torch.randn(500, 3, 10))
        >>> output.shape, h_n.shape
        (torch.Size([500, 3, 20]), torch.Size([1, 3, 20]))
        >>> next_output, h_n = layer(torch.randn(1, 3, 10), h_n)
    """

    _gates = 1

    def _terms(self, x: Tensor, suffix: str) -> tuple[Tensor, Tensor, torch.dtype]:
        z, candidate = self._get("linear", suffix)(x).chunk(2, -1)
        b = torch.sigmoid(z) * self._candidate(candidate)
        return torch.sigmoid(-z), b, b.dtype


class MinLSTM(_Min):
    """minLSTM: an LSTM whose gates and candidate do not look at the state, so that time runs in parallel.

    h[t] = f[t] / (f[t] + i[t]) * h[t-1] + i[t] / (f[t] + i[t]) * c[t]
    f[t] = sigmoid(W_f x[t] + b_f),  i[t] = sigmoid(W_i x[t] + b_i),  c[t] = act(W_h x[t] + b_h)

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        num_layers, batch_first, dropout, bidirectional: as of :class:`torch.nn.GRU`.
        bias: with b_f, b_i and b_h. Default: True.
        activation: act, as of :class:`MinGRU`. Default: ``"identity"``.
        device, dtype: of the parameters.

    ``linear.weight`` is ``(3 H, input_size)``: W_f, W_i, then W_h; further names as of :class:`MinGRU`.

    Source: Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, "Were RNNs All We Needed?" (2024), section 3.2 and appendix B.
    """

    _gates = 2

    def _terms(self, x: Tensor, suffix: str) -> tuple[Tensor, Tensor, torch.dtype]:
        gates = self._get("linear", suffix)(x)
        f, i, candidate = gates.chunk(3, -1)
        # sigmoid(f) / (sigmoid(f) + sigmoid(i)) without a quotient of two numbers that may both be zero. Autocast takes
        # softplus to float32.
        more = (F.softplus(-i) - F.softplus(-f)).to(gates.dtype)
        return torch.sigmoid(more), torch.sigmoid(-more) * self._candidate(candidate), gates.dtype


class RGLRU(_ScanLayer):
    """The real-gated linear recurrent unit (RG-LRU) of Griffin.

    h[t] = a[t] * h[t-1] + sqrt(1 - a[t]^2) * (i[t] * x[t]),  a[t] = a^(8 r[t]),  a = sigmoid(Lambda)
    r[t] = sigmoid(W_a x[t] + b_a),  i[t] = sigmoid(W_x x[t] + b_x)

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state; None is `input_size`. Where a layer's input is not H wide, a linear
            layer, ``projection``, takes it there.
        num_layers, batch_first, dropout, bidirectional: as of :class:`torch.nn.GRU`.
        bias: with b_a and b_x, and with one of a projection. Default: True.
        blocks: W_a and W_x are block-diagonal, with so many blocks; a divisor of H. Default: 1, which is full.
        device, dtype: of the parameters.

    ``weight`` is ``(blocks, 2 H / blocks, H / blocks)``, the rows of W_a first in every block; ``gate_bias`` is
    ``(blocks, 2 H / blocks)``; ``Lambda`` is ``(H)``, drawn so that a^8 is uniform in [0.9, 0.999]. a[t] is close to
    one, so half types run the recurrence in float32: `hx` and h_n are float32 there, the output is not. Further names
    end as those of :class:`MinGRU`.

    Source: De, Smith, Fernando et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models" (2024), section 2.4. Checkpoints of RecurrentGemma keep -Lambda.

    Example:
        >>> layer = weft.nn.RGLRU(256, blocks=4)
        >>> output, h_n = layer(torch.randn(500, 3, 256))
    """

    @constructor
    def __init__(
        self, input_size: int | None = None, hidden_size: int | None = None, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, device: Device = None,
        dtype: torch.dtype | None = None, *, blocks: int = 1,
    ) -> None:  # fmt: skip
        given = hidden_size if input_size is None else input_size
        H = given if hidden_size is None else hidden_size
        super().__init__(given, H, num_layers, bias, batch_first, dropout, bidirectional)  # type: ignore[arg-type]
        _check_size("RGLRU", "blocks", blocks)
        if H % blocks:  # type: ignore[operator]
            raise ValueError(f"RGLRU: blocks must divide hidden_size {H}, got {blocks}")
        self.blocks = blocks
        width = self.hidden_size // blocks
        made = {"device": device, "dtype": dtype}
        for layer, _, suffix in self._suffixes():
            if self._width(layer) != H:
                self.add_module("projection" + suffix, nn.Linear(self._width(layer), self.hidden_size, bias, **made))
            self.register_parameter("weight" + suffix, nn.Parameter(torch.empty(blocks, 2 * width, width, **made)))
            gate_bias = nn.Parameter(torch.empty(blocks, 2 * width, **made)) if bias else None
            self.register_parameter("gate_bias" + suffix, gate_bias)
            self.register_parameter("Lambda" + suffix, nn.Parameter(torch.empty(self.hidden_size, **made)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew: weights normal with variance 1 / fan-in, biases zero."""
        with torch.no_grad():
            for layer, _, suffix in self._suffixes():
                if self._width(layer) != self.hidden_size:
                    self._get("projection", suffix).reset_parameters()
                weight, gate_bias, Lambda = (self._get(n, suffix) for n in ("weight", "gate_bias", "Lambda"))
                weight.normal_(std=weight.size(-1) ** -0.5)
                if gate_bias is not None:
                    gate_bias.zero_()
                a_to_c = torch.empty(self.hidden_size, device=Lambda.device).uniform_(0.9, 0.999)
                log_a = a_to_c.log() / _C
                Lambda.copy_(log_a - torch.log(-torch.expm1(log_a)))

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", blocks={self.blocks}" if self.blocks > 1 else "")

    @property
    def _parameter(self) -> Tensor:
        return self.weight

    _cell = "rg_lru"

    def _weights(self, suffix: str) -> list[Tensor | None]:
        linear = getattr(self, "projection" + suffix, None)
        projection = [None, None] if linear is None else [linear.weight, linear.bias]
        return [*(self._get(n, suffix) for n in ("weight", "gate_bias", "Lambda")), *projection]

    def _projected(self, x: Tensor, suffix: str) -> Tensor:
        return x if x.size(-1) == self.hidden_size else self._get("projection", suffix)(x)

    def _terms(self, x: Tensor, suffix: str) -> tuple[Tensor, Tensor, torch.dtype]:
        x = self._projected(x, suffix)
        weight, gate_bias, Lambda = (self._get(n, suffix) for n in ("weight", "gate_bias", "Lambda"))
        gates = torch.einsum("...ki,koi->...ko", x.unflatten(-1, (self.blocks, -1)), weight)
        dtype = gates.dtype
        if gate_bias is not None:
            gates = gates + gate_bias
        r, i = (gate.flatten(-2) for gate in torch.sigmoid(gates).chunk(2, -1))
        state = torch.promote_types(x.dtype, torch.float32)
        log_a = r.to(state) * (_C * F.logsigmoid(Lambda.to(state)))
        # The root of zero has no gradient: the least normal number instead.
        scale = torch.sqrt((-torch.expm1(2 * log_a)).clamp(min=torch.finfo(state).tiny))
        return torch.exp(log_a), scale * (i * x).to(state), dtype


class _Complex(_ScanLayer):
    """LRU and S5: h[t] = lambda * h[t-1] + B x[t] in complex numbers, y[t] = Re(C h[t]) + D x[t]. Complex parameters
    are pairs of numbers: B is (N, 2, X), C is (H, N, 2)."""

    takes_slices = False

    def _make(self, N: int, device: Device, dtype: torch.dtype | None) -> None:
        made = {"device": device, "dtype": dtype}
        for layer, _, suffix in self._suffixes():
            X, H = self._width(layer), self.hidden_size
            shapes = dict.fromkeys(self._vectors, (N,)) | {
                "B": (N, 2, X),
                "C": (H, N, 2),
                "D": (H,) if X == H else (H, X),
            }
            for name, shape in shapes.items():
                there = name != "D" or self.bias
                self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, **made)) if there else None)
        self._states = N

    @property
    def _state_size(self) -> int:
        return self._states

    @property
    def _parameter(self) -> Tensor:
        return self.B

    def _draw_D(self, suffix: str) -> None:
        D = self._get("D", suffix)
        if D is not None:
            D.normal_(std=1.0 if D.dim() == 1 else D.size(1) ** -0.5)

    def _system(self, suffix: str, state: torch.dtype) -> tuple[Tensor, Tensor]:
        """lambda (N), complex, and B (N, 2, X) as the recurrence takes them."""
        raise NotImplementedError

    def _terms(self, x: Tensor, suffix: str) -> tuple[Tensor, Tensor, torch.dtype]:
        state = torch.promote_types(self._get("B", suffix).dtype, torch.float32)
        A, B = self._system(suffix, state)
        pairs = F.linear(x, B.flatten(0, 1).to(x.dtype))
        b = torch.view_as_complex(pairs.to(state).unflatten(-1, (-1, 2)))
        return A, b, pairs.dtype

    _vectors: tuple[str, ...]

    def _weights(self, suffix: str) -> list[Tensor | None]:
        return [self._get(n, suffix) for n in (*self._vectors, "B", "C", "D")]

    def _read(self, states: Tensor, x: Tensor, suffix: str, dtype: torch.dtype) -> Tensor:
        C, D = self._get("C", suffix), self._get("D", suffix)
        # Re(C h) of pairs is one real product with (re, -im).
        weight = torch.stack((C[..., 0], -C[..., 1]), -1).flatten(1) * self._parts
        y = F.linear(torch.view_as_real(states).flatten(-2).to(dtype), weight.to(dtype))
        if D is None:
            return y
        return y + (D * x if D.dim() == 1 else F.linear(x, D)).to(y.dtype)

    _parts = 1.0
    """How many conjugates a state stands for."""

    def _between(self, x: Tensor) -> Tensor:
        return super()._between(F.gelu(x))  # without it two layers would be one linear map


class LRU(_Complex):
    """The linear recurrent unit: a diagonal recurrence over complex states, stable by its parametrisation.

    h[t] = lambda * h[t-1] + gamma * (B x[t]),  y[t] = Re(C h[t]) + D x[t]
    lambda = exp(-exp(nu_log) + i exp(theta_log)),  gamma = exp(gamma_log)

    Args:
        input_size: features of the input.
        hidden_size: H, features of the output.
        num_layers, batch_first, dropout, bidirectional: as of :class:`torch.nn.GRU`. A GELU stands between two layers.
        bias: with D. Default: True.
        state_size: N, complex states. Default: H.
        r_min, r_max, max_phase: abs(lambda) is drawn between r_min and r_max, uniformly on the ring's area, its phase
            from 0 to max_phase. Default: 0, 1 and 2 pi.
        device, dtype: of the parameters.

    `hx` and h_n are complex, ``(layers * directions, B, N)``. ``nu_log``, ``theta_log`` and ``gamma_log`` are ``(N)``,
    ``B`` is ``(N, 2, input_size)`` and ``C`` ``(H, N, 2)``, pairs of real and imaginary parts, ``D`` is ``(H)`` where
    the input is H wide, else ``(H, input_size)``; further names end as those of :class:`MinGRU`. Half types run the
    recurrence in complex64.

    Source: Orvieto, Smith, Gu, Fernando, Gulcehre, Pascanu, De, "Resurrecting Recurrent Neural Networks for Long
    Sequences" (2023), section 3 and appendix A.

    Example:
        >>> layer = weft.nn.LRU(10, 20)
        >>> output, h_n = layer(torch.randn(500, 3, 10))
        >>> output.shape, h_n.shape, h_n.dtype
        (torch.Size([500, 3, 20]), torch.Size([1, 3, 20]), torch.complex64)
    """

    _cell, _vectors = "lru", ("nu_log", "theta_log", "gamma_log")

    @constructor
    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, device: Device = None, dtype: torch.dtype | None = None, *,
        state_size: int | None = None, r_min: float = 0.0, r_max: float = 1.0, max_phase: float = 2 * math.pi,
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        N = hidden_size if state_size is None else state_size
        _check_size("LRU", "state_size", N)
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(f"LRU: r_min and r_max must be 0 <= r_min < r_max <= 1, got {r_min} and {r_max}")
        if not 0 < max_phase <= 2 * math.pi:
            raise ValueError(f"LRU: max_phase must be from 0 to 2 pi, got {max_phase}")
        self.state_size, self.r_min, self.r_max, self.max_phase = N, r_min, r_max, max_phase
        self._make(N, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as the paper's appendix A does."""
        with torch.no_grad():
            for _, _, suffix in self._suffixes():
                nu_log, theta_log, gamma_log, B, C = (
                    self._get(n, suffix) for n in ("nu_log", "theta_log", "gamma_log", "B", "C")
                )
                u, phase = torch.rand(2, self.state_size, device=B.device).clamp(min=1e-6)
                square = u * (self.r_max**2 - self.r_min**2) + self.r_min**2
                square = square.clamp(max=1 - 1e-6)
                nu_log.copy_(torch.log(-0.5 * torch.log(square)))
                theta_log.copy_(torch.log(self.max_phase * phase))
                gamma_log.copy_(0.5 * torch.log1p(-square))
                B.normal_(std=(2 * B.size(-1)) ** -0.5)
                C.normal_(std=self.state_size**-0.5)
                self._draw_D(suffix)

    def _system(self, suffix: str, state: torch.dtype) -> tuple[Tensor, Tensor]:
        nu_log, theta_log, gamma_log, B = (
            self._get(n, suffix).to(state) for n in ("nu_log", "theta_log", "gamma_log", "B")
        )
        return torch.polar(torch.exp(-torch.exp(nu_log)), torch.exp(theta_log)), torch.exp(gamma_log)[:, None, None] * B


class S5(_Complex):
    """The simplified state-space layer S5: one diagonal system with all inputs and outputs, from HiPPO.

    h[t] = exp(Lambda dt) * h[t-1] + (exp(Lambda dt) - 1) / Lambda * (B x[t]),  y[t] = 2 Re(C h[t]) + D x[t]
    dt = exp(log_step), a time step for every state; a state stands for itself and its conjugate.

    Args:
        input_size: features of the input.
        hidden_size: H, features of the output.
        num_layers, batch_first, dropout, bidirectional: as of :class:`torch.nn.GRU`. A GELU stands between two layers.
        bias: with D. Default: True.
        state_size: P, even; P / 2 complex states are kept. Default: H, and one more where that is odd.
        blocks: HiPPO matrices on the diagonal of the first system; P / blocks is even. Default: 1.
        dt_min, dt_max: log_step is drawn uniformly between their logarithms. Default: 0.001 and 0.1.
        device, dtype: of the parameters.

    `hx` and h_n are complex, ``(layers * directions, B, P / 2)``. ``Lambda_re``, ``Lambda_im`` and ``log_step`` are
    ``(P / 2)``, ``B`` ``(P / 2, 2, input_size)`` and ``C`` ``(H, P / 2, 2)``, pairs of real and imaginary parts; ``D``
    and further names are as of :class:`LRU`. Lambda_re is taken as at most -1e-4. Half types run the recurrence in
    complex64.

    Source: Smith, Warrington, Linderman, "Simplified State Space Layers for Sequence Modeling" (ICLR 2023), section 3
    and appendix B.
    """

    _cell, _vectors = "s5", ("Lambda_re", "Lambda_im", "log_step")
    _parts = 2.0

    @constructor
    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, device: Device = None, dtype: torch.dtype | None = None, *,
        state_size: int | None = None, blocks: int = 1, dt_min: float = 0.001, dt_max: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        P = hidden_size + hidden_size % 2 if state_size is None else state_size
        _sizes_named("S5", state_size=P, blocks=blocks)
        if P % (2 * blocks):
            raise ValueError(f"S5: state_size must be a multiple of 2 * blocks = {2 * blocks}, got {P}")
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"S5: dt_min and dt_max must be 0 < dt_min <= dt_max, got {dt_min} and {dt_max}")
        self.state_size, self.blocks, self.dt_min, self.dt_max = P, blocks, dt_min, dt_max
        self._make(P // 2, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew: Lambda and its eigenvectors from HiPPO-N, B and C normal, variance 1 / fan-in."""
        values, V = _hippo(self.state_size // self.blocks)
        values = values.repeat(self.blocks)
        with torch.no_grad():
            for _, _, suffix in self._suffixes():
                Lambda_re, Lambda_im, log_step, B, C = (
                    self._get(n, suffix) for n in ("Lambda_re", "Lambda_im", "log_step", "B", "C")
                )
                Lambda_re.copy_(values.real)
                Lambda_im.copy_(values.imag)
                log_step.uniform_(math.log(self.dt_min), math.log(self.dt_max))
                parts, X, H = self.state_size // self.blocks, B.size(-1), self.hidden_size
                real_B = torch.randn(self.blocks, parts, X, dtype=torch.float64) * X**-0.5
                real_C = torch.randn(H, self.blocks, parts, dtype=torch.float64) * self.state_size**-0.5
                B.copy_(torch.view_as_real((V.mH @ real_B.to(V.dtype)).flatten(0, 1)).movedim(-1, 1))
                C.copy_(torch.view_as_real((real_C.to(V.dtype) @ V).flatten(1)))
                self._draw_D(suffix)

    def _system(self, suffix: str, state: torch.dtype) -> tuple[Tensor, Tensor]:
        Lambda_re, Lambda_im, log_step, B = (
            self._get(n, suffix).to(state) for n in ("Lambda_re", "Lambda_im", "log_step", "B")
        )
        Lambda = torch.complex(Lambda_re.clamp(max=-1e-4), Lambda_im)
        A = torch.exp(Lambda * torch.exp(log_step))
        wide = ((A - 1) / Lambda)[:, None] * torch.complex(B[:, 0], B[:, 1])
        return A, torch.view_as_real(wide).movedim(-1, 1)


def _hippo(N: int) -> tuple[Tensor, Tensor]:
    """Half of the eigenvalues of HiPPO-N, of each pair of conjugates one, (N / 2), and their eigenvectors (N, N / 2).

    HiPPO-LegS is normal but for a matrix of rank one; S5, section 2.3 and appendix B.1.1."""
    n = torch.arange(N, dtype=torch.float64)
    root = torch.sqrt(2 * n + 1)
    legs = -(torch.tril(root[:, None] * root, -1) + torch.diag(n + 1))
    low_rank = torch.sqrt(n + 0.5)
    normal = legs + low_rank[:, None] * low_rank
    skew = normal + 0.5 * torch.eye(N, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(-1j * skew.to(torch.complex128))
    half = values.numel() // 2
    return torch.complex(torch.full((half,), -0.5, dtype=torch.float64), values[half:]), vectors[:, half:]


for _kind in (MinGRU, MinLSTM, RGLRU, LRU, S5):
    name_after(_kind, "forward")
