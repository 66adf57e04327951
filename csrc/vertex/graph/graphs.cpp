#include "vertex/graph/graphs.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace weft::vertex {

namespace {

constexpr int32_t kGraphsMagic = 0x57470001;  // "WG", version 1; also tells byte orders apart
constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();

template <typename T>
int32_t* append(int32_t* out, const T& values) {
  return std::copy(values.begin(), values.end(), out);
}

int32_t* append_shifted(int32_t* out, std::span<const int32_t> values, int32_t shift) {
  return std::transform(values.begin(), values.end(), out, [=](int32_t value) { return value + shift; });
}

}  // namespace

Graphs::Graphs() : Graphs(0, 0, 0, false) {
  data_[kHeader] = data_[kHeader + 1] = 0;  // the ends of ptr and first_edge
}

Graphs::Graphs(int64_t graphs, int64_t vertices, int64_t edges, bool typed)
    : length_(kHeader + graphs + 2 + (typed ? 3 : 2) * vertices + 2 * edges),
      data_(std::make_unique_for_overwrite<int32_t[]>(length_)) {
  std::fill_n(data_.get(), static_cast<int>(kHeader), 0);
  data_[kMagic] = kGraphsMagic;
  data_[kNumGraphs] = static_cast<int32_t>(graphs);
  data_[kNumVertices] = static_cast<int32_t>(vertices);
  data_[kNumEdges] = static_cast<int32_t>(edges);
  data_[kTyped] = typed;
}

void Graphs::derive() {
  const auto levels = this->levels(), slot = this->slot();
  data_[kNumLevels] = levels.empty() ? 0 : 1 + *std::max_element(levels.begin(), levels.end());
  data_[kNumSlots] = slot.empty() ? 0 : 1 + *std::max_element(slot.begin(), slot.end());
  level_sizes_.assign(num_levels(), 0);
  for (const int32_t level : levels) ++level_sizes_[level];
  std::vector<char> has_parent(num_vertices());
  for (const int32_t c : child()) {
    forest_ = forest_ && !has_parent[c];
    has_parent[c] = 1;
  }
  for (int64_t v = 0; v < num_vertices(); ++v) {
    if (!has_parent[v]) parentless_.push_back(static_cast<int32_t>(v));
  }
}

void Graphs::write_ptr(int64_t* out) const {
  std::copy(ptr().begin(), ptr().end(), out);
}

void Graphs::write_graph_index(int64_t* out) const {
  const auto ptr = this->ptr();
  for (int64_t g = 0; g < num_graphs(); ++g) std::fill(out + ptr[g], out + ptr[g + 1], g);
}

void Graphs::write_edges(int64_t* out) const {
  const auto first_edge = this->first_edge(), child = this->child(), slot = this->slot();
  for (int64_t v = 0; v < num_vertices(); ++v) {
    for (int64_t e = first_edge[v]; e < first_edge[v + 1]; ++e) {
      *out++ = child[e];
      *out++ = v;
      *out++ = slot[e];
    }
  }
}

void Graphs::write_levels(int64_t* out) const {
  std::copy(levels().begin(), levels().end(), out);
}

void Graphs::write_roots(int64_t* out) const {
  const auto ptr = this->ptr();
  auto root = parentless_.begin();
  for (int64_t g = 0; g < num_graphs(); ++g) {
    while (root + 1 != parentless_.end() && root[1] < ptr[g + 1]) ++root;
    out[g] = *root++;
  }
}

int64_t Graphs::graph_of(int64_t vertex) const {
  const auto ptr = this->ptr();
  return std::upper_bound(ptr.begin(), ptr.end(), vertex) - ptr.begin() - 1;
}

Graphs Graphs::with_types(std::span<const int32_t> types) const {
  Graphs result(num_graphs(), num_vertices(), num_edges(), true);
  const auto untyped = part(0, num_graphs() + 2 + 2 * num_vertices() + 2 * num_edges());
  std::copy(untyped.begin(), untyped.end(), result.mutable_part(result.part(0, 0)));
  std::copy(types.begin(), types.end(), result.mutable_part(result.types()));
  result.data_[kNumLevels] = data_[kNumLevels];
  result.data_[kNumSlots] = data_[kNumSlots];
  result.parentless_ = parentless_;
  result.level_sizes_ = level_sizes_;
  result.forest_ = forest_;
  return result;
}

Graphs Graphs::slice(int64_t first, int64_t count, int64_t step) const {
  const auto ptr = this->ptr(), first_edge = this->first_edge();
  int64_t vertices = 0, edges = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t g = first + i * step;
    vertices += ptr[g + 1] - ptr[g];
    edges += first_edge[ptr[g + 1]] - first_edge[ptr[g]];
  }
  Graphs result(count, vertices, edges, data_[kTyped] != 0);
  int32_t* to_ptr = result.mutable_part(result.ptr());
  int32_t* to_first_edge = result.mutable_part(result.first_edge());
  int32_t* to_child = result.mutable_part(result.child());
  int32_t* to_slot = result.mutable_part(result.slot());
  int32_t* to_levels = result.mutable_part(result.levels());
  int32_t* to_types = result.mutable_part(result.types());
  int32_t v = 0, e = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t g = first + i * step;
    const int64_t v0 = ptr[g], n = ptr[g + 1] - v0;
    const int64_t e0 = first_edge[v0], m = first_edge[v0 + n] - e0;
    *to_ptr++ = v;
    to_first_edge = append_shifted(to_first_edge, first_edge.subspan(v0, n), static_cast<int32_t>(e - e0));
    to_child = append_shifted(to_child, child().subspan(e0, m), static_cast<int32_t>(v - v0));
    to_slot = append(to_slot, slot().subspan(e0, m));
    to_levels = append(to_levels, levels().subspan(v0, n));
    if (data_[kTyped]) to_types = append(to_types, types().subspan(v0, n));
    v += static_cast<int32_t>(n);
    e += static_cast<int32_t>(m);
  }
  *to_ptr = v;
  *to_first_edge = e;
  result.derive();
  return result;
}

Graphs Graphs::renamed_types(std::span<const int32_t> names) const {
  std::vector<int32_t> renamed(types().begin(), types().end());
  for (int32_t& type : renamed) type = names[type];
  return with_types(renamed);
}

Graphs Graphs::batch(std::span<const Graphs* const> parts, bool typed) {
  int64_t graphs = 0, vertices = 0, edges = 0, parentless = 0;
  int32_t num_levels = 0, num_slots = 0;
  for (const Graphs* part : parts) {
    graphs += part->num_graphs();
    vertices += part->num_vertices();
    edges += part->num_edges();
    parentless += static_cast<int64_t>(part->parentless_.size());
    num_levels = std::max(num_levels, part->data_[kNumLevels]);
    num_slots = std::max(num_slots, part->data_[kNumSlots]);
  }
  if (vertices > kLimit || edges > kLimit) {
    throw std::invalid_argument("Graphs.batch: more than 2147483647 vertices or edges in one batch");
  }
  Graphs result(graphs, vertices, edges, typed);
  result.data_[kNumLevels] = num_levels;
  result.data_[kNumSlots] = num_slots;
  int32_t* to_ptr = result.mutable_part(result.ptr());
  int32_t* to_first_edge = result.mutable_part(result.first_edge());
  int32_t* to_child = result.mutable_part(result.child());
  int32_t* to_slot = result.mutable_part(result.slot());
  int32_t* to_levels = result.mutable_part(result.levels());
  int32_t* to_types = result.mutable_part(result.types());
  result.parentless_.resize(parentless);
  result.level_sizes_.assign(num_levels, 0);
  int32_t* to_parentless = result.parentless_.data();
  int32_t v = 0, e = 0;
  for (const Graphs* pointer : parts) {
    const Graphs& part = *pointer;
    // Without the last entry, which is the next part's first.
    to_ptr = append_shifted(to_ptr, part.ptr().first(part.num_graphs()), v);
    to_first_edge = append_shifted(to_first_edge, part.first_edge().first(part.num_vertices()), e);
    to_child = append_shifted(to_child, part.child(), v);
    to_slot = append(to_slot, part.slot());
    to_levels = append(to_levels, part.levels());
    if (typed) to_types = append(to_types, part.types());
    to_parentless = append_shifted(to_parentless, part.parentless_, v);
    for (size_t level = 0; level < part.level_sizes_.size(); ++level) {
      result.level_sizes_[level] += part.level_sizes_[level];
    }
    result.forest_ = result.forest_ && part.forest_;
    v += static_cast<int32_t>(part.num_vertices());
    e += static_cast<int32_t>(part.num_edges());
  }
  *to_ptr = v;
  *to_first_edge = e;
  return result;
}

bool Graphs::operator==(const Graphs& other) const {
  return std::ranges::equal(block(), other.block());
}

Graphs Graphs::from_block(std::span<const int32_t> block) {
  const auto require = [](bool condition) {
    if (!condition) throw std::invalid_argument("Graphs: the serialised form is damaged");
  };
  require(block.size() >= kHeader && block[kMagic] == kGraphsMagic);
  const int64_t graphs = block[kNumGraphs], vertices = block[kNumVertices], edges = block[kNumEdges];
  require(graphs >= 0 && vertices >= 0 && edges >= 0 && (block[kTyped] == 0 || block[kTyped] == 1));
  const int64_t per_vertex = 2 + block[kTyped];
  require(static_cast<int64_t>(block.size()) == kHeader + graphs + 2 + per_vertex * vertices + 2 * edges);
  Graphs result(graphs, vertices, edges, block[kTyped] != 0);
  std::copy(block.begin(), block.end(), result.data_.get());

  const auto ptr = result.ptr(), first_edge = result.first_edge(), child = result.child(), slot = result.slot();
  const auto levels = result.levels();
  require(ptr[0] == 0 && ptr[graphs] == vertices && first_edge[0] == 0 && first_edge[vertices] == edges);
  for (int64_t g = 0; g < graphs; ++g) require(ptr[g] < ptr[g + 1]);
  for (int64_t v = 0; v < vertices; ++v) require(first_edge[v] <= first_edge[v + 1]);
  for (int64_t g = 0; g < graphs; ++g) {
    for (int64_t v = ptr[g]; v < ptr[g + 1]; ++v) {
      int32_t level = 0;
      for (int64_t e = first_edge[v]; e < first_edge[v + 1]; ++e) {
        require(ptr[g] <= child[e] && child[e] < ptr[g + 1]);
        require(slot[e] > (e == first_edge[v] ? -1 : slot[e - 1]));
        require(levels[child[e]] < kLimit);
        level = std::max(level, levels[child[e]] + 1);
      }
      // Levels that rise along every edge are only possible without cycles.
      require(levels[v] == level);
    }
  }
  for (const int32_t type : result.types()) require(type >= 0);
  result.derive();
  require(std::equal(block.begin(), block.begin() + kHeader, result.data_.get()));
  return result;
}

std::string GraphsBuilder::where(int64_t graph, int64_t vertex) const {
  std::string text = op_ + ": graph " + std::to_string(graph);
  if (vertex >= 0) text += ", vertex " + std::to_string(vertex);
  return text + ": ";
}

void GraphsBuilder::fail(int64_t vertex, const std::string& what) const {
  throw std::invalid_argument(where(static_cast<int64_t>(ptr_.size()) - 1, vertex) + what);
}

void GraphsBuilder::out_of_range(int64_t vertex, const char* kind, int64_t value) const {
  fail(vertex, std::string(kind) + " " + std::to_string(value) + " is out of range for " + std::to_string(vertices_) +
                   " vertices");
}

int64_t GraphsBuilder::begin(int64_t num_vertices) {
  vertices_ = num_vertices;
  if (num_vertices <= 0) {
    fail(-1, num_vertices == 0
                 ? "a graph needs at least one vertex; there is one entry per graph, also where there is one graph"
                 : "the number of vertices is negative, " + std::to_string(num_vertices));
  }
  const int64_t first = ptr_.back();
  if (num_vertices > kLimit - first) fail(-1, "more than 2147483647 vertices in one batch");
  return first;
}

void GraphsBuilder::add_children(std::span<const int64_t> values, std::span<const int64_t> rows) {
  const int64_t n = static_cast<int64_t>(rows.size()) - 1, first = begin(n);
  for (int64_t v = 0; v < n; ++v) {
    for (int64_t i = rows[v]; i < rows[v + 1]; ++i) {
      const int64_t c = values[i];
      if (c == -1) continue;
      if (c < 0 || c >= n) out_of_range(v, "child", c);
      if (i - rows[v] >= kLimit) fail(v, "more than 2147483647 slots");
      child_.push_back(static_cast<int32_t>(first + c));
      slot_.push_back(static_cast<int32_t>(i - rows[v]));
    }
    first_edge_.push_back(static_cast<int32_t>(child_.size()));
  }
  find_levels(first);
}

void GraphsBuilder::add_parents(std::span<const int64_t> parents) {
  const int64_t n = static_cast<int64_t>(parents.size());
  begin(n);
  edges_.clear();
  scratch_.assign(n, 0);
  for (int64_t v = 0; v < n; ++v) {
    const int64_t p = parents[v];
    if (p == -1) continue;
    if (p < 0 || p >= n) out_of_range(v, "parent", p);
    edges_.push_back({static_cast<int32_t>(v), static_cast<int32_t>(p), scratch_[p]++});
  }
  add_sorted_by_parent();
}

void GraphsBuilder::add_parents(std::span<const int64_t> parents, std::span<const int64_t> slots) {
  const int64_t n = static_cast<int64_t>(parents.size());
  begin(n);
  if (slots.size() != parents.size()) {
    fail(-1, "slots has " + std::to_string(slots.size()) + " entries for " + std::to_string(n) + " vertices");
  }
  edges_.clear();
  for (int64_t v = 0; v < n; ++v) {
    const int64_t p = parents[v];
    if (p == -1) continue;
    if (p < 0 || p >= n) out_of_range(v, "parent", p);
    if (slots[v] < 0) fail(v, "slot " + std::to_string(slots[v]) + " is negative");
    if (slots[v] >= kLimit) fail(v, "slot " + std::to_string(slots[v]) + " is too large");
    edges_.push_back({static_cast<int32_t>(v), static_cast<int32_t>(p), static_cast<int32_t>(slots[v])});
  }
  add_sorted_by_parent();
}

void GraphsBuilder::add_edges(std::span<const int64_t> rows, int columns, int64_t num_vertices) {
  begin(num_vertices);
  edges_.clear();
  if (columns == 2) scratch_.assign(num_vertices, 0);
  for (size_t i = 0; i < rows.size(); i += columns) {
    const int64_t c = rows[i], p = rows[i + 1];
    if (p < 0 || p >= num_vertices) {
      if (c < 0 || c >= num_vertices) {
        fail(-1, "edge " + std::to_string(i / columns) + ": child " + std::to_string(c) + " and parent " +
                     std::to_string(p) + " are out of range for " + std::to_string(num_vertices) + " vertices");
      }
      out_of_range(c, "parent", p);
    }
    if (c < 0 || c >= num_vertices) out_of_range(p, "child", c);
    if (columns == 2) {
      edges_.push_back({static_cast<int32_t>(c), static_cast<int32_t>(p), scratch_[p]++});
      continue;
    }
    const int64_t s = rows[i + 2];
    if (s < 0) fail(p, "slot " + std::to_string(s) + " is negative");
    if (s >= kLimit) fail(p, "slot " + std::to_string(s) + " is too large");
    edges_.push_back({static_cast<int32_t>(c), static_cast<int32_t>(p), static_cast<int32_t>(s)});
  }
  add_sorted_by_parent();
}

void GraphsBuilder::add_sorted_by_parent() {
  const int64_t first = ptr_.back(), first_edge = first_edge_.back();
  if (static_cast<int64_t>(edges_.size()) > kLimit - first_edge) fail(-1, "more than 2147483647 edges in one batch");
  // Counts of the parents' edges, then where the next of each goes: a counting sort that keeps the rows' order.
  first_edge_.resize(first + vertices_ + 1);
  scratch_.assign(vertices_ + 1, 0);
  for (const Edge& edge : edges_) ++scratch_[edge.parent + 1];
  for (int64_t v = 0; v < vertices_; ++v) {
    scratch_[v + 1] += scratch_[v];
    first_edge_[first + v + 1] = static_cast<int32_t>(first_edge + scratch_[v + 1]);
  }
  child_.resize(first_edge + edges_.size());
  slot_.resize(first_edge + edges_.size());
  for (const Edge& edge : edges_) {
    const int64_t e = first_edge + scratch_[edge.parent]++;
    child_[e] = static_cast<int32_t>(first + edge.child);
    slot_[e] = edge.slot;
  }
  for (int64_t v = 0; v < vertices_; ++v) {
    const int64_t begin = first_edge_[first + v], end = first_edge_[first + v + 1];
    if (!std::is_sorted(slot_.begin() + begin, slot_.begin() + end)) {
      edges_.clear();
      for (int64_t e = begin; e < end; ++e) edges_.push_back({child_[e], 0, slot_[e]});
      std::sort(edges_.begin(), edges_.end(), [](const Edge& a, const Edge& b) { return a.slot < b.slot; });
      for (int64_t e = begin; e < end; ++e) {
        child_[e] = edges_[e - begin].child;
        slot_[e] = edges_[e - begin].slot;
      }
    }
    for (int64_t e = begin + 1; e < end; ++e) {
      if (slot_[e] == slot_[e - 1]) fail(v, "two children in slot " + std::to_string(slot_[e]));
    }
  }
  find_levels(first);
}

void GraphsBuilder::add_chain(int64_t length, bool reverse) {
  if (length <= 0) fail(-1, "the length must be positive, got " + std::to_string(length));
  const int64_t first = begin(length);
  for (int64_t t = 0; t < length; ++t) {
    const int64_t c = reverse ? t + 1 : t - 1;
    if (0 <= c && c < length) {
      child_.push_back(static_cast<int32_t>(first + c));
      slot_.push_back(0);
    }
    first_edge_.push_back(static_cast<int32_t>(child_.size()));
    levels_.push_back(static_cast<int32_t>(reverse ? length - 1 - t : t));
  }
  ptr_.push_back(static_cast<int32_t>(first + length));
}

void GraphsBuilder::add_pyramid(int64_t length) {
  if (length <= 0) fail(-1, "the length must be positive, got " + std::to_string(length));
  if (length > 65535) fail(-1, "more than 2147483647 vertices in one batch");
  const int64_t first = begin(length * (length + 1) / 2);
  if (length * (length - 1) > kLimit - first_edge_.back()) fail(-1, "more than 2147483647 edges in one batch");
  int64_t below = first;
  for (int64_t width = length; width > 0; --width) {
    const int64_t level = length - width;
    for (int64_t i = 0; i < width; ++i) {
      if (level > 0) {
        for (int32_t slot = 0; slot < 2; ++slot) {
          child_.push_back(static_cast<int32_t>(below + i + slot));
          slot_.push_back(slot);
        }
      }
      first_edge_.push_back(static_cast<int32_t>(child_.size()));
      levels_.push_back(static_cast<int32_t>(level));
    }
    if (level > 0) below += width + 1;
  }
  ptr_.push_back(static_cast<int32_t>(first + vertices_));
}

void GraphsBuilder::find_levels(int64_t first) {
  const int64_t last = first + vertices_;
  if (static_cast<int64_t>(child_.size()) > kLimit) fail(-1, "more than 2147483647 edges in one batch");
  levels_.resize(last);
  bool rising = true, falling = true;
  for (int64_t v = first; v < last; ++v) {
    for (int64_t e = first_edge_[v]; e < first_edge_[v + 1]; ++e) {
      rising &= child_[e] < v;
      falling &= child_[e] > v;
    }
  }
  const auto settle = [&](int64_t v) {
    int32_t level = 0;
    for (int64_t e = first_edge_[v]; e < first_edge_[v + 1]; ++e) level = std::max(level, levels_[child_[e]] + 1);
    levels_[v] = level;
  };
  if (rising) {
    for (int64_t v = first; v < last; ++v) settle(v);
  } else if (falling) {
    for (int64_t v = last - 1; v >= first; --v) settle(v);
  } else {
    // From the leaves up: a vertex is settled once all its children are. scratch_ lists each vertex's parents.
    const int64_t first_edge = first_edge_[first], edges = first_edge_[last] - first_edge;
    std::vector<int32_t>& parents = scratch_;
    parents.resize(edges);
    pending_.assign(2 * vertices_ + 1, 0);
    int32_t* const pending = pending_.data();
    int32_t* const next = pending + vertices_;
    for (int64_t e = first_edge; e < first_edge + edges; ++e) ++next[child_[e] - first];
    for (int64_t v = 0, sum = 0; v <= vertices_; ++v) {
      sum += next[v];
      next[v] = static_cast<int32_t>(sum);
    }
    for (int64_t v = vertices_ - 1; v >= 0; --v) {
      pending[v] = first_edge_[first + v + 1] - first_edge_[first + v];
      for (int64_t e = first_edge_[first + v + 1] - 1; e >= first_edge_[first + v]; --e) {
        parents[--next[child_[e] - first]] = static_cast<int32_t>(v);
      }
    }
    queue_.clear();
    for (int64_t v = 0; v < vertices_; ++v) {
      if (pending[v] == 0) queue_.push_back(static_cast<int32_t>(v));
    }
    for (size_t i = 0; i < queue_.size(); ++i) {
      const int64_t v = queue_[i];
      settle(first + v);
      for (int64_t j = next[v]; j < next[v + 1]; ++j) {
        if (--pending[parents[j]] == 0) queue_.push_back(parents[j]);
      }
    }
    if (static_cast<int64_t>(queue_.size()) < vertices_) {
      // Who is left waits for a child who is left: following such children runs into a cycle.
      int64_t v = 0;
      while (pending[v] == 0) ++v;
      while (pending[v] > 0) {
        pending[v] = -1;
        int64_t e = first_edge_[first + v];
        while (pending[child_[e] - first] == 0) ++e;
        v = child_[e] - first;
      }
      // A child that also has this vertex as its child: an edge that runs both ways.
      bool both = false;
      for (int64_t e = first_edge_[first + v]; e < first_edge_[first + v + 1]; ++e) {
        const int64_t c = child_[e];
        both |= c != first + v && std::find(child_.begin() + first_edge_[c], child_.begin() + first_edge_[c + 1],
                                            static_cast<int32_t>(first + v)) != child_.begin() + first_edge_[c + 1];
      }
      fail(v, std::string("lies on a cycle") +
                  (both ? ", as in an undirected graph, whose edges run both ways; keep each edge once, from child to "
                          "parent, or use"
                        : "; vertex functions run on directed acyclic graphs: leave out an edge of it, or use") +
                  " a library for message passing on any graph, such as PyTorch Geometric or DGL");
    }
  }
  ptr_.push_back(static_cast<int32_t>(last));
}

Graphs GraphsBuilder::finish() {
  Graphs result(static_cast<int64_t>(ptr_.size()) - 1, ptr_.back(), static_cast<int64_t>(child_.size()), false);
  append(result.mutable_part(result.ptr()), ptr_);
  append(result.mutable_part(result.first_edge()), first_edge_);
  append(result.mutable_part(result.child()), child_);
  append(result.mutable_part(result.slot()), slot_);
  append(result.mutable_part(result.levels()), levels_);
  result.derive();
  return result;
}

}  // namespace weft::vertex
