"""weft.offload: when memory goes, after exceptions, too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from weft.offloading import offload

from tests.offload.engines import (
    Fails,
    Probe,
    chain,
    cuda,
    everything,
    live_bytes,
    numbers,
    plain_gradient,
    saved_and_restored,
    settled,
)


@pytest.mark.parametrize("budget", [0, 5000, None])
def test_storage_resized_after_a_save(budget: int | None) -> None:
    """As FSDP2 frees what it gathered, and gathers it again for the backward: no version counts it."""
    off = offload(budget, backend="reference", min_bytes=0, keep_last=0, compress=None)
    for refill in (True, True, False, True):
        x, *others = (torch.randn(1000) for _ in range(4))
        anchor = torch.zeros((), requires_grad=True)
        seen: list = []
        with off:
            loss = Probe.apply(seen, x, anchor)
            x.untyped_storage().resize_(0)
            for other in others:
                loss = loss + Probe.apply(seen, other, anchor)
        if refill:
            x.untyped_storage().resize_(1 << 20)  # not where it was
            with torch.autograd._unsafe_preserve_version_counter(x):
                x.fill_(7)
            loss.backward()
            assert all(torch.equal(saved[0], t) for saved, t in zip(seen, [*reversed(others), x], strict=True))
        del loss, seen
        gc.collect()
        assert numbers(off)["live_bytes"] == 0


@pytest.mark.parametrize("budget", [0, 5000, None])
def test_storage_resized_between_two_saves(budget: int | None) -> None:
    """It is other memory that the second one saves, though no version tells them apart."""
    off = offload(budget, backend="reference", min_bytes=0, keep_last=0, compress=None)
    x, anchor, seen = torch.zeros(1000), torch.zeros((), requires_grad=True), []
    with off:
        loss = Probe.apply(seen, x, anchor)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(1 << 20)  # not where it was
        with torch.autograd._unsafe_preserve_version_counter(x):
            x.fill_(7)
        for _ in range(2):  # the same memory
            loss = loss + Probe.apply(seen, x, anchor)
        del x
    assert numbers(off)["saved_bytes"] == 2 * 4000
    loss.backward()
    assert all(torch.equal(saved[0], torch.full((1000,), 7.0)) for saved in seen[:2])
    del loss, seen
    gc.collect()
    assert numbers(off)["live_bytes"] == 0


def test_close() -> None:
    off = everything()
    x = torch.randn(50, requires_grad=True)
    with off:
        y = x.exp()
    off.close()
    off.close()
    with pytest.raises(RuntimeError, match="closed"), off:
        pass
    assert numbers(off)["live_bytes"] == 200 and numbers(off)["host_bytes"] == 200
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())
    assert numbers(off)["live_bytes"] == 0 and numbers(off)["host_bytes"] == 0


def test_collected_object() -> None:
    off = everything()
    x = torch.randn(50, requires_grad=True)
    with off:
        y = x.exp()
    watch = weakref.ref(off)
    del off
    gc.collect()
    assert watch() is None
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_no_leak_without_backward(engine: tuple[str, str]) -> None:
    device, backend = engine
    off = everything(backend)
    x = torch.randn(1000, device=device, requires_grad=True)
    for _ in range(3):
        with off:
            y = x.exp().sin()
        assert numbers(off)["live_bytes"] == 4000
        del y
        assert numbers(off)["live_bytes"] == 0
        assert off.timeline is not None
    if device == "cuda":
        torch.cuda.synchronize()
        off.report()
    assert off.release() == 4000 and numbers(off)["host_peak_bytes"] == 4000


def test_no_cycle_through_outputs() -> None:
    """A graph that owned the outputs it saved would own itself, and never go."""
    gc.disable()
    try:
        for off in (everything(), offload(None, backend="reference")):
            x = torch.randn(10, requires_grad=True)
            with off:
                y = x.exp()
            assert numbers(off)["live_bytes"] == 40
            del y
            assert numbers(off)["live_bytes"] == 0
    finally:
        gc.enable()


def test_memory_of_a_moved_tensor_is_free() -> None:
    off = everything()
    x = torch.randn(1000, requires_grad=True)
    with off:
        y = x.exp()
        storage = y.untyped_storage()._weak_ref()
        z = y.sum()
        del y
        assert torch.UntypedStorage._new_with_weak_ptr(storage) is None
    z.backward()
    torch.UntypedStorage._free_weak_ref(storage)


def test_exception_in_forward(engine: tuple[str, str]) -> None:
    device, backend = engine
    off = everything(backend)
    x = torch.randn(100, device=device, requires_grad=True)
    with pytest.raises(KeyError, match="mine"), off:
        y = x.exp()
        raise KeyError("mine")
    del y
    gc.collect()
    assert numbers(off)["live_bytes"] == 0
    with off:
        y = x.exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_exception_in_backward(engine: tuple[str, str]) -> None:
    device, backend = engine

    off = everything(backend)
    for _ in range(3):
        x = torch.randn(100, device=device, requires_grad=True)
        with off:
            y = Fails.apply(x.exp().sin()).cos()
        with pytest.raises(ValueError, match="mine"):
            y.sum().backward()
        del y
        gc.collect()
        assert live_bytes(off) == 0
        with off:
            y = x.exp().sin().cos()
        y.sum().backward()
        e = x.detach().requires_grad_()
        e.exp().sin().cos().sum().backward()
        assert torch.equal(x.grad, e.grad)


def test_nothing_of_a_use_is_found_by_the_next(engine: tuple[str, str]) -> None:
    """The same tensor, storage and version, with other numbers in it that no counter saw."""
    device, backend = engine
    off = everything(backend)
    x = torch.ones(100, device=device)
    for i in range(3):
        x.data.fill_(float(i))
        (came,) = saved_and_restored(off, x)
        assert torch.equal(came, torch.full_like(x, float(i)))


@cuda
def test_device_memory_is_freed() -> None:
    torch.cuda.synchronize()
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    expected = plain_gradient(x, 8)
    before = torch.cuda.memory_allocated()
    off = everything("copy")
    for _ in range(3):
        with off:
            y = chain(x, 8).sum()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < x.nbytes
        (g,) = torch.autograd.grad(y, x)
        assert torch.equal(g, expected)
        del y, g
        torch.cuda.synchronize()
        off.report()
        assert settled(torch.cuda.memory_allocated, before) == before
