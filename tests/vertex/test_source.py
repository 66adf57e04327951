"""The kernels that are written for CUDA when a vertex function is compiled, run on a processor beside the interpreter.

The body of each kernel is compiled by the C++ compiler with what vertex/exec/cuda/frontier.jit.cu declares around it,
and called for one thread after the other; products are torch's.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import weft
from torch import nn
from torch.nn import functional as F
from weft import _C, _ops
from weft._vertex.calls import prepare
from weft._vertex.compiler.steps import Kernel, Product
from weft._vertex.runtime.schedule import Kind, planned
from weft.vertex import models

from tests import emulated
from tests.common import relative_error
from tests.vertex.naive import random_dag, random_tree

CSRC = Path(__file__).resolve().parents[2] / "csrc"
ARRAYS = (
    "vertices", "gather", "first_edge", "edge_children", "edge_parents", "first_use", "users", "first_sum_use",
    "sum_use_edges",
)  # fmt: skip

PRELUDE = """
#include <cmath>
#include <cstring>
using std::exp; using std::log; using std::sqrt; using std::fabs; using std::log1p;
using std::erf; using std::sin; using std::cos;
#include "vertex/exec/cuda/frontier.jit.cuh"
namespace weft {
inline T sigmoid(T x) { return 1 / (1 + exp(-x)); }
inline T hyperbolic_tangent(T x) { return std::tanh(x); }
}
struct Float16 {
  _Float16 x;
  Float16(float y) : x(_Float16(y)) {}
  operator float() const { return float(x); }
};
struct BFloat16 {
  unsigned short bits;
  BFloat16(float y) {
    unsigned x;
    std::memcpy(&x, &y, 4);
    bits = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
  }
  operator float() const {
    const unsigned x = unsigned(bits) << 16;
    float y;
    std::memcpy(&y, &x, 4);
    return y;
  }
};
static constexpr int lane = 0, lanes = 1;
static T from_lane(T x, int) { return x; }
static T infinite() { return INFINITY; }
static T not_a_number() { return NAN; }
using Buffers = weft::vertex::Many<weft::vertex::BufferArgument, 1000>;
#define data(type, b) (static_cast<type*>(buffers.of[b].data))
#define stride(b) (buffers.of[b].stride)
"""

KERNEL = """
extern "C" void {name}(const weft::vertex::FrontierArguments& p, const Buffers& buffers, int first, int count) {{
  const int *vertices = p.vertices, *gather = p.gather, *first_edge = p.first_edge, *edge_children = p.edge_children,
            *edge_parents = p.edge_parents, *first_use = p.first_use, *users = p.users,
            *first_sum_use = p.first_sum_use, *sum_use_edges = p.sum_use_edges;
  const long long num_vertices = p.num_vertices;
  (void)vertices, (void)gather, (void)first_edge, (void)edge_children, (void)edge_parents, (void)first_use;
  (void)users, (void)first_sum_use, (void)sum_use_edges, (void)num_vertices;
  constexpr int columns = {width}, lanes = {lanes};
  for (long long index = first; index < first + count; ++index)
    for (int j = 0; j < lanes; ++j) {{ {body} }}
}}
"""


class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ARRAYS),
        ("num_vertices", ctypes.c_longlong),
    ]


class BufferArgument(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_longlong)]


class MatrixArgument(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("row", ctypes.c_longlong), ("column", ctypes.c_longlong)]


class TailArguments(ctypes.Structure):
    _fields_ = [
        ("frontier", Arguments),
        ("tasks", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("first", "count", "apart")),
        ("arrived", ctypes.c_void_p),
    ]


class PersistentArguments(ctypes.Structure):
    _fields_ = [
        ("frontier", Arguments),
        ("script", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        ("apart", ctypes.c_int),
    ]

    def drive(self, block: torch.Tensor, pass_: int) -> tuple[int, object]:
        """By the scripts in the block of a schedule. Groups, and what is to be held while the kernel runs."""
        groups, self.apart = _C.vertex.script_groups(block, pass_)
        self.script = block.data_ptr() + 4 * _C.vertex.script_offset(block, pass_)
        arrived = (ctypes.c_uint * (8 * (1 + groups)))()
        self.arrived = ctypes.addressof(arrived)
        return groups, arrived


def tail_library(compiled, matrices: int, backward: bool, folder: Path) -> ctypes.CDLL:
    """The kernel of the last frontiers on a processor."""
    folder.mkdir()
    doubles = any(b.dtype == "float64" for b in compiled.buffers)
    steps = compiled.program().tail_body(backward)
    lines = (
        f"WEFT_VERTEX_TYPE {'double' if doubles else 'float'}",
        f"WEFT_VERTEX_BUFFERS {len(compiled.buffers)}",
        f"WEFT_VERTEX_MATRICES {max(1, matrices)}",
        f"WEFT_VERTEX_STEPS {steps}",
    )
    (folder / "steps.h").write_text("".join(f"#define {line}\n" for line in lines))
    return emulated.build("vertex_tail", folder, optimise=False)


def library(compiled, folder: Path) -> tuple[ctypes.CDLL, dict[str, list[int]]]:
    """The kernels, for vertices with and without children, and the buffers of each."""
    doubles = any(b.dtype == "float64" for b in compiled.buffers)
    program = compiled.program()
    text, used = f"using T = {'double' if doubles else 'float'};" + PRELUDE, {}
    for backward, steps in enumerate(compiled.passes()):
        for i, step in enumerate(steps):
            for leaves in [False, True] if isinstance(step, Kernel) else []:
                name = f"step_{backward}_{i}_{int(leaves)}"
                each = 2 if step.width % 2 == 0 and not step.reduces else 1
                body, used[name] = program.kernel_body(bool(backward), i, leaves, each)
                assert set(used[name]) == step.buffers(compiled.tables)
                lanes = 1 if step.reduces else step.width // each
                text += KERNEL.format(name=name, width=step.width, lanes=lanes, body=body)
    (folder / "kernels.cpp").write_text(text)
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{CSRC}", "kernels.cpp", "-o", "kernels.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernels.so")), used


class Norms(weft.VertexFunction):
    """All that is no instruction of a model's: reductions, broadcasts, comparisons, rarer functions."""

    def __init__(self):
        super().__init__(state_size=4)
        self.norm, self.gru, self.message = nn.LayerNorm(4), nn.GRUCell(3, 4), nn.Linear(4, 1)

    def vertex(self, v):
        a = v.gather(0)
        s = v.gather_sum(lambda s, x: torch.softmax(s * x, 1) * self.message(s).exp(), a)
        h = self.gru(v.pull(), self.norm(s)) + F.gelu(a) * a.amax(1, keepdim=True) + torch.sin(s).clamp(-0.5, 0.5)
        h = torch.where(a > s, h, F.elu(F.softplus(a) - 1)) * torch.sqrt(s.square().mean(1, keepdim=True) + 1)
        h = torch.cos(h) + torch.log(s.abs() + 1) * torch.maximum(a, s).sign()
        v.scatter(h)
        v.push(h)


class SummedPairs(weft.VertexFunction):
    """Children's h and c are summed; a product follows of h alone."""

    def __init__(self):
        super().__init__(state_size=8)
        self.w, self.u = nn.Linear(3, 4, bias=False), nn.Linear(4, 8, bias=False)

    def vertex(self, v):
        x, s = self.w(v.pull()), v.gather_sum()
        i, o = (self.u(s[..., :4]) + torch.cat([x, x], -1)).sigmoid().split(4, -1)
        c = i * s[..., 4:] + x
        h = o * c.tanh()
        v.scatter(torch.cat([h, c], -1))
        v.push(h)


MODELS = {
    "pairs": SummedPairs,
    "treelstm": lambda: models.TreeLSTM(3, 4),
    "childsum": lambda: models.ChildSumTreeLSTM(3, 4),
    "treegru": lambda: models.TreeGRU(3, 4),
    "treefc": lambda: models.TreeFC(3),
    "rvnn": lambda: models.RvNN(3, 4),
    "norms": Norms,
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    ("name", "fuse", "dtype"),
    [
        *((name, fuse, "float64") for name in MODELS for fuse in (True, False)),
        *((name, True, "float16") for name in ("treelstm", "childsum", "norms")),
        *((name, True, "bfloat16") for name in ("pairs", "treegru", "treefc", "rvnn")),
    ],
)
def test_written_kernels_say_what_the_interpreter_does(name, fuse, dtype, tmp_path):
    check_written_kernels(MODELS[name], fuse, dtype, tmp_path, tail=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("treelstm", "treefc", "rvnn", "norms")),
        ("childsum", "float64"),
        ("treelstm", "bfloat16"),
    ],
)
def test_the_last_frontiers_in_one_kernel(name, dtype, tmp_path):
    check_written_kernels(MODELS[name], True, dtype, tmp_path, tail=True)


def check_written_kernels(
    make,
    fuse: bool,
    dtype: str,
    tmp_path: Path,
    tail: bool = False,
    blocks: int = 0,
    full: bool = False,
    seed: int = 7,
    groups: int = 1,
    children: list[list[list[int]]] | None = None,
) -> None:
    """Kernels of every step, and with `tail` all steps of the second frontier and those after it in one, with `blocks`
    those of all frontiers in one that scripts of so many groups drive, on a processor beside the operator. `full`: no
    vertex with children lacks one."""
    rng = random.Random(4)
    type = getattr(torch, dtype)
    cell = make().to(type)
    if children is None:
        children = [random_tree(rng, 5), random_dag(rng, 7, 2), [[]], *([[[], [], [0, 1], [2]]] * 18 if tail else [])]
    if full:
        children = [[[], [], [0, 1]], [[], [], [], [1, 0], [3, 2], [4, 3]], [[]], [[], [], [0, 1], [2, 2]]]
    graphs = weft.Graphs.from_children(children)
    types = {"leaf": 0, "inner": 1} if isinstance(cell, weft.VertexFunctions) else None
    if types is not None:
        graphs = graphs.with_types(["inner" if below else "leaf" for tree in children for below in tree])
    x = torch.randn(graphs.num_vertices, 3, dtype=type, requires_grad=True)
    with weft.vertex.options(fuse=fuse):
        call = prepare(cell, graphs, x, "batched")
    batched, traces = call.compiled, [f.trace for f in call.functions]
    plan, compiled = batched.plan, batched.plan.frontiers
    kernels, used = library(compiled, tmp_path)
    places = planned(graphs, tuple(Kind(t.slots_gathered, t.takes_all_children) for t in traces), types, groups)
    n, m = graphs.num_vertices, places.core.num_edges

    leaves = sum(task.count for task in places.tasks if task.level == 0)
    sizes = {
        "rows": n,
        "inner": n - leaves,
        "edges": m,
        "input": n,
        "layer": n,
        "layer_grad": n,
        "output": n,
        "output_grad": n,
        "input_grad": n,
        "vector": 1,
    }
    callers: dict[tuple[str, int], torch.Tensor] = {}  # that several functions may read

    def tensor_of(b) -> torch.Tensor:
        made = torch.randn(sizes[b.space], b.width).to(getattr(torch, b.dtype))
        shared = b.space in ("input", "output_grad", "vector")
        return callers.setdefault((b.space, b.index), made) if shared else made

    tensors = [tensor_of(b) for b in compiled.buffers]
    shapes = [traces[f].program.symbols[s].shape for f, s in plan.given.matrices]
    matrices = [(torch.randn(shape) * max(1, shape[0] / 16) ** -0.5).to(type) for shape in shapes]
    # Rows of other functions, and slots without a child, are read as zeros.
    for b, t in zip(compiled.buffers, tensors, strict=True):
        t.mul_(not b.scattered and (types is None or b.space not in ("rows", "inner", "edges", "output")))

    def of(space: str) -> list[torch.Tensor]:
        found = {b.index: t for b, t in zip(compiled.buffers, tensors, strict=True) if b.space == space}
        return [found[index] for index in sorted(found)]

    given = of("input"), matrices, of("vector")
    block = places.block()
    shared = (block, block, batched.program)
    results = torch.ops.weft.vertex_frontiers(*given, *shared, n, n - leaves, m)
    outputs, saved = results[: len(plan.outputs)], results[len(plan.outputs) :]
    gradients = torch.ops.weft.vertex_frontiers_backward(
        of("output_grad"), *given, saved, *shared, *batched.program.gradients(), True
    )

    arguments = Arguments(num_vertices=n)
    for name in ARRAYS:
        setattr(arguments, name, places.array(name).data_ptr())

    def rows_of(buffer: int, rows: slice) -> torch.Tensor:
        before = leaves if compiled.buffers[buffer].space == "inner" else 0
        return tensors[buffer][rows.start - before : rows.stop - before]

    def buffer_argument(b: int) -> BufferArgument:
        before = leaves * tensors[b].stride(0) if compiled.buffers[b].space == "inner" else 0
        stride = 0 if compiled.buffers[b].space == "vector" else tensors[b].stride(0)
        return BufferArgument(tensors[b].data_ptr() - before * tensors[b].element_size(), stride)

    def run_tail(backward: bool, first: int) -> None:
        arguments, count = TailArguments(), len(places.tasks) - first
        for name in ARRAYS:
            setattr(arguments.frontier, name, places.array(name).data_ptr())
        arguments.frontier.num_vertices = n
        held, buffers = [], (BufferArgument * len(tensors))(*map(buffer_argument, range(len(tensors))))
        given = (MatrixArgument * max(1, len(matrices)))()
        for i, m in enumerate(matrices):
            # As those of a linear layer, which come transposed, and as others.
            held.append(m.t().contiguous().t() if i % 2 == 0 else m.contiguous())
            given[i] = MatrixArgument(held[i].data_ptr(), *held[i].stride())
        arrived = ctypes.c_uint(0)
        arguments.arrived = ctypes.addressof(arrived)
        arguments.tasks, arguments.count = places.array("tasks").data_ptr(), count
        arguments.first, arguments.apart = (len(places.tasks) - 1, -1) if backward else (first, 1)
        kernel = tail_library(compiled, len(matrices), backward, tmp_path / f"tail{int(backward)}")
        kernel.run(ctypes.byref(arguments), buffers, given, 2, 7)

    def here(step, when: str) -> bool:
        return isinstance(step, (Kernel, Product)) and step.when == when

    def run_script(backward: bool) -> None:
        program = batched.program
        block = _C.vertex.scripted(places.core, program, blocks, False, False)
        assert _C.vertex.script_fault(program, block) == ""
        for b in _C.vertex.script_published(program, block, int(backward)):
            tensors[b].view(torch.int32 if tensors[b].element_size() == 4 else torch.int16).fill_(-1)
        found, shared_bytes, count = _C.vertex.persistent_source(program, int(backward), blocks, False, len(matrices))
        folder = tmp_path / f"script{int(backward)}"
        folder.mkdir()
        (folder / "steps.h").write_text("".join(f"#define {d.replace('=', ' ', 1)}\n" for d in found))
        kernel = emulated.build("vertex_persistent", folder, optimise=False)
        arguments = PersistentArguments()
        for name in ARRAYS:
            setattr(arguments.frontier, name, places.array(name).data_ptr())
        arguments.frontier.num_vertices = n
        groups, arrived = arguments.drive(block, int(backward))
        given = (MatrixArgument * max(1, len(matrices)))()
        held = [m.t().contiguous().t() if i % 2 == 0 else m.contiguous() for i, m in enumerate(matrices)]
        for i, m in enumerate(held):
            given[i] = MatrixArgument(m.data_ptr(), *m.stride())
        buffers = (BufferArgument * len(tensors))(*map(buffer_argument, range(len(tensors))))
        size = ctypes.c_long(shared_bytes)
        kernel.copied_bytes.restype = ctypes.c_longlong
        copied = kernel.copied_bytes()
        kernel.run(ctypes.byref(arguments), buffers, given, None, None, count * groups, size, seed)
        del arrived
        of_group = [read for _, _, read in _C.vertex.partition(program, int(backward), blocks)[1]]
        products = [s for s in compiled.passes()[backward] if isinstance(s, Product) and s.when == "frontiers"]
        widths = {compiled.buffers[b].width for s in products for b in (s.source, s.target)}
        if dtype == "float32" and all(width % 4 == 0 for width in widths):  # others are not copied
            assert kernel.copied_bytes() - copied == groups * sum(of_group)

    def run(backward: bool) -> None:
        steps = compiled.passes()[backward]
        last = next(i for i, task in enumerate(places.tasks) if task.level > 0) if tail else len(places.tasks)
        run_once(steps, backward, "before")
        if blocks:
            run_script(backward)
            last = 0
        if tail and backward:
            run_tail(backward, last)
        for task in places.tasks[:last][:: -1 if backward else 1]:
            for i, step in enumerate(steps):
                if here(step, "frontiers") and step.function == task.kind:
                    run_step(i, step, backward, task)
        if tail and not backward:
            run_tail(backward, last)
        run_once(steps, backward, "after")

    def run_once(steps, backward: bool, when: str) -> None:
        for i, step in enumerate(steps):
            for task in places.tasks if here(step, when) else []:
                if step.function == task.kind:
                    run_step(i, step, backward, task)

    def run_step(i, step, backward: bool, task) -> None:
        first, count = (task.first_edge, task.num_edges) if step.edges else (task.first, task.count)
        rows = slice(first, first + count)
        if isinstance(step, Kernel):
            name = f"step_{int(backward)}_{i}_{int(task.level == 0)}"
            buffers = (BufferArgument * len(used[name]))(*map(buffer_argument, used[name]))
            getattr(kernels, name)(ctypes.byref(arguments), buffers, first, count)
        elif not step.skips_leaves or task.level > 0:
            matrix = matrices[step.matrix].T if step.transposed else matrices[step.matrix]
            wide = torch.float64 if type == torch.float64 else torch.float32  # what is stored is rounded once
            product = rows_of(step.source, rows).to(wide) @ matrix.to(wide)
            rows_of(step.target, rows)[:] = product if step.bias < 0 else product + tensors[step.bias]
        elif not backward and compiled.buffers[step.target].space == "rows":  # products read it
            tensors[step.target][rows] = 0

    run(False)
    bound = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    for found, want in zip(of("output"), outputs, strict=True):
        assert relative_error(found, want) < bound
    for t in (*of("input_grad"), *of("layer_grad")):
        t.zero_()
    run(True)
    assert of("input_grad")
    for found, want in zip(of("input_grad"), gradients, strict=False):
        assert relative_error(found, want) < bound


@pytest.mark.skipif(not _ops.WITH_CUDA, reason="built for the CPU alone")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float") for name in MODELS), ("treelstm", "double"), ("norms", "double")]
)
def test_written_kernels_compile_for_cuda(name, dtype, tmp_path, monkeypatch):
    if _C.jit.why_unavailable() is not None:
        pytest.skip(_C.jit.why_unavailable())
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    cell = MODELS[name]()
    graphs = weft.Graphs.from_children([[[], [], [0, 1]]]).with_types(["leaf", "leaf", "inner"])
    compiled = prepare(cell, graphs, torch.randn(3, 3, requires_grad=True), "batched").compiled.plan.frontiers
    # Of the cell with all that is rare, which takes long, one type alone and the other in one kernel, the tail.
    for defines in [] if (name, dtype) == ("norms", "double") else defines_of(compiled, dtype):
        code, _ = _C._testing.jit_compile("vertex/exec/cuda/frontier.jit.cu", defines, 90)
        assert b"vertex_frontier" in code
    for backward in () if (name, dtype) == ("norms", "float") else (False, True):
        steps = compiled.program().tail_body(backward)
        sizes = [f"WEFT_VERTEX_BUFFERS={len(compiled.buffers)}", "WEFT_VERTEX_MATRICES=100"]
        defines = [f"WEFT_VERTEX_TYPE={dtype}", *sizes, f"WEFT_VERTEX_STEPS={steps}"]
        code, _ = _C._testing.jit_compile("vertex/exec/cuda/tail.jit.cu", defines, 90)
        assert b"vertex_tail" in code


def defines_of(compiled, dtype: str) -> list[list[str]]:
    """What the launcher compiles each kernel with."""
    found, program = [], compiled.program()
    for backward, steps in enumerate(compiled.passes()):
        for i, step in enumerate(steps):
            if isinstance(step, Kernel):
                each = 4 if step.width % 4 == 0 and not step.reduces else 1
                for leaves in (False, True):
                    body, used = program.kernel_body(bool(backward), i, leaves, each)
                    lanes = 32 if step.reduces else step.width // each
                    sizes = {"BUFFERS": len(used), "WIDTH": step.width, "LANES": lanes}
                    names = {"TYPE": dtype, **sizes, "BODY": body}
                    found.append([f"WEFT_VERTEX_{name}={value}" for name, value in names.items()])
    return found
