"""linear_scan where products of its steps overflow, underflow or cancel, and where a row is not finite."""

from __future__ import annotations

import pytest
import torch
from weft.scan import linear_scan, linear_scan_reference

from tests.common import pairs
from tests.scan.linear_scans import (
    CANCELLING,
    CHAOS,
    assert_exact,
    cancelling,
    chaotic,
    chaotic_bound,
    chaotic_error,
    device,
    run,
    wide,
)
from tests.scan.samples import LinearScan as Sample


@device
@pytest.mark.parametrize("layout", ["dense", "diagonal"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["A", "b", "x0"])
def test_a_bad_row_stays_alone(where: str, bad: float, layout: str, device: str) -> None:
    single, half = torch.float32, torch.float16
    for T, H, dtype in [(50, 6, single), (50, 40, single), (600, 20, single), (5000, 3, single), (900, 31, half)]:
        A, b, x0 = Sample(T, 3, H, layout).inputs(dtype, device)
        clean = linear_scan(A, b, x0)
        {"A": A[T // 2], "b": b[T // 2], "x0": x0}[where][1] = bad
        x = linear_scan(A, b, x0)
        assert torch.equal(x[:, [0, 2]], clean[:, [0, 2]])
        at = 0 if where == "x0" else T // 2
        assert torch.equal(x[:at, 1], clean[:at, 1])
        assert not x[at:, 1].isfinite().any(dim=-1).all(), "it flows through its own row"
        if bad != bad:
            assert x[at:, 1].isnan().all()
        weight = torch.ones_like(x)
        _, gradients = run((A, b, x0), {}, weight)
        assert gradients[1][:, [0, 2]].isfinite().all() and gradients[0][:, [0, 2]].isfinite().all()


@device
@pairs(
    size=[("dense", 10_000, 2, 6), ("dense", 3_000, 1, 20), ("dense", 700, 2, 40), ("dense", 300, 1, 130),
          ("diagonal", 10_000, 2, 6), ("diagonal", 700, 2, 40)],
    kind=CHAOS, reverse=[False, True],
)  # fmt: skip
def test_chaotic_states(size: tuple[str, int, int, int], kind: str, reverse: bool, device: str) -> None:
    layout, T, B, H = size
    T = T if device == "cuda" else min(T, 3000)  # the reference takes a processor long
    A, b, x0 = (t.float() for t in chaotic(kind, T, B, H, layout))
    if reverse:
        A, b = A.flip(0), b.flip(0)
    want = linear_scan_reference(*wide(A, b, x0), reverse=reverse)
    x = linear_scan(*(t.to(device) for t in (A, b, x0)), reverse=reverse).cpu()
    assert chaotic_error(x, want) < chaotic_bound(T)


@device
@pytest.mark.parametrize("layout", ["dense", "diagonal"])
@pytest.mark.parametrize("kind", ["up", "down", "both", "zeros"])
@pytest.mark.parametrize(("T", "B", "H"), [(10_000, 1, 6), (600, 2, 40)])
def test_chaotic_gradients(T, B, H, kind: str, layout: str, device: str) -> None:
    """The gradient runs back through the same products; by the last x, it starts where x0 does in the states."""
    T = T if device == "cuda" else min(T, 3000)
    A, _, start = (t.float() for t in chaotic(kind, T, B, H, layout))
    A = A.flip(0).to(device)
    b = torch.zeros(T, B, H, device=device, requires_grad=True)
    x0 = torch.zeros(B, H, device=device, requires_grad=True)
    if kind == "zeros":
        start = torch.zeros_like(start)
    x = linear_scan(A, b, x0)
    got_b, got_x0 = torch.autograd.grad(x[-1], [b, x0], start.to(device))
    # lambda[t] = A[t+1]^T lambda[t+1]
    want = linear_scan_reference(
        A.cpu().double(), torch.zeros(T, B, H).double(), start.double(), reverse=True, transpose=True
    )
    assert chaotic_error(got_b.cpu()[:-1], want[1:]) < chaotic_bound(T)
    assert chaotic_error(got_x0.cpu(), want[0]) < chaotic_bound(T)


@device
@pairs(case=CANCELLING, dtype=[torch.float64, torch.float32, torch.bfloat16], reverse=[False, True])
def test_states_and_gradients_that_cancel(case: tuple, dtype: torch.dtype, reverse: bool, device: str) -> None:
    problem = cancelling(*case, reverse=reverse)
    A, b, x0, grad = (t.to(device=device, dtype=dtype) for t in problem[:4])
    assert_exact(problem, *run((A, b, x0), {"reverse": reverse}, grad))


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["dense", "diagonal"])
def test_graph_replay_of_chaotic_states(layout: str) -> None:
    """Captured on tame inputs, replayed on chaotic ones: what has to be done again is decided on the device."""
    T, B, H = 6000, 2, 6
    static = [t.cuda() for t in Sample(T, B, H, layout).inputs(torch.float32)]
    linear_scan(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = linear_scan(*static)
    for kind in CHAOS:
        chaos = [t.float() for t in chaotic(kind, T, B, H, layout)]
        for t, source in zip(static, chaos, strict=True):
            t.copy_(source)
        graph.replay()
        assert chaotic_error(x.cpu(), linear_scan_reference(*wide(*chaos))) < chaotic_bound(T)


@pytest.mark.cuda
@pytest.mark.parametrize("case", [case for case in CANCELLING if case[1] != 700], ids=lambda c: "-".join(map(str, c)))
def test_graph_replay_of_states_and_gradients_that_cancel(case: tuple) -> None:
    _, T, B, H, layout = case
    static = [t.cuda() for t in Sample(T, B, H, layout).inputs(torch.float32)]
    weight = torch.randn_like(static[1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(tuple(static), {}, weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(tuple(static), {}, weight)
    problem = cancelling(*case)
    for t, source in zip([*static, weight], problem[:4], strict=True):
        t.copy_(source)
    graph.replay()
    assert_exact(problem, *captured)


@pytest.mark.cuda
@pairs(
    size=[(900, 1, 33), (900, 1, 64), (500, 2, 100), (900, 1, 128), (900, 1, 160)],
    kind=CHAOS,
    reverse=[False, True],
    transpose=[False, True],
)
def test_tall_chaotic_states(size: tuple, kind: str, reverse: bool, transpose: bool) -> None:
    T, B, H = size
    A, b, x0 = (t.float() for t in chaotic(kind, T, B, H, "dense"))
    if reverse:
        A, b = A.flip(0), b.flip(0)
    want = linear_scan_reference(*wide(A, b, x0), reverse=reverse, transpose=transpose)
    x = linear_scan(*(t.cuda() for t in (A, b, x0)), reverse=reverse, transpose=transpose).cpu()
    assert chaotic_error(x, want) < chaotic_bound(T)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["A", "b", "x0"])
@pytest.mark.parametrize("H", [40, 64, 96, 128, 160])
def test_a_bad_tall_row_stays_alone(H: int, where: str, bad: float) -> None:
    A, b, x0 = Sample(800, 2, H).inputs(torch.float32, "cuda")
    clean = linear_scan(A, b, x0)
    at = 0 if where == "x0" else 400
    {"A": A[at], "b": b[at], "x0": x0}[where][1] = bad
    x = linear_scan(A, b, x0)
    assert torch.equal(x[:, 0], clean[:, 0])
    assert torch.equal(x[:at, 1], clean[:at, 1])
    assert not x[at:, 1].isfinite().any(dim=-1).all(), "it flows through its own row"
    if bad != bad:
        assert x[at:, 1].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("H", [64, 128, 160])
def test_graph_replay_of_tall_chaotic_states(H: int) -> None:
    static = [t.cuda() for t in Sample(600, 1, H).inputs(torch.float32)]
    linear_scan(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = linear_scan(*static)
    for kind in CHAOS:
        chaos = [t.float() for t in chaotic(kind, 600, 1, H, "dense")]
        for t, source in zip(static, chaos, strict=True):
            t.copy_(source)
        graph.replay()
        assert chaotic_error(x.cpu(), linear_scan_reference(*wide(*chaos))) < chaotic_bound(600)
