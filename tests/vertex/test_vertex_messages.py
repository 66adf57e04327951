"""Mistakes with graphs and vertex functions, by the message: it names what was called, the argument, what to do."""

from __future__ import annotations

import pytest
import torch
import weft
from torch import nn
from weft import Graphs

from tests.messages import GRAPHS, Cell, refused, x

E = torch.tensor([[0, 1, 1], [2, 2, 3]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Graphs(), "^Graphs has no public constructor; use Graphs.from_children, from_parents, from_edges"),
        (lambda: Graphs.from_edges([E[:, [0, 0, 1, 2]]], [4]), r"^Graphs.from_edges: .*got \(2, 4\).*from_edge_index"),
        (
            lambda: Graphs.from_edges(E.T, [4]),
            r"^Graphs.from_edges: graph 0: edges must be a sequence .* \(3, 2\).*\(\[edges\], \[",
        ),
        (
            lambda: Graphs.from_edge_index(E, [4]),
            r"^Graphs.from_edge_index: graph 0: .* \(2, 3\); .*from_edge_index\(\[edge_index\]",
        ),
        (
            lambda: Graphs.from_edge_index([E], 4),
            "^Graphs.from_edge_index: num_vertices must be a sequence with an entry",
        ),
        (lambda: Graphs.from_edge_index([E.T], [4]), r"^Graphs.from_edge_index: graph 0.*\(2, edges\).*from_edges"),
        (
            lambda: Graphs.from_edge_index([E.flip(0)[:, [0, 0]].clone()], [2]),
            "^Graphs.from_edge_index: graph 0, vertex",
        ),
        (
            lambda: Graphs.from_children([[], [], [0, 1]]),
            "^Graphs.from_children: graph 0: .* there is one entry per graph",
        ),
        (
            lambda: Graphs.from_children([[[], [0.0]]]),
            "^Graphs.from_children: graph 0, vertex 1: expected integers, got fl",
        ),
        (
            lambda: Graphs.from_children([[[], [5]]]),
            "^Graphs.from_children: graph 0, vertex 1: child 5 is out of range for 2",
        ),
        (
            lambda: Graphs.from_children([[[1], [0]]]),
            "graph 0, vertex 0: lies on a cycle, as in an undirected graph.*PyTorch G",
        ),
        (
            lambda: Graphs.from_parents([2, 2, -1]),
            "^Graphs.from_parents: graph 0: parents must be a sequence of integers",
        ),
        (
            lambda: Graphs.from_edges([[[0, 1]]], 2),
            "^Graphs.from_edges: num_vertices must be a sequence with an entry per",
        ),
        (lambda: Graphs.from_edges([[[0, 2, 0], [1, 2, 0]]], [3]), "graph 0, vertex 2: two children in slot 0"),
        (lambda: Graphs.chain(3), "^Graphs.chain: lengths must be a sequence with an entry per graph, got int"),
        (lambda: Graphs.batch([[0]]), r"^Graphs.batch: graphs\[0\] must be a Graphs, got list"),
        (lambda: GRAPHS.with_types(["a"]), "^Graphs.with_types: 1 types for 3 vertices"),
        (lambda: GRAPHS.with_types("abc"), "^Graphs.with_types: types must be a sequence of names, got str"),
        (lambda: GRAPHS[7], "^Graphs: index 7 is out of range for 1 graphs"),
        (lambda: GRAPHS.to(torch.float16), "^Graphs.to: takes a device; the tensors of Graphs stay int64"),
        (
            lambda: Graphs.from_pyg(E),
            "^Graphs.from_pyg: expected a torch_geometric Data or a sequence of them, got Tensor",
        ),
        (lambda: Graphs.from_dgl(E), "^Graphs.from_dgl: expected a DGLGraph or a sequence of them, got Tensor"),
        (
            lambda: Graphs.from_networkx(E),
            "^Graphs.from_networkx: expected a networkx.DiGraph or a sequence of them, got T",
        ),
    ],
)
def test_graphs(call, message):
    refused(call, message)


@pytest.mark.parametrize("make", [Graphs.from_edges, Graphs.from_edge_index])
@pytest.mark.parametrize("array", [lambda x: x, lambda x: x.numpy()])
def test_the_array_of_one_graph_is_a_value_error(array, make):
    with pytest.raises(ValueError, match=rf"^Graphs\.{make.__name__}: graph 0: .*of a single graph call"):
        make(array(torch.tensor([[0, 1], [1, 2]])), [3, 3])


def test_two_rows_may_be_an_edge_index():
    with pytest.warns(UserWarning, match=r"from_edges: graph 0: .*for an edge_index .* call Graphs.from_edge_index"):
        Graphs.from_edges([torch.tensor([[0, 1], [1, 2]])], [3])


class WithoutSize(weft.VertexFunction):
    def __init__(self):
        super().__init__("3")


class WithoutStart(weft.VertexFunction):
    def __init__(self):
        nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: WithoutSize(), "^WithoutSize: state_size must be an int or a sequence of ints, got '3'"),
        (lambda: weft.vertex.models.TreeLSTM(4, 8.0), "^TreeLSTM: state_size must be an int"),
        (lambda: weft.VertexFunction(4)(GRAPHS, x(3, 4)), r"^VertexFunction: vertex\(self, v\) is not implemented"),
        (
            lambda: Cell()(GRAPHS, x(3, 5)),
            r"^Cell: input 'input' has rows of shape \(5,\), torch.float32, and vertex comp",
        ),
        (lambda: Cell()(GRAPHS, x(3, 4).half()), "^Cell: input 'input' is torch.float16, the parameters are torch.f"),
        (lambda: Cell()(GRAPHS, x(2, 4)), "^Cell: input 'input' must have one row per vertex, 3 rows, got 2"),
        (lambda: Cell()(GRAPHS), "^Cell: vertex pulls input 'input', which is missing; inputs given: none"),
        (
            lambda: Cell()(GRAPHS, {"x": x(3, 4)}),
            "^Cell: vertex pulls input 'input', which is missing; inputs given: 'x'",
        ),
        (lambda: Cell()(x(3, 4), GRAPHS), "^Cell: graphs must be a weft.Graphs, got Tensor"),
        (lambda: Cell()(GRAPHS, (x(3, 4),)), "^Cell: inputs must be a tensor, got tuple"),
        (lambda: Cell()(GRAPHS, x(3, 4).to_sparse()), r"^Cell: input 'input' is sparse"),
        (
            lambda: Cell()(GRAPHS, x(3, 4), executor="fast"),
            "^Cell: executor must be one of 'auto', 'batched', 'reference'",
        ),
        (
            lambda: Cell(lambda v: v.gather(torch.tensor(0)))(GRAPHS, x(3, 4)),
            "^Cell: gather: the slot must be an int, got T",
        ),
        (
            lambda: Cell(lambda v: v.children)(GRAPHS, x(3, 4)),
            "^Cell: v has no 'children'; it has pull, pull_edges, gather",
        ),
        (
            lambda: Cell(lambda v: v.gather_sum(3))(GRAPHS, x(3, 4)),
            "^Cell: gather_sum: message must be callable, got int",
        ),
        (lambda: Cell(lambda v: None)(GRAPHS, x(3, 4)), "^Cell: what vertex scatters must be a tensor, got NoneType"),
        (
            lambda: Cell(lambda v: v.pull()[:, :2])(GRAPHS, x(3, 4)),
            r"^Cell: vertex scatters rows of shape \(2,\), state_s",
        ),
        (
            lambda: Cell(lambda v: v.pull() if v.pull().sum() > 0 else v.gather_sum())(GRAPHS, x(3, 4)),
            "^Cell: control flow or a Python number depends on a value.*torch.where",
        ),
        (
            lambda: Cell(lambda v: v.gather(0))(GRAPHS),
            "^Cell: graph 0, vertex 2: there is a child in slot 1, vertex ga",
        ),
        (lambda: weft.vertex.models.RvNN(4, 8)(GRAPHS, x(3, 4)), "^RvNN: graphs have no types.*Graphs.with_types"),
        (lambda: weft.VertexFunctions([Cell()]), "^VertexFunctions: functions must be a mapping, got list"),
        (
            lambda: weft.VertexFunctions({"a": Cell(), "b": len}),
            "^VertexFunctions: 'b' must be a VertexFunction, got bu",
        ),
        (
            lambda: weft.VertexFunctions({"a": Cell()}).update({"b": nn.Linear(4, 4)}),
            "^VertexFunctions: 'b' must be a VertexFunction, got Linear",
        ),
        (
            lambda: weft.VertexFunctions({"a": WithoutStart()}),
            r"^VertexFunctions: 'a' has no state_size: WithoutStart.__init__ must call super\(\).__init__",
        ),
        (lambda: Cell().program, "^Cell: there is no program before the first call"),
    ],
)
def test_vertex_functions(call, message):
    refused(call, message)


@pytest.mark.parametrize("called_before", [False, True])
def test_functions_that_are_changed_later(called_before):
    graphs = GRAPHS.with_types(["a", "a", "b"])

    class Wide(weft.VertexFunction):
        def vertex(self, v):
            v.push(v.pull())

    def functions():
        both = weft.VertexFunctions({"a": Cell(), "b": Cell()})
        if called_before:
            both(graphs, x(3, 4))
        return both

    m = functions()
    m.b = nn.Linear(4, 4)
    refused(lambda: m(graphs, x(3, 4)), "^VertexFunctions: 'b' must be a VertexFunction, got Linear")
    m.b = None
    refused(lambda: m(graphs, x(3, 4)), "^VertexFunctions: 'b' must be a VertexFunction, got NoneType")
    m = functions()
    m["b"] = Wide(8)
    refused(
        lambda: m(graphs, x(3, 4)),
        r"^VertexFunctions: all functions must have one state_size, got {'a': \(4,\), 'b': \(8,\)}",
    )
    refused(lambda: weft.explain(m, graphs, x(3, 4)), "^VertexFunctions: all functions must have one state_size")
    m = functions()
    m.clear()
    refused(lambda: m(graphs, x(3, 4)), "^VertexFunctions: there must be a function")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripting_a_vertex_function():
    refused(
        lambda: torch.jit.script(Cell()), "^Cell: torch.jit.script cannot compile.*a vertex function compiles itself"
    )


CELL = Cell()
SGD = torch.optim.SGD(CELL.parameters(), 0.1)
CLASSES = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda T: T(nn.Linear(3, 3), SGD), "^Trainer: cell must be a VertexFunction or VertexFunctions, got Linear"),
        (lambda T: T(CELL, torch.optim.SGD), "^Trainer: optimizer must be a torch.optim.Optimizer, got type"),
        (lambda T: T(CELL, SGD, "ce"), "^Trainer: loss must be one of 'cross_entropy', 'mse', got 'ce'"),
        (lambda T: T(CELL, SGD, at="root"), "^Trainer: at must be one of 'vertices', 'roots', got 'root'"),
        (lambda T: T(CELL, SGD).step(GRAPHS, x(3, 4), [0]), "^Trainer: targets must be a tensor, got list"),
        (
            lambda T: T(CELL, SGD).step(GRAPHS, x(3, 4), CLASSES[:2]),
            r"^Trainer: targets must be \(3,\), a row per vertex, got",
        ),
        (
            lambda T: T(CELL, SGD).step(GRAPHS, x(3, 4), x(3)),
            "^Trainer: targets must be classes, torch.int64, got torch.fl",
        ),
        (
            lambda T: T(CELL, SGD, at="roots").step(GRAPHS, x(3, 4), CLASSES),
            r"^Trainer: targets must be \(1,\), a row per ro",
        ),
        (
            lambda T: (t := T(CELL, SGD), t.step(GRAPHS, x(3, 4), CLASSES + 9), t.sync()),
            r"^Trainer: a target is not in \[0, 4",
        ),
        (
            lambda T: T(CELL, SGD, head=nn.Linear(5, 2)).step(GRAPHS, x(3, 4), CLASSES),
            r"^Trainer: the head takes 5 features, the cell pushes \(4,\)",
        ),
        (
            lambda T: weft.explain(T(CELL, SGD)),
            r"^explain: missing .* 'graphs'; call weft.explain\(trainer, graphs, inputs",
        ),
    ],
)
def test_trainer(call, message):
    refused(lambda: call(weft.vertex.Trainer), message)
