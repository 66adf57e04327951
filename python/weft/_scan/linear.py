"""The linear recurrence x[t] = A[t] x[t-1] + b[t]: the operator's Python face, and its reference in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._base.arguments import check_dense
from .._base.torch_private import differentiated_by_transform
from .chain import check_tensor

_linear_scan = torch.ops.weft.linear_scan.default
_linear_scan_readout = torch.ops.weft.linear_scan_readout.default


def linear_scan(
    A: Tensor,
    b: Tensor,
    x0: Tensor | None = None,
    *,
    reverse: bool = False,
    transpose: bool = False,
    batch_first: bool = False,
    c: Tensor | None = None,
) -> Tensor:
    """Runs the linear recurrence ``x[t] = A[t] @ x[t-1] + b[t]`` over all t, in parallel where that pays.

    Gradients for ``A``, ``b`` and ``x0``, of any order, are linear scans themselves.

    Args:
        A: ``(T, B, H, H)``; ``(T, H, H)`` or ``(T, 1, H, H)``, shared by the batch; ``(T, B, H)``, diagonal; or
            ``(H)``, ``(1, B, H)`` or ``(1, 1, H)``, diagonal and constant in time, which is not expanded in memory. A
            3-D ``A`` with the shape of ``b`` is diagonal, also where B = H: pass a shared one as ``(T, 1, H, H)``
            there.
        b: ``(T, B, H)``.
        x0: ``(B, H)``, or ``(H)`` for the whole batch, the state before the first step; None is zeros, and ``A`` of the
            first step is then not used.
        reverse: ``x[t] = A[t] @ x[t+1] + b[t]`` instead, with ``x[T] = x0``.
        transpose: takes ``A[t].mT`` in the place of ``A[t]``.
        batch_first: ``b`` and x are ``(B, T, H)``; ``A`` is ``(B, T, H, H)``, ``(1, T, H, H)``, ``(B, T, H)``, ``(H)``,
            ``(B, 1, H)`` or ``(1, 1, H)``. They are read and written where they lie. Nothing else can tell the two
            layouts from each other where B = T.
        c: reads out of N states for each of H channels, which are never written: the result is ``y[t] = (c[t] *
            x[t]).sum(-1)``, laid out like ``(T, B, H)``. ``A`` is then diagonal and has a last dimension of N: ``(H,
            N)``, constant in time, or ``(T, B, H, N)``, whose T and B may be 1; so is ``c``. ``b`` is ``(T, B, H, N)``,
            or ``(T, B, H, 1)``, one number for all N; ``x0`` ``(B, H, N)`` or ``(H, N)``. `transpose` changes nothing,
            `batch_first` swaps T and B. This is what S4D and S5 compute, with a constant input matrix taken into ``c``.

    Returns:
        x, or with ``c`` y, laid out like ``b``. T, B and H may be 0. The dtype is that of the inputs, float16,
        bfloat16, float32, float64, complex64 or complex128, one for all; under autocast they are cast to the widest of
        theirs. The state is carried in float32 (float64 for float64), complex numbers in pairs of these, never in TF32.
        A dense complex ``A`` runs step by step, as :func:`weft.scan.linear_scan_reference`.

    Raises:
        TypeError: an argument is no tensor, has another dtype, or dtypes differ.
        ValueError: shapes do not fit.
        RuntimeError: devices differ.

    Gradients of complex numbers are torch's, of conjugates. Two runs give the same bits, on a CPU with the same number
    of threads. NaN or inf in one row of the batch touches no other. Wherever the recurrence, step by step, gives finite
    numbers, so does the scan, although products of ``A`` may overflow or underflow.

    With ``c`` the backward pass makes the states anew, some 8 to 32 steps at a time, from those that the forward pass
    keeps; higher orders write them. On CUDA more than 128 states of a channel are written, too.

    Source: BPPSA, MLSys 2020; for diagonal ``A`` also Martin and Cundy, ICLR 2018; with ``c`` S4D, Gu et al., NeurIPS
    2022.
    """
    check_tensor("linear_scan", "A", A)
    check_tensor("linear_scan", "b", b)
    if x0 is not None:
        check_tensor("linear_scan", "x0", x0)
    if c is not None:
        check_tensor("linear_scan", "c", c)
        if differentiated_by_transform(A, b, c, x0):
            return linear_scan_reference(A, b, x0, reverse=reverse, batch_first=batch_first, c=c)
        return _linear_scan_readout(A, b, c, x0, reverse=reverse, batch_first=batch_first)[0]
    if differentiated_by_transform(A, b, x0) or (A.is_complex() and is_dense(A, b, batch_first)):
        return linear_scan_reference(A, b, x0, reverse=reverse, transpose=transpose, batch_first=batch_first)
    try:
        if not (reverse or transpose or batch_first):  # a keyword takes the dispatcher close to a microsecond
            return _linear_scan(A, b, x0)
        return _linear_scan(A, b, x0, reverse=reverse, transpose=transpose, batch_first=batch_first)
    except NotImplementedError:  # the dispatcher's: asking first would cost every call
        for name, t in (("A", A), ("b", b)):
            check_dense(
                "linear_scan", name, t, "give sequences of one length, or padded ones, whose A is one and b zero"
            )
        raise


def is_dense(A: Tensor, b: Tensor, batch_first: bool) -> bool:
    """Whether A holds matrices; one that fits no layout is left to the op, which says so."""
    if b.dim() != 3:
        return False
    time, batch = (1, 0) if batch_first else (0, 1)
    if A.dim() == 4:
        sizes = (b.shape[time], b.shape[2], b.shape[2])
        return (A.shape[time], *A.shape[2:]) == sizes and A.shape[batch] in (1, b.shape[batch])
    return A.dim() == 3 and not batch_first and A.shape != b.shape and A.shape == (b.shape[0], b.shape[2], b.shape[2])


def linear_scan_reference(
    A: Tensor,
    b: Tensor,
    x0: Tensor | None = None,
    *,
    reverse: bool = False,
    transpose: bool = False,
    batch_first: bool = False,
    c: Tensor | None = None,
) -> Tensor:
    """:func:`linear_scan`, one step after the other in plain torch: what the fast paths are measured against.

    The same arguments, shapes and result, in the dtype of the inputs throughout; differentiable to any order, in
    forward mode and under ``torch.func`` too.
    """
    if batch_first:
        A, b, c = (t.transpose(0, 1) if t is not None and t.dim() >= 3 else t for t in (A, b, c))
        return linear_scan_reference(A, b, x0, reverse=reverse, transpose=transpose, c=c).transpose(0, 1)
    if c is not None:
        T, B, H, _ = b.shape
        N = A.shape[-1]
        A, b = (t.expand(T, B, H, N).flatten(1, 2) for t in (A, b))
        x0 = None if x0 is None else x0.expand(B, H, N).flatten(0, 1)
        return (c * linear_scan_reference(A, b, x0, reverse=reverse).unflatten(1, (B, H))).sum(-1)
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
