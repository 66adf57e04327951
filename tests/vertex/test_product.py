"""Large products on CUDA."""

from __future__ import annotations

import copy

import pytest
import torch
import weft
from weft import _C, _ops

from tests.common import relative_error


@pytest.mark.skipif(not _ops.WITH_CUDA, reason="built for the CPU alone")
@pytest.mark.parametrize(("tile", "arch"), [(64, 80), (128, 90)])
def test_it_compiles_for_cuda(tile, arch, tmp_path, monkeypatch):
    if _C.jit_why_unavailable() is not None:
        pytest.skip(_C.jit_why_unavailable())
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    for deep in ((1, 1), (1, 0), (0, 0)):
        defines = [f"WEFT_PRODUCT_{name}={tile}" for name in ("ROWS", "COLUMNS")]
        defines += [f"WEFT_PRODUCT_{name}_DEEP={value}" for name, value in zip("AB", deep, strict=True)]
        code, _ = _C._testing.jit_compile("vertex/cuda/product.jit.cu", defines, arch)
        assert b"vertex_product" in code


@pytest.mark.cuda
@pytest.mark.parametrize("H", [128, 260])
def test_large_frontiers_on_cuda(H):
    graphs = weft.Graphs.from_parents([[32 + v // 2 for v in range(62)] + [-1]] * 600).to("cuda")
    cell = weft.vertex.models.TreeFC(H).cuda()
    x = torch.randn(graphs.num_vertices, H, device="cuda", requires_grad=True)
    grad = torch.randn_like(x)

    def step(cell: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        given = x.detach().to(dtype).requires_grad_()
        out = cell(graphs, given, executor="batched")
        return [out.detach(), *torch.autograd.grad(out, [given, *cell.parameters()], grad.to(dtype))]

    found, again = step(cell, torch.float32), step(cell, torch.float32)
    wanted = step(copy.deepcopy(cell).double(), torch.float64)
    for f, a, w in zip(found, again, wanted, strict=True):
        assert torch.equal(f, a)
        assert relative_error(f, w) < 3e-6
