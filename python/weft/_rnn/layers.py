"""weft.nn.RNN, GRU and LSTM: torch.nn's arguments and parameters, with a choice of algorithm; and SLSTM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias, overload

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.fx.proxy import TraceError
from torch.nn.utils.rnn import PackedSequence

from .._base.arguments import NotScriptable, check_keywords, constructor, name_after
from .._base.over_ranks import TakesSlices
from .._base.torch_private import in_torchscript_trace, in_transform, onnx_exporting
from . import calls, runs
from .arguments import check_input, check_state
from .dropin.shown_class import own_class, shown_class
from .select import choice
from .slices import run_slice

__all__ = ["GRU", "LSTM", "RNN", "SLSTM", "check_heads", "forget_bias"]

Device: TypeAlias = torch.device | str | int | None

_POSITIONAL = 10
"""Arguments of torch.nn.RNNBase without the mode."""


def leaf(module: torch.nn.Module, input: Proxy, hx: Any) -> Proxy:
    """One node of the graph that torch.fx.symbolic_trace builds, as it makes of torch's layers and cells."""
    path = input.tracer.path_of_module(module)
    if not path:
        raise TraceError(f"{type(module).__name__}: torch.fx.symbolic_trace takes a model with this layer inside")
    return input.tracer.create_proxy("call_module", path, (input,) if hx is None else (input, hx), {})


class _Layer(NotScriptable, TakesSlices, torch.nn.RNNBase):
    """What the three layers share."""

    __jit_unused_properties__: ClassVar[list[str]] = [
        *torch.nn.RNNBase.__jit_unused_properties__, "__class__", "algorithm", "_is_torchs"
    ]  # fmt: skip
    _torch_class: type[torch.nn.RNNBase]
    _algorithm: str
    # An attribute of the class, so that layers which accelerate made and older pickles have it.
    return_cells: bool = False
    num_heads: int = 1
    _state_names: ClassVar[tuple[str, ...]] = ()
    """Of a tuple hx; none where hx is a tensor."""
    _accelerated: bool = False
    """Whether weft.accelerate has put it in a torch layer's place."""
    _arguments: ClassVar[tuple[str, ...]] = (
        "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "device", "dtype",
        "algorithm", "num_heads",
    )  # fmt: skip

    def __new__(cls, *args: Any, **kwargs: Any) -> _Layer:
        return super().__new__(own_class(cls))

    def __init__(self, mode: str, *args: Any, algorithm: str, num_heads: int = 1, **kwargs: Any) -> None:
        name = type(self).__name__
        check_keywords(name, kwargs, self._arguments)
        if len(args) > _POSITIONAL:
            more = "nonlinearity" in self._arguments  # which RNN has taken out
            most, got = _POSITIONAL + more, len(args) + more
            raise TypeError(f"{name}: takes {most} arguments without their names at most, got {got}")
        for argument in ("input_size", "hidden_size")[len(args) :]:
            if argument not in kwargs:
                raise TypeError(f"{name}: {argument} is missing")
        self.algorithm = algorithm
        if num_heads != 1:
            check_heads(name, num_heads, kwargs.get("hidden_size", args[1] if len(args) > 1 else None))
            if kwargs.get("proj_size", 0):
                raise ValueError(
                    f"{name}: a state that is projected (proj_size) has one head, got num_heads={num_heads}"
                )
        try:
            super().__init__(mode, *args, **kwargs)
        except (TypeError, ValueError) as error:  # torch's, which say what is wrong, but not of what
            raise type(error)(f"{name}: {error}") from None
        if num_heads != 1:
            self._split_heads(num_heads)

    def _split_heads(self, num_heads: int) -> None:
        """Recurrent weights (G H, H / num_heads) in those of one head's place."""
        if self.proj_size > 0:
            raise ValueError(
                f"{type(self).__name__}: a state that is projected (proj_size) has one head, got {num_heads}"
            )
        self.num_heads = num_heads
        for name in self._flat_weights_names:
            if name.startswith("weight_hh"):
                weight = getattr(self, name)
                setattr(self, name, torch.nn.Parameter(weight.new_empty(len(weight), self.hidden_size // num_heads)))
        self._init_flat_weights()
        self.reset_parameters()

    def flatten_parameters(self) -> None:
        """As torch.nn.RNNBase's; nothing where torch has no such layer."""
        if self._is_torchs:
            super().flatten_parameters()

    @property
    def _is_torchs(self) -> bool:
        """Whether torch has a layer of these parameters."""
        return self.num_heads == 1

    @property
    def __class__(self) -> type:
        """What isinstance asks besides the type: a class that is torch's, too."""
        return shown_class(type(self), self._torch_class)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        vars(object)["__class__"].__set__(self, own_class(kind))

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # pickle compares the class in object's answer with __class__, but only where that function is __newobj__.
        _, arguments, *state = super().__reduce_ex__(2)
        return _new, arguments, *state

    @property
    def algorithm(self) -> str:
        """The algorithm asked for; may be set at any time."""
        return self._algorithm

    @algorithm.setter
    def algorithm(self, name: str) -> None:
        self._algorithm = choice.check_algorithm(type(self).__name__, name)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        text = text if self.num_heads == 1 else f"{text}, num_heads={self.num_heads}"
        text = text if self._algorithm == "auto" else f"{text}, algorithm={self._algorithm!r}"
        return f"{text}, accelerated=True" if self._accelerated else text

    def _current_weights(self) -> list[Tensor]:
        """The weights as the attributes are now. torch asks a weak reference and two attributes per weight; here an
        unchanged parameter costs one look-up in a dictionary, and only a changed one goes torch's way."""
        parameters = self._parameters
        for name, weight in zip(self._flat_weights_names, self._flat_weights, strict=False):
            if parameters.get(name) is not weight:
                break
        else:
            return self._flat_weights
        if torch.compiler.is_compiling() or in_transform():
            # Tensors of a trace or a transform must not stay behind in the module.
            return [getattr(self, name) for name in self._flat_weights_names]
        self._update_flat_weights()
        return self._flat_weights

    def _torchs(self, input: Tensor | PackedSequence, state: tuple[Tensor, ...] | None) -> Any:
        """What torch's own layer returns, for a graph that is to run where Weft is not."""
        if self.return_cells:
            raise NotImplementedError(
                f"{type(self).__name__}: torch.jit.trace and torch.onnx.export hold torch's own layer, which has no "
                "return_cells"
            )
        if not self._is_torchs:
            return self._unrolled(input, state)
        if self.mode == "LSTM":
            return self._torch_class.forward(self, input, state)
        output, h_n = self._torch_class.forward(self, input, None if state is None else state[0])
        return output, (h_n,)

    def _unrolled(self, input: Tensor | PackedSequence, state: tuple[Tensor, ...] | None) -> Any:
        """The reference's steps, for a graph of torch's own operations."""
        call = calls.prepare(self, input, state)
        result = runs.run(self, "reference", call)
        return self._as_given(input, result.output, result.final, None)

    def _forward(self, input: Tensor | PackedSequence, state: tuple[Tensor, ...] | None) -> Any:
        """``output, final`` or, with return_cells, ``output, final, cells``."""
        check_input(type(self).__name__, input)
        if self._over_ranks is not None:
            return run_slice(self, self._over_ranks, input, state)
        name = calls.choose_at_once(self, input, state)
        if name is not None:
            return runs.run_at_once(self, name, input, state)
        if leaves_weft():
            return self._torchs(input, state)
        call = calls.prepare(self, input, state)
        return self._as_given(input, *runs.run(self, choice.choose_cached(self._algorithm, call.case)[0], call))

    def _as_given(
        self, input: Tensor | PackedSequence, output: Tensor, final: tuple[Tensor, ...], cells: Tensor | None
    ) -> Any:
        """Results laid out as the input is."""
        if isinstance(input, PackedSequence):
            _, batch_sizes, sorted_indices, unsorted_indices = input
            if unsorted_indices is not None:
                final = tuple(s.index_select(1, unsorted_indices) for s in final)
            output = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
            if cells is not None:
                cells = PackedSequence(cells, batch_sizes, sorted_indices, unsorted_indices)
        elif input.dim() == 2:
            batch = 0 if self.batch_first else 1
            output, final = output.squeeze(batch), tuple(s.squeeze(1) for s in final)
            cells = None if cells is None else cells.squeeze(batch)
        return (output, final) if cells is None else (output, final, cells)


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
        if isinstance(input, Proxy):
            return leaf(self, input, hx)
        check_state(type(self).__name__, hx)
        output, (h_n,) = self._forward(input, None if hx is None else (hx,))
        return output, h_n


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
        num_heads: heads of H / num_heads units, each with recurrent weights of its own: weight_hh_l{k} is
            ``(G H, H / num_heads)`` for G gates, rows of each head after each other within a gate. Default: 1.

    The parameters, their names and their initialisation are those of :class:`torch.nn.RNN`, so with one head a
    state_dict goes both ways. Arguments are refused as torch refuses them; an unknown `algorithm`, or heads that do not
    divide H, are a ValueError.

    Example:
        >>> layer = weft.nn.RNN(10, 20, num_layers=2)
        >>> output, h_n = layer(torch.randn(500, 3, 10))
        >>> output.shape, h_n.shape
        (torch.Size([500, 3, 20]), torch.Size([2, 3, 20]))
    """

    _torch_class = torch.nn.RNN
    _arguments = (*_Layer._arguments, "nonlinearity")
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
        num_heads: int = 1,
    ) -> None: ...

    @overload
    def __init__(self, *args: Any, algorithm: str = "auto", num_heads: int = 1, **kwargs: Any) -> None: ...

    def __init__(self, *args, algorithm="auto", num_heads=1, **kwargs):
        _refuse_projection(type(self).__name__, kwargs)
        if len(args) > 3:
            self.nonlinearity = args[3]
            args = args[:3] + args[4:]
        else:
            self.nonlinearity = kwargs.pop("nonlinearity", "tanh")
        if self.nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"RNN: nonlinearity must be 'tanh' or 'relu', got {self.nonlinearity!r}")
        super().__init__(f"RNN_{self.nonlinearity.upper()}", *args, algorithm=algorithm, num_heads=num_heads, **kwargs)


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
        num_heads: heads of H / num_heads units, each with recurrent weights of its own: weight_hh_l{k} is
            ``(G H, H / num_heads)`` for G gates, rows of each head after each other within a gate. Default: 1.

    The parameters, their names and their initialisation are those of :class:`torch.nn.GRU`, so with one head a
    state_dict goes both ways. Arguments are refused as torch refuses them; an unknown `algorithm`, or heads that do not
    divide H, are a ValueError.

    Example:
        >>> layer = weft.nn.GRU(128, 32)
        >>> output, h_n = layer(torch.randn(1000, 16, 128))
        >>> output.shape, h_n.shape
        (torch.Size([1000, 16, 32]), torch.Size([1, 16, 32]))
    """

    _torch_class = torch.nn.GRU

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
        num_heads: int = 1,
    ) -> None: ...

    @overload
    def __init__(self, *args: Any, algorithm: str = "auto", num_heads: int = 1, **kwargs: Any) -> None: ...

    def __init__(self, *args, algorithm="auto", num_heads=1, **kwargs):
        _refuse_projection(type(self).__name__, kwargs)
        super().__init__("GRU", *args, algorithm=algorithm, num_heads=num_heads, **kwargs)


class _Tuple(_Layer):
    """LSTM and SLSTM: hx and what is returned are tuples."""

    def _checked(self, hx: Sequence[Tensor] | None, packed: bool = False) -> tuple[Tensor, ...] | None:
        names, name = self._state_names, type(self).__name__
        check_state(name, hx, names, packed)
        if hx is not None and len(hx) != len(names):
            error = IndexError if len(hx) < len(names) else RuntimeError
            raise error(f"{name}: hx must be ({', '.join(names)}), got {len(hx)} tensors")
        return hx


class LSTM(_Tuple):
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
        proj_size: P < H, features of a projected h; 0 (default) for none. "persistent" multiplies the projection into
            the recurrent weights.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`. Default: "auto".
        num_heads: heads of H / num_heads units, each with recurrent weights of its own: weight_hh_l{k} is
            ``(G H, H / num_heads)`` for G gates, rows of each head after each other within a gate. Default: 1.
        return_cells: also return the last layer's c at every step. Default: False.

    The parameters, their names and their initialisation are those of :class:`torch.nn.LSTM`, so with one head a
    state_dict goes both ways. Arguments are refused as torch refuses them; an unknown `algorithm`, or heads that do not
    divide H, are a ValueError.

    Example:
        >>> layer = weft.nn.LSTM(128, 32, bidirectional=True)
        >>> output, (h_n, c_n) = layer(torch.randn(1000, 16, 128))
        >>> output.shape, h_n.shape, c_n.shape
        (torch.Size([1000, 16, 64]), torch.Size([2, 16, 32]), torch.Size([2, 16, 32]))
    """

    _torch_class = torch.nn.LSTM
    _state_names = ("h0", "c0")
    _arguments = (*_Layer._arguments, "proj_size", "return_cells")
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
        num_heads: int = 1,
        return_cells: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self, *args: Any, algorithm: str = "auto", num_heads: int = 1, return_cells: bool = False, **kwargs: Any
    ) -> None: ...

    def __init__(self, *args, algorithm="auto", num_heads=1, return_cells=False, **kwargs):
        if not isinstance(return_cells, bool):
            raise TypeError(f"LSTM: return_cells must be a bool, got {type(return_cells).__name__}")
        super().__init__("LSTM", *args, algorithm=algorithm, num_heads=num_heads, **kwargs)
        self.return_cells = return_cells

    def extra_repr(self) -> str:
        return super().extra_repr() + (", return_cells=True" if self.return_cells else "")

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
            (a PackedSequence for a PackedSequence); and ``(h_n, c_n)``, laid out like `hx`. With `return_cells` then
            ``cells``, the last layer's c, laid out like the input and ``directions * hidden_size`` wide (a
            PackedSequence for a PackedSequence).

        Raises:
            ValueError: the input's rank or dtype does not fit.
            RuntimeError: a size, or the rank, dtype or device of `hx` does not fit; there is no time step.
        """
        if isinstance(input, Proxy):
            return leaf(self, input, hx)
        return self._forward(input, self._checked(hx, isinstance(input, PackedSequence)))


class SLSTM(_Tuple):
    """The sLSTM of xLSTM: an LSTM with an exponential input gate, a normaliser n and a stabiliser m.

    With a = W_i* x[t] + b_i* + W_h* h[t-1] + b_h*, gates i, f, z, o in this order:

    z = tanh(a_z), o = sigmoid(a_o), l = log sigmoid(a_f), m[t] = max(l + m[t-1], a_i), i = exp(a_i - m[t]),
    f = exp(l + m[t-1] - m[t]), c[t] = f c[t-1] + i z, n[t] = f n[t-1] + i, h[t] = o c[t] / n[t].

    Source: Beck et al., "xLSTM: Extended Long Short-Term Memory", NeurIPS 2024, equations 9 to 18. A state with n = 0
    holds nothing: then m[t] = a_i, so that zeros are the initial state.

    Args:
        input_size: features of the input.
        hidden_size: H, features of the state.
        num_layers: layers on top of each other. Default: 1.
        num_heads: heads of H / num_heads units, each with recurrent weights of its own. Default: 4.
        forget_gate: "sigmoid" (default), or "exp" for l = a_f.
        bias: with b_ih and b_hh. Default: True.
        batch_first: padded input and output are ``(B, T, features)``; states are not. Default: False.
        dropout: probability of dropping an output between layers while training. Default: 0.
        bidirectional: a second direction, from the last step to the first. Default: False.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`; "torch" runs as "persistent". Default: "auto".

    Parameters have the names of :class:`torch.nn.LSTM`'s: weight_ih_l{k} ``(4 H, features)``, weight_hh_l{k}
    ``(4 H, H / num_heads)``, rows of each head after each other within a gate, bias_ih_l{k} and bias_hh_l{k} ``(4 H)``.
    Weights are uniform as an LSTM's. Biases are zero but the forget gate's, which within each head falls from 5 to -7
    by a power law, as in the authors' models: 5 - 12 (k / (H / num_heads - 1))^e, e from 0.3 in the first layer to 3
    in the last.

    Raises:
        ValueError: num_heads does not divide H, an unknown forget_gate or algorithm; else as torch's layers.

    Example:
        >>> layer = weft.nn.SLSTM(128, 32, num_heads=2)
        >>> output, (h_n, c_n, n_n, m_n) = layer(torch.randn(1000, 16, 128))
        >>> output.shape, h_n.shape
        (torch.Size([1000, 16, 32]), torch.Size([1, 16, 32]))
    """

    takes_slices = False

    _torch_class = torch.nn.RNNBase  # torch has none
    _state_names = ("h0", "c0", "n0", "m0")
    _arguments = (*_Layer._arguments, "forget_gate")
    forget_gate: str

    @constructor
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        num_heads: int = 4,
        forget_gate: Literal["sigmoid", "exp"] = "sigmoid",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        algorithm: str = "auto",
    ) -> None:
        if forget_gate not in ("sigmoid", "exp"):
            raise ValueError(f"SLSTM: forget_gate must be 'sigmoid' or 'exp', got {forget_gate!r}")
        self.forget_gate = forget_gate
        options = {"bias": bias, "batch_first": batch_first, "dropout": dropout, "bidirectional": bidirectional}
        super().__init__(
            "LSTM", input_size, hidden_size, num_layers, algorithm=algorithm, num_heads=num_heads, device=device,
            dtype=dtype, **options,
        )  # fmt: skip
        self.mode = "SLSTM" if forget_gate == "sigmoid" else "SLSTM_EXP"

    @property
    def _is_torchs(self) -> bool:
        return False

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.bias:
            return
        H = self.hidden_size
        with torch.no_grad():
            for name in self._flat_weights_names:
                if name.startswith("bias"):
                    bias = getattr(self, name).zero_()
                if name.startswith("bias_ih"):
                    layer = int(name.removeprefix("bias_ih_l").removesuffix("_reverse"))
                    exponent = 0.3 * 10 ** (layer / max(self.num_layers - 1, 1))
                    bias[H : 2 * H] = forget_bias(H, self.num_heads, exponent, bias.device)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.forget_gate == "sigmoid" else f", forget_gate={self.forget_gate!r}")

    @overload
    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor, Tensor, Tensor]]: ...

    def forward(self, input, hx=None):
        """Run the layer.

        Args:
            input: ``(T, B, input_size)``; ``(B, T, input_size)`` with `batch_first`; ``(T, input_size)`` unbatched;
                or a PackedSequence.
            hx: ``(h0, c0, n0, m0)``, each ``(layers * directions, B, hidden_size)``, without the B unbatched; None for
                zeros.

        Returns:
            ``output``, the last layer's h, laid out like the input and ``directions * hidden_size`` wide (a
            PackedSequence for a PackedSequence); and ``(h_n, c_n, n_n, m_n)``, laid out like `hx`.

        Raises:
            ValueError: the input's rank or dtype does not fit.
            RuntimeError: a size, or the rank, dtype or device of `hx` does not fit; there is no time step.
        """
        if isinstance(input, Proxy):
            return leaf(self, input, hx)
        return self._forward(input, self._checked(hx, isinstance(input, PackedSequence)))


def forget_bias(hidden_size: int, num_heads: int, exponent: float, device: torch.device) -> Tensor:
    """An sLSTM's initial bias of the forget gate, (H)."""
    size = hidden_size // num_heads
    place = torch.arange(size, device=device, dtype=torch.float32) / max(size - 1, 1)
    return (5 - 12 * place**exponent).repeat(num_heads)


def check_heads(name: str, num_heads: Any, hidden_size: Any) -> None:
    """Refuse a number of heads that does not divide H; of an H that is no size other words follow."""
    if not isinstance(num_heads, int) or isinstance(num_heads, bool):
        raise TypeError(f"{name}: num_heads must be an int, got {type(num_heads).__name__}")
    sized = isinstance(hidden_size, int) and hidden_size > 0
    if num_heads < 1 or (sized and hidden_size % num_heads):
        raise ValueError(f"{name}: num_heads must divide hidden_size {hidden_size}, got {num_heads}")


def leaves_weft() -> bool:
    """Whether the call is recorded for programs that do not know Weft's operators."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() and onnx_exporting()
    return in_torchscript_trace()


def _new(kind: type[_Layer]) -> _Layer:
    """An empty layer, which unpickling fills."""
    return kind.__new__(kind)


def _refuse_projection(name: str, kwargs: dict[str, Any]) -> None:
    if "proj_size" in kwargs:
        raise ValueError(f"{name}: proj_size argument is only supported for LSTM, not RNN or GRU")


for _layer in (RNN, GRU, LSTM, SLSTM):
    _layer.__module__ = "weft.nn"  # where users, pickles and documents find them
for _layer in (RNN, GRU):
    name_after(_layer, "forward")
