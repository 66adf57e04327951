"""Ranks, which all tests of a process share: four of gloo, and one for each of two GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.distributed.team import Launched, Team

ON_GPUS = (pytest.mark.cuda(devices=2), pytest.mark.xdist_group("nccl"))
"""Few processes should start NCCL: `--dist loadgroup` keeps its tests together, and so does their order."""


def _ranks(size: int, backend: str) -> Iterator[Team | Launched]:
    ranks = Launched(backend) if "RANK" in os.environ else Team(size, backend)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def cpu_team() -> Iterator[Team | Launched]:
    yield from _ranks(4, "gloo")


@pytest.fixture(scope="session")
def gpu_team() -> Iterator[Team | Launched]:
    yield from _ranks(2, "nccl")


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=ON_GPUS)])
def team(request: pytest.FixtureRequest) -> Team | Launched:
    """Each of both: what runs on them asks team.py for its device and sizes."""
    return request.getfixturevalue("cpu_team" if request.param == "gloo" else "gpu_team")
