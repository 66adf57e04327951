// Batches of directed acyclic graphs, as integers. Free of torch and of Python; what weft.Graphs holds.
//
// The vertices of graph g are ptr[g] .. ptr[g + 1] - 1, in the order the caller gave them. Edges run from child to
// parent and are kept with the parent, sorted by slot. A vertex's level is 0 without children, else 1 + the highest of
// its children's. Indices are 32-bit: a batch has fewer than 2^31 vertices and as many edges.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::vertex {

// Immutable once built. All arrays lie in one block, which is also the serialised form; what else a schedule asks of
// graphs follows from it, and is known of each before they are batched.
class Graphs {
 public:
  Graphs();  // no graphs

  int64_t num_graphs() const { return data_[kNumGraphs]; }
  int64_t num_vertices() const { return data_[kNumVertices]; }
  int64_t num_edges() const { return data_[kNumEdges]; }
  int64_t num_levels() const { return data_[kNumLevels]; }
  int64_t num_slots() const { return data_[kNumSlots]; }  // highest slot in use + 1

  std::span<const int32_t> ptr() const { return part(0, num_graphs() + 1); }
  // The edges to the children of v are first_edge[v] .. first_edge[v + 1] - 1 of child and slot.
  std::span<const int32_t> first_edge() const { return part(num_graphs() + 1, num_vertices() + 1); }
  std::span<const int32_t> child() const { return part(num_graphs() + num_vertices() + 2, num_edges()); }
  std::span<const int32_t> slot() const { return part(num_graphs() + num_vertices() + num_edges() + 2, num_edges()); }
  std::span<const int32_t> levels() const {
    return part(num_graphs() + num_vertices() + 2 * num_edges() + 2, num_vertices());
  }
  // Each vertex's type, an index into a table that the caller keeps; empty where vertices have no types.
  std::span<const int32_t> types() const {
    return part(num_graphs() + 2 * num_vertices() + 2 * num_edges() + 2, data_[kTyped] ? num_vertices() : 0);
  }

  // All vertices that have no parent, ascending.
  std::span<const int32_t> parentless() const { return parentless_; }
  // (num_levels): of how many vertices.
  std::span<const int32_t> level_sizes() const { return level_sizes_; }
  // No vertex is anybody's child twice.
  bool forest() const { return forest_; }

  // The arrays of the public interface, written where the caller has room for them.
  void write_ptr(int64_t* out) const;          // (num_graphs + 1)
  void write_graph_index(int64_t* out) const;  // (num_vertices)
  void write_edges(int64_t* out) const;        // (num_edges, 3): child, parent, slot
  void write_levels(int64_t* out) const;       // (num_vertices)
  void write_roots(int64_t* out) const;        // (num_graphs): the last vertex that has no parent

  int64_t graph_of(int64_t vertex) const;

  Graphs with_types(std::span<const int32_t> types) const;
  // Graph first, first + step, ... (count of them) as a batch. The caller has checked the range.
  Graphs slice(int64_t first, int64_t count, int64_t step) const;
  // The same graphs with type t called names[t].
  Graphs renamed_types(std::span<const int32_t> names) const;
  // One after the other; all that have vertices are typed as the whole is to be.
  static Graphs batch(std::span<const Graphs* const> parts, bool typed);

  // The same graphs with the same numbers for types.
  bool operator==(const Graphs& other) const;

  std::span<const int32_t> block() const { return {data_.get(), length_}; }
  // std::invalid_argument unless the block is one that block() could have given.
  static Graphs from_block(std::span<const int32_t> block);

 private:
  friend class GraphsBuilder;
  enum Header { kMagic, kNumGraphs, kNumVertices, kNumEdges, kNumLevels, kNumSlots, kTyped, kHeader };

  // The arrays are not written.
  Graphs(int64_t graphs, int64_t vertices, int64_t edges, bool typed);
  // What follows from the arrays.
  void derive();
  std::span<const int32_t> part(int64_t first, int64_t count) const {
    return {data_.get() + kHeader + first, static_cast<size_t>(count)};
  }
  int32_t* mutable_part(std::span<const int32_t> part) { return data_.get() + (part.data() - data_.get()); }

  size_t length_;
  std::unique_ptr<int32_t[]> data_;
  std::vector<int32_t> parentless_, level_sizes_;
  bool forest_ = true;
};

// Builds a batch graph by graph. What is wrong with a graph is a std::invalid_argument whose message begins with `op`,
// the number of the graph and, where there is one, the vertex. Indices are local to their graph; -1 means none.
class GraphsBuilder {
 public:
  explicit GraphsBuilder(std::string_view op) : op_(op) {}

  // Row v of children is values[rows[v]] .. values[rows[v + 1] - 1]: the child in slot 0, 1, ...
  void add_children(std::span<const int64_t> values, std::span<const int64_t> rows);
  // Without slots the children of a vertex take 0, 1, ... in the order of their numbers.
  void add_parents(std::span<const int64_t> parents);
  void add_parents(std::span<const int64_t> parents, std::span<const int64_t> slots);
  // Rows of 2 (child, parent) or 3 (and slot). Without slots an edge takes the lowest that no earlier row took.
  void add_edges(std::span<const int64_t> rows, int columns, int64_t num_vertices);
  void add_chain(int64_t length, bool reverse);
  // `length` leaves, one vertex less over each two neighbours (slots 0 and 1), and so on up to one vertex.
  void add_pyramid(int64_t length);

  Graphs finish();

  // "<op>: graph G, vertex V: "; with vertex < 0 the graph alone.
  std::string where(int64_t graph, int64_t vertex = -1) const;

 private:
  // The graph's edges in any order, in edges_; its vertices become known to the batch.
  struct Edge {
    int32_t child, parent, slot;
  };
  int64_t begin(int64_t num_vertices);
  void add_sorted_by_parent();
  void find_levels(int64_t first);
  [[noreturn]] void fail(int64_t vertex, const std::string& what) const;
  [[noreturn]] void out_of_range(int64_t vertex, const char* kind, int64_t value) const;

  std::string op_;
  std::vector<int32_t> ptr_{0}, first_edge_{0}, child_, slot_, levels_;
  std::vector<Edge> edges_;
  std::vector<int32_t> scratch_, pending_, queue_;
  int64_t vertices_ = 0;  // of the graph that is being added
};

}  // namespace weft::vertex
