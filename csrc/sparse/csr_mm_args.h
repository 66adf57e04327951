// What the kernels of csr_mm and csr_sampled_mm take. Torch-free. All tensors are contiguous; a batch stride of 0 is an
// operand that the batch shares.
#pragma once
#include "sparse/types.h"

namespace weft::sparse {

struct CsrMm {
  DType dtype;
  bool wide;  // indices are int64
  int64_t batch, rows, columns, k, nnz;
  const void *crow, *col, *index;  // index may be null
  const void* values;              // null: ones
  int64_t values_batch;
  const void* x;
  int64_t x_batch;
  void* out;
};

struct CsrSampledMm {
  DType dtype;
  bool wide, shared;
  int64_t batch, rows, columns, k, nnz;
  const void *crow, *col;
  const void *left, *right;
  int64_t left_batch, right_batch;
  void* out;
};

}  // namespace weft::sparse
