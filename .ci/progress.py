"""Runs a build with one line of progress: how far ninja is, which file, and how long the rest may take.

    python .ci/progress.py LOG command ...

All that the command prints goes to LOG. Where it fails, the end of that is shown, from the first error on.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

STATUS = re.compile(r"\[(\d+)/(\d+)\] ")
SOURCE = re.compile(r" -c \S*?(csrc/\S+|[^/\s]+/[^/\s]+\.(?:cpp|cu))(?=\s)")
ERROR = re.compile(r"^FAILED: |\berror\b|Error: ")


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def describe(line: str, elapsed: float) -> tuple[int, int, str] | None:
    """(done, of how many, what to show) of a line with ninja's status, None of any other."""
    status = STATUS.match(line)
    if status is None:
        return None
    done, total = int(status[1]), int(status[2])
    source = SOURCE.search(line)
    left = elapsed / done * (total - done) if done else 0
    rest = f", about {duration(left)} left" if left > 1 else ""
    return done, total, f"compiled {done}/{total}{rest}: {source[1] if source else 'one file'}"


def run(log: Path, command: list[str]) -> int:
    """The command's exit status."""
    terminal, start, shown, compiled = sys.stdout.isatty(), time.monotonic(), 0, 0
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            file.write(line)
            file.flush()
            lines.append(line)
            found = describe(line, time.monotonic() - start)
            if found is None:
                if line.startswith("weft: "):  # what the build has to say, as why CUDA is left out
                    print(line, end="", flush=True)
                continue
            compiled, total, text = found
            if terminal:
                print("\r\033[K" + text[: shutil.get_terminal_size().columns - 1], end="", flush=True)
            elif compiled * 10 // total > shown or compiled == total:
                shown = compiled * 10 // total
                print(text, flush=True)
    if terminal and compiled:
        print("\r\033[K", end="")
    elapsed = duration(time.monotonic() - start)
    if child.returncode:
        first = next((i for i, line in enumerate(lines) if ERROR.search(line)), len(lines) - 40)
        print("".join(line[:2000] for line in lines[max(0, first) :][:60]))
        print(f"the build failed after {elapsed}; all of its output is in {log}", file=sys.stderr)
    elif compiled:
        print(f"built {compiled} files in {elapsed}; the compiler's lines are in {log}")
    return child.returncode


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
