"""The choice of an algorithm on CUDA, by rules and expected times, on any machine."""

from __future__ import annotations

import pytest
import torch
import weft
from weft._base import costs as gpu_costs
from weft._rnn.calls import prepare
from weft._rnn.dropin.torch_limits import CUDNN_MAX_STEPS
from weft._rnn.select import choice, costs
from weft._rnn.select.case import takes_tf32
from weft._rnn.select.choice import choose

from tests.rnn.choices import CASE, ON_CUDA, SMALL_ON_CUDA

pytestmark = pytest.mark.usefixtures("nothing_measured")


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
    from torch.fx.experimental.proxy_tensor import make_fx  # here, because it takes seconds

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


def test_the_plan_is_a_constant_of_a_compiled_graph(plan):
    def function(x):
        case = ON_CUDA._replace(steps=None, batch=None)
        return x + (2 if choice.choose("persistent", case)[0] == "persistent" else 1)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())) == 2
