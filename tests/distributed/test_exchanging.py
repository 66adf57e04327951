"""Calls that go on while others exchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import weft
import weft.distributed as wd
from torch import Tensor
from weft._distributed import recurrent, scan
from weft._distributed.exchanging import Exchanging, run, run_together
from weft._distributed.group import GroupRanks
from weft._distributed.stand_in import StandIn

from benchmarks.together.layers import one_after_the_other
from tests.common import assert_close
from tests.distributed.team import Team, dealt, device


class _Telling(StandIn):
    """Writes down what is begun and waited for."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.said: list[str] = []

    def begin_gather(self, x: Tensor):
        self.said.append(f"begin {int(x)}")
        wait = super().begin_gather(x)

        def waited() -> Tensor:
            self.said.append(f"wait {int(x)}")
            return wait()

        return waited


def _call(number: int, rounds: int) -> Exchanging[list[int]]:
    heard = []
    for k in range(rounds):
        gathered = yield torch.tensor(10 * number + k)
        heard.append(gathered.shape[0])
    return heard


def test_each_call_begins_before_any_is_waited_for() -> None:
    ranks = _Telling()
    try:
        assert run_together(ranks, [_call(0, 1), _call(1, 3), _call(2, 0)]) == [[2], [2, 2, 2], []]
        assert ranks.said == [
            "begin 0", "begin 10", "wait 0", "wait 10", "begin 11", "wait 11", "begin 12", "wait 12",
        ]  # fmt: skip
        ranks.said.clear()
        assert run(ranks, _call(3, 2)) == [2, 2]
        assert ranks.said == ["begin 30", "wait 30", "begin 31", "wait 31"]
    finally:
        ranks.close()


def test_an_error_of_a_call_is_the_callers() -> None:
    def failing() -> Exchanging[None]:
        yield torch.tensor(1)
        raise KeyError("here")

    ranks = _Telling()
    try:
        for run_it in (lambda: run(ranks, failing()), lambda: run_together(ranks, [_call(0, 1), failing()])):
            with pytest.raises(KeyError, match="here"):
                run_it()
    finally:
        ranks.close()


def _both_ways(rank: int, kind: str, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """What the forward and the backward pass of a bidirectional layer begin and wait for; they are bit for bit those of
    one direction after the other."""
    torch.manual_seed(3)
    layer = getattr(weft.nn, kind)(4, 6, num_layers=2, bidirectional=True, dtype=dtype, device=device())
    x = torch.randn(40, 2, 4, dtype=dtype).to(device())
    own = x.split(dealt([13, 1, 0, 26]))[rank].requires_grad_()
    wd.shard_time(layer)

    def step() -> list[Tensor]:
        output, *_ = layer(own)
        forward.append(len(said))
        return [output, *torch.autograd.grad(output.square().sum(), [own, *layer.parameters()])]

    said: list[str] = []
    forward: list[int] = []
    begin_gather = GroupRanks.begin_gather

    def telling(ranks: GroupRanks, x: Tensor):
        said.append("begin")
        wait = begin_gather(ranks, x)

        def waited() -> Tensor:
            said.append("wait")
            return wait()

        return waited

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupRanks, "begin_gather", telling)
        found = step()
    with pytest.MonkeyPatch.context() as patch:
        for module in (scan, recurrent):
            patch.setattr(module, "run_together", one_after_the_other)
        apart = step()
    for one, other in zip(found, apart, strict=True):
        assert torch.equal(one, other)
    return said[: forward[0]], said[forward[0] :]


def test_a_direction_goes_on_while_the_other_exchanges(team: Team) -> None:
    both = ["begin", "begin", "wait", "wait"]
    for passes in team.run(_both_ways, "MinGRU", torch.float64):
        assert passes == (2 * both, 2 * both), "two layers, forward and backward"
    for kind, dtype in (("MinLSTM", torch.bfloat16), ("GRU", torch.float64), ("LSTM", torch.float32)):
        found = team.run(_both_ways, kind, dtype)
        assert all(passes == found[0] for passes in found), "every rank joins in every exchange"
        for said in found[0]:
            assert said[:3] == both[:3] and len(said) >= len(2 * both)


def _compiled(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank > 1:  # each has to import the compiler
        return
    layer = wd.shard_time(weft.nn.MinGRU(4, 6, bidirectional=True, dtype=torch.float64, device=device()), group)
    x = torch.randn(13, 2, 4, dtype=torch.float64).to(device()).split([6, 7])[rank]
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        output = call(x)[0]
        results.append([output, *torch.autograd.grad(output.sum(), list(layer.parameters()))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-13, atol=1e-13)


def test_compiled_directions(team: Team) -> None:
    team.run(_compiled)


def _second(rank: int) -> None:
    """Gradients of gradients through both directions."""
    torch.manual_seed(5)
    layer = weft.nn.MinGRU(3, 4, bidirectional=True, dtype=torch.float64, device=device())
    sizes = dealt([5, 0, 4, 2])
    whole = torch.randn(sum(sizes), 2, 3, dtype=torch.float64).to(device())
    weight = torch.randn(sum(sizes), 2, 8, dtype=torch.float64).to(device())

    def second(x: Tensor, weight: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((layer(x)[0].square() * weight).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    want = second(whole, weight)
    wd.shard_time(layer)
    assert_close(second(whole.split(sizes)[rank], weight.split(sizes)[rank]), want.split(sizes)[rank], 1e-12)


def test_gradients_of_gradients_of_both_directions(team: Team) -> None:
    team.run(_second)
