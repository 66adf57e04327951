"""Shape rules: what each op returns for fake tensors, symbolic shapes included; and how vmap maps it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# linear_scan --------------------------------------------------------------------------------------------------------


@torch.library.register_fake("weft::linear_scan")
def _linear_scan(
    A: Tensor, b: Tensor, x0: Tensor | None = None, *, reverse: bool = False, transpose: bool = False
) -> Tensor:
    torch._check_value(b.dim() == 3, lambda: f"linear_scan: b must be (T, B, H), got {tuple(b.shape)}")
    torch._check_value(
        A.dim() in (3, 4), lambda: f"linear_scan: A must be (T, B, H, H), (T, H, H) or (T, B, H), got {tuple(A.shape)}"
    )
    return b.new_empty(b.shape)


@torch.library.register_fake("weft::linear_scan_backward")
def _linear_scan_backward(
    grad: Tensor,
    A: Tensor,
    x: Tensor | None,
    x0: Tensor | None,
    reverse: bool,
    transpose: bool,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (
        A.new_empty(A.shape) if output_mask[0] else None,
        grad.new_empty(grad.shape) if output_mask[1] else None,
        x0.new_empty(x0.shape) if output_mask[2] and x0 is not None else None,
    )


def _linear_scan_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    A: Tensor,
    b: Tensor,
    x0: Tensor | None = None,
    *,
    reverse: bool = False,
    transpose: bool = False,
) -> tuple[Tensor, int]:
    """The mapped dimension, of N, becomes the outer part of the batch."""
    N = info.batch_size

    def in_front(t: Tensor, dim: int | None) -> Tensor:
        return t.unsqueeze(0) if dim is None else t.movedim(dim, 0)

    def folded(t: Tensor, batch_dim: int) -> Tensor:
        return t.expand(N, *t.shape[1:]).movedim(0, batch_dim).flatten(batch_dim, batch_dim + 1)

    A, b = in_front(A, in_dims[0]), in_front(b, in_dims[1])
    T, B, H = b.shape[1:]
    if A.shape[1:] == b.shape[1:]:
        A = folded(A, 1)
    else:
        if A.dim() == 4:
            A = A.unsqueeze(2)  # (N or 1, T, 1, H, H)
        shared = A.shape[0] == 1 and A.shape[2] == 1
        A = A.squeeze(0) if shared else folded(A.expand(-1, -1, B, -1, -1), 1)
    if x0 is not None:
        x0 = folded(in_front(x0, in_dims[2]), 0)
    x = torch.ops.weft.linear_scan(A, folded(b, 1), x0, reverse=reverse, transpose=transpose)
    return x.view(T, N, B, H), 1


torch.library.register_vmap("weft::linear_scan", _linear_scan_vmap)
