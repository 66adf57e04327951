"""``weft.explain``: which algorithm runs a recurrent layer on an input, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._base import costs as gpu_costs
from .calls import Call, prepare
from .cells import GRUCell, LSTMCell, RNNCell, SLSTMCell
from .cells import choose as choose_step
from .dropin.accelerate import swapped, why_left
from .layers import GRU, LSTM, RNN, SLSTM
from .select import choice
from .select.case import Case

__all__ = ["Candidate", "Explanation", "explain"]


@dataclass(frozen=True)
class Candidate:
    """One algorithm and whether it could run."""

    name: str
    eligible: bool
    reason: str
    """Why it is not eligible or not taken; for the one taken, why it is."""
    expected_us: float | None = None
    """Microseconds for the input, measured by :func:`weft.tune` or, on a GPU, expected by its costs; None if unknown.
    With the backward pass where anything asks for a gradient."""
    measured: bool = False
    """Whether `expected_us` was measured."""


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
    extrapolated_from: str | None = None
    """The GPU whose costs the expected times are scaled from, None where they are this one's, or there are none."""
    note: str | None = None
    """What has to be done first, None for nothing."""

    def __str__(self) -> str:
        lines = [
            f"{self.layer} on {self.input}",
            f"runs as {self.algorithm!r} ({self.reason}); asked for: {self.asked!r}",
        ]
        for c in self.candidates:
            mark = "taken" if c.name == self.algorithm else "eligible" if c.eligible else "no"
            time = "" if c.expected_us is None else f"{'' if c.measured else '~'}{_three_digits(c.expected_us)} us"
            lines.append(f"  {c.name:<10} {mark:<8} {time:>11}  {c.reason}")
        if self.extrapolated_from is not None:
            lines.append(f"~ is extrapolated from an {self.extrapolated_from}; weft.tune(layer, x) measures it here")
        if self.note is not None:
            lines.append(self.note)
        return "\n".join(lines)


def explain(
    layer: RNN
    | GRU
    | LSTM
    | SLSTM
    | RNNCell
    | GRUCell
    | LSTMCell
    | SLSTMCell
    | torch.nn.RNNBase
    | torch.nn.RNNCellBase,
    x: Tensor | PackedSequence,
    hx: Tensor | tuple[Tensor, ...] | None = None,
) -> Explanation:
    """Say which algorithm ``layer(x, hx)`` would run, and why not the others. Nothing is computed.

    Args:
        layer: one of Weft's recurrent layers or cells, or one of torch's: the answer is then what would run after
            :func:`weft.accelerate`, and its ``note`` says so; of a user's subclass after
            ``weft.accelerate(model, subclasses=True)``.
        x: the input, as the layer takes it.
        hx: the initial state, as the layer takes it; a cell's makes no difference.

    Returns:
        An :class:`Explanation`: fields ``algorithm``, ``reason`` and ``candidates``, each of these with its time where
        that is known; printable, with ``~`` before a time that is expected and was not measured. On a GPU that was
        not measured, ``extrapolated_from`` names the one whose costs were scaled to what the driver tells of this one;
        :func:`weft.tune` then measures what counts. On a CPU only it finds times, and what ``"auto"`` prefers comes
        from tables. It holds for the context of the call: autocast, ``torch.no_grad`` and ``torch.func`` transforms
        count.

    Raises:
        TypeError: `layer` is none of these, or a subclass that overrides what would run; `x` is no Tensor and no
        PackedSequence, or `hx` not of Tensors. Otherwise what the layer itself raises for this input.
    """
    ours = swapped(layer, subclasses=True) if isinstance(layer, torch.nn.Module) else None
    if ours is not None:
        found = explain(ours, x, hx)
        kind = type(layer).__name__
        plain = swapped(layer) is not None
        first = "weft.accelerate the model first" if plain else "call weft.accelerate(model, subclasses=True) first"
        whose = "torch's own" if plain else "a subclass of torch's"
        note = f"{first}: this {kind} is {whose}, which runs until then"
        return replace(found, layer=repr(layer), note=note)
    if isinstance(layer, (RNNCell, GRUCell, LSTMCell, SLSTMCell)):
        return _explain_cell(layer, x, hx)
    case = prepared("explain", layer, x, hx).case
    algorithm, reason = choice.choose(layer.algorithm, case)
    if layer._over_ranks is not None:
        reason = f"{reason}; {layer._over_ranks.said(in_rounds=True)}"
    candidates = _candidates(layer.algorithm, case)
    return Explanation(
        repr(layer),
        _describe(case),
        layer.algorithm,
        algorithm,
        reason,
        candidates,
        _extrapolated_from(case, candidates),
    )


def _extrapolated_from(case: Case, candidates: tuple[Candidate, ...]) -> str | None:
    if case.device != "cuda" or not any(c.expected_us is not None and not c.measured for c in candidates):
        return None
    costs = gpu_costs.of(case.index)
    return costs.measured_on if costs.extrapolated else None


def _explain_cell(
    cell: RNNCell | GRUCell | LSTMCell | SLSTMCell, x: Tensor, hx: Tensor | tuple[Tensor, ...] | None
) -> Explanation:
    if not isinstance(x, Tensor):
        raise TypeError(f"explain: x must be a Tensor, got {type(x).__name__}")
    cell._refuse_wrong(x, hx)
    algorithm, reason = choose_step(cell, x)
    other = "torch" if algorithm == "fused" else "fused"
    candidates = (
        Candidate(algorithm, True, reason),
        Candidate(other, True, f"{cell.algorithm} takes {algorithm} here"),
    )
    dtype = str(x.dtype).removeprefix("torch.")
    size = f"B={x.shape[0]} " if x.dim() == 2 else ""
    return Explanation(
        repr(cell), f"{size}{dtype} input on {x.device.type}", cell.algorithm, algorithm, reason, candidates
    )


def prepared(function: str, layer: Any, x: Any, hx: Any) -> Call:
    """The call ``layer(x, hx)``, its arguments checked for `function`."""
    if not isinstance(layer, (RNN, GRU, LSTM, SLSTM)):
        kind = type(layer).__name__
        if isinstance(layer, torch.nn.Module) and swapped(layer) is not None:
            kind = f"torch.nn.{kind}; weft.accelerate(model) puts Weft's in its place"
        elif isinstance(layer, torch.nn.Module) and (why := why_left(layer)) is not None:
            kind = f"{kind}, which weft.accelerate leaves as it is: it {why}"
        raise TypeError(f"{function}: layer must be a weft.nn.RNN, GRU, LSTM or SLSTM, got {kind}")
    if not isinstance(x, (Tensor, PackedSequence)):
        raise TypeError(f"{function}: x must be a Tensor or a PackedSequence, got {type(x).__name__}")
    names = layer._state_names
    states = hx if names else None if hx is None else (hx,)
    if states is not None and not (isinstance(states, (tuple, list)) and all(isinstance(s, Tensor) for s in states)):
        count = {2: "two", 4: "four"}.get(len(names))
        wanted = f"({', '.join(names)}), {count} Tensors," if names else "a Tensor"
        raise TypeError(f"{function}: hx must be {wanted} or None, got {type(hx).__name__}")
    if names:
        layer._checked(states)
    return prepare(layer, x, states)


def _candidates(asked: str, case: Case) -> tuple[Candidate, ...]:
    algorithm, reason = choice.choose(asked, case)
    return tuple(_candidate(name, algorithm, reason, asked, case) for name in choice.ALGORITHMS[1:])


def _candidate(name: str, taken: str, why: str, asked: str, case: Case) -> Candidate:
    times = choice.expected_time(name, case), choice.measured_time(name, case) is not None
    if name == taken:
        return Candidate(name, True, "; ".join(filter(None, (why, choice.how(name, case)))), *times)
    obstacle = choice.obstacle(name, case)
    if obstacle is not None:
        return Candidate(name, False, obstacle)
    if asked == taken:
        return Candidate(name, True, f'algorithm="{asked}" was asked for', *times)
    if name == "reference":
        return Candidate(name, True, "slow, differentiable to any order", *times)
    tuned = choice.measured(case) is not None
    reason = None if tuned or asked != "auto" else choice.why_auto_skips(name, case)
    return Candidate(name, True, reason or f"{asked} takes {taken} here", *times)


def _three_digits(number: float) -> str:
    return f"{float(f'{number:.3g}'):.10g}"


def _describe(case: Case) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    sizes = f"T={case.steps} B={case.batch} " if case.steps is not None else ""
    return f"{sizes}{'packed ' if case.packed else ''}{dtype} input on {case.device}"
