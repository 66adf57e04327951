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


# scan_rnn -----------------------------------------------------------------------------------------------------------

_GATE_BLOCKS = {"rnn_tanh": 0, "rnn_relu": 0, "gru": 4, "lstm": 4}  # blocks of H columns in `gates`


@torch.library.register_fake("weft::scan_rnn")
def _scan_rnn_fake(input, h0, c0, w_ih, w_hh, b_ih, b_hh, *, cell, reverse=False, save=False):
    steps, batch, _ = input.shape
    hidden = h0.shape[1]
    lstm = cell == "lstm"
    accumulate = torch.float64 if input.dtype == torch.float64 else torch.float32
    blocks = _GATE_BLOCKS.get(cell, 0) if save else 0
    return (
        input.new_empty((steps, batch, hidden)),
        input.new_empty((batch, hidden)),
        input.new_empty((batch, hidden) if lstm else (0,)),
        input.new_empty((steps, batch, blocks * hidden) if blocks else (0,), dtype=accumulate),
        input.new_empty((steps, batch, hidden) if blocks and lstm else (0,), dtype=accumulate),
    )


@torch.library.register_fake("weft::scan_rnn_backward")
def _scan_rnn_backward_fake(
    grad_output, grad_h_n, grad_c_n, input, h0, c0, w_ih, w_hh, b_ih, b_hh, output, gates, cells, *, cell, reverse,
    output_mask,
):  # fmt: skip
    arguments = (input, h0, c0, w_ih, w_hh, b_ih, b_hh)
    return tuple(
        torch.empty_like(argument, memory_format=torch.contiguous_format)
        if wanted and argument is not None
        else input.new_empty((0,))
        for argument, wanted in zip(arguments, output_mask, strict=True)
    )


@torch.library.register_vmap("weft::scan_rnn")
def _scan_rnn_vmap(info, in_dims, *args, **kwargs):
    """Folds the mapped dimension into the batch where it is on input, h0 or c0; mapped weights are run one by one."""
    dims = tuple(in_dims[: len(args)])
    size = info.batch_size
    if any(dim is not None for dim in dims[3:]):
        runs = [
            torch.ops.weft.scan_rnn(
                *(a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)), **kwargs
            )
            for i in range(size)
        ]
        return tuple(torch.stack(results) for results in zip(*runs, strict=True)), (0,) * 5

    def folded(tensor: Tensor | None, dim: int | None, batch: int) -> Tensor | None:
        if tensor is None:
            return None
        mapped = tensor.movedim(dim, batch) if dim is not None else tensor.unsqueeze(batch)
        mapped = mapped.expand(*mapped.shape[:batch], size, *mapped.shape[batch + 1 :])
        return mapped.flatten(batch, batch + 1)

    batches = (1, 0, 0)  # where input, h0 and c0 have their batch
    states = [folded(a, d, b) for a, d, b in zip(args[:3], dims[:3], batches, strict=True)]
    results = torch.ops.weft.scan_rnn(*states, *args[3:], **kwargs)

    def unfolded(tensor: Tensor) -> tuple[Tensor, int | None]:
        if tensor.dim() == 1:
            return tensor, None
        batch = tensor.dim() - 2
        return tensor.unflatten(batch, (size, tensor.shape[batch] // max(size, 1))), batch

    tensors, out_dims = zip(*map(unfolded, results), strict=True)
    return tensors, out_dims
