"""What torchrun starts: benchmarks of several ranks, and these tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import weft.distributed as wd

from benchmarks.common import parse_case, read_rows
from benchmarks.together.scans import scan_by_all_to_all
from tests.common import assert_close
from tests.distributed.team import Team, device

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str) -> str:
    """What two processes without a GPU print."""
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    environment = {key: value for key, value in os.environ.items() if key not in launched}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_benchmark(tmp_path: Path) -> None:
    output = tmp_path / "ranks.csv"
    torchrun("benchmarks.ranks", "fp32", "--devices", "cpu", "--seconds", "0.001", "--output", str(output))
    rows = [(parse_case(row["case"]), row) for row in read_rows(output)]
    assert {keys["processes"] for keys, _ in rows if "processes" in keys} == {"2"}
    found = {(keys.get("op") or keys.get("cell") or keys["model"], row["metric"], row["peer"]) for keys, row in rows}
    for metric in ("forward", "forward_backward"):
        for peer in ("one_rank", "slice", "all_to_all", "predicted"):
            assert ("linear_scan", metric, peer) in found
    for one in (
        ("linear_scan", "sent_to_ranks", "all_to_all"),
        ("linear_scan", "forward_exchange", "predicted"),
        ("gru", "backward", "one_rank"),
        ("mingru_stack", "step", "one_rank"),
        ("long_context", "step", "one_rank"),
        ("fsdp2", "step", "plain"),
        ("fsdp2", "saved_peak", "budget"),
        ("fsdp2", "gigabyte_d2h", "alone"),
        ("all_gather", "exchange", "predicted"),
    ):
        assert one in found
    for keys, row in rows:
        if row["metric"] == "sent_to_ranks" and keys["layout"] == "diagonal":
            assert float(row["weft"]) == 8 * 2 * 64 + 4, "a product, a value, and whether there is one"


def test_these_tests() -> None:
    assert "passed" in torchrun("pytest", "-q", "-n", "0", "-m", "not cuda", "tests/distributed/test_slices.py")


def _all_to_all(rank: int) -> None:
    size = dist.get_world_size()
    A = 0.9 * torch.rand(5, 2, 3 * size, dtype=torch.float64).to(device()) + 0.1 * rank / size
    b = torch.randn(5, 2, 3 * size, dtype=torch.float64).to(device()) + rank
    results = []
    for scan in (wd.linear_scan, scan_by_all_to_all):
        leaves = [t.clone().requires_grad_() for t in (A, b)]
        x = scan(*leaves)
        results.append([x, *torch.autograd.grad((x * b).sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert_close(theirs, ours, 1e-13)


def test_trading_time_for_channels_gives_the_same(team: Team) -> None:
    team.run(_all_to_all)
