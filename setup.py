"""Build script: one extension module `weft._C`, with CUDA kernels where nvcc and a CUDA build of torch are found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
# The unit in which a room's checks, registration and bindings are compiled, "common" for the others: few, because each
# reads torch's headers anew; not one, because what changes in a room compiles its unit.
GLUE = {"rnn": "rnn", "vertex": "rnn", "offload": "offload"}
# Units that are compiled at -O3: what is numeric, and what a step calls for every tensor that it saves.
FAST = ("cpu", "offload")


def nvcc_version() -> tuple[int, int] | None:
    """(major, minor) of the nvcc that torch would run, None where there is none."""
    if CUDA_HOME is None:
        return None
    try:
        done = subprocess.run([f"{CUDA_HOME}/bin/nvcc", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return None if release is None else (int(release[1]), int(release[2]))


def default_architectures() -> list[str]:
    """TORCH_CUDA_ARCH_LIST of a build for every GPU. 8.0's PTX serves those between the listed ones, 12.0's later ones;
    9.0a has Hopper's own instructions and no forward PTX."""
    blackwell = ["10.0", "12.0+PTX"] if nvcc_version() >= (12, 8) else []
    return ["8.0+PTX", "9.0a", *blackwell]


def architectures_here() -> str:
    """TORCH_CUDA_ARCH_LIST for the GPUs of this machine, empty where there is none that the kernels run on."""
    if not torch.cuda.is_available() or nvcc_version() is None:
        return ""
    found = {torch.cuda.get_device_capability(device)[0] for device in range(torch.cuda.device_count())}
    # A GPU runs what was compiled for its major capability.
    built = {int(architecture.split(".")[0]): architecture for architecture in default_architectures()}
    return ";".join(sorted({built.get(major, built[8]) for major in found if major >= 8}))


def with_cuda() -> bool:
    """CUDA is built where nvcc and torch are of one major version of CUDA. WEFT_CUDA=0 and 1 override; "here", which
    the Makefile sets, builds for the GPUs of this machine alone, unless TORCH_CUDA_ARCH_LIST names others."""
    choice = os.environ.get("WEFT_CUDA")
    if choice not in (None, "", "0", "1", "here"):
        raise SystemExit(f"WEFT_CUDA must be 0, 1 or here, got {choice!r}")
    if choice == "here" and "TORCH_CUDA_ARCH_LIST" not in os.environ:
        local = architectures_here()
        if not local:
            return False
        os.environ["TORCH_CUDA_ARCH_LIST"] = local
    if choice == "0" or (choice != "1" and torch.version.cuda is None):
        return False
    nvcc = nvcc_version()
    if torch.version.cuda is None:
        obstacle = "torch is built without CUDA"
    elif nvcc is None:
        obstacle = "there is no nvcc (CUDA_HOME)"
    elif nvcc[0] != int(torch.version.cuda.split(".")[0]):
        obstacle = f"nvcc is of CUDA {nvcc[0]}.{nvcc[1]} and torch of CUDA {torch.version.cuda}"
    else:
        return True
    if choice == "1":
        raise SystemExit(f"WEFT_CUDA=1: the CUDA kernels cannot be built, {obstacle}")
    print(f"weft: building for the CPU alone, {obstacle}", file=sys.stderr)
    return False


def sources(cuda: bool) -> list[Path]:
    """Every .cpp and .cu, without CUDA none in a folder named cuda or in csrc/jit, which serves CUDA kernels alone.
    *.jit.cu are not compiled here but embedded."""

    def for_cuda(path: Path) -> bool:
        return "cuda" in path.relative_to(CSRC).parts or CSRC / "jit" in path.parents

    found = [p for p in sorted(CSRC.rglob("*.c*")) if p.suffix in (".cpp", ".cu") and not p.name.endswith(".jit.cu")]
    return [p for p in found if cuda or not for_cuda(p)]


def includes(paths: Iterable[Path]) -> tuple[set[Path], set[str]]:
    """The files of csrc that `paths` are and include, and the headers from elsewhere that these include."""
    found: set[Path] = set()
    others: set[str] = set()
    left = list(paths)
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            text = path.read_text(encoding="utf-8")
            left += [CSRC / name for name in re.findall(r'^#include "(.+)"', text, re.M) if (CSRC / name).exists()]
            others |= set(re.findall(r"^#include <(.+)>", text, re.M))
    return found, others


def unit_of(path: Path) -> str | None:
    """The unit that a source is compiled in, None for one that is compiled alone: CUDA's, and what includes nothing of
    torch, as plans and the vectorised kernels."""
    folders = path.relative_to(CSRC).with_suffix("").parts
    torch_facing = any(name.startswith(("torch/", "ATen/", "c10/", "pybind11/")) for name in includes([path])[1])
    if path.suffix == ".cu" or not torch_facing:
        return None
    if "cpu" in folders:
        return "cpu"
    if "cuda" in folders or folders[0] == "jit":
        return "cuda"
    return GLUE.get(folders[0], "common")


def units(cuda: bool, folder: Path) -> tuple[list[str], list[str]]:
    """What is compiled at -O3, and at -O1: sources as they are, and units written to `folder`, which include many
    sources each, because torch's headers take longer to compile than most of what includes them. WEFT_UNITY=0 leaves
    every source to itself, for who edits one at a time."""
    alone, members = [], {}
    for path in sources(cuda):
        unit = None if os.environ.get("WEFT_UNITY") == "0" else unit_of(path)
        members.setdefault(unit, []).append(path) if unit else alone.append(str(path.relative_to(ROOT)))
    for unit, paths in members.items():
        text = "".join(f'#include "{path.relative_to(CSRC).as_posix()}"\n' for path in paths)
        write_if_changed(folder / f"{unit}.cpp", f"// Written by setup.py.\n{text}")
    written = {unit: str(folder / f"{unit}.cpp") for unit in members}
    fast = [written.pop(unit) for unit in FAST if unit in written]
    return alone + fast, list(written.values())


def write_if_changed(path: Path, text: str) -> None:
    """Unchanged text keeps its time, for ninja."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def embedded_files() -> list[Path]:
    """Every *.jit.* and, because NVRTC finds no headers, what they include of csrc."""
    return sorted(includes(CSRC.rglob("*.jit.*"))[0])


def embedded_sources(version: str) -> str:
    """C++ definitions of what csrc/jit/sources.h declares: the bytes of all embedded files, and the version."""

    def literal(line: bytes) -> str:
        # Three octal digits end by themselves whatever comes next; a question mark could begin a trigraph.
        return "".join(chr(b) if 32 <= b < 127 and b not in b'"\\?' else f"\\{b:03o}" for b in line)

    entries = []
    for path in embedded_files():
        data = path.read_bytes()
        text = "\n     ".join(f'"{literal(line)}"' for line in data.splitlines(keepends=True)) or '""'
        entries.append(f'    {{"{path.relative_to(CSRC).as_posix()}",\n     {{{text}, {len(data)}}}}},\n')
    return (
        '// Written by setup.py.\n#include "jit/sources.h"\n\nnamespace weft::jit {\n\n'
        f"static const Source sources[] = {{\n{''.join(entries)}}};\n"
        "const std::span<const Source> kSources(sources);\n"
        f'const std::string_view kVersion = "{version}";\n\n}}  // namespace weft::jit\n'
    )


def use_ccache() -> None:
    """ccache in front of both compilers where it is installed, unless the caller has chosen compilers, or torch puts it
    there itself, which torch 2.15 does."""
    if shutil.which("ccache") is None or hasattr(cpp_extension, "_wrap_compiler"):
        return
    if "CXX" not in os.environ:
        os.environ["CXX"] = "ccache c++"
        # torch looks at the command's first word and warns that "ccache" is no g++.
        os.environ.setdefault("TORCH_DONT_CHECK_COMPILER_ABI", "1")
    if CUDA_HOME is not None:
        os.environ.setdefault("PYTORCH_NVCC", f"ccache {CUDA_HOME}/bin/nvcc")


def extension(cuda: bool):
    cxx = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"]
    # torch's parallel_for is a template, which runs on one thread without this flag; on Linux torch brings libgomp.
    openmp = ["-fopenmp"] if sys.platform == "linux" else []
    cxx += openmp
    macros = [("WEFT_WITH_CUDA", "1")] if cuda else []
    # Some compilers link libstdc++ statically. Its symbols must not mix with those of torch's copy: none is exported.
    link = ["-Wl,--strip-all", "-Wl,--exclude-libs,ALL", *openmp]
    common = dict(include_dirs=[str(CSRC)], define_macros=macros, extra_link_args=link)
    # Relative to the root, because an sdist needs them so.
    files = [str(path.relative_to(ROOT)) for path in sources(cuda)]
    if not cuda:
        return CppExtension("weft._C", files, extra_compile_args={"cxx": cxx}, **common)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ";".join(default_architectures()))
    nvcc = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-lineinfo", "-Xcompiler", "-fvisibility=hidden"]
    nvcc += ["--threads", "1"]
    if nvcc_version() >= (13, 0):  # a fifth of the size; what it writes needs a driver that every CUDA 13 has
        nvcc.append("--compress-mode=size")
    return CUDAExtension("weft._C", files, extra_compile_args={"cxx": cxx, "nvcc": nvcc}, **common)


class BuildWeft(BuildExtension):
    """Compiles, and leaves weft/_build_info.py beside the library: `weft._ops` compares it with the torch it finds."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # A folder per configuration: one does not compile again what another has.
        target = f"cuda-{os.environ['TORCH_CUDA_ARCH_LIST'].replace(' ', ';')}" if CUDA else "cpu"
        name = f"{target}-torch-{torch.__version__}-{sys.implementation.cache_tag}"
        self.build_temp = str(Path(self.build_temp).with_name(re.sub(r"[^\w.-]", "-", name)))

    def build_extension(self, ext) -> None:
        """Compiles units instead of the sources that they include; what is neither numeric nor called for every tensor
        at -O1, in half the time."""
        folder = Path(self.build_temp)
        ext.sources, glue = units(CUDA, folder / "units")
        if CUDA:
            generated = folder / "jit_sources.cpp"
            write_if_changed(generated, embedded_sources(self.distribution.get_version()))
            ext.sources.append(str(generated))
        if glue:
            flags = {**ext.extra_compile_args, "cxx": [*ext.extra_compile_args["cxx"], "-O1"]}
            ext.extra_objects += self.compiler.compile(
                glue,
                output_dir=str(folder / "glue"),
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                extra_postargs=flags,
                depends=ext.depends,
            )
        super().build_extension(ext)

    def run(self) -> None:
        super().run()
        package = ROOT / "python" / "weft" if self.inplace else Path(self.build_lib) / "weft"
        architectures = os.environ["TORCH_CUDA_ARCH_LIST"].replace(" ", ";").split(";") if CUDA else []
        (package / "_build_info.py").write_text(
            '"""Written by setup.py."""\n\n'
            f"TORCH = {torch.__version__!r}\n"
            f"CUDA = {torch.version.cuda if CUDA else None!r}\n"
            f"ARCHITECTURES = {architectures!r}\n"
        )


use_ccache()
CUDA = with_cuda()
setup(ext_modules=[extension(CUDA)], cmdclass={"build_ext": BuildWeft})
