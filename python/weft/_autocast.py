"""Autocast rules: the dtype each op runs in under torch.autocast."""

import functools

import torch

# ---- scan_rnn --------------------------------------------------------------------------------------------------------

_scan_rnn_library = torch.library.Library("weft", "IMPL")


def _scan_rnn_autocast(device: str, keys: torch._C.DispatchKeySet, *args, cell: str, **kwargs):
    """Runs in the autocast dtype, as torch.nn's layers do, and like every autocast rule leaves float64 alone.

    One exception, torch's own: on the CPU torch.nn.GRU mixes the autocast dtype with h0's and returns the wider one.
    """
    dtype = torch.get_autocast_dtype(device)
    if device == "cpu" and cell == "gru":
        dtype = torch.promote_types(dtype, args[1].dtype)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        args = [
            a.to(dtype) if a is not None and a.is_floating_point() and a.dtype != torch.float64 else a for a in args
        ]
        return torch.ops.weft.scan_rnn(*args, cell=cell, **kwargs)


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))
    _scan_rnn_library.impl("scan_rnn", functools.partial(_scan_rnn_autocast, _device, _keys), _key)
