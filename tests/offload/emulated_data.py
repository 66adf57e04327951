"""Checks, as those of emulated_engine.py: the bytes that come back, however streams take turns."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor
from weft import _C
from weft.offloading import offload

from tests.offload.emulated_steps import SIZE, Lazy, Parts, Runtime, Save, Step, everything, numbers
from tests.offload.engines import planned_in_part


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
