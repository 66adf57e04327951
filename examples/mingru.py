"""A minGRU in ten lines on weft.scan.linear_scan, taught to remember.

Every step of a stream has a number and a flag. Asked for at every step is the number that came with the latest flag, so
what has to be remembered may lie hundreds of steps back. The layer is the minGRU of Feng et al., "Were RNNs all we
needed?" (2024): gate and candidate depend on the input alone, so that the recurrence is diagonal and linear,

    h[t] = (1 - z[t]) * h[t-1] + z[t] * (W x[t]),  z[t] = sigmoid(U x[t]),

and runs in parallel over time. The last state is passed on, so that a stream can be read in pieces.

    python examples/mingru.py --length 2048
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import weft
from curves import draw
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm


class MinGRU(nn.Module):
    """States (T, B, H) of inputs (T, B, X), from a state (B, H) or zeros."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gates = nn.Linear(inputs, 2 * hidden)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        z, candidate = self.gates(x).chunk(2, dim=-1)
        z = z.sigmoid()
        state = torch.zeros_like(z[0]) if state is None else state
        return weft.scan.linear_scan(1 - z, z * candidate, state)


def make_streams(length: int, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs (T, B, 2), numbers and flags, and what is to be remembered (T, B)."""
    numbers = torch.randn(length, batch, device=device)
    flags = torch.rand(length, batch, device=device) < 0.02
    flags[0] = True
    latest = torch.where(flags, torch.arange(length, device=device)[:, None], 0).cummax(0).values
    return torch.stack([numbers, flags.float()], dim=-1), numbers.gather(0, latest)


def main(arguments: list[str] | None = None) -> float:
    """Trains, reads a stream in two pieces, and returns the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="steps of a stream (default 1024)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--steps", type=int, default=600, help="of training (default 600)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("mingru.png"), help="of the figure")
    parser.add_argument("--quick", action="store_true", help="a few short steps, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.length, options.steps = 128, 10
    if min(options.length, options.batch, options.hidden, options.steps) < 1:
        parser.error("--length, --batch, --hidden and --steps must be at least 1")
    torch.manual_seed(0)
    layer, output = MinGRU(2, options.hidden).to(options.device), nn.Linear(options.hidden, 1).to(options.device)
    optimizer = torch.optim.Adam([*layer.parameters(), *output.parameters()], lr=2e-2)
    losses: list[float] = []
    progress = tqdm(range(options.steps), unit="step")
    for _ in progress:
        x, wanted = make_streams(options.length, options.batch, options.device)
        loss = F.mse_loss(output(layer(x)).squeeze(-1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.4f}")
    draw(options.output, f"minGRU, T {options.length}", {"loss": list(enumerate(losses))})
    print(f"loss {losses[-1]:.4f}; to answer 0 everywhere is 1")

    with torch.no_grad():
        x, _ = make_streams(options.length, 1, options.device)
        whole, half = layer(x), options.length // 2
        first = layer(x[:half])
        second = layer(x[half:], first[-1])
        difference = (torch.cat([first, second]) - whole).abs().max().item()
    print(f"the same stream in two pieces: states differ by {difference:.1e}")
    return losses[-1]


if __name__ == "__main__":
    main()
