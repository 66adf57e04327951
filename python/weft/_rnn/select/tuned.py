"""What weft.tune has measured of recurrent layers."""

from __future__ import annotations

import torch

from ..._base.machine import machine_name
from ..._base.measured import Entry, Measured, bucket, key_of
from .case import Case
from .costs import products_flops

__all__ = ["MEASURED", "Entry", "key", "look_up"]

MEASURED = Measured("tune.json", "algorithm", ("persistent", "scan", "newton", "torch", "reference"))


def look_up(case: Case) -> Entry | None:
    """What was measured for cases of this kind, or None."""
    entry = MEASURED.look_up(lambda: key(case))
    return None if entry is None or entry.microseconds[entry.fastest] > _absurd_us(case) else entry


def _absurd_us(case: Case) -> float:
    """Microseconds that no fastest algorithm takes on any machine: what is slower was measured while the machine was
    busy with something else, and is not believed. A millisecond, one for every ten steps, and 100 MFLOP/s."""
    steps = bucket(case.steps or 0) * case.layers * case.directions
    largest = case._replace(steps=bucket(case.steps or 0), batch=bucket(case.batch or 0))
    return 1000 + (3 if case.trains else 1) * 100 * steps + 1e-2 * products_flops(largest)


def key(case: Case) -> str:
    """What decides between algorithms, lengths and batches rounded up to powers of two."""
    parts = {
        "cell": case.cell,
        "dtype": str(case.dtype).removeprefix("torch."),
        "tf32": int(case.tf32),
        "I": case.input_size,
        "H": case.hidden_size,
        "layers": case.layers,
        "directions": case.directions,
        "T": bucket(case.steps or 0),
        "B": bucket(case.batch or 0),
        "packed": int(case.packed),
        "P": case.proj_size,
        "mapped": int(case.mapped),
        "cells": int(case.keeps_cells),
        "trains": int(case.trains),
    }
    if case.heads > 1:
        parts["heads"] = case.heads
    return key_of(machine_name(torch.device(case.device, case.index)), parts)
