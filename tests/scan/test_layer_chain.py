"""Backward passes along layers whose Jacobians nobody writes: what is read, what is left to torch, and parameters'
gradients without a graph."""

from __future__ import annotations

import copy

import pytest
import torch
import weft
import weft._scan.layer_chain as layer_chain
from torch import Tensor, nn
from weft import _C
from weft._scan.sequential import _kept
from weft.scan import ScanSequential
from weft.sparse import conv2d_jacobian, max_pool2d_jacobian, register_jacobian, relu_jacobian

from tests.common import DEVICES, assert_close
from tests.scan.test_scan_sequential import check, gradients, lenet

device = pytest.mark.parametrize("device", DEVICES)
# Kernels of our own on CUDA, and what torch computes there.
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the scan never uses."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def refuse(*_: object) -> None:
    raise AssertionError("a Jacobian was written")


@device
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_numbers_are_those_of_written_jacobians(batch: int, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, 3, 9, 8, device=device)
    weight = torch.randn(5, 3, 3, 3, device=device)
    weight[weight.abs() < 0.5] = 0
    y = torch.relu(torch.nn.functional.conv2d(x, weight, padding=1))
    y[0, 0, 0, 0] = float("nan")
    pooled, picked = torch.nn.functional.max_pool2d(y, 2, return_indices=True)
    grad = torch.randn(batch, pooled[0].numel(), device=device)
    written = [
        max_pool2d_jacobian(y, 2),
        relu_jacobian(y),
        conv2d_jacobian(weight, (3, 9, 8), padding=1, prune=True),
    ]
    none = torch.empty(0, dtype=torch.int32, device=device)
    kept = (weight != 0).flatten(2)
    places = torch.arange(weight.numel(), dtype=torch.float64, device=device).view(weight.shape) + 1
    source = conv2d_jacobian(places * kept.view(weight.shape), (3, 9, 8), padding=1, prune=True).values - 1
    crows = [written[0].crow, none, written[2].crow]
    cols = [written[0].col, none, written[2].col]
    found = torch.ops.weft.layer_chain(
        grad, crows, cols, [picked.flatten(1), y.flatten(1), weight], [none, none, source.to(torch.int32)], [72, -1, 0]
    )
    want = torch.ops.weft.csr_chain(grad, crows, cols, [J.values for J in written])
    for f, w in zip(found, want, strict=True):
        assert torch.equal(f, w)


@device
@pytest.mark.parametrize("prune", [False, True])
def test_no_jacobian_of_torchs_own_layers_is_written(prune: bool, device: str, monkeypatch) -> None:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, groups=2),
              nn.ReLU(), nn.Flatten(), nn.Linear(54, 5), nn.ReLU(), nn.Linear(5, 2)]  # fmt: skip
    plain = nn.Sequential(*layers).to(device)
    with torch.no_grad():
        plain[0].weight[:, :, 0] = 0
    scan = ScanSequential(*copy.deepcopy(layers), prune=prune).to(device)
    x = torch.randn(3, 1, 10, 10, device=device, requires_grad=True)
    check(plain, scan, x)
    monkeypatch.setattr("weft._scan.sequential.transposed_jacobian", refuse)
    for _ in range(2):
        check(plain, scan, x)
    check(plain, scan, x.detach())
    double, twice = copy.deepcopy(plain).double(), copy.deepcopy(scan).double()
    check(double, twice, x.detach().double().requires_grad_())


@device
def test_weights_of_zeros_alone(device: str) -> None:
    """Their Jacobians have no element, and nothing arrives before them."""
    for zeroed in (0, 3, 5):
        plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4), nn.ReLU(), nn.Linear(4, 2))
        plain = plain.to(device)
        nn.init.zeros_(plain[zeroed].weight)
        scan = ScanSequential(*copy.deepcopy(plain), schedule="linear", prune=True)
        for _ in range(2):
            check(plain, scan, torch.randn(3, 1, 5, 5, device=device, requires_grad=True))
    grad, weight = torch.randn(2, 3, device=device), torch.zeros(3, 4, device=device, requires_grad=True)
    crow, none = torch.zeros(5, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int32, device=device)
    for given in (weight, weight.detach()):
        (found,) = torch.ops.weft.layer_chain(grad, [crow], [none], [given], [none], [0])
        assert torch.equal(found, torch.zeros(2, 4, device=device))
    found = torch.ops.weft.layer_chain(grad, [crow], [none], [weight], [none], [0])[0].sum()
    assert torch.equal(torch.autograd.grad(found, weight)[0], torch.zeros_like(weight))


class Own(nn.Parameter):
    """Of which nobody knows what its memory stands for."""


def test_parameters_of_another_type_are_not_read() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(2, 3)
    assert layer_chain.is_direct(layer, x)
    layer.weight = Own(layer.weight.data)
    assert not layer_chain.is_direct(layer, x)
    check(nn.Sequential(layer), ScanSequential(copy.deepcopy(layer)), x.requires_grad_())


@device
@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.requires_grad_], ids=["parameters", "tensors"])
def test_lent_parameters_are_those_of_the_forward_pass(kind, prune: bool, device: str) -> None:
    """torch.func.functional_call takes them back before the backward pass."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3, padding="same"), nn.BatchNorm2d(2).eval(), nn.Flatten(),
              nn.Linear(18, 4)]  # fmt: skip
    plain = nn.Sequential(*layers).to(device)
    scan = ScanSequential(*copy.deepcopy(plain), schedule="linear", prune=prune)
    x = torch.randn(3, 1, 5, 5, device=device, requires_grad=True)
    check(plain, scan, x)
    lent = {n: kind(2 * t.detach() * (torch.rand_like(t) < 0.5)) for n, t in plain.named_parameters()}
    lent["3.running_var"] = torch.full((2,), 3.0, device=device)
    given = [x, *(t for t in lent.values() if t.requires_grad)]
    want, found = (
        torch.autograd.grad(torch.func.functional_call(net, lent, x).square().sum(), given) for net in (plain, scan)
    )
    for f, w in zip(found, want, strict=True):
        assert_close(f, w)
    own = dict(scan.named_parameters())
    assert all(torch.equal(own[n], t) for n, t in plain.named_parameters())
    check(plain, scan, x)


@device
@dtypes
def test_layers_that_are_alike_are_computed_together(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    blocks = [nn.Conv2d(4, 4, 3, padding=(1, 2), stride=(1, 2), dilation=(1, 2), bias=i < 6) for i in range(2)]
    same = [nn.Conv2d(4, 4, (3, 1), padding=(1, 0), bias=i % 3 > 0) for i in range(12)]
    same[5].weight.requires_grad_(False)
    mixed = [m for conv in same for m in (conv, nn.ReLU())]
    linear = [m for _ in range(5) for m in (nn.Linear(12, 12), nn.Tanh())]
    layers = [*blocks, *mixed, nn.Flatten(), nn.Linear(72, 12), *linear]
    plain = nn.Sequential(*layers).to(device, dtype)
    scan = ScanSequential(*copy.deepcopy(layers)).to(device, dtype)
    for batch in (1, 3):
        check(plain, scan, torch.randn(batch, 4, 9, 8, device=device, dtype=dtype, requires_grad=True))


@device
@dtypes
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Linear])
def test_gradients_of_layers_together_are_each_ones_own(kind, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    for batch, bias in ((1, True), (3, False)):
        if kind is nn.Linear:
            modules, shape = [nn.Linear(5, 3, bias) for _ in range(6)], (batch, 5)
        else:
            dims = 1 if kind is nn.Conv1d else 2
            modules = [kind(2, 3, 3, stride=2, padding=2, dilation=2, bias=bias) for _ in range(6)]
            shape = (batch, 2, 11, 9)[: 2 + dims]
        given, want = [], []
        for module in modules:
            module.to(device, dtype)
            x = torch.randn(shape, device=device, dtype=dtype)
            y = module(x)
            g = torch.randn_like(y)
            want.append(torch.autograd.grad(y, list(module.parameters()), g))
            settings = None
            if kind is not nn.Linear:
                settings = _C.scan.ConvSettings(*map(list, (module.stride, module.padding, module.dilation)), 1)
            given.append((settings, x, g.flatten(1), list(y.shape), module.weight.detach(), True, bias))
        for found, alone, own in zip(
            _C.scan.layer_gradients(given, False),
            (_C.scan.layer_gradients([g], False)[0] for g in given),
            want,
            strict=True,
        ):
            assert (found[1] is None) == (not bias)
            for f, a, w in zip(found, alone, own, strict=False):
                assert_close(f, w, 1e-5)
                assert_close(a, w, 1e-5)


@device
def test_hooks_other_types_and_registered_layers_take_their_own_way(device: str) -> None:
    class Half(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * x

    register_jacobian(Half, lambda module, i, o: torch.eye(i[0].numel(), device=i.device) * 0.5)
    plain = nn.Sequential(nn.Linear(6, 6), Half(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    scan = ScanSequential(*copy.deepcopy(plain))
    seen = []
    for net in (plain, scan):
        net[2].register_forward_hook(lambda m, i, o: seen.append(o) or o * 1.0)
        net[4].register_full_backward_hook(lambda m, gi, go: seen.append(go))
    check(plain, scan, torch.randn(3, 6, device=device, requires_grad=True))
    assert seen


@device
@pytest.mark.parametrize("where", ["after", "before", "gradient", "arriving", "nested", "any module"])
def test_hooks_that_change_something(where: str, device: str) -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 4)), nn.Tanh()).to(device)
    scan = ScanSequential(*copy.deepcopy(plain))
    handles = []
    for net in (plain, scan):
        if where == "after":
            net[0].register_forward_hook(lambda m, i, o: 2 * o)
        elif where == "before":
            net[1][1].register_forward_pre_hook(lambda m, i: (i[0] * 2,))
        elif where == "gradient":
            net[1][0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
        elif where == "arriving":
            net[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        elif where == "nested":
            net[1].register_forward_hook(lambda m, i, o: 2 * o)
    if where == "any module":
        handles.append(nn.modules.module.register_module_forward_hook(lambda m, i, o: 2 * o))
    try:
        check(plain, scan, torch.randn(3, 6, device=device, requires_grad=True))
    finally:
        for handle in handles:
            handle.remove()


@device
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_norms_of_weights_stay_on_the_chain(norm: str, device: str) -> None:
    plain, scan = (kind(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)) for kind in (nn.Sequential, ScanSequential))
    for net in (plain, scan):
        getattr(nn.utils, norm)(net[0])
        net.to(device)
    scan.load_state_dict(plain.state_dict())
    x = torch.randn(3, 6, device=device, requires_grad=True)
    assert weft.explain(scan, x).algorithm == "chain_backward"
    check(plain, scan, x)


@device
def test_what_a_layer_keeps_may_not_change(device: str) -> None:
    net = ScanSequential(nn.Linear(3, 3), nn.ReLU()).to(device)
    for change in ("weight", "output", "input"):
        x = torch.randn(2, 3, device=device)
        y = net(x)
        with torch.no_grad():
            {"weight": net[0].weight, "output": y, "input": x}[change].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@device
def test_large_dense_layers_are_left_to_torch(device: str) -> None:
    torch.manual_seed(0)
    dense = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    small = [nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32 * 16, 4)]
    plain = nn.Sequential(*dense, *small).to(device)
    for prune in (False, True):
        scan = ScanSequential(*copy.deepcopy(plain), prune=prune)
        x = torch.randn(8, 16, 16, 16, device=device, requires_grad=True)
        for _ in range(3):
            check(plain, scan, x)
        left = _kept[scan].left
        assert any(left._layers.values()) and list(left.whole.values())[-1]
        assert "ScanBackward" not in str(scan(x).grad_fn)
        # Asked for by name, the chain is taken.
        linear = ScanSequential(*copy.deepcopy(plain), prune=prune, schedule="linear")
        check(plain, linear, x)
        assert "Scan" in str(linear(x).grad_fn)


def test_a_layer_that_is_left_to_torch_within_a_chain(monkeypatch) -> None:
    plain = nn.Sequential(*lenet())
    monkeypatch.setattr(layer_chain, "_expected", lambda module, *_: (2.0, 1.0) if module.bias.numel() == 4 else (0, 9))
    monkeypatch.setattr(layer_chain.LeftToTorch, "conclude", lambda *_: None)
    for prune in (False, True):
        scan = ScanSequential(*copy.deepcopy(plain), prune=prune)
        x = torch.randn(3, 1, 16, 16)
        for needs in (True, False):
            check(plain, scan, x.requires_grad_(needs))
        y = scan(x).sum()
        first = torch.autograd.grad(y, list(scan.parameters()), retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(y, list(scan.parameters())), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("needs", [True, False])
def test_zeros_are_asked_of_what_a_gradient_passes_through(needs: bool, monkeypatch) -> None:
    class Asked:
        def __init__(self, modules: list[nn.Module]) -> None:
            seen.append(modules)

        ask = classmethod(lambda cls, modules: cls(modules))

        def same(self, modules: list[nn.Module]) -> bool:
            return False

    seen: list[list[nn.Module]] = []
    monkeypatch.setattr("weft._scan.sequential.Zeros", Asked)
    monkeypatch.setattr(layer_chain, "_expected", lambda module, *_: (2.0, 1.0) if module.bias.numel() == 3 else (0, 9))
    monkeypatch.setattr(layer_chain.LeftToTorch, "conclude", lambda *_: None)
    plain = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 4)
    )
    scan = ScanSequential(*copy.deepcopy(plain), prune=True)
    for _ in range(2):
        check(plain, scan, torch.randn(2, 1, 8, 8, requires_grad=needs))
    assert seen == [[], [scan[5], scan[3], *([scan[0]] if needs else [])]]


@pytest.mark.cuda
@pytest.mark.parametrize("needs", [True, False])
def test_zeros_are_compared_without_waiting(needs: bool, monkeypatch) -> None:
    """The comparison of a step is asked in its forward pass; torch.equal, which waits, only looks for what changed."""
    layers = [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 4)]
    plain = nn.Sequential(*layers).cuda()
    scan = ScanSequential(*copy.deepcopy(layers), prune=True).cuda()
    for net in (plain, scan):
        net[2].weight.data[0].zero_()
    x = torch.randn(2, 1, 8, 8, device="cuda", requires_grad=needs)
    check(plain, scan, x)
    equal, calls = torch.equal, []
    monkeypatch.setattr("weft._sparse.jacobians.torch.equal", lambda *a: calls.append(1) or equal(*a))
    gradients(scan, x)
    assert not calls
    for number in (1.0, 0.0):
        for net in (plain, scan):
            net[2].weight.data[0, 0, 1, 1] = number
        gradients(scan, x)
        assert calls
        check(plain, scan, x)


@pytest.mark.cuda
@dtypes
def test_captured_parameters_side_by_side(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = [(3, 8), (8, 16), (16, 16), (16, 24)]
    layers = [m for i, o in sizes for m in (nn.Conv2d(i, o, 3, padding=1), nn.ReLU())]
    net = ScanSequential(*layers, nn.Flatten(), nn.Linear(24 * 64, 5), schedule="linear").to("cuda", dtype)
    x = torch.randn(4, 3, 8, 8, device="cuda", dtype=dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        parameters = list(net.parameters())
        for _ in range(2):
            want = torch.autograd.grad(net(x).square().sum(), parameters)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = torch.autograd.grad(net(x).square().sum(), parameters)
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        want = torch.autograd.grad(net(x).square().sum(), parameters)
        for f, w in zip(found, want, strict=True):
            assert_close(f, w, 1e-5)


@device
@pytest.mark.parametrize("schedule", ["auto", "linear", "blelloch"])
@pytest.mark.parametrize("setting", [1, (1,)], ids=str)
def test_one_number_for_both_dimensions(setting: int | tuple[int], schedule: str, device: str) -> None:
    """Which torch takes for two."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 3, 3, padding=1).to(device) for _ in range(8)]
    layers[0].stride = layers[1].dilation = setting
    for layer in layers[4:]:  # as many as are computed together
        layer.padding = setting
    results = []
    x = torch.randn(2, 3, 6, 5, device=device)
    for net in (ScanSequential(*layers, schedule=schedule), nn.Sequential(*layers)):
        results.append(torch.autograd.grad(net(x).square().sum(), [*net.parameters()]))
    for f, w in zip(*results, strict=True):
        assert_close(f, w, 1e-5)


@device
def test_batched_gradients_of_parameters(device: str) -> None:
    """Which no kernel of one's own may read as if they were plain."""
    net = ScanSequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4), schedule="linear").to(device)
    y = net(torch.randn(3, 1, 5, 5, device=device))
    grads = torch.randn(2, *y.shape, device=device)
    parameters = list(net.parameters())
    want = [torch.autograd.grad(y, parameters, g, retain_graph=True) for g in grads]
    found = torch.autograd.grad(y, parameters, grads, is_grads_batched=True)
    for f, *w in zip(found, *want, strict=True):
        assert_close(f, torch.stack(w), 1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("batch", [1, 16])
def test_parameters_of_many_layers_in_one_launch(batch: int) -> None:
    torch.manual_seed(0)
    shapes = [(3, 64, 32), (64, 128, 16), (128, 256, 8), (256, 512, 4), (512, 512, 2)]
    shapes += [(1 + n % 3, 4 + n % 5, 5 + n % 4) for n in range(250)]
    given, want = [], []
    for n, (inputs, outputs, size) in enumerate(shapes):
        x = torch.randn(batch, inputs, size, size, device="cuda")
        x = x.to(memory_format=torch.channels_last) if n % 3 == 2 else x
        weight = torch.randn(outputs, inputs, 3, 3, device="cuda")
        g = torch.randn(batch, outputs, size, size, device="cuda")
        bias = n % 4 > 0
        sizes = ([outputs], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, bias])
        parts = torch.ops.aten.convolution_backward(g.double(), x.double(), weight.double(), *sizes)[1:]
        want.append([t for t in parts if t is not None])
        settings = _C.scan.ConvSettings([1, 1], [1, 1], [1, 1], 1)
        given.append((settings, x, g.flatten(1), list(g.shape), weight, True, bias))
    x, g, weight = (torch.randn(*s, device="cuda") for s in ((batch, 300), (batch, 70), (70, 300)))
    given.append((None, x, g, list(g.shape), weight, True, True))
    want.append([g.double().T @ x.double(), g.double().sum(0)])
    runs = [_C.scan.layer_gradients(given, False) for _ in range(2)]
    for first, second, w in zip(*runs, want, strict=True):
        for f, s, own in zip((t for t in first if t is not None), (t for t in second if t is not None), w, strict=True):
            assert torch.equal(f, s)
            assert_close(f, own, 1e-5)
