"""Derivatives beyond the first backward, and torch.func."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import weft
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.utils import rnn
from weft._rnn.dropin import torch_rnn
from weft._rnn.select import choice
from weft._rnn.select.case import Case

from tests.common import pairs
from tests.rnn.layers import (
    ALGORITHMS,
    CELLS,
    LAYERS,
    H,
    I,
    _loss,
    algorithms,
    assert_same,
    cells,
    cells_and_projected,
    devices,
    flat,
    hx_of,
    layers,
    states,
)

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


@devices
@cells_and_projected
@pytest.mark.parametrize("algorithm", ["persistent", "scan", "torch", "reference"])
def test_gradcheck(device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm, sizes=(2, 3), bidirectional=True)
    names = [n for n, _ in ours.named_parameters()]

    def call(x, *tensors):
        state, weights = tensors[: -len(names)], tensors[-len(names) :]
        hx = hx_of(ours, state)
        return tuple(flat(torch.func.functional_call(ours, dict(zip(names, weights, strict=True)), (x, hx))))

    x = torch.randn(3, 2, 2, dtype=torch.float64, device=device)
    inputs = [t.detach().clone().requires_grad_() for t in (x, *states(ours, 2), *ours.parameters())]
    nondet = 1e-7 if device == "cuda" else 0.0
    assert gradcheck(call, inputs, nondet_tol=nondet, fast_mode=True)
    assert gradgradcheck(call, inputs, nondet_tol=nondet, fast_mode=True)


@pytest.fixture
def any_derivative(monkeypatch):
    """torch's kernel runs on every device as in float64 on CUDA."""
    monkeypatch.setattr(torch_rnn, "needs_any_derivative", lambda case: case.trains)
    choice.forget_choices()
    yield
    choice.forget_choices()


def test_where_torch_needs_any_derivative():
    case = Case(cell="gru", device="cuda", dtype=torch.float64, hidden_size=16, batch=4, steps=100)
    assert torch_rnn.needs_any_derivative(case)
    for change in ({"device": "cpu"}, {"dtype": torch.float32}, {"trains": False}):
        assert not torch_rnn.needs_any_derivative(case._replace(**change))


TWICE = {
    "plain": {},
    "batch first": {"batch_first": True},
    "one layer, two directions": {"bidirectional": True, "bias": False},
    "two layers, two directions": {"num_layers": 2, "bidirectional": True},
    "projected": {"proj_size": 2, "num_layers": 2, "bidirectional": True},
}
TWICE_CASES = [(cell, options) for cell in CELLS for options in TWICE if options != "projected" or cell == "lstm"]


@devices
@pairs(case=TWICE_CASES, algorithm=["auto", "torch"], packed=[False, True], given_state=[False, True])
def test_two_derivatives(any_derivative, device, case, algorithm, packed, given_state):
    """Beside torch's layer on the CPU, where it is differentiable twice."""
    cell, options = case
    ours, theirs = layers(cell, "cpu", algorithm=algorithm, **TWICE[options])
    ours.to(device)
    x = torch.randn(4, 3, I, dtype=torch.float64)
    batch = 4 if ours.batch_first and not packed else 3
    tensors = [x, *(states(theirs, batch) if given_state else ())]
    outgoing = directions = None
    found = []
    for layer in (ours, theirs):
        to = layer.weight_ih_l0.device
        inputs = [t.detach().to(to).requires_grad_() for t in tensors]
        wanted = [*inputs, *layer.parameters()]
        each = rnn.pack_padded_sequence(inputs[0], [4, 2, 1]) if packed else inputs[0]
        result = flat(layer(each, hx_of(layer, tuple(inputs[1:]) or None)))
        if layer is ours and algorithm == "torch" and not ours.batch_first:
            assert result[0].grad_fn.name() == "_AnyDerivativeBackward"
        outgoing = outgoing or [torch.randn_like(r, device="cpu") for r in result]
        arriving = [g.to(to).requires_grad_() for g in outgoing]
        first = torch.autograd.grad(result, wanted, arriving, retain_graph=True)
        differentiable = torch.autograd.grad(result, wanted, arriving, create_graph=True)
        directions = directions or [torch.randn_like(g, device="cpu") for g in first]
        along = [v.to(to) for v in directions]
        second = torch.autograd.grad(differentiable, [*wanted, *arriving], along)
        found.append([t.cpu() for t in (*result, *first, *differentiable, *second)])
    assert_same(*found)


@devices
@cells
@algorithms
def test_every_derivative_has_the_mask_of_the_forward_pass(any_derivative, device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm, num_layers=3, dropout=0.5)
    x = torch.randn(3, 2, I, dtype=torch.float64, device=device, requires_grad=True)

    def call(*tensors):
        torch.manual_seed(7)
        return tuple(flat(ours(tensors[0])))

    nondet = 1e-7 if device == "cuda" else 0.0
    assert gradcheck(call, (x, *ours.parameters()), nondet_tol=nondet, fast_mode=True)
    assert gradgradcheck(call, (x, *ours.parameters()), nondet_tol=nondet, fast_mode=True)


@devices
@cells
@algorithms
def test_gradients_in_evaluation_mode(any_derivative, device, cell, algorithm):
    """Which cuDNN's own layers do not have."""
    ours, theirs = layers(cell, "cpu", algorithm=algorithm, num_layers=2, dropout=0.5)
    x = torch.randn(6, 5, I, dtype=torch.float64)
    results = [flat(layer.eval()(x.to(layer.weight_ih_l0.device))) for layer in (ours.to(device), theirs)]
    grads = [
        torch.autograd.grad(sum(r.pow(2).sum() for r in result), list(layer.parameters()))
        for layer, result in zip((ours, theirs), results, strict=True)
    ]
    assert_same([g.cpu() for g in grads[0]], grads[1])


@devices
def test_operands_that_depend_on_each_other(any_derivative, device):
    """The state is a function of the input, and h0 and c0 are one tensor."""
    ours, theirs = layers("lstm", "cpu", algorithm="torch", num_layers=2)
    x = torch.randn(4, 3, I, dtype=torch.float64)
    found = []
    for layer in (ours.to(device), theirs):
        inner = x.to(layer.weight_ih_l0.device).requires_grad_()
        h = inner.sum((0, 2)).view(1, 3, 1).expand(2, 3, H)
        loss = sum(r.pow(2).sum() for r in flat(layer(inner, (h, h))))
        (first,) = torch.autograd.grad(loss, inner, create_graph=True)
        second = torch.autograd.grad(first.pow(2).sum(), [inner, *layer.parameters()])
        found.append([t.cpu() for t in (first, *second)])
    assert_same(*found)


@devices
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_twice(any_derivative, device, create_graph):
    ours, _ = layers("gru", device, algorithm="torch")
    x = torch.randn(4, 3, I, dtype=torch.float64, device=device, requires_grad=True)
    output = ours(x)[0].sum()
    grads = [
        torch.autograd.grad(output, x, retain_graph=keep, create_graph=create_graph)[0] for keep in (True, True, False)
    ]
    assert_same(grads, [grads[0]] * 3)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(output, x)


@devices
@pytest.mark.parametrize("create_graph", [False, True])
def test_operands_changed_in_place(any_derivative, device, create_graph):
    ours, _ = layers("lstm", device, algorithm="torch")
    x = torch.randn(4, 3, I, dtype=torch.float64, device=device)
    state = states(ours, 3)
    for changed in (x, state[0], ours.weight_hh_l0, ours.weight_ih_l0):
        output = ours(x, state)[0]
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output.sum(), ours.weight_ih_l0, create_graph=create_graph)


@devices
@cells
@pytest.mark.parametrize("algorithm", ["persistent", "scan"])
def test_output_changed_in_place(device, cell, algorithm):
    """The backward pass reads the output: a change is refused, never a wrong gradient."""
    ours, theirs = layers(cell, device, algorithm=algorithm)
    x = torch.randn(4, 3, I, dtype=torch.float64, device=device)
    output = ours(x)[0]
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    found, wanted = (torch.autograd.grad((layer(x)[0] * 2).sum(), layer.weight_ih_l0) for layer in (ours, theirs))
    assert_same(found, wanted)


@devices
def test_nothing_is_kept_for_a_backward_pass_that_will_not_come(any_derivative, device, monkeypatch):
    kept = []

    def call(*args, original=torch_rnn.call, **kwargs):
        result = original(*args, **kwargs)
        kept.append([weakref.ref(t) for t in result])
        return result

    monkeypatch.setattr(torch_rnn, "call", call)
    ours, _ = layers("lstm", device, algorithm="torch")
    x = torch.randn(4, 3, I, dtype=torch.float64, device=device)

    def alive():
        return [ref() is not None for ref in kept.pop()]

    gc.disable()  # a cycle would show
    try:
        output = ours(x)[0]
        output.sum().backward(retain_graph=True)
        assert all(ref() is not None for ref in kept[0])
        output.sum().backward()
        assert not any(alive())
        assert output.grad_fn is not None
        output = ours(x)[0]
        del output
        assert not any(alive())
    finally:
        gc.enable()


@devices
@cells_and_projected
@algorithms
def test_func_grad(device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm, num_layers=2)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    parameters = {k: v.detach() for k, v in ours.named_parameters()}
    found = torch.func.grad(functools.partial(_loss, ours, x))(parameters)
    expected = torch.autograd.grad(_loss(ours, x, dict(ours.named_parameters())), list(ours.parameters()))
    assert_same(list(found.values()), list(expected))


@devices
@pairs(cell=LAYERS, algorithm=ALGORITHMS, packed=[False, True])
def test_func_vmap(device, cell, algorithm, packed):
    ours, _ = layers(cell, device, algorithm=algorithm, bidirectional=True)
    xs = torch.randn(4, 5, 2, I, dtype=torch.float64, device=device)

    def call(x):
        if packed:
            data = x.reshape(10, I)
            x = rnn.PackedSequence(data, torch.tensor([2] * 5))
        return tuple(flat(ours(x)))

    assert_same(torch.func.vmap(call)(xs), [torch.stack(r) for r in zip(*map(call, xs), strict=True)])


@devices
@cells
@algorithms
def test_func_per_sample_gradients(device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm)
    xs = torch.randn(3, 5, I, dtype=torch.float64, device=device)
    parameters = {k: v.detach() for k, v in ours.named_parameters()}
    gradient = torch.func.grad(lambda p, x: _loss(ours, x, p))
    found = torch.func.vmap(gradient, (None, 0))(parameters, xs)
    expected = [gradient(parameters, x) for x in xs]
    assert_same(list(found.values()), [torch.stack([e[k] for e in expected]) for k in found])


@devices
@cells_and_projected
@algorithms
def test_forward_mode(device, cell, algorithm):
    """The tangent by jvp and by dual tensors; against <g, J v> = <J^T g, v>."""
    ours, _ = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device, requires_grad=True)
    v = torch.randn_like(x)
    output = ours(x)[0]
    g = torch.randn_like(output)
    (pulled,) = torch.autograd.grad(output, x, g)
    value, tangent = torch.func.jvp(lambda x: ours(x)[0], (x,), (v,))
    assert_same([value, (g * tangent).sum()], [output, (pulled * v).sum()])
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(ours(forward_ad.make_dual(x, v))[0])
    assert_same([dual.primal, dual.tangent], [value, tangent])


@devices
@cells
def test_hessian_vector_product(device, cell):
    ours, _ = layers(cell, device, algorithm="scan")
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device, requires_grad=True)
    v = torch.randn_like(x)
    (first,) = torch.autograd.grad(ours(x)[0].pow(3).sum(), x, create_graph=True)
    (backward,) = torch.autograd.grad(first, x, v)
    forward = torch.func.jvp(torch.func.grad(lambda x: ours(x)[0].pow(3).sum()), (x.detach(),), (v,))[1]
    assert_same([backward], [forward])


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_a_change_in_place_names_the_layer(kind):
    layer, x = getattr(weft.nn, kind)(3, 4, algorithm="persistent"), torch.randn(5, 2, 3)
    output = layer(x)[0]
    output.mul_(2)
    with pytest.raises(RuntimeError, match=rf"^weft\.nn\.{kind}: .*modified by an inplace operation") as found:
        output.sum().backward()
    assert "CppNode" not in str(found.value)
    cell = getattr(weft.nn, f"{kind}Cell")(3, 4)
    state = cell(x[0])
    h = state[0] if kind == "LSTM" else state
    h.mul_(2)
    with pytest.raises(RuntimeError, match=rf"^weft\.nn\.{kind}Cell: "):
        h.sum().backward()
