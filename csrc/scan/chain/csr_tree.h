// The tree of a chain of CSR Jacobians: patterns and planned products of every node, and the backward pass along it.
//
// patterns[level]  of its nodes, [crow, col], or [] for the whole diagonal; the last node of a level above the leaves
// is
//                  never formed and not there
// plans[level]     of the products that make level + 1, as weft::csr_matmul takes them (sparse/csr_matmul.h)
//
// Made of registered ops: gradients of any order, both devices, nothing waits for the device.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace weft::scan {

class CsrTree {
 public:
  using Tensors = std::vector<at::Tensor>;
  using OfLevels = std::vector<std::vector<Tensors>>;

  CsrTree(OfLevels patterns, OfLevels plans) : patterns_(std::move(patterns)), plans_(std::move(plans)) {}

  // grad (B, n_0); values of the leaves, (nnz,) or (B, nnz), last layer first, all of one dtype. The gradients that
  // leave each leaf. `transposed` has [crow, col, index] of every node's transposed pattern, ordered as the patterns,
  // and is empty where no gradient is wanted.
  Tensors backward(const at::Tensor& grad, const Tensors& values, const OfLevels& transposed) const;

  const OfLevels& patterns() const { return patterns_; }
  const OfLevels& plans() const { return plans_; }

 private:
  OfLevels patterns_, plans_;
};

}  // namespace weft::scan
