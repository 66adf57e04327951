"""The share of non-zeros behind every ReLU of the networks of cDMA (Rhu et al., 2018): what compression can save."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import models
from benchmarks.common import Entry, Results, case_name


def density_models() -> dict[str, Callable[[], nn.Module]]:
    """The networks of cDMA that are there: all of them with torchvision, else VGG-19 alone; none without
    scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        print("scikit-learn is not installed: densities are left out", flush=True)
        return {}
    try:
        from torchvision import models as vision
    except ImportError:
        print("torchvision is not installed: densities of AlexNet, SqueezeNet and GoogLeNet are left out", flush=True)
        return {"vgg19": lambda: models.vgg19(10)}
    return {
        "alexnet": lambda: vision.alexnet(num_classes=10),
        "vgg19": lambda: models.vgg19(10),
        "squeezenet": lambda: vision.squeezenet1_0(num_classes=10),
        "googlenet": lambda: vision.googlenet(num_classes=10, aux_logits=False, init_weights=True),
    }


def digits() -> tuple[Tensor, Tensor]:
    """The digits of scikit-learn: images (N, 1, 8, 8) from -1 to 1, targets (N,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images, torch.tensor(data.target)


def relu_densities(net: nn.Module, x: Tensor) -> list[float]:
    """The share of non-zeros behind each ReLU, first to last."""
    found: list[float] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: found.append(out.count_nonzero().item() / out.numel()))
        for module in net.modules()
        if isinstance(module, nn.ReLU)
    ]
    # GoogLeNet calls the function.
    relu = functional.relu

    def counted(input: Tensor, inplace: bool = False) -> Tensor:
        out = relu(input, inplace)
        found.append(out.count_nonzero().item() / out.numel())
        return out

    functional.relu = counted if not hooks else relu
    try:
        with torch.no_grad():
            net(x)
    finally:
        functional.relu = relu
        for hook in hooks:
            hook.remove()
    return found


def density_entry(
    name: str, build: Callable[[], nn.Module], device: str, *, size: int = 224, steps: int = 500
) -> Entry:
    """cDMA's densities behind every ReLU, at initialisation and after a short training, and what crosses the bus. The
    training ends when the mean loss of ten steps is below a half, or after `steps`."""
    batch = 64
    keys = {"model": name, "device": device, "dtype": "fp32", "B": batch}

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        net, (images, targets), rows = build().to(device), digits(), []

        def draw(count: int) -> tuple[Tensor, Tensor]:
            chosen = torch.randint(len(images), (count,))
            x = functional.interpolate(images[chosen].to(device), (size, size), mode="bilinear")
            return x.expand(-1, 3, -1, -1).contiguous(), targets[chosen].to(device)

        def record(trained: str) -> None:
            for layer, density in enumerate(relu_densities(net, draw(batch)[0])):
                case = case_name(**keys, trained=trained, layer=layer)
                rows.append(results.put(case, "density", "share", density, "on_the_bus", min(1.0, density + 1 / 32)))

        record("no")
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-4)
        losses: list[float] = []
        while len(losses) < steps and not (len(losses) >= 10 and sum(losses[-10:]) < 5):
            x, target = draw(batch)
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"{name}: loss {losses[-1]:.3f} after {len(losses)} steps of training", flush=True)
        record("yes")
        return rows

    names = [case_name(**keys, trained=trained) for trained in ("no", "yes")]
    return Entry(" ".join(names), ("density",), run)
