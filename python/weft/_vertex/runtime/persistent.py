"""The persistent executor: all frontiers of a call, forward or backward, in one kernel that a script drives."""

from __future__ import annotations

import torch
from torch import nn

from .call_cache import Ready
from .training import Launched, Request

__all__ = ["obstacle", "train", "training_obstacle"]


def obstacle(device: torch.device) -> str | None:
    """Why a compiled call on `device` does not run in one kernel."""
    if device.type != "cuda":
        return f"the persistent executor needs a CUDA device, not {device.type}"
    return "this build has no persistent kernel"


def training_obstacle(call: Ready, head: nn.Linear | None, loss: str) -> str | None:
    """Why a whole training step of a cell that was compiled does not run in one kernel."""
    return obstacle(call.device)


def train(call: Ready, request: Request) -> Launched:
    """Launch forward, loss, backward and updates on the current stream; nothing waits."""
    raise NotImplementedError
