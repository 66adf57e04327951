"""What the emulated kernels of linear_scan are given: csrc/scan/linear/linear_scan_args.h."""

from __future__ import annotations

import ctypes

import torch

CODES = {2: 1, 4: 2, 8: 3}  # of scan::DType, by bytes of a real element
TYPES = {torch.bfloat16: 1, torch.float32: 2, torch.float64: 3, torch.complex64: 4, torch.complex128: 5}

_pointer, _int = ctypes.c_void_p, ctypes.c_int64


class LinearScan(ctypes.Structure):
    _fields_ = [("A", _pointer), *((n, _int) for n in ("A_t", "A_b", "A_row", "A_col")), ("b", _pointer), ("b_t", _int),
                ("b_b", _int), ("x0", _pointer), ("x0_b", _int), ("out", _pointer),
                *((n, _int) for n in ("out_t", "out_b", "T", "B", "H")), ("dtype", ctypes.c_int32)]  # fmt: skip
