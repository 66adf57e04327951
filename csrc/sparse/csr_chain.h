// weft::csr_chain(grad, crows, cols, values) -> Tensor[]: products of sparse matrices and a vector, one after the
// other.
//
//   g[0] = grad (B, n_0);  out[k] = g[k + 1] = J_k g[k], (B, n_(k+1))
//
// crows[k] (n_(k+1) + 1,) and cols[k] (nnz_k,) are the pattern of J_k, int32 or int64, all the same; both empty: J_k is
// diagonal. values[k] is (nnz_k,), shared by the batch, or (B, nnz_k).
//
// weft::layer_chain(grad, crows, cols, values, sources, reads) -> Tensor[]: the same of layers whose Jacobians nobody
// has written: a product reads what its layer has kept.
//
// values[k] and sources[k] by reads[k]:
//   0   numbers of the matrix: without a source as above, else element e is values[k].flatten()[source[e]], shared by
//       the batch: a convolution's weight. source (nnz,), of the indices' dtype; empty: none. Of a matrix without
//       elements values[k] may have any shape: a weight of zeros alone.
//   -1  of a diagonal, (B, n): what a ReLU gave. The matrix has 0 where it is not above 0, and 1 elsewhere, so at NaN.
//   p   > 0, of a max-pooling over planes of p elements, (B, columns) int64: which element of its plane each output is.
//       An element has 1 where that is its row, else 0.
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

// Without sources and reads: csr_chain.
std::vector<at::Tensor> csr_chain_forward(RunChain run, const at::Tensor& grad, at::TensorList crows,
                                          at::TensorList cols, at::TensorList values, at::TensorList sources = {},
                                          at::IntArrayRef reads = {});

// The values of layer_chain's matrices, written.
std::vector<at::Tensor> written_values(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                       at::TensorList values, at::TensorList sources, at::IntArrayRef reads);

inline const OpHandle<std::vector<at::Tensor>(const at::Tensor&, at::TensorList, at::TensorList, at::TensorList)>
    csr_chain_op("weft::csr_chain");
inline const OpHandle<std::vector<at::Tensor>(const at::Tensor&, at::TensorList, at::TensorList, at::TensorList,
                                              at::TensorList, at::IntArrayRef)>
    layer_chain_op("weft::layer_chain");

}  // namespace weft::sparse
