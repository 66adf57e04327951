"""Every model and executor beside a plain recursive function per tree."""

from __future__ import annotations

import random

import pytest
import torch
import weft
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.vertex import models

from tests.common import DEVICES, relative_error
from tests.vertex.naive import (
    chain_lstm,
    child_sum,
    evaluate,
    random_dag,
    random_tree,
    rvnn,
    tree_fc,
    tree_gru,
    tree_lstm,
)

X, H = 5, 6
EXECUTORS = ["reference", "batched"]
# Relative error of the norm; fp64: rounding of some hundred operations.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}

MODELS = {
    "treelstm": (lambda: models.TreeLSTM(X, H), lambda m: tree_lstm(m, H, 2), 2),
    "treelstm3": (lambda: models.TreeLSTM(X, H, arity=3), lambda m: tree_lstm(m, H, 3), 3),
    "childsum": (lambda: models.ChildSumTreeLSTM(X, H), lambda m: child_sum(m, H), 4),
    "treegru": (lambda: models.TreeGRU(X, H), lambda m: tree_gru(m, H), 4),
    "treefc": (lambda: models.TreeFC(X), lambda m: tree_fc(m, X, 2), 2),
    "rvnn": (lambda: models.RvNN(X, H), lambda m: rvnn(m, H), 2),
    "chainlstm": (lambda: models.ChainLSTM(X, H), lambda m: chain_lstm(m, H), 1),
}


def graphs_of(children: list, name: str, device: str) -> weft.Graphs:
    graphs = weft.Graphs.from_children(children)
    if name == "rvnn":
        graphs = graphs.with_types(["inner" if below else "leaf" for tree in children for below in tree])
    return graphs.to(device) if device != "cpu" else graphs


def compare(name: str, children: list, executor: str, device: str, dtype: torch.dtype) -> None:
    make, step, _ = MODELS[name]
    module = make().to(device, dtype)
    graphs = graphs_of(children, name, device)
    x = torch.randn(graphs.num_vertices, X, device=device, dtype=dtype, requires_grad=True)
    out = module(graphs, x, executor=executor)
    # The oracle in fp64 on the CPU, whatever is asked.
    twin = make().double()
    twin.load_state_dict(module.state_dict())
    x64 = x.detach().cpu().double().requires_grad_()
    want = evaluate(step(twin), children, x64)
    assert out.shape == want.shape and out.dtype == dtype
    assert relative_error(out, want) <= BOUNDS[dtype]
    weights = torch.randn_like(want)
    found = torch.autograd.grad(
        (out * weights.to(device, dtype)).sum(), [x, *module.parameters()], materialize_grads=True
    )
    wanted = torch.autograd.grad((want * weights).sum(), [x64, *twin.parameters()], materialize_grads=True)
    for f, w in zip(found, wanted, strict=True):
        assert relative_error(f, w) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", MODELS)
def test_trees(name, executor, device, dtype):
    rng = random.Random(1)
    arity = MODELS[name][2]
    if arity == 1:
        children = [[[v - 1] if v else [] for v in range(n)] for n in (3, 1, 7, 2)]
    else:
        children = [random_tree(rng, leaves, arity) for leaves in (5, 1, 9, 2)]
    compare(name, children, executor, device, dtype)


@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(set(MODELS) - {"rvnn"})),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    executor=st.sampled_from(EXECUTORS),
)
def test_dags(name, sizes, seed, executor):
    """Forests, shared children, a child in two slots, empty slots, any numbering."""
    rng = random.Random(seed)
    compare(name, [random_dag(rng, n, MODELS[name][2]) for n in sizes], executor, "cpu", torch.float64)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_chain_lstm_is_torchs(executor):
    lengths = [3, 1, 5]
    module, lstm = models.ChainLSTM(X, H).double(), torch.nn.LSTM(X, H).double()
    with torch.no_grad():
        for target, sources in (
            (module.W.weight, [lstm.weight_ih_l0]),
            (module.W.bias, [lstm.bias_ih_l0, lstm.bias_hh_l0]),
            (module.U.weight, [lstm.weight_hh_l0]),
        ):
            target.copy_(sum(sources))
    x = torch.randn(sum(lengths), X, dtype=torch.float64)
    out = module(weft.Graphs.chain(lengths), x, executor=executor)
    want = torch.cat([lstm(part)[0] for part in x.split(lengths)])
    assert relative_error(out, want) <= 1e-13


def test_parameters_and_initialisation():
    m = models.TreeLSTM(X, H, 3)
    assert {k: tuple(p.shape) for k, p in m.named_parameters()} == {
        "W.weight": (4 * H, X),
        "W.bias": (4 * H,),
        "U.weight": (6 * H, 3 * H),
    }
    assert m.state_size == (2 * H,)
    bound = 1 / (3 * H) ** 0.5
    assert m.U.weight.abs().max() <= bound
    assert sorted(models.RvNN(X, H).state_dict()) == ["inner.U.bias", "inner.U.weight", "leaf.W.bias", "leaf.W.weight"]
    assert sorted(models.ChildSumTreeLSTM(X, H).state_dict()) == ["U.weight", "U_f.weight", "W.bias", "W.weight"]
    assert sorted(models.TreeGRU(X, H).state_dict()) == [
        "U_n.weight",
        "U_r.weight",
        "U_z.weight",
        "W.bias",
        "W.weight",
    ]
    assert sorted(models.TreeFC(H).state_dict()) == ["U.bias", "U.weight"]
    assert sorted(models.ChainLSTM(X, H).state_dict()) == ["U.weight", "W.bias", "W.weight"]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_bilstm_tagger(executor):
    """The tags of each sentence are those of two loops over its words."""
    torch.manual_seed(0)
    lengths, X, H = [4, 1, 6], 3, 5
    m = models.BiLSTMTagger(X, H, num_tags=7, mlp_size=2)
    graphs = m.graphs(lengths)
    assert graphs.num_graphs == 3 and graphs.num_vertices == 3 * sum(lengths) and graphs.num_slots == 2
    assert graphs[1].types == ("fw", "bw", "tag") and graphs[0].types[:4] == ("fw",) * 4
    x = torch.randn(graphs.num_vertices, X, requires_grad=True)
    out = m(graphs, x, executor=executor)
    assert weft.explain(m, graphs, x, executor=executor).executor == executor
    assert {name: tuple(p.shape) for name, p in m["tag"].named_parameters()} == {
        "M.weight": (2, 2 * H), "M.bias": (2,), "T.weight": (7, 2), "T.bias": (7,)
    }  # fmt: skip

    def run(lstm, rows):
        h, c, found = torch.zeros(H), torch.zeros(H), []
        for row in rows:
            i, f, g, o = (lstm.W(row) + lstm.U(h)).chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            found.append(h)
        return found

    wanted, first = [], 0
    for n in lengths:
        fw = run(m["fw"], x[first : first + n])
        bw = run(m["bw"], x[first + n : first + 2 * n].flip(0))[::-1]
        rows = [m["tag"].T(torch.tanh(m["tag"].M(torch.cat(pair)))) for pair in zip(fw, bw, strict=True)]
        wanted += [torch.zeros(2 * n, 7), torch.stack(rows)]
        first += 3 * n
    want = torch.cat(wanted)
    assert relative_error(out, want) < 1e-5
    grad = torch.randn_like(want)
    for got, expected in zip(
        torch.autograd.grad(out, [x, *m.parameters()], grad),
        torch.autograd.grad(want, [x, *m.parameters()], grad),
        strict=True,
    ):
        assert relative_error(got, expected) < 1e-4
    with pytest.raises(ValueError, match="the length must be positive"):
        m.graphs([2, 0])
