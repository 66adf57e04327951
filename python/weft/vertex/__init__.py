"""The vertex engine: declare a vertex function once, run it over any batch of graphs."""

from __future__ import annotations

from .._vertex.explain import Explanation
from .._vertex.function import VertexFunction, VertexFunctions
from .._vertex.graphs import Graphs
from .._vertex.options import options
from .._vertex.program import Program
from .._vertex.trainer import Trainer, TrainerExplanation
from .._vertex.vertex import Vertex
from . import models

__all__ = [
    "Explanation",
    "Graphs",
    "Program",
    "Trainer",
    "TrainerExplanation",
    "Vertex",
    "VertexFunction",
    "VertexFunctions",
    "models",
    "options",
]
