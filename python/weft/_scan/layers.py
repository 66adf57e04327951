"""Recurrent layers whose gates depend on the input alone: a linear layer and one diagonal scan."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._base.over_ranks import TakesSlices
from .chain import check_tensor
from .linear import linear_scan

__all__ = ["RGLRU", "MinGRU", "MinLSTM"]

ACTIVATIONS = ("identity", "g")
_C = 8.0  # of RG-LRU


def _g(x: Tensor) -> Tensor:
    """x + 0.5 where x is not negative, else sigmoid(x): positive, continuous and growing."""
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


def _check_size(name: str, argument: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name}: {argument} must be an int, got {type(size).__name__}")
    if size <= 0:
        raise ValueError(f"{name}: {argument} must be positive, got {size}")


def _scanned(A: Tensor, b: Tensor, h_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """All states, and the last."""
    states = linear_scan(A, b, h_0)
    if states.size(0):
        return states, states[-1].clone()  # not a view: that would hold all states
    return states, b.new_zeros(b.shape[1:]) if h_0 is None else h_0.clone()


class _ScanLayer(TakesSlices, nn.Module):
    """What the layers share: layouts and the state."""

    input_size: int
    hidden_size: int
    batch_first: bool

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
        """A and b of h[t] = A[t] * h[t-1] + b[t], each (T, B, H), and the dtype of the output, from x (T, B, X)."""
        raise NotImplementedError

    def forward(self, input: Tensor, h_0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            input: ``(T, B, input_size)``; ``(B, T, input_size)`` with `batch_first`; ``(T, input_size)`` unbatched.
            h_0: state before the first step, ``(B, hidden_size)``, without the B unbatched; None for zeros.

        Returns:
            ``output``, the states after every step, laid out like the input and ``hidden_size`` wide; and ``h_n``, the
            last of them, laid out like `h_0`, to go on from.

        Raises:
            TypeError: an argument is no tensor, or a dtype does not fit.
            ValueError: a rank or a size does not fit.
            RuntimeError: devices differ.
        """
        name = type(self).__name__
        check_tensor(name, "input", input)
        batched, batch = input.dim() == 3, 0 if self.batch_first else 1
        layout = "B, T" if self.batch_first else "T, B"
        if not (batched or input.dim() == 2) or input.size(-1) != self.input_size:
            raise ValueError(
                f"{name}: input must be ({layout}, {self.input_size}) or (T, {self.input_size}), got "
                f"{tuple(input.shape)}; batch_first is {self.batch_first}"
            )
        x = input if batched else input.unsqueeze(batch)
        A, b, dtype = self._terms(x.transpose(0, 1) if self.batch_first else x)
        ranks = self._over_ranks
        if ranks is not None and not ranks.reads(h_0):
            h_0 = None
        if h_0 is not None:
            check_tensor(name, "h_0", h_0)
            shape = b.shape[1:] if batched else b.shape[2:]
            if h_0.shape != shape:
                raise ValueError(
                    f"{name}: h_0 must be {tuple(shape)}, got {tuple(h_0.shape)}; it is (B, H), or (H) unbatched, "
                    f"to go with input ({layout}, {self.input_size}), as batch_first is {self.batch_first}"
                )
            if torch.is_autocast_enabled(h_0.device.type):
                h_0 = h_0.to(b.dtype)
            if h_0.dtype != b.dtype:
                raise TypeError(f"{name}: h_0 must be {b.dtype}, as the states are, got {h_0.dtype}")
            h_0 = h_0.expand(b.shape[1:])
        states, h_n = _scanned(A, b, h_0) if ranks is None else ranks.scan(name, A, b, h_0)
        output = states.to(dtype)
        if self.batch_first:
            output = output.transpose(0, 1)
        return (output, h_n) if batched else (output.squeeze(batch), h_n.squeeze(0))


class _Min(_ScanLayer):
    """minGRU and minLSTM: gates and a candidate, all from one linear layer."""

    _gates: int

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        batch_first: bool = False,
        activation: str = "identity",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        _check_size(name, "input_size", input_size)
        _check_size(name, "hidden_size", hidden_size)
        if activation not in ACTIVATIONS:
            raise ValueError(f"{name}: activation must be 'identity' or 'g', got {activation!r}")
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.batch_first, self.activation = batch_first, activation
        self.linear = nn.Linear(input_size, (self._gates + 1) * hidden_size, bias, device, dtype)

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        if not self.bias:
            text += ", bias=False"
        if self.batch_first:
            text += ", batch_first=True"
        return text if self.activation == "identity" else f"{text}, activation={self.activation!r}"

    def _candidate(self, x: Tensor) -> Tensor:
        return _g(x) if self.activation == "g" else x


class MinGRU(_Min):
    """minGRU: a GRU whose gate and candidate do not look at the state, so that time runs in parallel.

    h[t] = (1 - z[t]) * h[t-1] + z[t] * c[t],  z[t] = sigmoid(W_z x[t] + b_z),  c[t] = act(W_h x[t] + b_h)

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        bias: with b_z and b_h. Default: True.
        batch_first: batched input and output are ``(B, T, features)``; states are not. Default: False.
        activation: act, ``"identity"`` (default) or ``"g"``: x + 0.5 where x is not negative, else sigmoid(x). With
            "g" the states are positive, those of the paper's log-space form, which :func:`weft.scan.linear_scan` does
            not need in order to stay finite.
        device, dtype: of the parameters.

    ``linear.weight`` is ``(2 H, input_size)``: W_z, then W_h.

    Source: Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, "Were RNNs All We Needed?" (2024), section 3.1 and appendix B.

    Example:
        >>> layer = weft.nn.MinGRU(10, 20)
        >>> output, h_n = layer(torch.randn(500, 3, 10))
        >>> output.shape, h_n.shape
        (torch.Size([500, 3, 20]), torch.Size([3, 20]))
        >>> next_output, h_n = layer(torch.randn(1, 3, 10), h_n)
    """

    _gates = 1

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
        z, candidate = self.linear(x).chunk(2, -1)
        b = torch.sigmoid(z) * self._candidate(candidate)
        return torch.sigmoid(-z), b, b.dtype


class MinLSTM(_Min):
    """minLSTM: an LSTM whose gates and candidate do not look at the state, so that time runs in parallel.

    h[t] = f[t] / (f[t] + i[t]) * h[t-1] + i[t] / (f[t] + i[t]) * c[t]
    f[t] = sigmoid(W_f x[t] + b_f),  i[t] = sigmoid(W_i x[t] + b_i),  c[t] = act(W_h x[t] + b_h)

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        bias: with b_f, b_i and b_h. Default: True.
        batch_first: batched input and output are ``(B, T, features)``; states are not. Default: False.
        activation: act, as of :class:`MinGRU`. Default: ``"identity"``.
        device, dtype: of the parameters.

    ``linear.weight`` is ``(3 H, input_size)``: W_f, W_i, then W_h.

    Source: Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, "Were RNNs All We Needed?" (2024), section 3.2 and appendix B.
    """

    _gates = 2

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
        gates = self.linear(x)
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
        hidden_size: H, features of the input and of the state.
        blocks: W_a and W_x are block-diagonal, with so many blocks; a divisor of H. Default: 1, which is full.
        bias: with b_a and b_x. Default: True.
        batch_first: batched input and output are ``(B, T, H)``; states are not. Default: False.
        device, dtype: of the parameters.

    ``weight`` is ``(blocks, 2 H / blocks, H / blocks)``, the rows of W_a first in every block; ``gate_bias`` is
    ``(blocks, 2 H / blocks)``; ``Lambda`` is ``(H)``, drawn so that a^8 is uniform in [0.9, 0.999]. a[t] is close to
    one, so half types run the recurrence in float32: `h_0` and h_n are float32 there, the output is not.

    Source: De, Smith, Fernando et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models" (2024), section 2.4. Checkpoints of RecurrentGemma keep -Lambda.

    Example:
        >>> layer = weft.nn.RGLRU(256, blocks=4)
        >>> output, h_n = layer(torch.randn(500, 3, 256))
    """

    def __init__(
        self,
        hidden_size: int,
        blocks: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_size("RGLRU", "hidden_size", hidden_size)
        _check_size("RGLRU", "blocks", blocks)
        if hidden_size % blocks:
            raise ValueError(f"RGLRU: blocks must divide hidden_size {hidden_size}, got {blocks}")
        self.input_size = self.hidden_size = hidden_size
        self.blocks, self.batch_first = blocks, batch_first
        width = hidden_size // blocks
        self.weight = nn.Parameter(torch.empty(blocks, 2 * width, width, device=device, dtype=dtype))
        if bias:
            self.gate_bias = nn.Parameter(torch.empty(blocks, 2 * width, device=device, dtype=dtype))
        else:
            self.register_parameter("gate_bias", None)
        self.Lambda = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew: weights normal with variance 1 / fan-in, biases zero."""
        with torch.no_grad():
            self.weight.normal_(std=self.weight.size(-1) ** -0.5)
            if self.gate_bias is not None:
                self.gate_bias.zero_()
            a_to_c = torch.empty(self.hidden_size, device=self.Lambda.device).uniform_(0.9, 0.999)
            log_a = a_to_c.log() / _C
            self.Lambda.copy_(log_a - torch.log(-torch.expm1(log_a)))

    def extra_repr(self) -> str:
        text = f"{self.hidden_size}"
        if self.blocks > 1:
            text += f", blocks={self.blocks}"
        if self.gate_bias is None:
            text += ", bias=False"
        return f"{text}, batch_first=True" if self.batch_first else text

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
        gates = torch.einsum("tbki,koi->tbko", x.unflatten(-1, (self.blocks, -1)), self.weight)
        dtype = gates.dtype
        if self.gate_bias is not None:
            gates = gates + self.gate_bias
        r, i = (gate.flatten(-2) for gate in torch.sigmoid(gates).chunk(2, -1))
        state = torch.promote_types(x.dtype, torch.float32)
        log_a = r.to(state) * (_C * F.logsigmoid(self.Lambda.to(state)))
        # The root of zero has no gradient: the least normal number instead.
        scale = torch.sqrt((-torch.expm1(2 * log_a)).clamp(min=torch.finfo(state).tiny))
        return torch.exp(log_a), scale * (i * x).to(state), dtype
