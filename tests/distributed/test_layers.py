"""Layers over slices, beside the same on one process."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import weft
import weft.distributed as wd
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.nn.utils.rnn import pack_sequence
from weft._distributed.halves import halved

from benchmarks.common import captured
from tests.common import assert_close, pairs
from tests.distributed.conftest import ON_GPUS
from tests.distributed.team import Team, dealt, device

UNEVEN = [5, 1, 0, 7]
LONG = [1100, 200, 0, 400]
FULL = [1300, 1100, 1050, 1200]


def make(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    inputs = 6 if kind == "RGLRU" else 4
    sizes = (6,) if kind == "RGLRU" else (inputs, 6)
    return getattr(weft.nn, kind)(*sizes, dtype=dtype, **options).to(device())


def states_of(layer: nn.Module, B: int, dtype: torch.dtype) -> Any:
    if isinstance(layer, (weft.nn.ParaGRU, weft.nn.ParaLSTM)):
        count = 1 + isinstance(layer, weft.nn.ParaLSTM)
        states = tuple(torch.randn(B, 6, dtype=dtype).to(device()) for _ in range(count))
        return states if len(states) == 2 else states[0]
    if not isinstance(layer, nn.RNNBase):
        return torch.randn(layer.num_layers, B, 6, dtype=dtype).to(device())
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    states = [torch.randn(rows, B, 6, dtype=dtype).to(device()) for _ in range(2)]
    return tuple(states) if layer.mode == "LSTM" else states[0]


def leaves_of(state: Any) -> list[Tensor]:
    return [] if state is None else [state] if isinstance(state, Tensor) else list(state)


def final_of(result: tuple) -> list[Tensor]:
    return leaves_of(result[1])


def copied(state: Any) -> Any:
    if state is None:
        return None
    if isinstance(state, Tensor):
        return state.clone().requires_grad_()
    return tuple(s.clone().requires_grad_() for s in state)


def _beside_one_process(
    rank: int, kind: str, options: dict, sizes: list[int], given: bool, dtype: torch.dtype, bound: float
) -> None:
    layer = make(kind, dtype, **options)
    time, B = (1 if options.get("batch_first") else 0), 2
    sizes = dealt(sizes)
    steps, features = sum(sizes), 6 if kind == "RGLRU" else 4
    x = torch.randn((B, steps, features) if time else (steps, B, features), dtype=dtype).to(device())
    state = states_of(layer, B, dtype) if given else None

    def run(layer: nn.Module, x: Tensor, state: Any, weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        result = layer(x, state)
        results = [result[0], *final_of(result), *result[2:]]
        return results, list(
            torch.autograd.grad(
                sum((r * w).sum() for r, w in zip(results, weights, strict=True)),
                [x, *leaves_of(state), *layer.parameters()],
            )
        )

    x.requires_grad_()
    whole = layer(x, state)
    weights = [torch.randn_like(r) for r in (whole[0], *final_of(whole), *whole[2:])]
    want, want_grads = run(layer, x, copied(state), weights)

    # The end's loss counts once, in parts on all ranks.
    finals = len(final_of(whole))
    shares = [2 * (r + 1) / (len(sizes) * (len(sizes) + 1)) for r in range(len(sizes))]
    own_weights = [w * shares[rank] if 0 < i <= finals else w.split(sizes, time)[rank] for i, w in enumerate(weights)]
    own = x.detach().split(sizes, time)[rank].clone().requires_grad_()
    start = copied(state)
    if rank > 0 and start is not None:  # read on the first rank alone
        for leaf in leaves_of(start):
            leaf.data.fill_(0.5)
    assert wd.shard_time(layer) is layer
    got, got_grads = run(layer, own, start, own_weights)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_close(g, w if 0 < i <= finals else w.split(sizes, time)[rank], bound)
    assert_close(got_grads[0], want_grads[0].split(sizes, time)[rank], bound)
    for g, w in zip(got_grads[1:], want_grads[1:], strict=True):
        dist.all_reduce(g := g.contiguous())  # as NCCL wants it
        assert_close(g, w, bound)
    wd.shard_time(layer, False)
    assert torch.equal(layer(x, state)[0], whole[0])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["MinGRU", "MinLSTM", "RGLRU"])
def test_layers_that_are_linear_in_the_state(team: Team, kind: str, given: bool) -> None:
    deep = {"num_layers": 2, "bidirectional": not given, "batch_first": given}
    for options, sizes in (({}, UNEVEN), ({"batch_first": True}, [0, 0, 4, 0]), (deep, UNEVEN), (deep, [0, 0, 4, 0])):
        team.run(_beside_one_process, kind, options, sizes, given, torch.float64, 1e-13)


OPTIONS = [
    {},
    {"num_layers": 2, "batch_first": True},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
    {"algorithm": "newton"},
]


@pairs(kind=["RNN", "GRU", "LSTM"], options=OPTIONS, given=[False, True], sizes=[UNEVEN, [3, 3, 3, 3]])
def test_recurrent_layers(team: Team, kind: str, options: dict, given: bool, sizes: list[int]) -> None:
    team.run(_beside_one_process, kind, options, sizes, given, torch.float64, 1e-12)


def _in_halves(rank: int, *arguments: Any) -> None:
    there = "cpu" in halved
    halved.add("cpu")
    try:
        _beside_one_process(rank, *arguments)
    finally:
        if not there:
            halved.discard("cpu")


@pairs(
    kind=["RNN", "GRU", "LSTM"], options=OPTIONS,
    case=[(UNEVEN, True), ([0, 0, 4, 0], False), ([30, 3, 20, 9], True)],
)  # fmt: skip
def test_halves_of_a_backward_pass(team: Team, kind: str, options: dict, case: tuple[list[int], bool]) -> None:
    """As CUDA runs it, by what the CPU has in the place of CUDA's kernels."""
    sizes, given = case
    team.run(_in_halves, kind, options, sizes, given, torch.float32, 2e-5)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["ParaGRU", "ParaLSTM"])
def test_layers_of_channels_by_themselves(team: Team, kind: str, given: bool) -> None:
    for options, sizes in (({}, UNEVEN), ({"batch_first": True, "blocks": 2, "bias": False}, [0, 0, 4, 0])):
        team.run(_beside_one_process, kind, options, sizes, given, torch.float64, 1e-12)
    if given:
        team.run(_beside_one_process, kind, {"algorithm": "reference"}, [3, 3, 3, 3], given, torch.float64, 1e-12)
    else:
        team.run(_beside_one_process, kind, {}, LONG, given, torch.float32, 1e-5)


@pytest.mark.parametrize("algorithm", ["auto", "newton"])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_slices_that_forget(team: Team, kind: str, algorithm: str) -> None:
    own = {"RNN": {"nonlinearity": "relu"}, "GRU": {}, "LSTM": {"return_cells": True}}[kind]
    options = {"bidirectional": True, "algorithm": algorithm} | own
    team.run(_beside_one_process, kind, options, LONG, True, torch.float32, 1e-5)
    team.run(_beside_one_process, kind, options, LONG, True, torch.float64, 1e-12)


def _walked_back(rank: int, forgets: bool) -> tuple[int, list[int]]:
    """Collectives of a backward pass, and the steps of each call of it on this rank."""
    from weft._distributed import recurrent

    from tests.distributed.test_linear_scan import Counting

    layer = make("RNN", nonlinearity="relu", bias=False)
    with torch.no_grad():
        layer.weight_ih_l0.abs_()  # no unit is ever off
        layer.weight_hh_l0.copy_(torch.eye(6) * (0.5 if forgets else 1.0))
    full = [FULL[r % len(FULL)] for r in range(dist.get_world_size())]
    x = torch.rand(sum(full), 2, 4, dtype=torch.float64).to(device())
    weight = torch.rand(sum(full), 2, 6, dtype=torch.float64).to(device())
    want = torch.autograd.grad((layer(x)[0] * weight).sum(), list(layer.parameters()))
    wd.shard_time(layer)
    output = layer(x.split(full)[rank])[0]
    steps: list[int] = []
    original = recurrent._rnn_backward

    def counted(grad_output: Tensor, *arguments: Any, **keywords: Any) -> list[Tensor]:
        steps.append(len(grad_output))
        return original(grad_output, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch, Counting() as sent:
        patch.setattr(recurrent, "_rnn_backward", counted)
        got = torch.autograd.grad((output * weight.split(full)[rank]).sum(), list(layer.parameters()))
    for g, w in zip(got, want, strict=True):
        dist.all_reduce(g := g.contiguous())  # as NCCL wants it
        assert_close(g, w, 1e-12)
    return len(sent), steps


def test_a_gradient_goes_back_as_far_as_it_reaches(team: Team) -> None:
    for rank, (exchanges, steps) in enumerate(team.run(_walked_back, True)):
        size = FULL[rank % len(FULL)]
        assert exchanges == 2 and steps == [128, size - 128, 128]
    found = team.run(_walked_back, False)
    assert {exchanges for exchanges, _ in found} == {team.size}
    assert found[0][1] == [128, 1172] * team.size, "the first rank hears of every other one's gradient"


def _rounds(rank: int, forgets: bool) -> int:
    from tests.distributed.test_linear_scan import Counting

    layer = make("RNN", torch.float32)
    with torch.no_grad():
        layer.weight_hh_l0.copy_(torch.eye(6) * (0.1 if forgets else 1.0))
        if not forgets:
            layer.nonlinearity, layer.mode = "relu", "RNN_RELU"
    wd.shard_time(layer)
    with Counting() as sent, torch.no_grad():
        layer(torch.rand(80, 2, 4).to(device()))
    return len(sent)


def test_rounds(team: Team) -> None:
    assert set(team.run(_rounds, True)) == {2}, "a net that forgets walks, tells, looks again and is done"
    assert set(team.run(_rounds, False)) == {team.size}, "else one round for each rank"


def _used_twice(rank: int, kind: str, in_halves: bool) -> None:
    """A layer on two sequences in one graph, and that graph gone back twice."""
    dtype = torch.float32 if in_halves else torch.float64
    layer, sizes = make(kind, dtype), dealt(UNEVEN)
    whole = [torch.randn(13, 2, 4, dtype=dtype).to(device()) for _ in range(2)]

    def gradients(inputs: list[Tensor]) -> list[list[Tensor]]:
        leaves = [*(x.clone().requires_grad_() for x in inputs), *layer.parameters()]
        loss = sum((k + 1) * layer(x)[0].square().sum() for k, x in enumerate(leaves[:2]))
        return [list(torch.autograd.grad(loss, leaves, retain_graph=True)) for _ in range(2)]

    want, _ = gradients(whole)
    there = "cpu" in halved
    if in_halves:
        halved.add("cpu")
    try:
        wd.shard_time(layer)
        once, again = gradients([x.split(sizes)[rank] for x in whole])
    finally:
        if not there:
            halved.discard("cpu")
    assert all(map(torch.equal, once, again))
    bound = 2e-5 if in_halves else 1e-12
    for got, wanted in zip(once[:2], want[:2], strict=True):
        assert_close(got, wanted.split(sizes)[rank], bound)
    for got, wanted in zip(once[2:], want[2:], strict=True):
        dist.all_reduce(got := got.contiguous())  # as NCCL wants it
        assert_close(got, wanted, bound)


@pytest.mark.parametrize("kind", ["MinGRU", "RNN", "LSTM", "ParaGRU"])
def test_a_layer_that_is_used_twice(team: Team, kind: str) -> None:
    team.run(_used_twice, kind, False)
    if kind in ("RNN", "LSTM"):
        team.run(_used_twice, kind, True)


def _captured(rank: int, kind: str, options: dict) -> None:
    """A CUDA graph of a layer's forward and backward pass, replayed on other numbers."""
    layer = wd.shard_time(make(kind, torch.float32, **options))
    x = torch.randn(70, 2, 4).to(device()).split(dealt([30, 20, 0, 20]))[rank].clone()

    def step() -> list[Tensor]:
        leaves = [p.detach().clone().requires_grad_() for p in layer.parameters()]
        names = [name for name, _ in layer.named_parameters()]
        output = torch.func.functional_call(layer, dict(zip(names, leaves, strict=True)), (x,))[0]
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    replay = captured(step)
    for _ in range(2):
        x.mul_(0.9)
        found = [t.clone() for t in replay()]
        for one, other in zip(found, step(), strict=True):
            assert torch.equal(one, other)


@ON_GPUS[0]
@ON_GPUS[1]
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("kind", ["MinGRU", "MinLSTM"])
def test_a_captured_layer_is_an_eager_one(gpu_team: Team, kind: str, options: dict) -> None:
    gpu_team.run(_captured, kind, options)


def _unbatched(rank: int) -> None:
    for kind in ("MinGRU", "GRU", "LSTM", "ParaLSTM"):
        layer = make(kind)
        x, sizes = torch.randn(13, 4, dtype=torch.float64).to(device()), dealt(UNEVEN)
        want = layer(x)
        wd.shard_time(layer)
        got = layer(x.split(sizes)[rank])
        assert_close(got[0], want[0].split(sizes)[rank], 1e-13)
        for g, w in zip(final_of(got), final_of(want), strict=True):
            assert_close(g, w, 1e-13)


def test_unbatched(team: Team) -> None:
    team.run(_unbatched)


def _half(rank: int) -> None:
    for kind in ("MinGRU", "RGLRU", "GRU", "ParaGRU"):
        layer = make(kind, torch.float32)
        x = torch.randn(40, 2, 6 if kind == "RGLRU" else 4).to(device())
        sizes = dealt([10, 12, 8, 10])
        for autocast in (True, False):
            if not autocast:
                layer, x = wd.shard_time(layer, False).bfloat16(), x.bfloat16()
            with torch.autocast(device().type, torch.bfloat16, enabled=autocast):
                want = layer(x)
                got = wd.shard_time(layer)(x.split(sizes)[rank])
                wd.shard_time(layer, False)
            assert got[0].dtype == want[0].dtype and got[1].dtype == want[1].dtype
            assert_close(got[0], want[0].split(sizes)[rank], 2e-2)
            assert_close(got[1], want[1], 2e-2)


def test_half_precision(team: Team) -> None:
    team.run(_half)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = weft.nn.MinGRU(4, 6)
        self.second = weft.nn.GRU(6, 6, num_layers=2, dropout=0.0)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)[0])[0])


def _trained(rank: int, parallel: int) -> None:
    """So many data-parallel groups, each with its own sequences, cut in time within the group."""
    size = dist.get_world_size()
    mesh = init_device_mesh(device().type, (parallel, size // parallel), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(5)
    alone = Model().to(device(), torch.float64)
    model = copy.deepcopy(alone)
    x = torch.randn(24, 4, 4, dtype=torch.float64).to(device())
    y = torch.randint(3, (24, 4)).to(device())
    optimiser = torch.optim.SGD(alone.parameters(), 0.5)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(alone(x).flatten(0, 1), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())

    wd.shard_time(model, mesh["cp"])
    wrapped = nn.parallel.DistributedDataParallel(model)  # over both dimensions
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    own_x, own_y = (wd.shard(t.chunk(parallel, 1)[mesh.get_local_rank("dp")], mesh["cp"]) for t in (x, y))
    for want in losses:
        # DDP's mean over all ranks of as many parts of a mean over all elements.
        out = wrapped(own_x)
        loss = nn.functional.cross_entropy(out.flatten(0, 1), own_y.flatten(), reduction="sum") / y.numel() * size
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total = loss.detach() / size
        dist.all_reduce(total)
        assert abs(total.item() - want) < 1e-10
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(got, want, 1e-10)


@pytest.mark.parametrize("parallel", [1, 2])
def test_training_equals_one_process(team: Team, parallel: int) -> None:
    team.run(_trained, parallel)


def _fully_sharded(rank: int, parallel: int) -> None:
    """FSDP2 over the other dimension of the mesh."""
    from torch.distributed.fsdp import fully_shard

    shape = parallel, dist.get_world_size() // parallel
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("dp", "cp"))
    alone = Model().to(device(), torch.float64)
    model = copy.deepcopy(alone)
    x = torch.randn(24, 4, 4, dtype=torch.float64).to(device())
    alone(x).square().sum().backward()
    wd.shard_time(model, mesh["cp"])
    fully_shard(model.second, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    own = x.chunk(parallel, 1)[mesh.get_local_rank("dp")]
    model(wd.shard(own, mesh["cp"])).square().sum().backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        grad = parallel * got.grad.full_tensor()  # FSDP's mean over dp
        dist.all_reduce(grad, group=mesh["cp"].get_group())
        assert_close(grad, want.grad, 1e-12)


@pytest.mark.parametrize("parallel", [1, 2])
def test_fully_sharded_over_the_other_dimension(team: Team, parallel: int) -> None:
    team.run(_fully_sharded, parallel)


def _forgotten(rank: int) -> None:
    model = Model()
    names = list(model.state_dict())
    wd.shard_time(model)
    assert list(model.state_dict()) == names
    x = torch.randn(5, 2, 4)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        if rank == 0:  # alone: a copy knows no group
            other(x)
    wd.shard_time(model, False)
    if rank == 1:
        model(x)


def test_copies_and_pickles_forget_the_group(cpu_team: Team) -> None:
    cpu_team.run(_forgotten)


def _refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"^shard_time: the layer 'a\.0' is torch\.nn\.GRU"):
        wd.shard_time(nn.ModuleDict({"a": nn.Sequential(nn.GRU(2, 3))}))
    with pytest.raises(TypeError, match=r"^shard_time: module must be a torch\.nn\.Module, got int"):
        wd.shard_time(3)
    with pytest.raises(TypeError, match=r"^shard_time: group must be"):
        wd.shard_time(Model(), True)
    layer = wd.shard_time(weft.nn.GRU(2, 3))
    with pytest.raises(ValueError, match=r"^GRU: a layer over ranks takes no PackedSequence"):
        layer(pack_sequence([torch.zeros(3, 2)]))
    layer = wd.shard_time(weft.nn.ParaGRU(2, 3))
    with pytest.raises(ValueError, match=r"^ParaGRU: a layer over ranks takes no PackedSequence"):
        layer(pack_sequence([torch.zeros(3, 2)]))
    layer = wd.shard_time(weft.nn.MinGRU(2, 3, bidirectional=True))
    with pytest.raises(ValueError, match=r"^MinGRU: a bidirectional layer over ranks takes no hx"):
        layer(torch.zeros(4, 1, 2), torch.zeros(2, 1, 3))
    with pytest.raises(ValueError, match=r"^shard_time: the layer '0' is a LRU, whose states ranks do not exchange"):
        wd.shard_time(nn.Sequential(weft.nn.LRU(2, 3)))
    with pytest.raises(ValueError, match=r"^shard_time: the layer is a SLSTM, whose states ranks do not exchange"):
        wd.shard_time(weft.nn.SLSTM(2, 4))
    # What the first rank alone reads, all refuse: who raises alone leaves the others waiting.
    for cls in (weft.nn.GRU, weft.nn.LSTM, weft.nn.MinGRU, weft.nn.ParaGRU, weft.nn.ParaLSTM):
        layer, shape = wd.shard_time(cls(2, 3)), (1, 1, 4)
        state = torch.zeros(shape[1:] if cls.__name__.startswith("Para") else shape)
        with pytest.raises((ValueError, RuntimeError), match=rf"^{cls.__name__}: "):
            layer(torch.zeros(4, 1, 2), (state, state) if cls.__name__.endswith("LSTM") else state)
    with pytest.raises(ValueError, match="projections"):
        wd.shard_time(weft.nn.LSTM(2, 3, proj_size=2))


def _explained_scan(rank: int) -> None:
    x = torch.zeros(4, 1, 2)
    found = weft.explain(wd.linear_scan, x, x)
    assert found.subject == "linear_scan over ranks" and found.algorithm == "diagonal scan"
    assert found.reason.endswith(f"; a slice of {dist.get_world_size()} ranks, with one exchange each way")
    # What is cheaper in rounds: of a dense matrix each rank would hear a lot.
    A, b = torch.zeros(2, 64, 2048, 2048, device="meta"), torch.zeros(2, 64, 2048, device="meta")
    for options in ({}, {"reverse": True, "transpose": True}):
        found = weft.explain(wd.linear_scan, A, b, **options)
        assert found.reason.endswith("; a slice of 4 ranks, with 2 rounds of exchange each way")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'batch_first'; call weft.explain\(weft.distrib"):
        weft.explain(wd.linear_scan, x, x, batch_first=True)


def test_a_scan_explained(cpu_team: Team) -> None:
    cpu_team.run(_explained_scan)


def test_refused(cpu_team: Team) -> None:
    cpu_team.run(_refused)


def _heads_and_tails(rank: int) -> None:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    mesh, whole = init_device_mesh("cpu", (4,)), torch.randn(16, 2, 4)
    layers = [wd.shard_time(make(kind, torch.float32), mesh) for kind in ("GRU", "MinGRU", "ParaGRU")]
    for balances in (True, False):
        own = whole.clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_cp_options, "enable_load_balance", balances)
            with context_parallel(mesh, buffers=[own], buffer_seq_dims=[0]):
                assert len(own) == 4 and torch.equal(own, whole[4 * rank : 4 * rank + 4]) is not balances
                for layer in layers:
                    if balances:
                        with pytest.raises(ValueError, match=r"GRU: slices must be contiguous and in order of rank"):
                            layer(own)
                        with pytest.raises(ValueError, match=r"^linear_scan: slices must be contiguous"):
                            wd.linear_scan(own, own)
                    else:
                        layer(own)
        layers[0](own[:4])  # outside of it nothing is known
    assert torch.equal(own, whole)


def test_heads_and_tails_are_refused_where_they_can_be_seen(cpu_team: Team) -> None:
    cpu_team.run(_heads_and_tails)


def _twice_differentiated(rank: int) -> None:
    layer = wd.shard_time(make("GRU"))
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_second_derivatives_are_refused_everywhere(cpu_team: Team) -> None:
    cpu_team.run(_twice_differentiated)


def _explained(rank: int) -> list[str]:
    x, found = torch.zeros(3, 1, 2), []
    for kind in ("GRU", "MinGRU", "ParaLSTM"):
        layer = wd.shard_time(getattr(weft.nn, kind)(2, 3))
        found.append(weft.explain(layer, x).reason)
    return found


def test_explain_says_what_ranks_do(cpu_team: Team) -> None:
    gru, mingru, paralstm = cpu_team.run(_explained)[0]
    assert "a slice of 4 ranks, in rounds" in gru and "a slice of 4 ranks, in rounds" in paralstm
    assert "a slice of 4 ranks, with one exchange" in mingru
