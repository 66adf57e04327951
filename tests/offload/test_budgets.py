"""weft.offload: the budget, the host pool, and the memory that both are about."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from weft import _C
from weft._offload import planning
from weft._offload.memory import host_memory
from weft._offload.pace import SHARES, Pace
from weft._offload.planning import Memory, Planner
from weft._offload.timelines import FirstSave, at_pace, timeline_of, with_densities
from weft.offloading import Link, Saved, Timeline, offload

from tests.offload.engines import (
    chain,
    cuda,
    everything,
    numbers,
    plain_gradient,
    plan_at_once,
    saved_and_restored,
    settled,
    step,
)


def test_budget_is_kept_from_the_second_use_on(engine: tuple[str, str]) -> None:
    device, backend = engine
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh()))).to(device)
    x = torch.randn(256, 64, device=device)
    whole = 8 * x.nbytes
    for share in (0.75, 0.5, 0.25):
        off = offload(int(share * whole), backend=backend, min_bytes=0, compress=None)
        for use in range(4):
            step(model, x, lambda off=off: off)
            n = numbers(off)
            if use > 0:
                assert n["budget_met"] and n["peak_bytes"] <= share * whole and n["moved_bytes"] >= (1 - share) * whole
        assert n["predicted_peak_bytes"] <= share * whole
    off = offload(2 * whole, backend=backend, min_bytes=0)
    step(model, x, lambda: off)
    step(model, x, lambda: off)
    assert numbers(off)["moved_bytes"] == 0


def test_without_budget_the_reference_moves_nothing() -> None:
    off = offload(backend="reference", min_bytes=0)
    for _ in range(3):
        saved_and_restored(off, *(torch.randn(100) for _ in range(5)))
        assert numbers(off)["moved_bytes"] == 0


@pytest.mark.skipif(not hasattr(_C._testing, "offload_stages"), reason="the codec's memory is on CUDA devices")
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_the_memory_of_the_codec_is_a_small_part_of_the_budget(density: float) -> None:
    whole = offload(None, compress="zvc")._engine.staging(1 << 30, 4, density)
    for budget in (1 << 29, 1 << 30, 1 << 32, 1 << 40):
        engine = offload(budget)._engine
        assert 0 < engine.staging(1 << 30, 4, density) <= min(budget / 40, whole)
        assert engine.staging(1 << 20, 4, density) <= engine.staging(1 << 30, 4, density)
    # There is no budget to be met.
    assert offload(0)._engine.staging(1 << 30, 4, density) == whole


def test_pool_limit() -> None:
    x = [torch.randn(1000) for _ in range(5)]
    off = everything(pool_limit=10_000)
    with pytest.warns(RuntimeWarning, match="pool_limit"):
        came = saved_and_restored(off, *x)
    for a, b in zip(came, x, strict=True):
        assert torch.equal(a, b)
    n = numbers(off)
    assert n["host_peak_bytes"] <= 10_000 and n["moved_bytes"] == 8000 and n["kept"]["pool"] == 12000
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        saved_and_restored(off, *x)
    assert numbers(off)["host_peak_bytes"] <= 10_000
    # Buffers of other sizes make room.
    off = everything(pool_limit=10_000)
    for n in (2000, 1500, 2400):
        saved_and_restored(off, torch.randn(n))
        assert numbers(off)["kept"]["pool"] == 0


def test_pool_is_reused_and_released() -> None:
    x = [torch.randn(n) for n in (100, 200, 300)]
    off = everything()
    saved_and_restored(off, *x)
    held = numbers(off)["host_bytes"]
    assert held == 2400
    for _ in range(3):
        saved_and_restored(off, *x)
        assert numbers(off)["host_bytes"] == numbers(off)["host_peak_bytes"] == held
    y = torch.randn(50, requires_grad=True)
    with off:
        z = y.exp()
    assert off.release() == held and numbers(off)["host_bytes"] == 200 and off.release() == 0
    z.sum().backward()
    assert torch.equal(y.grad, y.exp()) and off.release() == 200


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_room_is_what_operations_and_the_codec_need(count: int) -> None:
    off = everything(compress="zvc", keep_last=0)
    off._planner.engine = types.SimpleNamespace(staging=lambda bytes, itemsize, density: 7 * bytes, close=lambda: None)
    saved = [Saved(4000, k, 2 * count - 1 - k) for k in range(count)]
    timeline = Timeline((1.0,) * (2 * count), count, tuple(saved))
    planned = off._planner.planned(timeline, [FirstSave(4000, 4, True)] * count, (), None, Link())
    assert len(planned.plan.moves) == count and planned.plan.peak_bytes <= 12000


@cuda
def test_peak_memory_follows_the_budget() -> None:
    layers = 16
    x = torch.randn(1 << 22, device="cuda", requires_grad=True)  # 16 MiB
    peaks = {}
    for budget in (0, 64 << 20, 1 << 40):
        off = offload(budget, min_bytes=0, compress=None)
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with off:
                y = chain(x, layers).sum()
            torch.autograd.grad(y, x)
            torch.cuda.synchronize()
            peaks[budget] = torch.cuda.max_memory_allocated() - before
        if budget > 0:
            n = numbers(off)
            assert n["budget_met"] and n["peak_bytes"] <= budget
    assert peaks[64 << 20] <= 1.05 * (peaks[0] + (64 << 20))
    assert peaks[0] < 0.5 * peaks[1 << 40]


@cuda
def test_steady_state_allocates_no_host_memory() -> None:
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    off = offload("10MB", min_bytes=0)
    held = []
    for _ in range(14):  # the plan of some ten, made beside the step, may be the last
        with off:
            y = chain(x, 6).sum()
        torch.autograd.grad(y, x)
        torch.cuda.synchronize()
        held.append(numbers(off)["host_peak_bytes"])
    assert len(set(held[10:])) == 1


@cuda
def test_without_budget_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much compute between the saves: some of it hides, once the plan is there, and the gradients are the same."""
    monkeypatch.setattr(Pace, "tried", True)  # beside other processes a trial may end as it will
    w = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    x = torch.randn(2048, 2048, device="cuda") / 50

    def run() -> Tensor:
        y = x
        for _ in range(12):
            y = (y @ w / 50).tanh()
        return y.square().mean()

    expected = torch.autograd.grad(run(), w)[0]
    off = offload(min_bytes=0, compress=None)

    def moved() -> bool:
        with off:
            loss = run()
        assert torch.equal(torch.autograd.grad(loss, w)[0], expected)
        torch.cuda.synchronize()
        return numbers(off)["moved_bytes"] > 0

    assert settled(moved, True)


def bound_by_the_host(uses: int) -> tuple[offload, dict]:
    """Uses of many small tensors, whose operations take the device less time than the host: hooks are all that it waits
    for. The object without a budget, and its report."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    expected = plain_gradient(x, 60)
    for _ in range(5):  # other processes on the GPU may be all that it waits for
        off = offload(min_bytes=0, compress=None)
        for _ in range(uses):
            with off:
                y = chain(x, 60)
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
        report = numbers(off)
        if report["stepped_aside"]:
            break
    return off, report


@cuda
def test_without_budget_a_trial_is_all_that_a_step_bound_by_the_host_has_of_hooks() -> None:
    off, report = bound_by_the_host(20)
    assert report["stepped_aside"] and report["slowdown"] > 0.02
    assert report["moved_bytes"] == report["host_bytes"] == 0 and not off._latest.use.timed


@cuda
def test_without_budget_a_step_bound_by_the_host_has_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_at_once(monkeypatch)
    _, report = bound_by_the_host(40)
    assert report["uses"] == 40 and report["slowdown"] > 0.02 and report["stepped_aside"]
    assert report["saved_bytes"] > 0  # of the last use that had hooks


@cuda
def test_pinning_refused_keeps_the_tensor() -> None:
    off = everything("copy", pool_limit=1 << 20)
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    with pytest.warns(RuntimeWarning, match="pool_limit"), off:
        y = chain(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain_gradient(x))
    assert numbers(off)["kept"]["pool"] == numbers(off)["saved_bytes"]


@cuda
def test_managed_memory_is_capped_and_goes_back() -> None:
    off = everything("managed")
    x = torch.randn(1 << 22, device="cuda", requires_grad=True)
    for _ in range(3):
        with off:
            y = chain(x)
        assert numbers(off)["moved_bytes"] > 0 and numbers(off)["host_bytes"] > 0
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain_gradient(x))
        del y
        assert numbers(off)["live_bytes"] == 0 and numbers(off)["host_bytes"] == 0


def test_the_codec_stays_away_where_its_memory_is_too_much() -> None:
    off = offload(8000, backend="reference", min_bytes=0, keep_last=0)
    saved = tuple(Saved(4000, k, 5 - k, density=0.25) for k in range(3))
    timeline, first = Timeline((1.0,) * 6, 3, saved), [FirstSave(4000, 4, True)] * 3
    for staging, compressed in ((100, True), (7000, False)):
        off._planner.engine = types.SimpleNamespace(
            staging=lambda bytes, itemsize, density, staging=staging: staging, close=lambda: None
        )
        plan = off._planner.planned(timeline, first, (), None, Link()).plan
        assert plan.met and plan.moves and all(move.compressed == compressed for move in plan.moves)


@pytest.mark.parametrize(
    ("codec", "compress", "share"), [(3e12, "auto", 0.1), (float("inf"), "auto", 0), (3e12, None, 0), (3e12, "zvc", 1)]
)
def test_what_is_compressed_without_a_budget(codec: float, compress: str | None, share: float) -> None:
    """A part of what would not hide; nothing where nobody knows what the codec takes; all where it was asked for."""
    off = offload(compress=compress, min_bytes=0, keep_last=0)
    tensors = []
    off._planner.engine = types.SimpleNamespace(staging=lambda bytes, itemsize, density: 0, close=lambda: None)
    link = Link(50e9, 50e9, codec)
    size = int(1.03 * 0.01 * 0.97 * 50e9) // 4 * 4
    timeline = Timeline((0.0, 0.01, 0.02, 0.0), 2, (Saved(size, 0, 3, None, 0.5),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C.offload, "TransferPlan", lambda t, back, room, *unhooked: tensors.extend(t))
        plan = off._planner.planned(timeline, [FirstSave(size, 4, True)], (), None, link).plan
    assert plan.forward_stall == plan.backward_stall == 0 and bool(plan.moves) == (share > 0)
    ((bytes, itemsize, moves, coded, density),) = tensors
    assert (bytes, itemsize, moves, density) == (size, 4, share > 0, 0.5) and coded == pytest.approx(share, abs=0.05)
    assert 0 <= plan.codec_seconds <= 0.01 * 0.03


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"memory.max": "1000"}, 1000),
        ("0::/a/b", {"memory.max": "max", "a/memory.max": "3000", "a/b/memory.max": "5000"}, 3000),
        ("0::/outside", {"memory.max": "2000"}, 2000),
        ("3:cpu:/\n4:hugetlb,memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "700"}, 700),
        ("4:memory:/a", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ("0::/", {"memory.max": "max"}, None),
        (None, {}, None),
    ],
)
def test_host_memory_is_what_control_groups_leave(groups: str | None, files: dict, limit: int | None, tmp_path) -> None:
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory(tmp_path) == (machine if limit is None else limit)


def test_times_of_uses_that_waited_for_host_memory_are_not_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while there is a plan: in the next use they do not wait."""
    plan_at_once(monkeypatch)
    off = everything("reference")
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    planned = []
    plan = Planner.planned

    def count(*arguments) -> object:
        planned.append(off._uses)
        return plan(*arguments)

    monkeypatch.setattr(Planner, "planned", count)
    monkeypatch.setattr(
        "weft._offload.planning.same_times", lambda old, new: False
    )  # every time that counts is another
    for use in range(12):
        with off:
            y = layers(torch.randn(64, 32)).square().sum()
        y.backward()
        del y
        if use in (2, 3):
            assert off.release() > 0  # so that the next use gets memory anew
    # Each plan comes from the use before; the fourth and the fifth waited for memory. Not every operation of the two
    # last is timed.
    assert planned == [1, 2, 3, 6, 7, 8, 9]


def paced(off: offload, monkeypatch: pytest.MonkeyPatch, uses: int, grow: int = -1) -> list[tuple]:
    """Uses whose operations take 10 s where every one is timed, else 1 s. Of each: whether they are, and the forward's
    time as the plan for it has it, in operations. One use may save another number of tensors."""
    made, timed, found = planning.timeline_of, [False], []

    def timeline(raw: tuple) -> Timeline:
        t = made(raw)
        return replace(t, seconds=(10.0 if timed[0] else 1.0,) * len(t.seconds))

    monkeypatch.setattr(planning, "timeline_of", timeline)
    x = torch.randn(50, 50, requires_grad=True)
    for use in range(uses):
        with off:
            y = chain(x, 5 if use == grow else 8).sum()
        y.backward()
        del y
        latest = off._latest
        plans = list(latest.plans.values())
        found.append((latest.use.timed, plans[0].seconds[0] / plans[0].timeline.forward if plans else None))
        timed[0] = latest.use.timed  # which the next one plans from
    return found


@pytest.mark.parametrize("budget", [None, 0])
def test_times_are_those_of_uses_whose_every_operation_is_not_timed(
    budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where events hold up the host, a plan for the time that they take would have too much hidden."""
    plan_at_once(monkeypatch)
    off = offload(budget, backend="reference", min_bytes=0, keep_last=0)
    found = paced(off, monkeypatch, 45)
    assert [timed for timed, _ in found[:3]] == [True] * 3 and found[2][1] == 10
    assert sum(timed for timed, _ in found) == sum(timed for timed, _ in found[:10]) + 3
    assert all(seconds == pytest.approx(1) for _, seconds in found[10:])


def test_another_step_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_at_once(monkeypatch)
    found = paced(everything("reference"), monkeypatch, 45, grow=20)
    assert all(seconds == pytest.approx(1) for use, (_, seconds) in enumerate(found) if 9 < use < 20 or use > 30)


RAW = 4, [1.0] * 4, 2, [(8, 0, 3, 3, 1.0, 4)], [(8, 4, True, 0, False)]
"""A use's timeline as the engine has it."""


class Engine:
    """What a planner asks of an engine, on a machine with a bus. `host`: what it says of memory that is asked for."""

    def __init__(self, host: Callable[[], bool] = lambda: True) -> None:
        self.measured: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self.closed = False
        self._host = host

    def rates(self, device: int) -> tuple[float, float]:
        self.measured.append((device, threading.get_ident()))
        return 2e10, 1e10

    def codec_rate(self, device: int) -> float:
        return 0.0

    def staging(self, bytes: int, itemsize: int, density: float) -> int:
        return 0

    def missing_host(self, tensors: list) -> list[int]:
        return [bytes for bytes, _ in tensors] * 100

    def add_host(self, device: int, bytes: int, rest: Callable[[float], bool]) -> bool:
        self.asked.append(bytes)
        return self._host() and rest(0.0)

    def close(self) -> None:
        self.closed = True


def finished_use(device: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(copied=lambda _: {}, timelines=lambda: [(device, True, RAW)], timed=True)


def test_without_a_budget_no_use_waits_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for the bus, which is measured on the device of the tensors and on the thread that plans."""
    engine = Engine()
    planner, memory = Planner(engine, None, None, "copy", 0), Memory()
    made: list[Callable] = []
    started = planning.in_background
    monkeypatch.setattr(planning, "in_background", lambda make: made.append(make) or Future())
    planner.plan_from(memory, finished_use(1))
    assert set(memory.waiting) == {1} and not memory.planned and not engine.measured and len(made) == 1
    planner.plan_from(memory, finished_use(1))
    assert len(made) == 1  # which is still in the making
    future = started(made[0])
    assert future.result(10).link == Link(2e10, 1e10) and planner.links == {1: Link(2e10, 1e10)}
    ((device, thread),) = engine.measured
    assert device == 1 and thread != threading.get_ident()
    memory.waiting = {1: (future, {"paced": True})}
    monkeypatch.setattr(planning, "in_background", started)
    planner.plan_from(memory, types.SimpleNamespace(copied=lambda _: {}, timelines=list, timed=True))
    assert not memory.waiting and memory.planned[1].paced


def test_with_a_budget_the_first_plan_alone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses of the same saves and reads go by the old plan until there is a new one, others have theirs at once."""
    made: list[Callable] = []
    monkeypatch.setattr(planning, "in_background", lambda make: made.append(make) or Future())
    planner, memory = Planner(Engine(), 4, None, "copy", 0), Memory()

    def use(seconds: float, read: int = 3) -> types.SimpleNamespace:
        raw = (4, [seconds] * 4, 2, [(8, 0, read, read, 1.0, 4)], RAW[4])
        return types.SimpleNamespace(copied=lambda _: {}, timelines=lambda: [(0, True, raw)], timed=True)

    planner.plan_from(memory, use(1.0))
    first = memory.planned[0]
    assert first.plan.moves and not memory.waiting and not made
    planner.plan_from(memory, use(1.05))
    assert not made
    planner.plan_from(memory, use(2.0))
    assert memory.planned[0] is first and len(made) == 1
    planner.plan_from(memory, use(3.0))
    assert len(made) == 1  # which is still in the making
    future, _ = memory.waiting[0]
    future.set_result(made[0]())
    planner._take_plans(memory)
    assert memory.planned[0].seconds == (4.0, 4.0) and not memory.waiting
    planner.plan_from(memory, use(2.0, read=2))
    assert memory.planned[0].timeline.tensors[0].first_backward == 2 and len(made) == 1
    planner.plan_from(memory, use(4.0, read=2))
    assert len(made) == 2
    future, _ = memory.waiting[0]
    planner.plan_from(memory, use(4.0, read=3))  # does not wait for the other step's plan, which is never used
    assert memory.planned[0].timeline.tensors[0].first_backward == 3 and len(made) == 2 and not memory.waiting
    future.set_result(made[1]())
    planner._take_plans(memory)
    assert memory.planned[0].timeline.tensors[0].first_backward == 3


def test_a_plan_is_made_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    planner, memory = Planner(Engine(lambda: False), None, None, "copy", 0), Memory()
    planner.plan_from(memory, finished_use(0))
    assert not memory.waiting and memory.planned[0].link == Link(2e10, 1e10)


def test_a_plan_ends_with_its_object() -> None:
    """What asks for host memory stops at the next piece."""
    planner: list[Planner] = []
    engine = Engine(lambda: planner[0].close() or True)  # in the middle of a piece
    planner.append(Planner(engine, None, None, "copy", 0))
    moves = planner[0].planned(timeline_of(RAW), [FirstSave(8, 4, True)], (), None, Link()).plan.moves
    assert len(moves) == 1
    rest = functools.partial(planner[0]._rest, 3, Memory())
    planner[0]._make(0, timeline_of(RAW), [FirstSave(8, 4, True)], (), None, Link(), 1.0, rest)
    assert engine.asked == [8] and engine.closed
    engine = Engine(lambda: False)  # the system refuses
    Planner(engine, None, None, "copy", 0)._make(
        0, timeline_of(RAW), [FirstSave(8, 4, True)], (), None, None, 1.0, rest
    )
    assert engine.asked == [8]


def test_a_plan_in_the_making_does_not_hold_up_the_end_of_the_process() -> None:
    """Where a hundred pieces of host memory would take it half a minute."""
    code = """
        import time
        from tests.offload.test_budgets import Engine, finished_use
        from weft._offload.planning import Memory, Planner
        memory, planner = Memory(), Planner(Engine(lambda: time.sleep(0.3) or True), None, None, "copy", 0)
        planner.plan_from(memory, finished_use(0))
        assert not memory.waiting[0][0].done()
        print("ends", time.time(), flush=True)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    word, ended = process.stdout.split()
    assert word == "ends" and time.time() - float(ended) < 15, process.stderr


def test_rates_of_the_bus_are_those_of_the_latest_copies() -> None:
    off = offload(backend="reference")
    link = off._planner.link(-1, 1.0, 2**25, 2.0, 2**25)
    assert link.d2h == 2**25 and link.h2d == 2**24
    assert off._planner.link(-1, 0.0, 0, 0.5, 2**24) == link  # too little to tell
    assert off._planner.link(-1, 4.0, 2**26, 0.5, 2**24) == replace(link, d2h=2**24)


def test_densities_come_back_with_the_step_that_they_were_counted_in() -> None:
    def step(*densities: float) -> Timeline:
        tensors = tuple(Saved(8 * len(densities), i, 5, density=d) for i, d in enumerate(densities))
        return Timeline((1.0,) * 10, 5, tensors)

    unknown = step(1, 1, 1), (False,) * 3
    assert with_densities(*unknown, step(0.1, 0.3, 0.5), (True, True, False)) == (
        step(0.1, 0.3, 1),
        (True, True, False),
    )
    # What the use knows itself stays; of a step of another size nothing is taken.
    assert with_densities(step(0.2, 1, 1), (True, False, False), step(0.1, 0.3, 0.5), (True,) * 3) == (
        step(0.2, 0.3, 0.5),
        (True,) * 3,
    )
    assert with_densities(*unknown, step(0.1, 0.3), (True, True)) == unknown
    other = replace(step(0.1, 0.3, 0.5), tensors=tuple(replace(t, bytes=8) for t in step(0.1, 0.3, 0.5).tensors))
    assert with_densities(*unknown, other, (True,) * 3) == unknown


def test_phases_at_the_pace_of_a_use_that_knows_less() -> None:
    tensors = tuple(Saved(8, i, 3, 3) for i in range(3))
    timed = Timeline((1.0, 2.0, 3.0, 4.0, 2.0, 2.0), 3, tensors)
    whole = Timeline((0.0, 2.0, 1.0, 0.0, 3.0, 0.0), 3, tensors)
    assert at_pace(timed, whole) == (0.5, 1.0, 1.5, 2.0, 1.0, 1.0)
    assert at_pace(timed, timed) == timed.seconds
    unknown = Timeline((None,) * 6, 3, tensors)
    assert at_pace(unknown, whole) == whole.seconds and at_pace(timed, unknown) == unknown.seconds


@pytest.mark.parametrize(("budget", "first"), [(None, 2), ("1KB", 1)])
def test_what_hides_is_not_told_from_a_first_step(
    budget: str | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = offload(budget, backend="reference", min_bytes=0)
    planned, plan = [], Planner.planned
    monkeypatch.setattr(Planner, "planned", lambda *a: planned.append(off._uses) or plan(*a))
    x = torch.randn(50, 50, requires_grad=True)
    for _ in range(4):
        with off:
            y = chain(x).sum()
        y.backward()
        del y
    assert planned[0] == first


def test_pinning_rests_and_ends_with_its_object() -> None:
    planner, memory = Planner(Engine(), None, None, "copy", 0), Memory()
    began = time.monotonic()
    assert planner._rest(3, memory, 0.02) and 0.06 <= time.monotonic() - began < 10
    memory.pace.share = None  # it has stepped aside
    assert not planner._rest(1000, memory, 1.0)
    memory.pace.share = SHARES[0]
    closing = threading.Timer(0.1, planner.close)
    closing.start()
    assert not planner._rest(1000, memory, 1.0) and time.monotonic() - began < 60
    closing.join()


def test_pinning_is_slower_beside_a_step_that_hooks_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Callable] = []
    monkeypatch.setattr(planning, "in_background", lambda make: made.append(make) or Future())
    for slowdown in (0.0, 0.015):
        memory = Memory()
        memory.pace.slowdown = slowdown
        Planner(Engine(), None, None, "copy", 0).plan_from(memory, finished_use(1))
    assert [make.args[-1].args[0] for make in made] == [3, 19]


def test_plans_do_not_outlive_an_object_that_steps_aside() -> None:
    memory = Memory()
    memory.planned[0] = memory.waiting[0] = None
    for share, kept in ((SHARES[0], True), (None, True), (None, False)):
        memory.pace.share = share
        memory.pace._aside += 0 if kept else 1000
        memory.try_again()
        assert bool(memory.planned) == bool(memory.waiting) == kept
    assert memory.pace.share == SHARES[0] and not memory.pace.tried
