"""What the parts share: the device, random tensors, and backward passes of whatever comes out."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FLOATS", "backward", "bfloat16", "device", "double", "half", "single", "synchronize", "tensors"]

half, bfloat16, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLOATS = (single, half, bfloat16, double)

_device = "cuda"


def device() -> str:
    """Where parts run: a test of the parts themselves runs on the CPU those that can."""
    return _device


def synchronize() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = single, scale: float = 0.3) -> list[Tensor]:
    return [(scale * torch.randn(shape, device=device())).to(dtype).requires_grad_() for shape in shapes]


def backward(*results: Tensor | tuple[Tensor, ...]) -> None:
    """From the squares of all that asks for a gradient."""
    flat = [t for result in results for t in (result if isinstance(result, tuple) else (result,))]
    sum((t.abs() if t.is_complex() else t).double().square().sum() for t in flat if t.requires_grad).backward()
