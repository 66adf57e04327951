"""Rules of vertex_frontiers: fake tensors, vmap, autocast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.rules import LIBRARY
from .._base.torch_private import below_autocast


@torch.library.register_fake("weft::vertex_frontiers")
def _forward_fake(
    inputs: Sequence[Tensor],
    matrices: Sequence[Tensor],
    vectors: Sequence[Tensor],
    schedule: Tensor,
    host_schedule: Tensor,
    program: torch.ScriptObject,
    num_vertices: int,
    num_inner: int,
    num_edges: int,
) -> list[Tensor]:
    rows = {"inner": num_inner, "edges": num_edges}
    return [
        schedule.new_empty((rows.get(space, num_vertices), width), dtype=getattr(torch, dtype))
        for space, width, dtype in program.results()
    ]


@torch.library.register_fake("weft::vertex_frontiers_backward")
def _backward_fake(
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    matrices: Sequence[Tensor],
    vectors: Sequence[Tensor],
    saved: Sequence[Tensor],
    schedule: Tensor,
    host_schedule: Tensor,
    program: torch.ScriptObject,
    of_inputs: Sequence[int],
    of_matrices: Sequence[int],
    of_vectors: Sequence[int],
    overlap: bool,
) -> list[Tensor]:
    lists = ((inputs, of_inputs), (matrices, of_matrices), (vectors, of_vectors))
    return [tensors[i].new_empty(tensors[i].shape) for tensors, numbers in lists for i in numbers]


def _refuse_vmap(op: str) -> None:
    def rule(info: Any, in_dims: Sequence[Any], *args: object) -> None:
        raise RuntimeError(f"{op}: has no dimension to map; batch the graphs by weft.Graphs.batch")

    torch.library.register_vmap(f"weft::{op}", rule)


def _below_autocast(op: str) -> None:
    """What the program computes in is decided when it is compiled, by the autocast of that moment."""

    def rule(*args: object) -> list[Tensor]:
        with below_autocast():
            return getattr(torch.ops.weft, op)(*args)

    for key in ("AutocastCPU", "AutocastCUDA"):
        LIBRARY.impl(op, rule, key)


for _op in ("vertex_frontiers", "vertex_frontiers_backward"):
    _refuse_vmap(_op)
    _below_autocast(_op)
