"""The choice of an algorithm: its tables, and what is asked for by name."""

from __future__ import annotations

import math

import pytest
import torch
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

from tests.rnn.choices import CASE, ON_CUDA

pytestmark = pytest.mark.usefixtures("nothing_measured")


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


def test_persistent_kernels_that_are_not_built(both_devices):
    name, reason = choose("persistent", ON_CUDA)
    assert name == "torch" and "not built" in reason


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
