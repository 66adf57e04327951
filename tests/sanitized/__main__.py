"""Runs the parts of this package.

    python -m tests.sanitized [PART ...]

as they are, and

    python -m tests.sanitized [PART ...] --under TOOL ...

each part under each tool, in a process of its own, with a limit of time, and prints a table: `make sanitize`.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from . import distributed, offload, rnn, scan, sparse, vertex

ROOMS = {
    "rnn": rnn.PARTS, "scan": scan.PARTS, "sparse": sparse.PARTS, "vertex": vertex.PARTS, "offload": offload.PARTS,
    "distributed": distributed.PARTS,
}  # fmt: skip
PARTS = {name: run for parts in ROOMS.values() for name, run in parts.items()}
TOOLS = ("memcheck", "racecheck", "synccheck")
KERNELS = ("weft", "recurrence", "vertex_", "pointwise_")  # substrings of the names of all kernels of Weft
TABLE = "{:10} {:18} {:24} {:6.0f} s"


class Result(NamedTuple):
    tool: str
    part: str
    what: str
    seconds: float


def under(tool: str, part: str, sanitizer: str, limit: float, end: float) -> Result:
    """One part under one tool, until a time of perf_counter; what it printed where it failed is printed."""
    names = [option for kernel in KERNELS for option in ("--kernel-name", f"kernel_substring={kernel}")]
    command = [*sanitizer.split(), "--tool", tool, "--error-exitcode", "1", *names, sys.executable, "-m", __package__]
    # Every tensor in an allocation of its own, but for those of a pool.
    environment = os.environ | ({} if part == "managed" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    start = time.perf_counter()
    limit = min(limit, end - start)
    if limit <= 0:
        return Result(tool, part, "not begun", 0.0)
    with subprocess.Popen(
        [*command, part], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            what = "passed" if process.returncode == 0 else f"failed ({process.returncode})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the sanitizer and what it runs
            output, _ = process.communicate()
            what = f"not finished in {limit:.0f} s"
    result = Result(tool, part, what, time.perf_counter() - start)
    told = TABLE.format(*result)
    text = output.decode(errors="replace")
    if len(text) > 20_000:  # the first report names the kernel
        text = f"{text[:10_000]}\n...\n{text[-10_000:]}"
    print(told if what == "passed" else f"{told}\n{text}", flush=True)
    return result


def sanitize(parts: list[str], tools: list[str], sanitizer: str, limit: float, within: float, jobs: int) -> bool:
    """Each part under each tool. Returns whether all passed."""
    end = time.perf_counter() + within
    with ThreadPoolExecutor(jobs) as pool:
        both = [(tool, part) for tool in tools for part in parts]
        results = list(pool.map(lambda given: under(*given, sanitizer, limit, end), both))
    print(f"\n{'tool':10} {'part':18} {'result':24}     time")
    for result in results:
        print(TABLE.format(*result))
    return all(result.what == "passed" for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    # [] because argparse, before Python 3.12, looks for the empty list itself among the choices.
    choices = [*dict.fromkeys((*PARTS, *ROOMS)), []]
    parser.add_argument("parts", nargs="*", choices=choices, metavar="PART", help=f"of {choices[:-1]}; else all")
    parser.add_argument("--under", nargs="+", choices=TOOLS, metavar="TOOL", help=f"of {TOOLS}")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the command, %(default)s")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a part under a tool, %(default)s")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds for all of them, %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="parts under tools at a time, %(default)s")
    args = parser.parse_args()
    parts = [part for name in args.parts for part in ROOMS.get(name, (name,))] or list(PARTS)
    if args.under:
        sys.exit(0 if sanitize(parts, args.under, args.sanitizer, args.limit, args.within, args.jobs) else 1)
    torch.manual_seed(0)
    for part in parts:
        start = time.perf_counter()
        PARTS[part]()
        print(f"all kernels of {part} ran, in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
