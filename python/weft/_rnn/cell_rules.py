"""Rules of rnn_cell: fake tensors, vmap, autocast."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._base.rules import LIBRARY, check_devices, one_by_one
from .._base.torch_private import below_autocast
from .table import traits


@torch.library.register_fake("weft::rnn_cell")
def _rnn_cell_fake(input, h, c, w_ih, w_hh, b_ih=None, b_hh=None, *, cell, save=False, num_heads=1):
    check_devices("weft::rnn_cell", input=input, h=h, c=c, w_ih=w_ih, w_hh=w_hh, b_ih=b_ih, b_hh=b_hh)
    batch, hidden = input.shape[0], w_hh.shape[1] * num_heads
    blocks, others = traits(cell).saved if save else 0, traits(cell).others
    return (
        input.new_empty((batch, hidden)),
        input.new_empty((batch, others * hidden) if others else (0,)),
        input.new_empty((batch, blocks * hidden) if blocks else (0,)),
    )


@torch.library.register_fake("weft::rnn_cell_backward")
def _rnn_cell_backward_fake(
    grad_h_next,
    grad_c_next,
    input,
    h,
    c,
    w_ih,
    w_hh,
    b_ih,
    b_hh,
    h_next,
    c_next,
    gates,
    *,
    cell,
    output_mask,
    num_heads=1,
):
    return [
        torch.empty_like(argument, memory_format=torch.contiguous_format)
        if wanted and argument is not None
        else input.new_empty((0,))
        for argument, wanted in zip((input, h, c, w_ih, w_hh, b_ih, b_hh), output_mask, strict=True)
    ]


def _folded(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """(B, ...) with the mapped dimension as the outer part of the batch."""
    if tensor is None or tensor.dim() - (dim is not None) < 2:
        return tensor
    mapped = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


def _unfolded(tensors: list[Tensor], size: int) -> tuple[list[Tensor], list[int | None]]:
    """Results and their mapped dimensions; one that was not asked for has none."""
    results = [t if t.dim() < 2 else t.unflatten(0, (size, t.shape[0] // max(size, 1))) for t in tensors]
    return results, [None if t.dim() < 2 else 0 for t in tensors]


@torch.library.register_vmap("weft::rnn_cell")
def _rnn_cell_vmap(info, in_dims, *args, **kwargs):
    """Folds the mapped dimension into the batch where it is on input, h or c; mapped weights are run one by one."""
    op = torch.ops.weft.rnn_cell
    if any(dim is not None for dim in in_dims[3:]):
        return tuple(one_by_one(op, info.batch_size, in_dims, args, kwargs)), (0, 0, 0)
    states = (_folded(t, d, info.batch_size) for t, d in zip(args[:3], in_dims, strict=False))
    results, dims = _unfolded(op(*states, *args[3:], **kwargs), info.batch_size)
    return tuple(results), tuple(dims)


@torch.library.register_vmap("weft::rnn_cell_backward")
def _rnn_cell_backward_vmap(info, in_dims, *args, output_mask, **kwargs):
    """Folds likewise; the gradients of the weights are sums over the batch but not over what is mapped, so that where
    one is wanted the calls are made one by one."""
    op = torch.ops.weft.rnn_cell_backward
    kwargs["output_mask"] = output_mask
    if any(output_mask[3:]) or any(dim is not None for dim in in_dims[5:9]):
        results = one_by_one(op, info.batch_size, in_dims, args, kwargs)
        return results, [0] * len(results)
    weights = range(5, 9)
    folded = [
        a if i in weights else _folded(a, d, info.batch_size)
        for i, (a, d) in enumerate(zip(args, in_dims, strict=True))
    ]
    return _unfolded(op(*folded, **kwargs), info.batch_size)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def cell_dtype(device: str, cell: str, state: torch.dtype) -> torch.dtype:
    """What a cell runs in under autocast, which is torch's own: the region's dtype; on the CPU, where torch casts the
    products alone, a gru and an lstm have the state's where it is wider."""
    dtype = torch.get_autocast_dtype(device)
    return torch.promote_types(dtype, state) if device == "cpu" and traits(cell).saved else dtype


def _rnn_cell_autocast(device: str, input, h, c, *weights, cell: str, **options):
    dtype = cell_dtype(device, cell, h.dtype if c is None else c.dtype)
    tensors = [_cast(t, dtype) for t in (input, h, c, *weights)]
    with below_autocast():
        return torch.ops.weft.rnn_cell(*tensors, cell=cell, **options)


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    LIBRARY.impl("rnn_cell", functools.partial(_rnn_cell_autocast, _device), _key)
