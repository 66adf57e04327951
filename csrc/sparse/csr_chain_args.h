// One product of csr_chain. Torch-free.
#pragma once
#include "sparse/types.h"

namespace weft::sparse {

struct CsrLink {
  const void *crow, *col;  // null: diagonal
  const void* values;
  const void* x;
  void* out;
  int64_t values_batch;  // 0: shared by the batch
  int64_t rows, columns, nnz;
};

}  // namespace weft::sparse
