"""The group of a call: who this process is in it, and the collectives that everything here is made of."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .._base.torch_private import balances_attention, functional_collectives, group_named

__all__ = [
    "Ranks",
    "check_alike",
    "check_order",
    "check_own",
    "check_tensor",
    "checks_ranks",
    "known",
    "ranks_named",
    "ranks_of",
]

_collectives = functional_collectives()
_all_gather = _collectives.all_gather_into_tensor.default
_all_to_all = _collectives.all_to_all_single.default
_wait = _collectives.wait_tensor.default


class Ranks:
    """This process among `size` others. What ranks tell each other goes through :meth:`gather`, and where
    that is cheaper, :meth:`shift`."""

    name: str
    """By which an op finds it again."""
    rank: int
    size: int

    @property
    def device(self) -> torch.device:
        """One from which the group sends."""
        return torch.device("cpu")

    def gather(self, x: Tensor) -> Tensor:
        """``(size, *x.shape)``: x of every rank, in order of rank. All have the same shape."""
        return self.begin_gather(x)()

    def begin_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """The same in two: sends x, and gives what waits for the others' and returns what :meth:`gather` does. Until
        then x stays as it is. Several are waited for in any order."""
        raise NotImplementedError

    def scatter(self, x: Tensor, sizes: list[int]) -> Tensor:
        """``(size, own rows, ...)``: of x of every rank, sizes[r] rows for each rank r, those for this one."""
        raise NotImplementedError

    def shift(self, x: Tensor, by: int) -> Tensor | None:
        """x of the rank `by` places before this one, None where there is none. All have the same shape."""
        raise NotImplementedError

    def gather_objects(self, x: Any) -> list[Any]:
        """Small Python values of every rank; the host waits."""
        raise NotImplementedError

    def check_device(self, op: str, x: Tensor) -> None:
        """RuntimeError where the group has no way to send x."""


@dataclass(frozen=True)
class GroupRanks(Ranks):
    """The ranks of a ProcessGroup."""

    name: str
    rank: int
    size: int

    @functools.cached_property
    def _devices(self) -> list[str]:
        config = str(dist.get_backend_config(group_named(self.name)))  # "cpu:gloo,cuda:nccl"
        return [part.partition(":")[0] for part in config.split(",")]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if "cpu" in self._devices else self._devices[0])

    def begin_gather(self, x: Tensor) -> Callable[[], Tensor]:
        if self.size == 1:
            return lambda: x.unsqueeze(0)
        # The functional collective: a graph of torch.compile holds it, and so does a CUDA graph.
        sent = x.contiguous().view(-1)
        gathered = _all_gather(sent, self.size, self.name)

        def wait(sent: Tensor = sent) -> Tensor:  # which keeps it, as backends read it until then
            return _wait(gathered).view(self.size, *x.shape)

        return wait

    def scatter(self, x: Tensor, sizes: list[int]) -> Tensor:
        if self.size == 1:
            return x.unsqueeze(0)
        own = sizes[self.rank]
        rows = _all_to_all(x.contiguous(), [own] * self.size, sizes, self.name)
        return _wait(rows).view(self.size, own, *x.shape[1:])

    def shift(self, x: Tensor, by: int) -> Tensor | None:
        # Also from and to ranks that are not there, so that all take part.
        sent, received = (
            [x.numel() if r == other else 0 for r in range(self.size)] for other in (self.rank + by, self.rank - by)
        )
        rows = x.contiguous().view(-1)[: sum(sent)]
        came = _wait(_all_to_all(rows, received, sent, self.name))
        return came.view(x.shape) if 0 <= self.rank - by < self.size else None

    def gather_objects(self, x: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x, group_named(self.name))
        return found

    def check_device(self, op: str, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        if x.device.type not in self._devices:
            raise RuntimeError(
                f"{op}: the group's backend takes tensors on {' or '.join(self._devices)}, got one on {x.device}"
            )


_of_groups: weakref.WeakKeyDictionary[ProcessGroup, GroupRanks] = weakref.WeakKeyDictionary()
"""Those of groups that calls have named: who a process is in a group never changes, and takes long to find out."""


def ranks_of(op: str, group: Any) -> Ranks:
    """Who this process is in `group`: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.

    Raises:
        TypeError: it is something else.
        ValueError: a mesh has several dimensions.
        RuntimeError: torch.distributed is not initialised, or this process is not in the group.
    """
    if isinstance(group, Ranks):
        return group
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not (group is None or outside or isinstance(group, (ProcessGroup, DeviceMesh))):
        raise TypeError(
            f"{op}: group must be a ProcessGroup, a DeviceMesh of one dimension or None, got {type(group).__name__}"
        )
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ValueError(
            f"{op}: group must be a DeviceMesh of one dimension, got one of {group.ndim}; mesh[name] is one of them"
        )
    if not dist.is_initialized():
        raise RuntimeError(f"{op}: torch.distributed is not initialised: call init_process_group first")
    if isinstance(group, DeviceMesh):
        outside = group.get_coordinate() is None
        group = None if outside else group.get_group()
    elif group is None:
        group = dist.group.WORLD
    if not outside and (found := _of_groups.get(group)) is not None:
        return found
    rank = -1 if outside else dist.get_rank(group)
    if rank < 0:
        raise RuntimeError(f"{op}: this process, rank {dist.get_rank()} of all, is not in the group")
    ranks = _of_groups[group] = GroupRanks(group.group_name, rank, dist.get_world_size(group))
    return ranks


known: dict[str, Ranks] = {}
"""By name, those of no ProcessGroup."""


def ranks_named(name: str) -> Ranks:
    """Who this process is in the group of this name: what an op takes, because a graph of torch.compile holds no
    groups."""
    if name in known:
        return known[name]
    group = group_named(name)
    return GroupRanks(name, dist.get_rank(group), dist.get_world_size(group))


def check_tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")
    check_own(op, name, value)


def check_own(op: str, name: str, value: Tensor) -> None:
    """TypeError where a tensor is distributed already: what ranks take is each rank's own."""
    if type(value) not in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling():
        from torch.distributed.tensor import DTensor

        if isinstance(value, DTensor):
            raise TypeError(f"{op}: {name} must be this rank's own Tensor, got a DTensor: its to_local() is one")


def check_order(op: str) -> None:
    """ValueError where slices are known to be none."""
    if not torch.compiler.is_compiling() and balances_attention():
        raise ValueError(
            f"{op}: slices must be contiguous and in order of rank, but torch's context_parallel, inside of which this "
            "is, balances loads: a rank has a piece of the sequence's head and one of its tail. Switch that off, or "
            "leave it first"
        )


def checks_ranks() -> bool:
    """Whether calls compare what ranks bring."""
    return os.environ.get("WEFT_CHECK_RANKS") == "1" and not torch.compiler.is_compiling()


def check_alike(ranks: Ranks, op: str, values: Mapping[str, Any]) -> None:
    """With WEFT_CHECK_RANKS=1: ValueError on every rank where one brings something else than rank 0."""
    if not checks_ranks():
        return
    first, *others = ranks.gather_objects({"op": op, **values})
    for rank, other in enumerate(others, 1):
        for name in dict.fromkeys((*first, *other)):
            # A rank of no tensors has nothing to say of them.
            if name in first and name in other and first[name] != other[name]:
                raise ValueError(
                    f"{op}: rank {rank} differs from rank 0: {name} is {other[name]} there and {first[name]} on rank 0"
                )
