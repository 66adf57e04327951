// Checks and allocation of conv_pattern, conv_values and conv_values_backward, for both devices; CPU registration.
#include "sparse/conv_values.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "common/tensor.h"
#include "sparse/tensors.h"

namespace weft::sparse {
namespace {

Conv describe(const char* op, at::TensorList windows, int64_t groups, int64_t in_channels, int64_t out_channels,
              const at::Tensor& like) {
  TORCH_CHECK_VALUE(windows.size() == 7, op, ": windows must be 7 tables, got ", windows.size());
  check_indices(op, "windows", windows, like);
  TORCH_CHECK_TYPE(!is_wide(windows[0]), op, ": windows must be int32");
  TORCH_CHECK_VALUE(windows[0].size(0) >= 1 && windows[5].size(0) >= 1 && windows[1].size(0) == windows[2].size(0) &&
                        windows[3].size(0) == windows[1].size(0) + 1 && windows[4].size(0) == windows[6].size(0),
                    op, ": windows do not fit each other");
  Conv c{};
  c.crow = pointer<int32_t>(windows[0]), c.row = pointer<int32_t>(windows[1]), c.col = pointer<int32_t>(windows[2]);
  c.tap_crow = pointer<int32_t>(windows[3]), c.taps = pointer<int32_t>(windows[4]);
  c.tap_crow_t = pointer<int32_t>(windows[5]), c.taps_t = pointer<int32_t>(windows[6]);
  c.positions = windows[0].size(0) - 1, c.elements = windows[1].size(0), c.kernel = windows[5].size(0) - 1;
  c.joins = windows[4].size(0);
  c.groups = groups, c.in_channels = in_channels, c.out_channels = out_channels;
  return c;
}

int64_t count(const Conv& c) {
  return c.groups * c.in_channels * c.out_channels * c.elements;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> conv_pattern_forward(RunConv run, at::TensorList windows, int64_t groups,
                                                        int64_t in_channels, int64_t out_channels,
                                                        int64_t output_positions, bool wide) {
  TORCH_CHECK_VALUE(!windows.empty(), "conv_pattern: windows must be 7 tables, got none");
  Conv c = describe("conv_pattern", windows, groups, in_channels, out_channels, windows[0]);
  const auto options = windows[0].options().dtype(wide ? at::kLong : at::kInt);
  const at::Tensor crow = at::empty({groups * in_channels * c.positions + 1}, options);
  const at::Tensor col = at::empty({count(c)}, options);
  c.wide = wide, c.output_positions = output_positions;
  c.out = col.mutable_data_ptr(), c.out_crow = crow.mutable_data_ptr();
  run(c);
  return {crow, col};
}

at::Tensor conv_values_forward(RunConv run, const at::Tensor& weight, at::TensorList windows, int64_t groups) {
  check_floating("conv_values", "weight", weight);
  TORCH_CHECK_VALUE(weight.dim() == 3 && groups >= 1 && weight.size(0) % groups == 0,
                    "conv_values: weight must be (groups * out_channels, in_channels, K) with ", groups,
                    " groups, got ", weight.sizes());
  Conv c = describe("conv_values", windows, groups, weight.size(1), weight.size(0) / groups, weight);
  TORCH_CHECK_VALUE(weight.size(2) == c.kernel, "conv_values: weight must have ", c.kernel, " taps, got ",
                    weight.sizes());
  const at::Tensor w = weight.contiguous();
  at::Tensor out = at::empty({count(c)}, weight.options());
  if (out.numel() == 0) return out;
  c.dtype = dtype_of(weight), c.in = w.const_data_ptr(), c.out = out.mutable_data_ptr();
  run(c);
  return out;
}

at::Tensor conv_values_gradient(RunConv run, const at::Tensor& grad, at::TensorList windows, int64_t groups,
                                int64_t out_channels, int64_t in_channels) {
  check_floating("conv_values_backward", "grad", grad);
  Conv c = describe("conv_values_backward", windows, groups, in_channels, out_channels, grad);
  TORCH_CHECK_VALUE(grad.dim() == 1 && grad.size(0) == count(c), "conv_values_backward: grad must be (", count(c),
                    ",), got ", grad.sizes());
  const at::Tensor g = grad.contiguous();
  at::Tensor out = at::empty({groups * out_channels, in_channels, c.kernel}, grad.options());
  if (out.numel() == 0) return out;
  c.dtype = dtype_of(grad), c.in = g.const_data_ptr(), c.out = out.mutable_data_ptr();
  run(c);
  return out;
}

namespace {

std::tuple<at::Tensor, at::Tensor> pattern_cpu(at::TensorList windows, int64_t groups, int64_t in_channels,
                                               int64_t out_channels, int64_t output_positions, bool wide) {
  return conv_pattern_forward(conv_pattern_cpu, windows, groups, in_channels, out_channels, output_positions, wide);
}

at::Tensor values_cpu(const at::Tensor& weight, at::TensorList windows, int64_t groups) {
  return conv_values_forward(conv_values_cpu, weight, windows, groups);
}

at::Tensor values_backward_cpu(const at::Tensor& grad, at::TensorList windows, int64_t groups, int64_t out_channels,
                               int64_t in_channels) {
  return conv_values_gradient(conv_values_backward_cpu, grad, windows, groups, out_channels, in_channels);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("conv_pattern", pattern_cpu);
  m.impl("conv_values", values_cpu);
  m.impl("conv_values_backward", values_backward_cpu);
}

}  // namespace weft::sparse
