"""LeNet-5 trained twice from one seed: back-propagated by the scan, and by autograd (BPPSA, figure 6).

    python examples/lenet_scan.py                       # the digits inside scikit-learn, on 32x32
    python examples/lenet_scan.py --schedule blelloch   # all levels of the up-sweep

The two loss curves lie on each other: the scan computes the same gradients. The largest difference is printed.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
import weft
from curves import draw
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm


def lenet() -> nn.Sequential:
    """LeNet-5 for samples (1, 32, 32)."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, 10),
    )


def digits(device: str) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 32, 32) of mean 0 and deviation 1, and classes (N,)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1)
    images = F.interpolate(images, size=32, mode="bilinear", align_corners=False)
    return (images - images.mean()) / images.std(), torch.tensor(data.target, device=device)


def train(name: str, net: nn.Module, images: Tensor, classes: Tensor, options: argparse.Namespace) -> list[float]:
    """The loss of every step; the order of the batches depends on the seed alone."""
    optimizer = torch.optim.SGD(net.parameters(), lr=options.learning_rate, momentum=0.9)
    generator = torch.Generator().manual_seed(options.seed)
    losses: list[Tensor] = []
    for _ in tqdm(range(options.steps), desc=name, unit="step"):
        chosen = torch.randint(len(images), (options.batch,), generator=generator).to(images.device)
        loss = F.cross_entropy(net(images[chosen]), classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main(arguments: list[str] | None = None) -> tuple[list[float], list[float]]:
    """Returns both loss curves, the scan's first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--schedule", default="auto", help='"auto", "linear", "blelloch" or a number of levels')
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("lenet_scan.png"), help="the figure (default lenet_scan.png)"
    )
    parser.add_argument("--quick", action="store_true", help="five steps of eight samples, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.batch = 5, 8
    if min(options.steps, options.batch) < 1:
        parser.error("--steps and --batch must be at least 1")
    schedule = int(options.schedule) if options.schedule.isdigit() else options.schedule

    torch.manual_seed(options.seed)
    plain = lenet().to(options.device)
    scan = weft.scan.ScanSequential(*copy.deepcopy(plain), schedule=schedule)
    images, classes = digits(options.device)
    print(weft.scan.plan_chain(scan, images[: options.batch]))
    by_scan = train("scan", scan, images, classes, options)
    by_autograd = train("autograd", plain, images, classes, options)

    table = Table("step", "loss, scan", "loss, autograd")
    for step in range(0, options.steps, max(1, options.steps // 10)):
        table.add_row(str(step), f"{by_scan[step]:.6f}", f"{by_autograd[step]:.6f}")
    Console().print(table)
    curves = {"scan": list(enumerate(by_scan)), "autograd": list(enumerate(by_autograd))}
    draw(options.output, f"LeNet-5, schedule {options.schedule}", curves)
    difference = max(abs(a - b) for a, b in zip(by_scan, by_autograd, strict=True))
    print(f"largest difference of the two curves: {difference:.2e}")
    return by_scan, by_autograd


if __name__ == "__main__":
    main()
