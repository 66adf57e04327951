// weft::csr_mm and weft::csr_sampled_mm, batched products of a CSR matrix with dense ones, each other's gradients.
//
//   csr_mm(pattern, transposed, values, x)                        out[b, i, c] = sum_e values[b, e] x[b, col[e], c]
//   csr_sampled_mm(pattern, transposed, left, right, shared)      out[b, e] = sum_c left[b, row(e), c] right[b, col[e],
//   c]
//
// pattern     crow (rows + 1,), col (nnz,), both int32 or both int64. A third tensor, index (nnz,), says where the
// value
//             of each element lies: values[b, index[e]]. csr_sampled_mm has none: its result is in the pattern's order.
// transposed  the pattern of the transposed matrix, for the gradients: [] where none is wanted, or one is made when it
// is.
//             Of a pattern without index it has one, and the other way round.
// values      (nnz,), shared by the batch, or (B, nnz). None: ones, so that the product is a sum of selected elements.
// x, right    (columns, k) or (B, columns, k). left: (rows, k) or (B, rows, k).
// out         (rows, k), or (B, rows, k) where an operand has a batch; csr_sampled_mm: (B, nnz), or with `shared`
// (nnz,),
//             the sum over the batch.
//
// float16, bfloat16, float32, float64; half precision is summed in float32. Sums have a fixed order: two runs give the
// same bits. A sample meets no number of another. Indices are not checked: that is done where a BatchedCSR is made.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "common/op_handle.h"
#include "sparse/csr_mm_args.h"

namespace weft::sparse {

using RunMm = void (*)(const CsrMm&);
using RunSampledMm = void (*)(const CsrSampledMm&);

at::Tensor csr_mm_forward(RunMm run, at::TensorList pattern, const std::optional<at::Tensor>& values,
                          const at::Tensor& x);
at::Tensor csr_sampled_mm_forward(RunSampledMm run, at::TensorList pattern, const at::Tensor& left,
                                  const at::Tensor& right, bool shared);

void csr_mm_cpu(const CsrMm& args);
void csr_sampled_mm_cpu(const CsrSampledMm& args);

inline const OpHandle<at::Tensor(at::TensorList, at::TensorList, const std::optional<at::Tensor>&, const at::Tensor&)>
    csr_mm_op("weft::csr_mm");
inline const OpHandle<at::Tensor(at::TensorList, at::TensorList, const at::Tensor&, const at::Tensor&, bool)>
    csr_sampled_mm_op("weft::csr_sampled_mm");

}  // namespace weft::sparse
