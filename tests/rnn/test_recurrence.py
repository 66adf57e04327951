"""The recurrence kernel of weft::rnn on CUDA: every tier on small sizes, its precision, and what it does when it cannot
run. That it compiles is tested without a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import weft
from hypothesis import HealthCheck, given, settings, strategies
from weft import _C, _ops

from tests.common import check_close, differentiate, poisoned
from tests.rnn.sequential import doubles
from tests.rnn.test_rnn import (
    BOUNDS,
    CELLS,
    RESULTS,
    Sample,
    arguments,
    exact_arguments,
    gradients,
    names,
    reference,
    rnn,
)

SOURCE = "rnn/persistent/cuda/recurrence.jit.cu"
ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = "WEFT_RNN_GEOMETRY"
TIERS = (
    "tier=small",
    "tier=small group=1 columns=3 warps=8 split=2",
    "tier=cluster group=2",
    "tier=cluster group=4 columns=3",
    "tier=cluster group=8",
    "tier=cluster group=16 columns=1",
    "tier=grid group=16",
    "tier=grid group=16 columns=2",
    "tier=grid group=32",
    "tier=grid group=32 columns=3 directions=1",
    "tier=grid group=32 columns=3 cluster=2",
    "tier=grid group=32 columns=3 cluster=4",
    "tier=grid group=32 columns=1 cluster=8",
)
FMA_TIERS = (
    "tier=small group=1 columns=1 product=fma",
    "tier=small group=1 columns=3 warps=8 split=2 product=fma",
    "tier=cluster group=4 columns=3 product=fma",
    "tier=cluster group=16 columns=1 product=fma",
    "tier=grid group=32 columns=2 product=fma",
    "tier=grid group=32 columns=2 product=fma cluster=4",
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TF32 = 5e-3
"""Bound where products are in TF32, of 11 bits like float16."""

PRODUCTS = [(tier, dtype, False) for tier in TIERS for dtype in DTYPES]
PRODUCTS += [(tier, torch.float32, True) for tier in TIERS] + [(tier, torch.float32, False) for tier in FMA_TIERS]
"""Tier, dtype, and whether in TF32."""

OBSTACLE = _C.jit.why_unavailable() if _ops.WITH_CUDA else "built for the CPU alone"


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
@pytest.mark.parametrize("cell", range(4))
def test_compiles(cell: int):
    """Sizes that fill no tile, every type in both passes, products from registers and from shared memory; of the sizes
    of a group each with every type, every pass and every cell, the large one with an exchange and without. Not all of
    a type, a pass and a cell meet, but each two of them."""

    def defines(kind: int, backward: int, group: int, fma: int = 0) -> list[str]:
        columns, resident = (3, 99) if kind % 2 else (9, 1)
        exchange = int(group == 16 and kind % 2)
        constants = {
            "CELL": cell, "TYPE": kind, "BACKWARD": backward, "HEADS": 1, "HIDDEN": 61, "GROUP": group,
            "COLUMNS": columns, "UNITS": math.ceil(math.ceil(61 / group) / 8) * 8, "WARPS": 8,
            "SPLIT": 8 if exchange else 4, "RESIDENT": resident, "EXCHANGE": exchange,
            "PACKED": (kind // 2 + backward) % 2, "FMA": fma, "CLUSTER": 1 + 3 * exchange,
        }  # fmt: skip
        return [f"{k}={v}" for k, v in constants.items()]

    asked = [defines(kind, (kind + cell) % 2, (1, 4, 16)[(kind + cell) % 3]) for kind in range(4)]
    asked.append(defines(3, cell % 2, (1, 4, 16)[cell % 3], fma=1))
    if cell in (0, 3):  # none of the above has an exchange
        kind = {0: 1, 3: 3}[cell]
        asked.append(defines(kind, (kind + cell) % 2, 16))
    _C.jit.compile_many([(SOURCE, each, 90) for each in asked])
    # Below 9.0 there are no clusters.
    asked = [defines(0, cell % 2, 1), *(defines(kind, (kind + cell) % 2, 16) for kind in (1, 3))]
    _C.jit.compile_many([(SOURCE, [{"CLUSTER=4": "CLUSTER=1"}.get(d, d) for d in each], 80) for each in asked])


def tier_samples(cell: str, tier: str) -> list[Sample]:
    """Sizes of which every block of a group has a part: odd, packed, and fewer sequences than a group takes."""
    part = (
        4
        if tier.startswith("tier=small")
        else 2
        if tier.startswith(("tier=cluster group=2", "tier=cluster group=4"))
        else 1
    )
    return [
        Sample(cell, 7, 5, 3, 253 // part, bidirectional=True),
        Sample(cell, 6, 5, 3, 256 // part, bidirectional=True, state=False, lengths=(6, 4, 4, 1, 1)),
        Sample(cell, 5, 2, 2, 256 // part),
    ]


def assert_geometry(sample: Sample) -> None:
    """Without one the reference would run, and pass."""
    for backward in (False, True):
        sizes = {"cell": sample.cell, "dtype": str(sample.dtype)[6:], "hidden": sample.H, "batch": sample.B}
        sizes |= {"directions": sample.directions, "packed": sample.lengths is not None, "backward": backward}
        assert _C.rnn.geometries(device=0, **sizes), "the tier does not hold this sample"


@pytest.mark.cuda
@pytest.mark.parametrize(("tier", "dtype", "tf32"), PRODUCTS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_tiers_match_the_reference(cell: str, tier: str, dtype: torch.dtype, tf32: bool, monkeypatch):
    monkeypatch.setenv(GEOMETRY, tier)
    bound = TF32 if tf32 else BOUNDS[dtype]
    for sample in tier_samples(cell, tier):
        sample = replace(sample, dtype=dtype)
        args = arguments(sample, "cuda", requires_grad=True)
        exact, grads, which = exact_arguments(args), gradients(sample, args), sample.differentiable
        expected = reference(*exact, **sample.keywords)
        expected_grads = differentiate([expected[i] for i in which], exact.operands, doubles(grads))
        runs = []
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            assert_geometry(sample)
            for _ in range(2):
                with poisoned():
                    found = rnn(*args, **sample.keywords, keep_cells=True)
                    runs.append([*found, *differentiate([found[i] for i in which], args.operands, grads)])
        found, found_grads = runs[0][:5], runs[0][5:]
        check_close(RESULTS, [found[i] for i in which], [expected[i] for i in which], bound)
        # A ReLU unit whose sum is within its rounding of zero has the other derivative.
        kinks = 20 if cell == "rnn_relu" and (tf32 or dtype != torch.float32) else 1
        check_close(names(args), found_grads, expected_grads, kinks * bound)
        assert all(a is b or torch.equal(a, b) for a, b in zip(*runs, strict=True)), "two runs differ"


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("tier", "both"),
    (
        ("tier=grid group=32 columns=1", False),
        ("tier=grid group=32 columns=1", True),
        ("tier=grid group=32 columns=1 product=mma directions=1 cluster=4", True),
    ),
)
@pytest.mark.parametrize("cell", CELLS)
def test_a_grid_in_slices(cell: str, tier: str, both: bool, monkeypatch):
    """More groups than the device holds at once: several launches."""
    monkeypatch.setenv(GEOMETRY, tier)
    sample = Sample(cell, 6, 9, 3, 256, bidirectional=both, dtype=torch.bfloat16)
    assert_geometry(sample)
    args = arguments(sample, "cuda", requires_grad=True)
    exact, grads, which = exact_arguments(args), gradients(sample, args), sample.differentiable
    expected, found = (rnn_of(*a, **sample.keywords) for rnn_of, a in ((reference, exact), (rnn, args)))
    check_close(RESULTS, [found[i] for i in which[:2]], [expected[i] for i in which[:2]], BOUNDS[sample.dtype])
    pairs = [([r[i] for i in which[:2]], a) for r, a in ((found, args), (expected, exact))]
    found_grads = differentiate(*pairs[0][:1], args.operands, grads[:2])
    expected_grads = differentiate(*pairs[1][:1], exact.operands, doubles(grads[:2]))
    check_close(names(args), found_grads, expected_grads, (6 if cell == "rnn_relu" else 1) * BOUNDS[sample.dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize(
    "tier",
    (
        "tier=cluster group=4 columns=3",
        "tier=cluster group=4 columns=3 product=fma",
        "tier=grid group=16 columns=2",
        "tier=grid group=32 columns=3 cluster=4",
    ),
)
@pytest.mark.parametrize("cell", CELLS)
def test_bad_values_do_not_stop_an_exchange(cell: str, tier: str, value: float, monkeypatch):
    """The exchange through L2 waits for values that are not a certain NaN; no arithmetic makes that one."""
    monkeypatch.setenv(GEOMETRY, tier)
    for dtype in DTYPES[:1] if "fma" in tier else DTYPES:
        for hidden in (253, 256) if tier.startswith("tier=grid") else (125,):
            sample = Sample(cell, 6, 4, 3, hidden, dtype=dtype)
            assert_geometry(sample)
            args = arguments(sample, "cuda", requires_grad=True)
            clean = rnn(*args, **sample.keywords)[0]
            (clean_grad,) = torch.autograd.grad(clean.sum(), args.input)
            with torch.no_grad():
                args.input[2, 1] = value
                # All ones bits, the pattern itself, as an initial state.
                args.h0[0, 3] = torch.full((), -1, dtype=torch.int16 if dtype.itemsize == 2 else torch.int32).view(
                    dtype
                )
            output = rnn(*args, **sample.keywords)[0]
            (grad,) = torch.autograd.grad(output.sum(), args.input)
            assert torch.equal(output[:, [0, 2]], clean[:, [0, 2]]) and torch.equal(
                grad[:, [0, 2]], clean_grad[:, [0, 2]]
            )
            assert output[:, 3].isnan().all()
            assert cell == "rnn_relu" or grad[:, 3].isnan().any()  # whose derivative is 0 or 1
            if value != value:
                assert output[2:, 1].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize(
    "tier",
    (
        "tier=grid group=16 columns=2",
        "tier=grid group=16 columns=2 cluster=2",
        "tier=grid group=32 columns=3 cluster=8",
        "tier=grid group=16 columns=2 product=fma cluster=4",
    ),
)
@pytest.mark.parametrize("cell", CELLS)
def test_many_steps_of_a_grid(cell: str, tier: str, monkeypatch):
    """Buffers and barriers are used many times over, rows are fetched ahead, and in places blocks or whole clusters
    have no unit."""
    monkeypatch.setenv(GEOMETRY, tier)
    for hidden, packed in ((100 if tier.startswith("tier=grid group=32") else 52, False), (128, True)):
        lengths = (301, 300, 7, 1) if packed else None
        sample = Sample(cell, 301, 4, 3, hidden, bidirectional=True, lengths=lengths)
        args = arguments(sample, "cuda", requires_grad=True)
        exact, grads, which = exact_arguments(args), gradients(sample, args), sample.differentiable
        expected = reference(*exact, **sample.keywords)
        expected_grads = differentiate([expected[i] for i in which], exact.operands, doubles(grads))
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            assert_geometry(sample)
            found = rnn(*args, **sample.keywords, keep_cells=True)
            found_grads = differentiate([found[i] for i in which], args.operands, grads)
        bound = 10 * BOUNDS[sample.dtype]
        check_close(RESULTS, [found[i] for i in which], [expected[i] for i in which], bound)
        check_close(names(args), found_grads, expected_grads, (20 if cell == "rnn_relu" else 1) * bound)


@pytest.mark.cuda
@pytest.mark.parametrize("directions", (1, 2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_every_size_has_a_kernel(cell: str, dtype: torch.dtype, directions: int):
    sizes = {"cell": cell, "dtype": str(dtype)[6:], "batch": 16, "directions": directions, "packed": False}
    for tf32 in (False, True):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            for hidden in (*range(1, 1024, 41), 520, 600, 720, 808, 1000, 1024):
                for backward in (False, True):
                    assert _C.rnn.geometries(device=0, hidden=hidden, backward=backward, **sizes), hidden


@pytest.mark.cuda
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(strategies.data())
def test_any_shape_in_any_tier(data):
    draw = data.draw
    cell, dtype = draw(strategies.sampled_from(CELLS)), draw(strategies.sampled_from(DTYPES))
    hidden = draw(strategies.sampled_from((1, 9, 33, 64, 150, 256, 520)))
    steps = draw(strategies.lists(strategies.integers(1, 20), min_size=1, max_size=33))
    packed = draw(strategies.booleans())
    lengths = tuple(sorted(steps, reverse=True)) if packed else None
    os.environ[GEOMETRY] = draw(strategies.sampled_from(("", "tier=cluster", "tier=grid")))
    sample = Sample(
        cell, max(steps), len(steps), draw(strategies.integers(1, 9)), hidden, draw(strategies.booleans()),
        state=draw(strategies.booleans()), lengths=lengths, dtype=dtype,
    )  # fmt: skip
    args = arguments(sample, "cuda")
    expected = reference(*doubles(args.operands)[:3], doubles(args.weights), args.batch_sizes, **sample.keywords)
    try:
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            found = rnn(*args, **sample.keywords)
    finally:
        del os.environ[GEOMETRY]
    check_close(RESULTS, found[:2], expected[:2], BOUNDS[dtype])


@pytest.mark.cuda
def test_precision_follows_torch(monkeypatch):
    """TF32 on tensor cores where torch's own layers would use it, whichever setting says so."""
    monkeypatch.setenv(GEOMETRY, "product=mma")
    sample = Sample("lstm", 30, 4, 8, 128)
    args = arguments(sample, "cuda")
    exact = reference(*doubles(args.operands)[:3], doubles(args.weights), **sample.keywords)[0]

    def error() -> float:
        return ((rnn(*args, **sample.keywords)[0].double() - exact.cuda()).norm() / exact.norm()).item()

    assert_geometry(sample)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        assert 1e-5 < error() < 1e-2
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert error() < 2e-6
    # The newer setting forbids reading the older one, so that it is for a process of its own.
    code = (
        "import torch, weft; torch.backends.cudnn.rnn.fp32_precision = 'ieee'; torch.manual_seed(0)\n"
        "l = weft.nn.LSTM(8, 128, algorithm='persistent').cuda(); x = torch.randn(30, 4, 8, device='cuda')\n"
        "exact = weft.nn.LSTM(8, 128, algorithm='reference').cuda().double(); exact.load_state_dict(l.state_dict())\n"
        "error = lambda: ((l(x)[0].double() - exact(x.double())[0]).norm() / exact(x.double())[0].norm()).item()\n"
        "assert error() < 2e-6, error()\n"
        "torch.backends.cudnn.rnn.fp32_precision = 'tf32'\n"
        "assert 1e-5 < error() < 1e-2, error()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
def test_directions_that_do_not_fit_together():
    """They run one after the other, packed too."""
    sample = Sample("lstm", 4, 3, 3, 2048, bidirectional=True, lengths=(4, 3, 1), dtype=torch.bfloat16)
    sizes = {"cell": "lstm", "dtype": "bfloat16", "input_size": 3, "hidden_size": 2048, "layers": 1, "directions": 2}
    plan = _C.rnn.report(device=0, **sizes, steps=4, batch=3, packed=True, trains=True)
    assert plan["forward"]["directions"] == plan["backward"]["directions"] == 1
    args = arguments(sample, "cuda", requires_grad=True)
    exact, grads, which = exact_arguments(args), gradients(sample, args), sample.differentiable
    expected, found = reference(*exact, **sample.keywords), rnn(*args, **sample.keywords, keep_cells=True)
    check_close(RESULTS, [found[i] for i in which], [expected[i] for i in which], BOUNDS[sample.dtype])
    found_grads = differentiate([found[i] for i in which], args.operands, grads)
    expected_grads = differentiate([expected[i] for i in which], exact.operands, doubles(grads))
    check_close(names(args), found_grads, expected_grads, BOUNDS[sample.dtype])


@pytest.mark.cuda
def test_falls_back_where_nothing_fits(monkeypatch):
    layer = weft.nn.GRU(8, 48, algorithm="persistent").cuda()
    x = torch.randn(5, 3, 8, device="cuda")
    expected = layer(x)[0]
    monkeypatch.setenv(GEOMETRY, "tier=grid group=128 columns=1 warps=8 split=1")
    assert "do not fit" in str(weft.explain(layer, x)) and weft.explain(layer, x).algorithm == "torch"
    found = torch.ops.weft.rnn(x, None, None, list(layer.parameters()), cell="gru")[0]  # step by step
    assert torch.allclose(found, expected, atol=2e-3)
    huge = {"device": 0, "cell": "lstm", "dtype": "float32", "input_size": 8, "hidden_size": 8192, "layers": 1}
    plan = _C.rnn.report(**huge, directions=1, steps=10, batch=4, packed=False, trains=True)
    assert "do not fit" in plan["why_not"] and plan["microseconds"] is None


@pytest.mark.cuda
@pytest.mark.parametrize(
    "text", ("grid:16", "tier=large", "tier", "group=0", "group=-1", "columns=2x", "product=", "size=3")
)
def test_geometries_that_are_none_are_refused(text: str, monkeypatch):
    args = arguments(Sample("gru", 4, 3, 2, 64), "cuda")
    monkeypatch.setenv(GEOMETRY, f"warps=8 {text}")
    with pytest.raises(
        RuntimeError, match=f"WEFT_RNN_GEOMETRY: '{text}' is none of tier=small, cluster or grid, .*in 'warps"
    ):
        rnn(*args, cell="gru")
    monkeypatch.delenv(GEOMETRY)
    assert rnn(*args, cell="gru")[0].isfinite().all()


@pytest.mark.cuda
def test_without_nvrtc():
    code = (
        "import torch, weft\n"
        "l = weft.nn.GRU(8, 64, algorithm='persistent').cuda(); x = torch.randn(5, 3, 8, device='cuda')\n"
        "text = str(weft.explain(l, x)); assert 'nvrtc' in text.lower(), text\n"
        "l(x)[0].sum().backward()\n"
        "torch.ops.weft.rnn(x, None, None, list(l.parameters()), cell='gru')\n"
    )
    environment = {**os.environ, "WEFT_NVRTC": "/nonexistent/libnvrtc.so"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
def test_second_process_on_the_device():
    """Two processes whose kernels both want the whole device."""
    code = (
        "import torch, weft; torch.manual_seed(0)\n"
        "l = weft.nn.LSTM(16, 1024, algorithm='persistent', dtype=torch.bfloat16).cuda()\n"
        "x = torch.randn(200, 4, 16, device='cuda', dtype=torch.bfloat16)\n"
        "first = l(x)[0]\n"
        "for _ in range(20): assert torch.equal(l(x)[0], first)\n"
        "torch.cuda.synchronize()\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE) for _ in range(2)]
    try:
        for run in runs:
            _, errors = run.communicate(timeout=120)
            assert run.returncode == 0, errors.decode()
    finally:
        for run in runs:
            run.kill()
