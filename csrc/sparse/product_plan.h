// A planned product by name. The ops of csr_matmul.h take it as a list of tensors, which fake tensors and compiled
// graphs can hold: of a custom class in its place torch makes a fake object, for which C++'s autograd kernels are left
// out, and gradients are lost.
#pragma once
#include <ATen/core/Tensor.h>

namespace weft::sparse {

struct ProductPlan {
  at::Tensor a_crow, a_col, b_crow, b_col;  // the operands' patterns
  at::Tensor crow, col;                     // the product's
  at::Tensor axpy, accumulate, gather;      // rows, and elements, by the way to compute them
  at::Tensor starts, left, right, shared;   // lists of the gathered ones
  at::Tensor expand, pieces, segments;      // rows that are expanded, and the pieces they are expanded in
  at::Tensor lists;                         // of pieces
  at::Tensor narrow;                        // of b's rows, where these have few columns
  at::Tensor t_crow, t_col, t_index;        // a transposed; undefined where it was not given

  static constexpr size_t kTensors = 18, kWithTransposed = 21;

  // ValueError where the list is none.
  static ProductPlan of(const char* op, at::TensorList list) {
    TORCH_CHECK_VALUE(list.size() == kTensors || list.size() == kWithTransposed, op, ": patterns must be ", kTensors,
                      " or ", kWithTransposed, " tensors, got ", list.size());
    ProductPlan plan;
    at::Tensor* const members[] = {
        &plan.a_crow,     &plan.a_col,    &plan.b_crow, &plan.b_col,  &plan.crow,   &plan.col,    &plan.axpy,
        &plan.accumulate, &plan.gather,   &plan.starts, &plan.left,   &plan.right,  &plan.shared, &plan.expand,
        &plan.pieces,     &plan.segments, &plan.lists,  &plan.narrow, &plan.t_crow, &plan.t_col,  &plan.t_index};
    for (size_t i = 0; i < list.size(); ++i) *members[i] = list[i];
    return plan;
  }
};

}  // namespace weft::sparse
