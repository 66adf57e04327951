#include "vertex/exec/aten_executor.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <array>

namespace weft::vertex {

at::Tensor AtenExecutor::view(void* data, at::IntArrayRef sizes, at::IntArrayRef strides, DType dtype) const {
  const auto options = at::TensorOptions().dtype(scalar_type(dtype)).device(device_);
  return at::for_blob(data, sizes).strides(strides).options(options).target_device(device_).make_tensor();
}

at::Tensor AtenExecutor::rows(int32_t buffer, int64_t first, int64_t count, int64_t column, int64_t width) const {
  const Place& place = memory_->buffers[buffer];
  const DType dtype = memory_->program.buffers[buffer].dtype;
  const int64_t before = (first * place.stride + column) * static_cast<int64_t>(element_size(dtype));
  void* data = place.data == nullptr ? nullptr : static_cast<char*>(place.data) + before;
  return view(data, std::array{count, width}, std::array{place.stride, int64_t{1}}, dtype);
}

at::Tensor AtenExecutor::rows(int32_t buffer, int64_t first, int64_t count) const {
  return rows(buffer, first, count, 0, memory_->program.buffers[buffer].width);
}

at::Tensor AtenExecutor::view(const Matrix& m) const {
  return view(m.data, std::array{m.rows, m.columns}, std::array{m.row_stride, m.column_stride}, m.dtype);
}

void AtenExecutor::product(const Step& step, int64_t first, int64_t count) {
  at::Tensor target = rows(step.target, first, count);
  const at::Tensor source = rows(step.source, first, count), matrix = view(memory_->matrices[step.matrix]);
  const at::Tensor factor = step.transposed ? matrix.t() : matrix;
  if (step.bias < 0) {
    at::mm_out(target, source, factor);
  } else {
    at::addmm_out(target, rows(step.bias, 0, 1).squeeze(0), source, factor);
  }
}

void AtenExecutor::outer(const Step& step, int64_t first, int64_t count, bool more) {
  at::Tensor found = view(memory_->matrix_gradients[step.matrix]);
  const at::Tensor left = rows(step.source, first, count).t(), right = rows(step.target, first, count);
  more ? at::addmm_out(found, found, left, right) : at::mm_out(found, left, right);
}

void AtenExecutor::totals(std::span<const Entry> entries) {
  for (const Entry& e : entries) {
    const Step& step = *e.step;
    const Matrix& m = memory_->vector_gradients[step.vector];
    const bool fresh = step.whole && !e.more;
    if (!e.more && !fresh) view(m).zero_();
    const auto bytes = static_cast<int64_t>(element_size(m.dtype));
    at::Tensor found = view(static_cast<char*>(m.data) + step.first * bytes, std::array{int64_t{step.width}},
                            std::array{int64_t{1}}, m.dtype);
    const at::Tensor source = rows(step.source, e.first, e.count, step.column, step.width);
    if (fresh) {
      at::sum_out(found, source, 0, /*keepdim=*/false, scalar_type(m.dtype));
    } else {
      found.add_(at::sum(source, 0, /*keepdim=*/false, scalar_type(m.dtype)));
    }
  }
}

void AtenExecutor::zero(const Step& step, int64_t first, int64_t count) {
  const bool outer = step.kind == Step::Kind::kOuter;
  (outer ? view(memory_->matrix_gradients[step.matrix]) : rows(step.target, first, count)).zero_();
}

}  // namespace weft::vertex
