"""Six nets whose graph changes with every sentence, each trained in whole steps by weft.vertex.Trainer.

    python examples/six_nets.py                                 # all six on sentences that it makes up
    python examples/six_nets.py path/to/data --net treelstm     # the folder with sst/ and wikiner/; uses a GPU

On the Stanford Sentiment Treebank (train.txt and dev.txt): `treelstm` and `rvnn` say the sentiment of every phrase;
`td-rnn` and `td-lstm`, which see no tree but merge neighbours again and again up to the sentence, that of the sentence.
On WikiNER (a file of word|TAG lines): `bilstm` tags every word by LSTMs in both directions; `bilstm-char` does so, too,
and makes the vectors of words that occur fewer than five times out of their characters, by two chains of characters
inside the same graph. Words are looked up in the cells, so that the vectors are trained with the rest.

It prints the accuracy on held-out sentences, and how many sentences are trained a second.

Source: the nets are those of VPPS (MICRO 2018), section IV.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import weft
from curves import Point, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm
from weft.data import Sentence, Tree, sst, tagged
from weft.vertex import Trainer, Vertex, models

IGNORED = -100  # the class of vertices that have none
RARE = 5


@dataclass
class Sample:
    """A sentence as a graph, with its vertices' symbols and the classes that they should get."""

    graph: weft.Graphs
    symbols: Tensor
    targets: Tensor


@dataclass
class Task:
    """A net and the sentences that it learns from."""

    cell: nn.Module
    head: nn.Module | None
    at: str
    train: list[Sample]
    held_out: list[Sample]


# The nets. What they read are numbers of words: W looks them up and multiplies.


class WordFC(models.TreeFC):
    """Tree-FC over words."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__(hidden)
        self.vectors = word_vectors(words, hidden)

    def vertex(self, v: Vertex) -> None:
        h = torch.tanh(self.vectors(v.pull()) + self.U(torch.cat((v.gather(0), v.gather(1)), 1)))
        v.scatter(h)
        v.push(h)


def word_vectors(words: int, size: int) -> nn.Embedding:
    """Number 0 is no word, whose vector stays zero."""
    vectors = nn.Embedding(words, size, padding_idx=0)
    nn.init.normal_(vectors.weight, std=0.3)
    with torch.no_grad():
        vectors.weight[0].zero_()
    return vectors


def over_words(cell: nn.Module, words: int, size: int) -> nn.Module:
    """A cell that pulls vectors, pulling numbers of words."""
    cell.W = nn.Sequential(word_vectors(words, size), cell.W)
    return cell


def rvnn(words: int, hidden: int) -> nn.Module:
    net = models.RvNN(hidden, hidden)
    over_words(net["leaf"], words, hidden)
    return net


def bilstm(words: int, tags: int, hidden: int) -> nn.Module:
    net = models.BiLSTMTagger(hidden // 2, hidden, tags, 32)
    for direction in ("fw", "bw"):
        over_words(net[direction], words, hidden // 2)
    net["bw"].W[0] = net["fw"].W[0]
    return net


class Characters(models.ChainLSTM):
    """An LSTM over a word's characters, whose state is as wide as that of the words."""

    def __init__(self, characters: int, size: int, state: int) -> None:
        super().__init__(size, size)
        self.state_size = (state,)
        over_words(self, characters, size)

    def vertex(self, v: Vertex) -> None:
        size = self.U.in_features
        h, c = v.gather(0)[:, : 2 * size].chunk(2, 1)
        i, f, g, o = (self.W(v.pull()) + self.U(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        nothing = torch.zeros_like(h)
        v.scatter(torch.cat((h, c, *[nothing] * (self.state_size[0] // size - 2)), 1))


class RareWord(weft.VertexFunction):
    """A word's LSTM with another one's weights, which reads the ends of two chains of characters."""

    def __init__(self, word: models.ChainLSTM, characters: int) -> None:
        super().__init__(word.state_size)
        self.W, self.U, self.characters = word.W[1], word.U, characters

    def vertex(self, v: Vertex) -> None:
        h, c = v.gather(0).chunk(2, 1)
        x = torch.cat((v.gather(1)[:, : self.characters], v.gather(2)[:, : self.characters]), 1)
        i, f, g, o = (self.W(x) + self.U(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        v.scatter(torch.cat((torch.sigmoid(o) * torch.tanh(c), c), 1))


def bilstm_char(words: int, characters: int, tags: int, hidden: int) -> nn.Module:
    net, size = bilstm(words, tags, hidden), hidden // 4
    return weft.VertexFunctions(
        {
            **net,
            **{f"rare {name}": RareWord(net[name], size) for name in ("fw", "bw")},
            **{f"characters {name}": Characters(characters, size, 2 * hidden) for name in ("fw", "bw")},
        }
    )


# The sentences.


def numbers_of(symbols: Counter, fewest: int) -> dict[str, int]:
    """From 2 on; 0 is none, 1 any other."""
    return {symbol: i for i, symbol in enumerate(sorted(s for s, n in symbols.items() if n >= fewest), 2)}


def tree_samples(trees: Sequence[Tree], numbers: dict[str, int], typed: bool) -> list[Sample]:
    found = []
    for tree, graph in zip(trees, weft.Graphs.from_children([tree.children for tree in trees]), strict=True):
        if typed:
            graph = graph.with_types(["inner" if children else "leaf" for children in tree.children])
        symbols = [0 if word is None else numbers.get(word, 1) for word in tree.symbols]
        found.append(Sample(graph, torch.tensor(symbols), torch.tensor(tree.labels)))
    return found


def pyramid_samples(trees: Sequence[Tree], numbers: dict[str, int]) -> list[Sample]:
    found = []
    for tree in trees:
        words = [numbers.get(word, 1) for word in tree.symbols if word is not None]
        graph = weft.Graphs.pyramid([len(words)])
        symbols = torch.zeros(graph.num_vertices, dtype=torch.int64)
        symbols[: len(words)] = torch.tensor(words)
        found.append(Sample(graph, symbols, torch.tensor(tree.labels[-1:])))
    return found


def tag_samples(sentences: Sequence[Sentence], numbers: dict[str, int], tags: dict[str, int]) -> list[Sample]:
    found = []
    for sentence in sentences:
        words, n = [numbers.get(word, 1) for word in sentence.words], len(sentence.words)
        targets = torch.tensor([IGNORED] * 2 * n + [tags.get(tag, 0) for tag in sentence.tags])
        symbols = torch.tensor([*words, *words, *[0] * n])
        found.append(Sample(models.BiLSTMTagger.graphs([n]), symbols, targets))
    return found


def char_samples(
    sentences: Sequence[Sentence], numbers: dict[str, int], letters: dict[str, int], tags: dict[str, int]
) -> list[Sample]:
    """As :func:`tag_samples`, with two chains of characters before the words for each that has no number."""
    found = []
    for sentence in sentences:
        children: list[list[int]] = []
        types, symbols = [], []
        ends: list[tuple[int, int] | None] = []
        for word in sentence.words:
            if word in numbers:
                ends.append(None)
                continue
            for name, text in (("characters fw", word), ("characters bw", word[::-1])):
                children += [[len(children) + i - 1 if i else -1] for i in range(len(text))]
                types += [name] * len(text)
                symbols += [letters.get(letter, 1) for letter in text]
            ends.append((len(children) - len(word) - 1, len(children) - 1))
        first, n = len(children), len(sentence.words)
        for name, before, start in (("fw", -1, first), ("bw", 1, first + n)):
            for t, end in enumerate(ends):
                previous = start + t + before if 0 <= t + before < n else -1
                children.append([previous] if end is None else [previous, *end])
                types.append(name if end is None else f"rare {name}")
                symbols.append(numbers.get(sentence.words[t], 0))
        children += [[first + t, first + n + t] for t in range(n)]
        types += ["tag"] * n
        symbols += [0] * n
        targets = [IGNORED] * (first + 2 * n) + [tags.get(tag, 0) for tag in sentence.tags]
        graph = weft.Graphs.from_children([children]).with_types(types)
        found.append(Sample(graph, torch.tensor(symbols), torch.tensor(targets)))
    return found


def made_up_trees(count: int, seed: int) -> list[Tree]:
    """Trees over good, bad and empty words; a phrase's label says of which kind it has more."""
    rng = random.Random(seed)
    kinds = [[f"{kind}{i}" for i in range(20)] for kind in ("bad", "so", "good")]
    found = []
    for _ in range(count):
        tree = Tree([], [], [])
        moods: list[int] = []

        def add(words: int, tree: Tree = tree, moods: list[int] = moods) -> int:
            below = []
            if words > 1:
                left = rng.randint(1, words - 1)
                below = [add(left), add(words - left)]
            mood = sum(moods[child] for child in below) if below else rng.choice((-1, 0, 1))
            tree.children.append(below)
            tree.symbols.append(None if below else rng.choice(kinds[mood + 1]))
            tree.labels.append(2 + max(-2, min(2, mood)))
            moods.append(mood)
            return len(moods) - 1

        add(rng.randint(2, 12))
        found.append(tree)
    return found


def made_up_sentences(count: int, seed: int) -> list[Sentence]:
    """Words whose tag is said by their last letters, most of which occur once, and "the", which says it of the next."""
    rng, same = random.Random(seed), random.Random(0)
    endings = {"ing": "V", "ness": "N", "ly": "A", "ia": "PLACE"}
    common = {ending: ["".join(same.choices("abcdefgh", k=3)) + ending for _ in range(5)] for ending in endings}
    found = []
    for _ in range(count):
        sentence = Sentence([], [])
        for _ in range(rng.randint(3, 12)):
            ending = rng.choice([*endings])
            rare = "".join(rng.choices("abcdefghijklm", k=rng.randint(2, 5))) + ending
            if rng.random() < 0.3:
                sentence.words.append("the")
                sentence.tags.append("THE")
            the = sentence.words[-1:] == ["the"]
            sentence.words.append(rare if rng.random() < 0.5 else rng.choice(common[ending]))
            sentence.tags.append("N" if the else endings[ending])
        found.append(sentence)
    return found


def read_trees(options: argparse.Namespace) -> tuple[list[Tree], list[Tree]]:
    if options.data is None:
        return made_up_trees(options.made_up, 0), made_up_trees(options.made_up // 5, 1)
    folder = next((f for f in (options.data, options.data / "sst") if (f / "train.txt").is_file()), None)
    if folder is None or not (folder / "dev.txt").is_file():
        wanted = "the folder of the Stanford Sentiment Treebank in bracket format, or one with it as sst/"
        raise SystemExit(f"{options.data}: no train.txt with a dev.txt here; name {wanted}")
    return sst(folder / "train.txt"), sst(folder / "dev.txt")


def read_sentences(options: argparse.Namespace) -> tuple[list[Sentence], list[Sentence]]:
    """The first nine of ten sentences, and the others, where there is one file."""
    if options.data is None:
        return made_up_sentences(options.made_up, 0), made_up_sentences(options.made_up // 5, 1)
    folder = next((f for f in (options.data / "wikiner", options.data) if (f / "dev.txt").is_file()), None)
    if folder is None:
        raise SystemExit(f"{options.data}: no dev.txt here; name the folder of WikiNER, or one with it as wikiner/")
    held_out = tagged(folder / "dev.txt")
    if folder.name == "wikiner" and (folder / "train.txt").is_file():
        return tagged(folder / "train.txt"), held_out
    cut = len(held_out) * 9 // 10
    return held_out[:cut], held_out[cut:]


def tree_task(options: argparse.Namespace, net: str, hidden: int) -> Task:
    trees = read_trees(options)
    counts = Counter(word for tree in trees[0] for word in tree.symbols if word is not None)
    numbers = numbers_of(counts, 2)
    words, pyramids = len(numbers) + 2, net.startswith("td-")
    make = {
        "treelstm": lambda: over_words(models.TreeLSTM(hidden, hidden), words, hidden),
        "rvnn": lambda: rvnn(words, hidden),
        "td-rnn": lambda: WordFC(words, hidden),
        "td-lstm": lambda: over_words(models.TreeLSTM(hidden, hidden), words, hidden),
    }[net]
    samples = [
        pyramid_samples(part, numbers) if pyramids else tree_samples(part, numbers, typed=net == "rvnn")
        for part in trees
    ]
    return Task(make(), nn.Linear(hidden, 5), "roots" if pyramids else "vertices", *samples)


def tag_task(options: argparse.Namespace, net: str, hidden: int) -> Task:
    sentences = read_sentences(options)
    characters = net == "bilstm-char"
    numbers = numbers_of(Counter(word for s in sentences[0] for word in s.words), RARE if characters else 2)
    tags = {tag: i for i, tag in enumerate(sorted({tag for s in sentences[0] for tag in s.tags}))}
    if not characters:
        samples = [tag_samples(part, numbers, tags) for part in sentences]
        return Task(bilstm(len(numbers) + 2, len(tags), hidden), None, "vertices", *samples)
    letters = numbers_of(Counter(letter for s in sentences[0] for word in s.words for letter in word), 1)
    samples = [char_samples(part, numbers, letters, tags) for part in sentences]
    cell = bilstm_char(len(numbers) + 2, len(letters) + 2, len(tags), hidden)
    return Task(cell, None, "vertices", *samples)


NETS: dict[str, tuple[Callable[[argparse.Namespace, str, int], Task], int]] = {
    "treelstm": (tree_task, 256),
    "rvnn": (tree_task, 512),
    "td-rnn": (tree_task, 512),
    "td-lstm": (tree_task, 256),
    "bilstm": (tag_task, 256),
    "bilstm-char": (tag_task, 256),
}
"""Each net's task, and its hidden size."""


def batch(samples: Sequence[Sample], device: str) -> tuple[weft.Graphs, Tensor, Tensor]:
    graphs = weft.Graphs.batch([s.graph for s in samples]).to(device)
    symbols, targets = torch.cat([s.symbols for s in samples]), torch.cat([s.targets for s in samples])
    return graphs, symbols.to(device), targets.to(device)


@torch.no_grad()
def accuracy(task: Task, options: argparse.Namespace) -> float:
    """The share of classes that are right, of the vertices or roots that have one."""
    right = count = 0
    for start in range(0, len(task.held_out), 64):
        graphs, symbols, targets = batch(task.held_out[start : start + 64], options.device)
        y = task.cell(graphs, symbols, executor=options.executor)
        y = y if task.head is None else task.head(y)
        y = y[graphs.roots] if task.at == "roots" else y
        counts = targets != IGNORED
        right += (y.argmax(1) == targets)[counts].sum().item()
        count += counts.sum().item()
    return right / count


def train(task: Task, name: str, options: argparse.Namespace) -> tuple[list[Point], float]:
    """Returns the curve of epochs and loss, and sentences a second."""
    parameters = [*task.cell.parameters(), *(() if task.head is None else task.head.parameters())]
    trainer = Trainer(
        task.cell,
        torch.optim.Adam(parameters, options.learning_rate),
        head=task.head,
        at=task.at,
        ignore_index=IGNORED,
        executor=options.executor,
    )
    batches = [
        order[i : i + options.batch]
        for order in (torch.randperm(len(task.train)).tolist() for _ in range(options.epochs))
        for i in range(0, len(order), options.batch)
    ][: options.steps]
    print(weft.explain(trainer, *batch([task.train[i] for i in batches[0]], options.device)[:2]), flush=True)
    curve: list[Point] = []
    start, sentences, smooth = time.perf_counter(), 0, None
    with tqdm(batches, desc=name, unit="batch", dynamic_ncols=True) as bar:
        for step, chosen in enumerate(bar):
            # The loss of the step before: this one may still be on its way.
            loss = trainer.step(*batch([task.train[i] for i in chosen], options.device))
            sentences += len(chosen)
            if loss is not None:
                smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
                curve.append((step / len(batches) * options.epochs, smooth))
                bar.set_postfix_str(f"loss {smooth:.3f}")
    trainer.sync()
    return curve, sentences / (time.perf_counter() - start)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder of the data (default: sentences that are made up)")
    parser.add_argument("--net", choices=[*NETS, "all"], default="all", help="(default all)")
    parser.add_argument("--epochs", type=int, default=3, help="(default 3)")
    parser.add_argument("--steps", type=int, help="at most this many batches in all (default: all)")
    parser.add_argument("--batch", type=int, default=16, help="sentences in a batch (default 16)")
    parser.add_argument("--hidden", type=int, help="hidden size H (default: 256, of rvnn and td-rnn 512)")
    parser.add_argument("--made-up", type=int, default=1500, help="sentences to make up without data (default 1500)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="Adam's (default 1e-3)")
    parser.add_argument("--executor", default="auto", help="of the cells (default: auto)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("six_nets.png"), help="the figure (default six_nets.png)")
    parser.add_argument("--quick", action="store_true", help="a few steps of small nets, to see that they run")
    options = parser.parse_args(arguments)
    if options.quick:
        options.epochs, options.steps, options.hidden, options.made_up = 1, 10, 16, 200
    if min(options.epochs, options.batch) < 1:
        parser.error("--epochs and --batch must be at least 1")
    if options.hidden is not None and (options.hidden < 4 or options.hidden % 4):
        parser.error("--hidden must be a multiple of 4")
    return options


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the example; returns the accuracy of every net on held-out sentences."""
    options = parse(arguments)
    console = Console()
    table = Table("net", "parameters", "held-out accuracy", "sentences/s")
    found, curves = {}, {}
    for name in NETS if options.net == "all" else [options.net]:
        torch.manual_seed(options.seed)
        make, hidden = NETS[name]
        task = make(options, name, options.hidden or hidden)
        for module in (task.cell, task.head):
            if module is not None:
                module.to(options.device)
        curves[name], speed = train(task, name, options)
        found[name] = accuracy(task, options)
        print(f"{name}: accuracy {found[name]:.4f}, {speed:,.0f} sentences/s", flush=True)
        size = sum(p.numel() for p in task.cell.parameters())
        table.add_row(name, f"{size:,}", f"{found[name]:.4f}", f"{speed:,.0f}")
    draw(options.output, "Six dynamic nets", curves, x="epoch")
    console.print(table)
    return found


if __name__ == "__main__":
    main()
