"""Nets whose backward pass is a chain of sparse Jacobians: pruned ones, and many small blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from weft.sparse import BatchedCSR
from weft.sparse import transposed_jacobian as jacobian_of

BATCHES = (1, 16)
LAYERS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def pruned(layers: list[nn.Module], density: float) -> list[nn.Module]:
    """The same layers, of whose weights all but a part are zero."""
    for module in layers:
        if isinstance(module, (nn.Conv2d, nn.Linear)) and density < 1:
            weight = module.weight.detach()
            cut = weight.abs().flatten().kthvalue(max(1, int((1 - density) * weight.numel()))).values
            weight[weight.abs() <= cut] = 0
    return layers


def vgg11(device: str, density: float = 1.0, width: float = 1.0) -> list[nn.Module]:
    """VGG-11 for samples (3, 32, 32), with a part of its channels, of whose weights all but a part are zero."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for layer in LAYERS:
        if layer == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            outputs = int(layer * width)
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
            channels = outputs
    layers += [nn.Flatten(), nn.Linear(channels, 10)]
    return [module.to(device) for module in pruned(layers, density)]


def lenet(device: str) -> tuple[list[nn.Module], Tensor]:
    """LeNet-5 for samples (1, 32, 32)."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    ]  # fmt: skip
    return [m.to(device) for m in layers], torch.randn(1, 1, 32, 32, device=device)


def blocks(count: int, device: str) -> tuple[list[nn.Module], Tensor]:
    """Equal blocks of a convolution and a ReLU, 4 channels on 16x16."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(count):
        conv = nn.Conv2d(4, 4, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight)
        layers += [conv, nn.ReLU()]
    return [m.to(device) for m in layers], torch.randn(1, 4, 16, 16, device=device)


PRUNED_NETS: dict[str, Callable[[str, int], tuple[list[nn.Module], Tensor]]] = {
    "lenet5": lambda device, B: (pruned(lenet(device)[0], 0.03), torch.randn(B, 1, 32, 32, device=device)),
    "vgg11": lambda device, B: (vgg11(device, 0.03), torch.randn(B, 3, 32, 32, device=device)),
}


def forward(layers: list[nn.Module], x: Tensor) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """(module, input, output) of every layer."""
    records = []
    with torch.no_grad():
        for module in layers:
            y = module(x)
            records.append((module, x, y))
            x = y
    return records


def chain_of(layers: list[nn.Module], x: Tensor, prune: bool = False) -> list[BatchedCSR]:
    """Transposed Jacobians, the last layer's first."""
    with torch.no_grad():
        found = [
            jacobian_of(*record, prune=prune) for record in forward(layers, x) if type(record[0]) is not nn.Flatten
        ]
    return [J.detach() for J in found[::-1]]
