"""weft.VertexFunction and autograd, for every executor; random numbers, determinism, independence."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.utils.prune
import weft
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint
from weft.vertex import models

from tests.common import relative_error
from tests.vertex.cells import (
    CHILDREN,
    GRAPHS,
    NETS,
    Cell,
    both,
    cell,
    devices,
    executors,
    nets,
    rows,
)
from tests.vertex.naive import evaluate

# ---- Autograd --------------------------------------------------------------------------------------------------------


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
def test_graphs_first_seen_by_a_transform(executor):
    m, x = models.TreeLSTM(3, 2), rows()
    graphs = weft.Graphs.from_children(CHILDREN)

    def loss(x):
        return m(graphs, x, executor=executor)[graphs.roots].sin().sum()

    found = torch.func.grad(loss)(x)
    x.requires_grad_()
    assert relative_error(found, torch.autograd.grad(loss(x), x)[0]) < 1e-6


def hooked(h):
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return h


def set_data(h):
    h.data = h.data.sin()
    return h


OF_AUTOGRAD = {
    "hook": hooked,
    "detach_": lambda h: h + (0.5 * h).detach_(),
    "data": lambda h: h + 0.5 * h.data,
    "set data": lambda h: set_data(h * 1.0),
}


@executors
@pytest.mark.parametrize("change", OF_AUTOGRAD)
def test_what_only_autograd_sees(change, executor):
    change = OF_AUTOGRAD[change]
    m, x = cell(change).double(), rows(dtype=torch.float64, requires_grad=True)

    def step(v, below):
        total = sum((s for s in below if s is not None), torch.zeros(3, dtype=torch.float64))
        h = change(torch.tanh(x[v] + m.W(total)))
        return h, h

    out, want = m(GRAPHS, x, executor=executor), evaluate(step, CHILDREN, torch.arange(GRAPHS.num_vertices))
    assert relative_error(out, want) < 1e-14
    found, wanted = (torch.autograd.grad(y.sin().sum(), [x, *m.parameters()]) for y in (out, want))
    assert all(relative_error(f, w) < 1e-13 for f, w in zip(found, wanted, strict=True))


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


CHANGED = {"input": lambda m, x: x, "weight": lambda m, x: m.W.weight, "bias": lambda m, x: m.W.bias}


@devices
@pytest.mark.parametrize("frozen", [None, *CHANGED])
@pytest.mark.parametrize("changed", CHANGED)
def test_what_no_gradient_of_a_layer_reads_may_change_before_them(changed, frozen, device):
    """As in torch that of the input reads the weight, that of the weight the input; gradients of gradients read all."""
    m, x = models.TreeLSTM(3, 2).to(device), rows(device=device, requires_grad=frozen != "input") * 1
    if frozen in ("weight", "bias"):
        CHANGED[frozen](m, x).requires_grad_(False)
    wrt = [t for t in (x, *m.parameters()) if t.requires_grad]
    loss = m(GRAPHS, x, executor="batched").square().sum()
    want = torch.autograd.grad(loss, wrt, retain_graph=True)
    with torch.no_grad():
        CHANGED[changed](m, x).mul_(2)
    if frozen == {"input": "weight", "weight": "input", "bias": frozen}[changed]:
        found = torch.autograd.grad(loss, wrt, retain_graph=True)
        assert all(torch.equal(f, w) for f, w in zip(found, want, strict=True))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, wrt, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, wrt, create_graph=True)


@executors
def test_inputs_of_inference_mode_beside_a_frozen_weight(executor):
    m, x = models.TreeLSTM(3, 2), rows()
    m.W.weight.requires_grad_(False)
    with torch.inference_mode():
        same = x * 1
        m(GRAPHS, same, executor=executor)
    for create_graph in (False, True):
        out = m(GRAPHS, same, executor=executor)
        (want,) = torch.autograd.grad(m(GRAPHS, x, executor=executor).sum(), m.W.bias)
        with torch.inference_mode():
            same.mul_(3)  # which no version tells of
        (found,) = torch.autograd.grad(out.sum(), m.W.bias, create_graph=create_graph)
        assert relative_error(found, want) < 1e-6
        with torch.inference_mode():
            same.copy_(x)


@executors
def test_an_input_beside_a_frozen_weight_goes_with_the_backward(executor):
    """Also where it becomes a result of what it went into."""
    m = models.TreeLSTM(3, 3)
    m.W.weight.requires_grad_(False)
    gone = []
    for _ in range(2):
        x = rows(requires_grad=True) * 1
        y = x * 1
        gone += [weakref.ref(x), weakref.ref(y)]
        y += m(GRAPHS, y, executor=executor)
        loss = m(GRAPHS, x, executor=executor).sum() + y.sum()
        del x, y
        loss.backward()
        gc.collect()
        assert [r() for r in gone] == [None] * len(gone)


@executors
def test_hooks_of_saved_tensors_see_an_input_beside_a_frozen_weight(executor):
    m, x, seen = models.TreeLSTM(3, 2), rows(requires_grad=True) * 1, []
    m.W.weight.requires_grad_(False)

    def pack(t):
        seen.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = m(GRAPHS, x, executor=executor)
    if executor == "batched":
        assert any(t.data_ptr() == x.data_ptr() for t in seen)
    assert all(g is not None for g in torch.autograd.grad(out.sum(), [m.W.bias, m.U.weight]))


def test_a_backward_under_autocast_has_the_forwards_casts():
    m, x = models.TreeLSTM(3, 2), rows(requires_grad=True)
    loss = m(GRAPHS, x, executor="batched").sum()
    wrt = [x, *m.parameters()]
    want = torch.autograd.grad(loss, wrt, retain_graph=True)
    for create_graph in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad(loss, wrt, retain_graph=True, create_graph=create_graph)
        assert all(relative_error(f, w) < 1e-5 for f, w in zip(found, want, strict=True))


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


# ---- Messages that change their shape --------------------------------------------------------------------------------

RESHAPED = {
    "view": lambda s: s.view(s.shape[0], 1, 3).sin().view(s.shape[0], 3),
    "flatten": lambda s: s.unsqueeze(2).flatten(1).sin(),
    "reshape": lambda s: s.reshape(-1, 3).sin().reshape(len(s), 3),
    "expand": lambda s: s * s.sum(1, keepdim=True).expand(len(s), 3),
}


@executors
@pytest.mark.parametrize("change", RESHAPED)
def test_second_derivatives_of_messages_that_change_their_shape(change, executor):
    def vertex(self, v):
        both(v, torch.tanh(v.pull() + v.gather_sum(lambda s, x: RESHAPED[change](self.W(s) * x), v.pull())))

    m, x = Cell(vertex).double(), rows(dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda x: m(GRAPHS, x, executor=executor), (x,))


# ---- What a trace leaves ---------------------------------------------------------------------------------------------


def _accumulator_is_new(p: torch.Tensor) -> bool:
    """Whether nothing keeps the node that accumulates the gradient of a parameter."""

    def node():
        return p.view_as(p).grad_fn.next_functions[0][0]

    node().metadata["seen"] = True
    return "seen" not in node().metadata


@executors
def test_a_module_that_was_called_is_freed_with_its_last_reference(executor):
    """No collector of cycles is asked: a circle through autograd's nodes is none that Python's would find."""

    def train():
        m = models.ChildSumTreeLSTM(3, 4)
        m(GRAPHS, rows(), executor=executor).sum().backward()
        return m

    train()  # imports that keep frames of their first caller
    gc.collect()
    gc.disable()
    try:
        m = train()
        assert all(map(_accumulator_is_new, m.parameters()))
        kept = [weakref.ref(p) for p in m.parameters()]
        del m
        assert [p() for p in kept] == [None] * len(kept)
    finally:
        gc.enable()


@pytest.mark.cuda
@executors
def test_modules_that_were_called_leave_no_memory_on_the_device_and_captures_as_they_were(executor):
    def leave() -> int:
        m = models.TreeLSTM(3, 512).cuda()
        m(GRAPHS, rows().cuda(), executor=executor).sum().backward()
        del m
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = leave()  # the first, which counts what libraries allocate
    assert all(leave() <= before for _ in range(3))

    m = models.TreeLSTM(3, 8).cuda()
    m(GRAPHS, rows().cuda(), executor=executor).sum().backward()
    # The caller's own net of the same parameters, captured with its backward on another stream.
    x = torch.randn(5, 3, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(m.W(x).sum(), [*m.W.parameters()])
    torch.cuda.current_stream().wait_stream(side)
    m.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        m.W(x).sum().backward()
    graph.replay()
    assert torch.allclose(m.W.weight.grad, x.sum(0).expand_as(m.W.weight), rtol=1e-4)
