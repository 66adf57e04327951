// Nodes of the tree that are CSR matrices, and the backward pass along them.
#include "scan/chain/csr_tree.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include "common/autograd.h"
#include "scan/chain/tree.h"
#include "sparse/csr_chain.h"
#include "sparse/csr_matmul.h"
#include "sparse/csr_mm.h"

namespace weft::scan {
namespace {

using Tensors = CsrTree::Tensors;

class CsrNodes {
 public:
  using Vector = at::Tensor;  // (B, n)
  struct Node {
    size_t level = 0, index = 0;
    at::Tensor values;
  };

  CsrNodes(const CsrTree& tree, const CsrTree::OfLevels& transposed) : tree_(tree), transposed_(transposed) {}

  std::vector<Node> compose(size_t level, const std::vector<Node>& later, const std::vector<Node>& earlier) const {
    std::vector<Node> products;
    for (size_t i = 0; i < later.size(); ++i) {
      const Tensors& plan = tree_.plans()[level][i];
      const at::Tensor &x = later[i].values, &y = earlier[i].values;
      at::Tensor values;
      if (needs_grad(y) && !transposed_.empty()) {
        Tensors with_transposed = plan;
        for (const at::Tensor& t : transposed_of(later[i])) with_transposed.push_back(t.to(plan[0].scalar_type()));
        values = sparse::csr_matmul_op(with_transposed, x, y);
      } else {
        values = sparse::csr_matmul_op(plan, x, y);
      }
      products.push_back({level + 1, i, std::move(values)});
    }
    return products;
  }

  std::vector<Vector> apply(const std::vector<Node>& nodes, const std::vector<Vector>& x) const {
    std::vector<Vector> results;
    for (size_t i = 0; i < nodes.size(); ++i) results.push_back(multiply(nodes[i], x[i]));
    return results;
  }

  // On CUDA one kernel where no gradient is wanted.
  std::vector<Vector> apply_in_turn(const std::vector<Node>& nodes, Vector x) const {
    Tensors values;
    for (const Node& node : nodes) values.push_back(node.values);
    if (nodes.empty()) return {};
    if (needs_grad(x, at::TensorList(values))) {
      Tensors results;
      for (const Node& node : nodes) results.push_back(x = multiply(node, x));
      return results;
    }
    bool wide = false, narrow = false;
    for (const Node& node : nodes) {
      const Tensors& pattern = pattern_of(node);
      if (!pattern.empty()) (pattern[0].scalar_type() == at::kLong ? wide : narrow) = true;
    }
    const at::ScalarType index = wide ? at::kLong : at::kInt;
    const at::Tensor none = at::empty({0}, x.options().dtype(index).requires_grad(false));
    Tensors crows, cols;
    for (const Node& node : nodes) {
      const Tensors& pattern = pattern_of(node);
      const auto as_index = [&](const at::Tensor& t) { return wide && narrow ? t.to(index) : t; };
      crows.push_back(pattern.empty() ? none : as_index(pattern[0]));
      cols.push_back(pattern.empty() ? none : as_index(pattern[1]));
    }
    return sparse::csr_chain_op(x, crows, cols, values);
  }

 private:
  const Tensors& pattern_of(const Node& node) const { return tree_.patterns()[node.level][node.index]; }
  const Tensors& transposed_of(const Node& node) const { return transposed_[node.level][node.index]; }

  at::Tensor multiply(const Node& node, const at::Tensor& x) const {
    const Tensors& pattern = pattern_of(node);
    if (pattern.empty()) return at::mul(node.values, x);
    const bool graph = needs_grad(x, node.values) && !transposed_.empty();
    return sparse::csr_mm_op(pattern, graph ? transposed_of(node) : Tensors(), node.values, x.unsqueeze(-1))
        .squeeze(-1);
  }

  const CsrTree& tree_;
  const CsrTree::OfLevels& transposed_;
};

}  // namespace

Tensors CsrTree::backward(const at::Tensor& grad, const Tensors& values, const OfLevels& transposed) const {
  TORCH_CHECK_VALUE(values.size() == patterns_.at(0).size(), "chain_backward: the tree has ", patterns_[0].size(),
                    " Jacobians, got ", values.size());
  CsrNodes kind(*this, transposed);
  std::vector<CsrNodes::Node> leaves;
  for (size_t i = 0; i < values.size(); ++i) leaves.push_back({0, i, values[i]});
  return scan_tree(kind, std::move(leaves), grad, int64_t(plans_.size()));
}

}  // namespace weft::scan
