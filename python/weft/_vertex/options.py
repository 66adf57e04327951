"""``weft.vertex.options``: which of the batched executor's transformations are on."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import NamedTuple

__all__ = ["Options", "current", "options"]


class Options(NamedTuple):
    """The transformations of the batched executor, all on by default."""

    lazy: bool = True
    fuse: bool = True
    stream: bool = True


class _Local(threading.local):
    def __init__(self) -> None:
        self.options, self.outer = Options(), []


_local = _Local()


def current() -> Options:
    """The options of this thread."""
    return _local.options


def options(
    *, lazy: bool | None = None, fuse: bool | None = None, stream: bool | None = None
) -> AbstractContextManager[None]:
    """A context in which transformations of the batched executor are on or off, for this thread.

    Args:
        lazy: what does not depend on a gather runs once for all vertices before the first frontier, and what no scatter
            depends on, parameter gradients among it, once after the last (Cavs, section 3.5).
        fuse: element-wise operations between two matrix products run as one kernel (Cavs, section 3.5), on CUDA all
            steps of the last, small frontiers, too.
        stream: work that does not depend on the current frontier, gradients of matrices, overlaps with it, on CUDA on a
            second stream (Cavs, section 3.5).

    None leaves an option as it is. Contexts nest. A backward pass follows the options of its forward pass.

    Raises:
        TypeError: an option is not True, False or None.
    """
    chosen = {"lazy": lazy, "fuse": fuse, "stream": stream}
    for name, value in chosen.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"options: {name} must be True, False or None, got {value!r}")
    return _Context({name: value for name, value in chosen.items() if value is not None})


class _Context(AbstractContextManager):
    """Relative to what holds where it is entered."""

    def __init__(self, chosen: dict[str, bool]):
        self._chosen = chosen

    def __enter__(self) -> None:
        _local.outer.append(_local.options)
        _local.options = _local.options._replace(**self._chosen)

    def __exit__(self, *error: object) -> None:
        _local.options = _local.outer.pop()
