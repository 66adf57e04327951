// Products of two CSR matrices with planned patterns: weft::csr_matmul_plan (symbolic), weft::csr_matmul and its
// gradients weft::csr_matmul_left and weft::csr_matmul_right (numeric).
//
//   csr_matmul_plan(a, b) -> (crow, col, starts, left, right, info)
//     a, b     [crow, col], int32 or int64, on any device; the work is done on the CPU, and the device is waited for.
//     crow, col  the pattern of a * b: every element that has a scalar product; columns sorted.
//     info     [kind, scalar products], int64 on the CPU. RuntimeError where these are more than kMaxProducts.
//     kind     0: products are found again from the patterns; there are no lists.
//              1: every row of a has one element at most, and a row of the product is a multiple of a row of b. No
//              lists. 2: listed: element e of the product is the sum of a[left[s]] b[right[s]] for starts[e] <= s <
//              starts[e + 1].
//                 Empty starts: one each, s = e. Empty left: left[s] = s. Taken where crow, col and lists take at most
//                 as much memory as the two operands and the product twice, in float32.
//
//   csr_matmul(patterns, kind, x, y)                 values of the product, (nnz,), or (B, nnz) where x or y has a
//   batch csr_matmul_left(patterns, kind, y, g, shared)    values on a: sum over k of y[j, k] g[i, k]
//   csr_matmul_right(patterns, kind, x, g, shared)   values on b: sum over i of x[i, j] g[i, k]
//     patterns  a's crow, col; b's crow, col; the product's crow, col; starts, left, right; and, for csr_matmul_right,
//     crow,
//               col, index of a transposed, which is made where it is missing.
//     x, y, g   values on a, b and the product, (nnz,) or (B, nnz). `shared`: the sum over the batch, (nnz,).
//
// <g, a b> is linear in x, y and g, and the three ops are its derivatives: gradients of any order follow. float16,
// bfloat16, float32, float64; half precision is summed in float32. Sums have a fixed order; samples do not meet.
// Indices are trusted.
#pragma once
#include <ATen/core/Tensor.h>

#include "sparse/csr_matmul_args.h"

namespace weft::sparse {

constexpr int64_t kMaxProducts = int64_t(1) << 35;  // half a minute of the symbolic phase on two cores

using RunMatmul = void (*)(const CsrMatmul&);

at::Tensor csr_matmul_forward(RunMatmul run, at::TensorList patterns, int64_t kind, const at::Tensor& x,
                              const at::Tensor& y);
at::Tensor csr_matmul_left_forward(RunMatmul run, at::TensorList patterns, int64_t kind, const at::Tensor& y,
                                   const at::Tensor& g, bool shared);
at::Tensor csr_matmul_right_forward(RunMatmul run, at::TensorList patterns, int64_t kind, const at::Tensor& x,
                                    const at::Tensor& g, bool shared);

void csr_matmul_cpu(const CsrMatmul& args);
void csr_matmul_left_cpu(const CsrMatmul& args);
void csr_matmul_right_cpu(const CsrMatmul& args);

}  // namespace weft::sparse
