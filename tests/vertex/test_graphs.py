"""weft.Graphs against its contract and a naive model of it."""

from __future__ import annotations

import array
import copy
import io
import multiprocessing
import pickle
import random
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import weft
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from weft import _C, Graphs
from weft._vertex.runtime import reference
from weft._vertex.runtime.reference import keep_until_read

from tests.common import treebank
from tests.vertex.test_schedule import dags

ARRAYS = ("ptr", "graph_index", "edges", "levels", "roots")
TWO = [[[], [], [0, 1]], [[]]]


def same(a: Graphs, b: Graphs) -> bool:
    return (
        all(torch.equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)
        and a.types == b.types
        and (len(a), a.num_vertices, a.num_edges) == (len(b), b.num_vertices, b.num_edges)
        and (a.num_levels, a.num_slots) == (b.num_levels, b.num_slots)
    )


def check(graphs: Graphs, children: list[list[list[int]]]) -> None:
    """Every attribute is what the definition says of these children, in the plainest Python."""
    ptr = [sum(len(rows) for rows in children[:g]) for g in range(len(children) + 1)]
    edges = [
        [ptr[g] + child, ptr[g] + v, slot]
        for g, rows in enumerate(children)
        for v, row in enumerate(rows)
        for slot, child in enumerate(row)
        if child != -1
    ]

    def level(rows, v):
        return max((1 + level(rows, c) for c in rows[v] if c != -1), default=0)

    levels = [level(rows, v) for rows in children for v in range(len(rows))]
    with_parent = {child for child, _, _ in edges}
    roots = [max(set(range(ptr[g], ptr[g + 1])) - with_parent) for g in range(len(children))]

    assert graphs.num_graphs == len(graphs) == len(children)
    assert graphs.num_vertices == ptr[-1] and graphs.num_edges == len(edges)
    assert graphs.num_levels == max(levels, default=-1) + 1
    assert graphs.num_slots == max((slot for _, _, slot in edges), default=-1) + 1
    for name in ARRAYS:
        tensor = getattr(graphs, name)
        assert tensor.dtype == torch.int64 and tensor.device == graphs.device == torch.device("cpu")
        assert getattr(graphs, name) is tensor
    assert graphs.ptr.tolist() == ptr
    assert graphs.graph_index.tolist() == [g for g, rows in enumerate(children) for _ in rows]
    assert graphs.edges.shape == (len(edges), 3) and graphs.edges.tolist() == edges
    assert graphs.levels.tolist() == levels
    assert graphs.roots.tolist() == roots
    assert graphs.types is None


def test_the_example_of_the_contract():
    graphs = Graphs.from_children(TWO)
    check(graphs, TWO)
    assert repr(graphs) == "Graphs(num_graphs=2, num_vertices=4, num_edges=2, num_levels=2)"


@given(dags())
def test_random_graphs(children):
    graphs = Graphs.from_children(children)
    check(graphs, children)
    # The same by edges in any order, one by one, and as a batch of batches.
    edges = [
        [(child, v, slot) for v, row in enumerate(rows) for slot, child in enumerate(row) if child != -1]
        for rows in children
    ]
    for rows in edges:
        random.Random(3).shuffle(rows)
    assert same(Graphs.from_edges(edges, [len(rows) for rows in children]), graphs)
    assert same(Graphs.batch(list(graphs)), graphs)
    assert same(Graphs.batch([graphs[:1], graphs[1:]]), graphs)
    assert same(Graphs.batch(Graphs.from_children([rows]) for rows in children), graphs)
    for index in (slice(None, None, -1), slice(1, None, 2), slice(-2, None), slice(5, 2)):
        check(graphs[index], children[index])
    for g, one in enumerate(graphs):
        check(one, [children[g]])
        assert same(graphs[g - len(children)], one)
    assert same(pickle.loads(pickle.dumps(graphs)), graphs)


@given(st.lists(st.integers(0, 9), max_size=40), st.booleans())
def test_random_forests_by_parents(draws, falling):
    # Parents above their children, or all numbers turned round.
    n = len(draws) + 1
    parents = [v + 1 + draw if v + 1 + draw < n else -1 for v, draw in enumerate(draws)] + [-1]
    if falling:
        parents = [n - 1 - p if p != -1 else -1 for p in reversed(parents)]
    children = [[v for v in range(n) if parents[v] == p] for p in range(n)]
    check(Graphs.from_parents([parents]), [children])
    slots = [0 if p == -1 else len(children[p]) - 1 - children[p].index(v) for v, p in enumerate(parents)]
    check(Graphs.from_parents([parents], [slots]), [[row[::-1] for row in children]])


def test_whatever_holds_integers():
    table = [[-1, -1], [0, -1], [1, 0]]
    expected = Graphs.from_children([table])
    assert expected.edges.tolist() == [[0, 1, 0], [1, 2, 0], [0, 2, 1]]
    for dtype in ("b", "h", "i", "l", "q", ">i2", ">i4", "<i8", ">i8"):
        assert same(Graphs.from_children([np.array(table, dtype=dtype)]), expected)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        assert same(Graphs.from_children([torch.tensor(table, dtype=dtype)]), expected)
    wide = np.full((6, 5), 7)
    wide[::2, 4::-3] = table
    assert same(Graphs.from_children([wide[::2, 4::-3]]), expected)
    assert same(Graphs.from_children([torch.tensor(table).t().contiguous().t()]), expected)
    assert same(Graphs.from_children(np.array([table])), expected)
    assert same(Graphs.from_children(torch.tensor([table])), expected)
    rows = [np.array([], int), torch.tensor([0], dtype=torch.uint8), (np.int16(1), torch.tensor(0))]
    assert same(Graphs.from_children((rows,)), expected)
    assert same(Graphs.from_children([[[], array.array("H", [0]), memoryview(array.array("Q", [1, 0]))]]), expected)
    assert same(Graphs.from_children(iter([np.array([[], [0], [1, 0]], dtype=object)])), expected)

    class Index:
        def __index__(self):
            return 0

    assert same(Graphs.from_children([[[], [Index()], range(1, -1, -1)]]), expected)

    parents = Graphs.from_parents([[2, 2, -1], [-1]])
    assert same(Graphs.from_parents([np.array([2, 2, -1]), torch.tensor([-1])]), parents)
    assert same(Graphs.from_parents([[2, 2, -1], [-1]], [np.array([0, 1, -7], np.int8), (99,)]), parents)
    assert same(Graphs.from_edges([np.array([[0, 2], [1, 2]]), []], np.array([3, 1])), parents)
    assert same(Graphs.from_edges([torch.tensor([[1, 2, 1], [0, 2, 0]]), np.zeros((0, 2), int)], (3, 1)), parents)
    assert same(Graphs.from_edges([[np.array([0, 2]), [1, np.int64(2)]], torch.zeros(0, 3).long()], [3, 1]), parents)
    assert same(Graphs.from_edges([[(0, 2), (1, 2)], np.zeros(0, int)], [3, torch.tensor(1)]), parents)
    assert same(Graphs.chain(torch.tensor([3, 1])), Graphs.chain([np.int8(3), 1]))


def test_without_slots_edges_take_them_in_order():
    graphs = Graphs.from_edges([[(3, 1), (0, 1), (2, 0), (3, 1)]], [4])
    assert graphs.edges.tolist() == [[2, 0, 0], [3, 1, 0], [0, 1, 1], [3, 1, 2]]
    assert Graphs.from_parents([[1, -1, 1, 1]]).edges.tolist() == [[0, 1, 0], [2, 1, 1], [3, 1, 2]]


def test_chains():
    lengths = [2, 5, 1]
    check(Graphs.chain(lengths), [[[t - 1] if t else [] for t in range(n)] for n in lengths])
    check(Graphs.chain(lengths, reverse=True), [[[t + 1] if t + 1 < n else [] for t in range(n)] for n in lengths])
    check(Graphs.chain([]), [])


def test_graphs_without_a_last_root():
    graphs = Graphs.from_children([[[1, 2], [], []], [[], [], [], [1]], [[2], [2], []]])
    assert graphs.roots.tolist() == [0, 6, 8]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_million_deep(reverse):
    n = 1_000_000
    chain = Graphs.chain([n], reverse=reverse)
    assert chain.num_levels == n and chain.roots.tolist() == [0 if reverse else n - 1]
    step = 1 if reverse else -1
    by_array = torch.arange(n).add(step).unsqueeze(1)
    by_array[-1 if reverse else 0] = -1
    assert same(Graphs.from_children([by_array]), chain)
    # Numbered at random, so that neither pass over the vertices finds the levels.
    order = torch.randperm(n)
    edges = torch.stack((order[:-1], order[1:]), 1)
    graphs = Graphs.from_edges([edges], [n])
    assert torch.equal(graphs.levels[order], torch.arange(n))
    # A cycle half-way up is found among those who wait for it.
    with pytest.raises(ValueError, match=r"graph 0, vertex (\d+): ") as error:
        Graphs.from_edges([torch.cat((edges, torch.stack((order[600_000], order[500_000])).unsqueeze(0)))], [n])
    on_cycle = int(str(error.value).split("vertex ")[1].split(":")[0])
    assert 500_000 <= (order == on_cycle).nonzero().item() <= 600_000


def test_a_vertex_of_very_many_children():
    n = 300_000
    graphs = Graphs.from_parents([[n] * n + [-1]], [torch.randperm(n + 1)])
    assert graphs.num_levels == 2 and graphs.edges[:, 2].diff().min() >= 1


FOUR = [[[]], [[]], [[], [0]]]
STRUCTURE = [
    # The entry for graph 3, what the message must say.
    ("from_children", [[], [], [0, 3]], "vertex 2: child 3 is out of range for 3 vertices"),
    ("from_children", [[], [-2]], "vertex 1: "),
    ("from_children", [[], [2**70]], "vertex 1: "),
    ("from_children", [[0]], "vertex 0: "),
    ("from_children", [[], [2, 0], [3], [1], [3]], "vertex [123]: "),
    ("from_children", [], ""),
    ("from_children", np.zeros((0, 2), int), ""),
    ("from_children", np.zeros(3, int), ""),
    ("from_children", torch.zeros(1, 1, 1).long(), ""),
    ("from_children", np.array([[1], [2**64 - 1]], np.uint64), "vertex 1: "),
    ("from_parents", [1, 2], "vertex 1: parent 2 is out of range for 2 vertices"),
    ("from_parents", [-1, -2], "vertex 1: "),
    ("from_parents", [-1, 1], "vertex 1: "),
    ("from_parents", [1, 2, 1], "vertex [12]: "),
    ("from_parents", [], ""),
    ("from_parents", np.zeros((2, 2), int), ""),
    ("from_edges", ([(0, 2)], 2), "vertex 0: parent 2 is out of range for 2 vertices"),
    ("from_edges", ([(0, 1), (2, 1)], 2), "vertex 1: child 2 is out of range for 2 vertices"),
    ("from_edges", ([(-1, 1)], 2), "vertex 1: "),
    ("from_edges", ([(1, -2)], 2), "vertex 1: "),
    ("from_edges", ([(5, 6)], 2), ""),
    ("from_edges", ([(0, 1), (1, 0)], 2), "vertex [01]: "),
    ("from_edges", ([(0, 1, 4), (0, 1, 4)], 2), "vertex 1: "),
    ("from_edges", ([(0, 1, 2), (0, 1, 0), (0, 1, 2)], 2), "vertex 1: "),
    ("from_edges", ([(0, 1, -1)], 2), "vertex 1: "),
    ("from_edges", ([(0, 1, 2**40)], 2), "vertex 1: "),
    ("from_edges", ([], 0), ""),
    ("from_edges", ([], -1), ""),
    ("from_edges", ([], 2**40), ""),
    ("from_edges", ([(0,)], 1), ""),
    ("from_edges", ([(0, 1), (0, 1, 1)], 2), ""),
    ("from_edges", ([(0, 1, 0, 0)], 2), ""),
    ("from_edges", (np.zeros((2, 4), int), 2), ""),
    ("from_edges", (np.zeros(2, int), 2), ""),
    ("from_edges", (np.zeros((0, 1), int), 2), ""),
    ("chain", 0, ""),
    ("chain", -1, ""),
    ("chain", 2**40, ""),
]


@pytest.mark.parametrize(("method", "entry", "message"), STRUCTURE)
def test_bad_structure_names_the_graph_and_the_vertex(method, entry, message):
    message = f"Graphs.{method}: graph 3{', ' if message else ': '}{message}"
    with pytest.raises(ValueError, match=message):
        if method == "from_children":
            Graphs.from_children([*FOUR, entry, [[5]]])
        elif method == "from_parents":
            Graphs.from_parents([[-1], [1, -1], [-1], entry, [5]])
        elif method == "from_edges":
            Graphs.from_edges([[], [], [(0, 1)], entry[0], [(7, 8)]], [1, 1, 2, entry[1], 1])
        else:
            Graphs.chain([1, 2, 3, entry, -1])


def test_rows_that_do_not_fit_each_other():
    for slots, message in [
        ([[0, 1, 0]], "graph 1: "),
        ([[0, 1, 0], [0], [0]], "graph 2: "),
        ([[0, 1], [0]], "graph 0: "),
        ([[0, 1, 0], []], "graph 1: "),
        ([[0, 0, 0], [0]], "graph 0, vertex 2: "),
        ([[0, -1, 0], [0]], "graph 0, vertex 1: "),
    ]:
        with pytest.raises(ValueError, match=f"Graphs.from_parents: {message}"):
            Graphs.from_parents([[2, 2, -1], [-1]], slots)
    for sizes in ([1], [1, 1, 1]):
        with pytest.raises(ValueError, match=r"Graphs\.from_edges: graph [12]: "):
            Graphs.from_edges([[], []], sizes)


NO_INTEGERS = [[True], [0.0], ["a"], [None], [1j], [[0]], "a", {0}, {0: 0}, 0, None]
NO_INTEGERS += [[np.bool_(False)], [np.float64(0)], [torch.tensor(False)], [torch.tensor(0.0)], [torch.tensor([0, 0])]]
NO_INTEGERS += [np.zeros(1, dtype) for dtype in (float, bool, complex, "M8[s]", "U1", [("a", int)])]
NO_INTEGERS += [torch.zeros(1, dtype=dtype) for dtype in (torch.float32, torch.bool, torch.complex64)]
NO_INTEGERS += [torch.zeros(1, dtype=torch.int64, device="meta"), torch.zeros(1, dtype=torch.int64).to_sparse()]


@pytest.mark.parametrize("row", NO_INTEGERS, ids=repr)
def test_what_is_no_integer_is_a_type_error(row):
    with pytest.raises(TypeError, match=r"Graphs\.from_children: graph 0"):
        Graphs.from_children([[[], row]])
    with pytest.raises(TypeError, match=r"Graphs\.from_parents: graph 0"):
        Graphs.from_parents([row])
    with pytest.raises(TypeError, match=r"Graphs\.from_parents: graph 0"):
        Graphs.from_parents([[0]], [row])
    with pytest.raises(TypeError, match=r"Graphs\.from_edges: graph 0"):
        Graphs.from_edges([[row]], [2])


def test_what_is_no_sequence_is_a_type_error():
    for method in (Graphs.from_children, Graphs.from_parents, Graphs.chain, Graphs.batch):
        for wrong in (None, 3, True, np.int64(3)):
            with pytest.raises(TypeError, match="Graphs"):
                method(wrong)
    for wrong in ([5], [None], ["ab"], [{0: []}], [[5]], [np.zeros((1, 1))], [torch.zeros(1, 1)]):
        with pytest.raises(TypeError, match=r"Graphs\.from_children: graph 0"):
            Graphs.from_children(wrong)
    for lengths in ([1.0], [True], ["1"], [None], [np.float32(1)], [[1]]):
        with pytest.raises(TypeError, match=r"Graphs\.chain: graph 0"):
            Graphs.chain(lengths)
        with pytest.raises(TypeError, match=r"Graphs\.from_edges: graph 0"):
            Graphs.from_edges([[]], lengths)
    for sizes in (3, None):
        with pytest.raises(TypeError, match="num_vertices"):
            Graphs.from_edges([[]], sizes)
    with pytest.raises(TypeError):
        Graphs.from_edges([[]])
    with pytest.raises(TypeError, match=r"graphs\[1\]"):
        Graphs.batch([Graphs.chain([1]), [[[]]]])


def test_errors_out_of_an_argument_pass():
    class Broken:
        def __index__(self):
            raise KeyError("mine")

    def generator():
        yield [[]]
        raise KeyError("mine")

    for wrong in ([[[Broken()]]], generator()):
        with pytest.raises(KeyError, match="mine"):
            Graphs.from_children(wrong)


def test_a_list_that_shrinks_under_the_reader():
    row: list = []

    class Shrinks:
        def __index__(self):
            row.clear()
            return 0

    row += [Shrinks(), 0, 0, 0]
    assert Graphs.from_children([[[], row]]).edges.tolist() == [[0, 1, 0]]


def test_there_is_no_constructor():
    for arguments in ((), (TWO,)):
        with pytest.raises(TypeError, match="from_children"):
            Graphs(*arguments)


def test_indices():
    graphs = Graphs.chain([1, 2, 3])
    assert [g.num_vertices for g in graphs] == [1, 2, 3]
    for two in (2, -1, np.int64(2), torch.tensor(2)):
        assert same(graphs[two], Graphs.chain([3]))
    for index in (3, -4, 10**30):
        with pytest.raises(IndexError):
            graphs[index]
    for index in ("a", 1.0, None, True, torch.tensor(True), (0, 1), [0]):
        with pytest.raises(TypeError):
            graphs[index]
    assert same(graphs[np.int64(1) :], Graphs.chain([2, 3]))
    check(graphs[3:], [])
    assert not Graphs.batch([]) and list(Graphs.batch([])) == []
    check(Graphs.batch([]), [])


def test_types():
    graphs = Graphs.from_children(TWO)
    typed = graphs.with_types(["leaf", "leaf", "inner", "leaf"])
    assert typed.types == ("leaf", "leaf", "inner", "leaf") and typed.types is typed.types
    assert graphs.types is None
    assert typed.with_types(iter("abcd")).types == ("a", "b", "c", "d")
    assert {type(name) for name in typed.with_types(np.array(["a", "b", "a", "b"])).types} == {str}
    assert typed[0].types == ("leaf", "leaf", "inner") and typed[::-1].types == ("leaf", "leaf", "leaf", "inner")
    assert typed[:0].types == ()
    # The same names in another order, some of them, and others.
    parts = [typed[1], typed, Graphs.chain([3]).with_types(["\ud800", "inner", ""]), typed[::-1], Graphs.batch([])]
    assert Graphs.batch(parts).types == sum((part.types or () for part in parts), ())
    assert Graphs.batch([Graphs.batch([]), graphs]).types is None
    assert Graphs.batch([typed[:0], graphs]).types is None
    assert Graphs.batch([typed[:0], graphs[:0]]).num_graphs == 0
    with pytest.raises(ValueError, match="graph 2"):
        Graphs.batch([graphs, Graphs.batch([]), typed])
    with pytest.raises(ValueError, match="graph 3"):
        Graphs.batch([typed, typed[0], graphs])
    for wrong in ([], ["a"] * 3, ["a"] * 5):
        with pytest.raises(ValueError, match=r"Graphs\.with_types"):
            graphs.with_types(wrong)
    for wrong in (["a", "a", "a", 3], ["a", "a", None, "a"], 3, None, [b"a"] * 4, [np.int64(1)] * 4):
        with pytest.raises(TypeError, match=r"Graphs\.with_types"):
            graphs.with_types(wrong)


def examples() -> list[Graphs]:
    graphs = Graphs.from_children(TWO)
    return [graphs, graphs.with_types(["b", "a", "b", "c"]), Graphs.batch([]), graphs[:0].with_types([])]


@pytest.mark.parametrize("which", range(4))
def test_copies_and_files(which):
    graphs = examples()[which]
    file = io.BytesIO()
    torch.save({"graphs": [graphs]}, file)
    file.seek(0)
    copies = [copy.copy(graphs), copy.deepcopy(graphs), torch.load(file, weights_only=False)["graphs"][0]]
    copies += [pickle.loads(pickle.dumps(graphs, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for other in copies:
        assert type(other) is Graphs and other is not graphs and same(other, graphs)
        assert repr(other) == repr(graphs)
    # Tensors of a copy are its own.
    deep = copies[1]
    deep.ptr.fill_(7)
    assert not deep.ptr.equal(graphs.ptr) and same(pickle.loads(pickle.dumps(deep)), graphs)


def test_a_damaged_file_is_an_error():
    function, (data, *rest) = Graphs.from_children([[[], [0]], [[], [], [0, 1]]]).__reduce__()
    assert same(function(data, *rest), Graphs.from_children([[[], [0]], [[], [], [0, 1]]]))
    draw = random.Random(0)
    refused = 0
    for _ in range(500):
        broken = bytearray(data)
        broken[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        broken = broken[: draw.choice([len(data), len(data), len(data) - 4, 3])]
        try:
            graphs = function(bytes(broken), *rest)
        except ValueError:
            refused += 1
        else:  # another graph, but a sound one
            assert graphs.edges[:, 0].lt(graphs.num_vertices).all() and graphs.num_levels <= graphs.num_vertices
    assert refused > 400


class Trees(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return Graphs.chain([i + 1]).with_types([f"type {t % 3}" for t in range(i + 1)])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    loader = DataLoader(
        Trees(), batch_size=4, collate_fn=Graphs.batch, num_workers=1, multiprocessing_context=method, timeout=300
    )
    first, second = loader
    trees = Trees()
    assert same(first, Graphs.batch([trees[i] for i in range(4)]))
    assert same(second, Graphs.batch([trees[4], trees[5]]))
    # Uncollated, as what they are.
    single = DataLoader(Trees(), batch_size=None, num_workers=1, multiprocessing_context=method, timeout=300)
    if method == "fork":
        assert all(same(got, trees[i]) for i, got in enumerate(single))


def test_to():
    graphs = Graphs.from_children(TWO)
    for cpu in ("cpu", torch.device("cpu")):
        assert graphs.to(cpu) is graphs and graphs.to(device=cpu, non_blocking=True) is graphs
    for wrong in (torch.float32, torch.int64, None, 1.5, torch.zeros(1)):
        with pytest.raises(TypeError):
            graphs.to(wrong)
    with pytest.raises(TypeError):
        graphs.to("cpu", torch.float32)
    assert graphs.to("cpu:0") is graphs
    with pytest.raises(RuntimeError):
        graphs.to("nowhere")
    meta = graphs.with_types(list("abca")).to("meta")
    assert repr(meta) == "Graphs(num_graphs=2, num_vertices=4, num_edges=2, num_levels=2, device='meta')"
    for name in ARRAYS:
        tensor = getattr(meta, name)
        assert tensor.device == meta.device == torch.device("meta") and tensor.dtype == torch.int64
        assert tensor.shape == getattr(graphs, name).shape
    assert meta.types == ("a", "b", "c", "a")
    assert meta[0].device == meta[:1].device == meta.with_types(["a"] * 4).device == torch.device("meta")
    assert Graphs.batch([meta, meta]).device == torch.device("meta")
    for parts in ([graphs, meta], [meta, graphs], [graphs, meta[:0]]):
        with pytest.raises(RuntimeError, match="meta"):
            Graphs.batch(parts)
    for other in (copy.deepcopy(meta), pickle.loads(pickle.dumps(meta))):
        assert other.device == torch.device("meta")
        assert same(other.to("cpu"), meta.to("cpu"))
    assert not graphs.is_pinned()


@pytest.mark.cuda
def test_on_the_device():
    graphs = Graphs.from_children(TWO).with_types(list("abca"))
    pinned = graphs.pin_memory()
    assert pinned.is_pinned() and pinned.ptr.is_pinned() and pinned.pin_memory() is pinned
    assert not graphs.is_pinned() and pinned.to("cpu") is pinned
    for source in (graphs, pinned):
        for non_blocking in (False, True):
            moved = source.to("cuda", non_blocking=non_blocking)
            assert moved.device == torch.device("cuda", torch.cuda.current_device()) and moved is not source
            assert moved.to("cuda") is moved and moved.to(moved.device) is moved and not moved.is_pinned()
            assert repr(moved).endswith(f", device='{moved.device}')")
            torch.cuda.synchronize()
            for name in ARRAYS:
                assert getattr(moved, name).device == moved.device
                assert torch.equal(getattr(moved, name).cpu(), getattr(graphs, name))
            assert same(moved.to("cpu"), graphs)
            for other in (copy.deepcopy(moved), pickle.loads(pickle.dumps(moved)), moved[:], Graphs.batch([moved])):
                assert other.device == moved.device and same(other.to("cpu"), graphs)
    file = io.BytesIO()
    torch.save(moved, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=False, map_location="cpu"), graphs)
    with pytest.raises(RuntimeError, match="cuda"):
        Graphs.batch([graphs, moved])
    (batch,) = DataLoader([graphs], batch_size=None, pin_memory=True)
    assert batch.is_pinned() and same(batch, graphs)


@pytest.mark.cuda
def test_arrays_that_are_first_asked_for_where_it_matters():
    """In a capture, whose replays copy again, and on another stream."""
    graphs = Graphs.from_children(TWO)
    moved, captured = graphs.to("cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        roots = moved.roots + 0
    del moved
    for _ in range(3):
        torch.full((graphs.num_graphs,), -7).pin_memory()
    roots.zero_()
    captured.replay()
    assert torch.equal(roots.cpu(), graphs.roots)
    moved, other = graphs.to("cuda"), torch.cuda.Stream()
    with torch.cuda.stream(other):
        edges = moved.edges
    assert torch.equal(moved.edges.cpu(), graphs.edges) and moved.edges is edges


def test_what_looks_like_graphs_is_not_batched():
    graphs = Graphs.from_children(TWO)
    alike = SimpleNamespace(_device=graphs.device, _names=None, _core=graphs._core)
    with pytest.raises(TypeError, match=r"graphs\[1\] must be a Graphs, got SimpleNamespace"):
        Graphs.batch([graphs, alike])


@pytest.mark.cuda
def test_an_array_that_a_capture_copies_is_another_outside():
    """What a capture copies is there at replays alone."""
    graphs, captured = Graphs.from_children(TWO), torch.cuda.CUDAGraph()
    host, moved = torch.arange(5, dtype=torch.int32).pin_memory(), graphs.to("cuda")
    with torch.cuda.graph(captured):
        copy, roots = _C.vertex.Copy(host, moved.device), moved.roots
    assert copy.captured and not _C.vertex.Copy(host, moved.device).captured
    assert torch.equal(moved.roots.cpu(), graphs.roots) and moved.roots is not roots
    captured.replay()
    assert torch.equal(copy.tensor().cpu(), host) and torch.equal(roots.cpu(), graphs.roots)


@pytest.mark.cuda
def test_what_a_capture_copies_from_goes_with_its_graph():
    """Pinned memory that replays read stays as long as the CUDA graph, whatever becomes of the Graphs, no longer."""
    graphs = Graphs.from_children(TWO)
    before = _C._testing.captured()
    captured = torch.cuda.CUDAGraph()
    moved = graphs.to("cuda")
    with torch.cuda.graph(captured):
        roots = moved.roots + 0
    del moved
    assert _C._testing.captured() == before + 1
    captured.replay()
    assert torch.equal(roots.cpu(), graphs.roots)
    del captured, roots
    torch.cuda.synchronize()
    for _ in range(100):  # the driver says so in its own time
        if _C._testing.captured() == before:
            break
        time.sleep(0.01)
    assert _C._testing.captured() == before


@pytest.mark.parametrize("captured", [True, False])
def test_whether_a_stream_captures_is_asked_of_the_device_of_the_array(monkeypatch, captured):
    """Another device may be current."""
    done, stream = [], SimpleNamespace()
    monkeypatch.setattr(reference, "captures", lambda device: captured if device.index == 1 else not captured)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda which: stream)
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), record_stream=done.append)
    keep_until_read([tensor])
    assert done == ([] if captured else [stream])


def test_first_seen_in_inference_mode():
    """What is kept can be saved for a backward pass later."""
    graphs = Graphs.chain([3, 2])
    with torch.inference_mode():
        assert graphs.roots.tolist() == [2, 4]
    x = torch.randn(5, 2, requires_grad=True)
    x[graphs.roots].pow(2).sum().backward()
    assert torch.equal(x.grad, torch.zeros(5, 2).index_copy(0, graphs.roots, 2 * x[graphs.roots].detach()))
    with torch.device("meta"):
        assert Graphs.chain([2]).roots.tolist() == [1]


def test_threads():
    graphs = Graphs.from_children([[[], [0]]] * 200)
    seen = []
    threads = [threading.Thread(target=lambda: seen.append((graphs.edges, graphs.roots))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8 and all(a.equal(graphs.edges) and b.equal(graphs.roots) for a, b in seen)


def test_numpy_is_not_needed():
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch, weft\n"
        "g = weft.Graphs.from_children([[[], torch.tensor([0])], torch.tensor([[-1], [0]])])\n"
        "print(g.edges.tolist(), weft.Graphs.batch([g, g]).roots.tolist())"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[[0, 1, 0], [2, 3, 0]] [1, 3, 5, 7]"


def seconds(call) -> float:
    """The fastest of some runs: the machine may be busy with other things."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def test_building_is_fast():
    """With five times the time that it may take."""
    tree = [[] for _ in range(20)] + [[2 * v, 2 * v + 1] for v in range(19)] + [[38]]
    lists = [[list(row) for row in tree] for _ in range(10_000)]
    assert seconds(lambda: Graphs.from_children(lists)) < 5 * 0.5
    arrays = [np.array([row if len(row) == 2 else [*row, -1, -1][:2] for row in tree]) for _ in range(10_000)]
    assert seconds(lambda: Graphs.from_children(arrays)) < 5 * 0.05
    assert same(Graphs.from_children(arrays), Graphs.from_children(lists))
    tensors = [torch.from_numpy(one) for one in arrays]
    assert seconds(lambda: Graphs.from_children(tensors)) < 5 * 0.05


def test_the_treebank():
    trees = weft.data.sst(treebank() / "dev.txt")
    graphs = Graphs.from_children([tree.children for tree in trees])
    assert torch.equal(graphs.roots, graphs.ptr[1:] - 1)
    assert graphs.num_vertices == sum(len(tree.children) for tree in trees)
