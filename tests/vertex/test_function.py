"""weft.VertexFunction against its contract, for every executor: what a function may say, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
import weft
from torch import nn

from tests.common import relative_error
from tests.vertex.cells import (
    BINARY,
    CHILDREN,
    GRAPHS,
    Cell,
    both,
    cell,
    devices,
    executors,
    rows,
    tree_rnn,
)
from tests.vertex.naive import evaluate

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
def test_a_copy_of_v(executor):
    x = rows(BINARY)
    m = Cell(lambda self, v: both(v, copy.copy(v).pull() + v.gather(0) + v.gather(1)))
    assert torch.equal(m(BINARY, x, executor=executor)[2], x[2] + x[0] + x[1])
    with pytest.raises(AttributeError, match="_nothing"):
        Cell(lambda self, v: copy.copy(v)._nothing)(BINARY, x, executor=executor)


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


def refused(vertex, inputs="default", graphs=GRAPHS, **modules):
    return vertex, inputs, graphs, modules


class Scaled(torch.autograd.Function):
    """Of an argument and of what it finds outside."""

    @staticmethod
    def forward(ctx, x, *scale):
        return x * (scale or (FOREIGN,))[0]

    @staticmethod
    def backward(ctx, grad):
        return (grad, *(None for _ in ctx.needs_input_grad[1:]))


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
