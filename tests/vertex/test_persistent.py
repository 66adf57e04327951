"""Scripts, and the persistent kernels that they drive: on a processor, in the worst order of blocks, and on CUDA."""

from __future__ import annotations

import copy
import random
import shutil
import types

import pytest
import torch
import weft
from torch import nn
from weft import _C
from weft._vertex import calls
from weft._vertex.calls import prepare
from weft._vertex.runtime import persistent
from weft._vertex.runtime.schedule import Kind, planned
from weft.vertex import models

from tests.common import relative_error
from tests.vertex.cells import Aside, GatedChain, Messages, Narrow, Twice, typed
from tests.vertex.naive import random_dag, random_tree
from tests.vertex.test_source import MODELS, check_written_kernels

_C = _C.vertex
FORWARD, BACKWARD, TRAINING = range(3)


def core_of(cell, compiled, graphs, groups: int = 1):
    """The schedule of graphs for what was compiled."""
    kinds = tuple(Kind(f.trace.slots_gathered, f.trace.takes_all_children) for f in compiled.functions)
    return planned(graphs, kinds, cell._functions()[1] if len(kinds) > 1 else None, groups).core


def compiled_of(cell, graphs, x):
    compiled = prepare(cell, graphs, x, "batched").compiled
    return compiled, core_of(cell, compiled, graphs)


def script_of(cell, graphs, x, blocks: int, training: bool = False):
    compiled, core = compiled_of(cell, graphs, x)
    return compiled.program, _C.scripted(core, compiled.program, blocks, training, False)


def trees(rng: random.Random, count: int) -> weft.Graphs:
    """In which every vertex has two children or none."""

    def tree(leaves: int) -> list:
        children: list[list[int]] = [[] for _ in range(leaves)]
        free = list(range(leaves))
        while len(free) > 1:
            i = rng.randrange(len(free) - 1)
            children.append([free[i], free[i + 1]])
            free[i : i + 2] = [len(children) - 1]
        return children

    return weft.Graphs.from_children([tree(rng.randint(1, 9)) for _ in range(count)])


SCRIPTED = {
    **MODELS,
    "twice": lambda: Twice(3, 4),
    "messages": lambda: Messages(3, 4),
}


class TestScripts:
    def test_a_frontier_of_a_tree_is_one_product_with_its_kernel_each_way(self):
        graphs = weft.Graphs.from_children([[[], [], [0, 1]]])
        x = torch.randn(3, 8, requires_grad=True)
        program, block = script_of(models.TreeLSTM(8, 16), graphs, x, 4)
        assert _C.script_fault(program, block) == ""
        lines = _C.script_text(program, block).splitlines()
        assert lines[0].startswith("kernel") and lines[0].endswith("of leaves, rows 0 to 1")
        assert lines[1].startswith("product") and "; kernel" in lines[1]
        assert lines.count("end") == 2
        assert not any(line.startswith(("signal", "wait")) for line in lines)
        instructions, waits = _C.script_counts(program, block)
        assert instructions == len(lines)
        assert waits == 2  # for h, and for the gradients of the gates

    def test_slots_without_a_child_are_zero_before_anything_waits_for_them(self):
        graphs = weft.Graphs.from_children([[[], [0], [1]]])
        program, block = script_of(models.TreeLSTM(8, 16), graphs, torch.randn(3, 8), 4)
        lines = _C.script_text(program, block).splitlines()
        assert lines[0].startswith("blank of kernel") and lines[0].endswith("rows 1 to 2")
        assert not any(line.startswith(("signal", "wait")) for line in lines)
        assert _C.script_fault(program, block) == ""

    def test_groups_have_scripts_of_their_own(self):
        graphs = weft.Graphs.from_children([[[], [], [0, 1]], [[]], [[], [], [0, 1], [], [2, 3]]])
        cell, x = models.TreeLSTM(8, 16), torch.randn(9, 8, requires_grad=True)
        compiled, _ = compiled_of(cell, graphs, x)
        core = core_of(cell, compiled, graphs, groups=2)
        for training in (False, True):
            block = _C.scripted(core, compiled.program, 4, training, False)
            assert _C.script_fault(compiled.program, block) == ""
            text = _C.script_text(compiled.program, block)
            assert text.count("group 0\n") == text.count("group 1\n") == (1 if training else 2)
            assert ("wait for all" in text) is training

    @pytest.mark.parametrize("name", SCRIPTED)
    def test_random_graphs_have_scripts_without_a_fault(self, name):
        """10,000 graphs of all cells together, in both passes and as training steps: no wait is without a signal."""
        rng = random.Random(3)
        cell = SCRIPTED[name]().float()
        compiled, count = None, 1_250
        while count > 0:
            graphs = [
                random_tree(rng, rng.randint(1, 9)) if rng.random() < 0.5 else random_dag(rng, rng.randint(1, 12), 2)
                for _ in range(rng.randint(1, 6))
            ]
            count -= len(graphs)
            graphs = typed(weft.Graphs.from_children(graphs), cell)
            if compiled is None:
                x = torch.randn(graphs.num_vertices, 3, requires_grad=True)
                compiled = prepare(cell, graphs, x, "batched").compiled
            core, blocks = core_of(cell, compiled, graphs, rng.choice([1, 1, 2, 4])), rng.choice([1, 2, 3, 5, 132])
            for training in (False, True):
                block = _C.scripted(core, compiled.program, blocks, training, False)
                assert _C.script_fault(compiled.program, block) == ""

    def test_faults_are_found(self):
        graphs = weft.Graphs.from_children([[[], [0], [1]]])
        # Of a width that nobody waits for by values.
        program, block = script_of(models.TreeLSTM(8, 5), graphs, torch.randn(3, 8), 4)
        first = _C.script_offset(block, FORWARD)
        instructions = block[first : first + 8 * 6].view(6, 8)
        kernel, signal, wait = (instructions[i].clone() for i in range(3))
        for change, fault in [
            ({0: signal}, "instruction 1"),
            ({1: wait, 2: signal}, "a wait without a signal before it"),
            ({1: kernel}, "instruction 1: another step"),
        ]:
            damaged = block.clone()
            for i, x in change.items():
                damaged[first + 8 * i : first + 8 * i + 8] = x
            assert fault in _C.script_fault(program, damaged)
        missed = block.clone()
        missed[first + 8 : first + 8 * 4] = block[first + 8 * 3 : first + 8 * 6]  # no signal, no wait
        assert "reads what nobody waited for" in _C.script_fault(program, missed)
        longer = block.clone()
        longer[first + 8 * 3 + 3] += 1  # rows
        assert "another step" in _C.script_fault(program, longer)

    def test_weights_too_large_are_said_in_bytes(self):
        graphs = weft.Graphs.from_children([[[], [], [0, 1]]])
        compiled, _ = compiled_of(models.TreeLSTM(8, 64), graphs, torch.randn(3, 8, requires_grad=True))
        assert _C.persistent_obstacle(compiled.program, 4, 232448, 2) == ""
        why = _C.persistent_obstacle(compiled.program, 4, 1 << 15, 2)
        assert "the weights of the forward pass take" in why and why.count("bytes") == 1

    def test_all_weights_stay_or_none(self):
        """With the shared memory and the multiprocessors of an H100."""
        graphs = weft.Graphs.from_children([[[], [], [0, 1]]])
        for width, fits in ((512, True), (1024, False)):
            x = torch.empty(3, 8, requires_grad=True)
            with torch.device("meta"):
                cell = models.TreeLSTM(8, width)
            program = compiled_of(cell.to_empty(device="cpu"), graphs, x)[0].program
            assert (_C.persistent_obstacle(program, 132, 232448, 2) == "") == fits
            for which in (FORWARD, BACKWARD):
                blocks, ((_, kept, read),) = _C.partition(program, which, 132)
                assert read == 4 * 10 * width * width <= blocks * kept
                assert (kept < 232448) == fits

    def test_each_pass_loads_its_weights_whatever_their_size(self):
        graphs = weft.Graphs.from_children([[[], [], [0, 1]]])
        for width in (16, 640):
            compiled, _ = compiled_of(models.TreeLSTM(8, width), graphs, torch.randn(3, 8, requires_grad=True))
            for which in (FORWARD, BACKWARD):
                defines, _, _ = _C.persistent_source(compiled.program, which, 132, False, 2)
                (loads,) = (d for d in defines if d.startswith("WEFT_VERTEX_WEIGHTS="))
                assert loads.count("::load(") == 1

    def test_float64_has_none(self):
        graphs = weft.Graphs.from_children([[[], [], [0, 1]]])
        cell, x = models.TreeLSTM(8, 16).double(), torch.randn(3, 8, dtype=torch.float64)
        compiled, _ = compiled_of(cell, graphs, x)
        assert _C.persistent_obstacle(compiled.program, 4, 232448, 2) == "float64"


def test_many_graphs_run_by_groups_and_one_by_all_blocks(monkeypatch):
    monkeypatch.setattr(persistent, "_processors", lambda device: 132)
    limit = types.SimpleNamespace(shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: limit)
    cell, x = models.TreeLSTM(256, 256), torch.randn(3, 256, requires_grad=True)
    tree = [[], [], [0, 1], [], [2, 3], [], [4, 5]]
    compiled, _ = compiled_of(cell, weft.Graphs.from_children([tree[:3]]), x)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(_C, "refused_launches", lambda: 0, raising=False)
    monkeypatch.setattr(persistent, "_compile", lambda *_: None)
    monkeypatch.setattr(persistent, "_resident_groups", lambda compiled, device, form, which: which.groups)
    known = persistent.geometries(compiled, device)
    assert [g.groups for g in known] == [1, 2, 4, 8]
    assert persistent.geometries(compiled, device, (2, 1, True, True, 5))[-1].groups == 8
    for count, groups in ((1, 1), (2, 1), (512, 8)):
        assert persistent.geometry(compiled, weft.Graphs.from_children([tree] * count), device).groups == groups
    monkeypatch.setattr(persistent, "_GAIN", float("inf"))
    persistent._geometries[compiled.program] = {}
    assert persistent.geometry(compiled, weft.Graphs.from_children([tree] * 512), device) == known[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    ("name", "dtype", "full", "blocks", "groups"),
    [
        ("treelstm", "float32", True, 3, 2),
        ("treelstm", "float32", False, 2, 3),
        ("treelstm", "bfloat16", True, 4, 1),
        ("childsum", "float16", False, 3, 2),
        ("treegru", "float32", False, 2, 1),
        ("treefc", "float32", False, 3, 1),
        ("rvnn", "float32", True, 2, 2),
        ("norms", "float32", False, 3, 1),
        ("pairs", "float32", False, 3, 1),
    ],
)
def test_scripts_run_on_a_processor(name, dtype, full, blocks, groups, tmp_path):
    check_written_kernels(MODELS[name], True, dtype, tmp_path, blocks=blocks, full=full, groups=groups)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(("dtype", "size", "blocks"), [("float32", 40, 2), ("float32", 12, 4), ("bfloat16", 48, 3)])
def test_chains_run_on_a_processor(dtype, size, blocks, tmp_path):
    """Frontiers that follow each other with 8 rows of a group, then fewer and fewer, and no wait between them."""
    children = [[[], *([i] for i in range(length - 1))] for length in (9, 9, 7, 7, 6, 6, 5, 5, 5, 4, 4, 4, 3, 2, 2, 1)]

    def make():
        return models.ChainLSTM(3, size)

    check_written_kernels(make, True, dtype, tmp_path, blocks=blocks, groups=2, children=children)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_product_narrower_than_the_kernel_after_it(tmp_path):
    """A block has one of the product's columns and two of the kernel's."""
    children = [[[], *([i] for i in range(length - 1))] for length in (6, 4)]
    check_written_kernels(lambda: Aside(3, 8), True, "float32", tmp_path, blocks=4, groups=1, children=children)


def test_on_the_cpu_it_is_batched():
    graphs = weft.Graphs.from_children([[[], [], [0, 1]]])
    cell, x = models.TreeLSTM(4, 8), torch.randn(3, 4)
    found = weft.explain(cell, graphs, x, executor="persistent")
    assert found.executor == "batched" and "CUDA" in found.reason
    torch.testing.assert_close(cell(graphs, x, executor="persistent"), cell(graphs, x, executor="reference"))
    with pytest.raises(RuntimeError, match="did not run on the persistent executor"):
        _ = cell.script
    assert found.blocks is None


CELLS = {
    "treelstm": lambda: (models.TreeLSTM(20, 64), 20, True),
    "treelstm_odd": lambda: (models.TreeLSTM(5, 37), 5, True),
    "treelstm_256": lambda: (models.TreeLSTM(64, 256), 64, True),
    "childsum": lambda: (models.ChildSumTreeLSTM(12, 48), 12, False),
    "treegru": lambda: (models.TreeGRU(12, 36), 12, False),
    "treefc": lambda: (models.TreeFC(64), 64, True),
    "rvnn": lambda: (models.RvNN(12, 32), 12, True),
}


def results(cell, graphs, x, executor, grad):
    y = cell(graphs, x, executor=executor)
    return [y.detach(), *torch.autograd.grad(y, [x, *cell.parameters()], grad)]


@pytest.mark.cuda
@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
def test_it_is_the_reference(make):
    torch.manual_seed(0)
    rng = random.Random(5)
    cell, width, binary = make()
    cell = cell.cuda()
    for count in (1, 3, 40):
        if binary:
            graphs = trees(rng, count)
        else:
            graphs = weft.Graphs.from_children([random_dag(rng, rng.randint(1, 12), 3) for _ in range(count)])
        graphs = typed(graphs, cell).to("cuda")
        x = torch.randn(graphs.num_vertices, width, device="cuda", requires_grad=True)
        assert weft.explain(cell, graphs, x, executor="persistent").executor == "persistent"
        grad = torch.randn_like(cell(graphs, x))
        want = results(cell.double(), graphs, x.double(), "reference", grad.double())
        cell = cell.float()
        found = results(cell, graphs, x, "persistent", grad)
        again = results(cell, graphs, x, "persistent", grad)
        for a, b, c in zip(found, want, again, strict=True):
            assert relative_error(a, b) < 1e-5
            assert torch.equal(a, c)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    torch.manual_seed(0)
    graphs = trees(random.Random(2), 9).to("cuda")
    cell = models.TreeLSTM(16, 64).cuda().to(dtype)
    x = torch.randn(graphs.num_vertices, 16, device="cuda", dtype=dtype, requires_grad=True)
    assert weft.explain(cell, graphs, x, executor="persistent").executor == "persistent"
    grad = torch.randn_like(cell(graphs, x))
    want = results(cell.float(), graphs, x.float(), "reference", grad.float())
    found = results(cell.to(dtype), graphs, x, "persistent", grad)
    for a, b in zip(found, want, strict=True):
        assert relative_error(a.float(), b) < (2e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.cuda
def test_values_of_any_bits_do_not_block():
    cell = models.TreeFC(8).cuda()
    graphs = trees(random.Random(2), 5).to("cuda")
    ones = torch.full((graphs.num_vertices, 8), -1, dtype=torch.int32, device="cuda").view(torch.float32)
    y = cell(graphs, ones, executor="persistent")
    y.sum().backward()
    assert y.isnan().all()


@pytest.mark.cuda
def test_kernels_of_which_some_blocks_have_no_column():
    """Of 256 columns each has some, of 232 not, however blocks are grouped; a thread has several of a row."""
    torch.manual_seed(0)
    cell = Narrow(12, 256, 232).cuda()
    graphs = weft.Graphs.from_children([[[], [], [0, 1]]] * 300).to("cuda")
    x = torch.randn(graphs.num_vertices, 12, device="cuda", requires_grad=True)
    grad = torch.randn(graphs.num_vertices, 256, device="cuda")
    want = results(cell.double(), graphs, x.double(), "reference", grad.double())
    compiled = prepare(cell.float(), graphs, x, "persistent").compiled
    for geometry in persistent.geometries(compiled, x.device):
        (y,) = prepare(cell, graphs, x, "persistent", geometry.parts).ready.run()
        found = [y.detach(), *torch.autograd.grad(y, [x, *cell.parameters()], grad)]
        for a, b in zip(found, want, strict=True):
            assert relative_error(a, b) < 1e-5


@pytest.mark.cuda
def test_a_cell_of_the_users_own_over_chains():
    torch.manual_seed(0)
    cell = GatedChain(6, 40).cuda()
    graphs = weft.Graphs.chain([17, 5, 1]).to("cuda")
    x = torch.randn(23, 6, device="cuda", requires_grad=True)
    found = weft.explain(cell, graphs, x, executor="persistent")
    assert found.executor == "persistent"
    grad = torch.randn(23, 40, device="cuda")
    want = results(cell.double(), graphs, x.double(), "reference", grad.double())
    for a, b in zip(results(cell.float(), graphs, x, "persistent", grad), want, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.cuda
def test_what_explain_and_script_say():
    cell, graphs = models.TreeLSTM(8, 32).cuda(), weft.Graphs.from_children([[[], [], [0, 1]]]).to("cuda")
    x = torch.randn(3, 8, device="cuda")
    found = weft.explain(cell, graphs, x, executor="persistent")
    assert found.blocks == found.group == 32
    assert found.registers > 0 and found.shared_bytes > 0
    assert found.launches == 2
    assert {name for name, _, _ in found.partitions} == {"U.weight"}
    assert all(where == "shared" and size > 0 for _, where, size in found.partitions)
    assert found.waits == 2
    assert found.weight_bytes == 2 * cell.U.weight.nbytes
    cell(graphs, x, executor="persistent")
    assert len(cell.script.splitlines()) == found.instructions
    cell(graphs, x, executor="batched")
    with pytest.raises(RuntimeError):
        _ = cell.script


@pytest.mark.cuda
def test_weights_beyond_shared_memory_run_batched():
    cell, graphs = models.TreeLSTM(24, 1024).cuda(), trees(random.Random(1), 2).to("cuda")
    x = torch.randn(graphs.num_vertices, 24, device="cuda", requires_grad=True)
    for executor in ("auto", "persistent"):
        assert weft.explain(cell, graphs, x, executor=executor).executor == "batched"
    assert "the weights of the forward pass take" in weft.explain(cell, graphs, x, executor="persistent").reason


@pytest.mark.cuda
def test_captured():
    torch.manual_seed(0)
    cell, graphs = models.TreeLSTM(8, 32).cuda(), trees(random.Random(1), 4).to("cuda")
    x = torch.randn(graphs.num_vertices, 8, device="cuda")
    grad = torch.randn(graphs.num_vertices, 32, device="cuda")

    def run():
        return torch.autograd.grad(cell(graphs, x, executor="persistent"), [*cell.parameters()], grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(found, run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.cuda
@pytest.mark.parametrize("count", [1, 40])
def test_auto_runs_what_explain_says_by_itself_and_in_a_graph(count):
    """The same in every call, whose bits are those of the executor that is named."""
    torch.manual_seed(0)
    cell, graphs = models.TreeLSTM(8, 64).cuda(), trees(random.Random(1), count).to("cuda")
    x, grad = (torch.randn(graphs.num_vertices, width, device="cuda") for width in (8, 64))

    def run(executor="auto"):
        y = cell(graphs, x, executor=executor)
        return [y.detach(), *torch.autograd.grad(y, [*cell.parameters()], grad)]

    def scripted():
        return calls.compiled_of(cell).script is not None

    want = {executor: run(executor) for executor in ("persistent", "batched")}
    for _ in range(3):
        found = run()
        said = weft.explain(cell, graphs, x)
        assert scripted() == (said.executor == "persistent") and "us by the host or the device" in said.reason
        assert all(torch.equal(a, b) for a, b in zip(found, want[said.executor], strict=True))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        said = weft.explain(cell, graphs, x)
        found = run()
        assert scripted() == (said.executor == "persistent") and "us in a CUDA graph" in said.reason
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, want[said.executor], strict=True))


@pytest.mark.cuda
def test_thousands_of_random_graphs_end():
    rng = random.Random(11)
    cells = [models.TreeLSTM(4, 12).cuda(), models.ChildSumTreeLSTM(4, 8).cuda()]
    for i in range(300):
        graphs = weft.Graphs.from_children([random_dag(rng, rng.randint(1, 14), 2) for _ in range(rng.randint(1, 6))])
        x = torch.randn(graphs.num_vertices, 4, device="cuda")
        cell = cells[i % 2]
        y = cell(graphs, x, executor="persistent")
        y.sum().backward()
    torch.cuda.synchronize()


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(("loss", "head", "at"), [("cross_entropy", True, "vertices"), ("mse", False, "roots")])
def test_trainer_is_the_loop(optimizer, loss, head, at):
    torch.manual_seed(2)
    made = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    cell, scores = models.TreeLSTM(12, 40).cuda(), nn.Linear(40, 5).cuda() if head else None
    batches = []
    for i in range(4):
        graphs = trees(random.Random(i), 1 + 5 * i).to("cuda")
        rows = graphs.num_vertices if at == "vertices" else graphs.num_graphs
        if loss == "mse":
            targets = torch.randn(rows, 5 if head else 40, device="cuda")
        else:
            targets = torch.randint(0, 5, (rows,), device="cuda")
        batches.append((graphs, torch.randn(graphs.num_vertices, 12, device="cuda"), targets))
    found = []
    for executor in ("batched", "persistent"):
        c, s = copy.deepcopy(cell), copy.deepcopy(scores)
        parameters = [*c.parameters(), *(s.parameters() if head else ())]
        trainer = weft.vertex.Trainer(c, made[optimizer](parameters), loss, head=s, at=at, executor=executor)
        losses = []
        for batch in batches:
            trainer.step(*batch)
            losses.append(trainer.sync())
        found.append((torch.tensor(losses), [p.detach() for p in parameters]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    for a, b in zip(found[1][1], found[0][1], strict=True):
        assert relative_error(a, b) < (1e-5 if optimizer == "sgd" else 1e-4)
