"""What the tests share that run CUDA code on a processor, by tests/emulator."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which(os.environ.get("CXX", "c++").split()[-1])

MARKS = [
    pytest.mark.skipif(
        COMPILER is None or sys.platform != "linux", reason="the emulator needs a C++ compiler and Linux"
    ),
    # Whose other threads the child does not miss: it calls one function and ends.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.slow,  # for the compiler
]

RUN_LONG = ("recurrence",)
"""Those whose threads wait for each other until it is plain that nobody comes."""


def build(name: str, folder: Path, optimise: bool = True, **macros: int) -> ctypes.CDLL:
    """The library of tests/emulator/`name`.cpp; what lies in `folder` goes before what csrc has. What was built of the
    same sources, by this or another process, is loaded again. Not to optimise pays where little runs."""
    given = [
        f"{path.relative_to(folder)}\n{path.read_text()}" for path in sorted(folder.rglob("*.*")) if path.is_file()
    ]
    flawed = any((ROOT / "csrc" / path.relative_to(folder)).is_file() for path in folder.rglob("*.*"))
    # What has a flaw runs until it is noticed, mostly for a shorter time than it takes to optimise.
    optimised = "-O1" if optimise and (name in RUN_LONG or not flawed) else "-O0"
    defines = [f"-D{macro}={int(value)}" for macro, value in macros.items()]
    library = _built() / f"{name}-{_digest([name, optimised, *defines, *given])}.so"
    if not library.exists():
        folders = [f"-I{path}" for path in (folder, ROOT / "tests/emulator", ROOT / "csrc")]
        source = str(ROOT / f"tests/emulator/{name}.cpp")
        prelude = str(_prelude(optimised))
        _compile(library, optimised, "-shared", "-include", prelude, *folders, *defines, source, str(_scheduler()))
    return ctypes.CDLL(str(library))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compile(to: Path, *arguments: str) -> None:
    """`to` is there when it is whole."""
    made = to.with_suffix(f".{os.getpid()}")
    subprocess.run([COMPILER, "-std=c++20", "-w", "-fPIC", *arguments, "-o", str(made)], check=True)
    made.replace(to)


@functools.cache
def _built() -> Path:
    """A folder for what is built of the sources as they are; those of other sources go."""
    sources = [path for part in ("csrc", "tests/emulator") for path in sorted((ROOT / part).rglob("*.*"))]
    text = (f"{path.relative_to(ROOT)}\n{path.read_text(encoding='utf-8')}" for path in sources if path.is_file())
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    folder = ROOT / "build/emulated" / _digest([version, *text])
    for other in folder.parent.glob("*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _scheduler() -> Path:
    """emulator.cpp, compiled once for all of these libraries."""
    library = _built() / "scheduler.o"
    if not library.exists():
        _compile(library, "-O2", "-c", str(ROOT / "tests/emulator/emulator.cpp"))
    return library


@functools.cache
def _prelude(optimised: str) -> Path:
    """emulator.h, which all of these libraries begin with; g++ has it precompiled, half of what there is to read."""
    header, prelude = ROOT / "tests/emulator/emulator.h", _built() / f"prelude{optimised}.h"
    if not prelude.exists():
        _compile(prelude.with_suffix(".h.gch"), optimised, "-x", "c++-header", str(header))
        prelude.write_text(f'#include "{header}"\n')  # for other compilers
    return prelude


def cuda_headers() -> Path | None:
    """The folder of CUDA's own headers, of a toolkit or of torch's packages."""
    roots = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), *(f"{path}/nvidia/cu13" for path in sys.path)]
    found = [Path(root) / "include" for root in roots]
    return next((path for path in found if (path / "cuda_runtime_api.h").exists()), None)


def runtime() -> Path:
    """tests/emulator/runtime.cpp as a library under the driver's name."""
    library = _built() / "runtime/libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        source = ROOT / "tests/emulator/runtime.cpp"
        _compile(library, "-O1", "-shared", f"-I{cuda_headers()}", str(source), "-ldl")
    return library


def run_on(runtime: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, with these arguments, on the library of runtime()."""
    # Torch looks for the driver by its name, which the runtime has; what it knows of a device is not to be seen there.
    variables = {"LD_PRELOAD": str(runtime), "LD_LIBRARY_PATH": str(runtime.parent), "CUDA_VISIBLE_DEVICES": "0"}
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def ends_well(function: Callable[[], None]) -> bool:
    """Whether the function returns, in a process of its own: what the emulator refuses ends it."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # that a flawed kernel ends the process is what a test asks for
            torch.set_num_threads(1)  # OpenMP would wait for the parent's threads
            function()
            os._exit(0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def with_flaw(source: str, right: str, wrong: str, folder: Path) -> Path:
    """`folder`, with a copy of csrc/`source` in it that is wrong in one place."""
    text = (ROOT / "csrc" / source).read_text(encoding="utf-8")
    assert text.count(right) == 1
    changed = folder / source
    changed.parent.mkdir(parents=True)
    changed.write_text(text.replace(right, wrong), encoding="utf-8")
    return folder
