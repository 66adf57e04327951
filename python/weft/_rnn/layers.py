"""weft.nn.RNN, GRU and LSTM: torch.nn's arguments and parameters, with a choice of algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, TypeAlias, overload

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.fx.proxy import TraceError
from torch.nn.utils.rnn import PackedSequence

from .._base.over_ranks import TakesSlices
from .._base.torch_private import in_torchscript_trace, in_transform, onnx_exporting
from . import calls, runs
from .arguments import check_constructor, check_input, check_state
from .dropin.shown_class import own_class, shown_class
from .select import choice
from .slices import run_slice

__all__ = ["GRU", "LSTM", "RNN"]

Device: TypeAlias = torch.device | str | int | None


def leaf(module: torch.nn.Module, input: Proxy, hx: Any) -> Proxy:
    """One node of the graph that torch.fx.symbolic_trace builds, as it makes of torch's layers and cells."""
    path = input.tracer.path_of_module(module)
    if not path:
        raise TraceError(f"{type(module).__name__}: torch.fx.symbolic_trace takes a model with this layer inside")
    return input.tracer.create_proxy("call_module", path, (input,) if hx is None else (input, hx), {})


class _Layer(TakesSlices, torch.nn.RNNBase):
    """What the three layers share."""

    __jit_unused_properties__: ClassVar[list[str]] = [
        *torch.nn.RNNBase.__jit_unused_properties__, "__class__", "algorithm"
    ]  # fmt: skip
    _torch_class: type[torch.nn.RNNBase]
    _algorithm: str
    # An attribute of the class, so that layers which accelerate made and older pickles have it.
    return_cells: bool = False
    _accelerated: bool = False
    """Whether weft.accelerate has put it in a torch layer's place."""
    _arguments: ClassVar[tuple[str, ...]] = (
        "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "device", "dtype",
        "algorithm",
    )  # fmt: skip

    def __new__(cls, *args: Any, **kwargs: Any) -> _Layer:
        return super().__new__(own_class(cls))

    def __init__(self, mode: str, *args: Any, algorithm: str, **kwargs: Any) -> None:
        name = type(self).__name__
        check_constructor(name, kwargs, self._arguments)
        for argument in ("input_size", "hidden_size")[len(args) :]:
            if argument not in kwargs:
                raise TypeError(f"{name}: {argument} is missing")
        self.algorithm = algorithm
        super().__init__(mode, *args, **kwargs)

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
        self._algorithm = choice.check_algorithm(name)

    def extra_repr(self) -> str:
        text = super().extra_repr()
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
        if self.mode == "LSTM":
            return self._torch_class.forward(self, input, state)
        output, h_n = self._torch_class.forward(self, input, None if state is None else state[0])
        return output, (h_n,)

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.script cannot compile Weft's layers; torch.jit.trace, torch.export and "
            "torch.compile take them"
        )

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
        output, final, cells = runs.run(self, choice.choose_cached(self._algorithm, call.case)[0], call)
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
        check_state(type(self).__name__, hx, pair=False)
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

    The parameters, their names and their initialisation are those of :class:`torch.nn.RNN`, so a state_dict goes both
    ways. Arguments are refused as torch refuses them; an unknown `algorithm` is a ValueError.

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
    ways. Arguments are refused as torch refuses them; an unknown `algorithm` is a ValueError.

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
        proj_size: P < H, features of a projected h; 0 (default) for none. "persistent" multiplies the projection into
            the recurrent weights.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`. Default: "auto".
        return_cells: also return the last layer's c at every step. Default: False.

    The parameters, their names and their initialisation are those of :class:`torch.nn.LSTM`, so a state_dict goes both
    ways. Arguments are refused as torch refuses them; an unknown `algorithm` is a ValueError.

    Example:
        >>> layer = weft.nn.LSTM(128, 32, bidirectional=True)
        >>> output, (h_n, c_n) = layer(torch.randn(1000, 16, 128))
        >>> output.shape, h_n.shape, c_n.shape
        (torch.Size([1000, 16, 64]), torch.Size([2, 16, 32]), torch.Size([2, 16, 32]))
    """

    _torch_class = torch.nn.LSTM
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
        return_cells: bool = False,
    ) -> None: ...

    @overload
    def __init__(self, *args: Any, algorithm: str = "auto", return_cells: bool = False, **kwargs: Any) -> None: ...

    def __init__(self, *args, algorithm="auto", return_cells=False, **kwargs):
        if not isinstance(return_cells, bool):
            raise TypeError(f"LSTM: return_cells must be a bool, got {type(return_cells).__name__}")
        super().__init__("LSTM", *args, algorithm=algorithm, **kwargs)
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
        check_state(type(self).__name__, hx, pair=True)
        self._check_pair(hx)
        return self._forward(input, hx)

    def _check_pair(self, hx: Sequence[Tensor] | None) -> None:
        if hx is not None and len(hx) != 2:
            error = IndexError if len(hx) < 2 else RuntimeError
            raise error(f"{type(self).__name__}: hx must be (h0, c0), got {len(hx)} tensors")


def leaves_weft() -> bool:
    """Whether the call is recorded for programs that do not know Weft's operators."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() and onnx_exporting()
    return in_torchscript_trace()


def _new(kind: type[_Layer]) -> _Layer:
    """An empty layer, which unpickling fills."""
    return kind.__new__(kind)


def _refuse_projection(kwargs: dict[str, Any]) -> None:
    if "proj_size" in kwargs:
        raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")


for _layer in (RNN, GRU, LSTM):
    _layer.__module__ = "weft.nn"  # where users, pickles and documents find them
