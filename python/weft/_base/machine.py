"""The machine that this process runs on."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

__all__ = ["cores", "cpu_name", "machine_name"]


@functools.cache
def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use, which a container or taskset can make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_name(device: torch.device) -> str:
    """What measurements on `device` hold for, without blanks."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device.index).replace(" ", "_")
    return f"{'_'.join(cpu_name().split())}:{torch.get_num_threads()}" if device.type == "cpu" else device.type
