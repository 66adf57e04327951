"""Autocast rules: the dtype each op runs in under torch.autocast."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("weft", "IMPL")


def _below_autocast() -> torch._C._ExcludeDispatchKeyGuard:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys.add(torch._C.DispatchKey.AutocastCUDA))


def _widest(*tensors: Tensor | None) -> list[Tensor | None]:
    """The floating tensors in the widest dtype among them: a recurrence is no place for autocast's narrow one."""
    floating = [t for t in tensors if t is not None and t.is_floating_point()]
    if not floating:
        return list(tensors)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in floating))
    return [t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors]


def _linear_scan(
    A: Tensor, b: Tensor, x0: Tensor | None = None, *, reverse: bool = False, transpose: bool = False
) -> Tensor:
    with _below_autocast():
        A, b, x0 = _widest(A, b, x0)
        return torch.ops.weft.linear_scan(A, b, x0, reverse=reverse, transpose=transpose)


def _chain_backward(grad: Tensor, jacobians: list[Tensor], levels: int = -1) -> list[Tensor]:
    with _below_autocast():
        grad, *jacobians = _widest(grad, *jacobians)
        return torch.ops.weft.chain_backward(grad, jacobians, levels)


for _key in ("AutocastCPU", "AutocastCUDA"):
    _LIBRARY.impl("linear_scan", _linear_scan, _key)
    _LIBRARY.impl("chain_backward", _chain_backward, _key)


# scan_rnn -----------------------------------------------------------------------------------------------------------


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _recurrent_dtype(device: str, cell: str, state: Tensor) -> torch.dtype:
    """The autocast dtype, with two exceptions, torch's own: on CUDA its rule is float16 whatever the region's dtype,
    and on the CPU torch.nn.GRU mixes the autocast dtype with the state's and returns the wider one."""
    dtype = torch.float16 if device == "cuda" else torch.get_autocast_dtype(device)
    return torch.promote_types(dtype, state.dtype) if device == "cpu" and cell == "gru" else dtype


def _scan_rnn(device: str, *args: Tensor | None, cell: str, **flags: bool):
    """Runs in the dtype that torch.nn's layers run in, and like every autocast rule leaves float64 alone."""
    dtype = _recurrent_dtype(device, cell, args[1])
    with _below_autocast():
        return torch.ops.weft.scan_rnn(*(_cast(a, dtype) for a in args), cell=cell, **flags)


# rnn ----------------------------------------------------------------------------------------------------------------


def _rnn(device: str, input, h0, c0, weights, batch_sizes=None, *, cell: str, **flags: bool):
    """As scan_rnn; torch.nn's zeros in the place of a missing state have the input's dtype."""
    dtype = _recurrent_dtype(device, cell, input if h0 is None else h0)
    tensors = (_cast(t, dtype) for t in (input, h0, c0))
    with _below_autocast():
        return torch.ops.weft.rnn(*tensors, [_cast(w, dtype) for w in weights], batch_sizes, cell=cell, **flags)


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _LIBRARY.impl("scan_rnn", functools.partial(_scan_rnn, _device), _key)
    _LIBRARY.impl("rnn", functools.partial(_rnn, _device), _key)
