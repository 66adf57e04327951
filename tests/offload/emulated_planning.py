"""Checks, as those of emulated_engine.py: what is learnt of a step, and what is asked of the host."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
from torch import Tensor
from weft import _C
from weft._offload import context
from weft._offload.pace import SHARES, Pace
from weft.offloading import Link, offload

from tests.offload.emulated_steps import SIZE, Runtime, Save, Step, everything, numbers

enter_by_pace = Pace.enter


def check_rates_that_cannot_be_measured(runtime: Runtime) -> None:
    """For want of memory are measured the next time, also while another thread captures a graph, which they do not end.
    The first check: what is measured holds for the process."""
    refuse = _C._testing.offload_refuse
    off, (data,) = offload(0, min_bytes=0, keep_last=0, compress=None), numbers(1)
    for refused in ({}, {"host": 1 << 40}, {"device": 1 << 40}, {}):
        assert off._planner.links == {}
        with contextlib.ExitStack() as stack:
            refuse(**refused)
            with runtime.capture_elsewhere():
                stack.enter_context(off)
            refuse()
            seen: list[Tensor] = []
            y = torch.zeros(1, device="cuda", requires_grad=True)
            y = Save.apply(y, data.to("cuda", non_blocking=True), seen)
        y.backward()
        assert torch.equal(seen[0], data)
        torch.cuda.synchronize()
    link = off._planner.links[0]
    assert link != Link() and off._engine.rates(0) == (link.d2h, link.h2d)


def check_zeros_are_counted_in_the_first_use(runtime: Runtime) -> None:
    """Without a budget in that one alone, which is not planned from; with densities of their own."""
    densities = [0.1, 0.9, 0.5, 1.0, 0.3]
    off, launches = offload(min_bytes=0, keep_last=0), []
    for _ in range(4):
        data = [numbers(1, density=d)[0] for d in densities]
        before = runtime.calls("LaunchKernel")
        step = Step(off, data)
        launches.append(runtime.calls("LaunchKernel") - before)
        assert (not off._latest.plans) == (len(launches) <= 2)
        step.backward()
        torch.cuda.synchronize()
    assert launches[0] == launches[1] + len(densities)
    memory = off._thread.memory
    assert memory.counts_from is None and not memory.counting and math.isfinite(memory.planned[0].link.codec)
    assert [t.density for t in memory.planned[0].timeline.tensors] == pytest.approx(densities, abs=0.02)


def check_room_in_a_first_use(runtime: Runtime) -> None:
    """The tensor just saved and the one before it may stand beside a full budget: nobody waits for the latter."""
    off = everything()
    step = Step(off, numbers(3))
    runtime.drain()
    waited = [s["operation"] for s in off.report().to_dict()["stalls"]]
    assert waited and not any(w.startswith(("forward 1", "forward 2")) for w in waited)
    step.backward()


def check_host_memory_is_there_before_a_plan(runtime: Runtime) -> None:
    """Without a budget no step waits for the system; the limit of the pool holds."""
    for compress, size in ((None, 4 * SIZE), ("auto", 4 * SIZE + SIZE // 8)):
        for limit in (None, 3 * size):
            off = offload(min_bytes=0, keep_last=0, compress=compress, pool_limit=limit)
            slow, moved = [], []
            for _ in range(8):
                step = Step(off, numbers(12, density=1.0))
                slow.append(off._latest.use.slow)
                step.backward()
                torch.cuda.synchronize()
                moved.append(off.report().to_dict()["moved_tensors"])
            report = off.report().to_dict()
            assert not any(slow) and max(moved) >= 3, (slow, moved)
            if limit is not None:
                assert report["host_peak_bytes"] <= limit
            elif compress is None:
                assert report["host_bytes"] >= max(moved) * size
            off.close()


class Long(Step):
    """A step with work of its own, which takes an operation of the device each."""

    def __init__(self, off: offload, data: list[Tensor], work: int) -> None:
        super().__init__(off, data)
        x, one = torch.zeros(1, device="cuda"), torch.zeros(1).pin_memory()
        for _ in range(work):
            x.copy_(one, non_blocking=True)


def check_steps_aside(runtime: Runtime) -> None:
    """Without a budget, where hooks make the step longer; by the device's time, which is the number of operations."""
    names = ("EventRecord", "EventQuery", "StreamWaitEvent", "ThreadExchangeStreamCaptureMode")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "enter", enter_by_pace)
        for work, aside in ((0, True), (10000, False)):
            off, hooked = offload(min_bytes=0, keep_last=0, compress=None), []
            for _ in range(16):
                step = Long(off, numbers(8), work)
                hooked.append(off._latest.use)
                step.backward()
                torch.cuda.synchronize()
            report = off.report().to_dict()
            assert report["uses"] == 16 and report["stepped_aside"] == aside, (work, report["slowdown"])
            assert (report["slowdown"] > 0.02) == aside
            with_hooks = sum(a is not b for a, b in itertools.pairwise([None, *hooked]))
            assert (with_hooks <= 10) == aside and with_hooks < 16, with_hooks
            assert ("stepped aside" in str(off.report())) == aside
            if not aside:
                continue
            before = [runtime.calls(name) for name in names]
            y = torch.zeros(1, device="cuda", requires_grad=True)
            with off:
                y = Save.apply(y, y.detach(), [])
            assert [runtime.calls(name) for name in names] == before


def check_the_bus_is_measured_for_a_first_plan(runtime: Runtime) -> None:
    """By who makes it."""

    class Asked:
        def __init__(self, engine) -> None:
            self.engine, self.devices = engine, []

        def __getattr__(self, name: str):
            return getattr(self.engine, name)

        def rates(self, device: int) -> tuple[float, float]:
            self.devices.append(device)
            return self.engine.rates(device)

    for budget, uses in ((None, [0, 0, 1, 1]), (0, [0, 1, 1, 1])):
        off = offload(budget, min_bytes=0, keep_last=0, compress=None)
        engine = off._planner.engine = Asked(off._engine)
        for asked in uses:
            Step(off, numbers(4)).backward()
            torch.cuda.synchronize()
            assert engine.devices == [0] * asked, (budget, engine.devices)


def check_zeros_are_counted_by_several_uses(runtime: Runtime) -> None:
    """Without a budget, where a use has no time for all: each goes on where the one before has stopped."""
    densities = [0.1, 0.9, 0.5, 1.0, 0.3]
    off, counted = offload(min_bytes=0, keep_last=0), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "_COUNTING", 1e-9)
        for _ in range(8):
            memory = getattr(off._thread, "memory", None)
            counted.append(0 if memory is None else memory.counts_from)
            Step(off, [numbers(1, density=d)[0] for d in densities]).backward()
            torch.cuda.synchronize()
    assert counted == [0, 1, 2, 3, 4, None, None, None]
    memory = off._thread.memory
    assert not memory.counting
    assert [t.density for t in memory.planned[0].timeline.tensors] == pytest.approx(densities, abs=0.02)


def check_densities_without_a_budget(runtime: Runtime) -> None:
    """What the first use counted holds after a use of another size; a use that saves nothing is not the first, and what
    comes late is planned with when it has come."""
    shares = [0.1, 0.3, 0.5]

    def step(off: offload, size: int = SIZE) -> Step:
        return Step(off, [numbers(1, size, share)[0] for share in shares])

    def run(off: offload, uses: int, size: int = SIZE) -> None:
        for _ in range(uses):
            step(off, size).backward()
            torch.cuda.synchronize()

    def found(off: offload) -> list[float]:
        (planned,) = off._thread.memory.planned.values()
        return [t.density for t in planned.timeline.tensors]

    def close(densities: list[float]) -> bool:
        return all(abs(d - share) < 0.03 for d, share in zip(densities, shares, strict=True))

    off = offload(min_bytes=0, keep_last=0)
    run(off, 6)
    assert close(found(off))
    run(off, 1, SIZE // 2)
    run(off, 6)
    assert close(found(off))
    off = offload(min_bytes=0, keep_last=0)
    with off:
        pass
    run(off, 8)
    assert close(found(off))
    off = offload(min_bytes=0, keep_last=0)
    late = step(off)
    run(off, 8)
    assert found(off) == [1, 1, 1]
    late.backward()
    del late
    run(off, 8)
    assert close(found(off))


def check_the_first_uses_are_a_trial(runtime: Runtime) -> None:
    """Without a budget, of hooks that only record: nothing is timed, counted or planned before it has ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "enter", enter_by_pace)
        patch.setattr(Pace, "tried", False)
        off, kinds = offload(min_bytes=0, keep_last=0), []
        for _ in range(14):
            before, launches = off._latest, runtime.calls("LaunchKernel")
            step = Long(off, numbers(8), 10000)
            entered, launches = off._latest, runtime.calls("LaunchKernel") - launches
            with_hooks = "timed" if entered.use.timed else "planned" if entered.plans else "recorded"
            kinds.append(("none" if entered is before else with_hooks, launches))
            step.backward()
            torch.cuda.synchronize()
        assert [kind for kind, _ in kinds[:6]] == ["recorded"] * 3 + ["none"] * 3, kinds
        least = min(launches for _, launches in kinds)
        counted = [i for i, (_, launches) in enumerate(kinds) if launches == least + 8]
        timed = [i for i, (kind, _) in enumerate(kinds) if kind == "timed"]
        planned = [i for i, (kind, _) in enumerate(kinds) if kind == "planned"]
        assert len(counted) == 1 and 6 <= counted[0] < timed[0] < planned[0], kinds


def check_events_of_a_use_that_is_timed(runtime: Runtime) -> None:
    """Without a budget there are about a hundred each way, however many tensors are saved."""
    off, events = offload(min_bytes=0, keep_last=0, compress=None), []
    for around in (off, off, contextlib.nullcontext()):
        data, before = numbers(450, 16), runtime.calls("EventRecord")
        Step(around, data).backward()
        events.append(runtime.calls("EventRecord") - before)
        torch.cuda.synchronize()
    assert off._latest.use.timed
    assert 200 <= events[1] - events[2] <= 250, events


def check_a_plan_that_slows_the_step_is_made_anew(runtime: Runtime) -> None:
    """Without a budget, for the smaller share of the bus, from the next use on."""
    off = offload(min_bytes=0, keep_last=0, compress=None)
    for _ in range(12):
        Step(off, numbers(8)).backward()
        torch.cuda.synchronize()
    memory, found = off._thread.memory, []
    assert not off._latest.use.timed and memory.planned[0].share == SHARES[0]
    memory.pace.share = SHARES[1]
    for _ in range(3):
        Step(off, numbers(8)).backward()
        torch.cuda.synchronize()
        found.append((off._latest.use.timed, memory.planned[0].share))
    assert found[0][0] and [share for _, share in found] == [SHARES[0], SHARES[1], SHARES[1]], found
