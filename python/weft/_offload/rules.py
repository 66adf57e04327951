"""Shape rules of the offload engine's ops. The codecs take every dtype as it is, under autocast, too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check_compressible(op: str, x: Tensor) -> None:
    torch._check_type(x.dtype in _DTYPES, lambda: f"{op}: x must be float32, float16 or bfloat16, got {x.dtype}")


def _check_compressed(op: str, name: str, words: Tensor, values: Tensor, shape: Sequence[int]) -> None:
    """The checks of csrc/offload/zvc_compress.cpp, on sizes that may be symbols."""
    torch._check_type(words.dtype == torch.int32, lambda: f"{op}: {name} must be int32, got {words.dtype}")
    torch._check_type(
        values.dtype in _DTYPES, lambda: f"{op}: values must be float32, float16 or bfloat16, got {values.dtype}"
    )
    for what, tensor in ((name, words), ("values", values)):
        torch._check_value(
            tensor.dim() == 1,
            lambda: f"{op}: {what} must have one dimension, got {list(tensor.shape)}",  # noqa: B023
        )
    torch._check(
        words.device == values.device,
        lambda: f"{op}: {name} must be on the device of values, {values.device}, got {words.device}",
    )
    for size in shape:
        torch._check_value(size >= 0, lambda: f"{op}: shape must not have negative sizes, got {list(shape)}")


@torch.library.register_fake("weft::zvc_compress")
def _zvc_compress(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check_compressible("zvc_compress", x)
    n = x.numel()
    return x.new_empty(((n + 31) // 32,), dtype=torch.int32), x.new_empty((n,)), x.new_empty((), dtype=torch.int64)


@torch.library.register_fake("weft::zvc_decompress")
def _zvc_decompress(mask: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    _check_compressed("zvc_decompress", "mask", mask, values, shape)
    words = (math.prod(shape) + 31) // 32
    torch._check_value(
        mask.numel() == words,
        lambda: (
            f"zvc_decompress: mask must have ceil(n/32) = {words} words for shape {list(shape)}, got {mask.numel()}"
        ),
    )
    return values.new_empty(tuple(shape))


@torch.library.register_fake("weft::rle_compress")
def _rle_compress(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check_compressible("rle_compress", x)
    n = x.numel()
    return x.new_empty((n + 1,), dtype=torch.int32), x.new_empty((n,)), x.new_empty((2,), dtype=torch.int64)


@torch.library.register_fake("weft::rle_decompress")
def _rle_decompress(runs: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    _check_compressed("rle_decompress", "runs", runs, values, shape)
    return values.new_empty(tuple(shape))
