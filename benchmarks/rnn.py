"""The rnn engine against torch.nn, and against what one exchange of the hidden state costs.

``python -m benchmarks.rnn [FILTER]`` measures into results/rnn.csv: the training step of ``algorithm="auto"`` over a
grid of cells, dtypes, hidden sizes and batches at T = 1024, with as many inputs as hidden units; single cases beyond
it; layers of several heads and sLSTM, which torch has not, beside the loop over their steps: ``captured``, that loop in
a CUDA graph, on a CPU ``eager``, and ``flashrnn`` where that package is installed; forward passes of
nets that remember so many steps (memory=...), or whose recurrent weights are so many times torch's (weights=...),
beside the scan's; 50 chained steps of the cells, per
step (model=..._cell); on a CPU three cases with two threads, and some on shared processors: beside two busy processes
(load=2), and with twice as many threads as there are processors. A layer runs as users call it, without an initial
state; a random gradient arrives at every output, and gradients are taken for the input and all parameters. FILTER is a
substring of the case or the metric. What this commit has not measured comes first, so that the next run goes on where
one was out of time.

``step_forward`` is the time of a forward step without what a call costs once: the difference between 1024 and 512
steps, divided by 512. Its peer ``exchange_floor`` is what the exchange of h alone takes in the layout that runs.

At the end stand the geometric mean and the worst case of the grid, and every target with what was reached.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import weft
from torch import Tensor, nn

from benchmarks.common import (
    CPU_THREADS,
    DTYPES,
    RESULTS,
    Candidate,
    Entry,
    Results,
    begin_table,
    busy_processes,
    captured,
    check_agreement,
    exit_with,
    hardware,
    measure,
    measure_in_turns,
    of_one_gpu,
    read_rows,
    relative_error,
    run_entries,
    significant,
    table_parser,
)
from benchmarks.heads import CAPTURED_STEPS, HeadsCase, HeadsStep, flashrnn_step
from benchmarks.layers import LayerCase, LayerStep, agreement_bound, check_layers

GRID_CELLS = ("rnn_tanh", "gru", "lstm")
GRID_DTYPES = ("fp16", "bf16", "fp32")
GRID_H = (128, 256, 512, 1024)
GRID_B = (1, 16, 64)
GRID_T = 1024
FORWARD_B = 16
TOKENS = 200
"""Decode steps between two looks at the clock."""
PATIENCE = 120.0


@dataclass(frozen=True)
class RnnCase(LayerCase):
    """Layers with as many inputs as hidden units, which the name then leaves out, and no initial state."""

    inputs: int = 0
    initial_state: bool = False

    def __post_init__(self) -> None:
        if self.inputs == 0:
            object.__setattr__(self, "inputs", self.H)

    def keys(self) -> dict[str, Any]:
        keys = super().keys()
        if self.inputs == self.H:
            del keys["inputs"]
        return keys


def grid_cases() -> Iterator[RnnCase]:
    for cell, dtype, H, B in itertools.product(GRID_CELLS, GRID_DTYPES, GRID_H, GRID_B):
        yield RnnCase(cell, H, B, GRID_T, dtype=dtype)


LARGE = RnnCase("gru", 2048, 32, 1024, dtype="bf16")
PACKED = RnnCase("lstm", 512, 32, 1024, dtype="bf16", layers=2, directions=2, layout="packed")
LONG = RnnCase("rnn_tanh", 20, 16, 30000, inputs=1)


@dataclass(frozen=True)
class NewtonCase(RnnCase):
    """A layer whose forward pass depends on how long it remembers, see `remembered`: its recurrent weights are torch's
    times `weights`, or times what makes it remember about `memory` steps."""

    weights: float = 1
    memory: int = 0

    def keys(self) -> dict[str, Any]:
        more = {"memory": self.memory} if self.memory else {"weights": f"{self.weights:g}"}
        return {**super().keys(), **more}

    def prepare(self, step: LayerStep) -> None:
        """Scales the weights of both layers."""
        factor = factor_of(step.peer, self.memory) if self.memory else self.weights
        with torch.no_grad():
            for layer in (step.weft, step.peer):
                layer.weight_hh_l0.mul_(factor)


NEVER_FORGETS = (NewtonCase("rnn_tanh", 20, 16, 30000, inputs=1, algorithm="newton", weights=3),)
NEWTON = (
    *(
        NewtonCase("rnn_tanh", 20, 16, 30000, inputs=1, algorithm="newton", memory=m)
        for m in (50, 100, 200, 500, 1000, 3000)
    ),
    *NEVER_FORGETS,
    *(NewtonCase(cell, 20, 16, 10000, inputs=1, algorithm="newton") for cell in ("gru", "lstm")),
    NewtonCase("gru", 128, 16, 10000, algorithm="newton"),
)
AUTO_NEWTON = tuple(
    NewtonCase("rnn_tanh", H, B, T, inputs=1, weights=weights)
    for T, B, H, weights in itertools.product((1000, 5000, 30000), (1, 16, 64), (8, 20, 32), (1, 3))
)
"""Where "auto" may not take longer than it does without "newton", as far as 1.1 times."""


@torch.no_grad()
def remembered(layer: nn.RNNBase, factor: float = 1.0, most: int = 8000) -> int:
    """Steps until two walks from different states agree to 2^-22, in float64 on the CPU; `most` where they do not."""
    kind, extra = ("RNN", {"nonlinearity": layer.mode[4:].lower()}) if layer.mode[:3] == "RNN" else (layer.mode, {})
    wide = getattr(weft.nn, kind)(
        layer.input_size, layer.hidden_size, algorithm="persistent", dtype=torch.float64, **extra
    )
    wide.load_state_dict({name: value.double().cpu() for name, value in layer.state_dict().items()})
    wide.weight_hh_l0.mul_(factor)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(most, 1, layer.input_size, generator=generator, dtype=torch.float64).expand(-1, 4, -1)
    start = torch.randn(1, 4, layer.hidden_size, generator=generator, dtype=torch.float64)
    output, _ = wide(x.contiguous(), (start, start) if layer.mode == "LSTM" else start)
    apart = (output - output[:, :1]).abs().amax((1, 2)) > 2.0**-22
    return int(apart.nonzero()[-1, 0]) + 1 if apart.any() else 0


def factor_of(layer: nn.RNNBase, memory: int) -> float:
    """What the recurrent weights are multiplied by so that the layer remembers about so many steps."""
    low, high = 0.5, 4.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if remembered(layer, middle) < memory else (low, middle)
    return low


INFERENCE = RnnCase("gru", 512, 1, 1024, dtype="bf16")
DECODE = tuple(RnnCase(cell, 128, 1, 1, dtype=dtype) for cell in ("gru", "lstm") for dtype in ("fp32", "bf16"))
STEPS = (
    RnnCase("gru", 512, 16, 1024, dtype="bf16"),
    RnnCase("lstm", 512, 16, 1024, dtype="fp16"),
    RnnCase("lstm", 1024, 16, 1024, dtype="bf16"),
)
CPU = tuple(
    RnnCase(cell, H, B, 256, device="cpu", threads=CPU_THREADS)
    for cell, H, B in (("gru", 128, 8), ("lstm", 128, 8), ("gru", 512, 32))
)


HEADS = tuple(
    HeadsCase(cell, H, 16, 1024, dtype=dtype, heads=heads)
    for dtype in ("bf16", "fp16", "fp32")
    for cell, H, heads in (("slstm", 768, 4), ("slstm", 768, 1), ("lstm", 1024, 8), ("gru", 2048, 4))
)
HEADS_CPU = (HeadsCase("slstm", 256, 16, 256, device="cpu", heads=4, threads=CPU_THREADS),)


@dataclass(frozen=True)
class LoadedCase(RnnCase):
    """Beside `load` busy processes, each on a thread of its own."""

    load: int = 0

    def keys(self) -> dict[str, Any]:
        return {**super().keys(), **({"load": self.load} if self.load else {})}


LOADED = (
    LoadedCase("lstm", 256, 8, 100, inputs=128, device="cpu", threads=CPU_THREADS, load=2),
    LoadedCase("gru", 256, 8, 100, inputs=128, device="cpu", threads=CPU_THREADS, load=2),
    LoadedCase("lstm", 512, 1, 100, inputs=128, device="cpu", threads=CPU_THREADS, load=2),
    LoadedCase("lstm", 256, 8, 100, inputs=128, device="cpu", threads=2 * len(os.sched_getaffinity(0))),
)


@dataclass(frozen=True)
class CellCase(RnnCase):
    """A cell called once for each of T steps, which a loop in Python chains."""

    def keys(self) -> dict[str, Any]:
        keys = super().keys()
        return {"model": f"{keys.pop('cell')}_cell", **keys}


CELL_STEPS = 50


def cell_cases(device: str) -> Iterator[CellCase]:
    threads = CPU_THREADS if device == "cpu" else None
    for cell, dtype, H, B in itertools.product(GRID_CELLS, ("fp32", "bf16"), (128, 512, 1024), (1, 32)):
        yield CellCase(cell, H, B, CELL_STEPS, dtype=dtype, device=device, threads=threads)


EXCHANGE_FLOOR = {
    "cluster": ((1, 0.40), (2, 0.44), (4, 0.50), (8, 0.61), (16, 0.96), (32, 1.45), (64, 2.5)),
    "grid": ((1, 0.69), (4, 0.86), (8, 1.10), (16, 1.50), (32, 1.72), (64, 2.2)),
}
"""KiB of h -> microseconds in which every block publishes its part of h and reads all of it, without arithmetic, on an
H200; the best method of each tier. In a cluster of 8 or 16 blocks: ``st.async`` and the transaction count of an
mbarrier. In a grid of 128 blocks: up to 8 KiB words that carry data and flag, then one barrier in L2. Measured by
kernels that do nothing else, back to back, medians of warm runs; where 8 and 16 blocks differ, the faster."""


def exchange_floor(tier: str, size: float) -> float:
    """Microseconds of one exchange of `size` bytes: between the measured sizes linear, beyond them the nearest."""
    table = EXCHANGE_FLOOR[tier]
    sizes, times = [1024 * kilobytes for kilobytes, _ in table], [time for _, time in table]
    above = bisect.bisect_left(sizes, size)
    if above == 0 or above == len(sizes):
        return times[min(above, len(sizes) - 1)]
    share = (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    return times[above - 1] + share * (times[above] - times[above - 1])


class Layout(NamedTuple):
    """How the blocks of a forward recurrence are arranged."""

    tier: str
    groups: int
    blocks: int
    """Of a group, which exchanges the h of its sequences."""
    sequences: int

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Layout:
        """From what the plan says of the pass."""
        return cls(*(facts[field] for field in cls._fields))

    def floor(self, case: LayerCase) -> float:
        """Microseconds of the exchange of one step; groups run at the same time, each at this price."""
        if self.blocks == 1:
            raise RuntimeError(f"{case.name}: one block holds everything and exchanges nothing")
        H = case.H // getattr(case, "heads", 1)
        return exchange_floor(self.tier, H * self.sequences * DTYPES[case.dtype].itemsize)


def plan(case: LayerCase, trains: bool) -> dict[str, Any]:
    """How weft::rnn runs a case: ``why_not`` or None; the layouts of ``forward`` and ``backward``, or None.

    Compiles the kernels where they are not yet, without holding Python's lock.
    """
    return weft._C.rnn.report(
        device=torch.cuda.current_device(),
        cell=case.cell,
        dtype=str(DTYPES[case.dtype]).removeprefix("torch."),
        input_size=case.inputs,
        hidden_size=case.H,
        layers=case.layers,
        directions=case.directions,
        steps=case.T,
        batch=case.B,
        packed=case.layout == "packed",
        trains=trains,
        heads=getattr(case, "heads", 1),
    )


def compile_kernels(cases: Iterable[tuple[LayerCase, bool]]) -> None:
    """Compiles what the cases (and whether they train) will run, in as many threads as there are cores."""
    start, device = time.perf_counter(), torch.cuda.current_device()

    def compile_one(case: LayerCase, trains: bool) -> str | None:
        torch.cuda.set_device(device)
        try:
            return plan(case, trains)["why_not"]
        except Exception as error:  # the case itself will fail, and say so
            return str(error)

    cases = list(cases)
    workers = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers) as pool:
        reasons = list(pool.map(compile_one, *zip(*cases, strict=True))) if cases else []
    seconds = time.perf_counter() - start
    print(f"compiled the kernels of {len(cases)} cases in {seconds:.1f} s with {workers} threads", flush=True)
    for (case, _), reason in zip(cases, reasons, strict=True):
        if reason:
            print(f"  not {case.name}: {reason}", flush=True)


def _newton_entry(case: NewtonCase) -> Entry:
    """A forward pass in chunks of time beside torch's and beside the scan's, and what a report says of it."""

    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        case.prepare(step)
        _say_algorithm(step)
        walk = getattr(weft.nn, type(step.peer).__name__)(
            case.inputs, case.H, algorithm="scan", device=case.device, dtype=DTYPES[case.dtype]
        )
        walk.load_state_dict(step.weft.state_dict())
        with weft.scan.newton_report() as report:
            step.forward(step.weft)
        print(f"{case.name}: remembers {remembered(step.peer)} steps\n{report}", flush=True)
        # A net that never forgets turns what is rounded in another way into other states.
        if case.memory or case.weights == 1:
            check_layers(step)
        layers = {"weft": step.weft, "scan": walk, "torch.nn": step.peer}
        times = measure(
            {name: Candidate(lambda _, layer=layer: step.forward(layer)) for name, layer in layers.items()},
            case.device, at_most=0.15,
        )  # fmt: skip
        ours = times.pop("weft")
        return [results.put(case.name, "forward", "ms", ours, name, theirs) for name, theirs in times.items()]

    return Entry(case.name, ("forward",), run)


def _auto_entry(case: NewtonCase) -> Entry:
    """A forward pass as "auto" takes it beside the scan's alone, short, as there are many of them."""

    def run(results: Results) -> list[dict[str, str]]:
        layer = weft.nn.RNN(case.inputs, case.H, device=case.device, dtype=DTYPES[case.dtype])
        with torch.no_grad():
            layer.weight_hh_l0.mul_(case.weights)
        walk = copy.deepcopy(layer)
        walk.algorithm = "scan"
        x = torch.randn(case.T, case.B, case.inputs, device=case.device, dtype=DTYPES[case.dtype])
        if case.weights == 1:  # one that never forgets turns what is rounded in another way into other states
            errors = {"output": relative_error(layer(x)[0], walk(x)[0])}
            check_agreement(case.name, errors, agreement_bound(case))
        candidates = {
            name: Candidate(lambda _, layer=layer: layer(x)[0]) for name, layer in (("weft", layer), ("scan", walk))
        }
        times = measure(candidates, case.device, at_most=0.05)
        return [results.put(case.name, "forward", "ms", times["weft"], "scan", times["scan"])]

    return Entry(case.name, ("forward",), run)


def _say_algorithm(step: LayerStep) -> None:
    """A row is about what "auto" takes; here is what that was, where it is not this engine."""
    with torch.set_grad_enabled(step.weft.training):
        taken = weft.explain(step.weft, step.input())
    if taken.algorithm != "persistent":
        print(f"{step.case.name}: auto takes {taken.algorithm} ({taken.reason})", flush=True)


def _layer_entry(case: LayerCase, metrics: tuple[str, ...] = ("forward_backward",)) -> Entry:
    """Times of one case, in ms; "inference" is alone, because layers in evaluation mode do not train."""

    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        inference = metrics == ("inference",)
        step.weft.train(not inference)
        step.peer.train(not inference)
        _say_algorithm(step)
        check_layers(step, inference=inference)
        rows = []
        for metric in metrics:
            times = measure(step.candidates(metric), case.device, at_most=0.15)
            rows.append(results.put(case.name, metric, "ms", times["weft"], "torch.nn", times["torch.nn"]))
        return rows

    return Entry(case.name, metrics, run)


def _loaded_entry(case: LoadedCase) -> Entry:
    """A training step where processors are shared, the layers in turns: what else the machine does meets both."""

    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        check_layers(step)
        before = torch.get_num_threads()
        torch.set_num_threads(case.threads or before)
        try:
            with busy_processes(case.load):
                times = measure_in_turns(step.candidates("forward_backward"), rounds=12)
        finally:
            torch.set_num_threads(before)
        return [results.put(case.name, "forward_backward", "ms", times["weft"], "torch.nn", times["torch.nn"])]

    return Entry(case.name, ("forward_backward",), run)


def _heads_entry(case: HeadsCase) -> Entry:
    """A training step beside the loop, on a GPU in a CUDA graph, and a forward step beside its exchange."""
    cuda = case.device == "cuda"

    def run(results: Results) -> list[dict[str, str]]:
        step = HeadsStep(case)
        step.check()
        mine = {"weft": Candidate(lambda _: step.forward_backward())}
        if not cuda:
            peers = dict(mine)
            peers["eager"] = Candidate(lambda _: step.loop_forward_backward(case.T))
            before = torch.get_num_threads()
            torch.set_num_threads(case.threads or before)
            try:
                times = measure_in_turns(peers, rounds=10)
            finally:
                torch.set_num_threads(before)
            return [results.put(case.name, "forward_backward", "ms", times["weft"], "eager", times["eager"])]
        times, rows = measure(mine, case.device, at_most=0.15), []
        replay = captured(lambda: step.loop_forward_backward(CAPTURED_STEPS))
        loop = measure({"captured": Candidate(lambda _: replay())}, case.device, at_most=0.5)["captured"]
        loop *= case.T / CAPTURED_STEPS
        rows.append(results.put(case.name, "forward_backward", "ms", times["weft"], "captured", loop))
        flash = flashrnn_step(step)
        if flash is not None:
            theirs = measure({"flashrnn": Candidate(lambda _: flash())}, case.device, at_most=0.5)["flashrnn"]
            rows.append(results.put(case.name, "forward_backward", "ms", times["weft"], "flashrnn", theirs))
        facts = plan(case, trains=True)
        print(f"{case.name}: {facts['forward']} {facts['backward']}", flush=True)
        if facts["forward"]["blocks"] > 1:
            shorter = HeadsStep(replace(case, T=case.T // 2))
            forward = {str(s.case.T): Candidate(lambda _, s=s: s.forward()) for s in (step, shorter)}
            times = measure(forward, case.device, at_most=0.5)
            each = 1e3 * (times[str(case.T)] - times[str(case.T // 2)]) / (case.T - case.T // 2)
            floor = Layout.of(facts["forward"]).floor(case)
            rows.append(results.put(case.name, "step_forward", "us", each, "exchange_floor", floor))
        return rows

    return Entry(case.name, ("forward_backward",), run)


def _cell_entry(case: CellCase) -> Entry:
    """Chained steps: inference by the clock of the host, which on a GPU is what limits it, and training."""
    kind, extra = {"gru": ("GRUCell", {}), "lstm": ("LSTMCell", {})}.get(
        case.cell, ("RNNCell", {"nonlinearity": case.cell.removeprefix("rnn_")})
    )

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        options = {"device": case.device, "dtype": DTYPES[case.dtype], **extra}
        cells = {"torch.nn": getattr(nn, kind)(case.inputs, case.H, **options)}
        cells["weft"] = getattr(weft.nn, kind)(case.inputs, case.H, **options)
        cells["weft"].load_state_dict(cells["torch.nn"].state_dict())
        xs = torch.randn(case.T, case.B, case.inputs, device=case.device, dtype=DTYPES[case.dtype]).unbind()

        def chain(cell: nn.Module) -> Tensor:
            state = None
            for x in xs:
                state = cell(x, state)
            return state[0] if isinstance(state, tuple) else state

        def infer(cell: nn.Module) -> Tensor:
            with torch.no_grad():
                output = chain(cell)
            if case.device == "cuda":
                torch.cuda.synchronize()
            return output

        def train(cell: nn.Module) -> tuple[Tensor, ...]:
            grads = torch.autograd.grad(chain(cell).sum(), list(cell.parameters()))
            if case.device == "cuda":
                torch.cuda.synchronize()
            return grads

        found = {name: [infer(cell), *train(cell)] for name, cell in cells.items()}
        errors = {
            str(i): relative_error(*pair) for i, pair in enumerate(zip(found["weft"], found["torch.nn"], strict=True))
        }
        check_agreement(case.name, errors, agreement_bound(case))
        rows = []
        for metric, run_one in (("inference", infer), ("forward_backward", train)):
            candidates = {name: Candidate(lambda _, c=cell, f=run_one: f(c)) for name, cell in cells.items()}
            times = measure_in_turns(candidates, rounds=20)
            each = {name: 1e3 * elapsed / case.T for name, elapsed in times.items()}
            rows.append(results.put(case.name, metric, "us", each["weft"], "torch.nn", each["torch.nn"]))
        return rows

    return Entry(case.name, ("inference", "forward_backward"), run)


def decode_entry(case: LayerCase, tokens: int = TOKENS) -> Entry:
    """Time per token where each step is a call of its own: by the clock of the host, which is what limits it."""

    @torch.no_grad()
    def decode(layer: nn.Module, x: Tensor) -> Tensor:
        state = None
        for _ in range(tokens):
            output, state = layer(x, state)
        if case.device == "cuda":
            torch.cuda.synchronize()
        return output

    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        x = step.x.detach()
        step.weft.eval()
        step.peer.eval()
        _say_algorithm(step)
        check_agreement(
            case.name, {"output": relative_error(decode(step.weft, x), decode(step.peer, x))}, agreement_bound(case)
        )
        layers = {"weft": step.weft, "torch.nn": step.peer}
        candidates = {name: Candidate(lambda _, layer=layer: decode(layer, x)) for name, layer in layers.items()}
        times = measure(candidates, "cpu", at_most=0.5)
        each = {name: 1e3 * elapsed / tokens for name, elapsed in times.items()}
        return [results.put(case.name, "decode", "us", each["weft"], "torch.nn", each["torch.nn"])]

    return Entry(case.name, ("decode",), run)


def _step_entry(case: LayerCase) -> Entry:
    """A forward step beside the exchange that it cannot do without."""

    def run(results: Results) -> list[dict[str, str]]:
        facts = plan(case, trains=True)
        if facts["why_not"]:
            raise RuntimeError(f"no kernel: {facts['why_not']}")
        floor = Layout.of(facts["forward"]).floor(case)
        shorter = replace(case, T=case.T // 2)
        steps = {c.T: LayerStep(replace(c, algorithm="persistent")) for c in (case, shorter)}
        check_layers(steps[case.T])
        times = measure(
            {str(T): step.candidates("forward")["weft"] for T, step in steps.items()}, case.device, at_most=0.5
        )
        each = 1e3 * (times[str(case.T)] - times[str(shorter.T)]) / (case.T - shorter.T)
        print(f"{case.name}: {facts['forward']}", flush=True)
        return [results.put(case.name, "step_forward", "us", each, "exchange_floor", floor)]

    return Entry(case.name, ("step_forward",), run)


def table(device: str) -> Iterator[tuple[LayerCase, Entry]]:
    """Every entry that runs on this device, and its case."""
    if device == "cpu":
        for case in CPU:
            yield case, _layer_entry(case)
        for case in HEADS_CPU:
            yield case, _heads_entry(case)
        for case in cell_cases("cpu"):
            yield case, _cell_entry(case)
        for case in LOADED:
            yield case, _loaded_entry(case)
        return
    for case in STEPS:
        yield case, _step_entry(case)
    for case in HEADS:
        yield case, _heads_entry(case)
    yield LARGE, _layer_entry(LARGE)
    yield PACKED, _layer_entry(PACKED)
    yield LONG, _layer_entry(LONG, ("forward",))
    for case in NEWTON:
        yield case, _newton_entry(case)
    for case in AUTO_NEWTON:
        yield case, _auto_entry(case)
    yield INFERENCE, _layer_entry(INFERENCE, ("inference",))
    for case in DECODE:
        yield case, decode_entry(case)
    for case in cell_cases("cuda"):
        yield case, _cell_entry(case)
    for case in grid_cases():
        yield (
            case,
            _layer_entry(case, ("forward", "forward_backward") if case.B == FORWARD_B else ("forward_backward",)),
        )


class Target(NamedTuple):
    """A row and what it has to reach: a least ratio, or most microseconds per time step."""

    case: LayerCase
    metric: str
    least: float
    per_step: bool = False
    """`least` is not a ratio but the most microseconds per step."""
    peer: str = "torch.nn"


_LSTM_HALF = {H: RnnCase("lstm", H, 16, 1024, dtype="fp16") for H in (512, 1024)}
_BF16 = {cell: RnnCase(cell, 512, 16, 1024, dtype="bf16") for cell in ("lstm", "gru")}
TARGETS = (
    Target(_LSTM_HALF[512], "forward_backward", 1.8),
    Target(_LSTM_HALF[1024], "forward_backward", 1.2),
    *(Target(case, "forward_backward", 7.0) for case in _BF16.values()),
    *(Target(case, "forward_backward", 3.0, per_step=True) for case in _BF16.values()),
    Target(RnnCase("gru", 256, 16, 1024), "forward_backward", 8.0),
    Target(LARGE, "forward_backward", 2.0),
    Target(PACKED, "forward_backward", 8.0),
    Target(LONG, "forward", 3.0),
    Target(INFERENCE, "inference", 8.0),
    *(Target(case, "decode", {"fp32": 1.3, "bf16": 4.0}[case.dtype]) for case in DECODE),
    *(Target(case, "forward_backward", least) for case, least in zip(CPU, (4.0, 1.1, 1.2), strict=True)),
    *(Target(case, "forward_backward", 8.0, peer="captured") for case in HEADS if case.dtype == "bf16"),
    # FlashRNN's fused kernels have no GRU.
    *(
        Target(case, "forward_backward", 2.0, peer="flashrnn")
        for case in HEADS
        if case.dtype == "bf16" and case.cell != "gru"
    ),
    *(Target(case, "forward_backward", 8.0, peer="eager") for case in HEADS_CPU),
    *(Target(case, "forward", 1 / 1.1, peer="scan") for case in NEVER_FORGETS),
)
GRID_MEAN, GRID_WORST, AUTO_WORST = 5.0, 1.0, 1 / 1.1


def grid_rows(rows: Iterable[Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """The training steps of the grid, by case, on the GPU that most of the rows are from."""
    names = {case.name for case in grid_cases()}
    return {
        row["case"]: row
        for row in of_one_gpu(rows)
        if row["case"] in names and row["metric"] == "forward_backward" and row["peer"] == "torch.nn"
    }


def geometric_mean(rows: Iterable[Mapping[str, str]]) -> float:
    """Of the ratios."""
    ratios = [float(row["ratio"]) for row in rows]
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


class Verdict(NamedTuple):
    """A target and what was measured; None where there is no row."""

    words: str
    value: float | None
    holds: bool | None


def verdicts(rows: Sequence[Mapping[str, str]]) -> list[Verdict]:
    """Every target against the rows; the grid's only where all of it was measured."""
    grid = list(grid_rows(rows).values())
    complete = len(grid) == sum(1 for _ in grid_cases())
    mean = geometric_mean(grid) if complete else None
    worst = min(float(row["ratio"]) for row in grid) if complete else None
    found = [
        Verdict(f"geometric mean of the grid, at least {GRID_MEAN:g}x", mean, mean and mean >= GRID_MEAN),
        Verdict(f"worst case of the grid, at least {GRID_WORST:g}x", worst, worst and worst >= GRID_WORST),
    ]
    # What the grid's GPU has not measured may be from another.
    present = {(row["case"], row["metric"], row["peer"]): row for row in [*rows, *of_one_gpu(rows)]}
    auto = [present.get((case.name, "forward", "scan")) for case in AUTO_NEWTON]
    lowest = min(float(row["ratio"]) for row in auto if row) if auto and all(auto) else None
    words = f'worst of {len(auto)} sequences that "auto" takes, at least {AUTO_WORST:.3g}x of scan'
    found.append(Verdict(words, lowest, lowest and lowest >= AUTO_WORST))
    for target in TARGETS:
        words = f"{target.case.name} {target.metric}" + (f" of {target.peer}" if target.peer != "torch.nn" else "")
        row = present.get((target.case.name, target.metric, target.peer))
        if target.per_step:
            value = 1e3 * float(row["weft"]) / target.case.T if row else None
            words += f", at most {target.least:g} us per step"
            found.append(Verdict(words, value, None if value is None else value <= target.least))
        else:
            value = float(row["ratio"]) if row else None
            words += f", at least {target.least:g}x"
            found.append(Verdict(words, value, None if value is None else value >= target.least))
    return found


def report(rows: Sequence[Mapping[str, str]]) -> None:
    """Prints how the grid is spread and every target."""
    grid = sorted(grid_rows(rows).values(), key=lambda row: float(row["ratio"]))
    if grid:
        print(f"\n{len(grid)} points of the grid: geometric mean {geometric_mean(grid):.2f}x, the worst:")
        for row in grid[:8]:
            print(f"  {row['ratio']:>7}x  {row['weft']:>8} ms  {row['case']}")
    print("\ntargets:")
    for words, value, holds in verdicts(rows):
        mark = "-" if holds is None else "pass" if holds else "FAIL"
        print(f"  {mark:<4}  {'' if value is None else significant(value, 3):>7}  {words}")


def main(arguments: list[str] | None = None) -> None:
    parser = table_parser("rnn", __doc__, minutes=8.0)
    parser.add_argument("--report", action="store_true", help="only print what the rows say about the targets")
    options = parser.parse_args(arguments)
    output = options.output or RESULTS / "rnn.csv"
    if options.report:
        report(read_rows(output))
        return
    start = time.monotonic()
    results = Results(output)
    failures: list[str] = []
    for device in begin_table(options):
        chosen = [(case, entry) for case, entry in table(device) if entry.matches(options.filter)]
        # Stable: the table's order within what is missing and within what is there.
        chosen.sort(key=lambda pair: _is_measured(results, *pair))
        if device == "cuda":
            compile_kernels(
                (case, not {"inference", "decode"} & set(entry.metrics))
                for case, entry in chosen
                if not isinstance(case, (CellCase, NewtonCase))
            )
        left = options.minutes - (time.monotonic() - start) / 60
        failures += run_entries([entry for _, entry in chosen], results, minutes=left, patience=PATIENCE)
    report(list(results.rows.values()))
    print(f"\n{(time.monotonic() - start) / 60:.1f} minutes, {output}")
    exit_with(failures)


def _is_measured(results: Results, case: LayerCase, entry: Entry) -> bool:
    return all(
        results.measured(case.name, metric, _peer(case, metric), hardware(case.device))
        for metric in entry.metrics
    )  # fmt: skip


def _peer(case: LayerCase, metric: str) -> str:
    if isinstance(case, HeadsCase):
        return "captured" if case.device == "cuda" else "eager"
    if case in AUTO_NEWTON:
        return "scan"
    return "exchange_floor" if metric == "step_forward" else "torch.nn"


if __name__ == "__main__":
    main()
