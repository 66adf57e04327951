"""linear_scan under torch.compile, autocast, vmap, and the transforms of torch.func."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck
from weft.scan import linear_scan, linear_scan_reference

from tests.common import assert_close
from tests.scan.linear_scans import FEW, device, few
from tests.scan.samples import LAYOUTS
from tests.scan.samples import LinearScan as Sample


@device
@few
def test_opcheck_of_the_backward(sample: Sample, device: str) -> None:
    A, b, x0 = sample.inputs(torch.float32, device)
    A = torch.nan_to_num(A)
    leaves = [None if t is None else t.clone().requires_grad_() for t in (A, b, x0)]
    x = linear_scan(A, b, x0, **sample.flags)
    mask = [True, True, x0 is not None]
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    if sample in FEW[::3]:  # graphs of the others differ by a word
        tests = *tests, "test_aot_dispatch_dynamic"
    call = torch.randn_like(b), leaves[0], x, x0, *sample.flags.values(), mask
    opcheck(torch.ops.weft.linear_scan_backward, call, test_utils=tests)


@device
def test_opcheck_of_masked_gradients(device: str) -> None:
    A, b, x0 = Sample(9, 3, 5).inputs(torch.float32, device)
    for mask in ([False, True, False], [False, False, True]):
        opcheck(torch.ops.weft.linear_scan_backward, (b, A, None, x0, False, False, mask))


@device
def test_compiles_with_the_default_backend(quick_inductor, device: str) -> None:
    torch._dynamo.reset()
    leaves = [t.requires_grad_() for t in Sample(7, 3, 5).inputs(torch.float32, device)]
    x = torch.compile(linear_scan, fullgraph=True)(*leaves)
    want = linear_scan(*leaves)
    assert torch.equal(x, want)
    weight = torch.randn_like(x)
    for g, w in zip(torch.autograd.grad(x, leaves, weight), torch.autograd.grad(want, leaves, weight), strict=True):
        assert torch.equal(g, w)


@device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("H", [5, 160])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_inside_autocast(layout: str, H: int, dtype: torch.dtype, device: str) -> None:
    inputs = Sample(9, 3, H, layout).inputs(dtype, device)
    leaves = [t.requires_grad_() for t in inputs]
    weight = torch.randn_like(inputs[1])
    x = linear_scan(*leaves)
    want = torch.autograd.grad(x, leaves, weight, retain_graph=True)
    masks = (inputs[0].detach(), x.detach(), inputs[2].detach(), False, False, [True] * 3)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = torch.autograd.grad(x, leaves, weight, retain_graph=True)
        differentiable = torch.autograd.grad(x, leaves, weight, create_graph=True)
        called = torch.ops.weft.linear_scan_backward(weight, *masks)
    for w, *others in zip(want, inside, called, strict=True):
        assert all(g.dtype == dtype and torch.equal(g, w) for g in others)
    for g, w in zip(differentiable, want, strict=True):
        assert g.dtype == dtype
        assert_close(g, w)


@device
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("layout", ["shared", "shared_4d"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_gradients_of_a_shared_matrix_round_once(dtype, layout: str, create_graph: bool, device: str) -> None:
    A, b, x0 = Sample(1, 4096, 6, layout).inputs(dtype, device)
    weight = torch.randn_like(b)
    grad_A, _ = torch.autograd.grad(
        linear_scan(A.requires_grad_(), b, x0.requires_grad_()), [A, x0], weight, create_graph=create_graph
    )
    # One step: nothing is rounded before the sum over the batch.
    assert_close(grad_A.squeeze(), weight[0].cpu().double().mT @ x0.detach().cpu().double())


@device
@pytest.mark.parametrize("needed", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_gradients(layout: str, needed: tuple, device: str) -> None:
    leaves = [t.requires_grad_() for t in Sample(6, 3, 5, layout, True, True, True).inputs(torch.float64, device)]
    wanted = [leaves[i] for i in needed]
    x = linear_scan(*leaves, reverse=True, transpose=True)
    weights = torch.randn(4, *x.shape, dtype=x.dtype, device=device)
    got = torch.autograd.grad(x, wanted, weights, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(x, wanted, weight, retain_graph=True) for weight in weights]
    for g, w in zip(got, zip(*each, strict=True), strict=True):
        assert_close(g, torch.stack(w))


# All, each alone, and some, in dimensions that differ.
MAPPED = [(0, 0, 1), (1, None, None), (None, 2, None), (None, None, 1), (-1, 2, None), (-1, 0, 1)]
MAPPED_BACKWARD = [(0, 0, 1, 1), (1, None, None, None), (None, 2, None, None), (None, None, 1, None)]
MAPPED_BACKWARD += [(None, None, None, 1), (0, 2, None, 1), (1, 0, 1, None)]


@device
@pytest.mark.parametrize("mapped", MAPPED_BACKWARD, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_of_the_backward(layout: str, mapped: tuple, device: str) -> None:
    if mapped == (None,) * 4:
        mapped = (0,) * 4
    if layout == "constant_1d" and mapped[1] == 2:
        mapped = (mapped[0], 1, *mapped[2:])
    N, backward = 4, torch.ops.weft.linear_scan_backward
    stacked, single = [], []
    samples = [Sample(6, 3, 5, layout).inputs(torch.float64, device) for _ in range(N)]
    for position, dim in enumerate(mapped):  # grad, A, x, x0
        each = [torch.randn_like(i[1]) if position in (0, 2) else i[0 if position == 1 else 2] for i in samples]
        stacked.append(each[0] if dim is None else torch.stack(each, dim))
        single.append([each[0]] * N if dim is None else each)
    flags = (False, False, [True] * 3)
    torch._C._functorch._set_vmap_fallback_enabled(False)  # torch would loop where there is no rule
    try:
        got = torch.func.vmap(lambda *t: backward(*t, *flags), mapped)(*stacked)
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)
    want = zip(*(backward(*t, *flags) for t in zip(*single, strict=True)), strict=True)
    for g, w in zip(got, want, strict=True):
        assert_close(g, torch.stack(w))


@device
@pytest.mark.parametrize("mapped", MAPPED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap(layout: str, mapped: tuple, device: str) -> None:
    if mapped == (None, None, None):
        mapped = (0, 0, 0)
    N = 4
    inputs = [Sample(6, 3, 5, layout).inputs(torch.float64, device) for _ in range(N)]
    stacked, single = [], []
    for position, dim in enumerate(mapped):
        each = [i[position] for i in inputs]
        stacked.append(each[0] if dim is None else torch.stack(each, dim))
        single.append([each[0]] * N if dim is None else each)
    got = torch.func.vmap(linear_scan, mapped)(*stacked)
    want = torch.stack([linear_scan(A, b, x0) for A, b, x0 in zip(*single, strict=True)])
    # Not to the last bit: a kernel may add in another order for more channels.
    assert_close(got, want)


@device
def test_vmap_without_x0(device: str) -> None:
    b = torch.randn(4, 6, 3, 5, dtype=torch.float64, device=device)
    A = Sample(6, 3, 5).inputs(torch.float64, device)[0]
    got = torch.func.vmap(lambda b: linear_scan(A, b, reverse=True, transpose=True))(b)
    assert torch.equal(got, torch.stack([linear_scan(A, x, reverse=True, transpose=True) for x in b]))


@device
@pytest.mark.parametrize("layout", ["dense", "shared", "diagonal", "constant_1d"])
def test_one_start_for_the_batch(layout: str, device: str) -> None:
    A, b, x0 = Sample(9, 3, 5, layout, reverse=True).inputs(torch.float64, device)
    leaves = [t.requires_grad_() for t in (A, b, x0[0].clone())]
    flags = {"reverse": True}
    x, want = linear_scan(*leaves, **flags), linear_scan_reference(*leaves, **flags)
    assert_close(x, want)
    weight = torch.randn_like(b)
    got = torch.autograd.grad(x, leaves, weight, create_graph=True)
    expected = torch.autograd.grad(want, leaves, weight, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in got), leaves)
    expected_second = torch.autograd.grad(sum(g.square().sum() for g in expected), leaves)
    for g, w in zip((*got, *second), (*expected, *expected_second), strict=True):
        assert_close(g, w)
    starts = torch.randn(4, 5, dtype=torch.float64, device=device)
    detached = [t.detach() for t in (A, b)]
    mapped = torch.func.vmap(lambda start: linear_scan(*detached, start, **flags))(starts)
    # Not to the last bit: how a scan runs may depend on the alignment of its rows.
    assert_close(mapped, torch.stack([linear_scan(*detached, start, **flags) for start in starts]))
    half = [t.detach().half().requires_grad_() for t in leaves]
    grad_x0 = torch.autograd.grad(linear_scan(*half, **flags), half[2], weight.half())[0]
    assert grad_x0.dtype == torch.float16 and grad_x0.shape == (5,)


@device
def test_function_transforms(device: str) -> None:
    inputs = Sample(6, 3, 5).inputs(torch.float64, device)

    def loss(op):
        return lambda A, b, x0: op(A, b, x0).sin().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        got = transform(loss(linear_scan), (0, 1, 2))(*inputs)
        want = transform(loss(linear_scan_reference), (0, 1, 2))(*inputs)
        for g, w in zip(got, want, strict=True):
            assert_close(g, w)
    _, tangent = torch.func.jvp(loss(linear_scan), inputs, inputs)
    _, want = torch.func.jvp(loss(linear_scan_reference), inputs, inputs)
    assert_close(tangent, want)


@device
def test_forward_mode(device: str) -> None:
    import torch.autograd.forward_ad as forward_ad

    A, b, x0 = Sample(6, 3, 5).inputs(torch.float64, device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(b, torch.ones_like(b))
        tangent = forward_ad.unpack_dual(linear_scan(A, dual, x0)).tangent
        assert_close(tangent, linear_scan(A, torch.ones_like(b), torch.zeros_like(x0)))
