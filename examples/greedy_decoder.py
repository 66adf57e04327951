"""A decoder that feeds each prediction into the next step: it learns to say a word backwards, then runs by itself.

    python examples/greedy_decoder.py [--quick] [--device cuda] [--algorithm torch]

A loop that decides at each step what the next one gets cannot call a layer for all steps at once. It calls a cell.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import weft
from curves import draw
from torch import Tensor, nn
from tqdm import tqdm

LETTERS, LENGTH, START = 8, 5, 8  # START is one more symbol


class Reverser(nn.Module):
    def __init__(self, hidden: int, algorithm: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS + 1, hidden)
        self.encode = weft.nn.LSTM(hidden, hidden)
        self.step = weft.nn.LSTMCell(hidden, hidden, algorithm=algorithm)
        self.read_out = nn.Linear(hidden, LETTERS)

    def forward(self, words: Tensor, teacher: Tensor | None = None) -> Tensor:
        """Scores (LENGTH, B, LETTERS) for words (LENGTH, B); without a teacher each step gets the last one's letter."""
        _, (h, c) = self.encode(self.embed(words))
        h, c = h[0], c[0]
        letters, scores = torch.full_like(words[0], START), []
        for t in range(LENGTH):
            h, c = self.step(self.embed(letters), (h, c))
            scores.append(self.read_out(h))
            letters = scores[-1].argmax(-1) if teacher is None else teacher[t]
        return torch.stack(scores)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("greedy_decoder.png"), help="the figure (default greedy_decoder.png)"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--algorithm", default="auto", choices=("auto", "fused", "torch"), help="of the cell")
    options = parser.parse_args(arguments)
    hidden, steps = (64, 400) if options.quick else (256, 2000)
    torch.manual_seed(0)
    model = Reverser(hidden, options.algorithm).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    print(weft.explain(model.step, torch.empty(32, hidden, device=options.device)))
    losses: list[Tensor] = []
    for _ in tqdm(range(steps), desc="learns to reverse words", unit="step"):
        words = torch.randint(LETTERS, (LENGTH, 32), device=options.device)
        backwards = words.flip(0)
        scores = model(words, teacher=backwards)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), backwards.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    words = torch.randint(LETTERS, (LENGTH, 512), device=options.device)
    with torch.no_grad():
        right = (model(words).argmax(-1) == words.flip(0)).float().mean().item()
        start = time.perf_counter()
        for _ in range(20):
            model(words[:, :1])
        if options.device == "cuda":
            torch.cuda.synchronize()
        each = 1e6 * (time.perf_counter() - start) / 20
    taken = weft.explain(model.step, torch.empty(1, hidden, device=options.device)).algorithm
    draw(options.output, "Words backwards", {"loss": list(enumerate(torch.stack(losses).tolist()))})
    print(f"{100 * right:.1f}% of the letters are right; one word takes {each:.0f} us ({taken})")
    return right


if __name__ == "__main__":
    main()
