"""Weft makes PyTorch fast where its own kernels give up."""

from __future__ import annotations

from . import _ops, data, nn, offloading, scan, vertex
from .accelerate import accelerate
from .explain import explain
from .tune import tune
from .vertex import Graphs

__version__ = "0.1.0"

__all__ = [
    "Graphs",
    "__version__",
    "accelerate",
    "data",
    "explain",
    "nn",
    "offloading",
    "scan",
    "tune",
    "vertex",
]
_ = _ops  # loads the library, which everything above calls
