"""How algorithm "newton" walks chunks of time (csrc/rnn/newton/chunks.h), in plain torch: the oracle for what its
kernels store and count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from weft._rnn.reference import _STEPS


@dataclass
class Walked:
    """All states (T, B, S), h and for an LSTM c after it; and of each sequence (B,) what was counted."""

    states: Tensor
    rounds: Tensor
    redone: Tensor
    """Steps walked again."""
    residual: Tensor
    """The largest mismatch accepted."""
    alone: Tensor


def cut(steps: int, count: int) -> tuple[int, int]:
    """Chunks and their length."""
    length = -(-steps // min(max(count, 1), steps))
    return -(-steps // length), length


def few_meet(round_: int, chunks: int, changed: int, closer: int, before: int) -> bool:
    rest = chunks - round_
    late = 14 * round_ >= chunks if 4 * changed > rest else 5 * round_ >= chunks
    none_closer = round_ >= 3 and 2 * changed > rest and 8 * closer < changed
    stays = 4 * changed > 3 * before and (none_closer or (round_ >= 5 and late))
    return stays or (8 * changed > 7 * rest and 2 * closer < changed)


def tolerance(dtype: torch.dtype) -> float:
    return 2.0**-51 if dtype == torch.float64 else 2.0**-22


def mismatch(found: Tensor, stored: Tensor) -> Tensor:
    same = (found == stored) | (found.isnan() & stored.isnan())
    apart = (found - stored).abs() / stored.abs().clamp_min(1)
    return torch.where(same, 0, apart)


def meets(found: Tensor, stored: Tensor) -> Tensor:
    most = tolerance(stored.dtype) * stored.abs().clamp_min(1)
    same = (found == stored) | (found.isnan() & stored.isnan())
    return same | (((found - stored).abs() <= most) & most.isfinite())


def walk(
    cell: str, projected: Tensor, w_hh: Tensor, b_hh: Tensor | None, h0: Tensor, c0: Tensor | None, count: int,
    every: int = 8,
) -> Walked:  # fmt: skip
    """The scheme for one direction.

    projected (T, B, G H) is W_ih x + b_ih, h0 and c0 are (B, H). `every`: how often a walk looks whether it meets.
    """
    (steps, batch, _), lstm = projected.shape, cell == "lstm"
    chunks, length = cut(steps, count)
    start = h0 if c0 is None else torch.cat((h0, c0), -1)
    states = start.new_zeros(steps, *start.shape)

    def step(state: Tensor, at: int, rows: Tensor) -> Tensor:
        parts = tuple(state.chunk(2, -1)) if lstm else (state,)
        return torch.cat(_STEPS[cell](projected[at, rows], parts, w_hh, b_hh, None), -1)

    rounds = torch.ones(batch, dtype=torch.int64)
    alone = torch.zeros(batch, dtype=torch.bool)
    redone = torch.zeros(batch, dtype=torch.int64)
    residual = torch.zeros(batch, dtype=states.dtype)

    def again(chunk: int, b: int, state: Tensor) -> bool:
        """Walks a chunk of a sequence again, until it meets what is stored; whether its end has changed."""
        first, last = chunk * length, min(steps, (chunk + 1) * length) - 1
        for t in range(first, last + 1):
            state = step(state, t, torch.tensor([b]))
            redone[b] += 1
            looks = (t - first) % every == every - 1 or t == last
            if looks and meets(state[0], states[t, b]).all():
                residual[b] = torch.maximum(residual[b], mismatch(state[0], states[t, b]).max())
                return False
            states[t, b] = state[0]
        return True

    everyone = torch.arange(batch)
    for chunk in range(chunks):
        state = start if chunk == 0 else torch.zeros_like(start)
        for t in range(chunk * length, min(steps, (chunk + 1) * length)):
            states[t] = state = step(state, t, everyone)
    for b in range(batch):
        changed = [True] * (chunks - 1) + [False]  # of the last chunk nobody asks
        before = chunks - 1
        begun = [torch.zeros_like(start[b])] * chunks  # with what each was walked last
        while rounds[b] < chunks:
            rounds[b] += 1
            ends = [states[(k + 1) * length - 1, b].clone() for k in range(chunks - 1)]
            told = changed
            changed = [k > 0 and told[k - 1] and again(k, b, ends[k - 1][None]) for k in range(chunks)]
            changed[-1] = False
            if not any(changed):
                break
            closer = 0
            for k in range(1, chunks):
                if told[k - 1]:
                    if changed[k]:
                        by = mismatch(states[(k + 1) * length - 1, b], ends[k]).max()
                        closer += int(2 * by <= mismatch(ends[k - 1], begun[k]).max())
                    begun[k] = ends[k - 1]
            if few_meet(int(rounds[b]), chunks, sum(changed), closer, before):
                alone[b] = True
                for t in range(int(rounds[b]) * length, steps):
                    states[t, b] = step(states[t - 1, b][None], t, torch.tensor([b]))[0]
                    redone[b] += 1
                break
            before = sum(changed)
    return Walked(states, rounds, redone, residual, alone)
