// weft::csr_transpose(crow, col, columns) -> (crow, col, index): the pattern of the transposed matrix. Element e of it
// is element index[e] of the given one; columns increase within a row. All of the dtype and on the device of crow;
// deterministic.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

namespace weft::sparse {

std::tuple<at::Tensor, at::Tensor, at::Tensor> csr_transpose(const at::Tensor& crow, const at::Tensor& col,
                                                             int64_t columns);

}  // namespace weft::sparse
