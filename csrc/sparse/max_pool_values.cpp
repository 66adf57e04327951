// Checks and allocation of max_pool_values, for both devices; CPU registration.
#include "sparse/max_pool_values.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "common/integers.h"
#include "common/tensor.h"
#include "sparse/tensors.h"

namespace weft::sparse {
namespace {

// Elements of all windows of one dimension of n that lie in it.
int64_t elements_of(int64_t n, int64_t outputs, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  int64_t sum = 0;
  for (int64_t o = 0; o < outputs; ++o) {
    const int64_t begin = o * stride - padding, first = begin < 0 ? ceil_div(-begin, dilation) : 0;
    const int64_t end = begin < n ? std::min(kernel, (n - 1 - begin) / dilation + 1) : 0;
    sum += std::max<int64_t>(0, end - first);
  }
  return sum;
}

}  // namespace

at::Tensor max_pool_values_forward(RunMaxPool run, const at::Tensor& input, const at::Tensor& crow,
                                   const at::Tensor& col, at::IntArrayRef kernel, at::IntArrayRef stride,
                                   at::IntArrayRef padding, at::IntArrayRef dilation, at::IntArrayRef output) {
  constexpr const char* kOp = "max_pool_values";
  check_floating(kOp, "input", input);
  check_indices(kOp, "crow and col", {crow, col}, input);
  TORCH_CHECK_TYPE(!is_wide(crow), kOp, ": crow and col must be int32");
  TORCH_CHECK_VALUE(input.dim() == 4, kOp, ": input must be (B, C, H, W), got ", input.sizes());
  TORCH_CHECK_VALUE(crow.size(0) == input.size(2) * input.size(3) + 1, kOp, ": crow must be (H W + 1,) = (",
                    input.size(2) * input.size(3) + 1, ",), got ", crow.sizes());
  MaxPool m{};
  const auto two = [&](const char* name, at::IntArrayRef from, int64_t least, int(&to)[2]) {
    TORCH_CHECK_VALUE(from.size() == 2 && std::min(from[0], from[1]) >= least, kOp, ": ", name,
                      " must be two numbers from ", least, ", got ", from);
    std::copy_n(from.begin(), 2, to);
  };
  two("kernel", kernel, 1, m.kernel), two("stride", stride, 1, m.stride);
  two("padding", padding, 0, m.padding), two("dilation", dilation, 1, m.dilation);
  int sizes[2];
  two("output", output, 0, sizes);
  int64_t elements = 1;
  for (int d = 0; d < 2; ++d) {
    elements *= elements_of(input.size(2 + d), sizes[d], kernel[d], stride[d], padding[d], dilation[d]);
  }
  TORCH_CHECK_VALUE(col.size(0) == elements, kOp, ": col must be (n,) for the n = ", elements,
                    " elements of all windows, got ", col.sizes());
  const at::Tensor in = input.contiguous();
  at::Tensor out = at::empty({input.size(0), input.size(1) * col.size(0)}, input.options());
  if (out.numel() == 0) return out;
  m.dtype = dtype_of(input), m.crow = crow.const_data_ptr<int32_t>(), m.col = col.const_data_ptr<int32_t>();
  m.planes = input.size(0) * input.size(1), m.elements = col.size(0);
  m.height = int(input.size(2)), m.width = int(input.size(3)), m.output_height = sizes[0], m.output_width = sizes[1];
  m.in = in.const_data_ptr(), m.out = out.mutable_data_ptr();
  run(m);
  return out;
}

namespace {

at::Tensor pool_values_cpu(const at::Tensor& input, const at::Tensor& crow, const at::Tensor& col,
                           at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
                           at::IntArrayRef dilation, at::IntArrayRef output) {
  return max_pool_values_forward(max_pool_values_cpu, input, crow, col, kernel, stride, padding, dilation, output);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("max_pool_values", pool_values_cpu);
}

}  // namespace weft::sparse
