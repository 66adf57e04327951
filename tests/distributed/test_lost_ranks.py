"""A rank that dies or never comes ends the others, by the group's timeout at the latest, with an error that says so."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.distributed.conftest import ON_GPUS
from tests.fresh import python

SCRIPT = """
import os, signal, time
from datetime import timedelta
import torch
import torch.distributed as dist
import weft.distributed as wd
from torch.distributed.distributed_c10d import _set_pg_timeout

backend, what, store = {arguments}
ranks = []
while len(ranks) < 2 and (child := os.fork()):
    ranks.append(child)
if len(ranks) == 2:  # who starts both, and ends as the first does
    status = os.waitpid(ranks[0], 0)[1]
    os.kill(ranks[1], signal.SIGKILL)
    os.waitpid(ranks[1], 0)
    os._exit(os.waitstatus_to_exitcode(status) % 256)
rank = len(ranks)
signal.alarm(150)
torch.set_num_threads(1)
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
A, b = torch.rand(5, 2, 3, device=device), torch.rand(5, 2, 3, device=device)
both = wd.linear_scan(A, b).sum().item()
if rank == 0:
    print(both, flush=True)
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
    done = python(SCRIPT.replace("{arguments}", repr((backend, what, str(tmp_path / "store")))))
    # Of a rank that hangs the alarm makes an end.
    assert done.returncode not in (0, -signal.SIGALRM % 256), done.stderr[-3000:]
    assert len(done.stdout.split()) == 1, done.stderr[-3000:]
    told = "tim(ed|e) ?out|connection (closed|reset)|broken pipe"
    assert re.search(told, done.stderr, re.IGNORECASE), done.stderr[-3000:]
