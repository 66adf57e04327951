"""weft.offload: bad input."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import weft
from torch import Tensor, nn
from weft.offloading import offload

from tests.fresh import python
from tests.offload.engines import everything, numbers


@pytest.mark.parametrize("name", ["budget", "min_bytes", "pool_limit"])
def test_sizes(name: str) -> None:
    for good in (0, 5, 4e9, "0B", "4GB", "4G", "2 ki", "1.5 gib", "3 kib"):
        offload(**{name: good}, backend="reference")
    for bad in ("4 apples", "", "4", "4i", "-1GB", "1e3MB", "GB", "G", -1):
        with pytest.raises(ValueError, match=name) as error:
            offload(**{name: bad}, backend="reference")
        assert repr(bad) in str(error.value)
    for bad in (True, 1.5, math.inf, math.nan, [1], *((None,) if name == "min_bytes" else ())):
        with pytest.raises(TypeError, match=name):
            offload(**{name: bad}, backend="reference")


def test_arguments() -> None:
    assert offload("4GB").budget == 4_000_000_000 and offload("1.5KiB").budget == 1536 and offload().budget is None
    assert offload("4G").budget == offload(4e9).budget == 4_000_000_000 and offload("1.5Ki").budget == 1536
    assert type(offload(4e9).budget) is int and weft.offload is offload
    for bad in (-1,):
        with pytest.raises(ValueError, match="keep_last"):
            offload(keep_last=bad)
    for bad in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="keep_last"):
            offload(keep_last=bad)
    for name, bad in (("compress", "zip"), ("backend", "cuda"), ("compress", "")):
        with pytest.raises(ValueError, match=name):
            offload(**{name: bad})
    for name in ("compress", "backend"):
        for bad in (3, True, ["zvc"], *((None,) if name == "backend" else ())):
            with pytest.raises(TypeError, match=name):
                offload(**{name: bad})
    with pytest.raises(TypeError):
        offload(0, "auto")


def test_decorator() -> None:
    off, model = everything(), nn.Linear(8, 8)

    @off
    def step(x: Tensor, *, scale: float) -> Tensor:
        """The docstring."""
        return (scale * model(x).exp()).sum()

    assert step.__name__ == "step" and step.__doc__ == "The docstring."
    for uses in (1, 2):
        step(torch.randn(4, 8), scale=2.0).backward()
        assert numbers(off)["uses"] == uses and numbers(off)["moved_bytes"] > 0

    @off
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with off:  # left by then
        pass

    async def later() -> None:
        pass

    def yields():
        yield

    for bad in (later, yields, 3, None):
        with pytest.raises(TypeError, match="offload"):
            off(bad)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied) -> None:
    """Of a model that holds one: the same settings, nothing learnt."""
    model = nn.Linear(8, 8)
    model.off = offload("0B", compress="zvc", backend="reference", min_bytes=16, keep_last=0, pool_limit="1G")
    with model.off:
        model(torch.randn(8, 8)).exp().sum().backward()
    other = copied(model)
    if copied is copy.copy:  # of a module: the same attributes
        assert other.off is model.off
        other.off = copy.copy(model.off)
    assert other.off is not model.off and repr(other.off) == repr(model.off)
    assert numbers(other.off)["uses"] == 0 and other.off.timeline is None
    with other.off:
        other(torch.randn(8, 8)).exp().sum().backward()
    assert numbers(other.off)["moved_bytes"] > 0 and numbers(model.off)["uses"] == 1
    model.off.close()
    with pytest.raises(RuntimeError, match="closed"), copied(model).off:
        pass


def test_repr() -> None:
    """Is what makes an object like it."""
    for text in (
        "offload()",
        "offload('4GB')",
        "offload(4000000000, compress=None)",
        "offload(0, backend='reference', min_bytes='1KiB', keep_last=0, pool_limit=1000)",
    ):
        assert repr(eval(text)) == text


def test_one_warning_without_cuda() -> None:
    script = (
        "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "import warnings, torch, weft\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for backend in ('reference', 'copy', 'copy', 'managed'):\n"
        "        with weft.offload(0, backend=backend): torch.randn(9, requires_grad=True).exp().sum().backward()\n"
        "assert [w.category for w in seen] == [UserWarning], [str(w.message) for w in seen]\n"
    )
    run = python(script)
    assert run.returncode == 0, run.stderr
