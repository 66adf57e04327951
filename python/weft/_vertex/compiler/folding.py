"""Fewer launches and less memory per frontier: what a compiled program need not do. Numbers alone, free of torch.

A frontier is one launch after the other, so for small batches launches are what it costs. After these passes a binary
Tree-LSTM has two a frontier each way, a product and a kernel; a child-sum Tree-LSTM has four, two of each.
"""

from __future__ import annotations

from .kernels import ACCESS, OPS, STORES, Compiled, Kernel, Product

__all__ = ["fold_gathers", "leave_out_leaves", "postpone"]

_LOAD, _STORE, _SCATTER, _USES = (OPS.index(op) for op in ("load", "store", "scatter", "uses"))
_WRITES = tuple(OPS.index(op) for op in STORES)
_END = OPS.index("end")


def fold_gathers(compiled: Compiled) -> None:
    """Copies of gathered columns, made for a product to read, become stores of the kernel that makes the columns: each
    vertex writes its state where its parents' product looks for it, which is gather turned round (Cavs, section 3.5).
    """
    if compiled.functions > 1:
        # A vertex does not know which function its parent runs.
        return
    made = _state_stores(compiled)
    for kernel in [s for s in compiled.forward if isinstance(s, Kernel)]:
        kept = []
        loads: dict[int, tuple[int, ...]] = {}
        depth = 0
        for instruction in kernel.code:
            op, result, a, b, c, _ = instruction
            depth += {"begin": 1, "end": -1}.get(OPS[op], 0)
            ours = op == _STORE and depth == 0 and compiled.buffers[b].space in ("rows", "edges")
            source = loads.get(a) if ours else None
            parts = None if source is None else _covering(made, source[3], kernel.width)
            if parts is None:
                kept.append(instruction)
            else:
                column = source[5] // 2 if source[4] == ACCESS.index("gather") else -1
                for maker, register, first in parts:
                    maker.code.append((_SCATTER, -1, register, b, c + first - source[3], column))
                compiled.buffers[b].scattered = True
            if op not in _WRITES and op != _END:
                loads.pop(result, None)
                if _copies(compiled, instruction):
                    loads[result] = instruction
        kernel.code = _live(kept)
    compiled.forward = [s for s in compiled.forward if isinstance(s, Product) or s.code]


def _state_stores(compiled: Compiled) -> list[tuple[int, int, Kernel, int]]:
    """Columns of the state: first, width, the kernel that stores them and from which register."""
    found = []
    for kernel in compiled.forward:
        if isinstance(kernel, Kernel) and kernel.domain == "N" and not kernel.reduces:
            for op, _, a, b, c, _ in kernel.code:
                if op == _STORE and b == compiled.state:
                    found.append((c, kernel.width, kernel, a))
    return sorted(found, key=lambda store: store[0])


def _covering(made, first: int, width: int) -> list[tuple[Kernel, int, int]] | None:
    """Stores that together are these columns of the state, or None."""
    parts, at = [], first
    for c, w, kernel, register in made:
        if c == at and at + w <= first + width:
            parts.append((kernel, register, c))
            at += w
    return parts if at == first + width else None


def _copies(compiled: Compiled, instruction: tuple[int, ...]) -> bool:
    """Whether an instruction loads columns of a child."""
    op, _, a, _, c, d = instruction
    return op == _LOAD and a == compiled.state and ACCESS[c] in ("gather", "child") and d % 2 == 0


def _live(code: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The code without loads that nothing reads any more."""
    kept: list[tuple[int, ...]] = []
    read: set[int] = set()
    for instruction in reversed(code):
        op, result, a, b, c, _ = instruction
        if op == _LOAD and result not in read:
            continue
        kept.append(instruction)
        name = OPS[op]
        if op in _WRITES:
            read.add(a)
        elif name in ("accumulate", "end"):
            read |= {result, a} if name == "accumulate" else {result}
        elif op == _LOAD:
            read.discard(result)
        elif name not in ("constant", "uses", "begin"):
            read |= {a, b, c}
    return kept[::-1]


def leave_out_leaves(compiled: Compiled) -> None:
    """Buffers that nobody reads at vertices without children, half of all in most graphs, have no rows for them."""
    steps = (*compiled.forward, *compiled.backward)
    products = [s for s in steps if isinstance(s, Product) and s.domain == "N"]
    # The executor knows that these are zero there.
    zero = {s.target for s in compiled.forward if isinstance(s, Product) and s.domain == "N" and s.skips_leaves}
    read = {s.source for s in products if not s.skips_leaves} | {s.target for s in products if not s.skips_leaves}
    read |= {b for _, *both, _, skips in compiled.matrix_gradients for b in both if not skips}
    read |= {buffer for _, _, buffer, _, _ in compiled.vector_gradients} | {compiled.state}
    for step in steps:
        if isinstance(step, Kernel) and step.domain == "N":
            read |= {a for op, _, a, _, c, _ in step.code if op == _LOAD and ACCESS[c] == "row" and a not in zero}
            read |= {b for op, _, _, b, *_ in step.code if op in _WRITES and OPS[op] in ("store_sum", "store_max")}
    for number, buffer in enumerate(compiled.buffers):
        if buffer.space == "rows" and number not in read:
            buffer.space = "inner"


def postpone(compiled: Compiled) -> None:
    """Backward kernels that only write gradients of inputs run once, after the last frontier."""
    for step in compiled.backward:
        if isinstance(step, Kernel) and step.domain == "N":
            written = {b for op, _, _, b, *_ in step.code if op in _WRITES}
            step.late = all(compiled.buffers[b].space == "input_grad" for b in written)
