"""Steps that the tests of pointwise_scan run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["STEPS", "StepCase"]


def gru(h, x, p):
    """ParaGRU's."""
    z, r = torch.sigmoid(x[0] + p[0] * h), torch.sigmoid(x[1] + p[1] * h)
    return h + z * (torch.tanh(x[2] + p[2] * (r * h)) - h)


def slow_gru(h, x, p):
    """The same with update gates near 0: it remembers for thousands of steps."""
    return gru(h, (x[0] - 8.0, *x[1:]), p)


def lstm(state, x, p):
    """ParaLSTM's."""
    h, c = state
    f = torch.sigmoid(x[0] + p[0] * h + p[3] * c)
    c = f * c + (1 - f) * torch.tanh(x[1] + p[1] * h)
    o = torch.sigmoid(x[2] + p[2] * h + p[4] * c)
    return o * torch.tanh(c), c


def spiking(v, x, p):
    """A leaky neuron with a surrogate gradient."""
    v = torch.sigmoid(p) * v + x
    soft = torch.sigmoid(4 * (v - 1.0))
    spike = soft + ((v > 1.0).to(v.dtype) - soft).detach()
    return v * (1 - spike)


def chaos(h, x, p):
    """The derivative of a chunk grows without end, and no two walks meet."""
    return torch.sin(4 * p * h + 0.1 * x)


def logistic(h, x, p):
    """Bounded; but a chunk whose start is guessed out of bounds runs off to infinity."""
    return p - 1.9 * h * h + 0.0 * x


def decay(h, x, p):
    return torch.where(x > 0, 0.5 * h + x, p * h)


class StepCase(NamedTuple):
    step: Callable[[Any, Any, Any], Any]
    states: int
    inputs: int
    parameters: int
    tuples: tuple[bool, bool, bool]
    """Whether states, inputs and parameters are tuples."""
    scale: float = 1.0
    """Of the parameters."""
    within: tuple[float, float] = (-1.0, 1.0)
    """Of the initial states."""


STEPS: dict[str, StepCase] = {
    "gru": StepCase(gru, 1, 3, 3, (False, True, True)),
    "slow_gru": StepCase(slow_gru, 1, 3, 3, (False, True, True)),
    "lstm": StepCase(lstm, 2, 3, 5, (True, True, True)),
    "spiking": StepCase(spiking, 1, 1, 1, (False, False, False)),
    "chaos": StepCase(chaos, 1, 1, 1, (False, False, False), scale=0.0),
    "logistic": StepCase(logistic, 1, 1, 1, (False, False, False), scale=0.0, within=(0.0, 0.5)),
    "decay": StepCase(decay, 1, 1, 1, (False, False, False)),
}


def arguments(case: StepCase, T: int, shape: tuple[int, ...], dtype=torch.float64, device="cpu", seed=0):
    """init, inputs and parameters as the step takes them; parameters of the last dimension."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).to(device)

    low, high = case.within
    lists = (
        [(drawn(*shape).sigmoid() * (high - low) + low) for _ in range(case.states)],
        [drawn(T, *shape) for _ in range(case.inputs)],
        [(drawn(*shape[-1:]) * case.scale * 0.5 + (1 - case.scale)) for _ in range(case.parameters)],
    )
    return tuple(tuple(found) if several else found[0] for found, several in zip(lists, case.tuples, strict=True))
