"""The linear recurrence x[t] = A[t] x[t-1] + b[t]: the operator's Python face, and its reference in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._base.torch_private import differentiated_by_transform
from .chain import check_tensor

_linear_scan = torch.ops.weft.linear_scan.default


def linear_scan(
    A: Tensor, b: Tensor, x0: Tensor | None = None, *, reverse: bool = False, transpose: bool = False
) -> Tensor:
    """Runs the linear recurrence ``x[t] = A[t] @ x[t-1] + b[t]`` over all t, in parallel where that pays.

    Gradients for ``A``, ``b`` and ``x0``, of any order, are linear scans themselves.

    Args:
        A: ``(T, B, H, H)``; ``(T, H, H)`` or ``(T, 1, H, H)``, shared by the batch; ``(T, B, H)``, diagonal; or
            ``(H)``, ``(1, B, H)`` or ``(1, 1, H)``, diagonal and constant in time, which is not expanded in memory. A
            3-D ``A`` with the shape of ``b`` is diagonal, also where B = H: pass a shared one as ``(T, 1, H, H)``
            there.
        b: ``(T, B, H)``. Time is always first. A batch-first ``(B, T, H)`` would be a recurrence over B, and nothing
            can tell where B = T: pass ``b.transpose(0, 1)``, ``A`` likewise, and transpose the result. The layers have
            `batch_first`.
        x0: ``(B, H)``, or ``(H)`` for the whole batch, the state before the first step; None is zeros, and ``A`` of the
            first step is then not used.
        reverse: ``x[t] = A[t] @ x[t+1] + b[t]`` instead, with ``x[T] = x0``.
        transpose: takes ``A[t].mT`` in the place of ``A[t]``.

    Returns:
        x ``(T, B, H)``. T, B and H may be 0. The dtype is that of the inputs, float16, bfloat16, float32 or float64,
        one for all; under autocast they are cast to the widest of theirs. The state is carried in float32 (float64
        for float64), never in TF32.

    Raises:
        TypeError: an argument is no tensor, has another dtype, or dtypes differ.
        ValueError: shapes do not fit.
        RuntimeError: devices differ.

    Two runs give the same bits, on a CPU with the same number of threads. NaN or inf in one row of the batch touches no
    other. Wherever the recurrence, step by step, gives finite numbers, so does the scan, although products of ``A`` may
    overflow or underflow.

    Source: BPPSA, MLSys 2020; for diagonal ``A`` also Martin and Cundy, ICLR 2018.
    """
    check_tensor("linear_scan", "A", A)
    check_tensor("linear_scan", "b", b)
    if x0 is not None:
        check_tensor("linear_scan", "x0", x0)
    if differentiated_by_transform(A, b, x0):
        return linear_scan_reference(A, b, x0, reverse=reverse, transpose=transpose)
    if reverse is False and transpose is False:  # a keyword takes the dispatcher close to a microsecond
        return _linear_scan(A, b, x0)
    return _linear_scan(A, b, x0, reverse=reverse, transpose=transpose)


def linear_scan_reference(
    A: Tensor, b: Tensor, x0: Tensor | None = None, *, reverse: bool = False, transpose: bool = False
) -> Tensor:
    """:func:`linear_scan`, one step after the other in plain torch: what the fast paths are measured against.

    The same arguments, shapes and result, in the dtype of the inputs throughout; differentiable to any order, in
    forward mode and under ``torch.func`` too.
    """
    diagonal = A.dim() == 3 and A.shape == b.shape
    if not diagonal and A.dim() == 3 and A.shape == (b.shape[0], b.shape[2], b.shape[2]):
        A = A.unsqueeze(1)
    elif not diagonal and A.dim() in (1, 3):
        A, diagonal = A.expand(b.shape), True  # constant in time
    # unbind rather than indices: its backward is one stack, where T indices would fill T tensors of zeros.
    steps = list(zip(A.unbind(), b.unbind(), strict=True))
    x, states = x0, []
    for A_t, b_t in reversed(steps) if reverse else steps:
        if x is None:
            x = b_t
        elif diagonal:
            x = A_t * x + b_t
        else:
            x = ((A_t.mT if transpose else A_t) @ x.unsqueeze(-1)).squeeze(-1) + b_t
        states.append(x)
    if not states:
        return b.clone()  # (0, B, H)
    return torch.stack(states[::-1] if reverse else states)
