"""Processes that stand for ranks: started once, they run one function after the other.

Under torchrun (``torchrun --nproc-per-node 2 -m pytest tests/distributed -n 0``, those of NCCL alone with ``-m cuda``)
its processes are the ranks: each collects the same tests and runs its own part of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120.0
"""After which a rank that does not answer is taken for dead."""


def device() -> torch.device:
    """Where this rank's tensors are."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def dealt(sizes: Sequence[int]) -> list[int]:
    """Slices of the same sum and in like proportions for as many ranks as there are."""
    ranks = dist.get_world_size()
    if ranks == len(sizes):
        return list(sizes)
    parts = [sizes[rank % len(sizes)] for rank in range(ranks)]
    if not any(parts):
        parts[-1] = 1
    ends = [sum(sizes) * sum(parts[: rank + 1]) // sum(parts) for rank in range(ranks)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


class Team:
    """`size` ranks of one group: gloo's have a thread each, NCCL's a GPU each."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._members: list[tuple[Any, Connection]] = []

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["weft.distributed", "torch.distributed.device_mesh"])
        folder = tempfile.mkdtemp()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, self.backend, os.path.join(folder, "store"), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._members.append((process, ours))

    def stop(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.terminate()
        self._members = []

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """What ``function(rank, *arguments, **keywords)`` returns on every rank, or raises on any. Tensors come back
        as tensors."""
        if not self._members:
            self.start()
        for _, pipe in self._members:
            pipe.send((function, arguments, keywords))
        answers = []
        for rank, (_, pipe) in enumerate(self._members):
            if not pipe.poll(SECONDS):
                self.stop()
                raise TimeoutError(f"rank {rank} of {function.__name__} does not answer")
            try:
                answers.append(pipe.recv())
            except EOFError:  # NCCL's watchdog ends a process whose collective does not come back
                answers.append((False, "the process has ended: timeout"))
        if not all(done for done, _ in answers):
            self.stop()  # the others may be somewhere else
        return _results(function, answers)


class Launched:
    """The ranks that torchrun has started, of which this process is one; otherwise a Team.

    A process has one default group: one of another backend takes its place when it runs something.
    """

    _joined: Launched | None = None
    _numbers = itertools.count()
    """Every group that is joined has a part of torchrun's store of its own."""

    def __init__(self, backend: str = "gloo") -> None:
        self.backend, self.size = backend, int(os.environ["WORLD_SIZE"])

    def join(self) -> None:
        if Launched._joined is not None:
            Launched._joined.stop()
        _set_up(self.backend, int(os.environ["LOCAL_RANK"]))
        store, rank = _torchruns_store()
        _join(self.backend, rank, self.size, store=dist.PrefixStore(f"tests {next(self._numbers)}", store))
        self._told = dist.new_group(backend="gloo")
        Launched._joined = self

    def stop(self) -> None:
        if Launched._joined is self:
            dist.destroy_process_group()
            Launched._joined = None

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        if Launched._joined is not self:
            self.join()
        answers: list[Any] = [None] * self.size
        mine = _call(function, dist.get_rank(), arguments, keywords)
        dist.all_gather_object(answers, mine, self._told)
        return _results(function, answers)


@functools.cache
def _torchruns_store() -> tuple[dist.Store, int]:
    """And this process's rank."""
    store, rank, _ = next(dist.rendezvous("env://"))
    return store, rank


def _results(function: Callable[..., Any], answers: list[tuple[bool, Any]]) -> list[Any]:
    failed = [f"rank {rank} of {function.__name__}:\n{value}" for rank, (done, value) in enumerate(answers) if not done]
    if failed:
        # Those that another one left alone say little.
        raise AssertionError(min(failed, key=lambda text: "gloo" in text or "_c10d" in text or "timeout" in text))
    return [value for _, value in answers]


def _call(function: Callable[..., Any], rank: int, arguments: tuple, keywords: dict) -> tuple[bool, Any]:
    torch.manual_seed(20)
    try:
        return True, function(rank, *arguments, **keywords)
    except BaseException:
        return False, traceback.format_exc()


def _set_up(backend: str, local_rank: int) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
        # What is compared went through products of other sizes.
        torch.backends.cudnn.allow_tf32 = False


def _join(backend: str, rank: int, size: int, **how: Any) -> None:
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS / 2), **how)


def _serve(rank: int, size: int, backend: str, store: str, pipe: Connection) -> None:
    _set_up(backend, rank)
    _join(backend, rank, size, init_method=f"file://{store}")
    while True:
        try:
            function, arguments, keywords = pipe.recv()
        except EOFError:
            break
        pipe.send(_call(function, rank, arguments, keywords))
    if backend == "nccl":
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
