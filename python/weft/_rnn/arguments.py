"""What calls of layers refuse, in words that name the class which the user called. The exceptions
are of the types that torch's layers raise: AttributeError for what is no tensor at all."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._base.arguments import PACK, check_dense

__all__ = ["check_input", "check_state"]

_STATE = "a state is (layers * directions, B, features)"


def check_input(name: str, input: Any) -> None:
    """Refuse an input that is no PackedSequence and no tensor, or a nested or sparse one."""
    if isinstance(input, Tensor):
        check_dense(name, "input", input, PACK)
    elif not isinstance(input, PackedSequence):
        raise AttributeError(f"{name}: input must be a Tensor or a PackedSequence, got {type(input).__name__}")


def check_state(name: str, hx: Any, states: tuple[str, ...] = (), packed: bool = False) -> None:
    """Refuse an initial state that is not None, one Tensor or, with the names of `states`, a Tensor for each;
    all of them dense. `packed` says whether the input is, as torch then refuses other types first."""
    if hx is None:
        return
    if isinstance(hx, Tensor) and not states:
        check_dense(name, "hx", hx, _STATE)
        return
    if not states:
        raise AttributeError(f"{name}: hx must be a Tensor or None, got {type(hx).__name__}")
    if not isinstance(hx, (tuple, list)):
        got = f"a Tensor {tuple(hx.shape)}" if isinstance(hx, Tensor) else type(hx).__name__
        error = TypeError
        if isinstance(hx, Tensor) and not packed:  # torch asks for its first two rows
            error = IndexError if hx.dim() == 0 or len(hx) < 2 else RuntimeError
        raise error(f"{name}: hx must be a tuple ({', '.join(states)}) of Tensors or None, got {got}")
    for which, state in zip(states, hx, strict=False):
        if not isinstance(state, Tensor):
            raise AttributeError(f"{name}: {which} must be a Tensor, got {type(state).__name__}")
        check_dense(name, which, state, _STATE)
