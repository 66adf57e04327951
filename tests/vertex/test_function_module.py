"""weft.VertexFunction as a module: what counts when, copies, threads, CUDA graphs."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.utils.prune
import weft
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from weft._vertex import calls
from weft._vertex.runtime import schedule
from weft.vertex import models

from tests.common import in_a_cuda_graph, relative_error
from tests.vertex.cells import (
    BINARY,
    CHILDREN,
    GRAPHS,
    NETS,
    Cell,
    both,
    cell,
    executors,
    nets,
    rows,
)
from tests.vertex.naive import evaluate

# ---- What is read when -----------------------------------------------------------------------------------------------


@executors
def test_everything_counts_as_it_is_at_the_call(executor):
    def vertex(self, v):
        h = self.drop(self.scale * v.pull()) + self.W(v.gather_sum()) + self.offset
        if self.flag is not None:
            h = h * self.flag[0]
        both(v, h)

    m = Cell(vertex, drop=nn.Dropout(0.0))
    m.scale, m.flag, m.offset = 1, None, torch.zeros(3)
    x = rows(BINARY)

    def check():
        def step(x, below):
            s = sum([b for b in below if b is not None], torch.zeros(3))
            factor = 0 if m.training and m.drop.p == 1 else 1
            h = factor * m.scale * x + m.W(s) + m.offset
            h = h if m.flag is None else h * m.flag[0]
            return h, h

        want = evaluate(step, [[[], [], [0, 1]]], x)
        assert relative_error(m(BINARY, x, executor=executor), want) < 1e-6

    check()
    for change in (
        lambda: setattr(m, "scale", 2),
        lambda: setattr(m, "scale", True),
        lambda: setattr(m, "scale", 2.5),
        lambda: setattr(m.drop, "p", 1.0),
        lambda: m.eval(),
        lambda: m.train(),
        lambda: setattr(m.drop, "p", 0.0),
        lambda: setattr(m, "flag", (3.0,)),
        lambda: setattr(m, "flag", (torch.tensor([1.0, 2.0, 3.0]),)),
        lambda: m.flag[0].fill_(7),
        lambda: setattr(m, "flag", (torch.tensor([0.0, 2.0, 3.0]),)),
        lambda: m.offset.add_(1),
        lambda: setattr(m, "offset", torch.ones(3)),
        lambda: m.W.weight.data.mul_(3),
        lambda: setattr(m.W, "weight", nn.Parameter(torch.randn(3, 3))),
        lambda: setattr(m, "W", nn.Linear(3, 3, bias=False)),
    ):
        change()
        check()


@executors
def test_requires_grad_counts_as_it_is(executor):
    m, x = cell(), rows(requires_grad=True)
    m(GRAPHS, x, executor=executor).sum().backward()
    assert m.W.weight.grad is not None and x.grad is not None
    m.W.weight.requires_grad_(False)
    m.zero_grad()
    m(GRAPHS, x.detach(), executor=executor).sum().backward()
    assert m.W.weight.grad is None and m.W.bias.grad is not None
    m.requires_grad_(False)
    assert not m(GRAPHS, x.detach(), executor=executor).requires_grad
    assert m(GRAPHS, x, executor=executor).requires_grad
    with torch.no_grad():
        assert not m(GRAPHS, x, executor=executor).requires_grad
    with torch.inference_mode():
        assert m(GRAPHS, x, executor=executor).is_inference()
    assert m(GRAPHS, x, executor=executor).requires_grad


@nets
def test_inference_mode_runs_what_no_grad_runs(net):
    """There torch shows operations to whoever looks before it takes them apart."""
    m, x = NETS[net](), rows()
    with torch.inference_mode():
        assert weft.explain(m, GRAPHS, x, executor="batched").executor == "batched"
        found, program = m(GRAPHS, x, executor="batched"), str(m.program)
    assert found.is_inference()
    with torch.no_grad():
        assert torch.equal(m(GRAPHS, x, executor="batched"), found) and str(m.program) == program
    # What was seen first without gradients serves no call that has them.
    m(GRAPHS, x, executor="batched").sum().backward()
    assert all(p.grad is not None for p in m.parameters())


@executors
def test_hooks_and_parametrizations(executor):
    m, x = cell(), rows()
    before = m(GRAPHS, x, executor=executor)
    handle = m.W.register_forward_hook(lambda module, args, out: out * 2)
    assert not torch.allclose(m(GRAPHS, x, executor=executor), before)
    handle.remove()
    assert torch.equal(m(GRAPHS, x, executor=executor), before)
    nn.utils.parametrizations.weight_norm(m.W)
    out = m(GRAPHS, x, executor=executor)
    assert relative_error(out, before) < 1e-6
    out.sum().backward()
    assert all(p.grad is not None for p in m.parameters())
    m = copy.deepcopy(m)
    with nn.utils.parametrize.cached():
        for _ in range(2):
            assert relative_error(m(GRAPHS, x, executor=executor), before) < 1e-6


@executors
def test_traces_leave_nothing_in_the_module(executor):
    """What old-style hooks make of a weight, and what a vertex function puts into buffers, are real tensors."""

    def vertex(self, v):
        h = torch.tanh(v.pull() + self.W(v.gather_sum()))
        self.drop = self.W.weight * self.steps
        self.steps = self.steps + 1
        both(v, h)

    m, x = Cell(vertex), rows()
    m.register_buffer("steps", torch.zeros(()))
    nn.utils.prune.l1_unstructured(m.W, "weight", 0.5)
    out = m(GRAPHS, x, executor=executor)
    values = [m.W.weight, m.steps, *vars(m).values()]
    assert not any(isinstance(value, FakeTensor) for value in values)
    want = cell()
    want.W.load_state_dict({"weight": m.W.weight_orig * m.W.weight_mask, "bias": m.W.bias})
    assert relative_error(out, want(GRAPHS, x, executor="reference")) < 1e-6


# ---- As a module -----------------------------------------------------------------------------------------------------


@nets
def test_copies_and_pickles(net):
    m, x = NETS[net](), rows()
    keys = list(m.state_dict())
    out = m(GRAPHS, x)
    stored = io.BytesIO()
    torch.save(m, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), torch.load(stored, weights_only=False)):
        with pytest.raises(RuntimeError):
            _ = twin.program
        assert torch.equal(twin(GRAPHS, x), out)
    assert list(m.state_dict()) == keys


def test_calls_leave_nothing_alive():
    m, graphs, x = cell(), weft.Graphs.from_children(CHILDREN), rows()
    m(graphs, x).sum().backward()
    dead = weakref.ref(graphs), weakref.ref(x)
    del graphs, x
    gc.collect()
    assert dead[0]() is None and dead[1]() is None
    dead = weakref.ref(m)
    del m
    gc.collect()
    assert dead() is None


CHANGES = {
    "nothing": (lambda m: None, False),
    "values": (lambda m: m.W.weight.data.mul_(2), False),
    "requires_grad": (lambda m: m.U.weight.requires_grad_(False), True),
    "dtype": (lambda m: m.double(), True),
    "parameter": (lambda m: setattr(m.W, "bias", nn.Parameter(torch.zeros(8))), True),
    "submodule": (lambda m: setattr(m, "W", nn.Linear(3, 8)), True),
    "attribute": (lambda m: setattr(m, "scale", 2.0), True),
    "renamed": (lambda m: m._buffers.update(b=m._buffers.pop("a")), True),
    "eval": (lambda m: m.eval(), True),
    "hook": (lambda m: m.W.register_forward_hook(lambda *_: None), True),
    "tensors in a tuple": (lambda m: setattr(m, "kept", (torch.ones(1),)), True),
    "all attributes": (lambda m: setattr(m, "__dict__", {**m.__dict__, "_modules": {**m._modules}}), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_like_the_one_before_is_known(change, monkeypatch):
    m, x = models.TreeLSTM(3, 2), rows()
    m.register_buffer("a", torch.ones(1))
    m(GRAPHS, x)
    change, noticed = CHANGES[change]
    change(m)
    asked = []
    prepare = calls.prepare
    monkeypatch.setattr(calls, "prepare", lambda *a: asked.append(a) or prepare(*a))
    x = x.to(m.W.weight.dtype)
    out = m(GRAPHS, x)
    assert bool(asked) == noticed
    assert relative_error(out, m(GRAPHS, x, executor="reference")) < 1e-6
    asked.clear()
    m(GRAPHS, x, executor="reference")
    with torch.no_grad():
        m(GRAPHS, x)
    m(weft.Graphs.from_children(CHILDREN), x)  # like the call before these, unless such calls are not kept
    assert len(asked) == (3 if calls.Snapshot.of(m) is None else 2)


def test_hooks_of_all_modules_run_as_long_as_they_are_there():
    m, x = models.TreeLSTM(3, 2), rows()
    out = m(GRAPHS, x)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, result: result * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        doubled = m(GRAPHS, x)
        assert relative_error(doubled, m(GRAPHS, x, executor="reference")) < 1e-6
    finally:
        handle.remove()
    assert not torch.equal(doubled, out)
    assert torch.equal(m(GRAPHS, x), out)


def counted(monkeypatch) -> list:
    asked, prepare = [], calls.prepare
    monkeypatch.setattr(calls, "prepare", lambda *a: asked.append(a) or prepare(*a))
    return asked


def test_a_known_call_differs_in_nothing_that_counts(monkeypatch):
    m, x = models.TreeLSTM(3, 2), rows()
    asked = counted(monkeypatch)

    def noticed(call) -> bool:
        m(GRAPHS, x)
        asked.clear()
        call()
        return bool(asked)

    def inside(context):
        with context:
            m(GRAPHS, x)

    assert not noticed(lambda: m(GRAPHS, x))
    assert noticed(lambda: inside(torch.no_grad()))
    assert noticed(lambda: inside(torch.inference_mode()))
    assert noticed(lambda: inside(torch.autocast("cpu", torch.bfloat16)))
    assert noticed(lambda: inside(weft.vertex.options(lazy=False)))
    assert noticed(lambda: inside(weft.vertex.options(fuse=False)))
    assert noticed(lambda: m(GRAPHS, x.clone().requires_grad_()))
    assert not noticed(lambda: m(GRAPHS, x, executor="batched"))  # which is what "auto" runs
    assert noticed(lambda: m(GRAPHS, x, executor="reference"))
    values = {name: p.detach() * 2 for name, p in m.named_parameters()}
    assert noticed(lambda: torch.func.functional_call(m, values, (GRAPHS, x)))


def test_calls_in_turns_are_all_recent(monkeypatch):
    m, x = models.TreeLSTM(3, 2), rows()
    asked = counted(monkeypatch)

    def turn():
        m.train()
        m(GRAPHS, x)
        m.eval()
        with torch.no_grad():
            m(GRAPHS, x)
        m(GRAPHS, x.double().float().requires_grad_())

    turn()
    assert len(asked) == 3
    for _ in range(3):
        turn()
    assert len(asked) == 3


def test_recent_calls_keep_no_parameters_that_the_module_has_lost():
    m, x = models.TreeLSTM(3, 2), rows()
    m(GRAPHS, x)
    old = weakref.ref(m.W.weight)
    m.W.weight = nn.Parameter(torch.randn(8, 3))
    m(GRAPHS, x)
    gc.collect()
    assert old() is None


def test_functions_by_type_are_called_from_the_cache_too(monkeypatch):
    m, x = models.RvNN(3, 2), rows(BINARY)
    typed = BINARY.with_types(["leaf", "leaf", "inner"])
    wanted = m(typed, x, executor="reference")
    asked = counted(monkeypatch)
    m(typed, x)
    assert len(asked) == 1
    again = weft.Graphs.batch([typed, typed])
    assert relative_error(m(again, torch.cat((x, x))), torch.cat((wanted, wanted))) < 1e-6
    # Other numbers of the same names, and one that nobody has.
    other = weft.Graphs.batch([weft.Graphs.chain([1]).with_types(["inner"]), typed])
    assert torch.equal(m(other, torch.cat((x[:1], x)))[1:], m(typed, x))
    sliced = weft.Graphs.batch([weft.Graphs.chain([1]).with_types(["none"]), typed])[1:]
    assert torch.equal(m(sliced, x), m(typed, x))
    assert len(asked) == 2  # the last of them
    with pytest.raises(ValueError, match="graph 0, vertex 1: there is no function for type 'stem'"):
        m(BINARY.with_types(["leaf", "stem", "inner"]), x)
    with pytest.raises(ValueError, match="graph 0, vertex 2: there is a child in slot 1, vertex gathers no slot"):
        m(BINARY.with_types(["leaf", "leaf", "leaf"]), x)
    with pytest.raises(ValueError, match="graphs have no types"):
        m(BINARY, x)


def test_graphs_on_their_way_to_a_device_are_planned_for_the_functions_last_used():
    m, cell = models.RvNN(3, 2), models.TreeLSTM(3, 2)
    typed = BINARY.with_types(["leaf", "leaf", "inner"])
    m(typed, rows(BINARY))
    cell(BINARY, rows(BINARY))
    again = weft.Graphs.batch([typed, typed])
    schedule._prepare(again)
    assert len(again._plans) == 2  # with types and without
    before = dict(again._plans)
    m(again, torch.randn(6, 3))
    cell(again, torch.randn(6, 3))
    assert again._plans == before
    untyped = weft.Graphs.from_children([[[], [0]]])
    schedule._prepare(untyped)
    assert len(untyped._plans) == 1
    for _ in range(100):  # without a use
        schedule._prepare(weft.Graphs.from_children([[[], [0]]]))
    forgotten = weft.Graphs.from_children([[[], [0]]])
    schedule._prepare(forgotten)
    assert not forgotten._plans
    cell(BINARY, rows(BINARY))
    ternary = weft.Graphs.from_children([[[], [-1, -1, 0]]])
    schedule._prepare(ternary)
    assert not ternary._plans


def test_typed_graphs_that_are_planned_for_groups_are_known_to_fit(monkeypatch):
    kinds = (schedule.Kind(()), schedule.Kind((0, 1)))
    planner = schedule.Planner(kinds, {"leaf": 0, "inner": 1})
    other = schedule.Planner(kinds, {"leaf": 0, "inner": 1, "root": 1})
    typed = weft.Graphs.batch([BINARY.with_types(["leaf", "leaf", "inner"])] * 2)
    planner.plan(typed, 2)
    monkeypatch.setattr(schedule._C, "first_beyond", None)  # which looks at every vertex
    assert planner.fits(typed)
    with pytest.raises(TypeError):
        other.fits(typed)


@pytest.mark.cuda
@pytest.mark.parametrize("executor", ["batched", "persistent"])
def test_graphs_are_sent_with_their_schedules(executor, monkeypatch):
    monkeypatch.setattr(schedule, "_recent", {})
    cell, x = models.TreeLSTM(3, 2).cuda(), rows(BINARY).cuda()
    want = cell(BINARY.cuda(), x, executor=executor)
    pinned = weft.Graphs.from_children([[[], [], [0, 1]]]).pin_memory()
    for made_once in ("schedule", "scripted", "pinned"):
        monkeypatch.setattr(schedule._C, made_once, None)
    there = pinned.to("cuda", non_blocking=True)
    (plan,) = there._kept.values()
    sent = plan if executor == "batched" else plan._scripted[-1]
    assert sent._resident._copy is not None
    assert torch.equal(cell(there, x, executor=executor), want)


def test_what_is_made_of_pinned_graphs_serves_all_their_copies(monkeypatch):
    monkeypatch.setattr(schedule, "_recent", {})
    monkeypatch.setattr(schedule._C, "pinned", lambda core: torch.frombuffer(core, dtype=torch.int32).clone())
    cell = models.TreeLSTM(3, 2)
    program = calls.prepare(cell, BINARY, rows(BINARY), "batched").compiled.program
    cell(BINARY, rows(BINARY))
    pinned = weft.Graphs.from_children([[[], [], [0, 1]]])
    pinned._pinned = True  # as far as CUDA is not needed
    schedule._prepare(pinned)
    (plan,), ((planned,),) = pinned._kept.values(), (plans.values() for plans in pinned._plans.values())
    assert plan.planned is planned and planned.pinned is not None
    scripted = plan.scripted(program, 4)
    scripted.pin()
    copy = schedule.Schedule(planned, pinned.device)
    assert copy._pinned() is planned.pinned
    assert copy.scripted(program, 4)._pinned() is scripted._host
    assert copy.scripted(program, 8)._pinned() is not scripted._host


def test_a_copy_that_shares_what_was_compiled_runs_with_its_own_weights():
    m, x = models.TreeLSTM(3, 2), rows()
    m(GRAPHS, x)
    copy = m._replicate_for_data_parallel()
    copy._modules = dict(m._modules, W=nn.Linear(3, 8))
    assert relative_error(copy(GRAPHS, x), copy(GRAPHS, x, executor="reference")) < 1e-6
    assert relative_error(m(GRAPHS, x), m(GRAPHS, x, executor="reference")) < 1e-6


def test_what_changes_while_a_call_is_traced_counts_at_the_next():
    class Late(weft.VertexFunction):
        scale = 1.0

        def vertex(self, v):
            v.push(v.pull() * self.scale)
            self.scale = 3.0

    m, x = Late(1), torch.randn(2, 4)
    leaves = weft.Graphs.from_children([[[]], [[]]])
    m(leaves, x)
    assert m.scale == 3.0
    for _ in range(2):
        assert torch.equal(m(leaves, x), x * 3)


def test_a_known_call_keeps_no_graph_of_parameters():
    """Parameters that functional_call puts in are results of other steps, which end when these are gone."""
    m, x = models.TreeLSTM(3, 2), rows()
    leaf = torch.ones(1, requires_grad=True)
    values = {name: p.detach() * leaf for name, p in m.named_parameters()}
    torch.func.functional_call(m, values, (GRAPHS, x)).sum().backward()
    dead = weakref.ref(values["W.weight"])
    del values
    gc.collect()
    assert dead() is None


@executors
def test_calls_leave_no_cycles(executor):
    """What a step saved is freed with it, not when cycles are collected."""
    m, x = models.TreeLSTM(3, 2), rows(requires_grad=True)
    m(GRAPHS, x, executor=executor).sum().backward()
    gc.collect()
    gc.disable()
    try:
        m(GRAPHS, x, executor=executor).sum().backward()
        assert gc.collect() == 0
    finally:
        gc.enable()


@executors
def test_threads(executor):
    m, x = models.TreeLSTM(3, 2), rows()
    want = m(GRAPHS, x, executor="reference")
    bad = []

    def work(i):
        scale = 1 + i % 2
        for _ in range(10):
            with weft.vertex.options(lazy=bool(i % 2)):
                y = x.clone().requires_grad_(bool(i % 2))
                out = m(GRAPHS, y * scale / scale, executor=executor)
            if relative_error(out, want) > 1e-5:
                bad.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


def test_threads_that_use_functions_in_turns(monkeypatch):
    """What is kept of the latest functions changes while another thread looks at it."""
    monkeypatch.setattr(schedule, "_recent", {})
    planners = [schedule.Planner((schedule.Kind((k,)),), None) for k in range(3)]
    used = [types.SimpleNamespace(planner=planner) for planner in planners]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(i):
        for n in range(100_000):
            schedule.used(used[(n // 3 * (i + 1) + i) % 3], work)

    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, i) for i in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)


@executors
def test_torch_compile_breaks_its_graph(executor):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = models.TreeLSTM(3, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.cell(GRAPHS, torch.sin(x), executor=executor))

    m, x = Net(), rows(requires_grad=True)
    compiled = torch.compile(m, backend="eager")
    assert torch.equal(compiled(x), m(x))
    assert torch.equal(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, m)))
    assert torch.equal(torch.compile(m.cell, backend="eager")(GRAPHS, x), m.cell(GRAPHS, x))


def test_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        m, x = models.TreeLSTM(3, 2), rows()
        m(GRAPHS, x)
        parallel = nn.parallel.DistributedDataParallel(m)
        out = parallel(GRAPHS, x)
        out.sum().backward()
        assert torch.equal(out, m(GRAPHS, x)) and all(p.grad is not None for p in m.parameters())
    finally:
        torch.distributed.destroy_process_group()


# ---- CUDA ------------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@nets
def test_runs_compiled_on_cuda(net):
    m, x = NETS[net]().cuda(), rows(device="cuda", requires_grad=True)
    assert weft.explain(m, GRAPHS, x).executor != "reference"
    runs = [m(GRAPHS.to(device), x) for device in ("cpu", "cuda")]
    assert torch.equal(*runs)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        aside = m(GRAPHS.to("cuda"), x)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(aside, runs[0])


@pytest.mark.cuda
@executors
def test_capture_in_a_cuda_graph(executor):
    m, graphs = models.TreeLSTM(3, 2).cuda(), GRAPHS.to("cuda")
    x = rows(device="cuda", requires_grad=True)
    wrt = [x, *m.parameters()]

    def step():
        out = m(graphs, x, executor=executor)
        return out, *torch.autograd.grad(out.sin().sum(), wrt)

    graph, captured = in_a_cuda_graph(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(captured, step(), strict=True))


@pytest.mark.cuda
@executors
def test_graphs_that_go_while_another_stream_reads_them(executor):
    m, x = models.TreeLSTM(3, 2).cuda(), rows(device="cuda")
    wanted = m(GRAPHS, x, executor=executor)
    graphs = weft.Graphs.from_children(CHILDREN)
    m(graphs, x, executor=executor)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        found = m(graphs, x, executor=executor)
    del graphs
    gc.collect()
    taken = [torch.zeros(n, dtype=torch.int64, device="cuda") for n in (8, 64, 512) for _ in range(50)]
    side.synchronize()
    assert torch.equal(found, wanted), len(taken)
