"""weft::rnn and its backward: one table of samples against a plain fp64 loop and against torch.nn."""

from __future__ import annotations

import itertools
import time
import warnings
from dataclasses import replace

import pytest
import torch
import weft
from hypothesis import given, strategies
from torch import Tensor

from tests.common import (
    DEVICES,
    check_close,
    covering,
    differentiate,
    poisoned,
    relative_error,
    with_devices,
)
from tests.rnn.samples import CELLS, EMPTY_SIZES, Arguments, Sample, arguments, by_scan, gradients, packed
from tests.rnn.sequential import cell_step, doubles

rnn = torch.ops.weft.rnn
rnn_backward = torch.ops.weft.rnn_backward

RESULTS = ("output", "h_n", "c_n", "cells", "gates")

# Norm of the difference over the norm. fp32 and fp64: rounding of some tens of steps. Half types: what is read, written
# and saved is rounded (2^-11, 2^-8), and the gradient multiplies rounded activations once per step.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


# T, B, I, H: one of everything; odd sizes on both sides of vector widths and tiles; many steps; and each size 0.
SIZES = (
    (1, 1, 1, 1),
    (5, 3, 4, 7),
    (2, 9, 1, 8),
    (40, 16, 1, 20),
    (3, 17, 33, 32),
    (21, 5, 3, 33),
    (9, 2, 5, 64),
    (4, 13, 16, 130),
)
# All of one length; every length another; runs of equal ones; sequences of one step; one long sequence left at the end.
LENGTHS = ((6, 6, 6), (9, 7, 6, 4, 1), (7, 7, 3, 3, 3, 2, 1, 1), (1, 1, 1), (25, 3), (11,))
HALF_TYPES = (torch.float16, torch.bfloat16)

SAMPLES = [
    Sample(cell, *size, bidirectional=both, bias=(index + both) % 3 != 0, state=(index + both) % 4 != 1)
    for cell, (index, size), both in itertools.product(CELLS, enumerate(SIZES, 1), (False, True))
]
SAMPLES += [
    packed(cell, lengths, 3, 5 + 4 * index, bidirectional=both, bias=index != 2, state=(index + both) % 3 != 1)
    for cell, (index, lengths), both in itertools.product(CELLS, enumerate(LENGTHS), (False, True))
]
SAMPLES += [
    replace(sample, bidirectional=both, dtype=dtype)
    for cell, both, dtype in itertools.product(CELLS, (False, True), (torch.float64, *HALF_TYPES))
    for sample in (Sample(cell, 31, 9, 2, 20), packed(cell, (12, 9, 9, 5, 2), 4, 7))
]
# On the CPU it is the same kernels in the accumulate type; on CUDA all of the table.
BY_SCAN = by_scan(SAMPLES)
BY_SCAN_ON_CPU = [s for s in BY_SCAN if s.dtype != torch.float32 or s.H == 7]
# Hidden sizes of every tier of the CUDA kernels, batches on both sides of a tile, in the types that have kernels.
ON_CUDA = [
    Sample(cell, 24, B, 40, H, bidirectional=(index % 3 == 0), state=index % 2 == 0, dtype=dtype)
    for cell in CELLS
    for index, (H, B, dtype) in enumerate(
        covering((24, 100, 128, 256, 512, 1000, 1024), (1, 3, 16, 40), (torch.float32, *HALF_TYPES))
    )
]
ON_CUDA += [s for s in BY_SCAN if s not in BY_SCAN_ON_CPU]
ON_CUDA += [
    packed(
        cell, tuple(sorted((1 + 7 * i % 37 for i in range(B)), reverse=True)), 16, H, bidirectional=True, dtype=dtype
    )
    for cell, H, B, dtype in itertools.product(CELLS, (20, 129, 512), (5, 33), (torch.float32, torch.bfloat16))
]
SMALL = [
    sample
    for cell, both in itertools.product(CELLS, (False, True))
    for sample in (
        Sample(cell, 4, 3, 2, 5, bidirectional=both),
        packed(cell, (5, 3, 3, 1), 2, 4, bidirectional=both, bias=not both, state=not both),
        Sample(cell, 4, 3, 2, 5, bidirectional=both, state=both, backward="scan"),
    )
]
GRADCHECK = [
    sample
    for cell, both in itertools.product(CELLS, (False, True))
    for sample in (
        Sample(cell, 3, 2, 2, 3, bidirectional=both, bias=not both, dtype=torch.float64),
        packed(cell, (3, 2, 1), 2, 2, bidirectional=both, state=not both, dtype=torch.float64),
        Sample(cell, 3, 2, 2, 3, bidirectional=both, state=both, dtype=torch.float64, backward="scan"),
    )
]


@pytest.fixture(autouse=True)
def _exact_fp32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def exact_arguments(args: Arguments) -> Arguments:
    return args.replaced(t if t is None else t.requires_grad_() for t in doubles(args.operands))


def reference(input, h0, c0, weights, batch_sizes=None, *, cell, bidirectional=False, backward="any"):
    """One step after another in plain torch, on padded data where a sequence that does not run keeps its state: output,
    h_n, c_n and cells (None except for lstm), gates (None for the rnns). `backward` changes no result."""
    hidden, directions = weights[1].shape[1], 2 if bidirectional else 1
    if batch_sizes is None:
        running = torch.ones(input.shape[:2], dtype=torch.bool, device=input.device)
        x = input
    else:
        batch = int(batch_sizes[0]) if len(batch_sizes) else 0
        running = torch.arange(batch) < batch_sizes[:, None]  # (T, B), True in the order of the packed rows
        x = input.new_zeros(*running.shape, input.shape[1]).index_put((running,), input)
    steps = range(running.shape[0])
    zeros = input.new_zeros(directions, running.shape[1], hidden)
    stride = len(weights) // directions
    found = []
    for direction in range(directions):
        w_ih, w_hh, *biases = weights[direction * stride : (direction + 1) * stride]
        b_ih, b_hh = biases or (0, 0)
        h, c = (zeros if s is None else s for s in (h0, c0))
        h, c = h[direction], c[direction]
        outputs, cells, gates = {}, {}, {}
        for t in steps if direction == 0 else reversed(steps):
            outputs[t], cells[t], gates[t] = cell_step(cell, x[t] @ w_ih.T + b_ih, h @ w_hh.T + b_hh, h, c)
            kept = running[t][:, None]
            h = torch.where(kept, outputs[t], h)
            c = torch.where(kept, cells[t], c) if cell == "lstm" else c

        def rows(parts: dict[int, Tensor], width: int) -> Tensor:
            stacked = torch.stack([parts[t] for t in steps]) if parts else x.new_zeros(0, x.shape[1], width)
            return stacked if batch_sizes is None else stacked[running]

        lstm = cell == "lstm"
        found.append((
            rows(outputs, hidden),
            h,
            c if lstm else None,
            rows(cells, hidden) if lstm else None,
            rows(gates, 4 * hidden).flatten(0, -2) if lstm or cell == "gru" else None,
        ))  # fmt: skip
    joins = (lambda t: torch.cat(t, -1), torch.stack, torch.stack, lambda t: torch.cat(t, -1), torch.stack)
    return tuple(None if p[0] is None else j(p) for j, p in zip(joins, zip(*found, strict=True), strict=True))


def names(args: Arguments) -> list[str]:
    return ["input", "h0", "c0", *(f"weights[{i}]" for i in range(len(args.weights)))]


@pytest.mark.parametrize(("sample", "device"), with_devices(SAMPLES + BY_SCAN_ON_CPU, ON_CUDA), ids=str)
def test_matches_reference(sample: Sample, device: str):
    args = arguments(sample, device, requires_grad=True)
    exact, grads, which = exact_arguments(args), gradients(sample, args), sample.differentiable
    expected = reference(*exact, **sample.keywords)
    with poisoned():
        found = rnn(*args, **sample.keywords, keep_cells=True)
        found_grads = differentiate([found[i] for i in which], args.operands, grads)
        with torch.no_grad():
            inference = rnn(*args, **sample.keywords)
    bound = BOUNDS[sample.dtype]
    wide = torch.float64 if sample.dtype == torch.float64 else torch.float32
    saved = wide if sample.backward == "scan" else sample.dtype
    for results in (found, inference):
        assert [f.dtype for f in results] == [sample.dtype] * 3 + [saved] * 2
        assert all(f.is_contiguous() for f in results)
    check_close(RESULTS, [found[i] for i in which], [expected[i] for i in which], bound)
    check_close(RESULTS, inference[: 3 if sample.cell == "lstm" else 2], [expected[i] for i in which][:3], bound)
    expected_grads = differentiate([expected[i] for i in which], exact.operands, doubles(grads))
    # A ReLU unit whose sum is within its rounding of zero has the other derivative.
    kinks = 4 if sample.cell == "rnn_relu" and sample.dtype in (torch.float16, torch.bfloat16) else 1
    check_close(names(args), found_grads, expected_grads, kinks * bound)


def samples(longest: int) -> strategies.SearchStrategy[Sample]:
    options = {
        "cell": strategies.sampled_from(CELLS),
        "I": strategies.integers(0, 6),
        "H": strategies.integers(1, 70),
        "bidirectional": strategies.booleans(),
        "bias": strategies.booleans(),
        "state": strategies.booleans(),
        "dtype": strategies.sampled_from([torch.float32, torch.float64]),
        "backward": strategies.sampled_from(["persistent", "scan"]),
    }
    padded = strategies.builds(Sample, T=strategies.integers(0, longest), B=strategies.integers(0, 20), **options)
    lengths = strategies.lists(strategies.integers(1, longest), min_size=1, max_size=12)
    lengths = lengths.map(lambda found: tuple(sorted(found, reverse=True)))
    return padded | strategies.builds(packed, lengths=lengths, **options)


@given(sample=samples(9))
def test_any_shape(sample: Sample):
    test_matches_reference(sample, "cpu")


@pytest.mark.cuda
@given(sample=samples(60))
def test_any_shape_on_cuda(sample: Sample):
    test_matches_reference(sample, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SMALL, ids=str)
def test_saved_activations(sample: Sample, device: str):
    """cells and gates are there where they are asked for, and without a gradient only there."""
    sample = replace(sample, dtype=torch.float64)
    args = arguments(sample, device)
    expected = reference(*doubles(args.operands)[:3], doubles(args.weights), args.batch_sizes, **sample.keywords)
    for keep_cells, save in itertools.product((False, True), repeat=2):
        with poisoned():
            found = rnn(*args, **sample.keywords, keep_cells=keep_cells, save=save)
        there = [True, True, True, keep_cells or save, save]
        for name, f, e, wanted in zip(RESULTS, found, expected, there, strict=True):
            if wanted and e is not None:
                check_close((name,), (f,), (e,), 1e-12)
            else:
                assert f.shape == (0,)
    with torch.no_grad():
        assert rnn(*args.map(lambda t: t.requires_grad_()), **sample.keywords)[4].shape == (0,)


@pytest.mark.parametrize("backward", ("persistent", "scan"))
@pytest.mark.parametrize("both", (False, True))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_matches_torch_nn(cell: str, device: str, both: bool, backward: str):
    B, I, H = 6, 3, 20
    kinds = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}
    options = {"bidirectional": both, "device": device, "dtype": torch.float64}
    if cell in kinds:
        module = kinds[cell](I, H, **options)
    else:
        module = torch.nn.RNN(I, H, nonlinearity=cell.removeprefix("rnn_"), **options)
    directions = 2 if both else 1
    h0, c0 = (torch.randn(directions, B, H, device=device, dtype=torch.float64) for _ in range(2))
    x = torch.randn(40, B, I, device=device, dtype=torch.float64)
    for lengths in (None, [40, 33, 33, 12, 5, 1]):
        steps = x if lengths is None else torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
        output, state = module(steps, (h0, c0) if cell == "lstm" else h0)
        data, batch_sizes = (x, None) if lengths is None else (steps.data, steps.batch_sizes)
        output = output if lengths is None else output.data
        found = rnn(data, h0, c0 if cell == "lstm" else None, module._flat_weights, batch_sizes, cell=cell,
                    bidirectional=both, backward=backward)  # fmt: skip
        expected = (output, *state) if cell == "lstm" else (output, state)
        check_close(RESULTS, found[: len(expected)], expected, 1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SMALL, ids=str)
def test_gradients_of_some_outputs(sample: Sample, device: str):
    args = arguments(sample, device, requires_grad=True)
    exact, grads = exact_arguments(args), gradients(sample, args)
    expected = reference(*exact, **sample.keywords)
    found = rnn(*args, **sample.keywords, keep_cells=True)
    for index, grad in zip(sample.differentiable, grads, strict=True):
        f = torch.autograd.grad(found[index], args.tensors, grad, retain_graph=True)
        e = torch.autograd.grad(
            expected[index], exact.tensors, grad.double().cpu(), retain_graph=True, materialize_grads=True
        )
        check_close(itertools.repeat(f"gradient of {RESULTS[index]}"), f, e, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SMALL, ids=str)
def test_gradients_of_some_inputs(sample: Sample, device: str):
    """Each argument alone asks for a gradient, and the others get none."""
    full = arguments(sample, device, requires_grad=True)
    grads, which = gradients(sample, full), sample.differentiable
    outputs = rnn(*full, **sample.keywords, keep_cells=True)
    expected = differentiate([outputs[i] for i in which], full.operands, grads)
    saved = rnn(*full.map(Tensor.detach), **sample.keywords, save=True)
    arriving = [None if i not in which else grads[which.index(i)] for i in range(4)]
    for index, operand in enumerate(full.operands):
        if operand is None:
            continue
        args = full.replaced(
            None if t is None else t.detach().requires_grad_(i == index) for i, t in enumerate(full.operands)
        )
        outputs = rnn(*args, **sample.keywords, keep_cells=True)
        (grad,) = torch.autograd.grad([outputs[i] for i in which], [args.operands[index]], grads)
        check_close((names(full)[index],), (grad,), (expected[index],), 1e-6)
        mask = [i == index for i in range(len(full.operands))]
        with poisoned(), torch.no_grad():
            results = rnn_backward(*arriving, *args, saved[0], saved[3], saved[4], **sample.keywords, output_mask=mask)
        assert all(r.shape == (0,) for r, wanted in zip(results, mask, strict=True) if not wanted)
        check_close((names(full)[index],), (results[index],), (expected[index],), 1e-6)


@pytest.mark.parametrize("backward", ("persistent", "scan"))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", EMPTY_SIZES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_empty(cell: str, size: tuple[int, ...], device: str, backward: str):
    for both, state in itertools.product((False, True), repeat=2):
        sample = Sample(cell, *size, bidirectional=both, state=state, backward=backward)
        args = arguments(sample, device, requires_grad=True)
        exact, grads, which = exact_arguments(args), gradients(sample, args), sample.differentiable
        expected, found = reference(*exact, **sample.keywords), rnn(*args, **sample.keywords, keep_cells=True)
        check_close(RESULTS, [found[i] for i in which], [expected[i] for i in which], 1e-6)
        if sample.T == 0 and state:
            assert torch.equal(found[1], args.h0)
            check_no_sharing(sample, args, grads)
        found_grads = differentiate([found[i] for i in which], args.operands, grads)
        total = sum((expected[i] * g).sum() for i, g in zip(which, doubles(grads), strict=True))
        wanted = exact.tensors
        if total.requires_grad:
            expected_grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        else:
            expected_grads = [torch.zeros_like(t) for t in wanted]
        check_close(itertools.repeat("gradient"), [g for g in found_grads if g is not None], expected_grads, 1e-5)


def check_no_sharing(sample: Sample, args: Arguments, grads: list[Tensor]) -> None:
    """No result of the backward op has the memory of an argument, differentiable or not."""
    arriving = [None if i not in sample.differentiable else grads[sample.differentiable.index(i)] for i in range(4)]
    mask = [True] * len(args.operands)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            saved = [rnn(*args, **sample.keywords, save=True)[i].detach() for i in (0, 3, 4)]
            found = rnn_backward(*arriving, *args, *saved, **sample.keywords, output_mask=mask)
        given = {t.data_ptr() for t in (*grads, *args.tensors) if t.numel() > 0}
        assert not given & {t.data_ptr() for t in found if t.numel() > 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_packed_without_a_step(cell: str, device: str):
    sample = Sample(cell, 0, 2, 3, 4, bidirectional=True)
    input, h0, c0, weights, _ = arguments(sample, device)
    found = rnn(input[:, 0], h0, c0, weights, torch.zeros(0, dtype=torch.int64), **sample.keywords)
    assert found[0].shape == (0, 8)
    assert torch.equal(found[1], h0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SMALL, ids=str)
def test_saved_tensors_of_any_layout(sample: Sample, device: str):
    """What was saved may come back from a hook, moved to the CPU and back, say, in another layout."""
    found = []
    for unpack in (lambda t: t, lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0)):
        args = arguments(sample, device, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            outputs = rnn(*args, **sample.keywords)
            found.append(torch.autograd.grad(outputs[0].square().sum() + outputs[1].sum(), args.tensors))
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize("backward", ("persistent", "scan"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("device", DEVICES)
def test_activations_are_accurate(device: str, dtype: torch.dtype, backward: str):
    """tanh and sigmoid to a few units in the last place everywhere, relative to values that are tiny themselves."""
    size = torch.logspace(-30, 1.9, 2000, dtype=torch.float64).to(dtype).double()  # exp(-80) is still a normal float
    x = torch.cat([size, -size, torch.zeros(1), torch.full((1,), torch.inf), torch.full((1,), -torch.inf)])
    ones = torch.ones(4, 1, dtype=dtype, device=device)
    input = x.to(device, dtype).view(1, -1, 1)

    def close(found: Tensor, expected: Tensor) -> None:
        found = found.double().cpu()
        exact = found == expected
        # The exponent of exp(-x) is rounded: half a unit in its last place is |x| / 2 in the result's.
        bound = (8 + x.abs() / (1 if device == "cuda" else torch.inf)) * torch.finfo(dtype).eps
        assert (((found - expected) / expected).abs() < bound)[~exact].all()

    output = rnn(input, None, None, [ones[:1], 0 * ones[:1]], cell="rnn_tanh", backward=backward)[0]
    close(output.flatten(), torch.tanh(x))
    gates = rnn(input, None, None, [ones, 0 * ones], cell="lstm", save=True, backward=backward)[4]
    close(gates[0, :, 0], torch.sigmoid(x))
    close(gates[0, :, 2], torch.tanh(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", [s for s in SMALL if s.cell != "rnn_relu"], ids=str)  # whose graphs are tanh's
def test_opcheck(sample: Sample, device: str):
    """Of what the generic tests of operators do not call: gates that are saved, and the backward operator."""
    args = arguments(sample, device, requires_grad=True)
    plain = args.map(Tensor.detach)
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    if sample.cell != "gru" and "scan" not in str(sample):  # nor are a GRU's graphs others, or those of an algorithm
        tests = *tests, "test_aot_dispatch_dynamic"
    if not sample.bidirectional:
        torch.library.opcheck(rnn.default, tuple(plain), {**sample.keywords, "save": True}, test_utils=tests)
    saved = rnn(*plain, **sample.keywords, save=True)
    grads, which = gradients(sample, args), sample.differentiable
    arriving = [None if i not in which else grads[which.index(i)] for i in range(4)]
    count = len(args.operands)
    for inputs, mask in ((plain, [i % 3 != 0 for i in range(count)]), (args, [True] * count)):
        call = (*arriving, *inputs, saved[0], saved[3], saved[4]), {**sample.keywords, "output_mask": mask}
        if inputs is plain or sample.lengths is None:
            torch.library.opcheck(rnn_backward.default, *call, test_utils=tests[:3] if inputs is plain else tests)
        elif sample.cell != "gru":
            with pytest.raises(
                torch.testing._internal.optests.OpCheckError, match="packed input is differentiable once"
            ):
                torch.library.opcheck(rnn_backward.default, *call)


def as_function(sample: Sample, args: Arguments):
    """The op as a function of its operands, with its differentiable results."""

    def function(*tensors):
        outputs = rnn(*args.from_tensors(tensors), **sample.keywords, keep_cells=True)
        return tuple(outputs[i] for i in sample.differentiable)

    return function


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", GRADCHECK, ids=str)
def test_third_order(sample: Sample, device: str):
    def third(outputs, inputs):
        value = sum((o * o).sum() for o in outputs)
        for _ in range(2):
            grads = torch.autograd.grad(value, inputs, create_graph=True)
            value = sum((g * g * g).sum() for g in grads)
        return torch.autograd.grad(value, inputs)

    args = arguments(sample, device, requires_grad=True)
    exact = exact_arguments(args)
    outputs = reference(*exact, **sample.keywords)
    expected = third([outputs[i] for i in sample.differentiable], exact.tensors)
    found = third(as_function(sample, args)(*args.tensors), args.tensors)
    check_close(itertools.repeat("gradient"), found, expected, 1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", GRADCHECK, ids=str)
def test_backward_op_is_differentiable(sample: Sample, device: str):
    """Called by hand with arguments that require a gradient, the backward op answers with the right one."""
    args = arguments(sample, device, requires_grad=True)
    grads, which = [g.requires_grad_() for g in gradients(sample, args)], sample.differentiable
    arriving = [None if i not in which else grads[which.index(i)] for i in range(4)]
    outputs = rnn(*args, **sample.keywords)
    direct = rnn_backward(
        *arriving, *args, *(outputs[i].detach() for i in (0, 3, 4)), **sample.keywords,
        output_mask=[True] * len(args.operands),
    )  # fmt: skip
    direct = [d for d, t in zip(direct, args.operands, strict=True) if t is not None]
    through = torch.autograd.grad([outputs[i] for i in which], args.tensors, grads, create_graph=True)
    check_close(itertools.repeat("gradient"), direct, through, 1e-12)
    wanted = args.tensors + grads
    second = [torch.autograd.grad(sum((g * g).sum() for g in first), wanted) for first in (direct, through)]
    check_close(itertools.repeat("gradient"), *second, 1e-12)


@pytest.mark.parametrize("wanted", ("states", "all"))
@pytest.mark.parametrize("sample", SMALL, ids=str)
def test_vmap_of_the_backward(sample: Sample, wanted: str):
    """A vmap over torch.autograd.grad maps the backward op over the gradients that arrive, and so does its own
    is_grads_batched, in another way."""
    args = arguments(sample, "cpu", requires_grad=wanted == "all")
    inputs = args.tensors if wanted == "all" else [t.requires_grad_() for t in args.operands[:3] if t is not None]
    outputs = as_function(sample, args)(*args.tensors)
    grads = [torch.randn(3, *o.shape) for o in outputs]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = torch.func.vmap(lambda *g: torch.autograd.grad(outputs, inputs, g, retain_graph=True))(*grads)
        batched = torch.autograd.grad(outputs, inputs, grads, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        each = torch.autograd.grad(outputs, inputs, [g[i] for g in grads], retain_graph=True)
        for found in (mapped, batched):
            check_close(itertools.repeat("gradient"), [f[i] for f in found], each, 1e-6)


REPEATED_ON_CUDA = [
    Sample(c, 60, B, 8, H, dtype=dtype)
    for c, B, H, dtype in itertools.product(CELLS, (1, 20), (128, 512), (torch.float32, torch.bfloat16))
]


REPEATED_ON_CUDA += by_scan(Sample(c, 300, 5, 3, h) for c in CELLS for h in (20, 48, 64))


@pytest.mark.parametrize(("sample", "device"), with_devices([], REPEATED_ON_CUDA), ids=str)
def test_repeats_bit_for_bit(sample: Sample, device: str):
    args = arguments(sample, device, requires_grad=True)
    grads, which = gradients(sample, args), sample.differentiable

    def run():
        outputs = rnn(*args, **sample.keywords, keep_cells=True)
        found = [outputs[i] for i in which]
        return [*found, *(g for g in differentiate(found, args.operands, grads) if g is not None)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize(
    ("sample", "device"),
    with_devices(
        [Sample(c, 12, 6, 3, h) for c in CELLS for h in (7, 40)],
        [Sample(c, 12, 6, 3, 256) for c in CELLS] + by_scan(Sample(c, 12, 6, 3, h) for c in CELLS for h in (7, 20, 40)),
    ),
    ids=str,
)
def test_bad_row_touches_no_other(sample: Sample, device: str, value: float):
    row, others, which = 2, [0, 1, 3, 4, 5], sample.differentiable
    clean_args = arguments(sample, device)
    grads = gradients(sample, clean_args)

    def run(change_input: bool, change_grad: bool):
        args = clean_args.map(Tensor.clone)
        if change_input:
            args.input[4, row] = value
        args = args.map(lambda t: t.requires_grad_())
        changed = [g.clone() for g in grads]
        if change_grad:
            changed[0][7, row] = value
        outputs = rnn(*args, **sample.keywords, keep_cells=True)
        return outputs, differentiate([outputs[i] for i in which], args.operands, changed)

    clean, clean_grads = run(False, False)
    for change_input, change_grad in ((True, False), (False, True)):
        found, found_grads = run(change_input, change_grad)
        assert torch.equal(found[0][:, others], clean[0][:, others])
        assert torch.equal(found[0][:4, row], clean[0][:4, row])
        assert torch.equal(found_grads[0][:, others], clean_grads[0][:, others])
        assert torch.equal(found_grads[1][:, others], clean_grads[1][:, others])
        if change_input and value != value:
            assert found[0][4:, row].isnan().all()
        if change_grad:
            assert not found_grads[0][7, row].isfinite().all()
            assert torch.equal(found_grads[0][8:, row], clean_grads[0][8:, row])


@pytest.mark.cuda
@pytest.mark.slow
def test_operands_of_more_elements_than_one_product_takes():
    """1.1e9 gates: the products over all steps are cut along the steps. The halves of the batch are not."""
    T, B, H = 70_000, 64, 64
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, device="cuda").uniform_(-(H**-0.5), H**-0.5, generator=generator)

    weights = [w.requires_grad_() for w in (random(4 * H, 3), random(4 * H, H), random(4 * H), random(4 * H))]
    x, grad = random(T, B, 3), random(T, B, H)

    def step(half: slice) -> list[Tensor]:
        part = x[:, half].contiguous().requires_grad_()
        output = rnn(part, None, None, weights, None, cell="lstm")[0]
        return [output.detach(), *torch.autograd.grad(output, [part, *weights], grad[:, half].contiguous())]

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        whole, *halves = (step(half) for half in (slice(None), slice(0, B // 2), slice(B // 2, None)))
    for i, found in enumerate(whole):
        parts = [half[i] for half in halves]
        expected = torch.cat(parts, 1) if i < 2 else sum(parts)
        assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("tier", ("", "tier=grid group=16", "tier=grid group=64 cluster=2"))
@pytest.mark.parametrize("sample", [Sample(c, 200, 16, 8, 256) for c in CELLS], ids=str)
def test_two_streams_at_once(sample: Sample, tier: str, monkeypatch):
    """Calls that share the device neither wait for each other for ever nor mix their results."""
    monkeypatch.setenv("WEFT_RNN_GEOMETRY", tier)
    args = [arguments(sample, "cuda").map(lambda t, i=i: t * (1 + i)) for i in range(2)]
    with torch.no_grad():
        expected = [rnn(*a, **sample.keywords)[0] for a in args]
        streams = [torch.cuda.Stream() for _ in args]
        torch.cuda.synchronize()
        found = [[], []]
        for _ in range(5):
            for results, a, stream in zip(found, args, streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append(rnn(*a, **sample.keywords)[0])
        torch.cuda.synchronize()
    for results, e in zip(found, expected, strict=True):
        assert all(torch.equal(f, e) for f in results)


@pytest.mark.cuda
def test_what_a_cuda_graph_reads_goes_with_it():
    """The lengths of packed input are copied at every replay: they stay as long as the graph, and no longer."""
    sample = packed("gru", (30, 12, 5), 3, 64)
    static = arguments(sample, "cuda", requires_grad=True)

    def step():
        output = rnn(*static, **sample.keywords)[0]
        # A graph that lives on would keep its leaves on this stream, which a capture may not touch.
        return [output.detach(), *torch.autograd.grad(output.sum(), static.tensors)]

    expected = step()
    before = weft._C._testing.captured()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        assert weft._C._testing.captured() > before
        junk = [torch.full((1000,), 7, dtype=kind).pin_memory() for kind in (torch.int32, torch.int64)]
        graph.replay()
        torch.cuda.synchronize()
        for f, e in zip(found, expected, strict=True):
            assert torch.equal(f, e)
        del graph, found, junk
        torch.cuda.synchronize()
        for _ in range(100):  # the driver says so in its own time
            if weft._C._testing.captured() == before:
                break
            time.sleep(0.01)
        assert weft._C._testing.captured() == before
    step()


@pytest.mark.cuda
@pytest.mark.parametrize("cell", CELLS)
def test_more_steps_than_cudnn_takes(cell: str):
    sample = Sample(cell, 70000, 2, 1, 24)
    args = arguments(sample, "cuda")
    half = sample.T // 2
    with torch.no_grad():
        output, h_n, *_ = rnn(*args, **sample.keywords)
        first, middle, cell_state, *_ = rnn(args.input[:half], *list(args)[1:], **sample.keywords)
        state = (middle, cell_state if cell == "lstm" else None)
        second, last, *_ = rnn(args.input[half:], *state, *list(args)[3:], **sample.keywords)
    bound = BOUNDS[torch.float32]
    check_close(("first", "second", "h_n"), (first, second, last), (output[:half], output[half:], h_n), bound)
