"""The persistent executor and the Trainer: Tree-LSTMs, six nets, a level of one vertex, recurrent cells."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import weft
from torch import Tensor
from weft import Graphs
from weft.vertex import models

from benchmarks import nets
from benchmarks.common import (
    Candidate,
    Entry,
    Results,
    captured,
    case_name,
    check_agreement,
    hardware,
    measure,
    relative_error,
    show,
)
from benchmarks.level_loops import STEPS, LevelLoop, Step, case_of, loop_entry, sample
from benchmarks.tree_training import device_busy


def net_entry(name: str, data: Callable[[], nets.Data], B: int, device: str, H: int | None = None) -> Entry:
    """The binary Tree-LSTM's steps in a row by the persistent executor and by the Trainer, beside the same net batched,
    and beside level loops with the same optimizer. What :func:`nets_entry` has rows of is left to it."""
    cases = _cases(name, B, device, H)
    of_nets = H is None and B in nets.BATCHES

    def run(results: Results) -> list[dict[str, str]]:
        training = functools.partial(nets.Training, name, data(), B, device, H)
        first = training()
        runs = {executor: first.runs_as(executor) == executor for executor in ("persistent", "trainer")}
        if not any(runs.values()):
            print(f"neither the persistent executor nor the Trainer's kernel runs {name} here", flush=True)
            return []
        rows: list[dict[str, str]] = []
        want = first.losses(first.by("batched"))
        steps: dict[str, nets.Step] = {}
        for executor, there in runs.items():
            if there:
                one = training()
                step = one.trainer() if executor == "trainer" else one.by(executor)
                errors = {"losses": relative_error(one.losses(step), want)}
                check_agreement(cases[executor], errors, 1e-4)
                steps[executor] = training().trainer() if executor == "trainer" else training().by(executor)
        if runs["persistent"] and not of_nets:
            gradients = {e: in_a_row(first, first.gradients_by(e)) for e in ("persistent", "batched", "auto")}
            rows += _gradient_rows(results, cases, {e: t / STEPS for e, t in measure(gradients, device).items()})
        if runs["trainer"]:
            if not of_nets:
                steps["batched"] = training().by("batched")
            candidates = {who: in_a_row(first, step) for who, step in steps.items()}
            candidates["reference"] = in_a_row(first, training().by("reference"))
            candidates["eager"] = eager_in_a_row(training())
            repeated = training()
            batch = repeated.batch()
            loop = LevelLoop(repeated.cell, batch[0].to("cpu"), device)
            replay = captured(lambda: repeated.captured_step(loop, *batch))
            candidates["captured"] = Candidate(lambda _: [replay() for _ in range(STEPS)][-1])
            times = {who: time / STEPS for who, time in measure(candidates, device).items()}
            batches = [first.collate() for _ in range(STEPS)]
            times["device_busy"] = device_busy(lambda: [steps["trainer"](b) for b in batches]) / STEPS
            rows += [
                results.put(cases["trainer"], "step", "ms", times["trainer"], peer, time)
                for peer, time in times.items()
                if peer != "trainer"
            ]
        return rows

    return Entry(f"{cases['trainer']} {cases['persistent']}", ("forward_backward", "step"), run)


def _cases(name: str, B: int, device: str, H: int | None = None) -> dict[str, str]:
    """The case of each executor."""
    return {
        executor: case_of(name, device, H or nets.hidden_of(name), B, "fp32", executor)
        for executor in ("persistent", "trainer", "auto")
    }


def _gradient_rows(results: Results, cases: Mapping[str, str], times: Mapping[str, float]) -> list[dict[str, str]]:
    """Of steps without the optimizer, in milliseconds, by each executor; where there is a choice."""
    if "persistent" not in times:
        return []
    own, other, auto = (times[e] for e in ("persistent", "batched", "auto"))
    return [
        results.put(cases["persistent"], "forward_backward", "ms", own, "batched", other),
        results.put(cases["auto"], "forward_backward", "ms", auto, "best", min(own, other)),
    ]


def in_a_row(training: nets.Training, step: nets.Step) -> Candidate:
    """Steps on graphs that were never seen, one behind the other."""
    return Candidate(
        lambda batches: [step(batch) for batch in batches][-1], lambda: [training.collate() for _ in range(STEPS)]
    )


def eager_in_a_row(training: nets.Training) -> Candidate:
    """Steps of the level loop, whose indices are made beside, too."""

    def prepare() -> list[tuple]:
        batches = [training.collate() for _ in range(STEPS)]
        return [(batch, LevelLoop(training.cell, batch[0], training.device)) for batch in batches]

    def run(batches: list[tuple]) -> Tensor:
        return [training.step(lambda _, loop=loop: loop, batch) for batch, loop in batches][-1]

    return Candidate(run, prepare)


MEANS = {
    "persistent": ("forward_backward", "batched"),
    "trainer": ("step", "batched"),
    "auto": ("forward_backward", "best"),
}
"""Metric and peer of the rows of each executor."""


def nets_entry(data: Callable[[str], nets.Data], names: Sequence[str], device: str) -> Entry:
    """Nets at all batch sizes, each step on graphs that were never seen, and the geometric means of their rows.

    Cases that have no row of this commit come first, so that a run can go on where another was cut off; the rows are
    kept as they come. A case that fails costs the others nothing.
    """
    means = {e: case_name(model="nets", device=device, dtype="fp32", executor=e) for e in MEANS}

    def run(results: Results) -> list[dict[str, str]]:
        of_nets: dict[str, _Nets] = {}
        rows, failed = [], []
        gpu = hardware(device)

        def is_there(B: int, name: str) -> bool:
            return results.measured(_cases(name, B, device)["auto"], *MEANS["auto"], gpu)

        # Sizes far apart come first, so that the means of a part are not those of small batches; and nets of trees: the
        # taggers' kernels take longest to compile, where they are not on disk.
        sizes = sorted(nets.BATCHES, key=lambda B: (nets.BATCHES.index(B) * 3) % len(nets.BATCHES))
        cases = itertools.product(sizes, names)
        for B, name in sorted(cases, key=lambda case: (is_there(*case), case[1].startswith("bilstm"))):
            try:
                if name not in of_nets:
                    of_nets[name] = _Nets(name, data(name), device)
                times = of_nets[name].times(B)
            except RuntimeError as error:
                failed.append(f"{name} B={B}: {error}")
                print(f"FAILED {failed[-1]}", flush=True)
                continue
            own = _cases(name, B, device)
            rows = _gradient_rows(results, own, times)
            if "trainer" in times:
                rows.append(results.put(own["trainer"], "step", "ms", times["trainer"], "batched", times["loop"]))
            show(rows)
            rows = _means(results, means, names, device)
            results.save()
        if failed:
            raise RuntimeError("; ".join(failed))
        return rows

    return Entry(" ".join(means.values()), ("forward_backward", "step"), run)


def _means(results: Results, cases: Mapping[str, str], names: Sequence[str], device: str) -> list[dict[str, str]]:
    """Geometric means of the rows of this commit, and no others: of how many cases they are is in their names, so that
    those of earlier runs would stand beside them."""
    gpu = hardware(device)
    begin = tuple(f"{case} " for case in cases.values())
    for row in [row for row in results.rows.values() if row["gpu"] == gpu and row["case"].startswith(begin)]:
        results.drop(row)
    rows = []
    for executor, case in cases.items():
        metric, peer = MEANS[executor]
        keys = {(name, B): _cases(name, B, device)[executor] for name in names for B in nets.BATCHES}
        there = {key: c for key, c in keys.items() if results.measured(c, metric, peer, gpu)}
        if not there:
            continue
        found = [results.rows[c, metric, peer, gpu] for c in there.values()]
        own, other = (
            statistics.geometric_mean(float(row[column]) for row in found) for column in ("weft", "peer_value")
        )
        case = f"{case} nets={len({name for name, _ in there})} cases={len(there)}"
        rows.append(results.put(case, metric, "ms", own, peer, other))
    return rows


class _Nets:
    """One net: gradients by each executor of the same cell, and a Trainer and a loop that train one each."""

    def __init__(self, name: str, data: nets.Data, device: str) -> None:
        self._drawn, self._trained, self._looped = (nets.Training(name, data, 1, device) for _ in range(3))
        self._trainer, self._loop = self._trained.trainer(), self._looped.by("batched")
        want = self._drawn.losses(self._drawn.by("batched"))
        for what, step in (("persistent", self._drawn.by("persistent")), ("trainer", self._drawn.trainer())):
            check_agreement(f"{name} by {what}", {"losses": relative_error(self._drawn.losses(step), want)}, 1e-4)

    def times(self, B: int) -> dict[str, float]:
        """Milliseconds of a step with `B` graphs; of none where nothing but "batched" runs."""
        drawn = self._drawn
        drawn.B = B
        steps = {
            executor: drawn.gradients_by(executor)
            for executor in ("persistent", "batched", "auto")
            if executor != "persistent" or drawn.runs_as(executor) == executor
        }
        self._trained.B = B
        if self._trained.runs_as("trainer") == "trainer":
            steps |= {"trainer": self._trainer, "loop": self._loop}
        if steps.keys() == {"batched", "auto"}:
            return {}
        candidates = {e: in_a_row(drawn, step) for e, step in steps.items()}
        times = measure(candidates, drawn.device, warmup=1, repeats=4, at_most=0.1, spread=0.05)
        return {e: time / STEPS for e, time in times.items()}


def level_entry(H: int, device: str) -> Entry:
    """Microseconds of a level of one vertex, from chains of 16 and of 64, in CUDA graphs; beside "batched"."""
    case = case_of("treelstm", device, H, 1, "fp32", "persistent", data="chains")

    def run(results: Results) -> list[dict[str, str]]:
        times: dict[tuple[str, bool, int], float] = {}
        for executor in ("persistent", "batched"):
            for length in (16, 64):
                step = Step("treelstm", Graphs.chain([length]), H, device, executor)
                if not step.runs():
                    return []
                for back in (False, True):
                    once = Step("treelstm", Graphs.chain([length]), H, device, executor)
                    replay = captured(once.weft if back else once.forward)
                    candidate = Candidate(lambda _, replay=replay: replay())
                    times[executor, back, length] = measure({"weft": candidate}, device)["weft"]
        rows = []
        for metric, back in (("level_forward", False), ("level_backward", True)):

            def level(executor: str, back: bool = back) -> float:
                forward, both = ((times[executor, b, 64] - times[executor, b, 16]) / 48 for b in (False, True))
                return 1e3 * (both - forward if back else forward)

            rows.append(results.put(case, metric, "us", level("persistent"), "batched", level("batched")))
        return rows

    return Entry(case, ("level_forward", "level_backward"), run)


def recurrent_entry(name: str, H: int, dtype: torch.dtype, device: str, B: int = 16, T: int = 1024) -> Entry:
    """A recurrent cell over chains: LSTM beside weft.nn.LSTM, a cell of the user's own beside its captured loop."""
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    case = case_of(name, device, H, B, short, "persistent", T=T)
    peer = "weft.nn" if name == "chainlstm" else "captured"

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        cell = (models.ChainLSTM if name == "chainlstm" else nets.OwnCell)(H, H).to(device, dtype)
        graphs = Graphs.chain([T] * B).to(device)
        x = torch.randn(B * T, H, device=device, dtype=dtype).requires_grad_()
        found = weft.explain(cell, graphs, x, executor="persistent")
        if found.executor != "persistent":
            print(f"persistent does not run here: {found.reason}", flush=True)
            return []
        grad = torch.randn(B * T, H, device=device, dtype=dtype)
        leaves = [x, *cell.parameters()]

        def mine() -> tuple[Tensor, ...]:
            y = cell(graphs, x, executor="persistent")
            return y.detach(), *torch.autograd.grad(y, leaves, grad)

        if name == "chainlstm":
            layer = weft.nn.LSTM(H, H, batch_first=True, device=device, dtype=dtype)
            with torch.no_grad():
                layer.weight_ih_l0.copy_(cell.W.weight)
                layer.weight_hh_l0.copy_(cell.U.weight)
                layer.bias_ih_l0.copy_(cell.W.bias)
                layer.bias_hh_l0.zero_()
            z = x.detach().view(B, T, H).requires_grad_()
            weights = [z, layer.weight_ih_l0, layer.bias_ih_l0, layer.weight_hh_l0]

            def theirs() -> tuple[Tensor, ...]:
                y, _ = layer(z)
                return y.detach().reshape(B * T, H), *torch.autograd.grad(y, weights, grad.view(B, T, H))

        else:
            own = nets.OwnCell(H, H).to(device, dtype)
            own.load_state_dict(cell.state_dict())
            z = x.detach().clone().requires_grad_()
            weights = [z, *own.parameters()]

            def loop() -> tuple[Tensor, ...]:
                wx = own.W(z).view(B, T, -1).transpose(0, 1)
                h, states = z.new_zeros(B, H), []
                for t in range(T):
                    h = own.step(wx[t], h)
                    states.append(h)
                y = torch.stack(states, 1).view(B * T, H)
                return y.detach(), *torch.autograd.grad(y, weights, grad)

            theirs = captured(loop)
        bound = 1e-3 if dtype == torch.float32 else 0.1
        pairs = zip(("output", "grad_input"), mine(), theirs(), strict=False)
        check_agreement(case, {what: relative_error(a, b.reshape(a.shape)) for what, a, b in pairs}, bound)
        times = measure({"weft": Candidate(lambda _: mine()), peer: Candidate(lambda _: theirs())}, device)
        return [results.put(case, "forward_backward", "ms", times["weft"], peer, times[peer])]

    return Entry(case, ("forward_backward",), run)


def persistent_table(
    trees: Sequence[weft.data.Tree] | None, sentences: Sequence[weft.data.Sentence] | None, device: str = "cuda"
) -> Iterator[Entry]:
    """Entries of the persistent executor and of the Trainer. Those that do not run here write no row."""
    if trees:

        def graphs(B: int) -> Callable[[], Graphs]:
            return lambda: Graphs.from_children([tree.children for tree in sample(trees, B)])

        for B in (1, 25, 64, 256):
            yield loop_entry("treelstm", graphs(B), 256, B, device, executor="persistent")
        yield loop_entry("treelstm", graphs(256), 256, 256, device, executor="persistent", autocast=True)
        for H in (512, 1024):
            yield loop_entry("treelstm", graphs(64), H, 64, device, executor="persistent")

    @functools.cache
    def data(name: str) -> nets.Data:
        return nets.data_of(name, (trees or [])[: nets.SAMPLES], (sentences or [])[: nets.SAMPLES])

    yield level_entry(256, device)
    if trees:
        for B in (1, 25, 64, 256):
            yield net_entry("treelstm", functools.partial(data, "treelstm"), B, device)
    here = [name for name in nets.NETS if (trees if not name.startswith("bilstm") else sentences)]
    if here:
        yield nets_entry(data, here, device)
    for name in ("chainlstm", "own"):
        for H in (256, 512):
            for dtype in (torch.float32, torch.bfloat16):
                yield recurrent_entry(name, H, dtype, device)
