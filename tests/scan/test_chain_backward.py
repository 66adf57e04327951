"""chain_backward, in every schedule, against one product after the other in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from weft.scan import chain_backward, chain_backward_reference

from tests.common import DEVICES, DTYPES, assert_close, pairs, poisoned
from tests.scan.samples import Chain as Sample

SCHEDULES = ["auto", "linear", "blelloch", 1, 2, 3]


SAMPLES = [
    Sample(3, (4,)),
    Sample(3, (4, 5)),
    Sample(3, (4, 5), (0,)),
    Sample(2, (4, 5, 3)),
    Sample(2, (4, 7, 1, 3, 6), (1, 2)),
    *(Sample(2, (5,) * (n + 1)) for n in (2, 3, 4, 7, 8, 9)),
    Sample(2, (5,) * 10, tuple(range(9))),
    Sample(2, (5,) * 10, (0, 3, 4)),
    Sample(1, (3, 4, 3, 4, 3, 4, 3, 4)),
    Sample(2, (1,) * 6),
    Sample(2, (130,) * 6),
    Sample(0, (4, 5, 3, 2)),
    Sample(2, (4, 0, 3, 2)),
    Sample(2, (0, 3, 2)),
    Sample(2, (4, 4, 4, 4, 4, 0)),
]
FEW = [SAMPLES[4], SAMPLES[9], SAMPLES[11]]

device = pytest.mark.parametrize("device", DEVICES)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def wide(grad: Tensor, jacobians: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return grad.detach().cpu().double(), [J.detach().cpu().double() for J in jacobians]


# A chain of rounded products, and in half precision the rounding of each gradient: the bounds of one rounding hold.
@device
@pairs(sample=SAMPLES, schedule=SCHEDULES, dtype=DTYPES)
def test_agrees_with_reference(sample: Sample, dtype: torch.dtype, schedule, device: str) -> None:
    grad, jacobians = sample.inputs(dtype, device)
    with poisoned():
        got = chain_backward(grad, jacobians, schedule)
    assert got[0] is grad and len(got) == len(jacobians) + 1
    for g, w in zip(got, chain_backward_reference(*wide(grad, jacobians)), strict=True):
        assert g.dtype == dtype and g.device == grad.device
        assert_close(g, w)


@device
@given(
    B=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    shared=st.sets(st.integers(0, 11)),
    schedule=st.sampled_from(SCHEDULES),
)
def test_any_chain(device: str, B, sizes, shared, schedule) -> None:
    grad, jacobians = Sample(B, tuple(sizes), tuple(shared)).inputs(torch.float64, device)
    got = chain_backward(grad, jacobians, schedule)
    for g, w in zip(got, chain_backward_reference(*wide(grad, jacobians)), strict=True):
        assert_close(g, w, 1e-12)


@device
@schedules
def test_strides(schedule, device: str) -> None:
    grad, jacobians = Sample(2, (5,) * 7, (2,)).inputs(torch.float32, device)
    views = [
        J.mT.contiguous().mT if k % 2 else J[..., ::2].repeat_interleave(2, -1)[..., :5]
        for k, J in enumerate(jacobians)
    ]
    views[3] = views[3][:1].expand(2, 5, 5)
    grad = grad.t().contiguous().t()
    for g, w in zip(chain_backward(grad, views, schedule), chain_backward_reference(*wide(grad, views)), strict=True):
        assert_close(g, w)


@device
@schedules
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(bad: float, schedule, device: str) -> None:
    inputs = Sample(3, (4, 5, 5, 5, 5, 3, 5)).inputs(torch.float32, device)
    clean = chain_backward(*inputs, schedule)
    inputs[1][2][1, 0] = bad
    got = chain_backward(*inputs, schedule)
    for k, (g, c) in enumerate(zip(got, clean, strict=True)):
        assert torch.equal(g[[0, 2]], c[[0, 2]])
        assert torch.equal(g[1], c[1]) if k <= 2 else not g[1].isfinite().all()


@device
@pairs(kind=["up", "down", "both", "zeros"], schedule=SCHEDULES, dtype=[torch.float32, torch.float64])
def test_chaotic_chains(kind: str, dtype: torch.dtype, schedule, device: str) -> None:
    """Products of Jacobians leave the range of the dtype; the gradients do not."""
    n, B, H = 500, 2, 6
    factor, size = (8.0, 1e-27) if dtype == torch.float32 else (5e6, 1e-200)
    growing = (torch.arange(n) // 60) % 2 == 0
    swing = torch.where(growing, factor, 1 / factor).double()
    half = torch.linalg.qr(torch.randn(n, B, H // 2, H // 2, dtype=torch.float64)).Q
    other = torch.linalg.qr(torch.randn(n, B, H // 2, H // 2, dtype=torch.float64)).Q
    A = torch.zeros(n, B, H, H, dtype=torch.float64)
    first = {"up": swing, "down": 1 / swing, "both": swing, "zeros": swing.new_full((n,), factor)}[kind]
    second = 1 / swing if kind == "both" else first
    A[..., :3, :3] = half * first.view(n, 1, 1, 1)
    A[..., 3:, 3:] = other * second.view(n, 1, 1, 1)
    grad = torch.randn(B, H, dtype=torch.float64)
    grad[:, :3] *= {"up": size, "both": size, "down": 1 / size, "zeros": 0}[kind]
    grad[:, 3:] *= {"up": size, "both": 1 / size, "down": 1 / size, "zeros": 0}[kind]
    grad, A = grad.to(dtype), A.to(dtype)
    # fp64's own chain is the reference for both: it is finite, and the chain is orthogonal but for its scale.
    want = chain_backward_reference(*wide(grad, list(A)))
    got = chain_backward(grad.to(device), list(A.to(device)), schedule)
    for g, w in zip(got, want, strict=True):
        assert g.isfinite().all()
        for part in (slice(None, 3), slice(3, None)):
            scale = w[:, part].abs().amax().clamp_min(1e-300)
            assert_close(
                g[:, part].cpu().double() / scale, w[:, part] / scale, 3e-4 if dtype == torch.float32 else 1e-12
            )


@device
@pytest.mark.parametrize("schedule", ["auto", "blelloch"])
def test_a_long_chaotic_chain(schedule, device: str) -> None:
    n, H = 10_000, 4
    swing = torch.where((torch.arange(n) // 60) % 2 == 0, 8.0, 1 / 8)
    A = torch.linalg.qr(torch.randn(n, 1, H, H, dtype=torch.float64)).Q.float() * swing.view(n, 1, 1, 1)
    grad = 1e-27 * torch.randn(1, H)
    got = torch.stack(chain_backward(grad.to(device), list(A.to(device)), schedule)).cpu().double()
    want = torch.stack(chain_backward_reference(*wide(grad, list(A))))
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < 3e-3


def hyperbolic(n: int, dtype: torch.dtype, device: str) -> tuple[Tensor, list[Tensor]]:
    """Eigenvalues 2 and 1/2. The gradients lie on the direction of 1/2, in row 1 at half the size, exactly."""
    J = torch.tensor([[1.25, 0.75], [0.75, 1.25]], dtype=dtype, device=device)
    return torch.tensor([[1.0, -1.0], [0.5, -0.5]], dtype=dtype, device=device), [J.clone() for _ in range(n)]


@device
@schedules
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chains_that_cancel(dtype: torch.dtype, schedule, device: str) -> None:
    grad, jacobians = hyperbolic(40, dtype, device)
    if dtype == torch.float16:
        grad = grad * 2**15  # 2^-24 is the smallest float16
        jacobians = jacobians[:38]
    for k, g in enumerate(chain_backward(grad, jacobians, schedule)):
        assert torch.equal(g, grad / 2**k)


@device
@schedules
def test_gradients_of_chains_that_cancel(schedule, device: str) -> None:
    """Backwards, the other direction is the one that decays: what a tree would multiply cancels on the way back."""
    grad, jacobians = hyperbolic(40, torch.float32, device)
    leaves = [t.requires_grad_() for t in (torch.ones_like(grad), *jacobians)]
    last = chain_backward(leaves[0], leaves[1:], schedule)[-1]
    grad_0, *grad_J = torch.autograd.grad(last, leaves, grad)
    assert torch.equal(grad_0, grad / 2**40)
    # d/dJ_k = c_k g_(k-1)^T, c the vector that goes back, summed over the batch
    c = torch.stack([torch.tensor([1.0, -1.0]), torch.tensor([0.5, -0.5])])
    for k, got in enumerate(grad_J):
        assert torch.equal(got.cpu(), (c / 2 ** (39 - k)).mT @ torch.full((2, 2), 2.0**k))


@device
@pytest.mark.parametrize("schedule", ["blelloch", 1, 2, 3])
@pytest.mark.parametrize("sizes", [(5,) * 17, (5, 4, 3, 6) * 4], ids=str)
def test_the_tree_is_what_one_gets(sizes: tuple, schedule, device: str) -> None:
    """Factors that cannot cancel: the tree's own roundings are there to see, in every part of the chain."""
    grad, jacobians = (t for t in Sample(16, sizes).inputs(torch.float64, device))
    grad, jacobians = grad.abs().float(), [J.abs().float() for J in jacobians]
    differs = [
        not torch.equal(g, w)
        for g, w in zip(chain_backward(grad, jacobians, schedule), chain_backward(grad, jacobians), strict=True)
    ]
    quarter = len(differs) // 4
    assert not differs[0]
    assert all(any(differs[i : i + quarter]) for i in range(2, len(differs) - quarter, quarter))


@device
@schedules
def test_function_transforms(schedule, device: str) -> None:
    grad, jacobians = Sample(2, (3,) * 6).inputs(torch.float64, device)

    def loss(grad, *jacobians, op=lambda g, js: chain_backward(g, js, schedule)):
        return sum(g.sin().sum() for g in op(grad, jacobians))

    for transform in (torch.func.grad, torch.func.jacfwd):
        got = transform(loss, (0, 1, 5))(grad, *jacobians)
        want = transform(lambda *t: loss(*t, op=chain_backward_reference), (0, 1, 5))(grad, *jacobians)
        for g, w in zip(got, want, strict=True):
            assert_close(g, w)


def without_batch(sizes: tuple[int, ...], device: str) -> tuple[Tensor, list[Tensor]]:
    matrices = [torch.randn(n, m, device=device, dtype=torch.float64) for m, n in itertools.pairwise(sizes)]
    return torch.randn(sizes[0], device=device, dtype=torch.float64), matrices


lone = pytest.mark.parametrize("sizes", ((3,), (3, 5, 2), (6,) * 9, (3, 0, 2)), ids=str)


@device
@schedules
@lone
def test_without_a_batch(sizes: tuple[int, ...], schedule, device: str) -> None:
    grad, jacobians = without_batch(sizes, device)
    found, expected = chain_backward(grad, jacobians, schedule), chain_backward(grad[None], jacobians, schedule)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(f, e[0])


@device
@lone
def test_opcheck_without_a_batch(sizes: tuple[int, ...], device: str) -> None:
    grad, jacobians = without_batch(sizes, device)
    opcheck(torch.ops.weft.chain_backward, (grad.requires_grad_(), jacobians))


def f32(*shape: int) -> Tensor:
    return torch.zeros(shape)


BAD = {
    "grad is no tensor": (([1.0], []), TypeError, "grad must be a Tensor, got list"),
    "jacobians are None": ((f32(2, 3), None), TypeError, "jacobians must be a list of Tensors, got NoneType"),
    "a Jacobian is no tensor": (
        (f32(2, 3), [f32(4, 3), None]),
        TypeError,
        r"jacobians\[1\] must be a Tensor, got NoneType",
    ),
    "grad has rank 3": (
        (f32(1, 2, 3), []),
        ValueError,
        r"grad must be \(B, n\), or \(n\) without a batch, got \[1, 2, 3\]",
    ),
    "a Jacobian alone has a batch": (
        (f32(3), [f32(4, 3), f32(2, 5, 4)]),
        ValueError,
        r"jacobians\[1\] must be \(n_in, n_out\) where grad has no batch, got \[2, 5, 4\]",
    ),
    "without a batch, does not chain": ((f32(3), [f32(3, 4)]), ValueError, r"jacobians\[0\] does not chain.*be 3"),
    "grad is integer": ((f32(2, 3).long(), []), TypeError, "grad must be float16.*got Long"),
    "mixed dtypes": (
        (f32(2, 3), [f32(4, 3), f32(5, 4).half()]),
        TypeError,
        r"jacobians\[1\] must have the dtype of grad.*got Half",
    ),
    "rank 4": (
        (f32(2, 3), [f32(1, 2, 4, 3)]),
        ValueError,
        r"jacobians\[0\] must be \(B, n_in, n_out\).*\[1, 2, 4, 3\]",
    ),
    "wrong batch": (
        (f32(2, 3), [f32(5, 4, 3)]),
        ValueError,
        r"jacobians\[0\] must have grad's batch, 2, got \[5, 4, 3\]",
    ),
    "the first does not chain": (
        (f32(2, 3), [f32(3, 4)]),
        ValueError,
        r"jacobians\[0\] does not chain.*be 3.*\[3, 4\]",
    ),
    "the third does not chain": (
        (f32(2, 3), [f32(4, 3), f32(2, 5, 4), f32(5, 4)]),
        ValueError,
        r"jacobians\[2\] does not chain.*must be 5.*got \[5, 4\]",
    ),
    "unknown schedule": (
        (f32(2, 3), [], "fast"),
        ValueError,
        'schedule must be "auto", "linear", "blelloch".*\'fast\'',
    ),
    "negative levels": ((f32(2, 3), [], -1), ValueError, "must not be negative, got -1"),
    "schedule is a float": ((f32(2, 3), [], 1.0), TypeError, "schedule must be a str or an int, got float"),
    "schedule is a bool": ((f32(2, 3), [], True), TypeError, "schedule must be a str or an int, got bool"),
}


@device
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, device: str) -> None:
    (grad, jacobians, *schedule), error, message = BAD[case]
    grad = grad.to(device) if isinstance(grad, Tensor) else grad
    if jacobians is not None:
        jacobians = [J.to(device) if isinstance(J, Tensor) else J for J in jacobians]
    with pytest.raises(error, match=f"chain_backward: .*{message}"):
        chain_backward(grad, jacobians, *schedule)
    chain = SAMPLES[3].inputs()
    assert_close(chain_backward(*chain)[-1], chain_backward_reference(*chain)[-1])


@pytest.mark.cuda
def test_mixed_devices() -> None:
    with pytest.raises(
        RuntimeError, match=r"chain_backward: jacobians\[1\] must be on the device of grad, cpu, got cuda"
    ):
        chain_backward(f32(2, 3), [f32(4, 3), f32(5, 4).cuda()])


@pytest.mark.cuda
@schedules
def test_graph_capture_and_replay(schedule) -> None:
    grad, jacobians = Sample(3, (6,) * 9).inputs(torch.float32, "cuda")
    chain_backward(grad, jacobians, schedule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain_backward(grad, jacobians, schedule)
    for t in (grad, *jacobians):
        t.copy_(torch.randn_like(t))
    graph.replay()
    for g, w in zip(captured, chain_backward(grad, jacobians, schedule), strict=True):
        assert torch.equal(g, w)
    pair = torch.tensor([[2.5, 1.5], [1.5, 2.5]], device="cuda")
    for J in jacobians:
        J.copy_(torch.kron(torch.eye(3, device="cuda"), pair))
    grad.copy_(torch.tensor([1.0, -1.0] * 3))
    graph.replay()
    assert all(torch.equal(g, grad) for g in captured)
