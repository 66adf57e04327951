"""A whole training step as a kernel can take it: what an optimizer of torch does next, as numbers and tensors.

``optimizer.state`` has torch's own form before and after, so that a step of the kernel and one of ``optimizer.step()``
may follow each other, and state dicts of either load into the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..._base.torch_private import foreach_add_, foreach_sub_, has_step_hooks
from ..._C import vertex as _C
from ..graphs import Graphs
from .batched import Batched

__all__ = ["Begun", "Launched", "Operands", "Request", "Update", "Updates"]


class Update(NamedTuple):
    """What happens to one parameter, all its tensors float32 and contiguous on the parameter's device.

    ``sgd``: numbers lr, momentum, dampening, weight_decay, nesterov. With g the gradient: g += weight_decay p;
    b = momentum b + (1 - dampening) g; g = g + momentum b if nesterov, else b; p -= lr g. Here b is `first`; without
    momentum that is None, and b = g.

    ``adam``: numbers lr / (1 - beta1^t), 1 - beta1, beta2, 1 - beta2, eps, sqrt(1 - beta2^t), kept, decay; differences
    from 1 are taken here, because in float32 they would lose digits. p *= kept; g += decay p; m += (1 - beta1)(g - m);
    v = beta2 v + (1 - beta2) g^2; p -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps), where m is `first`
    and v `second`. Decoupled, kept is 1 - lr weight_decay and decay 0, else they are 1 and weight_decay.
    """

    parameter: Tensor
    kind: str
    first: Tensor | None
    second: Tensor | None
    numbers: tuple[float, ...]


class Operands(NamedTuple):
    """What a kernel of a step takes of a cell, the same as long as its tensors are."""

    compiled: Batched
    """What it runs."""
    inputs: list[str | None]
    """Names of what is pulled; None of what torch makes of it first."""
    matrices: list[Tensor]
    vectors: list[Tensor]
    numbers: dict[int, int]
    """Those of matrices, vectors, and the head's weight and bias among the kernel's updates, by identity."""
    reached: frozenset[int]
    """Identities of those that it finds gradients of."""


class Request(NamedTuple):
    """All of a step that is not the cell's call."""

    operands: Operands
    weight: Tensor | None
    """(C, P) of the head, None without one."""
    bias: Tensor | None
    """(C,)"""
    loss: str
    """``cross_entropy`` or ``mse``, means as torch's."""
    roots: Graphs | None
    """In the order of whose roots `targets` are; None where they are of all vertices."""
    targets: Tensor
    """int64 (rows,), or float32 as y."""
    ignore_index: int
    updates: list[Update]
    refused: Tensor
    """float32 (1,) on the device. A kernel reads it before it writes anything. Where it is not 0, or a class is neither
    in [0, C) nor `ignore_index`, nothing changes and it is 1 afterwards: the steps that were launched before the host
    knows do nothing either."""
    turns: object
    """Pinned memory of the Trainer's latest steps on the device."""


class Launched(NamedTuple):
    """What a launch leaves."""

    numbers: Tensor
    """float32 (2,) in pinned memory: the loss, and `refused` after the step."""
    event: object
    """When they are there, with ``query`` and ``synchronize`` as a ``torch.cuda.Event`` has them. Once it is there they
    are to be read before the third step after this one."""


class Begun(NamedTuple):
    """What was done on the host for a step that the device may yet refuse."""

    before: list[tuple[Tensor, dict | None]]
    """Parameters that got a state, and which they had."""
    counters: list[Tensor]
    """Counters of steps on the host, each one up."""


def _options_obstacle(optimizer: Optimizer) -> str | None:
    """Why :class:`Updates` does not know what the optimizer does, its tensors aside."""
    name = type(optimizer).__name__
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"the optimizer is {name}, not SGD, Adam or AdamW"
    step = optimizer.__dict__.get("step")  # schedulers of the learning rate count its calls
    if has_step_hooks(optimizer) or (step is not None and not hasattr(step, "_wrapped_by_lr_sched")):
        return f"{name}.step has hooks"
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                return f"{name} has {option}=True"
        for v in (*group.values(), *group.get("betas", ())):
            if isinstance(v, Tensor) and (v.device.type != "cpu" or v.requires_grad):
                return f"a hyperparameter of {name} is a tensor on a device"
    return None


def _state_obstacle(optimizer: Optimizer) -> str | None:
    """That part of it which is about the tensors."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p)
            moments = state.items() if state else ()
            for x in (p, *(x for key, x in moments if key != "step" and x is not None)):
                if x.dtype is not torch.float32 or x.device != p.device or not x.is_contiguous():
                    return f"a parameter or its state in {type(optimizer).__name__} is not float32 and contiguous"
            step = state.get("step") if state else None
            if isinstance(step, Tensor) and (step.numel() != 1 or step.dtype not in (torch.float32, torch.float64)):
                return f"a counter of steps in {type(optimizer).__name__} is not one number of float32"
    return None


class _Known(NamedTuple):
    """An optimizer that no step would do anything new to: its parameters, their states and what is in these."""

    snapshot: _C.Snapshot
    held: tuple
    """What the snapshot knows by identity."""
    states: dict
    """The optimizer's: another after load_state_dict."""
    groups: list[tuple[int, bool]]
    """Of each group how many parameters it has, and whether it has momentum."""
    reached: Collection[int]
    members: list[list[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]]
    """Of each group the parameters that are updated, their moments, and their counter of steps if they have one."""
    counters: list[Tensor]
    """Those of them that are on the CPU."""

    def holds(self, optimizer: Optimizer) -> bool:
        same = optimizer.state is self.states and self.snapshot.holds(optimizer)
        return same and self.groups == _groups(optimizer)

    @staticmethod
    def of(optimizer: Optimizer, reached: Collection[int], updates: Iterable[Update]) -> _Known:
        states, groups, updated = optimizer.state, optimizer.param_groups, {id(u.parameter): u for u in updates}
        members = []
        for group in groups:
            found = [(updated[id(p)], states.get(p, {})) for p in group["params"] if id(p) in updated]
            members.append([(u.parameter, u.first, u.second, state.get("step")) for u, state in found])
        counters = [m[3] for group in members for m in group if m[3] is not None and m[3].device.type == "cpu"]
        tables = [t for t in (states, *states.values()) if t]
        tensors = [p for group in groups for p in group["params"]]
        tensors += [x for state in states.values() for x in state.values() if isinstance(x, Tensor)]
        empty = [t for t in (states, *states.values()) if not t]
        held = optimizer, empty, tensors, [(t, [*t], [*t.values()]) for t in tables]
        return _Known(
            _C.Snapshot([optimizer], tables, empty, tensors),
            held,
            states,
            _groups(optimizer),
            reached,
            members,
            counters,
        )


def _groups(optimizer: Optimizer) -> list[tuple[int, bool]]:
    return [(len(group["params"]), group.get("momentum", 0) != 0) for group in optimizer.param_groups]


class Updates:
    """The next steps of an optimizer.

    Args:
        optimizer: what is asked for its :meth:`obstacle` before each step.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._known: _Known | None = None
        self._holds = False
        """Whether it was seen to hold and nothing was done since."""
        # Counters that a device holds are read once, and again where somebody else has written to them.
        self._counts: dict[int, tuple[Tensor, int, float]] = {}

    def begin(self, reached: Collection[int]) -> tuple[list[Update], Begun]:
        """The updates of those parameters that have gradients, by identity, and what :meth:`undo` takes.

        Counters of steps on the host are one up then; those on the device are for :meth:`finish`.
        """
        updates: list[Update] = []
        begun = Begun([], [])
        known, groups = self._known, self._optimizer.param_groups
        holds, self._holds = self._holds, False
        if known is not None and known.reached is reached and (holds or known.holds(self._optimizer)):
            # No state is new: a first step has made them all.
            begun.counters.extend(known.counters)
            counts = iter(_C.count_up(known.counters))
            for group, members in zip(groups, known.members, strict=True):
                numbers: dict[float, tuple[float, ...]] = {}
                for p, first, second, counter in members:
                    if counter is None:
                        given = self._sgd_numbers(group, float(group["dampening"]), numbers)
                        updates.append(Update(p, "sgd", first, None, given))
                    else:
                        count = next(counts) if counter.device.type == "cpu" else self._count(counter) + 1
                        updates.append(Update(p, "adam", first, second, self._adam_numbers(group, count, numbers)))
        else:
            for group in groups:
                make = self._sgd if "momentum" in group else self._adam
                numbers = {}
                for p in group["params"]:
                    if id(p) in reached and p.requires_grad:
                        updates.append(make(p, group, begun, numbers))
            self._known = _Known.of(self._optimizer, reached, updates)
            _C.count_up(begun.counters)
        return updates, begun

    def finish(self, updates: Iterable[Update], refused: Tensor) -> None:
        """After the launch: counters on the device are one up, unless `refused`, (1,) there, is 1. Versions grow."""
        changed, counters = [], []
        for update in updates:
            changed += [x for x in (update.parameter, update.first, update.second) if x is not None]
            if update.kind == "adam":
                counter = self._optimizer.state[update.parameter]["step"]
                if counter.device.type != "cpu":
                    counters.append(counter)
        torch.autograd.graph.increment_version(changed)
        if counters:
            foreach_add_(counters, 1)
            foreach_sub_(counters, [refused.view(())] * len(counters))
            for counter in counters:
                self._counts[id(counter)] = counter, counter._version, self._counts[id(counter)][2] + 1

    def obstacle(self) -> str | None:
        """Why it does not know what the optimizer does."""
        found = _options_obstacle(self._optimizer)
        if found is None:
            self._holds = self._known is not None and self._known.holds(self._optimizer)
            if not self._holds:
                self._known = None
                found = _state_obstacle(self._optimizer)
        return found

    def undo(self, begun: Begun) -> None:
        """The host's part of a step that the device refused."""
        for counter in begun.counters:
            counter.sub_(1)
        self._counts.clear()
        for p, before in begun.before:
            if before is None:
                self._optimizer.state.pop(p, None)
            else:
                self._optimizer.state[p] = before

    def _state(self, p: Tensor, begun: Begun, missing: Mapping[str, Tensor]) -> dict:
        """A parameter's state, with what it lacks."""
        state = self._optimizer.state.get(p)
        begun.before.append((p, None if state is None else dict(state)))
        state = self._optimizer.state[p]
        state.update(missing)
        return state

    def _sgd(self, p: Tensor, group: Mapping, begun: Begun, numbers: dict[float, tuple[float, ...]]) -> Update:
        dampening, buffer = float(group["dampening"]), None
        if group["momentum"] != 0:
            state = self._optimizer.state.get(p)
            buffer = state.get("momentum_buffer") if state else None
            if buffer is None:  # which becomes the gradient, dampened or not
                dampening = 0.0
                buffer = torch.zeros_like(p, requires_grad=False)
                self._state(p, begun, {"momentum_buffer": buffer})
        return Update(p, "sgd", buffer, None, self._sgd_numbers(group, dampening, numbers))

    def _sgd_numbers(self, group: Mapping, dampening: float, numbers: dict[float, tuple[float, ...]]):
        """`numbers`: the group's, by its dampening, which is none at first."""
        if dampening not in numbers:
            given = group["lr"], group["momentum"], dampening, group["weight_decay"], group["nesterov"]
            numbers[dampening] = tuple(map(float, given))
        return numbers[dampening]

    def _adam(self, p: Tensor, group: Mapping, begun: Begun, numbers: dict[float, tuple[float, ...]]) -> Update:
        state = self._optimizer.state.get(p)
        if not state:
            on_device = group["capturable"] or group["fused"]
            double = torch.get_default_dtype() == torch.float64 and not group["fused"]
            dtype, device = torch.float64 if double else torch.float32, p.device if on_device else "cpu"
            fresh = {"step": torch.zeros((), dtype=dtype, device=device)}
            fresh |= {name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            if on_device:
                self._counts[id(fresh["step"])] = fresh["step"], fresh["step"]._version, 0.0
            state = self._state(p, begun, fresh)
        counter = state["step"]
        if counter.device.type == "cpu":
            begun.counters.append(counter)
        given = self._adam_numbers(group, self._count(counter) + 1, numbers)
        return Update(p, "adam", state["exp_avg"], state["exp_avg_sq"], given)

    def _adam_numbers(self, group: Mapping, count: float, numbers: dict[float, tuple[float, ...]]):
        """`numbers`: the group's, by its parameters' counts of steps."""
        if count not in numbers:
            lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), map(float, group["betas"])
            numbers[count] = (
                *(lr / (1 - beta1**count), 1 - beta1, beta2, 1 - beta2, float(group["eps"]), (1 - beta2**count) ** 0.5),
                *((1 - lr * decay, 0.0) if group["decoupled_weight_decay"] else (1.0, decay)),
            )
        return numbers[count]

    def _count(self, counter: Tensor) -> float:
        if counter.device.type == "cpu":
            return counter.item()
        found = self._counts.get(id(counter))
        if found is None or found[0] is not counter or found[1] != counter._version:
            found = self._counts[id(counter)] = counter, counter._version, counter.item()
        return found[2]
