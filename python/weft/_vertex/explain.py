"""``weft.explain`` of a vertex function: which executor runs, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .function import VertexFunction, VertexFunctions, prepare
from .graphs import Graphs

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """The answer of :func:`explain`; ``print`` it."""

    cell: str
    graphs: str
    asked: str
    """The executor that was asked for."""
    executor: str
    """The executor that runs."""
    reason: str
    """Why; the operation that the compiler does not know among it."""

    def __str__(self) -> str:
        return f"{self.cell} on {self.graphs}\nruns as {self.executor!r} ({self.reason}); asked for: {self.asked!r}"


def explain(
    cell: VertexFunction | VertexFunctions,
    graphs: Graphs,
    inputs: Tensor | Mapping[str, Tensor] | None = None,
    *,
    executor: str = "auto",
) -> Explanation:
    """Say which executor ``cell(graphs, inputs, executor=executor)`` would run, and why. Nothing is computed.

    Returns:
        An :class:`Explanation`, printable. It holds for the context of the call: autocast, ``torch.no_grad`` and
        ``torch.func`` transforms count.

    Raises:
        What the call itself refuses.
    """
    call = prepare(cell, graphs, inputs, executor)
    return Explanation(type(cell).__name__, repr(graphs), executor, call.executor, call.reason)
