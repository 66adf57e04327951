"""Drop-in recurrent layers: :class:`torch.nn.RNN`, :class:`~torch.nn.GRU` and :class:`~torch.nn.LSTM` with a choice of
algorithm.

They take the same arguments, hold the same parameters under the same names, return the same results and refuse the same
input with the same exception types. They are subclasses of :class:`torch.nn.RNNBase`, not of torch's three layers,
because ``torch.compile`` refuses every instance of those.

The keyword ``algorithm`` says what runs:

- ``"auto"`` (default): the fastest for each input, by limits measured per device and cell;
- ``"scan"``: Weft's operators, whose backward pass is a parallel scan over transposed Jacobians (BPPSA, MLSys 2020);
- ``"torch"``: torch's own kernel (cuDNN on a GPU);
- ``"reference"``: :mod:`weft.reference`, a slow loop in plain torch, differentiable to any order;
- ``"persistent"`` and ``"newton"`` are reserved and raise NotImplementedError.

An algorithm that does not fit an input runs as another, never as an error; :func:`weft.explain` says which and why.
Under ``torch.func`` transforms and in forward-mode AD the reference runs.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from . import _algorithms, _torch_rnn, reference

__all__ = ["GRU", "LSTM", "RNN"]

Device: TypeAlias = torch.device | str | int | None

_scan_rnn = torch.ops.weft.scan_rnn.default


class _Layer(torch.nn.RNNBase):
    """What the three layers share. A state is a tuple: (h,), for an LSTM (h, c)."""

    _algorithm: str

    def __init__(self, mode: str, *args: Any, algorithm: str, **kwargs: Any) -> None:
        self.algorithm = algorithm
        super().__init__(mode, *args, **kwargs)

    @property
    def algorithm(self) -> str:
        """The algorithm asked for; may be set at any time."""
        return self._algorithm

    @algorithm.setter
    def algorithm(self, name: str) -> None:
        self._algorithm = _algorithms.check_algorithm(name)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self._algorithm == "auto" else f"{text}, algorithm={self._algorithm!r}"

    def _refresh_weights(self) -> None:
        """Make _flat_weights what the attributes are now. torch asks two weak references and two attributes per weight;
        here unchanged parameters cost a dictionary look-up each, and everything else goes torch's way."""
        parameters = self._parameters
        for name, weight in zip(self._flat_weights_names, self._flat_weights, strict=False):
            if parameters.get(name) is not weight:
                self._update_flat_weights()
                return

    # Checks: torch's, in torch's order, so that the exception types agree.

    def _check_sizes(self, input: Tensor, state: tuple[Tensor, ...] | None, batch_sizes: Tensor | None) -> None:
        self.check_input(input, batch_sizes)
        if state is not None:
            self.check_hidden_size(state[0], self.get_expected_hidden_size(input, batch_sizes))

    def _fail_dim(self, input: Tensor) -> NoReturn:
        kind = type(self).__name__
        raise ValueError(
            f"{kind}: input must be (T, B, {self.input_size}) or unbatched (T, {self.input_size}), "
            f"(B, T, {self.input_size}) with batch_first; got a {input.dim()}D tensor"
        )

    def _fail_state_dim(self, state: tuple[Tensor, ...], dim: int) -> NoReturn:
        kind, got = type(self).__name__, ", ".join(f"{s.dim()}D" for s in state)
        raise RuntimeError(
            f"{kind}: hx must be {dim}D tensors beside {'batched 3D' if dim == 3 else 'unbatched 2D'} input, got {got}"
        )

    def _check_operands(self, input: Tensor, state: tuple[Tensor, ...] | None, autocast: bool) -> None:
        """Dtypes and devices, which torch's kernels look at themselves."""
        device = self._flat_weights[0].device
        if input.device != device:
            raise RuntimeError(f"{type(self).__name__}: input is on {input.device}, the weights are on {device}")
        if state is None:
            return
        for s in state:
            if s.device != device:
                raise RuntimeError(f"{type(self).__name__}: hx is on {s.device}, the weights are on {device}")
            if s.dtype != input.dtype and not autocast:
                raise RuntimeError(
                    f"{type(self).__name__}: hx must have the input's dtype, {input.dtype}, got {s.dtype}"
                )

    def _padded(self, input: Tensor, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Check a padded input and its state, and give an unbatched one a batch of 1."""
        dim = input.dim()
        if dim == 2:
            input = input.unsqueeze(0 if self.batch_first else 1)
        elif dim != 3:
            self._fail_dim(input)
        if state is not None:
            for s in state:
                if s.dim() != dim:
                    self._fail_state_dim(state, dim)
            if dim == 2:
                state = tuple(s.unsqueeze(1) for s in state)
        self._check_sizes(input, state, None)
        return input, state

    # The run.

    def _result_dtypes(
        self, input: Tensor, state: tuple[Tensor, ...] | None, packed: bool, autocast: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of output and h_n, and of c_n: the input's, under autocast what torch's layers return there."""
        if autocast is None or input.dtype == torch.float64 or not input.dtype.is_floating_point:
            return input.dtype, input.dtype
        if input.device.type != "cpu" or self.mode in ("RNN_TANH", "RNN_RELU"):
            return autocast, autocast
        # The CPU's step loops mix autocast's matrix products with the state as it came.
        carried = input.dtype if state is None else state[-1].dtype
        carried = torch.promote_types(carried, autocast)
        if self.mode == "GRU" or (packed and self.proj_size == 0):
            return carried, carried
        return autocast, carried if self.proj_size > 0 else autocast

    def _case(
        self, input: Tensor, state: tuple[Tensor, ...] | None, packed: bool
    ) -> tuple[_algorithms.Case, torch.dtype | None, tuple[torch.dtype, torch.dtype]]:
        """What the choice looks at; autocast's dtype or None; the result dtypes."""
        device = input.device.type
        autocast = None
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
        self._check_operands(input, state, autocast is not None)
        dtypes = self._result_dtypes(input, state, packed, autocast)
        steps = batch = None
        if not (packed or torch.compiler.is_compiling()):
            steps, batch = input.shape[:2]
            if self.batch_first:
                steps, batch = batch, steps
            if steps == 0:
                raise RuntimeError(f"{type(self).__name__}: input must have at least one time step, got none")
        transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        case = _algorithms.Case(
            self.mode.lower(),
            device,
            dtypes[0],
            self.hidden_size,
            batch,
            steps,
            packed,
            self.proj_size > 0,
            transformed,
        )
        return case, autocast, dtypes

    def _run(
        self, input: Tensor, state: tuple[Tensor, ...] | None, batch_sizes: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Input (T, B, I), (B, T, I) with batch_first, or packed data (N, I), all checked: output and final state."""
        case, autocast, dtypes = self._case(input, state, batch_sizes is not None)
        name, _ = _algorithms.choose(self._algorithm, case)
        if name == "scan":
            return self._run_scan(case.cell, input, state, dtypes[0] if autocast is not None else None)
        if state is None:
            state = self._zero_state(input, batch_sizes)
        if name == "torch" and not torch.compiler.is_compiling():
            output, *final = _torch_rnn.call(
                case.cell,
                input,
                state,
                self._flat_weights,
                self.bias,
                self.num_layers,
                self.dropout,
                self.training,
                self.bidirectional,
                self.batch_first,
                batch_sizes,
            )
            return output, tuple(final)
        transpose = self.batch_first and batch_sizes is None
        if transpose:
            input = input.transpose(0, 1)
        if name == "torch":
            output, final = self._run_torch_compiled(case.cell, input, state, batch_sizes, autocast, dtypes)
        else:
            output, final = self._run_reference(case.cell, input, state, batch_sizes, autocast, dtypes)
        return output.transpose(0, 1) if transpose else output, final

    def _inspect(self, input: Tensor | PackedSequence, hx: Any) -> _algorithms.Case:
        """What the choice would look at in ``self(input, hx)``, after the same checks."""
        self._refresh_weights()
        state = hx if hx is None or self.mode == "LSTM" else (hx,)
        if isinstance(input, PackedSequence):
            self._check_sizes(input.data, state, input.batch_sizes)
            return self._case(input.data, state, True)[0]
        return self._case(*self._padded(input, state), False)[0]

    def _zero_state(self, input: Tensor, batch_sizes: Tensor | None) -> tuple[Tensor, ...]:
        if batch_sizes is None:
            batch = input.size(0 if self.batch_first else 1)
        else:
            batch = batch_sizes[0]
        count = self.num_layers * (2 if self.bidirectional else 1)
        h0 = torch.zeros(count, batch, self.proj_size or self.hidden_size, dtype=input.dtype, device=input.device)
        if self.mode != "LSTM":
            return (h0,)
        if self.proj_size == 0:
            return h0, h0
        return h0, torch.zeros(count, batch, self.hidden_size, dtype=input.dtype, device=input.device)

    def _run_scan(
        self, cell: str, input: Tensor, state: tuple[Tensor, ...] | None, dtype: torch.dtype | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        weights = self._flat_weights
        if dtype is not None:
            input = input.to(dtype)
            weights = [w.to(dtype) for w in weights]
            state = None if state is None else tuple(s.to(dtype) for s in state)
        if self.batch_first:
            input = input.transpose(0, 1)
        lstm = cell == "lstm"
        directions = 2 if self.bidirectional else 1
        if state is None:
            zeros = input.new_zeros(input.size(1), self.hidden_size)
            h0 = c0 = (zeros,) * (self.num_layers * directions)
        else:
            h0 = state[0].unbind(0)
            c0 = state[1].unbind(0) if lstm else h0
        stride = 4 if self.bias else 2
        h_n, c_n = [], []
        for layer in range(self.num_layers):
            outputs = []
            for index in range(layer * directions, (layer + 1) * directions):
                w_ih, w_hh, *biases = weights[index * stride : (index + 1) * stride]
                b_ih, b_hh = biases or (None, None)
                output, h, c, _, _ = _scan_rnn(
                    input,
                    h0[index],
                    c0[index] if lstm else None,
                    w_ih,
                    w_hh,
                    b_ih,
                    b_hh,
                    cell=cell,
                    reverse=len(outputs) == 1,
                )
                outputs.append(output)
                h_n.append(h)
                c_n.append(c)
            input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if self.dropout > 0 and self.training and layer + 1 < self.num_layers:
                input = F.dropout(input, self.dropout, True)
        final = (_stack(h_n), _stack(c_n)) if lstm else (_stack(h_n),)
        return input.transpose(0, 1) if self.batch_first else input, final

    def _run_torch_compiled(
        self,
        cell: str,
        input: Tensor,
        state: tuple[Tensor, ...],
        batch_sizes: Tensor | None,
        autocast: torch.dtype | None,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        weights = self._flat_weights
        dropout = self.dropout if self.training else 0.0
        # The op runs its forward again in backward, so that a dropout mask may not be drawn inside it.
        layers = self.num_layers if dropout == 0 else 1
        rows = layers * (2 if self.bidirectional else 1)
        stride = len(weights) // self.num_layers * layers
        finals = []
        for group in range(self.num_layers // layers):
            input, *final = torch.ops.weft.torch_rnn(
                input,
                [s[group * rows : (group + 1) * rows] for s in state],
                weights[group * stride : (group + 1) * stride],
                batch_sizes,
                cell,
                self.bias,
                layers,
                self.bidirectional,
                autocast,
                *dtypes,
            )
            finals.append(final)
            if dropout > 0 and group + 1 < self.num_layers:
                input = F.dropout(input, dropout, True)
        if len(finals) == 1:
            return input, tuple(finals[0])
        return input, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))

    def _run_reference(
        self,
        cell: str,
        input: Tensor,
        state: tuple[Tensor, ...],
        batch_sizes: Tensor | None,
        autocast: torch.dtype | None,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        arguments = dict(
            cell=cell,
            bias=self.bias,
            num_layers=self.num_layers,
            bidirectional=self.bidirectional,
            dropout=self.dropout,
            training=self.training,
            batch_sizes=batch_sizes,
        )
        if autocast is None:
            return reference.rnn(input, state, self._flat_weights, **arguments)
        with torch.autocast(input.device.type, enabled=False):
            # Rounded where autocast would round: the widest result dtype first, each result then in its own.
            wide = input.to(torch.promote_types(*dtypes))
            output, final = reference.rnn(wide, state, self._flat_weights, **arguments)
            return output.to(dtypes[0]), tuple(s.to(d) for s, d in zip(final, dtypes, strict=False))

    def _forward(self, input: Tensor, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        batched = input.dim() != 2
        input, state = self._padded(input, state)
        output, final = self._run(input, state)
        if batched:
            return output, final
        return output.squeeze(0 if self.batch_first else 1), tuple(s.squeeze(1) for s in final)

    def _forward_packed(
        self, packed: PackedSequence, state: tuple[Tensor, ...] | None
    ) -> tuple[PackedSequence, tuple[Tensor, ...]]:
        input, batch_sizes, sorted_indices, unsorted_indices = packed
        if state is not None and sorted_indices is not None:
            state = tuple(s.index_select(1, sorted_indices) for s in state)
        self._check_sizes(input, state, batch_sizes)
        output, final = self._run(input, state, batch_sizes)
        if unsorted_indices is not None:
            final = tuple(s.index_select(1, unsorted_indices) for s in final)
        return PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices), final


def _stack(states: list[Tensor]) -> Tensor:
    return states[0].unsqueeze(0) if len(states) == 1 else torch.stack(states)


class _OneState(_Layer):
    """RNN and GRU: hx and h_n are tensors."""

    @overload
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, input: PackedSequence, hx: Tensor | None = None) -> tuple[PackedSequence, Tensor]: ...

    def forward(self, input, hx=None):
        """Run the layer.

        Args:
            input: ``(T, B, input_size)``; ``(B, T, input_size)`` with `batch_first`; ``(T, input_size)`` unbatched;
                or a PackedSequence.
            hx: initial state ``(layers * directions, B, hidden_size)``, without the B unbatched; None for zeros.

        Returns:
            ``output``, the last layer's states, laid out like the input and ``directions * hidden_size`` wide (a
            PackedSequence for a PackedSequence); and ``h_n``, laid out like `hx`.

        Raises:
            ValueError: the input's rank or dtype does not fit.
            RuntimeError: a size, or the rank, dtype or device of `hx` does not fit; there is no time step.
        """
        self._refresh_weights()
        run = self._forward_packed if isinstance(input, PackedSequence) else self._forward
        output, final = run(input, None if hx is None else (hx,))
        return output, final[0]


class RNN(_OneState):
    """:class:`torch.nn.RNN` with a choice of algorithm: h[t] = tanh(W_ih x[t] + b_ih + W_hh h[t-1] + b_hh), or ReLU.

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        num_layers: layers on top of each other. Default: 1.
        nonlinearity: "tanh" (default) or "relu".
        bias: with b_ih and b_hh. Default: True.
        batch_first: padded input and output are ``(B, T, features)``; states are not. Default: False.
        dropout: probability of dropping an output between layers while training. Default: 0.
        bidirectional: a second direction, from the last step to the first. Default: False.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`. Default: "auto".

    The parameters, their names and their initialisation are those of :class:`torch.nn.RNN`, so a state_dict goes both
    ways. Arguments are refused as torch refuses them; an unknown `algorithm` is a ValueError, a reserved one a
    NotImplementedError.

    Example:
        >>> layer = weft.nn.RNN(10, 20, num_layers=2)
        >>> output, h_n = layer(torch.randn(500, 3, 10))
        >>> output.shape, h_n.shape
        (torch.Size([500, 3, 20]), torch.Size([2, 3, 20]))
    """

    nonlinearity: str

    @overload
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        algorithm: str = "auto",
    ) -> None: ...

    @overload
    def __init__(self, *args: Any, algorithm: str = "auto", **kwargs: Any) -> None: ...

    def __init__(self, *args, algorithm="auto", **kwargs):
        _refuse_projection(kwargs)
        if len(args) > 3:
            self.nonlinearity = args[3]
            args = args[:3] + args[4:]
        else:
            self.nonlinearity = kwargs.pop("nonlinearity", "tanh")
        if self.nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"RNN: nonlinearity must be 'tanh' or 'relu', got {self.nonlinearity!r}")
        super().__init__(f"RNN_{self.nonlinearity.upper()}", *args, algorithm=algorithm, **kwargs)


class GRU(_OneState):
    """:class:`torch.nn.GRU` with a choice of algorithm. Gates in torch's order:

    r = sigmoid(W_ir x[t] + b_ir + W_hr h[t-1] + b_hr), z likewise, n = tanh(W_in x[t] + b_in + r (W_hn h[t-1] + b_hn)),
    h[t] = (1 - z) n + z h[t-1].

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        num_layers: layers on top of each other. Default: 1.
        bias: with b_ih and b_hh. Default: True.
        batch_first: padded input and output are ``(B, T, features)``; states are not. Default: False.
        dropout: probability of dropping an output between layers while training. Default: 0.
        bidirectional: a second direction, from the last step to the first. Default: False.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`. Default: "auto".

    The parameters, their names and their initialisation are those of :class:`torch.nn.GRU`, so a state_dict goes both
    ways. Arguments are refused as torch refuses them; an unknown `algorithm` is a ValueError, a reserved one a
    NotImplementedError.

    Example:
        >>> layer = weft.nn.GRU(128, 32)
        >>> output, h_n = layer(torch.randn(1000, 16, 128))
        >>> output.shape, h_n.shape
        (torch.Size([1000, 16, 32]), torch.Size([1, 16, 32]))
    """

    @overload
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        algorithm: str = "auto",
    ) -> None: ...

    @overload
    def __init__(self, *args: Any, algorithm: str = "auto", **kwargs: Any) -> None: ...

    def __init__(self, *args, algorithm="auto", **kwargs):
        _refuse_projection(kwargs)
        super().__init__("GRU", *args, algorithm=algorithm, **kwargs)


class LSTM(_Layer):
    """:class:`torch.nn.LSTM` with a choice of algorithm. Gates i, f, g, o in torch's order:

    c[t] = f c[t-1] + i g and h[t] = o tanh(c[t]), with i, f, o sigmoids and g a tanh of
    W_i* x[t] + b_i* + W_h* h[t-1] + b_h*. With `proj_size`, h[t] = W_hr (o tanh(c[t])).

    Args:
        input_size: features of the input.
        hidden_size: H, features of the cell state.
        num_layers: layers on top of each other. Default: 1.
        bias: with b_ih and b_hh. Default: True.
        batch_first: padded input and output are ``(B, T, features)``; states are not. Default: False.
        dropout: probability of dropping an output between layers while training. Default: 0.
        bidirectional: a second direction, from the last step to the first. Default: False.
        proj_size: P, features of a projected h; 0 (default) for none.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`. Default: "auto".

    The parameters, their names and their initialisation are those of :class:`torch.nn.LSTM`, so a state_dict goes both
    ways. Arguments are refused as torch refuses them; an unknown `algorithm` is a ValueError, a reserved one a
    NotImplementedError.

    Example:
        >>> layer = weft.nn.LSTM(128, 32, bidirectional=True)
        >>> output, (h_n, c_n) = layer(torch.randn(1000, 16, 128))
        >>> output.shape, h_n.shape, c_n.shape
        (torch.Size([1000, 16, 64]), torch.Size([2, 16, 32]), torch.Size([2, 16, 32]))
    """

    # Part of torch.nn.LSTM's interface, and plain functions of what RNNBase has.
    get_expected_cell_size = torch.nn.LSTM.get_expected_cell_size
    check_forward_args = torch.nn.LSTM.check_forward_args
    permute_hidden = torch.nn.LSTM.permute_hidden

    @overload
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        algorithm: str = "auto",
    ) -> None: ...

    @overload
    def __init__(self, *args: Any, algorithm: str = "auto", **kwargs: Any) -> None: ...

    def __init__(self, *args, algorithm="auto", **kwargs):
        super().__init__("LSTM", *args, algorithm=algorithm, **kwargs)

    def _check_sizes(self, input: Tensor, state: tuple[Tensor, ...] | None, batch_sizes: Tensor | None) -> None:
        if state is None:
            self.check_input(input, batch_sizes)
        else:
            self.check_forward_args(input, state, batch_sizes)

    @overload
    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]: ...

    def forward(self, input, hx=None):
        """Run the layer.

        Args:
            input: ``(T, B, input_size)``; ``(B, T, input_size)`` with `batch_first`; ``(T, input_size)`` unbatched;
                or a PackedSequence.
            hx: ``(h0, c0)``, h0 ``(layers * directions, B, proj_size or hidden_size)``, c0
                ``(layers * directions, B, hidden_size)``, without the B unbatched; None for zeros.

        Returns:
            ``output``, the last layer's h, laid out like the input and ``directions * (proj_size or hidden_size)`` wide
            (a PackedSequence for a PackedSequence); and ``(h_n, c_n)``, laid out like `hx`.

        Raises:
            ValueError: the input's rank or dtype does not fit.
            RuntimeError: a size, or the rank, dtype or device of `hx` does not fit; there is no time step.
        """
        self._refresh_weights()
        if isinstance(hx, (tuple, list)) and len(hx) > 2:
            raise RuntimeError(f"LSTM: hx must be (h0, c0), got {len(hx)} tensors")
        return self._forward_packed(input, hx) if isinstance(input, PackedSequence) else self._forward(input, hx)


def _refuse_projection(kwargs: dict[str, Any]) -> None:
    if "proj_size" in kwargs:
        raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
