"""weft.nn.RNNCell, GRUCell and LSTMCell: torch.nn's cells, a step of which is one op."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import Proxy

from .._base.torch_private import in_forward_mode, in_transform, maps_alone
from .layers import leaf, leaves_weft
from .table import traits

__all__ = ["ALGORITHMS", "GRUCell", "LSTMCell", "RNNCell", "choose"]

Device: TypeAlias = torch.device | str | int | None

ALGORITHMS = ("auto", "fused", "torch")

CPU_SEQUENCES, CPU_HIDDEN = 4, 256
"""On a CPU "auto" leaves steps to torch that have more of both: they are torch's products, beside which the rest is
nothing, and neither was faster in all cases. Of up to so many sequences the op makes the products itself. A compiled
graph, which does not look at the batch, always has the op."""

_rnn_cell = torch.ops.weft.rnn_cell.default


class Choice(NamedTuple):
    """What runs, and why."""

    algorithm: str
    reason: str


class _Cell:
    """What the three cells share: the step by Weft's op. Below it stands torch's cell, whose forward runs everything
    else and has the words for what is wrong."""

    # An attribute of the class, so that cells which accelerate made and older pickles have it.
    _algorithm = "auto"
    _accelerated = False
    """Whether weft.accelerate has put it in a torch cell's place."""
    _parameters: dict[str, Tensor | None]
    hidden_size: int

    @property
    def algorithm(self) -> str:
        """The algorithm asked for; may be set at any time."""
        return self._algorithm

    @algorithm.setter
    def algorithm(self, name: str) -> None:
        if name not in ALGORITHMS:
            known = ", ".join(map(repr, ALGORITHMS))
            raise ValueError(f"{type(self).__name__}: algorithm must be one of {known}, got {name!r}")
        self._algorithm = name

    def extra_repr(self) -> str:
        text = super().extra_repr()  # type: ignore[misc]
        text = text if self._algorithm == "auto" else f"{text}, algorithm={self._algorithm!r}"
        return f"{text}, accelerated=True" if self._accelerated else text

    def _weights(self) -> list[Tensor | None]:
        parameters = self._parameters
        try:
            return [parameters[name] for name in _WEIGHTS]
        except KeyError:  # a parametrization, or weight_norm, computes it
            return [getattr(self, name) for name in _WEIGHTS]

    def _step(self, cell: str, input: Tensor, *state: Tensor) -> tuple[Tensor, Tensor] | None:
        """h and c after the step; None where torch's cell is to run."""
        if choose(self, input).algorithm == "torch":
            return None
        batched = input.dim() == 2
        if not batched:
            input, state = input.unsqueeze(0), tuple(s.unsqueeze(0) for s in state)
        if not state:
            state = (input.new_zeros(input.shape[0], self.hidden_size),) * traits(cell).states
        try:
            h, c, _ = _rnn_cell(input, state[0], state[1] if len(state) > 1 else None, *self._weights(), cell=cell)
        except (NotImplementedError, TypeError, ValueError):
            return None
        return (h, c) if batched else (h.squeeze(0), c.squeeze(0))


_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def choose(module: _Cell, input: Tensor) -> Choice:
    """What runs a step, and why."""
    # maps_alone cannot be traced.
    if in_forward_mode() or (in_transform() and (torch.compiler.is_compiling() or not maps_alone())):
        return Choice("torch", "torch.func and forward-mode AD cannot differentiate Weft's op")
    if leaves_weft():
        return Choice("torch", "the graph is to run where Weft is not")
    asked = module._algorithm
    if asked != "auto":
        return Choice(asked, f'algorithm="{asked}" was asked for')
    if input.device.type == "cpu" and module.hidden_size > CPU_HIDDEN and not torch.compiler.is_compiling():
        batch = input.shape[0] if input.dim() == 2 else 1
        if batch > CPU_SEQUENCES:
            return Choice(
                "torch", f"of more than {CPU_SEQUENCES} sequences and {CPU_HIDDEN} units the products are all"
            )
    return Choice("fused", "one op for both products and the gates")


class _OneState(_Cell):
    """RNNCell and GRUCell: hx and what is returned are tensors."""

    def _forward(self, cell: str, input: Tensor, hx: Tensor | None) -> Tensor:
        if isinstance(input, Proxy):
            return leaf(self, input, hx)
        step = None if hx is not None and hx.dim() != input.dim() else self._step(cell, input, *_states(hx))
        return super().forward(input, hx) if step is None else step[0]  # type: ignore[misc]


def _states(hx: Tensor | None) -> tuple[Tensor, ...]:
    return () if hx is None else (hx,)


class RNNCell(_OneState, torch.nn.RNNCell):
    """:class:`torch.nn.RNNCell` by one op: h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or ReLU.

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        bias: with b_ih and b_hh. Default: True.
        nonlinearity: "tanh" (default) or "relu".
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`. Default: "auto".

    The parameters, their names and their initialisation are those of :class:`torch.nn.RNNCell`, so a state_dict goes
    both ways; arguments are refused as torch refuses them. An unknown `algorithm` is a ValueError.

    Example:
        >>> cell = weft.nn.RNNCell(10, 20)
        >>> h = torch.zeros(3, 20)
        >>> for x in torch.randn(6, 3, 10):
        ...     h = cell(x, h)
        >>> h.shape
        torch.Size([3, 20])
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh",
        device: Device = None, dtype: torch.dtype | None = None, *, algorithm: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, bias, nonlinearity, device, dtype)
        self.algorithm = algorithm

    @property
    def _cell(self) -> str:
        return f"rnn_{self.nonlinearity}"

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """One step.

        Args:
            input: ``(B, input_size)``, or ``(input_size)`` unbatched.
            hx: the state ``(B, hidden_size)``, without the B unbatched; None for zeros.

        Returns:
            the state after the step, laid out like `hx`.

        Raises:
            ValueError: the rank of an argument does not fit.
            RuntimeError: a size, dtype or device does not fit.
        """
        return self._forward(self._cell, input, hx)


class GRUCell(_OneState, torch.nn.GRUCell):
    """:class:`torch.nn.GRUCell` by one op. Gates in torch's order:

    r = sigmoid(W_ir x + b_ir + W_hr h + b_hr), z likewise, n = tanh(W_in x + b_in + r (W_hn h + b_hn)),
    h' = (1 - z) n + z h.

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        bias: with b_ih and b_hh. Default: True.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`. Default: "auto".

    The parameters, their names and their initialisation are those of :class:`torch.nn.GRUCell`, so a state_dict goes
    both ways; arguments are refused as torch refuses them. An unknown `algorithm` is a ValueError.

    Example:
        >>> cell = weft.nn.GRUCell(10, 20)
        >>> cell(torch.randn(3, 10), torch.randn(3, 20)).shape
        torch.Size([3, 20])
    """

    _cell = "gru"

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, algorithm: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.algorithm = algorithm

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """One step: see :meth:`weft.nn.RNNCell.forward`."""
        return self._forward("gru", input, hx)


class LSTMCell(_Cell, torch.nn.LSTMCell):
    """:class:`torch.nn.LSTMCell` by one op. Gates i, f, g, o in torch's order:

    c' = f c + i g and h' = o tanh(c'), with i, f, o sigmoids and g a tanh of W_i* x + b_i* + W_h* h + b_h*.

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        bias: with b_ih and b_hh. Default: True.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`. Default: "auto".

    The parameters, their names and their initialisation are those of :class:`torch.nn.LSTMCell`, so a state_dict goes
    both ways; arguments are refused as torch refuses them. An unknown `algorithm` is a ValueError.

    Example:
        >>> cell = weft.nn.LSTMCell(10, 20)
        >>> h, c = cell(torch.randn(3, 10))
        >>> h.shape, c.shape
        (torch.Size([3, 20]), torch.Size([3, 20]))
    """

    _cell = "lstm"

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, algorithm: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.algorithm = algorithm

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            input: ``(B, input_size)``, or ``(input_size)`` unbatched.
            hx: ``(h, c)``, each ``(B, hidden_size)``, without the B unbatched; None for zeros.

        Returns:
            ``(h, c)`` after the step, laid out like `hx`.

        Raises:
            ValueError: the rank of an argument does not fit.
            RuntimeError: a size, dtype or device does not fit.
        """
        if isinstance(input, Proxy):
            return leaf(self, input, hx)
        states = () if hx is None else tuple(hx)
        fits = hx is None or (len(states) == 2 and all(s.dim() == input.dim() for s in states))
        step = self._step("lstm", input, *states) if fits else None
        return super().forward(input, hx) if step is None else step


for _kind in (RNNCell, GRUCell, LSTMCell):
    _kind.__module__ = "weft.nn"  # where users, pickles and documents find them
