"""Problems for the codecs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tests.ops import Op


@dataclass(frozen=True)
class Codec:
    """A tensor without a zero, so that all of `values` is specified; compressed where `back` is False."""

    codec: str
    shape: tuple[int, ...]
    back: bool

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        shape = tuple(n + more for n in self.shape)
        generator = torch.Generator().manual_seed(math.prod(shape))
        x = (torch.rand(shape, generator=generator) + 1).to(device, dtype)
        if not self.back:
            return (x,), {}
        return (*getattr(torch.ops.weft, f"{self.codec}_compress")(x)[:2], shape), {}

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) or "scalar"


SHAPES = [(), (3, 5), (2, 40)]
LARGE = [(300, 700)]
EMPTY = [(0,), (3, 0)]

OPS = [
    Op(
        f"{codec}_{'decompress' if back else 'compress'}",
        *([Codec(codec, shape, back) for shape in shapes] for shapes in (SHAPES, LARGE, EMPTY)),
        differentiable=False,
        vmap=False,
    )
    for codec in ("zvc", "rle")
    for back in (False, True)
]
