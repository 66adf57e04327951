// weft::max_pool_values, the values of a max-pooling's transposed Jacobian: 1 where a window has its largest element.
//
//   max_pool_values(input, crow, col, kernel, stride, padding, dilation, output) -> (B, C * n)
//
// input (B, C, H, W); crow (H W + 1,) and col (n,) int32: the elements of one channel by input position, and the window
// (output position) of each, as in the tables of conv_values.h; the four settings and the output's size have two
// numbers each, for height and width. Element c * n + e of a sample is 1 where torch's max-pooling picks e's position
// in e's window of channel c, else 0. Ties and NaN are torch's: the first of the largest, the last NaN.
//
// float16, bfloat16, float32, float64. Not differentiable: constant wherever it has a derivative. Deterministic. Of the
// tables only the sizes are checked. Empty inputs, and windows wholly in the padding, give empty values.
#pragma once
#include <ATen/core/Tensor.h>

#include "common/op_handle.h"
#include "sparse/max_pool_values_args.h"

namespace weft::sparse {

using RunMaxPool = void (*)(const MaxPool&);

at::Tensor max_pool_values_forward(RunMaxPool run, const at::Tensor& input, const at::Tensor& crow,
                                   const at::Tensor& col, at::IntArrayRef kernel, at::IntArrayRef stride,
                                   at::IntArrayRef padding, at::IntArrayRef dilation, at::IntArrayRef output);

void max_pool_values_cpu(const MaxPool& args);

inline const OpHandle<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::IntArrayRef,
                                 at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef)>
    max_pool_values_op("weft::max_pool_values");

}  // namespace weft::sparse
