"""weft.VertexFunctions against its contract, for every executor."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.utils.prune
import weft
from torch import nn
from weft._vertex.calls import prepare
from weft._vertex.runtime.schedule import Kind, planned
from weft.vertex import models

from tests.common import relative_error
from tests.vertex.cells import (
    CHILDREN,
    GRAPHS,
    Cell,
    both,
    cell,
    executors,
    rows,
)
from tests.vertex.naive import evaluate, random_tree


class Leaf(weft.VertexFunction):
    def __init__(self):
        super().__init__(3)
        self.W = nn.Linear(3, 3)

    def vertex(self, v):
        both(v, torch.tanh(self.W(v.pull("word"))))


class Inner(weft.VertexFunction):
    def __init__(self, pushes=True):
        super().__init__(3)
        self.U, self.pushes = nn.Linear(3, 3), pushes

    def vertex(self, v):
        h = torch.tanh(self.U(v.gather_sum()) + v.pull("bias"))
        v.scatter(h)
        if self.pushes:
            v.push(h)


TYPES = ["leaf", "leaf", "inner", "leaf", "inner", "leaf", "other", "leaf", "other"]
TYPED = GRAPHS.with_types(TYPES)


@executors
@pytest.mark.parametrize("pushes", [True, False])
def test_several_functions(executor, pushes):
    inner = Inner(pushes)
    m = weft.VertexFunctions({"leaf": Leaf(), "inner": inner, "other": inner}).double()
    assert sorted(m.state_dict())[:2] == ["inner.U.bias", "inner.U.weight"] and "leaf.W.weight" in m.state_dict()
    leaf = torch.tensor([t == "leaf" for t in TYPES])
    inputs = {name: rows(dtype=torch.float64) for name in ("word", "bias")}
    # Rows that nobody pulls are not read.
    inputs["word"][~leaf] = float("nan")
    inputs["bias"][leaf] = float("nan")
    for x in inputs.values():
        x.requires_grad_()
    numbers = torch.arange(GRAPHS.num_vertices)

    def step(v, below):
        if leaf[v]:
            h = torch.tanh(m["leaf"].W(inputs["word"][v]))
        else:
            total = sum([s for s in below if s is not None], torch.zeros(3, dtype=torch.float64))
            h = torch.tanh(inner.U(total) + inputs["bias"][v])
        return h, h if pushes or leaf[v] else torch.zeros_like(h)

    assert weft.explain(m, TYPED, inputs, executor=executor).executor == executor
    out, want = m(TYPED, inputs, executor=executor), evaluate(step, CHILDREN, numbers)
    assert relative_error(out, want) < 1e-14
    wrt = [*inputs.values(), *m.parameters()]
    for again in (False, True):  # the second time as functions that have gradients, which another pass makes
        found, wanted = (
            torch.autograd.grad(o.sum(), wrt, retain_graph=True, create_graph=again, materialize_grads=True)
            for o in (out, want)
        )
        assert all(relative_error(f, w) < 1e-13 for f, w in zip(found, wanted, strict=True))


@executors
def test_several_functions_refused(executor):
    leaf, inner = Leaf(), Inner()
    for functions, error in (
        ({}, ValueError),
        ([leaf], TypeError),
        ({"leaf": nn.Linear(3, 3)}, TypeError),
        ({3: leaf}, TypeError),
        ({"leaf": leaf, "x": weft.VertexFunction(4)}, ValueError),
    ):
        with pytest.raises(error):
            weft.VertexFunctions(functions)
    m = weft.VertexFunctions({"leaf": leaf, "inner": inner})
    inputs = {"word": rows(), "bias": rows()}
    with pytest.raises(ValueError, match="types"):
        m(GRAPHS, inputs, executor=executor)
    with pytest.raises(ValueError, match=r"graph 2, vertex 2.*'other'"):
        m(TYPED, inputs, executor=executor)
    typed = GRAPHS.with_types(["inner" if t == "other" else t for t in TYPES])
    with pytest.raises(ValueError, match="'bias'"):
        m(typed, {"word": rows()}, executor=executor)
    with pytest.raises(ValueError, match="graph 0, vertex 2"):
        m(GRAPHS.with_types(["leaf"] * 9), inputs, executor=executor)
    assert m(typed, inputs, executor=executor).shape == (9, 3)
    for vertex, message in (
        (lambda s, v: both(v, (v.gather_sum() + 1).double().float()[:, :]) or v.push(v.gather_sum()), "push"),
        (lambda s, v: (v.scatter(v.gather_sum()), v.push(v.gather_sum()[:, :2])), "push"),
        (lambda s, v: (v.scatter(v.gather_sum()), v.push(v.gather_sum().double())), "push"),
    ):
        with pytest.raises(RuntimeError, match=message):
            weft.VertexFunctions({"leaf": leaf, "inner": Cell(vertex)})(typed, {"word": rows()}, executor=executor)
    with pytest.raises(RuntimeError, match="push"):
        weft.VertexFunctions({"inner": Inner(False)})(GRAPHS.with_types(["inner"] * 9), {"bias": rows()})
    empty = weft.Graphs.batch([])
    none = {name: torch.zeros(0, 3) for name in inputs}
    assert m(empty, none, executor=executor).shape == (0, 3)
    with pytest.raises(ValueError, match="'word'"):
        m(empty, {"bias": none["bias"]}, executor=executor)


def test_a_plain_function_ignores_types():
    m, x = cell(), rows()
    assert torch.equal(m(TYPED, x), m(GRAPHS, x))


@executors
def test_default_device(executor):
    """Whatever torch makes by itself is elsewhere: plans and programs are not."""
    typed = GRAPHS.with_types(["a", "b", *["a"] * (GRAPHS.num_vertices - 2)])
    several = weft.VertexFunctions({"a": models.ChildSumTreeLSTM(3, 2), "b": models.ChildSumTreeLSTM(3, 2)})
    x = rows(requires_grad=True)
    for m, graphs in ((models.TreeLSTM(3, 2), GRAPHS), (several, typed)):
        found = []
        for device in ("cpu", "meta"):
            with torch.device(device):
                fresh, again = weft.Graphs.batch([graphs]), copy.deepcopy(m)
                out = again(fresh, x, executor=executor)
                wrt = [x, *again.parameters()]
                found.append([out, *torch.autograd.grad(out.sin().sum(), wrt, materialize_grads=True)])
        assert all(map(torch.equal, *found))
    shallow = weft.Graphs.from_children([[[]], [[]], [[1, 1, 1], []]])
    one_slot = models.ChainLSTM(3, 2)
    with torch.device("meta"), pytest.raises(ValueError, match="graph 2, vertex 0"):
        one_slot(shallow, x[:4], executor=executor)


class Word(weft.VertexFunction):
    """A linear layer of what is pulled, as wide as the other function or not."""

    def __init__(self, W: nn.Linear, H: int):
        super().__init__(H)
        self.W = W

    def vertex(self, v):
        h = torch.tanh(self.W(v.pull()))
        v.scatter(h)
        v.push(h)


class Phrase(weft.VertexFunction):
    """Reads the same layer, the bias alone once more, and its children by slot or by their sum."""

    def __init__(self, W: nn.Linear, H: int, gathers: bool):
        super().__init__(H)
        self.W, self.U, self.gathers = W, nn.Linear(2 * H if gathers else H, H, bias=False), gathers

    def vertex(self, v):
        below = torch.cat((v.gather(0), v.gather(1)), 1) if self.gathers else v.gather_sum()
        h = torch.tanh(self.U(below) * self.W.bias + self.W(v.pull()))
        v.scatter(h)
        v.push(2 * h)


class Silent(weft.VertexFunction):
    """Neither gathers, nor scatters, nor pushes."""

    def vertex(self, v):
        torch.tanh(v.pull())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kinds", ["by level", "all gather", "sums", "mixed"])
@pytest.mark.parametrize("X", [3, 5])
def test_layers_and_gradients_of_several_functions(kinds, X, stream):
    rng, H, dtype = random.Random(3), 3, torch.float64
    children = [random_tree(rng, rng.randrange(2, 40)) for _ in range(120)]
    W = nn.Linear(X, H)
    functions = {"word": Word(W, H), "phrase": Phrase(W, H, kinds != "sums")}
    if kinds == "all gather":
        functions["word"] = Phrase(W, H, True)
    if kinds == "mixed":
        functions["other"] = Phrase(nn.Linear(X, H), H, True)
    m = weft.VertexFunctions(functions).to(dtype)

    def name(below) -> str:
        if kinds == "mixed":
            return rng.choice(["phrase", "other"]) if below else rng.choice(["word", "phrase"])
        return "phrase" if below else "word"

    graphs = weft.Graphs.from_children(children)
    graphs = graphs.with_types([name(below) for tree in children for below in tree])
    x = torch.randn(graphs.num_vertices, X, dtype=dtype, requires_grad=True)
    wrt = [x, *m.parameters()]
    weights = torch.randn(graphs.num_vertices, H, dtype=dtype)

    def gradients(executor):
        with weft.vertex.options(stream=stream):
            out = m(graphs, x, executor=executor)
        first = torch.autograd.grad((out * weights).sum(), wrt, retain_graph=True)
        again = torch.autograd.grad((out * weights).sum(), wrt)
        assert all(map(torch.equal, first, again))
        return out, *first

    for found, want in zip(gradients("batched"), gradients("reference"), strict=True):
        assert relative_error(found, want) < 1e-12
    # What is not asked for is not computed, and changes nothing else.
    W.weight.requires_grad_(False)
    wrt = [p for p in wrt if p is not W.weight]
    for found, want in zip(gradients("batched"), gradients("reference"), strict=True):
        assert relative_error(found, want) < 1e-12


def test_only_the_rows_of_a_function_are_multiplied():
    H, X = 4, 8
    W = nn.Linear(X, H)
    m = weft.VertexFunctions({"word": Word(W, H), "phrase": Phrase(nn.Linear(X, H), H, True)})
    children = [[[], [], [0, 1], [], [2, 3]]] * 3
    types = ["phrase" if below else "word" for tree in children for below in tree]
    graphs = weft.Graphs.from_children(children).with_types(types)
    x = torch.randn(graphs.num_vertices, X, requires_grad=True)
    call = prepare(m, graphs, x, "batched")
    kinds = tuple(Kind(f.trace.slots_gathered, f.trace.takes_all_children) for f in call.functions)
    block = planned(graphs, kinds, {"word": 0, "phrase": 1}).block()
    leaves, inner = 9, 6
    forward = leaves * X * H + inner * (X * H + 2 * H * H)
    program = call.compiled.program
    assert program.multiply_adds(block, None) == forward
    assert program.multiply_adds(block, program.gradients()) == 2 * forward
    assert not any(b.zeros for b in call.compiled.plan.frontiers.buffers)
    assert len(call.compiled.plan.given.layers) == 2


def test_a_function_without_state_or_push_beside_others():
    H, X = 3, 5
    W = nn.Linear(X, H)
    m = weft.VertexFunctions({"word": Word(W, H), "silent": Silent(H), "phrase": Phrase(W, H, True)})
    graphs = weft.Graphs.from_children([[[], [0], [], [1, 2]], [[]]])
    graphs = graphs.with_types(["silent", "phrase", "word", "phrase", "silent"])
    x = torch.randn(5, X, requires_grad=True)
    outs = [m(graphs, x, executor=executor) for executor in ("batched", "reference")]
    silent = [0, 4]
    assert not outs[0][silent].any() and relative_error(*outs) < 1e-6
    grads = [torch.autograd.grad(out.sum(), [x, W.weight]) for out in outs]
    assert not grads[0][0][silent].any()
    assert all(relative_error(found, want) < 1e-5 for found, want in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", ["word", "phrase"])
def test_a_batch_without_a_function(kind):
    W = nn.Linear(5, 3)
    m = weft.VertexFunctions({"word": Word(W, 3), "phrase": Phrase(nn.Linear(5, 3), 3, True)})
    both = weft.Graphs.from_children([[[], [0]]]).with_types(["word", "phrase"])
    wrt = [*m.parameters()]
    torch.autograd.grad(m(both, torch.randn(2, 5), executor="batched").sum(), wrt)
    graphs = weft.Graphs.from_children([[[], []]]).with_types([kind] * 2)
    x = torch.randn(2, 5)
    found, want = (
        torch.autograd.grad(m(graphs, x, executor=executor).sum(), wrt, materialize_grads=True)
        for executor in ("batched", "reference")
    )
    for a, b in zip(found, want, strict=True):
        assert not a.isnan().any() and (a - b).norm() <= 1e-5 * b.norm()
