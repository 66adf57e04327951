"""Vertex functions: a cell declared once, run over any batch of graphs."""

from __future__ import annotations

from .graphs import Graphs

__all__ = ["Graphs"]
