"""VGG-11 with 97% of its weights pruned by magnitude, retrained through the scan (BPPSA, section 5.3).

    python examples/vgg11_pruned.py                           # the digits inside scikit-learn
    python examples/vgg11_pruned.py --data cifar-10-batches-py   # CIFAR-10, Python version

Pruned Jacobians keep the non-zero weights alone, so that a step of the chain costs what these cost. The script prints
the FLOPs of a backward pass and of its critical path beside the baseline's gradient operators, then retrains.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
import weft
from curves import draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import prune
from tqdm import tqdm

LAYERS = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def vgg11(width: float = 1.0) -> list[nn.Module]:
    """The layers of VGG-11 for samples (3, 32, 32)."""
    layers: list[nn.Module] = []
    channels = 3
    for layer in LAYERS:
        if layer == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            outputs = max(1, int(layer * width))
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
            channels = outputs
    return [*layers, nn.Flatten(), nn.Linear(channels, 10)]


def cifar10(folder: Path, device: str) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) of mean 0 and deviation 1, and classes (N,), of the training batches."""
    images, classes = [], []
    for file in sorted(folder.glob("data_batch_*")):
        with file.open("rb") as stream:
            batch = pickle.load(stream, encoding="bytes")
        images.append(torch.as_tensor(batch[b"data"]).view(-1, 3, 32, 32))
        classes += batch[b"labels"]
    if not images:
        raise SystemExit(f"--data: no data_batch_* in {folder}; name the unpacked folder of CIFAR-10's Python version")
    pixels = torch.cat(images).to(device, torch.float32)
    return (pixels - pixels.mean()) / pixels.std(), torch.tensor(classes, device=device)


def digits(device: str) -> tuple[Tensor, Tensor]:
    """The same of the digits inside scikit-learn, in three equal channels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1)
    images = F.interpolate(images, size=32, mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
    return (images - images.mean()) / images.std(), torch.tensor(data.target, device=device)


def train(
    name: str, net: nn.Module, images: Tensor, classes: Tensor, steps: int, options: argparse.Namespace
) -> list[float]:
    """The loss of every step."""
    optimizer = torch.optim.Adam(net.parameters(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(options.seed)
    losses: list[Tensor] = []
    for _ in tqdm(range(steps), desc=name, unit="step"):
        chosen = torch.randint(len(images), (options.batch,), generator=generator).to(images.device)
        loss = F.cross_entropy(net(images[chosen]), classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def reached(losses: list[float]) -> float:
    """The mean loss of the last tenth of the steps."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def main(arguments: list[str] | None = None) -> weft.scan.ChainPlan:
    """Returns the plan of the pruned net's backward pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10's Python version")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sparsity", type=float, default=0.97, help="fraction of the weights that is pruned")
    parser.add_argument("--width", type=float, default=1.0, help="channels, as a fraction of VGG-11's")
    parser.add_argument("--steps", type=int, default=200, help="of training before, and after pruning")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("vgg11_pruned.png"), help="the figure (default vgg11_pruned.png)"
    )
    parser.add_argument("--quick", action="store_true", help="a narrow net, three steps of two samples")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.batch, options.width = 3, 2, 0.125
    if min(options.steps, options.batch) < 1:
        parser.error("--steps and --batch must be at least 1")
    if not 0 <= options.sparsity <= 1:
        parser.error("--sparsity must lie between 0 and 1")

    torch.manual_seed(options.seed)
    print(f"reads {'the digits inside scikit-learn' if options.data is None else options.data}", flush=True)
    images, classes = digits(options.device) if options.data is None else cifar10(options.data, options.device)
    dense = nn.Sequential(*vgg11(options.width)).to(options.device)
    before = train("dense, autograd", dense, images, classes, options.steps, options)

    weights = [(m, "weight") for m in dense if isinstance(m, (nn.Conv2d, nn.Linear))]
    prune.global_unstructured(weights, prune.L1Unstructured, amount=options.sparsity)
    pruned = weft.scan.ScanSequential(*dense, schedule="auto", prune=True)
    plan = weft.scan.plan_chain(pruned, images[: options.batch])
    print(plan)
    after = train("pruned, scan", pruned, images, classes, options.steps, options)

    baseline = [flops for _, flops in plan.baseline]
    table = Table("", "baseline", "pruned, scan")
    table.add_row("MFLOP of a sample's backward pass", f"{sum(baseline) / 1e6:.2f}", f"{plan.flops / 1e6:.2f}")
    table.add_row(
        "MFLOP of the largest step", f"{max(baseline) / 1e6:.2f}", f"{max(s.flops for s in plan.steps) / 1e6:.2f}"
    )
    table.add_row("MFLOP of the critical path", f"{sum(baseline) / 1e6:.2f}", f"{plan.critical_flops / 1e6:.2f}")
    table.add_row("levels of the up-sweep", "", str(plan.levels))
    table.add_row("loss", f"{reached(before):.4f}", f"{reached(after):.4f}")
    Console().print(table)
    curves = {"dense, autograd": list(enumerate(before)), "pruned, scan": list(enumerate(after, len(before)))}
    draw(options.output, f"VGG-11, {100 * options.sparsity:g}% pruned", curves)
    return plan


if __name__ == "__main__":
    main()
