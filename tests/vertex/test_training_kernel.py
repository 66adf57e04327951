"""The kernel of whole training steps on a processor, in the worst order of blocks, beside torch's loop."""

from __future__ import annotations

import copy
import ctypes
import random
from pathlib import Path

import pytest
import torch
import weft
from torch import nn
from torch.nn import functional as F
from weft import _C
from weft._vertex.calls import prepare, whole
from weft._vertex.runtime import training
from weft._vertex.runtime.batched import made_before
from weft.vertex import models

from benchmarks import nets
from tests import emulated
from tests.common import relative_error
from tests.vertex.cells import Gates, Messages, Twice, shared_layer, typed
from tests.vertex.naive import random_dag
from tests.vertex.test_persistent import TRAINING, core_of, trees
from tests.vertex.test_source import ARRAYS, BufferArgument, MatrixArgument, PersistentArguments

_C = _C.vertex

pytestmark = emulated.MARKS

BLOCKS = 3
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}


class UpdateArgument(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parameter", "first", "second", "partial")),
        ("numbers", ctypes.c_float * 8),
        ("kind", ctypes.c_int),
    ]


class TrainingArguments(ctypes.Structure):
    _fields_ = [
        ("targets", ctypes.c_void_p),
        ("roots", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("ignore_index", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "losses", "gradients", "refused", "result")),
    ]


def missing(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32).view(torch.float32)


class Steps:
    """Training steps of a cell, and of a head where there is one, by the kernel; those of its optimizer go beside."""

    def __init__(
        self,
        cell,
        head,
        optimizer,
        loss: str,
        graphs: weft.Graphs,
        x: torch.Tensor,
        folder: Path,
        groups: int = 1,
        optimise: bool = False,
        warpgroups: bool = False,
    ):
        self.cell, self.head, self.loss, self.groups = cell, head, loss, groups
        self.optimizer = optimizer
        call = prepare(cell, graphs, x, "batched")
        self.compiled, _ = whole(call.ready)
        self.program, self.given = self.compiled.program, self.compiled.plan.given
        self.classes = call.ready.outputs[0].shape[0] if head is None else head.out_features
        assert not any(part.after for part in self.compiled.plan.parts)
        self.matrices = [self._parameter(*m) for m in self.given.matrices]
        self.vectors = [self._parameter(*v) for v in self.given.vectors]
        self.form = len(self.matrices), len(self.vectors), loss == "cross_entropy", head is not None, self.classes
        assert _C.training_obstacle(self.program, BLOCKS, 1 << 18, *self.form) == ""
        defines, self.shared_bytes, self.blocks = _C.persistent_source(
            self.program, TRAINING, BLOCKS, False, *self.form, warpgroups=warpgroups
        )
        assert self.shared_bytes <= 1 << 18
        (folder / "steps.h").write_text("".join(f"#define {d.replace('=', ' ', 1)}\n" for d in defines))
        self.kernel = emulated.build("vertex_persistent", folder, optimise)

    def _parameter(self, function: int, symbol: int) -> nn.Parameter:
        name = self.compiled.functions[function].trace.program.symbols[symbol].name
        return dict(self.cell.named_parameters(remove_duplicate=False))[name]

    def step(self, graphs: weft.Graphs, x: torch.Tensor, targets: torch.Tensor, at: str, seed: int) -> torch.Tensor:
        """The loss and whether the step was refused."""
        core = core_of(self.cell, self.compiled, graphs, self.groups)
        block = _C.scripted(core, self.program, BLOCKS, True, False)
        assert _C.script_fault(self.program, block) == ""
        published = _C.script_published(self.program, block, TRAINING)
        n, leaves = graphs.num_vertices, graphs.num_vertices - core.num_inner
        counts = {"inner": core.num_inner, "edges": core.num_edges, "vector": 1}
        # Some slot of a vertex with children has none.
        gaps = core.num_uses < core.layout()["slots"][1] * core.num_inner
        one = len(self.compiled.functions) == 1
        buffers, shared = self.compiled.plan.frontiers.buffers, {}
        inputs = made_before(self.compiled, n, {"input": x})
        arguments = (BufferArgument * len(buffers))()
        held = []
        for i, b in enumerate(buffers):
            shape = counts.get(b.space, n), b.width
            if b.space == "input":
                t = inputs[b.index]
            elif b.space == "vector":
                t = self.vectors[b.index].detach().view(1, -1)
            else:
                zeros = b.zeros or not one or (b.scattered and b.space != "edges" and (b.space != "inner" or gaps))
                if b.space == "output_grad":
                    zeros = at == "roots"
                elif i in published:
                    zeros = False
                t = torch.zeros(shape) if zeros else missing(*shape)
                if b.space in ("output", "output_grad"):  # functions share them
                    t = shared.setdefault((b.space, b.index), t)
            held.append(t)
            before = leaves * b.width * 4 if b.space == "inner" else 0
            arguments[i] = BufferArgument(t.data_ptr() - before, 0 if b.space == "vector" else t.stride(0))
        matrices = (MatrixArgument * max(1, len(self.matrices)))()
        for i, m in enumerate(self.matrices):
            matrices[i] = MatrixArgument(m.data_ptr(), *m.stride())
        heads = [] if self.head is None else [self.head.weight, self.head.bias]
        order = [*(self.matrices or [None]), *self.vectors, *(heads or [None, None])]
        changes, numbers_of, begun = training.Updates(self.optimizer).begin({id(p) for p in order})
        updates = (UpdateArgument * len(order))()
        for u in changes:
            # What is not asked for is nobody's.
            pointers = [None if t is None else t.data_ptr() for t in (u.parameter, u.first, u.second)]
            held.append(missing(u.parameter.numel()))
            number = next(i for i, p in enumerate(order) if p is u.parameter)
            numbers = (ctypes.c_float * 8)(*numbers_of[u.numbers])
            updates[number] = UpdateArgument(*pointers, held[-1].data_ptr(), numbers, 1 if u.kind == "sgd" else 2)
        roots = graphs.roots if at == "roots" else None
        rows = n if roots is None else len(roots)
        losses, gradients, refused, result = missing(rows), missing(rows, self.classes), torch.zeros(1), missing(2)
        of_training = TrainingArguments(
            targets.data_ptr(), None if roots is None else roots.data_ptr(), rows, -100,
            *(p.data_ptr() for p in heads or [torch.empty(0)] * 2), losses.data_ptr(), gradients.data_ptr(),
            refused.data_ptr(), result.data_ptr(),
        )  # fmt: skip
        of_kernel = PersistentArguments()
        layout = core.layout()
        for key in ARRAYS:
            setattr(of_kernel.frontier, key, block.data_ptr() + 4 * layout[key][0])
        of_kernel.frontier.num_vertices = n
        groups, arrived = of_kernel.drive(block, TRAINING)
        held.append(arrived)
        self.kernel.run(
            ctypes.byref(of_kernel), arguments, matrices, ctypes.byref(of_training), updates, self.blocks * groups,
            ctypes.c_long(self.shared_bytes), seed,
        )  # fmt: skip
        assert refused.item() == result[1].item()
        if refused:
            training.Updates(self.optimizer).undo(begun)
        return result


def binary(rng: random.Random, cell) -> weft.Graphs:
    return typed(trees(rng, rng.randint(1, 4)), cell)


def any_graphs(rng: random.Random, cell) -> weft.Graphs:
    """With missing children, and children of several parents."""
    graphs = [random_dag(rng, rng.randint(1, 9), 2) for _ in range(rng.randint(1, 3))]
    return typed(weft.Graphs.from_children(graphs), cell)


def tagger_of_characters() -> weft.VertexFunctions:
    """Rare words come of two chains of characters, which read the first half of a row."""
    net = models.BiLSTMTagger(8, 8, 5, 6)
    rare = {f"rare {end}": nets.RareWord(net[end], 4) for end in ("fw", "bw")}
    characters = {f"characters {end}": nets.Characters(4, 16) for end in ("fw", "bw")}
    return weft.VertexFunctions({**net, **rare, **characters})


def sentences(rng: random.Random, cell) -> weft.Graphs:
    """Of words that are known if they begin with an a."""
    lengths = 1, 3, rng.randint(2, 5)
    found = [weft.data.Sentence(rng.choices(["a", "aa", "bcd", "cd"], k=n), ["X"] * n) for n in lengths]
    numbers = {word: 2 for s in found for word in s.words if "rare fw" not in cell or word.startswith("a")}
    return weft.Graphs.batch([s.graph for s in nets.samples(found, numbers)])


def check(
    cell, make, optimizer, loss, classes, at, folder, steps, x_width, groups=1, long=False, warpgroups=False
):  # fmt: skip
    """Steps of the kernel on graphs that differ beside those of the loop. `long`: worth being optimised."""
    torch.manual_seed(1)
    rng = random.Random(4)
    head = None if classes is None else nn.Linear(8, classes)
    twin, twin_head = copy.deepcopy(cell), copy.deepcopy(head)
    both = [[*c.parameters(), *(h.parameters() if h else ())] for c, h in ((cell, head), (twin, twin_head))]
    mine, theirs = OPTIMIZERS[optimizer](both[0]), OPTIMIZERS[optimizer](both[1])
    kernel = None
    for step in range(steps):
        graphs = make(rng, cell)
        x = torch.randn(graphs.num_vertices, x_width)
        y = twin(graphs, x, executor="batched")  # which gives zeros, not None, where a batch has no edges
        y = y if twin_head is None else twin_head(y)
        y = y[graphs.roots] if at == "roots" else y
        if loss == "mse":
            targets = torch.randn_like(y)
            want = F.mse_loss(y, targets)
        else:
            targets = torch.randint(0, y.shape[1], (len(y),))
            if len(y) > 1:
                targets[0] = -100
            want = F.cross_entropy(y, targets)
        theirs.zero_grad()
        want.backward()
        theirs.step()
        if kernel is None:
            kernel = Steps(cell, head, mine, loss, graphs, x, folder, groups, long, warpgroups)
        found = kernel.step(graphs, x, targets, at, step)
        assert found[1] == 0
        torch.testing.assert_close(found[0], want.detach(), rtol=1e-5, atol=1e-6)
        for p, q in zip(*both, strict=True):
            assert relative_error(p.detach(), q.detach()) < 1e-5
            assert mine.state.get(p, {}).keys() == theirs.state.get(q, {}).keys()
            for key, held in theirs.state.get(q, {}).items():
                # Gradients of a step and of its twin differ as sums in another order do.
                assert held is None or relative_error(mine.state[p][key], held) < 1e-5, key


@pytest.mark.parametrize(
    ("name", "optimizer", "loss", "classes", "at", "groups"),
    [
        ("treelstm", "sgd", "cross_entropy", 5, "vertices", 2),
        ("treelstm", "adamw", "cross_entropy", 5, "roots", 1),
        ("many", "sgd", "cross_entropy", 5, "vertices", 1),
        ("childsum", "adam", "mse", None, "vertices", 3),
        ("rvnn", "sgd", "cross_entropy", 5, "vertices", 1),
        ("twice", "adamw", "mse", None, "roots", 1),
        ("messages", "sgd", "cross_entropy", 3, "vertices", 2),
        ("shared", "adam", "cross_entropy", None, "vertices", 2),
        ("odd", "adamw", "mse", None, "vertices", 1),
        ("tagger", "sgd", "cross_entropy", None, "vertices", 2),
        ("characters", "adam", "cross_entropy", None, "vertices", 1),
    ],
)
def test_steps_are_those_of_the_loop(name, optimizer, loss, classes, at, groups, tmp_path):
    torch.manual_seed(7)
    cell, make, width = {
        "treelstm": lambda: (models.TreeLSTM(4, 8), binary, 4),
        "many": lambda: (models.TreeLSTM(4, 8), lambda rng, _: trees(rng, 60), 4),
        "childsum": lambda: (models.ChildSumTreeLSTM(4, 8), any_graphs, 4),
        "rvnn": lambda: (models.RvNN(4, 8), binary, 4),
        "twice": lambda: (Twice(4, 8), any_graphs, 4),
        "messages": lambda: (Messages(6, 8), any_graphs, 6),
        "shared": lambda: (shared_layer(8, 8), any_graphs, 8),
        "odd": lambda: (Gates(3, 7), any_graphs, 3),
        "tagger": lambda: (models.BiLSTMTagger(4, 8, 5, 6), sentences, 4),
        "characters": lambda: (tagger_of_characters(), sentences, 8),
    }[name]()
    check(cell, make, optimizer, loss, classes, at, tmp_path, steps=3, x_width=width, groups=groups)


@pytest.mark.parametrize(
    ("name", "optimizer", "loss", "classes", "groups"),
    [
        ("many", "sgd", "cross_entropy", 5, 2),
        ("messages", "adam", "cross_entropy", 3, 1),
        ("odd", "adamw", "mse", None, 1),
        ("wide", "sgd", "mse", None, 1),
    ],
)
def test_gradients_by_warpgroups(name, optimizer, loss, classes, groups, tmp_path):
    """Of few rows, so that some have none, and of many; of one tile, part of one, and several."""
    torch.manual_seed(7)
    cell, make, width = {
        "many": lambda: (models.TreeLSTM(4, 8), lambda rng, _: trees(rng, 60), 4),
        "messages": lambda: (Messages(6, 8), any_graphs, 6),
        "odd": lambda: (Gates(3, 7), any_graphs, 3),
        "wide": lambda: (models.TreeLSTM(20, 40), binary, 20),
    }[name]()
    check(cell, make, optimizer, loss, classes, "vertices", tmp_path, 2, width, groups, warpgroups=True)


@pytest.mark.parametrize("warpgroups", [False, True])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("weft::copy_wait<kStages - 2>();", "weft::copy_wait<kStages - 1>();"),
        ("ask(chunk + kStages - 1);", "ask(chunk + kStages);"),  # in whose place others still read
    ],
    ids=["waits for too few copies", "copies over what is read"],
)
def test_flawed_pipelines_are_found(right, wrong, warpgroups, tmp_path):
    way = "warpgroups" if warpgroups else "warps"
    emulated.with_flaw(f"vertex/exec/cuda/outer_by_{way}.jit.cuh", right, wrong, tmp_path)

    def run() -> None:
        # So many that the memory of all chunks is taken again.
        cell, count = models.TreeLSTM(4, 8), 240 if warpgroups else 60
        check(
            cell, lambda rng, _: trees(rng, count), "sgd", "mse", None, "vertices", tmp_path, 1, 4,
            warpgroups=warpgroups,
        )  # fmt: skip

    assert not emulated.ends_well(run)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("term > 0 || chunk % kInside > 0", "term > 0"),
        ("weft::warpgroup_wait(d);", "if (chunk + 1 == chunks) weft::warpgroup_wait(d);"),
        ("x[i / 2 * 2][i % 2]", "x[i / 2][i % 2]"),
    ],
    ids=["forgets sums", "overwrites factors", "other rows"],
)
def test_flawed_warpgroups_are_found(right, wrong, tmp_path):
    emulated.with_flaw("vertex/exec/cuda/outer_by_warpgroups.jit.cuh", right, wrong, tmp_path)

    def run() -> None:
        cell = models.TreeLSTM(4, 8)
        check(
            cell, lambda rng, _: trees(rng, 60), "sgd", "mse", None, "vertices", tmp_path, 1, 4, warpgroups=True
        )  # fmt: skip

    assert not emulated.ends_well(run)


def test_weights_take_each_others_place(tmp_path):
    """Those of the linear layer, of the frontiers forward and backward, where there is no room for all."""
    torch.manual_seed(7)
    cell = models.TreeLSTM(96, 96)
    graphs = trees(random.Random(4), 1)
    compiled, _ = whole(prepare(cell, graphs, torch.randn(graphs.num_vertices, 96), "batched").ready)
    defines, _, _ = _C.persistent_source(compiled.program, TRAINING, BLOCKS, False, 2, 1, False, False, 96)
    of = {d.split("=", 1)[0]: d.split("=", 1)[1].count("::load(") for d in defines}
    assert (of["WEFT_VERTEX_WEIGHTS"], of["WEFT_VERTEX_TURN"]) == (1, 2)
    # So many trees that a thread has several columns.
    make = lambda rng, _: trees(rng, 28)  # noqa: E731
    check(cell, make, "sgd", "mse", None, "vertices", tmp_path, steps=2, x_width=96, groups=2, long=True)


def test_a_part_whose_weights_have_no_room_is_refused():
    torch.manual_seed(7)
    cell, graphs = models.TreeLSTM(96, 96), trees(random.Random(4), 1)
    compiled, _ = whole(prepare(cell, graphs, torch.randn(graphs.num_vertices, 96), "batched").ready)
    form = 2, 1, False, False, 96
    _, least, _ = _C.persistent_source(compiled.program, TRAINING, BLOCKS, False, *form, shared_limit=0)
    assert _C.training_obstacle(compiled.program, BLOCKS, least, *form) == ""
    why = _C.training_obstacle(compiled.program, BLOCKS, least - 1, *form)
    assert "the weights of the training step" in why


def test_blocks_without_columns_of_a_narrow_kernel_leave_its_rows_alone(tmp_path):
    """Of four columns two blocks have two each, the third has none; of so many rows a thread has both of a row."""
    torch.manual_seed(7)
    cell = models.BiLSTMTagger(4, 12, 5, 4)
    check(cell, lambda _, c: c.graphs([2] * 140), "sgd", "cross_entropy", None, "vertices", tmp_path, 2, x_width=4)


def test_a_refused_step_changes_nothing(tmp_path):
    torch.manual_seed(1)
    cell, head = models.TreeLSTM(4, 8), nn.Linear(8, 5)
    parameters = [*cell.parameters(), *head.parameters()]
    graphs = trees(random.Random(4), 3)
    x, targets = torch.randn(graphs.num_vertices, 4), torch.randint(0, 5, (graphs.num_vertices,))
    targets[1] = 5
    optimizer = OPTIMIZERS["adam"](parameters)
    kernel = Steps(cell, head, optimizer, "cross_entropy", graphs, x, tmp_path)
    before = [p.detach().clone() for p in parameters]
    assert kernel.step(graphs, x, targets, "vertices", 1)[1] == 1
    assert all(map(torch.equal, parameters, before))
    assert not optimizer.state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["treelstm", "messages", "rvnn"])
def test_many_graphs(name, tmp_path):
    """Twenty steps of one kernel, each in an order of blocks of its own."""
    torch.manual_seed(7)
    cell, width = {
        "treelstm": lambda: (models.TreeLSTM(4, 8), 4),
        "messages": lambda: (Messages(6, 8), 6),
        "rvnn": lambda: (models.RvNN(4, 8), 4),
    }[name]()
    check(cell, any_graphs, "sgd", "cross_entropy", 3, "vertices", tmp_path, steps=20, x_width=width, long=True)


@pytest.mark.parametrize(
    "make", [lambda ps: torch.optim.Adam(ps, 0.1), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)]
)
def test_a_loaded_state_is_what_the_next_step_updates(make):
    parameters = [torch.randn(3, requires_grad=True)]
    optimizer, reached = make(parameters), frozenset(map(id, parameters))
    updates = training.Updates(optimizer)
    for _ in range(2):
        updates.begin(reached)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        for x in entry.values():
            x.add_(4)
    optimizer.load_state_dict(saved)
    (update,), _, _ = updates.begin(reached)
    state = optimizer.state[parameters[0]]
    assert update.first is state["exp_avg" if "exp_avg" in state else "momentum_buffer"]
    if "step" in state:
        assert state["step"] == 7


def test_counters_of_other_kinds_are_the_loops():
    parameters = [torch.randn(3, requires_grad=True)]
    optimizer = torch.optim.Adam(parameters)
    optimizer.state[parameters[0]] = {
        "step": torch.tensor(1), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)
    }  # fmt: skip
    assert "counter of steps" in training.Updates(optimizer).obstacle()
