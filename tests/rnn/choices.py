"""Calls whose algorithm tests ask for."""

from __future__ import annotations

import torch
from weft._rnn.select.case import Case

CASE = Case(cell="gru", device="cpu", dtype=torch.float32, hidden_size=16, batch=4, steps=100)
ON_CUDA = CASE._replace(device="cuda", hidden_size=512, index=0, capability=(9, 0), layers=2)
SMALL_ON_CUDA = ON_CUDA._replace(hidden_size=20, layers=1, steps=1000, batch=16, tf32=True)
