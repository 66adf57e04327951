"""Where Weft keeps files between runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .._version import __version__

__all__ = ["cache_dir", "replace_file", "versioned_cache_dir"]


def cache_dir() -> Path:
    """Folder of what Weft keeps between runs: ``$WEFT_CACHE_DIR``, or ``~/.cache/weft``. It may not exist yet.

    Raises:
        RuntimeError: neither is known, because this user has no home.
    """
    return Path(os.environ.get("WEFT_CACHE_DIR") or Path.home() / ".cache" / "weft")


def versioned_cache_dir() -> Path:
    """The folder in it of this version's files: compiled kernels (csrc/jit) and what weft.tune measured."""
    return cache_dir() / __version__


def replace_file(file: Path, text: str) -> None:
    """Write a file such that others see the old one or the new one and nothing between."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".tmp", text=True)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as written:
            written.write(text)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
