"""Chains of Jacobians and whole backward passes of nets, beside autograd's: the rest of the table of ``python -m
benchmarks.sparse``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from weft.scan import ScanSequential, chain_backward, plan_chain

from benchmarks.common import (
    Candidate,
    Entry,
    Results,
    captured,
    case_name,
    check_agreement,
    measure,
    measure_in_turns,
    peer,
    put_all,
    relative_error,
    timed,
)
from benchmarks.sparse_nets import BATCHES, blocks, chain_of, lenet, vgg11


def call(run: Callable[[], Any]) -> Any:
    return run()


def input_gradients(layers: list[nn.Module], x: Tensor) -> tuple[Callable[[], list[Tensor]], Tensor]:
    """Autograd's backward pass to every activation and the input, no parameter among them."""
    activations = [x.clone().requires_grad_()]
    for module in layers:
        module.requires_grad_(False)
        activations.append(module(activations[-1]))
    grad = torch.randn_like(activations[-1])
    return lambda: list(torch.autograd.grad(activations[-1], activations[:-1], grad, retain_graph=True)), grad


def chain_entry(device: str, model: str, B: int, make: Callable[[], tuple[list[nn.Module], Tensor]], prune: bool,
                schedules: tuple[str | int, ...] = ("auto",)) -> Entry:  # fmt: skip
    """All gradients along a chain, given its Jacobians, against autograd's backward pass, eager and captured."""
    names = {s: case_name(model=model, device=device, dtype="fp32", B=B, schedule=s) for s in schedules}

    def run(results: Results) -> list[dict[str, str]]:
        rows = []
        layers, x = make()
        theirs, grad = input_gradients(layers, x)
        jacobians = chain_of(layers, x, prune)
        flat = grad.flatten(1)
        for schedule, name in names.items():
            mine = chain_backward(flat, jacobians, schedule)[-1]
            check_agreement(name, {"grad_input": relative_error(mine, theirs()[0].flatten(1))}, 1e-4)

            def ours(schedule=schedule) -> list[Tensor]:
                return chain_backward(flat, jacobians, schedule)

            times = measure({"weft": timed(ours), "autograd": timed(theirs)}, device)
            rows += put_all(results, name, "input_gradients", times)
            if device == "cuda":
                graphs = {"weft": timed(captured(ours))}
                graphs |= peer("captured", lambda: timed(captured(call, lambda: input_gradients(layers, x)[0])))
                rows += put_all(results, name, "input_gradients_captured", measure(graphs, device))
        return rows

    return Entry(names[schedules[0]], ("input_gradients",), run)


def net_entry(device: str, density: float, B: int, width: float) -> Entry:
    """A whole training step of VGG-11, parameters and all, of which a part of the weights is left."""
    name = case_name(model="vgg11", device=device, dtype="fp32", B=B, width=width, density=density)

    def run(results: Results) -> list[dict[str, str]]:
        plain = nn.Sequential(*vgg11(device, density, width))
        scan = ScanSequential(*copy.deepcopy(plain), prune=density < 1)
        x = torch.randn(B, 3, 32, 32, device=device)

        def backward(net: nn.Module) -> Candidate:
            return Candidate(lambda loss: loss.backward(), lambda: net(x).square().sum())

        def step(net: nn.Module) -> Candidate:
            return timed(lambda: net(x).square().sum().backward())

        for net in (plain, scan):
            net(x).square().sum().backward()
        error = max(relative_error(p.grad, q.grad) for p, q in zip(scan.parameters(), plain.parameters(), strict=True))
        check_agreement(name, {"parameters": error}, 1e-4)
        rows = []
        for metric, timer in (("backward", backward), ("forward_backward", step)):
            times = measure({"weft": timer(scan), "autograd": timer(plain)}, device)
            rows += put_all(results, name, metric, times)
        plan = plan_chain(scan, x)
        baseline = sum(flops for _, flops in plan.baseline)
        return [*rows, results.put(name, "input_flops", "flop", plan.flops, "baseline", baseline)]

    return Entry(name, ("backward", "forward_backward", "input_flops"), run)


def pass_entry(device: str, model: str, B: int, make: Callable[[], list[nn.Module]], shape: tuple[int, ...],
               prune: bool) -> Entry:  # fmt: skip
    """A whole backward pass of ScanSequential, the gradients of all parameters, beside autograd's: eager, and captured
    in a CUDA graph after a forward pass that is not."""
    name = case_name(op="backward_pass", model=model, device=device, dtype="fp32", B=B)

    def run(results: Results) -> list[dict[str, str]]:
        plain = nn.Sequential(*make())
        scan = ScanSequential(*copy.deepcopy(plain), prune=prune)
        x = torch.randn(B, *shape, device=device)

        def prepare(net: nn.Module) -> Callable[[], tuple[Tensor, ...]]:
            net = copy.deepcopy(net)  # leaves whose nodes are of this stream
            parameters = list(net.parameters())
            for _ in range(2):  # in the first step of a pruned net patterns are made
                out = net(x)
                torch.autograd.grad(out.square().sum(), parameters)
            out = net(x)
            grad = torch.ones_like(out)
            return lambda: torch.autograd.grad(out, parameters, grad, retain_graph=True)

        def backward(net: nn.Module) -> Candidate:
            return Candidate(lambda loss: loss.backward(), lambda: net(x).square().sum())

        found, want = (prepare(net)() for net in (scan, plain))
        error = max(relative_error(p, q) for p, q in zip(found, want, strict=True))
        check_agreement(name, {"parameters": error}, 1e-4)
        for net in (plain, scan):
            for _ in range(2):
                net(x).square().sum().backward()
        # Of what is left to torch both are the same, and the host's pace drifts.
        times = measure_in_turns({"weft": backward(scan), "autograd": backward(plain)}, device, rounds=20)
        rows = put_all(results, name, "backward", times)
        if device == "cuda":
            graphs = {"weft": timed(captured(call, lambda: prepare(scan)))}
            graphs |= peer("captured", lambda: timed(captured(call, lambda: prepare(plain))))
            rows += put_all(results, name, "backward_captured", measure(graphs, device))
        return rows

    return Entry(name, ("backward", "backward_captured"), run)


def pass_entries(device: str) -> Iterator[Entry]:
    image = (3, 32, 32)
    width = 1.0 if device == "cuda" else 0.25
    for B in BATCHES:
        yield pass_entry(device, "vgg11_pruned", B, lambda: vgg11(device, 0.03, width), image, True)
    yield pass_entry(device, "blocks256", 1, lambda: blocks(256, device)[0], (4, 16, 16), False)
    for B in BATCHES:
        yield pass_entry(device, "vgg11", B, lambda: vgg11(device, 1.0, width), image, False)


def tree_entry(device: str) -> Entry:
    """What all levels of LeNet-5's scan multiply: FLOPs and elements of every level, and of all beside the baseline's
    gradient operators. Counted, not timed."""
    name = case_name(model="lenet5", device=device, dtype="fp32", B=1)

    def run(results: Results) -> list[dict[str, str]]:
        layers, x = lenet(device)
        rows = []
        for schedule in ("linear", 1, 2, "blelloch"):
            plan = plan_chain(nn.Sequential(*layers), x, schedule)
            case, baseline = f"{name} schedule={schedule}", sum(flops for _, flops in plan.baseline)
            rows.append(results.put(case, "flops", "flop", plan.flops, "baseline", baseline))
            rows.append(results.put(case, "critical_flops", "flop", plan.critical_flops, "baseline", baseline))
        for level in range(plan.steps[-1].level + 1):
            steps = [s for s in plan.steps if s.level == level]
            total, largest = sum(s.flops for s in steps), max(s.flops for s in steps)
            case = f"{name} schedule=blelloch level={level} phase={steps[0].phase} steps={len(steps)}"
            rows.append(results.put(case, "level_flops", "flop", total, "critical", largest))
            elements = [s.elements for s in steps]
            rows.append(results.put(case, "level_elements", "elements", sum(elements), "largest", max(elements)))
        return rows

    return Entry(name, ("flops", "critical_flops", "level_flops", "level_elements"), run)
