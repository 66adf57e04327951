"""weft::rnn with backward="newton" and algorithm="newton" of the layers: torch's results, whatever the chunks of time
and however long the net remembers, and what a report says of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import weft
from torch import Tensor

from tests.common import DEVICES, check_close, covering, differentiate, poisoned, relative_error, with_devices
from tests.rnn import chunked, test_rnn
from tests.rnn.samples import CELLS, Arguments, Sample, arguments, by_newton, packed
from tests.rnn.test_rnn import BOUNDS, HALF_TYPES, RESULTS, gradients, names
from tests.rnn.test_rnn_scan import torchs

rnn = torch.ops.weft.rnn


@pytest.fixture(autouse=True)
def _exact_fp32() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def chunks(monkeypatch):
    """Sets how many chunks there are."""
    return lambda count: monkeypatch.setenv("WEFT_RNN_NEWTON_CHUNKS", str(count))


def forgetful(args: Arguments, sample: Sample, scale: float) -> Arguments:
    """The recurrent weights times `scale`, which says how long the net remembers."""
    stride = 4 if sample.bias else 2
    weights = [w * scale if i % stride == 1 else w for i, w in enumerate(args.weights)]
    return args.replaced([args.input, args.h0, args.c0, *weights])


LONG = by_newton(
    Sample(cell, T, 1 + index % 3, 2, H, bidirectional=both, bias=index % 4 != 0, state=index % 5 != 0)
    for index, (H, T, cell, both) in enumerate(
        covering((8, 16, 20, 24, 32, 5, 13, 31), (1000, 3001), CELLS, (False, True))
    )
)
LONG += by_newton(Sample(cell, 1000, 3, 2, 20, dtype=dtype) for cell in CELLS for dtype in HALF_TYPES)
LONG += by_newton(Sample(cell, 1500, 2, 2, 20, dtype=torch.float64) for cell in CELLS)
ON_CPU = by_newton(Sample(cell, 600, 2, 2, 13, bidirectional=True) for cell in CELLS)
ON_CPU += by_newton(Sample(cell, 200, 2, 2, 9, state=False) for cell in ("gru", "lstm"))
ON_CPU += by_newton(Sample("gru", 300, 1, 2, 40, dtype=dtype) for dtype in (torch.float64, *HALF_TYPES))


@pytest.mark.parametrize("scale", (1.0, 2.0))
@pytest.mark.parametrize(("sample", "device"), with_devices(ON_CPU, LONG), ids=str)
def test_torchs_results(sample: Sample, device: str, scale: float, chunks):
    chunks(13)
    args = forgetful(arguments(sample, device), sample, scale).map(lambda t: t.detach().requires_grad_())
    which = sample.differentiable
    exact, grads = args.map(lambda t: t.detach().double().requires_grad_()), gradients(sample, args)
    if args.h0 is None:
        zeros = args.input.new_zeros(sample.directions, sample.B, sample.H, dtype=torch.float64, requires_grad=True)
        exact = exact.replaced([exact.input, zeros, zeros if sample.cell == "lstm" else None, *exact.weights])
    expected = torchs(sample, exact)
    with poisoned():
        found = rnn(*args, **sample.keywords)
        found_grads = differentiate([found[i] for i in which], args.operands, grads)
    check_close(RESULTS, [found[i] for i in which], expected, BOUNDS[sample.dtype])
    wanted = differentiate(expected, exact.operands, [g.double() for g in grads])
    if args.h0 is None:
        wanted = [wanted[0], None, None, *wanted[3:]]
    check_close(names(args), found_grads, wanted, 4 * BOUNDS[sample.dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("scale", (0.5, 1.5, 3.0))
@pytest.mark.parametrize("cell", CELLS)
def test_each_step_follows_from_the_one_before(cell: str, scale: float, dtype: torch.dtype, device: str, chunks):
    """Across chunks too, to 2^-20 max(1, |h|), in float64 to 2^-48."""
    chunks(19)
    (sample,) = by_newton([Sample(cell, 400, 2, 3, 20, dtype=dtype)])
    if cell == "rnn_relu":
        scale = min(scale, 1.5)
    args = forgetful(arguments(sample, device), sample, scale)
    output, _, _, cells, _ = rnn(*args, **sample.keywords, keep_cells=True)
    states = [output, cells] if cell == "lstm" else [output]
    starts = [args.h0, args.c0] if cell == "lstm" else [args.h0]
    before = [torch.cat((s, all_[:-1])).double() for s, all_ in zip(starts, states, strict=True)]
    exact = args.map(Tensor.double)
    wide = lambda t: t.flatten(0, 1)[None]  # noqa: E731
    once = rnn(
        wide(exact.input), wide(before[0]), wide(before[1]) if cell == "lstm" else None, exact.weights, None,
        cell=cell, keep_cells=True,
    )  # fmt: skip
    found = [wide(s).double() for s in states]
    for value, wanted in zip(found, [once[0], once[3]], strict=False):
        assert chunked.mismatch(wanted, value).max() <= (2.0**-48 if dtype == torch.float64 else 2.0**-20)


def few_digits(cell: str, scale: float, device: str) -> Arguments:
    """A ReLU net each of whose sums is rounded once, in whatever order it is summed up, and which forgets by `scale` a
    step; or an LSTM that keeps all, as its gates i and f are 1. When their walks meet does not depend on rounding."""
    T, B, H = 300, 2, 12
    if cell == "lstm":
        (sample,) = by_newton([Sample(cell, T, B, 3, H, dtype=torch.float64)])
        args = arguments(sample, device)
        for weight in args.weights[:2]:
            weight[: 2 * H] = 0
        args.weights[2][: 2 * H] = 60
        return args
    quarters = lambda low, high, *shape: torch.randint(low, high, shape, device=device).double() / 4  # noqa: E731
    one = torch.eye(H, dtype=torch.float64, device=device)
    weights = [one, scale * one.roll(1, 0), quarters(0, 2, H), quarters(0, 2, H)]
    return Arguments(quarters(-3, 5, T, B, H), quarters(0, 9, 1, B, H), None, weights, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cell", "scale"), [("rnn_relu", 0.5), ("rnn_relu", 1.0), ("lstm", 1.0)])
def test_what_a_report_counts(cell: str, scale: float, device: str, chunks):
    chunks(10)
    args = few_digits(cell, scale, device)
    with weft.scan.newton_report() as report:
        rnn(*args, cell=cell, backward="newton")
    (run,) = report.runs
    w_ih, w_hh, b_ih, b_hh = (w.cpu() for w in args.weights)
    walked = chunked.walk(
        cell, (args.input.cpu() @ w_ih.t()) + b_ih, w_hh, b_hh, args.h0[0].cpu(),
        None if args.c0 is None else args.c0[0].cpu(), 10, 1 if device == "cpu" else 8,
    )  # fmt: skip
    assert (run.op, run.steps, run.chunks) == (cell, 300, 10)
    assert run.rounds == int(walked.rounds.max()) > 1
    assert run.redone == pytest.approx(float(walked.redone.double().mean()) / 300)
    assert 0 <= run.residual <= 2.0**-51 and run.sequential == float(walked.alone.double().mean())
    assert (run.sequential > 0) == (scale == 1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_a_report(cell: str, device: str, chunks):
    chunks(10)
    (sample,) = by_newton([Sample(cell, 300, 2, 3, 12, dtype=torch.float64)])
    with weft.scan.newton_report() as report:
        rnn(*arguments(sample, device), **sample.keywords)
    (run,) = report.runs
    assert (run.op, run.steps, run.chunks) == (cell, 300, 10)
    assert 1 < run.rounds <= 10 and 0 < run.redone <= run.rounds
    assert 0 <= run.residual <= 2.0**-51 and 0 <= run.sequential <= 1
    assert str(report).count("\n") == 1 and cell in str(report)


@pytest.mark.parametrize("device", DEVICES)
def test_reports_of_layers(device: str, chunks):
    chunks(6)
    layer = weft.nn.GRU(3, 8, 2, bidirectional=True, algorithm="newton", device=device)
    x = torch.randn(200, 2, 3, device=device)
    with weft.scan.newton_report() as outer:
        layer(x)
        with weft.scan.newton_report() as inner:
            layer(x[:50])
    assert [(r.op, r.steps, r.chunks) for r in outer.runs] == 2 * [("gru", 200, 6)]
    assert [(r.steps, r.chunks) for r in inner.runs] == 2 * [(50, 6)]
    with weft.scan.newton_report() as report:
        thread = threading.Thread(target=layer, args=(x,))
        thread.start()
        thread.join()
        weft.nn.GRU(3, 8, algorithm="scan", device=device)(x)
    assert report.runs == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_a_net_that_never_forgets_is_walked(cell: str, device: str, chunks):
    chunks(16)
    (sample,) = by_newton([Sample(cell, 480, 2, 3, 20)])
    args = arguments(sample, device)
    args = forgetful(args, sample, 1.15 if cell == "rnn_relu" else 12.0)
    with weft.scan.newton_report() as report:
        found = rnn(*args, **sample.keywords)
    (run,) = report.runs
    assert 1 <= run.rounds <= run.chunks == 16
    if cell != "rnn_relu":  # whose state may die
        assert run.sequential == 1.0 and run.rounds < 16
        # At most what rounds there were walked again, and the rest of the chain.
        assert run.redone <= run.rounds
    # Of others, what is rounded in another way soon makes other states.
    in_order = rnn(*args, cell=cell, backward="scan")
    if cell == "rnn_relu":
        torch.testing.assert_close(found[0], in_order[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0][:4], in_order[0][:4], rtol=1e-2, atol=1e-2)
    assert found[0].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", by_newton(Sample(c, 500, 3, 3, h) for c in CELLS for h in (7, 20)), ids=str)
def test_repeats_bit_for_bit(sample: Sample, device: str, chunks):
    chunks(20)
    test_rnn.test_repeats_bit_for_bit(sample, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_a_sequence_does_not_depend_on_the_others(cell: str, device: str, chunks):
    chunks(9)
    (sample,) = by_newton([Sample(cell, 200, 5, 3, 20)])
    args = arguments(sample, device)
    bad = arguments(sample, device)
    bad.input[77, 1] = torch.nan
    bad.input[120, 3] = torch.inf
    found, wanted = rnn(*bad, **sample.keywords), rnn(*args, **sample.keywords)
    for each, good in zip(found[:3], wanted[:3], strict=True):
        if each.numel():
            assert torch.equal(each[:, [0, 2, 4]], good[:, [0, 2, 4]])
    assert torch.equal(found[0][:77, 1], wanted[0][:77, 1]) and found[0][77:, 1].isnan().all()
    walked = rnn(*bad, cell=cell, backward="scan")
    assert torch.equal(found[0].isnan(), walked[0].isnan())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("sample", by_newton(Sample(c, 60, 6, 3, 20) for c in CELLS), ids=str)
def test_bad_row_touches_no_other(sample: Sample, value: float, device: str, chunks):
    chunks(5)
    test_rnn.test_bad_row_touches_no_other(sample, device, value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_where_it_has_no_kernel(cell: str, device: str, chunks):
    """Packed input, on a GPU more hidden units than a warp holds, and a gradient of cells."""
    chunks(3)
    for sample in by_newton([packed(cell, (9, 7, 6, 4, 1), 3, 20), Sample(cell, 12, 3, 4, 200)]):
        test_rnn.test_matches_reference(sample, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("both", (False, True))
def test_a_gradient_of_cells(both: bool, device: str, chunks):
    chunks(4)
    (sample,) = by_newton([Sample("lstm", 90, 4, 3, 20, bidirectional=both)])
    args = arguments(sample, device, requires_grad=True)
    exact = test_rnn.exact_arguments(args)
    output, _, _, cells, _ = rnn(*args, **sample.keywords, keep_cells=True)
    expected = test_rnn.reference(*exact, cell="lstm", bidirectional=both)
    assert relative_error(cells, expected[3]) < BOUNDS[torch.float32]
    grads = [torch.randn_like(output), torch.randn_like(cells)]
    found = torch.autograd.grad([output, cells], args.tensors, grads)
    wanted = torch.autograd.grad([expected[0], expected[3]], exact.tensors, [g.double().cpu() for g in grads])
    check_close(names(args), found, wanted, 4 * BOUNDS[torch.float32])


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_can_be_forced(device: str, chunks):
    (sample,) = by_newton([Sample("gru", 50, 3, 2, 20)])
    args = arguments(sample, device)
    chunks("many")
    with pytest.raises(RuntimeError, match="WEFT_RNN_NEWTON_CHUNKS must be a positive number"):
        rnn(*args, **sample.keywords)
    for count, found in ((1, 1), (7, 7), (1000, 50)):
        chunks(count)
        with weft.scan.newton_report() as report:
            rnn(*args, **sample.keywords)
        assert report.runs[0].chunks == found


@pytest.mark.cuda
def test_a_cuda_graph(chunks):
    """Replayed on other inputs, whose chunks meet elsewhere; nothing waits for the host."""
    chunks(12)
    layer = weft.nn.LSTM(3, 20, algorithm="newton", device="cuda")
    x = torch.randn(400, 2, 3, device="cuda")
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, (h_n, c_n) = layer(x)
        for scale in (1.0, 5.0):
            x.copy_(scale * torch.randn_like(x))
            graph.replay()
            expected, (h, c) = layer(x)
            assert torch.equal(output, expected) and torch.equal(h_n, h) and torch.equal(c_n, c)


@pytest.mark.cuda
def test_a_large_batch_is_walked_as_it_is():
    layer = weft.nn.GRU(3, 20, algorithm="newton", device="cuda")
    with weft.scan.newton_report() as report:
        output, _ = layer(torch.randn(300, 20000, 3, device="cuda"))
    assert report.runs[0][2:] == (1, 1, 0.0, 0.0, 0.0) and output.isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("cell", CELLS)
def test_as_long_as_it_is_meant_for(cell: str):
    """Without a word about chunks, the longest sequences of the benchmarks."""
    for T, B in ((30000, 16), (10000, 1), (4001, 64)):
        (sample,) = by_newton([Sample(cell, T, B, 1, 20)])
        args = arguments(sample, "cuda")
        with weft.scan.newton_report() as report:
            found = rnn(*args, **sample.keywords)
        walked = rnn(*args, cell=cell, backward="scan")
        assert report.runs[0].chunks > 2
        for each, wanted in zip(found[:3], walked[:3], strict=True):
            torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5)
