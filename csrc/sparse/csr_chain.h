// weft::csr_chain(grad, crows, cols, values) -> Tensor[]: products of sparse matrices and a vector, one after the
// other.
//
//   g[0] = grad (B, n_0);  out[k] = g[k + 1] = J_k g[k], (B, n_(k+1))
//
// crows[k] (n_(k+1) + 1,) and cols[k] (nnz_k,) are the pattern of J_k, int32 or int64, all the same; both empty: J_k is
// diagonal. values[k] is (nnz_k,), shared by the batch, or (B, nnz_k).
//
// On CUDA this is one launch for many products, of clusters or of a whole grid whose blocks meet: see
// cuda/csr_chain_kernels.cu. float16, bfloat16, float32, float64; half precision is summed in float32 and rounded at
// every out[k]. Sums have a fixed order; samples do not meet. Indices are trusted. Differentiable to any order, as
// products one after the other.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "common/op_handle.h"
#include "sparse/csr_chain_args.h"

namespace weft::sparse {

using RunChain = void (*)(const std::vector<CsrLink>& links, DType dtype, bool wide, int64_t batch);

std::vector<at::Tensor> csr_chain_forward(RunChain run, const at::Tensor& grad, at::TensorList crows,
                                          at::TensorList cols, at::TensorList values);

inline const OpHandle<std::vector<at::Tensor>(const at::Tensor&, at::TensorList, at::TensorList, at::TensorList)>
    csr_chain_op("weft::csr_chain");

}  // namespace weft::sparse
