"""Weft makes PyTorch fast where its own kernels give up."""

from __future__ import annotations

from . import _ops  # noqa: F401  loads the library; everything below calls torch.ops.weft

__version__ = "0.1.0"
