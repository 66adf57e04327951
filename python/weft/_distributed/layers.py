"""shard_time: layers that take slices of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.over_ranks import TakesSlices
from .._rnn import takes_halves
from .group import Ranks, check_alike, check_order, check_own, ranks_of
from .halves import halved
from .pointwise import PointwiseWalk, walk_pointwise
from .recurrent import Direction, walk_slices
from .scan import scan_layer

__all__ = ["shard_time"]


def shard_time(module: torch.nn.Module, group: Any = None) -> torch.nn.Module:
    """Makes the recurrent layers inside a module take slices of time, in place.

    Every :class:`weft.nn.MinGRU`, :class:`~weft.nn.MinLSTM`, :class:`~weft.nn.RGLRU`, :class:`~weft.nn.RNN`,
    :class:`~weft.nn.GRU`, :class:`~weft.nn.LSTM`, :class:`~weft.nn.ParaGRU` and :class:`~weft.nn.ParaLSTM` inside then
    takes and returns this rank's slice, in the order of ranks. Slices may differ in length and be empty. `h_0` is the
    start of the whole, read on the first rank; `h_n` is the end of the whole, on every rank. Dropout between layers
    draws for each slice.

    Gradients are those of the sum of all ranks' losses, of parameters each rank's share: their sum over the group is
    the gradient. MinGRU, MinLSTM and RGLRU exchange once each way. The others walk in rounds: nets that forget within a
    slice take two, others one for each rank, in which case ranks save memory, not time.

    Args:
        module: any module; other layers inside, which do not look across time, stay as they are.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks. False undoes.

    Returns:
        `module`. Its copies and pickles know no group; its state_dict is as before.

    Raises:
        TypeError: module is no module, or group is none. A layer raises it for a DTensor.
        ValueError: a mesh has several dimensions; inside is a torch.nn.RNN, GRU or LSTM, which
            :func:`weft.accelerate` would replace, a layer with projections or of several heads, an LRU, S5 or SLSTM. A
            layer raises it for a PackedSequence, and inside of torch's context_parallel where that balances loads.
        RuntimeError: torch.distributed is not initialised, or this process is not in the group.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"shard_time: module must be a torch.nn.Module, got {type(module).__name__}")
    if group is False:
        for _, layer in _layers(module):
            vars(layer).pop("_over_ranks", None)
        return module
    over = OverRanks(ranks_of("shard_time", group))
    for name, inside in module.named_modules():
        where = f" {name!r}" if name else ""
        if isinstance(inside, TakesSlices) and (why := _obstacle(inside)):
            raise ValueError(f"shard_time: the layer{where} is a {type(inside).__name__}{why}")
        if issubclass(type(inside), torch.nn.RNNBase) and not isinstance(inside, TakesSlices):
            kind = type(inside).__name__
            raise ValueError(
                f"shard_time: the layer{where} is torch.nn.{kind}, which takes no slices; weft.accelerate(module) "
                f"makes it a weft.nn.{kind}"
            )
    for _, layer in _layers(module):
        layer._over_ranks = over
    return module


def _obstacle(layer: TakesSlices) -> str | None:
    """Why a layer takes no slices."""
    if not layer.takes_slices:
        return ", whose states ranks do not exchange"
    if getattr(layer, "proj_size", 0):
        return " with projections, which takes no slices"
    if getattr(layer, "num_heads", 1) > 1:
        return " of several heads, which takes no slices"
    return None


def _layers(module: torch.nn.Module) -> Iterator[tuple[str, TakesSlices]]:
    return ((name, inside) for name, inside in module.named_modules() if isinstance(inside, TakesSlices))


@dataclass(frozen=True)
class OverRanks:
    """How a layer runs whose input is this rank's slice."""

    ranks: Ranks

    def check_own(self, name: str, **arguments: Any) -> None:
        """Refuse a DTensor among a call's arguments by name."""
        for argument, value in arguments.items():
            if isinstance(value, Tensor):
                check_own(name, argument, value)

    def reads(self, state: Any) -> bool:
        """Whether a state that was given is looked at here; its gradient elsewhere is zero."""
        return self.ranks.rank == 0 or (isinstance(state, Tensor) and state.requires_grad)

    def scan(
        self, name: str, directions: Sequence[tuple[Tensor, Tensor, Tensor | None, bool]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Of a layer's directions, each of A, b, the start of the whole and whether it is the reverse one: all states
        of the slice, and the last of the whole."""
        given = []
        for A, b, h_0, reverse in directions:
            dtype = torch.promote_types(A.dtype, b.dtype)
            given.append((A.to(dtype), b.to(dtype), h_0, reverse))
        with torch.autocast(given[0][1].device.type, enabled=False):
            found = scan_layer(name, given, self.ranks)
        return [(states, end.to(states.dtype)) for states, _, end in found]

    def check(self, name: str, B: int, H: int, input: Tensor) -> None:
        """Before an RNN, GRU or LSTM exchanges anything; input is of the dtype that it runs in."""
        check_order(name)
        check_alike(self.ranks, name, {"B": B, "H": H, "dtype": input.dtype})
        self.ranks.check_device(name, input)

    def halves(self, cell: str, input: Tensor, hidden: int) -> bool:
        """Whether the backward pass of an RNN, GRU or LSTM is one scan, cut where ranks exchange."""
        return input.device.type in halved and takes_halves(cell, input.dtype, hidden)

    def walk(
        self, cell: str, first: str, backward: str, halves: bool, saves: bool, keeps_cells: bool, input: Tensor,
        states: Sequence[Tensor], weights: Sequence[Sequence[Tensor]],
    ) -> list[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
        """What :func:`walk_slices` returns."""
        halves = halves and not keeps_cells
        directions = [
            Direction(self.ranks, cell, first, backward, halves, reverse, saves, keeps_cells)
            for reverse in (False, True)[: len(states)]
        ]
        return walk_slices(directions, input, states, weights)

    def walk_pointwise(
        self, program: str, algorithm: str, name: str, gates: Tensor, states: list[Tensor], parameters: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What :func:`walk_pointwise` returns, for layers of one direction."""
        with torch.autocast(gates.device.type, enabled=False):
            self.check(name, states[0].size(0), states[0].size(1), gates)
            walk = PointwiseWalk(self.ranks, program, algorithm, name)
            return walk_pointwise(walk, gates, torch.stack(states), parameters)

    def said(self, in_rounds: bool) -> str:
        """For explain."""
        if not in_rounds:
            return f"a slice of {self.ranks.size} ranks, with one exchange each way"
        return (
            f"a slice of {self.ranks.size} ranks, in rounds: two where the net forgets within a slice, else one for "
            "each rank, which saves memory and no time"
        )
