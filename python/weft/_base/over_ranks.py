"""What a layer needs that may take slices of time: weft.distributed, floors above it, brings the rest."""

from __future__ import annotations

from typing import Any

__all__ = ["TakesSlices"]


class TakesSlices:
    """A module with ``_over_ranks``: what runs the layer where its input is a slice, or None.

    It belongs to the groups of this process, so that copies and pickles go without."""

    _over_ranks: Any = None
    takes_slices: bool = True
    """Whether its states can go from slice to slice."""

    def __getstate__(self) -> dict[str, Any]:
        inherited = getattr(super(), "__getstate__", None)  # object has one from Python 3.11 on
        state = self.__dict__ if inherited is None else inherited()
        return {name: value for name, value in state.items() if name != "_over_ranks"}
