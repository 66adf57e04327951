"""The CUDA kernels on small cases, in parts that take a minute or so each under a tool of compute-sanitizer.

What the kernels give is for the tests; here they only have to run: every kind of kernel, chunks that are computed
again, each tier and each way of the recurrence kernel where it is asked for.

    python tests/sanitized.py [PART ...]

runs the parts as they are, and

    python tests/sanitized.py [PART ...] --under TOOL ...

each part under each tool, in a process of its own, with a limit of time, and prints a table: `make sanitize`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import time

import torch
import weft
from torch import Tensor, nn
from weft._rnn.select.choice import CUDA_MAX_HIDDEN
from weft._rnn.select.costs import GATES
from weft.scan import chain_backward
from weft.sparse import BatchedCSR, conv2d_jacobian, max_pool2d_jacobian, plan_matmul, relu_jacobian
from weft.vertex import models

DEVICE = "cuda"  # where sparse, vertex and offload run; a test of these parts themselves runs them on the CPU
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


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = single, scale: float = 0.3) -> list[Tensor]:
    return [(scale * torch.randn(shape, device="cuda")).to(dtype).requires_grad_() for shape in shapes]


def recurrence(
    cell: str, geometry: str, dtype: torch.dtype, tf32: bool, H: int, B: int, T: int, directions: int, packed: bool
) -> None:
    inputs, gates = 3, GATES[cell]
    os.environ["WEFT_RNN_GEOMETRY"] = geometry
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
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


def diagonal_scans() -> None:
    """The diagonal scan's kernels: the walk, with few warps and with many, and tiles, of rows of any alignment."""
    for dtype in (single, half, bfloat16, double):
        for T, B, H in ((20, 3, 64), (200, 3, 3000), (2000, 3, 3), (2000, 3, 64)):
            linear_scan(T, B, H, diagonal=True, dtype=dtype)
            A, b, x0 = tensors((H,), (T, B, H), (H,), dtype=dtype)
            weft.scan.linear_scan(A, b, x0).float().sum().backward()
    torch.cuda.synchronize()


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
        several = torch.rand(3 << 20, device="cuda").relu().to(dtype)  # tiles for every block, one after the other
        torch.ops.weft.zvc_compress(several)
    torch.cuda.synchronize()


def random_csr(rows: int, columns: int, batch: int | None, dtype: torch.dtype, index: torch.dtype) -> BatchedCSR:
    stored = torch.rand(rows, columns, device=DEVICE) < 0.3
    stored[rows // 2] = False
    crow = torch.zeros(rows + 1, dtype=index, device=DEVICE)
    crow[1:] = stored.sum(1).cumsum(0)
    col = stored.nonzero()[:, 1].to(index)
    values = torch.randn(*(() if batch is None else (batch,)), len(col), device=DEVICE).to(dtype)
    return BatchedCSR(crow, col, values.requires_grad_(), (rows, columns))


def sparse() -> None:
    """Products with vectors, matrices and each other, transposed in the backward pass; values of strided, dilated
    and grouped convolutions, whole and pruned, and of max-pooling; products that are so large that an operand is laid
    out for them; chains of sparse, dense and diagonal Jacobians, by clusters and by the whole grid."""
    for dtype in (single, half, bfloat16, double):
        for batch in (None, 1, 3):
            for index in (torch.int32, torch.int64):
                A, B = (random_csr(*shape, batch, dtype, index) for shape in ((37, 70), (70, 33)))
                for columns in (1, 5, 64):
                    x = torch.randn(batch or 2, 70, columns, device=DEVICE).to(dtype).requires_grad_()
                    (A @ x).float().square().sum().backward()
                A.mv(torch.randn(batch or 2, 70, device=DEVICE).to(dtype).requires_grad_()).float().sum().backward()
                plan_matmul(A, B)(A, B).values.float().square().sum().backward()
                A.to_dense()
        weight = torch.randn(6, 2, 3, 3, device=DEVICE).to(dtype)
        pruned = torch.where(weight.abs() > 0.8, weight, 0)
        for w, prune in ((weight, False), (pruned, True)):
            w = w.clone().requires_grad_()
            J = conv2d_jacobian(w, (4, 9, 7), stride=2, padding=1, dilation=(2, 1), groups=2, prune=prune)
            J.values.float().square().sum().backward()
        grad = torch.randn(2, 20, device=DEVICE).to(dtype)
        sizes = [20, 30, 30, 25, 40, 40, 10]
        jacobians: list = []
        for i, (columns, rows) in enumerate(itertools.pairwise(sizes)):
            dense = torch.randn(2, rows, columns, device=DEVICE).to(dtype) / columns**0.5
            shared = random_csr(rows, columns, None if i % 2 else 2, dtype, torch.int32)
            jacobians.append(relu_jacobian(dense[:, :, 0]) if rows == columns else dense if i == 2 else shared)
        for schedule in ("auto", "linear", "blelloch"):
            chain_backward(grad, jacobians, schedule=schedule)
            chain_backward(grad, jacobians[:2], schedule=schedule)
        channels = 64 if DEVICE == "cuda" else 2
        hidden = torch.randn(9, channels, 19, 21, device=DEVICE).to(dtype)
        conv = conv2d_jacobian(torch.randn(channels, 5, 3, 3, device=DEVICE).to(dtype), (5, 19, 21), padding=1)
        pool = max_pool2d_jacobian(hidden, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2), ceil_mode=True)
        for right in (relu_jacobian(hidden), pool):
            plan_matmul(conv, right)(conv, right)
        long = [random_csr(2100, 2100, None, dtype, torch.int32) for _ in range(3 if DEVICE == "cuda" else 0)]
        chain_backward(torch.randn(2, 2100, device=DEVICE).to(dtype), long, schedule="linear")
    synchronize()


def vertex() -> None:
    """Every model with slots, sums and types over trees of several batches, executed frontier by frontier, with the
    backward pass; graphs without edges, of one vertex, and deeper than the first, so that memory grows."""
    rng = random.Random(0)

    def tree(leaves: int, arity: int) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in range(leaves)]
        left = list(range(leaves))
        while len(left) > 1:
            rng.shuffle(left)
            below, left = left[:arity], left[arity:]
            children.append(below)
            left.append(len(children) - 1)
        return children

    X, H = 5, 33
    cases = {
        models.TreeLSTM(X, H): 2,
        models.TreeLSTM(X, H, arity=3): 3,
        models.ChildSumTreeLSTM(X, H): 4,
        models.TreeGRU(X, H): 4,
        models.TreeFC(X): 2,
        models.RvNN(X, H): 2,
    }
    for dtype in (single, double):
        for model, arity in cases.items():
            module = model.to(DEVICE, dtype)
            for sizes in ((1,), (5, 1, 9), (40, 3, 17, 1)):
                trees = [tree(n, arity) for n in sizes]
                graphs = weft.Graphs.from_children(trees)
                if isinstance(model, models.RvNN):
                    graphs = graphs.with_types(["inner" if below else "leaf" for each in trees for below in each])
                graphs = graphs.to(DEVICE)
                x = torch.randn(graphs.num_vertices, X, device=DEVICE, dtype=dtype, requires_grad=True)
                module(graphs, x, executor="batched").square().sum().backward()
    synchronize()


def offloaded(backend: str, compress: str | None, dtype: torch.dtype = single) -> None:
    """A net whose saved tensors all move, in a recorded use and in three that follow its plan, the last with more
    non-zeros than the ones before."""
    with torch.device(DEVICE):
        net = nn.Sequential(nn.Linear(300, 1000), nn.ReLU(), nn.Linear(1000, 1001), nn.ReLU(), nn.Linear(1001, 10))
        net.to(dtype)
        offload = weft.offload(0, backend=backend, compress=compress, min_bytes=1000, keep_last=0)
        for more in (0, 0, 0, 3):
            with torch.no_grad():
                for linear in (net[0], net[2]):
                    linear.bias += more
            with offload:
                loss = net(torch.randn(129, 300, dtype=dtype)).square().sum()
            loss.backward()
    synchronize()


def copies() -> None:
    for compress in (None, "zvc", "rle", "auto"):
        offloaded("copy", compress)
    offloaded("copy", "zvc", bfloat16)


def managed() -> None:
    for compress in (None, "zvc"):
        offloaded("managed", compress)


PARTS = {
    "rnn": rnn, "rnn_scan": rnn_scan, "linear_scan": linear_scans, "diagonal_scans": diagonal_scans,
    "codecs": codecs, "sparse": sparse, "vertex": vertex, "copies": copies, "managed": managed,
}  # fmt: skip
ROOMS = {
    "scan": ("rnn_scan", "linear_scan", "diagonal_scans"), "offload": ("codecs", "copies", "managed"),
}  # fmt: skip
TOOLS = ("memcheck", "racecheck", "synccheck")
KERNELS = ("weft", "recurrence", "vertex_frontier")  # substrings of the names of all kernels of Weft


def sanitize(parts: list[str], tools: list[str], sanitizer: str, limit: float) -> bool:
    """Each part under each tool. Returns whether all passed; what a failed one printed is printed before the table."""
    rows, passed = [], True
    names = [option for kernel in KERNELS for option in ("--kernel-name", f"kernel_substring={kernel}")]
    for tool in tools:
        for part in parts:
            # Every tensor in an allocation of its own, but for those of a pool.
            environment = os.environ | ({} if part == "managed" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
            command = [*sanitizer.split(), "--tool", tool, "--error-exitcode", "1", *names, sys.executable, __file__]
            start, output = time.perf_counter(), b""
            try:
                done = subprocess.run(
                    [*command, part],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                )
                output, result = done.stdout, "passed" if done.returncode == 0 else f"failed ({done.returncode})"
            except subprocess.TimeoutExpired as error:
                output, result = error.stdout or b"", f"not finished in {limit:.0f} s"
            rows.append((tool, part, result, time.perf_counter() - start))
            print("{:10} {:12} {:24} {:6.0f} s".format(*rows[-1]), flush=True)
            if result != "passed":
                passed = False
                print(output.decode(errors="replace")[-10_000:], flush=True)
    print("\ntool       part         result                     time")
    for row in rows:
        print("{:10} {:12} {:24} {:6.0f} s".format(*row))
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    # [] because argparse, before Python 3.12, looks for the empty list itself among the choices.
    choices = [*PARTS, *ROOMS, []]
    parser.add_argument("parts", nargs="*", choices=choices, metavar="PART", help=f"of {choices[:-1]}; else all")
    parser.add_argument("--under", nargs="+", choices=TOOLS, metavar="TOOL", help=f"of {TOOLS}")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the command, %(default)s")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a part under a tool, %(default)s")
    args = parser.parse_args()
    parts = [part for name in args.parts for part in ROOMS.get(name, (name,))] or list(PARTS)
    if args.under:
        sys.exit(0 if sanitize(parts, args.under, args.sanitizer, args.limit) else 1)
    torch.manual_seed(0)
    for part in parts:
        start = time.perf_counter()
        PARTS[part]()
        print(f"all kernels of {part} ran, in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
