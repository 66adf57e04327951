"""What the compiler knows: each operation in a compiled cell, beside a plain recursive function per graph."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import weft
from torch import nn
from torch.nn import functional as F
from weft._vertex.compiler.compiler import compile_traces
from weft._vertex.trace.trace import trace
from weft._vertex.vertex import Spec, VertexType
from weft.vertex import models

from tests.common import DEVICES, pairs, relative_error
from tests.vertex.naive import evaluate, random_dag, random_tree, rvnn, tree_lstm

X, H = 5, 6
devices = pytest.mark.parametrize("device", DEVICES)
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


class Cell(weft.VertexFunction):
    """h = tanh(f(self, x, s, c_0, c_1)); s is the sum of the children's states, c_k the one in slot k."""

    def __init__(self, f, H=3, **modules):
        super().__init__(H)
        self.f, self.U = f, nn.Linear(H, H, bias=False)
        self.w = nn.Parameter(torch.randn(H))
        for name, module in modules.items():
            setattr(self, name, module)

    def vertex(self, v):
        h = torch.tanh(self.f(self, v.pull(), v.gather_sum(), v.gather(0), v.gather(1)))
        v.scatter(h)
        v.push(h)

    def step(self, x, below):
        below = [torch.zeros_like(x) if b is None else b for b in below]
        first = [*below, torch.zeros_like(x), torch.zeros_like(x)]
        rows = [t[None] for t in (x, sum(below, torch.zeros_like(x)), *first[:2])]
        h = torch.tanh(self.f(self, *rows))[0]
        return h, h


def compare(m, step, children, x, dtype, device="cpu", typed=lambda graphs: graphs) -> None:
    """Outputs and all gradients of the compiled function and of the recursion, which is computed in fp64."""
    graphs = typed(weft.Graphs.from_children(children))
    m = m.double()
    x64 = x.double().requires_grad_()
    want = evaluate(step, children, x64)
    weights = torch.randn_like(want)
    wrt = [x64, *m.parameters()]
    wanted = torch.autograd.grad((want * weights).sum(), wrt, materialize_grads=True)
    m = m.to(device, dtype)
    y = x.detach().to(device, dtype).requires_grad_()
    explained = weft.explain(m, graphs, y, executor="batched")
    assert explained.executor == "batched", explained.reason
    out = m(graphs, y, executor="batched")
    assert out.dtype == dtype and relative_error(out, want) <= BOUNDS[dtype]
    found = torch.autograd.grad((out * weights.to(device, dtype)).sum(), [y, *m.parameters()], materialize_grads=True)
    for f, w in zip(found, wanted, strict=True):
        assert relative_error(f, w) <= BOUNDS[dtype]


OPERATIONS = {
    "linear": lambda m, x, s, a, b: m.U(s) + x,
    "matmul": lambda m, x, s, a, b: s @ m.U.weight + torch.matmul(a, m.U.weight.T) + x,
    "arithmetic": lambda m, x, s, a, b: (x + a) * 0.5 - b / 3 + 1 / (2 + a * a) - (1 - s) * x,
    "alpha": lambda m, x, s, a, b: torch.add(x, a, alpha=2) - torch.sub(b, s, alpha=0.5) + torch.rsub(a, b, alpha=3),
    "sigmoid": lambda m, x, s, a, b: torch.sigmoid(x + s) * a,
    "tanh": lambda m, x, s, a, b: torch.tanh(x + s) - b.tanh(),
    "relu": lambda m, x, s, a, b: torch.relu(x + s) + F.relu(a - 0.1),
    "softplus": lambda m, x, s, a, b: F.softplus(x + s, beta=2, threshold=3),
    "exp": lambda m, x, s, a, b: torch.exp(a - x) * s,
    "log": lambda m, x, s, a, b: torch.log(a * a + 1) + torch.log1p(b * b) + x + torch.log2(s * s + 1),
    "sqrt": lambda m, x, s, a, b: torch.sqrt(a * a + 1) + torch.rsqrt(b * b + 1) + x + s.square(),
    "pow": lambda m, x, s, a, b: a**2 + b**3 + x + (s * s + 1) ** 0.5 + (a * a + 1) ** -1 + (b * b + 1) ** 1.5,
    "abs": lambda m, x, s, a, b: (x - a).abs() + torch.sign(b + 3) * s,
    "clamp": lambda m, x, s, a, b: torch.clamp(x + a, -0.5, 0.5) + s.clamp(min=0.1) + b.clamp(max=0.2),
    "minmax": lambda m, x, s, a, b: torch.maximum(x, a) - torch.minimum(b, s) + torch.max(a, x),
    "where": lambda m, x, s, a, b: torch.where(a > 0.1, x, s) + torch.where(b <= x, a, 0.0) + (s < 0) * x,
    "logic": lambda m, x, s, a, b: torch.where((a > 0) & ~(b > 0) | (x >= 0), x, s) + torch.where(a != b, x, 1.0),
    "masked_fill": lambda m, x, s, a, b: (x + a).masked_fill(b > 0, 0.5),
    "silu": lambda m, x, s, a, b: F.silu(x + s),
    "gelu": lambda m, x, s, a, b: F.gelu(x + s) + F.gelu(a, approximate="tanh"),
    "elu": lambda m, x, s, a, b: F.elu(x + s) + F.selu(a) + F.celu(b, 0.5),
    "leaky_relu": lambda m, x, s, a, b: F.leaky_relu(x + s, 0.2) + F.relu6(a + 2),
    "hard": lambda m, x, s, a, b: F.hardtanh(x + s) + F.hardtanh(a, -0.2, 0.3),
    "softsign": lambda m, x, s, a, b: F.softsign(x + s) + F.logsigmoid(a) + F.mish(b) + F.tanhshrink(x),
    "prelu": lambda m, x, s, a, b: F.prelu(x + s, m.w[:1]),
    "trigonometry": lambda m, x, s, a, b: torch.sin(x + s) + torch.cos(a) * torch.erf(b),
    "expm1": lambda m, x, s, a, b: torch.expm1(x + s) + torch.exp2(a),
    "lerp": lambda m, x, s, a, b: torch.lerp(x, s, 0.3) + torch.lerp(a, b, torch.sigmoid(x)),
    "addcmul": lambda m, x, s, a, b: torch.addcmul(x, a, b, value=0.5) + torch.addcdiv(s, a, x * x + 1),
    "cat": lambda m, x, s, a, b: torch.cat((a, b), 1)[:, : x.shape[1]] + torch.cat((x, s), -1)[:, x.shape[1] :],
    "stack": lambda m, x, s, a, b: torch.stack((a, b, x), 1).sum(1) + torch.stack((s, x), -1).mean(-1),
    "chunk": lambda m, x, s, a, b: torch.cat(list(reversed((a + x).chunk(2, 1))), 1) + s,
    "split": lambda m, x, s, a, b: torch.cat((a.split(1, 1)[-1], (x + s)[:, 1:]), 1) * b,
    "one_column": lambda m, x, s, a, b: torch.tanh(x[:, -1:] * a) * (x + s).detach() + s * s,
    "slices": lambda m, x, s, a, b: torch.cat((a[:, -1:], (x + s)[..., 1:]), 1) * b.narrow(1, 0, 1),
    "column": lambda m, x, s, a, b: (a[:, :1] + b[:, -1:]) * x + s * s[:, 0].unsqueeze(1) + x[:, 0][:, None],
    "shared": lambda m, x, s, a, b: m.w * (x + s) + a * m.w[0] + b @ m.U.weight.t() + m.w.exp(),
    "constant": lambda m, x, s, a, b: x + s * torch.ones(x.shape[1]).to(x) + torch.zeros_like(a) + b.new_ones(()),
    "sum": lambda m, x, s, a, b: x * a.sum(1, keepdim=True) + (s * b).sum(-1)[:, None],
    "mean": lambda m, x, s, a, b: x - (a + x).mean(1, True) + s.mean(-1, keepdim=True) * b,
    "amax": lambda m, x, s, a, b: x - (a + x).amax(1, True) + s.amin(-1, keepdim=True) * b,
    "variance": lambda m, x, s, a, b: x * (a + x).var(1, correction=0, keepdim=True) + s,
    "norm": lambda m, x, s, a, b: (x + a) / (1 + (x + a).norm(dim=1, keepdim=True)) + F.normalize(s + x, dim=1),
    "softmax": lambda m, x, s, a, b: torch.softmax(a + x, 1) + F.log_softmax(s - x, -1),
    "logsumexp": lambda m, x, s, a, b: x - torch.logsumexp(a + s + x, 1, keepdim=True),
    "layer_norm": lambda m, x, s, a, b: m.norm(x + s) + F.layer_norm(a + x, (x.shape[1],)),
    "rms_norm": lambda m, x, s, a, b: F.rms_norm(x + s, (x.shape[1],), m.w) + a,
    "gru_cell": lambda m, x, s, a, b: m.gru(x, s) + m.bare(x, a),
    "lstm_cell": lambda m, x, s, a, b: torch.mul(*m.lstm(x, (a, s))),
    "rnn_cell": lambda m, x, s, a, b: m.rnn(x, a) + s,
    "sequential": lambda m, x, s, a, b: m.net(s) + x,
    "in_place": lambda m, x, s, a, b: (x + s).mul_(2).add_(a).tanh_(),
    "glu": lambda m, x, s, a, b: F.glu(torch.cat((a, x + s), 1), 1),
    "dropout_in_eval": lambda m, x, s, a, b: F.dropout(x + s, 0.5, training=False) + a,
    "identity": lambda m, x, s, a, b: nn.Identity()(x).clone() + s.contiguous() + a.reshape(-1, 1, a.shape[1])[:, 0],
    "detach": lambda m, x, s, a, b: x + s * a.detach(),
}  # fmt: skip


# torch's own gradients of these know 1/6 to fp32 only.
ROUGH = {"hardsigmoid": lambda m, x, s, a, b: F.hardsigmoid(x + s) + F.hardswish(a)}


def modules_of(name: str, H: int) -> dict[str, nn.Module]:
    return {
        "layer_norm": lambda: {"norm": nn.LayerNorm(H)},
        "gru_cell": lambda: {"gru": nn.GRUCell(H, H), "bare": nn.GRUCell(H, H, bias=False)},
        "lstm_cell": lambda: {"lstm": nn.LSTMCell(H, H)},
        "rnn_cell": lambda: {"rnn": nn.RNNCell(H, H)},
        "sequential": lambda: {"net": nn.Sequential(nn.Linear(H, 5), nn.ELU(), nn.LayerNorm(5), nn.Linear(5, H))},
    }.get(name, dict)()


@devices
@pytest.mark.parametrize("name", [*OPERATIONS, *ROUGH])
def test_operations(name, device):
    torch.manual_seed(0)
    children = [random_dag(random.Random(0), 6, 2), [[], [0, 0]]]
    m = Cell({**OPERATIONS, **ROUGH}[name], 3, **modules_of(name, 3))
    compare(m, m.step, children, torch.randn(8, 3), torch.float32 if name in ROUGH else torch.float64, device)


@pytest.mark.parametrize("f", [F.logsigmoid, lambda x: F.rms_norm(x, (3,))], ids=["logsigmoid", "rms_norm"])
def test_what_cuda_traces_otherwise(f):
    """What torch runs there shows on fake tensors, which need no GPU."""

    def vertex(v):
        h = f(v.pull() + v.gather(0))
        v.scatter(h)
        v.push(h)

    row = Spec((3,), torch.float32)
    found = trace(vertex, VertexType("f", row, {"input": row}, torch.device("cuda")), {}, [3], lambda name: True)
    assert found.obstacle is None
    plan = compile_traces([found], lambda kind, name: True, (3,), "float32", True, True)
    assert plan.parts[0].replayed and plan.backward


class Many(weft.VertexFunction):
    """Reads 90 inputs and 20 matrices in one frontier."""

    def __init__(self):
        super().__init__(state_size=4)
        self.U = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))

    def vertex(self, v):
        below = v.gather_sum()
        h = sum(v.pull(f"x{i}") * below for i in range(90)) + v.pull("x0")
        h = torch.tanh(h + sum(torch.tanh(U(below)) for U in self.U))
        v.scatter(h)
        v.push(h)


@devices
def test_more_buffers_and_matrices_than_a_kernel_once_took(device):
    m = Many().double().to(device)
    graphs = weft.Graphs.from_children([[[], [], [0, 1], [2], [3], [4]]] * 3).to(device)
    inputs = {
        f"x{i}": torch.randn(graphs.num_vertices, 4, dtype=torch.float64, device=device, requires_grad=True)
        for i in range(90)
    }
    assert weft.explain(m, graphs, inputs).executor == "batched"
    wrt = [*inputs.values(), *m.parameters()]
    outs = [m(graphs, inputs, executor=executor) for executor in ("batched", "reference")]
    found, want = (torch.autograd.grad(out.square().sum(), wrt) for out in outs)
    for a, b in zip((outs[0], *found), (outs[1], *want), strict=True):
        assert relative_error(a, b) < 1e-12


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["TreeLSTM", "ChildSumTreeLSTM", "TreeGRU"])
def test_frontiers_of_every_size(name, dtype, device):
    """Few frontiers are large and most are small, which on CUDA share a kernel with products of its own."""
    torch.manual_seed(0)
    rng = random.Random(5)
    large = [random_tree(rng, 60) for _ in range(150 if device == "cuda" else 30)]  # the reference takes a CPU long
    graphs = weft.Graphs.from_children(large + [[[], [], [0, 1]]] * 200).to(device)
    m = getattr(models, name)(20, 32).to(device, dtype)
    exact = getattr(models, name)(20, 32).to(device).double()
    exact.load_state_dict(m.state_dict())
    weights = torch.randn(graphs.num_vertices, 32, device=device, dtype=torch.float64)
    x = torch.randn(graphs.num_vertices, 20, device=device).to(dtype).requires_grad_()
    y = x.detach().double().requires_grad_()
    results = []
    for model, inputs, executor in ((m, x, "batched"), (m, x, "batched"), (exact, y, "reference")):
        out = model(graphs, inputs, executor=executor)
        loss = (out * weights.to(out.dtype)).sum()
        results.append([out, *torch.autograd.grad(loss, [inputs, *model.parameters()])])
    for first, again, want in zip(*results, strict=True):
        assert torch.equal(first, again)
        assert relative_error(first, want) < (1e-5 if dtype == torch.float32 else 5e-2)


SHAPES = {
    "one": [[[]]],
    "level": [[[] for _ in range(20)]],
    "chain": [[[v - 1] if v else [] for v in range(30)]],
    "shared": [[[] if v < 5 else [v % 5, (v * 3) % 5] for v in range(40)]],
    "mixed": [random_dag(random.Random(2), 12, 2), [[]], random_tree(random.Random(3), 7)],
}


@devices
@pairs(H=[1, 3, 17, 33], shape=SHAPES, dtype=[torch.float64, torch.float32])
def test_shapes(H, shape, dtype, device):
    torch.manual_seed(H)

    def f(m, x, s, a, b):
        y = torch.softmax(m.norm(x + m.U(s)), 1) * a[:, :1] + torch.cat(torch.chunk(b + s, 2, 1)[::-1], 1)
        return m.gru(y, s) * (x - a).mean(1, keepdim=True)

    children = SHAPES[shape]
    m = Cell(f, H, norm=nn.LayerNorm(H, eps=1e-3), gru=nn.GRUCell(H, H))
    compare(m, m.step, children, torch.randn(sum(map(len, children)), H), dtype, device)


@pytest.mark.parametrize("arity", range(1, 9))
def test_arities(arity):
    children = [random_dag(random.Random(arity), 15, arity), random_tree(random.Random(arity), 9, max(arity, 2))]
    children[1:] = [] if arity == 1 else children[1:]
    m = models.TreeLSTM(X, H, arity).double()
    x = torch.randn(sum(map(len, children)), X)
    compare(m, tree_lstm(m, H, arity), children, x, torch.float64)


@pytest.mark.parametrize("options", [{"lazy": False}, {"fuse": False}, {"lazy": False, "fuse": False}], ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "softmax", "gru_cell", "column", "logic", "norm", "stack", "in_place"])
def test_operations_under_options(name, options):
    children = [random_dag(random.Random(0), 6, 2)]
    m = Cell(OPERATIONS[name], 3, **modules_of(name, 3))
    with weft.vertex.options(**options):
        compare(m, m.step, children, torch.randn(6, 3), torch.float64)


def test_messages_with_reductions():
    """Rows of children are reduced, too, and attention over any number of them is compiled."""

    class Attention(weft.VertexFunction):
        def __init__(self):
            super().__init__(3)
            self.q, self.k = nn.Linear(3, 3), nn.Linear(3, 3)
            self.norm = nn.LayerNorm(3)

        def vertex(self, v):
            q = self.q(v.pull())

            def message(s, q):
                score = torch.exp((self.k(s) * q).sum(1, keepdim=True))
                return torch.cat((score, score * self.norm(s)), 1)

            found = v.gather_sum(message, q)
            h = torch.tanh(v.pull() + found[:, 1:] / (found[:, :1] + 1))
            v.scatter(h)
            v.push(h)

        def step(self, x, below):
            total = torch.zeros(4, dtype=x.dtype)
            for s in below:
                if s is not None:
                    score = torch.exp((self.k(s) * self.q(x)).sum())
                    total = total + torch.cat((score[None], score * self.norm(s)))
            h = torch.tanh(x + total[1:] / (total[0] + 1))
            return h, h

    m = Attention()
    children = [random_dag(random.Random(5), 14, 5), [[]]]
    compare(m, m.step, children, torch.randn(15, 3), torch.float64)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    "message",
    [lambda s, a: a, lambda s, a: torch.sigmoid(a) * a, lambda s, a: torch.ones_like(s), lambda s, a: a + s],
    ids=["parent", "of parent", "ones", "both"],
)
def test_messages_that_do_not_depend_on_the_child(message, lazy):
    """A sum of them is no sum over vertices."""

    class Model(weft.VertexFunction):
        def __init__(self):
            super().__init__(3)
            self.W = nn.Linear(3, 3)

        def vertex(self, v):
            x = self.W(v.pull())
            found = v.gather_sum(message, x)
            h = torch.tanh(x + found)
            v.scatter(h)
            v.push(h)
            v.push(found)

        def step(self, x, below):
            x = self.W(x)
            found = sum((message(s, x) for s in below if s is not None), torch.zeros_like(x))
            h = torch.tanh(x + found)
            return h, torch.cat((h, found))

    graphs = [[[], [], [0, 1]], [[]], [[4, 2], [], [1, 1], [], [3, -1]]]
    m = Model().double()
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    with weft.vertex.options(lazy=lazy):
        got = torch.cat(m(weft.Graphs.from_children(graphs), x), 1)
    want = evaluate(m.step, graphs, x)
    assert relative_error(got, want) < 1e-12
    grad, operands = torch.randn_like(want), [x, *m.parameters()]
    for a, b in zip(*(torch.autograd.grad(out, operands, grad) for out in (got, want)), strict=True):
        assert relative_error(a, b) < 1e-12


def test_states_of_several_dimensions():
    """Reductions, slices and products over some of a row's dimensions."""

    class Heads(weft.VertexFunction):
        def __init__(self):
            super().__init__((2, 3))
            self.norm, self.scale = nn.LayerNorm(3), nn.Parameter(torch.randn(2, 1))

        def vertex(self, v):
            h = self.forward_rows(v.pull(), v.gather_sum())
            v.scatter(h)
            v.push(h)

        def forward_rows(self, x, s):
            y = self.norm(x.view(-1, 2, 3) + s) * self.scale + s.mean(1, keepdim=True)
            y = y + torch.softmax(s + y, 2) - s.sum((1, 2), keepdim=True) + s.transpose(1, 2).reshape(-1, 2, 3)
            return torch.tanh(torch.cat((y[:, 1:], y[:, :1, :]), 1))

        def step(self, x, below):
            s = sum([b for b in below if b is not None], torch.zeros(2, 3, dtype=x.dtype))
            h = self.forward_rows(x[None], s[None])[0]
            return h, h

    m = Heads()
    children = [random_dag(random.Random(6), 9, 3)]
    compare(m, m.step, children, torch.randn(9, 6), torch.float64)


def rvnn_typed(children):
    return lambda graphs: graphs.with_types(["inner" if below else "leaf" for tree in children for below in tree])


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@devices
def test_untied_leaves(dtype, lazy, device):
    children = [random_tree(random.Random(7), 9), [[]], [[], [], [], [0, 1], [2, 3]]]
    m = models.RvNN(X, H).double()
    with weft.vertex.options(lazy=lazy):
        x = torch.randn(sum(map(len, children)), X)
        compare(m, rvnn(m, H), children, x, dtype, device, rvnn_typed(children))


class Pushing(weft.VertexFunction):
    """Gathers by slot and by message; pushes what is computed after the frontiers, and twice the same."""

    def __init__(self):
        super().__init__(3)
        self.U, self.Q = nn.Linear(6, 3), nn.Linear(3, 3)

    def vertex(self, v):
        total = v.gather_sum(lambda s, y: s * y, v.pull("y"))
        h = torch.sigmoid(self.U(torch.cat((v.gather(0), total), 1)))
        v.scatter(h)
        v.push(torch.tanh(self.Q(h)))
        v.push(h)


class Plain(weft.VertexFunction):
    def __init__(self):
        super().__init__(3)
        self.W = nn.Linear(3, 3)

    def vertex(self, v):
        h = torch.tanh(self.W(v.pull()) + v.gather_sum())
        v.scatter(h)
        v.push(h)
        v.push(self.W(v.pull()))


class Silent(weft.VertexFunction):
    """Hands a state on, without parameters and outputs."""

    def vertex(self, v):
        v.scatter(0.5 * v.gather(1) - v.gather(0).mean(1, keepdim=True))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("lazy", [True, False])
@devices
def test_several_functions(lazy, fuse, device):
    """Three functions that gather differently and push at different times, derivatives of first and second order."""
    rng = random.Random(8)
    graphs = weft.Graphs.from_children([random_dag(rng, 9, 2) for _ in range(3)])
    graphs = graphs.with_types([rng.choice("abc") for _ in range(graphs.num_vertices)])
    m = weft.VertexFunctions({"a": Plain(), "b": Pushing(), "c": Silent(3)}).to(device, torch.float64)
    inputs = {name: torch.randn(27, 3, dtype=torch.float64, device=device) for name in ("input", "y")}
    for x in inputs.values():
        x.requires_grad_()
    wrt = [*inputs.values(), *m.parameters()]
    found = []
    for executor in ("batched", "reference"):
        with weft.vertex.options(lazy=lazy, fuse=fuse):
            assert weft.explain(m, graphs, inputs, executor=executor).executor == executor
            first, second = m(graphs, inputs, executor=executor)
            loss = first.sin().sum() + (second**2).sum()
        plain = torch.autograd.grad(loss, wrt, retain_graph=True)
        grads = torch.autograd.grad(loss, wrt, create_graph=True)
        again = torch.autograd.grad(sum((g**2).sum() for g in grads), wrt)
        found.append((first, second, *plain, *grads, *again))
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) < 1e-10


def test_types_without_a_vertex():
    graphs = weft.Graphs.from_children([[[], []]]).with_types(["leaf", "leaf"])
    m = models.RvNN(X, H)
    out = m(graphs, torch.randn(2, X))
    assert m.program is not None and weft.explain(m, graphs, torch.randn(2, X)).executor == "batched"
    out.sum().backward()
    assert not m["inner"].U.weight.grad.any() and m["leaf"].W.weight.grad.any()


class Drawn(weft.VertexFunction):
    """A function of operations drawn at random."""

    def __init__(self, seed, H):
        super().__init__(H)
        rng = random.Random(seed)
        self.seed, self.names, self.message = (
            seed,
            tuple(rng.choices(list(OPERATIONS), k=3)),
            rng.choice(list(OPERATIONS)),
        )
        self.U, self.M, self.O = nn.Linear(H, H, bias=False), nn.Linear(H, H), nn.Linear(H, 2)
        self.w = nn.Parameter(torch.randn(H))
        for name in (*self.names, self.message):
            for key, module in modules_of(name, H).items():
                setattr(self, key, module)

    def vertex(self, v):
        rng = random.Random(self.seed)
        values = [v.pull(), v.gather(0), v.gather(1)]

        def message(s, x, a):
            return torch.tanh(OPERATIONS[self.message](self, s, x, s * a, self.M(s)))

        values.append(v.gather_sum(message, values[0], values[1].tanh()) if rng.random() < 0.5 else v.gather_sum())
        for name in self.names:
            values.append(torch.tanh(OPERATIONS[name](self, *rng.choices(values, k=4))))
        h = torch.tanh(values[-1] + 0.1 * rng.choice(values))
        v.scatter(torch.cat((h[:, 2:], values[1][:, :2]), 1) if rng.random() < 0.3 else h)
        v.push(rng.choice(values[3:]))
        v.push(self.O(h))
        v.push(h > values[0])


def test_an_input_may_be_called_as_a_parameter():
    class Named(weft.VertexFunction):
        def __init__(self):
            super().__init__(3)
            self.x = nn.Parameter(torch.ones(3))

        def vertex(self, v):
            h = torch.tanh(v.pull("x") * self.x + v.gather_sum())
            v.scatter(h)
            v.push(h)

    m, graphs = Named(), weft.Graphs.chain([3])
    for grad in (True, False):
        x = torch.ones(3, 3, requires_grad=grad)
        m.x.requires_grad_(not grad)
        (found,) = torch.autograd.grad(m(graphs, {"x": x}).sum(), x if grad else m.x)
        assert found.any()


@pytest.mark.parametrize("seed", range(12))
def test_random_functions(seed):
    """Beside the reference, alone or two types in one graph, under options."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    graphs = weft.Graphs.from_children([random_dag(rng, rng.randint(1, 9), 2) for _ in range(2)])
    m = Drawn(seed, 4).double()
    if seed % 3 == 0:
        m = weft.VertexFunctions({"a": m, "b": Drawn(seed + 1000, 4).double()})
        graphs = graphs.with_types([rng.choice("ab") for _ in range(graphs.num_vertices)])
    x = torch.randn(graphs.num_vertices, 4, dtype=torch.float64, requires_grad=True)
    wrt = [x, *m.parameters()]
    want = m(graphs, x, executor="reference")
    weights = [torch.randn_like(o) for o in want[:2]]

    def gradients(outputs):
        loss = sum((o * w).sum() for o, w in zip(outputs[:2], weights, strict=True))
        return torch.autograd.grad(loss, wrt, materialize_grads=True)

    wanted = gradients(want)
    others = [{"lazy": False}, {"fuse": False}, {"lazy": False, "fuse": False}]
    for options in ({}, others[seed // 3 % 3]):  # each where there are types and where there are none
        with weft.vertex.options(**options):
            assert weft.explain(m, graphs, x).executor == "batched"
            out = m(graphs, x)
        assert out[2].dtype == torch.bool and torch.equal(out[2], want[2])
        for a, b in zip((*out[:2], *gradients(out)), (*want[:2], *wanted), strict=True):
            assert relative_error(a, b) < 1e-8


@pytest.mark.parametrize(
    "name, f",
    [
        ("aten.cumsum", lambda m, x, s, a, b: torch.cumsum(x + s, 1)),
        ("aten.bmm", lambda m, x, s, a, b: ((x + s)[:, None] @ a[:, :, None])[:, 0].expand(-1, 3)),
        ("aten.sort", lambda m, x, s, a, b: torch.sort(x + s, 1).values),
        ("aten.flip", lambda m, x, s, a, b: (x + s).flip(1)),
        ("aten.index", lambda m, x, s, a, b: (x + s)[:, [2, 0, 1]]),
        ("aten.view", lambda m, x, s, a, b: (x + s).view(-1, 1).tanh().view(-1, 3)),
    ],
)
def test_explain_names_what_is_not_known(name, f):
    graphs = weft.Graphs.from_children([[[], [], [0, 1]]])
    m, x = Cell(f), torch.randn(3, 3)
    explained = weft.explain(m, graphs, x)
    assert explained.executor == "reference" and name in explained.reason
    assert relative_error(m(graphs, x), evaluate(m.step, [[[], [], [0, 1]]], x)) < 1e-6


@pytest.mark.parametrize("hidden", [61, 67, 71, 73])
def test_no_hidden_size_is_taken_for_the_number_of_vertices(hidden):
    graphs = weft.Graphs.from_children([[[], [], [0, 1]]])
    assert weft.explain(weft.vertex.models.TreeLSTM(5, hidden), graphs, torch.randn(3, 5)).executor == "batched"


class Random(weft.VertexFunction):
    """Pushes what dropout leaves of ones, in the frontiers and before them, and hands on what it leaves of its sum."""

    def __init__(self):
        super().__init__(3)
        self.drop = nn.Dropout(0.25)

    def vertex(self, v):
        s = v.gather_sum()
        v.push(self.drop(torch.ones_like(s) + 0 * s))
        v.push(self.drop(torch.ones_like(v.pull())))
        h = self.drop(v.pull() + s)
        v.push(h)
        v.scatter(h)


@devices
def test_dropout(device):
    """torch's: kept with its probability and scaled, drawn for every vertex and call, the same mask in backward."""
    m = Random().to(device)
    graphs = weft.Graphs.from_children([[[v - 1] if v % 2 else [] for v in range(2000)]])
    x = (torch.rand(2000, 3, device=device) + 1).requires_grad_()
    assert weft.explain(m, graphs, x).executor != "reference"
    torch.manual_seed(1)
    first = m(graphs, x)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, m(graphs, x), strict=True))
    again = m(graphs, x)
    for i in (0, 1):
        kept = first[i] != 0
        assert torch.allclose(first[i][kept], torch.tensor(4 / 3, device=device))
        assert abs(kept.double().mean() - 0.75) < 0.03 and abs((kept == (again[i] != 0)).double().mean() - 0.625) < 0.03
        assert len(kept.unique(dim=0)) == 8
    assert abs(((first[0] != 0) == (first[1] != 0)).double().mean() - 0.625) < 0.03  # two masks
    leaves, h = torch.arange(0, 2000, 2, device=device), first[2]
    (grad,) = torch.autograd.grad(h[leaves].sum(), x)
    assert torch.equal(grad[leaves] != 0, h[leaves] != 0)
    m.eval()
    assert torch.equal(m(graphs, x)[1], torch.ones_like(x))


def test_fused_cells_of_cuda_are_taken_apart():
    """On CUDA torch runs a cell as one operation, which keeps its own workspace."""
    from weft._vertex.trace import trace

    state = torch.randn(4, 3)
    for cell, parts, given in (
        (nn.GRUCell(3, 3), trace._gru_cell, state),
        (nn.LSTMCell(3, 3), trace._lstm_cell, (state, torch.randn(4, 3))),
    ):
        x, h = torch.randn(4, 3), state
        c = given[1] if isinstance(given, tuple) else h
        found = parts(x @ cell.weight_ih.T, h @ cell.weight_hh.T, c, cell.bias_ih, cell.bias_hh)
        want = cell(x, given)
        for f, w in zip(found, want if isinstance(want, tuple) else (want,), strict=False):
            assert relative_error(f, w) < 1e-6


def test_traces_for_cuda_are_compiled():
    """Tracing needs no GPU; the operations that only CUDA has are known, too."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from weft._vertex.compiler.compiler import compile_traces
    from weft._vertex.trace.trace import trace
    from weft._vertex.vertex import Spec, VertexType

    f = lambda m, x, s, a, b: m.drop(m.norm(m.gru(x, s))) + m.lstm(x, (a, b))[1]  # noqa: E731
    m = Cell(f, 3, gru=nn.GRUCell(3, 3), lstm=nn.LSTMCell(3, 3, bias=False), norm=nn.LayerNorm(3), drop=nn.Dropout())
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in m.modules():
            for name, p in module._parameters.items():
                module._parameters[name] = p if p is None else nn.Parameter(torch.empty(p.shape, device="cuda"))
    rows = Spec((3,), torch.float32)
    type = VertexType("Cell", rows, {"input": rows}, torch.device("cuda"))
    found = trace(m.vertex, type, {id(p): n for n, p in m.named_parameters()}, [3, 6, 9, 12], lambda name: True)
    assert found.obstacle is None
    assert "native_dropout" not in str(found.program) and "fused" not in str(found.program)
    plan = compile_traces([found], lambda kind, name: True, (3,), "float32", True, True)
    assert plan.frontiers.forward and plan.frontiers.backward


@pytest.mark.cuda
@pytest.mark.parametrize("H", [128, 260])
def test_large_frontiers_on_cuda(H):
    """Whose kernels have four columns of a row in a thread, or one."""
    graphs = weft.Graphs.from_parents([[32 + v // 2 for v in range(62)] + [-1]] * 600).to("cuda")
    cell = models.TreeFC(H).cuda()
    x = torch.randn(graphs.num_vertices, H, device="cuda", requires_grad=True)
    grad = torch.randn_like(x)

    def step(cell: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        given = x.detach().to(dtype).requires_grad_()
        out = cell(graphs, given, executor="batched")
        return [out.detach(), *torch.autograd.grad(out, [given, *cell.parameters()], grad.to(dtype))]

    found, again = step(cell, torch.float32), step(cell, torch.float32)
    wanted = step(copy.deepcopy(cell).double(), torch.float64)
    for f, a, w in zip(found, again, wanted, strict=True):
        assert torch.equal(f, a)
        assert relative_error(f, w) < 3e-6


LAYERS = {
    "bias": (1, lambda m, x, s: m.W(x) + m.U(s)),
    "no bias": (1, lambda m, x, s: m.V(x) + m.U(s)),
    "two of one weight": (2, lambda m, x, s: m.W(x) * m.U(s) + m.W(x)),
    "beside its input": (1, lambda m, x, s: m.W(x) * m.U(s) + x),
    "frozen": (1, lambda m, x, s: m.frozen(x) + m.U(s)),
    "of something computed": (1, lambda m, x, s: m.W(2 * x) + m.U(s)),
    "of a computed weight": (0, lambda m, x, s: F.linear(x, 2 * m.W.weight) + m.U(s)),
    "read before the frontiers, too": (0, lambda m, x, s: (y := m.W(x)) * m.U(s) + torch.softmax(y, 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_linear_layers_of_what_is_pulled_run_with_the_frontiers(name):
    layers, f = LAYERS[name]
    torch.manual_seed(0)
    m = Cell(lambda m, x, s, *_: f(m, x, s), W=nn.Linear(3, 3), V=nn.Linear(3, 3, bias=False), frozen=nn.Linear(3, 3))
    m = m.double()
    m.frozen.requires_grad_(False)
    graphs = weft.Graphs.from_children([random_tree(random.Random(i), 9) for i in range(3)])
    x = torch.randn(graphs.num_vertices, 3, dtype=torch.float64, requires_grad=True)
    wrt = [x, *(p for p in m.parameters() if p.requires_grad)]
    weights = torch.randn(graphs.num_vertices, 3, dtype=torch.float64)

    def gradients(executor):
        out = m(graphs, x, executor=executor)
        first = torch.autograd.grad((out * weights).sum(), wrt, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), wrt, materialize_grads=True)
        return out, *first, *second

    for found, want in zip(gradients("batched"), gradients("reference"), strict=True):
        assert relative_error(found, want) < 1e-12
    ((trace,),) = m._compiled.traces.values()
    assert [len(compiled.plan.given.layers) for compiled, _ in trace.compiled.values()] == [layers]
