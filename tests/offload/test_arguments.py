"""weft.offload: bad input."""

from __future__ import annotations

import subprocess
import sys

import pytest
import weft
from weft.offloading import offload


@pytest.mark.parametrize("name", ["budget", "min_bytes", "pool_limit"])
def test_sizes(name: str) -> None:
    for good in (0, 5, "0B", "4GB", "1.5 gib", "3 kib"):
        offload(**{name: good}, backend="reference")
    for bad in ("4 apples", "", "4", "-1GB", "1e3MB", "GB", -1):
        with pytest.raises(ValueError, match=name) as error:
            offload(**{name: bad}, backend="reference")
        assert repr(bad) in str(error.value)
    for bad in (True, 1.5, [1], *((None,) if name == "min_bytes" else ())):
        with pytest.raises(TypeError, match=name):
            offload(**{name: bad}, backend="reference")


def test_arguments() -> None:
    assert offload("4GB").budget == 4_000_000_000 and offload("1.5KiB").budget == 1536 and offload().budget is None
    assert weft.offload is offload
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
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
