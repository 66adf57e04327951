"""python -m weft.info: true on this machine, and without a GPU, a driver or rich."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import weft
from weft import _build_info, info

from tests.fresh import python

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **environment: str) -> str:
    """What `python -m weft.info` prints."""
    command = f"import runpy, sys; sys.argv[1:] = {arguments}; runpy.run_module('weft.info', run_name='__main__')"
    done = python(command, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_json_says_what_this_machine_has():
    facts = json.loads(run("--json"))
    assert facts == info.collect()
    assert facts["versions"]["weft"] == weft.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["build"]["cuda"] == _build_info.CUDA
    assert facts["machine"]["cores"] >= 1
    assert len(facts["machine"]["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert set(facts["engines"]) == {"scan", "sparse", "rnn", "vertex", "offload"}
    assert facts["engines"]["scan"]["cpu"] == facts["engines"]["rnn"]["cpu"] == "runs"
    assert (facts["compiler"]["nvrtc"] is None) != (facts["compiler"]["obstacle"] is None)


def test_hidden_gpus_are_not_needed():
    facts = json.loads(run("--json", CUDA_VISIBLE_DEVICES=""))
    assert facts["machine"]["gpus"] == []
    assert facts["engines"]["scan"]["cuda"] != "runs"


@pytest.mark.parametrize("rich", [True, False])
def test_for_people(rich, monkeypatch, capsys):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    info.main([])
    printed = capsys.readouterr().out
    for word in ("versions", weft.__version__, torch.__version__, "engines", "scan", "NVRTC", "cache"):
        assert word in printed


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert info.cache_dir() == tmp_path / "elsewhere"
    facts = info.collect()
    assert facts["cache"] == str(tmp_path / "elsewhere")
    if _build_info.CUDA is not None:
        assert facts["compiler"]["cubins"] == str(tmp_path / "elsewhere" / weft.__version__)
    monkeypatch.delenv("WEFT_CACHE_DIR")
    assert info.cache_dir() == Path.home() / ".cache" / "weft"


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        (["8.0"], (8, 0), True),
        (["8.0"], (8, 6), True),
        (["8.6"], (8, 0), False),
        (["8.0"], (9, 0), False),
        (["8.0+PTX"], (9, 0), True),
        (["8.0+PTX"], (7, 5), False),
        (["9.0a"], (9, 0), True),
        (["9.0a"], (10, 0), False),
        (["9.0a", "8.0+PTX"], (12, 0), True),
        (["Hopper"], (9, 0), False),
        ([], (9, 0), False),
    ],
)
def test_which_architectures_run_where(architectures, capability, expected):
    assert info._runs_on(architectures, capability) is expected


@pytest.mark.parametrize(
    ("built", "architectures", "capabilities", "expected"),
    [
        (None, [], ["9.0"], "not built"),
        ("13.0", ["9.0a"], [], "built; no CUDA device here"),
        ("13.0", ["9.0a"], ["9.0"], "runs"),
        ("13.0", ["9.0a"], ["9.0", "8.0"], "not built for sm_80"),
    ],
)
def test_state_of_an_engine_on_cuda(built, architectures, capabilities, expected, monkeypatch):
    monkeypatch.setattr(_build_info, "CUDA", built)
    monkeypatch.setattr(_build_info, "ARCHITECTURES", architectures)
    assert info._engine_on_cuda([{"compute_capability": c} for c in capabilities]) == expected
