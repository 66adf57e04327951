"""Programs, explanations and options of vertex functions."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.utils.prune
import weft
from torch.utils._python_dispatch import TorchDispatchMode
from weft._vertex.calls import prepare
from weft.vertex import models

from tests.common import relative_error
from tests.fresh import python
from tests.vertex.cells import (
    GRAPHS,
    NETS,
    cell,
    executors,
    rows,
)


def test_program():
    m = models.TreeLSTM(3, 2)
    with pytest.raises(RuntimeError, match="call"):
        _ = m.program
    m(GRAPHS, rows())
    lines = str(m.program).splitlines()
    for op in ("pull", "gather", "scatter", "push", "mm", "sigmoid"):
        assert any(f"{op}(" in line or f".{op}." in line for line in lines), op
    when = {line.split("= ")[-1].split("(")[0]: line.split()[0] for line in lines[1:]}
    assert (when["pull"], when["gather"], when["aten.mm.default"]) == ("before", "in", "in")
    assert "[N, 8]" in next(line for line in lines if "addmm" in line)
    pickle.loads(pickle.dumps(m.program))
    forward, backward = str(m.program).split("TreeLSTM, backward:")
    assert "grad" not in forward
    for line in (
        "gather_grad(0, 2)",
        "pull_grad(%40)",
        "scatter_grad(1, ",
        "push_grad(%10, ",
        "float32[4, 10] = outer(",
    ):
        assert line in backward, line
    with torch.no_grad():
        m(GRAPHS, rows())
    assert m.program.backward is None
    several = models.RvNN(3, 2)
    several(weft.Graphs.from_children([[[]]]).with_types(["leaf"]), rows()[:1])
    assert "_Leaf" in str(several.program) and "_Inner" in str(several.program)


def test_a_sum_of_children_is_shown_as_a_gather():
    m = models.ChildSumTreeLSTM(3, 2)
    for executor in ("reference", "batched"):
        with torch.no_grad():
            m(GRAPHS, rows(), executor=executor)
        lines = str(m.program).splitlines()
        for op in ("pull", "gather_children", "scatter", "push"):
            assert any(f"{op}(" in line for line in lines), (executor, op)


class Called(TorchDispatchMode):
    """The calls of the operator that runs frontiers, and their results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.weft.vertex_frontiers.default:
            self.calls.append((args, results))
        return results


def test_programs_and_schedules_are_plain_data(tmp_path):
    """Written down, and run by a process that has neither the function nor the graphs."""
    programs = []
    with Called() as called:
        for make in NETS.values():
            m = make()
            m(GRAPHS, rows())
            programs.append(prepare(m, GRAPHS, rows(), "batched").compiled.plan.frontiers.fields())
            assert type(m.program).loads(m.program.dumps()) == m.program and m.program.backward is not None
    assert len(called.calls) == len(NETS)
    path = str(tmp_path / "calls.pt")
    calls = [((*a[:5], p, *a[6:]), results) for (a, results), p in zip(called.calls, programs, strict=True)]
    torch.save(calls, path)
    code = (
        "import torch, weft\n"
        f"for (*args, fields, a, b, c), results in torch.load({path!r}, weights_only=True):\n"
        "    args += [torch.classes.weft.VertexProgram(*fields), a, b, c]\n"
        "    with torch.no_grad(): found = torch.ops.weft.vertex_frontiers(*args)\n"
        "    assert len(found) == len(results) and all(map(torch.equal, found, results))"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_an_exported_program_is_copied_and_saved():
    x = rows()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell()

        def forward(self, x):
            return self.cell(GRAPHS, x)

    net = Net()
    exported = torch.export.export(net, (x,), strict=False)
    assert any("vertex_frontiers" in str(node.target) for node in exported.graph.nodes)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for twin in (copy.deepcopy(exported), torch.export.load(file)):
        assert torch.equal(twin.module()(x), net(x))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ([("neg", 0, [0])], "operand"),
        ([("end", 0, [])], "end of no loop"),
        ([("begin", 0, [])], "loop without an end"),
        ([("begin", 0, []), ("begin", 0, []), ("end", 0, []), ("end", 0, [])], "loop in a loop"),
    ],
)
def test_an_impossible_program_is_refused(code, message):
    instructions = [(op, result, operands, 0, 0, "row", -1, False, 0, 0) for op, result, operands in code]
    kernel = ("frontiers", 0, False, 4, 1, False, instructions)
    with pytest.raises(ValueError, match=message):
        torch.classes.weft.VertexProgram(1, True, -1, [], [], [1.0], [(kernel, None, None, None)], [])


def test_explain():
    m, x = cell(), rows()
    found = weft.explain(m, GRAPHS, x, executor="reference")
    assert (found.executor, found.asked) == ("reference", "reference") and found.reason in str(found)
    found = weft.explain(cell(lambda h: torch.cumsum(h, 1)), GRAPHS, inputs={"input": x})
    assert found.asked == "auto" and found.executor == "reference"
    with pytest.raises(ValueError):
        weft.explain(m, GRAPHS, x, executor="fast")
    found = weft.explain(m, GRAPHS, x, executor="persistent")
    assert (found.executor, found.asked) == ("batched", "persistent") and "CUDA device" in found.reason
    assert (found.blocks, found.partitions, found.launches) == (None, None, None)


def test_persistent_runs_batched_on_the_cpu():
    """What it cannot do runs as "batched", and what that cannot do as "reference"; there is no script then."""
    m, x = cell(), rows()
    want = m(GRAPHS, x, executor="batched")
    with pytest.raises(RuntimeError, match="did not run on the persistent executor"):
        _ = m.script
    for _ in range(2):  # the second call is a recent one
        assert torch.equal(m(GRAPHS, x, executor="persistent"), want)
    with pytest.raises(RuntimeError, match="Cell: the latest call did not run on the persistent executor"):
        _ = m.script
    odd = cell(lambda h: torch.cumsum(h, 1))
    found = weft.explain(odd, GRAPHS, x, executor="persistent")
    assert found.executor == "reference" and "cumsum" in found.reason
    assert torch.equal(odd(GRAPHS, x, executor="persistent"), odd(GRAPHS, x, executor="reference"))


def test_options():
    from weft._vertex.options import Options, current

    assert current() == Options(True, True, True)
    with weft.vertex.options(lazy=False), pytest.raises(KeyError), weft.vertex.options(fuse=False, lazy=None):
        assert current() == Options(False, False, True)
        raise KeyError
    assert current() == Options()
    context = weft.vertex.options(stream=False)
    with context, context:
        assert not current().stream
    assert current() == Options()
    for wrong in (0, 1, "no", 1.0):
        with pytest.raises(TypeError, match="lazy"):
            weft.vertex.options(lazy=wrong)
    with pytest.raises(TypeError):
        weft.vertex.options(False)


@executors
def test_options_change_nothing_but_rounding(executor):
    m, x = models.ChildSumTreeLSTM(3, 2).double(), rows(dtype=torch.float64, requires_grad=True)
    found = []
    for lazy in (True, False):
        for fuse in (True, False):
            with weft.vertex.options(lazy=lazy, fuse=fuse, stream=lazy):
                out = m(GRAPHS, x, executor=executor)
            found.append((out, *torch.autograd.grad(out.sin().sum(), [x, *m.parameters()])))
    for other in found[1:]:
        assert all(relative_error(a, b) < 1e-12 for a, b in zip(found[0], other, strict=True))
