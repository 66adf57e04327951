"""A model of weft.vertex.models on a batch of trees: its step by Weft, and the same as a loop over levels in torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import weft
from torch import Tensor, nn
from weft import Graphs
from weft.vertex import models

from benchmarks.common import (
    ROOT,
    Candidate,
    Entry,
    Results,
    captured,
    case_name,
    check_agreement,
    measure,
    peak_memory,
    relative_error,
    show,
)

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


def case_of(name: str, device: str, H: int, B: int, dtype: str = "fp32", executor: str = "batched", **keys: Any) -> str:
    if device == "cpu":
        keys["threads"] = torch.get_num_threads()
    return case_name(model=name, device=device, dtype=dtype, H=H, B=B, executor=executor, **keys)


def fresh_graphs(graphs: Graphs, device: str) -> Callable[[], Graphs]:
    """The same graphs as nobody has seen them, put together and sent to the device as a batch of a data set is."""
    parts = [*graphs.to("cpu")]
    return lambda: Graphs.batch(parts).to(device)


def loop_entry(
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
    case = case_of(name, device, H, B, "bf16" if autocast else "fp32", executor, **keys)

    def run(results: Results) -> list[dict[str, str]]:
        batch = graphs()
        step = Step(name, batch, H, device, executor, autocast)
        if not step.runs():
            return []
        fresh = fresh_graphs(graphs(), device) if executor == "persistent" else lambda: None
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
