"""Shape rules: what each op returns for fake tensors, symbolic shapes included."""

import torch
from torch import Tensor

# ---- scan_rnn: fake kernels and the batching rule --------------------------------------------------------------------

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
