"""weft.VertexFunction and weft.VertexFunctions against their contract, for every executor."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
import weft
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from weft.vertex import function, models

from tests.common import DEVICES, relative_error
from tests.vertex.naive import evaluate

EXECUTORS = ["batched", "reference"]
executors = pytest.mark.parametrize("executor", EXECUTORS)
devices = pytest.mark.parametrize("device", DEVICES)

CHILDREN = [[[], [], [0, 1]], [[]], [[4, 2], [], [1, 1], [], [3, -1]]]
GRAPHS = weft.Graphs.from_children(CHILDREN)
BINARY = weft.Graphs.from_children([[[], [], [0, 1]]])


class Cell(weft.VertexFunction):
    """A vertex function out of a function of (self, v)."""

    def __init__(self, function, state_size=3, **modules):
        super().__init__(state_size)
        self.W, self.function = nn.Linear(3, 3), function
        for name, module in modules.items():
            setattr(self, name, module)

    def vertex(self, v):
        self.function(self, v)


def cell(change=lambda h: h, **modules) -> Cell:
    """A child-sum net with `change(h)` or `change(self, h)` on its state."""

    def vertex(self, v):
        h = torch.tanh(v.pull() + self.W(v.gather_sum()))
        h = change(self, h) if modules else change(h)
        v.scatter(h)
        v.push(h)

    return Cell(vertex, **modules)


def tree_rnn(W, b, change=lambda h: h):
    def step(x, below):
        states = [s for s in below if s is not None]
        h = change(torch.tanh(x + W @ sum(states, torch.zeros_like(b)) + b))
        return h, h

    return step


def rows(graphs=GRAPHS, width=3, **kwargs):
    return torch.randn(graphs.num_vertices, width, **kwargs)


def both(v, h):
    v.scatter(h)
    v.push(h)


# ---- Construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, shape", [(3, (3,)), (0, (0,)), ((2, 3), (2, 3)), ([4], (4,)), ((), ()), (np.int64(5), (5,))]
)
def test_state_size(size, shape):
    assert weft.VertexFunction(size).state_size == shape


@pytest.mark.parametrize("size, error", [(-1, ValueError), ((2, -1), ValueError)] + [
    (size, TypeError) for size in (2.0, "3", None, True, (1.5,), torch.ones(2), {1})
])  # fmt: skip
def test_state_size_refused(size, error):
    with pytest.raises(error, match="state_size"):
        weft.VertexFunction(size)


def test_vertex_is_to_be_overridden():
    with pytest.raises(NotImplementedError):
        weft.VertexFunction(3)(GRAPHS)


# ---- The four operators ----------------------------------------------------------------------------------------------


@executors
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_states_of_any_shape(executor, shape):
    def vertex(self, v):
        x = v.pull()
        both(v, x + 0.5 * v.gather(0) - 0.25 * v.gather(1) + 0.125 * v.gather_sum())

    x = torch.randn(GRAPHS.num_vertices, *shape)

    def step(x, below):
        states = [torch.zeros_like(x) if s is None else s for s in below + [None] * 2]
        h = x + 0.5 * states[0] - 0.25 * states[1] + 0.125 * sum(states)
        return h, h

    out = Cell(vertex, shape)(GRAPHS, x, executor=executor)
    assert relative_error(out, evaluate(step, CHILDREN, x)) < 1e-6


@executors
@pytest.mark.parametrize("shape", [0, (2, 0)])
def test_states_without_numbers(executor, shape):
    def vertex(self, v):
        v.scatter(v.gather_sum())
        v.push(v.pull() + 1)

    x = rows(requires_grad=True)
    out = Cell(vertex, shape)(GRAPHS, x, executor=executor)
    assert torch.equal(out, x + 1)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))


@executors
def test_messages(executor):
    def vertex(self, v):
        x = v.pull()
        total = v.gather_sum(lambda s, a, b: (self.W(s) * a)[:, :2] * b, x, x[:, :1])
        v.scatter(torch.cat((total, x[:, 2:]), 1))
        v.push(total.sum(1))

    m = Cell(vertex).double()
    x = rows(dtype=torch.float64)

    def step(x, below):
        found = [(m.W(s) * x)[:2] * x[0] for s in below if s is not None]
        total = sum(found, torch.zeros(2, dtype=torch.float64))
        return torch.cat((total, x[2:])), total.sum()

    assert relative_error(m(GRAPHS, x, executor=executor), evaluate(step, CHILDREN, x)) < 1e-14


@executors
def test_several_pushes_of_any_dtype_in_any_order(executor):
    def vertex(self, v):
        x = v.pull("x")
        v.push((x > 0).long())
        k = v.pull("k")
        v.push(k + 1)
        v.scatter(x + v.gather(1))
        v.push(v.gather(0)[:, 0])

    inputs = {"x": rows(), "k": torch.arange(GRAPHS.num_vertices, dtype=torch.int32)}
    a, b, c = Cell(vertex)(GRAPHS, inputs, executor=executor)
    assert torch.equal(a, (inputs["x"] > 0).long()) and a.dtype == torch.int64
    assert torch.equal(b, inputs["k"] + 1) and b.dtype == torch.int32
    assert c.shape == (GRAPHS.num_vertices,) and c[0] == 0 and c[2] == inputs["x"][0, 0]


@executors
def test_gather_beyond_all_slots_is_zero(executor):
    m = Cell(lambda self, v: both(v, v.pull() + v.gather(0) + v.gather(1) + v.gather(77)))
    x = rows(BINARY)
    assert torch.equal(m(BINARY, x, executor=executor)[2], x[2] + x[0] + x[1])


@executors
def test_no_state_and_no_input(executor):
    graphs = weft.Graphs.from_children([[[], []]])
    out = Cell(lambda self, v: v.push(v.pull() * 2))(graphs, x := rows(graphs), executor=executor)
    assert torch.equal(out, 2 * x)

    def depth(self, v):
        both(v, torch.maximum(v.gather(0), v.gather(1)) + 1)

    assert Cell(depth, 1).double()(BINARY, executor=executor).tolist() == [[1], [1], [2]]


@executors
def test_in_place_operations_change_nothing_outside(executor):
    def vertex(self, v):
        x = v.pull()
        x.add_(1)
        s = v.gather(0).mul_(2)
        h = torch.tanh(x + s + v.gather(1)) * 1
        v.push(h)
        v.scatter(h)
        h.mul_(3)

    x = rows(BINARY, requires_grad=True)
    before = x.detach().clone()
    out = Cell(vertex)(BINARY, x, executor=executor)
    h = torch.tanh(before + 1)
    want = torch.stack((h[0], h[1], torch.tanh(before[2] + 1 + 2 * h[0] + h[1])))
    assert relative_error(out, want) < 1e-6 and torch.equal(x, before)
    out.sum().backward()
    assert relative_error(x.grad[2], 1 - want[2] ** 2) < 1e-6


@executors
@pytest.mark.parametrize(
    "change",
    [
        lambda h: torch.where(h > 0, h, 0.1 * h),
        lambda h: h.softmax(-1),
        lambda h: torch.cumsum(h, -1),
        lambda h: h.index_select(-1, torch.tensor([2, 0, 1])),
        lambda h: h * torch.tensor([1.0, 2, 3], dtype=torch.float64),
        lambda h: torch.nn.functional.gelu(h).clamp(-0.2, 0.3),
        lambda h: torch.nn.functional.layer_norm(h, (3,)),
        lambda h: torch.stack([r.flip(-1) for r in h.unbind(0)]) if h.dim() == 2 else h.flip(-1),
        lambda h: h.exp().log1p() - h.abs().sqrt() + h.pow(2) / 2 + torch.nn.functional.softplus(h),
        lambda h: h.clone().index_put(((h[..., 0] > 0).nonzero()[:, 0],), h.new_zeros(3)) if h.dim() == 2 else (
            torch.zeros_like(h) if h[0] > 0 else h),
    ],
    ids=range(10),
)  # fmt: skip
def test_any_operation_of_torch(executor, change):
    m = cell(change).double()
    x = rows(dtype=torch.float64, requires_grad=True)
    want = evaluate(tree_rnn(m.W.weight, m.W.bias, change), CHILDREN, x)
    out = m(GRAPHS, x, executor=executor)
    assert relative_error(out, want) < 1e-13
    found, wanted = (torch.autograd.grad(o.sin().sum(), [x, *m.parameters()]) for o in (out, want))
    assert all(relative_error(f, w) < 1e-12 for f, w in zip(found, wanted, strict=True))


@executors
def test_modules_inside(executor):
    class Net(weft.VertexFunction):
        def __init__(self):
            super().__init__(8)
            self.embedding = nn.Embedding(7, 5)
            self.cell = nn.GRUCell(5, 8)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))

        def vertex(self, v):
            h = self.norm(self.cell(self.embedding(v.pull("word")), v.gather_sum()))
            v.scatter(h)
            v.push(self.head(h))

    m = Net().double()
    words = torch.randint(7, (GRAPHS.num_vertices,))

    def step(w, below):
        total = sum([s for s in below if s is not None], torch.zeros(8, dtype=torch.float64))
        h = m.norm(m.cell(m.embedding(w)[None], total[None]))
        return h[0], m.head(h)[0]

    out, want = m(GRAPHS, {"word": words}, executor=executor), evaluate(step, CHILDREN, words)
    assert relative_error(out, want) < 1e-13
    found, wanted = (torch.autograd.grad(o.sin().sum(), list(m.parameters())) for o in (out, want))
    assert all(relative_error(f, w) < 1e-12 for f, w in zip(found, wanted, strict=True))


# ---- Users' autograd functions ---------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Numpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


def partly_without_grad(h):
    with torch.no_grad():
        half = h / 2
    return half + h


@executors
@pytest.mark.parametrize(
    "change",
    [Doubled.apply, Reversal.apply, Numpy.apply, NewStyle.apply, partly_without_grad, lambda h: h + h.detach()],
)
def test_own_backward_is_never_lost(executor, change):
    m = cell(change)
    x = rows(requires_grad=True)
    found, wanted = (
        torch.autograd.grad(out.sum(), [x, *m.parameters()])
        for out in (m(GRAPHS, x, executor=executor), evaluate(tree_rnn(m.W.weight, m.W.bias, change), CHILDREN, x))
    )
    assert all(relative_error(f, w) < 1e-5 for f, w in zip(found, wanted, strict=True))
    if change in (Doubled.apply, Reversal.apply, Numpy.apply, NewStyle.apply):
        assert weft.explain(m, GRAPHS, x, executor=executor).executor == "reference"


# ---- Refusals --------------------------------------------------------------------------------------------------------


def branch(self, v):
    h = v.pull() + v.gather_sum()
    both(v, -h if h.sum() > 0 else h)


FOREIGN = torch.ones(3, requires_grad=True)
FOREIGN_RESULT = FOREIGN * 2


class Scaled(torch.autograd.Function):
    """Of an argument and of what it finds outside."""

    @staticmethod
    def forward(ctx, x, *scale):
        return x * (scale or (FOREIGN,))[0]

    @staticmethod
    def backward(ctx, grad):
        return (grad, *(None for _ in ctx.needs_input_grad[1:]))


def refused(vertex, inputs="default", graphs=GRAPHS, **modules):
    return vertex, inputs, graphs, modules


REFUSALS = {
    "if": (RuntimeError, "torch.where", branch),
    "item": (RuntimeError, "torch.where", lambda s, v: v.push(v.pull() * v.gather_sum().max().item())),
    "float": (RuntimeError, "torch.where", lambda s, v: v.push(v.pull() * float(v.gather_sum().detach().sum()))),
    "tolist": (RuntimeError, "torch.where", lambda s, v: v.push(v.pull() * v.gather_sum().tolist()[0][0])),
    "tolist of a parameter": (RuntimeError, "torch.where", lambda s, v: v.push(v.pull() * s.W.bias.tolist()[0])),
    "numpy": (RuntimeError, "torch.where", lambda s, v: v.push(v.pull() * float(s.W.bias.detach().numpy()[0]))),
    "scatter twice": (RuntimeError, "scatters twice", lambda s, v: (both(v, v.gather_sum()), both(v, v.pull()))),
    "no push": (RuntimeError, "push", lambda s, v: v.scatter(v.pull() + v.gather_sum())),
    "no scatter": (RuntimeError, "scatter", lambda s, v: v.push(v.pull() + v.gather_sum())),
    "shape of scatter": (ValueError, "state_size", lambda s, v: both(v, (v.pull() + v.gather_sum())[:, :2])),
    "rows of scatter": (ValueError, "row", lambda s, v: both(v, (v.pull() + v.gather_sum())[:1])),
    "scalar push": (ValueError, "row", lambda s, v: (v.scatter(v.pull() + v.gather_sum()), v.push(v.pull().sum()))),
    "rows of push": (ValueError, "row", lambda s, v: (v.scatter(v.pull() + v.gather_sum()), v.push(torch.zeros(1, 3)))),
    "push of a number": (TypeError, "tensor", lambda s, v: (v.scatter(v.pull() + v.gather_sum()), v.push(1.0))),
    "scatter of a list": (TypeError, "tensor", lambda s, v: (v.scatter([v.pull() + v.gather_sum()]), v.push(v.pull()))),
    "dtype of scatter": (TypeError, "float64", lambda s, v: both(v, (v.pull() + v.gather_sum()).double())),
    "slot as float": (TypeError, "int", lambda s, v: both(v, v.pull() + v.gather(0.0) + v.gather_sum())),
    "negative slot": (ValueError, "negative", lambda s, v: both(v, v.pull() + v.gather(-1) + v.gather_sum())),
    "foreign": (RuntimeError, "requires grad", lambda s, v: both(v, v.pull() * FOREIGN + v.gather_sum())),
    "foreign result": (RuntimeError, "requires grad", lambda s, v: both(v, v.pull() * FOREIGN_RESULT + v.gather_sum())),
    "foreign argument": (RuntimeError, "requires grad", lambda s, v: both(v, Scaled.apply(v.gather_sum(), FOREIGN))),
    "foreign in a Function": (RuntimeError, "requires grad", lambda s, v: both(v, Scaled.apply(v.gather_sum()))),
    "slot above": (ValueError, "graph 0, vertex 2", lambda s, v: both(v, v.pull() + v.gather(0))),
    "nothing gathered": (ValueError, "graph 0, vertex 2", lambda s, v: v.push(v.pull())),
    "message that pulls": (RuntimeError, "pull", lambda s, v: both(v, v.gather_sum(lambda c: c + v.pull()))),
    "message without rows": (ValueError, "row", lambda s, v: both(v, v.pull() + v.gather_sum(lambda c: c.sum()))),
    "message of a number": (TypeError, "tensor", lambda s, v: both(v, v.pull() + v.gather_sum(lambda c: 1))),
}  # fmt: skip


@executors
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_of_the_function(case, executor):
    error, message, vertex = REFUSALS[case]
    m, x = Cell(vertex), rows()
    for call in (m, weft.explain):
        arguments = (GRAPHS, x) if call is m else (m, GRAPHS, x)
        with pytest.raises(error, match=message) as caught:
            call(*arguments, executor=executor)
        assert "Cell" in str(caught.value)
    if case not in ("slot above", "nothing gathered"):
        with pytest.raises(error, match=message):
            m(weft.Graphs.batch([]), torch.zeros(0, 3), executor=executor)
    m.function = cell().function
    assert m(GRAPHS, x, executor=executor).shape == (GRAPHS.num_vertices, 3)


@executors
def test_errors_of_users_pass(executor):
    class Own(Exception):
        pass

    def raising(self, v):
        raise Own("mine")

    with pytest.raises(Own, match="mine"):
        Cell(raising)(GRAPHS, executor=executor)
    with pytest.raises(StopIteration):
        Cell(lambda self, v: next(iter(())))(GRAPHS, executor=executor)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        cell(lambda h: h @ torch.zeros(7, 3))(GRAPHS, rows(), executor=executor)
    with pytest.raises(IndexError):
        cell(lambda h: h[:, 5])(GRAPHS, rows(), executor=executor)


@executors
@pytest.mark.parametrize("graphs", [GRAPHS, weft.Graphs.batch([])], ids=["some", "none"])
def test_refusals_of_the_call(graphs, executor):
    m, n = cell(), graphs.num_vertices
    x = rows(graphs)
    with pytest.raises(TypeError, match="Graphs"):
        m([[0]], x, executor=executor)
    for wrong in ([1.0], x.tolist() or [0], 3):
        with pytest.raises(TypeError, match="tensor"):
            m(graphs, wrong, executor=executor)
        with pytest.raises(TypeError, match="'input'"):
            m(graphs, {"input": wrong}, executor=executor)
    with pytest.raises(ValueError, match=rf"'input'.*{n}.*{n + 1}"):
        m(graphs, torch.zeros(n + 1, 3), executor=executor)
    with pytest.raises(ValueError, match="'input'"):
        m(graphs, torch.tensor(1.0), executor=executor)
    for missing in (None, {}, {"other": x}):
        with pytest.raises(ValueError, match="'input'"):
            m(graphs, missing, executor=executor)
    with pytest.raises(ValueError, match="'other'"):
        m(graphs, {"input": x, "other": x}, executor=executor)
    with pytest.raises(ValueError, match="executor"):
        m(graphs, x, executor="fast")
    with pytest.raises(NotImplementedError, match="persistent"):
        m(graphs, x, executor="persistent")
    with pytest.raises(RuntimeError, match="different devices"):
        cell().to("meta")(graphs, x, executor=executor)
    assert m(graphs, x, executor=executor).shape == (n, 3)


# ---- Dtypes ----------------------------------------------------------------------------------------------------------


@executors
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@devices
def test_dtypes(executor, dtype, device):
    m = cell().to(device, dtype)
    x = rows(device=device, dtype=dtype)
    out = m(GRAPHS, x, executor=executor)
    assert out.dtype == dtype
    want = evaluate(tree_rnn(m.W.weight.double(), m.W.bias.double()), CHILDREN, x.double())
    assert relative_error(out, want) < 20 * torch.finfo(dtype).eps


@executors
def test_dtype_of_the_state(executor):
    seen = []

    def vertex(self, v):
        s = v.gather_sum()
        seen.append(s.dtype)
        v.scatter(s)
        v.push(v.pull())

    x = rows()
    for make, inputs, want in (
        (lambda m: m.double(), x, torch.float64),
        (lambda m: setattr(m, "W", None), x.half(), torch.float16),
        (lambda m: setattr(m, "W", None), x.long(), torch.float32),
        (lambda m: m.register_buffer("wide", torch.zeros(1).double()), x, torch.float64),
    ):
        m = Cell(vertex)
        make(m)
        m(GRAPHS, inputs, executor=executor)
        assert seen[-1] == want


@executors
@devices
def test_autocast(executor, device):
    def vertex(self, v):
        y = self.W(v.gather_sum())
        h = torch.tanh(v.pull() + y)
        v.scatter(y)
        v.push(h)
        v.push(y)

    m = Cell(vertex).to(device)
    x = rows(device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        h, y = m(GRAPHS, x, executor=executor)
        assert m.W(x).dtype == torch.bfloat16  # no cast of a traced weight is left in autocast's cache
    assert (h.dtype, y.dtype) == (torch.float32, torch.bfloat16)
    exact = m(GRAPHS, x, executor=executor)
    assert exact[1].dtype == torch.float32 and relative_error(h, exact[0]) < 2e-2
    (h.sum() + y.sum()).backward()
    assert m.W.weight.grad.dtype == torch.float32 and x.grad.dtype == torch.float32


# ---- What is read when -----------------------------------------------------------------------------------------------


@executors
def test_everything_counts_as_it_is_at_the_call(executor):
    def vertex(self, v):
        h = self.drop(self.scale * v.pull()) + self.W(v.gather_sum()) + self.offset
        if self.flag is not None:
            h = h * self.flag[0]
        both(v, h)

    m = Cell(vertex, drop=nn.Dropout(0.0))
    m.scale, m.flag, m.offset = 1, None, torch.zeros(3)
    x = rows(BINARY)

    def check():
        def step(x, below):
            s = sum([b for b in below if b is not None], torch.zeros(3))
            factor = 0 if m.training and m.drop.p == 1 else 1
            h = factor * m.scale * x + m.W(s) + m.offset
            h = h if m.flag is None else h * m.flag[0]
            return h, h

        want = evaluate(step, [[[], [], [0, 1]]], x)
        assert relative_error(m(BINARY, x, executor=executor), want) < 1e-6

    check()
    for change in (
        lambda: setattr(m, "scale", 2),
        lambda: setattr(m, "scale", True),
        lambda: setattr(m, "scale", 2.5),
        lambda: setattr(m.drop, "p", 1.0),
        lambda: m.eval(),
        lambda: m.train(),
        lambda: setattr(m.drop, "p", 0.0),
        lambda: setattr(m, "flag", (3.0,)),
        lambda: setattr(m, "flag", (torch.tensor([1.0, 2.0, 3.0]),)),
        lambda: m.flag[0].fill_(7),
        lambda: setattr(m, "flag", (torch.tensor([0.0, 2.0, 3.0]),)),
        lambda: m.offset.add_(1),
        lambda: setattr(m, "offset", torch.ones(3)),
        lambda: m.W.weight.data.mul_(3),
        lambda: setattr(m.W, "weight", nn.Parameter(torch.randn(3, 3))),
        lambda: setattr(m, "W", nn.Linear(3, 3, bias=False)),
    ):
        change()
        check()


@executors
def test_requires_grad_counts_as_it_is(executor):
    m, x = cell(), rows(requires_grad=True)
    m(GRAPHS, x, executor=executor).sum().backward()
    assert m.W.weight.grad is not None and x.grad is not None
    m.W.weight.requires_grad_(False)
    m.zero_grad()
    m(GRAPHS, x.detach(), executor=executor).sum().backward()
    assert m.W.weight.grad is None and m.W.bias.grad is not None
    m.requires_grad_(False)
    assert not m(GRAPHS, x.detach(), executor=executor).requires_grad
    assert m(GRAPHS, x, executor=executor).requires_grad
    with torch.no_grad():
        assert not m(GRAPHS, x, executor=executor).requires_grad
    with torch.inference_mode():
        assert m(GRAPHS, x, executor=executor).is_inference()
    assert m(GRAPHS, x, executor=executor).requires_grad


@executors
def test_hooks_and_parametrizations(executor):
    m, x = cell(), rows()
    before = m(GRAPHS, x, executor=executor)
    handle = m.W.register_forward_hook(lambda module, args, out: out * 2)
    assert not torch.allclose(m(GRAPHS, x, executor=executor), before)
    handle.remove()
    assert torch.equal(m(GRAPHS, x, executor=executor), before)
    nn.utils.parametrizations.weight_norm(m.W)
    out = m(GRAPHS, x, executor=executor)
    assert relative_error(out, before) < 1e-6
    out.sum().backward()
    assert all(p.grad is not None for p in m.parameters())
    m = copy.deepcopy(m)
    with nn.utils.parametrize.cached():
        for _ in range(2):
            assert relative_error(m(GRAPHS, x, executor=executor), before) < 1e-6


@executors
def test_traces_leave_nothing_in_the_module(executor):
    """What old-style hooks make of a weight, and what a vertex function puts into buffers, are real tensors."""

    def vertex(self, v):
        h = torch.tanh(v.pull() + self.W(v.gather_sum()))
        self.drop = self.W.weight * self.steps
        self.steps = self.steps + 1
        both(v, h)

    m, x = Cell(vertex), rows()
    m.register_buffer("steps", torch.zeros(()))
    nn.utils.prune.l1_unstructured(m.W, "weight", 0.5)
    out = m(GRAPHS, x, executor=executor)
    values = [m.W.weight, m.steps, *vars(m).values()]
    assert not any(isinstance(value, FakeTensor) for value in values)
    want = cell()
    want.W.load_state_dict({"weight": m.W.weight_orig * m.W.weight_mask, "bias": m.W.bias})
    assert relative_error(out, want(GRAPHS, x, executor="reference")) < 1e-6


# ---- Autograd --------------------------------------------------------------------------------------------------------

NETS = {
    "treelstm": lambda: models.TreeLSTM(3, 2),
    "childsum": lambda: models.ChildSumTreeLSTM(3, 2),
    "treegru": lambda: models.TreeGRU(3, 2),
}
nets = pytest.mark.parametrize("net", NETS)


@executors
@nets
def test_gradients_of_any_order(net, executor):
    m, x = NETS[net]().double(), rows(dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in m.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(
            m, dict(zip(names, parameters, strict=True)), (GRAPHS, x), {"executor": executor}
        )

    assert gradcheck(call, (x, *m.parameters()))
    assert gradgradcheck(call, (x, *m.parameters()))


@executors
@nets
def test_torch_func_and_forward_mode(net, executor):
    m, x = NETS[net]().double(), rows(dtype=torch.float64, requires_grad=True)
    tangent = torch.randn_like(x)
    parameters = dict(m.named_parameters())

    def loss(p, x):
        return torch.func.functional_call(m, p, (GRAPHS, x), {"executor": executor}).sin().sum()

    wanted = torch.autograd.grad(m(GRAPHS, x, executor=executor).sin().sum(), [*parameters.values(), x])
    found, grad_x = torch.func.grad(loss, (0, 1))(parameters, x)
    assert all(relative_error(f, w) < 1e-12 for f, w in zip([*found.values(), grad_x], wanted, strict=True))
    _, pull_back = torch.func.vjp(lambda x: loss(parameters, x), x)
    assert relative_error(pull_back(torch.ones((), dtype=torch.float64))[0], wanted[-1]) < 1e-12
    _, forward = torch.func.jvp(lambda x: loss(parameters, x), (x,), (tangent,))
    slope = (wanted[-1] * tangent).sum()
    assert abs(forward - slope) < 1e-10
    with forward_ad.dual_level():
        dual = m(GRAPHS, forward_ad.make_dual(x.detach(), tangent), executor=executor).sin().sum()
        assert abs(forward_ad.unpack_dual(dual).tangent - slope) < 1e-10
    # Nothing of the transforms is left behind.
    again = torch.autograd.grad(m(GRAPHS, x, executor=executor).sin().sum(), x)[0]
    assert torch.equal(again, wanted[-1])


@executors
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(executor, reentrant):
    m, x = NETS["treelstm"](), rows(requires_grad=True)
    out = checkpoint(m, GRAPHS, x, executor=executor, use_reentrant=reentrant) if not reentrant else checkpoint(
        lambda x: m(GRAPHS, x, executor=executor), x, use_reentrant=True
    )  # fmt: skip
    out.sin().sum().backward()
    wanted = torch.autograd.grad(m(GRAPHS, x, executor=executor).sin().sum(), [x, *m.parameters()])
    for f, w in zip([x, *m.parameters()], wanted, strict=True):
        assert torch.equal(f.grad, w)


@executors
def test_backward_twice(executor):
    m, x = NETS["treelstm"](), rows(requires_grad=True)
    out = m(GRAPHS, x, executor=executor)
    out.sum().backward(retain_graph=True)
    once = x.grad.clone()
    out.sum().backward()
    assert torch.equal(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@executors
@pytest.mark.parametrize("lazy", [True, False])
def test_what_has_no_gradient_requires_none(executor, lazy):
    def vertex(self, v):
        h = torch.tanh(self.W(v.pull() + v.gather_sum()))
        v.push(v.gather(0))
        v.push(h.detach())
        v.push(torch.zeros_like(h))
        v.push(h)
        v.scatter(h.detach() if self.cut else h)

    m = Cell(vertex)
    for m.cut in (False, True):
        with weft.vertex.options(lazy=lazy):
            outs = m(GRAPHS, rows(), executor=executor)
        assert [o.requires_grad for o in outs] == [not m.cut, False, False, True]


class Several(weft.VertexFunctions):
    """Two functions that share a matrix, a vector and an input."""

    def __init__(self):
        def leaf(self, v):
            both(v, torch.tanh(self.W(v.pull("x")) + v.pull("y") * self.W.bias))

        def inner(self, v):
            both(v, torch.tanh(self.W(v.gather_sum()) * v.pull("x") + self.W.bias))

        shared = nn.Linear(3, 3)
        super().__init__({"leaf": Cell(leaf, W=shared), "inner": Cell(inner, W=shared)})


@executors
@pytest.mark.parametrize("lazy", [True, False])
def test_second_derivatives_of_what_is_used_in_several_places(executor, lazy):
    graphs = GRAPHS.with_types(["inner" if v in GRAPHS.edges[:, 1] else "leaf" for v in range(GRAPHS.num_vertices)])
    m = Several().double()
    x = rows(dtype=torch.float64, requires_grad=True)

    def derivatives(executor):
        out = m(graphs, {"x": x, "y": x}, executor=executor)
        operands = [x, *m.parameters()]
        first = torch.autograd.grad(out.square().sum(), operands, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), operands)]

    with weft.vertex.options(lazy=lazy):
        found = derivatives(executor)
    for a, b in zip(found, derivatives("reference"), strict=True):
        assert relative_error(a, b) < 1e-12


@executors
def test_gradients_of_many_at_once(executor):
    m, x = NETS["treegru"](), rows(requires_grad=True)
    out = m(GRAPHS, x, executor=executor)
    grads = torch.eye(out.numel()).view(-1, *out.shape)
    (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
    for grad, row in zip(grads, found, strict=True):
        assert torch.allclose(row, torch.autograd.grad(out, x, grad, retain_graph=True)[0], atol=1e-6)


@executors
def test_some_outputs_and_unused_inputs(executor):
    def vertex(self, v):
        a, b = v.pull("a"), v.pull("b")
        h = torch.tanh(a + self.W(v.gather_sum()))
        v.scatter(h)
        v.push(h)
        v.push(b * 2)

    m = Cell(vertex)
    a, b = rows(requires_grad=True), rows(requires_grad=True)
    _, second = m(GRAPHS, {"a": a, "b": b}, executor=executor)
    grads = torch.autograd.grad(second.sum(), [a, b, *m.parameters()], allow_unused=True)
    assert torch.equal(grads[1], torch.full_like(b, 2))
    assert all(g is None or not g.any() for g in (grads[0], *grads[2:]))


@executors
def test_changes_in_place_before_backward_are_noticed(executor):
    for change in ("input", "parameter"):
        m, x = cell(lambda h: h * h), rows(requires_grad=True)
        y = x * 1
        out = m(GRAPHS, y, executor=executor)
        want = torch.autograd.grad(out.sum(), [x, m.W.weight], retain_graph=True)
        with torch.no_grad():
            (y if change == "input" else m.W.weight).mul_(2)
        try:
            found = torch.autograd.grad(out.sum(), [x, m.W.weight])
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:  # where a copy was saved
            assert all(torch.equal(f, w) for f, w in zip(found, want, strict=True))


@executors
@devices
def test_empty_batch(executor, device):
    m = cell().to(device)
    x = torch.zeros(0, 3, device=device, requires_grad=True)
    out = m(weft.Graphs.batch([]), x, executor=executor)
    assert out.shape == (0, 3) and out.dtype == torch.float32 and out.device == x.device
    out.sum().backward()
    assert x.grad.shape == (0, 3)
    assert all(p.grad is None or not p.grad.any() for p in m.parameters())


@executors
@pytest.mark.parametrize("net", NETS)
def test_shapes_alone(net, executor):
    m, x = NETS[net]().to("meta"), rows(device="meta", requires_grad=True)
    for graphs in (GRAPHS, GRAPHS.to("meta")):
        out = m(graphs, x, executor=executor)
        assert out.device.type == "meta" and len(out) == GRAPHS.num_vertices
        assert all(g.device.type == "meta" for g in torch.autograd.grad(out.sum(), [x, *m.parameters()]))


@executors
@pytest.mark.parametrize("graphs", [weft.Graphs.chain([3000]), weft.Graphs.from_parents([[3000] * 3000 + [-1]])])
def test_deep_and_wide(executor, graphs):
    m = cell(lambda h: h * 0.5).double()
    x = rows(graphs, dtype=torch.float64, requires_grad=True)
    out = m(graphs, x, executor=executor)
    out[graphs.roots].sum().backward()
    assert torch.isfinite(x.grad).all() and out.shape == (graphs.num_vertices, 3)


# ---- Random numbers, determinism, independence -----------------------------------------------------------------------


@executors
@devices
def test_dropout(executor, device):
    m = cell(lambda self, h: self.drop(torch.ones_like(h)), drop=nn.Dropout(0.5)).to(device)
    graphs = weft.Graphs.from_children([[[]] * 400 + [[0, 1]]])
    x = rows(graphs, device=device, requires_grad=True)
    torch.manual_seed(3)
    first, second = (m(graphs, x, executor=executor) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(m(graphs, x, executor=executor), first)
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0} and abs(first.mean().item() - 1) < 0.2
    assert len(first.unique(dim=0)) == 8  # drawn for each vertex
    y = cell(lambda self, h: self.drop(h), drop=nn.Dropout(0.5)).to(device)(graphs, x, executor=executor)
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g[2:400] == 0, y[2:400] == 0)


@executors
@devices
@nets
def test_bit_equal_repetition(net, executor, device):
    m, x = NETS[net]().to(device), rows(device=device, requires_grad=True)
    runs = []
    for _ in range(3):
        out = m(GRAPHS, x, executor=executor)
        runs.append((out, *torch.autograd.grad(out.sin().sum(), [x, *m.parameters()])))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@executors
@nets
def test_graphs_do_not_see_each_other(net, executor):
    m, x = NETS[net]().double(), rows(dtype=torch.float64)
    whole = m(GRAPHS, x, executor=executor).split([len(c) for c in CHILDREN])
    for children, part, alone in zip(CHILDREN, x.split([len(c) for c in CHILDREN]), whole, strict=True):
        assert relative_error(m(weft.Graphs.from_children([children]), part, executor=executor), alone) < 1e-13


# ---- As a module -----------------------------------------------------------------------------------------------------


@nets
def test_copies_and_pickles(net):
    m, x = NETS[net](), rows()
    keys = list(m.state_dict())
    out = m(GRAPHS, x)
    stored = io.BytesIO()
    torch.save(m, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), torch.load(stored, weights_only=False)):
        with pytest.raises(RuntimeError):
            _ = twin.program
        assert torch.equal(twin(GRAPHS, x), out)
    assert list(m.state_dict()) == keys


def test_calls_leave_nothing_alive():
    m, graphs, x = cell(), weft.Graphs.from_children(CHILDREN), rows()
    m(graphs, x).sum().backward()
    dead = weakref.ref(graphs), weakref.ref(x)
    del graphs, x
    gc.collect()
    assert dead[0]() is None and dead[1]() is None
    dead = weakref.ref(m)
    del m
    gc.collect()
    assert dead() is None


CHANGES = {
    "nothing": (lambda m: None, False),
    "values": (lambda m: m.W.weight.data.mul_(2), False),
    "requires_grad": (lambda m: m.U.weight.requires_grad_(False), True),
    "dtype": (lambda m: m.double(), True),
    "parameter": (lambda m: setattr(m.W, "bias", nn.Parameter(torch.zeros(8))), True),
    "submodule": (lambda m: setattr(m, "W", nn.Linear(3, 8)), True),
    "attribute": (lambda m: setattr(m, "scale", 2.0), True),
    "renamed": (lambda m: m._buffers.update(b=m._buffers.pop("a")), True),
    "eval": (lambda m: m.eval(), True),
    "hook": (lambda m: m.W.register_forward_hook(lambda *_: None), True),
    "tensors in a tuple": (lambda m: setattr(m, "kept", (torch.ones(1),)), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_like_the_one_before_is_known(change, monkeypatch):
    m, x = models.TreeLSTM(3, 2), rows()
    m.register_buffer("a", torch.ones(1))
    m(GRAPHS, x)
    change, noticed = CHANGES[change]
    change(m)
    asked = []
    prepare = function.prepare
    monkeypatch.setattr(function, "prepare", lambda *a: asked.append(a) or prepare(*a))
    x = x.to(m.W.weight.dtype)
    out = m(GRAPHS, x)
    assert bool(asked) == noticed
    assert relative_error(out, m(GRAPHS, x, executor="reference")) < 1e-6
    asked.clear()
    m(GRAPHS, x, executor="reference")
    with torch.no_grad():
        m(GRAPHS, x)
    m(weft.Graphs.from_children(CHILDREN), x)
    assert len(asked) == 3


def counted(monkeypatch) -> list:
    asked, prepare = [], function.prepare
    monkeypatch.setattr(function, "prepare", lambda *a: asked.append(a) or prepare(*a))
    return asked


def test_a_known_call_differs_in_nothing_that_counts(monkeypatch):
    m, x = models.TreeLSTM(3, 2), rows()
    asked = counted(monkeypatch)

    def noticed(call) -> bool:
        m(GRAPHS, x)
        asked.clear()
        call()
        return bool(asked)

    def inside(context):
        with context:
            m(GRAPHS, x)

    assert not noticed(lambda: m(GRAPHS, x))
    assert noticed(lambda: inside(torch.no_grad()))
    assert noticed(lambda: inside(torch.inference_mode()))
    assert noticed(lambda: inside(torch.autocast("cpu", torch.bfloat16)))
    assert noticed(lambda: inside(weft.vertex.options(lazy=False)))
    assert noticed(lambda: inside(weft.vertex.options(fuse=False)))
    assert noticed(lambda: m(GRAPHS, x.clone().requires_grad_()))
    assert noticed(lambda: m(GRAPHS, x, executor="batched"))
    values = {name: p.detach() * 2 for name, p in m.named_parameters()}
    assert noticed(lambda: torch.func.functional_call(m, values, (GRAPHS, x)))


def test_a_copy_that_shares_what_was_compiled_runs_with_its_own_weights():
    m, x = models.TreeLSTM(3, 2), rows()
    m(GRAPHS, x)
    copy = m._replicate_for_data_parallel()
    copy._modules = dict(m._modules, W=nn.Linear(3, 8))
    assert relative_error(copy(GRAPHS, x), copy(GRAPHS, x, executor="reference")) < 1e-6
    assert relative_error(m(GRAPHS, x), m(GRAPHS, x, executor="reference")) < 1e-6


def test_what_changes_while_a_call_is_traced_counts_at_the_next():
    class Late(weft.VertexFunction):
        scale = 1.0

        def vertex(self, v):
            v.push(v.pull() * self.scale)
            self.scale = 3.0

    m, x = Late(1), torch.randn(2, 4)
    leaves = weft.Graphs.from_children([[[]], [[]]])
    m(leaves, x)
    assert m.scale == 3.0
    for _ in range(2):
        assert torch.equal(m(leaves, x), x * 3)


def test_a_known_call_keeps_no_graph_of_parameters():
    """Parameters that functional_call puts in are results of other steps, which end when these are gone."""
    m, x = models.TreeLSTM(3, 2), rows()
    leaf = torch.ones(1, requires_grad=True)
    values = {name: p.detach() * leaf for name, p in m.named_parameters()}
    torch.func.functional_call(m, values, (GRAPHS, x)).sum().backward()
    dead = weakref.ref(values["W.weight"])
    del values
    gc.collect()
    assert dead() is None


@executors
def test_calls_leave_no_cycles(executor):
    """What a step saved is freed with it, not when cycles are collected."""
    m, x = models.TreeLSTM(3, 2), rows(requires_grad=True)
    m(GRAPHS, x, executor=executor).sum().backward()
    gc.collect()
    gc.disable()
    try:
        m(GRAPHS, x, executor=executor).sum().backward()
        assert gc.collect() == 0
    finally:
        gc.enable()


@executors
def test_threads(executor):
    m, x = models.TreeLSTM(3, 2), rows()
    want = m(GRAPHS, x, executor="reference")
    bad = []

    def work(i):
        scale = 1 + i % 2
        for _ in range(10):
            with weft.vertex.options(lazy=bool(i % 2)):
                y = x.clone().requires_grad_(bool(i % 2))
                out = m(GRAPHS, y * scale / scale, executor=executor)
            if relative_error(out, want) > 1e-5:
                bad.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


@executors
def test_torch_compile_breaks_its_graph(executor):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = models.TreeLSTM(3, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.cell(GRAPHS, torch.sin(x), executor=executor))

    m, x = Net(), rows(requires_grad=True)
    compiled = torch.compile(m, backend="eager")
    assert torch.equal(compiled(x), m(x))
    assert torch.equal(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, m)))
    assert torch.equal(torch.compile(m.cell, backend="eager")(GRAPHS, x), m.cell(GRAPHS, x))


def test_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        m, x = models.TreeLSTM(3, 2), rows()
        m(GRAPHS, x)
        parallel = nn.parallel.DistributedDataParallel(m)
        out = parallel(GRAPHS, x)
        out.sum().backward()
        assert torch.equal(out, m(GRAPHS, x)) and all(p.grad is not None for p in m.parameters())
    finally:
        torch.distributed.destroy_process_group()


# ---- CUDA ------------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@nets
def test_runs_batched_on_cuda(net):
    m, x = NETS[net]().cuda(), rows(device="cuda", requires_grad=True)
    assert weft.explain(m, GRAPHS, x).executor == "batched"
    runs = [m(GRAPHS.to(device), x) for device in ("cpu", "cuda")]
    assert torch.equal(*runs)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        aside = m(GRAPHS.to("cuda"), x)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(aside, runs[0])


@pytest.mark.cuda
@executors
def test_graphs_that_go_while_another_stream_reads_them(executor):
    m, x = models.TreeLSTM(3, 2).cuda(), rows(device="cuda")
    wanted = m(GRAPHS, x, executor=executor)
    graphs = weft.Graphs.from_children(CHILDREN)
    m(graphs, x, executor=executor)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        found = m(graphs, x, executor=executor)
    del graphs
    gc.collect()
    taken = [torch.zeros(n, dtype=torch.int64, device="cuda") for n in (8, 64, 512) for _ in range(50)]
    side.synchronize()
    assert torch.equal(found, wanted), len(taken)


@pytest.mark.cuda
@executors
def test_capture_in_a_cuda_graph(executor):
    m, graphs = models.TreeLSTM(3, 2).cuda(), GRAPHS.to("cuda")
    x = rows(device="cuda", requires_grad=True)
    wrt = [x, *m.parameters()]

    def step():
        out = m(graphs, x, executor=executor)
        return out, *torch.autograd.grad(out.sin().sum(), wrt)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(captured, step(), strict=True))


# ---- VertexFunctions -------------------------------------------------------------------------------------------------


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
    found, wanted = (torch.autograd.grad(o.sum(), wrt, materialize_grads=True) for o in (out, want))
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


# ---- Program, explanation, options -----------------------------------------------------------------------------------


def test_program():
    m = models.TreeLSTM(3, 2)
    with pytest.raises(RuntimeError, match="call"):
        _ = m.program
    m(GRAPHS, rows())
    lines = str(m.program).splitlines()
    for op in ("pull", "gather", "scatter", "push", "mm", "sigmoid"):
        assert any(f"{op}(" in line or f".{op}." in line for line in lines), op
    when = {line.split("= ")[-1].split("(")[0]: line.split()[0] for line in lines[1:]}
    assert (when["pull"], when["gather"], when["aten.mm.default"]) == ("before", "in", "in")
    assert "[N, 8]" in next(line for line in lines if "addmm" in line)
    pickle.loads(pickle.dumps(m.program))
    forward, backward = str(m.program).split("TreeLSTM, backward:")
    assert "grad" not in forward
    for line in (
        "gather_grad(0, 2)",
        "pull_grad(%40)",
        "scatter_grad(1, ",
        "push_grad(%10, ",
        "float32[4, 10] = outer(",
    ):
        assert line in backward, line
    with torch.no_grad():
        m(GRAPHS, rows())
    assert m.program.backward is None
    several = models.RvNN(3, 2)
    several(weft.Graphs.from_children([[[]]]).with_types(["leaf"]), rows()[:1])
    assert "_Leaf" in str(several.program) and "_Inner" in str(several.program)


class Called(TorchDispatchMode):
    """The calls of the operator that runs frontiers, and their results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.weft.vertex_frontiers.default:
            self.calls.append((args, results))
        return results


def test_programs_and_schedules_are_plain_data(tmp_path):
    """Written down, and run by a process that has neither the function nor the graphs."""
    with Called() as called:
        for make in NETS.values():
            m = make()
            m(GRAPHS, rows())
            assert type(m.program).loads(m.program.dumps()) == m.program and m.program.backward is not None
    assert len(called.calls) == len(NETS)
    path = str(tmp_path / "calls.pt")
    torch.save(called.calls, path)
    code = (
        "import torch, weft\n"
        f"for args, results in torch.load({path!r}, weights_only=True):\n"
        "    with torch.no_grad(): found = torch.ops.weft.vertex_frontiers(*args)\n"
        "    assert len(found) == len(results) and all(map(torch.equal, found, results))"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_explain():
    m, x = cell(), rows()
    found = weft.explain(m, GRAPHS, x, executor="reference")
    assert (found.executor, found.asked) == ("reference", "reference") and found.reason in str(found)
    found = weft.explain(cell(lambda h: torch.cumsum(h, 1)), GRAPHS, inputs={"input": x})
    assert found.asked == "auto" and found.executor == "reference"
    with pytest.raises(ValueError):
        weft.explain(m, GRAPHS, x, executor="fast")
    with pytest.raises(NotImplementedError):
        weft.explain(m, GRAPHS, x, executor="persistent")


def test_options():
    from weft.vertex.options import Options, current

    assert current() == Options(True, True, True)
    with weft.vertex.options(lazy=False), pytest.raises(KeyError), weft.vertex.options(fuse=False, lazy=None):
        assert current() == Options(False, False, True)
        raise KeyError
    assert current() == Options()
    context = weft.vertex.options(stream=False)
    with context, context:
        assert not current().stream
    assert current() == Options()
    for wrong in (0, 1, "no", 1.0):
        with pytest.raises(TypeError, match="lazy"):
            weft.vertex.options(lazy=wrong)
    with pytest.raises(TypeError):
        weft.vertex.options(False)


@executors
def test_options_change_nothing_but_rounding(executor):
    m, x = models.ChildSumTreeLSTM(3, 2).double(), rows(dtype=torch.float64, requires_grad=True)
    found = []
    for lazy in (True, False):
        for fuse in (True, False):
            with weft.vertex.options(lazy=lazy, fuse=fuse, stream=lazy):
                out = m(GRAPHS, x, executor=executor)
            found.append((out, *torch.autograd.grad(out.sin().sum(), [x, *m.parameters()])))
    for other in found[1:]:
        assert all(relative_error(a, b) < 1e-12 for a, b in zip(found[0], other, strict=True))
