"""``weft.explain``: which algorithm runs a recurrent layer on an input, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import _algorithms, nn

__all__ = ["Candidate", "Explanation", "explain"]


@dataclass(frozen=True)
class Candidate:
    """One algorithm and whether it could run."""

    name: str
    eligible: bool
    reason: str
    """Why it is not eligible or not taken; for the one taken, why it is."""


@dataclass(frozen=True)
class Explanation:
    """The answer of :func:`explain`; ``print`` it."""

    layer: str
    input: str
    asked: str
    """The layer's `algorithm`."""
    algorithm: str
    """The algorithm that runs."""
    reason: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.layer} on {self.input}",
            f"runs as {self.algorithm!r} ({self.reason}); asked for: {self.asked!r}",
        ]
        for c in self.candidates:
            mark = "taken" if c.name == self.algorithm else "eligible" if c.eligible else "no"
            lines.append(f"  {c.name:<10} {mark:<8}  {c.reason}")
        return "\n".join(lines)


def explain(
    layer: nn.RNN | nn.GRU | nn.LSTM,
    x: Tensor | PackedSequence,
    hx: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Explanation:
    """Say which algorithm ``layer(x, hx)`` would run, and why not the others. Nothing is computed.

    Args:
        layer: one of Weft's recurrent layers.
        x: the input, as the layer takes it.
        hx: the initial state, as the layer takes it.

    Returns:
        An :class:`Explanation`: fields ``algorithm``, ``reason`` and ``candidates``; printable. It holds for the
        context of the call: autocast and ``torch.func`` transforms count.

    Raises:
        TypeError: `layer` is not one of Weft's layers.
        Otherwise what the layer itself raises for this input.
    """
    if not isinstance(layer, (nn.RNN, nn.GRU, nn.LSTM)):
        raise TypeError(f"explain: layer must be a weft.nn.RNN, GRU or LSTM, got {type(layer).__name__}")
    case = layer._prepare(x, hx if hx is None or isinstance(layer, nn.LSTM) else (hx,)).case
    algorithm, reason = _algorithms.choose(layer.algorithm, case)
    candidates = tuple(
        _candidate(name, algorithm, reason, layer.algorithm, case) for name in _algorithms.ALGORITHMS[1:]
    )
    return Explanation(repr(layer), _describe(case), layer.algorithm, algorithm, reason, candidates)


def _candidate(name: str, taken: str, why: str, asked: str, case: _algorithms.Case) -> Candidate:
    if name == taken:
        return Candidate(name, True, why)
    obstacle = _algorithms.MISSING.get(name) or (name != "reference" and _algorithms.why_only_reference(case))
    if not obstacle and name == "scan":
        obstacle = _algorithms.why_not_scan(case)
    if obstacle:
        return Candidate(name, False, obstacle)
    if asked == taken:
        return Candidate(name, True, f'algorithm="{asked}" was asked for')
    if name == "scan":
        return Candidate(name, True, _algorithms.why_auto_skips_scan(case) or "")
    slower = "slow, differentiable to any order" if name == "reference" else f"auto takes {taken} here"
    return Candidate(name, True, slower)


def _describe(case: _algorithms.Case) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    if case.packed:
        return f"packed {dtype} input on {case.device}"
    return f"T={case.steps} B={case.batch} {dtype} input on {case.device}"
