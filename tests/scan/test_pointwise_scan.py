"""weft.scan.pointwise_scan: values and gradients against the reference, algorithms, errors, traces, the report."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import weft
from torch import Tensor
from torch.nn import functional as F
from weft._scan import newton, step_trace
from weft.scan import newton_report, pointwise_scan, pointwise_scan_reference

from tests.common import relative_error
from tests.fresh import python
from tests.scan.pointwise_steps import STEPS, StepCase, arguments

ALGORITHMS = ("auto", "walk", "newton", "reference")
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
"""Of the relative error of the norm: a rounding a step, which the step's derivative forgets."""


def leaves(lists) -> list[Tensor]:
    return [t for a in lists for t in (a if isinstance(a, tuple) else (a,))]


def mapped(f, lists):
    return tuple(tuple(map(f, a)) if isinstance(a, tuple) else f(a) for a in lists)


def both(scan, case: StepCase, lists, grads=None, **keywords) -> tuple[list[Tensor], list[Tensor]]:
    """The states, and the gradients of all operands."""
    lists = mapped(lambda t: t.detach().requires_grad_(), lists)
    found = scan(case.step, *lists, **keywords)
    states = list(found) if isinstance(found, tuple) else [found]
    if grads is None:
        grads = [torch.arange(s.numel(), device=s.device).cos().view(s.shape).to(s.dtype) for s in states]
    return states, torch.autograd.grad(states, leaves(lists), grads, materialize_grads=True)


def compare(case: StepCase, lists, dtype, **keywords) -> None:
    wide = mapped(lambda t: t.double(), lists)
    reverse = keywords.get("reverse", False)
    states, gradients = both(pointwise_scan, case, lists, **keywords)
    grads = [torch.arange(s.numel(), device=s.device).cos().view(s.shape).to(s.dtype).double() for s in states]
    want, wanted = both(pointwise_scan_reference, case, wide, grads, reverse=reverse)
    for have, right in zip(states, want, strict=True):
        assert have.dtype == dtype
        assert have.shape == right.shape
        assert relative_error(have.double(), right) < BOUNDS[dtype]
    for have, right in zip(gradients, wanted, strict=True):
        assert relative_error(have.double(), right) < 20 * BOUNDS[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gru", "slow_gru", "lstm", "spiking", "decay"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms(name, algorithm, device):
    case = STEPS[name]
    compare(case, arguments(case, 150, (2, 5), device=device), torch.float64, algorithm=algorithm)
    lists = arguments(case, 37, (3, 2, 3), torch.float64, device)
    compare(case, lists, torch.float64, algorithm=algorithm, reverse=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algorithm", ["walk", "newton"])
def test_dtypes(dtype, algorithm, device):
    for name in ("gru", "lstm"):
        case = STEPS[name]
        compare(case, arguments(case, 101, (3, 7), dtype, device), dtype, algorithm=algorithm)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(), (1,), (300,), (2, 130, 2)])
@pytest.mark.parametrize("algorithm", ["walk", "newton"])
def test_shapes(shape, algorithm, device):
    case = STEPS["gru"]
    generator = torch.Generator().manual_seed(1)
    drawn = lambda *size: torch.randn(size, generator=generator, dtype=torch.float64).to(device)  # noqa: E731
    inputs = tuple(drawn(70, *shape) for _ in range(3))
    parameters = (drawn(*shape[-1:]), drawn(*(1 for _ in shape)), drawn(*shape[:-1], 1) if shape else drawn())
    compare(case, (drawn(*shape), inputs, parameters), torch.float64, algorithm=algorithm)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 64, 129])
def test_lengths(T, device):
    case = STEPS["lstm"]
    for algorithm in ("walk", "newton"):
        compare(case, arguments(case, T, (2, 3), device=device), torch.float64, algorithm=algorithm)


@pytest.mark.parametrize("size", [(0, (2, 3)), (4, (0, 3)), (4, (2, 0)), (0, (0,))])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_empty(algorithm, size):
    case = STEPS["lstm"]
    lists = mapped(lambda t: t.requires_grad_(), arguments(case, *size))
    states = pointwise_scan(case.step, *lists, algorithm=algorithm)
    assert all(s.shape == (size[0], *size[1]) for s in states)
    sum(s.sum() for s in states).backward()
    assert all(t.grad is None or not t.grad.any() for t in leaves(lists))


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    case = STEPS["gru"]
    init, inputs, parameters = arguments(case, 40, (4, 6), device=device)
    views = (
        init.t().contiguous().t(),
        (inputs[0].transpose(0, 1).contiguous().transpose(0, 1), torch.cat([inputs[1], inputs[1]], -1)[..., :6],
         inputs[2].permute(2, 1, 0).contiguous().permute(2, 1, 0)),
        (parameters[0].repeat_interleave(2)[::2], *parameters[1:]),
    )  # fmt: skip
    for algorithm in ("walk", "newton"):
        want = both(pointwise_scan, case, (init, inputs, parameters), algorithm=algorithm)
        have = both(pointwise_scan, case, views, algorithm=algorithm)
        for a, b in zip((*want[0], *want[1]), (*have[0], *have[1]), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["walk", "newton"])
def test_only_some_gradients(algorithm, device):
    case = STEPS["lstm"]
    init, inputs, parameters = arguments(case, 50, (2, 3), device=device)
    inputs[1].requires_grad_()
    parameters[3].requires_grad_()
    h, _ = pointwise_scan(case.step, init, inputs, parameters, algorithm=algorithm)
    found = torch.autograd.grad(h[-1].sum(), [inputs[1], parameters[3]])
    h, _ = pointwise_scan_reference(case.step, init, inputs, parameters)
    for have, want in zip(found, torch.autograd.grad(h[-1].sum(), [inputs[1], parameters[3]]), strict=True):
        assert relative_error(have, want) < 1e-11


@pytest.mark.parametrize("algorithm", ["walk", "newton"])
def test_gradients_of_gradients(algorithm):
    case = STEPS["gru"]
    lists = mapped(lambda t: t.requires_grad_(), arguments(case, 12, (2,)))

    def run(*tensors):
        return pointwise_scan(case.step, tensors[0], tensors[1:4], tensors[4:], algorithm=algorithm)

    assert torch.autograd.gradcheck(run, leaves(lists))
    assert torch.autograd.gradgradcheck(run, leaves(lists))


def test_the_same_tensor_twice():
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)

    def step(h, x, p):
        return torch.tanh(h * x[0] + x[1])

    found = [
        torch.autograd.grad(scan(step, x[0], (x, x)).sin().sum(), x, create_graph=True)
        for scan in (pointwise_scan, pointwise_scan_reference)
    ]
    assert relative_error(found[0][0], found[1][0]) < 1e-12
    second = [torch.autograd.grad(f[0].square().sum(), x)[0] for f in found]
    assert relative_error(*second) < 1e-12


def test_transforms():
    case = STEPS["gru"]
    init, inputs, parameters = arguments(case, 9, (3,))
    run = lambda h: pointwise_scan(case.step, h, inputs, parameters).square().sum()  # noqa: E731
    gradient = torch.func.grad(run)(init)
    h = init.clone().requires_grad_()
    assert relative_error(gradient, torch.autograd.grad(run(h), h)[0]) < 1e-12
    states = torch.func.vmap(lambda h: pointwise_scan(case.step, h, inputs, parameters))(torch.stack([init, 2 * init]))
    assert relative_error(states[0], pointwise_scan(case.step, init, inputs, parameters)) < 1e-12
    _, tangent = torch.func.jvp(run, (init,), (torch.ones_like(init),))
    assert relative_error(tangent, gradient.sum()) < 1e-12
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(init, torch.ones_like(init))
        out = torch.autograd.forward_ad.unpack_dual(run(dual))
    assert relative_error(out.tangent, gradient.sum()) < 1e-12


def test_autocast_takes_the_widest():
    case = STEPS["gru"]
    init, inputs, parameters = arguments(case, 9, (3,), torch.float32)
    inputs = (inputs[0].bfloat16(), *inputs[1:])
    with pytest.raises(TypeError, match=r"inputs\[0\] must be torch.float32, as init is, got torch.bfloat16"):
        pointwise_scan(case.step, init, inputs, parameters)
    with torch.autocast("cpu", torch.bfloat16):
        assert pointwise_scan(case.step, init, inputs, parameters).dtype == torch.float32


def test_compile_breaks_its_graph():
    case = STEPS["gru"]
    lists = arguments(case, 9, (3,), torch.float32)

    @torch.compile(backend="eager")
    def run(h, x, p):
        return pointwise_scan(case.step, h, x, p).sin()

    assert torch.equal(run(*lists), pointwise_scan(case.step, *lists).sin())


def test_many_states_run_as_the_reference():
    step = lambda h, x, p: tuple(0.5 * a + x for a in h)  # noqa: E731
    init = tuple(torch.randn(4, dtype=torch.float64) for _ in range(9))
    x = torch.randn(20, 4, dtype=torch.float64)
    for have, want in zip(pointwise_scan(step, init, x), pointwise_scan_reference(step, init, x), strict=True):
        assert torch.equal(have, want)


# The step. -----------------------------------------------------------------------------------------------------------

X = torch.linspace(-2, 2, 60, dtype=torch.float64).view(20, 3)
H = torch.tensor([0.1, -0.4, 0.9], dtype=torch.float64)

OPERATIONS = {
    "tanh": lambda h, x, p: torch.tanh(h + x),
    "softplus": lambda h, x, p: F.softplus(h - x),
    "silu": lambda h, x, p: F.silu(h) + x,
    "gelu": lambda h, x, p: F.gelu(x) * 0.5 + h.sigmoid(),
    "clamp": lambda h, x, p: (h + x).clamp(-1, 1),
    "exp": lambda h, x, p: torch.exp(-(h**2)) + x,
    "log": lambda h, x, p: torch.log(h * h + 1 + x * x),
    "sqrt": lambda h, x, p: torch.sqrt(h * h + x * x + 1),
    "where": lambda h, x, p: torch.where(x > h, x, 0.5 * h),
    "where of numbers": lambda h, x, p: torch.where(x > 0, 1.0, 0.0) + 0.5 * h,
    "max": lambda h, x, p: torch.maximum(h * 0.9, x),
    "bools": lambda h, x, p: h * ((x > 0) & (h < 1)).to(h.dtype) + x,
    "in place": lambda h, x, p: (h + x).mul_(0.5).tanh_(),
    "zeros_like": lambda h, x, p: torch.where(x > 0, h, torch.zeros_like(h)) + x,
    "constants": lambda h, x, p: h * torch.tensor(0.5) + x,
    "sin": lambda h, x, p: torch.sin(h) + torch.cos(x),
    "erf": lambda h, x, p: torch.erf(h + x),
    "log_sigmoid": lambda h, x, p: F.logsigmoid(h + x),
    "a copy in place": lambda h, x, p: h.clone().mul_(0.5).add_(x),
    "lerp": lambda h, x, p: torch.lerp(h, x, 0.3),
    "rsub": lambda h, x, p: 1 - h * torch.sigmoid(x),
    "div": lambda h, x, p: x / (1 + h.abs()),
    "nothing of h": lambda h, x, p: x * 2,
    "the same": lambda h, x, p: h,
    "floor": lambda h, x, p: torch.floor(x) + 0.5 * h,  # by the reference
    "no_grad": lambda h, x, p: h * 0.5 + _without_grad(x),  # by the reference
}


def _without_grad(x):
    with torch.no_grad():
        return x * 2


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("algorithm", ["walk", "newton"])
def test_operations(name, algorithm):
    case = StepCase(OPERATIONS[name], 1, 1, 0, (False, False, True))
    compare(case, (H.clone(), X.clone(), ()), torch.float64, algorithm=algorithm)


@pytest.mark.parametrize("name", [*OPERATIONS, *STEPS])
def test_functions_are_written_down_as_their_dispatch_is(name, monkeypatch):
    """A trace takes torch's functions by themselves where it knows them, else what they dispatch to."""
    case = STEPS.get(name) or StepCase(OPERATIONS[name], 1, 1, 1, (False, False, False))
    single = tuple(not several for several in case.tuples)
    sizes = torch.Size((3, 2)), [torch.Size((2,))] * case.parameters
    first = step_trace._trace("test", case.step, case.states, case.inputs, single, torch.float32, *sizes)
    monkeypatch.setattr(step_trace, "_FUNCTIONS", {})
    assert step_trace._trace("test", case.step, case.states, case.inputs, single, torch.float32, *sizes) == first


_FIRST_TRACE = """
import sys, torch, weft
def step(h, x, p):
    fired = (h > 1).to(h.dtype)
    h = torch.where(x > 0, torch.tanh(h * p + x) - 0.5 * x, (1 - h) / (2 / p) + x.sigmoid() ** 2 + fired.detach())
    return torch.maximum(-h, torch.nn.functional.silu(x))
weft.scan.pointwise_scan(step, torch.zeros(3), torch.zeros(4, 3), torch.ones(3))
print(*(name for name in ("torch.distributed.tensor", "torch._dynamo", "sympy") if name in sys.modules))
"""


def test_a_first_trace_imports_nothing_slow():
    """What torch imports before it dispatches to Python for the first time takes seconds."""
    run = python(_FIRST_TRACE)
    assert run.returncode == 0 and run.stdout.split() == [], run.stderr


def test_detach_stops_the_gradient():
    x = X.clone().requires_grad_()
    pointwise_scan(lambda h, x, p: h.detach() + x, H, x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_closures_and_attributes_are_seen_anew():
    factor = 1.0

    def step(h, x, p):
        return factor * h + x

    first = pointwise_scan(step, H, X)
    factor = 0.5
    assert not torch.equal(pointwise_scan(step, H, X), first)
    assert torch.equal(pointwise_scan(step, H, X), pointwise_scan_reference(step, H, X))

    class Cell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 1.0
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

        def step(self, h, x, p):
            return self.factor * h * 0.1 + x * self.scale

    cell = Cell()
    for factor in (1.0, 0.25):
        cell.factor = factor
        cell.scale.mul_(2)
        assert relative_error(pointwise_scan(cell.step, H, X), pointwise_scan_reference(cell.step, H, X)) < 1e-14
    partial = functools.partial(lambda k, h, x, p: k * h + x, 0.3)
    assert relative_error(pointwise_scan(partial, H, X), pointwise_scan_reference(partial, H, X)) < 1e-14


def test_a_step_is_traced_once():
    calls = []

    def step(h, x, p):
        calls.append(1)
        return torch.tanh(h + x)

    seen = [len(calls)]
    for _ in range(3):
        pointwise_scan(lambda h, x, p: torch.tanh(h + x * 0.5), H, X)
    pointwise_scan(step, H, X)
    seen.append(len(calls))
    assert seen[1] <= 2


def hooked(h):
    if h.requires_grad:
        h.register_hook(lambda grad: 2 * grad)
    return h


BAD_STEPS = {
    "sum": (lambda h, x, p: h + x.sum(), ValueError, r"aten\.sum"),
    "matmul": (lambda h, x, p: h @ x.unsqueeze(-1), ValueError, r"aten\."),
    "roll": (lambda h, x, p: h.roll(1), ValueError, r"aten\.roll"),
    "cumsum": (lambda h, x, p: h.cumsum(0), ValueError, r"aten\.cumsum"),
    "index": (lambda h, x, p: h[0] + x, ValueError, r"aten\.select"),
    "random": (lambda h, x, p: h + torch.rand_like(x), ValueError, r"aten\.rand_like"),
    "changes its argument": (lambda h, x, p: h.add_(x), ValueError, "change what it is given"),
    "detach_": (lambda h, x, p: (h * x).detach_() + x, ValueError, "detach_"),
    "hook": (lambda h, x, p: hooked(h * x), ValueError, "register_hook"),
    "structure": (lambda h, x, p: (h, x), ValueError, "step must return a tensor"),
    "nothing": (lambda h, x, p: None, ValueError, "step must return a tensor"),
    "shape": (lambda h, x, p: torch.zeros(()), ValueError, "must have the shape of init"),
    "dtype": (lambda h, x, p: (h + x).float(), TypeError, "must be torch.float64"),
    "bool": (lambda h, x, p: h > x, TypeError, "must be torch.float64"),
    "item": (lambda h, x, p: h * x.item(), (RuntimeError, ValueError), None),
    "if": (lambda h, x, p: h if (x > 0).all() else x, (RuntimeError, ValueError), None),
    "tolist": (lambda h, x, p: h * x.tolist()[0], (RuntimeError, ValueError), None),
    "numpy": (lambda h, x, p: h * x.numpy()[0], (RuntimeError, ValueError), None),
    "own error": (lambda h, x, p: {}["absent"], KeyError, "absent"),
    "its own ZeroDivisionError": (lambda h, x, p: h / (1 // 0), ZeroDivisionError, None),
    "requires grad": (lambda h, x, p: h + _WEIGHT * x, RuntimeError, "requires grad"),
}
_WEIGHT = torch.ones(3, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", BAD_STEPS)
@pytest.mark.parametrize("scan", [pointwise_scan, pointwise_scan_reference])
def test_bad_steps(name, scan):
    step, error, match = BAD_STEPS[name]
    with pytest.raises(error, match=match):
        scan(step, H, X)


STEP = STEPS["gru"].step
BAD_ARGUMENTS = [
    (TypeError, "step must be callable", ("tanh", H, X)),
    (TypeError, "init must be a Tensor", (STEP, 1.0, X)),
    (TypeError, r"init\[1\] must be a Tensor", (STEP, (H, 1.0), X)),
    (TypeError, r"inputs\[0\] must be a Tensor", (STEP, H, ([1.0],))),
    (TypeError, r"parameters\[0\] must be a Tensor", (STEP, H, X, (0.5,))),
    (TypeError, "inputs must be torch.float64", (STEP, H, X.float())),
    (TypeError, "init must be float16", (STEP, H.long(), X.long())),
    (TypeError, r"parameters\[0\] must be torch.float64", (STEP, H, X, (H.float(),))),
    (ValueError, "init must not be empty", (STEP, (), X)),
    (ValueError, "inputs must not be empty", (STEP, H, ())),
    (ValueError, r"init\[1\] must have the shape", (STEP, (H, H[:2]), X)),
    (ValueError, "inputs must be", (STEP, H, X[:, :2])),
    (ValueError, "inputs must be", (STEP, H, X[0])),
    (ValueError, r"inputs\[1\] must have as many steps", (STEP, H, (X, X[:3]))),
    (ValueError, "parameters must broadcast", (STEP, H, X, X)),
    (RuntimeError, "inputs must be on the device", (STEP, H, X.to("meta"))),
]


@pytest.mark.parametrize(("error", "match", "given"), BAD_ARGUMENTS)
def test_bad_arguments(error, match, given):
    for scan in (pointwise_scan, pointwise_scan_reference):
        with pytest.raises(error, match=match):
            scan(*given)


@pytest.mark.parametrize("view", [lambda t: t.detach(), lambda t: t.expand(20, 3)], ids=["detach", "expand"])
def test_what_a_view_is_of_may_not_change(view):
    def step(h, x, p):
        y = 0.5 * h + x
        z = view(y)
        y.mul_(2)
        return z

    with pytest.raises(ValueError, match=r"may not change what it is given or views, it ran aten\.mul_"):
        pointwise_scan(step, X, X[None].repeat(3, 1, 1))


def test_bad_algorithm():
    with pytest.raises(ValueError, match="algorithm must be one of"):
        pointwise_scan(STEP, H, (X, X, X), (H, H, H), algorithm="fast")


@pytest.mark.parametrize("program", ["", "1 1 0; next 9", "1 1 0; foo 0; next 3; jacobian 3; vjp 3 3", "0 1 0;"])
def test_bad_programs(program):
    with pytest.raises(ValueError, match="impossible part"):
        torch.ops.weft.pointwise_scan([H], [X], [], program)


# Chunks of time. -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["gru", "slow_gru", "lstm", "chaos"])
def test_every_step_satisfies_the_recurrence(name, dtype, device):
    case = STEPS[name]
    init, inputs, parameters = arguments(case, 1300, (1, 3), dtype, device)
    with newton_report() as report:
        found = pointwise_scan(case.step, init, inputs, parameters, algorithm="newton")
    states = found if case.tuples[0] else (found,)
    starts = init if case.tuples[0] else (init,)
    before = [torch.cat([h[None], s[:-1]]).double() for h, s in zip(starts, states, strict=True)]
    wide = mapped(lambda t: t.double(), (inputs, parameters))
    after = case.step(tuple(before) if case.tuples[0] else before[0], *wide)
    near = 2.0**-48 if dtype == torch.float64 else 2.0**-20
    for want, have in zip(after if case.tuples[0] else (after,), states, strict=True):
        assert ((want - have).abs() <= near * have.abs().clamp(min=1)).all()
    (run,) = report.runs
    assert run.op == "pointwise_scan"
    assert run.steps == 1300
    assert 1 <= run.rounds <= run.chunks
    assert run.chunks > 1
    assert run.residual <= (2.0**-51 if dtype == torch.float64 else 2.0**-22)
    assert (run.sequential > 0) == (name == "chaos")
    assert run.redone >= 0
    assert "pointwise_scan" in str(report)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_state_meets_infinity(dtype, device):
    """Where the guess of a chunk's start has run off, the walk from where it does start has met nothing."""
    case = STEPS["logistic"]
    init, inputs, parameters = arguments(case, 4000, (5,), dtype, device)
    h = pointwise_scan(case.step, init, inputs, parameters, algorithm="newton")
    assert (h.abs() <= 1).all()
    want = case.step(torch.cat([init[None], h[:-1]]), inputs, parameters)
    assert ((want - h).abs() <= (2.0**-48 if dtype == torch.float64 else 2.0**-20)).all()


def test_reports_nest_and_are_of_their_thread():
    case = STEPS["gru"]
    lists = arguments(case, 600, (4,))
    run = functools.partial(pointwise_scan, case.step, *lists, algorithm="newton")
    with newton_report() as outer:
        run()
        with newton_report() as inner:
            run()
            run()
    run()
    assert (len(outer.runs), len(inner.runs)) == (1, 2)
    with newton_report() as report:
        pointwise_scan(case.step, *lists, algorithm="walk")
    assert report.runs == []
    assert str(report) == 'nothing ran as "newton"'


@pytest.mark.parametrize("device", DEVICES)
def test_channels_are_independent(device):
    case = STEPS["gru"]
    lists = arguments(case, 400, (3, 5), torch.float32, device)
    clean = pointwise_scan(case.step, *lists, algorithm="newton")
    lists[1][2][100, 1, 2] = math.nan
    lists[1][0][5, 0, 0] = math.inf
    dirty = pointwise_scan(case.step, *lists, algorithm="newton")
    same = torch.ones(3, 5, dtype=torch.bool, device=device)
    same[1, 2] = same[0, 0] = False
    assert torch.equal(clean[:, same], dirty[:, same])
    assert dirty[100:, 1, 2].isnan().all()
    # Nor on how many there are, beyond how time is cut.
    alone = mapped(lambda t: t[..., :1, :] if t.dim() > 1 else t, lists)
    walked = [pointwise_scan(case.step, *a, algorithm="walk") for a in (lists, alone)]
    assert torch.equal(walked[0][:, :1], walked[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["walk", "newton"])
def test_the_same_bits(algorithm, device):
    case = STEPS["lstm"]
    lists = arguments(case, 300, (3, 40), torch.float32, device)
    first, second = (both(pointwise_scan, case, lists, algorithm=algorithm) for _ in range(2))
    for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_overflow_between_chunks(device):
    case = STEPS["decay"]
    x = -torch.ones(200, 3, dtype=torch.float32, device=device)
    p = torch.full((3,), 1e3, dtype=torch.float32, device=device)
    h = torch.zeros(3, dtype=torch.float32, device=device)
    grad = torch.zeros(200, 3, dtype=torch.float32, device=device)
    grad[5] = 1e-3
    _, found = both(pointwise_scan, case, (h, x, p), [grad], algorithm="newton")
    _, want = both(pointwise_scan_reference, case, (h, x, p), [grad])
    for have, right in zip(found, want, strict=True):
        assert relative_error(have, right) < 1e-5


@pytest.mark.parametrize("n", [1, 3])
def test_threads(n):
    """Beyond how many threads there are, nothing changes."""
    case = STEPS["gru"]
    lists = arguments(case, 500, (700,), torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n)
        found = both(pointwise_scan, case, lists, algorithm="newton")
    finally:
        torch.set_num_threads(before)
    want = both(pointwise_scan, case, lists, algorithm="newton")
    for a, b in zip((*found[0], *found[1]), (*want[0], *want[1]), strict=True):
        assert torch.equal(a, b)


def test_explain():
    case = STEPS["gru"]
    lists = arguments(case, 600, (4,))
    found = weft.explain(pointwise_scan, case.step, *lists)
    assert found.algorithm == "newton"
    assert "chunks" in found.reason
    assert weft.explain(pointwise_scan, case.step, *lists, algorithm="walk").algorithm == "walk"
    floor = weft.explain(pointwise_scan, lambda h, x, p: torch.floor(h) + x[0], *lists)
    assert floor.algorithm == "reference"
    assert "aten.floor" in floor.reason


def test_a_report_of_more_steps_than_32_bits_count():
    """The mean of the sequences, and the residual from the bits of a float."""
    residual = torch.tensor([2.0**-23, 0.0]).view(torch.int32).long()
    rounds, redone, alone = torch.tensor([3, 2]), torch.tensor([6 * 10**9, 0]), torch.tensor([0, 1])
    run = newton._read("gru", 10**9, 66, torch.stack((rounds, redone, residual, alone), 1))
    assert run == ("gru", 10**9, 66, 3, 3.0, 2.0**-23, 0.5)
