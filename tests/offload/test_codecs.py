"""weft.offload with its codecs: the same bits, whatever was counted before."""

from __future__ import annotations

import random

import pytest
import torch
import weft
from torch import nn
from weft.offloading import offload

from tests.offload.engines import (
    LONG,
    STREAMS,
    chain,
    check_same,
    cuda,
    delay,
    everything,
    numbers,
    plain_gradient,
    planned_in_part,
    step,
)


@pytest.mark.parametrize("compress", ["auto", "zvc", "rle", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_compressed(engine: tuple[str, str], compress: str | None, dtype: torch.dtype, deterministic) -> None:
    device, backend = engine
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).to(
        device, dtype
    )
    x = torch.randn(40, 32, device=device, dtype=dtype)
    expected = step(model, x)
    off = everything(backend, compress=compress)
    for _ in range(3):
        check_same(step(model, x, lambda: off), expected)
    n = numbers(off)
    if compress in ("zvc", "rle") and dtype != torch.float64:
        assert n["compressed_tensors"] == n["moved_tensors"]
    if compress is None or dtype == torch.float64:
        assert n["compressed_tensors"] == 0 and n["sent_bytes"] == n["moved_bytes"]
    if compress == "auto" and dtype == torch.float32:
        assert n["compressed_tensors"] > 0 and n["sent_bytes"] < n["moved_bytes"]


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_values_than_expected(dtype: torch.dtype) -> None:
    """A tensor comes back whole also where it has more non-zeros than the plan knows of."""
    off = everything("copy", compress="auto")
    w = torch.ones((1 << 20) + 5, device="cuda", dtype=dtype, requires_grad=True)
    moved = 0
    for density in (0.1, 0.1, 0.1, 0.1, 0.9, 0.0, 1.0, 0.1, 0.11, 0.13):
        x = torch.randn_like(w) * (torch.rand_like(w) < density)
        with off:
            y = (w * (x * 1)).sum()
        assert torch.equal(torch.autograd.grad(y, w)[0], x)
        torch.cuda.synchronize()
        moved += numbers(off)["compressed_tensors"]
    assert moved > 3


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tensors_of_many_segments(dtype: torch.dtype) -> None:
    """What the codec takes in parts comes back whole: parts of their own density, delays on every stream."""
    weft._C._testing.offload_stages(segment=1 << 16)
    try:
        off = everything("copy", compress="auto")
        w = torch.ones(300_001, device="cuda", dtype=dtype, requires_grad=True)
        compressed = 0
        for use in range(12):
            density = torch.rand(w.numel() // 1000 + 1, device="cuda").repeat_interleave(1000)[: w.numel()]
            xs = [torch.randn_like(w) * (torch.rand_like(w) < density * (i + 1) / 4) for i in range(4)]
            delay(off, STREAMS[use % 4], LONG // 10)
            with off:
                y = sum((w * (x * 1)).sum() for x in xs)
            expected = torch.autograd.grad(sum((w * (x * 1)).sum() for x in xs), w)[0]
            assert torch.equal(torch.autograd.grad(y, w)[0], expected)
            torch.cuda.synchronize()
            compressed += numbers(off)["compressed_tensors"]
        assert compressed > 10
    finally:
        weft._C._testing.offload_stages()


@cuda
@pytest.mark.parametrize("share", [1e-6, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize(("dtype", "n"), [(torch.float32, 300_001), (torch.bfloat16, 33), (torch.bfloat16, 1 << 20)])
def test_a_share_of_a_tensor(share: float, dtype: torch.dtype, n: int) -> None:
    """What is compressed, with any expectation, and what is not: the same bits, delays on every stream."""
    weft._C._testing.offload_stages(segment=1 << 16)
    try:
        off = offload()
        for number, (density, expected) in enumerate([(0.5, 0.5), (0.5, 0.0), (0.9, 0.3), (0.1, 0.9), (1.0, 1.0)]):
            x = torch.randn(n, device="cuda", dtype=dtype) * (torch.rand(n, device="cuda") < density)
            delay(off, STREAMS[number % 4], LONG // 10)
            round_trip = weft._C._testing.OffloadRoundTrip(off._engine, x, True, expected, share)
            delay(off, STREAMS[(number + 2) % 4], LONG // 10)
            back = torch.full_like(x, 7)
            round_trip.bring_back(off._engine, back)
            torch.cuda.synchronize()
            assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))
            coded = n if share == 1 else 32 * int(share * n / 32)
            least = int(x[:coded].count_nonzero()) + n - coded
            assert round_trip.sent_bytes >= least * x.element_size() + coded // 8
    finally:
        weft._C._testing.offload_stages()


@cuda
@pytest.mark.parametrize("segment", [0, 1 << 16])
def test_compressed_in_part_without_a_budget(segment: int, deterministic) -> None:
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(256, 256), nn.ReLU()))).cuda()
    weft._C._testing.offload_stages(segment=segment)
    off = offload(min_bytes=0)
    weft._C._testing.offload_stages()
    with planned_in_part(random.Random(segment)):
        for use in range(8):
            x = torch.randn(600, 256, device="cuda")
            expected = step(model, x)
            if use > 2:
                delay(off, STREAMS[use % 4], LONG // 10)
            check_same(step(model, x, lambda: off), expected)
            torch.cuda.synchronize()
            assert (numbers(off)["compressed_tensors"] > 0) == (use > 1)
    assert numbers(off)["sent_bytes"] < numbers(off)["moved_bytes"] and numbers(off)["live_bytes"] == 0


@cuda
@pytest.mark.parametrize("compress", [None, "zvc", "auto"])
def test_large_host_buffers(compress: str | None) -> None:
    """These are not cudaHostAlloc's: mapped, touched by several threads, registered."""
    off = everything("copy", compress=compress)
    x = torch.randn((1 << 23) + 3, device="cuda", requires_grad=True)
    expected = plain_gradient(x)
    for _ in range(3):
        with off:
            y = chain(x).sum()
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
        del y
    torch.cuda.synchronize()
    held = numbers(off)["host_bytes"]
    assert held >= 32 << 20 and numbers(off)["host_peak_bytes"] == held
    assert off.release() == held and numbers(off)["host_bytes"] == 0


def test_a_round_trip_of_one_tensor() -> None:
    x = torch.randn(1000).relu()
    for backend, compressed in (("reference", True), ("reference", False)):
        engine = offload(0, backend=backend, compress="zvc")._engine
        round_trip = weft._C._testing.OffloadRoundTrip(engine, x, compressed, 0.5)
        back = torch.full_like(x, float("nan"))
        round_trip.bring_back(engine, back)
        assert torch.equal(back, x) and (round_trip.sent_bytes < x.nbytes) == compressed
        for wrong in (x[1:], x.double()):
            with pytest.raises(ValueError, match="as large as what went out"):
                round_trip.bring_back(engine, wrong)
    for wrong in (x.expand(2, 1000), x[::2], x[:0]):
        with pytest.raises(ValueError, match="x must be contiguous"):
            weft._C._testing.OffloadRoundTrip(engine, wrong, True, 0.5)
    engine = offload(0, backend="copy")._engine
    with pytest.raises(ValueError, match="a device whose tensors move"):
        weft._C._testing.OffloadRoundTrip(engine, x, True, 0.5)
