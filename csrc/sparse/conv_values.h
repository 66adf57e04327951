// weft::conv_pattern, weft::conv_values and weft::conv_values_backward: the transposed Jacobian of what slides windows
// over its input, as CSR, without an index per element.
//
// `windows` are tables of one channel of input and one of output, made by python/weft/_sparse/windows.py; all int32:
//   crow (P + 1,)       for each of P input positions where its elements begin, in order of output positions
//   row (n,), col (n,)  input and output position of each element
//   tap_crow (n + 1,), taps            which taps of the kernel join the two (several where padding folds)
//   tap_crow_t (K + 1,), taps_t        which elements each of K taps is in
// The matrix has `groups` blocks on its diagonal, each of in_channels x out_channels (of one group) copies of that
// table. Row (channel, position), column (channel, position), columns sorted: the element of output channel co, and
// element w of the table, lies at
//   channel * out_channels * n + out_channels * crow[row[w]] + co * (crow[row[w] + 1] - crow[row[w]]) + w -
//   crow[row[w]].
//
//   conv_pattern(windows, groups, in_channels, out_channels, output_positions, wide) -> (crow, col), int64 if `wide`
//   conv_values(weight, windows, groups) -> values (nnz,); weight (groups * out_channels, in_channels, K)
//   conv_values_backward(grad, windows, groups, out_channels, in_channels) -> (groups * out_channels, in_channels, K)
//
// The last two are linear and each other's gradient. float16, bfloat16, float32, float64; half precision is summed in
// float32. Deterministic. The tables are not checked.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

#include "common/op_handle.h"
#include "sparse/conv_values_args.h"

namespace weft::sparse {

using RunConv = void (*)(const Conv&);

std::tuple<at::Tensor, at::Tensor> conv_pattern_forward(RunConv run, at::TensorList windows, int64_t groups,
                                                        int64_t in_channels, int64_t out_channels,
                                                        int64_t output_positions, bool wide);
at::Tensor conv_values_forward(RunConv run, const at::Tensor& weight, at::TensorList windows, int64_t groups);
at::Tensor conv_values_gradient(RunConv run, const at::Tensor& grad, at::TensorList windows, int64_t groups,
                                int64_t out_channels, int64_t in_channels);

void conv_pattern_cpu(const Conv& args);
void conv_values_cpu(const Conv& args);
void conv_values_backward_cpu(const Conv& args);

inline const OpHandle<at::Tensor(const at::Tensor&, at::TensorList, int64_t)> conv_values_op("weft::conv_values");
inline const OpHandle<at::Tensor(const at::Tensor&, at::TensorList, int64_t, int64_t, int64_t)> conv_values_backward_op(
    "weft::conv_values_backward");

}  // namespace weft::sparse
