"""weft.nn.RNN, GRU and LSTM: torch.nn's arguments and parameters, with a choice of algorithm."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from .. import reference
from . import choice, projection, torch_rnn

__all__ = ["GRU", "LSTM", "RNN"]

Device: TypeAlias = torch.device | str | int | None

_rnn = torch.ops.weft.rnn.default
_scan_rnn = torch.ops.weft.scan_rnn.default
_capability = functools.cache(torch.cuda.get_device_capability)
_CELLS = {"RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu", "GRU": "gru", "LSTM": "lstm"}


class _Call(NamedTuple):
    """One call of a layer, checked."""

    case: choice.Case
    input: Tensor
    """(T, B, I), (B, T, I) with batch_first, or packed data (N, I)."""
    state: tuple[Tensor, ...] | None
    """(h,), for an LSTM (h, c); None for zeros."""
    batch: int | torch.SymInt | Tensor
    batch_sizes: Tensor | None
    weights: list[Tensor]
    autocast: torch.dtype | None
    """The dtype of the autocast region, or None outside of one."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of output and h_n, and of c_n."""


class _Result(NamedTuple):
    """What a run returns: output (T, B, features) or as the input is laid out; (h_n,), for an LSTM (h_n, c_n); the last
    layer's c at every step, where it is asked for."""

    output: Tensor
    final: tuple[Tensor, ...]
    cells: Tensor | None = None


class _Layer(torch.nn.RNNBase):
    """What the three layers share."""

    _algorithm: str
    # An attribute of the class, so that layers which accelerate made and older pickles have it.
    return_cells: bool = False

    def __init__(self, mode: str, *args: Any, algorithm: str, **kwargs: Any) -> None:
        self.algorithm = algorithm
        super().__init__(mode, *args, **kwargs)

    @property
    def algorithm(self) -> str:
        """The algorithm asked for; may be set at any time."""
        return self._algorithm

    @algorithm.setter
    def algorithm(self, name: str) -> None:
        self._algorithm = choice.check_algorithm(name)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self._algorithm == "auto" else f"{text}, algorithm={self._algorithm!r}"

    def _current_weights(self) -> list[Tensor]:
        """The weights as the attributes are now. torch asks a weak reference and two attributes per weight; here an
        unchanged parameter costs one look-up in a dictionary, and only a changed one goes torch's way."""
        parameters = self._parameters
        for name, weight in zip(self._flat_weights_names, self._flat_weights, strict=False):
            if parameters.get(name) is not weight:
                break
        else:
            return self._flat_weights
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            # Tensors of a trace or a transform must not stay behind in the module.
            return [getattr(self, name) for name in self._flat_weights_names]
        self._update_flat_weights()
        return self._flat_weights

    # Checks: in torch's order, so that the exception types agree.

    def _prepare(self, input: Tensor | PackedSequence, state: tuple[Tensor, ...] | None) -> _Call:
        """Check the arguments of forward and look at what the choice depends on."""
        weights = self._current_weights()
        if isinstance(input, PackedSequence):
            input, batch_sizes, sorted_indices, _ = input
            if state is not None and sorted_indices is not None:
                state = tuple(s.index_select(1, sorted_indices) for s in state)
            self._check_input(input, weights[0], 2)
            batch = self._packed_batch(state, batch_sizes)
        else:
            batch_sizes = None
            dim = input.dim()
            if dim != 2 and dim != 3:
                size = self.input_size
                layout = f"(T, B, {size}), (B, T, {size}) with batch_first, or unbatched (T, {size})"
                self._fail(ValueError, f"Expected input to be 2D or 3D, {layout}; got {dim}D tensor instead")
            if state is not None and any(s.dim() != dim for s in state):
                kind, got = "unbatched 2-D" if dim == 2 else "batched 3-D", " and ".join(f"{s.dim()}-D" for s in state)
                self._fail(RuntimeError, f"For {kind} input, hx should also be {dim}-D but got {got}")
            if dim == 2:
                input = input.unsqueeze(0 if self.batch_first else 1)
                state = None if state is None else tuple(s.unsqueeze(1) for s in state)
            self._check_input(input, weights[0], 3)
            batch = input.size(0 if self.batch_first else 1)
        device = input.device.type
        autocast = None
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
        if state is not None:
            self._check_state(input, state, batch, autocast is not None)
        packed = batch_sizes is not None
        dtypes = self._result_dtypes(input, state, packed, autocast)
        sizes = None, None
        if not torch.compiler.is_compiling():
            sizes = batch, batch_sizes.size(0) if packed else input.size(1 if self.batch_first else 0)
            if sizes[1] == 0:
                self._fail(RuntimeError, "input must have at least one time step, got none")
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (*weights, input, *(state or ())))
        index, tf32 = None, False
        if device == "cuda" and not torch.compiler.is_compiling():
            index, tf32 = input.device.index, choice.takes_tf32(device, dtypes[0])
        case = choice.Case(
            _CELLS[self.mode], device, dtypes[0], self.hidden_size, *sizes, packed, self.proj_size, *_transforms(),
            self.num_layers, 2 if self.bidirectional else 1, trains, self.return_cells, self.input_size, index,
            None if index is None else _capability(index), tf32, autocast is not None and input.dtype != torch.float64,
        )  # fmt: skip
        return _Call(case, input, state, batch, batch_sizes, weights, autocast, dtypes)

    def _fail(self, error: type[Exception], message: str) -> NoReturn:
        raise error(f"{type(self).__name__}: {message}")

    def _check_input(self, input: Tensor, weight: Tensor, dim: int) -> None:
        if input.dtype != weight.dtype and not torch._C._is_any_autocast_enabled():
            # torch.nn.LSTM leaves packed input to its kernel. The words are torch's, whose tests look for them.
            error = RuntimeError if dim == 2 and self.mode == "LSTM" else ValueError
            raise error(
                f"RNN input dtype ({input.dtype}) does not match weight dtype ({weight.dtype}). "
                f"Convert input: input.to({weight.dtype}), or convert model: model.to({input.dtype})"
            )
        if input.dim() != dim:
            self._fail(RuntimeError, f"packed input must have {dim} dimensions, got {input.dim()}")
        if input.size(-1) != self.input_size:
            expected = f"Expected {self.input_size}, got {input.size(-1)}"
            self._fail(RuntimeError, f"input.size(-1) must be equal to input_size. {expected}")
        if input.device != weight.device:
            self._fail(RuntimeError, f"input must be on the weights' device, {weight.device}, got {input.device}")

    def _check_state(self, input: Tensor, state: tuple[Tensor, ...], batch: Any, autocast: bool) -> None:
        count = self.num_layers * (2 if self.bidirectional else 1)
        names = ("hidden[0]", "hidden[1]") if self.mode == "LSTM" else ("hidden",)
        for name, s, width in zip(names, state, (self.proj_size or self.hidden_size, self.hidden_size), strict=False):
            expected = (count, batch, width)
            if s.shape != expected:
                layout = "(layers * directions, B, features)"
                self._fail(RuntimeError, f"Expected {name} size {expected} = {layout}, got {list(s.shape)}")
            if s.device != input.device:
                self._fail(RuntimeError, f"{name} must be on the input's device, {input.device}, got {s.device}")
            if s.dtype != input.dtype and not autocast:
                self._fail(RuntimeError, f"{name} must have the input's dtype, {input.dtype}, got {s.dtype}")

    def _packed_batch(self, state: tuple[Tensor, ...] | None, batch_sizes: Tensor) -> Any:
        # Read from the data, a size would be unknown to a compiled graph, and a state's could not be compared with it.
        if torch.compiler.is_compiling() and state is not None:
            return state[0].size(1)
        return int(batch_sizes[0])

    def _result_dtypes(
        self, input: Tensor, state: tuple[Tensor, ...] | None, packed: bool, autocast: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of output and h_n, and of c_n: the input's, under autocast what torch's layers return there."""
        if autocast is None or input.dtype == torch.float64 or not input.dtype.is_floating_point:
            return input.dtype, input.dtype
        if input.device.type == "cuda":  # cuDNN's rule is to run in half, whatever autocast's dtype
            return torch.float16, torch.float16
        if input.device.type != "cpu" or self.mode in ("RNN_TANH", "RNN_RELU"):
            return autocast, autocast
        # The CPU's step loops mix autocast's matrix products with the state as it came.
        carried = input.dtype if state is None else state[-1].dtype
        carried = torch.promote_types(carried, autocast)
        if self.mode == "GRU" or (packed and self.proj_size == 0):
            return carried, carried
        return autocast, carried if self.proj_size > 0 else autocast

    # The run.

    def _forward(self, input: Tensor | PackedSequence, state: tuple[Tensor, ...] | None) -> Any:
        """``output, final`` or, with return_cells, ``output, final, cells``."""
        name = self._choice_at_once(input, state)
        if name is not None:
            return self._run_at_once(name, input, state)
        call = self._prepare(input, state)
        output, final, cells = self._run(choice.choose_cached(self._algorithm, call.case)[0], call)
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

    def _choice_at_once(self, input: Tensor | PackedSequence, state: tuple[Tensor, ...] | None) -> str | None:
        """The algorithm for an eager call that is in order and ends in one call of torch's kernel or of an engine; None
        for every other.

        Small steps are bound by the host: this asks less than torch.nn does. Anything else goes the long way, which
        also finds the words for what is wrong."""
        if isinstance(input, PackedSequence) or self.return_cells or torch.compiler.is_compiling():
            return None
        if torch._C._is_any_autocast_enabled() or torch._C._are_functorch_transforms_active():
            return None
        if forward_ad._current_level >= 0:
            return None
        weights = self._current_weights()
        dtype, device = input.dtype, input.device
        if dtype != weights[0].dtype or device != weights[0].device:
            return None
        shapes = None
        if state is not None:
            for s in state:
                if s.dtype != dtype or s.device != device:
                    return None
            shapes = state[0].shape if len(state) == 1 else (state[0].shape, state[1].shape)
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (*weights, input, *(state or ())))
        try:
            name = _choice_for_shapes(
                self._algorithm, self.mode, input.shape, shapes, dtype, device, self.batch_first, self.input_size,
                self.hidden_size, self.proj_size, self.num_layers, self.bidirectional, trains,
                choice.takes_tf32(device.type, dtype),
            )  # fmt: skip
        except TypeError:  # make_fx gives sizes that are symbols, which have no hash
            return None
        if name == "torch" and not all(s.is_contiguous() for s in state or ()):
            return None
        return name

    def _run_at_once(self, name: str, input: Tensor, state: tuple[Tensor, ...] | None) -> Any:
        lstm = self.mode == "LSTM"
        if name == "torch":
            kernel = torch_rnn.KERNELS[_CELLS[self.mode]]
            output, *final = kernel(
                input, state if lstm else state[0], self._flat_weights, self.bias, self.num_layers, self.dropout,
                self.training, self.bidirectional, self.batch_first,
            )  # fmt: skip
            return output, tuple(final)
        steps = input.transpose(0, 1) if self.batch_first else input
        if name == "persistent":
            h0, c0 = (None, None) if state is None else (state[0], state[1] if lstm else None)
            output, h_n, c_n, _, _ = _rnn(
                steps, h0, c0, self._flat_weights, None, cell=_CELLS[self.mode], bidirectional=self.bidirectional
            )
            final = (h_n, c_n) if lstm else (h_n,)
        else:
            output, final = self._scan_layers(steps, state, steps.shape[1], self._flat_weights, _CELLS[self.mode])
        return output.transpose(0, 1) if self.batch_first else output, final

    def _run(self, name: str, call: _Call) -> _Result:
        """Run a call by an algorithm that can."""
        compiling = torch.compiler.is_compiling()
        if name == "torch" and not compiling and not torch_rnn.needs_any_derivative(call.case):
            return self._run_torch(call)
        transpose = self.batch_first and call.batch_sizes is None
        if transpose:
            call = call._replace(input=call.input.transpose(0, 1))
        if name == "torch":
            result = self._run_torch_without_dropout(call, compiling)
        elif name == "persistent":
            result = self._run_persistent(call)
        else:
            result = self._run_scan(call) if name == "scan" else self._run_reference(call)
        if not transpose:
            return result
        cells = None if result.cells is None else result.cells.transpose(0, 1)
        return _Result(result.output.transpose(0, 1), result.final, cells)

    def _zero_state(self, call: _Call) -> tuple[Tensor, ...]:
        count = self.num_layers * (2 if self.bidirectional else 1)
        h0 = call.input.new_zeros(count, call.batch, self.proj_size or self.hidden_size)
        if self.mode != "LSTM":
            return (h0,)
        return h0, h0 if self.proj_size == 0 else call.input.new_zeros(count, call.batch, self.hidden_size)

    def _run_torch(self, call: _Call) -> _Result:
        output, *final = torch_rnn.call(
            call.case.cell,
            call.input,
            call.state or self._zero_state(call),
            call.weights,
            self.bias,
            self.num_layers,
            self.dropout,
            self.training,
            self.bidirectional,
            self.batch_first,
            call.batch_sizes,
        )
        return _Result(output, tuple(final))

    # From here on padded input is (T, B, I).

    def _run_torch_without_dropout(self, call: _Call, compiling: bool) -> _Result:
        """torch's kernel where its backward pass computes the forward pass again, so that no dropout mask may be drawn
        inside it."""
        input, weights = call.input, call.weights
        state = call.state or self._zero_state(call)
        dropout = self.dropout if self.training else 0.0
        layers = self.num_layers if dropout == 0 else 1
        rows = layers * (2 if self.bidirectional else 1)
        stride = len(weights) // self.num_layers * layers
        finals = []
        for group in range(self.num_layers // layers):
            arguments = (
                input,
                [s[group * rows : (group + 1) * rows] for s in state],
                weights[group * stride : (group + 1) * stride],
                call.batch_sizes,
                call.case.cell,
                self.bias,
                layers,
                self.bidirectional,
            )
            if compiling:
                input, *final = torch.ops.weft.torch_rnn(*arguments, call.autocast, *call.dtypes)
            else:
                input, *final = torch_rnn.call_with_any_derivative(*arguments)
            finals.append(final)
            if dropout > 0 and group + 1 < self.num_layers:
                input = F.dropout(input, dropout, True)
        return _Result(input, tuple(_joined(parts) for parts in zip(*finals, strict=True)))

    def _run_persistent(self, call: _Call) -> _Result:
        if call.autocast is None:
            return self._run_layers(call)
        # What autocast would cast the op's arguments to is not always what torch's layers compute in.
        with torch.autocast(call.input.device.type, enabled=False):
            return self._run_layers(call)

    def _run_layers(self, call: _Call) -> _Result:
        input, state, weights, cell = self._in_one_dtype(call)
        lstm = cell == "lstm"
        rows = 2 if self.bidirectional else 1
        stride = len(weights) // self.num_layers
        cells, finals = None, []
        for layer in range(self.num_layers):
            last = layer + 1 == self.num_layers
            h0, c0 = None, None
            if state is not None:
                h0, c0, *_ = (*(s.narrow(0, layer * rows, rows) for s in state), None)
            operands = input, h0, c0, weights[layer * stride : (layer + 1) * stride], call.batch_sizes
            flags = {"bidirectional": self.bidirectional, "keep_cells": last and self.return_cells}
            if self.proj_size > 0:
                input, h_n, c_n, cells = projection.lstm(*operands, **flags)
            else:
                input, h_n, c_n, cells, _ = _rnn(*operands, cell=cell, **flags)
            finals.append((h_n, c_n) if lstm else (h_n,))
            if self.dropout > 0 and self.training and not last:
                input = F.dropout(input, self.dropout, True)
        # Under autocast on a CPU torch keeps the c of a projected LSTM wider than the rest.
        final = tuple(_joined(p).to(dtype) for p, dtype in zip(zip(*finals, strict=True), call.dtypes, strict=False))
        return _Result(input, final, cells.to(call.dtypes[1]) if self.return_cells else None)

    def _in_one_dtype(self, call: _Call) -> tuple[Tensor, tuple[Tensor, ...] | None, list[Tensor], str]:
        """Input, state and weights in the dtype that torch's layer runs in here, and the cell."""
        input, state, weights = call.input, call.state, call.weights
        if call.autocast is not None:
            dtype = call.dtypes[0]
            input = input.to(dtype)
            weights = [w.to(dtype) for w in weights]
            state = None if state is None else tuple(s.to(dtype) for s in state)
        return input, state, weights, call.case.cell

    def _run_scan(self, call: _Call) -> _Result:
        input, state, weights, cell = self._in_one_dtype(call)
        return _Result(*self._scan_layers(input, state, call.batch, weights, cell))

    def _scan_layers(
        self, input: Tensor, state: tuple[Tensor, ...] | None, batch: Any, weights: list[Tensor], cell: str
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output and final state of all layers by the scan, time first."""
        lstm = cell == "lstm"
        directions = 2 if self.bidirectional else 1
        if state is None:
            h0 = c0 = (input.new_zeros(1, batch, self.hidden_size),) * (self.num_layers * directions)
        else:
            h0, c0 = _apart(state[0]), _apart(state[-1]) if lstm else ()
        stride = 4 if self.bias else 2
        h_n, c_n = [], []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
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
                    reverse=direction == 1,
                )
                outputs.append(output)
                h_n.append(h)
                c_n.append(c)
            input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if self.dropout > 0 and self.training and layer + 1 < self.num_layers:
                input = F.dropout(input, self.dropout, True)
        return input, (_joined(h_n), _joined(c_n)) if lstm else (_joined(h_n),)

    def _run_reference(self, call: _Call) -> _Result:
        input, state = call.input, call.state or self._zero_state(call)
        options: dict[str, Any] = {
            "cell": call.case.cell,
            "bias": self.bias,
            "num_layers": self.num_layers,
            "bidirectional": self.bidirectional,
            "dropout": self.dropout,
            "training": self.training,
            "batch_sizes": call.batch_sizes,
            "return_cells": self.return_cells,
        }
        if call.autocast is None:
            return _Result(*reference.rnn(input, state, call.weights, **options))
        with torch.autocast(input.device.type, enabled=False):
            wide = input.to(torch.promote_types(*call.dtypes))
            output, final, *cells = reference.rnn(wide, state, call.weights, **options)
            final = tuple(s.to(d) for s, d in zip(final, call.dtypes, strict=False))
            return _Result(output.to(call.dtypes[0]), final, *(c.to(call.dtypes[1]) for c in cells))


@choice.remember_choices
def _choice_for_shapes(
    algorithm: str, mode: str, input: torch.Size, state: Any, dtype: torch.dtype, device: torch.device,
    batch_first: bool, input_size: int, hidden_size: int, proj_size: int, layers: int, bidirectional: bool,
    trains: bool, tf32: bool,
) -> str | None:  # fmt: skip
    """What `_choice_at_once` returns for tensors of these shapes; `state` is that of h0, or those of h0 and c0."""
    if len(input) != 3 or input[2] != input_size:
        return None
    batch, steps = input[:2] if batch_first else (input[1], input[0])
    directions = 2 if bidirectional else 1
    hidden = (layers * directions, batch, proj_size or hidden_size)
    if steps == 0 or state not in (None, hidden if mode != "LSTM" else (hidden, (*hidden[:2], hidden_size))):
        return None
    index = device.index if device.type == "cuda" else None
    case = choice.Case(
        _CELLS[mode], device.type, dtype, hidden_size, batch, steps, False, proj_size, False, False, layers,
        directions, trains, False, input_size, index, None if index is None else _capability(index), tf32,
    )  # fmt: skip
    name, _ = choice.choose(algorithm, case)
    if name == "persistent":
        return name if layers == 1 and proj_size == 0 else None
    if name == "scan":
        return name if layers == directions == 1 else None
    at_once = name == "torch" and state is not None and not torch_rnn.needs_any_derivative(case)
    return name if at_once else None


def _transforms() -> tuple[bool, bool]:
    """Whether a torch.func transform or forward-mode AD differentiates here; and whether torch.func.vmap alone maps."""
    if forward_ad._current_level >= 0:
        return True, False
    if not torch._C._are_functorch_transforms_active():
        return False, False
    if torch.compiler.is_compiling():  # which cannot trace what follows
        return True, False
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    kinds = {interpreter.key() for interpreter in retrieve_all_functorch_interpreters()}
    mapped = kinds == {torch._C._functorch.TransformType.Vmap}
    return not mapped, mapped


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _apart(state: Tensor) -> tuple[Tensor, ...]:
    # Short sequences wait for the host, for which a node of autograd is much.
    return (state,) if state.shape[0] == 1 else state.split(1)


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
        proj_size: P < H, features of a projected h; 0 (default) for none. "persistent" multiplies the projection into
            the recurrent weights.
        device, dtype: of the parameters.
        algorithm: what runs, see :mod:`weft.nn`. Default: "auto".
        return_cells: also return the last layer's c at every step. Default: False.

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
        if hx is not None and len(hx) != 2:
            error = IndexError if len(hx) < 2 else RuntimeError
            self._fail(error, f"hx must be (h0, c0), got {len(hx)} tensors")
        return self._forward(input, hx)


def _refuse_projection(kwargs: dict[str, Any]) -> None:
    if "proj_size" in kwargs:
        raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")


for _layer in (RNN, GRU, LSTM):
    _layer.__module__ = "weft.nn"  # where users, pickles and documents find them
