"""What torch's own recurrent kernels cannot run, and in which dtypes they answer."""

from __future__ import annotations

import functools
import threading

import torch

from ..._base.torch_private import RNN_KERNELS, constant_when_compiled

__all__ = ["CUDNN_MAX_STEPS", "CUDNN_MAX_VALUES", "CUDNN_VALUES", "autocast_dtypes", "why_not_cudnn", "why_not_onednn"]

CUDNN_MAX_STEPS = 65_535
"""T above which cuDNN refuses a sequence, whatever the cell and the dtype, with CUDNN_STATUS_NOT_SUPPORTED."""

CUDNN_MAX_VALUES = 2**31 - 1
CUDNN_VALUES = {"gru": 6, "lstm": 4}
"""Values of a unit and step; where a layer has more of them, cuDNN writes out of bounds, which ends in an illegal
access or in wrong numbers. Measured with torch 2.11 on an H200, every tensor in an allocation of its own: a training
step in float32 of a GRU with one direction and H up to 128 runs at T B H = 3.53e8 and fails at 3.76e8, an LSTM's at
4.9e8 and 5.4e8. Taken for the limit of all others, too, of both directions together."""


def why_not_cudnn(device: str, cell: str, units: int, steps: int | None, rows: int | None) -> str | None:
    """Why torch's kernel on this device cannot run T steps, or that many rows of all sequences together, with so many
    hidden units of both directions; None where it can. A number that is not known is None."""
    if device != "cuda":
        return None
    if steps is not None and steps > CUDNN_MAX_STEPS:
        return f"cuDNN takes at most {CUDNN_MAX_STEPS:,} steps, got {int(steps):,}"
    if rows is not None and rows * units * CUDNN_VALUES.get(cell, 0) > CUDNN_MAX_VALUES:
        return f"cuDNN writes out of bounds at {int(rows):,} rows of {int(units):,} hidden units"
    return None


@constant_when_compiled
def why_not_onednn(dtype: torch.dtype) -> str | None:
    """Why torch's LSTM cannot run padded input without a projection on this CPU in an autocast region of this dtype;
    None where it can.

    torch then asks oneDNN for a kernel without asking first whether the processor has one, and raises where it has
    none: below AVX-512 in bfloat16, nearly everywhere in float16.
    """
    return None if _tiny_lstm_runs(dtype) else f"oneDNN has no LSTM in {str(dtype).removeprefix('torch.')} here"


@constant_when_compiled
def autocast_dtypes(
    cell: str,
    autocast: torch.dtype,
    input: torch.dtype,
    state: tuple[torch.dtype, ...],
    packed: tuple[int, ...],
    projected: bool,
) -> tuple[torch.dtype, torch.dtype] | None:
    """Dtypes of output and h_n, and of c_n, of torch's kernel on this CPU under autocast; None where it cannot run. The
    version of torch and the processor decide, so it is asked, with tiny tensors: where `packed` is not empty, with
    these batch sizes."""
    return _tiny_run(cell, autocast, input, state, packed, projected)


def _tiny_lstm_runs(dtype: torch.dtype) -> bool:
    return _tiny_run("lstm", dtype, torch.float32, (torch.float32,) * 2, (), False) is not None


@functools.cache
def _tiny_run(
    cell: str,
    autocast: torch.dtype,
    input: torch.dtype,
    state: tuple[torch.dtype, ...],
    packed: tuple[int, ...],
    projected: bool,
) -> tuple[torch.dtype, torch.dtype] | None:
    found = []

    def try_it() -> None:
        rows = {"lstm": 4, "gru": 3}.get(cell, 1)
        shapes = ((rows, 1), (rows, 1), (rows,), (rows,), *([(1, 1)] if projected else []))
        weights = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        hx = [torch.zeros(1, max(packed, default=1), 1, dtype=dtype) for dtype in state]
        x = torch.zeros(1, sum(packed) or 1, 1, dtype=input)
        steps = (x[0], torch.tensor(packed)) if packed else (x,)
        layout = () if packed else (False,)
        try:
            with torch.autocast("cpu", autocast):
                output, *final = RNN_KERNELS[cell](
                    *steps, hx if cell == "lstm" else hx[0], weights, True, 1, 0.0, True, False, *layout
                )
            output.sum().backward()
        except RuntimeError:
            return
        found.append((output.dtype, final[-1].dtype))

    # A thread of its own has none of the caller's modes, transforms and default device.
    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return found[0] if found else None
