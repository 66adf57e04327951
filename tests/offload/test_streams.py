"""weft.offload on CUDA: streams and delays. Each test would fail in a system without the wait it is about."""

from __future__ import annotations

import pytest
import torch
from weft.offloading import offload

from tests.offload.engines import (
    LONG,
    Fails,
    Probe,
    chain,
    cuda,
    delay,
    everything,
    live_bytes,
    numbers,
    plain_gradient,
    saved_and_restored,
)


@cuda
@pytest.mark.parametrize("compress", [None, "zvc", "rle"])
def test_memory_is_not_reused_before_its_copy_out_finished(compress: str | None) -> None:
    off = everything("copy", compress=compress)
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    for _ in range(3):
        delay(off, "out")
        with off:
            y = chain(x)
            for _ in range(8):  # takes whatever memory is free, and writes over it
                torch.full((1 << 20,), float("nan"), device="cuda")
        for _ in range(8):
            torch.full((1 << 20,), float("nan"), device="cuda")
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain_gradient(x))


@cuda
@pytest.mark.parametrize("compress", [None, "zvc"])
def test_memory_freed_during_its_copy_out(compress: str | None) -> None:
    """By resize_, which no version counts, and filled again: the copy has the bytes of the save."""
    off, seen = everything("copy", compress=compress), []
    anchor = torch.zeros((), device="cuda", requires_grad=True)
    saved_and_restored(off, torch.randn(1000, device="cuda"))  # or there are no streams to delay
    for _ in range(3):
        x = torch.randn(1 << 20, device="cuda")
        expected, storage, place = x.clone(), x.untyped_storage(), x.data_ptr()
        delay(off, "out")
        delay(off, "compress")
        with off:
            loss = Probe.apply(seen, x, anchor)
            storage.resize_(0)
            taken = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(50)]
            assert place in [t.data_ptr() for t in taken]
            del taken
        storage.resize_(4 << 20)
        with torch.autograd._unsafe_preserve_version_counter(x):
            x.copy_(expected)
        del x, storage  # else the read finds it there
        loss.backward()
        assert torch.equal(seen.pop()[0], expected)


@cuda
def test_managed_objects_nest() -> None:
    outer, inner = everything("managed"), everything("managed")
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    for _ in range(3):
        with outer:
            y = chain(x)
            with inner:
                y = chain(y)
        assert numbers(outer)["moved_bytes"] > 0 and numbers(inner)["moved_bytes"] > 0
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain_gradient(x, 8))


@cuda
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("compress", [None, "zvc"])
def test_reload_does_not_race_its_own_offload(inside: bool, compress: str | None) -> None:
    off = everything("copy", compress=compress)
    x = torch.randn(1 << 18, device="cuda", requires_grad=True)
    for name in ("out", "back", "compress", "decompress", "out"):
        delay(off, name)
        with off:
            y = chain(x)
            if inside:
                (g,) = torch.autograd.grad(y.sum(), x)
        if not inside:
            (g,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(g, plain_gradient(x))


@cuda
def test_stream_is_that_of_the_use() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        off = everything("copy")
        saved_and_restored(off, torch.randn(1000, device="cuda"))
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    expected = plain_gradient(x)
    torch.cuda.synchronize()
    for stream in (second, first, torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            with off:
                y = chain(x)
            torch.cuda._sleep(LONG)
            (g,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(g, expected)
    # Forward on one stream, backward asked for from another: autograd runs it on the forward's.
    with torch.cuda.stream(second), off:
        y = chain(x).sum()
    torch.cuda.current_stream().wait_stream(second)
    (g,) = torch.autograd.grad(y, x)
    assert torch.equal(g, expected)


@cuda
def test_memory_of_another_stream() -> None:
    """Allocated on one stream, saved on another: it goes back to the first, which knows of no copy."""
    off = everything("copy")
    side = torch.cuda.Stream()
    x = torch.randn(1 << 20, device="cuda")
    w = torch.ones(1 << 20, device="cuda", requires_grad=True)
    expected = x.clone()
    side.wait_stream(torch.cuda.current_stream())
    delay(off, "out")
    with torch.cuda.stream(side), off:
        y = (w * x).sum()
    torch.cuda.current_stream().wait_stream(side)
    del x
    for _ in range(4):
        torch.full((1 << 20,), float("nan"), device="cuda")
    assert torch.equal(torch.autograd.grad(y, w)[0], expected)


@cuda
@pytest.mark.parametrize("compress", [None, "zvc"])
def test_host_buffer_is_not_reused_while_it_is_read(compress: str | None) -> None:
    off = everything("copy", compress=compress)
    xs = [torch.randn(1 << 20, device="cuda", requires_grad=True) for _ in range(3)]
    grads = []
    for x in xs:
        with off:
            y = chain(x)
        delay(off, "back")
        grads.append(torch.autograd.grad(y.sum(), x)[0])
        del y  # the buffers are free for the next use, and still being read
    for x, g in zip(xs, grads, strict=True):
        assert torch.equal(g, plain_gradient(x))
    held = numbers(off)["host_bytes"]
    assert held == numbers(off)["host_peak_bytes"]


@cuda
def test_prefetched_memory_of_a_dropped_graph() -> None:
    """A tensor on its way back whose graph fails: its memory is given out only behind the copy."""

    off = everything("copy")
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    for _ in range(3):
        with off:
            y = chain(Fails.apply(chain(x, 3)), 3)
        delay(off, "back")
        with pytest.raises(ValueError, match="mine"):
            y.sum().backward()
        del y
        filled = [torch.full((1 << 20,), float(i), device="cuda") for i in range(12)]
        torch.cuda.synchronize()
        assert all(bool((f == i).all()) for i, f in enumerate(filled))
        del filled
    assert live_bytes(off) == 0


@cuda
def test_what_stays_is_no_reason_to_wait() -> None:
    """A tensor comes back where the plan has it come back, also where only what never left is read before."""
    x = torch.randn(1 << 22, device="cuda", requires_grad=True)
    off = offload(int(5.5 * x.nbytes), min_bytes=0, keep_last=0, compress=None)
    for _ in range(5):
        with off:
            half = chain(x, 3)
            y = chain(half, 3).sum()
        torch.cuda.synchronize()
        moved = numbers(off)["moved_bytes"]
        (g,) = torch.autograd.grad(y, half)
        returned = numbers(off)["returned_bytes"]
        torch.autograd.grad(half, x, g)
        torch.cuda.synchronize()
        del half, y, g
    # A copy takes longer than all of these operations: none of them can wait for its own.
    n = numbers(off)
    assert 0 < moved < n["saved_bytes"] and n["budget_met"] and 0 < returned <= moved
