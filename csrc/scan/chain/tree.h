// One backward pass along a chain of matrix-like nodes, by the modified Blelloch scan (the operator is A <> B = B A):
//
//   x[k] = node[k] x[k-1],  x[-1] = start
//
// `levels` levels of the up-sweep compose neighbours, the nodes that remain are applied one after the other, and the
// down-sweep applies nodes to vectors alone. What the nodes are, a kind says: dense Jacobians (chain_backward.cpp), CSR
// ones with planned products (csr_tree.cpp). Torch-free.
//
// Source: BPPSA, section 3 (Wang, Bai, Pekhimenko, MLSys 2020).
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace weft::scan {

// Level 0 are the leaves. The nodes of one call of compose or apply do not depend on each other.
template <typename K>
concept NodeKind = std::default_initializable<typename K::Node> && std::copyable<typename K::Vector> &&
    requires(K kind, size_t level, const std::vector<typename K::Node>& nodes,
             const std::vector<typename K::Vector>& vectors) {
  // The nodes of level + 1 from those of `level`: later[i] * earlier[i].
  { kind.compose(level, nodes, nodes) } -> std::same_as<std::vector<typename K::Node>>;
  // nodes[i] * vectors[i]
  { kind.apply(nodes, vectors) } -> std::same_as<std::vector<typename K::Vector>>;
  // nodes[0] * vector, nodes[1] * nodes[0] * vector, ...
  { kind.apply_in_turn(nodes, vectors[0]) } -> std::same_as<std::vector<typename K::Vector>>;
};

// x[0], x[1], ...: as many as leaves. More levels than the tree has: the whole scan.
template <NodeKind K>
std::vector<typename K::Vector> scan_tree(K& kind, std::vector<typename K::Node> leaves, typename K::Vector start,
                                          int64_t levels) {
  using Node = typename K::Node;
  using Vector = typename K::Vector;
  if (leaves.empty()) return {};
  if (levels <= 0 || leaves.size() == 1) return kind.apply_in_turn(leaves, start);
  // Up-sweep. The last node of a level leads to nothing that lies after it: its product is never formed.
  std::vector<std::vector<Node>> tree = {std::move(leaves)};
  for (int64_t level = 0; level < levels && tree.back().size() > 1; ++level) {
    const auto& below = tree.back();
    std::vector<Node> later, earlier;
    for (size_t i = 0; i + 2 < below.size(); i += 2) {
      earlier.push_back(below[i]);
      later.push_back(below[i + 1]);
    }
    std::vector<Node> nodes = kind.compose(size_t(level), later, earlier);
    nodes.emplace_back();
    tree.push_back(std::move(nodes));
  }
  // The middle: the vector that enters each node of the top level.
  std::vector<Vector> entering = {start};
  tree.back().pop_back();
  for (Vector& x : kind.apply_in_turn(tree.back(), start)) entering.push_back(std::move(x));
  tree.pop_back();
  // Down-sweep: a left child receives what its parent does, a right child what leaves its sibling.
  const Node last = tree.front().back();
  for (; !tree.empty(); tree.pop_back()) {
    const auto& nodes = tree.back();
    std::vector<Node> left;
    for (size_t i = 0; i + 1 < nodes.size(); i += 2) left.push_back(nodes[i]);
    const auto leaving = kind.apply(left, {entering.begin(), entering.begin() + int64_t(left.size())});
    std::vector<Vector> below;
    for (size_t i = 0; i < nodes.size(); ++i) below.push_back(i % 2 ? leaving[i / 2] : entering[i / 2]);
    entering = std::move(below);
  }
  entering.push_back(kind.apply({last}, {entering.back()})[0]);
  entering.erase(entering.begin());
  return entering;
}

}  // namespace weft::scan
