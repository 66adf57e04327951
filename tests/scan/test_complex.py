"""Complex states of linear_scan: values and gradients beside torch's own complex arithmetic, views of real pairs,
transforms, what is dense."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from weft.scan import linear_scan, linear_scan_reference

from tests.common import BOUNDS, poisoned
from tests.scan.linear_scans import device, every_second
from tests.scan.samples import CONSTANT
from tests.scan.samples import LinearScan as Sample

DTYPES = [torch.complex64, torch.complex128]
DIAGONAL = ["diagonal", *CONSTANT]

SAMPLES = [
    *(Sample(9, 3, 5, layout, *flags) for layout in DIAGONAL for flags in itertools.product([False, True], repeat=2)),
    *(Sample(T, B, H, layout) for layout in DIAGONAL for T, B, H in [(1, 3, 5), (7, 3, 1), (0, 3, 5), (4, 3, 0)]),
    *(Sample(T, 2, H, "diagonal", reverse=T % 2 == 0) for T in (16, 17, 300) for H in (31, 32, 300, 1030)),
    *(Sample(300, 3, H, layout, x0=H > 8, reverse=H == 8) for layout in CONSTANT for H in (8, 33)),
    *(Sample(40, 3, 6, layout, True, layout == "diagonal", batch_first=True) for layout in DIAGONAL),
    Sample(5001, 1, 3, "diagonal"),
    Sample(2500, 2, 20, "diagonal", x0=False, reverse=True),
]


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().cpu().to(torch.complex128) for t in tensors]


def run(inputs, flags: dict, weight: Tensor, op=linear_scan) -> list[Tensor]:
    """x and the gradients of the real part of (x * conj(weight)).sum()."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    x = op(*leaves, **flags)
    loss = (x * weight.conj()).real.sum()
    wanted = [t for t in leaves if t is not None]
    return [x.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)]


def agree(got: list[Tensor], want: list[Tensor], bound: float) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and g.is_contiguous()
        g, w = g.cpu().to(torch.complex128), w.to(torch.complex128)
        error, size = (g - w).abs().norm().item(), w.abs().norm().item()
        assert error <= bound * max(size, 1e-300) or error == size == 0


@device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_agrees_with_the_reference(sample: Sample, dtype: torch.dtype, device: str) -> None:
    inputs = sample.inputs(dtype, device)
    weight = torch.randn_like(inputs[1])
    with poisoned():
        got = run(inputs, sample.flags, weight)
    again = run(inputs, sample.flags, weight)
    assert all(torch.equal(g, a) for g, a in zip(got, again, strict=True))
    exact = wide(*inputs)
    if sample.T and sample.layout == "diagonal" and not sample.x0:  # A of the first step has no influence: NaN here
        exact[0].select(1 if sample.batch_first else 0, -1 if sample.reverse else 0).zero_()
    want = run(exact, sample.flags, weight.cpu().to(torch.complex128), linear_scan_reference)
    agree(got, want, 4 * BOUNDS[dtype.to_real()])


@device
@pytest.mark.parametrize("layout", DIAGONAL)
def test_gradients_of_any_order(layout: str, device: str) -> None:
    for sample in (Sample(4, 2, 3, layout), Sample(4, 2, 3, layout, True, True, batch_first=True)):
        leaves = [t.requires_grad_() for t in sample.inputs(torch.complex128, device)]
        assert torch.autograd.gradcheck(lambda *t, flags=sample.flags: linear_scan(*t, **flags), leaves)
        assert torch.autograd.gradgradcheck(lambda *t, flags=sample.flags: linear_scan(*t, **flags), leaves)


@device
@pytest.mark.parametrize("layout", DIAGONAL)
def test_opcheck(layout: str, device: str) -> None:
    A, b, x0 = Sample(5, 2, 3, layout).inputs(torch.complex64, device)
    leaves = [t.clone().requires_grad_() for t in (A, b, x0)]
    opcheck(torch.ops.weft.linear_scan, tuple(leaves))
    opcheck(torch.ops.weft.linear_scan_backward, (b, A, linear_scan(A, b, x0), x0, False, False, [True] * 3))


@device
def test_pairs_are_read_in_place(device: str) -> None:
    pairs = torch.randn(20, 3, 8, 2, device=device)
    A, x0 = torch.polar(torch.rand(20, 3, 8), torch.randn(20, 3, 8)).to(device), torch.randn(3, 8, 2, device=device)
    x = linear_scan(A, torch.view_as_complex(pairs), torch.view_as_complex(x0))
    want = linear_scan_reference(*wide(A, torch.view_as_complex(pairs), torch.view_as_complex(x0)))
    agree([x], [want], 1e-5)


@device
def test_views(device: str) -> None:
    """Strides, an address that is a multiple of 8 bytes alone, a conjugate that is not written yet."""
    A, b, x0 = Sample(30, 2, 6, "diagonal").inputs(torch.complex64, device)
    off = torch.zeros(b.numel() + 1, dtype=b.dtype, device=device)[1:].view(b.shape).copy_(b)
    want = linear_scan_reference(*wide(A, b, x0))
    for views in ((every_second(A), b, x0), (A, off, x0), (A, b.transpose(0, 1).contiguous().transpose(0, 1), x0)):
        agree([linear_scan(*views)], [want], 1e-5)
    agree([linear_scan(A.conj(), b, x0)], [linear_scan_reference(*wide(A.conj(), b, x0))], 1e-5)
    doubles = torch.randn(2 * b.numel() + 1, dtype=torch.float64, device=device)[1:].view(*b.shape, 2)
    odd = torch.complex(doubles[..., 0], doubles[..., 1])
    A, x0 = A.to(torch.complex128), x0.to(torch.complex128)
    agree([linear_scan(A, odd, x0)], [linear_scan_reference(*wide(A, odd, x0))], 1e-13)


@device
def test_vmap_compile_and_autocast(device: str) -> None:
    A, b, x0 = Sample(6, 2, 4, "diagonal").inputs(torch.complex64, device)
    stacked = torch.stack([b, 2 * b, b * 1j])
    got = torch.func.vmap(lambda t: linear_scan(A, t, x0))(stacked)
    torch.testing.assert_close(got, torch.stack([linear_scan(A, t, x0) for t in stacked]))
    compiled = torch.compile(linear_scan, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(A, b, x0), linear_scan(A, b, x0))
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(linear_scan(A, b, x0), linear_scan(A, b, x0))
        assert linear_scan(A, b, x0).dtype == torch.complex64
    grads = torch.func.grad(lambda t: linear_scan(A, t, x0).abs().sum())(b)
    leaf = b.clone().requires_grad_()
    linear_scan(A, leaf, x0).abs().sum().backward()
    torch.testing.assert_close(grads, leaf.grad)


@device
def test_a_dense_matrix_takes_the_reference(device: str) -> None:
    A, b, x0 = Sample(5, 2, 3, "dense").inputs(torch.complex64, device)
    assert torch.equal(linear_scan(A, b, x0), linear_scan_reference(A, b, x0))
    with pytest.raises(TypeError, match="linear_scan: A must be diagonal where it is complex, got"):
        torch.ops.weft.linear_scan(A, b, x0)
    with pytest.raises(TypeError, match="linear_scan: A must be diagonal where it is complex, got"):
        torch.ops.weft.linear_scan(A.to("meta"), b.to("meta"), x0.to("meta"))


@device
def test_rows_stay_apart_and_products_may_leave_the_range(device: str) -> None:
    A, b, x0 = Sample(3000, 2, 4, "diagonal").inputs(torch.complex64, device)
    phase = torch.polar(torch.ones(3000, 2, 4), torch.randn(3000, 2, 4)).to(device)
    swing = torch.where((torch.arange(3000) // 60) % 2 == 0, 8.0, 0.125).to(device)[:, None, None]
    A, b = phase * swing, torch.zeros_like(b)
    x0 = x0 * 1e-27
    want = linear_scan_reference(*wide(A, b, x0))
    got = linear_scan(A, b, x0).cpu()
    assert ((got - want).abs() <= 1e-3 * want.abs()).all()
    b[100, 0, 0] = torch.nan
    got = linear_scan(A, b, x0).cpu()
    assert got[100:, 0, 0].isnan().all()
    assert torch.equal(torch.view_as_real(got)[:, 1], torch.view_as_real(linear_scan(A, b, x0).cpu())[:, 1])
    assert got[:, 1].isfinite().all() and got[:, 0, 1:].isfinite().all()
