"""The package itself: what importing needs, what it says when it cannot, and that its documents follow the results."""

from __future__ import annotations

import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import weft

from tests.fresh import python

ROOT = Path(__file__).resolve().parent.parent


def test_import_needs_only_torch():
    modules = ["numpy", "tqdm", "rich", "matplotlib", "pytest"]
    done = python(f"import sys; sys.modules.update(dict.fromkeys({modules})); import weft, weft.info, weft.data")
    assert done.returncode == 0, done.stderr


def test_import_touches_no_gpu_and_loads_no_compiler():
    """torch.compile's front end, symbolic algebra and Triton take seconds, and who imports Weft may need none."""
    heavy = ["torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed.fsdp", "sympy", "triton"]
    found = f"[name for name in {heavy} if name in sys.modules]"
    script = f"import sys, torch; before = {found}; import weft, weft.info; assert not torch.cuda.is_initialized()"
    done = python(f"{script}; print(before, {found})", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.strip().split("] ")
    assert f"{before}]" == after


@pytest.mark.parametrize("first", ["weft", "torch.utils.flop_counter"])
def test_torchs_counter_has_the_formulas_whichever_is_imported_first(first):
    done = python(
        f"import {first}, weft, torch\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    weft.scan.linear_scan(torch.ones(5, 2, 3), torch.ones(5, 2, 3))\n"
        "print(counter.get_total_flops())"
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * 4 * 2 * 3


def test_public_names_hide_no_module():
    for name in weft.__all__:
        value = getattr(weft, name)
        assert inspect.ismodule(value) or importlib.util.find_spec(f"weft.{name}") is None, name


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


@pytest.mark.slow
def test_the_build_says_why_it_leaves_cuda_out(tmp_path, monkeypatch):
    import torch

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 9.1, V9.1.85'\n")
    nvcc.chmod(0o755)

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)  # naming architectures asks for CUDA wherever nvcc is

    def setup(choice: str) -> subprocess.CompletedProcess[str]:
        code = "import runpy, sys; sys.argv += ['-q', '--version']; runpy.run_path('setup.py', run_name='__main__')"
        return python(code, CUDA_HOME=str(tmp_path), WEFT_CUDA=choice)

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


def test_a_build_shows_one_line_of_progress(tmp_path, capsys):
    progress = runpy.run_path(str(ROOT / ".ci" / "progress.py"))
    line = "[2/8] c++ -MF /x/a.o.d -c -c /x/csrc/scan/chain.cpp -o /x/a.o -std=c++20\n"
    assert progress["describe"](line, 10.0) == (2, 8, "compiled 2/8, about 30 s left: csrc/scan/chain.cpp")
    assert progress["describe"]("[8/8] c++ -c /x/build/units/rnn.cpp -o y\n", 10.0)[2] == "compiled 8/8: units/rnn.cpp"
    assert progress["describe"]("g++ -shared\n", 1.0) is None

    def build(*lines: str, status: int = 0) -> str:
        command = [
            sys.executable,
            "-c",
            f"import sys; print({'|'.join(lines)!r}.replace('|', chr(10))); sys.exit({status})",
        ]
        assert progress["run"](tmp_path / "build" / "log", command) == status
        assert (tmp_path / "build" / "log").read_text().split("\n")[: len(lines)] == list(lines)
        return capsys.readouterr().out

    shown = build("weft: for the CPU alone", "[1/1] c++ -c csrc/a.cpp -o a.o -std=c++20")
    assert (
        shown.startswith("weft: for the CPU alone\ncompiled 1/1: csrc/a.cpp\nbuilt 1 files in 0 s;")
        and "std" not in shown
    )
    assert "a.cpp:1: error: no" in build("[1/2] c++ -c csrc/b.cpp -o b.o", "a.cpp:1: error: no", status=3)
    assert build("ninja: no work to do.") == ""


def test_version_and_hints():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert version[1] == weft.__version__
    assert f"## [{weft.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert (Path(weft.__file__).parent / "py.typed").exists()
    assert list((Path(weft.__file__).parent / "costs").glob("*.json"))


@pytest.mark.slow
def test_the_readme_and_the_docs_show_what_was_measured_and_nothing_else(tmp_path):
    from benchmarks import plot  # here, because it alone needs matplotlib

    results, stale = plot.read_results(), "run `python -m benchmarks.plot`"
    readme = (ROOT / "README.md").read_text()
    assert readme == plot.with_block(readme, plot.readme_block(results)), stale
    for room in plot.ROOMS:
        page = (ROOT / "docs" / "performance" / f"{room}.rst").read_text()
        block = plot.page_block(room, results, tmp_path / "images")
        assert page == plot.with_block(page, block, plot.PAGE_BEGIN, plot.PAGE_END), stale
        for image in re.findall(r"^\.\. image:: (.*)$", page, re.MULTILINE):
            assert (ROOT / "docs" / "performance" / image).resolve().exists(), stale


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
def test_cuda_tests_without_a_device_are_counted_and_may_be_required(required):
    arguments = ["-q", "-p", "no:cacheprovider", "tests/scan/test_diagonal_cuda.py", *["--require-cuda"] * required]
    done = python(f"import pytest; exit(pytest.main({arguments}))", CUDA_VISIBLE_DEVICES="", WEFT_REQUIRE_CUDA="")
    line = next(line for line in done.stdout.splitlines() if "need a CUDA device" in line)
    assert int(line.split()[0]) > 100 and line.endswith("does not allow") == required
    assert done.returncode == (pytest.ExitCode.TESTS_FAILED if required else pytest.ExitCode.NO_TESTS_COLLECTED)


def test_prose_quotes_no_measurement():
    """A ratio or a time that was measured is a row, and stands where the rows are drawn."""
    from benchmarks import plot

    readme = (ROOT / "README.md").read_text()
    texts = {"README.md": plot.with_block(readme, "")}
    for path in (ROOT / "docs").rglob("*.rst"):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        texts[name] = plot.with_block(text, "", plot.PAGE_BEGIN, plot.PAGE_END) if plot.PAGE_BEGIN in text else text
    assert {"docs/guide/rnn.rst", "docs/performance/rnn.rst", "docs/performance.rst"} <= texts.keys()
    for name, text in texts.items():
        assert not re.findall(r"\d[\d.,]*(?:x\b| ?us\b| times (?:faster|slower|as))", text), name


def test_formulas_outlast_who_only_looks_for_the_counter():
    done = python(
        "import importlib.util, weft, torch; importlib.util.find_spec('torch.utils.flop_counter')\n"
        "from torch.utils.flop_counter import flop_registry; assert torch.ops.weft.rnn in flop_registry"
    )
    assert done.returncode == 0, done.stderr
