"""``weft.accelerate``: Weft's recurrent layers in a model's torch.nn layers' place."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from ..cells import GRUCell, LSTMCell, RNNCell, SLSTMCell
from ..layers import GRU, LSTM, RNN, SLSTM
from ..select import choice
from . import xlstm_cells

__all__ = ["accelerate", "restore", "swapped", "why_left"]

M = TypeVar("M", bound=Module)

_REPLACEMENTS: dict[type[Module], type[Module]] = {
    torch.nn.RNN: RNN,
    torch.nn.GRU: GRU,
    torch.nn.LSTM: LSTM,
    torch.nn.RNNCell: RNNCell,
    torch.nn.GRUCell: GRUCell,
    torch.nn.LSTMCell: LSTMCell,
}

_OURS = (*_REPLACEMENTS.values(), SLSTM, SLSTMCell)

# Of the special members of a subclass those that a call may reach, and of the others of RNNBase those that none does.
_RUNS = {"__call__", "__class__", "__getattr__", "__getattribute__", "__new__", "__reduce_ex__", "__slots__"}
_NEVER_RUNS = {"_apply", "_replicate_for_data_parallel", "extra_repr", "flatten_parameters", "reset_parameters"}


def accelerate(model: M, *, algorithm: str = "auto", subclasses: bool = False, verbose: bool = False) -> M:
    """Swap every torch.nn.RNN, GRU, LSTM, RNNCell, GRUCell and LSTMCell inside `model` for Weft's, in place.

    Everything of a layer goes over as it is: the same Parameter objects (an optimizer built before goes on working),
    buffers, hooks (their handles still remove them), training mode, attributes of the user's own, parametrizations
    (``torch.nn.utils.parametrize`` and the older ``weight_norm``). A layer that stands in two places stays one layer.
    Weft's own layers are left alone, and so are instances of a user's subclass of torch's layers, unless `subclasses`
    is set; one warning names them and says why.

    Of the ``xlstm`` package (PyPI) the sLSTM cells are swapped, in the layers and blocks that hold them: the cell
    object stays, with its parameters, and runs by Weft's operator. Left, and named in the warning, are cells that cut
    or clip gradients or outputs, and those of another function than sLSTM. `algorithm` is not for them.

    A swapped layer says ``accelerated=True`` when it is printed; :func:`restore` undoes all of it.

    The swapped torch layer itself stays a torch layer: what still refers to it outside the model shares its parameters.

    Args:
        model: any module.
        algorithm: for the new layers, see :mod:`weft.nn`. Cells take "torch" for "torch" and "reference", else "auto".
        subclasses: also swap instances of subclasses that override nothing that runs, that is ``forward``, what it
            calls and what it reads. They keep their own methods and attributes, and go on being instances of their
            class. Those of cells stay as they are. Default: False.
        verbose: print a line for every layer that was swapped. Default: False.

    Returns:
        `model` itself; where `model` is a recurrent layer itself, Weft's in its place.

    Raises:
        TypeError: `model` is not a module.
        ValueError: unknown algorithm. The model is then unchanged.

    Warns:
        UserWarning: recurrent layers were left as they are, scripted ones among them, or there is none in the model.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.GRU(32, 32))
        >>> weft.accelerate(model)
        Sequential(
          (0): Embedding(100, 32)
          (1): GRU(32, 32, accelerated=True)
        )
    """
    if not isinstance(model, Module):
        raise TypeError(f"accelerate: model must be a torch.nn.Module, got {type(model).__name__}")
    choice.check_algorithm("accelerate", algorithm)
    left = []
    for name, module in model.named_modules():
        obstacle = _obstacle(module, subclasses) or xlstm_cells.obstacle(module)
        if obstacle is not None:
            left.append(f"{name or 'the model itself'} ({_class_name(module)}) {obstacle}")
    names = {module: name for name, module in model.named_modules()}
    swapped: dict[Module, Module] = {}
    for parent in list(model.modules()):
        # Not named_children: it names a child that stands twice only once.
        for name, child in parent._modules.items():
            target = None if child is None else _replacement_class(child, subclasses)
            if target is not None:
                if child not in swapped:
                    swapped[child] = _swap(child, target, algorithm)
                parent._modules[name] = swapped[child]
    of_xlstm = [module for module in model.modules() if xlstm_cells.swappable(module)]
    for cell in of_xlstm:
        xlstm_cells.swap(cell)
    if left:
        warnings.warn(f"weft.accelerate left these layers as they are: {'; '.join(left)}", stacklevel=2)
    target = _replacement_class(model, subclasses)
    result = model if target is None else _swap(model, target, algorithm)
    if target is not None:
        swapped[model] = result
    known = any(_is_wefts(m) or xlstm_cells.is_swapped(m) for m in model.modules())
    if not swapped and not left and not known:
        warnings.warn(
            f"weft.accelerate swapped nothing: {type(model).__name__} has no torch.nn.RNN, GRU, LSTM, RNNCell, GRUCell "
            "or LSTMCell inside",
            stacklevel=2,
        )
    if verbose:
        for module in swapped:
            what = _class_name(module).replace("torch.nn.modules.rnn.", "torch.nn.")
            ours = _torch_class(_class_before_parametrizations(module)).__name__
            print(f"weft.accelerate: {names[module] or 'the model itself'}: {what} -> weft.nn.{ours}")
        for cell in of_xlstm:
            print(f"weft.accelerate: {names[cell] or 'the model itself'}: xlstm's {type(cell).__name__} -> weft::rnn")
        if not swapped and not of_xlstm:
            print("weft.accelerate: nothing swapped")
    return result


def restore(model: M) -> M:
    """Undo :func:`accelerate`: put torch's own layers back in the place of those that it put in theirs, in place.

    Everything of a layer goes back as it is now: the same Parameter objects, buffers, hooks, training mode and
    attributes. Weft's layers that accelerate has not made stay. :func:`accelerate` takes a restored model again.

    Args:
        model: any module.

    Returns:
        `model` itself; where `model` is a swapped layer itself, torch's in its place.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, Module):
        raise TypeError(f"restore: model must be a torch.nn.Module, got {type(model).__name__}")
    restored: dict[Module, Module] = {}
    for module in list(model.modules()):
        if xlstm_cells.is_swapped(module):
            xlstm_cells.swap_back(module)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and getattr(child, "_accelerated", False):
                if child not in restored:
                    restored[child] = _swap_back(child)
                parent._modules[name] = restored[child]
    return _swap_back(model) if getattr(model, "_accelerated", False) else model


def swapped(module: Module, algorithm: str = "auto", *, subclasses: bool = False) -> Module | None:
    """What accelerate would put in the place of one of torch's layers or cells; None for every other module. The
    module stays as it is."""
    target = _replacement_class(module, subclasses)
    if target is None:
        return None
    layer = _swap(module, target, algorithm)
    _point_hooks(module)
    return layer


def why_left(module: Module) -> str | None:
    """Why accelerate leaves a recurrent layer of torch's as it is, also with subclasses=True; None for every other."""
    return _obstacle(module, subclasses=True)


def _is_wefts(module: Module) -> bool:
    return issubclass(type(module), _OURS)


def _swap_back(layer: Module) -> Module:
    kind = _class_before_parametrizations(layer)
    own = getattr(kind, "_torch_class", None)  # of a cell torch's own is among its bases
    torchs = next(base for base in kind.__mro__ if base in _REPLACEMENTS) if own is None else own
    if kind is not type(layer):
        torchs = type(type(layer).__name__, (torchs,), _members(type(layer)))
    module = torchs.__new__(torchs)
    module.__dict__.update(layer.__dict__)
    for name in ("_algorithm", "_accelerated", "return_cells"):
        module.__dict__.pop(name, None)
    _point_hooks(module)
    return module


def _class_before_parametrizations(module: Module) -> type[Module]:
    kind = type(module)
    # register_parametrization gives each module a class of its own: its one base is the class that it had before.
    return kind.__bases__[0] if parametrize.is_parametrized(module) and len(kind.__bases__) == 1 else kind


def _class_name(module: Module) -> str:
    kind = _class_before_parametrizations(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _torch_class(kind: type[Module]) -> type[Module] | None:
    """Which of torch's layers `kind` is or is derived from. By the type: isinstance is true of Weft's layers, too."""
    return next((base for base in kind.__mro__ if base in _REPLACEMENTS), None)


def _overridden(kind: type[Module]) -> list[str]:
    """What a subclass of torch's layers has of its own where its own would run, or Weft's would not."""
    torch_class = _torch_class(kind)
    inherited = set()
    for base in (*torch_class.__mro__, *_REPLACEMENTS[torch_class].__mro__):
        if issubclass(base, torch.nn.RNNBase):
            inherited |= vars(base).keys() | getattr(base, "__annotations__", {}).keys()
    names = {name for base in _own_bases(kind) for name, value in vars(base).items() if value != ()}  # of __slots__
    special = {name for name in names if name.startswith("__") and name.endswith("__")}
    return sorted((names & inherited) - special - _NEVER_RUNS | special & _RUNS)


def _own_bases(kind: type[Module]) -> list[type]:
    """The classes that a subclass adds to torch's layer, itself first."""
    torchs = _torch_class(kind).__mro__
    return [base for base in kind.__mro__ if base not in torchs]


def _obstacle(module: Module, subclasses: bool) -> str | None:
    """Why a recurrent layer stays what it is; None for one that is swapped, for Weft's and for every other module."""
    if isinstance(module, torch.jit.ScriptModule):
        recurrent = {kind.__name__ for kind in _REPLACEMENTS}
        named = getattr(module, "original_name", "") in recurrent
        return "is compiled by torch.jit.script: accelerate the model before scripting it" if named else None
    kind = _class_before_parametrizations(module)
    if kind in _REPLACEMENTS or issubclass(kind, _OURS):
        return None
    if _torch_class(kind) is None:
        return None if not issubclass(kind, torch.nn.RNNBase) else "is none of torch.nn.RNN, GRU and LSTM"
    if issubclass(kind, torch.nn.RNNCellBase):
        return f"is a subclass of torch.nn.{_torch_class(kind).__name__}"
    overridden = _overridden(kind)
    if overridden:
        return f"overrides {', '.join(overridden)}"
    return None if subclasses else f"is a subclass of torch.nn.{_torch_class(kind).__name__}: subclasses=True takes it"


def _replacement_class(module: Module, subclasses: bool) -> type[Module] | None:
    kind = _class_before_parametrizations(module)
    if kind in _REPLACEMENTS:
        target = _REPLACEMENTS[kind]
    elif subclasses and issubclass(kind, torch.nn.RNNBase) and _torch_class(kind) and not _overridden(kind):
        target = _subclass(kind)
    else:
        return None
    if kind is type(module):
        return target
    return type(type(module).__name__, (target,), _members(type(module)))


def _members(kind: type) -> dict[str, Any]:
    machinery = ("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl")
    return {name: value for name, value in vars(kind).items() if name not in machinery}


@functools.cache
def _subclass(kind: type[Module]) -> type[Module]:
    """Weft's layer with what a subclass of torch's has of its own. Its instances show `kind` as a class of theirs, by
    which super() in the subclass's methods goes, too."""
    members: dict[str, Any] = {}
    for base in reversed(_own_bases(kind)):
        members |= _members(base)
    members |= {"__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__}
    members |= {"_torch_class": kind, "__reduce_ex__": _reduce_subclass}
    return type(kind.__name__, (_REPLACEMENTS[_torch_class(kind)],), members)


def _reduce_subclass(layer: Module, protocol: int) -> tuple[Any, ...]:
    _, _, *state = object.__reduce_ex__(layer, 2)
    return _new_of_subclass, (layer._torch_class,), *state


def _new_of_subclass(kind: type[Module]) -> Module:
    """An empty layer, which unpickling fills."""
    made = _subclass(kind)
    return made.__new__(made)


def _swap(module: Module, target: type[Module], algorithm: str) -> Module:
    layer = target.__new__(target)
    # The same dictionaries of parameters and hooks, not copies: a hook's handle removes it from that dictionary.
    layer.__dict__.update(module.__dict__)
    cell = issubclass(target, torch.nn.RNNCellBase)
    layer.algorithm = algorithm if not cell else "torch" if algorithm in ("torch", "reference") else "auto"
    layer._accelerated = True
    _point_hooks(layer)
    return layer


def _point_hooks(layer: Module) -> None:
    """Make hooks that hold their module themselves, weakly, hold this one: the one before may not outlive the swap."""
    for hook in layer._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(layer)
