"""weft::rnn with backward="scan": sequences long enough for many chunks, weights that make chunks be computed again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import _VF, Tensor

from tests.common import DEVICES, check_close, covering, differentiate, pairs, poisoned, relative_error, with_devices
from tests.rnn import test_rnn
from tests.rnn.samples import CELLS, Arguments, Sample, arguments, by_scan, packed
from tests.rnn.sequential import check_chain, doubles
from tests.rnn.test_rnn import BOUNDS, HALF_TYPES, RESULTS, gradients, names

rnn = torch.ops.weft.rnn
rnn_backward = torch.ops.weft.rnn_backward

# Many chunks on CUDA, a number of steps that divides by the chunks' length and one that does not; every hidden size up
# to which a kernel is padded, and odd ones in between.
LONG = by_scan(
    Sample(cell, T, 1 + index % 3, 2, H, bidirectional=both, bias=index % 4 != 0)
    for index, (H, T, cell, both) in enumerate(
        covering((8, 16, 20, 24, 32, 5, 13, 31), (1000, 3001), CELLS, (False, True))
    )
)
LONG += by_scan(Sample(cell, 1000, 3, 2, 20, dtype=dtype) for cell in CELLS for dtype in HALF_TYPES)
LONG_ON_CPU = by_scan(Sample(cell, 1000, 2, 2, 13, bidirectional=True) for cell in CELLS)
# Where a block holds a chunk: every size that is padded to and odd ones in between.
BLOCK_SIZES = {cell: (33, 48, 64) if cell == "lstm" else (33, 48, 64, 65, 96, 100, 128) for cell in CELLS}
BLOCK_CASES = [(cell, H) for cell, sizes in BLOCK_SIZES.items() for H in sizes]
NO_GEOMETRY = "tier=small group=2"


@pytest.fixture(autouse=True)
def _exact_fp32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def force_chunks(monkeypatch, chunks: int) -> None:
    """The number of chunks of the CUDA kernels, whatever their model of costs says."""
    monkeypatch.setenv("WEFT_RNN_SCAN_CHUNKS", str(chunks))


KERNELS = {"rnn_tanh": _VF.rnn_tanh, "rnn_relu": _VF.rnn_relu, "gru": _VF.gru, "lstm": _VF.lstm}


def torchs(sample: Sample, args: Arguments) -> Sequence[Tensor]:
    """output, h_n[, c_n] of torch's own kernel, which takes far less time than the reference on long sequences."""
    state = (args.h0, args.c0) if sample.cell == "lstm" else args.h0
    kernel = KERNELS[sample.cell]
    return kernel(args.input, state, args.weights, sample.bias, 1, 0.0, True, sample.bidirectional, False)


@pytest.mark.parametrize(("sample", "device"), with_devices(LONG_ON_CPU, LONG), ids=str)
def test_long_sequences(sample: Sample, device: str):
    args, which = arguments(sample, device, requires_grad=True), sample.differentiable
    exact, grads = args.map(lambda t: t.detach().double().requires_grad_()), gradients(sample, args)
    expected = torchs(sample, exact)
    with poisoned():
        found = rnn(*args, **sample.keywords)
        found_grads = differentiate([found[i] for i in which], args.operands, grads)
    check_close(RESULTS, [found[i] for i in which], expected, BOUNDS[sample.dtype])
    expected_grads = differentiate(expected, exact.operands, [g.double() for g in grads])
    check_close(names(args), found_grads, expected_grads, BOUNDS[sample.dtype])


# One chunk; chunks that divide the steps and that do not; more products than half of the device's SMs, below which each
# is split over two blocks; and as many chunks as the model of costs says.
@pytest.mark.cuda
@pytest.mark.parametrize(("T", "B", "chunks"), [(50, 2, 1), (50, 1, 5), (203, 3, 4), (400, 5, 40), (1001, 1, 0)])
@pytest.mark.parametrize(("cell", "H"), BLOCK_CASES)
def test_sizes_of_blocks(cell: str, H: int, T: int, B: int, chunks: int, monkeypatch):
    if chunks:
        force_chunks(monkeypatch, chunks)
    for both in (False, True):
        test_long_sequences(*by_scan([Sample(cell, T, B, 3, H, bidirectional=both, bias=B % 2 == 0)]), "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("cell", CELLS)
def test_sizes_of_blocks_in_half(cell: str, dtype: torch.dtype, monkeypatch):
    force_chunks(monkeypatch, 7)
    for H in BLOCK_SIZES[cell][::2]:
        test_long_sequences(*by_scan([Sample(cell, 200, 3, 2, H, bidirectional=H == 48, dtype=dtype)]), "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("cell", CELLS)
def test_sizes_of_blocks_on_very_long_sequences(cell: str):
    test_long_sequences(*by_scan([Sample(cell, 5000, 2, 2, BLOCK_SIZES[cell][-1])]), "cuda")


@pytest.mark.cuda
def test_an_lstm_without_cudnn(monkeypatch):
    """Whose forward pass is then the persistent kernel."""
    force_chunks(monkeypatch, 7)
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=False):
        test_long_sequences(*by_scan([Sample("lstm", 200, 3, 5, 64)]), "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("both", (False, True))
@pytest.mark.parametrize(("cell", "H"), BLOCK_CASES)
def test_forward_by_torch(cell: str, H: int, both: bool, monkeypatch):
    """Where the persistent kernel cannot run, torch's does, and the gates are recovered from its output."""
    monkeypatch.setenv("WEFT_RNN_GEOMETRY", NO_GEOMETRY)
    force_chunks(monkeypatch, 6)
    (sample,) = by_scan([Sample(cell, 120, 3, 5, H, bidirectional=both, bias=H != 48)])
    test_long_sequences(sample, "cuda")
    args = arguments(sample, "cuda")
    found, expected = (
        rnn(*args, **sample.keywords, save=True),
        test_rnn.reference(*args.map(Tensor.double), cell=cell, bidirectional=both),
    )
    for f, e in zip(found, expected, strict=True):
        assert f.shape == (0,) if e is None else relative_error(f, e) < 1e-5
    for keep_cells in (False, True):
        bare = rnn(*args, **sample.keywords, keep_cells=keep_cells)
        assert torch.equal(bare[0], found[0]) and bare[4].shape == (0,)
        assert torch.equal(bare[3], found[3]) if keep_cells else bare[3].shape == (0,)


@pytest.mark.cuda
@pytest.mark.parametrize(("T", "B"), [(90000, 64), (24000, 128)])
def test_a_sequence_longer_than_cudnn_takes(T, B, monkeypatch):
    """More steps than cuDNN takes in one call, and 2^31 activations of gates; and more values than it takes alone."""
    monkeypatch.setenv("WEFT_RNN_GEOMETRY", NO_GEOMETRY)
    (sample,) = by_scan([Sample("gru", T, B, 1, 128)])
    args = arguments(sample, "cpu").map(Tensor.cuda)
    half = sample.T // 2
    with torch.no_grad():
        output, h_n, *_ = rnn(*args, **sample.keywords)
        first, middle, *_ = rnn(args.input[:half], args.h0, None, args.weights, **sample.keywords)
        second, last, *_ = rnn(args.input[half:], middle, None, args.weights, **sample.keywords)
    assert torch.equal(output[:half], first) and torch.equal(output[half:], second) and torch.equal(h_n, last)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, *HALF_TYPES))
@pytest.mark.parametrize("both", (False, True))
def test_a_gradient_of_cells(both: bool, dtype: torch.dtype, device: str):
    """The scan takes none; what runs then has it right."""
    (sample,) = by_scan([Sample("lstm", 9, 4, 3, 20, bidirectional=both, dtype=dtype)])
    args = arguments(sample, device, requires_grad=True)
    exact = test_rnn.exact_arguments(args)
    output, _, _, cells, _ = rnn(*args, **sample.keywords, keep_cells=True)
    expected = test_rnn.reference(*exact, cell="lstm", bidirectional=both)
    assert relative_error(cells, expected[3]) < BOUNDS[dtype]
    grads = [torch.randn_like(output), torch.randn_like(cells)]
    found = torch.autograd.grad([output, cells], args.tensors, grads)
    wanted = torch.autograd.grad([expected[0], expected[3]], exact.tensors, doubles(grads))
    check_close(itertools.repeat("gradient"), found, wanted, BOUNDS[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("cell", CELLS)
def test_where_the_scan_has_no_kernel(cell: str, dtype: torch.dtype):
    """Packed input, and more hidden units than its kernels hold."""
    for sample in by_scan(
        [packed(cell, (9, 7, 6, 4, 1), 3, 20, dtype=dtype), Sample(cell, 12, 3, 4, 200, dtype=dtype)]
    ):
        test_rnn.test_matches_reference(sample, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("sample", by_scan(Sample(c, 60, 3, 3, BLOCK_SIZES[c][-1]) for c in CELLS), ids=str)
def test_gradients_of_some_outputs_in_chunks(sample: Sample, monkeypatch):
    force_chunks(monkeypatch, 4)
    test_rnn.test_gradients_of_some_outputs(sample, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize(
    "sample", by_scan(Sample(c, 300, 5, 3, h) for c in CELLS for h in (20, *BLOCK_SIZES[c][2::2])), ids=str
)
def test_chunks_repeat_bit_for_bit(sample: Sample, monkeypatch):
    force_chunks(monkeypatch, 20)
    test_rnn.test_repeats_bit_for_bit(sample, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("sample", by_scan(Sample(c, 60, 6, 3, BLOCK_SIZES[c][-1]) for c in CELLS), ids=str)
def test_bad_row_touches_no_other_in_chunks(sample: Sample, value: float, monkeypatch):
    force_chunks(monkeypatch, 5)
    test_rnn.test_bad_row_touches_no_other(sample, "cuda", value)


@pytest.mark.cuda
@pytest.mark.parametrize("H", (20, 40))
def test_chunks_can_be_forced(H: int, monkeypatch):
    """The tests that ask for chunks get them; what is no number is refused."""
    (sample,) = by_scan([Sample("gru", 50, 3, 2, H)])

    def forms_products(chunks: int) -> bool:
        force_chunks(monkeypatch, chunks)
        output = rnn(*arguments(sample, "cuda", requires_grad=True), **sample.keywords)[0]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            output.sum().backward()
        return any("product" in event.key for event in profile.key_averages())

    assert not forms_products(1)
    assert forms_products(5)
    monkeypatch.setenv("WEFT_RNN_SCAN_CHUNKS", "many")
    with pytest.raises(RuntimeError, match="WEFT_RNN_SCAN_CHUNKS"):
        rnn(*arguments(sample, "cuda", requires_grad=True), **sample.keywords)[0].sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize(("H", "chunks"), ((20, 1), (20, 9), (40, 1), (40, 9)))
def test_relu_drops_what_is_not_finite(H: int, chunks: int, monkeypatch):
    """A unit that is off lets nothing through, however the steps are cut."""
    force_chunks(monkeypatch, chunks)
    (sample,) = by_scan([Sample("rnn_relu", 90, 2, 2, H, bias=False)])
    args = arguments(sample, "cuda").map(Tensor.abs)
    w_ih, w_hh = args.weights
    w_ih[0].neg_()  # with positive input and no recurrent weight unit 0 is off
    w_hh[0].zero_()
    w_hh.mul_(0.1)
    leaves = [t.requires_grad_() for t in (args.input, args.h0, w_ih)]
    _, h_n, *_ = rnn(*args, **sample.keywords)
    assert (h_n[..., 0] == 0).all()
    grad = torch.ones_like(h_n)
    grad[..., 0] = torch.inf
    for found in torch.autograd.grad(h_n, leaves, grad):
        assert found.isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("geometry", ("", NO_GEOMETRY))
@pytest.mark.parametrize("cell", CELLS)
def test_sizes_of_blocks_with_torchs_defaults(cell: str, geometry: str, monkeypatch):
    """With TF32 where torch uses it, as it does by default, gradients are right within TF32's digits."""
    monkeypatch.setenv("WEFT_RNN_GEOMETRY", geometry)
    force_chunks(monkeypatch, 6)
    (sample,) = by_scan([Sample(cell, 300, 4, 8, 64)])
    args = arguments(sample, "cuda", requires_grad=True)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        output, h_n, *_ = rnn(*args, **sample.keywords)
        found = torch.autograd.grad(output.sum() + h_n.sum(), args.tensors)
    exact = test_rnn.exact_arguments(args)
    result = test_rnn.reference(*exact, cell=cell)
    expected = torch.autograd.grad(result[0].sum() + result[1].sum(), exact.tensors)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.double().cpu() - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize("both", (False, True))
@pytest.mark.parametrize("scale", (3.0, 10.0))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_chaotic_weights(cell: str, device: str, scale: float, both: bool):
    """Recurrent weights that make the state chaotic and products of Jacobians overflow.

    Two runs of a chaotic map part after some tens of steps whatever the precision, so the forward is compared one step
    at a time, from the op's own state before. Given the saved activations the backward is linear: it is compared with a
    sequential loop over the same activations, and has to be finite wherever that loop is in the same precision.
    """
    steps = 1000 if both or device == "cpu" else 10000
    check_chaotic(*by_scan([Sample(cell, steps, 3, 2, 20, bidirectional=both)]), device, scale)


@pytest.mark.cuda
@pairs(case=BLOCK_CASES, scale=(3.0, 10.0), geometry=("", NO_GEOMETRY))
def test_chaotic_weights_at_sizes_of_blocks(case: tuple[str, int], scale: float, geometry: str, monkeypatch):
    cell, H = case
    monkeypatch.setenv("WEFT_RNN_GEOMETRY", geometry)
    force_chunks(monkeypatch, 24)
    steps = 2000 if H == 64 else 500
    check_chaotic(*by_scan([Sample(cell, steps, 2, 2, H, bidirectional=H == 96)]), "cuda", scale)


def scaled(sample: Sample, device: str, scale: float) -> Arguments:
    """Arguments with recurrent weights `scale` times as large."""
    args = arguments(sample, device)
    stride = len(args.weights) // sample.directions
    args.weights = [scale * w if i % stride == 1 else w for i, w in enumerate(args.weights)]
    return args


def last_direction(sample: Sample, args: Arguments, results: Sequence[Tensor]):
    """The last direction as sequential.check_chain has it: the seven arguments, and output, gates and cells."""
    d, H = sample.directions - 1, sample.H
    stride = len(args.weights) // sample.directions
    weights = [*args.weights[d * stride :], None, None][:4]
    output, _, _, cells, gates = results
    columns = slice(d * H, (d + 1) * H)
    seven = [args.input, args.h0[d:], None if args.c0 is None else args.c0[d:], *weights]
    gates = gates[d].unflatten(0, (-1, sample.B)) if gates.numel() > 0 else gates
    return seven, (output[..., columns], gates, cells[..., columns] if cells.numel() > 0 else cells)


def check_chaotic(sample: Sample, device: str, scale: float) -> None:
    cell, reverse = sample.cell, sample.bidirectional
    args = scaled(sample, device, scale)
    results = rnn(*args, **sample.keywords, save=True)
    seven, (output, _, cells) = last_direction(sample, args, results)

    # All steps at once: each is a sequence of one step in the batch.
    def before(states: Tensor, first: Tensor) -> Tensor:
        return torch.cat([states[1:], first] if reverse else [first, states[:-1]]).flatten(0, 1)[None]

    state = before(output, seven[1])
    cell_state = before(cells, seven[2]) if cell == "lstm" else None
    step = doubles([args.input.flatten(0, 1)[None], state, cell_state, *(w for w in seven[3:] if w is not None)])
    expected = test_rnn.reference(*step[:3], step[3:], cell=cell)[0][0].view(output.shape)
    # Close to the largest number of fp32 the order of a sum decides whether it overflows.
    usable = (expected.abs().amax(-1) < 1e35) & state.view(output.shape).isfinite().all(-1).cpu()
    assert usable.all() or cell == "rnn_relu"
    # A ReLU net's state is not bounded: its rounding error is that of the sum before the cancellation.
    size = step[1].abs() @ step[4].abs().T + 1
    magnitude = size.view(output.shape) if cell == "rnn_relu" else 1
    assert (((output.cpu() - expected).abs() / magnitude)[usable] < 1e-4).all()
    finite_steps = output.isfinite().all(-1).all(-1)
    if not finite_steps.all():  # a ReLU net's state overflows, and then its gradient means nothing
        kept = int(finite_steps.long().argmin()) if not reverse else int(finite_steps.flip(0).long().argmin())
        args.input = args.input[:kept] if not reverse else args.input[-kept:]
        sample = replace(sample, T=kept)
        results = rnn(*args, **sample.keywords, save=True)
        seven, (output, _, _) = last_direction(sample, args, results)
        assert kept > 5 and output.isfinite().all()

    everywhere = gradients(sample, args)
    if reverse:  # gradients for the last direction alone, so that the input's is that direction's
        for grad in everywhere:
            grad[(0,) if grad is not everywhere[0] else (..., slice(0, sample.H))] = 0
    check_backward(sample, args, everywhere, results)
    check_backward(sample, args, [None, *everywhere[1:]], results)


def check_backward(sample: Sample, args: Arguments, grads: list[Tensor | None], results: Sequence[Tensor]) -> None:
    """The gradients of input and state beside the loop's, from gradients of output, h_n and, of an lstm, c_n."""
    arriving = [*grads, None][:3]
    mask = [True] * 3 + [False] * len(args.weights)
    found = rnn_backward(*arriving, None, *args, *(results[i] for i in (0, 3, 4)), **sample.keywords, output_mask=mask)
    d = sample.directions - 1
    seven, saved = last_direction(sample, args, results)
    own = [found[0], found[1][d:], found[2][d:] if sample.cell == "lstm" else found[2]]
    columns = slice(d * sample.H, None)
    arriving = [None if g is None else g[..., columns] if i == 0 else g[d:] for i, g in enumerate(arriving)]
    check_chain(own, arriving, seven, saved, cell=sample.cell, reverse=sample.bidirectional)


@pytest.mark.cuda
@pytest.mark.parametrize("scale", (3.0, 10.0))
@pytest.mark.parametrize("H", (20, 64))
@pytest.mark.parametrize("cell", CELLS)
def test_cuda_graph_with_chaotic_weights(cell: str, H: int, scale: float, monkeypatch):
    """Captured with tame weights, replayed with chaotic ones: the replay decides which chunks are computed again."""
    (sample,) = by_scan([Sample(cell, 3001 if H == 20 else 600, 3, 2, H)])
    if H > 32:
        force_chunks(monkeypatch, 12)
    static = arguments(sample, "cuda")
    grads = gradients(sample, static)
    arriving, mask = [*grads, None, None][:4], [True] * len(static.operands)

    def step():
        results = rnn(*static, **sample.keywords, save=True)
        saved = [results[i] for i in (0, 3, 4)]
        return [*results, *rnn_backward(*arriving, *static, *saved, **sample.keywords, output_mask=mask)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for to, new in zip(static.tensors, scaled(sample, "cuda", scale).tensors, strict=True):
            to.copy_(new)
        static.input.normal_()
        graph.replay()
        torch.cuda.synchronize()
        found = [c.clone() for c in captured]
        for f, e in zip(found, step(), strict=True):
            # A ReLU net's state overflows: the same NaNs, then.
            torch.testing.assert_close(f, e, rtol=0, atol=0, equal_nan=True)
        if cell != "rnn_relu":
            seven, saved = last_direction(sample, static, found[:5])
            check_chain(found[5:8], arriving[:3], seven, saved, cell=cell)
