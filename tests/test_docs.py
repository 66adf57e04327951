"""Every block of Python in the README and the docs runs, those of a page one after another, as a reader types them; and
every example of a docstring, after ``import torch, weft``."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import textwrap
import types
from pathlib import Path

import matplotlib
import pytest
import torch
import weft

from tests.common import every_measured

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.rst"))]
MARKDOWN = re.compile(r"^```(?:python|pycon)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
# What is indented deeper than its directive. `.. setup: python`, a comment for Sphinx, holds what no reader need see.
RST = re.compile(
    r"^(?P<indent> *)\.\. (?:code-block:: *(?:python|pycon)|setup: python)\n(?P<code>(?:(?P=indent) +.*\n|\s*\n)+)",
    re.MULTILINE,
)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of every block of a page."""
    text = page.read_text()
    pattern = MARKDOWN if page.suffix == ".md" else RST
    return [(text.count("\n", 0, m.start("code")), textwrap.dedent(m["code"])) for m in pattern.finditer(text)]


WITH_BLOCKS = [page for page in PAGES if blocks(page)]


def test_blocks_are_found():
    assert {"README.md", "index.rst", "vertex.rst"} <= {page.name for page in WITH_BLOCKS}
    nested = "- x\n\n  .. code-block:: python\n\n     if True:\n\n         y = 1\n\n  z\n"
    assert [textwrap.dedent(m["code"]).strip() for m in RST.finditer(nested)] == ["if True:\n\n    y = 1"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_is_of_a_language(page):
    """A block that names none would not run here, nor have colours."""
    text = page.read_text()
    if page.suffix == ".md":
        assert not re.search(r"\A```\n|\n\n```\n", text)
    else:
        bare = [line for line in text.splitlines() if line.endswith("::") and not line.lstrip().startswith("..")]
        assert not bare


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))  # where weft.tune writes
    for measured in every_measured():
        monkeypatch.setattr(measured, "entries", {})
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    names = types.ModuleType(page.stem).__dict__
    for line, code in blocks(page):
        # Its lines are those of the page, in tracebacks too.
        exec(compile("\n" * line + code, str(page.relative_to(ROOT)), "exec"), names)


def examples() -> list[doctest.DocTest]:
    """Of the public names, where they are written."""
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(weft.__path__, "weft.")]
    found = (test for m in modules for test in doctest.DocTestFinder().find(m, globs={"torch": torch, "weft": weft}))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_examples_of_docstrings(example, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example, out=said.append).failed == 0, "".join(said)
