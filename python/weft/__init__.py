"""Weft makes PyTorch fast where its own kernels give up."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from . import _ops, data, nn, offloading, reference, scan, sparse, vertex
from ._explain import ModelExplanation, PartExplanation, ScanExplanation, explain
from ._rnn.dropin.accelerate import accelerate, restore
from ._rnn.explain import Candidate, Explanation
from ._tune import tune
from ._version import __version__
from .offloading import offload
from .vertex import Graphs, VertexFunction, VertexFunctions

__all__ = [
    "Candidate",
    "Explanation",
    "Graphs",
    "ModelExplanation",
    "PartExplanation",
    "ScanExplanation",
    "VertexFunction",
    "VertexFunctions",
    "__version__",
    "accelerate",
    "data",
    "explain",
    "nn",
    "offload",
    "offloading",
    "reference",
    "restore",
    "scan",
    "sparse",
    "tune",
    "vertex",
]
_ = _ops  # loads the library, which everything above calls

_LATER = ("distributed", "info")
"""Modules that take a while to import, or are programs: imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
