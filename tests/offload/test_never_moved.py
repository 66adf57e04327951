"""weft.offload: what never moves, and why it stayed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from weft.offloading import offload

from tests.offload.engines import REASONS, Probe, cuda, everything, numbers, saved_and_restored


def test_leaves_and_their_views_are_not_counted() -> None:
    w = nn.Parameter(torch.randn(32, 32))
    off = everything()
    with off:
        x = torch.randn(32, 32)
        y = (x @ w.t()) @ w[:, :] @ w
    y.sum().backward()
    n = numbers(off)
    assert n["saved_bytes"] == 3 * x.nbytes and n["saved_tensors"] == 3


def test_frozen_parameters_stay() -> None:
    frozen, buffer = nn.Parameter(torch.randn(32, 32), requires_grad=False), torch.randn(32, 32)
    x = torch.randn(32, 32, requires_grad=True)
    for budget in (0, buffer.nbytes):  # which is not about parameters
        off = offload(budget, backend="reference", min_bytes=0, keep_last=0)
        for _ in range(3):
            with off:
                y = nn.functional.linear(x, frozen) * frozen + x @ frozen[:, :] + x * buffer
            y.sum().backward()
            n = numbers(off)
            assert n["kept"]["other"] == frozen.nbytes and n["live_bytes"] == 0
            assert n["saved_bytes"] == frozen.nbytes + buffer.nbytes and n["peak_bytes_without"] == buffer.nbytes
        assert n["moved_bytes"] == (buffer.nbytes if budget == 0 else 0)
        assert budget == 0 or (n["budget_met"] and n["predicted_peak_bytes"] == n["peak_bytes"] == buffer.nbytes)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:.*prototype")
def test_what_is_not_plain_stays() -> None:
    off = everything()
    dense = torch.randn(8, 8, requires_grad=True)
    sparse = torch.eye(8).to_sparse()
    with off:
        y = torch.sparse.mm(sparse, dense).sum()
    y.backward()
    assert torch.equal(dense.grad, torch.ones(8, 8))
    n = numbers(off)
    assert n["moved_bytes"] == 0 and n["kept"]["other"] == sparse._indices().nbytes + sparse._values().nbytes

    dense.grad = None
    with off:
        y = (torch.sparse.mm(sparse.to_sparse_csr(), dense) * dense).sum()
    y.backward()
    numbers(off)

    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged, requires_grad=True)
    with off:
        y = (nested.sin() * nested).values().sum()
    y.backward()
    numbers(off)

    class Tagged(Tensor):
        pass

    tagged = torch.randn(6).as_subclass(Tagged)
    (came,) = saved_and_restored(off, tagged)
    assert type(came) is Tagged and numbers(off)["kept"]["other"] == 24


def test_fake_tensors_stay() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    off = everything()
    with off, FakeTensorMode():
        x = torch.randn(8, 8, requires_grad=True)
        (x.sin() * x.cos()).sum().backward()
    assert numbers(off)["saved_bytes"] == 0


def test_cpu_tensors_stay_with_copy() -> None:
    off = offload(0, min_bytes=0)
    x = torch.randn(10, 10, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with off:
            y = x.sin().cos()
    y.sum().backward()
    n = numbers(off)
    assert n["kept"]["host"] == n["saved_bytes"] == 400 and n["peak_bytes"] == 0 and n["budget_met"]
    assert off.timeline is not None and [t.bytes for t in off.timeline.tensors] == [400]


def test_reasons() -> None:
    x = [torch.randn(n) for n in (1000, 10, 2000, 3000, 20)]
    off = offload(0, backend="reference", min_bytes=100, keep_last=2)
    for _ in range(3):
        saved_and_restored(off, *x)
        n = numbers(off)
        assert n["kept"] == {**dict.fromkeys(REASONS, 0), "small": 40 + 80, "last": 12000}
        assert n["moved_bytes"] == 4 * 3000
    off = offload("5KB", backend="reference", min_bytes=100, keep_last=1)
    saved_and_restored(off, *x[:3])
    n = numbers(off)
    assert n["kept"]["last"] == 8000 and n["kept"]["small"] == 40 and n["moved_bytes"] == 4000
    off = offload("1MB", backend="reference", min_bytes=0, keep_last=2)
    saved_and_restored(off, *x)
    assert numbers(off)["kept"] == {**dict.fromkeys(REASONS, 0), "last": 12080, "budget": 12040}


@pytest.mark.parametrize("keep_last", [0, 1, 3, 100])
def test_keep_last(keep_last: int) -> None:
    off = everything(keep_last=keep_last)
    for _ in range(3):
        saved_and_restored(off, *(torch.randn(100) for _ in range(5)))
        assert numbers(off)["kept"]["last"] == 400 * min(keep_last, 5)


@cuda
def test_cpu_tensors_come_back_on_the_cpu() -> None:
    off = everything("copy")
    a, b = torch.randn(300), torch.randn(400, device="cuda")
    seen: list = []
    anchor = torch.zeros((), device="cuda", requires_grad=True)
    with off:
        loss = Probe.apply(seen, b, a, anchor)
    loss.backward()
    assert [t.device.type for t in seen[0]] == ["cuda", "cpu", "cuda"]
    assert torch.equal(seen[0][1], a) and torch.equal(seen[0][0], b)
    n = numbers(off)
    assert n["kept"]["host"] == 1200 and n["moved_bytes"] == 1600
