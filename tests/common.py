"""What the tests of every op use: devices, error bounds, poisoned memory."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

BOUNDS = {
    # Unit roundoff 1e-16 and 6e-8, times a few for sums of up to some hundred terms in any order.
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    # One rounding of the result, at most half a unit in the last of 11 and of 8 bits: 4.9e-4 and 3.9e-3.
    torch.float16: 5e-4,
    torch.bfloat16: 4e-3,
}
"""Relative error of the norm against fp64 on the same (rounded) inputs."""


def treebank() -> Path:
    """The folder of the Stanford Sentiment Treebank, which is not shipped: WEFT_SST, else shared/data/sst in the
    repository or beside it; skips the test where there is none."""
    root = Path(__file__).parents[1]
    for folder in (
        os.environ.get("WEFT_SST"),
        root / "shared" / "data" / "sst",
        root.parent / "shared" / "data" / "sst",
    ):
        if folder is not None and (Path(folder) / "train.txt").exists():
            return Path(folder)
    pytest.skip("the Stanford Sentiment Treebank is not here: WEFT_SST may name its folder")


def every_measured() -> list[Any]:
    """What weft.tune remembers, of every engine."""
    from weft._rnn.select import tuned
    from weft._scan import tuned as tuned_scan
    from weft._vertex import tuned as tuned_vertex

    return [engine.MEASURED for engine in (tuned, tuned_scan, tuned_vertex)]


def tune_afresh(monkeypatch: pytest.MonkeyPatch, folder: Path, tuning: Any) -> Path:
    """A process that has read nothing, whose `tuning` keeps in `folder` whatever it measures on a machine that does
    other things, too; until the test ends."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(folder))
    monkeypatch.setattr(tuning, "_SPREAD", math.inf)
    for measured in every_measured():
        monkeypatch.setattr(measured, "entries", None)
    return folder


def tuning_cache(tuning: Any) -> Any:
    """For a test file's `cache`, a fixture of all its tests: the folder of tune_afresh."""

    @pytest.fixture(autouse=True)
    def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        return tune_afresh(monkeypatch, tmp_path, tuning)

    return cache


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm, in fp64 on the CPU: 0 for two empty tensors, NaN where there is one."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    difference, size = (got - want).norm().item(), want.norm().item()
    return difference / size if size else difference


def assert_close(got: Tensor, want: Tensor, bound: float | None = None) -> None:
    """`got` agrees with an fp64 `want` to `bound`, by default that of got's dtype."""
    limit = BOUNDS[got.dtype] if bound is None else bound
    error = relative_error(got, want)
    assert error <= limit, f"relative error {error:.3g} above {limit:.3g}"  # a NaN fails, too


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that is allocated but not written holds NaN (integers their largest value)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def covering(*axes: Iterable) -> list[tuple]:
    """A few of all combinations, in which each two values of two axes meet."""
    values = [list(axis) for axis in axes]
    met = {
        c: frozenset(itertools.combinations(enumerate(c), 2)) for c in itertools.product(*map(range, map(len, values)))
    }
    missing, chosen = frozenset().union(*met.values()), []
    while missing:
        chosen.append(max(met, key=lambda c: len(met[c] & missing)))
        missing -= met.pop(chosen[-1])
    return [tuple(v[i] for v, i in zip(values, c, strict=True)) for c in chosen]


def pairs(**axes: Iterable) -> pytest.MarkDecorator:
    """Parametrises by combinations in which each two values of two axes meet, where all of them would only repeat."""

    def label(value: object) -> str:
        if type(value) is tuple:
            return "-".join(map(label, value))
        nameless = type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__
        return getattr(value, "__name__", type(value).__name__ if nameless else str(value))

    combinations = covering(*axes.values())
    return pytest.mark.parametrize(list(axes), combinations, ids=list(map(label, combinations)))


def with_devices(samples: list, on_cuda: Sequence = ()) -> list:
    """(sample, device) for all devices, and more samples for CUDA."""
    cuda = [pytest.param(s, "cuda", marks=pytest.mark.cuda) for s in (*samples, *on_cuda)]
    return [(s, "cpu") for s in samples] + cuda


def check_close(names: Iterable[str], found: Sequence, expected: Sequence, bound: float) -> None:
    """Tensors and Nones agree in shape and to a relative error; `names` may go on past the end of the others."""
    for name, (f, e) in zip(names, zip(found, expected, strict=True), strict=False):
        if e is None:
            assert f is None, f"{name} should be None"
            continue
        assert f.shape == e.shape, f"{name}: {f.shape} instead of {e.shape}"
        assert relative_error(f, e) <= bound, f"{name}: error {relative_error(f, e):.2e} above {bound:.0e}"


def differentiate(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients that arrive when some of the outputs have one; None for an input that is None."""
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
    wanted = [i for i in inputs if i is not None]
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], materialize_grads=True))
    return [None if i is None else next(found) for i in inputs]


def with_environment(variables: dict[str, str], tests: str, *files: str) -> str:
    """Runs `tests` of these files, as pytest's -k has it, in a process with these variables; what it prints."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files, "-k", tests],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    return run.stdout


def in_a_cuda_graph(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `step`, which has run on another stream before, as torch asks for; and what it returned meanwhile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
