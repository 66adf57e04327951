"""The instructions of one kernel, and the registers that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .instructions import Instruction
from .ir import LEAVES, REDUCTIONS, Node
from .steps import Compiled, Kernel

__all__ = ["Memory", "emit"]


class Memory(Protocol):
    """Where the values of a pass lie, as numbers of a program's buffers and tables."""

    function: int
    compiled: Compiled
    stores: Mapping[Node, list[tuple[int, int]]]
    """Where a value goes: buffers and first columns."""
    places: Mapping[Node, tuple[int, int]]
    """Buffer and first column of what is in memory."""
    results: Mapping[Node, int]
    """Buffers of products."""

    def use(self, buffer: int) -> int: ...
    def constant(self, value: float) -> int: ...
    def table(self, span: tuple[int, int]) -> int: ...
    def leaf_buffer(self, leaf: Node) -> int: ...
    def column(self, slot: int) -> int: ...


def emit(memory: Memory, domain: str, width: int, roots: Sequence[Node]) -> Kernel:
    """A kernel that computes `roots`, of this domain and width, and puts them where `memory` wants them."""
    return _Emitter(memory, domain, width, set(roots)).run(roots)


class _Emitter:
    """The instructions of one kernel."""

    def __init__(self, memory: Memory, domain: str, width: int, roots: set[Node]):
        self._m, self._domain, self._width, self._roots = memory, domain, width, roots
        self._code: list[Instruction] = []
        self._registers: dict[tuple[Node, bool], int] = {}
        self._next = 0

    def run(self, roots: Sequence[Node]) -> Kernel:
        stores = {"rowsum": "store_sum", "rowmax": "store_max"}
        registers = [self._value(r.args[0] if r.op in REDUCTIONS else r, in_loop=False) for r in roots]
        # Last, so that no load waits for a store that might be to the same address.
        for root, register in zip(roots, registers, strict=True):
            for buffer, column in self._m.stores[root]:
                self._emit(stores.get(root.op, "store"), operands=(register,), buffer=buffer, column=column)
        kernel = Kernel(self._m.function, self._domain, self._width, roots[0].op in REDUCTIONS)
        kernel.code, kernel.registers = _allocate(self._code)
        return kernel

    def _emit(self, op: str, result: int = -1, **fields) -> None:
        self._code.append(Instruction(op, result, **fields))

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _value(self, node: Node, in_loop: bool) -> int:
        """The register of a node; `in_loop` in the loop over a vertex's children."""
        # Within the loop, what belongs to the vertex was computed before it.
        key = (node, in_loop and node.domain == "E")
        if key in self._registers:
            return self._registers[key]
        register = self._compute(node, in_loop)
        self._registers[key] = register
        return register

    def _compute(self, node: Node, in_loop: bool) -> int:
        base, first = (node.args[0], node.attribute) if node.op == "slice" else (node, 0)
        edges = self._domain == "E" or in_loop
        if node.op == "constant":
            register = self._new()
            self._emit("constant", register, constant=self._m.constant(node.attribute))
            return register
        if base.op == "state_grad" and (node not in self._m.places or node in self._roots):
            register = self._new()
            self._emit("uses", register, table=self._m.table(base.attribute), column=first)
            return register
        if node in self._m.places and node not in self._roots and (node.op != "linear"):
            return self._load(*self._m.places[node], "row", node)
        if base.op in LEAVES:
            return self._load_leaf(base, first, node, parent=False)
        if node.op == "repeat":
            if self._domain == "E":
                return self._through_parent(node.args[0])
            return self._value(node.args[0], in_loop=False)
        if node.op == "sum":
            return self._sum(node)
        assert edges or node.domain != "E", "rows of children are read in a loop over them"
        arguments = [self._value(a, in_loop) for a in node.args]
        if node.op == "stop":
            return arguments[0]
        register = self._new()
        self._emit(node.op, register, operands=tuple(arguments))
        return register

    def _load_leaf(self, leaf: Node, first: int, node: Node, parent: bool) -> int:
        if leaf.op == "gather":
            return self._load(self._m.compiled.state, first, "gather", node, self._m.column(leaf.attribute))
        if leaf.op == "children":
            return self._load(self._m.compiled.state, first, "child", node)
        buffer = self._m.results[leaf] if leaf.op == "linear" else self._m.leaf_buffer(leaf)
        return self._load(buffer, first, "parent" if parent else "row", node)

    def _load(self, buffer: int, column: int, access: str, node: Node, gather: int = -1) -> int:
        register = self._new()
        place = dict(buffer=self._m.use(buffer), column=column, access=access, gather=gather)
        self._emit("load", register, **place, broadcast=node.width == 1 and self._width != 1)
        return register

    def _through_parent(self, x: Node) -> int:
        base, first = (x.args[0], x.attribute) if x.op == "slice" else (x, 0)
        if x in self._m.places:
            return self._load(*self._m.places[x], "parent", x)
        return self._load_leaf(base, first, x, parent=True)

    def _sum(self, node: Node) -> int:
        (body,) = node.args
        for inner in self._outside(body):
            self._value(inner, in_loop=False)
        total = self._new()
        self._emit("begin", total)
        register = self._value(body, in_loop=True)
        self._emit("accumulate", total, operands=(register,))
        self._emit("end", total)
        # A register of the loop is gone after it.
        self._registers = {key: r for key, r in self._registers.items() if not key[1]}
        return total

    def _outside(self, body: Node) -> list[Node]:
        """What the loop reads of the vertex itself."""
        found, stack, seen = [], [body], set()
        while stack:
            node = stack.pop()
            if node.number in seen:
                continue
            seen.add(node.number)
            base = node.args[0] if node.op == "slice" else node
            if node.op == "repeat":
                found.append(node.args[0])
            elif node.domain == "S":
                found.append(node)
            elif base.op not in LEAVES and node not in self._m.places:
                stack.extend(node.args)
        return found


def _reads(i: Instruction) -> tuple[int, ...]:
    """Registers; a sum over children reads its result, too."""
    return (i.result, *i.operands) if i.op in ("accumulate", "end") else i.operands


def _allocate(code: list[Instruction]) -> tuple[list[Instruction], int]:
    """Few registers for many: each is free again after its last use. In a loop, what comes from outside lives on."""
    last: dict[int, int] = {}
    opened, made_at = None, {}
    for i, instruction in enumerate(code):
        op, result = instruction.op, instruction.result
        if op == "begin":
            opened = i
            made_at[result] = i
        elif op not in ("end", "accumulate") and result >= 0:
            made_at.setdefault(result, i)
        for r in _reads(instruction):
            last[r] = i
            if opened is not None and made_at[r] < opened:
                # Until the end of the loop, which is found below.
                last[r] = next(j for j in range(i, len(code)) if code[j].op == "end")
        if op == "end":
            opened = None
    homes: dict[int, int] = {}
    free: list[int] = []
    count = 0
    allocated: list[Instruction] = []
    for i, instruction in enumerate(code):
        op, result = instruction.op, instruction.result
        if result >= 0 and result not in homes:
            if free:
                homes[result] = free.pop()
            else:
                homes[result], count = count, count + 1
        operands = tuple(homes[r] for r in instruction.operands)
        allocated.append(instruction._replace(result=homes.get(result, -1), operands=operands))
        for r in {*_reads(instruction), *([result] if result >= 0 else [])}:
            if last.get(r, i) == i and op != "begin":
                free.append(homes.pop(r))
    return allocated, count
