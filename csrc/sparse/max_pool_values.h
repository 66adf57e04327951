// weft::max_pool_values, the values of a max-pooling's transposed Jacobian: 1 where a window has its largest element.
//
//   max_pool_values(input, row, col, kernel, stride, padding, dilation, output_width) -> (B, C * n)
//
// input (B, C, H, W); row and col (n,) int32: input position and window (output position) of the elements of one
// channel, as in the tables of conv_values.h; the four settings have two numbers each, for height and width. Element
// c * n + e of a sample is 1 where torch's max-pooling picks position row[e] in window col[e] of channel c, else 0.
// Ties and NaN are torch's: the first of the largest, the last NaN.
//
// float16, bfloat16, float32, float64. Not differentiable: constant wherever it has a derivative. Deterministic. The
// tables are not checked. Empty inputs give empty values.
#pragma once
#include <ATen/core/Tensor.h>

#include "sparse/max_pool_values_args.h"

namespace weft::sparse {

using RunMaxPool = void (*)(const MaxPool&);

at::Tensor max_pool_values_forward(RunMaxPool run, const at::Tensor& input, const at::Tensor& row,
                                   const at::Tensor& col, at::IntArrayRef kernel, at::IntArrayRef stride,
                                   at::IntArrayRef padding, at::IntArrayRef dilation, int64_t output_width);

void max_pool_values_cpu(const MaxPool& args);

}  // namespace weft::sparse
