"""Where things are: the files of every op by its name alone, the floors that rooms stand on, and their namespaces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import weft  # noqa: F401  registers torch.ops.weft

CSRC = Path(__file__).parents[1] / "csrc"

FILES = ("{op}.h", "{op}.cpp", "{op}_autograd.cpp", "cpu/{op}.cpp", "cuda/{op}.cpp")
"""Of every op, in its room or in one folder of it."""

SHARED = {
    "zvc_decompress": "zvc_compress",
    "rle_decompress": "rle_compress",
    "csr_sampled_mm": "csr_mm",
    "conv_pattern": "conv_values",
    "csr_matmul_plan": "csr_matmul",
    "csr_matmul_left": "csr_matmul",
    "csr_matmul_right": "csr_matmul",
}
"""Ops that are in another's files: its inverse, its plan, its gradients under another name."""

_OF_ATEN = "made of ATen operations, which bring their devices and their gradients"
_IN_PYTHON = "torch's own kernels, called from python/weft/_rnn/dropin/torch_rnn.py"
WITHOUT = {
    "chain_backward": dict.fromkeys(FILES[2:], _OF_ATEN),
    "torch_rnn": dict.fromkeys(FILES, _IN_PYTHON),
    "slice_scan": dict.fromkeys(FILES, "other ops and torch's collectives, in python/weft/_distributed/scan.py"),
    "csr_transpose": dict.fromkeys(FILES[2:], _OF_ATEN),
}
"""Files that an op does not have, and why."""

FLOORS = {
    "common": set(),
    "jit": {"common"},
    "sparse": {"common", "jit"},
    "scan": {"common", "jit", "sparse"},
    "rnn": {"common", "jit", "sparse", "scan"},
    "vertex": {"common", "jit", "sparse", "scan"},
    "offload": {"common", "jit"},
}
"""What a room may include."""


def ops() -> list[str]:
    """Ops of the registry that have files; a backward op belongs to its forward op."""
    names = {s.name.removeprefix("weft::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("weft::")}
    return sorted(n for n in names if n not in SHARED and n.removesuffix("_backward") not in names - {n})


def sources() -> list[Path]:
    return [p for p in sorted(CSRC.rglob("*")) if p.suffix in (".h", ".cpp", ".cu", ".cuh")]


def room_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def homes_of_ops() -> list[Path]:
    """Rooms, and their folders that are no device's."""
    rooms = [CSRC / room for room in FLOORS]
    folders = [p for room in rooms for p in sorted(room.iterdir()) if p.is_dir() and p.name not in ("cpu", "cuda")]
    return [*rooms, *folders]


def test_the_registry_is_walked():
    assert {"linear_scan", "chain_backward", "rnn"} <= set(ops())


@pytest.mark.parametrize("op", ops())
def test_an_op_has_the_files_of_its_name(op: str):
    reasons = WITHOUT.get(op, {})
    homes = [home for home in homes_of_ops() if any((home / file.format(op=op)).exists() for file in FILES)]
    assert len(homes) == (0 if len(reasons) == len(FILES) else 1), f"{op} is in {homes}"
    for file in FILES:
        exists = bool(homes) and (homes[0] / file.format(op=op)).exists()
        assert exists != (file in reasons), f"{op}: {file.format(op=op)}: {reasons.get(file, 'is missing')}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(CSRC)))
def test_a_room_stands_on_lower_floors(path: Path):
    text, room = path.read_text(encoding="utf-8"), room_of(path)
    if room not in FLOORS:
        return
    below = FLOORS[room] | {room}
    included = {name.split("/")[0] for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE) if "/" in name}
    assert included <= below, f"includes from {included - below}"
    # Kernels that are compiled at run time have a program for themselves.
    if room != "common" and ".jit." not in path.name:
        spaces = set(re.findall(r"^namespace weft(?:::(\w+))?", text, re.MULTILINE))
        allowed = below | {"cpu"}  # the vector layer's, in common/cpu
        assert spaces <= allowed, f"namespaces weft::{spaces - allowed}"
