"""A cell of one's own as one kernel: spiking neurons learn scikit-learn's handwritten digits, row by row.

    python examples/own_cell.py              # half a minute on two CPU cores; uses a GPU if there is one
    python examples/own_cell.py --hidden 512 --show 32 --epochs 30

A digit's 8 rows are shown one after the other, each for some time steps. Two layers of leaky integrate-and-fire
neurons answer with spikes; how often the second layer's fire tells the digit. A spike is a step function, which has
no gradient: backward it is taken for a steep sigmoid. The neuron is ten lines below, and `weft.scan.pointwise_scan`
makes a kernel of them. At the end: the accuracy on digits that it has not seen, what a training step costs beside a
loop over time, which must agree on every gradient, and the report of one long sequence.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import weft
from curves import Point, draw
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

State = tuple[Tensor, Tensor]


def neuron(state: State, current: Tensor, decay: Tensor) -> State:
    """One time step: the potential leaks, takes up the current, and where it comes above 1 the neuron fires and starts
    again from 0."""
    potential, fired = state
    potential = torch.sigmoid(decay) * potential * (1 - fired) + current
    soft = torch.sigmoid(5 * (potential - 1))
    fired = soft + ((potential > 1).to(soft.dtype) - soft).detach()  # a step forward, a sigmoid backward
    return potential, fired


def loop(step: Callable[..., State], init: State, inputs: Tensor, parameters: Tensor) -> State:
    """What weft.scan.pointwise_scan computes, one step after the other."""
    found = []
    for x in inputs.unbind():
        init = step(init, x, parameters)
        found.append(init)
    potentials, spikes = zip(*found, strict=True)
    return torch.stack(potentials), torch.stack(spikes)


class Spiking(nn.Module):
    """Two layers of neurons, and a linear layer that scores the digits by how often the second fires."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.currents = nn.ModuleList((nn.Linear(8, hidden), nn.Linear(hidden, hidden)))
        self.decays = nn.ParameterList(torch.full((hidden,), 2.0) for _ in self.currents)
        self.scores = nn.Linear(hidden, 10)
        nn.init.uniform_(self.currents[0].weight, -0.3, 0.7)

    def forward(self, rows: Tensor, scan: Callable[..., State] = weft.scan.pointwise_scan) -> Tensor:
        """Scores (B, 10) of what is shown, (T, B, 8)."""
        x = rows
        for current, decay in zip(self.currents, self.decays, strict=True):
            driven = current(x)
            _, x = scan(neuron, (torch.zeros_like(driven[0]),) * 2, driven, decay)
        return self.scores(x.mean(0) * 10)


def digits(show: int, device: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rows (T, N, 8) and classes (N) to train on, and a fifth of them to test on."""
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32)
    rows = images.transpose(0, 1).repeat_interleave(show, 0).contiguous().to(device)
    classes = torch.tensor(data.target).to(device)
    held_out = torch.arange(len(classes), device=device) % 5 == 0
    return (rows[:, ~held_out], classes[~held_out]), (rows[:, held_out], classes[held_out])


def train(model: Spiking, rows: Tensor, classes: Tensor, options: argparse.Namespace) -> list[Point]:
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    curve: list[Point] = []
    with tqdm(range(options.epochs), unit="epoch", dynamic_ncols=True) as bar:
        for epoch in bar:
            total = torch.zeros((), device=rows.device)
            order = torch.randperm(len(classes), device=rows.device).split(options.batch)
            for piece in order:
                loss = F.cross_entropy(model(rows[:, piece]), classes[piece])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(piece)
            curve.append((epoch + 1.0, total.item() / len(classes)))
            bar.set_postfix_str(f"loss {curve[-1][1]:.3f}")
    return curve


def compare(model: Spiking, rows: Tensor, classes: Tensor, repeats: int) -> Table:
    """One training step, forward and backward, as a kernel and as a loop over time."""

    def step(scan: Callable[..., State]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(model(rows, scan), classes), list(model.parameters()))

    def timed(scan: Callable[..., State]) -> float:
        times = []
        for _ in range(repeats):
            if rows.is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            step(scan)
            if rows.is_cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)

    difference = max(
        ((a - b).norm() / b.norm().clamp(min=1e-6)).item()
        for a, b in zip(step(weft.scan.pointwise_scan), step(loop), strict=True)
    )
    mine, theirs = timed(weft.scan.pointwise_scan), timed(loop)
    table = Table(title=f"One training step, {rows.shape[1]} digits, {rows.shape[0]} time steps")
    for name in ("", "pointwise_scan", "loop"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("time, ms (median)", f"{mine:.2f}", f"{theirs:.2f}")
    table.add_row("loop's time / this", f"{theirs / mine:.1f}", "1.0")
    table.add_row("largest relative gradient difference", f"{difference:.1e}", "")
    return table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128, help="neurons of a layer (default 128)")
    parser.add_argument("--show", type=int, default=8, help="time steps of a row (default 8)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the digits (default 20)")
    parser.add_argument("--batch", type=int, default=64, help="digits of a training step (default 64)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="Adam's (default 0.003)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("own_cell.png"), help="of the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden, options.show, options.epochs = 16, 2, 1
    if min(options.hidden, options.show, options.epochs, options.batch) < 1:
        parser.error("--hidden, --show, --epochs and --batch must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> float:
    """Runs the example; returns the accuracy on digits that were held out."""
    options = parse(arguments)
    console = Console()
    torch.manual_seed(options.seed)
    (rows, classes), (unseen, unseen_classes) = digits(options.show, options.device)
    model = Spiking(options.hidden).to(options.device)
    console.print(
        f"{len(classes):,} digits, {rows.shape[0]} time steps each, {2 * options.hidden} neurons, on {options.device}"
    )
    curve = train(model, rows, classes, options)
    with torch.no_grad():
        accuracy = (model(unseen).argmax(1) == unseen_classes).float().mean().item()
    batch = slice(options.batch)
    console.print(compare(model, rows[:, batch], classes[batch], repeats=2 if options.quick else 10))
    with weft.scan.newton_report() as report, torch.no_grad():
        model(unseen[:, :4].transpose(0, 1).reshape(-1, 1, 8).repeat(16, 1, 1))  # one after the other, again and again
    console.print("one sequence of digits:", str(report), sep="\n", markup=False)
    draw(options.output, f"Spiking neurons, {options.hidden} a layer, {options.device}", {"spiking": curve}, x="epoch")
    console.print(f"accuracy on {len(unseen_classes)} digits that it has not seen: [bold]{accuracy:.1%}[/bold]")
    return accuracy


if __name__ == "__main__":
    main()
