"""Calls that exchange: generators that yield what this rank tells the others and are sent what all have told, so that
one can go on while what another one waits for is on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from .group import Ranks

__all__ = ["Exchanging", "run", "run_together"]

T = TypeVar("T")
Exchanging = Generator[Tensor, Tensor, T]
"""Yields tensors of the same shape on every rank, gets them back as :meth:`Ranks.gather` returns them, returns T."""


def run(ranks: Ranks, call: Exchanging[T]) -> T:
    try:
        told = next(call)
        while True:
            told = call.send(ranks.gather(told))
    except StopIteration as done:
        return done.value


def run_together(ranks: Ranks, calls: Sequence[Exchanging[Any]]) -> list[Any]:
    """What the calls return. Each begins, and goes on, while the exchanges of those before it are on their way. Every
    rank brings the same calls, and exchanges are begun in the same order everywhere: each call's first, then each
    call's second, and so on."""
    results: list[Any] = [None] * len(calls)
    waiting: deque = deque()
    for number, call in enumerate(calls):
        waiting.append((number, call, None))
    while waiting:
        number, call, gathered = waiting.popleft()
        try:
            told = call.send(None if gathered is None else gathered())
        except StopIteration as done:
            results[number] = done.value
        else:
            waiting.append((number, call, ranks.begin_gather(told)))
    return results
