"""Where things are: the files of every op by its name alone, the floors that rooms stand on in C++ and in Python, and
their namespaces."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import weft  # registers torch.ops.weft

CSRC = Path(__file__).parents[1] / "csrc"
PACKAGE = CSRC.parent / "python" / "weft"

FILES = ("{op}.h", "{op}.cpp", "{op}_autograd.cpp", "cpu/{op}.cpp", "cuda/{op}.cpp")
"""Of every op, in its room or in one folder of it."""

SHARED = {
    "zvc_decompress": "zvc_compress",
    "rle_decompress": "rle_compress",
    "csr_sampled_mm": "csr_mm",
    "conv_pattern": "conv_values",
    "csr_matmul_plan": "csr_matmul",
    "csr_matmul_left": "csr_matmul",
    "csr_matmul_right": "csr_matmul",
    "slice_states": "slice_message",
    "slice_left": "slice_message",
    "slice_mend_": "slice_message",
    "slice_mend_gradients_": "slice_message",
    "slice_finish_": "slice_message",
    "slice_begin_gradients": "slice_begin",
    "slice_finish_gradients_": "slice_message",
    "slice_replay_": "slice_maps",
    "rnn_slice_backward": "rnn_slice_maps",
    "layer_chain": "csr_chain",
}
"""Ops that are in another's files: its inverse, its plan, its gradients under another name, what follows it."""

_OF_ATEN = "made of ATen operations, which bring their devices and their gradients"
_IN_PYTHON = "torch's own kernels, called from python/weft/_rnn/dropin/torch_rnn.py"
WITHOUT = {
    "chain_backward": dict.fromkeys(FILES[2:], _OF_ATEN),
    "scan_cell": dict.fromkeys(FILES[2:], _OF_ATEN),
    "torch_rnn": dict.fromkeys(FILES, _IN_PYTHON),
    "slice_scan": dict.fromkeys(FILES, "other ops and torch's collectives, in python/weft/_distributed/slice_scan.py"),
    "csr_transpose": dict.fromkeys(FILES[2:], _OF_ATEN),
    "slice_begin": dict.fromkeys(FILES[2:4], "made of linear_scan and slice_message, which have them"),
    "slice_message": {FILES[2]: "below autograd: a part of slice_scan"},
    "rnn_slice_maps": {FILES[2]: "below autograd: a part of a layer over ranks, which has it"},
    "slice_maps": {FILES[2]: "below autograd: a part of slice_scan"},
    "slice_product": {FILES[2]: "below autograd: a part of slice_scan"},
    "zeros_changed": {FILES[2]: "its result is a flag, which has no gradient"},
}
"""Files that an op does not have, and why."""

FLOORS = {
    "common": set(),
    "jit": {"common"},
    "sparse": {"common", "jit"},
    "scan": {"common", "jit", "sparse"},
    "rnn": {"common", "jit", "sparse", "scan"},
    "vertex": {"common", "jit", "sparse", "scan"},
    "offload": {"common", "jit"},
}
"""What a room may include."""


def ops() -> list[str]:
    """Ops of the registry that have files; a backward op belongs to its forward op."""
    names = {s.name.removeprefix("weft::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("weft::")}
    return sorted(n for n in names if n not in SHARED and n.removesuffix("_backward") not in names - {n})


def sources() -> list[Path]:
    return [p for p in sorted(CSRC.rglob("*")) if p.suffix in (".h", ".cpp", ".cu", ".cuh")]


def room_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def homes_of_ops() -> list[Path]:
    """Rooms, and their folders that are no device's."""
    rooms = [CSRC / room for room in FLOORS]
    folders = [p for room in rooms for p in sorted(room.iterdir()) if p.is_dir() and p.name not in ("cpu", "cuda")]
    return [*rooms, *folders]


def test_the_registry_is_walked():
    assert {"linear_scan", "chain_backward", "rnn"} <= set(ops())


@pytest.mark.parametrize("op", ops())
def test_an_op_has_the_files_of_its_name(op: str):
    reasons = WITHOUT.get(op, {})
    homes = [home for home in homes_of_ops() if any((home / file.format(op=op)).exists() for file in FILES)]
    assert len(homes) == (0 if len(reasons) == len(FILES) else 1), f"{op} is in {homes}"
    for file in FILES:
        exists = bool(homes) and (homes[0] / file.format(op=op)).exists()
        assert exists != (file in reasons), f"{op}: {file.format(op=op)}: {reasons.get(file, 'is missing')}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(CSRC)))
def test_a_room_stands_on_lower_floors(path: Path):
    text, room = path.read_text(encoding="utf-8"), room_of(path)
    if room not in FLOORS:
        return
    below = FLOORS[room] | {room}
    included = {name.split("/")[0] for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE) if "/" in name}
    assert included <= below, f"includes from {included - below}"
    # Kernels that are compiled at run time have a program for themselves.
    if room != "common" and ".jit." not in path.name:
        spaces = set(re.findall(r"^namespace weft(?:::(\w+))?", text, re.MULTILINE))
        allowed = below | {"cpu"}  # the vector layer's, in common/cpu
        assert spaces <= allowed, f"namespaces weft::{spaces - allowed}"


ALONE = {
    r"\basm\b": {
        "common/cuda/boxes.cuh",
        "common/cuda/ptx.jit.cuh",
        "common/cuda/warpgroup.jit.cuh",
        "common/cuda/wide_product.jit.cuh",
        "common/cuda/words.jit.cuh",
    },
    r"<<<|cudaLaunchKernel|cuLaunchKernel|LaunchAttributeClusterDimension": {"common/launch.cuh", "jit/kernel.cpp"},
    r"__(half|bfloat16)2float|__float2(half|bfloat16)": {"common/element.cuh"},
    r"enum class \w*DType": {"common/dtype.h"},
    r"int64_t take_tile\(": {"common/cuda/tile_status.cuh"},
}
"""Files that alone have: PTX, launches, conversions of half types, the element types, turns of tiles."""


@pytest.mark.parametrize("pattern", ALONE)
def test_common_things_are_in_common(pattern: str):
    found = {p.relative_to(CSRC).as_posix() for p in sources() if re.search(pattern, p.read_text(encoding="utf-8"))}
    assert found == ALONE[pattern]


DIALECT = re.compile(
    r"\b(parcels?|lanes? of copies|witness(es)?|books|sync_some|arrivals_(init|expect|wait)\w*|listed_wide"
    r"|side_by_side|windowed)\b",
    re.IGNORECASE,
)
"""Words that have another in the field: transfer, copy stream, version check, statistics, mbarrier, acc_t, ..."""


def test_the_readme_is_short():
    assert len((CSRC.parent / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_one_word_stands_for_one_thing():
    root = CSRC.parent
    pages = [root / "README.md", *(root / "docs").rglob("*.rst"), *PACKAGE.rglob("*.py"), *CSRC.rglob("*.*")]
    found = {str(p.relative_to(root)): DIALECT.findall(p.read_text(encoding="utf-8")) for p in pages if p.is_file()}
    assert not {page: words for page, words in found.items() if words}


def test_the_library_has_a_submodule_per_room():
    built = FLOORS.keys() if weft._C.with_cuda else FLOORS.keys() - {"jit"}
    assert {name for name in dir(weft._C) if not name.startswith("__")} == {*built, "_testing", "with_cuda"}


MODULES = {
    ".".join(("weft", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(name: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in it."""
    found = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            # What is imported from a package is a module of that name, or else the package's own.
            names = [a.name for a in node.names if a.name != "_C"]  # the compiled library
            found |= {f"{base}.{name}" if f"{base}.{name}" in MODULES else base for name in names}
    # With a module its package is imported, too; the outermost comes first whatever is imported.
    found |= {wanted.rpartition(".")[0] for wanted in found if wanted.count(".") > 1}
    return found & MODULES.keys() - {name, package}


PYTHON_FLOORS: dict[str, set[str]] = {
    "_base": {"_version"},
    "_sparse": {"_base"},
    "_scan": {"_base", "_sparse"},
    "_rnn": {"_base"},
    "_vertex": {"_base"},
    "_offload": {"_base"},
    "_distributed": {"_base", "_rnn", "_scan"},
}
"""The rooms that a room of Python imports, just these: of _base its modules, of another room what its package names."""

FACES = ("nn", "scan", "sparse", "vertex", "offloading", "distributed", "reference")
"""Public modules that hold names and docstrings."""


def room_of_module(name: str) -> str:
    """The part of a module's name behind weft, empty for weft itself."""
    return name.split(".")[1] if "." in name else ""


def test_rooms_of_python_are_listed():
    rooms = {room_of_module(name) for name, path in MODULES.items() if path.name == "__init__.py"} - {"", "vertex"}
    assert rooms == PYTHON_FLOORS.keys()


@pytest.mark.parametrize("room", PYTHON_FLOORS)
def test_a_room_of_python_stands_on_lower_floors(room: str):
    used: dict[str, str] = {}
    for name in MODULES:
        if room_of_module(name) == room:
            for wanted in imports(name) - {"weft"}:
                if room_of_module(wanted) != room:
                    used[wanted] = name
    assert {room_of_module(wanted) for wanted in used} == PYTHON_FLOORS[room], f"{room} imports {used}"
    private = {
        wanted: by for wanted, by in used.items() if wanted.count(".") > 1 and not wanted.startswith("weft._base.")
    }
    assert not private, f"{room} imports another room's modules: {private}"


@pytest.mark.parametrize("face", FACES)
def test_a_face_holds_names_alone(face: str):
    for node in ast.parse(MODULES[f"weft.{face}"].read_text()).body:
        assert not isinstance(node, (ast.FunctionDef, ast.ClassDef)), f"{face}: {node.name} belongs behind it"


def test_no_module_imports_itself_by_way_of_others():
    left = {name: imports(name) for name in MODULES}
    assert left["weft._rnn.explain"] >= {"weft._rnn.select.choice", "weft._rnn.calls"} and "weft._ops" in left["weft"]
    while True:
        ready = {name for name, wanted in left.items() if not wanted & left.keys()}
        if not ready:
            break
        left = {name: wanted for name, wanted in left.items() if name not in ready}
    assert not left, f"these import each other: {left}"


def test_torchs_private_functions_are_in_one_file():
    # torch._check and its kin, and these two of Dynamo's, are documented.
    private = re.compile(
        r"torch\._(?!_|check|dynamo\.(?:graph_break|disable)\()|torch\.[\w.]+\._[a-z]|forward_ad\._"
        r"|^ *from torch[\w.]* import .*\b_\w|^ *from torch\._|^ *from torch\.[\w.]+\._|import torch\._",
        re.MULTILINE,
    )
    found = {name for name, path in MODULES.items() if private.search(path.read_text())}
    assert found == {"weft._base.torch_private"}
