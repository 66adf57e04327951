"""Kernels compiled at run time: the compiler is found late or never, the cache heals, launches are what they say."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import weft
from weft import _C, _ops

from tests import fresh

ROOT = Path(__file__).resolve().parents[2]
PROBE = "jit/probe.jit.cu"
ARCH = 90

pytestmark = pytest.mark.skipif(not _ops.WITH_CUDA, reason="built for the CPU alone")
OBSTACLE = _C.jit.why_unavailable() if _ops.WITH_CUDA else None
needs_nvrtc = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))

# What a process has compiled once it keeps: every test takes constants of its own.
_factors = itertools.count(1000 * os.getpid())


@pytest.fixture
def defines() -> list[str]:
    return [f"PROBE_FACTOR={next(_factors)}ll"]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Where several run at once, or the loader is to see all of it; else tests.fresh."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def compile_elsewhere(*all_defines: list[str]) -> list[str]:
    """Where another process has each cubin from."""
    code = (
        "import json, sys; from weft import _C\n"
        f"print(json.dumps([_C._testing.jit_compile({PROBE!r}, d, {ARCH})[1] for d in {list(all_defines)!r}]))"
    )
    done = fresh.python(code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sources_are_embedded_byte_for_byte():
    sources = _C._testing.jit_sources()
    assert {p.relative_to(ROOT / "csrc").as_posix() for p in (ROOT / "csrc").rglob("*.jit.*")} <= sources.keys()
    assert all(text == (ROOT / "csrc" / name).read_bytes() for name, text in sources.items())
    included = {name for text in sources.values() for name in re.findall(rb'^#include "(.+)"', text, re.MULTILINE)}
    assert {name.decode() for name in included} <= sources.keys()


def test_digest_is_sha256():
    for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 1000):
        data = bytes(7 * i % 256 for i in range(size))
        assert _C._testing.jit_sha256(data) == hashlib.sha256(data).hexdigest()


@needs_nvrtc
def test_a_second_process_reads_what_the_first_compiled(cache, defines):
    code, origin = _C._testing.jit_compile(PROBE, defines, ARCH)
    assert origin == "compiled" and code.startswith(b"\x7fELF")
    assert _C._testing.jit_compile(PROBE, defines, ARCH) == (code, "memory")
    (entry,) = files(cache)
    assert entry.parent == cache / weft.__version__ / "sm_90a" == Path(_C.jit.cache_dir()) / "sm_90a"
    assert entry.read_bytes().startswith(code)
    assert compile_elsewhere(defines) == ["disk"]


@needs_nvrtc
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_architecture_compiles(arch, cache, defines):
    code, origin = _C._testing.jit_compile(PROBE, defines, arch)
    assert origin == "compiled" and b"probe_cluster" in code


@needs_nvrtc
def test_entries_differ_by_macros_and_architecture(cache, defines):
    variants = [defines, [*defines, "A=1"], [*defines, "A=12"], [*defines, "A=1", "B=2"], [*defines, "B=2", "A=1"]]
    for variant in variants:
        assert _C._testing.jit_compile(PROBE, variant, ARCH)[1] == "compiled"
    assert len({path.name for path in files(cache)}) == len(variants)
    assert _C._testing.jit_compile(PROBE, defines, 80)[1] == "compiled"
    assert len({path.name for path in files(cache)}) == len(variants) + 1


@pytest.mark.slow
@needs_nvrtc
def test_damaged_entries_are_made_again(cache):
    def folder_in_its_place(path: Path) -> None:
        path.unlink()
        path.mkdir()

    damage = [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:20]),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(path.read_bytes()[:1000] + b"?" + path.read_bytes()[1001:]),
        lambda path: path.write_bytes(path.read_bytes()[-40:]),
        folder_in_its_place,
    ]
    variants = [[f"PROBE_FACTOR={next(_factors)}ll"] for _ in damage]
    known: dict[Path, bytes] = {}
    for variant, change in zip(variants, damage, strict=True):
        _C._testing.jit_compile(PROBE, variant, ARCH)
        (entry,) = set(files(cache)) - set(known)
        known[entry] = entry.read_bytes()
        change(entry)
        if entry.is_dir():
            (entry / "file").touch()
            known[entry / "file"] = b""
            del known[entry]
    assert compile_elsewhere(*variants) == ["compiled"] * len(variants)
    assert {path: path.read_bytes() for path in files(cache)} == known
    assert compile_elsewhere(*variants) == ["disk"] * (len(variants) - 1) + ["compiled"]


@needs_nvrtc
@pytest.mark.parametrize("place", ["file/below", "/proc/nowhere"])
def test_a_cache_that_cannot_be_written_costs_nothing_else(place, tmp_path, monkeypatch, defines):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / place))
    assert _C._testing.jit_compile(PROBE, defines, ARCH)[1] == "compiled"
    assert _C._testing.jit_compile(PROBE, defines, ARCH)[1] == "memory"
    assert files(tmp_path) == [tmp_path / "file"]


@needs_nvrtc
def test_a_failed_compilation_shows_the_log_and_leaves_nothing(cache):
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"probe\.jit\.cu does not compile for sm_90a with -DPROBE_FACTOR=\("
        ) as e:
            _C._testing.jit_compile(PROBE, ["PROBE_FACTOR=("], ARCH)
        assert "error: expected an expression" in str(e.value)
    assert files(cache) == []


@needs_nvrtc
def test_what_is_not_there_is_named():
    with pytest.raises(RuntimeError, match=r"no embedded source jit/absent\.jit\.cu"):
        _C._testing.jit_compile("jit/absent.jit.cu", [], ARCH)
    assert "does not compile for sm_35" in _C.jit.why_unavailable(35)
    with pytest.raises(RuntimeError, match=r"probe\.jit\.cu cannot be compiled: NVRTC .* does not compile for sm_35"):
        _C._testing.jit_compile(PROBE, [], 35)


@needs_nvrtc
def test_threads_share_a_compilation(cache, defines):
    start = threading.Barrier(8)

    def work(_: int) -> str:
        start.wait()
        return _C._testing.jit_compile(PROBE, defines, ARCH)[1]

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(8))) == ["compiled"] + ["memory"] * 7


@pytest.mark.slow
@needs_nvrtc
def test_processes_may_write_one_entry_at_once(cache, defines):
    code = (
        "import os; from weft import _C\n"
        "first, others = os.getpid(), []\n"
        "while len(others) < 2 and (other := os.fork()): others.append(other)\n"
        f"print(len(_C._testing.jit_compile({PROBE!r}, {defines!r}, {ARCH})[0]), flush=True)\n"
        "assert os.getpid() != first or all(os.waitpid(other, 0)[1] == 0 for other in others)"
    )
    done = fresh.python(code)
    assert done.returncode == 0 and len(lines := done.stdout.split()) == 3 and len(set(lines)) == 1, done
    assert len(files(cache)) == 1
    assert compile_elsewhere(defines) == ["disk"]


@needs_nvrtc
def test_many_at_once(cache):
    requests = [(PROBE, [f"PROBE_FACTOR={next(_factors)}ll"], arch) for arch in (80, 90) for _ in range(4)]
    _C.jit.compile_many([*requests, requests[0]])
    assert len(files(cache)) == len(requests)
    assert [_C._testing.jit_compile(*request)[1] for request in requests] == ["memory"] * len(requests)
    good = (PROBE, [f"PROBE_FACTOR={next(_factors)}ll"], ARCH)
    with pytest.raises(RuntimeError, match="expected an expression"):
        _C.jit.compile_many([(PROBE, ["PROBE_FACTOR=("], ARCH), good])
    assert _C._testing.jit_compile(*good)[1] == "memory"


@pytest.mark.slow
@pytest.mark.parametrize("library", ["/nowhere/libnvrtc.so", "libm.so.6"])
def test_without_nvrtc_everything_else_works(library):
    code = (
        "import json, torch, weft; from weft import _C, info\n"
        "y = weft.scan.linear_scan(torch.rand(3, 2, 4), torch.rand(3, 2, 4), torch.rand(2, 4))\n"
        f"try: _C._testing.jit_compile({PROBE!r}, [], {ARCH})\n"
        "except RuntimeError as error: print(json.dumps([_C.jit.why_unavailable(), str(error), info.collect()]))"
    )
    done = fresh.python(code, WEFT_NVRTC=library)
    assert done.returncode == 0, done.stderr
    why, error, facts = json.loads(done.stdout)
    assert library in why or "libnvrtc has no nvrtcVersion" in why
    assert error == f"weft: {PROBE} cannot be compiled: {why}"
    assert facts["compiler"]["nvrtc"] is None and facts["compiler"]["obstacle"] == why


@needs_nvrtc
def test_nvrtc_is_found_where_it_is_said_to_be():
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libnvrtc.so" in line}
    done = fresh.python("from weft import _C; print(_C.jit.why_unavailable())", WEFT_NVRTC=loaded.pop())
    assert done.stdout.strip() == "None", done.stderr


def test_importing_opens_neither_nvrtc_nor_the_driver():
    # torch opens libnvrtc itself, so the loader has to tell what is opened on top of that.
    code = (
        "import os, torch\n"
        "os.write(2, b'<1>'); import weft, weft.info; from weft import _C\n"
        "os.write(2, b'<2>'); _C.jit.why_unavailable(); os.write(2, b'<3>')"
    )
    done = python(code, LD_DEBUG="files")
    assert done.returncode == 0, done.stderr
    importing = done.stderr[done.stderr.index("<1>") : done.stderr.index("<2>")]
    asking = done.stderr[done.stderr.index("<2>") : done.stderr.index("<3>")]
    assert "weft/_C" in importing
    assert "libnvrtc" not in importing and "libcuda.so" not in importing
    assert "libnvrtc" in asking and "libcuda.so" not in asking


# From here on kernels run. `launch` gives 64-bit parameters; tensors go as their addresses.


def launch(entry, grid, block, arguments, *, defines=(), shared=0, cluster=1, cooperative=False, stream=None):
    stream = torch.cuda.current_stream() if stream is None else stream
    addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
    _C._testing.jit_launch(
        PROBE,
        list(defines),
        entry,
        (grid, 1, 1),
        (block, 1, 1),
        shared,
        cluster,
        cooperative,
        stream.cuda_stream,
        addresses,
    )


def limits(entry, block, shared=0, cluster=1):
    return _C._testing.jit_limits(PROBE, [], entry, (block, 1, 1), shared, cluster)


def int64(n: int) -> torch.Tensor:
    return torch.full((n,), -1, dtype=torch.int64, device="cuda")


needs_clusters = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="clusters need sm_90"
)


@pytest.mark.cuda
def test_a_kernel_runs_with_its_macros(cache, defines):
    factor = int(defines[0].removeprefix("PROBE_FACTOR=").removesuffix("ll"))
    for expected, variant in ((1, ()), (factor, defines)):
        out = int64(1000)
        launch("probe_fill", 8, 128, [out, 999, 7], defines=variant)
        assert out.tolist() == [expected * (7 + i) for i in range(999)] + [-1]


@pytest.mark.cuda
def test_a_side_stream():
    stream = torch.cuda.Stream()
    out = int64(1 << 20)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        launch("probe_fill", 1 << 12, 256, [out, 1 << 20, 0])
        torch.cuda._sleep(1_000_000)
    assert not stream.query()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, torch.arange(1 << 20, device="cuda"))


@pytest.mark.cuda
@needs_clusters
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("shared", [4, 49152, 200000, None])
@pytest.mark.parametrize("cooperative", [False, True])
def test_clusters(size, shared, cooperative):
    if shared is None:  # all that a block can have
        shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    resident = limits("probe_cluster", 64, shared, size)["max_active_clusters"]
    assert 0 < resident * size <= limits("probe_cluster", 64, shared)["max_active_clusters"]
    blocks = size * min(resident, 5)
    out = int64(blocks)
    launch("probe_cluster", blocks, 64, [out, shared], shared=shared, cluster=size, cooperative=cooperative)
    assert out.tolist() == [i // size * size + (i % size + 1) % size for i in range(blocks)]


@pytest.mark.cuda
def test_a_cooperative_launch_has_all_its_blocks_at_once():
    facts = limits("probe_grid", 256)
    most = facts["max_active_blocks_per_sm"] * facts["sm_count"]
    assert most == facts["max_active_clusters"] >= facts["sm_count"]
    out, counter = int64(most), torch.zeros(1, dtype=torch.int64, device="cuda")
    launch("probe_grid", most, 256, [out, counter], cooperative=True)
    assert out.unique().tolist() == [most]


@pytest.mark.cuda
def test_refusals_name_the_kernel_and_leave_no_error_behind():
    facts = limits("probe_grid", 256)
    most = facts["max_active_blocks_per_sm"] * facts["sm_count"]
    out, counter = int64(1), torch.zeros(1, dtype=torch.int64, device="cuda")
    optin = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for words, entry, grid, block, options in (
        (f"cooperative.*{facts['max_active_blocks_per_sm']} blocks fit on each of", "probe_grid", most + 1, 256,
         {"cooperative": True}),
        ("block of 1025 threads", "probe_grid", 1, 1025, {}),
        ("block of 0 threads", "probe_grid", 1, 0, {}),
        (f"bytes of shared memory, a block of the device has {optin}", "probe_grid", 1, 32, {"shared": optin + 1}),
        ("not made of clusters of 2", "probe_grid", 3, 32, {"cluster": 2}),
        ("clusters of 17 blocks", "probe_grid", 17, 32, {"cluster": 17}),
        ("cudaLibraryGetKernel", "probe_absent", 1, 32, {}),
    ):  # fmt: skip
        with pytest.raises(
            RuntimeError, match=rf"weft: kernel jit/probe\.jit\.cu:{entry}: .*({words}|compute capability)"
        ):
            launch(entry, grid, block, [out, counter], **options)
    assert limits("probe_grid", 1025)["max_active_blocks_per_sm"] == 0
    assert limits("probe_grid", 32, optin + 1, 2)["max_active_clusters"] == 0
    assert limits("probe_grid", 32, 0, 17)["max_active_clusters"] == 0
    launch("probe_grid", 0, 32, [out, counter])
    torch.zeros(1, device="cuda") + 1
    torch.cuda.synchronize()
    assert counter.item() == 0


@pytest.mark.cuda
def test_what_a_kernel_takes():
    facts = limits("probe_fill", 1024)
    assert 0 < facts["registers"] <= 64 and facts["local_bytes"] == 0 and facts["static_shared_bytes"] == 0
    assert facts["max_threads"] == 1024
    assert facts["sm_count"] == torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.cuda
@pytest.mark.parametrize("cooperative", [False, True])
def test_a_graph_captures_even_the_first_launch(cooperative, cache, defines):
    factor = int(defines[0].removeprefix("PROBE_FACTOR=").removesuffix("ll"))
    out = int64(64)
    shared = 100000
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch("probe_cluster", 64, 32, [out, shared], defines=defines, shared=shared, cooperative=cooperative)
    assert out.unique().tolist() == [-1]
    for _ in range(2):
        out.fill_(-1)
        graph.replay()
        assert out.tolist() == [factor * i for i in range(64)]


@pytest.mark.cuda
def test_threads_share_a_kernel(cache, defines):
    outs = [int64(256) for _ in range(8)]
    start = threading.Barrier(8)

    def work(out: torch.Tensor) -> None:
        start.wait()
        launch("probe_fill", 1, 256, [out, 256, 0], defines=defines)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, outs))
    assert len({tuple(out.tolist()) for out in outs}) == 1 and outs[0][0] == 0


@pytest.mark.cuda(devices=2)
def test_a_second_device():
    with torch.cuda.device(1):
        out = int64(10)
        launch("probe_fill", 1, 32, [out, 10, 0])
        assert out.tolist() == list(range(10))
