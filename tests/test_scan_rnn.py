"""weft::scan_rnn and its backward: one table of samples against a plain fp64 loop and against torch.nn."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import weft  # noqa: F401  registers torch.ops.weft
from common import DEVICES, check_close, differentiate, poisoned, relative_error, with_devices, with_instructions
from hypothesis import given, strategies
from sequential import cell_step, check_chain, doubles
from torch import _VF, Tensor
from torch.autograd import gradcheck, gradgradcheck
from weft._rnn.torch_limits import why_not_onednn

scan_rnn = torch.ops.weft.scan_rnn
scan_rnn_backward = torch.ops.weft.scan_rnn_backward

CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
BLOCKS = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}
ARGUMENTS = ("input", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh")

# Norm of the difference over the norm. fp32 and fp64: rounding of some tens of steps. Half types: what is read and
# written is rounded (2^-11, 2^-8), and the gradient multiplies rounded activations once per step.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


@dataclass(frozen=True)
class Sample:
    cell: str
    T: int
    B: int
    I: int
    H: int
    reverse: bool = False
    bias: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        flags = ("-reverse" if self.reverse else "") + ("" if self.bias else "-nobias")
        return f"{self.cell}-T{self.T}-B{self.B}-I{self.I}-H{self.H}{flags}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def keywords(self) -> dict:
        return {"cell": self.cell, "reverse": self.reverse}


# T, B, I, H: one of everything; odd sizes on both sides of the vector widths; every row count of a register block;
# several chunks of the input projection; more inputs than a kernel takes; sizes where tensor cores or BLAS may take
# over; and each size 0.
SIZES = (
    (1, 1, 1, 1),
    (5, 3, 4, 7),
    (2, 9, 1, 8),
    (67, 16, 1, 20),
    (33, 5, 3, 33),
    (12, 7, 40, 49),
    (17, 2, 5, 64),
    (40, 6, 70, 32),
    (5, 4, 130, 20),
    (9, 13, 16, 130),
)
# Long enough for many chunks on CUDA, a number of steps that divides by the chunks' length and one that does not; every
# hidden size up to which a kernel is padded, and odd ones in between.
LONG = [
    Sample(cell, T, 1 + index % 3, 2, H, reverse=reverse, bias=index % 4 != 0)
    for index, (H, T, cell, reverse) in enumerate(
        itertools.product((8, 16, 20, 24, 32, 5, 13, 31), (1000, 3001), CELLS, (False, True))
    )
]
LONG += [Sample(cell, 1000, 3, 2, 20, dtype=dtype) for cell in CELLS for dtype in (torch.float16, torch.bfloat16)]
LONG_ON_CPU = [s for s in LONG if (s.H, s.T, s.reverse, s.dtype) == (13, 1000, True, torch.float32)]
# The kernels above 32 hidden units: every size that is padded to and odd ones in between.
MIDDLE_SIZES = {cell: (33, 48, 64) if cell == "lstm" else (33, 48, 64, 65, 96, 100, 128) for cell in CELLS}
EMPTY_SIZES = ((0, 2, 3, 4), (3, 0, 2, 4), (3, 2, 0, 4), (3, 2, 4, 0), (0, 0, 0, 0))

SAMPLES = [
    Sample(cell, *size, reverse=reverse, bias=(index + reverse) % 3 != 0)
    for cell, (index, size), reverse in itertools.product(CELLS, enumerate(SIZES, 1), (False, True))
]
SAMPLES += [
    Sample(cell, *size, reverse=reverse, dtype=dtype)
    for cell, size, reverse, dtype in itertools.product(
        CELLS, ((5, 3, 4, 7), (31, 9, 2, 20)), (False, True), (torch.float64, torch.float16, torch.bfloat16)
    )
]
SMALL = [Sample(cell, 4, 3, 2, 5, reverse=reverse) for cell in CELLS for reverse in (False, True)]


@pytest.fixture(autouse=True)
def _exact_fp32():
    """On CUDA the forward pass above 32 hidden units is torch's."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def force_chunks(monkeypatch, chunks: int) -> None:
    """The number of chunks of the CUDA kernels, whatever their model of costs says."""
    monkeypatch.setenv("WEFT_SCAN_RNN_CHUNKS", str(chunks))


def arguments(sample: Sample, device: str, scale: float = 1.0, requires_grad: bool = False) -> list[Tensor | None]:
    """Fresh inputs, uniform as torch.nn initialises; `scale` multiplies the recurrent weights."""
    generator = torch.Generator().manual_seed(hash((sample.T, sample.B, sample.I, sample.H)) % 2**31)
    rows, bound = BLOCKS[sample.cell] * sample.H, max(sample.H, 1) ** -0.5

    def make(*shape: int, uniform: bool = False, factor: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if uniform:
            values = (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * bound * factor
        return values.to(device, sample.dtype).requires_grad_(requires_grad)

    return [
        make(sample.T, sample.B, sample.I),
        make(1, sample.B, sample.H),
        make(1, sample.B, sample.H) if sample.cell == "lstm" else None,
        make(rows, sample.I, uniform=True),
        make(rows, sample.H, uniform=True, factor=scale),
        make(rows, uniform=True) if sample.bias else None,
        make(rows, uniform=True) if sample.bias else None,
    ]


def gradients(sample: Sample, device: str) -> list[Tensor | None]:
    """Random gradients for output, h_n and, for an lstm, c_n."""
    shapes = [(sample.T, sample.B, sample.H), *[(1, sample.B, sample.H)] * 2]
    grads = [torch.randn(shape, dtype=torch.float64).to(device, sample.dtype) for shape in shapes]
    return grads if sample.cell == "lstm" else [*grads[:2], None]


def reference(input, h0, c0, w_ih, w_hh, b_ih, b_hh, *, cell, reverse=False):
    """One step after another in plain torch: output, h_n, c_n (None except for lstm), gates, cells."""
    h, c = h0[0], None if c0 is None else c0[0]
    outputs, gates, cells = {}, {}, {}
    zero = torch.zeros((), dtype=input.dtype, device=input.device)
    steps = range(input.shape[0])
    for t in reversed(steps) if reverse else steps:
        a = input[t] @ w_ih.T + (zero if b_ih is None else b_ih)
        b = h @ w_hh.T + (zero if b_hh is None else b_hh)
        h, c, gates[t] = cell_step(cell, a, b, h, c)
        cells[t] = c
        outputs[t] = h

    def stacked(parts: dict[int, Tensor | None], width: int) -> Tensor:
        there = parts and parts[0] is not None
        return torch.stack([parts[t] for t in steps]) if there else input.new_empty(0, h0.shape[1], width)

    hidden = h0.shape[2]
    final = h[None], None if c is None else c[None]
    return stacked(outputs, hidden), *final, stacked(gates, 4 * hidden), stacked(cells, hidden)


KERNELS = {"rnn_tanh": _VF.rnn_tanh, "rnn_relu": _VF.rnn_relu, "gru": _VF.gru, "lstm": _VF.lstm}


def torchs(input, h0, c0, w_ih, w_hh, b_ih, b_hh, *, cell, reverse=False):
    """output, h_n[, c_n] of torch's own kernel, which takes far less time than the reference on long sequences."""
    hx = (h0, c0) if cell == "lstm" else h0
    weights = [w_ih, w_hh] if b_ih is None else [w_ih, w_hh, b_ih, b_hh]
    steps = input.flip(0) if reverse else input
    output, *states = KERNELS[cell](steps, hx, weights, b_ih is not None, 1, 0.0, True, False, False)
    return output.flip(0) if reverse else output, *states


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_matches_reference(sample: Sample, device: str):
    args = arguments(sample, device, requires_grad=True)
    exact = [None if a is None else a.requires_grad_() for a in doubles(args)]
    grads = gradients(sample, device)
    expected = reference(*exact, **sample.keywords)
    with poisoned():
        found = scan_rnn(*args, **sample.keywords)
        found_grads = differentiate(found[:3], args, grads)
    bound = BOUNDS[sample.dtype]
    states = 3 if sample.cell == "lstm" else 2
    assert all(f.dtype == sample.dtype for f in found[:3])
    check_close(("output", "h_n", "c_n"), found[:states], expected[:states], bound)
    expected_grads = differentiate(expected[:3] if states == 3 else (*expected[:2], exact[1]), exact, doubles(grads))
    check_close(ARGUMENTS, found_grads, expected_grads, bound)


@pytest.mark.parametrize(
    ("sample", "device"), with_devices(LONG_ON_CPU, [s for s in LONG if s not in LONG_ON_CPU]), ids=str
)
def test_long_sequences(sample: Sample, device: str):
    args, grads = arguments(sample, device, requires_grad=True), gradients(sample, device)
    exact = [None if a is None else a.detach().double().requires_grad_() for a in args]
    states = 3 if sample.cell == "lstm" else 2
    expected = torchs(*exact, **sample.keywords)
    with poisoned():
        found = scan_rnn(*args, **sample.keywords)
        found_grads = differentiate(found[:3], args, grads)
    check_close(("output", "h_n", "c_n"), found[:states], expected, BOUNDS[sample.dtype])
    expected_grads = differentiate(expected, exact, [g.double() for g in grads[:states]])
    check_close(ARGUMENTS, found_grads, expected_grads, BOUNDS[sample.dtype])


# One chunk; chunks that divide the steps and that do not; more products than half of the device's SMs, below which each
# is split over two blocks; and as many chunks as the model of costs says.
@pytest.mark.cuda
@pytest.mark.parametrize(("T", "B", "chunks"), [(50, 2, 1), (50, 1, 5), (203, 3, 4), (400, 5, 40), (1001, 1, 0)])
@pytest.mark.parametrize(("cell", "H"), [(cell, H) for cell, sizes in MIDDLE_SIZES.items() for H in sizes])
def test_middle_sizes(cell: str, H: int, T: int, B: int, chunks: int, monkeypatch):
    if chunks:
        force_chunks(monkeypatch, chunks)
    for reverse in (False, True):
        test_long_sequences(Sample(cell, T, B, 3, H, reverse=reverse, bias=B % 2 == 0), "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("cell", CELLS)
def test_middle_sizes_in_half(cell: str, dtype: torch.dtype, monkeypatch):
    force_chunks(monkeypatch, 7)
    for H in MIDDLE_SIZES[cell][::2]:
        test_long_sequences(Sample(cell, 200, 3, 2, H, reverse=H == 48, dtype=dtype), "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("cell", CELLS)
def test_middle_sizes_on_very_long_sequences(cell: str):
    test_long_sequences(Sample(cell, 5000, 2, 2, MIDDLE_SIZES[cell][-1]), "cuda")


def samples(longest: int) -> strategies.SearchStrategy[Sample]:
    return strategies.builds(
        Sample,
        cell=strategies.sampled_from(CELLS),
        T=strategies.integers(0, longest),
        B=strategies.integers(0, 20),
        I=strategies.integers(0, 6),
        H=strategies.integers(1, 70),
        reverse=strategies.booleans(),
        bias=strategies.booleans(),
        dtype=strategies.sampled_from([torch.float32, torch.float64]),
    )


@given(sample=samples(9))
def test_any_shape(sample: Sample):
    test_matches_reference(sample, "cpu")


@pytest.mark.cuda
@given(sample=samples(200))
def test_any_shape_on_cuda(sample: Sample):
    test_matches_reference(sample, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", [replace(s, H=h, dtype=torch.float64) for s in SMALL for h in (5, 40)], ids=str)
def test_saved_activations(sample: Sample, device: str):
    args = arguments(sample, device)
    expected = reference(*doubles(args), **sample.keywords)
    for save in (False, True):
        found = scan_rnn(*args, **sample.keywords, save=save)
        has_gates, has_cells = sample.cell in ("gru", "lstm"), sample.cell == "lstm"
        assert has_cells or found[2].shape == (0,)
        for f, e, there in zip(found[3:], expected[3:], (has_gates, has_cells), strict=True):
            assert f.shape == (e.shape if save and there else (0,))
            if save and there:
                assert relative_error(f, e) < 1e-13


@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_matches_torch_nn(cell: str, device: str, reverse: bool):
    T, B, I, H = 40, 6, 3, 20
    kinds = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}
    module = kinds[cell](I, H) if cell in kinds else torch.nn.RNN(I, H, nonlinearity=cell.removeprefix("rnn_"))
    module = module.to(device, torch.float64)
    x, h0, c0 = (torch.randn(*s, device=device, dtype=torch.float64) for s in ((T, B, I), (1, B, H), (1, B, H)))
    flip = (lambda t: t.flip(0)) if reverse else (lambda t: t)
    output, state = module(flip(x), (h0, c0) if cell == "lstm" else h0)
    state = state if cell == "lstm" else (state,)
    c = c0 if cell == "lstm" else None
    found = scan_rnn(x, h0, c, *(p.detach() for p in module.parameters()), cell=cell, reverse=reverse)
    check_close(("output", "h_n", "c_n"), found[: 1 + len(state)], (flip(output), *state), 1e-12)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("device", DEVICES)
def test_activations_are_accurate(device: str, dtype: torch.dtype):
    """tanh and sigmoid to a few units in the last place everywhere, relative to values that are tiny themselves."""
    size = torch.logspace(-30, 1.9, 2000, dtype=torch.float64).to(dtype).double()  # exp(-80) is still a normal float
    x = torch.cat([size, -size, torch.zeros(1), torch.full((1,), torch.inf), torch.full((1,), -torch.inf)])
    ones = torch.ones(4, 1, dtype=dtype, device=device)
    args = (x.to(device, dtype).view(1, -1, 1), torch.zeros(1, len(x), 1, dtype=dtype, device=device))

    def close(found: Tensor, expected: Tensor) -> None:
        found = found.double().cpu()
        exact = found == expected
        # The exponent of exp(-x) is rounded: half a unit in its last place is |x| / 2 in the result's.
        bound = (8 + x.abs() / (1 if device == "cuda" else torch.inf)) * torch.finfo(dtype).eps
        assert (((found - expected) / expected).abs() < bound)[~exact].all()

    output = scan_rnn(*args, None, ones[:1], 0 * ones[:1], None, None, cell="rnn_tanh")[0]
    close(output.flatten(), torch.tanh(x))
    gates = scan_rnn(*args, args[1], ones, 0 * ones, None, None, cell="lstm", save=True)[3]
    close(gates[0, :, 0], torch.sigmoid(x))
    close(gates[0, :, 2], torch.tanh(x))


@pytest.mark.parametrize(
    ("sample", "device"),
    with_devices(
        [Sample(c, 23, 4, 3, 20, reverse=r) for c in CELLS for r in (False, True)],
        [Sample(c, 60, 3, 3, MIDDLE_SIZES[c][-1]) for c in CELLS],
    ),
    ids=str,
)
def test_gradients_of_some_outputs(sample: Sample, device: str, monkeypatch):
    if sample.H > 32:
        force_chunks(monkeypatch, 4)
    args = arguments(sample, device, requires_grad=True)
    exact = [None if a is None else a.requires_grad_() for a in doubles(args)]
    expected = reference(*exact, **sample.keywords)[:3]
    found = scan_rnn(*args, **sample.keywords)[:3]
    grads = gradients(sample, device)
    for only in range(3 if sample.cell == "lstm" else 2):
        some = [g if i == only else None for i, g in enumerate(grads)]
        f = torch.autograd.grad(found[only], [a for a in args if a is not None], some[only], retain_graph=True)
        e = torch.autograd.grad(
            expected[only], [a for a in exact if a is not None], doubles(some)[only], retain_graph=True
        )
        check_close([n for n, a in zip(ARGUMENTS, args, strict=True) if a is not None], f, e, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", SMALL, ids=str)
def test_gradients_of_some_inputs(sample: Sample, device: str):
    """Each argument alone asks for a gradient, and the others cost nothing and get none."""
    all_args = arguments(sample, device, requires_grad=True)
    grads = gradients(sample, device)
    expected = differentiate(scan_rnn(*all_args, **sample.keywords)[:3], all_args, grads)
    for index, argument in enumerate(all_args):
        if argument is None:
            continue
        args = [a if a is None else a.detach().requires_grad_(i == index) for i, a in enumerate(all_args)]
        found = scan_rnn(*args, **sample.keywords)
        pairs = [(o, g) for o, g in zip(found[:3], grads, strict=True) if g is not None]
        (grad,) = torch.autograd.grad([o for o, _ in pairs], [args[index]], [g for _, g in pairs])
        check_close((ARGUMENTS[index],), (grad,), (expected[index],), 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", EMPTY_SIZES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_empty(cell: str, size: tuple[int, ...], device: str):
    for reverse in (False, True):
        sample = Sample(cell, *size, reverse=reverse)
        args = arguments(sample, device, requires_grad=True)
        exact = [None if a is None else a.requires_grad_() for a in doubles(args)]
        expected, found = reference(*exact, **sample.keywords), scan_rnn(*args, **sample.keywords)
        states = 3 if cell == "lstm" else 2
        check_close(("output", "h_n", "c_n"), found[:states], expected[:states], 1e-6)
        if sample.T == 0:
            assert torch.equal(found[1], args[1])
            check_no_sharing(sample, args)
        grads = gradients(sample, device)
        found_grads = differentiate(found[:3], args, grads)
        total = sum((o * g).sum() for o, g in zip(expected[:states], doubles(grads), strict=False))
        wanted = [a for a in exact if a is not None]
        expected_grads = iter(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))
        check_close(ARGUMENTS, found_grads, [None if a is None else next(expected_grads) for a in exact], 1e-5)


def check_no_sharing(sample: Sample, args: list[Tensor | None]) -> None:
    """No result of the backward op has the memory of an argument, differentiable or not."""
    grads = gradients(sample, args[0].device.type)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            output, _, _, gates, cells = (t.detach() for t in scan_rnn(*args, **sample.keywords, save=True))
            found = scan_rnn_backward(*grads, *args, output, gates, cells, **sample.keywords, output_mask=[True] * 7)
        given = {t.data_ptr() for t in (*grads, *args) if t is not None and t.numel() > 0}
        assert not given & {t.data_ptr() for t in found if t.numel() > 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", [replace(s, H=h) for s in SMALL for h in (5, 40)], ids=str)
def test_layouts(sample: Sample, device: str):
    """Transposed, strided, expanded and offset arguments and gradients."""
    args = arguments(sample, device)
    grads = gradients(sample, device)
    grads[0] = grads[0][:1].expand_as(grads[0])

    def strided(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        wide = torch.full([2 * s + 1 for s in t.shape], float("nan"), dtype=t.dtype, device=t.device)
        view = wide[tuple(slice(1, None, 2) for _ in t.shape)]
        view.copy_(t)
        return view

    def transposed(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.movedim(0, -1).contiguous().movedim(-1, 0)

    def run(change):
        inputs = [None if a is None else change(a).detach().requires_grad_() for a in args]
        outputs = scan_rnn(*inputs, **sample.keywords)[:3]
        some = [g if i == 0 else change(g) for i, g in enumerate(grads)]
        return [*outputs, *differentiate(outputs, inputs, some)]

    expected = run(lambda t: t)
    for change in (strided, transposed):
        for f, e in zip(run(change), expected, strict=True):
            assert (f is None and e is None) or relative_error(f, e) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("cell", CELLS)
def test_saved_tensors_of_any_layout(cell: str, reverse: bool, device: str):
    """What was saved may come back from a hook, moved to the CPU and back, say, in another layout."""
    sample = Sample(cell, 7, 3, 2, 5, reverse=reverse)
    found = []
    for unpack in (lambda t: t, lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0)):
        inputs = arguments(sample, device, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            outputs = scan_rnn(*inputs, **sample.keywords)
            wanted = [a for a in inputs if a is not None]
            found.append(torch.autograd.grad(outputs[0].square().sum() + outputs[1].sum(), wanted))
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("cell", CELLS)
def test_opcheck(cell: str, bias: bool, device: str):
    sample = Sample(cell, 3, 2, 2, 40 if bias else 4, bias=bias, reverse=bias)
    args = arguments(sample, device, requires_grad=True)
    torch.library.opcheck(scan_rnn.default, tuple(args), sample.keywords)
    plain = [None if a is None else a.detach() for a in args]
    torch.library.opcheck(scan_rnn.default, tuple(plain), {**sample.keywords, "save": True})
    output, _, _, gates, cells = scan_rnn(*plain, **sample.keywords, save=True)
    for inputs, mask in (
        (plain, [True] * 7),
        (plain, [True, False, True, False, True, False, True]),
        (args, [True] * 7),
    ):
        torch.library.opcheck(
            scan_rnn_backward.default,
            (*gradients(sample, device), *inputs, output, gates, cells),
            {**sample.keywords, "output_mask": mask},
        )


GRADCHECK = [
    Sample(cell, 3, 2, 2, 3, reverse=reverse, bias=not reverse, dtype=torch.float64)
    for cell, reverse in itertools.product(CELLS, (False, True))
]


def as_function(sample: Sample):
    """The op as a function of those of its arguments that are tensors, with its differentiable results."""
    present = [name != "c0" or sample.cell == "lstm" for name in ARGUMENTS]
    present[5:] = [sample.bias] * 2

    def function(*tensors):
        rest = iter(tensors)
        outputs = scan_rnn(*(next(rest) if there else None for there in present), **sample.keywords)
        return outputs[: 3 if sample.cell == "lstm" else 2]

    return function


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", GRADCHECK, ids=str)
def test_gradcheck(sample: Sample, device: str):
    tensors = [a for a in arguments(sample, device, requires_grad=True) if a is not None]
    assert gradcheck(as_function(sample), tensors)
    assert gradgradcheck(as_function(sample), tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", GRADCHECK, ids=str)
def test_third_order(sample: Sample, device: str):
    def third(outputs, inputs):
        value = sum((o * o).sum() for o in outputs)
        for _ in range(2):
            grads = torch.autograd.grad(value, inputs, create_graph=True)
            value = sum((g * g * g).sum() for g in grads)
        return torch.autograd.grad(value, inputs)

    args = [a for a in arguments(sample, device, requires_grad=True) if a is not None]
    exact = [None if a is None else a.requires_grad_() for a in doubles(arguments(sample, device))]
    states = 3 if sample.cell == "lstm" else 2
    expected = third(reference(*exact, **sample.keywords)[:states], [a for a in exact if a is not None])
    found = third(as_function(sample)(*args), args)
    check_close(itertools.repeat("gradient"), found, expected, 1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", GRADCHECK, ids=str)
def test_backward_op_is_differentiable(sample: Sample, device: str):
    """Called by hand with arguments that require a gradient, the backward op answers with the right one."""
    args = arguments(sample, device, requires_grad=True)
    grads = [None if g is None else g.requires_grad_() for g in gradients(sample, device)]
    tensors = [a for a in args if a is not None]
    outputs = scan_rnn(*args, **sample.keywords)
    direct = scan_rnn_backward(
        *grads, *args, *(outputs[i].detach() for i in (0, 3, 4)), **sample.keywords, output_mask=[True] * 7
    )
    direct = [d for d, a in zip(direct, args, strict=True) if a is not None]
    through = torch.autograd.grad(
        outputs[: 3 if sample.cell == "lstm" else 2], tensors, [g for g in grads if g is not None], create_graph=True
    )
    check_close(itertools.repeat("gradient"), direct, through, 1e-12)
    wanted = tensors + [g for g in grads if g is not None]
    second = [torch.autograd.grad(sum((g * g).sum() for g in first), wanted) for first in (direct, through)]
    check_close(itertools.repeat("gradient"), *second, 1e-12)


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_compile(cell: str, device: str, dynamic: bool):
    # Inductor itself compiles C++ for minutes on a CPU; what is of interest here ends where it starts.
    backend = "inductor" if device == "cuda" else "aot_eager"
    torch._dynamo.reset()

    def function(*args):
        output, h_n, c_n, _, _ = scan_rnn(*args, cell=cell)
        return output.sin(), h_n, c_n

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for T in (4, 7) if dynamic else (4,):
        sample = Sample(cell, T, 3, 2, 8)
        args, grads = arguments(sample, device, requires_grad=True), gradients(sample, device)
        expected, found = function(*args), compiled(*args)
        check_close(("output", "h_n", "c_n"), found, expected, 1e-6)
        check_close(ARGUMENTS, differentiate(found, args, grads), differentiate(expected, args, grads), 1e-5)
        with torch.no_grad():
            check_close(("output", "h_n", "c_n"), compiled(*args), expected, 1e-6)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_autocast(cell: str, device: str, dtype: torch.dtype):
    if device == "cpu" and dtype == torch.float16:
        dtype = torch.float32  # fp16 autocast on a CPU is not what torch.nn's layers support: nothing enabled instead
    sample = Sample(cell, 9, 3, 4, 8)
    args = arguments(sample, device, requires_grad=True)
    kinds = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}
    module = (kinds[cell](4, 8) if cell in kinds else torch.nn.RNN(4, 8, nonlinearity=cell[4:])).to(device)
    grads = gradients(sample, device)
    expected = scan_rnn(*args, **sample.keywords)
    expected_grads = differentiate(expected[:3], args, grads)
    with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
        # torch's LSTM does not run on every processor; where it does, in autocast's dtype.
        cannot = (cell, device) == ("lstm", "cpu") and dtype != torch.float32 and why_not_onednn(dtype)
        kind = dtype if cannot else module(args[0].detach())[0].dtype
        found = scan_rnn(*args, **sample.keywords)
        assert found[0].dtype == found[1].dtype == kind
        some = [None if g is None else g.to(kind) for g in grads]
        found_grads = differentiate(found[:3], args, some)
    assert all(g is None or g.dtype == torch.float32 for g in found_grads)
    check_close(ARGUMENTS, found_grads, expected_grads, BOUNDS[torch.bfloat16])
    with torch.autocast(device, dtype=torch.bfloat16):
        exact = scan_rnn(*(None if a is None else a.double() for a in args), **sample.keywords)
        assert exact[0].dtype == torch.float64
    assert relative_error(exact[0], expected[0]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_vmap(cell: str, device: str):
    sample = Sample(cell, 5, 3, 2, 4)
    many = [arguments(sample, device) for _ in range(3)]
    shared = many[0]
    for index, other in enumerate(many):
        for name, argument in enumerate(other):
            if argument is not None and name >= 3:
                other[name] = argument + index

    def run(*tensors):
        return scan_rnn(*tensors, **sample.keywords)[: 3 if cell == "lstm" else 2]

    def stacked(index: int, dim: int) -> Tensor | None:
        return None if shared[index] is None else torch.stack([m[index] * (1 + i) for i, m in enumerate(many)], dim)

    # Mapped: input and states over shared weights; only h0; everything, weights included.
    for dims in ((0, 1, 0, None, None, None, None), (None, 0, None, None, None, None, None), (2, 0, 1, 0, 1, 0, 1)):
        dims = [None if shared[i] is None else d for i, d in enumerate(dims)]
        batched = [shared[i] if d is None else stacked(i, d) for i, d in enumerate(dims)]
        found = torch.func.vmap(run, in_dims=tuple(dims))(*batched)
        for i in range(3):
            each = run(*(b if d is None else b.select(d, i) for b, d in zip(batched, dims, strict=True)))
            check_close(("output", "h_n", "c_n")[: len(each)], [f[i] for f in found], each, 1e-6)


def test_vmap_of_the_backward():
    """torch.autograd.grad(is_grads_batched=True) maps the backward op over the gradients."""
    sample = Sample("gru", 4, 3, 2, 5)
    args = [a for a in arguments(sample, "cpu", requires_grad=True) if a is not None]
    output = as_function(sample)(*args)[0]
    grads = torch.randn(3, *output.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.autograd.grad(output, args, grads, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        each = torch.autograd.grad(output, args, grads[i], retain_graph=True)
        check_close(itertools.repeat("gradient"), [f[i] for f in found], each, 1e-6)


@pytest.mark.parametrize(
    ("sample", "device"),
    with_devices(
        [Sample(c, 200, 17, 3, 20) for c in CELLS],
        [Sample(c, 300, 5, 3, h) for c in CELLS for h in MIDDLE_SIZES[c][2::2]],
    ),
    ids=str,
)
def test_repeats_bit_for_bit(sample: Sample, device: str, monkeypatch):
    if sample.H > 32:
        force_chunks(monkeypatch, 20)
    args, grads = arguments(sample, device, requires_grad=True), gradients(sample, device)

    def run():
        outputs = scan_rnn(*args, **sample.keywords)[:3]
        return [*outputs, *(g for g in differentiate(outputs, args, grads) if g is not None)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize(
    ("sample", "device"),
    with_devices(
        [Sample(c, 12, 6, 3, h) for c in CELLS for h in (7, 20, 40)],
        [Sample(c, 60, 6, 3, MIDDLE_SIZES[c][-1]) for c in CELLS],
    ),
    ids=str,
)
def test_bad_row_touches_no_other(sample: Sample, device: str, value: float, monkeypatch):
    if sample.T == 60:
        force_chunks(monkeypatch, 5)
    grads = gradients(sample, device)
    row, others = 2, [0, 1, 3, 4, 5]

    def run(change_input: bool, change_grad: bool):
        args = arguments(sample, device)
        if change_input:
            args[0][4, row] = value
        args = [None if a is None else a.requires_grad_() for a in args]
        changed = [None if g is None else g.clone() for g in grads]
        if change_grad:
            changed[0][7, row] = value
        outputs = scan_rnn(*args, **sample.keywords)[:3]
        return outputs, differentiate(outputs, args, changed)

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


@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("scale", (3.0, 10.0))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_chaotic_weights(cell: str, device: str, scale: float, reverse: bool):
    """Recurrent weights that make the state chaotic and products of Jacobians overflow.

    Two runs of a chaotic map part after some tens of steps whatever the precision, so the forward is compared one step
    at a time, from the op's own state before. Given the saved activations the backward is linear: it is compared with a
    sequential loop over the same activations, and has to be finite wherever that loop is in the same precision.
    """
    check_chaotic(Sample(cell, 10000 if not reverse else 1000, 3, 2, 20, reverse=reverse), device, scale)


@pytest.mark.cuda
@pytest.mark.parametrize("H", (20, 40))
def test_chunks_can_be_forced(H: int, monkeypatch):
    """The tests that ask for chunks get them; what is no number is refused."""
    sample = Sample("gru", 50, 3, 2, H)

    def forms_products(chunks: int) -> bool:
        force_chunks(monkeypatch, chunks)
        args = arguments(sample, "cuda", requires_grad=True)
        output = scan_rnn(*args, **sample.keywords, save=True)[0]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            output.sum().backward()
        return any("product" in event.key for event in profile.key_averages())

    assert not forms_products(1)
    assert forms_products(5)
    monkeypatch.setenv("WEFT_SCAN_RNN_CHUNKS", "many")
    args = arguments(sample, "cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="WEFT_SCAN_RNN_CHUNKS"):
        scan_rnn(*args, **sample.keywords, save=True)[0].sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize(("H", "chunks"), ((20, 1), (20, 9), (40, 1), (40, 9)))
def test_relu_drops_what_is_not_finite(H: int, chunks: int, monkeypatch):
    """A unit that is off lets nothing through, however the steps are cut."""
    force_chunks(monkeypatch, chunks)
    sample = Sample("rnn_relu", 90, 2, 2, H, bias=False)
    x, h0, _, w_ih, w_hh, *_ = (None if a is None else a.abs() for a in arguments(sample, "cuda"))
    w_ih[0].neg_()  # with positive input and no recurrent weight unit 0 is off
    w_hh[0].zero_()
    w_hh.mul_(0.1)
    leaves = [t.requires_grad_() for t in (x, h0, w_ih)]
    _, h_n, *_ = scan_rnn(x, h0, None, w_ih, w_hh, None, None, **sample.keywords, save=True)
    assert (h_n[..., 0] == 0).all()
    grad = torch.ones_like(h_n)
    grad[..., 0] = torch.inf
    for found in torch.autograd.grad(h_n, leaves, grad):
        assert found.isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("cell", CELLS)
def test_middle_sizes_with_torchs_defaults(cell: str, monkeypatch):
    """With TF32 where torch uses it, as it does by default, gradients are right within TF32's digits."""
    force_chunks(monkeypatch, 6)
    sample = Sample(cell, 300, 4, 8, 64)
    args = arguments(sample, "cuda", requires_grad=True)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        output, h_n, *_ = scan_rnn(*args, **sample.keywords, save=True)
        found = torch.autograd.grad(output.sum() + h_n.sum(), [a for a in args if a is not None])
    exact = [None if a is None else a.detach().double().cpu().requires_grad_() for a in args]
    result = reference(*exact, cell=cell)
    expected = torch.autograd.grad(result[0].sum() + result[1].sum(), [a for a in exact if a is not None])
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.double().cpu() - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.cuda
@pytest.mark.parametrize(("T", "B"), [(90000, 64), (24000, 128)])
def test_a_sequence_longer_than_cudnn_takes(T, B):
    """More steps than cuDNN takes in one call, and 2^31 activations of gates; and more values than it takes alone."""
    sample = Sample("gru", T, B, 1, 128)
    args = arguments(sample, "cpu")
    args = [None if a is None else a.cuda() for a in args]
    half = sample.T // 2
    with torch.no_grad():
        output, h_n, *_ = scan_rnn(*args, **sample.keywords)
        first, middle, *_ = scan_rnn(args[0][:half], *args[1:], **sample.keywords)
        second, last, *_ = scan_rnn(args[0][half:], middle, *args[2:], **sample.keywords)
    assert torch.equal(output[:half], first) and torch.equal(output[half:], second) and torch.equal(h_n, last)


@pytest.mark.cuda
@pytest.mark.parametrize("scale", (3.0, 10.0))
@pytest.mark.parametrize(("cell", "H"), [(cell, H) for cell, sizes in MIDDLE_SIZES.items() for H in sizes])
def test_chaotic_weights_at_middle_sizes(cell: str, H: int, scale: float, monkeypatch):
    force_chunks(monkeypatch, 24)
    check_chaotic(Sample(cell, 2000 if H == 64 else 500, 2, 2, H, reverse=H == 96), "cuda", scale)


def check_chaotic(sample: Sample, device: str, scale: float) -> None:
    cell, reverse = sample.cell, sample.reverse
    args = arguments(sample, device, scale=scale)
    output, _, _, gates, cells = scan_rnn(*args, **sample.keywords, save=True)

    # All steps at once: each is a sequence of one step in the batch.
    def before(states: Tensor, first: Tensor) -> Tensor:
        return torch.cat([states[1:], first] if reverse else [first, states[:-1]]).flatten(0, 1)[None]

    state = before(output, args[1])
    cell_state = before(cells, args[2]) if cell == "lstm" else None
    step = doubles([args[0].flatten(0, 1)[None], state, cell_state, *args[3:]])
    expected = reference(*step, cell=cell)[0][0].view(output.shape)
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
        args[0] = args[0][:kept] if not reverse else args[0][-kept:]
        sample = replace(sample, T=kept)
        output, _, _, gates, cells = scan_rnn(*args, **sample.keywords, save=True)
        assert kept > 5 and output.isfinite().all()

    everywhere = gradients(sample, device)
    for grads in (everywhere, [None, *everywhere[1:]]):
        found = scan_rnn_backward(
            *grads, *args, output, gates, cells, **sample.keywords, output_mask=[True, True, True, *[False] * 4]
        )
        check_chain(found, grads, args, (output, gates, cells), **sample.keywords)


@pytest.mark.cuda
@pytest.mark.parametrize("sample", [Sample(c, 64, 5, 3, h) for c in CELLS for h in (20, 64)], ids=str)
def test_side_stream(sample: Sample):
    """On a stream of its own, behind work that is still running there."""
    args, grads = arguments(sample, "cuda"), gradients(sample, "cuda")
    plain = [None if a is None else a.clone().requires_grad_() for a in args]
    outputs = scan_rnn(*plain, **sample.keywords)[:3]
    expected = [*outputs, *differentiate(outputs, plain, grads)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [None if a is None else torch.full_like(a, float("nan")) for a in args]
        torch.cuda._sleep(20_000_000)
        for to, a in zip(late, args, strict=True):
            if a is not None:
                to.copy_(a).requires_grad_()
        outputs = scan_rnn(*late, **sample.keywords)[:3]
        found = [*outputs, *differentiate(outputs, late, grads)]
    torch.cuda.current_stream().wait_stream(stream)
    for f, e in zip(found, expected, strict=True):
        assert (f is None and e is None) or torch.equal(f, e)


@pytest.mark.cuda
@pytest.mark.parametrize("sample", [Sample(c, 64, 5, 3, h) for c in CELLS for h in (20, 64)], ids=str)
def test_cuda_graph(sample: Sample, monkeypatch):
    """Captured once, replayed on other data: forward and backward."""
    if sample.H > 32:
        force_chunks(monkeypatch, 6)
    static = arguments(sample, "cuda", requires_grad=True)
    grads = gradients(sample, "cuda")

    def step():
        outputs = scan_rnn(*static, **sample.keywords)[:3]
        return [*outputs, *differentiate(outputs, static, grads)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in static[:1] + static[3:]:
            if tensor is not None:
                tensor.normal_().mul_(0.3)
    graph.replay()
    torch.cuda.synchronize()
    found = [None if c is None else c.clone() for c in captured]
    for f, e in zip(found, step(), strict=True):
        assert (f is None and e is None) or torch.equal(f, e)


@pytest.mark.cuda
@pytest.mark.parametrize("scale", (3.0, 10.0))
@pytest.mark.parametrize("H", (20, 64))
@pytest.mark.parametrize("cell", CELLS)
def test_cuda_graph_with_chaotic_weights(cell: str, H: int, scale: float, monkeypatch):
    """Captured with tame weights, replayed with chaotic ones: the replay decides which chunks are computed again."""
    sample = Sample(cell, 3001 if H == 20 else 600, 3, 2, H)
    if H > 32:
        force_chunks(monkeypatch, 12)
    static, grads = arguments(sample, "cuda"), gradients(sample, "cuda")
    mask = [True] * 7

    def step():
        outputs = scan_rnn(*static, **sample.keywords, save=True)
        saved = [outputs[i] for i in (0, 3, 4)]
        return [*outputs, *scan_rnn_backward(*grads, *static, *saved, **sample.keywords, output_mask=mask)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for to, new in zip(static, arguments(sample, "cuda", scale=scale), strict=True):
            if to is not None:
                to.copy_(new)
        static[0].normal_()
        graph.replay()
        torch.cuda.synchronize()
        found = [c.clone() for c in captured]
        for f, e in zip(found, step(), strict=True):
            # A ReLU net's state overflows: the same NaNs, then.
            torch.testing.assert_close(f, e, rtol=0, atol=0, equal_nan=True)
        if cell != "rnn_relu":
            check_chain(found[5:8], grads, static, [found[i] for i in (0, 3, 4)], **sample.keywords)


@pytest.mark.cuda(devices=2)
def test_second_device():
    """Runs where its arguments are, whatever the current device."""
    device = "cuda:1"
    sample = Sample("gru", 30, 4, 2, 20)
    args = arguments(sample, device, requires_grad=True)
    with torch.cuda.device(0):
        output = scan_rnn(*args, **sample.keywords)[0]
        grads = torch.autograd.grad(output.sum(), [a for a in args if a is not None])
    assert all(t.device == torch.device(device) for t in (output, *grads))
    exact = doubles(args)
    assert relative_error(output, reference(*exact, **sample.keywords)[0]) < 1e-5


@pytest.mark.parametrize("capability", ("default", "avx2"))
def test_lower_instruction_sets(capability: str):
    """The kernels for older processors, chosen by torch's own switch, in a process of their own."""
    with_instructions(capability, __file__, "test_matches_reference and cpu")


def bad(name: str, **change):
    return pytest.param(change, id=name)


GOOD = Sample("gru", 4, 3, 2, 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cell", "change", "exception", "message"),
    [
        (
            "gru",
            {"cell": "elman"},
            ValueError,
            r"cell must be one of 'rnn_tanh', 'rnn_relu', 'gru', 'lstm', got 'elman'",
        ),
        ("gru", {"input": lambda t: t[0]}, ValueError, r"scan_rnn: input must be \(T, B, I\), got 2 dimensions"),
        ("gru", {"h0": lambda t: t[0]}, ValueError, r"h0 must be \(1, B, H\), got 2 dimensions"),
        ("gru", {"h0": lambda t: t[:, :2]}, ValueError, r"h0 must be \(1, B, H\) = \[1, 3, 5\], got \[1, 2, 5\]"),
        ("gru", {"w_ih": lambda t: t[0]}, ValueError, r"w_ih must be \(G\*H, I\), got 1 dimension"),
        ("gru", {"w_ih": lambda t: t[:, :1]}, ValueError, r"w_ih must be \(G\*H, I\) = \[15, 2\], got \[15, 1\]"),
        ("lstm", {"w_hh": lambda t: t[:15]}, ValueError, r"w_hh must be \(G\*H, H\) = \[20, 5\], got \[15, 5\]"),
        ("gru", {"b_ih": lambda t: t[:-1]}, ValueError, r"b_ih must be \(G\*H\) = \[15\], got \[14\]"),
        ("gru", {"b_hh": lambda t: t[None]}, ValueError, r"b_hh must be \(G\*H\) = \[15\], got \[1, 15\]"),
        (
            "gru",
            {"b_hh": lambda t: None},
            ValueError,
            r"b_ih and b_hh must both be given or both be None, got only b_ih",
        ),
        ("gru", {"b_ih": lambda t: None}, ValueError, r"both be None, got only b_hh"),
        ("lstm", {"c0": lambda t: None}, ValueError, r"c0 must be \(1, B, H\) for lstm, got None"),
        ("lstm", {"c0": lambda t: t[..., :2]}, ValueError, r"c0 must be \(1, B, H\) = \[1, 3, 5\], got \[1, 3, 2\]"),
        ("gru", {"c0": lambda t: torch.zeros(1, 3, 5)}, ValueError, r"c0 must be None except for lstm, got a tensor"),
        (
            "gru",
            {"input": lambda t: t.int()},
            TypeError,
            r"input must be float16, bfloat16, float32 or float64, got Int",
        ),
        ("gru", {"w_hh": lambda t: t.double()}, TypeError, r"w_hh must have the dtype of input, Float, got Double"),
        ("lstm", {"c0": lambda t: t.half()}, TypeError, r"c0 must have the dtype of input, Float, got Half"),
    ],
)
def test_bad_arguments(cell: str, change: dict, exception: type, message: str, device: str):
    sample = replace(GOOD, cell=cell)
    args = dict(zip(ARGUMENTS, arguments(sample, device), strict=True))
    good = scan_rnn(*args.values(), cell=cell)[0]
    changed = {name: change[name](a) if name in change else a for name, a in args.items()}
    changed = {name: None if a is None else a.to(device) for name, a in changed.items()}
    with pytest.raises(exception, match=message):
        scan_rnn(*changed.values(), cell=change.get("cell", cell))
    assert torch.equal(scan_rnn(*args.values(), cell=cell)[0], good)


@pytest.mark.parametrize("device", DEVICES)
def test_bad_arguments_of_the_backward(device: str):
    for cell in ("gru", "lstm"):
        sample = replace(GOOD, cell=cell)
        args, grads = arguments(sample, device), gradients(sample, device)
        output, _, _, gates, cells = scan_rnn(*args, **sample.keywords, save=True)
        keywords = {**sample.keywords, "output_mask": [True] * 7}
        with pytest.raises(ValueError, match=r"scan_rnn_backward: grad_output must be \(T, B, H\) = \[4, 3, 5\], got"):
            scan_rnn_backward(grads[0][1:], *grads[1:], *args, output, gates, cells, **keywords)
        with pytest.raises(ValueError, match=r"gates must be \(T, B, 4H\) as a forward with save=True returns it"):
            scan_rnn_backward(*grads, *args, output, gates[:0], cells, **keywords)
        with pytest.raises(TypeError, match=r"gates must be Float for Float inputs, got Double"):
            scan_rnn_backward(*grads, *args, output, gates.double(), cells, **keywords)
        with pytest.raises(TypeError, match=r"grad_h_n must have the dtype of input"):
            scan_rnn_backward(grads[0], grads[1].double(), grads[2], *args, output, gates, cells, **keywords)
    with pytest.raises(ValueError, match=r"grad_c_n must be None except for lstm"):
        sample = replace(GOOD, cell="rnn_tanh")
        args, grads = arguments(sample, device), gradients(sample, device)
        output, _, _, gates, cells = scan_rnn(*args, **sample.keywords, save=True)
        scan_rnn_backward(grads[0], grads[1], grads[1], *args, output, gates, cells, **sample.keywords,
                          output_mask=[True] * 7)  # fmt: skip


@pytest.mark.cuda
def test_mixed_devices():
    args = arguments(GOOD, "cuda")
    for index in (1, 3, 4, 5, 6):
        mixed = [a.cpu() if i == index else a for i, a in enumerate(args)]
        with pytest.raises(RuntimeError, match=rf"{ARGUMENTS[index]} must be on the device of input, cuda:0, got cpu"):
            scan_rnn(*mixed, **GOOD.keywords)
    assert scan_rnn(*args, **GOOD.keywords)[0].isfinite().all()
