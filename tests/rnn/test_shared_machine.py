"""Layers on a machine that others use too: busy processes, more threads than cores, several layers at once, forks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import weft
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import busy_processes

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def layer(kind: str = "LSTM", H: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return getattr(weft.nn, kind)(64, H, algorithm="persistent")


def training_step(layer: nn.Module, x: Tensor) -> list[Tensor]:
    output = layer(x)[0]
    return [output.detach(), *torch.autograd.grad(output, list(layer.parameters()), output.detach())]


def test_busy_processes_end() -> None:
    with busy_processes(2) as started:
        assert all(process.poll() is None for process in started)
    assert all(process.poll() is not None for process in started)


@pytest.mark.parametrize(("kind", "count"), [("RNN", 5), ("GRU", 2), ("LSTM", 5)])
def test_bits_do_not_depend_on_the_load(kind: str, count: int) -> None:
    """A team that goes on as fewer members computes the same: one that meets nobody late, and one that does."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a team needs two processors")
    model, x = layer(kind), torch.randn(40, 3, 64)
    with threads(count):
        expected = training_step(model, x)
        with busy_processes(3 * len(os.sched_getaffinity(0))):
            for _ in range(3):
                assert all(map(torch.equal, training_step(model, x), expected))


@pytest.mark.slow
def test_is_not_far_behind_torch_beside_busy_processes() -> None:
    """In a process of its own, whose OpenMP threads sleep while they wait: that is when torch is fastest here."""
    script = """
import time, torch, weft
from benchmarks.common import busy_processes
torch.set_num_threads(2)
x = torch.randn(50, 1, 64, requires_grad=True)
layers = {"weft": weft.nn.LSTM(64, 512, algorithm="persistent"), "torch": torch.nn.LSTM(64, 512)}
best = dict.fromkeys(layers, float("inf"))
with busy_processes(2):
    for _ in range(6):
        for name, layer in layers.items():
            start = time.perf_counter()
            layer(x)[0].sum().backward()
            best[name] = min(best[name], time.perf_counter() - start)
assert best["weft"] <= 4 * best["torch"], best
"""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("OMP_NUM_THREADS", None)
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=300)


def test_several_layers_at_once() -> None:
    """Each in a thread of its own, with a team of its own."""
    models, x = [layer(H=96 + 32 * i) for i in range(3)], torch.randn(30, 2, 64)
    with threads(2):
        expected = [training_step(model, x) for model in models]
        with ThreadPoolExecutor(3) as pool:
            for _ in range(3):
                for found, wanted in zip(pool.map(training_step, models, [x] * 3), expected, strict=True):
                    assert all(map(torch.equal, found, wanted))


class Encoded(Dataset):
    """Items that a layer computes: in a worker, where there is one."""

    def __init__(self) -> None:
        self.layer, self.x = layer(H=64), torch.randn(4, 20, 64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.layer(self.x[index])[0]


def test_runs_in_the_workers_of_a_data_loader() -> None:
    """Forked from a process in which a team has run."""
    data = Encoded()
    with threads(2):
        training_step(data.layer, torch.randn(50, 8, 64))
        start = time.monotonic()
        found = list(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120))
        assert time.monotonic() - start < 120
        for item, row in zip(found, range(len(data)), strict=True):
            torch.testing.assert_close(item, data[row])
