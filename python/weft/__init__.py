"""Weft makes PyTorch fast where its own kernels give up."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

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


if TYPE_CHECKING:  # who would take __getattr__ for every name's
    from . import distributed as distributed
    from . import info as info
else:

    def __getattr__(name: str) -> Any:
        what = f"module {__name__!r} has no attribute {name!r}"
        if name in _LATER:
            if _is_there(name):
                return importlib.import_module(f"{__name__}.{name}")
            what += ": this torch is built without torch.distributed"
        raise AttributeError(what, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *filter(_is_there, _LATER)})


def _is_there(name: str) -> bool:
    return name != "distributed" or torch.distributed.is_available()
