"""Layers whose gates depend on the input alone, in a GRU's place: linear layers and diagonal scans."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._base.arguments import constructor, name_after
from .layers import Device, ScanLayer, check_size

__all__ = ["RGLRU", "MinGRU", "MinLSTM"]

ACTIVATIONS = ("identity", "g")
_C = 8.0  # of RG-LRU


def _g(x: Tensor) -> Tensor:
    """x + 0.5 where x is not negative, else sigmoid(x): positive, continuous and growing."""
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


class _Min(ScanLayer):
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


class RGLRU(ScanLayer):
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
        check_size("RGLRU", "blocks", blocks)
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


for _kind in (MinGRU, MinLSTM, RGLRU):
    name_after(_kind, "forward")
