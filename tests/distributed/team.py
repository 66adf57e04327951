"""Processes of one thread each that stand for ranks: started once, they run one function after the other."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 120.0
"""After which a rank that does not answer is taken for dead."""


class Team:
    """`size` ranks of one gloo group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: list[tuple[Any, Connection]] = []

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["weft.distributed", "torch.distributed.device_mesh"])
        folder = tempfile.mkdtemp()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, os.path.join(folder, "store"), theirs)
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
            answers.append(pipe.recv())
        failed = [
            f"rank {rank} of {function.__name__}:\n{value}" for rank, (done, value) in enumerate(answers) if not done
        ]
        if failed:
            self.stop()  # the others may be somewhere else
            # Those that another one left alone say little.
            raise AssertionError(min(failed, key=lambda text: "gloo" in text or "_c10d" in text or "timeout" in text))
        return [value for _, value in answers]


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS / 2)
    )
    while True:
        try:
            function, arguments, keywords = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(20)
        try:
            answer = True, function(rank, *arguments, **keywords)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
