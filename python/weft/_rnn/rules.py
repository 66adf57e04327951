"""Rules of rnn: fake tensors, vmap, autocast. Those of torch_rnn, an op of Python, are in torch_rnn.py."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._base.rules import LIBRARY, check_devices, one_by_one
from .._base.torch_private import below_autocast
from .table import traits


@torch.library.register_fake("weft::rnn")
def _rnn_fake(
    input, h0, c0, weights, batch_sizes=None, *, cell, bidirectional=False, keep_cells=False, save=False,
    backward="persistent", num_heads=1,
):  # fmt: skip
    check_devices("weft::rnn", input=input, h0=h0, c0=c0, **{f"weights[{i}]": w for i, w in enumerate(weights)})
    directions, hidden = 2 if bidirectional else 1, weights[1].shape[1] * num_heads
    if batch_sizes is None:
        batch, rows = input.shape[1], input.shape[0] * input.shape[1]
    else:
        # Without a state, the number of sequences is known to the data of batch_sizes alone.
        batch = torch.library.get_ctx().new_dynamic_size() if h0 is None else h0.shape[1]
        rows = input.shape[0]
    others, kept = traits(cell).others, traits(cell).kept
    width = directions * hidden
    blocks = traits(cell).saved if save else 0
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    saved = input.dtype if backward == "persistent" else wide
    return (
        input.new_empty((*input.shape[:-1], width)),
        input.new_empty((directions, batch, hidden)),
        input.new_empty((directions, batch, others * hidden) if others else (0,)),
        input.new_empty((*input.shape[:-1], kept * width) if kept and (save or keep_cells) else (0,), dtype=saved),
        input.new_empty((directions, rows, blocks * hidden) if blocks else (0,), dtype=saved),
    )


@torch.library.register_fake("weft::rnn_backward")
def _rnn_backward_fake(
    grad_output, grad_h_n, grad_c_n, grad_cells, input, h0, c0, weights, batch_sizes, output, cells, gates, *, cell,
    bidirectional, output_mask, backward="persistent", num_heads=1,
):  # fmt: skip
    return [
        torch.empty_like(argument, memory_format=torch.contiguous_format)
        if wanted and argument is not None
        else input.new_empty((0,))
        for argument, wanted in zip((input, h0, c0, *weights), output_mask, strict=True)
    ]


class _Folding:
    """A mapped dimension as the inner part of the batch, so that the sequences of a packed step stay together."""

    def __init__(self, size: int, batch_sizes: Tensor | None) -> None:
        self.size = size
        self.batch_sizes = None if batch_sizes is None else batch_sizes * size
        self.rows = 1 if batch_sizes is None else 0  # where the batch is in input and output

    def fold(self, tensor: Tensor | None, dim: int | None, batch: int) -> Tensor | None:
        if tensor is None:
            return None
        mapped = tensor.unsqueeze(batch + 1) if dim is None else tensor.movedim(dim, batch + 1)
        return mapped.expand(*mapped.shape[: batch + 1], self.size, *mapped.shape[batch + 2 :]).flatten(
            batch, batch + 1
        )

    def unfold(self, tensor: Tensor, batch: int) -> tuple[Tensor, int | None]:
        """A result and its mapped dimension; one that was not asked for has none."""
        if tensor.dim() == 1:
            return tensor, None
        return tensor.unflatten(batch, (tensor.shape[batch] // max(self.size, 1), self.size)), batch + 1


@torch.library.register_vmap("weft::rnn")
def _rnn_vmap(info, in_dims, input, h0, c0, weights, batch_sizes=None, **kwargs):
    """Folds the mapped dimension into the batch where it is on input, h0 or c0; mapped weights are run one by one."""
    args = (input, h0, c0, weights, batch_sizes)
    dims = (*in_dims, None)[:5]  # batch_sizes may have been left out
    if any(dim is not None for dim in (*dims[3], dims[4])):
        return tuple(one_by_one(torch.ops.weft.rnn, info.batch_size, dims, args, kwargs)), (0,) * 5
    folding = _Folding(info.batch_size, batch_sizes)
    results = torch.ops.weft.rnn(
        *(folding.fold(t, d, b) for t, d, b in zip(args[:3], dims, (folding.rows, 1, 1), strict=False)),
        weights,
        folding.batch_sizes,
        **kwargs,
    )
    batches = (folding.rows, 1, 1, folding.rows, 1)
    tensors, out_dims = zip(*(folding.unfold(r, b) for r, b in zip(results, batches, strict=True)), strict=True)
    return tensors, out_dims


@torch.library.register_vmap("weft::rnn_backward")
def _rnn_backward_vmap(info, in_dims, *args, output_mask, **kwargs):
    """Folds likewise; the gradients of the weights are sums over the batch but not over what is mapped, so that where
    one is wanted the calls are made one by one."""
    op = torch.ops.weft.rnn_backward
    kwargs["output_mask"] = output_mask
    if any(output_mask[3:]) or any(dim is not None for dim in (*in_dims[7], in_dims[8])):
        results = one_by_one(op, info.batch_size, in_dims, args, kwargs)
        return results, [0] * len(results)
    folding = _Folding(info.batch_size, args[8])
    rows, blocks = folding.rows, traits(kwargs["cell"]).saved
    # Four gradients, input, h0, c0; output, and cells and gates where the cell has them.
    batches = (rows, 1, 1, rows, rows, 1, 1, None, None, rows, rows if traits(kwargs["cell"]).others else None)
    batches = (*batches, 1 if blocks else None)
    folded = [a if b is None else folding.fold(a, d, b) for a, d, b in zip(args, in_dims, batches, strict=True)]
    folded[8] = folding.batch_sizes
    results = op(*folded, **kwargs)
    batches = (rows, *(1 for _ in results[1:]))
    tensors, out_dims = zip(*(folding.unfold(r, b) for r, b in zip(results, batches, strict=True)), strict=True)
    return list(tensors), list(out_dims)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _recurrent_dtype(device: str, cell: str, state: Tensor) -> torch.dtype:
    """The autocast dtype, with two exceptions, torch's own: on CUDA the rule of its cells is float16 whatever the
    region's dtype, and on the CPU torch.nn.GRU mixes the autocast dtype with the state's and returns the wider one."""
    torchs = traits(cell).others <= 1
    dtype = torch.float16 if device == "cuda" and torchs else torch.get_autocast_dtype(device)
    return torch.promote_types(dtype, state.dtype) if device == "cpu" and cell == "gru" else dtype


def _rnn_autocast(device: str, input, h0, c0, weights, batch_sizes=None, *, cell: str, **options):
    """Runs in the dtype that torch.nn's layers run in, and like every autocast rule leaves float64 alone. torch.nn's
    zeros instead of a missing state have the input's dtype."""
    dtype = _recurrent_dtype(device, cell, input if h0 is None else h0)
    tensors = (_cast(t, dtype) for t in (input, h0, c0))
    with below_autocast():
        return torch.ops.weft.rnn(*tensors, [_cast(w, dtype) for w in weights], batch_sizes, cell=cell, **options)


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    LIBRARY.impl("rnn", functools.partial(_rnn_autocast, _device), _key)
