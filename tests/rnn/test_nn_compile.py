"""The layers under torch.compile and torch.export."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import weft
from torch.nn.utils import rnn
from weft._rnn.calls import prepare
from weft._rnn.dropin import torch_limits, torch_rnn

from tests.common import relative_error
from tests.rnn.layers import (
    BOUNDS,
    CELLS,
    LAYERS,
    OPTIONS,
    H,
    I,
    _loss,
    algorithms,
    assert_layers_agree,
    assert_same,
    cells,
    devices,
    flat,
    layers,
    states,
)

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


@devices
@pytest.mark.parametrize(
    ("cell", "algorithm", "options", "given"),
    [  # `given`: with a state. Which of both is no matter of the cell.
        ("relu", "torch", "plain", False),
        ("gru", "auto", "plain", True),
        ("gru", "reference", "plain", True),
        ("lstm", "scan", "two layers", True),
        ("tanh", "persistent", "three layers, two directions", False),
        ("gru", "persistent", "two layers", True),
        ("projected", "persistent", "two layers", True),
        ("lstm", "torch", "two layers", False),
    ],
)
def test_compile(fresh_dynamo, device, cell, algorithm, options, given):
    ours, theirs = layers(cell, device, algorithm=algorithm, **OPTIONS[options])
    dynamic = algorithm != "reference"  # which is unrolled over time
    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for steps, batch in ((6, 5), (8, 7)) if dynamic else ((4, 5),):
        x = torch.randn(
            *((batch, steps) if ours.batch_first else (steps, batch)), I, dtype=torch.float64, device=device
        )
        run = lambda layer, x, hx: compiled(x, hx) if layer is ours else layer(x, hx)  # noqa: E731
        assert_layers_agree(ours, theirs, x, states(ours, batch) if given else None, run=run)


@devices
@pytest.mark.parametrize(
    ("cell", "algorithm"), [*(("gru", a) for a in ("persistent", "scan", "torch")), ("projected", "persistent")]
)
def test_compile_does_not_specialise_sizes(fresh_dynamo, device, cell, algorithm):
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    ours, _ = layers(cell, device, algorithm=algorithm)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    compiled(torch.randn(6, 5, I, dtype=torch.float64, device=device))
    graphs = counter.frame_count
    for steps, batch in ((9, 8), (40, 11), (100, 2)):
        compiled(torch.randn(steps, batch, I, dtype=torch.float64, device=device))
    assert counter.frame_count == graphs


# On the CPU a C++ compiler runs for each: both are one opaque op there, so one of them stands for the other.
@pytest.mark.parametrize(
    ("device", "algorithm"),
    [("cpu", "scan"), *(pytest.param("cuda", a, marks=pytest.mark.cuda) for a in ("persistent", "scan", "torch"))],
)
def test_compile_inductor(fresh_dynamo, quick_inductor, device, algorithm):
    """One case through code generation; and a long sequence does not unroll."""
    ours, theirs = layers("gru", device, algorithm=algorithm, num_layers=2)
    compiled = torch.compile(ours, fullgraph=True)
    x = torch.randn(500, 2, I, dtype=torch.float64, device=device)
    assert_layers_agree(ours, theirs, x, run=lambda layer, x, hx: compiled(x, hx) if layer is ours else layer(x, hx))


@devices
@pytest.mark.parametrize("algorithm", ["persistent", "torch"])
def test_compile_dropout(fresh_dynamo, device, algorithm):
    ours, theirs = layers("gru", device, algorithm=algorithm, num_layers=2, dropout=0.5)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 5, I, dtype=torch.float64, device=device)
    assert not torch.equal(compiled(x)[0], compiled(x)[0])
    ours.eval(), theirs.eval()
    assert_same(flat(compiled(x)), flat(theirs(x)))
    rate = weft.nn.RNN(1, 1, 2, "relu", False, dropout=0.3, device=device, algorithm=algorithm)
    for name, parameter in rate.named_parameters():
        torch.nn.init.constant_(parameter, float("ih" in name))
    output = torch.compile(rate, fullgraph=True, backend="aot_eager")(torch.ones(5, 4000, 1, device=device))[0]
    assert abs((output != 0).float().mean().item() - 0.7) < 0.016


@devices
@pytest.mark.parametrize(
    ("cell", "algorithm"), [("gru", "persistent"), ("lstm", "auto"), ("projected", "persistent"), ("projected", "auto")]
)
def test_compile_packed(fresh_dynamo, device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm, num_layers=2, bidirectional=True)
    x = torch.randn(6, 4, I, dtype=torch.float64, device=device)

    def call(layer, data, batch_sizes, hx):
        return layer(rnn.PackedSequence(data, batch_sizes), hx)

    compiled = torch.compile(functools.partial(call, ours), fullgraph=True, backend="aot_eager")

    def run(layer, x, hx):
        packed = rnn.pack_padded_sequence(x, [6, 4, 4, 1])
        arguments = packed.data, packed.batch_sizes, hx
        return compiled(*arguments) if layer is ours else call(layer, *arguments)

    assert_layers_agree(ours, theirs, x, run=run)
    assert_layers_agree(ours, theirs, x, states(ours, 4), run=run)


@devices
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_compile_functional_call(fresh_dynamo, device, cell):
    ours, _ = layers(cell, device, algorithm="scan")
    x = torch.randn(4, 2, I, dtype=torch.float64, device=device)
    parameters = {k: torch.randn_like(v) for k, v in ours.named_parameters()}
    gradient = torch.func.grad(functools.partial(_loss, ours, x))
    found = torch.compile(gradient, fullgraph=True, backend="aot_eager")(parameters)
    assert_same(list(found.values()), list(gradient(parameters).values()))
    assert all(w is p for w, p in zip(ours._flat_weights, ours.parameters(), strict=True))


@devices
@pytest.mark.parametrize("algorithm", ["persistent", "scan", "torch"])
@pytest.mark.parametrize(("cell", "strict"), [(cell, False) for cell in LAYERS] + [("gru", True)])
def test_export(fresh_dynamo, device, cell, algorithm, strict):
    ours, _ = layers(cell, device, algorithm=algorithm, num_layers=2, bidirectional=True)
    ours.eval()
    example = torch.randn(6, 5, I, dtype=torch.float64, device=device)
    sizes = {0: torch.export.Dim("T"), 1: torch.export.Dim("B")}
    program = torch.export.export(ours, (example,), dynamic_shapes=(sizes,), strict=strict)
    x = torch.randn(70, 2, I, dtype=torch.float64, device=device)
    assert_same(flat(program.module()(x)), flat(ours(x)))


@devices
@algorithms
def test_symbolic_tracing(device, algorithm):
    """Sizes that are symbols outside of torch.compile."""
    from torch.fx.experimental.proxy_tensor import make_fx  # here, because it takes seconds

    ours, _ = layers("gru", device, torch.float32, algorithm)
    x = torch.randn(6, 5, I, device=device)
    with torch.no_grad():
        traced = make_fx(lambda x: ours(x)[0], tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
        assert relative_error(traced(x), ours(x)[0]) <= BOUNDS[torch.float32]


@devices
@cells
def test_torch_op_check(device, cell):
    ours, _ = layers(cell, device, num_layers=2, bidirectional=True)
    x = torch.randn(4, 2, I, dtype=torch.float64, device=device, requires_grad=True)
    state = [s.requires_grad_() for s in states(ours, 2)]
    weights = list(ours.parameters())
    arguments = x, state, weights, None, ours.mode.lower(), True, 2, True, None, torch.float64, torch.float64
    torch.library.opcheck(torch.ops.weft.torch_rnn.default, arguments)
    output = torch.ops.weft.torch_rnn(*arguments)[0]
    (first,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        first.sum().backward()


@devices
@pytest.mark.parametrize(("cell", "options"), [*((cell, {}) for cell in CELLS), ("lstm", {"proj_size": 2})])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_torch_op_by_the_reference(monkeypatch, device, cell, options, packed, autocast):
    """What a compiled graph does with more steps than cuDNN takes is what it does with fewer."""
    dtype = torch.float64 if autocast is None else torch.float32
    ours, _ = layers(cell, device, dtype, num_layers=2, bidirectional=True, **options)
    x = torch.randn(6, 3, I, dtype=dtype, device=device)
    if packed:
        x, batch_sizes, _, _ = rnn.pack_padded_sequence(x, [6, 4, 1])
    x.requires_grad_()
    state = [s.requires_grad_() for s in states(ours, 3)]
    weights = list(ours.parameters())
    with torch.autocast(device, autocast, enabled=autocast is not None):
        dtypes = prepare(ours, rnn.PackedSequence(x, batch_sizes) if packed else x, tuple(state)).dtypes
    rest = batch_sizes if packed else None, ours.mode.lower(), True, 2, True, autocast, *dtypes
    found, asked = [], set()
    for too_long in (True, False):

        def answer(*size, too_long=too_long):
            asked.add(size)
            return "too long" if too_long else None

        monkeypatch.setattr(torch_rnn, "why_not_cudnn", answer)
        result = torch.ops.weft.torch_rnn(x, state, weights, *rest)
        grads = torch.autograd.grad(sum(r.pow(2).sum() for r in result), [x, *state, *weights])
        found.append([*result, *grads])
    assert asked == {(device, ours.mode.lower(), 2 * ours.hidden_size, 6, 11 if packed else 18)}
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        # A ReLU near zero may be on in one and off in the other.
        assert relative_error(a, b) <= (2 if cell == "relu" else 1) * BOUNDS[autocast or dtype]


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("cell", "dtype", "algorithm"),
    [("tanh", torch.float64, "auto"), ("tanh", torch.float64, "compiled"), ("gru", torch.float32, "torch")],
)
def test_more_steps_than_cudnn_takes(fresh_dynamo, cell, dtype, algorithm):
    steps = torch_limits.CUDNN_MAX_STEPS + 1
    expected, _ = layers(cell, "cpu", torch.float64, "persistent")
    ours = copy.deepcopy(expected).to("cuda", dtype)
    ours.algorithm = "torch" if algorithm == "compiled" else algorithm
    assert weft.explain(ours, torch.empty(steps, 1, I, dtype=dtype, device="cuda")).algorithm == "persistent"
    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if algorithm == "compiled" else ours
    x = torch.randn(steps, 1, I, dtype=torch.float64)
    outgoing = torch.randn(steps, 1, H, dtype=torch.float64)
    found = []
    for call, layer in ((run, ours), (expected, expected)):
        like = layer.weight_ih_l0
        inner = x.to(like).requires_grad_()
        output, final = call(inner)
        grads = torch.autograd.grad([output, final], [inner, *layer.parameters()], [outgoing.to(like), 2 * final])
        found.append([output, final, *grads])
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) <= 10 * BOUNDS[dtype]  # sums over all steps
