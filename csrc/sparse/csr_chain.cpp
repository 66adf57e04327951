// Checks and allocation of csr_chain, for both devices.
#include "sparse/csr_chain.h"

#include <ATen/ops/empty.h>

#include "common/tensor.h"
#include "sparse/tensors.h"

namespace weft::sparse {

std::vector<at::Tensor> csr_chain_forward(RunChain run, const at::Tensor& grad, at::TensorList crows,
                                          at::TensorList cols, at::TensorList values) {
  constexpr const char* kOp = "csr_chain";
  check_floating(kOp, "grad", grad);
  TORCH_CHECK_VALUE(grad.dim() == 2, kOp, ": grad must be (B, n), got ", grad.sizes());
  TORCH_CHECK_VALUE(crows.size() == values.size() && cols.size() == values.size(), kOp,
                    ": crows, cols and values must have one tensor per product");
  check_indices(kOp, "crows", crows, grad);
  check_indices(kOp, "cols", cols, grad);
  const int64_t batch = grad.size(0);
  std::vector<at::Tensor> out, kept = {grad.contiguous()};  // what the links point into
  std::vector<CsrLink> links;
  at::Tensor x = kept[0];
  for (size_t k = 0; k < values.size(); ++k) {
    const std::string name = "values[" + std::to_string(k) + "]";
    check_like(kOp, name.c_str(), values[k], "grad", grad);
    TORCH_CHECK_TYPE(is_wide(crows[k]) == is_wide(cols[k]) && is_wide(crows[k]) == is_wide(crows[0]), kOp,
                     ": all indices must have one dtype");
    const bool diagonal = crows[k].numel() == 0;
    const int64_t nnz = diagonal ? x.size(1) : cols[k].size(0);
    TORCH_CHECK_VALUE((values[k].dim() == 1 || (values[k].dim() == 2 && values[k].size(0) == batch)) &&
                          values[k].size(-1) == nnz && (diagonal ? cols[k].numel() == 0 : true),
                      kOp, ": ", name, " must be (", nnz, ",) or (", batch, ", ", nnz, "), got ", values[k].sizes());
    CsrLink link{};
    link.rows = diagonal ? nnz : crows[k].size(0) - 1, link.columns = x.size(1), link.nnz = nnz;
    kept.push_back(values[k].contiguous());
    link.values = kept.back().numel() > 0 ? kept.back().const_data_ptr() : nullptr;
    link.values_batch = values[k].dim() == 2 ? nnz : 0;
    if (!diagonal) {
      link.crow = crows[k].const_data_ptr();
      link.col = nnz > 0 ? cols[k].const_data_ptr() : crows[k].const_data_ptr();  // not null: no diagonal
    }
    link.x = x.numel() > 0 ? x.const_data_ptr() : nullptr;
    out.push_back(at::empty({batch, link.rows}, grad.options()));
    link.out = out.back().numel() > 0 ? out.back().mutable_data_ptr() : nullptr;
    if (link.out) links.push_back(link);
    x = out.back();
  }
  if (!links.empty()) run(links, dtype_of(grad), is_wide(crows[0]), batch);
  return out;
}

}  // namespace weft::sparse
