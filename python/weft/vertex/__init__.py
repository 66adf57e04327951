"""The vertex engine: declare a vertex function once, run it over any batch of graphs."""

from __future__ import annotations

from . import models
from .function import VertexFunction, VertexFunctions
from .graphs import Graphs
from .options import options
from .vertex import Vertex

__all__ = ["Graphs", "Vertex", "VertexFunction", "VertexFunctions", "models", "options"]
