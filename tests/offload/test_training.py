"""weft.offload where people train: with checkpointing, sharded parameters, accumulated gradients and trainers."""

from __future__ import annotations

import copy
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.offload.engines import everything, numbers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def layers(count: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(count))


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_not_recomputed_moves(reentrant: bool) -> None:
    """Every other layer is recomputed, and its input moves as the rest does."""
    model, off = layers(), everything()

    def forward(x: Tensor, recompute: bool) -> Tensor:
        for i, layer in enumerate(model):
            if recompute and i % 2 == 0:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            else:
                x = layer(x)
        return x.square().mean()

    x = torch.randn(64, 32, requires_grad=True)
    forward(x, False).backward()
    expected = [x.grad, *gradients(model)]
    saved = {}
    for recompute in (False, True):
        for _ in range(3):
            x.grad = None
            with off:
                loss = forward(x, recompute)
            loss.backward()
            assert all(map(torch.equal, [x.grad, *gradients(model)], expected))
        del loss
        saved[recompute] = numbers(off)["saved_bytes"]
        assert numbers(off)["moved_bytes"] > 0.9 * saved[recompute] and numbers(off)["live_bytes"] == 0
    assert saved[True] < 0.8 * saved[False]


def test_accumulated_gradients() -> None:
    """A use per part of a batch; one plan serves them all."""
    model, off = nn.Sequential(*layers()), everything()
    parts = torch.randn(6, 16, 32)
    for part in parts:
        model(part).square().mean().backward()
    expected = gradients(model)
    for part in parts:
        with off:
            loss = model(part).square().mean()
        loss.backward()
    assert all(map(torch.equal, gradients(model), expected))
    assert numbers(off)["uses"] == 6 and off._latest.use.planned() and numbers(off)["moved_bytes"] > 0


def test_several_forwards_in_one_use() -> None:
    model, off = nn.Sequential(*layers()), everything()
    other = copy.deepcopy(model)
    parts = torch.randn(3, 16, 32)
    sum(other(part).square().mean() for part in parts).backward()
    with off:
        loss = sum(model(part).square().mean() for part in parts)
    loss.backward()
    assert all(map(torch.equal, gradients(model), gradients(other)))


SHARDED = """
import sys, torch, weft
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = torch.distributed.init_device_mesh("cpu", (1,))
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
x, results = torch.randn(64, 32), []
off = weft.offload(0, backend="reference", min_bytes=0, keep_last=0)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for use in range(4):
    if use == 0:
        loss = model(x).square().mean()
    else:
        with off:
            loss = model(x).square().mean()
    loss.backward()
    results.append([p.grad.full_tensor().clone() for p in model.parameters()])
    model.zero_grad()
assert all(torch.equal(a, b) for found in results[1:] for a, b in zip(found, results[0]))
del loss
report = off.report().to_dict()
assert report["moved_bytes"] > 0 and report["live_bytes"] == 0, report
# Three saved tensors for each of four layers: what the linear layer and the GELU read; no parameter.
assert report["saved_bytes"] <= 3 * 4 * 64 * 32 * 4, report
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_parameters(tmp_path: Path) -> None:
    """FSDP2, which gathers parameters for a layer and frees them behind it: they do not move."""
    pytest.importorskip("torch.distributed.fsdp")
    command = [sys.executable, "-c", SHARDED, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_sharded_example(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.fsdp")
    figure = tmp_path / "step.png"
    command = [sys.executable, str(EXAMPLES / "offload_fsdp.py"), "--quick", "--output", str(figure)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"use 4\nbudget +4 MB +\(met\)\nsaved .*\nmoved +[1-9][\d.]* MB", done.stdout)
    assert found is not None and figure.stat().st_size > 1000, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "example"), [("lightning", "offload_lightning.py"), ("transformers", "offload_trainer.py")]
)
def test_trainers(package: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    report = runpy.run_path(str(EXAMPLES / example))["main"]().to_dict()
    assert report["uses"] >= 4 and report["moved_bytes"] > 0 and report["budget_met"]
