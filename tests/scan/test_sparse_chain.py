"""chain_backward with sparse Jacobians, in every schedule, against one dense product after the other; csr_chain."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from weft.scan import chain_backward, chain_backward_reference
from weft.sparse import BatchedCSR, conv2d_jacobian, max_pool2d_jacobian, relu_jacobian

from tests.common import BOUNDS, DEVICES, DTYPES, assert_close, poisoned

device = pytest.mark.parametrize("device", DEVICES)
SCHEDULES = ["auto", "linear", "blelloch", 1, 2, 3]
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def sparse(rows: int, columns: int, batch: int | None, dtype: torch.dtype, device: str, density=0.4) -> BatchedCSR:
    stored = torch.rand(rows, columns) < density
    crow = torch.zeros(rows + 1, dtype=torch.int32)
    crow[1:] = stored.sum(1).cumsum(0)
    col = stored.nonzero()[:, 1].to(torch.int32)
    lead = () if batch is None else (batch,)
    values = torch.randn(*lead, col.shape[0], dtype=torch.float64) / max(density * columns, 1) ** 0.5
    return BatchedCSR(crow.to(device), col.to(device), values.to(device, dtype), (rows, columns))


def chain(B: int, sizes: list, kinds: list, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple:
    """`kinds`: sparse, sparse and shared, dense, dense and shared, diagonal (where sizes agree)."""
    grad = torch.randn(B, sizes[0], dtype=torch.float64).to(device, dtype)
    jacobians = []
    for kind, columns, rows in zip(kinds, sizes, sizes[1:], strict=False):
        batch = None if kind.endswith("shared") else B
        if kind.startswith("dense"):
            lead = () if batch is None else (B,)
            J = (torch.randn(*lead, rows, columns, dtype=torch.float64) / max(columns, 1) ** 0.5).to(device, dtype)
        elif kind == "diagonal" and rows == columns:
            J = relu_jacobian(torch.randn(B, rows, dtype=torch.float64).to(device, dtype))
        else:
            J = sparse(rows, columns, batch, dtype, device)
        jacobians.append(J)
    return grad, jacobians


def wide(grad: Tensor, jacobians: list) -> tuple:
    return grad.double(), [J.to(torch.float64) for J in jacobians]


KINDS = ["sparse", "sparse shared", "dense", "dense shared", "diagonal"]
SAMPLES = {
    "one": (3, [4, 5], ["sparse"]),
    "two": (3, [4, 5, 6], ["sparse shared", "sparse"]),
    "diagonals": (2, [6] * 8, ["diagonal"] * 7),
    "sparse": (2, [20, 30, 30, 25, 40, 40, 10, 12, 12], ["sparse", "diagonal", "sparse shared"] * 3),
    "mixed": (2, [5, 7, 7, 4, 6, 6, 6, 3], ["dense", "diagonal", "sparse", "dense shared", "sparse shared"] * 2),
    "long": (1, [9] * 60, ["sparse shared", "diagonal"] * 30),
    "empty batch": (0, [5, 7, 7, 4], ["sparse", "diagonal", "dense"]),
    "empty size": (2, [5, 0, 4, 3], ["sparse", "sparse", "sparse shared"]),
}
samples = pytest.mark.parametrize("sample", SAMPLES)


@device
@schedules
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@samples
def test_agrees_with_reference(sample: str, dtype: torch.dtype, schedule, device: str) -> None:
    grad, jacobians = chain(*SAMPLES[sample], dtype, device)
    with poisoned():
        got = chain_backward(grad, jacobians, schedule)
    assert got[0] is grad and len(got) == len(jacobians) + 1
    # float32: the rounding of a product of Jacobians beside that of a gradient.
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, BOUNDS[dtype])
    for g, w in zip(got, chain_backward_reference(*wide(grad, jacobians)), strict=True):
        assert g.dtype == dtype and g.device == grad.device
        if dtype != torch.float16 or w.norm() > 1e-3:  # below, gradients are no normal float16
            assert_close(g, w, bound)


@device
@given(
    B=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=12),
    kinds=st.lists(st.sampled_from(KINDS), min_size=11, max_size=11),
    schedule=st.sampled_from(SCHEDULES),
)
def test_any_chain(device: str, B, sizes, kinds, schedule) -> None:
    grad, jacobians = chain(B, sizes, kinds, device=device)
    got = chain_backward(grad, jacobians, schedule)
    for g, w in zip(got, chain_backward_reference(grad, jacobians), strict=True):
        assert_close(g, w, 1e-11)


@device
@pytest.mark.parametrize("schedule", ["linear", "blelloch", 1])
def test_gradients(schedule, device: str) -> None:
    grad, jacobians = chain(
        2, [3, 4, 4, 2, 3, 3], ["sparse", "diagonal", "dense", "sparse shared", "sparse"], device=device
    )
    leaves = [grad] + [J if isinstance(J, Tensor) else J.values for J in jacobians]
    leaves = [t.detach().requires_grad_() for t in leaves]

    def f(grad: Tensor, *parts: Tensor) -> tuple:
        rebuilt = [p if isinstance(J, Tensor) else J.with_values(p) for J, p in zip(jacobians, parts, strict=True)]
        return tuple(chain_backward(grad, rebuilt, schedule)[1:])

    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


@device
@schedules
@samples
def test_two_runs_give_the_same_bits(sample: str, schedule, device: str) -> None:
    inputs = chain(*SAMPLES[sample], torch.float32, device)
    for a, b in zip(chain_backward(*inputs, schedule), chain_backward(*inputs, schedule), strict=True):
        assert torch.equal(a, b)


@device
@schedules
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_stays_alone(bad: float, schedule, device: str) -> None:
    grad, jacobians = chain(3, [8] * 7, ["sparse", "diagonal"] * 3, torch.float32, device)
    clean = chain_backward(grad, jacobians, schedule)
    jacobians[2].values[1] = bad
    for g, c in zip(chain_backward(grad, jacobians, schedule), clean, strict=True):
        assert torch.equal(g[[0, 2]], c[[0, 2]])


@device
def test_a_net_of_layers(device: str) -> None:
    x = torch.randn(2, 3, 8, 8, device=device)
    conv = torch.nn.Conv2d(3, 6, 3, padding=1, device=device)
    after = torch.nn.Conv2d(6, 4, 3, device=device)
    hidden = conv(x)
    pooled = torch.nn.functional.max_pool2d(torch.relu(hidden), 2)
    jacobians = [
        conv2d_jacobian(after.weight.detach(), (6, 4, 4)),
        max_pool2d_jacobian(torch.relu(hidden).detach(), 2),
        relu_jacobian(hidden.detach()),
        conv2d_jacobian(conv.weight.detach(), (3, 8, 8), padding=1),
    ]
    leaf = x.clone().requires_grad_()
    out = after(torch.nn.functional.max_pool2d(torch.relu(conv(leaf)), 2))
    grad = torch.randn_like(out)
    (want,) = torch.autograd.grad(out, leaf, grad)
    for schedule in SCHEDULES:
        got = chain_backward(grad.flatten(1), jacobians, schedule)[-1]
        assert_close(got, want.flatten(1), 1e-5)
    assert pooled.shape == (2, 6, 4, 4)


@device
def test_symbolic_work_is_done_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grad, jacobians = chain(2, [9] * 7, ["sparse shared"] * 6, device=device)
    chain_backward(grad, jacobians, "blelloch")
    from weft._sparse import plan

    def refuse(*args) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(plan.MatmulPlan, "__init__", refuse)
    chain_backward(grad, [J.with_values(2 * J.values) for J in jacobians], "blelloch")


@device
def test_autocast_takes_the_widest_dtype(device: str) -> None:
    grad, jacobians = chain(2, [5] * 5, ["sparse", "diagonal"] * 2, torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = chain_backward(grad.bfloat16(), jacobians)
    assert all(g.dtype == torch.float32 for g in got[1:])


@device
def test_opcheck_and_vmap(device: str) -> None:
    grad, jacobians = chain(2, [5, 4, 4, 3], ["sparse", "diagonal", "sparse shared"], torch.float64, device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    crows = [none if J._pattern.diagonal else J.crow for J in jacobians]
    cols = [none if J._pattern.diagonal else J.col for J in jacobians]
    values = [J.values.requires_grad_() for J in jacobians]
    opcheck(torch.ops.weft.csr_chain, (grad.requires_grad_(), crows, cols, values))
    values = [v.detach() for v in values]
    grads = torch.randn(3, 2, 5, dtype=torch.float64, device=device)
    got = torch.func.vmap(lambda g: torch.ops.weft.csr_chain(g, crows, cols, values)[-1])(grads)
    want = torch.stack([torch.ops.weft.csr_chain(g, crows, cols, values)[-1] for g in grads])
    assert_close(got, want, 1e-14)


good = sparse(4, 3, 2, torch.float32, "cpu")
BAD = {
    "does not chain": (
        (torch.zeros(2, 3), [good, good]),
        ValueError,
        r"jacobians\[1\] does not chain.*be 4.*\[2, 4, 3\]",
    ),
    "dense does not chain": (
        (torch.zeros(2, 3), [good, torch.zeros(5, 3)]),
        ValueError,
        r"jacobians\[1\] does not chain",
    ),
    "batch": ((torch.zeros(5, 3), [good]), ValueError, r"jacobians\[0\] must have grad's batch, 5"),
    "dtype": ((torch.zeros(2, 3).double(), [good]), TypeError, r"jacobians\[0\] must have the dtype of grad"),
    "grad": ((torch.zeros(2, 3, 1), [good]), ValueError, "grad must be"),
    "integer grad": ((torch.zeros(2, 3).long(), [good]), TypeError, "grad must be float16"),
    "nothing": ((torch.zeros(2, 3), [good, None]), TypeError, r"jacobians\[1\] must be a Tensor"),
    "schedule": ((torch.zeros(2, 3), [good], "fast"), ValueError, "schedule must be"),
    "levels": ((torch.zeros(2, 3), [good], -1), ValueError, "must not be negative"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=f"chain_backward: .*{message}"):
        chain_backward(*arguments)


@pytest.mark.cuda
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("links", [5, 130, 700])
def test_capture(schedule, links: int) -> None:
    """More links than one launch takes, too."""
    grad, jacobians = chain(
        3, [16] * (links + 1), ["sparse", "diagonal", "sparse shared"] * links, torch.float32, "cuda"
    )
    chain_backward(grad, jacobians, schedule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain_backward(grad, jacobians, schedule)
    grad.normal_()
    for J in jacobians:
        J.values.mul_(0.9)
    graph.replay()
    for g, w in zip(captured, chain_backward(grad, jacobians, schedule), strict=True):
        assert torch.equal(g, w)


def layers_of(sizes: list[int], density: float, B: int, dtype: torch.dtype) -> tuple[Tensor, list[BatchedCSR]]:
    """Rows of every width, values that the batch shares and that it does not, diagonals one and two at a time."""
    torch.manual_seed(0)
    jacobians = [relu_jacobian(torch.randn(B, sizes[0], device="cuda").to(dtype))]
    for k, (columns, rows) in enumerate(pairwise(sizes)):
        jacobians.append(sparse(rows, columns, B if k % 3 == 1 else None, dtype, "cuda", density if k % 2 else 0.001))
        for _ in range(k % 3):
            jacobians.append(relu_jacobian(torch.randn(B, rows, device="cuda").to(dtype)))
    return torch.randn(B, sizes[0], device="cuda").to(dtype), jacobians


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [1, 3, 16])
@pytest.mark.parametrize("size", [37, 1000, 2000, 3000], ids=lambda n: f"n={n}")
def test_single_products_again_and_captured(size: int, B: int, dtype: torch.dtype) -> None:
    """Clusters, whose threads have one row or two, and the whole grid: every number, the same bits, in a CUDA graph."""
    sizes = [size, size + 1, size - 3, size, size + 2, size, size]
    grad, jacobians = layers_of(sizes, 60 / size, B, dtype)
    patterns = [J._pattern for J in jacobians]
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    crows, cols = ([none if p.diagonal else t for p, t in zip(patterns, ts, strict=True)]
                   for ts in ([p.crow for p in patterns], [p.col for p in patterns]))  # fmt: skip
    values = [J.values for J in jacobians]

    def chain() -> list[Tensor]:
        return torch.ops.weft.csr_chain(grad, crows, cols, values)

    with poisoned():
        got = chain()
    x = grad
    for J, g in zip(jacobians, got, strict=True):
        assert_close(g, J.to(torch.float64).mv(x.double()))
        x = g
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    grad.normal_()
    for _ in range(3):
        graph.replay()
        for g, w in zip(captured, chain(), strict=True):
            assert torch.equal(g, w)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize(("size", "blocks"), [(37, 1), (110, 2), (300, 4), (600, 8), (1100, 16)])
def test_clusters_of_every_number_of_blocks(size: int, blocks: int, B: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whose numbers stay in the block, or are sent; rows for one turn of a cluster's threads and for two."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no clusters")
    grad = torch.randn(B, size, device="cuda").to(dtype)
    jacobians = []
    for k, (columns, rows) in enumerate(pairwise([size, size + 3, size, size - 1, size + 1, size])):
        jacobians.append(sparse(rows, columns, B if k == 1 else None, dtype, "cuda", 20 / size))
        jacobians += [relu_jacobian(torch.randn(B, rows, device="cuda").to(dtype))] * (k % 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with poisoned():
            got = chain_backward(grad, jacobians, "linear")
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (grid,) = [event["args"]["grid"] for event in events if "csr_chain_cluster_kernel" in event.get("name", "")]
    assert grid == [B * blocks, 1, 1]
    for J, (x, g) in zip(jacobians, pairwise(got), strict=True):
        assert_close(g, J.to(torch.float64).mv(x.double()))
    for g, again in zip(got, chain_backward(grad, jacobians, "linear"), strict=True):
        assert torch.equal(g, again)


@pytest.mark.cuda
def test_one_kernel_gives_what_single_products_do() -> None:
    """Rows of every width, more samples than one group of lanes takes, and more rows than the grid has."""
    for sizes, density in (([300, 5000, 5000, 70_000, 200], 0.01), ([2000, 2000, 2000, 1000], 0.5)):
        for B in (1, 3, 9):
            grad = torch.randn(B, sizes[0], device="cuda")
            jacobians = [
                sparse(rows, columns, B if k == 1 else None, torch.float32, "cuda", density)
                for k, (columns, rows) in enumerate(pairwise(sizes))
            ]
            jacobians.insert(2, relu_jacobian(torch.randn(B, sizes[2], device="cuda")))
            got = chain_backward(grad, jacobians, "linear")
            want = grad
            for J, g in zip(jacobians, got[1:], strict=True):
                want = J.mv(want)
                assert_close(g, want, 1e-5)


@device
def test_small_chains_of_many_samples_and_of_uneven_products(device: str) -> None:
    """More samples than a device has processors, and products of a few rows between those of many."""
    for sizes, batches in (([20, 30, 10, 5], (1, 140, 300)), ([900, 3, 1200, 1, 800, 1100, 7], (1, 5))):
        for B in batches:
            grad = torch.randn(B, sizes[0], device=device)
            jacobians = [sparse(rows, columns, None, torch.float32, device, 0.3) for columns, rows in pairwise(sizes)]
            got = chain_backward(grad, jacobians, "linear")
            want = grad
            for J, g in zip(jacobians, got[1:], strict=True):
                want = J.mv(want)
                assert_close(g, want, 1e-5)


@device
@schedules
def test_torchs_own_csr_tensors(device: str, schedule: str | int) -> None:
    """In any mixture with the others: shared, per sample, with values that samples share in memory, and without."""
    grad, jacobians = chain(
        3, [6, 7, 7, 5, 8, 4, 4], ["sparse shared", "sparse", "dense", *["sparse"] * 3], device=device
    )
    given = [J.to_sparse_csr() if isinstance(J, BatchedCSR) else J for J in jacobians]
    J = jacobians[3]
    crow, col = given[3].crow_indices(), given[3].col_indices()
    jacobians[3] = J.with_values(J.values[0].expand(3, -1))
    given[3] = torch.sparse_csr_tensor(crow, col, J.values[0].expand(3, -1), given[3].shape)
    assert [J.dim() for J in given] == [2, 3, 3, 3, 3, 3]
    want = chain_backward_reference(grad, jacobians)
    for other in (chain_backward(grad, given, schedule), chain_backward_reference(grad, given)):
        for g, w in zip(other, want, strict=True):
            assert_close(g, w, 1e-12)
    one = chain_backward(grad[0], given[:1], schedule)
    assert_close(one[1], want[1][0], 1e-12)


@device
def test_gradients_of_torchs_own_csr_tensors(device: str) -> None:
    grad, jacobians = chain(2, [5, 6, 4], ["sparse shared", "sparse"], device=device)
    leaves = [J.to_sparse_csr().requires_grad_() for J in jacobians]
    values = [J.values.clone().requires_grad_() for J in jacobians]
    matrices = [J.with_values(v) for J, v in zip(jacobians, values, strict=True)]
    for got, want in zip(chain_backward(grad, leaves)[1:], chain_backward(grad, matrices)[1:], strict=True):
        weight = torch.randn_like(want)
        for of, into in ((got, leaves), (want, values)):
            (of * weight).sum().backward(inputs=into, retain_graph=True)
    for leaf, v in zip(leaves, values, strict=True):
        assert_close(leaf.grad.values(), v.grad, 1e-12)


def test_patterns_of_torchs_own_csr_tensors_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grad, jacobians = chain(2, [9] * 7, ["sparse", "sparse shared"] * 3)
    given = [J.to_sparse_csr() for J in jacobians]
    want = chain_backward(grad, given, "blelloch")
    from weft._sparse import csr, plan

    def refuse(*args) -> None:
        raise AssertionError("looked at again")

    monkeypatch.setattr(plan.MatmulPlan, "__init__", refuse)
    monkeypatch.setattr(csr, "_check_indices", refuse)
    for g, w in zip(chain_backward(grad, given, "blelloch"), want, strict=True):
        assert torch.equal(g, w)
    given[1].col_indices()[0] = 0  # written to: another pattern
    with pytest.raises(AssertionError, match="looked at again"):
        chain_backward(grad, given, "blelloch")


def test_what_is_no_chain_of_torchs_own_csr_tensors() -> None:
    grad, dense = torch.randn(2, 3), torch.tensor([[[1.0, 0, 0], [0, 1, 0]], [[0, 1, 0], [0, 0, 1]]])
    with pytest.raises(ValueError, match=r"jacobians\[1\] .*from_sparse_csr.* one pattern"):
        chain_backward(grad, [torch.randn(3, 3), dense.to_sparse_csr()])
    for other in (dense[0].to_sparse(), dense[0].to_sparse_csc()):
        with pytest.raises(TypeError, match=r"jacobians\[0\] .*from_sparse_csr.* layout"):
            chain_backward(grad, [other])
    with pytest.raises(TypeError, match=r"jacobians\[0\] .*int64"):
        chain_backward(grad, [dense[0].long().to_sparse_csr()])
    with pytest.raises(ValueError, match=r"jacobians\[0\] does not chain"):
        chain_backward(grad, [dense[0].t().to_sparse_csr()])
    with pytest.raises(TypeError, match=r"jacobians\[0\] must be dense"):
        torch.ops.weft.chain_backward(grad, [dense[0].to_sparse_csr()])


@device
@schedules
def test_what_python_has_to_see(device: str, schedule: str | int) -> None:
    """Modes that override functions, transforms, forward-mode AD: the same numbers by single products."""
    kinds = ["sparse", "diagonal", "sparse shared", "dense", "sparse"]
    grad, jacobians = chain(2, [6, 7, 7, 5, 8, 4], kinds, device=device)
    want = chain_backward(grad, jacobians, schedule)
    with torch.overrides.BaseTorchFunctionMode():
        for g, w in zip(chain_backward(grad, jacobians, schedule), want, strict=True):
            assert_close(g, w, 1e-12)
    shared = [J for J in jacobians if not isinstance(J, Tensor)][2:3]
    start = torch.randn(2, 3, shared[0].shape[1], dtype=grad.dtype, device=device)
    got = torch.func.vmap(lambda g: chain_backward(g, shared, schedule)[-1])(start)
    assert_close(got.flatten(0, 1), chain_backward(start.flatten(0, 1), shared, schedule)[-1], 1e-12)
    _, tangent = torch.func.jvp(lambda g: chain_backward(g, jacobians, schedule)[-1], (grad,), (grad,))
    assert_close(tangent, want[-1], 1e-12)
