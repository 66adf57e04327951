"""Sizes in bytes, as a user writes them."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _UNITS[f"{_prefix}b"] = _UNITS[_prefix] = 1000**_power
    _UNITS[f"{_prefix}ib"] = _UNITS[f"{_prefix}i"] = 1024**_power
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]+)", re.ASCII | re.IGNORECASE)


def parse_bytes(name: str, value: float | str) -> int:
    """Bytes of a whole number, or of a string like ``"4GB"``, ``"4G"`` or ``"1.5 GiB"``, rounded down.

    Raises:
        TypeError: neither a whole number nor a string, or a ``bool``.
        ValueError: negative, or a string that is not a number and a unit.
    """
    if isinstance(value, float) and value.is_integer():  # as 4e9
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be a whole number of bytes or a string like '4GB', got {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value!r}")
        return value
    match = _SIZE.fullmatch(value)
    unit = _UNITS.get(match[2].lower()) if match else None
    if unit is None:
        raise ValueError(
            f"{name} must be a number and a unit, B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, like '4GB', got {value!r}"
        )
    return int(Fraction(match[1]) * unit)
