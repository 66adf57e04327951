"""What is the batched executor's own: half types, launches of a frontier, gradients in pieces, its operators."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import weft
from torch import nn
from weft._vertex.calls import prepare
from weft._vertex.compiler.steps import Product
from weft.vertex import models

from tests.common import DEVICES, relative_error
from tests.vertex.naive import random_dag, random_tree
from tests.vertex.samples import OPS

X, H = 6, 8
MODELS = {
    "treelstm": lambda: models.TreeLSTM(X, H),
    "childsum": lambda: models.ChildSumTreeLSTM(X, H),
    "treegru": lambda: models.TreeGRU(X, H),
    "treefc": lambda: models.TreeFC(X),
    "rvnn": lambda: models.RvNN(X, H),
}
# Relative error of the norm: some ten roundings of what is stored, each at most half a unit in the last place.
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def some_graphs(name: str) -> weft.Graphs:
    rng = random.Random(2)
    children = [random_tree(rng, 9), random_dag(rng, 7, 2), random_tree(rng, 4), [[]]]
    graphs = weft.Graphs.from_children(children)
    return (
        graphs.with_types(["inner" if below else "leaf" for g in children for below in g]) if name == "rvnn" else graphs
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True], ids=["parameters", "autocast"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_half_types(name, dtype, autocast, device):
    """Beside fp64 on the same, rounded, parameters: not worse than the reference with its rounding of everything."""
    torch.manual_seed(1)
    cell = MODELS[name]().to(device)
    graphs = some_graphs(name).to(device)
    x = torch.randn(graphs.num_vertices, X, device=device)
    if not autocast:
        cell, x = cell.to(dtype), x.to(dtype)
    exact, exact_x = copy.deepcopy(cell).double(), x.double().requires_grad_()
    x.requires_grad_()
    with torch.autocast(device, dtype, enabled=autocast):
        assert weft.explain(cell, graphs, x, executor="batched").executor == "batched"
        out = cell(graphs, x, executor="batched")
        plain = cell(graphs, x, executor="reference")
    want = exact(graphs, exact_x, executor="reference")
    grad = torch.randn_like(want)
    assert out.dtype == plain.dtype
    found = [out, *torch.autograd.grad(out, [x, *cell.parameters()], grad.to(out.dtype))]
    expected = [want, *torch.autograd.grad(want, [exact_x, *exact.parameters()], grad)]
    leaves = [plain, x, *cell.parameters()]
    for f, e, like in zip(found, expected, leaves, strict=True):
        assert f.dtype == like.dtype
        assert relative_error(f, e) <= BOUNDS[dtype]


class Rounds(weft.VertexFunction):
    """Casts of the user's own: what is narrowed is rounded, whatever registers hold."""

    def __init__(self):
        super().__init__(state_size=X)

    def vertex(self, v):
        h = (v.pull().half().float() + v.gather_sum().to(torch.bfloat16)) * 0.5
        v.scatter(h)
        v.push(h)


@pytest.mark.parametrize("device", DEVICES)
def test_casts_round(device):
    graphs = some_graphs("").to(device)
    x = torch.randn(graphs.num_vertices, X, device=device)
    cell = Rounds()
    assert weft.explain(cell, graphs, x).executor != "reference"
    assert relative_error(cell(graphs, x), cell(graphs, x, executor="reference")) < 1e-6


@pytest.mark.parametrize(("name", "forward", "backward"), [("treelstm", 2, 2), ("treefc", 2, 2), ("childsum", 4, 4)])
def test_launches_of_a_frontier(name, forward, backward):
    """Gathers are folded into the kernels of the children; nobody waits for gradients of inputs."""
    graphs = some_graphs(name)
    x = torch.randn(graphs.num_vertices, X, requires_grad=True)
    program = prepare(MODELS[name](), graphs, x, "batched").compiled.plan.frontiers
    assert len(program.forward) == forward
    assert len([s for s in program.backward if s.when == "frontiers"]) == backward
    with weft.vertex.options(fuse=False):
        apart = prepare(MODELS[name](), graphs, x, "batched").compiled.plan.frontiers
    assert len(apart.forward) > forward and len(apart.backward) > backward


def test_what_nobody_reads_has_no_rows():
    """Of a Tree-LSTM's buffers only the state has rows for vertices without children."""
    graphs = some_graphs("treelstm")
    x = torch.randn(graphs.num_vertices, X, requires_grad=True)
    program = prepare(MODELS["treelstm"](), graphs, x, "batched").compiled.plan.frontiers
    made = {b.space for i, b in enumerate(program.buffers) if i != program.state}
    assert "rows" not in made and "inner" in made
    assert all(s.skips_leaves for s in program.forward if isinstance(s, Product))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", ["treelstm", "childsum", "treefc"])
def test_gradients_of_matrices_in_pieces(name, lazy, device):
    """More rows than a piece has: the same as at once, to rounding, and as the reference."""
    rng = random.Random(5)
    graphs = weft.Graphs.from_children([random_tree(rng, 40) for _ in range(80)]).to(device)
    cell = MODELS[name]().double().to(device)
    x = torch.randn(graphs.num_vertices, X, dtype=torch.float64, device=device)

    def gradients(executor: str = "batched"):
        with weft.vertex.options(lazy=lazy):
            out = cell(graphs, x, executor=executor)
        return torch.autograd.grad(out.sin().sum(), list(cell.parameters()))

    streamed, repeated = gradients(), gradients()
    with weft.vertex.options(stream=False):
        once = gradients()
    for s, r, o, e in zip(streamed, repeated, once, gradients("reference"), strict=True):
        assert torch.equal(s, r)
        assert relative_error(s, o) < 1e-13 and relative_error(s, e) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
def test_in_a_compiled_model(device):
    """torch.compile breaks its graph at the cell, runs it, and goes on."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.cell, self.out = nn.Linear(3, X), models.TreeLSTM(X, H), nn.Linear(H, 2)

        def forward(self, graphs, x):
            return self.out(torch.relu(self.cell(graphs, torch.tanh(self.embed(x)))))

    torch._dynamo.reset()
    model = Model().to(device)
    graphs = some_graphs("treelstm").to(device)
    x = torch.randn(graphs.num_vertices, 3, device=device)
    compiled = torch.compile(model, backend="aot_eager")
    grads = []
    for module in (compiled, model):
        out = module(graphs, x)
        grads.append([out.detach(), *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) < 1e-6
    with torch.no_grad():
        assert relative_error(compiled(graphs, x), model(graphs, x)) < 1e-6


@pytest.mark.parametrize("op", OPS, ids=str)
def test_vmap_is_refused(op):
    args, _ = op.samples[0].call("cpu", torch.float32)
    first = next(i for i, tensors in enumerate(args) if len(tensors))
    mapped = [torch.stack([t, t]) for t in args[first]]

    def call(*tensors):
        return getattr(torch.ops.weft, op.name)(*args[:first], list(tensors), *args[first + 1 :])

    with pytest.raises(RuntimeError, match=f"{op.name}: has no dimension to map"):
        torch.func.vmap(call)(*mapped)


@pytest.mark.parametrize("sample", [s for op in OPS for s in op.samples], ids=str)
def test_operands_of_another_size_are_refused(sample):
    """Each by itself: nothing is read or written beyond it."""
    args, _ = sample.call("cpu", torch.float32)
    op = torch.ops.weft.vertex_frontiers_backward if sample.back else torch.ops.weft.vertex_frontiers
    op(*args)
    for i, tensors in enumerate(args):
        if not isinstance(tensors, list) or not all(isinstance(t, torch.Tensor) for t in tensors):
            continue
        for k, t in enumerate(tensors):
            for smaller in (t[..., :-1], t[..., :0]):
                wrong = [*tensors[:k], smaller, *tensors[k + 1 :]]
                with pytest.raises(ValueError, match=r"vertex_frontiers(_backward)?: .*(must|is not|is \[)"):
                    op(*args[:i], wrong, *args[i + 1 :])
