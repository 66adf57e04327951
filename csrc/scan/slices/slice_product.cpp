#include "scan/slices/slice_product.h"

#include <ATen/ops/empty.h>

#include "common/check.h"

namespace weft::scan {

at::Tensor slice_product(ProductInto run, const at::Tensor& A, bool reverse, bool transpose) {
  const char* const op = "slice_product";
  const auto type = A.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, op, ": A must be float32 or float64, got ", type);
  TORCH_CHECK_VALUE(A.dim() == 4 && A.size(2) == A.size(3), op, ": A must be (T, B, H, H), got ", A.sizes());
  DenseProduct p{};
  p.T = A.size(0), p.B = A.size(1), p.H = A.size(2), p.wide = type == at::kDouble;
  const at::Tensor out = at::empty({p.B, p.H, p.H}, A.options().dtype(p.wide ? at::kLong : at::kInt));
  if (out.numel() == 0) return out;
  const int64_t last = reverse && p.T > 0 ? (p.T - 1) * A.stride(0) : 0;
  p.A = static_cast<const char*>(A.const_data_ptr()) + last * int64_t(A.element_size());
  p.A_t = reverse ? -A.stride(0) : A.stride(0), p.A_b = A.stride(1);
  p.A_row = A.stride(transpose ? 3 : 2), p.A_col = A.stride(transpose ? 2 : 3);
  run(p, out);
  return out;
}

}  // namespace weft::scan
