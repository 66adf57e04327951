"""What `make sanitize` runs: parts of it on the CPU, and its table, with a sanitizer that is none."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import sanitized


@pytest.mark.parametrize("part", ("sparse", "vertex", "copies"))
@pytest.mark.filterwarnings("ignore:offload. there is no CUDA device here")
def test_parts_run(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitized, "DEVICE", "cpu")
    if torch.cuda.is_available() and part == "copies":
        pytest.skip("offload takes the device that there is")
    sanitized.PARTS[part]()


def test_what_fails_and_what_does_not_end_is_told(tmp_path: Path) -> None:
    """Each part under each tool, whatever became of the one before."""
    tool = tmp_path / "sanitizer"
    tool.write_text(
        '#!/bin/sh\nfor last; do :; done\necho "$2 $last $PYTORCH_NO_CUDA_MEMORY_CACHING"\n'
        'case "$2 $last" in "racecheck codecs") exit 3;; "racecheck vertex") exec sleep 60;; esac\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "tests/sanitized.py", "vertex", "offload", "--sanitizer", str(tool)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTORCH_NO_CUDA_MEMORY_CACHING"}

    def run(*tools: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*command, "--limit", "4", "--under", *tools],
            cwd=Path(__file__).parents[1],
            env=environment,
            capture_output=True,
            text=True,
        )

    done = run("memcheck", "racecheck")
    assert done.returncode == 1, done.stderr
    table = done.stdout[done.stdout.index("\ntool ") :].strip().splitlines()[1:]
    assert [line.split()[:4] for line in table] == [
        ["memcheck", "vertex", "passed", "0"],
        ["memcheck", "codecs", "passed", "0"],
        ["memcheck", "copies", "passed", "0"],
        ["memcheck", "managed", "passed", "0"],
        ["racecheck", "vertex", "not", "finished"],
        ["racecheck", "codecs", "failed", "(3)"],
        ["racecheck", "copies", "passed", "0"],
        ["racecheck", "managed", "passed", "0"],
    ]
    assert "racecheck codecs 1" in done.stdout and "memcheck codecs 1" not in done.stdout  # output of what failed
    assert run("synccheck").returncode == 0
