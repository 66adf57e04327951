"""Sphinx configuration. `python -m benchmarks.plot` has written the tables and figures of measurements."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import weft  # noqa: E402

project = "Weft"
author = "the Weft authors"
copyright = f"2026, {author}"
version = release = weft.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Weft {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
