"""weft.explain of linear scans and of the layers that are made of them."""

from __future__ import annotations

import pytest
import torch
import weft
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from weft.scan import linear_scan

LAYERS = [weft.nn.MinGRU, weft.nn.MinLSTM, weft.nn.RGLRU, weft.nn.LRU, weft.nn.S5]


def test_linear_scans():
    T, B, H, N = 7, 2, 5, 3
    b = torch.randn(T, B, H)
    for shape in ((T, B, H), (H,), (1, B, H), (1, 1, H)):
        assert weft.explain(linear_scan, torch.rand(shape), b).algorithm == "diagonal scan"
    for shape in ((T, B, H, H), (T, H, H), (T, 1, H, H)):
        A = torch.rand(shape)
        assert weft.explain(linear_scan, A, b).algorithm == "dense scan"
        found = weft.explain(linear_scan, A.to(torch.complex64), b.to(torch.complex64))
        assert (found.algorithm, found.reason) == ("reference", "A is complex and dense")
    assert weft.explain(linear_scan, torch.rand(B, T, H), b.transpose(0, 1), batch_first=True).algorithm[:4] == "diag"
    states = torch.randn(T, B, H, N)
    found = weft.explain(linear_scan, torch.rand(H, N), states, torch.zeros(B, H, N), c=torch.randn(H, N))
    assert found.algorithm == "diagonal scan" and "never written" in found.reason and "c (5, 3)" in found.input
    with pytest.raises(TypeError, match="c must be a Tensor"):
        weft.explain(linear_scan, torch.rand(H, N), states, c=1.0)
    with pytest.raises(ValueError, match="linear_scan"):
        weft.explain(linear_scan, torch.rand(T, B, H + 1), b)
    seen = []

    def run(x):
        seen.append(weft.explain(linear_scan, torch.rand(T, B, H), x).algorithm)
        return linear_scan(torch.ones(T, B, H), x).sum()

    torch.func.grad(run)(b)
    assert seen == ["reference"]


@pytest.mark.parametrize("cls", LAYERS)
def test_layers(cls):
    layer = cls(6, 8, num_layers=2, batch_first=True)
    found = weft.explain(layer, torch.randn(3, 20, 6))
    assert found.algorithm == "diagonal scan" and "one scan" in found.reason
    assert ("complex" in found.reason) == (cls in (weft.nn.LRU, weft.nn.S5))
    assert weft.explain(layer, torch.randn(3, 1, 6)).algorithm == "step"
    assert weft.explain(layer, torch.randn(1, 20, 6)).algorithm == "diagonal scan"
    packed = pack_sequence([torch.randn(n, 6) for n in (5, 3)])
    assert "past its end a sequence keeps its state" in weft.explain(layer, packed).reason
    model = torch.nn.Sequential(layer)
    (part,) = weft.explain(model, torch.randn(3, 20, 6)).parts
    assert part.algorithm == "diagonal scan"


def test_layers_of_ones_own_channels():
    x = torch.randn(600, 1, 6)
    for layer in (weft.nn.ParaGRU(6, 8), weft.nn.ParaLSTM(6, 8)):
        assert weft.explain(layer, x).algorithm == "newton"
        assert weft.explain(layer, x[:4]).algorithm == "walk"
        layer.algorithm = "walk"
        assert weft.explain(layer, x).reason == 'algorithm="walk"'
        seen = []
        torch.func.vmap(lambda x: (seen.append(weft.explain(layer, x)), x)[1], in_dims=1)(x)  # noqa: B023
        assert seen[0].algorithm == "reference" and "torch.func" in seen[0].reason


def test_chains_with_hooks():
    """What is said is what runs: the chain has a backward of its own at the output."""
    x = torch.randn(3, 6)

    def net():
        return weft.scan.ScanSequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 4)), nn.Tanh())

    def said(net):
        found = weft.explain(net, x)
        assert (found.algorithm == "chain_backward") == ("Scan" in type(net(x).grad_fn).__name__)
        assert len(found.layers) == 4
        return found.algorithm, found.reason.split(" has hooks")[0]

    def same(m, i, *o):
        return None

    assert said(net())[0] == "chain_backward"
    for register, name in (
        (lambda n: n[2].register_forward_hook(same), "2"),
        (lambda n: n[1].register_forward_pre_hook(same), "1"),
        (lambda n: (n[2].register_forward_hook(same), n[1][1].register_full_backward_hook(same)), "1.1"),
        (lambda n: n[1][0].register_full_backward_pre_hook(same), "1.0"),
    ):
        changed = net()
        register(changed)
        assert said(changed) == ("torch", name)
    changed = net()
    handle = changed[0].register_forward_hook(same)
    handle.remove()
    nn.utils.prune.random_unstructured(changed[1][1], "weight", 0.5)
    changed.register_forward_pre_hook(same)
    assert said(changed)[0] == "chain_backward"
    handle = nn.modules.module.register_module_forward_hook(same)
    try:
        assert said(net()) == ("torch", "every module")
    finally:
        handle.remove()
