"""The vertex engine against level loops in torch, against torch.nn, and against its own arithmetic.

``python -m benchmarks.vertex [FILTER]`` measures the table into results/vertex.csv; FILTER is a substring of the case,
the metric or the peer. Trees are those of the Stanford Sentiment Treebank (``--sst``, WEFT_SST, or shared/data/sst in
the repository or beside it); rows that need them are left out, with a word, where they are not. A step takes gradients
for the inputs and all parameters, of a random gradient at every output.

Peers: ``eager`` is a loop over the levels as one would write it for this one model, with its indices made beforehand,
the product with the inputs taken out of the loop, and no vertex without children multiplied by U; ``captured`` is the
same loop, forward and backward, in a CUDA graph, which only runs this one batch; ``torch.nn`` is cuDNN's LSTM;
``floor`` is the matrix products of the whole batch alone, each as one; ``none`` is the engine with every option off.
In rows of the metric ``forward_backward_captured`` Weft's step is in a CUDA graph, too.
Weft runs graphs that it has seen before, as the loops do; what a new batch costs stands in the rows of the metric
``schedule``, whose peer is the whole ``step``, and of ``steps_in_a_row``, one of many steps that do not wait for each
other, each on a new batch, whose peer takes batches that it has ``seen``. Rows of the metric ``step`` are a user's
training steps in a row, each on graphs that were never seen: embedding, cell, head, cross-entropy, gradients and SGD.
Their ``eager`` builds the loop's indices for each batch, ``captured`` repeats one batch, ``untyped`` is the same net as
one function for all vertices, and ``device_busy`` is the time in which the device has work. ``python -m
benchmarks.vertex task=train`` measures these alone.

Rows of ``executor=persistent`` are steps on graphs that were never seen, those of ``executor=trainer`` whole steps of
weft.vertex.Trainer, with SGD and momentum in the peers, too. Of six nets (benchmarks/nets.py) they stand beside the
same net under ``batched``, those of ``executor=auto`` beside the ``best`` of both. ``level_forward`` and
``level_backward`` are what one more level of one vertex costs on the device.

All in fp32 without TF32, but for the chain LSTMs: there both follow cuDNN's default, TF32.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import weft
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from weft import Graphs
from weft.vertex import models

from benchmarks import nets
from benchmarks.common import (
    CPU_THREADS,
    RESULTS,
    ROOT,
    Candidate,
    Entry,
    Results,
    begin_table,
    captured,
    case_name,
    check_agreement,
    exit_with,
    measure,
    peak_memory,
    relative_error,
    run_entries,
    show,
    table_parser,
)

ABLATION = ("lazy", "fuse", "stream")
STEPS = 10
"""In a row, without waiting for the device between them."""


def treebank(folder: Path | None) -> list[weft.data.Tree] | None:
    """The training trees, None where there are none."""
    places = [folder, os.environ.get("WEFT_SST"), ROOT / "shared" / "data" / "sst", ROOT.parent / "shared/data/sst"]
    for place in places:
        if place is not None and (Path(place) / "train.txt").exists():
            return weft.data.sst(Path(place) / "train.txt")
    return None


def sample(trees: Sequence[weft.data.Tree], count: int) -> list[weft.data.Tree]:
    """The same trees in every run."""
    return [trees[i] for i in torch.randperm(len(trees), generator=torch.Generator().manual_seed(0))[:count].tolist()]


def complete_trees(leaves: int, count: int) -> Graphs:
    """Complete binary trees, the vertices level by level."""
    return Graphs.from_parents([[leaves + v // 2 for v in range(2 * leaves - 2)] + [-1]] * count)


def shared_subtrees(tree: weft.data.Tree) -> list[list[int]]:
    """The tree's children with equal subtrees made one vertex, children before parents."""
    number: dict[tuple[str | None, tuple[int, ...]], int] = {}
    place: list[int] = []
    for symbol, children in zip(tree.symbols, tree.children, strict=True):
        place.append(number.setdefault((symbol, tuple(place[child] for child in children)), len(number)))
    return [list(children) for _, children in number]


class LevelLoop:
    """A net over graphs, level by level in eager torch; the parameters are those of a model of weft.vertex.models.

    What a level computes is handed over to the levels that read it, so that every row moves once, however deep the
    graph.
    """

    def __init__(self, model: nn.Module, graphs: Graphs, device: str) -> None:
        self.model = model
        self.cell: Callable[..., tuple[Tensor, Tensor]] = getattr(self, f"_{type(model).__name__.lower()}")
        levels, edges = graphs.levels, graphs.edges
        count = graphs.num_levels
        self.order = torch.argsort(levels, stable=True).to(device)
        self.inverse = torch.argsort(self.order)
        self.sizes = torch.bincount(levels, minlength=count).tolist()
        position = torch.empty_like(levels)
        for level in range(count):
            mine = levels == level
            position[mine] = torch.arange(int(mine.sum()))
        child, parent, _ = edges.unbind(1)
        reader, source = levels[parent], levels[child]
        # For each level: whom it hands which rows, where the edges find what was handed, and each edge's parent.
        self.gives: list[tuple[Tensor, list[int], list[int]]] = []
        self.finds: list[Tensor] = []
        self.parents: list[Tensor] = []
        for level in range(count):
            given = (source == level).nonzero().squeeze(1)
            given = given[torch.argsort(reader[given], stable=True)]
            to, counts = torch.unique_consecutive(reader[given], return_counts=True)
            self.gives.append((position[child[given]].to(device), to.tolist(), counts.tolist()))
            read = (reader == level).nonzero().squeeze(1)
            handed = torch.argsort(source[read], stable=True)
            finds = torch.empty_like(handed)
            finds[handed] = torch.arange(len(handed))
            self.finds.append(finds.to(device))
            self.parents.append(position[parent[read]].to(device))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.index_select(0, self.order)
        inputs = (self.model.W(x) if hasattr(self.model, "W") else x).split(self.sizes)
        handed: list[list[Tensor]] = [[] for _ in self.sizes]
        outputs = []
        for level, rows in enumerate(inputs):
            children = torch.cat(handed[level]).index_select(0, self.finds[level]) if level else None
            handed[level] = []
            state, output = self.cell(rows, children, self.parents[level])
            outputs.append(output)
            which, to, counts = self.gives[level]
            for reader, piece in zip(to, state.index_select(0, which).split(counts), strict=True):
                handed[reader].append(piece)
        return torch.cat(outputs).index_select(0, self.inverse)

    def _treelstm(self, x: Tensor, children: Tensor | None, _: Tensor) -> tuple[Tensor, Tensor]:
        xi, xf, xu, xo = x.chunk(4, 1)
        if children is None:
            c, o = torch.sigmoid(xi) * torch.tanh(xu), xo
        else:
            h, cs = children.view(len(x), 2, -1).chunk(2, 2)
            i, f, u, o = self.model.U(h.flatten(1)).split([xi.shape[1] * n for n in (1, 2, 1, 1)], 1)
            f = torch.sigmoid(xf.unsqueeze(1) + f.view_as(cs))
            c, o = torch.sigmoid(xi + i) * torch.tanh(xu + u) + (f * cs).sum(1), xo + o
        h = torch.sigmoid(o) * torch.tanh(c)
        return torch.cat((h, c), 1), h

    def _childsumtreelstm(self, x: Tensor, children: Tensor | None, parents: Tensor) -> tuple[Tensor, Tensor]:
        xi, xf, xu, xo = x.chunk(4, 1)
        if children is None:
            c, o = torch.sigmoid(xi) * torch.tanh(xu), xo
        else:
            h, c = children.chunk(2, 1)
            f = torch.sigmoid(xf.index_select(0, parents) + self.model.U_f(h))
            fc = torch.zeros_like(xi).index_add(0, parents, f * c)
            i, u, o = self.model.U(torch.zeros_like(xi).index_add(0, parents, h)).chunk(3, 1)
            c, o = torch.sigmoid(xi + i) * torch.tanh(xu + u) + fc, xo + o
        h = torch.sigmoid(o) * torch.tanh(c)
        return torch.cat((h, c), 1), h

    def _treefc(self, x: Tensor, children: Tensor | None, _: Tensor) -> tuple[Tensor, Tensor]:
        if children is None:
            h = torch.tanh(x + self.model.U.bias)
        else:
            h = torch.tanh(x + self.model.U(children.view(len(x), -1)))
        return h, h


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "treelstm": lambda H: models.TreeLSTM(H, H),
    "childsum": lambda H: models.ChildSumTreeLSTM(H, H),
    "treefc": lambda H: models.TreeFC(H),
    "chainlstm": lambda H: models.ChainLSTM(H, H),
}


class Step:
    """One training step of a model of weft.vertex.models on a batch, by Weft and by the level loop.

    Args:
        name: of the model in the case.
        graphs: the batch, on the CPU.
        H: hidden size, and the inputs'.
        device: ``"cuda"`` or ``"cpu"``.
        executor: Weft's.
        autocast: run under autocast in bf16.
    """

    def __init__(
        self, name: str, graphs: Graphs, H: int, device: str, executor: str = "batched", autocast: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.device, self.executor, self.autocast = device, executor, autocast
        self.model = MODELS[name](H).to(device)
        self.graphs = graphs.to(device)
        self.x = torch.randn(graphs.num_vertices, H, device=device).requires_grad_()
        self.grad = torch.randn(graphs.num_vertices, H, device=device)
        self.leaves = [self.x, *self.model.parameters()]

    def _context(self) -> Any:
        return torch.autocast(self.device, torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def forward(self) -> Tensor:
        with torch.no_grad(), self._context():
            return self.model(self.graphs, self.x, executor=self.executor)

    def weft(self, graphs: Graphs | None = None) -> tuple[Tensor, ...]:
        with self._context():
            output = self.model(self.graphs if graphs is None else graphs, self.x, executor=self.executor)
        return self._differentiate(output, self.leaves)

    def peer(self, loop: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with self._context():
            output = loop(self.x)
        return self._differentiate(output, self.leaves)

    def _differentiate(self, output: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return output.detach(), *torch.autograd.grad(output, leaves, self.grad.to(output.dtype))

    def runs(self) -> bool:
        """Whether the executor runs here; says why not."""
        found = weft.explain(self.model, self.graphs, self.x, executor=self.executor)
        if found.executor != self.executor:
            print(f"{self.executor} does not run here: {found.reason}", flush=True)
        return found.executor == self.executor

    def check(self, case: str, other: Sequence[Tensor]) -> None:
        """Weft's outputs and gradients are the other's."""
        errors = {f"result {i}": relative_error(a, b) for i, (a, b) in enumerate(zip(self.weft(), other, strict=True))}
        check_agreement(case, errors, 5e-2 if self.autocast else 1e-4)


def _loop_entry(
    name: str,
    graphs: Callable[[], Graphs],
    H: int,
    B: int,
    device: str,
    *,
    autocast: bool = False,
    peers: Sequence[str] = ("eager", "captured"),
    memory: bool = False,
    executor: str = "batched",
    **keys: Any,
) -> Entry:
    """A step beside the level loop, as it is and captured; the persistent executor's on graphs never seen."""
    case = _case(name, device, H, B, "bf16" if autocast else "fp32", executor, **keys)

    def run(results: Results) -> list[dict[str, str]]:
        batch = graphs()
        step = Step(name, batch, H, device, executor, autocast)
        if not step.runs():
            return []
        fresh = _fresh(graphs(), device) if executor == "persistent" else lambda: None
        loop = LevelLoop(step.model, batch, device)
        step.check(case, step.peer(loop))
        if memory:
            mine, peers_bytes = peak_memory(step.weft), peak_memory(lambda: step.peer(loop))
            return [results.put(case, "peak_memory", "bytes", mine, "eager", peers_bytes)]
        candidates = {"weft": Candidate(lambda _: step.weft(fresh())), "eager": Candidate(lambda _: step.peer(loop))}
        obstacle = None
        if "captured" in peers and device == "cuda":
            # Leaves of their own, because a capture must not meet those of a graph on another stream.
            mine, theirs = (Step(name, batch, H, device, executor, autocast) for _ in range(2))
            again = LevelLoop(theirs.model, batch, device)
            try:
                replays = {"captured": captured(lambda: theirs.peer(again)), "weft captured": captured(mine.weft)}
            except RuntimeError as error:
                obstacle, replays = error, {}
            for who, replay in replays.items():
                step.check(f"{case}, {who}", replay())
                candidates[who] = Candidate(lambda _, replay=replay: replay())
        times = measure(candidates, device)
        rows = [
            results.put(case, "forward_backward", "ms", times["weft"], peer, times[peer])
            for peer in peers
            if peer in times
        ]
        if "weft captured" in times:
            both = times["weft captured"], "captured", times["captured"]
            rows.append(results.put(case, "forward_backward_captured", "ms", *both))
        if "floor" in peers:
            floor = products_time(step, batch)
            rows.append(results.put(case, "forward_backward", "ms", times["weft"], "floor", floor))
            speed = batch.num_vertices / (times["weft"] * 1e-3)
            bound = batch.num_vertices / (floor * 1e-3)
            rows.append(results.put(case, "throughput", "vertices/s", speed, "floor", bound))
        if obstacle is not None:
            show(rows)
            raise RuntimeError(f"not captured: {obstacle}")
        return rows

    metrics = ("forward_backward", "forward_backward_captured", "throughput")
    return Entry(case, ("peak_memory",) if memory else metrics, run)


def products_time(step: Step, graphs: Graphs) -> float:
    """Milliseconds of the step's matrix products, forward and backward, each as one over the whole batch."""
    inner, edges = int((graphs.levels > 0).sum()), graphs.num_edges
    rows = {"W": graphs.num_vertices, "U": inner, "U_f": edges}
    work = []
    for name, layer in step.model.named_modules():
        if isinstance(layer, nn.Linear):
            out_features, in_features = layer.weight.shape
            weight = layer.weight.detach().to(torch.bfloat16 if step.autocast else torch.float32)
            x = torch.randn(rows[name], in_features, device=step.device, dtype=weight.dtype)
            work.append((x, weight, torch.randn(rows[name], out_features, device=step.device, dtype=weight.dtype)))

    def products() -> list[Tensor]:
        return [product for x, weight, grad in work for product in (x @ weight.t(), grad @ weight, grad.t() @ x)]

    return measure({"floor": Candidate(lambda _: products())}, step.device)["floor"]


def _chain_entry(layout: str, lengths: Callable[[], list[int]], H: int, B: int, device: str, **keys: Any) -> Entry:
    """A chain LSTM beside torch.nn.LSTM on the same sequences, packed or all of one length."""
    case = _case("chainlstm", device, H, B, "fp32", layout=layout, **keys)

    def run(results: Results) -> list[dict[str, str]]:
        graphs = Graphs.chain(lengths())
        with _matmul_tf32(torch.backends.cudnn.allow_tf32):
            step = Step("chainlstm", graphs, H, device)
            peer = nn.LSTM(H, H).to(device)
            with torch.no_grad():
                peer.weight_ih_l0.copy_(step.model.W.weight)
                peer.weight_hh_l0.copy_(step.model.U.weight)
                peer.bias_ih_l0.copy_(step.model.W.bias)
                peer.bias_hh_l0.zero_()
            # Row i of what torch takes is vertex index[i]; in time order either way.
            sequences = torch.arange(graphs.num_vertices).split(graphs.ptr.diff().tolist())
            packed = pack_sequence(sequences, enforce_sorted=False)
            if layout == "packed":
                index = packed.data.to(device)
            else:
                index = torch.stack(sequences, 1).to(device)
            x = step.x.detach()[index].requires_grad_()
            grad = step.grad[index]

            def torchs() -> tuple[Tensor, ...]:
                if layout == "packed":
                    output = peer(nn.utils.rnn.PackedSequence(x, packed.batch_sizes))[0].data
                else:
                    output = peer(x)[0]
                weights = (x, peer.weight_ih_l0, peer.bias_ih_l0, peer.weight_hh_l0)
                return output.detach(), *torch.autograd.grad(output, weights, grad)

            mine, theirs = step.weft(), torchs()
            errors = {
                name: relative_error(a, b)
                for name, a, b in zip(
                    ("output", "grad_input", "grad_W", "grad_bias", "grad_U"),
                    (mine[0][index], mine[1][index], *mine[2:]),
                    theirs,
                    strict=True,
                )
            }
            check_agreement(case, errors, 2e-2 if device == "cuda" else 1e-4)
            times = measure(
                {"weft": Candidate(lambda _: step.weft()), "torch.nn": Candidate(lambda _: torchs())}, device
            )
        return [results.put(case, "forward_backward", "ms", times["weft"], "torch.nn", times["torch.nn"])]

    return Entry(case, ("forward_backward", "torch.nn"), run)


@contextlib.contextmanager
def _matmul_tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _schedule_entry(trees: Sequence[weft.data.Tree], H: int, B: int, device: str) -> Entry:
    """Host time of a new batch, from graphs per tree to one that can run, as a part of a whole step on a new batch.

    All that is planned from a batch is what a call costs more on graphs that it has not seen.
    """
    case = _case("treelstm", device, H, B)

    def run(results: Results) -> list[dict[str, str]]:
        parts = [Graphs.from_children([tree.children]) for tree in sample(trees, B)]
        step = Step("treelstm", Graphs.batch(parts), H, device)

        def fresh() -> Graphs:
            return Graphs.batch(parts).to(device)

        def call(graphs: Graphs) -> Any:
            # On the CPU nothing is moved, and what a call computes would drown the difference.
            run = functools.partial(weft.explain, step.model) if device == "cpu" else step.model
            return run(graphs, step.x, executor=step.executor)

        batching = host_time(lambda _: fresh(), lambda: None, device)
        planning = host_time(call, fresh, device) - host_time(call, lambda: step.graphs, device)
        whole = measure({"weft": Candidate(lambda _: step.weft(fresh()))}, device)["weft"]
        rows = [results.put(case, "schedule", "ms", batching + max(planning, 0.0), "step", whole)]

        def steps(graphs: Callable[[], Graphs]) -> Candidate:
            return Candidate(lambda _: [step.weft(graphs())[0] for _ in range(STEPS)][-1])

        times = measure({"weft": steps(fresh), "seen": steps(lambda: step.graphs)}, device)
        rows.append(results.put(case, "steps_in_a_row", "ms", times["weft"] / STEPS, "seen", times["seen"] / STEPS))
        return rows

    return Entry(case, ("schedule", "steps_in_a_row"), run)


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


class Training:
    """A user's step: embedding, cell, head, cross-entropy at every vertex, gradients, SGD; graphs are new each time.

    Vertices without a word have the embedding's padding. ``typed`` is the binary Tree-LSTM as two functions, one for
    leaves and one for inner vertices, which embeds and multiplies by W the leaves alone.

    Args:
        name: of the model in the case.
        trees: what batches are drawn from.
        H: hidden size, and the embedding's.
        B: trees in a batch.
        device: ``"cuda"`` or ``"cpu"``.
    """

    RATE = 0.01

    def __init__(self, name: str, trees: Sequence[weft.data.Tree], H: int, B: int, device: str) -> None:
        torch.manual_seed(0)
        self.B, self.device, self.typed = B, device, name == "typed"
        number: dict[str | None, int] = {None: 0}
        # One at a time, as a data set holds them.
        self.trees = []
        for tree in trees:
            graph = Graphs.from_children([tree.children])
            if self.typed:
                graph = graph.with_types(["inner" if children else "leaf" for children in tree.children])
            words = torch.tensor([number.setdefault(symbol, len(number)) for symbol in tree.symbols])
            self.trees.append((graph, words, torch.tensor(tree.labels)))
        self.embedding = nn.Embedding(len(number), H, padding_idx=0).to(device)
        self.model = MODELS["treelstm" if self.typed else name](H).to(device)
        self.cell = (
            weft.VertexFunctions({"leaf": _Leaf(self.model), "inner": _Inner(self.model)}) if self.typed else self.model
        )
        self.head = nn.Linear(H, 1 + max(max(tree.labels) for tree in trees)).to(device)
        self.parameters = [p for m in (self.embedding, self.model, self.head) for p in m.parameters()]
        self._next = 0

    def batch(self) -> tuple[Graphs, Tensor, Tensor]:
        """The next trees, put together and sent to the device."""
        chosen = [self.trees[(self._next + i) % len(self.trees)] for i in range(self.B)]
        self._next += self.B
        graphs, words, labels = zip(*chosen, strict=True)
        found = torch.cat(words), torch.cat(labels)
        if self.device == "cuda":
            found = tuple(t.pin_memory().to(self.device, non_blocking=True) for t in found)
        return Graphs.batch(graphs).to(self.device), *found

    def loss(self, run: Callable[[Tensor], Tensor], words: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(run(self.embedding(words))), labels)

    def update(self, loss: Tensor) -> Tensor:
        grads = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            for p, grad in zip(self.parameters, grads, strict=True):
                p.add_(grad, alpha=-self.RATE)
        return loss.detach()

    def weft(self) -> Tensor:
        graphs, words, labels = self.batch()
        return self.update(self.loss(functools.partial(self.cell, graphs), words, labels))

    def eager(self) -> Tensor:
        graphs, words, labels = self.batch()
        return self.update(self.loss(LevelLoop(self.model, graphs.to("cpu"), self.device), words, labels))

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
        for step in (self.weft, self.eager):
            self._next = 0
            with torch.no_grad():
                for p, before in zip(self.parameters, kept, strict=True):
                    p.copy_(before)
            losses.append(torch.stack([step() for _ in range(3)]))
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


def _training_entry(name: str, trees: Sequence[weft.data.Tree], H: int, B: int, device: str) -> Entry:
    """Training steps in a row, each on graphs that were never seen, beside the same with the level loop."""
    case = _case(name, device, H, B, task="train")

    def run(results: Results) -> list[dict[str, str]]:
        step = Training(name, trees, H, B, device)
        step.check(case)

        def in_a_row(once: Callable[[], Any]) -> Candidate:
            return Candidate(lambda _: [once() for _ in range(STEPS)][-1])

        candidates = {"weft": in_a_row(step.weft), "eager": in_a_row(step.eager)}
        if step.typed:
            candidates["untyped"] = in_a_row(Training("treelstm", trees, H, B, device).weft)
        if device == "cuda":
            candidates["captured"] = in_a_row(Training(name, trees, H, B, device).captured())
        times = {who: time / STEPS for who, time in measure(candidates, device).items()}
        if device == "cuda":
            times["device_busy"] = device_busy(lambda: [step.weft() for _ in range(STEPS)]) / STEPS
        return [
            results.put(case, "step", "ms", times["weft"], peer, times[peer])
            for peer in ("eager", "captured", "untyped", "device_busy")
            if peer in times
        ]

    return Entry(case, ("step",), run)


def host_time(run: Callable[[Any], Any], prepare: Callable[[], Any], device: str, repeats: int = 50) -> float:
    """Median milliseconds until `run` returns, with an idle device before it; it need not have finished by then."""
    times = []
    for _ in range(repeats):
        prepared = prepare()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = run(prepared)
        times.append((time.perf_counter() - start) * 1e3)
        del result
    return statistics.median(times)


def _ablation_entries(graphs: Callable[[], Graphs], H: int, B: int, device: str) -> Iterator[Entry]:
    """Each option alone, and all together, against none."""
    for chosen in [(option,) for option in ABLATION] + [ABLATION]:
        switches = {option: option in chosen for option in ABLATION}
        case = _case("treelstm", device, H, B, **{option: "on" if on else "off" for option, on in switches.items()})

        def run(results: Results, case: str = case, switches: dict[str, bool] = switches) -> list[dict[str, str]]:
            step = Step("treelstm", graphs(), H, device)

            def with_options(options: dict[str, bool]) -> Candidate:
                def timed(_: Any) -> Any:
                    with weft.vertex.options(**options):
                        return step.weft()

                return Candidate(timed)

            none = dict.fromkeys(ABLATION, False)
            times = measure({"weft": with_options(switches), "none": with_options(none)}, device)
            return [results.put(case, "forward_backward", "ms", times["weft"], "none", times["none"])]

        yield Entry(case, ("forward_backward", "none"), run)


def _case(name: str, device: str, H: int, B: int, dtype: str = "fp32", executor: str = "batched", **keys: Any) -> str:
    if device == "cpu":
        keys["threads"] = torch.get_num_threads()
    return case_name(model=name, device=device, dtype=dtype, H=H, B=B, executor=executor, **keys)


def _fresh(graphs: Graphs, device: str) -> Callable[[], Graphs]:
    """The same graphs as nobody has seen them, put together and sent to the device as a batch of a data set is."""
    parts = [*graphs.to("cpu")]
    return lambda: Graphs.batch(parts).to(device)


def _net_entry(
    name: str,
    data: Callable[[], nets.Data],
    B: int,
    device: str,
    *,
    loops: bool = False,
    H: int | None = None,
) -> Entry:
    """A net's steps in a row by the persistent executor and by the Trainer, beside the same net batched.

    With `loops`, of the binary Tree-LSTM, level loops with the same optimizer stand beside the Trainer, too.
    """
    cases = {
        executor: _case(name, device, H or nets.hidden_of(name), B, "fp32", executor)
        for executor in ("persistent", "trainer", "auto")
    }

    def in_a_row(step: Callable[[], Any]) -> Candidate:
        return Candidate(lambda _: [step() for _ in range(STEPS)][-1])

    def run(results: Results) -> list[dict[str, str]]:
        training = functools.partial(nets.Training, name, data(), B, device, H)
        first = training()
        runs = {executor: first.runs_as(executor) == executor for executor in ("persistent", "trainer")}
        if not any(runs.values()):
            print(f"neither the persistent executor nor the Trainer's kernel runs {name} here", flush=True)
            return []
        rows: list[dict[str, str]] = []
        want = first.losses(first.by("batched"))
        steps: dict[str, Callable[[], Any]] = {}
        for executor, there in runs.items():
            if there:
                one = training()
                step = one.trainer() if executor == "trainer" else one.by(executor)
                errors = {"losses": relative_error(one.losses(step), want)}
                check_agreement(cases[executor], errors, 1e-4)
                steps[executor] = training().trainer() if executor == "trainer" else training().by(executor)
        if runs["persistent"]:
            gradients = {e: training().gradients_by(e) for e in ("persistent", "batched", "auto")}
            times = measure({e: in_a_row(g) for e, g in gradients.items()}, device)
            own, other, auto = (times[e] / STEPS for e in ("persistent", "batched", "auto"))
            rows.append(results.put(cases["persistent"], "forward_backward", "ms", own, "batched", other))
            rows.append(results.put(cases["auto"], "forward_backward", "ms", auto, "best", min(own, other)))
        if runs["trainer"]:
            steps["batched"] = training().by("batched")
            if loops:
                steps["reference"] = training().by("reference")
                eager, repeated = training(), training()
                steps["eager"] = lambda: eager.step(lambda graphs: LevelLoop(eager.cell, graphs.to("cpu"), device))
                batch = repeated.batch()
                loop = LevelLoop(repeated.cell, batch[0].to("cpu"), device)
                steps["captured"] = captured(lambda: repeated.captured_step(loop, *batch))
            times = measure({who: in_a_row(step) for who, step in steps.items()}, device)
            times = {who: time / STEPS for who, time in times.items()}
            times["device_busy"] = device_busy(lambda: [steps["trainer"]() for _ in range(STEPS)]) / STEPS
            rows += [
                results.put(cases["trainer"], "step", "ms", times["trainer"], peer, time)
                for peer, time in times.items()
                if peer != "trainer"
            ]
        return rows

    return Entry(f"{cases['trainer']} {cases['persistent']}", ("forward_backward", "step"), run)


def _level_entry(H: int, device: str) -> Entry:
    """Microseconds of a level of one vertex, from chains of 16 and of 64, in CUDA graphs; beside "batched"."""
    case = _case("treelstm", device, H, 1, "fp32", "persistent", data="chains")

    def run(results: Results) -> list[dict[str, str]]:
        times: dict[tuple[str, bool, int], float] = {}
        for executor in ("persistent", "batched"):
            for length in (16, 64):
                step = Step("treelstm", Graphs.chain([length]), H, device, executor)
                if not step.runs():
                    return []
                for back in (False, True):
                    once = Step("treelstm", Graphs.chain([length]), H, device, executor)
                    replay = captured(once.weft if back else once.forward)
                    candidate = Candidate(lambda _, replay=replay: replay())
                    times[executor, back, length] = measure({"weft": candidate}, device)["weft"]
        rows = []
        for metric, back in (("level_forward", False), ("level_backward", True)):

            def level(executor: str, back: bool = back) -> float:
                forward, both = ((times[executor, b, 64] - times[executor, b, 16]) / 48 for b in (False, True))
                return 1e3 * (both - forward if back else forward)

            rows.append(results.put(case, metric, "us", level("persistent"), "batched", level("batched")))
        return rows

    return Entry(case, ("level_forward", "level_backward"), run)


def _recurrent_entry(name: str, H: int, dtype: torch.dtype, device: str, B: int = 16, T: int = 1024) -> Entry:
    """A recurrent cell over chains: LSTM beside weft.nn.LSTM, a cell of the user's own beside its captured loop."""
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    case = _case(name, device, H, B, short, "persistent", T=T)
    peer = "weft.nn" if name == "chainlstm" else "captured"

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        cell = (models.ChainLSTM if name == "chainlstm" else nets.OwnCell)(H, H).to(device, dtype)
        graphs = Graphs.chain([T] * B).to(device)
        x = torch.randn(B * T, H, device=device, dtype=dtype).requires_grad_()
        found = weft.explain(cell, graphs, x, executor="persistent")
        if found.executor != "persistent":
            print(f"persistent does not run here: {found.reason}", flush=True)
            return []
        grad = torch.randn(B * T, H, device=device, dtype=dtype)
        leaves = [x, *cell.parameters()]

        def mine() -> tuple[Tensor, ...]:
            y = cell(graphs, x, executor="persistent")
            return y.detach(), *torch.autograd.grad(y, leaves, grad)

        if name == "chainlstm":
            layer = weft.nn.LSTM(H, H, batch_first=True, device=device, dtype=dtype)
            with torch.no_grad():
                layer.weight_ih_l0.copy_(cell.W.weight)
                layer.weight_hh_l0.copy_(cell.U.weight)
                layer.bias_ih_l0.copy_(cell.W.bias)
                layer.bias_hh_l0.zero_()
            z = x.detach().view(B, T, H).requires_grad_()
            weights = [z, layer.weight_ih_l0, layer.bias_ih_l0, layer.weight_hh_l0]

            def theirs() -> tuple[Tensor, ...]:
                y, _ = layer(z)
                return y.detach().reshape(B * T, H), *torch.autograd.grad(y, weights, grad.view(B, T, H))

        else:
            own = nets.OwnCell(H, H).to(device, dtype)
            own.load_state_dict(cell.state_dict())
            z = x.detach().clone().requires_grad_()
            weights = [z, *own.parameters()]

            def loop() -> tuple[Tensor, ...]:
                wx = own.W(z).view(B, T, -1).transpose(0, 1)
                h, states = z.new_zeros(B, H), []
                for t in range(T):
                    h = own.step(wx[t], h)
                    states.append(h)
                y = torch.stack(states, 1).view(B * T, H)
                return y.detach(), *torch.autograd.grad(y, weights, grad)

            theirs = captured(loop)
        bound = 1e-3 if dtype == torch.float32 else 0.1
        pairs = zip(("output", "grad_input"), mine(), theirs(), strict=False)
        check_agreement(case, {what: relative_error(a, b.reshape(a.shape)) for what, a, b in pairs}, bound)
        times = measure({"weft": Candidate(lambda _: mine()), peer: Candidate(lambda _: theirs())}, device)
        return [results.put(case, "forward_backward", "ms", times["weft"], peer, times[peer])]

    return Entry(case, ("forward_backward",), run)


def persistent_table(
    trees: Sequence[weft.data.Tree] | None, sentences: Sequence[weft.data.Sentence] | None, device: str = "cuda"
) -> Iterator[Entry]:
    """Entries of the persistent executor and of the Trainer. Those that do not run here write no row."""
    if trees:

        def graphs(B: int) -> Callable[[], Graphs]:
            return lambda: Graphs.from_children([tree.children for tree in sample(trees, B)])

        for B in (1, 25, 64, 256):
            yield _loop_entry("treelstm", graphs(B), 256, B, device, executor="persistent")
        yield _loop_entry("treelstm", graphs(256), 256, 256, device, executor="persistent", autocast=True)
        for H in (512, 1024):
            yield _loop_entry("treelstm", graphs(64), H, 64, device, executor="persistent")

    @functools.cache
    def data(name: str) -> nets.Data:
        return nets.data_of(name, trees or [], sentences or [])

    yield _level_entry(256, device)
    if trees:
        for B in (1, 25, 64, 256):
            yield _net_entry("treelstm", functools.partial(data, "treelstm"), B, device, loops=True)
    for name in nets.NETS:
        if trees if not name.startswith("bilstm") else sentences:
            for B in (1, 2, 4, 8, 16, 32, 64, 128):
                if (name, B) != ("treelstm", 1) and (name, B) != ("treelstm", 64):  # which stand above
                    yield _net_entry(name, functools.partial(data, name), B, device)
    for name in ("chainlstm", "own"):
        for H in (256, 512):
            for dtype in (torch.float32, torch.bfloat16):
                yield _recurrent_entry(name, H, dtype, device)


def table(
    device: str,
    trees: Sequence[weft.data.Tree] | None,
    sentences: Sequence[weft.data.Sentence] | None = None,
) -> Iterator[Entry]:
    """Every entry of the table that runs on this device and with these trees and sentences."""

    def treebank_graphs(B: int) -> Callable[[], Graphs]:
        return lambda: Graphs.from_children([tree.children for tree in sample(trees or [], B)])

    if device == "cpu":
        if trees:
            for B in (1, 64):
                yield _loop_entry("treelstm", treebank_graphs(B), 128, B, device)
            yield _schedule_entry(trees, 128, 64, device)
            for name in ("treelstm", "typed"):
                yield _training_entry(name, trees, 128, 25, device)
        return
    if trees:
        for B in (1, 25, 64, 256):
            yield _loop_entry("treelstm", treebank_graphs(B), 256, B, device)
        yield _loop_entry("childsum", treebank_graphs(256), 256, 256, device)
    yield _loop_entry("treefc", lambda: complete_trees(256, 64), 512, 64, device, peers=("eager", "captured", "floor"))
    if trees:
        words = [sum(symbol is not None for symbol in tree.symbols) for tree in sample(trees, 64)]
        yield _chain_entry("packed", lambda: words, 512, 64, device)
    yield _chain_entry("dense", lambda: [64] * 64, 512, 64, device, T=64)
    if trees:
        yield _schedule_entry(trees, 256, 256, device)
        for name in ("treelstm", "typed", "childsum", "treefc"):
            for B in (1, 25, 256):
                yield _training_entry(name, trees, 256, B, device)
        yield from _ablation_entries(treebank_graphs(256), 256, 256, device)
        yield _loop_entry("treelstm", treebank_graphs(256), 256, 256, device, autocast=True)
        yield _loop_entry("treelstm", treebank_graphs(256), 1024, 256, device, peers=("eager", "captured", "floor"))
        yield _loop_entry("treelstm", treebank_graphs(2048), 256, 2048, device, peers=("eager", "floor"))
        yield _loop_entry("treelstm", treebank_graphs(256), 256, 256, device, memory=True)

    def shared() -> Graphs:
        return Graphs.from_children([shared_subtrees(tree) for tree in sample(weft.data.python_asts(), 256)])

    yield _loop_entry("childsum", shared, 256, 256, device, data="shared_asts")
    yield from persistent_table(trees, sentences, device)


def main(arguments: list[str] | None = None) -> None:
    parser = table_parser("vertex", __doc__, filters="substring of case, metric or peer")
    parser.add_argument("--sst", type=Path, help="folder with the treebank's train.txt")
    parser.add_argument("--wikiner", type=Path, help="folder with WikiNER's dev.txt")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    devices = begin_table(options)
    trees = treebank(options.sst)
    if trees is None:
        print("the Stanford Sentiment Treebank is not here: its rows are left out (--sst)", flush=True)
    sentences = nets.sentences(options.wikiner)
    if sentences is None:
        print("WikiNER is not here: its rows are left out (--wikiner)", flush=True)
    results = Results(options.output or RESULTS / "vertex.csv")
    failures: list[str] = []
    for device in devices:
        torch.set_num_threads(CPU_THREADS if device == "cpu" else threads)
        entries = [entry for entry in table(device, trees, sentences) if entry.matches(options.filter)]
        failures += run_entries(entries, results, minutes=options.minutes)
    exit_with(failures)


if __name__ == "__main__":
    main()
