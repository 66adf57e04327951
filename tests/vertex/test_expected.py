"""What calls are expected to take, and which executor and geometry follow from it."""

from __future__ import annotations

import types

import pytest
import torch
import weft
from weft import _C
from weft._base import costs as gpu_costs
from weft._vertex import tune, tuned
from weft._vertex.calls import prepare
from weft._vertex.runtime import persistent
from weft.vertex import models

from tests.common import tuning_cache
from tests.vertex.cells import rows

_C = _C.vertex
cache = tuning_cache(tune)
LEVEL, GAIN = 1.5, 1.2
H = 16


def compiled_of(cell, graphs):
    x = torch.randn(graphs.num_vertices, cell.W.in_features, dtype=cell.W.weight.dtype, requires_grad=True)
    return prepare(cell, graphs, x, "batched").compiled


def chain(length):
    return weft.Graphs.chain([length])


def expected(compiled, geometries, batched=(0.0, 1.0, 0.0, 0.0, 0.0, 0.0), host=(0.0, 0.0, 0.0)):
    """Of groups, and what a frontier takes forward and backward whatever its rows up to 8."""
    rows = [(groups, [forward, backward, forward, backward]) for groups, forward, backward in geometries]
    return _C.Expected(compiled.program, rows, LEVEL, GAIN, list(batched), list(host))


@pytest.mark.parametrize("trains", [False, True])
def test_small_last_frontiers_are_one_kernel_and_the_others_launches(trains):
    cell, small = models.ChainLSTM(8, H), chain(6)
    compiled = compiled_of(cell, small)
    passes = [compiled.plan.frontiers.forward] + ([compiled.plan.frontiers.backward] if trains else [])
    steps = sum(s.when == "frontiers" for one in passes for s in one if hasattr(s, "when"))
    calls, meetings, tail, launches, products, weights = _C.batched_amounts(compiled.program, small._core, trains)
    assert calls == len(passes)
    # Five levels above the first; the last kernel of a pass is a launch, too.
    assert meetings == 5 * steps and len(passes) < launches <= len(passes) + steps
    assert tail == pytest.approx(1e-9 * 5 * len(passes) * H * 4 * H) and products == 0
    assert weights == pytest.approx(1e-6 * 5 * len(passes) * H * 4 * H * 4)

    wide = weft.Graphs.chain([3] * 2000)  # no frontier is small
    _, meetings, tail, launches, products, _ = _C.batched_amounts(compiled.program, wide._core, trains)
    assert meetings == 0 and tail == 0 and 2 * steps <= launches <= 3 * steps
    assert products == pytest.approx(1e-9 * 2 * 2000 * len(passes) * H * 4 * H)


def test_one_group_unless_several_gain_enough():
    one = chain(4)
    compiled = compiled_of(models.ChainLSTM(8, H), one)
    both = expected(compiled, [(1, 1.0, 1.0), (8, 2.0, 2.0)])
    assert both.geometry(one._core) == 0  # slower by itself
    assert both.geometry(weft.Graphs.chain([4] * 512)._core) == 1
    equal = expected(compiled, [(1, 1.0, 1.0), (2, 1.0, 1.0)])
    few = weft.Graphs.chain([100] * 2)  # filled for 0.4 + 0.6 * 2 groups
    assert equal.geometry(few._core) == 0
    with pytest.raises(ValueError, match="no geometry"):
        expected(compiled, [])


def test_captured_the_device_counts_and_else_the_longer_of_both():
    graphs = chain(5)
    compiled = compiled_of(models.ChainLSTM(8, H), graphs)
    us = expected(compiled, [(1, 0.5, 0.25)], host=(100.0, 10.0, 1.0))
    for trains, passes, row in ((False, 1, 0.5), (True, 2, 0.75)):
        device = 5 * passes * LEVEL + 4 * row  # frontiers with a product
        assert us.persistent(graphs._core, 0, trains, True) == pytest.approx(device)
        assert us.persistent(graphs._core, 0, trains, False) == pytest.approx(100 + 20 * passes + 5 * passes)
        _, meetings, _, launches, *_ = _C.batched_amounts(compiled.program, graphs._core, trains)
        assert us.batched(graphs._core, trains, True) == meetings
        assert us.batched(graphs._core, trains, False) == pytest.approx(100 + 10 * launches)
    slow = expected(compiled, [(1, 100.0, 100.0)], host=(100.0, 10.0, 1.0))
    assert slow.persistent(graphs._core, 0, True, False) == slow.persistent(graphs._core, 0, True, True) > 800


def test_frontiers_pay_for_their_rows():
    graphs = weft.Graphs.chain([3] * 4 + [2] * 36)  # above the first, frontiers of 40 and 4 rows
    assert _C.group_amounts(graphs._core, 1) == (1, 0.5 + 40 / 8)
    assert _C.group_amounts(graphs._core, 8) == (1, 1.125)  # 5 rows, and half a row
    # Two graphs do not fill eight groups evenly: 0.4 + 0.6 * 2 of them.
    assert _C.group_amounts(weft.Graphs.chain([2] * 2)._core, 8) == (1, 0)
    compiled = compiled_of(models.ChainLSTM(8, H), graphs)
    us = _C.Expected(compiled.program, [(1, [1.0, 10.0, 100.0, 1000.0])], LEVEL, GAIN, [0.0] * 6, [0.0] * 3)
    assert us.persistent(graphs._core, 0, False, True) == pytest.approx(3 * LEVEL + 100 + 5.5)
    assert us.persistent(graphs._core, 0, True, True) == pytest.approx(6 * LEVEL + 1100 + 11 * 5.5)


@pytest.fixture
def device(monkeypatch):
    """A GPU that is not there, of 132 processors, on which all blocks are resident."""
    monkeypatch.setattr(persistent, "_processors", lambda device: 132)
    limit = types.SimpleNamespace(shared_memory_per_block_optin=232448, major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: limit)
    monkeypatch.setattr(gpu_costs, "of", lambda index: gpu_costs.reference())
    monkeypatch.setattr(persistent, "_compile", lambda *_: None)
    monkeypatch.setattr(persistent, "_resident_groups", lambda compiled, device, form, which: which.groups)
    monkeypatch.setattr(persistent._C, "refused_launches", lambda: 0, raising=False)
    return torch.device("cuda", 0)


TREE = [[], [], [0, 1], [], [2, 3], [], [4, 5]]


def trees(count):
    return weft.Graphs.from_children([TREE] * count)


def test_auto_takes_what_is_expected_to_be_faster(device, monkeypatch):
    captured = []
    monkeypatch.setattr(persistent._C, "captures", lambda index: bool(captured))
    compiled = compiled_of(models.TreeLSTM(256, 256), trees(1))
    known = persistent._known(compiled, device, None)
    for asked, in_graph in ((1, False), (25, False), (1, True), (25, True)):
        captured[:] = [1] * in_graph
        graphs = trees(asked)
        core = graphs._core
        own = known.expected.persistent(core, known.expected.geometry(core), True, in_graph)
        other = known.expected.batched(core, True, in_graph)
        assert persistent.is_faster(compiled, graphs, device, True) == (own < other)
        words = persistent.expectation(compiled, graphs, device, True)
        assert f"{own:.3g} us" in words and f"{other:.3g} us" in words and ("CUDA graph" in words) == in_graph
    assert not persistent.is_faster(compiled, trees(1), torch.device("cpu"), True)
    assert persistent.expectation(compiled, trees(1), torch.device("cpu"), True) == ""


def test_half_types_have_costs_of_their_own(device, monkeypatch):
    monkeypatch.setattr(persistent._C, "captures", lambda index: True)
    half = compiled_of(models.TreeLSTM(8, H).bfloat16(), trees(1))
    with torch.autocast("cpu", torch.bfloat16):
        cast = compiled_of(models.TreeLSTM(8, H), trees(1))
    costs = gpu_costs.reference()
    names = dict(zip(("vertex.persistent", "vertex.batched"), (persistent.PERSISTENT, persistent.BATCHED), strict=True))
    # Four levels each way of a microsecond beside two passes.
    for us, faster in ((3.0, False), (5.0, True)):
        tables = {f"{table}.half": {n: [0.0] for n in all_of_them} for table, all_of_them in names.items()}
        tables["vertex.persistent.half"]["level"], tables["vertex.batched.half"]["pass"] = [1.0], [us]
        monkeypatch.setattr(gpu_costs, "of", lambda index, t=tables: costs._replace(tables={**costs.tables, **t}))
        for compiled in (half, cast):
            persistent._geometries._kept.clear()
            assert persistent._expected_us(compiled, trees(1), device, True) == (8.0, 2 * us)
            assert persistent.is_faster(compiled, trees(1), device, True) == faster
    without = {name: table for name, table in costs.tables.items() if not name.endswith(".half")}
    monkeypatch.setattr(gpu_costs, "of", lambda index: costs._replace(tables=without))
    persistent._geometries._kept.clear()
    assert not persistent.is_faster(half, trees(1), device, True)
    assert persistent.expectation(half, trees(1), device, True) == ""


def test_a_product_of_a_half_type_pays_for_one_multiplication_and_two_bytes(device):
    single, half = (
        compiled_of(models.TreeLSTM(8, 64).to(dtype), trees(1)) for dtype in (torch.float32, torch.bfloat16)
    )
    of_eight, _, of_few, _ = persistent.row_amounts(single, 132)
    of_half, _, few_of_half, _ = persistent.row_amounts(half, 132)
    assert of_half["multiplication"] * 6 == of_eight["multiplication"] and of_few["multiplication"] == 0
    assert of_half["kilobyte"] * 2 == of_eight["kilobyte"] and few_of_half["multiplication"] > 0
    assert of_few["few"] == pytest.approx(4e-3 * 128 * 5 * 64 / 64) and of_eight["few"] == 0


def test_what_was_measured_groups_the_blocks(device):
    one, many = trees(1), trees(512)
    compiled = compiled_of(models.TreeLSTM(256, 256), one)
    parts = [g.parts for g in persistent.geometries(compiled, device)]
    assert parts == [1, 2, 4, 8] and persistent.geometry(compiled, one, device).parts == 1
    times = {tuned.name_of(p): 10.0 - p for p in parts} | {"batched": 1.0}
    tuned.MEASURED.remember(tuned.key(compiled.functions, True, one, True), tuned.Entry("batched", times))
    assert persistent.geometry(compiled, one, device).parts == 8
    # Steps of a Trainer, which were not measured, group theirs as before.
    step = 2, 1, True, True, 5
    assert 8 in {g.parts for g in persistent.geometries(compiled, device, step)}
    assert persistent.geometry(compiled, one, device, step).parts == 1
    tuned.MEASURED.remember(tuned.key(compiled.functions, True, many, True), tuned.Entry("batched", {"batched": 1.0}))
    assert persistent.geometry(compiled, many, device).parts == 8  # expected


def test_of_persistent_kernels_tune_times_those_that_a_call_takes(device):
    """Also where the device was too unsteady to say which are the fastest."""
    one = trees(1)
    compiled = compiled_of(models.TreeLSTM(256, 256), one)
    call = types.SimpleNamespace(compiled=compiled)
    calls = {tuned.name_of(g.parts): call for g in persistent.geometries(compiled, device)}
    calls |= {"batched": None, "reference": None}
    assert tune._taken(calls, one, device).keys() == {"persistent", "batched", "reference"}
    times = {"persistent": 2.0, "persistent/4": 1.0}
    tuned.MEASURED.remember(tuned.key(compiled.functions, True, one, True), tuned.Entry("persistent/4", times))
    assert tune._taken(calls, one, device).keys() == {"persistent/4", "batched", "reference"}
    others = {"batched": None, "reference": None}
    assert tune._taken(others, one, device) == others


def test_a_geometry_that_another_thread_has_left_out_is_what_the_call_takes_by_itself(device):
    one = trees(1)
    compiled = compiled_of(models.TreeLSTM(256, 256), one)
    *_, last = persistent.geometries(compiled, device)
    assert persistent.geometry_of(compiled, one, device, last.parts) == last
    persistent.geometries(compiled, device).remove(last)
    assert persistent.geometry_of(compiled, one, device, last.parts) == persistent.geometry(compiled, one, device)


def test_geometries_that_are_not_resident_are_left_out(device, monkeypatch):
    room = {1: 1, 2: 2, 4: 4, 8: 8}
    monkeypatch.setattr(persistent, "_resident_groups", lambda compiled, device, form, which: room[which.parts])
    refused = [0]
    monkeypatch.setattr(persistent._C, "refused_launches", lambda: refused[0])
    graphs = trees(512)
    compiled = compiled_of(models.TreeLSTM(256, 256), graphs)
    assert persistent.geometry(compiled, graphs, device).groups == 8
    room[8] = 3  # as the driver says after a launch that was refused
    refused[0] += 1
    found = persistent.geometry(compiled, graphs, device)
    assert found.groups <= room[found.parts] and (8, 8) not in {
        (g.parts, g.groups) for g in persistent.geometries(compiled, device)
    }
    room.update(dict.fromkeys(room, 0))
    refused[0] += 1
    persistent._geometries._kept.clear()  # as other programs of other threads may
    persistent.geometry(compiled, graphs, device)
    assert persistent._not_resident(compiled, device, None) == "the blocks of a persistent kernel are not all resident"


def test_a_refused_launch_is_tried_with_fewer_groups(device, monkeypatch):
    """Nothing has been written before it."""
    graphs, cell = trees(512), models.TreeLSTM(256, 256)
    x = rows(graphs, 256)
    call = prepare(cell, graphs, x, "batched").ready._replace(device=device)
    operands = persistent.operands(call.compiled, call, None, "mse")
    room, refused, asked = {1: 1, 2: 2, 4: 4, 8: 8}, [0], []
    monkeypatch.setattr(persistent, "_resident_groups", lambda compiled, device, form, which: room[which.parts])
    monkeypatch.setattr(persistent._C, "refused_launches", lambda: refused[0])

    def launch(turns, schedule, most_blocks, *_):
        asked.append(most_blocks)
        if most_blocks == 132:
            return types.SimpleNamespace(numbers=torch.zeros(2))
        room[132 // most_blocks] = 0
        refused[0] += 1
        return None

    steps = types.SimpleNamespace(launch=launch)
    monkeypatch.setattr(persistent._C, "TrainingSteps", lambda *_: steps, raising=False)
    request = persistent.Request(operands, None, torch.zeros(1), -100, [], [], torch.zeros(1), None)
    monkeypatch.setattr(persistent, "used", lambda *_: None)
    assert persistent.train(call, request) is not None
    assert asked[0] < 132 and asked[-1] == 132 and len(asked) == len(set(asked))
    steps.launch = lambda *_: None
    room[1] = 0
    assert persistent.train(call, request) is None
