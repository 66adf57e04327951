"""The group of one process that stands for many, and the fit of a link."""

from __future__ import annotations

import pytest
import torch
import weft
import weft.distributed as wd
from weft._distributed.stand_in import StandIn
from weft.scan import linear_scan

from benchmarks.links import BYTES, fit_link
from tests.common import assert_close


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_among_its_like(rank: int) -> None:
    """Four ranks with one slice: the whole is that slice, four times."""
    A, b = torch.rand(90, 2, 3, dtype=torch.float64), torch.randn(90, 2, 3, dtype=torch.float64)
    group = StandIn(rank, 4)
    try:
        whole = linear_scan(A.repeat(4, 1, 1), b.repeat(4, 1, 1))
        assert_close(wd.linear_scan(A, b, group=group), whole[90 * rank : 90 * rank + 90])
        layer = wd.shard_time(weft.nn.GRU(3, 5), group)
        assert layer(b.float())[0].shape == (90, 2, 5)
    finally:
        group.close()


def test_a_stand_in_answers_from_memory() -> None:
    group = StandIn(0, 3)
    first = group.gather(torch.ones(2))
    assert first.shape == (3, 2) and group.gather(torch.zeros(2)) is first
    group.close()
    with pytest.raises(ValueError, match="rank must be"):
        StandIn(3, 3)


def test_a_link_is_found_again() -> None:
    link = wd.Link(2e-4, 3e9)
    times = {size: link.latency + 3 * size / link.bandwidth for size in BYTES}
    found = fit_link(times, 4)
    assert found.latency == pytest.approx(2e-4) and found.bandwidth == pytest.approx(3e9)
