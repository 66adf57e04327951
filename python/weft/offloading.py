"""Offload: training steps whose saved activations do not fit into device memory."""

from __future__ import annotations

from ._offload.context import offload
from ._offload.policy import Link, Move, Plan, Saved, Timeline, plan, simulate
from ._offload.report import OffloadReport

__all__ = ["Link", "Move", "OffloadReport", "Plan", "Saved", "Timeline", "offload", "plan", "simulate"]
