"""Chains with sparse Jacobians: the tree of products over patterns, what it costs, and running it.

Everything that follows from patterns alone is made once per chain of patterns and kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._base import costs as gpu_costs
from .._base.arguments import check_dense
from .._base.torch_private import differentiated_by_transform
from .._sparse import BatchedCSR, MatmulPlan, Pattern, count_flops, full_pattern, planned
from .schedule import SCHEDULES, levels_of

ALL_LEVELS = 63


class Step(NamedTuple):
    """One step of a backward pass."""

    kind: str
    """"mm", a product of two Jacobians, or "mv", of a Jacobian and a gradient."""
    phase: str
    """"up", "middle" or "down"."""
    level: int
    """In order of execution, from 0; steps of one level do not depend on each other."""
    flops: int
    """For one sample."""
    critical: bool
    """Whether this is the largest step of its level."""
    layers: tuple[int, int] = (0, 0)
    """First and last of the layers whose Jacobian the step makes, or multiplies with a gradient; counted from the end
    of the chain, or in a :class:`ChainPlan` the positions of the layers in the net."""
    elements: int = 0
    """Stored elements of that Jacobian."""


class Costs(NamedTuple):
    """What a schedule costs on a device, in microseconds: a model that is right about orders of magnitude."""

    product: float
    """The call of a product of two matrices."""
    call: float
    """The call of a product of matrix and vector by itself."""
    link: float
    """One more product of matrix and vector in a linear chain."""
    axpy: float
    """1e9 FLOPs of a product's rows that are sums of whole rows."""
    gather: float
    """The same of rows whose products are listed."""
    accumulate: float
    """The same of a product's other rows."""
    expand: float
    """The same of rows that a GPU expands in shared memory."""
    vector: float
    """1e9 FLOPs of products of matrix and vector."""
    layer: float
    """torch's own backward pass of one layer: the call."""
    dense: float
    """1e9 FLOPs of its convolutions and matrix products."""


# As `python -m benchmarks.sparse fit` prints it, on two cores that had other work, too; a CPU expands nothing.
_CPU = Costs(
    product=7.6, call=15.0, link=7.1, axpy=2.2e5, gather=7.1e6, accumulate=2.1e6, expand=2.1e6, vector=1.7e6,
    layer=14.0, dense=5.7e4,
)  # fmt: skip
_SHARE_OF_MEMORY = 0.25
"""Of the device's, that products may take."""


def costs_on(device: torch.device) -> Costs:
    if device.type != "cuda":
        return _CPU
    table = gpu_costs.of(device.index).tables["scan.sparse_chain"]
    return Costs(**{name: table[name][0] for name in Costs._fields})


class Tree:
    """The products over patterns, last layer first: ``levels`` of them up, then vectors."""

    def __init__(self, patterns: Sequence[Pattern], levels: int) -> None:
        self.leaves = list(patterns)
        self.plans: list[list[MatmulPlan]] = []  # of each up-sweep level
        nodes: list[Pattern | None] = list(patterns)
        self.nodes = [nodes]  # patterns of every level; the last one above the leaves is never formed
        self._core: _C.scan.CsrTree | None = None  # made when it first runs
        while len(self.plans) < levels and len(nodes) > 1:
            # Products may be empty where two nodes are left: the level then only moves the last one.
            plans = [planned(nodes[i + 1], nodes[i]) for i in range(0, len(nodes) - 2, 2)]
            nodes = [*(plan._pattern for plan in plans), None]
            self.plans.append(plans)
            self.nodes.append(nodes)

    @property
    def levels(self) -> int:
        return len(self.plans)

    def steps(self) -> list[Step]:
        def node(level: int, index: int) -> tuple[int, int, int]:
            """First and last leaf under a node, and its elements."""
            last = min((index + 1) << level, len(self.leaves)) - 1
            return index << level, last, self.nodes[level][index].nnz

        def vector(level: int, index: int) -> tuple[int, tuple[int, int, int]]:
            return 2 * self.nodes[level][index].nnz, node(level, index)

        top = self.levels
        phases: list[tuple[str, str, list[tuple[int, tuple[int, int, int]]]]] = []
        for level, plans in enumerate(self.plans):
            phases.append(("mm", "up", [(plan.flops, node(level + 1, i)) for i, plan in enumerate(plans)]))
        for i in range(len(self.nodes[top]) - 1):
            phases.append(("mv", "middle", [vector(top, i)]))
        for level in range(top - 1, -1, -1):
            phases.append(("mv", "down", [vector(level, i) for i in range(0, len(self.nodes[level]) - 1, 2)]))
        if self.leaves:
            phases.append(("mv", "down" if top else "middle", [vector(0, len(self.leaves) - 1)]))
        steps: list[Step] = []
        for level, (kind, phase, parts) in enumerate(p for p in phases if p[2]):
            flops = [f for f, _ in parts]
            largest = flops.index(max(flops))
            steps += [
                Step(kind, phase, level, f, i == largest, (first, last), elements)
                for i, (f, (first, last, elements)) in enumerate(parts)
            ]
        return steps

    def memory(self, batches: Sequence[int | None], element: int) -> int:
        """Bytes of all products and plans, for matrices with values of these batches."""
        total, below = 0, list(batches)
        for plans in self.plans:
            above: list[int | None] = []
            for i, plan in enumerate(plans):
                batch = below[2 * i] if below[2 * i + 1] is None else below[2 * i + 1]
                above.append(batch)
                total += plan.memory + plan.nnz * element * (1 if batch is None else batch)
            below = [*above, None]
        return total

    def run(self, grad: Tensor, matrices: Sequence[BatchedCSR]) -> list[Tensor]:
        """``grad`` (B, n_0); all gradients but ``grad``."""
        if not matrices:
            return []
        values = [J._values for J in matrices]
        found = None
        if not torch.compiler.is_compiling():
            if self._core is None:
                patterns = [[[] if p.diagonal else p.tensors for p in level if p is not None] for level in self.nodes]
                self._core = _C.scan.CsrTree(patterns, [[plan._patterns for plan in plans] for plans in self.plans])
            graph = torch.is_grad_enabled() and (grad.requires_grad or any(v.requires_grad for v in values))
            found = self._core.backward(grad, values, self._transposed() if graph else [])
        if found is None:  # in graphs and transforms of torch one product after the other, with the same numbers
            found = []
            for J in matrices:
                grad = J.mv(grad)
                found.append(grad)
        return found

    def _transposed(self) -> list[list[list[Tensor]]]:
        """Of every node, for gradients."""
        return [[[] if p.diagonal else p.transposed for p in level if p is not None] for level in self.nodes]


# The trees of chains that have been seen, least recently used dropped first.
_CACHE_SIZE = 64
_trees: OrderedDict[tuple, tuple[Tree, list[Pattern]]] = OrderedDict()


def tree_of(patterns: Sequence[Pattern], levels: int, batches: Sequence[int | None], dtype: torch.dtype) -> Tree:
    """The tree for these patterns; ``levels`` -1 chooses."""
    batch = max((b for b in batches if b is not None), default=1)
    key = (levels, batch if levels < 0 else None, *(id(p) for p in patterns))
    found = _trees.get(key)
    if found is None:
        tree = Tree(patterns, levels) if levels >= 0 else _choose(patterns, batches, batch, dtype)[0]
        # The patterns are held, so that no id comes again.
        found = _trees[key] = (tree, list(patterns))
        if len(_trees) > _CACHE_SIZE:
            _trees.popitem(last=False)
    else:
        _trees.move_to_end(key)
    return found[0]


class Candidate(NamedTuple):
    """A number of levels that "auto" has looked at."""

    levels: int
    microseconds: float
    """Expected; of one that was given up before it was planned, of its cheapest part alone."""
    why_not: str
    """Empty for the one that was taken."""


def explain(
    patterns: Sequence[Pattern], batches: Sequence[int | None], dtype: torch.dtype
) -> tuple[Tree, list[Candidate]]:
    """What "auto" takes for this chain, and what it has looked at."""
    return _choose(patterns, batches, max((b for b in batches if b is not None), default=1), dtype)


def _choose(
    patterns: Sequence[Pattern], batches: Sequence[int | None], batch: int, dtype: torch.dtype
) -> tuple[Tree, list[Candidate]]:
    """As many levels of the up-sweep as pay: of products whose FLOPs are counted before they are planned."""
    best = Tree(patterns, 0)
    if not patterns:
        return best, []
    device = patterns[0].crow.device
    costs = costs_on(device)
    least = costs.call + _vectors(patterns, costs, batch)
    seen = [Candidate(0, least, "")]
    if len(patterns) < 3:
        return best, seen
    limit = _SHARE_OF_MEMORY * _memory(device)
    cheapest = min(costs.axpy, costs.gather, costs.accumulate, costs.expand)
    tree, ups = best, 0.0
    for levels in range(1, ALL_LEVELS):
        nodes = tree.nodes[-1]
        pairs = [(nodes[i + 1], nodes[i]) for i in range(0, len(nodes) - 2, 2)]
        if not pairs:
            break
        # Up-sweeps alone may cost more than all vectors: then deeper ones do too, and nothing is planned.
        bound = ups + sum(costs.product + _microseconds(count_flops(*pair), cheapest, batch) for pair in pairs)
        if bound >= least:
            seen.append(Candidate(levels, bound, "its products alone cost more than the best so far"))
            break
        tree = Tree(patterns, levels)
        ups += sum(costs.product + _products(plan, costs, batch) for plan in tree.plans[-1])
        downs = [nodes[i] for nodes in tree.nodes[:-1] for i in range(0, len(nodes) - 1, 2)]
        total = ups + _vectors(tree.nodes[-1][:-1], costs, batch)
        total += sum(costs.call + _microseconds(2 * p.nnz, costs.vector, batch) for p in (*downs, patterns[-1]))
        held = tree.memory(batches, dtype.itemsize)
        if held > limit:
            seen.append(Candidate(levels, total, f"its products take {held / 2**20:.0f} MiB"))
            break
        if total < least:
            seen = [c if c.why_not else c._replace(why_not="slower") for c in seen]
            best, least = tree, total
            seen.append(Candidate(levels, total, ""))
        else:
            seen.append(Candidate(levels, total, "slower"))
    return best, seen


def torch_microseconds(flops: Sequence[int], device: torch.device, batch: int) -> float:
    """What torch's own backward pass may take to the same gradients, of layers with these FLOPs a sample."""
    costs = costs_on(device)
    return sum(costs.layer + _microseconds(f, costs.dense, batch) for f in flops)


def _microseconds(flops: int, gigaflop: float, batch: int) -> float:
    return 1e-9 * flops * batch * gigaflop


def _products(plan: MatmulPlan, costs: Costs, batch: int) -> float:
    kinds = (costs.axpy, costs.gather, costs.accumulate, costs.expand)
    return sum(_microseconds(flops, gigaflop, batch) for flops, gigaflop in zip(plan.kinds, kinds, strict=True))


def _vectors(patterns: Sequence[Pattern], costs: Costs, batch: int) -> float:
    return sum(costs.link + _microseconds(2 * p.nnz, costs.vector, batch) for p in patterns)


def _memory(device: torch.device) -> float:
    """Bytes; a CPU's are taken for 8 GiB, which no plan should come near."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 8 * 2.0**30


# Mixed chains ---------------------------------------------------------------------------------------------------------


def sparse_of(J: Tensor | BatchedCSR) -> BatchedCSR:
    """A dense Jacobian with every element stored."""
    if isinstance(J, BatchedCSR):
        return J
    pattern = full_pattern(*J.shape[-2:], J.device)
    return BatchedCSR._of(pattern, J.reshape(*J.shape[:-2], J.shape[-2] * J.shape[-1]))


def check(grad: Tensor, jacobians: Sequence[Tensor | BatchedCSR]) -> None:
    """What csrc/scan asks of dense Jacobians, of all."""
    op = "chain_backward"
    if grad.dim() not in (1, 2):
        raise ValueError(f"{op}: grad must be (B, n) or (n,), got {list(grad.shape)}")
    if grad.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{op}: grad must be float16, bfloat16, float32 or float64, got {grad.dtype}")
    B, length = (grad.shape[0] if grad.dim() == 2 else None), grad.shape[-1]
    dtype, device = grad.dtype, grad.device
    for position, J in enumerate(jacobians):
        if isinstance(J, BatchedCSR):
            values, sizes = J._values, J._pattern.shape
            if (
                values.dtype is dtype
                and values.device == device
                and sizes[1] == length
                and (values.dim() == 1 or values.shape[0] == B)
            ):  # as good as always, and chains may be long
                length = sizes[0]
                continue
        name = f"{op}: jacobians[{position}]"
        if J.dtype != grad.dtype and not torch.is_autocast_enabled(grad.device.type):
            raise TypeError(f"{name} must have the dtype of grad, {grad.dtype}, got {J.dtype}")
        if J.device != grad.device:
            raise RuntimeError(f"{name} must be on the device of grad, {grad.device}, got {J.device}")
        if isinstance(J, BatchedCSR):
            shape, batch = list(J.shape), J.batch_size
        else:
            if J.dim() not in (2, 3):
                raise ValueError(
                    f"{name} must be (B, n_in, n_out), or (n_in, n_out) shared by the batch, got {list(J.shape)}"
                )
            shape, batch = list(J.shape[-2:]), J.shape[0] if J.dim() == 3 else None
        if batch not in (None, B):
            want = "no batch, as grad has none" if B is None else f"grad's batch, {B}"
            raise ValueError(f"{name} must have {want}, got {[batch, *shape]}")
        if shape[1] != length:
            raise ValueError(
                f"{name} does not chain: its last dimension must be {length}, the length of the gradient that reaches "
                f"it, got {shape if batch is None else [batch, *shape]}"
            )
        length = shape[0]


def chain_backward_sparse(grad: Tensor, jacobians: Sequence[Tensor | BatchedCSR], levels: int) -> list[Tensor]:
    """All gradients but ``grad``; `levels` -1 is "auto"."""
    check(grad, jacobians)
    if grad.dim() == 1:
        return [g.squeeze(0) for g in chain_backward_sparse(grad.unsqueeze(0), jacobians, levels)]
    if torch.is_autocast_enabled(grad.device.type):
        dtype = grad.dtype
        for J in jacobians:
            dtype = torch.promote_types(dtype, J.dtype)
        grad, jacobians = grad.to(dtype), [J.to(dtype) for J in jacobians]
    matrices = [sparse_of(J) for J in jacobians]
    patterns = [J._pattern for J in matrices]
    tree = tree_of(patterns, levels, [J.batch_size for J in matrices], grad.dtype)
    if grad.dtype in (torch.float16, torch.bfloat16):
        # Neither products nor gradients are rounded on their way along the chain.
        return [g.to(grad.dtype) for g in tree.run(grad.float(), [J.to(torch.float32) for J in matrices])]
    return tree.run(grad, matrices)


def chain_backward(
    grad: Tensor, jacobians: Sequence[Tensor | BatchedCSR], schedule: str | int = "auto"
) -> list[Tensor]:
    """Back-propagates ``grad`` through a chain of Jacobians: every gradient along the chain.

    ``g[0] = grad`` and ``g[k] = jacobians[k-1] @ g[k-1]``, for each row of the batch. Differentiable to any order.

    Args:
        grad: ``(B, n_0)``, the gradient of the loss by the chain's output; or ``(n_0,)``, and nothing has a batch.
        jacobians: transposed Jacobians, the last layer's first: each ``(B, n_k, n_{k-1})``, or ``(n_k, n_{k-1})`` for
            the whole batch, where ``n_{k-1}`` is the length of the gradient that reaches it; or a
            :class:`weft.sparse.BatchedCSR`, or a ``torch.sparse_csr`` tensor whose samples have one pattern, in any
            mixture. Sizes may differ from layer to layer; the list may be empty.
        schedule: ``"auto"``, the fast one: products of a matrix and a vector, fused into one :func:`linear_scan` where
            all Jacobians have one square shape; ``"linear"``, one product after the other; ``"blelloch"``, the
            modified Blelloch scan in O(log n) levels (operator A <> B = B A, operands reversed in the down-sweep); or
            an int, that many levels of the up-sweep before the middle is done linearly (0 is linear).

    Returns:
        n + 1 gradients, ``grad`` itself first, then g[k] ``(B, n_k)`` or ``(n_k,)``. float16 and bfloat16 are computed
        in float32.

    Raises:
        TypeError: dtypes are not floating, or differ; an argument is no tensor, ``jacobians`` no list of them; another
            layout; ``schedule`` is neither a string nor an int.
        ValueError: a Jacobian does not chain (named by its position), shapes do not fit, an unknown schedule.
        RuntimeError: devices differ.

    Wherever ``"linear"`` gives finite numbers, every schedule gives the same ones up to rounding, although products of
    Jacobians may overflow, underflow or cancel. Against overflow and underflow, products carry exponents of their own.
    Cancellation no precision prevents, and to leave work out when there is none would need the host. So ``"blelloch"``
    and a number of levels also compute what ``"auto"`` does, and return that for every gradient, of one row, on which
    the two differ by more than a few units in the last place. They cost more than ``"auto"``, in time as in memory,
    and are there to compare schedules. Their derivatives are those of the linear products.

    That is so of dense Jacobians. In a chain with a sparse one, products of Jacobians are sparse, planned at the first
    call with these patterns, and taken as they are: where they overflow or cancel, ``"linear"`` is the accurate
    schedule. ``"linear"`` is one kernel on CUDA, and ``"auto"`` goes up only as many levels as the planned FLOPs and
    their memory make worthwhile, most often none.

    Source: BPPSA, section 3, MLSys 2020.
    """
    check_tensor("chain_backward", "grad", grad)
    check_dense("chain_backward", "grad", grad, "give one tensor")
    if not isinstance(jacobians, Iterable):
        raise TypeError(f"chain_backward: jacobians must be a list of Tensors, got {type(jacobians).__name__}")
    jacobians = list(jacobians)
    sparse = False
    for position, jacobian in enumerate(jacobians):
        if not isinstance(jacobian, BatchedCSR):
            check_tensor("chain_backward", f"jacobians[{position}]", jacobian)
            if jacobian.layout == torch.strided or jacobian.is_nested:
                check_dense("chain_backward", f"jacobians[{position}]", jacobian, "give one tensor")
                continue
            jacobians[position] = _compressed(position, jacobian)
        sparse = True
    levels = levels_of("chain_backward", schedule)
    if sparse:
        return [grad, *chain_backward_sparse(grad, jacobians, levels)]
    if levels != SCHEDULES["linear"] and differentiated_by_transform(grad, *jacobians):
        levels = SCHEDULES["linear"]  # every other one may take linear_scan
    return [grad, *torch.ops.weft.chain_backward(grad, jacobians, levels)]


def _compressed(position: int, J: Tensor) -> BatchedCSR:
    """Of a tensor that is not dense."""
    try:
        return BatchedCSR.from_sparse_csr(J)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"chain_backward: jacobians[{position}] must be dense, a BatchedCSR, or what BatchedCSR.from_sparse_csr "
            f"takes: {error}"
        ) from None


def check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")


def chain_backward_reference(grad: Tensor, jacobians: Sequence[Tensor | BatchedCSR]) -> list[Tensor]:
    """:func:`chain_backward` in plain torch, one product after the other; differentiable to any order."""
    gradients = [grad]
    for jacobian in jacobians:
        if isinstance(jacobian, BatchedCSR) or jacobian.layout != torch.strided:
            jacobian = jacobian.to_dense()
        gradients.append((jacobian @ gradients[-1].unsqueeze(-1)).squeeze(-1))
    return gradients
