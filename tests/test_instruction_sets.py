"""Kernels for older processors, which torch's own switch chooses, under the tests of what has such kernels. All of
them in one process for each, because starting one takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common import with_environment

TESTS = {
    "offload/test_codec.py": "test_agrees_with_reference and cpu and (8193 or 262145) and not torch.float16",
    "rnn/test_rnn.py": "test_matches_reference and cpu and (H7 or H20 or H33)",
    "scan/test_linear_scan.py": "cpu and (agrees_with_reference or any_shape or bad_row) and not gradients or groups"
    " and not cuda",
    "scan/test_readout.py": "agrees_with_the_reference and cpu and not cuda",
}
"""Files, and what runs of them."""


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_with_fewer_instructions(capability: str) -> None:
    of_files = (f"({Path(file).name} and ({tests}))" for file, tests in TESTS.items())
    files = (str(Path(__file__).parent / file) for file in TESTS)
    printed = with_environment({"ATEN_CPU_CAPABILITY": capability}, " or ".join(of_files), *files)
    assert all(f"tests/{file} ." in printed for file in TESTS), printed
