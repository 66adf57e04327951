"""ScanSequential and plan_chain against torch.nn.Sequential."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import prune as torch_prune
from weft._sparse import jacobians as generators
from weft.scan import ScanSequential, plan_chain
from weft.sparse import register_jacobian

from tests.common import DEVICES, assert_close

device = pytest.mark.parametrize("device", DEVICES)
SCHEDULES = ["auto", "linear", "blelloch", 1, 2]
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def lenet() -> list[nn.Module]:
    return [
        nn.Conv2d(1, 3, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(36, 12), nn.Sigmoid(), nn.Linear(12, 5),
    ]  # fmt: skip


def everything() -> list[nn.Module]:
    return [
        nn.Identity(), nn.Conv2d(1, 4, 3, 2, 1, padding_mode="circular"), nn.BatchNorm2d(4).eval(),
        nn.LeakyReLU(0.1, True),
        nn.Sequential(nn.Dropout(0.3), nn.Conv2d(4, 4, 3, groups=2), nn.Sequential(nn.GELU())),
        nn.AdaptiveAvgPool2d(3), nn.Flatten(2), nn.Conv1d(4, 2, 3), nn.ReLU(inplace=True), nn.Linear(7, 6),
        nn.Flatten(),
        nn.BatchNorm1d(12, affine=False).eval(), nn.Linear(12, 3, bias=False),
    ]  # fmt: skip


def pair(layers: list, device: str, **options) -> tuple[nn.Sequential, ScanSequential]:
    plain = nn.Sequential(*layers).to(device)
    return plain, ScanSequential(*copy.deepcopy(layers), **options).to(device)


def gradients(net: nn.Module, x: Tensor, seed: int = 3) -> list[Tensor | None]:
    net.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    torch.manual_seed(seed)
    out = net(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in net.parameters())]


def check(plain: nn.Module, scan: nn.Module, x: Tensor) -> None:
    found, want = gradients(scan, x), gradients(plain, x)
    assert torch.equal(found[0], want[0])
    for f, w in zip(found[1:], want[1:], strict=True):
        assert (f is None) == (w is None)
        if f is not None:
            assert_close(f, w, 1e-5)


@device
@schedules
@pytest.mark.parametrize("layers", [lenet, everything])
@pytest.mark.parametrize("prune", [False, True])
def test_gradients(layers, prune: bool, schedule, device: str) -> None:
    plain, scan = pair(layers(), device, schedule=schedule, prune=prune)
    x = torch.randn(3, 1, 16 if layers is lenet else 15, 16 if layers is lenet else 15, device=device)
    for needs in (True, False):
        check(plain, scan, x.requires_grad_(needs))


@device
def test_pooling(device: str) -> None:
    """Windows that overlap or leave gaps, NaN, and a hook."""
    plain, scan = pair([nn.Conv2d(1, 2, 3), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.Flatten()], device)
    x = torch.randn(2, 1, 8, 9, device=device, requires_grad=True)
    check(plain, scan, x)
    x.data[0, 0, 2] = float("nan")
    out = scan(x)
    assert torch.equal(out.isnan(), plain(x).isnan()) and out.isnan().any()
    x.data.normal_()
    seen: list[Tensor] = []
    scan[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    check(plain, scan, x)
    assert len(seen) == 1
    plain, scan = pair([nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, stride=3, dilation=2)], device)
    check(plain.double(), scan.double(), x.detach().double())


@device
def test_frozen_parameters_and_empty_batches(device: str) -> None:
    for frozen in range(10):
        plain, scan = pair(lenet(), device)
        for net in (plain, scan):
            for module in list(net)[:frozen]:
                module.requires_grad_(False)
        for needs in (True, False):
            check(plain, scan, torch.randn(2, 1, 16, 16, device=device).requires_grad_(needs))
    plain, scan = pair(lenet(), device)
    check(plain, scan, torch.randn(0, 1, 16, 16, device=device).requires_grad_())


@device
def test_within_a_larger_model_and_twice_in_one_graph(device: str) -> None:
    plain, scan = pair([nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)], device)

    class Twice(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.sin(self.net(x * 2)) + x)

    check(Twice(plain), Twice(scan), torch.randn(3, 6, device=device).requires_grad_())


@device
def test_a_module_twice_and_shared_parameters(device: str) -> None:
    layer = nn.Linear(5, 5)
    other = nn.Linear(5, 5)
    other.weight = layer.weight
    layers = [layer, nn.Tanh(), layer, other, nn.ReLU(inplace=True), layer]
    plain, scan = nn.Sequential(*layers).to(device), ScanSequential(*layers).to(device)
    x = torch.randn(3, 5, device=device).requires_grad_()
    want = [g if g is None else g.clone() for g in gradients(plain, x)]
    for f, w in zip(gradients(scan, x), want, strict=True):
        assert_close(f, w, 1e-5)


@device
def test_dropout_draws_the_same_numbers(device: str) -> None:
    for p in (0.0, 0.3, 1.0):
        plain, scan = pair([nn.Linear(40, 40), nn.Dropout(p), nn.Linear(40, 30), nn.Dropout(p, inplace=True)], device)
        check(plain, scan, torch.randn(5, 40, device=device).requires_grad_())
        torch.manual_seed(1)
        plain(torch.ones(5, 40, device=device))
        a = torch.rand(3, device=device)
        torch.manual_seed(1)
        scan(torch.ones(5, 40, device=device))
        assert torch.equal(a, torch.rand(3, device=device))


@device
def test_pruning_is_noticed(device: str) -> None:
    plain, scan = pair(lenet(), device, prune=True)
    x = torch.randn(2, 1, 16, 16, device=device).requires_grad_()
    check(plain, scan, x)
    for net in (plain, scan):
        for module in (net[0], net[3], net[7]):
            torch_prune.l1_unstructured(module, "weight", 0.7)
    whole = plan_chain(ScanSequential(*scan, prune=False), x).flops
    check(plain, scan, x)
    assert plan_chain(scan, x).flops < whole
    with torch.no_grad():
        for net in (plain, scan):
            net[0].weight_mask.fill_(1)
    check(plain, scan, x)
    for net in (plain, scan):
        torch_prune.remove(net[3], "weight")
    check(plain, scan, x)


def test_it_is_a_sequential() -> None:
    layers = OrderedDict(conv=nn.Conv2d(1, 2, 3), act=nn.ReLU(), flat=nn.Flatten())
    net, plain = ScanSequential(layers, schedule="linear", prune=True), nn.Sequential(layers)
    assert isinstance(net, nn.Sequential) and list(net.state_dict()) == list(plain.state_dict())
    net.load_state_dict(plain.state_dict())
    assert net[0] is layers["conv"] and net.act is layers["act"] and len(net) == 3
    part = net[:2]
    assert isinstance(part, ScanSequential) and part.schedule == "linear" and part.prune and len(part) == 2
    net.append(nn.Linear(8, 2))
    assert repr(net).startswith("ScanSequential(\n  (conv): Conv2d(")
    x = torch.randn(2, 1, 4, 4)
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert again.schedule == "linear" and again.prune and torch.equal(again(x), net(x))
    check(nn.Sequential(*net), copy.deepcopy(net), x.requires_grad_())


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


def test_without_gradients_it_is_a_sequential_whatever_the_layers() -> None:
    net = ScanSequential(Unknown(), nn.BatchNorm1d(3))
    plain = nn.Sequential(Unknown(), nn.BatchNorm1d(3))
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert torch.equal(net(x), plain(x))
    net.requires_grad_(False)
    assert net(x).grad_fn is None
    assert ScanSequential()(x.requires_grad_()) is x
    assert ScanSequential(nn.Sequential(), nn.Sequential(nn.Sequential()))(x) is x


def test_lazy_layers() -> None:
    net, x = ScanSequential(nn.LazyLinear(3), nn.Tanh()), torch.randn(2, 4)
    for _ in range(2):
        found = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        want = torch.autograd.grad(nn.Sequential(*net)(x).square().sum(), list(net.parameters()))
        for a, b in zip(found, want, strict=True):
            assert_close(a, b)


def test_refusals() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(TypeError, match=r"layer 1: .*Unknown.*register_jacobian"):
        ScanSequential(nn.Linear(3, 3), Unknown())(x)
    with pytest.raises(RuntimeError, match=r"layer 1: BatchNorm1d.*every sample"):
        ScanSequential(nn.Linear(3, 3), nn.BatchNorm1d(3))(x)
    with pytest.raises(ValueError, match="schedule must be"):
        ScanSequential(nn.ReLU(), schedule="fast")
    with pytest.raises(TypeError, match="schedule must be"):
        ScanSequential(nn.ReLU(), schedule=1.5)
    y = ScanSequential(nn.Linear(3, 3), nn.Tanh())(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="ScanSequential is differentiable once"):
        (g.square().sum() + x.sum()).backward()


def test_a_second_derivative_is_refused_whatever_it_is_asked_of() -> None:
    net = ScanSequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    x, seed = torch.randn(4, 3, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    grads = torch.autograd.grad(net(x), (x, *net.parameters()), seed, create_graph=True)
    for g in grads:
        for of in (x, seed, *net.parameters()):
            with pytest.raises(RuntimeError, match="ScanSequential is differentiable once"):
                torch.autograd.grad(g.square().sum(), of, allow_unused=True, retain_graph=True)


def test_function_transforms() -> None:
    net = ScanSequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    same, x, v = nn.Sequential(*net), torch.randn(4, 3), torch.randn(4, 3)
    parameters = dict(net.named_parameters())

    def loss(m, values):
        return torch.func.functional_call(m, values, (x,)).square().sum()

    found, want = (torch.func.grad(functools.partial(loss, m))(parameters) for m in (net, same))
    for name in parameters:
        assert torch.allclose(found[name], want[name])
    for of in (
        lambda m: torch.func.jvp(m, (x,), (v,))[1],
        lambda m: torch.func.vmap(m)(x.view(2, 2, 3)),
        lambda m: torch.func.hessian(lambda y: m(y).square().sum())(x),
    ):
        assert torch.allclose(of(net), of(same))
    with forward_ad.dual_level():
        assert torch.equal(*(forward_ad.unpack_dual(m(forward_ad.make_dual(x, v))).tangent for m in (net, same)))


def test_the_graph_is_kept_where_one_asks_for_it() -> None:
    net = ScanSequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(2, 3, requires_grad=True)
    y = net(x).sum()
    first = torch.autograd.grad(y, (x, *net.parameters()), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(y, (x, *net.parameters())), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="freed the graph"):
        y.backward()


def test_a_registered_layer() -> None:
    register_jacobian(Cubed, lambda m, i, o: torch.diag_embed(3 * i.flatten(1) ** 2))
    plain, scan = pair([nn.Linear(4, 4), Cubed(), nn.Linear(4, 2)], "cpu")
    check(plain, scan, torch.randn(3, 4).requires_grad_())


def test_what_changed_after_the_forward_pass_is_noticed() -> None:
    net = ScanSequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    y = net(torch.randn(2, 3, requires_grad=True))
    with torch.no_grad():
        net[2].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* layer 2 .*changed in place"):
        y.sum().backward()


@device
@pytest.mark.parametrize("masked", [False, True], ids=["zeros", "torch.nn.utils.prune"])
def test_zeros_are_compared_once_a_step_and_patterns_made_once(masked, device, monkeypatch) -> None:
    plain, scan = pair(lenet(), device, prune=True)
    weights = [[m for m in net if hasattr(m, "weight")] for net in (plain, scan)]
    for modules in weights:
        for module in modules:
            if masked:
                torch_prune.l1_unstructured(module, "weight", 0.5)
            else:
                module.weight.data[0].zero_()
    x = torch.randn(2, 1, 16, 16, device=device, requires_grad=True)
    check(plain, scan, x)
    counts, equal, make = {"equal": 0, "make": 0}, torch.equal, generators._make_pruned

    def count(name: str, function):
        def counted(*args):
            counts[name] += 1
            return function(*args)

        return counted

    monkeypatch.setattr(generators, "_make_pruned", count("make", make))
    monkeypatch.setattr(generators.torch, "equal", count("equal", equal))
    gradients(scan, x)
    # On CUDA the weights of torch's own layers are compared without torch.equal, which waits.
    assert counts == {"equal": int(masked or device == "cpu"), "make": 0}
    if masked:
        return
    old = weights[0][1].weight[1, 0, 0, 0].item()
    for made, number in ((1, 0.0), (0, old)):  # other zeros, and those that there were
        for modules in weights:
            modules[1].weight.data[1, 0, 0, 0] = number
        counts["make"] = 0
        gradients(scan, x)
        assert counts["make"] == made
        check(plain, scan, x)


@device
def test_nan_stays_in_its_sample(device: str) -> None:
    _, scan = pair(lenet(), device)
    x = torch.randn(3, 1, 16, 16, device=device)
    clean = gradients(scan, x.requires_grad_())[1]
    bad = x.detach().clone()
    bad[1, 0, 4, 4] = float("nan")
    got = gradients(scan, bad.requires_grad_())[1]
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@device
def test_autocast(device: str) -> None:
    plain, scan = pair(lenet(), device)
    x = torch.randn(3, 1, 16, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for f, w in zip(gradients(scan, x.requires_grad_()), gradients(plain, x), strict=True):
            assert f.dtype == w.dtype
            assert_close(f, w, 0.05)


# plan_chain -----------------------------------------------------------------------------------------------------------


@schedules
def test_plan_chain(schedule) -> None:
    net = nn.Sequential(*lenet())
    x = torch.randn(2, 1, 16, 16, requires_grad=True)
    plan = plan_chain(net, x, schedule)
    levels = [s.level for s in plan.steps]
    assert levels == sorted(levels) and set(levels) == set(range(max(levels) + 1))
    for level in set(levels):
        here = [s for s in plan.steps if s.level == level]
        assert sum(s.critical for s in here) == 1
        assert next(s for s in here if s.critical).flops == max(s.flops for s in here)
    assert plan.flops == sum(s.flops for s in plan.steps)
    assert plan.critical_flops == sum(s.flops for s in plan.steps if s.critical)
    assert {s.kind for s in plan.steps} <= {"mm", "mv"} and {s.phase for s in plan.steps} <= {"up", "middle", "down"}
    assert all((s.kind == "mm") == (s.phase == "up") for s in plan.steps)
    assert str(plan.critical_flops / 1e6)[:4] in str(plan) and "critical" in str(plan)
    baseline = dict(plan.baseline)
    assert baseline["0 Conv2d"] == 2 * 75 * 144 and baseline["9 Linear"] == 2 * 60
    # Every step names the layers whose Jacobian it makes or reads: the first product is that of the last two.
    assert plan.steps[0].layers == ((9, 9) if plan.levels == 0 else (9, 8)) and plan.steps[0].elements
    assert all(s.flops == 2 * s.elements for s in plan.steps if s.kind == "mv") and plan.steps[-1].layers == (0, 0)
    assert bool(plan.candidates) == (schedule == "auto")
    for candidate in plan.candidates:
        assert (candidate.levels == plan.levels) == (not candidate.why_not) and candidate.microseconds > 0
        assert f"{candidate.levels} levels: about" in str(plan)
    if schedule == "linear":
        assert plan.levels == 0 and plan.memory == 0
        # Nine layers with a Jacobian; Flatten has none.
        assert len(plan.steps) == 9 and [s.flops for s in plan.steps][:2] == [2 * 60, 2 * 12]
    if schedule in (1, 2, "blelloch"):
        assert plan.levels == {1: 1, 2: 2, "blelloch": 4}[schedule] and plan.memory > 0


def test_the_first_layer_has_a_step_where_the_input_wants_a_gradient() -> None:
    net = ScanSequential(*lenet(), schedule=1)
    with_input = plan_chain(net, torch.randn(2, 1, 16, 16, requires_grad=True))
    without = plan_chain(net, torch.randn(2, 1, 16, 16))
    assert with_input.levels == without.levels == 1
    assert len(plan_chain(net, torch.randn(2, 1, 16, 16), "linear").steps) == 8
    assert len(with_input.baseline) == 9 and len(without.baseline) == 8


def test_auto_is_linear_for_convolutions() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
                        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())  # fmt: skip
    assert plan_chain(net, torch.randn(1, 3, 12, 12, requires_grad=True)).levels == 0


def test_plan_chain_refuses() -> None:
    with pytest.raises(TypeError, match="net must be"):
        plan_chain(nn.Linear(3, 3), torch.zeros(1, 3))
    with pytest.raises(TypeError, match="input must be"):
        plan_chain(nn.Sequential(), [1.0])
    with pytest.raises(ValueError, match="schedule"):
        plan_chain(nn.Sequential(nn.ReLU()), torch.zeros(1, 3), "fast")


def test_plan_chain_draws_no_random_numbers() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    torch.manual_seed(5)
    plan_chain(net, torch.zeros(1, 3))
    a = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(a, torch.rand(1))


@pytest.mark.cuda
@schedules
@pytest.mark.parametrize("prune", [False, True])
def test_backward_can_be_captured(schedule, prune: bool) -> None:
    _, net = pair(lenet(), "cuda", schedule=schedule, prune=prune)
    x = torch.randn(3, 1, 16, 16, device="cuda").requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = gradients(net, x)
        net.zero_grad(set_to_none=True)
        x.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            net(x).square().sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    for f, w in zip([x.grad, *(p.grad for p in net.parameters())], want[1:], strict=True):
        assert_close(f, w, 1e-6)
