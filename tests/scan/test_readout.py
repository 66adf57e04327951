"""linear_scan with c: states that are read out and never written, beside their step-by-step twin in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from weft.scan import linear_scan, linear_scan_reference

from tests.common import BOUNDS, DTYPES, poisoned
from tests.scan.linear_scans import device, every_second
from tests.scan.samples import READOUTS, READOUTS_LARGE
from tests.scan.samples import ReadOut as Sample

ALL_TYPES = [*DTYPES, torch.complex64, torch.complex128]

SAMPLES = [
    *READOUTS,
    *READOUTS_LARGE,
    *(Sample(T, 2, 5, 6, reverse=T % 2 == 0) for T in (1, 7, 8, 9, 16, 31, 32, 33, 65)),
    *(Sample(20, 3, H, N, x0=None) for H in (1, 15, 17) for N in (1, 2, 4, 16, 33, 64)),
    *(Sample(37, 2, 3, 8, A, c, full) for A, c in (("TB", None), (None, "TB"), ("B", "T")) for full in (False, True)),
    Sample(50, 2, 3, 8, "TB", "TB", True, None, reverse=True, batch_first=True),
    Sample(70, 2, 33, 16, batch_first=True),
]


def wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64)


def run(inputs: tuple, flags: dict, weight: Tensor, op=linear_scan) -> list[Tensor]:
    """y and the gradients of A, b, c and x0, None where that is not there."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    A, b, c, x0 = leaves
    y = op(A, b, x0, c=c, **flags)
    loss = (y * weight.conj()).real.sum()
    present = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(loss, present, allow_unused=True, materialize_grads=True))
    return [y.detach(), *(None if t is None else next(found) for t in leaves)]


def agree(got: list, want: list, bound: float) -> None:
    for name, g, w in zip(("y", "A", "b", "c", "x0"), got, want, strict=True):
        if w is None:
            assert g is None
            continue
        assert g.shape == w.shape
        g, w = (torch.view_as_real(t) if t.is_complex() else t for t in (wide(g), wide(w)))
        assert (g - w).norm() <= bound * max(w.norm().item(), 1e-300), name


@device
@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_agrees_with_the_reference(sample: Sample, dtype: torch.dtype, device: str) -> None:
    inputs = sample.inputs(dtype, device)
    y_shape = inputs[1].shape[:3]
    weight = torch.randn(y_shape, dtype=torch.promote_types(dtype, torch.float32), device=device).to(dtype)
    with poisoned():
        got = run(inputs, sample.flags, weight)
    again = run(inputs, sample.flags, weight)
    assert all(g is None or torch.equal(g, a) for g, a in zip(got, again, strict=True))
    assert got[0].dtype == dtype and got[0].is_contiguous()
    want = run(tuple(map(wide, inputs)), sample.flags, wide(weight), linear_scan_reference)
    agree(got, want, 40 * BOUNDS[dtype.to_real()])


@device
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_without_x0_the_first_A_is_not_used(dtype: torch.dtype, device: str) -> None:
    A, b, c, _ = Sample(20, 2, 3, 4, "TB", None, False, None).inputs(dtype, device)
    want = run((A, b, c, None), {}, torch.ones_like(b[..., 0]))
    want[1][0] = 0
    A[0] = torch.nan
    agree(run((A, b, c, None), {}, torch.ones_like(b[..., 0])), want, 0)


@device
def test_what_is_not_finite_stays_in_its_row(device: str) -> None:
    A, b, c, _ = Sample(40, 3, 4, 6).inputs(torch.float32, device)
    want = linear_scan(A, b, c=c)
    b[10, 1, 2] = torch.inf
    y = linear_scan(A, b, c=c)
    assert not y[10:, 1, 2].isfinite().any() and torch.equal(y[:10], want[:10])
    y[:, 1, 2], want[:, 1, 2] = 0, 0
    assert torch.equal(y, want)


@device
def test_strides_and_needed_gradients(device: str) -> None:
    inputs = Sample(20, 2, 3, 8, "B", "TB", True).inputs(torch.float32, device)
    viewed = tuple(every_second(t) for t in inputs)
    weight = torch.randn(20, 2, 3, device=device)
    want = run(inputs, {}, weight)
    agree(run(viewed, {}, weight), want, 1e-5)
    for needed in itertools.product([False, True], repeat=4):
        leaves = [t.detach().requires_grad_(n) for t, n in zip(inputs, needed, strict=True)]
        wanted = [t for t in leaves if t.requires_grad]
        if not wanted:
            continue
        A, b, c, x0 = leaves
        found = torch.autograd.grad(linear_scan(A, b, x0, c=c), wanted, weight)
        expected = [g for g, n in zip(want[1:], needed, strict=True) if n]
        for g, w in zip(found, expected, strict=True):
            assert torch.equal(g, w)


@device
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradients_of_any_order(dtype: torch.dtype, device: str) -> None:
    for sample in (Sample(4, 2, 2, 3), Sample(3, 2, 2, 3, "TB", "T", True, "shared", True, True)):
        leaves = [t.requires_grad_() for t in sample.inputs(dtype, device)]

        def scan(A, b, c, x0, flags=sample.flags):
            return linear_scan(A, b, x0, c=c, **flags)

        assert torch.autograd.gradcheck(scan, leaves)
        assert torch.autograd.gradgradcheck(scan, leaves)


@device
def test_transforms(device: str) -> None:
    A, b, c, x0 = Sample(6, 2, 3, 4).inputs(torch.float64, device)
    many = torch.stack([b, 2 * b])
    got = torch.func.vmap(lambda t: linear_scan(A, t, x0, c=c))(many)
    torch.testing.assert_close(got, torch.stack([linear_scan(A, t, x0, c=c) for t in many]))
    leaf = b.clone().requires_grad_()
    linear_scan(A, leaf, x0, c=c).sin().sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda t: linear_scan(A, t, x0, c=c).sin().sum())(b), leaf.grad)
    compiled = torch.compile(lambda A, b, c: linear_scan(A, b, c=c), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(A, b, c), linear_scan(A, b, c=c))
    torch.testing.assert_close(compiled(A, leaf, c), linear_scan(A, b, c=c))


BAD = {
    "c is no tensor": (((2, 3), (4, 1, 2, 3), 1.0), TypeError, "c must be a Tensor, got float"),
    "b has rank 3": (((2, 3), (4, 1, 2), (2, 3)), ValueError, r"b must be \(T, B, H, N\) or \(T, B, H, 1\), got"),
    "b has another N": (((2, 3), (4, 1, 2, 5), (2, 3)), ValueError, "with N = 3, as A has it"),
    "A has rank 3": (((4, 2, 3), (4, 1, 2, 3), (2, 3)), ValueError, r"A must be \(H, N\) or \(T, B, H, N\), got"),
    "A of other steps": (
        ((5, 1, 2, 3), (4, 1, 2, 3), (2, 3)),
        ValueError,
        "A must be .*of which the first two may be 1",
    ),
    "c of another H": (((2, 3), (4, 1, 2, 3), (3, 3)), ValueError, "c must be .*of which the first two may be 1"),
    "x0 of another B": (((2, 3), (4, 1, 2, 3), (2, 3), (2, 2, 3)), ValueError, r"x0 must be \(B, H, N\)"),
}


@pytest.mark.parametrize("where", ["meta", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, where: str) -> None:
    shapes, error, message = BAD[case]
    A, b, c, *x0 = (torch.zeros(s, device=where) if isinstance(s, tuple) else s for s in shapes)
    with pytest.raises(error, match=message):
        linear_scan(A, b, *x0, c=c)
    with pytest.raises(TypeError, match="c must have the dtype of A"):
        A, b = torch.zeros(2, 3, device=where), torch.zeros(4, 1, 2, 3, device=where)
        linear_scan(A, b, c=A.double())


@pytest.mark.cuda
def test_memory() -> None:
    """The states of N 64 take 64 times what b takes: they are not there."""
    b = torch.randn(512, 2, 256, 1, device="cuda", requires_grad=True)
    A, c = (torch.rand(256, 64, device="cuda").requires_grad_() for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_scan(A, b, c=c).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * b.nbytes
