"""What one rank does of a scan over slices of time: its likes are a stand-in that answers at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import weft
import weft.distributed as wd
from weft._distributed.stand_in import StandIn

from .common import backward, bfloat16, device, double, half, single, synchronize, tensors


def diagonal(group: StandIn) -> None:
    """Kernels are those of a type wherever the rank is: all types in the middle, of the others one."""
    middle = group.rank == 2
    for dtype in (single, half, bfloat16, double) if middle else (single,):
        for T, B, H in ((7, 2, 3), (150, 3, 33), (40, 2, 300)):
            for reverse in (False, True):
                A, b, x0 = tensors((T, B, H), (T, B, H), (B, H), dtype=dtype)
                backward(wd.linear_scan(A, b, x0, group=group, reverse=reverse))
                backward(wd.linear_scan(A, b, group=group, reverse=reverse))
    # Of so many channels that each has a lane that mends it.
    for dtype in (single, bfloat16, double) if middle else ():
        for reverse in (False, True):
            A, b, x0 = tensors((40, 3, 2880), (40, 3, 2880), (3, 2880), dtype=dtype)
            backward(wd.linear_scan(A, b, x0, group=group, reverse=reverse))
            with torch.no_grad():
                wd.linear_scan(A, b, x0, group=group, reverse=reverse)
    for dtype in (torch.complex64, torch.complex128):
        A, b, x0 = tensors((37, 2, 5), (37, 2, 5), (2, 5), dtype=dtype)
        backward(wd.linear_scan(A, b, x0, group=group))
        backward(wd.linear_scan(A[0, 0], b, group=group, reverse=True))


def dense(group: StandIn) -> None:
    for dtype in (single, half, bfloat16, double) if group.rank == 2 else (single,):
        for T, B, H in ((37, 2, 5), (50, 3, 20), (30, 1, 33)):
            for flags in ({}, {"transpose": True}, {"reverse": True}):
                A, b, x0 = tensors((T, B, H, H), (T, B, H), (B, H), dtype=dtype, scale=H**-0.5)
                backward(wd.linear_scan(A, b, x0, group=group, **flags))
        (A,) = tensors((20, 8, 8), dtype=dtype)
        backward(wd.linear_scan(A, tensors((20, 3, 8), dtype=dtype)[0], group=group))
    if group.rank == 0:  # the gradient of whose likes is read
        grad, *jacobians = tensors((2, 12), *[(2, 12, 12)] * 6)
        backward(*wd.chain_backward(grad, jacobians, group=group))


def layers(group: StandIn) -> None:
    for make, sizes in (
        (weft.nn.MinGRU, (6, 12)), (weft.nn.MinLSTM, (6, 12)), (weft.nn.RGLRU, (6,)), (weft.nn.RNN, (6, 12)),
        (weft.nn.GRU, (6, 20)), (weft.nn.LSTM, (6, 12)), (weft.nn.ParaGRU, (6, 12)), (weft.nn.ParaLSTM, (6, 12)),
    ):  # fmt: skip
        layer = wd.shard_time(make(*sizes, device=device()), group)
        (x,) = tensors((60, 3, 6))
        output, state = layer(x)
        backward(output, state)


def backward_halves() -> None:
    """The backward pass of a slice of each cell, before and after what is exchanged."""
    for cell, states in (("gru", 1), ("lstm", 2), ("rnn_tanh", 1), ("rnn_relu", 1)):
        for H in (5, 20):
            halves(cell, states, H)
    synchronize()


def halves(cell: str, states: int, H: int, T: int = 45, B: int = 3, chunks: int = 5) -> None:
    rows = weft._C.rnn.cells[cell]["gates"] * H
    x, h, c, grad, *weights = tensors(
        (T, B, 3), (1, B, H), (1, B, H), (T, B, H), (rows, 3), (rows, H), (rows,), (rows,)
    )
    c = c if states == 2 else None
    with torch.no_grad():
        output, _, _, cells, gates = torch.ops.weft.rnn(
            x, h, c, weights, cell=cell, keep_cells=states == 2, save=True, backward="scan"
        )
        known = x, h, c, weights, output, cells, gates
        maps, *_ = torch.ops.weft.rnn_slice_maps(grad, *known, chunks, cell=cell)
        mask = [True, True, states == 2, *(True for _ in weights)]
        torch.ops.weft.rnn_slice_backward(maps, grad, h, c, *known, chunks, cell=cell, output_mask=mask)


def on_ranks(run: Callable[[StandIn], None]) -> Callable[[], None]:
    """Of four ranks the first, one in the middle and the last."""

    def part() -> None:
        for rank in (0, 2, 3):
            group = StandIn(rank, 4)
            try:
                run(group)
            finally:
                group.close()
        synchronize()

    return part


PARTS = {
    "slices": on_ranks(diagonal), "slices_dense": on_ranks(dense), "slices_layers": on_ranks(layers),
    "slices_halves": backward_halves,
}  # fmt: skip
