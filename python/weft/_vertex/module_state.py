"""All of a module that a trace depends on."""

from __future__ import annotations

from torch import Tensor, nn

from .runtime.call_cache import HOOKS

__all__ = ["ModuleState"]

# Of a module's __dict__, what is not an attribute of its own.
_INTERNALS = frozenset({*nn.Module().__dict__, "_compiled"}) - {"training"}


class _Same:
    """An object by identity, kept alive so that no other one can take its place."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class ModuleState:
    """All that counts of a module and its submodules at a call.

    Attributes:
        key: hashable; a trace is good for all states with the same key.
        tensors: parameters and buffers.
        names: names of these and of the plain attributes that are tensors, by ``id``.
        by_name: the same the other way round.
    """

    def __init__(self, module: nn.Module):
        self.tensors: list[Tensor] = []
        self.names: dict[int, str] = {}
        self.by_name: dict[str, Tensor] = {}
        self._numbers: dict[int, int] = {}
        parts: list[object] = []
        seen: dict[int, int] = {}
        stack: list[tuple[str, nn.Module]] = [("", module)]
        while stack:
            prefix, m = stack.pop()
            parts.append(prefix)
            if id(m) in seen:
                parts.append(seen[id(m)])
                continue
            seen[id(m)] = len(seen)
            parts.append(type(m))
            for registered in (m._parameters, m._buffers):
                for key, t in registered.items():
                    if t is not None:
                        self.tensors.append(t)
                        parts.append(self._tensor(prefix + key, t))
                    else:
                        parts.append((key, None))
            for key, value in m.__dict__.items():
                if key not in _INTERNALS:
                    parts.append((key, self._attribute(prefix + key, value)))
            for key in HOOKS:
                hooks = m.__dict__[key]
                if hooks:
                    parts.append((key, tuple(hooks)))
            stack.extend((f"{prefix}{key}.", child) for key, child in m._modules.items() if child is not None)
        self.key = tuple(parts)

    def _tensor(self, name: str, t: Tensor) -> tuple:
        first = self._numbers.setdefault(id(t), len(self._numbers))
        self.by_name[self.names.setdefault(id(t), name)] = t
        return (name, first, type(t), t.shape, t.dtype, t.device, t.requires_grad)

    def _attribute(self, name: str, value: object) -> object:
        if value is None or isinstance(value, (bool, int, str)):
            return (type(value), value)
        if isinstance(value, float):
            return (float, value.hex())
        if isinstance(value, complex):
            return (complex, value.real.hex(), value.imag.hex())
        if isinstance(value, Tensor):
            # One that requires grad is nobody's parameter: the trace finds it under no name and refuses it.
            return ("requires grad", _Same(value)) if value.requires_grad else self._tensor(name, value)
        if isinstance(value, tuple):
            return (type(value), *(self._attribute(f"{name}.{i}", v) for i, v in enumerate(value)))
        return _Same(value)
