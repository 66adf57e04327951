"""What constructors and calls refuse, in words that name the class which the user called."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

__all__ = ["PACK", "NotScriptable", "check_dense", "check_keywords", "constructor", "name_after", "not_dense"]

F = TypeVar("F", bound=Callable[..., None])

PACK = "give it as a PackedSequence: torch.nn.utils.rnn.pack_sequence(input.unbind(), enforce_sorted=False)"
"""Instead of a nested input."""


def check_keywords(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for a keyword that the class `name` does not have."""
    known = list(known)
    for argument in given:
        if argument not in known:
            near = difflib.get_close_matches(argument, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
            raise TypeError(f"{name}: unexpected argument {argument!r}{hint}")


def constructor(init: F) -> F:
    """An ``__init__`` whose TypeError about arguments names the class, not a base class that is nobody's."""
    _, *parameters = inspect.signature(init).parameters.values()
    names = [p.name for p in parameters]
    needed = [p.name for p in parameters if p.default is p.empty]
    positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        check_keywords(name, kwargs, names)
        if len(args) > positional:
            raise TypeError(f"{name}: takes {positional} arguments without their names at most, got {len(args)}")
        for argument in needed:
            if argument not in kwargs and argument not in names[: len(args)]:
                raise TypeError(f"{name}: {argument} is missing")
        init(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


def name_after(kind: type, method: str) -> None:
    """Give a class a copy of a method that it inherits: Python's errors about arguments name where it is from."""
    inherited: FunctionType = getattr(kind, method)
    code, name = inherited.__code__, inherited.__name__
    own = FunctionType(code, inherited.__globals__, name, inherited.__defaults__, inherited.__closure__)
    own.__kwdefaults__, own.__doc__ = inherited.__kwdefaults__, inherited.__doc__
    own.__annotations__, own.__module__ = inherited.__annotations__, inherited.__module__
    own.__qualname__ = f"{kind.__name__}.{method}"
    setattr(kind, method, own)


def check_dense(name: str, argument: str, value: Tensor, instead: str) -> None:
    """TypeError for a nested or a sparse tensor; `instead` is what to give for the former."""
    if value.layout is torch.strided and not value.is_nested:
        return
    raise TypeError(f"{name}: {not_dense(argument, value, instead)}")


def not_dense(argument: str, value: Tensor, instead: str) -> str:
    """What is wrong with a nested or a sparse tensor, or one of a layout of its own."""
    if value.is_nested:
        return f"{argument} is a NestedTensor, which it does not take; {instead}"
    layout = str(value.layout).removeprefix("torch.")
    has = f"is sparse ({layout})" if layout.startswith("sparse") else f"has the layout {layout}"
    return f"{argument} {has}, which it does not take; give {argument}.to_dense()"


class NotScriptable:
    """A module that torch.jit.script cannot compile."""

    _instead = "torch.jit.trace, torch.export and torch.compile take them"

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.script cannot compile Weft's layers; {self._instead}"
        )
