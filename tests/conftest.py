"""What all tests share: CUDA tests are skipped, loudly, where there is no device; every test starts from one seed.

Tests marked cuda(devices=2) need that many devices. Where there are fewer they are deselected, which pytest counts: one
GPU is a complete machine, where nothing should be skipped, nor pass without a test.
"""

from __future__ import annotations

import os

# Read when torch loads: threads that spin while they wait make small tests crawl where cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # each of whose processes would take all cores
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))

import hypothesis
import pytest
import torch

# The same examples in every run: a failure can be looked at twice. Deadlines would only measure the machine.
hypothesis.settings.register_profile("weft", derandomize=True, deadline=None, max_examples=40, database=None)
hypothesis.settings.load_profile("weft")

_skipped: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-cuda",
        action="store_true",
        default=os.environ.get("WEFT_REQUIRE_CUDA") == "1",
        help="fail where any test is skipped (also by WEFT_REQUIRE_CUDA=1)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0

    def needed(item: pytest.Item) -> int:
        return max((mark.kwargs.get("devices", 1) for mark in item.iter_markers("cuda")), default=0)

    beyond = [item for item in items if needed(item) > max(devices, 1)]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if needed(item) <= max(devices, 1)]
    if devices:
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--require-cuda") and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    required = config.getoption("--require-cuda")
    terminalreporter.write_line(
        f"{len(_skipped)} tests skipped" + (", which --require-cuda does not allow" if required and _skipped else ""),
        red=bool(required and _skipped),
    )


@pytest.fixture(autouse=True, scope="session")
def _nothing_tuned() -> None:
    """What weft.tune has measured for the user of this machine is nothing that a test should depend on."""
    from weft._rnn import tuned

    tuned._entries = {}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20)
