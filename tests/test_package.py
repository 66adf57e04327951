"""The package itself: what importing needs, what it says when it cannot, and that its documents follow the results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import weft

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_import_touches_no_gpu():
    done = python("import weft, torch; assert not torch.cuda.is_initialized()", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["tqdm", "rich", "matplotlib", "pytest"])
def test_import_needs_only_torch_and_numpy(module):
    done = python(f"import sys; sys.modules[{module!r}] = None; import weft, weft.info, weft.data")
    assert done.returncode == 0, done.stderr


def test_a_library_for_another_torch_says_so_in_one_sentence():
    done = python(
        "import sys, types\n"
        "info = types.ModuleType('weft._build_info'); info.TORCH = '1.2.3'\n"
        "sys.modules['weft._build_info'] = info\n"
        "import weft"
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(r"ImportError: weft: built for torch 1\.2\.3, found torch .*; run `pip install ", last), last


def test_a_missing_library_says_how_to_build_it():
    done = python("import sys; sys.modules['weft._build_info'] = None; import weft")
    assert done.returncode != 0
    assert "pip install . --no-build-isolation" in done.stderr.strip().splitlines()[-1]


def test_the_registry_names_every_operator():
    import torch

    declared = set(re.findall(r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc" / "registry.cpp").read_text()))
    registered = {
        name.removeprefix("weft::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("weft::")
    }
    assert "linear_scan" in declared
    assert declared == registered
    for name in declared:
        assert torch._C._dispatch_has_kernel(f"weft::{name}"), name


def test_the_build_says_why_it_leaves_cuda_out(tmp_path):
    import torch

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 9.1, V9.1.85'\n")
    nvcc.chmod(0o755)

    def setup(choice: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "CUDA_HOME": str(tmp_path), "WEFT_CUDA": choice}
        return subprocess.run(
            [sys.executable, "setup.py", "-q", "--version"], cwd=ROOT, env=environment, capture_output=True, text=True
        )

    reason = f"nvcc is of CUDA 9.1 and torch of CUDA {torch.version.cuda}"
    free, forced, here = setup(""), setup("1"), setup("here")
    assert free.returncode == here.returncode == 0 and forced.returncode != 0
    if not torch.cuda.is_available():
        assert "weft:" not in here.stderr  # what was asked for is no obstacle
    if torch.version.cuda is None:
        assert "building for the CPU alone" not in free.stderr
        reason = "torch is built without CUDA"
    else:
        assert f"building for the CPU alone, {reason}" in free.stderr
    assert reason in forced.stderr


def test_version_and_hints():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert version[1] == weft.__version__
    assert f"## [{weft.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert (Path(weft.__file__).parent / "py.typed").exists()


def test_the_readmes_examples_run(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))  # where weft.tune writes
    monkeypatch.setattr(weft._rnn.tuned, "_entries", {})
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict = {}
    for block in blocks:
        exec(block, namespace)
    assert [tuple(g.shape) for g in namespace["grads"]] == [(4, 5), (4, 10), (4, 20)]
    assert isinstance(namespace["model"][1], weft.nn.GRU)


def test_readme_shows_what_was_measured_and_nothing_else():
    from benchmarks import plot  # here, because it alone needs matplotlib

    readme = (ROOT / "README.md").read_text()
    assert readme == plot.with_block(readme, plot.readme_block(plot.read_results())), "run `python -m benchmarks.plot`"


def test_prose_quotes_no_measurement():
    """A ratio or a time that was measured is a row, and stands where the rows are drawn."""
    from benchmarks import plot

    readme = (ROOT / "README.md").read_text()
    texts = {"README.md": plot.with_block(readme, "")}
    texts.update({str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "docs").glob("[!_]*/*.rst")})
    texts.update({path.name: path.read_text() for path in (ROOT / "docs").glob("*.rst")})
    assert "docs/guide/rnn.rst" in texts and "performance.rst" in texts
    for name, text in texts.items():
        assert not re.findall(r"\d[\d.,]*(?:x\b| ?us\b| times (?:faster|slower|as))", text), name
