"""Four ranks, which all tests of a process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.team import Team


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    four = Team(4)
    yield four
    four.stop()
