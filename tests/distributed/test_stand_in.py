"""The group of one process that stands for many, and the fit of a link."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import weft
import weft.distributed as wd
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from weft._distributed.stand_in import StandIn
from weft.scan import linear_scan

from benchmarks.links import FITTED, fit_link
from benchmarks.together.common import behind_host
from tests.common import assert_close


class Seen(TorchDispatchMode):
    """Names of the ops of Weft that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "weft":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


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
    times = {size: link.latency + 3 * size / link.bandwidth for size in FITTED}
    for near in (0, 10_000, 10_000_000):
        found = fit_link(times, 4, near)
        assert found.latency == pytest.approx(2e-4) and found.bandwidth == pytest.approx(3e9)


def test_a_link_is_that_of_messages_of_a_size() -> None:
    """Small messages go at once, large ones after both sides have met, by a faster way."""
    small, large = wd.Link(1e-5, 1e9), wd.Link(1e-4, 1e10)
    links = {size: small if size < 5e4 else large for size in FITTED}
    times = {size: link.latency + 3 * size / link.bandwidth for size, link in links.items()}
    for near, link in ((2_000, small), (5_000_000, large)):
        said = fit_link(times, 4, near)
        took = link.latency + 3 * near / link.bandwidth
        assert said.latency + 3 * near / said.bandwidth == pytest.approx(took, rel=0.05)
    assert fit_link({size: 1e-5 for size in FITTED}, 2, 1e4).latency == pytest.approx(1e-5)
    assert fit_link({size: size / 1e9 for size in FITTED}, 2, 1e4).bandwidth == pytest.approx(1e9)


def test_a_step_behind_its_host() -> None:
    # Host 4 in two phases, device 2 in two: the device's last phase ends 1 after the host; an exchange is all added.
    assert behind_host(5.0, 4.0, 1, 0.5) == 5.5
    assert behind_host(4.0, 4.0, 2, 0.5) == 5.0, "the host waits for the device"
    # Host 2 in two phases, device 9: its second phase, 4.5, begins when the host is done at the earliest.
    assert behind_host(10.0, 2.0, 1, 0.5) == 7.0
    # Both alike: where one way of seeing it ends and the other begins.
    assert behind_host(6.0, 4.0, 1, 0.5) == pytest.approx(behind_host(6.0 + 1e-9, 4.0, 1, 0.5)) == 6.5
    assert behind_host(3.0, 4.0, 1, 0.5) == 3.5, "measured apart, so that the host may have taken longer"


def test_one_op_before_the_exchange_and_one_after_it() -> None:
    """Each way, with the same numbers as from the op that a graph holds; what watches ops sees that one."""
    group = StandIn(2, 4)
    leaves = [torch.rand(90, 2, 3).requires_grad_() for _ in range(2)]

    def step() -> list[torch.Tensor]:
        x = wd.linear_scan(*leaves, group=group)
        return [x, *torch.autograd.grad(x.square().sum(), leaves)]

    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            eager = step()
        called = [event.name for event in profile.events() if event.name.startswith("weft::slice_")]
        of_exchange = [name for name in called if "begin" in name or "finish" in name or "scan" in name]
        assert of_exchange == [f"weft::slice_{part}" for part in
                               ("begin", "finish_", "begin_gradients", "finish_gradients_")]  # fmt: skip
        with Seen() as seen:
            watched = step()
        assert [name for name in seen.names if name.startswith("slice")] == ["slice_scan", "slice_scan_backward"]
        assert all(map(torch.equal, eager, watched))
    finally:
        group.close()


def test_transforms_are_refused_and_no_tangent_is_lost() -> None:
    """Ranks could not agree on what is exchanged: torch says what its functions do not take."""
    group = StandIn(1, 2)
    A, b = torch.rand(4, 1, 3), torch.randn(4, 1, 3)

    def scan(b: torch.Tensor) -> torch.Tensor:
        return wd.linear_scan(A, b, group=group)

    try:
        for transformed in (
            lambda: torch.vmap(scan)(torch.stack((b, b))),
            lambda: torch.func.grad(lambda b: scan(b).sum())(b),
            lambda: torch.func.jvp(scan, (b,), (b,)),
        ):
            with pytest.raises(RuntimeError, match="setup_context"):
                transformed()
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            scan(forward_ad.make_dual(b, b))
    finally:
        group.close()
