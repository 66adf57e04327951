"""Recent calls, for the next one like one of them: what it depends on is compared, not looked at again.

A training step of few vertices is bound by what the host does in it, and most calls of a module differ in their graphs
and in the values of tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..._base.torch_private import GLOBAL_HOOKS, in_forward_mode, in_transform
from ..._C import vertex as _C
from ..graphs import Graphs
from ..options import current
from ..vertex import Spec
from .batched import Batched
from .schedule import Schedule

__all__ = ["HOOKS", "CallCache", "Ready", "RecentCall", "Snapshot", "modes"]

MOST = 4
"""Calls that are kept."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

modes: Callable[[torch.device], int] = _C.modes
"""What a trace depends on besides the module and its inputs."""


class Ready(NamedTuple):
    """A call that passed all checks, looked at now or like a recent one."""

    device: torch.device
    outputs: Sequence[Spec]
    """What is pushed, without the dimension of the vertices."""
    rows: Mapping[str, Tensor]
    """The inputs by name."""
    tensors: Mapping[str, Tensor]
    """Of the module, by name."""
    compiled: Batched | None
    """None where it runs as the reference."""
    graphs: Graphs
    schedule: Callable[..., Schedule]
    """Of the graphs, for the compiled functions and so many groups."""
    run: Callable[[], Sequence[Tensor]]

    @property
    def trains(self) -> bool:
        """Whether anything asks for a gradient here."""
        tensors = (*self.rows.values(), *self.tensors.values())
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class Snapshot:
    """A module and its submodules as they are, by identity; tensors by what a trace depends on."""

    def __init__(self, modules: list[nn.Module], tables: list[dict], empty: list[dict], tensors: list[Tensor]):
        # The values are held, or another object might get the place of one that is gone. Not so the module and what is
        # compiled for it, which hold this: they would live until cycles are collected.
        module, *inner = modules
        self._held = inner, empty, [_contents(table) for table in tables if table is not module.__dict__]
        self._own = _contents({k: v for k, v in module.__dict__.items() if k != "_compiled"})
        self.tensors = frozenset(map(id, tensors))
        self.holds: Callable[[nn.Module], bool] = _C.Snapshot(modules, tables, empty, tensors).holds
        """Whether it is of this very module, not one that a copy of it was made from, and all is as it was."""

    @staticmethod
    def of(module: nn.Module) -> Snapshot | None:
        """None where identity does not tell whether something changes: hooks, and tuples of other things than numbers
        and strings; and where a tensor has a history, which would live on with it."""
        if any(GLOBAL_HOOKS):
            return None
        modules, tables, empty = [*module.modules()], [], [*GLOBAL_HOOKS]
        for m in modules:
            attributes = m.__dict__
            hooks = [attributes[name] for name in HOOKS]
            if any(hooks) or not all(_is_plain(v) for v in attributes.values() if isinstance(v, tuple)):
                return None
            for table in (attributes, attributes["_parameters"], attributes["_buffers"], attributes["_modules"]):
                (tables if table else empty).append(table)
            empty += hooks
        tensors = [t for table in tables for t in table.values() if isinstance(t, Tensor)]
        if any(t.grad_fn is not None for t in tensors):
            return None
        return Snapshot(modules, tables, empty, tensors)


def _contents(table: dict) -> tuple[dict, list, list]:
    return table, [*table], [*table.values()]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str))


class RecentCall:
    """A call that passed all checks and ran batched.

    Args:
        snapshot: what was called, as it was before it was looked at.
        inputs: what was pulled.
        executors: what may be asked for to run it so.
        device: of all tensors.
        fits: whether it is what runs on graphs where this executor is asked for.
        run: runs it on graphs and inputs.
        ready: what runs it.
        script: what drives its persistent kernels on graphs, None where it runs otherwise.
        program: what the module's program is.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        inputs: Mapping[str, Tensor],
        executors: tuple[str, ...],
        device: torch.device,
        fits: Callable[[Graphs, str], bool],
        run: Callable[[Graphs, Mapping[str, Tensor]], Sequence[Tensor]],
        ready: Callable[[Graphs, Mapping[str, Tensor]], Ready],
        script: Callable[[Graphs], object] | None,
        program: object,
    ):
        self._snapshot, self._inputs = snapshot, _C.Inputs(dict(inputs))
        self._executors, self._device, self._fits = executors, device, fits
        self._modes, self._options = modes(device), current()
        self.run, self.ready, self.script, self.program = run, ready, script, program

    def rows(self, module: nn.Module, graphs: object, inputs: object, executor: object) -> dict[str, Tensor] | None:
        """The inputs of a call that differs in nothing that counts, None of any other."""
        if (
            executor not in self._executors
            or type(graphs) is not Graphs
            or in_transform()
            or in_forward_mode()
            or modes(self._device) != self._modes
            or (current() is not self._options and current()[:2] != self._options[:2])
        ):
            return None
        rows = dict(inputs) if type(inputs) is dict else {} if inputs is None else {"input": inputs}
        count, where = graphs._core.num_vertices, graphs._device
        if count == 0 or (where is not self._device and where.type != "cpu" and where != self._device):
            return None
        # Under "auto" it is often the graphs alone that another recent call runs.
        same = self._fits(graphs, executor) and self._inputs.hold(rows, count) and self._snapshot.holds(module)
        return rows if same else None

    def shares_tensors(self, other: RecentCall) -> bool:
        """Whether it is of the same parameters and buffers: what a module no longer has is not kept."""
        return self._snapshot.tensors == other._snapshot.tensors


class CallCache:
    """The latest calls of a module that differ in more than graphs and values, the last one first.

    As of a net in training that is evaluated in between, or under two executors in turns.
    """

    def __init__(self) -> None:
        self._calls: tuple[RecentCall, ...] = ()

    def find(
        self, module: nn.Module, graphs: object, inputs: object, executor: object
    ) -> tuple[RecentCall, dict[str, Tensor]] | None:
        """The call that this one repeats, and its inputs."""
        calls = self._calls
        for call in calls:
            rows = call.rows(module, graphs, inputs, executor)
            if rows is not None:
                if call is not calls[0]:
                    self._calls = (call, *(other for other in calls if other is not call))
                return call, rows
        return None

    def add(self, call: RecentCall | None) -> None:
        if call is not None:
            self._calls = (call, *(other for other in self._calls if other.shares_tensors(call)))[:MOST]
