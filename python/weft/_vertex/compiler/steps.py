"""A compiled vertex function: kernels of instructions on registers, matrix products, and the buffers that they share.

Each frontier runs the steps in order. A kernel computes some columns of some rows: its instructions are element-wise,
loads go through the schedule's arrays (gather), and so do the sums over uses (gather's gradient, which is scatter).
A product multiplies the frontier's rows of one buffer by a matrix into another buffer.

csrc/vertex/program/program.h says the same of what the operators are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

import torch

from .instructions import STORES, Instruction
from .ir import Derivatives

__all__ = ["Buffer", "Compiled", "Dtypes", "Kernel", "MatrixGradient", "Product", "Use", "VectorGradient"]


@dataclass(frozen=True)
class Dtypes:
    """Of what the frontiers read and write. Products compute in the dtype of their matrix with float32 sums, all
    element-wise arithmetic in that of registers."""

    state: str
    inputs: Sequence[str]
    matrices: Sequence[str]
    vectors: Sequence[str]
    outputs: Sequence[str]

    @property
    def registers(self) -> str:
        return "float64" if self.state == "float64" else "float32"


@dataclass
class Buffer:
    """Rows of a space: ``rows``, ``inner`` (of vertices with children) and ``edges`` are made by the executor, in the
    order of the schedule; ``input``, ``output`` and their gradients are the caller's, in his order; a ``vector`` is one
    row for all."""

    space: str
    width: int
    dtype: str
    index: int = 0
    """Which one of the space's, where they are the caller's."""
    backward: bool = False
    """Whether the backward pass makes it."""
    saved: bool = False
    """Whether the forward pass makes it and the backward pass reads it."""
    scattered: bool = False
    """Whether children write it into their parents' rows."""
    zeros: bool = False
    """Whether rows of functions that do not write it are read."""


def _plain(rows: Iterable[tuple]) -> list[tuple]:
    """Named tuples as tuples."""
    return [tuple(row) for row in rows]


@dataclass
class Kernel:
    """Instructions on registers of `width` columns of the frontier's rows or edges."""

    function: int
    domain: str
    width: int
    reduces: bool = False
    """Whether it stores sums over its columns, or their greatest, and nothing else."""
    code: list[Instruction] = field(default_factory=list)
    registers: int = 0
    when: str = "frontiers"
    """Else once for all rows of the function, ``before`` the tasks or ``after`` them."""

    @property
    def edges(self) -> bool:
        return self.domain == "E"

    def buffers(self, tables: Sequence[Sequence[Use]]) -> set[int]:
        """Buffers that it reads or writes."""
        found = {i.buffer for i in self.code if i.op == "load" or i.op in STORES}
        return found.union(use.buffer for i in self.code if i.op == "uses" for use in tables[i.table])

    def stores(self) -> set[int]:
        """Buffers that it writes."""
        return {i.buffer for i in self.code if i.op in STORES}

    def fields(self) -> tuple:
        """As torch.classes.weft.VertexProgram takes it."""
        code = _plain(self.code)
        return (self.when, self.function, self.edges, self.width, self.registers, self.reduces, code), None, None, None


@dataclass
class Product:
    """target = source @ matrix, or @ matrix.T."""

    function: int
    domain: str
    source: int
    matrix: int
    transposed: bool
    target: int
    skips_leaves: bool = False
    """Whether it is zero, or nobody's, on vertices without children."""
    when: str = "frontiers"
    """Else once for all vertices: ``before`` them a linear layer of an input, ``after`` them its gradient."""
    bias: int = -1
    """The buffer of a vector that is added."""

    @property
    def edges(self) -> bool:
        return self.domain == "E"

    def fields(self) -> tuple:
        """As torch.classes.weft.VertexProgram takes it."""
        where = self.source, self.matrix, self.transposed, self.target
        return None, (self.when, self.function, self.edges, *where, self.skips_leaves, self.bias), None, None


class Use(NamedTuple):
    """One term of the gradient of a state: what one use of it adds."""

    column: int
    """Of the schedule, of the gather that uses it; -1 for a sum over children."""
    buffer: int
    first: int
    """Column of the buffer."""
    by_parent: bool
    """Of a sum: whether it is the row of the edge's parent, else of the edge."""


class MatrixGradient(NamedTuple):
    """rows of `source`.T @ rows of `gradient`, of the vertices of a function."""

    function: int
    matrix: int
    source: int
    gradient: int
    """Buffer of the gradient of the product."""
    edges: bool
    skips_leaves: bool
    when: str = "frontiers"
    """As of a product."""

    def fields(self) -> tuple:
        """As torch.classes.weft.VertexProgram takes it."""
        where = self.source, self.matrix, self.gradient
        return None, None, (self.when, self.function, self.edges, *where, self.skips_leaves), None


class VectorGradient(NamedTuple):
    """Columns of a vector: the sum of the rows of columns of a buffer, of the vertices of a function."""

    function: int
    vector: int
    first: int
    buffer: int
    column: int
    width: int

    def fields(self) -> tuple:
        """As torch.classes.weft.VertexProgram takes it."""
        return None, None, None, tuple(self)


@dataclass
class Compiled:
    """The part of one or several vertex functions that runs in the frontiers."""

    functions: int = 1
    fused: bool = True
    """Whether steps may share a kernel."""
    buffers: list[Buffer] = field(default_factory=list)
    constants: list[float] = field(default_factory=list)
    tables: list[list[Use]] = field(default_factory=list)
    """Of ``uses`` instructions."""
    forward: list[Kernel | Product] = field(default_factory=list)
    backward: list[Kernel | Product] = field(default_factory=list)
    layers: list[Kernel | Product] = field(default_factory=list)
    """Before the frontiers."""
    layer_gradients: list[Kernel | Product] = field(default_factory=list)
    """After them, in the backward pass."""
    matrix_gradients: list[MatrixGradient] = field(default_factory=list)
    vector_gradients: list[VectorGradient] = field(default_factory=list)
    state: int = -1
    """The buffer of the states, -1 without."""
    gathered_by: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Functions that gather by a column of the schedule, or for -1 sum over children."""
    derivatives: list[Derivatives] = field(default_factory=list)
    """Of each function, where there is a backward pass."""

    @property
    def most_buffers(self) -> int:
        """Of a kernel."""
        kernels = (s for s in (*self.forward, *self.backward) if isinstance(s, Kernel))
        return max((len(k.buffers(self.tables)) for k in kernels), default=0)

    def program(self) -> torch.ScriptObject:
        """The program as the operators take it, checked."""
        return torch.classes.weft.VertexProgram(*self.fields())

    def passes(self) -> tuple[tuple, tuple]:
        """The steps of the forward and the backward pass; those of one `when` in their order."""
        gradients = *self.matrix_gradients, *self.vector_gradients, *self.layer_gradients
        return (*self.forward, *self.layers), (*self.backward, *gradients)

    def fields(self) -> tuple:
        """What a program is made from: numbers, texts, lists and tuples."""
        forward, backward = self.passes()
        return (
            self.functions,
            self.fused,
            self.state,
            [astuple(b) for b in self.buffers],
            [_plain(table) for table in self.tables],
            self.constants,
            [s.fields() for s in forward],
            [s.fields() for s in backward],
        )
