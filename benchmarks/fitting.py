"""Least squares of relative errors, and how they are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def fit(
    features: Iterable[Sequence[float]], times: Sequence[float], weights: Sequence[float] | None = None
) -> np.ndarray:
    """Constants of the features, the one that would be most negative left out until none is."""
    ones = np.ones(len(times)) if weights is None else np.array(weights)
    X = np.array(list(features)) * (ones / np.array(times))[:, None]
    kept = list(range(X.shape[1]))
    while True:
        found = np.linalg.lstsq(X[:, kept], ones, rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    constants = np.zeros(X.shape[1])
    constants[kept] = found
    return constants


def rounded(value: float) -> float:
    """To three digits."""
    return float(f"{value:.3g}")


def error(expected: Iterable[float], times: Sequence[float]) -> str:
    """How far what is expected is from what was measured."""
    errors = np.array(list(expected)) / np.array(times) - 1
    return f"rms {np.sqrt(np.mean(errors**2)):.1%}, worst {abs(errors).max():.0%}"
