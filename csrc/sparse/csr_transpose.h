// weft::csr_transpose(crow, col, columns) -> (crow, col, index): the pattern of the transposed matrix. Element e of it
// is element index[e] of the given one; columns increase within a row. All of the dtype and on the device of crow;
// deterministic.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

#include "common/op_handle.h"

namespace weft::sparse {

std::tuple<at::Tensor, at::Tensor, at::Tensor> csr_transpose(const at::Tensor& crow, const at::Tensor& col,
                                                             int64_t columns);

inline const OpHandle<std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, c10::SymInt)>
    csr_transpose_op("weft::csr_transpose");

}  // namespace weft::sparse
