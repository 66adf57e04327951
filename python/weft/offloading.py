"""Offload: training steps whose saved activations do not fit into device memory."""

from __future__ import annotations

from ._offload.policy import Link, Move, Plan, Saved, Timeline, plan, simulate

__all__ = ["Link", "Move", "Plan", "Saved", "Timeline", "plan", "simulate"]
