"""weft.nn.RNNCell, GRUCell and LSTMCell: torch.nn's cells, a step of which is one op; and SLSTMCell."""

from __future__ import annotations

import operator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import Proxy

from .._base.arguments import NotScriptable, constructor, not_dense
from .._base.torch_private import any_autocast, in_forward_mode, in_transform, maps_alone
from . import reference
from .layers import check_heads, forget_bias, leaf, leaves_weft
from .runs import operands, states
from .table import traits

__all__ = ["ALGORITHMS", "GRUCell", "LSTMCell", "RNNCell", "SLSTMCell", "choose"]

Device: TypeAlias = torch.device | str | int | None

ALGORITHMS = ("auto", "fused", "torch")

CPU_SEQUENCES, CPU_HIDDEN = 4, 256
"""On a CPU "auto" leaves steps to torch that have more of both: they are torch's products, beside which the rest is
nothing, and neither was faster in all cases. Of up to so many sequences the op makes the products itself. A compiled
graph, which does not look at the batch, always has the op."""

_STEP = "a step is (B, features)"
"""Instead of what is nested."""

_rnn_cell = torch.ops.weft.rnn_cell.default


class Choice(NamedTuple):
    """What runs, and why."""

    algorithm: str
    reason: str


class _Cell(NotScriptable):
    """What the cells share: the step by Weft's op. Below it stands torch's cell, whose forward runs everything else and
    has the words for what is wrong; but for several heads and an sLSTM, which torch has not."""

    # An attribute of the class, so that cells which accelerate made and older pickles have it.
    _algorithm = "auto"
    num_heads: int = 1
    _accelerated = False
    """Whether weft.accelerate has put it in a torch cell's place."""
    _state_names: tuple[str, ...] = ("hx",)
    _parameters: dict[str, Tensor | None]
    input_size: int
    hidden_size: int

    @property
    def _is_torchs(self) -> bool:
        """Whether torch has a cell of these parameters."""
        return self.num_heads == 1

    def _split_heads(self, num_heads: int) -> None:
        """A recurrent weight (G H, H / num_heads) in that of one head's place."""
        if num_heads == 1:
            return
        check_heads(type(self).__name__, num_heads, self.hidden_size)
        self.num_heads = num_heads
        weight = self.weight_hh
        self.weight_hh = torch.nn.Parameter(weight.new_empty(len(weight), self.hidden_size // num_heads))
        self.reset_parameters()

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
        text = text if self.num_heads == 1 else f"{text}, num_heads={self.num_heads}"
        text = text if self._algorithm == "auto" else f"{text}, algorithm={self._algorithm!r}"
        return f"{text}, accelerated=True" if self._accelerated else text

    def _weights(self) -> list[Tensor | None]:
        parameters = self._parameters
        try:
            return [parameters[name] for name in _WEIGHTS]
        except KeyError:  # a parametrization, or weight_norm, computes it
            return [getattr(self, name) for name in _WEIGHTS]

    def _wrong(self, input: Any, hx: Any) -> tuple[type[Exception], str] | None:
        """What of the arguments does not fit, and the error that it is where torch has no such cell."""
        names = self._state_names
        if isinstance(input, Tensor) and input.layout is not torch.strided and not self._is_torchs:
            return TypeError, not_dense("input", input, _STEP)
        if not isinstance(input, Tensor):
            return AttributeError, f"input must be a Tensor, got {type(input).__name__}"
        if input.dim() not in (1, 2):
            sizes = f"(B, {self.input_size}) or ({self.input_size})"
            return ValueError, f"input must be {sizes}, 1D or 2D, got {tuple(input.shape)}"
        if input.size(-1) != self.input_size:
            return RuntimeError, f"input must have {self.input_size} features, input_size, got {tuple(input.shape)}"
        weight = self._weights()[0]
        if input.device != weight.device:
            return RuntimeError, f"input must be on the weights' device, {weight.device}, got {input.device}"
        if input.dtype != weight.dtype and not any_autocast():
            return RuntimeError, f"input must be {weight.dtype}, as the weights are, got {input.dtype}"
        if hx is None:
            return None
        if len(names) > 1:
            wanted = f"({', '.join(names)}), a tuple of Tensors"
            if not isinstance(hx, (tuple, list)):
                got = f"a Tensor {tuple(hx.shape)}" if isinstance(hx, Tensor) else type(hx).__name__
                return ValueError, f"hx must be {wanted}, got {got}"
            if len(hx) != len(names):
                return ValueError, f"hx must be {wanted}, got {len(hx)} of them"
        expected = (*input.shape[:-1], self.hidden_size)
        for name, s in zip(names, hx if len(names) > 1 else (hx,), strict=True):
            if not isinstance(s, Tensor):
                return AttributeError, f"{name} must be a Tensor, got {type(s).__name__}"
            if s.is_nested:
                return TypeError, not_dense(name, s, _STEP)
            if s.shape != expected:
                error = ValueError if s.dim() != input.dim() else RuntimeError
                return error, f"{name} must be {expected}, to go with input {tuple(input.shape)}, got {tuple(s.shape)}"
            if s.device != input.device:
                return RuntimeError, f"{name} must be on the input's device, {input.device}, got {s.device}"
            if s.dtype != input.dtype and not any_autocast():
                return RuntimeError, f"{name} must have the input's dtype, {input.dtype}, got {s.dtype}"
            if s.layout is not torch.strided:
                return TypeError, not_dense(name, s, _STEP)
        return None

    def _fits(self, input: Tensor, hx: Any) -> bool:
        """Whether sizes do: what else may be wrong the op refuses."""
        if input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            return False
        if hx is None:
            return True
        count, expected = len(self._state_names), (*input.shape[:-1], self.hidden_size)
        if count == 1:
            return hx.shape == expected
        if not isinstance(hx, (tuple, list)) or len(hx) != count:
            return False
        return all(isinstance(s, Tensor) and not s.is_nested and s.shape == expected for s in hx)

    def _refuse_wrong(self, input: Any, hx: Any) -> None:
        wrong = self._wrong(input, hx)
        if wrong is not None:
            error, what = wrong
            raise error(f"{type(self).__name__}: {what}")

    def _refuse_wrong_step(self, input: Tensor, state: tuple[Tensor, ...]) -> None:
        alone = len(self._state_names) == 1
        self._refuse_wrong(input, None if not state else state[0] if alone else state)

    def _by_torch(self, input: Any, hx: Any) -> Any:
        """By torch's cell, whose exceptions say what is wrong, but not of what."""
        try:
            return super().forward(input, hx)  # type: ignore[misc]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            wrong = self._wrong(input, hx)
            if wrong is None and isinstance(input, Tensor) and input.layout is not torch.strided:
                wrong = TypeError, not_dense("input", input, _STEP)  # of those that torch's cell does not take either
            if wrong is None:
                raise
            raise type(error)(f"{type(self).__name__}: {wrong[1]}") from None

    def _step(self, cell: str, input: Tensor, *state: Tensor) -> tuple[Tensor, ...] | None:
        """The states after the step; None where torch's cell is to run."""
        in_torch = choose(self, input).algorithm == "torch"
        if in_torch and self._is_torchs:
            return None
        given, given_state, batched = input, state, input.dim() == 2
        if not batched:
            input, state = input.unsqueeze(0), tuple(s.unsqueeze(0) for s in state)
        if not state:
            state = (input.new_zeros(input.shape[0], self.hidden_size),) * traits(cell).states
        if in_torch:
            self._refuse_wrong_step(given, given_state)  # the reference would promote dtypes
            found = reference.step(cell, input, state, *self._weights())
        else:
            try:
                h, c, _ = _rnn_cell(input, *operands(state), *self._weights(), cell=cell, num_heads=self.num_heads)
            except (NotImplementedError, TypeError, ValueError):
                if not self._is_torchs:
                    self._refuse_wrong_step(given, given_state)
                    raise
                return None
            except RuntimeError:
                if input.device == self._weights()[0].device or not self._is_torchs:
                    self._refuse_wrong_step(given, given_state)
                    raise
                return None  # torch's cell refuses it, too
            found = states(cell, h, c)
        return found if batched else tuple(s.squeeze(0) for s in found)


_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _sizes(cell: _Cell, input_size: Any, hidden_size: Any) -> tuple[int, int]:
    """Both as ints: numpy's are some, too."""
    found = []
    for argument, size in (("input_size", input_size), ("hidden_size", hidden_size)):
        try:
            found.append(operator.index(size))
        except TypeError:
            got = type(size).__name__
            raise TypeError(f"{type(cell).__name__}: {argument} must be an int, got {got}") from None
    return found[0], found[1]


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
    if not module._is_torchs:
        return Choice("fused", "torch has no such cell")
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
        check_tensors(self, input, hx)
        fits = hx is None or hx.dim() == input.dim()
        if not self._is_torchs and not self._fits(input, hx):
            self._refuse_wrong(input, hx)
        step = self._step(cell, input, *_states(hx)) if fits else None
        return self._by_torch(input, hx) if step is None else step[0]


def check_tensors(cell: _Cell, input: Any, hx: Any = None) -> None:
    """Refuse what is no tensor at all, as torch does, and what is no dense one."""
    name = type(cell).__name__
    for argument, value in (("input", input), ("hx", hx)):
        if isinstance(value, Tensor):
            if value.is_nested:
                raise TypeError(f"{name}: {not_dense(argument, value, _STEP)}")
        elif value is not None or argument == "input":
            raise AttributeError(f"{name}: {argument} must be a Tensor, got {type(value).__name__}")


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
        num_heads: heads of H / num_heads units, each with recurrent weights of its own: weight_hh is
            ``(G H, H / num_heads)``. Default: 1.

    The parameters, their names and their initialisation are those of :class:`torch.nn.RNNCell`, so a state_dict goes
    both ways with one head; arguments are refused as torch refuses them. An unknown `algorithm`, or heads that do not
    divide H, are a ValueError.

    Example:
        >>> cell = weft.nn.RNNCell(10, 20)
        >>> h = torch.zeros(3, 20)
        >>> for x in torch.randn(6, 3, 10):
        ...     h = cell(x, h)
        >>> h.shape
        torch.Size([3, 20])
    """

    @constructor
    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh",
        device: Device = None, dtype: torch.dtype | None = None, *, algorithm: str = "auto", num_heads: int = 1,
    ) -> None:  # fmt: skip
        input_size, hidden_size = _sizes(self, input_size, hidden_size)
        super().__init__(input_size, hidden_size, bias, nonlinearity, device, dtype)
        self.algorithm = algorithm
        self._split_heads(num_heads)

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
        num_heads: heads of H / num_heads units, each with recurrent weights of its own: weight_hh is
            ``(G H, H / num_heads)``. Default: 1.

    The parameters, their names and their initialisation are those of :class:`torch.nn.GRUCell`, so a state_dict goes
    both ways with one head; arguments are refused as torch refuses them. An unknown `algorithm`, or heads that do not
    divide H, are a ValueError.

    Example:
        >>> cell = weft.nn.GRUCell(10, 20)
        >>> cell(torch.randn(3, 10), torch.randn(3, 20)).shape
        torch.Size([3, 20])
    """

    _cell = "gru"

    @constructor
    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, algorithm: str = "auto", num_heads: int = 1,
    ) -> None:  # fmt: skip
        input_size, hidden_size = _sizes(self, input_size, hidden_size)
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.algorithm = algorithm
        self._split_heads(num_heads)

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
        num_heads: heads of H / num_heads units, each with recurrent weights of its own: weight_hh is
            ``(G H, H / num_heads)``. Default: 1.

    The parameters, their names and their initialisation are those of :class:`torch.nn.LSTMCell`, so a state_dict goes
    both ways with one head; arguments are refused as torch refuses them. An unknown `algorithm`, or heads that do not
    divide H, are a ValueError.

    Example:
        >>> cell = weft.nn.LSTMCell(10, 20)
        >>> h, c = cell(torch.randn(3, 10))
        >>> h.shape, c.shape
        (torch.Size([3, 20]), torch.Size([3, 20]))
    """

    _cell, _state_names = "lstm", ("h", "c")

    @constructor
    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, algorithm: str = "auto", num_heads: int = 1,
    ) -> None:  # fmt: skip
        input_size, hidden_size = _sizes(self, input_size, hidden_size)
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.algorithm = algorithm
        self._split_heads(num_heads)

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
        check_tensors(self, input)
        if not self._is_torchs and not self._fits(input, hx):
            self._refuse_wrong(input, hx)
        given = () if hx is None else hx
        fits = hx is None or (isinstance(hx, (tuple, list)) and len(hx) == 2)
        if fits and all(isinstance(s, Tensor) and s.dim() == input.dim() for s in given):
            step = self._step("lstm", input, *given)
            if step is not None:
                return step
        return self._by_torch(input, hx)


class SLSTMCell(_Cell, torch.nn.RNNCellBase):
    """The step of :class:`weft.nn.SLSTM`, which has its equations, by one op.

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        num_heads: heads of H / num_heads units, each with recurrent weights of its own. Default: 4.
        forget_gate: "sigmoid" (default) or "exp".
        bias: with b_ih and b_hh. Default: True.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`; "torch" is a step in torch's operations. Default: "auto".

    Parameters: weight_ih ``(4 H, input_size)``, weight_hh ``(4 H, H / num_heads)``, bias_ih and bias_hh ``(4 H)``,
    gates in the order i, f, z, o, initialised as the layer's.

    Raises:
        ValueError: num_heads does not divide H, an unknown forget_gate or algorithm.

    Example:
        >>> cell = weft.nn.SLSTMCell(10, 20)
        >>> h, c, n, m = cell(torch.randn(3, 10))
        >>> h.shape
        torch.Size([3, 20])
    """

    forget_gate: str
    _state_names = ("h", "c", "n", "m")

    @constructor
    def __init__(
        self, input_size: int, hidden_size: int, num_heads: int = 4, forget_gate: Literal["sigmoid", "exp"] = "sigmoid",
        bias: bool = True, device: Device = None, dtype: torch.dtype | None = None, *, algorithm: str = "auto",
    ) -> None:  # fmt: skip
        if forget_gate not in ("sigmoid", "exp"):
            raise ValueError(f"SLSTMCell: forget_gate must be 'sigmoid' or 'exp', got {forget_gate!r}")
        input_size, hidden_size = _sizes(self, input_size, hidden_size)
        super().__init__(input_size, hidden_size, bias, 4, device, dtype)
        self.forget_gate = forget_gate
        self.algorithm = algorithm
        self._split_heads(num_heads)

    @property
    def _is_torchs(self) -> bool:
        return False

    @property
    def _cell(self) -> str:
        return "slstm" if self.forget_gate == "sigmoid" else "slstm_exp"

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias:
            with torch.no_grad():
                self.bias_hh.zero_()
                H = self.hidden_size
                self.bias_ih.zero_()[H : 2 * H] = forget_bias(H, self.num_heads, 0.3, self.bias_ih.device)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.forget_gate == "sigmoid" else f", forget_gate={self.forget_gate!r}")

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One step.

        Args:
            input: ``(B, input_size)``, or ``(input_size)`` unbatched.
            hx: ``(h, c, n, m)``, each ``(B, hidden_size)``, without the B unbatched; None for zeros.

        Returns:
            ``(h, c, n, m)`` after the step, laid out like `hx`.

        Raises:
            ValueError: the rank of an argument does not fit, or there are not four states.
            RuntimeError: a size, dtype or device does not fit.
        """
        if isinstance(input, Proxy):
            return leaf(self, input, hx)
        check_tensors(self, input)
        if not self._fits(input, hx):
            self._refuse_wrong(input, hx)
        return self._step(self._cell, input, *(() if hx is None else hx))


for _kind in (RNNCell, GRUCell, LSTMCell, SLSTMCell):
    _kind.__module__ = "weft.nn"  # where users, pickles and documents find them
