"""The offload engine against torch's save_on_cpu, the plain step, and what the bus allows.

``python -m benchmarks.offload [FILTER]`` measures the table into results/offload.csv: the codecs against the bytes that
they read and write at the rate of a device-to-device copy, and beside a matrix product; training steps of VGG-19,
ResNet-152, EfficientNet, a GPT-like and a Llama-shaped decoder with budgets of 75, 50, 25 and 0 percent of what they
save, and with none, the last one also against checkpointing of every block, and all against torchtune's offloading
where it is installed; the plans for these steps against moving everything on demand; the host's part of a saved tensor;
managed memory beside pinned copies; the share of non-zeros behind every ReLU of the networks of cDMA, before
and after a short training. FILTER is a substring of the case or the metric.

The floor of a step is max(F, out) + max(B, back): the plain forward and backward, and the bytes that crossed the bus at
the rates of pinned copies, all measured in the same run. Where the policy's model predicts that this step has to wait
longer, for room within the budget, the floor is the plain step with that wait: a budget that holds one tensor cannot
overlap its copy with the operation that makes the next. A step that the bus holds up is the median of 4 after one
warm-up: it takes long, and as long as the next. So are those of save_on_cpu and torchtune, once their host memory is
there and their steps get no faster.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import weft
from torch import Tensor, nn
from torch.nn import functional
from weft import _C
from weft._offload.managed import managed_pool
from weft.offloading import Link, Move, simulate

from benchmarks import models
from benchmarks.common import (
    DTYPES,
    RESULTS,
    Candidate,
    Entry,
    Results,
    begin_table,
    case_name,
    check_agreement,
    copy_bandwidth,
    exit_with,
    measure,
    peak_memory,
    run_entries,
    table_parser,
)
from benchmarks.densities import density_entry, density_models

GIB = 1 << 30
Rows = list[dict[str, str]]


# ---------------------------------------------------------------------------------------------------------- the codecs


def sparse(size: int, density: float, dtype: str, device: str) -> Tensor:
    """`size` bytes with that share of non-zeros, in no order."""
    n = size // DTYPES[dtype].itemsize
    x = torch.empty(n, dtype=DTYPES[dtype], device=device)
    for part in x.split(1 << 27):
        keep = torch.rand(part.shape, device=device) < density
        part.copy_(torch.where(keep, torch.rand(part.shape, device=device) + 1, 0.0))
    return x


def same_bits(a: Tensor, b: Tensor) -> float:
    """0 where they are equal to the last bit, else infinite: an error for check_agreement."""
    integer = torch.int16 if a.element_size() == 2 else torch.int32
    return 0.0 if torch.equal(a.view(integer), b.view(integer)) else float("inf")


@functools.cache
def copy_rate(device: str, size: int) -> float:
    """Bytes per second, read and written together, of a copy on the device."""
    if device == "cuda":
        return copy_bandwidth()
    source = torch.rand(size // 4)
    target = torch.empty_like(source)
    return 2 * size / (measure({"copy": Candidate(lambda _: target.copy_(source))}, device)["copy"] * 1e-3)


def codec_entry(codec: str, device: str, dtype: str, density: float, size: int) -> Entry:
    ops = {name: f"{codec}_{name}" for name in ("compress", "decompress")}
    keys: dict[str, Any] = {"device": device, "dtype": dtype, "density": density, "MiB": size >> 20}
    names = {name: case_name(op=op, **keys) for name, op in ops.items()}

    def run(results: Results) -> Rows:
        x = sparse(size, density, dtype, device)
        compress, decompress = (getattr(torch.ops.weft, op) for op in ops.values())
        words, values, sizes = compress(x)
        check_agreement(names["compress"], {"x": same_bits(decompress(words, values, x.shape), x)}, 0.0)
        words_used = words if codec == "zvc" else words[: int(sizes[0])]
        used = int(sizes if codec == "zvc" else sizes[1])
        packed = words_used.nbytes + used * x.element_size()
        times = measure(
            {
                "compress": Candidate(lambda _: compress(x)),
                "decompress": Candidate(lambda _: decompress(words_used, values[:used], x.shape)),
            },
            device,
            at_most=0.1,
        )
        floor = (x.nbytes + packed) / copy_rate(device, size) * 1e3
        rows = []
        for name, milliseconds in times.items():
            rows.append(results.put(names[name], "forward", "ms", milliseconds, "floor", floor))
            rate = (x.nbytes + packed) / milliseconds * 1e-6
            print(f"{names[name]}: {rate:.0f} GB/s read and written", flush=True)
        if codec == "zvc":
            share = used / x.numel()
            model = x.nbytes * (share + 1 / (8 * x.element_size()))
            rows.append(results.put(names["compress"], "compressed", "bytes", packed, "model", model))
        return rows

    return Entry(names["compress"] + " " + names["decompress"], ("forward", "compressed"), run)


def beside_entry(dtype: str, density: float, size: int = GIB // 4) -> Entry:
    """A stream of bf16 matrix products, alone and beside the engine's copy streams, which send compressed tensors out,
    or bring them back, as fast as the bus allows."""
    cases = {
        way: case_name(op=f"zvc_{way}", device="cuda", dtype=dtype, density=density, beside="gemm")
        for way in ("compress", "decompress")
    }

    def run(results: Results) -> Rows:
        x = sparse(size, density, dtype, "cuda")
        back = torch.empty_like(x)
        off = weft.offload(0)
        engine = off._engine
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        side = torch.cuda.Stream()
        round_trip = _C._testing.OffloadRoundTrip(engine, x, True, density)
        round_trip.bring_back(engine, back)
        torch.cuda.synchronize()
        check_agreement(cases["decompress"], {"x": same_bits(back, x)}, 0.0)

        def products(_: Any = None) -> Tensor:
            for _ in range(20):
                c = a @ b
            return c

        def send() -> None:
            _C._testing.OffloadRoundTrip(engine, x, True, density)

        def bring_back() -> None:
            round_trip.bring_back(engine, back)

        def beside(transfer: Callable[[], Any], count: int) -> Callable[[Any], Tensor]:
            def run(_: Any) -> Tensor:
                # The products first: the copy streams are behind what the current stream had to do before.
                side.wait_stream(torch.cuda.current_stream())
                c = products()
                with torch.cuda.stream(side):
                    for _ in range(count):
                        transfer()
                return c

            return run

        def bytes_per_second(transfer: Callable[[], Any], stream: torch.cuda.Stream, count: int) -> float:
            """Over the bus, until the last transfer that ends before the products do."""
            begin, end, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(2 + count))
            torch.cuda.synchronize()
            begin.record()
            side.wait_stream(torch.cuda.current_stream())
            products()
            end.record()
            with torch.cuda.stream(side):
                for event in ends:
                    transfer()
                    event.record(stream)
            torch.cuda.synchronize()
            done = [begin.elapsed_time(event) for event in ends]
            done = [ms for ms in done if ms <= begin.elapsed_time(end)] or done[:1]
            return len(done) * round_trip.sent_bytes / (done[-1] * 1e-3)

        rates, rows = link("cuda"), []
        alone = measure({"alone": Candidate(products)}, "cuda", repeats=4)["alone"] * 1e-3
        out, _, _, decompress = map(torch.cuda.ExternalStream, engine.streams(torch.cuda.current_device()))
        ways = (("compress", send, rates.d2h, out), ("decompress", bring_back, rates.h2d, decompress))
        for way, transfer, rate, stream in ways:
            # Longer than the products, also where these slow down.
            count = math.ceil(1.5 * alone * rate / round_trip.sent_bytes) + 1
            run_beside = beside(transfer, count)
            # Both after the same rest: the products heat the device until its clock goes down.
            rest = functools.partial(time.sleep, 0.05)
            candidates = {"alone": Candidate(products, rest), "beside": Candidate(run_beside, rest)}
            times = measure(candidates, "cuda", repeats=10)
            rows.append(results.put(cases[way], "gemm", "ms", times["beside"], "alone", times["alone"]))
            reached = statistics.median(bytes_per_second(transfer, stream, count) for _ in range(5))
            rows.append(results.put(cases[way], "transfer", "ms/GB", 1e12 / reached, "floor", 1e12 / rate))

            def run_alone(_: Any, transfer: Callable[[], Any] = transfer, stream: Any = stream) -> None:
                transfer()
                torch.cuda.current_stream().wait_stream(stream)

            bytes_per_ms = round_trip.sent_bytes / measure({"alone": Candidate(run_alone)}, "cuda", repeats=4)["alone"]
            print(f"{cases[way]}: {count} transfers, alone {bytes_per_ms * 1e-6:.1f} GB/s", flush=True)
        off.close()
        return rows

    return Entry(" ".join(cases.values()), ("gemm", "transfer"), run)


# ------------------------------------------------------------------------------------------------------ training steps


@functools.cache
def link(device: str) -> Link:
    """Rates of pinned copies of 256 MiB, one direction at a time."""
    if device == "cpu":
        return Link()
    host, on_device = torch.empty(GIB // 4, dtype=torch.uint8).pin_memory(), torch.empty(GIB // 4, dtype=torch.uint8)
    on_device = on_device.cuda()
    times = measure(
        {
            "out": Candidate(lambda _: host.copy_(on_device, non_blocking=True)),
            "back": Candidate(lambda _: on_device.copy_(host, non_blocking=True)),
        },
        "cuda",
    )
    rates = Link(*(host.nbytes / (times[name] * 1e-3) for name in ("out", "back")))
    print(f"pinned copies: {rates.d2h / 1e9:.1f} GB/s out, {rates.h2d / 1e9:.1f} GB/s back", flush=True)
    return rates


@dataclass(frozen=True)
class Model:
    name: str
    dtype: str
    batch: int
    build: Callable[[], nn.Module]
    classes: int
    image: int | None = None
    """Height and width of the images; None: tokens."""
    length: int = 0

    def keys(self, device: str) -> dict[str, Any]:
        return {"model": self.name, "device": device, "dtype": self.dtype, "B": self.batch}


MODELS = (
    Model("vgg19", "fp32", 64, models.vgg19, 1000, image=224),
    Model("resnet152", "fp32", 64, models.resnet152, 1000, image=224),
    Model("efficientnet", "fp32", 64, models.efficientnet, 1000, image=224),
    Model("gpt", "bf16", 4, models.gpt, 16384, length=2048),
    Model("llama", "bf16", 4, models.llama, 16384, length=2048),
)


class Step:
    """One training step without the optimizer; the same dropout every time, so that gradients can be compared."""

    def __init__(self, model: Model, device: str) -> None:
        torch.manual_seed(0)
        self.model, self.device = model, device
        with torch.device(device):
            self.net = model.build().to(dtype=DTYPES[model.dtype])
        if model.image is not None:
            self.x = torch.randn(model.batch, 3, model.image, model.image, device=device, dtype=DTYPES[model.dtype])
            targets = model.batch
        else:
            self.x = torch.randint(model.classes, (model.batch, model.length), device=device)
            targets = self.x.numel()
        self.target = torch.randint(model.classes, (targets,), device=device)

    def forward(self) -> Tensor:
        torch.manual_seed(1)
        return functional.cross_entropy(self.net(self.x).float(), self.target)

    def plain(self, _: Any = None) -> None:
        self.net.zero_grad()
        self.forward().backward()

    def inside(self, context: Any) -> Callable[[Any], None]:
        def run(_: Any = None) -> None:
            self.net.zero_grad()
            with context:
                loss = self.forward()
            loss.backward()

        return run

    def gradients(self, run: Callable[[], None]) -> list[Tensor]:
        run()
        return [p.grad.clone() for p in self.net.parameters()]

    def check(self, case: str, run: Callable[[], None]) -> None:
        """Gradients to the last bit, with torch's deterministic algorithms: where it has one of everything, as for a
        decoder, with no other; its attention has two."""
        torch.use_deterministic_algorithms(True, warn_only=self.model.image is not None)
        try:
            pairs = zip(self.gradients(self.plain), self.gradients(run), strict=True)
            errors = {f"gradient {i}": same_bits(a, b) for i, (a, b) in enumerate(pairs)}
        finally:
            torch.use_deterministic_algorithms(False)
        check_agreement(case, errors, 0.0)


def saved_bytes(step: Step, **options: Any) -> int:
    """What the step saves for its backward."""
    with_room = weft.offload(1 << 60, **options)
    step.inside(with_room)()
    saved = with_room.report().to_dict()["saved_bytes"]
    with_room.close()
    return saved


SETTLES, SETTLES_WITHOUT = 3, 24
"""Uses after which an offload object has planned with the times of its steps; without a budget, after its first plan,
also compared them with steps without hooks."""
PLANNING = 15.0
"""Most seconds in which that plan's host memory is waited for."""
BUDGETS = {"75%": 0.75, "50%": 0.5, "25%": 0.25, "0": 0.0, "none": None}


def model_entry(model: Model, device: str, **options: Any) -> Entry:
    """`options` are weft.offload's."""
    cases = {budget: case_name(**model.keys(device), budget=budget) for budget in BUDGETS}

    def run(results: Results) -> Rows:
        step, rates, rows = Step(model, device), link(device), []
        rounds = {"repeats": 10, "at_most": 0.0}
        # Of what the bus holds up, one step takes as long as the next.
        few = {"warmup": 1, "repeats": 4, "at_most": 0.0}
        forward = Candidate(lambda _: step.forward())
        peers = {"plain": Candidate(step.plain), "forward": forward}
        times = measure(peers, device, **rounds)
        if device == "cuda":
            moving = {"save_on_cpu": torch.autograd.graph.save_on_cpu(pin_memory=True), **torchtunes()}
            moving = {peer: step.inside(context) for peer, context in moving.items()}
            for peer in [*moving.keys() - {"save_on_cpu"}]:
                try:
                    step.check(f"{model.name}, {peer}", moving[peer])
                except Exception as error:  # somebody else's package, and another torch than it knows
                    print(f"left out: {peer} fails on {model.name}: {error}", flush=True)
                    del moving[peer]
            for peer, run_peer in moving.items():
                settle(peer, run_peer)
            times |= measure({peer: Candidate(run_peer) for peer, run_peer in moving.items()}, device, **few)
        peaks = {}
        if device == "cuda":
            peaks = {peer: peak_memory(run_peer) for peer, run_peer in {"plain": step.plain, **moving}.items()}
        if hasattr(step.net, "checkpointed"):
            step.net.checkpointed = True
            times |= measure({"checkpoint": Candidate(step.plain)}, device, **rounds)
            if device == "cuda":
                peaks["checkpoint"] = peak_memory(step.plain)
            step.net.checkpointed = False
        ahead, behind = times["forward"] * 1e-3, (times["plain"] - times["forward"]) * 1e-3
        saved = saved_bytes(step, **options)
        hideable = min(rates.d2h * ahead, rates.h2d * behind)
        everything = 0
        for budget, share in sorted(BUDGETS.items(), key=lambda item: item[1] != 0):
            case = cases[budget]
            limit = None if share is None else int(share * saved)
            off = weft.offload(limit, **options)
            with_offload = step.inside(off)
            if limit is None:
                rows.append(results.put(case, "first_uses", "ms", *first_uses(step, with_offload, device)))
            else:
                with_offload()  # records
            step.check(case, with_offload)
            if limit is None and device == "cuda":
                await_plan(off, with_offload)
            # torch's deterministic algorithms take their own time, which was planned with.
            for _ in range(SETTLES_WITHOUT if limit is None else SETTLES):
                with_offload()
                if device == "cuda":
                    torch.cuda.synchronize()
            candidates = {"weft": Candidate(with_offload)}
            how = few
            if limit is None:  # the two are close, and the host's pace drifts: in many turns
                candidates["plain"], how = Candidate(step.plain), {"repeats": 18, "at_most": 0.0, "blocks": 6}
            own = times | measure(candidates, device, **how)
            report = off.report().to_dict()
            if limit is None:
                slowdown, aside = report["slowdown"], report["stepped_aside"]
                print(f"{model.name} without a budget: slowdown {slowdown}, stepped aside: {aside}", flush=True)
            if report["stepped_aside"]:  # the report is on a use before
                report |= dict.fromkeys(("sent_bytes", "returned_bytes", "moved_bytes"), 0)
            out, back = report["sent_bytes"] / rates.d2h, report["returned_bytes"] / rates.h2d
            waits = (report["predicted_stall_seconds"] or 0.0) if limit is not None else 0.0
            own["floor"] = 1e3 * max(max(ahead, out) + max(behind, back), ahead + behind + waits)
            for peer in ("plain", "save_on_cpu", "torchtune", "checkpoint", "floor"):
                if peer in own:
                    rows.append(results.put(case, "step", "ms", own["weft"], peer, own[peer]))
            rows.append(results.put(case, "moved", "bytes", report["moved_bytes"], "saved", saved))
            if limit is None:
                rows.append(results.put(case, "sent", "bytes", report["sent_bytes"], "hideable", min(hideable, saved)))
            else:  # a budget of 0 is none to be met: what then remains, of what was saved
                peer, value = ("budget", limit) if limit > 0 else ("saved", saved)
                rows.append(results.put(case, "saved_peak", "bytes", report["peak_bytes"], peer, value))
            if device == "cuda":
                peak = peak_memory(with_offload)
                for peer, value in peaks.items():
                    rows.append(results.put(case, "peak_memory", "bytes", peak, peer, value))
                everything = peak if limit == 0 else everything
                if limit:
                    peer = "everything_and_budget"
                    rows.append(results.put(case, "peak_memory", "bytes", peak, peer, everything + limit))
            rows += plan_rows(case, off, limit, rates, results)
            results.save()
            off.close()
            del off, with_offload
            if device == "cuda":
                torch.cuda.empty_cache()
        return rows

    metrics = ("step", "first_uses", "moved", "sent", "saved_peak", "peak_memory", "predicted_step")
    return Entry(" ".join(cases.values()), metrics, run)


def first_uses(step: Step, with_offload: Callable[[], None], device: str) -> tuple[float, str, float]:
    """Milliseconds of the longest of an offload object's first ten uses, beside the plain step, each step alone."""

    def alone(run: Callable[[], None]) -> float:
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    alone(step.plain)
    plain = statistics.median(alone(step.plain) for _ in range(5))
    times = [alone(with_offload) for _ in range(10)]
    print(f"{step.model.name}: plain {plain:.1f} ms, first uses {', '.join(f'{t:.1f}' for t in times)}", flush=True)
    return max(times), "plain", plain


def settle(name: str, run: Callable[[], None], most: int = 8) -> None:
    """Runs a step on the GPU until it gets no faster: the first ones pin host memory."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < most and times[-1] < 0.95 * times[-2]):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    print(f"{name}: first steps {', '.join(f'{t:.0f}' for t in times)} ms", flush=True)


def await_plan(off: weft.offload, run: Callable[[], None]) -> None:
    """Runs steps on the GPU until one has a plan, or none will have."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < PLANNING:
        run()
        torch.cuda.synchronize()
        report = off.report().to_dict()
        if report["stepped_aside"] or report["predicted_peak_bytes"] is not None:
            return


def torchtunes() -> dict[str, Any]:
    """torchtune's offloading as it comes, on a stream of its own, where the package is installed."""
    if importlib.util.find_spec("torchtune") is None:
        return {}
    from torchtune.training import OffloadActivations

    return {"torchtune": OffloadActivations()}


def plan_rows(case: str, off: Any, limit: int | None, rates: Link, results: Results) -> Rows:
    """AutoVM's policy against none, by the model of both on the step's timeline: everything moves, and comes back when
    it is asked for."""
    timeline = off.timeline
    if limit is None or timeline is None or not timeline.tensors or timeline.seconds[0] is None:
        return []
    planned = weft.offloading.plan(timeline, limit, link=rates)
    on_demand = [Move(i, t.first_backward) for i, t in enumerate(timeline.tensors)]
    without = simulate(timeline, on_demand, limit, link=rates)
    return [results.put(case, "predicted_step", "ms", planned.seconds * 1e3, "no_policy", without.seconds * 1e3)]


def host_entry(device: str, moved: bool) -> Entry:
    """Time of the host per saved tensor, once there is a plan: the difference between a step of many small operations
    with and without hooks, beside that of hooks in Python that do nothing."""
    case = case_name(op="pack_unpack", device=device, moved="yes" if moved else "no")

    def run(results: Results) -> Rows:
        # So little to move that the bus holds nothing up.
        count, size = (200, 1 << 14) if moved else (2000, 16)
        x = torch.randn(size, device=device, requires_grad=True)

        def chain(_: Any = None) -> None:
            y = x
            for _ in range(count):
                y = y.sin()  # saves its input
            y.backward(torch.ones_like(y))

        def inside(context: Any) -> Callable[[Any], None]:
            def run(_: Any = None) -> None:
                with context:
                    chain()

            return run

        off = weft.offload(0 if moved else 1 << 60, min_bytes=0 if moved else "1MiB")
        contexts = {
            "weft": inside(off),
            "python_hooks": inside(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)),
            "plain": chain,
        }
        for _ in range(10):  # the first ones are timed, and planned with
            contexts["weft"]()
            if device == "cuda":
                torch.cuda.synchronize()
        times: dict[str, list[float]] = {name: [] for name in contexts}
        for _ in range(12):
            for name, run_once in contexts.items():
                begin = time.perf_counter()
                run_once()
                times[name].append((time.perf_counter() - begin) * 1e6 / count)
                if device == "cuda":
                    torch.cuda.synchronize()
        best = {name: sorted(values[2:])[len(values[2:]) // 2] for name, values in times.items()}
        off.close()
        added = {name: best[name] - best["plain"] for name in ("weft", "python_hooks")}
        return [results.put(case, "host", "us", added["weft"], "python_hooks", added["python_hooks"])]

    return Entry(case, ("host",), run)


# ------------------------------------------------------------------------------------------------------ managed memory


class _Location(ctypes.Structure):
    """cudaMemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


def prefetch(x: Tensor, to_host: bool) -> None:
    """Moves the pages of a tensor in managed memory, on the current stream."""
    major = torch.version.cuda.split(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{major}")
    call = runtime.cudaMemPrefetchAsync_v2 if major == "12" else runtime.cudaMemPrefetchAsync
    where = _Location(2, 0) if to_host else _Location(1, torch.cuda.current_device())
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status = call(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes), where, ctypes.c_uint(0), stream)
    if status != 0:
        raise RuntimeError(f"cudaMemPrefetchAsync failed with error {status}")


def managed_entry(size: int = GIB // 2) -> Entry:
    """The three ways back to the device, each followed by a kernel that reads all of it: a copy from pinned memory, a
    prefetch of managed memory, and page faults alone. AutoVM, chapter 4."""
    ways = ("prefetch", "faults")
    cases = {way: case_name(op="bring_back", device="cuda", MiB=size >> 20, managed=way) for way in ways}

    def run(results: Results) -> Rows:
        with managed_pool():
            pages = torch.ones(size // 4, device="cuda")
        host, there = torch.ones(size // 4).pin_memory(), torch.empty(size // 4, device="cuda")

        def by_copy(_: Any) -> Tensor:
            return there.copy_(host, non_blocking=True).sum()

        def by_prefetch(_: Any) -> Tensor:
            prefetch(pages, to_host=False)
            return pages.sum()

        sums = {"copy": Candidate(by_copy)}
        for way, back in (("prefetch", by_prefetch), ("faults", lambda _: pages.sum())):
            sums[way] = Candidate(back, functools.partial(prefetch, pages, True))
        for way, candidate in sums.items():
            candidate.prepare()
            check_agreement(way, {"sum": abs(candidate.run(None).item() - size // 4)}, 0.0)
        times = measure(sums, "cuda", warmup=1)
        return [results.put(cases[way], "read", "ms", times[way], "pinned copy", times["copy"]) for way in ways]

    return Entry(" ".join(cases.values()), ("read",), run)


def table(device: str) -> Iterator[Entry]:
    size = GIB if device == "cuda" else GIB >> 4
    for dtype in ("fp32", "bf16"):
        for density in (0.1, 0.5, 1.0):
            yield codec_entry("zvc", device, dtype, density, size)
    yield codec_entry("rle", device, "fp32", 0.5, size)
    if device == "cuda":
        for density in (0.1, 0.5, 1.0):
            yield beside_entry("fp32", density)
        for moved in (False, True):
            yield host_entry(device, moved)
        if _C.offload.has_managed(torch.cuda.current_device()):
            yield managed_entry()
        for model in MODELS:
            yield model_entry(model, device)
        for name, build in density_models().items():
            yield density_entry(name, build, device)


def main(arguments: list[str] | None = None) -> None:
    options = table_parser("offload", __doc__, minutes=30.0).parse_args(arguments)
    # What torch asks for before it calls cuBLAS deterministic; as much as it takes by default.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    devices = begin_table(options)
    results = Results(options.output or RESULTS / "offload.csv")
    entries = [entry for device in devices for entry in table(device) if entry.matches(options.filter)]
    exit_with(run_entries(entries, results, minutes=options.minutes))


if __name__ == "__main__":
    main()
