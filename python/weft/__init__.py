"""Weft makes PyTorch fast where its own kernels give up."""

from __future__ import annotations

from . import _ops, data, nn, offloading, scan
from .accelerate import accelerate
from .explain import explain
from .tune import tune

__version__ = "0.1.0"

__all__ = ["__version__", "accelerate", "data", "explain", "nn", "offloading", "scan", "tune"]
_ = _ops  # loads the library, which everything above calls
