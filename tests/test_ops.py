"""What every op of torch.ops.weft promises, whatever it computes, by the samples of tests/ops.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.library import opcheck

from tests.common import DEVICES, assert_close, poisoned, relative_error
from tests.ops import OTHERWISE, Call, Op, every_op

OPS = every_op()

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-2}

device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _exact_fp32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


_ONE_WORD = {"rnn_relu": "rnn_tanh", "slstm_exp": "slstm", "min_gru_g": "min_gru", "min_lstm_g": "min_lstm",
             "scan": "", "newton": "", "reverse": "", "transpose": ""}  # fmt: skip
"""Which of a kind of operator runs, and which way: words, which graphs hand on as they are."""


def traced(op: Op) -> list:
    """The first of those samples whose graphs differ by a word."""
    found: dict[str, Any] = {}
    for sample in op.samples:
        found.setdefault("-".join(filter(None, (_ONE_WORD.get(word, word) for word in str(sample).split("-")))), sample)
    return [*found.values()]


def few(op: Op, size: int) -> list:
    """A few of `traced`, in which every so many words meet that do in one of them: words by their place, and that one
    of them is left out."""
    left = traced(op)
    words = [{f"{place}:{word}" for place, word in enumerate(str(sample).split("-"))} for sample in left]
    every = set().union(*words)
    marks = [sorted(here | {f"no {word}" for word in every - here}) for here in words]
    met = [{*itertools.combinations(some, size)} for some in marks]
    missing, chosen = set().union(*met), []
    while missing:
        at = max(range(len(left)), key=lambda i: len(met[i] & missing))
        chosen.append(left[at])
        missing -= met[at]
    return chosen or left


def samples(kinds: Callable[[Op], list], keep: Callable[[Op], bool] = lambda op: True):
    cases = [pytest.param(op, s, id=f"{op.name}-{s}") for op in OPS if keep(op) for s in kinds(op)]
    return pytest.mark.parametrize(("op", "sample"), cases)


small = samples(lambda op: op.samples)
in_graphs = samples(lambda op: few(op, 1))
small_and_large = samples(lambda op: [*op.samples, *op.large])
large = samples(lambda op: op.large or op.samples)
differentiable = samples(lambda op: op.samples, lambda op: op.differentiable)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """The same bits, NaN where there is NaN."""
    pairs = zip(found, expected, strict=True)
    return all(f.dtype == e.dtype and torch.equal(f.nan_to_num(), e.nan_to_num()) for f, e in pairs)


def check(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for f, e in zip(found, expected, strict=True):
        assert relative_error(f, e) <= bound


def test_every_op_has_samples() -> None:
    names = {s.name.removeprefix("weft::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("weft::")}
    here = {op.name for op in OPS}
    assert len(here) == len(OPS) and not here & set(OTHERWISE)
    assert here | set(OTHERWISE) <= names
    known = here | set(OTHERWISE)
    assert {n for n in names - known if n.removesuffix("_backward") not in known} == set()
    for op in OPS:
        assert op.samples and len({str(s) for s in op.samples}) == len(op.samples)


@device
@samples(traced)
def test_opcheck(op: Op, sample: Any, device: str) -> None:
    """In a graph the first: test_compiles_whole has more of them."""
    call = Call(op, sample, device, torch.float32)
    leaves = [t.requires_grad_(op.differentiable) for t in call.operands]
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    if sample is traced(op)[0]:
        tests = *tests, "test_aot_dispatch_dynamic"
    opcheck(call.packet.default, *call.arguments(*leaves), test_utils=tests)


@device
@differentiable
def test_gradcheck(op: Op, sample: Any, device: str) -> None:
    call = Call(op, sample, device, torch.float64)
    leaves = [t.requires_grad_() for t in call.operands]
    assert gradcheck(call, leaves, check_batched_grad=True)
    # In random directions; torch's check of these cannot leave out a gradient that is no function of its operands.
    assert gradgradcheck(call, leaves, fast_mode=op.name != "layer_chain")


@device
@samples(lambda op: op.samples, lambda op: not op.differentiable)
def test_gradients_are_refused(op: Op, sample: Any, device: str) -> None:
    call = Call(op, sample, device, torch.float32)
    leaves = [t.requires_grad_() for t in call.operands]
    found = [r for r in call(*leaves) if r.requires_grad]
    with pytest.raises(RuntimeError, match=f"{op.name}: not differentiable"):
        torch.autograd.grad([r.sum() for r in found], leaves)


@device
@small
def test_forward_mode_is_right_or_refused(op: Op, sample: Any, device: str) -> None:
    """Of tangents of all operands, and of one where gradients are asked for the others."""
    call = Call(op, sample, device, torch.float64 if op.differentiable else torch.float32)
    operands, step = call.operands, 1e-6
    everything = range(len(operands))
    for followed in [everything, *([i] for i in everything)]:
        tangents = [torch.rand_like(t) if i in followed else torch.zeros_like(t) for i, t in enumerate(operands)]
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(t, d) if i in followed else t.detach().requires_grad_()
                for i, (t, d) in enumerate(zip(operands, tangents, strict=True))
            ]
            try:
                results = call(*duals)
            except RuntimeError as error:
                assert "jvp is not implemented" in str(error) or f"{op.name}: not differentiable" in str(error)
                continue
            found = [forward_ad.unpack_dual(r).tangent for r in results]
            found = [torch.zeros_like(r) if d is None else d.detach() for r, d in zip(results, found, strict=True)]
        after, before = (call(*(t + way * d for t, d in zip(operands, tangents, strict=True))) for way in (step, -step))
        check(found, [(a - b) / (2 * step) for a, b in zip(after, before, strict=True)], 1e-6)


@device
@in_graphs
def test_compiles_whole(op: Op, sample: Any, device: str) -> None:
    """One graph for all sizes, or one more where two sizes that were equal, or 1, are no longer."""
    from torch._dynamo.testing import CompileCounterWithBackend  # here, because it takes seconds

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    first = Call(op, sample, device, torch.float64 if op.differentiable else torch.float32)
    packet = first.packet

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(args, kwargs):
        return packet(*args, **kwargs)

    for more in (0, 2, 5):
        call = Call(op, sample, device, first.operands[0].dtype, more)
        leaves = [t.detach().requires_grad_(op.differentiable) for t in call.operands]
        args, kwargs = call.arguments(*leaves)
        found = call.with_gradients(op.results(sample, compiled(args, kwargs)), leaves)
        check(found, call.run(*call.operands), 1e-12)
    assert counter.frame_count <= 2


@device
@small
def test_autocast(op: Op, sample: Any, device: str) -> None:
    """Results in the dtype of the op's rule, gradients in those of the operands."""
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    call = Call(op, sample, device, single)
    expected = call.run(*call.operands)
    kinds = [[single] * len(call.operands), [half] * len(call.operands)]
    kinds.append([half if i else single for i in range(len(call.operands))])
    if op.differentiable:
        kinds.append([double] * len(call.operands))
    for dtypes in kinds:
        leaves = [
            t.detach().to(d).requires_grad_(op.differentiable) for t, d in zip(call.operands, dtypes, strict=True)
        ]
        wanted = op.autocast(sample, device, leaves)
        with torch.autocast(device, half):
            results = call(*leaves)
        assert all(r.dtype == wanted for r in results if r.is_floating_point())
        if not op.differentiable:
            continue
        grads = call.with_gradients(results, leaves)[len(results) :]
        assert [g.dtype for g in grads] == dtypes
        bound = BOUNDS[half] if half in (wanted, *dtypes) or wanted == torch.float16 else BOUNDS[single]
        check(results, expected[: len(results)], bound)


@device
@samples(lambda op: op.samples, lambda op: op.vmap)
def test_vmap(op: Op, sample: Any, device: str) -> None:
    call = Call(op, sample, device, torch.float64)
    count = range(len(call.operands))
    for chosen in (count, count[::2], count[:1], count[-1:]):
        mapped = [i in chosen for i in count]
        dims = tuple(
            (i + 1) % (t.dim() + 1) if m else None for i, (t, m) in enumerate(zip(call.operands, mapped, strict=True))
        )
        batched = [
            t if d is None else torch.stack([t * (1 + i) for i in range(3)], d)
            for t, d in zip(call.operands, dims, strict=True)
        ]
        found = torch.func.vmap(call, in_dims=dims)(*batched)
        for i in range(3):
            each = call(*(t if d is None else t.select(d, i) for t, d in zip(batched, dims, strict=True)))
            check([f[i] for f in found], each, 1e-12)


@device
@small_and_large
def test_two_runs_give_the_same_bits(op: Op, sample: Any, device: str) -> None:
    call = Call(op, sample, device, torch.float32)
    with poisoned():
        found = call.run(*call.operands)
    assert same(found, call.run(*call.operands))


def _strided(t: Tensor) -> Tensor:
    """Every second element of a larger tensor, in each dimension; the rest is NaN."""
    fill = float("nan") if t.is_floating_point() else -7
    wide = torch.full([2 * s + 1 for s in t.shape], fill, dtype=t.dtype, device=t.device)
    view = wide[tuple(slice(1, None, 2) for _ in t.shape)]
    view.copy_(t)
    return view


def _transposed(t: Tensor) -> Tensor:
    return t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() else t


@device
@small_and_large
def test_strides(op: Op, sample: Any, device: str) -> None:
    call = Call(op, sample, device, torch.float32)
    expected = call.run(*call.operands)
    for view in (_strided, _transposed):
        with poisoned():
            changed = call.viewed(view)
            check(changed.run(*changed.operands, view=view), expected, BOUNDS[torch.float32])


@device
@samples(lambda op: op.empty)
def test_empty(op: Op, sample: Any, device: str) -> None:
    """On every device what the CPU gives in fp64: the shapes, what is left of the values, no NaN."""
    call, exact = Call(op, sample, device, torch.float32), Call(op, sample, "cpu", torch.float32)
    operands = [t.cpu() for t in call.operands]
    operands = [t.double() for t in operands] if op.differentiable else operands
    with poisoned():
        found = call.run(*call.operands)
    for f, e in zip(found, exact.run(*operands), strict=True):
        assert f.device.type == device and f.is_contiguous()
        assert_close(f, e, BOUNDS[torch.float32])


@pytest.mark.cuda
@large
def test_side_stream(op: Op, sample: Any) -> None:
    """On a stream of its own, behind work that is still running there."""
    call = Call(op, sample, "cuda", torch.float32)
    expected = call.run(*call.operands)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.full_like(t, float("nan")) for t in call.operands]
        torch.cuda._sleep(20_000_000)
        for to, t in zip(late, call.operands, strict=True):
            to.copy_(t)
        found = call.run(*late)
    torch.cuda.current_stream().wait_stream(stream)
    assert same(found, expected)


@pytest.mark.cuda
@large
def test_cuda_graph(op: Op, sample: Any) -> None:
    """Captured once, replayed on other data: forward and backward."""
    call = Call(op, sample, "cuda", torch.float32)
    static = call.operands
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call.run(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.run(*static)
    for tensor in static:
        tensor.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert same([c.clone() for c in captured], call.run(*static))


@pytest.mark.cuda(devices=2)
@large
def test_second_device(op: Op, sample: Any) -> None:
    """Runs where its arguments are, whatever the current device."""
    operands, found = Call(op, sample, "cpu", torch.float32).operands, []
    for where in ("cuda:0", "cuda:1"):
        torch.manual_seed(20)  # complex arguments are no operands: each call draws its own
        call = Call(op, sample, where, torch.float32)
        with torch.cuda.device(0):
            found.append(call.run(*(t.to(where) for t in operands)))
            assert torch.cuda.current_device() == 0
        assert all(t.device == torch.device(where) for t in found[-1])
    check(found[1], [t.cpu() for t in found[0]], BOUNDS[torch.float32])
