"""What all tests share: tests that need more CUDA devices than there are do not run; every test starts from one seed.

A test marked cuda needs a device, one marked cuda(devices=2) needs two. Tests without their devices are deselected, and
one line at the end says how many: a test that shows as skipped is one that should have run here. One GPU is a complete
machine for --require-cuda; a machine without a GPU is not.
"""

from __future__ import annotations

import gc
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

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

# What takes most of the time, as measured on one case of each test, beside what compiles C++ for the emulator: files
# whose tests train or trace by torch's compilers, all of torch.compile, opcheck and gradcheck (second
# derivatives go by that), those of other instruction sets.
SLOW_FILES = (
    "test_codec.py",
    "test_examples.py",
    "test_instruction_sets.py",
    "test_nn_compile.py",
    "test_nn_projected.py",
    "test_nn_tracing.py",
    "test_sanitized.py",
    "test_scan_examples.py",
    "test_source.py",
    "test_together.py",
    "test_torch_module_inputs.py",
)
SLOW_NAMES = (
    "compile",
    "every_derivative",
    "gradcheck",
    "of_any_order",
    "opcheck",
    "test_derivatives",
)

_skipped: list[str] = []
_WITHOUT_DEVICES = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-cuda",
        action="store_true",
        default=os.environ.get("WEFT_REQUIRE_CUDA") == "1",
        help="fail where any test is skipped (also by WEFT_REQUIRE_CUDA=1)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of what is slow as a whole nothing is read where nobody asks for it: some of its imports take seconds."""
    unread = config.getoption("markexpr") == "not slow" and any(map(collection_path.match, SLOW_FILES))
    return True if unread else None


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name, file = item.name.split("[")[0], item.path.name
        if any(part in name for part in SLOW_NAMES) or any(fnmatch(file, pattern) for pattern in SLOW_FILES):
            item.add_marker(pytest.mark.slow)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0

    def needed(item: pytest.Item) -> int:
        return max((mark.kwargs.get("devices", 1) for mark in item.iter_markers("cuda")), default=0)

    beyond = [item for item in items if needed(item) > devices]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if needed(item) <= devices]
    config.stash[_WITHOUT_DEVICES] = len(beyond) if devices == 0 else 0


def pytest_collection_finish() -> None:
    """Tens of thousands of tests and what was imported for them stay. Where a collection of garbage looks at them, it
    takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """pytest-xdist's: each of its processes has collected all tests."""
    node.config.stash[_WITHOUT_DEVICES] = getattr(node, "workeroutput", {}).get("without_devices", 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    without_devices = session.config.stash.get(_WITHOUT_DEVICES, 0)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["without_devices"] = without_devices
    elif session.config.getoption("--require-cuda") and (_skipped or without_devices):
        allowed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if session.exitstatus in allowed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    required = config.getoption("--require-cuda")
    refused = ", which --require-cuda does not allow" if required else ""
    for count, what in (
        (config.stash.get(_WITHOUT_DEVICES, 0), "tests not run: they need a CUDA device, and there is none"),
        (len(_skipped), "tests skipped"),
    ):
        if count:
            terminalreporter.write_line(f"{count:,} {what}{refused}", red=required)


@pytest.fixture(autouse=True, scope="session")
def _nothing_tuned() -> None:
    """What weft.tune has measured for the user of this machine is nothing that a test should depend on."""
    from tests.common import every_measured

    for measured in every_measured():
        measured.entries = {}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20)


@pytest.fixture
def quick_inductor():
    """torch's code generator, but for what takes it half a minute in its first call on a processor: to try which vector
    instructions there are, to precompile headers for more than a kernel or two, and to start processes that compile."""
    import torch._inductor.config as config

    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "compile_threads": 1}):
        yield
