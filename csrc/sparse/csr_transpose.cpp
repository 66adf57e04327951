// csr_transpose of ATen operations: a stable sort of the columns. A pattern is transposed once, and the result kept.
#include "sparse/csr_transpose.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>

#include "sparse/tensors.h"

namespace weft::sparse {

std::tuple<at::Tensor, at::Tensor, at::Tensor> csr_transpose(const at::Tensor& crow, const at::Tensor& col,
                                                             int64_t columns) {
  check_pattern("csr_transpose", "pattern", {crow, col}, false, crow);
  const bool narrow = !is_wide(crow);
  TORCH_CHECK_VALUE(columns >= 0 && (!narrow || columns <= std::numeric_limits<int32_t>::max()),
                    "csr_transpose: columns must be at least 0 and a number of ", crow.scalar_type(), ", got ",
                    columns);
  auto [sorted, index] = at::sort(col, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor t_crow = at::searchsorted(sorted, at::arange(columns + 1, col.options()), narrow);
  const at::Tensor t_col = at::searchsorted(crow, index.to(crow.scalar_type()), narrow, /*right=*/true).sub(1);
  return {t_crow, t_col, index.to(crow.scalar_type())};
}

TORCH_LIBRARY_IMPL(weft, CompositeExplicitAutograd, m) {
  m.impl("csr_transpose", csr_transpose);
}

}  // namespace weft::sparse
