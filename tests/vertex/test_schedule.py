"""Schedules against the order they are meant to be, and against expressions whose value is an exact integer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weft import Graphs
from weft.vertex._schedule import Kind, schedule

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


def check(graphs: Graphs, kinds: tuple[Kind, ...], kind_of_vertex: list[int], plan) -> None:
    """Every array says what csrc/vertex/schedule.h promises of it."""
    V = graphs.num_vertices
    edges = graphs.edges.tolist()
    levels = graphs.levels.tolist()
    rows, vertices = plan.array("rows").tolist(), plan.array("vertices").tolist()
    assert sorted(vertices) == list(range(V))
    assert [rows[v] for v in vertices] == list(range(V))

    # Tasks cut the rows into pieces of one level and kind, in order.
    tasks = plan.tasks
    assert [(t.level, t.kind) for t in tasks] == sorted({(levels[v], kind_of_vertex[v]) for v in range(V)})
    assert [t.first for t in tasks] == [sum(t.count for t in tasks[:i]) for i in range(len(tasks))]
    for task in tasks:
        for row in range(task.first, task.first + task.count):
            assert (levels[vertices[row]], kind_of_vertex[vertices[row]]) == (task.level, task.kind)
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
    found = list(zip(plan.array("use_rows").tolist(), plan.array("use_columns").tolist(), strict=True))
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
    first_edge = plan.array("first_edge").tolist()
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
    first_sum_use, sum_use_edges = plan.array("first_sum_use").tolist(), plan.array("sum_use_edges").tolist()
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
    assert [states[row] for row in plan.array("rows").tolist()] == expected


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


def test_a_schedule_is_planned_once_and_belongs_to_all_copies():
    graphs = Graphs.chain([3, 2])
    plan = schedule("f", graphs, SUM)
    assert schedule("g", graphs, SUM) is plan
    assert schedule("f", graphs, BOTH) is not plan
    assert schedule("f", graphs.to("meta"), SUM).core is plan.core
    # A copy elsewhere is the same numbers, and views of it by name.
    assert plan.block() is plan.block(torch.device("cpu"))
    assert plan.array("rows").data_ptr() == plan.array("rows").data_ptr()


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
    rows = plan.array("rows").tolist()
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
