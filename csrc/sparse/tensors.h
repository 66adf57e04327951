// What the sparse room's ops ask of their tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "common/check.h"
#include "common/tensor.h"
#include "sparse/types.h"

namespace weft::sparse {

inline bool is_wide(const at::Tensor& indices) {
  return indices.scalar_type() == at::kLong;
}

// Index tensors: 1-D, contiguous, all int32 or all int64, on the device of `like`.
inline void check_indices(const char* op, const char* name, at::TensorList indices, const at::Tensor& like) {
  for (const at::Tensor& t : indices) {
    TORCH_CHECK_TYPE(
        (t.scalar_type() == at::kInt || t.scalar_type() == at::kLong) && t.scalar_type() == indices[0].scalar_type(),
        op, ": the indices of ", name, " must be int32 or int64, all the same, got ", t.scalar_type());
    TORCH_CHECK(t.device() == like.device(), op, ": ", name, " must be on the device of the operands, ", like.device(),
                ", got ", t.device());
    TORCH_CHECK_VALUE(t.dim() == 1 && t.is_contiguous(), op, ": the indices of ", name,
                      " must be contiguous and of one dimension, got ", t.sizes());
  }
}

// crow, col and, where `indexed`, perhaps index.
inline void check_pattern(const char* op, const char* name, at::TensorList pattern, bool indexed,
                          const at::Tensor& like) {
  TORCH_CHECK_VALUE(pattern.size() == 2 || (indexed && pattern.size() == 3), op, ": ", name, " must be [crow, col]",
                    indexed ? " or [crow, col, index]" : "", ", got ", pattern.size(), " tensors");
  check_indices(op, name, pattern, like);
  TORCH_CHECK_VALUE(pattern[0].size(0) >= 1, op, ": crow of ", name, " must be (rows + 1,), got ", pattern[0].sizes());
  TORCH_CHECK_VALUE(pattern.size() == 2 || pattern[2].size(0) == pattern[1].size(0), op, ": index of ", name,
                    " must have the size of col, ", pattern[1].sizes(), ", got ", pattern[2].sizes());
}

// The batch of operands of which some have one, given as (has one, its size): -1 where none has.
struct Batch {
  int64_t size = -1;
  void join(const char* op, const char* name, bool batched, int64_t n) {
    if (!batched) return;
    TORCH_CHECK_VALUE(size < 0 || size == n, op, ": ", name, " must have the other operand's batch, ", size, ", got ",
                      n);
    size = n;
  }
};

}  // namespace weft::sparse
