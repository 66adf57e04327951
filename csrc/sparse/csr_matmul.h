// Products of two CSR matrices with planned patterns: weft::csr_matmul_plan (symbolic), weft::csr_matmul and its
// gradients weft::csr_matmul_left and weft::csr_matmul_right (numeric).
//
//   csr_matmul_plan(a, b, *, gpu) -> (crow, col, axpy, accumulate, gather, starts, left, right, shared,
//                                     expand, pieces, segments, lists, narrow, info)
//     a, b     [crow, col], int32 or int64, on any device; the work is done on the CPU, and the device is waited for.
//     gpu      whether a GPU will multiply; None: whether a is on one. A plan for a GPU serves a CPU, not the reverse.
//     crow, col  the pattern of a * b: every element that has a scalar product; columns sorted.
//     Every row of the product is computed in one of four ways (sparse/plan.h chooses):
//     axpy      rows to whose products every row of b brings all columns: sums of whole rows of b, term by term. A row
//               of a with one element, and blocks that are dense, are of this kind.
//     gather    elements (null where it is all of them) with few products each, which are listed: element l is the sum
//               of a[left[s]] b[right[s]] for starts[l] <= s < starts[l + 1]. Empty starts: one each, s = l. Empty
//               left: left[s] = s; empty right: right[s] = s. Diagonal and permutation operands are of this kind:
//               gathers, and where all three are empty an elementwise product.
//     shared    not empty where gathered rows share few lists, which are then all there is (sparse/plan.h,
//               SharedLists: where, then base unless right is counted from b's rows); `gather` has rows, not elements,
//               null where it is all of them. Of a plan for a GPU there are then starts, left and base.
//     expand    rows whose products a GPU's blocks write into their shared memory and sum there, by lists of two bytes
//     a
//               product that pieces of the product which are alike share (sparse/plan.h, Expansion: pieces, segments,
//               lists, the last int16). A CPU accumulates them; a plan for it has none.
//     accumulate  all other rows: products are found again from the patterns and added up in windows of columns.
//     narrow    not empty where b has few columns and most of them in its rows: where each row of b begins and which
//               columns it has (sparse/plan.h, list_narrow), by which a GPU finds products of rows that accumulate,
//               which are then all. A plan for a CPU has none.
//     info      scalar products: of all rows, of those of axpy, gathered and expanded; int64 on the CPU.
//     crow, col and lists take at most twice the memory of the two operands and the product, with values in float32.
//     RuntimeError where there are more than kMaxProducts scalar products.
//
//   csr_matmul(patterns, x, y)                 values of the product, (nnz,), or (B, nnz) where x or y has a batch
//   csr_matmul_left(patterns, y, g, shared)    values on a: sum over k of y[j, k] g[i, k]
//   csr_matmul_right(patterns, x, g, shared)   values on b: sum over i of x[i, j] g[i, k]
//     patterns  a's crow, col; b's crow, col; the product's crow, col; axpy, accumulate, gather, starts, left, right,
//               shared, expand, pieces, segments, lists, narrow; and, for csr_matmul_right, crow, col, index of a
//               transposed, which is made where it is missing.
//     x, y, g   values on a, b and the product, (nnz,) or (B, nnz). `shared`: the sum over the batch, (nnz,).
//
// <g, a b> is linear in x, y and g, and the three ops are its derivatives: gradients of any order follow. float16,
// bfloat16, float32, float64; half precision is summed in float32. Sums have a fixed order; samples do not meet.
// Indices are trusted.
#pragma once
#include <ATen/core/Tensor.h>

#include "common/op_handle.h"
#include "sparse/csr_matmul_args.h"

namespace weft::sparse {

constexpr int64_t kMaxProducts = int64_t(1) << 35;  // half a minute of the symbolic phase on two cores

// Bytes of host memory that the columns of rows may take while a plan is made.
int64_t& kept_bytes();

using RunMatmul = void (*)(const CsrMatmul&);

at::Tensor csr_matmul_forward(RunMatmul run, at::TensorList patterns, const at::Tensor& x, const at::Tensor& y);
at::Tensor csr_matmul_left_forward(RunMatmul run, at::TensorList patterns, const at::Tensor& y, const at::Tensor& g,
                                   bool shared);
at::Tensor csr_matmul_right_forward(RunMatmul run, at::TensorList patterns, const at::Tensor& x, const at::Tensor& g,
                                    bool shared);

void csr_matmul_cpu(const CsrMatmul& args);
void csr_matmul_left_cpu(const CsrMatmul& args);
void csr_matmul_right_cpu(const CsrMatmul& args);

inline const OpHandle<at::Tensor(at::TensorList, const at::Tensor&, const at::Tensor&)> csr_matmul_op(
    "weft::csr_matmul");
inline const OpHandle<at::Tensor(at::TensorList, const at::Tensor&, const at::Tensor&, bool)> csr_matmul_left_op(
    "weft::csr_matmul_left");
inline const OpHandle<at::Tensor(at::TensorList, const at::Tensor&, const at::Tensor&, bool)> csr_matmul_right_op(
    "weft::csr_matmul_right");

}  // namespace weft::sparse
