"""Layers that are linear in a complex state: diagonal scans between two linear layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._base.arguments import constructor, name_after
from .layers import Device, ScanLayer, check_size, check_sizes

__all__ = ["LRU", "S5"]


class _Complex(ScanLayer):
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
        check_size("LRU", "state_size", N)
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
        check_sizes("S5", state_size=P, blocks=blocks)
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


for _kind in (LRU, S5):
    name_after(_kind, "forward")
