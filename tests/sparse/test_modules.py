"""transposed_jacobian and register_jacobian: the generator of every module, inherited and replaced, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from weft.sparse import (
    diagonal_jacobian,
    flatten_jacobian,
    register_jacobian,
    relu_jacobian,
    transposed_jacobian,
)

from tests.common import DEVICES, assert_close
from tests.sparse.jacobians import f64, jacobians

device = pytest.mark.parametrize("device", DEVICES)

MODULES = {
    "Conv1d": (lambda: nn.Conv1d(2, 4, 3, padding=2, padding_mode="circular", groups=2), (2, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), stride=2, padding="valid"), (2, 5, 4)),
    "Conv2d same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=2), (2, 5, 4)),
    "Linear": (lambda: nn.Linear(4, 3), (4,)),
    "Linear of a sequence": (lambda: nn.Linear(4, 3), (2, 4)),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), (2, 5, 4)),
    "AvgPool2d": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), (2, 5, 4)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((None, 3)), (2, 5, 4)),
    "ReLU": (nn.ReLU, (2, 3)),
    "LeakyReLU": (lambda: nn.LeakyReLU(0.2), (2, 3)),
    "GELU": (lambda: nn.GELU("tanh"), (2, 3)),
    "Tanh": (nn.Tanh, (2, 3)),
    "Sigmoid": (nn.Sigmoid, (2, 3)),
    "Flatten": (nn.Flatten, (2, 3)),
    "Flatten of the last": (lambda: nn.Flatten(-2), (2, 3, 2)),
    "Dropout": (lambda: nn.Dropout(0.4).eval(), (2, 3)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3).eval(), (3,)),
    "BatchNorm1d of a sequence": (lambda: nn.BatchNorm1d(3, affine=False).eval(), (3, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3).eval(), (3, 2, 2)),
    "Identity": (nn.Identity, (2, 3)),
}


@device
@pytest.mark.parametrize("name", MODULES)
def test_transposed_jacobian(name: str, device: str) -> None:
    make, size = MODULES[name]
    module = make().double().to(device)
    if hasattr(module, "running_var"):
        module.running_var.uniform_(0.5, 2)
    x = f64(2, *size, device=device)
    found = transposed_jacobian(module, x, module(x))
    want = jacobians(module, x)
    dense = found.to_dense()
    assert_close(dense if dense.dim() == 3 else dense.expand_as(want), want, 1e-12)


@device
@pytest.mark.parametrize("name", ["Conv2d", "Conv2d same", "Linear"])
def test_pruned_modules(name: str, device: str) -> None:
    make, size = MODULES[name]
    module = make().double().to(device)
    torch_prune.l1_unstructured(module, "weight", 0.5)
    x = f64(2, *size, device=device)
    whole, pruned = (transposed_jacobian(module, x, module(x), prune=p) for p in (False, True))
    assert pruned.nnz < whole.nnz
    assert_close(pruned.to_dense(), whole.to_dense())


class Doubled(nn.ReLU):
    """Inherits its forward, and so its Jacobian."""


class Squared(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def test_registered_and_inherited() -> None:
    x = f64(2, 3)
    assert torch.equal(transposed_jacobian(Doubled(), x, x).values, relu_jacobian(x).values)
    with pytest.raises(TypeError, match=r"Squared.*register_jacobian"):
        transposed_jacobian(Squared(), x, x)
    with pytest.raises(TypeError, match=r"Scaled.*register_jacobian"):
        transposed_jacobian(Scaled(), x, x)

    @register_jacobian(Scaled)
    def scaled(module: nn.Module, input: Tensor, output: Tensor) -> Tensor:
        return 3 * torch.eye(input[0].numel(), dtype=input.dtype)

    assert torch.equal(transposed_jacobian(Scaled(), x, 3 * x), 3 * torch.eye(3, dtype=torch.float64))
    assert register_jacobian(Scaled, lambda m, i, o: diagonal_jacobian(torch.full_like(i, 3))) is not None
    assert torch.equal(transposed_jacobian(Scaled(), x, 3 * x).values, torch.full((2, 3), 3.0, dtype=torch.float64))
    for bad in (torch.zeros(2, 3), torch.zeros(5, 3, 3), flatten_jacobian((4,)), torch.zeros(3)):
        register_jacobian(Scaled, lambda m, i, o, bad=bad: bad)
        with pytest.raises(ValueError, match="Scaled"):
            transposed_jacobian(Scaled(), x, 3 * x)
    register_jacobian(Scaled, lambda m, i, o: None)
    with pytest.raises(TypeError, match="Scaled"):
        transposed_jacobian(Scaled(), x, 3 * x)


REFUSED = {
    "dropout that drops": (nn.Dropout(), (2, 3), ValueError, "dropout_jacobian"),
    "indices": (nn.MaxPool2d(2, return_indices=True), (2, 1, 4, 4), ValueError, "return_indices"),
    "batch statistics": (nn.BatchNorm1d(3), (2, 3), RuntimeError, "every sample"),
    "no running statistics": (
        nn.BatchNorm2d(3, track_running_stats=False).eval(),
        (2, 3, 1, 1),
        RuntimeError,
        "sample",
    ),
    "flattened batch": (nn.Flatten(0), (2, 3), ValueError, "Flatten"),
    "no batch": (nn.Conv2d(2, 2, 1), (2, 3, 3), ValueError, "Conv2d.*batch"),
    "unknown": (nn.Softmax(-1), (2, 3), TypeError, "Softmax.*register_jacobian"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_modules(case: str) -> None:
    module, shape, error, message = REFUSED[case]
    x = torch.zeros(shape)
    with pytest.raises(error, match=message):
        transposed_jacobian(module, x, x)


def test_indices_are_refused_with_what_came_out() -> None:
    module, x = nn.MaxPool2d(2, return_indices=True), torch.zeros(2, 1, 4, 4)
    with pytest.raises(ValueError, match="return_indices"):
        transposed_jacobian(module, x, module(x))
