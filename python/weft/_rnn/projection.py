"""The LSTM whose state is projected (``proj_size``) on the operator weft::rnn, which has no projection.

LSTMP: Sak, Senior and Beaufays, "Long short-term memory recurrent neural network architectures for large scale acoustic
modeling", Interspeech 2014. The cells' output m[t] = o tanh(c[t]) (H) is projected to r[t] = W_hr m[t] (P), the layer's
output and what the next step reads:

    gates[t] = W_ih x[t] + b + W_hh r[t-1] = W_ih x[t] + b + (W_hh W_hr) m[t-1]    from the second step on.

This is an LSTM without projection that has the output m and the recurrent weight W_hh W_hr (4H, H); r is one product
over all its steps. An initial state r[-1] = h0 is the projection of no m: it enters the first step through P more
inputs with the weight W_hh, which are zeros at all others. With two directions each has the other's, too, with the
weight zero: what is infinite there is NaN here.

The two products with W_hr are torch's matrix products, in their precision (torch.backends.cuda.matmul). They, the
concatenations and the selection of rows stand here and not inside the operator because they are some calls per layer,
none per step, and because here torch differentiates them, to any order and under its transforms: inside, each would
need a derivative written by hand and nothing would be faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_rnn = torch.ops.weft.rnn.default
_captured: list[Tensor] = []  # what captured CUDA graphs read


def lstm(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weights: list[Tensor],
    batch_sizes: Tensor | None,
    *,
    bidirectional: bool,
    keep_cells: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer of an LSTM with projection; of any order differentiable in all floating-point arguments.

    T steps, B sequences, D = 2 directions if bidirectional, else 1; one dtype.

    Args:
        input: ``(T, B, I)``, T at least 1, or packed ``(N, I)``.
        h0, c0: ``(D, B, P)`` and ``(D, B, H)``, or both None for zeros.
        weights: for each direction w_ih ``(4H, I)``, w_hh ``(4H, P)``, where there are biases b_ih ``(4H)`` and b_hh
            ``(4H)``, and w_hr ``(P, H)``.
        batch_sizes: packed: sequences running at each step, ``(T,)``, int64 on the CPU, as in weft::rnn.
        keep_cells: whether cells are asked for.

    Returns:
        output ``(T, B, D P)`` or ``(N, D P)``; h_n ``(D, B, P)``, rows of it; c_n ``(D, B, H)``; cells
        ``(T, B, D H)`` or ``(N, D H)``, undefined unless asked for.

    Raises:
        What weft::rnn raises.
    """
    directions = 2 if bidirectional else 1
    stride = len(weights) // directions
    per_direction = [weights[d * stride : (d + 1) * stride] for d in range(directions)]
    projections = [w[-1] for w in per_direction]
    composed = []
    for direction, (w_ih, w_hh, *biases, w_hr) in enumerate(per_direction):
        if h0 is not None:
            blocks = [w_hh if d == direction else torch.zeros_like(w_hh) for d in range(directions)]
            w_ih = torch.cat([w_ih, *blocks], 1)
        composed += [w_ih, w_hh @ w_hr, *biases]
    ends = None
    if h0 is not None and c0 is not None:
        ends = _last_rows(batch_sizes, h0.size(1), input.device)
        input = torch.cat([input, *_at_first_steps(h0, input, ends)], -1)
        h0 = torch.zeros_like(c0)
    states, _, c_n, cells, _ = _rnn(
        input, h0, c0, composed, batch_sizes, cell="lstm", bidirectional=bidirectional, keep_cells=keep_cells
    )
    if ends is None:
        ends = _last_rows(batch_sizes, c_n.size(1), input.device)
    outputs = [F.linear(m, w_hr) for m, w_hr in zip(states.chunk(directions, -1), projections, strict=True)]
    h_n = torch.stack(_at_last_steps(outputs, ends))
    return outputs[0] if directions == 1 else torch.cat(outputs, -1), h_n, c_n, cells


def _at_first_steps(h0: Tensor, input: Tensor, ends: Tensor | None) -> list[Tensor]:
    """For each direction h0 at each sequence's first step, and zeros elsewhere: like the input, P wide. `ends` are the
    rows of packed sequences' last steps."""
    more = input.size(0) - (1 if ends is None else h0.size(1))
    first = h0[:1] if ends is None else h0[0]
    after = (0, 0) * (first.dim() - 1)
    entering = [F.pad(first, (*after, 0, more))]
    if h0.size(0) == 1:
        return entering
    if ends is None:
        return [*entering, F.pad(h0[1:], (*after, more, 0))]
    # One row more than there are takes what wrong batch_sizes would write outside; the operator then refuses them.
    rows = input.size(0)
    spare = h0.new_zeros(rows + 1, h0.size(2))
    return [*entering, spare.index_copy(0, ends.clamp(0, rows), h0[1])[:rows]]


def _at_last_steps(outputs: list[Tensor], ends: Tensor | None) -> list[Tensor]:
    """For each direction the output (B, P) at the step that it takes last."""
    if ends is None:
        return [output[last] for output, last in zip(outputs, (-1, 0), strict=False)]
    # The second direction's are the first B rows. Where B is unknown, a compiled graph cannot differentiate a slice.
    rows = ends, torch.arange(ends.size(0), device=ends.device)
    return [output.index_select(0, last) for output, last in zip(outputs, rows, strict=False)]


def _last_rows(batch_sizes: Tensor | None, batch: int, device: torch.device) -> Tensor | None:
    """The row (B,) of each sequence's last step in packed data; None for padded."""
    if batch_sizes is None:
        return None
    sequences = torch.arange(batch, device=batch_sizes.device)
    lengths = batch_sizes.size(0) - torch.searchsorted(batch_sizes.flip(0), sequences, right=True)
    offsets = batch_sizes.cumsum(0) - batch_sizes
    rows = offsets[lengths - 1] + sequences
    if device.type == "cuda" and not torch.compiler.is_compiling():
        # From pinned memory the copy needs no synchronisation; a captured one reads that memory whenever its graph is
        # replayed, so that it must stay.
        rows = rows.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            _captured.append(rows)
    return rows.to(device, non_blocking=True)
