"""weft.offload on CUDA, on a runtime without a device: what emulated_engine.py checks, in a process of its own."""

from __future__ import annotations

import pytest
from weft import _C

from tests import emulated
from tests.offload import emulated_engine

pytestmark = [
    *emulated.MARKS,
    pytest.mark.skipif(
        emulated.cuda_headers() is None or not hasattr(_C._testing, "offload_stages"),
        reason="the emulated runtime needs CUDA's headers, and Weft and torch built with CUDA",
    ),
]


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, str], str]:
    """Check to how it ended, and what was written about it."""
    runtime = emulated.runtime()
    process = emulated.run_on(runtime, "-m", "tests.offload.emulated_engine", str(runtime))
    lines = [line.split() for line in process.stdout.splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2}, process.stderr[-5000:]


@pytest.mark.parametrize("check", emulated_engine.CHECKS)
def test_on_the_emulated_runtime(check: str, found: tuple[dict[str, str], str]) -> None:
    ended, errors = found
    assert ended.get(check) == "holds", errors
