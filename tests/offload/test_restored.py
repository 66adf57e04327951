"""weft.offload: what a restored tensor is, and what is the same memory."""

from __future__ import annotations

import pytest
import torch
from weft.offloading import offload

from tests.offload.engines import Probe, everything, numbers, saved_and_restored


def test_restored_tensors(engine: tuple[str, str]) -> None:
    device, backend = engine
    base = torch.randn(64, 96, device=device)
    bits = (
        torch.tensor([0x80000000, 0x7FC00001, 0xFFC12345, 0, 1], dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    bits = bits.to(device).repeat(300)
    tensors = [
        base.clone(),
        base.clone().t(),
        base.clone()[3:, 5::3],
        base[:1].clone().expand(50, 96),
        torch.as_strided(base.clone(), (10, 20), (3, 7), 11),
        base.clone().flatten()[1:],
        bits,
        torch.randn(31, 33, device=device, dtype=torch.complex64).conj(),
        torch.randn(31, 33, device=device, dtype=torch.complex64).conj().imag,
        torch.randint(0, 9, (77,), device=device, dtype=torch.uint8)[3:],
        torch.rand(3, 50, device=device) > 0.5,
        torch.randn(2, 3, 8, 9, device=device).to(memory_format=torch.channels_last),
        torch.tensor(4.5, device=device),
        torch.empty(0, 3, device=device),
    ]
    for compress in (None, "auto", "zvc"):
        off = everything(backend, compress=compress)
        for _ in range(2):
            for came, went in zip(saved_and_restored(off, *tensors), tensors, strict=True):
                assert came.dtype == went.dtype and came.device == went.device and came.shape == went.shape
                assert (
                    came.stride() == went.stride()
                    and came.is_conj() == went.is_conj()
                    and came.is_neg() == went.is_neg()
                )
                assert (came.data_ptr() - went.data_ptr()) % 256 == 0
                if went.numel():
                    assert came.data_ptr() != went.data_ptr()
                whole = came.resolve_conj().resolve_neg().contiguous(), went.resolve_conj().resolve_neg().contiguous()
                assert torch.equal(*(w.view(torch.uint8) if w.dim() else w for w in whole))
        n = numbers(off)
        assert n["kept_bytes"] == 0 and n["saved_tensors"] == len(tensors) - 1


def test_shared_memory_moves_once() -> None:
    off = everything()
    x = torch.randn(64, 64)
    came = saved_and_restored(off, x, x.t(), x.view(-1), x[:10], x[20:], x.detach())
    n = numbers(off)
    assert n["moved_bytes"] == n["saved_bytes"] == n["sent_bytes"] == n["returned_bytes"] == x.nbytes
    assert len({t.untyped_storage().data_ptr() for t in came}) == 1
    # A part first, then what connects it with another part, then all of it.
    x = torch.randn(64, 64)
    parts = x[:20], x[40:], x[30:50], x[10:35], x
    for came, went in zip(saved_and_restored(off, *parts), parts, strict=True):
        assert torch.equal(came, went) and came.stride() == went.stride()
    n = numbers(off)
    assert n["moved_bytes"] == n["saved_bytes"] == n["sent_bytes"] == n["returned_bytes"] == x.nbytes
    # Parts that do not touch are brought back apart.
    x = torch.randn(1000, 10)
    saved_and_restored(off, x[0], x[999])
    assert numbers(off)["returned_bytes"] == numbers(off)["saved_bytes"] == 80


def test_parts_of_a_chunk_come_back_as_one() -> None:
    off = everything()
    x = torch.randn(32, 96)
    parts = x.chunk(3, dim=1)
    came = saved_and_restored(off, *parts)
    assert numbers(off)["returned_bytes"] == numbers(off)["saved_bytes"] == x.nbytes
    for a, b in zip(came, parts, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("budget", [0, "1KB", "100KB"])
def test_siblings_of_unsafe_chunk_are_moved_apart(budget: int | str) -> None:
    """They share storage and version number, not the counter: found by number alone, one is restored as the other."""
    off = offload(budget, backend="reference", min_bytes=0, keep_last=0, compress=None)
    x = torch.randn(16, 64)
    parts = torch.unsafe_chunk(x, 4, 1)
    expected = [p.clone() for p in parts]
    for came, went in zip(saved_and_restored(off, *parts), expected, strict=True):
        assert torch.equal(came, went)
    assert numbers(off)["saved_bytes"] == x.nbytes
    # One sibling changes after the other was saved: no error, and not the other's numbers.
    seen: list = []
    with off:
        loss = Probe.apply(seen, parts[0], torch.zeros((), requires_grad=True))
    parts[1].mul_(2)
    loss.backward()
    assert torch.equal(seen[0][0], expected[0])


def test_memory_that_grows_while_a_part_of_it_is_restored(engine: tuple[str, str]) -> None:
    """What joins a tensor that has moved was not brought back with it, and need not be waited for."""
    device, backend = engine
    held = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            held.append(ctx.saved_tensors[0])
            return grad * held[-1]

    x = torch.randn(1000, device=device, requires_grad=True)
    off = everything(backend)
    with off:
        y = x * 2
        first = Keeps.apply(y[:500])
        if device == "cuda":
            torch.cuda.synchronize()
        part = torch.autograd.grad(first.sum(), y, retain_graph=True)[0]
        second = Keeps.apply(y)
    again = torch.autograd.grad(first.sum() + second.sum(), y)[0]
    want = y.detach() + torch.cat([y.detach()[:500], torch.zeros(500, device=device)])
    assert torch.equal(part[:500], y.detach()[:500]) and torch.equal(again, want)
    assert len(held) == 3
