"""Layers that torch has not, several heads and sLSTM, beside the loop over their steps that a user would write."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import weft
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import DTYPES, check_agreement, relative_error
from benchmarks.layers import LayerCase, agreement_bound

__all__ = ["CAPTURED_STEPS", "HeadsCase", "HeadsStep", "flashrnn_step"]

CAPTURED_STEPS = 256
"""Of the loop in a CUDA graph: 1024 steps of it are some 100,000 nodes. Its time is that of T steps, scaled."""
KINDS = {"rnn_tanh": weft.nn.RNN, "gru": weft.nn.GRU, "lstm": weft.nn.LSTM, "slstm": weft.nn.SLSTM}


@dataclass(frozen=True)
class HeadsCase(LayerCase):
    """A layer of `heads`, of as many inputs as its H, which the name leaves out, and no initial state."""

    heads: int = 1
    initial_state: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", self.H)

    def keys(self) -> dict[str, Any]:
        keys = super().keys()
        del keys["inputs"]
        threads = {"threads": keys.pop("threads")} if "threads" in keys else {}
        return {**keys, "heads": self.heads, **threads}


class HeadsStep:
    """The layer and the loop on its parameters."""

    def __init__(self, case: HeadsCase) -> None:
        self.case, self.dtype = case, DTYPES[case.dtype]
        torch.manual_seed(0)
        options = {"device": case.device, "dtype": self.dtype, "num_heads": case.heads}
        self.weft = KINDS[case.cell](case.H, case.H, **options)
        self.weights = list(self.weft.parameters())
        self.x = torch.randn(case.T, case.B, case.H, device=case.device, dtype=self.dtype).requires_grad_()
        self.grad = torch.randn(case.T, case.B, case.H, device=case.device, dtype=self.dtype)

    def forward(self) -> Tensor:
        return self.weft(self.x)[0]

    def forward_backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), [self.x, *self.weights], self.grad)

    def loop(self, x: Tensor) -> Tensor:
        """The layer step by step, its input projected beforehand: as few operations a step as it takes."""
        w_ih, w_hh, b_ih, b_hh = self.weights
        gates = F.linear(x, w_ih, b_ih + b_hh if self.case.cell != "gru" else b_ih).unbind()
        heads, P = self.case.heads, w_hh.size(1)
        if heads == 1:
            right = w_hh.t()

            def recurrent(h: Tensor) -> Tensor:
                return h @ right
        else:
            blocks = w_hh.view(-1, heads, P, P).permute(1, 3, 0, 2).reshape(heads, P, -1)

            def recurrent(h: Tensor) -> Tensor:
                product = torch.bmm(h.view(-1, heads, P).transpose(0, 1), blocks)
                return product.view(heads, len(h), -1, P).permute(1, 2, 0, 3).reshape(len(h), -1)

        step = getattr(self, f"_{self.case.cell}")(b_hh)
        state = [x.new_zeros(x.size(1), self.case.H) for _ in range(4 if self.case.cell == "slstm" else 2)]
        outputs = []
        for gate in gates:
            state = step(gate, recurrent(state[0]), state)
            outputs.append(state[0])
        return torch.stack(outputs)

    def loop_forward_backward(self, steps: int) -> tuple[Tensor, ...]:
        # Leaves of its own: a captured graph must hold no other's nodes.
        x = self.x[:steps].detach().requires_grad_()
        return torch.autograd.grad(self.loop(x), [x, *self.weights], self.grad[:steps])

    @torch.no_grad()
    def products(self) -> list[Tensor]:
        """The matrix products of a training step and nothing else, each over all steps at once, which no recurrence
        allows: the least that a step takes at the rate of torch's products."""
        w_ih, w_hh = self.weights[0], self.weights[1]
        T, B, P = self.case.T, self.case.B, w_hh.size(1)
        x, heads = self.x.flatten(0, 1), self.case.heads
        blocks = w_hh.view(-1, heads, P, P).transpose(0, 1).reshape(heads, -1, P)
        h = x.view(T * B, heads, P).transpose(0, 1)
        gates = x @ w_ih.t()
        of_heads = gates.view(T * B, heads, -1).transpose(0, 1)
        return [gates, h @ blocks.mT, of_heads @ blocks, of_heads.mT @ h, gates @ w_ih, gates.t() @ x]

    def check(self, steps: int = 64) -> None:
        """That both compute the same, over some steps."""
        x = self.x.detach()[:steps].requires_grad_()
        mine = torch.autograd.grad(self.weft(x)[0], [x, *self.weights], self.grad[:steps])
        theirs = self.loop_forward_backward(steps)
        errors = {str(i): relative_error(a, b) for i, (a, b) in enumerate(zip(mine, theirs, strict=True))}
        check_agreement(self.case.name, errors, agreement_bound(self.case))

    Step = Callable[[Tensor, Tensor, list[Tensor]], list[Tensor]]

    @staticmethod
    def _lstm(_: Tensor) -> Step:
        def step(gate: Tensor, product: Tensor, state: list[Tensor]) -> list[Tensor]:
            i, f, g, o = (gate + product).chunk(4, 1)
            c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            return [torch.sigmoid(o) * torch.tanh(c), c]

        return step

    @staticmethod
    def _gru(b_hh: Tensor) -> Step:
        def step(gate: Tensor, product: Tensor, state: list[Tensor]) -> list[Tensor]:
            r, z, n = gate.chunk(3, 1)
            h_r, h_z, h_n = (product + b_hh).chunk(3, 1)
            z = torch.sigmoid(z + h_z)
            n = torch.tanh(n + torch.sigmoid(r + h_r) * h_n)
            return [n + z * (state[0] - n), state[1]]

        return step

    @staticmethod
    def _slstm(_: Tensor) -> Step:
        first = True

        def step(gate: Tensor, product: Tensor, state: list[Tensor]) -> list[Tensor]:
            nonlocal first
            i, f, z, o = (gate + product).chunk(4, 1)
            held = F.logsigmoid(f) + state[3]
            m = i if first else torch.maximum(held, i)
            first = False
            i, f = torch.exp(i - m), torch.exp(held - m)
            c = f * state[1] + i * torch.tanh(z)
            n = f * state[2] + i
            return [torch.sigmoid(o) * (c / n), c, n, m]

        return step


def flashrnn_step(step: HeadsStep) -> Callable[[], Any] | None:
    """Forward and backward by FlashRNN's fused kernels, where the package is installed and has the case."""
    try:
        from flashrnn import flashrnn
    except ImportError:
        return None
    case = step.case
    if case.cell not in ("lstm", "slstm", "gru") or case.device != "cuda" or case.dtype == "fp64":
        return None
    G, P = len(step.weights[1]) // case.H, case.H // case.heads
    options = {"device": case.device, "dtype": step.dtype}
    gates = torch.randn(case.B, case.T, G, case.heads, P, **options).requires_grad_()
    recurrent = (torch.randn(G, case.heads, P, P, **options) / math.sqrt(P)).requires_grad_()
    bias = torch.zeros(G, case.heads, P, **options).requires_grad_()
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[case.dtype]

    def run() -> Any:
        states = flashrnn(gates, recurrent, bias, function=case.cell, backend="cuda_fused", dtype=name)[0]
        return torch.autograd.grad(states[0].sum(), [gates, recurrent, bias])

    return run
