"""Which algorithm runs a recurrent layer: the names, the limits, and one pure function that decides."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from ... import _C
from ..._base import costs as gpu_costs
from ..._base.torch_private import RNN_KERNELS, constant_when_compiled
from ..dropin.torch_limits import why_not_cudnn, why_not_onednn
from ..table import CELLS
from . import costs, tuned
from .case import Case

__all__ = [
    "ALGORITHMS",
    "AUTO_PERSISTENT",
    "AUTO_PROJECTED",
    "AUTO_SCAN",
    "CUDA_MAX_HIDDEN",
    "CUDA_MAX_HIDDEN_FP64",
    "Limits",
    "Plan",
    "Table",
    "auto_limits",
    "check_algorithm",
    "choose",
    "choose_cached",
    "forget_choices",
    "persistent_plan",
    "remember_choices",
]

ALGORITHMS = ("auto", "persistent", "scan", "newton", "torch", "reference")


class Limits(NamedTuple):
    """Where "auto" takes an algorithm: in a bucket of hidden sizes, T >= min_steps and B <= max_batch."""

    min_steps: int = 1
    max_batch: float = math.inf
    dtypes: frozenset[torch.dtype] | None = None
    """None for those of the table."""
    alone: bool = False
    """Only one layer in one direction that a gradient will pass, on a GPU of compute capability 9.0 or more."""


class Table(NamedTuple):
    """Limits of one cell on one device."""

    dtypes: frozenset[torch.dtype]
    buckets: dict[int, Limits]
    """Largest hidden size of a bucket -> its limits, ascending; above the last, the algorithm is not taken."""


CUDA_MAX_HIDDEN: dict[str, int] = {cell: largest for cell, largest in _C.rnn.scan_max_hidden.items() if largest > 0}
"""By cell, H that the CUDA kernels of the scan hold. The others have no scan."""

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_CUDA_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))

# On CUDA a scan costs H times the arithmetic of the sequential chain and wins by its depth: three stages (products
# within chunks, boundaries one after the other, replay of the chunks) of about the square root of T steps each instead
# of T. So it is for small H, long T and batches that leave the device idle. On the CPU it has no table: there its
# operator is that of "persistent".
# Above 32 hidden units on CUDA the persistent kernels are the ones to beat: they win unless the sequence is long and
# the batch small. How long and how small stands in the costs of the GPU.
_LONG = Limits(dtypes=frozenset((torch.float32,)), alone=True)


def _scan_table(costs: gpu_costs.Costs, cell: str) -> Table:
    found = costs.tables[f"rnn.scan_limits.{cell}"]
    rows = zip(found["hidden_size"], found["min_steps"], found["max_batch"], strict=True)
    wide = {int(largest): _LONG._replace(min_steps=int(T), max_batch=int(B)) for largest, T, B in rows if B > 0}
    return Table(_CUDA_DTYPES, {32: Limits(), **wide})


def _scan_tables(costs: gpu_costs.Costs) -> dict[tuple[str, str], Table]:
    return {("cuda", name): _scan_table(costs, CELLS[name].costs) for name in CUDA_MAX_HIDDEN}


AUTO_SCAN: dict[tuple[str, str], Table] = _scan_tables(gpu_costs.reference())


@functools.cache
def _auto_scan_on(index: int) -> dict[tuple[str, str], Table]:
    return _scan_tables(gpu_costs.of(index))


# On the CPU "persistent" is taken before "scan": what stands here was faster than torch's layer on two cores, forward
# alone and with the backward pass. A single step of a large layer pays for the packing of the weights; oneDNN's LSTM is
# fast in bfloat16 and as fast at H = 1024. On CUDA a model of costs decides, see persistent_plan.
_CPU_WIDE = Table(_DTYPES, {256: Limits(), 1024: Limits(min_steps=2)})
_NOT_BFLOAT16 = _DTYPES - {torch.bfloat16}
AUTO_PERSISTENT: dict[tuple[str, str], Table] = {
    ("cpu", "rnn_tanh"): _CPU_WIDE,
    ("cpu", "rnn_relu"): _CPU_WIDE,
    ("cpu", "gru"): _CPU_WIDE,
    ("cpu", "lstm"): Table(
        _DTYPES, {64: Limits(), 256: Limits(dtypes=_NOT_BFLOAT16), 512: Limits(min_steps=2, dtypes=_NOT_BFLOAT16)}
    ),
}

# An LSTM with projection has two products of weights before its first step and a larger one in each than torch's, which
# takes several calls for a step. The lengths are those from which a single sequence was faster without gradients;
# larger batches and training gain earlier.
AUTO_PROJECTED: dict[tuple[str, str], Table] = {
    ("cpu", "lstm"): Table(
        _DTYPES,
        {
            64: Limits(min_steps=20),
            128: Limits(min_steps=50, dtypes=_DTYPES - {torch.float16}),
            256: Limits(min_steps=100, dtypes=frozenset((torch.float32, torch.float64))),
            512: Limits(min_steps=200, dtypes=frozenset((torch.float32,))),
        },
    ),
}

CUDA_MAX_HIDDEN_FP64: int = _C.rnn.scan_max_hidden_fp64
"""The same in float64, of every cell."""

_DEVICES = ("cpu", "cuda") if _C.with_cuda else ("cpu",)


def check_algorithm(owner: str, name: str) -> str:
    """Return the name; ValueError for an unknown one, of what the user called."""
    if name not in ALGORITHMS:
        raise ValueError(f"{owner}: unknown algorithm {name!r}; known are {', '.join(map(repr, ALGORITHMS))}")
    return name


def why_only_reference(case: Case) -> str | None:
    """Why nothing but the reference can run this case, or None."""
    if case.transformed:
        return "torch.func transforms and forward-mode AD are closed to compiled autograd functions"
    return None


def why_not_torch(case: Case) -> str | None:
    """Why torch's kernel cannot run this case, or None."""
    if case.cell not in RNN_KERNELS:
        return f"torch has no {case.cell.split('_')[0].upper()}"
    if case.heads > 1:
        return "torch's layers have no heads (num_heads)"
    if case.mapped:
        return "torch.func.vmap has no rule for torch's kernels"
    if case.keeps_cells:
        return "torch's kernels do not return the cells of every step"
    if case.autocast and (case.device, case.cell) == ("cpu", "lstm") and not (case.packed or case.projected):
        return why_not_onednn(case.dtype)
    known = case.steps is not None and case.batch is not None
    rows = case.steps * case.batch if known else None  # at the most, where packed
    return why_not_cudnn(case.device, case.cell, case.hidden_size * case.directions, case.steps, rows)


def why_not_scan(case: Case) -> str | None:
    """Why "scan" cannot run this case, or None."""
    obstacle = _why_not_in_chunks(case)
    if obstacle is not None:
        return obstacle
    if case.device == "cuda":
        double = case.dtype == torch.float64
        largest = CUDA_MAX_HIDDEN_FP64 if double else CUDA_MAX_HIDDEN[case.cell]
        if case.hidden_size > largest:
            kernels = f"the kernels of {case.cell}{' in float64' if double else ''}"
            return f"{kernels} hold {largest} hidden units, got {case.hidden_size}"
    return None


def why_not_newton(case: Case) -> str | None:
    """Why "newton" cannot run this case, or None."""
    obstacle = _why_not_in_chunks(case)
    if obstacle is not None or case.device != "cuda" or case.hidden_size <= CUDA_MAX_HIDDEN_FP64:
        return obstacle
    beyond = f"a warp holds {CUDA_MAX_HIDDEN_FP64} hidden units, got {case.hidden_size}"
    if case.dtype == torch.float64 or case.directions > 1 or row_chunks(case) == 1:
        return f"{beyond}, and chunks of time as rows of the persistent kernel's batch would not be faster"
    return None


def row_chunks(case: Case) -> int:
    """Chunks of time that are rows of the persistent kernel's batch above what a warp holds; 1 where those would not
    be faster."""
    known = isinstance(case.steps, int) and isinstance(case.batch, int)  # and no symbols
    if not (known and hasattr(_C.rnn, "row_chunks") and torch.cuda.is_available()):
        return 1
    index = torch.cuda.current_device() if case.index is None else case.index
    return _C.rnn.row_chunks(index, case.cell, case.hidden_size, case.steps, case.batch)


def why_not_persistent(case: Case) -> str | None:
    """Why "persistent" cannot run this case, or None."""
    obstacle = _why_not_ours(case)
    if obstacle is not None or case.device != "cuda":
        return obstacle
    if not hasattr(_C.rnn, "report"):
        return "its CUDA kernels are not built"
    return persistent_plan(case).why_not


def _why_not_in_chunks(case: Case) -> str | None:
    """What stands in the way of the operators that cut time, or None."""
    if case.packed:
        return "it takes no PackedSequence"
    if case.keeps_cells:
        return "it does not return the cells of every step"
    if case.projected:
        return "it has no projection (proj_size)"
    if case.heads > 1:
        return "it has no heads (num_heads)"
    if case.cell not in CUDA_MAX_HIDDEN:
        return f"it has no {case.cell.split('_')[0].upper()}"
    return _why_not_ours(case)


def _why_not_ours(case: Case) -> str | None:
    """What stands in the way of every operator of Weft's, or None."""
    if case.device not in _DEVICES:
        return f"built for {' and '.join(_DEVICES)}, not for {case.device}"
    if case.dtype not in _DTYPES:
        return f"no kernel for {case.dtype}"
    return None


class Plan(NamedTuple):
    """What the rnn engine would do on a GPU."""

    why_not: str | None
    """Why it leaves the case to others, or None."""
    expected_us: float | None = None
    """Microseconds of all layers, forward and, where anything asks for a gradient, backward. None where there is no
    kernel: "auto" then does not take it."""
    how: str = ""
    """In words."""


_WITHOUT_A_KERNEL = "one step after another, without a kernel"


def persistent_plan(case: Case) -> Plan:
    """How "persistent" runs this case on CUDA. A compiled graph does not know T and B, and asks about one step of one
    sequence: whether the weights fit on the chip.

    The operator runs everything. Where it has no kernel, torch's is faster and runs what it can."""
    if case.dtype == torch.float64:
        return Plan(None, how=_WITHOUT_A_KERNEL)
    plan = _plan(
        case.index, case.cell, case.dtype, case.input_size, case.hidden_size, case.layers, case.directions,
        case.steps or 1, case.batch or 1, case.packed, case.trains, case.heads,
    )  # fmt: skip
    if plan.why_not is None or why_not_torch(case) is None:
        return plan
    return Plan(None, how=f"{_WITHOUT_A_KERNEL}: {plan.why_not}")


@constant_when_compiled
def _plan(
    index: int | None, cell: str, dtype: torch.dtype, input_size: int, hidden_size: int, layers: int, directions: int,
    steps: int, batch: int, packed: bool, trains: bool, heads: int,
) -> Plan:  # fmt: skip
    facts = _C.rnn.report(
        device=torch.cuda.current_device() if index is None else index,
        cell=cell,
        dtype=str(dtype).removeprefix("torch."),
        input_size=input_size,
        hidden_size=hidden_size,
        layers=layers,
        directions=directions,
        steps=steps,
        batch=batch,
        packed=packed,
        trains=trains,
        **({} if heads == 1 else {"heads": heads}),
    )
    if facts["why_not"] is not None:
        return Plan(facts["why_not"])
    how = [f"{name}: {_layout(facts[name], directions)}" for name in ("forward", "backward") if facts[name]]
    return Plan(None, facts["microseconds"], "; ".join(how))


def _layout(facts: dict[str, Any], directions: int) -> str:
    """How the recurrence of a pass is laid out on the device, in words."""
    parts = [
        f"{facts['tier']} tier",
        f"{facts['groups']} x {facts['blocks']} blocks of {facts['threads']} threads",
        f"{facts['sequences']} sequences each",
    ]
    if facts["product"] == "fma":
        parts.append("FMA")
    if facts["cluster"] > 1:
        parts.append(f"pooled by {facts['cluster']}")
    if facts["directions"] < directions:
        parts.append("one direction after the other")
    return ", ".join(parts)


def auto_limits(table: Table, hidden_size: int) -> Limits | None:
    """The limits of the bucket that holds this hidden size; None where none does."""
    for largest, limits in table.buckets.items():
        if hidden_size <= largest:
            return limits
    return None


def why_auto_skips_scan(case: Case) -> str | None:
    """Why "auto" prefers another to an eligible "scan", or None."""
    # A compiled graph does not know its GPU.
    tables = AUTO_SCAN if case.index is None else _auto_scan_on(case.index)
    reason = beyond_limits(case, tables)
    if reason is not None or case.device != "cuda":
        return reason
    # Limits for one layer alone were measured beside the persistent kernels. The others were beside torch's, and leave
    # to the costs where the persistent kernels are faster: in large batches, and in a few steps without gradients.
    limits = auto_limits(tables[case.device, case.cell], case.hidden_size)
    us = modelled_time("scan", case)
    if limits is None or limits.alone or us is None:
        return None
    # A plan compiles kernels: not where the scan is as fast as any could be.
    if us <= costs.persistent_at_least_us(case) or why_not_persistent(case) is not None:
        return None
    return _why_slower(case, "scan", "persistent")


def why_auto_skips_newton(case: Case) -> str | None:
    """Why "auto" prefers another to an eligible "newton", or None. How long a net remembers is not known before it has
    run: it is taken where it costs at most a tenth more than the scan even if the net never forgets."""
    if case.device != "cuda":
        return f"auto does not take it on {case.device}"
    if not isinstance(case.steps, int) or not isinstance(case.batch, int):  # but None or a symbol
        return "auto does not take it where the length is unknown"
    if case.hidden_size > CUDA_MAX_HIDDEN_FP64:
        return "auto does not take it where a warp does not hold a layer"
    reason = why_auto_skips_scan(case)
    if reason is not None:
        return reason
    chunks, _ = costs.newton_chunks(case)
    if chunks < costs.FEWEST_CHUNKS:
        return f"{_count(chunks, 'chunk')} of time would gain little"
    us, scan_us = modelled_time("newton", case), modelled_time("scan", case)
    if us is None or scan_us is None or us > NEWTON_AT_MOST * scan_us:
        return "a net that never forgets would take more than a tenth longer than as scan"
    return None


NEWTON_AT_MOST = 1.1
"""What "auto" accepts that "newton" takes, where a net never forgets, over the scan."""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def why_auto_skips_persistent(case: Case) -> str | None:
    """Why "auto" prefers another to an eligible "persistent", or None."""
    if case.device != "cuda" and ours_alone(case):
        return None
    if case.device != "cuda":
        return beyond_limits(case, AUTO_PROJECTED if case.projected else AUTO_PERSISTENT)
    if persistent_plan(case).expected_us is None:
        return "auto takes it where it has a kernel"
    if ours_alone(case):
        return None
    # The weights fit. Against cuDNN's kernels for all steps, and for packed input, it was then faster wherever it was
    # measured, by less in places than the errors of the two models; against its others where the batch is small.
    if case.packed or costs.cudnn_kernel(case) != "standard":
        return None
    if _is_small(case):
        return None
    return _why_slower(case, "persistent", "torch")


def ours_alone(case: Case) -> bool:
    """Whether torch has no such layer."""
    return case.heads > 1 or case.cell not in RNN_KERNELS


def _is_small(case: Case) -> bool:
    """Whether a step has few states, B times H. There the persistent kernels, whose step takes what its exchange takes,
    are faster than torch's launches wherever the weights fit. With more states the products are what takes time, and
    torch's are faster in the end."""
    if case.batch is None:
        return False
    return case.batch * case.hidden_size <= gpu_costs.of(case.index).number("rnn.choice", "few_states")


def _why_auto_takes(name: str, case: Case) -> str:
    if ours_alone(case):
        return "torch has no such layer"
    if name == "newton":
        return "a fraction of the scan where the net forgets, and at most a tenth more where it does not"
    if name == "scan" or case.device == "cpu":
        return "within auto's limits"
    if case.batch is None:
        return "its weights fit"
    return "its weights fit, and the batch is small" if _is_small(case) else "auto's model of costs"


def _why_slower(case: Case, name: str, other: str) -> str | None:
    """That `other`, which can run, is expected to take less time, or None."""
    if obstacle(other, case) is not None:
        return None
    us, other_us = modelled_time(name, case), modelled_time(other, case)
    if us is None or other_us is None or us <= other_us:
        return None
    return f"{other} is expected to take {other_us:.0f} us, it {us:.0f}"


def beyond_limits(case: Case, tables: dict[tuple[str, str], Table]) -> str | None:
    """Which limit of a table a case is beyond, or None."""
    table = tables.get((case.device, case.cell))
    if table is None:
        return f"auto does not take it on {case.device}"
    limits = auto_limits(table, case.hidden_size)
    if limits is None:
        return f"auto does not take it above hidden_size {max(table.buckets)} on {case.device}"
    where = f"at hidden_size {case.hidden_size} on {case.device}"
    if case.dtype not in (limits.dtypes or table.dtypes):
        return f"auto does not take it in {case.dtype} {where}"
    if case.steps is None or case.batch is None:
        anywhere = limits.min_steps <= 1 and limits.max_batch == math.inf
        return None if anywhere else f"auto does not take it where the length is unknown {where}"
    if case.steps < limits.min_steps:
        return f"auto does not take it below {limits.min_steps} steps {where}"
    if case.batch > limits.max_batch:
        return f"auto does not take it above a batch of {limits.max_batch} {where}"
    if limits.alone:
        if case.layers * case.directions > 1:
            return f"auto does not take it for several layers or directions {where}"
        if not case.trains:
            return f"auto does not take it where nothing asks for a gradient {where}"
        if case.capability is None or case.capability < (9, 0):
            return f"auto does not take it below compute capability 9.0 {where}"
    return None


_OBSTACLES = {
    "persistent": why_not_persistent,
    "scan": why_not_scan,
    "newton": why_not_newton,
    "torch": why_not_torch,
}
_PREFERENCES = {
    "persistent": why_auto_skips_persistent,
    "scan": why_auto_skips_scan,
    "newton": why_auto_skips_newton,
}


def obstacle(name: str, case: Case) -> str | None:
    """Why the algorithm cannot run this case, or None."""
    if name == "reference":
        return None
    return why_only_reference(case) or _OBSTACLES[name](case)


def why_auto_skips(name: str, case: Case) -> str | None:
    """Why "auto" prefers another to this eligible algorithm, or None."""
    return _PREFERENCES[name](case) if name in _PREFERENCES else None


def measured(case: Case) -> tuned.Entry | None:
    """What weft.tune found for cases like this one."""
    if case.steps is None or case.batch is None:
        return None
    return tuned.look_up(case)


def how(name: str, case: Case) -> str:
    """More on how an eligible algorithm runs this case, or nothing."""
    if name == "newton" and case.device == "cuda" and isinstance(case.steps, int) and isinstance(case.batch, int):
        if case.hidden_size > CUDA_MAX_HIDDEN_FP64:
            return f"{row_chunks(case)} chunks as rows of the persistent kernel's batch"
        chunks, length = costs.newton_chunks(case)
        return f"{_count(chunks, 'chunk')} of {_count(length, 'step')}"
    if name != "persistent":
        return ""
    projection = "the projection multiplied into the recurrent weights" if case.projected else ""
    return "; ".join(filter(None, (projection, persistent_plan(case).how if case.device == "cuda" else "")))


def expected_time(name: str, case: Case) -> float | None:
    """Microseconds where the algorithm can run: what weft.tune measured, or else what a model of costs expects."""
    measured_us = measured_time(name, case)
    if measured_us is not None:
        return measured_us
    return modelled_time(name, case) if obstacle(name, case) is None else None


def measured_time(name: str, case: Case) -> float | None:
    """Microseconds that weft.tune measured in cases like this one."""
    entry = measured(case)
    return None if entry is None else entry.microseconds.get(name)


def modelled_time(name: str, case: Case) -> float | None:
    """Microseconds that an algorithm which can run is expected to take on a GPU, by its costs. On a CPU there is no
    model."""
    if case.device != "cuda" or case.steps is None or case.batch is None:
        return None
    us = None
    if name == "persistent":
        us = persistent_plan(case).expected_us
        us = None if us is None else max(us + costs.projection_us(case), costs.host_us(case))
    elif name in ("scan", "newton", "torch"):
        us = {"scan": costs.scan_us, "newton": costs.newton_us, "torch": costs.torch_us}[name](case)
    return None if us is None else float(us)  # of sizes that are symbols, a symbol


def choose(algorithm: str, case: Case) -> tuple[str, str]:
    """The algorithm that runs, and why: "persistent", "scan", "newton", "torch" or "reference"."""
    reason = why_only_reference(case)
    if reason is not None:
        return "reference", reason
    if algorithm != "auto":
        reason = obstacle(algorithm, case)
        if reason is None:
            return algorithm, "asked for by name"
        return _fallback(case, algorithm), f"{algorithm}: {reason}"
    entry = measured(case)
    if entry is not None and obstacle(entry.fastest, case) is None:
        return entry.fastest, "the fastest that weft.tune measured"
    # On the CPU what is in AUTO_PERSISTENT was measured to be faster than the scan.
    # Where a warp does not hold a layer, whether chunks would be faster depends on how long the net remembers.
    few = case.hidden_size <= CUDA_MAX_HIDDEN_FP64
    order = ("persistent", "scan") if case.device == "cpu" else ("newton", "scan", "persistent")[0 if few else 1 :]
    reasons = []
    for name in order:
        reason = obstacle(name, case) or why_auto_skips(name, case)
        if reason is None:
            return name, _why_auto_takes(name, case)
        reasons.append(f"{name}: {reason}")
    name = _fallback(case)
    if name != "torch":
        reasons.append(f"torch: {obstacle('torch', case)}")
    return name, "; ".join(reasons)


def _fallback(case: Case, asked: str = "auto") -> str:
    """What runs where nothing else was chosen: torch's kernel if it can; in the place of "newton" what it stands
    beside."""
    names = ("torch", "persistent", "reference")
    if asked == "newton":
        names = ("scan", "persistent", *names)
    return next(name for name in names if obstacle(name, case) is None)


_remembered: list[functools._lru_cache_wrapper] = []


def remember_choices(function):
    """A decorator for functions that choose in every call of a layer: equal arguments have one answer until weft.tune
    has measured something new. Sizes that are symbols are a TypeError."""
    _remembered.append(functools.lru_cache(maxsize=4096)(function))
    return _remembered[-1]


def forget_choices() -> None:
    for function in _remembered:
        function.cache_clear()


_choose_cached = remember_choices(choose)


def choose_cached(algorithm: str, case: Case) -> tuple[str, str]:
    """`choose`, for code that runs in every call."""
    if torch.compiler.is_compiling():
        return choose(algorithm, case)
    try:
        return _choose_cached(algorithm, case)
    except TypeError:  # sizes that are symbols
        return choose(algorithm, case)
