"""``weft.accelerate``: Weft's recurrent layers in a model's torch.nn layers' place."""

from __future__ import annotations

import weakref
from typing import TypeVar

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from . import choice
from .layers import GRU, LSTM, RNN

__all__ = ["accelerate"]

M = TypeVar("M", bound=Module)

_REPLACEMENTS: dict[type[Module], type[Module]] = {
    torch.nn.RNN: RNN,
    torch.nn.GRU: GRU,
    torch.nn.LSTM: LSTM,
}


def accelerate(model: M, *, algorithm: str = "auto") -> M:
    """Swap every torch.nn.RNN, GRU and LSTM inside `model` for Weft's, in place.

    Everything of a layer goes over as it is: the same Parameter objects (an optimizer built before goes on working),
    buffers, hooks (their handles still remove them), training mode, attributes of the user's own, parametrizations
    (``torch.nn.utils.parametrize`` and the older ``weight_norm``). A layer that stands in two places stays one layer.
    Instances of a user's subclass of torch's layers are left alone, and so are Weft's own layers.

    The swapped torch layer itself stays a torch layer: what still refers to it outside the model shares its parameters.

    Args:
        model: any module.
        algorithm: for the new layers, see :mod:`weft.nn`.

    Returns:
        `model` itself; where `model` is a recurrent layer itself, Weft's in its place.

    Raises:
        TypeError: `model` is not a module.
        ValueError: unknown algorithm; NotImplementedError: a reserved one. The model is then unchanged.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.GRU(32, 32))
        >>> weft.accelerate(model)
        Sequential(
          (0): Embedding(100, 32)
          (1): GRU(32, 32)
        )
    """
    if not isinstance(model, Module):
        raise TypeError(f"accelerate: model must be a torch.nn.Module, got {type(model).__name__}")
    choice.check_algorithm(algorithm)
    swapped: dict[Module, Module] = {}
    for parent in list(model.modules()):
        # Not named_children: it names a child that stands twice only once.
        for name, child in parent._modules.items():
            target = None if child is None else _replacement_class(child)
            if target is not None:
                if child not in swapped:
                    swapped[child] = _swap(child, target, algorithm)
                parent._modules[name] = swapped[child]
    target = _replacement_class(model)
    return model if target is None else _swap(model, target, algorithm)


def _replacement_class(module: Module) -> type[Module] | None:
    kind = type(module)
    if kind in _REPLACEMENTS:
        return _REPLACEMENTS[kind]
    # register_parametrization gives each module a class of its own: its one base is the class that it had before.
    if parametrize.is_parametrized(module) and len(kind.__bases__) == 1 and kind.__bases__[0] in _REPLACEMENTS:
        base = _REPLACEMENTS[kind.__bases__[0]]
        members = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__", "__doc__", "__module__")}
        return type(kind.__name__, (base,), members)
    return None


def _swap(module: Module, target: type[Module], algorithm: str) -> Module:
    layer = target.__new__(target)
    # The same dictionaries of parameters and hooks, not copies: a hook's handle removes it from that dictionary.
    layer.__dict__.update(module.__dict__)
    layer.algorithm = algorithm
    for hook in module._load_state_dict_pre_hooks.values():
        # These alone hold their module themselves, weakly, and it may not outlive the swap.
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(layer)
    return layer
