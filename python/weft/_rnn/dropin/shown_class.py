"""What a layer shows as its ``__class__``, so that isinstance(layer, torch.nn.LSTM) is true of Weft's LSTM.

torch.compile refuses every instance of torch.nn.RNN, GRU and LSTM, subclasses included, so a layer's class can be none
of them. But isinstance also asks the object for its ``__class__``. What it gets is made for that purpose: a class below
both the layer's own and torch's, which is otherwise one more name of the layer's own. Compiling code alone is shown the
layer's own class.
"""

from __future__ import annotations

import copyreg
import sys
from typing import Any

from ..._base.torch_private import COMPILER, COMPILERS_ISINSTANCE, tracing_context

__all__ = ["own_class", "shown_class"]


class _Shown(type):
    """The metaclass of shown classes: what is called, derived from or written to is the layer's own class. torch's
    parametrizations and FSDP derive a class from ``module.__class__``, assign it and write properties to it."""

    _own: type
    _torch_class: type

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> Any:
        namespace.setdefault("__module__", sys._getframe(1).f_globals.get("__name__"))  # as type itself does
        return type(name, tuple(own_class(base) for base in bases), namespace, **keywords)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._own(*args, **kwargs)

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(cls._own, name, value)

    def __delattr__(cls, name: str) -> None:
        delattr(cls._own, name)

    def __dir__(cls) -> list[str]:
        return dir(cls._own)

    @property
    def __bases__(cls) -> tuple[type, ...]:
        return (*cls._own.__bases__, cls._torch_class)


# A class is pickled by its name, under which the layer's own is found.
copyreg.pickle(_Shown, lambda cls: (own_class, (cls._own,)))


def own_class(kind: Any) -> Any:
    """The class that a shown one stands for; any other is its own."""
    return kind._own if isinstance(kind, _Shown) else kind


def shown_class(own: type, torch_class: type) -> type:
    """What a layer of class `own` shows as its ``__class__``, to whoever asks two frames above."""
    if issubclass(own, torch_class):
        return own
    if tracing_context() is not None:
        # Its isinstance alone may know: a compiled model takes the branches that it takes in eager code.
        asks = sys._getframe(2).f_globals.get("__name__", "")
        if asks.startswith(COMPILER) and asks != COMPILERS_ISINSTANCE:
            return own
    shown = vars(own).get("_shown")
    if shown is None:
        # Below the metaclasses of both, which ABCs have.
        metas = {_Shown: None, type(own): None, type(torch_class): None}
        metas.pop(type, None)
        meta = _Shown if len(metas) == 1 else type("_Shown", tuple(metas), {})
        namespace = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        shown = super(_Shown, meta).__new__(meta, own.__name__, (own, torch_class), namespace | {"_own": own})
        own._shown = shown
    return shown
