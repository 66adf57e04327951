"""A VGG-19 that trains within a budget of device memory for its activations: ``with weft.offload(budget)``.

    python examples/offload_vgg.py --budget 1GB     # on a GPU
    python examples/offload_vgg.py --quick          # a small net, anywhere

Checks that the gradients of a step with and without the budget have the same bits, trains both ways on random images,
and prints both speeds, both peaks and the report. Without CUDA tensors move to a second place in host memory: all but
the speed is as on a GPU. Writes a plot of the last step.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import torch
import weft
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

# Output channels of the convolutions, and where the size is halved.
LAYERS = (1, 1, "M", 2, 2, "M", 4, 4, 4, 4, "M", 8, 8, 8, 8, "M", 8, 8, 8, 8, "M")


def vgg19(width: int, size: int, classes: int = 1000) -> nn.Sequential:
    """VGG-19 (Simonyan and Zisserman, 2015), configuration E; 64 wide and 224 large in the paper."""
    layers: list[nn.Module] = []
    channels = 3
    for factor in LAYERS:
        if factor == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width * factor, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width * factor
    hidden = 64 * width
    layers += [nn.Flatten(), nn.Linear(channels * (size // 32) ** 2, hidden), nn.ReLU(inplace=True), nn.Dropout()]
    layers += [nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers)


def gradients(
    model: nn.Module, images: Tensor, labels: Tensor, around: contextlib.AbstractContextManager
) -> list[Tensor]:
    """Of one step, with dropout's numbers from one seed."""
    torch.manual_seed(1)
    model.zero_grad()
    with around:
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def train(
    name: str, model: nn.Module, images: Tensor, labels: Tensor, around: contextlib.AbstractContextManager, steps: int
) -> tuple[float, int | None]:
    """(seconds per step, peak bytes of the device or None) after two steps of warm-up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    start = 0.0
    for i in tqdm(range(steps + 2), desc=name, unit="step"):
        if i == 2:
            if images.is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        with around:
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if images.is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    return seconds, torch.cuda.max_memory_allocated() if images.is_cuda else None


def main(arguments: list[str] | None = None) -> weft.offloading.OffloadReport:
    """The command line; `arguments` default to ``sys.argv[1:]``. Returns the report of the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help="for saved tensors: 1GB, with --quick 200KB; 'none' moves what hides")
    parser.add_argument("--backend", choices=("copy", "managed", "reference"), help="copy, without CUDA reference")
    parser.add_argument("--compress", default="auto", choices=("auto", "zvc", "rle", "none"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--size", type=int, default=224, help="of the images, a multiple of 32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("offload_vgg.png"), help="plot of the last step")
    parser.add_argument("--quick", action="store_true", help="a small net, two steps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.batch, options.width, options.size, options.steps = 4, 8, 32, 2

    budget = options.budget or ("200KB" if options.quick else "1GB")

    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True  # or two plain steps need not have the same bits
    device = torch.device(options.device)
    model = vgg19(options.width, options.size).to(device)
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    labels = torch.randint(1000, (options.batch,), device=device)

    off = weft.offload(
        None if budget == "none" else budget,
        backend=options.backend or ("copy" if device.type == "cuda" else "reference"),
        compress=None if options.compress == "none" else options.compress,
        min_bytes="1KiB" if options.quick else "1MiB",
    )
    plain = gradients(model, images, labels, contextlib.nullcontext())
    for _ in tqdm(range(2), desc="compare gradients", unit="step"):  # the first use records, the second goes by a plan
        same = all(map(torch.equal, plain, gradients(model, images, labels, off)))
        if not same:
            raise SystemExit("the gradients differ")
    del plain

    console = Console()
    table = Table("", "ms per step", "images/s", "peak of the device")
    for name, around in (("plain", contextlib.nullcontext()), (f"offload {budget}", off)):
        seconds, peak = train(name, model, images, labels, around, options.steps)
        memory = "" if peak is None else f"{peak / 1e9:.2f} GB"
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{options.batch / seconds:.0f}", memory)
    console.print(table)
    console.print("gradients with and without: the same bits")
    report = off.report()
    print(report)
    off.plot(options.output)
    console.print(f"wrote {options.output}")
    return report


if __name__ == "__main__":
    main()
