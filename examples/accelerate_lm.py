"""A torch.nn LSTM language model before and after one line: ``weft.accelerate(model)``.

    python examples/accelerate_lm.py                 # on a GPU in bfloat16 if there is one, else on the CPU
    python examples/accelerate_lm.py --hidden 1024 --batch 64 --dtype float16

The model below knows nothing of Weft. It trains for a few seconds as it is and, after that line, goes on with the same
parameters and the same optimizer; at the end stand both speeds and what ran.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch
import weft
from curves import Point, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from weft.data import Vocabulary, python_docs


class LanguageModel(nn.Module):
    """Embedding, LSTM layers, and a linear layer that scores the next token."""

    def __init__(self, tokens: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=layers)
        self.scores = nn.Linear(hidden, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (T, B, tokens) of the token after each of `tokens` (T, B)."""
        output, _ = self.lstm(self.embedding(tokens))
        return self.scores(output)


class Speed(NamedTuple):
    """What one phase of the training reached."""

    tokens_per_second: float
    loss: float
    """Of the last step, in nats per token."""
    curve: list[Point]
    """Seconds and loss."""


def train(
    name: str, model: LanguageModel, optimizer: torch.optim.Optimizer, text: Tensor, options: argparse.Namespace
) -> Speed:
    """Train for a while on random pieces of `text` (tokens,); the first steps are not timed."""
    generator = torch.Generator().manual_seed(options.seed)
    steps = torch.arange(options.length + 1)[:, None]

    def step() -> Tensor:
        starts = torch.randint(len(text) - options.length, (options.batch,), generator=generator)
        piece = text[(steps + starts).to(text.device)]
        loss = F.cross_entropy(model(piece[:-1]).flatten(0, 1).float(), piece[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def wait() -> None:
        if text.is_cuda:
            torch.cuda.synchronize()

    for _ in range(3):  # kernels are compiled and memory is allocated at first use
        step()
    wait()
    count, start = 0, time.perf_counter()
    losses: list[tuple[float, Tensor]] = []
    with tqdm(total=options.steps, desc=name, unit="step", dynamic_ncols=True) as bar:
        while count < options.steps and time.perf_counter() - start < options.seconds:
            loss = step()
            count += 1
            bar.update()
            losses.append((time.perf_counter() - start, loss.detach()))
            if count % 10 == 0:  # the host must not run ahead of the clock
                wait()
    wait()
    speed = count * options.batch * options.length / (time.perf_counter() - start)
    return Speed(speed, loss.item(), [(seconds, loss.item()) for seconds, loss in losses])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512 if on_cuda else 128, help="hidden size H")
    parser.add_argument("--layers", type=int, default=2, help="LSTM layers (default 2)")
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per step (default 16)")
    parser.add_argument("--length", type=int, default=512 if on_cuda else 128, help="tokens of a piece")
    parser.add_argument("--dtype", default="bfloat16" if on_cuda else "float32", help="of the model")
    parser.add_argument("--algorithm", default="auto", help="of Weft's layers (default: auto)")
    parser.add_argument("--seconds", type=float, default=10, help="train at most this long, twice (default 10)")
    parser.add_argument("--steps", type=int, default=1000, help="train at most this many steps, twice (default 1000)")
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("accelerate_lm.png"), help="the figure (default accelerate_lm.png)"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden, options.batch, options.length, options.steps = 16, 4, 16, 5
    return options


def main(arguments: list[str] | None = None) -> dict[str, Speed]:
    """Runs the example; returns the speeds by layer."""
    options = parse(arguments)
    console = Console()
    torch.manual_seed(options.seed)
    console.print("reads the documentation inside Python")
    text = python_docs()
    vocabulary = Vocabulary.of(text)
    tokens = vocabulary.encode(text).to(options.device)
    model = LanguageModel(len(vocabulary), options.hidden, options.layers)
    model.to(options.device, getattr(torch, options.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    speeds = {"torch.nn.LSTM": train("torch.nn.LSTM", model, optimizer, tokens, options)}
    weft.accelerate(model, algorithm=options.algorithm)
    speeds["weft.nn.LSTM"] = train("weft.nn.LSTM", model, optimizer, tokens, options)

    piece = torch.zeros(options.length, options.batch, dtype=torch.long, device=options.device)
    explanation = weft.explain(model.lstm, model.embedding(piece))
    console.print(str(explanation), markup=False)
    sizes = f"{options.batch} x {options.length} tokens, {options.layers} layers, H {options.hidden}, {options.dtype}"
    table = Table(title=f"Training on {options.device}, {sizes}")
    for name in ("layer", "algorithm", "tokens per second", "torch's time / this", "last loss"):
        table.add_column(name, justify="left" if name in ("layer", "algorithm") else "right")
    before = speeds["torch.nn.LSTM"].tokens_per_second
    for (name, speed), algorithm in zip(speeds.items(), ("torch", explanation.algorithm), strict=True):
        rate = speed.tokens_per_second
        table.add_row(name, algorithm, f"{rate:,.0f}", f"{rate / before:.2f}", f"{speed.loss:.3f}")
    console.print(table)
    curves = {name: speed.curve for name, speed in speeds.items()}
    draw(options.output, f"LSTM language model on {options.device}", curves, x="seconds of each phase")
    return speeds


if __name__ == "__main__":
    main()
