"""Checks, as those of emulated_engine.py, of uses without a budget whose hooks go with the last move."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch import Tensor
from weft.offloading import Move, offload, simulate

from tests.offload.emulated_steps import SIZE, Runtime, Save, Step, memory, numbers

BYTES = 4 * SIZE


@contextlib.contextmanager
def planned(moves: int, early: int = 0, first: int = 0):
    """So many tensors move, the first of all or those from another on, and come back when they are read, or operations
    earlier."""

    def plan_movable(timeline, limit, link, compress, movable, slowdown):
        back = [(timeline.tensors[i].first_backward, i) for i in range(len(timeline.tensors))[first : first + moves]]
        chosen = [Move(i, max(read - early, timeline.forward)) for read, i in sorted(back)]
        return simulate(timeline, chosen, limit, link=link)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft._offload.planning.plan_movable", plan_movable)
        yield


def settled(count: int, uses: int = 10) -> offload:
    off = offload(min_bytes=0, keep_last=0, compress=None)
    for _ in range(uses):
        Step(off, numbers(count)).backward()
        torch.cuda.synchronize()
    assert off._latest.use.unhooked
    return off


def check_hooks_go_with_the_last_move(runtime: Runtime) -> None:
    """The report counts what comes behind it as planned; nothing else is different."""
    for moves, early, hooked in ((3, 0, 3), (3, 2, 5), (1, 0, 1), (0, 0, 1)):
        with planned(moves, early):
            off = settled(8)
            data = numbers(8)
            step, report = Step(off, data), off.report().to_dict()
            assert off._latest.use.saves == hooked and report["unhooked_tensors"] == 8 - hooked
            assert report["moved_tensors"] == moves and report["moved_bytes"] == moves * BYTES
            assert report["saved_tensors"] == 8 and report["saved_bytes"] == report["live_bytes"] == 8 * BYTES
            assert report["peak_bytes_without"] == 8 * BYTES and report["kept"]["budget"] == (8 - moves) * BYTES
            assert "tensors behind the last move" in str(off.report())
            step.backward()
            torch.cuda.synchronize()
            report = off.report().to_dict()
            assert report["live_bytes"] == 0 and report["forward_seconds"] > 0
            assert off.timeline is not None and len(off.timeline.tensors) == 8  # of a use that had them to its end


def check_what_moves_and_is_saved_again(runtime: Runtime) -> None:
    """It stays nowhere: not on the device beside its copy, either, where that is behind the last move."""
    for again, hooked in ((1, 3), (3, 5), (7, 8)):

        def step(context) -> tuple[Tensor, list[Tensor], list[Tensor]]:
            data, seen, saved = numbers(8), [], []
            y = torch.zeros(1, device="cuda", requires_grad=True)
            with context:
                for i, d in enumerate(data):
                    saved.append(d.to("cuda", non_blocking=True))
                    y = Save.apply(y, saved[-1], seen)
                    if i == again:  # noqa: B023
                        y = Save.apply(y, saved[1], seen)
            return y, [*data[: again + 1], data[1], *data[again + 1 :]], seen  # noqa: B023

        with planned(2):
            off = offload(min_bytes=0, keep_last=0, compress=None)
            for _ in range(10):
                before = memory()
                y, data, seen = step(off)
                held = memory() - before
                y.backward()
                assert all(torch.equal(a, b) for a, b in zip(seen[::-1], data, strict=True))
                del y
                torch.cuda.synchronize()
            assert off._latest.use.saves == hooked and off._latest.use.unhooked == (hooked < 8)
            assert 6 * BYTES <= held < 7 * BYTES, held / BYTES


def check_hooks_come_back(runtime: Runtime) -> None:
    """At the end of the block, however it ends, and where the uses look again; not where other hooks are below."""
    with planned(3):
        off = settled(8)
        before = off.report().to_dict()["saved_tensors"]
        Step(contextlib.nullcontext(), numbers(8)).backward()
        assert off.report().to_dict()["saved_tensors"] == before
        for _ in range(2):
            with pytest.raises(ValueError, match="mine"), off:
                y = torch.zeros(1, device="cuda", requires_grad=True)
                for d in numbers(6):
                    y = Save.apply(y, d.to("cuda", non_blocking=True), [])
                raise ValueError("mine")
            del y
        for _ in range(3):
            Step(off, numbers(8)).backward()
            torch.cuda.synchronize()
        seen: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            Step(off, numbers(8)).backward()
            assert not seen and not off._latest.use.unhooked
            Step(contextlib.nullcontext(), numbers(2)).backward()
            assert len(seen) == 2
        unhooked = []
        for _ in range(40):
            Step(off, numbers(8)).backward()
            torch.cuda.synchronize()
            unhooked.append(off._latest.use.unhooked)
        assert 30 <= sum(unhooked) < 40, unhooked


def check_graphs_that_are_not_as_planned(runtime: Runtime) -> None:
    """Behind the last move more, less, or something else is saved, and it is read in another order, or twice."""
    draw = random.Random(0)
    with planned(3):
        off = settled(8)
        for count in (10, 4, 3, 8, 2, 8, 12, 8):
            Step(off, numbers(count)).read_twice(off, draw, runtime)
            torch.cuda.synchronize()
            assert off.report().to_dict()["live_bytes"] == 0
        off = settled(8)
        data, seen = numbers(8), []
        y = torch.zeros(1, device="cuda", requires_grad=True)
        with off:  # the backward inside of the block, of a part first
            for d in data[:5]:
                y = Save.apply(y, d.to("cuda", non_blocking=True), seen)
            y.backward(retain_graph=True)
            for d in data[5:]:
                y = Save.apply(y, d.to("cuda", non_blocking=True), seen)
            y.backward()
        found = [*reversed(seen[:5]), *reversed(seen[5:])]
        assert all(torch.equal(a, b) for a, b in zip(found, [*data[:5], *data], strict=True))
        del y
        torch.cuda.synchronize()
        assert off.report().to_dict()["live_bytes"] == 0
        step = Step(off, numbers(8))
        del step  # never read
        assert off.report().to_dict()["live_bytes"] == 0
        Step(off, numbers(8)).backward()


def check_calls_of_tensors_that_the_plan_keeps(runtime: Runtime) -> None:
    """None, however large they are."""

    def calls(context, data: list[Tensor]) -> int:
        before = runtime.calls("StreamIsCapturing")
        step = Step(context, data)
        found = runtime.calls("StreamIsCapturing") - before
        step.backward()
        return found

    own = []
    for count in (8, 28):
        with planned(1, first=count - 2):
            off = settled(count)
            own.append(calls(off, numbers(count)) - calls(contextlib.nullcontext(), numbers(count)))
            assert off._latest.use.saves == count - 1
    assert own[0] == own[1], own
