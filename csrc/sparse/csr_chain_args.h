// One product of csr_chain or layer_chain. Torch-free.
#pragma once
#include "sparse/types.h"

namespace weft::sparse {

struct CsrLink {
  const void *crow, *col;  // null: diagonal
  const void* values;
  const void* x;
  void* out;
  const void* source;    // where in `values` each element's number is; null: in order
  int64_t values_batch;  // 0: shared by the batch
  int64_t rows, columns, nnz;
  int64_t reads;  // see csr_chain.h, layer_chain; positive: `values` are int64
};

}  // namespace weft::sparse
