// What the numeric kernels of csr_matmul.h take. Torch-free. A batch stride of 0 is an operand that the batch shares.
#pragma once
#include "sparse/types.h"

namespace weft::sparse {

struct CsrMatmul {
  DType dtype;
  bool wide, shared;
  int64_t batch, rows, inner;  // a is rows x inner
  int64_t a_nnz, b_nnz, c_nnz;
  const void *a_crow, *a_col, *b_crow, *b_col, *c_crow, *c_col;
  const void *axpy, *accumulate, *gather;  // gather may be null: all elements of the product
  int64_t axpy_rows, accumulate_rows, gather_elements, gather_products;
  const void *starts, *left, *right;  // each may be null
  const void* shared_lists;           // null: each gathered element has a list of its own
  int64_t gather_rows;                // 0 where shared_lists is null; `gather` has them then, or is null for all
  bool of_rows;                       // right is counted from b's rows; on a CPU alone
  const void* expand;                 // rows that a GPU expands, and a CPU accumulates
  int64_t expand_rows;
  const void *pieces, *segments;  // of them, see sparse/plan.h, Expansion; of segments left, then right
  const int16_t* lists;
  int64_t piece_count, segment_count;
  const void* narrow;                    // null, or of b's rows, see list_narrow; rows that accumulate are then by it
  const void *t_crow, *t_col, *t_index;  // a transposed; csr_matmul_right alone
  const void *x, *y, *g;                 // on a, b and the product: the two that are operands
  int64_t x_batch, y_batch, g_batch;
  void* out;
};

}  // namespace weft::sparse
