"""The persistent executor: all frontiers of a call, forward or backward, in one kernel that a script drives.

The scripts follow the schedule in its block, which tells the operators of the batched executor to run them; a whole
training step is a kernel of its own. csrc/vertex/exec/script.h.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..._base import costs as gpu_costs
from ..._base.torch_private import fp32_precision
from ..._C import vertex as _C
from .. import tuned
from ..compiler.steps import Product
from ..graphs import Graphs
from . import batched
from .call_cache import Ready
from .schedule import Schedule, Scripted, send, used
from .training import Launched, Operands, Request, Update

__all__ = [
    "Script",
    "Shape",
    "compile_for",
    "expectation",
    "geometries",
    "is_faster",
    "obstacle",
    "operands",
    "row_amounts",
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


_training_obstacles, _row_costs, _geometries, _senders = (_ByIdentity() for _ in range(4))


class Script(NamedTuple):
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
    weight_bytes: int


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
    return _not_resident(compiled, device, None)


def _not_resident(compiled: batched.Batched, device: torch.device, form: tuple | None) -> str | None:
    if any(_resident_groups(compiled, device, form, g) for g in geometries(compiled, device, form)):
        return None
    return "the blocks of a persistent kernel are not all resident"


class Geometry(NamedTuple):
    """How blocks are grouped: each group has one copy of the weights, and graphs of its own."""

    parts: int
    """Of the processors, each of which a group has at most."""
    most_blocks: int
    """Of a group; how many have columns follows from the widths."""
    groups: int
    forward: float
    """Microseconds of a group for up to 8 rows of a frontier."""
    backward: float
    few_forward: float
    """For up to 4 rows."""
    few_backward: float


_PARTS = (1, 2, 4, 8, 16)
_GAIN = 1.2
"""How many times as fast several groups are to be."""


class _Known(NamedTuple):
    """Of a program on a device."""

    geometries: list[Geometry]
    """Those that fit, of all blocks first. Without those that were found not to be resident."""
    expected: _C.Expected
    resident: dict[int, int]
    """By the parts of those that were found to be resident, how many launches had been refused by then."""
    compiled: set[int]
    """The parts of those whose kernels are there."""
    costed: bool
    """Whether the GPU's costs tell of executors, for the type of the program's products."""


def is_faster(compiled: batched.Batched, graphs: Graphs, device: torch.device, trains: bool) -> bool:
    """Whether persistent kernels are expected to take less time than the batched executor, where they run: in a CUDA
    graph that is captured of the device, else of the host and the device."""
    times = _expected_us(compiled, graphs, device, trains)
    return times is not None and times[0] < times[1]


def _expected_us(
    compiled: batched.Batched, graphs: Graphs, device: torch.device, trains: bool
) -> tuple[float, float] | None:
    """Microseconds of persistent kernels and of the batched executor, None where nothing is known."""
    if device.type != "cuda" or graphs.num_vertices == 0:
        return None
    known = _known(compiled, device, None)
    if not known.costed:
        return None
    return _times(known.expected, graphs, trains, _C.captures(device.index))


def _times(expected: _C.Expected, graphs: Graphs, trains: bool, captured: bool) -> tuple[float, float]:
    """Of :func:`_expected_us`, kept for all copies of the graphs."""
    key = id(expected), trains, captured
    kept = graphs._expected.get(key)
    if kept is None:
        core, chosen = graphs._core, _number(expected, graphs)
        times = expected.persistent(core, chosen, trains, captured), expected.batched(core, trains, captured)
        kept = graphs._expected[key] = expected, times
    return kept[1]


def _number(expected: _C.Expected, graphs: Graphs) -> int:
    """Of the geometry that is expected to take the least time, likewise."""
    kept = graphs._expected.get(id(expected))
    if kept is None:  # with what it is of, whose number no other gets then
        kept = graphs._expected[id(expected)] = expected, expected.geometry(graphs._core)
    return kept[1]


def expectation(compiled: batched.Batched, graphs: Graphs, device: torch.device, trains: bool) -> str:
    """What is expected of both executors, in words; nothing where nothing is known."""
    times = _expected_us(compiled, graphs, device, trains)
    if times is None:
        return ""
    where = "in a CUDA graph" if _C.captures(device.index) else "by the host or the device"
    return f"the frontiers are expected to take {times[0]:.3g} us {where}, batched {times[1]:.3g} us"


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


def geometries(compiled: batched.Batched, device: torch.device, form: tuple | None = None) -> list[Geometry]:
    """Those that fit on the device, of all blocks first; of a training step with what the kernel is made for."""
    return _known(compiled, device, form).geometries


def _of_program(compiled: batched.Batched) -> dict[tuple, _Known]:
    """What is known of a program, by device, form and precision; another thread may know of newer programs alone."""
    known = _geometries.get(compiled.program)
    if known is None:
        known = _geometries[compiled.program] = {}
    return known


def _known(compiled: batched.Batched, device: torch.device, form: tuple | None) -> _Known:
    known, key = _of_program(compiled), (device, form, fp32_precision("cuda", "matmul"))
    found = known.get(key)
    if found is None:
        found = known[key] = _found(compiled, device, _all_geometries(compiled, device, form))
        if form is not None:  # before a training begins: none of them is to be compiled in the middle of it
            _compile(compiled, device, form, found.geometries)
    return found


def _found(compiled: batched.Batched, device: torch.device, all_of_them: list[Geometry]) -> _Known:
    tables, (own, other) = gpu_costs.of(device.index).tables, _tables(compiled)
    # Where costs do not say what groups gain, there is one.
    level = gpu_costs.of(device.index).number(own, "level") if own in tables else 0.0
    costed = {own, other, "vertex.host"} <= tables.keys()
    batched_costs, host_costs = _costs_of_batched(other, device) if costed else ([0.0] * len(BATCHED), [0.0] * 3)
    rows = [(g.groups, [g.forward, g.backward, g.few_forward, g.few_backward]) for g in all_of_them]
    expected = _C.Expected(compiled.program, rows, level, _GAIN, batched_costs, host_costs)
    return _Known(all_of_them, expected, {}, set(), costed)


def _tables(compiled: batched.Batched) -> tuple[str, str]:
    """The names of the costs of persistent kernels and of the batched executor, by the type of the products in the
    frontiers. Of several types nothing was measured: no table has that name."""
    frontiers = compiled.plan.frontiers
    products = (s for s in frontiers.forward if isinstance(s, Product) and s.when == "frontiers")
    narrow = {frontiers.buffers[s.source].dtype != "float32" for s in products}
    end = ".mixed" if len(narrow) > 1 else ".half" if True in narrow else ""
    return f"vertex.persistent{end}", f"vertex.batched{end}"


BATCHED = ("pass", "meeting", "tail", "launch", "product", "weights")
"""Costs of the batched executor: microseconds of a pass, of a meeting of all blocks, of 10^9 multiply-adds beside it,
of a launch, of 10^9 multiply-adds of a large product, and of 10^6 bytes of weights that a product reads; as
csrc/vertex/exec/expected.h has them."""


def _costs_of_batched(table: str, device: torch.device) -> tuple[list[float], list[float]]:
    """Those, and of the host: of a call and its backward pass, of a launch, and of a task of a script."""
    number = gpu_costs.of(device.index).number
    of_batched = [number(table, name) for name in BATCHED]
    if table == "vertex.batched" and fp32_precision("cuda", "matmul") == "tf32":
        faster = number("products", "tf32_teraflop") / number("products", "float_teraflop")
        of_batched[BATCHED.index("product")] *= faster
    return of_batched, [number("vertex.host", name) for name in ("call", "launch", "task")]


def _all_geometries(compiled: batched.Batched, device: torch.device, form: tuple | None) -> list[Geometry]:
    processors, limit = _processors(device), torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    passes = (TRAINING,) if form else (FORWARD, BACKWARD)
    found: list[Geometry] = []
    costs = gpu_costs.of(device.index).tables.get(_tables(compiled)[0])
    for parts in _PARTS if costs else (1,):
        most = processors // parts
        blocks = max(_C.partition(compiled.program, which, most)[0] for which in passes)
        groups = processors // blocks
        if found and groups <= found[-1].groups:
            continue
        # Several groups are worth it where each keeps all weights.
        if form:
            why = _C.training_obstacle(compiled.program, most, limit, *form)
        else:
            matrices = len(compiled.plan.given.matrices)
            why = _C.persistent_obstacle(compiled.program, most, limit, matrices)
        if found and why:
            break
        rows = _row_us(compiled, most, device) if costs else [0.0] * 4
        found.append(Geometry(parts, most, groups if found else 1, *rows))
    return found


PERSISTENT = ("level", "product", "multiplication", "kilobyte", "few")
"""Costs of persistent kernels: microseconds of a frontier each way without its products, of the partial sums of a
product, of a 16 x 8 x 8 multiplication of a multiprocessor's tensor cores, of 1000 bytes of rows that a block reads in
L2, and of 1000 bytes of weights that it multiplies a few rows by without them."""


def _row_us(compiled: batched.Batched, most_blocks: int, device: torch.device) -> list[float]:
    """Of products with 8 rows, forward and backward, and with a few."""
    number, table = gpu_costs.of(device.index).number, _tables(compiled)[0]
    amounts = row_amounts(compiled, most_blocks)
    return [sum(n * number(table, name) for name, n in amount.items()) for amount in amounts]


def row_amounts(compiled: batched.Batched, most_blocks: int) -> list[dict[str, float]]:
    """How often a group of at most so many blocks pays each of the costs for up to 8 rows of a frontier, forward and
    backward, and for up to 4."""
    frontiers = compiled.plan.frontiers
    tf32 = fp32_precision("cuda", "matmul") == "tf32"

    def of(steps: Sequence[object], which: int, few: bool) -> dict[str, float]:
        found = dict.fromkeys(PERSISTENT[1:], 0.0)
        blocks, _ = _C.partition(compiled.program, which, most_blocks)
        for step in steps:
            if not isinstance(step, Product) or step.when != "frontiers":
                continue
            source, columns = frontiers.buffers[step.source], frontiers.buffers[step.target].width
            single = source.dtype == "float32"
            found["product"] += 1
            found["kilobyte"] += (4e-3 if few else 8e-3) * source.width * (4 if single else 2)
            if few and single and not tf32:
                found["few"] += 4e-3 * source.width * columns / blocks
            else:
                tiles = -(-source.width // 16) * -(-columns // (16 * blocks))
                found["multiplication"] += tiles * (2 * (1 if tf32 else 3) if single else 1)
        return found

    passes = (frontiers.forward, FORWARD), (frontiers.backward, BACKWARD)
    return [of(steps, which, few) for few in (False, True) for steps, which in passes]


def geometry(compiled: batched.Batched, graphs: Graphs, device: torch.device, form: tuple | None = None) -> Geometry:
    """What a call on these graphs takes: what weft.tune found for their sizes, of a training step, which it does not
    measure, and else by the sizes alone several groups where they are expected to gain enough; of those whose blocks
    are all resident."""
    while True:
        known = _known(compiled, device, form)
        parts = None if form else tuned.parts(compiled.functions, bool(compiled.plan.backward), graphs)
        chosen = None
        if parts is not None:
            chosen = next((g for g in known.geometries if g.parts == parts), None)
        if chosen is None:
            chosen = known.geometries[_number(known.expected, graphs)]
        refused = _C.refused_launches()
        if known.resident.get(chosen.parts) == refused:
            return chosen
        if _resident_groups(compiled, device, form, chosen) >= chosen.groups:
            known.resident[chosen.parts] = refused
        elif not _fewer(compiled, device, form, chosen):
            return chosen


def geometry_of(compiled: batched.Batched, graphs: Graphs, device: torch.device, parts: int) -> Geometry:
    """That of a call which is to have so many parts; where another thread has found that it is not resident, what the
    call takes by itself."""
    found = next((g for g in geometries(compiled, device) if g.parts == parts), None)
    return geometry(compiled, graphs, device) if found is None else found


def _fewer(compiled: batched.Batched, device: torch.device, form: tuple | None, refused: Geometry) -> bool:
    """Without a geometry, or its groups, that are not resident. Whether any is left."""
    groups = min(_resident_groups(compiled, device, form, refused), refused.groups - 1)
    known = _known(compiled, device, form)
    fewer = (g._replace(groups=groups) if g.parts == refused.parts else g for g in known.geometries)
    left = [g for g in fewer if g.groups > 0]
    if left:
        key = device, form, fp32_precision("cuda", "matmul")
        _of_program(compiled)[key] = _found(compiled, device, left)
    return bool(left)


def _resident_groups(compiled: batched.Batched, device: torch.device, form: tuple | None, which: Geometry) -> int:
    """How many groups of blocks are resident at once; compiles their kernels."""
    known = _known(compiled, device, form)
    if form is None and which.parts not in known.compiled:
        _compile(compiled, device, None, [which])
        known.compiled.add(which.parts)
    passes, given = ((TRAINING,), form) if form else ((FORWARD, BACKWARD), (len(compiled.plan.given.matrices),))
    with torch.cuda.device(device):
        return min(_C.persistent_shape(compiled.program, p, which.most_blocks, *given)[3] for p in passes)


def _compile(compiled: batched.Batched, device: torch.device, form: tuple | None, which: Sequence[Geometry]) -> None:
    """Their kernels, as many at a time as there are processors."""
    passes, given = ((TRAINING,), form) if form else ((FORWARD, BACKWARD), (len(compiled.plan.given.matrices),))
    with torch.cuda.device(device):
        _C.compile_persistent(compiled.program, [(p, g.most_blocks) for g in which for p in passes], *given)


def compile_for(compiled: batched.Batched, device: torch.device, graphs: Iterable[Graphs]) -> None:
    """The kernels of both passes for the groupings of the blocks that calls on these graphs take, which compile them at
    first need."""
    known = _known(compiled, device, None)
    numbers = sorted({_number(known.expected, g) for g in graphs})
    _compile(compiled, device, None, [known.geometries[i] for i in numbers])


def scripted(
    compiled: batched.Batched,
    graphs: Graphs,
    schedule: Callable[[int], Schedule],
    device: torch.device,
    parts: int | None = None,
) -> Scripted:
    """The schedule of so many groups with the scripts of both passes, as the next graphs' goes to the device, too.
    Those of :func:`geometry`, or of so many parts."""
    chosen = geometry(compiled, graphs, device) if parts is None else geometry_of(compiled, graphs, device, parts)
    found = schedule(chosen.groups)
    used(found, _sender(_send, compiled, device))
    return found.scripted(compiled.program, chosen.most_blocks)


def _sender(sends: Callable[..., None], compiled: batched.Batched, device: torch.device, *form: tuple) -> Callable:
    """`sends` of these: the same each time, which is what :func:`used` looks at."""
    known = _senders.get(compiled.program)
    if known is None:
        known = _senders[compiled.program] = {}
    key = sends, device, form
    if key not in known:
        known[key] = functools.partial(sends, weakref.ref(compiled), device, *form)
    return known[key]


def _send(
    compiled: weakref.ref[batched.Batched], device: torch.device, graphs: Graphs, plan: Callable[..., Schedule]
) -> None:
    found = compiled()
    if found is None:
        return
    chosen = geometry(found, graphs, device)
    planned = plan(chosen.groups)
    _times(_known(found, device, None).expected, graphs, bool(found.plan.backward), False)
    if graphs._pinned or graphs._device == device:
        send(planned.scripted(found.program, chosen.most_blocks), graphs)


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
    partitions, read = [], 0
    for which in passes:
        blocks, kept = _C.partition(compiled.program, which, most)
        for number, size, bytes_read in kept:
            function, symbol = compiled.plan.given.matrices[number]
            name = compiled.functions[function].trace.program.symbols[symbol].name
            partitions.append((name, "shared", size * blocks))
            read += bytes_read * groups
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
        weight_bytes=read,
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
    form = _form(compiled, call, loss, head)
    key = call.device, call.trains, form
    known = _training_obstacles.get(compiled.program)
    if known is None or known[0] != key:
        known = key, _training_obstacle(compiled, call, form)
        _training_obstacles[compiled.program] = known
    return known[1]


def _training_obstacle(compiled: batched.Batched, call: Ready, form: tuple) -> str | None:
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
    why = _C.training_obstacle(compiled.program, most, limit, *form)
    if why:
        return why
    return _not_resident(compiled, call.device, form)


def _name(compiled: batched.Batched, function: int, symbol: int) -> str:
    return compiled.functions[function].trace.program.symbols[symbol].name


def operands(compiled: batched.Batched, call: Ready, head: nn.Linear | None, loss: str) -> Operands:
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
    form = _form(compiled, call, loss, head)
    return Operands(compiled, inputs, matrices, vectors, numbers, *heads, loss, form, reached)


def _form(
    compiled: batched.Batched, call: Ready, loss: str, head: nn.Linear | None
) -> tuple[int, int, bool, bool, int]:
    """What a kernel of a step is made for: how many matrices and vectors, whether by cross-entropy and with a head,
    classes."""
    given = compiled.plan.given
    classes = (*call.outputs[0].shape, 0)[0] if head is None else head.out_features
    return len(given.matrices), len(given.vectors), loss == "cross_entropy", head is not None, classes


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
    """Launch forward, loss, backward and updates on the current stream; nothing waits. Where the blocks are no longer
    all resident, as where processes share a device, in other groups; None where those are not either: then nothing was
    done."""
    operands, device = request.operands, call.device
    compiled, form = operands.compiled, operands.form
    if None in operands.inputs:
        with torch.no_grad():
            given = batched.made_before(compiled, call.graphs.num_vertices, call.rows)
    else:
        given = [call.rows[name] for name in operands.inputs]
    inputs = []
    for x in given:
        x = x.float() if x.dtype == torch.bool else x  # 0 and 1 in the frontiers
        inputs.append(x if x.dim() == 2 else x.reshape(len(x), -1))
    steps = _steps(operands, request.updates)
    roots = None if request.roots is None else request.roots._core
    while True:
        chosen = geometry(compiled, call.graphs, device, form)
        schedule = call.schedule(chosen.groups)
        launched = steps.launch(
            request.turns, schedule.core, chosen.most_blocks, inputs, roots, request.targets, request.ignore_index,
            request.numbers, request.refused,
        )  # fmt: skip
        if launched is not None:
            used(schedule, _sender(_plan, compiled, device, form))
            return Launched(launched.numbers, launched)
        if not _fewer(compiled, device, form, chosen):
            _training_obstacles[compiled.program] = None
            return None


def _steps(operands: Operands, updates: list[Update]) -> object:
    """What launches steps with these updates, made once."""
    made = operands.steps
    if made is None or made[0] is not updates:
        given = [
            (operands.numbers[id(u.parameter)], _UPDATES[u.kind], u.parameter, u.first, u.second, u.numbers)
            for u in updates
        ]
        _, _, cross_entropy, _, classes = operands.form
        steps = _C.TrainingSteps(
            operands.compiled.program, operands.matrices, operands.vectors, operands.weight, operands.bias,
            cross_entropy, classes, given,
        )  # fmt: skip
        made = operands.steps = updates, steps
    return made[1]
