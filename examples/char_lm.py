"""A character-level GRU language model on the documentation inside every CPython, trained with Weft.

    python examples/char_lm.py               # at most two minutes on two CPU cores; uses a GPU if there is one
    python examples/char_lm.py --text my_book.txt --hidden 512 --seconds 600
    python examples/char_lm.py --cell mingru # a stack of minGRUs beside the GRU, each for so many seconds
    python examples/char_lm.py --cell paragru  # and a stack of ParaGRUs, whose gates look at the state

At the end it prints the bits per character on the last tenth of the text, which it has not trained on, a sample, and
what one training step costs with Weft's GRU and with torch.nn.GRU, which must agree on every gradient, and by which
algorithm Weft's ran; with another ``--cell``, what the models reached, and how fast.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
import weft
from curves import Point, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from weft.data import Vocabulary, python_docs, split


class CharLM(nn.Module):
    """Embedding, one GRU layer, and a linear layer that scores the next character."""

    def __init__(self, characters: int, embedding: int, hidden: int, algorithm: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.gru = weft.nn.GRU(embedding, hidden, algorithm=algorithm)
        self.scores = nn.Linear(hidden, characters)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores (T, B, characters) of the character after each of `tokens` (T, B), and the state to go on from."""
        output, state = self.gru(self.embedding(tokens), state)
        return self.scores(output), state


class Block(nn.Module):
    """A minGRU or a ParaGRU and a layer of the width of its input, added to that input. A minGRU's gates see what came
    before only through the layers below, a ParaGRU's beside that each the state of its own channel, so that there have
    to be several."""

    def __init__(self, width: int, hidden: int, cell: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.cell = cell(width, hidden)
        self.mix = nn.Sequential(nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        output, state = self.cell(self.norm(x), state)
        return x + self.mix(output), state


class BlocksLM(nn.Module):
    """Embedding, blocks of minGRUs or ParaGRUs, and a linear layer that scores the next character."""

    def __init__(
        self, characters: int, embedding: int, hidden: int, cell: type[nn.Module] = weft.nn.MinGRU, layers: int = 3
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.blocks = nn.ModuleList(Block(embedding, hidden, cell) for _ in range(layers))
        self.scores = nn.Sequential(nn.LayerNorm(embedding), nn.Linear(embedding, characters))

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As of :class:`CharLM`; the state is (layers, B, H)."""
        x, states = self.embedding(tokens), []
        for layer, block in enumerate(self.blocks):
            x, last = block(x, None if state is None else state[layer])
            states.append(last)
        return self.scores(x), torch.stack(states)


def streams(tokens: Tensor, batch: int) -> Tensor:
    """The text cut into `batch` columns of equal length, (T, B), read in parallel."""
    length = len(tokens) // batch
    return tokens[: length * batch].view(batch, length).t().contiguous()


def learning_rate(peak: float, step: int, progress: float) -> float:
    """A short linear warm-up, then half a cosine down to a fiftieth of the peak."""
    return peak * min(1.0, (step + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: nn.Module, tokens: Tensor, options: argparse.Namespace) -> tuple[float, list[Point]]:
    """Truncated back-propagation through time: the state is carried from one piece of the text to the next. Returns the
    characters per second, and the curve of seconds and loss."""
    columns = streams(tokens, options.batch)
    steps_per_epoch = (len(columns) - 1) // options.length
    if steps_per_epoch == 0:
        raise SystemExit(f"the text is too short for --batch {options.batch} --length {options.length}")
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    state = None
    smooth = None
    curve: list[Point] = []
    start = time.perf_counter()
    with tqdm(total=options.steps, unit="step", dynamic_ncols=True) as bar:
        for step in range(options.steps):
            elapsed = time.perf_counter() - start
            if elapsed > options.seconds:
                break
            at = step % steps_per_epoch * options.length
            if at == 0:
                state = None
            piece = columns[at : at + options.length + 1]
            progress = max(step / options.steps, elapsed / options.seconds)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options.learning_rate, step, progress)
            scores, state = model(piece[:-1], state)
            state = state.detach()
            loss = F.cross_entropy(scores.flatten(0, 1), piece[1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.update()
            # Reading the loss waits for the GPU, so not at every step.
            if step % 10 == 9:
                value = loss.item()
                smooth = value if smooth is None else 0.9 * smooth + 0.1 * value
                speed = (step + 1) * options.batch * options.length / (time.perf_counter() - start)
                bar.set_postfix_str(f"loss {smooth:.3f}, {speed:,.0f} characters/s")
                curve.append((time.perf_counter() - start, smooth))
        last, seconds = loss.item(), time.perf_counter() - start
        return bar.n * options.batch * options.length / seconds, curve or [(seconds, last)]


@torch.no_grad()
def bits_per_character(model: nn.Module, tokens: Tensor) -> float:
    """Mean of -log2 p of each held-out character given those before it, in 16 columns read in parallel."""
    columns = streams(tokens, min(16, max(1, len(tokens) // 64)))
    total, count, state = 0.0, 0, None
    for at in range(0, len(columns) - 1, 512):
        piece = columns[at : at + 513]
        scores, state = model(piece[:-1], state)
        total += F.cross_entropy(scores.flatten(0, 1), piece[1:].flatten(), reduction="sum").item()
        count += piece[1:].numel()
    return total / count / math.log(2)


@torch.no_grad()
def sample(model: nn.Module, vocabulary: Vocabulary, length: int, temperature: float = 0.7) -> str:
    """Text drawn from the model character by character, beginning after a new line."""
    device = model.embedding.weight.device
    first = "\n" if "\n" in vocabulary.characters else vocabulary.characters[0]
    token = vocabulary.encode(first).to(device)[None]
    state, drawn = None, []
    for _ in range(length):
        scores, state = model(token, state)
        token = torch.multinomial(F.softmax(scores[0, 0] / temperature, dim=-1), 1)[None]
        drawn.append(token)
    return vocabulary.decode(torch.cat(drawn).flatten()) if drawn else ""


def compare(model: CharLM, tokens: Tensor, options: argparse.Namespace, repeats: int) -> Table:
    """One step, forward and backward, with Weft's GRU and with torch.nn.GRU on the same weights and text."""
    peer = CharLM(len(model.embedding.weight), options.embedding, options.hidden, "auto").to(tokens.device)
    peer.gru = nn.GRU(options.embedding, options.hidden, device=tokens.device)
    peer.load_state_dict(model.state_dict())
    piece = streams(tokens, options.batch)[: options.length + 1]

    def step(net: CharLM) -> list[Tensor]:
        scores, _ = net(piece[:-1])
        loss = F.cross_entropy(scores.flatten(0, 1), piece[1:].flatten())
        return list(torch.autograd.grad(loss, list(net.parameters())))

    def timed(net: CharLM) -> float:
        if piece.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(net)
        if piece.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    difference = max(
        ((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in zip(step(model), step(peer), strict=True)
    )
    times: dict[str, list[float]] = {"weft": [], "torch": []}
    for _ in range(repeats):
        times["weft"].append(timed(model))
        times["torch"].append(timed(peer))
    mine, theirs = statistics.median(times["weft"]), statistics.median(times["torch"])

    table = Table(title=f"One training step, {options.batch} x {options.length} characters, H {options.hidden}")
    for name in ("", "weft.nn.GRU", "torch.nn.GRU"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("time, ms (median)", f"{mine:.2f}", f"{theirs:.2f}")
    table.add_row("torch's time / this", f"{theirs / mine:.2f}", "1.00")
    table.add_row("largest relative gradient difference", f"{difference:.1e}", "")
    table.add_row("algorithm", weft.explain(model.gru, model.embedding(piece[:-1])).algorithm, "torch")
    return table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a UTF-8 file to train on (default: Python's documentation)")
    parser.add_argument(
        "--cell",
        default="gru",
        choices=("gru", "mingru", "paragru"),
        help="mingru: train that, too; paragru: all three",
    )
    parser.add_argument("--algorithm", default="auto", help="of the GRU (default: auto)")
    parser.add_argument("--seconds", type=float, default=75, help="train at most this long (default 75)")
    parser.add_argument("--steps", type=int, default=3000, help="train at most this many steps (default 3000)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size H (default 128)")
    parser.add_argument("--embedding", type=int, default=64, help="size of a character's vector (default 64)")
    parser.add_argument("--batch", type=int, default=32, help="columns of text read in parallel (default 32)")
    parser.add_argument("--length", type=int, default=64, help="characters per step and column (default 64)")
    parser.add_argument("--learning-rate", type=float, default=6e-3, help="peak of Adam's learning rate")
    parser.add_argument("--sample", type=int, default=400, help="characters to generate (default 400)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("char_lm.png"), help="of the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.hidden, options.batch, options.length, options.sample = 5, 16, 4, 16, 20
    if min(options.steps, options.hidden, options.batch, options.length) < 1:
        parser.error("--steps, --hidden, --batch and --length must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> float:
    """Runs the example; returns the held-out bits per character."""
    options = parse(arguments)
    console = Console()
    torch.manual_seed(options.seed)
    try:
        text = options.text.read_text(encoding="utf-8") if options.text else python_docs()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--text: cannot read {options.text} as UTF-8: {error}") from None
    if options.quick:
        text = text[:20000]
    vocabulary = Vocabulary.of(text)
    tokens, held_out = split(vocabulary.encode(text).to(options.device))
    if len(held_out) < 2:
        raise SystemExit("the text is too short to hold out a tenth of it")
    model = CharLM(len(vocabulary), options.embedding, options.hidden, options.algorithm).to(options.device)
    console.print(
        f"{len(text):,} characters, {len(vocabulary)} different ones; trains on the first {len(tokens):,}, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, on {options.device}"
    )
    example = torch.zeros(options.length, options.batch, options.embedding, device=options.device)
    console.print(str(weft.explain(model.gru, example)), markup=False)

    console.print(f"trains for at most {options.seconds:g} s or {options.steps:,} steps")
    speed, curve = train(model, tokens, options)
    curves = {"GRU": curve}
    bits = bits_per_character(model, held_out)
    drawn_by: nn.Module = model
    if options.cell != "gru":
        table = Table(title="Bits per character of held-out text, and speed of training")
        for name in ("", "parameters", "bits per character", "characters/s"):
            table.add_column(name, justify="right" if name else "left")
        rows = [("GRU", model, speed, bits)]
        cells = {"minGRU": weft.nn.MinGRU, "ParaGRU": weft.nn.ParaGRU}
        for name in ("minGRU",) if options.cell == "mingru" else ("minGRU", "ParaGRU"):
            drawn_by = BlocksLM(len(vocabulary), options.embedding, options.hidden, cells[name]).to(options.device)
            speed, curves[name] = train(drawn_by, tokens, options)
            bits = bits_per_character(drawn_by, held_out)
            rows.append((name, drawn_by, speed, bits))
        for name, net, its_speed, its_bits in rows:
            size = sum(p.numel() for p in net.parameters())
            table.add_row(name, f"{size:,}", f"{its_bits:.3f}", f"{its_speed:,.0f}")
        console.print(table)
    if options.cell == "paragru":
        with weft.scan.newton_report() as report:
            drawn_by(held_out[:2048, None])
        console.print("one sequence of 2048 characters:", str(report), sep="\n", markup=False)
    console.rule("sample")
    console.print(sample(drawn_by, vocabulary, options.sample), markup=False, highlight=False)
    console.rule()
    if options.cell == "gru":
        console.print(compare(model, tokens, options, repeats=3 if options.quick else 15))
    draw(options.output, f"Character model, H {options.hidden}, {options.device}", curves, x="seconds")
    console.print(f"held-out bits per character: [bold]{bits:.3f}[/bold]")
    return bits


if __name__ == "__main__":
    main()
