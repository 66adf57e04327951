"""Checks, as those of emulated_engine.py, of small tensors: what is kept, and what shares the events of a copy."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import warnings
from collections.abc import Callable

import torch
from weft.offloading import offload

from tests.offload.emulated_steps import SIZE, Runtime, Save, Step, everything, numbers


def check_calls_of_a_moved_tensor(runtime: Runtime) -> None:
    """Events, waits and copies of tensors on their way out and back, in a use that is like the one before. Small ones
    share them, up to 16."""
    names = (
        "EventRecord", "EventQuery", "StreamWaitEvent", "MemcpyAsync", "ThreadExchangeStreamCaptureMode",
        "MemcpyBatchAsync",
    )  # fmt: skip

    def calls(do: Callable[[], object]) -> list[int]:
        torch.cuda.synchronize()
        before = [runtime.calls(name) for name in names]
        do()
        return [runtime.calls(name) - b for name, b in zip(names, before, strict=True)]

    for size, count, share in ((SIZE, 160, 16), (5 << 18, 16, 1)):
        off = everything()
        for _ in range(8):
            Step(off, numbers(count, size)).backward()
        data, steps, joint = numbers(count, size), [], math.ceil(count / share)
        out = calls(lambda: steps.append(Step(off, data)))  # noqa: B023
        assert not off._latest.use.timed and off.report().to_dict()["moved_tensors"] == count
        back = calls(lambda: steps[0].y.backward())  # noqa: B023
        print(f"{count} tensors of {4 * size} bytes, calls {names}: out {out}, back {back}", file=sys.stderr)
        # Of each: the copy to the device, and out. Of those that share: the event of the saves and the end of the
        # copies out, and one more where room is waited for; the wait for the saves, and that for room.
        # Small ones are copied by one call.
        alone = count if share == 1 else 4
        assert out[3] <= count + alone and out[0] <= 3 * joint + 4 and out[2] <= 2 * joint + 4, out
        # The copies back, and the test's and that of the gradient; the event of a read and the end of the copies back,
        # and one more where these are waited for; their wait, and that for them.
        assert back[3] <= count + alone + 2 and back[0] <= 3 * joint + 6 and back[2] <= 3 * joint + 4, back
        together = 0 if share == 1 or torch.version.cuda < "13" else joint
        assert out[5] == together and together <= back[5] <= together + 2, (out, back)
        assert out[1] <= count and back[1] <= count, (out, back)  # no more than one in a tenth of a millisecond
        assert out[4] <= 2 * out[1] + 4 and back[4] <= 2 * back[1] + 4, (out, back)  # for queries alone


def check_calls_of_a_kept_tensor(runtime: Runtime) -> None:
    """None, where it is small; else whether the stream is captured, of a save."""
    names = ("StreamIsCapturing", "StreamGetCaptureInfo", "EventRecord", "StreamWaitEvent", "EventQuery")

    def calls(context, count: int) -> list[int]:
        data = numbers(count)
        torch.cuda.synchronize()
        before = [runtime.calls(name) for name in names]
        Step(context, data).backward()
        return [runtime.calls(name) - b for name, b in zip(names, before, strict=True)]

    for min_bytes, asked in (("1MiB", 0), (0, 1)):
        own = []
        for count in (8, 24):
            off = offload(1 << 40, min_bytes=min_bytes, compress=None)
            for _ in range(8):
                calls(off, count)
            hooked, plain = calls(off, count), calls(contextlib.nullcontext(), count)
            assert not off._latest.use.timed and off.report().to_dict()["moved_tensors"] == 0
            own.append([a - b for a, b in zip(hooked, plain, strict=True)])
        more = [b - a for a, b in zip(*own, strict=True)]
        assert more[0] + more[1] == 16 * asked and more[2:] == [0, 0, 0], (min_bytes, own)


def check_small_tensors_move_together(runtime: Runtime) -> None:
    """In every order of streams and sizes, also where one of them is freed, read or refused host memory meanwhile."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    for seed in range(8):
        draw = random.Random(seed)
        off = offload(
            draw.choice([0, 12 * 4 * SIZE, None]), min_bytes=draw.choice([0, 4000]), keep_last=0, compress=None
        )
        sizes = [draw.choice([1000, SIZE, SIZE, 5 << 18]) for _ in range(20)]
        streams = [draw.choice([current, current, current, side]) for _ in sizes] if seed % 2 else None
        for _ in range(6):
            step = Step(off, [numbers(1, size)[0] for size in sizes], streams)
            step.read_twice(off, draw, runtime)
            torch.cuda.synchronize()
            assert off.report().to_dict()["live_bytes"] == 0

    off = everything()
    for _ in range(3):
        Step(off, numbers(12)).backward()
    runtime.drain()
    off.release()
    data = numbers(12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runtime.refuse(host=3)
        step = Step(off, data)
        runtime.refuse()
    report = off.report().to_dict()
    assert report["kept"]["pool"] == 3 * 4 * SIZE and report["moved_tensors"] == 9
    step.backward()


def check_a_small_tensor_that_its_stream_goes_on_reading(runtime: Runtime) -> None:
    """Saved on a stream that did not allocate it, it leaves when another stream saves: its memory waits for both."""
    side, current, off = torch.cuda.Stream(), torch.cuda.current_stream(), everything()
    for _ in range(5):
        data, other, seen = numbers(3), numbers(1)[0], []
        y = torch.zeros(1, device="cuda", requires_grad=True)
        with off:
            x = data[0].to("cuda", non_blocking=True)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                y = Save.apply(y, x, seen)
            y = Save.apply(y, data[1].to("cuda", non_blocking=True), seen)
            runtime.drain(off._engine.streams(0)[0])
            with torch.cuda.stream(side):
                late = torch.empty_like(x).copy_(x, non_blocking=True)
            del x
            y = Save.apply(y, data[2].to("cuda", non_blocking=True), seen)
            off._engine.poll()
            taken = [torch.empty(SIZE, device="cuda") for _ in range(6)]
            for t in taken:
                t.copy_(other, non_blocking=True)
            runtime.drain(current.cuda_stream)
        with torch.cuda.stream(side):
            assert torch.equal(late.cpu(), data[0])
        y.backward()
        assert all(torch.equal(a, b) for a, b in zip(reversed(seen), data, strict=True))
        torch.cuda.synchronize()


def check_a_small_tensor_that_is_freed_before_it_leaves(runtime: Runtime) -> None:
    """By resize_, and filled again with what it had: it stays where it is, and the next owner of its memory is safe."""
    off = everything()
    for use in range(6):
        data, other, seen = numbers(12), numbers(1)[0], []
        y = torch.zeros(1, device="cuda", requires_grad=True)
        with off:
            for i, d in enumerate(data):
                x = d.to("cuda", non_blocking=True)
                y = Save.apply(y, x, seen)
                if i == 4 and use > 2:
                    x.untyped_storage().resize_(0)
                    taken = [torch.empty(SIZE, device="cuda") for _ in range(3)]
                    for t in taken:
                        t.copy_(other, non_blocking=True)
                    x.untyped_storage().resize_(4 * SIZE)
                    with torch.autograd._unsafe_preserve_version_counter(x):
                        x.copy_(d, non_blocking=True)
                    kept = x
        y.backward()
        assert all(torch.equal(a, b) for a, b in zip(reversed(seen), data, strict=True))
        assert use < 3 or all(torch.equal(t.cpu(), other) for t in taken)
        torch.cuda.synchronize()
    del kept


def check_small_tensors_and_a_capture(runtime: Runtime) -> None:
    """That begins before they have left: they leave after it."""
    off = everything()
    for _ in range(3):
        Step(off, numbers(8)).backward()
    for back in (False, True):
        data, seen = numbers(8), []
        xs = [d.to("cuda", non_blocking=True) for d in data]
        torch.cuda.synchronize()
        y = torch.zeros(1, device="cuda", requires_grad=True)
        with off:
            for x in xs[:5]:
                y = Save.apply(y, x, seen)
            del x
            runtime.capture(True)
            for x in xs[5:]:
                y = Save.apply(y, x, seen)
            if back:
                runtime.capture(False)
        runtime.capture(False)
        del xs, x
        assert off.report().to_dict()["moved_tensors"] == (5 if back else 0)
        y.backward()
        assert all(torch.equal(a, b) for a, b in zip(reversed(seen), data, strict=True))
        torch.cuda.synchronize()
