"""A stack of minGRUs that reads one sequence of a million characters, cut in time over processes.

Each process owns a slice of the sequence; a layer's states go from slice to slice by one exchange. With the same
--length, any number of processes trains the same model: the loss curves of all runs so far are drawn on one plot. Under
torchrun on GPUs each process takes one; else processes share the CPU.

    python examples/long_context.py
    torchrun --nproc-per-node 4 examples/long_context.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import weft
import weft.distributed as wd
from curves import draw
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

CHARACTERS = 128


class Stack(nn.Module):
    """Logits (T, B, CHARACTERS) of the next character, from characters (T, B)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(weft.nn.MinGRU(width, width) for _ in range(layers))
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))[0]
        return self.head(x)


def read_text(length: int) -> Tensor:
    """So many characters of Python's own library."""
    parts, found = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes())
        found += len(parts[-1])
        if found >= length:
            break
    text = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    return text.repeat(-(-length // len(text)))[:length].clamp_max(CHARACTERS - 1).long()


def connect() -> torch.device:
    """This process's device, in a group of all that torchrun has started; of one where it has not."""
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not on_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def train(
    options: argparse.Namespace, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[list[float], float]:
    """Losses and the seconds of a step, of the ranks of a group, by default of all."""
    torch.manual_seed(0)  # the same model on every rank
    model = Stack(options.width, options.layers).to(device)
    wd.shard_time(model, group)
    text = read_text(options.length + 1).unsqueeze(1)
    read, wanted = (wd.shard(t, group).to(device) for t in (text[:-1], text[1:]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, took = [], []
    for _ in tqdm(range(options.steps), unit="step", disable=dist.get_rank() > 0):
        began = time.perf_counter()
        logits = model(read)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / options.length
        optimizer.zero_grad()
        loss.backward()
        if dist.get_world_size(group) > 1:
            # Every rank has its share, of the loss, too.
            gradients = [parameter.grad for parameter in model.parameters()]
            total = nn.utils.parameters_to_vector([loss.detach(), *gradients])
            dist.all_reduce(total, group=group)
            loss = total[0]
            nn.utils.vector_to_parameters(total[1:], gradients)
        optimizer.step()
        losses.append(loss.item())
        took.append(time.perf_counter() - began)
    return losses, sorted(took)[len(took) // 2]


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, reports, draws, and returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1_000_000, help="characters (default 1000000)")
    parser.add_argument("--width", type=int, default=32, help="of the layers (default 32)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of training (default 20)")
    parser.add_argument("--output", type=Path, default=Path("long_context.png"), help="of the figure")
    parser.add_argument("--quick", action="store_true", help="a few short steps, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.length, options.width, options.steps = 2000, 8, 3
    if min(options.length, options.width, options.layers, options.steps) < 1:
        parser.error("--length, --width, --layers and --steps must be at least 1")
    device = connect()
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        losses, seconds = train(options, device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        of_ranks: list[tuple[float, int]] = [(0.0, 0)] * ranks
        dist.all_gather_object(of_ranks, (seconds, peak))
        if rank == 0:
            report(options, losses, of_ranks)
    finally:
        dist.destroy_process_group()
    return losses


def report(options: argparse.Namespace, losses: list[float], of_ranks: list[tuple[float, int]]) -> None:
    """Prints this run, of whose ranks these are the seconds of a step and the bytes at most, beside those before it,
    which are kept beside the figure."""
    ranks, seconds = len(of_ranks), max(took for took, _ in of_ranks)
    kept = options.output.with_suffix(".json")
    runs = json.loads(kept.read_text()) if kept.exists() else {}
    same = [options.length, options.width, options.layers]
    runs = {name: run for name, run in runs.items() if run["of"] == same}
    runs[str(ranks)] = {"of": same, "losses": losses, "seconds": seconds}
    kept.write_text(json.dumps(runs))
    for rank, (took, peak) in enumerate(of_ranks):
        print(f"rank {rank} of {ranks}: {took:.3f} s a step, at most {peak / 1e6:.0f} MB")
    print(f"loss {losses[-1]:.4f}")
    if "1" in runs and ranks > 1:
        # Each layer exchanges a product and a state forward, and the gradient of a state and of the end backward.
        sent, link = 8 * options.width, wd.Link(latency=1e-4, bandwidth=1e9)
        others = (2 * options.layers - 1) * wd.exchange(ranks, sent, link).seconds
        predicted = wd.predict(runs["1"]["seconds"], ranks, sent, fixup=others, link=link)
        print(f"predicted from one rank, were each on cores of its own: {predicted.seconds:.3f} s a step")
        difference = max(abs(a - b) for a, b in zip(losses, runs["1"]["losses"], strict=False))
        print(f"losses differ from those of one rank by {difference:.2e}")
    curves = {f"ranks: {name}": list(enumerate(run["losses"])) for name, run in sorted(runs.items())}
    draw(options.output, f"minGRUs on {options.length:,} characters", curves)


if __name__ == "__main__":
    main()
