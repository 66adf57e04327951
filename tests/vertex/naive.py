"""Trees as Python lists, and a plain recursive function per graph: what every executor must agree with."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

Children = list[list[int]]


def random_tree(rng: random.Random, leaves: int, arity: int = 2) -> Children:
    """A tree in post-order, every inner vertex with 2 to `arity` children."""
    children: Children = []

    def grow(n: int) -> int:
        below = []
        if n > 1:
            parts = rng.randint(2, min(arity, n))
            cuts = sorted(rng.sample(range(1, n), parts - 1))
            below = [grow(b - a) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        children.append(below)
        return len(children) - 1

    grow(leaves)
    return children


def random_dag(rng: random.Random, vertices: int, slots: int, any_order: bool = True) -> Children:
    """Children shared, repeated and missing (-1); vertices numbered in any order."""
    children = [
        [rng.randrange(v) if v and rng.random() < 0.6 else -1 for _ in range(rng.randint(0, slots))]
        for v in range(vertices)
    ]
    names = list(range(vertices))
    if any_order:
        rng.shuffle(names)
    shuffled: Children = [[] for _ in names]
    for v, below in enumerate(children):
        shuffled[names[v]] = [-1 if c < 0 else names[c] for c in below]
    return shuffled


def evaluate(step: Callable, graphs: list[Children], x: Tensor | None) -> Tensor:
    """``step(x_v, states of the children, None where there is none) -> (state, output)``, vertex by vertex."""
    rows = []
    first = 0
    for children in graphs:
        found: dict[int, tuple[Tensor, Tensor]] = {}

        def visit(v: int, children=children, found=found, first=first):
            if v not in found:
                below = [None if c < 0 else visit(c)[0] for c in children[v]]
                found[v] = step(None if x is None else x[first + v], below)
            return found[v]

        rows += [visit(v)[1] for v in range(len(children))]
        first += len(children)
    return torch.stack(rows)


def padded(below: list, arity: int, like: Tensor) -> list[Tensor]:
    below = below + [None] * (arity - len(below))
    return [torch.zeros_like(like) if b is None else b for b in below]


def total(values: list[Tensor], like: Tensor) -> Tensor:
    return sum(values, torch.zeros_like(like))


def tree_lstm(m: nn.Module, H: int, arity: int) -> Callable:
    W, b, U = m.W.weight, m.W.bias, m.U.weight
    Wi, Wf, Wu, Wo = W.split(H)
    bi, bf, bu, bo = b.split(H)
    Ui, *Uf, Uu, Uo = U.split(H)

    def step(x, below):
        states = padded(below, arity, U.new_zeros(2 * H))
        h, c = torch.cat([s[:H] for s in states]), [s[H:] for s in states]
        i = torch.sigmoid(Wi @ x + bi + Ui @ h)
        f = [torch.sigmoid(Wf @ x + bf + Uf[k] @ h) for k in range(arity)]
        u, o = torch.tanh(Wu @ x + bu + Uu @ h), torch.sigmoid(Wo @ x + bo + Uo @ h)
        cell = i * u + sum(f[k] * c[k] for k in range(arity))
        out = o * torch.tanh(cell)
        return torch.cat((out, cell)), out

    return step


def child_sum(m: nn.Module, H: int) -> Callable:
    Wi, Wf, Wu, Wo = m.W.weight.split(H)
    bi, bf, bu, bo = m.W.bias.split(H)
    Ui, Uu, Uo = m.U.weight.split(H)
    Uf = m.U_f.weight

    def step(x, below):
        below = [b for b in below if b is not None]
        h = total([b[:H] for b in below], bi)
        i, o = torch.sigmoid(Wi @ x + bi + Ui @ h), torch.sigmoid(Wo @ x + bo + Uo @ h)
        u = torch.tanh(Wu @ x + bu + Uu @ h)
        cell = i * u + total([torch.sigmoid(Wf @ x + bf + Uf @ b[:H]) * b[H:] for b in below], bi)
        out = o * torch.tanh(cell)
        return torch.cat((out, cell)), out

    return step


def tree_gru(m: nn.Module, H: int) -> Callable:
    Wr, Wz, Wn = m.W.weight.split(H)
    br, bz, bn = m.W.bias.split(H)

    def step(x, below):
        below = [b for b in below if b is not None]
        s = total(below, br)
        kept = total([torch.sigmoid(Wr @ x + br + m.U_r.weight @ b) * b for b in below], br)
        z = torch.sigmoid(Wz @ x + bz + m.U_z.weight @ s)
        n = torch.tanh(Wn @ x + bn + m.U_n.weight @ kept)
        out = (1 - z) * n + z * s
        return out, out

    return step


def tree_fc(m: nn.Module, H: int, arity: int) -> Callable:
    def step(x, below):
        h = torch.cat(padded(below, arity, m.U.bias))
        out = torch.tanh(x + m.U.weight @ h + m.U.bias)
        return out, out

    return step


def rvnn(m: nn.Module, H: int) -> Callable:
    def step(x, below):
        if below:
            out = torch.tanh(m["inner"].U.weight @ torch.cat(padded(below, 2, m["inner"].U.bias)) + m["inner"].U.bias)
        else:
            out = torch.tanh(m["leaf"].W.weight @ x + m["leaf"].W.bias)
        return out, out

    return step


def chain_lstm(m: nn.Module, H: int) -> Callable:
    def step(x, below):
        (state,) = padded(below, 1, m.U.weight.new_zeros(2 * H))
        gates = m.W.weight @ x + m.W.bias + m.U.weight @ state[:H]
        i, f, g, o = gates.split(H)
        c = torch.sigmoid(f) * state[H:] + torch.sigmoid(i) * torch.tanh(g)
        out = torch.sigmoid(o) * torch.tanh(c)
        return torch.cat((out, c)), out

    return step
