"""The program of a vertex function: its operations on the rows of symbols, as plain data that knows no torch.

What a trace records, classified for lazy batching (Cavs, section 3.5): an operation runs before the frontiers where it
depends on no gather, after them where no scatter depends on it, and in them otherwise.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Constant", "Operation", "Program", "Programs", "Symbol", "classify"]

_SHOWN = {"children": "gather_children"}
"""What is printed of operations whose name does not say that they gather."""

Size = int | str
"""A number; "N" for the vertices of a task, "E" for their children."""


@dataclass(frozen=True)
class Symbol:
    """A value of the program: rows of vertices ("N" first), rows of children ("E" first), or one for all."""

    shape: tuple[Size, ...]
    dtype: str
    name: str
    """``%3``, or what it is called outside: ``W.weight``."""
    kind: str
    """``row`` or ``child`` by its first size, ``parameter`` for a tensor of the module, ``constant`` for another one,
    ``shared`` for what is computed from these alone."""

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Ref:
    """The symbol of this number, as an argument."""

    symbol: int


@dataclass(frozen=True)
class Constant:
    """An argument that is a number, a text, a dtype, as torch prints it."""

    text: str


Argument = Ref | Constant | tuple
"""Of an operation; a tuple is a list of arguments."""


@dataclass(frozen=True)
class Operation:
    """One line of the program."""

    op: str
    """``pull``, ``pull_edges``, ``gather``, ``children``, ``repeat``, ``sum``, ``scatter``, ``push``, or torch's name,
    ``aten.addmm.default``."""
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...]
    results: tuple[int, ...]
    """Numbers of symbols."""
    when: str = "in"
    """``before``, ``in`` or ``after`` the frontiers."""

    def reads(self) -> list[int]:
        """Numbers of the symbols among the arguments."""
        found: list[int] = []

        def visit(argument: Argument) -> None:
            if isinstance(argument, Ref):
                found.append(argument.symbol)
            elif isinstance(argument, tuple):
                for a in argument:
                    visit(a)

        visit(self.arguments)
        visit(tuple(value for _, value in self.keywords))
        return found


@dataclass(frozen=True)
class Program:
    """The operations of one vertex function, in order."""

    name: str
    symbols: tuple[Symbol, ...]
    operations: tuple[Operation, ...]
    backward: Program | None = None
    """The gradients that the compiler derived, over frontiers in reverse: gather's gradient is a scatter to the child,
    ``scatter_grad``, scatter's a gather from all that use the state, pull's a push and push's a pull."""

    def __str__(self) -> str:
        width = max((len(o.when) for o in self.operations), default=0)
        lines = [f"{self.name}:", *(f"  {o.when:<{width}}  {self._line(o)}" for o in self.operations)]
        return "\n".join(lines if self.backward is None else [*lines, str(self.backward)])

    @functools.cached_property
    def digest(self) -> str:
        """What tells programs apart that run differently."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:32]

    def dumps(self) -> str:
        """The program as JSON; :meth:`loads` reads it."""
        return json.dumps(_plain(self))

    @staticmethod
    def loads(text: str) -> Program:
        """The program that :meth:`dumps` wrote."""
        return _program(json.loads(text))

    def _line(self, o: Operation) -> str:
        arguments = [self._argument(a) for a in o.arguments]
        arguments += [f"{name}={self._argument(a)}" for name, a in o.keywords]
        call = f"{_SHOWN.get(o.op, o.op)}({', '.join(arguments)})"
        if o.results:
            return f"{', '.join(str(self.symbols[r]) for r in o.results)} = {call}"
        return f"{call}  # {', '.join(str(self.symbols[r]) for r in o.reads())}"

    def _argument(self, a: Argument) -> str:
        if isinstance(a, Ref):
            return self.symbols[a.symbol].name
        if isinstance(a, tuple):
            return f"[{', '.join(map(self._argument, a))}]"
        return a.text


def _plain(p: Program) -> dict:
    def argument(a: Argument) -> object:
        return a.symbol if isinstance(a, Ref) else a.text if isinstance(a, Constant) else [argument(x) for x in a]

    return {
        "name": p.name,
        "symbols": [[list(s.shape), s.dtype, s.name, s.kind] for s in p.symbols],
        "operations": [
            [o.op, argument(o.arguments), [[k, argument(v)] for k, v in o.keywords], list(o.results), o.when]
            for o in p.operations
        ],
        "backward": None if p.backward is None else _plain(p.backward),
    }


def _program(data: dict) -> Program:
    def argument(a: object) -> Argument:
        return Ref(a) if isinstance(a, int) else Constant(a) if isinstance(a, str) else tuple(map(argument, a))

    return Program(
        data["name"],
        tuple(Symbol(tuple(shape), *rest) for shape, *rest in data["symbols"]),
        tuple(
            Operation(op, argument(arguments), tuple((k, argument(v)) for k, v in keywords), tuple(results), when)
            for op, arguments, keywords, results, when in data["operations"]
        ),
        None if data["backward"] is None else _program(data["backward"]),
    )


@dataclass(frozen=True)
class Programs:
    """The programs of several vertex functions that run in one graph."""

    programs: tuple[Program, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.programs))


def classify(operations: Sequence[Operation], lazy: bool) -> tuple[Operation, ...]:
    """Say of each operation when it runs."""
    if not lazy:
        return tuple(replace(o, when="in") for o in operations)
    # Rows of children are rows of the frontiers, also where they hold nothing but the parent's.
    from_gather = _reached(operations, lambda o: o.op in ("gather", "children", "repeat", "sum", "pull_edges"))
    to_scatter: set[int] = set()
    needed = []
    for o in reversed(operations):
        if o.op == "scatter" or not to_scatter.isdisjoint(o.results):
            to_scatter.update(o.reads())
            needed.append(o)
    kept = set(map(id, needed))

    def when(o: Operation) -> str:
        depends = not from_gather.isdisjoint((*o.reads(), *o.results))
        if o.op == "scatter":
            return "in"
        return "before" if not depends else "in" if id(o) in kept else "after"

    return tuple(replace(o, when=when(o)) for o in operations)


def _reached(operations: Iterable[Operation], source) -> set[int]:
    """Symbols that depend on the results of the operations for which `source` holds."""
    reached: set[int] = set()
    for o in operations:
        if source(o) or not reached.isdisjoint(o.reads()):
            reached.update(o.results)
    return reached
