"""Ranks, which all tests of a process share: four of gloo, one for each of two GPUs, or those of torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.distributed.team import Launched, Team

ON_GPUS = (pytest.mark.cuda(devices=2), pytest.mark.xdist_group("nccl"))
"""Few processes should start NCCL: `--dist loadgroup` keeps its tests together, and so does their order."""


@pytest.fixture(scope="session")
def cpu_team() -> Iterator[Team]:
    """Four, whatever torchrun has started."""
    four = Team(4)
    yield four
    four.stop()


@pytest.fixture(scope="session")
def gpu_team() -> Iterator[Team | Launched]:
    ranks = Launched("nccl") if "RANK" in os.environ else Team(2, "nccl")
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def _launched() -> Iterator[Launched]:
    ranks = Launched("gloo")
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session", params=["gloo", pytest.param("nccl", marks=ON_GPUS)])
def team(request: pytest.FixtureRequest) -> Team | Launched:
    """Each of both: what runs on them asks team.py for its device and sizes."""
    if request.param == "nccl":
        return request.getfixturevalue("gpu_team")
    return request.getfixturevalue("_launched" if "RANK" in os.environ else "cpu_team")
