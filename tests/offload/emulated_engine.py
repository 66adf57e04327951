"""Checks of the CUDA engine on a runtime without a device, tests/emulator/runtime.cpp: test_emulated_engine.py runs
them in a process that has it loaded. There, what nobody waits for comes last, so that a missing wait gives wrong bytes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from weft import _C
from weft._offload import context
from weft._offload.pace import Pace
from weft.offloading import Link, offload

from tests.offload import emulated_small
from tests.offload.emulated_steps import SIZE, Lazy, Parts, Runtime, Save, Step, everything, memory, numbers
from tests.offload.engines import live_bytes, plan_at_once, planned_in_part

enter_by_pace = Pace.enter


def check_rates_that_cannot_be_measured(runtime: Runtime) -> None:
    """For want of memory are measured the next time. The first check: what is measured holds for the process."""
    refuse = _C._testing.offload_refuse
    off, (data,) = offload(0, min_bytes=0, keep_last=0, compress=None), numbers(1)
    for refused in ({}, {"host": 1 << 40}, {"device": 1 << 40}, {}):
        assert off._planner.links == {}
        with contextlib.ExitStack() as stack:
            refuse(**refused)
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


def check_what_comes_back(runtime: Runtime) -> None:
    """Whatever moves, however the device and the bus take turns."""
    draw = random.Random(0)
    for compress in (None, "zvc", "auto"):
        for budget in (0, 3 * 4 * SIZE, 8 * 4 * SIZE, None):
            off = offload(budget, min_bytes=0, keep_last=draw.choice([0, 1]), compress=compress)
            for use in range(6):
                step = Step(off, numbers(12, draw.choice([SIZE, SIZE, 1000]) if use > 3 else SIZE))
                step.read_twice(off, draw, runtime)
                if draw.random() < 0.5:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            assert off.report().to_dict()["live_bytes"] == 0


def check_what_comes_back_of_several_uses(runtime: Runtime) -> None:
    """Uses side by side, on two streams, of parts of the same memory, read twice, in parts, or never."""
    side = torch.cuda.Stream()
    for seed in range(12):
        draw = random.Random(seed)
        off = offload(
            draw.choice([0, 0, 5 * 4 * SIZE, 20 * 4 * SIZE, None]),
            min_bytes=draw.choice([0, 2000]),
            keep_last=draw.choice([0, 0, 2]),
            compress=draw.choice([None, "zvc", "auto"]),
        )
        shapes, uses = random.Random(seed), []
        for _ in range(10):
            if draw.random() < 0.7:
                shapes = random.Random(seed)  # else another branch
            uses.append(Parts(off, shapes, side))
            draw.shuffle(uses)
            while uses and draw.random() < 0.6:
                if draw.random() < 0.3:
                    uses[-1].backward(retain_graph=True)
                else:
                    uses.pop().backward() if draw.random() < 0.8 else uses.pop()
                if draw.random() < 0.5:
                    runtime.drain(draw.choice([0, *off._engine.streams(0)]))
                if draw.random() < 0.3:
                    off.report()
        for use in uses:
            use.backward()
        uses.clear()
        torch.cuda.synchronize()
        report = off.report().to_dict()
        assert report["live_bytes"] == 0 and report["host_peak_bytes"] >= report["host_bytes"] >= 0


def check_what_comes_back_compressed_in_part(runtime: Runtime) -> None:
    """Without a budget, in segments, also where there are more values than were expected."""
    draw = random.Random(0)
    for segment in (0, 1 << 14):
        _C._testing.offload_stages(segment=segment)
        off = offload(min_bytes=0, keep_last=draw.choice([0, 1]))
        _C._testing.offload_stages()
        with planned_in_part(draw):
            for use in range(8):
                step = Step(off, numbers(12, density=draw.choice([0.5, 0.5, 0.9, 0.1]) if use > 3 else 0.5))
                step.read_twice(off, draw, runtime)
                torch.cuda.synchronize()
                report = off.report().to_dict()
                assert report["live_bytes"] == 0 and (report["compressed_tensors"] > 0) == (use > 1), use
                if use == 2:  # of the mean share 0.46 about a half less
                    assert 0.5 < report["sent_bytes"] / report["moved_bytes"] < 0.98


def check_shares_of_a_tensor(runtime: Runtime) -> None:
    """By themselves: the bytes that cross, and what comes back, on streams that take turns in every order."""
    side, engine = torch.cuda.Stream(), offload(0)._engine
    for seed in range(60):
        draw = random.Random(seed)
        n, density, share = draw.choice([33, 5000, SIZE]), draw.choice([0.1, 0.5, 1.0]), draw.choice([0.02, 0.3, 1])
        (data,), expected = numbers(1, n, density), draw.choice([0.0, 0.3, density])
        coded = n if share == 1 else 32 * int(share * n / 32)
        with torch.cuda.stream(draw.choice([side, torch.cuda.current_stream()])):
            x = data.to("cuda", non_blocking=True)
            round_trip = _C._testing.OffloadRoundTrip(engine, x, True, expected, share)
            streams = [*engine.streams(0)]
            if draw.random() < 0.5:
                runtime.drain(draw.choice(streams))
            back = torch.full((n,), 7.0, device="cuda")
            round_trip.bring_back(engine, back)
            for stream in draw.sample(streams, len(streams)):
                runtime.drain(stream)
        torch.cuda.synchronize()
        assert torch.equal(back.cpu().view(torch.int32), data.view(torch.int32)), f"tensor {seed} differs"
        nonzeros = int(data[:coded].count_nonzero())
        least = 4 * (nonzeros + (n - coded)) + 4 * math.ceil(coded / 32)
        assert round_trip.sent_bytes >= least and ((expected > 0 and coded > 0) or round_trip.sent_bytes == least)
        assert coded > 0 or round_trip.sent_bytes == 4 * n


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


def check_a_forgotten_wait_is_noticed(runtime: Runtime) -> None:
    """Or the other checks would say nothing."""
    for every, check in itertools.product(
        (1, 2, 3, 5), (check_what_comes_back, check_what_comes_back_compressed_in_part)
    ):
        runtime.forget(every)
        try:
            with pytest.raises(AssertionError, match="differs"):
                check(runtime)
        finally:
            runtime.forget(0)
            runtime.drain()


def check_several_streams(runtime: Runtime) -> None:
    side = torch.cuda.Stream()
    for compress in (None, "zvc"):
        off = everything(compress=compress)
        for _ in range(4):
            Step(off, numbers(8), [side, torch.cuda.current_stream()] * 4).backward()


def check_an_evicted_tensor_is_complete(runtime: Runtime) -> None:
    """What a use that goes off its plan moves later is complete when the stream that made it is."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    off = offload(4 * 4 * SIZE, min_bytes=0, keep_last=0, compress=None)
    for _ in range(5):  # until not every operation is timed
        Step(off, numbers(8)).backward()
        torch.cuda.synchronize()
    step = Step(off, numbers(3, SIZE + 64) + numbers(5, SIZE + 128), [side] * 3 + [current] * 5)
    assert not off._latest.use.timed and off.report().to_dict()["moved_tensors"] > 0
    off._engine.poll()
    for stream in off._engine.streams(torch.cuda.current_device()):
        runtime.drain(stream)  # the copies out before what nobody told them to wait for
    step.backward()


def check_the_codecs_memory_after_a_use(runtime: Runtime) -> None:
    """A read after the end of its use has the codec's memory on the device again, and gives it back."""
    off = everything(compress="zvc")
    Step(off, numbers(4)).backward()
    before = memory()
    step = Step(off, numbers(4))
    step.backward(retain_graph=True)
    held = memory()
    for _ in range(2):
        step.backward(retain_graph=True)
        assert memory() == held
    del step
    assert memory() == before and off.report().to_dict()["live_bytes"] == 0


def check_a_captured_backward(runtime: Runtime) -> None:
    """Of tensors that moved before is refused, and can be run outside of the capture afterwards."""
    for compress in (None, "zvc"):
        off = everything(compress=compress)
        for _ in range(3):
            step = Step(off, numbers(4))
            runtime.capture(True)
            try:
                with pytest.raises(RuntimeError, match="captured into a CUDA graph"):
                    step.y.backward(retain_graph=True)
            finally:
                runtime.capture(False)
            step.backward()


def check_numbers_of_dropped_copies(runtime: Runtime) -> None:
    """Where the codec writes its counts: not for the next one before the kernel has run."""
    dropped, off = everything(compress="zvc"), everything(compress="zvc")
    counts, side = [], torch.cuda.Stream()
    for _ in range(2):
        Step(dropped, numbers(4, density=1.0), [side] * 4)
        for _ in range(12):  # more than an object remembers: the use is gone, and its kernels wait
            with dropped:
                pass
        step = Step(off, numbers(4, density=0.1))
        for stream in off._engine.streams(0):
            runtime.drain(stream)
        runtime.drain()
        counts.append(off.report().to_dict()["sent_bytes"])
        step.backward()
        torch.cuda.synchronize()
    assert max(counts) < 4 * 4 * SIZE * 0.3, counts


def check_room_in_a_first_use(runtime: Runtime) -> None:
    """The tensor just saved and the one before it may stand beside a full budget: nobody waits for the latter."""
    off = everything()
    step = Step(off, numbers(3))
    runtime.drain()
    waited = [s["operation"] for s in off.report().to_dict()["stalls"]]
    assert waited and not any(w.startswith(("forward 1", "forward 2")) for w in waited)
    step.backward()


def check_refused_host_memory(runtime: Runtime) -> None:
    for compress in (None, "zvc", "auto"):
        off = everything(compress=compress)
        runtime.refuse(host=2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = Step(off, [n.detach() for n in numbers_before(off, runtime)])
        report = off.report().to_dict()
        assert report["kept"]["pool"] == 2 * 4 * SIZE and report["moved_tensors"] == 2
        assert [w.category for w in told] == [RuntimeWarning] and "host memory" in str(told[0].message)
        step.backward()
        Step(off, numbers(4)).backward()
        assert off.report().to_dict()["moved_tensors"] == 4


def numbers_before(off: offload, runtime: Runtime) -> list[Tensor]:
    """Pinned by torch before anything is refused."""
    runtime.refuse()
    data = numbers(4)
    runtime.refuse(host=2)
    return data


def check_refused_device_memory(runtime: Runtime) -> None:
    """A read that finds no memory raises torch's error, and is as good as none: the next one gets its tensor."""
    refuse = _C._testing.offload_refuse

    class Refusing(list):
        def append(self, x: Tensor) -> None:
            super().append(x)
            refuse(device=len(self) % 2)  # for what would be brought back ahead of the next

    for compress in (None, "zvc", "auto"):
        off = everything(compress=compress)
        for use in range(4):
            if use == 3 and compress is not None:
                refuse(device=2)  # of the codec: what finds no memory for it goes as it is
            step = Step(off, numbers(6))
            assert use < 3 or off.report().to_dict()["compressed_tensors"] == (4 if compress else 0)
            refuse(device=1 << 40)
            with pytest.raises(torch.OutOfMemoryError):
                step.y.backward(retain_graph=True)
            refuse()
            step.seen.clear()
            step.backward()
            step = Step(off, numbers(6), seen=Refusing())
            step.backward()
            refuse()
            del step
            assert off.report().to_dict()["live_bytes"] == 0


def check_a_buffer_that_streams_write_in_turns(runtime: Runtime) -> None:
    """Parts of one buffer, each saved on the stream that wrote it: the copy out waits for all of these."""
    first, second = torch.cuda.current_stream(), torch.cuda.Stream()
    for third in (False, True):
        off = offload(4 * 4 * SIZE, min_bytes=0, keep_last=0, compress=None)
        n = 4 * SIZE
        (data,), more, seen = numbers(1, n, 1.0), numbers(4), []
        buffer, y = torch.empty(n, device="cuda"), torch.zeros(1, device="cuda", requires_grad=True)
        buffer[: n // 2].copy_(data[: n // 2], non_blocking=True)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            buffer[n // 2 :].copy_(data[n // 2 :], non_blocking=True)
        with off:
            y = Save.apply(y, buffer[: n // 2], seen)
            with torch.cuda.stream(second):
                y = Save.apply(y, buffer[n // 4 :], seen)
            if third:
                y = Save.apply(y, buffer[: n // 8], seen)
            for d in more:
                y = Save.apply(y, d.to("cuda", non_blocking=True), seen)
        assert off.report().to_dict()["moved_tensors"] > 0
        del buffer
        off._engine.poll()
        for stream in off._engine.streams(0):
            runtime.drain(stream)
        y.backward()
        expected = [data[: n // 2], data[n // 4 :], *([data[: n // 8]] if third else []), *more]
        for found, e in zip(reversed(seen), expected, strict=True):
            assert torch.equal(found, e)


def check_a_reader_on_the_stream_of_the_save(runtime: Runtime) -> None:
    """A tensor that is evicted on the stream of its memory, while the stream that saved it still reads it."""
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    off = offload(2 * 4 * SIZE, min_bytes=0, keep_last=0, compress=None)
    (data,), seen, read = numbers(1, SIZE, 1.0), [], torch.zeros(SIZE).pin_memory()
    y = torch.zeros(1, device="cuda", requires_grad=True)
    with off:
        x = data.to("cuda", non_blocking=True)
        other.wait_stream(current)
        with torch.cuda.stream(other):
            y = Save.apply(y, x, seen)
            read.copy_(x, non_blocking=True)
        del x
        for d in numbers(8):
            y = Save.apply(y, d.to("cuda", non_blocking=True), seen)
            off._engine.poll()
    for stream in off._engine.streams(0):
        runtime.drain(stream)
    current.synchronize()
    other.synchronize()
    assert torch.equal(read, data)
    y.backward()


def check_host_memory_that_a_copy_back_still_reads(runtime: Runtime) -> None:
    """A use on one stream takes the host memory that one on another stream has not read yet."""
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()

    def use(off: offload, data: list[Tensor], stream: torch.cuda.Stream) -> tuple[Tensor, list[Tensor]]:
        seen: list[Tensor] = []
        with torch.cuda.stream(stream):
            y = torch.zeros(1, device="cuda", requires_grad=True)
            with off:
                for d in data:
                    y = Lazy.apply(y, d.to("cuda", non_blocking=True), seen)
        return y, seen

    for compress in (None, "zvc"):
        off = everything(compress=compress)
        data = numbers(4), numbers(4)
        for _ in range(3):
            y, first = use(off, data[0], other)
            with torch.cuda.stream(other):
                y.backward()
            del y
            y, second = use(off, data[1], current)
            runtime.drain(off._engine.streams(0)[0])
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(reversed(first), data[0], strict=True))
            y.backward()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(reversed(second), data[1], strict=True))


def check_a_graph_that_goes_in_a_capture(runtime: Runtime) -> None:
    """After a backward that failed: what had arrived is waited for by nobody, least of all by the captured stream."""

    class Failing(list):
        def append(self, x: Tensor) -> None:
            super().append(x)
            raise ArithmeticError

    off = everything()
    for _ in range(2):
        Step(off, numbers(4)).backward()
    data = numbers(
        4
    )  # whose memory torch would record as used by the captured stream, if it went before the capture ends
    step = Step(off, data, seen=Failing())
    torch.cuda.synchronize()
    with pytest.raises(ArithmeticError):
        step.y.backward()
    torch.cuda.synchronize()
    runtime.capture(True)
    del step
    gc.collect()
    runtime.capture(False)


def check_a_finished_use_that_finds_no_memory(runtime: Runtime) -> None:
    """The codec's memory for a late read is given back though the read fails."""
    off = everything(compress="zvc")
    for _ in range(3):
        step = Step(off, numbers(4))
        step.backward(retain_graph=True)
    torch.cuda.synchronize()
    _C._testing.offload_refuse(device=1 << 40)
    with pytest.raises(torch.OutOfMemoryError):
        step.y.backward(retain_graph=True)
    _C._testing.offload_refuse()
    del step
    torch.cuda.synchronize()
    assert live_bytes(off) == 0


def check_a_tensor_refilled_on_its_way_back(runtime: Runtime) -> None:
    """What was brought back ahead is read by nobody then; its memory is given out when the copy has ended."""
    off, places = everything(), []
    data, fresh = numbers(3), torch.full((SIZE,), 5.0).pin_memory()
    xs = [d.to("cuda", non_blocking=True) for d in data]
    kept, taken = xs[0], []

    class Then(torch.autograd.Function):
        """Does something in the backward."""

        @staticmethod
        def forward(ctx, x: Tensor, what: Callable[[], None]) -> Tensor:
            ctx.what = what
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad: Tensor):
            ctx.what()
            return grad, None

    class Read(torch.autograd.Function):
        """Says where it found what it saved, and waits for nothing."""

        @staticmethod
        def forward(ctx, x: Tensor, saved: Tensor) -> Tensor:
            ctx.save_for_backward(saved)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad: Tensor):
            places.append(ctx.saved_tensors[0].data_ptr())
            return grad, None

    def refill() -> None:
        kept.untyped_storage().resize_(0)
        kept.untyped_storage().resize_(2 * 4 * SIZE)
        with torch.autograd._unsafe_preserve_version_counter(kept):
            kept.copy_(data[0], non_blocking=True)

    def take() -> None:
        for _ in range(4):
            taken.append(torch.empty(SIZE, device="cuda"))
            taken[-1].copy_(fresh, non_blocking=True)

    y = torch.zeros(1, device="cuda", requires_grad=True)
    with off:
        y = Read.apply(Then.apply(y, take), kept)
        y = Then.apply(y, refill)
        for x in xs[1:]:
            y = Read.apply(y, x)
    runtime.drain()
    del xs, x
    off._engine.poll()
    y.backward()
    assert places[-1] == kept.data_ptr() and off.report().to_dict()["moved_tensors"] == 3
    runtime.drain(torch.cuda.current_stream().cuda_stream)  # and the copies back as late as they may be
    runtime.drain()
    assert all(torch.equal(t.cpu(), fresh) for t in taken)


def check_a_count_that_finds_no_memory(runtime: Runtime) -> None:
    """Of the elements that a first use would know more about: the step goes on without."""
    for budget in (0, 4 * 4 * SIZE, 1 << 30):
        off = offload(budget, min_bytes=0, keep_last=0, compress="auto")
        for refused in (1 << 40, 0):
            _C._testing.offload_refuse(device=refused)
            try:
                step = Step(off, numbers(6, density=0.1))
            finally:
                _C._testing.offload_refuse()
            assert off.report().to_dict()["moved_tensors"] > 0 or budget > 6 * 4 * SIZE
            step.backward()
            torch.cuda.synchronize()


def check_memory_freed_during_its_copy_out(runtime: Runtime) -> None:
    """By resize_, as sharding frees it and fills it again: the next owner of the memory waits for the copy."""
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        for compress in (None, "zvc"):
            off, seen = everything(compress=compress), []
            data, other = numbers(2)
            y = torch.zeros(1, device="cuda", requires_grad=True)
            x = data.to("cuda", non_blocking=True)
            place, storage = x.data_ptr(), x.untyped_storage()
            stream.wait_stream(torch.cuda.current_stream())
            with off, torch.cuda.stream(stream):
                y = Save.apply(y, x, seen)
                storage.resize_(0)
                taken = [torch.empty(SIZE, device="cuda") for _ in range(50)]
                # Memory of another stream is reused only after all work on it.
                assert (place in [t.data_ptr() for t in taken]) == (stream != side)
                for t in taken:
                    t.copy_(other, non_blocking=True)
                runtime.drain(stream.cuda_stream)
                del taken, t
            storage.resize_(4 * SIZE)
            with torch.autograd._unsafe_preserve_version_counter(x):
                x.copy_(data, non_blocking=True)
            del x, storage  # else the read finds it there
            torch.cuda.synchronize()
            off._engine.poll()
            y.backward()
            assert torch.equal(seen[0], data) and off.report().to_dict()["moved_tensors"] == 1


def check_managed_objects(runtime: Runtime) -> None:
    """Nest, and may be entered by several threads at once."""

    def allocations() -> int:
        return runtime.calls("MallocManaged")

    before = allocations()
    first, second = everything(backend="managed"), everything(backend="managed")
    both = threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            torch.empty(3 << 20, device="cuda")
            both.wait()

    for _ in range(3):
        with first:
            with second:
                inner = torch.empty(1 << 20, device="cuda")
            outer = torch.empty(1 << 20, device="cuda")
        del inner, outer
        thread = threading.Thread(target=other)
        with first:
            thread.start()
            both.wait()
            torch.empty(1 << 20, device="cuda")
            both.wait()
            thread.join()
        with pytest.raises(ZeroDivisionError), first, second:
            raise ZeroDivisionError
    assert 0 < allocations() - before <= 6  # segments, and not one per use
    found = allocations()
    torch.empty(64 << 20, device="cuda")  # outside
    assert allocations() == found


class Long(Step):
    """A step with work of its own, which takes an operation of the device each."""

    def __init__(self, off: offload, data: list[Tensor], work: int) -> None:
        super().__init__(off, data)
        x, one = torch.zeros(1, device="cuda"), torch.zeros(1).pin_memory()
        for _ in range(work):
            x.copy_(one, non_blocking=True)


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


def check_host_memory_in_pieces(runtime: Runtime) -> None:
    """Of which a large tensor needs several: no copy crosses their ends."""
    for compress in (None, "zvc"):
        off, before = everything(compress=compress), runtime.calls("HostRegister")
        data = numbers(2, 9 << 20)
        for _ in range(3):
            Step(off, data).backward()
            torch.cuda.synchronize()
        assert off.report().to_dict()["moved_tensors"] == 2
        pinned = runtime.calls("HostRegister") - before
        assert 4 <= pinned <= 6, pinned
        off.close()
        assert runtime.calls("HostUnregister") >= pinned


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


CHECKS: dict[str, Callable[[Runtime], None]] = {
    name.removeprefix("check_"): check
    for module in (globals(), vars(emulated_small))
    for name, check in list(module.items())
    if name.startswith("check_")
}


def main(path: str) -> None:
    """Prints a line per check: its name, and whether it holds; what went wrong goes to stderr."""
    runtime = Runtime(path)
    # An operation takes as long as any other here: hooks cost more than they do, and the checks are about their work.
    Pace.enter = lambda pace, now, steady: True
    patch = pytest.MonkeyPatch()
    plan_at_once(patch)
    for name, check in CHECKS.items():
        try:
            torch.manual_seed(0)
            errors = runtime.errors()
            check(runtime)
            runtime.drain()
            assert runtime.errors() == errors
            print(name, "holds", flush=True)
        except BaseException:
            runtime.refuse()
            traceback.print_exc()
            print(name, "fails", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
