"""The codecs against what the contract says of them, in plain torch on bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tests.common import DEVICES, poisoned

ops = torch.ops.weft
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INTEGERS = {4: torch.int32, 2: torch.int16}
# Around a mask word, a vector, a warp, the tiles of the CUDA kernels (8192 and 16384 elements) and the CPU's chunks.
SIZES = [0, 1, 31, 32, 33, 64, 127, 1000, 8191, 8192, 8193, 16384, 16385, 40_000, 131_072, 262_145]

device = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
codecs = pytest.mark.parametrize("codec", ["zvc", "rle"])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(INTEGERS[x.element_size()])


def sample(n: int, density: float, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Random bits, infinities, NaN of any payload and denormal numbers among them, and zeros; the last of them -0.0."""
    generator = torch.Generator().manual_seed(seed)
    limit = torch.iinfo(INTEGERS[dtype.itemsize])
    words = torch.randint(limit.min, limit.max, (n,), generator=generator).to(INTEGERS[dtype.itemsize])
    words[torch.rand(n, generator=generator) >= density] = 0
    if n:
        words[-1] = limit.min  # the bits of -0.0
    return words.view(dtype).to(device)


def zvc_reference(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """mask, the values used, size."""
    flat = bits(x).flatten()
    set_bits = flat != 0
    padded = torch.zeros(-(-flat.numel() // 32) * 32, dtype=torch.int64, device=x.device)
    padded[: flat.numel()] = set_bits
    words = (padded.view(-1, 32) << torch.arange(32, device=x.device)).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words, flat[set_bits].view(x.dtype), int(set_bits.sum())


def rle_reference(x: Tensor) -> tuple[list[int], Tensor]:
    """The runs used and the values used."""
    flat = bits(x).flatten()
    runs = [0]
    for value, group in itertools.groupby((flat != 0).tolist()):
        length = len(list(group))
        if value and len(runs) == 1 and runs[0] == 0:
            runs.append(length)
        elif not value and len(runs) == 1 and runs[0] == 0:
            runs = [length]
        else:
            runs.append(length)
    return (runs if flat.numel() else []), flat[flat != 0].view(x.dtype)


def check_zvc(x: Tensor) -> None:
    mask, values, size = ops.zvc_compress(x)
    n = x.numel()
    assert (mask.dtype, tuple(mask.shape)) == (torch.int32, (-(-n // 32),))
    assert (values.dtype, tuple(values.shape)) == (x.dtype, (n,))
    assert (size.dtype, tuple(size.shape)) == (torch.int64, ())
    assert mask.device == values.device == size.device == x.device
    words, used, count = zvc_reference(x)
    assert size.item() == count
    assert torch.equal(mask, words)
    assert torch.equal(bits(values[:count]), bits(used))
    for packed in (values, values[:count], torch.cat([values[:count], values[:1]])):
        out = ops.zvc_decompress(mask, packed, x.shape)
        assert out.is_contiguous() and out.dtype == x.dtype and out.shape == x.shape and out.device == x.device
        assert torch.equal(bits(out), bits(x))


def check_rle(x: Tensor) -> None:
    runs, values, size = ops.rle_compress(x)
    n = x.numel()
    assert (runs.dtype, tuple(runs.shape)) == (torch.int32, (n + 1,))
    assert (values.dtype, tuple(values.shape)) == (x.dtype, (n,))
    assert (size.dtype, tuple(size.shape)) == (torch.int64, (2,))
    assert runs.device == values.device == size.device == x.device
    lengths, used = rle_reference(x)
    assert size.tolist() == [len(lengths), used.numel()]
    assert runs[: len(lengths)].tolist() == lengths and not runs[len(lengths) :].any()
    assert torch.equal(bits(values[: used.numel()]), bits(used))
    for some, packed in ((runs, values), (runs[: len(lengths)], values[: used.numel()])):
        out = ops.rle_decompress(some, packed, x.shape)
        assert out.is_contiguous() and out.dtype == x.dtype and out.shape == x.shape and out.device == x.device
        assert torch.equal(bits(out), bits(x))


CHECKS = {"zvc": check_zvc, "rle": check_rle}


@device
@dtypes
@codecs
@pytest.mark.parametrize("n", SIZES)
def test_agrees_with_reference(codec: str, n: int, dtype: torch.dtype, device: str) -> None:
    for density in (0.0, 0.1, 0.5, 0.95, 1.0):
        with poisoned():
            CHECKS[codec](sample(n, density, dtype, device))


@device
@codecs
@given(data=st.data())
def test_any_shape_and_stride(codec: str, device: str, data) -> None:
    shape = data.draw(st.lists(st.integers(0, 12), max_size=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    density = data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    offset = data.draw(st.integers(0, 9))
    x = sample(offset + math.prod(shape), density, dtype, device, data.draw(st.integers(0, 99)))[offset:].view(shape)
    if shape:
        x = x.permute(data.draw(st.permutations(range(len(shape)))))
        x = x[tuple(slice(None, None, data.draw(st.integers(1, 3))) for _ in shape)]
        if data.draw(st.booleans()):
            x = x.unsqueeze(0).expand(3, *x.shape)
    CHECKS[codec](x)


@device
@codecs
def test_zeros_and_what_looks_like_them(codec: str, device: str) -> None:
    smallest = torch.tensor([1], dtype=torch.int32).view(torch.float32).item()
    x = torch.tensor([0.0, -0.0, math.nan, math.inf, smallest, 0.0, -smallest, 0.0], device=device)
    CHECKS[codec](x)
    for dtype in DTYPES:
        CHECKS[codec](torch.full((100,), -0.0, dtype=dtype, device=device))
        out = ops.zvc_decompress(*ops.zvc_compress(torch.zeros(70, dtype=dtype, device=device))[:2], (70,))
        assert not bits(out).any(), "zeros are +0.0"


@device
@codecs
@pytest.mark.parametrize("pattern", [[1] * 64, [0] * 64, [0, 1] * 32, [1, 0] * 32, [0] * 31 + [1] * 33, [1] * 32 + [0]])
def test_edges_of_words(codec: str, pattern: list[int], device: str) -> None:
    for shift in (0, 1, 31):
        CHECKS[codec](torch.tensor(pattern[shift:], dtype=torch.float32, device=device))


@device
@codecs
@dtypes
def test_two_runs_are_equal(codec: str, dtype: torch.dtype, device: str) -> None:
    x = sample(300_000, 0.4, dtype, device)
    compress, decompress = getattr(ops, f"{codec}_compress"), getattr(ops, f"{codec}_decompress")
    words, values, size = compress(x)
    again = compress(x)
    used = int(size if codec == "zvc" else size[1])
    assert torch.equal(words, again[0]) and torch.equal(size, again[2])
    assert torch.equal(bits(values[:used]), bits(again[1][:used]))
    out = decompress(words, values, x.shape)
    assert torch.equal(bits(out), bits(decompress(words, values, x.shape)))


@device
@codecs
@dtypes
def test_opcheck(codec: str, dtype: torch.dtype, device: str) -> None:
    compress, decompress = getattr(ops, f"{codec}_compress"), getattr(ops, f"{codec}_decompress")
    for shape in ((0,), (), (3, 5), (2, 40)):
        x = torch.rand(shape, device=device).add(1).to(dtype)  # all of values is specified
        opcheck(compress, (x,))
        words, values, _ = compress(x)
        opcheck(decompress, (words, values, shape))


@device
@codecs
def test_compiles_whole(codec: str, device: str) -> None:
    compress, decompress = getattr(ops, f"{codec}_compress"), getattr(ops, f"{codec}_decompress")

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def there_and_back(x: Tensor) -> Tensor:
        words, values, _ = compress(x.relu())
        return decompress(words, values, x.shape)

    for shape in ((4, 30), (7, 11)):
        x = torch.randn(shape, device=device)
        assert torch.equal(there_and_back(x), x.relu())


@device
@codecs
def test_autocast_leaves_the_dtype(codec: str, device: str) -> None:
    compress, decompress = getattr(ops, f"{codec}_compress"), getattr(ops, f"{codec}_decompress")
    with torch.autocast(device, torch.bfloat16):
        words, values, _ = compress(torch.randn(50, device=device))
        assert values.dtype == decompress(words, values, (50,)).dtype == torch.float32


@device
@codecs
def test_gradients_are_refused(codec: str, device: str) -> None:
    compress, decompress = getattr(ops, f"{codec}_compress"), getattr(ops, f"{codec}_decompress")
    x = torch.randn(40, device=device, requires_grad=True)
    words, values, size = compress(x)
    assert not words.requires_grad and not size.requires_grad
    with pytest.raises(RuntimeError, match=f"{codec}_compress: not differentiable"):
        values.sum().backward()
    values = values.detach().requires_grad_()
    with pytest.raises(RuntimeError, match=f"{codec}_decompress: not differentiable"):
        decompress(words, values, (40,)).sum().backward()
    with torch.no_grad():
        assert not compress(x)[1].requires_grad


@device
@codecs
def test_bad_dtypes(codec: str, device: str) -> None:
    compress, decompress = getattr(ops, f"{codec}_compress"), getattr(ops, f"{codec}_decompress")
    for dtype in (torch.float64, torch.int32, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=f"{codec}_compress: x must be"):
            compress(torch.zeros(3, dtype=dtype, device=device))
        with pytest.raises(TypeError, match=f"{codec}_decompress: values must be"):
            decompress(
                torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(3, dtype=dtype, device=device), (3,)
            )
    for dtype in (torch.int64, torch.float32):
        with pytest.raises(TypeError, match="must be int32"):
            decompress(torch.zeros(1, dtype=dtype, device=device), torch.zeros(3, device=device), (3,))


@device
def test_bad_masks(device: str) -> None:
    words = torch.zeros(2, dtype=torch.int32, device=device)
    values = torch.zeros(64, device=device)
    for shape in ((32,), (65,), (), (0,), (2**40, 2**40)):
        with pytest.raises(ValueError, match="zvc_decompress"):
            ops.zvc_decompress(words, values, shape)
    with pytest.raises(ValueError, match="one dimension"):
        ops.zvc_decompress(words.view(2, 1), values, (64,))
    with pytest.raises(ValueError, match="one dimension"):
        ops.zvc_decompress(words, values.view(8, 8), (64,))
    with pytest.raises(ValueError, match="one dimension"):
        ops.rle_decompress(words[0], values, (64,))
    for op in (ops.zvc_decompress, ops.rle_decompress):
        with pytest.raises(ValueError, match="negative sizes"):
            op(words, values, (-1, 64))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (words, values)]
        with pytest.raises(ValueError, match="must have ceil"):
            ops.zvc_decompress(*fake, (65,))


def test_values_too_short() -> None:
    x = sample(1000, 0.5, torch.float32, "cpu")
    mask, values, size = ops.zvc_compress(x)
    with pytest.raises(ValueError, match=f"{size.item()} bits set, values only {size.item() - 1}"):
        ops.zvc_decompress(mask, values[: size - 1], (1000,))
    runs, values, size = ops.rle_compress(x)
    with pytest.raises(ValueError, match="values only"):
        ops.rle_decompress(runs, values[: size[1] - 1], (1000,))
    for shape in ((999,), (1001,)):
        with pytest.raises(ValueError, match="must make up"):
            ops.rle_decompress(runs, values, shape)
    with pytest.raises(ValueError, match="negative"):
        ops.rle_decompress(torch.tensor([3, -1, 2], dtype=torch.int32), values, (4,))


@pytest.mark.cuda
@codecs
def test_devices_differ(codec: str) -> None:
    words, values, _ = getattr(ops, f"{codec}_compress")(torch.ones(40))
    for pair in ((words.cuda(), values), (words, values.cuda())):
        with pytest.raises(RuntimeError, match="device"):
            getattr(ops, f"{codec}_decompress")(*pair, (40,))


@pytest.mark.cuda
@dtypes
@codecs
def test_too_short_on_cuda(codec: str, dtype: torch.dtype) -> None:
    """What is missing is unspecified, the rest is right; compute-sanitizer sees that nothing outside is read."""
    x = sample(50_000, 0.5, dtype, "cuda")
    words, values, size = getattr(ops, f"{codec}_compress")(x)
    used = int(size if codec == "zvc" else size[1])
    for short in (0, 1, used // 2, used - 1):
        out = getattr(ops, f"{codec}_decompress")(words, values[:short].clone(), x.shape)
        known = (bits(x) != 0).cumsum(0) <= short
        assert torch.equal(bits(out)[known], bits(x)[known])


@pytest.mark.cuda
@codecs
@dtypes
def test_does_not_wait_for_the_device(codec: str, dtype: torch.dtype) -> None:
    x = sample(100_000, 0.3, dtype, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        words, values, _ = getattr(ops, f"{codec}_compress")(x)
        out = getattr(ops, f"{codec}_decompress")(words, values, x.shape)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(bits(out), bits(x))


@pytest.mark.cuda
@codecs
def test_graph_and_side_stream(codec: str) -> None:
    compress, decompress = getattr(ops, f"{codec}_compress"), getattr(ops, f"{codec}_decompress")
    x = sample(200_000, 0.3, torch.float32, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        words, values, _ = compress(x)
        out = decompress(words, values, x.shape)
    for seed in (1, 2):
        x.copy_(sample(200_000, 0.3 * seed, torch.float32, "cpu", seed))
        graph.replay()
        assert torch.equal(bits(out), bits(x))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        CHECKS[codec](x)
    side.synchronize()


@pytest.mark.cuda
@dtypes
def test_large_on_cuda(dtype: torch.dtype) -> None:
    """Many tiles, whose places follow from each other; several runs, because they race."""
    x = torch.randn(1 << 26, device="cuda", dtype=dtype).relu_()
    for _ in range(5):
        mask, values, size = ops.zvc_compress(x)
        assert size.item() == int((bits(x) != 0).sum())
        assert torch.equal(bits(values[: size.item()]), bits(x)[bits(x) != 0])
        assert torch.equal(bits(ops.zvc_decompress(mask, values, x.shape)), bits(x))


@pytest.mark.cuda
def test_beyond_2_to_the_31_on_cuda() -> None:
    n = 2**31 + 2**30 + 77
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[5], x[-3:] = 2.0, torch.tensor([1.0, 0.0, -0.0])
    mask, values, size = ops.zvc_compress(x)
    assert size.item() == 3 and values[:3].tolist() == [2.0, 1.0, -0.0]
    assert torch.equal(ops.zvc_decompress(mask, values, x.shape), x)
    del mask
    runs, values, size = ops.rle_compress(x)
    most = 2**31 - 1
    assert size.tolist() == [8, 3]
    assert runs[:9].tolist() == [5, 1, most, 0, n - 3 - 6 - most, 1, 1, 1, 0]
    assert torch.equal(ops.rle_decompress(runs[:8], values[:3], x.shape), x)
    x.fill_(1.0)
    mask, values, size = ops.zvc_compress(x)
    assert size.item() == n and torch.equal(values, x)
    assert torch.equal(ops.zvc_decompress(mask, values, x.shape), x)
