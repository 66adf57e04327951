"""The sLSTM cells of the ``xlstm`` package (PyPI, NXAI), by weft::rnn: what weft.accelerate does with them.

Such a cell takes the four gates' input sides for all time steps, so its steps are those of a layer whose input weight
is the identity, one product more than it needs. The package's layers and blocks around it stay. A swapped cell is of a
class derived from its own, with the same attributes: parameters, their names and layout, configuration and hooks.

Source: Beck et al., "xLSTM: Extended Long Short-Term Memory", NeurIPS 2024.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["is_swapped", "obstacle", "swap", "swap_back", "swappable"]

_MODULE = "xlstm.blocks.slstm.cell"
_CLASSES = ("sLSTMCell_vanilla", "sLSTMCell_cuda")
_GATES = 4


def kinds() -> tuple[type[nn.Module], ...]:
    """The package's classes; none where nobody has imported it."""
    module = sys.modules.get(_MODULE)
    return tuple(found for name in _CLASSES if isinstance(found := getattr(module, name, None), type))


def is_swapped(module: nn.Module) -> bool:
    return getattr(type(module), "_weft_of", None) is not None


def swappable(module: nn.Module) -> bool:
    """Whether the module is a cell of the package that is swapped."""
    return type(module) in kinds() and obstacle(module) is None


def obstacle(module: nn.Module) -> str | None:
    """Why a cell of the package stays what it is; None for one that is swapped and for every other module."""
    found = kinds()
    if not found or not isinstance(module, found) or is_swapped(module):
        return None
    if type(module) not in found:
        return "is a subclass of the xlstm package's cell"
    config = module.config
    if config.function != "slstm":
        return f"computes {config.function!r}, not an sLSTM"
    for name in ("gradient_recurrent_cut", "gradient_recurrent_clipval", "forward_clipval"):
        if getattr(config, name, None) not in (None, False):
            return f"has {name}={getattr(config, name)}"
    if config.input_shape not in _LEADING:
        return f"takes its input as {config.input_shape}"
    return None


_LEADING = {"SBGNH": False, "BSGNH": True}
"""Layout of the input -> whether the batch is in front."""


def swap(module: nn.Module) -> nn.Module:
    """Make the cell Weft's, in place."""
    module.__class__ = _swapped(type(module))
    module._accelerated = True
    return module


def swap_back(module: nn.Module) -> nn.Module:
    """Undo it."""
    module.__class__ = type(module)._weft_of
    del module._accelerated
    return module


@functools.cache
def _swapped(kind: type[nn.Module]) -> type[nn.Module]:
    members = {
        "_weft_of": kind, "forward": _forward, "__reduce_ex__": _reduce, "__module__": kind.__module__,
        "__repr__": lambda self: f"{kind.__repr__(self)[:-1]}, accelerated=True)",
    }  # fmt: skip
    return type(kind.__name__, (kind,), members)


def _reduce(cell: nn.Module, protocol: int) -> tuple[Any, ...]:
    _, _, *state = object.__reduce_ex__(cell, 2)
    return _new, (type(cell)._weft_of,), *state


def _new(kind: type[nn.Module]) -> nn.Module:
    """An empty cell, which unpickling fills."""
    made = _swapped(kind)
    return made.__new__(made)


def _weights(cell: nn.Module, like: Tensor) -> list[Tensor]:
    """Those of a layer whose input weight is the identity, in the input's dtype: the package's recurrent kernel is
    (head, from, gate, to), its bias (head, gate, to)."""
    recurrent = cell._recurrent_kernel_int2ext(cell._recurrent_kernel).permute(2, 0, 3, 1)
    bias = cell._bias_int2ext(cell._bias).permute(1, 0, 2).reshape(-1).to(like.dtype)
    recurrent = recurrent.reshape(len(bias), -1).to(like.dtype)
    eye = torch.eye(len(bias), dtype=like.dtype, device=like.device)
    return [eye, recurrent, bias, torch.zeros_like(bias)]


def _forward(cell: nn.Module, input: Tensor, state: Tensor | None = None, lengths: Any = None) -> tuple[Tensor, Tensor]:
    """What the package's forward returns: output as the configuration has it, and the last states ``(4, B, H)``."""
    if lengths is not None:  # what that means is the package's to say
        return type(cell)._weft_of.forward(cell, input, state, lengths)
    cell._check_input(input)
    steps = input.transpose(0, 1) if _LEADING[cell.config.input_shape] else input
    given = None if state is None else cell._get_state(steps, state).to(steps.dtype)
    weights = _weights(cell, steps)
    with torch.autocast(steps.device.type, enabled=False):
        output, last = _run(cell, steps, given, weights)
    return cell._permute_output(output), last


def _run(cell: nn.Module, steps: Tensor, state: Tensor | None, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    h, c = (None, None) if state is None else (state[:1], torch.cat(tuple(state[1:]), -1).unsqueeze(0))
    output, h_n, c_n, _, _ = torch.ops.weft.rnn(
        steps, h, c, weights, None, cell="slstm", num_heads=cell.config.num_heads
    )
    return output, torch.cat([h_n, *c_n.chunk(_GATES - 1, -1)])
