"""Fixtures for the tests of recurrent layers."""

from __future__ import annotations

import pytest
import torch
from weft._rnn.select import choice, tuned


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


@pytest.fixture
def nothing_measured(monkeypatch, tmp_path):
    """The choice as on a machine where weft.tune has not run."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned.MEASURED, "entries", None)
    choice.forget_choices()
    yield
    choice.forget_choices()


@pytest.fixture
def both_devices(monkeypatch):
    """The choice as in a build with CUDA but for the rnn engine, whatever this build and this machine are."""
    monkeypatch.setattr(choice, "_DEVICES", ("cpu", "cuda"))
    monkeypatch.delattr(choice._C.rnn, "report", raising=False)


@pytest.fixture
def plan(monkeypatch):
    """A build in which the CUDA kernels of the rnn engine answer as the test says; what they were asked."""

    class Plan:
        why_not, microseconds = None, 3000.0

        def __init__(self):
            self.asked = []

        def __call__(self, **sizes):
            self.asked.append(sizes)
            forward = {
                "tier": "cluster", "product": "mma", "groups": 4, "blocks": 8, "threads": 256, "sequences": 3,
                "cluster": 1, "directions": 2,
            }  # fmt: skip
            backward = {**forward, "tier": "grid", "product": "fma", "cluster": 2, "directions": 1}
            return {
                "why_not": self.why_not,
                "forward": forward,
                "backward": backward,
                "microseconds": self.microseconds,
            }

    plan = Plan()
    monkeypatch.setattr(choice._C.rnn, "report", plan, raising=False)
    monkeypatch.setattr(choice, "_DEVICES", ("cpu", "cuda"))
    return plan
