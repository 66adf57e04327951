"""What the tests of the Trainer share: the loop that a user would write, cells, batches and optimizers."""

from __future__ import annotations

import copy
import math
import random

import torch
import weft
from torch.nn import functional as F
from weft.vertex import Trainer, models

from tests.common import relative_error
from tests.vertex.naive import random_tree

C, X, H = 5, 3, 4
BOUND = 1e-5

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "groups": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "betas": (0.5, 0.9)}], 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "maximize": lambda p: torch.optim.SGD(p, 0.01, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}


def tree_lstm(rng, count):
    return weft.Graphs.from_children([random_tree(rng, rng.randint(1, 6)) for _ in range(count)])


def rvnn(rng, count):
    trees = [random_tree(rng, rng.randint(1, 6)) for _ in range(count)]
    types = ["inner" if below else "leaf" for tree in trees for below in tree]
    return weft.Graphs.from_children(trees).with_types(types)


def tagger(rng, count):
    return models.BiLSTMTagger.graphs([rng.randint(1, 5) for _ in range(count)])


CELLS = {
    "treelstm": (lambda: models.TreeLSTM(X, H), tree_lstm, H),
    "childsum": (lambda: models.ChildSumTreeLSTM(X, H), tree_lstm, H),
    "treefc": (lambda: models.TreeFC(X), tree_lstm, X),
    "rvnn": (lambda: models.RvNN(X, H), rvnn, H),
    "tagger": (lambda: models.BiLSTMTagger(X, H, C, 3), tagger, C),
}


def batches(make_graphs, count=4, device="cpu", loss="cross_entropy", at="vertices", width=C, seed=0, dtype=None):
    """Batches that were never seen, of several sizes, with their targets."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        graphs = make_graphs(rng, rng.randint(1, 4)).to(device)
        n = graphs.num_graphs if at == "roots" else graphs.num_vertices
        targets = torch.randint(C, (n,)) if loss == "cross_entropy" else torch.randn(n, width, dtype=dtype)
        found.append((graphs, torch.randn(graphs.num_vertices, X, dtype=dtype).to(device), targets.to(device)))
    return found


def loop_step(
    cell, optimizer, graphs, x, targets, *, loss="cross_entropy", head=None, at="vertices", ignore_index=-100
):
    """What the contract says that a step is."""
    y = cell(graphs, x)
    y = y if head is None else head(y)
    y = y if at == "vertices" else y[graphs.roots]
    if loss == "cross_entropy":
        value = F.cross_entropy(y, targets, ignore_index=ignore_index)
    else:
        value = F.mse_loss(y, targets)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value.item()


def check_states(mine, theirs, bound=BOUND):
    """Parameters are compared by who has the optimizers; here the states, and what a state dict says."""
    mine, theirs = mine.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, want in theirs["state"].items():
        found = mine["state"][number]
        assert found.keys() == want.keys()
        for key, w in want.items():
            if isinstance(w, torch.Tensor):
                assert (found[key].dtype, found[key].device) == (w.dtype, w.device), key
                assert relative_error(found[key], w) <= bound, key
            else:
                assert found[key] == w, key


def check_against_loop(cell, head, make, data, device, bound=BOUND, executor="auto", **options):
    cell, head = cell.to(device), head if head is None else head.to(device)
    twin, twin_head = copy.deepcopy(cell), copy.deepcopy(head)
    both = [[*c.parameters(), *(h.parameters() if h else ())] for c, h in ((cell, head), (twin, twin_head))]
    optimizer, other = make(both[0]), make(both[1])
    trainer = Trainer(cell, optimizer, head=head, executor=executor, **options)
    wanted = [loop_step(twin, other, *batch, head=twin_head, **options) for batch in data]
    versions = [p._version for p in both[0]]
    found = [trainer.step(*batch) for batch in data]
    assert found[0] is None and all(type(x) is float for x in found[1:])
    last = trainer.sync()
    assert type(last) is float and trainer.sync() == last
    for f, w in zip([*found[1:], last], wanted, strict=True):
        assert math.isclose(f, w, rel_tol=10 * bound)
    for p, q, version in zip(*both, versions, strict=True):
        assert relative_error(p, q) <= bound
        assert p.grad is None and (p._version > version) == (q.grad is not None)
    check_states(optimizer, other, 10 * bound)
    return trainer


def everything(cell, optimizer, head=None):
    tensors = [*cell.parameters(), *(() if head is None else head.state_dict().values())]
    states = {p: {k: copy.deepcopy(x) for k, x in s.items()} for p, s in optimizer.state.items()}
    return [t.detach().clone() for t in tensors], states, [p.grad for p in cell.parameters()]


def check_unchanged(before, cell, optimizer, head=None):
    tensors, states, grads = everything(cell, optimizer, head)
    assert all(map(torch.equal, tensors, before[0]))
    assert states.keys() == before[1].keys()
    for p, state in states.items():
        assert state.keys() == before[1][p].keys()
        for key, x in state.items():
            same = torch.equal(x, before[1][p][key]) if isinstance(x, torch.Tensor) else x == before[1][p][key]
            assert same, key
    assert all(a is b for a, b in zip(grads, before[2], strict=True))


ONE_KERNEL = ["sgd", "momentum", "dampened", "nesterov", "adam", "adamw", "fused", "groups"]
