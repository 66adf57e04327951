"""Vertex functions: frontier by frontier, in persistent kernels, and whole training steps."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
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


def many_rows() -> None:
    """Layers and gradients of so many rows that tensor cores multiply them as float32, with tiles that are not full."""
    module = models.ChainLSTM(132, 128).to(device())
    graphs = weft.Graphs.chain([1] * 3301).to(device())
    x = torch.randn(graphs.num_vertices, 132, device=device(), requires_grad=True)
    module(graphs, x, executor="batched").square().sum().backward()
    synchronize()


def full_trees(rng: random.Random, count: int) -> weft.Graphs:
    return weft.Graphs.from_children([random_tree(rng, rng.randint(1, 7)) for _ in range(count)])


def any_graphs(rng: random.Random, count: int) -> weft.Graphs:
    """With missing children, and children of several parents."""
    return weft.Graphs.from_children([random_dag(rng, rng.randint(1, 9), 2) for _ in range(count)])


def chains(rng: random.Random, count: int) -> weft.Graphs:
    return weft.Graphs.chain([rng.randint(1, 6) for _ in range(count)])


def geometries(module: nn.Module, graphs: weft.Graphs, x: torch.Tensor, every: bool) -> list[int | None]:
    """The parts of the processors that groups of blocks may have, the fewest and the most or all of them; None is what
    is chosen. Kernels are compiled for each."""
    if device() != "cuda":
        return [None]
    assert weft.explain(module, graphs, x, executor="persistent").executor == "persistent"
    compiled = prepare(module, graphs, x, "persistent").compiled
    found = [g.parts for g in persistent.geometries(compiled, x.device)]
    return found if every else list(dict.fromkeys((found[0], found[-1])))


def by_scripts(*cases: tuple) -> None:
    """Vertex functions on few graphs and on many, each grouping of blocks in turn, and without gradients. A function is
    as narrow as can be: it has a block for each column."""
    rng = random.Random(0)
    for i, (model, width, make, dtype) in enumerate(cases):
        print(f"{type(model).__name__}, {dtype}", flush=True)  # where it was, if time runs out
        module = model.to(device(), dtype)
        for count in (1, 12):
            graphs = typed(make(rng, count), module).to(device())
            x = torch.randn(graphs.num_vertices, width, device=device()).to(dtype).requires_grad_()
            for parts in geometries(module, graphs, x, every=i == 0):
                (y,) = prepare(module, graphs, x, "persistent", parts).ready.run()
                y.float().square().sum().backward()
        with torch.no_grad():
            module(graphs, x, executor="persistent")
        synchronize()


def persistent_trees() -> None:
    """Products with their kernels, what other blocks wait for by its values and by signals, types; some groups have
    several columns a block."""
    by_scripts(
        (models.TreeLSTM(4, 12), 4, full_trees, single), (models.TreeLSTM(3, 5), 3, any_graphs, single),
        (models.RvNN(4, 8), 4, full_trees, single),
    )  # fmt: skip


def persistent_edges() -> None:
    """Kernels and products of edges, zeros for children that are not there, and blocks without a column of a kernel."""
    by_scripts(
        (models.ChildSumTreeLSTM(3, 6), 3, any_graphs, single), (Messages(3, 8), 3, any_graphs, single),
        (Twice(3, 8), 3, any_graphs, single), (Narrow(3, 12, 8), 3, any_graphs, single),
    )  # fmt: skip


def persistent_halves() -> None:
    """Half types."""
    by_scripts(
        (models.TreeLSTM(8, 8), 8, full_trees, half), (models.TreeLSTM(8, 16), 8, full_trees, bfloat16),
    )  # fmt: skip


def persistent_chains() -> None:
    """Chains, with rows longer than a warp."""
    by_scripts((GatedChain(40, 8), 40, chains, single))


def persistent_others() -> None:
    """Gates without a gradient and a layer that functions share."""
    by_scripts((Gates(3, 7), 3, any_graphs, single), (shared_layer(4, 4), 4, any_graphs, single))


def optimizers(parameters: list[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    yield torch.optim.SGD(parameters, 0.05)
    yield torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True)
    yield torch.optim.Adam(parameters, 0.01, weight_decay=0.1)
    yield torch.optim.AdamW(parameters, 0.01)


def in_several_geometries(trainer: weft.vertex.Trainer, batch: tuple) -> None:
    """A step in the largest group of blocks that fits, and in the smallest."""
    chosen = persistent.geometry

    def take(place: int, compiled, graphs, device, form=None):
        if form is None:
            return chosen(compiled, graphs, device)
        return persistent.geometries(compiled, device, form)[place]

    for place in (0, -1):
        with mock.patch.object(persistent, "geometry", functools.partial(take, place)):
            trainer.step(*batch)
            trainer.sync()


C = 5  # classes


def trained(turn: int, model: nn.Module, width: int, pushed: int, make: Callable | None, loss: str, with_head: bool,
            at: str) -> None:  # fmt: skip
    """Steps in batches of several sizes and in two groupings of blocks, by one of the optimizers, with a class that
    does not count, and then one that is out of range."""
    print(f"{type(model).__name__}, {loss}", flush=True)  # where it was, if time runs out
    rng = random.Random(0)
    cell, head = model.to(device()), nn.Linear(pushed, C, device=device()) if with_head else None
    classes = C if with_head else pushed

    def batch(count: int) -> tuple[weft.Graphs, torch.Tensor, torch.Tensor]:
        graphs = cell.graphs([2] * count) if make is None else typed(make(rng, count), cell)
        n = graphs.num_graphs if at == "roots" else graphs.num_vertices
        targets = torch.randn(n, classes) if loss == "mse" else torch.randint(classes, (n,))
        x = torch.randn(graphs.num_vertices, width)
        return graphs.to(device()), x.to(device()), targets.to(device())

    optimizer = [*optimizers([*cell.parameters(), *(head.parameters() if head else ())])][turn % 4]
    steps = weft.vertex.Trainer(cell, optimizer, loss, head=head, at=at, executor="persistent")
    for count in (1, 5):
        graphs, x, targets = batch(count)
        steps.step(graphs, x, targets)
        if device() == "cuda":
            assert weft.explain(steps, graphs, x).one_kernel
    steps.sync()
    in_several_geometries(steps, batch(12))
    if loss == "cross_entropy":
        graphs, x, targets = batch(4)
        targets[0] = steps.ignore_index
        steps.step(graphs, x, targets)
        steps.sync()  # a refused step leaves out the rest
        targets[-1] = classes
        try:
            steps.step(graphs, x, targets)
            steps.sync()
        except IndexError:
            pass
        else:
            raise AssertionError("a class out of range was not refused")
    synchronize()


def trainer() -> None:
    """Whole steps in one kernel: both losses, with a head and without, of all vertices and of roots, all optimizers."""
    trained(0, models.TreeLSTM(4, 12), 4, 12, full_trees, "cross_entropy", True, "vertices")
    trained(1, models.TreeLSTM(4, 8), 4, 8, full_trees, "mse", False, "roots")


def trainer_edges() -> None:
    """Gradients of edges' weights, and blocks without a column of a kernel."""
    trained(2, models.ChildSumTreeLSTM(3, 6), 3, 6, any_graphs, "mse", True, "roots")
    trained(3, Narrow(3, 12, 8), 3, 12, any_graphs, "cross_entropy", False, "vertices")


def trainer_types() -> None:
    """Vertices of several types."""
    trained(2, models.RvNN(4, 8), 4, 8, full_trees, "cross_entropy", True, "roots")


def trainer_taggers() -> None:
    """Vertices of several types, some of which alone push."""
    trained(3, models.BiLSTMTagger(4, 4, C, 4), 4, C, None, "cross_entropy", False, "vertices")


PARTS = {
    "batched": batched, "many_rows": many_rows, "persistent_trees": persistent_trees,
    "persistent_edges": persistent_edges, "persistent_halves": persistent_halves,
    "persistent_chains": persistent_chains, "persistent_others": persistent_others, "trainer": trainer,
    "trainer_edges": trainer_edges, "trainer_types": trainer_types, "trainer_taggers": trainer_taggers,
}  # fmt: skip
