"""A child-sum Tree-LSTM that says from which of 20 standard-library modules a function comes, by its syntax tree alone.

    python examples/treelstm_ast.py                  # two minutes or so on two CPU cores; uses a GPU if there is one
    python examples/treelstm_ast.py --hidden 256 --epochs 30

The trees are those of every function in the modules, parsed from the running Python's own sources: any number of
children, no names, no constants, only kinds of nodes. Beside it stands what the kinds of nodes say without the tree: a
softmax regression on how often each occurs. Both learn from the same functions, and the example prints by how much the
tree is better on those held out.
"""

from __future__ import annotations

import argparse
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
from weft.data import Tree, python_asts


class ModuleClassifier(nn.Module):
    """A vector per kind of node, a child-sum Tree-LSTM, and scores from the root beside the mean of all vertices."""

    def __init__(self, kinds: int, embedding: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, embedding)
        self.tree = weft.vertex.models.ChildSumTreeLSTM(embedding, hidden)
        self.dropout = nn.Dropout(dropout)
        self.scores = nn.Linear(2 * hidden, classes)

    def forward(self, graphs: weft.Graphs, kinds: Tensor, executor: str = "auto") -> Tensor:
        """Scores (num_graphs, classes) from the kinds of nodes (num_vertices,)."""
        states = self.tree(graphs, self.dropout(self.embedding(kinds)), executor=executor)
        total = states.new_zeros(len(graphs), states.shape[1]).index_add(0, graphs.graph_index, states)
        mean = total / graphs.ptr.diff().unsqueeze(1)
        return self.scores(self.dropout(torch.cat((states[graphs.roots], mean), 1)))


class Functions:
    """Trees with their graphs built and their kinds of nodes numbered, once for all epochs."""

    def __init__(self, trees: list[Tree], numbers: dict[str, int]) -> None:
        self.graphs = list(weft.Graphs.from_children([tree.children for tree in trees]))
        self.kinds = [torch.tensor([numbers[symbol] for symbol in tree.symbols]) for tree in trees]
        self.labels = torch.tensor([tree.labels[-1] for tree in trees])
        self.counts = torch.stack([torch.bincount(kinds, minlength=len(numbers)) for kinds in self.kinds]).float()

    def __len__(self) -> int:
        return len(self.graphs)

    def batch(self, chosen: list[int], device: str) -> tuple[weft.Graphs, Tensor, Tensor]:
        graphs = weft.Graphs.batch([self.graphs[i] for i in chosen])
        kinds = torch.cat([self.kinds[i] for i in chosen])
        return graphs.to(device), kinds.to(device), self.labels[chosen].to(device)


def bag_accuracy(train_set: Functions, held_out: Functions, classes: int) -> float:
    """Softmax regression on the logarithms of the counts, regularised as is best for the held-out functions."""
    features = train_set.counts.log1p()
    mean, spread = features.mean(0), features.std(0) + 1e-3
    x, y = (features - mean) / spread, train_set.labels
    x_held = (held_out.counts.log1p() - mean) / spread
    best = 0.0
    for decay in (1e-4, 1e-3, 1e-2, 1e-1):
        model = nn.Linear(x.shape[1], classes)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, line_search_fn="strong_wolfe")

        def closure(model=model, optimizer=optimizer, decay=decay) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + decay * model.weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            best = max(best, (model(x_held).argmax(1) == held_out.labels).float().mean().item())
    return best


@torch.no_grad()
def accuracy(model: ModuleClassifier, functions: Functions, options: argparse.Namespace) -> float:
    """The share of functions whose module is found."""
    model.eval()
    right = 0
    for start in range(0, len(functions), 256):
        chosen = list(range(start, min(start + 256, len(functions))))
        graphs, kinds, labels = functions.batch(chosen, options.device)
        right += (model(graphs, kinds, options.executor).argmax(1) == labels).sum().item()
    return right / len(functions)


def train(model: ModuleClassifier, functions: Functions, options: argparse.Namespace) -> list[Point]:
    """Returns the curve of epochs and loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    batches = [
        order[i : i + options.batch]
        for order in (torch.randperm(len(functions)).tolist() for _ in range(options.epochs))
        for i in range(0, len(order), options.batch)
    ][: options.steps]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=len(batches))
    model.train()
    start, vertices, smooth = time.perf_counter(), 0, None
    curve: list[Point] = []
    with tqdm(batches, unit="batch", dynamic_ncols=True) as bar:
        for step, chosen in enumerate(bar):
            graphs, kinds, labels = functions.batch(chosen, options.device)
            loss = F.cross_entropy(model(graphs, kinds, options.executor), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            vertices += graphs.num_vertices
            # Reading the loss waits for the GPU, so not at every step.
            if step % 10 == 9 or step + 1 == len(batches):
                value = loss.item()
                smooth = value if smooth is None else 0.9 * smooth + 0.1 * value
                speed = vertices / (time.perf_counter() - start)
                bar.set_postfix_str(f"loss {smooth:.3f}, {speed:,.0f} vertices/s")
                curve.append(((step + 1) * options.batch / len(functions), smooth))
    return curve


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15, help="(default 15)")
    parser.add_argument("--steps", type=int, help="at most this many batches (default: all)")
    parser.add_argument("--batch", type=int, default=32, help="functions in a batch (default 32)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size H (default 128)")
    parser.add_argument("--embedding", type=int, default=64, help="size of the vector of a kind of node (default 64)")
    parser.add_argument("--dropout", type=float, default=0.3, help="of vectors and states (default 0.3)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak of AdamW's (default 4e-3)")
    parser.add_argument("--weight-decay", type=float, default=1e-2, help="(default 1e-2)")
    parser.add_argument("--executor", default="auto", help="of the Tree-LSTM (default: auto)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("treelstm_ast.png"), help="the figure (default treelstm_ast.png)"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.hidden, options.embedding = 5, 16, 16
    if min(options.epochs, options.batch) < 1:
        parser.error("--epochs and --batch must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the example; returns the accuracy of the tree and of the bag on functions held out."""
    options = parse(arguments)
    console = Console()
    torch.manual_seed(options.seed)
    console.print("parses the functions of 20 modules of Python")
    trees = python_asts()
    classes = 1 + max(tree.labels[-1] for tree in trees)
    numbers = {symbol: i for i, symbol in enumerate(sorted({symbol for tree in trees for symbol in tree.symbols}))}
    # Every fourth function of what was shuffled once is held out.
    order = torch.randperm(len(trees), generator=torch.Generator().manual_seed(1)).tolist()
    train_set = Functions([trees[i] for place, i in enumerate(order) if place % 4], numbers)
    held_out = Functions([trees[i] for i in order[::4]], numbers)
    model = ModuleClassifier(len(numbers), options.embedding, options.hidden, classes, options.dropout)
    model.to(options.device)
    console.print(
        f"{len(train_set):,} functions to train on, {len(held_out):,} held out, {len(numbers)} kinds of nodes, "
        f"{sum(len(tree.children) for tree in trees):,} vertices, on {options.device}",
        highlight=False,
    )
    curve = train(model, train_set, options)
    draw(options.output, "Child-sum Tree-LSTM on syntax trees", {"training loss": curve}, x="epoch")
    console.print("fits the bag of node types, and tests both on the functions held out")
    found = {
        "largest module": (held_out.labels == train_set.labels.mode().values).float().mean().item(),
        "bag of node types": bag_accuracy(train_set, held_out, classes),
        "child-sum Tree-LSTM": accuracy(model, held_out, options),
    }
    table = Table(title=f"Which of {classes} modules a function comes from")
    table.add_column("")
    table.add_column("accuracy", justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)
    margin = found["child-sum Tree-LSTM"] - found["bag of node types"]
    console.print(f"the tree is better by [bold]{100 * margin:.1f}[/bold] points", highlight=False)
    return found


if __name__ == "__main__":
    main()
