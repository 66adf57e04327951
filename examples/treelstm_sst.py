"""A binary Tree-LSTM that classifies the sentiment of every phrase of the Stanford Sentiment Treebank.

    python examples/treelstm_sst.py path/to/sst      # the folder with train.txt and dev.txt; uses a GPU if there is one
    python examples/treelstm_sst.py path/to/sst --hidden 256 --epochs 10

Every sentence has a tree of its own shape, so that every batch is a new set of graphs; the cell is written once, for
one vertex, and nothing is padded. The words' vectors are trained from nothing. After each epoch it prints how many of
the held-out trees (at their roots) and of all their phrases get the right one of five classes.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import torch
import weft
from curves import Point, draw
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from weft.data import Tree, sst


class SentimentClassifier(nn.Module):
    """Word vectors, a Tree-LSTM, and a linear layer that scores the five classes at every vertex."""

    def __init__(self, words: int, embedding: int, hidden: int, dropout: float) -> None:
        super().__init__()
        # Index 0 is no word, the vector of inner vertices: it stays zero.
        self.embedding = nn.Embedding(words, embedding, padding_idx=0)
        nn.init.normal_(self.embedding.weight, std=0.3)
        with torch.no_grad():
            self.embedding.weight[0].zero_()
        self.dropout = nn.Dropout(dropout)
        self.tree = weft.vertex.models.TreeLSTM(embedding, hidden)
        self.scores = nn.Linear(hidden, 5)

    def forward(self, graphs: weft.Graphs, words: Tensor, executor: str = "auto") -> Tensor:
        """Scores (num_vertices, 5) from the words' indices (num_vertices,)."""
        states = self.tree(graphs, self.dropout(self.embedding(words)), executor=executor)
        return self.scores(self.dropout(states))


class Treebank:
    """Trees with their graphs built and their words looked up, once for all epochs."""

    def __init__(self, trees: list[Tree], vocabulary: dict[str, int]) -> None:
        self.graphs = list(weft.Graphs.from_children([tree.children for tree in trees]))
        # 0 is no word and 1 a word that the training set has not.
        self.words = [
            torch.tensor([0 if word is None else vocabulary.get(word, 1) for word in tree.symbols]) for tree in trees
        ]
        self.labels = [torch.tensor(tree.labels) for tree in trees]

    def __len__(self) -> int:
        return len(self.graphs)

    def batch(self, chosen: list[int], device: str) -> tuple[weft.Graphs, Tensor, Tensor]:
        graphs = weft.Graphs.batch([self.graphs[i] for i in chosen])
        words = torch.cat([self.words[i] for i in chosen])
        labels = torch.cat([self.labels[i] for i in chosen])
        return graphs.to(device), words.to(device), labels.to(device)


def vocabulary_of(trees: list[Tree]) -> dict[str, int]:
    """Words that occur at least twice, from number 2 on."""
    counts = Counter(word for tree in trees for word in tree.symbols if word is not None)
    return {word: i for i, word in enumerate(sorted(word for word, n in counts.items() if n > 1), 2)}


@torch.no_grad()
def accuracy(model: SentimentClassifier, bank: Treebank, options: argparse.Namespace) -> tuple[float, float]:
    """The share of roots and of all vertices whose class is right."""
    model.eval()
    right_roots = right = roots = vertices = 0
    for start in range(0, len(bank), 256):
        graphs, words, labels = bank.batch(list(range(start, min(start + 256, len(bank)))), options.device)
        hits = model(graphs, words, options.executor).argmax(1) == labels
        right_roots += hits[graphs.roots].sum().item()
        right += hits.sum().item()
        roots += len(graphs)
        vertices += graphs.num_vertices
    return right_roots / roots, right / vertices


def train(
    model: SentimentClassifier, train_set: Treebank, dev_set: Treebank, options: argparse.Namespace
) -> tuple[float, dict[str, list[Point]]]:
    """Returns the best accuracy at the roots, and the curves over epochs: the loss, and the accuracy at the roots."""
    rest = [p for p in model.parameters() if p is not model.embedding.weight]
    optimizer = torch.optim.Adam(
        [{"params": rest, "weight_decay": options.weight_decay}, {"params": [model.embedding.weight]}],
        lr=options.learning_rate,
    )
    best = 0.0
    curves: dict[str, list[Point]] = {"training loss": [], "dev accuracy at the roots": []}
    for epoch in range(1, options.epochs + 1):
        model.train()
        order = torch.randperm(len(train_set)).tolist()
        batches = [order[i : i + options.batch] for i in range(0, len(order), options.batch)][: options.steps]
        start, vertices, smooth = time.perf_counter(), 0, None
        with tqdm(batches, desc=f"epoch {epoch}", unit="batch", dynamic_ncols=True) as bar:
            for step, chosen in enumerate(bar):
                graphs, words, labels = train_set.batch(chosen, options.device)
                loss = F.cross_entropy(model(graphs, words, options.executor), labels)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                vertices += graphs.num_vertices
                # Reading the loss waits for the GPU, so not at every step.
                if step % 10 == 9 or step + 1 == len(batches):
                    value = loss.item()
                    smooth = value if smooth is None else 0.9 * smooth + 0.1 * value
                    speed = vertices / (time.perf_counter() - start)
                    bar.set_postfix_str(f"loss {smooth:.3f}, {speed:,.0f} vertices/s")
                    curves["training loss"].append((epoch - 1 + (step + 1) / len(batches), smooth))
        at_roots, at_all = accuracy(model, dev_set, options)
        best = max(best, at_roots)
        curves["dev accuracy at the roots"].append((epoch, at_roots))
        print(f"epoch {epoch}: dev accuracy {at_roots:.4f} at the roots, {at_all:.4f} at all vertices", flush=True)
    return best, curves


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the treebank's train.txt and dev.txt in bracket format")
    parser.add_argument("--epochs", type=int, default=3, help="(default 3)")
    parser.add_argument("--steps", type=int, help="at most this many batches in an epoch (default: all)")
    parser.add_argument("--batch", type=int, default=25, help="trees in a batch (default 25)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size H (default 128)")
    parser.add_argument("--embedding", type=int, default=128, help="size of a word's vector (default 128)")
    parser.add_argument("--dropout", type=float, default=0.4, help="of word vectors and states (default 0.4)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="Adam's (default 2e-3)")
    parser.add_argument("--weight-decay", type=float, default=1e-5, help="of all but the vectors (default 1e-5)")
    parser.add_argument("--executor", default="auto", help="of the Tree-LSTM (default: auto)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("treelstm_sst.png"), help="the figure (default treelstm_sst.png)"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.epochs, options.steps, options.hidden, options.embedding = 1, 5, 16, 16
    if min(options.epochs, options.batch) < 1:
        parser.error("--epochs and --batch must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> float:
    """Runs the example; returns the best accuracy at the roots of the held-out trees."""
    options = parse(arguments)
    console = Console()
    torch.manual_seed(options.seed)
    missing = [name for name in ("train.txt", "dev.txt") if not (options.data / name).is_file()]
    if missing:
        wanted = "the folder of the Stanford Sentiment Treebank in bracket format"
        raise SystemExit(f"{options.data}: no {' and no '.join(missing)} here; name {wanted}")
    console.print(f"reads the trees in {options.data}")
    trees, held_out = sst(options.data / "train.txt"), sst(options.data / "dev.txt")
    vocabulary = vocabulary_of(trees)
    train_set, dev_set = Treebank(trees, vocabulary), Treebank(held_out, vocabulary)
    model = SentimentClassifier(len(vocabulary) + 2, options.embedding, options.hidden, options.dropout)
    model.to(options.device)
    console.print(
        f"{len(trees):,} trees to train on, {len(held_out):,} held out, {len(vocabulary):,} words, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, on {options.device}",
        highlight=False,
    )
    graphs, words, _ = train_set.batch(list(range(min(options.batch, len(train_set)))), options.device)
    console.print(
        str(weft.explain(model.tree, graphs, model.embedding(words), executor=options.executor)), markup=False
    )
    best, curves = train(model, train_set, dev_set, options)
    draw(options.output, "Tree-LSTM on the Stanford Sentiment Treebank", curves, x="epoch", y="")
    console.print(f"best dev accuracy at the roots: [bold]{best:.4f}[/bold]", highlight=False)
    return best


if __name__ == "__main__":
    main()
