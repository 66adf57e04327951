"""cuSPARSE's SpGEMM and SpGEMMreuse by ctypes: torch calls the first alone, and with work of its own around it.

One product of one sample; for a batch it is called once a sample, as it has no batch of values on one pattern.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_NON_TRANSPOSE, _ZERO_BASED, _INT32, _FP32, _DEFAULT = 0, 0, 2, 0, 0


@functools.cache
def _library() -> ctypes.CDLL:
    """The cuSPARSE that torch has loaded."""
    places = [Path(p) for p in (getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or ())]
    found = [file for place in places for file in sorted(place.glob("*/lib/libcusparse.so.*"))]
    return ctypes.CDLL(str(found[0]) if found else "libcusparse.so.12")


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: cuSPARSE's status {status}")


@functools.cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cusparseCreate", ctypes.byref(handle))
    return handle


def _pointer(t: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr() if t is not None and t.numel() else None)


def _csr(shape: tuple[int, int], crow: Tensor | None, col: Tensor | None, values: Tensor | None) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    sizes = (*shape, 0 if col is None else col.shape[0])
    _call("cusparseCreateCsr", ctypes.byref(found), *map(ctypes.c_int64, sizes), *map(_pointer, (crow, col, values)),
          _INT32, _INT32, _ZERO_BASED, _FP32)  # fmt: skip
    return found


class SpGEMM:
    """``a @ b`` of two ``torch.sparse_csr`` matrices, float32 with int32 indices, on the current stream.

    ``run()`` is the whole of SpGEMM: it finds the pattern and the values. After ``prepare()``, ``rerun()`` is the
    numeric phase of SpGEMMreuse alone, on the pattern that was found. Both leave the product in ``result()``.
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self._parts = [(m.crow_indices().int(), m.col_indices().int(), m.values()) for m in (a, b)]
        self._shape = (a.shape[0], b.shape[1])
        self._a, self._b = (_csr(tuple(m.shape), *parts) for m, parts in zip((a, b), self._parts, strict=True))
        self._crow = torch.empty(a.shape[0] + 1, dtype=torch.int32, device=a.device)
        self._col = self._values = None
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._kept: list[Tensor] = []  # buffers that a descriptor points into
        self._reuse: tuple[ctypes.c_void_p, ctypes.c_void_p] | None = None

    def _open(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """The product, without elements, and a descriptor."""
        _call("cusparseSetStream", _handle(), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        descriptor = ctypes.c_void_p()
        _call("cusparseSpGEMM_createDescr", ctypes.byref(descriptor))
        return _csr(self._shape, self._crow, None, None), descriptor

    @staticmethod
    def _close(c: ctypes.c_void_p, descriptor: ctypes.c_void_p) -> None:
        _call("cusparseSpGEMM_destroyDescr", descriptor)
        _call("cusparseDestroySpMat", c)

    def _allocate(self, c: ctypes.c_void_p) -> None:
        sizes = [ctypes.c_int64() for _ in range(3)]
        _call("cusparseSpMatGetSize", c, *map(ctypes.byref, sizes))
        nnz = sizes[2].value
        self._col = torch.empty(nnz, dtype=torch.int32, device=self._crow.device)
        self._values = torch.empty(nnz, device=self._crow.device)
        _call("cusparseCsrSetPointers", c, *map(_pointer, (self._crow, self._col, self._values)))

    def _buffered(self, count: int, call: Callable[..., None]) -> list[Tensor]:
        """Calls once for the sizes of `count` buffers, and once with these."""
        sizes = [ctypes.c_size_t() for _ in range(count)]
        call(*(part for size in sizes for part in (ctypes.byref(size), None)))
        # At least a byte: a null pointer would ask for the size again.
        buffers = [torch.empty(max(1, size.value), dtype=torch.uint8, device=self._crow.device) for size in sizes]
        call(*(p for size, buffer in zip(sizes, buffers, strict=True) for p in (ctypes.byref(size), _pointer(buffer))))
        return buffers

    def run(self) -> None:
        c, descriptor = self._open()
        operands = (_handle(), _NON_TRANSPOSE, _NON_TRANSPOSE, ctypes.byref(self._one), self._a, self._b)
        rest = (ctypes.byref(self._zero), c, _FP32, _DEFAULT, descriptor)
        held = self._buffered(1, lambda *p: _call("cusparseSpGEMM_workEstimation", *operands, *rest, *p))
        held += self._buffered(1, lambda *p: _call("cusparseSpGEMM_compute", *operands, *rest, *p))
        self._allocate(c)
        _call("cusparseSpGEMM_copy", *operands, *rest)
        self._close(c, descriptor)
        del held

    def prepare(self) -> None:
        c, descriptor = self._open()
        operands = (_handle(), _NON_TRANSPOSE, _NON_TRANSPOSE, self._a, self._b, c, _DEFAULT, descriptor)
        self._kept = self._buffered(1, lambda *p: _call("cusparseSpGEMMreuse_workEstimation", *operands, *p))
        self._kept += self._buffered(3, lambda *p: _call("cusparseSpGEMMreuse_nnz", *operands, *p))
        self._allocate(c)
        self._kept += self._buffered(1, lambda *p: _call("cusparseSpGEMMreuse_copy", *operands, *p))
        self._reuse = (c, descriptor)
        self.rerun()

    def rerun(self) -> None:
        c, descriptor = self._reuse
        _call("cusparseSetStream", _handle(), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        _call("cusparseSpGEMMreuse_compute", _handle(), _NON_TRANSPOSE, _NON_TRANSPOSE, ctypes.byref(self._one),
              self._a, self._b, ctypes.byref(self._zero), c, _FP32, _DEFAULT, descriptor)  # fmt: skip

    def result(self) -> Tensor:
        return torch.sparse_csr_tensor(self._crow, self._col, self._values, self._shape)
