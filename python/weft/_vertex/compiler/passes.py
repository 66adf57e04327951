"""Fewer launches and less memory per frontier: what a compiled program need not do. Numbers alone, free of torch.

A frontier is one launch after the other, so for small batches launches are what it costs. After these passes a binary
Tree-LSTM has two a frontier each way, a product and a kernel; a child-sum Tree-LSTM has four, two of each.
"""

from __future__ import annotations

import itertools

from .instructions import STORES, Instruction
from .steps import Compiled, Kernel, Product

__all__ = ["fold_gathers", "leave_out_leaves", "postpone"]


def fold_gathers(compiled: Compiled) -> None:
    """Copies of gathered columns, made for a product to read, become stores of the kernel that makes the columns: each
    vertex writes its state where its parents' product looks for it, which is gather turned round (Cavs, section 3.5).
    """
    made = _state_stores(compiled)
    for kernel in [s for s in compiled.forward if isinstance(s, Kernel)]:
        kept = []
        loads: dict[int, Instruction] = {}
        depth = 0
        for i in kernel.code:
            depth += {"begin": 1, "end": -1}.get(i.op, 0)
            ours = i.op == "store" and depth == 0 and compiled.buffers[i.buffer].space in ("rows", "edges")
            source = loads.get(i.operands[0]) if ours else None
            # A vertex does not know which function its parent runs, but where just one gathers so.
            alone = source is not None and len(compiled.gathered_by[source.gather]) == 1
            parts = [_covering(m, source.column, kernel.width) for m in made] if alone else [None]
            if None in parts:
                kept.append(i)
            else:
                for maker, register, first in itertools.chain(*parts):
                    column = i.column + first - source.column
                    place = dict(buffer=i.buffer, column=column, gather=source.gather)
                    maker.code.append(Instruction("scatter", operands=(register,), **place))
                compiled.buffers[i.buffer].scattered = True
            if i.op not in STORES and i.op != "end":
                loads.pop(i.result, None)
                if _copies(compiled, i):
                    loads[i.result] = i
        kernel.code = kept
    # Only now: a later kernel's copy may have become a scatter of what an earlier one loads.
    for kernel in [s for s in compiled.forward if isinstance(s, Kernel)]:
        kernel.code = _live(kernel.code)
    compiled.forward = [s for s in compiled.forward if isinstance(s, Product) or s.code]


def _state_stores(compiled: Compiled) -> list[list[tuple[int, int, Kernel, int]]]:
    """Columns of the state, of each function: first, width, the kernel that stores them and from which register."""
    found = [[] for _ in range(compiled.functions)]
    for kernel in compiled.forward:
        if isinstance(kernel, Kernel) and kernel.domain == "N" and not kernel.reduces:
            for i in kernel.code:
                if i.op == "store" and i.buffer == compiled.state:
                    found[kernel.function].append((i.column, kernel.width, kernel, i.operands[0]))
    return [sorted(stores, key=lambda store: store[0]) for stores in found]


def _covering(made, first: int, width: int) -> list[tuple[Kernel, int, int]] | None:
    """Stores that together are these columns of the state, or None."""
    parts, at = [], first
    for c, w, kernel, register in made:
        if c == at and at + w <= first + width:
            parts.append((kernel, register, c))
            at += w
    return parts if at == first + width else None


def _copies(compiled: Compiled, i: Instruction) -> bool:
    """Whether an instruction loads columns of a child."""
    return i.op == "load" and i.buffer == compiled.state and i.access in ("gather", "child") and not i.broadcast


def _live(code: list[Instruction]) -> list[Instruction]:
    """The code without loads that nothing reads any more."""
    kept: list[Instruction] = []
    read: set[int] = set()
    for i in reversed(code):
        if i.op == "load" and i.result not in read:
            continue
        kept.append(i)
        if i.op == "load":
            read.discard(i.result)
        elif i.op in ("accumulate", "end"):
            read.add(i.result)
        read.update(i.operands)
    return kept[::-1]


def leave_out_leaves(compiled: Compiled) -> None:
    """Buffers that nobody reads at vertices without children, half of all in most graphs, have no rows for them."""
    steps = (*compiled.forward, *compiled.backward)
    products = [s for s in steps if isinstance(s, Product) and s.domain == "N"]
    # The executor knows that these are zero there.
    zero = {s.target for s in compiled.forward if isinstance(s, Product) and s.domain == "N" and s.skips_leaves}
    read = {s.source for s in products if not s.skips_leaves} | {s.target for s in products if not s.skips_leaves}
    read |= {b for g in compiled.matrix_gradients for b in (g.source, g.gradient) if not g.skips_leaves}
    read |= {g.buffer for g in compiled.vector_gradients} | {compiled.state}
    for step in steps:
        if isinstance(step, Kernel) and step.domain == "N":
            loads = [i.buffer for i in step.code if i.op == "load" and i.access == "row"]
            read |= {buffer for buffer in loads if buffer not in zero}
            read |= {i.buffer for i in step.code if i.op in ("store_sum", "store_max")}
    for number, buffer in enumerate(compiled.buffers):
        if buffer.space == "rows" and number not in read:
            buffer.space = "inner"


def postpone(compiled: Compiled) -> None:
    """Backward kernels that only write gradients of inputs run once, after the last frontier."""
    for step in compiled.backward:
        here = isinstance(step, Kernel) and step.domain == "N"
        if here and all(compiled.buffers[b].space == "input_grad" for b in step.stores()):
            step.when = "after"
