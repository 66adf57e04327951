"""Forward passes in chunks of time, of nets that remember so many steps, beside the scan's and torch's."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import weft
from torch import nn

from benchmarks.common import DTYPES, Candidate, Entry, Results, check_agreement, measure, relative_error
from benchmarks.layers import LayerStep, agreement_bound, check_layers, say_algorithm
from benchmarks.rnn_cases import RnnCase


@dataclass(frozen=True)
class NewtonCase(RnnCase):
    """A layer whose forward pass depends on how long it remembers, see `remembered`: its recurrent weights are torch's
    times `weights`, or times what makes it remember about `memory` steps."""

    weights: float = 1
    memory: int = 0

    def keys(self) -> dict[str, Any]:
        more = {"memory": self.memory} if self.memory else {"weights": f"{self.weights:g}"}
        return {**super().keys(), **more}

    def prepare(self, step: LayerStep) -> None:
        """Scales the weights of both layers."""
        factor = factor_of(step.peer, self.memory) if self.memory else self.weights
        with torch.no_grad():
            for layer in (step.weft, step.peer):
                layer.weight_hh_l0.mul_(factor)


NEVER_FORGETS = (NewtonCase("rnn_tanh", 20, 16, 30000, inputs=1, algorithm="newton", weights=3),)
NEWTON = (
    *(
        NewtonCase("rnn_tanh", 20, 16, 30000, inputs=1, algorithm="newton", memory=m)
        for m in (50, 100, 200, 500, 1000, 3000)
    ),
    *NEVER_FORGETS,
    *(NewtonCase(cell, 20, 16, 10000, inputs=1, algorithm="newton") for cell in ("gru", "lstm")),
    NewtonCase("gru", 128, 16, 10000, algorithm="newton"),
)
AUTO_NEWTON = tuple(
    NewtonCase("rnn_tanh", H, B, T, inputs=1, weights=weights)
    for T, B, H, weights in itertools.product((1000, 5000, 30000), (1, 16, 64), (8, 20, 32), (1, 3))
)
"""Where "auto" may not take longer than it does without "newton", as far as 1.1 times."""


@torch.no_grad()
def remembered(layer: nn.RNNBase, factor: float = 1.0, most: int = 8000) -> int:
    """Steps until two walks from different states agree to 2^-22, in float64 on the CPU; `most` where they do not."""
    kind, extra = ("RNN", {"nonlinearity": layer.mode[4:].lower()}) if layer.mode[:3] == "RNN" else (layer.mode, {})
    wide = getattr(weft.nn, kind)(
        layer.input_size, layer.hidden_size, algorithm="persistent", dtype=torch.float64, **extra
    )
    wide.load_state_dict({name: value.double().cpu() for name, value in layer.state_dict().items()})
    wide.weight_hh_l0.mul_(factor)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(most, 1, layer.input_size, generator=generator, dtype=torch.float64).expand(-1, 4, -1)
    start = torch.randn(1, 4, layer.hidden_size, generator=generator, dtype=torch.float64)
    output, _ = wide(x.contiguous(), (start, start) if layer.mode == "LSTM" else start)
    apart = (output - output[:, :1]).abs().amax((1, 2)) > 2.0**-22
    return int(apart.nonzero()[-1, 0]) + 1 if apart.any() else 0


def factor_of(layer: nn.RNNBase, memory: int) -> float:
    """What the recurrent weights are multiplied by so that the layer remembers about so many steps."""
    low, high = 0.5, 4.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if remembered(layer, middle) < memory else (low, middle)
    return low


def newton_entry(case: NewtonCase) -> Entry:
    """A forward pass in chunks of time beside torch's and beside the scan's, and what a report says of it."""

    def run(results: Results) -> list[dict[str, str]]:
        step = LayerStep(case)
        case.prepare(step)
        say_algorithm(step)
        walk = getattr(weft.nn, type(step.peer).__name__)(
            case.inputs, case.H, algorithm="scan", device=case.device, dtype=DTYPES[case.dtype]
        )
        walk.load_state_dict(step.weft.state_dict())
        with weft.scan.newton_report() as report:
            step.forward(step.weft)
        print(f"{case.name}: remembers {remembered(step.peer)} steps\n{report}", flush=True)
        # A net that never forgets turns what is rounded in another way into other states.
        if case.memory or case.weights == 1:
            check_layers(step)
        layers = {"weft": step.weft, "scan": walk, "torch.nn": step.peer}
        times = measure(
            {name: Candidate(lambda _, layer=layer: step.forward(layer)) for name, layer in layers.items()},
            case.device, at_most=0.15,
        )  # fmt: skip
        ours = times.pop("weft")
        return [results.put(case.name, "forward", "ms", ours, name, theirs) for name, theirs in times.items()]

    return Entry(case.name, ("forward",), run)


def auto_entry(case: NewtonCase) -> Entry:
    """A forward pass as "auto" takes it beside the scan's alone, short, as there are many of them."""

    def run(results: Results) -> list[dict[str, str]]:
        torch.manual_seed(0)
        layer = weft.nn.RNN(case.inputs, case.H, device=case.device, dtype=DTYPES[case.dtype])
        with torch.no_grad():
            layer.weight_hh_l0.mul_(case.weights)
        walk = copy.deepcopy(layer)
        walk.algorithm = "scan"
        x = torch.randn(case.T, case.B, case.inputs, device=case.device, dtype=DTYPES[case.dtype])
        if case.weights == 1:  # one that never forgets turns what is rounded in another way into other states
            errors = {"output": relative_error(layer(x)[0], walk(x)[0])}
            check_agreement(case.name, errors, agreement_bound(case))
        candidates = {
            name: Candidate(lambda _, layer=layer: layer(x)[0]) for name, layer in (("weft", layer), ("scan", walk))
        }
        times = measure(candidates, case.device, at_most=0.05)
        return [results.put(case.name, "forward", "ms", times["weft"], "scan", times["scan"])]

    return Entry(case.name, ("forward",), run)
