"""What ran as chunks of time that Newton's method joins: the report."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C

__all__ = ["NewtonRun", "newton_report"]


class NewtonRun(NamedTuple):
    """One run of a recurrence as chunks of time."""

    op: str
    """``"pointwise_scan"``, ``"paragru"``, ``"paralstm"``, ``"rnn_tanh"``, ``"rnn_relu"``, ``"gru"`` or ``"lstm"``."""
    steps: int
    """T, the length of the sequence."""
    chunks: int
    """Pieces of time that were walked at once."""
    rounds: int
    """How often chunks were walked, 1 to `chunks`: the most of any sequence or channel."""
    redone: float
    """Steps that were walked again over `steps`, the mean of the sequences or channels."""
    residual: float
    """The largest mismatch of a state that was accepted where two walks meet, over max(1, abs(h))."""
    sequential: float
    """The share of the sequences or channels that fell back to a walk, chunk after chunk."""


class newton_report:
    """Collects what runs as "newton" in this thread.

    >>> layer = weft.nn.GRU(3, 8, algorithm="newton")
    >>> with weft.scan.newton_report() as report:
    ...     output, h_n = layer(torch.randn(3000, 1, 3))
    >>> print(report)
    op   steps  chunks  rounds  redone  residual  sequential
    gru   3000  ...

    Of nested blocks the innermost collects. Reading waits for the device. Backward passes are scans, in which nothing
    is walked again until it meets, and are not listed.

    Attributes:
        runs: a list of :class:`NewtonRun`, in order.
    """

    def __init__(self) -> None:
        self._found = _C.scan.NewtonReport()
        self._read: list[NewtonRun] = []

    def __enter__(self) -> newton_report:
        self._found.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._found.__exit__(*exception)

    @property
    def runs(self) -> list[NewtonRun]:
        for op, steps, chunks, statistics in self._found.runs()[len(self._read) :]:
            self._read.append(_read(op, steps, chunks, statistics))
        return list(self._read)

    def __str__(self) -> str:
        rows = [("op", "steps", "chunks", "rounds", "redone", "residual", "sequential")]
        rows += [
            (r.op, str(r.steps), str(r.chunks), str(r.rounds), f"{r.redone:.3f}", f"{r.residual:.1e}",
             f"{r.sequential:.1%}")
            for r in self.runs
        ]  # fmt: skip
        if len(rows) == 1:
            return 'nothing ran as "newton"'
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        )


def _read(op: str, steps: int, chunks: int, statistics: Tensor) -> NewtonRun:
    """From the counters of csrc/scan/newton/report.h."""
    counts = statistics.cpu()
    if not counts.numel():
        return NewtonRun(op, steps, chunks, 1, 0.0, 0.0, 0.0)
    rounds, redone, _, sequential = counts.unbind(1)
    return NewtonRun(
        op,
        steps,
        chunks,
        min(max(int(rounds.max()), 1), chunks),
        float(redone.double().mean()) / max(steps, 1),
        float(counts[:, 2].int().view(torch.float32).max()),
        float(sequential.double().mean()),
    )
