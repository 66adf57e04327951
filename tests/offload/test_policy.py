"""The policy: the simulator against a literal one, plans against every choice there is."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import FrozenInstanceError, replace

import pytest
import weft
from hypothesis import given, settings
from hypothesis import strategies as st
from weft._offload.timelines import FirstSave, without_hooks
from weft.offloading import Link, Move, Plan, Saved, Timeline, plan, simulate

UNIT = Link(1.0, 1.0)  # a byte per second: all times are integers, so that all comparisons are exact


def size_on_bus(saved: Saved, compressed: bool) -> int:
    """The model's compressed size, as it is written."""
    if not compressed or saved.itemsize not in (2, 4):
        return saved.bytes
    n = saved.bytes // saved.itemsize
    packed = round(n * saved.density) * saved.itemsize + 4 * math.ceil(n / 32)
    return packed if packed < saved.bytes else saved.bytes


def parts(saved: Saved, move: Move) -> tuple[Saved, int]:
    """What is compressed of it, if anything, and the bytes that are not."""
    part = saved.bytes
    if move.share < 1 and saved.itemsize in (2, 4):
        part = 32 * math.floor(move.share * (saved.bytes // saved.itemsize) / 32) * saved.itemsize
    coded = replace(saved, bytes=part if move.compressed and move.share > 0 else 0)
    if size_on_bus(coded, True) == coded.bytes:
        coded = replace(saved, bytes=0)
    return coded, saved.bytes - coded.bytes


def sent_bytes(saved: Saved, move: Move) -> int:
    coded, rest = parts(saved, move)
    return size_on_bus(coded, True) + rest


def lasts(saved: Saved, move: Move, link: Link) -> int:
    """Bytes that are as long on the bus."""
    coded, rest = parts(saved, move)
    return max(size_on_bus(coded, True), math.ceil(link.least * coded.bytes)) + rest


def codec_seconds(saved: Saved, move: Move, link: Link) -> float:
    coded, _ = parts(saved, move)
    return 2 * (coded.bytes + size_on_bus(coded, True)) / link.codec


def last_use(saved: Saved) -> int:
    return saved.first_backward if saved.last_backward is None else saved.last_backward


def literal(timeline: Timeline, moves: list[Move], budget: int | None, link: Link) -> Plan:
    """The model's paragraph, sentence by sentence. Each thing that happens has a start and an end; everything else is
    asked of these."""
    tensors, operations = timeline.tensors, range(len(timeline.seconds))
    moved = {m.tensor: m for m in moves}
    started: dict[tuple, float] = {}  # ("operation", k), ("out", i) or ("in", i)
    ended: dict[tuple, float] = {}
    took = {("operation", k): s for k, s in enumerate(timeline.seconds)}
    for i, move in moved.items():
        size = lasts(tensors[i], move, link)
        took["out", i], took["in", i] = size / link.d2h, size / link.h2d
    outs = sorted(moved, key=lambda i: (tensors[i].last_forward, i))
    ins = sorted(moved, key=lambda i: (tensors[i].first_backward, i))

    def counts(i: int) -> bool:
        if ("operation", tensors[i].last_forward) not in started or ("operation", last_use(tensors[i])) in ended:
            return False
        return i not in moved or ("out", i) not in ended or ("in", i) in started

    def counted() -> int:
        return sum(t.bytes for i, t in enumerate(tensors) if counts(i))

    def room(kind: str, new: int) -> bool:
        if kind == "operation" and new == 0:  # it saves nothing new
            return True
        return budget is None or counted() + new <= budget

    def runs(kind: str) -> bool:
        return any(key[0] == kind and key not in ended for key in started)

    def first(kind: str, order) -> tuple | None:
        return next(((kind, i) for i in order if (kind, i) not in started), None)

    def turn(key: tuple | None) -> bool:
        """Whether it may start, were there room."""
        if key is None or runs(key[0]):
            return False
        kind, i = key
        if kind == "operation":
            back = all(("in", j) in ended for j in moved if tensors[j].first_backward == i)
            return (i == 0 or ("operation", i - 1) in ended) and back
        if kind == "out":
            return ("operation", tensors[i].last_forward) in ended
        return ("operation", moved[i].prefetch - 1) in ended and ("out", i) in ended

    def new(key: tuple) -> int:
        kind, i = key
        return sum(t.bytes for t in tensors if t.last_forward == i) if kind == "operation" else tensors[i].bytes

    now = peak = 0
    while ("operation", len(operations) - 1) not in ended and operations:
        for key in started:
            if key not in ended and started[key] + took[key] == now:
                ended[key] = now
        for kind, order in (("operation", operations), ("out", outs), ("in", ins)):
            key = first(kind, order)
            if turn(key) and (kind == "out" or room(kind, new(key))):
                started[key] = now
        running = [key for key in started if key not in ended]
        if not running and len(ended) < len(took):
            key = first("operation", operations)
            started[key if turn(key) else first("in", ins)] = now
        peak = max(peak, counted())
        ends = [started[key] + took[key] for key in started if key not in ended]
        now = min(ends, default=now)
    end = ended["operation", len(operations) - 1] if operations else 0
    forward_end = ended["operation", timeline.forward - 1] if timeline.forward else 0
    forward_time = sum(timeline.seconds[: timeline.forward])
    return Plan(
        moves=tuple(moves),
        peak_bytes=peak,
        seconds=end,
        forward_stall=forward_end - forward_time,
        backward_stall=end - forward_end - sum(timeline.seconds[timeline.forward :]),
        moved_bytes=sum(tensors[i].bytes for i in moved),
        sent_bytes=sum(sent_bytes(tensors[i], m) for i, m in moved.items()),
        met=budget is None or peak <= budget,
        codec_seconds=sum(codec_seconds(tensors[m.tensor], m, link) for m in moves),
    )


def most_hidden(timeline: Timeline, moves: list[Move], link: Link) -> bool:
    """Whether every copy out ends within the forward, by the sum of what must still go out after each operation."""
    ends = list(itertools.accumulate(timeline.seconds))
    now = 0.0
    for move in sorted(moves, key=lambda m: (timeline.tensors[m.tensor].last_forward, m.tensor)):
        saved = timeline.tensors[move.tensor]
        now = max(now, ends[saved.last_forward]) + lasts(saved, move, link) / link.d2h
    return not moves or now <= ends[timeline.forward - 1]


@st.composite
def timelines(draw, most_tensors: int = 6, most_operations: int = 5, known: bool = True) -> Timeline:
    forward, backward = draw(st.integers(1, most_operations)), draw(st.integers(1, most_operations))
    operations = forward + backward
    seconds = [draw(st.integers(0, 12)) if known else None for _ in range(operations)]
    tensors = []
    for _ in range(draw(st.integers(0, most_tensors))):
        first = draw(st.integers(forward, operations - 1))
        tensors.append(
            Saved(
                draw(st.integers(0, 12)) * draw(st.sampled_from([1, 32])),
                draw(st.integers(0, forward - 1)),
                first,
                draw(st.none() | st.integers(first, operations - 1)),
                draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
                draw(st.sampled_from([1, 2, 4, 8])),
            )
        )
    return Timeline(seconds, forward, tensors)


def budgets(timeline: Timeline):
    total = sum(t.bytes for t in timeline.tensors)
    return st.none() | st.integers(0, total + 1)


def choices(timeline: Timeline, movable: list[int], compressed: bool):
    """Every set of moves, with every order of prefetches that is not inverted."""
    tensors = timeline.tensors
    for size in range(len(movable) + 1):
        for chosen in itertools.combinations(movable, size):
            order = sorted(chosen, key=lambda i: (tensors[i].first_backward, i))
            ranges = [range(timeline.forward, tensors[i].first_backward + 1) for i in order]
            for prefetch in itertools.product(*ranges):
                if list(prefetch) == sorted(prefetch):
                    yield [Move(i, p, compressed) for i, p in zip(order, prefetch, strict=True)]


@settings(max_examples=200)
@given(data=st.data(), d2h=st.sampled_from([0.5, 1.0, 4.0]), h2d=st.sampled_from([0.5, 1.0, 4.0]))
def test_simulate_is_the_model(data, d2h: float, h2d: float) -> None:
    timeline = data.draw(timelines())
    link = Link(d2h, h2d, data.draw(st.sampled_from([math.inf, 2.0])), data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    share = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    moves = [
        Move(i, data.draw(st.integers(timeline.forward, t.first_backward)), data.draw(st.booleans()), data.draw(share))
        for i, t in enumerate(timeline.tensors)
        if data.draw(st.booleans())
    ]
    moves = data.draw(st.permutations(moves))
    budget = data.draw(budgets(timeline))
    assert simulate(timeline, moves, budget, link=link) == literal(timeline, moves, budget, link)


def test_a_step_by_hand() -> None:
    # Two layers of 3 s forward and 4 s backward; 2 s for each copy.
    timeline = Timeline([3, 3, 4, 4], 2, [Saved(2, 0, 3, itemsize=8), Saved(2, 1, 2, itemsize=8)])
    assert simulate(timeline, [], None, link=UNIT) == Plan((), 4, 14, 0, 0, 0, 0, True)
    # With room for one tensor: out from 3 to 5, the second layer from 5 to 8, its backward to 12; then the first tensor
    # has room to come back, to 14.
    assert simulate(timeline, [Move(0, 2)], 2, link=UNIT) == Plan((Move(0, 2),), 2, 18, 2, 2, 2, 2, True)
    # With room for both the copies hide: out beside the second layer, in from 6 to 8 beside its backward.
    assert simulate(timeline, [Move(0, 2)], 4, link=UNIT) == Plan((Move(0, 2),), 4, 14, 0, 0, 2, 2, True)
    # With room for none the operations go over the budget, one tensor at a time.
    both = [Move(1, 2), Move(0, 2)]
    assert simulate(timeline, both, 1, link=UNIT) == Plan(tuple(both), 2, 22, 2, 6, 4, 4, False)
    assert plan(timeline, 4, link=UNIT).moves == ()
    # The second layer's tensor alone would leave its operation without room. The first may wait for operation 2: it has
    # no room before.
    assert plan(timeline, 2, link=UNIT) == Plan((Move(0, 3),), 2, 18, 2, 2, 2, 2, True)
    # Out from 3 to 5; the copy of the second would end after the forward. In beside operation 2 and not after it.
    assert plan(timeline, link=UNIT) == Plan((Move(0, 2),), 4, 14, 0, 0, 2, 2, True)


def test_nothing_to_do() -> None:
    assert plan(Timeline([], 0, []), 0) == Plan((), 0, 0, 0, 0, 0, 0, True)
    assert plan(Timeline([1, 1], 1, []), None) == Plan((), 0, 2, 0, 0, 0, 0, True)
    assert plan(Timeline([None, None], 1, []), 5) == Plan((), 0, None, None, None, 0, 0, True)


@settings(max_examples=100)
@given(
    data=st.data(), keep_last=st.integers(0, 2), min_bytes=st.integers(0, 3), compress=st.sampled_from(["auto", None])
)
def test_plan_is_the_best_choice(data, keep_last: int, min_bytes: int, compress: str | None) -> None:
    timeline = data.draw(timelines(4, 3))
    budget = data.draw(budgets(timeline))
    options = {"link": UNIT, "keep_last": keep_last, "min_bytes": min_bytes, "compress": compress}
    found = plan(timeline, budget, **options)
    tensors = timeline.tensors
    order = sorted(range(len(tensors)), key=lambda i: (tensors[i].last_forward, i))
    movable = [i for i in order[: max(0, len(order) - keep_last)] if tensors[i].bytes >= min_bytes]
    every = [literal(timeline, moves, budget, UNIT) for moves in choices(timeline, movable, compress == "auto")]

    assert found == literal(timeline, list(found.moves), budget, UNIT) and isinstance(found.moves, tuple)
    assert set(m.tensor for m in found.moves) <= set(movable)
    assert all(m.compressed == (size_on_bus(tensors[m.tensor], compress == "auto") < tensors[m.tensor].bytes)
               for m in found.moves)  # fmt: skip
    if budget is None:
        hidden = [p for p in every if p.forward_stall == p.backward_stall == 0 and most_hidden(timeline, p.moves, UNIT)]
        assert found.forward_stall == found.backward_stall == 0 and most_hidden(timeline, found.moves, UNIT)
        assert found.moved_bytes == max(p.moved_bytes for p in hidden) and found.met
        return
    assert found.met == any(p.met for p in every)
    if simulate(timeline, [], budget, link=UNIT).met:
        assert found.moves == ()
    if found.met:
        assert found.seconds == min(p.seconds for p in every if p.met)
    else:
        assert sorted(m.tensor for m in found.moves) == sorted(movable)
        # What is moved is settled, and no prefetch makes the step shorter.
        assert found.seconds == min(p.seconds for p in every if len(p.moves) == len(movable))


def check_prefetches(timeline: Timeline, found: Plan, budget: int | None, link: Link) -> None:
    """In order, and no single one can be later without a longer step or an inverted order."""
    keys = [(timeline.tensors[m.tensor].first_backward, m.tensor) for m in found.moves]
    assert keys == sorted(keys)
    prefetches = [m.prefetch for m in found.moves]
    assert prefetches == sorted(prefetches)
    for j, move in enumerate(found.moves):
        most = timeline.tensors[move.tensor].first_backward
        for later in range(move.prefetch + 1, min([most, *prefetches[j + 1 : j + 2]]) + 1):
            moves = [*found.moves[:j], replace(move, prefetch=later), *found.moves[j + 1 :]]
            assert simulate(timeline, moves, budget, link=link).seconds > found.seconds


@settings(max_examples=100)
@given(data=st.data())
def test_prefetches_are_late(data) -> None:
    timeline = data.draw(timelines(8, 8))
    budget = data.draw(budgets(timeline))
    check_prefetches(timeline, plan(timeline, budget, link=UNIT), budget, UNIT)


def network(layers: int, seed: int, zeros: bool = True) -> Timeline:
    """A step of a chain of layers: each saves a tensor or two, and the backward goes the other way."""
    draw = random.Random(seed)
    forward = [draw.uniform(0.5e-3, 3e-3) for _ in range(layers)]
    tensors = []
    for k in range(layers):
        for _ in range(draw.choice([1, 1, 2])):
            back = 2 * layers - 1 - k
            density = draw.choice([1.0, 1.0, draw.uniform(0.1, 0.9)]) if zeros else 1.0
            size = 2 ** draw.uniform(18, 27)
            tensors.append(Saved(int(size) // 4 * 4, min(k + draw.choice([0, 0, 1]), layers - 1), back, None, density))
    return Timeline(forward + [2 * s for s in reversed(forward)], layers, tensors)


def first_that_fit(timeline: Timeline, budget: int, link: Link, order) -> Plan:
    """The simple policy: in that order, until a simulated step meets the budget, back as early as possible."""
    moves: list[Move] = []
    for i in sorted(range(len(timeline.tensors)), key=lambda i: order(timeline.tensors[i]), reverse=True):
        found = simulate(timeline, moves, budget, link=link)
        if found.met:
            return found
        moves.append(Move(i, timeline.forward, True))
    return simulate(timeline, moves, budget, link=link)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_large_steps_are_better_than_simple_policies(share: float, seed: int) -> None:
    timeline, link = network(60, seed), Link()
    budget = int(share * sum(t.bytes for t in timeline.tensors))
    found = plan(timeline, budget, link=link)
    assert found.met and found.peak_bytes <= budget
    check_prefetches(timeline, found, budget, link)
    everything = simulate(timeline, [Move(i, 60, True) for i in range(len(timeline.tensors))], budget, link=link)
    simple = [
        first_that_fit(timeline, budget, link, lambda t: t.first_backward - t.last_forward),
        first_that_fit(timeline, budget, link, lambda t: t.bytes),
        first_that_fit(timeline, budget, link, lambda t: -t.density),
        everything,
    ]
    assert found.seconds <= min(p.seconds for p in simple if p.met)


@pytest.mark.parametrize("seed", range(2))
def test_the_search_is_close_to_the_best(seed: int) -> None:
    """Beyond a dozen tensors plans are searched for; 13 can still be tried in all ways."""
    draw = random.Random(seed)
    layers = 8
    forward = [draw.randint(1, 8) for _ in range(layers)]
    tensors = [
        Saved(draw.randint(1, 12), k, draw.randint(2 * layers - 1 - k, 2 * layers - 1), 2 * layers - 1)
        for k in (i * layers // 13 for i in range(13))
    ]
    timeline = Timeline(forward + [2 * s for s in reversed(forward)], layers, tensors)
    budget = int(0.7 * sum(t.bytes for t in tensors))
    found = plan(timeline, budget, link=UNIT)
    subsets = ([Move(i, layers) for i in range(13) if subset >> i & 1] for subset in range(1 << 13))
    every = [simulate(timeline, moves, budget, link=UNIT) for moves in subsets]
    least = min((p.seconds for p in every if p.met), default=None)
    assert found.met == (least is not None)
    assert least is None or found.seconds <= 1.05 * least
    hidden = max(
        p.moved_bytes for p in (simulate(timeline, p.moves, link=UNIT) for p in every)
        if p.forward_stall == p.backward_stall == 0 and most_hidden(timeline, p.moves, UNIT)
    )  # fmt: skip
    assert plan(timeline, link=UNIT).moved_bytes >= 0.95 * hidden


@pytest.mark.parametrize("seed", range(3))
def test_what_hides(seed: int) -> None:
    timeline, link = network(60, seed), Link()
    found = plan(timeline, link=link)
    assert found.forward_stall == found.backward_stall == 0 and found.seconds == pytest.approx(sum(timeline.seconds))
    assert most_hidden(timeline, found.moves, link)
    check_prefetches(timeline, found, None, link)
    # The bus is nearly full beside the forward, or everything goes.
    hideable = link.d2h * sum(timeline.seconds[:60])
    assert found.sent_bytes >= 0.9 * min(hideable, sum(size_on_bus(t, True) for t in timeline.tensors))


def vgg19(batch: int = 64) -> Timeline:
    """What a VGG-19 saves, and times like those of a GPU: convolutions by their products, 17 ms of forward."""
    seconds, back, tensors = [0.0], [], []  # tensors: bytes, density, itemsize; back: (tensor, seconds before its read)
    channels, size, last = 3, 224, 0
    tensors.append((4 * batch * 3 * size * size, 1.0, 4))
    for stage, convolutions in enumerate((2, 2, 4, 4, 4)):
        for _ in range(convolutions):
            out = 64 * min(2**stage, 8)
            run = 2e-15 * batch * out * channels * 9 * size * size + 2e-12 * batch * (channels + out) * size * size
            seconds.append(run)
            back.append((last, 2 * run))
            last, channels = len(tensors), out
            tensors.append((4 * batch * out * size * size, 0.5, 4))
        seconds += [run / 4, 0.0]
        back.append((last, run / 2))
        size //= 2
        back.append((len(tensors), 0.0))
        last = len(tensors) + 1
        tensors += [(8 * batch * channels * size * size, 1.0, 8), (4 * batch * channels * size * size, 0.75, 4)]
    forward, first = len(tensors) + 1, {}
    seconds.append(0.0)
    for tensor, run in reversed(back):
        first.setdefault(tensor, len(seconds))
        seconds.append(run)
    seconds = [s * 0.0545 / sum(seconds) for s in seconds]
    saved = [Saved(b, i, first[i], None, d, e) for i, (b, d, e) in enumerate(tensors) if i in first]
    return Timeline(seconds, forward, saved)


@settings(max_examples=100)
@given(data=st.data(), least=st.sampled_from([0.0, 0.75]), slowdown=st.sampled_from([0.0, 0.02, 0.1, 1.0]))
def test_compressed_in_part(data, least: float, slowdown: float) -> None:
    """Where the codec takes time, no more is compressed than lets tensors hide: against all sets and shares."""
    forward = data.draw(st.integers(1, 4))
    seconds = [1000 * data.draw(st.integers(0, 12)) for _ in range(2 * forward)]
    tensors = []
    for _ in range(data.draw(st.integers(1, 3))):
        last, density = data.draw(st.integers(0, forward - 1)), data.draw(st.sampled_from([0.1, 0.5, 0.8, 1.0]))
        back = data.draw(st.integers(forward, 2 * forward - 1))
        tensors.append(Saved(1000 * 32 * data.draw(st.integers(0, 12)) // 10, last, back, None, density))
    timeline, link = Timeline(seconds, forward, tensors), Link(1.0, 1.0, 4.0, least)
    allowed, eps = slowdown * sum(seconds), 64.0  # words of masks are whole

    def hides(p: Plan) -> bool:
        return p.forward_stall == p.backward_stall == 0 and most_hidden(timeline, p.moves, link)

    found = plan(timeline, None, link=link, slowdown=slowdown)
    assert hides(found) and found.codec_seconds <= allowed + eps and simulate(timeline, found.moves, link=link) == found
    check_prefetches(timeline, found, None, link)
    as_they_are = plan(timeline, None, link=link, compress=None)
    assert found.sent_bytes >= as_they_are.sent_bytes and as_they_are.codec_seconds == 0
    assert found.codec_seconds == 0 or found.sent_bytes > as_they_are.sent_bytes
    best = 0
    for states in itertools.product([None, 0.0, 0.1, 0.25, 0.5, 0.75, 1.0], repeat=len(tensors)):
        moves = [Move(i, forward, share > 0, share) for i, share in enumerate(states) if share is not None]
        p = simulate(timeline, moves, link=link)
        if hides(p) and p.codec_seconds <= allowed:
            best = max(best, p.sent_bytes)
    assert found.sent_bytes >= 0.95 * best


def test_a_tensor_hides_that_is_a_little_too_large() -> None:
    """10,000 bytes do not go out in 9000 s. Half of what is compressed is zeros."""
    timeline = Timeline([0, 9000, 20_000, 0], 2, [Saved(10_000, 0, 3, None, 0.5)])
    assert plan(timeline, link=Link(1.0, 1.0, 100.0)).moves == ()
    found = plan(timeline, link=Link(1.0, 1.0, 100.0), slowdown=0.01)
    (move,) = found.moves
    coded = 32 * (10_000 // 4 * move.share // 32)
    assert 0 < move.share < 0.3 and found.moved_bytes == 10_000 and found.forward_stall == found.backward_stall == 0
    assert 8900 <= found.sent_bytes == 10_000 - coded * 4 / 2 + coded / 8 <= 9000
    assert found.codec_seconds == 2 * (coded * 4 + coded * 2 + coded / 8) / 100 <= 0.01 * 29_000
    # It takes no less time on the bus than that share of it.
    found = plan(timeline, link=Link(1.0, 1.0, 100.0, 0.75), slowdown=0.01)
    assert found.moves[0].share > move.share and 0.4 < found.moves[0].share < 0.5
    # With a budget, or where the codec takes no time, all is compressed that gets smaller.
    assert plan(timeline, 0, link=Link(1.0, 1.0, 100.0)).moves[0].share == 1
    assert plan(timeline, link=Link(1.0, 1.0)).moves[0].share == 1


@pytest.mark.parametrize(("rate", "sent"), [(46e9, 720), (48e9, 780), (50e9, 840), (54e9, 900)])
def test_a_large_tensor_fits_in_part_compressed(rate: float, sent: float) -> None:
    """Of a VGG-19: megabytes, of which 600 to 660 go as they are below 52 GB/s."""
    step, link = vgg19(), Link(0.97 * rate, 0.97 * rate, 3e12, 0.75)
    found = plan(step, link=link, slowdown=0.01)
    assert found.forward_stall == found.backward_stall == 0 and most_hidden(step, found.moves, link)
    assert found.sent_bytes >= sent * 1e6 and found.codec_seconds <= 0.01 * sum(step.seconds)
    assert found.sent_bytes >= plan(step, link=link, compress=None).sent_bytes
    assert plan(step, link=link, slowdown=0.01) == found


@pytest.mark.parametrize(("share", "best"), [(0.75, 54.501), (0.5, 70.25), (0.25, 101.57), (None, 937.6)])
def test_few_large_tensors(share: float | None, best: float) -> None:
    """Of a VGG-19 a search a hundred times as long finds nothing better: milliseconds, without a budget megabytes."""
    step = vgg19()
    if share is None:
        link = Link(0.97 * 55e9, 0.97 * 54e9)
        found = plan(step, None, link=link, compress=None)
        assert found.forward_stall == found.backward_stall == 0 and found.sent_bytes >= best * 1e6
        return
    saved = sum(t.bytes for t in step.tensors)
    found = plan(step, int(share * saved), link=Link(55e9, 54e9))
    assert found.met and found.seconds <= best * 1e-3


def test_five_hundred_tensors_take_less_than_two_seconds() -> None:
    timeline = network(400, 0)
    assert len(timeline.tensors) >= 500
    for budget in (None, 0, sum(t.bytes for t in timeline.tensors) // 2):
        for link in (Link(), Link(codec=3e12, least=0.75)):
            start = time.perf_counter()
            first = plan(timeline, budget, link=link, slowdown=0.01)
            assert time.perf_counter() - start < 2
            assert plan(timeline, budget, link=link, slowdown=0.01) == first, "the same step gives the same plan"


def plan_by_rule(timeline: Timeline, budget: int | None) -> tuple[list[tuple[int, int]], int]:
    """AutoVM's rule, as it is written."""
    tensors, operations = timeline.tensors, range(len(timeline.seconds))
    prefetch: dict[int, int] = {}

    def working_set(k: int) -> int:
        def counts(i: int, t: Saved) -> bool:
            if i in prefetch:
                return k == t.last_forward or prefetch[i] <= k <= last_use(t)
            return t.last_forward <= k <= last_use(t)

        return sum(t.bytes for i, t in enumerate(tensors) if counts(i, t))

    if budget is None:
        return [], max(map(working_set, operations), default=0)
    distance = [t.first_backward - t.last_forward for t in tensors]
    for i in sorted(range(len(tensors)), key=lambda i: (-distance[i], -tensors[i].bytes, i)):
        if all(working_set(k) <= budget for k in operations):
            break
        prefetch[i] = tensors[i].first_backward
    order = sorted(prefetch, key=lambda i: (tensors[i].first_backward, i))
    for j, i in enumerate(order):
        least = max(timeline.forward, prefetch[order[j - 1]] if j else 0)
        while prefetch[i] > least and working_set(prefetch[i] - 1) + tensors[i].bytes <= budget:
            prefetch[i] -= 1
    return [(i, prefetch[i]) for i in order], max(map(working_set, operations), default=0)


@settings(max_examples=200)
@given(data=st.data())
def test_unknown_run_times(data) -> None:
    timeline = data.draw(timelines(7, 7, known=False))
    budget = data.draw(budgets(timeline))
    found = plan(timeline, budget)
    moves, peak = plan_by_rule(timeline, budget)
    assert [(m.tensor, m.prefetch) for m in found.moves] == moves
    assert found.peak_bytes == peak and found.met == (budget is None or peak <= budget)
    assert found.seconds is found.forward_stall is found.backward_stall is None
    assert found.moved_bytes == sum(timeline.tensors[i].bytes for i, _ in moves)
    assert simulate(timeline, found.moves, budget) == found


def test_sizes_are_strings_too() -> None:
    timeline = Timeline([1.0, 1.0], 1, [Saved(4_000_000, 0, 1), Saved(3_000_000, 0, 1)])
    assert plan(timeline, "7MB").moves == () and plan(timeline, "6.9 mb").moves != ()
    assert [m.tensor for m in plan(timeline, "0 B", min_bytes="3.5MB").moves] == [0]
    assert plan(timeline, 2**80).met


def test_data_is_frozen_and_equal_by_value() -> None:
    assert Saved(1, 0, 1) == Saved(
        bytes=1, last_forward=0, first_backward=1, last_backward=None, density=1.0, itemsize=4
    )
    assert Link() == Link(50e9, 50e9) and Move(0, 1) == Move(tensor=0, prefetch=1, compressed=False)
    with pytest.raises(FrozenInstanceError):
        Link().d2h = 1.0
    assert weft.offloading.plan is plan


GOOD = Saved(8, 0, 2)
NAN = float("nan")


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(tensors=[replace(GOOD, last_forward=2)]), "last_forward"),
        (dict(tensors=[replace(GOOD, last_forward=-1)]), "last_forward"),
        (dict(tensors=[GOOD, replace(GOOD, first_backward=1)]), "tensor 1: first_backward"),
        (dict(tensors=[replace(GOOD, first_backward=4)]), "first_backward"),
        (dict(tensors=[replace(GOOD, last_backward=1)]), "last_backward"),
        (dict(tensors=[replace(GOOD, last_backward=4)]), "last_backward"),
        (dict(tensors=[replace(GOOD, bytes=-1)]), "bytes"),
        (dict(tensors=[replace(GOOD, bytes=NAN)]), "bytes"),
        (dict(tensors=[replace(GOOD, bytes=2**62), GOOD]), "bytes"),
        (dict(tensors=[replace(GOOD, density=1.01)]), "density"),
        (dict(tensors=[replace(GOOD, density=-0.01)]), "density"),
        (dict(tensors=[replace(GOOD, density=NAN)]), "density"),
        (dict(tensors=[replace(GOOD, itemsize=-4)]), "itemsize"),
        (dict(seconds=[1, 1, 1, -1]), "seconds"),
        (dict(seconds=[1, 1, 1, NAN]), "seconds"),
        (dict(seconds=[1, 1, 1, math.inf]), "seconds"),
        (dict(seconds=[1, 1, 1, None]), "seconds"),
        (dict(forward=5), "forward"),
        (dict(forward=-1), "forward"),
    ],
)
def test_bad_timelines(change: dict, words: str) -> None:
    timeline = replace(Timeline([1, 1, 1, 1], 2, [GOOD]), **change)
    for call in (lambda: plan(timeline, 4), lambda: simulate(timeline, [])):
        with pytest.raises(ValueError, match=words):
            call()


def test_bad_arguments() -> None:
    timeline = Timeline([1, 1, 1, 1], 2, [GOOD, GOOD])
    for link in (Link(0), Link(h2d=-1), Link(NAN), Link(codec=0), Link(codec=NAN), Link(least=1.1), Link(least=NAN)):
        for call in (lambda link=link: plan(timeline, link=link), lambda link=link: simulate(timeline, [], link=link)):
            with pytest.raises(ValueError, match=r"must be positive|least must be between 0 and 1"):
                call()
    for slowdown in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match="slowdown must be between 0 and 1"):
            plan(timeline, slowdown=slowdown)
    for moves, words in (
        ([Move(0, 2), Move(1, 2), Move(0, 2)], "twice"),
        ([Move(0, 1)], "prefetch"),
        ([Move(0, 3)], "prefetch"),
        ([Move(2, 2)], "none of the 2"),
        ([Move(-1, 2)], "none of the 2"),
        ([Move(0, 2, True, 1.1)], "share"),
        ([Move(0, 2, True, NAN)], "share"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate(timeline, moves)
    with pytest.raises(ValueError, match="budget must not be negative, got -1"):
        plan(timeline, -1)
    with pytest.raises(ValueError, match="4 apples"):
        simulate(timeline, [], "4 apples")
    for budget in (1.5, True, [1]):
        with pytest.raises(TypeError, match="budget"):
            plan(timeline, budget)
    with pytest.raises(ValueError, match="compress"):
        plan(timeline, compress="zvc")
    with pytest.raises(ValueError, match="min_bytes"):
        plan(timeline, min_bytes=-1)
    with pytest.raises(TypeError, match="min_bytes"):
        plan(timeline, min_bytes=None)
    with pytest.raises(ValueError, match="keep_last"):
        plan(timeline, keep_last=-1)
    with pytest.raises(TypeError, match="keep_last"):
        plan(timeline, keep_last=0.5)


def read_so(reads: list[int | None]) -> Timeline:
    """Of tensors that are read in that order, an operation each; None: never, which counts to the end."""
    forward, count = len(reads) + 1, sum(r is not None for r in reads)
    saved = [Saved(10 + i, i, forward + (count - 1 if r is None else r)) for i, r in enumerate(reads)]
    return Timeline((1.0,) * (forward + count), forward, tuple(saved))


@pytest.mark.parametrize(
    ("reads", "moves", "expected"),
    [
        ([3, 2, 1, 0], [(0, 3)], (1, 3, 11 + 12 + 13)),
        ([3, 2, 1, 0], [(0, 2)], (2, 2, 12 + 13)),  # what comes back early needs the reads before
        ([3, 2, 1, 0], [(0, 0)], (0, 0, 0)),
        ([3, 2, 1, 0], [(1, 2), (0, 3)], (2, 2, 12 + 13)),
        ([3, 2, 1, 0], [(3, 0)], (0, 0, 0)),  # the last one moves
        ([3, 2, 1, 0], [], (1, 3, 11 + 12 + 13)),
        ([0, 3, 2, 1], [(1, 3)], (0, 0, 0)),  # one of before is read first
        ([3, 0, 2, 1], [(0, 3)], (1, 3, 11 + 12 + 13)),  # in any order behind
        ([2, None, 1, 0], [(0, 2)], (2, 2, 12 + 13)),  # one that nobody reads
        ([1, None, 0, None], [(0, 1)], (2, 1, 12 + 13)),
    ],
)
def test_hooks_end_with_the_last_move(
    reads: list[int | None], moves: list[tuple[int, int]], expected: tuple[int, int, int]
) -> None:
    t = read_so(reads)
    made = simulate(t, [Move(i, t.forward + back) for i, back in moves])
    assert without_hooks(t, made, [FirstSave(s.bytes, 4, True) for s in t.tensors]) == expected


@pytest.mark.parametrize(("again", "hooked"), [(0, 2), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)])
def test_hooks_stay_until_what_moves_is_not_saved_again(again: int, hooked: int) -> None:
    """Behind `again` of 6 tensors, the last time; what stays may be saved again without hooks."""
    t = read_so([5, 4, 3, 2, 1, 0])
    first = [FirstSave(s.bytes, 4, True, 6 if i > 1 else again * i) for i, s in enumerate(t.tensors)]
    made = simulate(t, [Move(1, t.forward + 4), Move(0, t.forward + 5)])
    found = without_hooks(t, made, first)
    assert found == ((hooked, 6 - hooked, sum(s.bytes for s in t.tensors[hooked:])) if hooked else (0, 0, 0))
