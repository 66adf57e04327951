"""BPPSA's own benchmark (MLSys 2020, section 4.1): classify long streams of random bits.

A stream of class c in 0..9 holds T bits, each 1 with probability 0.05 + 0.1 c. A tanh RNN with H = 20 reads it, and a
linear layer names the class from the last state, so every gradient travels through all T steps. The same weights learn
the same batches with Weft and with torch.nn, and the two loss curves are drawn over wall time.

    python examples/bitstream.py --length 10000 --batch 16 --output bitstream.png

With ``--algorithm newton`` the forward pass walks many chunks of the stream at once, and again until their seams meet;
at the end stands what that took after training.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import weft
from curves import draw
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

CLASSES = 10


class Classifier(nn.Module):
    """The class scores (B, 10) of bit streams (T, B, 1)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, hidden)
        self.scores = nn.Linear(hidden, CLASSES)

    def forward(self, bits: Tensor) -> Tensor:
        return self.scores(self.rnn(bits)[0][-1])


def make_streams(streams: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Bits (streams, length) as int8 and classes (streams,), as many of each class."""
    classes = torch.arange(streams, device=device) % CLASSES
    bits = torch.empty(streams, length, dtype=torch.int8, device=device)
    # In slices: the uniform numbers take four times the bytes of the bits.
    for rows in torch.arange(streams, device=device).split(1024):
        probability = 0.05 + 0.1 * classes[rows, None]
        bits[rows] = (torch.rand(len(rows), length, device=device) < probability).to(torch.int8)
    return bits, classes


@dataclass
class Curve:
    """Loss, averaged over the steps since the last point, at so many seconds of training."""

    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    steps: int = 0


def train(name: str, model: Classifier, bits: Tensor, classes: Tensor, options: argparse.Namespace) -> Curve:
    """One run; the order of the batches depends on the seed alone."""
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(options.seed)
    curve = Curve()
    model(bits[: options.batch].t()[..., None].float()).sum().backward()  # warm-up: not part of the training
    optimizer.zero_grad()
    if bits.is_cuda:
        torch.cuda.synchronize(bits.device)  # or the clock would start while the warm-up still runs
    total = min(options.steps, options.epochs * len(bits) // options.batch)
    batches: list[Tensor] = []
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step in tqdm(range(total), desc=name, unit="step"):
        if not batches:
            order = torch.randperm(len(bits), generator=generator).to(bits.device)
            batches = [b for b in order.split(options.batch) if len(b) == options.batch]
        batch = batches.pop()
        loss = F.cross_entropy(model(bits[batch].t()[..., None].float()), classes[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        curve.steps = step + 1
        out_of_time = time.perf_counter() - start > options.seconds
        if len(losses) == options.every or step + 1 == total or out_of_time:
            curve.loss.append(torch.stack(losses).mean().item())  # waits for the device
            curve.seconds.append(time.perf_counter() - start)
            losses = []
        if out_of_time:
            break
    return curve


@torch.no_grad()
def report_chunks(model: Classifier, bits: Tensor, options: argparse.Namespace) -> None:
    """Prints into how many chunks a batch was cut, and how much of it was walked again."""
    with weft.scan.newton_report() as report:
        model(bits[: options.batch].t()[..., None].float())
    if report.runs:
        print(report)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1000, help="bits T per stream; the paper: 10 to 30000")
    parser.add_argument("--batch", type=int, default=16, help="streams B per step; the paper: 2 to 256")
    parser.add_argument("--streams", type=int, default=32000, help="size of the data set (default 32000)")
    parser.add_argument("--hidden", type=int, default=20, help="hidden size H (default 20)")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="Adam's (default 1e-5)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data at most")
    parser.add_argument("--steps", type=int, default=10**9, help="steps at most")
    parser.add_argument("--seconds", type=float, default=60, help="of training per run at most (default 60)")
    parser.add_argument("--every", type=int, default=20, help="steps per point of the curve")
    parser.add_argument("--algorithm", default="auto", help="of Weft's layer (default: auto)")
    parser.add_argument("--output", type=Path, default=Path("bitstream.png"), help="of the figure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps on short streams, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.length, options.streams, options.batch, options.every = 30, 80, 8, 5
    if not 0 < options.batch <= options.streams:
        parser.error("--batch must lie between 1 and --streams")
    return options


def main(arguments: list[str] | None = None) -> dict[str, Curve]:
    """Runs the example; returns the loss curves of "Weft" and "torch.nn"."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    bits, classes = make_streams(options.streams, options.length, options.device)
    peer = Classifier(options.hidden).to(options.device)
    model = weft.accelerate(copy.deepcopy(peer), algorithm=options.algorithm)
    print(weft.explain(model.rnn, torch.zeros(options.length, options.batch, 1, device=options.device)))
    curves = {
        "Weft": train("Weft", model, bits, classes, options),
        "torch.nn": train("torch.nn", peer, bits, classes, options),
    }
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    title = f"T {options.length}, B {options.batch}, tanh RNN with H {options.hidden}, {device}"
    lines = {f"{name}, {c.steps} steps": list(zip(c.seconds, c.loss, strict=True)) for name, c in curves.items()}
    draw(options.output, title, lines, x="wall time, s", y="training loss, nats")
    report_chunks(model, bits, options)
    for name, curve in curves.items():
        rate = curve.seconds[-1] / curve.steps * 1e3
        print(f"{name:<9} {curve.steps} steps, {rate:.2f} ms per step, last loss {curve.loss[-1]:.4f}")
    return curves


if __name__ == "__main__":
    main()
