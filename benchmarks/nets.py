"""Whole training steps of dynamic nets: each executor, and weft.vertex.Trainer, on graphs that were never seen.

The six nets of VPPS (MICRO 2018), section IV, with the graphs of examples/six_nets.py; what they read are vectors that
nobody trains, made on the device. A step is what a user's loop does with a batch that a DataLoader's workers have put
together and its thread has pinned, graphs too, which plans their schedules: it sends the batch to the device, looks up
the embedding, and runs cell, head, cross-entropy, gradients of all parameters and the optimizer, SGD with momentum.
``python -m benchmarks.vertex`` has the rows.

``python -m benchmarks.nets [NET ...]`` measures nothing: it compiles what the rows run, a process for each cell, so
that a run that has little time finds the kernels on disk.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import weft
from torch import Tensor, nn
from weft import Graphs
from weft._vertex import calls
from weft._vertex.runtime import persistent
from weft.vertex import Trainer, Vertex, models

from benchmarks import level_loops
from benchmarks.common import ROOT

NETS = ("treelstm", "rvnn", "td-rnn", "td-lstm", "bilstm", "bilstm-char")
SAME_CELL = (("bilstm-char",), ("bilstm",), ("rvnn",), ("td-rnn",), ("treelstm", "td-lstm"))
"""Nets whose kernels are the same, those that take longest to compile first."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SAMPLES = 2000
"""Of each net, from which batches are drawn."""
CHARACTERS = 64
RARE = 5


@cache
def _examples() -> SimpleNamespace:
    folder = str(ROOT / "examples")
    sys.path.insert(0, folder)  # where the example finds its neighbours
    try:
        return SimpleNamespace(**runpy.run_path(f"{folder}/six_nets.py"))
    finally:
        sys.path.remove(folder)


class Characters(models.ChainLSTM):
    """An LSTM over the characters of a word, whose state is as wide as that of the words."""

    def __init__(self, size: int, state: int) -> None:
        super().__init__(size, size)
        self.state_size = (state,)

    def vertex(self, v: Vertex) -> None:
        size = self.U.in_features
        h, c = v.gather(0)[:, : 2 * size].chunk(2, 1)
        i, f, g, o = (self.W(v.pull()[:, :size]) + self.U(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        v.scatter(torch.cat((h, c, *[torch.zeros_like(h)] * (self.state_size[0] // size - 2)), 1))


class RareWord(weft.VertexFunction):
    """A word's LSTM with another one's weights, which reads the ends of two chains of characters."""

    def __init__(self, word: models.ChainLSTM, size: int) -> None:
        super().__init__(word.state_size)
        self.W, self.U, self.size = word.W, word.U, size

    def vertex(self, v: Vertex) -> None:
        h, c = v.gather(0).chunk(2, 1)
        x = torch.cat((v.gather(1)[:, : self.size], v.gather(2)[:, : self.size]), 1)
        i, f, g, o = (self.W(x) + self.U(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        v.scatter(torch.cat((torch.sigmoid(o) * torch.tanh(c), c), 1))


class OwnCell(weft.VertexFunction):
    """A recurrent cell that no library has: a GRU whose candidate reads the square of its state, too."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.W = nn.Linear(input_size, 3 * hidden_size)
        self.U = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.V = nn.Linear(hidden_size, hidden_size, bias=False)

    def vertex(self, v: Vertex) -> None:
        h = self.step(self.W(v.pull()), v.gather(0))
        v.scatter(h)
        v.push(h)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        """The next state (B, H) from W x (B, 3H) and the state before."""
        xr, xz, xn = x.chunk(3, 1)
        r, z = (torch.cat((xr, xz), 1) + self.U(h)).sigmoid().chunk(2, 1)
        n = torch.tanh(xn + self.V(r * h) - 0.1 * h * h)
        return z * h + (1 - z) * n


@dataclass
class Data:
    """What one net learns from: graphs one at a time, as a data set holds them, with classes."""

    graphs: list[Graphs]
    targets: list[Tensor]
    classes: int


Batch = tuple[Graphs, Tensor]
"""What :meth:`Training.collate` gives."""
Step = Callable[..., object]
"""Takes a batch, or the next one."""


def samples(sentences: Sequence[weft.data.Sentence], numbers: dict[str, int]) -> list:
    """As :func:`data_of` makes them for the tagger that reads characters, with numbers of the words that it knows."""
    return _examples().char_samples(sentences, numbers, {}, {})


def data_of(name: str, trees: Sequence[weft.data.Tree], sentences: Sequence[weft.data.Sentence]) -> Data:
    made = _examples()
    if name in ("bilstm", "bilstm-char"):
        tags = {tag: i for i, tag in enumerate(sorted({tag for s in sentences for tag in s.tags}))}
        numbers = made.numbers_of(Counter(word for s in sentences for word in s.words), RARE)
        if name == "bilstm":
            samples = made.tag_samples(sentences, numbers, tags)
        else:
            samples = made.char_samples(sentences, numbers, {}, tags)
        return Data([s.graph for s in samples], [s.targets for s in samples], len(tags))
    pyramids = name.startswith("td-")
    samples = made.pyramid_samples(trees, {}) if pyramids else made.tree_samples(trees, {}, typed=name == "rvnn")
    classes = 1 + max(max(tree.labels) for tree in trees)
    return Data([s.graph for s in samples], [s.targets for s in samples], classes)


def hidden_of(name: str) -> int:
    return 512 if name in ("rvnn", "td-rnn") else 256


def cell_of(name: str, H: int, classes: int) -> tuple[nn.Module, nn.Module | None, int]:
    """The cell, its head, and how wide its inputs are."""
    if name in ("treelstm", "td-lstm"):
        return models.TreeLSTM(H, H), nn.Linear(H, classes), H
    if name == "rvnn":
        return models.RvNN(H, H), nn.Linear(H, classes), H
    if name == "td-rnn":
        return models.TreeFC(H), nn.Linear(H, classes), H
    net = models.BiLSTMTagger(2 * CHARACTERS, H, classes, 32)
    if name == "bilstm":
        return net, None, 2 * CHARACTERS
    more = {f"rare {end}": RareWord(net[end], CHARACTERS) for end in ("fw", "bw")}
    more |= {f"characters {end}": Characters(CHARACTERS, 2 * H) for end in ("fw", "bw")}
    return weft.VertexFunctions({**net, **more}), None, 2 * CHARACTERS


class Training:
    """Steps of a net, each on the next graphs; by a loop under an executor, or by the Trainer.

    Args:
        name: one of :data:`NETS`.
        data: what batches are drawn from.
        B: graphs in a batch.
        device: ``"cuda"`` or ``"cpu"``.
        H: hidden size, that of the net by default.
    """

    def __init__(self, name: str, data: Data, B: int, device: str, H: int | None = None) -> None:
        torch.manual_seed(0)
        self.name, self.data, self.B, self.device = name, data, B, device
        cell, head, self.width = cell_of(name, H or hidden_of(name), data.classes)
        self.cell, self.head = cell.to(device), head if head is None else head.to(device)
        self.at = "roots" if name.startswith("td-") else "vertices"
        self.parameters = [*self.cell.parameters(), *(() if head is None else self.head.parameters())]
        self.optimizer = torch.optim.SGD(self.parameters, 0.01, momentum=0.9)
        self.vectors = torch.randn(4096, self.width, device=device)
        self._next = 0

    def collate(self) -> Batch:
        """The next graphs put together, and the numbers of their words with the targets behind them, pinned."""
        chosen = [(self._next + i) % len(self.data.graphs) for i in range(self.B)]
        self._next += self.B
        graphs = Graphs.batch([self.data.graphs[i] for i in chosen])
        # Words do not matter: the vertices' numbers stand for them.
        words = torch.arange(graphs.num_vertices) % len(self.vectors)
        both = torch.cat([words, *(self.data.targets[i] for i in chosen)])
        return (graphs.pin_memory(), both.pin_memory()) if self.device == "cuda" else (graphs, both)

    def send(self, batch: Batch | None = None) -> tuple[Graphs, Tensor, Tensor]:
        """A batch, or the next one, on the device: graphs, what their words stand for, targets."""
        graphs, both = self.collate() if batch is None else batch
        both, count = both.to(self.device, non_blocking=True), graphs.num_vertices
        words, targets = both.narrow(0, 0, count), both.narrow(0, count, len(both) - count)
        return graphs.to(self.device), self.vectors.index_select(0, words), targets

    def batch(self) -> tuple[Graphs, Tensor, Tensor]:
        """The next batch on the device."""
        return self.send()

    def loss(self, run: Callable[[Tensor], Tensor], graphs: Graphs, x: Tensor, targets: Tensor) -> Tensor:
        y = run(x)
        y = y.index_select(0, graphs.roots) if self.at == "roots" else y
        return nn.functional.cross_entropy(y if self.head is None else self.head(y), targets)

    def step(self, run: Callable[[Graphs], Callable[[Tensor], Tensor]], batch: Batch | None = None) -> Tensor:
        """By a loop, whose cell is what `run` makes of the graphs."""
        graphs, x, targets = self.send(batch)
        return self.update(self.loss(run(graphs), graphs, x, targets))

    def update(self, loss: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def by(self, executor: str) -> Step:
        def step(batch: Batch | None = None) -> Tensor:
            return self.step(lambda graphs: lambda x: self.cell(graphs, x, executor=executor), batch)

        return step

    def gradients_by(self, executor: str) -> Step:
        """Steps without the optimizer."""

        def step(batch: Batch | None = None) -> Sequence[Tensor]:
            graphs, x, targets = self.send(batch)
            loss = self.loss(lambda x: self.cell(graphs, x, executor=executor), graphs, x, targets)
            return torch.autograd.grad(loss, self.parameters)

        return step

    def captured_step(self, run: Callable[[Tensor], Tensor], graphs: Graphs, x: Tensor, targets: Tensor) -> Tensor:
        """A step that a CUDA graph can hold."""
        grads = torch.autograd.grad(self.loss(run, graphs, x, targets), self.parameters)
        for p, grad in zip(self.parameters, grads, strict=True):
            p.grad = grad
        self.optimizer.step()
        return grads[0]

    def trainer(self) -> Step:
        trainer = self.make_trainer()
        return lambda batch=None: trainer.step(*self.send(batch))

    def make_trainer(self) -> Trainer:
        return Trainer(self.cell, self.optimizer, head=self.head, at=self.at, executor="persistent")

    def runs_as(self, executor: str) -> str:
        """The executor that runs where this one is asked for; of the Trainer ``"trainer"`` where it is one kernel."""
        start = self._next
        graphs, x, _ = self.batch()
        self._next = start
        if executor == "trainer":
            found = weft.explain(self.make_trainer(), graphs, x)
            return "trainer" if found.one_kernel else found.executor
        return weft.explain(self.cell, graphs, x, executor=executor).executor

    def losses(self, step: Step, count: int = 4) -> Tensor:
        """Of steps from the beginning; the parameters and the optimizer are as before afterwards."""
        kept = [p.detach().clone() for p in self.parameters]
        self._next = 0
        found = [step() for _ in range(count + 1)]
        # The Trainer's are those of the step before.
        shifted = found[1:] if found[0] is None else found[:-1]
        with torch.no_grad():
            for p, before in zip(self.parameters, kept, strict=True):
                p.copy_(before)
        self.optimizer.state.clear()
        return torch.tensor([float(x) for x in shifted])


def sentences(folder: Path | None) -> list[weft.data.Sentence] | None:
    """WikiNER's, None where it is not here."""
    for place in (folder, ROOT / "shared" / "data" / "wikiner", ROOT.parent / "shared/data/wikiner"):
        if place is not None and (place / "dev.txt").exists():
            return weft.data.tagged(place / "dev.txt")
    return None


def compile_all(name: str, data: Data, device: str) -> None:
    """What steps of a net run on batches of all sizes: its kernels are on disk afterwards."""
    training = Training(name, data, 4, device)
    graphs, x, _ = training.batch()
    call = calls.prepare(training.cell, graphs, x, "persistent")
    if call.executor == "persistent":
        # Several of a size, which differ in what they take.
        batches = [Graphs.batch(data.graphs[i * B : (i + 1) * B]) for B in BATCHES for i in range(8)]
        persistent.compile_for(call.compiled, graphs.device, [g for g in batches if len(g)])
    steps = [training.gradients_by("batched")]
    if training.runs_as("trainer") == "trainer":
        steps.append(training.trainer())
    for step in steps:
        step()


def main(names: Sequence[str]) -> None:
    groups = [[name for name in group if name in (names or NETS)] for group in SAME_CELL]
    groups = [group for group in groups if group]
    if len(groups) > 1:
        command = [sys.executable, "-m", "benchmarks.nets"]
        running = [(group, subprocess.Popen([*command, *group])) for group in groups]
        failed = [name for group, process in running if process.wait() != 0 for name in group]
        if failed:
            raise SystemExit(f"not compiled: {', '.join(failed)}")
        return
    start = time.monotonic()
    tags = any(name.startswith("bilstm") for name in names)
    trees, tagged = (None, sentences(None)) if tags else (level_loops.treebank(None), None)
    for name in names:
        if (tagged or trees) is None:
            print(f"{name}: its data are not here")
            continue
        compile_all(name, data_of(name, (trees or [])[:SAMPLES], (tagged or [])[:SAMPLES]), "cuda")
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
