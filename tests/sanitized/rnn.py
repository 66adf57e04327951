"""The recurrent engine: persistent kernels, the scan, newton, single steps."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import weft
from torch import nn
from weft._rnn.select.choice import CUDA_MAX_HIDDEN
from weft._rnn.select.costs import GATES
from weft._rnn.table import CELLS

from .common import FLOATS, backward, bfloat16, device, double, half, single, synchronize, tensors

# WEFT_RNN_GEOMETRY, dtype, TF32, H, B, T, directions, packed. A grid fetches what it exchanges six steps ahead.
RECURRENCES = [
    ("tier=small", single, True, 33, 5, 5, 2, False),
    ("tier=small product=fma", single, False, 33, 2, 5, 1, True),
    ("tier=cluster group=4 columns=3", bfloat16, True, 100, 5, 5, 2, True),
    ("tier=cluster group=4 columns=3 product=mma", single, False, 100, 5, 5, 1, False),
    ("tier=cluster group=4 columns=3 product=fma", single, False, 100, 5, 5, 2, True),
    ("tier=grid group=16 columns=2 directions=1 cluster=1", half, True, 200, 5, 9, 1, True),
    ("tier=grid group=16 columns=2 directions=2 cluster=1", single, True, 179, 3, 9, 2, False),
    ("tier=grid group=16 columns=2 product=fma directions=1 cluster=1", single, False, 179, 3, 9, 1, False),
    ("tier=grid group=32 columns=2 cluster=4", half, True, 256, 5, 9, 1, True),
    ("tier=grid group=16 columns=2 directions=1 cluster=2", single, False, 179, 3, 9, 2, False),
]


def variables(**given: Any) -> Any:
    """Of the environment, for a while."""
    return mock.patch.dict(os.environ, {name: str(value) for name, value in given.items()})


def recurrence(
    cell: str, geometry: str, dtype: torch.dtype, tf32: bool, H: int, B: int, T: int, directions: int, packed: bool
) -> None:
    inputs, gates = 3, GATES[cell]
    with variables(WEFT_RNN_GEOMETRY=geometry), torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        plan = weft._C.rnn.report(
            device=0, cell=cell, input_size=inputs, hidden_size=H, layers=1, dtype=str(dtype).removeprefix("torch."),
            directions=directions, steps=T, batch=B, packed=packed, trains=True,
        )  # fmt: skip
        assert all(f"tier={plan[name]['tier']}" in geometry for name in ("forward", "backward")), (cell, geometry, plan)
        sizes = torch.tensor([B] * (T - 2) + [max(1, B - 2)] * 2) if packed else None
        x, h = tensors((int(sizes.sum()), inputs) if packed else (T, B, inputs), (directions, B, H), dtype=dtype)
        shapes = [(gates * H, inputs), (gates * H, H), (gates * H,), (gates * H,)] * directions
        weights = tensors(*shapes, dtype=dtype, scale=H**-0.5)
        output, h_n, *_ = torch.ops.weft.rnn(
            x, h, h if cell == "lstm" else None, weights, sizes, cell=cell, bidirectional=directions == 2
        )
        torch.autograd.grad(output.float().sum() + h_n.float().sum(), [x, h, *weights])
    synchronize()


def layer_scan(
    cell: str, H: int, T: int, B: int, inputs: int, chunks: int, scale: float = 1.0, directions: int = 1,
    dtype: torch.dtype = single, geometry: str = "",
) -> None:  # fmt: skip
    rows, weights = GATES[cell] * H, []
    x, h = tensors((T, B, inputs), (directions, B, H), dtype=dtype)
    for _ in range(directions):
        w_ih, b_ih, b_hh = tensors((rows, inputs), (rows,), (rows,), dtype=dtype)
        weights += [w_ih, *tensors((rows, H), dtype=dtype, scale=scale * H**-0.5), b_ih, b_hh]
    with variables(WEFT_RNN_SCAN_CHUNKS=chunks, WEFT_RNN_GEOMETRY=geometry):
        output, h_n, *_ = torch.ops.weft.rnn(
            x, h, h if cell == "lstm" else None, weights, cell=cell, bidirectional=directions == 2, backward="scan"
        )
        torch.autograd.grad(output.float().square().sum() + h_n.float().sum(), [x, h, *weights])
    synchronize()


def recurrences() -> None:
    for cell in GATES:
        for case in RECURRENCES:
            recurrence(cell, *case)


def rnn_scan() -> None:
    for cell, most in CUDA_MAX_HIDDEN.items():
        for H in (5, 20, 31):
            layer_scan(cell, H, T=61, B=3, inputs=2, chunks=6)
            layer_scan(cell, H, T=37, B=2, inputs=7, chunks=1, directions=2)
        layer_scan(cell, 20, T=61, B=3, inputs=40, chunks=6, scale=9.0)  # chunks that are computed again
        layer_scan(cell, 20, T=40, B=2, inputs=3, chunks=1, dtype=double)
        layer_scan(cell, 41, T=33, B=2, inputs=3, chunks=5)
        layer_scan(cell, 41, T=33, B=2, inputs=3, chunks=1, geometry="tier=small group=2")  # none: torch's forward pass
        layer_scan(cell, 64, T=33, B=2, inputs=3, chunks=5, scale=9.0)
        layer_scan(cell, most, T=21, B=1, inputs=3, chunks=3)
        layer_scan(cell, 20, T=40, B=2, inputs=3, chunks=4, dtype=half)


def heads() -> None:
    """Of a block-diagonal recurrent matrix, in the persistent kernels, and the cell that has its own states."""
    layers = (
        (weft.nn.RNN, {}), (weft.nn.GRU, {}), (weft.nn.LSTM, {}), (weft.nn.SLSTM, {}),
        (weft.nn.SLSTM, {"forget_gate": "exp"}),
    )  # fmt: skip
    sizes = [(1, 24, single), (3, 7, single), (4, 64, bfloat16), (5, 17, half)]
    for i, (make, options) in enumerate(layers):  # kernels are compiled for each
        for k, (T, B, both) in enumerate(((6, 5, True), (9, 2, False))):
            count, size, dtype = sizes[(i + 2 * k) % 4]
            layer = make(
                3, count * size, num_heads=count, bidirectional=both, algorithm="persistent", device=device(),
                dtype=dtype, **options,
            )  # fmt: skip
            (x,) = tensors((T, B, 3), dtype=dtype)
            output, states = layer(x)
            backward(output, states)
            lengths = torch.tensor([T, *[T - 3] * (B - 1)])
            output, states = layer(nn.utils.rnn.pack_padded_sequence(x, lengths))
            backward(output.data, states)
    synchronize()


def by_newton(
    cell: str, H: int, T: int, B: int, chunks: int, scale: float = 1.0, dtype: torch.dtype = single, both: bool = False,
    begins: bool = True,
) -> None:  # fmt: skip
    """`scale`, of the recurrent weights, says how long the net remembers; `begins`: with states."""
    directions, rows = 2 if both else 1, GATES[cell] * H
    x, h, *weights = tensors(
        (T, B, 3), (directions, B, H), *[(rows, 3), (rows, H), (rows,), (rows,)] * directions, dtype=dtype
    )
    for w_hh in weights[1::4]:
        w_hh.data *= scale * H**-0.5 / 0.3
    h = h if begins else None
    with variables(WEFT_RNN_NEWTON_CHUNKS=chunks), weft.scan.newton_report():
        output, h_n, *_ = torch.ops.weft.rnn(
            x, h, h if cell == "lstm" else None, weights, cell=cell, bidirectional=both, backward="newton"
        )
        backward(output, h_n)


def newton() -> None:
    """Rounds until all seams meet, and what is left alone, in a warp and as rows of the persistent kernel."""
    for cell in CUDA_MAX_HIDDEN:
        for H in (5, 8, 20, 32):
            by_newton(cell, H, T=90, B=3, chunks=7)
        by_newton(cell, 20, T=60, B=2, chunks=5, both=True)
        by_newton(cell, 20, T=60, B=2, chunks=5, begins=False)
        by_newton(cell, 20, T=96, B=2, chunks=12, scale=1.5 if cell == "rnn_relu" else 12.0)
        by_newton(cell, 13, T=50, B=2, chunks=1)
        by_newton(cell, 20, T=60, B=2, chunks=5, dtype=bfloat16)
        by_newton(cell, 9, T=60, B=2, chunks=5, dtype=double)
        by_newton(cell, 48, T=60, B=2, chunks=5)
        by_newton(cell, 48, T=60, B=2, chunks=5, begins=False)
        by_newton(cell, 48, T=60, B=2, chunks=5, scale=1.5 if cell == "rnn_relu" else 12.0)
    synchronize()


def steps() -> None:
    """One step of the cells, and of the layers whose state is linear."""
    for cell, gates in GATES.items():
        others = CELLS[cell].others
        for dtype in FLOATS:
            for H, B, count in ((5, 3, 1), (33, 1, 1), (64, 20, 4), (24, 2, 3)):
                x, h, w_ih, w_hh, b_ih, b_hh = tensors(
                    (B, 7), (B, H), (gates * H, 7), (gates * H, H // count), (gates * H,), (gates * H,), dtype=dtype
                )
                c = tensors((B, others * H), dtype=dtype)[0] if others else None
                for biases in ((b_ih, b_hh), (None, None)):
                    h_next, c_next, _ = torch.ops.weft.rnn_cell(
                        x, h, c, w_ih, w_hh, *biases, cell=cell, num_heads=count
                    )
                    backward(h_next, c_next)
    for make, sizes in (
        (weft.nn.MinGRU, (7, 12)), (weft.nn.MinLSTM, (7, 12)), (weft.nn.RGLRU, (12,)), (weft.nn.LRU, (7, 12)),
        (weft.nn.S5, (7, 12)),
    ):  # fmt: skip
        layer = make(*sizes, device=device())
        state = None
        with torch.no_grad():
            for _ in range(3):
                _, state = layer(torch.randn(1, 5, sizes[0], device=device()), state)
        backward(layer(torch.randn(1, 5, sizes[0], device=device()), state)[0])
    synchronize()


PARTS = {"recurrence": recurrences, "rnn_scan": rnn_scan, "heads": heads, "newton": newton, "steps": steps}
