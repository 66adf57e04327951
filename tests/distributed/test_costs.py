"""Slices and the cost of an exchange: arithmetic."""

from __future__ import annotations

import dataclasses
import math

import pytest
import weft.distributed as wd
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_slices_are_even_and_longer_ones_come_first(steps: int, ranks: int) -> None:
    sizes = wd.slice_sizes(steps, ranks)
    assert len(sizes) == ranks and sum(sizes) == steps
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_slices_of_few_steps_are_empty() -> None:
    assert wd.slice_sizes(2, 4) == [1, 1, 0, 0] and wd.slice_sizes(0, 3) == [0, 0, 0]


@pytest.mark.parametrize(("steps", "ranks"), [(-1, 2), (5, 0), (5, -3)])
def test_slice_sizes_refuses(steps: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"^slice_sizes: (steps|ranks) must be at least"):
        wd.slice_sizes(steps, ranks)


def test_one_rank_exchanges_nothing() -> None:
    assert wd.exchange(1, 10**9) == wd.Exchange("none", 0, 0.0)


def test_a_gather_is_one_round() -> None:
    link = wd.Link(latency=2.0, bandwidth=10.0)
    assert wd.exchange(4, 5, link) == wd.Exchange("gather", 1, 2.0 + 3 * 5 / 10.0)


def test_doubling_where_bytes_outweigh_rounds() -> None:
    link = wd.Link(latency=1e-3, bandwidth=10.0)
    assert wd.exchange(9, 50, link) == wd.Exchange("doubling", 4, 4 * (1e-3 + 50 / 10.0))


def test_a_tie_is_a_gather() -> None:
    assert wd.exchange(2, 10**6) == wd.Exchange("gather", 1, 15e-6 + 1e6 / 360e9)
    assert wd.exchange(8, 0, wd.Link(latency=0)).method == "gather"


@given(st.integers(2, 2000), st.floats(0, 1e12), st.floats(0, 1), st.floats(1e-3, 1e12))
def test_the_cheaper_way_is_taken(ranks: int, size: float, latency: float, bandwidth: float) -> None:
    ways = {
        "gather": latency + (ranks - 1) * size / bandwidth,
        "doubling": math.ceil(math.log2(ranks)) * (latency + size / bandwidth),
    }
    found = wd.exchange(ranks, size, wd.Link(latency, bandwidth))
    assert found.seconds == pytest.approx(min(ways.values())) and found.seconds == pytest.approx(ways[found.method])


def test_a_prediction_is_the_sum_of_its_parts() -> None:
    link = wd.Link(latency=1.0, bandwidth=100.0)
    p = wd.predict(80.0, 4, 50, fixup=0.5, link=link)
    assert (p.local, p.exchange, p.fixup, p.seconds) == (20.0, 2.5, 0.5, 23.0)
    assert p.efficiency == pytest.approx(80 / (4 * 23))


def test_a_slice_waits_for_its_host() -> None:
    link = wd.Link(latency=1.0, bandwidth=100.0)
    alone = wd.predict(80.0, 4, 50, fixup=0.5, link=link)
    assert wd.predict(80.0, 4, 50, fixup=0.5, link=link, host=22.0) == alone
    slow = wd.predict(80.0, 4, 50, fixup=0.5, link=link, host=40.0)
    assert (slow.local, slow.seconds, slow.efficiency) == (alone.local, 40.0, 0.5)
    assert wd.predict(3.0, 1, 0, host=7.0).seconds == 3.0, "one rank is what was measured"


def test_one_rank_is_what_was_measured() -> None:
    assert wd.predict(3.0, 1, 10**9, fixup=7.0) == wd.Prediction(3.0, 0.0, 0.0, 3.0, 1.0)


@pytest.mark.parametrize(
    "arguments",
    [{"latency": -1e-9}, {"bandwidth": 0}, {"bandwidth": -1}, {"latency": math.inf}, {"bandwidth": math.nan}],
)
def test_a_link_refuses(arguments: dict) -> None:
    with pytest.raises(ValueError, match=f"^Link: {next(iter(arguments))} must be finite"):
        wd.Link(**arguments)


def test_bad_numbers_are_refused() -> None:
    for ranks, size in ((0, 1), (2, -1), (2, math.nan)):
        with pytest.raises(ValueError, match=r"^exchange: "):
            wd.exchange(ranks, size)
    good = {"seconds": 1.0, "ranks": 2, "bytes": 8}
    for bad in ({"seconds": 0.0}, {"seconds": -1.0}, {"ranks": 0}, {"bytes": -8}, {"fixup": -1e-9}, {"host": -1e-9}):
        with pytest.raises(ValueError, match=f"^predict: {next(iter(bad))} must be"):
            wd.predict(**{**good, **bad})


def test_results_cannot_be_changed() -> None:
    for value in (wd.Link(), wd.exchange(2, 8), wd.predict(1.0, 2, 8)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 1)
