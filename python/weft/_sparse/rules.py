"""Rules of the sparse ops: shapes of fake tensors, autocast, vmap."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._base.rules import LIBRARY, widest
from .._base.torch_private import below_autocast

# Shapes ---------------------------------------------------------------------------------------------------------------


@torch.library.register_fake("weft::csr_mm")
def _csr_mm(pattern: list[Tensor], transposed: list[Tensor], values: Tensor | None, x: Tensor) -> Tensor:
    batch = x.shape[:-2] or (values.shape[:-1] if values is not None else ())
    return x.new_empty(*batch, pattern[0].shape[0] - 1, x.shape[-1])


@torch.library.register_fake("weft::csr_sampled_mm")
def _csr_sampled_mm(
    pattern: list[Tensor], transposed: list[Tensor], left: Tensor, right: Tensor, shared: bool
) -> Tensor:
    batch = () if shared else left.shape[:-2] or right.shape[:-2]
    return left.new_empty(*batch, pattern[1].shape[0])


@torch.library.register_fake("weft::csr_transpose")
def _csr_transpose(crow: Tensor, col: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    return crow.new_empty(columns + 1), torch.empty_like(col), torch.empty_like(col)


@torch.library.register_fake("weft::conv_pattern")
def _conv_pattern(
    windows: list[Tensor], groups: int, in_channels: int, out_channels: int, output_positions: int, wide: bool
) -> tuple[Tensor, Tensor]:
    crow, row = windows[:2]
    dtype = torch.int64 if wide else torch.int32
    return (
        crow.new_empty(groups * in_channels * (crow.shape[0] - 1) + 1, dtype=dtype),
        crow.new_empty(groups * in_channels * out_channels * row.shape[0], dtype=dtype),
    )


@torch.library.register_fake("weft::conv_values")
def _conv_values(weight: Tensor, windows: list[Tensor], groups: int) -> Tensor:
    return weight.new_empty(weight.shape[0] * weight.shape[1] * windows[1].shape[0])


@torch.library.register_fake("weft::conv_values_backward")
def _conv_values_backward(
    grad: Tensor, windows: list[Tensor], groups: int, out_channels: int, in_channels: int
) -> Tensor:
    return grad.new_empty(groups * out_channels, in_channels, windows[5].shape[0] - 1)


@torch.library.register_fake("weft::max_pool_values")
def _max_pool_values(
    input: Tensor,
    crow: Tensor,
    col: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output: list[int],
) -> Tensor:
    return input.new_empty(input.shape[0], input.shape[1] * col.shape[0])


# Autocast: operands of several dtypes take the widest -----------------------------------------------------------------


def _csr_mm_autocast(pattern: list[Tensor], transposed: list[Tensor], values: Tensor | None, x: Tensor) -> Tensor:
    with below_autocast():
        return torch.ops.weft.csr_mm(pattern, transposed, *widest(values, x))


def _csr_sampled_mm_autocast(
    pattern: list[Tensor], transposed: list[Tensor], left: Tensor, right: Tensor, shared: bool
) -> Tensor:
    with below_autocast():
        return torch.ops.weft.csr_sampled_mm(pattern, transposed, *widest(left, right), shared)


for _key in ("AutocastCPU", "AutocastCUDA"):
    LIBRARY.impl("csr_mm", _csr_mm_autocast, _key)
    LIBRARY.impl("csr_sampled_mm", _csr_sampled_mm_autocast, _key)


# vmap: what is mapped becomes the outer part of the batch -------------------------------------------------------------


def _to_front(t: Tensor, dim: int | None) -> Tensor:
    return t if dim is None else t.movedim(dim, 0)


def _folded(t: Tensor | None, dim: int | None, N: int, B: int | None, own: int) -> Tensor | None:
    """``t`` with N * B samples where it has any: `own` dimensions are not of the batch. Shared stays shared."""
    if t is None:
        return None
    batched = t.dim() - (dim is not None) > own
    if dim is None and not batched:
        return t
    t = t.movedim(dim, 0) if dim is not None else t.unsqueeze(0).expand(N, *t.shape)
    if B is None:
        return t
    if not batched:
        t = t.unsqueeze(1).expand(N, B, *t.shape[1:])
    return t.reshape(N * B, *t.shape[2:])


def _batch(*operands: tuple[Tensor | None, int | None, int]) -> int | None:
    for t, dim, own in operands:
        if t is not None and t.dim() - (dim is not None) > own:
            shape = _to_front(t, dim).shape
            return shape[0] if dim is None else shape[1]
    return None


@torch.library.register_vmap("weft::csr_mm")
def _csr_mm_vmap(info, in_dims, pattern, transposed, values, x):
    _, _, values_dim, x_dim = in_dims
    N, B = info.batch_size, _batch((values, values_dim, 1), (x, x_dim, 2))
    out = torch.ops.weft.csr_mm(pattern, transposed, _folded(values, values_dim, N, B, 1), _folded(x, x_dim, N, B, 2))
    return (out if B is None else out.unflatten(0, (N, B))), 0


@torch.library.register_vmap("weft::csr_sampled_mm")
def _csr_sampled_mm_vmap(info, in_dims, pattern, transposed, left, right, shared):
    _, _, left_dim, right_dim, _ = in_dims
    N, B = info.batch_size, _batch((left, left_dim, 2), (right, right_dim, 2))
    wide = torch.float64 if left.dtype == torch.float64 else torch.float32
    dtype = wide if shared and B is not None else left.dtype  # parts of a sum are not rounded
    out = torch.ops.weft.csr_sampled_mm(
        pattern,
        transposed,
        _folded(left, left_dim, N, B, 2).to(dtype),
        _folded(right, right_dim, N, B, 2).to(dtype),
        False,
    )
    if B is not None:
        out = out.unflatten(0, (N, B))
        out = out.sum(1).to(left.dtype) if shared else out
    return out, 0


@torch.library.register_vmap("weft::max_pool_values")
def _max_pool_values_vmap(info, in_dims, input, *rest):
    N, B = info.batch_size, _batch((input, in_dims[0], 3))
    out = torch.ops.weft.max_pool_values(_folded(input, in_dims[0], N, B, 3), *rest)
    return out.unflatten(0, (N, B)), 0


def _one_by_one(op, info, in_dims, mapped, windows, *rest):
    """Weights have no batch: a call for each."""
    return torch.stack([op(t, windows, *rest) for t in mapped.unbind(in_dims[0])]), 0


for _name in ("conv_values", "conv_values_backward"):
    torch.library.register_vmap(f"weft::{_name}", functools.partial(_one_by_one, getattr(torch.ops.weft, _name)))


# Planned products -----------------------------------------------------------------------------------------------------


@torch.library.register_fake("weft::csr_matmul_plan")
def _csr_matmul_plan(a: list[Tensor], b: list[Tensor], *, gpu: bool | None = None) -> tuple[Tensor, ...]:
    context = torch.library.get_ctx()
    index = torch.promote_types(a[0].dtype, b[0].dtype)
    new = (a[0].new_empty(context.new_dynamic_size(), dtype=dtype) for dtype in [*[index] * 11, torch.int16, index])
    return (a[0].new_empty(a[0].shape[0], dtype=index), *new, torch.empty(4, dtype=torch.int64, device="cpu"))


@torch.library.register_fake("weft::csr_matmul")
def _csr_matmul(patterns: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(*(x.shape[:-1] or y.shape[:-1]), patterns[5].shape[0])


def _gradient_of_csr_matmul(patterns: list[Tensor], pattern: int, other: Tensor, g: Tensor, shared: bool) -> Tensor:
    batch = () if shared else other.shape[:-1] or g.shape[:-1]
    return g.new_empty(*batch, patterns[pattern].shape[0])


@torch.library.register_fake("weft::csr_matmul_left")
def _csr_matmul_left(patterns: list[Tensor], y: Tensor, g: Tensor, shared: bool) -> Tensor:
    return _gradient_of_csr_matmul(patterns, 1, y, g, shared)


@torch.library.register_fake("weft::csr_matmul_right")
def _csr_matmul_right(patterns: list[Tensor], x: Tensor, g: Tensor, shared: bool) -> Tensor:
    return _gradient_of_csr_matmul(patterns, 3, x, g, shared)


def _csr_matmul_autocast(patterns: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    with below_autocast():
        return torch.ops.weft.csr_matmul(patterns, *widest(x, y))


def _csr_matmul_left_autocast(patterns: list[Tensor], y: Tensor, g: Tensor, shared: bool) -> Tensor:
    with below_autocast():
        return torch.ops.weft.csr_matmul_left(patterns, *widest(y, g), shared)


def _csr_matmul_right_autocast(patterns: list[Tensor], x: Tensor, g: Tensor, shared: bool) -> Tensor:
    with below_autocast():
        return torch.ops.weft.csr_matmul_right(patterns, *widest(x, g), shared)


for _key in ("AutocastCPU", "AutocastCUDA"):
    LIBRARY.impl("csr_matmul", _csr_matmul_autocast, _key)
    LIBRARY.impl("csr_matmul_left", _csr_matmul_left_autocast, _key)
    LIBRARY.impl("csr_matmul_right", _csr_matmul_right_autocast, _key)


def _csr_matmul_vmap(op, info, in_dims, patterns, x, y, shared=None):
    """Of csr_matmul and, with `shared`, of its gradients."""
    _, x_dim, y_dim, *_ = in_dims
    N, B = info.batch_size, _batch((x, x_dim, 1), (y, y_dim, 1))
    x, y = _folded(x, x_dim, N, B, 1), _folded(y, y_dim, N, B, 1)
    if shared is None:
        out = op(patterns, x, y)
        return (out if B is None else out.unflatten(0, (N, B))), 0
    dtype = x.dtype
    if shared and B is not None and dtype != torch.float64:  # parts of a sum are not rounded
        x, y = x.float(), y.float()
    out = op(patterns, x, y, False)
    if B is not None:
        out = out.unflatten(0, (N, B))
        out = out.sum(1) if shared else out
    return out.to(dtype), 0


for _name in ("csr_matmul", "csr_matmul_left", "csr_matmul_right"):
    torch.library.register_vmap(f"weft::{_name}", functools.partial(_csr_matmul_vmap, getattr(torch.ops.weft, _name)))


# Chains ---------------------------------------------------------------------------------------------------------------


@torch.library.register_fake("weft::csr_chain")
def _csr_chain(grad: Tensor, crows: list[Tensor], cols: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    out, n = [], grad.shape[1]
    for crow, v in zip(crows, values, strict=True):
        n = crow.shape[0] - 1 if crow.shape[0] else v.shape[-1]
        out.append(grad.new_empty(grad.shape[0], n))
    return out


def _csr_chain_autocast(grad: Tensor, crows: list[Tensor], cols: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    with below_autocast():
        grad, *values = widest(grad, *values)
        return torch.ops.weft.csr_chain(grad, crows, cols, values)


for _key in ("AutocastCPU", "AutocastCUDA"):
    LIBRARY.impl("csr_chain", _csr_chain_autocast, _key)


@torch.library.register_vmap("weft::csr_chain")
def _csr_chain_vmap(info, in_dims, grad, crows, cols, values):
    grad_dim, _, _, value_dims = in_dims
    N, B = info.batch_size, _batch((grad, grad_dim, 1))
    values = [_folded(v, dim, N, B, 1) for v, dim in zip(values, value_dims, strict=True)]
    out = torch.ops.weft.csr_chain(_folded(grad, grad_dim, N, B, 1), crows, cols, values)
    return [t.unflatten(0, (N, B)) for t in out], [0] * len(out)


@torch.library.register_fake("weft::layer_chain")
def _layer_chain(
    grad: Tensor,
    crows: list[Tensor],
    cols: list[Tensor],
    values: list[Tensor],
    sources: list[Tensor],
    reads: list[int],
) -> list[Tensor]:
    return _csr_chain(grad, crows, cols, values)


def _layer_chain_autocast(grad, crows, cols, values, sources, reads):
    with below_autocast():
        floating = [k for k, read in enumerate(reads) if read <= 0]
        grad, *given = widest(grad, *(values[k] for k in floating))
        values = list(values)
        for k, v in zip(floating, given, strict=True):
            values[k] = v
        return torch.ops.weft.layer_chain(grad, crows, cols, values, sources, reads)


for _key in ("AutocastCPU", "AutocastCUDA"):
    LIBRARY.impl("layer_chain", _layer_chain_autocast, _key)


@torch.library.register_vmap("weft::layer_chain")
def _layer_chain_vmap(info, in_dims, grad, crows, cols, values, sources, reads):
    """A call for each index: weights have no batch."""
    found = []
    for i in range(info.batch_size):
        own, *rest = (
            t if dim is None else t.select(dim, i)
            for t, dim in zip((grad, *values), (in_dims[0], *in_dims[3]), strict=True)
        )
        found.append(torch.ops.weft.layer_chain(own, crows, cols, rest, sources, reads))
    return [torch.stack(parts) for parts in zip(*found, strict=True)], [0] * len(values)


@torch.library.register_fake("weft::zeros_changed")
def _zeros_changed(weights: list[Tensor], stored: list[Tensor]) -> Tensor:
    return weights[0].new_empty(1, dtype=torch.int32)
