"""Handwritten digits read row by row: linear state spaces beside a GRU of the same size.

scikit-learn's 1,797 digits are images of 8 x 8 pixels; a layer reads the 8 rows of one as 8 steps, or with --pixels
its 64 pixels as 64 steps, and a linear layer names the digit from the last output. LRU and S5 are linear in their
state, and minGRU's gates do not look at it, so that all steps run at once; torch.nn.GRU goes step by step. They stand
in its place: the same arguments, the same output. A quarter of the digits is held out.

    python examples/digits.py --cells gru lru s5 --pixels
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import weft
from curves import draw
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

CELLS = {"gru": nn.GRU, "lru": weft.nn.LRU, "s5": weft.nn.S5, "mingru": weft.nn.MinGRU}


class Reader(nn.Module):
    """Logits (B, 10) of images (B, T, X)."""

    def __init__(self, cell: str, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.layer = CELLS[cell](inputs, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.layer(images)
        return self.output(F.gelu(states[:, -1]))


def load(pixels: bool, device: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(images (B, T, X), digits (B)) to train on, and those that are held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device=device) / 16
    digits = torch.tensor(data.target, device=device)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).to(device)
    images = images.reshape(-1, 64, 1) if pixels else images
    held_out, train = order[: len(order) // 4], order[len(order) // 4 :]
    return (images[train], digits[train]), (images[held_out], digits[held_out])


def accuracy(net: nn.Module, images: Tensor, digits: Tensor) -> float:
    with torch.no_grad():
        return (net(images).argmax(-1) == digits).float().mean().item()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains a reader of every cell; returns the accuracy of each on the digits that are held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=tuple(CELLS), default=tuple(CELLS))
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pixels", action="store_true", help="64 steps of a pixel, not 8 steps of a row")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("digits.png"), help="of the figure")
    parser.add_argument("--quick", action="store_true", help="two epochs of small layers, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden, options.layers, options.epochs = 16, 1, 2
    if min(options.hidden, options.layers, options.epochs, options.batch) < 1:
        parser.error("--hidden, --layers, --epochs and --batch must be at least 1")
    train, held_out = load(options.pixels, options.device)
    curves: dict[str, list[tuple[float, float]]] = {}
    found = {}
    for cell in options.cells:
        torch.manual_seed(0)
        net = Reader(cell, train[0].shape[-1], options.hidden, options.layers).to(options.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
        curves[cell], seconds = [], 0.0
        progress = tqdm(range(options.epochs), desc=cell, unit="epoch")
        for epoch in progress:
            net.train()
            begin = time.perf_counter()
            for rows in torch.randperm(len(train[1]), device=options.device).split(options.batch):
                loss = F.cross_entropy(net(train[0][rows]), train[1][rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            last = loss.item()  # waits for the device
            seconds += time.perf_counter() - begin
            schedule.step()
            net.eval()
            found[cell] = accuracy(net, *held_out)
            curves[cell].append((epoch + 1, found[cell]))
            progress.set_postfix(loss=f"{last:.3f}", accuracy=f"{found[cell]:.3f}")
        speed = options.epochs * len(train[1]) / seconds
        size = sum(p.numel() for p in net.parameters())
        print(f"{cell}: accuracy {found[cell]:.3f}, {speed:,.0f} sequences/s in training, {size:,} parameters")
    steps = "64 pixels" if options.pixels else "8 rows"
    draw(options.output, f"digits, {steps}, H {options.hidden}", curves, x="epoch", y="accuracy on held-out digits")
    return found


if __name__ == "__main__":
    main()
