#include "vertex/schedule.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <ranges>
#include <stdexcept>
#include <tuple>

namespace weft::vertex {

namespace {

constexpr int32_t kBlockMagic = 0x57530002;  // "WS", version 2
constexpr int kNone = -1, kScattered = -2;

// -1, the first row of an unbroken run, or -2.
int32_t run_of(std::span<const int32_t> rows) {
  if (rows.empty()) return kNone;
  const int32_t first = rows[0], step = first == kNone ? 0 : 1;
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != first + step * static_cast<int32_t>(i)) return kScattered;
  }
  return first;
}

void starts_from_counts(std::span<int32_t> starts) {
  int32_t sum = 0;
  for (int32_t& start : starts) {
    const int32_t count = start;
    start = sum;
    sum += count;
  }
}

}  // namespace

int64_t Schedule::size(Array which) const {
  const int64_t V = number(kVertices), T = number(kTasks), C = number(kColumns), E = number(kEdges), U = number(kUses);
  switch (which) {
    case kTaskTable:
      return T * static_cast<int64_t>(sizeof(Task) / sizeof(int32_t));
    case kFrontierTask:
      return number(kFrontiers) + 1;
    case kSlots:
      return C;
    case kVertexOf:
      return V;
    case kGather:
      return C * V;
    case kRuns:
      return T * C;
    case kFirstUse:
      return V + 1;
    case kFirstEdge:
    case kFirstSumUse:
      return number(kSums) ? V + 1 : 0;
    case kEdgeChild:
    case kEdgeParent:
    case kSumUseEdge:
      return E;
    case kUsers:
      return 2 * U;
    case kNumArrays:
      break;
  }
  return 0;
}

void Schedule::make_block(const int32_t (&header)[kHeader]) {
  // size() reads the numbers.
  block_ = std::make_unique<int32_t[]>(kHeader);
  std::copy(header, header + kHeader, block_.get());
  int64_t offsets[kNumArrays + 1];
  int64_t end = static_cast<int>(kHeader) + kNumArrays + 1;
  for (int which = 0; which < kNumArrays; ++which) {
    end = (end + 3) / 4 * 4;
    offsets[which] = end;
    end += size(static_cast<Array>(which));
  }
  offsets[kNumArrays] = end;
  if (end > std::numeric_limits<int32_t>::max()) {
    throw std::length_error("weft.vertex: the schedule of this batch needs more than 2147483647 integers");
  }
  auto block = std::make_unique_for_overwrite<int32_t[]>(end);
  std::copy(header, header + kHeader, block.get());
  block[kMagic] = kBlockMagic;
  std::copy(offsets, offsets + kNumArrays + 1, block.get() + kHeader);
  // Nor is what lies between arrays left to chance.
  int64_t written = static_cast<int>(kHeader) + kNumArrays + 1;
  for (int which = 0; which < kNumArrays; ++which) {
    std::fill(block.get() + written, block.get() + offsets[which], 0);
    written = offsets[which] + size(static_cast<Array>(which));
  }
  block_ = std::move(block);
  length_ = static_cast<size_t>(end);
}

template <int kMostSlots>
void Schedule::plan_trees(const Graphs& graphs, int32_t columns) {
  const int64_t V = graphs.num_vertices(), E = graphs.num_edges(), F = graphs.num_levels();
  const int32_t *const levels = graphs.levels().data(), *const first_child = graphs.first_edge().data(),
                       *const child = graphs.child().data(), *const slot = graphs.slot().data();
  const auto count = graphs.level_sizes();

  int32_t header[kHeader] = {};
  header[kVertices] = static_cast<int32_t>(V);
  header[kTasks] = header[kFrontiers] = static_cast<int32_t>(F);
  header[kColumns] = columns;
  header[kUses] = static_cast<int32_t>(E);
  header[kMaxCount] = std::ranges::max(count);
  header[kSingleUse] = 1;
  make_block(header);
  std::iota(at(kSlots).begin(), at(kSlots).end(), 0);
  std::iota(at(kFrontierTask).begin(), at(kFrontierTask).end(), 0);
  Task* const tasks = reinterpret_cast<Task*>(at(kTaskTable).data());
  int32_t *const vertex_of = at(kVertexOf).data(), *const gather = at(kGather).data(), *const runs = at(kRuns).data(),
                 *const first_use = at(kFirstUse).data();
  struct User {
    int32_t row, column;
  };
  User* const users = reinterpret_cast<User*>(at(kUsers).data());

  // Those that nobody reads are the last of their level, so that where the uses of a row begin follows from its number.
  struct Level {
    int32_t end;     // of the rows that have no vertex yet
    int32_t unread;  // rows of earlier levels that nobody reads
  };
  const auto of_level = std::make_unique<Level[]>(F);
  for (const int32_t v : graphs.parentless()) ++of_level[levels[v]].unread;
  int32_t row = 0, unread = 0;
  for (int64_t l = 0; l < F; ++l) {
    tasks[l] = {0, static_cast<int32_t>(l), row, count[l], 0, 0, kNone, 0};
    const int32_t last = row + count[l], read = last - of_level[l].unread;
    std::iota(first_use + row, first_use + read, row - unread);
    std::fill(first_use + read, first_use + last, read - unread);
    of_level[l] = {last, unread};
    unread += last - read;
    row = last;
  }
  first_use[V] = static_cast<int32_t>(E);
  for (const int32_t v : graphs.parentless() | std::views::reverse) vertex_of[--of_level[levels[v]].end] = v;

  const bool full = E == columns * (V - count[0]);
  for (int32_t c = 0; c < columns; ++c) {
    std::fill_n(gather + c * V, full ? count[0] : V, kNone);
    runs[c] = kNone;
  }
  // What the rows ask of an edge is put together while its vertices are near each other, and all that a level's rows
  // ask before its children get theirs, without a branch: one that is not foreseen costs more than all else of a row.
  struct Edge {
    int32_t child;
    uint32_t level_slot;  // 4 times the child's level + the slot
  };
  const auto edges = std::make_unique_for_overwrite<Edge[]>(E + kMostSlots);
  for (int64_t e = 0; e < E; ++e) {
    edges[e] = {child[e], 4 * static_cast<uint32_t>(levels[child[e]]) + static_cast<uint32_t>(slot[e])};
  }
  std::fill_n(&edges[E], kMostSlots, Edge{});
  struct Parent {
    int32_t degree;
    Edge edges[kMostSlots];
  };
  const auto parents =
      std::make_unique_for_overwrite<Parent[]>(F > 1 ? *std::max_element(count.begin() + 1, count.end()) : 0);
  for (int64_t l = F - 1; l > 0; --l) {
    const int32_t first = tasks[l].first, rows = tasks[l].count;
    int32_t least = kMostSlots, most = 0;
    for (int32_t k = 0; k < rows; ++k) {
      const int32_t v = vertex_of[first + k], e = first_child[v], degree = first_child[v + 1] - e;
      parents[k].degree = degree;
      std::copy_n(&edges[e], kMostSlots, parents[k].edges);
      least = std::min(least, degree);
      most = std::max(most, degree);
    }
    for (int32_t i = most; i-- > 0;) {
      const bool all = i < least;
      for (int32_t k = rows; k-- > 0;) {
        if (!all && i >= parents[k].degree) continue;
        const Edge edge = parents[k].edges[i];
        Level& level = of_level[edge.level_slot / 4];
        const int32_t from = --level.end, column = edge.level_slot % 4;
        vertex_of[from] = edge.child;
        gather[column * V + first + k] = from;
        users[from - level.unread] = {first + k, column};
      }
    }
    for (int32_t c = 0; c < columns; ++c) runs[l * columns + c] = run_of({gather + c * V + first, size_t(rows)});
  }
}

Schedule::Schedule(const Graphs& graphs, std::span<const Kind> kinds, std::span<const int32_t> kind_of_type) {
  const int64_t V = graphs.num_vertices(), F = graphs.num_levels(), num_kinds = static_cast<int64_t>(kinds.size());
  const auto levels = graphs.levels(), types = graphs.types(), first_child = graphs.first_edge();
  const auto child = graphs.child(), slot = graphs.slot();
  const bool typed = !kind_of_type.empty();
  const auto kind_of = [&](int64_t v) { return typed ? kind_of_type[types[v]] : 0; };

  // The slots that any function gathers, and for each kind and slot its column, or none.
  std::vector<int32_t> slots;
  for (const Kind& kind : kinds) slots.insert(slots.end(), kind.slots.begin(), kind.slots.end());
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  const int64_t C = static_cast<int64_t>(slots.size());
  const bool dense = slots.empty() || slots.back() == C - 1;
  std::vector<char> gathers(num_kinds * C);
  for (int64_t k = 0; k < num_kinds; ++k) {
    for (const int32_t s : kinds[k].slots) {
      gathers[k * C + (std::lower_bound(slots.begin(), slots.end(), s) - slots.begin())] = 1;
    }
  }
  const bool one_kind = num_kinds == 1, sums = std::any_of(kinds.begin(), kinds.end(), [](auto&k) { return k.sum; });
  const auto column_of = [&](int64_t kind, int32_t s) -> int64_t {
    int64_t c = s;
    if (dense && one_kind) return c < C ? c : kNone;
    if (!dense) {
      const auto found = std::lower_bound(slots.begin(), slots.end(), s);
      c = found != slots.end() && *found == s ? found - slots.begin() : C;
    }
    return c < C && gathers[kind * C + c] ? c : kNone;
  };

  if (V > 0 && one_kind && dense && !sums && C > 0 && graphs.num_slots() <= std::min<int64_t>(C, 4) && F < (1 << 30) &&
      graphs.forest()) {
    const auto columns = static_cast<int32_t>(C);
    graphs.num_slots() <= 2 ? plan_trees<2>(graphs, columns) : plan_trees<4>(graphs, columns);
    return;
  }

  // Tasks: the non-empty pairs of level and kind. numbers holds counts before it holds the tasks' numbers, task_of
  // pairs before tasks. Vertices with children are listed, so that loops over those of a vertex are alike: half of the
  // vertices of most graphs are leaves, in no order that a processor could predict.
  if (F * num_kinds > std::numeric_limits<int32_t>::max()) {
    throw std::length_error("weft.vertex: more than 2147483647 pairs of a level and a vertex function");
  }
  std::vector<int32_t> numbers(F * num_kinds), pair_of(one_kind ? 0 : V), inner(V + 1);
  const std::span<const int32_t> task_of = one_kind ? levels : std::span<const int32_t>(pair_of);
  int64_t num_inner = 0;
  for (int64_t v = 0; v < V; ++v) {
    if (!one_kind) pair_of[v] = static_cast<int32_t>(levels[v] * num_kinds + kind_of(v));
    ++numbers[task_of[v]];
    inner[num_inner] = static_cast<int32_t>(v);
    num_inner += levels[v] > 0;
  }
  inner.resize(num_inner);
  std::vector<Task> tasks;
  std::vector<int32_t> frontiers(F + 1);
  int32_t row = 0, max_count = 0;
  for (int64_t level = 0; level < F; ++level) {
    frontiers[level] = static_cast<int32_t>(tasks.size());
    for (int64_t kind = 0; kind < num_kinds; ++kind) {
      const int32_t count = numbers[level * num_kinds + kind];
      numbers[level * num_kinds + kind] = static_cast<int32_t>(tasks.size());
      if (count == 0) continue;
      tasks.push_back({static_cast<int32_t>(kind), static_cast<int32_t>(level), row, count, 0, 0, kNone, 0});
      row += count;
      max_count = std::max(max_count, count);
    }
  }
  frontiers[F] = static_cast<int32_t>(tasks.size());
  const int64_t T = frontiers[F];
  for (int32_t& pair : pair_of) pair = numbers[pair];

  // What is read, and by which edge each vertex gets its place: its only one, else the one to the nearest parent, then
  // the lowest slot.
  std::vector<int32_t> place_by, place_level;
  std::vector<char> used;
  int64_t E = 0, U = 0;
  const bool shared = !graphs.forest();
  bool single_use = true;
  if (shared) {
    place_by.assign(V, kNone);
    place_level.resize(V);
    used.resize(V);
  }
  if (!shared && one_kind && dense && graphs.num_slots() <= C && !sums) {
    U = graphs.num_edges();  // as in batches of trees, which shall be quick
  } else {
    for (const int32_t v : inner) {
      const int64_t kind = kind_of(v);
      for (int64_t e = first_child[v]; e < first_child[v + 1]; ++e) {
        const int times = (column_of(kind, slot[e]) != kNone) + kinds[kind].sum;
        U += times - kinds[kind].sum;
        E += kinds[kind].sum;
        single_use &= times <= 1;
        if (!shared) continue;
        const int32_t c = child[e];
        single_use &= used[c] + times <= 1;
        used[c] |= times > 0;
        if (place_by[c] == kNone || levels[v] < place_level[c] ||
            (levels[v] == place_level[c] && slot[e] < slot[place_by[c]])) {
          place_by[c] = static_cast<int32_t>(e);
          place_level[c] = levels[v];
        }
      }
    }
  }

  // The block.
  int32_t header[kHeader] = {};
  header[kVertices] = static_cast<int32_t>(V);
  header[kTasks] = static_cast<int32_t>(T);
  header[kFrontiers] = static_cast<int32_t>(F);
  header[kColumns] = static_cast<int32_t>(C);
  header[kEdges] = static_cast<int32_t>(E);
  header[kUses] = static_cast<int32_t>(U);
  header[kMaxCount] = max_count;
  header[kSingleUse] = single_use;
  header[kSums] = sums;
  make_block(header);
  for (const Array counted : {kFirstUse, kFirstSumUse}) std::ranges::fill(at(counted), 0);
  std::copy(slots.begin(), slots.end(), at(kSlots).begin());
  std::copy(frontiers.begin(), frontiers.end(), at(kFrontierTask).begin());

  const auto gather = at(kGather), first_use = at(kFirstUse);
  std::fill(gather.begin(), gather.end(), kNone);
  // The row reads the child of an edge by a slot; how often each row is read is counted, and by whom if only once.
  std::vector<std::pair<int32_t, int32_t>> reader(shared ? 0 : V);
  const auto reads = [&](int32_t row, int64_t kind, int32_t e, int32_t from) {
    const int64_t c = column_of(kind, slot[e]);
    if (c == kNone) return;
    gather[c * V + row] = from;
    ++first_use[from];
    if (!shared) reader[from] = {row, static_cast<int32_t>(c)};
  };

  // Rows, from the last task to the first, and each task from its end: by the time a task is reached, all of its
  // vertices have been given their rows by parents, which are in later tasks.
  const auto vertex_of = at(kVertexOf);
  std::vector<int32_t> row_of(V);
  std::vector<int32_t> end_of(T);
  for (int64_t t = 0; t < T; ++t) end_of[t] = tasks[t].first + tasks[t].count;
  const auto place = [&](int32_t v) {
    const int32_t r = --end_of[task_of[v]];
    vertex_of[r] = v;
    row_of[v] = r;
    return r;
  };
  for (const int32_t v : graphs.parentless() | std::views::reverse) place(v);
  const auto leads = [&](int32_t e) { return !shared || place_by[child[e]] == e; };
  std::vector<int32_t> by_place, starts;
  std::vector<std::pair<int32_t, int32_t>> begins;
  std::vector<char> gathered(T);  // what the rows of the task read by slots is known
  for (int64_t t = T - 1; t >= 0 && tasks[t].level > 0; --t) {
    const int32_t first = tasks[t].first, last = first + tasks[t].count;
    const int32_t kind = tasks[t].kind;
    if (kinds[kind].slots.empty()) {
      for (int32_t r = last - 1; r >= first; --r) {
        const int32_t v = vertex_of[r];
        for (int32_t e = first_child[v + 1] - 1; e >= first_child[v]; --e) {
          if (leads(e)) place(child[e]);
        }
      }
      continue;
    }
    int32_t most = 0, total = 0;
    begins.clear();
    for (int32_t r = first; r < last; ++r) {
      const int32_t v = vertex_of[r], degree = first_child[v + 1] - first_child[v];
      begins.push_back({first_child[v], degree});
      most = std::max(most, degree);
      total += degree;
    }
    if (most <= 4) {
      gathered[t] = !shared;
      for (int32_t i = most - 1; i >= 0; --i) {
        for (int32_t k = last - first - 1; k >= 0; --k) {
          const int32_t e = begins[k].first + i;
          if (i >= begins[k].second || !leads(e)) continue;
          const int32_t from = place(child[e]);
          if (!shared) reads(first + k, kind, e, from);
        }
      }
      continue;
    }
    // The same order where a vertex may have any number of children: edges sorted by which child they lead to.
    by_place.resize(total);
    starts.assign(most, 0);
    for (int32_t r = first; r < last; ++r) {
      const int32_t v = vertex_of[r];
      for (int32_t i = first_child[v + 1] - first_child[v] - 1; i >= 0; --i) ++starts[i];
    }
    starts_from_counts(starts);
    for (int32_t r = first; r < last; ++r) {
      const int32_t v = vertex_of[r];
      for (int32_t e = first_child[v]; e < first_child[v + 1]; ++e) by_place[starts[e - first_child[v]]++] = e;
    }
    for (int32_t i = total - 1; i >= 0; --i) {
      if (leads(by_place[i])) place(child[by_place[i]]);
    }
  }

  // What each row reads, and by whom it is read: first how often, then where that ends, and where it begins once all
  // are filled in from the last to the first.
  const auto first_edge = at(kFirstEdge), edge_child = at(kEdgeChild), edge_parent = at(kEdgeParent);
  const auto first_sum_use = at(kFirstSumUse);
  int32_t edge = 0, max_edges = 0;
  for (Task& task : tasks) {
    const int64_t kind = task.kind;
    const bool sum = kinds[kind].sum, read = gathered[&task - tasks.data()];
    task.first_edge = edge;
    if (task.level == 0 || (read && !sum)) {
      if (sums) std::fill_n(first_edge.begin() + task.first, task.count, edge);
      continue;
    }
    for (int32_t r = task.first; r < task.first + task.count; ++r) {
      const int32_t v = vertex_of[r];
      if (sums) first_edge[r] = edge;
      for (int64_t e = first_child[v]; e < first_child[v + 1]; ++e) {
        const int32_t from = row_of[child[e]];
        if (!read) reads(r, kind, e, from);
        if (sum) {
          edge_child[edge] = from;
          edge_parent[edge++] = r;
          ++first_sum_use[from];
        }
      }
    }
    task.num_edges = edge - task.first_edge;
    task.edge_run = run_of(edge_child.subspan(task.first_edge, task.num_edges));
    max_edges = std::max(max_edges, task.num_edges);
  }
  if (sums) first_edge[V] = edge;
  block_[kMaxEdges] = max_edges;
  std::copy(tasks.begin(), tasks.end(), reinterpret_cast<Task*>(at(kTaskTable).data()));
  const auto runs = at(kRuns);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t c = 0; c < C; ++c) runs[t * C + c] = run_of(gather.subspan(c * V + tasks[t].first, tasks[t].count));
  }

  const auto users = at(kUsers), sum_use_edge = at(kSumUseEdge);
  if (!shared) {
    int32_t u = 0;
    for (int64_t r = 0; r < V; ++r) {
      const bool used = first_use[r] > 0;
      first_use[r] = u;
      if (used) std::tie(users[2 * u], users[2 * u + 1]) = reader[r], ++u;
    }
    first_use[V] = u;
  } else {
    std::partial_sum(first_use.begin(), first_use.end(), first_use.begin());
    const int32_t leaves = F > 1 ? tasks[frontiers[1]].first : static_cast<int32_t>(V);
    for (int64_t r = V - 1; r >= leaves; --r) {
      for (int64_t c = C - 1; c >= 0; --c) {
        const int32_t from = gather[c * V + r];
        if (from == kNone) continue;
        const int32_t u = --first_use[from];
        users[2 * u] = static_cast<int32_t>(r);
        users[2 * u + 1] = static_cast<int32_t>(c);
      }
    }
  }
  if (!sums) return;
  std::partial_sum(first_sum_use.begin(), first_sum_use.end(), first_sum_use.begin());
  for (int32_t e = edge - 1; e >= 0; --e) sum_use_edge[--first_sum_use[edge_child[e]]] = e;
}

std::pair<int64_t, int64_t> first_beyond(const Graphs& graphs, std::span<const int64_t> limits) {
  if (limits.empty() || graphs.num_slots() <= *std::min_element(limits.begin(), limits.end())) return {-1, -1};
  const auto first_edge = graphs.first_edge(), slot = graphs.slot(), types = graphs.types();
  for (int64_t v = 0; v < graphs.num_vertices(); ++v) {
    if (first_edge[v] == first_edge[v + 1]) continue;
    const int64_t highest = slot[first_edge[v + 1] - 1];
    if (highest >= limits[limits.size() == 1 ? 0 : types[v]]) return {v, highest};
  }
  return {-1, -1};
}

}  // namespace weft::vertex
