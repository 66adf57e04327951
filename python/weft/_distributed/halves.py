"""Scans that are cut where ranks exchange, so that what follows is no second scan."""

from __future__ import annotations

__all__ = ["halved"]

halved = {"cuda"}
"""Devices that have kernels of chunk maps. Others mend, which on a CPU costs less."""
