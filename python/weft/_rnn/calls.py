"""A call of a layer: its arguments checked, and what the choice of an algorithm depends on."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import RNNBase
from torch.nn.utils.rnn import PackedSequence

from .._base.torch_private import any_autocast, in_forward_mode, in_torchscript_trace, in_transform, maps_alone
from .dropin import torch_rnn
from .dropin.torch_limits import autocast_dtypes
from .select.case import Case, takes_tf32
from .select.choice import choose, remember_choices
from .table import MODES, traits

__all__ = ["Call", "choose_at_once", "prepare"]

_capability = functools.cache(torch.cuda.get_device_capability)


class Call(NamedTuple):
    """One call of a layer, checked."""

    case: Case
    input: Tensor
    """(T, B, I), (B, T, I) with batch_first, or packed data (N, I)."""
    state: tuple[Tensor, ...] | None
    """(h,), for an LSTM (h, c), for an sLSTM (h, c, n, m); None for zeros."""
    batch: int | torch.SymInt | Tensor
    batch_sizes: Tensor | None
    weights: list[Tensor]
    autocast: torch.dtype | None
    """The dtype of the autocast region, or None outside of one."""
    dtypes: tuple[torch.dtype, ...]
    """Of output and h_n, and of the other last states."""


def prepare(layer: RNNBase, input: Tensor | PackedSequence, state: tuple[Tensor, ...] | None) -> Call:
    """Check the arguments of forward, in torch's order so that the exception types agree, and look at what the choice
    depends on."""
    weights = layer._current_weights()
    if isinstance(input, PackedSequence):
        input, batch_sizes, sorted_indices, _ = input
        if state is not None and sorted_indices is not None:
            state = tuple(s.index_select(1, sorted_indices) for s in state)
        _check_input(layer, input, weights[0], 2)
        batch = _packed_batch(state, batch_sizes)
    else:
        batch_sizes = None
        dim = input.dim()
        if dim != 2 and dim != 3:
            size = layer.input_size
            layout = f"(T, B, {size}), (B, T, {size}) with batch_first, or unbatched (T, {size})"
            _fail(layer, ValueError, f"Expected input to be 2D or 3D, {layout}; got {dim}D tensor instead")
        if state is not None and any(s.dim() != dim for s in state):
            kind, got = "unbatched 2-D" if dim == 2 else "batched 3-D", " and ".join(f"{s.dim()}-D" for s in state)
            _fail(layer, RuntimeError, f"For {kind} input, hx should also be {dim}-D but got {got}; {_layout(layer)}")
        if dim == 2:
            input = input.unsqueeze(0 if layer.batch_first else 1)
            state = None if state is None else tuple(s.unsqueeze(1) for s in state)
        _check_input(layer, input, weights[0], 3)
        batch = input.size(0 if layer.batch_first else 1)
    device = input.device.type
    autocast = None
    if any_autocast() and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    if state is not None:
        _check_state(layer, input, state, batch, autocast is not None)
    packed = batch_sizes is not None
    dtypes = _result_dtypes(layer, input, state, batch_sizes, autocast)
    sizes = None, None
    if not torch.compiler.is_compiling():
        sizes = batch, batch_sizes.size(0) if packed else input.size(1 if layer.batch_first else 0)
        if sizes[1] == 0:
            _fail(layer, RuntimeError, "input must have at least one time step, got none")
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (*weights, input, *(state or ())))
    index, tf32 = None, False
    if device == "cuda" and not torch.compiler.is_compiling():
        index, tf32 = input.device.index, takes_tf32(device, dtypes[0])
    transformed, mapped = _transforms()
    case = Case(
        cell=MODES[layer.mode],
        device=device,
        dtype=dtypes[0],
        hidden_size=layer.hidden_size,
        batch=sizes[0],
        steps=sizes[1],
        packed=packed,
        proj_size=layer.proj_size,
        transformed=transformed,
        mapped=mapped,
        layers=layer.num_layers,
        directions=2 if layer.bidirectional else 1,
        trains=trains,
        keeps_cells=layer.return_cells,
        input_size=layer.input_size,
        heads=layer.num_heads,
        index=index,
        capability=None if index is None else _capability(index),
        tf32=tf32,
        autocast=autocast is not None and input.dtype != torch.float64,
    )
    return Call(case, input, state, batch, batch_sizes, weights, autocast, dtypes)


def _fail(layer: RNNBase, error: type[Exception], message: str) -> NoReturn:
    raise error(f"{type(layer).__name__}: {message}")


def _layout(layer: RNNBase) -> str:
    """What a batched input is, for messages."""
    sizes = f"(B, T, {layer.input_size})" if layer.batch_first else f"(T, B, {layer.input_size})"
    return f"a batched input is {sizes}, as batch_first is {layer.batch_first}"


def _check_input(layer: RNNBase, input: Tensor, weight: Tensor, dim: int) -> None:
    if input.dtype != weight.dtype and not any_autocast():
        # torch.nn.LSTM leaves packed input to its kernel. The words are torch's, whose tests look for them.
        error = RuntimeError if dim == 2 and layer.mode == "LSTM" else ValueError
        model = f", or convert model: model.to({input.dtype})" if input.is_floating_point() else ""
        _fail(
            layer, error,
            f"RNN input dtype ({input.dtype}) does not match weight dtype ({weight.dtype}). "
            f"Convert input: input.to({weight.dtype}){model}",
        )  # fmt: skip
    if input.dim() != dim:
        _fail(layer, RuntimeError, f"packed input must have {dim} dimensions, got {input.dim()}")
    if input.size(-1) != layer.input_size:
        expected = f"Expected {layer.input_size}, got {input.size(-1)}; {_layout(layer)}"
        _fail(layer, RuntimeError, f"input.size(-1) must be equal to input_size. {expected}")
    if input.device != weight.device:
        _fail(layer, RuntimeError, f"input must be on the weights' device, {weight.device}, got {input.device}")


def _check_state(layer: RNNBase, input: Tensor, state: tuple[Tensor, ...], batch: Any, autocast: bool) -> None:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    for index, s in enumerate(state):
        name = "hidden" if len(state) == 1 else f"hidden[{index}]"
        width = layer.proj_size if index == 0 and layer.proj_size else layer.hidden_size
        expected = (count, batch, width)
        if s.shape != expected:
            layout = "(layers * directions, B, features)"
            sizes = f"Expected {name} size {expected} = {layout}, got {list(s.shape)}; {_layout(layer)}"
            _fail(layer, RuntimeError, sizes)
        if s.device != input.device:
            _fail(layer, RuntimeError, f"{name} must be on the input's device, {input.device}, got {s.device}")
        if s.dtype != input.dtype and not autocast:
            _fail(layer, RuntimeError, f"{name} must have the input's dtype, {input.dtype}, got {s.dtype}")


def _packed_batch(state: tuple[Tensor, ...] | None, batch_sizes: Tensor) -> Any:
    # Read from the data, a size would be unknown to a compiled graph, and a state's could not be compared with it.
    if torch.compiler.is_compiling() and state is not None:
        return state[0].size(1)
    return int(batch_sizes[0])


def _result_dtypes(
    layer: RNNBase,
    input: Tensor,
    state: tuple[Tensor, ...] | None,
    batch_sizes: Tensor | None,
    autocast: torch.dtype | None,
) -> tuple[torch.dtype, ...]:
    """Dtypes of output and h_n, and of the other last states: the input's, under autocast what torch's layers return
    there, of a layer that torch has not the region's."""
    others = max(traits(MODES[layer.mode]).others, 1)
    if autocast is None or input.dtype == torch.float64 or not input.dtype.is_floating_point:
        return (input.dtype,) * (1 + others)
    if others > 1:
        return (autocast,) * (1 + others)
    if input.device.type == "cuda":  # cuDNN's rule is to run in half, whatever autocast's dtype
        return torch.float16, torch.float16
    if input.device.type != "cpu":
        return autocast, autocast
    given = tuple(s.dtype for s in state) if state is not None else (input.dtype,) * (2 if layer.mode == "LSTM" else 1)
    packed: tuple[int, ...] = ()
    if batch_sizes is not None:  # torch 2.15 takes sequences of one length for a padded batch; a graph cannot look
        even = not torch.compiler.is_compiling() and bool(batch_sizes[0] == batch_sizes[-1])
        packed = (1, 1) if even else (2, 1)
    found = autocast_dtypes(MODES[layer.mode], autocast, input.dtype, given, packed, layer.proj_size > 0)
    if found is not None:
        return found
    if layer.mode in ("RNN_TANH", "RNN_RELU"):
        return autocast, autocast
    # The CPU's step loops mix autocast's matrix products with the state as it came.
    carried = input.dtype if state is None else state[-1].dtype
    carried = torch.promote_types(carried, autocast)
    if layer.mode == "GRU" or (packed and layer.proj_size == 0):
        return carried, carried
    return autocast, carried if layer.proj_size > 0 else autocast


def choose_at_once(layer: RNNBase, input: Tensor | PackedSequence, state: tuple[Tensor, ...] | None) -> str | None:
    """The algorithm for an eager call that is in order and ends in one call of torch's kernel or of an engine; None
    for every other.

    Small steps are bound by the host: this asks less than torch.nn does. Anything else goes the long way, which
    also finds the words for what is wrong."""
    if isinstance(input, PackedSequence) or layer.return_cells or torch.compiler.is_compiling():
        return None
    if any_autocast() or in_transform() or in_torchscript_trace():
        return None
    if in_forward_mode():
        return None
    weights = layer._current_weights()
    dtype, device = input.dtype, input.device
    if dtype != weights[0].dtype or device != weights[0].device:
        return None
    shapes = None
    if state is not None:
        for s in state:
            if s.dtype != dtype or s.device != device:
                return None
        shapes = state[0].shape if len(state) == 1 else tuple(s.shape for s in state)
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (*weights, input, *(state or ())))
    try:
        name = _choice_for_shapes(
            layer._algorithm, layer.mode, input.shape, shapes, dtype, device, layer.batch_first, layer.input_size,
            layer.hidden_size, layer.proj_size, layer.num_layers, layer.bidirectional, trains,
            takes_tf32(device.type, dtype), layer.num_heads,
        )  # fmt: skip
    except TypeError:  # make_fx gives sizes that are symbols, which have no hash
        return None
    if name == "torch" and not all(s.is_contiguous() for s in state or ()):
        return None
    return name


@remember_choices
def _choice_for_shapes(
    algorithm: str, mode: str, input: torch.Size, state: Any, dtype: torch.dtype, device: torch.device,
    batch_first: bool, input_size: int, hidden_size: int, proj_size: int, layers: int, bidirectional: bool,
    trains: bool, tf32: bool, heads: int,
) -> str | None:  # fmt: skip
    """What `choose_at_once` returns for tensors of these shapes; `state` is that of h0, or those of h0
    and the others."""
    if len(input) != 3 or input[2] != input_size:
        return None
    batch, steps = input[:2] if batch_first else (input[1], input[0])
    directions = 2 if bidirectional else 1
    hidden = (layers * directions, batch, proj_size or hidden_size)
    others = traits(MODES[mode]).others
    if steps == 0 or state not in (None, (hidden, *[(*hidden[:2], hidden_size)] * others) if others else hidden):
        return None
    index = device.index if device.type == "cuda" else None
    case = Case(
        cell=MODES[mode],
        device=device.type,
        dtype=dtype,
        hidden_size=hidden_size,
        batch=batch,
        steps=steps,
        proj_size=proj_size,
        layers=layers,
        directions=directions,
        trains=trains,
        input_size=input_size,
        heads=heads,
        index=index,
        capability=None if index is None else _capability(index),
        tf32=tf32,
    )
    name, _ = choose(algorithm, case)
    if name in ("persistent", "scan", "newton"):
        return name if layers == 1 and proj_size == 0 else None
    at_once = name == "torch" and state is not None and not torch_rnn.needs_any_derivative(case)
    return name if at_once else None


def _transforms() -> tuple[bool, bool]:
    """Whether a torch.func transform or forward-mode AD differentiates here; and whether torch.func.vmap alone maps."""
    if in_forward_mode():
        return True, False
    if not in_transform():
        return False, False
    if torch.compiler.is_compiling():  # which cannot trace what follows
        return True, False
    mapped = maps_alone()
    return not mapped, mapped
