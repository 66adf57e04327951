"""The call before, for the next one like it: what the next one depends on is compared, not looked at again.

A training step of few vertices is bound by what the host does in it, and most calls of a module differ in their graphs
and in the values of tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .graphs import Graphs
from .options import current
from .vertex import Spec, autocasts

__all__ = ["HOOKS", "Known", "Snapshot", "modes"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def modes(device: torch.device) -> tuple:
    """What a trace depends on besides the module and its inputs."""
    kind = device.type
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocasts(kind) and torch.get_autocast_dtype(kind),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
    )


class Snapshot:
    """A module and its submodules as they are, by identity; tensors by what a trace depends on."""

    def __init__(self, parts: list[tuple], tensors: list[tuple[Tensor, tuple]], empty: list[dict]):
        self._parts, self._tensors, self._empty = parts, tensors, empty

    @staticmethod
    def of(module: nn.Module) -> Snapshot | None:
        """None where identity does not tell whether something changes: hooks, and tuples of other things than numbers
        and strings; and where a tensor has a history, which would live on with it."""
        parts, found, empty = [], [], []
        for m in module.modules():
            attributes = m.__dict__
            hooks = [attributes[name] for name in HOOKS]
            if any(hooks) or not all(_is_plain(v) for v in attributes.values() if isinstance(v, tuple)):
                return None
            tables = [attributes, attributes["_parameters"], attributes["_buffers"], attributes["_modules"]]
            found += [t for table in tables for t in table.values() if isinstance(t, Tensor)]
            # The values are held, or another object might get the number of one that is gone.
            parts.append((m, type(m), [(t, [*t], [*map(id, t.values())], [*t.values()]) for t in tables if t]))
            empty += [*hooks, *(t for t in tables if not t)]
        if any(t.grad_fn is not None for t in found):
            return None
        return Snapshot(parts, [(t, _of_tensor(t)) for t in found], empty)

    def holds(self, module: nn.Module) -> bool:
        """Whether it is of this very module, not one that a copy of it was made from, and all is as it was."""
        if self._parts[0][0] is not module:
            return False
        for m, kind, tables in self._parts:
            if type(m) is not kind:
                return False
            for table, keys, numbers, _ in tables:
                if [*map(id, table.values())] != numbers or [*table] != keys:
                    return False
        return not any(self._empty) and all(_of_tensor(t) == was for t, was in self._tensors)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str))


def _of_tensor(t: Tensor) -> tuple:
    return type(t), t.requires_grad, t.dtype, t.shape, t.device


class Known:
    """A call that passed all checks and ran batched, of a function without types.

    Args:
        snapshot: what was called, as it was before it was looked at.
        inputs: what was pulled.
        executor: what was asked for.
        device: of all tensors.
        slots: children may stand in slots below this one.
        run: runs it on graphs and inputs.
        program: what the module's program is.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        inputs: Mapping[str, Tensor],
        executor: str,
        device: torch.device,
        slots: int,
        run: Callable[[Graphs, Mapping[str, Tensor]], list[Tensor]],
        program: object,
    ):
        self._snapshot = snapshot
        self._inputs = [(name, Spec.of(x), x.requires_grad) for name, x in inputs.items()]
        self._executor, self._device, self._slots = executor, device, slots
        self._modes, self._options = modes(device), current()[:2]
        self.run, self.program = run, program

    def rows(self, module: nn.Module, graphs: object, inputs: object, executor: object) -> dict[str, Tensor] | None:
        """The inputs of a call that differs in nothing that counts, None of any other."""
        if (
            executor != self._executor
            or type(graphs) is not Graphs
            or torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
        ):
            return None
        rows = inputs if type(inputs) is dict else {} if inputs is None else {"input": inputs}
        count, device = graphs.num_vertices, self._device
        if count == 0 or len(rows) != len(self._inputs) or graphs.num_slots > self._slots:
            return None
        if graphs.device.type != "cpu" and graphs.device != device:
            return None
        for (name, spec, grad), (key, x) in zip(self._inputs, rows.items(), strict=True):
            if name != key or not isinstance(x, Tensor) or x.dim() == 0 or len(x) != count or x.device != device:
                return None
            if x.requires_grad != grad or x.dtype != spec.dtype or x.shape[1:] != spec.shape:
                return None
        same = modes(device) == self._modes and current()[:2] == self._options and self._snapshot.holds(module)
        return dict(rows) if same else None
