"""Recurrent layers step by step in plain torch: slow, readable, and differentiable to any order.

This is what the fast algorithms are tested against, and what runs where torch closes the way to compiled autograd
functions: under ``torch.func`` transforms and in forward-mode AD.
"""

from __future__ import annotations

from ._rnn.reference import rnn, step

__all__ = ["rnn", "step"]
