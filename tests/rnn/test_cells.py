"""weft.nn.RNNCell, GRUCell and LSTMCell beside torch's."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import weft
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.common import DEVICES, relative_error

device = pytest.mark.parametrize("device", DEVICES)
KINDS = ("RNNCell", "GRUCell", "LSTMCell")
kinds = pytest.mark.parametrize("kind", KINDS)
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.15, torch.float16: 5e-2}
"""A relu's gradient jumps where rounding moves a unit across zero."""


def pair(kind: str, *sizes, **options) -> tuple[nn.Module, nn.Module]:
    peer = getattr(nn, kind)(*sizes, **options)
    cell = getattr(weft.nn, kind)(*sizes, **options)
    cell.load_state_dict(peer.state_dict())
    return cell, peer


def state(kind: str, *shape, **options):
    h = torch.randn(*shape, **options)
    return (h, torch.randn(*shape, **options)) if kind == "LSTMCell" else h


def tensors(result) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def chained(cell: nn.Module, x: Tensor, hx, grads: Tensor) -> list[Tensor]:
    """The last state of some steps, and the gradients of input, state and parameters."""
    leaves = [t.detach().requires_grad_() for t in (x, *tensors(hx))]
    h = tuple(leaves[1:]) if isinstance(hx, tuple) else leaves[1]
    total = []
    for step in leaves[0]:
        h = cell(step, h)
        total.append(tensors(h)[0])
    output = torch.stack(total)
    found = torch.autograd.grad(output, [*leaves, *cell.parameters()], grads)
    return [output.detach(), *(t.detach() for t in tensors(h)), *found]


OPTIONS = [
    ("RNNCell", {"nonlinearity": "tanh"}),
    ("RNNCell", {"nonlinearity": "relu"}),
    ("GRUCell", {}),
    ("LSTMCell", {}),
]


@device
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("B", (1, 3, 4, 6, 33))
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_like_torch(kind: str, options: dict, B: int, dtype: torch.dtype, device: str) -> None:
    """Against torch's cell in fp64, over steps, with gradients; sizes beside the vectors' widths."""
    for (I, H), bias in itertools.product(((1, 1), (19, 37), (64, 32)), (True, False)):
        cell, peer = pair(kind, I, H, bias=bias, device=device, dtype=dtype, **options)
        x, hx = torch.randn(3, B, I, device=device, dtype=dtype), state(kind, B, H, device=device, dtype=dtype)
        grads = torch.randn(3, B, H, device=device, dtype=dtype)
        exact = tuple(s.double() for s in hx) if isinstance(hx, tuple) else hx.double()
        expected = chained(peer.double(), x.double(), exact, grads.double())
        for found, wanted in zip(chained(cell, x, hx, grads), expected, strict=True):
            assert found.dtype == dtype
            # The terms of a gradient of one element may cancel: such a sum is held to their size, not to its own.
            size = wanted.norm().item()
            assert relative_error(found, wanted) * size <= BOUNDS[dtype] * max(1.0, size)


@device
@kinds
def test_takes_what_torch_takes(kind: str, device: str) -> None:
    cell, peer = pair(kind, 5, 7, device=device)
    x, hx = torch.randn(4, 5, device=device), state(kind, 4, 7, device=device)
    one = tuple(s[0] for s in hx) if isinstance(hx, tuple) else hx[0]
    strided = torch.randn(5, 8, device=device).t()[::2]
    for arguments in ((x,), (x, hx), (x[0],), (x[0], one), (x[:0],), (strided, hx), (x, None)):
        for found, expected in zip(tensors(cell(*arguments)), tensors(peer(*arguments)), strict=True):
            torch.testing.assert_close(found, expected)


@kinds
def test_refuses_what_torch_refuses(kind: str) -> None:
    cell, peer = pair(kind, 5, 7)
    both = (lambda h: (h, h)) if kind == "LSTMCell" else lambda h: h
    x, h = torch.randn(2, 5), torch.randn(2, 7)
    calls = [
        (torch.randn(1, 2, 5),), (torch.randn(2, 4),), (x, both(torch.randn(3, 7))), (x, both(torch.randn(2, 6))),
        (x, both(torch.randn(7))), (x[0], both(h)), (x, both(h.double())), (x.double(), both(h)), (x.long(), both(h)),
        (x, both(torch.randn(1, 2, 7))), (torch.tensor(1.0),), (x.to("meta"), both(h)),
    ]  # fmt: skip
    if kind == "LSTMCell":
        calls += [(x, (h,)), (x, (h, torch.randn(2, 6))), (x, (h, h, h))]
    for arguments in calls:
        with pytest.raises(Exception) as expected:
            peer(*arguments)
        with pytest.raises(expected.type):
            cell(*arguments)
    with pytest.raises(ValueError, match=f"{kind}: algorithm must be one of 'auto', 'fused', 'torch', got 'scan'"):
        getattr(weft.nn, kind)(5, 7, algorithm="scan")
    if kind == "RNNCell":
        with pytest.raises(RuntimeError, match="Unknown nonlinearity"):
            weft.nn.RNNCell(5, 7, nonlinearity="sigmoid")(x)


@kinds
def test_is_torch_s_cell(kind: str) -> None:
    cell, peer = pair(kind, 5, 7, bias=False)
    assert isinstance(cell, getattr(nn, kind)) and type(cell).__module__ == "weft.nn"
    assert repr(cell) == repr(peer) and list(cell.state_dict()) == list(peer.state_dict())
    assert "algorithm='torch'" in repr(getattr(weft.nn, kind)(5, 7, algorithm="torch"))
    x = torch.randn(2, 5)
    for other in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        assert type(other) is type(cell)
        assert all(map(torch.equal, tensors(other(x)), tensors(cell(x))))
    torch.manual_seed(1)
    cell.reset_parameters()
    torch.manual_seed(1)
    peer.reset_parameters()
    assert torch.equal(cell.weight_ih, peer.weight_ih)
    parametrized = nn.utils.parametrizations.weight_norm(copy.deepcopy(cell), "weight_hh")
    assert all(t.isfinite().all() for t in tensors(parametrized(x)))
    doubled = {name: 2 * t for name, t in cell.named_parameters()}
    other = copy.deepcopy(cell)
    other.load_state_dict(doubled)
    assert all(map(torch.equal, tensors(torch.func.functional_call(cell, doubled, (x,))), tensors(other(x))))


@kinds
def test_accelerate(kind: str) -> None:
    peer = getattr(nn, kind)(5, 7)
    model = nn.ModuleList([peer, nn.Linear(1, 1)])
    assert weft.accelerate(model) is model
    cell = model[0]
    assert type(cell) is getattr(weft.nn, kind) and cell.weight_ih is peer.weight_ih and cell.algorithm == "auto"
    assert weft.accelerate(peer, algorithm="reference").algorithm == "torch"
    assert weft.accelerate(peer, algorithm="scan").algorithm == "auto"
    x = torch.randn(2, 5)
    for found, expected in zip(tensors(cell(x)), tensors(peer(x)), strict=True):
        torch.testing.assert_close(found, expected)


@kinds
def test_accelerate_leaves_subclasses_and_weft_s_own(kind: str) -> None:
    derived = type("Mine", (getattr(nn, kind),), {})
    model = nn.ModuleList([derived(5, 7), getattr(weft.nn, kind)(5, 7)])
    before = list(model)
    with pytest.warns(UserWarning, match=rf"0 \(.*Mine\) is a subclass of torch.nn.{kind}$"):
        weft.accelerate(model, subclasses=True)
    assert list(model) == before


@kinds
def test_traces_like_torch(kind: str) -> None:
    cell, peer = pair(kind, 5, 7)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor):
            return self.cell(x)

    x = torch.randn(3, 5)
    graph = torch.fx.symbolic_trace(Model())
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "output"]
    traced = torch.jit.trace(Model(), (x,))
    assert "weft::" not in str(traced.inlined_graph)
    for model in (graph, traced):
        for found, expected in zip(tensors(model(x)), tensors(peer(x)), strict=True):
            torch.testing.assert_close(found, expected)


@kinds
def test_counts_operations_like_torch(kind: str) -> None:
    counts = []
    for cell in pair(kind, 5, 7):
        with FlopCounterMode(display=False) as counter:
            tensors(cell(torch.randn(3, 5, requires_grad=True), state(kind, 3, 7)))[0].sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@kinds
def test_explain(kind: str) -> None:
    cell = getattr(weft.nn, kind)(5, 7)
    found = weft.explain(cell, torch.randn(2, 5))
    assert (found.algorithm, found.asked) == ("fused", "auto") and "B=2 float32 input on cpu" in str(found)
    cell.algorithm = "torch"
    assert weft.explain(cell, torch.randn(5)).algorithm == "torch"
    large = getattr(weft.nn, kind)(5, 300)
    assert [weft.explain(large, torch.randn(B, 5)).algorithm for B in (4, 5)] == ["fused", "torch"]
    assert weft.explain(large, torch.randn(5)).algorithm == "fused"
    large.algorithm = "fused"
    assert weft.explain(large, torch.randn(5, 5)).algorithm == "fused"
    with pytest.raises(TypeError, match="x must be a Tensor"):
        weft.explain(cell, None)


@device
@kinds
def test_compiles_in_a_loop(kind: str, device: str) -> None:
    torch._dynamo.reset()
    cell, _ = pair(kind, 5, 7, device=device)

    def run(x: Tensor, hx):
        for step in x:
            hx = cell(step, hx)
        return hx

    x = torch.randn(4, 2, 5, device=device)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for hx in (None, state(kind, 2, 7, device=device)):
        found, expected = tensors(compiled(x, hx)), tensors(run(x, hx))
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(f, e)
        parameters = list(cell.parameters())
        grads = torch.autograd.grad(sum(f.sum() for f in found), parameters)
        for f, e in zip(grads, torch.autograd.grad(sum(e.sum() for e in expected), parameters), strict=True):
            torch.testing.assert_close(f, e)


@device
@kinds
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_autocast(kind: str, dtype: torch.dtype, device: str) -> None:
    cell, peer = pair(kind, 5, 7, device=device)
    x, hx = torch.randn(2, 5, device=device), state(kind, 2, 7, device=device, dtype=dtype)
    with torch.autocast(device, torch.bfloat16):
        found, expected = tensors(cell(x, hx)), tensors(peer(x, hx))
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        torch.testing.assert_close(f, e, rtol=2e-2, atol=2e-2)


@kinds
def test_transforms_take_torch_s_operations(kind: str) -> None:
    cell, peer = pair(kind, 3, 4)
    x = torch.randn(2, 3)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return tensors(module(x))[0].sum()

    grads = [torch.func.grad(lambda t, m=m: loss(m, t))(x) for m in (cell, peer)]
    torch.testing.assert_close(*grads)
    tangents = [torch.func.jvp(lambda t, m=m: loss(m, t), (x,), (x,))[1] for m in (cell, peer)]
    torch.testing.assert_close(*tangents)
    # Which torch's LSTMCell cannot do.
    mapped = torch.func.vmap(lambda t: tensors(cell(t))[0])(x)
    torch.testing.assert_close(mapped, torch.stack([tensors(peer(row))[0] for row in x]))


@kinds
def test_bits_do_not_depend_on_threads(kind: str) -> None:
    cell, _ = pair(kind, 300, 300)
    x, threads = torch.randn(2, 300), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(tensors(cell(x)))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a.update(input=a["input"][0]), ValueError, r"input must be \(B, I\), got 1 dimensions"),
        (lambda a: a.update(h=a["h"][:1]), ValueError, r"h must be \(B, H\) = \[2, 4\], got \[1, 4\]"),
        (lambda a: a.update(c=None), ValueError, r"c must be \(B, H\) for lstm, got None"),
        (lambda a: a.update(cell="gru"), ValueError, "c must be None except for lstm, slstm, slstm_exp, got a tensor"),
        (lambda a: a.update(cell="no"), ValueError, "cell must be one of 'rnn_tanh', .*, got 'no'"),
        (lambda a: a.update(w_ih=a["w_hh"]), ValueError, r"w_ih must be \(G\*H, I\) = \[16, 3\], got \[16, 4\]"),
        (lambda a: a.update(b_ih=None), ValueError, "b_ih and b_hh must both be given or both be None, got only b_hh"),
        (lambda a: a.update(h=a["h"].double()), TypeError, "h must have the dtype of input, .*, got "),
        (lambda a: a.update(input=a["input"].long()), TypeError, "input must be float16, bfloat16, float32 or float64"),
    ],
)
def test_bad_input(change, error: type[Exception], message: str) -> None:
    arguments = {
        "input": torch.randn(2, 3), "h": torch.randn(2, 4), "c": torch.randn(2, 4), "w_ih": torch.randn(16, 3),
        "w_hh": torch.randn(16, 4), "b_ih": torch.randn(16), "b_hh": torch.randn(16), "cell": "lstm",
    }  # fmt: skip
    change(arguments)
    with pytest.raises(error, match=f"weft::rnn_cell: {message}"):
        torch.ops.weft.rnn_cell(**arguments)
