"""What `make sanitize` runs: parts of it on the CPU, and its table, with a sanitizer that is none."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path

import pytest
import torch

from tests.fresh import python
from tests.sanitized import __main__ as sanitized
from tests.sanitized import common

ROOT = Path(__file__).parents[1]
ON_CPU = (
    "heads", "newton", "steps", "complex_scans", "batch_first", "readouts", "pointwise", "sequential", "sparse",
    "chains", "batched", "many_rows", "persistent_trees", "persistent_edges", "persistent_halves", "persistent_chains",
    "persistent_others", "trainer", "trainer_edges", "trainer_types", "trainer_taggers", "copies", "slices",
    "slices_dense", "slices_layers", "slices_halves",
)  # fmt: skip


@pytest.mark.parametrize("part", ON_CPU)
@pytest.mark.filterwarnings("ignore:offload. there is no CUDA device here")
def test_parts_run(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_device", "cpu")
    if torch.cuda.is_available() and (part == "copies" or "slices" in part):
        pytest.skip("it takes the device that there is")
    sanitized.PARTS[part]()


def test_every_kernel_is_looked_at() -> None:
    """Those that are compiled at run time have the names that csrc gives them, the others their namespace in theirs."""
    named = []
    for path in (path for end in ("cu", "cuh") for path in (ROOT / "csrc").rglob(f"*.{end}")):
        kernels = path.read_text(encoding="utf-8").split("__global__ ")
        if path.name == "probe.jit.cu" or len(kernels) == 1:  # the compiler's tests launch those
            continue
        if path.name.endswith(".jit.cu"):
            named += [re.search(r"(\w+)\(const ", after)[1] for after in kernels[1:]]
        else:
            assert "namespace weft" in kernels[0], path
    assert len(named) == 7
    assert all(any(part in name for part in sanitized.KERNELS) for name in named), named


def test_what_fails_and_what_does_not_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each part under each tool, whatever became of the one before."""
    tool = tmp_path / "sanitizer"
    tool.write_text(
        '#!/bin/sh\nfor last; do :; done\necho "$2 $last $PYTORCH_NO_CUDA_MEMORY_CACHING"\n'
        'case "$2 $last" in "racecheck codecs") exit 3;; "racecheck batched") sleep 60; exit 0;; esac\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        command = ["sanitized", "batched", "offload", "--sanitizer", str(tool), "--limit", "4", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            sanitized.main()
        return ended.value.code, capsys.readouterr().out

    code, printed = run("--under", "memcheck", "racecheck", "--jobs", "3")
    assert code == 1
    table = printed[printed.index("\ntool ") :].strip().splitlines()[1:]
    assert [line.split()[:4] for line in table] == [
        ["memcheck", "batched", "passed", "0"],
        ["memcheck", "codecs", "passed", "0"],
        ["memcheck", "copies", "passed", "0"],
        ["memcheck", "managed", "passed", "0"],
        ["racecheck", "batched", "not", "finished"],
        ["racecheck", "codecs", "failed", "(3)"],
        ["racecheck", "copies", "passed", "0"],
        ["racecheck", "managed", "passed", "0"],
    ]
    assert "racecheck codecs 1" in printed and "memcheck codecs 1" not in printed  # output of what failed
    assert run("--under", "synccheck")[0] == 0
    code, printed = run("--under", "synccheck", "--within", "0")
    assert code == 1 and printed.count("not begun") == 4


def test_the_command_knows_its_parts() -> None:
    code = "import runpy, sys; sys.argv.append('--help'); runpy.run_module('tests.sanitized', run_name='__main__')"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout.replace("\n", " ") for part in sanitized.PARTS)
