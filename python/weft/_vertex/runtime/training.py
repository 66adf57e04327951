"""A whole training step as a kernel can take it: what an optimizer of torch does next, as numbers and tensors.

``optimizer.state`` has torch's own form before and after, so that a step of the kernel and one of ``optimizer.step()``
may follow each other, and state dicts of either load into the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..._base.torch_private import foreach_add_, foreach_sub_, has_step_hooks, step_hooks
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
    numbers: int
    """Which of the step's."""


@dataclass
class Operands:
    """What a kernel of a step takes of a cell and its head, the same as long as their tensors are."""

    compiled: Batched
    """What it runs."""
    inputs: list[str | None]
    """Names of what is pulled; None of what torch makes of it first."""
    matrices: list[Tensor]
    vectors: list[Tensor]
    numbers: dict[int, int]
    """Those of matrices, vectors, and the head's weight and bias among the kernel's updates, by identity."""
    weight: Tensor | None
    """(C, P) of the head, None without one."""
    bias: Tensor | None
    """(C,)"""
    loss: str
    """``cross_entropy`` or ``mse``, means as torch's."""
    form: tuple
    """What a kernel is made for: how many matrices and vectors, whether by cross-entropy and with a head, classes."""
    reached: frozenset[int]
    """Identities of those that it finds gradients of."""
    steps: tuple[list[Update], object] | None = None
    """What launches steps that make these updates."""


class Request(NamedTuple):
    """All of a step that is not the cell's call."""

    operands: Operands
    roots: Graphs | None
    """In the order of whose roots `targets` are; None where they are of all vertices."""
    targets: Tensor
    """int64 (rows,), or float32 as y."""
    ignore_index: int
    updates: list[Update]
    """The same list as long as it holds the same."""
    numbers: list[tuple[float, ...]]
    """Of this step, as the updates count them."""
    refused: Tensor
    """float32 (1,) on the device. A kernel reads it before it writes anything. Where it is not 0, or a class is neither
    in [0, C) nor `ignore_index`, nothing changes and it is 1 afterwards: the steps that were launched before the host
    knows do nothing either."""
    turns: object
    """Memory of the Trainer's latest steps on the device."""


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
    groups: list[dict]
    momenta: list[bool]
    """Whether the groups have momentum."""
    reached: Collection[int]
    updates: list[Update]
    sources: list[tuple[Mapping, int | None]]
    """Of each of a step's numbers the group and, of Adam, which counter of steps is theirs."""
    counters: list[Tensor]
    """Those on the CPU, then those on a device."""
    on_device: list[Tensor]
    leaders: list[int]
    """Of each counter which one's numbers are its."""
    changed: list[Tensor]
    """What a step writes to."""

    def holds(self, optimizer: Optimizer) -> bool:
        """But for hyperparameters."""
        same = optimizer.state is self.states and optimizer.param_groups is self.groups
        return same and self.snapshot.holds(optimizer)

    @staticmethod
    def of(
        optimizer: Optimizer,
        reached: Collection[int],
        updates: list[Update],
        sources: list[tuple[Mapping, Tensor | None]],
    ) -> _Known:
        states = optimizer.state
        counted = [(states[u.parameter]["step"], u.numbers) for u in updates if u.kind == "adam"]
        counted.sort(key=lambda entry: entry[0].device.type != "cpu")
        steps = [counter for counter, _ in counted]
        number = {id(counter): i for i, counter in enumerate(steps)}
        tables = [t for t in (states, *states.values()) if t]
        tensors = _parameters(optimizer)
        tensors += [x for state in states.values() for x in state.values() if isinstance(x, Tensor)]
        empty = [t for t in (states, *states.values()) if not t]
        lists = [optimizer.param_groups, *(group["params"] for group in optimizer.param_groups)]
        held = optimizer, empty, tensors, [(t, [*t], [*t.values()]) for t in tables], [(x, [*x]) for x in lists]
        return _Known(
            _C.Snapshot([optimizer], tables, empty, tensors, lists),
            held,
            states,
            optimizer.param_groups,
            _momenta(optimizer),
            reached,
            updates,
            [(group, None if counter is None else number[id(counter)]) for group, counter in sources],
            [t for t in steps if t.device.type == "cpu"],
            [t for t in steps if t.device.type != "cpu"],
            [number[id(sources[which][1])] for _, which in counted],
            [x for u in updates for x in (u.parameter, u.first, u.second) if x is not None],
        )


_LASTING = (bool, int, float, str, type(None))


class _Options(NamedTuple):
    """Hyperparameters, and what else might happen in a step, as they were."""

    snapshot: _C.Snapshot
    held: list
    """What the snapshot knows by identity."""
    groups: list[dict]
    step: object
    """``optimizer.step`` where it is another than the class's."""
    lasting: bool
    """Whether none can change its value and be the same object, as tensors and arrays can; else they never hold."""

    def hold(self, optimizer: Optimizer) -> bool:
        same = optimizer.__dict__.get("step") is self.step and optimizer.param_groups is self.groups
        return self.lasting and same and self.snapshot.holds(optimizer)

    @staticmethod
    def of(optimizer: Optimizer) -> _Options:
        groups, hooks = optimizer.param_groups, [*step_hooks(optimizer)]
        values = [v for group in groups for key, v in group.items() if key not in ("params", "betas")]
        parameters = _parameters(optimizer)
        held = [optimizer, hooks, parameters, [*groups], [(group, [*group], [*group.values()]) for group in groups]]
        betas = [group["betas"] for group in groups if "betas" in group]
        lasting = all(type(v) in _LASTING for v in (*values, *(beta for pair in betas for beta in pair)))
        lasting = lasting and all(type(pair) is tuple for pair in betas)
        lists = [groups, *(group["params"] for group in groups)]
        snapshot = _C.Snapshot([optimizer], groups, hooks, [], lists, parameters)
        return _Options(snapshot, held, groups, optimizer.__dict__.get("step"), lasting)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _momenta(optimizer: Optimizer) -> list[bool]:
    return [group.get("momentum", 0) != 0 for group in optimizer.param_groups]


class Updates:
    """The next steps of an optimizer.

    Args:
        optimizer: what is asked for its :meth:`obstacle` before each step.
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        self._known: _Known | None = None
        self._options: _Options | None = None
        self._holds = False
        """Whether it was seen to hold and nothing was done since."""
        self._numbers: list[tuple[float, ...]] | None = None
        """Of every step as long as the hyperparameters are the same."""
        # Counters that a device holds are read once, and again where somebody else has written to them.
        self._counts: dict[int, tuple[Tensor, int, float]] = {}

    def begin(self, reached: Collection[int]) -> tuple[list[Update], list[tuple[float, ...]], Begun]:
        """The updates of those parameters that have gradients, by identity, their numbers, and what :meth:`undo` takes.

        Counters of steps on the host are one up then; those on the device are for :meth:`finish`.
        """
        known = self._known
        holds, self._holds = self._holds, False
        if not holds:  # nor is it known whether the hyperparameters are the same
            self._numbers = None
        if known is None or known.reached is not reached or not (holds or self._known_holds()):
            return self._begin_anew(reached)
        # No state is new: a first step has made them all.
        counts: list[float] = []
        if known.leaders:
            counts = [*_C.count_up(known.counters), *(self._count(c) + 1 for c in known.on_device)]
            if any(counts[i] != counts[leader] for i, leader in enumerate(known.leaders)):  # somebody has set one
                for counter in known.counters:
                    counter.sub_(1)
                return self._begin_anew(reached)
        numbers = self._numbers
        if numbers is None:
            numbers = [self._numbers_of(group, None if i is None else counts[i]) for group, i in known.sources]
            if holds and self._options.lasting and not counts:
                self._numbers = numbers
        return known.updates, numbers, Begun([], known.counters)

    def finish(self, refused: Tensor) -> None:
        """After the launch: counters on the device are one up, unless `refused`, (1,) there, is 1. Versions grow."""
        known = self._known
        torch.autograd.graph.increment_version(known.changed)
        if known.on_device:
            foreach_add_(known.on_device, 1)
            foreach_sub_(known.on_device, [refused.view(())] * len(known.on_device))
            for counter in known.on_device:
                self._counts[id(counter)] = counter, counter._version, self._counts[id(counter)][2] + 1

    def obstacle(self) -> str | None:
        """Why it does not know what the optimizer does."""
        optimizer, found = self.optimizer, None
        if self._options is not None and self._options.hold(optimizer):
            self._holds = self._known is not None and self._known.holds(optimizer)
        else:
            self._options = self._numbers = None
            found = _options_obstacle(optimizer)
            if found is None:
                self._options = _Options.of(optimizer)
            self._holds = found is None and self._known_holds()
        if found is None and not self._holds:
            self._known = self._numbers = None
            found = _state_obstacle(optimizer)
        return found

    def _known_holds(self) -> bool:
        known = self._known
        return known is not None and known.holds(self.optimizer) and known.momenta == _momenta(self.optimizer)

    def same(self) -> bool:
        """Whether nothing is new since the latest step. Where it is :meth:`obstacle` says whether that matters."""
        known, options, optimizer = self._known, self._options, self.optimizer
        self._holds = known is not None and options is not None and options.hold(optimizer) and known.holds(optimizer)
        return self._holds

    def undo(self, begun: Begun) -> None:
        """The host's part of a step that the device refused."""
        for counter in begun.counters:
            counter.sub_(1)
        self._counts.clear()
        for p, before in begun.before:
            if before is None:
                self.optimizer.state.pop(p, None)
            else:
                self.optimizer.state[p] = before

    def _begin_anew(self, reached: Collection[int]) -> tuple[list[Update], list[tuple[float, ...]], Begun]:
        """With states for those that have none."""
        begun, self._numbers = Begun([], []), None
        try:
            updates, sources, numbers = self._all_updates(reached, begun)
            self._known = _Known.of(self.optimizer, reached, updates, sources)
        except BaseException:  # no counter is up yet
            self.undo(begun._replace(counters=[]))
            raise
        _C.count_up(begun.counters)
        return updates, numbers, begun

    def _all_updates(
        self, reached: Collection[int], begun: Begun
    ) -> tuple[list[Update], list[tuple[Mapping, Tensor | None]], list[tuple[float, ...]]]:
        """The updates, of each of the step's numbers the group and counter that they are of, and the numbers."""
        updates: list[Update] = []
        sources: list[tuple[Mapping, Tensor | None]] = []
        numbers: list[tuple[float, ...]] = []
        for group in self.optimizer.param_groups:
            make = self._sgd if "momentum" in group else self._adam
            places: dict[float, int] = {}  # parameters of a group that were updated as often share numbers
            for p in group["params"]:
                if id(p) not in reached or not p.requires_grad:
                    continue
                kind, first, second, counter, which = make(p, group, begun)
                place = places.get(which)
                if place is None:
                    place = places[which] = len(numbers)
                    numbers.append((self._sgd_numbers if counter is None else self._adam_numbers)(group, which))
                    sources.append((group, counter))
                updates.append(Update(p, kind, first, second, place))
        return updates, sources, numbers

    def _numbers_of(self, group: Mapping, count: float | None) -> tuple[float, ...]:
        """Of a step that is not the first; with a counter the count after it."""
        if count is None:
            return self._sgd_numbers(group, float(group["dampening"]))
        return self._adam_numbers(group, count)

    def _state(self, p: Tensor, begun: Begun, missing: Mapping[str, Tensor]) -> dict:
        """A parameter's state, with what it lacks."""
        state = self.optimizer.state.get(p)
        begun.before.append((p, None if state is None else dict(state)))
        state = self.optimizer.state[p]
        state.update(missing)
        return state

    def _sgd(self, p: Tensor, group: Mapping, begun: Begun) -> tuple:
        """Kind, moments, counter, dampening."""
        dampening, buffer = float(group["dampening"]), None
        if group["momentum"] != 0:
            state = self.optimizer.state.get(p)
            buffer = state.get("momentum_buffer") if state else None
            if buffer is None:  # which becomes the gradient, dampened or not
                dampening = 0.0
                buffer = torch.zeros_like(p, requires_grad=False)
                self._state(p, begun, {"momentum_buffer": buffer})
        return "sgd", buffer, None, None, dampening

    def _sgd_numbers(self, group: Mapping, dampening: float) -> tuple[float, ...]:
        """`dampening`: the group's, none at first."""
        given = group["lr"], group["momentum"], dampening, group["weight_decay"], group["nesterov"]
        return tuple(map(float, given))

    def _adam(self, p: Tensor, group: Mapping, begun: Begun) -> tuple:
        """Kind, moments, counter, count."""
        state = self.optimizer.state.get(p)
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
        return "adam", state["exp_avg"], state["exp_avg_sq"], counter, self._count(counter) + 1

    def _adam_numbers(self, group: Mapping, count: float) -> tuple[float, ...]:
        lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), map(float, group["betas"])
        return (
            *(lr / (1 - beta1**count), 1 - beta1, beta2, 1 - beta2, float(group["eps"]), (1 - beta2**count) ** 0.5),
            *((1 - lr * decay, 0.0) if group["decoupled_weight_decay"] else (1.0, decay)),
        )

    def _count(self, counter: Tensor) -> float:
        if counter.device.type == "cpu":
            return counter.item()
        found = self._counts.get(id(counter))
        if found is None or found[0] is not counter or found[1] != counter._version:
            found = self._counts[id(counter)] = counter, counter._version, counter.item()
        return found[2]
