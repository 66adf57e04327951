"""What stands behind :mod:`weft.sparse`. Rooms above import what is named here, and no module of this folder."""

from __future__ import annotations

from .csr import BatchedCSR
from .jacobians import dropout_jacobian, full_pattern
from .modules import (
    check_batch_norm,
    find_jacobian,
    known_zeros,
    transposed_jacobian,
    unknown,
    unwritten,
    zeros_compared,
)
from .pattern import Pattern
from .plan import MatmulPlan, count_flops, planned

__all__ = [
    "BatchedCSR",
    "MatmulPlan",
    "Pattern",
    "check_batch_norm",
    "count_flops",
    "dropout_jacobian",
    "find_jacobian",
    "full_pattern",
    "known_zeros",
    "planned",
    "transposed_jacobian",
    "unknown",
    "unwritten",
    "zeros_compared",
]
