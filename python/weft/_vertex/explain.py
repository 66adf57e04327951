"""``weft.explain`` of a vertex function: which executor runs, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from .calls import Call, prepare
from .function import VertexFunction, VertexFunctions
from .graphs import Graphs
from .runtime import persistent

__all__ = ["Explanation", "explain", "explanation"]


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
    blocks: int | None = None
    """Of the persistent kernel. This and what follows is None under other executors."""
    group: int | None = None
    """How many of them share one copy of the weights."""
    partitions: tuple[tuple[str, str, int], ...] | None = None
    """Of what stays on the chip of each parameter: its name, where, and bytes. All of it lies in ``"shared"`` memory,
    where its bytes are counted; while frontiers of few rows follow each other, blocks keep theirs in registers, too."""
    registers: int | None = None
    """Of a thread."""
    shared_bytes: int | None = None
    """Of a block."""
    instructions: int | None = None
    """Of the script."""
    waits: int | None = None
    """Of these, those that wait for another block."""
    launches: int | None = None
    """Of kernels, forward and backward."""
    weight_bytes: int | None = None
    """Of parameters, that they read from global memory: once for each copy of the weights."""

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
    return explanation(cell, graphs, prepare(cell, graphs, inputs, executor))


def explanation(cell: VertexFunction | VertexFunctions, graphs: Graphs, call: Call) -> Explanation:
    """What a call that was looked at is going to do."""
    found = Explanation(type(cell).__name__, repr(graphs), call.asked, call.executor, call.reason)
    if call.executor != "persistent" or graphs.num_vertices == 0:
        return found
    shape = persistent.shape(call.ready)
    return replace(found, **vars(shape))
