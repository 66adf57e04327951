"""The rnn engine against torch.nn, and against what one exchange of the hidden state costs.

``python -m benchmarks.rnn [FILTER]`` measures into results/rnn.csv: the training step of ``algorithm="auto"`` over a
grid of cells, dtypes, hidden sizes and batches at T = 1024, with as many inputs as hidden units; single cases beyond
it; layers of several heads and sLSTM, which torch has not, beside the loop over their steps: ``captured``, that loop in
a CUDA graph, on a CPU ``eager``, and the matrix products alone, ``floor``; and ``flashrnn`` where that package is
installed; forward passes of nets that remember so many steps (memory=...), or whose recurrent weights are so many times
torch's (weights=...), beside the scan's; 50 chained steps of the cells, per step (model=..._cell); on a CPU three cases
with two threads, and some on shared processors: beside two busy processes (load=2), and with twice as many threads as
there are processors. A layer runs as users call it, without an initial state; a random gradient arrives at every
output, and gradients are taken for the input and all parameters. FILTER is a substring of the case or the metric. What
this commit has not measured comes first, so that the next run goes on where one was out of time.

``step_forward`` is the time of a forward step without what a call costs once: the difference between 1024 and 512
steps, divided by 512. Its peer ``exchange_floor`` is what the exchange of h alone takes in the layout that runs.

At the end stand the geometric mean and the worst case of the grid, and every target with what was reached.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import weft
from torch import Tensor, nn

from benchmarks.common import (
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
    read_rows,
    relative_error,
    run_entries,
    table_parser,
)
from benchmarks.heads import CAPTURED_STEPS, HeadsCase, HeadsStep, flashrnn_step
from benchmarks.layers import LayerCase, LayerStep, agreement_bound, check_layers, say_algorithm
from benchmarks.newton import AUTO_NEWTON, NEWTON, NewtonCase, auto_entry, newton_entry
from benchmarks.rnn_cases import (
    CPU,
    DECODE,
    FORWARD_B,
    HEADS,
    HEADS_CPU,
    INFERENCE,
    LARGE,
    LOADED,
    LONG,
    PACKED,
    STEPS,
    CellCase,
    LoadedCase,
    cell_cases,
    grid_cases,
)
from benchmarks.rnn_targets import report

TOKENS = 200
"""Decode steps between two looks at the clock."""
PATIENCE = 120.0


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


def _layer_entry(case: LayerCase, metrics: tuple[str, ...] = ("forward_backward",)) -> Entry:
    """Times of one case, in ms; "inference" is alone, because layers in evaluation mode do not train."""

    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        inference = metrics == ("inference",)
        step.weft.train(not inference)
        step.peer.train(not inference)
        say_algorithm(step)
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
            peers["floor"] = Candidate(lambda _: step.products())
            before = torch.get_num_threads()
            torch.set_num_threads(case.threads or before)
            try:
                times = measure_in_turns(peers, rounds=10)
            finally:
                torch.set_num_threads(before)
            ours = times.pop("weft")
            return [results.put(case.name, "forward_backward", "ms", ours, name, time) for name, time in times.items()]
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
        say_algorithm(step)
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
        yield case, newton_entry(case)
    for case in AUTO_NEWTON:
        yield case, auto_entry(case)
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
