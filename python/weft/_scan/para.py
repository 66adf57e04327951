"""ParaGRU and ParaLSTM: recurrent layers whose gates look at their own channel's state alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from .._base.arguments import NotScriptable, constructor
from .._base.over_ranks import TakesSlices
from .._base.torch_private import any_autocast, constant_when_compiled, differentiated_by_transform, in_transform
from . import tuned
from .layer_input import check_padded, check_start
from .pointwise import ALGORITHMS
from .step_trace import traced

__all__ = ["ParaGRU", "ParaLSTM"]


def _gru_step(h: Tensor, x: Sequence[Tensor], p: Sequence[Tensor]) -> Tensor:
    z, r = torch.sigmoid(x[0] + p[0] * h), torch.sigmoid(x[1] + p[1] * h)
    return h + z * (torch.tanh(x[2] + p[2] * (r * h)) - h)


def _lstm_step(state: tuple[Tensor, Tensor], x: Sequence[Tensor], p: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    h, c = state
    f = torch.sigmoid(x[0] + p[0] * h + p[3] * c)
    c = f * c + (1 - f) * torch.tanh(x[1] + p[1] * h)
    o = torch.sigmoid(x[2] + p[2] * h + p[4] * c)
    return o * torch.tanh(c), c


_STEPS = {"paragru": (_gru_step, 1, 3), "paralstm": (_lstm_step, 2, 5)}
"""Step, states and parameters by the name that reports have."""


@constant_when_compiled
def _program(name: str) -> str:
    return _traced(name)


@functools.cache
def _traced(name: str) -> str:
    """The text of a cell's step, which does not depend on sizes."""
    step, states, parameters = _STEPS[name]
    shape = torch.Size((2,))
    found = traced(name, step, states, 3, (states == 1, False, False), torch.float32, shape, [shape] * parameters)
    assert found.program is not None, found.obstacle
    return found.program


class Operands(NamedTuple):
    """What the scan of a layer takes."""

    gates: Tensor
    """(T, B, blocks, 3, H / blocks)"""
    h: Sequence[Tensor]
    """The states before the first step, each (B, H)."""
    parameters: Sequence[Tensor]
    """Each (H)."""


class _Para(NotScriptable, TakesSlices, nn.Module):
    """What both layers share: the projection, layouts and the state."""

    _name: str
    _parts: tuple[str, ...]
    """What the states are called."""

    @constructor
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        blocks: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        algorithm: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        for argument, size in (("input_size", input_size), ("hidden_size", hidden_size), ("blocks", blocks)):
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"{name}: {argument} must be an int, got {type(size).__name__}")
            if size <= 0:
                raise ValueError(f"{name}: {argument} must be positive, got {size}")
        if input_size % blocks or hidden_size % blocks:
            raise ValueError(
                f"{name}: blocks must divide input_size {input_size} and hidden_size {hidden_size}, got {blocks}"
            )
        if algorithm not in ALGORITHMS:
            raise ValueError(f"{name}: algorithm must be one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
        self.input_size, self.hidden_size, self.blocks = input_size, hidden_size, blocks
        self.batch_first, self.algorithm = batch_first, algorithm
        width = 3 * hidden_size // blocks
        made = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(blocks, width, input_size // blocks, **made))
        if bias:
            self.bias = nn.Parameter(torch.empty(blocks, width, **made))
        else:
            self.register_parameter("bias", None)
        self.recurrent = nn.Parameter(torch.empty(3, hidden_size, **made))
        if len(self._parts) == 2:
            self.peephole = nn.Parameter(torch.empty(2, hidden_size, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew, uniform: weight and bias within ``(input_size / blocks) ** -0.5``, the others
        within 0.5."""
        bound = (self.input_size // self.blocks) ** -0.5
        for name, p in self.named_parameters(recurse=False):
            nn.init.uniform_(p, *((-bound, bound) if name in ("weight", "bias") else (-0.5, 0.5)))

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        if self.blocks > 1:
            text += f", blocks={self.blocks}"
        if self.bias is None:
            text += ", bias=False"
        if self.batch_first:
            text += ", batch_first=True"
        return text if self.algorithm == "auto" else f"{text}, algorithm={self.algorithm!r}"

    def _gates(self, x: Tensor) -> Tensor:
        """(T, B, blocks, 3, H / blocks) of x (T, B, X)."""
        if self.blocks == 1:
            gates = F.linear(x, self.weight[0], None if self.bias is None else self.bias[0]).unsqueeze(2)
        else:
            gates = torch.einsum("tbki,koi->tbko", x.unflatten(-1, (self.blocks, -1)), self.weight)
            if self.bias is not None:
                gates = gates + self.bias.to(gates.dtype)
        return gates.unflatten(-1, (3, self.hidden_size // self.blocks))

    def _recurrent(self) -> tuple[Tensor, ...]:
        parameters = self.recurrent.unbind()
        return (*parameters, *self.peephole.unbind()) if len(self._parts) == 2 else parameters

    def _check_input(self, input: Tensor) -> bool:
        """Refuse what the layer does not take; whether it has a batch."""
        pad = "pad its sequences: input.to_padded_tensor(0.0)"
        return check_padded(type(self).__name__, input, self.input_size, self.batch_first, self.weight, pad)

    def _initial(self, hx: Any) -> Sequence[Tensor | None]:
        """The states that `hx` names, None for zeros."""
        raise NotImplementedError

    def _operands(self, input: Tensor, initial: Sequence[Tensor | None]) -> Operands:
        """What the scan takes, of arguments that fit."""
        name, batch = type(self).__name__, 0 if self.batch_first else 1
        batched = self._check_input(input)
        layout = "B, T" if self.batch_first else "T, B"
        x = input if batched else input.unsqueeze(batch)
        gates = self._gates(x.transpose(0, 1) if self.batch_first else x)
        B = gates.shape[1]
        parameters = self._recurrent()
        if any_autocast() and torch.is_autocast_enabled(gates.device.type):
            # Computed in float32 whatever the gates are, so that nothing is lost in them.
            parameters = tuple(p.to(gates.dtype) for p in parameters)
        h = []
        for part, state in zip(self._parts, initial, strict=True):
            shape = (B, self.hidden_size)
            if state is None:
                h.append(gates.new_zeros(shape))
                continue
            check_start(name, part, state, gates.device)
            want = shape if batched else shape[1:]
            if state.shape != want:
                raise ValueError(
                    f"{name}: {part} must be {tuple(want)}, got {tuple(state.shape)}; it is (B, H), or (H) unbatched, "
                    f"to go with input ({layout}, {self.input_size}), as batch_first is {self.batch_first}"
                )
            if torch.is_autocast_enabled(state.device.type):
                state = state.to(gates.dtype)
            if state.dtype != gates.dtype:
                raise TypeError(f"{name}: {part} must be {gates.dtype}, as the states are, got {state.dtype}")
            h.append(state.expand(shape))
        return Operands(gates, h, parameters)

    def _run(self, input: Tensor, initial: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """The output, and the states after the last step, laid out as the user sees them."""
        name, ranks = type(self).__name__, self._over_ranks
        if ranks is not None:
            if isinstance(input, PackedSequence):
                raise ValueError(f"{name}: a layer over ranks takes no PackedSequence")
            ranks.check_own(name, input=input, **dict(zip(self._parts, initial, strict=True)))
        # Checked on every rank, because one that raises alone leaves the others waiting.
        operands = self._operands(input, initial)
        if ranks is not None and not any(ranks.reads(state) for state in initial):
            operands = operands._replace(h=[torch.zeros_like(h) for h in operands.h])
        if ranks is None:
            states = self._scan(operands, self.algorithm)
            # Not views of the last: they would hold all states.
            last = [s[-1].clone() for s in states] if len(operands.gates) else [t.clone() for t in operands.h]
        else:
            algorithm = "walk" if self.algorithm == "reference" else self.algorithm
            gates, h, parameters = operands
            all_states, end = ranks.walk_pointwise(
                _program(self._name), algorithm, name, self._stacked(gates), list(h), list(parameters)
            )
            states, last = all_states.unbind(1), end.unbind()
        output = states[0]
        if self.batch_first:
            output = output.transpose(0, 1)
        if input.dim() == 3:
            return output, last
        return output.squeeze(0 if self.batch_first else 1), [t.squeeze(0) for t in last]

    def _scan(self, operands: Operands, algorithm: str) -> Sequence[Tensor]:
        gates, h, parameters = operands
        if algorithm == "reference" or (
            not torch.compiler.is_compiling()
            and (in_transform() or differentiated_by_transform(gates, *h, *parameters))
        ):
            return self._loop(gates, h, parameters)
        program = _program(self._name)
        if algorithm == "auto" and not torch.compiler.is_compiling():
            algorithm = tuned.chosen(lambda: self._kind_of(operands))
        return torch.ops.weft.pointwise_scan(
            list(h), [self._stacked(gates)], list(parameters), program, True, False, algorithm, self._name
        )

    def _kind_of(self, operands: Operands) -> tuned.Kind:
        """What decides between algorithms."""
        gates, h, parameters = operands
        T, B = gates.shape[:2]
        trains = tuned.trains((gates, *h, *parameters))
        return tuned.Kind(_traced(self._name), T, B * self.hidden_size, gates.device, gates.dtype, trains)

    def _kind(self, input: Tensor, hx: Tensor | Sequence[Tensor] | None) -> tuned.Kind:
        """The same of a call whose arguments fit; nothing is computed."""
        across = self.batch_first and input.dim() == 3
        T, B = input.shape[1 if across else 0], input.shape[0 if across else 1] if input.dim() == 3 else 1
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(input.device.type)
        states = () if hx is None else (hx,) if isinstance(hx, Tensor) else hx
        trains = tuned.trains((input, *states, *self.parameters()))
        return tuned.Kind(_traced(self._name), T, B * self.hidden_size, input.device, dtype, trains)

    def _stacked(self, gates: Tensor) -> Tensor:
        """As weft::pointwise_scan takes them."""
        T, B, blocks, three, width = gates.shape
        return gates.reshape(T, B * blocks, three, width)

    def _loop(self, gates: Tensor, h: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """The reference."""
        step, states, _ = _STEPS[self._name]
        dtype = gates.dtype
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        steps = gates.to(acc).movedim(3, 1).flatten(3).unbind()  # each (3, B, H)
        parameters = [p.to(acc) for p in parameters]
        state, found = tuple(t.to(acc) for t in h), []
        for x in steps:
            after = step(state[0] if states == 1 else state, x.unbind(), parameters)
            state = (after,) if states == 1 else after
            found.append(state)
        if not found:
            return [t.new_empty((0, *t.shape)) for t in h]
        return [torch.stack(s).to(dtype) for s in zip(*found, strict=True)]


class ParaGRU(_Para):
    """A GRU whose gates look at the state of their own channel alone.

    z[t] = sigmoid(W_z x[t] + b_z + a_z h[t-1]),  r[t] = sigmoid(W_r x[t] + b_r + a_r h[t-1])
    c[t] = tanh(W_c x[t] + b_c + a_c r[t] h[t-1]),  h[t] = h[t-1] + z[t] (c[t] - h[t-1])

    Args:
        input_size: X, features of the input.
        hidden_size: H, features of the state.
        blocks: W is block-diagonal, with so many blocks; a divisor of X and H. Default: 1, which is full.
        bias: with b. Default: True.
        batch_first: batched input and output are ``(B, T, features)``; states are not. Default: False.
        algorithm: of :func:`weft.scan.pointwise_scan`. Default: ``"auto"``.
        device, dtype: of the parameters.

    ``weight`` is ``(blocks, 3 H / blocks, X / blocks)``, in every block the rows of z, then r, then c; ``bias`` is
    ``(blocks, 3 H / blocks)``; ``recurrent`` is ``(3, H)``: a_z, a_r, a_c.

    Source: Danieli et al., "ParaRNN: Unlocking Parallel Training of Nonlinear RNNs for Large Language Models" (2025).

    Example:
        >>> layer = weft.nn.ParaGRU(10, 20)
        >>> output, h_n = layer(torch.randn(500, 3, 10))
        >>> output.shape, h_n.shape
        (torch.Size([500, 3, 20]), torch.Size([3, 20]))
    """

    _name, _parts = "paragru", ("h_0",)

    def forward(self, input: Tensor, h_0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            input: ``(T, B, input_size)``; ``(B, T, input_size)`` with `batch_first`; ``(T, input_size)`` unbatched.
            h_0: state before the first step, ``(B, hidden_size)``, without the B unbatched; None for zeros.

        Returns:
            ``output``, the states after every step, laid out like the input and ``hidden_size`` wide; and ``h_n``, the
            last of them, laid out like `h_0`, to go on from.

        Raises:
            TypeError: an argument is no tensor, or a dtype does not fit.
            ValueError: a rank or a size does not fit.
            RuntimeError: devices differ.
        """
        output, (h_n,) = self._run(input, self._initial(h_0))
        return output, h_n

    def _initial(self, hx: Any) -> Sequence[Tensor | None]:
        return (hx,)


class ParaLSTM(_Para):
    """An LSTM whose gates look at the state of their own channel alone, with one gate for forgetting and input.

    f[t] = sigmoid(W_f x[t] + b_f + a_f h[t-1] + p_f c[t-1])
    c[t] = f[t] c[t-1] + (1 - f[t]) tanh(W_c x[t] + b_c + a_c h[t-1])
    o[t] = sigmoid(W_o x[t] + b_o + a_o h[t-1] + p_o c[t]),  h[t] = o[t] tanh(c[t])

    Args:
        input_size: X, features of the input.
        hidden_size: H, features of the state.
        blocks: W is block-diagonal, with so many blocks; a divisor of X and H. Default: 1, which is full.
        bias: with b. Default: True.
        batch_first: batched input and output are ``(B, T, features)``; states are not. Default: False.
        algorithm: of :func:`weft.scan.pointwise_scan`. Default: ``"auto"``.
        device, dtype: of the parameters.

    ``weight`` is ``(blocks, 3 H / blocks, X / blocks)``, in every block the rows of f, then c, then o; ``bias`` is
    ``(blocks, 3 H / blocks)``; ``recurrent`` is ``(3, H)``: a_f, a_c, a_o; ``peephole`` is ``(2, H)``: p_f, p_o.

    Source: Danieli et al., "ParaRNN: Unlocking Parallel Training of Nonlinear RNNs for Large Language Models" (2025).

    Example:
        >>> layer = weft.nn.ParaLSTM(10, 20)
        >>> output, (h_n, c_n) = layer(torch.randn(500, 3, 10))
    """

    _name, _parts = "paralstm", ("h_0", "c_0")

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the layer.

        Args:
            input: ``(T, B, input_size)``; ``(B, T, input_size)`` with `batch_first`; ``(T, input_size)`` unbatched.
            hx: (h_0, c_0), states before the first step, each ``(B, hidden_size)``, without the B unbatched; None for
                zeros.

        Returns:
            ``output``, h after every step, laid out like the input and ``hidden_size`` wide; and ``(h_n, c_n)``, the
            states after the last, laid out like those of `hx`, to go on from.

        Raises:
            TypeError: an argument is no tensor, or a dtype does not fit.
            ValueError: a rank or a size does not fit.
            RuntimeError: devices differ.
        """
        output, (h_n, c_n) = self._run(input, self._initial(hx))
        return output, (h_n, c_n)

    def _initial(self, hx: Any) -> Sequence[Tensor | None]:
        if hx is not None and (not isinstance(hx, (tuple, list)) or len(hx) != 2):
            got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
            raise TypeError(f"ParaLSTM: hx must be a tuple (h_0, c_0) of Tensors, got {got}")
        return (None, None) if hx is None else hx
