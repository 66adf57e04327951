"""Fixtures of the offload engine's tests."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.offload.engines import ENGINES


@pytest.fixture(params=ENGINES, ids=lambda e: f"{e[0]}-{e[1]}")
def engine(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture
def deterministic():
    """Two plain steps have the same bits. On CUDA that has to be asked for; then memory that nobody wrote is NaN."""
    if not torch.cuda.is_available():
        yield
        return
    cudnn = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.filterwarnings("ignore", ".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = cudnn


@pytest.fixture
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
