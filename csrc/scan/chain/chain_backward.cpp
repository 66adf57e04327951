// chain_backward, of ATen operations only, so that autograd, fake tensors and every device follow from them.
//
// A product of Jacobians may cancel where product-with-vector does not: with eigenvalues 2 and 1/2, forty factors turn
// a gradient on the decaying direction into the difference of two numbers 2^80 times its size. No precision is enough
// for every chain, and without asking the host the device cannot leave out work it turns out not to need. So the tree
// is always held against the linear products, and gradients on which the two differ are the linear ones.
#include "scan/chain/chain_backward.h"

#include <ATen/Context.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/le.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "common/check.h"
#include "scan/chain/tree.h"
#include "scan/linear/linear_scan.h"

namespace weft::scan {
namespace {

constexpr const char* kChain = "chain_backward";

void check_chain(const at::Tensor& grad, at::TensorList jacobians, int64_t levels) {
  check_floating(kChain, "grad", grad);
  TORCH_CHECK_VALUE(grad.dim() == 1 || grad.dim() == 2, kChain, ": grad must be (B, n), or (n) without a batch, got ",
                    grad.sym_sizes());
  const bool batched = grad.dim() == 2;
  TORCH_CHECK_VALUE(levels >= -1, kChain, ": levels must be -1 (auto), 0 (linear) or a number of up-sweep levels, got ",
                    levels);
  auto length = grad.sym_size(-1);
  for (size_t k = 0; k < jacobians.size(); ++k) {
    const at::Tensor& J = jacobians[k];
    const std::string name = "jacobians[" + std::to_string(k) + "]";
    TORCH_CHECK_TYPE(J.layout() == at::kStrided, kChain, ": ", name,
                     " must be dense (weft.scan.chain_backward also takes torch.sparse_csr), got ", J.layout());
    check_like(kChain, name.c_str(), J, "grad", grad);
    TORCH_CHECK_VALUE(J.dim() == 2 || (batched && J.dim() == 3), kChain, ": ", name,
                      batched ? " must be (B, n_in, n_out), or (n_in, n_out) shared by the batch, got "
                              : " must be (n_in, n_out) where grad has no batch, got ",
                      J.sym_sizes());
    TORCH_CHECK_VALUE(J.dim() == 2 || J.sym_size(0) == grad.sym_size(0), kChain, ": ", name,
                      " must have grad's batch, ", grad.sym_size(0), ", got ", J.sym_sizes());
    TORCH_CHECK_VALUE(J.sym_size(-1) == length, kChain, ": ", name, " does not chain: its last dimension must be ",
                      length, ", the length of the gradient that reaches it, got ", J.sym_sizes());
    length = J.sym_size(-2);
  }
}

// Normalised columns reach up to 2^top, so that sums of 2^15 products of two of them are still in range, and as much as
// possible lies between the largest and the smallest number that are kept.
int64_t top(const at::Tensor& t) {
  return t.scalar_type() == at::kDouble ? 500 : 56;
}

constexpr int64_t kNever = -(1 << 20);  // the exponent of a zero: below every sum of real ones

// The exponents of frexp; kNever where there is none.
at::Tensor exponents(const at::Tensor& t) {
  const at::Tensor usable = t.ne(0).logical_and(t.abs().lt(std::numeric_limits<double>::infinity()));
  return at::where(usable, std::get<1>(at::frexp(t)), kNever);
}

// 2^e, exactly, for e within the exponents of the dtype: made from bits.
at::Tensor power_of_two(const at::Tensor& e, at::ScalarType dtype) {
  if (dtype == at::kDouble) return e.to(at::kLong).add(1023).bitwise_left_shift(52).view(at::kDouble);
  return e.to(at::kInt).add(127).bitwise_left_shift(23).view(at::kFloat);
}

// t * 2^e for any e: three factors span the whole range of the dtype twice over, so what saturates is 0 or inf anyway.
at::Tensor scale(at::Tensor t, at::Tensor e) {
  const int64_t high = t.scalar_type() == at::kDouble ? 1023 : 127, low = 1 - high;
  for (int i = 0; i < 3; ++i) {
    const at::Tensor part = e.clamp(low, high);
    t = t.mul(power_of_two(part, t.scalar_type()));
    e = e.sub(part);
  }
  return t;
}

// A Jacobian, or a product of some: matrix (b, rows, columns) times 2^exponent (b, 1, columns), b = B or 1. A Jacobian
// itself has no exponent. A leading dimension, where there is one, counts products that are computed together.
struct Node {
  at::Tensor matrix, exponent;
};

// Columns with their largest entry just below 2^top.
Node normalise(const Node& node) {
  const at::Tensor e = exponents(node.matrix).amax(-2, /*keepdim=*/true).clamp_min(kNever / 2).sub(top(node.matrix));
  return {scale(node.matrix, e.neg()), node.exponent.defined() ? node.exponent.add(e) : e};
}

// later <> earlier, the product later * earlier. Row r of `earlier` meets column r of `later` and takes its exponent.
Node compose(const Node& later, const Node& earlier) {
  const at::Tensor rows = later.exponent.transpose(-1, -2);
  const at::Tensor largest = exponents(earlier.matrix).add(rows).amax(-2, true).clamp_min(kNever);
  const at::Tensor shift = rows.sub(largest).add(top(later.matrix));
  const at::Tensor exponent = earlier.exponent.add(largest).sub(top(later.matrix));
  return normalise({at::matmul(later.matrix, scale(earlier.matrix, shift)), exponent});
}

// node * x for x (B, columns, 1)
at::Tensor apply(const Node& node, const at::Tensor& x) {
  if (!node.exponent.defined()) return at::matmul(node.matrix, x);
  const at::Tensor columns = node.exponent.transpose(-1, -2);
  const at::Tensor largest = exponents(x).add(columns).amax(-2, true).clamp_min(kNever);
  const at::Tensor scaled = scale(x, columns.sub(largest).add(top(x)));
  return scale(at::matmul(node.matrix, scaled), largest.sub(top(x)));
}

bool same_kind(const Node& a, const Node& b) {
  return a.exponent.defined() == b.exponent.defined() && a.matrix.sym_sizes() == b.matrix.sym_sizes();
}

Node stack(const std::vector<Node>& nodes, const std::vector<size_t>& which) {
  std::vector<at::Tensor> matrices, exponents;
  for (size_t i : which) {
    matrices.push_back(nodes[i].matrix);
    if (nodes[i].exponent.defined()) exponents.push_back(nodes[i].exponent);
  }
  return {at::stack(matrices), exponents.empty() ? at::Tensor() : at::stack(exponents)};
}

// Positions grouped by `same`, each group in order.
template <typename Same>
std::vector<std::vector<size_t>> group(size_t count, Same same) {
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < count; ++i) {
    auto found = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return same(g.front(), i); });
    if (found == groups.end()) {
      groups.push_back({i});
    } else {
      found->push_back(i);
    }
  }
  return groups;
}

// One level of the tree has many independent products; those of equal shapes become one batched product.
std::vector<Node> compose_all(const std::vector<Node>& later, const std::vector<Node>& earlier) {
  std::vector<Node> products(later.size());
  auto same = [&](size_t i, size_t j) { return same_kind(later[i], later[j]) && same_kind(earlier[i], earlier[j]); };
  for (const auto& members : group(later.size(), same)) {
    const Node product = compose(stack(later, members), stack(earlier, members));
    const auto matrices = product.matrix.unbind(), exponents = product.exponent.unbind();
    for (size_t i = 0; i < members.size(); ++i) products[members[i]] = {matrices[i], exponents[i]};
  }
  return products;
}

std::vector<at::Tensor> apply_all(const std::vector<Node>& nodes, const std::vector<at::Tensor>& x) {
  std::vector<at::Tensor> results(nodes.size());
  for (const auto& members : group(nodes.size(), [&](size_t i, size_t j) { return same_kind(nodes[i], nodes[j]); })) {
    if (members.size() == 1) {
      results[members[0]] = apply(nodes[members[0]], x[members[0]]);
      continue;
    }
    std::vector<at::Tensor> vectors;
    for (size_t i : members) vectors.push_back(x[i]);
    const auto unbound = apply(stack(nodes, members), at::stack(vectors)).unbind();
    for (size_t i = 0; i < members.size(); ++i) results[members[i]] = unbound[i];
  }
  return results;
}

// What the tree is made of here. Vectors are columns (B, n, 1).
struct DenseNodes {
  using Node = scan::Node;
  using Vector = at::Tensor;

  std::vector<Node> compose(size_t, std::vector<Node> later, std::vector<Node> earlier) const {
    for (auto* nodes : {&later, &earlier}) {
      for (Node& node : *nodes) {
        if (!node.exponent.defined()) node = normalise(node);
      }
    }
    return compose_all(later, earlier);
  }
  std::vector<Vector> apply(const std::vector<Node>& nodes, const std::vector<Vector>& x) const {
    return apply_all(nodes, x);
  }
  std::vector<Vector> apply_in_turn(const std::vector<Node>& nodes, Vector x) const {
    std::vector<Vector> results;
    for (const Node& node : nodes) results.push_back(x = scan::apply(node, x));
    return results;
  }
};

// From this many Jacobians of one square shape on, and up to this size, stacking them for linear_scan costs less than
// the calls of one product after the other.
constexpr size_t kStackMinCount = 4;
constexpr int64_t kStackMaxSize = 128;

bool can_stack(at::TensorList jacobians) {
  if (jacobians.size() < kStackMinCount) return false;
  const at::Tensor& J = jacobians[0];
  if (J.sym_size(-1) != J.sym_size(-2) || J.sym_size(-1) > kStackMaxSize) return false;
  return std::all_of(jacobians.begin(), jacobians.end(),
                     [&](const at::Tensor& other) { return other.sym_sizes() == J.sym_sizes(); });
}

// x[k] = J_k x[k-1] + 0
std::vector<at::Tensor> by_linear_scan(const at::Tensor& grad, at::TensorList jacobians) {
  at::Tensor A = at::stack(jacobians);
  if (A.dim() == 3) A = A.unsqueeze(1);
  const at::Tensor b = at::zeros_symint({1, 1, grad.sym_size(1)}, grad.options())
                           .expand_symint({int64_t(jacobians.size()), grad.sym_size(0), grad.sym_size(1)});
  return linear_scan_op(A, b, grad, false, false, false).unbind();
}

// Half precision is computed in float.
at::ScalarType accumulate(const at::Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::vector<at::Tensor> step_by_step(const at::Tensor& grad, at::TensorList jacobians) {
  std::vector<at::Tensor> gradients;
  at::Tensor g = grad.to(accumulate(grad)).unsqueeze(-1);
  for (const at::Tensor& J : jacobians) {
    g = at::matmul(J.to(g.scalar_type()), g);
    gradients.push_back(g.squeeze(-1).to(grad.scalar_type()));
  }
  return gradients;
}

std::vector<at::Tensor> by_tree_of(const at::Tensor& grad, at::TensorList jacobians, int64_t levels) {
  std::vector<Node> leaves;
  for (const at::Tensor& J : jacobians) {
    leaves.push_back({(J.dim() == 2 ? J.unsqueeze(0) : J).detach().to(accumulate(grad)), at::Tensor()});
  }
  DenseNodes kind;
  auto gradients = scan_tree(kind, std::move(leaves), grad.detach().to(accumulate(grad)).unsqueeze(-1), levels);
  for (at::Tensor& g : gradients) g = g.squeeze(-1).to(grad.scalar_type());
  return gradients;
}

// How far, in units of the dtype's epsilon, the two may differ in any element of a gradient that is the tree's.
constexpr double kUnits = 4;

// The tree's value where it is the linear one up to rounding. The derivative is that of the linear products, because
// going back through the tree would multiply the same Jacobians, and cancel on other vectors.
at::Tensor agreed(const at::Tensor& tree, const at::Tensor& linear) {
  const int digits = linear.scalar_type() == at::kDouble     ? 52
                     : linear.scalar_type() == at::kFloat    ? 23
                     : linear.scalar_type() == at::kBFloat16 ? 7
                                                             : 10;
  const at::Tensor value = linear.detach(), difference = tree.sub(value);
  const at::Tensor close = difference.abs().le(value.abs().mul(std::ldexp(kUnits, -digits))).all(-1, true);
  return linear.add(at::where(close, difference, 0));
}

}  // namespace

std::vector<at::Tensor> chain_backward(const at::Tensor& grad, at::TensorList jacobians, int64_t levels) {
  check_chain(grad, jacobians, levels);
  if (jacobians.empty()) return {};
  if (grad.dim() == 1) {
    auto gradients = chain_backward(grad.unsqueeze(0), jacobians, levels);
    for (at::Tensor& g : gradients) g = g.squeeze(0);
    return gradients;
  }
  const at::NoTF32Guard no_tf32;
  if (levels == 0) return step_by_step(grad, jacobians);
  auto gradients = can_stack(jacobians) ? by_linear_scan(grad, jacobians) : step_by_step(grad, jacobians);
  // Columns of no entries have no largest one to scale by, and no number to save.
  const bool empty =
      std::any_of(jacobians.begin(), jacobians.end(), [](const at::Tensor& J) { return J.sym_numel() == 0; });
  if (levels == -1 || empty) return gradients;
  const auto tree = by_tree_of(grad, jacobians, levels);
  for (size_t k = 0; k < gradients.size(); ++k) gradients[k] = agreed(tree[k], gradients[k]);
  return gradients;
}

// Under vmap every schedule is linear, with the same numbers: making powers of two from bits has no batching rule.
std::vector<at::Tensor> chain_backward_mapped(const at::Tensor& grad, at::TensorList jacobians, int64_t levels) {
  return chain_backward(grad, jacobians, std::min<int64_t>(levels, 0));
}

TORCH_LIBRARY_IMPL(weft, CompositeImplicitAutograd, m) {
  m.impl("chain_backward", chain_backward);
}
TORCH_LIBRARY_IMPL(weft, FuncTorchBatchedDecomposition, m) {
  m.impl("chain_backward", chain_backward_mapped);
}

}  // namespace weft::scan
