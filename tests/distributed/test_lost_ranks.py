"""A rank that dies or never comes ends the others, by the group's timeout at the latest, with an error that says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.conftest import ON_GPUS

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import weft.distributed as wd
from torch.distributed.distributed_c10d import _set_pg_timeout

rank, backend, what, store = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
A, b = torch.rand(5, 2, 3, device=device), torch.rand(5, 2, 3, device=device)
print(wd.linear_scan(A, b).sum().item(), flush=True)  # both are there
_set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
if rank == 1:
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)
print(wd.linear_scan(A, b).sum().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=ON_GPUS)])
@pytest.mark.parametrize("what", ["killed", "absent"])
def test_who_waits_for_a_lost_rank_is_told(what: str, backend: str, tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen:
        command = [sys.executable, "-c", SCRIPT, str(rank), backend, what, str(tmp_path / "store")]
        with (tmp_path / f"{rank}.txt").open("w") as said:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)

    first, lost = start(0), start(1)
    try:
        printed, _ = first.communicate(timeout=150)
    finally:
        for process in (first, lost):
            process.kill()
            process.wait()
            process.stdout.close()
    said = (tmp_path / "0.txt").read_text()
    assert first.returncode != 0 and len(printed.split()) == 1, said[-3000:]
    assert re.search("tim(ed|e) ?out|connection (closed|reset)|broken pipe", said, re.IGNORECASE), said[-3000:]
