"""Fixtures for the tests of recurrent layers."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def exact_fp32():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Hundreds of tiny problems: a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
