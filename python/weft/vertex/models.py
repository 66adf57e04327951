"""Vertex functions from the literature. Each but the tagger pushes h, (num_vertices, H)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .._vertex.function import VertexFunction, VertexFunctions
from .._vertex.graphs import Graphs
from .._vertex.vertex import Vertex

__all__ = ["BiLSTMTagger", "ChainLSTM", "ChildSumTreeLSTM", "RvNN", "TreeFC", "TreeGRU", "TreeLSTM"]


class TreeLSTM(VertexFunction):
    """N-ary Tree-LSTM; the state is [h; c].

    Args:
        input_size: X of the input (num_vertices, X).
        hidden_size: H.
        arity: how many children a vertex may have.

    Attributes:
        W: ``Linear(X, 4H)``, rows i, f, u, o.
        U: ``Linear(arity H, (3 + arity) H)`` of [h_0; h_1; ...], rows i, f_0, f_1, ..., u, o.

    Source: Tai et al., Improved Semantic Representations From Tree-Structured Long Short-Term Memory Networks, ACL
    2015, equations 9 to 14.
    """

    def __init__(self, input_size: int, hidden_size: int, arity: int = 2):
        super().__init__(state_size=2 * hidden_size)
        self.arity = arity
        self.W = nn.Linear(input_size, 4 * hidden_size)
        self.U = nn.Linear(arity * hidden_size, (3 + arity) * hidden_size, bias=False)

    def vertex(self, v: Vertex) -> None:
        h, c = zip(*(v.gather(k).chunk(2, 1) for k in range(self.arity)), strict=True)
        xi, xf, xu, xo = self.W(v.pull()).chunk(4, 1)
        i, *f, u, o = self.U(torch.cat(h, 1)).chunk(3 + self.arity, 1)
        new_c = torch.sigmoid(xi + i) * torch.tanh(xu + u)
        for k in range(self.arity):
            new_c = new_c + torch.sigmoid(xf + f[k]) * c[k]
        new_h = torch.sigmoid(xo + o) * torch.tanh(new_c)
        v.scatter(torch.cat((new_h, new_c), 1))
        v.push(new_h)


class ChildSumTreeLSTM(VertexFunction):
    """Child-sum Tree-LSTM, any number of children; the state is [h; c].

    Args:
        input_size: X of the input (num_vertices, X).
        hidden_size: H.

    Attributes:
        W: ``Linear(X, 4H)``, rows i, f, u, o.
        U: ``Linear(H, 3H)`` of the sum of the children's h, rows i, u, o.
        U_f: ``Linear(H, H)`` of one child's h.

    Source: Tai et al., ACL 2015, equations 2 to 8.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(state_size=2 * hidden_size)
        self.W = nn.Linear(input_size, 4 * hidden_size)
        self.U = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.U_f = nn.Linear(hidden_size, hidden_size, bias=False)

    def vertex(self, v: Vertex) -> None:
        xi, xf, xu, xo = self.W(v.pull()).chunk(4, 1)
        h, fc = v.gather_sum(self._message, xf).chunk(2, 1)
        i, u, o = self.U(h).chunk(3, 1)
        new_c = torch.sigmoid(xi + i) * torch.tanh(xu + u) + fc
        new_h = torch.sigmoid(xo + o) * torch.tanh(new_c)
        v.scatter(torch.cat((new_h, new_c), 1))
        v.push(new_h)

    def _message(self, child: torch.Tensor, xf: torch.Tensor) -> torch.Tensor:
        h, c = child.chunk(2, 1)
        return torch.cat((h, torch.sigmoid(xf + self.U_f(h)) * c), 1)


class TreeGRU(VertexFunction):
    """Tree-GRU, any number of children; the state is h.

    Args:
        input_size: X of the input (num_vertices, X).
        hidden_size: H.

    Attributes:
        W: ``Linear(X, 3H)``, rows r, z, n.
        U_r, U_z, U_n: ``Linear(H, H)``, of one child's h, of the sum of all, and of the sum of r h.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(state_size=hidden_size)
        self.W = nn.Linear(input_size, 3 * hidden_size)
        self.U_r, self.U_z, self.U_n = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(3))

    def vertex(self, v: Vertex) -> None:
        xr, xz, xn = self.W(v.pull()).chunk(3, 1)
        s = v.gather_sum()
        z = torch.sigmoid(xz + self.U_z(s))
        n = torch.tanh(xn + self.U_n(v.gather_sum(lambda h, x: torch.sigmoid(x + self.U_r(h)) * h, xr)))
        h = (1 - z) * n + z * s
        v.scatter(h)
        v.push(h)


class TreeFC(VertexFunction):
    """Fully connected: h = tanh(x + U [h_0; h_1; ...] + b); the state is h and X = H.

    Args:
        hidden_size: H of the input and of the output (num_vertices, H).
        arity: how many children a vertex may have.

    Attributes:
        U: ``Linear(arity H, H)``.

    Source: Looks et al., Deep Learning with Dynamic Computation Graphs, ICLR 2017.
    """

    def __init__(self, hidden_size: int, arity: int = 2):
        super().__init__(state_size=hidden_size)
        self.arity = arity
        self.U = nn.Linear(arity * hidden_size, hidden_size)

    def vertex(self, v: Vertex) -> None:
        children = [v.gather(k) for k in range(self.arity)]
        h = torch.tanh(v.pull() + self.U(torch.cat(children, 1)))
        v.scatter(h)
        v.push(h)


class RvNN(VertexFunctions):
    """Recursive net with leaves of their own; types ``"leaf"`` and ``"inner"``; the state is h.

    Args:
        input_size: X of the input (num_vertices, X), which only leaves pull.
        hidden_size: H.

    Source: Socher et al., Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank, EMNLP 2013,
    section 4.1.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__({"leaf": _Leaf(input_size, hidden_size), "inner": _Inner(hidden_size)})


class _Leaf(VertexFunction):
    """h = tanh(W x + b)."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(state_size=hidden_size)
        self.W = nn.Linear(input_size, hidden_size)

    def vertex(self, v: Vertex) -> None:
        h = torch.tanh(self.W(v.pull()))
        v.scatter(h)
        v.push(h)


class _Inner(VertexFunction):
    """h = tanh(U [h_0; h_1] + b)."""

    def __init__(self, hidden_size: int):
        super().__init__(state_size=hidden_size)
        self.U = nn.Linear(2 * hidden_size, hidden_size)

    def vertex(self, v: Vertex) -> None:
        h = torch.tanh(self.U(torch.cat((v.gather(0), v.gather(1)), 1)))
        v.scatter(h)
        v.push(h)


class ChainLSTM(VertexFunction):
    """torch.nn.LSTM's cell for ``Graphs.chain``; the state is [h; c].

    Args:
        input_size: X of the input (num_vertices, X).
        hidden_size: H.

    Attributes:
        W: ``Linear(X, 4H)``, rows i, f, g, o.
        U: ``Linear(H, 4H)``, the same rows.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(state_size=2 * hidden_size)
        self.W = nn.Linear(input_size, 4 * hidden_size)
        self.U = nn.Linear(hidden_size, 4 * hidden_size, bias=False)

    def vertex(self, v: Vertex) -> None:
        v.push(self.step(v))

    def step(self, v: Vertex) -> Tensor:
        """Scatters [h; c], and returns h."""
        h, c = v.gather(0).chunk(2, 1)
        i, f, g, o = (self.W(v.pull()) + self.U(h)).chunk(4, 1)
        new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        new_h = torch.sigmoid(o) * torch.tanh(new_c)
        v.scatter(torch.cat((new_h, new_c), 1))
        return new_h


class BiLSTMTagger(VertexFunctions):
    """A tag for each word by LSTMs in both directions, as one graph per sentence, which :meth:`graphs` makes.

    Vertices of the types ``"fw"`` and ``"bw"`` are LSTMs' cells that push nothing, those of the type ``"tag"`` push
    T tanh(M [h_fw; h_bw]), (num_vertices, num_tags); the rows of the others are zeros. The input (num_vertices, X) is
    read at the vertices of the LSTMs.

    Args:
        input_size: X.
        hidden_size: H, of each direction.
        num_tags: how many tags there are.
        mlp_size: the width between M and T.

    Attributes:
        fw, bw: as :class:`ChainLSTM`, by ``["fw"]`` and ``["bw"]``.
        tag: ``M: Linear(2H, mlp_size)`` and ``T: Linear(mlp_size, num_tags)``, by ``["tag"]``.

    Source: VPPS (MICRO 2018), section IV; Huang et al., Bidirectional LSTM-CRF Models for Sequence Tagging, 2015.
    """

    def __init__(self, input_size: int, hidden_size: int, num_tags: int, mlp_size: int):
        super().__init__(
            {
                "fw": _SilentLSTM(input_size, hidden_size),
                "bw": _SilentLSTM(input_size, hidden_size),
                "tag": _Tag(hidden_size, num_tags, mlp_size),
            }
        )

    @staticmethod
    def graphs(lengths: Iterable[int]) -> Graphs:
        """A graph per sentence of n words: n vertices "fw", n "bw" and n "tag", each in the order of the words.

        Raises:
            ValueError: a length is not positive.
            TypeError: one is no integer.
        """
        children, types = [], []
        for n in Graphs.chain(lengths).ptr.diff().tolist():
            t, none = torch.arange(n), torch.full((n,), -1)
            after = torch.where(t < n - 1, n + t + 1, -1)
            slots = (torch.cat((t - 1, after, t)), torch.cat((none, none, n + t)))
            children.append(torch.stack(slots, 1))
            types += ["fw"] * n + ["bw"] * n + ["tag"] * n
        return Graphs.from_children(children).with_types(types)


class _SilentLSTM(ChainLSTM):
    def vertex(self, v: Vertex) -> None:
        self.step(v)


class _Tag(VertexFunction):
    def __init__(self, hidden_size: int, num_tags: int, mlp_size: int):
        super().__init__(state_size=2 * hidden_size)
        self.M, self.T = nn.Linear(2 * hidden_size, mlp_size), nn.Linear(mlp_size, num_tags)

    def vertex(self, v: Vertex) -> None:
        fw, bw = v.gather(0), v.gather(1)
        h = torch.cat((fw.chunk(2, 1)[0], bw.chunk(2, 1)[0]), 1)
        v.push(self.T(torch.tanh(self.M(h))))
        v.scatter(fw)  # what gathers must scatter; nobody reads it
