"""Problems for the frontiers: what models of weft.vertex.models compile to, on random trees."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import weft
from torch import Tensor, nn
from weft._vertex.calls import prepare
from weft._vertex.runtime.schedule import Kind, schedule
from weft.vertex import models

from tests.ops import Op
from tests.vertex.naive import random_tree

X, H = 3, 4
MODELS: dict[str, Callable[[], nn.Module]] = {
    "treelstm": lambda: models.TreeLSTM(X, H),
    "childsum": lambda: models.ChildSumTreeLSTM(X, H),
    "treefc": lambda: models.TreeFC(X),
}


@dataclass(frozen=True)
class Frontiers:
    """A model on `trees` trees; its gradients where `back`."""

    model: str
    trees: int
    back: bool

    def call(self, device: str, dtype: torch.dtype, more: int = 0) -> tuple[tuple, dict]:
        rng, generator = random.Random(self.trees + more), torch.Generator().manual_seed(self.trees + more)
        trees = [random_tree(rng, 2 + rng.randrange(6)) for _ in range(self.trees + more if self.trees else 0)]
        graphs = weft.Graphs.from_children(trees).to(device)
        n = graphs.num_vertices

        def draw(*shape: int) -> Tensor:
            return (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(device, dtype)

        cell = MODELS[self.model]().to(device, dtype)
        one = weft.Graphs.from_children([[[]]])
        call = prepare(cell, one, torch.zeros(1, X, dtype=dtype, device=device, requires_grad=True), "batched")
        compiled, (trace,) = call.compiled, [f.trace for f in call.functions]
        plan = schedule("samples", graphs, (Kind(trace.slots_gathered, trace.takes_all_children),))
        buffers = compiled.plan.frontiers.buffers

        def of(space: str, rows: int) -> list[Tensor]:
            widths = {b.index: b.width for b in buffers if b.space == space}
            return [draw(rows, widths[i]) for i in sorted(widths)]

        symbols = trace.program.symbols
        matrices = [draw(*symbols[s].shape) for _, s in compiled.plan.given.matrices]
        operands = (of("input", n), matrices, of("vector", 1))
        shared = (plan.block(graphs.device), plan.block(), compiled.program)
        forward = (*operands, *shared, *plan.sizes)
        if not self.back:
            return forward, {}
        saved = torch.ops.weft.vertex_frontiers(*forward)[len(compiled.plan.outputs) :]
        return (of("output_grad", n), *operands, saved, *shared, *compiled.program.gradients(), True), {}

    def __str__(self) -> str:
        return f"{self.model}-{self.trees}"


OPS = [
    Op(
        f"vertex_frontiers{'_backward' if back else ''}",
        *([Frontiers(model, trees, back) for model in MODELS] for trees in (4, 40, 0)),
        # A gradient has the dtype of what it is the gradient of.
        results=(lambda sample, found: [t.to(torch.promote_types(t.dtype, torch.float32)) for t in found])
        if back
        else (lambda sample, found: found),
        differentiable=False,
        vmap=False,
        autocast=lambda sample, device, operands: torch.float32,
    )
    for back in (False, True)
]
