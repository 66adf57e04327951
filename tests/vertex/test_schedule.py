"""Schedules against the order they are meant to be, and against expressions whose value is an exact integer."""

from __future__ import annotations

import math
import random
import statistics
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weft import Graphs
from weft._vertex.runtime.schedule import Kind, planned, schedule
from weft.data import listops

BOTH = (Kind((0, 1)),)
SUM = (Kind((), True),)


@st.composite
def dags(draw, max_slots=5):
    """children[g][v][k] of random graphs: any numbering, shared children, empty slots."""
    batch = []
    for _ in range(draw(st.integers(0, 4))):
        n = draw(st.integers(1, 12))
        order = draw(st.permutations(range(n)))
        rows: list[list[int]] = [[] for _ in range(n)]
        for place, v in enumerate(order):
            below = [-1, *order[:place]]
            rows[v] = draw(st.lists(st.sampled_from(below), max_size=max_slots))
        batch.append(rows)
    return batch


def rows_of(plan) -> list[int]:
    """The row of each vertex."""
    return torch.argsort(plan.array("vertices")).tolist()


def check(graphs: Graphs, kinds: tuple[Kind, ...], kind_of_vertex: list[int], plan, most_groups: int = 1) -> None:
    """Every array says what csrc/vertex/graph/schedule.h promises of it."""
    V = graphs.num_vertices
    edges = graphs.edges.tolist()
    levels = graphs.levels.tolist()
    vertices = plan.array("vertices").tolist()
    assert sorted(vertices) == list(range(V))
    rows = rows_of(plan)

    # Tasks cut the rows into pieces of one level, kind and group, in order; the graphs are dealt to the groups.
    tasks, groups = plan.tasks, plan.array("tasks").view(-1, 8)[:, 7].tolist()
    assert [t.first for t in tasks] == [sum(t.count for t in tasks[:i]) for i in range(len(tasks))]
    group_of = {}
    for task, group in zip(tasks, groups, strict=True):
        for row in range(task.first, task.first + task.count):
            assert (levels[vertices[row]], kind_of_vertex[vertices[row]]) == (task.level, task.kind)
            assert group_of.setdefault(graphs.graph_index[vertices[row]].item(), group) == group
    graph_of = graphs.graph_index.tolist()
    pieces = {(levels[v], kind_of_vertex[v], group_of[graph_of[v]]) for v in range(V)}
    assert [(t.level, t.kind, g) for t, g in zip(tasks, groups, strict=True)] == sorted(pieces)
    assert {*groups} == {*range(min(most_groups, graphs.num_graphs))}
    frontiers = plan.array("frontiers").tolist()
    assert len(frontiers) == graphs.num_levels + 1
    for level in range(graphs.num_levels):
        assert {t.level for t in tasks[frontiers[level] : frontiers[level + 1]]} == {level}
    assert frontiers[-1] == plan.core.num_tasks == len(tasks)
    assert plan.core.max_count == max((t.count for t in tasks), default=0)
    assert plan.core.max_edges == max((t.num_edges for t in tasks), default=0)

    # What is gathered by slot, and by whom each row is.
    slots = plan.array("slots").tolist()
    assert slots == sorted({s for kind in kinds for s in kind.slots})
    gather = plan.array("gather").view(len(slots), V).tolist()
    expected = [[-1] * V for _ in slots]
    uses: list[list[tuple[int, int]]] = [[] for _ in range(V)]
    for child, parent, slot in edges:
        if slot in kinds[kind_of_vertex[parent]].slots:
            expected[slots.index(slot)][rows[parent]] = rows[child]
            uses[rows[child]].append((rows[parent], slots.index(slot)))
    assert gather == expected
    first_use = plan.array("first_use").tolist()
    found = [(row, column) for row, column in plan.array("users").view(-1, 2).tolist()]
    assert first_use[0] == 0 and first_use[-1] == len(found) == plan.core.num_uses
    for row in range(V):
        assert found[first_use[row] : first_use[row + 1]] == sorted(uses[row])
    for i, task in enumerate(tasks):
        for c in range(len(slots)):
            read = gather[c][task.first : task.first + task.count]
            run = plan.array("runs").view(len(tasks), len(slots))[i, c].item()
            assert run == task.runs[c]
            straight = read[0] >= 0 and read == list(range(read[0], read[0] + task.count))
            assert run == (read[0] if straight else -1 if set(read) == {-1} else -2)

    # What is summed over, and by whom each row is.
    sums = any(kind.sum for kind in kinds)
    first_edge, first_sum_use = (
        plan.array(name).tolist() if sums else [0] * (V + 1) for name in ("first_edge", "first_sum_use")
    )
    assert sums or not len(plan.array("first_edge")) + len(plan.array("first_sum_use"))
    children, parents = plan.array("edge_children").tolist(), plan.array("edge_parents").tolist()
    summed = sorted((rows[p], s, rows[c]) for c, p, s in edges if kinds[kind_of_vertex[p]].sum)
    assert list(zip(parents, children, strict=True)) == [(p, c) for p, _, c in summed]
    assert plan.core.num_edges == len(summed)
    for row in range(V):
        assert parents[first_edge[row] : first_edge[row + 1]] == [row] * sum(p == row for p, _, _ in summed)
    assert first_edge[-1] == len(summed)
    for task in tasks:
        assert task.first_edge == first_edge[task.first]
        assert task.num_edges == first_edge[task.first + task.count] - task.first_edge
        read = children[task.first_edge : task.first_edge + task.num_edges]
        straight = bool(read) and read == list(range(read[0], read[0] + len(read)))
        assert task.edge_run == (read[0] if straight else -2 if read else -1)
    sum_use_edges = plan.array("sum_use_edges").tolist()
    for row in range(V):
        mine = sum_use_edges[first_sum_use[row] : first_sum_use[row + 1]]
        assert mine == [e for e, child in enumerate(children) if child == row]
    assert first_sum_use[-1] == len(summed)
    times = [len(uses[row]) + children.count(row) for row in range(V)]
    assert plan.core.single_use == (max(times, default=0) <= 1)


@given(dags(), st.sets(st.integers(0, 6)), st.booleans())
def test_every_array_of_random_graphs(children, slots, sums):
    graphs = Graphs.from_children(children)
    if not sums:
        slots |= {graphs.num_slots}
    kinds = (Kind(tuple(sorted(slots)), sums),)
    check(graphs, kinds, [0] * graphs.num_vertices, schedule("f", graphs, kinds))


@given(dags(), st.sets(st.integers(0, 3)), st.booleans(), st.integers(2, 5))
def test_every_array_of_graphs_in_groups(children, slots, sums, groups):
    graphs = Graphs.from_children(children)
    kinds = (Kind(tuple(sorted(slots)), True), Kind((0, 1, 2, 3, 4), sums))
    kind_of_vertex = [v % 2 for v in range(graphs.num_vertices)]
    typed = graphs.with_types(["ab"[kind] for kind in kind_of_vertex])
    check(typed, kinds, kind_of_vertex, planned(typed, kinds, {"a": 0, "b": 1}, groups), groups)


@st.composite
def forests(draw, max_slots=4):
    """children[g][v][k] of graphs whose vertices have one parent at most: any numbering, empty slots, several roots."""
    batch = []
    for _ in range(draw(st.integers(0, 4))):
        n = draw(st.integers(1, 14))
        order = draw(st.permutations(range(n)))
        rows: list[list[int]] = [[-1] * draw(st.integers(0, max_slots)) for _ in range(n)]
        for place, v in enumerate(order):
            free = [(u, k) for u in order[place + 1 :] for k, child in enumerate(rows[u]) if child < 0]
            if free and draw(st.integers(0, 4)):
                parent, k = draw(st.sampled_from(free))
                rows[parent][k] = v
        batch.append(rows)
    return batch


@given(forests(), st.integers(0, 2), st.integers(1, 3))
def test_trees_are_planned_as_all_graphs_are(children, more, groups):
    """In fewer passes, with the same numbers; those of a function that also sums are planned in the other way."""
    graphs = Graphs.from_children(children)
    slots = tuple(range(max(graphs.num_slots, 1) + more))
    kinds = (Kind(slots),)
    plan = planned(graphs, kinds, None, groups)
    check(graphs, kinds, [0] * graphs.num_vertices, plan, groups)
    other = planned(graphs, (Kind(slots, True),), None, groups)
    for name in ("frontiers", "slots", "vertices", "gather", "runs", "first_use", "users"):
        assert torch.equal(plan.array(name), other.array(name)), name


@given(dags(max_slots=2), st.data())
def test_every_array_of_random_typed_graphs(children, data):
    graphs = Graphs.from_children(children)
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=graphs.num_vertices, max_size=graphs.num_vertices))
    kinds = (Kind((0, 1)), Kind((1,), True))
    kind_of = {"a": 1, "b": 0, "c": 1}
    plan = schedule("f", graphs.with_types(names), kinds, kind_of)
    check(graphs, kinds, [kind_of[name] for name in names], plan)


@given(dags(max_slots=2))
def test_the_states_that_a_schedule_computes_are_those_of_a_recursion(children):
    """A vertex's state is a pairing of its children's in slots 0 and 1, so that no two trees have the same."""
    graphs = Graphs.from_children(children)
    plan = schedule("f", graphs, BOTH)
    V = graphs.num_vertices
    gather = plan.array("gather").view(2, V).tolist()
    states: list[object] = [None] * V
    for task in plan.tasks:
        for row in range(task.first, task.first + task.count):
            states[row] = tuple(None if child[row] == -1 else states[child[row]] for child in gather)

    def recursion(rows, v):
        kept = [*rows[v], -1, -1][:2]
        return tuple(None if c == -1 else recursion(rows, c) for c in kept)

    expected = [recursion(rows, v) for rows in children for v in range(len(rows))]
    assert [states[row] for row in rows_of(plan)] == expected


OPERATORS = {
    "MAX": max,
    "MIN": min,
    "MED": lambda values: math.floor(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}


def evaluate(graphs: Graphs, symbols: list[str], plan) -> list[int]:
    """The value of each vertex's expression, computed task by task; integers, so that nothing may be off."""
    V = graphs.num_vertices
    vertices = plan.array("vertices").tolist()
    slots = plan.array("slots").tolist()
    gather = plan.array("gather").view(len(slots), V).tolist()
    edge_children = plan.array("edge_children").tolist()
    first_edge = plan.array("first_edge").tolist() or [0] * (V + 1)
    states: list[int | None] = [None] * V
    for task in plan.tasks:
        for row in range(task.first, task.first + task.count):
            by_slot = [states[column[row]] for column in gather if column[row] != -1]
            by_sum = [states[child] for child in edge_children[first_edge[row] : first_edge[row + 1]]]
            assert not slots or not plan.core.num_edges or by_slot == by_sum
            values = by_slot or by_sum
            symbol = symbols[vertices[row]]
            states[row] = OPERATORS[symbol](values) if symbol in OPERATORS else int(symbol)
    return [states[row] for row in rows_of(plan)]


@pytest.mark.parametrize("shape", [{}, {"max_arity": 2, "max_depth": 12}, {"max_arity": 12, "max_depth": 3}])
@pytest.mark.parametrize("kind", ["slots", "sum", "both", "typed"])
def test_listops_come_out_exactly(shape, kind):
    trees = listops(300, seed=5, **shape)
    symbols = [symbol for tree in trees for symbol in tree.symbols]
    labels = [label for tree in trees for label in tree.labels]
    graphs = Graphs.from_children([tree.children for tree in trees])
    slots = tuple(range(graphs.num_slots))
    if kind == "typed":
        kinds, kind_of = (Kind(()), *[Kind(slots)] * 4), {"MAX": 1, "MIN": 2, "MED": 3, "SM": 4}
        graphs = graphs.with_types([symbol if symbol in kind_of else "digit" for symbol in symbols])
        plan = schedule("f", graphs, kinds, {"digit": 0} | kind_of)
        assert [task.count for task in plan.tasks if task.kind == 0] == [sum(map(str.isdigit, symbols))]
    else:
        plan = schedule("f", graphs, (Kind(slots if kind != "sum" else (), kind != "slots"),))
    assert evaluate(graphs, symbols, plan) == labels


def test_listops_in_any_numbering():
    """The same expressions with their vertices numbered at random."""
    for seed, tree in enumerate(listops(30, seed=6)):
        order = torch.randperm(len(tree.children), generator=torch.Generator().manual_seed(seed)).tolist()
        children: list[list[int]] = [[] for _ in order]
        symbols, labels = [""] * len(order), [0] * len(order)
        for v, at in enumerate(order):
            children[at] = [order[child] for child in tree.children[v]]
            symbols[at], labels[at] = tree.symbols[v], tree.labels[v]
        graphs = Graphs.from_children([children])
        plan = schedule("f", graphs, (Kind(tuple(range(graphs.num_slots)), True),))
        assert evaluate(graphs, symbols, plan) == labels


def test_counts_of_paths_backwards():
    """The gradient of the sum of all states, s = 1 + the children's states, is the number of paths that end there."""
    rows = [[], [0, 0], [0, 1], [2, 1, 2], [3], [4, 4]]
    graphs = Graphs.from_children([rows, rows[:4]])
    for kinds in (SUM, (Kind((0, 1, 2)),)):
        plan = schedule("f", graphs, kinds)
        arrays = ("first_use", "users", "first_sum_use", "sum_use_edges", "edge_parents")
        first_use, users_of, first_sum_use, sum_use_edges, edge_parents = (plan.array(name).tolist() for name in arrays)
        first_sum_use = first_sum_use or [0] * (graphs.num_vertices + 1)
        of = rows_of(plan)
        gradient = [0] * graphs.num_vertices
        for task in reversed(plan.tasks):
            for row in range(task.first, task.first + task.count):
                users = users_of[2 * first_use[row] : 2 * first_use[row + 1] : 2]
                users += [edge_parents[e] for e in sum_use_edges[first_sum_use[row] : first_sum_use[row + 1]]]
                assert all(user >= task.first + task.count for user in users)
                gradient[row] = 1 + sum(gradient[user] for user in users)
        x = torch.ones(10, requires_grad=True)
        states: list[torch.Tensor] = []
        for children in (rows, rows[:4]):
            start = len(states)
            for children_of_v in children:
                states.append(x[len(states)] + sum(states[start + child] for child in children_of_v))
        torch.stack(states).sum().backward()
        assert [gradient[row] for row in of] == x.grad.tolist()


def test_chains_and_complete_trees_gather_without_copies():
    chains = Graphs.chain([3, 7, 1, 7, 5])
    plan = schedule("f", chains, (Kind((0,)),))
    assert all(run >= 0 for task in plan.tasks[1:] for run in task.runs)
    reverse = schedule("f", Graphs.chain([3, 7, 1, 7, 5], reverse=True), (Kind((0,)),))
    assert reverse.tasks == plan.tasks
    assert all(task.edge_run >= 0 for task in schedule("f", chains, SUM).tasks[1:])

    leaves = 64
    parents = [[leaves + v // 2 for v in range(2 * leaves - 2)] + [-1]] * 5
    plan = schedule("f", Graphs.from_parents(parents), BOTH)
    assert [task.count for task in plan.tasks] == [5 * leaves // 2**level for level in range(7)]
    assert all(run >= 0 for task in plan.tasks[1:] for run in task.runs)
    plan = schedule("f", Graphs.from_parents(parents), SUM)
    assert all(task.edge_run >= 0 for task in plan.tasks[1:])


def test_a_schedule_is_planned_once_and_belongs_to_all_copies():
    graphs = Graphs.chain([3, 2])
    plan = schedule("f", graphs, SUM)
    assert schedule("g", graphs, SUM) is plan
    assert schedule("f", graphs, BOTH) is not plan
    assert schedule("f", graphs.to("meta"), SUM).core is plan.core
    # A copy elsewhere is the same numbers, and views of it by name.
    assert plan.block() is plan.block(torch.device("cpu"))
    assert plan.array("vertices").data_ptr() == plan.array("vertices").data_ptr()


def test_the_same_graphs_have_the_same_schedule():
    children = [[[], [], [0, 1], [2, 0], [3]], [[], [0, 0, 0, 0, 0, 0]]]
    first = schedule("f", Graphs.from_children(children), (Kind((0, 1), True),))
    second = schedule("f", Graphs.from_children(children), (Kind((0, 1), True),))
    assert torch.equal(first.block(), second.block())


def test_an_empty_batch_has_an_empty_schedule():
    for kinds in (BOTH, SUM):
        plan = schedule("f", Graphs.batch([]), kinds)
        check(Graphs.batch([]), kinds, [], plan)
        assert plan.tasks == []
    assert schedule("f", Graphs.batch([]), BOTH, {"a": 0}).tasks == []


def test_slots_far_apart_and_a_crowd_of_children():
    n = 10_000
    edges = [[(v, n, 3 * v) for v in range(n)]]
    graphs = Graphs.from_edges(edges, [n + 1])
    plan = schedule("f", graphs, (Kind((0, 3, 29_997), True),))
    check_rows = plan.array("gather").view(3, n + 1)[:, n].tolist()
    rows = rows_of(plan)
    assert check_rows == [rows[0], rows[1], rows[n - 1]]
    assert plan.tasks[1].edge_run == 0


def test_children_beyond_what_is_gathered_are_refused():
    graphs = Graphs.batch([Graphs.chain([2]), Graphs.from_children([[[], [-1, -1, 0]]])])
    with pytest.raises(ValueError, match=r"Cell: graph 1, vertex 1: .*slot 2"):
        schedule("Cell", graphs, BOTH)
    schedule("Cell", graphs, (Kind((5,)),))
    schedule("Cell", graphs, SUM)
    typed = graphs.with_types(["a", "b", "a", "b"])
    with pytest.raises(ValueError, match="graph 1, vertex 1"):
        schedule("Cell", typed, (Kind((0, 1, 2)), Kind((0,))), {"a": 0, "b": 1})
    schedule("Cell", typed, (Kind((0,)), Kind((0, 1, 2))), {"a": 0, "b": 1})


def test_types_without_a_function_are_refused():
    graphs = Graphs.chain([2, 2])
    with pytest.raises(ValueError, match="graph 0, vertex 0"):
        schedule("Cells", graphs, SUM, {"a": 0})
    typed = graphs.with_types(["a", "a", "a", "b"])
    with pytest.raises(ValueError, match=r"Cells: graph 1, vertex 1: .*'b'"):
        schedule("Cells", typed, SUM, {"a": 0})
    # Types that no vertex has are no matter.
    schedule("Cells", typed[:1], SUM, {"a": 0})


def test_batching_and_scheduling_are_fast():
    """256 binary trees of 36 vertices on average; with five times the 0.4 ms that they may take."""
    draw = random.Random(0)
    trees = []
    for _ in range(256):
        rows: list[list[int]] = [[] for _ in range(draw.randint(2, 35))]
        waiting = list(range(len(rows)))
        while len(waiting) > 1:
            i = draw.randrange(len(waiting) - 1)
            rows.append(waiting[i : i + 2])
            waiting[i : i + 2] = [len(rows) - 1]
        trees.append(Graphs.from_children([rows]))
    best = float("inf")
    for _ in range(30):
        start = time.perf_counter()
        schedule("f", Graphs.batch(trees), BOTH)
        best = min(best, time.perf_counter() - start)
    assert best < 5 * 0.4e-3


@pytest.mark.cuda
def test_a_schedule_on_the_device():
    graphs = Graphs.chain([5, 3]).to("cuda")
    plan = schedule("f", graphs, SUM)
    block = plan.block(graphs.device)
    assert plan.block(graphs.device) is block
    torch.cuda.synchronize()
    assert torch.equal(block.cpu(), plan.block())
    with torch.cuda.stream(torch.cuda.Stream()):
        assert plan.block(graphs.device) is block
    # Graphs on the CPU are copied at each call.
    plan = schedule("f", Graphs.chain([5, 3]), SUM)
    assert plan.block(graphs.device) is not plan.block(graphs.device)
