"""Vertex functions: frontier by frontier, in persistent kernels, and whole training steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest import mock

import torch
import weft
from torch import nn
from weft._vertex.calls import prepare
from weft._vertex.runtime import persistent
from weft.vertex import models

from tests.vertex.cells import GatedChain, Gates, Messages, Narrow, Twice, shared_layer, typed
from tests.vertex.naive import random_dag, random_tree

from .common import bfloat16, device, double, half, single, synchronize


def batched() -> None:
    """Every model with slots, sums and types over trees of several batches, executed frontier by frontier, with the
    backward pass; graphs without edges, of one vertex, and deeper than the first, so that memory grows."""
    rng = random.Random(0)

    def tree(leaves: int, arity: int) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in range(leaves)]
        left = list(range(leaves))
        while len(left) > 1:
            rng.shuffle(left)
            below, left = left[:arity], left[arity:]
            children.append(below)
            left.append(len(children) - 1)
        return children

    X, H = 5, 33
    cases = {
        models.TreeLSTM(X, H): 2,
        models.TreeLSTM(X, H, arity=3): 3,
        models.ChildSumTreeLSTM(X, H): 4,
        models.TreeGRU(X, H): 4,
        models.TreeFC(X): 2,
        models.RvNN(X, H): 2,
    }
    for dtype in (single, double):
        for model, arity in cases.items():
            module = model.to(device(), dtype)
            for sizes in ((1,), (5, 1, 9), (40, 3, 17, 1)):
                trees = [tree(n, arity) for n in sizes]
                graphs = weft.Graphs.from_children(trees)
                if isinstance(model, models.RvNN):
                    graphs = graphs.with_types(["inner" if below else "leaf" for each in trees for below in each])
                graphs = graphs.to(device())
                x = torch.randn(graphs.num_vertices, X, device=device(), dtype=dtype, requires_grad=True)
                module(graphs, x, executor="batched").square().sum().backward()
    synchronize()


def full_trees(rng: random.Random, count: int) -> weft.Graphs:
    return weft.Graphs.from_children([random_tree(rng, rng.randint(1, 7)) for _ in range(count)])


def any_graphs(rng: random.Random, count: int) -> weft.Graphs:
    """With missing children, and children of several parents."""
    return weft.Graphs.from_children([random_dag(rng, rng.randint(1, 9), 2) for _ in range(count)])


def chains(rng: random.Random, count: int) -> weft.Graphs:
    return weft.Graphs.chain([rng.randint(1, 6) for _ in range(count)])


def geometries(module: nn.Module, graphs: weft.Graphs, x: torch.Tensor) -> list[int | None]:
    """The parts of the processors that groups of blocks may have; None is what is chosen."""
    if device() != "cuda":
        return [None]
    assert weft.explain(module, graphs, x, executor="persistent").executor == "persistent"
    compiled = prepare(module, graphs, x, "persistent").compiled
    return [g.parts for g in persistent.geometries(compiled, x.device)]


def persistent_kernels() -> None:
    """Scripts with every instruction: of trees, of graphs with gaps and shared children, of chains, typed vertices,
    sums of messages and half types, in every grouping of blocks, and calls of which nobody wants a gradient."""
    rng = random.Random(0)
    cases = [
        (models.TreeLSTM(12, 40), 12, full_trees, single), (models.TreeLSTM(5, 37), 5, any_graphs, single),
        (models.TreeLSTM(8, 64), 8, full_trees, half), (models.TreeLSTM(8, 64), 8, full_trees, bfloat16),
        (models.ChildSumTreeLSTM(12, 48), 12, any_graphs, single), (models.TreeGRU(12, 36), 12, any_graphs, single),
        (models.TreeFC(32), 32, full_trees, single), (models.RvNN(12, 32), 12, full_trees, single),
        (GatedChain(6, 40), 6, chains, single), (Narrow(12, 256, 232), 12, any_graphs, single),
        (Messages(6, 24), 6, any_graphs, single), (Twice(3, 20), 3, any_graphs, single),
        (Gates(3, 7), 3, any_graphs, single), (shared_layer(16, 16), 16, any_graphs, single),
    ]  # fmt: skip
    for model, width, make, dtype in cases:
        module = model.to(device(), dtype)
        for count in (1, 3, 40):
            graphs = typed(make(rng, count), module).to(device())
            x = torch.randn(graphs.num_vertices, width, device=device()).to(dtype).requires_grad_()
            for parts in geometries(module, graphs, x):
                (y,) = prepare(module, graphs, x, "persistent", parts).ready.run()
                y.float().square().sum().backward()
            with torch.no_grad():
                module(graphs, x, executor="persistent")
            synchronize()


def optimizers(parameters: list[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    yield torch.optim.SGD(parameters, 0.05)
    yield torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True)
    yield torch.optim.Adam(parameters, 0.01, weight_decay=0.1)
    yield torch.optim.AdamW(parameters, 0.01)


def in_every_geometry(trainer: weft.vertex.Trainer, batch: tuple) -> None:
    """A step in each grouping of blocks that fits."""
    chosen, known = persistent.geometry, []

    def take(compiled, graphs, device, form=None):
        if form is None:
            return chosen(compiled, graphs, device)
        known[:] = persistent.geometries(compiled, device, form)
        return known[min(turn, len(known) - 1)]

    with mock.patch.object(persistent, "geometry", take):
        for turn in range(4):
            trainer.step(*batch)
            trainer.sync()
            if turn + 1 >= len(known):
                break


def trainer() -> None:
    """Whole steps in one kernel: both losses, with a head and without, of all vertices and of roots, with classes that
    do not count and such that are out of range, in batches of changing sizes."""
    rng = random.Random(0)
    C = 5
    cases = [
        (models.TreeLSTM(12, 40), 12, 40, full_trees, "cross_entropy", True, "vertices"),
        (models.TreeLSTM(96, 96), 96, 96, full_trees, "mse", False, "roots"),
        (models.ChildSumTreeLSTM(12, 48), 12, 48, any_graphs, "mse", True, "roots"),
        (models.RvNN(12, 32), 12, 32, full_trees, "cross_entropy", True, "roots"),
        (Narrow(12, 256, 232), 12, 256, any_graphs, "cross_entropy", False, "vertices"),
        (Messages(6, 24), 6, 24, any_graphs, "cross_entropy", True, "vertices"),
        (models.BiLSTMTagger(4, 12, C, 4), 4, C, None, "cross_entropy", False, "vertices"),
    ]
    for model, width, pushed, make, loss, with_head, at in cases:
        cell, head = model.to(device()), nn.Linear(pushed, C, device=device()) if with_head else None
        classes = C if with_head else pushed

        def batch(count: int) -> tuple[weft.Graphs, torch.Tensor, torch.Tensor]:
            graphs = cell.graphs([2] * count) if make is None else typed(make(rng, count), cell)  # noqa: B023
            n = graphs.num_graphs if at == "roots" else graphs.num_vertices  # noqa: B023
            targets = torch.randn(n, classes) if loss == "mse" else torch.randint(classes, (n,))  # noqa: B023
            x = torch.randn(graphs.num_vertices, width)  # noqa: B023
            return graphs.to(device()), x.to(device()), targets.to(device())

        for optimizer in optimizers([*cell.parameters(), *(head.parameters() if head else ())]):
            steps = weft.vertex.Trainer(cell, optimizer, loss, head=head, at=at, executor="persistent")
            for count in (1, 3, 20):
                graphs, x, targets = batch(count)
                steps.step(graphs, x, targets)
                if device() == "cuda":
                    assert weft.explain(steps, graphs, x).one_kernel
            steps.sync()
            in_every_geometry(steps, batch(30))
        if loss == "cross_entropy":
            graphs, x, targets = batch(4)
            targets[:2] = steps.ignore_index
            steps.step(graphs, x, targets)
            steps.sync()
            targets[-1] = classes
            try:
                steps.step(graphs, x, targets)
                steps.sync()
            except IndexError:
                continue
            raise AssertionError("a class out of range was not refused")
    synchronize()


PARTS = {"batched": batched, "persistent": persistent_kernels, "trainer": trainer}
