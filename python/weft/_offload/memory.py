"""How much host memory this process may have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def host_memory(root: Path = _ROOT) -> int:
    """Bytes of the machine, or what the control groups of this process (version 2 or 1) leave it of them. `root`: where
    the system's files are."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """The limits of every group that the process is in, and of those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be that outside of it: then the group is the mount's own.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            try:
                limit = mount.joinpath(*parts[:depth], name).read_text().strip()
            except OSError:
                continue
            if limit.isdecimal():  # or "max"
                yield int(limit)
