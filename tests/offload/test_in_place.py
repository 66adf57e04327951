"""weft.offload: saved tensors that were changed in place raise what torch raises."""

from __future__ import annotations

import contextlib

import pytest
import torch
from weft.offloading import offload

from tests.offload.engines import everything


def _error(change, around) -> str:
    x = torch.linspace(1, 2, 3, requires_grad=True)
    with around:
        y = x.exp()
    with torch.no_grad():
        change(x, y)
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: y.add_(1),
        lambda x, y: y[1:].mul_(2),
        lambda x, y: y.detach().zero_(),
        lambda x, y: y.view(3, 1).t().detach()[0, :1].fill_(4),
    ],
)
def test_in_place_change_is_torchs_error(moved: bool, change) -> None:
    around = everything() if moved else offload("1GB", backend="reference")
    expected = _error(change, contextlib.nullcontext())
    assert "at version 1; expected version 0 instead" in expected
    assert _error(change, around) == expected


def test_in_place_change_of_inputs_and_parameters() -> None:
    def run(around, of: str) -> str:
        w = torch.ones(3, requires_grad=True)
        a = torch.full((3,), 2.0)
        b = w * 3
        with around:
            y = (w * w * a * b).sum()
        with torch.no_grad():
            {"w": w, "a": a, "b": b}[of].add_(1)
        with pytest.raises(RuntimeError) as caught:
            y.backward()
        return str(caught.value)

    for of in "wab":
        expected = run(contextlib.nullcontext(), of)
        assert "modified by an inplace operation: [torch.FloatTensor [3]]" in expected
        assert run(everything(), of) == run(offload(None, backend="reference"), of) == expected


def test_in_place_change_with_history() -> None:
    def run(around) -> str:
        x = torch.ones(3, requires_grad=True)
        with around:
            h = x.exp()
            y = h.sin()
            h.add_(x)
        with pytest.raises(RuntimeError) as caught:
            (y + h).sum().backward()
        return str(caught.value)

    assert run(everything()) == run(contextlib.nullcontext())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moved", [True, False])
def test_in_place_change_of_what_a_gone_view_showed(moved: bool, dtype: torch.dtype) -> None:
    """torch keeps the view, Weft its memory alone; both name the node that a changed view gets."""

    def run(around, of) -> str:
        leaf = torch.ones(3, 3, dtype=dtype, requires_grad=True)
        h = leaf * 2
        with around:
            y = of(leaf, h)
        with torch.no_grad():
            leaf.add_(1)
            h.add_(1)
        with pytest.raises(RuntimeError) as caught:
            y.sum().backward()
        return str(caught.value)

    for of in (lambda leaf, h: h @ leaf.t(), lambda leaf, h: h[1:] ** 2, lambda leaf, h: h.detach()[1:] * leaf[1:]):
        off = everything() if moved else offload(None, backend="reference")
        assert run(off, of) == run(contextlib.nullcontext(), of)


def test_change_between_two_backwards() -> None:
    """What was restored for a graph of the backward counts as the saved tensor: a change of that is an error there."""
    for around in (contextlib.nullcontext(), everything(), offload("1GB", backend="reference")):
        x = torch.ones(3, requires_grad=True)
        a = torch.ones(3)
        with around:
            y = (x * x * a).pow(2).sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
        a.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            g.sum().backward()
