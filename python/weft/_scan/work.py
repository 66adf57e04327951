"""plan_chain: the work of a backward pass, without doing it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .chain import Candidate, Step, explain, sparse_of, torch_microseconds, tree_of
from .schedule import levels_of
from .sequential import Record, ScanSequential, check_layers, layers_of, needed, run


@dataclass(frozen=True)
class ChainPlan:
    """The work of a backward pass along a chain."""

    levels: int
    """Of the up-sweep."""
    steps: list[Step]
    """In order of execution."""
    flops: int
    """Of all steps, for one sample."""
    critical_flops: int
    """Of the critical steps, one a level, for one sample."""
    memory: int
    """Bytes of all products and plans, for this batch."""
    baseline: list[tuple[str, int]]
    """Name and FLOPs, for one sample, of each layer's own gradient operator, last layer first."""

    candidates: list[Candidate] = field(default_factory=list)
    """What "auto" has looked at: ``levels``, the expected ``microseconds``, ``why_not`` (empty for the one taken); none
    where the schedule was given."""
    torch_microseconds: float = 0.0
    """What torch's own backward pass is expected to take to the same gradients."""

    def __str__(self) -> str:
        lines = [
            f"{'level':>5}  {'phase':<6}  {'kind':<4}  {'layers':>7}  {'elements':>12}  {'MFLOP':>12}  critical",
            *(
                f"{s.level:>5}  {s.phase:<6}  {s.kind:<4}  {_range(s.layers):>7}  {s.elements:>12}  "
                f"{s.flops / 1e6:>12.4f}  {'*' if s.critical else ''}".rstrip()
                for s in self.steps
            ),
        ]
        lines.append(
            f"{self.levels} levels up, {len(self.steps)} steps, {self.flops / 1e6:.4f} MFLOP, critical path "
            f"{self.critical_flops / 1e6:.4f} MFLOP, {self.memory / 2**20:.2f} MiB of products and plans"
        )
        width = max((len(name) for name, _ in self.baseline), default=5)
        lines.append(f"{'layer':<{width}}  {'MFLOP':>12}")
        lines += [f"{name:<{width}}  {flops / 1e6:>12.4f}" for name, flops in self.baseline]
        lines.append(f"{'baseline':<{width}}  {sum(f for _, f in self.baseline) / 1e6:>12.4f}")
        for c in self.candidates:
            why = f"not taken: {c.why_not}" if c.why_not else "taken"
            lines.append(f"{c.levels} levels: about {c.microseconds / 1e3:.3f} ms expected, {why}")
        if self.candidates:
            lines.append(f"torch's own backward pass: about {self.torch_microseconds / 1e3:.3f} ms expected")
        return "\n".join(lines)


def _range(layers: tuple[int, int]) -> str:
    first, last = layers
    return str(first) if first == last else f"{first}..{last}"


def plan_chain(net: nn.Sequential, input: Tensor, schedule: str | int | None = None) -> ChainPlan:
    """Plans a backward pass of ``net`` at ``input``: what is multiplied, in which order, and what it costs.

    Args:
        net: a :class:`ScanSequential`, or a ``torch.nn.Sequential`` of layers whose Jacobians are known.
        input: ``(B, ...)``; the first layer has a step where it requires a gradient.
        schedule: of :func:`chain_backward`; None is the net's own, of a ``torch.nn.Sequential`` "auto".

    Returns:
        A plan with ``levels``, ``steps`` (each with ``kind``, ``phase``, ``level``, ``flops``, ``critical``,
        ``layers``, ``elements``), ``flops``, ``critical_flops``, ``memory`` and ``baseline``; where "auto" chose, with
        what it has looked at, and the time of torch's own backward pass beside it. ``str()`` is a table of it, figure
        10 of the paper.

    Raises:
        TypeError, ValueError, RuntimeError: as :class:`ScanSequential` and :func:`chain_backward`.

    Source: BPPSA, section 5.3 and figure 10, MLSys 2020.
    """
    if not isinstance(net, nn.Sequential):
        raise TypeError(f"plan_chain: net must be a ScanSequential or a torch.nn.Sequential, got {type(net).__name__}")
    if not isinstance(input, Tensor):
        raise TypeError(f"plan_chain: input must be a Tensor, got {type(input).__name__}")
    if schedule is None:
        schedule = net.schedule if isinstance(net, ScanSequential) else "auto"
    levels = levels_of("plan_chain", schedule)
    check_layers(layers_of(net))
    with torch.random.fork_rng(devices=[input.device] if input.is_cuda else []), torch.no_grad():
        records = run(layers_of(net), input)
    records = [r._replace(output=r.output.detach()) for r in records]
    through = needed(records, input.requires_grad)
    moving = [r for r in through if not r.is_identity]
    prune = isinstance(net, ScanSequential) and net.prune
    with torch.no_grad():
        matrices = [sparse_of(r.jacobian(prune)) for r in moving]
    batches = [J.batch_size for J in matrices]
    patterns = [J._pattern for J in matrices]
    candidates: list[Candidate] = []
    if levels < 0:
        tree, candidates = explain(patterns, batches, input.dtype)
    else:
        tree = tree_of(patterns, levels, batches, input.dtype)
    positions = [r.position for r in moving]
    steps = [s._replace(layers=tuple(positions[leaf] for leaf in s.layers)) for s in tree.steps()]
    baseline = [(f"{r.position} {type(r.module).__name__}", _own(r)) for r in moving]
    return ChainPlan(
        tree.levels,
        steps,
        sum(s.flops for s in steps),
        sum(s.flops for s in steps if s.critical),
        tree.memory(batches, matrices[0].values.element_size() if matrices else 0),
        baseline,
        candidates,
        torch_microseconds([flops for _, flops in baseline], input.device, input.shape[0]),
    )


def _own(record: Record) -> int:
    """FLOPs of a layer's own gradient operator, for one sample."""
    module, input, output = record.module, record.input, record.output
    n_in, n_out = input.shape[1:].numel(), output.shape[1:].numel()
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return 2 * module.weight.numel() * output.shape[2:].numel()
    if isinstance(module, nn.Linear):
        return 2 * module.weight.numel() * (n_out // max(module.out_features, 1))
    if isinstance(module, nn.AvgPool2d):
        size = module.kernel_size
        return n_out * (size * size if isinstance(size, int) else size[0] * size[1])
    return max(n_in, n_out)
