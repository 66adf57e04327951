"""What the constructors and calls of layers refuse, in words that name the class which the user called. The exceptions
are of the types that torch's layers raise: AttributeError for what is no tensor at all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["check_constructor", "check_input", "check_state"]


def check_constructor(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for a keyword that the class `name` does not have."""
    known = list(known)
    for argument in given:
        if argument not in known:
            near = difflib.get_close_matches(argument, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
            raise TypeError(f"{name}: unexpected argument {argument!r}{hint}")


def check_input(name: str, input: Any) -> None:
    """Refuse an input that is no tensor, or a nested one, and no PackedSequence."""
    if isinstance(input, Tensor):
        if input.is_nested:
            raise TypeError(
                f"{name}: input is a NestedTensor, which recurrent layers do not take; give it as a PackedSequence: "
                "torch.nn.utils.rnn.pack_sequence(input.unbind(), enforce_sorted=False)"
            )
    elif not isinstance(input, PackedSequence):
        raise AttributeError(f"{name}: input must be a Tensor or a PackedSequence, got {type(input).__name__}")


def check_state(name: str, hx: Any, states: tuple[str, ...] = ()) -> None:
    """Refuse an initial state that is not None, one Tensor or, with the names of `states`, a Tensor for each."""
    if hx is None or (isinstance(hx, Tensor) and not states):
        return
    if not states:
        raise AttributeError(f"{name}: hx must be a Tensor or None, got {type(hx).__name__}")
    if isinstance(hx, Tensor):
        error = IndexError if len(hx) < 2 else RuntimeError
        wanted = f"a tuple ({', '.join(states)}) of Tensors"
        raise error(f"{name}: hx must be {wanted} or None, got a Tensor {tuple(hx.shape)}")
    for which, state in zip(states, hx, strict=False):
        if not isinstance(state, Tensor):
            raise AttributeError(f"{name}: {which} must be a Tensor, got {type(state).__name__}")
