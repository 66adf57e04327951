"""Checks of the CUDA engine on a runtime without a device, tests/emulator/runtime.cpp: test_emulated_engine.py runs
them in a process that has it loaded. There, what nobody waits for comes last, so that a missing wait gives wrong bytes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import pytest
import torch
from weft._offload.pace import Pace

from tests.offload import emulated_data, emulated_memory, emulated_planning, emulated_small, emulated_unhooked
from tests.offload.emulated_steps import Runtime
from tests.offload.engines import plan_at_once

CHECKS: dict[str, Callable[[Runtime], None]] = {
    name.removeprefix("check_"): check
    # Planning is first: what its first check measures holds for the process.
    for module in (emulated_planning, emulated_data, emulated_memory, emulated_small, emulated_unhooked)
    for name, check in vars(module).items()
    if name.startswith("check_")
}


def main(path: str) -> None:
    """Prints a line per check: its name, and whether it holds; what went wrong goes to stderr."""
    runtime = Runtime(path)
    # An operation takes as long as any other here: hooks cost more than they do, and the checks are about their work.
    Pace.enter, Pace.tried = lambda pace, now, steady: True, True
    patch = pytest.MonkeyPatch()
    plan_at_once(patch)
    for name, check in CHECKS.items():
        try:
            torch.manual_seed(0)
            errors = runtime.errors()
            check(runtime)
            runtime.drain()
            assert runtime.errors() == errors
            print(name, "holds", flush=True)
        except BaseException:
            runtime.refuse()
            traceback.print_exc()
            print(name, "fails", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
