"""Every generator against torch.autograd.functional.jacobian over drawn settings; patterns, their cache, pruning."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from weft._sparse import jacobians as generators
from weft.sparse import (
    adaptive_avg_pool2d_jacobian,
    avg_pool2d_jacobian,
    batch_norm_jacobian,
    clear_cache,
    conv1d_jacobian,
    conv2d_jacobian,
    diagonal_jacobian,
    dropout_jacobian,
    flatten_jacobian,
    gelu_jacobian,
    leaky_relu_jacobian,
    linear_jacobian,
    max_pool2d_jacobian,
    register_jacobian,
    relu_jacobian,
    sigmoid_jacobian,
    tanh_jacobian,
)

from tests.common import DEVICES, assert_close
from tests.sparse.jacobians import check, f64, jacobian, jacobians

device = pytest.mark.parametrize("device", DEVICES)
MODES = ["zeros", "reflect", "replicate", "circular"]


# Convolutions ---------------------------------------------------------------------------------------------------------


@st.composite
def convolutions(draw, dims: int):
    groups = draw(st.integers(1, 3))
    channels, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    sizes = tuple(draw(st.integers(1, 6)) for _ in range(dims))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    padding = draw(st.one_of(st.just("same"), st.just("valid"), st.tuples(*[st.integers(0, 3)] * dims)))
    mode = draw(st.sampled_from(MODES))
    if padding == "same":
        stride = (1,) * dims
    return dict(
        channels=channels, outputs=outputs, kernel=kernel, sizes=sizes, stride=stride, padding=padding,
        dilation=dilation, groups=groups, padding_mode=mode,
    )  # fmt: skip


def check_convolution(settings: dict, module_type: type, generator, device: str) -> None:
    channels, outputs, kernel, sizes = (settings.pop(k) for k in ("channels", "outputs", "kernel", "sizes"))
    layer = module_type(channels, outputs, kernel, bias=False, dtype=torch.float64, **settings).to(device)
    x = f64(channels, *sizes, device=device)
    arguments = [settings[k] for k in ("stride", "padding", "dilation", "groups", "padding_mode")]
    try:
        want = jacobian(layer, x)
    except (RuntimeError, ValueError):
        with pytest.raises((RuntimeError, ValueError)):
            generator(layer.weight, (channels, *sizes), *arguments)
        return
    found = generator(layer.weight, (channels, *sizes), *arguments)
    check(found, want)
    # What is stored is what a weight of ones reaches, and nothing else.
    ones = generator(torch.ones_like(layer.weight), (channels, *sizes), *arguments)
    assert found.nnz == int((ones.to_dense() != 0).sum())
    again = generator(layer.weight.detach().float(), (channels, *sizes), *arguments)
    assert again.crow is found.crow and again.col is found.col and again.dtype == torch.float32


@device
@given(settings=convolutions(2))
@example(dict(channels=1, outputs=1, kernel=(3, 3), sizes=(2, 2), stride=(1, 1), padding=(1, 1), dilation=(1, 1),
              groups=1, padding_mode="reflect"))  # fmt: skip
def test_conv2d(device: str, settings: dict) -> None:
    check_convolution(dict(settings), nn.Conv2d, conv2d_jacobian, device)


@device
@given(settings=convolutions(1))
def test_conv1d(device: str, settings: dict) -> None:
    check_convolution(dict(settings), nn.Conv1d, conv1d_jacobian, device)


@device
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prune", [False, True])
def test_values_are_differentiable_in_the_weight(mode: str, prune: bool, device: str) -> None:
    weight = f64(4, 1, 2, 3, device=device)
    weight.view(-1)[::5] = 0
    weight.requires_grad_()

    def values(w: Tensor) -> Tensor:
        return conv2d_jacobian(w, (2, 3, 4), padding=(1, 2), groups=2, padding_mode=mode, prune=prune).values

    if not prune:  # finite differences would move zeros, and with them the pattern
        assert torch.autograd.gradcheck(values, weight)
        assert torch.autograd.gradgradcheck(values, weight)
    g = torch.randn_like(values(weight))
    (found,) = torch.autograd.grad(values(weight), weight, g)
    dense = conv2d_jacobian(weight, (2, 3, 4), padding=(1, 2), groups=2, padding_mode=mode, prune=prune).with_values(g)

    def product(w: Tensor) -> Tensor:
        layer = nn.Conv2d(2, 4, (2, 3), padding=(1, 2), groups=2, padding_mode=mode, bias=False, dtype=torch.float64)
        full = torch.autograd.functional.jacobian(
            lambda x: torch.func.functional_call(layer.to(device), {"weight": w}, x),
            f64(2, 3, 4, device=device),
            create_graph=True,
        )
        return (full.reshape(-1, 24).mT * dense.to_dense()).sum()

    (want,) = torch.autograd.grad(product(weight), weight)
    if prune:  # a weight that is left out has no gradient
        want = want * (weight != 0)
    assert_close(found, want, 1e-12)


@device
def test_values_under_function_transforms(device: str) -> None:
    weight, g = f64(4, 2, 3, 3, device=device), f64(4 * 2 * 100, device=device)

    def loss(w: Tensor) -> Tensor:
        values = conv2d_jacobian(w, (4, 4, 4), padding=1, groups=2).values
        return (values.sin() * g[: values.shape[0]]).sum()

    leaf = weight.clone().requires_grad_()
    assert_close(torch.func.grad(loss)(weight), torch.autograd.grad(loss(leaf), leaf)[0], 1e-12)


@device
def test_table_1_of_the_paper(device: str) -> None:
    weight = torch.randn(64, 3, 3, 3, device=device)
    conv = conv2d_jacobian(weight, (3, 32, 32), padding=1)
    a = torch.randn(1, 64, 32, 32, device=device)
    relu, pool = relu_jacobian(a), max_pool2d_jacobian(a, 2)
    assert [J.nnz for J in (conv, relu, pool)] == [1_696_512, 65_536, 65_536]
    assert [f"{J.sparsity:.5f}" for J in (conv, relu, pool)] == ["0.99157", "0.99998", "0.99994"]
    assert f"{conv.values.nbytes / 2**20:.2f}" == "6.47" and conv.col.nbytes == conv.values.nbytes
    assert conv.shape[0] * conv.shape[1] * 4 == 768 * 2**20
    assert "sparsity=0.99157" in repr(conv)


@device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(4, 2, 3, 3, device=device, dtype=dtype)
    for mode in MODES:
        narrow, wide = (conv2d_jacobian(w, (2, 5, 5), padding=2, padding_mode=mode) for w in (weight, weight.double()))
        assert narrow.dtype == dtype
        assert_close(
            narrow.values, wide.values, {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 1e-6}[dtype]
        )


@device
def test_special_values_stay_where_they_are(device: str) -> None:
    weight = torch.full((2, 2, 3, 3), -0.0, device=device)
    weight[1, 0, 1, 1] = float("nan")
    dense = conv2d_jacobian(weight, (2, 3, 3), padding=1).to_dense().view(2, 9, 2, 9)
    assert dense[0, :, 1].isnan().sum() == 9 and dense.isnan().sum() == 9


# Pruned patterns ------------------------------------------------------------------------------------------------------


@device
@given(settings=convolutions(2), keep=st.floats(0, 1))
def test_pruned_conv2d(device: str, settings: dict, keep: float) -> None:
    settings = dict(settings)
    channels, outputs, kernel, sizes = (settings.pop(k) for k in ("channels", "outputs", "kernel", "sizes"))
    weight = f64(outputs, channels // settings["groups"], *kernel)
    weight = (weight * (torch.rand_like(weight) < keep)).to(device)
    arguments = [settings[k] for k in ("stride", "padding", "dilation", "groups", "padding_mode")]
    try:
        whole = conv2d_jacobian(weight, (channels, *sizes), *arguments)
    except (ValueError, RuntimeError):
        assume(False)
    found = conv2d_jacobian(weight, (channels, *sizes), *arguments, prune=True)
    check(found, whole.to_dense())
    reached = conv2d_jacobian((weight != 0).double(), (channels, *sizes), *arguments)
    assert found.nnz == int((reached.values != 0).sum())


@device
def test_a_pruned_pattern_is_made_again_only_when_the_zeros_change(device: str) -> None:
    weight = torch.randn(4, 3, 3, 3, device=device)
    weight[0] = 0
    first = conv2d_jacobian(weight, (3, 5, 5), prune=True)
    weight[1:] *= 2
    assert conv2d_jacobian(weight, (3, 5, 5), prune=True).col is first.col
    weight[1] = 0
    second = conv2d_jacobian(weight, (3, 5, 5), prune=True)
    assert second.nnz < first.nnz
    weight[0] = 1
    third = conv2d_jacobian(weight, (3, 5, 5), prune=True)
    assert third.nnz == first.nnz
    assert_close(third.to_dense(), conv2d_jacobian(weight, (3, 5, 5)).to_dense())


@device
@given(lead=st.lists(st.integers(1, 3), max_size=2), inputs=st.integers(1, 4), outputs=st.integers(1, 4))
@pytest.mark.parametrize("prune", [False, True])
def test_linear(device: str, prune: bool, lead: list, inputs: int, outputs: int) -> None:
    weight = f64(outputs, inputs, device=device)
    if prune:
        weight = weight * (torch.rand_like(weight) < 0.5)
    want = jacobian(lambda x: F.linear(x, weight), f64(*lead, inputs, device=device))
    found = linear_jacobian(weight, (*lead, inputs), prune=prune)
    check(found, want)
    assert found.nnz == (int((weight != 0).sum()) if prune else weight.numel()) * math.prod(lead)
    if not lead:
        check(linear_jacobian(weight, prune=prune), want)
    leaf = weight.clone().requires_grad_()
    g = torch.randn_like(found.values)
    (grad,) = torch.autograd.grad(linear_jacobian(leaf, (*lead, inputs), prune=prune).values, leaf, g)
    blocks = found.with_values(g).to_dense().view(math.prod(lead), inputs, math.prod(lead), outputs)
    assert_close(grad, blocks.diagonal(dim1=0, dim2=2).sum(-1).mT, 1e-12)


# Diagonals ------------------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "relu": (relu_jacobian, torch.relu),
    "leaky_relu": (leaky_relu_jacobian, F.leaky_relu),
    "leaky_relu 0.3": (lambda x: leaky_relu_jacobian(x, 0.3), lambda x: F.leaky_relu(x, 0.3)),
    "gelu": (gelu_jacobian, F.gelu),
    "gelu tanh": (lambda x: gelu_jacobian(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "tanh": (tanh_jacobian, torch.tanh),
    "sigmoid": (sigmoid_jacobian, torch.sigmoid),
}


@device
@pytest.mark.parametrize("name", ACTIVATIONS)
@given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_activations(device: str, name: str, shape: list) -> None:
    generator, f = ACTIVATIONS[name]
    x = f64(*shape, device=device)
    x.view(-1)[::3] = 0
    found = generator(x)
    n = math.prod(shape[1:])
    assert found.shape == (n, n) and found.nnz == n and found.batch_size == shape[0]
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(f(leaf), leaf, torch.ones_like(leaf))
    assert torch.equal(found.values, want.view(shape[0], n))
    if x.numel():
        check(found, jacobians(f, x))


@device
@pytest.mark.parametrize("name", ["gelu", "gelu tanh", "tanh", "sigmoid"])
def test_activations_are_differentiable_in_the_input(name: str, device: str) -> None:
    x = f64(2, 3, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: ACTIVATIONS[name][0](t).values, x)


@device
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), p=st.sampled_from([0.0, 0.3, 1.0]))
def test_dropout(device: str, shape: list, p: float) -> None:
    mask = (torch.rand(shape) < 0.5).to(device)
    want = mask.double() / (1 - p) if p < 1 else torch.zeros(shape, dtype=torch.float64, device=device)
    found = dropout_jacobian(mask, p, dtype=torch.float64)
    assert_close(found.to_dense(), torch.diag_embed(want.reshape(shape[0], -1)), 1e-15)


@device
@given(size=st.lists(st.integers(1, 4), min_size=1, max_size=3), affine=st.booleans())
def test_batch_norm(device: str, size: list, affine: bool) -> None:
    var = f64(size[0], device=device).abs().requires_grad_()
    weight = f64(size[0], device=device).requires_grad_() if affine else None
    mean = f64(size[0], device=device)
    want = jacobian(lambda x: F.batch_norm(x, mean, var.detach(), weight, eps=0.01), f64(*size, device=device))
    check(batch_norm_jacobian(size, var, weight, 0.01), want)
    leaves = [t for t in (var, weight) if t is not None]
    assert torch.autograd.gradcheck(lambda v, w=None: batch_norm_jacobian(size, v, w, 0.01).values, leaves)


@device
def test_flatten_and_diagonal(device: str) -> None:
    found = flatten_jacobian((2, 3), dtype=torch.float64, device=device)
    check(found, torch.eye(6, dtype=torch.float64))
    assert flatten_jacobian((2, 3)).dtype == torch.get_default_dtype() and flatten_jacobian((2, 3)).batch_size is None
    d = f64(2, 3, 2, device=device).requires_grad_()
    check(diagonal_jacobian(d), torch.diag_embed(d.reshape(2, 6)))
    assert torch.equal(torch.autograd.grad(diagonal_jacobian(d).values.sum(), d)[0], torch.ones_like(d))
    assert relu_jacobian(d).col is found.col


# What all generators share --------------------------------------------------------------------------------------------

GENERATORS = {
    "conv1d": (lambda w: conv1d_jacobian(w, (4, 6), 2, 1, padding_mode="circular", groups=2), (6, 2, 3)),
    "conv2d": (lambda w: conv2d_jacobian(w, (2, 5, 4), padding=(1, 2), dilation=2), (3, 2, 2, 3)),
    "conv2d pruned": (lambda w: conv2d_jacobian(w, (2, 5, 4), padding=1, prune=True), (3, 2, 2, 3)),
    "linear": (linear_jacobian, (4, 5)),
    "linear pruned": (lambda w: linear_jacobian(w, (3, 5), prune=True), (4, 5)),
    "max_pool2d": (lambda x: max_pool2d_jacobian(x, 3, 2, 1), (2, 3, 6, 5)),
    "diagonal": (diagonal_jacobian, (2, 3, 4)),
    "batch_norm": (lambda v: batch_norm_jacobian((4, 3), v.abs()), (4,)),
    **{name: (generator, (2, 3, 4)) for name, (generator, _) in ACTIVATIONS.items()},
}
"""Generators of one tensor, and its shape."""


@device
@pytest.mark.parametrize("name", GENERATORS)
def test_strides_change_nothing(name: str, device: str) -> None:
    generator, shape = GENERATORS[name]
    dense = f64(*shape, device=device)
    last_first = dense.permute(*reversed(range(dense.dim()))).contiguous().permute(*reversed(range(dense.dim())))
    spread = torch.stack([dense, dense + 1], -1)[..., 0]
    broadcast = dense[:1].expand_as(dense)
    assert dense.dim() == 1 or not last_first.is_contiguous()
    for strided in (last_first, spread, broadcast):
        want, found = generator(strided.contiguous()), generator(strided)
        assert_close(found.values, want.values, 1e-15)  # torch's GELU rounds scalars otherwise than vectors
        assert found.col is want.col
    assert generator(last_first).col is generator(spread).col


@device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", GENERATORS)
def test_the_dtype_is_that_of_the_tensor(name: str, dtype: torch.dtype, device: str) -> None:
    generator, shape = GENERATORS[name]
    narrow = f64(*shape, device=device).to(dtype)
    found, want = generator(narrow), generator(narrow.double())
    assert found.dtype == dtype and found.device == narrow.device and found.col is want.col
    bound = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 0}[dtype]
    assert_close(found.values, want.values, bound)


@device
def test_empty_sizes(device: str) -> None:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    assert linear_jacobian(zeros(3, 0)).shape == (0, 3) and linear_jacobian(zeros(0, 4)).shape == (4, 0)
    for prune in (False, True):
        nothing = linear_jacobian(zeros(3, 4), (0, 4), prune=prune)
        assert nothing.shape == (0, 0) and nothing.nnz == 0 and nothing.sparsity == 0
    assert linear_jacobian(zeros(3, 4), prune=True).nnz == 0
    assert conv2d_jacobian(zeros(2, 1, 3, 3), (1, 4, 4), prune=True).mv(zeros(5, 8)).shape == (5, 16)
    assert max_pool2d_jacobian(zeros(0, 2, 4, 4), 2).values.shape == (0, 32)
    assert relu_jacobian(zeros(0, 3)).mv(zeros(0, 3)).shape == (0, 3)
    assert diagonal_jacobian(zeros(2, 0)).shape == (0, 0)
    assert flatten_jacobian((3, 0), device=device).shape == (0, 0)
    assert dropout_jacobian(zeros(0, 3).bool()).values.shape == (0, 3)


# Bad input, the cache -------------------------------------------------------------------------------------------------

w4 = torch.zeros(4, 2, 3, 3)
BAD = {
    "weight is sparse": (lambda: linear_jacobian(torch.ones(2, 3).to_sparse()), TypeError, "weight is sparse"),
    "weight is no tensor": (lambda: conv2d_jacobian([1.0], (2, 4, 4)), TypeError, "weight must be a Tensor"),
    "integer weight": (lambda: conv2d_jacobian(w4.long(), (2, 4, 4)), TypeError, "weight must be float16"),
    "weight of rank 3": (lambda: conv2d_jacobian(w4[0], (2, 4, 4)), ValueError, "4 dimensions"),
    "no channels": (lambda: conv2d_jacobian(w4, (4, 4)), ValueError, r"\(C, H, W\)"),
    "other channels": (lambda: conv2d_jacobian(w4, (3, 4, 4)), ValueError, "channels"),
    "groups": (lambda: conv2d_jacobian(w4, (2, 4, 4), groups=3), ValueError, "groups"),
    "stride": (lambda: conv2d_jacobian(w4, (2, 4, 4), stride=0), ValueError, "positive"),
    "three strides": (lambda: conv2d_jacobian(w4, (2, 4, 4), stride=(1, 2, 3)), ValueError, "stride"),
    "padding": (lambda: conv2d_jacobian(w4, (2, 4, 4), padding=-1), ValueError, "negative"),
    "padding name": (lambda: conv2d_jacobian(w4, (2, 4, 4), padding="full"), ValueError, "same"),
    "same with stride": (lambda: conv2d_jacobian(w4, (2, 4, 4), 2, "same"), ValueError, "stride 1"),
    "mode": (lambda: conv2d_jacobian(w4, (2, 4, 4), padding_mode="mirror"), ValueError, "padding_mode"),
    "reflect": (lambda: conv2d_jacobian(w4, (2, 4, 4), padding=4, padding_mode="reflect"), ValueError, "too wide"),
    "wide kernel": (lambda: conv2d_jacobian(w4, (2, 2, 4)), ValueError, "wider"),
    "conv1d of rank 4": (lambda: conv1d_jacobian(w4, (2, 4)), ValueError, "3 dimensions"),
    "linear": (lambda: linear_jacobian(torch.zeros(3, 4), (3,)), ValueError, "in_features"),
    "linear of rank 1": (lambda: linear_jacobian(torch.zeros(3)), ValueError, "out_features"),
    "pool of rank 3": (lambda: max_pool2d_jacobian(torch.zeros(1, 4, 4), 2), ValueError, "4 dimensions"),
    "pool padding": (lambda: max_pool2d_jacobian(torch.zeros(1, 1, 4, 4), 2, padding=2), RuntimeError, "pad"),
    "avg pool dtype": (lambda: avg_pool2d_jacobian((1, 4, 4), 2, dtype=torch.int32), TypeError, "dtype"),
    "avg pool size": (lambda: avg_pool2d_jacobian((4, 4), 2), ValueError, r"\(C, H, W\)"),
    "adaptive": (lambda: adaptive_avg_pool2d_jacobian((1, 4, 4), (1, 2, 3)), ValueError, "output_size"),
    "activation": (lambda: relu_jacobian(torch.zeros(2, 3).long()), TypeError, "input must be float16"),
    "no batch": (lambda: relu_jacobian(torch.zeros(())), ValueError, "batch"),
    "float mask": (lambda: dropout_jacobian(torch.zeros(2, 3)), TypeError, "mask must be a bool"),
    "p": (lambda: dropout_jacobian(torch.zeros(2, 3).bool(), 1.5), ValueError, r"\[0, 1\]"),
    "variance": (lambda: batch_norm_jacobian((3, 2), torch.zeros(2)), ValueError, r"\(C,\) = \(3,\)"),
    "flatten": (lambda: flatten_jacobian(5), TypeError, "input_size must be a sample size, got 5"),
    "flatten dtype": (lambda: flatten_jacobian((5,), dtype=torch.int64), TypeError, "dtype must be float16"),
    "negative size": (lambda: flatten_jacobian((5, -1)), ValueError, "input_size must be a sample size"),
    "dtype of the mask": (lambda: dropout_jacobian(torch.zeros(2, 3).bool(), dtype=torch.int8), TypeError, "dtype"),
    "size of a batch norm": (lambda: batch_norm_jacobian((), torch.zeros(2)), ValueError, r"\(C, ...\)"),
    "dtypes of a batch norm": (
        lambda: batch_norm_jacobian((2,), torch.ones(2), torch.ones(2).double()), TypeError, "dtype of running_var",
    ),
    "weight of a batch norm": (lambda: batch_norm_jacobian((2,), torch.ones(2), 1.0), TypeError, "weight must be"),
    "kernel": (lambda: max_pool2d_jacobian(torch.zeros(1, 1, 4, 4), "2"), ValueError, "kernel_size must be an int"),
    "registered type": (lambda: register_jacobian(int, print), TypeError, "subclass"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_patterns_made_in_inference_mode_serve_gradients_later() -> None:
    clear_cache()
    weight = torch.randn(2, 1, 3, 3)
    weight[0] = 0
    with torch.inference_mode():
        for prune in (False, True):
            J = conv2d_jacobian(weight, (1, 5, 5), prune=prune)
            (J @ relu_jacobian(torch.randn(1, 2, 3, 3))).mv(torch.randn(18))
    leaf = weight.clone().requires_grad_()
    for prune in (False, True):
        J = conv2d_jacobian(leaf, (1, 5, 5), prune=prune)
        product = J @ relu_jacobian(torch.randn(1, 2, 3, 3))
        torch.autograd.grad(product.mv(torch.randn(18)).sum(), leaf)


@pytest.mark.parametrize("name", GENERATORS)
def test_default_device(name: str) -> None:
    """Whatever torch makes by itself is elsewhere: patterns are where the tensor is."""
    generator, shape = GENERATORS[name]
    x = f64(*shape)
    want = generator(x)
    clear_cache()
    with torch.device("meta"):
        found = generator(x)
    assert found.device.type == "cpu" and torch.equal(found.to_dense(), want.to_dense())


@pytest.mark.cuda
def test_nothing_is_waited_for_that_is_not_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, make = [], generators.made_to_stay

    def noted(device: torch.device, *of):
        waited.append((device.type, made := make(device, *of)))
        return made

    monkeypatch.setattr(generators, "made_to_stay", noted)
    weight = torch.randn(3, 2, 3, 3, device="cuda")
    weight[0] = 0
    clear_cache()
    conv2d_jacobian(weight, (2, 6, 5), prune=True)
    assert waited and all(made for device, (made, _) in waited if device == "cuda")


def test_the_cache_can_be_cleared() -> None:
    weight = torch.randn(2, 1, 3, 3)
    first = conv2d_jacobian(weight, (1, 5, 5))
    clear_cache()
    second = conv2d_jacobian(weight, (1, 5, 5))
    assert second.col is not first.col and torch.equal(second.col, first.col)


@pytest.mark.cuda
def test_capture() -> None:
    """A generator with a known pattern does not wait for the device."""
    weight = torch.randn(4, 2, 3, 3, device="cuda")
    weight[0] = 0
    x = torch.randn(3, 2, 6, 6, device="cuda")

    def run() -> list[Tensor]:
        found = [conv2d_jacobian(weight, (2, 6, 6), prune=p) for p in (False, True)]
        return [J.values for J in (*found, max_pool2d_jacobian(x, 2), relu_jacobian(x))]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    weight[1:].normal_()
    x.normal_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["relu", "max_pool", "conv", "pruned"])
def test_a_pattern_that_another_stream_makes_late(name: str) -> None:
    weight, x = torch.randn(4, 2, 3, 3, device="cuda"), torch.randn(3, 2, 8, 8, device="cuda")
    make = {
        "relu": lambda: relu_jacobian(x),
        "max_pool": lambda: max_pool2d_jacobian(x, 2),
        "conv": lambda: conv2d_jacobian(weight, (2, 8, 8)),
        "pruned": lambda: conv2d_jacobian(weight.relu(), (2, 8, 8), prune=True),
    }[name]
    clear_cache()
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(50_000_000)
        J = make()
    with torch.cuda.stream(second):
        K = make()
        seen = [t.clone() for t in (K.crow, K.col, *K._pattern.transposed)]
    torch.cuda.synchronize()
    assert K.col is J.col
    assert all(torch.equal(a, b) for a, b in zip(seen, (J.crow, J.col, *J._pattern.transposed), strict=True))


@pytest.mark.cuda
def test_what_a_capture_makes_is_not_kept() -> None:
    x = torch.randn(2, 37, device="cuda")
    clear_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = relu_jacobian(x)
        captured._pattern.transposed  # noqa: B018
    assert relu_jacobian(x).crow.tolist() == list(range(38))
    graph.replay()
    assert captured.crow.tolist() == list(range(38)) and captured._pattern._transposed is None
