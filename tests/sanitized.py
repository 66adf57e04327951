"""The CUDA kernels on small cases, for `make sanitize`, which runs this under the tools of compute-sanitizer.

What the kernels give is for the tests; here they only have to run: every kind of kernel, chunks that are computed
again, each tier and each way of the recurrence kernel where it is asked for.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import weft
from torch import Tensor
from weft._rnn.choice import CUDA_MAX_HIDDEN
from weft._rnn.costs import GATES

half, bfloat16, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64

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


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = single, scale: float = 0.3) -> list[Tensor]:
    return [(scale * torch.randn(shape, device="cuda")).to(dtype).requires_grad_() for shape in shapes]


def recurrence(
    cell: str, geometry: str, dtype: torch.dtype, tf32: bool, H: int, B: int, T: int, directions: int, packed: bool
) -> None:
    inputs, gates = 3, GATES[cell]
    os.environ["WEFT_RNN_GEOMETRY"] = geometry
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        plan = weft._C.rnn_plan(
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
    torch.cuda.synchronize()


def layer_scan(
    cell: str, H: int, T: int, B: int, inputs: int, chunks: int, scale: float = 1.0, directions: int = 1,
    dtype: torch.dtype = single, geometry: str = "",
) -> None:  # fmt: skip
    os.environ["WEFT_RNN_SCAN_CHUNKS"] = str(chunks)
    os.environ["WEFT_RNN_GEOMETRY"] = geometry
    rows, weights = GATES[cell] * H, []
    x, h = tensors((T, B, inputs), (directions, B, H), dtype=dtype)
    for _ in range(directions):
        w_ih, b_ih, b_hh = tensors((rows, inputs), (rows,), (rows,), dtype=dtype)
        weights += [w_ih, *tensors((rows, H), dtype=dtype, scale=scale * H**-0.5), b_ih, b_hh]
    output, h_n, *_ = torch.ops.weft.rnn(
        x, h, h if cell == "lstm" else None, weights, cell=cell, bidirectional=directions == 2, backward="scan"
    )
    torch.autograd.grad(output.float().square().sum() + h_n.float().sum(), [x, h, *weights])
    torch.cuda.synchronize()


def linear_scan(
    T: int, B: int, H: int, diagonal: bool, transpose: bool = False, dtype: torch.dtype = single, window: bool = False
) -> None:
    size = H + 1 if window else H  # in a window, lines begin anywhere and do not touch each other
    A, b, x0 = tensors((T, B, H) if diagonal else (T, B, size, size), (T, B, size), (B, H), dtype=dtype, scale=H**-0.5)
    if window:
        A, b = A[..., 1:, 1:], b[..., 1:]
    weft.scan.linear_scan(A, b, x0, transpose=transpose).float().sum().backward()
    weft.scan.linear_scan(A, b, reverse=True)
    # The chunk in which the state overflows is computed again.
    weft.scan.linear_scan(1000 * A, b, x0, transpose=transpose)
    torch.cuda.synchronize()


def rnn() -> None:
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


def linear_scans() -> None:
    for dtype in (single, half, bfloat16, double):
        for H in (3, 64):
            linear_scan(2000, 3, H, diagonal=True, dtype=dtype)
        for H in (3, 8, 12, 16, 19, 20, 23, 24, 31, 32, 41, 48, 96, 128):
            for transpose in (False, True):
                linear_scan(200, 2, H, diagonal=False, transpose=transpose, dtype=dtype)
        for H in (7, 20, 31):
            linear_scan(200, 2, H, diagonal=False, dtype=dtype, window=True)


def codecs() -> None:
    for dtype in (single, half, bfloat16):
        for n in (0, 1, 33, 16_385, 40_000):
            for density in (0.0, 0.3, 1.0):
                memory = torch.where(torch.rand(n + 1, device="cuda") < density, 1.5, 0.0).to(dtype)
                for x in (memory[:n], memory[1:]):  # of any alignment
                    mask, values, size = torch.ops.weft.zvc_compress(x)
                    runs, _, used = torch.ops.weft.rle_compress(x)
                    for some in (values, values[: int(size)].clone(), values[: int(size) // 2].clone()):
                        torch.ops.weft.zvc_decompress(mask, some, x.shape)
                        torch.ops.weft.rle_decompress(runs[: int(used[0])].clone(), some, x.shape)
    torch.cuda.synchronize()


PARTS = {"rnn": rnn, "rnn_scan": rnn_scan, "linear_scan": linear_scans, "codecs": codecs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # [] because argparse, before Python 3.12, looks for the empty list itself among the choices.
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part", help=f"of {list(PARTS)}; else all")
    torch.manual_seed(0)
    for part in parser.parse_args().parts or PARTS:
        start = time.perf_counter()
        PARTS[part]()
        print(f"all kernels of {part} ran, in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
