"""Recurrent layers beside torch's: their cases, what runs of them, and whether both compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import weft
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from benchmarks.common import DTYPES, Candidate, case_name, check_agreement, relative_error


@dataclass(frozen=True)
class LayerCase:
    """Recurrent layers of one kind and one input; `algorithm` is Weft's."""

    cell: str
    H: int
    B: int
    T: int
    inputs: int = 1
    dtype: str = "fp32"
    device: str = "cuda"
    algorithm: str = "auto"
    layers: int = 1
    directions: int = 1
    layout: str = ""
    """ "packed": B sequences, their lengths uniform in T / 16 to T; else all of them have T steps."""
    initial_state: bool = True
    """Whether an initial state is passed, and a gradient taken for it."""
    threads: int | None = None
    """Of the CPU; None for as many as torch has when the case is named."""

    def keys(self) -> dict[str, Any]:
        keys: dict[str, Any] = {"cell": self.cell, "device": self.device, "dtype": self.dtype}
        if self.layout:
            keys["layout"] = self.layout
        keys.update(H=self.H, B=self.B, T=self.T)
        if self.layers > 1:
            keys["layers"] = self.layers
        if self.directions > 1:
            keys["directions"] = self.directions
        keys["inputs"] = self.inputs
        if self.device == "cpu":
            keys["threads"] = self.threads or torch.get_num_threads()
        if self.algorithm != "auto":
            keys["algorithm"] = self.algorithm
        return keys

    @property
    def name(self) -> str:
        return case_name(**self.keys())


class LayerStep:
    """A layer of Weft's and one of torch's with the same weights, and the tensors they both train on."""

    def __init__(self, case: LayerCase) -> None:
        self.case = case
        options = {"device": case.device, "dtype": DTYPES[case.dtype]}
        torch.manual_seed(0)
        kind, extra = _layer_class(case.cell)
        extra.update(num_layers=case.layers, bidirectional=case.directions == 2)
        self.peer = getattr(nn, kind)(case.inputs, case.H, **extra, **options)
        self.weft = getattr(weft.nn, kind)(case.inputs, case.H, algorithm=case.algorithm, **extra, **options)
        self.weft.load_state_dict(self.peer.state_dict())
        self.batch_sizes = _batch_sizes(case) if case.layout == "packed" else None
        rows = (case.T, case.B) if self.batch_sizes is None else (int(self.batch_sizes.sum()),)
        self.x = torch.randn(*rows, case.inputs, **options).requires_grad_()
        states = (2 if case.cell == "lstm" else 1) if case.initial_state else 0
        shape = (case.layers * case.directions, case.B, case.H)
        self.state = [(0.5 * torch.randn(shape, **options)).requires_grad_() for _ in range(states)]
        self.grad = torch.randn(*rows, case.directions * case.H, **options)

    def input(self) -> Tensor | PackedSequence:
        return self.x if self.batch_sizes is None else PackedSequence(self.x, self.batch_sizes)

    def forward(self, layer: nn.Module) -> Tensor:
        state = (tuple(self.state) if len(self.state) == 2 else self.state[0]) if self.state else None
        output = layer(self.input(), state)[0]
        return output if self.batch_sizes is None else output.data

    def inference(self, layer: nn.Module) -> Tensor:
        with torch.no_grad():
            return self.forward(layer)

    def backward(self, layer: nn.Module, output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, [self.x, *self.state, *layer.parameters()], self.grad)

    def forward_backward(self, layer: nn.Module) -> tuple[Tensor, ...]:
        return self.backward(layer, self.forward(layer))

    def results(self, layer: nn.Module) -> dict[str, Tensor]:
        """The output and every gradient, by name."""
        output = self.forward(layer)
        states = ["grad_h0", "grad_c0"][: len(self.state)]
        names = ["grad_input", *states, *(f"grad_{name}" for name, _ in layer.named_parameters())]
        return {"output": output.detach(), **dict(zip(names, self.backward(layer, output), strict=True))}

    def candidates(self, metric: str) -> dict[str, Candidate]:
        return {"weft": self._candidate(self.weft, metric), "torch.nn": self._candidate(self.peer, metric)}

    def _candidate(self, layer: nn.Module, metric: str) -> Candidate:
        if metric == "forward":
            return Candidate(lambda _: self.forward(layer))
        if metric == "inference":
            layer.eval()
            return Candidate(lambda _: self.inference(layer))
        if metric == "backward":
            return Candidate(lambda output: self.backward(layer, output), lambda: self.forward(layer))
        return Candidate(lambda _: self.forward_backward(layer))

    def reference(self) -> dict[str, Tensor]:
        """What torch.nn gives in fp64 for exactly the same numbers."""
        exact = LayerStep(replace(self.case, dtype="fp64", algorithm="auto"))
        exact.peer.load_state_dict(self.peer.state_dict())
        exact.x = self.x.detach().double().requires_grad_()
        exact.state = [s.detach().double().requires_grad_() for s in self.state]
        exact.grad = self.grad.double()
        return exact.results(exact.peer)


def _layer_class(cell: str) -> tuple[str, dict[str, Any]]:
    if cell.startswith("rnn_"):
        return "RNN", {"nonlinearity": cell.removeprefix("rnn_")}
    return cell.upper(), {}


def _batch_sizes(case: LayerCase) -> Tensor:
    """Sequences at each step, (steps of the longest) on the CPU: the same lengths in every run."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(max(1, case.T // 16), case.T + 1, (case.B,), generator=generator)
    return (lengths > torch.arange(int(lengths.max()))[:, None]).sum(1)


def relative_errors(values: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative error of each tensor, by name."""
    return {name: relative_error(values[name], reference[name]) for name in reference}


def agreement_bound(case: LayerCase) -> float:
    """How far two right results may lie apart; torch's own fp32 layers use TF32 by default on a GPU."""
    tf32 = case.device == "cuda" and torch.backends.cudnn.allow_tf32
    return {"fp64": 1e-9, "fp32": 2e-2 if tf32 else 1e-4, "fp16": 5e-2, "bf16": 2e-1}[case.dtype]


def check_layers(step: LayerStep, *, inference: bool = False) -> None:
    """Both layers compute the same, as far as the dtype goes.

    Args:
        step: the layers.
        inference: compare what they return without gradients, not the training step.

    Raises:
        RuntimeError: they do not.
    """
    if inference:
        errors = {"output": relative_error(step.inference(step.weft), step.inference(step.peer))}
    else:
        errors = relative_errors(step.results(step.weft), step.results(step.peer))
    check_agreement(step.case.name, errors, agreement_bound(step.case))


def say_algorithm(step: LayerStep) -> None:
    """A row is about what "auto" takes; here is what that was, where it is not this engine."""
    with torch.set_grad_enabled(step.weft.training):
        taken = weft.explain(step.weft, step.input())
    if taken.algorithm != "persistent":
        print(f"{step.case.name}: auto takes {taken.algorithm} ({taken.reason})", flush=True)
