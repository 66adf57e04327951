"""The choice of an algorithm, and weft.explain."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import weft
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import rnn
from weft._base import costs as gpu_costs
from weft._rnn import explain, runs
from weft._rnn.calls import prepare
from weft._rnn.dropin.torch_limits import CUDNN_MAX_STEPS
from weft._rnn.select import choice, costs, tuned
from weft._rnn.select.case import Case, takes_tf32
from weft._rnn.select.choice import (
    AUTO_PERSISTENT,
    AUTO_PROJECTED,
    AUTO_SCAN,
    CUDA_MAX_HIDDEN,
    CUDA_MAX_HIDDEN_FP64,
    Limits,
    Table,
    choose,
)

CASE = Case(cell="gru", device="cpu", dtype=torch.float32, hidden_size=16, batch=4, steps=100)


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch, tmp_path):
    """The choice as on a machine where weft.tune has not run."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned.MEASURED, "entries", None)
    choice.forget_choices()
    yield
    choice.forget_choices()


@pytest.fixture
def both_devices(monkeypatch):
    """The choice as in a build with CUDA but for the rnn engine, whatever this build and this machine are."""
    monkeypatch.setattr(choice, "_DEVICES", ("cpu", "cuda"))
    monkeypatch.delattr(choice._C.rnn, "report", raising=False)


TABLES = [("scan", *key, 0, table) for key, table in AUTO_SCAN.items()]
TABLES += [("persistent", *key, 0, table) for key, table in AUTO_PERSISTENT.items()]
TABLES += [("persistent", *key, 1, table) for key, table in AUTO_PROJECTED.items()]


@pytest.mark.parametrize(("name", "device", "cell", "proj_size", "table"), TABLES)
def test_auto_follows_the_table(name, device, cell, proj_size, table, both_devices):
    dtypes, buckets = table
    assert list(buckets) == sorted(buckets)
    above = 0
    for hidden, limits in buckets.items():
        min_steps, max_batch = limits.min_steps, limits.max_batch
        batch = 10**6 if max_batch == math.inf else max_batch
        for size in (above + 1, hidden):
            case = CASE._replace(device=device, cell=cell, hidden_size=size, steps=min_steps, batch=batch)
            case = case._replace(capability=(9, 0), proj_size=proj_size)
            taken = {dtype for dtype in dtypes if choose("auto", case._replace(dtype=dtype))[0] == name}
            assert taken == (limits.dtypes or dtypes)
            assert choose("auto", case._replace(steps=min_steps - 1))[0] == "torch"
            assert choose("auto", case._replace(batch=batch + 1))[0] == (name if max_batch == math.inf else "torch")
            assert choose("auto", case._replace(dtype=torch.int64))[0] == "torch"
            for other in (
                {"layers": 2},
                {"directions": 2},
                {"trains": False},
                {"capability": (8, 9)},
                {"capability": None},
            ):
                assert choose("auto", case._replace(**other))[0] == ("torch" if limits.alone else name)
            # A compiled graph does not know its sizes.
            anywhere = min_steps <= 1 and max_batch == math.inf
            assert choose("auto", case._replace(steps=None, batch=None))[0] == (name if anywhere else "torch")
        above = hidden
    assert choose("auto", case._replace(hidden_size=above + 1))[0] == "torch"


def test_limits_of_a_bucket(monkeypatch):
    """A table with limits of every kind, whatever the measured one holds."""
    buckets = {8: Limits(), 20: Limits(min_steps=100), 32: Limits(min_steps=30, max_batch=16)}
    monkeypatch.setitem(AUTO_PERSISTENT, ("cpu", "gru"), Table(frozenset((torch.float32,)), buckets))
    taken = {(1, 1, 10**6): True, (8, 1, 1): True, (9, 99, 1): False, (9, 100, 10**6): True, (20, 99, 1): False,
             (21, 29, 16): False, (21, 30, 16): True, (32, 30, 17): False, (33, 10**6, 1): False}  # fmt: skip
    words = {(9, 99, 1): "100 steps", (32, 30, 17): "batch of 16", (33, 10**6, 1): "hidden_size 32"}
    for (hidden, steps, batch), holds in taken.items():
        name, reason = choose("auto", CASE._replace(hidden_size=hidden, steps=steps, batch=batch))
        assert name == ("persistent" if holds else "torch")
        assert words.get((hidden, steps, batch), "") in reason


def test_asked_for_by_name_scan_runs_at_any_size(both_devices):
    for case in (CASE._replace(hidden_size=10_000, steps=1), CASE._replace(device="cuda", hidden_size=32, batch=10**6)):
        assert choose("scan", case) == ("scan", "asked for by name")


def test_what_the_cuda_kernels_do_not_hold_runs_as_torch(both_devices):
    assert CUDA_MAX_HIDDEN == {"rnn_tanh": 128, "rnn_relu": 128, "gru": 128, "lstm": 64} and CUDA_MAX_HIDDEN_FP64 == 32
    for cell, largest in CUDA_MAX_HIDDEN.items():
        case = CASE._replace(cell=cell, device="cuda")
        assert choose("scan", case._replace(hidden_size=largest))[0] == "scan"
        for asked in ("auto", "scan"):
            name, reason = choose(asked, case._replace(hidden_size=largest + 1))
            words = f"the kernels of {cell} hold {largest} hidden units, got {largest + 1}"
            assert name == "torch" and words in reason
    case = CASE._replace(device="cuda", hidden_size=33)
    assert "float64 hold 32 hidden units, got 33" in choose("scan", case._replace(dtype=torch.float64))[1]
    # "auto" takes torch where the kernels would do, but would not pay.
    short = case._replace(steps=100)
    assert choose("scan", short)[0] == "scan" and choose("auto", short)[0] == "torch"
    # fp64 runs as one chunk, one step after the other.
    assert choose("auto", case._replace(hidden_size=8, dtype=torch.float64))[0] == "torch"
    assert choose("scan", case._replace(hidden_size=8, dtype=torch.float64))[0] == "scan"


def test_every_device_and_cell_has_limits():
    cells = ("rnn_tanh", "rnn_relu", "gru", "lstm")
    assert set(AUTO_SCAN) == {("cuda", cell) for cell in cells}
    assert set(AUTO_PERSISTENT) == {("cpu", cell) for cell in cells}
    assert set(AUTO_PROJECTED) == {("cpu", "lstm")}


@pytest.mark.parametrize("asked", ["auto", "scan"])
def test_what_does_not_fit_runs_as_torch(asked):
    misfits = {
        "PackedSequence": {"packed": True},
        "proj_size": {"proj_size": 2},
        "meta": {"device": "meta"},
        "int64": {"dtype": torch.int64},
    }
    if asked == "auto":  # which has the rnn engine for them
        del misfits["PackedSequence"], misfits["proj_size"]
    for word, change in misfits.items():
        name, reason = choose(asked, CASE._replace(**change))
        assert name == "torch" and word in reason


def test_names_are_obeyed():
    for asked in ("persistent", "scan", "newton", "torch", "reference"):
        assert choose(asked, CASE) == (asked, "asked for by name")
        assert choose(asked, CASE._replace(transformed=True))[0] == "reference"
    assert choose("reference", CASE._replace(packed=True))[0] == "reference"


@pytest.fixture
def plan(monkeypatch):
    """A build in which the CUDA kernels of the rnn engine answer as the test says; what they were asked."""

    class Plan:
        why_not, microseconds = None, 3000.0

        def __init__(self):
            self.asked = []

        def __call__(self, **sizes):
            self.asked.append(sizes)
            forward = {
                "tier": "cluster", "product": "mma", "groups": 4, "blocks": 8, "threads": 256, "sequences": 3,
                "cluster": 1, "directions": 2,
            }  # fmt: skip
            backward = {**forward, "tier": "grid", "product": "fma", "cluster": 2, "directions": 1}
            return {
                "why_not": self.why_not,
                "forward": forward,
                "backward": backward,
                "microseconds": self.microseconds,
            }

    plan = Plan()
    monkeypatch.setattr(choice._C.rnn, "report", plan, raising=False)
    monkeypatch.setattr(choice, "_DEVICES", ("cpu", "cuda"))
    return plan


ON_CUDA = CASE._replace(device="cuda", hidden_size=512, index=0, capability=(9, 0), layers=2)


def test_auto_takes_persistent_on_cuda_where_its_time_is_known(plan):
    assert choose("auto", ON_CUDA) == ("persistent", "its weights fit, and the batch is small")
    assert plan.asked[-1] == {
        "device": 0, "cell": "gru", "dtype": "float32", "input_size": CASE.input_size, "hidden_size": 512, "layers": 2,
        "directions": 1, "steps": 100, "batch": 4, "packed": False, "trains": True,
    }  # fmt: skip
    assert choice.expected_time("persistent", ON_CUDA) == 3000
    how = (
        "forward: cluster tier, 4 x 8 blocks of 256 threads, 3 sequences each; backward: grid tier, 4 x 8 blocks of "
        "256 threads, 3 sequences each, FMA, pooled by 2"
    )
    assert choice.how("persistent", ON_CUDA) == how
    both = choice.how("persistent", ON_CUDA._replace(directions=2))
    assert both == f"{how}, one direction after the other"
    projected = ON_CUDA._replace(cell="lstm", proj_size=128)
    assert choose("auto", projected)[0] == "persistent"
    assert choice.how("persistent", projected).endswith(f"; {how}")
    # For a small state the scan is expected to be faster.
    assert choose("auto", ON_CUDA._replace(hidden_size=16))[0] == "scan"
    # A compiled graph knows neither length nor batch.
    unknown = ON_CUDA._replace(steps=None, batch=None)
    assert (
        choose("auto", unknown) == ("persistent", "its weights fit")
        and choose("persistent", unknown)[0] == "persistent"
    )
    assert plan.asked[-1]["batch"] == plan.asked[-1]["steps"] == 1


def test_auto_leaves_large_batches_to_torch(plan):
    large = ON_CUDA._replace(batch=32_768 // 512 + 1)
    torch_us = choice.expected_time("torch", large)
    plan.microseconds = 0.9 * torch_us
    assert choose("auto", large) == ("persistent", "auto's model of costs")
    plan.microseconds = 1.1 * torch_us
    name, reason = choose("auto", large)
    assert name == "torch" and f"torch is expected to take {torch_us:.0f} us, it {plan.microseconds:.0f}" in reason
    assert choose("persistent", large)[0] == "persistent"
    # Not where the batch is small, nor where cuDNN has one kernel for all steps, nor packed: there nothing was measured
    # to be faster than this one.
    plan.microseconds = 1e9
    for change in ({"batch": 64}, {"packed": True}, {"hidden_size": 128}):
        assert choose("auto", large._replace(**change))[0] == "persistent"
    assert choose("auto", large._replace(hidden_size=128, dtype=torch.float16))[0] == "persistent"


SMALL_ON_CUDA = ON_CUDA._replace(hidden_size=20, layers=1, steps=1000, batch=16, tf32=True)


def test_auto_takes_the_faster_of_scan_and_persistent(plan):
    assert choose("auto", SMALL_ON_CUDA._replace(steps=300)) == ("scan", "within auto's limits")
    assert not plan.asked  # which would compile kernels
    large = SMALL_ON_CUDA._replace(batch=4096)
    scan_us = choice.expected_time("scan", large)
    assert scan_us > 3000
    name, reason = choose("auto", large)
    assert (name, reason) == ("persistent", "auto's model of costs")
    assert choice.why_auto_skips("scan", large) == f"persistent is expected to take 3000 us, it {scan_us:.0f}"
    # Where the host is what takes the time, they are expected to be equal, but for the forward pass alone.
    plan.microseconds = 10.0
    few = SMALL_ON_CUDA._replace(steps=10)
    assert choose("auto", few)[0] == "scan" and choose("auto", few._replace(trains=False))[0] == "persistent"
    # A compiled graph does not know its sizes; the limits of larger states were measured beside the persistent kernels.
    assert choose("auto", large._replace(steps=None, batch=None))[0] == "scan"
    assert choose("auto", SMALL_ON_CUDA._replace(hidden_size=64, steps=10_000, batch=4))[0] == "scan"
    plan.why_not = "there is no compiler"
    assert choose("auto", large)[0] == "scan"


def test_auto_takes_chunks_of_time_where_a_net_that_never_forgets_loses_little(plan, monkeypatch):
    long = SMALL_ON_CUDA._replace(cell="rnn_tanh", steps=30_000)
    table = "rnn.newton.rnn"
    costs = gpu_costs.reference()

    def beside(us: float) -> None:
        tables = {**costs.tables, table: {**costs.tables[table], "beside": [us]}}
        monkeypatch.setattr(gpu_costs, "of", lambda index: costs._replace(tables=tables))

    beside(2.0)
    assert "never forgets would take more than a tenth" in choice.why_auto_skips("newton", long)
    beside(0.1)
    name, reason = choose("auto", long)
    assert name == "newton" and "at most a tenth more" in reason and not plan.asked
    assert choice.how("newton", long) == "66 chunks of 455 steps"
    scan_us, us = (choice.expected_time(name, long) for name in ("scan", "newton"))
    assert scan_us < us <= 1.1 * scan_us
    assert choose("auto", long._replace(trains=False))[0] == "newton"
    assert choose("auto", long._replace(steps=1000))[0] == "scan"
    skips = {
        "2 chunks of time would gain little": {"batch": 500},
        "1 chunk of time would gain little": {"steps": 300},
        "where the length is unknown": {"steps": None, "batch": None},
        "never forgets would take more than a tenth": {"steps": 1000, "batch": 1},
        "where a warp does not hold": {"hidden_size": 40},
        "does not take it on cpu": {"device": "cpu"},
    }
    for words, change in skips.items():
        case = long._replace(**change)
        assert words in choice.why_auto_skips("newton", case) and choose("auto", case)[0] != "newton"


def test_what_newton_does_not_do_is_said(plan):
    case = SMALL_ON_CUDA._replace(cell="lstm", steps=30_000)
    misfits = {
        "PackedSequence": ({"packed": True}, "persistent"),
        "proj_size": ({"proj_size": 2}, "persistent"),
        "cells of every step": ({"keeps_cells": True}, "persistent"),
        "a warp holds 32 hidden units, got 40": ({"hidden_size": 40}, "scan"),
        "got 300": ({"hidden_size": 300}, "persistent"),
    }
    for words, (change, instead) in misfits.items():
        name, reason = choose("newton", case._replace(**change))
        assert name == instead and reason.startswith("newton: ") and words in reason
    assert choose("newton", case._replace(steps=1, batch=10**6)) == ("newton", "asked for by name")
    assert choose("newton", case._replace(steps=None, batch=None)) == ("newton", "asked for by name")


def test_every_candidate_has_an_expected_time_on_cuda(plan):
    for case in (SMALL_ON_CUDA, SMALL_ON_CUDA._replace(trains=False), SMALL_ON_CUDA._replace(dtype=torch.bfloat16)):
        for name in ("persistent", "scan", "torch"):
            shorter, longer = (choice.expected_time(name, case._replace(steps=steps)) for steps in (10, 30_000))
            assert 0 < shorter < longer or (name == "persistent" and shorter == longer == plan.microseconds)
            assert choice.measured_time(name, case) is None
    # One layer after the other.
    twice = SMALL_ON_CUDA._replace(steps=30_000, layers=2, input_size=20)
    once = twice._replace(layers=1)
    for name in ("scan", "torch"):
        one, two = (choice.expected_time(name, case) for case in (once, twice))
        assert 1.8 * one < two <= 2 * one


def test_what_was_not_measured_has_no_expected_time(plan):
    for change in ({"dtype": torch.float64}, {"steps": None, "batch": None}, {"device": "cpu"}):
        for name in ("scan", "torch"):
            assert choice.expected_time(name, SMALL_ON_CUDA._replace(**change)) is None
    assert choice.expected_time("scan", SMALL_ON_CUDA._replace(packed=True)) is None
    assert choice.expected_time("reference", SMALL_ON_CUDA) is None
    # Without TF32 only the rate of large products is known.
    for change, known in (({"hidden_size": 128}, False), ({"hidden_size": 512}, True)):
        case = ON_CUDA._replace(batch=512, **change)
        times = [choice.expected_time("torch", case._replace(tf32=tf32)) for tf32 in (False, True)]
        assert times[1] is not None and (times[0] is not None) == known
        assert not known or times[0] > times[1]


def test_costs_of_a_projection(plan):
    """torch multiplies narrower states; the rnn engine multiplies the projection into the weights once."""
    plain = ON_CUDA._replace(cell="lstm", batch=2048, steps=500)
    narrow = plain._replace(proj_size=64)
    torch_us = [choice.expected_time("torch", case) for case in (plain, narrow)]
    assert torch_us[0] > 2 * torch_us[1]
    ours = [choice.expected_time("persistent", case) for case in (plain, narrow)]
    assert ours[0] == plan.microseconds < ours[1]
    assert costs.projection_us(narrow._replace(trains=False)) == pytest.approx(costs.projection_us(narrow) / 3)
    plan.microseconds = 1e6
    assert choose("auto", narrow)[0] == "torch"
    plan.microseconds = 1e3
    assert choose("auto", narrow)[0] == "persistent"


def test_auto_does_not_compare_with_what_cannot_run(plan):
    plan.microseconds = 1e6
    name, reason = choose("auto", ON_CUDA._replace(cell="lstm", keeps_cells=True))
    assert name == "persistent" and "is expected" not in reason


def test_sizes_that_are_symbols(plan):
    """As make_fx has them. The costs are compared, and stand in the reason."""
    plan.microseconds, reasons = 150.0, []

    def choose_for(x):
        case = SMALL_ON_CUDA._replace(steps=x.size(0), batch=x.size(1), trains=False)
        assert not isinstance(case.steps, int)
        reasons.append(choose("auto", case)[1])
        reasons.append(choice.why_auto_skips("scan", case))
        return x

    make_fx(choose_for, tracing_mode="symbolic")(torch.empty(400, 70))
    assert reasons[0] == "its weights fit, and the batch is small" and "persistent is expected to take" in reasons[1]


@pytest.fixture
def precisions():
    """torch's settings of float32's precision as they are; afterwards as they were. By the functions behind
    torch.backends, which torch.testing forbids to set."""
    kinds = (("generic", "all"), ("cuda", "all"), ("cuda", "rnn"), ("cuda", "conv"))
    allowed, before = torch._C._get_cudnn_allow_tf32(), [torch._C._get_fp32_precision_getter(*kind) for kind in kinds]
    yield
    torch._C._set_cudnn_allow_tf32(allowed)
    for kind, precision in zip(kinds, before, strict=True):
        torch._C._set_fp32_precision_setter(*kind, precision)


def test_tf32_is_what_torch_takes_for_its_rnns(precisions):
    def takes():
        return takes_tf32("cuda", torch.float32)

    for allowed in (True, False):
        torch._C._set_cudnn_allow_tf32(allowed)
        assert takes() == allowed
    torch._C._set_fp32_precision_setter("cuda", "rnn", "tf32")
    assert takes()
    assert not takes_tf32("cpu", torch.float32) and not takes_tf32("cuda", torch.float16)
    torch._C._set_fp32_precision_setter("cuda", "rnn", "none")  # as all of CUDA
    for precision in ("ieee", "tf32"):
        torch._C._set_fp32_precision_setter("cuda", "all", precision)
        assert takes() == (precision == "tf32")
    torch._C._set_fp32_precision_setter("cuda", "rnn", "ieee")
    with pytest.raises(RuntimeError):  # which the older setting cannot say
        torch._C._get_cudnn_allow_tf32()
    assert not takes()


@pytest.mark.cuda
def test_the_choice_sees_tf32():
    layer, x = weft.nn.GRU(3, 16, device="cuda"), torch.randn(5, 2, 3, device="cuda")
    for allowed in (True, False):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            assert prepare(layer, x, None).case.tf32 == allowed
            half = prepare(layer.half(), x.half(), None)
            layer.float()
        assert not half.case.tf32


def test_persistent_kernels_that_do_not_fit(plan):
    plan.why_not = "it needs 300 KiB of shared memory, the device has 227"
    for asked in ("auto", "persistent"):
        name, reason = choose(asked, ON_CUDA)
        assert name == "torch" and "227" in reason
    assert choice.expected_time("persistent", ON_CUDA) is None
    # What torch's kernel cannot do the operator does without one.
    for change in ({"keeps_cells": True}, {"mapped": True}, {"steps": CUDNN_MAX_STEPS + 1}):
        case = ON_CUDA._replace(**change)
        for asked in ("auto", "persistent", "torch"):
            assert choose(asked, case)[0] == "persistent"
        assert choice.how("persistent", case) == f"one step after another, without a kernel: {plan.why_not}"
        assert choice.expected_time("persistent", case) is None


def test_sequences_longer_than_cudnn_takes(plan):
    for name, case in (
        ("persistent", ON_CUDA),
        ("persistent", ON_CUDA._replace(packed=True)),
        ("persistent", ON_CUDA._replace(dtype=torch.float64)),
        ("persistent", ON_CUDA._replace(cell="lstm", proj_size=128)),
        ("torch", ON_CUDA._replace(device="cpu")),
    ):
        assert choose("torch", case._replace(steps=CUDNN_MAX_STEPS))[0] == "torch"
        assert choose("torch", case._replace(steps=None))[0] == "torch"
        taken, reason = choose("torch", case._replace(steps=CUDNN_MAX_STEPS + 1))
        assert taken == name
        assert taken == "torch" or "cuDNN takes at most 65,535 steps, got 65,536" in reason
    # "auto" tells it, too, where it would have taken torch.
    name, reason = choose("auto", ON_CUDA._replace(dtype=torch.float64, steps=10**6))
    assert name == "persistent" and "torch: cuDNN takes at most 65,535 steps, got 1,000,000" in reason


def test_more_gates_than_cudnn_takes(plan):
    case = ON_CUDA._replace(steps=2**14, batch=50)  # 6 values of 512 units: more than 2^31
    assert choose("torch", case)[0] == "persistent" and "writes out of bounds" in choose("torch", case)[1]
    for change in ({"cell": "lstm"}, {"cell": "rnn_tanh"}, {"device": "cpu"}, {"batch": 40}):
        assert choose("torch", case._replace(**change))[0] == "torch"
    for change in ({"packed": True}, {"cell": "lstm", "batch": 64}, {"batch": 25, "directions": 2}):
        assert choose("torch", case._replace(**change))[0] == "persistent"


def test_persistent_in_float64_on_cuda(plan):
    """Without a kernel; by name it runs all the same, because torch's has no second derivative there."""
    case = ON_CUDA._replace(dtype=torch.float64)
    assert choose("auto", case)[0] == "torch" and choose("persistent", case)[0] == "persistent"
    assert not plan.asked


def test_persistent_kernels_that_are_not_built(both_devices):
    name, reason = choose("persistent", ON_CUDA)
    assert name == "torch" and "not built" in reason


def test_the_plan_is_a_constant_of_a_compiled_graph(plan):
    def function(x):
        case = ON_CUDA._replace(steps=None, batch=None)
        return x + (2 if choice.choose("persistent", case)[0] == "persistent" else 1)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())) == 2


def test_auto_takes_persistent_on_the_cpu_by_its_table(monkeypatch):
    table = Table(frozenset((torch.float32,)), {64: Limits(min_steps=50)})
    monkeypatch.setitem(AUTO_PERSISTENT, ("cpu", "gru"), table)
    assert choose("auto", CASE)[0] == "persistent"
    assert choose("auto", CASE._replace(packed=True))[0] == "persistent"
    assert choose("auto", CASE._replace(steps=49))[0] == "torch"
    assert choose("auto", CASE._replace(dtype=torch.float64))[0] == "torch"
    name, reason = choose("auto", CASE._replace(hidden_size=200))
    assert name == "torch" and "persistent: " in reason and "hidden_size 64" in reason and "scan: " in reason


def test_what_only_some_algorithms_do():
    """Mapped by vmap, torch's kernels do not run; cells come from the rnn engine and the reference."""
    for change in ({"mapped": True}, {"keeps_cells": True}):
        case = CASE._replace(**change)
        assert choose("torch", case)[0] == "persistent" and choose("persistent", case)[0] == "persistent"
        assert choose("torch", case._replace(proj_size=2))[0] == "persistent"
        assert choose("reference", case)[0] == "reference"
    assert choose("scan", CASE._replace(mapped=True))[0] == "scan"
    assert choose("scan", CASE._replace(keeps_cells=True))[0] == "persistent"


def by_name(explanation):
    return {c.name: c for c in explanation.candidates}


def test_explanation():
    layer = weft.nn.GRU(3, 16)
    answer = weft.explain(layer, torch.randn(100, 4, 3))
    assert answer.algorithm == "persistent" and answer.asked == "auto"
    candidates = by_name(answer)
    assert list(candidates) == ["persistent", "scan", "newton", "torch", "reference"]
    assert all(c.eligible for c in answer.candidates)
    assert "auto" in candidates["scan"].reason
    assert all(c.reason for c in answer.candidates)
    text = str(answer)
    assert "GRU(3, 16) on T=100 B=4 float32 input on cpu" in text and "runs as 'persistent'" in text
    for c in answer.candidates:
        (line,) = (line for line in text.splitlines() if line.strip().startswith(c.name + " "))
        assert c.reason in line and ("taken" in line) == (c.name == "persistent")
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.algorithm = "torch"


def test_expected_times_are_told_from_measured_ones():
    from weft import Candidate, Explanation

    candidates = (
        Candidate("persistent", True, "a", 12345.6),
        Candidate("scan", True, "b", 0.98765, measured=True),
        Candidate("torch", True, "c"),
    )
    _, _, persistent, scan, other = str(Explanation("", "", "auto", "scan", "", candidates)).splitlines()
    assert "~12300 us  a" in persistent and " 0.988 us  b" in scan and "us" not in other
    assert persistent.index(" a") == scan.index(" b") == other.index(" c")


def test_it_tells_which_gpu_the_times_are_extrapolated_from(monkeypatch, plan):
    candidates = explain._candidates("auto", ON_CUDA)
    assert explain._extrapolated_from(ON_CUDA, candidates) is None  # of the GPU that was measured
    scaled = gpu_costs.reference()._replace(extrapolated=True)
    monkeypatch.setattr(gpu_costs, "of", lambda index: scaled)
    name = explain._extrapolated_from(ON_CUDA, candidates)
    assert name == gpu_costs.reference().measured_on and explain._extrapolated_from(CASE, candidates) is None
    measured = tuple(dataclasses.replace(c, measured=True) for c in candidates)
    assert explain._extrapolated_from(ON_CUDA, measured) is None
    answer = weft.Explanation("", "", "auto", "persistent", "", candidates, name)
    last = str(answer).splitlines()[-1]
    assert "extrapolated" in last and name in last and "weft.tune(layer, x)" in last
    assert "extrapolated" not in str(dataclasses.replace(answer, extrapolated_from=None))


def test_it_tells_why_auto_leaves_the_persistent_kernels():
    layer = weft.nn.LSTM(3, max(AUTO_PERSISTENT["cpu", "lstm"].buckets) + 1)
    answer = weft.explain(layer, torch.randn(5, 2, 3))
    persistent = by_name(answer)["persistent"]
    assert answer.algorithm == "torch" and persistent.eligible and "hidden_size" in persistent.reason
    assert persistent.reason in answer.reason


def test_the_choice_sees_chains_and_gradients():
    x, h = torch.randn(5, 2, 3), torch.zeros(4, 2, 6)
    layer = weft.nn.GRU(3, 6, num_layers=2, bidirectional=True)
    case = prepare(layer, x, (h,)).case
    assert (case.layers, case.directions, case.trains, case.input_size) == (2, 2, True, 3)
    assert case.index is case.capability is None and not case.tf32
    layer.requires_grad_(False)
    assert not prepare(layer, x, (h,)).case.trains
    assert prepare(layer, x.clone().requires_grad_(), None).case.trains
    h.requires_grad_()
    assert prepare(layer, x, (h,)).case.trains
    with torch.no_grad():
        assert not prepare(layer, x, (h,)).case.trains


def test_it_tells_what_does_not_fit():
    x = torch.randn(5, 2, 3)
    packed = weft.explain(weft.nn.GRU(3, 4, algorithm="scan"), rnn.pack_padded_sequence(x, [5, 2]))
    assert packed.algorithm == "torch" and not by_name(packed)["scan"].eligible
    assert "T=5 B=2 packed float32 input" in str(packed)
    projected = weft.explain(weft.nn.LSTM(3, 4, proj_size=2, algorithm="scan"), x)
    assert projected.algorithm == "torch" and "proj_size" in by_name(projected)["scan"].reason
    assert by_name(projected)["persistent"].eligible
    forced = weft.explain(weft.nn.GRU(3, 4, algorithm="reference"), x)
    assert forced.algorithm == "reference" and by_name(forced)["torch"].eligible


def test_it_tells_how_a_projection_runs():
    layer = weft.nn.LSTM(3, 4, proj_size=2)
    assert "steps" in by_name(weft.explain(layer, torch.randn(5, 2, 3)))["persistent"].reason
    answer = weft.explain(layer, torch.randn(100, 2, 3))
    assert answer.algorithm == "persistent"
    assert "projection multiplied into the recurrent weights" in by_name(answer)["persistent"].reason


def test_it_sees_the_context():
    layer, answers = weft.nn.GRU(3, 4), []

    def call(x):
        answers.append(weft.explain(layer, x))
        return x.sum()

    torch.func.grad(call)(torch.randn(50, 2, 3))
    assert answers[0].algorithm == "reference" and not by_name(answers[0])["torch"].eligible
    with torch.autograd.forward_ad.dual_level():
        assert weft.explain(layer, torch.randn(50, 2, 3)).algorithm == "reference"
    assert weft.explain(layer, torch.randn(50, 2, 3)).algorithm == "persistent"


@pytest.mark.parametrize("layer", [weft.nn.RNN(3, 4), weft.nn.GRU(3, 4), weft.nn.LSTM(3, 4)])
def test_arguments_are_checked_as_in_forward(layer):
    x = torch.randn(5, 2, 3)
    h = torch.zeros(1, 2, 4)
    hx = (h, h) if isinstance(layer, weft.nn.LSTM) else h
    assert weft.explain(layer, x, hx).algorithm == weft.explain(layer, x[:, 0]).algorithm
    for arguments in ((torch.randn(5, 2, 4),), (x[None],), (x.double(),), (x[:, :1], hx)):
        with pytest.raises((ValueError, RuntimeError)) as expected:
            layer(*arguments)
        with pytest.raises(type(expected.value)):
            weft.explain(layer, *arguments)


def test_what_nobody_can_explain():
    for other, kind in ((None, "NoneType"), ("GRU", "str"), (weft.nn.GRU, "the class GRU")):
        with pytest.raises(TypeError, match=rf"explain: what to explain .* must be a layer, a model.*; got {kind}"):
            weft.explain(other, torch.randn(5, 2, 3))
    with pytest.raises(TypeError, match="what to explain is missing"):
        weft.explain()
    for layer in (weft.nn.GRU(3, 4), torch.nn.Linear(3, 4)):
        with pytest.raises(TypeError, match=f"the input of {type(layer).__name__} is missing"):
            weft.explain(layer)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_torchs_layers_are_explained_as_what_would_run(kind):
    theirs, x = getattr(torch.nn, kind)(3, 16), torch.randn(100, 4, 3)
    answer = weft.explain(theirs, x)
    assert answer.algorithm == weft.explain(getattr(weft.nn, kind)(3, 16), x).algorithm
    assert "weft.accelerate the model first" in str(answer)
    assert type(theirs) is getattr(torch.nn, kind) and theirs(x)[0].shape == (100, 4, 16)
    step = weft.explain(getattr(torch.nn, f"{kind}Cell")(3, 16), torch.randn(4, 3))
    assert step.algorithm == "fused" and "first" in step.note


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.old = torch.nn.GRU(3, 16)
        self.new = weft.nn.LSTM(16, 8, num_layers=2)
        self.scan = weft.nn.MinGRU(8, 8)
        self.spare = torch.nn.GRUCell(3, 4)

    def forward(self, x):
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.scan(self.new(input=self.old(x)[0])[0])[0]


def test_a_whole_model():
    model, x = _Model(), torch.randn(100, 4, 3)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    answer = weft.explain(model, x)
    assert [p.name for p in answer.parts] == ["old", "new", "scan", "spare"]
    old, new, scan, spare = answer.parts
    assert old.algorithm == weft.explain(weft.nn.GRU(3, 16), x).algorithm and old.kind == "torch.GRU"
    assert old.reason.startswith("after weft.accelerate: ")
    assert new.algorithm == weft.explain(model.new, torch.randn(100, 4, 16)).algorithm and "T=100 B=4" in new.input
    assert scan.algorithm == "diagonal scan" and spare.reason == "not called for this input"
    text = str(answer)
    assert all(name in text for name in ("_Model", "old", "weft.LSTM", "weft.MinGRU", "runs as"))
    assert model.training and model.norm.training  # as before, and nothing was learnt
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert str(weft.explain(torch.nn.Linear(3, 4), x)).startswith("Linear: no recurrent layer")


def test_scans_and_offload():
    A, b = torch.rand(10, 2, 4), torch.randn(10, 2, 4)
    assert weft.explain(weft.scan.linear_scan, A, b).algorithm == "diagonal scan"
    assert weft.explain(weft.scan.linear_scan, torch.rand(10, 2, 4, 4), b).algorithm == "dense scan"
    with pytest.raises(ValueError):
        weft.explain(weft.scan.linear_scan, A, b[:, :1])
    for kind in (weft.nn.MinGRU, weft.nn.MinLSTM, weft.nn.RGLRU, weft.nn.LRU, weft.nn.S5):
        x = torch.randn(10, 2, 3)
        answer = weft.explain(kind(3, 4), x)
        assert answer.algorithm == "diagonal scan" and "one scan" in answer.reason
        assert ("constant in time" in answer.reason) == (kind in (weft.nn.LRU, weft.nn.S5))
        assert str(answer).startswith(f"{kind.__name__}(3, 4) on (10, 2, 3) float32 on cpu\n")
        assert weft.explain(kind(3, 4), x=x) == answer == weft.explain(layer=kind(3, 4), input=x)
        assert weft.explain(kind(3, 4), x[:1]).algorithm == "step"
        packed = torch.nn.utils.rnn.pack_sequence([x[:, 0], x[:4, 1]])
        assert weft.explain(kind(3, 4), packed).input.startswith("packed (14, 3)")
    net = weft.scan.ScanSequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    answer = weft.explain(net, torch.randn(3, 4))
    assert answer.algorithm == "chain_backward" and len(answer.layers) == 3
    offload = weft.offload("1GB")
    assert str(weft.explain(offload)) == str(offload.report())


@pytest.mark.parametrize(
    ("A", "algorithm", "reason"),
    [
        ((10, 2, 4), "diagonal scan", "A is diagonal: "),
        ((4,), "diagonal scan", "constant in time"),
        ((1, 2, 4), "diagonal scan", "constant in time"),
        ((1, 1, 4), "diagonal scan", "constant in time"),
        ((10, 2, 4, 4), "dense scan", "A is dense: "),
        ((10, 4, 4), "dense scan", "shared by the batch"),
        ((10, 1, 4, 4), "dense scan", "shared by the batch"),
    ],
)
def test_kinds_of_linear_scans(A, algorithm, reason):
    b = torch.randn(10, 2, 4)
    found = weft.explain(weft.scan.linear_scan, torch.rand(A), b)
    assert found.algorithm == algorithm and reason in found.reason
    found = weft.explain(weft.scan.linear_scan, torch.rand(A).cfloat(), b.cfloat())
    assert found.algorithm == ("reference" if algorithm == "dense scan" else algorithm)
    if len(A) > 1 and len(A) != 3:
        turned = weft.explain(weft.scan.linear_scan, torch.rand(A).transpose(0, 1), b.transpose(0, 1), batch_first=True)
        assert turned.algorithm == algorithm and reason in turned.reason


def test_a_scan_that_reads_out():
    decay, c, b = torch.rand(4, 3), torch.randn(4, 3), torch.randn(10, 2, 4, 1)
    found = weft.explain(weft.scan.linear_scan, decay, b, c=c)
    assert found.algorithm == "diagonal scan" and "read out by c" in found.reason


def test_a_model_with_a_vertex_function():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = weft.vertex.models.TreeFC(4), torch.nn.Linear(4, 2)

        def forward(self, graphs, x):
            return self.head(self.cell(graphs, x))

    graphs = weft.Graphs.chain([3])
    (part,) = weft.explain(Net(), graphs, torch.randn(3, 4)).parts
    assert part.name == "cell" and part.algorithm == "batched" and part.input == repr(graphs)


class _Cell(weft.VertexFunction):
    """With a layer inside, which its trace calls."""

    def __init__(self):
        super().__init__(4)
        self.step = torch.nn.GRUCell(4, 4)

    def vertex(self, v):
        h = self.step(v.pull(), v.gather_sum())
        v.scatter(h)
        v.push(h)


class _Mine(weft.nn.GRU):
    pass


def test_rows_of_a_model_are_of_what_is_called():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.mine = weft.VertexFunctions({"a": _Cell(), "b": _Cell()}), _Mine(4, 4)
            self.cell, self.fc, self.old = _Cell(), weft.vertex.models.TreeFC(4), torch.nn.GRU(4, 4)
            self.again = self.old

        def forward(self, graphs, x):
            h = self.fc(graphs, self.cell(graphs, self.cells(graphs, x)))
            return self.old(self.mine(h)[0])

    graphs = weft.Graphs.chain([3]).with_types(["a", "b", "a"])
    parts = weft.explain(Net(), graphs, torch.randn(3, 4)).parts
    kinds = {part.name: part.kind for part in parts}
    assert kinds == {
        "cells": "weft.VertexFunctions", "mine": "_Mine", "cell": "_Cell", "fc": "weft.TreeFC", "old": "torch.GRU",
    }  # fmt: skip
    assert all(part.algorithm and "Proxy" not in part.input for part in parts)


@pytest.mark.parametrize("function", [weft.explain, weft.tune])
def test_what_is_no_tensor_is_named(function):
    name, x = function.__name__, torch.randn(5, 2, 3)
    for layer, hx in ((weft.nn.GRU(3, 4), "(h0, c0)"), (weft.nn.LSTM(3, 4), torch.zeros(1, 2, 4))):
        with pytest.raises(TypeError, match=f"{name}: x must be a Tensor or a PackedSequence, got str"):
            function(layer, "text")
        with pytest.raises(TypeError, match=f"{name}: hx must be .* or None, got {type(hx).__name__}"):
            function(layer, x, hx)
    with pytest.raises(IndexError, match="hx must be"):
        function(weft.nn.LSTM(3, 4), x, (torch.zeros(1, 2, 4),))


def test_nothing_runs():
    layer = weft.nn.GRU(3, 4)
    layer.register_forward_hook(lambda *_: pytest.fail("the layer ran"))
    weft.explain(layer, torch.randn(5, 2, 3))


def test_the_algorithm_that_is_told_is_the_one_that_runs(monkeypatch):
    ran = []
    originals = {name: getattr(runs, name) for name in ("_run_weft", "_run_torch", "_run_reference")}
    for name in originals:

        def run(layer, call, *backward, name=name):
            ran.append(*backward or (name.removeprefix("_run_"),))
            return originals[name](layer, call, *backward)

        monkeypatch.setattr(runs, name, run)
    x = torch.randn(5, 2, 3)
    inputs = (x, x[:, 0], rnn.pack_padded_sequence(x, [5, 2]))
    for asked in ("auto", "persistent", "scan", "newton", "torch", "reference"):
        for hidden in (4, 200):
            layer = weft.nn.GRU(3, hidden, num_layers=2, algorithm=asked)
            for each in inputs:
                told = weft.explain(layer, each).algorithm
                layer(each)
                assert ran.pop() == told and not ran
