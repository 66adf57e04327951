"""torch's own recurrent kernels as one opaque op, for compiled and exported graphs.

Left to itself, torch.compile takes `aten.gru` and its kin apart into one copy of the cell per time step: compilation
takes minutes at a hundred steps, the graph is tied to one T, and cuDNN is not used.
Eager code goes to the kernels directly, by `call`, or by `call_with_any_derivative` where cuDNN's single derivative is
not enough. The schemas of the two ops are in csrc/registry.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._base.torch_private import RNN_KERNELS, autograd_inside_an_op, keeps_graph
from .. import reference
from ..select.case import Case
from .torch_limits import why_not_cudnn, why_not_onednn


def call(
    cell: str,
    input: Tensor,
    state: tuple[Tensor, ...] | list[Tensor],
    weights: list[Tensor],
    bias: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool = False,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """torch's kernel for the cell: output, h_n and, for an LSTM, c_n."""
    state = [s.contiguous() for s in state]  # cuDNN refuses any other
    hx = state if cell == "lstm" else state[0]
    kernel = RNN_KERNELS[cell]
    if batch_sizes is None:
        return kernel(input, hx, weights, bias, num_layers, dropout, training, bidirectional, batch_first)
    return kernel(input, batch_sizes, hx, weights, bias, num_layers, dropout, training, bidirectional)


def needs_any_derivative(case: Case) -> bool:
    """Whether torch's kernel runs by `call_with_any_derivative`: in float64 on CUDA, where "auto" takes cuDNN, whose
    backward pass has no derivative. In narrower dtypes its time on the host would show."""
    return case.device == "cuda" and case.dtype == torch.float64 and case.trains


def call_with_any_derivative(
    input: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    batch_sizes: Tensor | None,
    cell: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """output, h_n[, c_n] of torch's kernel, without dropout, for (T, B, I) or packed data; differentiable to any order,
    also where the kernel is differentiable once and, like cuDNN, while training alone."""
    options = {"cell": cell, "bias": bias, "num_layers": num_layers, "bidirectional": bidirectional}
    return _AnyDerivative.apply(options, batch_sizes, len(state), input, *state, *weights)


class _AnyDerivative(torch.autograd.Function):
    """The backward pass is that of torch's kernel; one that is to be differentiated itself is the reference's."""

    @staticmethod
    def forward(
        ctx: Any, options: dict[str, Any], batch_sizes: Tensor | None, states: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        # Detached, a tensor has the graph of its own and the version of the original: changes in place are noticed.
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(n) for t, n in zip(operands, ctx.needs_input_grad[3:], strict=True)]
            input, state, weights = leaves[0], leaves[1 : 1 + states], leaves[1 + states :]
            results = call(
                **options, input=input, state=state, weights=weights, dropout=0.0, training=True,
                batch_sizes=batch_sizes,
            )  # fmt: skip
        ctx.save_for_backward(batch_sizes, *operands)
        ctx.options, ctx.states = options, states
        ctx.graph = results, [t for t in leaves if t.requires_grad]
        # The graph may not lead back to ctx, which holds it.
        return tuple(r.detach() for r in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        batch_sizes, *operands = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        create_graph = torch.is_grad_enabled()
        keep_graph = keeps_graph()
        if create_graph:
            # The caller's operands may depend on each other, which is not for this function to differentiate.
            operands = [t.view_as(t) if n else t for t, n in zip(operands, needed, strict=True)]
            state, weights = operands[1 : 1 + ctx.states], operands[1 + ctx.states :]
            output, final = reference.rnn(operands[0], state, weights, batch_sizes=batch_sizes, **ctx.options)
            results, wanted = (output, *final), [t for t, n in zip(operands, needed, strict=True) if n]
        else:
            results, wanted = ctx.graph
        if not keep_graph:
            ctx.graph = None
        found = iter(
            torch.autograd.grad(
                results, wanted, grads, retain_graph=create_graph or keep_graph, create_graph=create_graph
            )
        )
        return None, None, None, *(next(found) if n else None for n in needed)


def _run(
    input: Tensor, state: list[Tensor], weights: list[Tensor], batch_sizes: Tensor | None, options: dict[str, Any],
    autocast: torch.dtype | None, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """output, h_n[, c_n] of torch's kernel in its dtypes; where that cannot run, which shows only when a compiled graph
    does, the reference's, rounded to `dtype`."""
    steps = input.size(0) if batch_sizes is None else batch_sizes.size(0)
    device, cell, units = input.device.type, options["cell"], state[-1].size(-1)
    projected = state[0].size(-1) != units
    rows, directions = input.shape[:-1].numel(), 2 if options["bidirectional"] else 1
    obstacle = why_not_cudnn(device, cell, units * directions, steps, rows)
    narrows = autocast is not None and input.dtype != torch.float64
    if narrows and (device, cell) == ("cpu", "lstm") and batch_sizes is None and not projected:
        obstacle = obstacle or why_not_onednn(autocast)
    if obstacle is not None:
        with torch.autocast(device, enabled=False):
            output, final = reference.rnn(input.to(dtype), state, weights, batch_sizes=batch_sizes, **options)
        return output, *final
    with torch.autocast(device, autocast, enabled=autocast is not None):
        return call(
            **options, input=input, state=state, weights=weights, dropout=0.0, training=True, batch_sizes=batch_sizes
        )


@torch.library.register_kernel("weft::torch_rnn", None)
def _torch_rnn(
    input: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    batch_sizes: Tensor | None,
    cell: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool,
    autocast: torch.dtype | None,
    dtype: torch.dtype,
    cell_dtype: torch.dtype,
) -> list[Tensor]:
    """output, h_n[, c_n] of torch's kernel, without dropout; `autocast` is the dtype of the autocast region that the
    call stands in, `dtype` and `cell_dtype` are those of output and h_n, and of c_n."""
    widest = torch.promote_types(dtype, cell_dtype)
    options = {"cell": cell, "bias": bias, "num_layers": num_layers, "bidirectional": bidirectional}
    result = _run(input, state, weights, batch_sizes, options, autocast, widest)
    return [r.to(d).contiguous() for r, d in zip(result, (dtype, dtype, cell_dtype), strict=False)]


@torch.library.register_fake("weft::torch_rnn")
def _torch_rnn_fake(
    input, state, weights, batch_sizes, cell, bias, num_layers, bidirectional, autocast, dtype, cell_dtype
):
    width = state[0].size(-1) * (2 if bidirectional else 1)
    shapes = [(*input.shape[:-1], width), *(s.shape for s in state)]
    return [input.new_empty(s, dtype=d) for s, d in zip(shapes, (dtype, dtype, cell_dtype), strict=False)]


@torch.library.register_kernel("weft::torch_rnn_backward", None)
def _torch_rnn_backward(
    grads: list[Tensor],
    needed: list[bool],
    input: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    batch_sizes: Tensor | None,
    cell: str,
    bias: bool,
    num_layers: int,
    bidirectional: bool,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    """Gradients of input, state and weights where `needed`, else an empty tensor.

    It runs the forward again: what cuDNN and oneDNN keep for backward has no form that a graph could carry."""
    split = 1 + len(state)
    widest = torch.promote_types(grads[0].dtype, grads[-1].dtype)
    options = {"cell": cell, "bias": bias, "num_layers": num_layers, "bidirectional": bidirectional}
    with autograd_inside_an_op(), torch.enable_grad():
        operands = [t.detach().requires_grad_(n) for t, n in zip([input, *state, *weights], needed, strict=True)]
        result = _run(operands[0], operands[1:split], operands[split:], batch_sizes, options, autocast, widest)
        wanted = [t for t in operands if t.requires_grad]
        grads = [g.to(r.dtype) for g, r in zip(grads, result, strict=True)]
        found = iter(torch.autograd.grad(result, wanted, grads, materialize_grads=True))
    # cuDNN's gradients of the weights share one buffer; results of an op must not.
    return [
        next(found).clone(memory_format=torch.contiguous_format) if n else t.new_empty(0)
        for t, n in zip(operands, needed, strict=True)
    ]


@torch.library.register_fake("weft::torch_rnn_backward")
def _torch_rnn_backward_fake(
    grads, needed, input, state, weights, batch_sizes, cell, bias, num_layers, bidirectional, autocast
):
    operands = [input, *state, *weights]
    return [t.new_empty(t.shape) if n else t.new_empty(0) for t, n in zip(operands, needed, strict=True)]


def _setup(ctx, inputs, output):
    input, state, weights, batch_sizes, cell, bias, num_layers, bidirectional, autocast, _, _ = inputs
    ctx.save_for_backward(input, *state, *weights, batch_sizes)
    ctx.states = len(state)
    ctx.rest = (cell, bias, num_layers, bidirectional, autocast)
    ctx.like = [(o.shape, o.dtype) for o in output]


def _backward(ctx, grads):
    input, *operands, batch_sizes = ctx.saved_tensors
    state, weights = operands[: ctx.states], operands[ctx.states :]
    grads = [
        input.new_zeros(shape, dtype=dtype) if g is None else g
        for g, (shape, dtype) in zip(grads, ctx.like, strict=True)
    ]
    needs_input, needs_state, needs_weights = ctx.needs_input_grad[:3]
    needed = [needs_input, *needs_state, *needs_weights]
    found = torch.ops.weft.torch_rnn_backward(grads, needed, input, state, weights, batch_sizes, *ctx.rest)
    masked = [g if n else None for g, n in zip(found, needed, strict=True)]
    return masked[0], masked[1 : 1 + ctx.states], masked[1 + ctx.states :], *[None] * 8


def _no_second_derivative(ctx, grads):
    raise NotImplementedError(
        'weft: torch\'s kernels are differentiable once in a compiled graph; algorithm="reference" is to any order'
    )


torch.library.register_autograd("weft::torch_rnn", _backward, setup_context=_setup)
torch.library.register_autograd("weft::torch_rnn_backward", _no_second_derivative)
