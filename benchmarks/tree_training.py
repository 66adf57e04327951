"""A user's training steps on graphs that were never seen, beside those of a level loop.

What a DataLoader's workers and its thread do beside the steps, putting batches together and pinning them, which plans
their schedules, is not in the times, nor are the level loop's indices; all that is done with a batch from then on is.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import weft
from torch import Tensor, nn
from weft import Graphs
from weft.vertex import models

from benchmarks.common import (
    Candidate,
    Entry,
    Results,
    captured,
    check_agreement,
    measure,
    relative_error,
    wake_autograd,
)
from benchmarks.level_loops import MODELS, STEPS, LevelLoop, case_of


class _Leaf(weft.VertexFunction):
    """A leaf of a binary Tree-LSTM: no child, so no product with U."""

    def __init__(self, model: models.TreeLSTM) -> None:
        super().__init__(model.state_size)
        self.W = model.W

    def vertex(self, v: weft.vertex.Vertex) -> None:
        i, _, u, o = self.W(v.pull()).chunk(4, 1)
        c = torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        v.scatter(torch.cat((h, c), 1))
        v.push(h)


class _Inner(weft.VertexFunction):
    """Its other vertices, which have no word: of W x the bias remains."""

    def __init__(self, model: models.TreeLSTM) -> None:
        super().__init__(model.state_size)
        self.bias, self.U = model.W.bias, model.U

    def vertex(self, v: weft.vertex.Vertex) -> None:
        (h0, c0), (h1, c1) = (v.gather(k).chunk(2, 1) for k in range(2))
        bi, bf, bu, bo = self.bias.chunk(4)
        i, f0, f1, u, o = self.U(torch.cat((h0, h1), 1)).chunk(5, 1)
        c = torch.sigmoid(i + bi) * torch.tanh(u + bu) + torch.sigmoid(f0 + bf) * c0 + torch.sigmoid(f1 + bf) * c1
        h = torch.sigmoid(o + bo) * torch.tanh(c)
        v.scatter(torch.cat((h, c), 1))
        v.push(h)


Batch = tuple[Graphs, Tensor]


@dataclass
class Data:
    """Trees as a data set holds them: one at a time, a graph, the numbers of its words and its labels."""

    trees: list[tuple[Graphs, Tensor, Tensor]]
    words: int
    classes: int

    @staticmethod
    def of(trees: Sequence[weft.data.Tree], typed: bool = False) -> Data:
        graphs = Graphs.from_children([tree.children for tree in trees])
        if typed:
            graphs = graphs.with_types(["inner" if below else "leaf" for tree in trees for below in tree.children])
        number: dict[str | None, int] = {None: 0}
        words = [torch.tensor([number.setdefault(s, len(number)) for s in tree.symbols]) for tree in trees]
        labels = [torch.tensor(tree.labels) for tree in trees]
        classes = 1 + max(max(tree.labels) for tree in trees)
        return Data([*zip(graphs, words, labels, strict=True)], len(number), classes)


class Training:
    """A user's step: embedding, cell, head, cross-entropy at every vertex, gradients, SGD; graphs are new each time.

    Vertices without a word have the embedding's padding. ``typed`` is the binary Tree-LSTM as two functions, one for
    leaves and one for inner vertices, which embeds and multiplies by W the leaves alone.

    Args:
        name: of the model in the case.
        data: what batches are drawn from; of ``typed`` with types.
        H: hidden size, and the embedding's.
        B: trees in a batch.
        device: ``"cuda"`` or ``"cpu"``.
    """

    RATE = 0.01

    def __init__(self, name: str, data: Data, H: int, B: int, device: str) -> None:
        torch.manual_seed(0)
        self.B, self.device, self.typed, self.trees = B, device, name == "typed", data.trees
        self.embedding = nn.Embedding(data.words, H, padding_idx=0).to(device)
        self.model = MODELS["treelstm" if self.typed else name](H).to(device)
        self.cell = (
            weft.VertexFunctions({"leaf": _Leaf(self.model), "inner": _Inner(self.model)}) if self.typed else self.model
        )
        self.head = nn.Linear(H, data.classes).to(device)
        self.parameters = [p for m in (self.embedding, self.model, self.head) for p in m.parameters()]
        self._next = 0

    def collate(self) -> Batch:
        """The next trees put together and pinned, words and labels, too."""
        chosen = [self.trees[(self._next + i) % len(self.trees)] for i in range(self.B)]
        self._next += self.B
        graphs, words, labels = zip(*chosen, strict=True)
        batch, both = Graphs.batch(graphs), torch.cat((*words, *labels)).view(2, -1)
        return (batch.pin_memory(), both.pin_memory()) if self.device == "cuda" else (batch, both)

    def send(self, batch: Batch) -> tuple[Graphs, Tensor, Tensor]:
        """A batch on the device: graphs, words, labels."""
        graphs, both = batch
        return graphs.to(self.device), *both.to(self.device, non_blocking=True).unbind()

    def batch(self) -> tuple[Graphs, Tensor, Tensor]:
        """The next batch on the device."""
        return self.send(self.collate())

    def loss(self, run: Callable[[Tensor], Tensor], words: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(run(self.embedding(words))), labels)

    def update(self, loss: Tensor, parameters: Sequence[nn.Parameter] | None = None) -> Tensor:
        parameters = self.parameters if parameters is None else parameters
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, grad in zip(parameters, grads, strict=True):
                p.add_(grad, alpha=-self.RATE)
        return loss.detach()

    def weft(self, batch: Batch) -> Tensor:
        graphs, words, labels = self.send(batch)
        return self.update(self.loss(functools.partial(self.cell, graphs), words, labels))

    def without_cell(self, batch: Batch) -> Tensor:
        """What is left of a step where the head reads the embedding."""
        _, words, labels = self.send(batch)
        parameters = [*self.embedding.parameters(), *self.head.parameters()]
        return self.update(self.loss(lambda x: x, words, labels), parameters)

    def level_loop(self, batch: Batch) -> LevelLoop:
        return LevelLoop(self.model, batch[0], self.device)

    def eager(self, batch: Batch, loop: LevelLoop) -> Tensor:
        _, words, labels = self.send(batch)
        return self.update(self.loss(loop, words, labels))

    def captured(self) -> Callable[[], Any]:
        """The level loop in a CUDA graph, which can only run one batch."""
        graphs, words, labels = self.batch()
        loop = LevelLoop(self.model, graphs.to("cpu"), self.device)

        def step() -> Tensor:
            return self.update(self.loss(loop, words, labels))

        replay = captured(step)
        replay.reads = step  # the graph reads what the step holds, and does not hold it itself
        return replay

    def check(self, case: str) -> None:
        """The losses of Weft's steps are those of the loop's, which starts from the same parameters."""
        kept = [p.detach().clone() for p in self.parameters]
        losses = []
        for step in (self.weft, lambda batch: self.eager(batch, self.level_loop(batch))):
            self._next = 0
            with torch.no_grad():
                for p, before in zip(self.parameters, kept, strict=True):
                    p.copy_(before)
            losses.append(torch.stack([step(self.collate()) for _ in range(3)]))
        check_agreement(case, {"losses": relative_error(*losses)}, 1e-4)


def device_busy(run: Callable[[], Any]) -> float:
    """Milliseconds in which the device has something to do while `run` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    spans = [e.time_range for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return busy * 1e-3


def host_of_cell(step: Training, rounds: int = 40) -> float:
    """Median milliseconds of the host for the cell's call and its backward pass on graphs that were never seen, with an
    idle device before each, and autograd's thread awake."""
    times = []
    for _ in range(rounds):
        graphs, words, _ = step.batch()
        x = step.embedding(words).detach().requires_grad_()
        wanted = [x, *step.cell.parameters()]
        if step.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        y = step.cell(graphs, x)
        called = time.perf_counter() - start
        grad = torch.ones_like(y)
        if step.device == "cuda":
            torch.cuda.synchronize()
            wake_autograd()
        start = time.perf_counter()
        torch.autograd.grad(y, wanted, grad)
        times.append((called + time.perf_counter() - start) * 1e3)
    return statistics.median(times)


LOOP_STEPS = 3
"""In a row of the level loop: the host bounds them, and making the loops takes longer than they do."""


def training_entry(name: str, data: Callable[[bool], Data], H: int, B: int, device: str) -> Entry:
    """Training steps in a row, each on graphs that were never seen, beside the same with the level loop.

    Args:
        name, H, B, device: as :class:`Training` takes them.
        data: with types, and without.
    """
    case = case_of(name, device, H, B, executor="auto", task="train")

    def run(results: Results) -> list[dict[str, str]]:
        own = data(name == "typed")
        step = Training(name, own, H, B, device)
        step.check(case)

        def with_loops() -> list[tuple[Batch, LevelLoop]]:
            return [(batch, step.level_loop(batch)) for batch in (step.collate() for _ in range(LOOP_STEPS))]

        bare = Training(name, own, H, B, device)
        candidates = {"weft": _in_a_row(step, step.weft), "without_cell": _in_a_row(bare, bare.without_cell)}
        if step.typed:
            untyped = Training("treelstm", data(False), H, B, device)
            candidates["untyped"] = _in_a_row(untyped, untyped.weft)
        if device == "cuda":
            replay = Training(name, own, H, B, device).captured()
            candidates["captured"] = Candidate(lambda _: [replay() for _ in range(STEPS)][-1])
        times = {who: time / STEPS for who, time in measure(candidates, device).items()}
        eager = Candidate(lambda batches: [step.eager(*batch) for batch in batches][-1], with_loops)
        times["eager"] = measure({"eager": eager}, device, warmup=1, spread=0.1)["eager"] / LOOP_STEPS
        if device == "cuda":
            batches = [step.collate() for _ in range(STEPS)]
            times["device_busy"] = device_busy(lambda: [step.weft(batch) for batch in batches]) / STEPS
        rows = [
            results.put(case, "step", "ms", times["weft"], peer, times[peer])
            for peer in ("eager", "captured", "untyped", "without_cell", "device_busy")
            if peer in times
        ]
        if device == "cuda":
            rows.append(results.put(case, "host_of_cell", "ms", host_of_cell(step), "step", times["weft"]))
        return rows

    return Entry(case, ("step", "host_of_cell") if device == "cuda" else ("step",), run)


def _in_a_row(training: Training, step: Callable[[Batch], Tensor]) -> Candidate:
    return Candidate(
        lambda batches: [step(batch) for batch in batches][-1], lambda: [training.collate() for _ in range(STEPS)]
    )


def training_table(
    trees: Sequence[weft.data.Tree], H: int, names: Sequence[str], batches: Sequence[int], device: str
) -> Iterator[Entry]:
    """An entry for each net and batch size."""
    data = functools.cache(functools.partial(Data.of, trees))
    for name in names:
        for B in batches:
            yield training_entry(name, data, H, B, device)
