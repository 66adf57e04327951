"""Checks, as those of emulated_engine.py: memory that is refused, freed, refilled or shared."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from weft import _C
from weft.offloading import offload

from tests.offload.emulated_steps import SIZE, Runtime, Save, Step, everything, memory, numbers
from tests.offload.engines import live_bytes


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
        assert 10 <= pinned <= 12, pinned
        off.close()
        assert runtime.calls("HostUnregister") >= pinned


def check_host_memory_is_touched_first(runtime: Runtime) -> None:
    """All of it, by several threads, before it is registered, which would touch it page by page."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    engine, size, held = offload(0)._engine, 46 << 20, []
    x = torch.empty(size // 4, device="cuda")
    for _ in range(4):  # each at another place between two ends of pieces
        before = resident()
        held.append(_C._testing.OffloadRoundTrip(engine, x, False, 0.0))
        assert resident() - before > size - (1 << 20)
    torch.cuda.synchronize()
