"""Sparse Jacobians: one pattern, many sets of values, generated analytically and multiplied by plans made once.

Source: BPPSA (Wang, Bai, Pekhimenko, "Scaling back-propagation by parallel scan algorithm", MLSys 2020), section 3.3.
"""

from __future__ import annotations

from ._sparse.csr import BatchedCSR
from ._sparse.jacobians import (
    adaptive_avg_pool2d_jacobian,
    avg_pool2d_jacobian,
    batch_norm_jacobian,
    clear_cache,
    conv1d_jacobian,
    conv2d_jacobian,
    diagonal_jacobian,
    dropout_jacobian,
    flatten_jacobian,
    gelu_jacobian,
    leaky_relu_jacobian,
    linear_jacobian,
    max_pool2d_jacobian,
    relu_jacobian,
    sigmoid_jacobian,
    tanh_jacobian,
)
from ._sparse.modules import register_jacobian, transposed_jacobian
from ._sparse.plan import MatmulPlan, plan_matmul

__all__ = [
    "BatchedCSR",
    "MatmulPlan",
    "adaptive_avg_pool2d_jacobian",
    "avg_pool2d_jacobian",
    "batch_norm_jacobian",
    "clear_cache",
    "conv1d_jacobian",
    "conv2d_jacobian",
    "diagonal_jacobian",
    "dropout_jacobian",
    "flatten_jacobian",
    "gelu_jacobian",
    "leaky_relu_jacobian",
    "linear_jacobian",
    "max_pool2d_jacobian",
    "plan_matmul",
    "register_jacobian",
    "relu_jacobian",
    "sigmoid_jacobian",
    "tanh_jacobian",
    "transposed_jacobian",
]
