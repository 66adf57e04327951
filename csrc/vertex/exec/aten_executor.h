// Steps that ATen runs on every device: it has the libraries, and keeps their handles, workspaces and settings.
#pragma once
#include <ATen/core/Tensor.h>

#include "vertex/exec/executor.h"

namespace weft::vertex {

class AtenExecutor : public Executor {
 public:
  explicit AtenExecutor(at::Device device) : device_(device) {}
  void begin(const Memory& memory) override { memory_ = &memory; }

 protected:
  void product(const Step& step, int64_t first, int64_t count) override;
  void outer(const Step& step, int64_t first, int64_t count, bool more) override;
  void totals(std::span<const Entry> entries) override;
  void zero(const Step& step, int64_t first, int64_t count) override;

  const Memory& memory() const { return *memory_; }
  at::Device device() const { return device_; }

 private:
  at::Tensor view(void* data, at::IntArrayRef sizes, at::IntArrayRef strides, DType dtype) const;
  // Columns of those rows of a buffer.
  at::Tensor rows(int32_t buffer, int64_t first, int64_t count, int64_t column, int64_t width) const;
  at::Tensor rows(int32_t buffer, int64_t first, int64_t count) const;
  at::Tensor view(const Matrix& matrix) const;

  at::Device device_;
  const Memory* memory_ = nullptr;
};

}  // namespace weft::vertex
