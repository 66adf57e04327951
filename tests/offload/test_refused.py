"""weft.offload where memory is refused: host memory for what goes out, device memory for what comes back."""

from __future__ import annotations

import warnings

import pytest
import torch
from weft import _C
from weft.offloading import offload

from tests.offload.engines import chain, cuda, everything, live_bytes, numbers, plain_gradient

refuse = _C._testing.offload_refuse


@pytest.fixture(autouse=True)
def _refuse_nothing_after():
    yield
    refuse()


@pytest.mark.parametrize("refused", [1, 2, 100])
def test_host_memory(engine: tuple[str, str], refused: int) -> None:
    """A tensor without host memory stays, which is said once; the next ones move."""
    device, backend = engine
    x = torch.randn(1000, device=device, requires_grad=True)
    expected = plain_gradient(x)
    off = everything(backend)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for use in range(3):
            refuse(host=refused if use < 2 else 0)
            with off:
                y = chain(x)
            refuse()
            n = numbers(off)
            most = 4000 * min(refused if use < 2 else 0, n["saved_tensors"])
            assert n["kept"]["pool"] <= most and (use == 1 or n["kept"]["pool"] == most)
            assert n["moved_bytes"] == n["saved_bytes"] - n["kept"]["pool"]
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert [w.category for w in told] == [RuntimeWarning] and "host memory" in str(told[0].message)
    assert numbers(off)["kept"]["pool"] == 0 and numbers(off)["live_bytes"] == 0


@cuda
@pytest.mark.parametrize("size", [1 << 10, 1 << 23])
def test_pinning(size: int) -> None:
    """Of small memory and of what is mapped and registered, with a codec that has numbers of its own."""
    x = torch.randn(size, device="cuda", requires_grad=True)
    expected = plain_gradient(x)
    off = everything("copy", compress="zvc")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for refused in (2, 0):
            refuse(host=refused)
            with off:
                y = chain(x)
            refuse()
            n = numbers(off)
            assert 0 < n["moved_bytes"] and n["kept"]["pool"] == refused * x.nbytes
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_device_memory(engine: tuple[str, str]) -> None:
    """A backward that finds no memory raises torch's error; the same graph's next one finds what it needs."""
    device, backend = engine
    x = torch.randn(1000, device=device, requires_grad=True)
    expected = plain_gradient(x)
    off = everything(backend)
    for use in range(4):
        with off:
            y = chain(x).sum()
        refuse(device=1 << 30)
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(y, x, retain_graph=True)
        refuse()
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], expected), use
        # One is refused between others.
        refuse(device=1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
        del y
        assert live_bytes(off) == 0


@cuda
def test_memory_of_the_codec() -> None:
    """Without memory for the codec a tensor goes as it is, and one that is compressed comes back later."""
    x = torch.randn(1 << 16, device="cuda", requires_grad=True)
    expected = plain_gradient(x)
    off = offload(0, min_bytes=0, keep_last=0, compress="zvc")
    for _ in range(3):
        refuse(device=1)
        with off:
            y = chain(x).sum()
        refuse()
        n = numbers(off)
        assert n["moved_bytes"] == n["saved_bytes"] and n["compressed_tensors"] == n["moved_tensors"] - 1
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)


@cuda
def test_memory_of_the_device_itself() -> None:
    """The caching allocator's own limit: a backward has the right gradient or raises torch's error, and the graph's
    next one finds what it needs."""
    x = torch.randn(1 << 22, device="cuda", requires_grad=True)
    expected = plain_gradient(x)
    off = everything("copy")
    total = torch.cuda.get_device_properties(0).total_memory
    for room, enough in ((64, True), (4, None), (0, False)):  # tensors beside what there is
        for _ in range(3):
            with off:
                y = chain(x).sum()
            torch.cuda.synchronize()
            off.report()
            torch.cuda.empty_cache()
            # What others have left free inside of the allocator's segments is room, too.
            free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            certain = None if enough is False and free >= x.nbytes else enough
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room * x.nbytes) / total)
            found = None
            try:
                found = torch.autograd.grad(y, x, retain_graph=True)[0]
            except torch.OutOfMemoryError:
                assert not certain
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            assert certain is not False or found is None
            assert found is None or torch.equal(found, expected)
            del found
            assert torch.equal(torch.autograd.grad(y, x)[0], expected)
            del y
            assert live_bytes(off) == 0
