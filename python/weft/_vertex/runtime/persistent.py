"""The persistent executor: all frontiers of a call, forward or backward, in one kernel that a script drives.

The scripts follow the schedule in its block, which tells the operators of the batched executor to run them; a whole
training step is a kernel of its own. csrc/vertex/exec/script.h.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..._base import costs as gpu_costs
from ..._C import vertex as _C
from ..compiler.steps import Product
from ..graphs import Graphs
from . import batched
from .call_cache import Ready
from .schedule import Schedule, Scripted, used
from .training import Launched, Operands, Request

__all__ = [
    "Script",
    "Shape",
    "is_faster",
    "obstacle",
    "operands",
    "scripted",
    "shape",
    "train",
    "training_obstacle",
    "trains_faster",
]

FORWARD, BACKWARD, TRAINING = range(3)
"""As csrc/vertex/program/partition.h."""
_UPDATES = {"sgd": 1, "adam": 2}


class _ByIdentity:
    """Of the latest few programs."""

    MOST = 16

    def __init__(self) -> None:
        self._kept: dict[int, tuple[object, object]] = {}

    def get(self, program: object) -> object:
        found = self._kept.get(id(program))
        return None if found is None else found[1]

    def __setitem__(self, program: object, value: object) -> None:
        self._kept.pop(id(program), None)
        self._kept[id(program)] = program, value
        for oldest in [*self._kept][: -self.MOST]:
            self._kept.pop(oldest, None)


_training_obstacles, _row_costs, _geometries = _ByIdentity(), _ByIdentity(), _ByIdentity()


@dataclass(frozen=True)
class Script:
    """What drove a call."""

    program: torch.ScriptObject
    schedule: Callable[[], Scripted]

    def __str__(self) -> str:
        return _C.script_text(self.program, self.schedule().block())


@dataclass(frozen=True)
class Shape:
    """The kernels of a call as they are launched."""

    blocks: int
    group: int
    partitions: tuple[tuple[str, str, int], ...]
    registers: int
    shared_bytes: int
    instructions: int
    waits: int
    launches: int


def obstacle(compiled: batched.Batched, device: torch.device) -> str | None:
    """Why a compiled call on `device` does not run in persistent kernels."""
    if device.type != "cuda":
        return f"the persistent executor needs a CUDA device, not {device.type}"
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return f"persistent kernels need compute capability 8.0, the device has {properties.major}.{properties.minor}"
    matrices = len(compiled.plan.given.matrices)
    limit = properties.shared_memory_per_block_optin
    why = _C.persistent_obstacle(compiled.program, properties.multi_processor_count, limit, matrices)
    if why:
        return why
    with torch.cuda.device(device):
        for which in (FORWARD, BACKWARD):
            if not _C.persistent_shape(compiled.program, which, properties.multi_processor_count, matrices)[3]:
                return "the blocks of a persistent kernel are not all resident"
    return None


def is_faster(compiled: batched.Batched, graphs: Graphs, device: torch.device) -> bool:
    """Whether persistent kernels are expected to take less time than the batched executor, where they run."""
    if device.type != "cuda" or compiled.type.state.dtype != torch.float32:
        return False
    return graphs.num_vertices * _multiply_adds(compiled) < _most(device, "persistent_multiply_adds")


def trains_faster(compiled: batched.Batched, call: Ready) -> bool:
    """Whether one kernel is expected to take less time than the loop for these graphs."""
    rows = call.graphs.num_vertices
    return rows * _multiply_adds(compiled) < _most(call.device, "training_multiply_adds")


@functools.cache
def _most(device: torch.device, name: str) -> float:
    """Up to how many multiply-adds, of all vertices in the frontiers forward, persistent kernels were the faster."""
    return gpu_costs.of(device.index).tables.get("vertex.choice", {}).get(name, [0.0])[0]


def _multiply_adds(compiled: batched.Batched) -> float:
    """Of the products in the frontiers, for a row, of several functions' on average."""
    found = _row_costs.get(compiled.program)
    if found is None:
        frontiers = compiled.plan.frontiers
        products = (s for s in frontiers.forward if isinstance(s, Product) and s.when == "frontiers")
        total = sum(frontiers.buffers[s.source].width * frontiers.buffers[s.target].width for s in products)
        found = total / frontiers.functions
        _row_costs[compiled.program] = found
    return found


class Geometry(NamedTuple):
    """How blocks are grouped: each group has one copy of the weights, and graphs of its own."""

    most_blocks: int
    """Of a group; how many have columns follows from the widths."""
    groups: int
    row: float
    """Microseconds of a group for up to 8 rows of a frontier, in all passes."""


_GAIN = 1.2
"""How many times as fast several groups are to be."""


def geometries(compiled: batched.Batched, device: torch.device, form: tuple | None = None) -> list[Geometry]:
    """Those that fit on the device, of all blocks first; of a training step with what the kernel is made for."""
    known = _geometries.get(compiled.program)
    if known is None:
        known = _geometries[compiled.program] = {}
    if (device, form) not in known:
        known[device, form] = _all_geometries(compiled, device, form)
    return known[device, form]


def _all_geometries(compiled: batched.Batched, device: torch.device, form: tuple | None) -> list[Geometry]:
    processors, limit = _processors(device), torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    passes = (TRAINING,) if form else (FORWARD, BACKWARD)
    found = []
    # Where costs do not say what groups gain, there is one.
    costs = gpu_costs.of(device.index).tables.get("vertex.persistent")
    for parts in (1, 2, 4, 8, 16) if costs else (1,):
        most = processors // parts
        blocks = max(_C.partition(compiled.program, which, most)[0] for which in passes)
        groups = processors // blocks
        if found and groups <= found[-1].groups:
            continue
        if form:
            why = _C.training_obstacle(compiled.program, most, limit, *form)
        else:
            why = _C.persistent_obstacle(compiled.program, most, limit, len(compiled.plan.given.matrices))
        if found and why:
            break
        found.append(Geometry(most, groups if found else 1, _row_us(compiled, blocks, device) if costs else 0.0))
    return found


def _number(device: torch.device, name: str) -> float:
    """Of the costs: microseconds of a frontier each way without its products (`level`), of the partial sums of a
    product of 8 rows (`product`), of a 16 x 8 x 8 multiplication of a multiprocessor's tensor cores
    (`multiplication`), and of 1000 bytes of rows that a block reads in L2 (`kilobyte`)."""
    return gpu_costs.of(device.index).number("vertex.persistent", name)


def _row_us(compiled: batched.Batched, blocks: int, device: torch.device) -> float:
    """Of products with 8 rows: multiplications of tensor cores, rows from L2, and what it takes to begin."""
    number = functools.partial(_number, device)
    frontiers, total = compiled.plan.frontiers, 0.0
    for step in (*frontiers.forward, *frontiers.backward):
        if not isinstance(step, Product) or step.when != "frontiers":
            continue
        source, columns = frontiers.buffers[step.source], frontiers.buffers[step.target].width
        size, terms = (4, 3) if source.dtype == "float32" else (2, 1)
        multiplications = -(-source.width // 16) * -(-columns // (16 * blocks)) * 2 * terms
        total += number("product") + multiplications * number("multiplication")
        total += 8e-3 * source.width * size * number("kilobyte")
    return total


def geometry(compiled: batched.Batched, graphs: Graphs, device: torch.device, form: tuple | None = None) -> Geometry:
    """What a call on these graphs takes, by sizes alone: several groups where they are expected to gain enough."""
    known = geometries(compiled, device, form)
    if len(known) == 1:
        return known[0]
    inner, levels = graphs.num_edges / max(1, graphs.num_slots), graphs.num_levels
    level = _number(device, "level")

    def cost(g: Geometry) -> float:
        # A few graphs do not fill the groups evenly.
        most = g.groups if graphs.num_graphs >= 4 * g.groups else 0.4 + 0.6 * min(g.groups, graphs.num_graphs)
        return levels * (2 * level + g.row) + inner / (8 * most) * g.row

    best = min(known, key=cost)
    return best if cost(best) * _GAIN < cost(known[0]) else known[0]


def scripted(
    compiled: batched.Batched, graphs: Graphs, schedule: Callable[[int], Schedule], device: torch.device
) -> Scripted:
    """The schedule of so many groups with the scripts of both passes, as the next graphs' goes to the device, too."""
    chosen = geometry(compiled, graphs, device)
    found = schedule(chosen.groups)
    used(found, functools.partial(_send, weakref.ref(compiled), device))
    return found.scripted(compiled.program, chosen.most_blocks)


def _send(
    compiled: weakref.ref[batched.Batched], device: torch.device, graphs: Graphs, plan: Callable[..., Schedule]
) -> None:
    found = compiled()
    if found is None:
        return
    chosen = geometry(found, graphs, device)
    planned = plan(chosen.groups)
    if graphs.device == device:
        planned.scripted(found.program, chosen.most_blocks).block(device)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shape(call: Ready) -> Shape:
    """Of a call that runs so."""
    compiled, device = call.compiled, call.device
    chosen, matrices = geometry(compiled, call.graphs, device), len(compiled.plan.given.matrices)
    most, groups = chosen.most_blocks, min(chosen.groups, call.graphs.num_graphs)
    passes = (FORWARD, BACKWARD) if compiled.plan.backward and call.trains else (FORWARD,)
    with torch.cuda.device(device):
        shapes = [_C.persistent_shape(compiled.program, which, most, matrices) for which in passes]
    partitions = []
    for which in passes:
        blocks, kept = _C.partition(compiled.program, which, most)
        for number, size in kept:
            function, symbol = compiled.plan.given.matrices[number]
            name = compiled.functions[function].trace.program.symbols[symbol].name
            partitions.append((name, "shared", size * blocks))
    block = scripted(compiled, call.graphs, call.schedule, device).block()
    instructions, waits = _C.script_counts(compiled.program, block)
    return Shape(
        blocks=max(s[0] for s in shapes) * groups,
        group=max(s[0] for s in shapes),
        partitions=tuple(partitions),
        registers=max(s[1] for s in shapes),
        shared_bytes=max(s[2] for s in shapes),
        instructions=instructions,
        waits=waits,
        launches=len(passes),
    )


def training_obstacle(compiled: batched.Batched, call: Ready, head: nn.Linear | None, loss: str) -> str | None:
    """Why a whole training step of a call does not run in one kernel, whatever the graphs.

    Args:
        compiled: the call's functions, with nothing left to torch after the frontiers.
        call: that.
        head: what makes scores of what is pushed.
        loss: ``cross_entropy`` or ``mse``.
    """
    if call.device.type != "cuda":
        return f"the persistent executor needs a CUDA device, not {call.device.type}"
    classes = (*call.outputs[0].shape, 0)[0] if head is None else head.out_features
    key = call.device, call.trains, loss == "cross_entropy", head is not None, classes
    known = _training_obstacles.get(compiled.program)
    if known is None or known[0] != key:
        known = key, _training_obstacle(compiled, call, *key[2:])
        _training_obstacles[compiled.program] = known
    return known[1]


def _training_obstacle(
    compiled: batched.Batched, call: Ready, cross_entropy: bool, head: bool, classes: int
) -> str | None:
    given = compiled.plan.given
    for f, part, before in zip(compiled.functions, compiled.plan.parts, compiled.before, strict=True):
        program = f.trace.program
        for operation in (program.operations[i] for i in before):  # what reads the results of one comes after it
            if any(program.symbols[s].kind == "parameter" for s in operation.reads()):
                return f"{operation.op} of a parameter is before the frontiers"
        if part.after:
            return f"{program.operations[part.after[0]].op} is after the frontiers"
    if len(call.outputs[0].shape) != 1:
        return f"a row of what is pushed has the shape {(*call.outputs[0].shape,)}"
    if not compiled.plan.backward:
        return "nothing asks for a gradient"
    if any(part.pushes and not part.direct(0) for part in compiled.plan.parts):
        return "what is pushed does not come from the frontiers"
    names = [_name(compiled, *m) for m in (*given.matrices, *given.vectors)]
    if not call.tensors.keys() >= {*names}:
        return "not all it reads are parameters"
    tensors = [call.tensors[name] for name in names]
    if any(t.dtype != torch.float32 for t in tensors):
        return "it is not float32"
    # A kernel finds the gradients of the two apart, and an update takes one.
    if len({*map(id, tensors)}) < len(tensors):
        return "a parameter is both a matrix and a vector"
    properties = torch.cuda.get_device_properties(call.device)
    most, limit = properties.multi_processor_count, properties.shared_memory_per_block_optin
    form = len(given.matrices), len(given.vectors), cross_entropy, head, classes
    why = _C.training_obstacle(compiled.program, most, limit, *form)
    if why:
        return why
    with torch.cuda.device(call.device):
        shape = _C.persistent_shape(compiled.program, TRAINING, most, *form)
    return None if shape[3] else "the blocks of a persistent kernel are not all resident"


def _name(compiled: batched.Batched, function: int, symbol: int) -> str:
    return compiled.functions[function].trace.program.symbols[symbol].name


def operands(compiled: batched.Batched, call: Ready, head: nn.Linear | None) -> Operands:
    """What a training step takes of a call and its head."""
    given, (_, of_matrices, of_vectors) = compiled.plan.given, compiled.program.gradients()
    inputs = []
    for function, symbol in given.inputs:
        trace = compiled.functions[function].trace
        pulls = (i for i, o in enumerate(trace.program.operations) if o.op == "pull" and symbol in o.results)
        pull = next(pulls, None)
        inputs.append(None if pull is None else trace.calls[pull].args[0])
    matrices = [call.tensors[_name(compiled, *m)] for m in given.matrices]
    vectors = [call.tensors[_name(compiled, *v)] for v in given.vectors]
    heads = (None, None) if head is None else (head.weight, head.bias)
    # The head's come last; without matrices there is one that is none.
    numbers = {id(t): i for i, t in enumerate((*(matrices or [None]), *vectors, *heads)) if t is not None}
    found = (*(matrices[i] for i in of_matrices), *(vectors[i] for i in of_vectors), *heads)
    reached = frozenset(id(t) for t in found if t is not None)
    return Operands(compiled, inputs, matrices, vectors, numbers, reached)


def _plan(
    compiled: weakref.ref[batched.Batched],
    device: torch.device,
    form: tuple,
    graphs: Graphs,
    plan: Callable[..., Schedule],
) -> None:
    """What is planned of the next graphs goes to the device with its script."""
    found = compiled()
    if found is not None:
        plan(geometry(found, graphs, device, form).groups)


def train(call: Ready, request: Request) -> Launched | None:
    """Launch forward, loss, backward and updates on the current stream; nothing waits. None where the blocks are no
    longer all resident, as where processes share a device: then nothing was done."""
    compiled, names, matrices, vectors, numbers, _ = request.operands
    classes = call.outputs[0].shape[0] if request.weight is None else request.weight.shape[0]
    form = len(matrices), len(vectors), request.loss == "cross_entropy", request.weight is not None, classes
    chosen = geometry(compiled, call.graphs, call.device, form)
    schedule = call.schedule(chosen.groups)
    used(schedule, functools.partial(_plan, weakref.ref(compiled), call.device, form))
    given = [None if name is None else call.rows[name].detach() for name in names]
    if None in names:
        with torch.no_grad():
            given = batched.made_before(compiled, schedule.sizes[0], call.rows)
    inputs = []
    for x in given:
        x = x.float() if x.dtype == torch.bool else x  # 0 and 1 in the frontiers
        inputs.append(x if x.dim() == 2 else x.reshape(len(x), -1))
    updates = [
        (numbers[id(u.parameter)], _UPDATES[u.kind], u.parameter, u.first, u.second, list(u.numbers))
        for u in request.updates
    ]
    roots = None if request.roots is None else request.roots._core
    launched = _C.train(
        request.turns, compiled.program, schedule.core, chosen.most_blocks, inputs, matrices, vectors, request.weight,
        request.bias, request.loss == "cross_entropy", classes, roots, request.targets, request.ignore_index,
        updates, request.refused,
    )  # fmt: skip
    return None if launched is None else Launched(launched.numbers, launched)
