"""A group of one process that answers at once: what one rank of many does can be timed without the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .group import Ranks, known

__all__ = ["StandIn"]

_numbers = itertools.count()


class StandIn(Ranks):
    """This process as rank `rank` of `size`, the others of which bring what this one brought to the first call of its
    kind: their answers are there beforehand, and nothing is sent or waited for.

    It goes where a group goes. Results are right where all ranks have the same slice; others only take the same time.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"StandIn: rank must be at least 0 and below size {size}, got {rank}")
        self.name, self.rank, self.size = f"stand-in {next(_numbers)}", rank, size
        self._answers: dict[tuple, Tensor] = {}
        known[self.name] = self

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def begin_gather(self, x: Tensor) -> Callable[[], Tensor]:
        kind = (tuple(x.shape), x.dtype, x.device)
        if kind not in self._answers:
            self._answers[kind] = x.detach().expand(self.size, *x.shape).clone()
        answer = self._answers[kind]
        return lambda: answer

    def scatter(self, x: Tensor, sizes: list[int]) -> Tensor:
        begin = sum(sizes[: self.rank])
        return x[begin : begin + sizes[self.rank]].expand(self.size, sizes[self.rank], *x.shape[1:])

    def shift(self, x: Tensor, by: int) -> Tensor | None:
        return x if 0 <= self.rank - by < self.size else None

    def gather_objects(self, x: Any) -> list[Any]:
        return [x] * self.size

    def close(self) -> None:
        """Forgets the answers and the name."""
        self._answers.clear()
        known.pop(self.name, None)
