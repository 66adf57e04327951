"""Shape rules: what each op returns for fake tensors, symbolic shapes included; and how vmap maps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# linear_scan --------------------------------------------------------------------------------------------------------


def _may_be_equal(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are equal, or cannot be told apart because a size depends on data."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # slow to import

    return len(shape) == len(other) and all(guard_or_true(m == n) for m, n in zip(shape, other, strict=True))


def _check_linear_scan(A: Tensor, b: Tensor, x0: Tensor | None) -> None:
    """The checks of csrc/scan/linear_scan.cpp, on sizes that may be symbols."""
    torch._check_type(
        A.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64),
        lambda: f"linear_scan: A must be float16, bfloat16, float32 or float64, got {A.dtype}",
    )
    torch._check_type(b.dtype == A.dtype, lambda: f"linear_scan: b must have the dtype of A, {A.dtype}, got {b.dtype}")
    torch._check_type(
        x0 is None or x0.dtype == A.dtype,
        lambda: f"linear_scan: x0 must have the dtype of A, {A.dtype}, got {x0.dtype}",
    )
    torch._check_value(b.dim() == 3, lambda: f"linear_scan: b must be (T, B, H), got {tuple(b.shape)}")
    T, B, H = b.shape
    torch._check_value(
        x0 is None or _may_be_equal(x0.shape, (B, H)),
        lambda: f"linear_scan: x0 must be (B, H) = {(B, H)}, got {tuple(x0.shape)}",
    )
    torch._check_value(
        any(_may_be_equal(A.shape, shape) for shape in ((T, B, H), (T, B, H, H), (T, 1, H, H), (T, H, H))),
        lambda: (
            f"linear_scan: A must be (T, B, H, H) = {(T, B, H, H)}, (T, H, H) or (T, 1, H, H) shared by the batch, or "
            f"(T, B, H) diagonal, to go with b {tuple(b.shape)}; got {tuple(A.shape)}"
        ),
    )


@torch.library.register_fake("weft::linear_scan")
def _linear_scan(
    A: Tensor, b: Tensor, x0: Tensor | None = None, *, reverse: bool = False, transpose: bool = False
) -> Tensor:
    _check_linear_scan(A, b, x0)
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
    _check_linear_scan(A, grad, x0)
    torch._check_value(
        x is None or _may_be_equal(x.shape, grad.shape),
        lambda: f"linear_scan_backward: x must be (T, B, H) = {tuple(grad.shape)}, got {tuple(x.shape)}",
    )
    return (
        A.new_empty(A.shape) if output_mask[0] else None,
        grad.new_empty(grad.shape) if output_mask[1] else None,
        x0.new_empty(x0.shape) if output_mask[2] and x0 is not None else None,
    )


class _Mapped:
    """Tensors of which some have a mapped dimension, of N, which becomes the outer part of the batch."""

    def __init__(self, N: int, A: Tensor, A_dim: int | None, b: Tensor, b_dim: int | None) -> None:
        self.N = N
        self.A, self.b = self._in_front(A, A_dim), self._in_front(b, b_dim)
        self.diagonal = self.A.shape[1:] == self.b.shape[1:]
        self.shared = not self.diagonal and (self.A.dim() == 4 or (self.A.shape[2] == 1 and self.b.shape[2] != 1))

    @staticmethod
    def _in_front(t: Tensor, dim: int | None) -> Tensor:
        return t.unsqueeze(0) if dim is None else t.movedim(dim, 0)

    def _fold(self, t: Tensor, batch: int) -> Tensor:
        return t.expand(self.N, *t.shape[1:]).movedim(0, batch).flatten(batch, batch + 1)

    def fold(self, t: Tensor | None, dim: int | None, batch: int) -> Tensor | None:
        """`t` with its batch dimension, `batch` where it is not mapped, N times as long."""
        return None if t is None else self._fold(self._in_front(t, dim), batch)

    def unfold(self, t: Tensor, batch: int) -> Tensor:
        """The mapped dimension of a result at its place, `batch`."""
        return t.unflatten(batch, (self.N, t.shape[batch] // max(self.N, 1)))

    def matrices(self, keep_shared: bool) -> Tensor:
        """A, folded; one that everything shares may stay (T, 1, H, H)."""
        if self.diagonal:
            return self._fold(self.A, 1)
        A = self.A if self.A.dim() == 5 else self.A.unsqueeze(2)  # (N or 1, T, B or 1, H, H)
        if keep_shared and A.shape[0] == 1 and A.shape[2] == 1:
            return A.squeeze(0)
        return self._fold(A.expand(-1, -1, self.b.shape[2], -1, -1), 1)


@torch.library.register_vmap("weft::linear_scan")
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
    mapped = _Mapped(info.batch_size, A, in_dims[0], b, in_dims[1])
    x0 = mapped.fold(x0, in_dims[2] if x0 is not None else None, 0)
    x = torch.ops.weft.linear_scan(
        mapped.matrices(keep_shared=True), mapped.fold(b, in_dims[1], 1), x0, reverse=reverse, transpose=transpose
    )
    return mapped.unfold(x, 1), 1


@torch.library.register_vmap("weft::linear_scan_backward")
def _linear_scan_backward_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad: Tensor,
    A: Tensor,
    x: Tensor | None,
    x0: Tensor | None,
    reverse: bool,
    transpose: bool,
    output_mask: list[bool],
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    mapped = _Mapped(info.batch_size, A, in_dims[1], grad, in_dims[0])
    # The gradient of a shared A is a sum over the batch, but not over what is mapped.
    matrices = mapped.matrices(keep_shared=not output_mask[0])
    grad_A, grad_b, grad_x0 = torch.ops.weft.linear_scan_backward(
        mapped.fold(grad, in_dims[0], 1),
        matrices,
        mapped.fold(x, in_dims[2], 1),
        mapped.fold(x0, in_dims[3], 0),
        reverse,
        transpose,
        output_mask,
    )
    if grad_A is not None:
        grad_A = mapped.unfold(grad_A, 1)  # (T, N, B, ...)
        if mapped.shared:
            grad_A = grad_A.sum(2, keepdim=mapped.A.dim() == 5)
    grad_b = None if grad_b is None else mapped.unfold(grad_b, 1)
    grad_x0 = None if grad_x0 is None else mapped.unfold(grad_x0, 0)
    results = (grad_A, grad_b, grad_x0)
    return results, tuple(None if t is None else dim for t, dim in zip(results, (1, 1, 0), strict=True))


def _one_by_one(op, size: int, in_dims: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The results of one call for each index of the mapped dimension, stacked."""

    def select(argument: Any, dim: Any, index: int) -> Any:
        if isinstance(argument, (list, tuple)):
            return [select(a, d, index) for a, d in zip(argument, dim, strict=True)]
        return argument if dim is None else argument.select(dim, index)

    runs = [op(*(select(a, d, i) for a, d in zip(args, in_dims, strict=True)), **kwargs) for i in range(size)]
    return [torch.stack(results) for results in zip(*runs, strict=True)]


# scan_rnn -----------------------------------------------------------------------------------------------------------

_GATE_BLOCKS = {"rnn_tanh": 0, "rnn_relu": 0, "gru": 4, "lstm": 4}  # blocks of H columns in `gates`


@torch.library.register_fake("weft::scan_rnn")
def _scan_rnn_fake(input, h0, c0, w_ih, w_hh, b_ih, b_hh, *, cell, reverse=False, save=False):
    steps, batch, _ = input.shape
    hidden = h0.shape[2]
    lstm = cell == "lstm"
    accumulate = torch.float64 if input.dtype == torch.float64 else torch.float32
    blocks = _GATE_BLOCKS.get(cell, 0) if save else 0
    return (
        input.new_empty((steps, batch, hidden)),
        input.new_empty((1, batch, hidden)),
        input.new_empty((1, batch, hidden) if lstm else (0,)),
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
        return tuple(_one_by_one(torch.ops.weft.scan_rnn, size, dims, args, kwargs)), (0,) * 5

    def folded(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        if tensor is None:
            return None
        mapped = tensor.movedim(dim, 1) if dim is not None else tensor.unsqueeze(1)
        return mapped.expand(mapped.shape[0], size, *mapped.shape[2:]).flatten(1, 2)

    states = [folded(a, d) for a, d in zip(args[:3], dims[:3], strict=True)]
    results = torch.ops.weft.scan_rnn(*states, *args[3:], **kwargs)

    def unfolded(tensor: Tensor) -> tuple[Tensor, int | None]:
        if tensor.dim() == 1:
            return tensor, None
        return tensor.unflatten(1, (size, tensor.shape[1] // max(size, 1))), 1

    tensors, out_dims = zip(*map(unfolded, results), strict=True)
    return tensors, out_dims


# rnn ----------------------------------------------------------------------------------------------------------------


@torch.library.register_fake("weft::rnn")
def _rnn_fake(
    input, h0, c0, weights, batch_sizes=None, *, cell, bidirectional=False, keep_cells=False, save=False
):  # fmt: skip
    directions, hidden = 2 if bidirectional else 1, weights[1].shape[1]
    if batch_sizes is None:
        batch, rows = input.shape[1], input.shape[0] * input.shape[1]
    else:
        # Without a state, the number of sequences is known to the data of batch_sizes alone.
        batch = torch.library.get_ctx().new_dynamic_size() if h0 is None else h0.shape[1]
        rows = input.shape[0]
    lstm = cell == "lstm"
    width = directions * hidden
    blocks = _GATE_BLOCKS.get(cell, 0) if save else 0
    return (
        input.new_empty((*input.shape[:-1], width)),
        input.new_empty((directions, batch, hidden)),
        input.new_empty((directions, batch, hidden) if lstm else (0,)),
        input.new_empty((*input.shape[:-1], width) if lstm and (save or keep_cells) else (0,)),
        input.new_empty((directions, rows, blocks * hidden) if blocks else (0,)),
    )


@torch.library.register_fake("weft::rnn_backward")
def _rnn_backward_fake(
    grad_output, grad_h_n, grad_c_n, grad_cells, input, h0, c0, weights, batch_sizes, output, cells, gates, *, cell,
    bidirectional, output_mask,
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
        return tuple(_one_by_one(torch.ops.weft.rnn, info.batch_size, dims, args, kwargs)), (0,) * 5
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
        results = _one_by_one(op, info.batch_size, in_dims, args, kwargs)
        return results, [0] * len(results)
    folding = _Folding(info.batch_size, args[8])
    rows, blocks = folding.rows, _GATE_BLOCKS.get(kwargs["cell"])
    # Four gradients, input, h0, c0; output, and cells and gates where the cell has them.
    batches = (rows, 1, 1, rows, rows, 1, 1, None, None, rows, rows if kwargs["cell"] == "lstm" else None)
    batches = (*batches, 1 if blocks else None)
    folded = [a if b is None else folding.fold(a, d, b) for a, d, b in zip(args, in_dims, batches, strict=True)]
    folded[8] = folding.batch_sizes
    results = op(*folded, **kwargs)
    batches = (rows, *(1 for _ in results[1:]))
    tensors, out_dims = zip(*(folding.unfold(r, b) for r, b in zip(results, batches, strict=True)), strict=True)
    return list(tensors), list(out_dims)
