"""Registers what torch.utils.flop_counter counts for Weft's ops, without importing it: it brings Triton, which takes a
third of the time that importing Weft may take, and hardly a program counts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["register_flop_formula"]

_COUNTER = "torch.utils.flop_counter"
_Formula = Callable[..., int]
_waiting: list[tuple[Any, bool, _Formula]] = []


def register_flop_formula(targets: Any, get_raw: bool = False) -> Callable[[_Formula], _Formula]:
    """torch.utils.flop_counter's decorator of this name, applied as soon as that module is imported."""

    def register(formula: _Formula) -> _Formula:
        if _COUNTER in sys.modules:
            sys.modules[_COUNTER].register_flop_formula(targets, get_raw)(formula)
        else:
            _waiting.append((targets, get_raw, formula))
        return formula

    return register


class _RegistersOnImport(MetaPathFinder):
    """Finds the counter as the finders after it would, and registers the formulas once its code has run."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # who asked may only have wanted to know
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            for targets, get_raw, formula in _waiting:
                module.register_flop_formula(targets, get_raw)(formula)
            _waiting.clear()

        spec.loader.exec_module = execute_and_register
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _RegistersOnImport())
