"""Where Weft keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path

from .._version import __version__

__all__ = ["cache_dir", "versioned_cache_dir"]


def cache_dir() -> Path:
    """Folder of what Weft keeps between runs: ``$WEFT_CACHE_DIR``, or ``~/.cache/weft``. It may not exist yet.

    Raises:
        RuntimeError: neither is known, because this user has no home.
    """
    return Path(os.environ.get("WEFT_CACHE_DIR") or Path.home() / ".cache" / "weft")


def versioned_cache_dir() -> Path:
    """The folder in it of this version's files: compiled kernels (csrc/jit) and what weft.tune measured."""
    return cache_dir() / __version__
