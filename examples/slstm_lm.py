"""The sLSTM of xLSTM beside an LSTM of as many parameters: characters, and a task that needs what it has.

    python examples/slstm_lm.py              # a few minutes on two CPU cores; uses a GPU if there is one
    python examples/slstm_lm.py --heads 1 --seconds 120

First both learn the text of examples/char_lm.py, each for so many seconds: bits per character of text that they have
not seen, and characters per second. Then the parity of a stream of bits so far, at every step: one bit of memory that
every input may turn over. What the gates of a diagonal recurrence (minGRU, S5, Mamba) see is the input alone, so that
it cannot know what to turn over; it is shown beside the two. They train on short streams and are asked about streams of
four times the length.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import weft
from char_lm import bits_per_character, learning_rate, train
from curves import Point, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from weft.data import Vocabulary, python_docs, split


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def layer_of(kind: str, inputs: int, hidden: int, heads: int) -> nn.Module:
    """An sLSTM of `hidden` units, or the LSTM or minGRU whose number of parameters comes next to its."""
    slstm = weft.nn.SLSTM(inputs, hidden, num_heads=heads)
    if kind == "sLSTM":
        return slstm
    make = weft.nn.LSTM if kind == "LSTM" else weft.nn.MinGRU
    with torch.device("meta"):
        width = min(range(1, 8 * hidden), key=lambda H: abs(parameters(make(inputs, H)) - parameters(slstm)))
    return make(inputs, width)


class CharLM(nn.Module):
    """Embedding, one recurrent layer, and a linear layer that scores the next character."""

    def __init__(self, characters: int, embedding: int, layer: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.layer = layer
        self.scores = nn.Linear(layer.hidden_size, characters)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores (T, B, characters) of the character after each of `tokens` (T, B), and the states to go on from, one
        tensor of them."""
        output, states = self.layer(self.embedding(tokens), None if state is None else tuple(state))
        return self.scores(output), torch.stack(states)


class Parity(nn.Module):
    """A recurrent layer over bits (T, B), and a score (T, B) of their sum being odd so far."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.score = nn.Linear(layer.hidden_size, 1)

    def forward(self, bits: Tensor) -> Tensor:
        return self.score(self.layer(F.one_hot(bits, 2).float())[0]).squeeze(-1)


def streams(length: int, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Bits (T, B), and their parity so far."""
    bits = torch.randint(2, (length, batch), device=device)
    return bits, bits.cumsum(0) % 2


def learn_parity(model: Parity, name: str, options: argparse.Namespace) -> list[Point]:
    """Streams of 2 steps to options.bits; the curve of steps and accuracy."""
    optimizer = torch.optim.Adam(model.parameters(), lr=options.parity_rate)
    curve: list[Point] = []
    with tqdm(range(options.parity_steps), desc=name, unit="step", dynamic_ncols=True) as bar:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options.parity_rate, step, step / options.parity_steps)
            # Short ones first: what one bit does shows there.
            longest = 2 + int((options.bits - 2) * min(1.0, 2 * step / options.parity_steps))
            length = int(torch.randint(2, longest + 1, ()))
            bits, odd = streams(length, options.batch, options.device)
            score = model(bits)
            loss = F.binary_cross_entropy_with_logits(score, odd.float())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 49 or step + 1 == options.parity_steps:
                right = ((score > 0) == odd.bool()).float().mean().item()
                bar.set_postfix_str(f"loss {loss.item():.3f}, {right:.0%} right")
                curve.append((step + 1, right))
    return curve


@torch.no_grad()
def accuracy(model: Parity, length: int, device: str) -> float:
    """Share of right answers at the last quarter of fresh streams of this length."""
    bits, odd = streams(length, 256, device)
    return ((model(bits) > 0) == odd.bool())[-max(1, length // 4) :].float().mean().item()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a UTF-8 file to train on (default: Python's documentation)")
    parser.add_argument("--heads", type=int, default=4, help="of the sLSTM (default 4)")
    parser.add_argument(
        "--seconds", type=float, default=60, help="train each on the text at most this long (default 60)"
    )
    parser.add_argument("--steps", type=int, default=3000, help="and at most this many steps (default 3000)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size H of the sLSTM (default 128)")
    parser.add_argument("--embedding", type=int, default=64, help="size of a character's vector (default 64)")
    parser.add_argument("--batch", type=int, default=32, help="streams read in parallel (default 32)")
    parser.add_argument("--length", type=int, default=64, help="characters per step and column (default 64)")
    parser.add_argument("--learning-rate", type=float, default=6e-3, help="peak of Adam's learning rate, of characters")
    parser.add_argument("--bits", type=int, default=40, help="longest stream that parity is learnt on (default 40)")
    parser.add_argument("--parity-steps", type=int, default=1500, help="of training (default 1500)")
    parser.add_argument("--parity-rate", type=float, default=1e-2, help="peak of the learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("slstm_lm.png"), help="of the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.hidden, options.batch, options.length, options.parity_steps = 5, 16, 4, 16, 20
    if min(options.steps, options.hidden, options.batch, options.length, options.heads, options.parity_steps) < 1:
        parser.error("--steps, --hidden, --batch, --length, --heads and --parity-steps must be at least 1")
    if options.hidden % options.heads:
        parser.error(f"--heads must divide --hidden {options.hidden}, got {options.heads}")
    return options


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the example; returns the accuracy of parity by layer."""
    options = parse(arguments)
    console = Console()
    try:
        text = options.text.read_text(encoding="utf-8") if options.text else python_docs()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--text: cannot read {options.text} as UTF-8: {error}") from None
    if options.quick:
        text = text[:20000]
    vocabulary = Vocabulary.of(text)
    tokens, held_out = split(vocabulary.encode(text).to(options.device))
    console.print(f"{len(text):,} characters, {len(vocabulary)} different ones; on {options.device}")

    table = Table(title="Characters")
    for column in ("", "H", "parameters", "bits per character", "characters/s"):
        table.add_column(column, justify="right" if column else "left")
    curves: dict[str, list[Point]] = {}
    for kind in ("sLSTM", "LSTM"):
        torch.manual_seed(options.seed)
        layer = layer_of(kind, options.embedding, options.hidden, options.heads)
        model = CharLM(len(vocabulary), options.embedding, layer).to(options.device)
        example = torch.zeros(options.length, options.batch, options.embedding, device=options.device)
        console.print(f"{kind} runs as {weft.explain(layer, example).algorithm!r}")
        speed, curves[kind] = train(model, tokens, options)
        bits = bits_per_character(model, held_out)
        table.add_row(kind, f"{layer.hidden_size}", f"{parameters(layer):,}", f"{bits:.3f}", f"{speed:,.0f}")
    console.print(table)

    length = 4 * options.bits
    table = Table(title=f"Parity, learnt on up to {options.bits} bits; by guessing: 50%")
    for column in ("", "H", "parameters", f"right at {options.bits}", f"right at {length}", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    reached = {}
    for kind in ("sLSTM", "LSTM", "minGRU"):
        torch.manual_seed(options.seed)
        model = Parity(layer_of(kind, 2, 16 if options.quick else 64, options.heads)).to(options.device)
        start = time.perf_counter()
        learn_parity(model, kind, options)
        seconds = time.perf_counter() - start
        reached[kind] = accuracy(model, length, options.device)
        near = accuracy(model, options.bits, options.device)
        row = (f"{model.layer.hidden_size}", f"{parameters(model.layer):,}", f"{near:.1%}", f"{reached[kind]:.1%}")
        table.add_row(kind, *row, f"{seconds:.0f}")
    console.print(table)
    draw(options.output, f"Characters, {options.device}", curves, x="seconds")
    assert all(math.isfinite(value) for value in reached.values())
    return reached


if __name__ == "__main__":
    main()
