"""What weft::rnn and its backward refuse, and in which words; what is refused leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common import DEVICES
from tests.rnn.samples import Sample, arguments, gradients, packed

rnn = torch.ops.weft.rnn
rnn_backward = torch.ops.weft.rnn_backward


def _with(position: int, change):
    """Replaces one of the arguments."""
    return lambda args: [change(a) if i == position else a for i, a in enumerate(args)]


def _weight(position: int, change):
    return _with(3, lambda weights: [change(w) if i == position else w for i, w in enumerate(weights)])


BAD = {
    "2-D input": ("gru", _with(0, lambda t: t[0]), ValueError, r"rnn: input must be \(T, B, I\), got 2 dimensions"),
    "integers": ("gru", _with(0, Tensor.int), TypeError, r"input must be float16, .* or float64, got Int"),
    "2-D h0": ("gru", _with(1, lambda t: t[0]), ValueError, r"h0 must be \(D, B, H\) = \[2, 3, 5\], got \[3, 5\]"),
    "batch of h0": ("gru", _with(1, lambda t: t[:, :2]), ValueError, r"h0 must be \(D, B, H\) = .*, got \[2, 2, 5\]"),
    "dtype of h0": ("gru", _with(1, Tensor.double), TypeError, r"h0 must have the dtype of input, Float, got Double"),
    "c0 of a gru": ("gru", _with(2, lambda t: torch.zeros(2, 3, 5)), ValueError, r"c0 must be None except for lstm"),
    "only h0": ("lstm", _with(2, lambda t: None), ValueError, r"h0 and c0 must both be given .*, got only h0"),
    "only c0": ("lstm", _with(1, lambda t: None), ValueError, r"h0 and c0 must both be given .*, got only c0"),
    "sizes of c0": ("lstm", _with(2, lambda t: t[..., :2]), ValueError, r"c0 must be \(D, B, H\) = .*got \[2, 3, 2\]"),
    "dtype of c0": ("lstm", _with(2, Tensor.half), TypeError, r"c0 must have the dtype of input, Float, got Half"),
    "no weights": ("gru", _with(3, lambda w: []), ValueError, r"for each of 2 directions, got 0 tensors"),
    "one direction": ("gru", _with(3, lambda w: w[:4]), ValueError, r"h0 must|b_ih|w_ih of direction 1 must"),
    "a bias missing": ("gru", _with(3, lambda w: w[:7]), ValueError, r"for each of 2 directions, got 7 tensors"),
    "w_ih": ("gru", _weight(0, lambda w: w[:, :1]), ValueError, r"w_ih must be \(G\*H, I\) = \[15, 2\], got \[15, 1\]"),
    "w_hh": ("lstm", _weight(1, lambda w: w[:15]), ValueError, r"w_hh must be \(G\*H, H\) = \[20, 5\], got \[15, 5\]"),
    "1-D w_hh": ("lstm", _weight(1, lambda w: w[0]), ValueError, r"w_hh must be \(G\*H, H\), got 1 dimension"),
    "b_hh": ("gru", _weight(3, lambda w: w[None]), ValueError, r"b_hh must be \(G\*H\) = \[15\], got \[1, 15\]"),
    "second w_hh": ("gru", _weight(5, lambda w: w[1:]), ValueError, r"w_hh of direction 1 must be \(G\*H, H\)"),
    "dtype of b_ih": ("gru", _weight(2, Tensor.double), TypeError, r"b_ih must have the dtype of input, Float, got"),
}
BAD_BATCH_SIZES = {
    "increase": (torch.tensor([3, 2, 3]), r"batch_sizes must not increase, got 3 at step 2 after 2"),
    "zero": (torch.tensor([3, 3, 2, 0]), r"batch_sizes must be at least 1 at every step, got 0 at step 3"),
    "negative": (torch.tensor([4, 5, -1]), r"batch_sizes must not increase|at least 1"),
    "sum": (torch.tensor([3, 3, 1]), r"batch_sizes must sum to the rows of the packed input, 8, got 7"),
    "dtype": (torch.tensor([3, 3, 2], dtype=torch.int32), r"batch_sizes must be \(T\), int64, on the CPU, got .* Int"),
    "rank": (torch.tensor([[3, 3, 2]]), r"batch_sizes must be \(T\), int64, on the CPU, got \[1, 3\]"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, device: str):
    cell, change, exception, message = BAD[name]
    args = arguments(Sample(cell, 4, 3, 2, 5, bidirectional=True), device)
    good = rnn(*args, cell=cell, bidirectional=True)[0]
    changed = [a.to(device) if isinstance(a, Tensor) else a for a in change(list(args))]
    with pytest.raises(exception, match=message):
        rnn(*changed, cell=cell, bidirectional=True)
    assert torch.equal(rnn(*args, cell=cell, bidirectional=True)[0], good)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BAD_BATCH_SIZES)
def test_bad_batch_sizes(name: str, device: str):
    batch_sizes, message = BAD_BATCH_SIZES[name]
    sample = packed("gru", (3, 3, 2), 2, 5)
    args = arguments(sample, device)
    with pytest.raises(RuntimeError, match=message):
        rnn(args.input, args.h0, None, args.weights, batch_sizes, cell="gru")
    with pytest.raises(ValueError, match=r"input must be \(N, I\) with batch_sizes, got 3 dimensions"):
        rnn(args.input[None], args.h0, None, args.weights, args.batch_sizes, cell="gru")


@pytest.mark.parametrize("device", DEVICES)
def test_unknown_names(device: str):
    args = arguments(Sample("gru", 4, 3, 2, 5), device)
    known = r"weft::rnn: backward must be one of 'persistent', 'scan', 'newton', got 'auto'"
    with pytest.raises(ValueError, match=known):
        rnn(*args, cell="gru", backward="auto")
    with pytest.raises(ValueError, match=r"weft::rnn: cell must be one of 'rnn_tanh', .*, 'slstm_exp', got 'elman'"):
        rnn(*args, cell="elman")


@pytest.mark.cuda
def test_other_devices():
    args = arguments(Sample("lstm", 4, 3, 2, 5), "cuda")
    with pytest.raises(RuntimeError, match=r"w_hh must be on the device of input, cuda:0, got cpu"):
        weights = [w.cpu() if i == 1 else w for i, w in enumerate(args.weights)]
        rnn(args.input, args.h0, args.c0, weights, cell="lstm")
    with pytest.raises(RuntimeError, match=r"c0 must be on the device of input, cuda:0, got cpu"):
        rnn(args.input, args.h0, args.c0.cpu(), args.weights, cell="lstm")
    sample = packed("gru", (3, 3, 2), 2, 5)
    args = arguments(sample, "cuda")
    with pytest.raises(RuntimeError, match=r"batch_sizes must be \(T\), int64, on the CPU"):
        rnn(args.input, args.h0, None, args.weights, args.batch_sizes.cuda(), cell="gru")


@pytest.mark.parametrize("device", DEVICES)
def test_meta_tensors_beside_others(device: str):
    args = arguments(Sample("gru", 4, 3, 2, 5), device)
    where = rf"must be on the device of input, {device}(:0)?, got meta"
    with pytest.raises(RuntimeError, match=rf"weft::rnn: weights\[1\] {where}"):
        rnn(args.input, args.h0, None, [w.to("meta") if i == 1 else w for i, w in enumerate(args.weights)], cell="gru")
    with pytest.raises(RuntimeError, match=rf"weft::rnn: h0 {where}"):
        rnn(args.input, args.h0.to("meta"), None, args.weights, cell="gru")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", ("gru", "lstm"))
def test_bad_arguments_of_the_backward(cell: str, device: str):
    sample = Sample(cell, 4, 3, 2, 5)
    args = arguments(sample, device)
    output, _, _, cells, gates = rnn(*args, **sample.keywords, save=True)
    grads, mask = gradients(sample, args), [True] * len(args.operands)
    arriving = grads if cell == "lstm" else [*grads, None, None]

    def run(arriving=arriving, saved=(output, cells, gates), mask=mask):
        return rnn_backward(*arriving, *args, *saved, **sample.keywords, output_mask=mask)

    run()
    with pytest.raises(ValueError, match=r"grad_output must be \(T, B, D\*H\) = \[4, 3, 5\], got \[3, 3, 5\]"):
        run([arriving[0][1:], *arriving[1:]])
    with pytest.raises(TypeError, match=r"grad_h_n must have the dtype of input, Float, got Double"):
        run([arriving[0], arriving[1].double(), *arriving[2:]])
    with pytest.raises(ValueError, match=r"gates must be \(D, R, 4H\) as a forward with save=True returns it"):
        run(saved=(output, cells, gates[:0]))
    with pytest.raises(ValueError, match=r"output_mask must have one entry for each of .*, 7, got 6"):
        run(mask=mask[1:])
    with pytest.raises(TypeError, match=r"gates must have the dtype of input, Float, got Double"):
        run(saved=(output, cells, gates.double()))
    half = [
        a if i == 4 else [w.half() for w in a] if i == 3 else a if a is None else a.half() for i, a in enumerate(args)
    ]
    message = r"gates must be Float for Half input and backward='scan' or 'newton', got Half"
    with pytest.raises(TypeError, match=message):
        rnn_backward(
            *(a if a is None else a.half() for a in arriving[:3]), None, *half, output.half(),
            cells, gates.half(), cell=cell, bidirectional=False, output_mask=mask, backward="scan",
        )  # fmt: skip
    if cell == "gru":
        with pytest.raises(ValueError, match=r"grad_c_n must be None except for lstm"):
            run([*arriving[:2], arriving[1], None])
        with pytest.raises(ValueError, match=r"grad_cells must be None except for lstm"):
            run([*arriving[:3], arriving[0]])
    else:
        with pytest.raises(ValueError, match=r"cells must be \(T, B, D\*H\) = \[4, 3, 5\], got \[0\]"):
            run(saved=(output, cells[:0, 0, 0], gates))
