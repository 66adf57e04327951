"""The input of a layer whose recurrence is a scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.arguments import PACK, check_dense
from .._base.torch_private import any_autocast
from .chain import check_tensor

__all__ = ["check_like", "check_padded", "check_start"]


def check_padded(
    name: str, input: Any, input_size: int, batch_first: bool, parameter: Tensor, nested: str = PACK
) -> bool:
    """Refuse an input that the layer `name` does not take; whether it has a batch.

    `nested` is what to do with a nested one.

    Raises:
        TypeError: it is no dense tensor, or of another dtype than the parameters.
        ValueError: its rank or width does not fit.
        RuntimeError: it is on another device than the parameters.
    """
    check_tensor(name, "input", input)
    check_dense(name, "input", input, nested)
    batched = input.dim() == 3
    if not (batched or input.dim() == 2) or input.size(-1) != input_size:
        layout = "B, T" if batch_first else "T, B"
        raise ValueError(
            f"{name}: input must be ({layout}, {input_size}) or (T, {input_size}), got {tuple(input.shape)}; "
            f"batch_first is {batch_first}"
        )
    check_like(name, "input", input, parameter)
    return batched


def check_like(name: str, argument: str, input: Tensor, parameter: Tensor) -> None:
    """Refuse a tensor of another device or dtype than the parameters."""
    if input.device != parameter.device:
        raise RuntimeError(
            f"{name}: {argument} must be on the parameters' device, {parameter.device}, got {input.device}"
        )
    if input.dtype != parameter.dtype and not (any_autocast() and torch.is_autocast_enabled(input.device.type)):
        model = f", or convert the layer: layer.to({input.dtype})" if input.is_floating_point() else ""
        raise TypeError(
            f"{name}: {argument} is {input.dtype}, the parameters are {parameter.dtype}; convert {argument}: "
            f"{argument}.to({parameter.dtype}){model}"
        )


def check_start(name: str, argument: str, state: Any, device: torch.device) -> None:
    """Refuse an initial state that is no dense tensor, or on another device than the input."""
    check_tensor(name, argument, state)
    check_dense(name, argument, state, "a state has one size")
    if state.device != device:
        raise RuntimeError(f"{name}: {argument} must be on the input's device, {device}, got {state.device}")
