// Checks of zvc_compress and zvc_decompress, for both devices.
#include "offload/zvc_compress.h"

#include "common/check.h"
#include "common/integers.h"

namespace weft::offload {
namespace {

bool is_compressible(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

}  // namespace

at::Tensor check_compressible(const char* op, const at::Tensor& x) {
  TORCH_CHECK_TYPE(is_compressible(x.scalar_type()), op, ": x must be float32, float16 or bfloat16, got ",
                   x.scalar_type());
  return x.contiguous();
}

int64_t check_numel(const char* op, at::IntArrayRef shape) {
  int64_t n = 1;
  bool fits = true, empty = false;
  for (int64_t size : shape) {
    TORCH_CHECK_VALUE(size >= 0, op, ": shape must not have negative sizes, got ", shape);
    empty |= size == 0;
    fits &= !__builtin_mul_overflow(n, size, &n);
  }
  TORCH_CHECK_VALUE(fits || empty, op, ": shape ", shape, " has too many elements");
  return empty ? 0 : n;
}

void check_compressed(const char* op, const char* name, const at::Tensor& words, const at::Tensor& values) {
  TORCH_CHECK_TYPE(words.scalar_type() == at::kInt, op, ": ", name, " must be int32, got ", words.scalar_type());
  TORCH_CHECK_TYPE(is_compressible(values.scalar_type()), op, ": values must be float32, float16 or bfloat16, got ",
                   values.scalar_type());
  TORCH_CHECK_VALUE(words.dim() == 1, op, ": ", name, " must have one dimension, got ", words.sizes());
  TORCH_CHECK_VALUE(values.dim() == 1, op, ": values must have one dimension, got ", values.sizes());
  TORCH_CHECK(words.device() == values.device(), op, ": ", name, " must be on the device of values, ", values.device(),
              ", got ", words.device());
}

int64_t check_zvc(const char* op, const at::Tensor& mask, const at::Tensor& values, at::IntArrayRef shape) {
  check_compressed(op, "mask", mask, values);
  const int64_t n = check_numel(op, shape);
  TORCH_CHECK_VALUE(mask.numel() == n / 32 + (n % 32 != 0), op,
                    ": mask must have ceil(n/32) = ", n / 32 + (n % 32 != 0), " words for shape ", shape, ", got ",
                    mask.numel());
  return n;
}

}  // namespace weft::offload
