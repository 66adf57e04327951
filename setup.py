"""Build script: one extension module `weft._C`, with CUDA kernels where nvcc and a CUDA build of torch are found."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
# sm_80's PTX is what later architectures compile from; sm_90a has Hopper's own instructions and no forward PTX.
DEFAULT_ARCHITECTURES = "8.0+PTX;9.0a"


def with_cuda() -> bool:
    """CUDA is built where nvcc and a CUDA torch are found; WEFT_CUDA=0/1 overrides."""
    choice = os.environ.get("WEFT_CUDA")
    if choice not in (None, "", "0", "1"):
        raise SystemExit(f"WEFT_CUDA must be 0 or 1, got {choice!r}")
    found = CUDA_HOME is not None and torch.version.cuda is not None
    if choice == "1" and not found:
        raise SystemExit("WEFT_CUDA=1 needs nvcc (CUDA_HOME) and a CUDA build of torch; found neither or only one")
    return found if choice in (None, "") else choice == "1"


def sources(cuda: bool) -> list[str]:
    """Every .cpp, and with CUDA every .cu and *_cuda.cpp, as paths relative to the root (an sdist needs them so)."""
    found = [p for p in sorted(CSRC.rglob("*.cpp")) if cuda or not p.stem.endswith("_cuda")]
    if cuda:
        found += sorted(CSRC.rglob("*.cu"))
    return [str(p.relative_to(ROOT)) for p in found]


def write_build_info(cuda: bool) -> None:
    """What `weft._ops` compares with the torch it finds, before it loads the library."""
    info = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "architectures": os.environ["TORCH_CUDA_ARCH_LIST"].replace(" ", ";").split(";") if cuda else [],
    }
    lines = [f"{key.upper()} = {value!r}" for key, value in info.items()]
    text = '"""Written by setup.py."""\n\n' + "\n".join(lines) + "\n"
    path = ROOT / "python" / "weft" / "_build_info.py"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def extension(cuda: bool):
    cxx = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"]
    macros = [("WEFT_WITH_CUDA", "1")] if cuda else []
    common = dict(include_dirs=[str(CSRC)], define_macros=macros, extra_link_args=["-Wl,--strip-all"])
    if not cuda:
        return CppExtension("weft._C", sources(cuda), extra_compile_args={"cxx": cxx}, **common)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHITECTURES)
    nvcc = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-lineinfo", "-Xcompiler", "-fvisibility=hidden"]
    nvcc += ["--threads", "1"]
    return CUDAExtension("weft._C", sources(cuda), extra_compile_args={"cxx": cxx, "nvcc": nvcc}, **common)


CUDA = with_cuda()
EXTENSION = extension(CUDA)
write_build_info(CUDA)
setup(ext_modules=[EXTENSION], cmdclass={"build_ext": BuildExtension})
