"""What the compiler hands to who runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..program import Program, Symbol
from ..trace.trace import Trace
from .ir import Graph
from .steps import Compiled

__all__ = ["Given", "Part", "Plan", "Shared"]


@dataclass(frozen=True)
class Part:
    """One vertex function of a plan. Numbers are those of symbols of its trace's program, or of its operations."""

    before: tuple[int, ...]
    """Operations."""
    after: tuple[int, ...]
    pushes: tuple[int, ...]
    """Symbols."""
    outputs: tuple[tuple[int, int], ...]
    """Symbols that leave the frontiers, each with the number of the output."""
    replayed: tuple[int, ...]
    """Operations in the frontiers, for the reference."""
    scattered: int | None
    """Symbol."""

    def direct(self, push: int) -> bool:
        """Whether what is pushed as number `push` comes from the frontiers as it is."""
        return (self.pushes[push], push) in self.outputs


@dataclass(frozen=True)
class Given:
    """What the operators are given, each by function and symbol."""

    inputs: tuple[tuple[int, int], ...]
    matrices: tuple[tuple[int, int], ...]
    vectors: tuple[tuple[int, int], ...]
    matrix_of: tuple[tuple[int, bool], ...]
    """For each matrix of the plan which one is given, and whether it is the transpose of that."""
    vector_of: tuple[int, ...]
    """For each vector of the plan which one is given."""
    layers: Mapping[int, tuple[int, int | None]]
    """Inputs of the plan that linear layers make of what is given for them: numbers of the matrix and of the bias."""

    @property
    def all(self) -> tuple[tuple[int, int], ...]:
        return (*self.inputs, *self.matrices, *self.vectors)


@dataclass(frozen=True)
class Plan:
    """The vertex functions of a graph, compiled. What the frontiers read is named by function and symbol."""

    parts: tuple[Part, ...]
    inputs: tuple[tuple[int, int], ...]
    """(N, ...)."""
    matrices: tuple[tuple[int, int], ...]
    vectors: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    """Numbers of what leaves the frontiers. Those below the number of pushes are pushed as they are."""
    constant: tuple[int, ...]
    """Positions in `outputs` of what has no gradient."""
    given: Given
    frontiers: Compiled
    backward: tuple[Program, ...]
    """The derived program of each function; none where nothing asks for a gradient."""

    def shape(self, number: int, traces: Sequence[Trace]) -> Symbol:
        """A symbol that leaves the frontiers as output `number`."""
        for part, trace in zip(self.parts, traces, strict=True):
            for symbol, n in part.outputs:
                if n == number:
                    return trace.program.symbols[symbol]
        raise KeyError(number)


@dataclass
class Shared:
    """What the functions of a graph have in common."""

    state: int
    dtype: str
    lazy: bool
    early: bool
    """Whether functions that gather nothing run in the frontiers, but for their products."""
    late: bool
    """Whether what no scatter depends on is torch's, after the frontiers, else it runs in them."""
    pushes: int
    graph: Graph = field(default_factory=Graph)
    inputs: list[tuple[int, int]] = field(default_factory=list)
    matrices: list[tuple[int, int]] = field(default_factory=list)
    vectors: list[tuple[int, int]] = field(default_factory=list)
    others: int = 0
    """Outputs that no function pushes as they are."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What goes together: registers are float32 for all but float64."""
        return ("float64",) if self.dtype == "float64" else ("float32", "float16", "bfloat16")
