"""Python code in a process that has imported torch and nothing else: a fork of one that did so once, because importing
torch takes seconds. As a script this file is that process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What ``python -c code`` in the folder of the project ends with, prints and writes to its standard error. The
    environment is this process's and what is given beside, which torch's import does not see."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("out", "err")]
        request = {"code": code, "environment": {**os.environ, **environment}, "files": files}
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        out, err = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess(["python", "-c", code], status, out, err)


@functools.cache
def _server() -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *sys.path])
    server = subprocess.Popen(
        [sys.executable, __file__], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # it ends with its input
    return server


def _serve() -> None:
    import torch  # noqa: F401

    sys.path.pop(0)  # this file's folder
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        child = os.fork()
        if child == 0:
            return _run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _run(code: str, environment: dict[str, str], files: list[str]) -> None:
    for number, file in enumerate([os.devnull, *files]):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c"]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _serve()
