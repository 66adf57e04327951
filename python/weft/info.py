"""What was built, what is installed, which engines run here: ``python -m weft.info [--json]``.

Needs no GPU and no driver; `collect` returns the same facts as a dictionary.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from typing import Any

import torch

from . import _C, _build_info, _ops
from ._base.machine import cores, cpu_name
from ._base.paths import cache_dir
from ._version import __version__

__all__ = ["cache_dir", "collect", "cpu_name", "main"]


def _runs_on(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether code built for `architectures` (e.g. ``["8.0+PTX", "9.0a"]``) runs on a device of this capability.

    Binary code runs on later minor versions of its major version, PTX on everything later, and code with an ``a``
    suffix only on exactly its own version.
    """
    for architecture in architectures:
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", architecture)
        if match is None:
            continue
        built = (int(match[1]), int(match[2]))
        if match[3]:
            if built == capability:
                return True
        elif capability >= built and (match[4] or capability[0] == built[0]):
            return True
    return False


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def _engine_on_cuda(gpus: list[dict[str, Any]]) -> str:
    if _build_info.CUDA is None:
        return "not built"
    if not gpus:
        return "built; no CUDA device here"
    capabilities = {tuple(int(part) for part in gpu["compute_capability"].split(".")) for gpu in gpus}
    missing = [c for c in sorted(capabilities) if not _runs_on(_build_info.ARCHITECTURES, c)]
    if missing:
        return "not built for sm_" + ", sm_".join(f"{major}{minor}" for major, minor in missing)
    return "runs"


def _compiler() -> dict[str, str | None]:
    """What compiles kernels at run time: NVRTC's version or why there is none, and where the results are kept."""
    if not _ops.WITH_CUDA:
        return {"nvrtc": None, "obstacle": "CUDA is not built", "cubins": None}
    obstacle = _C.jit.why_unavailable()
    return {
        "nvrtc": _C.jit.version() if obstacle is None else None,
        "obstacle": obstacle,
        "cubins": _C.jit.cache_dir() or None,
    }


def _jit_on_cuda(gpus: list[dict[str, Any]], compiler: dict[str, str | None], instead: str) -> str:
    """An engine that brings no compiled kernels: it needs the compiler, and a GPU that it knows; else `instead`."""
    if _build_info.CUDA is None:
        return "not built"
    if not gpus:
        return "built; no CUDA device here"
    if compiler["obstacle"] is not None:
        return f"{instead}: {compiler['obstacle']}"
    old = [gpu["compute_capability"] for gpu in gpus if tuple(map(int, gpu["compute_capability"].split("."))) < (8, 0)]
    return f"not below compute capability 8.0, here is {old[0]}" if old else "runs"


def collect() -> dict[str, Any]:
    """The facts as a dictionary that `json` can write.

    Keys: ``versions`` (weft, python, torch, cuda, cudnn: those torch brings, None without), ``build`` (what the
    library was compiled against and for), ``machine`` (cpu, cores this process may use, gpus), ``engines`` (engine to
    device to state), ``compiler`` (of kernels that are compiled at run time: version of nvrtc, obstacle where there is
    none, folder of the cubins) and ``cache`` (a path).
    """
    gpus, compiler = _gpus(), _compiler()
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "versions": {
            "weft": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        },
        "build": {
            "torch": _build_info.TORCH,
            "cpu": True,
            "cuda": _build_info.CUDA,
            "architectures": list(_build_info.ARCHITECTURES),
        },
        "machine": {"cpu": cpu_name(), "cores": cores(), "gpus": gpus},
        "engines": {
            "scan": {"cpu": "runs", "cuda": _engine_on_cuda(gpus)},
            "rnn": {"cpu": "runs", "cuda": _jit_on_cuda(gpus, compiler, "layers run as torch")},
            "sparse": {"cpu": "runs", "cuda": _engine_on_cuda(gpus)},
            "vertex": {"cpu": "runs", "cuda": _jit_on_cuda(gpus, compiler, "runs as reference")},
            "offload": {"cpu": "runs; nothing to move", "cuda": _engine_on_cuda(gpus)},
        },
        "compiler": compiler,
        "cache": str(cache_dir()),
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(section, name, value) for people."""
    build, machine = facts["build"], facts["machine"]
    rows = [("versions", name, value or "none") for name, value in facts["versions"].items()]
    rows.append(("built", "for torch", build["torch"]))
    rows.append(("built", "CPU", "yes"))
    rows.append(("built", "CUDA", build["cuda"] or "no"))
    if build["cuda"]:
        rows.append(("built", "architectures", ", ".join(build["architectures"])))
    rows.append(("machine", "CPU", f"{machine['cpu']}, {machine['cores']} cores"))
    for index, gpu in enumerate(machine["gpus"]):
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        rows.append(
            ("machine", f"GPU {index}", f"{gpu['name']}, compute capability {gpu['compute_capability']}, {memory}")
        )
    if not machine["gpus"]:
        rows.append(("machine", "GPU", "none"))
    for engine, devices in facts["engines"].items():
        states = set(devices.values())
        value = states.pop() if len(states) == 1 else "; ".join(f"{name}: {state}" for name, state in devices.items())
        rows.append(("engines", engine, value))
    compiler = facts["compiler"]
    rows.append(("compiler", "NVRTC", compiler["nvrtc"] or f"none: {compiler['obstacle']}"))
    rows.append(("cache", "folder", facts["cache"]))
    if compiler["cubins"]:
        rows.append(("cache", "kernels", compiler["cubins"]))
    return rows


def _print(facts: dict[str, Any]) -> None:
    rows = _rows(facts)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = max(len(name) for _, name, _ in rows)
        section = None
        for group, name, value in rows:
            if group != section:
                section = group
                print(group)
            print(f"  {name:<{width}}  {value}")
        return
    table = Table(show_header=False, box=None)
    section = None
    for group, name, value in rows:
        table.add_row(f"[bold]{group}[/bold]" if group != section else "", name, value)
        section = group
    Console().print(table)


def main(arguments: list[str] | None = None) -> None:
    """The command line; `arguments` default to ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="python -m weft.info", description="What was built and what runs here.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    facts = collect()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


if __name__ == "__main__":
    main()
