"""The vertex engine against level loops in torch, against torch.nn, and against its own arithmetic.

``python -m benchmarks.vertex [FILTER]`` measures the table into results/vertex.csv; FILTER is a substring of the case,
the metric or the peer. Trees are those of the Stanford Sentiment Treebank (``--sst``, WEFT_SST, or shared/data/sst in
the repository or beside it); rows that need them are left out, with a word, where they are not. A step takes gradients
for the inputs and all parameters, of a random gradient at every output.

Peers: ``eager`` is a loop over the levels as one would write it for this one model, with its indices made beforehand,
the product with the inputs taken out of the loop, and no vertex without children multiplied by U; ``captured`` is the
same loop, forward and backward, in a CUDA graph, which only runs this one batch; ``torch.nn`` is cuDNN's LSTM;
``floor`` is the matrix products of the whole batch alone, each as one; ``none`` is the engine with every option off.
In rows of the metric ``forward_backward_captured`` Weft's step is in a CUDA graph, too.
Weft runs graphs that it has seen before, as the loops do; what a new batch costs stands in the rows of the metric
``schedule``, whose peer is the whole ``step``, and of ``steps_in_a_row``, one of many steps that do not wait for each
other, each on a new batch, whose peer takes batches that it has ``seen``. Rows of the metric ``step`` are a user's
training steps in a row, each on graphs that were never seen: sending a batch, embedding, cell, head, cross-entropy,
gradients and SGD. A DataLoader's part, putting batches together and pinning them, which plans their schedules, is not
in the time, nor is making the indices of the loop for ``eager``; ``captured`` repeats one batch, ``untyped`` is the
same net as one function for all vertices, ``without_cell`` is what is left of the step where the head reads the
embedding, all of it torch's, and ``device_busy`` is the time in which the device has work. Rows of the metric
``host_of_cell`` have the host's time for the cell's call and its backward pass. All these alone: ``python -m
benchmarks.vertex task=train``.

Rows of ``executor=persistent`` are steps on graphs that were never seen, those of ``executor=trainer`` whole steps of
weft.vertex.Trainer, with SGD and momentum in the peers, too. Of six nets (benchmarks/nets.py) they stand beside the
same net under ``batched``, those of ``executor=auto`` beside the ``best`` of both; rows of ``model=nets`` are the
geometric means of these. The nets alone: ``python -m benchmarks.vertex model=nets``, which takes a minute or two where
``python -m benchmarks.nets`` has compiled their kernels, and goes on where it was cut off. ``level_forward`` and
``level_backward`` are what one more level of one vertex costs on the device.

All in fp32 without TF32, but for the chain LSTMs: there both follow cuDNN's default, TF32.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import weft
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from weft import Graphs

from benchmarks import nets
from benchmarks.common import (
    CPU_THREADS,
    RESULTS,
    Candidate,
    Entry,
    Results,
    begin_table,
    check_agreement,
    exit_with,
    measure,
    relative_error,
    run_entries,
    table_parser,
)
from benchmarks.level_loops import STEPS, Step, case_of, complete_trees, loop_entry, sample, shared_subtrees, treebank
from benchmarks.persistent import persistent_table
from benchmarks.tree_training import training_table

ABLATION = ("lazy", "fuse", "stream")


def _chain_entry(layout: str, lengths: Callable[[], list[int]], H: int, B: int, device: str, **keys: Any) -> Entry:
    """A chain LSTM beside torch.nn.LSTM on the same sequences, packed or all of one length."""
    case = case_of("chainlstm", device, H, B, "fp32", layout=layout, **keys)

    def run(results: Results) -> list[dict[str, str]]:
        graphs = Graphs.chain(lengths())
        with _matmul_tf32(torch.backends.cudnn.allow_tf32):
            step = Step("chainlstm", graphs, H, device)
            peer = nn.LSTM(H, H).to(device)
            with torch.no_grad():
                peer.weight_ih_l0.copy_(step.model.W.weight)
                peer.weight_hh_l0.copy_(step.model.U.weight)
                peer.bias_ih_l0.copy_(step.model.W.bias)
                peer.bias_hh_l0.zero_()
            # Row i of what torch takes is vertex index[i]; in time order either way.
            sequences = torch.arange(graphs.num_vertices).split(graphs.ptr.diff().tolist())
            packed = pack_sequence(sequences, enforce_sorted=False)
            if layout == "packed":
                index = packed.data.to(device)
            else:
                index = torch.stack(sequences, 1).to(device)
            x = step.x.detach()[index].requires_grad_()
            grad = step.grad[index]

            def torchs() -> tuple[Tensor, ...]:
                if layout == "packed":
                    output = peer(nn.utils.rnn.PackedSequence(x, packed.batch_sizes))[0].data
                else:
                    output = peer(x)[0]
                weights = (x, peer.weight_ih_l0, peer.bias_ih_l0, peer.weight_hh_l0)
                return output.detach(), *torch.autograd.grad(output, weights, grad)

            mine, theirs = step.weft(), torchs()
            errors = {
                name: relative_error(a, b)
                for name, a, b in zip(
                    ("output", "grad_input", "grad_W", "grad_bias", "grad_U"),
                    (mine[0][index], mine[1][index], *mine[2:]),
                    theirs,
                    strict=True,
                )
            }
            check_agreement(case, errors, 2e-2 if device == "cuda" else 1e-4)
            times = measure(
                {"weft": Candidate(lambda _: step.weft()), "torch.nn": Candidate(lambda _: torchs())}, device
            )
        return [results.put(case, "forward_backward", "ms", times["weft"], "torch.nn", times["torch.nn"])]

    return Entry(case, ("forward_backward", "torch.nn"), run)


@contextlib.contextmanager
def _matmul_tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _schedule_entry(trees: Sequence[weft.data.Tree], H: int, B: int, device: str) -> Entry:
    """Host time of a new batch, from graphs per tree to one that can run, as a part of a whole step on a new batch.

    All that is planned from a batch is what a call costs more on graphs that it has not seen.
    """
    case = case_of("treelstm", device, H, B)

    def run(results: Results) -> list[dict[str, str]]:
        parts = [Graphs.from_children([tree.children]) for tree in sample(trees, B)]
        step = Step("treelstm", Graphs.batch(parts), H, device)

        def fresh() -> Graphs:
            return Graphs.batch(parts).to(device)

        def call(graphs: Graphs) -> Any:
            # On the CPU nothing is moved, and what a call computes would drown the difference.
            run = functools.partial(weft.explain, step.model) if device == "cpu" else step.model
            return run(graphs, step.x, executor=step.executor)

        batching = host_time(lambda _: fresh(), lambda: None, device)
        planning = host_time(call, fresh, device) - host_time(call, lambda: step.graphs, device)
        whole = measure({"weft": Candidate(lambda _: step.weft(fresh()))}, device)["weft"]
        rows = [results.put(case, "schedule", "ms", batching + max(planning, 0.0), "step", whole)]

        def steps(graphs: Callable[[], Graphs]) -> Candidate:
            return Candidate(lambda _: [step.weft(graphs())[0] for _ in range(STEPS)][-1])

        times = measure({"weft": steps(fresh), "seen": steps(lambda: step.graphs)}, device)
        rows.append(results.put(case, "steps_in_a_row", "ms", times["weft"] / STEPS, "seen", times["seen"] / STEPS))
        return rows

    return Entry(case, ("schedule", "steps_in_a_row"), run)


def host_time(run: Callable[[Any], Any], prepare: Callable[[], Any], device: str, repeats: int = 50) -> float:
    """Median milliseconds until `run` returns, with an idle device before it; it need not have finished by then."""
    times = []
    for _ in range(repeats):
        prepared = prepare()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = run(prepared)
        times.append((time.perf_counter() - start) * 1e3)
        del result
    return statistics.median(times)


def _ablation_entries(graphs: Callable[[], Graphs], H: int, B: int, device: str) -> Iterator[Entry]:
    """Each option alone, and all together, against none."""
    for chosen in [(option,) for option in ABLATION] + [ABLATION]:
        switches = {option: option in chosen for option in ABLATION}
        case = case_of("treelstm", device, H, B, **{option: "on" if on else "off" for option, on in switches.items()})

        def run(results: Results, case: str = case, switches: dict[str, bool] = switches) -> list[dict[str, str]]:
            step = Step("treelstm", graphs(), H, device)

            def with_options(options: dict[str, bool]) -> Candidate:
                def timed(_: Any) -> Any:
                    with weft.vertex.options(**options):
                        return step.weft()

                return Candidate(timed)

            none = dict.fromkeys(ABLATION, False)
            times = measure({"weft": with_options(switches), "none": with_options(none)}, device)
            return [results.put(case, "forward_backward", "ms", times["weft"], "none", times["none"])]

        yield Entry(case, ("forward_backward", "none"), run)


def table(
    device: str,
    trees: Sequence[weft.data.Tree] | None,
    sentences: Sequence[weft.data.Sentence] | None = None,
) -> Iterator[Entry]:
    """Every entry of the table that runs on this device and with these trees and sentences."""

    def treebank_graphs(B: int) -> Callable[[], Graphs]:
        return lambda: Graphs.from_children([tree.children for tree in sample(trees or [], B)])

    if device == "cpu":
        if trees:
            for B in (1, 64):
                yield loop_entry("treelstm", treebank_graphs(B), 128, B, device)
            yield _schedule_entry(trees, 128, 64, device)
            yield from training_table(trees, 128, ("treelstm", "typed"), (25,), device)
        return
    if trees:
        for B in (1, 25, 64, 256):
            yield loop_entry("treelstm", treebank_graphs(B), 256, B, device)
        yield loop_entry("childsum", treebank_graphs(256), 256, 256, device)
    yield loop_entry("treefc", lambda: complete_trees(256, 64), 512, 64, device, peers=("eager", "captured", "floor"))
    if trees:
        words = [sum(symbol is not None for symbol in tree.symbols) for tree in sample(trees, 64)]
        yield _chain_entry("packed", lambda: words, 512, 64, device)
    yield _chain_entry("dense", lambda: [64] * 64, 512, 64, device, T=64)
    if trees:
        yield _schedule_entry(trees, 256, 256, device)
        yield from training_table(trees, 256, ("treelstm", "typed", "childsum", "treefc"), (1, 25, 256), device)
        yield from _ablation_entries(treebank_graphs(256), 256, 256, device)
        yield loop_entry("treelstm", treebank_graphs(256), 256, 256, device, autocast=True)
        yield loop_entry("treelstm", treebank_graphs(256), 1024, 256, device, peers=("eager", "captured", "floor"))
        yield loop_entry("treelstm", treebank_graphs(2048), 256, 2048, device, peers=("eager", "floor"))
        yield loop_entry("treelstm", treebank_graphs(256), 256, 256, device, memory=True)

    def shared() -> Graphs:
        return Graphs.from_children([shared_subtrees(tree) for tree in sample(weft.data.python_asts(), 256)])

    yield loop_entry("childsum", shared, 256, 256, device, data="shared_asts")
    yield from persistent_table(trees, sentences, device)


def main(arguments: list[str] | None = None) -> None:
    parser = table_parser("vertex", __doc__, filters="substring of case, metric or peer")
    parser.add_argument("--sst", type=Path, help="folder with the treebank's train.txt")
    parser.add_argument("--wikiner", type=Path, help="folder with WikiNER's dev.txt")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    devices = begin_table(options)
    trees = treebank(options.sst)
    if trees is None:
        print("the Stanford Sentiment Treebank is not here: its rows are left out (--sst)", flush=True)
    sentences = nets.sentences(options.wikiner)
    if sentences is None:
        print("WikiNER is not here: its rows are left out (--wikiner)", flush=True)
    results = Results(options.output or RESULTS / "vertex.csv")
    failures: list[str] = []
    for device in devices:
        torch.set_num_threads(CPU_THREADS if device == "cpu" else threads)
        entries = [entry for entry in table(device, trees, sentences) if entry.matches(options.filter)]
        failures += run_entries(entries, results, minutes=options.minutes)
    exit_with(failures)


if __name__ == "__main__":
    main()
