"""Fixtures for the tests of the vertex engine."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact_fp32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
